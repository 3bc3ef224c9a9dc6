"""The sources of one version for a receiver: the link to each source, the reads from it, and their cost."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.digest.strip import Strips
from penstock.engine.run import StallTimer
from penstock.engine.threads import KeptThreads
from penstock.errors import Cancelled, DestinationError, NotFound, PenstockError, PlanError, SourceStalled
from penstock.holding.regions import VersionRegions
from penstock.plan.packing import NUM_BUFFERS, PACK_BYTES, batches, packable, packed_segments
from penstock.segments import Rectangles, Segments
from penstock.sync.local_version import Answer, LocalVersion, VersionMap
from penstock.sync.membership import Membership, SyncClient
from penstock.sync.messages import PackReply
from penstock.sync.receive.packed import BufferLeases, ShortRuns
from penstock.sync.receive.steps import Step
from penstock.timing import DEFAULT, Timing
from penstock.transfer.blame import SourceFailed
from penstock.transport.protocol import Descriptor, Handle, PendingRead, Reaching, Striding, Transport, wait_all
from penstock.types import U64
from penstock.waits import FutureCall

T = TypeVar("T")


class LocalLink:
    """A link to a `LocalVersion`. If `same_process` is False, read as from another process on this host."""

    same_host = True

    def __init__(self, local_version: LocalVersion, *, same_process: bool = True) -> None:
        self.local_version = local_version
        self.map = local_version.map()
        self.same_process = same_process
        self.member = local_version.layout.member

    def digests(self, strips: Strips, *, wait_s: float) -> Answer:
        """See `LocalVersion.digests`."""
        version, generation = self.map.version, self.map.generation
        return self.local_version.digests(strips, version=version, generation=generation, wait_s=wait_s)

    def pack(self, strips: Strips, *, wait_s: float, release: Sequence[str]) -> PackReply:
        """Release the leases in `release`, and pack strips. See `LocalVersion.pack`."""
        self.local_version.hold_packed((), release)
        version, generation = self.map.version, self.map.generation
        return self.local_version.pack(strips, version=version, generation=generation, wait_s=wait_s)

    def hold_packed(self, keep: Sequence[str], release: Sequence[str]) -> None:
        """See `LocalVersion.hold_packed`."""
        self.local_version.hold_packed(keep, release)


# Number of sources that are opened at once. Opening a source mostly waits for one round trip.
_AT_ONCE = 16


class PeerLink(msgspec.Struct, eq=False, dict=True):
    """A link to another member through the member's server. `same_host` is True if a Unix socket was reached."""

    same_process = False

    membership: Membership
    member: str
    map: VersionMap
    same_host: bool

    def __post_init__(self) -> None:
        self._channels: list[str] = []  # channels that no thread is using
        self._num_channels = itertools.count()

    def digests(self, strips: Strips, *, wait_s: float) -> Answer:
        """See `LocalVersion.digests`."""
        version, generation = self.map.version, self.map.generation
        return self._ask(lambda sync_client: sync_client.digests(strips, version, generation, wait_s))

    def pack(self, strips: Strips, *, wait_s: float, release: Sequence[str]) -> PackReply:
        """Release the leases in `release`, and pack strips. See `LocalVersion.pack`."""
        version, generation = self.map.version, self.map.generation
        return self._ask(lambda sync_client: sync_client.pack(strips, version, generation, wait_s, tuple(release)))

    def hold_packed(self, keep: Sequence[str], release: Sequence[str]) -> None:
        """See `LocalVersion.hold_packed`."""
        self._ask(lambda sync_client: sync_client.hold_packed(tuple(keep), tuple(release)))

    def _ask(self, question: Callable[[SyncClient], T]) -> T:
        # Use one channel per thread, because a reply may wait for rows. `list.pop` and `append` are atomic.
        try:
            channel = self._channels.pop()
        except IndexError:
            channel = f"digests {next(self._num_channels)}"
        try:
            return self.membership.ask(self.member, question, channel=channel)
        finally:
            self._channels.append(channel)


