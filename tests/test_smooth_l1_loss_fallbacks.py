"""Smooth L1 calls that stock serves: nothing about them changes, and each is counted once, with its reason.

The reasons of modes, tracers and transforms are those of test_smooth_l1_loss_transforms.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from _helpers import as_stock, outcome, served
from _smooth_l1_loss_helpers import TARGET, Case, by_every_caller, case, early, grads, pair
from torch._C._nn import smooth_l1_loss as early_builtin

import fastpatch
from fastpatch.targets import _loss

BFLOAT16, FLOAT16, FLOAT64 = torch.bfloat16, torch.float16, torch.float64


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


def autocast() -> Any:
    return torch.autocast("cpu")


def each(convert: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    return lambda: tuple(convert(t) for t in pair())


def first(convert: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    return lambda: (convert(pair()[0].detach()), pair()[1])


def of_dtypes(input: torch.dtype, target: torch.dtype) -> Callable[[], Any]:
    return lambda: (pair()[0].detach().to(input).requires_grad_(input.is_floating_point), pair()[1].to(target))


def with_beta(beta: Any, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    return lambda: (*(t.detach().to(dtype) for t in pair()), {"beta": beta})


def inference_pair() -> Any:
    with torch.inference_mode():
        return torch.ones(3), torch.zeros(3)


def dual_pair() -> Any:
    input, target = pair()
    return forward_ad.make_dual(input, target), target


def with_gaps(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([t, t], -1).to(dtype)[..., 0]


def shrunk() -> Any:
    input, target = (t.detach() for t in pair(4))
    input.untyped_storage().resize_(8)
    return input, target


INTEGERS = (torch.int64, torch.uint8, torch.bool)

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
    case("inference mode", "inference_mode", pair, context=torch.inference_mode),
    case("inference tensors", "inference_tensor", inference_pair),
    case("below autograd", "dispatch_state", pair, context=torch._C._AutoDispatchBelowAutograd),
    case("zero tensor", "dispatch_state", first(lambda t: torch._efficientzerotensor(t.shape))),
    case("dual tensor", "forward_ad", dual_pair, context=forward_ad.dual_level),
    case("meta", "device", each(lambda t: t.detach().to("meta"))),
    case("meta and CPU", "device", first(lambda t: t.to("meta"))),
    case("meta, to broadcast", "device", first(lambda t: t[0].to("meta"))),
    case("sparse", "layout", first(lambda t: t.to_sparse())),
    case("mkldnn", "layout", first(lambda t: t.to_mkldnn())),
    case("lazily negated", "lazy_negation", first(lambda t: torch.complex(t, t).conj().imag)),
    case("lazily conjugated", "lazy_negation", first(lambda t: torch.complex(t, t).conj())),
    case("complex", "complex", each(lambda t: torch.complex(t, t))),
    case("complex and real", "complex", first(lambda t: torch.complex(t, t))),
    *(case(str(d), "dtype", each(lambda t, d=d: t.detach().to(d))) for d in INTEGERS),
    *(case(f"float32 and {d}", "dtype", of_dtypes(torch.float32, d)) for d in (torch.bool, torch.uint16, FLOAT64)),
    *(case(f"{d} and float32", "dtype", of_dtypes(d, torch.float32)) for d in INTEGERS),
    *(case(f"float64 and {d}", "dtype", of_dtypes(FLOAT64, d)) for d in (torch.float32, BFLOAT16, FLOAT16)),
    *(case(f"autocast of {d}", "dtype", of_dtypes(d, FLOAT64), context=autocast) for d in (BFLOAT16, FLOAT16)),
    case("autocast of booleans", "dtype", of_dtypes(BFLOAT16, torch.bool), context=autocast),
    case("no broadcast", "shape_mismatch", lambda: (pair()[0], pair()[1][:3]), None),
    case("no broadcast of nothing", "shape_mismatch", lambda: (pair()[0], pair()[1][:0]), None),
    case("gaps in one that is cast", "strides", lambda: (with_gaps(pair()[0], BFLOAT16), pair()[1])),
    case("the other is cast", "strides", lambda: (pair()[0], with_gaps(pair()[1], FLOAT16))),
    case("expanded and cast", "strides", lambda: (pair()[0], pair()[1][:1].bfloat16().expand(4, 3))),
    case("broadcast and cast", "strides", lambda: (pair()[0], pair()[1][:1].bfloat16())),
    case("autocast of gaps", "strides", lambda: tuple(with_gaps(t, BFLOAT16) for t in pair()), context=autocast),
    case("freed storage", "storage", shrunk),
    *(case(f"beta {b!r}", "beta", with_beta(b), None) for b in (False, np.float32(0), np.int64(0), 0j)),
    *(case(f"beta {b!r}", "beta", with_beta(b)) for b in (True, "1", None, np.float32(0.5), np.int64(2), 1j)),
    *(case(f"beta {b!r}", "beta", with_beta(b)) for b in (-1, -0.5, float("nan"), -float("inf"))),
    *(case(f"beta {b!r}", "beta", with_beta(b)) for b in (5e-324, 1e-40, 1.1754943e-38, 2.3509886e-38)),
    *(case(f"beta {b!r} of {d}", "beta", with_beta(b, d)) for d in (BFLOAT16, FLOAT16) for b in (1e-40, 2.3e-38)),
    case("beta 4.45e-308 of float64", "beta", with_beta(4.45e-308, FLOAT64)),
    *(case(f"beta {b!r}", "beta", with_beta(b)) for b in (2**53 + 1, 10**30, 10**400)),
    *(case(f"beta {b!r}", "beta", with_beta(torch.tensor(b))) for b in ([0.5], -0.5, float("nan"), 1j)),
    case("beta that needs a gradient", "beta", with_beta(torch.tensor(0.5, requires_grad=True))),
    case("beta on another device", "beta", with_beta(torch.tensor(0.5, device="meta")), None),
    case("beta of zeros", "beta", with_beta(torch.zeros(1)), None),
    case("beta of two elements", "beta", with_beta(torch.ones(2)), None),
    *(
        case(
            f"{name}={value!r}", "legacy_arguments", lambda n=name, v=value: (*pair(), {n: v}), "fast", by_module=False
        )
        for name in ("size_average", "reduce")
        for value in (0, 1, "yes", np.bool_(False), torch.tensor(False))
    ),
]

# Stock reads what isn't there, or whatever comes behind it.
UNSAFE = ("storage",)

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module", autouse=True)
def _warmed_up() -> None:
    """Forward-mode AD loads its decompositions at its first call, and warns while it does."""
    with forward_ad.dual_level():
        outcome(lambda: F.smooth_l1_loss(*dual_pair()))


@by_every_caller([case for case in CASES if case.verdict not in UNSAFE])
def test_refused_call_is_stocks_and_counted_once(caller: str, case: Case) -> None:
    counted = case.counted(caller)

    as_stock(TARGET, lambda: case.call_by(caller), **counted)

    counted["fast"] += 1
    with served(TARGET, **counted), fastpatch.enabled(TARGET):
        outcome(lambda: case.call_by(caller))
        early(*pair())  # nothing of the refusal is left: this one is judged anew


def test_freed_storage_behind_an_early_reference() -> None:
    """The guard is seen only where it raises."""
    with served(TARGET), fastpatch.enabled(TARGET, strict=True), pytest.raises(fastpatch.FallbackError) as raised:
        early(*shrunk())
    assert raised.value.reason == "storage"


@cases
def test_strict_raises_with_the_reason(case: Case) -> None:
    with case.context(), served(TARGET):
        args, kwargs = case.make()
        with fastpatch.enabled(TARGET, strict=True), pytest.raises(fastpatch.FallbackError) as raised:
            F.smooth_l1_loss(*args, **kwargs)
    assert (raised.value.target, raised.value.reason) == (TARGET, case.verdict)
    assert case.verdict in str(raised.value)
    with served(TARGET, fast=1), fastpatch.enabled(TARGET, strict=True):
        F.smooth_l1_loss(*pair())


@cases
def test_explain_tells_the_reason_beforehand(case: Case) -> None:
    with case.context(), served(TARGET), fastpatch.enabled(TARGET):
        args, kwargs = case.make()
        explanation = fastpatch.explain(F.smooth_l1_loss, *args, **kwargs)
    assert (explanation.fast, explanation.reason) == (False, case.verdict)


BUILTIN_CASES: dict[str, tuple[str, Callable[[], tuple[Any, ...]]]] = {
    "no reduction": ("arguments", lambda: pair()),
    "reduction of another type": ("arguments", lambda: (*pair(), 1.0)),
    "no such reduction": ("arguments", lambda: (*pair(), 3)),
    "beta of zero": ("beta", lambda: (*pair(), 1, 0.0)),
    "a tensor of zero": ("beta", lambda: (*pair(), 1, torch.tensor(0.0))),
    "a negative beta": ("beta", lambda: (*pair(), 1, -1.0)),
    "another size": ("shape_mismatch", lambda: (pair()[0], pair()[1][:1], 1, 1.0)),
    "another dtype": ("dtype", lambda: (pair()[0], pair()[1].double(), 1, 1.0)),
    "gaps": ("strides", lambda: (pair()[0], with_gaps(pair()[1], BFLOAT16), 1, 1.0)),
}


@pytest.mark.parametrize("name", BUILTIN_CASES)
def test_builtin_refuses_what_only_the_function_before_it_knows(name: str) -> None:
    reason, make = BUILTIN_CASES[name]

    def call() -> Any:
        arguments = make()
        output = torch._C._nn.smooth_l1_loss(*arguments)
        return output, grads(output, arguments[0])

    as_stock(TARGET, call, fallback={reason: 1})
    with served(TARGET), fastpatch.enabled(TARGET, strict=True), pytest.raises(fastpatch.FallbackError) as raised:
        torch._C._nn.smooth_l1_loss(*make())
    assert raised.value.reason == reason
    with served(TARGET), fastpatch.enabled(TARGET, strict=True):
        outcome(lambda: early_builtin(*make()))  # was taken before it was patched, so nobody sees it


def test_a_function_with_other_warnings_than_we_know_is_left_to_stock() -> None:
    """Of a torch to come: what can't be said in its words isn't served."""
    with fastpatch.enabled(TARGET):
        from fastpatch import _native
    known = _loss._legacy_warning(early), _loss._size_warning(early)
    try:
        _native.loss_set_warnings(TARGET, None, None)
        as_stock(TARGET, lambda: F.smooth_l1_loss(*pair(), False), fallback={"legacy_arguments": 1})
        as_stock(TARGET, lambda: F.smooth_l1_loss(pair()[0], pair()[1][:1]), fallback={"shape_mismatch": 1})
    finally:
        _native.loss_set_warnings(TARGET, *known)
    as_stock(TARGET, lambda: F.smooth_l1_loss(pair()[0], pair()[1][:1], False), fast=1, strict=True)


@pytest.mark.parametrize("caller", ["functional", "early"])
def test_what_cannot_be_broadcast_is_warned_of_first(caller: str) -> None:
    case = next(case for case in CASES if case.name == "no broadcast")
    result = as_stock(TARGET, lambda: case.call_by(caller), **case.counted(caller))
    assert result.error is not None
    assert [category for category, *_ in result.warned] == [UserWarning]
