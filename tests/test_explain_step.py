"""explain() of SGD: of step in all its forms, and of the function sgd. The loss is in test_explain.py."""

import sys

import pytest
import torch
from _explain_helpers import SERVED, all_on, check, optimizer_with, parameter, refused  # noqa: F401 (all_on is a fixture)

import fastpatch
from fastpatch import explain

SGD = torch.optim.SGD
sgd_module = sys.modules["torch.optim.sgd"]
EARLY_SGD = sgd_module.sgd


class CallsSuper(SGD):
    def step(self, closure=None):
        return super().step(closure)


class OwnInitGroup(SGD):
    def _init_group(self, *args):
        return super()._init_group(*args)


@pytest.mark.parametrize("cls", [SGD, CallsSuper])
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_step_of_every_kind(cls, scheduled, hooked):
    optimizer = optimizer_with([parameter()], cls)
    if scheduled:
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    if hooked:
        optimizer.register_step_post_hook(lambda *_: None)
    check("sgd", SERVED, optimizer.step)
    check("sgd", SERVED, optimizer.step, lambda: 1.0)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3).to_sparse()
    check("sgd", refused("sparse_grad"), optimizer.step)


def test_early_bound_step():
    fastpatch.disable()
    optimizer = optimizer_with([parameter()])
    step = optimizer.step
    fastpatch.enable()
    check("sgd", SERVED, step)


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        (None, {"foreach": True}),
        ("fused", {"fused": True}),
        (None, {"lr": torch.tensor(0.1)}),
        (None, {"weight_decay": torch.tensor(0.1, dtype=torch.bfloat16)}),
        ("tensor_hyperparameter", {"lr": torch.tensor([0.1])}),
        ("tensor_hyperparameter", {"momentum": torch.tensor(0.9)}),
        ("hyperparameter", {"momentum": float("inf")}),
    ],
)
def test_step_by_options(reason, options):
    check("sgd", SERVED if reason is None else refused(reason), optimizer_with([parameter()], **options).step)


def test_step_of_parameters_that_share_memory_under_foreach():
    one = parameter()
    other = torch.nn.Parameter(one.detach())
    other.grad = torch.ones(3)
    check("sgd", SERVED, optimizer_with([one, other]).step)
    optimizer = optimizer_with([{"params": [parameter()]}, {"params": [one, other], "foreach": True}])
    check("sgd", refused("foreach"), optimizer.step)
    assert explain(optimizer.step).detail.startswith("group 1: ")


def test_step_by_tensors_names_the_place():
    optimizer = optimizer_with([{"params": [parameter()]}, {"params": [parameter(), parameter(torch.complex64)]}])
    explanation = explain(optimizer.step)
    assert (explanation.fast, explanation.reason) == refused("complex")
    assert explanation.detail.startswith("group 1, parameter 1: ")
    optimizer.step()
    # fast only if all are: those that can be served are served all the same
    assert fastpatch.report().to_dict()["sgd"] == {"fast": 2, "fallback": {"complex": 1}}


def differentiable_step():
    return optimizer_with([torch.ones(3)], differentiable=True)


def step_with_grad_scale():
    optimizer = optimizer_with([parameter()])
    optimizer.grad_scale = torch.ones(())
    return optimizer


@pytest.mark.parametrize(
    ("expected", "make"),
    [
        (refused("differentiable"), differentiable_step),
        (refused("grad_scale"), step_with_grad_scale),
        (SERVED, lambda: optimizer_with([parameter()], OwnInitGroup)),
    ],
)
def test_step_that_only_the_inner_point_judges(expected, make):
    check("sgd", expected, make().step)


def sgd_arguments(dtype=torch.float32):
    options = {"momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False, "weight_decay": 0.1}
    return ([torch.ones(3, dtype=dtype)], [torch.ones(3, dtype=dtype)], [None]), {**options, "foreach": False}


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float16, SERVED), (torch.complex64, refused("complex"))])
def test_the_function_sgd(dtype, expected):
    args, kwargs = sgd_arguments(dtype)
    with torch.no_grad():
        check("sgd", expected, sgd_module.sgd, *args, **kwargs)
        check("sgd", expected, sgd_module.sgd, *args, **{**kwargs, "foreach": True})
        check("sgd", refused("fused"), sgd_module.sgd, *args, **{**kwargs, "fused": True})
        (param,), (grad,), _ = args
        twice = [param, param], [grad, grad], [None, None]
        for foreach, answer in ((False, expected), (True, expected if expected != SERVED else refused("foreach"))):
            check("sgd", answer, sgd_module.sgd, *twice, **{**kwargs, "foreach": foreach})
    check("sgd", refused("differentiable"), sgd_module.sgd, *args, **kwargs)


def test_early_bound_function_sgd_is_not_fast():
    args, kwargs = sgd_arguments()
    with torch.no_grad():
        assert not explain(EARLY_SGD, *args, **kwargs).fast


def snapshot(optimizer):
    tensors = [t for group in optimizer.param_groups for p in group["params"] for t in (p, p.grad)]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [(id(t), t._version, t.tolist(), t.grad_fn) for t in tensors], dict(optimizer.state), repr(optimizer)


@pytest.mark.parametrize("steps", [0, 2])
def test_explaining_a_step_changes_no_tensor_version_or_state(steps):
    optimizer = optimizer_with([parameter(), parameter(torch.complex64)])
    for _ in range(steps):
        optimizer.step()
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("explain ran a hook"))
    before, counts = snapshot(optimizer), fastpatch.report().to_dict()
    explain(optimizer.step)
    explain(optimizer.step, lambda: pytest.fail("explain ran the closure"))
    assert snapshot(optimizer) == before
    assert len(optimizer.state) == 2 * bool(steps)
    assert fastpatch.report().to_dict() == counts
