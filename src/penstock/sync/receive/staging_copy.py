"""Staging copy: second memory of the same size that a version is read into, and the flip that makes it live.

In: live memory, and the strips of it that a part fills. Out: registered memory of the same sizes; the copy, and its
seconds.
Not here: reading (`transfer`), pausing the engine (`subscriber`).
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.closing import Closing
from penstock.digest.strip import Strips
from penstock.memory.arena import Arena
from penstock.plan.sync import Part
from penstock.sync.copy_plan import Copy
from penstock.sync.regions import Regions
from penstock.transport.choose import Links
from penstock.transport.protocol import Memory


def received(part: Part) -> Strips:
    """Return the strips of the receiver's memory that a part fills."""
    return Strips(at=part.dst, run_bytes=part.run_bytes, num_rows=part.num_rows, pitch=part.dst_pitch)


def allocate_like(memories: Sequence[Memory]) -> list[Memory]:
    """Allocate arenas of the same sizes on the same devices.

    Raises:
        DeviceOutOfMemory, DestinationError: there is not enough memory.
    """
    copies = []
    for memory in memories:
        arena = Arena.allocate(max(memory.nbytes, 1), memory.device)
        copies.append(Memory(address=arena.address, nbytes=memory.nbytes, device=arena.device, owner=arena))
    return copies


class StagingCopy(Closing):
    """Second memory for a target's regions, as large as they are, on the same devices; a context manager.

    Attributes:
        regions: the memory that a `Transfer` reads into, in place of the live regions.

    Args:
        live: the live regions' memory, in the layout's order; never moved.
        links: the transports that register the staging memory.

    Raises:
        DeviceOutOfMemory, DestinationError: there is not enough memory.
        ConfigError: no transport reaches it.
    """

    def __init__(self, live: Sequence[Memory], links: Links) -> None:
        self._live = tuple(live)
        self.regions = Regions(allocate_like(live), links)
        self._copies: dict[str, Copy] = {}

    def flip(self, part: Part, *, stall_s: float = 30.0) -> float:
        """Copy the strips that the part filled to the live memory, and return the seconds.

        Raises:
            DestinationError: the device failed; the live memory is a mix of two versions.

        Order: while nothing reads the live memory; after the work queued on the current stream. Cost: one pass on the
            device; the copies are prepared at the first flip of a plan.
        """
        # Only the strips of the part: the rest of a region belongs to the engine, and may have changed since. One
        # prepared copy is enough, because a new plan replaces the old one for good.
        if part.key not in self._copies:
            self._copies = {part.key: Copy(self._live, self.regions.memories, received(part))}
        return self._copies[part.key].run(stall_s=stall_s)

    def close(self) -> None:
        """End the registrations and release the memory. Idempotent."""
        self.regions.close()
        self._copies.clear()
