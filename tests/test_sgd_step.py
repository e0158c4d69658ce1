"""What stands around SGD.step: hooks and the profiler's range, in whatever order things are set up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _sgd_helpers import (
    assert_twins,
    outcome,
    params_of,
    python_frames,
    served,
    step_stock,
    step_twins,
    twins,
    values,
)
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fastpatch

SGD = torch.optim.SGD
RANGE = "Optimizer.step#SGD.step"


@pytest.fixture(params=["hooked", "unhooked"])
def first_seen(request: pytest.FixtureRequest) -> Iterator[str]:
    """SGD.step as torch has hooked it, or as it is before the first SGD of a process."""
    twins([values((1,), 1)])  # so that it is hooked, whichever test runs first
    hooked = SGD.step
    if request.param == "unhooked":
        SGD.step = hooked.__wrapped__  # type: ignore[method-assign]
    yield request.param
    fastpatch.disable()
    SGD.step = hooked  # type: ignore[method-assign]


def ranges(optimizer: Any) -> int:
    """How often the optimizer's range is opened in one step under the profiler."""
    opened = []

    class Counted(torch.autograd.profiler.record_function):
        def __init__(self, name: str) -> None:
            opened.append(name)
            super().__init__(name)

    with pytest.MonkeyPatch.context() as patch, torch.autograd.profiler.profile() as profile:
        patch.setattr(torch.autograd.profiler, "record_function", Counted)
        optimizer.step()
    # The profiler shows a range that is nested in one of the same name only once, so it can't tell of doubled ones.
    assert [event.name for event in profile.function_events].count(RANGE) == min(opened.count(RANGE), 1)
    return opened.count(RANGE)


def hook_calls(optimizer: Any) -> list[str]:
    """The hooks that run in one step, in their order."""
    log: list[str] = []
    handles = [
        optimizer.register_step_post_hook(lambda *_: log.append("post")),
        register_optimizer_step_post_hook(lambda *_: log.append("global post")),
        optimizer.register_step_pre_hook(lambda *_: log.append("pre")),
        register_optimizer_step_pre_hook(lambda *_: log.append("global pre")),
    ]
    optimizer.step()
    for handle in handles:
        handle.remove()
    return log


def is_stock(step: Any) -> bool:
    """A function of torch's, hooked once, with nothing of ours below."""
    functions = [step]
    while hasattr(functions[-1], "__wrapped__"):
        functions.append(functions[-1].__wrapped__)
    names = [function.__code__.co_name for function in functions if type(function) is type(is_stock)]
    return len(names) == len(functions) and names in (["wrapper", "_use_grad", "step"], ["_use_grad", "step"])


# c: construct the optimizer, s: an LR scheduler for it, e: enable, d: disable, f: another optimizer, used at once.
ORDERS = [
    "cse",
    "ces",
    "ecs",
    "ecsd",
    "cesd",
    "csed",
    "eced",
    "cedse",
    "ecdse",
    "ecdsed",
    "ede",
    "edce",
    "efdce",
    "eefcd",
]


@pytest.mark.parametrize("order", ORDERS)
def test_range_and_hooks_run_once_in_any_order(first_seen: str, order: str) -> None:
    on, optimizer, reference, expected_steps = False, None, None, 0
    for event in order:
        if event == "c":
            reference, optimizer = twins([values((19,), 1)], [values((19,), 2)], momentum=0.9)
            params_of(reference)
        elif event == "s":
            scheduler = StepLR(optimizer, 100)
            scheduler.optimizer.step()
        elif event == "e":
            fastpatch.enable("sgd")
            on = True
        elif event == "d":
            fastpatch.disable("sgd")
            on = False
        elif event == "f":
            other, _ = twins([values((5,), 3)], [values((5,), 4)])
            with served(int(on)):
                other.step()
        expected_steps += 3 * (optimizer is not None) + (event == "s")
        if optimizer is not None:
            with served(3 * on):
                optimizer.step()
                assert ranges(optimizer) == 1
                assert hook_calls(optimizer) == ["global pre", "pre", "post", "global post"]
    fastpatch.disable()
    assert is_stock(SGD.step)
    assert sys.modules["torch.optim.sgd"].sgd.__code__.co_name == "sgd"
    if reference is not None:
        for _ in range(expected_steps):
            reference.step()
        optimizer.__dict__.pop("step", None)
        for group in (*reference.param_groups, *optimizer.param_groups):
            group.pop("initial_lr", None)
        assert_twins(reference, optimizer)


def test_a_doubled_range_would_be_seen(first_seen: str) -> None:
    _, optimizer = twins([values((19,), 1)], [values((19,), 2)])
    SGD.step = SGD.profile_hook_step(SGD.step)  # type: ignore[method-assign]
    assert ranges(optimizer) == 2
    assert not is_stock(SGD.step)


