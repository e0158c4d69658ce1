"""SGD in float64, bfloat16 and float16, beside float32, and with tensors as lr and weight_decay."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _capability import assert_capability_is_the_one_asked_for, outer_run_only, run_at_default
from _scripts import run_text
from _sgd_helpers import (
    DTYPES,
    assert_twins,
    bits_equal,
    outcome,
    params_of,
    served,
    set_grads,
    step_stock,
    step_twins,
    threads,
    twins,
    values,
)
from _sgd_scenarios import HYPERS, one_group, run_scenario, scenarios
from hypothesis import given, settings

import fastpatch
from fastpatch.testing import SgdRun, TensorNumber
from fastpatch.testing.strategies import LARGE

REDUCED = [torch.bfloat16, torch.float16]


# ---------------------------------------------------------------------------------------------------- sizes, threads


@pytest.mark.parametrize("number", [1, 2, 3])
@given(scenario=scenarios(LARGE, most=2))
@settings(deadline=None, max_examples=8 if "ATEN_CPU_CAPABILITY" in os.environ else 20)
def test_large_parameters_at_any_number_of_threads(number: int, scenario: SgdRun) -> None:
    run_scenario(replace(scenario, threads=number))


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", REDUCED)
def test_the_ends_of_each_threads_share(dtype: torch.dtype, foreach: bool, number: int) -> None:
    """Of a reduced dtype the last numbers of a share are rounded otherwise than those in vectors."""
    counts = [7, 32_769, 1, 40_000, 65_543, 31, 65_598, 70_001, 33]
    with threads(number):
        pair = twins([values((n,), i, dtype=dtype) for i, n in enumerate(counts)], foreach=foreach, momentum=0.9)
        for step in range(3):
            for optimizer in pair:
                optimizer.param_groups[0].update(weight_decay=0.1 * step, nesterov=step == 2, dampening=0.3)
            set_grads(pair, [values((n,), 100 * step + i + 9, dtype=dtype) for i, n in enumerate(counts)])
            step_twins(pair, fast=len(counts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_thread_counts_show_in_reduced_dtypes(dtype: torch.dtype) -> None:
    """What makes the tests above sharp: with vectors, stock's own results depend on where a share ends."""
    shows = dtype in REDUCED and torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    pair = one, two = twins([values((65_598,), 1, 0, dtype)], momentum=0.9, weight_decay=0.1)
    for patched in (False, True):
        for step in range(3):
            set_grads(pair, [values((65_598,), 2 + step, 0, dtype)])
            for optimizer, number in zip(pair, (1, 2), strict=True):
                with threads(number), (fastpatch.enabled if patched else fastpatch.disabled)("sgd"):
                    optimizer.step()
        assert bits_equal(params_of(one)[0], params_of(two)[0]) != shows
    assert fastpatch.report().to_dict()["sgd"] == {"fast": 6, "fallback": {}}


def test_flushed_denormals_of_each_thread(tmp_path: Path) -> None:
    """The setting may differ among the threads of a pool, so each element is updated by the thread that stock uses."""
    done = run_text(
        """
import torch, fastpatch
torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)  # the pool's threads start here, with denormals
TINY = {torch.float32: 1e-39, torch.float64: 1e-309, torch.bfloat16: 1e-39, torch.float16: 1e-6}
START = [torch.full((n,), tiny, dtype=dtype) for dtype, tiny in TINY.items() for n in (40000, 1000, 70000)]
torch.set_flush_denormal(True)  # for this thread; START holds denormals
def trained(foreach):
    params = [torch.nn.Parameter(start.clone()) for start in START]
    for p, start in zip(params, START):
        p.grad = start
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.5, foreach=foreach)
    optimizer.step(), optimizer.step()
    return [p.detach().view(torch.int64 if p.itemsize == 8 else torch.int16) for p in params]
for foreach in (False, True):
    stock = trained(foreach)
    with fastpatch.enabled(strict=True):
        ours = trained(foreach)
    print([int((a != b).sum()) for a, b in zip(stock, ours)])
    print([bool((p == p[0]).all()) for p in stock[:6]])  # alike, as one thread has updated all of it?
print(fastpatch.report().to_dict()["sgd"])
""",
        folder=tmp_path,
    )
    *lines, report = done.stdout.splitlines()
    assert lines[0] == lines[2] == str([0] * 12)
    assert lines[1] == lines[3] == str([False, True, False] * 2)
    assert report == "{'fast': 48, 'fallback': {}}"


