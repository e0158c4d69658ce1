"""FASTPATCH, FASTPATCH_ONLY, FASTPATCH_STRICT, FASTPATCH_LOG: what they forbid stays off, whoever asks."""

import io
import json
import logging

import pytest
import torch
import torch.nn.functional as F
from _cli_helpers import NOTHING, must, python

import fastpatch
from fastpatch import _compile, _environment
from fastpatch.targets import TARGETS

ALL = fastpatch.targets()
x, y = torch.ones(3), torch.zeros(3)


def on():
    return [name for name in ALL if fastpatch.is_enabled(name)]


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in _environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def logger():
    logger = logging.getLogger("fastpatch")
    before = logger.level, logger.handlers[:]
    yield logger
    logger.setLevel(before[0])
    logger.handlers[:] = before[1]


def test_the_names_are_those_of_the_targets():
    assert tuple(TARGETS) == _environment.TARGETS


def test_zero_wins_over_everything(monkeypatch, caplog):
    monkeypatch.setenv("FASTPATCH", "0")
    monkeypatch.setenv("FASTPATCH_STRICT", "1")
    stock = F.smooth_l1_loss
    with caplog.at_level(logging.INFO, logger="fastpatch"):
        fastpatch.enable()
    assert [record.getMessage() for record in caplog.records] == ["FASTPATCH=0 switches everything off"]
    fastpatch.enable("sgd", strict=True)
    with fastpatch.enabled("smooth_l1_loss", strict=True):
        assert on() == []
        assert F.smooth_l1_loss is stock
        F.smooth_l1_loss(x, y)
    assert not fastpatch.is_enabled()
    assert fastpatch.report().to_dict() == NOTHING
    seen = fastpatch.explain(F.smooth_l1_loss, x, y)
    assert (seen.fast, seen.reason, seen.detail) == (False, "switched_off", "FASTPATCH=0 switches everything off")
    with pytest.raises(ValueError, match="unknown target 'sdg'"):
        fastpatch.enable("sdg")


def test_zero_builds_and_loads_nothing(tmp_path):
    text = (
        "import sys, fastpatch; fastpatch.enable(strict=True); fastpatch.enabled(strict=True)(print)();"
        "import torch.nn.functional as F; print(fastpatch.explain(F.huber_loss, 1, 2).reason, fastpatch.is_enabled(),"
        "'fastpatch._native' in sys.modules)"
    )
    done = must(
        python("-c", text, folder=tmp_path, FASTPATCH="0", FASTPATCH_CACHE_DIR=str(tmp_path / "cache"), CXX="/none")
    )
    assert (done.stdout, done.stderr) == ("\nswitched_off False False\n", "")
    assert not (tmp_path / "cache").exists()


def test_what_was_on_before_stays_what_it_is(monkeypatch):
    """The variables are asked when something is to be turned on. explain() tells what is so."""
    fastpatch.enable()
    monkeypatch.setenv("FASTPATCH", "0")
    assert on() == list(ALL)
    assert fastpatch.explain(F.smooth_l1_loss, x, y).fast
    fastpatch.enable()
    assert on() == list(ALL)
    fastpatch.disable()
    fastpatch.enable()
    assert on() == []


@pytest.mark.parametrize("value", ["1", "", " 1 "])
def test_one_is_the_default(monkeypatch, value):
    monkeypatch.setenv("FASTPATCH", value)
    fastpatch.enable()
    assert on() == list(ALL)


def test_only(monkeypatch, caplog):
    monkeypatch.setenv("FASTPATCH_ONLY", " sgd, huber_loss")
    fastpatch.enable()
    assert on() == ["huber_loss", "sgd"]
    with fastpatch.enabled():
        assert on() == ["huber_loss", "sgd"]
    with caplog.at_level(logging.INFO, logger="fastpatch"):
        fastpatch.enable("smooth_l1_loss", "sgd")
    text = "FASTPATCH_ONLY=' sgd, huber_loss' leaves smooth_l1_loss out"
    assert text in [record.getMessage() for record in caplog.records]
    with fastpatch.enabled("smooth_l1_loss"):
        assert on() == ["huber_loss", "sgd"]
    F.smooth_l1_loss(x, y)
    F.huber_loss(x, y)
    assert fastpatch.report().to_dict() == {**NOTHING, "huber_loss": {"fast": 1, "fallback": {}}}
    seen = fastpatch.explain(F.smooth_l1_loss, x, y)
    assert (seen.reason, seen.detail) == ("switched_off", text)
    with fastpatch.disabled():
        assert fastpatch.explain(F.huber_loss, x, y).reason == "disabled"


