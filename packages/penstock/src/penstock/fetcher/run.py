"""A running fetch: reads chunks from upstreams and from storage, verifies them, and serves them to other members.

The hub chooses upstreams, and `assignment` chooses the chunks to read from each. The caller's thread assigns missing
chunks every `Timing.fetch_turn_s`, because the end of a pause (a limit, a probe) wakes no thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from functools import partial

from penstock.engine.run import LEAST_BYTES, Item, Run, RunState, StallTimer, guarded
from penstock.engine.trace import Trace
from penstock.errors import (
    Cancelled,
    HubUnavailable,
    IntegrityError,
    PenstockError,
    SourceStalled,
    SourceUnavailable,
)
from penstock.fetcher import assignment
from penstock.fetcher.assignment import Assignment
from penstock.fetcher.claim_loop import ClaimLoop
from penstock.fetcher.hub_poller import HubPoller
from penstock.fetcher.report import NEAREST, Provenance
from penstock.fetcher.storage_reader import StorageReader
from penstock.fetcher.upstream import Read, UpstreamReader
from penstock.fetcher.verify import ReceivedChunks, next_batch, verify
from penstock.hub.messages import Upstream
from penstock.peer.local_weights import LocalWeights
from penstock.peer.member import Member
from penstock.report import shares_text
from penstock.timing import Timing
from penstock.transfer.blame import ends_transfer
from penstock.transport.protocol import PendingRead, Stoppable, Transport, wait_all
from penstock.types import GB, I64
from penstock.waits import start_thread

READS_AT_ONCE = 6
PARTS_AT_ONCE = 2
"""Number of claims read from storage at once. See `storage_reader.LITTLE`."""
NUM_VERIFYING = 2


class FetchState(Enum):
    """The states of a fetch, in the order in which they occur. The fetch's ticket shows whether it succeeded."""

    NEW = auto()
    STARTED = auto()
    MOVING = auto()
    CLOSED = auto()


