"""The cases of the equivalence suite: of every kind, mostly served, and each runs what its script says."""

from __future__ import annotations

import doctest
import importlib
import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _helpers import assert_same
from hypothesis import HealthCheck, Phase, given, seed, settings

import fastpatch
from fastpatch.testing import (
    Comparison,
    LossCall,
    Operand,
    SgdRun,
    SgdStep,
    TensorNumber,
    compare,
    memory,
    note,
    strategies,
)
from fastpatch.testing._loss_call import GRADIENTS
from fastpatch.testing._operands import FLOATS, KINDS, LAYOUTS, special_values

Drawn = list[tuple[Any, Comparison]]


def sample(strategy: Any, count: int) -> list[Any]:
    """Cases of many seeds: after ten examples hypothesis goes on with variations."""
    drawn: list[Any] = []
    for start in range(count):

        @seed(start)
        @settings(
            deadline=None, max_examples=10, derandomize=False, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(strategy)
        def note(case: Any) -> None:
            drawn.append(case)

        note()
    return drawn


@pytest.fixture(scope="module")
def drawn() -> dict[str, Drawn]:
    """Cases of each target, and what came of them."""
    found = {}
    for name, make in strategies.CASES.items():
        found[name] = [(case, case.compare()) for case in sample(make(), 25 if name != "sgd" else 10)]
    return found


# ---------------------------------------------------------------------------------------------------- what is drawn


def test_none_differs_and_all_are_seen(drawn: dict[str, Drawn]) -> None:
    for pairs in drawn.values():
        for case, made in pairs:
            assert made.difference is None, f"{made.difference}\n{case}"
            units = made.fast + sum(made.fallback.values())
            # A group that is refused counts once, even if none of its parameters has a gradient.
            most = case.updates + len(case.steps) * len(case.groups) if isinstance(case, SgdRun) else 1
            assert case.least_units <= units <= most


@pytest.mark.parametrize("name", ["smooth_l1_loss", "huber_loss"])
def test_losses_are_mostly_served_and_of_every_kind(drawn: dict[str, Drawn], name: str) -> None:
    served = [case for case, made in drawn[name] if made.fast]
    assert len(served) > 0.6 * len(drawn[name])
    reasons = Counter(code for _, made in drawn[name] for code in made.fallback)
    assert set(reasons) == {"dtype", "strides", "shape_mismatch", {"huber_loss": "delta"}.get(name, "beta")}

    def seen(what: Callable[[LossCall], Any]) -> set[Any]:
        return {what(case) for case in served}

    assert seen(lambda case: case.kind) == {"float32", "float64", "bfloat16", "float16", "mixed"}
    assert seen(lambda case: case.input.layout) >= set(LAYOUTS) - {"gaps", "gaps between rows"}
    assert seen(lambda case: case.other.layout) >= set(LAYOUTS) - {"gaps", "gaps between rows"}
    assert seen(lambda case: case.input.kind) == set(KINDS)
    assert seen(lambda case: case.gradient) == set(GRADIENTS)
    assert seen(lambda case: case.autocast) == {None, torch.bfloat16, torch.float16}
    assert seen(lambda case: case.arguments["reduction"]) == {"mean", "sum", "none"}
    assert seen(lambda case: len(case.input.shape)) == set(range(5))
    threshold = strategies.THRESHOLD_NAMES[name]
    for kind in (
        lambda case: case.other.dtype == torch.int64,
        lambda case: case.input.shape != case.other.shape,
        lambda case: case.input.needs_grad and case.other.needs_grad,
        lambda case: math.prod(case.input.shape) == 0,
        lambda case: math.prod(case.input.shape) >= strategies.GRAIN and case.threads == 2,
        lambda case: math.frexp(case.arguments[threshold])[0] == 0.5,
    ):
        assert seen(lambda case, kind=kind: bool(kind(case))) == {False, True}  # type: ignore[misc]


def test_steps_are_mostly_served_and_of_every_kind(drawn: dict[str, Drawn]) -> None:
    runs = [case for case, made in drawn["sgd"] if made.fast]
    assert sum(made.fast for _, made in drawn["sgd"]) > 0.7 * sum(case.updates for case, _ in drawn["sgd"])
    assert {code for _, made in drawn["sgd"] for code in made.fallback} == {"hyperparameter", "strides"}
    assert {run.kind for run in runs} == {"float32", "float64", "bfloat16", "float16", "mixed"}
    assert {len(run.steps) for run in runs} == {1, 2, 3, 4}
    assert {len(run.groups) for run in runs} == {1, 2, 3}
    options = [options for run in runs for step in run.steps for options in step.options]
    assert {repr(given["foreach"]) for given in options} == {"None", "True", "False"}
    for name in ("lr", "weight_decay"):
        assert {type(given[name]) for given in options} >= {int, float, TensorNumber}
    late = [
        run for run in runs
        if any(a is None and b is not None
               for one, two in zip(run.steps, run.steps[1:], strict=False)
               for a, b in zip(one.gradients, two.gradients, strict=True))
    ]  # fmt: skip
    assert late
    assert any(math.prod(p.shape) >= strategies.GRAIN for run in runs for group in run.groups for p in group)


def test_what_shall_be_served_is_served() -> None:
    for run in sample(strategies.sgd_runs(odd=False), 3):
        made = run.compare(strict=True)
        assert (made.difference, made.fast, made.fallback) == (None, run.updates, {})


# ---------------------------------------------------------------------------------------------------------- operands


def made_of(source: str) -> torch.Tensor:
    made: torch.Tensor = eval(source, {"torch": torch, "Operand": Operand, "inf": math.inf, "nan": math.nan})
    return made


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 3), (2, 1, 3, 2), (65,), (30, 4)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_operand_is_what_its_source_makes(shape: tuple[int, ...], layout: str, kind: str) -> None:
    for i, dtype in enumerate((*FLOATS, torch.int64, torch.uint8)):
        order = tuple(reversed(range(len(shape))))
        operand = Operand(shape, dtype, layout, order, i % 2 == 0, kind, 10.0, seed=i, threshold=0.3)
        made = operand.make()
        assert made.is_leaf
        assert (made.shape, made.dtype) == (shape, dtype)
        assert made.requires_grad == (operand.needs_grad and dtype.is_floating_point)
        assert_same(operand.make(), made)
        again = made_of(operand.source())
        assert again.is_leaf
        assert_same(again, made)
        assert again.storage_offset() == made.storage_offset()
        assert ("Operand" in operand.source()) == (math.prod(shape) > 64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values_are_numbers_of_the_dtype(dtype: torch.dtype) -> None:
    values = special_values(dtype, 0.3, "huge")
    exact = torch.tensor(values, dtype=dtype).double().tolist()
    threshold = torch.tensor(0.3, dtype=dtype).item()
    assert [a for a, b in zip(values, exact, strict=True) if a != b and a == a and abs(a) != 0.3] == []
    near = sorted({v for v in exact if 0.2 < v < 0.4})
    assert len(near) == 3 and near[1] == threshold
    assert {math.inf, -math.inf, 0.0, 1.0} < set(values)
    assert any(0 < v < torch.finfo(dtype).tiny for v in exact)


# -------------------------------------------------------------------------------------------------------------- CUDA


def as_on_cuda(case: Any) -> Comparison:
    """The text of a case for a GPU, run on the CPU: there, too, sums are only held to be within their bound."""
    names: dict[str, Any] = {}
    text = case.source("cuda:1")
    assert "'cuda:1'" in text
    exec(text.replace("'cuda:1'", "'cpu'").replace("torch.autocast('cuda'", "torch.autocast('cpu'"), names)
    return compare(case.target, names["run"], device="cuda:1")


def test_the_text_for_a_gpu(drawn: dict[str, Drawn]) -> None:
    for name, pairs in drawn.items():
        for case, _ in pairs[:40]:
            found = as_on_cuda(case)
            assert found.difference is None, f"{name}: {found.difference}"


def test_a_loss_that_is_off_by_less_than_its_bound_is_none_on_a_gpu() -> None:
    values = torch.full((100,), 0.1)

    def running(loss: float) -> Callable[[dict[str, Any]], None]:
        def run(seen: dict[str, Any]) -> None:
            seen.update(values=values, reduction="sum")
            seen["loss"] = torch.tensor(loss if fastpatch.is_enabled("huber_loss") else 10.0)

        return run

    assert compare("huber_loss", running(10.000005), device="cuda:0").difference is None
    off = compare("huber_loss", running(10.1), device="cuda:0").difference
    assert off == "loss: 10.100000381469727 is further from the exact one than rounding explains; stock has 10.0"
    assert "instead of nan" not in str(compare("huber_loss", running(math.nan)).difference)


def test_two_runs_on_a_gpu_are_equal() -> None:
    runs: list[int] = []

    def run(seen: dict[str, Any]) -> None:
        runs.append(1)
        seen["gradient"] = torch.tensor(float(len(runs) == 3))

    found = compare("huber_loss", run, device="cuda:0").difference
    assert found is not None and found.startswith(
        "two runs of fastpatch differ: a second run['gradient']: 1 of 1 differ"
    )
    runs.clear()
    assert compare("huber_loss", run, device="cpu").difference is None
    assert len(runs) == 2


# --------------------------------------------------------------------------------------------------------- comparing


def test_errors_and_warnings_are_compared() -> None:
    def run(seen: dict[str, Any]) -> None:
        if fastpatch.is_enabled("sgd"):
            raise ValueError("ours alone")

    assert compare("sgd", run).difference == "error: 'ValueError: ours alone' instead of ''"

    def warn(seen: dict[str, Any]) -> None:
        warnings.warn("stock" if not fastpatch.is_enabled("sgd") else "ours", stacklevel=1)

    assert compare("sgd", warn).difference == "warnings[0]: 'UserWarning: ours' instead of 'UserWarning: stock'"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda a, p, o: a.add_(0), "memory[0]: 1 instead of 0"),
        (lambda a, p, o: a.data[2:].fill_(1), "memory[1]: 2 of 12 differ"),
        (lambda a, p, o: p.data.add_(1), "parameter 0 now: 2 of 2 differ"),
        (lambda a, p, o: p.detach().add_(0), "type and version of parameter 0 now[1]: 1 instead of 0"),
        (lambda a, p, o: p.requires_grad_(False), "parameter 0 now: requires_grad False instead"),
        (lambda a, p, o: setattr(p, "grad", torch.ones(1, 2)), "gradient 0 now: <class"),
        (lambda a, p, o: setattr(p, "data", p.data.as_strided((1, 2), (7, 1))), "parameter 0 now: strides (7, 1)"),
        (lambda a, p, o: o.state[p].update(buffer=1), "order of the state now: 1 items instead of 0"),
        (lambda a, p, o: o.param_groups[0].update(lr=0.5), "lr of group 0 now: 0.5 instead of 0.1"),
    ],
)  # fmt: skip
def test_all_that_is_noted_is_compared(change: Callable[..., None], found: str) -> None:
    def run(seen: dict[str, Any]) -> None:
        around, param = torch.zeros(3), torch.nn.Parameter(torch.ones(1, 2))
        optimizer = torch.optim.SGD([param], lr=0.1)
        if fastpatch.is_enabled("sgd"):
            change(around, param, optimizer)
        seen["memory"] = memory(around[:2])
        note(seen, "now", optimizer)

    assert str(compare("sgd", run).difference).startswith(found)


@pytest.mark.parametrize(
    "name",
    ["_difference", *(f"testing.{name}" for name in ("_operands", "_loss_call", "_sgd_run", "_runner", "strategies"))],
)
def test_examples_in_docstrings(name: str) -> None:
    done = doctest.testmod(importlib.import_module(f"fastpatch.{name}"))
    assert done.attempted and not done.failed


def test_a_case_prints_itself() -> None:
    call = LossCall("smooth_l1_loss", Operand((2,), needs_grad=True), Operand((2,), seed=1), {"beta": math.inf})
    assert "output = F.smooth_l1_loss(input, target, beta=inf)" in str(call)
    assert "from math import inf, nan" in str(call)
    step = SgdStep(({"lr": TensorNumber(0.5, torch.float64)},), (None,))
    assert "'lr': torch.tensor(0.5, dtype=torch.float64)" in str(SgdRun(((Operand((2,)),),), (step,)))
    compile(str(call), "script", "exec")
