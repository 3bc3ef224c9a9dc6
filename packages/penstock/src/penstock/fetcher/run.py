"""A running fetch: read chunks from upstreams and claimed chunks from storage; verify each, then serve it to others.

In: a member, registered weights to fill, perhaps a reader of storage. Out: complete weights and their provenance.
Not here: executors, ticket and closing (`engine.run`), the choice of upstreams (`plan.relay`, at the hub) and of chunks
to read from each (`choice`), the API for callers (`join`).

    hub --upstreams--> follow logs --> assign --> fetch: read chunks --> compute: digest, compare --> holding.gain
     '----claims----> fetch: read storage ------------------------------^

The caller's thread does not only wait, as in other journeys: every `TURN_S` it assigns missing chunks to upstreams,
since the end of a pause (a limit, a probe) wakes no thread. So `run` has a loop of its own, around the ticket's clock.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from penstock.engine.run import LEAST_BYTES, Item, Run, StallTimer, guarded
from penstock.engine.trace import Trace
from penstock.errors import (
    Cancelled,
    HubUnavailable,
    IntegrityError,
    PenstockError,
    PermissionDenied,
    SourceBusy,
    SourceStalled,
    SourceUnavailable,
)
from penstock.fetcher.choice import ChunkChoice
from penstock.fetcher.items import ReadFromUpstream, VerifyReceived
from penstock.fetcher.report import NEAREST, Provenance
from penstock.fetcher.retries import RetryTimes
from penstock.fetcher.storage_reader import StorageReader
from penstock.fetcher.upstream import END_S, UpstreamReader
from penstock.fetcher.verify import ReceivedChunks, next_batch, verify
from penstock.hub.messages import ClaimReply, Ranges, Upstream, UpstreamsReply
from penstock.peer.local_weights import LocalWeights
from penstock.peer.member import Member
from penstock.plan.schedule import to_ranges
from penstock.types import GB, I64, U64
from penstock.waits import start_thread

READS_AT_ONCE = 6
"""Concurrent reads of all upstreams together."""
READS_OF_ONE = 3
"""Concurrent reads of one upstream: its link has work while one read ends and the next is posted."""
PARTS_AT_ONCE = 2
"""Claims read from storage at once: the next begins when little of the last is left; see `storage_reader.LITTLE`."""
NUM_VERIFYING = 2
TURN_S = 0.05
"""Longest pause between two rounds of assignment; news from an upstream or the end of an upstream's pause end it."""
LEAST_WAIT_S = 0.1
"""Shortest pause between two requests for upstreams, also of a member that has nothing to read."""
ALONE_CHUNKS = 16
"""Chunks read at once without a claim: 256 MiB, so that the hub is soon tried again."""
GATHERED_S = 0.25
"""Longest wait for as many chunks as one read of an upstream takes, while storage is read. Each read, with its digests
and reports, costs some milliseconds of Python, which the threads that read storage wait for. A link that is slower
than storage takes few chunks at once, so nothing waits there."""
HEARD_S = 1.0
"""The hub's word on other readers' progress is valid for twice the polling interval, plus this for the answer."""


