"""The errors and warnings that fastpatch raises; a room below every other, so that any of them can."""

from __future__ import annotations

import sys
import warnings


class BuildError(RuntimeError):
    """The native library could not be built or loaded.

    Attributes:
        output: all that the compiler printed; empty when it was never reached.
    """

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message, output)
        self.message = message
        self.output = output

    def __str__(self) -> str:
        return f"{self.message}\n\n{self.output}" if self.output else self.message


class FallbackError(RuntimeError):
    """Under ``strict=True``, a call reached a patch point and could not be served.

    Attributes:
        target: the target's name, e.g. ``"sgd"``.
        reason: the stable reason code, e.g. ``"sparse_grad"``.
        detail: the same in a sentence.
        advice: what to do to have such a call served.
    """

    def __init__(self, target: str, reason: str, detail: str = "", advice: str = "") -> None:
        super().__init__(target, reason, detail, advice)
        self.target = target
        self.reason = reason
        self.detail = detail
        self.advice = advice

    def __str__(self) -> str:
        why = f": {self.detail}" if self.detail else ""
        advice = f" (advice: {self.advice})" if self.advice else ""
        return (
            f"fastpatch: {self.target} can't be served ({self.reason}){why}; strict=True forbids the fallback{advice}"
        )


class NativeBuildWarning(UserWarning):
    """``enable()`` found no usable native library: stock PyTorch goes on serving every call."""


class DifferenceWarning(RuntimeWarning):
    """With ``verify``, a served call differed from PyTorch: its target is off for the rest of the process."""


def warn_user(text: str, category: type[Warning]) -> None:
    """Warns at the line of the user's that called into fastpatch, through however many frames of ours."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
