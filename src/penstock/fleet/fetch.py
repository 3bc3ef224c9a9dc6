"""Filling one holding: chunks from upstreams, chunks claimed from storage, each verified and served on at once.

In: a member, a registered holding, perhaps a way to read storage. Out: a whole holding, and where its bytes came from.
Not here: who the upstreams are (`plan.relay`, at the hub), what a caller passes and gets (`join`).

    hub --upstreams--> follow logs --> assign --> fetch: read chunks --> compute: digest, compare --> holding.gain
     '----claims----> fetch: read storage ------------------------------^
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.engine.executors import Executor, Pending
from penstock.engine.ticket import Ticket
from penstock.engine.trace import Trace
from penstock.errors import IntegrityError, PenstockError, SourceStalled, SourceUnavailable
from penstock.fleet.holding import Holding
from penstock.fleet.member import Member
from penstock.fleet.messages import Upstream
from penstock.fleet.part import StoragePart
from penstock.fleet.upstream import END_S, Following
from penstock.plan.chunks import to_ranges
from penstock.types import I64, U64

READS_AT_ONCE = 4
"""Reads of upstreams under way at once in all; two of each, so that one is under way while the next is posted."""
READS_OF_ONE = 2
TURN_S = 0.05
"""Longest pause between looks at what can be assigned; news end it."""
FORGIVE_S = 2.0
"""An upstream that failed is tried again after this long, if the hub still names it; doubled each time."""


@dataclass(slots=True)
class Outcome:
    """Where the bytes came from."""

    nbytes_by_path: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """Upstreams that failed, and why."""
    why: dict[str, str] = field(default_factory=dict)
    """Path -> why no nearer transport."""

    def took(self, path: str, nbytes: int) -> None:
        """Note bytes that were verified."""
        self.nbytes_by_path[path] = self.nbytes_by_path.get(path, 0) + nbytes


class Fetch:
    """One running fetch. A context manager: leaving it ends every thread, and nothing writes to the holding after.

    Args:
        member: who fetches.
        holding: registered, filling.
        storage: how to read chunks nobody has; None: only from peers.
        stall_s: deadline by progress.
        trace: where spans go.
    """

    def __init__(
        self, member: Member, holding: Holding, *, storage: StoragePart | None, stall_s: float, trace: Trace
    ) -> None:
        self._member, self._holding, self._storage, self.stall_s = member, holding, storage, stall_s
        self.outcome = Outcome()
        self._flying = np.zeros(holding.line.chunks.num_chunks, bool)
        self._following: list[Following] = []
        self._forgive: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._fetch = Executor("fetch", READS_AT_ONCE, trace=trace, stall_s=stall_s)
        self._part = Executor("fetch", 1, trace=trace, stall_s=stall_s)
        self._compute = Executor("compute", 2, trace=trace, stall_s=stall_s)
        executors = (self._fetch, self._part, self._compute)
        self.ticket = Ticket(holding.line.nbytes, lambda: any(e.is_busy() for e in executors))
        self._is_storage_out = False
        self._hub_says = "not asked yet"
        self._threads: list[threading.Thread] = []

    def run(self) -> Outcome:
        """Return once every chunk is verified.

        Raises:
            SourceUnavailable, SourceStalled: nobody has what is missing, or nobody gave a byte, for `stall_s`.
            IntegrityError: holders disagree on what the bytes are.
            PenstockError: storage's own errors.
        """
        if self._holding.is_whole:
            self.ticket.finish()
        self._start(self._ask_for_upstreams, "penstock-flight")
        if self._storage is not None:
            self._start(self._ask_for_claims, "penstock-claims")
        moved, since = -1, time.monotonic()
        while not self.ticket.done:
            self._assign()
            with self.ticket.changed:
                if not self.ticket.done:
                    self.ticket.changed.wait(TURN_S)
            if self.ticket.moved_bytes != moved or self.ticket.is_busy():
                moved, since = self.ticket.moved_bytes, time.monotonic()
            elif time.monotonic() - since > self.stall_s:
                self.ticket.fail(self._stalled())
        self.ticket.check()
        return self.outcome

    def _stalled(self) -> PenstockError:
        left = int((~self._holding.have).sum())
        tried = "; ".join(self.outcome.faults[-4:]) or "no member has them"
        storage = "no fallback was given" if self._storage is None else f"storage: {self._hub_says}"
        kind = SourceUnavailable if not self._following else SourceStalled
        return kind(
            f"no progress for {self.stall_s} s with {left} chunks missing: {tried}; {storage}",
            hint="see `penstock why` for what each holder lacks; give fallback= to read storage",
        )

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # -- talking to the hub, each in a thread of its own

    def _ask_for_upstreams(self) -> None:
        while not self._closing.is_set():
            wait_s = 0.5
            try:
                reply = self._member.flight(self._holding, can_read_storage=self._storage is not None)
                wait_s = reply.ask_again_s
                self._follow(reply.upstreams)
            except PenstockError as error:
                self._hub_says = error.message  # known upstreams stay in use
            self._closing.wait(wait_s)

    def _follow(self, upstreams: Sequence[Upstream]) -> None:
        """Follow those the hub named, in its order; those it no longer names are left in use, last."""
        now, named = time.monotonic(), {upstream.member for upstream in upstreams}
        with self._lock:
            self._reap(now)
            known = {one.upstream.member: one for one in self._following}
            for rank, upstream in enumerate(upstreams):
                if upstream.member in known:
                    known[upstream.member].rank = rank
                elif self._forgive.get(upstream.member, (0.0, 0.0))[0] <= now:
                    self._following.append(self._member.follow(upstream, rank, self._holding, self.ticket.wake))
            for one in self._following:
                if one.upstream.member not in named:
                    one.rank = len(named)
            self._following.sort(key=lambda one: one.rank)
            self._holding.parent = self._following[0].upstream.member if self._following else ""

    def _reap(self, now: float) -> None:
        """Drop those that failed: note why, complain, and forgive them later."""
        for one in [one for one in self._following if one.error is not None and not one.num_flying]:
            self._following.remove(one)
            one.close()
            who = one.upstream.member
            wait_s = min(2 * self._forgive.get(who, (0.0, FORGIVE_S / 2))[1], self.stall_s)
            self._forgive[who] = (now + wait_s, wait_s)
            assert one.error is not None
            self.outcome.faults.append(f"{who[:8]}: {one.error.message}")
            self._member.complain(who, self._holding.key, one.error)

    def _ask_for_claims(self) -> None:
        assert self._storage is not None
        while not (self._closing.is_set() or self._holding.is_whole or self._is_storage_out):
            wait_s = 0.5
            try:
                reply = self._member.claim(self._holding)
                wait_s, self._hub_says = reply.ask_again_s, reply.why
                if reply.ranges:
                    self._read_claims(reply.ranges)
                    continue
            except PenstockError as error:
                self._hub_says = error.message
            self._closing.wait(wait_s)

    def _read_claims(self, ranges: tuple[tuple[int, int], ...]) -> None:
        """Read claimed chunks; returns once they are verified, or were given up."""
        assert self._storage is not None
        chunks = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        with self._lock:
            chunks = chunks[~self._holding.have[chunks] & ~self._flying[chunks]]
            self._flying[chunks] = True
        self._holding.claims = to_ranges(chunks)
        if len(chunks):
            self._part.post(_PartStep(self, self._storage, chunks))
        while not self.ticket.done and not self._closing.is_set() and self._flying[chunks].any():
            with self._holding.changed:
                self._holding.changed.wait(TURN_S)
        self._holding.claims = ()

    # -- what is read from whom

    def _assign(self) -> None:
        """Post reads for every upstream that has room and something for us."""
        posts = []
        with self._lock:
            for one in self._following:
                while one.error is None and one.num_flying < READS_OF_ONE and time.monotonic() >= one.not_before:
                    chunks = self._choose(one)
                    if not len(chunks):
                        break
                    self._flying[chunks] = True
                    one.num_flying += 1
                    posts.append(_PeerStep(self, one, chunks))
        if posts:
            self._fetch.post(*posts)

    def _choose(self, one: Following) -> I64:
        """Chunks to take from it now: those it has that we want and that no earlier one will give."""
        wanted = one.has & ~self._holding.have & ~self._flying
        if any(other.holds_back for other in self._following if other.rank < one.rank):
            return np.zeros(0, np.int64)
        return np.flatnonzero(wanted)[: one.step_chunks]

    # -- what steps ask and report

    def nbytes_of(self, chunks: I64) -> int:
        """Bytes of these chunks."""
        return int(self._holding.line.chunks.nbytes[chunks].sum())

    def leaves_of(self, chunks: I64) -> I64:
        """Indices of their leaves in the line."""
        return self._holding.line.chunks.leaves_of(chunks)

    def got(self, chunks: I64, wanted: U64 | None, path: str, giver: Following | None) -> None:
        """The bytes of these chunks are in place: have them verified."""
        self._compute.post(_VerifyStep(self, chunks, wanted, path, giver))

    def verify(self, chunks: I64, wanted: U64 | None, path: str, giver: Following | None) -> None:
        """Digest, compare, and serve on."""
        holding = self._holding
        digests = holding.digest(chunks)
        if wanted is None and holding.has_manifest:
            wanted = holding.leaves[holding.line.chunks.leaves_of(chunks)]
        wrong = holding.differing(chunks, digests, wanted) if wanted is not None else chunks[:0]
        if len(wrong):
            message = f"chunk {int(wrong[0])} differs from its digest"
            if giver is None:
                raise IntegrityError(f"{message} in storage", uri=path, hint="fetch the files anew")
            giver.fail(IntegrityError(message, uri=f"penstock:{giver.upstream.member}"))
            self.lost(chunks)
            return
        holding.gain(chunks, digests)
        nbytes = self.nbytes_of(chunks)
        with self._lock:
            self._flying[chunks] = False
            self.outcome.took(path, nbytes)
            holding.path = path
            self.ticket.moved_bytes += nbytes
        if holding.is_whole:
            self.ticket.finish()
        else:
            self.ticket.wake()

    def lost(self, chunks: I64) -> None:
        """These chunks did not arrive: they are wanted again."""
        with self._lock:
            self._flying[chunks] = False
        self.ticket.wake()

    def storage_failed(self, error: PenstockError, chunks: I64) -> None:
        """This worker reads no more of it. The end, unless there is a member to go on with."""
        self.outcome.faults.append(f"storage: {error}")
        self._is_storage_out = True
        if not self._following:
            self.ticket.fail(error)
        self.lost(chunks)

    def landed(self, one: Following) -> None:
        """A read of this upstream ended."""
        with self._lock:
            one.num_flying -= 1
            if one.path:
                self.outcome.why[one.path] = one.why

    def close(self) -> None:
        """End every thread. Idempotent."""
        self._closing.set()
        if not self.ticket.done:
            self.ticket.cancel()
        for executor in (self._part, self._fetch, self._compute):
            executor.close()
        for thread in self._threads:
            thread.join(timeout=END_S)  # it may be waiting for the hub
        with self._lock:
            following, self._following = self._following, []
        for one in following:
            one.close()
            if one.error is not None:
                self.outcome.faults.append(f"{one.upstream.member[:8]}: {one.error.message}")

    def __enter__(self) -> Fetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _PeerStep:
    """Read chunks from an upstream's memory into ours."""

    __slots__ = ("_chunks", "_fetch", "_one", "name", "nbytes", "priority", "ticket")

    def __init__(self, fetch: Fetch, one: Following, chunks: I64) -> None:
        self._fetch, self._one, self._chunks = fetch, one, chunks
        self.priority, self.ticket = int(chunks[0]), fetch.ticket
        self.name = f"{one.path} {self.priority}"
        self.nbytes = fetch.nbytes_of(chunks)

    def start(self) -> Pending | None:
        """See `Step.start`. An upstream's failure is its own, not the fetch's."""
        one, fetch, begun = self._one, self._fetch, time.monotonic()
        try:
            posted = []
            for transport, into, descriptor, segments in one.reads(self._chunks):
                posted.append((transport, transport.post_read(into, descriptor, segments)))
            for transport, pending in posted:
                transport.wait(pending, stall_s=fetch.stall_s)
        except PenstockError as error:
            if error.blame != "source":
                raise
            one.fail(error)
            fetch.lost(self._chunks)
        else:
            one.gave(self.nbytes, time.monotonic() - begun)
            wanted = one.leaves[fetch.leaves_of(self._chunks)]
            fetch.got(self._chunks, wanted, one.path, one)
        fetch.landed(one)
        return None

    def finish(self) -> None:
        """Nothing left: the chunks were handed to be verified."""

    def abandon(self) -> None:
        """The fetch is over."""
        self._fetch.landed(self._one)


