"""The equivalence suite as a command; what it says of wrong arguments, and without hypothesis."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _planted import planted
from _scripts import in_a_process

import fastpatch
from fastpatch.testing import main as selftest
from fastpatch.testing import run

# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"device": "cuda:99"}, ValueError, r"no such device 'cuda:99'; devices are 'cpu'"),
        ({"device": "gpu"}, ValueError, r"no such device 'gpu'; devices are 'cpu'"),
        ({"device": torch.device("meta")}, ValueError, r"no such device device\(type='meta'\); devices are 'cpu'"),
        ({"targets": ["sdg"]}, ValueError, r"unknown target 'sdg'; targets are 'smooth_l1_loss', 'huber_loss', 'sgd'"),
        ({"targets": "sdg"}, ValueError, r"unknown target 'sdg'"),
        ({"targets": [["sgd"]]}, ValueError, r"unknown target \['sgd'\]"),
        ({"targets": None}, TypeError, r"targets must be a sequence of names, not None"),
        ({"examples": 0}, ValueError, r"examples must be at least 1, not 0"),
        ({"examples": 2.5}, TypeError, r"examples must be an int of at least 1, not 2.5"),
        ({"examples": True}, TypeError, r"examples must be an int of at least 1, not True"),
        ({"seed": -1}, ValueError, r"seed must be at least 0, not -1"),
        ({"seed": "1"}, TypeError, r"seed must be an int of at least 0, not '1'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"fastpatch.testing.run: {text}"):
        run(**arguments)


def test_one_name_is_taken_as_it_is() -> None:
    assert {row.target for row in run(examples=1, targets="sgd").rows} == {"sgd"}


def test_a_target_that_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastpatch, "is_enabled", lambda name: name != "sgd")
    with pytest.raises(RuntimeError, match=r"fastpatch.testing.run: 'sgd' can't be turned on here"):
        run(examples=1)


# ------------------------------------------------------------------------------------------------------ command line


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "outcome.json"
    options = ["--examples", "5", "--target", "sgd", "huber_loss", "--seed", "9", "--json", str(file)]
    assert selftest(options) == 0
    shown = capsys.readouterr()
    assert "10 compared in" in shown.out
    assert shown.err == ""  # no terminal, no progress
    assert json.loads(file.read_text())["seed"] == 9


def test_the_command_line_tells_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    with planted("huber_loss"):
        assert selftest(["--examples", "150", "--target", "huber_loss", "--seed", "1"]) == 1
    shown = capsys.readouterr().out
    assert "huber_loss differed." in shown
    assert "reproduce('huber_loss', run, device='cpu')" in shown


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--device", "cuda:99"], "no such device 'cuda:99'; devices are 'cpu'"),
        (["--target", "sdg"], "unknown target 'sdg'; targets are 'smooth_l1_loss', 'huber_loss', 'sgd'"),
        (["--examples", "0"], "examples must be at least 1, not 0"),
        (["--examples", "many"], "--examples: invalid int value: 'many'"),
        (["--json", "no/such/folder/x.json"], "--json: 'no/such/folder/x.json' can't be written: there is no folder"),
        (["--json", "."], "--json: '.' can't be written: it is a folder"),
        (["--json", ""], "--json: '' can't be written: it has no name"),
        (["--exmaples", "3"], "unrecognized arguments: --exmaples 3"),
    ],
)
def test_wrong_options(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = selftest(options, prog="selftest")
    except SystemExit as exit:
        status = exit.code  # type: ignore[assignment]
    assert status == 2
    assert f"selftest: {'error: ' if 'usage' in (err := capsys.readouterr().err) else ''}" in err
    assert text in err


def test_progress_is_shown_on_a_terminal_and_wiped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert selftest(["--examples", "1", "--target", "sgd"]) == 0
    assert capsys.readouterr().err == "\rsgd: 0 of 1\r           \r"


def test_as_a_module(tmp_path: Path) -> None:
    done = in_a_process(tmp_path, "-m", "fastpatch", "selftest", "--examples", "2", "--target", "huber_loss")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 compared in" in done.stdout
    assert list(tmp_path.iterdir()) == []  # hypothesis would leave a folder


WITHOUT = """
import sys
sys.modules["hypothesis"] = None
import fastpatch.testing
assert fastpatch.testing.LossCall("huber_loss", *[fastpatch.testing.Operand((3,))] * 2).compare().difference is None
for ask in (lambda: fastpatch.testing.run(), lambda: __import__("fastpatch.testing.strategies")):
    try:
        ask()
    except ModuleNotFoundError as error:
        print(error)
sys.exit(fastpatch.testing.main([]))
"""


def test_without_hypothesis(tmp_path: Path) -> None:
    done = in_a_process(tmp_path, "-c", WITHOUT)
    text = "fastpatch.testing: hypothesis, which draws the calls, is not installed; pip install hypothesis\n"
    assert (done.returncode, done.stdout) == (2, text * 2)
    assert done.stderr == f"python -m fastpatch selftest: {text}"
