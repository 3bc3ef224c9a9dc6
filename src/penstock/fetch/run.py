"""Filling one holding: chunks from upstreams, chunks claimed from storage, each verified and served on at once.

In: a member, a registered holding, perhaps a way to read storage. Out: a whole holding, and where its bytes came from.
Not here: who the upstreams are (`plan.relay`, at the hub), what a caller passes and gets (`join`).

    hub --upstreams--> follow logs --> assign --> fetch: read chunks --> compute: digest, compare --> holding.gain
     '----claims----> fetch: read storage ------------------------------^
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from penstock.closing import Closing
from penstock.engine.executors import Executor, Pending, Work, guarded
from penstock.engine.ticket import LEAST_BYTES, Silence, Ticket
from penstock.engine.trace import Trace
from penstock.errors import (
    Cancelled,
    DestinationError,
    IntegrityError,
    PenstockError,
    PermissionDenied,
    SourceBusy,
    SourceStalled,
    SourceUnavailable,
)
from penstock.fetch.provenance import NEAREST, Provenance
from penstock.fetch.storage_reader import StorageReader
from penstock.fetch.upstream import END_S, Read, UpstreamReader
from penstock.fetch.verify import ReceivedChunks, next_batch, verify
from penstock.hub.messages import Ranges, Upstream, UpstreamsReply
from penstock.peer.local_weights import Bools, LocalWeights
from penstock.peer.member import Member
from penstock.plan.chunks import to_ranges
from penstock.transport.protocol import Pending as PendingRead
from penstock.transport.protocol import Stoppable, Transport
from penstock.transport.reads import wait_all
from penstock.types import GB, I64

READS_AT_ONCE = 6
"""Reads of upstreams under way at once in all; three of each, so that its link has work while one ends."""
READS_OF_ONE = 3
PARTS_AT_ONCE = 2
"""Claims read from storage at once: one more is begun when little is left of the last, so that reading never pauses."""
NUM_VERIFYING = 2
TURN_S = 0.05
"""Longest pause between looks at what can be assigned; news end it, and so does a capped upstream's next turn."""
ALONE_CHUNKS = 16
"""Chunks read at once without a claim: 256 MiB, so that the hub is soon asked again."""
FORGIVE_S = 2.0
"""An upstream that failed is tried again after this long, if the hub still names it; doubled each time."""
BUSY_S = 0.5
"""A full holder is asked again after this long: places become free as readers end, and it has done nothing wrong."""
HEARD_S = 1.0
"""What the hub said of others' progress holds until twice its pause has passed, and this long for its answer."""
LITTLE = 0.5
"""Part of a claim left to be read when the next is begun, so that the two overlap: 50 ms of fast storage."""


