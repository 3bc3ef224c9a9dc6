"""`nixl` with device memory: the conformance suite, another process's device, fences and dead holders."""

from __future__ import annotations

import time
from importlib.util import find_spec

import pytest
import torch
from tests.support.holder import HolderProcess, allocate, pattern

from penstock.errors import PeerLost, PenstockError, SourceStalled, StaleDescriptor
from penstock.memory.arena import Arena
from penstock.testing.transport_suite import TransportTests, segments
from penstock.transport.protocol import Memory, Transport
from penstock_nixl.transport import NixlTransport

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")]
NBYTES = 64_000_013
STALL_S = 10.0


def whole(memory: Memory) -> torch.Tensor:
    assert isinstance(memory.owner, Arena)
    return memory.owner.bytes_at(0, memory.nbytes)


class TestNixlOnDevice(TransportTests):
    def make(self) -> Transport:
        return NixlTransport.open()

    def allocate(self, nbytes: int) -> Memory:
        memory = allocate(nbytes, "cuda:0")
        whole(memory).fill_(0xAA)
        torch.cuda.synchronize()
        return memory

    def write(self, memory: Memory, data: bytes) -> None:
        whole(memory).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0))
        torch.cuda.synchronize()

    def read(self, memory: Memory) -> bytes:
        return whole(memory).cpu().numpy().tobytes()


@pytest.fixture
def reader():
    transport = NixlTransport.open()
    yield transport, transport.register(allocate(NBYTES, "cuda:0"))
    transport.close()


def read(reader, descriptor, rows=((0, 0, NBYTES),)) -> bytes:
    transport, into = reader
    transport.wait(transport.post_read(into, descriptor, segments(rows)), stall_s=STALL_S)
    return whole(into.memory).cpu().numpy().tobytes()


@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=pytest.mark.gpus(2)), "cpu"])
def test_second_process_reads_device_memory(reader, device: str) -> None:
    with HolderProcess("nixl", nbytes=NBYTES, device=device) as holder:
        assert read(reader, holder.descriptor) == pattern(NBYTES)
        old, new = holder.descriptor, holder.fence(2)
        with pytest.raises(StaleDescriptor):
            read(reader, old)
        rows = [(at, at, min(999_983, NBYTES - at)) for at in range(0, NBYTES, 999_983)]
        assert read(reader, new, rows[::-1]) == pattern(NBYTES, 2)


def test_device_memory_is_read_into_host() -> None:
    transport = NixlTransport.open()
    memory = allocate(NBYTES, "cpu")
    into = transport.register(memory)
    with HolderProcess("nixl", nbytes=NBYTES, device="cuda:0") as holder:
        transport.wait(transport.post_read(into, holder.descriptor, segments([(0, 0, NBYTES)])), stall_s=STALL_S)
    assert whole(memory).numpy().tobytes() == pattern(NBYTES)
    transport.close()


def test_readers_raise_after_holder_is_killed(reader) -> None:
    """The error is typed and in time, and this process's device stays usable."""
    transport, into = reader
    with HolderProcess("nixl", nbytes=NBYTES, device="cuda:0") as holder:
        read(reader, holder.descriptor, [(0, 0, 1000)])
        pending = [transport.post_read(into, holder.descriptor, segments([(0, 0, NBYTES)])) for _ in range(8)]
        holder.process.kill()
        holder.process.wait(20)
        began, ended = time.monotonic(), list[PenstockError]()
        for one in pending:
            try:
                transport.wait(one, stall_s=STALL_S)
            except (PeerLost, SourceStalled) as error:
                ended.append(error)
        assert ended
        assert time.monotonic() - began < 4 * STALL_S
    assert int(torch.ones(1000, device="cuda").sum()) == 1000
