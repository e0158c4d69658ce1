"""A program that is run by `python -m fastpatch` sees what it would see under `python`. None of them imports torch."""

import py_compile
import signal
import sys
import zipfile
from pathlib import Path

import pytest
from _cli_helpers import cli, python

# All that a program can tell of how it was started. Addresses differ.
FACTS = """
import re, sys
import __main__
facts = {name: value for name, value in globals().items() if name not in ("sys", "re", "__builtins__", "__main__")}
print(re.sub("0x[0-9a-f]+", "0x", repr(sorted(facts.items(), key=str))))
print(sys.argv, sys.path[:2], type(__builtins__), vars(__main__) is globals(), __main__ is sys.modules["__main__"])
print("torch" in sys.modules, "unittest" in sys.modules)
class Local: pass
import pickle
print(type(pickle.loads(pickle.dumps(Local()))) is Local)
"""
CHAINED = """
def fail():
    raise KeyError("the first")
try:
    fail()
except KeyError as error:
    raise ValueError("the second") from error
"""
FILES = {
    "facts.py": FACTS,
    "in a folder/facts.py": FACTS,
    "package/__init__.py": "",
    "package/__main__.py": FACTS,
    "package/module.py": FACTS,
    "package/broken.py": CHAINED,
    "folder/__main__.py": FACTS,
    "failing folder/__main__.py": CHAINED,
    "empty/nothing": "",
    "chained.py": CHAINED,
    "syntax.py": "x = (\n",
    "doctor": "import sys; print('a script named like a sub-command', sys.argv)",
    "text.py": "import sys; sys.exit('a text')",
    "seven.py": "import sys; sys.exit(7)",
    "nothing.py": "raise SystemExit",
    "os_exit.py": "import os; os._exit(9)",
    "latin.py": b"# coding: latin-1\nprint('\xe4')\n",
    "future.py": "def f(x: 1): ...\nprint(f.__annotations__)",  # ours has `from __future__ import annotations`
    "hook.py": "import sys\nsys.excepthook = lambda *error: print('hook', error[:2], error[2].tb_lineno)\n1 / 0",
    "atexit.py": "import atexit, __main__\nx = 3\natexit.register(lambda: print('end', __main__.x))",
    "thread.py": "import threading, time\nthreading.Timer(0.2, lambda: print('later', x)).start()\nx = 1",
    "error_at_exit.py": "import atexit\natexit.register(exit, 3)",
    "interrupt.py": "def f():\n    raise KeyboardInterrupt\nf()",
    "ctrl_c.py": "import signal\ndef f(): signal.raise_signal(signal.SIGINT)\nf()",
    "broken/torch/__init__.py": "def f():\n    raise OSError('no libcudart')\nf()",
    "broken/imports_torch.py": "import torch",
    "broken/catches.py": "try:\n    import torch\nexcept OSError as error:\n    print(error)\nimport torch",
    "missing/torch/__init__.py": "import no_such_module",
    "missing/imports_torch.py": "import torch",
    "group.py": "import pdb, sys\ntry:\n    1 / 0\nfinally:\n    print(sys.exc_info()[2].tb_next)",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", FACTS)
    (folder / "link.py").symlink_to("in a folder/facts.py")
    py_compile.compile(str(folder / "facts.py"), str(folder / "compiled.pyc"))
    return folder


PROGRAMS = (
    ["facts.py"], ["facts.py", "-m", "--report", "x"], ["./facts.py", "--", "y"], ["in a folder/facts.py"], ["link.py"],
    ["compiled.pyc"], ["folder", "z"], ["./folder"], ["archive.zip", "-c"], ["failing folder"], ["empty"],
    ["-m", "package", "a"], ["-m", "package.module", "-m", "b"], ["-mpackage.module"], ["-m", "package.broken"],
    ["-m", "no_such_module"], ["-m", "package.no_such_module"], ["-m", "no_such_package.module"],
    ["-c", FACTS, "c", "-d"], ["-c", CHAINED], ["-c", "x = ("], ["-cprint(1)"], ["-", "e"],
    ["chained.py"], ["syntax.py"], ["text.py"], ["seven.py"], ["nothing.py"], ["os_exit.py"], ["no such.py"],
    ["latin.py"], ["future.py"], ["hook.py"], ["atexit.py"], ["thread.py"], ["error_at_exit.py"], ["interrupt.py"],
    ["group.py"], ["./doctor", "f"], ["broken/imports_torch.py"], ["broken/catches.py"], ["missing/imports_torch.py"],
    ["ctrl_c.py"],
)  # fmt: skip


@pytest.mark.parametrize("arguments", PROGRAMS, ids=lambda arguments: " ".join(arguments)[:30].split("\n")[0])
def test_the_same_as_python(folder, arguments):
    stdin = FACTS + CHAINED if arguments[0] == "-" else ""
    stock, ours = python(*arguments, folder=folder, stdin=stdin), cli(*arguments, folder=folder, stdin=stdin)
    assert (ours.returncode, ours.stdout) == (stock.returncode, stock.stdout)
    # Both name the interpreter as they were started; the address of a function tells nothing.
    assert ours.stderr == stock.stderr
    assert (stock.stdout or stock.stderr or stock.returncode) != ""  # something was compared


@pytest.mark.parametrize("flags", [["-P"], ["-I"], ["-O"], ["-X", "utf8", "-W", "error"]], ids=" ".join)
def test_under_flags_of_the_interpreter(folder, flags):
    if flags == ["-P"] and sys.version_info < (3, 11):
        pytest.skip("-P came with Python 3.11")
    code = (  # -I ignores PYTHONPATH, and -P with it or -m the current folder
        "import sys; sys.path.append(sys.argv.pop(1)); import fastpatch._cli; sys.path.pop(); fastpatch._cli.main()"
    )
    root = str(Path(cli.__globals__["fastpatch"].__file__).parents[1])
    ours = python(*flags, "-c", code, root, "facts.py", "g", folder=folder)
    stock = python(*flags, "facts.py", "g", folder=folder)
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == stock.stdout


def test_a_script_named_like_a_sub_command_after_two_dashes(folder):
    done = cli("--", "doctor", "--report", folder=folder)
    assert done.stdout == "a script named like a sub-command ['doctor', '--report']\n"


def test_ctrl_c_ends_it_as_it_ends_python(folder):
    done = cli("ctrl_c.py", folder=folder)  # which is compared with python above
    assert done.returncode == -signal.SIGINT
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "fastpatch" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["no program to run was given", "usage: python -m fastpatch"]),
        (["--strict"], ["no program to run was given"]),
        (["--onyl", "sgd", "facts.py"], ["unknown option '--onyl'", "--only", "--exclude"]),
        (["--strict=yes", "facts.py"], ["unknown option '--strict=yes'", "--strict"]),
        (["--only", "sdg", "facts.py"], ["--only 'sdg'", "unknown target 'sdg'", "'smooth_l1_loss'", "'sgd'"]),
        (["--exclude=sgd,,", "facts.py"], ["--exclude 'sgd,,'", "unknown target ''"]),
        (["--exclude", "sgd,huber_loss,smooth_l1_loss", "facts.py"], ["no target is left", "--exclude", "'sgd'"]),
        (["--only=sgd", "--exclude=sgd", "facts.py"], ["no target is left", "--only=sgd --exclude=sgd"]),
        (["--only"], ["--only must be followed by names of targets"]),
        (["--verify", "1.5", "facts.py"], ["--verify '1.5' must be a number from 0 to 1"]),
        (["--verify=often", "facts.py"], ["--verify 'often' must be a number from 0 to 1"]),
        (["--verify"], ["--verify must be followed by a share of calls"]),
        (["-m"], ["-m must be followed by a module"]),
        (["--strict", "doctor"], ["'doctor' is a sub-command", "--strict", "./doctor", "-- doctor"]),
        (["--report", "no_such/report.json", "facts.py"], ["'no_such/report.json'", "there is no folder"]),
        (["--report=folder", "facts.py"], ["'folder'", "it is a folder"]),
        (["--report=", "facts.py"], ["''", "it has no name"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_a_mistake_is_quoted_and_nothing_runs(folder, arguments, words):
    done = cli(*arguments, folder=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fastpatch: ")
    assert [word for word in words if word not in done.stderr] == []
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "valid"),
    [
        ("FASTPATCH", "off", "0 (everything off) or 1"),
        ("FASTPATCH_ONLY", "sgd;huber_loss", "'huber_loss'"),
        ("FASTPATCH_STRICT", "yes", "0 or 1"),
        ("FASTPATCH_VERIFY", "2", "a number from 0 to 1"),
        ("FASTPATCH_LOG", "loud", "debug, info, warning, error"),
    ],
)
def test_a_bad_variable_is_quoted_and_nothing_runs(folder, variable, value, valid):
    done = cli("facts.py", folder=folder, **{variable: value})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"fastpatch: {variable}={value!r}")
    assert valid in done.stderr


