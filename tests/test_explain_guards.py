"""The guards of an Explanation: each verdict is true, in the order in which the code asks."""

import textwrap

import pytest
import torch
import torch.nn.functional as F
from _explain_faults import (
    NEVER_REACHED,
    SGD_FUNCTION_FAULTS,
    SGD_STEP_FAULTS,
    explain_function,
    explain_loss,
    explain_step,
    guard_names,
    loss_faults,
    pairs,
    refusing,
)
from _explain_helpers import all_on, optimizer_with, parameter  # noqa: F401 (all_on is a fixture)

import fastpatch
from fastpatch import _build, _switch, explain
from fastpatch.targets import TARGETS
from fastpatch.targets._explanation import FIRST

NAMES = {
    "smooth_l1_loss": guard_names("loss_guards.h"),
    "huber_loss": guard_names("loss_guards.h"),
    "sgd": guard_names("sgd_guards.h"),
}
# Only on a machine with a GPU, or with DTensors of torch.distributed (test_sgd_distributed.py).
ELSEWHERE = {"devices", "cuda", "division"}
# What the losses can't be refused for: what is of parameters and optimizers.
OF_SGD = {
    "compiling", "placements", "sparse_grad", "overlap", "momentum_buffer", "hyperparameter", "tensor_hyperparameter",
    "foreach", "fused", "differentiable", "grad_scale", "non_leaf", "optimizer",
}  # fmt: skip
OF_LOSSES = {"beta", "delta", "legacy_arguments", "weight"}
OF_LOSS = {"smooth_l1_loss": {"beta", "legacy_arguments"}, "huber_loss": {"delta", "weight"}}
LOSSES = pytest.mark.parametrize(
    ("loss", "threshold", "inner"),
    [(loss, threshold, inner) for loss, threshold in (("smooth_l1_loss", "beta"), ("huber_loss", "delta"))
     for inner in (False, True)],
)  # fmt: skip


@pytest.fixture
def native():
    from fastpatch import _native

    return _native


def expected_of(explanation, target, fault):
    """Is this explanation of a call with this fault alone a refusal by its guard, for its reason?"""
    place = refusing(explanation)
    questions = TARGETS[target].questions()
    return (
        (NAMES[target][place], explanation.reason) == (fault.guard, fault.reason)
        and fault.reason in questions[place][1]
        and explanation.advice
        and explanation.advice == advice(fault.reason)
    )


def advice(reason):
    from fastpatch import _native

    return _native.reasons()[reason][1]


def is_in_order(explanation):
    """First those that passed, then the one that refuses, then the others."""
    verdicts = [guard.verdict for guard in explanation.guards]
    at = verdicts.index("refused")
    return set(verdicts[:at]) <= {"passed"} and set(verdicts[at + 1 :]) <= {"not reached"}


def first_of(names, one, two):
    return min(one, two, key=lambda fault: names.index(fault.guard))


# ---------------------------------------------------------------------------------------------------- the tables


@pytest.mark.parametrize("target", NAMES)
def test_the_tables_of_both_languages_are_one(target):
    assert len(TARGETS[target].questions()) == len(NAMES[target])
    texts = [text for text, _ in (*FIRST, *TARGETS[target].questions())]
    assert len(set(texts)) == len(texts)
    assert max(map(len, texts)) <= 80 - len("> not reached  ")


@pytest.mark.parametrize("target", NAMES)
def test_every_reason_belongs_to_a_guard_of_each_target_that_can_give_it(native, target):
    codes = {code for _, codes in TARGETS[target].questions() for code in codes}
    every = set(native.reasons()) - {"served"}
    assert codes == every - (OF_LOSSES if target == "sgd" else OF_SGD | OF_LOSSES - OF_LOSS[target])


# --------------------------------------------------------------------------------------- one fault, and two of them


@LOSSES
def test_each_fault_of_a_loss_is_refused_by_its_guard(loss, threshold, inner):
    fn = getattr(torch._C._nn if inner else F, loss)
    faults = loss_faults(threshold, inner)
    met = {fault.guard for fault in faults}
    never = ELSEWHERE | ({"weights"} if inner or loss == "smooth_l1_loss" else set())
    assert met == set(NAMES[loss]) - never
    explained = [(fault, explain_loss(fn, inner, threshold, [fault])) for fault in faults]
    assert [(fault, str(e)) for fault, e in explained if not expected_of(e, loss, fault)] == []
    assert [str(e) for _, e in explained if not is_in_order(e)] == []


