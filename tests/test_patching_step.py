"""SGD.step, which torch replaces itself: whatever the order of events, hooks and attributes end up as stock's."""

import contextlib
import types

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fastpatch

SGD = torch.optim.SGD


@contextlib.contextmanager
def unhooked_step():
    """SGD.step as it is in a process that has made no optimizer yet."""
    before = vars(SGD)["step"]
    SGD.step = before.__wrapped__ if getattr(before, "hooked", False) else before
    try:
        yield SGD.step
    finally:
        fastpatch.disable()
        SGD.step = before


def optimizer_of(kind, **options):
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    param.grad = torch.tensor([0.3, 0.1, -0.7])
    return kind([param], **{"lr": 0.1, "momentum": 0.9, **options})


def param_of(optimizer):
    return optimizer.param_groups[0]["params"][0]


def sgd_counts():
    return fastpatch.report().to_dict()["sgd"]


# -------------------------------------------------------------------------------------- what disable() leaves behind


def test_step_that_was_never_hooked_is_the_very_object_again():
    with unhooked_step() as plain:
        fastpatch.enable()
        assert SGD.step is not plain
        fastpatch.disable()
        assert vars(SGD)["step"] is plain


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_step_that_torch_hooked_while_patched_is_the_original_hooked_by_torch(steps):
    with unhooked_step() as plain:
        fastpatch.enable()
        optimizer = optimizer_of(SGD)
        for _ in range(steps):
            optimizer.step()
        assert sgd_counts() == {"fast": steps, "fallback": {}}
        fastpatch.disable()
        left = vars(SGD)["step"]
        assert type(left) is types.FunctionType
        assert left.hooked
        assert left.__wrapped__ is plain
        assert left.__code__ is torch.optim.Optimizer.profile_hook_step(plain).__code__


def test_the_first_step_puts_ours_around_torchs_hooks_again():
    """Else every step would pay for torch's hooks, though there are none to run."""
    with unhooked_step():
        fastpatch.enable()
        optimizer = optimizer_of(SGD)
        assert type(vars(SGD)["step"]) is types.FunctionType
        optimizer.step()
        outermost = vars(SGD)["step"]
        assert type(outermost) is not types.FunctionType
        assert outermost.hooked
        optimizer.step()
        assert vars(SGD)["step"] is outermost
    assert sgd_counts() == {"fast": 2, "fallback": {}}


def test_step_that_was_hooked_before_is_the_very_object_again():
    with unhooked_step():
        optimizer = optimizer_of(SGD)
        hooked = vars(SGD)["step"]
        for _ in range(2):
            fastpatch.enable()
            optimizer.step()
            optimizer_of(SGD)
            fastpatch.disable()
            assert vars(SGD)["step"] is hooked
    assert sgd_counts() == {"fast": 2, "fallback": {}}


# ----------------------------------------------------------------------- hooks and numbers, in every order of events


def subclasses():
    """Fresh classes: torch hooks a class when its first optimizer is made."""

    class Inherits(SGD):
        pass

    class CallsSuper(SGD):
        def step(self, closure=None):
            return super().step(closure)

    return {"SGD": SGD, "Inherits": Inherits, "CallsSuper": CallsSuper}


class Story:
    """Optimizers that are made, scheduled, hooked and stepped in some order; with or without fastpatch."""

    def __init__(self, with_fastpatch):
        self.with_fastpatch = with_fastpatch
        self.classes = subclasses()
        self.optimizers = []
        self.log = []  # every run of a hook

    def act(self, action):
        if action in ("enable", "disable"):
            if self.with_fastpatch:
                getattr(fastpatch, action)("sgd")
        elif action == "schedule":
            for _, optimizer in self.optimizers:
                torch.optim.lr_scheduler.ConstantLR(optimizer)
        elif action == "step":
            for _, optimizer in self.optimizers:
                optimizer.step()
        else:
            number = len(self.optimizers)
            optimizer = optimizer_of(self.classes[action])
            optimizer.register_step_pre_hook(lambda *_: self.log.append(("pre", number)))
            optimizer.register_step_post_hook(lambda *_: self.log.append(("post", number)))
            self.optimizers.append((action, optimizer))

    def run(self, actions):
        with unhooked_step():
            handle = register_optimizer_step_post_hook(lambda *_: self.log.append("global"))
            try:
                for action in actions:
                    self.act(action)
            finally:
                handle.remove()
            fastpatch.disable()
            hooked = getattr(vars(SGD)["step"], "hooked", False)
        params = [param_of(optimizer).tolist() for _, optimizer in self.optimizers]
        called = [getattr(optimizer, "_opt_called", None) for _, optimizer in self.optimizers]
        return {"log": self.log, "params": params, "SGD.step is hooked": hooked, "scheduler saw a step": called}


