"""CUDA slabs with a fake device: the first allocations, and failed allocations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine.place import CudaPlace, Segment, blocks_of
from penstock.errors import DeviceOutOfMemory
from penstock.memory.staging import StagingPool
from penstock.types import MIB


class Device:
    """A fake device for the calls of a `CudaPlace`.

    Attributes:
        queued: sizes of the queued copies.
        refuses: returns whether an allocation of this size fails.
        threads: the threads that allocated.
        allocated: sizes of the allocations.
        wait_stream: called when a stream has to wait for a different stream.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: list[int] = []
        self.refuses: Callable[[int], bool] = lambda nbytes: False
        self.threads: set[int] = set()
        self.allocated: list[int] = []
        self._empty = torch.empty
        self.wait_stream: Callable[[], None] = lambda: None
        stream = SimpleNamespace(cuda_stream=7, wait_stream=lambda other: self.wait_stream())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr("penstock.engine.place.make_stream", lambda device, owner: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        event = SimpleNamespace(cuda_event=5, record=lambda stream: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
        monkeypatch.setattr(torch, "empty", self.empty)
        driver = SimpleNamespace(
            copy_to_device=lambda dst, src, nbytes, stream: self.queued.append(nbytes),
            record=lambda event, stream: None,
        )
        monkeypatch.setattr("penstock.engine.place.load_driver", lambda: driver)

    def empty(self, nbytes: int, **options: Any) -> torch.Tensor:
        if self.refuses(nbytes):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        self.threads.add(threading.get_ident())
        self.allocated.append(nbytes)
        return self._empty(nbytes, **options)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_failed_slab_allocation_queues_no_copy(device: Device) -> None:
    place = CudaPlace(torch.device("cpu"), [1000, 2000])
    device.refuses = lambda nbytes: nbytes == 2000
    pool = StagingPool.map(8192, 4096)
    buffer = pool.acquire(stall_s=1)
    with pytest.raises(DeviceOutOfMemory):
        place.copy(buffer, [Segment(0, 0, 0, 1000, 1, 1000), Segment(1000, 1, 0, 2000, 1, 2000)])
    assert device.queued == []
    device.refuses = lambda nbytes: False
    place.copy(buffer, [Segment(0, 0, 0, 1000, 1, 1000), Segment(1000, 1, 0, 2000, 1, 2000)])
    assert device.queued == [1000, 2000]
    pool.close()


def test_slabs_are_allocated_separately_if_memory_is_fragmented(device: Device) -> None:
    place = CudaPlace(torch.device("cpu"), [2 * MIB, 3 * MIB])
    device.refuses = lambda nbytes: nbytes > 3 * MIB
    place.allocate()
    assert device.allocated == [2 * MIB, 3 * MIB]
    assert [place.slab(index).numel() for index in range(2)] == [2 * MIB, 3 * MIB]


def test_all_slabs_are_allocated_in_blocks(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.place.BLOCK_BYTES", 5 * MIB)
    place = CudaPlace(torch.device("cpu"), [2 * MIB, 3 * MIB, 5, 6 * MIB])
    place.allocate()
    assert device.allocated == [5 * MIB, 2 * MIB, 3 * MIB, 5, 6 * MIB]


def test_failed_separate_allocation_raises_typed_error(device: Device) -> None:
    place = CudaPlace(torch.device("cpu"), [1000, 2000])
    device.refuses = lambda nbytes: nbytes >= 2000
    assert not place.is_out_of_memory
    with pytest.raises(DeviceOutOfMemory, match="3000 bytes are needed"):
        place.allocate()
    assert place.is_out_of_memory


def test_threads_wait_for_allocating_thread(device: Device) -> None:
    place = CudaPlace(torch.device("cpu"), [1000, 2000])
    slabs: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: slabs.append(place.slab(1)))
    with place.allocating():
        thread.start()
        # Time for a thread that does not wait.
        thread.join(0.05)
        place.allocate()
    thread.join(5)
    assert device.threads == {threading.get_ident()}
    assert slabs[0] is place.slab(1)


def test_first_slabs_are_usable_during_allocation(device: Device) -> None:
    place = CudaPlace(torch.device("cpu"), [1000, 2000])
    has_first = threading.Event()
    waits: list[bool] = []

    def refuses(nbytes: int) -> bool:
        if nbytes == 2000:
            waits.append(has_first.wait(10))
        return False

    device.refuses = refuses
    thread = threading.Thread(target=lambda: (place.slab(0), has_first.set()))
    with place.allocating():
        thread.start()
        place.allocate()
    thread.join(5)
    assert waits and all(waits)


def test_failed_allocation_wakes_waiting_threads(device: Device) -> None:
    place = CudaPlace(torch.device("cpu"), [1000, 2000])
    device.refuses = lambda nbytes: True
    errors: list[Exception] = []

    def copy() -> None:
        try:
            place.slab(1)
        except DeviceOutOfMemory as error:
            errors.append(error)

    thread = threading.Thread(target=copy)
    with pytest.raises(DeviceOutOfMemory), place.allocating():
        thread.start()
        place.allocate()
    thread.join(5)
    assert len(errors) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_waiting_for_slabs_allocates_nothing(device: Device, fails: bool) -> None:
    place = CudaPlace(torch.device("cpu"), [1000, 2000])
    assert not place.wait_for_slabs()
    device.refuses = lambda nbytes: fails and nbytes != 1000
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(place.wait_for_slabs()))
    with pytest.raises(DeviceOutOfMemory) if fails else nullcontext(), place.allocating():
        thread.start()
        thread.join(0.05)
        assert not found
        place.allocate()
    thread.join(5)
    assert found == [not fails]
    assert device.threads <= {threading.get_ident()}
    assert device.allocated == ([1000] if fails else [1000, 2000])


def test_block_has_exactly_the_bytes_of_its_slabs() -> None:
    slabs = [34 * MIB] * 5 + [5, 600 * MIB + 1, 34 * MIB, MIB, 40 * MIB]
    assert blocks_of(slabs, 128 * MIB) == [[0, 1, 2], [3, 4], [6], [7, 9]]
    assert blocks_of([2 * MIB - 511] * 2, 4 * MIB) == [[0, 1]]
    assert blocks_of([2 * MIB + 1] * 2, 4 * MIB + 2) == [[0], [1]]


def test_no_slabs_need_no_block() -> None:
    assert blocks_of([], 128 * MIB) == []
    assert blocks_of([3], 128 * MIB) == []


def test_block_omits_slabs_of_the_caller(device: Device) -> None:
    given = torch.zeros(3 * MIB, dtype=torch.uint8)
    place = CudaPlace(torch.device("cpu"), [3 * MIB, 2 * MIB, 4 * MIB], [given, None, None])
    device.allocated.clear()
    assert place.slab(0) is given and not device.allocated
    assert [place.slab(index).numel() for index in (2, 1)] == [4 * MIB, 2 * MIB]
    assert [nbytes for nbytes in device.allocated if nbytes] == [6 * MIB, 2 * MIB, 4 * MIB]


def test_block_of_read_ahead_has_half_of_the_window(device: Device) -> None:
    place = CudaPlace(torch.device("cpu"), [2 * MIB] * 4, window_bytes=8 * MIB)
    for index in range(4):
        place.slab(index)
    assert [nbytes for nbytes in device.allocated if nbytes > 2 * MIB] == [4 * MIB, 4 * MIB]


def test_slab_is_allocated_even_if_its_block_does_not_fit(device: Device) -> None:
    place = CudaPlace(torch.device("cpu"), [2 * MIB, 3 * MIB])
    device.refuses = lambda nbytes: nbytes > 2 * MIB
    assert place.slab(0).numel() == 2 * MIB
    with pytest.raises(DeviceOutOfMemory, match=f"{3 * MIB} bytes are needed"):
        place.slab(1)
    device.refuses = lambda nbytes: nbytes > 3 * MIB
    assert place.slab(1).numel() == 3 * MIB


def test_slab_that_was_taken_is_not_allocated_with_its_block(device: Device) -> None:
    place = CudaPlace(torch.device("cpu"), [2 * MIB, 3 * MIB])
    place.take(0)
    device.allocated.clear()
    assert place.slab(1).numel() == 3 * MIB
    assert not device.allocated


def test_slab_of_a_block_is_usable_only_after_the_wait_for_the_caller(device: Device) -> None:
    place = CudaPlace(torch.device("cpu"), [2 * MIB, 3 * MIB])
    found: list[bool] = []
    has_waited = threading.Event()
    thread = threading.Thread(target=lambda: (place.slab(1), found.append(has_waited.is_set())))

    def wait() -> None:
        thread.start()
        thread.join(0.05)
        has_waited.set()

    device.wait_stream = wait
    place.slab(0)
    thread.join(5)
    assert found == [True]
