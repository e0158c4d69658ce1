"""The CUDA kernel of SGD and the tables it is launched with, on the CPU (see _emulated_cuda)."""

from __future__ import annotations

import itertools

import pytest
import torch
from _cuda_references import sgd as reference
from _emulated_cuda import CODES, Parameter, Slice, guarded, launches, library, sgd, sgd_plan, slices, start, untouched
from _helpers import assert_same
from hypothesis import example, given, settings
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BLOCK = 16384  # elements that a block updates
SIZES = st.one_of(st.integers(0, 40), st.sampled_from([2047, 2048, 4097, BLOCK - 1, BLOCK, BLOCK + 1]))
NUMBERS = st.sampled_from([0.0, 1e-4, 0.1, 1 / 3, 0.9, 1.0])


def parameter(
    n: int, dtype: torch.dtype, first: bool, momentum: bool, aligned: bool, random: torch.Generator
) -> Parameter:
    def row() -> torch.Tensor:
        numbers = torch.randn(n, generator=random, dtype=torch.float64).to(dtype)
        if n > 8:
            info = torch.finfo(dtype)
            special = torch.tensor([0.0, -0.0, info.tiny / 8, info.max, torch.inf, torch.nan], dtype=dtype)
            numbers[torch.randperm(n, generator=random)[:6]] = special
        return guarded(numbers, aligned)

    buffer = row() if momentum else None
    return Parameter(row(), row(), buffer, first)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(SIZES, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=4),
    NUMBERS, NUMBERS, NUMBERS, NUMBERS,
    st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
@example([(BLOCK + 1, torch.float16, False), (7, torch.float32, True)], 1e-4, 0.9, 0.0, 0.1, True, False, True, True, 1)
@example([(5, torch.float32, False)], 0.0, 0.9, 0.0, 0.1, True, False, True, False, 1)  # stock writes the gradient
def test_an_update(
    shapes: list[tuple[int, torch.dtype, bool]], weight_decay: float, momentum: float, dampening: float, lr: float,
    nesterov: bool, maximize: bool, foreach: bool, aligned: bool, seed: int,
) -> None:  # fmt: skip
    random = torch.Generator().manual_seed(seed)
    parameters = [parameter(n, dtype, first, momentum != 0, aligned, random) for n, dtype, first in shapes]
    nesterov = nesterov and momentum != 0
    hyper = {
        "weight_decay": weight_decay, "momentum": momentum, "dampening": dampening, "lr": lr,
        "nesterov": nesterov, "maximize": maximize,
    }  # fmt: skip
    writes_grad = foreach and nesterov and weight_decay == 0 and not maximize
    expected = []
    for p in parameters:
        buffer = None if p.first or p.buffer is None else p.buffer
        new, direction, kept = reference(p.param, p.grad, buffer, **hyper)  # type: ignore[arg-type]
        expected.append((new, direction if writes_grad else p.grad.clone(), kept))
    start(seed)
    sgd(parameters, **hyper, foreach=foreach)  # type: ignore[arg-type]
    assert launches() == len({p.param.dtype for p in parameters if p.param.numel()})
    for p, (new, grad, kept) in zip(parameters, expected, strict=True):
        assert_same(p.param, new)
        assert_same(p.grad, grad)
        if kept is not None:
            assert_same(p.buffer, kept)
        rows = [row for row in (p.param, p.grad, p.buffer) if row is not None and row.numel()]
        assert not aligned or all(map(untouched, rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_element_is_updated_once(dtype: torch.dtype) -> None:
    sizes = [1, 0, 7, BLOCK, BLOCK + 1, 3 * BLOCK - 1, *range(2, 150)]
    parameters = [Parameter(guarded(torch.ones(n, dtype=dtype)), guarded(torch.ones(n, dtype=dtype))) for n in sizes]
    start(5)
    sgd(parameters, lr=0.5)
    assert launches() == 2  # 153 slices, 104 of which fit into one
    for p in parameters:
        assert torch.equal(p.param, torch.full_like(p.param, 0.5))


def test_parameters_that_share_memory_are_updated_in_their_order() -> None:
    shared = torch.ones(100)
    parameters = [Parameter(shared, torch.ones(100)), Parameter(shared, torch.full((100,), 3.0))] * 2
    start(1)
    sgd(parameters, lr=0.5, weight_decay=1.0, independent=False)
    assert launches() == 4
    expected = 1.0
    for grad in (1.0, 3.0, 1.0, 3.0):
        expected -= 0.5 * (grad + expected)
    assert torch.equal(shared, torch.full((100,), expected))


# --- tables: nothing runs, so sizes may be anything

COUNTS = st.one_of(
    st.integers(0, 5 * BLOCK), st.sampled_from([k * BLOCK + d for k in (1, 2, 1000) for d in (-1, 0, 1)]),
    st.integers(2**31 - 2, 2**46),
)  # fmt: skip
ROW = st.tuples(COUNTS, st.sampled_from(sorted(CODES.values())), st.integers(0, 3))


def table(rows: list[tuple[int, int, int]]) -> list[Slice]:
    return [Slice(1 + i, 1 + i, None, n, dtype, device, 0) for i, (n, dtype, device) in enumerate(rows)]


@given(st.lists(ROW, max_size=300), st.booleans())
@example([(2**44, 6, 0), (2**45, 6, 0), (1, 6, 0)], True)  # more blocks than a launch may have together
@example([(1, 6, 0)] * 209, True)
def test_the_tables_hold_each_slice_once(rows: list[tuple[int, int, int]], independent: bool) -> None:
    rows = [(min(n, (2**31 - 1) * BLOCK), dtype, device) for n, dtype, device in rows]
    planned = sgd_plan((Slice * len(rows))(*table(rows)), independent)
    expected = {1 + i: row for i, row in enumerate(rows) if row[0] > 0}
    assert len(planned) == len(expected)
    assert {p.param: (p.n, p.dtype, p.device) for p in planned} == expected
    for _, group in itertools.groupby(planned, key=lambda p: p.launch):
        launch = list(group)
        assert len(launch) <= (104 if independent else 1)
        assert len({(p.dtype, p.device) for p in launch}) == 1
        assert launch[0].blocks.start == 0 and launch[-1].blocks.stop < 2**31
        for p in launch:
            assert len(p.blocks) == -(-p.n // BLOCK)
        for one, other in itertools.pairwise(launch):
            assert one.blocks.stop == other.blocks.start
    if not independent:
        assert [p.param for p in planned] == sorted(expected)


@given(st.lists(st.integers(1, 20 * BLOCK), min_size=1, max_size=104), st.data())
def test_a_block_finds_its_slice(sizes: list[int], data: st.DataObject) -> None:
    made = (Slice * len(sizes))(*table([(n, 6, 0) for n in sizes]))
    blocks = [p.blocks for p in sgd_plan(made, True)]
    block = data.draw(st.integers(0, blocks[-1].stop - 1))
    found = library().sgd_slice_of_block(made, len(sizes), block)
    assert block in blocks[found]


def test_a_launch_is_full_at_104_slices() -> None:
    one = Parameter(torch.ones(1), torch.ones(1))
    assert {p.launch for p in sgd_plan(slices([one] * 104), True)} == {0}
    assert {p.launch for p in sgd_plan(slices([one] * 105), True)} == {0, 1}
