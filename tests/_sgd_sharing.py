"""Ways in which two parameters of a group share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _sgd_helpers import params_of, twins, values

NESTEROV = {"momentum": 0.9, "nesterov": True}


def two(**options: Any) -> tuple[Any, Any]:
    return twins([values((19,), seed) for seed in (1, 2)], [values((19,), seed) for seed in (3, 4)], **options)


def listed_twice(optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    group["params"] = [*group["params"], group["params"][0]]


def shared_params(shift: int) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        base = values((60,), 5)
        for start, param in zip((0, shift), params_of(optimizer), strict=True):
            param.data = base[start : start + 19]

    return change


def shared_grads(shift: int) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        base = values((60,), 5)
        for start, param in zip((0, shift), params_of(optimizer), strict=True):
            param.grad = base[start : start + 19]

    return change


def same_grad(optimizer: Any) -> None:
    first, second = params_of(optimizer)
    second.grad = first.grad


def grad_is_the_other_param(optimizer: Any) -> None:
    first, second = params_of(optimizer)
    first.grad = second.detach()


def grad_is_the_other_buffer(optimizer: Any) -> None:
    first, second = params_of(optimizer)
    first.grad = optimizer.state[second]["momentum_buffer"] = values((19,), 6)


def shared_buffer(optimizer: Any) -> None:
    shared = values((19,), 6)
    for param in params_of(optimizer):
        optimizer.state[param]["momentum_buffer"] = shared


def buffer_is_the_other_param(optimizer: Any) -> None:
    first, second = params_of(optimizer)
    optimizer.state[first]["momentum_buffer"] = second.detach()
