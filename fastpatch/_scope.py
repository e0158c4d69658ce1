"""enabled() and disabled(): targets on or off in one thread or task, for a while."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from ._proof import INHERIT, OFF, ON, STRICT, Scopes, scopes
from ._switch import NAMES, check_strict, check_verify, checked, granted, hold, ready, want_verification

_F = TypeVar("_F", bound=Callable[..., Any])


def _open(stack: Scopes | None) -> Scopes | None:
    """The stack without the closed scopes on top: scopes may end in any order, and in other contexts."""
    while stack is not None and not any(stack[0]):
        stack = stack[1]
    return stack


class Scope:
    """A context manager and decorator that sets the switches of some targets in this context."""

    _word: str

    def __init__(self, targets: tuple[str, ...]) -> None:
        self._targets = checked(self._word, targets)
        self._entered: list[tuple[list[int], tuple[str, ...]]] = []  # in any context, not ended yet

    def _begin(self) -> tuple[tuple[str, ...], int, float]:
        """The names whose switch this scope really sets, that switch, and the rate of verification."""
        raise NotImplementedError

    def _hold(self, names: tuple[str, ...], change: int) -> None:
        """Counts this scope among those that turn the targets on."""

    def __enter__(self) -> None:
        names, switch, rate = self._begin()
        switches = [switch if name in names else INHERIT for name in NAMES]
        self._hold(names, +1)
        scopes.set((switches, _open(scopes.get()), rate))
        self._entered.append((switches, names))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        switches, names = self._entered.pop(self._last_entry())
        switches[:] = [INHERIT] * len(switches)
        scopes.set(_open(scopes.get()))
        self._hold(names, -1)

    def _last_entry(self) -> int:
        """Which of this object's entries ends: the last of this context, else (ended elsewhere) the last of all."""
        if not self._entered:
            raise RuntimeError(f"fastpatch.{self._word}: this scope was ended without having been entered")
        at = scopes.get()
        while at is not None:
            for i, (switches, _) in enumerate(self._entered):
                if switches is at[0]:
                    return i
            at = at[1]
        return -1

    def _again(self) -> Scope:
        raise NotImplementedError

    def __call__(self, function: _F) -> _F:
        if not callable(function):
            raise TypeError(f"fastpatch.{self._word}: can only decorate a function, not {function!r}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"fastpatch.{self._word}: can't decorate the generator function {function!r}, whose "
                "caller would be inside the scope between its steps; use `with` around the calls in its body"
            )
        # An object may be called asynchronously too.
        if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):

            @functools.wraps(function)
            async def in_scope(*args: Any, **kwargs: Any) -> Any:
                with self._again():
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def in_scope(*args: Any, **kwargs: Any) -> Any:
                with self._again():
                    return function(*args, **kwargs)

        return in_scope  # type: ignore[return-value]


class enabled(Scope):
    """Turns targets on in this thread or asynchronous task, for a ``with`` block or a decorated function.

    Other threads and tasks aren't touched: neither those started inside the block (a new thread starts with an empty
    context; a task started inside inherits the scope until it ends) nor autograd's own threads, in which hooks of a
    backward pass on a GPU run. Scopes nest, the innermost one that names a target decides, and they may end in any
    order. The environment variables have the last word, as for ``enable``.

    Args:
        targets: names out of ``fastpatch.targets()``; none means all.
        strict: see ``enable``.
        verify: see ``enable``; in the scope it counts in place of the process's.

    Raises:
        ValueError: an unknown target, or ``verify`` outside its range; on entering, an environment variable of ours
            with a value that means nothing.
        BuildError: on entering with ``strict``, if the native library can't be had.

    Example:
        >>> with fastpatch.enabled("sgd"):
        ...     optimizer.step()
        >>> @fastpatch.enabled()
        ... def train(): ...
    """

    _word = "enabled"

    def __init__(self, *targets: str, strict: bool = False, verify: float = 0.0) -> None:
        super().__init__(targets)
        check_strict(self._word, strict)
        check_verify(self._word, verify)
        self._strict = strict
        self._verify = verify

    def _begin(self) -> tuple[tuple[str, ...], int, float]:
        names, strict, verify = granted(self._targets, self._strict, self._verify)
        names = ready(names, strict)
        if names:
            want_verification(verify)
        return names, STRICT if strict else ON, float(verify)

    def _hold(self, names: tuple[str, ...], change: int) -> None:
        hold(names, change)

    def _again(self) -> enabled:
        return enabled(*self._targets, strict=self._strict, verify=self._verify)


class disabled(Scope):
    """Turns targets off in this thread or asynchronous task, for a ``with`` block or a decorated function.

    The counterpart of ``enabled``, with the same rules.

    Args:
        targets: names out of ``fastpatch.targets()``; none means all.

    Raises:
        ValueError: an unknown target.
    """

    _word = "disabled"

    def __init__(self, *targets: str) -> None:
        super().__init__(targets)

    def _begin(self) -> tuple[tuple[str, ...], int, float]:
        return self._targets, OFF, 0.0

    def _again(self) -> disabled:
        return disabled(*self._targets)
