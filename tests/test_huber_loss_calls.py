"""Huber, however it is called: what is served, and what stock serves, counted once with its reason. Nothing else about
a call changes: exceptions, warnings and their lines, weights, graphs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _helpers import as_stock, outcome, served
from torch.nn.functional import huber_loss as early

import fastpatch

TARGET = "huber_loss"
early_partial = functools.partial(early)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def pair(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An input that needs a gradient, and a target."""
    sizes = sizes or (4, 3)
    n = int(np.prod(sizes))
    return torch.linspace(-2, 3, n).view(sizes).requires_grad_(), torch.linspace(1, -1, n).cos().view(sizes)


def weight(*sizes: int) -> torch.Tensor:
    sizes = sizes or (4, 3)
    return torch.linspace(0.1, 2, int(np.prod(sizes))).view(sizes).requires_grad_()


class Plain(torch.Tensor):
    """A subclass without a __torch_function__ of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Overrides(torch.Tensor):
    """torch.Tensor's own __torch_function__ applies."""


class Duck:
    """Not a tensor; tells what it was asked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func == early
        return "quack", [t.__name__ for t in types], len(args), list(kwargs)


class Module(torch.nn.HuberLoss):
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input, target)


def module(cls: type[torch.nn.HuberLoss], delta: Any = 1.0, **kwargs: Any) -> torch.nn.HuberLoss:
    made = cls(**kwargs)
    made.delta = delta  # its constructor doesn't take every delta
    return made


CALLERS: dict[str, Callable[..., Any]] = {
    "functional": lambda *args, **kwargs: F.huber_loss(*args, **kwargs),
    "partial": lambda *args, **kwargs: functools.partial(F.huber_loss, **kwargs)(*args),
    "module": lambda *args, **kwargs: module(torch.nn.HuberLoss, **kwargs)(*args),
    "submodule": lambda *args, **kwargs: module(Module, **kwargs)(*args),
    "early": lambda *args, **kwargs: early(*args, **kwargs),
    "early partial": lambda *args, **kwargs: early_partial(*args, **kwargs),
}


@dataclass(frozen=True)
class Case:
    """One kind of call, and what is counted for it: a reason, or "fast". ``inner`` is that for a reference to
    F.huber_loss taken before patching, None where torch's own function raises before it reaches anything patched."""

    name: str
    verdict: str
    make: Callable[[], Arguments]
    inner: str | None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    by_module: bool = True  # can nn.HuberLoss make such a call?

    def counted(self, caller: str) -> dict[str, Any]:
        verdict = self.inner if caller.startswith("early") else self.verdict
        return {"fast": int(verdict == "fast"), "fallback": {} if verdict in (None, "fast") else {verdict: 1}}

    def call_by(self, caller: str) -> Any:
        """The result, its graph, and the gradients of all arguments that need one."""
        with self.context():
            args, kwargs = self.make()
            output = CALLERS[caller](*args, **kwargs)
            leaves = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
            if type(output) is not torch.Tensor or not output.requires_grad:
                return output
            graph = [type(node).__name__ for node in (output.grad_fn, *(n for n, _ in output.grad_fn.next_functions))]
            grad = torch.linspace(1, -2, output.numel()).view(output.shape).to(output.dtype)
            return output, graph, torch.autograd.grad(output, leaves, grad)


SAME = "as verdict"


def case(name: str, verdict: str, make: Callable[[], Any], inner: str | None = SAME, **more: Any) -> Case:
    """``make`` returns the positional arguments, and a dictionary of the named ones last."""

    def arguments() -> Arguments:
        made = make()
        return (made[:-1], made[-1]) if made and isinstance(made[-1], dict) else (made, {})

    return Case(name, verdict, arguments, verdict if inner == SAME else inner, **more)


