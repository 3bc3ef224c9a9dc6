"""Signed digests of a holder, and the proof that a holder stated other digests than the revision's.

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

from collections.abc import Callable

import msgspec
import numpy as np
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from penstock.digest.leaf import canonical, root
from penstock.hub.messages import HoldingState, LogReply, Proof
from penstock.plan.schedule import ChunkTable
from penstock.types import I64, MIB, U64, TensorTable

MAX_PROOF_BYTES = 5 * MIB
"""Largest proof: in base64 it fits into the 8 MiB that a hub reads. It covers the digests of 160 GB; for larger models
a complaint is sent without a proof and moves its reader alone."""
MAX_EPOCHS_BEHIND = 3
"""A statement counts while its epoch is one of the last: for 45 to 60 s. An older one could disable a holder that has
been correct since."""
PROVABLE = "w1-"
"""Revisions that are the root of their digests."""
# Signed before a statement, so that a signature of this key over anything else is none.
_CONTEXT = b"penstock digests 1\n"


class DigestSigner:
    """The signer of a holder's log answers, with a key that its process draws.

    Args:
        member: the holder.
        epoch: returns the member's present epoch, see `grants`.
    """

    def __init__(self, member: str, epoch: Callable[[], int]) -> None:
        self._private = Ed25519PrivateKey.generate()
        self._member = member
        self._epoch = epoch

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
    # Of the statement only what differs: the rest is equal to the manifest's digests, which the hub gets anyway.
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
    # From cheap to costly: a caller who sends rubbish must not make the hub digest megabytes.
    if not holding.identity.revision.startswith(PROVABLE):
        return "the revision is not a root of digests"
    # One more than the holder last reported: it may have begun an epoch since its beat.
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
        return _CONTEXT + msgspec.msgpack.encode(self)


def _spans(table: ChunkTable, chunks: I64) -> bytes:
    """Return the spans of leaves of these chunks, as in `Proof.spans`."""
    return np.stack([table.first_leaf[chunks], table.first_leaf[chunks + 1]], 1).astype("<i8").tobytes()


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
