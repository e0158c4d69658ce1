"""Find, compile, lock, verify and load the native library ``fastpatch._native``.

The cache is ``<cache>/<tag>-<key>/native-<compiler>.so`` with a manifest ``.json`` beside it. A library is
loaded only if its manifest holds its SHA-256. The manifest is written last: nothing that a killed build
leaves is ever loaded.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import stat
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType

import torch

from . import _compile
from ._errors import BuildError
from ._locks import fork_safe

SOURCES = Path(__file__).with_name("csrc")

_SCHEMA = 1  # raise it when the meaning of the cache changes without a change of sources or flags
_NAME = "fastpatch._native"
_OTHER_CACHE = "set FASTPATCH_CACHE_DIR to a folder of your own"

_guard = fork_safe(threading.Lock)
_outcome: ModuleType | BuildError | None = None


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
            compiler = _compile.find_compiler()
            sought = compiler if isinstance(compiler, _compile.Compiler) else None
            if not entry.is_private() or (found := entry.find(sought)) is None:
                return None
            try:
                _outcome = _import(found.path)
            except Exception as error:
                raise BuildError(f"{found.path} can't be loaded: {error}") from error
        return _outcome


def unsupported_platform() -> str | None:
    """None on Linux x86-64; elsewhere a name such as ``"darwin arm64"``: no build is tried there."""
    system, machine = platform.system().lower(), platform.machine().lower()
    return None if system == "linux" and machine in ("x86_64", "amd64") else f"{system} {machine}"


def cache_dir() -> Path:
    """``$FASTPATCH_CACHE_DIR``, else ``$XDG_CACHE_HOME/fastpatch``, else ``~/.cache/fastpatch``."""
    try:
        if own := os.environ.get("FASTPATCH_CACHE_DIR"):
            return Path(own).expanduser().absolute()
        # The XDG specification has relative paths ignored.
        if (xdg := os.environ.get("XDG_CACHE_HOME", "")) and Path(xdg).is_absolute():
            return Path(xdg, "fastpatch")
        return Path.home() / ".cache" / "fastpatch"
    except RuntimeError as error:
        raise BuildError(f"this user has no home folder ({error}); {_OTHER_CACHE}") from error


def load_from(sources: Path) -> ModuleType:
    """``load()`` for any folder of sources, without its memory."""
    if name := unsupported_platform():
        raise BuildError(f"the native library exists for Linux on x86-64 only; this is {name}")
    cache = cache_dir()
    try:
        return _find_or_build(sources, cache)
    except OSError as error:
        raise _explained(error, cache) from error


def _find_or_build(sources: Path, cache: Path) -> ModuleType:
    entry = Entry.of(sources, cache)
    compiler = _compile.find_compiler()
    # Without a compiler any library of this key will do: container images drop it after a first run.
    sought = compiler if isinstance(compiler, _compile.Compiler) else None
    unusable = None
    if entry.is_private() and (found := entry.find(sought)):
        try:
            return _import(found.path)
        except Exception as error:
            if sought is None:
                raise BuildError(f"{found.path} can't be loaded ({error}), nor rebuilt: {compiler}") from error
            unusable = found
    if isinstance(compiler, BuildError):
        raise compiler
    built = _build(sources, entry, compiler, unusable)
    try:
        return _import(built.path)
    except Exception as error:
        raise BuildError(
            f"the native library was built, but can't be loaded: {error}; remove {entry.folder} and try"
            " again; if that doesn't help, please report this with its whole text"
        ) from error


@dataclass(frozen=True)
class Library:
    """A library in the cache whose manifest fits it."""

    path: Path
    sha256: str


@dataclass(frozen=True)
class Entry:
    """The folder in the cache for one key, that is, for all that the binary depends on but the compiler."""

    cache: Path
    folder: Path
    parts: dict[str, str]

    @classmethod
    def of(cls, sources: Path, cache: Path) -> Entry:
        parts = {
            "schema": str(_SCHEMA),
            "torch": torch.__version__,
            "torch_git": str(torch.version.git_version),
            "cxx11_abi": str(torch._C._GLIBCXX_USE_CXX11_ABI),
            "cuda": str(torch.version.cuda),
            "cuda_archs": os.environ.get("TORCH_CUDA_ARCH_LIST", ""),
            "python_abi": str(sysconfig.get_config_var("SOABI")),
            "machine": platform.machine(),
            "flags": _compile.FLAGS,
            "sources": _digest(sources),
        }
        key = _sha256(json.dumps(parts, sort_keys=True).encode())[:16]
        tag = re.sub(r"[^\w.+-]", "_", f"torch-{parts['torch']}-{parts['python_abi']}")
        return cls(cache, cache / f"{tag}-{key}", parts)

    def place(self, compiler: _compile.Compiler) -> Path:
        return self.folder / f"native-{_sha256(compiler.identity.encode())[:8]}.so"

    def find(self, compiler: _compile.Compiler | None) -> Library | None:
        """A verified library of this compiler; of any if None."""
        paths = [self.place(compiler)] if compiler else sorted(self.folder.glob("native-*.so"))
        return next(filter(None, map(_verified, paths)), None)

    def is_private(self) -> bool:
        """Whether the folders exist; BuildError if anybody but this user could put a library there."""
        try:
            _check_private(self.cache)
            _check_private(self.folder)
        except FileNotFoundError:
            return False
        return True

    def create(self) -> None:
        for folder in (self.cache, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(folder)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(sources: Path) -> str:
    """One hash over the names and contents of all files."""
    files = {str(path.relative_to(sources)): path for path in sources.rglob("*") if path.is_file()}
    lines = [f"{_sha256(files[name].read_bytes())} {name}" for name in sorted(files)]
    return _sha256("\n".join(lines).encode())


def _check_private(folder: Path) -> None:
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise BuildError(f"{folder} is not a folder; remove it, or {_OTHER_CACHE}")
    owner, mode = _user(status.st_uid), f"mode {stat.S_IMODE(status.st_mode):04o}"
    if status.st_uid != os.geteuid():
        raise BuildError(
            f"nothing is loaded from {folder}, which belongs to {owner} ({mode}), not to"
            f" {_user(os.geteuid())}, who runs this; {_OTHER_CACHE}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"nothing is loaded from {folder} ({mode}, owner {owner}), as others can write there:"
            f" chmod go-w {shlex.quote(str(folder))}, or {_OTHER_CACHE}"
        )


def _user(uid: int) -> str:
    try:
        import pwd  # not on Windows, where this module must import all the same

        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except (ImportError, KeyError):  # a number without a name is usual in containers
        return f"uid {uid}"


def _verified(path: Path) -> Library | None:
    try:
        expected = json.loads(path.with_suffix(".json").read_bytes())["sha256"]
        found = _sha256(path.read_bytes())
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # missing, or a damaged manifest
        return None
    return Library(path, found) if found == expected else None


def _import(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    if spec is None:
        raise ImportError(f"no import specification for {path}")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[_NAME] = module
    return module


def _build(sources: Path, entry: Entry, compiler: _compile.Compiler, unusable: Library | None) -> Library:
    """Compile into the cache, unless another process does so first. ``unusable`` failed to load."""
    timeout = _compile.timeout()
    progress = _compile.Progress()
    entry.create()
    with _locked(entry.folder / "build.lock", timeout, progress):
        if (found := entry.find(compiler)) and found != unusable:
            return found
        for leftover in entry.folder.glob("build-*/"):  # we hold the lock: whoever made these is dead
            shutil.rmtree(leftover, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=entry.folder))
        try:
            progress.say(
                f"compiling the native library for torch {torch.__version__} (once; about 60-90 s on two"
                f" cores) into {entry.folder}"
            )
            start = time.monotonic()
            built = _compile.compile_library(sources, folder, compiler, timeout, progress)
            seconds = round(time.monotonic() - start, 1)
            library = _publish(built, entry, compiler, seconds)
            progress.say(f"the native library is ready after {seconds:g} s")
            return library
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _publish(built: Path, entry: Entry, compiler: _compile.Compiler, seconds: float) -> Library:
    library = Library(entry.place(compiler), _sha256(built.read_bytes()))
    manifest = {
        "sha256": library.sha256,
        "compiler": compiler.identity,
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
            f" FASTPATCH_BUILD_TIMEOUT, or {_OTHER_CACHE}"
        ) from error
    except NotImplementedError as error:  # what filelock raises on a file system without locks
        raise BuildError(f"the file system of {path} has no locks; {_OTHER_CACHE} on another") from error
    try:
        yield
    finally:
        lock.release()


def _explained(error: OSError, cache: Path) -> BuildError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BuildError(f"the disk of {cache} is full ({error}); free some space, or {_OTHER_CACHE} elsewhere")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return BuildError(f"the cache {cache} can't be used ({error}); {_OTHER_CACHE} that can be written")
    return BuildError(f"no native library in the cache {cache} ({error}); is it sound? If not, {_OTHER_CACHE}")
