"""Smooth L1 under what changes the meaning of a call: overrides, modes, tracers, compilers, function transforms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _helpers import as_stock, assert_same, counts, served
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import smooth_l1_loss as early
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastpatch

TARGET = "smooth_l1_loss"

both_ways = pytest.mark.parametrize("way", ["patched", "early"])
noisy = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


def loss_of(way: str) -> Callable[..., torch.Tensor]:
    """F.smooth_l1_loss as it is when it's called, or as it was taken before it was patched."""
    return early if way == "early" else lambda *args, **kwargs: F.smooth_l1_loss(*args, **kwargs)


def pair(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = sizes or (4, 3)
    n = int(np.prod(sizes))
    return torch.linspace(-2, 3, n).view(sizes), torch.linspace(1, -1, n).cos().view(sizes)


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Passing, lambda: torch.device("cpu")], ids=["own", "torch.device"])
@both_ways
def test_torch_function_mode(mode: Callable[[], AbstractContextManager[Any]], way: str) -> None:
    """The mode gets the call, unjudged, and calls the patch point again from inside."""

    def call() -> Any:
        input, target = pair()
        with mode():
            return loss_of(way)(input.requires_grad_(), target, reduction="sum")

    as_stock(TARGET, call, fast=1)


def test_torch_function_mode_and_strict() -> None:
    strict = fastpatch.enabled(TARGET, strict=True)
    with served(TARGET, fast=1), strict, Passing():
        F.smooth_l1_loss(*pair())


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
        input, target = pair()
        return loss_of(way)(input.as_subclass(Counting), target).as_subclass(torch.Tensor)

    as_stock(TARGET, call, fallback={"subclass": 1} | ({} if way == "early" else {"torch_function": 1}))


@both_ways
def test_subclass_is_asked_once_and_gets_stocks_value(way: str) -> None:
    input, target = pair()
    Counting.calls = 0
    expected = early(input.as_subclass(Counting), target)
    fast = counts()[TARGET]["fast"]
    with fastpatch.enabled(TARGET):
        actual = loss_of(way)(input.as_subclass(Counting), target)
    assert Counting.calls == 2
    assert counts()[TARGET]["fast"] == fast
    assert_same(actual, expected)


def test_user_code_that_a_mode_runs_is_judged_anew() -> None:
    input, target = pair()

    class Calling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func == early:
                early(input, target)
            return func(*args, **(kwargs or {}))

    with served(TARGET, fast=1, fallback={"beta": 1}), fastpatch.enabled(TARGET), Calling():
        F.smooth_l1_loss(input, target, beta=np.float32(0.5))


