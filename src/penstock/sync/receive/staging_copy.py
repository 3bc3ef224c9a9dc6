"""Staged receiving: memory beside the live one that a version is read into, and the flip that makes it live.

In: live memory, and what of it is received. Out: registered memory of the same shape; the copy, and its seconds.
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
    """The strips of the receiver's memory that a part fills."""
    return Strips(at=part.dst, run_bytes=part.run_bytes, num_rows=part.num_rows, pitch=part.dst_pitch)


def beside(memories: Sequence[Memory]) -> list[Memory]:
    """Arenas of the same sizes on the same devices.

    Raises:
        DeviceOutOfMemory, DestinationError: there is no room.
    """
    found = []
    for memory in memories:
        made = Arena.allocate(max(memory.nbytes, 1), memory.device)
        found.append(Memory(address=made.address, nbytes=memory.nbytes, device=made.device, owner=made))
    return found


class StagingCopy(Closing):
    """Memory beside the live one; a context manager. As much again, on the same devices.

    Attributes:
        regions: what a `Transfer` reads into, in place of the live regions.

    Args:
        live: the live regions' memory, in the layout's order; never moved.
        links: what registers the shadow.

    Raises:
        DeviceOutOfMemory, DestinationError: there is no room for it.
        ConfigError: no transport reaches it.
    """

    def __init__(self, live: Sequence[Memory], links: Links) -> None:
        self._live = tuple(live)
        self.regions = Regions(beside(live), links)
        self._copies: dict[str, Copy] = {}

    def flip(self, part: Part, *, stall_s: float = 30.0) -> float:
        """Copy what the part filled to the live memory; returns the seconds.

        Raises:
            DestinationError: the device failed; the live memory is neither version.

        Order: while nothing reads the live memory; after what the current stream has queued. Cost: one pass on the
            device; what to copy is worked out at the first flip of a plan.
        """
        if part.key not in self._copies:
            self._copies = {part.key: Copy(self._live, self.regions.memories, received(part))}
        return self._copies[part.key].run(stall_s=stall_s)

    def close(self) -> None:
        """End the registrations and let go of the memory. Idempotent."""
        self.regions.close()
        self._copies.clear()
