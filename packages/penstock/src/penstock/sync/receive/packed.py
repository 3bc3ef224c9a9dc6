"""The reader's side of packing: the leases of the buffers that it reads, and counts of what was packed.

In: leases as sources grant them, reads as they end. Out: leases that do not lapse while a buffer is read; counts.
Not here: which runs are packed (`plan.packing`), the reads (`sources`), the buffers (`sync.packer`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from penstock.digest.strip import Strips
from penstock.engine.threads import Joinable, KeptThreads, start_call
from penstock.errors import PenstockError
from penstock.lifecycle import Closeable
from penstock.sync.messages import PackReply
from penstock.sync.packer import LEASE_S

KEEP_S = LEASE_S / 4
"""Interval in which a source is told that its buffers are still read."""


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


class BufferLeases(Closeable):
    """The leases of buffers that a transfer reads now; a thread tells the sources that the buffers are still read.

    Args:
        is_over: whether the transfer is over: nothing is waited for any more.
        threads: that tell the sources; None: new ones.
    """

    def __init__(self, is_over: Callable[[], bool], threads: KeptThreads | None) -> None:
        self.is_over = is_over
        self._threads = threads
        self._lock = threading.Lock()
        self._open: dict[Packing, set[str]] = {}
        self._ended = threading.Event()
        self._call: Joinable | None = None

    def add(self, link: Packing, lease: str) -> None:
        """Keep a lease from now on.

        Raises:
            DestinationError: the system allows no further thread.
        """
        with self._lock:
            self._open.setdefault(link, set()).add(lease)
            if self._call is None:
                self._call = start_call(self._keep, "penstock-leases", self._threads)

    def remove(self, link: Packing, lease: str) -> None:
        """Keep a lease no longer."""
        with self._lock:
            self._open[link].discard(lease)

    def _keep(self) -> None:
        # A thread and one request at a time for each source: one that hangs must not hold up the others.
        busy: set[Packing] = set()
        while not self._ended.wait(KEEP_S):
            with self._lock:
                held = [(link, tuple(leases)) for link, leases in self._open.items() if leases]
            for link, leases in held:
                if link in busy:
                    continue
                busy.add(link)
                tell = partial(_tell, link, leases, busy)
                if start_call(tell, "penstock-lease", self._threads, is_needed=False) is None:
                    # The lease lapses only after three more turns like this one.
                    busy.discard(link)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        with self._lock:
            call = self._call
        if call is not None:
            call.join()


def _tell(link: Packing, leases: tuple[str, ...], busy: set[Packing]) -> None:
    """Tell a source that these leases are kept; then take it out of those that are being told."""
    try:
        # A source that cannot be reached is found by the read from it.
        with contextlib.suppress(PenstockError):
            link.hold_packed(leases, ())
    finally:
        busy.discard(link)
