"""enabled() and disabled(): nesting, ends in any order, decorators. Threads and tasks: test_switch_threads.py."""

import asyncio
import contextvars
import functools
import inspect
import re

import pytest
import torch.nn.functional as F
from _switch_helpers import X, Y, call, in_thread, is_restored, restored  # noqa: F401 (restored is a fixture)

import fastpatch
from fastpatch import disabled, enabled, is_enabled

# ------------------------------------------------------------------------------------------------------------ blocks


def test_a_scope_turns_on_and_off_again():
    assert not call()
    with enabled():
        assert is_enabled()
        assert call()
    assert not is_enabled()
    assert is_restored()
    assert not call()


def test_the_innermost_scope_that_names_the_target_decides():
    fastpatch.enable("sgd")
    with enabled("smooth_l1_loss"):
        assert call()
        with disabled("smooth_l1_loss"):
            assert not call()
            assert is_enabled("sgd")
            with enabled("sgd"):
                assert not call()
                with enabled():
                    assert call()
                assert not call()
            with disabled("sgd"):
                assert not is_enabled()
        assert call()
    assert is_enabled("sgd")
    fastpatch.disable()


def test_enable_inside_a_disabled_scope_waits_for_its_end():
    with disabled():
        fastpatch.enable()
        assert not is_enabled()
        assert not call()
        assert in_thread(call)
    assert call()


def test_disable_inside_an_enabled_scope_leaves_the_scope_on():
    fastpatch.enable()
    with enabled("smooth_l1_loss"):
        fastpatch.disable()
        assert call()
        assert not is_enabled("sgd")
        assert not in_thread(is_enabled)


def test_strict_scope_inside_a_lenient_one():
    other_dtype = Y.double()
    with enabled():
        F.smooth_l1_loss(X, other_dtype)
        with enabled(strict=True), pytest.raises(fastpatch.FallbackError, match="dtype"):
            F.smooth_l1_loss(X, other_dtype)
        F.smooth_l1_loss(X, other_dtype)
    assert fastpatch.report().to_dict()["smooth_l1_loss"]["fallback"] == {"dtype": 2}


@pytest.mark.parametrize("kind", [enabled, disabled])
def test_an_exception_passes_through_and_ends_the_scope(kind):
    before = is_enabled()
    with pytest.raises(KeyError, match="mine"), kind():
        raise KeyError("mine")
    assert is_enabled() == before


def test_one_object_again_and_inside_itself():
    on, off = enabled(), disabled()
    for _ in range(2):
        with on:
            with off, on, on:
                assert call()
            assert call()
            with off, off:
                assert not call()
        assert not call()
        assert is_restored()


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_scopes_end_in_any_order(order):
    scopes = [enabled("smooth_l1_loss"), disabled("smooth_l1_loss"), enabled()]
    state = [True, False, True]
    for scope in scopes:
        scope.__enter__()
    open_scopes = [0, 1, 2]
    for i in order:
        scopes[i].__exit__(None, None, None)
        open_scopes.remove(i)
        assert call() == bool(open_scopes and state[open_scopes[-1]])
    assert is_restored()


def test_a_scope_that_ends_in_another_context_ends_everywhere():
    scope = enabled()
    scope.__enter__()
    inherited = contextvars.copy_context()
    contextvars.copy_context().run(scope.__exit__, None, None, None)
    assert not is_enabled()
    assert not inherited.run(is_enabled)
    with enabled():
        assert call()


def test_ending_a_scope_that_was_not_entered_is_an_error():
    with pytest.raises(Exception):  # noqa: B017 - any: it is a mistake of the caller's
        enabled().__exit__(None, None, None)
    assert not is_enabled()


# -------------------------------------------------------------------------------------------------------- decorators


def test_decorated_function_runs_in_a_scope_of_its_own():
    @enabled("smooth_l1_loss")
    def countdown(n: int, *, step: int = 1) -> list:
        """Counts."""
        return [call(), *(countdown(n - step) if n else [])]

    assert countdown(2) == [True, True, True]
    assert not call()
    assert countdown.__name__ == "countdown"
    assert countdown.__doc__ == "Counts."
    assert str(inspect.signature(countdown)) == "(n: int, *, step: int = 1) -> list"


def test_decorated_function_keeps_the_scopes_options():
    @enabled("smooth_l1_loss", strict=True)
    def strictly():
        assert not is_enabled("sgd")
        F.smooth_l1_loss(X.double(), Y)

    with pytest.raises(fastpatch.FallbackError, match="smooth_l1_loss can't be served"):
        strictly()

    @disabled("sgd")
    def without_sgd():
        return is_enabled("sgd"), is_enabled("smooth_l1_loss")

    fastpatch.enable()
    assert without_sgd() == (False, True)


def test_decorated_method():
    class Trainer:
        @enabled()
        def train(self):
            return self, call()

    trainer = Trainer()
    assert trainer.train() == (trainer, True)


def test_decorated_coroutine():
    @enabled()
    async def train():
        first = call()
        await asyncio.sleep(0)
        return first, call()

    async def main():
        task = asyncio.create_task(train())
        await asyncio.sleep(0)
        between = call()
        return await task, between, call()

    assert inspect.iscoroutinefunction(train)
    assert asyncio.run(main()) == ((True, True), False, False)


@pytest.mark.parametrize("kind", [enabled, disabled])
def test_generator_functions_are_refused_and_named(kind):
    def batches():
        yield 1

    async def async_batches():
        yield 1

    for function in (batches, async_batches):
        with pytest.raises(
            TypeError, match=f"fastpatch.{kind.__name__}: can't decorate the generator function.*batches"
        ):
            kind()(function)


def test_partial_of_a_generator_function_is_refused():
    def batches(n):
        yield n

    with pytest.raises(TypeError, match="can't decorate the generator function"):
        enabled()(functools.partial(batches, 1))


def test_only_functions_can_be_decorated():
    with pytest.raises(TypeError, match=re.escape("fastpatch.enabled: can only decorate a function, not 3")):
        enabled()(3)
