"""Smooth L1 at its edges: beta of zero, which is L1, no element, one element, and a beta that is a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _helpers import as_stock, assert_same, served
from _smooth_l1_loss_helpers import DTYPES, TARGET, each_dtype, grad_of, grads, operands, pair

import fastpatch

each_reduction = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])

# ------------------------------------------------------------------------------------------------------ beta of zero

ZEROS = {
    "integer": lambda: 0,
    "float": lambda: 0.0,
    "negative": lambda: -0.0,
    "numpy": lambda: np.float64(0),
    "tensor": lambda: torch.tensor(0.0),
    "negative tensor": lambda: torch.tensor(-0.0),
    "tensor of float64": lambda: torch.tensor(0.0, dtype=torch.float64),
    "tensor of integers": lambda: torch.tensor(0),
    "tensor of bools": lambda: torch.tensor(False),
}


def names_of_graph(output: torch.Tensor) -> list[str]:
    """The nodes from the loss to its operands, by way of the first operand of each."""
    names, node = [], output.grad_fn
    while node is not None:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return names


@each_dtype
@each_reduction
@pytest.mark.parametrize("zero", ZEROS)
def test_zero_is_l1_with_stocks_graph(dtype: torch.dtype, reduction: str, zero: str) -> None:
    def call() -> Any:
        input, target = operands(37, dtype)
        output = F.smooth_l1_loss(input, target.requires_grad_(), reduction=reduction, beta=ZEROS[zero]())
        names = names_of_graph(output)
        return output, names, grads(output, input, target)

    output, names, gradients = as_stock(TARGET, call, fast=1, strict=True).value

    nodes = {"none": [], "mean": ["MeanBackward0"], "sum": ["SumBackward0"]}[reduction]
    assert names == [*nodes, "AbsBackward0", "SubBackward0", "torch::autograd::AccumulateGrad"]
    input, target = operands(37, dtype)
    expected = F.l1_loss(input, target.requires_grad_(), reduction=reduction)
    assert_same(output, expected)
    assert_same(gradients, grads(expected, input, target))


def values_of_l1() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, target, and sign of the difference."""
    numbers = [-1.0, 0.0, -0.0, 2.0, float("inf"), -float("inf"), float("nan")]
    values = torch.tensor(numbers)
    input, target = values.repeat_interleave(len(numbers)), values.repeat(len(numbers))
    return input, target, (input - target).sign()


@each_dtype
@each_reduction
def test_zero_without_a_gradient(dtype: torch.dtype, reduction: str) -> None:
    """Here our kernel computes, and above PyTorch's operators."""
    for n in (1, 7, 17, 33, 70, 531, 40_000):

        def call(n: int = n) -> Any:
            input, target = operands(n, dtype)
            return F.smooth_l1_loss(input.detach(), target, reduction=reduction, beta=0.0)

        assert as_stock(TARGET, call, fast=1, strict=True).value.count_nonzero()


@each_dtype
@pytest.mark.parametrize("needs", [True, False])
def test_zero_of_special_values(dtype: torch.dtype, needs: bool) -> None:
    input, target, sign = (t.to(dtype) for t in values_of_l1())

    def call() -> Any:
        leaf = input.clone().requires_grad_(needs)
        output = F.smooth_l1_loss(leaf, target, reduction="none", beta=0.0)
        return output, torch.autograd.grad(output.sum(), leaf)[0] if needs else sign

    output, gradient = as_stock(TARGET, call, fast=1, strict=True).value
    assert_same(output.detach(), (input - target).abs())
    assert_same(gradient, sign)


def test_zero_under_autocast() -> None:
    for dtype in DTYPES:
        for needs in (True, False):

            def call(dtype: torch.dtype = dtype, needs: bool = needs) -> Any:
                input, target = operands(37, dtype)
                with torch.autocast("cpu"):
                    output = F.smooth_l1_loss(input.requires_grad_(needs), target, beta=0)
                return (output, names_of_graph(output), grads(output, input)) if needs else output

            as_stock(TARGET, call, fast=1, strict=True)


def test_zero_in_the_backward_after_a_change_in_place() -> None:
    """Stock saves the difference, which a change of an operand doesn't reach."""

    def call() -> Any:
        input, target = operands()
        changed = input * 1
        output = F.smooth_l1_loss(changed, target, beta=0.0)
        changed.add_(10)
        return grads(output, input)

    as_stock(TARGET, call, fast=1, strict=True)


def test_zero_in_a_second_derivative() -> None:
    def call() -> Any:
        input, target = operands()
        (first,) = grads(F.smooth_l1_loss(input, target, beta=0.0), input, create_graph=True)
        return first, torch.autograd.grad((first * input).sum(), input)

    as_stock(TARGET, call, fast=1, strict=True)


