"""Reads from peers' host memory into a fake device, staged or pinned: fences, deaths, hanging devices, the pool."""

from __future__ import annotations

import ctypes
import gc
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from tests.support.fake_cuda import FakeCuda
from tests.support.holder import HolderProcess, pattern

from penstock.cuda.driver import never_freed
from penstock.errors import ConfigError, DestinationError, PeerLost, PlanError, SourceStalled, StaleDescriptor
from penstock.memory.arena import Arena
from penstock.segments import Rectangles
from penstock.sync.receive.sources import SourceRead
from penstock.testing.transport_suite import segments
from penstock.transport import into_device
from penstock.transport.choose import PeerLinks
from penstock.transport.cuda_ipc import CudaIpcTransport
from penstock.transport.http import HttpTransport
from penstock.transport.into_device import PinnedTransport, StagedTransport
from penstock.transport.protocol import Memory, encode
from penstock.transport.shm import ShmTransport

NBYTES = 5_000_011
ROWS = [(at, at, min(70_001, NBYTES - at)) for at in range(0, NBYTES, 70_001)][::-1]
COLUMNS = {"src": 0, "dst": 0, "run_bytes": NBYTES, "num_rows": 1, "src_pitch": NBYTES, "dst_pitch": NBYTES}


def _refuse(address: int, nbytes: int, *, is_read_only: bool = False) -> None:
    raise DestinationError("no")


class Reader:
    def __init__(self, kind: str) -> None:
        self.driver, self.shm = FakeCuda(), ShmTransport()
        self.transport = (
            PinnedTransport(self.shm, self.driver)
            if kind == "pinned"
            else StagedTransport("staged_shm", self.shm, self.driver)
        )
        self.memory = self.driver.allocate(NBYTES)
        self.into = self.transport.register_into(self.memory)

    def read(self, descriptor, rows=((0, 0, NBYTES),), *, stall_s: float = 20.0) -> bytes:
        pending = self.transport.post_read(self.into, descriptor, segments(rows))
        self.transport.wait(pending, stall_s=stall_s)
        assert pending.moved_bytes == pending.nbytes == sum(row[2] for row in rows)
        return ctypes.string_at(self.memory.address, NBYTES)


