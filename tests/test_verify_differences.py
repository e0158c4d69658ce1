"""enable(verify=...): what happens when a checked call differs from stock."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _helpers import assert_same, served
from _scripts import run_script
from _switch_helpers import STOCK, outer_and_inner

import fastpatch
from fastpatch import _reproduction, _switch
from fastpatch.targets import TARGETS
from fastpatch.targets._loss_replay import LossGradientReplay, LossReplay
from fastpatch.targets._replay import Replay, Tensors
from fastpatch.targets._sgd_replay import SgdReplay

INPUT, TARGET = torch.tensor([[0.25, -3.0, 1.0], [1.5, 0.5, -0.75]]), torch.ones(2, 3)


@pytest.fixture(autouse=True)
def _after_it_all_is_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a difference leaves for the rest of the process is gone, and the reproductions lie in tmp_path."""
    fastpatch.enable()
    fastpatch.disable()
    for name in ("_unfit", "_fit", "_warned"):
        monkeypatch.setattr(_switch, name, type(getattr(_switch, name))(getattr(_switch, name)))
    monkeypatch.setattr(_reproduction, "folder", lambda: tmp_path / "differences")
    yield
    fastpatch.disable()


def as_if_stock_were(monkeypatch: pytest.MonkeyPatch, kind: type[Replay], change: Callable[[Tensors], object]) -> None:
    """Stock's results, of every replay of this kind, are changed: ours then differ."""
    by_stock = kind.by_stock

    def changed(self: Replay) -> Tensors:
        results = by_stock(self)
        if type(self) is kind:
            change(results)
        return results

    monkeypatch.setattr(kind, "by_stock", changed)


def up(tensor: torch.Tensor | None) -> None:
    """The last element becomes the next greater number."""
    assert tensor is not None
    last = tensor.data.as_strided((1,), (1,), tensor.numel() - 1)  # whose version counter is its own
    last.copy_(torch.nextafter(last, last + 1))


def loss(results: Tensors) -> None:
    up(results[0])


def told(caught: Any, name: str) -> Path:
    """The script that the one warning names."""
    assert [warning.category for warning in caught] == [fastpatch.DifferenceWarning]
    text = str(caught[0].message)
    start = f"fastpatch leaves {name!r} to PyTorch, since a call that was verified differed from it: "
    assert text.startswith(start)
    found = re.search(r"(\S+\.py) (?:reproduces it|makes the call again); please report it$", text)
    assert found is not None, text
    return Path(found[1])


def is_off(name: str) -> bool:
    return not fastpatch.is_enabled(name) and not any(point.installed for point in TARGETS[name].points)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_loss(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_stock_were(monkeypatch, LossReplay, loss)
    expected = F.smooth_l1_loss(INPUT, TARGET, reduction=reduction)
    up(expected)
    fastpatch.enable(verify=1)
    with pytest.warns(fastpatch.DifferenceWarning) as caught, served("smooth_l1_loss", fast=1):
        value = F.smooth_l1_loss(INPUT, TARGET, reduction=reduction)
    assert_same(value, expected)  # what stock has
    assert "loss: 1 of" in str(caught[0].message)
    assert "This call now has PyTorch's result" in str(caught[0].message)
    assert caught[0].filename == __file__
    told(caught, "smooth_l1_loss")
    assert is_off("smooth_l1_loss")
    assert fastpatch.is_enabled("huber_loss")
    assert F.smooth_l1_loss is STOCK[0]


def test_it_stays_off_everywhere_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_stock_were(monkeypatch, LossReplay, loss)
    kept = []
    with fastpatch.enabled(), fastpatch.enabled("huber_loss", verify=1):
        kept.append(F.huber_loss)
        with pytest.warns(fastpatch.DifferenceWarning, match="leaves 'huber_loss' to PyTorch"):
            F.huber_loss(INPUT, TARGET)
        assert is_off("huber_loss")
        assert fastpatch.is_enabled("sgd")
        explained = fastpatch.explain(F.huber_loss, INPUT, TARGET)
        assert not explained.fast
        assert "a call that was verified differed" in explained.detail
        refused = [guard.name for guard in explained.guards if guard.verdict == "refused"]
        assert refused == ["its self-test and verified calls found no difference from stock"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastpatch.enable()  # was said
    assert is_off("huber_loss")
    assert outer_and_inner()[2:] == STOCK[2:]
    with served("huber_loss"):
        kept[0](INPUT, TARGET)
    with pytest.raises(fastpatch.BuildError, match="a call that was verified differed"):
        fastpatch.enable("huber_loss", strict=True)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("of", ["input", "target"])
def test_a_gradient(of: str, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_stock_were(monkeypatch, LossGradientReplay, loss)
    operands = {"input": INPUT.clone(), "target": TARGET.clone()}
    leaf = operands[of].requires_grad_()
    (expected,) = torch.autograd.grad(F.huber_loss(**operands, reduction=reduction).sum(), leaf)
    up(expected)
    fastpatch.enable(verify=1)
    value = F.huber_loss(**operands, reduction=reduction).sum()
    with pytest.warns(fastpatch.DifferenceWarning) as caught:
        value.backward()
    assert_same(leaf.grad, expected)
    told(caught, "huber_loss")
    assert is_off("huber_loss")


def optimizer(count: int = 2, **options: Any) -> torch.optim.SGD:
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 5 + i)) for i in range(count)]
    for param in params:
        param.grad = torch.linspace(2, -3, param.numel())
    return torch.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, **options})


