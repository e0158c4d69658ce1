"""The targets that fastpatch knows, in the order in which they are listed everywhere."""

from __future__ import annotations

from . import huber_loss, sgd, smooth_l1_loss
from ._explanation import Explanation, Guard
from ._target import DTYPES, Target

TARGETS: dict[str, Target] = {target.name: target for target in (smooth_l1_loss.TARGET, huber_loss.TARGET, sgd.TARGET)}

__all__ = ["DTYPES", "TARGETS", "Explanation", "Guard", "Target"]
