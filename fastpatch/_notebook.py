"""IPython and Jupyter: ``%load_ext fastpatch`` turns everything on, ``%%fastpatch`` a cell, and shows its report."""

from __future__ import annotations

from typing import Any

from ._counts import Report
from ._report import report
from ._scope import enabled
from ._switch import NAMES, disable, enable

_STRICT = "--strict"


def load(shell: Any) -> None:
    """Turns fastpatch on, and gives the shell the cell magic."""
    enable()

    def fastpatch(line: str, cell: str) -> Report:
        """Runs the cell with fastpatch on, and shows its report: %%fastpatch [TARGET ...] [--strict]

        Without a target all are on. --strict: a call that can't be served raises fastpatch.FallbackError.
        """
        return _run(shell, line.split(), cell)

    shell.register_magic_function(fastpatch, magic_kind="cell", magic_name="fastpatch")


def unload(shell: Any) -> None:
    """Turns fastpatch off, and takes the magic away."""
    disable()
    shell.magics_manager.magics["cell"].pop("fastpatch", None)


def _run(shell: Any, words: list[str], cell: str) -> Report:
    targets = [word for word in words if word != _STRICT]
    if unknown := [word for word in targets if word not in NAMES]:
        valid = ", ".join(map(repr, (*NAMES, _STRICT)))
        raise ValueError(f"%%fastpatch: unknown word {unknown[0]!r}; valid are {valid}")
    before = report()
    with enabled(*targets, strict=_STRICT in words):
        shell.run_cell(cell)  # which shows what the cell shows, errors too
    return report().since(before)  # which is shown, as a cell's last value is
