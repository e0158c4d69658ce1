"""calls(): any call of a loss at all, as one strategy, and what can be seen of it."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _helpers import assert_same, outcome
from hypothesis import strategies as st

import fastpatch
from fastpatch.testing import Operand, memory
from fastpatch.testing.strategies import AUTOCASTS, THRESHOLD_NAMES, pairs, rarely

MODULES = {"smooth_l1_loss": torch.nn.SmoothL1Loss, "huber_loss": torch.nn.HuberLoss}
EARLY = {loss: getattr(F, loss) for loss in MODULES}
WAYS = ("functional", "module", "partial", "early", "early partial")
GRAD_MODES = {"enabled": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
GRAD_OUTPUTS = ("random", "ones", "expanded", "strided")


def memory_of(operands: tuple[torch.Tensor, ...]) -> list[tuple[int, torch.Tensor]]:
    """The version of each operand, and every byte that it could reach."""
    return [memory(operand) for operand in operands]


# --------------------------------------------------------------------------------------------------------- one call


@dataclass(frozen=True)
class Call:
    loss: str
    way: str
    input: Operand
    target: Operand
    is_one_tensor: bool  # is the input the target too?
    arguments: dict[str, Any]  # in the order of the function's parameters
    positional: bool
    grad_mode: str
    autocast: torch.dtype | None
    grad_output: str
    backward_in_autocast: bool
    twice: bool  # is the gradient differentiated again?
    threads: int

    @property
    def threshold(self) -> Any:
        return self.arguments[THRESHOLD_NAMES[self.loss]]

    @property
    def is_early(self) -> bool:
        return self.way.startswith("early")

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        input = self.input.make()
        return input, input if self.is_one_tensor else self.target.make()

    def function(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """What is called, and its arguments after the operands."""
        if self.way == "module":
            return self.module(), (), {}
        function = EARLY[self.loss] if self.is_early else getattr(F, self.loss)
        return (function, tuple(self.arguments.values()), {}) if self.positional else (function, (), self.arguments)

    def module(self) -> torch.nn.Module:
        legacy = {name: value for name, value in self.arguments.items() if name in ("size_average", "reduce")}
        module = MODULES[self.loss](**legacy)
        for name, value in self.arguments.items():
            if name not in legacy and not (name == "reduction" and any(v is not None for v in legacy.values())):
                setattr(module, name, value)  # nn.HuberLoss itself doesn't take every delta
        return module

    def autocasting(self) -> Any:
        return nullcontext() if self.autocast is None else torch.autocast("cpu", dtype=self.autocast)

    def explanation(self) -> fastpatch.Explanation:
        operands = self.operands()
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of the module's constructor
            stack.enter_context(fastpatch.enabled(self.loss))
            stack.enter_context(GRAD_MODES[self.grad_mode]())
            stack.enter_context(self.autocasting())
            function, args, kwargs = self.function()
            return fastpatch.explain(function, *operands, *args, **kwargs)

    def run(self) -> list[Any]:
        """All that can be seen of it, but exceptions and warnings of the forward."""
        operands = self.operands()
        before = memory_of(operands)
        with GRAD_MODES[self.grad_mode](), self.autocasting():
            function, args, kwargs = self.function()
            if self.way.endswith("partial"):
                function, args, kwargs = functools.partial(function, **self.arguments), (), {}
            output = function(*operands, *args, **kwargs)
        edges = () if output.grad_fn is None else output.grad_fn.next_functions
        graph = [type(node).__name__ for node in (output.grad_fn, *(node for node, _ in edges))]
        backward = outcome(lambda: self.gradients(output, operands))
        assert_same(memory_of(operands), before)
        return [output, output.is_inference(), graph, backward.value, backward.error, backward.warned]

    def gradients(self, output: torch.Tensor, operands: tuple[torch.Tensor, ...]) -> Any:
        if not output.requires_grad:
            return None
        grad_output = grad_output_of(output, self.grad_output)
        leaves = [operand for operand in operands if operand.requires_grad]
        with self.autocasting() if self.backward_in_autocast else nullcontext():
            first = torch.autograd.grad(output, leaves, grad_output, create_graph=self.twice)
            if not self.twice:
                return first
            return first, torch.autograd.grad(sum((1 + i) * grad.pow(2).sum() for i, grad in enumerate(first)), leaves)


def grad_output_of(output: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "ones":
        return torch.ones_like(output)
    if kind == "expanded":
        return torch.tensor(-0.37, dtype=output.dtype).expand(output.shape)
    values = torch.randn((*output.shape, 2), generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return values[..., 1] if kind == "strided" else values[..., 1].contiguous()


# ---------------------------------------------------------------------------------------------------- what is drawn


PLAIN = [
    *(1.0, 0.5, 0.1, 1 / 9, 3.0, 2.0**-20, 3e38, 1e300, math.inf, 1, 2, np.float64(0.3)),
    *(torch.tensor(0.3), torch.tensor(0.3, dtype=torch.float64), torch.tensor(2)),
]
ODD = [
    *(2.4e-38, 2.3e-38, 1e-45, 2.0**-130, 1e-320, math.nan, -1.0, -math.inf, True, None, "1", 10**400, -3),
    *(np.float32(0.5), torch.tensor([0.3]), torch.tensor(-1.0), torch.tensor(0.3, requires_grad=True)),
]
THRESHOLDS = {
    "random": st.floats(1e-3, 5),
    "plain": st.sampled_from(PLAIN),
    "zero": st.sampled_from([0, 0.0, -0.0, torch.tensor(0.0)]),
    "odd": st.sampled_from(ODD),
}


@st.composite
def arguments(draw: st.DrawFn, loss: str) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    flags = st.sampled_from([None, True, False])
    if loss == "smooth_l1_loss":
        legacy = draw(rarely((None, None), rarely(st.tuples(flags, flags), ("yes", 1), times=2), times=4))
        drawn = dict(zip(("size_average", "reduce"), legacy, strict=True))
    reductions = st.sampled_from(["mean", "sum", "none"])
    drawn["reduction"] = draw(rarely(reductions, st.sampled_from(["average", "elementwise_mean", None]), times=30))
    zeros = 3 if loss == "smooth_l1_loss" else 1
    kind = draw(st.sampled_from([*["plain"] * 8, *["random"] * 8, *["zero"] * zeros, "odd"]))
    drawn[THRESHOLD_NAMES[loss]] = draw(THRESHOLDS[kind])
    return drawn


@st.composite
def calls(draw: st.DrawFn) -> Call:
    loss = draw(st.sampled_from(list(MODULES)))
    values = draw(arguments(loss))
    threshold = values[THRESHOLD_NAMES[loss]]
    number = threshold.tolist() if isinstance(threshold, torch.Tensor) else threshold
    near = float(number) if isinstance(number, (int, float)) and abs(number) < 1e308 else 1.0
    input, target = draw(pairs(near))
    return Call(
        loss,
        draw(st.sampled_from(WAYS)),
        input,
        target,
        is_one_tensor=draw(rarely(False, True, times=20)),
        arguments=values,
        positional=draw(st.booleans()),
        grad_mode=draw(st.sampled_from(["enabled"] * 14 + ["no_grad"] * 4 + ["inference"])),
        autocast=draw(st.sampled_from((None, *AUTOCASTS))),
        grad_output=draw(st.sampled_from(GRAD_OUTPUTS)),
        backward_in_autocast=draw(st.booleans()),
        twice=draw(rarely(False, True, times=4)),
        threads=draw(st.sampled_from([1, 2])),
    )