def each(convert: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    return lambda: tuple(convert(t) for t in pair())


def first(convert: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    return lambda: (convert(pair()[0].detach()), pair()[1])


def with_delta(delta: Any) -> Callable[[], Any]:
    return lambda: (*pair(), {"delta": delta, "reduction": "sum"})


NUMBERS = (0.3, 2, 2**53, np.float64(0.3), float("inf"), 1e300, 2.36e-38)
TENSORS = [torch.tensor(0.3, dtype=d) for d in (torch.float32, torch.float64, torch.bfloat16)] + [torch.tensor(2)]
NOT_POSITIVE = (0, 0.0, -0.0, -1, -0.5, float("nan"), -float("inf"), torch.tensor(0.0), torch.tensor(-1.0))
TOO_SMALL_OR_ODD = (5e-324, 1e-40, 2.3e-38, 2**53 + 1, 10**400, True, "1", None, np.float32(0.5), 1j)
ODD_TENSORS = (torch.tensor([0.5]), torch.ones(2), torch.tensor(0.5, requires_grad=True), torch.tensor(1j))

SERVED = [
    case("defaults", "fast", pair),
    case("no dimensions", "fast", lambda: (torch.tensor(0.5, requires_grad=True), torch.tensor(3.0))),
    case("positional", "fast", lambda: (*pair(), "sum", 0.3, None), by_module=False),
    case("named", "fast", lambda: ({"delta": 0.3, "target": pair()[1], "input": pair()[0]},), by_module=False),
    *(case(f"delta {d!r}", "fast", with_delta(d)) for d in NUMBERS),
    *(case(f"delta {d!r}", "fast", with_delta(d)) for d in TENSORS),
    *(case(f"reduction {r}", "fast", lambda r=r: (*pair(), {"reduction": r})) for r in ("none", "mean", "sum")),
    *(case(str(d), "fast", each(lambda t, d=d: t.to(d))) for d in (torch.float64, torch.bfloat16, torch.float16)),
    case("broadcast target", "fast", lambda: (pair()[0], pair()[1][:1], {"reduction": "none"})),
    case("broadcast a number", "fast", lambda: (pair()[0], torch.tensor(0.5, requires_grad=True))),
    case("expanded target", "fast", lambda: (pair()[0], pair()[1][:1].expand(4, 3))),
    case("integers", "fast", lambda: (pair()[0], pair()[1].long())),  # whose backward raises
    case("another order", "fast", lambda: (pair()[0], pair(3, 4)[1].t(), {"reduction": "none"})),
    case("target with gaps", "fast", lambda: (pair()[0], pair(4, 6)[1][:, ::2])),
    case("autocast", "fast", lambda: (pair()[0], pair()[1].half()), context=lambda: torch.autocast("cpu")),
]

REFUSED = [
    case("no arguments", "arguments", lambda: (), None, by_module=False),
    case("unknown name", "arguments", lambda: (*pair(), {"beta": 1.0}), None, by_module=False),
    case("too many", "arguments", lambda: (*pair(), "sum", 1.0, None, 2.0), None, by_module=False),
    case("a list", "arguments", lambda: ([1.0], pair()[1]), None),
    *(case(f"reduction {r!r}", "arguments", lambda r=r: (*pair(), {"reduction": r}), None) for r in ("Mean", 1, None)),
    case("plain subclass", "subclass", first(lambda t: t.as_subclass(Plain))),
    case("inference mode", "inference_mode", pair, context=torch.inference_mode),
    case("meta", "device", each(lambda t: t.detach().to("meta"))),
    case("sparse", "layout", first(lambda t: t.to_sparse())),
    case("lazily negated", "lazy_negation", first(lambda t: torch.complex(t, t).conj().imag)),
    case("complex", "complex", each(lambda t: torch.complex(t, t))),
    case("booleans", "dtype", lambda: (pair()[0], pair()[1].bool())),
    case("integers as input", "dtype", lambda: (pair()[0].detach().long(), pair()[1])),
    case("half target", "dtype", lambda: (pair()[0].detach(), pair()[1].half())),
    case("double target", "dtype", lambda: (pair()[0].detach(), pair()[1].double())),
    case("mixed gradient", "dtype", lambda: (pair()[0], pair()[1].bfloat16())),
    case("no broadcast", "shape_mismatch", lambda: (pair()[0], pair()[1][:3]), None),
    case("broadcast input", "strides", lambda: (pair(3)[0], pair()[1])),
    case("broadcast both", "strides", lambda: (pair(3)[0], pair(4, 1)[1])),
    case("expanded input", "strides", lambda: (pair(1, 3)[0].expand(4, 3), pair()[1])),
    case("input with gaps", "strides", lambda: (pair(4, 6)[0][:, ::2], pair()[1])),
    *(case(f"delta {d!r}", "delta", with_delta(d)) for d in (*NOT_POSITIVE, *TOO_SMALL_OR_ODD, *ODD_TENSORS)),
]


def weighted(name: str, given: Any, inner: str | None, verdict: str = "weight", **more: Any) -> Case:
    def arguments() -> Any:
        return (*pair(), {"weight": given() if callable(given) else given, "delta": 0.3, **more})

    return case(name, verdict, arguments, inner, by_module=False)


# torch's own function weighs what its builtin gives without reduction.
WEIGHTED = [
    *(weighted(f"weight, {r}", weight, "fast", reduction=r) for r in ("none", "mean", "sum", "average")),
    weighted("weight of another dtype", lambda: weight().detach().double().requires_grad_(), "fast"),
    weighted("strided weight", lambda: weight(3, 4).detach().t().requires_grad_(), "fast"),
    weighted("integers as weight", torch.ones(4, 3, dtype=torch.int64), "fast"),
    weighted("weight of a wrong size", lambda: weight(4, 1), None),
    weighted("weight and a delta of zero", weight, "delta", delta=0.0),
    weighted("a number as weight", 2.0, None, "arguments"),
    weighted("plain subclass as weight", lambda: weight().detach().as_subclass(Plain), "fast", "subclass"),
    case("positional weight", "weight", lambda: (*pair(), "sum", 0.3, weight()), "fast", by_module=False),
    case("weight, broadcast", "weight", lambda: (pair()[0], pair(3)[1], "sum", 0.3, weight()), "fast", by_module=False),
]

ALL = [*SERVED, *REFUSED, *WEIGHTED]
cases = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
refused = pytest.mark.parametrize("case", [*REFUSED, *WEIGHTED], ids=lambda case: case.name)


@pytest.mark.parametrize(
    ("caller", "case"),
    [
        pytest.param(caller, case, id=f"{caller}, {case.name}")
        for case in ALL
        for caller in CALLERS
        if case.by_module or not caller.endswith("module")
    ],
)
def test_a_call_is_stocks_and_counted_once(caller: str, case: Case) -> None:
    as_stock(TARGET, lambda: case.call_by(caller), **case.counted(caller))

    counted = case.counted(caller)
    with served(TARGET, fast=counted["fast"] + 1, fallback=counted["fallback"]), fastpatch.enabled(TARGET):
        outcome(lambda: case.call_by(caller))
        early(*pair())  # nothing of a refusal is left: this one is judged anew


@refused
def test_strict_raises_with_the_reason(case: Case) -> None:
    with case.context(), served(TARGET):
        args, kwargs = case.make()
        with fastpatch.enabled(TARGET, strict=True), pytest.raises(fastpatch.FallbackError) as raised:
            F.huber_loss(*args, **kwargs)
    assert (raised.value.target, raised.value.reason) == (TARGET, case.verdict)
    assert case.verdict in str(raised.value)
    with served(TARGET, fast=1), fastpatch.enabled(TARGET, strict=True):
        F.huber_loss(*pair())


@cases
def test_explain_tells_beforehand(case: Case) -> None:
    with case.context(), served(TARGET), fastpatch.enabled(TARGET):
        args, kwargs = case.make()
        explanation = fastpatch.explain(F.huber_loss, *args, **kwargs)
    assert (explanation.fast, explanation.reason or "fast") == (case.verdict == "fast", case.verdict)


@pytest.mark.parametrize("delta", [0.3, 2, torch.tensor(0.3)])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_builtin_by_itself(reduction: int, delta: Any) -> None:
    as_stock(TARGET, lambda: torch._C._nn.huber_loss(*pair(), reduction, delta), fast=1, strict=True)


def test_operator_is_no_patch_point() -> None:
    as_stock(TARGET, lambda: torch.ops.aten.huber_loss(*pair(), 1, 0.3))


@pytest.mark.parametrize("caller", ["functional", "partial"])
@pytest.mark.parametrize("place", ["input", "target", "weight"])
def test_whoever_overrides_the_function_is_asked(caller: str, place: str) -> None:
    def call() -> Any:
        input, target = pair()
        arguments = {"input": input, "target": target, "delta": 0.3, place: Duck()}
        return CALLERS[caller](arguments.pop("input"), **arguments)

    assert as_stock(TARGET, call, fallback={"torch_function": 1}).value[0] == "quack"


@pytest.mark.parametrize("caller", ["functional", "early"])
def test_weight_of_a_subclass_is_refused_at_each_call(caller: str) -> None:
    """Its __torch_function__ calls F.huber_loss a second time, with overrides off."""

    def call() -> Any:
        return CALLERS[caller](*pair(), weight=weight().detach().as_subclass(Overrides)).as_subclass(torch.Tensor)

    as_stock(TARGET, call, fallback={"subclass": 1} | ({} if caller == "early" else {"torch_function": 1}))


@pytest.mark.parametrize(
    ("caller", "weighted"),
    [(caller, weighted) for caller in CALLERS for weighted in (False, True) if not (weighted and "module" in caller)],
)
def test_warning_names_the_line_of_the_call(caller: str, weighted: bool) -> None:
    def call() -> Any:
        return CALLERS[caller](pair()[0], pair()[1][:1], **({"weight": weight()} if weighted else {}))

    refused = weighted and not caller.startswith("early")
    counted: dict[str, Any] = {"fallback": {"weight": 1}} if refused else {"fast": 1}
    ((category, text, file, line),) = as_stock(TARGET, call, **counted).warned
    assert category is UserWarning
    assert text.startswith("Using a target size (torch.Size([1, 3])) that is different to the input size")
    if "module" not in caller:
        assert (file, line) == (__file__, CALLERS[caller].__code__.co_firstlineno)


def test_warning_as_an_exception() -> None:
    def call() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            F.huber_loss(pair()[0], pair()[1][:1])

    # A call that didn't end isn't counted.
    assert as_stock(TARGET, call).error[0] is UserWarning
