"""Trainings of an SGD, drawn at random: groups of parameters of all dtypes, and what each step sets and gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from _sgd_helpers import LAYOUTS
from hypothesis import strategies as st

from fastpatch.testing import Operand, SgdRun, SgdStep, TensorNumber, strategies

NUMBERS = [*strategies.NUMBERS, np.float64(0.7), np.float64(0)]
HYPERS = strategies.HYPERS
SHAPES = [(shape, layout) for layout, (all_, _) in LAYOUTS.items() for shape in all_]
shapes = st.sampled_from(SHAPES)


def scenarios(shapes: Any = strategies.SMALL, most: int = 3) -> st.SearchStrategy[SgdRun]:
    """Trainings of which every step is served."""
    return strategies.sgd_runs(shapes, NUMBERS, most, odd=False)


def made(hyper: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters with tensors in place of what stands for them; each of two twins makes its own."""
    return {
        name: torch.tensor(value.number, dtype=value.dtype) if isinstance(value, TensorNumber) else value
        for name, value in hyper.items()
    }


def one_group(shape: tuple[int, ...], *hypers: dict[str, Any], dtype: torch.dtype = torch.float32) -> SgdRun:
    plain = {"lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}
    param = Operand(shape, dtype, kind="huge", seed=1)
    steps = [
        SgdStep(({**plain, **hyper},), (replace(param, seed=1000 * number),)) for number, hyper in enumerate(hypers, 1)
    ]
    return SgdRun(((param,),), tuple(steps))


def run_scenario(run: SgdRun) -> None:
    """Every parameter of every step is served, and equals stock after it."""
    made = run.compare(strict=True)
    assert made.difference is None, made.difference
    assert (made.fast, made.fallback) == (run.updates, {})
