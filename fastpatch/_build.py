"""Find, compile, lock, verify and load the native library ``fastpatch._native``.

What is in the cache, and may be loaded, is ``_cache``'s to know; how to compile, ``_compile``'s.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType

import torch

from . import _compile, _ninja
from ._cache import OTHER_CACHE, Entry, Library, Tools, cache_dir, explained, sha256
from ._compilers import Compiler
from ._errors import BuildError
from ._locks import fork_safe

SOURCES = Path(__file__).with_name("csrc")

_NAME = "fastpatch._native"

_guard = fork_safe(threading.Lock)
_outcome: ModuleType | BuildError | None = None
_without_cuda: str | None = None


def load() -> ModuleType:
    """The native library, from the cache or built now. Raises BuildError, and the same one again at once."""
    global _outcome
    with _guard:
        if _outcome is None:
            try:
                _outcome = load_from(SOURCES)
            except BuildError as error:
                _outcome = error
        if isinstance(_outcome, BuildError):
            # Raised anew it would otherwise grow its traceback at every call.
            raise _outcome.with_traceback(None)
        return _outcome


def load_built() -> ModuleType | None:
    """``load()`` if the cache has a library for this environment, else None: it never builds."""
    global _outcome
    with _guard:
        if not isinstance(_outcome, ModuleType):
            entry = Entry.of(SOURCES, cache_dir())
            if not entry.is_private() or (found := entry.find(Tools.find(SOURCES))) is None:
                return None
            try:
                _outcome = _load(found)
            except Exception as error:
                raise BuildError(f"{found.path} can't be loaded: {error}") from error
        return _outcome


def rebuild() -> None:
    """Compiles the library into the cache, whether or not it has one, for the processes that start from now on.

    Raises BuildError.
    """
    if unsupported_platform():
        return  # loading it says so
    cache = cache_dir()
    try:
        entry, tools = Entry.of(SOURCES, cache), Tools.find(SOURCES)
        if isinstance(tools.compiler, BuildError):
            raise tools.compiler
        _build(SOURCES, entry, tools, entry.find(tools) if entry.is_private() else None)
    except OSError as error:
        raise explained(error, cache) from error


def unsupported_platform() -> str | None:
    """None on Linux x86-64; elsewhere a name such as ``"darwin arm64"``: no build is tried there."""
    system, machine = platform.system().lower(), platform.machine().lower()
    return None if system == "linux" and machine in ("x86_64", "amd64") else f"{system} {machine}"


def load_from(sources: Path) -> ModuleType:
    """``load()`` for any folder of sources, without its memory."""
    if name := unsupported_platform():
        raise BuildError(f"the native library exists for Linux on x86-64 only; this is {name}")
    cache = cache_dir()
    try:
        return _find_or_build(sources, cache)
    except OSError as error:
        raise explained(error, cache) from error


def _find_or_build(sources: Path, cache: Path) -> ModuleType:
    entry, tools = Entry.of(sources, cache), Tools.find(sources)
    unusable = None
    if entry.is_private() and (found := entry.find(tools)):
        try:
            return _load(found)
        except Exception as error:
            if isinstance(tools.compiler, BuildError):
                raise BuildError(f"{found.path} can't be loaded ({error}), nor rebuilt: {tools.compiler}") from error
            unusable = found
    if isinstance(tools.compiler, BuildError):
        raise tools.compiler
    built = _build(sources, entry, tools, unusable)
    try:
        return _load(built)
    except Exception as error:
        raise BuildError(
            f"the native library was built, but can't be loaded: {error}; remove {entry.folder} and try"
            " again; if that doesn't help, please report this with its whole text"
        ) from error


def why_no_cuda() -> str | None:
    """Why the library that is loaded has no CUDA kernels, in a sentence; None if it has them."""
    return _without_cuda


def _load(library: Library) -> ModuleType:
    global _without_cuda
    module = _import(library.path)
    _without_cuda = library.without_cuda
    return module


def _import(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    if spec is None:
        raise ImportError(f"no import specification for {path}")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[_NAME] = module
    return module


def _build(sources: Path, entry: Entry, tools: Tools, unusable: Library | None) -> Library:
    """Compile into the cache, unless another process does so first. ``unusable`` failed to load."""
    timeout = _compile.timeout()
    progress = _compile.Progress()
    entry.create()
    with _locked(entry.folder / "build.lock", timeout, progress):
        if (found := entry.find(tools)) and found != unusable:
            return found
        for leftover in entry.folder.glob("build-*/"):  # we hold the lock: whoever made these is dead
            shutil.rmtree(leftover, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=entry.folder))
        try:
            kind = "native library for gdb" if _ninja.is_debug() else "native library"
            progress.say(
                f"compiling the {kind} for torch {torch.__version__} (once; about 60-90 s on two cores"
                f"{', twice that with CUDA' if tools.cuda else ''}) into {entry.folder}"
            )
            start = time.monotonic()
            built, without_cuda = _compile_with(tools, sources, folder, timeout, progress)
            seconds = round(time.monotonic() - start, 1)
            library = _publish(built, entry, tools, seconds, without_cuda)
            progress.say(f"the native library is ready after {seconds:g} s")
            return library
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _compile_with(
    tools: Tools, sources: Path, folder: Path, timeout: float, progress: _compile.Progress
) -> tuple[Path, str | None]:
    """The library, and why it has no CUDA kernels. What is wrong with those must not cost the others."""
    assert isinstance(tools.compiler, Compiler)  # for mypy: nobody builds without
    without_cuda = tools.toolkit if isinstance(tools.toolkit, str) else None
    start = time.monotonic()
    try:
        built = _compile.compile_library(sources, folder, tools.compiler, timeout, progress, tools.cuda)
        if tools.cuda:
            ctypes.CDLL(str(built))
        return built, without_cuda
    except _compile.CudaError as error:
        without_cuda = error.message
    except OSError as error:
        without_cuda = f"the CUDA kernels can't be loaded: {error}"
    progress.say(f"{without_cuda}; building without CUDA")
    left = max(1.0, timeout - (time.monotonic() - start))
    return _compile.compile_library(sources, folder, tools.compiler, left, progress), without_cuda


def _publish(built: Path, entry: Entry, tools: Tools, seconds: float, without_cuda: str | None = None) -> Library:
    assert isinstance(tools.compiler, Compiler)  # for mypy: nobody builds without
    library = Library(entry.place(tools), sha256(built.read_bytes()), without_cuda)
    manifest = {
        "sha256": library.sha256,
        "compiler": tools.compiler.identity,
        "cuda_compiler": tools.cuda.identity if tools.cuda else None,
        "without_cuda": without_cuda,
        "debug": _ninja.is_debug(),
        "build_seconds": seconds,
        "built_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **entry.parts,
    }
    aside = built.with_name("manifest.json")
    aside.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    # In this order: between the two an old manifest doesn't fit the new library, and nobody loads it.
    os.replace(built, library.path)
    os.replace(aside, library.path.with_suffix(".json"))
    return library


@contextmanager
def _locked(path: Path, timeout: float, progress: _compile.Progress) -> Iterator[None]:
    import filelock  # 40 ms, which a start from the cache needn't pay

    lock = filelock.FileLock(path)
    try:
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            progress.say(f"another process compiles the native library; waiting at most {timeout:g} s for {path}")
            lock.acquire(timeout=timeout, poll_interval=0.2)
    except filelock.Timeout as error:
        raise BuildError(
            f"another process has held {path} for longer than {timeout:g} s; allow more seconds with"
            f" FASTPATCH_BUILD_TIMEOUT, or {OTHER_CACHE}"
        ) from error
    except NotImplementedError as error:  # what filelock raises on a file system without locks
        raise BuildError(f"the file system of {path} has no locks; {OTHER_CACHE} on another") from error
    try:
        yield
    finally:
        lock.release()
