"""``build`` and ``cache``: what is compiled, and what has been."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastpatch

from .. import _environment

# What fastpatch makes in the cache: see fastpatch/_cache.py. Nothing of another name is touched.
_ENTRY = re.compile(r"torch-.+-[0-9a-f]{16}")
_LIBRARY = re.compile(r"native-[0-9a-f]{8}(-cuda-[0-9a-f]{8})?\.(so|json)")
_LOCK = "build.lock"
_UNFINISHED = re.compile(r"build-[a-z0-9_]{8}")


@dataclass(frozen=True)
class CacheEntry:
    """A folder in the cache.

    Attributes:
        torch: the version it was compiled for, ``"?"`` if no library in it is complete.
        python: the tag of Python's ABI.
        size: bytes of all that is ours in it.
        built: date and time, empty if no library in it is complete.
        debug: it is for gdb.
        current: it is what this environment uses.
    """

    path: Path
    torch: str
    python: str
    size: int
    built: str
    debug: bool
    current: bool


def build(force: bool, debug: bool) -> int:
    """Compiles the library, or that for gdb, and proves all targets; the exit status."""
    if _environment.read(_environment.TARGETS).off:
        print(f"{_environment.OFF}=0 switches everything off: nothing was built", file=sys.stderr)
        return 1
    fastpatch.targets()  # all of fastpatch is imported now
    from .. import _build, _ninja

    if debug:
        os.environ[_ninja.DEBUG] = "1"
    try:
        if force:
            _build.rebuild()
        fastpatch.enable(strict=True)
    except fastpatch.BuildError as error:
        print(f"fastpatch: {error}", file=sys.stderr)
        return 1
    print(f"the native library is ready: {sys.modules['fastpatch._native'].__file__}")
    if debug:
        print(f"to use it: {_ninja.DEBUG}=1 gdb -ex run --args {sys.executable} train.py")
    return 0


def entries() -> Iterator[CacheEntry]:
    """All entries of the cache, by name."""
    fastpatch.targets()
    from .. import _build, _cache

    cache = _cache.cache_dir()
    current = _cache.Entry.of(_build.SOURCES, cache).folder
    for path in sorted(cache.iterdir()) if cache.is_dir() else ():
        if _is_folder(path) and _ENTRY.fullmatch(path.name):
            manifest = _newest_manifest(path)
            size = sum(file.lstat().st_size for file in _ours(path) if not _is_folder(file))
            yield CacheEntry(
                path,
                str(manifest.get("torch", "?")),
                str(manifest.get("python_abi", "?")),
                size,
                str(manifest.get("built_at", "")),
                manifest.get("debug") is True,
                path == current,
            )


def _is_folder(path: Path) -> bool:
    """A folder itself, no link to one."""
    return stat.S_ISDIR(path.lstat().st_mode)


def _ours(entry: Path) -> list[Path]:
    """What fastpatch made in an entry."""
    return [
        path
        for path in sorted(entry.iterdir())
        if (_UNFINISHED if _is_folder(path) else _LIBRARY).fullmatch(path.name) or path.name == _LOCK
    ]


def _newest_manifest(entry: Path) -> dict[str, Any]:
    found = []
    for path in entry.glob("native-*.json"):
        with suppress(OSError, ValueError):
            manifest = json.loads(path.read_bytes())
            if isinstance(manifest, dict) and path.with_suffix(".so").exists():
                found.append(manifest)
    return max(found, key=lambda manifest: str(manifest.get("built_at", "")), default={})


def show() -> int:
    """``cache list``"""
    from .. import _cache, _ninja, _reproduction

    found = list(entries())
    print(_cache.cache_dir())
    if number := len(list(_reproduction.folder().glob("*.py"))):
        word = "difference" if number == 1 else "differences"
        print(f"{number} {word} from stock, to report: {_reproduction.folder()}")
    if not found:
        print("nothing has been compiled")
        return 0
    print(f"   {'torch':<16} {'Python':<12} {'MiB':>6}  {'built':<20} entry")
    for entry in found:
        python = entry.python.removesuffix("-x86_64-linux-gnu")
        built = entry.built[:16].replace("T", " ") or "unfinished"
        mark = f"{'*' if entry.current else ' '}{'g' if entry.debug else ' '}"
        print(f"{mark} {entry.torch:<16} {python:<12} {entry.size / 2**20:>6.1f}  {built:<20} {entry.path.name[-16:]}")
    if any(entry.debug for entry in found):
        print(f"g is for gdb: {_ninja.DEBUG}=1")
    if any(entry.current for entry in found):
        print("* is what this environment uses")
    else:
        print("none of them is for this environment")
    return 0


def clear() -> int:
    """``cache clear``: removes what fastpatch has made, and leaves whatever else lies there."""
    import filelock

    removed, kept = 0, 0
    for entry in entries():
        lock = filelock.FileLock(entry.path / _LOCK)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            print(f"{entry.path} is left alone, as a process is building in it", file=sys.stderr)
            kept += 1
            continue
        try:
            removed += entry.size
            for path in _ours(entry.path):
                if _is_folder(path):
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            print(f"{entry.path} can't be cleared: {error}", file=sys.stderr)
            kept += 1
        finally:
            lock.release()
        with suppress(OSError):  # somebody else has put something there
            (entry.path / _LOCK).unlink(missing_ok=True)
            entry.path.rmdir()
    print(f"{removed / 2**20:.1f} MiB were removed")
    return 1 if kept else 0
