"""What stock's CUDA kernels compute, as single operations of torch on the CPU, each of which rounds once.

Read from ATen's sources (BinaryMiscOpsKernels.cu, PointwiseOpsKernel.cu, ForeachBinaryOpList.cu, ForeachFunctors.cuh),
and for which products are fused, from the machine code of torch 2.14.1's libtorch_cuda.so for sm_90.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math

import torch

_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_libm.fma.restype = ctypes.c_double
_libm.fma.argtypes = (ctypes.c_double,) * 3
_libm.fmaf.restype = ctypes.c_float
_libm.fmaf.argtypes = (ctypes.c_float,) * 3


def opmath(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To dtype, and back to what that is computed in."""
    return x.to(dtype).to(opmath(dtype))


def number(value: float, dtype: torch.dtype) -> torch.Tensor:
    """A Python number as stock takes it: rounded to float32 on the way to a reduced type."""
    return rounded(torch.tensor(value, dtype=torch.float64).to(opmath(dtype)), dtype)


def loss_values(name: str, x: torch.Tensor, y: torch.Tensor, threshold: float, dtype: torch.dtype) -> torch.Tensor:
    a, b, t = x.to(opmath(dtype)), y.to(opmath(dtype)), number(threshold, dtype)
    z = rounded(a - b, dtype).abs()
    half = rounded(t * 0.5, dtype)
    if name == "l1_loss":
        return z.to(dtype)
    if name == "smooth_l1_loss":
        return torch.where(z < t, 0.5 * z * z / t, z - half).to(dtype)
    return torch.where(z < t, 0.5 * z * z, t * (z - half)).to(dtype)


def loss_gradient(
    name: str, x: torch.Tensor, y: torch.Tensor, grad: torch.Tensor, threshold: float, mean: bool
) -> torch.Tensor:
    dtype = x.dtype

    def r(value: torch.Tensor) -> torch.Tensor:
        return rounded(value, dtype)

    a, b, g = (row.to(opmath(dtype)) for row in (x, y, grad))
    t = number(threshold, dtype)
    norm = number(1 / x.numel() if mean else 1.0, dtype)
    d = r(a - b)
    if name == "smooth_l1_loss":
        inside = r(r(r(norm * d) * g) / t)
        below, above = r(-norm * g).expand_as(d), r(norm * g).expand_as(d)
    else:
        inside = r(r(norm * d) * g)
        below, above = r(r(-norm * g) * t).expand_as(d), r(r(norm * g) * t).expand_as(d)
    return torch.where(d < -t, below, torch.where(d > t, above, inside)).to(dtype)


def fused(alpha: float, y: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x + alpha * y, rounded once, and then to dtype."""
    wide = opmath(dtype) == torch.float64
    one = _libm.fma if wide else _libm.fmaf
    sums = [one(alpha, b, a) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    return rounded(torch.tensor(sums, dtype=opmath(dtype)), dtype)


def sgd(
    param: torch.Tensor, grad: torch.Tensor, buffer: torch.Tensor | None, *, weight_decay: float, momentum: float,
    dampening: float, lr: float, nesterov: bool, maximize: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The new parameter, direction and buffer; buffer None at a first step."""
    dtype = param.dtype
    wide = opmath(dtype)
    p, g = param.to(wide), grad.to(wide)
    b = None if buffer is None else buffer.to(wide)
    if maximize:
        g = -g
    if weight_decay != 0:
        g = fused(weight_decay, p, g, dtype)
    if momentum != 0:
        if b is None:
            b = g
        else:
            kept = rounded(b * torch.tensor(momentum, dtype=wide), dtype)
            b = fused(1 - dampening, g, kept, dtype)
        g = fused(momentum, b, g, dtype) if nesterov else b
    p = fused(-lr, g, p, dtype)
    return p.to(dtype), g.to(dtype), None if b is None else b.to(dtype)


def depth_of_sum(n: int, dtype: torch.dtype, blocks: int) -> int:
    """Through how many additions a number passes at most: those of its lane, and the levels of three trees."""
    width = 16 // dtype.itemsize
    lanes = blocks * 512 * width
    return math.ceil(n / lanes) + int(math.log2(width)) + 9 + (9 if blocks > 1 else 0)
