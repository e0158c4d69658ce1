"""Loss calls, and their gradients, as data to run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ._loss_bounds import loss_differs
from ._replay import Replay, Tensors, copied, halves

Loss = Callable[..., torch.Tensor]

REDUCTIONS = ("none", "mean", "sum")


class LossReplay(Replay):
    """The value of a loss.

    Args:
        name: of the function in ``torch.nn.functional``.
        threshold_name: ``"beta"`` or ``"delta"``.
        stock: ``(input, target, reduction, threshold)``, with the reduction as a number.
        ours: the function in ``torch.nn.functional``, served or refused.
        tensors: input and target, of one shape.
    """

    def __init__(
        self,
        name: str,
        threshold_name: str,
        stock: Loss,
        ours: Loss,
        tensors: Sequence[torch.Tensor | None],
        reduction: int,
        threshold: float,
    ) -> None:
        super().__init__(tensors)
        self._recipe = name, threshold_name, stock, ours
        self._name, self._threshold_name, self._stock, self._ours = self._recipe
        self._reduction, self._threshold = reduction, threshold

    @property
    def names(self) -> list[str]:
        return ["loss", "input", "target"]

    def results(self, returned: torch.Tensor) -> Tensors:
        return [returned, *self.given]

    def after(self, results: Tensors) -> Tensors:
        return results[1:]

    def _call(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        options = {"reduction": REDUCTIONS[self._reduction], self._threshold_name: self._threshold}
        return self._ours(input, target, **options)

    def by_stock(self) -> Tensors:
        return [self._stock(*self.tensors, self._reduction, self._threshold), *self.tensors]  # which it only reads

    def by_us(self) -> Tensors:
        tensors = copied(self.tensors)
        return [self._call(*tensors), *tensors]  # type: ignore[arg-type]

    def unlike(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
        found = super().unlike(name, actual, expected)
        if found is None or name != "loss" or self._reduction == 0 or actual.device.type != "cuda":
            return found
        if super().unlike(name, torch.zeros_like(actual), torch.zeros_like(expected)) is not None:
            return found
        # A sum on a GPU: as near as rounding explains.
        values = self._stock(*self.tensors, 0, self._threshold)
        return found if loss_differs(actual, values, self._reduction) else None

    def smaller(self) -> Iterator[Replay]:
        for tensors in halves(self.tensors, lambda i: True):
            yield type(self)(*self._recipe, tensors, self._reduction, self._threshold)

    def _source_of_call(self) -> str:
        options = f"reduction={REDUCTIONS[self._reduction]!r}, {self._threshold_name}={self._threshold!r}"
        return f"F.{self._name}(input, target, {options})"

    def source(self) -> list[str]:
        call = self._source_of_call()
        kind = self.devices.pop().type
        lines = ["input, target = tensors", f"seen['loss'] = {call}"]
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            lines[1:] = [f"with torch.autocast({kind!r}, dtype={dtype}):", f"    seen['loss'] = {call}"]
        return [*lines, "seen['input'], seen['target'] = input, target"]


class LossGradientReplay(LossReplay):
    """The gradient of a loss for its input. ``stock`` takes the gradient of the loss first, and so do ``tensors``."""

    @property
    def names(self) -> list[str]:
        return ["gradient", "gradient of the loss", "input", "target"]

    def by_us(self) -> Tensors:
        tensors = copied(self.tensors)
        grad_output, input, target = tensors
        assert input is not None and target is not None  # for mypy
        with torch.enable_grad():
            loss = self._call(input.detach().requires_grad_(), target)
        with torch.no_grad():
            backward: Any = loss.grad_fn
            return [backward(grad_output)[0], *tensors]

    def smaller(self) -> Iterator[Replay]:
        one = self._reduction != 0  # the loss is one number, and so is its gradient
        for tensors in halves(self.tensors, lambda i: not (one and i == 0)):
            yield type(self)(*self._recipe, tensors, self._reduction, self._threshold)

    def source(self) -> list[str]:
        return [
            "grad_output, input, target = tensors",
            f"loss = {self._source_of_call().replace('input', 'input.requires_grad_()')}",
            "seen['gradient'], = torch.autograd.grad(loss, input, grad_output)",
            "seen['input'], seen['target'] = input.detach(), target",
        ]
