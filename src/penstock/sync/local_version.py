"""The memory that one rank serves: its registration, its layout, the version in it, and the rows that are ready.

In: a layout and the memory behind it; each version as it begins, rows as they become ready. Out: the map that peers
read by; digests of strips of the bytes as they are, once these are ready; the newest version, for peers that wait.
Not here: servers and grants (`peer`), answering peers (`request_handler`), the moment of a publish
(`publish.publisher`), reading (`receive.transfer`).

    fence() --bytes may change--> begin(v) --rows are filled--> ready(rows) ... --> fence()
    a reader: map() -> digests(strips), which waits for their rows -> read -> same generation still: the bytes are of v

`Regions` counts one range of offsets over all regions of a rank, as layouts do. A `Digester` computes digests again for
every version, and keeps the tables of strips on the device. For a snapshot in host memory (`Foreseen`) the device
computes them while it copies: a host core digests 7 GB/s, and the copy runs at 55 GB/s.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
import torch
from blake3 import blake3
from msgspec import Meta

from penstock.cuda.events import is_passed, record_events
from penstock.digest.cuda import SCRATCH_BYTES, StripTable, plan_strips, warm_up
from penstock.digest.strip import Strips, memory_at, strip_digests
from penstock.errors import ConfigError, DestinationError, DeviceOutOfMemory, PlanError, StaleDescriptor
from penstock.hub.messages import FleetDecision, prepare
from penstock.lifecycle import Closing
from penstock.plan.layout import Layout
from penstock.sync.messages import NewsReply, PackReply
from penstock.sync.packer import Packer
from penstock.transport.choose import Links
from penstock.transport.protocol import Handle, Memory, encode
from penstock.types import I64, U64

MAX_LEAVES = 1 << 20
"""Leaves whose tables are kept on a device: they cover 256 GiB of strips, and their tables take 0.4 GB."""


class Digester:
    """The computation of strip digests on one device, or on the host.

    Args:
        device: the device of the memory.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        # Held while launches are queued: the scratch memory and the tables are shared.
        self._lock = threading.Lock()
        # The least recently used first.
        self._tables: OrderedDict[bytes, StripTable] = OrderedDict()
        self._num_leaves = 0
        self._scratch: torch.Tensor | None = None
        # A higher priority than reads: kernels of a read wait for the link and occupy multiprocessors meanwhile, so
        # that digests behind them would run at the speed of the link.
        self._stream = torch.cuda.Stream(device, priority=-1) if self._device.type == "cuda" else None

    def digests(self, memory: Memory, strips: Strips, *, after: Sequence[torch.cuda.Event] = ()) -> U64:
        """Return the digest of each strip; offsets count from the memory's start, and were checked by the caller.

        Args:
            after: events that the device must have passed before it reads the memory.

        Cost: on a device, numpy over the leaves the first time; later some launches and a wait for them. Calls of
            several threads are queued one behind the other.
        """
        if self._stream is None:
            return strip_digests(memory_at(memory.address, memory.nbytes), strips)
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # This stream does not see the kernels that fill the memory: without the events it would digest old bytes.
            for event in after:
                self._stream.wait_event(event)
            on_device = self._table(memory, strips).digest()
            on_host = torch.empty(len(on_device), dtype=torch.int64, pin_memory=True)
            on_host.copy_(on_device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        # Outside the lock: another thread may queue its launches while the device works on these.
        done.synchronize()
        return np.asarray(on_host.numpy()).view(np.uint64)

    def warm_up(self) -> None:
        """Load the kernels of a device's digests; where they must be compiled first, this takes seconds."""
        if self._stream is None:
            return
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            warm_up(self._device)
            # Strips with gaps are packed by a kernel of their own before they are digested.
            memory, scratch = torch.zeros(2, 1024, dtype=torch.uint8, device=self._device)
            at, run_bytes, num_rows, pitch = np.array([[0], [16], [8], [32]])
            gapped = Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
            plan_strips(memory.data_ptr(), gapped, self._device, scratch).digest()
        self._stream.synchronize()

    def _table(self, memory: Memory, strips: Strips) -> StripTable:
        """Return the strips' table on the device, made at their first request."""
        # Keyed by content, not by identity: each request decodes its strips into new arrays.
        key = blake3(memory.address.to_bytes(8, "little"))
        for column in (strips.at, strips.run_bytes, strips.num_rows, strips.pitch):
            key.update(np.ascontiguousarray(column).view(np.uint8).data)
        name = key.digest()
        table = self._tables.get(name)
        if table is None:
            # Only strips with gaps need scratch memory. One per device is enough: all digests run on one stream, in
            # order.
            if self._scratch is None and not strips.is_packed().all():
                self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self._device)
            scratch = torch.empty(0, device=self._device) if self._scratch is None else self._scratch
            table = self._tables[name] = plan_strips(memory.address, strips, self._device, scratch)
            self._num_leaves += len(table.leaves)
            while self._num_leaves > MAX_LEAVES and len(self._tables) > 1:
                self._num_leaves -= len(self._tables.popitem(last=False)[1].leaves)
        self._tables.move_to_end(name)
        return table


