"""doctor, build, cache, bench: what they say, their exit statuses, and that they touch nothing else."""

import hashlib
import json
import re
import sys
from pathlib import Path

import filelock
import pytest
import torch
from _cli_helpers import cli, must, python

import fastpatch
from fastpatch import _build, _cache
from fastpatch._cli import _bench, _commands, _options

ALL = fastpatch.targets()


def command(capsys, *words):
    """(exit status, stdout, stderr) of a sub-command, in this process."""
    status = _commands.command(words[0], list(words[1:]))
    return status, *capsys.readouterr()


def findings(capsys):
    status, out, _ = command(capsys, "doctor", "--json")
    data = json.loads(out)
    assert data["healthy"] == (status == 0)
    return {found["name"]: found for found in data["findings"]}, status


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, and no library loaded in this process."""
    monkeypatch.setenv("FASTPATCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_build, "_outcome", None)
    monkeypatch.setattr(_build, "_build", lambda *_: pytest.fail("it was built"))
    return tmp_path / "cache"


# ------------------------------------------------------------------------------------------------------------ doctor


def test_a_healthy_doctor(tmp_path):
    with fastpatch.enabled():
        pass  # builds the library if need be
    done = must(cli("doctor", folder=tmp_path))
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[-1] == f"fastpatch {fastpatch.__version__}: healthy"
    assert not any(line.startswith("!") for line in lines)
    assert max(map(len, lines)) <= 80
    for name in ("Python", "torch", "compiler", "ninja", "nvcc", "CPU", "GPU", "cache", "library", *ALL):
        assert any(line.startswith(f"  {name} ") for line in lines), name
    for name in ALL:
        assert f"  {name:<15} compiled; the self-test found it equal" in done.stdout
    assert torch.__version__ in done.stdout
    assert torch.backends.cpu.get_cpu_capability() in done.stdout


def test_what_each_target_does(capsys, monkeypatch):
    monkeypatch.setenv("FASTPATCH_ONLY", "sgd")
    stock = torch.nn.functional.smooth_l1_loss, torch.optim.SGD.step
    found, status = findings(capsys)
    assert status == 0
    assert found["sgd"]["value"].startswith("compiled")
    assert found["huber_loss"]["value"] == "stock: FASTPATCH_ONLY='sgd' leaves huber_loss out"
    assert (torch.nn.functional.smooth_l1_loss, torch.optim.SGD.step) == stock
    assert not fastpatch.is_enabled()


def test_a_target_that_fails_its_self_test_is_a_problem(capsys, monkeypatch):
    from fastpatch import _switch

    monkeypatch.setattr(_switch, "_fit", set(_switch._fit) - {"sgd"})
    monkeypatch.setattr(_switch, "_unfit", {"sgd": "it differs"})
    found, status = findings(capsys)
    assert status == 1
    assert (found["sgd"]["value"], found["sgd"]["problem"]) == ("stock", "it differs")
    assert found["huber_loss"]["problem"] == ""


def test_nothing_is_built_yet(capsys, fresh):
    found, status = findings(capsys)
    assert status == 1
    assert (found["library"]["value"], found["library"]["mend"]) == ("not built", "python -m fastpatch build")
    assert [name for name in found if found[name]["problem"]] == ["library"]
    assert {found[name]["value"] for name in ALL} == {"stock, as long as there is no library"}
    assert not fresh.exists()


def test_no_compiler_is_a_problem_only_if_something_is_to_be_built(capsys, fresh, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    found, _ = findings(capsys)
    assert found["compiler"]["problem"] == "CXX='/nonexistent/c++' wasn't found"
    assert found["compiler"]["mend"].startswith("install one")
    monkeypatch.undo()
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    found, status = findings(capsys)
    assert (status, found["compiler"]["value"], found["compiler"]["problem"]) == (0, "none that works", "")


@pytest.mark.parametrize(
    ("variable", "value", "name", "word"),
    [
        ("MAX_JOBS", "many", "ninja", "MAX_JOBS='many' must be a positive integer"),
        ("FASTPATCH_BUILD_TIMEOUT", "-1", "ninja", "FASTPATCH_BUILD_TIMEOUT='-1' must be a positive number"),
        ("FASTPATCH_DEBUG", "2", "cache", "FASTPATCH_DEBUG='2' must be 0 or 1"),
        ("FASTPATCH_ONLY", "sdg", "variables", "FASTPATCH_ONLY='sdg': unknown target 'sdg'"),
        ("FASTPATCH", "perhaps", "variables", "FASTPATCH='perhaps' must be 0"),
    ],
)
def test_bad_variables(capsys, fresh, monkeypatch, variable, value, name, word):
    monkeypatch.setenv(variable, value)
    found, status = findings(capsys)
    assert status == 1
    assert word in found[name]["problem"]
    assert found[name]["mend"] != ""
    assert f"{variable}={value!r}" in found["variables"]["value"]


def test_a_cache_that_others_can_write(capsys, fresh):
    fresh.mkdir()
    fresh.chmod(0o777)
    found, status = findings(capsys)
    assert status == 1
    assert [name for name in found if found[name]["problem"]] == ["cache"]  # and not the library in it
    assert "others can write there" in found["cache"]["problem"]
    assert found["cache"]["mend"].startswith(f"chmod go-w {fresh}")


def test_a_library_that_cant_be_loaded(capsys, fresh):
    entry = _cache.Entry.of(_build.SOURCES, fresh)
    entry.create()
    place = entry.place(_cache.Tools.find(_build.SOURCES))
    place.write_bytes(b"no library")
    place.with_suffix(".json").write_text(json.dumps({"sha256": hashlib.sha256(b"no library").hexdigest()}))
    found, status = findings(capsys)
    assert status == 1
    assert str(place) in found["library"]["problem"]
    assert found["library"]["mend"] == "python -m fastpatch build --force"


def test_another_platform(capsys, fresh, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    found, status = findings(capsys)
    assert status == 1
    assert "linux riscv64" in found["library"]["problem"]
    assert found["compiler"]["problem"] == ""


def test_no_torch(tmp_path):
    code = "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['doctor']; import fastpatch._cli as c; c.main()"
    done = python("-c", code, folder=tmp_path)
    assert done.returncode == 1
    assert "! torch: PyTorch, which fastpatch accelerates, is missing" in done.stdout
    assert "to mend it: pip install torch" in done.stdout


def test_a_home_is_not_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FASTPATCH_CACHE_DIR", str(tmp_path / "my cache"))
    monkeypatch.setattr(_build, "_outcome", _build.load())
    found, _ = findings(capsys)
    assert found["cache"]["value"] == "~/my cache"


# ------------------------------------------------------------------------------------------------------------- build


def test_build_with_a_library_in_the_cache(capsys):
    status, out, err = command(capsys, "build")
    assert (status, err) == (0, "")
    assert out.startswith("the native library is ready: ")
    assert Path(out.partition(": ")[2].strip()).exists()


def test_a_failing_build(tmp_path):
    cache = tmp_path / "cache"
    done = cli("build", folder=tmp_path, CXX="/nonexistent/c++", FASTPATCH_CACHE_DIR=str(cache))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("fastpatch: CXX='/nonexistent/c++' wasn't found; install one")
    compiler = tmp_path / "c++"
    version = 'case "$1" in --version|-dumpmachine) echo "g"; exit;; esac'
    compiler.write_text(f'#!/bin/sh\n{version}\necho "x: error: y"; exit 1\n')
    compiler.chmod(0o700)
    done = cli("build", "--force", folder=tmp_path, CXX=str(compiler), FASTPATCH_CACHE_DIR=str(cache), MAX_JOBS="1")
    assert done.returncode == 1
    assert "compiling the native library failed" in done.stderr
    assert "Traceback" not in done.stderr


def test_force_builds_though_the_library_is_there(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(_build, "_build", lambda sources, entry, compiler, present: asked.append(present))
    assert command(capsys, "build", "--force")[0] == 0
    [present] = asked  # which says that this one won't do
    assert present.path.exists()


def test_debug_builds_the_one_for_gdb(capsys, monkeypatch):
    monkeypatch.setenv("FASTPATCH_DEBUG", "0")  # which gives way
    asked = []
    monkeypatch.setattr(_build, "_build", lambda sources, entry, compiler, present: asked.append(entry))
    plain = _cache.Entry.of(_build.SOURCES, _cache.cache_dir())
    status, out, _ = command(capsys, "build", "--debug", "--force")
    assert status == 0
    assert out.endswith(f"\nto use it: FASTPATCH_DEBUG=1 gdb -ex run --args {sys.executable} train.py\n")
    [entry] = asked
    assert entry == _cache.Entry.of(_build.SOURCES, _cache.cache_dir()) != plain
    assert "FASTPATCH_DEBUG" in entry.parts["flags"]


def test_nothing_is_built_when_switched_off(capsys, monkeypatch, fresh):
    monkeypatch.setenv("FASTPATCH", "0")
    status, out, err = command(capsys, "build")
    assert (status, out) == (1, "")
    assert err == "FASTPATCH=0 switches everything off: nothing was built\n"


# ------------------------------------------------------------------------------------------------------------- cache


def make_entry(cache, name, **manifest):
    folder = cache / name
    folder.mkdir(parents=True)
    (folder / "native-01234567.so").write_bytes(b"x" * 2**20)
    (folder / "native-01234567.json").write_text(json.dumps(manifest))
    (folder / "build.lock").touch()
    return folder


@pytest.fixture
def filled(fresh):
    manifest = {"torch": "2.11.0", "python_abi": "cp", "built_at": "2026-01-02T03:04"}
    old = make_entry(fresh, "torch-2.11.0-cp-0123456789abcdef", **manifest)
    current = _cache.Entry.of(_build.SOURCES, fresh).folder
    make_entry(fresh, current.name, torch=torch.__version__, built_at="2026-05-06T07:08:09+00:00")
    unfinished = fresh / "torch-2.12.0-cp-00000000000000ff"
    (unfinished / "build-abcd_234" / "cpu").mkdir(parents=True)
    (unfinished / "build-abcd_234" / "cpu" / "x.o").touch()
    debugged = {"torch": "2.11.0", "python_abi": "cp", "built_at": "2026-02-03T04:05", "debug": True}
    make_entry(fresh, "torch-2.11.0-cp-00000000000000fe", **debugged)
    (fresh / "native-01234567.so").touch()
    (fresh / "torch-notes.txt").touch()
    (fresh / "other").mkdir()
    (fresh / "torch-2.13.0-cp-0123456789abcdee").symlink_to(old)
    return fresh


def test_cache_list(capsys, filled):
    status, out, _ = command(capsys, "cache", "list")
    where, _, *rows, debugged, mark = out.splitlines()
    assert (status, where) == (0, str(filled))
    assert (debugged, mark) == ("g is for gdb: FASTPATCH_DEBUG=1", "* is what this environment uses")
    assert sorted(row.split()[:-1] for row in rows) == [
        ["*", torch.__version__, "?", "1.0", "2026-05-06", "07:08"],
        ["2.11.0", "cp", "1.0", "2026-01-02", "03:04"],
        ["?", "?", "0.0", "unfinished"],
        ["g", "2.11.0", "cp", "1.0", "2026-02-03", "04:05"],
    ]
    assert max(map(len, out.splitlines()[1:])) <= 80


@pytest.mark.parametrize("action", ["list", "clear"])
def test_cache_under_a_bad_variable(capsys, filled, monkeypatch, action):
    monkeypatch.setenv("FASTPATCH_DEBUG", "yes")
    status, out, err = command(capsys, "cache", action)
    assert (status, out) == (1, "")
    assert err.startswith("fastpatch: FASTPATCH_DEBUG='yes' must be 0 or 1")


def test_cache_list_of_nothing(capsys, fresh):
    assert command(capsys, "cache", "list") == (0, f"{fresh}\nnothing has been compiled\n", "")
    make_entry(fresh, "torch-2.11.0-cp-0123456789abcdef", torch="2.11.0")
    assert command(capsys, "cache", "list")[1].endswith("none of them is for this environment\n")


def test_cache_list_counts_reproductions_and_clear_leaves_them(capsys, fresh):
    (fresh / "differences").mkdir(parents=True)
    for name in ("sgd-1.py", "sgd-1.pt", "sgd-2.py", "sgd-2.pt"):
        (fresh / "differences" / name).touch()
    told = f"2 differences from stock, to report: {fresh / 'differences'}"
    assert command(capsys, "cache", "list")[1].splitlines() == [str(fresh), told, "nothing has been compiled"]
    assert command(capsys, "cache", "clear")[0] == 0
    assert len(list((fresh / "differences").iterdir())) == 4


def test_cache_clear_removes_what_is_ours_and_nothing_else(capsys, filled):
    mixed = make_entry(filled, "torch-2.10.0-cp-0123456789abcdef", torch="2.10.0")
    for name in ("notes.txt", "native-01234567.so.bak", "native-x.json"):
        (mixed / name).touch()
    (mixed / "build-by-hand").mkdir()
    (mixed / "native-89abcdef.so").symlink_to(filled / "torch-notes.txt")
    status, out, err = command(capsys, "cache", "clear")
    assert (status, out, err) == (0, "4.0 MiB were removed\n", "")
    left = sorted(str(path.relative_to(filled)) for path in filled.rglob("*"))
    assert left == [
        "native-01234567.so",
        "other",
        mixed.name,
        f"{mixed.name}/build-by-hand",
        *(f"{mixed.name}/{name}" for name in ("native-01234567.so.bak", "native-x.json", "notes.txt")),
        "torch-2.13.0-cp-0123456789abcdee",
        "torch-notes.txt",
    ]
    assert command(capsys, "cache", "clear")[1] == "0.0 MiB were removed\n"


def test_cache_clear_leaves_a_build_alone(capsys, filled):
    entry = filled / "torch-2.12.0-cp-00000000000000ff"
    with filelock.FileLock(entry / "build.lock"):
        status, _, err = command(capsys, "cache", "clear")
        assert status == 1
        assert err == f"{entry} is left alone, as a process is building in it\n"
        assert (entry / "build-abcd_234" / "cpu" / "x.o").exists()
    assert command(capsys, "cache", "clear")[0] == 0
    assert not entry.exists()


# ------------------------------------------------------------------------------------------------------------- bench


def test_bench(capsys, monkeypatch):
    monkeypatch.setattr(_bench, "_SECONDS", 0.0)
    status, out, err = command(capsys, "bench")
    assert (status, err) == (0, "")
    facts, header, *rows, last = out.splitlines()
    assert torch.__version__ in facts
    assert header.split() == ["stock", "fastpatch", "ratio"]
    assert len(rows) == 9
    for row in rows:
        stock, ours, ratio = map(float, re.fullmatch(r".+? +([\d.]+) us +([\d.]+) us +([\d.]+)", row).groups())
        assert ratio == pytest.approx(stock / ours, rel=0.1, abs=0.1)
    assert str(_bench._ROUNDS) in last
    assert not fastpatch.is_enabled()
    # Each of these calls was served in one half of the rounds, and by stock in the other, which isn't counted.
    counts = fastpatch.report().to_dict()
    assert {name: bool(counts[name]["fast"]) for name in ALL} == dict.fromkeys(ALL, True)
    assert not any(counts[name]["fallback"] for name in ALL)


def test_bench_of_what_is_on_alone(capsys, monkeypatch):
    monkeypatch.setattr(_bench, "_SECONDS", 0.0)
    monkeypatch.setenv("FASTPATCH_ONLY", "huber_loss")
    status, out, _ = command(capsys, "bench")
    assert status == 0
    assert [line.split(",")[0] for line in out.splitlines()[2:-1]] == ["Huber"] * 3
    monkeypatch.setenv("FASTPATCH", "0")
    status, out, err = command(capsys, "bench")
    assert (status, err) == (1, "every target is switched off\n")


# ----------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "words", [["doctor", "--jsn"], ["build", "--forse"], ["cache", "empty"], ["cache"], ["bench", "now"]], ids=" ".join
)
def test_mistakes(capsys, words):
    with pytest.raises(SystemExit) as caught:
        command(capsys, *words)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: python -m fastpatch {words[0]}")
    assert words[-1] in err


@pytest.mark.parametrize("words", [["build"], ["cache", "list"], ["bench"], ["selftest"]], ids=" ".join)
def test_a_bad_variable(capsys, monkeypatch, words):
    monkeypatch.setenv("FASTPATCH_STRICT", "so so")
    with pytest.raises(_options.Mistake, match="FASTPATCH_STRICT='so so' must be 0 or 1"):
        command(capsys, *words)


def test_every_command_has_a_description(capsys):
    for name in _options.COMMANDS:
        with pytest.raises(SystemExit):
            _commands.command(name, ["--help"])
        assert f"python -m fastpatch {name}" in capsys.readouterr().out