class FetchRun(Run):
    """A running fetch. Leaving the `with` block stops every thread. Nothing writes to the weights afterwards.

    Args:
        storage: reads chunks that no member holds, or None to read only from peers.
        away: why the member has not joined. If `away` is set, storage is read without claims from the start.
    """

    def __init__(
        self,
        member: Member,
        weights: LocalWeights,
        *,
        storage: StorageReader | None,
        stall_s: float,
        trace: Trace,
        on_first: Callable[[], None],
        away: HubUnavailable | None = None,
        timing: Timing | None = None,
        make_reader: assignment.MakeReader | None = None,
    ) -> None:
        super().__init__(weights.layout.nbytes, trace=trace, stall_s=stall_s, is_quick=weights.device.type == "cuda")
        timing = timing or Timing()
        self._weights = weights
        self._storage = storage
        self.provenance = Provenance(weights.identity.model)
        self._storage_reads = self.executor("fetch", PARTS_AT_ONCE)
        self._peer_reads = self.executor("fetch", READS_AT_ONCE)
        self._verifying = self.executor("compute", NUM_VERIFYING)
        self._threads: list[threading.Thread] = []
        self._begun = time.monotonic()
        self._on_first = on_first
        # The first timer pauses while a source feeds the fetch. The second never pauses, and is reported to the hub.
        self._starved = StallTimer()
        self._no_progress = StallTimer()
        self._assignment = Assignment(
            weights,
            # A bound method would keep the weights alive until the cyclic collector runs.
            make_reader or partial(_follow, member, weights, self.ticket, timing),
            can_read_storage=storage is not None,
            stall_s=stall_s,
            timing=timing,
            provenance=self.provenance,
        )
        self._claims: ClaimLoop | None = None
        self.hub = HubPoller(
            member,
            weights,
            self._assignment,
            self.ticket,
            self.provenance,
            stall_s=stall_s,
            timing=timing,
            away=away if storage is not None else None,
        )
        if storage is not None:
            self._claims = ClaimLoop(
                self.hub,
                storage,
                reads=self._storage_reads,
                starved=self._starved,
                before_read=self.note_first_read,
                add_received=self.add_received,
            )

        # The lock guards the attributes below.
        self._lock = threading.Lock()
        self.state = FetchState.NEW
        self._received: deque[ReceivedChunks] = deque()
        self._reading: set[ReadFromUpstream] = set()
        self._read_bytes = 0

    def _become(self, state: FetchState) -> bool:
        with self._lock:
            if not (state.value == self.state.value + 1 or (state is FetchState.CLOSED and self.state is not state)):
                return False
            self.state = state
            return True

    def start(self) -> None:
        """Start requesting upstreams from the hub, connecting to them, and reading."""
        if not self._become(FetchState.STARTED):
            raise RuntimeError("a fetch can be started only once")
        if self._weights.is_whole:
            self.ticket.finish()
        self._start(self.hub.run, "penstock-flight")
        if self._claims is not None:
            self._start(self._claims.run, "penstock-claims")

    def run(self) -> Provenance:
        """Wait until every chunk is verified. Call it after `start`.

        Raises:
            SourceUnavailable, SourceStalled: for `stall_s`, no source had the missing chunks, or no source sent a byte.
            IntegrityError: holders state different digests, or a verified chunk changed in memory.
            PenstockError: storage's errors.
        """
        while not self.ticket.done:
            pause_s = self.assign()
            with self.ticket.changed:
                if not self.ticket.done:
                    self.ticket.changed.wait(pause_s)
            if self._weights.damage is not None:
                self.ticket.fail(self._weights.damage)
            self._check_reads()
            for reader in self._assignment.pop_unneeded():
                reader.close()
            if self.ticket.look() > self.stall_s:
                kind = SourceStalled if self._assignment.has_sources else SourceUnavailable
                num_missing = int((~self._weights.verified.have).sum())
                what = f"no progress for {self.stall_s} s with {num_missing} chunks missing"
                last_resort = "storage" if self._storage is not None else "no fallback was given; the hub"
                self.ticket.fail(self.provenance.stall_error(kind, what, f"{last_resort}: {self.hub.answer}"))
        self.ticket.check()
        return self.provenance

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=guarded, args=(self.ticket, target), name=name, daemon=True)
        start_thread(thread)
        self._threads.append(thread)

    def received_bytes(self) -> int:
        """Return the bytes received so far, including unfinished reads. The number only grows."""
        with self._lock:
            nbytes = self._read_bytes + sum(read.received_bytes for read in self._reading)
        return nbytes + (self._storage.received_bytes if self._storage is not None else 0)

    def _is_feeding(self) -> bool:
        # On 2 cores, 64 starting processes delayed the hub by half a stall deadline, and more with unclaimed reads.
        is_asking = self._storage is not None and self.hub.member.hub.is_busy
        if is_asking or self._storage_reads.is_busy() or self._verifying.is_busy():
            return True
        return self.hub.do_others_read() and not self._assignment.failed.has_unreported() and self._assignment.is_idle()

    def is_busy(self) -> bool:
        """Return True if an operation with a deadline is running, except for reads from a failed upstream."""
        failed = self._assignment.failed.since_progress
        with self._lock:
            is_new = any(read.upstream_reader.upstream.member not in failed for read in self._reading)
        return is_new or self._is_feeding()

    def _check_reads(self) -> None:
        moved, received = self.ticket.moved_bytes, self.received_bytes()
        self._starved.look(moved, received, is_paused=self._is_feeding)
        self._weights.fetch.silent_s = self._no_progress.look(moved, received)
        with self._assignment.held():
            reading: dict[UpstreamReader, list[ReadFromUpstream]] = {reader: [] for reader in self._assignment.readers}
        with self._lock:
            for read in self._reading:
                reading.setdefault(read.upstream_reader, []).append(read)
        for reader, reads in reading.items():
            if reader.is_silent(sum(read.received_bytes for read in reads), self.read_stall_s, is_read=bool(reads)):
                message = f"the peer sent less than {LEAST_BYTES} bytes in {self.read_stall_s:g} s"
                error = SourceStalled(message, uri=f"penstock:{reader.upstream.member}")
                for read in reads:
                    read.stop(error)

    @property
    def read_stall_s(self) -> float:
        """Seconds that an upstream may send nothing: half of `stall_s` if storage can be read instead."""
        return self.stall_s / 2 if self._assignment.can_read_storage else self.stall_s

    def assign(self) -> float:
        """Post reads of missing chunks to upstreams with a free slot. Return the seconds until the next round."""
        pause_s, has_failed = self._assignment.next_reads(
            self._post_reads, is_storage_read=self._storage_reads.is_busy()
        )
        if has_failed:
            self.hub.wanted.set()
        if pause_s < self.hub.timing.fetch_turn_s:
            # Wake `run`, so that it assigns again in time if another thread made this call.
            self.ticket.wake()
        return pause_s

    def _post_reads(self, reads: list[assignment.Read]) -> None:
        self._peer_reads.post(*(ReadFromUpstream(self, reader, chunks) for reader, chunks in reads))

    def note_first_read(self) -> None:
        """Call `on_first` before the first byte is requested. Later calls do nothing."""
        if self.state is FetchState.STARTED and self._become(FetchState.MOVING):
            self._on_first()

    def nbytes_of(self, chunks: I64) -> int:
        """Return the total size of these chunks in bytes."""
        return int(self._weights.layout.chunks.nbytes[chunks].sum())

    def begin_read(self, read: ReadFromUpstream) -> None:
        """Register a read from an upstream that begins now."""
        with self._lock:
            self._reading.add(read)
            # A read that begins after `close` has collected the reads would otherwise run until it stalls.
            if self.state is FetchState.CLOSED:
                read.stop(Cancelled("the fetch was closed"))

    def end_read(self, read: ReadFromUpstream) -> None:
        """Unregister a read from an upstream that ended or never began."""
        with self._lock:
            if read in self._reading:
                self._reading.discard(read)
                self._read_bytes += read.received_bytes
        self._assignment.note_read_end(read.upstream_reader)

    def release_chunks(self, chunks: I64) -> None:
        """Make chunks available again after a failed read."""
        self._assignment.release(chunks)
        self.ticket.wake()

    def add_received(self, chunks: I64, path: str, reader: UpstreamReader | None = None) -> None:
        """Queue chunks for verification that were received from an upstream, or from storage if there is no reader."""
        # An upstream has stated the digests of its chunks, and all upstreams state the same digests.
        leaves = self._weights.layout.chunks.leaves_of(chunks)
        wanted = None if reader is None else self._weights.verified.leaves[leaves]
        with self._lock:
            self._received.append(ReceivedChunks(chunks=chunks, wanted=wanted, path=path, upstream_reader=reader))
        first, nbytes = int(chunks[0]), self.nbytes_of(chunks)
        self._verifying.post(Item(first, f"verify {first}", nbytes, start=self.verify))

    def verify(self) -> None:
        """Verify a batch of received chunks and let other members read them."""
        with self._lock:
            batch = next_batch(self._received, NUM_VERIFYING)
        # An earlier work item may have verified all waiting chunks in its batch.
        if not batch:
            return
        good = []
        for entry, wrong in verify(self._weights, batch):
            if len(wrong):
                self._refuse(entry, int(wrong[0]))
            else:
                good.append((entry, self.nbytes_of(entry.chunks)))
        self._note(good)
        if self._weights.is_whole:
            self.ticket.finish()

    def _note(self, good: Sequence[tuple[ReceivedChunks, int]]) -> None:
        weights = self._weights
        with self._assignment.held():
            for entry, nbytes in good:
                self._assignment.note_verified(entry.chunks)
                self.provenance.add_bytes(entry.path, nbytes)
                self.ticket.moved_bytes += nbytes
                if entry.upstream_reader is not None:
                    self.provenance.why[entry.path] = entry.upstream_reader.why.get(entry.path) or NEAREST
            weights.fetch.gb_per_s = self.ticket.moved_bytes / GB / max(1e-3, time.monotonic() - self._begun)
            weights.fetch.path = shares_text(self.provenance.nbytes_by_path)
            weights.fetch.why = self.provenance.reasons()

    def _refuse(self, arrival: ReceivedChunks, wrong: int) -> None:
        message = f"chunk {wrong} differs from its digest"
        self.provenance.num_wrong += 1
        reader = arrival.upstream_reader
        if reader is None:
            assert self._claims is not None
            bad = IntegrityError(f"{message} in storage", uri=arrival.path, hint="download the files again")
            self._claims.fail(bad, arrival.chunks)
            return
        reader.suspect_chunk = wrong
        reader.fail(IntegrityError(message, uri=f"penstock:{reader.upstream.member}"))
        self.release_chunks(arrival.chunks)

    def close(self) -> None:
        """Stop every thread and close every upstream. Idempotent."""
        self._become(FetchState.CLOSED)
        if not self.ticket.done:
            self.ticket.cancel()
        readers = self._assignment.close()
        self.hub.close()
        if self._claims is not None:
            self._claims.close()
        with self._lock:
            reading = list(self._reading)
        # Stop the reads, because closing the executors would wait until the reads time out.
        for read in reading:
            read.stop(Cancelled("the fetch was closed"))
        super().close()
        for thread in self._threads:
            thread.join(timeout=self.hub.timing.fetch_end_s)
        # Break a reference cycle that would keep the weights alive.
        self._claims = None
        for reader in readers:
            reader.close()
            if reader.error is not None:
                self.provenance.note_failure(reader.upstream.member, reader.error)


