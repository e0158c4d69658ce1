"""Hypothesis strategies that draw operands, calls of the losses and runs of SGD. They need hypothesis.

>>> from hypothesis import given
>>> from fastpatch.testing import strategies
>>> @given(strategies.loss_calls("huber_loss"))
... def test_it_equals_stock(call):
...     assert call.compare().difference is None
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ._case import Case
from ._loss_call import GRADIENTS, LossCall
from ._operands import FLOATS, KINDS, LAYOUTS, Operand
from ._sgd_run import SgdRun, SgdStep, TensorNumber

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    if error.name != "hypothesis":
        raise
    raise ModuleNotFoundError(
        "fastpatch.testing: hypothesis, which draws the calls, is not installed; pip install hypothesis",
        name="hypothesis",
    ) from None

GRAIN = 32768  # from here on several threads share a call, and one parameter
THRESHOLD_NAMES = {"smooth_l1_loss": "beta", "huber_loss": "delta"}
AUTOCASTS = (None, torch.bfloat16, torch.float16)


def rarely(often: Any, seldom: Any, times: int = 12) -> st.SearchStrategy[Any]:
    """``often`` so many times as ``seldom``; both are values or strategies."""
    return st.sampled_from([often] * times + [seldom]).flatmap(
        lambda drawn: drawn if isinstance(drawn, st.SearchStrategy) else st.just(drawn)
    )


# --------------------------------------------------------------------------------------------------------- operands


# Around the widths of vectors, of two of them (the gradient's body), an accumulator row (four), the levels of the
# cascade (16 rows each), blocks of operands that are copied, one block of CUDA threads, and the grain of a thread.
EDGES = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
GRAINS = (GRAIN - 1, GRAIN, GRAIN + 1, 2 * GRAIN + 17, 4 * GRAIN + 1)
LENGTHS = [n + d for n in EDGES for d in (-1, 0, 1, 9)]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Of no to four dimensions, mostly of one, now and then of no elements or of very many.

    All that may be needed is drawn, whatever is taken of it: so a choice can be made smaller by itself.
    """
    length = draw(st.one_of(st.integers(0, 80), st.integers(0, 3000), st.sampled_from(LENGTHS)))
    large = draw(st.sampled_from([None] * 20 + [*GRAINS]))
    more = draw(st.integers(0, 300))
    dims = draw(st.sampled_from([1, 0, 1, 1, 2, 2, 3, 4]))
    if dims == 1:
        return (length if large is None else large,)
    sizes = draw(st.lists(st.sampled_from([1, 1, 2, 3, 4, 5, 8, 16, 17]), min_size=dims, max_size=dims))
    if dims and large is not None:
        sizes[0] = GRAIN // math.prod(sizes[1:]) + more
    elif dims and draw(rarely(False, True)):
        sizes[0] = 0
    return tuple(sizes)


@st.composite
def other_shapes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Mostly the same; or one that broadcasts; or one that doesn't."""
    kind = draw(st.sampled_from(["same"] * 16 + ["one", "fewer", "wrong", "wrong"]))
    place = draw(st.integers(0, 3))
    if kind == "same" or not shape:
        return shape
    dim = place % len(shape)
    if kind == "fewer":
        return shape[dim:]
    return (*shape[:dim], 1 if kind == "one" else shape[dim] + 1, *shape[dim + 1 :])


