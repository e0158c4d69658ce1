"""Times fastpatch against stock PyTorch on this machine: python scripts/bench.py [--threads N] [--json FILE].

Every row takes stock and fastpatch in turn, in one process, and gives the ratio of the medians over several rounds:
only such ratios mean anything on a shared machine. Rows whose work is done by us are checked to be served by us.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F

import fastpatch

Call = Callable[[], object]

# ResNet-50's 161 parameters: the stem, four stages of bottlenecks, the classifier.
_STAGES = ((64, 64, 3), (256, 128, 4), (512, 256, 6), (1024, 512, 3))


def resnet50_shapes() -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    for before, width, blocks in _STAGES:
        for block in range(blocks):
            first = before if block == 0 else 4 * width
            for out, channels, kernel in ((width, first, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, channels, kernel, kernel), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, first, 1, 1), (4 * width,), (4 * width,)]
    return [*shapes, (1000, 2048), (1000,)]


def seconds(call: Call, budget: float) -> float:
    """Seconds a call, over a batch of calls that takes about ``budget``."""
    call()
    start = time.perf_counter()
    call()
    once = max(time.perf_counter() - start, 1e-7)
    n = max(1, int(budget / once))
    start = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - start) / n


def compare(calls: dict[str, tuple[Call, bool]], rounds: int, budget: float) -> dict[str, float]:
    """Median seconds of each call, all taken in turn; the flag says whether fastpatch is on."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, on) in calls.items():
            if on:
                with fastpatch.enabled():
                    times[name].append(seconds(call, budget))
            else:
                times[name].append(seconds(call, budget))
    return {name: statistics.median(values) for name, values in times.items()}


def must_be_fast(call: Call) -> None:
    with fastpatch.enabled(strict=True):
        call()


def loss_calls(name: str, n: int, dtype: torch.dtype, reduction: str, backward: bool) -> dict[str, tuple[Call, bool]]:
    """A loss call, a call that can't be beaten (a clone of a scalar, with its backward), and reading both operands."""
    x = torch.randn(n).to(dtype).requires_grad_(backward)
    y = torch.randn(n).to(dtype)
    grad = torch.ones(n, dtype=dtype) if reduction == "none" else None

    def loss() -> None:
        out = getattr(F, name)(x, y, reduction=reduction)
        if backward:
            x.grad = None
            out.backward(grad)

    scalar = torch.ones((), requires_grad=backward)

    def least() -> None:
        out = scalar.clone()
        if backward:
            scalar.grad = None
            out.backward()

    def read() -> None:
        x.sum()
        y.sum()

    must_be_fast(loss)
    calls = {"stock": (loss, False), "fastpatch": (loss, True), "least": (least, False)}
    return calls if backward else calls | {"sum": (read, False)}


LOSS_ROWS = (
    *(("smooth_l1_loss", n, torch.float32, "mean") for n in (64, 16 << 10, 256 << 10, 1 << 20, 16 << 20)),
    *(("smooth_l1_loss", n, torch.float32, "none") for n in (64, 1 << 20, 16 << 20)),
    *(("smooth_l1_loss", 1 << 20, dtype, "mean") for dtype in (torch.float64, torch.bfloat16, torch.float16)),
    *(("huber_loss", n, torch.float32, "mean") for n in (64, 1 << 20)),
    ("huber_loss", 1 << 20, torch.bfloat16, "mean"),
)


