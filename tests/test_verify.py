"""enable(verify=...): which calls are checked against stock, and that a check changes nothing."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _helpers import assert_same, served
from _scripts import run_text
from _sgd_helpers import python_frames
from hypothesis import given
from hypothesis import strategies as st

import fastpatch
from fastpatch import _environment, _verify
from fastpatch.targets import _replay
from fastpatch.testing import Case, strategies

LOSSES = ("smooth_l1_loss", "huber_loss")


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(7, 3, requires_grad=True), torch.randn(7, 3)


def optimizer(**options: Any) -> torch.optim.SGD:
    params = [torch.nn.Parameter(torch.randn(size)) for size in (3, 17)]
    for param in params:
        param.grad = torch.randn_like(param)
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, **options)


def verified() -> dict[str, int]:
    return fastpatch.report().verified


@pytest.mark.parametrize("target", fastpatch.targets())
def test_what_is_checked_differs_from_stock_in_nothing(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of calls, every one of them checked: results and warnings are stock's, and no difference is told."""
    monkeypatch.setenv(_environment.VERIFY, "1")  # for the scopes that a case opens
    case: st.SearchStrategy[Case] = strategies.sgd_runs() if target == "sgd" else strategies.loss_calls(target)
    seen = {"fast": 0, "unchecked": 0}

    @given(case)
    def check(case: Case) -> None:
        before = verified().get(target, 0)
        made = case.compare()
        assert made.difference is None
        seen["fast"] += made.fast > 0
        seen["unchecked"] += made.fast > 0 and verified().get(target, 0) == before

    check()
    assert seen["fast"] > 50
    assert seen["unchecked"] == 0


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_each_gradient_count(name: str) -> None:
    input, target = operands()
    fastpatch.enable(verify=1.0)
    with served(name, fast=1):
        loss = getattr(F, name)(input, target.requires_grad_())
    assert verified() == {name: 1}
    loss.backward()
    assert verified() == {name: 3}
    with torch.no_grad():
        getattr(F, name)(input, target, reduction="none")
    assert verified() == {name: 4}
    assert "  verified                  4\n" in str(fastpatch.report())
    fastpatch.reset_report()
    assert verified() == {}


def hooked() -> torch.optim.SGD:
    made = optimizer()
    made.register_step_post_hook(lambda *args: None)
    return made


@pytest.mark.parametrize("make", [optimizer, hooked])  # served as a whole step, and by the function behind it
def test_a_step_counts_once(make: Callable[[], torch.optim.SGD]) -> None:
    stepped = make()
    fastpatch.enable(verify=1)
    with served("sgd", fast=2):
        stepped.step()
    assert verified() == {"sgd": 1}


def test_a_step_without_gradients_has_nothing_to_check() -> None:
    stepped = optimizer()
    stepped.zero_grad()
    fastpatch.enable(verify=1)
    stepped.step()
    assert verified() == {}


def test_parts_of_a_step_that_stock_serves_are_not_checked() -> None:
    stepped = optimizer()
    middle = torch.nn.Parameter(torch.randn(3, 2))
    middle.grad = torch.randn(3, 2).to_sparse()
    stepped.param_groups[0]["params"].insert(1, middle)
    fastpatch.enable(verify=1)
    with served("sgd", fast=2, fallback={"sparse_grad": 1}):
        stepped.step()
    assert verified() == {"sgd": 2}  # the runs before and after it


def test_a_parameter_in_two_groups() -> None:
    stepped = optimizer()
    shared = stepped.param_groups[0]["params"][0]
    stepped.param_groups.append({**stepped.param_groups[0], "params": [shared], "lr": 0.3})
    fastpatch.enable(verify=1)
    for _ in range(3):
        with served("sgd", fast=3):
            stepped.step()
    assert verified() == {"sgd": 3}


def test_the_same_parameter_without_momentum_later() -> None:
    stepped = optimizer()
    shared = stepped.param_groups[0]["params"][0]
    stepped.param_groups.append({**stepped.param_groups[0], "params": [shared], "momentum": 0})
    fastpatch.enable(verify=1)
    for _ in range(2):
        stepped.step()
    assert verified() == {"sgd": 2}


