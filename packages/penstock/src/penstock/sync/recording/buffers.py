"""Buffers of a recording: what each consists of, as boxes of checkpoint tensors, numbers and unknown elements.

In: pieces, each written over those before it. Out: the pieces that are left; what a view of a buffer shows.
Not here: the operators that write them (`meta_tensors`), copies by strides (`stride_map`).
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch
from msgspec.structs import replace

from penstock.plan.intersect import common_box
from penstock.sync.recording.layout import Step
from penstock.sync.recording.stride_map import StrideGrid, StrideMap, between, boxes, chain, restrict
from penstock.types import Box


class BufferPiece(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a buffer: from the one checkpoint tensor in `names`; or a `value`; or unknown, with `why` and names."""

    map: StrideMap
    names: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    value: float | None = None
    why: str = ""


class Buffer:
    """An allocation: of a live tensor, or of a temporary one."""

    def __init__(
        self, dtype: torch.dtype, grid: StrideGrid, offset: int = 0, *, piece: BufferPiece | None = None
    ) -> None:
        self.dtype = dtype
        self.grid = grid
        self.offset = offset
        self.pieces: list[BufferPiece] = [] if piece is None else [piece]
        # Still the one piece that it was made with.
        self.untouched = piece is not None
        # Checkpoint tensors that were overwritten as a whole, with the one that took their place.
        self.replaced: dict[str, str] = {}
        # Made when it is first written to: temporaries are read once and need none.
        self._boxes: _Boxes | None = None

    def names(self) -> tuple[str, ...]:
        """Return the checkpoint tensors that are in the buffer."""
        return tuple(dict.fromkeys(name for piece in self.pieces for name in piece.names))

    def put(self, new: Sequence[tuple[BufferPiece, Box]]) -> None:
        """Write pieces over the present ones, each with its box in the buffer."""
        self.untouched = False
        if self._boxes is None:
            self._boxes = _Boxes(piece.map.target_box() for piece in self.pieces)
        for piece, box in new:
            if self._boxes.meet(box):
                self._note_replaced(piece)
                self.pieces = [rest for old in self.pieces for rest in _without(old, box)]
                self._boxes = _Boxes(piece.map.target_box() for piece in self.pieces)
            self.pieces.append(piece)
            self._boxes.add(box)

    def _note_replaced(self, new: BufferPiece) -> None:
        for old in self.pieces:
            if len(old.names) == len(new.names) == 1 and old.map == new.map and old.names != new.names:
                self.replaced[old.names[0]] = new.names[0]


class LiveBuffer(Buffer):
    """The allocation of a live tensor: found by its storage, of which it has a range of bytes."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        super().__init__(tensor.dtype, grid_of(tuple(tensor.shape), tensor.stride()), int(tensor.storage_offset()))
        self.name = name
        # Keeps the storage alive: its identity is the key, and a freed one would be given to another tensor.
        self.tensor = tensor.detach()
        span = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.start_bytes = self.offset * tensor.itemsize
        self.stop_bytes = self.start_bytes + (span + 1) * tensor.itemsize


class _Boxes:
    """Boxes in the order of where they begin in the first dim: few of an expert's thousands can meet a new one."""

    def __init__(self, boxes: Iterable[Box]) -> None:
        self._starts: list[int] = []
        self._boxes: list[Box] = []
        self._longest = 0
        for box in boxes:
            self.add(box)

    def add(self, box: Box) -> None:
        """Add a box."""
        start, stop = _first_dim(box)
        at = bisect.bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._boxes.insert(at, box)
        self._longest = max(self._longest, stop - start)

    def meet(self, box: Box) -> bool:
        """Return whether a box has an element in common with one of these."""
        start, stop = _first_dim(box)
        # One that begins earlier than the longest of them before this box ends before it, too.
        low = bisect.bisect_right(self._starts, start - self._longest)
        high = bisect.bisect_left(self._starts, stop)
        return any(_meet(box, old) for old in self._boxes[low:high])


def _first_dim(box: Box) -> tuple[int, int]:
    """Return the range of a box in the first dim; a scalar's has none."""
    return (box.start[0], box.stop[0]) if box.start else (0, 1)


def _meet(box: Box, other: Box) -> bool:
    """Return whether two boxes have a common element."""
    # `intersect.common_box` without allocating a box.
    for a, b, c, d in zip(box.start, box.stop, other.start, other.stop, strict=True):  # noqa: SIM110 - twice as fast
        if a >= d or c >= b:
            return False
    return True


def identity(box: Box) -> StrideMap:
    """Return the map of each element of a box to its own place."""
    digits = tuple((n, dim, 1, dim, 1) for dim, n in enumerate(box.shape) if n > 1)
    return StrideMap(source_start=box.start, target_start=box.start, digits=digits)


# Loaders copy thousands of tensors of the same few shapes.
grid_of = functools.lru_cache(maxsize=1024)(StrideGrid)


def _without(piece: BufferPiece, box: Box) -> Iterator[BufferPiece]:
    """Return the rest of a piece after `box` is written."""
    whole = piece.map.target_box()
    if common_box(whole, box) is None:
        yield piece
        return
    # Dim by dim the parts before and after the box are cut off; what remains in the end is inside the box.
    start, stop = list(whole.start), list(whole.stop)
    for dim in range(len(start)):
        for low, high in ((start[dim], box.start[dim]), (box.stop[dim], stop[dim])):
            if low < high:
                side = Box(start=(*start[:dim], low, *start[dim + 1 :]), stop=(*stop[:dim], high, *stop[dim + 1 :]))
                yield from (replace(piece, map=part) for cut in restrict(piece.map, side) for part in boxes(cut))
        start[dim], stop[dim] = max(start[dim], box.start[dim]), min(stop[dim], box.stop[dim])


class View(msgspec.Struct, frozen=True, kw_only=True):
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

    def pieces_to(self, target: View) -> Iterator[BufferPiece]:
        """Yield this view's pieces as pieces of `target`'s buffer; both have one shape. NotBoxes as `region`."""
        mine, theirs = self.buffer, target.buffer
        whole = between(mine.grid, self.offset, self.strides, theirs.grid, target.offset, target.strides, self.shape)
        for part in boxes(whole):
            # A whole checkpoint tensor, the usual source: no need to intersect with its single piece.
            if mine.untouched:
                yield replace(mine.pieces[0], map=part)
                continue
            for piece in mine.pieces:
                for joined in chain(piece.map, part):
                    yield from (replace(piece, map=cut) for cut in boxes(joined))
