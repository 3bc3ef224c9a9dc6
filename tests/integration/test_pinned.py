"""Peers' host memory pinned here and read by a device, without one: bytes, fences, deaths, devices that hang."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.errors import ConfigError, DestinationError, PeerLost, PlanError, StaleDescriptor
from penstock.memory.arena import Arena
from penstock.sync.source_read import SourceRead
from penstock.testing.fake_cuda import FakeCuda
from penstock.testing.holder import HolderProcess, pattern
from penstock.testing.transport_suite import segments
from penstock.transport import pinned, staged
from penstock.transport.choose import Links
from penstock.transport.descriptor import encode
from penstock.transport.pinned import PinnedTransport
from penstock.transport.protocol import Memory, Rectangles
from penstock.transport.shm import ShmTransport

NBYTES = 5_000_011


COLUMNS = {"src": 0, "dst": 0, "run_bytes": NBYTES, "num_rows": 1, "src_pitch": NBYTES, "dst_pitch": NBYTES}


def _refuse(address: int, nbytes: int, *, is_read_only: bool = False) -> None:
    raise DestinationError("no")


class Reader:
    def __init__(self) -> None:
        self.driver, self.shm = FakeCuda(), ShmTransport()
        self.transport = PinnedTransport(self.shm, self.driver)
        self.memory = self.driver.allocate(NBYTES)
        self.into = self.transport.register_into(self.memory)

    def read(self, descriptor, rows=((0, 0, NBYTES),), *, stall_s: float = 20.0) -> bytes:
        pending = self.transport.post_read(self.into, descriptor, segments(rows))
        self.transport.wait(pending, stall_s=stall_s)
        assert pending.moved_bytes == pending.nbytes == sum(row[2] for row in rows)
        return ctypes.string_at(self.memory.address, NBYTES)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pinned, "TURN_BYTES", 1 << 20)
    made = Reader()
    yield made
    made.transport.close()
    made.shm.close()
    gc.collect()


@pytest.fixture
def holder():
    with HolderProcess("shm", nbytes=NBYTES) as child:
        yield child


def test_it_is_pinned_once_and_let_go_at_the_end(reader, holder) -> None:
    reader.transport.reach(reader.into, holder.descriptor)
    assert len(reader.driver.pinned) == 1
    assert reader.read(holder.descriptor) == pattern(NBYTES)
    rows = [(at, at, min(70_001, NBYTES - at)) for at in range(0, NBYTES, 70_001)][::-1]
    assert reader.read(holder.fence(2), rows) == pattern(NBYTES, 2)
    assert len(reader.driver.pinned) == 1
    reader.transport.close()
    gc.collect()
    assert not reader.driver.pinned


def test_a_fence_and_a_death_are_seen_and_the_memory_let_go(reader, holder) -> None:
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
    reader.transport.sweep()  # as with each beat
    del pending, caught
    gc.collect()
    assert not reader.driver.pinned


def test_what_a_device_that_hangs_may_read_is_kept(reader, holder) -> None:
    reader.driver.is_stuck = True
    with pytest.raises(DestinationError):
        reader.read(holder.descriptor, stall_s=0.2)
    reader.transport.close()
    gc.collect()
    assert len(reader.driver.pinned) == 1
    staged.never_freed.clear()
    reader.driver.is_stuck = False


def test_memory_that_cannot_be_pinned_is_said_to_be_so(reader, holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader.driver, "pin", _refuse)
    with pytest.raises(DestinationError):
        reader.transport.reach(reader.into, holder.descriptor)
    assert not reader.driver.pinned


@pytest.mark.parametrize("can_pin", [True, False])
def test_a_sync_stages_what_cannot_be_pinned_and_says_why(holder, monkeypatch: pytest.MonkeyPatch, can_pin) -> None:
    driver = FakeCuda()
    with Links({"shm": ShmTransport}) as links:
        links.add_staged(driver)
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
        else:  # staging has nothing to pin either, here
            assert isinstance(failed, DestinationError)
            assert source.path == "staged_shm"
            assert "pinned_shm: no" in source.why


def test_it_reads_into_devices_only_and_shows_nothing(reader, holder) -> None:
    arena = Arena.allocate(8)
    with pytest.raises(ConfigError):
        reader.transport.register_into(Memory(address=arena.address, nbytes=8, owner=arena))
    with pytest.raises(ConfigError):
        reader.transport.register(reader.memory)
    with pytest.raises(PlanError):
        reader.read(holder.descriptor, [(1, 0, NBYTES)])
