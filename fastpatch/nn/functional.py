"""Functions as in ``torch.nn.functional``, served by fastpatch without ``enable()``: see ``fastpatch.nn``.

>>> from fastpatch.nn.functional import smooth_l1_loss
>>> smooth_l1_loss(torch.tensor([0.0, 2.0]), torch.zeros(2), beta=0.5)
tensor(0.8750)
"""

from __future__ import annotations

import typing

from .._explicit import explicit
from ..targets import TARGETS
from ..targets._target import native

__all__ = ["huber_loss", "smooth_l1_loss"]

if typing.TYPE_CHECKING:
    from torch.nn.functional import huber_loss, smooth_l1_loss
else:

    def _loss(name):
        stock = TARGETS[name].points[0].stock
        return explicit(name, stock, native("loss_outer", name), f"{__name__}:{name}")

    smooth_l1_loss = _loss("smooth_l1_loss")
    huber_loss = _loss("huber_loss")
