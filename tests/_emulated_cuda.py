"""The CUDA kernels, run on the CPU: their own code and all that launches them, compiled by g++, with an emulation of
threads, blocks and barriers in place of CUDA (``emulated_cuda/``). What is missing: the driver, streams, caches."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import itertools
import mmap
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fastpatch import _build, _compilers

HERE = Path(__file__).parent / "emulated_cuda"
FLAGS = "-std=c++20 -O1 -fPIC -shared -ffp-contract=off -Wall -Wno-unknown-pragmas"
LOSSES = ("smooth_l1_loss", "huber_loss", "l1_loss")
CODES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}  # c10::ScalarType


class Rows(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_int), ("input", ctypes.c_void_p), ("target", ctypes.c_void_p),
        ("input_type", ctypes.c_int8), ("target_type", ctypes.c_int8), ("type", ctypes.c_int8),
        ("n", ctypes.c_int64), ("threshold", ctypes.c_double),
    )  # fmt: skip


class Slice(ctypes.Structure):
    _fields_ = (
        ("param", ctypes.c_void_p), ("grad", ctypes.c_void_p), ("buffer", ctypes.c_void_p), ("n", ctypes.c_int64),
        ("dtype", ctypes.c_int32), ("device", ctypes.c_int32), ("first", ctypes.c_int32),
    )  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    compiler = _compilers.find_compiler()
    assert isinstance(compiler, _compilers.Compiler)
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "kernels.so")
        command = [
            *compiler.command, *FLAGS.split(),
            '-DFASTPATCH_EMULATED_LAUNCH="emulated_launch.h"', f"-I{HERE}", f"-I{_build.SOURCES}",
            "-isystem", str(torch_folder / "include"), str(HERE / "kernels.cpp"), "-o", str(built),
            f"-L{torch_folder / 'lib'}", "-lc10",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        loaded = ctypes.CDLL(str(built))
    for name in ("take_launches", "loss_blocks", "sgd_plan", "sgd_slice_of_block"):
        getattr(loaded, name).restype = ctypes.c_int64
    loaded.loss_blocks.argtypes = (ctypes.c_int64,)
    return loaded


def start(seed: int) -> None:
    """From here on threads and blocks run in an order of this seed."""
    library().take_launches(ctypes.c_uint(seed))


def launches() -> int:
    """How many there were since start()."""
    return int(library().take_launches(ctypes.c_uint(0)))


def guarded(values: torch.Tensor, aligned: bool = False) -> torch.Tensor:
    """A copy of a row whose end is the end of readable memory: an access beyond it ends the process. If it is to be
    aligned for whole vectors, a few bytes lie between, of which untouched() tells whether they were written."""
    size, page = values.numel() * values.element_size(), mmap.PAGESIZE
    room = -(-max(size, 1) // page) * page
    memory = mmap.mmap(-1, room + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address + room), ctypes.c_size_t(page), 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if values.numel() == 0:
        return values.clone()
    left = -size % 16 if aligned else 0
    memory[room - left : room] = b"\x5a" * left
    row = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=room - left - size)
    return row.copy_(values)


def untouched(row: torch.Tensor) -> bool:
    """Are the bytes between the end of an aligned guarded() row and that of its memory as they were?"""
    end = row.data_ptr() + row.numel() * row.element_size()
    left = -end % 16
    return ctypes.string_at(end, left) == b"\x5a" * left


@dataclass
class Loss:
    """A loss of two rows in the dtype that stock computes in."""

    name: str
    input: torch.Tensor
    target: torch.Tensor
    dtype: torch.dtype
    threshold: float
    aligned: bool = False  # the output, for whole vectors

    def _rows(self) -> Rows:
        return Rows(
            0, self.input.data_ptr(), self.target.data_ptr(), CODES[self.input.dtype], CODES[self.target.dtype],
            CODES[self.dtype], self.input.numel(), self.threshold,
        )  # fmt: skip

    def _output(self) -> torch.Tensor:
        return guarded(torch.full((self.input.numel(),), 77.0, dtype=self.dtype), self.aligned)

    def values(self) -> torch.Tensor:
        output = self._output()
        library().loss_values(ctypes.byref(self._rows()), LOSSES.index(self.name), ctypes.c_void_p(output.data_ptr()))
        assert not self.aligned or untouched(output)
        return output

    def reduced(self, mean: bool) -> torch.Tensor:
        output = guarded(torch.full((1,), 77.0, dtype=self.dtype))
        adds_in = torch.float64 if self.dtype == torch.float64 else torch.float32
        blocks = library().loss_blocks(self.input.numel())
        partials = guarded(torch.full((blocks,), torch.nan, dtype=adds_in)) if blocks > 1 else None
        library().loss_reduced(
            ctypes.byref(self._rows()), LOSSES.index(self.name), int(mean),
            ctypes.c_void_p(partials.data_ptr() if partials is not None else None),
            ctypes.c_void_p(output.data_ptr()),
        )  # fmt: skip
        return output[0]

    def gradient(self, grad: torch.Tensor, mean: bool) -> torch.Tensor:
        output = self._output()
        library().loss_gradient(
            ctypes.byref(self._rows()), LOSSES.index(self.name), ctypes.c_void_p(grad.data_ptr()),
            int(grad.numel() == 1), int(mean), ctypes.c_void_p(output.data_ptr()),
        )  # fmt: skip
        assert not self.aligned or untouched(output)
        return output


@dataclass
class Parameter:
    """What an update touches, on a device by its number."""

    param: torch.Tensor
    grad: torch.Tensor
    buffer: torch.Tensor | None = None
    first: bool = False
    device: int = 0

    def slice(self) -> Slice:
        buffer = None if self.buffer is None else self.buffer.data_ptr()
        return Slice(
            self.param.data_ptr(), self.grad.data_ptr(), buffer, self.param.numel(), CODES[self.param.dtype],
            self.device, int(self.first),
        )  # fmt: skip


def slices(parameters: Sequence[Parameter]) -> ctypes.Array[Slice]:
    return (Slice * len(parameters))(*(parameter.slice() for parameter in parameters))


def sgd(
    parameters: Sequence[Parameter], *, weight_decay: float = 0.0, momentum: float = 0.0, dampening: float = 0.0,
    lr: float, nesterov: bool = False, maximize: bool = False, foreach: bool = True, independent: bool = True,
) -> None:  # fmt: skip
    numbers = (ctypes.c_double * 4)(weight_decay, momentum, dampening, lr)
    library().sgd(
        numbers, int(nesterov), int(maximize), int(foreach), slices(parameters), ctypes.c_int64(len(parameters)),
        int(independent),
    )  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A slice in a launch, with the blocks that are its own."""

    launch: int
    device: int
    dtype: int
    param: int
    n: int
    blocks: range


def sgd_plan(table: ctypes.Array[Slice], independent: bool) -> list[Planned]:
    rows = (ctypes.c_int64 * (12 * max(1, len(table))))()
    count = library().sgd_plan(table, ctypes.c_int64(len(table)), int(independent), rows)
    lines = [tuple(rows[6 * i : 6 * i + 6]) for i in range(count)]
    pairs = itertools.pairwise(lines)
    return [Planned(*a[:5], range(a[5], b[5])) for a, b in pairs if a[0] == b[0]]
