"""A served call as data, which stock and the fast path can run again: what verification compares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .._difference import bits_differ, difference

Tensors = list[torch.Tensor | None]


class Replay(ABC):
    """One call, with copies of the tensors that it was given.

    Attributes:
        given: the originals.
        versions: theirs, from before they were copied.
        tensors: the copies; their memory is laid out as that of the originals, and shared where that was.
        devices: of the tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.given = list(tensors)
        self.versions = list(map(version, tensors))
        self.tensors = copied(tensors)

    @property
    def devices(self) -> set[torch.device]:
        return {tensor.device for tensor in self.tensors if tensor is not None}

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Of the results."""

    @abstractmethod
    def by_stock(self) -> Tensors:
        """Runs it by stock, without a change of ``tensors``. The results: all that the call returns or may write to."""

    @abstractmethod
    def by_us(self) -> Tensors:
        """The same by the compiled path; the caller forbids fallbacks."""

    @abstractmethod
    def results(self, returned: Any) -> Tensors:
        """The same of the call itself, of what the native library says of it when it is over."""

    @abstractmethod
    def after(self, results: Tensors) -> Tensors:
        """What the tensors that were given have become, in the order of ``tensors``."""

    @abstractmethod
    def smaller(self) -> Iterator[Replay]:
        """Parts of it which may show the same difference."""

    @abstractmethod
    def source(self) -> list[str]:
        """Statements that make the call of ``tensors`` and put the results into the dictionary ``seen``."""

    def difference(self, actual: Tensors, expected: Tensors) -> str | None:
        """The first one between our results and stock's, in words."""
        for name, one, other in zip(self.names, actual, expected, strict=True):
            if one is None or other is None:
                if one is not other:
                    return f"{name}: {'none' if one is None else 'one'} instead of {'none' if other is None else 'one'}"
            elif bits_differ(other, one) and (found := self.unlike(name, one.detach(), other.detach())) is not None:
                return found
        return None

    def unlike(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
        """What tells two tensors apart whose bits differ; None if that is as it should be."""
        return difference(actual, expected, name)


def version(tensor: torch.Tensor | None) -> int:
    """How often it was written to, as far as torch knows."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def halves(tensors: Sequence[torch.Tensor | None], which: Callable[[int], bool]) -> Iterator[Tensors]:
    """The tensors that ``which`` says, all of one shape, cut in two along each dimension; the others as they are."""
    shape = next(tensor.shape for i, tensor in enumerate(tensors) if tensor is not None and which(i))
    for dim, size in enumerate(shape):
        for start, length in ((0, size // 2), (size // 2, size - size // 2)):
            if 0 < length < size:
                yield [
                    tensor.narrow(dim, start, length) if tensor is not None and which(i) else tensor
                    for i, tensor in enumerate(tensors)
                ]


def copied(tensors: Sequence[torch.Tensor | None]) -> Tensors:
    """The same numbers in new memory of the same layout; what shares memory does so again, and what is one object."""
    places = {id(tensor): _Place.of(tensor) for tensor in tensors if tensor is not None}
    pieces = _pieces(set(places.values()))
    made: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if tensor is not None and id(tensor) not in made:
            piece = pieces[places[id(tensor)]]
            made[id(tensor)] = piece.copy_of(tensor)
    return [None if tensor is None else made[id(tensor)] for tensor in tensors]


class _Place(NamedTuple):
    """The memory that a tensor reaches: a storage, and where in that, in bytes, from a boundary on that suits every
    dtype."""

    device: str
    storage: int
    begin: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Place:
        item = tensor.element_size()
        begin = int(tensor.storage_offset()) * item
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (reach + 1) * item if tensor.numel() else begin
        # Not the storage's address: one that is asked for that may be copied (copy on write).
        return cls(str(tensor.device), tensor.untyped_storage()._cdata, begin - begin % 64, end)


class _Piece:
    """Part of a storage, and its copy as soon as there is one."""

    def __init__(self, begin: int, end: int) -> None:
        self._begin, self.end = begin, end
        self._copy: torch.UntypedStorage | None = None

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._copy is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self._copy = whole[self._begin : self.end].clone().untyped_storage()
        offset = tensor.storage_offset() - self._begin // tensor.element_size()
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return view.set_(self._copy, offset, tensor.shape, tensor.stride()).data  # of version 0


def _pieces(places: set[_Place]) -> dict[_Place, _Piece]:
    """Of each place the piece that holds it: those that meet are in one."""
    pieces: dict[_Place, _Piece] = {}
    last = None
    for place in sorted(places):
        if last is not None and last[:2] == place[:2] and place.begin <= pieces[last].end:
            pieces[place] = pieces[last]
            pieces[place].end = max(place.end, pieces[last].end)
        else:
            pieces[place] = _Piece(place.begin, place.end)
        last = place
    return pieces
