"""How far a loss on a GPU may be from the exact one."""

from __future__ import annotations

import torch

from .._difference import bits_differ


def sum_bound(depth: int, dtype: torch.dtype) -> float:
    """The largest relative error of a sum of numbers that are not negative, none of which passes through more than
    ``depth`` additions, of its division and of the cast to dtype (Higham, Accuracy and Stability, 3.1 and 4.2)."""
    u = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    gamma = (depth + 2) * u / (1 - (depth + 2) * u)  # with the rounding of what it is divided by, and the division
    return gamma + torch.finfo(dtype).eps / 2 * (1 + gamma)


def loss_differs(loss: torch.Tensor, values: torch.Tensor, reduction: int) -> bool:
    """Is a loss, of a device, further from that of stock's element-wise values than rounding explains?

    Element-wise it must be equal. A sum is within its bound of the exact one: up to 16 Mi elements no number passes
    through 60 additions, a few of its lane and some 20 levels of trees. An infinity or NaN among the values must be
    one in the loss; besides, the loss may be infinite where the sum, or the loss, is more than its dtype can hold.
    """
    if reduction == 0:
        return bits_differ(values, loss)
    total = values.double().sum()
    exact = total / values.numel() if reduction == 1 else total
    if not total.isfinite():
        return not bool((loss.detach().double() == exact) | (loss.isnan() & exact.isnan()))
    bound, held = sum_bound(60, loss.dtype), torch.finfo(loss.dtype)
    most = torch.finfo(torch.float64 if loss.dtype == torch.float64 else torch.float32).max
    if loss.isposinf() and (total * (1 + bound) >= most or exact * (1 + bound) >= held.max):
        return False
    return not bool((loss.detach().double() - exact).abs() <= bound * exact + held.tiny * held.eps)
