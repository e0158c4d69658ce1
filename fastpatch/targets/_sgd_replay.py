"""A step of SGD as data to run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._replay import Replay, Tensors, copied, halves


@dataclass(frozen=True)
class Group:
    """Of a step: so many of its parameters, and with which options the function ``sgd`` is called of them."""

    size: int
    options: dict[str, Any]


class SgdReplay(Replay):
    """A step of parameter groups, one after the other.

    Args:
        stock: the function ``sgd`` of module ``torch.optim.sgd``.
        ours: that, served or refused.
        tensors: parameter, gradient and momentum buffer (or None) of each parameter, over all groups.
        groups: which of them belong together.
    """

    def __init__(
        self,
        stock: Callable[..., None],
        ours: Callable[..., None],
        tensors: Sequence[torch.Tensor | None],
        groups: list[Group],
    ) -> None:
        super().__init__(tensors)
        self._stock, self._ours = stock, ours
        self._groups = [Group(group.size, {k: _own(v) for k, v in group.options.items()}) for group in groups]

    @property
    def names(self) -> list[str]:
        words = "parameter", "gradient", "momentum buffer"
        return [f"{words[i % 3]} {i // 3}" for i in range(len(self.tensors))]

    def _run(self, function: Callable[..., None]) -> Tensors:
        tensors = copied(self.tensors)
        made: dict[int, torch.Tensor | None] = {}  # a parameter may be in two groups
        begin = 0
        for group in self._groups:
            end = begin + 3 * group.size
            params, grads, buffers = (tensors[begin + i : end : 3] for i in range(3))
            if group.options["momentum"]:
                buffers = [made.get(id(p)) if b is None else b for p, b in zip(params, buffers, strict=True)]
            function(params, grads, buffers, **group.options)
            made.update((id(p), b) for p, b in zip(params, buffers, strict=True) if b is not None)
            tensors[begin + 2 : end : 3] = buffers
            begin = end
        return tensors

    def results(self, returned: list[Tensors]) -> Tensors:
        """``returned``: the momentum buffers of each group's parameters."""
        tensors = list(self.given)
        tensors[2::3] = [buffer for buffers in returned for buffer in buffers]
        return tensors

    def after(self, results: Tensors) -> Tensors:
        return results

    def by_stock(self) -> Tensors:
        return self._run(self._stock)

    def by_us(self) -> Tensors:
        return self._run(self._ours)

    def smaller(self) -> Iterator[Replay]:
        if len(self.tensors) == 3:
            parts = [(tensors, self._groups) for tensors in halves(self.tensors, lambda i: True)]
        else:
            parts = list(self._fewer_parameters())
        for tensors, groups in parts:
            yield SgdReplay(self._stock, self._ours, tensors, groups)

    def _fewer_parameters(self) -> Iterator[tuple[Tensors, list[Group]]]:
        """Each group alone; the halves of a single one."""
        begin = 0
        for group in self._groups:
            half = group.size // 2 if len(self._groups) == 1 else group.size
            for size in (half, group.size - half):
                if size:
                    yield self.tensors[begin : begin + 3 * size], [Group(size, group.options)]
                begin += 3 * size

    def source(self) -> list[str]:
        lines = ["sgd = sys.modules['torch.optim.sgd'].sgd"]
        begin = 0
        for group in self._groups:
            end = begin + 3 * group.size
            options = ", ".join(f"{name}={_written(value)}" for name, value in group.options.items())
            lines += [
                f"params, grads, buffers = (tensors[{begin} + i : {end} : 3] for i in range(3))",
                "with torch.no_grad():",
                f"    sgd(params, grads, buffers, {options})",
                f"seen['parameters of {begin // 3} on'], seen['gradients of {begin // 3} on'] = params, grads",
                f"seen['momentum buffers of {begin // 3} on'] = buffers",
            ]
            begin = end
        return lines


def _written(value: Any) -> str:
    return f"torch.tensor({value.item()!r}, dtype={value.dtype})" if isinstance(value, torch.Tensor) else repr(value)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
