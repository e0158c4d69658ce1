"""compare: a function run by stock PyTorch and by fastpatch, and what tells the two apart."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

import fastpatch

from .._difference import difference
from ..targets._loss_bounds import loss_differs

Seen = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """What came of running a function twice.

    Attributes:
        target: the target that was on in the second run.
        difference: the first one in words, None if there is none.
        fast: how many units fastpatch served in the second run, by its counters.
        fallback: how many it left to stock, by reason.
    """

    target: str
    difference: str | None
    fast: int = 0
    fallback: dict[str, int] = field(default_factory=dict)


def compare(target: str, run: Callable[[Seen], None], *, device: str = "cpu", strict: bool = False) -> Comparison:
    """Runs a function with a target off, then on, and compares all that it notes down.

    Args:
        target: a name out of ``fastpatch.targets()``.
        run: makes its own tensors, looks functions up when it is called, and puts what is to be compared into the
            dictionary that it is given. What it raises and warns of is compared too. A loss under the name "loss" need
            not be equal, but within its bound, if there are stock's element-wise losses under the name "values".
        device: on CUDA, two runs with fastpatch must be equal too.
        strict: see ``fastpatch.enabled``.

    Raises:
        ValueError: an unknown target.
        BuildError: the native library can't be had.
    """
    stock = _observed(run, fastpatch.disabled(target))
    before = fastpatch.report().to_dict()[target]
    ours = _observed(run, fastpatch.enabled(target, strict=strict))
    after = fastpatch.report().to_dict()[target]
    found = _difference(ours, stock)
    if found is None and torch.device(device).type == "cuda":
        again = _observed(run, fastpatch.enabled(target, strict=strict))
        if (unlike := difference(again, ours, "a second run")) is not None:
            found = f"two runs of fastpatch differ: {unlike}"
    moved = {code: n - before["fallback"].get(code, 0) for code, n in after["fallback"].items()}
    fallback = {code: n for code, n in moved.items() if n}
    return Comparison(target, found, after["fast"] - before["fast"], fallback)


def _observed(run: Callable[[Seen], None], scope: AbstractContextManager[None]) -> Seen:
    """What a run notes down, whatever mode of autograd the caller is in."""
    seen: Seen = {"error": "", "warnings": []}
    with torch.inference_mode(False), torch.enable_grad(), scope, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run(seen)
        except Exception as error:
            seen["error"] = f"{type(error).__name__}: {error}"
    seen["warnings"] = [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    return seen


def _difference(ours: Seen, stock: Seen) -> str | None:
    values = stock.get("values")
    for name in dict.fromkeys([*stock, *ours]):
        if name not in ours or name not in stock:
            return f"{name}: only {'stock' if name in stock else 'fastpatch'} has it"
        one, other = ours[name], stock[name]
        if name == "loss" and values is not None:
            found = _reduced_difference(one, other, values, str(stock.get("reduction")))
        else:
            found = difference(one, other, name)
        if found is not None:
            return found
    return None


def _reduced_difference(ours: torch.Tensor, stock: torch.Tensor, values: torch.Tensor, reduction: str) -> str | None:
    """For a mean or sum on CUDA: all but the number is equal, and that is as near as rounding explains."""
    if difference(ours, stock, "loss") is None:
        return None
    found = difference(torch.zeros_like(ours), torch.zeros_like(stock), "loss")
    if found is None and loss_differs(ours, values, {"mean": 1, "sum": 2}[reduction]):
        return f"loss: {ours.item()} is further from the exact one than rounding explains; stock has {stock.item()}"
    return found


def reproduce(target: str, run: Callable[[Seen], None], *, device: str = "cpu") -> None:
    """Compares, says what differs, and ends the process: with status 1 if something does, else 0."""
    made = compare(target, run, device=device)
    print(made.difference or "no difference")
    print(f"served by fastpatch: {made.fast}; left to stock: {made.fallback or 0}")
    sys.exit(made.difference is not None)


# What runs note down of tensors that may change afterwards.


def memory(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The tensor's version, and every byte that it could reach."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    whole.set_(tensor.untyped_storage())
    return tensor._version, whole.clone()


def _note(seen: Seen, name: str, value: Any) -> None:
    """A value as it is now: of a tensor its type and version, and a copy with the very strides."""
    if isinstance(value, torch.Tensor):
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        seen[name] = copy.copy_(value.detach()).requires_grad_(value.requires_grad)
        seen[f"type and version of {name}"] = type(value), value._version
    else:
        seen[name] = value


def note(seen: Seen, when: str, optimizer: torch.optim.Optimizer) -> None:
    """Notes down an optimizer's parameters, their gradients, its state in its order, and its groups' options."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = {id(parameter): i for i, parameter in enumerate(parameters)}
    for i, parameter in enumerate(parameters):
        _note(seen, f"parameter {i} {when}", parameter)
        _note(seen, f"gradient {i} {when}", parameter.grad)
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            _note(seen, f"{name} {places[id(parameter)]} {when}", value)
    seen[f"order of the state {when}"] = [places[id(parameter)] for parameter in optimizer.state]
    for i, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                _note(seen, f"{name} of group {i} {when}", value)
