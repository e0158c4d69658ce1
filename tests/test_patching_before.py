"""What somebody patched before us, or beside us, keeps its effect: only torch's own functions are stood in for."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastpatch

SGD = torch.optim.SGD
sgd_module = sys.modules["torch.optim.sgd"]
HAD_BEEN = pytest.warns(RuntimeWarning, match="had been replaced by .* which stays")


def stepped() -> tuple[list[float], dict[str, Any]]:
    """A parameter after one step, and what was counted."""
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    param.grad = torch.tensor([0.5, 0.25])
    optimizer = SGD([param], lr=0.1, momentum=0.9)
    fastpatch.reset_report()
    optimizer.step()
    return param.tolist(), fastpatch.report().to_dict()["sgd"]


def test_a_loss_of_somebodys_own_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = F.smooth_l1_loss
    monkeypatch.setattr(F, "smooth_l1_loss", lambda *args, **kwargs: 2 * stock(*args, **kwargs))
    theirs = F.smooth_l1_loss
    with HAD_BEEN, fastpatch.enabled("smooth_l1_loss"):
        assert F.smooth_l1_loss is theirs
        assert F.smooth_l1_loss(torch.ones(3), torch.zeros(3)).item() == 1.0
        # Torch's own function behind theirs reaches the inner patch point.
        assert fastpatch.report().to_dict()["smooth_l1_loss"] == {"fast": 1, "fallback": {}}
    assert F.smooth_l1_loss is theirs


def test_a_step_of_somebodys_own_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped()  # torch hooks the step
    stock, seen = SGD.step, []

    def step(self: Any, closure: Any = None) -> Any:
        seen.append("step")
        return stock(self, closure)

    step.hooked = True  # type: ignore[attr-defined]
    step.__wrapped__ = stock  # type: ignore[attr-defined]  # as functools.wraps has it
    monkeypatch.setattr(SGD, "step", step)
    with HAD_BEEN, fastpatch.enabled("sgd"):
        _, counted = stepped()
    assert (seen, counted) == (["step"], {"fast": 1, "fallback": {}})


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name", "counted"),
    [
        (SGD, "_init_group", {"fast": 1, "fallback": {}}),
        (torch.optim.Optimizer, "_optimizer_step_code", {"fast": 1, "fallback": {}}),
        (sgd_module, "sgd", None),
        (sgd_module, "_single_tensor_sgd", {"fast": 0, "fallback": {"optimizer": 1}}),
    ],
)
def test_a_part_of_the_step_that_somebody_replaced_is_called(
    when: str, owner: Any, name: str, counted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = stepped()
    stock, seen = getattr(owner, name), []
    if when == "after":
        fastpatch.enable("sgd")
        stock = getattr(owner, name)

    def theirs(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return stock(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, theirs)
        if when == "before" and name == "sgd":
            with HAD_BEEN:
                fastpatch.enable("sgd")
        fastpatch.enable("sgd")
        got, report = stepped()
    fastpatch.disable()
    assert seen == [name]
    assert got == expected
    if counted is not None:
        assert report == counted


def test_a_state_that_a_factory_fills_is_left_to_stock() -> None:
    from collections import defaultdict

    param = torch.nn.Parameter(torch.ones(1 << 12))
    param.grad = torch.ones_like(param)
    optimizer = SGD([param], lr=0.1, momentum=0.9)
    optimizer.state = defaultdict(lambda: {"momentum_buffer": torch.zeros(1)})
    with fastpatch.enabled("sgd"), pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        optimizer.step()
    assert fastpatch.report().to_dict()["sgd"] == {"fast": 0, "fallback": {"momentum_buffer": 1}}


def test_a_mixed_group_keeps_stocks_choice_of_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock chooses foreach by all parameters of a group; a part of them must not choose anew."""
    devices: list[list[str]] = []
    stock = sgd_module._default_to_fused_or_foreach

    def watched(params: Any, **kwargs: Any) -> Any:
        devices.append([param.device.type for param in params])
        return stock(params, **kwargs)

    monkeypatch.setattr(sgd_module, "_default_to_fused_or_foreach", watched)
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, device="meta"))]
    for param in params:
        param.grad = torch.ones_like(param)
    with fastpatch.enabled("sgd"):
        SGD(params, lr=0.1).step()
    assert devices == []
    assert fastpatch.report().to_dict()["sgd"] == {"fast": 1, "fallback": {"device": 1}}
