"""The weights of one key in this process's memory: verified chunks, and the map and log for readers."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from penstock.errors import IntegrityError
from penstock.holding.holding import Holding
from penstock.holding.placement import PlacedChunks, device_id
from penstock.holding.regions import Regions
from penstock.holding.verified import SpotChecks, VerifiedChunks
from penstock.holding.weight_layout import WeightLayout
from penstock.hub.messages import HoldingMap, HoldingState, Identity, LogReply, Ranges, State
from penstock.memory import SOURCE
from penstock.memory.arena import Arena
from penstock.peer.host_links import nearest_link
from penstock.plan.schedule import to_ranges
from penstock.types import I64, U64


class FetchStatus(msgspec.Struct, kw_only=True):
    """The facts about a fetch for `penstock status`, which the fetch updates."""

    claims: Ranges = ()
    path: str = ""
    why: str = ""
    parent: str = ""
    second_parent: str = ""
    gb_per_s: float = 0.0
    silent_s: float = -1.0


class LocalWeights(Holding):
    """The weights of one key in this process's memory.

    Args:
        rows: bytes of each row in the layout, flat uint8, all on one device. This object keeps the rows alive.

    Attributes:
        memory: the chunks in memory, which are empty while a lower tier holds the bytes.
        kept: whether engines on this host may map the memory. `kept` is constant while the state is `whole`.
        damage: the error if verified bytes changed in memory. Once `damage` is set, no bytes may be read.
        tier: the lower tier that holds the bytes, or empty if `memory` holds the bytes.
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
        self.memory = PlacedChunks(layout, rows, arenas)
        super().__init__(Regions(self.memory.place.regions))
        self.identity = identity
        self.key = identity.key()
        self.layout = layout
        self.verified = VerifiedChunks(layout, leaves)
        self.fetch = FetchStatus()
        self.device = self.memory.device
        self._device_id = device_id(self.device)
        self._link = nearest_link(self._device_id)
        self.max_readers = max_readers
        self.num_readers = 0
        self.state = "filling"
        self.kept = False
        self.tier = ""
        self.damage: IntegrityError | None = None
        self._spot_checks = SpotChecks()

    @property
    def is_whole(self) -> bool:
        """Return whether every chunk is verified."""
        return bool(self.verified.have.all())

    def progress(self) -> tuple[int, int]:
        """Return the number of verified bytes and the total number of bytes."""
        return self.verified.nbytes, self.layout.nbytes

    def map(self, lease: str = "") -> HoldingMap:
        """Return the map for a peer. If `lease` is given, revocable descriptors expire with the lease."""
        chunks = self.layout.chunks
        return HoldingMap(
            key=self.key,
            generation=self.generation,
            leaf_bytes=chunks.leaf_bytes,
            chunk_bytes=chunks.chunk_bytes,
            num_chunks=chunks.num_chunks,
            regions=self.regions.descriptors(lease),
            row_region=self.memory.place.row_region.astype("<i4").tobytes(),
            row_offset=self.memory.place.row_offset.astype("<i8").tobytes(),
        )

    def record_digests(self, chunks: I64, leaves: U64, source: str) -> None:
        """Record one source's digests for chunks. See `VerifiedChunks.record`."""
        with self.lock:
            self.verified.record(chunks, leaves, source)

    def mark_verified(self, chunks: I64, leaves: U64) -> None:
        """Mark chunks as verified, with their leaf digests. From now on other members may read the chunks."""
        with self.lock:
            self.verified.add(chunks, leaves)
            self.wake()

    def spot_check(self, chance: random.Random) -> int | None:
        """Digest the next verified chunk again. Return the chunk's number if its bytes changed, else None."""
        with self.lock:
            chunk = self._spot_checks.next_chunk(self.verified.have, chance) if self.damage is None else None
        return chunk if chunk is not None and self.has_changed(chunk) else None

    def has_changed(self, chunk: int) -> bool:
        """Digest a chunk again. Return whether the chunk was verified and its bytes have changed."""
        chunks = np.array([chunk], np.int64)
        with self._spot_checks.digesting:
            with self.lock:
                generation, memory = self.generation, self.memory
                is_here = bool(memory.rows) and bool(self.verified.have[chunk])
            if not is_here:
                return False
            # Reading memory that torch has freed would crash this process.
            if not self.regions.are_there(memory.regions_of(chunks)):
                return True
            table = self.layout.chunks
            differing = table.differing(chunks, memory.digest(chunks), self.verified.leaves[table.leaves_of(chunks)])
        # A new generation means that the memory was released during the digest and may have been reused.
        return len(differing) > 0 and generation == self.generation

    def mark_damaged(self, chunk: int) -> IntegrityError:
        """Record for readers and the hub that a verified chunk changed in memory. Return the error."""
        row = int(self.layout.chunks.pieces(np.array([chunk], np.int64)).row[0])
        error = IntegrityError(
            f"chunk {chunk} of {self.identity.model!r} changed in memory after it was verified",
            uri=f"penstock:{self.key}",
            tensor=self.layout.table.names[row],
            hint="call fence() before you change, move or free weights. If it did not, test this host's memory",
        )
        with self.lock:
            self.damage = error
            self.fetch.why = error.message
            self.wake()
        return error

    def set_state(self, state: State) -> None:
        """Set the state and wake waiting readers."""
        # The root takes milliseconds, so compute it before acquiring the lock.
        if state == "whole":
            self.verified.keep_root()
        with self.lock:
            self.state = state
            self.wake()

    def _mark_closed(self) -> None:
        self.state = "draining"

    def move(self, memory: PlacedChunks, tier: str) -> None:
        """Use other memory with the same bytes, or drop the memory after a lower tier has copied the bytes.

        Call `close` before, and register the regions before other members read them.
        """
        with self._spot_checks.digesting, self.lock:
            self.memory = memory
            self.regions = Regions(memory.place.regions)
            self.tier = tier
            self.state = "whole"

    def log_after(self, serial: int, wait_s: float) -> LogReply:
        """Return the chunks verified since `serial`, or all chunks of a new log. Wait up to `wait_s` for a chunk."""
        deadline = time.monotonic() + wait_s
        with self.lock:
            self.wait_until(
                lambda: serial != self.verified.num_logged or self.state != "filling" or self.damage is not None,
                deadline,
            )
            new, leaves = self.verified.logged_after(serial)
            return LogReply(
                generation=self.generation,
                serial=self.verified.num_logged,
                state=self.state if self.damage is None else "damaged",  # type: ignore[arg-type]
                chunks=new.astype("<u4").tobytes(),
                leaves=leaves.astype("<u8", copy=False).tobytes(),
            )

    def status(self) -> HoldingState:
        """Return the state to report to the hub. If the bytes must be read from the source again, list no chunks."""
        with self.lock:
            fetch, is_away = self.fetch, self.tier == SOURCE
            is_damaged = self.damage is not None and not is_away
            return HoldingState(
                key=self.key,
                identity=self.identity,
                num_chunks=self.layout.chunks.num_chunks,
                nbytes=self.layout.nbytes,
                have=() if is_away or is_damaged else to_ranges(np.flatnonzero(self.verified.have)),
                claims=fetch.claims,
                silent_s=fetch.silent_s,
                state="filling" if is_away else "draining" if is_damaged else self.state,  # type: ignore[arg-type]
                num_readers=self.num_readers,
                max_readers=self.max_readers,
                parent=fetch.parent,
                second_parent=fetch.second_parent,
                device=str(self.device),
                device_id=self._device_id,
                link=self._link,
                path=fetch.path[:1024],
                why=fetch.why[:1024],
                gb_per_s=fetch.gb_per_s,
                kept=self.kept,
                tier=self.tier,
                revision=self.verified.known_root,
            )
