"""Operands, layouts and gradients for smooth L1, and the comparison of every bit with stock's."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from _helpers import assert_same, served
from _smooth_l1_loss_helpers import DTYPES
from hypothesis import strategies as st

import fastpatch
from fastpatch.testing._operands import neighbour
from fastpatch.testing.strategies import LENGTHS

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

COUNTS = st.one_of(st.integers(1, 140), st.sampled_from(LENGTHS).filter(bool))

# The inner run, without vector instructions, is about one thing only, and pays for another start of torch.
EXAMPLES = 100 if "ATEN_CPU_CAPABILITY" in os.environ else 500

LAYOUTS = ("flat", "offset", "matrix", "odd_ones", "odd_input", "one_channel")
DENSE_LAYOUTS = ("transposed", "odd_transposed", "channels_last", "odd_channels_last", "another_order", "image")
LOOSE_LAYOUTS = ("gaps", "gaps_in_input", "rows_apart", "expanded", "expanded_row", "overlapping")
GRADS = ("random", "expanded", "strided", "nan", "negative_zero")


def computed_in(dtype: torch.dtype) -> torch.finfo:
    """Reduced types are computed in float32, where beta is at home too."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)


def least_beta(dtype: torch.dtype) -> float:
    return 2 * computed_in(dtype).tiny


def betas(dtype: torch.dtype) -> st.SearchStrategy[float]:
    """Powers of two have a kernel of their own; not all reciprocals of those are normal numbers."""
    least, most = least_beta(dtype), computed_in(dtype).max
    powers = [2.0**126, 2.0**127] if most < 1e300 else [2.0**1022, 2.0**1023]
    numbers = [1.0, 0.5, 2.0**-20, 2.0**40, *powers, least, most, 0.1, 1 / 9, 3.0, 1, 2, 0.0, float("inf")]
    return st.one_of(st.sampled_from(numbers), st.floats(least, most), st.floats(1e-3, 1e3))


DTYPE_AND_BETA = st.sampled_from(DTYPES).flatmap(lambda dtype: st.tuples(st.just(dtype), betas(dtype)))


def edge_values(dtype: torch.dtype, beta: float, kind: str) -> torch.Tensor:
    """Differences at which a branch, a rounding or a special value begins."""
    info = torch.finfo(dtype)
    values = [0.0, info.tiny * info.eps, info.tiny / 2, info.tiny * 2, 1.0]
    if info.tiny <= beta <= info.max / 2:
        values += [beta, beta / 2, *(neighbour(beta, dtype, steps) for steps in (-1, 0, 1))]
    values += {"finite": [], "inf": [torch.inf, info.max], "nan": [torch.nan]}[kind]
    return torch.tensor([*values, *(-value for value in values)], dtype=torch.float64)