@st.composite
def pairs(draw: st.DrawFn, threshold: float = 1.0) -> tuple[Operand, Operand]:
    """The two operands of a loss, alike or in any mixture of shapes, dtypes and layouts."""
    shape = draw(shapes())
    other = draw(other_shapes(shape))
    order, order_of_other = (tuple(draw(st.permutations(range(len(s))))) for s in (shape, other))
    if draw(st.booleans()) and len(shape) == len(other):
        order_of_other = order
    dtype = draw(st.sampled_from([torch.float32, *FLOATS]))
    dtype_of_other = draw(st.sampled_from([None] * 15 + [*FLOATS, torch.int64])) or dtype
    layouts = ("contiguous",) * 4 + LAYOUTS
    layout = draw(st.sampled_from(layouts))
    layout_of_other = draw(st.sampled_from([None] * len(layouts) + [*layouts])) or layout
    needs = draw(st.sampled_from([(True, False)] * 3 + [(True, True), (False, True), (False, False)]))
    kind = draw(st.sampled_from([KINDS[0], *KINDS[:2], *KINDS[1:]]))
    near = threshold if 0 < threshold < 1e3 else 1.0
    rest = st.tuples(st.just(kind), st.sampled_from((near, 1.0, 0.1, 100.0)), st.integers(0, 2**32 - 1))
    one = Operand(shape, dtype, layout, order, needs[0], *draw(rest), threshold)
    two = Operand(other, dtype_of_other, layout_of_other, order_of_other, needs[1], *draw(rest), threshold)
    return draw(st.sampled_from([(one, two), (two, one)]))


# ----------------------------------------------------------------------------------------------------------- losses


# Powers of two, whose reciprocals are exact, and others; those that go to stock.
THRESHOLDS = [1.0, 0.5, 2, 2.0**-20, 2.0**40, 2.0**126, 2.0**127, 0.1, 1 / 9, 3.0, 3e38, 1e300, math.inf, 2.4e-38]
ODD_THRESHOLDS = [2.3e-38, 1e-45, 2.0**-130, 1e-320, math.nan, -1.0]


@st.composite
def thresholds(draw: st.DrawFn, zeros: int = 3) -> Any:
    """Half of them any number around one; so many in 40 are zero, one goes to stock."""
    odd, any_number = draw(st.sampled_from(ODD_THRESHOLDS)), draw(st.floats(1e-3, 5))
    return draw(st.sampled_from([*THRESHOLDS, *[any_number] * 20, *[0.0] * zeros, odd]))


@st.composite
def loss_calls(draw: st.DrawFn, target: str) -> LossCall:
    """Calls of ``F.smooth_l1_loss`` or ``F.huber_loss``: most are served, some go to stock, a few are errors."""
    threshold = draw(thresholds(3 if target == "smooth_l1_loss" else 1))
    number = abs(float(threshold)) if abs(threshold) < 1e308 else 1.0
    input, other = draw(pairs(number))
    return LossCall(
        target,
        input,
        other,
        {"reduction": draw(st.sampled_from(["mean", "sum", "none"])), THRESHOLD_NAMES[target]: threshold},
        gradient=draw(st.sampled_from(list(GRADIENTS))),
        autocast=draw(st.sampled_from((None, *AUTOCASTS))),
        threads=draw(st.sampled_from([1, 2])),
    )


# -------------------------------------------------------------------------------------------------------------- SGD


