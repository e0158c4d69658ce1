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

GRAIN = 32768  # from here on several threads share a call
MODULES = {"smooth_l1_loss": torch.nn.SmoothL1Loss, "huber_loss": torch.nn.HuberLoss}
THRESHOLD_NAMES = {"smooth_l1_loss": "beta", "huber_loss": "delta"}
EARLY = {loss: getattr(F, loss) for loss in MODULES}
WAYS = ("functional", "module", "partial", "early", "early partial")
GRAD_MODES = {"enabled": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
AUTOCASTS = (None, torch.bfloat16, torch.float16)
GRAD_OUTPUTS = ("random", "ones", "expanded", "strided")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "offset", "permuted", "gaps", "gaps between rows", "expanded", "odd strides")
# Where the formulas have an edge, and a threshold either way; and what turns a whole sum into one value.
EDGES = [0.0, -0.0, 0.0, -0.0, 1.0, -1.0, 1e-45, 1e-40, 6e-8]
HUGE = [math.nan, math.inf, -math.inf, 65504.0, 3e38]

# ------------------------------------------------------------------------------------------------------- one operand


@dataclass(frozen=True)
class Operand:
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    order: tuple[int, ...]  # the dimensions, outermost in memory first, where the layout is permuted
    needs_grad: bool
    kind: str  # of values: random, or some of them at the edges, or huge too
    scale: float
    seed: int

    def make(self, threshold: float) -> torch.Tensor:
        """A leaf that is a view of its own memory."""
        generator = torch.Generator().manual_seed(self.seed)
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64) * self.scale
        if self.kind != "random":
            special = EDGES + [threshold, -threshold] * 2 + (HUGE if self.kind == "huge" else [])
            special = torch.tensor(special, dtype=torch.float64)
            chosen = torch.rand(self.shape, generator=generator) < 0.3
            values = torch.where(chosen, special[torch.randint(len(special), self.shape, generator=generator)], values)
        if not self.dtype.is_floating_point:
            values = values.nan_to_num().clamp(-9, 9)
        leaf = self.arranged(values.to(self.dtype)).detach()
        return leaf.requires_grad_(self.needs_grad and self.dtype.is_floating_point)

    def arranged(self, values: torch.Tensor) -> torch.Tensor:
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
        if self.layout == "odd strides":
            strides = [7 if size == 1 else stride for size, stride in zip(self.shape, values.stride(), strict=True)]
            return values.as_strided(self.shape, strides)
        return values


def memory_of(operands: tuple[torch.Tensor, ...]) -> list[tuple[int, int]]:
    """The version of each operand, and a hash of every byte that it could reach."""
    contents = [torch.empty(0, dtype=torch.uint8).set_(operand.untyped_storage()) for operand in operands]
    return [(operand._version, hash(bytes(c.numpy()))) for operand, c in zip(operands, contents, strict=True)]


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
        threshold = self.threshold.tolist() if isinstance(self.threshold, torch.Tensor) else self.threshold
        number = float(threshold) if isinstance(threshold, (int, float)) and abs(threshold) < 1e308 else 1.0
        input = self.input.make(number)
        return input, input if self.is_one_tensor else self.target.make(number)

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


def rarely(often: Any, seldom: Any, times: int = 12) -> st.SearchStrategy[Any]:
    """``often`` so many times as ``seldom``; both are values or strategies."""
    return st.sampled_from([often] * times + [seldom]).flatmap(
        lambda drawn: drawn if isinstance(drawn, st.SearchStrategy) else st.just(drawn)
    )


# Around the vector widths, an accumulator row, and the grain of a thread; large results have an allocator of their own.
LENGTHS = rarely(
    st.one_of(st.integers(0, 80), st.integers(0, 3000)),
    st.sampled_from([GRAIN - 1, GRAIN, GRAIN + 1, 2 * GRAIN + 17, 4 * GRAIN + 1]),
    times=4,
)
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
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    dims = draw(st.sampled_from([0, 1, 1, 1, 2, 2, 3, 4]))
    if dims == 1:
        return (draw(LENGTHS),)
    sizes = draw(st.lists(st.sampled_from([1, 1, 2, 3, 4, 5, 8, 16, 17]), min_size=dims, max_size=dims))
    if dims and draw(rarely(False, True)):
        sizes[0] = 0
    elif dims and draw(rarely(False, True, times=4)):
        sizes[0] = GRAIN // math.prod(sizes[1:]) + draw(st.integers(0, 300))
    return tuple(sizes)


@st.composite
def other_shapes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Mostly the same; or one that broadcasts; or one that doesn't."""
    kind = draw(rarely("same", st.sampled_from(["one", "fewer", "wrong", "wrong"]), times=4))
    if kind == "same" or not shape:
        return shape
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "fewer":
        return shape[dim:]
    return (*shape[:dim], 1 if kind == "one" else shape[dim] + 1, *shape[dim + 1 :])


@st.composite
def pairs(draw: st.DrawFn, scales: tuple[float, ...]) -> tuple[Operand, Operand]:
    shape = draw(shapes())
    other = draw(other_shapes(shape))
    order, order_of_other = (tuple(draw(st.permutations(range(len(s))))) for s in (shape, other))
    if len(shape) == len(other) and draw(st.booleans()):
        order_of_other = order
    dtype = draw(st.sampled_from([torch.float32, *FLOATS]))
    dtype_of_other = draw(rarely(dtype, rarely(st.sampled_from(FLOATS), torch.int64, times=6), times=3))
    layouts = st.sampled_from(("contiguous",) * 4 + LAYOUTS)
    layout = draw(layouts)
    layout_of_other = draw(rarely(layout, layouts, times=1))
    needs = draw(st.sampled_from([(True, False)] * 3 + [(True, True), (False, True), (False, False)]))
    kind = draw(st.sampled_from(["random", "random", "edges", "edges", "huge"]))
    rest = st.tuples(st.just(kind), st.sampled_from(scales), st.integers(0, 2**32 - 1))
    one = Operand(shape, dtype, layout, order, needs[0], *draw(rest))
    two = Operand(other, dtype_of_other, layout_of_other, order_of_other, needs[1], *draw(rest))
    return draw(st.sampled_from([(one, two), (two, one)]))


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
    number = values[THRESHOLD_NAMES[loss]]
    near = float(number) if isinstance(number, (int, float)) and 0 < number < 1e3 else 1.0
    input, target = draw(pairs((near, 1.0, 0.1, 100.0)))
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
