"""Staged copies: every byte through few buffers, none lent again while a copy may use it.

The device is a thread that carries out copies in the order of each stream, later than they were queued
(`tests.support.staged_device`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from tests.support.staged_device import Device

from penstock.cuda.driver import never_freed
from penstock.errors import DestinationError, SourceStalled
from penstock.memory.staging import StagingPool
from penstock.storage.local import address_of
from penstock_convert.workers.staged_copies import StagedCopies

PAGE = 4096


class Pins:
    """A registrar that notes what is pinned."""

    def __init__(self) -> None:
        self.pinned = set[int]()

    def register(self, address: int, nbytes: int) -> None:
        self.pinned.add(address)

    def unregister(self, address: int) -> None:
        self.pinned.remove(address)


@contextmanager
def copies(device: Device, num_buffers: int, stall_s: float = 30.0, pins: Pins | None = None) -> Iterator[StagedCopies]:
    pool = StagingPool.map(num_buffers * PAGE, PAGE, registrar=pins)
    staged = StagedCopies(pool, device, 0, up=1, down=2, stall_s=stall_s)
    try:
        yield staged
    finally:
        staged.close()


@pytest.mark.parametrize("num_buffers", [2, 3, 8])
def test_staged_copy_with_few_buffers_is_complete(num_buffers: int) -> None:
    chance = np.random.default_rng(1)
    sources = [chance.integers(0, 256, nbytes, np.uint8) for nbytes in (10 * PAGE + 17, 1, 3 * PAGE, 40 * PAGE, 100, 0)]
    there = [np.zeros(len(source), np.uint8) for source in sources]
    back = [np.zeros(len(source), np.uint8) for source in sources]
    device = Device()

    def up(i: int) -> None:
        def read(at: int, into: memoryview) -> None:
            into[:] = sources[i][at : at + into.nbytes].data

        staged.fill(there[i].ctypes.data, len(there[i]), read, step=3000)

    def down(i: int) -> None:
        def write(at: int, data: memoryview) -> None:
            back[i][at : at + data.nbytes] = np.frombuffer(data, np.uint8)

        staged.drain(there[i].ctypes.data, len(there[i]), write)

    with copies(device, num_buffers) as staged, ThreadPoolExecutor(6) as pool:
        list(pool.map(up, range(6)))
        assert all((one == other).all() for one, other in zip(sources, there, strict=True))
        list(pool.map(down, range(6)))
        assert all((one == other).all() for one, other in zip(sources, back, strict=True))
        assert staged.pool.num_in_use == 0 and staged.pool.peak_bytes <= num_buffers * PAGE
    assert len(device.freed) <= num_buffers


def test_staged_copy_reads_consecutive_pieces_of_step_size() -> None:
    memory, asked = np.zeros(10_000, np.uint8), list[tuple[int, int]]()
    with copies(Device(), 2) as staged:
        staged.fill(memory.ctypes.data, 10_000, lambda at, into: asked.append((at, into.nbytes)), step=3000)
    assert asked == [(0, 3000), (3000, 3000), (6000, 3000), (9000, 1000)]


def test_failed_read_releases_its_buffer() -> None:
    def read(at: int, into: memoryview) -> None:
        raise OSError("gone")

    pins = Pins()
    with copies(Device(), 2, pins=pins) as staged:
        for _ in range(3):
            with pytest.raises(OSError, match="gone"):
                staged.fill(0, PAGE, read, step=PAGE)
        assert staged.pool.num_in_use == 0 and len(pins.pinned) == 1
    assert not pins.pinned


def test_buffer_in_hanging_copy_is_not_reused() -> None:
    device, memory, lent, pins = Device(), np.zeros(PAGE, np.uint8), list[int](), Pins()

    def read(at: int, into: memoryview) -> None:
        lent.append(address_of(into))
        into[:] = b"\x07" * into.nbytes

    device.hangs = True
    with copies(device, 2, stall_s=0.2, pins=pins) as staged:
        with pytest.raises(DestinationError, match=r"did not finish a copy of 4096 bytes within 0\.2 s"):
            staged.fill(memory.ctypes.data, PAGE, read, step=PAGE)
        assert staged.pool.num_in_use == 1
        other = staged.pool.acquire(stall_s=1.0)
        assert [other.address] != lent
        with pytest.raises(SourceStalled):
            staged.pool.acquire(stall_s=0.1)
        staged.pool.release(other)
    # `close` has left the pool as it was: the copy that ends now reads memory that exists.
    assert (staged.pool,) in never_freed and set(lent) <= pins.pinned
    device.hangs = False
    deadline = time.monotonic() + 10
    while not device.is_done(0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert device.is_done(0) and (memory == 7).all()
    never_freed.remove((staged.pool,))