def digesters_of(memories: Iterable[Memory]) -> dict[str, Digester]:
    """Return one digester for each device of the memories."""
    return {name: Digester(name) for name in {memory.device for memory in memories}}


class Foreseen:
    """Digests of a host copy: strips requested of one version are digested on the device while the next is copied.

    Args:
        live: the device memory that is copied.
        digester: the digester of its device.
    """

    def __init__(self, live: Memory, digester: Digester) -> None:
        self._live = live
        self._digester = digester
        self._lock = threading.Lock()
        # Strips by the bytes of their four columns: requested of this version, and digested of it.
        self._requested: set[bytes] = set()
        self._known: dict[bytes, int] = {}

    def look(self, stall_s: float) -> None:
        """Digest on the device the strips requested since the last call; leave them to the host where that fails.

        Args:
            stall_s: how long to wait for the work queued on the device's current stream: the copy waits for it too, and
                reports the error.

        Order: during the copy: after the work queued on the device's current stream, before the live bytes change.
        """
        # The known digests are of the version before and must go, whatever happens below.
        with self._lock:
            requested = sorted(self._requested)
            self._requested = set()
            self._known = {}
        if not requested:
            return
        # The optimizer's step may still be queued: a digest before it would be of the old bytes.
        if self._live.device != "cpu":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._live.device))
            if not is_passed(event, stall_s):
                return
        at, run_bytes, num_rows, pitch = np.frombuffer(b"".join(requested), np.int64).reshape(-1, 4).T
        strips = Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
        try:
            digests = self._digester.digests(self._live, strips)
        except torch.OutOfMemoryError as error:
            message = (
                f"not enough memory on {self._live.device} for digests; the host computes them, which is slow: {error}"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return
        with self._lock:
            self._known = dict(zip(requested, digests.tolist(), strict=True))

    def warm_up(self) -> None:
        """See `Digester.warm_up`."""
        self._digester.warm_up()

    def digests(self, memory: Memory, strips: Strips, *, after: Sequence[torch.cuda.Event] = ()) -> U64:
        """See `Digester.digests`; `memory` is the copy. The host digests strips that were not requested before."""
        rows = np.stack([strips.at, strips.run_bytes, strips.num_rows, strips.pitch], axis=1)
        names = [row.tobytes() for row in rows]
        with self._lock:
            self._requested.update(names)
            known = [self._known.get(name) for name in names]
        out = np.array([digest or 0 for digest in known], np.uint64)
        missing = np.flatnonzero([digest is None for digest in known])
        if len(missing):
            out[missing] = strip_digests(memory_at(memory.address, memory.nbytes), strips[missing])
        return out


class Regions(Closing):
    """Registered memory; a context manager.

    Args:
        memories: in the order of the layout's regions; kept alive.
        links: the transports that register them.
        foreseen: digesters of the first memories, which are copies; the other memories are digested where they are.

    Raises:
        ConfigError: no transport reaches one of the memories; none stays registered.
    """

    def __init__(self, memories: Sequence[Memory], links: Links, *, foreseen: Sequence[Foreseen] = ()) -> None:
        self.memories = tuple(memories)
        self.links = links
        # The first offset of each region, and the end of the last.
        self.first: I64 = np.cumsum([0, *(memory.nbytes for memory in self.memories)], dtype=np.int64)
        of_device = digesters_of(self.memories)
        others = (of_device[memory.device] for memory in self.memories[len(foreseen) :])
        self._digesters: tuple[Digester | Foreseen, ...] = (*foreseen, *others)
        # For each region by transport: registrations that peers read, and handles to read into.
        self._handles: list[dict[str, Handle]] = []
        self._into: list[dict[str, Handle]] = []
        try:
            for memory in self.memories:
                self._handles.append(links.register(memory))
                self._into.append(links.register_into(memory, self._handles[-1], is_repeated=True))
        except BaseException:
            # After an interrupt too: a registration that stays keeps the memory alive and readable.
            self.close()
            raise

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the bytes of each region."""
        return tuple(memory.nbytes for memory in self.memories)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all regions together."""
        return int(self.first[-1])

    def handles(self, region: int) -> dict[str, Handle]:
        """Return the handles for reading into a region, by transport: registrations, and fill-only handles."""
        return self._into[region]

    def descriptors(self) -> tuple[dict[str, bytes], ...]:
        """Return the encoded descriptors by which a peer reads each region, by transport."""
        return tuple({name: encode(handle.descriptor) for name, handle in handles.items()} for handles in self._handles)

    def fence(self) -> None:
        """Make every descriptor of the regions stale. Order: before a byte changes."""
        for handles in self._handles:
            for handle in handles.values():
                handle.fence()

    def warm_up(self) -> None:
        """Load the kernels of the digests, so that the first of them does not wait for it."""
        for digester in dict.fromkeys(self._digesters):
            digester.warm_up()

    def digests(self, strips: Strips, *, after: Sequence[torch.cuda.Event] = ()) -> U64:
        """Return the digest of each strip of the bytes as they are now.

        Args:
            strips: offsets over all regions.
            after: events that the device must have passed before it reads the bytes.

        Raises:
            PlanError: a strip lies outside the regions, or crosses the edge between two.

        Cost: waits for the device, on a stream of its own; calls of several threads are queued one behind the other.
        """
        strips.check(self.nbytes)
        region = locate(self.first, strips.at, strips.stop)
        out = np.empty(len(strips), np.uint64)
        for index in np.unique(region).tolist():
            memory, mine = self.memories[index], np.flatnonzero(region == index)
            some = strips[mine]
            here = Strips(
                at=some.at - self.first[index], run_bytes=some.run_bytes, num_rows=some.num_rows, pitch=some.pitch
            )
            out[mine] = self._digesters[index].digests(memory, here, after=after)
        return out

    def close(self) -> None:
        """End the registrations; readers' descriptors become stale. The memory stays with its owner. Idempotent."""
        # `_into` has the registrations too; closing a handle twice does nothing.
        handles = [*self._into, *self._handles]
        self._handles = []
        self._into = []
        for by_transport in handles:
            for handle in by_transport.values():
                handle.close()


def locate(first: I64, start: I64, stop: I64) -> I64:
    """Return the region of each span of bytes; `first` has the start of each region, and the end of the last.

    Raises:
        PlanError: a span lies outside the regions, or crosses the edge between two.
    """
    # "right" skips empty regions, which end at the offset where they start.
    region: I64 = np.searchsorted(first[1:], start, side="right")
    wrong = (start < 0) | (stop > first[np.minimum(region + 1, len(first) - 1)])
    if wrong.any():
        i = int(wrong.argmax())
        raise PlanError(f"bytes [{start[i]}, {stop[i]}) lie in no single region of {np.diff(first).tolist()} bytes")
    return region


# `settle` runs inside `publish`, before receivers hear of the version: a longer sleep would delay all of them.
_NAP_S = 0.0002


MAX_METADATA_KEYS = 16
MAX_METADATA_CHARS = 64 << 10
"""Limits of the texts that a version carries: each source sends them with its map. An adapter's configuration, the
largest of them so far, takes 1 to 2 KiB; one that names each of 1,000 modules takes 40 KiB."""


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise ConfigError unless these texts may go with a version."""
    for key, text in metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ConfigError(f"metadata of a version are texts by name, not {key!r}: {type(text).__name__}")
        if len(key) > MAX_METADATA_CHARS or len(text) > MAX_METADATA_CHARS:
            message = f"metadata {key[:64]!r} of a version has {len(text)} characters"
            raise ConfigError(message, hint=f"at most {MAX_METADATA_CHARS} are sent; publish a tensor instead")
    if len(metadata) > MAX_METADATA_KEYS:
        raise ConfigError(f"a version carries at most {MAX_METADATA_KEYS} metadata, not {len(metadata)}")


_Text = Annotated[str, Meta(max_length=MAX_METADATA_CHARS)]


class VersionMap(msgspec.Struct, frozen=True, kw_only=True):
    """The descriptors by which a peer reads one generation of a rank's memory."""

    member: str
    version: int
    generation: int
    sizes: tuple[int, ...]
    """Bytes of each region."""
    regions: tuple[dict[str, bytes], ...]
    """The encoded descriptors of each region, by transport."""
    is_ready: bool = False
    """Whether all rows were ready when the map was made: bytes may be read before their digests are requested."""
    metadata: Annotated[dict[_Text, _Text], Meta(max_length=MAX_METADATA_KEYS)] = {}
    """Texts that the trainer published with the version."""
    pack_buffer_bytes: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Most bytes of short runs that it packs for one request (`LocalVersion.pack`); 0: it packs none."""


prepare(VersionMap)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A source's reply about strips: their digests, or None while their bytes are not ready."""

    digests: U64 | None
    num_ready: int
    """Rows ready in this version so far; while it grows, the source makes progress."""


class LocalVersion:
    """The memory of one rank and its version. Used by any number of threads; a context manager by its `close`.

    `fence`, `begin` and `ready` are called by the owner of the memory; the others by threads of the server.

    Attributes:
        regions: the memory, registered.
        version: the version that the memory has, or is being filled with; None between a fence and the next `begin`.
        generation: changes with every fence; maps from before a fence are stale.
        changed: guards the version and its rows, and is notified of every change.
        packer: the buffers into which short runs are packed; None: there are none.

    Args:
        layout: rows that lie in `memories`.
        memories: the layout's regions, in order.
        links: the transports of this process.
        foreseen: see `Regions`.
        pack_bytes: bound of the memory of one device into which short runs are packed; 0: none are.

    Raises:
        PlanError: the layout is invalid, or describes other regions.
        ConfigError: no transport reaches a region.
    """

    def __init__(
        self,
        layout: Layout,
        memories: Sequence[Memory],
        links: Links,
        *,
        foreseen: Sequence[Foreseen] = (),
        pack_bytes: int = 0,
    ) -> None:
        layout.check()
        if layout.regions != tuple(memory.nbytes for memory in memories):
            raise PlanError(f"{layout.member}: the layout's regions differ from the memory's")
        self.layout = layout
        self.regions = Regions(memories, links, foreseen=foreseen)
        self.packer = Packer(links, pack_bytes) if pack_bytes else None
        self.version: int | None = None
        self.metadata: Mapping[str, str] = {}
        # Not the version alone: after a fence the same version may begin again, and a read across the fence is void.
        self.generation = 0
        self.changed = threading.Condition()
        self._rows = _RowSpans(layout)
        self._is_ready = np.zeros(len(layout.names), bool)
        self._not_ready: I64 = np.zeros(0, np.int64)
        # Recorded behind the kernels that fill rows; readers wait for them.
        self._events: list[torch.cuda.Event] = []
        self._is_closed = False

    @property
    def num_ready(self) -> int:
        """Return the number of rows that are ready in this version."""
        return int(self._is_ready.sum())

    def fence(self) -> None:
        """Make every map stale; there is no version until `begin`. Order: before a byte changes."""
        with self.changed:
            self._check_open()
            # Descriptors first: a one-sided read involves no thread of this process, and notices the fence only
            # because the transport checks the generation after its bytes. From here on no read can pass that check.
            self.regions.fence()
            # The buffers have bytes of this version too, and readers must not use them longer than the others.
            if self.packer is not None:
                self.packer.fence()
            self.generation += 1
            self.version = None
            self._is_ready[:] = False
            self._events.clear()
            # Threads that wait for rows of the version must raise StaleDescriptor now, not at their deadline.
            self.changed.notify_all()

    def begin(self, version: int, metadata: Mapping[str, str] | None = None) -> None:
        """Start a version: bytes written from now on belong to it, and no row of it is ready yet.

        Args:
            version: its number.
            metadata: texts that receivers get before they read it.

        Raises:
            PlanError: the memory has another version that was not fenced.
        """
        with self.changed:
            self._check_open()
            if self.version is not None:
                raise PlanError(
                    f"cannot begin version {version}: the memory has version {self.version}",
                    hint="fence() ends a version",
                )
            self.version = version
            # In the map and not in a message of its own: a receiver then has the texts of the very generation it reads.
            self.metadata = dict(metadata or {})
            self._count()
            self.changed.notify_all()

    def ready(self, rows: I64 | Sequence[int] | None = None, *, is_written: bool = False) -> None:
        """Mark rows of the layout (None: all) as filled with the version's bytes, so that readers may read them.

        Args:
            is_written: the device has passed the kernels that fill them. Else readers wait for all that is queued on
                the current stream.

        Order: after the kernels that fill them were queued on the current stream.
        """
        with self.changed:
            self._check_open()
            if self.version is None:
                raise PlanError("cannot mark rows as ready: no version was begun", hint="begin() one")
            self._is_ready[slice(None) if rows is None else np.asarray(rows, np.int64)] = True
            if not is_written:
                # The rows are ready for the host, not for the device: the kernels that fill them may still be queued.
                # Digests, and through them reads, wait for these events instead of a synchronize here, which would
                # stall the trainer. Finished events are dropped, else a version of many buckets collects hundreds.
                self._events = [pending for pending in self._events if not pending.query()]
                self._events += record_events({memory.device for memory in self.regions.memories} - {"cpu"})
            self._count()
            self.changed.notify_all()

    def settle(self, stall_s: float) -> None:
        """Return once the device has filled the rows that are ready, or after `stall_s`: readers wait for it too."""
        deadline = time.monotonic() + stall_s
        while time.monotonic() < deadline:
            # The lock is not kept while this sleeps: peers ask for maps and digests meanwhile.
            with self.changed:
                if all(event.query() for event in self._events):
                    return
            time.sleep(_NAP_S)

    def _count(self) -> None:
        # A running sum over the rows by offset: whether a span of rows has one that is not ready is then one
        # subtraction, also for millions of strips.
        self._not_ready = np.cumsum(np.append(False, ~self._is_ready[self._rows.order]), dtype=np.int64)

    def map(self) -> VersionMap:
        """Return the map by which peers read this generation. StaleDescriptor while there is no version."""
        with self.changed:
            self._check_open()
            if self.version is None:
                raise StaleDescriptor("this rank has no version at the moment", uri=self.layout.member)
            return VersionMap(
                member=self.layout.member,
                version=self.version,
                generation=self.generation,
                sizes=self.regions.sizes,
                regions=self.regions.descriptors(),
                is_ready=not self._not_ready[-1] and all(event.query() for event in self._events),
                metadata=dict(self.metadata),
                pack_buffer_bytes=0 if self.packer is None else self.packer.buffer_bytes,
            )

    def digests(self, strips: Strips, *, version: int, generation: int, wait_s: float) -> Answer:
        """Return the digest of each strip, once every row that it may touch is ready; None after `wait_s`.

        Args:
            strips: offsets as in the layout.
            version, generation: of the caller's map; the digests are of these, or there are none.
            wait_s: how long to wait for rows; call again for as long as `num_ready` grows.

        Raises:
            StaleDescriptor: the memory has another version or generation, before or after the bytes were digested.
            PlanError: a strip lies outside the memory.
        """
        # They come from another process: offsets outside would digest memory that is not on offer.
        strips.check(self.regions.nbytes)
        events = self._wait_ready(strips, version, generation, time.monotonic() + wait_s)
        if events is None:
            return Answer(digests=None, num_ready=self.num_ready)
        num_ready = self.num_ready
        # Without the lock: a digest takes milliseconds, and a fence must not wait for it. A fence that came meanwhile
        # shows in the generation below, and digests of mixed bytes are thrown away.
        digests = self.regions.digests(strips, after=events)
        with self.changed:
            self._check(version, generation)
        return Answer(digests=digests, num_ready=num_ready)

    def pack(self, strips: Strips, *, version: int, generation: int, wait_s: float) -> PackReply:
        """Pack strips of one region into a buffer once their rows are ready, and let the caller read it.

        Args:
            strips: offsets as in the layout; at most `Packer.buffer_bytes` together.
            version, generation: of the caller's map.
            wait_s: how long to wait for rows and for a buffer; call again for as long as `PackReply.progress` grows.

        Raises:
            StaleDescriptor: the memory has another version or generation, before or after the bytes were packed.
            PlanError: a strip lies outside the memory, in another region than the first, or they are too many.
        """
        strips.check(self.regions.nbytes)
        packer = self.packer
        region = np.unique(locate(self.regions.first, strips.at, strips.stop))
        # By Python's integers: the sum of many hostile lengths could wrap to a small number.
        if packer is None or len(region) != 1 or sum(strips.nbytes.tolist()) > packer.buffer_bytes:
            room = 0 if packer is None else packer.buffer_bytes
            raise PlanError(f"{len(strips)} strips of {len(region)} regions cannot be packed into {room} bytes")
        deadline = time.monotonic() + wait_s
        events = self._wait_ready(strips, version, generation, deadline)
        if events is None:
            return PackReply(progress=self._progress(packer))
        memory = self.regions.memories[int(region[0])]
        try:
            buffer = packer.take(memory.device, deadline - time.monotonic())
        except (ConfigError, DeviceOutOfMemory, DestinationError) as error:
            # The reader goes on without: its report says why.
            return PackReply(why=error.message, progress=self._progress(packer))
        if buffer is None:
            return PackReply(progress=self._progress(packer), is_full=True)
        first = int(self.regions.first[int(region[0])])
        here = Strips(at=strips.at - first, run_bytes=strips.run_bytes, num_rows=strips.num_rows, pitch=strips.pitch)
        try:
            packer.fill(buffer, memory, here, events)
            with self.changed:
                # As for digests: bytes that were packed across a fence are of two versions. In one step with the grant,
                # so that a fence finds either no lease or one that it ends.
                self._check(version, generation)
                regions, lease = packer.grant(buffer)
        except (DeviceOutOfMemory, DestinationError) as error:
            packer.give_back(buffer)
            return PackReply(why=error.message, progress=self._progress(packer))
        except BaseException:
            packer.give_back(buffer)
            raise
        return PackReply(regions=regions, lease=lease, progress=self._progress(packer))

    def hold_packed(self, keep: Sequence[str], release: Sequence[str]) -> None:
        """Extend the leases of buffers, and end others; see `Packer.hold`."""
        if self.packer is not None:
            self.packer.hold(keep, release)

    def _progress(self, packer: Packer) -> int:
        return self.num_ready + packer.num_packed

    def _wait_ready(
        self, strips: Strips, version: int, generation: int, deadline: float
    ) -> tuple[torch.cuda.Event, ...] | None:
        """Wait until every row that strips may touch is ready; return the events that the device must have passed.

        Returns:
            None: not before the deadline.

        Raises:
            StaleDescriptor: the memory has another version or generation.
        """
        spans: tuple[I64, I64] | None = None
        with self.changed:
            self._check(version, generation)
            while self._not_ready[-1]:
                # Computed at most once, and not at all for a version that is complete, which is the usual case.
                spans = self._rows.spans(strips) if spans is None else spans
                if not (self._not_ready[spans[1]] - self._not_ready[spans[0]]).any():
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self.changed.wait(left)
                self._check(version, generation)
            return tuple(self._events)

    def _check(self, version: int, generation: int) -> None:
        self._check_open()
        if (version, generation) != (self.version, self.generation):
            current = "none" if self.version is None else f"version {self.version}"
            message = f"version {version} of generation {generation} is gone; this rank has {current} now"
            raise StaleDescriptor(message, uri=self.layout.member)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StaleDescriptor("this rank stopped serving its memory", uri=self.layout.member)

    def close(self) -> None:
        """End the registrations; the memory stays with its owner. Idempotent."""
        with self.changed:
            self._is_closed = True
            self.version = None
            self.generation += 1
            self.changed.notify_all()
        # Outside the lock, so that the threads woken above can leave while the registrations end.
        if self.packer is not None:
            self.packer.close()
        self.regions.close()


class _RowSpans:
    """The rows sorted by their first byte, to find all rows that a strip may touch."""

    def __init__(self, layout: Layout) -> None:
        span = np.array([form.span_bytes for form in layout.forms], np.int64)
        stop = layout.offset + span[layout.form]
        self.order: I64 = np.argsort(layout.offset, kind="stable")
        self._start: I64 = layout.offset[self.order]
        # Rows may interleave (column slices of one tensor), so how far any has reached, not where each stops.
        self._reach: I64 = np.maximum.accumulate(stop[self.order]) if len(stop) else stop

    def spans(self, strips: Strips) -> tuple[I64, I64]:
        """Return the range `[first, stop)` in `order` of the rows that each strip may touch."""
        first = np.searchsorted(self._reach, strips.at, side="right")
        stop = np.searchsorted(self._start, strips.stop, side="left")
        return first, np.maximum(first, stop)


class VersionStatus:
    """The newest version of a member, for peers that wait for the next one. Used by any number of threads.

    Attributes:
        now: the run and version, and whether it can be read here.
    """

    # Not part of `LocalVersion`: a subscriber has a status before it has memory, and keeps it when the memory changes.

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = NewsReply(run="", version=-1, is_open=False)

    @property
    def now(self) -> NewsReply:
        """Return the current status."""
        # No lock: the status is one immutable object, replaced as a whole.
        return self._now

    def post(self, run: str, version: int, *, is_open: bool, withdrawn: FleetDecision | None = None) -> None:
        """Set the status, and wake the threads that wait for a newer version."""
        with self._changed:
            self._now = NewsReply(run=run, version=version, is_open=is_open, withdrawn=withdrawn)
            self._changed.notify_all()

    def wait(self, after: int, wait_s: float) -> NewsReply:
        """Return the status once its version, or one that was withdrawn, is above `after`, or after `wait_s`."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while self._newest() <= after and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._now

    def is_past(self, version: int) -> bool:
        """Return whether a version was begun, or withdrawn, or a later one was: it will not begin any more."""
        return self._newest() >= version

    def _newest(self) -> int:
        withdrawn = self._now.withdrawn
        return self._now.version if withdrawn is None else max(self._now.version, withdrawn.version)
