"""What several test files share: exact comparison, outcomes of calls, and proof of who served them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import fastpatch
from fastpatch.testing import difference


def assert_same(actual: Any, expected: Any, place: str = "value") -> None:
    """Equality without tolerance of nested values: see ``difference``."""
    found = difference(actual, expected, place)
    assert found is None, found


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