def state_of(made: torch.optim.SGD) -> list[torch.Tensor]:
    params = made.param_groups[0]["params"]
    return [*params, *(made.state[param]["momentum_buffer"] for param in params)]


@pytest.mark.parametrize("part", [0, 2, 3, 5], ids=["parameter 0", "momentum buffer 0", "parameter 1", "buffer 1"])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_step(part: int, hooked: bool, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, ours = optimizer(), optimizer()
    if hooked:
        ours.register_step_post_hook(lambda *args: None)
    for _ in range(steps - 1):
        stock.step()
        ours.step()
    stock.step()
    up(state_of(stock)[{0: 0, 3: 1, 2: 2, 5: 3}[part]].detach())
    as_if_stock_were(monkeypatch, SgdReplay, lambda results: len(results) > part and up(results[part]))
    fastpatch.enable(verify=1)
    with pytest.warns(fastpatch.DifferenceWarning) as caught, served("sgd", fast=2):
        ours.step()
    word = ("parameter", "gradient", "momentum buffer")[part % 3]
    assert f"{word} {part // 3}: 1 of {5 + part // 3} differ" in str(caught[0].message)
    assert_same(state_of(ours), state_of(stock))  # put right
    assert is_off("sgd")
    told(caught, "sgd")


def test_the_reproduction_is_small_and_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a step: the one element that differs. The script itself finds nothing, as only this process's stock is off."""

    def off(results: Tensors) -> None:
        for param in results[::3]:
            assert param is not None
            param[param == 0.75] += 1e-3

    as_if_stock_were(monkeypatch, SgdReplay, off)
    made = optimizer(9, lr=torch.tensor(0.25), momentum=0)
    fifth = made.param_groups[0]["params"][4]
    with torch.no_grad():
        fifth[6], fifth.grad[6] = 1.0, 1.0
    fastpatch.enable(verify=1)
    with pytest.warns(fastpatch.DifferenceWarning) as caught:
        made.step()
    script = told(caught, "sgd")
    assert script.parent == tmp_path / "differences"
    tensors = torch.load(script.with_suffix(".pt"))["tensors"]
    assert_same(tensors, [torch.tensor([1.0]), torch.tensor([1.0]), None])
    done = run_script(script, folder=tmp_path)
    assert done.stdout == "no difference\nserved by fastpatch: 1; left to stock: 0\n"
    text = script.read_text()
    assert "lr=torch.tensor(0.25, dtype=torch.float32)" in text
    assert text.startswith("# A difference between stock PyTorch and fastpatch: parameter 4: 1 of 9 differ, the first")


@pytest.mark.parametrize("kind", [LossReplay, LossGradientReplay])
def test_reproductions_of_losses_run(kind: type[Replay], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_if_stock_were(monkeypatch, kind, loss)
    input = INPUT.bfloat16().requires_grad_()
    fastpatch.enable(verify=1)
    with pytest.warns(fastpatch.DifferenceWarning) as caught, torch.autocast("cpu", dtype=torch.bfloat16):
        F.smooth_l1_loss(input, TARGET, beta=0.3, reduction="sum").backward()
    script = told(caught, "smooth_l1_loss")
    tensors = torch.load(script.with_suffix(".pt"))["tensors"]
    assert [tensor.numel() for tensor in tensors] == [1] * len(tensors)
    done = run_script(script, folder=tmp_path)
    assert done.stdout == "no difference\nserved by fastpatch: 1; left to stock: 0\n"


def once(change: Callable[[Tensors], object]) -> Callable[[Tensors], object]:
    left = [change]
    return lambda results: left.pop()(results) if left else None


def test_a_difference_that_does_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_stock_were(monkeypatch, LossReplay, once(loss))
    fastpatch.enable(verify=1)
    with pytest.warns(fastpatch.DifferenceWarning, match="it did not differ again when repeated") as caught:
        F.smooth_l1_loss(INPUT, TARGET)
    assert_same(torch.load(told(caught, "smooth_l1_loss").with_suffix(".pt"))["tensors"], [INPUT, TARGET])
    assert is_off("smooth_l1_loss")


@pytest.mark.parametrize("who", ["another process", "another thread"])
def test_what_others_write_to_is_no_difference(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hogwild training: the parameters change under the step's feet. Run again on copies both agree."""
    made = optimizer()
    param = made.param_groups[0]["params"][0]
    if who == "another process":
        param.share_memory_()

    def changed(results: Tensors) -> None:
        if who == "another thread":
            with torch.no_grad():
                param.add_(0)
        up(results[0])

    as_if_stock_were(monkeypatch, SgdReplay, once(changed))
    fastpatch.enable(verify=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.step()
    assert fastpatch.is_enabled("sgd")
    assert fastpatch.report().verified == {"sgd": 1}


@pytest.mark.parametrize("backward", [False, True])
def test_warnings_as_errors(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_stock_were(monkeypatch, LossGradientReplay if backward else LossReplay, loss)
    fastpatch.enable(verify=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(fastpatch.DifferenceWarning):
            F.smooth_l1_loss(INPUT.clone().requires_grad_(), TARGET).backward()
    assert is_off("smooth_l1_loss")


def test_a_step_with_warnings_as_errors_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, ours = optimizer(), optimizer()
    stock.step()
    up(state_of(stock)[1].detach())
    as_if_stock_were(monkeypatch, SgdReplay, lambda results: len(results) == 6 and up(results[3]))
    fastpatch.enable(verify=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(fastpatch.DifferenceWarning):
            ours.step()
    assert_same(state_of(ours), state_of(stock))


def test_without_a_place_for_the_reproduction(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "differences").write_text("no folder")
    as_if_stock_were(monkeypatch, LossReplay, loss)
    fastpatch.enable(verify=1)
    with pytest.warns(fastpatch.DifferenceWarning, match=r"No reproduction could be written \(FileExistsError: "):
        F.smooth_l1_loss(INPUT, TARGET)
    assert is_off("smooth_l1_loss")


def test_threads_that_find_it_at_once_say_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(4)
    came = threading.local()

    def at_once(results: Tensors) -> None:
        loss(results)
        if not hasattr(came, "before"):
            came.before = True
            together.wait(60)

    as_if_stock_were(monkeypatch, LossReplay, at_once)
    fastpatch.enable(verify=1)
    threads = [threading.Thread(target=F.smooth_l1_loss, args=(INPUT, TARGET)) for _ in range(4)]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with pytest.warns(fastpatch.DifferenceWarning) as caught:
        run()
    told(caught, "smooth_l1_loss")
    assert fastpatch.report().verified == {"smooth_l1_loss": 4}


def test_inputs_that_were_written_to_are_found_and_put_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel that writes beside its output would leave them."""
    input = INPUT.clone()

    def results(self: Replay, value: torch.Tensor) -> Tensors:
        input.data[0, 0] = 7
        return [value, *self.given]

    monkeypatch.setattr(LossReplay, "results", results)
    fastpatch.enable(verify=1)
    with pytest.warns(fastpatch.DifferenceWarning, match=r"input: 1 of 6 differ.*it did not differ again"):
        F.smooth_l1_loss(input, TARGET)
    assert_same(input, INPUT)
