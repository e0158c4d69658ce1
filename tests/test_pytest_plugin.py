"""pytest --fastpatch, over a small suite in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from _scripts import environment_of_scripts

SUITE = """
import torch, torch.nn.functional as F, fastpatch

def test_served():
    F.smooth_l1_loss(torch.ones(3), torch.zeros(3))

def test_refused():
    F.smooth_l1_loss(torch.ones(3), torch.zeros(3).double())

def test_on():
    assert fastpatch.is_enabled()
"""


def suite(folder: Path, *options: str, text: str = SUITE) -> subprocess.CompletedProcess[str]:
    (folder / "test_theirs.py").write_text(text)
    plugin = ("-p", "fastpatch._pytest_plugin") if not is_installed() else ()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, *options]
    return subprocess.run(
        command, cwd=folder, env=environment_of_scripts(), capture_output=True, text=True, timeout=120, check=False
    )


def is_installed() -> bool:
    from importlib.metadata import entry_points

    return any(point.value == "fastpatch._pytest_plugin" for point in entry_points(group="pytest11"))


def test_a_suite_runs_patched_and_reports(tmp_path: Path) -> None:
    done = suite(tmp_path, "--fastpatch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smooth_l1_loss              1            1" in done.stdout
    assert "dtype:" in done.stdout and "test_theirs.py:8" in done.stdout


def test_strict(tmp_path: Path) -> None:
    done = suite(tmp_path, "--fastpatch-strict")
    assert done.returncode == 1
    assert "FAILED test_theirs.py::test_refused - fastpatch.FallbackError" in done.stdout.replace("_errors.", "")
    assert "1 failed, 2 passed" in done.stdout


def test_unasked_it_does_nothing(tmp_path: Path) -> None:
    text = "import sys\n\ndef test_nothing():\n    assert 'torch' not in sys.modules\n"
    done = suite(tmp_path, text=text)
    assert done.returncode == 0, done.stdout
    assert "smooth_l1_loss" not in done.stdout


def test_workers_of_xdist_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist isn't installed")
    done = suite(tmp_path, "--fastpatch", "-n", "2")
    assert "smooth_l1_loss              1            1" in done.stdout
