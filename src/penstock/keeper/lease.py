"""Keeping a lease of a keeper's memory: renewed by a thread until it is given back, and what the keeper says meanwhile.

In: a `PeerClient` with a lease. Out: whether the memory is still kept.
Not here: mapping it (`attach`), the keeper's side (`peer.server`).
"""

from __future__ import annotations

import os
import threading
from typing import Literal

from penstock.errors import PenstockError, PermissionDenied, SourceStalled
from penstock.peer.client import PeerClient

RENEW_S = 2.0
"""Between renewals: a fraction of the 15 s that a lease lasts, and how late an engine learns of draining."""
END_S = 0.5
"""How long `close` waits for the keeper to be told; a lease that is not given back runs out."""

LeaseState = Literal["kept", "draining", "damaged", "lost", "given back"]


class LeaseRenewal:
    """One lease, renewed. Its thread holds no memory alive.

    Attributes:
        standing: `kept`; `draining`, the keeper wants to be rid of its engines; `damaged`, the keeper found that bytes
            changed in this memory; `lost`, it is gone or took the lease back; `given back`, by us.
        why: of `lost` and `damaged`.
    """

    def __init__(self, peer: PeerClient, serial: int, generation: int) -> None:
        self._peer, self._serial, self._generation = peer, serial, generation
        self._pid = os.getpid()
        self.standing: LeaseState = "kept"
        self.why = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="penstock-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        with self._peer as peer:
            while not self._closing.wait(RENEW_S):
                try:
                    reply = peer.log(self._serial, 0.0)
                except SourceStalled:
                    continue  # a keeper that is stopped still holds its memory
                except PermissionDenied as error:
                    self._lost(f"the lease ran out: {error.message}")
                    return
                except PenstockError as error:
                    self._lost(error.message)
                    return
                if reply.state == "damaged":
                    # The lease is renewed still: on a device the keeper frees this memory once we give it back.
                    self._lost("bytes of this memory changed after the keeper had verified them", "damaged")
                    continue
                if reply.generation != self._generation:
                    self._lost("the keeper changed or gave up this memory")
                    return
                self.standing = "draining" if reply.state == "draining" else "kept"
        self.standing = "given back"

    def _lost(self, why: str, standing: LeaseState = "lost") -> None:
        if self.standing != "damaged":  # which is worse: whoever goes on with lost memory has the right bytes
            self.standing, self.why = standing, why

    def close(self) -> None:
        """Give the lease back. Idempotent; does nothing in a forked child, whose parent has the lease."""
        if self._pid == os.getpid():
            self._closing.set()
            if threading.current_thread() is not self._thread:
                self._thread.join(END_S)


class LeaseOwner:
    """What memory holds on to: the lease is given back when the last memory, and with it this, is gone."""
