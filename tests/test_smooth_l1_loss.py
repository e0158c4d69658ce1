"""Smooth L1, values and gradients: every bit is stock's, over dtypes, sizes, layouts, betas, edges and threads."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _capability import assert_capability_is_the_one_asked_for, outer_run_only, run_at_default
from _helpers import assert_same, served, threads
from _smooth_l1_loss_bits import (
    COUNTS,
    DENSE_LAYOUTS,
    DTYPE_AND_BETA,
    EXAMPLES,
    GRADS,
    LAYOUTS,
    LOOSE_LAYOUTS,
    REDUCTIONS,
    arrange,
    assert_bits,
    computed_in,
    fast_loss,
    least_beta,
    loss_and_grads,
    operands,
    stock_loss,
)
from _smooth_l1_loss_helpers import each_dtype
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fastpatch

GRAIN = 32768  # of a thread
BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(
    dtype_and_beta=DTYPE_AND_BETA,
    n=COUNTS,
    layout=st.sampled_from(LAYOUTS + DENSE_LAYOUTS + LOOSE_LAYOUTS),
    reduction=st.sampled_from(list(REDUCTIONS)),
    kind=st.sampled_from(["plain", "finite", "inf", "nan"]),
    needs=st.sampled_from(["input", "input", "target", "both", "nothing"]),
    grad=st.sampled_from(GRADS),
    seed=st.integers(0, 2**32 - 1),
)
@example((FLOAT32, 1.0), 7, "flat", "sum", "plain", "input", "random", 0)
@example((FLOAT32, 0.1), 17, "flat", "none", "finite", "input", "random", 1)
@example((FLOAT32, 1), 24, "odd_channels_last", "none", "plain", "input", "random", 2)
@example((FLOAT32, 1), 24, "odd_transposed", "none", "plain", "input", "random", 3)
@example((BFLOAT16, 0.1), 33, "flat", "none", "finite", "both", "random", 4)
@example((FLOAT16, 0.1), 33, "flat", "sum", "finite", "both", "random", 5)
@example((FLOAT64, 0.1), 9, "flat", "none", "finite", "both", "random", 6)
@example((FLOAT32, float("inf")), 33, "flat", "none", "inf", "both", "random", 0)
@example(
    (FLOAT16, 0.7), 3704, "flat", "mean", "plain", "nothing", "random", 38715
)  # float16 shows the order of the sum
def test_bits_are_those_of_stock(
    dtype_and_beta: tuple[torch.dtype, float],
    n: int,
    layout: str,
    reduction: str,
    kind: str,
    needs: str,
    grad: str,
    seed: int,
) -> None:
    dtype, beta = dtype_and_beta
    input, target = operands(dtype, n, beta, seed, kind)
    input, target = (arrange(t, layout, is_input=t is input) for t in (input, target))
    assert_bits(input, target, needs, grad, reduction, beta)


@each_dtype
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_bits_of_every_size_up_to_two_rows_of_accumulators(dtype: torch.dtype, reduction: str) -> None:
    """A row is up to four vectors of 16 elements: each length of each tail, of sums and of gradients."""
    for n in range(1, 131):
        input, target = operands(dtype, n, 0.1, n, "finite" if n % 2 else "plain")
        assert_bits(input, target, "input", "random", reduction, 0.1)


@each_dtype
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("n", [GRAIN - 1, GRAIN, GRAIN + 1, 2 * GRAIN + 17, 9 * GRAIN + 5])
def test_bits_at_every_number_of_threads(n: int, count: int, dtype: torch.dtype) -> None:
    """Each thread leaves a partial sum and a scalar tail; nine partials are more than a vector."""
    input, target = operands(dtype, n, 0.3, n, "finite")
    with threads(count):
        for reduction, beta, grad in (("none", 0.3, "random"), ("mean", 1.0, "expanded"), ("sum", 0.3, "expanded")):
            assert_bits(input, target, "input", grad, reduction, beta)


@each_dtype
def test_bits_of_more_threads_than_a_vector_of_partial_sums(dtype: torch.dtype) -> None:
    """A row of partial sums as long as two vectors of a reduced type."""
    input, target = operands(dtype, 40 * GRAIN + 5, 0.3, 1, "plain")
    with threads(33):
        for reduction in REDUCTIONS:
            assert_bits(input, target, "nothing", "random", reduction, 0.3)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS[1:], *DENSE_LAYOUTS, *LOOSE_LAYOUTS])
def test_bits_of_large_layouts(layout: str, dtype: torch.dtype) -> None:
    """Each thread's share begins where stock's does, in whatever order stock visits the elements."""
    input, target = operands(dtype, 3 * GRAIN + 12, 0.7, 5, "finite")
    input, target = (arrange(t, layout, is_input=t is input) for t in (input, target))
    with threads(3):
        for reduction in REDUCTIONS:
            assert_bits(input, target, "input", "random", reduction, 0.7)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_bits_beyond_the_integers_of_float32(dtype: torch.dtype) -> None:
    """2^24 + 33 elements: the mean divides by a rounded count, and the cascade of one thread takes wider steps."""
    input = torch.randn(2**24 + 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    target = torch.zeros_like(input)
    for count in (1, 2):
        with threads(count):
            assert_bits(input, target, "nothing", "expanded", "mean", 0.1)


@pytest.mark.parametrize("flush", [False, True])
@each_dtype
def test_bits_with_subnormals_flushed(dtype: torch.dtype, flush: bool) -> None:
    """In this mode of the CPU subnormal operands and results count as zero, in stock's kernels and in ours."""
    least, most = least_beta(dtype), computed_in(dtype).max
    if not torch.set_flush_denormal(flush):
        pytest.skip("this CPU has no such mode")
    try:
        for beta in (0.0, least, 2 * least, 0.1, 2.0**126, 2.0**127, most):
            for reduction in REDUCTIONS:
                input, target = operands(dtype, 53, beta, 7, "finite")
                assert_bits(input, target, "input", "random", reduction, beta)
    finally:
        torch.set_flush_denormal(False)


