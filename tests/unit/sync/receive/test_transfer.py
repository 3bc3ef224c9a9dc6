"""Transfers of a part between real arenas: every byte is verified, or an error names the source."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sync.parts import content, held, naive, parts, sharded, whole

from penstock.digest.strip import Strips
from penstock.errors import BudgetTooSmall, IntegrityError, PeerLost, PlanError, SourceStalled, StaleDescriptor
from penstock.plan.layout import decode, encode
from penstock.plan.sync import NEAR_READS, READS_OF_ONE, ReceiverPlan
from penstock.sync.local_version import Answer, LocalVersion
from penstock.sync.receive.sources import LocalLink, SourceRead
from penstock.sync.receive.steps import Step
from penstock.sync.receive.transfer import LEAST_BYTES, Transfer
from penstock.transport.choose import PeerLinks, open_links
from penstock.types import MIB

SHAPES = [(64, 48), (32, 96), (16, 16), (128, 8)]


@pytest.fixture(params=["loopback", "shm"])
def links(request: pytest.FixtureRequest) -> Iterator[PeerLinks]:
    with open_links(only=[request.param]) as opened:
        yield opened


@dataclass
class World:
    sources: list[LocalVersion]
    receiver: LocalVersion
    part: object

    def links(self, version: int = 1) -> dict[str, LocalLink]:
        near = "loopback" in self.receiver.regions.links.transports
        return {one.layout.member: LocalLink(one, same_process=near) for one in self.sources}

    def transfer(self, **options: object) -> Transfer:
        return Transfer(self.part, self.receiver.regions, names=self.receiver.layout.names, stall_s=10.0, **options)

    def expected(self) -> np.ndarray:
        return naive(self.part, [whole(one) for one in self.sources], whole(self.receiver))


def world(links: PeerLinks, shapes=SHAPES, *, froms=(0, 2), to=(1, 2), num_regions=2, bucket_bytes=4096) -> World:
    holdings = sharded("p", shapes, *froms, num_regions)
    wants = sharded("s", shapes, *to, num_regions)
    sources = [held(one, links) for one in holdings]
    for one in sources:
        one.begin(1)
        one.ready()
    return World(sources, held(wants[1], links, seed=1), parts(holdings, wants, bucket_bytes)[1])


def test_transfer_verifies_every_byte(links: PeerLinks) -> None:
    made = world(links)
    expected, transfer = made.expected(), made.transfer()
    report = transfer.run(made.links())
    assert np.array_equal(whole(made.receiver), expected)
    assert transfer.moved_bytes == made.part.nbytes
    assert report.nbytes == made.part.nbytes == sum(read.nbytes for read in report.reads)
    assert {read.path for read in report.reads} == {next(iter(links.transports))}


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6),
    froms=st.tuples(st.integers(0, 1), st.integers(1, 3)),
    to=st.tuples(st.integers(0, 1), st.integers(2, 4)),
    num_regions=st.integers(1, 3),
    bucket_bytes=st.integers(64, 20_000),
)
def test_random_shapes_and_shardings_transfer_every_byte(shapes, froms, to, num_regions, bucket_bytes) -> None:
    shapes = [(rows * 12, columns * 12) for rows, columns in shapes]
    with open_links(only=["loopback"]) as links:
        made = world(links, shapes, froms=froms, to=to, num_regions=num_regions, bucket_bytes=bucket_bytes)
        expected = made.expected()
        transfer = made.transfer(watermark_bytes=LEAST_BYTES)
        transfer.run(made.links())
        assert np.array_equal(whole(made.receiver), expected)
        assert transfer.moved_bytes == made.part.nbytes


def test_ready_source_receives_one_digest_request(links: PeerLinks) -> None:
    made = world(links, [(1024, 1024)] * 4, bucket_bytes=MIB)
    asked: list[int] = []

    class Counting(LocalLink):
        def digests(self, strips: Strips, *, wait_s: float) -> Answer:
            asked.append(len(strips))
            return super().digests(strips, wait_s=wait_s)

    near = "loopback" in links.transports
    expected = made.expected()
    source_links = {one.layout.member: Counting(one, same_process=near) for one in made.sources}
    made.transfer(watermark_bytes=MIB).run(source_links)
    assert np.array_equal(whole(made.receiver), expected)
    assert len(asked) == len(made.sources) and min(asked) > 1


@dataclass
class Reads:
    """Steps in the order in which their reads began, and the maximum number of concurrent reads."""

    begun: list[Step]
    most: int = 0


def recorded(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Record the reads of every source, with delays so that they overlap."""
    reads, lock, under_way = Reads([]), threading.Lock(), [0]
    read = SourceRead.read

    def slow(self: SourceRead, step: Step, *, stall_s: float):
        with lock:
            reads.begun.append(step)
            under_way[0] += 1
            reads.most = max(reads.most, under_way[0])
        time.sleep(0.002)
        try:
            return read(self, step, stall_s=stall_s)
        finally:
            with lock:
                under_way[0] -= 1

    monkeypatch.setattr(SourceRead, "read", slow)
    return reads


