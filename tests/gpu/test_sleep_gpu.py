"""Weights on a device are freed while an engine sleeps, and restored when it wakes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.support.sync import SyncTask, SyncWorker, whole

import penstock as ps
from penstock.errors import IntegrityError, VersionNotLive
from penstock.sync.memory_digests import MemoryDigests

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
DEVICE = "cuda:0"
NUM_LAYERS, WIDTH = 32, 1024
NBYTES = NUM_LAYERS * WIDTH * WIDTH * 4
SETTINGS = ps.ConnectionSettings(stall_s=20.0)


class Model(torch.nn.Module):
    """Layers, and a buffer that is in no version."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False, device=DEVICE) for _ in range(NUM_LAYERS)
        )
        self.register_buffer("angles", torch.arange(64.0, device=DEVICE), persistent=False)

    def has(self, task: SyncTask, version: int) -> bool:
        """Return whether every bit is that of the version."""
        live = dict(self.named_parameters())
        return all(torch.equal(live[name].cpu(), one) for name, one in whole(task, version).items())


class Trainer:
    """A trainer in another process, on the same device."""

    def __init__(self, stack: ExitStack, directory: Path, *, arena: bool) -> None:
        self.task = SyncTask(
            side="publisher",
            mode="snapshot",
            device=DEVICE,
            num_layers=NUM_LAYERS,
            rows=WIDTH,
            columns=WIDTH,
            dtype="float32",
            options={"arena": arena},
            environ={"PENSTOCK_RUNTIME_DIR": str(directory), "PENSTOCK_STALL_S": "20"},
        )
        self._process = stack.enter_context(SyncWorker(self.task))
        self._process.wait_for("joined", timeout_s=90)

    def publish(self, version: int) -> None:
        assert "error" not in self._process.call(f"publish {version}", timeout_s=90)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ExitStack]:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
    with ExitStack() as found:
        yield found


@pytest.mark.alone
@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_sleeping_engine_frees_device_memory(stack: ExitStack, tmp_path: Path, mode: str, arena: bool) -> None:
    trainer, served = Trainer(stack, tmp_path, arena=arena), Model()
    engine = stack.enter_context(
        ps.subscriber(
            "policy",
            served,
            mode=mode,
            connection=SETTINGS,
            rank=(0, 1),
            settings=ps.sync.SubscriberSettings(arena=arena),
        )
    )
    trainer.publish(1)
    engine.update()
    assert served.has(trainer.task, 1)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    assert engine.release() >= NBYTES
    # A staging copy doubles the memory.
    assert torch.cuda.mem_get_info()[0] - before >= 0.8 * NBYTES * (2 if mode == "staged" else 1)
    with pytest.raises(VersionNotLive), engine.pinned():
        pass
    # Others use the memory in the meantime and leave their bytes in it.
    litter = [torch.full((WIDTH, WIDTH), float("nan"), device=DEVICE) for _ in range(2 * NUM_LAYERS)]
    del litter
    trainer.publish(2)
    report = engine.restore()
    assert (report.version, engine.version, report.nbytes) == (2, 2, NBYTES)
    assert served.has(trainer.task, 2)
    assert torch.equal(served.angles, torch.arange(64.0, device=DEVICE))
    trainer.publish(3)
    assert engine.update().version == 3
    assert served.has(trainer.task, 3)


def test_weights_restored_by_engine_are_verified(stack: ExitStack, tmp_path: Path) -> None:
    trainer, served = Trainer(stack, tmp_path, arena=True), Model()
    engine = stack.enter_context(ps.subscriber("policy", served, connection=SETTINGS, rank=(0, 1)))
    trainer.publish(1)
    engine.update()
    engine.release(free=False, returns=True)
    spoilt = served.layers[7].weight
    with torch.no_grad():
        spoilt[5, 5] += 1.0
    with pytest.raises(IntegrityError):
        engine.restore(in_place=True)
    assert engine.version == -1
    with torch.no_grad():
        spoilt.copy_(whole(trainer.task, 1)["layers.7.weight"])
    assert engine.restore(in_place=True).version == 1
    assert served.has(trainer.task, 1)


def test_digests_of_many_tensors_are_fast() -> None:
    torch.manual_seed(0)
    sizes = [*range(1, 300), 4096, 1 << 20, 3 << 20, *([1 << 24] * 16)]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE) for size in sizes]
    tensors.append(tensors[-1][5:4000])  # a view has the same storage
    digests = MemoryDigests(tensors)
    on_host = MemoryDigests(one.cpu() for one in tensors[:-1])
    assert digests.digests == on_host.digests
    for number in (0, 7, 240, len(sizes) - 1):
        tensors[number][-1] ^= 1
        assert not digests.is_same()
        tensors[number][-1] ^= 1
    began = time.perf_counter()
    assert digests.is_same()
    digest_s = time.perf_counter() - began
    began = time.perf_counter()
    kept = [one.cpu() for one in tensors]
    copy_s = time.perf_counter() - began
    assert len(kept) == len(tensors) and digest_s < copy_s, (digest_s, copy_s)


def test_digests_match_after_freeing_memory_pool() -> None:
    # An engine with a sleep mode loads and verifies its model inside a pool whose memory is removed.
    program = """
import numpy as np, torch
from penstock.digest.cuda import leaf_digests_cuda
device = torch.device("cuda:0")
data = torch.arange(4096, dtype=torch.int32, device=device).view(torch.uint8)
leaves = np.array([data.data_ptr()]), np.array([data.numel()])
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    first = leaf_digests_cuda(*leaves, device).item()
torch.cuda.synchronize()
spans = [(one["address"], one["total_size"]) for one in pool.snapshot()]
from penstock.digest.cuda import _constants
at = _constants(device).data_ptr()
print(any(begin <= at < begin + size for begin, size in spans), leaf_digests_cuda(*leaves, device).item() == first)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.split() == ["False", "True"], done.stdout + done.stderr


def test_repeated_sleeps_use_constant_memory() -> None:
    tensors = [torch.ones(32 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(4)]
    digests = MemoryDigests(tensors)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    assert all(digests.is_same() for _ in range(6))
    assert torch.cuda.memory_reserved() == reserved
