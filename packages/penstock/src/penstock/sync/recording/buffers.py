"""The buffers that a recording tracks. A buffer contains boxes of checkpoint tensors, numbers and unknown elements."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch
from msgspec.structs import replace

from penstock.plan.intersect import common_box
from penstock.sync.recording.layout import Step
from penstock.sync.recording.stride_map import StridedView, StrideGrid, StrideMap, between, boxes, chain, restrict
from penstock.types import Box


class BufferPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a buffer: a box of the tensor in `names`, a number `value`, or unknown because of `why`."""

    map: StrideMap
    names: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    value: float | None = None
    why: str = ""


class Buffer:
    """The allocation of a live or a temporary tensor."""

    def __init__(
        self, dtype: torch.dtype, grid: StrideGrid, offset: int = 0, *, piece: BufferPiece | None = None
    ) -> None:
        self.dtype = dtype
        self.grid = grid
        self.offset = offset
        self.pieces: list[BufferPiece] = [] if piece is None else [piece]
        self.untouched = piece is not None
        # For each checkpoint tensor that was completely overwritten, the tensor that replaced it.
        self.replaced: dict[str, str] = {}
        self._boxes: _Boxes | None = None

    def names(self) -> tuple[str, ...]:
        """Return the checkpoint tensors in the buffer."""
        return tuple(dict.fromkeys(name for piece in self.pieces for name in piece.names))

    def put(self, new: Sequence[tuple[BufferPiece, Box]]) -> None:
        """Overwrite boxes of the buffer with pieces."""
        self.untouched = False
        if self._boxes is None:
            self._boxes = _Boxes(piece.map.target_box() for piece in self.pieces)
        for piece, box in new:
            if self._boxes.meet(box):
                for old in self.pieces:
                    if len(old.names) == len(piece.names) == 1 and old.map == piece.map and old.names != piece.names:
                        self.replaced[old.names[0]] = piece.names[0]
                self.pieces = [rest for old in self.pieces for rest in _without(old, box)]
                self._boxes = _Boxes(piece.map.target_box() for piece in self.pieces)
            self.pieces.append(piece)
            self._boxes.add(box)


class LiveBuffer(Buffer):
    """The allocation of a live tensor, identified by its storage and byte range."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        super().__init__(tensor.dtype, grid_of(tuple(tensor.shape), tensor.stride()), int(tensor.storage_offset()))
        self.name = name
        # The storage's identity is the key, and a freed storage's identity could be reused, so keep the tensor.
        self.tensor = tensor.detach()
        span = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.start_bytes = self.offset * tensor.itemsize
        self.stop_bytes = self.start_bytes + (span + 1) * tensor.itemsize


class _Boxes:
    """Boxes sorted by their start in the first dim, so that a new box is compared with few boxes."""

    def __init__(self, boxes: Iterable[Box]) -> None:
        self._starts: list[int] = []
        self._boxes: list[Box] = []
        self._longest = 0
        for box in boxes:
            self.add(box)

    def add(self, box: Box) -> None:
        start, stop = _first_dim(box)
        at = bisect.bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._boxes.insert(at, box)
        self._longest = max(self._longest, stop - start)

    def meet(self, box: Box) -> bool:
        start, stop = _first_dim(box)
        # No box is longer than `_longest`, so all boxes before index `low` end before the new box begins.
        low = bisect.bisect_right(self._starts, start - self._longest)
        high = bisect.bisect_left(self._starts, stop)
        return any(_meet(box, old) for old in self._boxes[low:high])


def _first_dim(box: Box) -> tuple[int, int]:
    return (box.start[0], box.stop[0]) if box.start else (0, 1)


def _meet(box: Box, other: Box) -> bool:
    # Unlike `intersect.common_box`, this allocates no box.
    for a, b, c, d in zip(box.start, box.stop, other.start, other.stop, strict=True):  # noqa: SIM110 - twice as fast
        if a >= d or c >= b:
            return False
    return True


def identity(box: Box) -> StrideMap:
    """Return the map from each element of a box to itself."""
    digits = tuple((n, dim, 1, dim, 1) for dim, n in enumerate(box.shape) if n > 1)
    return StrideMap(source_start=box.start, target_start=box.start, digits=digits)


grid_of = functools.lru_cache(maxsize=1024)(StrideGrid)


def _without(piece: BufferPiece, box: Box) -> Iterator[BufferPiece]:
    whole = piece.map.target_box()
    if common_box(whole, box) is None:
        yield piece
        return
    start, stop = list(whole.start), list(whole.stop)
    for dim in range(len(start)):
        for low, high in ((start[dim], box.start[dim]), (box.stop[dim], stop[dim])):
            if low < high:
                side = Box(start=(*start[:dim], low, *start[dim + 1 :]), stop=(*stop[:dim], high, *stop[dim + 1 :]))
                yield from (replace(piece, map=part) for cut in restrict(piece.map, side) for part in boxes(cut))
        start[dim], stop[dim] = max(start[dim], box.start[dim]), min(stop[dim], box.stop[dim])


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The elements of a buffer that a tensor views. The offset counts elements from the buffer's first element."""

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def strided(self) -> StridedView:
        """Return the buffer's grid with this view's offset and strides."""
        return StridedView(self.buffer.grid, self.offset, self.strides)

    def region(self) -> list[StrideMap]:
        """Return the boxes of the buffer that the view covers, as identity maps. Raise NotBoxes."""
        return boxes(between(self.strided, self.strided, self.shape))

    def pieces_to(self, target: View) -> Iterator[BufferPiece]:
        """Yield this view's pieces as pieces of `target`'s buffer. `target` has this view's shape. Raise NotBoxes."""
        mine = self.buffer
        for part in boxes(between(self.strided, target.strided, self.shape)):
            # The source is usually a whole checkpoint tensor. Its single piece needs no intersection.
            if mine.untouched:
                yield replace(mine.pieces[0], map=part)
                continue
            for piece in mine.pieces:
                for joined in chain(piece.map, part):
                    yield from (replace(piece, map=cut) for cut in boxes(joined))