def test_a_tiny_number_is_flushed_as_the_calling_thread_does(tmp_path: Path) -> None:
    """Where that flushes denormals, an lr of 1e-40 is zero for the threads of the pool too, which don't."""
    done = run_text(
        """
import torch, fastpatch
torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)  # the pool's threads start here, with denormals
torch.set_flush_denormal(True)
def trained(dtype):
    p = torch.nn.Parameter(torch.ones(70000, dtype=dtype))
    p.grad = torch.full((70000,), 3e38, dtype=dtype)
    torch.optim.SGD([p], lr=1e-40).step()
    return p.detach()
for dtype in (torch.float32, torch.bfloat16):
    stock = trained(dtype)
    with fastpatch.enabled(strict=True):
        print(torch.equal(stock, trained(dtype)), bool((stock == 1).all()))
""",
        folder=tmp_path,
    )
    assert done.stdout.split() == ["True"] * 4


# ------------------------------------------------------------------------------------------------- numbers, tensors


@pytest.mark.parametrize("name", HYPERS)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", REDUCED)
@pytest.mark.parametrize("foreach", [False, True])
def test_numbers_that_a_reduced_dtype_cannot_hold(foreach: bool, dtype: torch.dtype, nesterov: bool, name: str) -> None:
    """Stock raises, half-way through, where it scales an addition; as a factor alone it is infinite."""
    number = {torch.bfloat16: 3.4e38, torch.float16: 7e4}[dtype]
    options = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov, "foreach": foreach}
    tensors = [values((19,), seed, dtype=dtype) for seed in range(2)]
    pair = twins([values((7,), 5), *tensors], [values((7,), 6), *tensors[::-1]], **options)
    step_twins(pair, fast=3)
    for optimizer in pair:
        optimizer.param_groups[0][name] = number
    expected = step_stock(pair[0])
    assert (expected[0] == "returned") == (name == "momentum" and not nesterov)
    with fastpatch.enabled("sgd"):
        assert outcome(pair[1].step) == expected
    assert_twins(*pair)


@pytest.mark.parametrize("number", [0.0, -0.0, 1e-50, 1e-40, 0.1, 0.9, -0.37, 1.0, 3.0, 30000.0])
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_tensor_in_place_of_a_number(foreach: bool, name: str, number: float) -> None:
    for dtype in DTYPES:
        for of in DTYPES:
            hyper = {"momentum": 0.9, "weight_decay": 0.1, "foreach": foreach, name: TensorNumber(number, of)}
            run_scenario(one_group((67,), hyper, hyper, dtype=dtype))


