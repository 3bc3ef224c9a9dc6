"""The loop of a load's reads on a device, around emulated workers and an emulated link.

    python -m benchmarks.bench_ring
    python -m benchmarks.bench_ring --stall-every-ms 0 --workers 14

The reads, the staging and the loop are Penstock's. Emulated are the kernel's workers, of which each needs `--read-us`
for one read, the link, which needs `--link-us` for one copy, and a host that does not schedule the loop's thread for
`--stall-us`, every `--stall-every-ms` on average. No byte moves, so two cores are enough. The defaults are those of a
load of 13.8 GB in reads of 4 MiB on an H200 with 16 cores, from its trace: benchmarks/results/h200x1_202611/load.md.
`--copy-us` is the time of the calls that start a copy. The output is the time for each read, and how busy the workers
were. The link is the limit.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import sys
import threading
import time
from typing import Any

from penstock.engine.fetch_ring import READS_AHEAD, Queued, RingFetch
from penstock.engine.run import Executor, RunState
from penstock.engine.trace import Trace
from penstock.loader.session import SPARE_BUFFERS
from penstock.memory.staging import StagingBuffer, StagingPool

NBYTES = 4096
JITTER = 0.3
"""The part by which a read is longer or shorter than the others."""
SLEEP_LATE_S = 120e-6
"""How much later than asked a sleep may end. The rest of a wait is spent spinning."""


def spin_until(end: float) -> None:
    """Wait until a time of `perf_counter`, which is more exact than a sleep."""
    while (left := end - time.perf_counter()) > 0:
        if left > SLEEP_LATE_S:
            time.sleep(left - SLEEP_LATE_S)


class Host:
    """A host that now and then does not schedule the thread that calls `pause`."""

    def __init__(self, every_ms: float, stall_us: float, seed: int) -> None:
        self.random = random.Random(seed)
        self._every_s, self._stall_s = every_ms / 1e3, stall_us / 1e6
        self._next = self._later()

    def _later(self) -> float:
        return time.perf_counter() + self.random.expovariate(1 / self._every_s) if self._every_s else float("inf")

    def pause(self) -> None:
        """Return, or return later."""
        if time.perf_counter() > self._next:
            time.sleep(self.random.uniform(0.5, 1.5) * self._stall_s)
            self._next = self._later()


class EmulatedRing:
    """A ring whose workers only wait, as `storage.io_uring.Uring`."""

    limits_workers = True

    def __init__(self, num_workers: int, read_us: float, host: Host) -> None:
        self.busy_s = 0.0
        self._free_at = [0.0] * num_workers
        self._read_s, self._host = read_us / 1e6, host
        self._queued: list[int] = []
        self._running: list[tuple[float, int]] = []

    @property
    def num_unsubmitted(self) -> int:
        """Return the number of queued reads."""
        return len(self._queued)

    def queue_read(self, fd: int, offset: int, address: int, nbytes: int, token: int) -> None:
        """Queue a read, which `wait` submits."""
        self._queued.append(token)

    def wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """Submit the queued reads, and return those that are complete."""
        now = time.perf_counter()
        for token in self._queued:
            begin = max(now, heapq.heappop(self._free_at))
            read_s = self._read_s * self._host.random.uniform(1 - JITTER, 1 + JITTER)
            self.busy_s += read_s
            heapq.heappush(self._free_at, begin + read_s)
            heapq.heappush(self._running, (begin + read_s, token))
        self._queued = []
        self._host.pause()
        if timeout_s:
            first = self._running[0][0] if self._running else float("inf")
            spin_until(min(time.perf_counter() + timeout_s, first))
        now, complete = time.perf_counter(), []
        while self._running and self._running[0][0] <= now:
            complete.append((heapq.heappop(self._running)[1], NBYTES))
        return complete

    def close(self) -> None:
        """Do nothing."""


class EmulatedCopy:
    """A copy that is complete at a time."""

    def __init__(self, end: float) -> None:
        self._end = end

    def done(self) -> bool:
        """Return whether the time has come."""
        return time.perf_counter() >= self._end


class EmulatedLoad:
    """The reads of one load."""

    def __init__(self, asked: argparse.Namespace, seed: int) -> None:
        self.host = Host(asked.stall_every_ms, asked.stall_us, seed)
        self.ring = EmulatedRing(asked.workers, asked.read_us, self.host)
        self.pool = StagingPool.map((asked.workers + READS_AHEAD + asked.spare) * NBYTES, NBYTES)
        self.num_left, self.is_over = asked.reads, threading.Event()
        self._asked, self._link_free_at = asked, 0.0

    def copy(self) -> EmulatedCopy:
        """Start a copy, after those before it."""
        self.host.pause()
        spin_until(time.perf_counter() + self._asked.copy_us / 1e6)
        self._link_free_at = max(time.perf_counter(), self._link_free_at) + self._asked.link_us / 1e6
        return EmulatedCopy(self._link_free_at)

    def finished(self) -> None:
        """Count a read."""
        self.num_left -= 1
        if not self.num_left:
            self.is_over.set()

    def run(self) -> tuple[float, float]:
        """Return the microseconds for each read, and how busy the workers were."""
        ticket = RunState(self.num_left * NBYTES, lambda: True)
        options: dict[str, Any] = {"trace": Trace(enabled=False), "stall_s": 20.0}
        threads = Executor("fetch", 1, ticket, **options)
        # The emulated ring has the methods that the loop calls.
        fetch = RingFetch(self.ring, self._asked.workers, threads, ticket, **options)  # type: ignore[arg-type]
        began = time.perf_counter()
        fetch.start([EmulatedRead(self) for _ in range(self.num_left)])
        self.is_over.wait(60)
        took_s = time.perf_counter() - began
        fetch.close()
        self.pool.close()
        return took_s / self._asked.reads * 1e6, self.ring.busy_s / self._asked.workers / took_s


class EmulatedRead:
    """One read, as `loader.run` makes them."""

    priority, nbytes, name = 0, NBYTES, "read"

    def __init__(self, load: EmulatedLoad) -> None:
        self._load = load
        self._buffer: StagingBuffer | None = None

    def queue(self) -> Any:
        """Take a buffer, if one is free."""
        self._buffer = self._load.pool.try_acquire()
        if self._buffer is None:
            return "no buffer"
        return Queued(0, 0, self._buffer.address, NBYTES, "", memory=self._buffer)

    def arrived(self) -> EmulatedCopy:
        """Start the copy."""
        return self._load.copy()

    def start(self) -> None:
        """Never run by a thread."""
        raise AssertionError("the ring refused a read")

    def finish(self) -> None:
        """Release the buffer."""
        self.abandon()
        self._load.finished()

    def abandon(self) -> None:
        """Release the buffer."""
        if self._buffer is not None:
            self._load.pool.release(self._buffer)
            self._buffer = None


def main() -> int:
    """Emulate some loads, and print the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--reads", type=int, default=2000, help="of one load")
    parser.add_argument("--workers", type=int, default=11)
    parser.add_argument("--spare", type=int, default=SPARE_BUFFERS, help="buffers for copies")
    parser.add_argument("--read-us", type=float, default=830.0)
    parser.add_argument("--link-us", type=float, default=76.0)
    parser.add_argument("--copy-us", type=float, default=20.0)
    parser.add_argument("--stall-us", type=float, default=1000.0)
    parser.add_argument("--stall-every-ms", type=float, default=4.0)
    asked = parser.parse_args()
    found = [EmulatedLoad(asked, seed).run() for seed in range(asked.runs)]
    each, busy = [us for us, _ in found], statistics.median(busy for _, busy in found)
    spread = f"{statistics.median(each):.1f} us ({min(each):.1f}-{max(each):.1f})"
    print(f"{spread} for each read, n {asked.runs}; workers busy {busy:.0%}; link {asked.link_us} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