@pytest.fixture(params=["staged", "pinned"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def reader(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(into_device, "STAGE_BYTES", 1 << 20)
    monkeypatch.setattr(into_device, "TURN_BYTES", 1 << 20)
    made = Reader(kind)
    yield made
    made.transport.close()
    made.shm.close()
    gc.collect()


@pytest.fixture
def holder():
    with HolderProcess("shm", nbytes=NBYTES) as child:
        yield child


def test_peer_host_memory_is_copied_to_device(kind, reader, holder) -> None:
    most = into_device.NUM_BUFFERS if kind == "staged" else 1
    if kind == "pinned":
        reader.transport.reach(reader.into.memory.device, holder.descriptor)
        assert len(reader.driver.pinned) == 1
    assert reader.read(holder.descriptor) == pattern(NBYTES)
    assert reader.read(holder.fence(2), ROWS) == pattern(NBYTES, 2)
    assert 0 < len(reader.driver.pinned) <= most
    reader.transport.close()
    gc.collect()
    assert not reader.driver.pinned


@pytest.mark.parametrize("kind", ["pinned"], indirect=True)
def test_rectangles_are_copied_for_every_row_length(reader, holder) -> None:
    rows = [(5, 100, 40, 300, 1000, 40), (400_000, 20_000, 300_000, 3, 400_000, 300_001)]
    rows.append((7, 2_000_000, 100, 90, 100, 100))
    rectangles = Rectangles(**dict(zip(COLUMNS, np.array(rows).T, strict=True)))
    given, expected = pattern(NBYTES), bytearray(ctypes.string_at(reader.memory.address, NBYTES))
    for src, dst, run, count, src_pitch, dst_pitch in rows:
        for i in range(count):
            expected[dst + i * dst_pitch : dst + i * dst_pitch + run] = given[src + i * src_pitch :][:run]
    pending = reader.transport.post_rectangles(reader.into, holder.descriptor, rectangles)
    reader.transport.wait(pending, stall_s=20)
    assert pending.moved_bytes == pending.nbytes == sum(row[2] * row[3] for row in rows)
    assert ctypes.string_at(reader.memory.address, NBYTES) == bytes(expected)
    late = reader.transport.post_rectangles(reader.into, holder.descriptor, rectangles)
    holder.fence(2)
    with pytest.raises(StaleDescriptor):
        reader.transport.wait(late, stall_s=20)


def test_fenced_or_lost_peer_raises_and_unpins_memory(kind, reader, holder) -> None:
    pending = reader.transport.post_read(reader.into, holder.descriptor, segments([(0, 0, NBYTES)]))
    holder.fence(2)
    with pytest.raises(StaleDescriptor) as caught:
        reader.transport.wait(pending, stall_s=20)
    assert not caught.value.mutated
    assert reader.read(holder.descriptor) == pattern(NBYTES, 2)
    holder.process.kill()
    holder.process.wait(10)
    with pytest.raises(PeerLost):
        reader.read(holder.descriptor)
    if kind == "pinned":
        reader.transport.sweep()  # as each heartbeat does
        del pending, caught
        gc.collect()
        assert not reader.driver.pinned


def test_memory_stays_allocated_while_device_hangs(kind, reader, holder) -> None:
    reader.driver.is_stuck = True
    stuck = into_device.NUM_BUFFERS if kind == "staged" else 1
    for wanted in [*[DestinationError] * stuck, *([SourceStalled] if kind == "staged" else [])]:
        with pytest.raises(wanted) as caught:
            reader.read(holder.descriptor, stall_s=0.2)
        assert caught.value.mutated is (wanted is DestinationError)
    reader.transport.close()
    gc.collect()
    assert len(reader.driver.pinned) == stuck
    never_freed.clear()
    reader.driver.is_stuck = False


def test_failed_copy_keeps_memory_of_queued_copies_allocated(reader, holder, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = reader.driver.copy

    def copy(*columns) -> None:
        queue(*columns)
        raise DestinationError("a later one is refused")

    monkeypatch.setattr(reader.driver, "copy", copy)
    with pytest.raises(DestinationError) as caught:
        reader.read(holder.descriptor)
    assert caught.value.mutated
    del caught
    reader.transport.close()
    gc.collect()
    assert len(reader.driver.pinned) == 1
    assert any(reader.into in kept for kept in never_freed)
    never_freed.clear()


def test_only_device_memory_is_accepted_as_target(reader, holder) -> None:
    with pytest.raises(ConfigError):
        reader.transport.register_into(Memory.of_buffer(bytearray(8)))
    with pytest.raises(ConfigError):
        reader.transport.register(reader.memory)
    with pytest.raises(ConfigError):
        foreign = reader.shm.register_into(Memory.of_buffer(bytearray(8)))
        reader.transport.post_read(foreign, holder.descriptor, segments([]))
    with pytest.raises(PlanError):
        reader.read(holder.descriptor, [(1, 0, NBYTES)])


@pytest.mark.parametrize("kind", ["staged"], indirect=True)
def test_concurrent_reads_share_limited_staging_buffers(reader, holder) -> None:
    rows = [(at, at, min(500_009, NBYTES - at)) for at in range(0, NBYTES, 500_009)]
    threads = [threading.Thread(target=reader.read, args=(holder.descriptor, [row])) for row in rows * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ctypes.string_at(reader.memory.address, NBYTES) == pattern(NBYTES)
    assert len(reader.driver.pinned) <= into_device.NUM_BUFFERS


@pytest.mark.parametrize("kind", ["pinned"], indirect=True)
def test_unpinnable_memory_raises_destination_error(reader, holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader.driver, "pin", _refuse)
    with pytest.raises(DestinationError):
        reader.transport.reach(reader.into.memory.device, holder.descriptor)
    assert not reader.driver.pinned


@pytest.mark.parametrize("can_pin", [True, False])
def test_sync_stages_unpinnable_memory_and_reports_reason(holder, monkeypatch: pytest.MonkeyPatch, can_pin) -> None:
    driver = FakeCuda()
    with PeerLinks({"shm": ShmTransport}) as links:
        links.add_derived(driver)
        memory = driver.allocate(NBYTES)
        handles = links.register_into(memory, {}, is_repeated=True)
        given = ({"shm": encode(holder.descriptor)},)
        link = SimpleNamespace(member="p0", map=SimpleNamespace(regions=given), same_host=True, same_process=False)
        source = SourceRead(link, SimpleNamespace(links=links, handles=lambda region: handles))
        if not can_pin:
            monkeypatch.setattr(driver, "pin", _refuse)
        rows = Rectangles(**{name: np.array([value]) for name, value in COLUMNS.items()})
        failed, is_touched = source.read(SimpleNamespace(reads=((0, 0, rows),)), stall_s=20.0)
        if can_pin:
            assert failed is None
            assert is_touched
            assert source.path == "pinned_shm"
            assert ctypes.string_at(memory.address, NBYTES) == pattern(NBYTES)
        else:  # staging cannot pin memory here either
            assert isinstance(failed, DestinationError)
            assert source.path == "staged_shm"
            assert "pinned_shm: no" in source.why


@pytest.mark.parametrize(("inner", "same_host"), [("shm", True), ("http", False)])
def test_device_read_from_host_cache_selects_matching_transport(inner: str, same_host: bool) -> None:
    driver, arena = FakeCuda(), Arena.allocate(100)
    ctypes.memset(arena.address, 7, 100)
    kept = Memory(address=arena.address, nbytes=100, owner=arena)
    makers = {"cuda_ipc": lambda: CudaIpcTransport(driver), "shm": ShmTransport, "http": HttpTransport.open}
    with PeerLinks({"shm": ShmTransport, "http": HttpTransport.open}) as keeper, PeerLinks(makers) as engine:
        engine.add_derived(driver)
        offered = {name: encode(handle.descriptor) for name, handle in keeper.register(kept).items()}
        memory = driver.allocate(100)
        ours = engine.register_into(memory, engine.register(memory))
        transport, descriptor, why = engine.choose(ours, offered, same_host=same_host, same_process=False)
        assert (transport.name == f"staged_{inner}" and "cuda_ipc: the peer does not offer it" in why) or not same_host
        transport.wait(transport.post_read(ours[transport.name], descriptor, segments([(0, 0, 100)])), stall_s=20)
        assert ctypes.string_at(memory.address, 100) == b"\7" * 100
        # Memory that is read repeatedly is pinned in place, on one host.
        often = engine.register_into(memory, engine.register(memory), is_repeated=True)
        near, descriptor, _ = engine.choose(often, offered, same_host=same_host, same_process=False)
        assert near.name == ("pinned_shm" if same_host else "staged_http")
        # It offers no descriptor, and is not used between host memories.
        assert set(engine.register(memory)) == {"cuda_ipc"}
        host = engine.register_into(kept, engine.register(kept))
        assert engine.choose(host, offered, same_host=same_host, same_process=False)[0].name == inner