class LinkRequests(msgspec.Struct, eq=False, dict=True):
    """Parallel requests to members for their maps of a version. Leaving the block drops unused links."""

    membership: Membership
    members: Sequence[str]
    version: int
    stall_s: float
    threads: KeptThreads
    timing: Timing = DEFAULT

    def __post_init__(self) -> None:
        self._is_over = False
        self._links = {member: FutureCall(Future(), self._open, (member,)) for member in self.members}
        self._waiting = deque(self._links.values())

    def __enter__(self) -> Self:
        """Send the requests. Raise DestinationError if no thread can start."""
        for number in range(min(_AT_ONCE, len(self._links))):
            self.threads.start(self._open_all, "penstock-maps", is_needed=not number)
        return self

    def __exit__(self, *_: object) -> None:
        self._give_up()

    def take(self, members: Sequence[str], version: int) -> dict[str, SourceLink]:
        """Return links to these members with their maps of the version. Raise SourceFailed if a map is unavailable."""
        if version != self.version or self._links.keys() != set(members):
            self._give_up()
            with LinkRequests(self.membership, members, version, self.stall_s, self.threads, self.timing) as other:
                return {member: other._links[member].done.result() for member in members}
        return {member: self._links[member].done.result() for member in members}

    def _give_up(self) -> None:
        self._is_over = True
        for link in self._links.values():
            link.done.cancel()

    def _open_all(self) -> None:
        # Another thread may take the last request. The caller that takes a link raises its error.
        with contextlib.suppress(IndexError):
            while True:
                self._waiting.popleft().run()

    def _open(self, member: str) -> SourceLink:
        deadline = time.monotonic() + self.stall_s
        wait_s = self.timing.map_wait_s
        try:
            while True:
                try:
                    # Use a separate channel, because other requests must not wait for a version that has not begun.
                    version_map, is_on_host = self.membership.ask(
                        member,
                        lambda sync_client: (sync_client.version_map(self.version, wait_s), sync_client.is_on_host),
                        channel="map",
                    )
                    break
                except NotFound as error:
                    # Retry until the deadline. Publisher ranks begin a version within milliseconds of each other.
                    if self._is_over or time.monotonic() > deadline:
                        message = f"the source did not begin version {self.version} within {self.stall_s:g} s"
                        raise SourceStalled(message, uri=f"penstock:{member}") from error
                    # Pause, because a restarted hub, unlike a source, sends this reply without waiting.
                    time.sleep(self.timing.map_pause_s)
            return PeerLink(self.membership, member, version_map, same_host=is_on_host)
        except PenstockError as error:
            raise SourceFailed(member, error) from error


SourceLink = LocalLink | PeerLink
"""A link to one source of one version, while a receiver reads from it. Thread-safe."""


