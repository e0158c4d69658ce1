"""``torch.nn.functional.smooth_l1_loss``, which ``torch.nn.SmoothL1Loss`` calls too."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import _reduction

from .._patching import PatchPoint
from ._target import Explanation, Target, bits_differ, native


class SmoothL1LossTarget(Target):
    name = "smooth_l1_loss"

    def __init__(self) -> None:
        self._outer = PatchPoint(
            F, "smooth_l1_loss", native("smooth_l1_loss_outer"), "torch.nn.functional:smooth_l1_loss"
        )
        # Reached by those who took F.smooth_l1_loss before it was patched.
        self._inner = PatchPoint(
            torch._C._nn,
            "smooth_l1_loss",
            native("smooth_l1_loss_inner"),
            "torch._C._nn:smooth_l1_loss",
            "aten::smooth_l1_loss",
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
        # Scalars alone, a vector, tails of both, rows of accumulators; both ways to divide by beta.
        for size, beta in ((7, 0.3), (17, 1.0), (531, 0.3)):
            for reduction in (0, 1, 2):
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
        if isinstance(fn, torch.nn.SmoothL1Loss):
            return True
        return any(point.sees(fn) or point.is_original(fn) for point in self.points)

    def explain(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        from .. import _native

        is_module = isinstance(fn, torch.nn.SmoothL1Loss)
        if is_module:
            kwargs = {"reduction": fn.reduction, "beta": fn.beta, **kwargs}
        if is_module or self._outer.sees(fn):
            return self.explanation(_native.smooth_l1_loss_explain(*args, **kwargs))
        if self._inner.sees(fn):
            return self.explanation(_native.smooth_l1_loss_explain_inner(*args, **kwargs))
        if self._inner.is_original(fn):
            return self.unseen()
        return self._explain_early(fn, args, kwargs)

    def _explain_early(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        """F.smooth_l1_loss of before it was patched: the inner point is reached by what it makes of the call."""
        from .. import _native

        try:
            call = inspect.signature(fn).bind(*args, **kwargs)
            call.apply_defaults()
            given = call.arguments
            reduction = given["reduction"]
            if given["size_average"] is not None or given["reduce"] is not None:
                reduction = _reduction.legacy_get_string(given["size_average"], given["reduce"], emit_warning=False)
            number = _reduction.get_enum(reduction)
            tensors = torch.broadcast_tensors(given["input"], given["target"])  # type: ignore[no-untyped-call]
        except (TypeError, ValueError, RuntimeError):
            return self.explanation("arguments")
        if given["beta"] == 0.0:
            return self.unseen()  # stock calls torch._C._nn.l1_loss
        return self.explanation(_native.smooth_l1_loss_explain_inner(*tensors, number, given["beta"]))


TARGET = SmoothL1LossTarget()
