"""Streams and events of our devices, made once and used again.

In: the driver. Out: the next stream's turn, a spare event.
Not here: what is queued on them (`transport.cuda_ipc`, `transport.device_target`).
"""

from __future__ import annotations

from penstock.cuda.driver import CudaDriver

never_freed: list[tuple[object, ...]] = []
"""What a device that hangs may still use."""


class StreamPool:
    """Streams and spare events of one device of ours. One thread at a time uses it."""

    def __init__(self, driver: CudaDriver, device: int, num_streams: int) -> None:
        self._driver, self._device, self._spare = driver, device, list[int]()
        with driver.entered(device):
            self.streams = [driver.make_stream() for _ in range(num_streams)]
        self._turn = 0

    def take_stream(self) -> int:
        """Return the next stream, in turns."""
        self._turn += 1
        return self.streams[self._turn % len(self.streams)]

    def take_event(self) -> int:
        """Return an unused CUDA event."""
        return self._spare.pop() if self._spare else self._driver.make_event()

    def give_event(self, event: int) -> None:
        """Take back an event that has passed."""
        # Only passed ones: an event that is recorded again loses its first position, and
        # a waiter would wait for later work.
        self._spare.append(event)

    def close(self) -> None:
        """Give all back; nothing may be queued any more."""
        with self._driver.entered(self._device):
            self._driver.free(self.streams, self._spare)


class StreamPools:
    """The lane of each device, made when it is first asked for. One thread at a time uses them."""

    def __init__(self, driver: CudaDriver, *, num_streams: int) -> None:
        self._driver, self._num_streams, self._made = driver, num_streams, dict[int, StreamPool]()

    def of(self, device: int) -> StreamPool:
        """Return the pool of a device."""
        # Made lazily: creating a stream makes a context on the device, which takes hundreds of MB of its memory.
        if device not in self._made:
            self._made[device] = StreamPool(self._driver, device, self._num_streams)
        return self._made[device]

    def close(self) -> None:
        """Give all back; nothing may be queued any more. Idempotent."""
        pools, self._made = self._made, {}
        for pool in pools.values():
            pool.close()
