"""Properties of loopback that the conformance suite cannot test: checks of the fence, lifetimes and forks."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref

import numpy as np
import pytest

from penstock.errors import Cancelled, ConfigError, PlanError, StaleDescriptor
from penstock.segments import Segments
from penstock.testing.transport_suite import segments
from penstock.transport import loopback
from penstock.transport.loopback import LoopbackTransport
from penstock.transport.protocol import Memory


@pytest.fixture
def transport():
    transport = LoopbackTransport()
    yield transport
    transport.close()


@pytest.mark.parametrize("at", [1, 3, 4])
def test_fence_during_read_raises_stale_descriptor(transport, monkeypatch, at: int) -> None:
    """The fence comes after the first, third or last of four pieces."""
    monkeypatch.setattr(loopback, "PIECE_BYTES", 100)
    source = transport.register(Memory.of_buffer(bytearray(b"s" * 400)))
    into = transport.register(Memory.of_buffer(bytearray(400)))
    pending = transport.post_read(into, source.descriptor, segments([(0, 0, 400)]))
    real, moved = ctypes.memmove, []

    def memmove(*args) -> None:
        real(*args)
        moved.append(args)
        if len(moved) == at:
            source.fence()

    monkeypatch.setattr(ctypes, "memmove", memmove)
    for _ in range(2):
        with pytest.raises(StaleDescriptor) as caught:
            transport.wait(pending, stall_s=1)
        assert caught.value.mutated
    assert len(moved) == at
    assert pending.moved_bytes == 100 * at


def test_released_memory_survives_until_read_completes(transport) -> None:
    buffer = np.full(100, 7, np.uint8)
    alive = weakref.ref(buffer)
    source = transport.register(Memory(address=int(buffer.ctypes.data), nbytes=100, owner=buffer))
    into = transport.register(Memory.of_buffer(bytearray(100)))
    pending = transport.post_read(into, source.descriptor, segments([(0, 0, 100)]))
    source.close()
    del source, buffer
    gc.collect()
    assert alive() is not None
    with pytest.raises(StaleDescriptor):
        transport.wait(pending, stall_s=1)
    del pending
    gc.collect()
    assert alive() is None


def test_completed_read_releases_memory(transport) -> None:
    buffer = np.full(100, 7, np.uint8)
    alive = weakref.ref(buffer)
    source = transport.register(Memory(address=int(buffer.ctypes.data), nbytes=100, owner=buffer))
    into = transport.register(Memory.of_buffer(bytearray(100)))
    pending = transport.post_read(into, source.descriptor, segments([(0, 0, 100)]))
    transport.wait(pending, stall_s=1)
    source.close()
    del source, buffer
    gc.collect()
    assert alive() is None
    transport.wait(pending, stall_s=1)


def test_read_only_or_device_memory_is_refused(transport) -> None:
    with pytest.raises(ConfigError):
        transport.register(Memory(address=0, nbytes=0, device="cuda:0"))
    with pytest.raises(ConfigError):
        Memory.of_buffer(memoryview(b"constant"))


def test_handle_from_other_transport_is_refused(transport) -> None:
    other = LoopbackTransport()
    handle = other.register(Memory.of_buffer(bytearray(10)))
    with pytest.raises(ConfigError):
        transport.post_read(handle, handle.descriptor, segments([]))
    other.close()


def test_closed_handle_refuses_fence(transport) -> None:
    handle = transport.register(Memory.of_buffer(bytearray(10)))
    handle.close()
    with pytest.raises(Cancelled):
        handle.fence()


def test_segment_columns_of_unequal_length_are_refused() -> None:
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    with pytest.raises(PlanError):
        Segments(src=one, dst=one, nbytes=two).check(src_nbytes=9, dst_nbytes=9)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_cannot_read_parent_descriptors(transport) -> None:
    source = transport.register(Memory.of_buffer(bytearray(b"parent")))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            mine = LoopbackTransport()
            into = mine.register(Memory.of_buffer(bytearray(6)))
            mine.post_read(into, source.descriptor, segments([(0, 0, 6)]))
        except StaleDescriptor:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    into = transport.register(Memory.of_buffer(bytearray(6)))
    transport.wait(transport.post_read(into, source.descriptor, segments([(0, 0, 6)])), stall_s=1)
    assert ctypes.string_at(into.memory.address, 6) == b"parent"
