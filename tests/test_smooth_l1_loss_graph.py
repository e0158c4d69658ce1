"""Smooth L1 in the autograd graph: node, saved tensors, hooks and errors are stock's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _helpers import as_stock, outcome, served
from _smooth_l1_loss_helpers import SIZES, TARGET, each_dtype, grad_of, grads, loss, operands
from torch.autograd.graph import saved_tensors_hooks

import fastpatch


@SIZES
@each_dtype
def test_hooks_on_saved_tensors_run_as_often_as_in_stock(n: int, dtype: torch.dtype) -> None:
    def call() -> Any:
        input, target = operands(n, dtype)
        seen: list[Any] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(("pack", tensor is input, tensor is target))
            return tensor

        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(("unpack", tensor is input, tensor is target))
            return tensor

        with saved_tensors_hooks(pack, unpack):
            output = loss(input, target.requires_grad_())
        output.backward(retain_graph=True)
        output.backward()
        assert [name for name, *_ in seen] == ["pack", "pack", "unpack", "unpack", "unpack", "unpack"]
        return seen, input.grad, target.grad

    as_stock(TARGET, call, fast=1, strict=True)


class Sub(torch.Tensor):
    pass


def fail(tensor: torch.Tensor) -> torch.Tensor:
    raise KeyError("from the hook")


UNPACK: dict[str, Callable[[torch.Tensor], Any]] = {
    "float32": lambda t: t.float(),
    "float64": lambda t: t.double(),
    "float16": lambda t: t.half(),
    "bfloat16": lambda t: t.bfloat16(),
    "integers": lambda t: t.to(torch.int64),
    "strided": lambda t: torch.stack([t, t], 1)[:, 0],
    "expanded": lambda t: t[:1].expand(t.shape),
    "one more dimension": lambda t: t[None],
    "fewer elements": lambda t: t[:3],
    "one element": lambda t: t[0],
    "another device": lambda t: t.to("meta"),
    "a subclass": lambda t: t.as_subclass(Sub).mul(2),
    "no tensor": lambda t: None,
    "an exception": fail,
}


@SIZES
@each_dtype
@pytest.mark.parametrize("how", UNPACK)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_hooks_on_saved_tensors_may_return_anything(n: int, dtype: torch.dtype, how: str, reduction: str) -> None:
    def call() -> Any:
        input, target = operands(n, dtype)
        with saved_tensors_hooks(lambda t: t.detach(), UNPACK[how]):
            output = loss(input, target, reduction)
        output.backward(grad_of(output))
        return input.grad

    as_stock(TARGET, call, fast=1, strict=True)


@each_dtype
@pytest.mark.parametrize("which", [0, 1])
def test_hook_on_a_saved_tensor_may_change_the_layout_of_one(dtype: torch.dtype, which: int) -> None:
    def call() -> Any:
        input, target = operands(5, dtype)

        def unpack(packed: tuple[int, torch.Tensor]) -> torch.Tensor:
            index, tensor = packed
            return torch.stack([tensor, tensor + 1], 1)[:, 0] if index == which else tensor

        with saved_tensors_hooks(lambda t: (0 if t is input else 1, t.detach()), unpack):
            output = loss(input, target)
        return grads(output, input)

    as_stock(TARGET, call, fast=1, strict=True)


@SIZES
def test_exception_of_a_pack_hook_reaches_the_caller(n: int) -> None:
    def call() -> Any:
        with saved_tensors_hooks(fail, fail):
            return loss(*operands(n))

    # A call that didn't end isn't counted as served.
    assert as_stock(TARGET, call, fast=0, strict=True).error == (KeyError, "'from the hook'")


def test_saved_tensors_on_the_cpu_and_without_hooks() -> None:
    def call() -> Any:
        input, target = operands()
        with torch.autograd.graph.save_on_cpu():
            first = loss(input, target)
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            second = loss(input, target)
        return grads(first, input), grads(second, input)

    as_stock(TARGET, call, fast=2, strict=True)


def test_mutation_of_saved_tensors_where_it_is_allowed() -> None:
    def call() -> Any:
        input, target = operands()
        changed = input * 1
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            output = loss(changed, target)
            changed.add_(1)
            return grads(output, input)

    as_stock(TARGET, call, fallback={"dispatch_mode": 1})


@SIZES
@each_dtype
@pytest.mark.parametrize("which", ["input", "target"])
def test_change_in_place_before_backward_is_found(n: int, dtype: torch.dtype, which: str) -> None:
    def call() -> None:
        input, target = operands(n, dtype)
        changed = input * 1
        output = loss(changed, target)
        (changed if which == "input" else target).add_(1)
        output.backward()

    error = as_stock(TARGET, call, fast=1, strict=True).error
    assert error is not None
    assert "modified by an inplace operation" in error[1]


def test_backward_reads_data_that_was_replaced() -> None:
    """`.data = ` escapes the version check; stock then uses the saved tensor's new memory, of whatever size."""
    for size in (5, 3):

        def call(size: int = size) -> Any:
            input, target = operands()
            output = loss(input, target)
            input.data = torch.full((size,), 0.25)
            return grads(output, input)

        as_stock(TARGET, call, fast=1, strict=True)


