"""What the tests of explain() share: an explanation beside what the call then really does."""

import contextlib
import warnings

import pytest
import torch

import fastpatch

SERVED = (True, None)


@pytest.fixture(autouse=True)
def all_on():
    fastpatch.enable()
    yield
    fastpatch.disable()


def outcome(name, call):
    """(fast, reason) of a call, by the counters; whether it warns or raises is stock's business."""
    fastpatch.reset_report()
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        call()
    counts = fastpatch.report().to_dict()[name]
    assert counts["fast"] + sum(counts["fallback"].values()) >= 1, "the call reached no patch point"
    return not counts["fallback"], next(iter(counts["fallback"]), None)


def check(name, expected, fn, /, *args, **kwargs):
    """The explanation is the expected one, nothing is counted for it, and the call then does what it says."""
    before = fastpatch.report().to_dict()
    explanation = fastpatch.explain(fn, *args, **kwargs)
    assert fastpatch.report().to_dict() == before, "explain() was counted"
    assert isinstance(explanation, fastpatch.Explanation)
    assert explanation.detail
    explained = explanation.target, (explanation.fast, explanation.reason)
    assert explained == (name, expected), f"explained as {explained}"
    happened = outcome(name, lambda: fn(*args, **kwargs))
    assert happened == expected, f"happened: {happened}"


def refused(reason):
    return False, reason


def parameter(dtype=torch.float32, grad=0.5):
    param = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    param.grad = torch.full((3,), grad, dtype=dtype)
    return param


def optimizer_with(params, cls=torch.optim.SGD, **options):
    return cls(params, **{"lr": 0.1, "momentum": 0.9, **options})
