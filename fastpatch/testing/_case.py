"""Case: something that fastpatch may serve, as plain data, which runs and prints itself as a script."""

from __future__ import annotations

import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

import fastpatch

from ._comparison import Comparison, Seen, compare
from ._operands import Operand

# What a case's text may name, and where it comes from.
_IMPORTS = (
    (r"\b(inf|nan)\b", "from math import inf, nan\n"),
    (r"\bnp\.", "import numpy as np"),
    (r"\btorch\.", "import torch"),
    (r"\bF\.", "import torch.nn.functional as F\n"),
    (r"\bfastpatch\.", "import fastpatch"),
)
_HELPERS = ("Operand", "memory", "note")


class Case(ABC):
    """One call, or a few steps: its text is what is run, so that a printed script does what was seen.

    ``str()`` gives that script, for the CPU.
    """

    target: str
    threads: int

    @property
    @abstractmethod
    def kind(self) -> str:
        """Under which name it is counted: the dtype, or "mixed"."""

    @property
    @abstractmethod
    def least_units(self) -> int:
        """How many of what fastpatch counts it has at least."""

    @abstractmethod
    def body(self, device: str) -> list[str]:
        """The statements of a function of ``seen``, into which they put what is to be compared."""

    def source(self, device: str = "cpu") -> str:
        """That function, ``run``, after what it imports."""
        body = textwrap.indent("\n".join(self.body(device)), "    ")
        lines = [line for pattern, line in _IMPORTS if re.search(pattern, body)]
        helpers = [name for name in _HELPERS if re.search(rf"\b{name}\(", body)]
        lines.append(f"from fastpatch.testing import {', '.join([*helpers, 'reproduce'])}")
        return "\n".join([*lines, "", "", "def run(seen):", body, ""])

    def script(self, device: str = "cpu", title: str = "Stock PyTorch and fastpatch") -> str:
        """A Python script that compares stock with fastpatch on this case, and exits with 1 if they differ."""
        versions = f"torch {torch.__version__}, CPU capability {torch.backends.cpu.get_cpu_capability()}"
        return (
            f"# {' '.join(title.split())}\n"
            f"# {versions}, fastpatch {fastpatch.__version__}\n"
            f"{self.source(device)}\n\n"
            f"torch.set_num_threads({self.threads})\n"
            f"reproduce({self.target!r}, run, device={device!r})\n"
        )

    def __str__(self) -> str:
        return self.script()

    def compare(self, device: str = "cpu", *, strict: bool = False) -> Comparison:
        """Runs it with stock and with fastpatch; see ``fastpatch.testing.compare``."""
        names: dict[str, Any] = {}
        exec(compile(self.source(device), f"<{self.target}>", "exec"), names)
        run: Callable[[Seen], None] = names["run"]
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            return compare(self.target, run, device=device, strict=strict)
        finally:
            torch.set_num_threads(before)


def kind_of(operands: list[Operand]) -> str:
    """The dtype of all of them, or "mixed"."""
    dtypes = {str(operand.dtype).removeprefix("torch.") for operand in operands}
    return dtypes.pop() if len(dtypes) == 1 else "mixed"
