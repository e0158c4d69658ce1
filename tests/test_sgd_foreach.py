"""SGD(foreach=True): one operation after another over a whole group shows in p.grad and where memory is shared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _sgd_helpers import (
    DTYPES,
    assert_same,
    bits_equal,
    copy_of,
    params_of,
    served,
    set_grads,
    step_twins,
    twins,
    values,
)
from _sgd_sharing import NESTEROV, listed_twice, same_grad, two
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpatch

# -------------------------------------------------------------------------------------------------- what it writes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("options", "writes"),
    [
        ({}, False),
        ({"momentum": 0.9}, False),
        (NESTEROV, True),
        ({**NESTEROV, "weight_decay": 0.1}, False),
        ({**NESTEROV, "maximize": True}, False),
        ({**NESTEROV, "foreach": False}, False),
        ({**NESTEROV, "foreach": None}, False),
    ],
    ids=str,
)
def test_gradients_are_written_as_stock_writes_them(options: dict[str, Any], writes: bool, dtype: torch.dtype) -> None:
    """With nothing to make a new gradient, Nesterov's momentum is added to p.grad itself; nobody zeroes it here."""
    pair = twins([values((67,), 1, 0, dtype)], [values((67,), 2, 0, dtype)], **{"foreach": True, **options})
    (param,) = params_of(pair[1])
    grad, before = param.grad, copy_of(param.grad)
    version = grad._version
    for number in range(1, 4):
        step_twins(pair, fast=1)
        assert param.grad is grad
        assert grad._version == version + number * writes
        assert bits_equal(grad, before) != writes


def test_gradients_that_are_views_of_one_bucket() -> None:
    """Their version counter is the bucket's."""
    buckets = [values((38,), 3) for _ in range(2)]
    pair = two(foreach=True, **NESTEROV)
    for optimizer, bucket in zip(pair, buckets, strict=True):
        for i, param in enumerate(params_of(optimizer)):
            param.grad = bucket[19 * i : 19 * i + 19]
    for number in range(1, 3):
        step_twins(pair, fast=2)
        assert buckets[1]._version == 2 * number
    assert_same(*buckets)


def test_a_gradient_with_a_graph_is_written_all_the_same() -> None:
    pair = two(foreach=True, **NESTEROV)
    for optimizer in pair:
        for param in params_of(optimizer):
            param.grad = (param * 2).clone()
    step_twins(pair, fast=2)
    assert params_of(pair[1])[0].grad.grad_fn is not None
    for optimizer in pair:
        optimizer.zero_grad()


@pytest.mark.parametrize("which", ["param", "grad", "buffer"])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_lazy_clone_gets_memory_of_its_own_when_written(foreach: bool, which: str) -> None:
    sources = [values((19,), 7) for _ in range(2)]
    pair = two(foreach=foreach, **NESTEROV)
    step_twins(pair, fast=2)
    for optimizer, source in zip(pair, sources, strict=True):
        lazy, param = torch._lazy_clone(source), params_of(optimizer)[0]  # type: ignore[attr-defined]
        if which == "param":
            param.data = lazy
        elif which == "grad":
            param.grad = lazy
        else:
            optimizer.state[param]["momentum_buffer"] = lazy
    for _ in range(2):
        step_twins(pair, fast=2)
    assert bits_equal(sources[1], values((19,), 7))


# -------------------------------------------------------------------------------------------------- rounded momentum


@pytest.mark.parametrize("late", [None, torch.bfloat16, torch.float16])
def test_momentum_is_rounded_unless_a_buffer_of_the_dtype_is_missing(late: torch.dtype | None) -> None:
    kinds = [torch.bfloat16, torch.float16, torch.float32, late or torch.float64]
    pair = twins([values((67,), i, 0, dtype) for i, dtype in enumerate(kinds)], foreach=True, momentum=0.8765)
    for step in range(3):
        grads = [values((67,), 50 * step + i, 0, dtype) for i, dtype in enumerate(kinds)]
        set_grads(pair, [*grads[:3], grads[3] if step == 1 else None])
        step_twins(pair, fast=3 + (step == 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_momentum_shows(dtype: torch.dtype) -> None:
    """What the test above relies on: the default, and foreach with a late buffer, give other bits."""
    results = []
    for patched in (False, True):
        buffers = []
        for foreach, with_late in ((True, False), (True, True), (False, False)):
            optimizer, _ = twins([values((67,), i, 0, dtype) for i in range(2)], foreach=foreach, momentum=0.8765)
            with (fastpatch.enabled if patched else fastpatch.disabled)("sgd"):
                for step in range(2):
                    late = values((67,), 9, 0, dtype) if with_late and step == 1 else None
                    set_grads([optimizer], [values((67,), 5 + step, 0, dtype), late])
                    optimizer.step()
            buffers.append(optimizer.state[params_of(optimizer)[0]]["momentum_buffer"])
        assert not bits_equal(buffers[0], buffers[1])
        assert bits_equal(buffers[1], buffers[2])
        results.append(buffers)
    assert_same(*results)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 7)), min_size=1, max_size=6), st.booleans())
