"""Receivers on several hosts, each a thread here, in two trees: their sent and received bytes, and a stalled member."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
from tests.support.compare import assert_same

import penstock as ps
from penstock.fetcher import run as running
from penstock.fetcher.choice import ChunkChoice
from penstock.fetcher.run import FetchRun
from penstock.fetcher.upstream import UpstreamReader
from penstock.hub.messages import NUM_TREES, UpstreamsReply
from penstock.peer.local_weights import LocalWeights
from penstock.peer.member import Member

CHUNK_BYTES = 256 << 10
NUM_CHUNKS = 64
NUM_RECEIVERS = 9


class Hosts:
    """A holder and receivers, each as if on its own host, that ask the hub for upstreams at the same moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights = {"t": torch.arange(NUM_CHUNKS * CHUNK_BYTES // 8, dtype=torch.int64).view(torch.uint8)}
        self.fleets: dict[str, ps.Fleet] = {}
        self.holder = ""
        self.given: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
        """Chunk numbers read for each pair (reader, source)."""
        self.orders: dict[str, tuple[tuple[str, ...], ...]] = {}
        """The hub's first answer to each reader, by the members' names."""
        self.member_of: dict[UpstreamReader, str] = {}
        """The member to which each reader of an upstream belongs."""
        self._stack = contextlib.ExitStack()
        numbers = itertools.count()
        monkeypatch.setattr("penstock.peer.member.host_id", lambda: f"host-{next(numbers)}")
        # Pretend that few hosts are many and that none is slow, because the test's machine may be.
        monkeypatch.setattr("penstock_hub.relay.MIN_HOPS", -100)
        monkeypatch.setattr("penstock.holding.weight_layout.CHUNK_BYTES", CHUNK_BYTES)
        monkeypatch.setattr("penstock.fetcher.upstream.PROBE_S", 60.0)
        self._all_here = threading.Barrier(NUM_RECEIVERS)
        self.is_asked_once = False
        """Whether receivers learn of no upstreams after the hub's first answer."""
        self._note_orders(monkeypatch)
        self._note_reads(monkeypatch)

    def _note_orders(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ask, first = Member.upstreams, dict[str, UpstreamsReply]()

        def upstreams(
            member: Member, weights: LocalWeights, *, can_read_storage: bool, is_first: bool
        ) -> UpstreamsReply:
            if member.id in first:
                now = ask(member, weights, can_read_storage=can_read_storage)
                if not self.is_asked_once:
                    return now
                # Renew the grants. Each is for one connection, and a busy machine can lose one.
                granted = {upstream.member: upstream for upstream in now.upstreams}
                same = tuple(granted.get(upstream.member, upstream) for upstream in first[member.id].upstreams)
                return msgspec.structs.replace(first[member.id], upstreams=same)
            # The hub does not respond between the first and the last receiver that it knows, not even with a layout.
            self._all_here.wait(timeout=30)
            member.report_now()
            self._all_here.wait(timeout=30)
            # The hub's relay may have been computed before the last receiver reported.
            deadline = time.monotonic() + 30
            while not ask(member, weights, can_read_storage=can_read_storage).orders:
                assert time.monotonic() < deadline, "the hub does not place this member"
                time.sleep(0.05)
            self._all_here.wait(timeout=30)
            reply = first[member.id] = ask(member, weights, can_read_storage=can_read_storage)
            names = [upstream.member for upstream in reply.upstreams]
            self.orders[member.id] = tuple(tuple(names[i] for i in order) for order in reply.orders)
            return reply

        monkeypatch.setattr(Member, "upstreams", upstreams)

    def _note_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        note, lock = UpstreamReader.note_read, threading.Lock()
        make = running._follow

        def follow(member: Member, *args) -> UpstreamReader:
            reader = make(member, *args)
            self.member_of[reader] = member.id
            return reader

        def note_read(reader: UpstreamReader, chunks: np.ndarray, nbytes: int, seconds: float) -> None:
            with lock:
                self.given[self.member_of[reader], reader.upstream.member].update(chunks.tolist())
            note(reader, chunks, nbytes, seconds)

        monkeypatch.setattr(running, "_follow", follow)
        monkeypatch.setattr(UpstreamReader, "note_read", note_read)

    def start(self, **join) -> None:
        """Make all receivers join with these arguments, and let the first offer the weights."""
        connection = ps.ConnectionSettings(listen="127.0.0.1:0", transports=["http"])
        for _ in range(NUM_RECEIVERS + 1):
            fleet = self._stack.enter_context(ps.join("m", connection=connection, **join))
            self.fleets[fleet.member.id] = fleet
        self.holder = next(iter(self.fleets))
        self.fleets[self.holder].offer(self.weights)

    @property
    def receivers(self) -> list[str]:
        return [member for member in self.fleets if member != self.holder]

    def fetch(self, member: str) -> ps.FetchReport:
        """Fetch as one receiver, and compare every byte."""
        found: dict[str, torch.Tensor] = {}
        report = self.fleets[member].fetch(found)
        assert_same(found, self.weights)
        return report

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    with contextlib.closing(Hosts(monkeypatch)) as hosts:
        yield hosts


def test_receivers_read_chunks_from_two_parents(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.fetcher.upstream.PATIENCE_S", 30.0)
    hosts.is_asked_once = True
    hosts.start()
    with ThreadPoolExecutor(NUM_RECEIVERS) as threads:
        reports = list(threads.map(hosts.fetch, hosts.receivers))
    assert not any(report.faults for report in reports)
    num_with_two = 0
    for member in hosts.receivers:
        parents = [order[0] for order in hosts.orders[member]]
        for tree, parent in enumerate(parents):
            chunks = {chunk for chunk in hosts.given[member, parent] if chunk % NUM_TREES == tree}
            assert chunks == set(range(tree, NUM_CHUNKS, NUM_TREES))
        assert sum(hosts.given[member, source].total() for source in set(parents)) == NUM_CHUNKS
        num_with_two += len(set(parents)) == NUM_TREES
    # The first receivers to join may form a chain above the trees.
    assert num_with_two > NUM_RECEIVERS // 2
    given: Counter[str] = Counter()
    for (_, source), chunks_read in hosts.given.items():
        given[source] += chunks_read.total()
    assert given[hosts.holder] == NUM_CHUNKS
    assert max(given.values()) == NUM_CHUNKS, given


@pytest.mark.parametrize("how", ["stalls", "leaves"])
def test_children_of_stalled_member_read_elsewhere(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    stalled, may_go_on, verify = list[str](), threading.Event(), FetchRun.verify
    has_stalled = threading.Event()

    def slow_verify(fetch: FetchRun) -> None:
        member = fetch.hub.member.id
        orders = hosts.orders.get(member, ())
        # Return the first receiver directly below the holder, through which half of the chunks reach half of the fleet.
        if not stalled and orders and hosts.holder in {order[0] for order in orders}:
            stalled.append(member)
        if member in stalled and fetch._weights.verified.have.any():
            has_stalled.set()
            assert may_go_on.wait(60)
        verify(fetch)

    monkeypatch.setattr(FetchRun, "verify", slow_verify)
    hosts.start()
    with ThreadPoolExecutor(NUM_RECEIVERS) as threads:
        fetches = {member: threads.submit(hosts.fetch, member) for member in hosts.receivers}
        try:
            assert has_stalled.wait(30)
            if how == "leaves":
                hosts.fleets[stalled[0]].leave(0.0)
            for member, fetch in fetches.items():
                if member not in stalled:
                    assert fetch.result(timeout=60).storage_bytes == 0
        finally:
            may_go_on.set()
        if how == "stalls":
            fetches[stalled[0]].result(timeout=60)
        else:
            with contextlib.suppress(ps.PenstockError):
                fetches[stalled[0]].result(timeout=60)
    below = [m for m in hosts.receivers if stalled[0] in {order[0] for order in hosts.orders[m]}]
    assert below
    for member in below:
        assert sum(hosts.given[member, source].total() for source in hosts.fleets if source != stalled[0])


def test_readers_bypass_member_stalled_in_one_tree(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read, may_go_on, lock = ChunkChoice.may_read, threading.Event(), threading.Lock()
    half: list[tuple[str, int]] = []
    """Stall a member, and the tree in which it sends and receives no more chunks."""
    last_s = [0.0]

    def may_read_half(choice: ChunkChoice, reader: UpstreamReader, tree: int) -> bool:
        member = hosts.member_of[reader]
        with lock:
            if not half and len(hosts.orders) == NUM_RECEIVERS and len(children(hosts, member, tree)) == 2:
                half.append((member, tree))
        if not half or half[0][0] != member or may_go_on.is_set():
            return may_read(choice, reader, tree)
        # It sends a chunk of the other tree from time to time, so it is never silent.
        if half[0][1] == tree or time.monotonic() - last_s[0] < 0.3 or not may_read(choice, reader, tree):
            return False
        last_s[0] = time.monotonic()
        return True

    monkeypatch.setattr(ChunkChoice, "may_read", may_read_half)
    monkeypatch.setattr("penstock.fetcher.upstream.MAX_STEP_CHUNKS", 1)
    hosts.is_asked_once = True
    hosts.start(max_readers=NUM_RECEIVERS)
    with ThreadPoolExecutor(NUM_RECEIVERS) as threads:
        fetches = {member: threads.submit(hosts.fetch, member) for member in hosts.receivers}
        try:
            while not half:
                time.sleep(0.01)
            for member in children(hosts, *half[0]):
                fetches[member].result(timeout=60)
            (weights,) = hosts.fleets[half[0][0]].member.weights
            other = weights.verified.have[1 - half[0][1] :: NUM_TREES]
            assert not other.all(), "it had nothing to say for a while, as one that stalls altogether"
        finally:
            may_go_on.set()
        for fetch in fetches.values():
            fetch.result(timeout=60)


def children(hosts: Hosts, member: str, tree: int) -> list[str]:
    """Return the receivers that the hub assigned to a member for one tree, and to another member for the other."""
    found = []
    for receiver, orders in hosts.orders.items():
        firsts = [order[0] for order in orders]
        if firsts[tree] == member and firsts.count(member) == 1:
            found.append(receiver)
    return found
