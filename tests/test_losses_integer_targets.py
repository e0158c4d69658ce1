"""Both losses of a floating-point input and a target of whole numbers, such as pixel coordinates or rewards: stock
promotes the target, and we convert it while we read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _helpers import as_stock, threads
from hypothesis import example, given, settings
from hypothesis import strategies as st

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LOSSES = {"smooth_l1_loss": "beta", "huber_loss": "delta"}
LAYOUTS = ("contiguous", "transposed", "other order")
names = pytest.mark.parametrize("name", LOSSES)


def operands(n: int, dtype: torch.dtype, whole: torch.dtype, layout: str, seed: int) -> list[torch.Tensor]:
    """Targets of any magnitude, those that a float rounds too; inputs close to them."""
    generator = torch.Generator().manual_seed(seed)
    limits = torch.iinfo(whole)
    target = torch.randint(max(limits.min, -(2**62)), min(limits.max, 2**62), (3, n), generator=generator)
    target = target >> torch.randint(0, 62, (3, n), generator=generator)
    target = target.clamp(limits.min, limits.max).to(whole)
    input = (target.double() + 3 * torch.randn(3, n, generator=generator, dtype=torch.float64)).to(dtype)
    if layout == "transposed":
        input, target = (t.t().contiguous().t() for t in (input, target))
    elif layout == "other order":
        target = target.t().contiguous().t()
    return [input, target]


@pytest.mark.parametrize("count", [1, 2])
@given(
    name=st.sampled_from(list(LOSSES)),
    n=st.sampled_from([0, 1, 2, 5, 21, 43, 700, 11000]),
    dtype=st.sampled_from(FLOATS),
    whole=st.sampled_from(WHOLE),
    layout=st.sampled_from(LAYOUTS),
    reduction=st.sampled_from(["none", "mean", "sum"]),
    number=st.sampled_from([0, 0.3, 1.0, 5.0]),
    needs=st.booleans(),
    autocast=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example("smooth_l1_loss", 700, torch.float32, torch.int64, "contiguous", "mean", 1.0, True, False, 0)
@example("smooth_l1_loss", 700, torch.bfloat16, torch.int64, "contiguous", "sum", 0, False, False, 0)
@settings(deadline=None, max_examples=150)
def test_bits_are_those_of_stock(
    count: int,
    name: str,
    n: int,
    dtype: torch.dtype,
    whole: torch.dtype,
    layout: str,
    reduction: str,
    number: float,
    needs: bool,
    autocast: bool,
    seed: int,
) -> None:
    number = number or (0 if name == "smooth_l1_loss" else 1.0)
    # Huber's backward of two dtypes raises, and so ends a call that needs a gradient.
    needs = needs and name == "smooth_l1_loss"

    def call() -> Any:
        input, target = operands(n, dtype, whole, layout, seed)
        with torch.autocast("cpu", enabled=autocast):
            output = getattr(F, name)(
                input.requires_grad_(needs), target, reduction=reduction, **{LOSSES[name]: number}
            )
        if needs:
            output.backward(torch.linspace(1, -2, output.numel()).view(output.shape).to(output.dtype))
        return output, input.grad

    with threads(count):
        as_stock(name, call, fast=1, strict=True)


@names
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("whole", WHOLE)
def test_every_pair_of_dtypes(name: str, dtype: torch.dtype, whole: torch.dtype) -> None:
    def call() -> Any:
        input, target = operands(40, dtype, whole, "contiguous", 1)
        return getattr(F, name)(input, target)

    assert as_stock(name, call, fast=1, strict=True).value.dtype == dtype


def test_backward_of_huber_raises_as_in_stock() -> None:
    def call() -> Any:
        input, target = operands(40, torch.float32, torch.int64, "contiguous", 1)
        F.huber_loss(input.requires_grad_(), target).backward()

    error = as_stock("huber_loss", call, fast=1, strict=True).error
    assert error is not None
    assert "Found dtype Long but expected Float" in error[1]


@names
def test_the_target_is_saved_as_it_is(name: str) -> None:
    def call() -> Any:
        input, target = operands(40, torch.float32, torch.int32, "contiguous", 1)
        node: Any = getattr(F, name)(input.requires_grad_(), target).grad_fn
        return type(node), node._saved_target, [f for f, _ in node.next_functions][1:]

    assert as_stock(name, call, fast=1, strict=True).value[1].dtype == torch.int32


def test_a_target_changed_before_the_backward_is_found() -> None:
    def call() -> Any:
        input, target = operands(40, torch.float32, torch.int64, "contiguous", 1)
        output = F.smooth_l1_loss(input.requires_grad_(), target)
        target.add_(1)
        output.backward()

    error = as_stock("smooth_l1_loss", call, fast=1, strict=True).error
    assert error is not None
    assert "modified by an inplace operation" in error[1]
