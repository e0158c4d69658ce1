"""The options of ``python -m fastpatch [options] program ...``, read by hand: what follows the program is its own."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from .. import _environment
from .._environment import TARGETS
from .._version import __version__
from ._python import Program

COMMANDS = ("doctor", "build", "cache", "bench", "selftest")

USAGE = """\
usage: python -m fastpatch [options] script.py [arguments]
       python -m fastpatch [options] -m module [arguments]
       python -m fastpatch [options] -c code [arguments]
       python -m fastpatch doctor | build | cache | bench | selftest [--help]

Runs a Python program unchanged, with fastpatch on, also in its child processes;
or:
  doctor               what is installed, and how to mend what doesn't work
  build                compile the native library now
  cache                list or clear what has been compiled
  bench                time stock PyTorch and fastpatch on this machine
  selftest             compare their results on this machine, bit for bit

options:
  --only T,..          turn on these targets alone, out of
                       {targets}
  --exclude T,..       turn on all but these
  --strict             make a call that can't be served an error
  --report             print on stderr at the end what was served
  --report FILE.json   write it there; --report=FILE takes any name
  --verify RATE        compare this share (0 to 1) of served calls with stock
  -v, --verbose        log on stderr what fastpatch does; -vv says more
  --version            print the version
  -h, --help           print this text
  --                   what follows is a script, whatever its name

A script that is named like a sub-command is run as ./doctor or -- doctor.
""".format(targets=", ".join(TARGETS))


class Mistake(Exception):
    """The command line can't be understood; the text is for the user, the exit status 2."""


@dataclass
class Request:
    """What to run and how.

    Attributes:
        only: the targets to turn on; None leaves it to the environment.
        verify: the share of served calls to check; None leaves it to the environment.
        verbose: how many times ``-v`` was given.
        report: whether a report is wanted at the end.
        report_file: where to write it; None prints it.
    """

    program: Program
    only: tuple[str, ...] | None = None
    strict: bool = False
    verify: float | None = None
    verbose: int = 0
    report: bool = False
    report_file: str | None = None


class _Parser:
    def __init__(self, arguments: list[str]) -> None:
        self._left = list(arguments)
        self.request = Request(Program("script", ""))
        self._only: set[str] = set()
        self._excluded: set[str] = set()
        self._options: list[str] = []  # as they were given

    def parse(self) -> Request | None:
        """None if nothing is to be run, since help or the version was asked for and given."""
        while self._left:
            word = self._left.pop(0)
            if word in ("-h", "--help", "--version"):
                sys.stdout.write(f"fastpatch {__version__}\n" if word == "--version" else USAGE)
                return None
            if (program := self._program(word)) is not None:
                self.request.program = program
                self.request.only = self._targets()
                return self.request
            self._options.append(word)
            self._option(word)
        raise Mistake(f"no program to run was given\n\n{USAGE.rstrip()}")

    def _program(self, word: str) -> Program | None:
        if word == "--":
            return Program("script", self._value("--", "a script"), tuple(self._left))
        for flag, kind, what in (("-m", "module", "a module"), ("-c", "code", "code")):
            if word == flag:
                return Program(kind, self._value(flag, what), tuple(self._left))
            if word.startswith(flag):
                return Program(kind, word[2:], tuple(self._left))
        if word.startswith("-") and word != "-":
            return None
        if word in COMMANDS:
            raise Mistake(
                f"{word!r} is a sub-command and takes none of these options: {' '.join(self._options)}; a script of"
                f" that name is run as ./{word} or -- {word}"
            )
        return Program("script", word, tuple(self._left))

    def _option(self, word: str) -> None:
        name, equals, value = word.partition("=")
        if name == "--report":
            self.request.report = True
            if equals or (self._left and self._left[0].endswith(".json")):
                self.request.report_file = _report_file(value if equals else self._left.pop(0))
        elif name in ("--only", "--exclude"):
            text = value if equals else self._value(name, "names of targets")
            try:
                chosen = _environment.names(text, f"{name} {text!r}", TARGETS)
            except ValueError as error:
                raise Mistake(str(error)) from None
            (self._only if name == "--only" else self._excluded).update(chosen)
        elif name == "--verify":
            text = value if equals else self._value(name, "a share of calls")
            try:
                self.request.verify = _environment.rate(text, f"{name} {text!r}")
            except ValueError as error:
                raise Mistake(str(error)) from None
        elif word == "--strict":
            self.request.strict = True
        elif word in ("-v", "-vv", "--verbose"):
            self.request.verbose += 2 if word == "-vv" else 1
        else:
            valid = "--only, --exclude, --strict, --report, --verify, -v, --verbose, --version, -h, --help, -m, -c, --"
            raise Mistake(f"unknown option {word!r}; options are {valid}")

    def _value(self, option: str, what: str) -> str:
        if not self._left:
            raise Mistake(f"{option} must be followed by {what}")
        return self._left.pop(0)

    def _targets(self) -> tuple[str, ...] | None:
        if not (self._only or self._excluded):
            return None
        start = self._only or set(_environment.read(TARGETS).only)
        only = tuple(name for name in TARGETS if name in start - self._excluded)
        if not only:
            raise Mistake(f"{' '.join(self._options)}: no target is left; targets are {', '.join(map(repr, TARGETS))}")
        return only


def _report_file(path: str) -> str:
    """The absolute path; Mistake if no file can be written there. The program may change the current folder."""
    absolute = os.path.abspath(path)
    folder = os.path.dirname(absolute)
    why = ""
    if not path or os.path.isdir(absolute):
        why = "it is a folder" if path else "it has no name"
    elif not os.path.isdir(folder):
        why = f"there is no folder {folder!r}"
    elif not os.access(absolute if os.path.exists(absolute) else folder, os.W_OK):
        why = "it may not be written"
    if why:
        raise Mistake(f"--report: {path!r} can't be written: {why}")
    return absolute


def parse(arguments: list[str]) -> Request | None:
    """The request, or None if nothing is to be run. Mistake if it makes no sense."""
    return _Parser(arguments).parse()
