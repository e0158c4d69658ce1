"""fastpatch: one line makes an existing PyTorch training script faster and changes nothing else.

>>> import fastpatch
>>> fastpatch.enable()
"""

import importlib as _importlib
import sys as _sys
import types as _types
import typing as _typing

from ._version import __version__

if _typing.TYPE_CHECKING:
    from ._counts import Report
    from ._errors import BuildError, DifferenceWarning, FallbackError, NativeBuildWarning
    from ._report import explain, report, reset_report
    from ._scope import disabled, enabled
    from ._switch import disable, enable, is_enabled, targets
    from .targets import Explanation, Guard

__all__ = [
    "BuildError",
    "DifferenceWarning",
    "Explanation",
    "FallbackError",
    "Guard",
    "NativeBuildWarning",
    "Report",
    "__version__",
    "disable",
    "disabled",
    "enable",
    "enabled",
    "explain",
    "is_enabled",
    "report",
    "reset_report",
    "targets",
]


def load_ipython_extension(shell: _typing.Any) -> None:
    """For ``%load_ext fastpatch``: turns everything on, and defines ``%%fastpatch [TARGET ...] [--strict]``, which
    turns it on for a cell and shows the cell's report under it."""
    from . import _notebook

    _notebook.load(shell)


def unload_ipython_extension(shell: _typing.Any) -> None:
    """For ``%unload_ext fastpatch``: turns everything off."""
    from . import _notebook

    _notebook.unload(shell)


def _load() -> None:
    """Fills in the public names. The first use of one does it, not the import of fastpatch: a script, above all one
    that ``python -m fastpatch`` runs, may still set variables that torch reads when imported (OMP_NUM_THREADS).
    """
    # First: torch's import may turn fastpatch on (_inherit/sitecustomize.py), which needs its modules complete.
    import torch  # noqa: F401

    from . import _errors, _report, _scope, _switch

    for name in __all__:
        for module in (_errors, _report, _scope, _switch):
            if name in vars(module):
                globals()[name] = vars(module)[name]


class _Face(_types.ModuleType):
    """Keeps the package ``targets``, which any import sets here under its name, from hiding the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "targets" or not isinstance(value, _types.ModuleType):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Face

if not _typing.TYPE_CHECKING:  # where it would make every name valid

    def __getattr__(name):
        if name in ("nn", "optim", "testing"):
            return _importlib.import_module(f"{__name__}.{name}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _load()
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *__all__, "nn", "optim", "testing"})
