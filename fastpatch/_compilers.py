"""The programs that build: a C++ compiler, and ninja."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass

from ._errors import BuildError


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command that starts it, and what it says it is, wherever it is installed."""

    command: tuple[str, ...]
    identity: str


def find_compiler() -> Compiler | BuildError:
    """``$CXX``, else ``c++``, else ``g++``. Returns the error: a cached library serves without a compiler."""
    try:
        return _find_compiler()
    except BuildError as error:
        return error


def _find_compiler() -> Compiler:
    asked = os.environ.get("CXX", "").strip()
    for text in (asked,) if asked else ("c++", "g++"):
        try:
            first, *rest = shlex.split(text)
        except ValueError as error:
            raise BuildError(f"CXX={asked!r} can't be read ({error}); correct or unset it") from error
        if program := shutil.which(first):
            command = (program, *rest)
            version, machine = _ask(command, "--version"), _ask(command, "-dumpmachine")
            # The first word is what it was called by: c++ and g++ are one compiler.
            return Compiler(command, f"{re.sub(r'^[^ ]+ (?=[(])', '', version)}; {machine}")
    missing = f"CXX={asked!r} wasn't found" if asked else "no C++ compiler was found (c++, g++)"
    raise BuildError(f"{missing}; install one (Debian: apt install g++), or name one in the variable CXX")


def _ask(command: tuple[str, ...], question: str) -> str:
    """The first line of the compiler's answer."""
    asked = shlex.join((*command, question))
    try:
        answer = subprocess.run(
            (*command, question), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"}, timeout=30, text=True, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{asked!r} doesn't run ({error}); name a working C++ compiler in CXX") from error
    lines = answer.stdout.splitlines()
    if answer.returncode or not lines:
        message = f"{asked!r} failed with status {answer.returncode}; name a working C++ compiler in CXX"
        raise BuildError(message, answer.stdout)
    return lines[0].strip()


def find_ninja() -> str:
    """Ninja from its Python package, else from PATH."""
    with suppress(ImportError):
        import ninja

        if ninja.BIN_DIR and (program := shutil.which("ninja", path=ninja.BIN_DIR)):
            return program
    if program := shutil.which("ninja"):
        return program
    raise BuildError("ninja wasn't found; install it with: pip install ninja")
