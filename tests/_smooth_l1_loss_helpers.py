"""What the tests of smooth L1 in autograd share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

TARGET = "smooth_l1_loss"
# The larger one is served with the GIL released: whatever calls back into Python has to take it again.
SIZES = pytest.mark.parametrize("n", [5, 20_000])


def operands(n: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    input = torch.linspace(-3, 4, n).sin().mul(2).requires_grad_()
    return input, torch.linspace(-1, 1, n).cos()


def loss(input: torch.Tensor, target: torch.Tensor, reduction: str = "mean", beta: float = 0.7) -> torch.Tensor:
    return F.smooth_l1_loss(input, target, reduction=reduction, beta=beta)


def grads(output: torch.Tensor, *leaves: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
    """Gradients by a grad_output without a pattern; none may be all zero."""
    found = torch.autograd.grad(output, leaves, torch.linspace(0.3, -2, output.numel()).view(output.shape), **how)
    assert all(grad.count_nonzero() for grad in found)
    return found
