"""Locks that a forked child finds free."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any


class fork_safe(AbstractContextManager[None]):
    """A lock made by ``make`` (``threading.Lock`` or ``RLock``), and made anew in a forked child.

    Another thread may hold it at the time of the fork. That thread isn't in the child, so nobody would ever release it.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = self._make()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
