"""Smooth L1, derivatives: of any order, by whatever way they are asked for, they are stock's."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _helpers import as_stock, served
from _smooth_l1_loss_helpers import SIZES, TARGET, grads, loss, operands
from torch.utils.checkpoint import checkpoint

import fastpatch


@SIZES
@pytest.mark.parametrize("needs", ["input", "target", "both"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_gradient_for_whoever_asks(n: int, needs: str, reduction: str) -> None:
    def call() -> Any:
        input, target = operands(n)
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
def test_gradients_accumulate_over_a_retained_graph(n: int) -> None:
    def call() -> Any:
        input, target = operands(n)
        output = loss(input, target)
        output.backward(retain_graph=True)
        once = input.grad.clone()
        output.backward()
        return once, input.grad

    as_stock(TARGET, call, fast=1, strict=True)


def test_who_computes_the_gradient() -> None:
    """Ours for contiguous float32 gradients of the input; stock's operator for the rest. The profiler sees which."""

    def ranges(output: torch.Tensor, grad: torch.Tensor | None = None) -> set[str]:
        with torch.autograd.profiler.profile() as profile:
            output.backward(grad)
        return {e.name for e in profile.function_events if "smooth_l1_loss_backward" in e.name}

    ours, stock = {"fastpatch::smooth_l1_loss_backward"}, {"aten::smooth_l1_loss_backward"}
    with served(TARGET, fast=4), fastpatch.enabled(TARGET, strict=True):
        input, target = operands()
        assert ranges(loss(input, target)) == ours
        assert ranges(loss(input, target, "none"), torch.ones(5)) == ours
        assert ranges(loss(input, target, "none"), torch.ones(10)[::2]) == stock
        assert ranges(loss(input, target.requires_grad_())) == stock


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("both", [False, True])
def test_second_derivative(reduction: str, both: bool) -> None:
    def call() -> Any:
        input, target = operands()
        leaves = (input, target.requires_grad_()) if both else (input,)
        first = grads(loss(input, target, reduction), *leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)
        assert all(grad.count_nonzero() for grad in second)
        return first, [g.grad_fn.name() for g in first], second

    as_stock(TARGET, call, fast=1, strict=True)


def test_derivatives_by_finite_differences_are_left_to_stock() -> None:
    """gradgradcheck wants float64, which isn't served."""
    input, target = (t.detach().double().requires_grad_() for t in operands())
    explanation: list[str | None] = []

    def double_loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        explanation.append(fastpatch.explain(F.smooth_l1_loss, a, b).reason)
        return loss(a, b, "none")

    before = fastpatch.report().to_dict()[TARGET]
    with fastpatch.enabled(TARGET):
        assert torch.autograd.gradcheck(double_loss, (input, target), check_forward_ad=False)
        assert torch.autograd.gradgradcheck(double_loss, (input, target))
    after = fastpatch.report().to_dict()[TARGET]
    assert after["fast"] == before["fast"]
    assert sum(after["fallback"].values()) - sum(before["fallback"].values()) == len(explanation)
    assert "dtype" in explanation


def test_many_gradients_at_once() -> None:
    def call() -> Any:
        input, target = operands()
        batch = torch.linspace(-1, 2, 15).view(3, 5)
        return torch.autograd.grad(loss(input, target, "none"), input, batch, is_grads_batched=True)

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