class SourceRead(msgspec.Struct, eq=False, dict=True):
    """The reads from one source during one run. Without `leases`, short runs are not packed. Thread-safe.

    Attributes:
        nbytes: number of bytes read so far.
        ready_s: seconds from requests for digests until their replies, summed.
    """

    link: SourceLink
    into: VersionRegions
    leases: BufferLeases | None = None
    timing: Timing = DEFAULT

    def __post_init__(self) -> None:
        self.member = self.link.member
        self.short_runs = ShortRuns()
        self.nbytes = 0
        self.ready_s = 0.0
        # Transport, descriptor, and the reason for using no nearer transport, by pair of regions.
        self._routes: dict[tuple[int, int], tuple[Transport, Descriptor, str]] = {}
        self._lock = threading.Lock()  # guards the routes and the counts

    @property
    def path(self) -> str:
        """Return the names of the transports in use, such as `shm`."""
        return "+".join(dict.fromkeys(transport.name for transport, _, _ in self._routes.values()))

    @property
    def why(self) -> str:
        """Return the reasons why no nearer transport is used."""
        return "; ".join(dict.fromkeys(why for _, _, why in self._routes.values() if why))

    def near_device(self, step: Step) -> str | None:
        """Return the local device that reads a step from a device on this host, or None."""
        # Check only the first read, because a step's regions are nearly always on one device.
        theirs, ours, _ = step.reads[0]
        offers = self.link.map.regions[theirs], self.into.handles(ours)
        is_near = self.link.same_host and all("cuda_ipc" in by_transport for by_transport in offers)
        return self.into.memories[ours].device if is_near else None

    def ask(self, strips: Strips, *, stall_s: float, is_over: Callable[[], bool]) -> U64:
        """Return the source's digests when they are ready. Raise SourceStalled, or Cancelled once `is_over` is True."""
        silence = StallTimer()
        while not is_over():
            reply = self.link.digests(strips, wait_s=min(self.timing.digest_wait_s, stall_s))
            if reply.digests is not None:
                if len(reply.digests) != len(strips):
                    message = f"the source sent {len(reply.digests)} digests for {len(strips)} strips"
                    raise SourceStalled(message, uri=self.member)
                return reply.digests
            # Any ready row counts as progress, because a source may quantise layer by layer.
            if silence.look(reply.num_ready) > stall_s:
                message = f"no row of the source became ready for {stall_s} s, after {reply.num_ready} rows"
                raise SourceStalled(message, uri=self.member)
        raise Cancelled("the transfer was cancelled")

    def read(self, step: Step, *, stall_s: float) -> tuple[PenstockError | None, bool]:
        """Read a step. When all reads have ended, return the first error and whether any byte was written."""
        packed: list[tuple[int, int, Rectangles]] = []
        failed, is_touched = wait_all(self._posting(step, packed), stall_s=stall_s)
        release: list[str] = []
        for theirs, ours, rows in packed:
            for batch in batches(rows, self.link.map.pack_buffer_bytes):
                # Use one buffer at a time. A step that waited for a second buffer could deadlock with itself.
                if failed is None:
                    try:
                        failed, was_touched = self._read_packed(theirs, ours, batch, release, stall_s=stall_s)
                    except PenstockError as error:
                        failed, was_touched = error, False
                    is_touched |= was_touched
        if release and failed is None:
            # Release the last buffer. After a failure, let the lease expire instead, because the source may hang.
            with contextlib.suppress(PenstockError):
                self.link.hold_packed((), release)
        return failed, is_touched

    def _posting(
        self, step: Step, packed: list[tuple[int, int, Rectangles]]
    ) -> Iterator[tuple[Transport, PendingRead]]:
        for theirs, ours, table in step.reads:
            transport, descriptor, _ = self._route(theirs, ours)
            into = self.into.handles(ours)[transport.name]
            rows = table
            # Pass rectangles if possible, because a table of all runs takes milliseconds per GiB.
            if isinstance(transport, Striding):
                yield transport, transport.post_rectangles(into, descriptor, rows)
                continue
            if self.leases is not None and self.into.links.reach(transport.name) == "network":
                is_packed = self._packable(rows)
                if is_packed.any():
                    packed.append((theirs, ours, rows[is_packed]))
                    rows = rows[~is_packed]
            if len(rows):
                yield transport, transport.post_read(into, descriptor, rows.segments())

    def _packable(self, rows: Rectangles) -> npt.NDArray[np.bool_]:
        offered = self.link.map.pack_buffer_bytes
        if not offered and packable(rows, PACK_BYTES // NUM_BUFFERS).any():
            self._note_unpacked(
                "the source has no memory to pack them (no publisher, an older release, or no `pack_bytes`)"
            )
        return packable(rows, 0 if self.short_runs.why else offered)

    def _note_unpacked(self, why: str) -> None:
        with self._lock:
            self.short_runs.why = self.short_runs.why or why

    def _read_packed(
        self, theirs: int, ours: int, batch: Rectangles, release: list[str], *, stall_s: float
    ) -> tuple[PenstockError | None, bool]:
        link, leases = self.link, self.leases
        assert leases is not None
        transport, descriptor, _ = self._route(theirs, ours)
        handle = self.into.handles(ours)[transport.name]
        reply = self._request_buffer(leases, theirs, batch, release, stall_s=stall_s)
        lease = ""
        if reply.regions is None:
            self._note_unpacked(reply.why)
        else:
            try:
                # Use the transport of this pair of regions, because the reader's memory is registered with it.
                transport, descriptor, _ = self.into.links.choose(
                    {transport.name: handle}, reply.regions, same_host=link.same_host, same_process=link.same_process
                )
                lease = reply.lease
            except PlanError as error:
                self._note_unpacked(error.message)
                release.append(reply.lease)
        # 64 MiB can be 262,144 runs of 256 bytes, so avoid one segment per run.
        segments = packed_segments(batch) if lease else batch.segments()
        if lease:
            leases.add(link, lease)
        try:
            outcome = wait_all(_posted(transport, handle, descriptor, segments), stall_s=stall_s)
        finally:
            if lease:
                leases.remove(link, lease)
                release.append(lease)
        if lease:
            with self._lock:
                counts = self.short_runs
                counts.packed_bytes += int(batch.nbytes.sum())
                counts.num_runs += int((batch.nbytes // batch.longest_runs()).sum())
                counts.num_reads += 1
        return outcome

    def _request_buffer(
        self, leases: BufferLeases, theirs: int, batch: Rectangles, release: list[str], *, stall_s: float
    ) -> PackReply:
        if self.short_runs.why:
            # Do not wait again after another read waited for a buffer in vain.
            return PackReply(why=self.short_runs.why)
        first = sum(self.link.map.sizes[:theirs])
        strips = Strips(at=batch.src + first, run_bytes=batch.run_bytes, num_rows=batch.num_rows, pitch=batch.src_pitch)
        silence = StallTimer()
        while not leases.is_over():
            reply = self.link.pack(strips, wait_s=min(self.timing.digest_wait_s, stall_s), release=tuple(release))
            release.clear()
            if reply.regions is not None or reply.why:
                return reply
            # If other readers hold the buffers, their use counts as progress.
            if silence.look(reply.progress) > stall_s:
                if reply.is_full:
                    # Fall back to reading run by run, which is slow but needs no buffer.
                    return PackReply(why=f"no buffer of the source was released for {stall_s} s")
                message = f"no row of the source became ready for {stall_s} s, so it could not pack any run"
                raise SourceStalled(message, uri=self.member)
        raise Cancelled("the transfer was cancelled")

    def _route(self, theirs: int, ours: int) -> tuple[Transport, Descriptor, str]:
        # Hold the lock, because two threads must not pin the same peer memory.
        with self._lock:
            route = self._routes.get((theirs, ours))
            if route is None:
                handles = self.into.handles(ours)
                route = self._choose(theirs, handles)
                if route[0].name == "pinned_shm" and isinstance(route[0], Reaching):
                    # Pinning a peer's memory can fail at first use, for example at the limit of locked memory.
                    try:
                        route[0].reach(handles["pinned_shm"].memory.device, route[1])
                    except DestinationError as error:
                        nearest = {name: handle for name, handle in handles.items() if name != "pinned_shm"}
                        transport, descriptor, why = self._choose(theirs, nearest)
                        route = transport, descriptor, f"{why}; pinned_shm: {error.message}".removeprefix("; ")
                self._routes[theirs, ours] = route
            return route

    def _choose(self, theirs: int, handles: Mapping[str, Handle]) -> tuple[Transport, Descriptor, str]:
        link = self.link
        return self.into.links.choose(
            handles, link.map.regions[theirs], same_host=link.same_host, same_process=link.same_process
        )


def _posted(
    transport: Transport, into: Handle, descriptor: Descriptor, segments: Segments
) -> Iterator[tuple[Transport, PendingRead]]:
    # Post in a generator, so that `wait_all` also catches errors from posting.
    yield transport, transport.post_read(into, descriptor, segments)


class TransferCounts:
    """The bytes from each source in one run, and the seconds of waiting, reading and digesting. Thread-safe.

    Attributes:
        nbytes: size of the part in bytes, including bytes that the receiver had already.
        moved_bytes: number of bytes read.
        peak_bytes: peak number of bytes that were being read or were not yet verified.
        seconds: duration of the completed run.
        wire_s: seconds during which at least one read was running.
    """

    def __init__(self, nbytes: int, reads: Iterable[SourceRead]) -> None:
        self.nbytes = nbytes
        self.reads = tuple(reads)
        self.moved_bytes = self.peak_bytes = self._num_reading = 0
        self.seconds = self.wire_s = self.ready_s = self.digest_s = self._since = 0.0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Count the time of the block as reading. Overlapping reads count once."""
        with self._lock:
            if not self._num_reading:
                self._since = time.perf_counter()
            self._num_reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_reading -= 1
                if not self._num_reading:
                    self.wire_s += time.perf_counter() - self._since

    def add(self, read: SourceRead, *, nbytes: int = 0, ready_s: float = 0.0, digest_s: float = 0.0) -> None:
        """Add bytes from this source, and seconds spent waiting for its digests and digesting here."""
        with self._lock:
            read.nbytes += nbytes
            read.ready_s += ready_s
            self.moved_bytes += nbytes
            self.ready_s += ready_s
            self.digest_s += digest_s

    def nbytes_by_path(self) -> dict[str, int]:
        """Return the bytes for each path, such as `shm <- MEMBER`."""
        return {f"{read.path} <- {read.member[:8]}": read.nbytes for read in self.reads if read.nbytes}

    @property
    def packed_bytes(self) -> int:
        """Return the number of bytes in short runs that sources packed."""
        return sum(read.short_runs.packed_bytes for read in self.reads)

    def packing(self) -> tuple[str, ...]:
        """Describe the short runs from sources on other hosts: how many were packed, and why others were not."""
        counts = [read.short_runs for read in self.reads]
        num_runs, num_reads = sum(each.num_runs for each in counts), sum(each.num_reads for each in counts)
        lines = [f"short runs read without packing: {why}" for why in dict.fromkeys(each.why for each in counts) if why]
        if num_runs:
            mean = self.packed_bytes // num_runs
            head = f"short runs packed at the sources: {self.packed_bytes} bytes in {num_runs} runs of {mean} bytes"
            lines.insert(0, f"{head} on average, read from {num_reads} buffers")
        return tuple(lines)
