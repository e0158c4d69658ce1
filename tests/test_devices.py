"""The same calls on the CPU and on a CUDA GPU, where there is one: served, and equal to stock's.

On CUDA a loss's mean or sum is within a bound of the exact one; all else is equal in every bit.
``scripts/gpu_check.sh`` runs this file on a GPU. What of the CUDA code needs no GPU is tested in test_cuda_*.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _helpers import assert_same, served
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpatch
from fastpatch.targets._loss_bounds import sum_bound

NO_GPU = not torch.cuda.is_available()
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.skipif(NO_GPU, reason="there is no CUDA GPU")))
on_devices = pytest.mark.parametrize("device", DEVICES)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LOSSES = {"smooth_l1_loss": "beta", "huber_loss": "delta"}
COUNTS = st.one_of(st.integers(1, 100), st.sampled_from([4095, 4097, 16384, 16385, 100_001, 3_000_001]))


@pytest.fixture(autouse=True)
def _proved() -> None:
    """A first call on a device makes the self-test there, whose outcome is no test's business but one's."""
    if not NO_GPU:
        x = torch.ones(2, device="cuda")
        with fastpatch.enabled():
            for name in LOSSES:
                getattr(F, name)(x, x)
            optimizer_of([x.clone()])[0].step()
        fastpatch.reset_report()


def normal(n: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).to(device)


def bound_of(dtype: torch.dtype, device: str) -> float:
    """512 blocks of 512 threads with lanes of 16 bytes have few numbers each, at the sizes here: 3,000,001 / 2^18."""
    return sum_bound(40, dtype) if device == "cuda" else 0.0


# --- losses


@on_devices
@settings(max_examples=40)
@given(
    st.sampled_from(sorted(LOSSES)), st.sampled_from(DTYPES), COUNTS, st.sampled_from([1.0, 0.5, 0.1, 3.0]),
    st.sampled_from(["none", "mean", "sum"]), st.integers(0, 1000),
)  # fmt: skip
def test_a_loss_and_its_gradient(
    device: str, name: str, dtype: torch.dtype, n: int, threshold: float, reduction: str, seed: int
) -> None:
    y = normal(n, dtype, device, seed + 1)
    grad = normal(n if reduction == "none" else 1, dtype, device, seed + 2).reshape(-1 if reduction == "none" else ())
    xs = [normal(n, dtype, device, seed).requires_grad_() for _ in range(2)]

    def call(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = getattr(F, name)(x, y, reduction=reduction, **{LOSSES[name]: threshold})
        loss.backward(grad)
        return loss.detach()

    stock = call(xs[0])
    with served(name, fast=1), fastpatch.enabled(name, strict=True):
        ours = call(xs[1])
    assert_same(xs[1].grad, xs[0].grad)
    if reduction == "none" or device == "cpu":
        return assert_same(ours, stock)
    values = getattr(F, name)(xs[0].detach(), y, reduction="none", **{LOSSES[name]: threshold})
    exact = math.fsum(values.tolist()) / (n if reduction == "mean" else 1)
    assert math.isinf(ours) == math.isinf(stock)  # a sum that float16 can't hold
    assert math.isinf(ours) or abs(ours.item() - exact) <= bound_of(dtype, device) * exact
    with fastpatch.enabled(name):
        assert_same(call(xs[1]), ours)  # in one order, every time


@on_devices
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_autocast_casts_as_it_loads(device: str, target: torch.dtype) -> None:
    x, y = normal(5000, torch.float16, device, 1), normal(5000, target, device, 2)
    with torch.autocast(device, dtype=torch.bfloat16):
        stock = F.smooth_l1_loss(x, y, reduction="none")
        with served("smooth_l1_loss", fast=1), fastpatch.enabled(strict=True):
            ours = F.smooth_l1_loss(x, y, reduction="none")
    assert ours.dtype == torch.float32
    assert_same(ours, stock)


@on_devices
def test_second_gradients_are_stocks(device: str) -> None:
    def call() -> torch.Tensor:
        x = normal(300, torch.float64, device, 1).requires_grad_()
        (first,) = torch.autograd.grad(F.huber_loss(x, normal(300, torch.float64, device, 2)), x, create_graph=True)
        first.square().sum().backward()
        assert x.grad is not None
        return x.grad

    stock = call()
    with fastpatch.enabled():
        assert_same(call(), stock)


@on_devices
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_nothing(device: str, reduction: str) -> None:
    x = torch.empty(0, 4, device=device)
    with served("smooth_l1_loss", fast=1), fastpatch.enabled(strict=True):
        ours = F.smooth_l1_loss(x, x, reduction=reduction)
    assert_same(ours, F.smooth_l1_loss(x, x, reduction=reduction))


# --- SGD


def optimizer_of(params: list[torch.Tensor], **options: Any) -> tuple[torch.optim.SGD, list[torch.Tensor]]:
    parameters = [torch.nn.Parameter(param) for param in params]
    for i, parameter in enumerate(parameters):
        parameter.grad = normal(parameter.numel(), parameter.dtype, str(parameter.device), 100 + i)
    return torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9} | options), parameters


def assert_same_steps(make: Callable[[], tuple[torch.optim.SGD, list[torch.Tensor]]], fast: int) -> None:
    """Three steps of stock's and three of ours: parameters, gradients, buffers and versions are equal after each."""
    (stock, params), (ours, twins) = make(), make()
    for i in range(3):
        stock.step()
        with served("sgd", fast=fast), fastpatch.enabled("sgd", strict=True):
            ours.step()
        for param, twin in zip(params, twins, strict=True):
            assert_same(twin.detach(), param.detach())
            assert_same(twin.grad, param.grad)
            assert twin._version == param._version and twin.grad._version == param.grad._version  # type: ignore[union-attr]
            buffers = [o.state[p].get("momentum_buffer") for o, p in ((ours, twin), (stock, param))]
            if buffers[1] is not None:
                assert_same(*buffers)
                assert buffers[0]._version == buffers[1]._version
            with torch.no_grad():
                for p in (param, twin):
                    assert p.grad is not None
                    p.grad.mul_(-0.7).add_(0.01 * i)