class Fetch(Closing):
    """One running fetch. A context manager: leaving it ends every thread, and nothing writes to the holding after.

    Attributes:
        is_touched: whether a byte may have been written to the holding's memory, verified or not.

    Args:
        member: who fetches.
        holding: registered, filling.
        storage: how to read chunks nobody has; None: only from peers.
        stall_s: deadline by progress.
        trace: where spans go.
        on_first: called once, when the first byte is about to be asked for.
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
    ) -> None:
        self._member, self._weights, self._storage, self.stall_s = member, weights, storage, stall_s
        self.outcome, self.is_touched = Provenance(), False
        self._flying = np.zeros(weights.layout.chunks.num_chunks, bool)
        self._claimed = np.zeros(weights.layout.chunks.num_chunks, bool)
        self._following: list[UpstreamReader] = []
        self._forgive: dict[str, tuple[float, float]] = {}
        self._arrived: deque[ReceivedChunks] = deque()
        self._lock, self._on_first = threading.Lock(), [on_first]
        self._closing, self._ask_now = threading.Event(), threading.Event()
        self._claim_read, self._knows_members = threading.Event(), threading.Event()
        self._fetch = Executor("fetch", READS_AT_ONCE, trace=trace, stall_s=stall_s)
        self._part = Executor("fetch", PARTS_AT_ONCE, trace=trace, stall_s=stall_s)
        self._compute = Executor("compute", NUM_VERIFYING, trace=trace, stall_s=stall_s)
        self._reading: set[ReadFromUpstream] = set()
        self._read_bytes = 0
        self._gave_nothing: set[str] = set()
        self._others_read_until = 0.0
        self.ticket = Ticket(weights.layout.nbytes, self._is_under_way, received=self._received_bytes)
        self._hunger, self._quiet = Silence(), Silence()
        self._begun = time.monotonic()
        self._is_storage_out = False
        self._hub_says = "not asked yet"
        self._is_alone = self._is_refused = False
        self._threads: list[threading.Thread] = []

    def run(self) -> Provenance:
        """Return once every chunk is verified.

        Raises:
            SourceUnavailable, SourceStalled: nobody has what is missing, or nobody gave a byte, for `stall_s`.
            IntegrityError: holders disagree on what the bytes are, or a verified chunk changed in our memory.
            PenstockError: storage's own errors.
        """
        if self._weights.is_whole:
            self.ticket.finish()
        self._start(self._ask_for_upstreams, "penstock-flight")
        if self._storage is not None:
            self._start(self._ask_for_claims, "penstock-claims")
        while not self.ticket.done:
            pause_s = self.assign()
            with self.ticket.changed:
                if not self.ticket.done:
                    self.ticket.changed.wait(pause_s)
            if self._weights.damage is not None:
                self.ticket.fail(self._weights.damage)
            self._look_at_reads()
            if self.ticket.look() > self.stall_s:
                kind = SourceStalled if self._following or self._gave_nothing else SourceUnavailable
                what = f"no progress for {self.stall_s} s with {int((~self._weights.have).sum())} chunks missing"
                asked = "storage" if self._storage is not None else "no fallback was given; the hub"
                self.ticket.fail(self.outcome.stalled(kind, what, f"{asked}: {self._hub_says}"))
        self.ticket.check()
        return self.outcome

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=guarded, args=(self.ticket, target), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # -- talking to the hub, each in a thread of its own

    def _ask_for_upstreams(self) -> None:
        while not self._closing.is_set():
            wait_s = 0.5
            self._ask_now.clear()
            self._drop_failed()
            try:
                reads = self._storage is not None and not self._is_storage_out
                reply = self._member.upstreams(self._weights, can_read_storage=reads)
                wait_s = reply.ask_again_s
                self._is_alone = self._is_refused = False
                self._heard_of_readers(reply)
                if self._storage is None:
                    self._hub_says = f"named {len(reply.upstreams)} members to take from"
                self._follow(reply.upstreams)
            except PenstockError as error:
                self._hub_failed(error)  # known upstreams stay in use
            self._knows_members.set()
            self._closing.wait(self._rest_s)
            if not self._ask_now.wait(wait_s / 4) and not self._is_idle():
                self._ask_now.wait(wait_s * 3 / 4)

    @property
    def _rest_s(self) -> float:
        """Before a slow hub is asked again; short beside a stall, so that it is seen in time when nothing comes."""
        return min(self._member.hub.rest_s, self.stall_s / 8)

    def _hub_failed(self, error: PenstockError) -> None:
        """It did not answer, or it refused us: that will not be otherwise later, so nobody waits for it."""
        self._is_refused = isinstance(error, PermissionDenied)
        self._hub_says = f"it refused: {error.message}" if self._is_refused else error.message
        if self._is_refused and self._storage is None and not self._following:
            self.ticket.fail(error)

    def _is_idle(self) -> bool:
        """Whether nobody that is followed has anything for us now: then others are asked for sooner."""
        with self._lock:
            missing = ~self._weights.have
            return not (self._flying.any() or any((one.has & missing).any() for one in self._following))

    def _following_of(self, upstream: Upstream, rank: int) -> UpstreamReader:
        """Return a reader that follows an upstream."""
        member = self._member
        return UpstreamReader(
            member.peer(upstream, self._weights.key),
            rank,
            self._weights,
            member.links,
            self.ticket,
            same_host=upstream.host == member.host,
            min_bytes_per_s=member.min_bytes_per_s,
        )

    def _follow(self, upstreams: Sequence[Upstream]) -> None:
        """Follow those the hub named, in its order; those it no longer names are left in use, last."""
        now, named = time.monotonic(), {upstream.member for upstream in upstreams}
        with self._lock:
            if self._closing.is_set():
                return
            known = {one.upstream.member: one for one in self._following}
            for rank, upstream in enumerate(upstreams):
                if upstream.member in known:
                    known[upstream.member].rank = rank
                elif self._forgive.get(upstream.member, (0.0, 0.0))[0] <= now:
                    self._following.append(self._following_of(upstream, rank))
            for one in self._following:
                if one.upstream.member not in named:
                    one.rank = len(named)
            self._following.sort(key=lambda one: one.rank)
            self._weights.parent = self._following[0].upstream.member if self._following else ""

    def _drop_failed(self) -> None:
        """Drop upstreams that failed or are full; complain of those that failed, and try each again later.

        A full holder is no fault: a complaint would make the hub discount its chunks and hand them out to be read from
        storage again. It was: eight cold starters read storage 3.3 to 5.9 times.
        """
        now = time.monotonic()
        with self._lock:
            failed = [one for one in self._following if one.error is not None and not one.num_flying]
            for one in failed:
                self._following.remove(one)
                who = one.upstream.member
                if isinstance(one.error, SourceBusy):
                    self._forgive[who] = (now + BUSY_S, self._forgive.get(who, (0.0, FORGIVE_S / 2))[1])
                    self.outcome.full[who] = str(one.error)
                    continue
                wait_s = min(2 * self._forgive.get(who, (0.0, FORGIVE_S / 2))[1], self.stall_s)
                self._forgive[who] = (float("inf") if one.is_too_slow else now + wait_s, wait_s)
                self.outcome.faults.append(f"{who[:8]}: {one.fault}")
        for one in failed:
            assert one.error is not None
            if not isinstance(one.error, SourceBusy):
                self._member.complain(one.upstream.member, self._weights.key, one.error, one.proof)
            one.close()

    def _ask_for_claims(self) -> None:
        assert self._storage is not None
        while not (self._closing.is_set() or self._weights.is_whole or self._is_storage_out):
            wait_s = 0.5
            ranges: Ranges = ()
            try:
                if self._should_go_alone():
                    ranges, wait_s = to_ranges(self._next_missing()), TURN_S
                else:
                    reply = self._member.claim(self._weights)
                    ranges, wait_s, self._hub_says = reply.ranges, reply.ask_again_s, reply.why
                if ranges:
                    wait_s = 0.0 if self._read_claim(ranges) else TURN_S
            except PenstockError as error:
                self._hub_failed(error)
                wait_s = 0.0 if self._is_refused and not self._is_alone else wait_s
            self._closing.wait(wait_s if ranges else max(wait_s, self._rest_s))
        while self._is_storage_out and not self._closing.is_set():
            try:
                self._member.claim(self._weights, ask=False)  # others read what this one was given
                return
            except PenstockError:
                self._closing.wait(0.5)

    def _heard_of_readers(self, reply: UpstreamsReply) -> None:
        """Note whether others read storage and get on: who waits for what they read has nobody to blame."""
        is_alive = 0 <= reply.reader_silent_s < self.stall_s / 2
        valid_s = 2 * reply.ask_again_s + HEARD_S
        self._others_read_until = time.monotonic() + valid_s if is_alive else 0.0

    def _should_go_alone(self) -> bool:
        """Whether the hub refused us, or nothing came for so long that storage is read without its word.

        Then the hub is away, or members that have what is missing live and give nothing.
        """
        if not self._is_alone and (self._is_refused or self._hunger.seconds > self.stall_s / 2):
            self._is_alone = True
            self.outcome.goes_alone(self._hub_says)
        return self._is_alone

    def _next_missing(self) -> I64:
        with self._lock:
            return np.flatnonzero(~self._weights.have & ~self._flying)[:ALONE_CHUNKS]

    def _read_claim(self, ranges: tuple[tuple[int, int], ...]) -> bool:
        """Have claimed chunks read; returns when it is time for the next claim.

        False: none of them was missing any more.
        """
        assert self._storage is not None
        chunks = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        with self._lock:
            chunks = chunks[~self._weights.have[chunks] & ~self._flying[chunks]]
            if self._closing.is_set() or not len(chunks):
                return False
            self._flying[chunks] = self._claimed[chunks] = True
            self._weights.claims = to_ranges(np.flatnonzero(self._claimed))
            self._claim_read.clear()
            self._part.post(ReadFromStorage(self, self._storage, chunks))
        while not (self._claim_read.wait(self.stall_s) or self._closing.is_set()):
            pass  # storage has its own deadline
        return True

    def claim_is_read(self) -> None:
        """Little of the last claim is left to be read, or nothing."""
        self._claim_read.set()

    def _landed(self, chunks: I64) -> None:
        """These chunks are under way no more. Order: with the lock held."""
        self._flying[chunks] = self._claimed[chunks] = False
        self._weights.claims = to_ranges(np.flatnonzero(self._claimed))

    # -- progress: whose deadline runs

    def _received_bytes(self) -> int:
        """Bytes received so far, those of unfinished reads too; only grows."""
        with self._lock:
            nbytes = self._read_bytes + sum(step.received_bytes for step in self._reading)
        return nbytes + (self._storage.received_bytes if self._storage is not None else 0)

    def _is_feeding(self) -> bool:
        """Whether storage is read, bytes are verified, or all we can do is wait for members that read storage.

        Or for a hub that is late: on a host of two cores 64 starters keep it from answering for longer than a stall's
        half, and those that then read storage without its word made it later still.
        """
        if self._part.is_busy() or self._compute.is_busy() or (self._storage is not None and self._member.hub.is_busy):
            return True
        return time.monotonic() < self._others_read_until and not self._gave_nothing and self._is_idle()

    def _is_under_way(self) -> bool:
        """Whether something is under way that has a deadline of its own.

        A read of an upstream that failed since the last verified byte is not: each may cost this fetch one stall, not
        one each time it is tried again.
        """
        with self._lock:
            is_new = any(step.giver.upstream.member not in self._gave_nothing for step in self._reading)
        return is_new or self._is_feeding()

    def _look_at_reads(self) -> None:
        """Note how long nothing came, and end reads that give less than `LEAST_BYTES` within their deadline."""
        moved, received = self.ticket.moved_bytes, self._received_bytes()
        self._hunger.look(moved, received, is_paused=self._is_feeding)
        self._weights.silent_s = self._quiet.look(moved, received)
        with self._lock:
            reading: dict[UpstreamReader, list[ReadFromUpstream]] = {one: [] for one in self._following}
            for step in self._reading:
                reading.setdefault(step.giver, []).append(step)
        for one, steps in reading.items():
            if one.is_silent(sum(step.received_bytes for step in steps), self.read_stall_s, is_read=bool(steps)):
                message = f"it gave less than {LEAST_BYTES} bytes for {self.read_stall_s:g} s"
                error = SourceStalled(message, uri=f"penstock:{one.upstream.member}")
                for step in steps:
                    step.stop(error)

    @property
    def read_stall_s(self) -> float:
        """How long an upstream that gives nothing is waited for: less where there is storage to read instead."""
        can_read_storage = self._storage is not None and not self._is_storage_out
        return self.stall_s / 2 if can_read_storage else self.stall_s

    def reads(self, step: ReadFromUpstream) -> None:
        """A read of an upstream begins."""
        with self._lock:
            self._reading.add(step)

    # -- what is read from whom

    def assign(self) -> float:
        """Post reads for every upstream that has room and something for us; when to look again, at the latest."""
        posts, pause_s, is_first = [], TURN_S, True
        with self._lock:
            for one in self._following:
                if one.error is not None and not one.num_flying:
                    self._ask_now.set()
                if (early_s := one.not_before - time.monotonic()) > 0:
                    pause_s = min(pause_s, early_s)
                while one.error is None and one.num_flying < READS_OF_ONE and time.monotonic() >= one.not_before:
                    chunks = self._choose(one)
                    if not len(chunks):
                        break
                    self._flying[chunks] = True
                    one.num_flying += 1
                    posts.append(ReadFromUpstream(self, one, chunks))
                if is_first and int(self._wanted(one).sum()) < one.step_chunks:
                    one.hurry()  # what it is known to have is soon read
                is_first &= not one.holds_back
            if posts and not self._closing.is_set():
                self._fetch.post(*posts)
        if pause_s < TURN_S:
            self.ticket.wake()  # for `run` to look again when it is time
        return pause_s

    def _choose(self, one: UpstreamReader) -> I64:
        """Chunks to take from it now: those it has that we want and that no earlier one will give."""
        found: I64 = np.flatnonzero(self._wanted(one))[: one.step_chunks]
        earlier = [other for other in self._following if other.rank < one.rank and other.holds_back]
        if not len(found) or all(one.is_much_faster_than(other) for other in earlier):
            return found
        return found[-1:] if one.should_probe() else found[:0]

    def _wanted(self, one: UpstreamReader) -> Bools:
        return one.has & ~self._weights.have & ~self._flying

    # -- what steps ask and report

    def begins(self) -> None:
        """A byte is about to be asked for."""
        with self._lock:
            told, self._on_first = self._on_first, []
        for tell in told:
            tell()

    def nbytes_of(self, chunks: I64) -> int:
        """Bytes of these chunks."""
        return int(self._weights.layout.chunks.nbytes[chunks].sum())

    def leaves_of(self, chunks: I64) -> I64:
        """Indices of their leaves in the line."""
        return self._weights.layout.chunks.leaves_of(chunks)

    def got(self, arrival: ReceivedChunks) -> None:
        """The bytes of these chunks are in place: have them verified."""
        with self._lock:
            self._arrived.append(arrival)
        self._compute.post(VerifyReceived(self, int(arrival.chunks[0])))

    def verify(self) -> int:
        """Digest and compare what arrived, as much at once as there is, and serve it on; bytes digested."""
        with self._lock:
            batch = next_batch(self._arrived, NUM_VERIFYING)
        if not batch:
            return 0  # a step before this one had it
        good = []
        for one, wrong in verify(self._weights, batch):
            if len(wrong):
                self._refuse(one, int(wrong[0]))
            else:
                good.append((one, self.nbytes_of(one.chunks)))
        self._note(good)
        if self._weights.is_whole:
            self.ticket.finish()
        return sum(nbytes for _, nbytes in good)

    def _note(self, good: Sequence[tuple[ReceivedChunks, int]]) -> None:
        """These were verified, and are served on."""
        weights = self._weights
        with self._lock:
            if good:
                self._gave_nothing.clear()
            for one, nbytes in good:
                self._landed(one.chunks)
                self.outcome.took(one.path, nbytes)
                self.ticket.moved_bytes += nbytes
                if one.giver is not None:
                    self.outcome.why[one.path] = one.giver.why.get(one.path) or NEAREST
            weights.gb_per_s = self.ticket.moved_bytes / GB / max(1e-3, time.monotonic() - self._begun)
            weights.path, weights.why = self.outcome.shares(), self.outcome.reasons()

    def _refuse(self, arrival: ReceivedChunks, wrong: int) -> None:
        """A chunk of it is wrong: it is read again, and not from there."""
        message = f"chunk {wrong} differs from its digest"
        if arrival.giver is None:
            bad = IntegrityError(f"{message} in storage", uri=arrival.path, hint="fetch the files anew")
            self.storage_failed(bad, arrival.chunks)
            return
        arrival.giver.gave_wrong(wrong)
        arrival.giver.fail(IntegrityError(message, uri=f"penstock:{arrival.giver.upstream.member}"))
        self.lost(arrival.chunks)

    def lost(self, chunks: I64) -> None:
        """These chunks did not arrive: they are wanted again."""
        with self._lock:
            self._landed(chunks)
        self.ticket.wake()

    def storage_failed(self, error: PenstockError, chunks: I64) -> None:
        """This worker reads no more of it. The end, unless there is a member to go on with."""
        self.outcome.faults.append(f"storage: {error}")
        self._is_storage_out = True
        self._knows_members.wait(self.stall_s)  # the hub's answer, or that there is none, comes well before
        if not self._following:
            self.ticket.fail(error)
        self.lost(chunks)

    def landed(self, one: UpstreamReader, step: ReadFromUpstream) -> None:
        """A read of this upstream ended, or was never begun."""
        with self._lock:
            one.num_flying -= 1
            if step in self._reading:
                self._reading.discard(step)
                self._read_bytes += step.received_bytes
            if one.error is not None:
                self._gave_nothing.add(one.upstream.member)

    def close(self) -> None:
        """End every thread. Idempotent."""
        with self._lock:
            self._closing.set()  # whatever the hub says from now on begins nothing
        for event in (self._ask_now, self._claim_read, self._knows_members):
            event.set()
        if not self.ticket.done:
            self.ticket.cancel()
        with self._lock:
            reading = list(self._reading)
        for step in reading:
            step.stop(Cancelled("the fetch is over"))
        for executor in (self._part, self._fetch, self._compute):
            executor.close()
        for thread in self._threads:
            thread.join(timeout=END_S)  # it may be waiting for the hub
        with self._lock:
            following, self._following = self._following, []
        for one in following:
            one.close()
            if one.error is not None and not isinstance(one.error, SourceBusy):
                self.outcome.faults.append(f"{one.upstream.member[:8]}: {one.error.message}")
        # A circle would keep the memory that was filled until Python's collector comes by, whoever drops the tensors.
        self.ticket.is_busy, self.ticket.received = bool, None


class ReadFromUpstream(Work):
    """Read chunks from an upstream's memory into ours."""

    __slots__ = ("_chunks", "_fetch", "_posted", "giver")

    def __init__(self, fetch: Fetch, one: UpstreamReader, chunks: I64) -> None:
        first = int(chunks[0])
        super().__init__(fetch.ticket, first, f"{one.path} {first}", fetch.nbytes_of(chunks))
        self._fetch, self.giver, self._chunks = fetch, one, chunks
        self._posted: list[PendingRead] = []

    @property
    def received_bytes(self) -> int:
        """Bytes of it that arrived, verified or not."""
        return sum(read.moved_bytes for read in self._posted)

    def stop(self, error: PenstockError) -> None:
        """End it early, where its transport can: nothing is written once the step has ended."""
        for read in list(self._posted):
            if isinstance(read, Stoppable):
                read.fail(error)

    def start(self) -> Pending | None:
        """See `Step.start`. An upstream's failure is its own, not the fetch's."""
        one, fetch, begun = self.giver, self._fetch, time.monotonic()
        fetch.reads(self)
        try:
            self._read()
        except (Cancelled, DestinationError):
            raise
        except PenstockError as error:  # also what keeps its memory from ours: others, or storage, may do
            one.fail(error)
            fetch.lost(self._chunks)
            fetch.landed(one, self)
            return None
        one.gave(self.nbytes, time.monotonic() - begun)
        fetch.landed(one, self)
        fetch.assign()  # its next read is under way before these bytes are verified
        wanted = one.leaves[fetch.leaves_of(self._chunks)]
        fetch.got(ReceivedChunks(chunks=self._chunks, wanted=wanted, path=one.path, giver=one))
        return None

    def _read(self) -> None:
        fetch, reads = self._fetch, self.giver.reads(self._chunks)
        fetch.begins()
        failed, is_touched = wait_all(self._posting(reads), stall_s=fetch.read_stall_s)
        fetch.is_touched |= is_touched
        if failed is not None:
            raise failed
        for transport, _, source, _ in reads:
            self.giver.came_by(transport, source)

    def _posting(self, reads: list[Read]) -> Iterator[tuple[Transport, PendingRead]]:
        for transport, into, source, rows in reads:
            read = transport.post_read(into, source, rows)
            self._posted.append(read)
            yield transport, read

    def abandon(self) -> None:
        """The fetch is over."""
        self._fetch.landed(self.giver, self)


