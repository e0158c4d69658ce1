"""What several test files share: exact comparison, outcomes of calls, and proof of who served them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import fastpatch


def assert_same(actual: Any, expected: Any, place: str = "value") -> None:
    """Equality without tolerance of nested values.

    Tensors: type, dtype, layout, sizes, strides, requires_grad and every bit, but that any NaN equals any other.
    Floats likewise. Containers: type, keys in their order, items. Anything else by ``==``.
    """
    assert type(actual) is type(expected), f"{place}: {type(actual)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(actual, expected, place)
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), f"{place}: keys {list(actual)} instead of {list(expected)}"
        for key in expected:
            assert_same(actual[key], expected[key], f"{place}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        assert len(actual) == len(expected), f"{place}: {len(actual)} items instead of {len(expected)}"
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{place}[{i}]")
    elif isinstance(expected, float):
        assert repr(actual) == repr(expected), f"{place}: {actual!r} instead of {expected!r}"
    else:
        assert actual == expected, f"{place}: {actual!r} instead of {expected!r}"


def _assert_same_tensor(actual: torch.Tensor, expected: torch.Tensor, place: str) -> None:
    for name in ("dtype", "layout", "device", "shape", "requires_grad"):
        one, other = getattr(actual, name), getattr(expected, name)
        assert one == other, f"{place}: {name} {one} instead of {other}"
    if expected.layout != torch.strided:
        return assert_same(actual.to_dense(), expected.to_dense(), place)
    assert actual.stride() == expected.stride(), f"{place}: strides {actual.stride()} instead of {expected.stride()}"
    if expected.device.type != "meta":
        different = _bits(actual) != _bits(expected)
        where = different.nonzero()[:3].tolist()
        assert not different.any(), (
            f"{place}: {int(different.sum())} of {different.numel()} differ, the first at {where}: "
            f"{actual.detach()[different][:3].tolist()} instead of {expected.detach()[different][:3].tolist()}"
        )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, all NaNs as one."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.is_floating_point():
        plain = torch.where(plain.isnan(), torch.full_like(plain, torch.nan), plain)
    return plain.contiguous().view(_INTEGERS[plain.element_size()])


def counts() -> dict[str, dict[str, Any]]:
    """The counters of all targets, as they stand."""
    return fastpatch.report().to_dict()


@contextmanager
def served(target: str, *, fast: int = 0, fallback: Mapping[str, int] | None = None) -> Iterator[None]:
    """Proves who served the calls of this block: its counters moved by exactly this, and no other target's moved."""
    before = counts()
    yield
    after = counts()
    moved = {name: _moved(before[name], after[name]) for name in after}
    expected = {name: (0, {}) for name in after} | {target: (fast, dict(fallback or {}))}
    assert moved == expected, f"counted {moved}, expected {expected}"


def _moved(before: dict[str, Any], after: dict[str, Any]) -> tuple[int, dict[str, int]]:
    reasons = {code: n - before["fallback"].get(code, 0) for code, n in after["fallback"].items()}
    return after["fast"] - before["fast"], {code: n for code, n in reasons.items() if n}


@dataclass(frozen=True)
class Outcome:
    """All that a caller can see of one call. Warnings are (category, text, file, line)."""

    value: Any
    error: tuple[type[BaseException], str] | None
    warned: list[tuple[type[Warning], str, str, int]]


def outcome(call: Callable[[], Any]) -> Outcome:
    """Calls, and returns the value or the exception, and the warnings, instead of letting them out."""
    value, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = call()
        except AssertionError:
            raise  # a test's own: alike in both runs, it would pass for an equal outcome
        except Exception as raised:
            error = type(raised), str(raised)
    return Outcome(value, error, [(w.category, str(w.message), w.filename, w.lineno) for w in caught])


def assert_same_outcome(actual: Outcome, expected: Outcome) -> None:
    assert actual.error == expected.error
    assert actual.warned == expected.warned
    assert_same(actual.value, expected.value)


def as_stock(
    target: str,
    call: Callable[[], Any],
    *,
    fast: int = 0,
    fallback: Mapping[str, int] | None = None,
    strict: bool = False,
) -> Outcome:
    """Runs ``call`` with nothing patched and then with ``target`` on; both have the same outcome, which is returned.

    ``fast`` and ``fallback`` are what the second run counts; the first counts nothing. ``call`` makes its own inputs,
    for it may change them, and looks functions up when it is called.
    """
    assert not fastpatch.is_enabled(), "the first run would not be stock's"
    with served(target):
        expected = outcome(call)
    with served(target, fast=fast, fallback=fallback), fastpatch.enabled(target, strict=strict):
        actual = outcome(call)
    assert_same_outcome(actual, expected)
    return actual


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for torch's loops, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
