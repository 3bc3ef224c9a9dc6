"""Turns and regions of a shared read. The ranks read the turns in rotation, and a rank keeps its region of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from penstock.types import Box


class TurnPiece(msgspec.Struct, frozen=True):
    """Bytes `[start, stop)` of a tensor, at offset `at` in their turn."""

    row: int
    start: int
    stop: int
    at: int

    @property
    def nbytes(self) -> int:
        """Return the size of the piece in bytes."""
        return self.stop - self.start


class TurnRegion(msgspec.Struct, frozen=True):
    """A range of one dim, as columns `[first, last)` of the tensor's bytes viewed as `[num_rows, row_bytes]`."""

    num_rows: int
    row_bytes: int
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Return the size of the region in bytes."""
        return self.num_rows * (self.last - self.first)

    def place(self, into: torch.Tensor, start: int, data: torch.Tensor) -> None:
        """Copy the bytes of `data` that are in the region into `into`, flat uint8 of `nbytes`.

        `data` are the flat uint8 bytes of the tensor from byte `start` on.
        """
        stop = start + data.numel()
        head, tail = -(-start // self.row_bytes), stop // self.row_bytes
        if head > tail:
            self._place_part(into, start, data)
            return
        first_whole, last_whole = head * self.row_bytes - start, tail * self.row_bytes - start
        self._place_part(into, start, data[:first_whole])
        if head < tail:
            rows = data[first_whole:last_whole].view(tail - head, self.row_bytes)[:, self.first : self.last]
            into.view(self.num_rows, self.last - self.first)[head:tail].copy_(rows)
        self._place_part(into, tail * self.row_bytes, data[last_whole:])

    def _place_part(self, into: torch.Tensor, start: int, data: torch.Tensor) -> None:
        row, column = divmod(start, self.row_bytes)
        low, high = max(column, self.first), min(column + data.numel(), self.last)
        if low < high:
            at = row * (self.last - self.first) - self.first
            into[at + low : at + high].copy_(data[low - column : high - column])


def cut_turns(
    nbytes: Sequence[int], order: Sequence[int], read_bytes: int, leaf_bytes: int, per_turn: int
) -> list[list[list[TurnPiece]]]:
    """Return the pieces of each read in each turn: the tensors' bytes in `order`, split between leaves.

    A read has at most `read_bytes`, and a turn has `per_turn` reads.
    """
    turns: list[list[list[TurnPiece]]] = []
    # Begin a turn with the first piece.
    num_reads, at, left = per_turn, 0, 0
    for row in order:
        start = 0
        while start < nbytes[row]:
            stop = min(nbytes[row], start + left)
            if stop < nbytes[row]:
                stop -= stop % leaf_bytes
            if stop <= start:
                if num_reads == per_turn:
                    turns.append([])
                    num_reads = at = 0
                turns[-1].append([])
                num_reads, left = num_reads + 1, read_bytes
                continue
            turns[-1][-1].append(TurnPiece(row, start, stop, at))
            at, left, start = at + stop - start, left - (stop - start), stop
    return turns


def region_of(box: Box, shape: Sequence[int], nbytes: int) -> TurnRegion | None:
    """Return the box as columns of a tensor of `nbytes`. Return None if the box is cut in several dims or is empty."""
    cut = [dim for dim, size in enumerate(shape) if (box.start[dim], box.stop[dim]) != (0, size)]
    count = math.prod(shape)
    if len(cut) != 1 or not math.prod(box.shape) or not count:
        return None
    dim = cut[0]
    column = math.prod(shape[dim + 1 :]) * (nbytes // count)
    return TurnRegion(
        num_rows=math.prod(shape[:dim]),
        row_bytes=shape[dim] * column,
        first=box.start[dim] * column,
        last=box.stop[dim] * column,
    )
