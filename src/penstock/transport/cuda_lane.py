"""Streams and events of our devices, made once and used again.

In: the driver. Out: the next stream's turn, a spare event.
Not here: what is queued on them (`cuda_ipc`, `into_device`).
"""

from __future__ import annotations

from penstock.transport.cuda_driver import CudaDriver

never_freed: list[tuple[object, ...]] = []
"""What a device that hangs may still use."""


MAX_PEERS = 8
"""So many have streams of their own; further ones share them."""


class Lane:
    """Streams and spare events of one device of ours. One thread at a time uses it.

    Each peer's copies go by streams of their own: where two devices read two others, neither waits in line behind
    copies from the one that the other is reading.
    """

    def __init__(self, driver: CudaDriver, device: int, num_streams: int) -> None:
        self._driver, self._device, self._num_streams, self._spare = driver, device, num_streams, list[int]()
        self._streams: list[list[int]] = []
        self._peers: dict[str, int] = {}
        self._turn = 0

    def take_stream(self, peer: str = "") -> int:
        """One of the peer's; they take turns. Order: with the device entered."""
        place = self._peers.setdefault(peer, len(self._peers) % MAX_PEERS)
        while place >= len(self._streams):
            self._streams.append([self._driver.make_stream() for _ in range(self._num_streams)])
        if len(self._peers) > 8 * MAX_PEERS:
            self._peers.clear()  # most of them are long gone
        self._turn += 1
        return self._streams[place][self._turn % self._num_streams]

    def take_event(self) -> int:
        """One that stands for nothing yet."""
        return self._spare.pop() if self._spare else self._driver.make_event()

    def give_event(self, event: int) -> None:
        """It has passed."""
        self._spare.append(event)

    def close(self) -> None:
        """Give all back; nothing may be queued any more."""
        with self._driver.entered(self._device):
            self._driver.free([one for streams in self._streams for one in streams], self._spare)


class Lanes:
    """The lane of each device, made when it is first asked for. One thread at a time uses them."""

    def __init__(self, driver: CudaDriver, *, num_streams: int) -> None:
        self._driver, self._num_streams, self._made = driver, num_streams, dict[int, Lane]()

    def of(self, device: int) -> Lane:
        """The device's."""
        if device not in self._made:
            self._made[device] = Lane(self._driver, device, self._num_streams)
        return self._made[device]

    def close(self) -> None:
        """Give all back; nothing may be queued any more. Idempotent."""
        made, self._made = self._made, {}
        for lane in made.values():
            lane.close()
