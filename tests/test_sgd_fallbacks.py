"""Every reason for which a parameter is left to stock, with stock's result or exception; the others stay fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
from _sgd_helpers import params_of, served, set_grads, step_twins, twins, values

import fastpatch

Change = Callable[[Any], None]


class PlainParameter(torch.nn.Parameter):
    pass


class OverridingParameter(torch.nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """Holds another tensor, as DTensor does."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        result = func(*plain, **(kwargs or {}))
        in_place = func._schema.name.endswith("_")
        return args[0] if in_place else Wrapper(result) if isinstance(result, torch.Tensor) else result


class PlainSubclass(torch.Tensor):
    pass


def second(optimizer: Any) -> Any:
    """The parameter that the changes below make unfit; it stands between two good ones."""
    return params_of(optimizer)[1]


def replace_param(optimizer: Any, make: Callable[[torch.Tensor], torch.Tensor], same_for_grad: bool = True) -> None:
    old = second(optimizer)
    new = make(old.detach().clone())
    if same_for_grad and old.grad is not None:
        new.grad = make(old.grad).detach() if not new.is_sparse else old.grad.to_sparse()
    optimizer.param_groups[0]["params"][1] = new


def cast(dtype: torch.dtype) -> Change:
    return lambda optimizer: replace_param(optimizer, lambda t: torch.nn.Parameter(t.to(dtype)))


def grad(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(optimizer: Any) -> None:
        second(optimizer).grad = make(second(optimizer).grad)

    return change


def data(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(optimizer: Any) -> None:
        second(optimizer).data = make(second(optimizer).detach().clone())

    return change


def buffer(make: Callable[[Any], Any]) -> Change:
    def change(optimizer: Any) -> None:
        optimizer.param_groups[0]["momentum"] = 0.9
        param = second(optimizer)
        optimizer.state[param]["momentum_buffer"] = make(param)

    return change


def transposed_grad(optimizer: Any) -> None:
    data(lambda t: t[:18].view(3, 6))(optimizer)
    second(optimizer).grad = None
    second(optimizer).grad = values((6, 3), 8).t()


def other_grad_dtype(optimizer: Any) -> None:
    second(optimizer).grad_dtype = None
    second(optimizer).grad = second(optimizer).grad.double()


def grad_on_own_memory(optimizer: Any) -> None:
    second(optimizer).grad = second(optimizer).detach()


def grad_beside_own_memory(optimizer: Any) -> None:
    base = values((20,), 5, edges=0)
    second(optimizer).data, second(optimizer).grad = base[:19], base[1:]


def inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


def negated(tensor: torch.Tensor) -> torch.Tensor:
    result = torch.complex(torch.zeros_like(tensor), tensor).conj().imag
    assert result.is_neg()
    return result


# What makes one parameter unfit, and the reason; "raises" where stock raises too.
PARAMETERS: dict[str, tuple[Change, str]] = {
    "sparse_grad": (grad(lambda g: g.to_sparse()), "sparse_grad"),
    "sparse_param": (lambda o: replace_param(o, lambda t: t.to_sparse()), "layout"),
    "half": (cast(torch.float16), "dtype"),
    "bfloat16": (cast(torch.bfloat16), "dtype"),
    "double": (cast(torch.float64), "dtype"),
    "grad_dtype": (other_grad_dtype, "dtype"),
    "complex": (cast(torch.complex64), "complex"),
    "meta": (lambda o: replace_param(o, lambda t: t.to("meta")), "device"),
    "transposed_grad": (transposed_grad, "strides"),
    "strided_param": (data(lambda t: t.repeat(2)[::2]), "strides"),
    "strided_grad": (grad(lambda g: g.repeat(2)[::2]), "strides"),
    "expanded_grad": (grad(lambda g: g[:1].expand(19)), "strides"),
    "expanded_param_raises": (data(lambda t: t[:1].expand(19)), "strides"),
    "grad_is_param": (grad_on_own_memory, "overlap"),
    "grad_beside_param": (grad_beside_own_memory, "overlap"),
    "buffer_is_param": (buffer(lambda p: p.detach()), "overlap"),
    "buffer_is_grad": (buffer(lambda p: p.grad), "overlap"),
    "buffer_double": (buffer(lambda p: values((19,), 7, dtype=torch.float64)), "momentum_buffer"),
    "buffer_wider_raises": (buffer(lambda p: values((2, 19), 7)), "momentum_buffer"),
    "buffer_narrower_raises": (buffer(lambda p: values((1,), 7)), "momentum_buffer"),
    "buffer_other_raises": (buffer(lambda p: values((7,), 7)), "momentum_buffer"),
    "buffer_float_raises": (buffer(lambda p: 0.5), "momentum_buffer"),
    "buffer_subclass": (buffer(lambda p: values((19,), 7).as_subclass(PlainSubclass)), "momentum_buffer"),
    "buffer_strided": (buffer(lambda p: values((38,), 7)[::2]), "strides"),
    "subclass": (lambda o: replace_param(o, PlainParameter), "subclass"),
    "wrapper_param": (lambda o: replace_param(o, Wrapper), "subclass"),
    "wrapper_grad": (grad(Wrapper), "subclass"),
    "override": (lambda o: replace_param(o, OverridingParameter), "torch_function"),
    "inference_param_raises": (lambda o: replace_param(o, inference), "inference_tensor"),
    "inference_grad": (grad(inference), "inference_tensor"),
    "lazy_negation": (grad(negated), "lazy_negation"),
    "zero_tensor": (grad(lambda g: torch._efficientzerotensor((19,))), "dispatch_state"),  # type: ignore[attr-defined]
    "shape_raises": (data(lambda t: t[:7].clone()), "shape_mismatch"),
    "shape_broadcasts": (data(lambda t: torch.stack([t, t])), "shape_mismatch"),
}


def three(**options: Any) -> tuple[Any, Any]:
    edges = [values((19,), seed, edges=0) for seed in range(6)]
    return twins(edges[:3], edges[3:], **options)


@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize("name", PARAMETERS)
def test_one_unfit_parameter_among_good_ones(name: str, momentum: float) -> None:
    change, reason = PARAMETERS[name]
    raises = "raises" in name
    pair = three(weight_decay=0.1 if name not in ("sparse_grad", "sparse_param") else 0)
    for optimizer in pair:
        optimizer.param_groups[0]["momentum"] = momentum
        change(optimizer)
    with fastpatch.enabled("sgd"), served():
        verdict = fastpatch.explain(pair[1].step)
    assert (verdict.fast, verdict.reason) == (False, reason)
    assert "parameter 1" in verdict.detail
    result = step_twins(pair, fast=1 if raises else 2, **{reason: 1})
    assert (result[0] == "returned") != raises, result


def test_a_plain_subclass_as_gradient() -> None:
    pair = three()
    for optimizer in pair:
        grad(lambda g: g.as_subclass(PlainSubclass))(optimizer)
    step_twins(pair, fast=2, torch_function=1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it
def test_forward_mode_tangents() -> None:
    pair = three()
    for optimizer in pair:
        second(optimizer).requires_grad_(False)

    def step(optimizer: Any) -> str:
        param = second(optimizer)
        plain = param.grad
        with fwad.dual_level():
            param.grad = fwad.make_dual(plain, torch.ones(19))
            optimizer.step()
            tangent = fwad.unpack_dual(param).tangent
        param.grad = plain
        return repr(tangent)

    assert step_twins(pair, call=step, fast=2, forward_ad=1)[0] == "returned"


def test_gradients_that_are_absent_count_as_nothing() -> None:
    pair = three()
    set_grads(pair, [None, None, None])
    step_twins(pair)
