"""enabled() and disabled() belong to one thread or task: nobody else is touched, however many there are."""

import asyncio
import sys
import threading

import torch
import torch.nn.functional as F
from _switch_helpers import EXPECTED, STOCK, X, Y, call, in_thread, is_restored, restored  # noqa: F401 (restored is a fixture)

import fastpatch
from fastpatch import disabled, enabled, is_enabled

# ----------------------------------------------------------------------------------------------------------- threads


def test_threads_outside_and_threads_started_inside_are_not_touched():
    inside, leave = threading.Event(), threading.Event()
    seen = {}

    def outside():
        inside.wait(30)
        seen["outside"] = is_enabled(), call()
        leave.set()

    thread = threading.Thread(target=outside)
    thread.start()
    with enabled():
        inside.set()
        assert leave.wait(30)
        assert in_thread(is_enabled) is False
        assert in_thread(call) is False
        assert call()
    thread.join()
    assert seen == {"outside": (False, False)}


def test_a_thread_that_is_off_while_the_process_is_on():
    fastpatch.enable()

    def off():
        with disabled():
            return call()

    assert in_thread(off) is False
    assert call()


def test_one_object_in_two_threads():
    scope, entered, left = enabled(), [threading.Event(), threading.Event()], threading.Event()
    seen = {}

    def first():
        with scope:
            entered[0].set()
            entered[1].wait(30)
        seen["first, after its end"] = is_enabled()
        left.set()

    def second():
        entered[0].wait(30)
        with scope:
            entered[1].set()
            left.wait(30)
            seen["second, inside"] = is_enabled()

    threads = [threading.Thread(target=function) for function in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"first, after its end": False, "second, inside": True}


def test_scopes_of_many_threads_while_others_call():
    """Every call inside a scope is served and none outside, whoever patches and restores meanwhile."""
    rounds, errors, done = 200, [], threading.Event()

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    def scoped():
        for _ in range(rounds):
            with enabled("smooth_l1_loss"):
                assert is_enabled("smooth_l1_loss")
                assert torch.equal(F.smooth_l1_loss(X, Y), EXPECTED)
            assert not is_enabled("smooth_l1_loss")

    def bystander():
        while not done.is_set():
            assert torch.equal(F.smooth_l1_loss(X, Y), EXPECTED)
            assert torch.equal(STOCK[0](X, Y), EXPECTED)
            assert not is_enabled()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [threading.Thread(target=guarded, args=(scoped,)) for _ in range(8)]
        bystanders = [threading.Thread(target=guarded, args=(bystander,)) for _ in range(2)]
        for thread in workers + bystanders:
            thread.start()
        for thread in workers:
            thread.join()
        done.set()
        for thread in bystanders:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert fastpatch.report().to_dict()["smooth_l1_loss"] == {"fast": 8 * rounds, "fallback": {}}
    assert is_restored()


# ------------------------------------------------------------------------------------------------------------- tasks


def test_concurrent_tasks_have_scopes_of_their_own():
    async def task(scope, expected):
        seen = []
        with scope:
            for _ in range(3):
                seen.append(call())
                await asyncio.sleep(0)
        seen.append(call())
        assert seen == [expected] * 3 + [False]

    async def main():
        await asyncio.gather(task(enabled(), True), task(disabled(), False), task(enabled("sgd"), False))

    asyncio.run(main())


def test_a_task_that_outlives_the_scope_it_was_started_in():
    async def main():
        leave = asyncio.Event()
        seen = []

        async def child():
            seen.append(call())
            await leave.wait()
            seen.append(call())

        with enabled():
            task = asyncio.create_task(child())
            await asyncio.sleep(0)
        assert is_restored()
        leave.set()
        await task
        return seen

    assert asyncio.run(main()) == [True, False]


def test_a_tasks_scope_that_outlives_its_parents():
    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()

        async def child():
            with enabled("smooth_l1_loss"):
                entered.set()
                await leave.wait()
                return call()

        with enabled():
            task = asyncio.create_task(child())
            await entered.wait()
        assert not is_restored()
        leave.set()
        inside = await task
        return inside, is_restored()

    assert asyncio.run(main()) == (True, True)
