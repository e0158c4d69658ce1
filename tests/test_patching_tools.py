"""While patched: torch.jit and torch.fx go on working, and no Python frame of ours stands between user and stock."""

import inspect
import os
import pickle
import traceback
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from _scripts import run_text

import fastpatch

SGD = torch.optim.SGD
STOCK_LOSS, STOCK_BUILTIN = F.smooth_l1_loss, torch._C._nn.smooth_l1_loss
EARLY = {"smooth_l1_loss": F.smooth_l1_loss, "huber_loss": F.huber_loss}
PACKAGE = Path(fastpatch.__file__).parent


def loss_counts(loss="smooth_l1_loss"):
    return fastpatch.report().to_dict()[loss]


# ----------------------------------------------------------------------------------------------------- torch's tools


def functional_loss(x, y):
    return F.smooth_l1_loss(x, y, reduction="sum", beta=0.5)


def builtin_loss(x, y):
    return torch._C._nn.smooth_l1_loss(x, y, 2, 0.5)


def functional_huber_loss(x, y):
    return F.huber_loss(x, y, reduction="sum", delta=0.5)


def builtin_huber_loss(x, y):
    return torch._C._nn.huber_loss(x, y, 2, 0.5)


SCRIPTED = {
    functional_loss: "smooth_l1_loss",
    builtin_loss: "smooth_l1_loss",
    functional_huber_loss: "huber_loss",
    builtin_huber_loss: "huber_loss",
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is not supported:DeprecationWarning")
@pytest.mark.parametrize("function", SCRIPTED)
def test_jit_script_while_patched_and_after(function):
    x, y = torch.linspace(-2, 2, 9), torch.zeros(9)
    expected = getattr(torch.ops.aten, SCRIPTED[function])(x, y, 2, 0.5)
    fastpatch.enable()
    while_patched = torch.jit.script(function)
    assert torch.equal(while_patched(x, y), expected)
    fastpatch.disable()
    assert torch.equal(while_patched(x, y), expected)
    after = torch.jit.script(same_source(function))
    assert torch.equal(after(x, y), expected)
    assert SCRIPTED[function] in str(after.inlined_graph)


def same_source(function):
    """A new function of the same source: torch.jit remembers what it has scripted by identity."""
    return types.FunctionType(function.__code__, function.__globals__, function.__name__ + "_again")


FIRST_JIT_USE = """
import warnings
import torch, torch.nn.functional as F, fastpatch
warnings.simplefilter("ignore", DeprecationWarning)
fastpatch.enable()
def functional(x, y):
    return F.smooth_l1_loss(x, y)
def builtin(x, y):
    return torch._C._nn.smooth_l1_loss(x, y)
x, y = torch.tensor([0.0, 3.0]), torch.tensor([1.0, 1.0])
scripted = [torch.jit.script(functional), torch.jit.script(builtin)]
F.smooth_l1_loss(x, y)
print(*(f(x, y).item() for f in scripted), fastpatch.report().to_dict()["smooth_l1_loss"]["fast"])
fastpatch.disable()
def builtin_again(x, y):
    return torch._C._nn.smooth_l1_loss(x, y, 2)
print(torch.jit.script(builtin_again)(x, y).item())
"""


def test_first_jit_use_of_a_process_is_while_patched(tmp_path):
    assert run_text(FIRST_JIT_USE, folder=tmp_path).stdout == "1.0 1.0 1\n2.0\n"


def test_builtin_without_reduction_gives_what_stock_gives():
    x, y = torch.tensor([0.0, 3.0]), torch.tensor([1.0, 1.0])
    expected = STOCK_BUILTIN(x, y)
    fastpatch.enable()
    assert torch.equal(torch._C._nn.smooth_l1_loss(x, y), expected)
    # Not the mean that its signature promises, so it is left alone.
    assert loss_counts() == {"fast": 0, "fallback": {"arguments": 1}}


class Criterion(torch.nn.Module):
    def forward(self, x, y):
        return F.smooth_l1_loss(x, y, reduction="sum") + torch._C._nn.smooth_l1_loss(x, y, 1)


def test_fx_trace_while_patched():
    x, y = torch.linspace(-2, 2, 9), torch.zeros(9)
    expected = Criterion()(x, y)
    fastpatch.enable()
    traced = torch.fx.symbolic_trace(Criterion())
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called[0] == STOCK_LOSS
    assert called[1] == STOCK_BUILTIN
    assert "torch.nn.functional.smooth_l1_loss" in traced.code
    traced = pickle.loads(pickle.dumps(traced))
    fastpatch.reset_report()
    assert torch.equal(traced(x, y), expected)
    assert loss_counts() == {"fast": 2, "fallback": {}}
    fastpatch.disable()
    assert torch.equal(traced(x, y), expected)
    assert loss_counts() == {"fast": 2, "fallback": {}}


# ---------------------------------------------------------------------------------------- nothing of ours in between


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("early_bound", [False, True])
@pytest.mark.parametrize("name", EARLY)
def test_warning_names_the_users_line(name, early_bound, served):
    fastpatch.enable()
    loss = EARLY[name] if early_bound else getattr(F, name)
    target = torch.ones(3, dtype=torch.float32 if served else torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss(torch.ones(2, 3), target)
        line = inspect.currentframe().f_lineno - 1
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]
    assert "different to the input size" in str(caught[0].message)
    assert loss_counts(name) == ({"fast": 1, "fallback": {}} if served else {"fast": 0, "fallback": {"dtype": 1}})


def files_of(frames):
    return {str(Path(frame.filename).resolve()) for frame in frames}


def is_ours(files):
    return any(file.startswith(str(PACKAGE.resolve()) + os.sep) for file in files)


def test_is_ours_recognises_the_package():
    assert is_ours({str(PACKAGE.resolve() / "_switch.py")})
    assert not is_ours({__file__})


def test_traceback_of_a_refused_call_has_no_frame_of_ours():
    fastpatch.enable()
    with pytest.raises(ValueError, match="average is not a valid value") as caught:
        F.smooth_l1_loss(torch.ones(2), torch.ones(2), reduction="average")
    files = files_of(traceback.extract_tb(caught.value.__traceback__))
    assert any(file.endswith("functional.py") for file in files)
    assert not is_ours(files)
    assert loss_counts() == {"fast": 0, "fallback": {"arguments": 1}}


@pytest.mark.parametrize("early_bound", [False, True])
def test_traceback_of_a_warning_that_is_an_error_ends_at_the_users_line(early_bound):
    fastpatch.enable()
    loss = STOCK_LOSS if early_bound else F.smooth_l1_loss
    with pytest.raises(UserWarning, match="different to the input size") as caught:  # warnings are errors here
        loss(torch.ones(2, 3), torch.ones(3))
    files = files_of(traceback.extract_tb(caught.value.__traceback__))
    assert __file__ in files
    assert not is_ours(files)
    assert loss_counts()["fast"] == 0


@pytest.mark.parametrize("hooked", [False, True])
def test_users_code_inside_step_sees_no_frame_of_ours(hooked):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = SGD([param], lr=0.1)
    seen = []
    if hooked:
        optimizer.register_step_pre_hook(lambda *_: seen.append(traceback.extract_stack()))
    fastpatch.enable()
    optimizer.step(lambda: seen.append(traceback.extract_stack()))
    assert len(seen) == 1 + hooked
    assert not any(is_ours(files_of(stack)) for stack in seen)
    assert fastpatch.report().to_dict()["sgd"] == {"fast": 1, "fallback": {}}
