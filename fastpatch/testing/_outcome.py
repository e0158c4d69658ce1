"""Outcome: what the equivalence suite compared, and what differed."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

import fastpatch

from ._case import Case


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


@dataclass(frozen=True)
class Difference:
    """The smallest case of a target that stock PyTorch and fastpatch were seen to treat differently.

    Attributes:
        case: it.
        device: on which it ran.
        text: what differs.
        repeats: does it differ every time? If False, the script may have to be run several times.
    """

    case: Case
    device: str
    text: str
    repeats: bool = True

    @property
    def script(self) -> str:
        """A Python script that reproduces it, with exit status 1."""
        return self.case.script(self.device, f"A difference between stock PyTorch and fastpatch: {self.text}")

    def __str__(self) -> str:
        seldom = "" if self.repeats else " It does not differ every time."
        found = textwrap.fill(f"{self.case.target} differs: {self.text}.{seldom}", 80)
        return f"{found}\nThis script reproduces it:\n\n{self.script}"


@dataclass
class Row:
    """What was compared of one kind.

    Attributes:
        target: the target's name.
        kind: the dtype of the tensors, or "mixed".
        compared: how many loss calls with their backward, or SGDs of a few steps.
        fast: how many units fastpatch served in them by its counters: loss calls, or parameters that a step updated.
        fallback: how many it left to stock, by reason.
    """

    target: str
    kind: str
    compared: int = 0
    fast: int = 0
    fallback: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Outcome:
    """What came of the equivalence suite. ``str()`` is a table within 80 columns, and what differed.

    Attributes:
        device: on which it ran.
        seed: with which it draws the same calls again, with this version of hypothesis.
        seconds: that it took.
        rows: what was compared, by target and kind.
        differences: at most one for each target.
    """

    device: str
    seed: int
    seconds: float
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]

    @property
    def is_equal(self) -> bool:
        """Did nothing differ?"""
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """All of it in what JSON knows: see ``python -m fastpatch selftest --json``."""
        return {
            "fastpatch": fastpatch.__version__,
            "torch": torch.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "device": self.device,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "rows": [
                {name: getattr(row, name) for name in ("target", "kind", "compared", "fast")}
                | {"fallback": dict(row.fallback)}
                for row in self.rows
            ],
            "differences": [
                {"target": d.case.target, "text": d.text, "repeats": d.repeats, "script": d.script}
                for d in self.differences
            ],
        }

    def __str__(self) -> str:
        lines = [
            f"fastpatch {fastpatch.__version__} and stock torch {torch.__version__} on {self.device}, "
            f"CPU capability {torch.backends.cpu.get_cpu_capability()}",
            "fast and fallback count loss calls, and parameters that a step updated",
            "",
            f"{'target':<16} {'dtype':<10} {'compared':>10} {'fast':>10} {'fallback':>10}",
        ]
        for target in dict.fromkeys(row.target for row in self.rows):
            lines += self._lines_of(target)
        total = sum(row.compared for row in self.rows)
        verdict = "none differed" if self.is_equal else f"{_listed(d.case.target for d in self.differences)} differed"
        lines += ["", f"{total} compared in {self.seconds:.0f} s with seed {self.seed}: {verdict}."]
        return "\n\n".join(["\n".join(lines), *map(str, self.differences)])

    def _lines_of(self, target: str) -> list[str]:
        rows = [row for row in self.rows if row.target == target]
        lines = [
            f"{r.target:<16} {r.kind:<10} {r.compared:>10} {r.fast:>10} {sum(r.fallback.values()):>10}" for r in rows
        ]
        reasons: Counter[str] = sum((row.fallback for row in rows), Counter())
        if reasons:
            listed = _listed(f"{code} {count}" for code, count in reasons.most_common())
            indent = " " * 17
            lines += textwrap.wrap(f"to stock: {listed}", 80, initial_indent=indent, subsequent_indent=indent)
        if not any(row.fast for row in rows):
            lines.append(f"{'':<16} nothing was served, so nothing is proved of {target} here")
        return lines
