"""What an optimizer keeps between steps: its state's contents, checkpoints with hooks, buffers that users put there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from _sgd_helpers import (
    DTYPES,
    assert_same,
    assert_twins,
    outcome,
    parameter,
    params_of,
    served,
    set_grads,
    step_stock,
    step_twins,
    twins,
    values,
)

import fastpatch

SGD = torch.optim.SGD
FOREACH = pytest.mark.parametrize("foreach", [None, True])


def two(**options: Any) -> tuple[Any, Any]:
    return twins([values((19,), 1), values((3, 5), 2)], [values((19,), 3), values((3, 5), 4)], **options)


# ------------------------------------------------------------------------------------------------------ its contents


@FOREACH
def test_without_momentum_the_state_stays_empty(foreach: bool | None) -> None:
    pair = two(foreach=foreach)
    step_twins(pair, fast=2)
    assert not pair[1].state
    for optimizer in pair:
        optimizer.param_groups[0]["momentum"] = 0.9
    step_twins(pair, fast=2)
    for state in pair[1].state.values():
        assert list(state) == ["momentum_buffer"]
        buffer = state["momentum_buffer"]
        assert (type(buffer), buffer.requires_grad, buffer.is_leaf) == (torch.Tensor, False, True)


@FOREACH
def test_what_else_a_state_holds_is_kept(foreach: bool | None) -> None:
    pair = two(momentum=0.9, foreach=foreach)
    for optimizer in pair:
        first, second = params_of(optimizer)
        optimizer.state[first]["mine"] = "kept"
        optimizer.state[second] = {"mine": torch.ones(2), "momentum_buffer": None}
        optimizer.state["of nobody"] = 1  # torch itself takes any key
    for _ in range(2):
        for optimizer in pair:
            optimizer.state.pop("of nobody", None)
        step_twins(pair, fast=2)
    states = list(pair[1].state.values())
    assert [list(state) for state in states] == [["mine", "momentum_buffer"]] * 2


@FOREACH
def test_a_buffer_that_is_a_view_of_the_users_memory(foreach: bool | None) -> None:
    rows = [values((2, 19), 7) for _ in range(2)]
    pair = two(momentum=0.9, foreach=foreach)
    for optimizer, memory in zip(pair, rows, strict=True):
        optimizer.state[params_of(optimizer)[0]]["momentum_buffer"] = memory[1]
    for _ in range(2):
        step_twins(pair, fast=2)
    assert_same(*rows)
    assert rows[1]._version == 4


@FOREACH
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_table_as_parameters_that_change_every_step(dtype: torch.dtype, foreach: bool | None) -> None:
    """As sparse training by hand does: the step's rows become the parameter, with buffers gathered for them."""
    tables, memories, pair = [], [], []
    for _ in range(2):
        tables.append(values((10, 3), 1, 0, dtype))
        memories.append(torch.zeros(10, 3, dtype=dtype))
        pair.append(SGD([torch.nn.Parameter(torch.zeros(1, 3, dtype=dtype))], lr=0.1, momentum=0.9, foreach=foreach))
    for step in range(5):
        rows = torch.tensor([step, step + 2, step + 5])
        for optimizer, table, memory in zip(pair, tables, memories, strict=True):
            params = optimizer.param_groups[0]["params"]
            optimizer.state.pop(params[0], None)
            params[0] = torch.nn.Parameter(table[rows])
            optimizer.state[params[0]]["momentum_buffer"] = memory[rows]
            params[0].grad = values((3, 3), 50 + step, 0, dtype)
        step_twins(pair, fast=1)
        for optimizer, table, memory in zip(pair, tables, memories, strict=True):
            (param,) = params_of(optimizer)
            table[rows], memory[rows] = param.detach(), optimizer.state[param]["momentum_buffer"]
    assert_same(tables, tables[::-1])
    assert_same(memories, memories[::-1])


# -------------------------------------------------------------------------------------------------------- checkpoints


