"""Two SGDs, one stock and one patched, through any order of events of a training: equal after every one of them."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _sgd_helpers import (
    assert_same,
    assert_twins,
    copy_of,
    in_layout,
    outcome,
    parameter,
    params_of,
    served,
    set_grads,
    step_stock,
    values,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.optim.lr_scheduler import StepLR

import fastpatch

SPECS = [((5,), "contiguous"), ((67,), "contiguous"), ((), "contiguous"), ((3, 5), "transposed"), ((0,), "contiguous")]
specs = st.lists(st.sampled_from(SPECS), min_size=1, max_size=3)
seeds = st.integers(0, 10**6)
HYPERS = {
    "lr": [0.1, 0.5, 1, 0.0],
    "momentum": [0.9, 0, 0.0, 0.5],
    "dampening": [0, 0.3],
    "weight_decay": [0, 1e-4, 0.1],
    "nesterov": [False, True],
    "maximize": [False, True],
}
Event = tuple[str, int, int]


class Twin:
    """One optimizer with what hangs on it."""

    def __init__(self, optimizer: torch.optim.SGD) -> None:
        self.optimizer = optimizer
        self.scheduler: StepLR | None = None
        self.hooks: list[Any] = []
        self.events: list[Event] = []  # what its hooks saw

    def replace(self, optimizer: torch.optim.SGD) -> None:
        """Neither hooks nor schedulers survive a copy."""
        self.optimizer, self.scheduler, self.hooks = optimizer, None, []

    def hook(self, word: str) -> Callable[..., None]:
        def seen(optimizer: torch.optim.SGD, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert optimizer is self.optimizer
            self.events.append((word, len(args), len(kwargs)))

        return seen


class SgdMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        fastpatch.disable()
        self.process = False
        self.scopes: list[tuple[Any, bool]] = []  # open ones, the innermost last

    @initialize(specs=specs, seed=seeds, momentum=st.sampled_from(HYPERS["momentum"]))
    def construct(self, specs: list[Any], seed: int, momentum: float) -> None:
        tensors = [in_layout(values(shape, seed + i), layout) for i, (shape, layout) in enumerate(specs)]
        self.twins = [Twin(torch.optim.SGD(map(parameter, tensors), lr=0.1, momentum=momentum)) for _ in range(2)]
        self.give_gradients(seed + 500, len(specs))

    def both(self, act: Callable[[Twin], Any]) -> None:
        """The same for both, with the same outcome."""
        stock, ours = (outcome(act, twin) for twin in self.twins)
        assert stock[0] == "returned", stock
        assert_same(stock, ours)

    @property
    def optimizers(self) -> list[torch.optim.SGD]:
        return [twin.optimizer for twin in self.twins]

    # ------------------------------------------------------------------------------------------------ training

    def give_gradients(self, seed: int, present: int) -> None:
        params = params_of(self.twins[0].optimizer)
        grads: list[torch.Tensor | None] = []
        for i, param in enumerate(params):
            grad = copy_of(param)
            grads.append(grad.copy_(values(param.shape, seed + i)) if present >> i & 1 else None)
        set_grads(self.optimizers, grads)

    @rule(seed=seeds, present=st.integers(0, 255))
    def set_some_gradients(self, seed: int, present: int) -> None:
        self.give_gradients(seed, present)

    @rule(seed=seeds)
    def accumulate_gradients(self, seed: int) -> None:
        def backward(twin: Twin) -> None:
            total = sum((p * values(p.shape, seed)).sum() for p in params_of(twin.optimizer))
            total.backward()  # type: ignore[union-attr]

        self.both(backward)

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self.both(lambda twin: twin.optimizer.zero_grad(set_to_none=set_to_none))

    @rule(closure=st.booleans(), seed=seeds)
    def step(self, closure: bool, seed: int) -> None:
        calls = []

        def evaluate() -> float:
            calls.append(torch.is_grad_enabled())
            return seed / 7

        arguments = (evaluate,) if closure else ()
        stock, ours = self.optimizers
        with_grad = sum(param.grad is not None for param in params_of(ours))
        expected = step_stock(stock, *arguments)
        with served(with_grad if self.is_on else 0):
            assert outcome(ours.step, *arguments) == expected
        assert calls == [True] * len(calls)
        assert len(calls) == 2 * closure

    # --------------------------------------------------------------------------------------- the optimizer's life

    @rule(spec=st.sampled_from(SPECS), seed=seeds, momentum=st.sampled_from(HYPERS["momentum"]))
    @precondition(lambda self: len(self.twins[0].optimizer.param_groups) < 4)
    def add_param_group(self, spec: Any, seed: int, momentum: float) -> None:
        tensor = in_layout(values(spec[0], seed), spec[1])
        self.both(
            lambda twin: twin.optimizer.add_param_group(
                {
                    "params": [parameter(tensor)],
                    "momentum": momentum,
                    # What a scheduler would have noted.
                    "initial_lr": 0.1,
                }
            )
        )

    @rule(data=st.data())
    def change_a_hyperparameter(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(HYPERS)))
        number = data.draw(st.sampled_from(HYPERS[name]))
        group = data.draw(st.integers(0, len(self.twins[0].optimizer.param_groups) - 1))
        for optimizer in self.optimizers:
            optimizer.param_groups[group][name] = number

    @rule()
    def load_the_state_into_a_fresh_optimizer(self) -> None:
        for twin in self.twins:
            groups = [{"params": list(group["params"])} for group in twin.optimizer.param_groups]
            fresh = torch.optim.SGD(groups, lr=3.0)
            fresh.load_state_dict(copy.deepcopy(twin.optimizer.state_dict()))
            twin.replace(fresh)

    @rule(way=st.sampled_from(["copy", "pickle"]))
    def copy_or_pickle(self, way: str) -> None:
        for twin in self.twins:
            old = twin.optimizer
            grads = [param.grad for param in params_of(old)]
            twin.replace(copy.deepcopy(old) if way == "copy" else pickle.loads(pickle.dumps(old)))
            set_grads([twin.optimizer], grads)

    @rule(period=st.integers(1, 3))
    def construct_scheduler(self, period: int) -> None:
        for twin in self.twins:
            twin.scheduler = StepLR(twin.optimizer, period, gamma=0.5)

    @rule()
    @precondition(lambda self: self.twins[0].scheduler is not None)
    def step_scheduler(self) -> None:
        def step(twin: Twin) -> list[str]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                twin.scheduler.step()  # type: ignore[union-attr]
            return [str(warning.message) for warning in caught]

        self.both(step)

    @rule(word=st.sampled_from(["pre", "post"]))
    @precondition(lambda self: len(self.twins[0].hooks) < 3)
    def register_hook(self, word: str) -> None:
        for twin in self.twins:
            register = getattr(twin.optimizer, f"register_step_{word}_hook")
            twin.hooks.append(register(twin.hook(word)))

    @rule()
    @precondition(lambda self: self.twins[0].hooks)
    def remove_hook(self) -> None:
        for twin in self.twins:
            twin.hooks.pop(0).remove()

    # --------------------------------------------------------------------------------------------------- switches

    @property
    def is_on(self) -> bool:
        return self.scopes[-1][1] if self.scopes else self.process

    @rule(strict=st.booleans())
    def enable(self, strict: bool) -> None:
        fastpatch.enable("sgd", strict=strict)
        self.process = True

    @rule()
    def disable(self) -> None:
        fastpatch.disable("sgd")
        self.process = False

    @rule(on=st.booleans())
    @precondition(lambda self: len(self.scopes) < 4)
    def enter_scope(self, on: bool) -> None:
        scope = fastpatch.enabled("sgd", strict=True) if on else fastpatch.disabled("sgd")
        scope.__enter__()
        self.scopes.append((scope, on))

    @rule(data=st.data())
    @precondition(lambda self: self.scopes)
    def leave_any_scope(self, data: Any) -> None:
        scope, _ = self.scopes.pop(data.draw(st.integers(0, len(self.scopes) - 1)))
        scope.__exit__(None, None, None)

    # ---------------------------------------------------------------------------------------------------- always

    @invariant()
    def twins_agree(self) -> None:
        if hasattr(self, "twins"):
            assert_twins(*self.optimizers)
            assert self.twins[0].events == self.twins[1].events

    @invariant()
    def the_switch_is_as_set(self) -> None:
        assert fastpatch.is_enabled("sgd") == self.is_on

    def teardown(self) -> None:
        for scope, _ in reversed(self.scopes):
            scope.__exit__(None, None, None)
        fastpatch.disable()


TestSgdMachine = SgdMachine.TestCase
TestSgdMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
