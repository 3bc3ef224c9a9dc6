"""The conformance suite for `memory.tier.Tier`. Subclass `TierTests`, implement `make()`, and run pytest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.heap_tier import HeapRoom, HeapTier

from penstock.memory.tier import PIECE_BYTES, HostRoom, Tier, move

SIZES = (0, 1, 4096, PIECE_BYTES - 1, PIECE_BYTES + 12345)


class TierTests:
    """Conformance tests of a `Tier`. Subclass it with `make`."""

    def make(self) -> Tier:
        """Return a tier with 64 MiB of space."""
        raise NotImplementedError("implement make() to return the tier under test")

    @contextmanager
    def tier(self) -> Iterator[Tier]:
        """Yield a tier, which is closed afterwards."""
        made = self.make()
        try:
            yield made
        finally:
            made.close()

    def test_read_returns_written_bytes(self) -> None:
        """Check that bytes of any size can be copied from host memory into a tier and back."""
        with self.tier() as tier:
            for nbytes in SIZES:
                source = filled(nbytes)
                for num_threads in (1, tier.num_threads):
                    room, back = tier.open_room(nbytes), HeapRoom(nbytes)
                    moved: list[int] = []
                    move(source, room, num_threads, moved.append)
                    move(room, back, num_threads, moved.append)
                    assert bytes(back.views()[0]) == bytes(source.views()[0])
                    assert sum(moved) == 2 * nbytes
                    room.close()

    def test_reservations_do_not_overlap(self) -> None:
        """Check that two reservations are separate, and that closing one twice leaves the other unchanged."""
        with self.tier() as tier:
            blocks = [filled(5000, seed) for seed in range(2)]
            rooms = [tier.open_room(5000) for _ in blocks]
            for block, room in zip(blocks, rooms, strict=True):
                move(block, room, 1, lambda nbytes: None)
            rooms[0].close()
            rooms[0].close()
            back = HeapRoom(5000)
            move(rooms[1], back, 1, lambda nbytes: None)
            assert bytes(back.views()[0]) == bytes(blocks[1].views()[0])
            rooms[1].close()

    def test_copy_between_reservations_preserves_bytes(self) -> None:
        """Check that bytes can be copied between two reservations."""
        with self.tier() as tier:
            nbytes = PIECE_BYTES + 5
            source, back = filled(nbytes), HeapRoom(nbytes)
            first, second = tier.open_room(nbytes), tier.open_room(nbytes)
            move(source, first, tier.num_threads, lambda nbytes: None)
            move(first, second, tier.num_threads, lambda nbytes: None)
            move(second, back, tier.num_threads, lambda nbytes: None)
            assert bytes(back.views()[0]) == bytes(source.views()[0])
            first.close()
            second.close()

    def test_views_show_written_bytes(self) -> None:
        """Check that a reservation in host memory exposes all of its bytes, and keeps bytes written to its views."""
        with self.tier() as tier:
            room = tier.open_room(PIECE_BYTES + 5)
            if isinstance(room, HostRoom):
                assert sum(len(view) for view in room.views()) == room.nbytes
                assert all(len(view) % PIECE_BYTES == 0 for view in room.views()[:-1])
                room.views()[-1][-1] = 77
                into = memoryview(bytearray(5))
                room.read(PIECE_BYTES, into)
                room.settle()
                assert into[-1] == 77
            room.close()


def filled(nbytes: int, seed: int = 0) -> HeapRoom:
    """Return a reservation in the reference tier with random bytes."""
    room = HeapTier().open_room(nbytes)
    room.views()[0][:] = random.Random(seed).randbytes(nbytes)
    return room
