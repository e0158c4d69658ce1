"""Smooth L1 under autocast, the backward: stock casts operands first and saves the casts, and so do we."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _helpers import as_stock
from _smooth_l1_loss_helpers import SIZES, TARGET, grad_of, grads, loss, operands
from torch._dynamo import compiled_autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32

DTYPES = [(BFLOAT16, BFLOAT16), (FLOAT16, FLOAT16), (BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16), (FLOAT16, BFLOAT16)]
each_pair = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
each_reduction = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


def cast_operands(dtypes: tuple[torch.dtype, torch.dtype], n: int = 40) -> list[torch.Tensor]:
    return [t.detach().to(dtype) for t, dtype in zip(operands(n), dtypes, strict=True)]


def autocast_loss(input: torch.Tensor, target: torch.Tensor, *how: Any) -> torch.Tensor:
    with torch.autocast("cpu"):
        return loss(input, target, *how)


@SIZES
@each_pair
@pytest.mark.parametrize("which", ["input", "target"])
def test_change_in_place_of_what_was_cast_is_not_seen(n: int, dtypes: Any, which: str) -> None:
    """Stock's cast holds the old values. An operand that isn't cast is saved itself, and found to be changed."""

    def call() -> Any:
        input, target = cast_operands(dtypes, n)
        input.requires_grad_()
        changed = input * 1
        output = autocast_loss(changed, target)
        (changed if which == "input" else target).add_(10)
        return grads(output, input)

    error = as_stock(TARGET, call, fast=1, strict=True).error
    if dtypes[which == "target"] == FLOAT32:
        assert error is not None
        assert "modified by an inplace operation" in error[1]
    else:
        assert error is None


@each_pair
def test_replaced_data_of_what_was_cast_is_not_seen(dtypes: Any) -> None:
    def call() -> Any:
        input, target = cast_operands(dtypes)
        output = autocast_loss(input.requires_grad_(), target)
        for operand in (input, target):
            if operand.dtype != FLOAT32:
                operand.data = torch.full_like(operand, 9.0)
        return grads(output, input)

    as_stock(TARGET, call, fast=1, strict=True)


@each_pair
def test_backward_twice(dtypes: Any) -> None:
    def call(retain: bool) -> Any:
        input, target = (t.requires_grad_() for t in cast_operands(dtypes))
        output = autocast_loss(input, target)
        output.backward(retain_graph=retain)
        output.backward()
        return input.grad, target.grad

    as_stock(TARGET, lambda: call(True), fast=1, strict=True)
    error = as_stock(TARGET, lambda: call(False), fast=1, strict=True).error
    assert error is not None
    assert error[1].startswith("Trying to backward through the graph a second time")


@each_pair
@each_reduction
@pytest.mark.parametrize("needs", [0, 1])
def test_second_derivative(dtypes: Any, reduction: str, needs: int) -> None:
    def call() -> Any:
        leaves = cast_operands(dtypes)
        leaf = leaves[needs].requires_grad_()
        (first,) = grads(autocast_loss(*leaves, reduction), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.float().pow(2).sum(), leaf)
        assert second.count_nonzero()
        return first, second

    as_stock(TARGET, call, fast=1, strict=True)


@pytest.mark.parametrize("dtypes", [(BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16), (FLOAT16, BFLOAT16)], ids=str)
def test_second_derivative_by_both(dtypes: Any) -> None:
    def call() -> Any:
        leaves = [t.requires_grad_() for t in cast_operands(dtypes, 400)]
        first = grads(autocast_loss(*leaves, "none"), *leaves, create_graph=True)
        return first, torch.autograd.grad(sum(g.float().pow(2).sum() for g in first), leaves)

    as_stock(TARGET, call, fast=1, strict=True)


@pytest.mark.parametrize("dtypes", [(BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32), (FLOAT16, FLOAT16)], ids=str)
@each_reduction
def test_loss_and_a_penalty_on_its_gradient(dtypes: Any, reduction: str) -> None:
    def call() -> Any:
        input, target = cast_operands(dtypes, 400)
        output = autocast_loss(input.requires_grad_(), target, reduction)
        (first,) = grads(output, input, create_graph=True)
        (output.sum() + (first.float() * torch.linspace(1, 3, 400)).pow(2).sum()).backward()
        return input.grad

    as_stock(TARGET, call, fast=1, strict=True)


@each_pair
def test_many_gradients_at_once(dtypes: Any) -> None:
    def call() -> Any:
        input, target = (t.requires_grad_() for t in cast_operands(dtypes))
        output = autocast_loss(input, target, "none")
        batch = torch.linspace(-1, 2, 120).view(3, 40)
        return torch.autograd.grad(output, (input, target), batch, is_grads_batched=True)

    as_stock(TARGET, call, fast=1, strict=True)


UNPACK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda t: t,
    "strided": lambda t: torch.stack([t, t], 1)[:, 0],
    "another number": lambda t: t * 1.7,
    "bfloat16": lambda t: t.bfloat16(),
}


@each_pair
@pytest.mark.parametrize("how", UNPACK)
def test_hooks_on_saved_tensors_run_as_often_as_in_stock(dtypes: Any, how: str) -> None:
    def call() -> Any:
        seen: list[Any] = []
        input, target = (t.requires_grad_() for t in cast_operands(dtypes))

        def note(name: str, tensor: torch.Tensor) -> torch.Tensor:
            seen.append((name, tensor))
            return tensor if name == "pack" else UNPACK[how](tensor)

        with saved_tensors_hooks(lambda t: note("pack", t.detach()), lambda t: note("unpack", t)):
            output = autocast_loss(input, target)
        assert [name for name, _ in seen] == ["pack", "pack"]
        return grads(output, input, target), seen

    as_stock(TARGET, call, fast=1, strict=True)


@each_pair
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(dtypes: Any, reentrant: bool) -> None:
    def call() -> Any:
        input, target = cast_operands(dtypes)
        with torch.autocast("cpu"):
            output = checkpoint(lambda a: loss(a * 2, target), input.requires_grad_(), use_reentrant=reentrant)
        output.backward()
        assert input.grad.count_nonzero()
        return input.grad

    # The non-reentrant way breaks off its second run by an exception, and a call that didn't end isn't counted.
    as_stock(TARGET, call, fast=2 if reentrant else 1, strict=True)


def test_backward_within_autocast() -> None:
    def call() -> Any:
        input, target = (t.requires_grad_() for t in cast_operands((BFLOAT16, FLOAT16)))
        with torch.autocast("cpu"):
            output = loss(input, target, "none")
            output.backward(grad_of(output))
        return input.grad, target.grad

    as_stock(TARGET, call, fast=1, strict=True)


@each_pair
def test_compiled_autograd(dtypes: Any) -> None:
    """It traces the backward of stock's node, of which ours is one."""

    def call() -> Any:
        input, target = (t.requires_grad_() for t in cast_operands(dtypes))
        output = autocast_loss(input, target)
        torch._dynamo.reset()
        with compiled_autograd._enable(lambda graph: graph):
            output.backward()
        torch._dynamo.reset()
        assert input.grad.count_nonzero() and target.grad.count_nonzero()
        return input.grad, target.grad

    as_stock(TARGET, call, fast=1, strict=True)


def test_graph_and_saved_tensors_are_those_of_stock() -> None:
    """What autocast casts is cast before it is saved: gradients of a recorded backward meet there, in float32."""

    def call() -> Any:
        input, target = cast_operands((BFLOAT16, BFLOAT16))
        node = autocast_loss(input.requires_grad_(), target).grad_fn
        return type(node), node.next_functions[0][0].name(), node._saved_self, node._saved_target

    assert as_stock(TARGET, call, fast=1, strict=True).value[1] == "ToCopyBackward0"
