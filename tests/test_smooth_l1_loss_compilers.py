"""Smooth L1 under what records calls to run them later: tracers, scripts, compilers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _helpers import assert_same, counts, served
from _smooth_l1_loss_helpers import TARGET, both_ways, early, loss_of, plain_pair
from torch.fx.experimental.proxy_tensor import make_fx

import fastpatch

noisy = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


@both_ways
def test_make_fx(way: str) -> None:
    input, target = plain_pair()
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
    expected = early(*plain_pair(), beta=0.5)
    with served(TARGET, fast=1), fastpatch.enabled(TARGET, strict=True):
        assert_same(graph(*plain_pair()), expected)
    with served(TARGET):
        assert_same(graph(*plain_pair()), expected)


@noisy
@both_ways
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_jit_trace(way: str, beta: float) -> None:
    def traced() -> Any:
        def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return loss_of(way)(a, b, reduction="sum", beta=beta)

        return torch.jit.trace(function, plain_pair(), check_trace=False)

    expected = traced()
    with served(TARGET, fallback={"tracing": 1} if beta or way == "patched" else {}), fastpatch.enabled(TARGET):
        function = traced()
    assert str(function.graph) == str(expected.graph)
    with served(TARGET), fastpatch.enabled(TARGET, strict=True):
        assert_same(function(*plain_pair()), expected(*plain_pair()))


def scripted_call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.smooth_l1_loss(a, b, reduction="sum", beta=0.5)


@noisy
@pytest.mark.parametrize("code", [scripted_call, torch.nn.SmoothL1Loss(beta=0.5)], ids=["function", "module"])
def test_jit_script(code: Any) -> None:
    """In TorchScript the operator is called without Python."""
    with served(TARGET), fastpatch.enabled(TARGET, strict=True):
        script = torch.jit.script(code)
        actual = script(*plain_pair())
    assert_same(actual, code(*plain_pair()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@both_ways
def test_compile(backend: str, dtype: torch.dtype, way: str) -> None:
    """Compiling looks at the call with fake tensors. Then the eager backend calls the function by name."""
    expected = early(*plain_pair(dtype), reduction="sum", beta=0.5)
    torch._dynamo.reset()
    function = early if way == "early" else None

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if function is not None:
            return function(a, b, reduction="sum", beta=0.5)
        return F.smooth_l1_loss(a, b, reduction="sum", beta=0.5)

    with fastpatch.enabled(TARGET):
        compiled = torch.compile(step, backend=backend, fullgraph=True)
        assert_same(compiled(*plain_pair(dtype)), expected)
        with served(TARGET, fast=1 if backend == "eager" else 0):
            assert_same(compiled(*plain_pair(dtype)), expected)
    assert_same(compiled(*plain_pair(dtype)), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_gradient(backend: str) -> None:
    def gradient() -> torch.Tensor:
        torch._dynamo.reset()
        input, target = plain_pair()
        input.requires_grad_()
        torch.compile(lambda a, b: F.smooth_l1_loss(a, b), backend=backend, fullgraph=True)(input, target).backward()
        torch._dynamo.reset()
        return input.grad

    expected = gradient()
    assert expected.count_nonzero()
    with fastpatch.enabled(TARGET):
        assert_same(gradient(), expected)
