"""What each process of ``python -m fastpatch`` does: turn fastpatch on, and leave its counts in the run's folder."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import fastpatch

from ._inherit.sitecustomize import RUN

_log = logging.getLogger("fastpatch")
_tally: Tally | None = None


class Tally:
    """Writes what this process counted into a file of its own when it ends, also in each forked child."""

    def __init__(self, folder: Path) -> None:
        from multiprocessing import util  # as torch does, which is imported

        self._folder = folder
        self._before = self._at_fork = fastpatch.report()
        self._begin()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._note, after_in_child=self._forked)
        atexit.register(self.write)
        # A child of multiprocessing ends without atexit (before Python 3.13, if it was forked), and with all finalizers
        # that its parent had taken away.
        util.register_after_fork(self, Tally._finalize)
        self._finalize()

    def _begin(self) -> None:
        self._path = self._folder / f"{os.getpid()}-{os.urandom(4).hex()}.json"

    def _note(self) -> None:
        self._at_fork = fastpatch.report()  # in the parent: the child need not fear locks that nobody holds there

    def _forked(self) -> None:
        self._before = self._at_fork
        self._begin()

    def _finalize(self) -> None:
        from multiprocessing import util

        util.Finalize(None, self.write, exitpriority=-1000)

    def write(self) -> None:
        """May be called again: what it wrote is replaced. Nothing is written of nothing."""
        counted = fastpatch.report().since(self._before)
        if counted.counts_anything():
            with suppress(OSError):  # the parent may have ended, and have taken the folder away
                write_atomically(self._path, counted.to_json())


def write_atomically(path: Path, text: str) -> None:
    """Nobody ever finds half of it there."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _turn_on() -> list[str]:
    """fastpatch.enable() as the environment says, and the counting; returns what it had to warn of."""
    global _tally
    with warnings.catch_warnings(record=True) as caught:  # which the program may have made errors
        warnings.simplefilter("always")
        fastpatch.enable()
    folder = json.loads(os.environ.get(RUN, "{}")).get("counts")
    if folder and _tally is None:
        _tally = Tally(Path(folder))
    return [text for text in (str(warning.message) for warning in caught) if text.startswith("fastpatch")]


def start_main() -> None:
    """In the process that the user started: says what is wrong, and ends it where ``--strict`` wants that."""
    try:
        complaints = _turn_on()
    except (fastpatch.BuildError, ValueError) as error:
        # Not as an error of `import torch`, which the program may catch.
        raise SystemExit(f"fastpatch: {str(error).removeprefix('fastpatch: ')}") from None
    for text in complaints:
        with suppress(AttributeError, OSError, ValueError):  # stderr may be None, or closed
            sys.stderr.write(f"{text}\n")


def start_child() -> None:
    """In a child process, which is left as it is if fastpatch can't be turned on. Its parent has said the same."""
    for text in _turn_on():
        _log.info("process %d: %s", os.getpid(), text)


def write_now() -> None:
    """This process's counts, as of now."""
    if _tally is not None:
        _tally.write()
