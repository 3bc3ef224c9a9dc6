"""The conformance suite for `transport.protocol.Transport`. Subclass `TransportTests`, implement `make()`, run pytest.

To test device memory, also override `allocate`, `write` and `read`.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import numpy as np

from penstock.errors import Cancelled, ConfigError, PeerLost, PenstockError, PlanError, StaleDescriptor
from penstock.segments import Segments
from penstock.transport.protocol import MAX_DESCRIPTOR_BYTES, Descriptor, Handle, Memory, Transport, decode, encode

_NBYTES = 3_000_017
_STALL_S = 20.0
_GONE = (StaleDescriptor, PeerLost)


def segments(rows: Sequence[tuple[int, int, int]]) -> Segments:
    """Return the segments for `(src, dst, nbytes)` rows."""
    columns = np.array(rows, np.int64).reshape(-1, 3)
    return Segments(src=columns[:, 0], dst=columns[:, 1], nbytes=columns[:, 2])


def sample(nbytes: int, seed: int = 7) -> bytes:
    """Return `nbytes` bytes that differ at every scale of offsets. The same seed returns the same bytes."""
    return random.Random(seed).randbytes(nbytes)


class TransportTests:
    """Conformance tests of a `Transport`. Subclass it with `make`."""

    def make(self) -> Transport:
        """Return a new transport in this process. The suite closes it."""
        raise NotImplementedError("implement make() to return the transport under test")

    def allocate(self, nbytes: int) -> Memory:
        """Return memory of the kind under test, filled with 0xAA."""
        return Memory.of_buffer(bytearray(b"\xaa" * nbytes))

    def write(self, memory: Memory, data: bytes) -> None:
        """Write all of the memory."""
        ctypes.memmove(memory.address, data, memory.nbytes)

    def read(self, memory: Memory) -> bytes:
        """Read all of the memory."""
        return ctypes.string_at(memory.address, memory.nbytes)

    @contextmanager
    def pair(self, data: bytes, nbytes: int) -> Iterator[tuple[Transport, Handle, Transport, Handle]]:
        """Yield a holder with registered `data` and a receiver with `nbytes` bytes, both as transport and handle."""
        holder, receiver = self.make(), self.make()
        try:
            memory = self.allocate(len(data))
            self.write(memory, data)
            yield holder, holder.register(memory), receiver, receiver.register(self.allocate(nbytes))
        finally:
            receiver.close()
            holder.close()

    def fetch(
        self, receiver: Transport, into: Handle, source: Descriptor, rows: Sequence[tuple[int, int, int]]
    ) -> None:
        """Send the descriptor over the wire, post a read and wait for it."""
        receiver.wait(receiver.post_read(into, decode(encode(source)), segments(rows)), stall_s=_STALL_S)

    def test_transport_descriptor_round_trips_through_encoding(self) -> None:
        """Check that an encoded descriptor is short, decodes unchanged, and describes the registration."""
        with self.pair(sample(1000), 10) as (holder, handle, _, _):
            raw = encode(handle.descriptor)
            assert len(raw) <= MAX_DESCRIPTOR_BYTES
            assert decode(raw) == handle.descriptor
            assert (handle.descriptor.transport, handle.descriptor.nbytes) == (holder.name, 1000)
            assert handle.descriptor.device == handle.memory.device

    def test_reading_whole_memory_copies_all_bytes(self) -> None:
        """Check that one segment can cover all bytes, and that the progress at the end includes all bytes."""
        data = sample(_NBYTES)
        with self.pair(data, _NBYTES) as (_, handle, receiver, into):
            pending = receiver.post_read(into, handle.descriptor, segments([(0, 0, _NBYTES)]))
            receiver.wait(pending, stall_s=_STALL_S)
            receiver.wait(pending, stall_s=_STALL_S)
            assert pending.moved_bytes == pending.nbytes == _NBYTES
            assert self.read(into.memory) == data

    def test_scattered_segments_are_copied(self) -> None:
        """Check that unaligned runs of any length can be read in any order, and other bytes stay unchanged."""
        data, chance, rows, expected = sample(_NBYTES), random.Random(1), [], bytearray(b"\xaa" * _NBYTES)
        at = 0
        while at < _NBYTES - 200_000:
            nbytes = chance.choice([0, 1, 15, 4096, 70_001, 150_000])
            src = chance.randrange(_NBYTES - nbytes)
            rows.append((src, at, nbytes))
            expected[at : at + nbytes] = data[src : src + nbytes]
            at += nbytes + chance.choice([0, 1, 333])
        chance.shuffle(rows)
        with self.pair(data, _NBYTES) as (_, handle, receiver, into):
            self.fetch(receiver, into, handle.descriptor, rows)
            assert self.read(into.memory) == bytes(expected)

    def test_empty_read_succeeds(self) -> None:
        """Check that a read may have no segments, empty segments up to the end, or empty memory."""
        with self.pair(sample(100), 50) as (holder, handle, receiver, into):
            self.fetch(receiver, into, handle.descriptor, [])
            self.fetch(receiver, into, handle.descriptor, [(100, 50, 0), (0, 0, 0)])
            self.fetch(receiver, into, holder.register(self.allocate(0)).descriptor, [(0, 0, 0)])
            assert self.read(into.memory) == b"\xaa" * 50

    def test_read_outside_memory_is_refused(self) -> None:
        """Check that a segment outside either memory raises PlanError before any copy. The transport stays usable."""
        data, far = sample(1000), 2**63 - 1
        outside = [(0, 0, 501), (0, 500, 1), (999, 0, 2), (1000, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, -1), (far, 0, 1)]
        with self.pair(data, 500) as (_, handle, receiver, into):
            for row in [*outside, (1, 0, far), (0, far, far), (far, far, far)]:
                error = _raised(
                    PlanError, lambda row=row: self.fetch(receiver, into, handle.descriptor, [(0, 0, 9), row])
                )
                assert (error.blame, error.mutated) == ("plan", False)
            assert self.read(into.memory) == b"\xaa" * 500
            self.fetch(receiver, into, handle.descriptor, [(500, 0, 500)])
            assert self.read(into.memory) == data[500:]

    def test_descriptor_of_released_memory_is_stale(self) -> None:
        """Check that the descriptor of a closed handle is stale. A second close is allowed."""
        with self.pair(sample(1000), 1000) as (_, handle, receiver, into):
            handle.close()
            handle.close()
            self._gone(receiver, into, handle.descriptor)

    def test_reused_address_does_not_revive_descriptor(self) -> None:
        """Check that a new registration of the same memory differs from the released registration."""
        with self.pair(sample(1000), 1000) as (holder, handle, receiver, into):
            old = handle.descriptor
            handle.close()
            again = holder.register(handle.memory)
            assert again.descriptor.generation != old.generation
            self._gone(receiver, into, old)
            self.fetch(receiver, into, again.descriptor, [(0, 0, 1000)])

    def test_fence_makes_descriptor_stale(self) -> None:
        """Check that a fence makes older descriptors stale, and that the new descriptor reads later writes."""
        with self.pair(sample(1000), 1000) as (_, handle, receiver, into):
            old = handle.descriptor
            new = handle.fence()
            assert new == handle.descriptor != old
            self.write(handle.memory, sample(1000, seed=8))
            self._gone(receiver, into, old)
            self.fetch(receiver, into, new, [(0, 0, 1000)])
            assert self.read(into.memory) == sample(1000, seed=8)

    def test_fence_during_read_raises_stale_descriptor(self) -> None:
        """Check that a read during a fence and a write returns the old bytes or raises an error."""
        old = sample(_NBYTES)
        for _ in range(5):
            with self.pair(old, _NBYTES) as (_, handle, receiver, into):
                pending = receiver.post_read(into, handle.descriptor, segments([(0, 0, _NBYTES)]))
                handle.fence()
                self.write(handle.memory, sample(_NBYTES, seed=8))
                try:
                    receiver.wait(pending, stall_s=_STALL_S)
                except _GONE as error:
                    assert error.mutated or self.read(into.memory) == b"\xaa" * _NBYTES
                else:
                    assert self.read(into.memory) == old

    def test_forged_descriptor_is_refused(self) -> None:
        """Check that descriptors that the transport did not create are rejected."""
        with self.pair(sample(1000), 5000) as (holder, handle, receiver, into):
            given = handle.descriptor
            other = holder.register(self.allocate(10)).descriptor
            for forged in (
                msgspec.structs.replace(given, nbytes=5000),
                msgspec.structs.replace(given, endpoint="nobody"),
                msgspec.structs.replace(given, generation=given.generation + 1000),
                msgspec.structs.replace(given, generation=other.generation),
            ):
                self._gone(receiver, into, forged)
            foreign = msgspec.structs.replace(given, transport="carrier-pigeon")
            _raised(ConfigError, lambda: self.fetch(receiver, into, foreign, [(0, 0, 10)]))

    def test_concurrent_reads_copy_all_bytes(self) -> None:
        """Check that several threads can wait for many posted reads in any order."""
        data, width = sample(64 * 10_007), 10_007
        with self.pair(data, len(data)) as (_, handle, receiver, into):
            rows = [(i * width, i * width, width) for i in range(64)]
            posted = [receiver.post_read(into, handle.descriptor, segments([row])) for row in rows]
            random.Random(3).shuffle(posted)
            failed: list[PenstockError] = []

            def work(first: int) -> None:
                try:
                    for pending in posted[first::4] + posted[:8]:
                        receiver.wait(pending, stall_s=_STALL_S)
                except PenstockError as error:
                    failed.append(error)

            with ThreadPoolExecutor(4) as threads:
                list(threads.map(work, range(4)))
            assert not failed
            assert self.read(into.memory) == data

    def test_released_destination_is_refused(self) -> None:
        """Check that a read into a closed handle raises Cancelled unless it was complete."""
        with self.pair(sample(1000), 1000) as (_, handle, receiver, into):
            pending = receiver.post_read(into, handle.descriptor, segments([(0, 0, 1000)]))
            into.close()
            try:
                receiver.wait(pending, stall_s=_STALL_S)
            except Cancelled:
                pass
            else:
                assert self.read(into.memory) == sample(1000)
            _raised(Cancelled, lambda: self.fetch(receiver, into, handle.descriptor, [(0, 0, 1)]))

    def test_close_releases_registrations(self) -> None:
        """Check that a transport closed once or twice registers nothing, and that its descriptors are stale."""
        with self.pair(sample(1000), 1000) as (holder, handle, receiver, into):
            third = self.make()
            third.close()
            self.fetch(receiver, into, handle.descriptor, [(0, 0, 1000)])
            holder.close()
            holder.close()
            _raised(Cancelled, lambda: holder.register(self.allocate(10)))
            self._gone(receiver, into, handle.descriptor)

    def _gone(self, receiver: Transport, into: Handle, source: Descriptor) -> None:
        before = self.read(into.memory)
        error = _raised(_GONE, lambda: self.fetch(receiver, into, source, [(0, 0, 1000)]))
        assert (error.blame, error.mutated) == ("source", False)
        assert self.read(into.memory) == before


def _raised(kinds: type[PenstockError] | tuple[type[PenstockError], ...], call: object) -> PenstockError:
    assert callable(call)
    try:
        call()
    except kinds as error:
        return error
    raise AssertionError(f"{kinds} was not raised")
