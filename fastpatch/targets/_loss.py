"""What the losses of two tensors have in common: their patch points, their proof, their explanations."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import _reduction

from .._difference import bits_differ
from .._patching import PatchPoint, is_own_of_torch
from ._explanation import Explanation, Question
from ._loss_bounds import loss_differs
from ._loss_replay import LossGradientReplay, LossReplay
from ._replay import Replay
from ._target import DTYPES, Target, native


def _legacy_warning(stock: Any) -> Callable[[Any, Any], Any] | None:
    """Calls ``_reduction.legacy_get_string`` from the very line at which torch's function does, so that its warning is
    attributed, and shown once, as stock's. None if the function doesn't call it."""
    line = 0
    for instruction in dis.get_instructions(stock):
        start = instruction.starts_line
        line = start if type(start) is int else getattr(instruction, "line_number", line)
        if instruction.argval == "legacy_get_string":
            source = "\n" * (line - 1) + "lambda *legacy: _Reduction.legacy_get_string(*legacy)"
            warn: Callable[[Any, Any], Any] = eval(compile(source, stock.__code__.co_filename, "eval"), vars(F))
            return warn
    return None


def _l1_loss(input: torch.Tensor, target: torch.Tensor, reduction: int, threshold: float) -> torch.Tensor:
    """What stock makes of a threshold of zero."""
    return torch.ops.aten.l1_loss.default(input, target, reduction)  # type: ignore[no-any-return]


def _size_warning(stock: Any) -> Callable[[Any, Any], str] | None:
    """The text of torch's warning of operands that are broadcast; None if the function has none of this form."""
    texts = [text for text in stock.__code__.co_consts if isinstance(text, str)]
    parts = [
        next((text for text in texts if text.startswith(start)), None)
        for start in ("Using a target size (", ") that is different to the input size (", "). This will likely")
    ]
    if None in parts:
        return None
    return lambda input, target: f"{parts[0]}{target.size()}{parts[1]}{input.size()}{parts[2]}"


