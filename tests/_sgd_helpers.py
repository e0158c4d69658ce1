"""What the SGD tests share: twin optimizers, one for stock and one for fastpatch, compared bit for bit."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import fastpatch

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def edges_of(dtype: torch.dtype) -> list[float]:
    """Signed zeros, the least subnormals, a middling one, the least normal, the greatest number, infinities, NaN."""
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    pairs = [least, info.smallest_normal / 8, info.max, INF, 0.0]
    return [*(sign * number for number in pairs for sign in (1, -1)), info.smallest_normal, NAN]


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same type, dtype, device, shape, strides and bits; any NaN equals any NaN."""
    if type(a) is not type(b) or (a.dtype, a.device, a.layout, a.shape) != (b.dtype, b.device, b.layout, b.shape):
        return False
    if a.layout == torch.sparse_coo:
        a, b = a.detach().coalesce(), b.detach().coalesce()
        return torch.equal(a.indices(), b.indices()) and bits_equal(a.values(), b.values())
    if a.stride() != b.stride():
        return False
    if a.is_meta:
        return True
    a, b = (x.detach().resolve_conj().resolve_neg() for x in (a, b))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    integer = _INTEGERS[a.element_size()]
    same = a.contiguous().view(integer) == b.contiguous().view(integer)
    if a.is_floating_point():
        same |= a.isnan() & b.isnan()
    return bool(same.all())


def assert_same(stock: Any, ours: Any, where: str = "") -> None:
    """Equal through and through: tensors in every bit and version counter, dictionaries in the order of their keys."""
    if isinstance(stock, torch.Tensor):
        assert isinstance(ours, torch.Tensor), where
        assert bits_equal(stock, ours), f"{where}: {stock} != {ours} (strides {stock.stride()}, {ours.stride()})"
        assert stock.requires_grad == ours.requires_grad, where
        if not stock.is_inference():
            assert stock._version == ours._version, f"{where}: version {stock._version} != {ours._version}"
    elif isinstance(stock, dict):
        assert type(stock) is type(ours), where
        assert list(stock) == list(ours), where
        for key in stock:
            assert_same(stock[key], ours[key], f"{where}[{key!r}]")
    elif isinstance(stock, (list, tuple)):
        assert type(stock) is type(ours), where
        assert len(stock) == len(ours), where
        for i, pair in enumerate(zip(stock, ours, strict=True)):
            assert_same(*pair, f"{where}[{i}]")
    else:
        assert type(stock) is type(ours), where
        assert stock == ours or (stock != stock and ours != ours), f"{where}: {stock!r} != {ours!r}"


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def assert_twins(stock: torch.optim.Optimizer, ours: torch.optim.Optimizer) -> None:
    """Parameters, gradients, state and groups of two optimizers agree."""
    assert_same(params_of(stock), params_of(ours), "params")
    for which, pair in enumerate(zip(params_of(stock), params_of(ours), strict=True)):
        assert_same(*(param.grad for param in pair), f"grad {which}")
    assert_same(stock.state_dict(), ours.state_dict(), "state_dict")
    order = [[_place(o, key) for key in o.state] for o in (stock, ours)]
    assert order[0] == order[1], "the order of optimizer.state"
    for key, other in zip(stock.state, ours.state, strict=True):
        assert_same(stock.state[key], ours.state[other], "state")


def _place(optimizer: torch.optim.Optimizer, key: torch.Tensor) -> int:
    return next(i for i, param in enumerate(params_of(optimizer)) if param is key)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the very strides, odd ones of size-1 dimensions too."""
    fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return fresh.copy_(tensor.detach())


def values(shape: Sequence[int], seed: int, edges: float = 0.1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers, a share of them out of edges_of(dtype); never all zero."""
    generator = torch.Generator().manual_seed(seed)
    result = torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    chosen = torch.rand(tuple(shape), generator=generator) < edges
    special = torch.tensor(edges_of(dtype), dtype=dtype)
    result = torch.where(chosen, special[torch.randint(len(special), tuple(shape), generator=generator)], result)
    if result.numel() and not result.any():
        result.view(-1)[0] = 0.375
    return result


