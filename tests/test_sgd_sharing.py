"""SGD over parameters that come twice or share memory: stock's order of updates is the only right one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from _sgd_helpers import assert_same, params_of, set_grads, step_stock, step_twins, threads, twins, values

SGD = torch.optim.SGD


# --------------------------------------------------------------------------------------- parameters that come twice


def duplicated(**options: Any) -> SGD:
    param, other = torch.nn.Parameter(values((19,), 1)), torch.nn.Parameter(values((7,), 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="optimizer contains a parameter group with duplicate parameters")
        optimizer = SGD([param, other, param], lr=0.1, **options)
    param.grad, other.grad = values((19,), 3), values((7,), 4)
    return optimizer


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_a_parameter_twice_in_a_group(momentum: float) -> None:
    pair = duplicated(momentum=momentum, weight_decay=0.1), duplicated(momentum=momentum, weight_decay=0.1)
    for _ in range(3):
        step_twins(pair, fast=3)


@pytest.mark.parametrize("momenta", [(0.9, 0.9), (0, 0.9), (0.9, 0)], ids=str)
@pytest.mark.parametrize("state", ["none", "buffer", "empty"])
def test_a_parameter_in_two_groups(state: str, momenta: tuple[float, float], request: pytest.FixtureRequest) -> None:
    pair = twins([values((19,), i) for i in range(2)], [values((19,), 10 + i) for i in range(4)], momentum=0.9)
    for optimizer in pair:
        optimizer.add_param_group({"params": [torch.nn.Parameter(values((7,), 20 + i)) for i in range(2)]})
        for i, param in enumerate(optimizer.param_groups[1]["params"]):
            param.grad = values((7,), 30 + i)
        first, second = optimizer.param_groups
        second["params"].append(first["params"][0])
        first["momentum"], second["momentum"] = momenta
        if state == "buffer":
            step_stock(optimizer)
        elif state == "empty":
            assert optimizer.state[first["params"][0]] == {}
    for _ in range(3):
        step_twins(pair, fast=5)


# ------------------------------------------------------------------------------------------ parameters on one storage


def two(size: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[SGD, SGD]:
    tensors = [values((size,), seed, dtype=dtype) for seed in (1, 2, 3, 4)]
    return twins(tensors[:2], tensors[2:], **options)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("size", [50, 70_001])
@pytest.mark.parametrize("shift", [0, 1, 17, None])
@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_that_share_a_storage(
    dtype: torch.dtype, number: int, size: int, shift: int | None, momentum: float
) -> None:
    """Overlapping ones are updated one after the other, as stock does; neighbours (shift None) may go in parallel."""
    offset = size if shift is None else shift
    pair = two(size, dtype, momentum=momentum)
    for optimizer in pair:
        base = values((2 * size,), 5, dtype=dtype)
        for start, param in zip((0, offset), params_of(optimizer), strict=True):
            param.data = base[start : start + size]
    with threads(number):
        for _ in range(2):
            step_twins(pair, fast=2)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_gradient_that_is_another_parameters_memory(number: int, reverse: bool) -> None:
    pair = two(40_000)
    for optimizer in pair:
        first, second = params_of(optimizer)[:: -1 if reverse else 1]
        first.grad = second.detach()
    with threads(number):
        for _ in range(2):
            step_twins(pair, fast=2)


@pytest.mark.parametrize("number", [1, 2])
def test_a_momentum_buffer_shared_by_two_parameters(number: int) -> None:
    pair = twins(
        [values((40_000,), seed) for seed in (1, 2)], [values((40_000,), seed) for seed in (3, 4)], momentum=0.9
    )
    for optimizer in pair:
        shared = values((40_000,), 5)
        for param in params_of(optimizer):
            optimizer.state[param]["momentum_buffer"] = shared
    with threads(number):
        for _ in range(2):
            step_twins(pair, fast=2)


def test_the_twins_of_this_file_differ_when_the_order_does() -> None:
    """What the tests above rely on: another order gives another result."""
    results = []
    for reverse in (False, True):
        base = values((69,), 5, edges=0)
        params = [torch.nn.Parameter(torch.ones(50)) for _ in range(2)]
        optimizer = SGD(params, lr=0.1, weight_decay=0.5)
        set_grads([optimizer], [values((50,), seed) for seed in (3, 4)])
        for start, param in zip((0, 17), params, strict=True):
            param.data = base[start : start + 50]
        optimizer.param_groups[0]["params"] = params[:: -1 if reverse else 1]
        optimizer.step()
        results.append(base)
    with pytest.raises(AssertionError):
        assert_same(*results)