def test_a_served_step_runs_no_python(first_seen: str) -> None:
    with fastpatch.enabled("sgd", strict=True):
        _, optimizer = twins([values((19,), 1), values((7,), 2)], [values((19,), 3), None], momentum=0.9)
        optimizer.step()  # while torch's hooks are new, ours go around them at the first step
        with served(2):
            assert python_frames(optimizer.step) == []
            step = SGD.step
            assert python_frames(lambda: step(optimizer, None)) == ["<lambda>"]
        optimizer.register_step_pre_hook(lambda *_: None)
        with served(1):
            assert "wrapper" in python_frames(optimizer.step)


# ------------------------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("closure", [False, True])
def test_hooks_get_the_arguments_of_the_call(closure: bool) -> None:
    pair = twins([values((19,), 1)], [values((19,), 2)], momentum=0.9)
    logs: list[list[Any]] = [[], []]
    arguments = ((lambda: 7.5),) if closure else ()
    for optimizer, log in zip(pair, logs, strict=True):
        for register, word in ((optimizer.register_step_pre_hook, "pre"), (optimizer.register_step_post_hook, "post")):
            register(lambda o, args, kwargs, word=word, log=log: log.append((word, len(args), args[1:], kwargs, o)))
    expected = step_stock(pair[0], *arguments)
    with fastpatch.enabled("sgd", strict=True), served(1):
        assert outcome(pair[1].step, *arguments) == expected
    assert expected == ("returned", 7.5 if closure else None)
    assert [entry[:-1] for entry in logs[0]] == [entry[:-1] for entry in logs[1]]
    assert [entry[-1] for entry in logs[1]] == [pair[1]] * 2
    assert_twins(*pair)


@pytest.mark.parametrize("is_global", [False, True])
def test_a_pre_hook_may_replace_the_arguments(is_global: bool) -> None:
    pair = twins([values((19,), 1)], [values((19,), 2)])
    for optimizer in pair:

        def replace(self: Any, args: Any, kwargs: Any) -> Any:
            return (self, lambda: 2.5), {}

        register = register_optimizer_step_pre_hook if is_global else optimizer.register_step_pre_hook
        handle = register(replace)
        if optimizer is pair[0]:
            assert step_stock(optimizer) == ("returned", 2.5)
        else:
            with fastpatch.enabled("sgd", strict=True), served(1):
                assert optimizer.step() == 2.5
        handle.remove()
    assert_twins(*pair)


def test_a_pre_hook_may_change_what_the_step_reads() -> None:
    pair = twins([values((19,), 1), values((7,), 2)], [values((19,), 3), None], momentum=0.9)

    def change(optimizer: Any, args: Any, kwargs: Any) -> None:
        params = params_of(optimizer)
        params[0].grad.mul_(0.5)
        params[1].grad = torch.ones(7)
        optimizer.param_groups[0]["lr"] = 0.75

    for optimizer in pair:
        optimizer.register_step_pre_hook(change)
    step_twins(pair, fast=2)
    assert pair[1].param_groups[0]["lr"] == 0.75


@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("answer", ["raise", "nonsense"])
def test_hooks_that_fail_do_so_as_stock(place: str, answer: str) -> None:
    pair = twins([values((19,), 1)], [values((19,), 2)], momentum=0.9)

    def hook(*_: Any) -> Any:
        if answer == "raise":
            raise LookupError("from a hook")
        return 17

    for optimizer in pair:
        getattr(optimizer, f"register_step_{place}_hook")(hook)
    expected = step_stock(pair[0])
    with fastpatch.enabled("sgd"), served(int(place == "post")):
        got = outcome(pair[1].step)
    assert got[0] is expected[0]
    assert (got[0] == "returned") == (place == "post" and answer == "nonsense")
    assert_twins(*pair)


def test_step_code_of_an_instance_is_called() -> None:
    pair = twins([values((19,), 1)], [values((19,), 2)])
    calls: list[Any] = []
    for optimizer in pair:
        optimizer._optimizer_step_code = lambda optimizer=optimizer: calls.append(optimizer)
    step_twins(pair, fast=1)
    assert calls == list(pair)


def test_hooks_of_another_optimizer_do_not_run() -> None:
    pair = twins([values((19,), 1)], [values((19,), 2)])
    other, _ = twins([values((5,), 3)])
    other.register_step_pre_hook(lambda *_: pytest.fail("the hook of another optimizer ran"))
    step_twins(pair, fast=1)


def test_profiling_sees_our_range_inside_torchs() -> None:
    _, optimizer = twins([values((19,), 1)], [values((19,), 2)])
    with fastpatch.enabled("sgd", strict=True), served(1), torch.autograd.profiler.profile() as profile:
        optimizer.step()
    names = [event.name for event in profile.function_events]
    assert names.count(RANGE) == 1
    assert names.count("fastpatch::sgd") == 1
    assert not [name for name in names if name.startswith("aten::")]
