"""Huber, values and derivatives: every bit is stock's, over dtypes, sizes, layouts, deltas, edge values and threads."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _any_loss_call import grad_output_of, memory_of
from _capability import assert_capability_is_the_one_asked_for, outer_run_only, run_at_default
from _helpers import as_stock, assert_same, served, threads
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fastpatch
from fastpatch.testing import Operand
from fastpatch.testing.strategies import FLOATS, GRAIN

TARGET = "huber_loss"
REDUCTIONS = ("none", "mean", "sum")
TINY = 2 * torch.finfo(torch.float32).tiny
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)

# Around the widths of vectors, of two of them (the gradient's body), an accumulator row, the levels of the cascade.
EDGES = (1, 4, 8, 16, 32, 64, 512, 1024, 8192)
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([n + d for n in EDGES for d in (-1, 0, 1, 9)]).filter(bool))
DELTAS = st.one_of(
    st.sampled_from([1.0, 0.5, 2.0**-20, 2.0**40, TINY, 0.1, 1 / 9, 3.0, 1, 2, 6e4, 1e38, 1e300, math.inf]),
    st.floats(TINY, 1e38),
    st.floats(1e-3, 1e3),
)
# {name: (layout of each operand, shape for about n elements)}
LAYOUTS = {
    "flat": ("contiguous", lambda n: (n,)),
    "offset": ("offset", lambda n: (n,)),
    "matrix": ("contiguous", lambda n: (max(n // 3, 1), 3)),
    "transposed": ("permuted", lambda n: (3, max(n // 3, 1))),
    "channels last": ("permuted", lambda n: (2, 3, max(n // 12, 1), 2)),
    "odd ones": ("odd strides", lambda n: (1, n, 1)),
    "gaps": ("gaps", lambda n: (n,)),
}


def pair(
    n: int = 37, dtype: torch.dtype = torch.float32, layout: str = "flat", delta: float = 0.7, *,
    needs: str = "input", kind: str = "edges", seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Input and target in one layout, but that only the target has gaps: such an input goes to stock. The differences
    are about delta."""
    arrangement, shape = LAYOUTS[layout][0], LAYOUTS[layout][1](n)
    order = {1: (0,), 2: (1, 0), 3: (2, 1, 0), 4: (0, 2, 3, 1)}[len(shape)]
    scale = 0.8 * min(delta, 1e4)

    def operand(name: str, arrangement: str, seed: int) -> torch.Tensor:
        return Operand(shape, dtype, arrangement, order, needs in (name, "both"), kind, scale, seed, delta).make()

    input = operand("input", "contiguous" if arrangement == "gaps" else arrangement, 2 * seed)
    target = operand("target", arrangement, 2 * seed + 1)
    with torch.no_grad():
        for tensor, number in ((input, 2 * min(delta, 1e3)), (target, 0.0)):
            tensor[(0,) * len(shape)] = number  # here is a gradient that isn't zero
    return input, target


def loss_and_gradients(
    operands: tuple[torch.Tensor, ...], reduction: str, delta: Any, grad: str = "random"
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    before = memory_of(operands)
    output = F.huber_loss(*operands, reduction=reduction, delta=delta)
    leaves = [operand for operand in operands if operand.requires_grad]
    gradients = torch.autograd.grad(output, leaves, grad_output_of(output, grad)) if leaves else ()
    assert_same(memory_of(operands), before)
    return output, gradients


# The inner run of the last test is about one thing only, and pays for another start of torch.
EXAMPLES = 100 if "ATEN_CPU_CAPABILITY" in os.environ else 300


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    n=SIZES,
    dtype=st.sampled_from(FLOATS),
    layout=st.sampled_from(["flat", "flat", *LAYOUTS]),
    reduction=st.sampled_from(REDUCTIONS),
    delta=DELTAS,
    kind=st.sampled_from(["random", "edges", "huge"]),
    needs=st.sampled_from(["input", "input", "target", "both", "nothing"]),
    grad=st.sampled_from(["random", "expanded", "strided"]),
    seed=st.integers(0, 2**32 - 1),
)
@example(
    n=17, dtype=torch.float32, layout="flat", reduction="none", delta=0.1, kind="edges", needs="both", grad="random",
    seed=1,
)  # fmt: skip
@example(
    n=24, dtype=torch.float16, layout="channels last", reduction="none", delta=6e4, kind="edges", needs="input",
    grad="random", seed=2,
)  # fmt: skip
def test_bits_are_those_of_stock(
    n: int, dtype: torch.dtype, layout: str, reduction: str, delta: float, kind: str, needs: str, grad: str, seed: int
) -> None:
    def call() -> Any:
        operands = pair(n, dtype, layout, delta, needs=needs, kind=kind, seed=seed)
        output, gradients = loss_and_gradients(operands, reduction, delta, grad)
        assert len(gradients) == {"nothing": 0, "both": 2}.get(needs, 1)
        # Elsewhere a gradient may be rounded to zero.
        assert delta < 1e-2 or all(gradient.count_nonzero() for gradient in gradients)
        return output, gradients

    as_stock(TARGET, call, fast=1, strict=True)


