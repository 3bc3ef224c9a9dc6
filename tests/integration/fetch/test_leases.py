"""A descriptor for the `http` transport is valid as long as the lease under which it was issued."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import PenstockError, StaleDescriptor
from penstock.hub.messages import HoldingState, UpstreamsRequest
from penstock.peer import server as peer_server
from penstock.peer.client import PeerClient
from penstock.peer.member import Member
from penstock.segments import Segments
from penstock.transport.http import HttpTransport
from penstock.transport.protocol import Descriptor, Memory, decode

NBYTES = 64 << 20


@pytest.fixture
def holder(tmp_path_factory, monkeypatch) -> Iterator[ps.Fleet]:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    monkeypatch.setenv("PENSTOCK_STALL_S", "6")
    with ps.join("m", connection=ps.ConnectionSettings(transports=["http"])) as fleet:
        fleet.offer({"w": torch.arange(NBYTES // 4, dtype=torch.int32)})
        yield fleet


def borrow(reader: Member, holder: ps.Fleet) -> tuple[PeerClient, Descriptor]:
    """Return a lease and the descriptor issued under it."""
    (holding,) = holder.member.weights
    asked = HoldingState(key=holding.key, identity=holding.identity, num_chunks=0, nbytes=0)
    reply = reader.hub.upstreams(UpstreamsRequest(member=reader.id, holding=asked, source=holder.member.id))
    peer = reader.peer(reply.upstreams[0], holding.key)
    peer.lease()
    return peer, decode(peer.map().regions[0]["http"])


class Reader:
    """Read a descriptor with a separate transport."""

    def __init__(self) -> None:
        self.memory = np.zeros(NBYTES, np.uint8)
        self.transport = HttpTransport.open()
        address = int(self.memory.ctypes.data)
        self.into = self.transport.register(Memory(address=address, nbytes=NBYTES, device="cpu", owner=self.memory))

    def read(self, descriptor: Descriptor, nbytes: int = 4096) -> bytes:
        one = np.zeros(1, np.int64)
        segments = Segments(src=one, dst=one, nbytes=np.array([nbytes], np.int64))
        self.transport.wait(self.transport.post_read(self.into, descriptor, segments), stall_s=10.0)
        return self.memory[:nbytes].tobytes()


@pytest.fixture
def reader() -> Iterator[Reader]:
    found = Reader()
    yield found
    found.transport.close()


WANTED = np.arange(1024, dtype=np.int32).tobytes()


def test_descriptor_expires_with_its_lease(holder, reader) -> None:
    with ps.join("m") as first, ps.join("m") as second:
        peer, mine = borrow(first.member, holder)
        other, theirs = borrow(second.member, holder)
        assert reader.read(mine) == reader.read(theirs) == WANTED
        assert mine != theirs
        peer.close()
        with pytest.raises(StaleDescriptor):
            reader.read(mine)
        assert reader.read(theirs) == WANTED
        other.close()
        with pytest.raises(StaleDescriptor):
            reader.read(theirs)


def test_descriptor_expires_with_unrenewed_lease(holder, reader, monkeypatch) -> None:
    monkeypatch.setattr(peer_server, "LEASE_TTL_S", 1.0)
    with ps.join("m") as first:
        peer, mine = borrow(first.member, holder)
        assert reader.read(mine) == WANTED
        deadline = time.monotonic() + 30
        with pytest.raises(StaleDescriptor):
            while time.monotonic() < deadline:
                reader.read(mine)
                time.sleep(0.1)
        with pytest.raises(PenstockError, match="expired"):
            peer.map()
        peer.close()


def test_new_lease_invalidates_old_descriptor(holder, reader) -> None:
    with ps.join("m") as first:
        before, old = borrow(first.member, holder)
        peer, new = borrow(first.member, holder)
        with pytest.raises(StaleDescriptor):
            reader.read(old)
        assert reader.read(new) == WANTED
        peer.close()
        before.close()
