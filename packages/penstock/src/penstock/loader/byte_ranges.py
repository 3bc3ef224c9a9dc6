"""Sorted byte ranges and blocks of a file, which are searched by bisection."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class RangeSet:
    """A set of bytes in a file, stored as ranges in file order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        """Add `[start, stop)`."""
        # Merge the new range with all ranges that overlap or touch it.
        first = bisect.bisect_left(self._stops, start)
        last = bisect.bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def end_of(self, at: int) -> int:
        """Return the end of the range that contains `at`, or `at` if no range does."""
        index = bisect.bisect_right(self._starts, at) - 1
        return max(at, self._stops[index]) if index >= 0 else at

    def next_start(self, at: int) -> int | None:
        """Return the start of the first range after `at`."""
        index = bisect.bisect_right(self._starts, at)
        return self._starts[index] if index < len(self._starts) else None


class ByteBlock(Protocol):
    """A byte range of a file with additional data."""

    start: int
    stop: int


B = TypeVar("B", bound=ByteBlock)


class ByteBlocks(Generic[B]):
    """The blocks of a file, sorted by offset and without overlaps. `nbytes` is the total size of all blocks."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: list[B] = []
        self.nbytes = 0

    def __iter__(self) -> Iterator[B]:
        return iter(self._blocks)

    def __contains__(self, block: B) -> bool:
        index = bisect.bisect_left(self._starts, block.start)
        return index < len(self._blocks) and self._blocks[index] is block

    def add(self, block: B) -> None:
        """Add a block that overlaps no existing block."""
        index = bisect.bisect_left(self._starts, block.start)
        self._starts.insert(index, block.start)
        self._blocks.insert(index, block)
        self.nbytes += block.stop - block.start

    def remove(self, block: B) -> None:
        """Remove an existing block."""
        index = bisect.bisect_left(self._starts, block.start)
        del self._starts[index], self._blocks[index]
        self.nbytes -= block.stop - block.start

    def within(self, start: int, stop: int) -> list[B]:
        """Return the blocks that overlap `[start, stop)`."""
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        last = bisect.bisect_left(self._starts, stop)
        return [block for block in self._blocks[first:last] if block.stop > start]

    def block_at(self, at: int) -> B | None:
        """Return the block that contains `at`."""
        index = bisect.bisect_right(self._starts, at) - 1
        return self._blocks[index] if index >= 0 and self._blocks[index].stop > at else None

    def next_start(self, at: int) -> int | None:
        """Return the start of the first block after `at`."""
        index = bisect.bisect_right(self._starts, at)
        return self._starts[index] if index < len(self._starts) else None
