"""The cache of native libraries: where it is, what names an entry, and what in it may be loaded.

A library is ``<cache>/<tag>-<key>/native-<compiler>.so``, or ``native-<compiler>-cuda-<nvcc>.so``, with a manifest
``.json`` beside it that holds its SHA-256 and is written last: nothing that a killed build leaves is ever loaded.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import shlex
import stat
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from . import _ninja
from ._compilers import Compiler, find_compiler
from ._errors import BuildError
from ._nvcc import Toolkit, find_toolkit

_SCHEMA = 1  # raise it when the meaning of the cache changes without a change of sources or flags
OTHER_CACHE = "set FASTPATCH_CACHE_DIR to a folder of your own"


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
        raise BuildError(f"this user has no home folder ({error}); {OTHER_CACHE}") from error


@dataclass(frozen=True)
class Tools:
    """What can build here: a C++ compiler or what is wrong with it, and a CUDA toolkit or why there is none."""

    compiler: Compiler | BuildError
    toolkit: Toolkit | str

    @classmethod
    def find(cls, sources: Path) -> Tools:
        """Those of this environment; a toolkit only if there is something for it to compile."""
        toolkit = find_toolkit() if any(sources.rglob("*.cu")) else "there are no CUDA sources"
        return cls(find_compiler(), toolkit)

    @property
    def cxx(self) -> Compiler | None:
        return None if isinstance(self.compiler, BuildError) else self.compiler

    @property
    def cuda(self) -> Toolkit | None:
        return None if isinstance(self.toolkit, str) else self.toolkit


@dataclass(frozen=True)
class Library:
    """A library in the cache whose manifest fits it."""

    path: Path
    sha256: str
    without_cuda: str | None  # why it has no CUDA kernels


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
            "flags": _ninja.flags(),
            "sources": _digest(sources),
        }
        key = sha256(json.dumps(parts, sort_keys=True).encode())[:16]
        tag = re.sub(r"[^\w.+-]", "_", f"torch-{parts['torch']}-{parts['python_abi']}")
        return cls(cache, cache / f"{tag}-{key}", parts)

    def place(self, tools: Tools) -> Path:
        """Of the library that these tools make, or would; a pattern for all that fit, where one is missing."""
        compiler = sha256(tools.cxx.identity.encode())[:8] if tools.cxx else "*"
        cuda = f"-cuda-{sha256(tools.cuda.identity.encode())[:8]}" if tools.cuda else ""
        return self.folder / f"native-{compiler}{cuda}.so"

    def find(self, tools: Tools) -> Library | None:
        """A verified library of these tools. Without a compiler any will do; without a CUDA toolkit, one that has
        kernels for CUDA is best."""
        place = self.place(tools).name
        patterns = [place] if tools.cuda else [place.replace(".so", "-cuda-*.so"), place]
        paths = [path for pattern in patterns for path in sorted(self.folder.glob(pattern))]
        return next(filter(None, map(verified, paths)), None)

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


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(sources: Path) -> str:
    """One hash over the names and contents of all files."""
    files = {str(path.relative_to(sources)): path for path in sources.rglob("*") if path.is_file()}
    lines = [f"{sha256(files[name].read_bytes())} {name}" for name in sorted(files)]
    return sha256("\n".join(lines).encode())


def _check_private(folder: Path) -> None:
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise BuildError(f"{folder} is not a folder; remove it, or {OTHER_CACHE}")
    owner, mode = _user(status.st_uid), f"mode {stat.S_IMODE(status.st_mode):04o}"
    if status.st_uid != os.geteuid():
        raise BuildError(
            f"nothing is loaded from {folder}, which belongs to {owner} ({mode}), not to"
            f" {_user(os.geteuid())}, who runs this; {OTHER_CACHE}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"nothing is loaded from {folder} ({mode}, owner {owner}), as others can write there:"
            f" chmod go-w {shlex.quote(str(folder))}, or {OTHER_CACHE}"
        )


def _user(uid: int) -> str:
    try:
        import pwd  # not on Windows, where this module must import all the same

        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except (ImportError, KeyError):  # a number without a name is usual in containers
        return f"uid {uid}"


def verified(path: Path) -> Library | None:
    try:
        manifest = json.loads(path.with_suffix(".json").read_bytes())
        expected, without_cuda = manifest["sha256"], manifest.get("without_cuda")
        found = sha256(path.read_bytes())
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # missing, or a damaged manifest
        return None
    return Library(path, found, without_cuda) if found == expected else None


def explained(error: OSError, cache: Path) -> BuildError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BuildError(f"the disk of {cache} is full ({error}); free some space, or {OTHER_CACHE} elsewhere")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return BuildError(f"the cache {cache} can't be used ({error}); {OTHER_CACHE} that can be written")
    return BuildError(f"no native library in the cache {cache} ({error}); is it sound? If not, {OTHER_CACHE}")
