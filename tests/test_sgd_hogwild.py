"""Parameters in shared memory, stepped by several processes and threads at once (Hogwild)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _scripts import run_text
from _sgd_helpers import assert_twins, bits_equal, params_of, served, set_grads, step_stock, twins, values
from _threads import in_threads

import fastpatch

SGD = torch.optim.SGD

WORKERS = """
import os, sys, torch, fastpatch
import torch.multiprocessing as mp
WORKERS, STEPS = 2, 40
torch.optim.SGD([torch.ones(1)])  # the first one imports much of torch, which each child would do anew

def worker(rank, params, lock, queue):
    torch.set_num_threads(1)
    fastpatch.reset_report()
    # Each has a momentum of its own, and gradients that its process alone holds.
    optimizer = torch.optim.SGD(params, lr=1.0, momentum=0.5 if lock else 0, foreach=bool(rank))
    for step in range(STEPS):
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 1 + i)
        if lock:
            lock[rank].acquire()
        optimizer.step()
        if lock:
            lock[(rank + 1) % WORKERS].release()
    queue.put((rank, fastpatch.report().to_dict()["sgd"], all(p.is_shared() for p in params)))

def train(patched, taking_turns):
    context = mp.get_context("fork")
    if patched:
        fastpatch.enable("sgd", strict=True)
    params = [torch.nn.Parameter(torch.zeros(n, dtype=d)) for n, d in ((5, torch.float32), (4097, torch.float64))]
    for p in params:
        p.share_memory_()
    lock = [context.Semaphore(int(rank == 0)) for rank in range(WORKERS)] if taking_turns else None
    queue = context.SimpleQueue()
    processes = [context.Process(target=worker, args=(r, params, lock, queue)) for r in range(WORKERS)]
    for process in processes:
        process.start()
    answers = sorted(queue.get() for _ in processes)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * WORKERS
    return params, answers

fast = [(r, {"fast": 2 * STEPS, "fallback": {}}, True) for r in range(WORKERS)]
stock, answers = train(False, True)
assert all(not counts["fast"] for _, counts, _ in answers), answers
ours, answers = train(True, True)
assert answers == fast, answers
print([torch.equal(a, b) for a, b in zip(stock, ours)], stock[0][0].item() < -WORKERS * STEPS)
ours, answers = train(True, False)  # racing: an update may be lost, as in stock, but nothing else happens
assert answers == fast, answers
for i, p in enumerate(ours):
    most = -WORKERS * STEPS * (1 + i)
    assert bool(((p >= most) & (p <= most // WORKERS) & (p % (1 + i) == 0)).all()), p
print("raced")
"""


def test_processes_over_the_same_parameters(tmp_path: Path) -> None:
    """Taking turns, they end with the bits that stock's processes end with."""
    done = run_text(WORKERS, folder=tmp_path)
    assert done.stdout.splitlines() == ["[True, True] True", "raced"]


@pytest.mark.parametrize("foreach", [None, True])
def test_threads_with_shared_memory_and_an_optimizer_each(foreach: bool | None) -> None:
    pairs = [
        twins([values((40, 30), seed), values((77,), 50 + seed)], momentum=0.9, weight_decay=0.01, foreach=foreach)
        for seed in range(4)
    ]
    grads = [[values((40, 30), 100 + step), values((77,), 200 + step)] for step in range(20)]
    for pair in pairs:
        for optimizer in pair:
            for param in params_of(optimizer):
                param.data.share_memory_()

    def work(ours: SGD) -> Callable[[], None]:
        def steps() -> None:
            for each in grads:
                set_grads([ours], each)
                ours.step()

        return steps

    fastpatch.enable("sgd", strict=True)
    with served(2 * 20 * 4):
        in_threads([work(ours) for _, ours in pairs])
    fastpatch.disable()
    for stock, ours in pairs:
        for each in grads:
            set_grads([stock], each)
            stock.step()
        assert all(param.is_shared() for param in params_of(ours))
        assert_twins(stock, ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("foreach", [None, True])
def test_threads_with_an_optimizer_each_over_the_same_parameters(foreach: bool | None, dtype: torch.dtype) -> None:
    """A small step holds the GIL from end to end: none of the 800 whole numbers is lost."""
    params = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (5, 67)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizers = [SGD(params, lr=1.0, foreach=foreach) for _ in range(4)]
    fastpatch.enable("sgd", strict=True)
    with served(2 * 4 * 200):
        in_threads([lambda o=optimizer: [o.step() for _ in range(200)] for optimizer in optimizers])
    for param in params:
        assert bits_equal(param.detach(), torch.full_like(param, -800).detach())
        assert param._version == 800


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "foreach": True}], ids=str)
def test_threads_with_one_large_optimizer(options: dict[str, Any]) -> None:
    """A large step lets other threads run, so they meet inside it, as in stock: nothing is promised but no crash."""
    optimizer, _ = twins([torch.ones(300_000), torch.ones(7)], [torch.ones(300_000), torch.ones(7)], **options)
    step_stock(optimizer)
    before = params_of(optimizer)[0]._version
    fastpatch.enable("sgd", strict=True)
    with served(2 * 3 * 5):
        in_threads([lambda: [optimizer.step() for _ in range(5)]] * 3)
    for param in params_of(optimizer):
        assert param.isfinite().all() and (param < 1).all()
    assert params_of(optimizer)[0]._version == before + 15


def test_a_thread_that_replaces_gradients_meanwhile() -> None:
    """The step holds what it reads and writes, whoever lets go of it."""
    optimizer, _ = twins([torch.ones(300_000), torch.ones(300_000)], momentum=0.9)
    params = params_of(optimizer)
    grads = [torch.full((300_000,), 0.5) for _ in params]
    set_grads([optimizer], grads)

    def replace() -> None:
        for _ in range(300):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
            optimizer.state.clear()

    def train() -> None:
        for _ in range(30):
            optimizer.step()

    fastpatch.enable("sgd")
    in_threads([replace, train])
    sgd = fastpatch.report().to_dict()["sgd"]
    assert sgd == {"fast": 2 * 30, "fallback": {}}
    for param in params:
        assert param.isfinite().all() and len(param.unique()) == 1
