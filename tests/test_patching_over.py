"""Attributes that somebody else patches over ours: theirs stay, and ours passes every call through."""

import contextlib
import functools
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from _scripts import run_text

import fastpatch

SGD = torch.optim.SGD
STOCK_LOSS = F.smooth_l1_loss
LOSSES = "smooth_l1_loss", "huber_loss"
OVER = "was replaced by somebody else while patched"


def optimizer_with_gradient():
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    param.grad = torch.tensor([0.3, 0.1, -0.7])
    return SGD([param], lr=0.1, momentum=0.9)


OWNERS = {
    **{f"torch.nn.functional.{loss}": F for loss in LOSSES},
    **{f"torch._C._nn.{loss}": torch._C._nn for loss in LOSSES},
    "torch.optim.SGD.step": SGD,
}


@pytest.fixture(params=OWNERS)
def patched_over(request):
    """(owner, name, their wrapper, qualified name): a wrapper of ours put in place of ours."""
    optimizer_with_gradient()
    owner, name = OWNERS[request.param], request.param.rpartition(".")[2]
    stock = vars(owner)[name]
    fastpatch.enable()
    ours = vars(owner)[name]
    assert ours is not stock

    @functools.wraps(ours)
    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    setattr(owner, name, theirs)
    yield owner, name, theirs, request.param
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fastpatch.disable()
    setattr(owner, name, stock)


def serve_once(owner, name):
    """One call through the attribute; returns the counters of its target."""
    fastpatch.reset_report()
    if owner is SGD:
        optimizer = optimizer_with_gradient()
        optimizer.step()
        assert optimizer.param_groups[0]["params"][0].tolist() != [1.0, -2.0, 0.5]
        return fastpatch.report().to_dict()["sgd"]
    x, y = torch.tensor([0.0, 3.0]), torch.tensor([1.0, 1.0])
    assert getattr(owner, name)(x, y, **({} if owner is F else {"reduction": 1})).item() == 1.0
    return fastpatch.report().to_dict()[name]


def test_what_somebody_put_over_us_stays_and_ours_passes_through(patched_over):
    owner, name, theirs, qualified = patched_over
    assert serve_once(owner, name) == {"fast": 1, "fallback": {}}
    with pytest.warns(RuntimeWarning, match=OVER) as caught:
        fastpatch.disable()
    assert [str(warning.message).split()[1] for warning in caught] == [qualified]
    assert vars(owner)[name] is theirs
    assert serve_once(owner, name) == {"fast": 0, "fallback": {}}


@pytest.mark.parametrize("rounds", [1, 2])
def test_enabling_over_what_somebody_put_over_us_counts_once(patched_over, rounds):
    owner, name, theirs, _ = patched_over
    with pytest.warns(RuntimeWarning, match=OVER):
        fastpatch.disable()
    # Theirs stays in place; what it calls reaches an inner patch point, if there is one behind it.
    behind = 0 if owner is torch._C._nn else 1
    for number in range(rounds):
        with pytest.warns(RuntimeWarning, match="had been replaced") if number == 0 else contextlib.nullcontext():
            fastpatch.enable()
        assert vars(owner)[name] is theirs
        assert serve_once(owner, name) == {"fast": behind, "fallback": {}}
        fastpatch.disable()  # no warning this time: ours isn't in place
        assert vars(owner)[name] is theirs
        assert serve_once(owner, name) == {"fast": 0, "fallback": {}}


def test_a_refused_call_through_two_layers_counts_once():
    fastpatch.enable()
    ours = F.smooth_l1_loss
    with mock.patch.object(F, "smooth_l1_loss", lambda *args, **kwargs: ours(*args, **kwargs)):
        with pytest.warns(RuntimeWarning, match=OVER):
            fastpatch.disable()
        with pytest.warns(RuntimeWarning, match="had been replaced"):
            fastpatch.enable()
        assert F.smooth_l1_loss(torch.ones(3), torch.ones(3, dtype=torch.float64)).item() == 0.0
        assert fastpatch.report().to_dict()["smooth_l1_loss"] == {"fast": 0, "fallback": {"dtype": 1}}
        fastpatch.disable()
    F.smooth_l1_loss = STOCK_LOSS  # mock.patch has put our proxy back


def test_our_proxy_put_back_after_disable_is_not_taken_for_an_original():
    fastpatch.enable()
    try:
        with mock.patch.object(F, "smooth_l1_loss", len), pytest.warns(RuntimeWarning, match=OVER):
            fastpatch.disable()
        fastpatch.enable()
        fastpatch.disable()
        assert F.smooth_l1_loss is STOCK_LOSS
    finally:
        F.smooth_l1_loss = STOCK_LOSS


def test_the_warning_names_the_line_of_disable(patched_over):
    with pytest.warns(RuntimeWarning, match=OVER) as caught:
        fastpatch.disable()
    assert [warning.filename for warning in caught] == [__file__]


# In a process of its own: what fails half-way would spoil all later tests.
WARNING_AS_ERROR = """
import warnings
import torch, torch.nn.functional as F, fastpatch
stock, builtin = F.smooth_l1_loss, torch._C._nn.smooth_l1_loss
fastpatch.enable()
ours = F.smooth_l1_loss
F.smooth_l1_loss = lambda *args: ours(*args)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    try:
        fastpatch.disable()
    except RuntimeWarning:
        print("raised")
F.smooth_l1_loss = stock
fastpatch.disable()
print(fastpatch.is_enabled(), F.smooth_l1_loss is stock, torch._C._nn.smooth_l1_loss is builtin)
fastpatch.enable()
print(F.smooth_l1_loss is not stock, F.smooth_l1_loss(torch.ones(3), torch.zeros(3)).item())
print(fastpatch.report().to_dict()["smooth_l1_loss"])
"""


def test_a_warning_that_is_an_error_leaves_nothing_half_done(tmp_path):
    done = run_text(WARNING_AS_ERROR, folder=tmp_path)
    assert done.stdout.splitlines() == ["raised", "False True True", "True 0.5", "{'fast': 1, 'fallback': {}}"]
