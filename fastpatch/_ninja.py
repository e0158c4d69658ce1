"""What is compiled from which source, with which flags: the text of a ``build.ninja``.

``torch.utils.cpp_extension.load`` has no flags per file, which the CPU kernels need (one compilation for each
capability of ATen).
"""

from __future__ import annotations

import logging
import os
import shlex
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from . import _nvcc
from ._compilers import Compiler
from ._errors import BuildError

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
_INCLUDE = f"-include {_PRECOMPILED}"
_LINK = "-shared -fopenmp"
# Torch is imported, and so loaded, before us: no rpath.
_LIBRARIES = "-Wl,--no-as-needed -lc10 -ltorch_cpu -ltorch -ltorch_python"

# For gdb: what is read last holds. NDEBUG stays defined, as torch's headers add a member to at::RecordFunction without
# it, which torch's libraries don't have. _GLIBCXX_ASSERTIONS changes no layout.
_DEBUG = "-g -Og -fno-omit-frame-pointer -D_GLIBCXX_ASSERTIONS -DFASTPATCH_DEBUG"
_DEBUG_CUDA = "-g -lineinfo -DFASTPATCH_DEBUG"  # not -G, with which device code rounds otherwise

FLAGS = repr((_COMMON, sorted(_CAPABILITIES.items()), _LINK, _LIBRARIES, _nvcc.FLAGS, _nvcc.LIBRARIES))
"""All flags that don't depend on where things are installed."""

DEBUG = "FASTPATCH_DEBUG"


def is_debug() -> bool:
    """``$FASTPATCH_DEBUG``: is the library for gdb wanted?"""
    text = os.environ.get(DEBUG, "").strip()
    if text not in ("", "0", "1"):
        raise BuildError(f"{DEBUG}={text!r} must be 0 or 1 (the library with symbols and checks); correct or unset it")
    return text == "1"


def flags() -> str:
    """Those of this environment: part of the cache key."""
    return FLAGS + repr((_DEBUG, _DEBUG_CUDA)) * is_debug()


@dataclass(frozen=True)
class _Unit:
    """A source compiled in one way: the rule of it, its flags, and its object's name without the ending."""

    source: Path
    rule: str
    flags: str
    name: str


def ninja_file(sources: Path, compiler: Compiler, toolkit: _nvcc.Toolkit | None = None) -> str:
    """The text of ``build.ninja``.

    ``cuda/*.cu`` is compiled if there is a toolkit, first, as it takes longest; ``cpu/*.cpp`` once for each capability,
    last, as torch's heavy headers are in all else. All C++ but the kernels includes ``precompiled.h``: the compiler
    finds in the current folder what it has read of it before, or, if it can't use that, the header in ``sources``.
    """
    include_paths, library_paths = _paths_of_torch()
    precompiled = (sources / _PRECOMPILED).exists()
    units = _units(sources, precompiled, toolkit is not None)
    python = dict.fromkeys((sysconfig.get_path("include"), sysconfig.get_path("platinclude")))
    system = [*include_paths, *python]
    includes = _words([f"-I{sources}", *(part for path in system for part in ("-isystem", path))])
    cxx = _words(compiler.command)
    debug, debug_cuda = (f" {_DEBUG}", f" {_DEBUG_CUDA}") if is_debug() else ("", "")
    folders = [*library_paths, *(_nvcc.folders_of_libraries(toolkit) if toolkit else ())]
    libraries = f"{_words([f'-L{path}' for path in folders])} {_LIBRARIES} {_nvcc.LIBRARIES if toolkit else ''}"
    lines = [
        *_rule("compile", f"{cxx} {_COMMON} {includes} $flags{debug} -c $in -o $out", "compile $out"),
        *_rule("precompile", f"{cxx} {_COMMON}{debug} {includes} -x c++-header -c $in -o $out", "precompile $in"),
        *_rule("link", f"{cxx} {_LINK} $in -o $out {libraries.rstrip()}", "link $out"),
    ]
    if toolkit:
        host = f"-ccbin {cxx}" if len(compiler.command) == 1 else ""
        architectures = _nvcc.architecture_flags(_nvcc.architectures())
        nvcc = f"{_words([toolkit.nvcc])} {host} {_nvcc.FLAGS} {architectures} {includes}{debug_cuda}"
        lines += _rule("compile_cuda", f"{nvcc} -c $in -o $out", "compile $out")
    if precompiled:
        lines.append(f"build {_PRECOMPILED}.gch: precompile {_path(str(sources / _PRECOMPILED))}")
    for unit in units:
        needs = f" | {_PRECOMPILED}.gch" if _INCLUDE in unit.flags else ""
        lines.append(f"build {_path(f'{unit.name}.o')}: {unit.rule} {_path(str(sources / unit.source))}{needs}")
        lines.append(f"  flags = {unit.flags}")
    objects = " ".join(_path(f"{unit.name}.o") for unit in units)
    return "\n".join([*lines, f"build native.so: link {objects}", "default native.so", ""])


def _paths_of_torch() -> tuple[list[str], list[str]]:
    """Of headers and libraries."""
    # Its import warns where CUDA_HOME is set and no GPU is seen, as in a container that is being built.
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        # It imports setuptools, which is slow: only a build pays for it.
        from torch.utils.cpp_extension import include_paths, library_paths
    except ImportError as error:
        raise BuildError(f"{error}, which torch.utils.cpp_extension needs: pip install setuptools") from error
    finally:
        logger.setLevel(level)
    return include_paths(), library_paths()


def _units(sources: Path, precompiled: bool, cuda: bool) -> list[_Unit]:
    found = [path.relative_to(sources) for path in (*sources.rglob("*.cpp"), *sources.rglob("*.cu"))]
    files = sorted(found, key=lambda path: (len(path.parts), path))
    include = _INCLUDE if precompiled else ""
    kernels = [path for path in files if path.parts[0] == "cpu"]
    units = [_Unit(path, "compile_cuda", "", str(path)) for path in files if cuda and path.suffix == ".cu"]
    units += [
        _Unit(path, "compile", include, str(path.with_suffix("")))
        for path in files
        if path.suffix == ".cpp" and path.parts[0] not in ("cpu", "cuda")
    ]
    for name, flags in _CAPABILITIES.items():
        extra = f"-DCPU_CAPABILITY={name} -DCPU_CAPABILITY_{name} {flags}"
        units += [_Unit(path, "compile", extra, str(path.with_suffix(f".{name}"))) for path in kernels]
    if not units:
        raise BuildError(f"no C++ sources in {sources}: the installation is incomplete; reinstall fastpatch")
    return units


def _rule(name: str, command: str, description: str) -> list[str]:
    return [f"rule {name}", f"  command = {command}", f"  description = {description}"]


def _words(words: Iterable[str]) -> str:
    return _text(shlex.join(words))


def _text(text: str) -> str:
    return text.replace("$", "$$")


def _path(text: str) -> str:
    return _text(text).replace(" ", "$ ").replace(":", "$:")