# Layouts that are dense, so served, with the shapes that they suit.
SMALL = [(1,), (7,), (8,), (9,), (17,), (64,), (67,), (255,), (), (0,), (0, 3), (3, 0)]
LAYOUTS: dict[str, tuple[list[tuple[int, ...]], Callable[[torch.Tensor], torch.Tensor]]] = {
    "contiguous": ([*SMALL, (3, 5), (2, 3, 4, 5)], lambda t: t),
    "transposed": ([(3, 5), (8, 9), (1, 7), (7, 1)], lambda t: t.t().contiguous().t()),
    "channels_last": (
        [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1)],
        lambda t: t.contiguous(memory_format=torch.channels_last),
    ),
    "channels_last_3d": ([(2, 3, 4, 2, 2)], lambda t: t.contiguous(memory_format=torch.channels_last_3d)),
    "permuted": ([(3, 4, 5), (2, 1, 9)], lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0)),
}


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    return LAYOUTS[layout][1](tensor)


def with_odd_strides(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """The same elements in the same places, with meaningless strides on dimensions of size 1."""
    chooser = random.Random(seed)
    strides = [chooser.choice([0, 1, 13]) if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides)


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(copy_of(tensor))


def twins(
    tensors: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None] = (),
    cls: Any = torch.optim.SGD,
    **options: Any,
) -> tuple[Any, Any]:
    """A stock and a patched optimizer over copies of the same parameters and gradients."""
    options = {"lr": 0.1, **options}
    pair = tuple(cls([parameter(t) for t in tensors], **options) for _ in range(2))
    set_grads(pair, grads)
    return pair  # type: ignore[return-value]


def set_grads(pair: Sequence[torch.optim.Optimizer], grads: Sequence[torch.Tensor | None]) -> None:
    for optimizer in pair:
        for param, grad in zip(params_of(optimizer), grads, strict=False):
            param.grad = None if grad is None else copy_of(grad)


def counts() -> tuple[int, dict[str, int]]:
    sgd = fastpatch.report().to_dict()["sgd"]
    return sgd["fast"], sgd["fallback"]


@contextmanager
def served(fast: int = 0, **fallback: int) -> Iterator[None]:
    """The block moves the counters by exactly this."""
    fast_before, fallback_before = counts()
    yield
    fast_after, fallback_after = counts()
    reasons = {reason: n - fallback_before.get(reason, 0) for reason, n in fallback_after.items()}
    moved = fast_after - fast_before, {reason: n for reason, n in reasons.items() if n}
    assert moved == (fast, fallback), f"served {moved}, expected {(fast, fallback)}"


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """What a call returns, or the type and text of what it raises."""
    try:
        return ("returned", call(*args, **kwargs))
    except Exception as error:
        return (type(error), str(error))


def step_stock(optimizer: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    with fastpatch.disabled(), served():
        return outcome(optimizer.step, *args, **kwargs)


def take_step(optimizer: Any) -> Any:
    return optimizer.step()


def step_twins(
    pair: Sequence[Any], *, call: Callable[[Any], Any] = take_step, fast: int = 0, **fallback: int
) -> tuple[Any, ...]:
    """One step of each; served so many, refused so many and why; the same outcome and the same bits after it."""
    stock, ours = pair
    with fastpatch.disabled(), served():
        expected = outcome(call, stock)
    with fastpatch.enabled("sgd", strict=not fallback), served(fast, **fallback):
        got = outcome(call, ours)
    assert got == expected
    assert_twins(stock, ours)
    return got


def python_frames(call: Callable[[], Any]) -> list[str]:
    """The Python functions that run in a call: none where the outer patch point serves it."""
    frames: list[str] = []
    sys.setprofile(lambda frame, event, _: frames.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return frames


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