def test_strict(monkeypatch):
    monkeypatch.setenv("FASTPATCH_STRICT", "1")
    fastpatch.enable("smooth_l1_loss")
    with pytest.raises(fastpatch.FallbackError):
        F.smooth_l1_loss(x, y.double())
    with fastpatch.enabled("huber_loss"), pytest.raises(fastpatch.FallbackError):
        F.huber_loss(x, y.double())
    monkeypatch.setenv("FASTPATCH_STRICT", "0")
    fastpatch.enable("smooth_l1_loss")
    F.smooth_l1_loss(x, y.double())
    with fastpatch.enabled("huber_loss"):
        F.huber_loss(x, y.double())


@pytest.mark.parametrize(("level", "shown"), [("info", True), ("DEBUG", True), ("warning", False), ("error", False)])
def test_log(monkeypatch, logger, level, shown):
    monkeypatch.setenv("FASTPATCH_LOG", level)
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    fastpatch.enable("sgd")
    fastpatch.enable("sgd")
    assert stderr.getvalue() == "fastpatch: INFO: sgd on\n" * (2 if shown else 0)
    assert logger.level == getattr(logging, level.upper())
    monkeypatch.setattr("sys.stderr", None)
    fastpatch.enable("sgd")


def test_log_shows_the_progress_of_a_build_once(monkeypatch, logger):
    monkeypatch.setenv("FASTPATCH_LOG", "info")
    fastpatch.enable("sgd")
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    _compile.Progress().say("compiling")
    assert stderr.getvalue() == "fastpatch: compiling\n"


BAD = [
    ("FASTPATCH", "no", "must be 0 (everything off) or 1"),
    ("FASTPATCH_ONLY", "sdg", "unknown target 'sdg'; targets are 'smooth_l1_loss', 'huber_loss', 'sgd'"),
    ("FASTPATCH_ONLY", ",", "unknown target ''"),
    ("FASTPATCH_STRICT", "true", "must be 0 or 1"),
    ("FASTPATCH_VERIFY", "-0.5", "must be a number from 0 to 1, the share of calls to check"),
    ("FASTPATCH_VERIFY", "nan", "must be a number from 0 to 1"),
    ("FASTPATCH_VERIFY", "1%", "must be a number from 0 to 1"),
    ("FASTPATCH_LOG", "verbose", "must be one of debug, info, warning, error"),
]


@pytest.mark.parametrize(("variable", "value", "valid"), BAD)
def test_a_bad_value_is_an_error_that_quotes_it(monkeypatch, variable, value, valid):
    if variable != "FASTPATCH":
        monkeypatch.setenv("FASTPATCH", "0")  # not even then
    monkeypatch.setenv(variable, value)
    scope = fastpatch.enabled()
    for ask in (fastpatch.enable, scope.__enter__, lambda: fastpatch.explain(F.smooth_l1_loss, x, y)):
        with pytest.raises(ValueError) as caught:
            ask()
        assert str(caught.value).startswith(f"fastpatch: {variable}={value!r}")
        assert valid in str(caught.value)
    assert on() == []
    fastpatch.disable()  # what turns off never fails


def test_import_needs_no_good_values(tmp_path):
    variables = dict.fromkeys(_environment.VARIABLES, "nonsense")
    text = "import json, fastpatch; print(json.dumps([fastpatch.is_enabled(), fastpatch.report().to_dict()]))"
    done = must(python("-c", text, folder=tmp_path, **variables))
    assert json.loads(done.stdout) == [False, NOTHING]
