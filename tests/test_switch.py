"""enable(), disable(), is_enabled(), and every mix of them with scopes: who is on, and what is patched."""

import contextvars
import inspect
import itertools
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import fastpatch

SGD = torch.optim.SGD
sgd_module = sys.modules["torch.optim.sgd"]
SGD([torch.zeros(1)], lr=0.1)  # torch hooks SGD.step now, not in the middle of a test

POINTS = {
    "smooth_l1_loss": [(F, "smooth_l1_loss"), (torch._C._nn, "smooth_l1_loss")],
    "huber_loss": [(F, "huber_loss"), (torch._C._nn, "huber_loss")],
    "sgd": [(SGD, "step"), (sgd_module, "sgd")],
}
NAMES = tuple(POINTS)
LOSSES = "smooth_l1_loss", "huber_loss"
STOCK = {(owner, name): vars(owner)[name] for points in POINTS.values() for owner, name in points}


def patched(target):
    """Are both attributes of the target replaced (True), or both the very objects they were (False)?"""
    replaced = {vars(owner)[name] is not STOCK[owner, name] for owner, name in POINTS[target]}
    assert len(replaced) == 1
    return replaced.pop()


def counts():
    return fastpatch.report().to_dict()


def test_targets():
    assert fastpatch.targets() == ("smooth_l1_loss", "huber_loss", "sgd")


def test_enable_and_disable_are_idempotent():
    for _ in range(2):
        fastpatch.enable()
        fastpatch.enable()
        assert [fastpatch.is_enabled(name) for name in NAMES] == [True, True, True]
        assert [patched(name) for name in NAMES] == [True, True, True]
        fastpatch.disable()
        assert [patched(name) for name in NAMES] == [False, False, False]
        fastpatch.disable()
        assert [patched(name) for name in NAMES] == [False, False, False]
        assert not fastpatch.is_enabled()


@pytest.mark.parametrize(("one", "other", "third"), list(itertools.permutations(NAMES)))
def test_each_target_has_a_switch_of_its_own(one, other, third):
    fastpatch.enable(one)
    assert fastpatch.is_enabled()
    assert fastpatch.is_enabled(one)
    assert not fastpatch.is_enabled(other)
    assert patched(one)
    assert not patched(other)
    fastpatch.enable(other, one)
    fastpatch.disable(one)
    assert patched(other)
    assert not patched(one)
    fastpatch.disable(one)
    assert fastpatch.is_enabled(other)
    assert not fastpatch.is_enabled(third)
    assert not patched(third)


def test_enable_and_disable_return_nothing():
    assert fastpatch.enable() is None
    assert fastpatch.disable() is None


def test_the_last_enable_decides_about_strict():
    x, y = torch.ones(3), torch.ones(3, dtype=torch.float64)
    fastpatch.enable("smooth_l1_loss")
    F.smooth_l1_loss(x, y)
    fastpatch.enable("smooth_l1_loss", strict=True)
    with pytest.raises(fastpatch.FallbackError) as caught:
        F.smooth_l1_loss(x, y)
    assert (caught.value.target, caught.value.reason) == ("smooth_l1_loss", "dtype")
    assert "smooth_l1_loss can't be served (dtype)" in str(caught.value)
    fastpatch.enable("smooth_l1_loss")
    F.smooth_l1_loss(x, y)
    assert counts()["smooth_l1_loss"] == {"fast": 0, "fallback": {"dtype": 2}}


