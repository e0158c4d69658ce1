"""Any call of a loss at all: whatever can be seen of it is stock's, and it is served, or refused, as explain() said."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from _any_loss_call import GRAD_MODES, GRAD_OUTPUTS, MODULES, WAYS, Call, calls
from _helpers import as_stock, threads
from hypothesis import Phase, event, given, seed, settings

import fastpatch
from fastpatch.testing.strategies import AUTOCASTS, FLOATS, GRAIN, LAYOUTS


def stops_before_the_builtin(call: Call, explanation: fastpatch.Explanation) -> bool:
    """Does torch's own function, taken early, raise before it reaches anything that is patched?"""
    return call.is_early and explanation.reason == "arguments"


@settings(deadline=None, max_examples=800)
@given(calls())
def test_any_call_is_as_stocks(call: Call) -> None:
    with threads(call.threads):
        explanation = call.explanation()
        event(f"{call.loss}: {explanation.reason or 'served'}")
        unseen = explanation.reason == "early_bound" or stops_before_the_builtin(call, explanation)
        fallback = {} if explanation.fast or unseen else {explanation.reason: 1}
        seen = as_stock(call.loss, call.run, fast=int(explanation.fast), fallback=fallback)
    assert not (explanation.fast and seen.error)
    assert seen.error or not stops_before_the_builtin(call, explanation)


def fixed_sample() -> list[tuple[Call, fastpatch.Explanation]]:
    """Calls and what explain() says of them. Of many seeds: after ten examples hypothesis goes on with variations."""
    drawn: list[tuple[Call, fastpatch.Explanation]] = []
    for start in range(60):

        @seed(start)
        @settings(deadline=None, max_examples=10, derandomize=False, database=None, phases=[Phase.generate])
        @given(calls())
        def judge(call: Call) -> None:
            drawn.append((call, call.explanation()))

        judge()
    return drawn


def test_what_is_drawn_is_mostly_served_and_of_every_kind() -> None:
    """The property above would hold as well of calls that are all refused, or all alike."""
    sample = fixed_sample()
    served = [call for call, explanation in sample if explanation.fast]

    def seen(what: Callable[[Call], Any]) -> set[Any]:
        return {what(call) for call in served}

    assert len(served) > 0.5 * len(sample)
    assert {explanation.reason for _, explanation in sample} == {
        None, "beta", "delta", "dtype", "strides", "shape_mismatch", "arguments", "legacy_arguments", "inference_mode",
        "early_bound",
    }  # fmt: skip
    assert seen(lambda call: (call.loss, call.way)) == {(loss, way) for loss in MODULES for way in WAYS}
    assert seen(lambda call: call.input.layout) == set(LAYOUTS)
    assert seen(lambda call: call.target.layout) == set(LAYOUTS)
    assert seen(lambda call: (call.loss, call.input.dtype)) == {(loss, dtype) for loss in MODULES for dtype in FLOATS}
    assert seen(lambda call: (call.loss, call.autocast)) == {(loss, dtype) for loss in MODULES for dtype in AUTOCASTS}
    assert seen(lambda call: call.grad_output) == set(GRAD_OUTPUTS)
    assert seen(lambda call: call.grad_mode) == set(GRAD_MODES) - {"inference"}
    assert seen(lambda call: len(call.input.shape)) == set(range(5))
    for kind in (
        lambda call: call.input.dtype != call.target.dtype,
        lambda call: call.input.shape != call.target.shape,
        lambda call: call.input.layout != call.target.layout,
        lambda call: call.input.needs_grad and call.target.needs_grad,
        lambda call: math.prod(call.input.shape) == 0,
        lambda call: math.prod(call.input.shape) >= GRAIN and call.threads == 2,
        lambda call: call.arguments.get("reduce") is not None,
        lambda call: call.threshold == 0,
        lambda call: call.threshold == math.inf,
        lambda call: call.is_one_tensor,
        lambda call: call.twice,
    ):
        assert {bool(kind(call)) for call in served} == {False, True}
