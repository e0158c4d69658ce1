"""What tells two tensors, or nested values, apart, without tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def difference(actual: Any, expected: Any, place: str = "value") -> str | None:
    """The first difference between nested values, in words; None if there is none.

    Tensors: type, dtype, layout, device, sizes, strides, requires_grad and every bit, but that any NaN equals any
    other. Floats likewise. Containers: type, keys in their order, items. Anything else by ``==``.

    Example:
        >>> difference(torch.tensor([0.0]), torch.tensor([-0.0]))
        'value: 1 of 1 differ, the first at [[0]]: [0.0] instead of [-0.0]'
    """
    if type(actual) is not type(expected):
        return f"{place}: {type(actual)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        return _tensors_difference(actual, expected, place)
    if isinstance(expected, Mapping):
        if list(actual) != list(expected):
            return f"{place}: keys {list(actual)} instead of {list(expected)}"
        return _first(difference(actual[key], expected[key], f"{place}[{key!r}]") for key in expected)
    if isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        if len(actual) != len(expected):
            return f"{place}: {len(actual)} items instead of {len(expected)}"
        pairs = enumerate(zip(actual, expected, strict=True))
        return _first(difference(one, other, f"{place}[{i}]") for i, (one, other) in pairs)
    same = repr(actual) == repr(expected) if isinstance(expected, float) else bool(actual == expected)
    return None if same else f"{place}: {actual!r} instead of {expected!r}"


def _first(differences: Any) -> str | None:
    return next((text for text in differences if text is not None), None)


def _tensors_difference(actual: torch.Tensor, expected: torch.Tensor, place: str) -> str | None:
    for name in ("dtype", "layout", "device", "shape", "requires_grad"):
        one, other = getattr(actual, name), getattr(expected, name)
        if one != other:
            return f"{place}: {name} {one} instead of {other}"
    if expected.layout != torch.strided:
        return difference(actual.to_dense(), expected.to_dense(), place)
    if actual.stride() != expected.stride():
        return f"{place}: strides {actual.stride()} instead of {expected.stride()}"
    if expected.device.type == "meta":
        return None
    different = _bits(actual) != _bits(expected)
    if not different.any():
        return None
    where = different.nonzero()[:3].tolist()
    return (
        f"{place}: {int(different.sum())} of {different.numel()} differ, the first at {where}: "
        f"{actual.detach()[different][:3].tolist()} instead of {expected.detach()[different][:3].tolist()}"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, all NaNs as one."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.is_floating_point():
        plain = torch.where(plain.isnan(), torch.full_like(plain, torch.nan), plain)
    return plain.contiguous().view(_INTEGERS[plain.element_size()])


def bits_differ(stock: Any, ours: Any) -> bool:
    """Do two tensors differ in any bit, size, stride or dtype?"""
    if (stock.shape, stock.stride(), stock.dtype) != (ours.shape, ours.stride(), ours.dtype):
        return True
    integers = _INTEGERS[stock.element_size()]
    return not torch.equal(stock.detach().view(integers), ours.detach().view(integers))
