"""Provenance of each allocation that a loader reads or writes, as pieces that do not overlap.

In: pieces in the order in which they are written. Out: the pieces that remain.
Not here: the effect of operators (`meta_tensors`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from penstock.sync.recording.layout import Step
from penstock.sync.recording.stride_map import Grid, StrideMap, between, boxes, chain, meet, restrict
from penstock.types import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a buffer: from the one checkpoint tensor in `names`; or a `value`; or unknown, with `why` and names."""

    map: StrideMap
    names: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    value: float | None = None
    why: str = ""


class Buffer:
    """An allocation: of a live tensor, or of a temporary one."""

    def __init__(self, tensor: torch.Tensor, *, name: str = "", piece: Piece | None = None) -> None:
        self.tensor = tensor.detach()  # keeps the storage, whose identity is the key
        self.name = name
        self.dtype = tensor.dtype
        self.grid = Grid(tensor.shape, tensor.stride())
        self.offset = tensor.storage_offset()
        span = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.start_bytes = self.offset * tensor.itemsize
        self.stop_bytes = self.start_bytes + (span + 1) * tensor.itemsize
        self.pieces: list[Piece] = [] if piece is None else [piece]
        self.untouched = piece is not None
        self._boxes: list[Box] = []

    def names(self) -> tuple[str, ...]:
        """Return the checkpoint tensors that are in the buffer."""
        return tuple(dict.fromkeys(name for piece in self.pieces for name in piece.names))

    def put(self, new: Sequence[Piece]) -> None:
        """Write pieces over the present ones."""
        self.untouched = False
        # The boxes of `pieces`, computed lazily: temporaries are read once and need none.
        if len(self._boxes) != len(self.pieces):
            self._boxes = [piece.map.target_box() for piece in self.pieces]
        for piece in new:
            box = piece.map.target_box()
            if any(_meet(box, old) for old in self._boxes):
                self.pieces = [rest for old in self.pieces for rest in _without(old, box)]
                self._boxes = [piece.map.target_box() for piece in self.pieces]
            self.pieces.append(piece)
            self._boxes.append(box)


def _meet(one: Box, other: Box) -> bool:
    # `stride_map.meet` without allocating a box: an expert's parameter has hundreds of pieces, each compared with all.
    for a, b, c, d in zip(one.start, one.stop, other.start, other.stop, strict=True):  # noqa: SIM110 - twice as fast
        if a >= d or c >= b:
            return False
    return True


def identity(box: Box) -> StrideMap:
    """Return the map of each element of a box to its own place."""
    digits = tuple((n, dim, 1, dim, 1) for dim, n in enumerate(box.shape) if n > 1)
    return StrideMap(source_start=box.start, target_start=box.start, digits=digits)


def _without(piece: Piece, box: Box) -> Iterator[Piece]:
    """Return the rest of a piece after `box` is written."""
    whole = piece.map.target_box()
    if meet(whole, box) is None:
        yield piece
        return
    start, stop = list(whole.start), list(whole.stop)
    for dim in range(len(start)):
        for low, high in ((start[dim], box.start[dim]), (box.stop[dim], stop[dim])):
            if low < high:
                side = Box(start=(*start[:dim], low, *start[dim + 1 :]), stop=(*stop[:dim], high, *stop[dim + 1 :]))
                yield from (
                    dataclasses.replace(piece, map=part) for cut in restrict(piece.map, side) for part in boxes(cut)
                )
        start[dim], stop[dim] = max(start[dim], box.start[dim]), min(stop[dim], box.stop[dim])


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The part of a buffer that a tensor shows; the offset in elements from the buffer's first."""

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def region(self) -> list[StrideMap]:
        """Return the boxes of the buffer that are shown, each as a map to itself. NotBoxes: they are not boxes."""
        grid = self.buffer.grid
        return boxes(between(grid, self.offset, self.strides, grid, self.offset, self.strides, self.shape))

    def pieces_to(self, target: View) -> Iterator[Piece]:
        """Yield this view's pieces as pieces of `target`'s buffer; both have one shape. NotBoxes as `region`."""
        mine, theirs = self.buffer, target.buffer
        whole = between(mine.grid, self.offset, self.strides, theirs.grid, target.offset, target.strides, self.shape)
        for part in boxes(whole):
            # A whole checkpoint tensor, the usual source: no need to intersect with its single piece.
            if mine.untouched:
                yield dataclasses.replace(mine.pieces[0], map=part)
                continue
            for piece in mine.pieces:
                for joined in chain(piece.map, part):
                    yield from (dataclasses.replace(piece, map=cut) for cut in boxes(joined))
