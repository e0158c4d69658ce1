"""What makes one parameter of an SGD unfit to be served, and with which reason it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _sgd_helpers import params_of, twins, values
from torch.utils._pytree import tree_map_only

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
        plain = tree_map_only(Wrapper, lambda wrapper: wrapper.inner, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func._schema.name.endswith("_"):
            return None if result is None else args[0]
        return tree_map_only(torch.Tensor, Wrapper, result)


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


def grad_of(param_dtype: torch.dtype, grad_dtype: torch.dtype) -> Change:
    """A gradient of another dtype than its parameter, which torch lets pass once grad_dtype says so."""

    def change(optimizer: Any) -> None:
        param = second(optimizer)
        gradient, param.grad = param.grad, None
        param.data = param.detach().to(param_dtype)
        param.grad_dtype = None
        param.grad = gradient.to(grad_dtype)

    return change


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
    "integer_raises": (lambda o: replace_param(o, lambda t: t.to(torch.int64)), "dtype"),
    "float8_raises": (lambda o: replace_param(o, lambda t: t.to(torch.float8_e5m2)), "dtype"),
    "double_grad": (grad_of(torch.float32, torch.float64), "dtype"),
    "half_grad": (grad_of(torch.float32, torch.float16), "dtype"),
    "wider_grad": (grad_of(torch.bfloat16, torch.float32), "dtype"),
    "other_half_grad": (grad_of(torch.float16, torch.bfloat16), "dtype"),
    "complex": (cast(torch.complex64), "complex"),
    "complex_double": (cast(torch.complex128), "complex"),
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
    "buffer_half": (buffer(lambda p: values((19,), 7, dtype=torch.float16)), "momentum_buffer"),
    "buffer_integer_raises": (buffer(lambda p: torch.arange(19)), "momentum_buffer"),
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
    """Twins over three good parameters."""
    plain = [values((19,), seed, edges=0) for seed in range(6)]
    return twins(plain[:3], plain[3:], **options)