@pytest.mark.parametrize("again", ["backward", "saved tensor"])
def test_second_backward_has_stocks_words(again: str) -> None:
    def call() -> Any:
        output = loss(*operands())
        node = output.grad_fn
        output.backward()
        return output.backward() if again == "backward" else node._saved_self

    error = as_stock(TARGET, call, fast=1, strict=True).error
    assert error is not None
    assert error[1].startswith("Trying to backward through the graph a second time")


@SIZES
def test_anomaly_mode(n: int) -> None:
    def call() -> Any:
        input, target = operands(n)
        with torch.autograd.detect_anomaly():
            loss(input * torch.nan, target).backward()

    result = as_stock_but_traceback(call)
    assert result.error == (RuntimeError, "Function 'SmoothL1LossBackward0' returned nan values in its 0th output.")


def as_stock_but_traceback(call: Callable[[], Any]) -> Any:
    """as_stock() but for the printed traceback, which lacks the frame of F.smooth_l1_loss that never existed."""
    expected = outcome(call)
    with served(TARGET, fast=1), fastpatch.enabled(TARGET, strict=True):
        actual = outcome(call)
    assert actual.error == expected.error
    assert [category for category, *_ in actual.warned] == [category for category, *_ in expected.warned]
    return actual


def test_anomaly_mode_knows_where_the_loss_was_computed() -> None:
    input, target = operands()
    with fastpatch.enabled(TARGET, strict=True), torch.autograd.set_detect_anomaly(True):
        node = F.smooth_l1_loss(input, target).grad_fn
    last = node.metadata["traceback_"][-1]
    assert f'File "{__file__}"' in last
    assert "node = F.smooth_l1_loss(input, target).grad_fn" in last


def test_hooks_on_tensors_and_on_the_node() -> None:
    def call() -> Any:
        seen: list[Any] = []
        input, target = operands()
        output = loss(input, target)
        output.retain_grad()
        output.register_hook(lambda grad: grad * 3)
        input.register_hook(lambda grad: grad - 1)
        input.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
        output.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
        output.grad_fn.register_hook(lambda inputs, outputs: seen.append((inputs, outputs)))
        output.backward()
        return seen, output.grad, input.grad

    result = as_stock(TARGET, call, fast=1, strict=True).value
    assert len(result[0]) == 2


@each_dtype
def test_node_shows_what_stocks_node_shows(dtype: torch.dtype) -> None:
    def call() -> Any:
        input, target = operands(5, dtype)
        output = loss(input, target.requires_grad_(), "sum", 0.3)
        node = output.grad_fn
        assert node._saved_self is input
        assert node._saved_target is target
        edges = [(type(node), index, node.variable is input) for node, index in node.next_functions]
        saved = node._saved_beta, node._saved_reduction, node._saved_self, node._saved_target
        names = [name for name in dir(node) if name != "_input_metadata"]
        here = output.is_leaf, output.output_nr, output._version, len(node._input_metadata)
        return type(node), node.name(), repr(type(node)), saved, edges, names, here, node.requires_grad

    value = as_stock(TARGET, call, fast=1, strict=True).value
    assert value[1] == "SmoothL1LossBackward0"


def test_hooks_of_one_saved_tensor() -> None:
    def call() -> Any:
        input, target = operands()
        output = loss(input, target)
        output.grad_fn._raw_saved_self.register_hooks(lambda t: t.detach() * 2, lambda t: t)
        return grads(output, input)

    as_stock(TARGET, call, fast=1, strict=True)


GRAD_OUTPUTS: dict[str, Callable[[], Any]] = {
    "scalar": lambda: torch.tensor(0.3),
    "one element": lambda: torch.tensor([0.3]),
    "many elements": lambda: torch.linspace(0, 1, 40),
    "wrong size": lambda: torch.ones(3),
    "float64": lambda: torch.tensor(0.3, dtype=torch.float64),
    "bfloat16": lambda: torch.tensor(0.3, dtype=torch.bfloat16),
    "sparse": lambda: torch.ones(40).to_sparse(),
    "subclass": lambda: torch.ones(40).as_subclass(Sub),
    "lazily negated": lambda: torch.ones(40, dtype=torch.complex64).conj().imag,
    "none": lambda: None,
    "number": lambda: 1.0,
}


@each_dtype
@pytest.mark.parametrize("kind", GRAD_OUTPUTS)
@pytest.mark.parametrize("recorded", [True, False])
def test_node_called_by_hand(dtype: torch.dtype, kind: str, recorded: bool) -> None:
    """Nobody checks the shape and dtype of what a caller of `grad_fn(...)` hands in."""

    def call() -> Any:
        node = loss(*operands(40, dtype)).grad_fn
        with torch.set_grad_enabled(recorded):
            result = node(GRAD_OUTPUTS[kind]())
        return [grad if grad is None else grad.as_subclass(torch.Tensor) for grad in result]

    as_stock(TARGET, call, fast=1, strict=True)


def test_graph_is_freed() -> None:
    with fastpatch.enabled(TARGET, strict=True):
        input, target = operands()
        watched = weakref.ref(input)
        output = loss(input, target)
    del input, target
    gc.collect()
    assert watched() is not None
    del output
    gc.collect()
    assert watched() is None
