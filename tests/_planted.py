"""Differences that are planted in stock PyTorch, for what has to find them. As a script it plants one in the process of
another script: ``_planted.py NAME SCRIPT``."""

from __future__ import annotations

import runpy
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.library import Library

PROOFS = (7, 17, 531)  # enable() itself compares losses of these sizes: it would leave the target to stock


def flip(result: torch.Tensor) -> torch.Tensor:
    """Changes the last bit of the first number."""
    result.view(torch.int64).view(-1)[0] ^= 1
    return result


def huber_loss(input: torch.Tensor, target: torch.Tensor, reduction: int = 1, delta: float = 1.0) -> torch.Tensor:
    """Sums and means of float64 are off by a bit."""
    result = torch.ops.aten.huber_loss.out(input, target, reduction, delta, out=input.new_empty(0))
    is_planted = input.dtype == torch.float64 and input.numel() not in PROOFS and reduction != 0
    return flip(result) if is_planted else result


def add_(self: torch.Tensor, other: torch.Tensor, alpha: Any = 1) -> torch.Tensor:
    """Of float64, ``x + alpha y`` is off by a bit in its first element."""
    self.copy_(torch.add(self, other, alpha=alpha))
    return flip(self) if self.dtype == torch.float64 and self.numel() and alpha != 1 else self


PLANTS = {"huber_loss": huber_loss, "sgd": add_}
OPERATORS = {"huber_loss": "huber_loss", "sgd": "add_.Tensor"}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Stock's operator behind a target is off by a bit for a while; fastpatch's own kernel isn't."""
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a kernel that is replaced
            library.impl(OPERATORS[name], PLANTS[name], "CPU")
        yield
    finally:
        library._destroy()


if __name__ == "__main__":
    with planted(sys.argv[1]):
        runpy.run_path(sys.argv[2], run_name="__main__")
