"""What is left of a difference for a bug report: a script, and a file of its tensors, in the cache folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from ._cache import cache_dir
from ._version import __version__
from .targets._replay import Replay

_FOLDER = "differences"


def folder() -> Path:
    """Where they lie; perhaps there is no such folder yet."""
    return cache_dir() / _FOLDER


def write(name: str, replay: Replay, found: str, repeats: bool) -> str:
    """Writes them; says where, or why it couldn't."""
    try:
        place = folder()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{os.urandom(2).hex()}"
        torch.save({"tensors": replay.tensors}, place / f"{stem}.pt")
        script = place / f"{stem}.py"
        script.write_text(_script(name, replay, found), encoding="utf-8")
        return f"{script} {'reproduces it' if repeats else 'makes the call again'}"
    except Exception as error:  # a full disk, a folder that may not be written
        return f"No reproduction could be written ({type(error).__name__}: {error})"


def _script(name: str, replay: Replay, found: str) -> str:
    device = next((str(device) for device in replay.devices if device.type == "cuda"), "cpu")
    body = "\n".join(f"    {line}" for line in replay.source())
    return f"""\
# A difference between stock PyTorch and fastpatch: {" ".join(found.split())}
# torch {torch.__version__}, CPU capability {torch.backends.cpu.get_cpu_capability()}, fastpatch {__version__}
import sys
from math import inf, nan
from pathlib import Path

import torch
import torch.nn.functional as F

from fastpatch.testing import reproduce


def run(seen):
    tensors = torch.load(Path(__file__).with_suffix(".pt"))["tensors"]
{body}


torch.set_num_threads({torch.get_num_threads()})
reproduce({name!r}, run, device={device!r})
"""
