"""explain(): agrees with what the call then does, and changes nothing."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _explain_helpers import SERVED, all_on, check, optimizer_with, parameter, refused  # noqa: F401 (all_on is a fixture)

import fastpatch
from fastpatch import _build, explain
from fastpatch.targets import TARGETS

SGD = torch.optim.SGD
LOSSES = pytest.mark.parametrize("loss", ["smooth_l1_loss", "huber_loss"])
MODULES = {"smooth_l1_loss": torch.nn.SmoothL1Loss, "huber_loss": torch.nn.HuberLoss}
EARLY = {"smooth_l1_loss": F.smooth_l1_loss, "huber_loss": F.huber_loss}
EARLY_BUILTIN = {"smooth_l1_loss": torch._C._nn.smooth_l1_loss, "huber_loss": torch._C._nn.huber_loss}


# ---------------------------------------------------------------------------------------------------------- the loss


class Overrides(torch.Tensor):
    """torch.Tensor's own __torch_function__ applies."""


class Plain(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


def pairs(loss="smooth_l1_loss"):
    """{name: (expected at the outer patch point, input, target)}"""

    def differs(huber):
        """Where stock's Huber loss isn't what its smooth L1 is."""
        return refused(huber) if loss == "huber_loss" else SERVED

    x, y = torch.tensor([0.25, -3.0, 1.0]), torch.tensor([1.0, 1.0, 1.0])
    return {
        "plain": (SERVED, x, y),
        "with gradient": (SERVED, x.clone().requires_grad_(), y),
        "transposed alike": (SERVED, torch.ones(3, 2).t(), torch.zeros(3, 2).t()),
        "transposed": (SERVED, torch.ones(3, 2), torch.zeros(2, 3).t()),
        "double": (SERVED, x.double(), y.double()),
        "bfloat16": (SERVED, x.bfloat16(), y.bfloat16()),
        "float16": (SERVED, x.half(), y.half()),
        "mixed": (refused("dtype"), x, y.double()),
        "mixed with a reduced type": (differs("dtype"), x.bfloat16(), y),
        "integers": (SERVED, x, y.long()),
        "booleans": (refused("dtype"), x, y.bool()),
        "complex": (refused("complex"), x.to(torch.complex64), y.to(torch.complex64)),
        "broadcast": (SERVED, x, y[:1]),
        "no broadcast": (refused("shape_mismatch"), x, y[:2]),
        "strided": (differs("strides"), torch.ones(6)[::2], y),
        "strided target": (SERVED, x, torch.ones(6)[::2]),
        "expanded": (differs("strides"), torch.ones(1).expand(3), y),
        "strided and mixed": (
            refused("strides" if loss == "smooth_l1_loss" else "dtype"),
            torch.ones(6).half()[::2],
            y,
        ),
        "empty": (SERVED, x[:0], y[:0]),
        "sparse": (refused("layout"), x.to_sparse(), y.to_sparse()),
        "meta": (refused("device"), x.to("meta"), y.to("meta")),
        "negated": (refused("lazy_negation"), torch.ones(3, dtype=torch.complex64).conj().imag, y),
        "with __torch_function__": (refused("torch_function"), x.as_subclass(Overrides), y),
        "subclass": (refused("subclass"), x, y.as_subclass(Plain)),
        "no tensor": (refused("arguments"), [1.0], y),
    }


@LOSSES
@pytest.mark.parametrize("pair", pairs())
def test_loss_by_tensors(loss, pair):
    expected, x, y = pairs(loss)[pair]
    subclass = type("Loss", (MODULES[loss],), {})
    check(loss, expected, getattr(F, loss), x, y)
    check(loss, expected, getattr(F, loss), target=y, input=x, reduction="sum")
    check(loss, expected, MODULES[loss](), x, y)
    check(loss, expected, subclass(reduction="none"), x, target=y)
    inner = refused("shape_mismatch") if pair == "broadcast" else expected
    check(loss, inner, getattr(torch._C._nn, loss), x, y, 1, 1.0)


@pytest.mark.parametrize(
    ("expected", "args", "kwargs"),
    [
        (SERVED, (None, None, "sum"), {}),
        (SERVED, (), {"beta": 0.0}),
        (refused("arguments"), (), {"delta": 1.0}),
        (SERVED, (True,), {}),
        (SERVED, (), {"reduce": False}),
        (refused("legacy_arguments"), (), {"reduce": 0}),
        (refused("legacy_arguments"), ("sum",), {}),
    ],
)
def test_smooth_l1_loss_by_arguments(expected, args, kwargs):
    check("smooth_l1_loss", expected, F.smooth_l1_loss, torch.ones(3), torch.zeros(3), *args, **kwargs)


@pytest.mark.parametrize(
    ("expected", "args", "kwargs"),
    [
        (SERVED, ("sum", 2.0, None), {}),
        (refused("delta"), (), {"delta": 0.0}),
        (refused("arguments"), (), {"beta": 1.0}),
        (refused("weight"), (), {"weight": torch.ones(3)}),
        (refused("weight"), (), {"weight": torch.ones(2)}),
        (refused("arguments"), (), {"weight": 2.0}),
    ],
)
def test_huber_loss_by_arguments(expected, args, kwargs):
    check("huber_loss", expected, F.huber_loss, torch.ones(3), torch.zeros(3), *args, **kwargs)


@LOSSES
@pytest.mark.parametrize(
    ("expected", "number"),
    [
        *((SERVED, number) for number in (0.3, 2, float("inf"), 1e300, np.float64(0.3), torch.tensor(0.3))),
        *((None, number) for number in (-1.0, float("nan"), 1e-45, 2.3e-38, True, "1", None, torch.tensor([0.3]))),
    ],
    ids=repr,
)
def test_loss_by_threshold(loss, expected, number):
    name = {"smooth_l1_loss": "beta", "huber_loss": "delta"}[loss]
    expected = expected or refused(name)
    x, y = torch.ones(3), torch.zeros(3)
    check(loss, expected, getattr(F, loss), x, y, **{name: number, "reduction": "none"})
    check(loss, expected, getattr(torch._C._nn, loss), x, y, 0, number)
    module = MODULES[loss]()
    setattr(module, name, number)  # nn.HuberLoss itself refuses some
    check(loss, expected, module, x, y)


@LOSSES
def test_loss_by_reduction(loss):
    check(loss, refused("arguments"), getattr(F, loss), torch.ones(3), torch.zeros(3), reduction="average")


@LOSSES
def test_loss_without_arguments(loss):
    check(loss, refused("arguments"), getattr(F, loss))
    check(loss, refused("arguments"), getattr(torch._C._nn, loss))


@LOSSES
@pytest.mark.parametrize(("reason", "mode"), [("inference_mode", torch.inference_mode)])
def test_loss_and_step_by_mode(loss, reason, mode):
    x, y = torch.ones(3), torch.zeros(3)
    optimizer = optimizer_with([parameter()])
    with mode():
        check(loss, refused(reason), getattr(F, loss), x, y)
        check("sgd", refused(reason), optimizer.step)


@LOSSES
def test_loss_under_autocast_takes_reduced_types_together(loss):
    x, y = torch.ones(3), torch.zeros(3)
    with torch.autocast("cpu"):
        check(loss, SERVED, getattr(F, loss), x.bfloat16(), y.half())
        check(loss, SERVED, getattr(F, loss), x, y.half())
        check(loss, refused("dtype"), getattr(F, loss), x.bfloat16(), y.double())
        check(loss, refused("strides"), getattr(F, loss), torch.ones(6).half()[::2], y)


@LOSSES
def test_early_bound_loss(loss):
    x = torch.ones(3)
    check(loss, SERVED, EARLY[loss], x, x)
    check(loss, SERVED, EARLY[loss], x.double(), x[:1].double())
    check(loss, refused("dtype"), EARLY[loss], x.double(), x)


def test_early_bound_loss_with_legacy_arguments_is_served():
    check("smooth_l1_loss", SERVED, EARLY["smooth_l1_loss"], torch.ones(3), torch.zeros(3), True)


def test_early_bound_loss_with_a_weight_is_served_and_weighted_by_stock():
    check("huber_loss", SERVED, EARLY["huber_loss"], torch.ones(3), torch.zeros(3), weight=torch.ones(3))


@pytest.mark.parametrize("beta", [0, -0.0, torch.tensor(0.0)])
def test_early_bound_loss_that_no_patch_point_sees(beta):
    x, y = torch.ones(3), torch.zeros(3)
    explanation = explain(EARLY["smooth_l1_loss"], x, y, beta=beta)
    assert (explanation.fast, explanation.reason) == refused("early_bound")
    assert EARLY["smooth_l1_loss"](x, y, beta=beta).item() == 1.0
    assert fastpatch.report().to_dict()["smooth_l1_loss"] == {"fast": 0, "fallback": {}}


@LOSSES
def test_early_bound_builtin_is_not_fast(loss):
    explanation = explain(EARLY_BUILTIN[loss], torch.ones(3), torch.ones(3), 1, 1.0)
    assert (explanation.fast, explanation.reason) == refused("early_bound")


# ------------------------------------------------------------------------------------------------- changes nothing


@LOSSES
def test_explaining_a_loss_changes_no_tensor(loss):
    x = torch.tensor([0.25, -3.0], requires_grad=True)
    y = torch.tensor([1.0, 1.0])
    assert explain(getattr(F, loss), x, y).fast
    assert explain(EARLY[loss], x, y).fast
    assert (x._version, y._version, x.grad, x.tolist()) == (0, 0, None, [0.25, -3.0])
    assert fastpatch.report().to_dict()[loss] == {"fast": 0, "fallback": {}}


@LOSSES
def test_explaining_warns_of_nothing_and_raises_nothing_of_stocks(loss):
    explain(getattr(F, loss), torch.ones(2), torch.ones(3), reduction="average")  # warnings are errors here
    assert explain(getattr(F, loss), torch.ones(2), torch.ones(1)).fast
    assert explain(EARLY[loss], torch.ones(2), torch.ones(1)).fast
    with fastpatch.enabled(strict=True):
        assert explain(getattr(F, loss), torch.ones(2), torch.ones(3)).reason == "shape_mismatch"


def test_explaining_deprecated_arguments_warns_of_nothing():
    for loss in (F.smooth_l1_loss, EARLY["smooth_l1_loss"]):
        assert explain(loss, torch.ones(2), torch.ones(2), size_average=False).fast  # warnings are errors here


# ---------------------------------------------------------------------------------------------- off, and unknown


def test_off():
    x = torch.ones(3)
    step = optimizer_with([parameter()]).step
    with fastpatch.disabled("smooth_l1_loss"):
        for fn, args in ((F.smooth_l1_loss, (x, x)), (torch.nn.SmoothL1Loss(), (x, x)), (EARLY["smooth_l1_loss"], ())):
            explanation = explain(fn, *args)
            assert (explanation.fast, explanation.reason) == refused("disabled")
            assert "fastpatch.enable()" in explanation.advice
        assert explain(step).fast
    fastpatch.disable()
    assert explain(step).reason == "disabled"
    with fastpatch.enabled("sgd"):
        assert explain(step).fast
        assert explain(F.smooth_l1_loss, x, x).reason == "disabled"


def test_text():
    x = torch.ones(3)
    first = str(explain(F.smooth_l1_loss, x, x)).splitlines()[0]
    assert first == "smooth_l1_loss: fast: served by the compiled implementation"
    text = str(explain(F.smooth_l1_loss, x, x.double()))
    assert text.startswith("smooth_l1_loss: stock, because of dtype: a dtype or a mixture that is not served")


def test_without_cuda_kernels_the_text_says_why(monkeypatch):
    monkeypatch.setattr(_build, "_without_cuda", "no nvcc was found")
    detail = TARGETS["sgd"].explanation("cuda_not_built").detail
    assert detail == "a CUDA tensor, and the native library has no CUDA kernels: no nvcc was found"


@pytest.mark.parametrize(
    "fn",
    [len, F.l1_loss, torch.nn.L1Loss(), 3, None, torch.ones(2), "step", torch.optim.Adam([torch.ones(1)], lr=0.1).step],
    ids=lambda fn: type(fn).__name__,
)
def test_unknown_functions_are_quoted(fn):
    with pytest.raises(ValueError, match=re.escape(f"fastpatch.explain: no target serves {fn!r}; give ")):
        explain(fn)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_isnt_its_step(kind):
    told = f"fastpatch.explain: no target serves the {kind.__name__} itself; give "
    with pytest.raises(ValueError, match=told) as caught:
        explain(kind([torch.ones(1)], lr=0.1))
    assert "the step of a torch.optim.SGD" in str(caught.value)


def test_unknown_functions_that_compare_like_arrays_are_quoted():
    with pytest.raises(ValueError, match=r"fastpatch\.explain: no target serves array"):
        explain(np.ones(2))