# ------------------------------------------------------------------------------------------------- nothing, and one

EMPTY: dict[str, Callable[[], torch.Tensor]] = {
    "nothing": lambda: torch.empty(0),
    "no rows": lambda: torch.empty(0, 3),
    "no columns": lambda: torch.empty(3, 0),
    "nothing in between": lambda: torch.empty(2, 0, 4),
    "permuted": lambda: torch.empty(4, 0, 2).permute(2, 1, 0),
    "channels last": lambda: torch.empty(2, 3, 0, 5, memory_format=torch.channels_last),
    "with gaps": lambda: torch.empty(0, 6)[:, ::2],
    "expanded": lambda: torch.empty(1, 1).expand(3, 1)[:, :0],
    "cut off": lambda: torch.ones(5)[5:],
}


@each_dtype
@each_reduction
@pytest.mark.parametrize("how", EMPTY)
def test_no_element(dtype: torch.dtype, reduction: str, how: str) -> None:
    def call() -> Any:
        input, target = (EMPTY[how]().to(dtype).detach().requires_grad_() for _ in range(2))
        output = F.smooth_l1_loss(input, target, reduction=reduction)
        return output, output.grad_fn.name(), torch.autograd.grad(output, (input, target), grad_of(output))

    output, *_ = as_stock(TARGET, call, fast=1, strict=True).value
    assert output.isnan().all() if reduction == "mean" else not output.count_nonzero()


@each_reduction
def test_no_element_without_a_gradient_or_with_a_beta_of_zero(reduction: str) -> None:
    for dtype in DTYPES:
        for beta in (0.0, 1.0):

            def call(dtype: torch.dtype = dtype, beta: float = beta) -> Any:
                input = torch.empty(0, 3, dtype=dtype)
                plain = F.smooth_l1_loss(input, input, reduction=reduction, beta=beta)
                output = F.smooth_l1_loss(input.clone().requires_grad_(), input, reduction=reduction, beta=beta)
                output.backward(grad_of(output))
                return plain, output

            as_stock(TARGET, call, fast=2, strict=True)


@each_reduction
def test_no_element_of_several_dtypes(reduction: str) -> None:
    """Stock's promotion is of dtypes; that there is no element doesn't matter."""
    for autocast in (True, False):

        def call(autocast: bool = autocast) -> Any:
            input = torch.empty(0, 3, dtype=torch.bfloat16, requires_grad=True)
            with torch.autocast("cpu", enabled=autocast):
                output = F.smooth_l1_loss(input, torch.empty(0, 3), reduction=reduction)
            return output, torch.autograd.grad(output, input, grad_of(output))

        as_stock(TARGET, call, fast=1, strict=True)


@each_dtype
@each_reduction
@pytest.mark.parametrize("sizes", [(), (1,), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("difference", [0.4, 0.7, -3.0])
def test_one_element(dtype: torch.dtype, reduction: str, sizes: tuple[int, ...], difference: float) -> None:
    def call() -> Any:
        input, target = (torch.full(sizes, number).to(dtype).requires_grad_() for number in (difference, 0.0))
        output = F.smooth_l1_loss(input, target, reduction=reduction, beta=0.7)
        return output, grads(output, input, target)

    as_stock(TARGET, call, fast=1, strict=True)


# --------------------------------------------------------------------------------------------------- beta as a tensor


@each_dtype
def test_tensor_is_the_number_that_it_holds(dtype: torch.dtype) -> None:
    """0.7 isn't a number of float32, and beta need not be of the operands' dtype."""
    for beta in (torch.tensor(0.7), torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.7).half()):

        def call(beta: torch.Tensor = beta) -> Any:
            input, target = operands(70, dtype)
            output = F.smooth_l1_loss(input, target, reduction="none", beta=beta)
            return output, output.grad_fn._saved_beta, grads(output, input)

        assert as_stock(TARGET, call, fast=1, strict=True).value[1] == beta.item()


def test_tensor_is_read_at_each_call() -> None:
    beta = torch.tensor(0.5)
    input, target = pair()
    seen = []
    with served(TARGET, fast=3), fastpatch.enabled(TARGET, strict=True):
        for number in (0.5, 0.0, 2.0):
            beta.fill_(number)
            seen.append(F.smooth_l1_loss(input, target, beta=beta))
    assert_same(seen, [F.smooth_l1_loss(input, target, beta=number) for number in (0.5, 0.0, 2.0)])


def test_tensor_changed_before_the_backward_changes_nothing() -> None:
    def call() -> Any:
        beta = torch.tensor(0.5)
        input, target = operands()
        output = F.smooth_l1_loss(input, target, beta=beta)
        beta.fill_(0.01)
        return grads(output, input)

    as_stock(TARGET, call, fast=1, strict=True)
