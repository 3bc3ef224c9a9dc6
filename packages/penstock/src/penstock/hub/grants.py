"""Grants, which are short-lived rights of one member to read one key from one other member.

The hub signs grants and the source checks them.

A grant names an **epoch** of its source: a number that the source reports to the hub with every heartbeat and replaces
every 15 s. The source alone decides, using its own monotonic clock, whether a grant is recent. A hub's clock may
jump, and the clocks of a hub's replicas may differ.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from penstock.errors import MALFORMED, GrantRefused
from penstock.hub.auth import RateLimit
from penstock.hub.messages import PROTOCOL, accepts_callers, accepts_shared_grants
from penstock.logs import log_named

EPOCH_S = 15.0
"""Seconds after which a source replaces its epoch."""
GRACE_S = 30.0
"""Seconds for which grants of a replaced epoch are still accepted. A grant is therefore valid for 30 to 45 s, less the
age of the source's last report (at most a heartbeat, 2 s). This is long enough to wait for a busy source."""
REFUSALS_PER_S, REFUSALS_AT_ONCE = 10.0, 1_000
"""Rate and burst of audit lines about refused grants. Anyone who can connect to the port can cause such lines, and
members often log to stderr."""
_SIGNATURE_BYTES = 64
# A grant is a few hundred bytes long. Longer grants are refused before their signature is checked.
_MAX_GRANT_BYTES = 2048
# Maximum number of grants that a source remembers: 23,000 a second for 45 s. A full source refuses further grants.
_MAX_NONCES = 1 << 20
# Prefixes of the signed bytes, for a single grant and for the digests of several grants, so that no other signature
# with the same key is valid for a grant.
_ALONE = b"penstock grant 2\n"
_TOGETHER = b"penstock grants 2.5\n"
_MAX_TOGETHER = 16
"""Maximum number of grants with one signature. With 512 bytes of digests, a grant is well below `_MAX_GRANT_BYTES`."""
_DIGEST_BYTES = 32

audit = log_named("penstock.audit")
"""One line for each grant that is issued, refused or used: `event=... key=... reader=... source=...`."""


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The signed content of a grant."""

    key: str
    reader: str
    source: str
    epoch: int
    """The source's epoch in its last report to the hub."""
    nonce: bytes
    caller: str = ""
    """The reader's caller, as a keyed digest that differs at each source. Empty if the hub's protocol is below 2.6."""


_GRANT = msgspec.msgpack.Decoder(Grant)


