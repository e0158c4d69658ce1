"""Modules as in ``torch.nn``, served by fastpatch without ``enable()``: for code that wants nothing patched.

On the first call the native library is loaded, or built if the cache has none. What can't be served goes to PyTorch.
"""

from __future__ import annotations

import torch

from . import functional

__all__ = ["HuberLoss", "SmoothL1Loss", "functional"]


class SmoothL1Loss(torch.nn.SmoothL1Loss):
    """``torch.nn.SmoothL1Loss``, with the same parameters, results, gradients, warnings and errors.

    Example:
        >>> criterion = fastpatch.nn.SmoothL1Loss(beta=0.5)
        >>> criterion(torch.tensor([0.0, 2.0]), torch.zeros(2))
        tensor(0.8750)
    """

    is_fastpatch_explicit = True

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss: see ``torch.nn.SmoothL1Loss`` for shapes."""
        return functional.smooth_l1_loss(input, target, reduction=self.reduction, beta=self.beta)


class HuberLoss(torch.nn.HuberLoss):
    """``torch.nn.HuberLoss``, with the same parameters, results, gradients, warnings and errors.

    Example:
        >>> criterion = fastpatch.nn.HuberLoss(delta=0.5)
        >>> criterion(torch.tensor([0.0, 2.0]), torch.zeros(2))
        tensor(0.4375)
    """

    is_fastpatch_explicit = True

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss: see ``torch.nn.HuberLoss`` for shapes."""
        return functional.huber_loss(input, target, reduction=self.reduction, delta=self.delta)
