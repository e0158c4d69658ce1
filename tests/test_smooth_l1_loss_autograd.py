"""Smooth L1, derivatives: of any order, by whatever way they are asked for, they are stock's."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from _helpers import as_stock, served
from _smooth_l1_loss_helpers import SIZES, TARGET, each_dtype, grads, loss, operands
from torch.utils.checkpoint import checkpoint

import fastpatch


@SIZES
@each_dtype
@pytest.mark.parametrize("needs", ["input", "target", "both"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_gradient_for_whoever_asks(n: int, dtype: torch.dtype, needs: str, reduction: str) -> None:
    def call() -> Any:
        input, target = operands(n, dtype)
        input.requires_grad_(needs != "target"), target.requires_grad_(needs != "input")
        output = loss(input, target, reduction)
        return output, grads(output, *(t for t in (input, target) if t.requires_grad))

    as_stock(TARGET, call, fast=1, strict=True)


def test_gradient_of_only_one_of_two_that_need_it() -> None:
    def call() -> Any:
        input, target = operands()
        output = loss(input, target.requires_grad_())
        return grads(output, input, retain_graph=True), grads(output, target)

    as_stock(TARGET, call, fast=1, strict=True)


def test_gradient_when_input_and_target_are_one_tensor() -> None:
    def call() -> Any:
        input, _ = operands()
        loss(input, input).backward()
        return input.grad

    as_stock(TARGET, call, fast=1, strict=True)


@SIZES
@each_dtype
def test_gradients_accumulate_over_a_retained_graph(n: int, dtype: torch.dtype) -> None:
    def call() -> Any:
        input, target = operands(n, dtype)
        output = loss(input, target.requires_grad_())
        output.backward(retain_graph=True)
        once = input.grad.clone(), target.grad.clone()
        output.backward()
        assert input.grad.count_nonzero()
        return once, input.grad, target.grad

    as_stock(TARGET, call, fast=1, strict=True)


OURS, STOCKS = "fastpatch::smooth_l1_loss_backward", "aten::smooth_l1_loss_backward"


def ranges(output: torch.Tensor, grad: torch.Tensor | None = None) -> list[str]:
    """Who computes gradients in this backward, as the profiler sees it."""
    with torch.autograd.profiler.profile() as profile:
        output.backward(grad)
    return [e.name for e in profile.function_events if "smooth_l1_loss_backward" in e.name]


@each_dtype
@pytest.mark.parametrize("autocast", [False, True])
def test_who_computes_the_gradient_of_contiguous_operands(dtype: torch.dtype, autocast: bool) -> None:
    def of(input_needs: bool, target_needs: bool, reduction: str = "mean") -> torch.Tensor:
        input, target = operands(40, dtype)
        with torch.autocast("cpu", enabled=autocast):
            return loss(input.requires_grad_(input_needs), target.requires_grad_(target_needs), reduction)

    with served(TARGET, fast=5), fastpatch.enabled(TARGET, strict=True):
        assert ranges(of(True, False)) == [OURS]
        assert ranges(of(False, True)) == [OURS]
        assert ranges(of(True, True)) == [OURS, OURS]
        each = of(True, True, "none")
        assert ranges(each, torch.ones_like(each)) == [OURS, OURS]
        each = of(True, False, "none")
        assert ranges(each, torch.ones(1, dtype=each.dtype).expand(40)) == [OURS]


def test_who_computes_the_gradient_of_two_dtypes() -> None:
    input, target = operands(40)
    with served(TARGET, fast=1), fastpatch.enabled(TARGET, strict=True):
        assert ranges(loss(input.detach().bfloat16().requires_grad_(), target.requires_grad_())) == [OURS, OURS]


def test_who_computes_the_gradient_of_other_layouts() -> None:
    """Stock runs another formula over what isn't contiguous, so stock's operator is called."""
    input, target = (t.detach() for t in operands(40))
    ones = torch.ones(80)[::2]
    with served(TARGET, fast=5), fastpatch.enabled(TARGET, strict=True):
        assert set(ranges(loss(input.clone().requires_grad_(), target, "none"), ones)) == {STOCKS}
        assert set(ranges(loss(input[::2].requires_grad_(), target[:20]))) == {STOCKS}
        assert set(ranges(loss(input[:20].requires_grad_(), target[::2].requires_grad_()))) == {STOCKS}
        assert set(ranges(loss(input.view(8, 5).t().requires_grad_(), target.view(8, 5).t()))) == {STOCKS}
        assert set(ranges(loss(input[:0].requires_grad_(), target[:0]))) == {STOCKS}


@each_dtype
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("both", [False, True])
def test_second_derivative(dtype: torch.dtype, reduction: str, both: bool) -> None:
    def call() -> Any:
        input, target = operands(40, dtype)
        leaves = (input, target.requires_grad_()) if both else (input,)
        first = grads(loss(input, target, reduction), *leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)
        assert all(grad.count_nonzero() for grad in second)
        return first, [g.grad_fn.name() for g in first], second

    as_stock(TARGET, call, fast=1, strict=True)


def test_derivatives_by_finite_differences() -> None:
    input, target = (t.detach().requires_grad_() for t in operands(5, torch.float64))
    calls = 0

    def counted_loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loss(a, b, "none")

    before = fastpatch.report().to_dict()[TARGET]
    with fastpatch.enabled(TARGET, strict=True):
        assert torch.autograd.gradcheck(counted_loss, (input, target), check_batched_grad=True)
        assert torch.autograd.gradgradcheck(counted_loss, (input, target), check_batched_grad=True)
    after = fastpatch.report().to_dict()[TARGET]
    assert (after["fast"] - before["fast"], after["fallback"]) == (calls, before["fallback"])
    assert calls > 30


@each_dtype
def test_many_gradients_at_once(dtype: torch.dtype) -> None:
    def call() -> Any:
        input, target = operands(5, dtype)
        batch = torch.linspace(-1, 2, 15).view(3, 5).to(dtype)
        output = loss(input, target.requires_grad_(), "none")
        return torch.autograd.grad(output, (input, target), batch, is_grads_batched=True)

    as_stock(TARGET, call, fast=1, strict=True)


def test_jacobian_and_hessian() -> None:
    def call() -> Any:
        input, target = operands()
        jacobian = torch.autograd.functional.jacobian(lambda a: loss(a, target, "none"), input, vectorize=True)
        hessian = torch.autograd.functional.hessian(lambda a: loss(a, target, "sum"), input, vectorize=True)
        assert jacobian.count_nonzero()
        assert hessian.count_nonzero()
        return jacobian, hessian

    as_stock(TARGET, call, fast=2, strict=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad(mode: Any) -> None:
    def call() -> Any:
        input, target = operands()
        with mode():
            output = loss(input, target)
        return output, output.grad_fn, output.is_inference()

    refused = {"inference_mode": 1} if mode is torch.inference_mode else {}
    assert as_stock(TARGET, call, fast=0 if refused else 1, fallback=refused).value[1] is None


def test_no_node_when_nobody_needs_a_gradient() -> None:
    def call() -> Any:
        input, target = operands()
        output = loss(input.detach(), target)
        return output, output.grad_fn, output.is_leaf

    assert as_stock(TARGET, call, fast=1, strict=True).value[1] is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    def call() -> Any:
        input, target = operands()
        checkpoint(lambda a: loss(a * 2, target), input, use_reentrant=reentrant).backward()
        return input.grad

    # The forward runs twice; the non-reentrant way breaks off its second run by an exception from the hook that
    # saves the last tensor, and a call that didn't end isn't counted.
    as_stock(TARGET, call, fast=2 if reentrant else 1, strict=True)


@SIZES
def test_backward_in_another_thread(n: int) -> None:
    def call() -> Any:
        input, target = operands(n)
        output = loss(input, target)
        thread = threading.Thread(target=output.backward)
        thread.start()
        thread.join(timeout=60)
        assert input.grad.count_nonzero()
        return input.grad

    as_stock(TARGET, call, fast=1, strict=True)


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("cpu"), lambda: torch.autocast("cpu")])
def test_backward_inside_a_mode(mode: Any) -> None:
    def call() -> Any:
        input, target = operands()
        output = loss(input, target)
        with mode():
            output.backward()
        return input.grad, input.grad.is_inference()

    as_stock(TARGET, call, fast=1, strict=True)


def test_backward_outside_the_scope_of_its_forward() -> None:
    input, target = operands()
    with served(TARGET, fast=1), fastpatch.enabled(TARGET, strict=True):
        output = loss(input, target)
    expected = torch.autograd.grad(loss(input, target), input)[0]
    assert torch.equal(torch.autograd.grad(output, input)[0], expected)
