"""What a target is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _build
from .._patching import PatchPoint
from ._explanation import FIRST, PATCH_POINT, Explanation, Question, judged, refused_first
from ._replay import Replay


def native(name: str, *first: Any) -> Callable[[Any], Any]:
    """A function of the native library, which is looked up when it is called, as it is loaded late: of one argument,
    after those that are given here."""

    def call(argument: Any) -> Any:
        from .. import _native

        return getattr(_native, name)(*first, argument)

    return call


class Target(ABC):
    """A part of PyTorch that is accelerated: its patch points, a proof that they work, and explanations."""

    name: str

    def __init__(self) -> None:
        self.explicit: list[Any] = []  # functions of ours that it serves without a patch point

    def is_explicit(self, fn: Any) -> bool:
        """Is this one of those, a module that calls one, or an optimizer whose step is one?"""
        return any(fn is made for made in self.explicit) or getattr(type(fn), "is_fastpatch_explicit", False) is True

    @property
    @abstractmethod
    def points(self) -> Sequence[PatchPoint]:
        """The patch points, outer ones first."""

    @abstractmethod
    def prepare(self) -> None:
        """Hands the native library what it needs of torch; called once, after it was loaded."""

    def switched(self, on: bool) -> None:  # noqa: B027
        """Called when the target is wanted, and when nobody wants it any more."""

    @abstractmethod
    def prove(self) -> str | None:
        """Serves small calls and compares them bit for bit with stock; says what differs, None if nothing does.

        Runs in a thread of its own, whose scope forbids fallbacks, with every patch point passed by.
        """

    @abstractmethod
    def prove_on(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """The same on a CUDA device and in one dtype, where sums only have to be as exact as stock's. Uses no engine of
        autograd: its thread may be the one that waits for this."""

    @abstractmethod
    def replay(self, kind: str, *arguments: Any) -> Replay:
        """A call that is about to be served, as data: the native library tells what it is given."""

    @abstractmethod
    def owns(self, fn: Any) -> bool:
        """Is ``fn`` something that a user calls and this target may serve?"""

    @abstractmethod
    def explain(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        """Judges a call of ``fn``, which it owns, without running it."""

    @abstractmethod
    def questions(self) -> tuple[Question, ...]:
        """The guards of the loaded native library, in the order in which it asks them."""

    def unseen(self) -> Explanation:
        """For a call that no patch point sees."""
        text = "taken before it was patched; no patch point sees it"
        return refused_first(self.name, PATCH_POINT, text, self.questions())

    def explanation(self, reason: str, last: int = 0, asked: int = 1, place: str = "") -> Explanation:
        """Of a call that the native library has judged.

        Args:
            reason: its code, or ``"served"``.
            last: the place of the guard that was asked last, in the native library's table.
            asked: a bit for each place that was asked.
            place: what of the call the reason is about, e.g. ``"group 1: "``.
        """
        from .. import _native

        sentence, advice = _native.reasons()[reason]
        detail = place + sentence
        if reason == "cuda_not_built" and (why := _build.why_no_cuda()):
            detail = f"{detail}: {why}"
        fast = reason == "served"
        before = len(FIRST)
        places = {*range(before), *(before + bit for bit in range(asked.bit_length()) if asked >> bit & 1)}
        guards = judged((*FIRST, *self.questions()), places, None if fast else before + last)
        return Explanation(self.name, fast, None if fast else reason, detail, guards, advice)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
