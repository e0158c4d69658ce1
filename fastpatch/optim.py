"""The optimizer of ``torch.optim`` that fastpatch serves, without ``enable()``: for code that wants nothing patched.

At the first step the native library is loaded, or built if the cache has none. What can't be served goes to PyTorch.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from ._explicit import explicit, rebuilt_step
from .targets import TARGETS
from .targets._target import native

__all__ = ["SGD"]

_sgd = explicit("sgd", TARGETS["sgd"].points[1].stock, native("sgd_inner"), "torch.optim.sgd:sgd")
_step = rebuilt_step(_sgd)
_bare: Any = _step and explicit("sgd", _step, native("sgd_bare_step"), "fastpatch.optim:SGD.step", method=True)


class SGD(torch.optim.SGD):
    """``torch.optim.SGD``, with the same parameters, updates, state, hooks, warnings and errors.

    Its ``state_dict`` is that of ``torch.optim.SGD``.

    Example:
        >>> param = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = fastpatch.optim.SGD([param], lr=0.1, momentum=0.9)
        >>> param.grad = torch.ones(2)
        >>> optimizer.step()
        >>> param.data
        tensor([0.9000, 0.9000])
    """

    is_fastpatch_explicit = True

    if _bare is not None:
        step = _bare

    def _patch_step_function(self) -> None:
        """torch puts its profiler range and step hooks around ``step`` when the first object is made: so ours goes
        around those, and runs them if there are any."""
        super()._patch_step_function()
        step = vars(SGD).get("step")
        if type(step) is types.FunctionType and _bare is not None and getattr(step, "__wrapped__", None) is _bare:
            SGD.step = explicit("sgd", step, native("sgd_hooked_step"), "fastpatch.optim:SGD.step", method=True)
