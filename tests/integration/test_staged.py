"""Peers' host memory read into a device, without one: bytes, fences, holders that die, devices that hang, the pool."""

from __future__ import annotations

import ctypes
import gc
import threading

import pytest

from penstock.errors import ConfigError, DestinationError, PeerLost, PlanError, SourceStalled, StaleDescriptor
from penstock.memory.arena import Arena
from penstock.testing.fake_cuda import FakeCuda
from penstock.testing.holder import HolderProcess, pattern
from penstock.testing.transport_suite import segments
from penstock.transport import staged
from penstock.transport.choose import Links
from penstock.transport.cuda_ipc import CudaIpcTransport
from penstock.transport.descriptor import encode
from penstock.transport.http import HttpTransport
from penstock.transport.protocol import Memory
from penstock.transport.shm import ShmTransport
from penstock.transport.staged import StagedTransport

NBYTES = 5_000_011


class Reader:
    def __init__(self) -> None:
        self.driver, self.shm = FakeCuda(), ShmTransport()
        self.transport = StagedTransport("staged_shm", self.shm, self.driver)
        self.memory = self.driver.allocate(NBYTES)
        self.into = self.transport.register_into(self.memory)

    def read(self, descriptor, rows=((0, 0, NBYTES),), *, stall_s: float = 20.0) -> bytes:
        pending = self.transport.post_read(self.into, descriptor, segments(rows))
        self.transport.wait(pending, stall_s=stall_s)
        assert pending.moved_bytes == pending.nbytes == sum(row[2] for row in rows)
        return ctypes.string_at(self.memory.address, NBYTES)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(staged, "STAGE_BYTES", 1 << 20)
    made = Reader()
    yield made
    made.transport.close()
    made.shm.close()
    gc.collect()


@pytest.fixture
def holder():
    with HolderProcess("shm", nbytes=NBYTES) as child:
        yield child


def test_another_processs_host_memory_comes_to_a_device(reader, holder) -> None:
    assert reader.read(holder.descriptor) == pattern(NBYTES)
    rows = [(at, at, min(70_001, NBYTES - at)) for at in range(0, NBYTES, 70_001)][::-1]
    assert reader.read(holder.fence(2), rows) == pattern(NBYTES, 2)
    assert 0 < len(reader.driver.pinned) <= staged.NUM_BUFFERS
    reader.transport.close()
    assert not reader.driver.pinned


def test_many_threads_share_a_bounded_pool(reader, holder) -> None:
    rows = [(at, at, min(500_009, NBYTES - at)) for at in range(0, NBYTES, 500_009)]
    threads = [threading.Thread(target=reader.read, args=(holder.descriptor, [row])) for row in rows * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ctypes.string_at(reader.memory.address, NBYTES) == pattern(NBYTES)
    assert len(reader.driver.pinned) <= staged.NUM_BUFFERS


def test_a_fence_and_a_death_are_seen(reader, holder) -> None:
    old = holder.descriptor
    pending = reader.transport.post_read(reader.into, old, segments([(0, 0, NBYTES)]))
    holder.fence(2)
    with pytest.raises(StaleDescriptor) as caught:
        reader.transport.wait(pending, stall_s=20)
    assert not caught.value.mutated
    assert reader.read(holder.descriptor) == pattern(NBYTES, 2)
    holder.process.kill()
    holder.process.wait(10)
    with pytest.raises(PeerLost):
        reader.read(holder.descriptor)


def test_a_device_that_hangs_keeps_its_buffer(reader, holder) -> None:
    reader.driver.is_stuck = True
    for kind in [*[DestinationError] * staged.NUM_BUFFERS, SourceStalled]:
        with pytest.raises(kind):
            reader.read(holder.descriptor, stall_s=0.2)
    reader.transport.close()
    assert len(reader.driver.pinned) == staged.NUM_BUFFERS
    staged.never_freed.clear()
    reader.driver.is_stuck = False


def test_it_reads_into_devices_only_and_shows_nothing(reader, holder) -> None:
    with pytest.raises(ConfigError):
        reader.transport.register_into(Memory.of_buffer(bytearray(8)))
    with pytest.raises(ConfigError):
        reader.transport.register(reader.memory)
    with pytest.raises(ConfigError):
        reader.transport.post_read(
            reader.shm.register_into(Memory.of_buffer(bytearray(8))), holder.descriptor, segments([])
        )
    with pytest.raises(PlanError):
        reader.read(holder.descriptor, [(1, 0, NBYTES)])


@pytest.mark.parametrize(("inner", "same_host"), [("shm", True), ("http", False)])
def test_it_is_chosen_where_a_keeper_on_the_host_feeds_a_device(inner: str, same_host: bool) -> None:
    driver, arena = FakeCuda(), Arena.allocate(100)
    ctypes.memset(arena.address, 7, 100)
    kept = Memory(address=arena.address, nbytes=100, owner=arena)
    makers = {"cuda_ipc": lambda: CudaIpcTransport(driver), "shm": ShmTransport, "http": HttpTransport}
    with Links({"shm": ShmTransport, "http": HttpTransport}) as keeper, Links(makers) as engine:
        engine.add_staged(driver)
        offered = {name: encode(handle.descriptor) for name, handle in keeper.register(kept).items()}
        memory = driver.allocate(100)
        ours = engine.register_into(memory, engine.register(memory))
        transport, descriptor, why = engine.choose(ours, offered, same_host=same_host, same_process=False)
        assert (transport.name == f"staged_{inner}" and "cuda_ipc: the peer does not offer it" in why) or not same_host
        transport.wait(transport.post_read(ours[transport.name], descriptor, segments([(0, 0, 100)])), stall_s=20)
        assert ctypes.string_at(memory.address, 100) == b"\7" * 100
        # What is read again and again is pinned where it is, on one host.
        often = engine.register_into(memory, engine.register(memory), is_repeated=True)
        near, descriptor, _ = engine.choose(often, offered, same_host=same_host, same_process=False)
        assert near.name == ("pinned_shm" if same_host else "staged_http")
        # Nothing is offered by it, and it is not used between hosts' memories.
        assert set(engine.register(memory)) == {"cuda_ipc"}
        host = engine.register_into(kept, engine.register(kept))
        assert engine.choose(host, offered, same_host=same_host, same_process=False)[0].name == inner
