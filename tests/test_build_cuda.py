"""Building with CUDA sources: which nvcc is taken, for which GPUs, and what becomes of a build that can't have it.

The nvcc is a script that answers as nvcc does and compiles with g++, so that this runs anywhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastpatch import _build, _compilers, _ninja, _nvcc
from fastpatch._errors import BuildError

pytestmark = pytest.mark.skipif(_build.unsupported_platform() is not None, reason="no native library here")

MODULE = """
#include <Python.h>
__attribute__((weak)) int on_cuda();
static PyObject* cuda(PyObject*, PyObject*) { return PyLong_FromLong(on_cuda == nullptr ? 0 : on_cuda()); }
static PyMethodDef methods[] = {{"cuda", cuda, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods};
PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&definition); }
"""
KERNEL = "int on_cuda() { return 7; }\n"
NVCC = """#!/bin/sh
echo "$*" >> '{log}'
case " $* " in
  *" --version "*) echo 'Cuda compilation tools, release {release}, V{release}.88' ;;
  *" --dryrun "*) echo '#$ LIBRARIES=  "-L{libraries}"' ;;
  *) while [ $# -gt 0 ]; do
       case "$1" in -c) source=$2 ;; -o) object=$2 ;; esac
       shift
     done
     exec g++ -x c++ -fPIC -c "$source" -o "$object" ;;
esac
"""


@pytest.fixture(autouse=True)
def _untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ours = ("FASTPATCH_CACHE_DIR", "FASTPATCH_DEBUG")
    for name in ("CXX", "MAX_JOBS", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", *ours):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    before, why = sys.modules.get("fastpatch._native"), _build._without_cuda
    yield
    monkeypatch.setattr(_build, "_without_cuda", why)
    sys.modules.pop("fastpatch._native", None)
    if before is not None:
        sys.modules["fastpatch._native"] = before


class Toolkit:
    """A folder as CUDA_HOME names one, with the script in it, and the two libraries that are linked."""

    def __init__(self, home: Path, release: str = "13.0", libraries: bool = True) -> None:
        self.home, self.log = home, home / "log"
        for folder in (home / "bin", home / "lib"):
            folder.mkdir(parents=True)
        self.nvcc = home / "bin" / "nvcc"
        self.nvcc.write_text(NVCC.format(log=self.log, release=release, libraries=home / "lib"))
        self.nvcc.chmod(0o755)
        for name in ("cudart", "c10_cuda") if libraries else ():
            subprocess.run(["ar", "rcs", str(home / "lib" / f"lib{name}.a")], check=True)

    def compiled(self) -> int:
        return sum(" -c " in line for line in self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolkit:
    made = Toolkit(tmp_path / "toolkit")
    monkeypatch.setenv("CUDA_HOME", str(made.home))
    return made


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    (folder / "cuda").mkdir(parents=True)
    (folder / "module.cpp").write_text(MODULE)
    (folder / "cuda" / "kernel.cu").write_text(KERNEL)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTPATCH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def on_cuda(sources: Path) -> int:
    return int(_build.load_from(sources).cuda())


# --- which nvcc


def test_torch_without_cuda_needs_no_nvcc(toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert _nvcc.find_toolkit() == f"torch {torch.__version__} is built without CUDA"
    assert not toolkit.log.exists()


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_a_folder_without_nvcc_is_quoted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    why = _nvcc.find_toolkit()
    assert isinstance(why, str)
    assert f"{name}={str(tmp_path)!r} has no bin/nvcc" in why and "install a toolkit of CUDA 13" in why


def test_nvcc_of_path(toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(toolkit.nvcc.parent), prepend=os.pathsep)
    assert _nvcc.find_toolkit() == _nvcc.Toolkit(str(toolkit.nvcc), "nvcc V13.0.88")


def test_no_nvcc_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nvcc, "_find_nvcc", lambda: None)
    why = _nvcc.find_toolkit()
    assert isinstance(why, str)
    assert why.startswith("no nvcc was found") and "name its folder in CUDA_HOME" in why


@pytest.mark.parametrize(("release", "fits"), [("13.0", True), ("13.2", True), ("12.9", False), ("14.0", False)])
def test_the_major_release_must_be_torchs(
    release: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Toolkit(tmp_path / "other", release, libraries=False)
    monkeypatch.setenv("CUDA_HOME", str(made.home))
    found = _nvcc.find_toolkit()
    if fits:
        assert found == _nvcc.Toolkit(str(made.nvcc), f"nvcc V{release}.88")
    else:
        assert isinstance(found, str)
        assert f"is of CUDA {release}, and torch {torch.__version__} is built with CUDA 13.0" in found


def test_an_nvcc_that_says_nothing(toolkit: Toolkit) -> None:
    toolkit.nvcc.write_text("#!/bin/sh\necho gone wrong\n")
    why = _nvcc.find_toolkit()
    assert isinstance(why, str)
    assert "doesn't say its version (gone wrong)" in why


# --- for which GPUs


@pytest.mark.parametrize("text", ["8.0;9.0+PTX", "8.0 9.0+PTX", "8.0,9.0+PTX", " 8.0;9.0+PTX "])
def test_architectures_that_are_asked_for(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    assert _nvcc.architectures() == ("8.0", "9.0+PTX")
    assert _nvcc.architecture_flags(_nvcc.architectures()) == (
        "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90"
        " -gencode=arch=compute_90,code=compute_90"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hopper", ("9.0+PTX",)),
        ("Turing;Ampere", ("7.5+PTX", "8.0", "8.6+PTX")),
        ("8.0 Ampere", ("8.0", "8.6+PTX")),
    ],
)
def test_generations_by_name(text: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    assert _nvcc.architectures() == expected


def test_special_architectures() -> None:
    assert _nvcc.architecture_flags(("9.0a", "12.0")) == (
        "-gencode=arch=compute_90a,code=sm_90a -gencode=arch=compute_120,code=sm_120"
    )


@pytest.mark.parametrize("text", ["hopper", "8.0;sm_90", "8", "Ampere+PTX", "8.0;;9.0"])
def test_no_architecture_is_quoted(
    text: str, toolkit: Toolkit, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    if text == "8.0;;9.0":
        assert _nvcc.architectures() == ("8.0", "9.0")
        return
    with pytest.raises(
        BuildError, match=f"TORCH_CUDA_ARCH_LIST='{re.escape(text)}': .* is no architecture; give numbers"
    ):
        _build.load_from(sources)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("9.0\n9.0\n", ("9.0+PTX",)),
        ("12.0\n8.6\n9.0\n", ("8.6+PTX", "9.0", "12.0")),
        ("No devices were found\n", ("8.0+PTX", "9.0")),
    ],
)
def test_architectures_of_the_visible_gpus(
    answer: str, expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert _nvcc.architectures() == expected
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "native")
    assert _nvcc.architectures() == expected


def test_cuda_is_compiled_first_and_linked(toolkit: Toolkit, sources: Path) -> None:
    compiler = _compilers.find_compiler()
    found = _nvcc.find_toolkit()
    assert isinstance(compiler, _compilers.Compiler) and isinstance(found, _nvcc.Toolkit)
    text = _ninja.ninja_file(sources, compiler, found)
    outputs = [line.split()[1] for line in text.splitlines() if line.startswith("build ")]
    assert outputs == ["cuda/kernel.cu.o:", "module.o:", "native.so:"]
    assert f"-ccbin {compiler.command[0]}" in text
    assert f"-L{toolkit.home / 'lib'} " in text and "-lcudart -lc10_cuda" in text
    plain = _ninja.ninja_file(sources, compiler)
    assert not any(word in plain for word in (".cu", "compile_cuda", "-lcudart", "-lc10_cuda"))


def test_cuda_of_the_library_for_gdb(toolkit: Toolkit, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of the source, but not -G: without optimization device code rounds otherwise."""
    compiler, found = _compilers.find_compiler(), _nvcc.find_toolkit()
    assert isinstance(compiler, _compilers.Compiler) and isinstance(found, _nvcc.Toolkit)

    def flags() -> set[str]:
        lines = _ninja.ninja_file(sources, compiler, found).splitlines()
        return set(lines[lines.index("rule compile_cuda") + 1].split())

    plain = flags()
    monkeypatch.setenv("FASTPATCH_DEBUG", "1")
    assert flags() - plain == {"-g", "-lineinfo", "-DFASTPATCH_DEBUG"}
    assert plain <= flags()