@on_devices
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.0},
        {"weight_decay": 0.013, "dampening": 0.3},
        {"nesterov": True},  # stock's foreach writes the gradients
        {"nesterov": True, "weight_decay": 0.013, "maximize": True},
        {"lr": torch.tensor(0.25)},
    ],
    ids=str,
)
def test_steps(device: str, foreach: bool | None, options: dict[str, Any]) -> None:
    def make() -> tuple[torch.optim.SGD, list[torch.Tensor]]:
        shapes = [(1, DTYPES[0]), (20_001, DTYPES[0]), (67, DTYPES[1]), (4099, DTYPES[2]), (5, DTYPES[3])]
        params = [normal(n, dtype, device, i) for i, (n, dtype) in enumerate(shapes)]
        return optimizer_of(params, foreach=foreach, **options)

    assert_same_steps(make, fast=5)


@on_devices
def test_three_hundred_parameters(device: str) -> None:
    assert_same_steps(lambda: optimizer_of([normal(1 + i, torch.float32, device, i) for i in range(300)]), fast=300)


@on_devices
def test_a_gradient_that_comes_late(device: str) -> None:
    def make() -> tuple[torch.optim.SGD, list[torch.Tensor]]:
        optimizer, params = optimizer_of([normal(50, torch.float32, device, i) for i in range(3)])
        grad, params[1].grad = params[1].grad, None
        optimizer.step()
        params[1].grad = grad
        return optimizer, params

    assert_same_steps(make, fast=3)


@on_devices
def test_grad_scaler(device: str) -> None:
    def train() -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 64, device=device).reshape(8, 8))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**20, growth_interval=2)
        for i in range(6):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = F.smooth_l1_loss(
                    torch.ones(4, 8, device=device) @ weight * (1e30 if i == 2 else 1.0), weight[:4]
                )
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return weight.detach()

    stock = train()
    with fastpatch.enabled("sgd", strict=True):
        assert_same(train(), stock)


# --- CUDA alone

needs_gpu = pytest.mark.skipif(NO_GPU, reason="there is no CUDA GPU")


@needs_gpu
def test_parameters_on_the_cpu_and_on_a_gpu() -> None:
    def make() -> tuple[torch.optim.SGD, list[torch.Tensor]]:
        params = [normal(50, torch.float32, device, i) for i, device in enumerate(("cpu", "cuda", "cpu", "cuda"))]
        return optimizer_of(params, nesterov=True)

    assert_same_steps(make, fast=4)


@needs_gpu
def test_tensors_on_two_devices() -> None:
    x = torch.ones(3)
    with fastpatch.enabled():
        assert fastpatch.explain(F.smooth_l1_loss, x, x.cuda()).reason == "device"
        with pytest.raises(RuntimeError):
            F.smooth_l1_loss(x, x.cuda())


