"""Grants: the right of one member to read one key from one other; short-lived, signed by the hub, checked by a source.

In: reader, key and source. Out: a signed grant; its check, which a grant passes once.
Not here: the callers that may have one (`app`), the lease that it opens (`peer.server`).

A grant names an **epoch** of its source: a number that the source reports to the hub with every beat and replaces every
15 s. So the source alone decides, by its own monotonic clock, whether a grant is recent, and no two clocks need to
agree: a hub's clock may step, and replicas of a hub may differ by any amount.

    source --beat: epoch 7--> hub --grant: epoch 7--> reader --grant--> source: is 7 present, or has it ended recently?

Signed digests of a holder, and the proof that a holder stated other digests than the revision's.

In: a holder's log answers, and a manifest's digests. Out: a signature; a `Proof`, and a check of it for the hub.
Not here: the effects of a proof (`directory`, `snapshot`), digests of bytes (`digest`).

A proof is about a holder's *statement*, not about its bytes: those are read from its memory without a message of the
holder, so it signs nothing of them. A `w1-` revision is the root of every leaf's digest, and the hub knows the revision
from the identity of the holding. So a reader that has the manifest sends its digests, the hub recomputes the root, and
then knows the right digests as well as the reader does:

    holder --digests, signed--> reader --proof: signed statement, all digests of the manifest--> hub: is the root the
    revision of this key? is the signature the holder's, of this member, this key and a recent epoch? do they differ?
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
import numpy as np
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from penstock.digest.leaf import canonical, root
from penstock.errors import GrantRefused
from penstock.hub.messages import HoldingState, LogReply, Proof
from penstock.plan.schedule import ChunkTable
from penstock.types import I64, U64, TensorTable

EPOCH_S = 15.0
"""A source replaces its epoch this often."""
GRACE_S = 30.0
"""Grants of an epoch are accepted for this long after it was replaced, so a grant is good for 30 to 45 s, less the age
of the source's last report (a beat, 2 s). Long enough to queue at a busy source; short enough that a leaked grant soon
expires."""
_SIGNATURE_BYTES = 64
_MAX_GRANT_BYTES = 2048
_MAX_NONCES = 1 << 20
"""Grants accepted in the epochs that count: 23,000 a second for 45 s. Above it a source accepts no more grants."""
_CONTEXT = b"penstock grant 2\n"

audit = logging.getLogger("penstock.audit")
"""One line a grant issued, refused or used: `event=... key=... reader=... source=...`."""


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The signed content of a grant."""

    key: str
    reader: str
    source: str
    epoch: int
    """Of the source, as it last reported it to the hub."""
    nonce: bytes


_GRANT = msgspec.msgpack.Decoder(Grant)


class GrantSigner:
    """The signer of grants, in the hub.

    Args:
        seed: 32 bytes, the same for all replicas of a hub.
    """

    def __init__(self, seed: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)

    @property
    def public_key(self) -> bytes:
        """Return the raw public key, for `Welcome.grant_key`."""
        return self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def sign(self, *, key: str, reader: str, source: str, epoch: int) -> bytes:
        """Return a grant for one lease: signature, then the grant in msgpack.

        Args:
            key: of the holding, or of the sync's name.
            reader: the member that may show it.
            source: the member that accepts it.
            epoch: the source's epoch, as it last reported it.
        """
        grant = Grant(key, reader, source, epoch, os.urandom(12))
        body = msgspec.msgpack.encode(grant)
        if audit.isEnabledFor(logging.INFO):
            audit.info("event=issued key=%s reader=%s source=%s", key, reader, source)
        return self._private.sign(_CONTEXT + body) + body


@dataclass(slots=True)
class _Epoch:
    """A span of the source's time, and the accepted grants that name it."""

    number: int
    began: float
    nonces: set[bytes] = field(default_factory=set)


