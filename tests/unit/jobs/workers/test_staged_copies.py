"""Staged copies: every byte through few buffers, none lent again while a copy may use it.

The device is a thread that carries out copies in the order of each stream, later than they were queued.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
import pytest

from penstock.cuda.driver import never_freed
from penstock.errors import DestinationError
from penstock.jobs.workers.staged_copies import StagedCopies
from penstock.memory.staging import StagingPool

PAGE = 4096


class Device:
    """Copies of host memory, carried out by a thread for each stream."""

    def __init__(self, delay_s: float = 0.0005) -> None:
        self.delay_s = delay_s
        self.hangs = False
        self.freed: list[int] = []
        self._events: list[threading.Event] = []
        self._streams: dict[int, SimpleQueue[tuple[int, int, int] | threading.Event | None]] = {}
        for stream in (1, 2):
            self._streams[stream] = SimpleQueue()
            threading.Thread(target=self._work, args=(stream,), daemon=True).start()

    def _work(self, stream: int) -> None:
        while (work := self._streams[stream].get()) is not None:
            if isinstance(work, threading.Event):
                work.set()
                continue
            time.sleep(self.delay_s)
            while self.hangs:
                time.sleep(0.01)
            ctypes.memmove(*work)

    @contextmanager
    def entered(self, device: int) -> Iterator[None]:
        yield

    def copy_to_device(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._streams[stream].put((dst, src, nbytes))

    copy_to_host = copy_to_device

    def make_event(self) -> int:
        self._events.append(threading.Event())
        return len(self._events) - 1

    def record(self, event: int, stream: int) -> None:
        self._events[event] = threading.Event()
        self._streams[stream].put(self._events[event])

    def is_done(self, event: int) -> bool:
        return self._events[event].is_set()

    def free(self, streams: Sequence[int], events: Sequence[int]) -> None:
        self.freed += events


@contextmanager
def copies(device: Device, num_buffers: int, stall_s: float = 30.0) -> Iterator[StagedCopies]:
    staged = StagedCopies(StagingPool(num_buffers * PAGE, PAGE), device, 0, up=1, down=2, stall_s=stall_s)
    try:
        yield staged
    finally:
        staged.close()


@pytest.mark.parametrize("num_buffers", [2, 3, 8])
def test_every_byte_passes_also_through_fewer_buffers_than_threads(num_buffers: int) -> None:
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


def test_pieces_are_whole_steps_in_order() -> None:
    memory, asked = np.zeros(10_000, np.uint8), list[tuple[int, int]]()
    with copies(Device(), 2) as staged:
        staged.fill(memory.ctypes.data, 10_000, lambda at, into: asked.append((at, into.nbytes)), step=3000)
    assert asked == [(0, 3000), (3000, 3000), (6000, 3000), (9000, 1000)]


def test_a_failed_read_gives_its_buffer_back() -> None:
    def read(at: int, into: memoryview) -> None:
        raise OSError("gone")

    with copies(Device(), 2) as staged:
        for _ in range(3):
            with pytest.raises(OSError, match="gone"):
                staged.fill(0, PAGE, read, step=PAGE)
        assert staged.pool.num_in_use == 0


def test_a_buffer_of_a_copy_that_hangs_is_neither_lent_again_nor_freed() -> None:
    device, memory = Device(), np.zeros(PAGE, np.uint8)
    device.hangs = True
    with copies(device, 2, stall_s=0.2) as staged:
        with pytest.raises(DestinationError, match=r"did not end a copy of 4096 bytes within 0\.2 s"):
            staged.fill(memory.ctypes.data, PAGE, lambda at, into: None, step=PAGE)
        assert staged.pool.num_in_use == 1
        (other,) = {staged.pool.acquire(stall_s=1.0).address}
    # `close` has left the pool as it was: the copy that ends now writes to memory that exists.
    assert (staged.pool,) in never_freed
    device.hangs = False
    deadline = time.monotonic() + 10
    while not device.is_done(0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert device.is_done(0) and other
    never_freed.remove((staged.pool,))
