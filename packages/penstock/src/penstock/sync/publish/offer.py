"""The rows that a publisher rank offers, and the copy of their memory for snapshots."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from penstock.cuda.events import record_events, wait_events
from penstock.digest.strip import Strips
from penstock.engine.place import CudaRegistrar
from penstock.errors import BudgetTooSmall, PlanError
from penstock.holding.digester import PrecomputedDigests, digesters_of
from penstock.lifecycle import Closeable
from penstock.memory.arena import Arena, populate
from penstock.plan.layout import Layout
from penstock.plan.sync import layer_order
from penstock.sync.copy_plan import MemoryCopy, allocate_like, streams_of
from penstock.sync.local_version import LocalVersion
from penstock.sync.membership import Membership
from penstock.sync.publish.boundary_exchange import BoundaryExchange
from penstock.sync.publish.fill import fill
from penstock.sync.publish.transformed import Transformed, Transforms, choose, required_bytes
from penstock.sync.shards import ShardRow, regions_of
from penstock.transform.formats import format_of
from penstock.transport.choose import PeerLinks
from penstock.transport.protocol import Memory
from penstock.types import GIB, I64


class OfferOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options for a rank's `Offer`. See `publisher`."""

    copies: str | None
    """Where to copy the rows to, `device` or `cpu`. None means no copies."""
    transforms: Transforms | None
    """Formats of tagged rows. If None, serve only rows without a tag."""
    keep_plain: bool
    arena: bool
    memory_bytes: int | None
    """Limit in bytes for the copies and the transformed tensors together."""
    pack_bytes: int
    world_size: int


class Offer:
    """The rows that one rank serves. An offer is a context manager.

    Attributes:
        memories: the memory that a snapshot copies, including the tagged rows if the copy is in host memory.
        filled: regions of tagged rows that are not copied.
        is_copied: whether the tagged rows are filled and then copied.
    """

    def __init__(self, rows: Sequence[ShardRow], options: OfferOptions) -> None:
        transforms, copies, world_size = options.transforms, options.copies, options.world_size
        chosen = () if transforms is None else choose(transforms, rows)
        if transforms is not None and not chosen and world_size == 1:
            raise PlanError(f"no tensor can be transformed to {transforms!r}", hint="change the patterns or the tags")
        names = {choice.row.name for choice in chosen}
        self.plain = tuple(row for row in rows if options.keep_plain or row.name not in names)
        self.memories = regions_of(self.plain)
        nbytes, boundary_bytes = required_bytes(chosen)
        # The device quantises, so a snapshot on the host copies the tagged rows after the device has filled them.
        self.is_copied = copies == "cpu" and any(choice.row.tensor.device.type != "cpu" for choice in chosen)
        copied = (sum(memory.nbytes for memory in self.memories) if copies else 0) + nbytes * self.is_copied
        needed = copied + nbytes + boundary_bytes
        # Check the limit before allocating, so that a rejected publisher uses none of the trainer's memory.
        if options.memory_bytes is not None and needed > options.memory_bytes:
            message = (
                f"publishing needs {copied} bytes for copies, {nbytes} for transformed tensors and {boundary_bytes} "
                "for blocks at the edges of shards"
            )
            raise BudgetTooSmall(message, minimum_bytes=needed)
        self.transformed = Transformed(chosen)
        self.rows = (*self.plain, *self.transformed.rows)
        self.filled: tuple[Memory, ...] = regions_of(self.transformed.rows)
        if self.is_copied:
            self.memories = (*self.memories, *self.filled)
            self.filled = ()
        # A row may be offered in several formats, but the exchange needs it only once.
        blocked = {id(choice.row): choice.row for choice in chosen if choice.form.scaling != "none"}
        self._blocked = tuple(blocked.values())
        tags = () if transforms is None else (transforms,) if isinstance(transforms, str) else tuple(transforms)
        # Decide by the tags alone, because every rank must take part in the exchange, even without chosen rows.
        self._has_blocks = world_size > 1 and any(format_of(tag).scaling != "none" for tag in tags)
        self._boundary_exchange: BoundaryExchange | None = None
        self.seconds = 0.0

    @property
    def plain_rows(self) -> I64 | None:
        """Return the numbers of the rows that need no `fill`. None means all rows."""
        return np.arange(len(self.plain)) if self.transformed.rows else None

    @property
    def moved_bytes(self) -> int:
        """Return how many bytes were read from other ranks for the last version."""
        return 0 if self._boundary_exchange is None else self._boundary_exchange.moved_bytes

    def connect(self, sync: Membership, *, rank: int, world_size: int) -> None:
        """Join the boundary exchange of the ranks if a format quantises in blocks. Call this before `fill`."""
        if self._has_blocks:
            self._boundary_exchange = BoundaryExchange(
                sync, self._blocked, self.transformed.wants, is_first=rank == 0, world_size=world_size
            )

    def fill(self, version: int, epoch: str, ready: Callable[[I64], None], *, stall_s: float) -> None:
        """Transform the current parameters. Call `ready` with the numbers of the rows that became ready."""
        begun = time.perf_counter()
        exchange = self._boundary_exchange
        # Quantise inside the exchange, because other ranks read this rank's elements until all ranks are done.
        with contextlib.nullcontext() if exchange is None else exchange.exchanged(version, epoch):
            self.transformed.fill(lambda rows: ready(len(self.plain) + rows), stall_s=stall_s)
        self.seconds = time.perf_counter() - begun

    def close(self) -> None:
        """End the registrations and connections. Idempotent."""
        if self._boundary_exchange is not None:
            self._boundary_exchange.close()