ACTIONS = ("enable", "disable", "SGD", "Inherits", "CallsSuper", "schedule", "step")


@settings(deadline=None, max_examples=200)
@given(actions=st.lists(st.sampled_from(ACTIONS), min_size=3, max_size=10))
@example(actions=["enable", "SGD", "step", "step", "disable", "step"])
@example(actions=["enable", "Inherits", "step", "disable", "step", "SGD", "step"])
@example(actions=["enable", "Inherits", "SGD", "step", "disable", "enable", "step"])
@example(actions=["enable", "CallsSuper", "step", "SGD", "step", "disable", "step"])
@example(actions=["SGD", "CallsSuper", "enable", "step", "schedule", "step", "disable", "step"])
@example(actions=["enable", "SGD", "schedule", "step", "disable", "step", "enable", "step"])
def test_hooks_numbers_and_schedulers_are_stocks_in_every_order(actions):
    assert Story(with_fastpatch=True).run(actions) == Story(with_fastpatch=False).run(actions)


@pytest.mark.parametrize("kind", ["SGD", "Inherits", "CallsSuper"])
@pytest.mark.parametrize("when", ["enable first", "enable last"])
def test_hooks_run_once_a_step_and_the_step_is_served(kind, when):
    with unhooked_step():
        story = Story(with_fastpatch=True)
        for action in ("enable", kind) if when == "enable first" else (kind, "enable"):
            story.act(action)
        for steps in (1, 2, 3):
            story.act("step")
            assert story.log == [("pre", 0), ("post", 0)] * steps
            assert sgd_counts() == {"fast": steps, "fallback": {}}


def test_global_pre_hook_runs_once_a_step():
    optimizer, log = optimizer_of(SGD), []
    fastpatch.enable()
    handle = register_optimizer_step_pre_hook(lambda *_: log.append("pre"))
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert log == ["pre"]
    assert sgd_counts() == {"fast": 2, "fallback": {}}


def test_profiler_sees_the_range_of_the_step():
    optimizer = optimizer_of(SGD)
    fastpatch.enable()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    assert [event.name for event in profiler.events()].count("Optimizer.step#SGD.step") == 1
    assert sgd_counts() == {"fast": 1, "fallback": {}}


@pytest.mark.parametrize("kind", ["Inherits", "CallsSuper"])
def test_subclass_first_made_while_patched_passes_through_afterwards(kind):
    with unhooked_step():
        cls = subclasses()[kind]
        stock = optimizer_of(subclasses()[kind])
        fastpatch.enable()
        ours = optimizer_of(cls)
        ours.step()
        fastpatch.disable()
        ours.step()
        assert sgd_counts() == {"fast": 1, "fallback": {}}
        stock.step()
        stock.step()
        assert torch.equal(param_of(ours), param_of(stock))
        assert not torch.equal(param_of(ours), torch.tensor([1.0, -2.0, 0.5]))


@pytest.mark.parametrize("options", [{"fused": True}, {"lr": float("nan")}], ids=str)
def test_a_refused_step_counts_once_where_we_came_before_torchs_hooks(options):
    """Torch hooks our bare proxy then, and another of ours goes around that: only one of them may count."""
    with unhooked_step():
        fastpatch.enable()
        optimizer = optimizer_of(SGD, **options)
        for _ in range(3):  # the first makes the outer one
            fastpatch.reset_report()
            optimizer.step()
            counted = sgd_counts()
            assert counted["fast"] + sum(counted["fallback"].values()) == 1
