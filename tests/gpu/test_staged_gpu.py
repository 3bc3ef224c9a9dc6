"""Weights in host memory reach another member's device by pinned staging, as the report shows."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.compare import assert_same, by_safetensors
from tests.support.holder import HolderProcess, allocate, pattern

import penstock as ps
from penstock.segments import Rectangles
from penstock.testing.checkpoints import write_llama
from penstock.testing.transport_suite import segments
from penstock.transport.into_device import PinnedTransport, StagedTransport
from penstock.transport.shm import ShmTransport

pytestmark = pytest.mark.gpu
NBYTES = 64_000_013


def test_host_memory_from_another_process_reaches_device() -> None:
    shm = ShmTransport()
    transport = StagedTransport("staged_shm", shm)
    memory = allocate(NBYTES, "cuda:0")
    into = transport.register_into(memory)
    with HolderProcess("shm", nbytes=NBYTES) as holder:
        for rows in ([(0, 0, NBYTES)], [(at, at, min(99_991, NBYTES - at)) for at in range(0, NBYTES, 99_991)]):
            memory.owner.bytes_at(0, NBYTES).zero_()
            torch.cuda.synchronize()
            transport.wait(transport.post_read(into, holder.descriptor, segments(rows)), stall_s=20)
            assert memory.owner.bytes_at(0, NBYTES).cpu().numpy().tobytes() == pattern(NBYTES)
    transport.close()
    shm.close()


def test_kernel_reads_byte_ranges_in_pinned_memory() -> None:
    shm = ShmTransport()
    transport = PinnedTransport(shm)
    memory = allocate(NBYTES, "cuda:0")
    into = transport.register_into(memory)
    columns = "src", "dst", "run_bytes", "num_rows", "src_pitch", "dst_pitch"
    rows = [(0, 48, 8192, 900, 16384, 8192), (20_000_005, 10_000_001, 999, 5000, 1999, 1000)]
    rows.append((40_000_000, 20_000_000, 300_000, 50, 400_000, 300_000))
    with HolderProcess("shm", nbytes=NBYTES) as holder:
        memory.owner.bytes_at(0, NBYTES).zero_()
        torch.cuda.synchronize()
        given, expected = memoryview(pattern(NBYTES)), bytearray(NBYTES)
        for src, dst, run, count, src_pitch, dst_pitch in rows:
            for i in range(count):
                expected[dst + i * dst_pitch : dst + i * dst_pitch + run] = given[src + i * src_pitch :][:run]
        rectangles = Rectangles(**dict(zip(columns, np.array(rows).T, strict=True)))
        transport.wait(transport.post_rectangles(into, holder.descriptor, rectangles), stall_s=20)
        assert memory.owner.bytes_at(0, NBYTES).cpu().numpy().tobytes() == bytes(expected)
    transport.close()
    shm.close()


@pytest.mark.parametrize("transport", ["shm", "http"])
def test_weights_in_host_cache_are_fetched_to_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    with tempfile.TemporaryDirectory(prefix="ps-") as runtime:
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", runtime)
        write_llama(tmp_path / "llama", total_bytes=100_000_000)
        with (
            ps.cache.WeightCache() as keeper,
            ps.join("llama", connection=ps.ConnectionSettings(transports=["cuda_ipc", transport])) as engine,
        ):
            keeper.keep("llama", tmp_path / "llama")
            found: dict[str, torch.Tensor] = {}
            report = engine.fetch(found, device="cuda:0")
            assert list(report.nbytes_by_path) == [f"staged_{transport} <- {keeper.member.id[:8]}"]
            assert report.storage_bytes == 0
            assert_same({name: tensor.cpu() for name, tensor in found.items()}, by_safetensors(tmp_path / "llama"))
