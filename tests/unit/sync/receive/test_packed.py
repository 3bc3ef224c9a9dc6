"""Short runs that a source packs for a reader on another host arrive bit-identical and verified."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import msgspec
import numpy as np
import pytest
from tests.unit.sync.parts import content, held, naive, parts, sharded, whole

from penstock.digest.strip import Strips
from penstock.engine.threads import KeptThreads
from penstock.errors import (
    DestinationError,
    DeviceOutOfMemory,
    FormatError,
    IntegrityError,
    SourceStalled,
    StaleDescriptor,
)
from penstock.plan.packing import LEAST_PACK_BYTES, NUM_BUFFERS
from penstock.segments import Segments
from penstock.sync import packer
from penstock.sync.local_version import LocalVersion
from penstock.sync.messages import PackReply
from penstock.sync.receive import packed, sources
from penstock.sync.receive.sources import LocalLink
from penstock.sync.receive.transfer import LEAST_BYTES, Transfer
from penstock.transport.choose import PeerLinks, open_links
from penstock.transport.protocol import decode
from penstock.types import MIB

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")
TRANSPORTS = ["http", pytest.param("nixl", marks=needs_nixl)]
SHAPES = [(512, 512), (300, 96), (16, 16), (1024, 8), (64, 48)]


@pytest.fixture(params=TRANSPORTS)
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerLinks]:
    monkeypatch.setenv("PENSTOCK_NIXL_TLS", "tcp")
    with open_links(only=[request.param]) as opened:
        yield opened


@pytest.fixture
def http() -> Iterator[PeerLinks]:
    with open_links(only=["http"]) as opened:
        yield opened


def buffers_of(source: LocalVersion) -> list[packer._Buffer]:
    assert source.packer is not None
    return [buffer for pool in source.packer._pools.values() for buffer in pool.buffers]


class World:
    def __init__(self, links: PeerLinks, pack_bytes: int = 64 * MIB, shapes=SHAPES) -> None:
        holdings, wants = sharded("p", shapes, 0, 2, 2), sharded("s", shapes, 1, 4, 2)
        self.sources = [held(one, links, pack_bytes=pack_bytes) for one in holdings]
        for one in self.sources:
            one.begin(1)
            one.ready()
        self.receiver = held(wants[1], links, seed=1)
        self.part = parts(holdings, wants, 1 << 30)[1]

    def links(self) -> dict[str, LocalLink]:
        return {one.layout.member: LocalLink(one, same_process=False) for one in self.sources}

    def transfer(self, **options: object) -> Transfer:
        return Transfer(self.part, self.receiver.regions, names=self.receiver.layout.names, stall_s=5.0, **options)

    def expected(self) -> np.ndarray:
        return naive(self.part, [whole(one) for one in self.sources], whole(self.receiver))


def short_strips(world: World) -> Strips:
    return Strips(at=np.array([0]), run_bytes=np.array([64]), num_rows=np.array([100]), pitch=np.array([2048]))


def pack(source: LocalVersion, strips: Strips, wait_s: float = 0.0) -> PackReply:
    version_map = source.map()
    return source.pack(strips, version=version_map.version, generation=version_map.generation, wait_s=wait_s)


def test_packed_and_unpacked_versions_are_bit_identical(links: PeerLinks) -> None:
    found = []
    for pack_bytes in (64 * MIB, 0):
        world = World(links, pack_bytes)
        expected = world.expected()
        report = world.transfer().run(world.links())
        assert np.array_equal(whole(world.receiver), expected)
        found.append(whole(world.receiver))
        assert report.moved_bytes == world.part.nbytes
        if pack_bytes:
            assert report.packed_bytes == world.part.nbytes
            assert "packed at the sources" in report.packing()[0]
        else:
            assert report.packed_bytes == 0
            assert report.packing() == (
                "short runs read without packing: the source has no memory to pack them (no publisher, an older "
                "release, or no `pack_bytes`)",
            )
    assert np.array_equal(*found)


def test_small_packing_memory_is_filled_repeatedly(links: PeerLinks) -> None:
    world = World(links, LEAST_PACK_BYTES, [(4096, 512)])
    expected = world.expected()
    transfer = world.transfer(watermark_bytes=16 * LEAST_BYTES)
    report = transfer.run(world.links())
    assert np.array_equal(whole(world.receiver), expected)
    assert report.packed_bytes == world.part.nbytes == 2 * MIB
    assert sum(read.short_runs.num_reads for read in report.reads) >= 2 * MIB * NUM_BUFFERS // LEAST_PACK_BYTES
    assert all(0 < one.packer.nbytes <= LEAST_PACK_BYTES for one in world.sources)


def test_next_version_is_packed_again(links: PeerLinks) -> None:
    world = World(links)
    transfer = world.transfer()
    transfer.run(world.links())
    for one in world.sources:
        one.fence()
        for memory in one.regions.memories:
            content(memory)[:] ^= 0x5A
        one.begin(2)
        one.ready()
    expected = world.expected()
    transfer.run(world.links())
    assert np.array_equal(whole(world.receiver), expected)


def test_packing_waits_for_ready_rows(http: PeerLinks) -> None:
    world = World(http)
    expected, late = world.expected(), world.sources[1]
    late.fence()
    late.begin(1)
    source_links = world.links()
    filling = threading.Timer(0.3, late.ready)
    filling.start()
    world.transfer().run(source_links)
    filling.join()
    assert np.array_equal(whole(world.receiver), expected)


def test_corruption_before_buffer_read_is_detected(links: PeerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(links)
    copy = packer.pack_strips

    def damaged(memory, strips, out) -> None:
        copy(memory, strips, out)
        out[100] ^= 1

    monkeypatch.setattr(packer, "pack_strips", damaged)
    transfer = world.transfer()
    with pytest.raises(IntegrityError) as caught:
        transfer.run(world.links())
    assert transfer.lost in ("p0", "p1") and caught.value.mutated


def test_corruption_during_buffer_read_is_detected(links: PeerLinks) -> None:
    world = World(links)

    class Spoiled(LocalLink):
        def pack(self, strips: Strips, **how: object) -> PackReply:
            reply = super().pack(strips, **how)
            for pool in self.local_version.packer._pools.values():
                for buffer in pool.buffers:
                    content(buffer.memory)[7] ^= 0x80
            return reply

    source_links = world.links() | {"p1": Spoiled(world.sources[1], same_process=False)}
    transfer = world.transfer()
    with pytest.raises(IntegrityError):
        transfer.run(source_links)
    assert transfer.lost == "p1"


def read(links: PeerLinks, world: World, reply: PackReply) -> None:
    """Read the first bytes of a buffer to the start of the receiver's memory."""
    assert reply.regions is not None
    name, transport = next(iter(links.transports.items()))
    into = world.receiver.regions.handles(0)[name]
    some = Segments(src=np.array([0]), dst=np.array([0]), nbytes=np.array([64]))
    transport.wait(transport.post_read(into, decode(reply.regions[name]), some), stall_s=5.0)