@each_dtype
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("n", [GRAIN - 1, GRAIN, GRAIN + 1, 4 * GRAIN + 33, 9 * GRAIN + 5])
def test_bits_at_every_number_of_threads(n: int, count: int, dtype: torch.dtype) -> None:
    """Each thread leaves a partial sum and a scalar tail; nine partials are more than a vector."""

    def call() -> Any:
        operands = pair(n, dtype, seed=n)
        return [
            loss_and_gradients(operands, reduction, delta, grad)
            for reduction in REDUCTIONS
            for delta, grad in ((1.0, "expanded"), (0.3, "random"))
        ]

    with threads(count):
        as_stock(TARGET, call, fast=6, strict=True)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_of_large_layouts(layout: str, count: int) -> None:
    def call() -> Any:
        operands = [pair(3 * GRAIN + 12, dtype, layout, needs="both") for dtype in (torch.float32, torch.bfloat16)]
        return [loss_and_gradients(pair, reduction, 0.7) for pair in operands for reduction in REDUCTIONS]

    with threads(count):
        as_stock(TARGET, call, fast=6, strict=True)


@each_dtype
@pytest.mark.parametrize("flush", [False, True])
def test_bits_with_subnormals_flushed(flush: bool, dtype: torch.dtype) -> None:
    """In this mode of the CPU subnormal operands and results count as zero, in stock's kernels and in ours."""
    smallest = 2 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).tiny

    def call() -> Any:
        return [
            loss_and_gradients(pair(53, dtype, delta=delta, needs="both"), reduction, delta)
            for reduction in REDUCTIONS
            for delta in (smallest, 2 * smallest, 0.1, 2.0**126)
        ]

    if not torch.set_flush_denormal(flush):
        pytest.skip("this CPU has no such mode")
    try:
        as_stock(TARGET, call, fast=12, strict=True)
    finally:
        torch.set_flush_denormal(False)


@each_dtype
@each_reduction
def test_no_elements(dtype: torch.dtype, reduction: str) -> None:
    def call() -> Any:
        input, target = torch.ones(0, 3, dtype=dtype, requires_grad=True), torch.ones(0, 3, dtype=dtype)
        return loss_and_gradients((input, target), reduction, 0.7)

    as_stock(TARGET, call, fast=1, strict=True)


# ------------------------------------------------------------------------------------------------------- derivatives


def test_who_computes_the_gradient() -> None:
    """Ours for contiguous operands, of input and of target; stock's operator for the rest. The profiler sees which."""

    def ranges(operands: tuple[torch.Tensor, ...], reduction: str, grad: str) -> tuple[int, bool]:
        """How many gradients are ours, and is any stock's?"""
        output = F.huber_loss(*operands, reduction=reduction)
        with torch.autograd.profiler.profile() as profile:
            output.backward(grad_output_of(output, grad))
        names = [event.name for event in profile.function_events]
        return names.count("fastpatch::huber_loss_backward"), "aten::huber_loss_backward" in names

    with served(TARGET, fast=7), fastpatch.enabled(TARGET, strict=True):
        assert ranges(pair(), "mean", "ones") == (1, False)
        assert ranges(pair(needs="target"), "none", "random") == (1, False)
        assert ranges(pair(needs="both"), "none", "expanded") == (2, False)
        assert ranges(pair(dtype=torch.bfloat16), "sum", "ones") == (1, False)
        assert ranges(pair(), "none", "strided") == (0, True)
        assert ranges(pair(layout="transposed"), "mean", "ones") == (0, True)
        assert ranges(pair(layout="gaps"), "mean", "ones") == (0, True)