@pytest.mark.parametrize("receiver", [0, 1])
@pytest.mark.parametrize("is_filling", [False, True])
def test_concurrent_reads_from_local_devices_are_limited(
    links: PeerLinks, receiver: int, is_filling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each receiver reads half of its bytes from each source.
    holdings, wants = sharded("p", [(1024, 4096)] * 8, 0, 2, 1), sharded("s", [(1024, 4096)] * 8, 1, 2, 1)
    sources = [held(one, links) for one in holdings]
    for one in sources:
        one.begin(1)
        one.ready()
    part = parts(holdings, wants, MIB)[receiver]
    made = World(sources, held(wants[receiver], links, seed=1), part)
    monkeypatch.setattr(SourceRead, "near_device", lambda self, step: "cuda:0")
    reads = recorded(monkeypatch)
    near = "loopback" in links.transports
    source_links = {
        one.layout.member: (Filling if is_filling else LocalLink)(one, same_process=near) for one in sources
    }
    expected = made.expected()
    made.transfer(watermark_bytes=8 * MIB).run(source_links)
    assert np.array_equal(whole(made.receiver), expected)
    assert 1 <= reads.most <= NEAR_READS
    # Each receiver begins with a different source.
    assert part.first_source == receiver
    turns = [(step.window, int(part.turn_of(np.array(step.source)))) for step in reads.begun]
    assert len(set(turns)) == 2 * len({step.window for step in reads.begun}) > 2
    # Posted steps may begin in any order, but the number of concurrent reads is limited.
    order = sorted(turns)
    assert all(order.index(turn) < i + READS_OF_ONE for i, turn in enumerate(turns))


def test_each_receiver_device_has_separate_read_limit(links: PeerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(links, [(1024, 1024)] * 8, froms=(1, 2), bucket_bytes=MIB)
    monkeypatch.setattr(SourceRead, "near_device", lambda self, step: f"cuda:{step.reads[0][1]}")
    reads = recorded(monkeypatch)
    expected = made.expected()
    made.transfer(watermark_bytes=16 * MIB).run(made.links())
    assert np.array_equal(whole(made.receiver), expected)
    assert {step.reads[0][1] for step in reads.begun} == {0, 1}
    assert reads.most > NEAR_READS


def test_remote_sources_are_read_concurrently(links: PeerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(links, [(1024, 1024)] * 8, froms=(1, 2), bucket_bytes=MIB)
    reads = recorded(monkeypatch)
    expected = made.expected()
    made.transfer(watermark_bytes=16 * MIB).run(made.links())
    assert np.array_equal(whole(made.receiver), expected)
    assert reads.most > NEAR_READS


def test_plan_from_older_release_starts_at_first_source() -> None:
    holdings, wants = sharded("p", SHAPES, 0, 2, 1), sharded("s", SHAPES, 1, 2, 1)
    part = parts(holdings, wants, 4096)[1]
    for wrong in (-1, 2, 1 << 63):
        with pytest.raises(PlanError, match="first_source is"):
            msgspec.structs.replace(part, first_source=wrong).check(src_nbytes=[1 << 30] * 2, dst_nbytes=1 << 30)
    known = msgspec.msgpack.decode(encode(part))
    assert known.pop("first_source") == 1
    assert decode(msgspec.msgpack.encode(known), ReceiverPlan).first_source == 0


def test_transfer_runs_again_for_next_version(links: PeerLinks) -> None:
    made = world(links)
    transfer = made.transfer()
    transfer.run(made.links())
    for one in made.sources:
        one.fence()
        for memory in one.regions.memories:
            content(memory)[:] ^= 0x5A
        one.begin(2)
        one.ready()
    expected = made.expected()
    transfer.run(made.links())
    assert np.array_equal(whole(made.receiver), expected)


class Filling(LocalLink):
    """A source without all rows when it sent its map."""

    def __init__(self, held: LocalVersion, *, same_process: bool = True) -> None:
        super().__init__(held, same_process=same_process)
        self.map = msgspec.structs.replace(self.map, is_ready=False)


class Lying(LocalLink):
    """A source that sends a wrong digest for one strip."""

    def digests(self, strips: Strips, *, wait_s: float) -> Answer:
        reply = super().digests(strips, wait_s=wait_s)
        reply.digests[0] ^= np.uint64(1)
        return reply


def test_corrupt_byte_raises_integrity_error_naming_source(links: PeerLinks) -> None:
    made = world(links, bucket_bytes=1 << 30)
    source_links = made.links() | {"p1": Lying(made.sources[1], same_process="loopback" in links.transports)}
    transfer = made.transfer()
    with pytest.raises(IntegrityError) as caught:
        transfer.run(source_links)
    assert transfer.moved_bytes < made.part.nbytes
    assert transfer.lost == "p1" and caught.value.uri == "p1" and caught.value.mutated
    assert caught.value.tensor in made.receiver.layout.names


def test_fence_between_digest_and_read_raises_stale_descriptor(links: PeerLinks) -> None:
    made = world(links)

    class Fencing(Filling):
        def digests(self, strips: Strips, *, wait_s: float) -> Answer:
            reply = super().digests(strips, wait_s=wait_s)
            self.local_version.fence()
            return reply

    source_links = made.links() | {"p0": Fencing(made.sources[0], same_process="loopback" in links.transports)}
    transfer = made.transfer()
    with pytest.raises(StaleDescriptor):
        transfer.run(source_links)
    assert transfer.lost == "p0"
    assert transfer.moved_bytes < made.part.nbytes


def test_untouched_target_is_reported_as_unmutated(links: PeerLinks) -> None:
    made = world(links, froms=(0, 1))
    source_links, before = made.links(), whole(made.receiver)
    made.sources[0].fence()
    transfer = made.transfer()
    with pytest.raises(StaleDescriptor) as caught:
        transfer.run(source_links)
    assert not caught.value.mutated and np.array_equal(whole(made.receiver), before) and transfer.moved_bytes == 0


def test_source_with_unready_rows_raises_source_stalled(links: PeerLinks) -> None:
    made = world(links)
    made.sources[1].fence()
    made.sources[1].begin(1)
    made.sources[1].ready([0])
    transfer = Transfer(made.part, made.receiver.regions, stall_s=1.0)
    with pytest.raises(SourceStalled) as caught:
        transfer.run(made.links())
    assert transfer.lost == "p1" and "p1" in str(caught.value)


def test_transfer_waits_for_rows_to_become_ready(links: PeerLinks) -> None:
    made = world(links)
    expected = made.expected()
    late = made.sources[1]
    late.fence()
    late.begin(1)

    def fill() -> None:
        for row in range(len(late.layout.names)):
            threading.Event().wait(0.05)
            late.ready([row])

    filling = threading.Thread(target=fill)
    source_links = made.links()
    filling.start()
    report = made.transfer().run(source_links)
    filling.join()
    assert np.array_equal(whole(made.receiver), expected) and report.ready_s > 0


def test_lost_source_error_names_member(links: PeerLinks) -> None:
    made = world(links)

    class Gone(LocalLink):
        def digests(self, strips: Strips, *, wait_s: float) -> Answer:
            raise PeerLost("it does not answer")

    transfer = made.transfer()
    with pytest.raises(PeerLost) as caught:
        transfer.run(made.links() | {"p1": Gone(made.sources[1])})
    assert transfer.lost == "p1" and "p1" in str(caught.value)


def test_peak_memory_stays_below_watermark(links: PeerLinks) -> None:
    made = world(links, [(1024, 1024)] * 4, bucket_bytes=MIB)
    expected = made.expected()
    report = made.transfer(watermark_bytes=MIB).run(made.links())
    assert np.array_equal(whole(made.receiver), expected) and 0 < report.peak_bytes <= MIB < report.nbytes


def test_too_small_watermark_error_states_minimum() -> None:
    with open_links(only=["loopback"]) as links, pytest.raises(BudgetTooSmall) as caught:
        world(links).transfer(watermark_bytes=1000)
    assert caught.value.minimum_bytes == LEAST_BYTES


def test_mismatched_sources_are_refused_before_reading(links: PeerLinks) -> None:
    made = world(links)
    with pytest.raises(PlanError, match="no link to p1"):
        made.transfer().run({"p0": made.links()["p0"]})
    made.sources[1].fence()
    made.sources[1].begin(7)
    with pytest.raises(PlanError, match="different versions"):
        made.transfer().run(made.links())
