"""Compile a folder of C++ sources into one shared library with ninja, and show how far it has come.

Knows nothing of caches or locks; ``_build`` does. ``torch.utils.cpp_extension.load`` has no flags per file,
which the CPU kernels need (one compilation for each capability of ATen), hence a ``build.ninja`` of our own.
"""

from __future__ import annotations

import logging
import math
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ._errors import BuildError

_logger = logging.getLogger("fastpatch")

_COMMON = (
    "-O2 -std=c++20 -fPIC -fopenmp -fvisibility=hidden -ffp-contract=off -DNDEBUG"
    f" -D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    " -DHAVE_AVX2_CPU_DEFINITION -DHAVE_AVX512_CPU_DEFINITION -Wall -Wno-unknown-pragmas"
)
# Contraction stays off: only explicit FMAs may be fused. DEFAULT, for which at::vec is plain loops, would take twice as
# long to compile at -O3.
_CAPABILITIES = {
    "DEFAULT": "",
    "AVX2": "-O3 -mavx2 -mfma -mf16c",
    "AVX512": "-O3 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c",
}
_PRECOMPILED = "precompiled.h"
_LINK = "-shared -fopenmp"
# Torch is imported, and so loaded, before us: no rpath.
_LIBRARIES = "-Wl,--no-as-needed -lc10 -ltorch_cpu -ltorch -ltorch_python"

FLAGS = repr((_COMMON, sorted(_CAPABILITIES.items()), _LINK, _LIBRARIES))
"""All flags that don't depend on where things are installed: part of the cache key."""

_STEP = re.compile(rb"^\[(\d+)/(\d+)\] ", re.MULTILINE)
_ERROR = re.compile(r"\berror: |undefined reference|multiple definition|cannot find -l|: not found")
_GRACE = 3.0  # seconds between asking the compilers to stop and killing them


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
        _logger.info(text)
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


def compile_library(sources: Path, folder: Path, compiler: Compiler, timeout: float, progress: Progress) -> Path:
    """Compile ``sources`` inside the empty ``folder``; returns the library there. Raises BuildError."""
    command = (find_ninja(), "-C", str(folder), f"-j{jobs()}")
    (folder / "build.ninja").write_text(ninja_file(sources, compiler), encoding="utf-8")
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
        raise _failure(output, compiler)
    return folder / "native.so"


def ninja_file(sources: Path, compiler: Compiler) -> str:
    """The text of ``build.ninja``: the kernels of ``cpu/`` last, as torch's heavy headers are in the others.

    ``cpu/*.cpp`` is compiled once for each capability, all else but ``cuda/`` once; top level first. All but the
    kernels include ``precompiled.h``: the compiler finds in the current folder what it has read of it before, or, if it
    can't use that, the header itself in ``sources``.
    """
    # cpp_extension imports setuptools, which is slow: only a build pays for it.
    try:
        from torch.utils.cpp_extension import include_paths, library_paths
    except ImportError as error:
        raise BuildError(f"{error}, which torch.utils.cpp_extension needs: pip install setuptools") from error
    python = dict.fromkeys((sysconfig.get_path("include"), sysconfig.get_path("platinclude")))
    system = [*include_paths(), *python]
    includes = [f"-I{sources}", *(part for path in system for part in ("-isystem", path))]
    libraries = [f"-L{path}" for path in library_paths()]
    files = [path.relative_to(sources) for path in sources.rglob("*.cpp")]
    files = sorted(files, key=lambda path: (len(path.parts), path))
    include = f"-include {_PRECOMPILED}" if (sources / _PRECOMPILED).exists() else ""
    units = [(path, include, str(path.with_suffix(""))) for path in files if path.parts[0] not in ("cpu", "cuda")]
    for name, flags in _CAPABILITIES.items():
        extra = f"-DCPU_CAPABILITY={name} -DCPU_CAPABILITY_{name} {flags}"
        units += [(path, extra, str(path.with_suffix(f".{name}"))) for path in files if path.parts[0] == "cpu"]
    if not units:
        raise BuildError(f"no C++ sources in {sources}: the installation is incomplete; reinstall fastpatch")
    cxx = _text(shlex.join(compiler.command))
    lines = [
        "rule compile",
        f"  command = {cxx} {_COMMON} {_text(shlex.join(includes))} $flags -c $in -o $out",
        "  description = compile $out",
        "rule precompile",
        f"  command = {cxx} {_COMMON} {_text(shlex.join(includes))} -x c++-header -c $in -o $out",
        "  description = precompile $in",
        "rule link",
        f"  command = {cxx} {_LINK} $in -o $out {_text(shlex.join(libraries))} {_LIBRARIES}",
        "  description = link $out",
    ]
    if include:
        lines.append(f"build {_PRECOMPILED}.gch: precompile {_path(str(sources / _PRECOMPILED))}")
    for path, flags, unit in units:
        needs = f" | {_PRECOMPILED}.gch" if include and flags == include else ""
        lines += [f"build {_path(f'{unit}.o')}: compile {_path(str(sources / path))}{needs}", f"  flags = {flags}"]
    objects = " ".join(_path(f"{unit}.o") for _, _, unit in units)
    lines.append(f"build native.so: link {objects}")
    return "\n".join([*lines, "default native.so", ""])


def _text(text: str) -> str:
    return text.replace("$", "$$")


def _path(text: str) -> str:
    return _text(text).replace(" ", "$ ").replace(":", "$:")


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


def _failure(output: str, compiler: Compiler) -> BuildError:
    lines = [line.strip() for line in output.splitlines()]
    first = next((line for line in lines if _ERROR.search(line)), next(iter(lines[-1:]), "no output"))
    if "No space left on device" in output or "Disk quota exceeded" in output:
        remedy = "the disk is full: free some space, or set FASTPATCH_CACHE_DIR to a folder on another disk"
    elif "Killed signal" in output or "annot allocate memory" in output or "out of memory" in output:
        remedy = "the compiler ran out of memory: set MAX_JOBS=1 to run one at a time"
    elif "Python.h" in first:
        remedy = "Python's headers are missing: install them (Debian: apt install python3-dev)"
    else:
        remedy = "its whole output is in .output; another compiler can be named in the variable CXX"
    return BuildError(f"compiling the native library failed: {first} ({compiler.identity}); {remedy}", output)