@each_dtype
@each_reduction
@pytest.mark.parametrize("needs", ["input", "target", "both"])
def test_second_derivative(dtype: torch.dtype, reduction: str, needs: str) -> None:
    def call() -> Any:
        operands = pair(dtype=dtype, needs=needs)
        leaves = [operand for operand in operands if operand.requires_grad]
        output = F.huber_loss(*operands, reduction=reduction, delta=0.7)
        first = torch.autograd.grad(output, leaves, grad_output_of(output, "random"), create_graph=True)
        second = torch.autograd.grad(sum((1 + i) * g.pow(2).sum() for i, g in enumerate(first)), leaves)
        assert all(grad.count_nonzero() for grad in second)
        return first, [g.grad_fn.name() for g in first], second

    as_stock(TARGET, call, fast=1, strict=True)


def test_derivatives_by_finite_differences() -> None:
    input, target = (t.detach().requires_grad_() for t in pair(9, torch.float64, kind="random"))
    before = fastpatch.report().to_dict()[TARGET]["fast"]
    with fastpatch.enabled(TARGET):
        assert torch.autograd.gradcheck(lambda a, b: F.huber_loss(a, b, delta=0.7), (input, target))
        assert torch.autograd.gradgradcheck(lambda a, b: F.huber_loss(a, b, delta=0.7), (input, target))
    assert fastpatch.report().to_dict()[TARGET]["fast"] > before


def test_node_is_stocks() -> None:
    def call() -> Any:
        node = F.huber_loss(*pair(needs="both"), reduction="sum", delta=0.3).grad_fn
        saved = node._saved_self, node._saved_target, node._saved_reduction, node._saved_delta
        return type(node).__name__, node.name(), [type(edge).__name__ for edge, _ in node.next_functions], saved

    assert as_stock(TARGET, call, fast=1, strict=True).value[0] == "HuberLossBackward0"


# ---------------------------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtypes", [(a, b) for a in FLOATS for b in FLOATS], ids=str)
def test_autocast(dtypes: tuple[torch.dtype, torch.dtype], autocast: torch.dtype) -> None:
    """Stock casts operands of reduced types to float32; all are served, but for float64 beside another type."""
    is_served = dtypes[0] == dtypes[1] or torch.float64 not in dtypes

    def call() -> Any:
        results = []
        for reduction in REDUCTIONS:
            operands = pair(dtype=dtypes[0], needs="both")[0], pair(dtype=dtypes[1], needs="both", seed=1)[1]
            with torch.autocast("cpu", dtype=autocast):
                output = F.huber_loss(*operands, reduction=reduction, delta=0.3)
            if is_served:
                assert output.dtype == (torch.float64 if torch.float64 in dtypes else torch.float32)
            gradients = torch.autograd.grad(output, operands, grad_output_of(output, "random"))
            assert tuple(gradient.dtype for gradient in gradients) == dtypes
            results.append((output, gradients))
        return results

    # Stock's own backward of a mixture with float64 raises.
    counts = {"fast": 3, "strict": True} if is_served else {"fallback": {"dtype": 1}}
    assert bool(as_stock(TARGET, call, **counts).error) == (not is_served)


def test_autocast_saves_casts_that_later_changes_do_not_reach() -> None:
    def call() -> Any:
        input, target = pair(dtype=torch.bfloat16)
        with torch.autocast("cpu"):
            output = F.huber_loss(input, target)
        with torch.no_grad():
            input.mul_(3), target.zero_()
        return torch.autograd.grad(output, input)

    assert as_stock(TARGET, call, fast=1, strict=True).error is None


# -------------------------------------------------------------------------------------------------------- capability


def test_capability_is_the_one_asked_for() -> None:
    """Below, this file runs again under ATEN_CPU_CAPABILITY; this proves that ATen obeyed."""
    assert_capability_is_the_one_asked_for()


@outer_run_only
def test_same_without_vector_instructions() -> None:
    """ATen picks its capability once per process, so another one has to run it."""
    chosen = "are_those_of_stock or capability or (number_of_threads and 32769-2)"
    output = run_at_default([__file__], chosen)
    assert "6 passed" in output, output
