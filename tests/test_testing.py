"""The equivalence suite finds what differs, makes it small, prints what reproduces it, and counts what it compared."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _helpers import counts, threads
from _planted import planted
from _scripts import in_a_process

import fastpatch
from fastpatch.testing import LossCall, Operand, Outcome, SgdRun, _runner, run
from fastpatch.testing.strategies import CASES

HERE = Path(__file__).parent


# --------------------------------------------------------------------------------------------------- it finds things


def reproduced(script: str, folder: Path, plant: str | None = None) -> subprocess.CompletedProcess[str]:
    """What the script does in a process of its own, in which the difference may be planted."""
    (folder / "reproduce.py").write_text(script)
    planting = [str(HERE / "_planted.py"), plant] if plant else []
    return in_a_process(folder, *planting, str(folder / "reproduce.py"))


@pytest.fixture(scope="module")
def found() -> dict[str, Outcome]:
    """What is found of each planted difference."""
    outcomes = {}
    for name in ("huber_loss", "sgd"):
        with planted(name):
            outcomes[name] = run(targets=[name], examples=150, seed=1)
    return outcomes


def test_a_planted_difference_of_a_loss_is_found_and_made_small(found: dict[str, Outcome]) -> None:
    (difference,) = found["huber_loss"].differences
    case = difference.case
    assert isinstance(case, LossCall)
    assert difference.text.startswith("loss: 1 of 1 differ, the first at [[]]: ")
    assert case.input.shape in ((), (1,))
    assert (case.input.dtype, case.arguments["reduction"]) == (torch.float64, "mean")
    assert case.input.layout == case.other.layout == "contiguous"
    assert case.autocast is None
    assert difference.repeats


def test_a_planted_difference_of_a_step_is_found_and_made_small(found: dict[str, Outcome]) -> None:
    (difference,) = found["sgd"].differences
    case = difference.case
    assert isinstance(case, SgdRun)
    assert case.kind == "float64"
    assert len(case.steps) <= 2
    assert sum(map(len, case.groups)) == 1
    assert difference.text.startswith("parameter 0 after step 1: 1 of 1 differ")


@pytest.mark.parametrize("name", ["huber_loss", "sgd"])
def test_the_script_reproduces_it_in_another_process(found: dict[str, Outcome], name: str, tmp_path: Path) -> None:
    (difference,) = found[name].differences
    done = reproduced(difference.script, tmp_path, plant=name)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(difference.text)


def test_the_script_finds_nothing_where_nothing_differs(found: dict[str, Outcome], tmp_path: Path) -> None:
    done = reproduced(found["sgd"].differences[0].script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "no difference\nserved by fastpatch: 1; left to stock: 0\n"


def test_the_outcome_tells_it(found: dict[str, Outcome]) -> None:
    outcome = found["huber_loss"]
    assert not outcome.is_equal
    text = str(outcome)
    assert "with seed 1: huber_loss differed." in text
    assert text.endswith(outcome.differences[0].script)
    (told,) = json.loads(json.dumps(outcome.to_dict()))["differences"]
    assert told == {
        "target": "huber_loss",
        "text": outcome.differences[0].text,
        "repeats": True,
        "script": outcome.differences[0].script,
    }


def test_a_difference_that_does_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = LossCall.compare

    def compare(self: LossCall, device: str) -> Any:
        calls.append(self)
        made = real(self, device)
        return fastpatch.testing.Comparison(made.target, "once", made.fast, made.fallback) if len(calls) == 5 else made

    monkeypatch.setattr(LossCall, "compare", compare)
    (difference,) = run(targets=["huber_loss"], examples=20, seed=2).differences
    assert (difference.case, difference.text, difference.repeats) == (calls[4], "once", False)
    assert "It does not differ every time." in str(difference)


def test_what_no_counter_saw_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two runs by stock would pass for a proof."""
    monkeypatch.setattr(fastpatch, "enabled", lambda *names, strict: fastpatch.disabled(*names))
    monkeypatch.setattr(_runner, "_check_ready", lambda names: None)
    (difference,) = run(targets=["huber_loss"], examples=5, seed=1).differences
    assert difference.text == "no patch point saw it, by fastpatch's counters"


