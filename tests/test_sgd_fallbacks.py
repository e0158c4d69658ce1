"""Every reason for which a parameter is left to stock, with stock's result or exception; the others stay fast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
from _sgd_helpers import served, set_grads, step_twins
from _sgd_unfit import PARAMETERS, PlainSubclass, grad, second, three

import fastpatch


@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize("name", PARAMETERS)
def test_one_unfit_parameter_among_good_ones(name: str, momentum: float) -> None:
    change, reason = PARAMETERS[name]
    raises = "raises" in name
    pair = three(weight_decay=0.1 if name not in ("sparse_grad", "sparse_param") else 0)
    for optimizer in pair:
        optimizer.param_groups[0]["momentum"] = momentum
        change(optimizer)
    with fastpatch.enabled("sgd"), served():
        verdict = fastpatch.explain(pair[1].step)
    assert (verdict.fast, verdict.reason) == (False, reason)
    assert "parameter 1" in verdict.detail
    result = step_twins(pair, fast=1 if raises else 2, **{reason: 1})
    assert (result[0] == "returned") != raises, result


def test_a_plain_subclass_as_gradient() -> None:
    pair = three()
    for optimizer in pair:
        grad(lambda g: g.as_subclass(PlainSubclass))(optimizer)
    step_twins(pair, fast=2, torch_function=1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it
def test_forward_mode_tangents() -> None:
    pair = three()
    for optimizer in pair:
        second(optimizer).requires_grad_(False)

    def step(optimizer: Any) -> str:
        param = second(optimizer)
        plain = param.grad
        with fwad.dual_level():
            param.grad = fwad.make_dual(plain, torch.ones(19))
            optimizer.step()
            tangent = fwad.unpack_dual(param).tangent
        param.grad = plain
        return repr(tangent)

    # Within such a level no tensor is asked whether it has one.
    assert step_twins(pair, call=step, forward_ad=1)[0] == "returned"


def test_gradients_that_are_absent_count_as_nothing() -> None:
    pair = three()
    set_grads(pair, [None, None, None])
    step_twins(pair)
