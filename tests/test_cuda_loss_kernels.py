"""The CUDA kernels of the losses, run on the CPU (see _emulated_cuda), against single operations of torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from _cuda_references import depth_of_sum, loss_gradient, loss_values, opmath
from _emulated_cuda import LOSSES, Loss, guarded, launches, library, start
from _helpers import assert_same
from hypothesis import example, given
from hypothesis import strategies as st

from fastpatch.targets._loss_bounds import sum_bound

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WITH_GRADIENT = ("smooth_l1_loss", "huber_loss")

# Around vectors (2 to 8 elements), what a block covers (2048 to 8192), a lone block's sum, and more blocks than one.
EDGES = (2, 4, 8, 16, 2048, 4096, 8192, 16384, 5 * 4096)
COUNTS = st.one_of(st.integers(1, 40), st.sampled_from([n + d for n in EDGES for d in (-1, 0, 1)]).filter(bool))
THRESHOLDS = st.sampled_from([1.0, 0.5, 0.1, 1 / 9, 3.0, 2.0**-10])
SEEDS = st.integers(0, 2**31)


def rows(n: int, dtype: torch.dtype, threshold: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows whose differences lie on both sides of the threshold, on it, and at the ends of the dtype."""
    random = torch.Generator().manual_seed(seed)
    target = torch.randn(n, generator=random, dtype=torch.float64)
    input = target + torch.randn(n, generator=random, dtype=torch.float64) * threshold * 1.5
    info = torch.finfo(dtype)
    special = [threshold, -threshold, 0.0, -0.0, info.tiny, info.tiny / 4, info.max, math.inf, -math.inf, math.nan]
    for i in range(0, min(n, 3 * len(special)), 3):
        place = int(torch.randint(n, (), generator=random))
        input[place], target[place] = special[i // 3], 0.0
    return input.to(dtype), target.to(dtype)


@given(st.sampled_from(LOSSES), st.sampled_from(DTYPES), COUNTS, THRESHOLDS, st.booleans(), SEEDS)
@example("smooth_l1_loss", torch.float32, 20481, 1 / 9, False, 1)
@example("smooth_l1_loss", torch.float16, 4097, 1 / 9, True, 1)
def test_values(name: str, dtype: torch.dtype, n: int, threshold: float, aligned: bool, seed: int) -> None:
    x, y = rows(n, dtype, threshold, seed)
    start(seed)
    loss = Loss(name, guarded(x, aligned), guarded(y, aligned), dtype, threshold, aligned)
    assert_same(loss.values(), loss_values(name, x, y, threshold, dtype))
    assert launches() == 1


@given(
    st.sampled_from(WITH_GRADIENT), st.sampled_from(DTYPES), COUNTS, THRESHOLDS,
    st.booleans(), st.booleans(), st.booleans(), SEEDS,
)  # fmt: skip
@example("huber_loss", torch.float16, 8193, 0.1, True, False, False, 1)
@example("huber_loss", torch.float32, 4097, 0.1, True, False, True, 1)
def test_gradient(
    name: str, dtype: torch.dtype, n: int, threshold: float, mean: bool, one: bool, aligned: bool, seed: int
) -> None:
    x, y = rows(n, dtype, threshold, seed)
    grad = torch.randn(1 if one else n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    start(seed)
    loss = Loss(name, guarded(x, aligned), guarded(y, aligned), dtype, threshold, aligned)
    actual = loss.gradient(guarded(grad, aligned), mean)
    assert_same(actual, loss_gradient(name, x, y, grad, threshold, mean))
    assert launches() == 1


@given(st.sampled_from(LOSSES), st.sampled_from(DTYPES), COUNTS, THRESHOLDS, st.booleans(), SEEDS)
@example("smooth_l1_loss", torch.float16, 20481, 1.0, True, 1)
@example("l1_loss", torch.float64, 16385, 1.0, False, 1)
def test_a_sum_or_mean_is_as_exact_as_its_order_allows(
    name: str, dtype: torch.dtype, n: int, threshold: float, mean: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, generator=random, dtype=torch.float64).to(dtype) for _ in range(2))
    start(seed)
    loss = Loss(name, guarded(x), guarded(y), dtype, threshold)
    actual = loss.reduced(mean)
    blocks = library().loss_blocks(n)
    assert launches() == (1 if blocks == 1 else 2)
    exact = math.fsum(loss_values(name, x, y, threshold, dtype).tolist()) / (n if mean else 1)
    assert abs(actual.item() - exact) <= sum_bound(depth_of_sum(n, dtype, blocks), dtype) * exact
    # The order of additions is one: neither where threads are, nor how memory is aligned, changes a bit.
    start(seed + 1)
    moved = Loss(name, guarded(torch.cat([x, x[:1]]))[:n], guarded(torch.cat([y, y[:1]]))[:n], dtype, threshold)
    assert_same(moved.reduced(mean), actual)


@given(st.sampled_from(DTYPES), COUNTS, SEEDS)
@example(torch.float32, 5 * 4096 + 1, 0)
def test_each_element_is_added_once(dtype: torch.dtype, n: int, seed: int) -> None:
    """Ones, of which any number is added exactly in float32; a second one anywhere, or none, would show."""
    start(seed)
    x, y = torch.ones(n, dtype=dtype), torch.zeros(n, dtype=dtype)
    place = seed % n
    x[place] = 3.0
    total = Loss("l1_loss", guarded(x), guarded(y), dtype, 0.0).reduced(mean=False)
    assert total == torch.tensor(float(n + 2), dtype=torch.float64).to(dtype)


def test_a_row_for_all_blocks_and_more_is_added_once() -> None:
    n = 512 * 4096 + 4097
    start(7)
    x = torch.ones(n)
    assert library().loss_blocks(n) == 512
    assert Loss("l1_loss", guarded(x), guarded(torch.zeros(n)), torch.float32, 0.0).reduced(mean=False) == n


@given(
    st.sampled_from(LOSSES),
    st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)).filter(lambda pair: torch.float64 not in pair),
    COUNTS,
    SEEDS,
)
def test_other_types_are_converted_as_they_are_loaded(
    name: str, dtypes: tuple[torch.dtype, torch.dtype], n: int, seed: int
) -> None:
    """bfloat16 and float16 computed in float32: two of them under autocast, one of them with a float32 operand."""
    random = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, generator=random).to(dtype) for dtype in dtypes)
    start(seed)
    mixed = Loss(name, guarded(x), guarded(y), torch.float32, 0.5)
    plain = Loss(name, guarded(x.float()), guarded(y.float()), torch.float32, 0.5)
    assert_same(mixed.values(), plain.values())
    assert_same(mixed.reduced(mean=True), plain.reduced(mean=True))