FUNCTIONS = {
    "enable": fastpatch.enable,
    "disable": fastpatch.disable,
    "enabled": fastpatch.enabled,
    "disabled": fastpatch.disabled,
    "is_enabled": fastpatch.is_enabled,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("wrong", ["sdg", "", "SGD", 3])
def test_unknown_targets_are_named_beside_the_valid_ones(function, wrong):
    text = f"fastpatch.{function}: unknown target {wrong!r}; targets are 'smooth_l1_loss', 'huber_loss', 'sgd'"
    with pytest.raises(ValueError, match=re.escape(text)):
        FUNCTIONS[function](wrong)


def test_one_unknown_target_leaves_the_known_ones_untouched():
    with pytest.raises(ValueError, match="unknown target 'sdg'"):
        fastpatch.enable("sgd", "sdg")
    assert not fastpatch.is_enabled()
    fastpatch.enable()
    with pytest.raises(ValueError, match="unknown target 'sdg'"):
        fastpatch.disable("sgd", "sdg")
    assert [fastpatch.is_enabled(name) for name in NAMES] == [True, True, True]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_list_of_targets_is_an_unknown_target(function):
    with pytest.raises(ValueError, match=re.escape(f"fastpatch.{function}: unknown target ['sgd']; targets are")):
        FUNCTIONS[function](["sgd"])


@pytest.mark.parametrize("function", ["enable", "enabled"])
@pytest.mark.parametrize("strict", [1, None, "yes", torch.tensor(True)])
def test_strict_must_be_a_bool(function, strict):
    with pytest.raises(TypeError, match=re.escape(f"fastpatch.{function}: strict must be True or False, not")):
        FUNCTIONS[function](strict=strict)
    assert not fastpatch.is_enabled()


@pytest.mark.parametrize("function", ["disable", "disabled"])
def test_turning_off_knows_no_strict(function):
    assert "strict" not in inspect.signature(FUNCTIONS[function]).parameters


# --------------------------------------------------------------------------------------- everything in any order


class OpenScope:
    """A scope that was entered, and what the model has to know about it."""

    def __init__(self, kind, names, strict, context):
        self.state = "off" if kind == "disabled" else "strict" if strict else "on"
        self.names = names or NAMES
        self.context = context  # None: this one
        self.scope = fastpatch.disabled(*names) if kind == "disabled" else fastpatch.enabled(*names, strict=strict)
        self._run(self.scope.__enter__)

    def _run(self, function, *args):
        return self.context.run(function, *args) if self.context is not None else function(*args)

    def exit(self, elsewhere):
        if elsewhere:
            contextvars.copy_context().run(self.scope.__exit__, None, None, None)
        else:
            self._run(self.scope.__exit__, None, None, None)


class Switches(RuleBasedStateMachine):
    """The model: a switch a target for the process, and a list of open scopes."""

    names = st.lists(st.sampled_from(NAMES), max_size=3, unique=True).map(tuple)
    losses = st.sampled_from(LOSSES)

    @initialize()
    def start(self):
        fastpatch.disable()
        fastpatch.reset_report()
        self.process = dict.fromkeys(NAMES, "off")
        self.scopes = []
        self.fast = dict.fromkeys(NAMES, 0)
        self.refused = dict.fromkeys(NAMES, 0)
        self.param = torch.nn.Parameter(torch.linspace(-1, 1, 9))
        self.optimizer = SGD([self.param], lr=0.1, momentum=0.9)
        self.expected, self.buffer = self.param.detach().clone(), None

    def here(self, target):
        for scope in reversed(self.scopes):
            if scope.context is None and target in scope.names:
                return scope.state
        return self.process[target]

    @rule(names=names, strict=st.booleans())
    def enable(self, names, strict):
        fastpatch.enable(*names, strict=strict)
        self.process.update(dict.fromkeys(names or NAMES, "strict" if strict else "on"))

    @rule(names=names)
    def disable(self, names):
        fastpatch.disable(*names)
        self.process.update(dict.fromkeys(names or NAMES, "off"))

    @rule(kind=st.sampled_from(["enabled", "disabled"]), names=names, strict=st.booleans(), elsewhere=st.booleans())
    def enter(self, kind, names, strict, elsewhere):
        context = contextvars.copy_context() if elsewhere else None
        self.scopes.append(OpenScope(kind, names, strict, context))

    @precondition(lambda self: self.scopes)
    @rule(data=st.data(), elsewhere=st.booleans())
    def exit(self, data, elsewhere):
        self.scopes.pop(data.draw(st.integers(0, len(self.scopes) - 1))).exit(elsewhere)

    @rule(loss=losses, size=st.sampled_from([1, 7, 8, 33]))
    def call_loss(self, loss, size):
        x, y = torch.linspace(-3, 2, size), torch.full((size,), 0.3)
        assert torch.equal(getattr(F, loss)(x, y), getattr(torch.ops.aten, loss)(x, y))
        self.fast[loss] += self.here(loss) != "off"

    @rule(loss=losses)
    def call_early_bound_loss(self, loss):
        x, y = torch.linspace(-3, 2, 5), torch.zeros(5)
        expected = getattr(torch.ops.aten, loss)(x, y, 2)
        assert torch.equal(STOCK[F, loss](x, y, reduction="sum"), expected)
        self.fast[loss] += self.here(loss) != "off"

    @rule(loss=losses)
    def call_loss_that_is_refused(self, loss):
        x, y = torch.ones(3), torch.zeros(3, dtype=torch.float64)
        state = self.here(loss)
        if state == "strict":
            with pytest.raises(fastpatch.FallbackError):
                getattr(F, loss)(x, y)
        else:
            assert getattr(F, loss)(x, y).item() == 0.5
        self.refused[loss] += state == "on"

    @rule(value=st.sampled_from([0.3, -1.7, 0.0]))
    def step(self, value):
        self.param.grad = torch.full((9,), value)
        self.optimizer.step()
        # What stock's loop does for momentum 0.9, written out.
        gradient = torch.full((9,), value)
        self.buffer = gradient.clone() if self.buffer is None else self.buffer.mul_(0.9).add_(gradient)
        self.expected.add_(self.buffer, alpha=-0.1)
        assert torch.equal(self.param, self.expected)
        assert torch.equal(self.optimizer.state[self.param]["momentum_buffer"], self.buffer)
        self.fast["sgd"] += self.here("sgd") != "off"

    @invariant()
    def switches_are_as_predicted(self):
        if hasattr(self, "process"):  # not before start()
            assert {name: fastpatch.is_enabled(name) for name in NAMES} == {
                name: self.here(name) != "off" for name in NAMES
            }
            assert fastpatch.is_enabled() == any(self.here(name) != "off" for name in NAMES)

    @invariant()
    def attributes_are_as_predicted(self):
        for name in NAMES if hasattr(self, "process") else ():
            held = any(scope.state != "off" and name in scope.names for scope in self.scopes)
            assert patched(name) == (self.process[name] != "off" or held)

    @invariant()
    def counters_are_as_predicted(self):
        for name in NAMES if hasattr(self, "process") else ():
            refused = {"dtype": self.refused[name]} if self.refused[name] else {}
            assert counts()[name] == {"fast": self.fast[name], "fallback": refused}

    def teardown(self):
        for scope in getattr(self, "scopes", ()):
            scope.exit(elsewhere=False)
        fastpatch.disable()
        assert not any(patched(name) for name in NAMES)


Switches.TestCase.settings = settings(deadline=None, max_examples=100, stateful_step_count=30)
TestSwitches = Switches.TestCase
