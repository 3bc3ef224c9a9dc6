"""The reader's side of packing: the leases of the buffers that it reads, and counters for packed runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from penstock.digest.strip import Strips
from penstock.engine.threads import Joinable, KeptThreads, start_call
from penstock.errors import PenstockError
from penstock.lifecycle import Closeable
from penstock.sync.messages import PackReply
from penstock.sync.packer import LEASE_S

KEEP_S = LEASE_S / 4


class Packing(Protocol):
    """A link to a source that packs short runs. See `LocalVersion`."""

    def pack(self, strips: Strips, *, wait_s: float, release: Sequence[str]) -> PackReply:
        """Release the leases in `release`, and return a buffer with these strips from the map's version."""

    def hold_packed(self, keep: Sequence[str], release: Sequence[str]) -> None:
        """Extend the leases in `keep`, and end the leases in `release`."""


@dataclass(slots=True)
class ShortRuns:
    """The short runs from one source that the rule in `plan.packing` selects for packing."""

    packed_bytes: int = 0
    num_runs: int = 0  # runs that were packed
    num_reads: int = 0  # of buffers
    why: str = ""


class BufferLeases(Closeable):
    """The leases of buffers that a transfer is reading. A thread renews the leases at the sources until `is_over`."""

    def __init__(self, is_over: Callable[[], bool], threads: KeptThreads | None) -> None:
        self.is_over = is_over
        self._threads = threads
        self._lock = threading.Lock()
        self._open: dict[Packing, set[str]] = {}
        self._closed = threading.Event()
        self._call: Joinable | None = None

    def add(self, link: Packing, lease: str) -> None:
        """Renew a lease from now on. Raise DestinationError if no thread can start."""
        with self._lock:
            self._open.setdefault(link, set()).add(lease)
            if self._call is None:
                self._call = start_call(self._renew_all, "penstock-leases", self._threads)

    def remove(self, link: Packing, lease: str) -> None:
        """Stop renewing a lease."""
        with self._lock:
            self._open[link].discard(lease)

    def _renew_all(self) -> None:
        # Use one thread and one request at a time per source, because a source that hangs must not delay others.
        busy: set[Packing] = set()
        while not self._closed.wait(KEEP_S):
            with self._lock:
                held = [(link, tuple(leases)) for link, leases in self._open.items() if leases]
            for link, leases in held:
                if link in busy:
                    continue
                busy.add(link)
                renew = partial(_renew, link, leases, busy)
                if start_call(renew, "penstock-lease", self._threads, is_needed=False) is None:
                    busy.discard(link)  # the lease expires only after three more failed attempts

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._closed.set()
        with self._lock:
            call = self._call
        if call is not None:
            call.join()


def _renew(link: Packing, leases: tuple[str, ...], busy: set[Packing]) -> None:
    try:
        # Ignore errors, because the read from an unreachable source reports the failure.
        with contextlib.suppress(PenstockError):
            link.hold_packed(leases, ())
    finally:
        busy.discard(link)
