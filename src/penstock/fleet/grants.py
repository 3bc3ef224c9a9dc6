"""The right of one member to read one key from one other: short-lived, signed by the hub, checked by the source.

In: who reads what from whom. Out: a signed grant; its check, which a grant passes once.
Not here: who may have one (`hub`), the lease that it opens (`door`).
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections.abc import Callable

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from penstock.errors import GrantRefused

GRANT_TTL_S = 30.0
"""A grant opens a lease within this; the lease lives by progress then. Long enough to queue at a busy source, short
enough that one that leaks is soon nothing."""
_SIGNATURE_BYTES = 64
_MAX_GRANT_BYTES = 2048
_MAX_NONCES = 1 << 20
_CONTEXT = b"penstock grant 1\n"

audit = logging.getLogger("penstock.audit")
"""One line a grant issued, refused or used: `event=... key=... reader=... source=...`."""


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is signed."""

    key: str
    reader: str
    source: str
    expires: float
    """By the hub's clock, seconds since 1970."""
    nonce: bytes


_GRANT = msgspec.msgpack.Decoder(Grant)


class GrantSigner:
    """The hub's half.

    Args:
        seed: 32 bytes, the same for all replicas of a hub.
        clock: seconds since 1970.
    """

    def __init__(self, seed: bytes, *, clock: Callable[[], float] = time.time) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self._clock = clock

    @property
    def public_key(self) -> bytes:
        """Raw, for `Welcome.grant_key`."""
        return self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def sign(self, *, key: str, reader: str, source: str, ttl_s: float = GRANT_TTL_S) -> bytes:
        """A grant for one lease: signature, then the grant in msgpack."""
        grant = Grant(key, reader, source, self._clock() + ttl_s, os.urandom(12))
        body = msgspec.msgpack.encode(grant)
        if audit.isEnabledFor(logging.INFO):
            audit.info("event=issued key=%s reader=%s source=%s ttl_s=%g", key, reader, source, ttl_s)
        return self._private.sign(_CONTEXT + body) + body


class GrantChecker:
    """The source's half: refuses what was not signed by its hub, for it, this reader and this key, or was shown before.

    Args:
        grant_key: `Welcome.grant_key`.
        source: the member that checks.
        now: `Welcome.now`, taken when this is made: grants expire by the hub's clock.
        clock: monotonic seconds, which only measure what went by since.

    Ownership: remembers a nonce until its grant expires, no longer.
    """

    def __init__(
        self, grant_key: bytes, source: str, *, now: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._public = Ed25519PublicKey.from_public_bytes(grant_key)
        self._source = source
        self._clock = clock
        self._offset = now - clock()
        self._lock = threading.Lock()
        self._seen: set[bytes] = set()
        self._expiries: list[tuple[float, bytes]] = []

    def check(self, grant: bytes, *, key: str, reader: str) -> None:
        """Pass once.

        Raises:
            GrantRefused: see the class; the message says which, and an audit line is written.
        """
        fault = self._fault(grant, key, reader)
        if fault:
            audit.warning("event=refused key=%s reader=%s source=%s why=%r", key, reader, self._source, fault)
            raise GrantRefused(f"grant refused: {fault}", hint="ask the hub for upstreams again")
        audit.info("event=used key=%s reader=%s source=%s", key, reader, self._source)

    def _fault(self, grant: bytes, key: str, reader: str) -> str:
        """Why it is refused; empty: it is good, and is remembered."""
        if not _SIGNATURE_BYTES < len(grant) <= _MAX_GRANT_BYTES:
            return "malformed"
        signature, body = grant[:_SIGNATURE_BYTES], grant[_SIGNATURE_BYTES:]
        try:
            self._public.verify(signature, _CONTEXT + body)
            said = _GRANT.decode(body)
        except InvalidSignature:
            return "not signed by this hub"
        except msgspec.MsgspecError:
            return "malformed"
        for name, given, wanted in (
            ("key", said.key, key),
            ("reader", said.reader, reader),
            ("source", said.source, self._source),
        ):
            if given != wanted:
                return f"for another {name}"
        return self._used(said)

    def _used(self, said: Grant) -> str:
        now = self._clock() + self._offset
        with self._lock:
            while self._expiries and self._expiries[0][0] <= now:
                self._seen.discard(heapq.heappop(self._expiries)[1])
            if said.expires <= now:
                return "expired"
            if said.nonce in self._seen:
                return "shown before"
            if len(self._seen) >= _MAX_NONCES:
                return "too many grants at once"
            self._seen.add(said.nonce)
            heapq.heappush(self._expiries, (said.expires, said.nonce))
        return ""
