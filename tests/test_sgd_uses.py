"""SGD.step as programs use it: closures, hooks of the backward, GradScaler, pickles, threads, forks, torch.compile."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _sgd_helpers import (
    INF,
    assert_same,
    assert_twins,
    bits_equal,
    outcome,
    params_of,
    served,
    set_grads,
    step_stock,
    twins,
    values,
)
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import fastpatch

sgd_module = sys.modules["torch.optim.sgd"]


@pytest.fixture
def pair() -> tuple[Any, Any]:
    return twins([values((19,), 1), values((3, 5), 2)], [values((19,), 3), values((3, 5), 4)], momentum=0.9)


# ------------------------------------------------------------------------------------------------------------ closures


@pytest.mark.parametrize("way", ["position", "keyword"])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_closures_run_with_grad_and_give_the_loss(pair: tuple[Any, Any], way: str, grad_mode: bool) -> None:
    modes: list[bool] = []
    losses = []
    for optimizer, patched in zip(pair, (False, True), strict=True):

        def closure(optimizer: Any = optimizer) -> torch.Tensor:
            modes.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = sum((param.nan_to_num(0.5, 1, -1).sin() ** 2).sum() for param in params_of(optimizer))
            loss.backward()
            return loss

        scope = fastpatch.enabled("sgd", strict=True) if patched else fastpatch.disabled("sgd")
        with scope, served(4 * patched), torch.set_grad_enabled(grad_mode):
            for _ in range(2):
                loss = optimizer.step(closure) if way == "position" else optimizer.step(closure=closure)
            assert torch.is_grad_enabled() == grad_mode
        losses.append(loss)
    assert modes == [True] * 4
    assert_same(*losses)
    assert losses[0].item() > 0
    assert_twins(*pair)


def test_a_closure_that_raises_leaves_everything_alone(pair: tuple[Any, Any]) -> None:
    def closure() -> None:
        raise LookupError("from the closure")

    expected = step_stock(pair[0], closure)
    with fastpatch.enabled("sgd", strict=True), served():
        assert outcome(pair[1].step, closure) == expected
        assert torch.is_grad_enabled()
    assert expected == (LookupError, "from the closure")
    assert_twins(*pair)


def test_a_closure_may_step_another_optimizer(pair: tuple[Any, Any]) -> None:
    others = twins([values((7,), 5)], [values((7,), 6)])
    step_stock(pair[0], others[0].step)
    with fastpatch.enabled("sgd", strict=True), served(3):
        pair[1].step(others[1].step)
    assert_twins(*pair)
    assert_twins(*others)


@pytest.mark.parametrize("arguments", [(1,), (None, None), "abc"])
def test_wrong_arguments_raise_as_stock(pair: tuple[Any, Any], arguments: Any) -> None:
    expected = step_stock(pair[0], *arguments)
    with fastpatch.enabled("sgd", strict=True), served():
        assert outcome(pair[1].step, *arguments) == expected
        assert outcome(pair[1].step, clozure=None) == step_stock(pair[0], clozure=None)
        assert outcome(torch.optim.SGD.step)[0] is ValueError  # torch's own wrapper unpacks self
    assert expected[0] is TypeError
    assert_twins(*pair)


# ---------------------------------------------------------------------------------------- inside and around a backward


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_taken_inside_the_backward(dtype: torch.dtype, foreach: bool | None) -> None:
    results = []
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": foreach}
    for patched in (False, True):
        params = [torch.nn.Parameter(values((4, 4), seed, 0, dtype)) for seed in (1, 2, 3)]
        optimizers = {param: torch.optim.SGD([param], **options) for param in params}

        def update(param: torch.Tensor, optimizers: Any = optimizers) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in params:
            param.register_post_accumulate_grad_hook(update)
        scope = fastpatch.enabled("sgd", strict=True) if patched else fastpatch.disabled("sgd")
        with scope, served(6 * patched):
            for _ in range(2):
                (torch.ones(4, dtype=dtype) @ params[0] @ params[1] @ params[2]).square().sum().backward()
        results.append((params, [optimizer.state_dict() for optimizer in optimizers.values()]))
    assert_same(*results)


@pytest.mark.parametrize("bad", [None, 0, 1])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": True, "nesterov": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_grad_scaler(dtype: torch.dtype, options: dict[str, Any], clipped: bool, bad: int | None) -> None:
    """A step whose gradients are not finite is skipped, be it the first: then there is no buffer yet."""
    pair = twins([values((19,), 1, 0, dtype), values((3, 5), 2, 0, dtype)], momentum=0.9, **options)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in pair]
    for number in range(4):
        for optimizer, scaler in zip(pair, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(sum((param**2).sum() for param in params_of(optimizer))).backward()
            if number == bad:
                params_of(optimizer)[0].grad[0] = INF
            patched = optimizer is pair[1]
            scope = fastpatch.enabled("sgd", strict=True) if patched else fastpatch.disabled("sgd")
            with scope, served(2 * (patched and number != bad)):
                if clipped:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(params_of(optimizer), 0.5)
                scaler.step(optimizer)
                scaler.update()
        assert_twins(*pair)
        assert_same(scalers[0].state_dict(), scalers[1].state_dict())
        assert len(pair[1].state) == (0 if bad == number == 0 else 2)


@pytest.mark.parametrize("foreach", [None, True])
def test_grad_scaler_refuses_float16_as_ever(foreach: bool | None) -> None:
    pair = twins([values((19,), 1, 0, torch.float16)], foreach=foreach)
    results = []
    for optimizer in pair:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(params_of(optimizer)[0].sum()).backward()
        with (fastpatch.enabled if optimizer is pair[1] else fastpatch.disabled)("sgd"), served():
            results.append(outcome(scaler.step, optimizer))
    assert results[0] == results[1] == (ValueError, "Attempting to unscale FP16 gradients.")
    assert_twins(*pair)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(pair: tuple[Any, Any], dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        for _ in range(2):
            step_stock(pair[0])
            with fastpatch.enabled("sgd", strict=True), served(2):
                pair[1].step()
    assert_twins(*pair)


@pytest.mark.parametrize("average", ["swa", "ema", "swa with buffers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("foreach", [None, True])
def test_averages_of_the_weights(foreach: bool | None, dtype: torch.dtype, average: str) -> None:
    averages = []
    for patched in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)).to(dtype)
        with torch.no_grad():
            for seed, param in enumerate(model.parameters()):
                param.copy_(values(param.shape, seed, edges=0))
        ema = get_ema_multi_avg_fn(0.9) if average == "ema" else None
        averaged = AveragedModel(model, multi_avg_fn=ema, use_buffers=average == "swa with buffers")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
        scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
        data = [values((4, 5), seed, 0, dtype) for seed in range(3)]
        scope = fastpatch.enabled("sgd", strict=True) if patched else fastpatch.disabled("sgd")
        with scope, served(12 * patched):
            for batch in data:
                model(batch).square().sum().backward()
                optimizer.step()
                averaged.update_parameters(model)
                scheduler.step()
        update_bn(data, averaged)
        averages.append([*averaged.state_dict().values(), *model.state_dict().values()])
    assert all(bits_equal(a, b) for a, b in zip(*averages, strict=True))


# ------------------------------------------------------------------------------------------------- copies and pickles


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_of_an_optimizer(pair: tuple[Any, Any], way: str, scheduled: bool) -> None:
    def copied(optimizer: Any) -> Any:
        if way == "deepcopy":
            return copy.deepcopy(optimizer)
        if way == "pickle":
            return pickle.loads(pickle.dumps(optimizer))
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    fastpatch.enable("sgd")
    if scheduled:
        for optimizer in pair:
            StepLR(optimizer, 5)
    step_stock(pair[0])
    pair[1].step()
    copies = copied(pair[0]), copied(pair[1])
    assert_twins(*copies)
    set_grads(copies, [values((19,), 7), values((3, 5), 8)])
    step_stock(copies[0])
    with served(2):
        copies[1].step()
    assert_twins(*copies)
    fastpatch.disable("sgd")
    for optimizer in copies:
        with served():
            optimizer.step()
    assert_twins(*copies)


@pytest.mark.parametrize("way", [pickle.dumps, copy.deepcopy], ids=["pickle", "deepcopy"])
def test_copies_of_a_bound_step(pair: tuple[Any, Any], way: Callable[[Any], Any]) -> None:
    fastpatch.enable("sgd", strict=True)
    step = way(pair[1].step)
    step = pickle.loads(step) if isinstance(step, bytes) else step
    copied = step.__self__
    assert copied is not pair[1]
    set_grads([copied], [values((19,), 3), values((3, 5), 4)])
    with served(2):
        step()
    pair[0].step()
    assert all(bits_equal(a, b) for a, b in zip(params_of(pair[0]), params_of(copied), strict=True))


def test_a_pickled_function_loads_without_fastpatch() -> None:
    fastpatch.enable("sgd")
    data = pickle.dumps((torch.optim.SGD.step, sgd_module.sgd))
    assert b"fastpatch" not in data and b"wrapt" not in data
    fastpatch.disable("sgd")
    assert pickle.loads(data) == (torch.optim.SGD.step, sgd_module.sgd)
