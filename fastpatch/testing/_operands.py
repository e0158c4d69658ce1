"""Operand: a tensor as plain data, which can be made on any device and written down as source."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "offset", "permuted", "gaps", "gaps between rows", "expanded", "odd strides")
KINDS = ("random", "edges", "huge")

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_LITERALS = 64  # a tensor of more numbers is written as its recipe


def neighbour(number: float, dtype: torch.dtype, steps: int) -> float:
    """The number of this dtype so many steps further away from zero."""
    bits = torch.tensor(number, dtype=dtype, device="cpu").view(_INTEGERS[dtype.itemsize])
    return float((bits + steps).view(dtype).item())


def special_values(dtype: torch.dtype, threshold: float, kind: str) -> list[float]:
    """Where a branch, a rounding or a special value begins: for "edges" finite and small ones, for "huge" all."""
    info = torch.finfo(dtype)
    values = [0.0, 0.0, 1.0, info.tiny * info.eps, info.tiny / 8, info.tiny]
    if info.tiny <= threshold <= info.max / 2:
        values += [threshold, threshold, neighbour(threshold, dtype, -1), neighbour(threshold, dtype, 1)]
    if kind == "huge":
        values += [math.nan, math.inf, info.max]
    return [*values, *(-value for value in values)]


@dataclass(frozen=True)
class Operand:
    """A tensor that calls are made with: the same numbers in the same places of memory wherever it is made.

    Attributes:
        shape, dtype: of the tensor. Of a dtype of whole numbers the values are in -9 to 9.
        layout: one out of ``LAYOUTS``.
        order: the dimensions, outermost in memory first, where the layout is "permuted"; the first one is expanded
            where it is "expanded".
        needs_grad: does autograd record what is done with it? Never of whole numbers.
        kind: of values: "random", or three in ten at "edges" (zeros, subnormals, the threshold and its neighbours), or
            "huge" (infinities, NaN and the greatest number too).
        scale: of the random values, which are normally distributed.
        seed: of all that is random.
        threshold: at which the loss turns from a square into a line.

    Example:
        >>> Operand((2, 3), torch.float32, layout="permuted", order=(1, 0)).make().stride()
        (1, 2)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    order: tuple[int, ...] = (0,)
    needs_grad: bool = False
    kind: str = "random"
    scale: float = 1.0
    seed: int = 0
    threshold: float = 1.0

    def make(self, device: str = "cpu") -> torch.Tensor:
        """A new leaf, a view of memory of its own."""
        memory, here = self._on_the_cpu()
        there = memory.to(device).as_strided(here.shape, here.stride(), here.storage_offset())
        return there.detach().requires_grad_(self.needs_grad and self.dtype.is_floating_point)

    def source(self, device: str = "cpu") -> str:
        """An expression that makes it: of literal numbers if they are few, and else of an Operand."""
        place = "" if device == "cpu" else repr(device)
        if math.prod(self.shape) > _LITERALS:
            return f"{self!r}.make({place})"
        memory, here = self._on_the_cpu()
        made = f"torch.tensor({memory.tolist()!r}, dtype={self.dtype}{place and f', device={place}'})"
        if (here.shape, here.stride(), here.storage_offset()) != (memory.shape, memory.stride(), 0):
            made += f".as_strided({tuple(here.shape)}, {here.stride()}, {here.storage_offset()})"
        return made + (".requires_grad_()" if self.needs_grad and self.dtype.is_floating_point else "")

    def _on_the_cpu(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All of its memory as one row, and the tensor, without gradient, that is a view of it."""
        here = self._arranged(self._values())
        memory = torch.empty(0, dtype=self.dtype, device="cpu")
        memory.set_(here.untyped_storage())
        return memory, here

    def _values(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64, device="cpu") * self.scale
        if not self.dtype.is_floating_point:
            return values.clamp(-9, 9).to(self.dtype)
        values = values.to(self.dtype)
        if self.kind == "random":
            return values
        numbers = special_values(self.dtype, self.threshold, self.kind)
        special = torch.tensor(numbers, dtype=self.dtype, device="cpu")
        chosen = torch.rand(self.shape, generator=generator, device="cpu") < 0.3
        return torch.where(chosen, special[torch.randint(len(special), self.shape, generator=generator)], values)

    def _arranged(self, values: torch.Tensor) -> torch.Tensor:
        """The values in this layout, between sevens that nobody may read; where it is expanded, only some of them."""
        if self.layout == "offset":
            return torch.cat([values.new_full((3,), 7), values.flatten()])[3:].view(self.shape)
        if not self.shape:
            return values
        if self.layout == "permuted":
            return values.permute(self.order).contiguous().permute([self.order.index(d) for d in range(values.dim())])
        if self.layout.startswith("gaps"):
            wide = values.new_full((*self.shape[:-1], 2 * self.shape[-1] + 1), 7)
            view = wide[..., 1::2] if self.layout == "gaps" else wide[..., : self.shape[-1]]
            return view.copy_(values)
        if self.layout == "expanded":
            dim = self.order[0]
            return values.narrow(dim, 0, min(1, self.shape[dim])).expand(self.shape)
        if self.layout == "odd strides":  # without meaning, where a dimension has one element
            odd = random.Random(self.seed)
            pairs = zip(self.shape, values.stride(), strict=True)
            return values.as_strided(self.shape, [odd.choice([7, 0, 1, 13]) if n == 1 else s for n, s in pairs])
        return values
