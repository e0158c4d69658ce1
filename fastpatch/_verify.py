"""Verification: of a share of the served calls stock makes the same on copies, and every bit is compared.

The native library calls ``begin`` before it serves a drawn call, and what that returns with the results. Whatever goes
wrong here but a difference costs the call nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from . import _reproduction
from ._errors import DifferenceWarning, warn_user
from ._locks import fork_safe
from ._proof import proving
from .targets import TARGETS
from .targets._replay import Replay, Tensors, version

_log = logging.getLogger("fastpatch")
_lock = fork_safe(threading.Lock)

checked: Counter[str] = Counter()  # by target: losses, gradients of losses, steps

LeaveToStock = Callable[[str, str], bool]
End = Callable[[Any], None]
_MOST_TRIES = 100  # to make a reproduction smaller


def begin(leave_to_stock: LeaveToStock, name: str, kind: str, *arguments: Any) -> End | None:
    """Takes copies of what a call is given; None if it can't be checked.

    Args:
        leave_to_stock: takes a target off, with the reason; False if that had been done.
        name: of the target.
        kind, arguments: as the target's ``replay`` takes them.
    """
    if torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
        return None  # it would compile us
    try:
        with torch.no_grad():
            check = _Check(name, TARGETS[name].replay(kind, *arguments))
        devices = check.replay.devices
        if not devices or not all(map(_may_wait_for, devices)):
            return None
    except Exception as error:  # no memory for copies, say
        _log.debug("a call of %s can't be checked: %s: %s", name, type(error).__name__, error)
        return None
    return partial(check.end, leave_to_stock)


def _may_wait_for(device: torch.device) -> bool:
    """May this thread wait for the device now? Not while a graph is captured, or where the user wants to know of it."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_sync_debug_mode() == 0 and not torch.cuda.is_current_stream_capturing()


class _Check:
    def __init__(self, name: str, replay: Replay) -> None:
        self.replay = replay
        self._name = name

    def end(self, leave_to_stock: LeaveToStock, results: Any) -> None:
        """Compares, and does what has to be done if something differs."""
        found: str | None = None
        try:
            with torch.no_grad():
                actual, expected = self.replay.results(results), self.replay.by_stock()
                found = self.replay.difference(actual, expected)
                with _lock:
                    checked[self._name] += 1
                if found is not None:
                    found = self._confirmed(found, expected)
        except Exception as error:
            _log.debug("a call of %s can't be checked: %s: %s", self._name, type(error).__name__, error)
        if found is not None:
            self._tell(leave_to_stock, found, _put_right(actual, expected))

    def _confirmed(self, found: str, expected: Tensors) -> str | None:
        """The difference, unless somebody else wrote to the tensors meanwhile, who would explain it."""
        repeats = _repeats(self.replay)
        if not repeats and self._is_disturbed(expected):
            return None
        return found if repeats else f"{found} (it did not differ again when repeated)"

    def _is_disturbed(self, expected: Tensors) -> bool:
        """Are the tensors shared with other processes, or were they written to more often than stock does?"""
        given = zip(self.replay.given, self.replay.versions, self.replay.after(expected), strict=True)
        return any(
            tensor is not None and (_is_shared(tensor) or version(tensor) - before > version(copy))
            for tensor, before, copy in given
        )

    def _tell(self, leave_to_stock: LeaveToStock, found: str, is_right: bool) -> None:
        why = f"fastpatch leaves {self._name!r} to PyTorch, since a call that was verified differed from it: {found}"
        if not leave_to_stock(self._name, why):
            return
        with torch.no_grad():
            smallest = _smallest(self.replay)
            told = _reproduction.write(self._name, smallest or self.replay, found, repeats=smallest is not None)
        result = "This call now has PyTorch's result" if is_right else "This call has the wrong result"
        warn_user(
            f"{why}. {result}; earlier ones that were not verified may have differed too. {told}; please report it",
            DifferenceWarning,
        )


def _is_shared(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.untyped_storage().is_shared()


def _repeats(replay: Replay) -> bool:
    """Does it differ when both run again? Also if ours then raises."""
    try:
        with proving():
            actual = replay.by_us()
    except Exception:
        return False
    return replay.difference(actual, replay.by_stock()) is not None


def _smallest(replay: Replay) -> Replay | None:
    """The smallest part found that differs again; None if not even the whole does."""
    if not _repeats(replay):
        return None
    tries, parts = 0, replay.smaller()
    while tries < _MOST_TRIES and (part := next(parts, None)) is not None:
        tries += 1
        if _repeats(part):
            replay, parts = part, part.smaller()
    return replay


def _put_right(actual: Tensors, expected: Sequence[torch.Tensor | None]) -> bool:
    """Gives our results stock's numbers."""
    try:
        for one, other in zip(actual, expected, strict=True):
            if one is not None and other is not None:
                one.detach().data.copy_(other)  # whose version counter is no user's
        return True
    except Exception as error:
        _log.debug("a result can't be put right: %s: %s", type(error).__name__, error)
        return False
