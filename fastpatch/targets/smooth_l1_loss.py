"""``torch.nn.functional.smooth_l1_loss``, which ``torch.nn.SmoothL1Loss`` calls too."""

from __future__ import annotations

from typing import Any

import torch

from ._loss import LossTarget


class SmoothL1LossTarget(LossTarget):
    def _takes_another_builtin(self, threshold: Any) -> bool:
        return bool(threshold == 0.0)  # stock calls torch._C._nn.l1_loss


TARGET = SmoothL1LossTarget("smooth_l1_loss", torch.nn.SmoothL1Loss, "beta")
