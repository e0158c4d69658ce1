"""Times fastpatch against stock PyTorch on a CUDA GPU: python scripts/gpu_bench.py [--report FILE.md] [--notes FILE].

Every row takes all ways in turn, several rounds, and gives medians; a time is that of many calls and one wait for the
device. The copy rate is that of ``Tensor.copy_`` between tensors of as many bytes as the call has to move.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from bench import resnet50_shapes

import fastpatch

Call = Callable[[], object]
Row = tuple[str, dict[str, float]]  # seconds a call, by who did it

COUNTS = (64, 64 << 10, 1 << 20, 16 << 20, 64 << 20)


def seconds(call: Call, budget: float) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    n = max(3, int(budget / max(time.perf_counter() - start, 1e-6)))
    start = time.perf_counter()
    for _ in range(n):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / n


def compare(calls: dict[str, Call], rounds: int, budget: float) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    with fastpatch.enabled(strict=True):
        calls["fastpatch"]()  # the self-test, and a proof that it is served
    for _ in range(rounds):
        for name, call in calls.items():
            if name == "fastpatch":
                with fastpatch.enabled():
                    times[name].append(seconds(call, budget))
            else:
                times[name].append(seconds(call, budget))
    return {name: statistics.median(values) for name, values in times.items()}


def copying(moved: int) -> Call:
    """Moves so many bytes, half of them read, half written."""
    source = torch.empty(max(1, moved // 2), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def loss_rows(rounds: int, budget: float, compiled: bool) -> list[Row]:
    rows = []
    cases = [(n, torch.float32) for n in COUNTS] + [(16 << 20, torch.bfloat16)]
    for n, dtype in cases:
        x = torch.randn(n, device="cuda").to(dtype).requires_grad_()
        y = torch.randn(n, device="cuda").to(dtype)

        def forward(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            with torch.no_grad():
                return F.smooth_l1_loss(x, y)

        def both(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            x.grad = None
            F.smooth_l1_loss(x, y).backward()

        size = n * x.element_size()
        name = f"smooth_l1_loss {n} {str(dtype)[6:]}"
        for what, call, moved in (("forward", forward, 2 * size), ("forward + backward", both, 5 * size)):
            calls: dict[str, Call] = {"stock": call, "fastpatch": call, "copy": copying(moved)}
            if compiled:
                calls["torch.compile"] = torch.compile(call)
            rows.append((f"{name} {what}", compare(calls, rounds, budget)))
    return rows


def stepper(shapes: list[tuple[int, ...]], dtype: torch.dtype, **options: bool) -> torch.optim.SGD:
    params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype, device="cuda")) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = torch.optim.SGD(params, lr=1e-6, momentum=0.9, weight_decay=1e-4, **options)  # type: ignore[arg-type]
    optimizer.step()  # the buffers
    return optimizer


def stepping(shapes: list[tuple[int, ...]], dtype: torch.dtype, **options: bool) -> Call:
    """Looks up ``step`` at each call, as a training does: taken earlier, it would pass the outer patch point by."""
    optimizer = stepper(shapes, dtype, **options)
    return lambda: optimizer.step()


def sgd_rows(rounds: int, budget: float, compiled: bool) -> list[Row]:
    cases = {
        "2 tensors, 11 elements": ([(10,), (1,)], torch.float32),
        "161 tensors, ResNet-50": (resnet50_shapes(), torch.float32),
        "161 tensors, ResNet-50, bfloat16": (resnet50_shapes(), torch.bfloat16),
        "1,000 tensors of 64": ([(64,)] * 1000, torch.float32),
        "16 Mi in one": ([(16 << 20,)], torch.float32),
        "64 Mi in one": ([(64 << 20,)], torch.float32),
    }
    rows = []
    for name, (shapes, dtype) in cases.items():
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        calls: dict[str, Call] = {
            "stock": stepping(shapes, dtype),  # foreach, on CUDA
            "fastpatch": stepping(shapes, dtype),
            "foreach": stepping(shapes, dtype, foreach=True),
            "fused": stepping(shapes, dtype, fused=True),
            "copy": copying(5 * elements * dtype.itemsize),
        }
        if compiled and len(shapes) < 1000:
            calls["torch.compile"] = torch.compile(stepper(shapes, dtype).step)
        rows.append((f"SGD.step {name}", compare(calls, rounds, budget)))
    return rows


def table(rows: list[Row]) -> str:
    """Microseconds of fastpatch, and how many times as long the others take."""
    others = ("stock", "foreach", "fused", "torch.compile", "copy")
    lines = [
        f"| | fastpatch | {' | '.join(f'{name} / fastpatch' for name in others)} |",
        f"|{'---|' * (2 + len(others))}",
    ]
    for name, times in rows:
        ours = times["fastpatch"]
        ratios = [f"{times[other] / ours:.2f}" if other in times else "" for other in others]
        lines.append(f"| {name} | {ours * 1e6:.1f} us | {' | '.join(ratios)} |")
    return "\n".join(lines)


def facts() -> str:
    properties = torch.cuda.get_device_properties(0)
    return "\n".join(
        [
            f"- GPU: {properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors",
            f"- torch {torch.__version__} (CUDA {torch.version.cuda}), fastpatch {fastpatch.__version__}",
            f"- {date.today().isoformat()}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="rounds per row; the median counts (default 5)")
    parser.add_argument("--budget", type=float, default=0.02, help="seconds a measurement (default 0.02)")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which takes most of the time")
    parser.add_argument("--report", metavar="FILE.md", help="also write a report there")
    parser.add_argument("--notes", metavar="FILE", help="what else the report is to say: lines of Markdown")
    args = parser.parse_args()
    torch.manual_seed(0)
    compiled = not args.no_compile
    rows = [*loss_rows(args.rounds, args.budget, compiled), *sgd_rows(args.rounds, args.budget, compiled)]
    print(facts(), table(rows), sep="\n\n")
    if args.report:
        notes = Path(args.notes).read_text() if args.notes else ""
        text = (
            f"# fastpatch on a GPU\n\nWritten by `scripts/gpu_check.sh`.\n\n{facts()}\n\n{notes}\n"
            "Ratios above 1: fastpatch is faster. `copy` moves as many bytes as the call has to.\n\n"
        )
        Path(args.report).write_text(f"{text}{table(rows)}\n")


if __name__ == "__main__":
    main()
