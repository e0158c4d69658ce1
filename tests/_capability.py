"""Running tests again at another CPU capability. ATen picks its capability once per process, so another one has to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

CHOSEN = "ATEN_CPU_CAPABILITY" in os.environ
outer_run_only = pytest.mark.skipif(CHOSEN, reason="is the inner run, or somebody else's choice")


def assert_capability_is_the_one_asked_for() -> None:
    """The files that run_at_default() runs prove with this that ATen obeyed."""
    asked = os.environ.get("ATEN_CPU_CAPABILITY")
    if asked is None:
        pytest.skip("ATen chooses")
    assert torch.backends.cpu.get_cpu_capability() == asked.upper()


def run_at_default(files: Sequence[str], chosen: str) -> str:
    """Runs the chosen tests of some files without vector instructions; they must pass. What pytest printed."""
    command = [sys.executable, "-m", "pytest", *files, "-q", "-k", chosen, "-p", "no:cacheprovider"]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
