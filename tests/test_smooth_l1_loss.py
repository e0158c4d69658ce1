"""Smooth L1, values and gradients: every bit is stock's, over sizes, layouts, betas, edge values and threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _helpers import assert_same, served, threads
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fastpatch

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
TINY, HUGE = 2 * float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

# Around the vector width (8), two of them (the gradient's body), an accumulator row (32), the levels of the cascade
# (512, 8192, 131072) and the grain of a thread (32768).
EDGES = (1, 8, 16, 32, 64, 512, 1024, 8192)
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([n + d for n in EDGES for d in (-1, 0, 1, 9)]).filter(bool))
GRAIN = 32768

# Powers of two have a kernel of their own; not all reciprocals of those are normal numbers.
BETAS = st.one_of(
    st.sampled_from([1.0, 0.5, 2.0**-20, 2.0**40, 2.0**126, 2.0**127, TINY, HUGE, 0.1, 1 / 9, 3.0, 1, 2]),
    st.floats(TINY, HUGE),
    st.floats(1e-3, 1e3),
)
LAYOUTS = ("flat", "offset", "matrix", "odd_ones", "odd_input", "one_channel")
DENSE_LAYOUTS = ("transposed", "odd_transposed", "channels_last", "odd_channels_last")  # not contiguous
GRADS = ("random", "expanded", "strided", "nan", "negative_zero")


def edge_values(beta: float, kind: str) -> np.ndarray:
    """Differences at which a branch, a rounding or a special value begins."""
    width = np.float32(beta)
    with np.errstate(over="ignore", under="ignore"):
        finite = [width, np.nextafter(width, np.float32(0)), np.nextafter(width, np.float32(np.inf)), width / 2]
        finite += [np.float32(v) for v in (0.0, 1e-45, 1e-40, TINY, 1.0)]
    special = {"finite": [], "inf": [np.inf], "nan": [np.nan]}[kind]
    values = np.array([v for v in finite if np.isfinite(v)] + special, dtype=np.float32)
    return np.concatenate([values, -values])


def operands(n: int, beta: float, seed: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A flat input and target: random around beta, with some edge values. The first gradient is never zero."""
    random = np.random.default_rng(seed)
    target = random.standard_normal(n, dtype=np.float32)
    with np.errstate(over="ignore", under="ignore"):
        difference = random.standard_normal(n, dtype=np.float32) * np.float32(min(beta, HUGE / 8)) * np.float32(1.3)
        input = target + difference
    if kind != "plain":
        chosen = random.random(n) < 0.3
        target[chosen] = random.choice(np.array([0.0, -0.0], dtype=np.float32), chosen.sum())
        input[chosen] = random.choice(edge_values(beta, kind), chosen.sum())
    input[0], target[0] = np.float32(beta), 0.0
    return torch.from_numpy(input), torch.from_numpy(target)


