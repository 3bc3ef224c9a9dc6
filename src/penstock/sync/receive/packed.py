"""A run's reads from buffers of sources, into which these packed short runs: their leases, and what was packed.

In: leases as sources give them, reads as they end. Out: leases that do not lapse while they are read; counts.
Not here: which runs are packed (`plan.packing`), the reads (`sources`), the buffers (`sync.packer`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from penstock.digest.strip import Strips
from penstock.errors import PenstockError
from penstock.lifecycle import Closing
from penstock.sync.messages import PackReply
from penstock.sync.packer import LEASE_S

KEEP_S = LEASE_S / 4
"""Interval in which a source is told that its buffers are still read."""
# Leases are of the sources that are read now, of which there are at most as many as reads.
_AT_ONCE = 16


@runtime_checkable
class Packing(Protocol):
    """A link to a source that packs short runs. See `LocalVersion` for both."""

    def pack(self, strips: Strips, *, wait_s: float, release: Sequence[str]) -> PackReply:
        """Return a buffer with these strips of the map's version, packed; first end the leases of `release`."""
        ...

    def hold_packed(self, keep: Sequence[str], release: Sequence[str]) -> None:
        """Extend leases, and end others."""
        ...


@dataclass(slots=True)
class ShortRuns:
    """The short runs of one source in one run of a transfer, that the rule says are to be packed."""

    packed_bytes: int = 0
    num_runs: int = 0
    """Runs that the packed bytes were."""
    num_reads: int = 0
    """Buffers that they were read from."""
    why: str = ""
    """The reason why others were read where they lie."""


class Leases(Closing):
    """The leases that a run of a transfer has now; a thread tells their sources that they are still read.

    Args:
        is_over: whether the run is over: nothing is waited for any more.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.is_over = is_over
        self._lock = threading.Lock()
        self._open: dict[Packing, set[str]] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, link: Packing, lease: str) -> None:
        """Keep a lease from now on."""
        with self._lock:
            self._open.setdefault(link, set()).add(lease)
            if self._thread is None:
                # A daemon: it may be in a request when the interpreter ends.
                self._thread = threading.Thread(target=self._keep, name="penstock-leases", daemon=True)
                self._thread.start()

    def remove(self, link: Packing, lease: str) -> None:
        """Keep a lease no longer."""
        with self._lock:
            self._open[link].discard(lease)

    def _keep(self) -> None:
        # A thread for each source: one that hangs must not make the leases of the others lapse.
        pool: ThreadPoolExecutor | None = None
        while not self._ended.wait(KEEP_S):
            with self._lock:
                held = [(link, tuple(leases)) for link, leases in self._open.items() if leases]
            for link, leases in held:
                pool = pool or ThreadPoolExecutor(_AT_ONCE, "penstock-leases")
                pool.submit(_tell, link, leases)
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        # Under the lock, so that a thread that is noted here was started.
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()


def _tell(link: Packing, leases: tuple[str, ...]) -> None:
    # A source that cannot be reached is found by the read from it.
    with contextlib.suppress(PenstockError):
        link.hold_packed(leases, ())
