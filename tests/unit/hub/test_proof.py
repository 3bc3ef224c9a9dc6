"""Proofs that a holder said wrong digests: one that holds, and all that a liar could make of true statements."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch

from penstock.digest.leaf import canonical, root
from penstock.hub import proof as proofs
from penstock.hub.messages import HoldingState, Identity, LogReply, Proof
from penstock.hub.proof import DigestSigner, make_proof, proof_fault
from penstock.peer.local_weights import LocalWeights, WeightLayout, layout_of_tensors
from penstock.types import U64

EPOCH = 70


@dataclass
class Case:
    """A holder that states digests of a line, wrong ones where a test says so."""

    layout: WeightLayout
    leaves: U64
    holding: HoldingState
    signer: DigestSigner

    def log(self, *wrong: int) -> LogReply:
        said = self.leaves.copy()
        said[list(wrong)] ^= np.uint64(1)
        chunks = np.arange(self.layout.chunks.num_chunks)[::-1]
        at = self.layout.chunks.leaves_of(chunks)
        reply = LogReply(
            generation=0,
            serial=len(chunks),
            state="whole",
            chunks=chunks.astype("<u4").tobytes(),
            leaves=said[at].tobytes(),
        )
        return self.signer.sign(reply, self.holding.key, self.layout.chunks)

    def proof(self, *wrong: int) -> Proof:
        found = make_proof(self.log(*wrong), self.layout.table, self.layout.chunks, self.leaves)
        assert found is not None
        return found

    def fault(self, proof: Proof, **other: object) -> str:
        key = other.pop("digest_key", self.signer.public_key)
        member = other.pop("member", "w")
        return proof_fault(proof, member, key, msgspec.structs.replace(self.holding, **other))  # type: ignore[arg-type]


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr("penstock.peer.local_weights.CHUNK_BYTES", 512 << 10)
    layout, rows = layout_of_tensors({f"t{i}": torch.arange(200_000, dtype=torch.int32) + i for i in range(6)})
    leaves = LocalWeights(Identity(model="m"), layout, rows).digest(np.arange(layout.chunks.num_chunks))
    revision = root(canonical(layout.table, range(len(layout.table))), layout.chunks.leaf_bytes, leaves)
    identity = Identity(model="m", revision=revision, layout=layout.digest)
    holding = HoldingState(
        key=identity.key(),
        identity=identity,
        num_chunks=layout.chunks.num_chunks,
        nbytes=layout.nbytes,
        grant_epoch=EPOCH,
    )
    assert layout.chunks.num_chunks > 3 and len(leaves) > 12
    return Case(layout, leaves, holding, DigestSigner("w", lambda: EPOCH))


def test_wrong_digests_are_proven_by_what_their_holder_signed(case: Case) -> None:
    assert case.fault(case.proof(5)) == ""
    assert case.fault(case.proof(*range(len(case.leaves)))) == ""


def test_nothing_is_proven_of_who_said_the_right_digests(case: Case) -> None:
    assert case.fault(case.proof()) == "the member stated the right digests"
    honest = case.proof()
    one = np.array([3], "<i8").tobytes()
    lie = msgspec.structs.replace(honest, at=one, said=np.array([7], "<u8").tobytes())
    assert case.fault(lie) == "not signed by the member"
    right = case.leaves[case.layout.chunks.leaves_of(np.arange(case.layout.chunks.num_chunks)[::-1])][3]
    twice = msgspec.structs.replace(honest, at=one * 2, said=np.array([7, right], "<u8").tobytes())
    assert case.fault(twice) == "the member stated the right digests"
    leaves = case.leaves.copy()
    leaves[3] ^= np.uint64(1)
    assert case.fault(msgspec.structs.replace(honest, leaves=leaves.tobytes())) == (
        "its digests are not those of the revision"
    )


def test_a_statement_of_another_member_key_cut_or_time_proves_nothing(case: Case) -> None:
    proof = case.proof(5)
    assert case.fault(proof, member="v") == "not signed by the member"
    assert case.fault(proof, digest_key=DigestSigner("w", lambda: EPOCH).public_key) == "not signed by the member"
    assert case.fault(proof, digest_key=b"") == "not signed by the member"
    assert case.fault(proof, key="0" * 32) == "not signed by the member"
    assert case.fault(msgspec.structs.replace(proof, leaf_bytes=1 << 20)) == "its digests are not those of the revision"
    assert case.fault(proof, grant_epoch=EPOCH + 3) == case.fault(proof, grant_epoch=EPOCH - 1) == ""
    for epoch in (EPOCH + 4, EPOCH - 2):
        assert case.fault(proof, grant_epoch=epoch) == "its statement is not recent"
    assert case.fault(msgspec.structs.replace(proof, epoch=EPOCH + 1)) == "not signed by the member"
    of_headers = msgspec.structs.replace(case.holding.identity, revision="h1-0")
    assert case.fault(proof, identity=of_headers) == "the revision is not a root of digests"


@pytest.mark.parametrize(
    "spans", [[(-1, 2)], [(3, 1)], [(0, 1 << 62)], [(0, 9)] * 3, [(0, 1)] * 99, [], [(5, -(1 << 63))]], ids=str
)
def test_spans_that_cannot_be_are_refused(case: Case, spans: list[tuple[int, int]]) -> None:
    raw = np.array(spans, "<i8").tobytes()
    assert case.fault(msgspec.structs.replace(case.proof(5), spans=raw)) == "malformed"


@pytest.mark.parametrize(("column", "raw"), [("at", b"1"), ("said", b""), ("leaves", b"123"), ("spans", b"8" * 8)])
def test_columns_that_cannot_be_are_refused(case: Case, column: str, raw: bytes) -> None:
    assert case.fault(msgspec.structs.replace(case.proof(5), **{column: raw})) == "malformed"
    past = msgspec.structs.replace(case.proof(5), at=np.array([1 << 40], "<i8").tobytes())
    assert case.fault(past) == "malformed"


def test_no_proof_is_made_of_what_is_not_signed_or_too_long(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = case.log(5)
    unsigned = msgspec.structs.replace(reply, signature=b"")
    assert make_proof(unsigned, case.layout.table, case.layout.chunks, case.leaves) is None
    monkeypatch.setattr(proofs, "MAX_PROOF_BYTES", 100)
    assert make_proof(reply, case.layout.table, case.layout.chunks, case.leaves) is None
