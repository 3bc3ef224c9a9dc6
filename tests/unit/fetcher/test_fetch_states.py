"""States of a fetch whose holders, hub and storage are objects of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.run import StallTimer
from penstock.engine.trace import Trace
from penstock.errors import (
    Cancelled,
    HubUnavailable,
    IntegrityError,
    PeerLost,
    PenstockError,
    PermissionDenied,
    SourceBusy,
    SourceError,
    SourceStalled,
    SourceUnavailable,
)
from penstock.fetcher.hub_poller import HubState
from penstock.fetcher.run import FetchRun, FetchState, ReadFromUpstream
from penstock.fetcher.upstream import UNNAMED
from penstock.holding.placement import PlacedChunks
from penstock.holding.weight_layout import WeightLayout, layout_of_tensors, tabulate
from penstock.hub.messages import ClaimReply, Identity, Upstream, UpstreamsReply
from penstock.peer.local_weights import LocalWeights
from penstock.timing import Timing
from penstock.types import I64, DType

NUM_CHUNKS = 8
CHUNK_BYTES = 32
TRUTH = torch.arange(NUM_CHUNKS * CHUNK_BYTES, dtype=torch.uint8)
TIMING = Timing(
    fetch_turn_s=0.005,
    hub_pause_s=0.005,
    hub_retry_s=0.01,
    hub_word_s=0.05,
    gather_s=0.01,
    failed_pause_s=0.02,
    silent_pause_s=0.1,
    full_pause_s=0.02,
)


def make_weights() -> LocalWeights:
    """Return empty weights whose digests are those of `TRUTH`."""
    layout = WeightLayout.of(
        tabulate(["t"], [DType.U8], [(NUM_CHUNKS * CHUNK_BYTES,)]), leaf_bytes=16, chunk_bytes=CHUNK_BYTES
    )
    leaves = PlacedChunks(layout, layout_of_tensors({"t": TRUTH.clone()})[1]).digest(np.arange(NUM_CHUNKS))
    rows = layout_of_tensors({"t": torch.zeros_like(TRUTH)})[1]
    return LocalWeights(Identity(model="m"), layout, rows, leaves=leaves)


class Read:
    """A posted read of a holder's memory. See `PendingRead` and `Stoppable`."""

    def __init__(self, chunks: I64) -> None:
        self.chunks = chunks
        self.nbytes = len(chunks) * CHUNK_BYTES
        self.moved_bytes = 0
        self.stopped = threading.Event()
        self.error: PenstockError | None = None

    def fail(self, error: PenstockError) -> None:
        self.error = self.error or error
        self.stopped.set()


class Holder:
    """A holder with every chunk and the reader that follows it. `how` selects its behaviour."""

    name = "memory"

    def __init__(self, member: str, how: str, weights: LocalWeights) -> None:
        self.upstream = upstream(member)
        self.how = how
        self.weights = weights
        self.ranks = (0,)
        self.path = f"memory <- {member}"
        self.why: dict[str, str] = {}
        self.is_too_slow = self.is_measured = self.is_closed = False
        self.num_flying = 0
        self.not_before = self.last_read = 0.0
        self.step_chunks = 2
        self.suspect_chunk: int | None = None
        self.posted: list[Read] = []
        self.silence = StallTimer()
        errors = {"full": SourceBusy("all places are taken"), "refuses": PermissionDenied("the grant is not valid")}
        self.error: PenstockError | None = errors.get(how)
        self.has = np.full(NUM_CHUNKS, self.error is None)
        self.is_connected = self.error is None

    @property
    def fault(self) -> str:
        return self.error.message if self.error is not None else ""

    @property
    def is_parent(self) -> bool:
        return 0 in self.ranks

    def holds_back(self, tree: int) -> bool:
        return self.error is None and self.ranks[tree] != UNNAMED

    def is_much_faster_than(self, other: Holder) -> bool:
        return False

    def should_probe(self) -> bool:
        return False

    def charge(self, nbytes: int) -> None: ...

    def request_news(self) -> None: ...

    def renew(self, upstream: Upstream) -> None: ...

    def note_read(self, chunks: I64, nbytes: int, seconds: float) -> None:
        self.last_read = time.monotonic()

    def note_transport_used(self, transport: object, source: object) -> None: ...

    def is_silent(self, received_bytes: int, stall_s: float, *, is_read: bool) -> bool:
        if not is_read:
            self.silence.begin()
            return False
        return self.silence.look(0, received_bytes) > stall_s

    def fail(self, error: PenstockError) -> None:
        self.error = self.error or error

    def close(self) -> None:
        self.is_closed = True

    # -- The transport.

    def reads_of(self, chunks: I64) -> list[Any]:
        return [(self, None, None, chunks)]

    def post_read(self, into: object, source: object, chunks: I64) -> Read:
        self.posted.append(Read(chunks))
        return self.posted[-1]

    def wait(self, read: Read, *, stall_s: float) -> None:
        if self.how == "is lost":
            raise PeerLost("its process ended")
        if self.how == "stalls":
            assert read.stopped.wait(30)
            assert read.error is not None
            raise read.error
        for chunk in read.chunks.tolist():
            span = slice(chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES)
            self.weights.memory.rows[0][span] = TRUTH[span] ^ 1 if self.how == "lies" else TRUTH[span]
        read.moved_bytes = read.nbytes


