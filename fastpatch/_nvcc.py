"""The compiler of CUDA sources: whether there is one for this torch, and for which GPUs it is to compile."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from ._errors import BuildError

FLAGS = (
    "-O3 -std=c++20 --expt-relaxed-constexpr -fmad=false -DNDEBUG"
    f" -D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    " -Xcompiler -fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall,-Wno-unknown-pragmas"
)
"""Without the architectures. Contraction is off, as on the CPU: only explicit FMAs may be fused."""

LIBRARIES = "-lcudart -lc10_cuda"

# Where no GPU is seen (a container being built): those of the data centre. Binaries of 8.0 run on 8.6 and 8.9 too.
_DEFAULT_ARCHITECTURES = ("8.0", "9.0")
_ARCHITECTURE = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")

# Generations, by the names that torch.utils.cpp_extension takes too, with the architectures it means by them.
_GENERATIONS = {
    "Maxwell": ("5.0", "5.2+PTX"),
    "Pascal": ("6.0", "6.1+PTX"),
    "Volta": ("7.0+PTX",),
    "Turing": ("7.5+PTX",),
    "Ampere": ("8.0", "8.6+PTX"),
    "Ada": ("8.9+PTX",),
    "Hopper": ("9.0+PTX",),
    "Blackwell": ("10.0", "10.3", "12.0", "12.1+PTX"),
}


@dataclass(frozen=True)
class Toolkit:
    """An nvcc of the CUDA release that torch was built with, and what it says it is, wherever it is installed."""

    nvcc: str
    identity: str


def find_toolkit() -> Toolkit | str:
    """``$CUDA_HOME``'s nvcc, or ``$CUDA_PATH``'s, else that of PATH, else ``/usr/local/cuda``'s. Or why there is none
    that fits, in a sentence."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    nvcc = _find_nvcc()
    if nvcc is None:
        return _advice("no nvcc was found (in CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda)")
    if not isinstance(nvcc, Path):
        return nvcc
    answer = _ask(nvcc, "--version")
    release = re.search(r"release (\d+)\.(\d+), (V[\d.]+)", answer)
    if release is None:
        return _advice(f"{nvcc} doesn't say its version ({answer.strip()[-200:] or 'no output'})")
    if release[1] != torch.version.cuda.partition(".")[0]:
        return _advice(f"{nvcc} is of CUDA {release[1]}.{release[2]}")
    return Toolkit(str(nvcc), f"nvcc {release[3]}")


def _find_nvcc() -> Path | str | None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name, "").strip():
            nvcc = Path(home, "bin", "nvcc")
            return nvcc if os.access(nvcc, os.X_OK) else _advice(f"{name}={home!r} has no bin/nvcc")
    usual = Path("/usr/local/cuda/bin/nvcc")
    if found := shutil.which("nvcc"):
        return Path(found)
    return usual if os.access(usual, os.X_OK) else None


def _advice(text: str) -> str:
    major = str(torch.version.cuda).partition(".")[0]
    return (
        f"{text}, and torch {torch.__version__} is built with CUDA {torch.version.cuda}; install a toolkit of CUDA"
        f" {major}, and name its folder in CUDA_HOME"
    )


def _ask(nvcc: Path, *questions: str) -> str:
    try:
        asked = subprocess.run(
            (str(nvcc), *questions), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"}, timeout=30, text=True, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return asked.stdout


def folders_of_libraries(toolkit: Toolkit) -> list[str]:
    """Where the toolkit's own libraries lie, as nvcc knows it."""
    answer = _ask(Path(toolkit.nvcc), "--dryrun", "-x", "cu", "-o", os.devnull, os.devnull)
    found = re.search(r"^#\$ LIBRARIES=(.*)$", answer, re.MULTILINE)
    return [word.removeprefix("-L") for word in shlex.split(found[1]) if word.startswith("-L")] if found else []


def architectures() -> tuple[str, ...]:
    """Those to compile for, e.g. ``("8.0+PTX", "9.0")``: ``$TORCH_CUDA_ARCH_LIST``, else (or for ``native``) those of
    the visible GPUs, with code from which newer ones can make their own."""
    text = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if text not in ("", "native"):
        words = re.split(r"[;,\s]+", text)
        asked = dict.fromkeys(arch for word in words for arch in _GENERATIONS.get(word, (word,)))
        if bad := next((arch for arch in asked if not _ARCHITECTURE.fullmatch(arch)), None):
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST={text!r}: {bad!r} is no architecture; give numbers, such as '8.0;9.0+PTX', "
                f"or names out of {', '.join(_GENERATIONS)}, or 'native'"
            )
        return tuple(asked)
    seen = _visible() or _DEFAULT_ARCHITECTURES
    return (f"{seen[0]}+PTX", *seen[1:])


def _visible() -> tuple[str, ...]:
    """Of the GPUs of this machine, the oldest first. Asked of the driver's program, as a process that has started CUDA
    itself can't fork any more."""
    program = shutil.which("nvidia-smi")
    answer = _ask(Path(program), "--query-gpu=compute_cap", "--format=csv,noheader") if program else ""
    lines = {line.strip() for line in answer.splitlines()}
    found = [match for match in map(_ARCHITECTURE.fullmatch, lines) if match]
    return tuple(match[0] for match in sorted(found, key=lambda match: (int(match[1]), int(match[2]))))


def architecture_flags(names: tuple[str, ...]) -> str:
    flags = []
    for match in filter(None, map(_ARCHITECTURE.fullmatch, names)):
        number = match[1] + match[2] + match[3]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[4]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return " ".join(flags)
