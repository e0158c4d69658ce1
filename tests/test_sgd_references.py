"""SGD served through references taken earlier, in several threads, after a fork, under torch.compile."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _sgd_helpers import (
    assert_same,
    assert_twins,
    bits_equal,
    params_of,
    python_frames,
    served,
    set_grads,
    step_stock,
    twins,
    values,
)
from _threads import in_threads
from torch.optim.sgd import sgd as early_bound_sgd

import fastpatch

SGD = torch.optim.SGD
sgd_module = sys.modules["torch.optim.sgd"]
HYPER = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.2, "nesterov": False, "maximize": True}


@pytest.fixture
def pair() -> tuple[Any, Any]:
    return twins([values((19,), 1), values((3, 5), 2)], [values((19,), 3), values((3, 5), 4)], momentum=0.9)


# -------------------------------------------------------------------------------------------- references taken earlier


def functional(function: Callable[..., None], seed: int) -> list[Any]:
    params, grads, buffers = [values((19,), seed)], [values((19,), seed + 1)], [None]
    with torch.no_grad():
        for _ in range(2):
            function(params, grads, buffers, **HYPER)
    return [params, grads, buffers]


def test_the_functional_form() -> None:
    with served():
        expected = functional(early_bound_sgd, 1)
    with fastpatch.enabled("sgd", strict=True):
        with served(2):
            got = functional(sgd_module.sgd, 1)
        with served():  # nobody sees a function that was taken before
            assert_same(expected, functional(early_bound_sgd, 1))
        assert fastpatch.explain(early_bound_sgd, *got, **HYPER).reason == "early_bound"
        assert fastpatch.explain(sgd_module.sgd, *got, **HYPER).reason == "differentiable"  # grad mode is on
        with torch.no_grad():
            assert fastpatch.explain(sgd_module.sgd, *got, **HYPER).fast
    assert_same(expected, got)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_bound_step_taken_before_enable(pair: tuple[Any, Any], hooked: bool) -> None:
    steps = [optimizer.step for optimizer in pair]
    seen: list[Any] = []
    if hooked:
        for optimizer in pair:
            optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    for _ in range(2):
        with fastpatch.disabled(), served():
            steps[0]()
        with fastpatch.enabled("sgd", strict=True), served(2):
            steps[1]()
    assert len(seen) == 4 * hooked
    assert_twins(*pair)


def test_a_bound_step_taken_while_patched(pair: tuple[Any, Any]) -> None:
    with fastpatch.enabled("sgd"):
        step = pair[1].step
    pair[0].step()
    with served():
        step()
    pair[0].step()
    with fastpatch.enabled("sgd", strict=True), served(2):
        step()
    assert_twins(*pair)


# --------------------------------------------------------------------------------------------------- threads and forks


@pytest.mark.parametrize("size", [19, 40_000])
def test_threads_with_an_optimizer_each(size: int) -> None:
    pairs = [twins([values((size,), seed)], [values((size,), 9 + seed)], momentum=0.9) for seed in range(3)]
    fastpatch.enable("sgd", strict=True)
    with served(3 * 6):
        in_threads([lambda ours=ours: [ours.step() for _ in range(6)] for _, ours in pairs])
    fastpatch.disable()
    for stock, ours in pairs:
        for _ in range(6):
            stock.step()
        assert_twins(stock, ours)


def test_threads_with_one_optimizer(pair: tuple[Any, Any]) -> None:
    """A small step holds the GIL from end to end: no update is lost."""
    fastpatch.enable("sgd", strict=True)
    with served(2 * 4 * 200):
        in_threads([lambda: [pair[1].step() for _ in range(200)]] * 4)
    fastpatch.disable()
    for _ in range(4 * 200):
        pair[0].step()
    assert_twins(*pair)


def test_a_scope_reaches_its_own_thread_only(pair: tuple[Any, Any]) -> None:
    with fastpatch.enabled("sgd", strict=True), served():
        in_threads([pair[1].step])
    pair[0].step()
    assert_twins(*pair)


def test_a_forked_child_steps_too(pair: tuple[Any, Any]) -> None:
    fastpatch.enable("sgd", strict=True)
    pair[1].step()
    step_stock(pair[0])
    step_stock(pair[0])
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads about: that is the point
        child = os.fork()
    if child == 0:
        try:
            with served(2):
                pair[1].step()
            os.write(write, pickle.dumps([param.detach().numpy() for param in params_of(pair[1])]))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        arrays = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    for param, array in zip(params_of(pair[0]), arrays, strict=True):
        assert bits_equal(param.detach(), torch.from_numpy(array))


# ------------------------------------------------------------------------------------------------------------- compile


@pytest.mark.filterwarnings("ignore")  # of torch's own modules, when the compiler first loads them
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=str)
def test_a_compiled_step_is_stocks(lr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced code may round otherwise: with a tensor lr stock then makes a product of it and the gradient first."""
    # The compiler's first use replaces this method for good, which other tests needn't see.
    monkeypatch.setattr(SGD, "_init_group", SGD._init_group)
    shapes = ((19,), (3, 5))
    pair = twins([values(shape, 1) for shape in shapes], momentum=0.9, weight_decay=0.01, lr=lr)
    fallbacks: list[dict[str, int]] = []
    for optimizer, scope in zip(pair, (fastpatch.disabled, fastpatch.enabled), strict=True):
        torch._dynamo.reset()

        def step(optimizer: Any = optimizer) -> None:
            optimizer.step()

        compiled = torch.compile(step, backend="eager")
        with scope("sgd"):
            for number in range(3):
                set_grads([optimizer], [values(shape, 10 + number) for shape in shapes])
                compiled()
        fallbacks.append(fastpatch.report().to_dict()["sgd"]["fallback"])
    torch._dynamo.reset()
    for a, b in zip(*map(params_of, pair), strict=True):
        assert bits_equal(a, b)
        assert bits_equal(pair[0].state[a]["momentum_buffer"], pair[1].state[b]["momentum_buffer"])
    # How much of a step is traced, and how much runs as it is and so is counted, is the compiler's affair.
    assert fastpatch.report().to_dict()["sgd"]["fast"] == 0
    assert fallbacks[1].keys() <= {"compiling"}


