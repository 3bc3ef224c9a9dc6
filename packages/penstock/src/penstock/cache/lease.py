"""Renews the lease on a cache's memory in a thread, and reports the cache's state."""

from __future__ import annotations

import os
import threading
from enum import StrEnum

from penstock.errors import PenstockError, PermissionDenied, SourceStalled
from penstock.peer.client import PeerClient
from penstock.timing import Timing
from penstock.waits import start_thread


class LeaseState(StrEnum):
    """The state of a lease."""

    KEPT = "kept"
    DRAINING = "draining"
    DAMAGED = "damaged"
    """The cache found corrupt bytes in this memory. `LOST` is less severe, because its bytes are still correct."""
    LOST = "lost"
    GIVEN_BACK = "given back"


class LeaseRenewal:
    """A lease that a thread renews, without keeping tensor memory alive. `why` explains `LOST` or `DAMAGED`."""

    def __init__(self, peer: PeerClient, serial: int, generation: int, timing: Timing) -> None:
        self._peer = peer
        self._serial = serial
        self._generation = generation
        self._timing = timing
        self._pid = os.getpid()
        self.state = LeaseState.KEPT
        self.why = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="penstock-lease", daemon=True)

    def start(self) -> None:
        """Start the thread that renews the lease."""
        start_thread(self._thread)

    def _become(self, state: LeaseState, why: str = "") -> None:
        is_usable = self.state in (LeaseState.KEPT, LeaseState.DRAINING)
        if is_usable or (state is LeaseState.GIVEN_BACK and self.state is not state):
            self.why = why or self.why
            self.state = state

    def _renew(self) -> None:
        with self._peer as peer:
            while not self._closing.wait(self._timing.lease_renew_s):
                try:
                    reply = peer.log(self._serial, 0.0)
                except SourceStalled:
                    # A suspended cache process still holds its memory, so the tensors stay valid.
                    continue
                except PenstockError as error:
                    head = "the lease expired: " if isinstance(error, PermissionDenied) else ""
                    self._become(LeaseState.LOST, head + error.message)
                    return
                if reply.state == "damaged":
                    # Keep renewing the lease, because the cache frees device memory when the lease ends.
                    why = "bytes of this memory changed after the weight cache had verified them"
                    self._become(LeaseState.DAMAGED, why)
                    continue
                if reply.generation != self._generation:
                    self._become(LeaseState.LOST, "the weight cache changed or released this memory")
                    return
                self._become(LeaseState.DRAINING if reply.state == "draining" else LeaseState.KEPT)
        self._become(LeaseState.GIVEN_BACK)

    def close(self) -> None:
        """Release the lease. Idempotent. Does nothing in a forked child, because the lease belongs to its parent."""
        if self._pid == os.getpid():
            self._closing.set()
            # A finalizer may run in the renewing thread, which cannot join itself.
            if threading.current_thread() is not self._thread:
                self._thread.join(self._timing.lease_end_s)


class LeaseOwner:
    """A token that the mapped memory references. The lease is released when the last reference is dropped."""
