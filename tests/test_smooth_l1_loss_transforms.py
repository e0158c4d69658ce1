"""Smooth L1 under what changes the meaning of a call: overrides, modes, function transforms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _helpers import as_stock, assert_same, counts, served
from _smooth_l1_loss_helpers import TARGET, both_ways, each_dtype, early, loss_of, plain_pair
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastpatch

noisy = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Passing, lambda: torch.device("cpu")], ids=["own", "torch.device"])
@both_ways
def test_torch_function_mode(mode: Callable[[], AbstractContextManager[Any]], way: str) -> None:
    """The mode gets the call, unjudged, and calls the patch point again from inside."""

    def call() -> Any:
        input, target = plain_pair()
        with mode():
            return loss_of(way)(input.requires_grad_(), target, reduction="sum")

    as_stock(TARGET, call, fast=1)


@both_ways
def test_torch_function_mode_is_whom_a_warning_names(way: str) -> None:
    def call() -> Any:
        input, target = plain_pair()
        with Passing():
            return loss_of(way)(input, target[:1])

    ((_, text, file, line),) = as_stock(TARGET, call, fast=1).warned
    assert text.startswith("Using a target size")
    assert (file, line) == (__file__, Passing.__torch_function__.__code__.co_firstlineno + 1)


def test_torch_function_mode_and_strict() -> None:
    strict = fastpatch.enabled(TARGET, strict=True)
    with served(TARGET, fast=1), strict, Passing():
        F.smooth_l1_loss(*plain_pair())


class Counting(torch.Tensor):
    """A subclass that takes part in __torch_function__ as torch.Tensor's own implementation has it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == early:
            Counting.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@both_ways
def test_subclass_is_refused_once_at_each_call(way: str) -> None:
    """Its __torch_function__ calls F.smooth_l1_loss a second time, with overrides off."""

    def call() -> Any:
        input, target = plain_pair()
        return loss_of(way)(input.as_subclass(Counting), target).as_subclass(torch.Tensor)

    as_stock(TARGET, call, fallback={"subclass": 1} | ({} if way == "early" else {"torch_function": 1}))


@both_ways
def test_subclass_is_asked_once_and_gets_stocks_value(way: str) -> None:
    input, target = plain_pair()
    Counting.calls = 0
    expected = early(input.as_subclass(Counting), target)
    fast = counts()[TARGET]["fast"]
    with fastpatch.enabled(TARGET):
        actual = loss_of(way)(input.as_subclass(Counting), target)
    assert Counting.calls == 2
    assert counts()[TARGET]["fast"] == fast
    assert_same(actual, expected)


def test_user_code_that_a_mode_runs_is_judged_anew() -> None:
    input, target = plain_pair()

    class Calling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func == early:
                early(input, target)
            return func(*args, **(kwargs or {}))

    with served(TARGET, fast=1, fallback={"beta": 1}), fastpatch.enabled(TARGET), Calling():
        F.smooth_l1_loss(input, target, beta=True)


class Watching(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@both_ways
@each_dtype
def test_dispatch_mode(way: str, dtype: torch.dtype) -> None:
    def call() -> Any:
        input, target = plain_pair(dtype)
        with Watching() as mode:
            output = loss_of(way)(input.requires_grad_(), target)
            output.backward()
        return mode.seen, output, input.grad

    assert "aten.smooth_l1_loss.default" in as_stock(TARGET, call, fallback={"dispatch_mode": 1}).value[0]


@both_ways
@pytest.mark.parametrize("kind", ["broadcast", "beta 0"])
def test_dispatch_mode_sees_all_of_stocks_operators(way: str, kind: str) -> None:
    def call() -> Any:
        input, target = plain_pair()
        with Watching() as mode:
            if kind == "beta 0":
                return mode.seen, loss_of(way)(input, target, beta=0)
            return mode.seen, loss_of(way)(input, target[:1])

    seen = as_stock(TARGET, call, fallback={} if (way, kind) == ("early", "beta 0") else {"dispatch_mode": 1}).value[0]
    assert {"broadcast": "aten.expand.default", "beta 0": "aten.sub.Tensor"}[kind] in seen


def test_backward_under_a_dispatch_mode_shows_stocks_operators() -> None:
    def call() -> Any:
        input, target = plain_pair()
        output = F.smooth_l1_loss(input.requires_grad_(), target)
        with Watching() as mode:
            output.backward()
        return mode.seen, input.grad

    assert "aten.smooth_l1_loss_backward.default" in as_stock(TARGET, call, fast=1, strict=True).value[0]


@both_ways
@pytest.mark.parametrize("real", [False, True])
def test_fake_tensors(way: str, real: bool) -> None:
    def call() -> Any:
        operands = plain_pair()
        with FakeTensorMode(allow_non_fake_inputs=real):
            output = loss_of(way)(*(operands if real else plain_pair()), reduction="none")
        return type(output), output.shape, output.stride(), output.dtype

    as_stock(TARGET, call, fallback={"dispatch_mode" if real else "subclass": 1})


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "vmap": lambda loss, a, b: torch.vmap(loss)(a, b),
    "vmap over one": lambda loss, a, b: torch.vmap(loss, in_dims=(0, None))(a, b[0]),
    "grad": lambda loss, a, b: torch.func.grad(loss)(a, b),
    "grad_and_value": lambda loss, a, b: torch.func.grad_and_value(loss, argnums=1)(a, b),
    "grad of grad": lambda loss, a, b: torch.func.grad(lambda x: torch.func.grad(loss)(x, b).pow(2).sum())(a),
    "grad under vmap": lambda loss, a, b: torch.vmap(torch.func.grad(loss))(a, b),
    "vjp": lambda loss, a, b: torch.func.vjp(loss, a, b)[1](torch.tensor(0.3)),
    "jvp": lambda loss, a, b: torch.func.jvp(loss, (a, b), (b, a)),
    "functionalize": lambda loss, a, b: torch.func.functionalize(loss)(a, b),
}


@noisy
@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms(name: str, dtype: torch.dtype, way: str) -> None:
    TRANSFORMS[name](early, *plain_pair(dtype))  # whatever it warns of and loads, it does once
    as_stock(TARGET, lambda: TRANSFORMS[name](loss_of(way), *plain_pair(dtype)), fallback={"functorch": 1})


@noisy
@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms_with_a_beta_of_zero(name: str) -> None:
    def zero(*args: Any) -> torch.Tensor:
        return F.smooth_l1_loss(*args, beta=0.0)

    TRANSFORMS[name](zero, *plain_pair())
    as_stock(TARGET, lambda: TRANSFORMS[name](zero, *plain_pair()), fallback={"functorch": 1})


def test_tensor_of_an_outer_transform_is_refused_outside_of_it() -> None:
    kept = []
    torch.vmap(lambda x: kept.append(x) or x)(plain_pair()[0])
    with served(TARGET), fastpatch.enabled(TARGET):
        assert fastpatch.explain(F.smooth_l1_loss, kept[0], kept[0]).reason == "functorch"