# -------------------------------------------------------------------------------------------------------- it counts


def test_counts_are_those_of_the_report() -> None:
    fastpatch.enable()
    fastpatch.reset_report()
    outcome = run(examples=30, seed=7)
    assert outcome.is_equal, str(outcome)
    for name, counted in counts().items():
        rows = [row for row in outcome.rows if row.target == name]
        assert sum(row.compared for row in rows) == 30
        assert sum(row.fast for row in rows) == counted["fast"] > 10
        reasons = {code: sum(row.fallback[code] for row in rows) for code in counted["fallback"]}
        assert reasons == counted["fallback"]
        if name != "sgd":
            assert counted["fast"] + sum(counted["fallback"].values()) == 30


def test_a_table_within_80_columns() -> None:
    outcome = run(examples=30, targets=["sgd", "huber_loss"], seed=11)
    text = str(outcome)
    assert max(map(len, text.splitlines())) <= 80
    assert f"60 compared in {outcome.seconds:.0f} s with seed 11: none differed." in text
    assert list(dict.fromkeys(row.target for row in outcome.rows)) == ["huber_loss", "sgd"]
    told = json.loads(json.dumps(outcome.to_dict()))
    assert sum(row["compared"] for row in told["rows"]) == 60
    assert (told["device"], told["seed"], told["differences"]) == ("cpu", 11, [])


def test_every_target_has_cases() -> None:
    assert tuple(CASES) == fastpatch.targets()


def test_the_same_seed_draws_the_same() -> None:
    one, two, other = (run(examples=30, targets=["huber_loss"], seed=seed) for seed in (5, 5, 6))
    assert one.rows == two.rows != other.rows


def test_a_target_that_is_never_served_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpatch.testing import strategies

    operand = Operand((3,), torch.int64)
    call = LossCall("huber_loss", operand, operand, {"delta": 1.0})
    monkeypatch.setitem(strategies.CASES, "huber_loss", lambda: strategies.st.just(call))
    outcome = run(examples=2, targets=["huber_loss"])
    assert "nothing was served, so nothing is proved of huber_loss here" in str(outcome)


# ------------------------------------------------------------------------------------------------- it leaves no trace


@contextmanager
def nothing_changes() -> Iterator[None]:
    def state() -> list[Any]:
        return [
            [vars(owner)[name] for owner, name in POINTS],
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            fastpatch.is_enabled(),
            torch.random.get_rng_state().tolist(),
            list(warnings.filters),
            torch.get_default_dtype(),
        ]

    before = state()
    yield
    after = state()
    assert [a is b for a, b in zip(after[0], before[0], strict=True)] == [True] * len(POINTS)
    assert after[1:] == before[1:]


POINTS = [
    (F, "smooth_l1_loss"),
    (torch._C._nn, "smooth_l1_loss"),
    (F, "huber_loss"),
    (torch._C._nn, "huber_loss"),
    (torch.optim.SGD, "step"),
    (sys.modules["torch.optim.sgd"], "sgd"),
]


@pytest.mark.parametrize("on", [False, True])
def test_nothing_is_left_changed(on: bool) -> None:
    run(examples=1)  # the first optimizer of a process has torch wrap SGD.step
    if on:
        fastpatch.enable("sgd")
    with threads(2), torch.no_grad(), nothing_changes():
        assert run(examples=8, seed=3).is_equal


def test_nothing_is_left_changed_by_what_ends_it() -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with nothing_changes(), pytest.raises(KeyboardInterrupt):
        run(examples=20, targets=["huber_loss"], progress=interrupt)
    with nothing_changes(), planted("huber_loss"):
        assert not run(examples=150, targets=["huber_loss"], seed=1).is_equal