def test_fence_aborts_reads_of_packed_buffer(links: PeerLinks) -> None:
    world = World(links)
    reply = pack(world.sources[0], short_strips(world))
    read(links, world, reply)
    world.sources[0].fence()
    with pytest.raises(StaleDescriptor):
        read(links, world, reply)


def test_version_fenced_after_packing_is_refused(links: PeerLinks) -> None:
    world = World(links)

    class Fencing(LocalLink):
        def pack(self, strips: Strips, **how: object) -> PackReply:
            reply = super().pack(strips, **how)
            self.local_version.fence()
            return reply

    source_links = world.links() | {"p0": Fencing(world.sources[0], same_process=False)}
    transfer = world.transfer()
    with pytest.raises(StaleDescriptor):
        transfer.run(source_links)
    assert transfer.lost == "p0"


def test_fence_during_packing_raises_stale_descriptor(http: PeerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(http)
    source = world.sources[0]
    copy = packer.pack_strips

    def fenced(memory, strips, out) -> None:
        copy(memory, strips, out)
        source.fence()

    monkeypatch.setattr(packer, "pack_strips", fenced)
    with pytest.raises(StaleDescriptor):
        pack(source, short_strips(world))
    monkeypatch.setattr(packer, "pack_strips", copy)
    source.begin(2)
    source.ready()
    assert pack(source, short_strips(world)).regions is not None


def test_dead_reader_loses_buffer_lease(links: PeerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "NUM_BUFFERS", 1)
    monkeypatch.setattr(packer, "LEASE_S", 60.0)
    world = World(links, MIB)
    source, strips = world.sources[0], short_strips(world)
    first = pack(source, strips)
    assert first.regions is not None
    assert pack(source, strips).regions is None  # the buffer is in use
    monkeypatch.setattr(packer, "LEASE_S", 0.1)
    source.hold_packed([first.lease], [])
    monkeypatch.setattr(packer, "LEASE_S", 60.0)
    second = pack(source, strips, wait_s=30.0)
    assert second.regions is not None and second.lease != first.lease
    with pytest.raises(StaleDescriptor):
        read(links, world, first)
    read(links, world, second)
    assert np.array_equal(content(world.receiver.regions.memories[0])[:64], whole(source)[:64])
    source.hold_packed([], [first.lease])  # the lease expired, and another reader has the buffer
    assert pack(source, strips).regions is None
    source.hold_packed([], [second.lease])
    assert pack(source, strips).regions is not None


def test_slow_reader_keeps_buffer_lease(http: PeerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "NUM_BUFFERS", 1)
    # Use a long wait, because a busy machine delays threads. The test observes that the lease is extended.
    monkeypatch.setattr(packer, "LEASE_S", 60.0)
    monkeypatch.setattr(packed, "KEEP_S", 0.05)
    world = World(http, MIB)
    posted = sources._posted
    go_on = threading.Event()

    def slow(*what: object) -> Iterator[object]:
        go_on.wait(20)
        yield from posted(*what)

    monkeypatch.setattr(sources, "_posted", slow)
    expected = world.expected()
    taking = threading.Thread(target=lambda: world.transfer().run(world.links()))
    taking.start()
    deadline = time.monotonic() + 15
    # The other source may be read first.
    while not (leased := [buffer for buffer in buffers_of(world.sources[0]) if buffer.lease]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first = leased[0].until
    while leased[0].until == first and time.monotonic() < deadline:
        time.sleep(0.01)
    regions = pack(world.sources[0], short_strips(world), wait_s=0.1).regions
    extended_s = leased[0].until - first
    go_on.set()
    taking.join()
    assert regions is None and extended_s > 0
    assert np.array_equal(whole(world.receiver), expected)


def test_receiver_reads_directly_if_buffers_are_busy(http: PeerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "NUM_BUFFERS", 1)
    monkeypatch.setattr(packer, "LEASE_S", 60.0)
    world = World(http, 1 << 16, [(4096, 512)])
    expected, asked = world.expected(), []
    assert pack(world.sources[1], short_strips(world)).regions is not None

    class Counting(LocalLink):
        def pack(self, strips: Strips, **how: object) -> PackReply:
            asked.append(time.monotonic())
            return super().pack(strips, **how)

    source_links = world.links() | {"p1": Counting(world.sources[1], same_process=False)}
    report = Transfer(world.part, world.receiver.regions, stall_s=1.0).run(source_links)
    assert np.array_equal(whole(world.receiver), expected)
    assert 0 < report.packed_bytes < world.part.nbytes
    assert report.packing()[1:] == ("short runs read without packing: no buffer of the source was released for 1.0 s",)
    assert max(asked) - min(asked) < 3.0  # only the first of 16 batches waits


def test_source_without_ready_rows_raises_source_stalled(http: PeerLinks) -> None:
    world = World(http)
    late = world.sources[1]
    late.fence()
    late.begin(1)
    transfer = Transfer(world.part, world.receiver.regions, stall_s=1.0)
    with pytest.raises(SourceStalled, match="no row"):
        transfer.run(world.links())
    assert transfer.lost == "p1"


def test_receiver_reads_directly_if_device_is_full(http: PeerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(http)
    expected = world.expected()

    def full(*what: object) -> None:
        raise DeviceOutOfMemory("no room for 8 MiB")

    monkeypatch.setattr(packer.Packer, "_allocate", full)
    report = world.transfer().run(world.links())
    assert np.array_equal(whole(world.receiver), expected)
    assert report.packing() == ("short runs read without packing: no room for 8 MiB",)


@pytest.mark.parametrize("error", [DeviceOutOfMemory("no room for a table"), DestinationError("the device is slow")])
def test_failed_packing_falls_back_to_direct_reads(
    http: PeerLinks, monkeypatch: pytest.MonkeyPatch, error: DestinationError
) -> None:
    world = World(http)
    expected = world.expected()

    def fails(*what: object) -> None:
        raise error

    monkeypatch.setattr(packer, "pack_strips", fails)
    report = world.transfer().run(world.links())
    assert np.array_equal(whole(world.receiver), expected)
    assert report.packing() == (f"short runs read without packing: {error.message}",)
    assert all(not buffer.is_filling for one in world.sources for buffer in buffers_of(one))


def test_failed_registration_is_retried(http: PeerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(http)
    allocate = packer.Packer._allocate

    def fails(*what: object) -> None:
        raise RuntimeError("the transport's library failed")

    monkeypatch.setattr(packer.Packer, "_allocate", fails)
    for _ in range(NUM_BUFFERS + 1):
        with pytest.raises(RuntimeError, match="library"):
            pack(world.sources[0], short_strips(world))
    monkeypatch.setattr(packer.Packer, "_allocate", allocate)
    assert pack(world.sources[0], short_strips(world)).regions is not None


def test_allocation_on_full_device_is_retried_for_next_version(
    http: PeerLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(http)
    source, allocate = world.sources[0], packer.Packer._allocate
    assert pack(source, short_strips(world)).regions is not None

    def full(*what: object) -> None:
        raise DeviceOutOfMemory("no room for 8 MiB")

    monkeypatch.setattr(packer.Packer, "_allocate", full)
    assert pack(source, short_strips(world), wait_s=0.0).is_full
    monkeypatch.setattr(packer.Packer, "_allocate", allocate)
    source.fence()
    source.begin(2)
    source.ready()
    for _ in range(NUM_BUFFERS):
        assert pack(source, short_strips(world), wait_s=0.0).regions is not None


def test_undecodable_reply_after_write_raises_with_mutated_set(http: PeerLinks) -> None:
    holdings, wants = sharded("p", [(4096, 512)], 0, 1, 1), sharded("s", [(4096, 512)], 1, 4, 1)
    source = held(holdings[0], http, pack_bytes=LEAST_PACK_BYTES)
    source.begin(1)
    source.ready()
    receiver = held(wants[1], http, seed=1)
    num_asked = []

    class Broken(LocalLink):
        def pack(self, strips: Strips, **how: object) -> PackReply:
            reply = super().pack(strips, **how)
            num_asked.append(1)
            if len(num_asked) <= 3 or reply.regions is None:
                return reply
            return msgspec.structs.replace(reply, regions=dict.fromkeys(reply.regions, b"\xc1"))

    before = whole(receiver).copy()
    transfer = Transfer(parts(holdings, wants, 1 << 30)[1], receiver.regions, stall_s=3.0)
    with pytest.raises(FormatError) as caught:
        transfer.run({"p0": Broken(source, same_process=False)})
    assert caught.value.mutated and not np.array_equal(whole(receiver), before)


def test_buffer_is_released_when_packing_is_abandoned(http: PeerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(http, LEAST_PACK_BYTES, [(4096, 512)])
    reads: list[sources.SourceRead] = []
    made = sources.SourceRead.__init__

    def noted(self: sources.SourceRead, *arguments: object, **options: object) -> None:
        made(self, *arguments, **options)
        reads.append(self)

    monkeypatch.setattr(sources.SourceRead, "__init__", noted)

    class GivesUp(LocalLink):
        def pack(self, strips: Strips, **how: object) -> PackReply:
            reply = super().pack(strips, **how)
            for read in reads:
                read._note_unpacked("another read has waited for a buffer in vain")
            return reply

    expected = world.expected()
    world.transfer().run(
        {name: GivesUp(link.local_version, same_process=False) for name, link in world.links().items()}
    )
    assert np.array_equal(whole(world.receiver), expected)
    assert not [buffer.lease for one in world.sources for buffer in buffers_of(one) if buffer.lease]


def test_hanging_source_does_not_block_other_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "KEEP_S", 0.001)
    ended, renewed = threading.Event(), threading.Event()
    hung: list[int] = []
    well: list[int] = []

    class Link:
        def pack(self, *_: object, **__: object) -> PackReply:
            raise AssertionError

    class Hung(Link):
        def hold_packed(self, keep: object, release: object) -> None:
            hung.append(1)
            ended.wait(30)

    class Well(Link):
        def hold_packed(self, keep: object, release: object) -> None:
            well.append(1)
            if len(well) == 50:
                renewed.set()

    with KeptThreads() as threads, packed.BufferLeases(lambda: False, threads) as leases:
        leases.add(Hung(), "a")
        leases.add(Well(), "b")
        assert renewed.wait(30)
        ended.set()
    assert len(hung) < 5


def test_thread_start_error_names_its_cause(http: PeerLinks, refuse_thread: Callable[[str], None]) -> None:
    world = World(http)
    refuse_thread("penstock-leases")
    with pytest.raises(DestinationError, match="cannot start a thread"):
        world.transfer().run(world.links())


@pytest.mark.parametrize("only", ["shm", "loopback"])
def test_same_host_transfer_is_not_packed(only: str) -> None:
    with open_links(only=[only, "http"]) as links:
        world = World(links)
        expected = world.expected()
        source_links = {name: LocalLink(link.local_version) for name, link in world.links().items()}
        report = world.transfer().run(source_links)
        assert np.array_equal(whole(world.receiver), expected)
        assert report.packed_bytes == 0 and report.packing() == ()
        assert {read.path for read in report.reads} == {only}