class GrantSigner:
    """The signer of grants in the hub. The seed has 32 bytes and is the same for all replicas of a hub."""

    def __init__(self, seed: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self._caller_key = blake3(seed, derive_key_context="penstock grants 2.6: callers").digest(32)

    @property
    def public_key(self) -> bytes:
        """Return the raw public key, for `Welcome.grant_key`."""
        return self._private.public_key().public_bytes_raw()

    def sign(
        self,
        *,
        key: str,
        reader: str,
        epochs: Mapping[str, int],
        protocols: Mapping[str, str] | None = None,
        caller: str = "",
    ) -> dict[str, bytes]:
        """Return a grant for each source in one response.

        A signature takes 50 us, and signatures took a third of a hub's time while a fleet started. To save time, up to
        `_MAX_TOGETHER` grants share one signature over their digests. The formats are `signature | number of digests |
        digests | grant` and, before protocol 2.5, `signature | grant`.

        Args:
            key: key of the holding or of the sync.
            epochs: for each source, the epoch that the source last reported.
            protocols: for each source, its protocol version, by default this release's.
            caller: the reader's `Caller.name`.
        """
        spoken = {source: (protocols or {}).get(source, PROTOCOL) for source in epochs}
        grants = {}
        for source, epoch in epochs.items():
            fields = (key, reader, source, epoch, os.urandom(12))
            # The name differs at each source, so that no source learns a token's name or its use at other sources.
            name = blake3(f"{source}\0{caller}".encode(), key=self._caller_key).hexdigest(length=8)
            named = (name,) if accepts_callers(spoken[source]) else ()
            # Encode a `Grant` without the field that the source does not know.
            grants[source] = msgspec.msgpack.encode((*fields, *named))
        # Check the log level first, because a hub without an audit log may issue thousands of grants a second.
        if audit.isEnabledFor(logging.INFO):
            for source in grants:
                audit.info("event=issued key=%s reader=%s source=%s", key, reader, source)
        together = [source for source in grants if accepts_shared_grants(spoken[source])]
        alone = grants.keys() - set(together)
        for first in range(0, len(together), _MAX_TOGETHER):
            group = together[first : first + _MAX_TOGETHER]
            digests = b"".join(blake3(grants[source]).digest(_DIGEST_BYTES) for source in group)
            head = self._private.sign(_TOGETHER + digests) + bytes([len(group)]) + digests
            grants |= {source: head + grants[source] for source in group}
        return grants | {source: self._private.sign(_ALONE + grants[source]) + grants[source] for source in alone}


class _Epoch(msgspec.Struct):
    """A period of the source's time, with the accepted grants that name this period."""

    number: int
    began: float
    nonces: set[bytes] = msgspec.field(default_factory=set)


class GrantChecker:
    """The checker of grants in the source. Each grant is accepted once, and only if the hub signed it for this read."""

    def __init__(self, grant_key: bytes, source: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._public = Ed25519PublicKey.from_public_bytes(grant_key)
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._lines = RateLimit(REFUSALS_PER_S, REFUSALS_AT_ONCE, clock=clock)
        # Epochs whose grants are accepted, oldest first. The number of the first epoch is random, so that no grant
        # matches that was issued for a previous checker, whose nonces are forgotten.
        self._epochs = [_Epoch(1 + secrets.randbits(48), clock())]

    def trust(self, grant_key: bytes) -> None:
        """Accept only grants signed by a new hub, whose raw public key is `grant_key`."""
        # Keep the epochs, because a heartbeat may already have reported the current epoch to the new hub.
        self._public = Ed25519PublicKey.from_public_bytes(grant_key)

    def epoch(self) -> int:
        """Return the current epoch, for the hub."""
        with self._lock:
            self._advance(self._clock())
            return self._epochs[-1].number

    def _advance(self, now: float) -> None:
        """Start a new epoch if it is time, and drop the epochs whose grants have expired. The caller holds the lock."""
        last = self._epochs[-1]
        if now - last.began >= EPOCH_S:
            self._epochs.append(_Epoch(last.number + 1, now))
        # An epoch ends `EPOCH_S` after it began, even if no call replaced it at that time because the process was
        # stopped.
        self._epochs = [epoch for epoch in self._epochs if now - epoch.began < EPOCH_S + GRACE_S]

    def check(self, grant: bytes, *, key: str, reader: str) -> str:
        """Check a grant and mark it as used. Return the caller in the grant. Raise GrantRefused with the reason."""
        signed = self._accepted(grant, key, reader)
        if isinstance(signed, str):
            # A caller with an invalid grant may use any reader's name, so all refusals share one rate limit.
            if self._lines.allow("refused"):
                audit.warning("event=refused key=%s reader=%s source=%s why=%r", key, reader, self._source, signed)
            raise GrantRefused(f"grant refused: {signed}", hint="request upstreams from the hub again")
        audit.info("event=used key=%s reader=%s source=%s", key, reader, self._source)
        return signed.caller

    def _accepted(self, grant: bytes, key: str, reader: str) -> Grant | str:
        """Return the content of a grant and mark the grant as used, or return why it is refused."""
        if not _SIGNATURE_BYTES < len(grant) <= _MAX_GRANT_BYTES:
            return "malformed"
        signature, body = grant[:_SIGNATURE_BYTES], grant[_SIGNATURE_BYTES:]
        content, digests = _ALONE + body, None
        # A grant with a separate signature starts with 0x95, the header of an array in msgpack, which is above the
        # maximum count.
        if (count := body[0]) <= _MAX_TOGETHER:
            stop = 1 + count * _DIGEST_BYTES
            if not count or len(body) < stop:
                return "malformed"
            digests = [body[at : at + _DIGEST_BYTES] for at in range(1, stop, _DIGEST_BYTES)]
            content, body = _TOGETHER + body[1:stop], body[stop:]
        # Check the signature first. Nothing else is decoded before the bytes are known to come from the hub.
        try:
            self._public.verify(signature, content)
            if digests is not None and blake3(body).digest(_DIGEST_BYTES) not in digests:
                return "not signed by this hub"
            signed = _GRANT.decode(body)
        except InvalidSignature:
            return "not signed by this hub"
        except MALFORMED:
            return "malformed"
        for name, actual, wanted in (
            ("key", signed.key, key),
            ("reader", signed.reader, reader),
            ("source", signed.source, self._source),
        ):
            if actual != wanted:
                return f"for another {name}"
        return self._used(signed) or signed

    def _used(self, signed: Grant) -> str:
        """Mark a grant as used and return an empty string, or return why it is refused."""
        with self._lock:
            self._advance(self._clock())
            epoch = next((recent for recent in self._epochs if recent.number == signed.epoch), None)
            if epoch is None:
                return "expired"
            if signed.nonce in epoch.nonces:
                return "already used"
            if sum(len(recent.nonces) for recent in self._epochs) >= _MAX_NONCES:
                return "too many grants at once"
            epoch.nonces.add(signed.nonce)
        return ""