class Storage:
    """Storage that fails after a given number of chunks."""

    uri = "s"
    is_touched = False

    def __init__(self, weights: LocalWeights, error: PenstockError | None = None, *, lies: bool = False) -> None:
        self.received_bytes = self.nbytes = 0
        self.chunks: list[int] = []
        self._weights = weights
        self._error = error
        self._lies = lies

    def read(self, chunks: I64, near_end: Callable[[], None]) -> Iterator[I64]:
        if self._error is not None:
            raise self._error
        for chunk in chunks.tolist():
            span = slice(chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES)
            self._weights.memory.rows[0][span] = TRUTH[span] ^ 1 if self._lies else TRUTH[span]
            self.received_bytes += CHUNK_BYTES
            self.chunks.append(chunk)
        near_end()
        yield chunks


class Member:
    """A member whose hub names holders. If it grants claims, they cover all missing chunks."""

    id, links, min_bytes_per_s = "me", None, 0.0

    def __init__(self, *names: str, gives_claims: bool = False) -> None:
        self.names = names
        self.gives_claims = gives_claims
        self.hub = SimpleNamespace(rest_s=0.0, is_busy=False)
        self.error: PenstockError | None = None
        self.complaints: list[str] = []
        self.claims: list[bool] = []

    def upstreams(self, weights: LocalWeights, *, can_read_storage: bool, is_first: bool) -> UpstreamsReply:
        if self.error is not None:
            raise self.error
        return UpstreamsReply(upstreams=tuple(map(upstream, self.names)), ask_again_s=0.02)

    def claim(self, weights: LocalWeights, *, ask: bool = True) -> ClaimReply:
        self.claims.append(ask)
        if self.error is not None:
            raise self.error
        left = np.flatnonzero(~weights.verified.have)
        is_given = ask and self.gives_claims and len(left)
        return ClaimReply(
            ranges=((int(left[0]), int(left[-1]) + 1),) if is_given else (), ask_again_s=0.01, why="wait for it"
        )

    def complain(self, of: str, *_: object) -> bool:
        self.complaints.append(of)
        return True


def upstream(name: str) -> Upstream:
    return Upstream(member=name, host="h", doors=(), device="cpu", state="filling", num_have=0, grant=b"")


class Fetch:
    """A fetch from holders, each with a name and a word for its behaviour."""

    def __init__(self, hows: dict[str, str], member: Member | None = None, **options: Any) -> None:
        self.weights = options.pop("weights", None) or make_weights()
        self.member = member or Member(*hows)
        self.holders: dict[str, Holder] = {}
        self.num_first = 0
        self.hows = hows
        options = {"storage": None, "stall_s": 5.0, **options}
        self.run = FetchRun(
            self.member,  # type: ignore[arg-type]
            self.weights,
            trace=Trace(enabled=False),
            on_first=self._note_first,
            timing=TIMING,
            make_reader=self._make_reader,  # type: ignore[arg-type]
            **options,
        )

    def _note_first(self) -> None:
        self.num_first += 1

    def _make_reader(self, upstream: Upstream, ranks: tuple[int, ...]) -> Holder:
        self.holders[upstream.member] = holder = Holder(upstream.member, self.hows[upstream.member], self.weights)
        holder.ranks = ranks
        return holder

    def finish(self) -> None:
        """Run to the end."""
        with self.run:
            self.run.start()
            self.run.run()

    def assert_complete(self) -> None:
        assert self.weights.verified.have.all() and torch.equal(self.weights.memory.rows[0], TRUTH)


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# -- States of the fetch.