def test_help_and_version(folder):
    import fastpatch

    for flag in ("-h", "--help"):
        done = cli(flag, folder=folder)
        assert done.returncode == 0
        assert done.stdout.startswith("usage: python -m fastpatch [options] script.py")
        assert all(name in done.stdout for name in fastpatch.targets())
        assert max(map(len, done.stdout.splitlines())) <= 80
    assert cli("--version", folder=folder).stdout == f"fastpatch {fastpatch.__version__}\n"


def test_the_report_of_a_program_without_torch(folder):
    done = cli("--report", "seven.py", folder=folder)
    assert done.returncode == 7
    assert "this process never imported torch" in done.stderr
    assert "smooth_l1_loss" in done.stderr


def test_a_report_that_cant_be_written_in_the_end_is_said_and_changes_nothing(folder):
    (folder / "gone").mkdir()
    text = "import os, sys; os.rmdir('gone'); sys.exit(5)"
    done = cli("--report", "gone/report.json", "-c", text, folder=folder)
    assert done.returncode == 5
    assert done.stderr.startswith("fastpatch: no report: ")
    assert "gone" in done.stderr
    closed = cli("--report", "-c", "import sys; sys.stderr.close(); sys.exit(6)", folder=folder)
    assert closed.returncode == 6


def test_nothing_is_left_behind(folder):
    assert list(folder.glob("fastpatch-report-*")) == []
