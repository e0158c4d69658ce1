"""The self-tests of targets, and the scope in which ours must serve or fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from ._errors import FallbackError
from .targets import DTYPES, TARGETS, Target

# The switches of csrc/entry.h.
INHERIT, OFF, ON, STRICT, PROOF = range(5)

# None outside every scope, else (switches, enclosing scope or None, rate of verification). A closed scope's switches
# are all INHERIT, so it has no effect even in a context where it could not be taken off the stack.
Scopes = tuple[list[int], Any, float]
scopes: ContextVar[Scopes | None] = ContextVar("fastpatch_scopes", default=None)

_T = TypeVar("_T")


@contextmanager
def proving() -> Iterator[None]:
    """Ours serve every call, uncounted, or raise FallbackError: in this context."""
    token = scopes.set(([PROOF] * len(TARGETS), None, 0.0))
    try:
        yield
    finally:
        scopes.reset(token)


def differs(target: Target) -> str | None:
    """What differs from stock on the CPU; None if nothing does."""

    def prove() -> str | None:
        with proving():
            try:
                target.prepare()
                return target.prove()
            except FallbackError as error:
                return f"a call was refused ({error.reason})"

    try:
        return _in_fresh_thread(prove)
    except Exception as error:  # whatever it is, the script goes on with stock
        return f"{type(error).__name__}: {error}"


def differences_on(device: torch.device, target: Target) -> dict[str, str | None]:
    """For each served dtype what differs from stock on a device, None if nothing does."""
    from . import _native

    def prove() -> dict[str, str | None]:
        _native.set_proving(True)
        own: AbstractContextManager[Any] = nullcontext()
        if device.type == "cuda":
            torch.cuda.set_device(device)  # leaving the stream would else make a context on the first GPU
            # A stream that waits for no other one: some other may wait for this very thread.
            own = torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        with proving(), own:
            return {str(dtype).removeprefix("torch."): _proof_in(target, device, dtype) for dtype in DTYPES}

    return _in_fresh_thread(prove)


def _proof_in(target: Target, device: torch.device, dtype: torch.dtype) -> str | None:
    try:
        return target.prove_on(device, dtype)
    except Exception as error:  # whatever it is, the script goes on with stock
        return f"{type(error).__name__}: {error}"


def _in_fresh_thread(function: Callable[[], _T]) -> _T:
    """Runs in a thread of its own: whatever mode, autocast or inference the caller is in, that one is in none."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((function(), None))
        except BaseException as error:
            outcome.extend((None, error))

    thread = threading.Thread(target=run, name="fastpatch-self-test", daemon=True)
    thread.start()
    thread.join()
    value, error = outcome
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]