@LOSSES
def test_of_two_faults_of_a_loss_that_of_the_earlier_guard_is_told(loss, threshold, inner):
    fn = getattr(torch._C._nn if inner else F, loss)
    tried = list(pairs(loss_faults(threshold, inner)))
    assert len(tried) > 120
    wrong = []
    for one, two in tried:
        explanation = explain_loss(fn, inner, threshold, [one, two])
        if not expected_of(explanation, loss, first_of(NAMES[loss], one, two)):
            wrong.append((one, two, str(explanation)))
    assert wrong == []


SGD_ENTRIES = pytest.mark.parametrize(
    ("explained", "faults", "unmet"),
    [
        (explain_function, SGD_FUNCTION_FAULTS, {"containers", "leaf", "state", "later_groups"}),
        (explain_step, SGD_STEP_FAULTS, {"signature", "param_tensor", "alike", "order", "apart", "hyper_memory"}),
    ],
    ids=["function", "step"],
)


@SGD_ENTRIES
def test_each_fault_of_sgd_is_refused_by_its_guard(explained, faults, unmet):
    assert {fault.guard for fault in faults} == set(NAMES["sgd"]) - ELSEWHERE - unmet
    explanations = [(fault, explained([fault])) for fault in faults]
    assert [(fault, str(e)) for fault, e in explanations if not expected_of(e, "sgd", fault)] == []
    assert [str(e) for _, e in explanations if not is_in_order(e)] == []


@SGD_ENTRIES
def test_of_two_faults_of_sgd_that_of_the_earlier_guard_is_told(explained, faults, unmet):
    tried = [(one, two) for one, two in pairs(faults) if (one.guard, two.guard) not in NEVER_REACHED]
    assert len(tried) > 120
    wrong = []
    for one, two in tried:
        explanation = explained([one, two])
        if not expected_of(explanation, "sgd", first_of(NAMES["sgd"], one, two)):
            wrong.append((one, two, str(explanation)))
    assert wrong == []


# ------------------------------------------------------------------------------------------------- what isn't claimed


def verdicts(explanation):
    """{name in C++: verdict} of the native library's guards."""
    names = dict(
        zip([text for text, _ in TARGETS[explanation.target].questions()], NAMES[explanation.target], strict=True)
    )
    return {names[guard.name]: guard.verdict for guard in explanation.guards if guard.name in names}


def test_a_served_call_has_passed_every_guard_and_those_of_other_calls_are_left_out():
    x = torch.ones(3)
    fast = explain(F.smooth_l1_loss, x, x)
    assert fast.fast and fast.advice == ""
    assert {guard.verdict for guard in fast.guards} == {"passed"}
    assert [guard.name for guard in fast.guards[: len(FIRST)]] == [name for name, _ in FIRST]
    assert set(NAMES["smooth_l1_loss"]) - set(verdicts(fast)) == {"weights", "cuda"}
    assert set(NAMES["huber_loss"]) - set(verdicts(explain(F.huber_loss, x, x))) == {"cuda"}


def test_a_step_is_asked_of_what_it_has():
    """No momentum buffer, no DTensor, no parameter without gradient, one group: none of their guards was passed."""
    never = {"signature", "division", "cuda", "leaf"}
    step = verdicts(explain(optimizer_with([parameter()]).step))
    assert set(NAMES["sgd"]) - set(step) == never | {"state", "buffer_kind", "buffer", "foreach_order", "later_groups"}
    optimizer = optimizer_with(
        [{"params": [parameter(), torch.nn.Parameter(torch.ones(2))]}, {"params": [parameter()]}]
    )
    optimizer.step()
    step = verdicts(explain(optimizer.step))
    assert set(NAMES["sgd"]) - set(step) == (never | {"foreach_order"}) - {"leaf"}


def test_an_optimizer_that_only_the_inner_point_judges_has_not_passed_what_is_asked_of_others():
    class OwnInitGroup(torch.optim.SGD):
        def _init_group(self, *args):
            return super()._init_group(*args)

    step = verdicts(explain(optimizer_with([parameter()], OwnInitGroup).step))
    assert not {"scaling", "recording"} & set(step)


# ------------------------------------------------------------------------------------------ before the native library