def _follow(
    member: Member, weights: LocalWeights, ticket: RunState, timing: Timing, upstream: Upstream, ranks: tuple[int, ...]
) -> UpstreamReader:
    reader = UpstreamReader(
        member.peer(upstream, weights.key),
        ranks,
        weights,
        member.links,
        ticket,
        min_bytes_per_s=member.min_bytes_per_s,
        timing=timing,
    )
    reader.start()
    return reader


class ReadFromUpstream:
    """A work item that reads chunks from an upstream's memory. The fetch may stop the reads while the item runs."""

    __slots__ = ("_chunks", "_fetch", "_posted", "_stop_error", "name", "nbytes", "priority", "upstream_reader")

    def __init__(self, fetch: FetchRun, reader: UpstreamReader, chunks: I64) -> None:
        self.priority = int(chunks[0])
        self.name = f"{reader.path} {self.priority}"
        self.nbytes = fetch.nbytes_of(chunks)
        self.upstream_reader = reader
        self._fetch = fetch
        self._chunks = chunks
        self._posted: list[PendingRead] = []
        self._stop_error: PenstockError | None = None

    @property
    def received_bytes(self) -> int:
        """Number of bytes received so far, verified or not."""
        return sum(read.moved_bytes for read in self._posted)

    def stop(self, error: PenstockError) -> None:
        """Stop the read early if its transport supports that."""
        # The item's thread may be posting, so set the error before the list is copied.
        self._stop_error = error
        for read in list(self._posted):
            if isinstance(read, Stoppable):
                read.fail(error)

    def start(self) -> None:
        """Read the chunks. A failure ends the use of this upstream but not the fetch."""
        reader, fetch, begun = self.upstream_reader, self._fetch, time.monotonic()
        fetch.begin_read(self)
        try:
            self._read()
        # Also blame the upstream for a PlanError (no transport connects the two memories), because others may work.
        except PenstockError as error:
            if ends_transfer(error):
                raise
            reader.fail(error)
            fetch.release_chunks(self._chunks)
            fetch.end_read(self)
            return
        reader.note_read(self._chunks, self.nbytes, time.monotonic() - begun)
        fetch.end_read(self)
        # Start the next read before these bytes are verified, so that the link stays busy.
        fetch.assign()
        fetch.add_received(self._chunks, reader.path, reader)

    def _read(self) -> None:
        fetch, reads = self._fetch, self.upstream_reader.reads_of(self._chunks)
        fetch.note_first_read()
        failed, is_touched = wait_all(self._posting(reads), stall_s=fetch.read_stall_s)
        if is_touched:
            fetch.is_touched = True
        if failed is not None:
            raise failed
        for transport, _, source, _ in reads:
            self.upstream_reader.note_transport_used(transport, source)

    def _posting(self, reads: list[Read]) -> Iterator[tuple[Transport, PendingRead]]:
        for transport, into, source, rows in reads:
            read = transport.post_read(into, source, rows)
            self._posted.append(read)
            if self._stop_error is not None:
                self.stop(self._stop_error)
            yield transport, read

    def finish(self) -> None:
        """Do nothing, because `start` has passed on the chunks."""

    def abandon(self) -> None:
        """Unregister the read, because the fetch has ended."""
        self._fetch.end_read(self)
