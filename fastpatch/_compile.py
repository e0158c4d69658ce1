"""Compile a folder of C++ sources into one shared library with ninja, and show how far it has come.

Knows nothing of caches or locks; ``_build`` does.
"""

from __future__ import annotations

import logging
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ._compilers import Compiler, find_ninja
from ._errors import BuildError
from ._ninja import ninja_file
from ._nvcc import Toolkit

_logger = logging.getLogger("fastpatch")

_STEP = re.compile(rb"^\[(\d+)/(\d+)\] ", re.MULTILINE)
_ERROR = re.compile(r"\berror: |undefined reference|multiple definition|cannot find -l|: not found")
# What ninja says of the step that failed; linking may fail for want of CUDA's libraries.
_FAILED_CUDA = re.compile(r"^FAILED: .*(\.cu\.o|native\.so)", re.MULTILINE)
_GRACE = 3.0  # seconds between asking the compilers to stop and killing them


def jobs() -> int:
    """Compilers to run at once: ``$MAX_JOBS``, else one for each core that this process may use."""
    text = os.environ.get("MAX_JOBS", "").strip()
    if not text:
        return len(os.sched_getaffinity(0))
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise BuildError(f"MAX_JOBS={text!r} must be a positive integer; correct it, or unset it")
    return int(text)


def timeout() -> float:
    """Seconds to build, or to wait for another's build: ``$FASTPATCH_BUILD_TIMEOUT``, else 900."""
    text = os.environ.get("FASTPATCH_BUILD_TIMEOUT", "").strip() or "900"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BuildError(f"FASTPATCH_BUILD_TIMEOUT={text!r} must be a positive number of seconds; correct or unset it")
    return seconds


class Progress:
    """Says what happens on stderr and in the log; on a terminal the count of steps is rewritten in place."""

    def __init__(self) -> None:
        self._live = False
        with suppress(AttributeError, ValueError):  # stderr may be None, or closed
            self._live = sys.stderr.isatty()

    def say(self, text: str) -> None:
        _logger.info(text, extra={"on_stderr": True})
        self._write(f"\r\x1b[Kfastpatch: {text}\n" if self._live else f"fastpatch: {text}\n")

    def step(self, done: int, total: int) -> None:
        if self._live:
            self._write(f"\rfastpatch: [{done}/{total}]\x1b[K")

    def end(self) -> None:
        """Take the step count away, so that whatever comes next starts on an empty line."""
        if self._live:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        # A build must not fail because nobody can read about it.
        with suppress(AttributeError, OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


class CudaError(BuildError):
    """The CUDA sources could not be compiled, or not linked; all else may be sound."""


def compile_library(
    sources: Path, folder: Path, compiler: Compiler, timeout: float, progress: Progress, toolkit: Toolkit | None = None
) -> Path:
    """Compile ``sources`` inside ``folder``, with CUDA if there is a toolkit; returns the library there. Called again
    it uses what was compiled there already.

    Raises CudaError if only the sources for CUDA fail, else BuildError.
    """
    command = (find_ninja(), "-C", str(folder), f"-j{jobs()}")
    (folder / "build.ninja").write_text(ninja_file(sources, compiler, toolkit), encoding="utf-8")
    # TMPDIR: what a killed compiler leaves is removed with the folder. LC_ALL: we look for the word "error".
    env = {**os.environ, "LC_ALL": "C", "NINJA_STATUS": "[%f/%t] ", "TMPDIR": str(folder)}
    ninja = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, in_time = _watch(ninja, timeout, progress)
    except BaseException:  # above all Ctrl-C
        _stop(ninja)
        raise
    finally:
        progress.end()
    if not in_time:
        _stop(ninja)
        raise BuildError(
            f"compiling took longer than {timeout:g} s and was stopped; allow more seconds with the variable"
            " FASTPATCH_BUILD_TIMEOUT, or more compilers at once with MAX_JOBS",
            output,
        )
    if ninja.returncode:
        raise _failure(output, compiler, toolkit)
    return folder / "native.so"


def _watch(ninja: subprocess.Popen[bytes], timeout: float, progress: Progress) -> tuple[str, bool]:
    """Read all that ninja prints until it ends, or the time is up. Returns that and whether it ended."""
    assert ninja.stdout is not None  # for mypy: we asked for a pipe
    deadline = time.monotonic() + timeout
    output, seen, ended = b"", 0, False
    with ninja.stdout as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not ended and (left := deadline - time.monotonic()) > 0:
            if selector.select(left):
                data = os.read(pipe.fileno(), 1 << 16)
                output, ended = output + data, not data
            for step in _STEP.finditer(output, seen):
                progress.step(int(step[1]), int(step[2]))
                seen = step.end()
    if ended:
        try:
            ninja.wait(max(0.0, deadline - time.monotonic()) + _GRACE)
        except subprocess.TimeoutExpired:
            ended = False
    return output.decode("utf-8", "replace"), ended


def _stop(ninja: subprocess.Popen[bytes]) -> None:
    """Stop ninja and every compiler under it.

    Ninja gives each compiler a process group of its own: killing ninja's group would leave them running.
    Asked to stop, ninja passes that on and waits; who doesn't listen is found by the session that all share.
    """
    ninja.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            ninja.wait(_GRACE)
    finally:
        for pid in _session(ninja.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ninja.wait()


def _session(leader: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            # pid (name) state parent group session ...; a name may hold blanks and brackets.
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[3]) == leader:
                yield int(stat.parent.name)


def _failure(output: str, compiler: Compiler, toolkit: Toolkit | None) -> BuildError:
    lines = [line.strip() for line in output.splitlines()]
    first = next((line for line in lines if _ERROR.search(line)), next(iter(lines[-1:]), "no output"))
    if "No space left on device" in output or "Disk quota exceeded" in output:
        remedy = "the disk is full: free some space, or set FASTPATCH_CACHE_DIR to a folder on another disk"
    elif "Killed signal" in output or "annot allocate memory" in output or "out of memory" in output:
        remedy = "the compiler ran out of memory: set MAX_JOBS=1 to run one at a time"
    elif "Python.h" in first:
        remedy = "Python's headers are missing: install them (Debian: apt install python3-dev)"
    elif toolkit and _FAILED_CUDA.search(output):
        text = f"compiling the CUDA kernels failed: {first} ({toolkit.identity}, {compiler.identity})"
        return CudaError(text, output)
    else:
        remedy = "its whole output is in .output; another compiler can be named in the variable CXX"
    return BuildError(f"compiling the native library failed: {first} ({compiler.identity}); {remedy}", output)
