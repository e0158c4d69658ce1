"""Trainings of an SGD, drawn at random: groups of parameters of all dtypes, and what each step sets and gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _sgd_helpers import DTYPES, LAYOUTS, in_layout, parameter, set_grads, step_twins, values, with_odd_strides
from hypothesis import strategies as st

FLOAT_MAX = 3.4028234663852886e38
# What float32 can hold. 1e-50 is zero there, but not for Python: stock asks the double whether it is zero.
NUMBERS = [0, 0.0, -0.0, 1, 2, -1, 0.1, 0.9, 1e-3, -0.37, 1e-40, 1e-50, 1e30, FLOAT_MAX, np.float64(0.7), np.float64(0)]
USUAL = [0.1, 0.01, 0.9, 0.5, 0, 1]  # what a person would write
HYPERS = ("lr", "momentum", "dampening", "weight_decay")
SHAPES = [(shape, layout) for layout, (all_, _) in LAYOUTS.items() for shape in all_]
# Beyond the grain of 32768 from which on stock divides a parameter among threads.
SIZES = [((n,), "contiguous") for n in (1, 17, 100, 32_767, 32_768, 32_769, 40_000, 65_543, 70_001)]
shapes = st.sampled_from(SHAPES)
sizes = st.sampled_from(SIZES)


@dataclass(frozen=True)
class TensorNumber:
    """Stands for a tensor; each of two twins makes its own."""

    number: Any
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        return torch.tensor(self.number, dtype=self.dtype)


def made(hyper: dict[str, Any]) -> dict[str, Any]:
    return {name: value.make() if isinstance(value, TensorNumber) else value for name, value in hyper.items()}


def holds(dtype: torch.dtype, number: Any) -> bool:
    """Stock raises for most hyperparameters that a parameter's dtype can't hold."""
    return abs(number) <= torch.finfo(dtype).max


@st.composite
def hypers(draw: Any, dtypes: list[torch.dtype]) -> dict[str, Any]:
    usual = draw(st.booleans())
    numbers = USUAL if usual else [number for number in NUMBERS if all(holds(dtype, number) for dtype in dtypes)]
    chosen = {name: draw(st.sampled_from(numbers)) for name in HYPERS}
    for name in ("lr", "weight_decay"):
        dtype = draw(st.sampled_from([None, None, torch.float32, torch.float64, torch.bfloat16]))
        if dtype is not None and holds(dtype, chosen[name]):
            chosen[name] = TensorNumber(float(chosen[name]), dtype)
    chosen["nesterov"] = draw(st.sampled_from([False, True, 1, 0]))
    chosen["foreach"] = draw(st.sampled_from([None, False, True, True]))
    return {**chosen, "maximize": draw(st.booleans())}


@st.composite
def scenarios(draw: Any, shapes: Any = shapes, most: int = 3) -> dict[str, Any]:
    pool = draw(st.sampled_from([*([dtype] for dtype in DTYPES), DTYPES, DTYPES]))
    specs = st.tuples(shapes, st.sampled_from(pool)).map(lambda pair: (*pair[0], pair[1]))
    groups = draw(st.lists(st.lists(specs, max_size=4), min_size=1, max_size=most))
    if not any(groups):
        groups[0] = [((17,), "contiguous", pool[0])]
    total = sum(map(len, groups))
    steps = [
        {
            "hypers": [draw(hypers(sorted({spec[2] for spec in group}, key=str))) for group in groups],
            "grads": [draw(st.sampled_from([True, True, True, False])) for _ in range(total)],
        }
        for _ in range(draw(st.integers(1, 4)))
    ]
    return {"groups": groups, "steps": steps, "seed": draw(st.integers(0, 10**6)), "odd": draw(st.booleans())}


def one_group(shape: tuple[int, ...], *hypers: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    plain = {"lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}
    steps = [{"hypers": [{**plain, **hyper}], "grads": [True]} for hyper in hypers]
    return {"groups": [[(shape, "contiguous", dtype)]], "steps": steps, "seed": 1, "odd": False}


def _tensor(scenario: dict[str, Any], place: int, spec: tuple[Any, ...]) -> torch.Tensor:
    shape, layout, dtype = spec
    seed = scenario["seed"] + place
    result = in_layout(values(shape, seed, dtype=dtype), layout)
    # Odd strides that differ between a parameter, its gradient and buffer are served if all are contiguous.
    return with_odd_strides(result, seed) if scenario["odd"] and result.is_contiguous() else result


def optimizer_of(scenario: dict[str, Any]) -> torch.optim.SGD:
    at, groups = 0, []
    for specs in scenario["groups"]:
        groups.append({"params": [parameter(_tensor(scenario, at + i, spec)) for i, spec in enumerate(specs)]})
        at += len(specs)
    return torch.optim.SGD(groups, lr=0.1)


def run_scenario(scenario: dict[str, Any]) -> None:
    """Every parameter of every step is served, and equals stock after it."""
    flat = [spec for group in scenario["groups"] for spec in group]
    pair = optimizer_of(scenario), optimizer_of(scenario)
    for number, step in enumerate(scenario["steps"]):
        grads = [
            _tensor(scenario, 1000 * (number + 1) + i, spec) if present else None
            for i, (spec, present) in enumerate(zip(flat, step["grads"], strict=True))
        ]
        set_grads(pair, grads)
        for optimizer in pair:
            for group, hyper in zip(optimizer.param_groups, step["hypers"], strict=True):
                group.update(made(hyper))
        step_twins(pair, fast=sum(step["grads"]))
        for state in pair[1].state.values():
            assert not state["momentum_buffer"].requires_grad