class _PartStep:
    """Read claimed chunks from storage."""

    __slots__ = ("_chunks", "_fetch", "_storage", "name", "nbytes", "priority", "ticket")

    def __init__(self, fetch: Fetch, storage: StoragePart, chunks: I64) -> None:
        self._fetch, self._storage, self._chunks = fetch, storage, chunks
        self.priority, self.ticket = int(chunks[0]), fetch.ticket
        self.name, self.nbytes = f"storage {self.priority}", fetch.nbytes_of(chunks)

    def start(self) -> Pending | None:
        """See `Step.start`."""
        fetch, left = self._fetch, set(self._chunks.tolist())
        try:
            for chunks in self._storage.read(self._chunks):
                left -= set(chunks.tolist())
                fetch.got(chunks, None, f"storage {self._storage.uri}", None)
                if fetch.ticket.stopped:
                    break
        except PenstockError as error:
            if error.blame != "source":
                raise
            fetch.storage_failed(error, np.array(sorted(left), np.int64))
        return None

    def finish(self) -> None:
        """Nothing left: the chunks were handed to be verified."""

    def abandon(self) -> None:
        """The fetch is over."""


class _VerifyStep:
    """Digest chunks that arrived."""

    __slots__ = ("_args", "_fetch", "name", "nbytes", "priority", "ticket")

    def __init__(self, fetch: Fetch, chunks: I64, wanted: U64 | None, path: str, giver: Following | None) -> None:
        self._fetch, self._args = fetch, (chunks, wanted, path, giver)
        self.priority, self.ticket = int(chunks[0]), fetch.ticket
        self.name, self.nbytes = f"verify {self.priority}", fetch.nbytes_of(chunks)

    def start(self) -> Pending | None:
        """See `Step.start`."""
        self._fetch.verify(*self._args)
        return None

    def finish(self) -> None:
        """Nothing left."""

    def abandon(self) -> None:
        """The fetch is over."""
