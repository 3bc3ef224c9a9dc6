"""The places of rows and chunks in this process's regions, and in a peer's regions as its map describes them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from penstock.digest.leaf import leaf_digests
from penstock.errors import FormatError
from penstock.holding.weight_layout import WeightLayout
from penstock.hub.messages import HoldingMap
from penstock.memory.arena import ALIGN_BYTES, Arena
from penstock.segments import Segments
from penstock.transport.protocol import Memory
from penstock.transport.storages import TorchStorage
from penstock.types import I64, U64


class RowPlacement(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Each row's region, byte offset in the region, and address. Empty rows have region -1 and address 0."""

    regions: tuple[Memory, ...]
    row_region: I64
    row_offset: I64
    row_address: I64


def place_rows(rows: Sequence[torch.Tensor], arenas: Sequence[Arena] = ()) -> RowPlacement:
    """Find the regions of flat uint8 tensors: the arena that contains a tensor, or its torch storage."""
    regions: list[Memory] = []
    row_region = np.full(len(rows), -1, np.int64)
    address = np.array([flat.data_ptr() for flat in rows], np.int64)
    is_unplaced = np.array([flat.numel() for flat in rows], np.int64) > 0
    # A registration costs at least a system call, so register whole arenas and storages, not thousands of tensors.
    for arena in arenas:
        is_inside = is_unplaced & (address >= arena.address) & (address < arena.address + arena.nbytes)
        if is_inside.any():
            row_region[is_inside] = len(regions)
            device = str(rows[int(is_inside.argmax())].device)
            regions.append(Memory(address=arena.address, nbytes=arena.nbytes, device=device, owner=arena))
            is_unplaced &= ~is_inside
    at: dict[int, int] = {}
    for row in np.flatnonzero(is_unplaced).tolist():
        storage = rows[row].untyped_storage()
        base = storage.data_ptr()
        if base not in at:
            at[base] = len(regions)
            device = str(rows[row].device)
            regions.append(Memory(address=base, nbytes=storage.nbytes(), device=device, owner=TorchStorage(storage)))
        row_region[row] = at[base]
    # Index -1, the region of empty rows, selects the 0 at the end.
    start = np.array([*(region.address for region in regions), 0], np.int64)[row_region]
    row_offset = np.where(row_region < 0, 0, address - start)
    return RowPlacement(
        regions=tuple(regions), row_region=row_region, row_offset=row_offset, row_address=start + row_offset
    )


class PlacedChunks:
    """The chunks of a layout at their places in this process's memory.

    Args:
        rows: bytes of each row in the layout, flat uint8, all on one device. This object keeps the rows alive.
        arenas: arenas that contain rows. Each arena is one region.
    """

    def __init__(self, layout: WeightLayout, rows: Sequence[torch.Tensor], arenas: Sequence[Arena] = ()) -> None:
        self.layout = layout
        self.rows = list(rows)
        self.device = rows[0].device if rows else torch.device("cpu")
        self.place = place_rows(rows, arenas)
        # With tiny chunks, the gap between two tensors may hold another chunk, which a joined read would overwrite.
        self._has_tiny_chunks = bool((layout.chunks.nbytes[:-1] < ALIGN_BYTES).any())

    def regions_of(self, chunks: I64) -> set[int]:
        """Return the regions that contain bytes of these chunks."""
        return set(self.place.row_region[self.layout.chunks.pieces(chunks).row].tolist())

    def segments(self, chunks: I64, theirs_region: I64, theirs_offset: I64) -> dict[tuple[int, int], Segments]:
        """Return the segments to read from a peer for these chunks, keyed by the peer's region and the local region."""
        pieces, ours = self.layout.chunks.pieces(chunks), self.place
        src = theirs_offset[pieces.row] + pieces.start
        dst = ours.row_offset[pieces.row] + pieces.start
        from_to = theirs_region[pieces.row] * len(ours.regions) + ours.row_region[pieces.row]
        joined = {}
        # The first call of `np.unique` imports numpy.ma, which would delay the first read by 8 to 40 ms.
        for pair in sorted(set(from_to.tolist())):
            rows = np.flatnonzero(from_to == pair)
            segments = Segments(src=src[rows], dst=dst[rows], nbytes=pieces.nbytes[rows])
            region, into = divmod(pair, len(ours.regions))
            # A joined read may overwrite padding in this process's arenas, but elsewhere the gap may hold a tensor.
            is_padded = isinstance(ours.regions[into].owner, Arena) and not self._has_tiny_chunks
            joined[region, into] = segments.joined(padding_bytes=ALIGN_BYTES - 1 if is_padded else 0)
        return joined

    def digest(self, chunks: I64) -> U64:
        """Digest these chunks in memory. Return their leaf digests in the order of the chunks."""
        table = self.layout.chunks
        if self.device.type == "cuda":
            from penstock.digest.cuda import leaf_digests_cuda

            leaves = table.leaf_pieces(chunks)
            got = leaf_digests_cuda(self.place.row_address[leaves.row] + leaves.start, leaves.nbytes, self.device)
            return np.asarray(got.cpu().numpy()).view(np.uint64)
        # One call digests all leaves of a piece in native code.
        pieces, out, done = table.pieces(chunks), np.empty(int(table.leaf_counts(chunks).sum()), np.uint64), 0
        for r, first, length in zip(pieces.row.tolist(), pieces.start.tolist(), pieces.nbytes.tolist(), strict=True):
            count = -(-length // table.leaf_bytes)
            data = memoryview(self.rows[r].numpy())[first : first + length]
            leaf_digests(data, table.leaf_bytes, out[done : done + count])
            done += count
        return out


def decode_column(raw: bytes, kind: str) -> I64:
    """Decode little-endian integers from a peer. Raise FormatError if `raw` ends within an integer."""
    return _column(raw, kind).astype(np.int64)


def decode_digests(raw: bytes) -> U64:
    """Decode leaf digests from a peer, as a view of `raw`. Raise FormatError like `decode_column`."""
    return _column(raw, "<u8").astype(np.uint64, copy=False)


def _column(raw: bytes, kind: str) -> npt.NDArray[np.integer[npt.NBitBase]]:
    if len(raw) % (width := np.dtype(kind).itemsize):
        raise FormatError(f"a peer sent a column with {len(raw)} bytes, which is not a multiple of {width}")
    return np.frombuffer(raw, kind)


def locate_rows(layout: WeightLayout, where: HoldingMap, capacities: Sequence[int]) -> tuple[I64, I64]:
    """Return the region and offset of each row at the peer. Raise FormatError if a row exceeds `capacities`."""
    region, offset = decode_column(where.row_region, "<i4"), decode_column(where.row_offset, "<i8")
    nbytes = layout.table.nbytes
    fits = len(region) == len(offset) == len(nbytes)
    # Transports and `attach` read at these offsets without another check.
    if fits and len(nbytes):
        has_bytes = nbytes > 0
        of, at = region[has_bytes], offset[has_bytes]
        fits = bool(((of >= 0) & (of < len(capacities))).all())
        fits = fits and bool(((at >= 0) & (at <= np.array(capacities, np.int64)[of] - nbytes[has_bytes])).all())
    if not fits:
        raise FormatError(f"a peer's map with {len(region)} rows does not fit the layout with {len(nbytes)} tensors")
    return region, offset


def device_id(device: torch.device) -> str:
    """Return a GPU's UUID, or an empty string for the host. Unlike device indexes, UUIDs are equal in all processes."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