def test_successful_fetch_goes_from_new_to_closed() -> None:
    fetch = Fetch({"A": "gives"})
    assert fetch.run.state is FetchState.NEW and not fetch.holders and not fetch.num_first
    with fetch.run:
        fetch.run.start()
        with pytest.raises(RuntimeError, match="started only once"):
            fetch.run.start()
        fetch.run.run()
        assert fetch.run.state is FetchState.MOVING and fetch.num_first == 1
    assert fetch.run.state is FetchState.CLOSED and fetch.holders["A"].is_closed
    fetch.assert_complete()


def test_fetch_without_sources_requests_no_bytes() -> None:
    fetch = Fetch({}, stall_s=0.2)
    with fetch.run:
        fetch.run.start()
        assert fetch.run.state is FetchState.STARTED
        with pytest.raises(SourceUnavailable, match="8 chunks missing"):
            fetch.run.run()
        assert fetch.run.state is FetchState.STARTED
    assert fetch.run.state is FetchState.CLOSED and not fetch.num_first


def test_closed_fetch_does_not_start() -> None:
    fetch = Fetch({"A": "gives"})
    fetch.run.close()
    with pytest.raises(RuntimeError, match="started only once"):
        fetch.run.start()
    assert fetch.run.state is FetchState.CLOSED and not fetch.holders


# -- Failures of sources.

FAULTS = ["is lost", "stalls", "lies", "full", "refuses"]


@pytest.mark.parametrize("how", FAULTS)
def test_second_holder_replaces_failed_holder(how: str) -> None:
    fetch = Fetch({"A": how, "B": "gives"}, stall_s=0.5)
    fetch.finish()
    fetch.assert_complete()
    provenance = fetch.run.provenance
    if how == "full":
        assert fetch.member.complaints == [] and not provenance.faults
    else:
        # The second holder may have sent all chunks before the failed holder is dropped.
        assert any(fault.startswith("A: ") for fault in provenance.faults)
    assert (provenance.num_wrong > 0) is (how == "lies")
    assert sum(provenance.nbytes_by_path.values()) == TRUTH.nbytes and "memory <- A" not in provenance.nbytes_by_path


@pytest.mark.parametrize("how", FAULTS)
def test_storage_replaces_failed_holder(how: str) -> None:
    weights = make_weights()
    storage = Storage(weights)
    fetch = Fetch({"A": how}, Member("A", gives_claims=False), storage=storage, weights=weights, stall_s=0.6)
    fetch.finish()
    fetch.assert_complete()
    assert sorted(set(storage.chunks)) == list(range(NUM_CHUNKS))
    assert any("without a claim" in fault for fault in fetch.run.provenance.faults)


@pytest.mark.parametrize("how", FAULTS)
def test_error_names_sole_source_after_it_fails(how: str) -> None:
    fetch = Fetch({"A": how}, stall_s=0.3)
    with pytest.raises(SourceError) as raised:
        fetch.finish()
    named = {
        "is lost": "its process ended",
        "stalls": "the peer sent less than",
        "lies": "differs from its digest",
        "full": "all places are taken",
        "refuses": "the grant is not valid",
    }
    assert named[how] in str(raised.value)
    assert not fetch.weights.verified.have.any()
    assert fetch.run.state is FetchState.CLOSED
    assert (fetch.member.complaints == []) is (how == "full")


# -- Storage.


def test_claimed_chunks_are_read_from_storage() -> None:
    weights = make_weights()
    storage = Storage(weights)
    fetch = Fetch({}, Member(gives_claims=True), storage=storage, weights=weights)
    fetch.finish()
    fetch.assert_complete()
    assert storage.chunks == list(range(NUM_CHUNKS)) and fetch.num_first == 1
    assert fetch.run.hub.state is HubState.ANSWERS and not fetch.run.provenance.faults


@pytest.mark.parametrize("is_wrong", [False, True])
def test_failed_storage_without_holders_fails_fetch(is_wrong: bool) -> None:
    weights = make_weights()
    storage = Storage(weights, None if is_wrong else SourceUnavailable("the disk is gone"), lies=is_wrong)
    fetch = Fetch({}, Member(gives_claims=True), storage=storage, weights=weights)
    expected = IntegrityError if is_wrong else SourceUnavailable
    with pytest.raises(expected, match="differs from its digest in storage" if is_wrong else "the disk is gone"):
        fetch.finish()
    assert not weights.verified.have.any() and not weights.fetch.claims


