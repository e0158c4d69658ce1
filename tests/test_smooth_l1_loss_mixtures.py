"""Smooth L1 of two dtypes, and under autocast: every bit is stock's, which computes in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from _helpers import as_stock, threads
from _smooth_l1_loss_bits import (
    COUNTS,
    DENSE_LAYOUTS,
    EXAMPLES,
    GRADS,
    LAYOUTS,
    REDUCTIONS,
    arrange,
    assert_bits,
    betas,
    operands,
)
from _smooth_l1_loss_helpers import TARGET, grads, loss, pair
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NARROW = (FLOAT32, BFLOAT16, FLOAT16)
MIXTURES = [(a, b) for a in NARROW for b in NARROW if a != b]
# What stock casts, or not, to float32.
AUTOCAST = [*MIXTURES, *((dtype, dtype) for dtype in (*NARROW, FLOAT64))]


def autocast(enabled: bool = True) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", enabled=enabled)


def mixed(dtypes: tuple[torch.dtype, torch.dtype], n: int, beta: float, seed: int, kind: str) -> Any:
    """An input and a target whose edge values are those of the dtype with fewer of them."""
    narrowest = next(dtype for dtype in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64) if dtype in dtypes)
    return [t.to(dtype) for t, dtype in zip(operands(narrowest, n, beta, seed, kind), dtypes, strict=True)]


ways = st.one_of(
    st.tuples(st.just(False), st.sampled_from(MIXTURES)),
    st.tuples(st.just(True), st.sampled_from(AUTOCAST)),
)


@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(
    way=ways,
    beta=betas(FLOAT32),
    n=COUNTS,
    layout=st.sampled_from(LAYOUTS + DENSE_LAYOUTS),
    reduction=st.sampled_from(list(REDUCTIONS)),
    kind=st.sampled_from(["plain", "finite", "inf", "nan"]),
    needs=st.sampled_from(["input", "input", "target", "both", "nothing"]),
    grad=st.sampled_from(GRADS),
    seed=st.integers(0, 2**32 - 1),
)
@example((False, (BFLOAT16, FLOAT16)), 0.1, 33, "flat", "none", "finite", "both", "random", 0)
@example((True, (BFLOAT16, BFLOAT16)), 0.1, 2049, "flat", "mean", "finite", "both", "random", 1)
@example((True, (FLOAT16, FLOAT32)), 0.1, 2049, "another_order", "sum", "plain", "both", "random", 2)
def test_bits_of_mixtures_are_those_of_stock(
    way: tuple[bool, tuple[torch.dtype, torch.dtype]],
    beta: float,
    n: int,
    layout: str,
    reduction: str,
    kind: str,
    needs: str,
    grad: str,
    seed: int,
) -> None:
    enabled, dtypes = way
    input, target = mixed(dtypes, n, beta, seed, kind)
    input, target = (arrange(t, layout, is_input=t is input) for t in (input, target))
    assert_bits(input, target, needs, grad, reduction, beta, lambda: autocast(enabled))


@pytest.mark.parametrize("dtypes", AUTOCAST, ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_bits_of_large_mixtures(dtypes: tuple[torch.dtype, torch.dtype], count: int) -> None:
    """Each thread copies its share block by block, from where stock's share begins."""
    input, target = mixed(dtypes, 4 * 32768 + 33, 0.3, 1, "finite")
    with threads(count):
        for reduction in REDUCTIONS:
            assert_bits(input, target, "both", "random", reduction, 0.3, autocast)
            if dtypes in MIXTURES:
                assert_bits(input, target, "both", "random", reduction, 0.3)


def test_autocast_is_that_of_the_moment_of_the_call() -> None:
    def call() -> Any:
        input, target = (t.detach().bfloat16() for t in pair())
        with torch.autocast("cpu", dtype=torch.float16):
            inside = loss(input.requires_grad_(), target)
            with autocast(False):
                outside = loss(input, target)
            inside.backward()
        first, input.grad = input.grad, None
        outside.backward()
        return inside, outside, first, input.grad

    inside, outside, *_ = as_stock(TARGET, call, fast=2, strict=True).value
    assert (inside.dtype, outside.dtype) == (FLOAT32, BFLOAT16)


@pytest.mark.parametrize("dtypes", AUTOCAST, ids=str)
def test_gradients_are_of_the_dtypes_of_their_operands(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    def call() -> Any:
        input, target = (t.requires_grad_() for t in mixed(dtypes, 37, 0.7, 3, "plain"))
        with autocast():
            output = loss(input, target)
        return output, grads(output, input, target)

    output, gradients = as_stock(TARGET, call, fast=1, strict=True).value
    assert output.dtype == (FLOAT64 if FLOAT64 in dtypes else FLOAT32)
    assert tuple(gradient.dtype for gradient in gradients) == dtypes


def test_gradients_of_two_losses_of_one_operand_add_up() -> None:
    """Stock casts the operand for each of them anew, and adds in the operand's dtype."""

    def call() -> Any:
        input, target = (t.requires_grad_() for t in mixed((BFLOAT16, FLOAT16), 400, 0.7, 3, "plain"))
        with autocast():
            output = loss(input, target, "sum") + loss(input, target.flip(0), "sum", 0.1) + loss(target, input, "sum")
        return grads(output, input, target)

    as_stock(TARGET, call, fast=3, strict=True)
