"""Subclasses of SGD and wrappers around one: what they override is honoured, with stock's hooks and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _sgd_helpers import assert_same, assert_twins, served, set_grads, twins, values
from torch.optim.lr_scheduler import StepLR

import fastpatch

SGD = torch.optim.SGD
Log = list[Any]


@pytest.fixture(params=["hooked", "unhooked"])
def reset(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Puts SGD.step back to what torch has hooked, or to what it is before the first SGD of a process."""
    twins([values((1,), 1)])
    hooked = SGD.step
    start = hooked if request.param == "hooked" else hooked.__wrapped__
    yield lambda: setattr(SGD, "step", start)
    fastpatch.disable()
    SGD.step = hooked  # type: ignore[method-assign]


# Each makes a class anew: torch hooks a class at its first instance.


def plain(log: Log) -> type[SGD]:
    class Sub(SGD):
        pass

    return Sub


def own_step(log: Log) -> type[SGD]:
    class Sub(SGD):
        def step(self, closure: Any = None) -> Any:
            log.append("before")
            loss = super().step(closure)
            log.append("after")
            return loss

    return Sub


def own_step_of_a_subclass(log: Log) -> type[SGD]:
    class SubSub(own_step(log)):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            log.append("outermost")
            return super().step(closure)

    return SubSub


def own_init_group(log: Log) -> type[SGD]:
    class Sub(SGD):
        def _init_group(self, group: Any, params: Any, grads: Any, buffers: Any) -> bool:
            log.append("_init_group")
            has_sparse_grad = super()._init_group(group, params, grads, buffers)
            grads[:] = [grad * 0.5 for grad in grads]
            return has_sparse_grad

    return Sub


def own_step_code(log: Log) -> type[SGD]:
    class Sub(SGD):
        def _optimizer_step_code(self) -> None:
            log.append("_optimizer_step_code")

    return Sub


def own_getattribute(log: Log) -> type[SGD]:
    class Sub(SGD):
        def __getattribute__(self, name: str) -> Any:
            if name == "param_groups":
                log.append(name)
            return super().__getattribute__(name)

    return Sub


def own_property(log: Log) -> type[SGD]:
    class Sub(SGD):
        @property
        def param_groups(self) -> Any:
            log.append("param_groups")
            return self.__dict__["groups"]

        @param_groups.setter
        def param_groups(self, groups: Any) -> None:
            self.__dict__["groups"] = groups

    return Sub


def own_defaults(log: Log) -> type[SGD]:
    class Sub(SGD):
        grad_scale = None  # looked up by step(); an instance attribute would tell otherwise
        found_inf = None

    return Sub


MAKERS = [
    plain,
    own_step,
    own_step_of_a_subclass,
    own_init_group,
    own_step_code,
    own_getattribute,
    own_property,
    own_defaults,
]


def train(make: Callable[[Log], type[SGD]], reset: Callable[[], None], patched: bool, base_first: bool) -> Any:
    """Trains while patched (perhaps) and goes on after disable(); the optimizer and all that was seen."""
    reset()
    log: Log = []
    cls = make(log)
    if patched:
        fastpatch.enable("sgd", strict=True)
    if base_first:
        twins([values((1,), 1)])
    optimizer, _ = twins([values((19,), 1), values((7,), 2)], cls=cls, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: log.append("pre"))
    optimizer.register_step_post_hook(lambda *_: log.append("post"))
    for number in range(4):
        if number == 2:
            twins([values((1,), 1)])  # hooks SGD.step, if it isn't yet
        if number == 3:
            fastpatch.disable("sgd")
        set_grads([optimizer], [values((19,), 10 + number), values((7,), 20 + number)])
        with served(2 * (patched and number < 3)):
            log.append(optimizer.step((lambda: log.append("closure") or 7.5) if number == 1 else None))
    return optimizer, log


@pytest.mark.parametrize("base_first", [False, True])
@pytest.mark.parametrize("make", MAKERS)
def test_subclasses(make: Callable[[Log], type[SGD]], base_first: bool, reset: Callable[[], None]) -> None:
    (stock, expected), (ours, log) = (train(make, reset, patched, base_first) for patched in (False, True))
    assert log == expected
    assert "pre" in log
    assert "closure" in log
    assert_twins(stock, ours)


@pytest.mark.parametrize("make", MAKERS)
def test_subclasses_without_hooks(make: Callable[[Log], type[SGD]]) -> None:
    """Nothing listens, so the fast path may skip torch's wrapper, but not what the subclass overrides."""
    logs: list[Log] = [[], []]
    optimizers = []
    for log, patched in zip(logs, (False, True), strict=True):
        optimizer, _ = twins([values((19,), 1)], [values((19,), 2)], cls=make(log), momentum=0.9)
        log.clear()
        with (fastpatch.enabled if patched else fastpatch.disabled)("sgd"), served(2 * patched):
            optimizer.step()
            optimizer.step(None)
        optimizers.append(optimizer)
    assert logs[0] == logs[1]
    assert_twins(*optimizers)