class LossTarget(Target):
    """A loss of ``torch.nn.functional`` with a threshold, and the builtin of ``torch._C._nn`` behind it.

    Args:
        name: of both.
        module: the class in ``torch.nn``.
        threshold: the parameter at which the loss turns from a square into a line.
    """

    def __init__(self, name: str, module: type[torch.nn.Module], threshold: str) -> None:
        super().__init__()
        self.name = name
        self._module = module
        self._threshold = threshold
        self._outer = PatchPoint(F, name, native("loss_outer", name), f"torch.nn.functional:{name}")
        # Reached by those who took the function before it was patched.
        self._inner = PatchPoint(
            torch._C._nn, name, native("loss_inner", name), f"torch._C._nn:{name}", jit_builtin=f"aten::{name}"
        )
        # The operator itself, past every patch point.
        self._operator: Callable[..., torch.Tensor] = getattr(torch.ops.aten, name).default
        self._backward: Callable[..., torch.Tensor] = getattr(torch.ops.aten, f"{name}_backward").default

    @property
    def points(self) -> tuple[PatchPoint, ...]:
        return self._outer, self._inner

    def prepare(self) -> None:
        from .. import _native

        one = torch.ones(1, dtype=torch.float32, device="cpu", requires_grad=True)
        _native.loss_register_node(self.name, type(self._operator(one, one.detach()).grad_fn))
        stock = self._outer.stock
        if is_own_of_torch(stock):  # else it isn't patched either
            _native.loss_set_warnings(self.name, _legacy_warning(stock), _size_warning(stock))

    def switched(self, on: bool) -> None:
        from .. import _native

        _native.loss_keep_memory(self.name, on)

    def prove(self) -> str | None:
        from .. import _native

        ours = _native.loss_inner(self.name, self._inner.stock)
        _native.set_live(ours, True)
        # Scalars alone, a vector, tails of both, rows of accumulators; both ways to divide by beta.
        for dtype in DTYPES:
            for size, threshold in ((7, 0.3), (17, 1.0), (531, 0.3)):
                for reduction in (0, 1, 2):
                    difference = self._difference(ours, size, dtype, reduction, threshold)
                    if difference:
                        return (
                            f"{difference} of {size} elements of {dtype}, reduction {reduction}, "
                            f"{self._threshold} {threshold}"
                        )
        return None

    def _difference(self, ours: Any, size: int, dtype: torch.dtype, reduction: int, threshold: float) -> str | None:
        target = torch.linspace(-0.7, 0.9, size, dtype=dtype, device="cpu")
        inputs = [(target * -1.37 + 0.11).requires_grad_() for _ in range(2)]
        losses = [f(x, target, reduction, threshold) for f, x in zip((self._operator, ours), inputs, strict=True)]
        if bits_differ(*losses):
            return "the loss"
        for loss in losses:
            # Not loss.backward(gradient): that imports sympy, which takes a second.
            (loss * (loss.detach() + 0.37)).sum().backward()
        return "the gradient" if bits_differ(*(x.grad for x in inputs)) else None

    def prove_on(self, device: torch.device, dtype: torch.dtype) -> str | None:
        from .. import _native

        ours = _native.loss_inner(self.name, self._inner.stock)
        _native.set_live(ours, True)
        # Single elements, whole and broken vectors, one block of threads and several.
        for size, threshold in ((7, 0.3), (531, 1.0), (20_000, 0.3)):
            for reduction in (0, 1, 2):
                difference = self._difference_on(device, ours, size, dtype, reduction, threshold)
                if difference:
                    return f"{difference} of {size} elements, reduction {reduction}, {self._threshold} {threshold}"
        return None

    def _difference_on(
        self, device: torch.device, ours: Any, size: int, dtype: torch.dtype, reduction: int, threshold: float
    ) -> str | None:
        target = torch.linspace(-0.7, 0.9, size, dtype=dtype, device=device)
        input = (target * -1.37 + 0.11).requires_grad_()
        values = self._operator(input.detach(), target, 0, threshold)
        loss = ours(input, target, reduction, threshold)
        gradient = loss.detach() + 0.37
        with torch.no_grad():
            ours_of_input = loss.grad_fn(gradient)[0]
            stock_of_input = self._backward(gradient, input, target, reduction, threshold)
        if loss_differs(loss, values, reduction):
            return "the loss"
        return "the gradient" if bits_differ(stock_of_input, ours_of_input) else None

    def replay(self, kind: str, *arguments: Any) -> Replay:
        from .. import _native

        *tensors, reduction, threshold = arguments
        ours = _native.loss_outer(self.name, self._outer.stock)
        _native.set_live(ours, True)
        if kind == "gradient":
            return LossGradientReplay(self.name, self._threshold, self._backward, ours, tensors, reduction, threshold)
        stock = self._operator if threshold else _l1_loss
        return LossReplay(self.name, self._threshold, stock, ours, tensors, reduction, threshold)

    def owns(self, fn: Any) -> bool:
        if isinstance(fn, self._module):
            return True
        return self.is_explicit(fn) or any(point.sees(fn) or point.is_original(fn) for point in self.points)

    def questions(self) -> tuple[Question, ...]:
        from .. import _native

        lines = _native.loss_guards(self.name)
        return tuple((text.format(threshold=self._threshold), codes) for text, codes in lines)

    def explain(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        from .. import _native

        is_module = isinstance(fn, self._module)
        if is_module:
            kwargs = {"reduction": fn.reduction, self._threshold: getattr(fn, self._threshold), **kwargs}
        if is_module or self.is_explicit(fn) or self._outer.sees(fn):
            return self.explanation(*_native.loss_explain(self.name, *args, **kwargs))
        if self._inner.sees(fn):
            return self.explanation(*_native.loss_explain_inner(self.name, *args, **kwargs))
        if self._inner.is_original(fn):
            return self.unseen()
        return self._explain_early(fn, args, kwargs)

    def _explain_early(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        """The function of before it was patched: the inner point is reached by what it makes of the call."""
        from .. import _native

        try:
            call = inspect.signature(fn).bind(*args, **kwargs)
            call.apply_defaults()
            given = call.arguments
            reduction = given["reduction"]
            legacy = given.get("size_average"), given.get("reduce")
            if legacy != (None, None):
                reduction = _reduction.legacy_get_string(*legacy, emit_warning=False)
            number = _reduction.get_enum(reduction)
            tensors = torch.broadcast_tensors(given["input"], given["target"])  # type: ignore[no-untyped-call]
        except (TypeError, ValueError, RuntimeError):
            return self.explanation("arguments")  # by the first guard: stock's own function refuses them
        threshold = given[self._threshold]
        if self._takes_another_builtin(threshold):
            return self.unseen()
        return self.explanation(*_native.loss_explain_inner(self.name, *tensors, number, threshold))

    def _takes_another_builtin(self, threshold: Any) -> bool:
        """Does stock's function hand a call with this threshold to another builtin than ours?"""
        return False