def operands(dtype: torch.dtype, n: int, beta: float, seed: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A flat input and target: random around beta, with some edge values. The first gradient isn't zero."""
    random = torch.Generator().manual_seed(seed)
    width = min(beta, torch.finfo(dtype).max / 8) or 1.0
    # Either the difference loses digits of the operands, or it loses none.
    target = torch.randn(n, generator=random, dtype=torch.float64) * (1.0 if seed % 2 else min(width, 1.0))
    input = target + torch.randn(n, generator=random, dtype=torch.float64) * width * 1.3
    if kind != "plain":
        chosen = torch.rand(n, generator=random) < 0.3
        edges = edge_values(dtype, beta, kind)
        some = torch.randint(len(edges), (n,), generator=random)
        target[chosen] = torch.tensor([0.0, -0.0], dtype=torch.float64)[some[chosen] % 2]
        input[chosen] = edges[some.roll(1)[chosen]]
    input[0], target[0] = beta if torch.finfo(dtype).tiny <= beta <= torch.finfo(dtype).max else 1.0, 0.0
    return input.to(dtype), target.to(dtype)


def arrange(flat: torch.Tensor, layout: str, *, is_input: bool) -> torch.Tensor:
    """The elements in a layout that is served; a few are dropped where its sizes ask for that."""
    n = flat.numel()
    if layout in LOOSE_LAYOUTS:
        return _arrange_loosely(flat, layout, is_input=is_input)
    if layout == "offset":
        return torch.cat([flat.new_zeros(3), flat, flat.new_zeros(2)])[3 : 3 + n]
    if layout == "odd_ones" or (layout == "odd_input" and is_input):
        return flat.as_strided((1, n, 1), (5, 1, 7))
    if layout == "odd_input":
        return flat.view(1, n, 1)
    if layout in ("matrix", "transposed", "another_order") and n >= 3:
        matrix = flat[: n // 3 * 3].view(n // 3, 3)
        if layout == "another_order" and is_input:
            return flat[: n // 3 * 3].view(3, n // 3).t()
        return matrix.t() if layout == "transposed" else matrix
    if layout == "odd_transposed" and n >= 6:
        return flat.as_strided((3, 1, n // 3), (1, 5, 3))
    if layout == "odd_channels_last" and n >= 12:
        return flat.as_strided((1, 3, n // 6, 2), (5, 1, 6, 3))
    if layout == "channels_last" and n >= 12:
        return flat[: n // 12 * 12].view(2, n // 12, 2, 3).permute(0, 3, 1, 2)
    if layout == "image" and n >= 12:  # the target in another order than the input, and neither in that of its sizes
        image = flat[: n // 12 * 12]
        return (
            image.view(2, n // 12, 2, 3).permute(0, 3, 1, 2)
            if is_input
            else image.view(3, n // 12, 2, 2).permute(3, 0, 1, 2)
        )
    if layout == "one_channel" and n >= 4:  # contiguous in both memory formats
        image = flat[: n // 4 * 4].view(2, 1, n // 4, 2)
        return image.as_strided(image.shape, (n // 4 * 2, 1, 2, 1)) if is_input else image
    return flat.view(()) if n == 1 else flat


def _arrange_loosely(flat: torch.Tensor, layout: str, *, is_input: bool) -> torch.Tensor:
    """Elements with others in between, or several at one place."""
    n = flat.numel()
    rows = flat[: n // 3 * 3].view(n // 3, 3)
    if n < 3 or (layout in ("gaps_in_input", "overlapping") and not is_input):
        return flat if n < 3 or layout == "gaps_in_input" else rows
    if layout in ("gaps", "gaps_in_input"):
        return torch.stack([flat, flat + 1], 1)[:, 0]
    if layout == "rows_apart":
        return torch.cat([rows, rows + 1], 1)[:, :3]
    if layout.startswith("expanded"):
        some = rows[:1] if layout == "expanded_row" else rows[:, :1]
        return rows if is_input else some.expand(rows.shape)
    return flat.as_strided(rows.shape, (2, 1))


def grad_output(like: torch.Tensor, kind: str, seed: int) -> torch.Tensor:
    if kind == "negative_zero":
        grad = torch.full(like.shape, -0.0, dtype=like.dtype)
        grad.view(-1)[0] = -1.5
        return grad
    if kind == "expanded":
        return torch.tensor(-0.37, dtype=like.dtype).expand(like.shape)
    generator = torch.Generator().manual_seed(seed)
    if kind == "strided":
        return torch.randn((*like.shape, 2), generator=generator).to(like.dtype)[..., 1]
    grad = torch.randn(like.shape, generator=generator).to(like.dtype)
    if kind == "nan":
        grad.view(-1)[-1] = torch.nan
    return grad


def stock_loss(input: torch.Tensor, target: torch.Tensor, reduction: str, beta: float) -> torch.Tensor:
    if beta == 0:
        return torch.ops.aten.l1_loss.default(input, target, REDUCTIONS[reduction])
    return torch.ops.aten.smooth_l1_loss.default(input, target, REDUCTIONS[reduction], beta)


def fast_loss(input: torch.Tensor, target: torch.Tensor, reduction: str, beta: float) -> torch.Tensor:
    return F.smooth_l1_loss(input, target, reduction=reduction, beta=beta)


def loss_and_grads(loss: Any, input: torch.Tensor, target: torch.Tensor, needs: str, grad: str, *how: Any) -> list[Any]:
    """The loss and the gradients of fresh leaves that share the operands' memory and strides."""
    leaves = [input.detach(), target.detach()]
    for leaf, name in zip(leaves, ("input", "target"), strict=True):
        leaf.requires_grad_(needs in (name, "both"))
    output = loss(*leaves, *how)
    if needs != "nothing":
        output.backward(grad_output(output, grad, seed=3))
    return [output, *(leaf.grad for leaf in leaves)]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def assert_bits(
    input: torch.Tensor,
    target: torch.Tensor,
    needs: str,
    grad: str,
    reduction: str,
    beta: float,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """The loss is computed within the context, and the gradients outside of it."""

    def within(loss: Any) -> Any:
        def call(*args: Any) -> torch.Tensor:
            with context():
                return loss(*args)

        return call

    untouched = dense(input), dense(target)
    expected = loss_and_grads(within(stock_loss), input, target, needs, grad, reduction, beta)
    with served("smooth_l1_loss", fast=1), fastpatch.enabled("smooth_l1_loss", strict=True):
        actual = loss_and_grads(within(fast_loss), input, target, needs, grad, reduction, beta)
    assert_same(actual, expected)
    assert [g is not None for g in actual[1:]] == [needs in ("input", "both"), needs in ("target", "both")]
    if beta <= min(torch.finfo(input.dtype).max, torch.finfo(target.dtype).max):
        assert all(gradient.count_nonzero() for gradient in actual[1:] if gradient is not None)
    assert_same((dense(input), dense(target)), untouched)