class GrantChecker:
    """The checker of grants, in the source: it accepts a grant once, and only if its hub signed it for this source,
    reader and key.

    Args:
        grant_key: `Welcome.grant_key`.
        source: the member that checks.
        clock: monotonic seconds.

    Ownership: remembers a nonce only while grants of its epoch are accepted. Epochs are numbered from a random number
    on, so a grant for an earlier checker never matches an epoch of this one.
    """

    def __init__(self, grant_key: bytes, source: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._public = Ed25519PublicKey.from_public_bytes(grant_key)
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._epochs = [_Epoch(1 + secrets.randbits(48), clock())]
        """Epochs whose grants are accepted, oldest first; the last is the present one."""

    def trust(self, grant_key: bytes) -> None:
        """Accept the grants of a new hub, and of no other; epochs continue: the new hub may know one already."""
        self._public = Ed25519PublicKey.from_public_bytes(grant_key)

    def epoch(self) -> int:
        """Return the present epoch, for the hub."""
        with self._lock:
            self._turn(self._clock())
            return self._epochs[-1].number

    def _turn(self, now: float) -> None:
        """Start a new epoch if it is time, and drop those whose grants have expired. The caller holds the lock."""
        last = self._epochs[-1]
        if now - last.began >= EPOCH_S:
            self._epochs.append(_Epoch(last.number + 1, now))
        # An epoch ends `EPOCH_S` after it began, even if no call replaced it then: the process may have been stopped.
        self._epochs = [epoch for epoch in self._epochs if now - epoch.began < EPOCH_S + GRACE_S]

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
        """Return why a grant is refused; empty: it is good, and is remembered as used."""
        if not _SIGNATURE_BYTES < len(grant) <= _MAX_GRANT_BYTES:
            return "malformed"
        signature, body = grant[:_SIGNATURE_BYTES], grant[_SIGNATURE_BYTES:]
        # The signature first: nothing else in the bytes is decoded or compared before it is known to be the hub's.
        try:
            self._public.verify(signature, _CONTEXT + body)
            signed = _GRANT.decode(body)
        except InvalidSignature:
            return "not signed by this hub"
        except msgspec.MsgspecError:
            return "malformed"
        for name, actual, wanted in (
            ("key", signed.key, key),
            ("reader", signed.reader, reader),
            ("source", signed.source, self._source),
        ):
            if actual != wanted:
                return f"for another {name}"
        return self._used(signed)

    def _used(self, signed: Grant) -> str:
        with self._lock:
            self._turn(self._clock())
            epoch = next((recent for recent in self._epochs if recent.number == signed.epoch), None)
            if epoch is None:
                return "expired"
            if signed.nonce in epoch.nonces:
                return "shown before"
            if sum(len(recent.nonces) for recent in self._epochs) >= _MAX_NONCES:
                return "too many grants at once"
            epoch.nonces.add(signed.nonce)
        return ""


MAX_PROOF_BYTES = 5 << 20
"""Largest proof: in base64 it fits into the 8 MiB that a hub reads. It covers the digests of 160 GB; for larger models
a complaint is sent without a proof and moves its reader alone."""
MAX_EPOCHS_BEHIND = 3
"""A statement counts while its epoch is one of the last: for 45 to 60 s. An older one could disable a holder that has
been correct since."""
PROVABLE = "w1-"
"""Revisions that are the root of their digests."""
_STATEMENT_CONTEXT = b"penstock digests 1\n"


class _Statement(msgspec.Struct, frozen=True, array_like=True):
    """The part of a log answer that a holder signs."""

    member: str
    key: str
    epoch: int
    leaf_bytes: int
    spans: bytes
    """See `Proof`."""
    digests: bytes
    """BLAKE3 of the leaves' digests, in the order of the spans."""

    def signed(self) -> bytes:
        """Return the bytes under the signature."""
        return _STATEMENT_CONTEXT + msgspec.msgpack.encode(self)


def _spans(table: ChunkTable, chunks: I64) -> bytes:
    return np.stack([table.first_leaf[chunks], table.first_leaf[chunks + 1]], 1).astype("<i8").tobytes()


class DigestSigner:
    """The signer of a holder's log answers, with a key that its process draws.

    Args:
        member: the holder.
        epoch: returns the member's present epoch, see `grants`.
    """

    def __init__(self, member: str, epoch: Callable[[], int]) -> None:
        self._private = Ed25519PrivateKey.generate()
        self._member, self._epoch = member, epoch

    @property
    def public_key(self) -> bytes:
        """Return the raw public key, for `Hello.digest_key`."""
        return self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def sign(self, reply: LogReply, key: str, table: ChunkTable) -> LogReply:
        """Return a log answer with a signature of its digests. Costs 0.15 ms; 1.7 ms for all digests of 60 GB."""
        epoch = self._epoch()
        chunks = np.frombuffer(reply.chunks, "<u4").astype(np.int64)
        digests = blake3(reply.leaves).digest()
        statement = _Statement(self._member, key, epoch, table.leaf_bytes, _spans(table, chunks), digests)
        return msgspec.structs.replace(reply, epoch=epoch, signature=self._private.sign(statement.signed()))


def make_proof(reply: LogReply, table: TensorTable, chunks: ChunkTable, leaves: U64) -> Proof | None:
    """Return the proof that a log answer differs from the manifest; None: it is not signed, or too much to show.

    Args:
        reply: of the holder.
        table: of the weights, sorted by name. chunks: of the weights.
        leaves: every leaf's digest, by the manifest.
    """
    if not reply.signature:
        return None
    named = np.frombuffer(reply.chunks, "<u4").astype(np.int64)
    stated = np.frombuffer(reply.leaves, "<u8")
    at = np.flatnonzero(stated != leaves[chunks.leaves_of(named)])
    body = canonical(table, range(len(table)))
    proof = Proof(
        epoch=reply.epoch,
        signature=reply.signature,
        leaf_bytes=chunks.leaf_bytes,
        spans=_spans(chunks, named),
        at=at.astype("<i8").tobytes(),
        said=stated[at].tobytes(),
        table=body,
        leaves=leaves.astype("<u8").tobytes(),
    )
    nbytes = sum(map(len, (proof.spans, proof.at, proof.said, proof.table, proof.leaves)))
    return proof if nbytes <= MAX_PROOF_BYTES else None


def proof_fault(proof: Proof, member: str, digest_key: bytes, holding: HoldingState) -> str:
    """Return why a proof is not valid; empty: the member stated other digests than those of the revision.

    Args:
        proof: of a complaint; every number in it is checked.
        member: the holder. digest_key: its key, from its hello.
        holding: its state of the key, as it reported it.
    """
    if not holding.identity.revision.startswith(PROVABLE):
        return "the revision is not a root of digests"
    if not 0 <= holding.grant_epoch + 1 - proof.epoch <= MAX_EPOCHS_BEHIND + 1:
        return "its statement is not recent"
    if any(len(column) % 8 for column in (proof.at, proof.said, proof.leaves)) or len(proof.spans) % 16:
        return "malformed"
    leaves = np.frombuffer(proof.leaves, "<u8")
    if proof.leaf_bytes < 1 or root(proof.table, proof.leaf_bytes, leaves) != holding.identity.revision:
        return "its digests are not those of the revision"
    stated, at = _said(proof, leaves)
    if stated is None:
        return "malformed"
    # The proof brings only the differing digests: the statement is rebuilt from those and the manifest's, and its
    # signature then fits only if the holder signed exactly these bytes.
    digests = blake3(stated.astype("<u8").tobytes()).digest()
    signed = _Statement(member, holding.key, proof.epoch, proof.leaf_bytes, proof.spans, digests).signed()
    try:
        Ed25519PublicKey.from_public_bytes(digest_key).verify(proof.signature, signed)
    except (InvalidSignature, ValueError):
        return "not signed by the member"
    return "" if len(at) else "the member stated the right digests"


def _said(proof: Proof, leaves: U64) -> tuple[U64 | None, I64]:
    """Return the digests that the holder stated, and the positions that differ; None: the proof contradicts itself."""
    none = np.empty(0, np.int64)
    begin, stop = np.frombuffer(proof.spans, "<i8").reshape(-1, 2).astype(np.int64).T
    counts = stop - begin
    # A caller chose these numbers: each is checked before they are summed, as Python integers, which cannot overflow.
    if not len(begin) or begin.min() < 0 or counts.min() < 0 or stop.max() > len(leaves) or len(begin) > len(leaves):
        return None, none
    if sum(counts.tolist()) > len(leaves):
        return None, none
    before = np.cumsum(counts) - counts
    right = leaves[np.repeat(begin - before, counts) + np.arange(int(counts.sum()))]
    at, values = np.frombuffer(proof.at, "<i8"), np.frombuffer(proof.said, "<u8")
    if len(at) != len(values) or (len(at) and (at.min() < 0 or at.max() >= len(right))):
        return None, none
    stated = right.copy()
    stated[at] = values
    # Compared after the merge, not `values`: a position may occur twice, the second time with the right digest.
    return stated, np.flatnonzero(stated != right)
