"""The answer of explain(): an Explanation, and the verdicts of the guards that it was made of."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .._html import Markup, element, table

Verdict = Literal["passed", "refused", "not reached"]

# A guard of a table: what holds where it is passed, and the reason codes that it may give.
Question = tuple[str, tuple[str, ...]]

# What is asked before the native library judges a call, in this order; the numbers are places in it.
FIRST: tuple[Question, ...] = (
    ("there is a native library for this system", ("unsupported_platform",)),
    ("the environment lets the target be on", ("switched_off",)),
    ("the native library could be built and loaded", ("not_built",)),
    ("its self-test and verified calls found no difference from stock", ("not_built",)),
    ("the target is on in this thread and scope", ("disabled",)),
    ("a patch point sees the call", ("early_bound",)),
)
PLATFORM, ENVIRONMENT, LIBRARY, SELF_TEST, SWITCH, PATCH_POINT = range(len(FIRST))

# Where the library isn't loaded, its tables aren't either.
UNKNOWN: tuple[Question, ...] = (("what the native library asks of a call", ("",)),)

# What the user can do about the reasons of these; the native library tells it of its own.
ADVICE = {
    "early_bound": "call it by its module, e.g. F.smooth_l1_loss, or take the reference after enable()",
    "switched_off": "unset FASTPATCH, or name the target in FASTPATCH_ONLY",
    "disabled": "call fastpatch.enable(), or make the call inside with fastpatch.enabled()",
    "not_built": "run python -m fastpatch doctor, which tells how to mend it, then start anew",
    "unsupported_platform": "nothing on this system: the native library is for Linux on x86-64",
}


@dataclass(frozen=True)
class Guard:
    """One guard of a call, and what it says of this one.

    Attributes:
        name: what holds where it is passed, e.g. ``"they are on one device"``.
        verdict: ``"passed"``, ``"refused"`` or ``"not reached"``: one before it refused.
        reasons: the codes that it may give.
    """

    name: str
    verdict: Verdict
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Whether a call would be served by the compiled implementation, and if not, why.

    ``str()`` gives a line with the answer, then one for each guard, then the advice; a notebook shows a table.

    Attributes:
        target: the target's name, e.g. ``"sgd"``.
        fast: True if the compiled implementation would serve the call.
        reason: the stable reason code of the first guard that refuses; None if fast.
        detail: the same in a sentence.
        guards: the verdict of every guard, in the order in which they are asked. Those that a call of its kind isn't
            asked are left out. Of a step they are those of the group and parameter that is refused: all before it have
            passed theirs.
        advice: what to do to have such a call served; empty if fast.

    Example:
        >>> explanation = fastpatch.explain(F.smooth_l1_loss, input, target.double())
        >>> [guard.name for guard in explanation.guards if guard.verdict == "refused"]
        ['their dtypes are served together']
    """

    target: str
    fast: bool
    reason: str | None
    detail: str
    guards: tuple[Guard, ...] = ()
    advice: str = ""

    def __str__(self) -> str:
        """The first line is as long as its sentence; the others fit 80 columns."""
        verdict = "fast" if self.fast else f"stock, because of {self.reason}"
        lines = [f"{self.target}: {verdict}: {self.detail}"]
        for guard in self.guards:
            mark = ">" if guard.verdict == "refused" else " "
            lines += _wrapped(f"{mark} {guard.verdict:<11}  ", guard.name)
        return "\n".join(lines + (_wrapped("advice: ", self.advice) if self.advice else []))

    def _repr_html_(self) -> str:
        verdict = element("strong", "fast" if self.fast else "stock")
        answer = table(
            ("target", "served by", "reason", "why"), [(self.target, verdict, self.reason or "", self.detail)]
        )
        rows = [(_html(guard.verdict), guard.name) for guard in self.guards]
        guards = table(("verdict", "guard"), rows) if rows else ""
        return answer + guards + (element("p", f"advice: {self.advice}") if self.advice else "")


def judged(questions: Iterable[Question], asked: Collection[int], refused: int | None) -> tuple[Guard, ...]:
    """The guards of a table, one of which refuses (its place) or none.

    Args:
        questions: in the order in which they are asked. One without reason codes is asked of no call.
        asked: the places of those that were asked: the others can't have been passed, so they are left out.
    """
    guards = []
    for place, (name, reasons) in enumerate(questions):
        verdict: Verdict = "refused" if place == refused else "passed"
        if refused is not None and place > refused:
            verdict = "not reached"
        if reasons and (verdict == "not reached" or place in asked):
            guards.append(Guard(name, verdict, tuple(filter(None, reasons))))
    return tuple(guards)


def refused_first(
    target: str, place: int, detail: str, then: Sequence[Question], skipped: Collection[int] = ()
) -> Explanation:
    """Of a call that doesn't come as far as the native library's judgement.

    Args:
        place: that of the guard that refuses, in ``FIRST``.
        then: the native library's questions, which aren't reached.
        skipped: guards of ``FIRST`` before it that were not asked.
    """
    (reason,) = FIRST[place][1]
    asked = set(range(place + 1)) - set(skipped)
    return Explanation(target, False, reason, detail, judged((*FIRST, *then), asked, place), ADVICE[reason])


def _wrapped(start: str, text: str) -> list[str]:
    indent = " " * len(start)
    return textwrap.wrap(start + text, 80, subsequent_indent=indent, break_on_hyphens=False) or [start]


def _html(verdict: Verdict) -> str | Markup:
    return element("strong", verdict) if verdict == "refused" else verdict
