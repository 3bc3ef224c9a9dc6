"""The right of one member to read one key from one other: short-lived, signed by the hub, checked by the source.

In: who reads what from whom. Out: a signed grant; its check, which a grant passes once.
Not here: who may have one (`app`), the lease that it opens (`peer.server`).

A grant names an **epoch** of its source: a number that the source tells the hub with every beat and replaces every
15 s. So the source alone judges, by its own monotonic clock, whether a grant is recent, and no two clocks need to
agree: a hub's clock may step, and replicas of a hub may differ by any amount.

    source --beat: epoch 7--> hub --grant: epoch 7--> reader --grant--> source: is 7 present, or has it ended recently?
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from penstock.errors import GrantRefused

EPOCH_S = 15.0
"""A source replaces its epoch this often."""
GRACE_S = 30.0
"""Grants of an epoch are taken for this long after it was replaced, so a grant is good for 30 to 45 s, less the age of
what the hub heard last (a beat, 2 s). Long enough to queue at a busy source; short enough that a grant that leaks is
soon nothing."""
_SIGNATURE_BYTES = 64
_MAX_GRANT_BYTES = 2048
_MAX_NONCES = 1 << 20
"""Grants taken in the epochs that count: 23,000 a second for 45 s. Above it a source takes no more grants."""
_CONTEXT = b"penstock grant 2\n"

audit = logging.getLogger("penstock.audit")
"""One line a grant issued, refused or used: `event=... key=... reader=... source=...`."""


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is signed."""

    key: str
    reader: str
    source: str
    epoch: int
    """Of the source, when the hub last heard of it."""
    nonce: bytes


_GRANT = msgspec.msgpack.Decoder(Grant)


class GrantSigner:
    """The hub's half.

    Args:
        seed: 32 bytes, the same for all replicas of a hub.
    """

    def __init__(self, seed: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)

    @property
    def public_key(self) -> bytes:
        """Raw, for `Welcome.grant_key`."""
        return self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def sign(self, *, key: str, reader: str, source: str, epoch: int) -> bytes:
        """Return a grant for one lease: signature, then the grant in msgpack.

        Args:
            key: of the holding, or of the sync's name.
            reader: who may show it.
            source: to whom.
            epoch: what the source last told.
        """
        grant = Grant(key, reader, source, epoch, os.urandom(12))
        body = msgspec.msgpack.encode(grant)
        if audit.isEnabledFor(logging.INFO):
            audit.info("event=issued key=%s reader=%s source=%s", key, reader, source)
        return self._private.sign(_CONTEXT + body) + body


@dataclass(slots=True)
class _Epoch:
    """A span of the source's time, and the grants taken that name it."""

    number: int
    began: float
    nonces: set[bytes] = field(default_factory=set)


class GrantChecker:
    """The source's half: refuses what was not signed by its hub, for it, this reader and this key, or was shown before.

    Args:
        grant_key: `Welcome.grant_key`.
        source: the member that checks.
        clock: monotonic seconds.

    Ownership: remembers a nonce while grants of its epoch are taken, no longer. Epochs are numbered from a random
    number on, so a grant for an earlier checker is of no epoch of this one.
    """

    def __init__(self, grant_key: bytes, source: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._public = Ed25519PublicKey.from_public_bytes(grant_key)
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._epochs = [_Epoch(1 + secrets.randbits(48), clock())]
        """Those whose grants are taken, oldest first; the last is the present one."""

    def trust(self, grant_key: bytes) -> None:
        """Take the grants of a new hub, and of no other; epochs go on: the new hub may have been told one already."""
        self._public = Ed25519PublicKey.from_public_bytes(grant_key)

    def epoch(self) -> int:
        """Return the present epoch, for the hub."""
        with self._lock:
            self._turn(self._clock())
            return self._epochs[-1].number

    def _turn(self, now: float) -> None:
        """Begin a new epoch where it is time, and forget those whose grants are no longer taken. The lock is held."""
        last = self._epochs[-1]
        if now - last.began >= EPOCH_S:
            self._epochs.append(_Epoch(last.number + 1, now))
        # An epoch ends `EPOCH_S` after it began, also where nobody looked then: the process may have been stopped.
        self._epochs = [one for one in self._epochs if now - one.began < EPOCH_S + GRACE_S]

    def check(self, grant: bytes, *, key: str, reader: str) -> None:
        """Validate and consume a grant.

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
        with self._lock:
            self._turn(self._clock())
            epoch = next((one for one in self._epochs if one.number == said.epoch), None)
            if epoch is None:
                return "expired"
            if said.nonce in epoch.nonces:
                return "shown before"
            if sum(len(one.nonces) for one in self._epochs) >= _MAX_NONCES:
                return "too many grants at once"
            epoch.nonces.add(said.nonce)
        return ""
