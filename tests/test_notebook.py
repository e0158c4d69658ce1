"""%load_ext fastpatch and %%fastpatch, in an IPython shell of its own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _scripts import run_text

pytest.importorskip("IPython", reason="IPython isn't installed")

TEXT = """
import contextlib, io, json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell()
outcomes = []
for cell in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        result = shell.run_cell(cell)
    error = result.error_before_exec or result.error_in_exec
    outcomes.append({"shown": out.getvalue(), "error": None if error is None else f"{type(error).__name__}: {error}"})
json.dump(outcomes, open("outcomes.json", "w"))
"""
SETUP = "import torch, torch.nn.functional as F, fastpatch\nx = torch.ones(3)\nstock = F.smooth_l1_loss"


def run(folder: Path, *cells: str) -> list[dict[str, Any]]:
    environment = {"IPYTHONDIR": str(folder / "ipython"), "NO_COLOR": "1"}
    run_text(TEXT, json.dumps(cells), folder=folder, **environment)
    outcomes: list[dict[str, Any]] = json.loads((folder / "outcomes.json").read_text())
    return outcomes


def test_an_extension(tmp_path: Path) -> None:
    *_, on, loss, off, gone = run(
        tmp_path,
        SETUP,
        "%load_ext fastpatch",
        "print(fastpatch.is_enabled())",
        "F.smooth_l1_loss(x, x); print(fastpatch.report().to_dict()['smooth_l1_loss']['fast'])",
        "%unload_ext fastpatch\nprint(fastpatch.is_enabled(), F.smooth_l1_loss is stock)",
        "%%fastpatch\npass",
    )
    assert (on["shown"].strip(), loss["shown"].split()[-1]) == ("True", "1")
    assert off["shown"].split()[-2:] == ["False", "True"]
    assert gone["error"] is not None or "not found" in gone["shown"]


def test_a_cell(tmp_path: Path) -> None:
    *_, cell, after, only, strict, wrong = run(
        tmp_path,
        SETUP,
        "%load_ext fastpatch\nfastpatch.disable()",
        "%%fastpatch\nprint(fastpatch.is_enabled())\ny = F.smooth_l1_loss(x, x)\nF.smooth_l1_loss(x, x.double())",
        "print(fastpatch.is_enabled(), y)",
        "%%fastpatch sgd\nprint(fastpatch.is_enabled('sgd'), fastpatch.is_enabled('smooth_l1_loss'))",
        "%%fastpatch --strict\nF.smooth_l1_loss(x, x.double())",
        "%%fastpatch sdg\npass",
    )
    assert "True" in cell["shown"]
    assert "smooth_l1_loss              1            1" in cell["shown"] and "dtype:" in cell["shown"]
    assert after["shown"].split()[:2] == ["False", "tensor(0.)"]
    assert "True False" in only["shown"]
    assert "FallbackError" in strict["shown"]
    assert wrong["error"] == (
        "ValueError: %%fastpatch: unknown word 'sdg'; valid are 'smooth_l1_loss', 'huber_loss', 'sgd', '--strict'"
    )