def test_a_tensor_lr_is_read_at_every_step() -> None:
    """It is changed in place, by schedulers too; the step itself leaves it alone."""
    rates = [torch.tensor(0.5, dtype=torch.float64) for _ in range(2)]
    pair = twins([values((19,), 1)], [values((19,), 2)], momentum=0.9)
    for optimizer, rate in zip(pair, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
    for _ in range(3):
        step_twins(pair, fast=1)
        for optimizer, rate in zip(pair, rates, strict=True):
            assert optimizer.param_groups[0]["lr"] is rate
            rate.mul_(0.75)
    assert rates[1]._version == 3
    assert rates[1].item() == 0.5 * 0.75**3


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_tensors_of_every_kind_that_hold_one_number(name: str) -> None:
    base = torch.tensor([0.1, 0.2, 0.3])
    served_ones = [base[1], torch.nn.Parameter(torch.tensor(0.1), requires_grad=False), base.sum(), base.double()[2]]
    with torch.inference_mode():
        inference = torch.tensor(0.1)
    negated = torch.complex(torch.tensor(0.0), torch.tensor(-0.1)).conj().imag
    assert negated.is_neg()
    refused = [inference, negated, torch.tensor(0.1).as_subclass(type("Sub", (torch.Tensor,), {}))]
    for tensors, how in ((served_ones, {"fast": 1}), (refused, {"tensor_hyperparameter": 1})):
        for tensor in tensors:
            pair = twins([values((19,), 1)], [values((19,), 2)], momentum=0.9)
            for optimizer in pair:
                optimizer.param_groups[0][name] = tensor
            step_twins(pair, **how)


@pytest.mark.parametrize("lr", [np.array(0.1), np.float16(0.1), np.array([0.1])], ids=repr)
def test_arrays_of_numpy_are_left_to_stock(lr: Any) -> None:
    pair = twins([values((19,), 1)], [values((19,), 2)])
    for optimizer in pair:
        optimizer.param_groups[0]["lr"] = lr
    step_twins(pair, hyperparameter=1)


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("later", ["parameter", "group"])
def test_a_hyperparameter_that_the_step_itself_changes(later: str, foreach: bool, name: str) -> None:
    """Its memory is a parameter's: stock reads it anew for each that follows."""
    pair = twins([values((3,), 1, 0).abs(), values((19,), 2, 0)], [values((3,), 3, 0), values((19,), 4, 0)])
    for optimizer in pair:
        first, second = params_of(optimizer)
        group = optimizer.param_groups[0]
        group["foreach"] = foreach
        if later == "group":
            group["params"] = [first]
            optimizer.add_param_group({"params": [second], "foreach": foreach})
        optimizer.param_groups[-1][name] = first.detach()[0]
    for _ in range(2):
        expected = step_stock(pair[0])
        with fastpatch.enabled("sgd"):
            assert outcome(pair[1].step) == expected
        assert_twins(*pair)


# ------------------------------------------------------------------------------------------------------ mixed groups


@pytest.mark.parametrize("foreach", [False, True])
def test_all_dtypes_in_one_group(foreach: bool) -> None:
    shapes = [(67,), (), (3, 5), (0,)]
    kinds = [(shape, dtype) for shape in shapes for dtype in DTYPES]
    tensors = [values(shape, i, dtype=dtype) for i, (shape, dtype) in enumerate(kinds)]
    pair = twins(tensors, foreach=foreach, momentum=0.9, weight_decay=0.1, nesterov=True)
    for step in range(3):
        set_grads(pair, [values(shape, 50 * step + i, dtype=dtype) for i, (shape, dtype) in enumerate(kinds)])
        step_twins(pair, fast=len(kinds))
    for param in params_of(pair[1]):
        assert pair[1].state[param]["momentum_buffer"].dtype == param.dtype


def test_a_model_cast_between_steps() -> None:
    """model.half() leaves the optimizer's buffers as they are; a checkpoint loaded then casts them."""
    pair = twins([values((19,), 1), values((7,), 2)], [values((19,), 3), values((7,), 4)], momentum=0.9)
    step_twins(pair, fast=2)
    for optimizer in pair:
        param = params_of(optimizer)[0]
        param.grad = None
        param.data = param.detach().half()
        param.grad = values((19,), 5, dtype=torch.float16)
    step_twins(pair, fast=1, momentum_buffer=1)
    for optimizer in pair:
        optimizer.load_state_dict(optimizer.state_dict())
    step_twins(pair, fast=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_function_in_all_dtypes(dtype: torch.dtype) -> None:
    function = sys.modules["torch.optim.sgd"]
    hyper = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.2, "nesterov": False, "maximize": True}
    results = []
    for patched in (False, True):
        tensors, grads = ([values((n,), i + n, dtype=dtype) for n in (19, 40_000)] for i in (0, 1))
        buffers: list[Any] = [None, None]
        with (fastpatch.enabled if patched else fastpatch.disabled)("sgd"), served(4 * patched), torch.no_grad():
            for _ in range(2):
                function.sgd(tensors, grads, buffers, lr=torch.tensor(0.1), **hyper)
        results.append([*tensors, *grads, *buffers])
    assert all(bits_equal(stock, ours) for stock, ours in zip(*results, strict=True))


# -------------------------------------------------------------------------------------------------------- capability


def test_capability_is_the_one_asked_for() -> None:
    """Below, these files run again under ATEN_CPU_CAPABILITY; this proves that ATen obeyed."""
    assert_capability_is_the_one_asked_for()


@outer_run_only
def test_same_without_vector_instructions() -> None:
    """ATen picks its capability once per process, so another one has to run it."""
    names = ["test_sgd.py", Path(__file__).name, "test_sgd_foreach.py"]
    files = [str(Path(__file__).with_name(name)) for name in names]
    chosen = (
        "many_steps or every_edge or large_parameters or ends_of_each or thread_counts or all_dtypes or capability"
        " or as_stock_writes or rounded or first_gradients"
    )
    output = run_at_default(files, chosen)
    assert "70 passed" in output, output