COPY_BYTES = GIB
"""Maximum size of one copy on a device in bytes. At 2 TB/s it takes half a millisecond."""
GAP_BYTES = 256 << 10
"""Shorter gaps between rows are copied, because another copy would take as long. Source: `copy_plan.SHORT_BYTES`."""
MOST_PRECOMPUTED = 64
"""Maximum number of regions whose digests the device computes during the copy. Each takes half a millisecond."""


def _copy_batches(layout: Layout, dst: Sequence[Memory], src: Sequence[Memory]) -> Iterator[tuple[I64, MemoryCopy]]:
    first: I64 = np.cumsum([0, *(memory.nbytes for memory in src)], dtype=np.int64)
    span = np.array([form.span_bytes for form in layout.forms], np.int64)[layout.form]
    order = layer_order(layout.names)[0]
    order = order[layout.offset[order] + span[order] <= first[-1]]
    streams = streams_of(src)
    batch = (np.cumsum(span[order]) - span[order]) // COPY_BYTES
    # The first call of `np.unique` imports numpy.ma (see `LocalWeights.segments`).
    for number in sorted(set(batch.tolist())):
        rows = order[batch == number]
        yield rows, MemoryCopy(dst, src, _spans(layout.offset[rows], span[rows], first), streams)


def _spans(at: I64, nbytes: I64, first: I64) -> Strips:
    at, nbytes = at[nbytes > 0], nbytes[nbytes > 0]
    if not len(at):
        return Strips(at=at, run_bytes=at, num_rows=at, pitch=at)
    by_offset = np.argsort(at, kind="stable")
    at, stop = at[by_offset], np.maximum.accumulate((at + nbytes)[by_offset])
    region = np.searchsorted(first, at, side="right")
    fresh = np.ones(len(at), bool)
    fresh[1:] = (at[1:] > stop[:-1] + GAP_BYTES) | (np.diff(region) != 0)
    begin = at[fresh]
    size = stop[np.append(np.flatnonzero(fresh)[1:], len(at)) - 1] - begin
    return Strips(at=begin, run_bytes=size, num_rows=np.ones(len(begin), np.int64), pitch=size)


class VersionSnapshot(Closeable):
    """A copy of a rank's regions with the same layout. The snapshot is a context manager.

    Receivers read a device copy while it is made, layer by layer, and a host copy when it is complete.
    """

    def __init__(
        self,
        layout: Layout,
        live: Sequence[Memory],
        links: PeerLinks,
        *,
        address: str = "",
        on_host: bool = False,
        filled: Sequence[Memory] = (),
        pack_bytes: int = 0,
    ) -> None:
        self._pinned: list[tuple[CudaRegistrar, int]] = []
        self._precomputed: tuple[PrecomputedDigests, ...] = ()
        try:
            memories = [self._on_host(memory) for memory in live] if on_host else allocate_like(live)
            # The device digests the first regions in advance. A host core would take eight times as long as the copy.
            if on_host and len(live) <= MOST_PRECOMPUTED and all(memory.device != "cpu" for memory in live):
                digesters = digesters_of(live)
                self._precomputed = tuple(PrecomputedDigests(memory, digesters[memory.device]) for memory in live)
            copied = msgspec.structs.replace(layout, address=address)
            self.local_version = LocalVersion(
                copied, [*memories, *filled], links, precomputed=self._precomputed, pack_bytes=pack_bytes
            )
        except BaseException:
            self._unpin()  # pinned pages stay locked even after their memory is freed
            raise
        self._devices = sorted({memory.device for memory in live} - {"cpu"})
        self._copy = MemoryCopy(memories, live) if on_host else None
        self._batches = () if on_host else tuple(_copy_batches(layout, memories, live))

    def _on_host(self, memory: Memory) -> Memory:
        arena = Arena.allocate(max(memory.nbytes, 1))
        # Populate the pages first. Pinning would fault them one by one, which takes twice as long (`memory.arena`).
        populate(arena.address, arena.nbytes)
        if memory.device != "cpu" and memory.nbytes:
            registrar = CudaRegistrar(torch.device(memory.device))
            registrar.register(arena.address, arena.nbytes)
            self._pinned.append((registrar, arena.address))
        return Memory(address=arena.address, nbytes=memory.nbytes, owner=arena)

    def snapshot(
        self,
        version: int,
        *,
        rows: I64 | None = None,
        metadata: Mapping[str, str] | None = None,
        announce: Callable[[], None] = lambda: None,
        stall_s: float = 30.0,
    ) -> float:
        """Copy the live memory after the work queued on the current stream. Return how many seconds the copy took.

        Mark `rows` as ready. None means all rows. Call `announce` once, when readers may request the version.
        """
        self.local_version.fence()
        if self._copy is not None:

            def digest_requested() -> None:
                for digests in self._precomputed:
                    digests.look(stall_s)

            # Compute digests on the device while the copy engine moves the bytes to the host.
            seconds = self._copy.run(stall_s=stall_s, meanwhile=digest_requested)
            self.local_version.begin(version, metadata)
            self.local_version.ready(rows)
            announce()
            return seconds
        begun = time.perf_counter()
        # First wait for the queued training step, because receivers in direct mode pause engines at the announcement.
        wait_events(record_events(self._devices), stall_s, work="kernel queued before the snapshot")
        self.local_version.begin(version, metadata)
        announce()
        # Queue all copies now, because readers' requests would delay copies that are queued later.
        batches = [(rows, copy.queue) for rows, copy in self._batches]
        ready = partial(self.local_version.ready, is_written=True)
        fill(batches, ready, stall_s=stall_s, work="copy", num_ahead=len(batches))
        ready(rows)
        return time.perf_counter() - begun

    def close(self) -> None:
        """End the registrations and release the memory. Idempotent."""
        self.local_version.close()
        self._unpin()

    def _unpin(self) -> None:
        while self._pinned:
            registrar, address = self._pinned.pop()
            registrar.unregister(address)