def bench_loss(rounds: int, budget: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, n, dtype, reduction in LOSS_ROWS:
        for backward in (False, True):
            times = compare(loss_calls(name, n, dtype, reduction, backward), rounds, budget)
            what = f"{name} {str(dtype)[6:]} {n} {reduction}"
            rows.append({"row": f"{what} {'forward+backward' if backward else 'no grad'}", **times})
    return rows


def sgd_rows() -> dict[str, list[tuple[int, ...]]]:
    return {
        "2 tensors, 11 elements": [(10,), (1,)],
        "16 tensors, 0.5 M": [(256, 256), (256,)] * 8,
        "161 tensors, ResNet-50": resnet50_shapes(),
        "1,000 tensors of 64": [(64,)] * 1000,
        "16 Mi in one": [(16 << 20,)],
    }


def stepper(params: list[torch.Tensor], **kwargs: object) -> Call:
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = torch.optim.SGD(params, lr=1e-6, momentum=0.9, weight_decay=1e-4, **kwargs)  # type: ignore[arg-type]
    optimizer.step()  # the buffers
    return lambda: optimizer.step()


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def dtensors() -> list[torch.Tensor]:
    """Parameters as FSDP2's fully_shard() makes them, in a process group of one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    tensors = (torch.randn(shape) for shape in [(32, 32), (32,)] * 50)
    return [torch.nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)])) for tensor in tensors]


def adding(n: int) -> Call:
    a, b, c = (torch.randn(n) for _ in range(3))
    return lambda: torch.add(a, b, out=c)


def bench_sgd(rounds: int, budget: float) -> list[dict[str, object]]:
    makers: dict[str, Callable[[], list[torch.Tensor]]] = {
        name: lambda shapes=shapes: parameters(shapes) for name, shapes in sgd_rows().items()
    }
    makers["161 tensors, ResNet-50, bfloat16"] = lambda: parameters(resnet50_shapes(), torch.bfloat16)
    makers["100 DTensors of 32x32 and 32"] = dtensors
    rows: list[dict[str, object]] = []
    for name, make in makers.items():
        ours = stepper(make())
        must_be_fast(ours)
        calls = {
            "stock": (stepper(make()), False),
            "fastpatch": (ours, True),
            "foreach": (stepper(make(), foreach=True), False),
        }
        if "DTensor" not in name:  # which fused=True does not take
            calls["fused"] = (stepper(make(), fused=True), False)
        if name == "16 Mi in one":
            calls["add"] = (adding(16 << 20), False)
        times = compare(calls, rounds, budget)
        if "add" in times:
            times["add"] *= 20 / 12  # what the bytes of an update would take at the rate of torch.add(a, b, out=c)
        rows.append({"row": f"sgd {name}", **times})
    return rows


def bench_refused(rounds: int, budget: float) -> list[dict[str, object]]:
    """What a refusal costs: calls that stock serves in both columns."""
    x, y = torch.randn(64), torch.randn(64, dtype=torch.float64)
    step = stepper(parameters([(10,), (1,)]), fused=True)
    rows: list[dict[str, object]] = []
    for name, call in (
        ("loss with a float64 target", lambda: F.smooth_l1_loss(x, y)),
        ("sgd step, fused=True", step),
    ):
        times = compare({"stock": (call, False), "fastpatch": (call, True)}, rounds, budget)
        rows.append({"row": f"refused: {name}", **times})
    return rows


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def table(rows: list[dict[str, object]]) -> str:
    names = ("stock", "foreach", "fused", "least", "sum", "add")
    lines = [f"{'':<56} {'fastpatch':>10} {' '.join(f'{name:>8}' for name in names)}   (us; others: ratios to it)"]
    for row in rows:
        ours = float(row["fastpatch"])  # type: ignore[arg-type]
        ratios = [
            f"{float(row[name]) / ours:>7.2f}x" if name in row else f"{'':>8}"  # type: ignore[arg-type]
            for name in names
        ]
        lines.append(f"{row['row']:<56} {ours * 1e6:>10.2f} {' '.join(ratios)}")
        if str(row["row"]).startswith("refused"):
            lines[-1] += f"  {(ours - float(row['stock'])) * 1e6:+.2f} us"  # type: ignore[arg-type]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1, help="torch.set_num_threads (default 1)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds per row; the median counts (default 7)")
    parser.add_argument("--budget", type=float, default=0.05, help="seconds a measurement (default 0.05)")
    parser.add_argument("--only", choices=("loss", "sgd", "refused"), help="one part of the table")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    parts = {"loss": bench_loss, "sgd": bench_sgd, "refused": bench_refused}
    rows = [row for name, part in parts.items() if args.only in (None, name) for row in part(args.rounds, args.budget)]
    facts = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "fastpatch": fastpatch.__version__,
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": args.threads,
    }
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(table(rows))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"facts": facts, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