def logged(log: list[Any], optimizer: SGD) -> None:
    """All hooks around state_dict() and load_state_dict(), one of which replaces what is loaded."""

    def replace(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        log.append(("load pre", sorted(state_dict)))
        groups = [{**group, "lr": group["lr"] * 0.5} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.register_load_state_dict_post_hook(lambda o: log.append(("load post", o is optimizer, len(o.state))))
    optimizer.register_state_dict_pre_hook(lambda o: log.append(("state pre", o is optimizer)))
    optimizer.register_state_dict_post_hook(lambda o, state: log.append(("state post", sorted(state["state"]))))


@FOREACH
def test_checkpoints_with_hooks(foreach: bool | None) -> None:
    pair = two(momentum=0.9, foreach=foreach)
    logs: list[list[Any]] = [[], []]
    for optimizer, log in zip(pair, logs, strict=True):
        logged(log, optimizer)
    step_twins(pair, fast=2)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair]
    for number in range(3):
        set_grads(pair, [values((19,), 10 + number), values((3, 5), 20 + number)])
        step_twins(pair, fast=2)
    with fastpatch.enabled("sgd", strict=True):
        for optimizer, state in zip(pair, saved, strict=True):
            optimizer.load_state_dict(state)
    assert_twins(*pair)
    step_twins(pair, fast=2)
    assert logs[0] == logs[1]
    assert {entry[0] for entry in logs[1]} == {"load pre", "load post", "state pre", "state post"}
    assert pair[1].param_groups[0]["lr"] == 0.05


@FOREACH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_a_checkpoint_of_another_dtype_is_cast(other: torch.dtype, dtype: torch.dtype, foreach: bool | None) -> None:
    source, _ = twins([values((19,), 1, 0, other)], [values((19,), 2, 0, other)], momentum=0.9)
    step_stock(source)
    pair = twins([values((19,), 3, 0, dtype)], [values((19,), 4, 0, dtype)], lr=5.0)
    for optimizer in pair:
        optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
        optimizer.param_groups[0]["foreach"] = foreach
    for _ in range(2):
        step_twins(pair, fast=1)
    assert pair[1].state[params_of(pair[1])[0]]["momentum_buffer"].dtype == dtype


@FOREACH
def test_a_checkpoint_that_two_optimizers_share(foreach: bool | None) -> None:
    """load_state_dict() copies no buffer of the right dtype: both go on with the same memory."""
    pairs = [two(momentum=0.9, foreach=foreach) for _ in range(2)]
    step_twins(pairs[0], fast=2)
    for mine, theirs in zip(*pairs, strict=True):
        theirs.load_state_dict(mine.state_dict())
    for number in range(2):
        for pair in pairs:
            set_grads(pair, [values((19,), 10 + number), values((3, 5), 20 + number)])
            step_twins(pair, fast=2)
    buffers = [[state["momentum_buffer"].data_ptr() for state in pair[1].state.values()] for pair in pairs]
    assert buffers[0] == buffers[1]


def reloaded(optimizer: SGD) -> SGD:
    state = copy.deepcopy(optimizer.state_dict())
    fresh = SGD(optimizer.param_groups[0]["params"], lr=7.0)
    fresh.load_state_dict(state)
    return fresh


@pytest.mark.parametrize("first", [False, True])
def test_a_training_goes_on_with_or_without_us(first: bool) -> None:
    """Half of it patched, saved, loaded into a new optimizer, and the other half not; or the other way round."""
    stock, ours = two(momentum=0.9)
    for half in (first, not first):
        for number in range(2):
            set_grads((stock, ours), [values((19,), 10 + number), values((3, 5), 20 + number)])
            step_stock(stock)
            with (fastpatch.enabled if half else fastpatch.disabled)("sgd"), served(2 * half):
                ours.step()
        stock, ours = reloaded(stock), reloaded(ours)
        assert_twins(stock, ours)


@pytest.mark.parametrize("name", ["nesterov", "maximize", "foreach", "differentiable", "fused"])
def test_a_pickle_of_an_older_torch(name: str) -> None:
    """It lacks later options, which __setstate__ adds; without that, stock raises."""
    pair = two(momentum=0.9)
    for optimizer in pair:
        optimizer.param_groups[0].pop(name)
    expected = step_stock(pair[0])
    with fastpatch.enabled("sgd"):
        assert outcome(pair[1].step) == expected
    assert (expected[0] is KeyError) == (name != "differentiable")
    for optimizer in pair:
        optimizer.__setstate__(optimizer.__getstate__())
    step_twins(pair, fast=2)


# -------------------------------------------------------------------------------------------------- modes and errors


def test_a_first_step_in_inference_mode() -> None:
    """Its buffers are inference tensors, which stock refuses to change outside of that mode."""
    pair = two(momentum=0.9)
    with torch.inference_mode():
        assert step_twins(pair, inference_mode=1)[0] == "returned"
    assert all(state["momentum_buffer"].is_inference() for state in pair[1].state.values())
    assert step_twins(pair, momentum_buffer=2)[0] is RuntimeError
    for optimizer in pair:
        optimizer.state.clear()
    step_twins(pair, fast=2)


@FOREACH
@pytest.mark.parametrize("grad_mode", [False, True])
def test_a_step_that_fails_restores_the_grad_mode(grad_mode: bool, foreach: bool | None) -> None:
    pair = two(momentum=0.9, foreach=foreach)
    step_twins(pair, fast=2)
    for optimizer in pair:
        optimizer.state[params_of(optimizer)[1]]["momentum_buffer"] = torch.ones(7)
    with torch.set_grad_enabled(grad_mode):
        assert step_twins(pair, fast=0 if foreach else 1, momentum_buffer=1)[0] is RuntimeError
        assert torch.is_grad_enabled() == grad_mode
    for param in params_of(pair[1]):
        assert param.grad_fn is None and param.requires_grad


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"momentum": -0.1},
        {"weight_decay": -1.0},
        {"nesterov": True},
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        {"foreach": True, "fused": True},
        {"fused": True, "differentiable": True},
        {"lr": torch.tensor([1.0, 2.0])},
        {"capturable": True},
    ],
    ids=str,
)
def test_a_wrong_construction_raises_as_ever(options: dict[str, Any]) -> None:
    results = []
    for scope in (fastpatch.disabled, fastpatch.enabled):
        with scope("sgd"):
            results.append(outcome(SGD, [parameter(torch.ones(3))], **{"lr": 0.1, **options}))
    assert results[0] == results[1]
    assert results[0][0] != "returned"


def test_a_group_takes_what_the_constructor_refuses() -> None:
    """Nesterov with dampening, a negative lr: nobody checks a group that is changed later."""
    pair = two(momentum=0.9)
    for change in ({"nesterov": True, "dampening": 0.5}, {"lr": -0.1}, {"momentum": -0.5}, {"weight_decay": -0.1}):
        for optimizer in pair:
            optimizer.param_groups[0].update(change)
        step_twins(pair, fast=2)