@settings(deadline=None, max_examples=60)
def test_first_gradients_at_any_step(kinds: list[tuple[torch.dtype, int]], nesterov: bool) -> None:
    pair = twins(
        [values((67,), i, dtype=dtype) for i, (dtype, _) in enumerate(kinds)],
        foreach=True,
        momentum=0.8765,
        nesterov=nesterov,
    )
    for step in range(3):
        present = [mask >> step & 1 for _, mask in kinds]
        made = [values((67,), 50 * step + i, dtype=dtype) for i, (dtype, _) in enumerate(kinds)]
        set_grads(pair, [grad if here else None for grad, here in zip(made, present, strict=True)])
        step_twins(pair, fast=sum(present))


# -------------------------------------------------------------------------------------------------- other ways to it


@pytest.mark.parametrize("how", ["hook", "closure", "early", "profiler"])
@pytest.mark.parametrize("change", [None, listed_twice, same_grad])
def test_the_inner_point_serves_and_refuses_alike(change: Callable[[Any], None] | None, how: str) -> None:
    pair = two(foreach=True, **NESTEROV)
    steps = {id(optimizer): optimizer.step for optimizer in pair}
    for optimizer in pair:
        if how == "hook":
            optimizer.register_step_pre_hook(lambda *_: None)
        if change is not None:
            change(optimizer)

    def step(optimizer: Any) -> Any:
        if how == "profiler":
            with torch.autograd.profiler.profile():
                return optimizer.step()
        if how == "closure":
            return optimizer.step(lambda: 1.5)
        return (steps[id(optimizer)] if how == "early" else optimizer.step)()

    for _ in range(3):
        step_twins(pair, call=step, **({"fast": 2} if change is None else {"foreach": 1}))


def test_groups_with_and_without_foreach() -> None:
    pair = two(foreach=True, **NESTEROV)
    for optimizer in pair:
        for i, foreach in enumerate((False, None, True)):
            params = [torch.nn.Parameter(values((7,), 10 * i + j, dtype=torch.bfloat16)) for j in range(2)]
            optimizer.add_param_group({"params": params, "foreach": foreach})
            for j, param in enumerate(params):
                param.grad = values((7,), 50 + 10 * i + j, dtype=torch.bfloat16)
        listed_twice(optimizer)
    for _ in range(2):
        step_twins(pair, fast=6, foreach=1)


def test_a_group_without_gradients_is_nothing() -> None:
    pair = two(foreach=True, **NESTEROV)
    set_grads(pair, [None, None])
    step_twins(pair)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("twice", [False, True])
def test_the_function(twice: bool, dtype: torch.dtype) -> None:
    hyper = {"weight_decay": 0, "momentum": 0.9, "lr": 0.1, "dampening": 0, "nesterov": True, "maximize": False}
    results = []
    for patched in (False, True):
        params, grads = ([values((n,), i + n, dtype=dtype) for n in (19, 40_000)] for i in (0, 1))
        buffers: list[Any] = [None, values((40_000,), 7, dtype=dtype)]
        lists = [[*each, each[1]] if twice else each for each in (params, grads, buffers)]
        how = {"foreach": 2} if twice else {"fast": 4}
        scope = fastpatch.enabled("sgd") if patched else fastpatch.disabled("sgd")
        with scope, served(**(how if patched else {})), torch.no_grad():
            for _ in range(2):
                sys.modules["torch.optim.sgd"].sgd(*lists, foreach=True, **hyper)
        results.append([*params, *grads, *lists[2]])
    assert_same(*results)