@needs_gpu
def test_what_is_refused() -> None:
    x = torch.ones(6, 4, device="cuda")
    with fastpatch.enabled():
        for call, reason in (
            (lambda: fastpatch.explain(F.smooth_l1_loss, x, x.long()), "dtype"),
            (lambda: fastpatch.explain(F.smooth_l1_loss, x.t(), x.t().contiguous()), "strides"),
            (lambda: fastpatch.explain(F.smooth_l1_loss, x.half(), x.half(), beta=1e-5), "beta"),
            (lambda: fastpatch.explain(optimizer_of([x[0]], lr=torch.ones((), device="cuda"))[0].step),
             "tensor_hyperparameter"),
            (lambda: fastpatch.explain(optimizer_of([x[0]], fused=True)[0].step), "fused"),
        ):  # fmt: skip
            assert call().reason == reason


@needs_gpu
def test_the_equivalence_suite() -> None:
    from fastpatch.testing import run

    outcome = run("cuda", examples=60, seed=1)
    assert outcome.is_equal, str(outcome)
    assert {row.target for row in outcome.rows if row.fast} == set(fastpatch.targets())


def kernels(call: Callable[[], object]) -> int:
    """How many kernels a call launches."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(
        not name.startswith(("Mem", "void at::native::vectorized_elementwise_kernel<4, at::native::Fill"))
        for name in names
    )


@needs_gpu
def test_who_was_served_on_the_gpu_is_counted() -> None:
    x = torch.ones(3, device="cuda")
    optimizer, _ = optimizer_of([normal(5, torch.float32, device, 1) for device in ("cpu", "cuda", "cuda")])
    with fastpatch.enabled(strict=True):
        F.smooth_l1_loss(x, x)
        F.smooth_l1_loss(x.cpu(), x.cpu())
        optimizer.step()
    assert fastpatch.report().on_cuda == {"smooth_l1_loss": 1, "sgd": 2}


@needs_gpu
def test_launches() -> None:
    small, large = (normal(n, torch.float32, "cuda", 1) for n in (10_000, 1_000_000))
    optimizer, _ = optimizer_of([normal(64, torch.float32, "cuda", i) for i in range(300)])
    with fastpatch.enabled(strict=True):
        assert kernels(lambda: F.smooth_l1_loss(small, small)) == 1
        assert kernels(lambda: F.smooth_l1_loss(large, large)) == 2
        assert kernels(optimizer.step) == 3  # 104 tensors each


@needs_gpu
def test_a_captured_graph() -> None:
    x, y = normal(30_000, torch.float32, "cuda", 1).requires_grad_(), normal(30_000, torch.float32, "cuda", 2)
    weight = torch.nn.Parameter(x.detach().clone())
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(weight, y)
        loss.backward()
        optimizer.step()
        return loss

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            weight.copy_(x)
        optimizer.state.clear()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                train()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = train()
        for _ in range(4):
            graph.replay()
        return loss.detach().clone(), weight.detach().clone()

    stock = run()
    fastpatch.reset_report()
    with fastpatch.enabled(strict=True):
        ours = run()
    counted = fastpatch.report().to_dict()
    assert counted["sgd"] == {"fast": 4, "fallback": {}} and counted["smooth_l1_loss"] == {"fast": 4, "fallback": {}}
    assert_same(ours[1], stock[1])


@needs_gpu
def test_a_side_stream_is_the_one_that_is_used() -> None:
    x = normal(1 << 22, torch.float32, "cuda", 1)
    y = torch.zeros_like(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), fastpatch.enabled(strict=True):
        torch.cuda._sleep(50_000_000)
        y.copy_(x)  # waits behind the sleep; on any other stream the loss would be of zeros
        assert F.smooth_l1_loss(y, x, reduction="sum").item() == 0  # item() waits for this stream


@needs_gpu
def test_out_of_memory_leaves_all_as_it_was() -> None:
    param = torch.nn.Parameter(torch.ones(64 << 20, device="cuda"))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (32 << 20)) / total)
    try:
        with fastpatch.enabled(strict=True), pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert param.eq(1).all() and param._version == 0
    optimizer.step()
    assert param.detach().eq(0.9).all()


@needs_gpu
def test_where_the_self_test_failed_stock_serves() -> None:
    from fastpatch import _native

    x = torch.ones(3, device="cuda")
    _native.set_cuda_proof("smooth_l1_loss", 0, ("float64",))
    try:
        with fastpatch.enabled(), served("smooth_l1_loss", fast=1, fallback={"cuda_unproven": 1}):
            F.smooth_l1_loss(x, x)
            F.smooth_l1_loss(x.double(), x.double())
    finally:
        _native.set_cuda_proof("smooth_l1_loss", 0, ("float32", "float64", "bfloat16", "float16"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA GPUs")
def test_two_gpus_in_one_optimizer() -> None:
    def make() -> tuple[torch.optim.SGD, list[torch.Tensor]]:
        return optimizer_of([normal(70, torch.float32, f"cuda:{i % 2}", i) for i in range(4)])

    assert_same_steps(make, fast=4)
