"""What is served beside what isn't: order, exceptions half-way, strict, warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _sgd_helpers import (
    NAN,
    assert_same,
    bits_equal,
    copy_of,
    outcome,
    params_of,
    served,
    set_grads,
    step_stock,
    step_twins,
    values,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpatch

SGD = torch.optim.SGD


def pairs_of_groups(*groups: int, **options: Any) -> tuple[SGD, SGD]:
    """Groups of so many parameters, each with a gradient."""
    result = []
    for _ in range(2):
        seed, made = 0, []
        for size in groups:
            made.append({"params": [torch.nn.Parameter(values((19,), seed + i)) for i in range(size)]})
            seed += size
        optimizer = SGD(made, lr=0.1, **options)
        set_grads([optimizer], [values((19,), 100 + i) for i in range(sum(groups))])
        result.append(optimizer)
    return result[0], result[1]


def make_sparse(optimizer: Any, place: int) -> None:
    param = params_of(optimizer)[place]
    param.grad = param.grad.to_sparse()


def make_misshapen(optimizer: Any, place: int) -> None:
    param = params_of(optimizer)[place]
    param.data = param.detach()[:7].clone()


# ------------------------------------------------------------------------------------------- one by one, in the order


@given(st.lists(st.sampled_from(["good", "sparse", "absent"]), min_size=1, max_size=8), st.sampled_from([0, 0.9]))
@settings(deadline=None, max_examples=40)
def test_each_refused_parameter_is_served_alone(kinds: list[str], momentum: float) -> None:
    pair = pairs_of_groups(len(kinds), momentum=momentum)
    for optimizer in pair:
        for place, kind in enumerate(kinds):
            if kind == "sparse":
                make_sparse(optimizer, place)
            elif kind == "absent":
                params_of(optimizer)[place].grad = None
    refused = {"sparse_grad": kinds.count("sparse")} if "sparse" in kinds else {}
    for _ in range(2):
        step_twins(pair, fast=kinds.count("good"), **refused)


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize("earlier", [0, 1])
def test_an_exception_half_way_leaves_what_stock_leaves(place: int, momentum: float, earlier: int) -> None:
    pair = pairs_of_groups(2, 3, momentum=momentum)
    for _ in range(earlier):
        step_twins(pair, fast=5)
    for optimizer in pair:
        make_misshapen(optimizer, place)
    assert step_twins(pair, fast=place, shape_mismatch=1)[0] is RuntimeError
    for param in params_of(pair[1])[place + 1 :]:
        assert param._version == earlier


def test_refused_parameters_keep_their_place_in_the_order() -> None:
    """The second's gradient is the first's memory, and the third's the second's: only one order is right."""
    pair = pairs_of_groups(3)
    for optimizer in pair:
        first, second, third = params_of(optimizer)
        second.grad = first.detach().as_strided((19,), (1,))
        third.grad = second.detach()
        first.grad = first.grad.repeat(2)[::2]
    for _ in range(2):
        step_twins(pair, fast=2, strides=1)
    for optimizer in pair:
        params_of(optimizer)[0].grad = torch.ones(19)
    for _ in range(2):
        step_twins(pair, fast=3)


# ------------------------------------------------------------------------------------------------------------- strict


def everything(optimizer: Any) -> list[Any]:
    buffers = [state["momentum_buffer"] for state in optimizer.state.values() if state]
    return [
        [copy_of(param) for param in params_of(optimizer)],
        [param._version for param in params_of(optimizer)],
        optimizer.state_dict()["param_groups"],
        [copy_of(buffer) for buffer in buffers],
        [buffer._version for buffer in buffers],
    ]


def strict_leaves_all_alone(step: Callable[[Any], Any], steps: int, prepare: Callable[[Any], Any]) -> None:
    _, optimizer = pairs_of_groups(2, 3, 1, momentum=0.9)
    for _ in range(steps):
        step_stock(optimizer)
    make_sparse(optimizer, 4)
    prepare(optimizer)
    before = everything(optimizer)
    with fastpatch.enabled("sgd", strict=True), served():
        with pytest.raises(fastpatch.FallbackError, match="sparse_grad") as caught:
            step(optimizer)
        assert (caught.value.target, caught.value.reason) == ("sgd", "sparse_grad")
    assert_same(before, everything(optimizer))


@pytest.mark.parametrize("steps", [0, 2])
def test_strict_raises_before_anything_is_written(steps: int) -> None:
    strict_leaves_all_alone(lambda optimizer: optimizer.step(), steps, lambda optimizer: None)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("how", ["hook", "profiler"])
def test_strict_raises_before_anything_is_written_also_with_hooks_and_profilers(how: str, steps: int) -> None:
    """With a closure, or a step taken before enable(), strict judges group by group: see the docstring of enable()."""

    def prepare(optimizer: Any) -> None:
        if how == "hook":
            optimizer.register_step_pre_hook(lambda *_: None)

    def step(optimizer: Any) -> None:
        if how == "profiler":
            with torch.autograd.profiler.profile():
                optimizer.step()
        else:
            optimizer.step()

    strict_leaves_all_alone(step, steps, prepare)


@pytest.mark.parametrize(
    "option",
    [{"lr": torch.tensor([0.1])}, {"momentum": torch.tensor(0.9)}, {"foreach": 1}, {"fused": True}, {"lr": NAN}],
    ids=repr,
)
def test_strict_raises_for_a_later_group_too(option: dict[str, Any]) -> None:
    _, optimizer = pairs_of_groups(2, 2, momentum=0.9)
    optimizer.param_groups[1].update(option)
    before = everything(optimizer)
    with fastpatch.enabled("sgd", strict=True), served(), pytest.raises(fastpatch.FallbackError):
        optimizer.step()
    assert_same(before, everything(optimizer))


def test_strict_functional_raises_before_anything_is_written() -> None:
    params, grads = ([values((19,), seed + i) for i in range(3)] for seed in (0, 10))
    grads[2] = grads[2].to_sparse()
    buffers: list[Any] = [None, values((19,), 20), None]
    before = [copy_of(tensor) for tensor in (*params, buffers[1])]
    hyper = {"weight_decay": 0, "momentum": 0.9, "lr": 0.1, "dampening": 0, "nesterov": False, "maximize": False}
    refuses = pytest.raises(fastpatch.FallbackError, match="sparse_grad")
    with fastpatch.enabled("sgd", strict=True), served(), torch.no_grad(), refuses:
        sys.modules["torch.optim.sgd"].sgd(params, grads, buffers, has_sparse_grad=True, **hyper)
    assert [buffers[0], buffers[2]] == [None, None]
    for old, now in zip(before, (*params, buffers[1]), strict=True):
        assert bits_equal(old, now)
        assert now._version == 0


def test_a_storage_shrunk_behind_its_tensor_is_refused() -> None:
    """Stock would write where there is no memory, so nothing is run but the guard."""
    for which in ("param", "grad", "buffer"):
        _, optimizer = pairs_of_groups(2, momentum=0.9)
        step_stock(optimizer)
        param = params_of(optimizer)[1]
        tensor = {"param": param, "grad": param.grad, "buffer": optimizer.state[param]["momentum_buffer"]}[which]
        tensor.untyped_storage().resize_(0)
        first = copy_of(params_of(optimizer)[0])
        reason = "storage"
        with fastpatch.enabled("sgd", strict=True), served():
            assert fastpatch.explain(optimizer.step).reason == reason
            with pytest.raises(fastpatch.FallbackError, match=reason):
                optimizer.step()
        assert bits_equal(first, params_of(optimizer)[0].detach())


# ------------------------------------------------------------------------------------------------------------ warnings


def test_a_parameter_that_became_a_non_leaf_warns_as_stock() -> None:
    texts = []
    for scope in (fastpatch.disabled, fastpatch.enabled):
        became, leaf = torch.ones(3), torch.nn.Parameter(torch.ones(3))
        leaf.grad = torch.ones(3)
        optimizer = SGD([became, leaf], lr=0.1)
        became.mul_(torch.ones(3, requires_grad=True))
        with scope("sgd"), warnings.catch_warnings(record=True) as caught, served(int(scope is fastpatch.enabled)):
            warnings.simplefilter("always")
            assert outcome(optimizer.step) == ("returned", None)
        texts.append([str(warning.message) for warning in caught])
    assert len(texts[0]) == 1
    assert texts[0] == texts[1]
