"""Every reason for which a whole parameter group or a whole step is left to stock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from _sgd_helpers import params_of, served, step_twins
from _sgd_unfit import second, three
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastpatch

Change = Callable[[Any], None]


# ---------------------------------------------------------------------------------------------------- a whole group


def group(**options: Any) -> Change:
    return lambda optimizer: optimizer.param_groups[0].update(options)


def attribute(**attributes: Any) -> Change:
    return lambda optimizer: optimizer.__dict__.update(attributes)


def without_requires_grad(optimizer: Any) -> None:
    optimizer.defaults["differentiable"] = True
    for param in params_of(optimizer):
        param.requires_grad_(False)


def fused_with_grad_scale(optimizer: Any) -> None:
    optimizer.grad_scale = torch.tensor(2.0)
    for each in optimizer.param_groups:
        each["fused"] = True


def shared_under_foreach(optimizer: Any) -> None:
    optimizer.param_groups[0]["foreach"] = True
    second(optimizer).data = optimizer.param_groups[0]["params"][0].detach()


def tensor(name: str, number: Any, **options: Any) -> Change:
    """A tensor of the optimizer's own as a hyperparameter."""
    return lambda optimizer: optimizer.param_groups[0].update({name: torch.tensor(number, **options)})


GROUPS: dict[str, tuple[Change, str]] = {
    "foreach_shared": (shared_under_foreach, "foreach"),
    "foreach_number": (group(foreach=1), "arguments"),
    "fused": (group(fused=True), "fused"),
    "lr_of_a_dimension": (tensor("lr", [0.1]), "tensor_hyperparameter"),
    "lr_of_two_dimensions": (tensor("lr", [[0.1]], dtype=torch.float64), "tensor_hyperparameter"),
    "learned_lr": (tensor("lr", 0.1, requires_grad=True), "tensor_hyperparameter"),
    "integer_lr": (tensor("lr", 1), "tensor_hyperparameter"),
    "complex_lr_raises": (tensor("lr", 0.1 + 0.2j), "tensor_hyperparameter"),
    "nan_lr_tensor": (tensor("lr", float("nan")), "hyperparameter"),
    "huge_lr_tensor_raises": (tensor("lr", 1e39, dtype=torch.float64), "hyperparameter"),
    "decay_of_a_dimension_raises": (tensor("weight_decay", [0.1]), "tensor_hyperparameter"),
    "learned_decay": (tensor("weight_decay", 0.1, requires_grad=True), "tensor_hyperparameter"),
    "bool_decay_raises": (tensor("weight_decay", True), "tensor_hyperparameter"),
    "tensor_momentum": (tensor("momentum", 0.9), "tensor_hyperparameter"),
    "tensor_dampening": (tensor("dampening", 0.1), "tensor_hyperparameter"),
    "float32_lr": (group(lr=np.float32(0.1)), "hyperparameter"),
    "bool_lr": (group(lr=True), "hyperparameter"),
    "nan_momentum": (group(momentum=float("nan")), "hyperparameter"),
    "string_nesterov": (group(nesterov="yes", momentum=0.9), "hyperparameter"),
    "huge_lr_raises": (group(lr=1e39), "hyperparameter"),
    "differentiable": (without_requires_grad, "differentiable"),
    "differentiable_raises": (lambda o: o.defaults.update(differentiable=True), "differentiable"),
    "grad_scale_raises": (attribute(grad_scale=torch.tensor(2.0)), "grad_scale"),
    "found_inf_raises": (attribute(found_inf=torch.tensor(0.0)), "grad_scale"),
    "grad_scale_fused": (fused_with_grad_scale, "grad_scale"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_that_is_refused_counts_once(name: str) -> None:
    change, reason = GROUPS[name]
    pair = three()
    for optimizer in pair:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(7))]})
        params_of(optimizer)[-1].grad = torch.ones(7)
        change(optimizer)
    raises = "raises" in name
    second_group = {"fast": 0} if raises else {"fast": 1}
    if reason in ("differentiable", "grad_scale"):  # of the whole optimizer
        second_group = {"fast": 0}
    result = step_twins(pair, **second_group, **{reason: 1 + (not raises and not second_group["fast"])})
    assert (result[0] == "returned") != raises, result


@pytest.mark.parametrize("name", GROUPS)
def test_explain_gives_the_reason_of_a_group(name: str) -> None:
    change, reason = GROUPS[name]
    _, ours = three()
    change(ours)
    with fastpatch.enabled("sgd"), served():
        assert fastpatch.explain(ours.step).reason == reason


# ------------------------------------------------------------------------------------------------ the thread's state


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under(mode: Callable[[], Any]) -> Callable[[Any], None]:
    def step(optimizer: Any) -> None:
        with mode():
            optimizer.step()

    return step


def traced(optimizer: Any) -> None:
    torch.jit.trace(lambda x: (optimizer.step(), x + 1)[1], (torch.ones(2),), check_trace=False)


def vmapped(optimizer: Any) -> None:
    torch.func.vmap(lambda x: (optimizer.step(), x + 1)[1])(torch.ones(2))


THREADS: dict[str, tuple[Callable[[Any], None], str]] = {
    "function_mode": (under(BaseTorchFunctionMode), "torch_function"),
    "device_mode": (under(lambda: torch.device("cpu")), "torch_function"),
    "dispatch_mode": (under(Passing), "dispatch_mode"),
    "functorch": (vmapped, "functorch"),
    "inference_mode": (under(torch.inference_mode), "inference_mode"),
    "tracing": (traced, "tracing"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", THREADS)
def test_states_of_the_thread(name: str) -> None:
    call, reason = THREADS[name]
    pair = three(momentum=0.9)
    for param in (*params_of(pair[0]), *params_of(pair[1])):
        param.requires_grad_(False)  # else tracing raises
    step_twins(pair, fast=3)
    for _ in range(2):
        assert step_twins(pair, call=call, **{reason: 1}) == ("returned", None)
    step_twins(pair, fast=3)
