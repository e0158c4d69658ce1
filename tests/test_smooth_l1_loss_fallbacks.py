"""Smooth L1 calls that stock serves: nothing about them changes, and each is counted once, with its reason."""

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
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from _helpers import as_stock, outcome, served
from torch.nn.functional import smooth_l1_loss as early

import fastpatch

TARGET = "smooth_l1_loss"
early_partial = functools.partial(early)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def pair(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An input that needs a gradient, and a target."""
    sizes = sizes or (4, 3)
    n = int(np.prod(sizes))
    return torch.linspace(-2, 3, n).view(sizes).requires_grad_(), torch.linspace(1, -1, n).cos().view(sizes)


class Plain(torch.Tensor):
    """A subclass without a __torch_function__ of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class SubParameter(torch.nn.Parameter):
    pass


class Duck:
    """Not a tensor; tells what it was asked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func == early
        assert func in {early: None}
        return "quack", [t.__name__ for t in types], len(args), kwargs


@dataclass(frozen=True)
class Case:
    """One kind of call. ``inner`` is what a reference to F.smooth_l1_loss taken before patching comes to: a reason,
    "fast", or None where stock's Python code never reaches the inner patch point."""

    name: str
    reason: str
    make: Callable[[], Arguments]
    inner: str | None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    by_module: bool = True  # can nn.SmoothL1Loss make such a call?


SAME = "as outer"


def case(name: str, reason: str, make: Callable[[], Any], inner: str | None = SAME, **more: Any) -> Case:
    def arguments() -> Arguments:
        made = make()
        return (made[:-1], made[-1]) if made and isinstance(made[-1], dict) else (made, {})

    return Case(name, reason, arguments, reason if inner == SAME else inner, **more)


def each(convert: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    return lambda: tuple(convert(t) for t in pair())


def first(convert: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    return lambda: (convert(pair()[0].detach()), pair()[1])


def with_beta(beta: Any) -> Callable[[], Any]:
    return lambda: (*pair(), {"beta": beta})


def inference_pair() -> Any:
    with torch.inference_mode():
        return torch.ones(3), torch.zeros(3)


def dual_pair() -> Any:
    input, target = pair()
    return forward_ad.make_dual(input, target), target


CASES = [
    case("no arguments", "arguments", lambda: (), None, by_module=False),
    case("one argument", "arguments", lambda: pair()[:1], None, by_module=False),
    case("unknown name", "arguments", lambda: (*pair(), {"gamma": 1.0}), None, by_module=False),
    case("given twice", "arguments", lambda: (*pair(), {"target": pair()[1]}), None, by_module=False),
    case("too many", "arguments", lambda: (*pair(), None, None, "sum", 1.0, 2.0), None, by_module=False),
    case("a list", "arguments", lambda: ([1.0], pair()[1]), None),
    case("an array", "arguments", lambda: (pair()[0], np.ones((4, 3), np.float32)), None),
    case("None", "arguments", lambda: (None, pair()[1]), None),
    *(
        case(f"reduction {r!r}", "arguments", lambda r=r: (*pair(), {"reduction": r}), None)
        for r in ("Mean", "", 1, None)
    ),
    case("elementwise_mean", "arguments", lambda: (*pair(), {"reduction": "elementwise_mean"}), "fast"),
    case("duck input", "torch_function", lambda: (Duck(), pair()[1]), None),
    case("duck target", "torch_function", lambda: (pair()[0], Duck(), {"beta": 0.5}), None),
    case("plain subclass", "subclass", first(lambda t: t.as_subclass(Plain))),
    case("subclass of Parameter", "subclass", first(SubParameter)),
    case("inference mode", "inference_mode", lambda: pair(), context=torch.inference_mode),
    case("inference tensors", "inference_tensor", inference_pair),
    case("below autograd", "dispatch_state", lambda: pair(), context=torch._C._AutoDispatchBelowAutograd),
    case("zero tensor", "dispatch_state", first(lambda t: torch._efficientzerotensor(t.shape))),
    case("dual tensor", "forward_ad", dual_pair, context=forward_ad.dual_level),
    case("meta", "device", each(lambda t: t.detach().to("meta"))),
    case("meta and CPU", "device", first(lambda t: t.to("meta"))),
    case("sparse", "layout", first(lambda t: t.to_sparse())),
    case("mkldnn", "layout", first(lambda t: t.to_mkldnn())),
    case("lazily negated", "lazy_negation", first(lambda t: torch.complex(t, t).conj().imag)),
    case("lazily conjugated", "lazy_negation", first(lambda t: torch.complex(t, t).conj())),
    case("complex", "complex", each(lambda t: torch.complex(t, t))),
    *(case(str(d), "dtype", each(lambda t, d=d: t.to(d))) for d in (torch.float64, torch.bfloat16, torch.float16)),
    *(case(str(d), "dtype", each(lambda t, d=d: t.to(d))) for d in (torch.int64, torch.bool)),
    case("mixed dtypes", "dtype", lambda: (pair()[0], pair()[1].double())),
    case("autocast of bfloat16", "dtype", first(lambda t: t.bfloat16()), context=lambda: torch.autocast("cpu")),
    case("broadcast", "shape_mismatch", lambda: (pair()[0], pair()[1][:1]), "strides"),
    case("no broadcast", "shape_mismatch", lambda: (pair()[0], pair()[1][:3]), None),
    case("expanded", "strides", lambda: (pair()[0], pair()[1][:1].expand(4, 3))),
    case("overlapping", "strides", first(lambda t: t.reshape(-1).as_strided((4, 3), (1, 1)))),
    case("gaps", "strides", lambda: (pair(4, 6)[0][:, ::2], pair()[1])),
    case("gaps alike", "strides", lambda: tuple(t[:, ::2] for t in pair(4, 6))),
    case("another order", "strides", lambda: (pair(4, 3)[0], pair(3, 4)[1].t())),
    case("no elements", "empty", lambda: pair(0, 3)),
    case("no elements, sum", "empty", lambda: (*pair(0), {"reduction": "sum"})),
    *(case(f"beta {b!r}", "beta", with_beta(b), None) for b in (0, 0.0, -0.0, False)),
    *(case(f"beta {b!r}", "beta", with_beta(b)) for b in (True, "1", None, np.float32(0.5), np.int64(2))),
    *(case(f"beta {b!r}", "beta", with_beta(b)) for b in (-1, -0.5, float("nan"), float("inf"), -float("inf"))),
    *(case(f"beta {b!r}", "beta", with_beta(b)) for b in (5e-324, 1e-40, 1.1754943e-38, 2.3e-38, 3.41e38, 1e300)),
    *(case(f"beta {b!r}", "beta", with_beta(b)) for b in (2**53 + 1, 10**30, 10**400)),
    *(case(f"beta {b!r}", "beta", with_beta(b)) for b in (torch.tensor(0.5), torch.tensor([0.5]), 1j)),
    case("beta of two elements", "beta", with_beta(torch.ones(2)), None),
    case("size_average", "legacy_arguments", lambda: (*pair(), False), "fast", by_module=False),
    case("reduce", "legacy_arguments", lambda: (*pair(), {"reduce": False, "beta": 0.3}), "fast", by_module=False),
]

CALLERS: dict[str, Callable[..., Any]] = {
    "functional": lambda *args, **kwargs: F.smooth_l1_loss(*args, **kwargs),
    "partial": lambda *args, **kwargs: functools.partial(F.smooth_l1_loss)(*args, **kwargs),
    "module": lambda *args, **kwargs: torch.nn.SmoothL1Loss(**kwargs)(*args),
    "early": lambda *args, **kwargs: early(*args, **kwargs),
    "early partial": lambda *args, **kwargs: early_partial(*args, **kwargs),
}

CASES_OF_ONE_NUMBER = [
    case("broadcast a number", "shape_mismatch", lambda: (pair()[0], torch.tensor(0.5)), "strides"),
    case("an expanded number", "strides", lambda: (pair()[0], torch.tensor(0.5).expand(4, 3))),
]

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module", autouse=True)
def _warmed_up() -> None:
    """Forward-mode AD loads its decompositions at its first call, and warns while it does."""
    with forward_ad.dual_level():
        outcome(lambda: F.smooth_l1_loss(*dual_pair()))


def with_gradients(output: Any, leaves: tuple[Any, ...]) -> Any:
    leaves = tuple(t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf)
    if type(output) is not torch.Tensor or not output.requires_grad or not leaves:
        return output
    grad = torch.linspace(1, -2, output.numel(), dtype=output.real.dtype).view(output.shape).to(output.dtype)
    return output, torch.autograd.grad(output, leaves, grad)


def call_by(caller: str, case: Case) -> Any:
    with case.context():
        args, kwargs = case.make()
        return with_gradients(CALLERS[caller](*args, **kwargs), args)


calls = pytest.mark.parametrize(
    ("caller", "case"),
    [
        pytest.param(caller, case, id=f"{caller}, {case.name}")
        for case in CASES
        for caller in CALLERS
        if case.by_module or caller != "module"
    ],
)


@calls
def test_refused_call_is_stocks_and_counted_once(caller: str, case: Case) -> None:
    verdict = case.inner if caller.startswith("early") else case.reason
    fast, fallback = int(verdict == "fast"), {} if verdict in (None, "fast") else {verdict: 1}

    as_stock(TARGET, lambda: call_by(caller, case), fast=fast, fallback=fallback)

    with served(TARGET, fast=fast + 1, fallback=fallback), fastpatch.enabled(TARGET):
        outcome(lambda: call_by(caller, case))
        early(*pair())  # nothing of the refusal is left: this one is judged anew


@pytest.mark.parametrize("case", CASES_OF_ONE_NUMBER, ids=lambda case: case.name)
def test_expanded_number_is_refused_for_its_strides(case: Case) -> None:
    as_stock(TARGET, lambda: call_by("early", case), fallback={"strides": 1})


def test_freed_storage_behind_an_early_reference() -> None:
    """Stock reads there; the guard is seen only where it raises."""
    input, target = torch.ones(4), torch.ones(4)
    input.untyped_storage().resize_(8)
    with served(TARGET), fastpatch.enabled(TARGET, strict=True), pytest.raises(fastpatch.FallbackError) as raised:
        early(input, target)
    assert raised.value.reason == "storage"


@cases
def test_strict_raises_with_the_reason(case: Case) -> None:
    with case.context(), served(TARGET):
        args, kwargs = case.make()
        with fastpatch.enabled(TARGET, strict=True), pytest.raises(fastpatch.FallbackError) as raised:
            F.smooth_l1_loss(*args, **kwargs)
    assert (raised.value.target, raised.value.reason) == (TARGET, case.reason)
    assert case.reason in str(raised.value)
    with served(TARGET, fast=1), fastpatch.enabled(TARGET, strict=True):
        F.smooth_l1_loss(*pair())


@cases
def test_explain_tells_the_reason_beforehand(case: Case) -> None:
    with case.context(), served(TARGET), fastpatch.enabled(TARGET):
        args, kwargs = case.make()
        explanation = fastpatch.explain(F.smooth_l1_loss, *args, **kwargs)
    assert (explanation.fast, explanation.reason) == (False, case.reason)


@pytest.mark.parametrize(
    ("caller", "here"), [("functional", True), ("partial", True), ("early", True), ("module", False)]
)
def test_warning_names_the_line_of_the_call(caller: str, here: bool) -> None:
    def call() -> Any:
        return CALLERS[caller](pair()[0], pair()[1][:1])

    inner = caller == "early"
    ((category, text, file, line),) = as_stock(
        TARGET, call, fallback={"strides" if inner else "shape_mismatch": 1}
    ).warned
    assert category is UserWarning
    assert text.startswith("Using a target size (torch.Size([1, 3])) that is different to the input size")
    if here:
        assert (file, line) == (__file__, CALLERS[caller].__code__.co_firstlineno)


def test_warning_as_an_exception() -> None:
    def call() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            F.smooth_l1_loss(pair()[0], pair()[1][:1])

    assert as_stock(TARGET, call, fallback={"shape_mismatch": 1}).error is not None


def test_autocast_of_float32_is_served() -> None:
    def call() -> Any:
        input, target = pair()
        with torch.autocast("cpu"):
            output = F.smooth_l1_loss(input, target)
            with torch.autocast("cpu", enabled=False):
                second = F.smooth_l1_loss(input, target, reduction="none")
            output.backward()
        return output, second, input.grad

    as_stock(TARGET, call, fast=2, strict=True)


def test_copy_on_write_is_served_and_copies_nothing() -> None:
    def call() -> Any:
        lazy = torch._lazy_clone(pair()[1])
        output = F.smooth_l1_loss(pair()[0], lazy)
        output.backward()
        return output, torch._C._is_cow_tensor(lazy)

    assert as_stock(TARGET, call, fast=1, strict=True).value[1] is True


def test_parameters_and_buffers_are_served() -> None:
    def call() -> Any:
        input, target = torch.nn.Parameter(pair()[0].detach()), torch.nn.Buffer(pair()[1])
        F.smooth_l1_loss(input, target).backward()
        return input.grad

    as_stock(TARGET, call, fast=1, strict=True)
