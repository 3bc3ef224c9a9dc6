"""Weights of one key in this process's memory: their layout, regions, verified chunks, and the map and log for readers.

In: a tensor table or tensors; chunks as they are verified. Out: a `WeightLayout`; the map and the log.
Not here: serving them (`server`), filling them (`fetcher.run`), dividing tensors into chunks (`plan.schedule`).

The layout is equal on all members with the same weights: tensors sorted by name, divided into chunks.

    mark_verified(chunks, leaves) --> log --> log_after(serial): readers learn of chunks while we still receive

The thread of a fetch marks chunks; threads of the server read map and log; the heartbeat's thread digests chunks again.
`changed` guards what they share. `_digesting` is held while a chunk is digested outside of it, so that the rows are not
taken away meanwhile; where both are held, `_digesting` comes first.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from penstock.digest.leaf import LEAF_BYTES, headers_revision, leaf_digests, name_order, revision
from penstock.errors import FormatError, IntegrityError, PlanError
from penstock.hub.messages import HoldingMap, HoldingState, Identity, LogReply, State, layout_digest, prepare
from penstock.loader.tensor import dtype_of
from penstock.memory.arena import ALIGN_BYTES, Arena
from penstock.memory.targets import require_stored
from penstock.memory.tiers import SOURCE
from penstock.peer.host_links import nearest_link
from penstock.plan.schedule import CHUNK_BYTES, ChunkTable, chunk_table, to_ranges
from penstock.segments import Segments
from penstock.storage.file_names import STEM, is_safe_stem
from penstock.transport.choose import PeerLinks
from penstock.transport.protocol import Handle, Memory, RevocableHandle, encode
from penstock.transport.storages import TorchStorage
from penstock.types import I64, U64, DType, Manifest, TensorTable, bits_to_bytes

MAX_TENSORS = 1 << 22
"""Most tensors accepted in a peer's layout: a limit on a hostile peer. The largest checkpoint has 70,000."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WeightLayout:
    """The tensor table and the chunks that all holders of a key share."""

    table: TensorTable
    """Sorted by name. Files and offsets are those of storage, if the layout was made from there."""
    chunks: ChunkTable
    digest: str
    """Of the table: the stem is not part of it."""
    stem: str = STEM
    """Part of the names of the files in storage before their number, for members that write files of their own."""

    @classmethod
    def of(
        cls,
        table: TensorTable,
        *,
        leaf_bytes: int = LEAF_BYTES,
        chunk_bytes: int | None = None,
        stem: str = STEM,
    ) -> WeightLayout:
        """Return the layout of these tensors, given in any order."""
        rows = name_order(table)
        # That of a peer is in order.
        ordered = table if rows == list(range(len(table))) else table.take(rows)
        most = max(CHUNK_BYTES if chunk_bytes is None else chunk_bytes, leaf_bytes)
        chunks = chunk_table(ordered.nbytes, leaf_bytes=leaf_bytes, chunk_bytes=most)
        return cls(table=ordered, chunks=chunks, digest=layout_digest(ordered), stem=stem)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return int(self.table.nbytes.sum())


class TableMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message that describes a layout to another member."""

    leaf_bytes: int
    chunk_bytes: int
    names: tuple[str, ...]
    dtypes: tuple[DType, ...]
    shapes: tuple[tuple[int, ...], ...]
    stem: str = STEM


prepare(TableMessage)


def to_message(layout: WeightLayout) -> TableMessage:
    """Return the message that describes a layout."""
    table, chunks = layout.table, layout.chunks
    return TableMessage(
        leaf_bytes=chunks.leaf_bytes,
        chunk_bytes=chunks.chunk_bytes,
        names=table.names,
        dtypes=table.dtypes,
        shapes=table.shapes,
        stem=layout.stem if is_safe_stem(layout.stem) else STEM,
    )


def from_message(message: TableMessage) -> WeightLayout:
    """Return the layout that a peer described. Raises FormatError if the message is inconsistent."""
    if not len(message.names) == len(message.dtypes) == len(message.shapes) <= MAX_TENSORS:
        raise FormatError("a peer's tensor table has columns of different lengths, or too many rows")
    if len(set(message.names)) < len(message.names):
        raise FormatError("a peer's tensor table names a tensor twice")
    if message.leaf_bytes < 1 or message.chunk_bytes < message.leaf_bytes:
        raise FormatError(f"a peer's chunks of {message.chunk_bytes} bytes cannot hold leaves of {message.leaf_bytes}")
    if min(chain.from_iterable(message.shapes), default=0) < 0:
        raise FormatError("a peer's tensor table has a negative dim")
    # It becomes the name of a file.
    if not is_safe_stem(message.stem):
        raise FormatError(f"a peer's files are called {message.stem[:100]!r}, which is no stem of a file name")
    table = tabulate(message.names, message.dtypes, message.shapes)
    return WeightLayout.of(table, leaf_bytes=message.leaf_bytes, chunk_bytes=message.chunk_bytes, stem=message.stem)


def tabulate(names: Sequence[str], dtypes: Sequence[DType], shapes: Sequence[tuple[int, ...]]) -> TensorTable:
    """Return a table of tensors that are not in files."""
    bits = {dtype: dtype.bits for dtype in set(dtypes)}
    # Python's integers: shapes of a peer may be of any size, and numpy's product would wrap around.
    nbytes = [math.prod(shape) * bits[dtype] // 8 for dtype, shape in zip(dtypes, shapes, strict=True)]
    if any(width % 8 for width in bits.values()):
        try:
            for dtype, shape in zip(dtypes, shapes, strict=True):
                bits_to_bytes(math.prod(shape), dtype)
        except ValueError as error:
            raise FormatError(f"a tensor does not fill whole bytes: {error}") from error
    if sum(nbytes) >= 1 << 62:
        raise FormatError(f"the tensors' sizes add up to {sum(nbytes)} bytes, above the limit of 4 EiB")
    none = np.zeros(len(nbytes), np.int64)
    return TensorTable(
        names=tuple(names),
        dtypes=tuple(dtypes),
        shapes=tuple(shapes),
        file_index=none,
        offset=none,
        nbytes=np.array(nbytes, np.int64),
    )


def layout_of_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[WeightLayout, list[torch.Tensor]]:
    """Return the layout of live tensors, and each row's bytes as a flat uint8 view.

    Tied tensors (one memory under several names) are one row, under the name that sorts first.

    Raises:
        PlanError: a tensor is not contiguous, or has a dtype that the format does not support.
    """
    # One memory, one row: as two rows a tied tensor would be sent twice.
    seen: set[tuple[int, int]] = set()
    names, dtypes, shapes, flat = [], [], [], []
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        place = (tensor.data_ptr(), tensor.nbytes)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        if not tensor.is_contiguous():
            message = f"a tensor of strides {tensor.stride()} cannot be exchanged: it is not contiguous"
            raise PlanError(message, tensor=name, hint="call .contiguous() on it")
        require_stored(name, tensor)
        dtype = dtype_of(tensor.dtype)
        shape = tuple(tensor.shape)
        # torch packs two F4 elements into one; the format counts elements.
        if dtype is DType.F4:
            shape = (*shape[:-1], shape[-1] * 2)
        names.append(name)
        dtypes.append(dtype)
        shapes.append(shape)
        flat.append(tensor.reshape(-1).view(torch.uint8))
    return WeightLayout.of(tabulate(names, dtypes, shapes)), flat


def revision_of(manifest: Manifest) -> str:
    """Return a revision that is equal for two readers of storage only if they read the same bytes.

    With digests it is the manifest's `w1-` revision. Headers alone do not prove that, so without digests the files'
    identities are part of it.
    """
    if manifest.leaves is not None:
        return manifest.revision
    identities = [f"{file.name}\0{file.nbytes}\0{file.identity}".encode() for file in manifest.files]
    return headers_revision([manifest.revision.encode(), *identities])


Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowPlacement:
    """The placement of a layout's rows: regions of memory, and each row's place in them.

    Attributes:
        row_region: each row's region; -1: it has no bytes.
        row_offset: where it starts in that region.
        row_address: where it starts in this process's memory; 0: it has no bytes.
    """

    regions: tuple[Memory, ...]
    row_region: I64
    row_offset: I64
    row_address: I64

    def is_there(self, rows: Iterable[int]) -> bool:
        """Return whether the memory of these rows is still where it was."""
        return all(self.regions[i].is_there() for i in set(self.row_region[list(rows)].tolist()) if i >= 0)


def place_rows(rows: Sequence[torch.Tensor], arenas: Sequence[Arena] = ()) -> RowPlacement:
    """Find the regions behind flat uint8 tensors: the arena that they lie in, else their torch storage."""
    regions: list[Memory] = []
    row_region = np.full(len(rows), -1, np.int64)
    address = np.array([flat.data_ptr() for flat in rows], np.int64)
    is_left = np.array([flat.numel() for flat in rows], np.int64) > 0
    # Whole arenas and storages are registered, not single tensors: a registration costs a system call or more, and a
    # model has thousands of tensors.
    for arena in arenas:
        is_inside = is_left & (address >= arena.address) & (address < arena.address + arena.nbytes)
        if is_inside.any():
            row_region[is_inside] = len(regions)
            device = str(rows[int(is_inside.argmax())].device)
            regions.append(Memory(address=arena.address, nbytes=arena.nbytes, device=device, owner=arena))
            is_left &= ~is_inside
    at: dict[int, int] = {}
    for row in np.flatnonzero(is_left).tolist():
        storage = rows[row].untyped_storage()
        base = storage.data_ptr()
        if base not in at:
            at[base] = len(regions)
            device = str(rows[row].device)
            regions.append(Memory(address=base, nbytes=storage.nbytes(), device=device, owner=TorchStorage(storage)))
        row_region[row] = at[base]
    # The last entry is that of rows without bytes, whose region is -1.
    start = np.array([*(region.address for region in regions), 0], np.int64)[row_region]
    row_offset = np.where(row_region < 0, 0, address - start)
    return RowPlacement(
        regions=tuple(regions), row_region=row_region, row_offset=row_offset, row_address=start + row_offset
    )


def decode_column(raw: bytes, kind: str) -> I64:
    """Decode little-endian numbers that a peer sent. Raises FormatError if the length does not fit their size."""
    return _column(raw, kind).astype(np.int64)


def decode_digests(raw: bytes) -> U64:
    """Decode leaf digests that a peer sent, as a view of `raw`. Raises FormatError as `decode_column` does."""
    return _column(raw, "<u8").astype(np.uint64, copy=False)


def _column(raw: bytes, kind: str) -> npt.NDArray[np.integer[npt.NBitBase]]:
    if len(raw) % np.dtype(kind).itemsize:
        raise FormatError(f"a peer sent a column of {len(raw)} bytes, not a multiple of {np.dtype(kind).itemsize}")
    return np.frombuffer(raw, kind)


def locate_rows(layout: WeightLayout, where: HoldingMap, room: Sequence[int]) -> tuple[I64, I64]:
    """Return, for each row of the layout, a peer's region and the offset in it; undefined for rows without bytes.

    Args:
        layout: our layout.
        where: the peer's map.
        room: bytes of each of its regions.

    Raises:
        FormatError: a row lies outside its region, or the map has another number of rows.
    """
    region, offset = decode_column(where.row_region, "<i4"), decode_column(where.row_offset, "<i8")
    nbytes = layout.table.nbytes
    fits = len(region) == len(offset) == len(nbytes)
    # Checked here, because a transport reads at these offsets in the peer's memory, and `attach` in our own mapping.
    if fits and len(nbytes):
        has_bytes = nbytes > 0
        of, at = region[has_bytes], offset[has_bytes]
        fits = bool(((of >= 0) & (of < len(room))).all())
        fits = fits and bool(((at >= 0) & (at <= np.array(room, np.int64)[of] - nbytes[has_bytes])).all())
    if not fits:
        raise FormatError(f"a peer's map of {len(region)} rows does not fit the layout of {len(nbytes)} tensors")
    return region, offset


def device_id(device: torch.device) -> str:
    """Return a GPU's UUID, which does not depend on this process's numbering; empty for the host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


