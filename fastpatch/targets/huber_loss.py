"""``torch.nn.functional.huber_loss``, which ``torch.nn.HuberLoss`` calls too."""

from __future__ import annotations

import torch

from ._loss import LossTarget

TARGET = LossTarget("huber_loss", torch.nn.HuberLoss, "delta")