def test_holder_replaces_failed_storage() -> None:
    weights = make_weights()
    storage = Storage(weights, SourceUnavailable("the disk is gone"))
    member = Member("A", gives_claims=True)
    fetch = Fetch({"A": "stalls"}, member, storage=storage, weights=weights)
    with fetch.run:
        fetch.run.start()
        thread = threading.Thread(target=fetch.run.run)
        thread.start()
        # The claim is released, so that other members read its chunks.
        member.names = ("A", "B")
        fetch.hows["B"] = "gives"
        wait_until(lambda: "B" in fetch.holders)
        fetch.holders["A"].fail(PeerLost("gone"))
        for read in fetch.holders["A"].posted:
            read.fail(PeerLost("gone"))
        thread.join(30)
    fetch.assert_complete()
    assert set(fetch.run.provenance.nbytes_by_path) == {"memory <- B"}


def test_claim_is_released_when_storage_fails() -> None:
    weights = make_weights()
    member = Member("A", gives_claims=True)
    storage = Storage(weights, SourceUnavailable("the disk is gone"))
    fetch = Fetch({"A": "gives"}, member, storage=storage, weights=weights)
    weights.verified.have[:] = False
    claimed = threading.Event()
    give, hold = member.claim, threading.Event()

    def claim(weights: LocalWeights, *, ask: bool = True) -> ClaimReply:
        reply = give(weights, ask=ask)
        (claimed if ask else hold).set()
        return reply

    member.claim = claim  # type: ignore[method-assign]
    with fetch.run:
        # Do not call `run`: no chunk is assigned to the holder, so the claim covers all chunks.
        fetch.run.start()
        assert claimed.wait(30)
        assert hold.wait(30) and member.claims[-1] is False


# -- The hub.

NEXT = {
    "UNKNOWN": {"ANSWERS", "AWAY", "REFUSES", "UNUSED"},
    "ANSWERS": {"AWAY", "REFUSES", "UNUSED"},
    "AWAY": {"ANSWERS", "REFUSES", "UNUSED"},
    "REFUSES": {"ANSWERS", "AWAY", "UNUSED"},
    "UNUSED": {"ANSWERS"},
}


@pytest.mark.parametrize("before", list(HubState))
@pytest.mark.parametrize("after", list(HubState))
def test_hub_state_changes_only_along_listed_transitions(before: HubState, after: HubState) -> None:
    hub = Fetch({}).run.hub
    assert before is HubState.UNKNOWN or hub.become(before)
    is_allowed = after.name in NEXT[before.name]
    assert hub.become(after) is is_allowed
    assert hub.state is (after if is_allowed else before)


def test_fetch_continues_while_hub_is_down() -> None:
    fetch = Fetch({"A": "stalls"})
    with fetch.run:
        fetch.run.start()
        wait_until(lambda: "A" in fetch.holders)
        fetch.member.error = HubUnavailable("the hub is away")
        wait_until(lambda: fetch.run.hub.state is HubState.AWAY)
        fetch.holders["A"].how = "gives"
        fetch.run.run()
    fetch.assert_complete()


def test_recovered_hub_is_used_again() -> None:
    fetch = Fetch({"A": "gives"}, stall_s=20.0)
    fetch.member.error = HubUnavailable("the hub is away")
    with fetch.run:
        fetch.run.start()
        wait_until(lambda: fetch.run.hub.state is HubState.AWAY)
        fetch.member.error = None
        fetch.run.run()
        assert fetch.run.hub.state is HubState.ANSWERS
    fetch.assert_complete()


def test_storage_read_without_hub_starts_after_half_deadline() -> None:
    weights = make_weights()
    storage = Storage(weights)
    fetch = Fetch({}, storage=storage, weights=weights, stall_s=0.6)
    fetch.member.error = HubUnavailable("the hub is away")
    begun = time.monotonic()
    fetch.finish()
    assert time.monotonic() - begun >= 0.25
    fetch.assert_complete()
    assert fetch.run.hub.state is HubState.UNUSED
    assert fetch.run.provenance.faults == ["hub: the hub is away; storage is read without a claim"]


