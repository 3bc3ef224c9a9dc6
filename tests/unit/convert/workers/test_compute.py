"""Buffers: bounded together with what is reserved, used again, packed without overlap."""

from __future__ import annotations

import threading
import weakref

import pytest

from penstock.errors import Cancelled
from penstock.types import MIB
from penstock_convert.workers.compute import ALIGN_BYTES, Buffers, cut, packed


def test_returned_buffer_is_reused_for_similar_size():
    buffers = Buffers(64 * MIB)
    first = buffers.get(33 * MIB)
    assert len(first) >= 33 * MIB
    buffers.put(first)
    assert buffers.get(33 * MIB + 5).data_ptr() == first.data_ptr()
    assert buffers.get(33 * MIB).data_ptr() != first.data_ptr()


def test_smallest_fitting_buffer_is_reused():
    buffers = Buffers(64 * MIB)
    large, fits, tight = buffers.get(16 * MIB), buffers.get(11 * MIB), buffers.get(10 * MIB)
    for one in (large, fits, tight):
        buffers.put(one)
    assert buffers.get(9 * MIB).data_ptr() == tight.data_ptr()
    assert buffers.get(9 * MIB).data_ptr() == fits.data_ptr()
    assert buffers.get(9 * MIB).data_ptr() not in {one.data_ptr() for one in (large, fits, tight)}


def test_reservation_frees_oldest_idle_buffer():
    buffers = Buffers(8 * MIB)
    one, two = buffers.get(2 * MIB), buffers.get(3 * MIB)
    oldest, newest = weakref.ref(one), weakref.ref(two)
    buffers.put(one)
    buffers.put(two)
    del one, two
    assert oldest() is not None and newest() is not None
    buffers.reserve(5 * MIB, lambda: False)
    held = buffers.get(4 * MIB)
    assert len(held) == 4 * MIB and oldest() is None  # the longest unused went
    assert newest() is not None


def test_sole_reservation_never_waits_for_memory():
    buffers = Buffers(10)
    buffers.reserve(50, lambda: False)
    waiter = threading.Thread(target=buffers.reserve, args=(5, lambda: False))
    waiter.start()
    waiter.join(0.3)
    assert waiter.is_alive()
    buffers.unreserve(50)
    waiter.join(10)
    assert not waiter.is_alive() and buffers.peak_bytes == 50
    with pytest.raises(Cancelled):
        buffers.reserve(6, lambda: True)


def test_tensors_in_buffer_are_aligned_and_disjoint():
    sizes = [3, 0, ALIGN_BYTES, 1000]
    buffer = Buffers(MIB).get(packed(sizes)[-1])
    parts = cut(buffer, sizes)
    assert [len(part) for part in parts] == sizes
    for i, part in enumerate(parts):
        part.fill_(i)
        assert not len(part) or (part.data_ptr() - buffer.data_ptr()) % ALIGN_BYTES == 0
    assert all(int(part.sum()) == i * len(part) for i, part in enumerate(parts))
