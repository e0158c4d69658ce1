"""The self-test that a target makes on a CUDA device before it serves there, run on the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from _scripts import run_text

import fastpatch
from fastpatch import _proof, _switch
from fastpatch.targets import DTYPES, TARGETS
from fastpatch.targets._loss_bounds import loss_differs

CPU = torch.device("cpu")
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


@pytest.fixture(autouse=True)
def _set_up() -> None:
    fastpatch.enable()
    fastpatch.disable()


@pytest.mark.parametrize("target", fastpatch.targets())
def test_what_is_sound_passes(target: str) -> None:
    assert _proof.differences_on(CPU, TARGETS[target]) == dict.fromkeys(NAMES)
    assert fastpatch.report().to_dict()[target] == {"fast": 0, "fallback": {}}


@pytest.mark.parametrize("target", ["smooth_l1_loss", "huber_loss"])
@pytest.mark.parametrize("what", ["_operator", "_backward"])
def test_a_loss_that_differs_is_found(target: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = getattr(TARGETS[target], what)

    def off_by_a_bit(*args: object) -> torch.Tensor:
        result: torch.Tensor = stock(*args)
        return torch.nextafter(result, result + 1) if result.dtype == torch.float16 else result

    monkeypatch.setattr(TARGETS[target], what, off_by_a_bit)
    found = _proof.differences_on(CPU, TARGETS[target])
    part = "loss" if what == "_operator" else "gradient"
    assert found["float16"] is not None and found["float16"].startswith(f"the {part} of 7 elements, reduction 0")
    assert [name for name, difference in found.items() if difference is not None] == ["float16"]


@pytest.mark.parametrize(
    ("call", "told"),  # stock's and our runs take turns
    [(3, "nesterov=False, weight_decay=0.013, maximize=False, foreach=False"),
     (5, "nesterov=True, weight_decay=0.0, maximize=False, foreach=None")],
)  # fmt: skip
def test_a_step_that_differs_is_found(call: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TARGETS["sgd"]._run  # type: ignore[attr-defined]
    calls = iter(range(100))

    def off_by_a_bit(*args: object) -> list[torch.Tensor]:
        results: list[torch.Tensor] = run(*args)
        if next(calls) == call:  # in the first dtype
            results[1][5] += 1e-6
        return results

    monkeypatch.setattr(TARGETS["sgd"], "_run", off_by_a_bit)
    found = _proof.differences_on(CPU, TARGETS["sgd"])
    assert found["float32"] == f"a parameter, gradient or momentum buffer, {told}"
    assert found["float64"] is None


def test_an_error_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(*args: object) -> None:
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(TARGETS["sgd"], "_run", no_kernel)
    assert _proof.differences_on(CPU, TARGETS["sgd"])["float32"] == (
        "RuntimeError: no kernel image is available for execution on the device"
    )


def test_a_self_test_that_cannot_run_leaves_the_call_to_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpatch import _native

    taken: list[object] = []

    def no_stream(*args: object) -> None:
        taken.append(args)
        raise RuntimeError("no stream")

    monkeypatch.setattr(_native, "set_cuda_proof", lambda *args: taken.append(args))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_switch, "_warned", set())
    monkeypatch.setattr(_switch, "_proven_on", set())
    monkeypatch.setattr(_switch, "differences_on", no_stream)
    with pytest.warns(
        fastpatch.NativeBuildWarning, match=r"leaves 'sgd' on cuda:5 to PyTorch.*RuntimeError: no stream"
    ):
        _switch.prove_on_cuda("sgd", 5)
    _switch.prove_on_cuda("sgd", 5)  # a thread that came second makes none
    assert taken == [(torch.device("cuda", 5), TARGETS["sgd"]), ("sgd", 5, ())]


def test_a_failure_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, int, tuple[str, ...]]] = []
    from fastpatch import _native

    monkeypatch.setattr(_native, "set_cuda_proof", lambda *args: taken.append(args))
    monkeypatch.setattr(_switch, "_warned", set())
    differences = {"float32": None, "float16": "the loss of 7 elements"}
    with pytest.warns(
        fastpatch.NativeBuildWarning, match=r"leaves 'huber_loss' on cuda:3 to PyTorch.*float16: the loss"
    ):
        _switch._take_proofs("huber_loss", 3, differences)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _switch._take_proofs("huber_loss", 3, differences)
        _switch._take_proofs("huber_loss", 4, {"float32": None})
    assert taken == [("huber_loss", 3, ("float32",))] * 2 + [("huber_loss", 4, ("float32",))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_of_a_sum_is_narrow(dtype: torch.dtype) -> None:
    """One of 100 numbers left out, or added twice, is found; the neighbouring number of a reduced dtype is not."""
    values = torch.linspace(0.9, 1.1, 100, dtype=torch.float64).to(dtype)
    exact = values.double().sum()
    assert not loss_differs(exact.to(dtype), values, 2)
    assert not loss_differs((exact / 100).to(dtype), values, 1)
    assert loss_differs((exact - values[3].double()).to(dtype), values, 2)
    assert loss_differs((exact * 1.01).to(dtype), values, 2)
    assert loss_differs(torch.tensor(float("nan"), dtype=dtype), values, 2)


def test_losses_that_are_not_finite() -> None:
    """What is no number, or infinite, stays so; a sum, or a loss, that its dtype can't hold may be infinite."""
    inf, nan = torch.tensor(torch.inf), torch.tensor(torch.nan)
    for special in (inf, nan):
        values = torch.tensor([1.0, special, 2.0])
        assert not loss_differs(special, values, 1)
        for other in (inf, nan, torch.tensor(1.0), torch.tensor(-torch.inf)):
            assert other is special or loss_differs(other, values, 1)
    assert not loss_differs(inf.half(), torch.full((2,), 6e4).half(), 2)
    assert loss_differs(inf.half(), torch.full((2,), 6e4).half(), 1)
    assert not loss_differs(inf, torch.full((2,), 3e38), 1)  # stock's sum overflows before it is divided
    assert loss_differs(nan, torch.full((2,), 3e38), 1)
    assert loss_differs(inf, torch.ones(2), 2)


def test_losses_that_are_subnormal() -> None:
    least = 2.0**-24
    values = torch.tensor([least, 0.0, 0.0], dtype=torch.float16)
    assert not loss_differs(torch.tensor(0.0, dtype=torch.float16), values, 1)
    assert loss_differs(torch.tensor(3 * least, dtype=torch.float16), values, 1)


def test_enable_does_not_start_cuda(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A process that has started it can't use it any more once it forks."""
    text = """
import torch, fastpatch
fastpatch.enable()
x = torch.ones(3)
torch.nn.functional.smooth_l1_loss(x, x)
print(torch.cuda.is_initialized(), fastpatch.report().to_dict()["smooth_l1_loss"]["fast"])
"""
    assert run_text(text, folder=tmp_path).stdout.split() == ["False", "1"]