def test_unjoined_member_reads_storage_immediately() -> None:
    weights = make_weights()
    away = HubUnavailable("the hub is away")
    fetch = Fetch({}, storage=Storage(weights), weights=weights, away=away, stall_s=60.0)
    fetch.member.error = away
    fetch.finish()
    fetch.assert_complete()
    assert fetch.member.claims == [] and fetch.run.hub.state is HubState.UNUSED


def test_refused_member_without_storage_fails_immediately() -> None:
    fetch = Fetch({}, stall_s=60.0)
    fetch.member.error = PermissionDenied("not for this model")
    with pytest.raises(PermissionDenied, match="not for this model"):
        fetch.finish()


def test_refused_member_reads_storage_without_claims() -> None:
    weights = make_weights()
    fetch = Fetch({}, storage=Storage(weights), weights=weights, stall_s=60.0)
    fetch.member.error = PermissionDenied("not for this model")
    fetch.finish()
    fetch.assert_complete()
    assert fetch.member.claims == [] and fetch.run.hub.state is HubState.UNUSED


def test_error_without_storage_names_missing_hub() -> None:
    fetch = Fetch({}, stall_s=0.2)
    fetch.member.error = HubUnavailable("the hub is away")
    with pytest.raises(SourceUnavailable, match="the hub is away"):
        fetch.finish()


# -- Cancellation.


def test_closing_fetch_aborts_pending_reads() -> None:
    fetch = Fetch({"A": "stalls"}, stall_s=60.0)
    with fetch.run:
        fetch.run.start()
        wait_until(lambda: "A" in fetch.holders)
        fetch.run.assign()
        wait_until(lambda: bool(fetch.holders["A"].posted))
    reads = fetch.holders["A"].posted
    assert all(isinstance(read.error, Cancelled) for read in reads)
    assert not fetch.weights.verified.have.any() and fetch.holders["A"].num_flying == 0
    with pytest.raises(Cancelled):
        fetch.run.run()


def test_read_posted_while_fetch_closes_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = Fetch({"A": "stalls"}, stall_s=60.0)
    posting, may_post, post = threading.Event(), threading.Event(), Holder.post_read

    def post_late(holder: Holder, into: object, source: object, chunks: I64) -> Read:
        posting.set()
        assert may_post.wait(30)
        return post(holder, into, source, chunks)

    monkeypatch.setattr(Holder, "post_read", post_late)
    begun = time.monotonic()
    with fetch.run:
        fetch.run.start()
        wait_until(lambda: "A" in fetch.holders)
        fetch.run.assign()
        assert posting.wait(30)
        timer = threading.Timer(0.2, may_post.set)
        timer.start()
    timer.join()
    assert time.monotonic() - begun < 20
    assert all(isinstance(read.error, Cancelled) for read in fetch.holders["A"].posted)


def test_read_that_begins_after_close_is_aborted() -> None:
    fetch = Fetch({"A": "stalls"}, stall_s=60.0)
    with fetch.run:
        fetch.run.start()
        wait_until(lambda: "A" in fetch.holders)
    begun = time.monotonic()
    with pytest.raises(Cancelled):
        ReadFromUpstream(fetch.run, fetch.holders["A"], np.array([0])).start()  # type: ignore[arg-type]
    assert time.monotonic() - begun < 20


def test_cancelling_fetch_cancels_its_run() -> None:
    fetch = Fetch({}, stall_s=60.0)
    timer = threading.Timer(0.05, lambda: fetch.run.ticket.cancel())
    timer.start()
    with pytest.raises(Cancelled):
        fetch.finish()
    timer.join()
    assert fetch.run.state is FetchState.CLOSED


def test_late_hub_reply_starts_no_reader() -> None:
    fetch = Fetch({"A": "gives"})
    asked, may_answer = threading.Event(), threading.Event()
    answer = fetch.member.upstreams

    def late(*args: Any, **named: Any) -> UpstreamsReply:
        asked.set()
        assert may_answer.wait(30)
        return answer(*args, **named)

    fetch.member.upstreams = late  # type: ignore[method-assign]
    fetch.run.start()
    assert asked.wait(30)
    fetch.run.close()
    may_answer.set()
    time.sleep(0.02)
    assert fetch.holders == {}


def test_stalled_holder_raises_source_stalled() -> None:
    with pytest.raises(SourceStalled):
        Fetch({"A": "stalls"}, stall_s=0.3).finish()