def test_a_subclass_first_seen_while_patched_leaves_nothing_behind(reset: Callable[[], None]) -> None:
    reset()
    fastpatch.enable("sgd")
    cls = plain([])
    pair = twins([values((19,), 1)], [values((19,), 2)], cls=cls)
    fastpatch.disable("sgd")
    with served():
        for optimizer in pair:
            optimizer.step()
    fastpatch.enable("sgd", strict=True)
    with served(2):
        for optimizer in pair:
            optimizer.step()
    assert_twins(*pair)


# ----------------------------------------------------------------------------------------------------------- wrappers


class SharedDict(SGD):
    """As optimizer wrappers do that want to pass for what they wrap."""

    def __init__(self, inner: SGD) -> None:
        self.__dict__ = inner.__dict__


class CopiedDict:
    """Without being an Optimizer."""

    def __init__(self, inner: SGD) -> None:
        self.__dict__.update(inner.__dict__)
        self.inner = inner

    def step(self, *args: Any) -> Any:
        return self.inner.step(*args)


def grown_class(inner: SGD) -> Any:
    """As horovod and others do: a class made on the fly from the optimizer's own."""
    cls = type(inner.__class__.__name__, (inner.__class__,), {"step": lambda self, *args: SGD.step(self, *args)})
    wrapper = cls.__new__(cls)
    wrapper.__dict__.update(inner.__dict__)
    return wrapper


@pytest.mark.parametrize("wrap", [SharedDict, CopiedDict, grown_class])
@pytest.mark.parametrize("with_scheduler", [False, True])
def test_wrappers(wrap: Callable[[SGD], Any], with_scheduler: bool) -> None:
    pair = twins([values((19,), 1)], momentum=0.9)
    schedulers = [StepLR(optimizer, 1, 0.5) for optimizer in pair] if with_scheduler else []
    wrapped = [wrap(optimizer) for optimizer in pair]
    for number in range(3):
        set_grads(pair, [values((19,), 10 + number)])
        with fastpatch.disabled(), served():
            wrapped[0].step()
        with fastpatch.enabled("sgd", strict=True), served(1):
            wrapped[1].step()
        for scheduler in schedulers:
            scheduler.step()
        assert_twins(*pair)


@pytest.mark.parametrize("make", [plain, own_step])
def test_explain_knows_the_step_of_a_subclass(make: Callable[[Log], type[SGD]]) -> None:
    optimizer, _ = twins([values((19,), 1)], [values((19,), 2)], cls=make([]))
    with fastpatch.enabled("sgd"), served():
        assert fastpatch.explain(optimizer.step).fast


def test_explain_judges_by_the_tensors_where_a_part_of_the_step_is_overridden() -> None:
    """Stock's step takes them to the inner point, which serves them."""
    for make in (own_init_group, own_getattribute, own_defaults):
        optimizer, _ = twins([values((19,), 1)], [values((19,), 2)], cls=make([]))
        with fastpatch.enabled("sgd"), served():
            assert fastpatch.explain(optimizer.step).fast, make


def odd_groups(o: Any) -> None:
    o.param_groups = tuple(o.param_groups)


def odd_params(o: Any) -> None:
    o.param_groups[0]["params"] = tuple(o.param_groups[0]["params"])


def odd_states(o: Any) -> None:
    o.state = {param: {} for param in o.param_groups[0]["params"]}


def odd_state(o: Any) -> None:
    o.state[o.param_groups[0]["params"][0]] = type("State", (dict,), {})()


ODD_PARTS = [odd_groups, odd_params, odd_states, odd_state]


def step_with_odd_parts(change: Callable[[Any], None], strict: bool) -> None:
    """At the outer patch point, or, where that can't read them, by the inner one."""
    pair = twins([values((19,), 1)], [values((19,), 2)], momentum=0.9)
    for optimizer in pair:
        change(optimizer)
    with fastpatch.disabled(), served():
        pair[0].step()
    with fastpatch.enabled("sgd", strict=strict), served(1):
        pair[1].step()
    states = [list(optimizer.state.values()) for optimizer in pair]
    assert_same([dict(state) for state in states[0]], [dict(state) for state in states[1]])
    assert_same(*(optimizer.param_groups[0]["params"][0] for optimizer in pair))


@pytest.mark.parametrize("change", ODD_PARTS)
def test_parts_of_other_types_are_served(change: Callable[[Any], None]) -> None:
    step_with_odd_parts(change, strict=False)


@pytest.mark.parametrize("change", ODD_PARTS)
def test_strict_lets_the_inner_point_serve(change: Callable[[Any], None]) -> None:
    step_with_odd_parts(change, strict=True)


@pytest.mark.parametrize("change", [odd_groups, odd_params, odd_states])
def test_explain_reads_tuples_and_plain_dicts(change: Callable[[Any], None]) -> None:
    optimizer, _ = twins([values((19,), 1)], [values((19,), 2)], momentum=0.9)
    change(optimizer)
    with fastpatch.enabled("sgd"), served():
        assert fastpatch.explain(optimizer.step).fast


def test_explain_says_optimizer_where_a_state_is_of_another_type() -> None:
    optimizer, _ = twins([values((19,), 1)], [values((19,), 2)], momentum=0.9)
    odd_state(optimizer)
    with fastpatch.enabled("sgd"), served():
        assert fastpatch.explain(optimizer.step).reason == "optimizer"
