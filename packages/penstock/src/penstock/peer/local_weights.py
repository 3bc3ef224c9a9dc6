"""The weights of one key in this process's memory: verified chunks, and the map and log for readers.

The lock of `LocalWeights.changed` guards shared state. The lock `_digesting` is held while a chunk is digested, so that
the chunk's memory is not released. Code that needs both locks acquires `_digesting` before `changed`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import numpy as np
import torch

from penstock.digest.leaf import leaf_digests, revision
from penstock.errors import IntegrityError
from penstock.holding.placement import device_id, place_rows
from penstock.holding.regions import Regions, close_handles
from penstock.holding.weight_layout import WeightLayout
from penstock.hub.messages import HoldingMap, HoldingState, Identity, LogReply, State
from penstock.memory import SOURCE
from penstock.memory.arena import ALIGN_BYTES, Arena
from penstock.peer.host_links import nearest_link
from penstock.plan.schedule import to_ranges
from penstock.segments import Segments
from penstock.transport.choose import PeerLinks
from penstock.transport.protocol import Handle
from penstock.types import I64, U64, Bools


class LocalWeights:
    """The weights of one key in this process's memory.

    Args:
        rows: bytes of each row in the layout, flat uint8, all on one device. This object keeps the rows alive.

    Attributes:
        leaves: digest of each leaf. Without a manifest only the digests of chunks in `have` are valid.
        have: [num_chunks] bool, whether each chunk was verified.
        kept: whether engines on this host may map the memory. `kept` is constant while the state is `whole`.
        damage: the error if verified bytes changed in memory. Once `damage` is set, no bytes may be read.
        tier: the lower tier that holds the bytes, or empty if `rows` holds the bytes.
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
        self._regions = Regions(self.place.regions)
        self.has_manifest = leaves is not None
        self.leaves: U64 = np.zeros(layout.chunks.num_leaves, np.uint64) if leaves is None else leaves
        self.have: Bools = np.zeros(layout.chunks.num_chunks, bool)
        self.claims: tuple[tuple[int, int], ...] = ()
        self.max_readers = max_readers
        self.num_readers = 0
        # A fetch sets these fields for `penstock status`.
        self.path = ""
        self.why = ""
        self.parent = ""
        self.second_parent = ""
        self.gb_per_s = 0.0
        self.silent_s = -1.0
        # Readers compare the generation before and after a read, so that a read fails if the memory was reused.
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
        # With tiny chunks, the gap between two tensors may hold another chunk, which a joined read would overwrite.
        self._has_tiny_chunks = bool((layout.chunks.nbytes[:-1] < ALIGN_BYTES).any())
        self._digesting = threading.Lock()

    @property
    def is_whole(self) -> bool:
        """Return whether every chunk is verified."""
        return bool(self.have.all())

    def progress(self) -> tuple[int, int]:
        """Return the number of verified bytes and the total number of bytes."""
        return int(self.layout.chunks.nbytes[self.have].sum()), self.layout.nbytes

    def register(self, links: PeerLinks) -> None:
        """Register the regions with every transport that supports them, for `map` and for reads."""
        self._regions.register(links)

    def handles(self, region: int) -> dict[str, Handle]:
        """Return this process's registrations of a region for reads into the region, by transport name."""
        return self._regions.handles(region)

    def map(self, lease: str = "") -> HoldingMap:
        """Return the map for a peer. If `lease` is given, revocable descriptors expire with the lease."""
        chunks = self.layout.chunks
        return HoldingMap(
            key=self.key,
            generation=self.generation,
            leaf_bytes=chunks.leaf_bytes,
            chunk_bytes=chunks.chunk_bytes,
            num_chunks=chunks.num_chunks,
            regions=self._regions.descriptors(lease),
            row_region=self.place.row_region.astype("<i4").tobytes(),
            row_offset=self.place.row_offset.astype("<i8").tobytes(),
        )

    def take_back(self, lease: str) -> None:
        """Revoke the descriptors of a lease, for transports that support revocation."""
        self._regions.take_back(lease)

    def segments(self, chunks: I64, theirs_region: I64, theirs_offset: I64) -> dict[tuple[int, int], Segments]:
        """Return the segments to read from a peer for these chunks, keyed by the peer's region and the local region."""
        pieces = self.layout.chunks.pieces(chunks)
        src = theirs_offset[pieces.row] + pieces.start
        dst = self.place.row_offset[pieces.row] + pieces.start
        from_to = theirs_region[pieces.row] * len(self.place.regions) + self.place.row_region[pieces.row]
        joined = {}
        # The first call of `np.unique` imports numpy.ma, which would delay the first read by 8 to 40 ms.
        for pair in sorted(set(from_to.tolist())):
            rows = np.flatnonzero(from_to == pair)
            segments = Segments(src=src[rows], dst=dst[rows], nbytes=pieces.nbytes[rows])
            theirs, ours = divmod(pair, len(self.place.regions))
            # A joined read may overwrite padding in this process's arenas, but elsewhere the gap may hold a tensor.
            is_ours = isinstance(self.place.regions[ours].owner, Arena) and not self._has_tiny_chunks
            joined[theirs, ours] = segments.joined(padding_bytes=ALIGN_BYTES - 1 if is_ours else 0)
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

    def differing_chunks(self, chunks: I64, got: U64, wanted: U64) -> I64:
        """Return the chunks in which at least one leaf differs."""
        if np.array_equal(got, wanted):
            return chunks[:0]
        wrong = np.repeat(np.arange(len(chunks)), self.layout.chunks.leaf_counts(chunks))[got != wanted]
        differ: I64 = chunks[np.unique(wrong)]
        return differ

    def contradicting_chunks(self, chunks: I64, leaves: U64) -> I64:
        """Return the chunks for which a peer's digests contradict the manifest. Without a manifest, return none."""
        if not self.has_manifest:
            return chunks[:0]
        return self.differing_chunks(chunks, leaves, self.leaves[self.layout.chunks.leaves_of(chunks)])

    def record_digests(self, chunks: I64, leaves: U64, source: str) -> None:
        """Record one source's digests for chunks. Without a manifest, raise IntegrityError if two sources disagree."""
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
                        f"{other} and {source} report different digests for chunk {int(wrong[0])}",
                        hint="write a manifest with `penstock manifest`. Only a manifest shows which source is right",
                    )
                chunks, leaves = chunks[~is_known], leaves[np.repeat(~is_known, counts)]
            if len(chunks):
                self.leaves[self.layout.chunks.leaves_of(chunks)] = leaves
                self._source_index[chunks] = len(self._sources)
                self._sources.append(source)

    def mark_verified(self, chunks: I64, leaves: U64) -> None:
        """Mark chunks as verified, with their leaf digests. From now on other members may read the chunks."""
        with self.changed:
            # A slow source and its replacement may deliver the same chunk, but the log must list each chunk once.
            new = ~self.have[chunks]
            if not new.all():
                chunks, leaves = chunks[new], leaves[np.repeat(new, self.layout.chunks.leaf_counts(chunks))]
            self.leaves[self.layout.chunks.leaves_of(chunks)] = leaves
            self.have[chunks] = True
            self._log[self._num_logged : self._num_logged + len(chunks)] = chunks
            self._num_logged += len(chunks)
            self.changed.notify_all()

    def root(self) -> str:
        """Return the `w1-` revision, the root of all digests. The revision is final once every chunk is verified."""
        return self._root or revision(self.layout.table, self.layout.chunks.leaf_bytes, self.leaves)

    def check_revision(self, expected: str = "") -> None:
        """Raise IntegrityError unless the digests match the `w1-` revisions of the identity and the caller."""
        root = self.root()
        for named in (self.identity.revision, expected):
            if named.startswith("w1-") and not root.startswith(named):
                raise IntegrityError(f"the digests belong to revision {root}, not {named}", uri=f"penstock:{self.key}")
        # Digesting all leaves takes milliseconds, so store the root for `set_state`.
        self._root = root

    def spot_check(self, chance: random.Random) -> int | None:
        """Digest the next verified chunk again. Return the chunk's number if its bytes changed, else None."""
        with self.changed:
            verified = np.flatnonzero(self.have)
        if not len(verified) or self.damage is not None:
            return None
        # Members that start together should not check the same chunks at the same time.
        if self._checked_chunk >= 0:
            later = verified[verified > self._checked_chunk]
        else:
            later = verified[chance.randrange(len(verified)) :]
        self._checked_chunk = int(later[0] if len(later) else verified[0])
        return self._checked_chunk if self.has_changed(self._checked_chunk) else None

    def has_changed(self, chunk: int) -> bool:
        """Digest a chunk again. Return whether the chunk was verified and its bytes have changed."""
        chunks = np.array([chunk], np.int64)
        with self._digesting:
            with self.changed:
                generation, is_here = self.generation, bool(self.rows) and bool(self.have[chunk])
            if not is_here:
                return False
            # Reading memory that torch has freed would crash this process.
            if not self.place.is_there(self.layout.chunks.pieces(chunks).row.tolist()):
                return True
            got, wanted = self.digest(chunks), self.leaves[self.layout.chunks.leaves_of(chunks)]
        # A new generation means that the memory was released during the digest and may have been reused.
        return len(self.differing_chunks(chunks, got, wanted)) > 0 and generation == self.generation

    def mark_damaged(self, chunk: int) -> IntegrityError:
        """Record for readers and the hub that a verified chunk changed in memory. Return the error."""
        row = int(self.layout.chunks.pieces(np.array([chunk], np.int64)).row[0])
        error = IntegrityError(
            f"chunk {chunk} of {self.identity.model!r} changed in memory after it was verified",
            uri=f"penstock:{self.key}",
            tensor=self.layout.table.names[row],
            hint="call fence() before you change, move or free weights. If it did not, test this host's memory",
        )
        with self.changed:
            self.damage = error
            self.why = error.message
            self.changed.notify_all()
        return error

    def set_state(self, state: State) -> None:
        """Set the state and wake waiting readers."""
        # The root takes milliseconds, so compute it before acquiring the lock.
        if state == "whole":
            self._root = self.root()
        with self.changed:
            self.state = state
            self.changed.notify_all()

    def close(self) -> None:
        """End the registrations and invalidate the descriptors of readers. The tensors stay valid. Idempotent."""
        with self.changed:
            self.generation += 1
            handles = self._regions.detach()
            self.state = "draining"
            self.changed.notify_all()
        # A handle's `close` may wait for a running read, so do not hold the lock.
        close_handles(handles)

    def move_out(self, tier: str) -> None:
        """Drop the references to the memory after a lower tier has copied the bytes. Call `close` first."""
        with self._digesting, self.changed:
            self.rows = []
            self.place = place_rows([])
            self._regions = Regions(())
            self.tier = tier
            self.state = "whole"

    def move_in(self, rows: Sequence[torch.Tensor], arenas: Sequence[Arena]) -> None:
        """Use `rows`, to which the bytes were copied back. Call `register` before other members read the memory."""
        with self._digesting, self.changed:
            self.rows = list(rows)
            self.place = place_rows(rows, arenas)
            self._regions = Regions(self.place.regions)
            self.tier = ""
            self.state = "whole"

    def log_after(self, serial: int, wait_s: float) -> LogReply:
        """Return the chunks verified since `serial`, or all chunks of a new log. Wait up to `wait_s` for a chunk."""
        deadline = time.monotonic() + wait_s
        with self.changed:
            while serial == self._num_logged and self.state == "filling" and self.damage is None:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self.changed.wait(remaining)
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
        """Return the state to report to the hub. If the bytes must be read from the source again, list no chunks."""
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
