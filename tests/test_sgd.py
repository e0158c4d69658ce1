"""SGD.step served by the compiled path, many steps long, against stock's default, bit for bit."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest
import torch
from _sgd_helpers import (
    DTYPES,
    INF,
    NAN,
    assert_same,
    assert_twins,
    edges_of,
    in_layout,
    outcome,
    served,
    set_grads,
    step_stock,
    step_twins,
    threads,
    twins,
    values,
    with_odd_strides,
)
from _sgd_scenarios import HYPERS, NUMBERS, one_group, run_scenario, scenarios, shapes
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fastpatch
from fastpatch.testing import SgdRun
from fastpatch.testing.strategies import holds


@given(scenarios())
@example(one_group((67,), {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 1e-4}, {"momentum": 0.9}))
@example(one_group((9,), {"momentum": 0.9, "nesterov": True, "maximize": True, "weight_decay": 0.1}))
@settings(deadline=None, max_examples=100 if "ATEN_CPU_CAPABILITY" in os.environ else 250)
def test_many_steps_of_any_groups_equal_stock(scenario: SgdRun) -> None:
    run_scenario(scenario)


@pytest.mark.parametrize("name", HYPERS)
@pytest.mark.parametrize("number", NUMBERS, ids=repr)
@pytest.mark.parametrize("foreach", [False, True])
def test_every_number_in_every_place(foreach: bool, number: Any, name: str) -> None:
    for dtype in DTYPES:
        if holds(dtype, number):
            hyper = {"momentum": 0.9, "weight_decay": 0.1, name: number, "foreach": foreach}
            run_scenario(one_group((255,), hyper, hyper, hyper, dtype=dtype))


def test_integer_lr_zero_keeps_the_sign_of_zero() -> None:
    # Stock's alpha is -lr: 0 for an int, -0.0 for a float; -0.0 + 0.0 * g is 0.0, but -0.0 + -0.0 * g is -0.0.
    for lr in (0, 0.0, np.float64(0)):
        pair = twins([torch.full((19,), -0.0)], [torch.ones(19)], lr=lr)
        step_twins(pair, fast=1)


@pytest.mark.parametrize("name", HYPERS)
@pytest.mark.parametrize("number", [1e39, -1e39, NAN, INF, -INF, 2**60, 10**400, True, np.float32(0.5)], ids=repr)
def test_numbers_that_float32_cannot_hold_are_left_to_stock(name: str, number: Any) -> None:
    pair = twins([values((19,), 1)], [values((19,), 2)], momentum=0.9, weight_decay=0.1)
    step_twins(pair, fast=1)
    for optimizer in pair:
        optimizer.param_groups[0][name] = number
    step_twins(pair, hyperparameter=1)


@pytest.mark.parametrize("lr", ["0.1", None, [0.1]])
def test_hyperparameters_that_are_no_numbers_raise_as_stock(lr: Any) -> None:
    pair = twins([values((19,), 1)], [values((19,), 2)])
    for optimizer in pair:
        optimizer.param_groups[0]["lr"] = lr
    assert step_twins(pair, hyperparameter=1)[0] is TypeError


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    "sizes", [[32767], [32768], [32769], [65535], [65536], [65543, 3], [5, 40_001, 17, 40_009, 1]], ids=repr
)
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}], ids=str
)
def test_sizes_across_the_thread_grain(number: int, sizes: list[int], options: dict[str, Any]) -> None:
    with threads(number):
        pair = twins([values((n,), i) for i, n in enumerate(sizes)], weight_decay=1e-4, **options)
        for step in range(3):
            set_grads(pair, [values((n,), 100 * step + i + 7) for i, n in enumerate(sizes)])
            step_twins(pair, fast=len(sizes))


def test_thread_counts_agree_with_each_other() -> None:
    one, two = twins([values((100_003,), 1)], [values((100_003,), 2)], momentum=0.9)
    with fastpatch.enabled("sgd", strict=True), served(4):
        for _ in range(2):
            with threads(1):
                one.step()
            with threads(2):
                two.step()
    assert_twins(one, two)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0, 0.1])
@given(st.data())
@settings(deadline=None, max_examples=25)
def test_first_buffers_take_the_strides_that_stock_gives(weight_decay: float, maximize: bool, data: Any) -> None:
    shape, layout = data.draw(shapes)
    odd = data.draw(st.tuples(st.booleans(), st.booleans()))
    param, grad = (in_layout(values(shape, seed), layout) for seed in (1, 2))
    param = with_odd_strides(param, 3) if odd[0] else param
    grad = with_odd_strides(grad, 4) if odd[1] else grad
    pair = twins([param], [grad], momentum=0.9, weight_decay=weight_decay, maximize=maximize)
    plain = param.is_contiguous() and grad.is_contiguous()
    if plain or param.stride() == grad.stride():
        step_twins(pair, fast=1)
    else:
        step_twins(pair, strides=1)
    if not weight_decay and not maximize:
        assert pair[1].state_dict()["state"][0]["momentum_buffer"].stride() == grad.stride()
    set_grads(pair, [grad])
    expected = step_stock(pair[0])
    with fastpatch.enabled("sgd"):
        assert outcome(pair[1].step) == expected
    assert_twins(*pair)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_edge_meets_every_edge(dtype: torch.dtype, foreach: bool) -> None:
    grid = torch.tensor([*edges_of(dtype), 1.0, -1.0, 0.5], dtype=dtype)
    param, grad = (axis.reshape(-1) for axis in torch.meshgrid(grid, grid, indexing="ij"))
    every = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}
    for options in ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, every):
        pair = twins([param], [grad], foreach=foreach, **options)
        for shift in range(3):
            set_grads(pair, [grad.roll(shift)])
            step_twins(pair, fast=1)


def test_versions_count_as_stocks_operations_do() -> None:
    _, ours = twins([values((19,), 1)], [values((19,), 2)], momentum=0.9)
    (param,) = ours.param_groups[0]["params"]
    before = param._version
    with fastpatch.enabled("sgd", strict=True), served(3):
        for _ in range(3):
            ours.step()
    assert param._version == before + 3
    assert ours.state[param]["momentum_buffer"]._version == 4  # none at the first step, mul_ and add_ later
    assert param.grad._version == 1


def test_a_backward_through_a_stepped_parameter_raises_as_stock() -> None:
    messages = []
    for scope in (fastpatch.disabled, fastpatch.enabled):
        param = torch.nn.Parameter(values((19,), 1, edges=0))
        optimizer = torch.optim.SGD([param], lr=0.1)
        loss = (param * param).sum()
        param.grad = torch.ones(19)
        with scope("sgd"), served(int(scope is fastpatch.enabled)):
            optimizer.step()
        messages.append(outcome(loss.backward))
    assert messages[0][0] is RuntimeError
    assert messages[0] == messages[1]


def test_gradients_with_a_graph_give_plain_buffers() -> None:
    pair = twins([values((19,), 1)], momentum=0.9)
    for optimizer in pair:
        (param,) = optimizer.param_groups[0]["params"]
        (param.square().sum() * 3).backward(create_graph=False)
        param.grad = (param * 2).clone()  # has a grad_fn, as after create_graph=True
    stock, ours = pair
    step_stock(stock)
    with fastpatch.enabled("sgd", strict=True), served(1):
        ours.step()
    for optimizer in pair:
        buffer = optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert not buffer.requires_grad
        assert buffer.grad_fn is None
    assert_same(stock.state_dict(), ours.state_dict())
    for optimizer in pair:  # a Tensor's grad that refers to the Tensor: break the cycle
        optimizer.zero_grad()


def test_stock_never_patched_gives_the_same_training() -> None:
    """The oracle of the other tests runs inside disabled(); here it runs with nothing patched at all."""
    fastpatch.disable()
    assert type(sys.modules["torch.optim.sgd"].sgd).__name__ == "function"
    options = {"momentum": 0.9, "weight_decay": 0.01}
    pair = twins([values((67,), 1), values((3, 5), 2)], **options)
    for step in range(4):
        set_grads(pair, [values((67,), 10 + step), values((3, 5), 20 + step)])
        pair[0].step()
        with fastpatch.enabled("sgd", strict=True), served(2):
            pair[1].step()
        assert_twins(*pair)


def test_a_wrong_bit_would_be_seen() -> None:
    """The comparison of all these tests: one bit, one stride, one version or one key off, and it fails."""
    stock, ours = twins([values((19,), 1)], [values((19,), 2)], momentum=0.9)
    step_twins((stock, ours), fast=1)
    (param,) = ours.param_groups[0]["params"]
    with torch.no_grad():
        param.view(torch.int32)[3] ^= 1
    with pytest.raises(AssertionError):
        assert_twins(stock, ours)
    with pytest.raises(AssertionError):
        assert_same(torch.tensor([0.0]), torch.tensor([-0.0]))
    with pytest.raises(AssertionError):
        assert_same(torch.ones(1, 3), torch.ones(1, 3).as_strided((1, 3), (9, 1)))
    with pytest.raises(AssertionError):
        assert_same(torch.ones(3), torch.ones(3).add_(0))
    with pytest.raises(AssertionError):
        assert_same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    with pytest.raises(AssertionError), served(2):
        pass
