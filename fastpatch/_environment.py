"""What the environment variables say: FASTPATCH, FASTPATCH_ONLY, FASTPATCH_STRICT, FASTPATCH_VERIFY,
FASTPATCH_LOG.

They are read at each ``enable()`` and whenever a scope begins, so that a script may still set them before.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TextIO

OFF, ONLY, STRICT, VERIFY, LOG = VARIABLES = (
    "FASTPATCH",
    "FASTPATCH_ONLY",
    "FASTPATCH_STRICT",
    "FASTPATCH_VERIFY",
    "FASTPATCH_LOG",
)

# All targets, in the order of targets/__init__.py, which can't be imported before torch.
TARGETS = ("smooth_l1_loss", "huber_loss", "sgd")

_BITS = {"": None, "0": False, "1": True}
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


@dataclass(frozen=True)
class Settings:
    """The variables of this moment, found valid.

    Attributes:
        off: ``FASTPATCH=0``: nothing may be turned on.
        only: the targets that may be turned on.
        strict: every ``enable()`` and scope is strict.
        verify: the share of served calls that is checked, whatever ``enable()`` says; None leaves it to that.
        log: the level of the logger ``fastpatch``; None leaves it alone.
    """

    off: bool
    only: tuple[str, ...]
    strict: bool
    verify: float | None
    log: int | None

    def forbids(self, name: str) -> str | None:
        """Why a target may not be turned on; None if it may."""
        if self.off:
            return f"{OFF}=0 switches everything off"
        if name not in self.only:
            return f"{ONLY}={os.environ.get(ONLY, '')!r} leaves {name} out"
        return None


def read(targets: tuple[str, ...]) -> Settings:
    """The settings, and the logger set up as they say. ``targets`` are the names that ``FASTPATCH_ONLY`` may hold.

    Raises:
        ValueError: a variable has a value that means nothing.
    """
    settings = _parse(targets, *(os.environ.get(name, "").strip() for name in VARIABLES))
    if settings.log is not None:
        _set_up_logging(settings.log)
    return settings


@lru_cache(maxsize=8)  # a scope may begin at every step of a training
def _parse(targets: tuple[str, ...], off: str, only: str, strict: str, verify: str, log: str) -> Settings:
    return Settings(
        off=_bit(OFF, off, "0 (everything off) or 1") is False,
        only=names(only, f"fastpatch: {ONLY}={only!r}", targets) if only else targets,
        strict=_bit(STRICT, strict, "0 or 1 (as strict=True)") is True,
        verify=rate(verify, f"fastpatch: {VERIFY}={verify!r}") if verify else None,
        log=_level(log),
    )


def _bit(variable: str, text: str, valid: str) -> bool | None:
    try:
        return _BITS[text]
    except KeyError:
        raise ValueError(f"fastpatch: {variable}={text!r} must be {valid}") from None


def rate(text: str, origin: str) -> float:
    """A share of calls. An error begins with ``origin``."""
    with suppress(ValueError):
        if 0 <= (number := float(text)) <= 1:
            return number
    raise ValueError(f"{origin} must be a number from 0 to 1, the share of calls to check")


def _level(text: str) -> int | None:
    if text and text.lower() not in _LEVELS:
        raise ValueError(f"fastpatch: {LOG}={text!r} must be one of {', '.join(_LEVELS)}")
    return _LEVELS.get(text.lower())


def names(text: str, origin: str, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Target names out of a list with commas, in the order of ``targets``. An error begins with ``origin``."""
    found = [name.strip() for name in text.split(",")]
    for name in found:
        if name not in targets:
            valid = ", ".join(map(repr, targets))
            raise ValueError(f"{origin}: unknown target {name!r}; targets are {valid}")
    return tuple(name for name in targets if name in found)


if TYPE_CHECKING:
    _Handler = logging.StreamHandler[TextIO]
else:
    _Handler = logging.StreamHandler  # which takes no type before Python 3.11


class _ToStderr(_Handler):
    """Writes to whatever ``sys.stderr`` is at the time: it may be replaced, or None. Not what stands there already, as
    the progress of a build does."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None and not getattr(record, "on_stderr", False):
            self.stream = sys.stderr
            super().emit(record)


def _set_up_logging(level: int) -> None:
    logger = logging.getLogger("fastpatch")
    logger.setLevel(level)
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        handler = _ToStderr()
        handler.setFormatter(logging.Formatter("%(name)s: %(levelname)s: %(message)s"))
        logger.addHandler(handler)
