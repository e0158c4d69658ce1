"""LR schedulers around SGD.step, built before and after it is patched."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from _sgd_helpers import assert_twins, served, set_grads, step_stock, twins, values
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, OneCycleLR, SequentialLR, StepLR

import fastpatch


def sequential(optimizer: Any) -> SequentialLR:
    return SequentialLR(optimizer, [ConstantLR(optimizer, 0.5, 2), StepLR(optimizer, 1, 0.5)], milestones=[2])


SCHEDULERS = {
    "step": lambda o: StepLR(o, 2, 0.5),
    "one_cycle": lambda o: OneCycleLR(o, max_lr=0.5, total_steps=8),
    "cosine": lambda o: CosineAnnealingLR(o, 4),
    "sequential": sequential,
}


@pytest.mark.parametrize(("optimizer_first", "scheduler_first"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("step_first", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True])
def test_schedulers_work_as_ever(
    tensor: bool, name: str, step_first: bool, optimizer_first: bool, scheduler_first: bool
) -> None:
    """A tensor as lr is written in place by all of them."""
    texts: list[list[str]] = []
    optimizers = []
    for patched in (False, True):

        def enable_if(now: bool, patched: bool = patched) -> None:
            if patched and now:
                fastpatch.enable("sgd", strict=True)

        with warnings.catch_warnings(record=True) as caught, served(6 * patched):
            warnings.simplefilter("always")
            enable_if(not optimizer_first)
            lr = torch.tensor(0.1) if tensor else 0.1
            optimizer, _ = twins([values((19,), 1)], momentum=0.9, lr=lr)
            enable_if(not scheduler_first)
            scheduler = SCHEDULERS[name](optimizer)
            enable_if(True)
            hyper = []
            for number in range(6):
                set_grads([optimizer], [values((19,), 10 + number)])
                for do in (optimizer.step, scheduler.step)[:: 1 if step_first else -1]:
                    do()
                hyper.append([float(optimizer.param_groups[0][key]) for key in ("lr", "momentum")])
                assert not tensor or optimizer.param_groups[0]["lr"] is lr
        fastpatch.disable()
        texts.append([str(warning.message) for warning in caught])
        optimizers.append((optimizer, hyper))
    assert texts[0] == texts[1]
    assert any("before `optimizer.step()`" in text for text in texts[0]) != step_first
    assert optimizers[0][1] == optimizers[1][1]
    assert len({tuple(pair) for pair in optimizers[0][1]}) > 1
    for key in ("max_momentum", "base_momentum"):
        assert (key in optimizers[0][0].param_groups[0]) == (name == "one_cycle")
    assert_twins(optimizers[0][0], optimizers[1][0])


def test_a_scheduler_built_while_patched_goes_on_after_disable() -> None:
    stock, ours = pair = twins([values((19,), 1)], [values((19,), 2)], momentum=0.9)
    fastpatch.enable("sgd")
    schedulers = [StepLR(optimizer, 1, 0.5) for optimizer in pair]
    fastpatch.disable("sgd")
    for on in (False, True, False):
        if on:
            fastpatch.enable("sgd", strict=True)
        step_stock(stock)
        with served(int(on)):
            ours.step()
        for scheduler in schedulers:
            scheduler.step()
        fastpatch.disable("sgd")
        assert_twins(stock, ours)
