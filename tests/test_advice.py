"""What an advice says to do has the call served: each is followed here, where this machine can."""

import pytest
import torch
import torch.nn.functional as F
from _explain_helpers import SERVED, all_on, check, optimizer_with, parameter, refused  # noqa: F401 (all_on is a fixture)

import fastpatch

X = torch.ones(3)


class Plain(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


class Overrides(torch.Tensor):
    """torch.Tensor's own __torch_function__ applies."""


def words(reason):
    from fastpatch import _native

    return _native.reasons()[reason][1]


def made_in_inference():
    with torch.inference_mode():
        return torch.ones(3)


def plain(tensor):
    return tensor.as_subclass(torch.Tensor)


# A code, what its advice holds word for word, a target that is refused, and what the advice makes of it.
TENSORS = [
    ("dtype", "target.to(input.dtype)", X.double(), lambda target: target.to(X.dtype)),
    ("subclass", "tensor.as_subclass(torch.Tensor)", X.as_subclass(Plain), plain),
    ("torch_function", "tensor.as_subclass(torch.Tensor)", X.as_subclass(Overrides), plain),
    ("layout", "tensor.to_dense()", X.to_sparse(), lambda tensor: tensor.to_dense()),
    ("lazy_negation", ".resolve_neg()", X.to(torch.complex64).conj().imag, lambda tensor: tensor.resolve_neg()),
    ("inference_tensor", "tensor.clone()", made_in_inference(), lambda tensor: tensor.clone()),
    ("shape_mismatch", "target.view_as(input)", torch.ones(3, 1, 1)[:, :, 0], lambda target: target.view_as(X)),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "text", "target", "follow"), TENSORS, ids=[line[0] for line in TENSORS])
def test_of_tensors(reason, text, target, follow):
    assert text in words(reason)
    loss = torch._C._nn.huber_loss if reason == "shape_mismatch" else F.huber_loss
    arguments = (1, 1.0) if reason == "shape_mismatch" else ()
    check("huber_loss", refused(reason), loss, X, target, *arguments)
    check("huber_loss", SERVED, loss, X, follow(target), *arguments)


def test_strides():
    assert ".contiguous() on both" in words("strides")
    gaps = torch.ones(6)[::2]
    check("huber_loss", refused("strides"), F.huber_loss, gaps, X)
    check("huber_loss", SERVED, F.huber_loss, gaps.contiguous(), X)


@pytest.mark.parametrize(
    ("reason", "text", "refused_options", "options"),
    [
        ("beta", "0.0 makes it the L1 loss", {"beta": -1.0}, {"beta": 0.0}),
        ("legacy_arguments", "pass reduction='mean', 'sum' or 'none'", {"reduce": 0}, {"reduction": "none"}),
    ],
)
def test_of_arguments(reason, text, refused_options, options):
    assert text in words(reason)
    check("smooth_l1_loss", refused(reason), F.smooth_l1_loss, X, X, **refused_options)
    check("smooth_l1_loss", SERVED, F.smooth_l1_loss, X, X, **options)
    if reason == "beta":
        assert torch.equal(F.smooth_l1_loss(X, 2 * X, **options), F.l1_loss(X, 2 * X))


def test_weight():
    advice = "(F.huber_loss(input, target, reduction='none') * weight).mean()"
    assert advice in words("weight")
    input, target, weight = torch.tensor([0.3, -2.5, 7.0]), torch.zeros(3), torch.tensor([0.1, 0.7, 1.3])
    check("huber_loss", refused("weight"), F.huber_loss, input, target, weight=weight)
    fastpatch.reset_report()
    ours = eval(advice)
    assert fastpatch.report().to_dict()["huber_loss"] == {"fast": 1, "fallback": {}}
    assert torch.equal(ours, F.huber_loss(input, target, weight=weight))


def test_inference_mode():
    assert "torch.no_grad()" in words("inference_mode")
    with torch.inference_mode():
        check("huber_loss", refused("inference_mode"), F.huber_loss, X, X)
    with torch.no_grad():
        check("huber_loss", SERVED, F.huber_loss, X, X)


@pytest.mark.parametrize(
    ("reason", "text", "refused_options", "options"),
    [
        ("fused", "leave fused=True out", {"fused": True}, {}),
        ("tensor_hyperparameter", "lr=float(lr)", {"lr": torch.tensor([0.1])}, {"lr": float(torch.tensor([0.1]))}),
        ("hyperparameter", "finite Python floats", {"momentum": float("inf")}, {"momentum": 0.9}),
    ],
)
def test_of_hyperparameters(reason, text, refused_options, options):
    assert text in words(reason)
    check("sgd", refused(reason), optimizer_with([parameter()], **refused_options).step)
    check("sgd", SERVED, optimizer_with([parameter()], **options).step)


def test_sparse_grad():
    assert "param.grad = param.grad.to_dense()" in words("sparse_grad")
    param = parameter()
    param.grad = torch.ones(3).to_sparse()
    check("sgd", refused("sparse_grad"), optimizer_with([param]).step)
    param.grad = param.grad.to_dense()
    check("sgd", SERVED, optimizer_with([param]).step)


def test_overlap():
    assert "param.grad = param.grad.clone()" in words("overlap")
    param = parameter()
    param.grad = param.detach()
    check("sgd", refused("overlap"), optimizer_with([param]).step)
    param.grad = param.grad.clone()
    check("sgd", SERVED, optimizer_with([param]).step)


@pytest.mark.parametrize("buffer", [torch.ones(3).double(), "no tensor"], ids=["dtype", "kind"])
def test_momentum_buffer(buffer):
    assert "let the step make its buffer" in words("momentum_buffer")
    optimizer = optimizer_with([parameter()])
    (param,) = optimizer.param_groups[0]["params"]
    optimizer.state[param]["momentum_buffer"] = buffer
    check("sgd", refused("momentum_buffer"), optimizer.step)
    if isinstance(buffer, torch.Tensor):
        assert "load_state_dict() cast it" in words("momentum_buffer")
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        optimizer.state[param].clear()
    check("sgd", SERVED, optimizer.step)


def test_foreach():
    one = parameter()
    other = torch.nn.Parameter(one.detach())
    other.grad = torch.ones(3)
    check("sgd", refused("foreach"), optimizer_with([one, other], foreach=True).step)
    assert "leave foreach=True out" in words("foreach")
    check("sgd", SERVED, optimizer_with([one, other]).step)
    assert "in groups of their own" in words("foreach")
    check("sgd", SERVED, optimizer_with([{"params": [one]}, {"params": [other]}], foreach=True).step)


def test_non_leaf():
    assert "parameter.detach().requires_grad_()" in words("non_leaf")
    leaf = parameter()
    optimizer = optimizer_with([leaf, parameter()])
    params = optimizer.param_groups[0]["params"]
    params[0] = leaf * 1.0
    assert fastpatch.explain(optimizer.step).reason == "non_leaf"
    params[0] = params[0].detach().requires_grad_()
    check("sgd", SERVED, optimizer.step)


def test_disabled():
    fastpatch.disable()
    advice = fastpatch.explain(F.huber_loss, X, X).advice
    assert "fastpatch.enable()" in advice and "with fastpatch.enabled()" in advice
    with fastpatch.enabled():
        assert fastpatch.explain(F.huber_loss, X, X).fast
