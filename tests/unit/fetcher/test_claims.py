"""Claims of a fetch: the first claim arrives with the first upstreams, and later claims are separate requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from penstock.engine.trace import Trace
from penstock.errors import HubUnavailable, PermissionDenied
from penstock.fetcher.run import FetchRun
from penstock.holding.weight_layout import WeightLayout, layout_of_tensors, tabulate
from penstock.hub.messages import ClaimReply, Identity, UpstreamsReply
from penstock.peer.local_weights import LocalWeights
from penstock.types import I64, DType

NUM_CHUNKS = 8


class Storage:
    """Storage that returns each chunk at once."""

    uri = "s"
    is_touched = False

    def __init__(self, on_read: Callable[[], None]) -> None:
        self.received_bytes = self.nbytes = 0
        self.reads: list[list[int]] = []
        self._on_read = on_read

    def read(self, chunks: I64, near_end: Callable[[], None]) -> Iterator[I64]:
        self.reads.append(chunks.tolist())
        self.received_bytes += 32 * len(chunks)
        self._on_read()
        yield chunks


class Member:
    """A member whose hub is a function. A separate claim gets all missing chunks. It records its requests."""

    id, links, min_bytes_per_s = "me", None, 0.0

    def __init__(self, answer: Callable[[bool], UpstreamsReply]) -> None:
        self._answer = answer
        self.hub = SimpleNamespace(rest_s=0.0, is_busy=False)
        self.asked: list[str] = []

    def upstreams(self, weights: LocalWeights, *, can_read_storage: bool, is_first: bool) -> UpstreamsReply:
        assert can_read_storage
        self.asked.append("both" if is_first else "upstreams")
        return self._answer(is_first)

    def claim(self, weights: LocalWeights, *, ask: bool = True) -> ClaimReply:
        self.asked.append("claim")
        left = np.flatnonzero(~weights.verified.have)
        return ClaimReply(ranges=((int(left[0]), int(left[-1]) + 1),) if len(left) else ())

    def complain(self, *args: object) -> bool:
        return True


def run(
    answer: Callable[[bool], UpstreamsReply],
    *,
    stall_s: float = 10.0,
    on_read: Callable[[], None] = lambda: None,
) -> Any:
    """Return the member, the storage and the fetch, after the fetch has all chunks."""
    tensors = {"t": torch.zeros(NUM_CHUNKS * 32, dtype=torch.uint8)}
    table = tabulate(["t"], [DType.U8], [(NUM_CHUNKS * 32,)])
    layout = WeightLayout.of(table, leaf_bytes=16, chunk_bytes=32)
    weights = LocalWeights(Identity(model="m"), layout, layout_of_tensors(tensors)[1])
    member, storage = Member(answer), Storage(on_read)
    traced = Trace(enabled=False)
    with FetchRun(
        member,  # type: ignore[arg-type]
        weights,
        storage=storage,  # type: ignore[arg-type]
        stall_s=stall_s,
        trace=traced,
        on_first=lambda: None,
    ) as fetch:
        fetch.start()
        fetch.run()
    return member, storage, fetch


def test_first_claim_arrives_with_upstreams_reply() -> None:
    member, storage, fetch = run(lambda claim: UpstreamsReply(claim=ClaimReply(ranges=((0, 4),)) if claim else None))
    assert member.asked[0] == "both" and member.asked.count("both") == 1
    assert storage.reads == [[0, 1, 2, 3], [4, 5, 6, 7]] and fetch.provenance.faults == []


def test_claim_missing_from_reply_is_requested_separately() -> None:
    """An older hub, or a hub with too many claims, sends no claim with the upstreams."""
    member, storage, _ = run(lambda claim: UpstreamsReply())
    assert member.asked[:2] == ["both", "claim"] and storage.reads == [list(range(NUM_CHUNKS))]


def test_claim_is_retried_at_new_hub() -> None:
    member, storage, _ = run(lambda claim: UpstreamsReply(claim=ClaimReply(ask_again_s=0.1, why="the hub is new")))
    assert "claim" in member.asked[1:] and storage.reads == [list(range(NUM_CHUNKS))]


def test_claim_is_requested_separately_after_failure() -> None:
    def away(claim: bool) -> UpstreamsReply:
        if claim:
            raise HubUnavailable("the hub is away")
        return UpstreamsReply()

    member, storage, fetch = run(away)
    assert member.asked[:2] == ["both", "claim"] and storage.reads == [list(range(NUM_CHUNKS))]
    assert fetch.provenance.faults == []


def test_refused_member_reads_storage_without_claim() -> None:
    def refuse(claim: bool) -> UpstreamsReply:
        raise PermissionDenied("not for this model")

    member, storage, fetch = run(refuse)
    assert "claim" not in member.asked and sorted(chunk for chunks in storage.reads for chunk in chunks) == list(
        range(NUM_CHUNKS)
    )
    assert "without a claim" in fetch.provenance.faults[0]


def test_delayed_first_claim_is_used() -> None:
    """Without the claim, storage would be read without a claim at that moment, because no byte arrived for long."""
    begun = time.monotonic()

    def late(claim: bool) -> UpstreamsReply:
        # Half of the time that a fetch waits for a silent hub.
        time.sleep(max(0.0, 1.0 - (time.monotonic() - begun)))
        return UpstreamsReply(claim=ClaimReply(ranges=((0, 4),)) if claim else None)

    _, storage, _ = run(late, stall_s=4.0)
    assert storage.reads[0] == [0, 1, 2, 3]


def test_storage_is_read_while_claim_is_pending() -> None:
    """A second claim is not sent meanwhile, because the hub would free the chunks of the first claim."""
    over = threading.Event()

    def slow(claim: bool) -> UpstreamsReply:
        over.wait(30)
        return UpstreamsReply(claim=ClaimReply(ranges=((0, 4),)) if claim else None)

    member, storage, fetch = run(slow, stall_s=2.0, on_read=over.set)
    assert storage.reads[0] == list(range(NUM_CHUNKS)) and "claim" not in member.asked
    assert "without a claim" in fetch.provenance.faults[0]