@pytest.mark.parametrize("what", ["gradient", "lr", "group"])
def test_what_another_thread_puts_in_place_meanwhile_is_served_and_not_checked(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the tensors are copied other threads run: a backward that makes new gradients, say."""
    stepped, expected = optimizer(), optimizer()
    expected.load_state_dict(stepped.state_dict())

    def change(made: torch.optim.SGD) -> None:
        group = made.param_groups[0]
        if what == "gradient":
            group["params"][1].grad = torch.ones(17)
        elif what == "lr":
            group["lr"] = 0.7
        else:
            group["params"] = group["params"][:1]

    for one, other in zip(*(made.param_groups[0]["params"] for made in (stepped, expected)), strict=True):
        with torch.no_grad():
            other.copy_(one)
        other.grad = one.grad.clone()
    params = list(stepped.param_groups[0]["params"])
    stock = list(expected.param_groups[0]["params"])
    change(expected)
    expected.step()
    copied = _replay.copied
    monkeypatch.setattr(_replay, "copied", lambda tensors: change(stepped) or copied(tensors))
    fastpatch.enable("sgd", verify=1)
    with served("sgd", fast=1 if what == "group" else 2):
        stepped.step()
    assert verified() == {}
    assert_same(params, stock)


def test_the_share() -> None:
    """0.25 of 2,000 is 500, with a standard deviation of 19.4: six of them happen once in 10^8 runs."""
    input, target = torch.ones(3), torch.zeros(3)
    fastpatch.enable(verify=0.25)
    for _ in range(2000):
        F.smooth_l1_loss(input, target)
    assert 383 < verified()["smooth_l1_loss"] < 617


def test_the_programs_random_numbers_stay_what_they_are() -> None:
    def drawn(rate: float) -> list[Any]:
        torch.manual_seed(3)
        random.seed(3)
        with fastpatch.enabled(verify=rate):
            F.smooth_l1_loss(*operands()).backward()
            optimizer().step()
        return [torch.rand(()).item(), random.random()]

    assert drawn(1.0) == drawn(0.0)


def test_the_last_enable_of_a_target_decides() -> None:
    fastpatch.enable(verify=1)
    fastpatch.enable("huber_loss")
    for name in LOSSES:
        getattr(F, name)(*operands())
    assert verified() == {"smooth_l1_loss": 1}


def test_the_innermost_scope_decides() -> None:
    fastpatch.enable(verify=1)
    with fastpatch.enabled("sgd"):
        F.smooth_l1_loss(*operands())  # of which the scope says nothing
        optimizer().step()
        assert verified() == {"smooth_l1_loss": 1}
        with fastpatch.enabled(verify=1):
            optimizer().step()
        optimizer().step()
    assert verified() == {"smooth_l1_loss": 1, "sgd": 1}

    @fastpatch.enabled(verify=1)
    def decorated() -> None:
        F.huber_loss(*operands())

    fastpatch.disable()
    decorated()
    F.huber_loss(*operands())
    assert verified()["huber_loss"] == 1


def test_a_graph_is_checked_wherever_its_backward_runs() -> None:
    with fastpatch.enabled(verify=1):
        loss = F.smooth_l1_loss(*operands())
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert verified() == {"smooth_l1_loss": 2}


def test_a_recorded_backward_is_stocks_and_not_checked() -> None:
    input, target = operands()
    with fastpatch.enabled(verify=1):
        (gradient,) = torch.autograd.grad(F.huber_loss(input, target), input, create_graph=True)
        gradient.sum().backward()
    assert verified() == {"huber_loss": 1}


def test_autocast() -> None:
    input, target = operands()
    with fastpatch.enabled(verify=1, strict=True), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.smooth_l1_loss(input.bfloat16(), target)
        loss.backward()
    assert verified() == {"smooth_l1_loss": 2}


def test_hooks_on_saved_tensors_run_as_often_as_without() -> None:
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    with fastpatch.enabled(verify=1), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.smooth_l1_loss(*operands()).backward()
    assert len(packed) == 2
    assert verified() == {"smooth_l1_loss": 2}


def test_training_with_threads() -> None:
    """Each in a model of its own: the GIL is released, locks and counters are shared."""

    def train() -> None:
        stepped = optimizer()
        for _ in range(30):
            F.smooth_l1_loss(*operands()).backward()
            stepped.step()

    fastpatch.enable(verify=1)
    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verified() == {"smooth_l1_loss": 240, "sgd": 120}
    assert fastpatch.is_enabled("sgd")


@pytest.mark.parametrize("fault", ["no memory", "compiling"])
def test_what_cannot_be_checked_is_served_all_the_same(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object) -> None:
        raise RuntimeError("not enough memory")

    fastpatch.enable(verify=1)
    if fault == "compiling":  # torch.compile looks at every frame that starts
        monkeypatch.setattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: False)
    else:
        monkeypatch.setattr(_replay, "copied", no_memory)
    with served("smooth_l1_loss", fast=1):
        F.smooth_l1_loss(*operands()).backward()
    if fault == "no memory":
        with served("sgd", fast=2):
            optimizer().step()
    assert verified() == {}


@pytest.mark.parametrize("mode", ["captures", "told of waiting"])
def test_a_gpu_is_not_waited_for_where_that_must_not_be(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: mode == "captures")
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: int(mode != "captures"))
    assert not _verify._may_wait_for(torch.device("cuda"))
    assert _verify._may_wait_for(torch.device("cpu"))


def test_it_costs_nothing_when_off() -> None:
    """No Python of ours runs, though it was on before."""
    stepped, (input, target) = optimizer(), operands()
    fastpatch.enable(verify=1)
    assert "begin" in python_frames(lambda: F.smooth_l1_loss(input, target))
    fastpatch.enable()
    stepped.step()
    assert python_frames(stepped.step) == []
    loss = F.smooth_l1_loss(input, target)
    assert python_frames(partial(F.smooth_l1_loss, input, target)) == []
    assert loss.grad_fn is not None
    with torch.no_grad():
        assert python_frames(partial(loss.grad_fn, torch.ones(()))) == []


@pytest.mark.parametrize(
    ("rate", "error"),
    [("0.1", TypeError), (True, TypeError), (None, TypeError), (torch.tensor(0.1), TypeError), (-0.1, ValueError),
     (1.1, ValueError), (float("nan"), ValueError)],
)  # fmt: skip
def test_a_rate_that_means_nothing(rate: Any, error: type[Exception]) -> None:
    for word, function in (("enable", fastpatch.enable), ("enabled", fastpatch.enabled)):
        with pytest.raises(error, match=rf"fastpatch\.{word}: verify must be a number from 0 to 1.*, not ") as raised:
            function(verify=rate)
        assert repr(rate) in str(raised.value)
    assert not fastpatch.is_enabled()


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_environment.VERIFY, "0")
    fastpatch.enable(verify=1)
    with fastpatch.enabled(verify=1):
        F.smooth_l1_loss(*operands())
    assert verified() == {}
    monkeypatch.setenv(_environment.VERIFY, "1.0")
    with fastpatch.enabled():
        F.smooth_l1_loss(*operands())
    assert verified() == {"smooth_l1_loss": 1}


def test_reports_add_up() -> None:
    fastpatch.enable(verify=1)
    F.smooth_l1_loss(*operands())
    before = fastpatch.report()
    optimizer().step()
    assert fastpatch.report().since(before).verified == {"sgd": 1}
    both = before + fastpatch.report()
    assert both.verified == {"smooth_l1_loss": 2, "sgd": 1}
    assert fastpatch.Report.from_json(both.to_json()).verified == both.verified
    assert "2 verified" in both._repr_html_()


COMPILED = """
import torch, torch.nn.functional as F, fastpatch

@torch.compile(backend="eager")
def step(input, target):
    torch._dynamo.graph_break()
    return F.smooth_l1_loss(input, target)

fastpatch.enable(verify=1)
input, target = torch.randn(5, requires_grad=True), torch.randn(5)
for _ in range(3):
    step(input, target).backward()
print(torch.equal(step(input, target), torch.ops.aten.smooth_l1_loss(input, target)))
"""


def test_torch_compile(tmp_path: Any) -> None:
    assert run_text(COMPILED, folder=tmp_path).stdout == "True\n"