class FetchRun(Run):
    """A running fetch. A context manager: its exit ends every thread, and nothing writes to the weights afterwards.

    Attributes:
        provenance: the source of every byte, and the faults met.

    Args:
        member: this process's member.
        weights: the weights to fill; registered, in the state `filling`.
        storage: reads chunks that no member has; None: read from peers only.
        stall_s: seconds without progress after which the fetch fails.
        trace: receives spans.
        on_first: called once, just before the first byte is requested.
        away: why the member has not joined; storage is then read without claims from the start.
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
    ) -> None:
        super().__init__(weights.layout.nbytes, trace=trace, stall_s=stall_s, is_quick=weights.device.type == "cuda")
        self._member = member
        self._weights = weights
        self._storage = storage
        self.provenance = Provenance(weights.identity.model)
        self._storage_reads = self.executor("fetch", PARTS_AT_ONCE)
        self._peer_reads = self.executor("fetch", READS_AT_ONCE)
        self._verifying = self.executor("compute", NUM_VERIFYING)
        self._threads: list[threading.Thread] = []
        self._begun = time.monotonic()

        # The lock guards what follows.
        self._lock = threading.Lock()
        self._flying = np.zeros(weights.layout.chunks.num_chunks, bool)
        self._choice = ChunkChoice(weights.have, self._flying)
        self._claimed = np.zeros(weights.layout.chunks.num_chunks, bool)
        self._retries = RetryTimes(stall_s)
        self._received: deque[ReceivedChunks] = deque()
        self._reading: set[ReadFromUpstream] = set()
        self._read_bytes = 0
        self._failed_since_progress: set[str] = set()
        self._reported: set[str] = set()
        """Those of them that the hub took a complaint of: it no longer counts what they have."""
        self._on_first = [on_first]

        self._closing = threading.Event()
        self._hub_now = threading.Event()
        self._claim_wanted = threading.Event()
        self._hub_answered = threading.Event()
        self._first_claim: ClaimReply | None = None
        self._hub_answer = "not asked yet"
        self._others_read_until = 0.0
        # Two clocks beside the ticket's. The first stands still while something feeds the fetch, and says when to read
        # storage without a claim; the second does not stand still, and is reported to the hub.
        self._hunger = StallTimer()
        self._quiet = StallTimer()
        self._is_storage_out = False
        self._is_alone = storage is not None and away is not None
        self._is_refused = False
        self._is_hub_away = False
        if storage is not None and away is not None:
            self.provenance.read_without_hub(away.message)

    def start(self) -> None:
        """Begin to ask the hub for upstreams, to connect to them, and to read."""
        if self._weights.is_whole:
            self.ticket.finish()
        self._start(self._poll_upstreams, "penstock-flight")
        if self._storage is not None:
            self._start(self._poll_claims, "penstock-claims")

    def run(self) -> Provenance:
        """Return once every chunk is verified. Order: after `start`.

        Raises:
            SourceUnavailable, SourceStalled: for `stall_s`, no source had the missing chunks, or none sent a byte.
            IntegrityError: holders state different digests, or a verified chunk changed in our memory.
            PenstockError: storage's own errors.
        """
        while not self.ticket.done:
            pause_s = self.assign()
            with self.ticket.changed:
                if not self.ticket.done:
                    self.ticket.changed.wait(pause_s)
            if self._weights.damage is not None:
                self.ticket.fail(self._weights.damage)
            self._look_at_reads()
            self._leave_unneeded()
            if self.ticket.look() > self.stall_s:
                kind = SourceStalled if self._choice.readers or self._failed_since_progress else SourceUnavailable
                what = f"no progress for {self.stall_s} s with {int((~self._weights.have).sum())} chunks missing"
                last_resort = "storage" if self._storage is not None else "no fallback was given; the hub"
                self.ticket.fail(self.provenance.stall_error(kind, what, f"{last_resort}: {self._hub_answer}"))
        self.ticket.check()
        return self.provenance

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=guarded, args=(self.ticket, target), name=name, daemon=True)
        start_thread(thread)
        # Once it runs: `close` joins only threads that were started.
        self._threads.append(thread)

    # -- Requests to the hub; upstreams and claims in a thread each: after the first answer neither waits for the other.

    def _poll_upstreams(self) -> None:
        while not self._closing.is_set():
            wait_s, full_s = 0.5, math.inf
            self._hub_now.clear()
            self._drop_failed()
            try:
                is_first = not self._hub_answered.is_set()
                reply = self._member.upstreams(
                    self._weights, can_read_storage=self._can_read_storage, is_first=is_first
                )
                if is_first:
                    self._first_claim = reply.claim
                wait_s = reply.ask_again_s
                self._is_alone = self._is_refused = False
                self._note_storage_readers(reply)
                if self._storage is None:
                    self._hub_answer = f"named {len(reply.upstreams)} members to take from"
                full_s = self._follow(reply)
            except PenstockError as error:
                # Known upstreams stay in use: running transfers do not need the hub.
                self._note_hub_failure(error)
            self._hub_answered.set()
            self._closing.wait(self._rest_s)
            if full_s < wait_s:
                # With a new grant: the holder has used up the present one, though it refused.
                self._hub_now.wait(full_s)
            elif not self._hub_now.wait(rest_s := max(wait_s / 4, LEAST_WAIT_S)):
                self._wait_while_fed(wait_s - rest_s)

    def _wait_while_fed(self, wait_s: float) -> None:
        """Wait until the hub is wanted, or no upstream has a chunk for us; at most `wait_s`."""
        # Not looked at once only: of members that start together the first ones know few of the others, and have read
        # all that these have long before the next request.
        until = time.monotonic() + wait_s
        while not self._is_idle() and (left_s := until - time.monotonic()) > 0:
            if self._hub_now.wait(min(TURN_S, left_s)):
                return

    @property
    def _rest_s(self) -> float:
        """Pause before the next request to a slow hub; well below `stall_s`, so that a stall is noticed in time."""
        return min(self._member.hub.rest_s, self.stall_s / 8)

    def _note_hub_failure(self, error: PenstockError) -> None:
        """Record that the hub did not answer or refused us. A refusal is final: retrying cannot change it."""
        self._is_refused = isinstance(error, PermissionDenied)
        self._is_hub_away = not self._is_refused
        self._hub_answer = f"it refused: {error.message}" if self._is_refused else error.message
        if self._is_refused and self._storage is None and not self._choice.readers:
            self.ticket.fail(error)

    def _is_idle(self) -> bool:
        """Return True if no upstream has a chunk for us now; the hub is then polled sooner."""
        with self._lock:
            return self._choice.is_idle()

    def _make_reader(self, upstream: Upstream, ranks: tuple[int, ...]) -> UpstreamReader:
        """Start a reader for one upstream."""
        member = self._member
        return UpstreamReader(
            member.peer(upstream, self._weights.key),
            ranks,
            self._weights,
            member.links,
            self.ticket,
            min_bytes_per_s=member.min_bytes_per_s,
        )

    def _follow(self, reply: UpstreamsReply) -> float:
        """Start readers for new upstreams and rank all by the hub's orders; those no longer named are ranked last.

        Returns the seconds until a parent that is full may be tried again; inf if none is full.
        """
        now = time.monotonic()
        with self._lock:
            if self._closing.is_set():
                return math.inf
            ranks = self._choice.ranks(reply)
            known = {reader.upstream.member: reader for reader in self._choice.readers}
            for upstream in reply.upstreams:
                member = upstream.member
                if member in known:
                    known[member].renew(upstream)
                elif self._retries.may_try(member, now):
                    self._choice.readers.append(self._make_reader(upstream, ranks[member]))
            self._choice.rank(ranks)
            for reader in self._choice.readers:
                if reader.is_connected:
                    self._retries.note_place(reader.upstream.member)
                if reader.is_parent:
                    # It may have been a spare, which nothing is asked of.
                    reader.request_news()
            parents = self._parents(reply, now)
            if reply.is_placed:
                # Else the relay, which keeps parents, would hang all that came at one moment below the same holder.
                self._weights.parent, self._weights.second_parent = (*parents, "", "")[:2]
            return min((full_s for name in parents if (full_s := self._retries.full_s(name, now))), default=math.inf)

    def _parents(self, reply: UpstreamsReply, now: float) -> list[str]:
        """Return the first member of each of the hub's orders that did not fail, and is not full for long."""
        # Also if it is full now: the hub keeps a reported parent, so it would keep the next member, further away, for
        # good, though the place of the first one is free again a moment later.
        names = [upstream.member for upstream in reply.upstreams]
        orders = reply.orders or (tuple(range(len(names))),)
        may_be = {name for name in names if self._retries.may_be_parent(name, now)}
        firsts = (next((names[i] for i in order if names[i] in may_be), None) for order in orders)
        return [name for name in firsts if name is not None]

    def _leave_unneeded(self) -> None:
        """Leave upstreams whose places other members need more."""
        with self._lock:
            unneeded = self._choice.pop_unneeded()
        for reader in unneeded:
            reader.close()

    def _drop_failed(self) -> None:
        """Drop upstreams that failed or are full, to be tried again later; complain to the hub about failed ones."""
        now = time.monotonic()
        with self._lock:
            failed = [reader for reader in self._choice.readers if reader.error is not None and not reader.num_flying]
            for reader in failed:
                self._choice.readers.remove(reader)
                member = reader.upstream.member
                assert reader.error is not None
                # A full holder is not a fault. When it was complained of, the hub discounted its chunks and assigned
                # them to be read from storage again: eight cold starters read storage 3.3 to 5.9 times.
                if isinstance(reader.error, SourceBusy):
                    self._retries.note_full(member, now)
                    self.provenance.full[member] = str(reader.error)
                    continue
                self._retries.note_failure(
                    member, reader.error, now, can_read_storage=self._can_read_storage, is_too_slow=reader.is_too_slow
                )
                self.provenance.faults.append(f"{member[:8]}: {reader.fault}")
        for reader in failed:
            assert reader.error is not None
            if not isinstance(reader.error, SourceBusy):
                member = reader.upstream.member
                if self._member.complain(member, self._weights.key, reader.error):
                    with self._lock:
                        self._reported.add(member)
            reader.close()

    def _poll_claims(self) -> None:
        assert self._storage is not None
        # The first answer has the first claim. Otherwise each of 1,000 members that start together would send two
        # requests at once; and a member sends one claim at a time.
        while not (self._hub_answered.wait(TURN_S) or self._should_skip_claims()):
            pass
        first, self._first_claim = self._first_claim, None
        while not (self._closing.is_set() or self._weights.is_whole or self._is_storage_out):
            wait_s = 0.5
            ranges: Ranges = ()
            try:
                if first is None and self._should_skip_claims():
                    ranges, wait_s = to_ranges(self._next_missing()), TURN_S
                else:
                    reply, first = first or self._member.claim(self._weights), None
                    ranges, wait_s, self._hub_answer = reply.ranges, reply.ask_again_s, reply.why
                    self._is_hub_away = False
                if ranges:
                    wait_s = 0.0 if self._read_claim(ranges) else TURN_S
            except PenstockError as error:
                self._note_hub_failure(error)
                wait_s = 0.0 if self._is_refused and not self._is_alone else wait_s
            self._closing.wait(wait_s if ranges else max(wait_s, self._rest_s))
        while self._is_storage_out and not self._closing.is_set():
            try:
                # Give the claim back, so that others read its chunks.
                self._member.claim(self._weights, ask=False)
                return
            except PenstockError:
                self._closing.wait(0.5)

    def _note_storage_readers(self, reply: UpstreamsReply) -> None:
        """Record whether other members read storage and make progress; waiting for their chunks is then no stall."""
        is_alive = 0 <= reply.reader_silent_s < self.stall_s / 2
        valid_s = 2 * max(reply.ask_again_s, 1.0) + HEARD_S
        self._others_read_until = time.monotonic() + valid_s if is_alive else 0.0

    def _should_skip_claims(self) -> bool:
        """Return True if storage must be read without a claim: the hub refused us, or no byte came for too long.

        In the second case the hub is unreachable, or members that have the missing chunks live but send nothing.
        """
        # Later than `read_stall_s`, after which a holder that gives nothing is reported: the hub then gives claims on
        # what only that holder has, and the starters read storage once together instead of once each.
        patience_s = self.stall_s / 2 if self._is_hub_away else 0.75 * self.stall_s
        if not self._is_alone and (self._is_refused or self._hunger.seconds > patience_s):
            self._is_alone = True
            self.provenance.read_without_claim(self._hub_answer)
        return self._is_alone

    def _next_missing(self) -> I64:
        with self._lock:
            return np.flatnonzero(~self._weights.have & ~self._flying)[:ALONE_CHUNKS]

    def _read_claim(self, ranges: tuple[tuple[int, int], ...]) -> bool:
        """Start reading claimed chunks from storage, and wait until the next claim should be made.

        Returns False if none of the chunks is missing any more.
        """
        assert self._storage is not None
        chunks = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        with self._lock:
            chunks = chunks[~self._weights.have[chunks] & ~self._flying[chunks]]
            if self._closing.is_set() or not len(chunks):
                return False
            self._flying[chunks] = self._claimed[chunks] = True
            self._weights.claims = to_ranges(np.flatnonzero(self._claimed))
            self._claim_wanted.clear()
            first = int(chunks[0])
            self._storage_reads.post(
                Item(first, f"storage {first}", self.nbytes_of(chunks), start=partial(self._read_storage, chunks))
            )
        # No deadline here: storage has its own, and its end sets the event.
        while not (self._claim_wanted.wait(self.stall_s) or self._closing.is_set()):
            pass
        return True

    def _read_storage(self, chunks: I64) -> None:
        """Read claimed chunks from storage, and pass on those that are complete."""
        assert self._storage is not None
        left = set(chunks.tolist())
        # Once for each claim: a second time would end the wait for the next claim's reads, which has begun by then.
        has_asked = threading.Event()

        def near_end() -> None:
            has_asked.set()
            self._claim_wanted.set()

        self.note_first_read()
        try:
            for some in self._storage.read(chunks, near_end):
                self.is_touched = True
                left -= set(some.tolist())
                self.add_received(
                    ReceivedChunks(chunks=some, wanted=None, path=f"storage {self._storage.uri}", upstream_reader=None)
                )
                if self.ticket.done:
                    break
        except PenstockError as error:
            if error.blame != "source":
                raise
            self._storage_failed(error, np.array(sorted(left), np.int64))
        if not has_asked.is_set():
            self._claim_wanted.set()

    def _clear_flags(self, chunks: I64) -> None:
        """Clear the flags of chunks that are no longer under way. The caller holds the lock."""
        self._flying[chunks] = self._claimed[chunks] = False
        self._weights.claims = to_ranges(np.flatnonzero(self._claimed))

    # -- Progress and deadlines.

    def received_bytes(self) -> int:
        """Return the bytes received so far, including unfinished reads; the number only grows."""
        with self._lock:
            nbytes = self._read_bytes + sum(read.received_bytes for read in self._reading)
        return nbytes + (self._storage.received_bytes if self._storage is not None else 0)

    def _is_feeding(self) -> bool:
        """Return True while the lack of received bytes is not a stall of the fetch.

        That is so while storage is read, bytes are verified, or the missing chunks are being read from storage by other
        members; and while the hub is merely slow.
        """
        # A slow hub: on a host of two cores 64 starting processes kept it from answering for more than half a stall,
        # and those that then read storage without a claim made it slower still.
        if (
            self._storage_reads.is_busy()
            or self._verifying.is_busy()
            or (self._storage is not None and self._member.hub.is_busy)
        ):
            return True
        has_silent_holder = bool(self._failed_since_progress - self._reported)
        return time.monotonic() < self._others_read_until and not has_silent_holder and self._is_idle()

    def is_busy(self) -> bool:
        """Return True if an operation is under way that has its own deadline.

        A read of an upstream that failed since the last verified byte does not count: an upstream may cost this fetch
        one stall, not one for each retry.
        """
        with self._lock:
            is_new = any(
                read.upstream_reader.upstream.member not in self._failed_since_progress for read in self._reading
            )
        return is_new or self._is_feeding()

    def _look_at_reads(self) -> None:
        """Measure the time without bytes, and end reads that receive less than `LEAST_BYTES` within their deadline."""
        moved, received = self.ticket.moved_bytes, self.received_bytes()
        self._hunger.look(moved, received, is_paused=self._is_feeding)
        self._weights.silent_s = self._quiet.look(moved, received)
        with self._lock:
            reading: dict[UpstreamReader, list[ReadFromUpstream]] = {reader: [] for reader in self._choice.readers}
            for read in self._reading:
                reading.setdefault(read.upstream_reader, []).append(read)
        for reader, reads in reading.items():
            if reader.is_silent(sum(read.received_bytes for read in reads), self.read_stall_s, is_read=bool(reads)):
                message = f"it gave less than {LEAST_BYTES} bytes for {self.read_stall_s:g} s"
                error = SourceStalled(message, uri=f"penstock:{reader.upstream.member}")
                for read in reads:
                    read.stop(error)

    @property
    def read_stall_s(self) -> float:
        """Seconds to wait for an upstream that sends nothing: half a stall if storage can be read instead."""
        return self.stall_s / 2 if self._can_read_storage else self.stall_s

    @property
    def _can_read_storage(self) -> bool:
        return self._storage is not None and not self._is_storage_out

    # -- Assignment of chunks to upstreams.

    def assign(self) -> float:
        """Post reads for every upstream with a free slot and missing chunks; return seconds until the next round."""
        items, pause_s = [], TURN_S
        with self._lock:
            for reader in self._choice.readers:
                if reader.error is not None and not reader.num_flying:
                    self._hub_now.set()
                if (early_s := reader.not_before - time.monotonic()) > 0:
                    pause_s = min(pause_s, early_s)
                gathers = False
                while (
                    reader.error is None and reader.num_flying < READS_OF_ONE and time.monotonic() >= reader.not_before
                ):
                    chunks = self._choice.next_chunks(reader)
                    gathers = self._should_gather(reader, len(chunks))
                    if gathers or not len(chunks):
                        break
                    self._flying[chunks] = True
                    reader.num_flying += 1
                    reader.charge(self.nbytes_of(chunks))
                    items.append(ReadFromUpstream(self, reader, chunks))
                if not gathers and self._choice.wants_news(reader):
                    reader.request_news()
            if items and not self._closing.is_set():
                self._peer_reads.post(*items)
        if pause_s < TURN_S:
            # For `run` to look again when it is time, if another thread called.
            self.ticket.wake()
        return pause_s

    def _should_gather(self, reader: UpstreamReader, num_chunks: int) -> bool:
        """Return True if a read of so few chunks should wait for more. The caller holds the lock."""
        return (
            num_chunks < reader.step_chunks
            and time.monotonic() - reader.last_read < GATHERED_S
            and self._storage_reads.is_busy()
        )

    # -- Called by work items.

    def note_first_read(self) -> None:
        """Call `on_first`, at the first call only: a byte is about to be requested."""
        with self._lock:
            callbacks, self._on_first = self._on_first, []
        for callback in callbacks:
            callback()

    def nbytes_of(self, chunks: I64) -> int:
        """Return the number of bytes of these chunks."""
        return int(self._weights.layout.chunks.nbytes[chunks].sum())

    def stated_digests(self, chunks: I64) -> U64:
        """Return the leaf digests of chunks that an upstream has: all sources state the same, see `UpstreamReader`."""
        digests: U64 = self._weights.leaves[self._weights.layout.chunks.leaves_of(chunks)]
        return digests

    def add_received(self, arrival: ReceivedChunks) -> None:
        """Queue chunks whose bytes are in place, to be verified."""
        with self._lock:
            self._received.append(arrival)
        self._verifying.post(VerifyReceived(self, int(arrival.chunks[0])))

    def verify(self) -> int:
        """Digest and compare a batch of received chunks, and let others read them; return the verified bytes."""
        with self._lock:
            batch = next_batch(self._received, NUM_VERIFYING)
        # None is left where an earlier work item verified these chunks in its batch.
        if not batch:
            return 0
        good = []
        for entry, wrong in verify(self._weights, batch):
            if len(wrong):
                self._refuse(entry, int(wrong[0]))
            else:
                good.append((entry, self.nbytes_of(entry.chunks)))
        self._note(good)
        if self._weights.is_whole:
            self.ticket.finish()
        return sum(nbytes for _, nbytes in good)

    def _note(self, good: Sequence[tuple[ReceivedChunks, int]]) -> None:
        """Account for verified chunks: progress, provenance and pace."""
        weights = self._weights
        with self._lock:
            if good:
                self._failed_since_progress.clear()
                self._reported.clear()
            for entry, nbytes in good:
                self._clear_flags(entry.chunks)
                self.provenance.add_bytes(entry.path, nbytes)
                self.ticket.moved_bytes += nbytes
                if entry.upstream_reader is not None:
                    self.provenance.why[entry.path] = entry.upstream_reader.why.get(entry.path) or NEAREST
            weights.gb_per_s = self.ticket.moved_bytes / GB / max(1e-3, time.monotonic() - self._begun)
            weights.path, weights.why = self.provenance.shares(), self.provenance.reasons()

    def _refuse(self, arrival: ReceivedChunks, wrong: int) -> None:
        """Reject chunks with a wrong digest: they are read again, and the source is not used any more."""
        message = f"chunk {wrong} differs from its digest"
        self.provenance.num_wrong += 1
        if arrival.upstream_reader is None:
            bad = IntegrityError(f"{message} in storage", uri=arrival.path, hint="download the files again")
            self._storage_failed(bad, arrival.chunks)
            return
        arrival.upstream_reader.note_wrong_chunk(wrong)
        arrival.upstream_reader.fail(IntegrityError(message, uri=f"penstock:{arrival.upstream_reader.upstream.member}"))
        self.release_chunks(arrival.chunks)

    def release_chunks(self, chunks: I64) -> None:
        """Make chunks available for assignment again after a failed read."""
        with self._lock:
            self._clear_flags(chunks)
        self.ticket.wake()

    def _storage_failed(self, error: PenstockError, chunks: I64) -> None:
        """Stop reading storage. The fetch fails unless it has an upstream to continue with."""
        self.provenance.faults.append(f"storage: {error}")
        self._is_storage_out = True
        if not self._choice.readers:
            self.ticket.fail(error)
        self.release_chunks(chunks)

    def begin_read(self, read: ReadFromUpstream) -> None:
        """Register a read of an upstream that begins now."""
        with self._lock:
            self._reading.add(read)

    def end_read(self, read: ReadFromUpstream) -> None:
        """Unregister a read of an upstream that ended or never began."""
        reader = read.upstream_reader
        with self._lock:
            reader.num_flying -= 1
            if read in self._reading:
                self._reading.discard(read)
                self._read_bytes += read.received_bytes
            if reader.error is not None:
                self._failed_since_progress.add(reader.upstream.member)

    def close(self) -> None:
        """End every thread and close every upstream. Idempotent."""
        with self._lock:
            # Under the lock: answers of the hub must not start readers from now on.
            self._closing.set()
        for event in (self._hub_now, self._claim_wanted, self._hub_answered):
            event.set()
        if not self.ticket.done:
            self.ticket.cancel()
        with self._lock:
            reading = list(self._reading)
        # Else the executors would wait for reads of peers until these time out.
        for read in reading:
            read.stop(Cancelled("the fetch is over"))
        super().close()
        for thread in self._threads:
            # Bounded: the thread may be waiting for the hub. It touches no weights.
            thread.join(timeout=END_S)
        with self._lock:
            readers, self._choice.readers = self._choice.readers, []
        for reader in readers:
            reader.close()
            if reader.error is not None and not isinstance(reader.error, SourceBusy):
                self.provenance.faults.append(f"{reader.upstream.member[:8]}: {reader.error.message}")