FLOAT_MAX = torch.finfo(torch.float32).max
# What float32 can hold. 1e-50 is zero there, but not for Python: stock asks the double whether it is zero.
NUMBERS = (0, 0.0, -0.0, 1, 2, -1, 0.1, 0.9, 1e-3, -0.37, 1e-40, 1e-50, 1e30, FLOAT_MAX)
USUAL = (0.1, 0.01, 0.9, 0.5, 0, 1)  # what a person would write
HYPERS = ("lr", "momentum", "dampening", "weight_decay")
SMALL = [
    *((1,), (7,), (8,), (9,), (17,), (64,), (67,), (255,), (), (0,), (0, 3), (3, 0), (3, 5), (8, 9), (1, 7), (7, 1)),
    *((3, 4, 5), (2, 1, 9), (2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (2, 3, 4, 2, 2)),
]
LARGE = [(n,) for n in (1, 17, 100, 32_767, 32_768, 32_769, 40_000, 65_543, 70_001)]
DENSE = ("contiguous", "contiguous", "permuted", "odd strides", "offset")


def holds(dtype: torch.dtype, number: Any) -> bool:
    """Stock raises for most hyperparameters that a parameter's dtype can't hold."""
    return bool(abs(number) <= torch.finfo(dtype).max)


@st.composite
def sgd_options(draw: st.DrawFn, dtypes: Sequence[torch.dtype], numbers: Sequence[Any] = NUMBERS) -> dict[str, Any]:
    """Options for a parameter group of these dtypes, all of them served."""
    usual = draw(st.booleans())
    chosen = USUAL if usual else [number for number in numbers if all(holds(dtype, number) for dtype in dtypes)]
    options: dict[str, Any] = {name: draw(st.sampled_from(chosen)) for name in HYPERS}
    for name in ("lr", "weight_decay"):
        dtype = draw(st.sampled_from([None, None, torch.float32, torch.float64, torch.bfloat16]))
        if dtype is not None and holds(dtype, options[name]):
            options[name] = TensorNumber(float(options[name]), dtype)
    options["nesterov"] = draw(st.sampled_from([False, True, 1, 0]))
    options["foreach"] = draw(st.sampled_from([None, False, True, True]))
    return {**options, "maximize": draw(st.booleans())}


@st.composite
def parameters(draw: st.DrawFn, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> Operand:
    """A parameter in a dense layout, so served."""
    shape = draw(st.sampled_from(shapes))
    order = tuple(draw(st.permutations(range(len(shape)))))
    layout, kind = draw(st.sampled_from(DENSE)), draw(st.sampled_from(KINDS))
    dtype, seed = draw(st.sampled_from(dtypes)), draw(st.integers(0, 10**6))
    return Operand(shape, dtype, layout, order, kind=kind, seed=seed)


@st.composite
def gradients(draw: st.DrawFn, parameter: Operand, seed: int, odd: bool) -> Operand | None:
    """A gradient in the parameter's order of memory, or none; where ``odd``, one that goes to stock now and then."""
    if not draw(st.sampled_from([True, True, True, False])):
        return None
    layout, dtype = parameter.layout, parameter.dtype
    if layout != "permuted" and draw(st.booleans()):
        layout = draw(st.sampled_from(["contiguous", "odd strides", "offset"]))
    if odd and draw(rarely(False, True)):
        layout = draw(st.sampled_from(["gaps", "expanded", "permuted"]))
    return replace(parameter, layout=layout, dtype=dtype, seed=seed, kind=draw(st.sampled_from(KINDS)))


@st.composite
def sgd_runs(
    draw: st.DrawFn,
    shapes: Sequence[tuple[int, ...]] = (*SMALL, *LARGE[3:6]),
    numbers: Sequence[Any] = NUMBERS,
    most_groups: int = 3,
    odd: bool = True,
) -> SgdRun:
    """Up to four steps of up to three groups: options, gradients and what has none change between them.

    Args:
        shapes, numbers: of parameters, and for the hyperparameters.
        most_groups: so many at most.
        odd: some of what is drawn goes to stock; if False, all of it is served.
    """
    dtypes = draw(st.sampled_from([*((dtype,) for dtype in FLOATS), FLOATS, FLOATS]))
    drawn = st.lists(parameters(shapes, dtypes), max_size=4).map(tuple)
    groups = draw(st.lists(drawn, min_size=1, max_size=most_groups))
    if not any(groups):
        groups[0] = (Operand(shapes[0], dtypes[0]),)
    flat = [parameter for group in groups for parameter in group]
    seed = draw(st.integers(0, 10**6))
    steps = []
    for number in range(1, draw(st.integers(1, 4)) + 1):
        options = tuple(draw(sgd_options(sorted({p.dtype for p in group}, key=str), numbers)) for group in groups)
        if odd and draw(rarely(False, True)):
            options[0][draw(st.sampled_from(HYPERS))] = draw(st.sampled_from([1e39, math.inf, math.nan, True]))
        found = [draw(gradients(p, seed + 1000 * number + i, odd)) for i, p in enumerate(flat)]
        steps.append(SgdStep(options, tuple(found)))
    return SgdRun(tuple(groups), tuple(steps), threads=draw(st.sampled_from([1, 2])))


# For each target what the equivalence suite draws.
CASES: dict[str, Callable[[], st.SearchStrategy[Case]]] = {
    "smooth_l1_loss": lambda: loss_calls("smooth_l1_loss"),
    "huber_loss": lambda: loss_calls("huber_loss"),
    "sgd": lambda: sgd_runs(),
}