def first_verdicts(explanation):
    names = [name for name, _ in FIRST]
    return {names.index(guard.name): guard.verdict for guard in explanation.guards if guard.name in names}


def test_verdicts_before_the_library(monkeypatch):
    x = torch.ones(3)
    fastpatch.disable()
    off = explain(F.huber_loss, x, x)
    assert first_verdicts(off) == {**dict.fromkeys(range(4), "passed"), 4: "refused", 5: "not reached"}
    assert set(verdicts(off).values()) == {"not reached"}
    # Never asked for: nothing was built or proven, so nothing is claimed of that.
    monkeypatch.setattr(_switch, "_fit", set())
    assert first_verdicts(explain(F.huber_loss, x, x)) == {
        0: "passed", 1: "passed", 2: "passed", 4: "refused", 5: "not reached",
    }  # fmt: skip
    monkeypatch.setattr(_switch, "_is_set_up", False)
    unknown = explain(F.huber_loss, x, x)
    assert first_verdicts(unknown) == {0: "passed", 1: "passed", 4: "refused", 5: "not reached"}
    assert (unknown.guards[-1].name, unknown.guards[-1].verdict) == (
        "what the native library asks of a call",
        "not reached",
    )
    monkeypatch.setattr(_switch, "_build_failure", "no compiler")
    failed = explain(F.huber_loss, x, x)
    assert (failed.reason, failed.detail) == ("not_built", "no compiler")
    assert first_verdicts(failed) == {0: "passed", 1: "passed", 2: "refused", **dict.fromkeys((3, 4, 5), "not reached")}
    monkeypatch.setattr(_switch, "_unfit", {"huber_loss": "a bit"})
    monkeypatch.setattr(_switch, "_is_set_up", True)
    assert first_verdicts(explain(F.huber_loss, x, x))[3] == "refused"
    monkeypatch.setenv("FASTPATCH", "0")
    off = explain(F.huber_loss, x, x)
    assert (off.reason, first_verdicts(off)[1]) == ("switched_off", "refused")
    monkeypatch.setattr(_build, "unsupported_platform", lambda: "a toaster")
    off = explain(F.huber_loss, x, x)
    assert (off.reason, first_verdicts(off)[0]) == ("unsupported_platform", "refused")


# --------------------------------------------------------------------------------------------------------------- text


def test_text():
    x = torch.ones(3)
    explanation = explain(F.smooth_l1_loss, x, x.double())
    first, *lines = str(explanation).splitlines()
    assert first == f"smooth_l1_loss: stock, because of dtype: {explanation.detail}"
    shown = [f"  passed       {guard.name}" for guard in explanation.guards if guard.verdict == "passed"]
    shown += ["> refused      their dtypes are served together"]
    shown += [f"  not reached  {guard.name}" for guard in explanation.guards if guard.verdict == "not reached"]
    shown += textwrap.wrap(f"advice: {explanation.advice}", 80, subsequent_indent=" " * 8)
    assert lines == shown
    assert "advice" not in str(explain(F.smooth_l1_loss, x, x))


@pytest.mark.parametrize("reason", ["arguments", "cuda_not_built", "weight", "placements", "optimizer"])
def test_text_fits_80_columns_but_for_its_first_line(reason):
    lines = str(TARGETS["sgd"].explanation(reason)).splitlines()[1:]
    assert max(map(len, lines)) <= 80
    assert f"advice: {advice(reason)}" == " ".join(line.strip() for line in lines[lines.index(
        next(line for line in lines if line.startswith("advice: "))) :])  # fmt: skip


def test_an_error_of_strict_advises():
    x = torch.ones(3)
    with fastpatch.enabled(strict=True), pytest.raises(fastpatch.FallbackError) as caught:
        F.smooth_l1_loss(x, x.double())
    assert caught.value.advice == advice("dtype")
    assert str(caught.value).endswith(f"; strict=True forbids the fallback (advice: {advice('dtype')})")


def test_a_wrong_order_would_be_seen():
    """The pairs above can fail: with the table turned round, all of them do."""
    names = NAMES["huber_loss"][::-1]
    tried = list(pairs(loss_faults("delta", inner=False)))
    explained = [explain_loss(F.huber_loss, False, "delta", pair) for pair in tried]
    assert not any(
        expected_of(explanation, "huber_loss", first_of(names, *pair))
        for explanation, pair in zip(explained, tried, strict=True)
    )