def arrange(flat: torch.Tensor, layout: str, *, is_input: bool) -> torch.Tensor:
    """The elements in a layout that is served; a few are dropped where its sizes ask for that."""
    n = flat.numel()
    if layout == "offset":
        return torch.cat([flat.new_zeros(3), flat, flat.new_zeros(2)])[3 : 3 + n]
    if layout == "odd_ones" or (layout == "odd_input" and is_input):
        return flat.as_strided((1, n, 1), (5, 1, 7))
    if layout == "odd_input":
        return flat.view(1, n, 1)
    if layout in ("matrix", "transposed") and n >= 3:
        matrix = flat[: n // 3 * 3].view(n // 3, 3)
        return matrix.t() if layout == "transposed" else matrix
    if layout == "odd_transposed" and n >= 6:
        return flat.as_strided((3, 1, n // 3), (1, 5, 3))
    if layout == "odd_channels_last" and n >= 12:
        return flat.as_strided((1, 3, n // 6, 2), (5, 1, 6, 3))
    if layout == "channels_last" and n >= 12:
        return flat[: n // 12 * 12].view(2, n // 12, 2, 3).permute(0, 3, 1, 2)
    if layout == "one_channel" and n >= 4:  # contiguous in both memory formats
        image = flat[: n // 4 * 4].view(2, 1, n // 4, 2)
        return image.as_strided(image.shape, (n // 4 * 2, 1, 2, 1)) if is_input else image
    return flat.view(()) if n == 1 else flat


def grad_output(like: torch.Tensor, kind: str, seed: int) -> torch.Tensor:
    if kind == "negative_zero":
        grad = torch.full(like.shape, -0.0)
        grad.view(-1)[0] = -1.5
        return grad
    if kind == "expanded":
        return torch.tensor(-0.37).expand(like.shape)
    generator = torch.Generator().manual_seed(seed)
    if kind == "strided":
        return torch.randn((*like.shape, 2), generator=generator)[..., 1]
    grad = torch.randn(like.shape, generator=generator)
    if kind == "nan":
        grad.view(-1)[-1] = torch.nan
    return grad


def stock_loss(input: torch.Tensor, target: torch.Tensor, reduction: str, beta: float) -> torch.Tensor:
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


def assert_bits(input: torch.Tensor, target: torch.Tensor, needs: str, grad: str, reduction: str, beta: float) -> None:
    untouched = input.clone(), target.clone()
    expected = loss_and_grads(stock_loss, input, target, needs, grad, reduction, beta)
    with served("smooth_l1_loss", fast=1), fastpatch.enabled("smooth_l1_loss", strict=True):
        actual = loss_and_grads(fast_loss, input, target, needs, grad, reduction, beta)
    assert_same(actual, expected)
    assert [g is not None for g in actual[1:]] == [needs in ("input", "both"), needs in ("target", "both")]
    assert all(gradient.count_nonzero() for gradient in actual[1:] if gradient is not None)
    assert_same((input, target), untouched)


# The inner run of the last test is about one thing only, and pays for another start of torch.
EXAMPLES = 60 if "ATEN_CPU_CAPABILITY" in os.environ else 300


@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(
    n=SIZES,
    layout=st.sampled_from(LAYOUTS + DENSE_LAYOUTS),
    reduction=st.sampled_from(list(REDUCTIONS)),
    beta=BETAS,
    kind=st.sampled_from(["plain", "finite", "inf", "nan"]),
    needs=st.sampled_from(["input", "input", "target", "both", "nothing"]),
    grad=st.sampled_from(GRADS),
    seed=st.integers(0, 2**32 - 1),
)
@example(n=7, layout="flat", reduction="sum", beta=1.0, kind="plain", needs="input", grad="random", seed=0)
@example(n=17, layout="flat", reduction="none", beta=0.1, kind="finite", needs="input", grad="random", seed=1)
@example(n=24, layout="odd_channels_last", reduction="none", beta=1, kind="plain", needs="input", grad="random", seed=2)
@example(n=24, layout="odd_transposed", reduction="none", beta=1, kind="plain", needs="input", grad="random", seed=3)
def test_bits_are_those_of_stock(
    n: int, layout: str, reduction: str, beta: float, kind: str, needs: str, grad: str, seed: int
) -> None:
    input, target = operands(n, beta, seed, kind)
    input, target = (arrange(t, layout, is_input=t is input) for t in (input, target))
    assert_bits(input, target, needs, grad, reduction, beta)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("n", [GRAIN - 1, GRAIN, GRAIN + 1, 2 * GRAIN + 17, 4 * GRAIN + 33, 9 * GRAIN + 5])
def test_bits_at_every_number_of_threads(n: int, count: int, reduction: str) -> None:
    """Each thread leaves a partial sum and a scalar tail; nine partials are more than a vector."""
    with threads(count):
        for beta, grad in ((1.0, "expanded"), (0.3, "random")):
            input, target = operands(n, beta, n, "finite")
            assert_bits(input, target, "input", grad, reduction, beta)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("layout", [*LAYOUTS[1:], *DENSE_LAYOUTS])
def test_bits_of_large_layouts(layout: str, count: int) -> None:
    input, target = operands(3 * GRAIN + 12, 0.7, 5, "finite")
    input, target = (arrange(t, layout, is_input=t is input) for t in (input, target))
    with threads(count):
        for reduction in REDUCTIONS:
            assert_bits(input, target, "input", "random", reduction, 0.7)


def test_bits_beyond_the_integers_of_float32() -> None:
    """2^24 + 33 elements: the mean divides by a rounded count, and the cascade takes wider steps."""
    n = 2**24 + 33
    target = torch.linspace(-3, 3, n)
    assert_bits(target * 1.7 + 0.01, target, "nothing", "expanded", "mean", 0.3)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("beta", [TINY, 2.0**-125, 0.1, 2.0**126, 2.0**127, HUGE])
def test_bits_with_subnormals_flushed(beta: float, flush: bool) -> None:
    """In this mode of the CPU subnormal operands and results count as zero, in stock's kernels and in ours."""
    if not torch.set_flush_denormal(flush):
        pytest.skip("this CPU has no such mode")
    try:
        for reduction in REDUCTIONS:
            input, target = operands(53, beta, 7, "finite")
            assert_bits(input, target, "input", "random", reduction, beta)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("call", ["positional", "named", "defaults", "module", "integer beta", "numpy beta"])
def test_bits_however_the_arguments_come(call: str) -> None:
    input, target = operands(37, 2.0, 11, "finite")
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
    data = [operands(50_000, 0.3, seed, "finite") for seed in (1, 2)]
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
    asked = os.environ.get("ATEN_CPU_CAPABILITY")
    if asked is None:
        pytest.skip("ATen chooses")
    assert torch.backends.cpu.get_cpu_capability() == asked.upper()


@pytest.mark.skipif("ATEN_CPU_CAPABILITY" in os.environ, reason="is the inner run, or somebody else's choice")
def test_same_without_vector_instructions() -> None:
    """ATen picks its capability once per process, so another one has to run it."""
    chosen = "are_those_of_stock or capability or (number_of_threads and sum and 32769)"
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-k", chosen, "-p", "no:cacheprovider"]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "5 passed" in run.stdout, run.stdout