class ReadFromStorage(Work):
    """Read claimed chunks from storage."""

    __slots__ = ("_chunks", "_fetch", "_storage")

    def __init__(self, fetch: Fetch, storage: StorageReader, chunks: I64) -> None:
        first = int(chunks[0])
        super().__init__(fetch.ticket, first, f"storage {first}", fetch.nbytes_of(chunks))
        self._fetch, self._storage, self._chunks = fetch, storage, chunks

    def start(self) -> Pending | None:
        """See `Step.start`."""
        fetch, left, is_told = self._fetch, set(self._chunks.tolist()), False
        fetch.begins()
        try:
            for chunks in self._storage.read(self._chunks):
                fetch.is_touched = True
                left -= set(chunks.tolist())
                fetch.got(ReceivedChunks(chunks=chunks, wanted=None, path=f"storage {self._storage.uri}", giver=None))
                if fetch.ticket.done:
                    break
                if not is_told and len(left) <= LITTLE * len(self._chunks):
                    is_told = True
                    fetch.claim_is_read()
        except PenstockError as error:
            if error.blame != "source":
                raise
            fetch.storage_failed(error, np.array(sorted(left), np.int64))
        if not is_told:
            fetch.claim_is_read()
        return None


class VerifyReceived(Work):
    """Digest chunks that arrived, these or others."""

    __slots__ = ("_fetch",)

    def __init__(self, fetch: Fetch, first_chunk: int) -> None:
        super().__init__(fetch.ticket, first_chunk, f"verify {first_chunk}")
        self._fetch = fetch

    def start(self) -> Pending | None:
        """See `Step.start`."""
        self.nbytes = self._fetch.verify()
        return None
