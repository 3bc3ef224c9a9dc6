"""A fake device for staged copies. A thread for each stream runs queued copies of host memory with a delay.

It replaces a CUDA device. `tests/gpu/test_convert_gpu.py` tests a real one.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue


class Device:
    """Copies host memory in one thread for each stream until the device's events are freed."""

    def __init__(self, delay_s: float = 0.0005) -> None:
        self.delay_s = delay_s
        self.hangs = False
        self.freed: list[int] = []
        self._events: list[threading.Event] = []
        self._streams: dict[int, SimpleQueue[tuple[int, int, int] | threading.Event | None]] = {}
        for stream in (1, 2):
            self._streams[stream] = SimpleQueue()
            threading.Thread(target=self._work, args=(stream,), daemon=True).start()

    def _work(self, stream: int) -> None:
        while (work := self._streams[stream].get()) is not None:
            if isinstance(work, threading.Event):
                work.set()
                continue
            time.sleep(self.delay_s)
            while self.hangs:
                time.sleep(0.01)
            ctypes.memmove(*work)

    @contextmanager
    def entered(self, device: int) -> Iterator[None]:
        yield

    def copy_to_device(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._streams[stream].put((dst, src, nbytes))

    copy_to_host = copy_to_device

    def make_event(self) -> int:
        self._events.append(threading.Event())
        return len(self._events) - 1

    def record(self, event: int, stream: int) -> None:
        self._events[event] = threading.Event()
        self._streams[stream].put(self._events[event])

    def is_done(self, event: int) -> bool:
        return self._events[event].is_set()

    def free(self, streams: Sequence[int], events: Sequence[int]) -> None:
        self.freed += events
        # End the queues after their copies. `StagedCopies.close` makes this call last, and a copy that hangs may still
        # end.
        for queue in self._streams.values():
            queue.put(None)
