"""What the stateful machine of SGD is made of: twins with what hangs on them, the switch, and who is to serve what."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import torch
from _sgd_helpers import DTYPES, assert_same, outcome
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.optim.lr_scheduler import StepLR

import fastpatch

Event = tuple[str, int, int]


class Twin:
    """One optimizer with what hangs on it."""

    def __init__(self, optimizer: torch.optim.SGD) -> None:
        self.optimizer = optimizer
        self.scheduler: StepLR | None = None
        self.hooks: list[Any] = []
        self.events: list[Event] = []  # what its hooks saw
        self.checkpoint: Any = None

    def replace(self, optimizer: torch.optim.SGD) -> None:
        """Neither hooks nor schedulers survive a copy."""
        self.optimizer, self.scheduler, self.hooks = optimizer, None, []

    def hook(self, word: str) -> Callable[..., None]:
        def seen(optimizer: torch.optim.SGD, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert optimizer is self.optimizer
            self.events.append((word, len(args), len(kwargs)))

        return seen


class SwitchedMachine(RuleBasedStateMachine):
    """Switches fastpatch on and off between the events of its subclass."""

    twins: list[Twin]

    def __init__(self) -> None:
        super().__init__()
        fastpatch.disable()
        self.process = (False, False)
        self.scopes: list[tuple[Any, tuple[bool, bool]]] = []  # open ones, the innermost last

    def both(self, act: Callable[[Twin], Any], may_raise: bool = False) -> None:
        """The same for both, with the same outcome."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some come once in a process
            stock, ours = (outcome(act, twin) for twin in self.twins)
        assert stock[0] == "returned" or may_raise, stock
        assert_same(stock, ours)

    @property
    def optimizers(self) -> list[torch.optim.SGD]:
        return [twin.optimizer for twin in self.twins]

    @property
    def is_on(self) -> bool:
        return (self.scopes[-1][1] if self.scopes else self.process)[0]

    @property
    def is_strict(self) -> bool:
        return (self.scopes[-1][1] if self.scopes else self.process)[1]

    @rule(strict=st.booleans())
    def enable(self, strict: bool) -> None:
        fastpatch.enable("sgd", strict=strict)
        self.process = (True, strict)

    @rule()
    def disable(self) -> None:
        fastpatch.disable("sgd")
        self.process = (False, False)

    @rule(on=st.booleans(), strict=st.booleans())
    @precondition(lambda self: len(self.scopes) < 4)
    def enter_scope(self, on: bool, strict: bool) -> None:
        scope = fastpatch.enabled("sgd", strict=strict) if on else fastpatch.disabled("sgd")
        scope.__enter__()
        self.scopes.append((scope, (on, on and strict)))

    @rule(data=st.data())
    @precondition(lambda self: self.scopes)
    def leave_any_scope(self, data: Any) -> None:
        scope, _ = self.scopes.pop(data.draw(st.integers(0, len(self.scopes) - 1)))
        scope.__exit__(None, None, None)

    @invariant()
    def the_switch_is_as_set(self) -> None:
        assert fastpatch.is_enabled("sgd") == self.is_on

    def teardown(self) -> None:
        for scope, _ in reversed(self.scopes):
            scope.__exit__(None, None, None)
        fastpatch.disable()


# ---------------------------------------------------------------------------------------------- who serves a step


def verdicts(optimizer: torch.optim.SGD) -> tuple[int, Counter[str]]:
    """How many parameters a step that doesn't raise serves, and what it refuses and why."""
    total, refused = 0, Counter[str]()
    for group in optimizer.param_groups:
        reasons = [_reason(optimizer, group, param) for param in group["params"] if param.grad is not None]
        why_whole = _why_whole(optimizer, group, reasons)
        if why_whole is not None:
            refused[why_whole] += 1
        else:
            total += reasons.count(None)
            refused.update(reason for reason in reasons if reason is not None)
    return total, refused


def buffer_of(optimizer: torch.optim.SGD, param: torch.Tensor) -> Any:
    return optimizer.state.get(param, {}).get("momentum_buffer")


def _why_whole(optimizer: torch.optim.SGD, group: dict[str, Any], reasons: list[str | None]) -> str | None:
    for name in ("lr", "weight_decay"):
        if isinstance(group[name], torch.Tensor) and group[name].dim():
            return "tensor_hyperparameter"
    if not group["foreach"]:
        return None
    return next(filter(None, reasons), "foreach" if _is_shared(optimizer, group) else None)


def _is_shared(optimizer: torch.optim.SGD, group: dict[str, Any]) -> bool:
    """Does one parameter write memory that another one reads or writes?"""
    writes_grad = group["momentum"] and group["nesterov"] and not group["weight_decay"] and not group["maximize"]
    touched: list[tuple[range, bool]] = []
    for param in group["params"]:
        if param.grad is not None:
            buffer = buffer_of(optimizer, param) if group["momentum"] else None
            touched += [(_memory(param), True), (_memory(param.grad), bool(writes_grad))]
            touched += [] if buffer is None else [(_memory(buffer), True)]
    return any(_meet(a, b) and (x or y) for (a, x), (b, y) in combinations(touched, 2))


def _memory(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())


def _meet(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


def _reason(optimizer: torch.optim.SGD, group: dict[str, Any], param: torch.Tensor) -> str | None:
    grad = param.grad
    assert grad is not None
    if grad.dtype != param.dtype or param.dtype not in DTYPES:
        return "dtype"
    if grad.shape != param.shape:
        return "shape_mismatch"
    buffer = buffer_of(optimizer, param) if group["momentum"] else None
    first = group["momentum"] and buffer is None
    if not _in_order(param, grad) or (first and not _plain(param, grad) and param.stride() != grad.stride()):
        return "strides"
    if buffer is None:
        return None
    if buffer.dtype != param.dtype or buffer.shape != param.shape:
        return "momentum_buffer"
    return None if _in_order(param, buffer) else "strides"


def _plain(*tensors: torch.Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _in_order(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same places in memory for the same elements, and no gaps."""
    return _plain(a, b) or (a.stride() == b.stride() and set(_places(a)) == set(range(a.numel())))


def _places(tensor: torch.Tensor) -> Iterator[int]:
    """Where the elements lie, counted from the first."""
    at = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = at.unsqueeze(-1) + torch.arange(size) * stride
    return iter(at.flatten().tolist())