@each_dtype
@pytest.mark.parametrize("call", ["positional", "named", "defaults", "module", "integer beta", "numpy beta"])
def test_bits_however_the_arguments_come(call: str, dtype: torch.dtype) -> None:
    input, target = operands(dtype, 37, 2.0, 11, "finite")
    calls = {
        "positional": lambda: F.smooth_l1_loss(input, target, None, None, "sum", 2.0),
        "named": lambda: F.smooth_l1_loss(beta=2.0, reduction="sum", target=target, input=input),
        "defaults": lambda: F.smooth_l1_loss(input, target),
        "module": lambda: torch.nn.SmoothL1Loss(reduction="sum", beta=2.0)(input, target),
        "integer beta": lambda: F.smooth_l1_loss(input, target, reduction="sum", beta=2),
        "numpy beta": lambda: F.smooth_l1_loss(input, target, reduction="sum", beta=np.float64(2.0)),
    }
    expected = stock_loss(input, target, *(("mean", 1.0) if call == "defaults" else ("sum", 2.0)))
    with served("smooth_l1_loss", fast=1), fastpatch.enabled("smooth_l1_loss", strict=True):
        assert_same(calls[call](), expected)


def test_bits_of_two_python_threads_at_once() -> None:
    """Large enough that the GIL is released in between; the counter loses no call."""
    rounds, failures = 40, []
    data = [operands(dtype, 50_000, 0.3, seed, "finite") for seed, dtype in ((1, FLOAT32), (2, BFLOAT16))]
    start = threading.Barrier(2)

    def work(input: torch.Tensor, target: torch.Tensor) -> None:
        try:
            expected = loss_and_grads(stock_loss, input, target, "input", "random", "mean", 0.3)
            start.wait(timeout=60)
            with fastpatch.enabled("smooth_l1_loss", strict=True):
                for _ in range(rounds):
                    assert_same(loss_and_grads(fast_loss, input, target, "input", "random", "mean", 0.3), expected)
        except BaseException as error:
            failures.append(error)

    with served("smooth_l1_loss", fast=2 * rounds), ExitStack() as stack:
        stack.enter_context(threads(2))
        workers = [threading.Thread(target=work, args=pair) for pair in data]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=120)
    assert not failures
    assert not any(worker.is_alive() for worker in workers)


def test_capability_is_the_one_asked_for() -> None:
    """Below, this file runs again under ATEN_CPU_CAPABILITY; this proves that ATen obeyed."""
    assert_capability_is_the_one_asked_for()


@outer_run_only
def test_same_without_vector_instructions() -> None:
    """ATen picks its capability once per process, so another one has to run it."""
    chosen = "are_those_of_stock or capability or (number_of_threads and 32769)"
    files = [__file__, __file__.replace("loss.py", "loss_mixtures.py")]
    output = run_at_default(files, chosen)
    assert "15 passed" in output, output
