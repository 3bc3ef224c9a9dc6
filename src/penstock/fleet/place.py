"""Where a line's rows lie: in which regions of memory, ours and a peer's, and where in them.

In: rows and their arenas; a peer's map. Out: regions and offsets, as columns.
Not here: registering regions (`holding`), what a row is (`line`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.errors import FormatError
from penstock.fleet.line import Line
from penstock.fleet.messages import HoldingMap
from penstock.memory.arena import Arena
from penstock.transport.protocol import Memory
from penstock.types import I64


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Place:
    """Where the line's rows lie: regions of memory, and each row's region (-1: no bytes, or no memory yet) and offset
    in it."""

    regions: tuple[Memory, ...]
    row_region: I64
    row_offset: I64

    def then(self, more: Place) -> Place:
        """These rows, and after them those."""
        shifted = np.where(more.row_region < 0, -1, more.row_region + len(self.regions))
        return Place(
            regions=self.regions + more.regions,
            row_region=np.append(self.row_region, shifted),
            row_offset=np.append(self.row_offset, more.row_offset),
        )

    def padded(self, num_rows: int) -> Place:
        """These rows, and after them such without memory, so many in all."""
        none = np.full(num_rows - len(self.row_region), -1, np.int64)
        return self.then(Place(regions=(), row_region=none, row_offset=none * 0))


def place_of(rows: Sequence[torch.Tensor], arenas: Sequence[Arena] = ()) -> Place:
    """Find the regions behind flat uint8 tensors: their arena where they lie in one, else their torch storage."""
    regions: list[Memory] = []
    at: dict[int, int] = {}
    row_region, row_offset = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int64)
    for row, flat in enumerate(rows):
        if not flat.numel():
            continue
        address = flat.data_ptr()
        arena = next((a for a in arenas if a.address <= address < a.address + a.nbytes), None)
        if arena is not None:
            base, nbytes = arena.address, arena.nbytes
        else:
            storage = flat.untyped_storage()
            base, nbytes = storage.data_ptr(), storage.nbytes()
        if base not in at:
            at[base] = len(regions)
            owner: object = arena if arena else flat
            regions.append(Memory(address=base, nbytes=nbytes, device=str(flat.device), owner=owner))
        row_region[row], row_offset[row] = at[base], address - base
    return Place(regions=tuple(regions), row_region=row_region, row_offset=row_offset)


def column(raw: bytes, kind: str) -> I64:
    """Numbers that a peer sent, little endian. FormatError where the bytes are no whole number of them."""
    if len(raw) % np.dtype(kind).itemsize:
        raise FormatError(f"a column of {len(raw)} bytes")
    return np.frombuffer(raw, kind).astype(np.int64)


def located(line: Line, where: HoldingMap, room: Sequence[int]) -> tuple[I64, I64]:
    """Per row of the line a peer's region (-1: it has no memory for it yet) and the offset in it; both mean nothing for
    a row of no bytes.

    Args:
        line: ours.
        where: what the peer says.
        room: bytes of each of its regions.

    Raises:
        FormatError: a row lies outside, or it says another number of rows.
    """
    region, offset = column(where.row_region, "<i4"), column(where.row_offset, "<i8")
    nbytes = line.table.nbytes
    fits = len(region) == len(offset) == len(nbytes)
    if fits and len(nbytes):
        held = (nbytes > 0) & (region != -1)
        of, at = region[held], offset[held]
        fits = bool(((of >= 0) & (of < len(room))).all())
        fits = fits and bool(((at >= 0) & (at <= np.array(room, np.int64)[of] - nbytes[held])).all())
    if not fits:
        raise FormatError("a peer's map does not fit the line")
    return region, offset