@pytest.mark.parametrize("shift", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (3, 2, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_alignment(dtype: torch.dtype, shift: tuple[int, int, int]) -> None:
    n = 4099
    x, y = rows(n, dtype, 0.5, 11)
    grad = torch.randn(n, dtype=torch.float64).to(dtype)

    def moved(row: torch.Tensor, by: int) -> torch.Tensor:
        """The same numbers, so many elements after a whole vector."""
        room = torch.zeros(n + 16, dtype=dtype)
        begin = next(i for i in range(16) if (room.data_ptr() + i * dtype.itemsize) % 16 == 0) + by
        room[begin : begin + n] = row
        return room[begin : begin + n]

    start(1)
    loss = Loss("smooth_l1_loss", moved(x, shift[0]), moved(y, shift[1]), dtype, 0.5)
    assert_same(loss.values(), loss_values("smooth_l1_loss", x, y, 0.5, dtype))
    actual = loss.gradient(moved(grad, shift[2]), mean=True)
    assert_same(actual, loss_gradient("smooth_l1_loss", x, y, grad, 0.5, True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mean_of_nothing_is_nan(dtype: torch.dtype) -> None:
    start(0)
    nothing = Loss("smooth_l1_loss", torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype), dtype, 1.0)
    assert nothing.reduced(mean=True).isnan() and nothing.reduced(mean=False) == 0


@given(st.integers(1, 2**40))
@example(16384)
@example(16385)
@example(512 * 4096)
@example(2**31 + 1)
def test_the_number_of_blocks_depends_on_the_length_alone(n: int) -> None:
    blocks = library().loss_blocks(n)
    assert blocks == (1 if n <= 16384 else min(512, -(-n // 4096)))


def test_the_references_can_fail() -> None:
    """The two branches differ, and so do rounding once and rounding each operation."""
    x, y = rows(1000, torch.float16, 0.5, 3)
    grad: Any = torch.randn(1000).half()
    assert not torch.equal(
        loss_gradient("smooth_l1_loss", x, y, grad, 0.5, True).nan_to_num(),
        loss_gradient("huber_loss", x, y, grad, 0.5, True).nan_to_num(),
    )
    once = (x.float() - y.float()).abs().square().mul(0.5).half()
    each = loss_values("huber_loss", x, y, math.inf, torch.float16)
    assert opmath(torch.float16) == torch.float32 and not torch.equal(once.nan_to_num(), each.nan_to_num())