@pytest.mark.filterwarnings("ignore")
def test_a_step_after_a_graph_break_is_refused() -> None:
    """There the compiler still looks at every frame that starts."""
    pair = twins([values((19,), 1)], [values((19,), 2)], momentum=0.9)
    explained: list[Any] = []

    @torch._dynamo.disable(recursive=False)
    def middle(optimizer: Any) -> None:
        explained.append(fastpatch.explain(optimizer.step))
        optimizer.step()

    def training(optimizer: Any) -> None:
        middle(optimizer)

    torch._dynamo.reset()
    with fastpatch.disabled("sgd"):
        torch.compile(training, backend="eager")(pair[0])
    torch._dynamo.reset()
    with fastpatch.enabled("sgd"):
        torch.compile(training, backend="eager")(pair[1])
        assert explained[1].reason == "compiling"
        assert fastpatch.report().to_dict()["sgd"]["fast"] == 0
        assert fastpatch.explain(pair[1].step).fast
        training(pair[1])
        assert fastpatch.report().to_dict()["sgd"]["fast"] == 1
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_frames_that_were_compiled_before_still_run_compiled() -> None:
    """With such a stance nothing new is compiled, but a step's frames that are compiled already are used."""
    (optimizer,) = twins([values((19,), 1)], [values((19,), 2)], momentum=0.9)[:1]
    runs: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(len(graph.graph.nodes))
            return graph.forward(*args)

        return run

    def training() -> None:
        torch._dynamo.graph_break()
        optimizer.step()

    torch._dynamo.reset()
    seen = []
    for scope in (fastpatch.disabled, fastpatch.enabled):
        torch._dynamo.reset()
        compiled = torch.compile(training, backend=backend)
        with scope("sgd"), torch.no_grad():
            compiled()
            compiled()
            runs.clear()
            with torch.compiler.set_stance("eager_on_recompile"):
                compiled()
        seen.append(len(runs))
    torch._dynamo.reset()
    assert fastpatch.report().to_dict()["sgd"]["fast"] == 0
    assert bool(seen[0]) == bool(seen[1])


@pytest.mark.filterwarnings("ignore")
def test_steps_stay_fast_after_torch_compile_was_used(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first use in a process wraps SGD._init_group, which changes nothing outside of compiled code."""
    from torch._dynamo.eval_frame import TorchPatcher

    with fastpatch.enabled("sgd"):
        assert fastpatch.explain(pair[1].step).fast
    monkeypatch.setattr(SGD, "_init_group", SGD._init_group)
    TorchPatcher.patch.__wrapped__()  # what torch.compile does, once in a process
    with fastpatch.enabled("sgd"):
        assert fastpatch.explain(pair[1].step).fast
        pair[1].step()  # makes the states, whose keys are hashed in Python
        assert python_frames(pair[1].step) == []
