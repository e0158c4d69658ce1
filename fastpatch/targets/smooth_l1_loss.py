"""``torch.nn.functional.smooth_l1_loss``, which ``torch.nn.SmoothL1Loss`` calls too."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .._patching import PatchPoint
from ._target import Explanation, Target, bits_differ


def _outer(stock: Any) -> Any:
    from .. import _native

    return _native.smooth_l1_loss_outer(stock)


def _inner(stock: Any) -> Any:
    from .. import _native

    return _native.smooth_l1_loss_inner(stock)


class SmoothL1LossTarget(Target):
    name = "smooth_l1_loss"

    def __init__(self) -> None:
        self._outer = PatchPoint(F, "smooth_l1_loss", _outer, "torch.nn.functional:smooth_l1_loss")
        # Reached by those who took F.smooth_l1_loss before it was patched.
        self._inner = PatchPoint(
            torch._C._nn, "smooth_l1_loss", _inner, "torch._C._nn:smooth_l1_loss", "aten::smooth_l1_loss"
        )

    @property
    def points(self) -> tuple[PatchPoint, ...]:
        return self._outer, self._inner

    def prepare(self) -> None:
        from .. import _native

        one = torch.ones(1, dtype=torch.float32, device="cpu", requires_grad=True)
        # The operator itself, past every patch point.
        grad_fn = torch.ops.aten.smooth_l1_loss.default(one, one.detach()).grad_fn
        _native.smooth_l1_loss_register_node(type(grad_fn))

    def prove(self) -> str | None:
        from .. import _native

        ours = _native.smooth_l1_loss_inner(self._inner.stock)
        _native.set_live(ours, True)
        for size in (1, 3, 7, 8, 17, 64, 531):
            for reduction in (0, 1, 2):
                for beta in (1.0, 0.3):
                    difference = self._difference(ours, size, reduction, beta)
                    if difference:
                        return f"{difference} of {size} elements, reduction {reduction}, beta {beta}"
        return None

    def _difference(self, ours: Any, size: int, reduction: int, beta: float) -> str | None:
        target = torch.linspace(-0.7, 0.9, size, dtype=torch.float32, device="cpu")
        inputs = [(target * -1.37 + 0.11).requires_grad_() for _ in range(2)]
        losses = [f(x, target, reduction, beta) for f, x in zip((self._stock, ours), inputs, strict=True)]
        if bits_differ(*losses):
            return "the loss"
        for loss in losses:
            # Not loss.backward(gradient): that imports sympy, which takes a second.
            (loss * (loss.detach() + 0.37)).sum().backward()
        return "the gradient" if bits_differ(*(x.grad for x in inputs)) else None

    @staticmethod
    def _stock(input: torch.Tensor, target: torch.Tensor, reduction: int, beta: float) -> torch.Tensor:
        loss: torch.Tensor = torch.ops.aten.smooth_l1_loss.default(input, target, reduction, beta)
        return loss

    def owns(self, fn: Any) -> bool:
        # A proxy equals what it replaces, so this holds for both and whatever is patched.
        return isinstance(fn, torch.nn.SmoothL1Loss) or any(fn == point.stock for point in self.points)

    def explain(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        from .. import _native

        if isinstance(fn, torch.nn.SmoothL1Loss):
            kwargs = {"reduction": fn.reduction, "beta": fn.beta, **kwargs}
            return self.explanation(_native.smooth_l1_loss_explain(*args, **kwargs))
        if fn == self._inner.stock:
            return self.explanation(_native.smooth_l1_loss_explain_inner(*args, **kwargs))
        return self.explanation(_native.smooth_l1_loss_explain(*args, **kwargs))


TARGET = SmoothL1LossTarget()
