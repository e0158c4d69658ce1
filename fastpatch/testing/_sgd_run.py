"""SgdRun: a few steps of an SGD over parameters of any kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ._case import Case, kind_of
from ._operands import Operand


@dataclass(frozen=True)
class TensorNumber:
    """Stands for a hyperparameter that is a tensor on the CPU; each of two runs makes its own."""

    number: Any
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"torch.tensor({self.number!r}, dtype={self.dtype})"


@dataclass(frozen=True)
class SgdStep:
    """What is set before a step.

    Attributes:
        options: of each parameter group: ``lr``, ``momentum``, ``foreach``, ...; numbers may be ``TensorNumber``.
        gradients: of each parameter, over all groups; None where it has none.
    """

    options: tuple[dict[str, Any], ...]
    gradients: tuple[Operand | None, ...]


@dataclass(frozen=True)
class SgdRun(Case):
    """Steps of ``torch.optim.SGD``, after each of which parameters, gradients and state are compared.

    Attributes:
        groups: the parameters of each group.
        steps: one after the other.
        threads: of torch's loops.

    Example:
        >>> step = SgdStep(({"lr": 0.1, "momentum": 0.9},), (Operand((3,), seed=1),))
        >>> SgdRun(((Operand((3,)),),), (step, step)).compare()
        Comparison(target='sgd', difference=None, fast=2, fallback={})
    """

    groups: tuple[tuple[Operand, ...], ...]
    steps: tuple[SgdStep, ...]
    threads: int = 1
    target: str = "sgd"

    @property
    def kind(self) -> str:
        return kind_of([operand for group in self.groups for operand in group])

    @property
    def updates(self) -> int:
        """How many parameters are updated, over all steps."""
        return sum(gradient is not None for step in self.steps for gradient in step.gradients)

    @property
    def least_units(self) -> int:
        return min(self.updates, 1)  # a group that goes to stock as a whole counts once

    def body(self, device: str) -> list[str]:
        lines: list[str] = []
        groups: list[str] = []
        place = 0
        for group in self.groups:
            names = [f"p{place + i}" for i in range(len(group))]
            place += len(group)
            lines += [f"{name} = torch.nn.Parameter({operand.source(device)})"
                      for name, operand in zip(names, group, strict=True)]  # fmt: skip
            groups.append(f"{{'params': [{', '.join(names)}]}}")
        lines.append(f"optimizer = torch.optim.SGD([{', '.join(groups)}], lr=0.1)")
        for number, step in enumerate(self.steps, 1):
            lines += [f"optimizer.param_groups[{i}].update({options!r})" for i, options in enumerate(step.options)]
            for i, gradient in enumerate(step.gradients):
                lines.append(f"p{i}.grad = {None if gradient is None else gradient.source(device)}")
            lines += ["optimizer.step()", f"note(seen, 'after step {number}', optimizer)"]
        return lines
