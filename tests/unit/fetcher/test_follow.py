"""A fetch and the hub's replies: the members that it reads from, requests news of, leaves, and reports as parents."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from penstock.engine.run import RunState
from penstock.errors import PeerLost, PenstockError, SourceBusy
from penstock.fetcher.assignment import Assignment
from penstock.fetcher.hub_poller import HubPoller
from penstock.fetcher.report import Provenance
from penstock.fetcher.upstream import UNNAMED
from penstock.holding.weight_layout import WeightLayout, layout_of_tensors, tabulate
from penstock.hub.messages import Identity, Upstream, UpstreamsReply
from penstock.peer.local_weights import LocalWeights
from penstock.timing import Timing
from penstock.transfer import blame
from penstock.types import DType

NUM_CHUNKS = 8


class Reader:
    """An upstream reader without a thread. A test sets the state that the thread would detect."""

    connects_at_once = True

    def __init__(self, name: str, ranks: tuple[int, ...] = (0,)) -> None:
        self.upstream = upstream(name)
        self.ranks = ranks
        self.has = np.zeros(NUM_CHUNKS, bool)
        self.error: PenstockError | None = None
        self.num_flying = 0
        self.not_before = self.last_read = 0.0
        self.step_chunks = NUM_CHUNKS
        self.is_connected = self.connects_at_once
        self.is_too_slow = self.is_closed = self.is_asked = self.is_measured = self.is_fast = False
        self.is_alive = True
        self.fault = ""

    @property
    def is_parent(self) -> bool:
        return 0 in self.ranks

    def holds_back(self, tree: int) -> bool:
        return self.is_alive and self.ranks[tree] != UNNAMED

    def is_much_faster_than(self, other: Reader) -> bool:
        return self.is_fast

    def should_probe(self) -> bool:
        return False

    def charge(self, nbytes: int) -> None: ...

    def request_news(self) -> None:
        self.is_asked = True

    def renew(self, upstream: Upstream) -> None:
        self.upstream = upstream

    def close(self) -> None:
        self.is_closed = True


class Member:
    """The methods of a member that a fetch needs, and a hub with one reply."""

    id = "me"
    links = None
    min_bytes_per_s = 0.0
    hub = SimpleNamespace(rest_s=0.0, is_busy=False)

    def __init__(self) -> None:
        self.reply = UpstreamsReply()

    def upstreams(self, weights: LocalWeights, *, can_read_storage: bool, is_first: bool) -> UpstreamsReply:
        return self.reply

    def complain(self, *args: object) -> bool:
        return True


TIMING = Timing(full_pause_s=0.05)


@pytest.fixture
def weights() -> LocalWeights:
    tensors = {"t": torch.zeros(NUM_CHUNKS * 32, dtype=torch.uint8)}
    layout = WeightLayout.of(tabulate(["t"], [DType.U8], [(NUM_CHUNKS * 32,)]), leaf_bytes=16, chunk_bytes=32)
    return LocalWeights(Identity(model="m"), layout, layout_of_tensors(tensors)[1])


@pytest.fixture
def fetch(weights: LocalWeights) -> Assignment:
    """The assignment of a fetch whose readers have no threads."""
    return assignment_of(weights, TIMING)


def assignment_of(weights: LocalWeights, timing: Timing) -> Assignment:
    return Assignment(
        weights,
        lambda upstream, ranks: Reader(upstream.member, ranks),  # type: ignore[arg-type, return-value]
        can_read_storage=False,
        stall_s=30.0,
        timing=timing,
        provenance=Provenance("m"),
    )


def upstream(name: str) -> Upstream:
    return Upstream(member=name, host="h", doors=(), device="cpu", state="filling", num_have=0, grant=b"")


def reply_of(*orders: str, is_placed: bool = True, ask_again_s: float = 1.0) -> UpstreamsReply:
    """Return a reply with these orders. A member's name is a letter."""
    names = sorted(set("".join(orders)))
    numbers = tuple(tuple(names.index(name) for name in order) for order in orders)
    if len(orders) == 1:
        names, numbers = list(orders[0]), ()
    return UpstreamsReply(
        upstreams=tuple(map(upstream, names)), orders=numbers, is_placed=is_placed, ask_again_s=ask_again_s
    )


def readers(fetch: Assignment) -> dict[str, Reader]:
    return {reader.upstream.member: reader for reader in fetch.readers}


