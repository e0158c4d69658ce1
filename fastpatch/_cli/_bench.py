"""``bench``: stock and fastpatch, taken in turn, on this machine."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fastpatch

Call = Callable[[], object]

_ROUNDS = 7
_SECONDS = 0.04  # a measurement; about 2 * 7 * 10 of them, with as much again for large calls, stay well below a minute


def bench() -> int:
    """Prints a table; the exit status is 1 if fastpatch can't be turned on."""
    import torch

    try:
        fastpatch.enable(strict=True)
    except fastpatch.BuildError as error:
        print(f"fastpatch: {error}", file=sys.stderr)
        return 1
    on = [name for name in fastpatch.targets() if fastpatch.is_enabled(name)]
    fastpatch.disable()
    facts = f"torch {torch.__version__}, fastpatch {fastpatch.__version__}, {_cpu()}, "
    print(f"{facts}{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    print(f"{'':<46} {'stock':>11} {'fastpatch':>11}  ratio", flush=True)
    for target, name, call in _rows():
        if target in on:
            stock, ours = _compare(call)
            print(f"{name:<46} {stock * 1e6:>8.1f} us {ours * 1e6:>8.1f} us {stock / ours:>6.1f}", flush=True)
    if not on:
        print("every target is switched off", file=sys.stderr)
    else:
        print(f"medians of {_ROUNDS} rounds; on a shared machine only the ratios mean anything")
    return 0 if on else 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _compare(call: Call) -> tuple[float, float]:
    """Median seconds of a call, stock and served. A call that isn't served is an error: strict."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        times[0].append(_seconds(call))
        with fastpatch.enabled(strict=True):
            times[1].append(_seconds(call))
    return statistics.median(times[0]), statistics.median(times[1])


def _seconds(call: Call) -> float:
    call()
    start = time.perf_counter()
    call()
    n = max(1, int(_SECONDS / max(time.perf_counter() - start, 1e-7)))
    start = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - start) / n


def _rows() -> Iterator[tuple[str, str, Call]]:
    """(target, what is timed, call); tensors are made as late as possible."""
    for target, words in (("smooth_l1_loss", "smooth L1"), ("huber_loss", "Huber")):
        for size, text in ((64, "64"), (64 << 10, "64 Ki"), (1 << 20, "1 Mi")):
            yield target, f"{words}, {text} elements, forward and backward", _loss(target, size)
    steps: dict[str, list[tuple[int, ...]]] = {
        "2 tensors, 11 elements": [(10,), (1,)],
        "16 tensors, 0.5 M": [(256, 256), (256,)] * 8,
        "1,000 tensors of 64": [(64,)] * 1000,
    }
    for name, shapes in steps.items():
        yield "sgd", f"SGD.step, {name}", _step(shapes)


def _loss(target: str, size: int) -> Call:
    import torch

    x, y = torch.randn(size, requires_grad=True), torch.randn(size)

    def call() -> None:
        x.grad = None
        getattr(torch.nn.functional, target)(x, y).backward()

    return call


def _step(shapes: list[tuple[int, ...]]) -> Call:
    import torch

    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = torch.optim.SGD(params, lr=1e-6, momentum=0.9, weight_decay=1e-4)
    return lambda: optimizer.step()
