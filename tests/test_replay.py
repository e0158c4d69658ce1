"""The copies that verification makes: the same numbers, in memory that is laid out and shared alike."""

from __future__ import annotations

import torch
from _helpers import assert_same
from _sgd_helpers import in_layout
from hypothesis import given
from hypothesis import strategies as st

from fastpatch.targets._replay import Tensors, copied, halves
from fastpatch.testing import memory, strategies

WHOLE = torch.arange(1000.0)


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@given(strategies.pairs())
def test_any_layout(pair: tuple[strategies.Operand, strategies.Operand]) -> None:
    tensors = [operand.make() for operand in pair]
    made = copied(tensors)
    assert_same(made, [tensor.detach() for tensor in tensors])  # strides too
    for tensor, copy in zip(tensors, made, strict=True):
        assert copy is not None
        assert tensor.numel() == 0 or place(copy) != place(tensor)
        assert copy.is_contiguous() == tensor.is_contiguous()
    before = [memory(tensor) for tensor in tensors]
    for copy in made:
        assert copy is not None
        copy.data.fill_(3)
    assert_same([memory(tensor) for tensor in tensors], before)


def test_what_is_shared_is_shared_again() -> None:
    one, two, three = WHOLE[10:20], WHOLE[15:40], WHOLE[500:503]
    first, second, again, none, third = copied([one, two, one, None, three])
    assert first is again
    assert none is None
    assert first is not None
    assert second is not None
    assert third is not None
    first[5] = -1.0
    assert second[0] == -1.0
    assert one[5] == 15.0
    assert place(first) == place(second) != place(third)
    # Of a large storage only what is needed.
    assert first.untyped_storage().nbytes() <= 40 * 4
    assert third.untyped_storage().nbytes() <= 20 * 4


def test_views_of_other_dtypes() -> None:
    halves_of = WHOLE[:20].view(torch.bfloat16)
    copy, whole = copied([halves_of[7:], WHOLE[:20]])
    assert_same([copy, whole], [halves_of[7:], WHOLE[:20]])
    assert copy is not None
    assert whole is not None
    copy.zero_()
    assert whole[10] == 0.0
    assert WHOLE[10] == 10.0


def test_odd_ones() -> None:
    tensors: Tensors = [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.empty_strided((0, 2), (7, 3)),
        WHOLE[3].expand(4, 5),
        in_layout(WHOLE[:12].reshape(3, 4), "transposed"),
        torch.tensor([True, False])[1:],
        torch.tensor([1, 2, 3], dtype=torch.int8)[1:],
    ]
    assert_same(copied(tensors), tensors)
    assert copied([]) == []
    with torch.inference_mode():
        assert_same(copied([WHOLE[3:9]])[0].clone(), WHOLE[3:9])  # type: ignore[union-attr]


@given(st.lists(st.integers(0, 4), max_size=3), st.booleans())
def test_halves(shape: list[int], all_of_them: bool) -> None:
    """They part the tensor along one dimension each, and none is the whole."""
    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    found = list(halves([tensor, None, tensor], lambda i: all_of_them or i == 0))
    assert len(found) == 2 * sum(size > 1 for size in shape)
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    for dim, one, other in zip(dims, found[::2], found[1::2], strict=True):
        assert_same(torch.cat([one[0], other[0]], dim), tensor)  # type: ignore[list-item]
        assert one[1] is None
        assert (one[2] is tensor) is not all_of_them