class Watching(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@both_ways
def test_dispatch_mode(way: str) -> None:
    def call() -> Any:
        input, target = pair()
        with Watching() as mode:
            output = loss_of(way)(input.requires_grad_(), target)
            output.backward()
        return mode.seen, output, input.grad

    assert "aten.smooth_l1_loss.default" in as_stock(TARGET, call, fallback={"dispatch_mode": 1}).value[0]


def test_backward_under_a_dispatch_mode_shows_stocks_operators() -> None:
    def call() -> Any:
        input, target = pair()
        output = F.smooth_l1_loss(input.requires_grad_(), target)
        with Watching() as mode:
            output.backward()
        return mode.seen, input.grad

    assert "aten.smooth_l1_loss_backward.default" in as_stock(TARGET, call, fast=1, strict=True).value[0]


@both_ways
@pytest.mark.parametrize("real", [False, True])
def test_fake_tensors(way: str, real: bool) -> None:
    def call() -> Any:
        operands = pair()
        with FakeTensorMode(allow_non_fake_inputs=real):
            output = loss_of(way)(*(operands if real else pair()), reduction="none")
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
@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms(name: str, way: str) -> None:
    TRANSFORMS[name](early, *pair())  # whatever it warns of and loads, it does once
    as_stock(TARGET, lambda: TRANSFORMS[name](loss_of(way), *pair()), fallback={"functorch": 1})


def test_tensor_of_an_outer_transform_is_refused_outside_of_it() -> None:
    kept = []
    torch.vmap(lambda x: kept.append(x) or x)(pair()[0])
    with served(TARGET), fastpatch.enabled(TARGET):
        assert fastpatch.explain(F.smooth_l1_loss, kept[0], kept[0]).reason == "functorch"


@both_ways
def test_make_fx(way: str) -> None:
    input, target = pair()
    expected = make_fx(lambda a, b: early(a, b))(input, target)
    fast = counts()[TARGET]["fast"]
    with fastpatch.enabled(TARGET):
        graph = make_fx(lambda a, b: loss_of(way)(a, b))(input, target)
    assert counts()[TARGET]["fast"] == fast
    assert graph.code == expected.code
    assert torch.ops.aten.smooth_l1_loss.default in [node.target for node in graph.graph.nodes]
    value = early(input, target)
    with served(TARGET), fastpatch.enabled(TARGET, strict=True):  # the graph calls the operator itself
        assert_same(graph(input, target), value)


def test_symbolic_trace_calls_the_patched_function_by_its_name() -> None:
    class Model(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return F.smooth_l1_loss(a, b, beta=0.5)

    with served(TARGET, fallback={"torch_function": 1}), fastpatch.enabled(TARGET):
        graph = torch.fx.symbolic_trace(Model())
    assert graph.code == torch.fx.symbolic_trace(Model()).code
    expected = early(*pair(), beta=0.5)
    with served(TARGET, fast=1), fastpatch.enabled(TARGET, strict=True):
        assert_same(graph(*pair()), expected)
    with served(TARGET):
        assert_same(graph(*pair()), expected)


@noisy
@both_ways
def test_jit_trace(way: str) -> None:
    def traced() -> Any:
        return torch.jit.trace(lambda a, b: loss_of(way)(a, b, reduction="sum"), pair(), check_trace=False)

    expected = traced()
    with served(TARGET, fallback={"tracing": 1}), fastpatch.enabled(TARGET):
        function = traced()
    assert str(function.graph) == str(expected.graph)
    with served(TARGET), fastpatch.enabled(TARGET, strict=True):
        assert_same(function(*pair()), expected(*pair()))


def scripted_call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.smooth_l1_loss(a, b, reduction="sum", beta=0.5)


@noisy
@pytest.mark.parametrize("code", [scripted_call, torch.nn.SmoothL1Loss(beta=0.5)], ids=["function", "module"])
def test_jit_script(code: Any) -> None:
    """In TorchScript the operator is called without Python."""
    with served(TARGET), fastpatch.enabled(TARGET, strict=True):
        script = torch.jit.script(code)
        actual = script(*pair())
    assert_same(actual, code(*pair()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@both_ways
def test_compile(backend: str, way: str) -> None:
    """Compiling looks at the call with fake tensors. Then the eager backend calls the function by name."""
    expected = early(*pair(), reduction="sum", beta=0.5)
    torch._dynamo.reset()
    function = early if way == "early" else None

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if function is not None:
            return function(a, b, reduction="sum", beta=0.5)
        return F.smooth_l1_loss(a, b, reduction="sum", beta=0.5)

    with fastpatch.enabled(TARGET):
        compiled = torch.compile(step, backend=backend, fullgraph=True)
        assert_same(compiled(*pair()), expected)
        with served(TARGET, fast=1 if backend == "eager" else 0):
            assert_same(compiled(*pair()), expected)
    assert_same(compiled(*pair()), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_gradient(backend: str) -> None:
    def gradient() -> torch.Tensor:
        torch._dynamo.reset()
        input, target = pair()
        input.requires_grad_()
        torch.compile(lambda a, b: F.smooth_l1_loss(a, b), backend=backend, fullgraph=True)(input, target).backward()
        torch._dynamo.reset()
        return input.grad

    expected = gradient()
    assert expected.count_nonzero()
    with fastpatch.enabled(TARGET):
        assert_same(gradient(), expected)