class LocalWeights:
    """The weights of one key in this process's memory.

    Args:
        identity: identity of the weights; its key names them.
        layout: order of the tensors, and chunks.
        rows: bytes of each row of the layout, flat uint8, all on one device; kept alive by this object.
        leaves: the digests that a manifest states; None: no manifest.
        arenas: arenas that the rows lie in, if any.
        max_readers: concurrent leases of readers.

    Attributes:
        leaves: digest of each leaf of the layout; valid for chunks in `have`, and for all chunks with a manifest.
        have: per chunk, True if it was verified.
        changed: notified when `have`, `state` or `generation` changes.
        kept: True if engines of this host may map the memory: it does not change while the state is `whole`.
        damage: the error if verified bytes changed in memory, so that nothing may be read any more; else None.
        tier: the tier that has the bytes while they are not in `rows`; empty: they are in `rows`.
    """

    def __init__(
        self,
        identity: Identity,
        layout: WeightLayout,
        rows: Sequence[torch.Tensor],
        *,
        leaves: U64 | None = None,
        arenas: Sequence[Arena] = (),
        max_readers: int = 4,
    ) -> None:
        self.identity = identity
        self.key = identity.key()
        self.layout = layout
        self.rows = list(rows)
        self.device = rows[0].device if rows else torch.device("cpu")
        self._device_id = device_id(self.device)
        self._link = nearest_link(self._device_id)
        self.place = place_rows(rows, arenas)
        self.has_manifest = leaves is not None
        self.leaves: U64 = leaves if leaves is not None else np.zeros(layout.chunks.num_leaves, np.uint64)
        self.have: Bools = np.zeros(layout.chunks.num_chunks, bool)
        self.claims: tuple[tuple[int, int], ...] = ()
        self.max_readers = max_readers
        self.num_readers = 0
        # Shown by `penstock status`; a fetch sets them.
        self.path = ""
        self.why = ""
        self.parent = ""
        self.second_parent = ""
        self.gb_per_s = 0.0
        self.silent_s = -1.0
        # A reader compares the generation before and after a read: `close` raises it, so that no read counts that
        # overlaps with another use of the memory.
        self.generation = 0
        self.state = "filling"
        self.kept = False
        self.tier = ""
        self.damage: IntegrityError | None = None
        self._checked_chunk = -1
        self.changed = threading.Condition()
        self._root = ""
        self._log: I64 = np.empty(layout.chunks.num_chunks, np.int64)
        self._num_logged = 0
        self._sources: list[str] = []
        self._source_index: I64 = np.full(layout.chunks.num_chunks, -1)
        # Registrations that peers read from; and those that our own reads write to, which are all of the former, and
        # more: some transports only fill memory.
        self._handles: list[dict[str, Handle]] = []
        self._into: list[dict[str, Handle]] = []
        # Then the gap between two tensors may be another chunk, which a joined read would overwrite.
        self._has_tiny_chunks = bool((layout.chunks.nbytes[:-1] < ALIGN_BYTES).any())
        self._digesting = threading.Lock()

    @property
    def is_whole(self) -> bool:
        """True if every chunk is verified."""
        return bool(self.have.all())

    def progress(self) -> tuple[int, int]:
        """Return the verified bytes, and the bytes in all."""
        return int(self.layout.chunks.nbytes[self.have].sum()), self.layout.nbytes

    def register(self, links: PeerLinks) -> None:
        """Register the regions with every transport that supports them; needed before `map` and before reading."""
        if self._handles:
            return
        shown: list[dict[str, Handle]] = []
        try:
            for memory in self.place.regions:
                shown.append(links.register(memory))
            into = [links.register_into(*pair) for pair in zip(self.place.regions, shown, strict=True)]
        except BaseException:
            _close(shown)
            raise
        self._handles = shown
        self._into = into

    def handles(self, region: int) -> dict[str, Handle]:
        """Return our registrations of a region, by name of the transport that can read into it."""
        return self._into[region]

    def map(self, lease: str = "") -> HoldingMap:
        """Return the map for a peer; under a lease, with descriptors that end with it where transports can do that."""
        # With a lease the holder can end a reader's access, to one that has died or reads too slowly, by itself.
        chunks = self.layout.chunks
        described = tuple(
            {
                name: encode(handle.lend(lease) if lease and isinstance(handle, RevocableHandle) else handle.descriptor)
                for name, handle in handles.items()
            }
            for handles in self._handles
        )
        return HoldingMap(
            key=self.key,
            generation=self.generation,
            leaf_bytes=chunks.leaf_bytes,
            chunk_bytes=chunks.chunk_bytes,
            num_chunks=chunks.num_chunks,
            regions=described,
            row_region=self.place.row_region.astype("<i4").tobytes(),
            row_offset=self.place.row_offset.astype("<i8").tobytes(),
        )

    def take_back(self, lease: str) -> None:
        """Revoke the descriptors issued under a lease, for transports that support that."""
        for handles in self._handles:
            for handle in handles.values():
                if isinstance(handle, RevocableHandle):
                    handle.take_back(lease)

    def segments(self, chunks: I64, theirs_region: I64, theirs_offset: I64) -> dict[tuple[int, int], Segments]:
        """Return the segments to read for these chunks from a peer: (its region, ours) -> segments, neighbours joined.

        Args:
            chunks: chunk numbers, in the order wanted.
            theirs_region: the peer's region of each row.
            theirs_offset: offset of each row in the peer's region.
        """
        pieces = self.layout.chunks.pieces(chunks)
        src = theirs_offset[pieces.row] + pieces.start
        dst = self.place.row_offset[pieces.row] + pieces.start
        from_to = theirs_region[pieces.row] * len(self.place.regions) + self.place.row_region[pieces.row]
        joined = {}
        # Not `np.unique`, here and in what else a first read waits for: its first call imports numpy.ma, 8 to 40 ms.
        for pair in sorted(set(from_to.tolist())):
            rows = np.flatnonzero(from_to == pair)
            segments = Segments(src=src[rows], dst=dst[rows], nbytes=pieces.nbytes[rows])
            theirs, ours = divmod(pair, len(self.place.regions))
            # In our own arena the gaps between neighbours are unused, so a read may overwrite them. Elsewhere a gap may
            # be another tensor, or another chunk if chunks are as small as the alignment.
            is_ours = isinstance(self.place.regions[ours].owner, Arena) and not self._has_tiny_chunks
            padding = ALIGN_BYTES - 1 if is_ours else 0
            joined[theirs, ours] = segments.joined(padding_bytes=padding)
        return joined

    def digest(self, chunks: I64) -> U64:
        """Digest these chunks in memory; return their leaf digests, chunk after chunk. The bytes must be complete."""
        table = self.layout.chunks
        if self.device.type == "cuda":
            from penstock.digest.cuda import leaf_digests_cuda

            leaves = table.leaf_pieces(chunks)
            got = leaf_digests_cuda(self.place.row_address[leaves.row] + leaves.start, leaves.nbytes, self.device)
            return np.asarray(got.cpu().numpy()).view(np.uint64)
        # A call per piece of a tensor, not per leaf: the digest's own loop over leaves is native code.
        pieces, out, done = table.pieces(chunks), np.empty(int(table.leaf_counts(chunks).sum()), np.uint64), 0
        for r, first, length in zip(pieces.row.tolist(), pieces.start.tolist(), pieces.nbytes.tolist(), strict=True):
            count = -(-length // table.leaf_bytes)
            data = memoryview(self.rows[r].numpy())[first : first + length]
            leaf_digests(data, table.leaf_bytes, out[done : done + count])
            done += count
        return out

    def differing_chunks(self, chunks: I64, got: U64, wanted: U64) -> I64:
        """Return the chunks with at least one differing leaf."""
        if np.array_equal(got, wanted):
            return chunks[:0]
        wrong = np.repeat(np.arange(len(chunks)), self.layout.chunks.leaf_counts(chunks))[got != wanted]
        differ: I64 = chunks[np.unique(wrong)]
        return differ

    def contradicting_chunks(self, chunks: I64, leaves: U64) -> I64:
        """Return the chunks whose digests, as a peer states them, differ from the manifest; none without a manifest."""
        if not self.has_manifest:
            return chunks[:0]
        return self.differing_chunks(chunks, leaves, self.leaves[self.layout.chunks.leaves_of(chunks)])

    def record_digests(self, chunks: I64, leaves: U64, source: str) -> None:
        """Record the digests of chunks as one source states them; without a manifest all sources must agree.

        Raises:
            IntegrityError: two sources disagree, and without a manifest neither can be trusted.
        """
        if self.has_manifest:
            return
        with self.changed:
            is_known = self._source_index[chunks] >= 0
            if is_known.any():
                known, counts = chunks[is_known], self.layout.chunks.leaf_counts(chunks)
                stated = leaves[np.repeat(is_known, counts)]
                wrong = self.differing_chunks(known, stated, self.leaves[self.layout.chunks.leaves_of(known)])
                if len(wrong):
                    other = self._sources[self._source_index[wrong[0]]]
                    raise IntegrityError(
                        f"{other} and {source} state different digests of chunk {int(wrong[0])}",
                        hint="write a manifest with `penstock manifest`: only a manifest tells which source is right",
                    )
                chunks, leaves = chunks[~is_known], leaves[np.repeat(~is_known, counts)]
            if len(chunks):
                self.leaves[self.layout.chunks.leaves_of(chunks)] = leaves
                self._source_index[chunks] = len(self._sources)
                self._sources.append(source)

    def mark_verified(self, chunks: I64, leaves: U64) -> None:
        """Mark chunks as verified, with these leaf digests: from now on other members may read them."""
        with self.changed:
            # A chunk may arrive twice, from a slow source and from the one that replaced it; the log has it once.
            new = ~self.have[chunks]
            if not new.all():
                chunks, leaves = chunks[new], leaves[np.repeat(new, self.layout.chunks.leaf_counts(chunks))]
            self.leaves[self.layout.chunks.leaves_of(chunks)] = leaves
            self.have[chunks] = True
            self._log[self._num_logged : self._num_logged + len(chunks)] = chunks
            self._num_logged += len(chunks)
            self.changed.notify_all()

    def root(self) -> str:
        """Return the `w1-` revision: the root of all digests, meaningful once every chunk is verified."""
        return self._root or revision(self.layout.table, self.layout.chunks.leaf_bytes, self.leaves)

    def check_revision(self, expected: str = "") -> None:
        """Check that the digests' root is the identity's revision and the expected one; only for `w1-` revisions.

        Raises:
            IntegrityError: the digests belong to another revision.
        """
        root = self.root()
        # A caller may name a revision by a prefix of its root.
        for named in (self.identity.revision, expected):
            if named.startswith("w1-") and not root.startswith(named):
                raise IntegrityError(f"the digests are of revision {root}, not {named}", uri=f"penstock:{self.key}")
        # For `set_state`, which follows: the digest over all leaves takes milliseconds.
        self._root = root

    def spot_check(self, chance: random.Random) -> int | None:
        """Digest one verified chunk again; return its number if its bytes have changed since, else None.

        The first call picks a random chunk, later calls the next one, so as many calls as chunks check all of them.
        """
        with self.changed:
            verified = np.flatnonzero(self.have)
        if not len(verified) or self.damage is not None:
            return None
        # Random at first: members that start together would otherwise check the same chunks at the same time.
        if self._checked_chunk >= 0:
            later = verified[verified > self._checked_chunk]
        else:
            later = verified[chance.randrange(len(verified)) :]
        self._checked_chunk = int(later[0] if len(later) else verified[0])
        return self._checked_chunk if self.has_changed(self._checked_chunk) else None

    def has_changed(self, chunk: int) -> bool:
        """Digest a chunk again; return True if it was verified and its bytes have changed."""
        chunks = np.array([chunk], np.int64)
        with self._digesting:
            with self.changed:
                generation, is_here = self.generation, bool(self.rows) and bool(self.have[chunk])
            if not is_here:
                return False
            # Torch may have freed the memory since: reading it would end this process.
            if not self.place.is_there(self.layout.chunks.pieces(chunks).row.tolist()):
                return True
            got, wanted = self.digest(chunks), self.leaves[self.layout.chunks.leaves_of(chunks)]
        # If the generation changed, the memory was released during the digest and may have another use by now.
        return len(self.differing_chunks(chunks, got, wanted)) > 0 and generation == self.generation

    def mark_damaged(self, chunk: int) -> IntegrityError:
        """Record that a verified chunk changed in memory, for readers and the hub; return the error."""
        row = int(self.layout.chunks.pieces(np.array([chunk], np.int64)).row[0])
        error = IntegrityError(
            f"chunk {chunk} of {self.identity.model!r} changed in memory after it was verified",
            uri=f"penstock:{self.key}",
            tensor=self.layout.table.names[row],
            hint="call fence() before you change, move or free weights; if your code did not, test this host's memory",
        )
        with self.changed:
            self.damage = error
            self.why = error.message
            self.changed.notify_all()
        return error

    def set_state(self, state: State) -> None:
        """Set the state and wake readers that wait for news."""
        # Outside the lock, which readers wait for: the root is a digest over all names and leaves.
        if state == "whole":
            self._root = self.root()
        with self.changed:
            self.state = state
            self.changed.notify_all()

    def close(self) -> None:
        """End the registrations and make readers' descriptors stale. The caller keeps the tensors. Idempotent."""
        with self.changed:
            self.generation += 1
            handles = self._into
            self._handles = []
            self._into = []
            self.state = "draining"
            self.changed.notify_all()
        # Outside the lock: ending a registration may take as long as a read that is under way.
        _close(handles)

    def move_out(self, tier: str) -> None:
        """Drop the references to the memory, since a tier has the same bytes now. Call `close` first."""
        with self._digesting, self.changed:
            self.rows = []
            self.place = place_rows([])
            self.tier = tier
            self.state = "whole"

    def move_in(self, rows: Sequence[torch.Tensor], arenas: Sequence[Arena]) -> None:
        """Take memory that has all bytes again. It must be registered before others can read it."""
        with self._digesting, self.changed:
            self.rows = list(rows)
            self.place = place_rows(rows, arenas)
            self.tier = ""
            self.state = "whole"

    def log_after(self, serial: int, wait_s: float) -> LogReply:
        """Return the chunks verified since `serial`, waiting at most `wait_s`; a serial past the end starts at 0."""
        deadline = time.monotonic() + wait_s
        with self.changed:
            while serial == self._num_logged and self.state == "filling" and self.damage is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self.changed.wait(left)
            # A serial past the end is of a life before: the reader starts again.
            new = self._log[serial if serial <= self._num_logged else 0 : self._num_logged]
            leaves = self.leaves[self.layout.chunks.leaves_of(new)]
            return LogReply(
                generation=self.generation,
                serial=self._num_logged,
                state=self.state if self.damage is None else "damaged",  # type: ignore[arg-type]
                chunks=new.astype("<u4").tobytes(),
                leaves=leaves.astype("<u8", copy=False).tobytes(),
            )

    def status(self) -> HoldingState:
        """Return the state to report to the hub; without chunks if the bytes are only in the tier `source`."""
        with self.changed:
            is_away = self.tier == SOURCE
            is_damaged = self.damage is not None and not is_away
            return HoldingState(
                key=self.key,
                identity=self.identity,
                num_chunks=self.layout.chunks.num_chunks,
                nbytes=self.layout.nbytes,
                have=() if is_away or is_damaged else to_ranges(np.flatnonzero(self.have)),
                claims=self.claims,
                silent_s=self.silent_s,
                state="filling" if is_away else "draining" if is_damaged else self.state,  # type: ignore[arg-type]
                num_readers=self.num_readers,
                max_readers=self.max_readers,
                parent=self.parent,
                second_parent=self.second_parent,
                device=str(self.device),
                device_id=self._device_id,
                link=self._link,
                path=self.path[:1024],
                why=self.why[:1024],
                gb_per_s=self.gb_per_s,
                kept=self.kept,
                tier=self.tier,
                revision=self._root,
            )


def _close(handles: Sequence[dict[str, Handle]]) -> None:
    for by_transport in handles:
        for handle in by_transport.values():
            handle.close()
