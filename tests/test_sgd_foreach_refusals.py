"""SGD(foreach=True) serves a group whole or not at all, and not if its parameters share memory that one writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _sgd_helpers import (
    assert_twins,
    bits_equal,
    outcome,
    params_of,
    served,
    step_stock,
    step_twins,
    twins,
    values,
)
from _sgd_sharing import (
    NESTEROV,
    buffer_is_the_other_param,
    grad_is_the_other_buffer,
    grad_is_the_other_param,
    listed_twice,
    same_grad,
    shared_buffer,
    shared_grads,
    shared_params,
    two,
)
from _sgd_unfit import PARAMETERS, three

import fastpatch

# ---------------------------------------------------------------------------------------------------- shared memory


PLAIN, MOMENTUM, DECAYED = {}, {"momentum": 0.9}, {**NESTEROV, "weight_decay": 0.1}
SHARING: dict[str, tuple[Callable[[Any], None], list[dict[str, Any]], list[dict[str, Any]]]] = {
    # what shares memory: the options under which the group is refused, and those under which it is served
    "listed_twice": (listed_twice, [PLAIN, MOMENTUM, NESTEROV, DECAYED], []),
    "same_memory": (shared_params(0), [PLAIN, MOMENTUM, NESTEROV, DECAYED], []),
    "overlapping": (shared_params(18), [PLAIN, MOMENTUM, NESTEROV, DECAYED], []),
    "neighbours": (shared_params(19), [], [PLAIN, MOMENTUM, NESTEROV, DECAYED]),
    "same_grad": (same_grad, [NESTEROV], [PLAIN, MOMENTUM, DECAYED, {**NESTEROV, "maximize": True}]),
    "overlapping_grads": (shared_grads(18), [NESTEROV], [PLAIN, MOMENTUM, DECAYED]),
    "neighbouring_grads": (shared_grads(19), [], [PLAIN, MOMENTUM, NESTEROV, DECAYED]),
    "grad_is_param": (grad_is_the_other_param, [PLAIN, MOMENTUM, NESTEROV, DECAYED], []),
    "grad_is_buffer": (grad_is_the_other_buffer, [MOMENTUM, NESTEROV, DECAYED], [PLAIN]),
    "same_buffer": (shared_buffer, [MOMENTUM, NESTEROV, DECAYED], [PLAIN]),
    "buffer_is_param": (buffer_is_the_other_param, [MOMENTUM, NESTEROV, DECAYED], [PLAIN]),
}
CASES = [
    pytest.param(change, options, refused, id=f"{name}-{options}")
    for name, (change, *both) in SHARING.items()
    for refused, all_options in zip((True, False), both, strict=True)
    for options in all_options
]


@pytest.mark.parametrize(("change", "options", "refused"), CASES)
@pytest.mark.parametrize("started", [False, True])
def test_memory_that_parameters_share(
    started: bool, change: Callable[[Any], None], options: dict[str, Any], refused: bool
) -> None:
    """Refused as a whole where the order of operations could show; beside it another group is served."""
    pair = two(foreach=True, **options)
    for optimizer in pair:
        if started:
            step_stock(optimizer)
        change(optimizer)
        optimizer.add_param_group({"params": [torch.nn.Parameter(values((7,), 8))]})
        params_of(optimizer)[-1].grad = values((7,), 9)
    number = len(pair[1].param_groups[0]["params"])
    with fastpatch.enabled("sgd"), served():
        verdict = fastpatch.explain(pair[1].step)
    assert (verdict.fast, verdict.reason) == ((False, "foreach") if refused else (True, None))
    for _ in range(2):
        step_twins(pair, fast=1 if refused else 1 + number, **({"foreach": 1} if refused else {}))
    for optimizer in pair:
        optimizer.param_groups[0]["foreach"] = None
    step_twins(pair, fast=1 + number)


def trained_by_stock(change: Callable[[Any], None], options: dict[str, Any], foreach: bool) -> list[torch.Tensor]:
    optimizer, _ = twins(
        [values((19,), seed, 0) for seed in (1, 2)],
        [values((19,), seed, 0) for seed in (3, 4)],
        foreach=foreach,
        **options,
    )
    step_stock(optimizer)
    change(optimizer)
    for tensor in (*params_of(optimizer), *(param.grad for param in params_of(optimizer))):
        tensor.data.nan_to_num_(0.5, 1, -1).clamp_(-9, 9)
    for _ in range(3):
        step_stock(optimizer)
    return params_of(optimizer)


def test_order_shows_where_memory_is_shared() -> None:
    """What the test above relies on: of each kind that is refused, the plain loop gives another result than foreach."""
    shows: dict[Any, bool] = {}
    for change, options, refused in (case.values for case in CASES):
        plain, foreach = (trained_by_stock(change, options, foreach) for foreach in (False, True))
        same = all(bits_equal(a, b) for a, b in zip(plain, foreach, strict=True))
        assert same or refused or options is NESTEROV, (change, options)
        if refused:
            shows[change] = shows.get(change, False) or not same
    assert len(shows) == 9 and all(shows.values()), shows


def test_empty_parameters_share_nothing() -> None:
    pair = twins([values((0,), 1), values((0, 3), 2), values((5,), 3)], foreach=True, **NESTEROV)
    for optimizer in pair:
        empty = params_of(optimizer)
        empty[1].data = empty[0].detach().view(0, 3)
        for param in empty:
            param.grad = torch.zeros_like(param)
    for _ in range(2):
        step_twins(pair, fast=3)


def test_a_parameter_in_two_groups() -> None:
    """Each group is updated after the other, with foreach too."""
    pair = two(foreach=True, **NESTEROV)
    for optimizer in pair:
        optimizer.add_param_group({"params": [torch.nn.Parameter(values((7,), 8))]})
        first, second = optimizer.param_groups
        second["params"].append(first["params"][0])
        second["params"][0].grad = values((7,), 9)
    for _ in range(3):
        step_twins(pair, fast=4)


# ------------------------------------------------------------------------------------------------- unfit parameters


@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize("name", PARAMETERS)
def test_one_unfit_parameter_refuses_its_group(name: str, momentum: float) -> None:
    change, reason = PARAMETERS[name]
    pair = three(foreach=True, weight_decay=0.1 if name not in ("sparse_grad", "sparse_param") else 0)
    for optimizer in pair:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(7))]})
        params_of(optimizer)[-1].grad = torch.ones(7)
        optimizer.param_groups[0]["momentum"] = momentum
        change(optimizer)
    with fastpatch.enabled("sgd", strict=True), served(), pytest.raises(fastpatch.FallbackError) as caught:
        pair[1].step()
    assert caught.value.reason == reason
    with fastpatch.enabled("sgd"), served():
        verdict = fastpatch.explain(pair[1].step)
    assert verdict.reason == reason
    assert verdict.detail.startswith("group 0, parameter 1: ")
    expected = step_stock(pair[0])
    assert (expected[0] == "returned") != ("raises" in name or name in ("half_grad", "buffer_half")), expected
    with fastpatch.enabled("sgd"), served(int(expected[0] == "returned"), **{reason: 1}):
        assert outcome(pair[1].step) == expected
    assert_twins(*pair)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("change", [listed_twice, shared_params(3)])
def test_strict_raises_before_anything_is_written(change: Callable[[Any], None], steps: int) -> None:
    pair = two(foreach=True, **NESTEROV)
    for optimizer in pair:
        optimizer.param_groups.insert(0, {**optimizer.param_groups[0], "params": [torch.nn.Parameter(torch.ones(7))]})
        params_of(optimizer)[0].grad = torch.ones(7)
        for _ in range(steps):
            step_stock(optimizer)
        second = optimizer.param_groups.pop(0)
        change(optimizer)
        optimizer.param_groups.insert(0, second)
    with fastpatch.enabled("sgd", strict=True), served(), pytest.raises(fastpatch.FallbackError, match="foreach"):
        pair[1].step()
    assert_twins(*pair)
