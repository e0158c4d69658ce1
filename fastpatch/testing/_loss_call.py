"""LossCall: one call of a loss of two tensors, and its backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ._case import Case, kind_of
from ._operands import Operand

_RANDOM = "generator=torch.Generator().manual_seed(1), dtype=torch.float32"
# Gradients for ``output``. The strided one takes another way through stock and through us.
GRADIENTS = {
    "ones": "torch.ones_like(output)",
    "random": f"torch.randn(output.shape, {_RANDOM}).to(output)",
    "expanded": "torch.tensor(-0.37).to(output).expand(output.shape)",
    "strided": f"torch.randn((*output.shape, 2), {_RANDOM}).to(output)[..., 1]",
    "negative zeros": "torch.full_like(output, -0.0)",
    "nan": "torch.full_like(output, nan)",
}


@dataclass(frozen=True)
class LossCall(Case):
    """A call ``F.<target>(input, target, **arguments)``, and the gradients of the operands that need one.

    Attributes:
        target: the loss's name, e.g. ``"huber_loss"``.
        input, other: the operands; ``other`` is the loss's target.
        arguments: by name: ``reduction``, and ``beta`` or ``delta``.
        gradient: what comes in at the backward, out of ``GRADIENTS``.
        autocast: the dtype of ``torch.autocast`` around the call, None for none.
        threads: of torch's loops.

    Example:
        >>> call = LossCall("huber_loss", Operand((3,), needs_grad=True), Operand((3,), seed=1), {"delta": 0.5})
        >>> call.compare()
        Comparison(target='huber_loss', difference=None, fast=1, fallback={})
    """

    target: str
    input: Operand
    other: Operand
    arguments: dict[str, Any] = field(default_factory=dict)
    gradient: str = "random"
    autocast: torch.dtype | None = None
    threads: int = 1

    @property
    def kind(self) -> str:
        return kind_of([self.input, self.other])

    @property
    def least_units(self) -> int:
        return 1

    def body(self, device: str) -> list[str]:
        arguments = "".join(f", {name}={value!r}" for name, value in self.arguments.items())
        reduction = self.arguments.get("reduction", "mean")
        is_cuda = torch.device(device).type == "cuda"
        calls = [f"output = F.{self.target}(input, target{arguments})"]
        if is_cuda and reduction != "none":  # its sum may differ from stock's, within a bound
            elements = "".join(f", {name}={value!r}" for name, value in self.arguments.items() if name != "reduction")
            calls += [
                "with fastpatch.disabled():",
                f"    values = F.{self.target}(input.detach(), target.detach(), reduction='none'{elements})",
                f"seen['reduction'], seen['values'] = {reduction!r}, values",
            ]
        if self.autocast is not None:
            kind = torch.device(device).type
            calls = [f"with torch.autocast({kind!r}, dtype={self.autocast}):", *(f"    {line}" for line in calls)]
        lines = [
            f"input = {self.input.source(device)}",
            f"target = {self.other.source(device)}",
            *calls,
            "seen['loss'], seen['grad_fn'] = output, type(output.grad_fn).__name__",
        ]
        if any(operand.needs_grad and operand.dtype.is_floating_point for operand in (self.input, self.other)):
            lines.append(f"output.backward({GRADIENTS[self.gradient]})")
            lines.append("seen['gradient of input'], seen['gradient of target'] = input.grad, target.grad")
        return [*lines, "seen['memory of input'], seen['memory of target'] = memory(input), memory(target)"]
