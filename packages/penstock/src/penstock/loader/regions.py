"""Verified regions of tensors. Whole leaves are read and compared with their digests, and then the region is cut out.

Without digests only the region is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch

from penstock.digest.leaf import num_leaves
from penstock.errors import PlanError
from penstock.loader.tensor import as_tensor
from penstock.plan.layout import Runs, box_runs
from penstock.types import I64, U64, Box, DType, TensorTable

Memory = Callable[[int], torch.Tensor]
"""Returns flat uint8 memory for the box of a wanted row."""


class _Cut(NamedTuple):
    line: int
    runs: Runs


class _RowPieces:
    """The boxes of one row, and the pieces of the row that contain them. Each piece is a run of whole leaves."""

    def __init__(self, cuts: Sequence[_Cut], nbytes: int, leaf_bytes: int) -> None:
        self.cuts = cuts
        self._leaf_bytes = leaf_bytes
        ranges = np.concatenate([_ranges(cut.runs, leaf_bytes) for cut in cuts])
        leaves = np.stack([ranges[:, 0] // leaf_bytes, -(-ranges[:, 1] // leaf_bytes)], axis=1)
        leaves = leaves[np.argsort(leaves[:, 0], kind="stable")]
        reach = np.maximum.accumulate(leaves[:, 1])
        # A piece begins at each range of leaves that overlaps no earlier range.
        first = np.flatnonzero(np.concatenate([[True], leaves[1:, 0] > reach[:-1]]))
        self.first_leaf: I64 = leaves[first, 0]
        self.stop_leaf: I64 = reach[np.concatenate([first[1:], [len(reach)]]) - 1]
        self.start: I64 = self.first_leaf * leaf_bytes
        self.stop: I64 = np.minimum(self.stop_leaf * leaf_bytes, nbytes)
        self._pieces: list[torch.Tensor] = []

    def add(self, piece: torch.Tensor) -> bool:
        self._pieces.append(piece)
        return len(self._pieces) == len(self.start)

    def copy(self, cut: _Cut, into: torch.Tensor) -> None:
        runs, at = cut.runs, 0
        run = runs.run_bytes
        for first, stop, begin in _rectangles(runs, self._leaf_bytes, self.start):
            number = int(np.searchsorted(self.start, begin, side="right")) - 1
            piece, rows = self._pieces[number], stop - first
            offset = int(piece.storage_offset()) + begin - int(self.start[number])
            source = piece.as_strided((rows, run), (runs.pitch_bytes, 1), offset)
            into[at : at + rows * run].view(rows, run).copy_(source)
            at += rows * run

    def drop(self) -> None:
        self._pieces.clear()


def _ranges(runs: Runs, leaf_bytes: int) -> I64:
    """Return the byte ranges that a box needs, `[n, 2]`. Rows that begin at most one leaf apart form one range."""
    if runs.pitch_bytes <= leaf_bytes or runs.num_rows == 1:
        length = (runs.num_rows - 1) * runs.pitch_bytes + runs.run_bytes
        return np.stack([runs.offsets, runs.offsets + length], axis=1)
    start = (runs.offsets[:, None] + np.arange(runs.num_rows) * runs.pitch_bytes).reshape(-1)
    return np.stack([start, start + runs.run_bytes], axis=1)


def _rectangles(runs: Runs, leaf_bytes: int, starts: I64) -> Iterator[tuple[int, int, int]]:
    """Yield `(first row, stop row, first byte)` for the rows of each rectangle that lie in one piece."""
    for offset in runs.offsets.tolist():
        if runs.pitch_bytes <= leaf_bytes or runs.num_rows == 1:
            yield 0, runs.num_rows, offset
            continue
        at = offset + np.arange(runs.num_rows) * runs.pitch_bytes
        piece = np.searchsorted(starts, at, side="right")
        edges = [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), runs.num_rows]
        for first, stop in pairwise(edges):
            yield first, stop, offset + first * runs.pitch_bytes


class TensorRegions:
    """The rows that a plan reads to cover all boxes, and the tensors that are built from these rows.

    Args:
        table: the wanted rows, in file order. A row may appear several times with different boxes.
        boxes: for each row its region, or None for the whole row.
        leaves: digests of the rows, in order, or None to read boxes directly and not verify them.
        leaf_bytes: size of a leaf in bytes.

    Attributes:
        table, boxes, leaves: the table, boxes and digests of the plan's rows.

    Raises:
        PlanError: a box lies outside its tensor.
    """

    def __init__(
        self, table: TensorTable, boxes: Sequence[Box | None], leaves: U64 | None = None, leaf_bytes: int = 1
    ) -> None:
        self._wanted = table
        self._boxes = boxes
        first_leaf = np.cumsum(num_leaves(table.nbytes, leaf_bytes)) - num_leaves(table.nbytes, leaf_bytes)
        # For each plan row: its wanted row or its pieces, the index of the first wanted row, the offset and the size.
        rows: list[tuple[int | _RowPieces, int, int, int]] = []
        kept = [np.zeros(0, np.uint64)]
        keys = list(zip(table.file_index.tolist(), table.offset.tolist(), table.names, strict=True))
        for _, same in groupby(range(len(table)), key=keys.__getitem__):
            group = list(same)
            start, size = int(table.offset[group[0]]), int(table.nbytes[group[0]])
            mine = None if leaves is None else leaves[first_leaf[group[0]] :][: -(-size // leaf_bytes)]
            cuts = [] if mine is None else self._cuts(group)
            # Whole rows, empty boxes and boxes without digests stay unchanged.
            for line in sorted(set(group) - {cut.line for cut in cuts}):
                rows.append((line, line, start, size))
                kept += [] if mine is None else [mine]
            if cuts and mine is not None:
                pieces = _RowPieces(cuts, size, leaf_bytes)
                columns = [pieces.start, pieces.stop, pieces.first_leaf, pieces.stop_leaf]
                for low, high, first, stop in np.stack(columns, axis=1).tolist():
                    rows.append((pieces, group[0], start + low, high - low))
                    kept.append(mine[first:stop])
        self._rows = [row for row, *_ in rows]
        is_piece = [isinstance(row, _RowPieces) for row in self._rows]
        lines = [line for _, line, _, _ in rows]
        flags = list(zip(is_piece, rows, strict=True))
        self.table = TensorTable(
            names=tuple(table.names[line] for line in lines),
            dtypes=tuple(DType.U8 if piece else table.dtypes[line] for piece, (_, line, _, _) in flags),
            shapes=tuple((size,) if piece else table.shapes[line] for piece, (_, line, _, size) in flags),
            file_index=table.file_index[np.array(lines, np.int64)],
            offset=np.array([offset for _, _, offset, _ in rows], np.int64),
            nbytes=np.array([nbytes for *_, nbytes in rows], np.int64),
        )
        self.boxes = [None if piece else boxes[line] for piece, (_, line, _, _) in flags]
        self.leaves: U64 | None = None if leaves is None else np.concatenate(kept)

    def _cuts(self, group: Sequence[int]) -> list[_Cut]:
        cuts = []
        for line in group:
            box = self._boxes[line]
            if box is None:
                continue
            try:
                runs = box_runs(self._wanted.shapes[line], box, self._wanted.dtypes[line].bits)
            except PlanError as error:
                error.tensor = self._wanted.names[line]
                raise
            if runs.nbytes:
                cuts.append(_Cut(line, runs))
        return cuts

    def line_of(self, row: int) -> int | None:
        """Return the wanted row that equals a plan row, or None if the plan row is only a piece of a wanted row."""
        found = self._rows[row]
        return None if isinstance(found, _RowPieces) else found

    def cut_bytes(self) -> dict[int, int]:
        """Return the size in bytes of each wanted row that is cut from pieces."""
        groups = {id(group): group for group in self._rows if isinstance(group, _RowPieces)}
        return {cut.line: cut.runs.nbytes for group in groups.values() for cut in group.cuts}

    def arrived(self, row: int, tensor: torch.Tensor, memory: Memory) -> Iterator[tuple[int, torch.Tensor]]:
        """Add the next complete and verified row of the plan. Yield the wanted rows that are now complete.

        Call this method once for each row of the plan. Pieces of the same wanted row must come in order.
        """
        found = self._rows[row]
        if not isinstance(found, _RowPieces):
            yield found, tensor
            return
        if not found.add(tensor):
            return
        for cut in found.cuts:
            flat = memory(cut.line)
            found.copy(cut, flat)
            box = self._boxes[cut.line]
            assert box is not None
            yield cut.line, as_tensor(flat, self._wanted.dtypes[cut.line], box.shape)
        found.drop()
