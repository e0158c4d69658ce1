"""The native library's cache: built once, verified, locked, and every failure told as a BuildError.

The sources are a tiny module without torch's headers. A *slow compiler* is a script that waits for a file: so
tests stop a build where they want, without sleeping.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fastpatch import _build, _cache, _compile, _compilers, _ninja
from fastpatch._errors import BuildError

pytestmark = pytest.mark.skipif(_build.unsupported_platform() is not None, reason="no native library here")

MODULE = """
#include <Python.h>
int width_DEFAULT();
int width_AVX2();
int width_AVX512();
static PyObject* widths(PyObject*, PyObject*) {
  return Py_BuildValue("(iii)", width_DEFAULT(), width_AVX2(), width_AVX512());
}
static PyMethodDef methods[] = {{"widths", widths, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods};
PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&definition); }
"""
KERNEL = """
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
int JOIN(width_, CPU_CAPABILITY)() {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__F16C__)
  return 512;
#elif defined(CPU_CAPABILITY_AVX2) && defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  return 256;
#elif defined(CPU_CAPABILITY_DEFAULT) && !defined(__AVX2__)
  return 128;
#endif
}
"""
WIDTHS = (128, 256, 512)
EDGES = 5  # one top-level source, one kernel three times, the link

PROCESS = """
import sys, time, torch
from pathlib import Path
before, start = set(sys.modules), time.process_time()
from fastpatch import _build
module = _build.load_from(Path(sys.argv[1]))
seconds = time.process_time() - start
print([module.widths(), seconds, sorted(set(sys.modules) - before)])
"""


@contextmanager
def library_kept() -> Iterator[None]:
    """A real library that is loaded is in place afterwards."""
    before = sys.modules.get("fastpatch._native")
    yield
    sys.modules.pop("fastpatch._native", None)
    if before is not None:
        sys.modules["fastpatch._native"] = before


@pytest.fixture(autouse=True)
def _untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without what the person who runs the tests has set."""
    names = ("CXX", "MAX_JOBS", "FASTPATCH_BUILD_TIMEOUT", "FASTPATCH_CACHE_DIR", "FASTPATCH_DEBUG", "XDG_CACHE_HOME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    with library_kept():
        yield


def write_sources(folder: Path, module: str = MODULE) -> Path:
    (folder / "cpu").mkdir(parents=True)
    (folder / "module.cpp").write_text(module)
    (folder / "cpu" / "width.cpp").write_text(KERNEL)
    return folder


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "sources of $x: 1")  # a name that ninja and the shell must quote


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTPATCH_CACHE_DIR", str(tmp_path / "cache $y: 2"))
    return tmp_path / "cache $y: 2"


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the library of the plain sources."""
    folder = tmp_path_factory.mktemp("prebuilt")
    with library_kept(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTPATCH_CACHE_DIR", str(folder / "cache"))
        patch.delenv("CXX", raising=False)
        _build.load_from(write_sources(folder / "csrc"))
    return folder / "cache"


@pytest.fixture
def warm(prebuilt: Path, cache: Path) -> Path:
    """The library in a copy of that cache, free to be damaged."""
    shutil.copytree(prebuilt, cache)
    (library,) = cache.glob("*/native-*.so")
    return library


class SlowCompiler:
    """A script that logs each compilation, and waits for ``release()`` before it starts the real compiler."""

    def __init__(self, folder: Path, deaf: bool = False) -> None:
        self.path, self.log, self.go = folder / "slow c++", folder / "compiled", folder / "go"
        self.path.write_text(
            "#!/bin/sh\n"
            'case "$*" in --version|-dumpmachine) exec g++ "$@" ;; esac\n'
            f"{'trap : TERM' if deaf else ':'}\n"
            f'echo $$ >> "{self.log}"\n'
            f'while [ ! -e "{self.go}" ]; do sleep 0.05; done\n'
            'exec g++ "$@"\n'
        )
        self.path.chmod(0o755)

    def pids(self) -> list[int]:
        return [int(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def release(self) -> None:
        self.go.touch()


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowCompiler]:
    compiler = SlowCompiler(tmp_path)
    monkeypatch.setenv("CXX", f"'{compiler.path}'")
    yield compiler
    compiler.release()  # whatever a failing test left waiting


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited 60 s for {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def start(sources: Path, errors: Path) -> subprocess.Popen[str]:
    root = str(Path(_build.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root}
    command = (sys.executable, "-c", PROCESS, str(sources))
    with errors.open("w") as stderr:
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)


def builds(capsys: pytest.CaptureFixture[str]) -> int:
    return capsys.readouterr().err.count("fastpatch: compiling the native library")


# --- building and starting from the cache


def test_cold_build_says_what_it_does_and_leaves_only_the_library(
    sources: Path, cache: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fastpatch")
    module = _build.load_from(sources)
    assert module.widths() == WIDTHS
    assert sys.modules["fastpatch._native"] is module
    first, last = capsys.readouterr().err.splitlines()
    (entry,) = cache.iterdir()
    assert first.startswith(f"fastpatch: compiling the native library for torch {torch.__version__} (once;")
    assert first.endswith(f"into {entry}")
    assert last.startswith("fastpatch: the native library is ready after ")
    assert [f"fastpatch: {record.getMessage()}" for record in caplog.records] == [first, last]
    (library,) = entry.glob("native-*.so")
    names = {"build.lock", library.name, library.with_suffix(".json").name}
    assert {path.name for path in entry.iterdir()} == names
    for folder in (cache, entry):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    manifest = json.loads(library.with_suffix(".json").read_text())
    assert manifest["torch"] == torch.__version__
    assert "g++" not in manifest["compiler"] and "c++" not in manifest["compiler"]  # the same by any name


def test_warm_start_is_quick_and_silent(warm: Path, sources: Path, tmp_path: Path) -> None:
    process = start(sources, tmp_path / "stderr")
    widths, seconds, modules = eval(process.communicate()[0])
    assert widths == WIDTHS
    assert (tmp_path / "stderr").read_text() == ""
    assert seconds < 0.3
    assert not {"setuptools", "filelock", "ninja", "torch.utils.cpp_extension"}.intersection(modules)


def test_warm_start_writes_nothing(warm: Path, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for module, name in ((os, "mkdir"), (os, "replace"), (_build, "_build")):
        monkeypatch.setattr(module, name, refuse)
    assert _build.load_from(sources).widths() == WIDTHS


def test_steps_are_rewritten_in_place_on_a_terminal(
    sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    _build.load_from(sources)
    text = terminal.getvalue()
    for step in range(1, EDGES + 1):
        assert f"\rfastpatch: [{step}/{EDGES}]" in text
    assert text.count("\n") == 2
    assert text.splitlines()[-1].endswith(" s")


@pytest.mark.parametrize("stream", [None, "closed"])
def test_builds_without_a_stderr(
    stream: str | None, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed if stream else None)
    progress = _compile.Progress()
    progress.say("text")
    progress.step(1, 2)
    progress.end()


def test_what_is_compiled_and_in_which_order(sources: Path) -> None:
    for name in ("a/one.cpp", "cuda/two.cpp", "a/one.h"):
        (sources / name).parent.mkdir(exist_ok=True)
        (sources / name).write_text("")
    compiler = _compilers.find_compiler()
    assert isinstance(compiler, _compilers.Compiler)
    text = _ninja.ninja_file(sources, compiler)
    outputs = [line.split()[1] for line in text.splitlines() if line.startswith("build ")]
    widths = [f"cpu/width.{name}.o:" for name in ("DEFAULT", "AVX2", "AVX512")]
    assert outputs == ["module.o:", "a/one.o:", *widths, "native.so:"]


def test_a_header_is_precompiled_for_all_but_the_kernels(sources: Path) -> None:
    (sources / "precompiled.h").write_text("#include <vector>\n")
    compiler = _compilers.find_compiler()
    assert isinstance(compiler, _compilers.Compiler)
    lines = _ninja.ninja_file(sources, compiler).splitlines()
    edges = {line.split()[1]: (line, after) for line, after in pairwise(lines) if "build" in line}
    assert "precompiled.h.gch:" in edges
    line, flags = edges["module.o:"]
    assert line.endswith(" | precompiled.h.gch")
    assert flags == "  flags = -include precompiled.h"
    line, flags = edges["cpu/width.AVX2.o:"]
    assert "precompiled.h" not in line + flags


@pytest.mark.parametrize("usable", [True, False])
def test_what_the_precompiled_header_declares(sources: Path, usable: bool, tmp_path: Path) -> None:
    """A compiler that can't use what was read before reads the header itself."""
    (sources / "precompiled.h").write_text("#include <vector>\n")
    (sources / "module.cpp").write_text("int size() { return static_cast<int>(std::vector<int>().size()); }\n")
    compiler = _compilers.find_compiler()
    assert isinstance(compiler, _compilers.Compiler)
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / "build.ninja").write_text(_ninja.ninja_file(sources, compiler))
    ninja = [_compilers.find_ninja(), "-C", str(folder)]
    subprocess.run([*ninja, "precompiled.h.gch"], check=True)
    if not usable:
        (folder / "precompiled.h.gch").write_bytes(b"of another compiler")
    subprocess.run([*ninja, "module.o"], check=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda sources, patch: (sources / "module.cpp").write_text(MODULE + "\n"),
        lambda sources, patch: (sources / "new.h").write_text(""),
        lambda sources, patch: (sources / "module.cpp").rename(sources / "renamed.cpp"),
        lambda sources, patch: patch.setattr(_ninja, "FLAGS", _ninja.FLAGS + " -O1"),
        lambda sources, patch: patch.setattr(torch, "__version__", "2.99"),
        lambda sources, patch: patch.setattr(torch.version, "git_version", "other"),
        lambda sources, patch: patch.setattr(torch.version, "cuda", "99.0"),
        lambda sources, patch: patch.setenv("TORCH_CUDA_ARCH_LIST", "9.9"),
        lambda sources, patch: patch.setenv("FASTPATCH_DEBUG", "1"),
        lambda sources, patch: patch.setattr(_cache, "_SCHEMA", -1),
    ],
)
def test_key_changes_with_all_that_the_binary_depends_on(
    change: Callable[[Path, pytest.MonkeyPatch], object],
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = _cache.Entry.of(sources, tmp_path).folder
    assert _cache.Entry.of(sources, tmp_path).folder == before
    change(sources, monkeypatch)
    assert _cache.Entry.of(sources, tmp_path).folder != before


@pytest.mark.parametrize("text", ["", "0", " 0 "])
def test_key_of_no_debugging(text: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _cache.Entry.of(sources, tmp_path).folder
    monkeypatch.setenv("FASTPATCH_DEBUG", text)
    assert _cache.Entry.of(sources, tmp_path).folder == before


@pytest.mark.parametrize("text", ["2", "yes", "True"])
def test_bad_value_of_debug(text: str, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPATCH_DEBUG", text)
    with pytest.raises(BuildError, match=f"FASTPATCH_DEBUG='{text}' must be 0 or 1"):
        _build.load_from(sources)
    assert not cache.exists()


DEBUGGED = MODULE.replace("width_DEFAULT(),", "FASTPATCH_DEBUG + 7,")


def test_library_for_gdb(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has symbols, its checks are compiled, and it lies beside the other one."""
    _build.load_from(write_sources(tmp_path / "plain"))
    monkeypatch.setenv("FASTPATCH_DEBUG", "1")
    assert _build.load_from(write_sources(tmp_path / "debug", DEBUGGED)).widths() == (8, *WIDTHS[1:])
    found = {json.loads(path.read_text())["debug"]: path.with_suffix(".so") for path in cache.glob("*/native-*.json")}
    assert {debug: b".debug_info" in path.read_bytes() for debug, path in found.items()} == {False: False, True: True}


def test_key_does_not_depend_on_where_the_sources_lie(sources: Path, tmp_path: Path) -> None:
    moved = write_sources(tmp_path / "elsewhere")
    assert _cache.Entry.of(moved, tmp_path) == _cache.Entry.of(sources, tmp_path)


def test_a_changed_source_is_compiled(warm: Path, sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sources / "cpu" / "width.cpp").write_text(KERNEL.replace("return 128", "return 64"))
    assert _build.load_from(sources).widths() == (64, 256, 512)
    assert builds(capsys) == 1


# --- several processes


def test_two_processes_at_once_build_once(slow: SlowCompiler, sources: Path, cache: Path, tmp_path: Path) -> None:
    errors = [tmp_path / "one", tmp_path / "two"]
    processes = [start(sources, path) for path in errors]
    waits = f"waiting at most 900 s for {cache}"
    wait_for(lambda: any(waits in path.read_text() for path in errors), "one process to wait")
    slow.release()
    results = [eval(process.communicate(timeout=60)[0])[0] for process in processes]
    assert results == [WIDTHS, WIDTHS]
    told = "".join(path.read_text() for path in errors)
    assert told.count("compiling the native library") == 1
    assert told.count("waiting at most") == 1
    assert len(slow.pids()) == EDGES


def test_a_killed_build_blocks_nobody(
    slow: SlowCompiler,
    sources: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    process = start(sources, tmp_path / "stderr")
    wait_for(slow.pids, "the compiler to start")
    process.kill()
    process.communicate()
    (entry,) = cache.iterdir()
    assert list(entry.glob("build-*/")) and not list(entry.glob("native-*"))
    monkeypatch.delenv("CXX")
    assert _build.load_from(sources).widths() == WIDTHS
    assert builds(capsys) == 1
    assert not list(entry.glob("build-*/"))
    slow.release()
    wait_for(lambda: not any(map(alive, slow.pids())), "the orphans to end")


def test_waiting_for_a_lock_has_an_end(
    sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fcntl = pytest.importorskip("fcntl")
    entry = _cache.Entry.of(sources, cache)
    entry.create()
    monkeypatch.setenv("FASTPATCH_BUILD_TIMEOUT", "0.3")
    with (entry.folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BuildError, match=r"held .*build\.lock for longer than 0\.3 s.*FASTPATCH_BUILD"):
            _build.load_from(sources)
    assert "waiting at most 0.3 s for" in capsys.readouterr().err
    assert builds(capsys) == 0


@pytest.mark.parametrize("deaf", [False, True], ids=["obedient", "ignores SIGTERM"])
def test_a_build_that_takes_too_long_is_stopped(
    deaf: bool, sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = SlowCompiler(tmp_path, deaf)
    monkeypatch.setenv("CXX", f"'{compiler.path}'")
    monkeypatch.setenv("FASTPATCH_BUILD_TIMEOUT", "0.5")
    monkeypatch.setattr(_compile, "_GRACE", 0.3 if deaf else 30)
    start = time.monotonic()
    try:
        with pytest.raises(BuildError, match=r"longer than 0\.5 s.*FASTPATCH_BUILD_TIMEOUT"):
            _build.load_from(sources)
        assert time.monotonic() - start < 15  # far from the 30 s of grace
        assert compiler.pids()
        wait_for(lambda: not any(map(alive, compiler.pids())), "the compilers to end")
    finally:
        compiler.release()
    assert [path.name for path in cache.glob("*/*")] == ["build.lock"]


def test_ctrl_c_stops_the_compilers_and_propagates(slow: SlowCompiler, sources: Path, cache: Path) -> None:
    def interrupt() -> None:
        wait_for(slow.pids, "the compiler to start")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        _build.load_from(sources)
    thread.join()
    wait_for(lambda: not any(map(alive, slow.pids())), "the compilers to end")
    assert [path.name for path in cache.glob("*/*")] == ["build.lock"]


# --- what is in the cache is verified


def truncate(library: Path) -> None:
    # Not in place: this process may have the file mapped.
    data = library.read_bytes()
    library.unlink()
    library.write_bytes(data[:-1])


def damage_manifest(library: Path) -> None:
    library.with_suffix(".json").write_text("[")


def remove_manifest(library: Path) -> None:
    library.with_suffix(".json").unlink()


def remove_library(library: Path) -> None:
    library.unlink()


def verified_garbage(library: Path) -> None:
    library.unlink()
    library.write_bytes(b"not a library")
    digest = {"sha256": _cache.sha256(b"not a library")}
    library.with_suffix(".json").write_text(json.dumps(digest))


DAMAGES = [truncate, damage_manifest, remove_manifest, remove_library, verified_garbage]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_rebuilt_once(
    damage: Callable[[Path], None], warm: Path, sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(warm)
    assert _build.load_from(sources).widths() == WIDTHS
    assert builds(capsys) == 1
    assert _build.load_from(sources).widths() == WIDTHS
    assert builds(capsys) == 0


def test_a_process_that_has_the_old_library_open_keeps_it(warm: Path, sources: Path, tmp_path: Path) -> None:
    verified_garbage(warm)
    os.link(warm, tmp_path / "old")  # the same file by another name, as a process that mapped it would see it
    assert _build.load_from(sources).widths() == WIDTHS
    assert (tmp_path / "old").read_bytes() == b"not a library"


def test_a_build_that_dies_between_library_and_manifest_is_not_loaded(
    warm: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace, moved = os.replace, []

    def die_at_the_second(source: Path, target: Path) -> None:
        moved.append(target.suffix)
        if len(moved) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    truncate(warm)
    monkeypatch.setattr(os, "replace", die_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        _build.load_from(sources)
    assert moved == [".so", ".json"]
    # The rebuilt library may equal the first one, whose manifest would then fit: make it another.
    monkeypatch.setattr(os, "replace", replace)
    data = warm.read_bytes() + b"changed"
    warm.unlink()
    warm.write_bytes(data)
    assert _cache.verified(warm) is None
    assert _build.load_from(sources).widths() == WIDTHS
    assert builds(capsys) == 2


def test_a_damaged_library_is_never_loaded(warm: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []
    monkeypatch.setattr(_build, "_import", loaded.append)
    monkeypatch.setenv("PATH", "")
    truncate(warm)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        _build.load_from(sources)
    assert loaded == []


def test_a_library_that_never_loads_is_built_once_and_told(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = write_sources(tmp_path / "csrc", MODULE.replace("PyInit__native", "PyInit_other"))
    with pytest.raises(BuildError, match=r"built, but can't be loaded: .*PyInit__native") as caught:
        _build.load_from(sources)
    assert isinstance(caught.value.__cause__, ImportError)
    assert builds(capsys) == 1


# --- no compiler, no ninja


def test_without_a_compiler_the_cached_library_serves(
    warm: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for suffix in (".so", ".json"):  # as if another compiler had built it
        warm.with_suffix(suffix).rename(warm.with_name(f"native-00000000{suffix}"))
    monkeypatch.setenv("PATH", "")
    assert _build.load_from(sources).widths() == WIDTHS
    assert capsys.readouterr().err == ""


def test_another_compilers_library_is_not_used_when_there_is_a_compiler(
    warm: Path, sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for suffix in (".so", ".json"):
        warm.with_suffix(suffix).rename(warm.with_name(f"native-00000000{suffix}"))
    assert _build.load_from(sources).widths() == WIDTHS
    assert builds(capsys) == 1


@pytest.mark.parametrize(
    ("cxx", "message"),
    [
        (None, r"no C\+\+ compiler was found \(c\+\+, g\+\+\); install .*CXX"),
        ("no-such-c++", r"CXX='no-such-c\+\+' wasn't found; install"),
        ("'c++", r"CXX=\"'c\+\+\" can't be read"),
        ("/bin/false", r"'/bin/false --version' failed with status 1; name a working"),
    ],
)
def test_without_a_compiler_and_a_library(
    cxx: str | None, message: str, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cxx is None:
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setenv("CXX", cxx)
    with pytest.raises(BuildError, match=message):
        _build.load_from(sources)
    assert not cache.exists()


def test_a_missing_c_plus_plus_falls_back_to_g_plus_plus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "g++").symlink_to(str(shutil.which("g++")))
    expected = _compilers.find_compiler()
    monkeypatch.setenv("PATH", str(tmp_path))
    found = _compilers.find_compiler()
    assert isinstance(found, _compilers.Compiler) and isinstance(expected, _compilers.Compiler)
    assert found.command == (str(tmp_path / "g++"),)
    assert found.identity == expected.identity


def test_without_ninja(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ninja

    monkeypatch.setattr(ninja, "BIN_DIR", "")
    monkeypatch.setenv("CXX", str(shutil.which("g++")))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match=r"ninja wasn't found; .*pip install ninja"):
        _build.load_from(sources)


# --- failures


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
def test_a_bad_time_out_is_quoted(value: str, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPATCH_BUILD_TIMEOUT", value)
    with pytest.raises(BuildError, match=f"FASTPATCH_BUILD_TIMEOUT='{value}' must be a positive number"):
        _build.load_from(sources)


@pytest.mark.parametrize("value", ["many", "0", "-2", "1.5"])
def test_a_bad_number_of_jobs_is_quoted(
    value: str, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", value)
    with pytest.raises(BuildError, match=f"MAX_JOBS='{value}' must be a positive integer"):
        _build.load_from(sources)


def test_max_jobs_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _compile.jobs() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("MAX_JOBS", "7")
    assert _compile.jobs() == 7


def test_a_failing_compilation_keeps_its_output(tmp_path: Path, cache: Path) -> None:
    broken = f"#warning seen before\n{MODULE}\nint broken = undeclared;\nint second = missing;\n"
    sources = write_sources(tmp_path / "csrc", broken)
    with pytest.raises(BuildError) as caught:
        _build.load_from(sources)
    first = "error: 'undeclared' was not declared in this scope"
    assert first in caught.value.message and "'missing'" not in caught.value.message
    for part in ("seen before", first, "'missing' was not declared", "module.cpp"):
        assert part in caught.value.output
    assert [path.name for path in cache.glob("*/*")] == ["build.lock"]


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("fatal error: error writing to /x.s: No space left on device", "the disk is full"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "MAX_JOBS=1"),
        ("fatal error: Python.h: No such file or directory", "python3-dev"),
    ],
)
def test_remedies_for_what_the_compiler_says(
    printed: str, message: str, sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "cxx"
    script.write_text(
        '#!/bin/sh\ncase "$*" in --version|-dumpmachine) echo 1; exit;; esac\n' + f"echo '{printed}'; exit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(BuildError, match=message) as caught:
        _build.load_from(sources)
    assert printed in caught.value.message and printed in caught.value.output


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "mkdir"), ("tempfile", "mkdtemp"), ("pathlib.Path", "write_text"), ("os", "replace")],
)
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "is full .*free some space, or set FASTPATCH_CACHE_DIR"),
        (errno.EROFS, "can't be used .*set FASTPATCH_CACHE_DIR"),
        (errno.EIO, "is it sound.*set FASTPATCH_CACHE_DIR"),
    ],
)
def test_no_bare_os_error_escapes(
    module: str,
    name: str,
    number: int,
    message: str,
    sources: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number), str(cache))

    def compile_library(sources: Path, folder: Path, *rest: object) -> Path:
        (folder / "build.ninja").write_text("")
        (folder / "native.so").write_bytes(b"")
        return folder / "native.so"

    monkeypatch.setattr(_compile, "compile_library", compile_library)
    monkeypatch.setattr(f"{module}.{name}", fail)
    with pytest.raises(BuildError, match=message) as caught:
        _build.load_from(sources)
    assert isinstance(caught.value.__cause__, OSError)
    assert os.strerror(number) in str(caught.value)
    assert not list(cache.glob("*/native-*.json"))


def test_incomplete_installation(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(BuildError, match=r"no C\+\+ sources in .*reinstall fastpatch"):
        _build.load_from(tmp_path / "nowhere")


# --- whose cache it is, and where


@pytest.mark.parametrize("entry", [False, True], ids=["cache", "entry"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_folders_that_others_can_write_are_refused(
    entry: bool, mode: int, warm: Path, sources: Path, cache: Path
) -> None:
    folder = warm.parent if entry else cache
    folder.chmod(mode)
    with pytest.raises(BuildError, match=rf"\(mode {mode:04o}, .*chmod go-w .*FASTPATCH_CACHE_DIR") as caught:
        _build.load_from(sources)
    assert str(folder) in str(caught.value)
    folder.chmod(0o755)
    assert _build.load_from(sources).widths() == WIDTHS


def test_a_cache_of_somebody_else_is_refused(warm: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 12345)
    with pytest.raises(BuildError, match=rf"belongs to .*uid {owner}.* not to uid {owner + 12345}, .*CACHE_DIR"):
        _build.load_from(sources)


def test_a_file_in_the_place_of_the_cache(sources: Path, cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(BuildError, match="is not a folder; remove it, or set FASTPATCH_CACHE_DIR"):
        _build.load_from(sources)


def test_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _build.cache_dir() == tmp_path / ".cache" / "fastpatch"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert _build.cache_dir() == tmp_path / ".cache" / "fastpatch"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert _build.cache_dir() == Path("/xdg/fastpatch")
    monkeypatch.setenv("FASTPATCH_CACHE_DIR", "~/own")
    assert _build.cache_dir() == tmp_path / "own"


def test_no_home(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    with pytest.raises(BuildError, match=r"no home folder .*set FASTPATCH_CACHE_DIR"):
        _build.load_from(sources)


# --- once a process


@pytest.fixture
def forgotten(sources: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """``load()`` as in a new process, for the small sources; the list grows when it looks into the cache."""
    calls: list[Path] = []
    load_from = _build.load_from

    def counted(sources: Path) -> Any:
        calls.append(sources)
        return load_from(sources)

    monkeypatch.setattr(_build, "SOURCES", sources)
    monkeypatch.setattr(_build, "_outcome", None)
    monkeypatch.setattr(_build, "load_from", counted)
    return calls


def test_threads_share_one_library(warm: Path, forgotten: list[Path]) -> None:
    modules: list[Any] = []
    threads = [threading.Thread(target=lambda: modules.append(_build.load())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert modules[0].widths() == WIDTHS
    assert all(module is modules[0] for module in modules) and len(modules) == 4
    assert len(forgotten) == 1


def test_a_failure_is_remembered(cache: Path, forgotten: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-c++")
    errors = []
    for _ in range(3):
        with pytest.raises(BuildError) as caught:
            _build.load()
        errors.append(caught.value)
    assert errors[0] is errors[1] is errors[2]
    assert len(forgotten) == 1


@pytest.mark.parametrize(
    ("system", "machine", "name"),
    [
        ("Linux", "x86_64", None),
        ("Linux", "aarch64", "linux aarch64"),
        ("Darwin", "arm64", "darwin arm64"),
        ("Windows", "AMD64", "windows amd64"),
    ],
)
def test_platforms(system: str, machine: str, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert _build.unsupported_platform() == name


def test_nothing_is_tried_on_another_platform(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(BuildError, match="this is linux riscv64"):
        _build.load_from(sources)
    assert not cache.exists()
