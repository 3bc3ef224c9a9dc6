"""`cuda_ipc` on devices: the conformance suite, two processes, virtual memory and dead holders."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from tests.support.holder import HolderProcess, allocate, pattern

from penstock.errors import DeviceOutOfMemory, PeerLost, StaleDescriptor
from penstock.memory.arena import Arena
from penstock.memory.rehome import rehome
from penstock.testing.transport_suite import TransportTests, segments
from penstock.transport.cuda_ipc import CudaIpcTransport
from penstock.transport.into_device import IntoHost
from penstock.transport.protocol import Memory, Transport

pytestmark = pytest.mark.gpu
NBYTES = 64_000_013
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def whole(memory: Memory) -> torch.Tensor:
    assert isinstance(memory.owner, Arena)
    return memory.owner.bytes_at(0, memory.nbytes)


class TestCudaIpc(TransportTests):
    def make(self) -> Transport:
        return CudaIpcTransport()

    def allocate(self, nbytes: int) -> Memory:
        memory = allocate(nbytes, "cuda:0")
        whole(memory).fill_(0xAA)
        return memory

    def write(self, memory: Memory, data: bytes) -> None:
        whole(memory).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0))

    def read(self, memory: Memory) -> bytes:
        return whole(memory).cpu().numpy().tobytes()


@pytest.fixture
def reader():
    transport = CudaIpcTransport()
    yield transport, transport.register(allocate(NBYTES, "cuda:0"))
    transport.close()


def read(reader, descriptor, rows=((0, 0, NBYTES),)) -> bytes:
    transport, into = reader
    transport.wait(transport.post_read(into, descriptor, segments(rows)), stall_s=10)
    return whole(into.memory).cpu().numpy().tobytes()


@pytest.mark.parametrize("env", [{}, EXPANDABLE], ids=["cudaMalloc", "expandable_segments"])
@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=pytest.mark.gpus(2))])
def test_second_process_reads_device_memory(reader, device: str, env) -> None:
    with HolderProcess("cuda_ipc", nbytes=NBYTES, device=device, env=env) as holder:
        assert read(reader, holder.descriptor) == pattern(NBYTES)
        rows = [(at, at, min(999_983, NBYTES - at)) for at in range(0, NBYTES, 999_983)]
        np.random.default_rng(1).shuffle(rows)
        new = holder.fence(2)
        assert read(reader, new, rows) == pattern(NBYTES, 2)
        holder.call("close")
        with pytest.raises(StaleDescriptor):
            read(reader, new)


@pytest.mark.parametrize("env", [{}, EXPANDABLE], ids=["cudaMalloc", "expandable_segments"])
def test_device_memory_is_read_into_host_memory(reader, env) -> None:
    staged = IntoHost("staged_cuda_ipc", reader[0])
    host = np.zeros(NBYTES + 1, np.uint8)
    into = staged.register_into(Memory(address=host.ctypes.data + 1, nbytes=NBYTES, owner=host))
    with HolderProcess("cuda_ipc", nbytes=NBYTES, device="cuda:0", env=env) as holder:
        for rows in ([(0, 0, NBYTES)], [(at, at, min(99_991, NBYTES - at)) for at in range(0, NBYTES, 99_991)]):
            host[:] = 0
            staged.wait(staged.post_read(into, holder.descriptor, segments(rows)), stall_s=10)
            assert host[1:].tobytes() == pattern(NBYTES)
    staged.close()


@pytest.mark.gpus(2)
@pytest.mark.parametrize("env", [{}, EXPANDABLE], ids=["cudaMalloc", "expandable_segments"])
def test_device_hidden_from_this_process_is_readable(reader, env) -> None:
    """The holder uses a different device as number 0, as with CUDA_VISIBLE_DEVICES per process."""
    with HolderProcess("cuda_ipc", nbytes=NBYTES, device="cuda:0", env={"CUDA_VISIBLE_DEVICES": "1", **env}) as holder:
        assert read(reader, holder.descriptor) == pattern(NBYTES)


@pytest.mark.parametrize("env", [{}, EXPANDABLE], ids=["cudaMalloc", "expandable_segments"])
def test_killed_holder_raises_peer_lost(reader, env) -> None:
    """The holder is also killed during a read, and this process's device stays usable."""
    transport, into = reader
    with HolderProcess("cuda_ipc", nbytes=NBYTES, device="cuda:0", env=env) as holder:
        read(reader, holder.descriptor, [(0, 0, 1000)])
        pending = [transport.post_read(into, holder.descriptor, segments([(0, 0, NBYTES)])) for _ in range(50)]
        holder.process.kill()
        holder.process.wait(20)
        began = time.monotonic()
        with pytest.raises(PeerLost):
            for one in pending:
                transport.wait(one, stall_s=10)
        with pytest.raises(PeerLost):
            transport.post_read(into, holder.descriptor, segments([(0, 0, NBYTES)]))
        assert time.monotonic() - began < 5
    assert int(torch.ones(1000, device="cuda").sum()) == 1000


def test_fence_during_reads_is_detected(reader) -> None:
    """Reads that succeed have the bytes of one generation."""
    transport, into = reader
    outcomes = set()
    with HolderProcess("cuda_ipc", nbytes=NBYTES, device="cuda:0") as holder:
        for seed in range(2, 6):
            pending = [transport.post_read(into, holder.descriptor, segments([(0, 0, NBYTES)])) for _ in range(4)]
            holder.fence(seed)
            for one in pending:
                try:
                    transport.wait(one, stall_s=10)
                except StaleDescriptor as error:
                    assert error.mutated
                    outcomes.add("stale")
                else:
                    outcomes.add("read")
            assert read(reader, holder.descriptor) == pattern(NBYTES, seed)
    assert "stale" in outcomes


@pytest.mark.gpus(2)
def test_reader_reads_memory_on_second_device(reader) -> None:
    holder = CudaIpcTransport()
    memory = allocate(NBYTES, "cuda:1")
    whole(memory).copy_(torch.frombuffer(bytearray(pattern(NBYTES)), dtype=torch.uint8))
    torch.cuda.synchronize(1)
    assert read(reader, holder.register(memory).descriptor) == pattern(NBYTES)
    holder.close()


def test_model_in_arena_needs_one_registration() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(50))).cuda()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (arena,) = rehome(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert arena.address <= tensor.data_ptr() < arena.address + arena.nbytes
    transport = CudaIpcTransport()
    transport.register(Memory(address=arena.address, nbytes=arena.nbytes, device=arena.device, owner=arena))
    transport.close()


def test_allocation_above_device_memory_raises_typed_error() -> None:
    with pytest.raises(DeviceOutOfMemory):
        Arena.allocate(1 << 50, "cuda")
