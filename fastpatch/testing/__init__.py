"""The equivalence suite: calls drawn at random, run by stock PyTorch and by fastpatch, and compared.

    python -m fastpatch selftest [--device cuda] [--examples N]

``run()`` does the same from Python. It and ``fastpatch.testing.strategies`` need hypothesis; all else here doesn't.
"""

import importlib as _importlib
import typing as _typing

from fastpatch._difference import difference

from ._case import Case
from ._comparison import Comparison, compare, memory, note, reproduce
from ._loss_call import LossCall
from ._main import main
from ._operands import Operand
from ._outcome import Difference, Outcome, Row
from ._runner import run
from ._sgd_run import SgdRun, SgdStep, TensorNumber

__all__ = [
    "Case",
    "Comparison",
    "Difference",
    "LossCall",
    "Operand",
    "Outcome",
    "Row",
    "SgdRun",
    "SgdStep",
    "TensorNumber",
    "compare",
    "difference",
    "main",
    "memory",
    "note",
    "reproduce",
    "run",
]

if not _typing.TYPE_CHECKING:  # where it would make every name valid

    def __getattr__(name):
        if name == "strategies":  # hypothesis is imported with it
            return _importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), "strategies"})
