"""Renew the lease of a keeper's memory in a thread until it is released, and report the keeper's state meanwhile.

In: a `PeerClient` with a lease. Out: the state of the lease.
Not here: mapping it (`attached`), the keeper's side (`peer.server`).
"""

from __future__ import annotations

import os
import threading
from typing import Literal

from penstock.errors import PenstockError, PermissionDenied, SourceStalled
from penstock.peer.client import PeerClient
from penstock.waits import start_thread

RENEW_S = 2.0
"""Interval of renewals: a fraction of the 15 s that a lease lasts. An engine learns of draining this late at most."""
END_S = 0.5
"""Time that `close` waits for the release; a lease that was not released expires."""

LeaseState = Literal["kept", "draining", "damaged", "lost", "given back"]


class LeaseRenewal:
    """A lease that a thread renews. The thread keeps no tensor memory alive.

    Attributes:
        standing: `kept`; `draining`: the keeper waits for its engines to detach; `damaged`: the keeper found that bytes
            changed in this memory; `lost`: the keeper ended or revoked the lease; `given back`: released by us.
        why: the reason for `lost` and `damaged`.
    """

    def __init__(self, peer: PeerClient, serial: int, generation: int) -> None:
        self._peer = peer
        self._serial = serial
        self._generation = generation
        self._pid = os.getpid()
        self.standing: LeaseState = "kept"
        self.why = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="penstock-lease", daemon=True)
        start_thread(self._thread)

    def _renew(self) -> None:
        """Renew the lease until it is released or lost: the body of the thread."""
        with self._peer as peer:
            while not self._closing.wait(RENEW_S):
                try:
                    # The request renews the lease, and its answer tells the state of the memory.
                    reply = peer.log(self._serial, 0.0)
                except SourceStalled:
                    # A stopped keeper process still holds its memory, so the tensors stay valid.
                    continue
                except PermissionDenied as error:
                    self._lost(f"the lease ran out: {error.message}")
                    return
                except PenstockError as error:
                    self._lost(error.message)
                    return
                if reply.state == "damaged":
                    # Renew it all the same: on a device the keeper frees this memory as soon as the lease ends.
                    self._lost("bytes of this memory changed after the keeper had verified them", "damaged")
                    continue
                if reply.generation != self._generation:
                    self._lost("the keeper changed or gave up this memory")
                    return
                self.standing = "draining" if reply.state == "draining" else "kept"
        self.standing = "given back"

    def _lost(self, why: str, standing: LeaseState = "lost") -> None:
        # `damaged` is worse and stays: lost memory still has the right bytes.
        if self.standing != "damaged":
            self.standing = standing
            self.why = why

    def close(self) -> None:
        """Release the lease. Idempotent; does nothing in a forked child, because the lease is its parent's."""
        if self._pid == os.getpid():
            self._closing.set()
            # A finalizer may run in any thread, in this one too, which cannot wait for itself.
            if threading.current_thread() is not self._thread:
                self._thread.join(END_S)


class LeaseOwner:
    """A token referenced by the mapped memory: the lease is released when the last reference to it is gone."""
