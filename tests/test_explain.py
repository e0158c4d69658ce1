"""explain(): agrees with what the call then does, and changes nothing."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _explain_helpers import SERVED, all_on, check, optimizer_with, parameter, refused  # noqa: F401 (all_on is a fixture)

import fastpatch
from fastpatch import explain

SGD = torch.optim.SGD
EARLY_LOSS, EARLY_BUILTIN = F.smooth_l1_loss, torch._C._nn.smooth_l1_loss


# ---------------------------------------------------------------------------------------------------------- the loss


class Loss(torch.nn.SmoothL1Loss):
    """A subclass that changes nothing."""


class Overrides(torch.Tensor):
    """torch.Tensor's own __torch_function__ applies."""


class Plain(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


def pairs():
    x, y = torch.tensor([0.25, -3.0, 1.0]), torch.tensor([1.0, 1.0, 1.0])
    return {
        "plain": (SERVED, x, y),
        "with gradient": (SERVED, x.clone().requires_grad_(), y),
        "transposed alike": (SERVED, torch.ones(3, 2).t(), torch.zeros(3, 2).t()),
        "double": (refused("dtype"), x.double(), y.double()),
        "mixed": (refused("dtype"), x, y.double()),
        "complex": (refused("complex"), x.to(torch.complex64), y.to(torch.complex64)),
        "broadcast": (refused("shape_mismatch"), x, y[:1]),
        "strided": (refused("strides"), torch.ones(6)[::2], y),
        "empty": (refused("empty"), x[:0], y[:0]),
        "sparse": (refused("layout"), x.to_sparse(), y.to_sparse()),
        "meta": (refused("device"), x.to("meta"), y.to("meta")),
        "negated": (refused("lazy_negation"), torch.ones(3, dtype=torch.complex64).conj().imag, y),
        "with __torch_function__": (refused("torch_function"), x.as_subclass(Overrides), y),
        "subclass": (refused("subclass"), x, y.as_subclass(Plain)),
        "no tensor": (refused("arguments"), [1.0], y),
    }


@pytest.mark.parametrize("pair", pairs())
def test_loss_by_tensors(pair):
    expected, x, y = pairs()[pair]
    check("smooth_l1_loss", expected, F.smooth_l1_loss, x, y)
    check("smooth_l1_loss", expected, F.smooth_l1_loss, target=y, input=x, reduction="sum")
    check("smooth_l1_loss", expected, torch._C._nn.smooth_l1_loss, x, y, 1, 1.0)
    check("smooth_l1_loss", expected, torch.nn.SmoothL1Loss(), x, y)
    check("smooth_l1_loss", expected, Loss(reduction="none"), x, target=y)


def test_expanded_tensor_is_a_matter_of_strides():
    check("smooth_l1_loss", refused("strides"), F.smooth_l1_loss, torch.ones(1).expand(3), torch.ones(3))


@pytest.mark.parametrize(
    ("expected", "args", "kwargs"),
    [
        (SERVED, (), {"beta": 0.3}),
        (SERVED, (), {"beta": 2, "reduction": "none"}),
        (SERVED, (None, None, "sum"), {}),
        (refused("beta"), (), {"beta": 0.0}),
        (refused("beta"), (), {"beta": -1.0}),
        (refused("beta"), (), {"beta": float("inf")}),
        (refused("beta"), (), {"beta": 1e-45}),
        (refused("arguments"), (), {"reduction": "average"}),
        (refused("arguments"), (), {"unknown": 1}),
        (refused("legacy_arguments"), (True,), {}),
        (refused("legacy_arguments"), (), {"reduce": False}),
    ],
)
def test_loss_by_arguments(expected, args, kwargs):
    check("smooth_l1_loss", expected, F.smooth_l1_loss, torch.ones(3), torch.zeros(3), *args, **kwargs)


@pytest.mark.parametrize("fn", [lambda: F.smooth_l1_loss, lambda: torch._C._nn.smooth_l1_loss])
def test_loss_without_arguments(fn):
    check("smooth_l1_loss", refused("arguments"), fn())


def test_module_by_its_settings():
    x, y = torch.ones(3), torch.zeros(3)
    check("smooth_l1_loss", refused("beta"), torch.nn.SmoothL1Loss(beta=0.0), x, y)
    check("smooth_l1_loss", SERVED, torch.nn.SmoothL1Loss(reduction="none", beta=0.5), x, y)


@pytest.mark.parametrize(("reason", "mode"), [("inference_mode", torch.inference_mode)])
def test_loss_and_step_by_mode(reason, mode):
    x, y = torch.ones(3), torch.zeros(3)
    optimizer = optimizer_with([parameter()])
    with mode():
        check("smooth_l1_loss", refused(reason), F.smooth_l1_loss, x, y)
        check("sgd", refused(reason), optimizer.step)


def test_early_bound_loss():
    x = torch.ones(3)
    check("smooth_l1_loss", SERVED, EARLY_LOSS, x, x)
    check("smooth_l1_loss", refused("dtype"), EARLY_LOSS, x.double(), x)


def test_early_bound_loss_with_legacy_arguments_is_served():
    check("smooth_l1_loss", SERVED, EARLY_LOSS, torch.ones(3), torch.zeros(3), True)


def test_early_bound_builtin_is_not_fast():
    assert not explain(EARLY_BUILTIN, torch.ones(3), torch.ones(3), 1, 1.0).fast


# ------------------------------------------------------------------------------------------------- changes nothing


def test_explaining_a_loss_changes_no_tensor():
    x = torch.tensor([0.25, -3.0], requires_grad=True)
    y = torch.tensor([1.0, 1.0])
    explain(F.smooth_l1_loss, x, y)
    assert (x._version, y._version, x.grad, x.tolist()) == (0, 0, None, [0.25, -3.0])
    assert fastpatch.report().to_dict()["smooth_l1_loss"] == {"fast": 0, "fallback": {}}


def test_explaining_warns_of_nothing_and_raises_nothing_of_stocks():
    explain(F.smooth_l1_loss, torch.ones(2), torch.ones(3), reduction="average")  # warnings are errors here
    with fastpatch.enabled(strict=True):
        assert explain(F.smooth_l1_loss, torch.ones(2), torch.ones(3)).reason == "shape_mismatch"


# ---------------------------------------------------------------------------------------------- off, and unknown


def test_off():
    x = torch.ones(3)
    step = optimizer_with([parameter()]).step
    with fastpatch.disabled("smooth_l1_loss"):
        for fn, args in ((F.smooth_l1_loss, (x, x)), (torch.nn.SmoothL1Loss(), (x, x)), (EARLY_LOSS, ())):
            explanation = explain(fn, *args)
            assert (explanation.fast, explanation.reason) == refused("disabled")
            assert "fastpatch.enable()" in explanation.detail
        assert explain(step).fast
    fastpatch.disable()
    assert explain(step).reason == "disabled"
    with fastpatch.enabled("sgd"):
        assert explain(step).fast
        assert explain(F.smooth_l1_loss, x, x).reason == "disabled"


def test_text():
    x = torch.ones(3)
    assert str(explain(F.smooth_l1_loss, x, x)) == "smooth_l1_loss: fast: served by the compiled implementation"
    text = str(explain(F.smooth_l1_loss, x, x.double()))
    assert text.startswith("smooth_l1_loss: stock, because of dtype: only float32")


@pytest.mark.parametrize(
    "fn",
    [len, F.l1_loss, torch.nn.L1Loss(), 3, None, torch.ones(2), "step", torch.optim.Adam([torch.ones(1)], lr=0.1).step],
    ids=lambda fn: type(fn).__name__,
)
def test_unknown_functions_are_quoted(fn):
    with pytest.raises(ValueError, match=re.escape(f"fastpatch.explain: no target serves {fn!r}; give ")):
        explain(fn)


def test_unknown_functions_that_compare_like_arrays_are_quoted():
    with pytest.raises(ValueError, match=r"fastpatch\.explain: no target serves array"):
        explain(np.ones(2))
