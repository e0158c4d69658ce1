"""What a target is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import _build
from .._html import element, table
from .._patching import PatchPoint


def native(name: str, *first: Any) -> Callable[[Any], Any]:
    """A function of the native library, which is looked up when it is called, as it is loaded late: of one argument,
    after those that are given here."""

    def call(argument: Any) -> Any:
        from .. import _native

        return getattr(_native, name)(*first, argument)

    return call


@dataclass(frozen=True)
class Explanation:
    """Whether a call would be served by the compiled implementation, and if not, why.

    Attributes:
        target: the target's name, e.g. ``"sgd"``.
        fast: True if the compiled implementation would serve the call.
        reason: the stable reason code of the first guard that refuses; None if fast.
        detail: the same in a sentence.
    """

    target: str
    fast: bool
    reason: str | None
    detail: str

    def __str__(self) -> str:
        verdict = "fast" if self.fast else f"stock, because of {self.reason}"
        return f"{self.target}: {verdict}: {self.detail}"

    def _repr_html_(self) -> str:
        verdict = element("strong", "fast" if self.fast else "stock")
        return table(("target", "served by", "reason", "why"), [(self.target, verdict, self.reason or "", self.detail)])


class Target(ABC):
    """A part of PyTorch that is accelerated: its patch points, a proof that they work, and explanations."""

    name: str

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
    def owns(self, fn: Any) -> bool:
        """Is ``fn`` something that a user calls and this target may serve?"""

    @abstractmethod
    def explain(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        """Judges a call of ``fn``, which it owns, without running it."""

    def unseen(self) -> Explanation:
        """For a call that no patch point sees."""
        return Explanation(self.name, False, "early_bound", "taken before it was patched; no patch point sees it")

    def explanation(self, reason: str, place: str = "") -> Explanation:
        from .. import _native

        detail = place + _native.reasons()[reason]
        if reason == "cuda_not_built" and (why := _build.why_no_cuda()):
            detail = f"{detail}: {why}"
        return Explanation(self.name, reason == "served", None if reason == "served" else reason, detail)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_differ(stock: Any, ours: Any) -> bool:
    """Do two floating-point tensors differ in any bit, size, stride or dtype?"""
    if (stock.shape, stock.stride(), stock.dtype) != (ours.shape, ours.stride(), ours.dtype):
        return True
    integers = _INTEGERS[stock.element_size()]
    return not torch.equal(stock.detach().view(integers), ours.detach().view(integers))
