"""What the tests of smooth L1 share: operands, and the ways to call it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import smooth_l1_loss as early

TARGET = "smooth_l1_loss"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# The larger one is served with the GIL released: whatever calls back into Python has to take it again.
SIZES = pytest.mark.parametrize("n", [5, 20_000])

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def operands(n: int = 5, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    input = torch.linspace(-3, 4, n).sin().mul(2).to(dtype).requires_grad_()
    return input, torch.linspace(-1, 1, n).cos().to(dtype)


def loss(input: torch.Tensor, target: torch.Tensor, reduction: str = "mean", beta: float = 0.7) -> torch.Tensor:
    return F.smooth_l1_loss(input, target, reduction=reduction, beta=beta)


def grad_of(output: torch.Tensor) -> torch.Tensor:
    """A gradient for the output, without a pattern."""
    return torch.linspace(0.3, -2, output.numel()).view(output.shape).to(output.dtype)


def grads(output: torch.Tensor, *leaves: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
    """Gradients by that gradient; none may be all zero, but of nothing."""
    found = torch.autograd.grad(output, leaves, grad_of(output), **how)
    assert all(grad.count_nonzero() for grad in found) or not output.numel()
    return found


def pair(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An input that needs a gradient, and a target."""
    sizes = sizes or (4, 3)
    n = math.prod(sizes)
    return torch.linspace(-2, 3, n).view(sizes).requires_grad_(), torch.linspace(1, -1, n).cos().view(sizes)


def plain_pair(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    input, target = pair()
    return input.detach().to(dtype), target.to(dtype)


both_ways = pytest.mark.parametrize("way", ["patched", "early"])


def loss_of(way: str) -> Callable[..., torch.Tensor]:
    """F.smooth_l1_loss as it is when it's called, or as it was taken before it was patched."""
    return early if way == "early" else lambda *args, **kwargs: F.smooth_l1_loss(*args, **kwargs)


early_partial = functools.partial(early)


class SubModule(torch.nn.SmoothL1Loss):
    """Has a forward of its own, that of its base."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input, target)


CALLERS: dict[str, Callable[..., Any]] = {
    "functional": lambda *args, **kwargs: F.smooth_l1_loss(*args, **kwargs),
    "partial": lambda *args, **kwargs: functools.partial(F.smooth_l1_loss)(*args, **kwargs),
    "module": lambda *args, **kwargs: torch.nn.SmoothL1Loss(**kwargs)(*args),
    "submodule": lambda *args, **kwargs: SubModule(**kwargs)(*args),
    "early": lambda *args, **kwargs: early(*args, **kwargs),
    "early partial": lambda *args, **kwargs: early_partial(*args, **kwargs),
}

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One kind of call, and its verdict: a reason, or "fast". ``inner`` is the verdict on a reference to
    F.smooth_l1_loss taken before patching, None where stock's Python code never reaches the inner patch point."""

    name: str
    verdict: str
    make: Callable[[], Arguments]
    inner: str | None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    by_module: bool = True  # can nn.SmoothL1Loss make such a call?

    def counted(self, caller: str) -> dict[str, Any]:
        """What served() and as_stock() have to see."""
        verdict = self.inner if caller.startswith("early") else self.verdict
        return {"fast": int(verdict == "fast"), "fallback": {} if verdict in (None, "fast") else {verdict: 1}}

    def call_by(self, caller: str) -> Any:
        """The result, and the gradients of the arguments that need one."""
        with self.context():
            args, kwargs = self.make()
            output = CALLERS[caller](*args, **kwargs)
            leaves = tuple(t for t in args if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf)
            if type(output) is not torch.Tensor or not output.requires_grad or not leaves:
                return output
            return output, torch.autograd.grad(output, leaves, grad_of(output))


SAME = "as verdict"


def case(name: str, verdict: str, make: Callable[[], Any], inner: str | None = SAME, **more: Any) -> Case:
    """``make`` returns the positional arguments, and a dictionary of the named ones last."""

    def arguments() -> Arguments:
        made = make()
        return (made[:-1], made[-1]) if made and isinstance(made[-1], dict) else (made, {})

    return Case(name, verdict, arguments, verdict if inner == SAME else inner, **more)


def by_every_caller(cases: list[Case]) -> Any:
    return pytest.mark.parametrize(
        ("caller", "case"),
        [
            pytest.param(caller, case, id=f"{caller}, {case.name}")
            for case in cases
            for caller in CALLERS
            if case.by_module or not caller.endswith("module")
        ],
    )
