"""An error about an unreachable member names that member and not the responding member."""

from __future__ import annotations

import msgspec
import pytest

from penstock.errors import PeerLost, PenstockError, SourceStalled, SourceUnavailable
from penstock.hub.messages import Fault
from penstock.peer.client import refusal_of
from penstock.peer.server import fault_of


def received(error: PenstockError) -> PenstockError:
    """Return the error that a client raises when the member `planner` responds with this error."""
    return refusal_of("penstock:planner", 503, msgspec.msgpack.encode(fault_of(error)), {})


@pytest.mark.parametrize("kind", [PeerLost, SourceStalled])
def test_peer_lost_error_names_member(kind: type[PenstockError]) -> None:
    error = received(kind("reset by peer", uri="penstock:rank-1"))
    assert isinstance(error, PeerLost) and error.uri == "penstock:rank-1"


@pytest.mark.parametrize("error", [PeerLost("gone"), SourceUnavailable("no file", uri="s3://bucket/key")])
def test_peer_error_names_responding_member(error: PenstockError) -> None:
    assert received(error).uri == "penstock:planner"


def test_fault_without_member_omits_member_field() -> None:
    assert b"member" not in msgspec.msgpack.encode(Fault(error="busy"))
