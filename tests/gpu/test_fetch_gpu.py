"""Device memory that comes slab by slab: filled, mapped and passed on by processes of one device."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch

import penstock as ps
from penstock.fleet.holding import Holding
from penstock.testing.fleet import Task, Worker, digests
from penstock.types import MIB

pytestmark = pytest.mark.gpu

SMALL = {"penstock.fleet.slab.FIRST_BYTES": 4 * MIB, "penstock.fleet.slab.MOST_BYTES": 8 * MIB}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="pf-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    monkeypatch.setattr("penstock.fleet.line.CHUNK_BYTES", 256 << 10)
    for name, value in SMALL.items():
        monkeypatch.setattr(name, value)
    yield
    gc.collect()
    shutil.rmtree(directory)


def weights() -> dict[str, torch.Tensor]:
    """48 MiB and a few bytes, and one tensor larger than a slab."""
    sizes = {**{f"t{i}": 3 * MIB + 8 * i for i in range(12)}, "u": 12 * MIB, "v": 40}
    return {name: torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda:0") for name, size in sizes.items()}


def test_a_chain_of_processes_fills_slab_after_slab(allocated: int) -> None:
    ours = weights()
    task = Task(device="cuda:0", constants=dict(SMALL))
    with ps.join("m", max_readers=1) as holder:
        holder.offer(ours)
        with Worker(task) as relay, Worker(task) as last:
            for reader in (relay, last):
                report = reader.say_until("fetched", timeout_s=120)
                assert all(path.startswith("cuda_ipc <- ") for path in report["paths"]), report
                assert reader.say_until("digests")["digests"] == digests(ours)


def test_tensors_belong_to_the_stream_of_who_fetches(allocated: int) -> None:
    ours, found = weights(), dict[str, torch.Tensor]()
    with ps.join("m") as holder, ps.join("m") as reader:
        holder.offer(ours)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            reader.fetch(found, device="cuda:0")
        held: Holding = reader.member.holdings[0]
        assert len(held.place.regions) > 4
        pools = {(at["address"], at["stream"]) for at in torch.cuda.memory_snapshot()}
        mine = {region.address for region in held.place.regions}
        assert {owner for address, owner in pools if address in mine} == {stream.cuda_stream}
        assert digests(found) == digests(ours)
