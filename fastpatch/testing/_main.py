"""The command line of the equivalence suite."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import fastpatch

from ._runner import EXAMPLES, run


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m fastpatch selftest") -> int:
    """Runs the equivalence suite and prints its outcome.

    Args:
        arguments: of the command line; None takes those of the process.
        prog: how the command is called in its help and errors.

    Returns:
        The exit status: 0 if nothing differed, 1 if something did, 2 if nothing could be compared: there is no such
        device, no hypothesis, no native library.

    Raises:
        SystemExit: with 2, for options that make no sense; with 0, after ``--help``.
    """
    parser = _parser(prog)
    options = parser.parse_args(arguments)
    if options.json is not None and (why := _unwritable(options.json)):
        parser.error(f"--json: {options.json!r} can't be written: {why}")
    line = _Line()
    try:
        with _no_folder():
            outcome = run(
                options.device, examples=options.examples, targets=options.target, seed=options.seed, progress=line.show
            )
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:  # a BuildError is a RuntimeError
        line.clear()
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    finally:
        line.clear()
    print(outcome)
    if options.json is not None:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(outcome.to_dict(), file, indent=2)
            file.write("\n")
    return 0 if outcome.is_equal else 1


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Draws calls at random, runs each with stock PyTorch and with fastpatch, and compares every bit. "
        "Exit status 0: none differed, 1: something did, 2: nothing could be compared.",
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu (the default), cuda, cuda:1, ...")
    parser.add_argument(
        "--examples", type=int, default=EXAMPLES, metavar="N", help=f"draw so many for each target (default {EXAMPLES})"
    )
    parser.add_argument(
        "--target", nargs="+", default=[], metavar="NAME", help=f"out of {', '.join(fastpatch.targets())} (default all)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="draw what this seed draws (default: another one)")
    parser.add_argument("--json", metavar="FILE", help="write the outcome there too")
    return parser


def _unwritable(path: str) -> str | None:
    """Why a file can't be written there."""
    folder = os.path.dirname(os.path.abspath(path))
    if not path or os.path.isdir(path):
        return "it is a folder" if path else "it has no name"
    if not os.path.isdir(folder):
        return f"there is no folder {folder!r}"
    return None if os.access(path if os.path.exists(path) else folder, os.W_OK) else "it may not be written"


@contextmanager
def _no_folder() -> Iterator[None]:
    """Hypothesis keeps a folder .hypothesis where the process was started: here it gets one that goes away."""
    name = "HYPOTHESIS_STORAGE_DIRECTORY"
    if name in os.environ or "hypothesis" in sys.modules:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            del os.environ[name]


class _Line:
    """One line on stderr that changes, if that is a terminal."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{text:<{self._width}}")
            sys.stderr.flush()
            self._width = len(text)

    def clear(self) -> None:
        if self._width:
            sys.stderr.write(f"\r{'':<{self._width}}\r")
            sys.stderr.flush()
            self._width = 0