# --- building


def test_the_library_has_cuda_and_keeps_it_without_the_toolkit(
    toolkit: Toolkit, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_cuda(sources) == 7
    assert _build.why_no_cuda() is None
    assert on_cuda(sources) == 7 and toolkit.compiled() == 1
    shutil.rmtree(toolkit.home)  # as a container image may do
    assert on_cuda(sources) == 7
    (manifest,) = cache.glob("*/native-*-cuda-*.json")
    assert json.loads(manifest.read_text())["cuda_compiler"] == "nvcc V13.0.88"


def test_without_a_toolkit_there_is_no_cuda_until_there_is_one(
    tmp_path: Path, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert on_cuda(sources) == 0
    why = _build.why_no_cuda()
    assert why is not None and "has no bin/nvcc" in why
    monkeypatch.setenv("CUDA_HOME", str(Toolkit(tmp_path / "later").home))
    assert on_cuda(sources) == 7
    assert _build.why_no_cuda() is None
    assert len(list(cache.glob("*/native-*.so"))) == 2


@pytest.mark.parametrize("broken", ["source", "libraries", "unloadable"])
def test_what_is_wrong_with_cuda_does_not_cost_the_rest(
    broken: str, sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    toolkit = Toolkit(tmp_path / "toolkit", libraries=broken != "libraries")
    if broken == "libraries":  # torch's own folder, which has one of them in its CUDA builds, is passed over
        monkeypatch.setattr(_nvcc, "LIBRARIES", "-lcudart_that_is_missing")
    else:
        what = "return seven;" if broken == "source" else "int seven(); return seven();"
        (sources / "cuda" / "kernel.cu").write_text(f"int on_cuda() {{ {what} }}\n")
    monkeypatch.setenv("CUDA_HOME", str(toolkit.home))
    assert on_cuda(sources) == 0
    why = _build.why_no_cuda()
    assert why is not None
    start = "the CUDA kernels can't be loaded: " if broken == "unloadable" else "compiling the CUDA kernels failed: "
    assert why.startswith(start)
    assert ("cudart_that_is_missing" if broken == "libraries" else "seven") in why
    assert "; building without CUDA" in capsys.readouterr().err
    compiled = toolkit.compiled()
    assert on_cuda(sources) == 0 and toolkit.compiled() == compiled  # not tried again at every start
    assert _build.why_no_cuda() == why


def test_what_is_wrong_with_all_else_is_an_error(toolkit: Toolkit, sources: Path, cache: Path) -> None:
    (sources / "module.cpp").write_text("int wrong = right;\n")
    with pytest.raises(BuildError, match=r"compiling the native library failed: .*right"):
        _build.load_from(sources)