def fail(fetch: Assignment, name: str, error: PenstockError) -> None:
    """Make a reader fail with an error."""
    readers(fetch)[name].error = error
    fetch.pop_failed()


def parents(weights: LocalWeights) -> tuple[str, str]:
    return weights.fetch.parent, weights.fetch.second_parent


@pytest.mark.parametrize("orders", [("PG",), ("PG", "QG")])
def test_briefly_full_parent_stays_in_report(fetch: Assignment, weights: LocalWeights, orders: tuple[str, ...]) -> None:
    expected = ("P", "" if len(orders) == 1 else "Q")
    fetch.follow(reply_of(*orders))
    assert parents(weights) == expected
    fail(fetch, "P", SourceBusy("this member has reached its maximum number of readers"))
    fetch.follow(reply_of(*orders))
    assert "P" not in readers(fetch)
    assert parents(weights) == expected


def test_persistently_full_parent_is_replaced_in_report(
    fetch: Assignment, weights: LocalWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = assignment_of(weights, Timing(full_pause_s=0.0))
    monkeypatch.setattr(Reader, "connects_at_once", False)
    for _ in range(2):
        for _ in range(blame.BUSY_TRIES):
            fetch.follow(reply_of("PG"))
            assert parents(weights) == ("P", "")
            fail(fetch, "P", SourceBusy("this member has reached its maximum number of readers"))
        fetch.follow(reply_of("PG"))
        assert parents(weights) == ("G", "")
        # The parent had a free slot again.
        readers(fetch)["P"].is_connected = True
        fetch.follow(reply_of("PG"))
        assert parents(weights) == ("P", "")


def test_failed_parent_is_replaced_in_report(fetch: Assignment, weights: LocalWeights) -> None:
    fetch.follow(reply_of("PG", "QG"))
    fail(fetch, "P", PeerLost("gone"))
    fetch.follow(reply_of("PG", "QG"))
    assert parents(weights) == ("G", "Q")


def test_full_parent_is_retried_before_next_hub_request(weights: LocalWeights) -> None:
    has_again, made = threading.Event(), list[str]()

    def make_reader(upstream: Upstream, ranks: tuple[int, ...]) -> Reader:
        made.append(upstream.member)
        reader = Reader(upstream.member, ranks)
        if made.count("P") == 1:
            reader.error = SourceBusy("this member has reached its maximum number of readers")
        else:
            has_again.set()
        return reader

    member = Member()
    member.reply = reply_of("PG", ask_again_s=600.0)
    provenance = Provenance("m")
    fetch = Assignment(weights, make_reader, can_read_storage=False, stall_s=30.0, timing=TIMING, provenance=provenance)  # type: ignore[arg-type]
    hub = HubPoller(
        member,  # type: ignore[arg-type]
        weights,
        fetch,
        RunState(0, lambda: False),
        provenance,
        stall_s=30.0,
        timing=TIMING,
        away=None,
    )
    thread = threading.Thread(target=hub.run)
    thread.start()
    # The first round creates the reader, and the next round follows its pause.
    hub.answered.wait(30)
    hub.wanted.set()
    assert has_again.wait(30)
    hub.close()
    thread.join()


@pytest.mark.parametrize("orders", [("PG",), ("PG", "QG")])
def test_reply_without_placement_changes_no_upstream_rank(
    fetch: Assignment, weights: LocalWeights, orders: tuple[str, ...]
) -> None:
    fetch.follow(reply_of(*orders))
    before = {name: reader.ranks for name, reader in readers(fetch).items()}
    fetch.follow(reply_of("XGY", is_placed=False))
    after = {name: reader.ranks for name, reader in readers(fetch).items()}
    new = {"X": (2,) * len(orders), "Y": (3,) * len(orders)}
    assert after == before | new
    assert parents(weights) == ("P", "" if len(orders) == 1 else "Q")
    fetch.follow(reply_of("XG"))
    assert readers(fetch)["X"].ranks == (0,)


def test_newest_reply_sets_upstream_ranks_until_placement(fetch: Assignment, weights: LocalWeights) -> None:
    fetch.follow(reply_of("XY", is_placed=False))
    fetch.follow(reply_of("YX", is_placed=False))
    assert {name: reader.ranks for name, reader in readers(fetch).items()} == {"Y": (0,), "X": (1,)}
    assert parents(weights) == ("", "")


def leave_unneeded(fetch: Assignment) -> None:
    for reader in fetch.pop_unneeded():
        reader.close()


def asked(fetch: Assignment) -> set[str]:
    """Return the upstreams from which the fetch requests news now."""
    for reader in fetch.readers:
        reader.is_asked = False
    fetch.next_reads(lambda reads: None, is_storage_read=False)
    return {name for name, reader in readers(fetch).items() if reader.is_asked}


def test_chunk_updates_are_requested_from_each_parent(fetch: Assignment) -> None:
    fetch.follow(reply_of("AG", "DA"))
    assert readers(fetch)["D"].ranks == (UNNAMED, 0)
    assert asked(fetch) == {"A", "D"}
    # The upstream after a stalled parent, although it is a parent itself.
    readers(fetch)["D"].is_alive = False
    assert asked(fetch) == {"A", "D"}
    readers(fetch)["A"].is_alive = False
    assert asked(fetch) == {"A", "D", "G"}


def test_unlisted_upstream_is_used_when_listed_upstreams_stall(fetch: Assignment) -> None:
    fetch.follow(reply_of("AZ", "DZ"))
    readers(fetch)["A"].is_connected = False
    fetch.follow(reply_of("AG", "DG"))
    assert asked(fetch) == {"A", "D"}
    for name in "ADG":
        readers(fetch)[name].is_alive = False
    assert "Z" in asked(fetch)


def test_spare_reader_is_closed_when_unneeded(fetch: Assignment) -> None:
    fetch.follow(reply_of("PGH", "QGH"))
    spare = readers(fetch)["G"]
    for changes, is_left in [
        ({}, False),
        ({"is_measured": True, "is_fast": True}, False),
        ({"is_fast": False, "num_flying": 1}, False),
        ({"num_flying": 0}, True),
    ]:
        vars(spare).update(changes)
        leave_unneeded(fetch)
        assert (spare not in fetch.readers) == spare.is_closed == is_left, changes
    assert set(readers(fetch)) == {"P", "Q", "H"}


def test_spare_reader_stays_while_parent_is_stalled(fetch: Assignment) -> None:
    fetch.follow(reply_of("PG", "QG"))
    readers(fetch)["G"].is_measured = True
    readers(fetch)["Q"].is_connected = False
    leave_unneeded(fetch)
    assert "G" in readers(fetch)
    # With one order there are enough slots.
    fetch.follow(reply_of("PG"))
    readers(fetch)["P"].is_connected = True
    leave_unneeded(fetch)
    assert "G" in readers(fetch)


def test_unlisted_upstream_is_closed_when_parents_send(fetch: Assignment) -> None:
    fetch.follow(reply_of("PZ", "QZ"))
    fetch.follow(reply_of("PG", "QG"))
    leave_unneeded(fetch)
    assert set(readers(fetch)) == {"P", "Q", "G"}


def test_spare_reader_receives_newest_grant(fetch: Assignment) -> None:
    fetch.follow(reply_of("ab"))
    newer = [msgspec.structs.replace(one, grant=b"newer") for one in reply_of("ab").upstreams]
    fetch.follow(msgspec.structs.replace(reply_of("ab"), upstreams=tuple(newer)))
    assert [reader.upstream.grant for reader in fetch.readers] == [b"newer", b"newer"]


def test_few_new_chunks_are_read_in_batches(fetch: Assignment) -> None:
    busy = [True]
    fetch.follow(reply_of("P"))
    reader = readers(fetch)["P"]
    reader.step_chunks = 3

    def given(*chunks: int) -> list[int]:
        posted = list[int]()
        reader.is_asked, reader.num_flying = False, 0
        reader.has[list(chunks)] = True
        fetch.next_reads(
            lambda reads: posted.extend(chunk for _, some in reads for chunk in some.tolist()), is_storage_read=busy[0]
        )
        return posted

    assert given(0, 1) == [0, 1], "nothing was read before"
    reader.last_read = time.monotonic()
    assert given(2, 3) == []
    assert not reader.is_asked, "news would only be more of few"
    assert given(4) == [2, 3, 4], "a full read"
    assert given(5) == []
    reader.last_read -= TIMING.gather_s
    assert given() == [5], "it waited for long"
    reader.last_read, busy[0] = time.monotonic(), False
    assert given(6) == [6], "storage is not read"
