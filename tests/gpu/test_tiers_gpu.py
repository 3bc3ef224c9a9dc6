"""Device memory as a tier, and a cache that swaps models between device, pinned host memory and disk."""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.benchmarks.test_tiers import run_benchmark
from tests.support.compare import assert_same, by_safetensors
from tests.support.keeper import KeeperProcess
from tests.support.tier_suite import TierTests

import penstock as ps
from penstock.engine.place import CudaRegistrar
from penstock.hub.client import HubClient
from penstock.memory.tier import Tier
from penstock.memory.tier_cuda import CudaTier
from penstock.memory.tier_host import PoolTier
from penstock.testing.checkpoints import write_llama

pytestmark = pytest.mark.gpu


class TestCuda(TierTests):
    def make(self) -> Tier:
        return CudaTier(torch.device("cuda", 0), stall_s=30.0)


class TestPinned(TierTests):
    def make(self) -> Tier:
        return PoolTier.open(256 << 20, registrar=CudaRegistrar(torch.device("cuda", 0)), stall_s=30.0)


@pytest.fixture
def runtime(monkeypatch) -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="pk-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    yield
    gc.collect()
    shutil.rmtree(directory)


def wait_until(happens, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline, "the condition was not reached"
        time.sleep(0.02)


def tiers() -> dict[str, str]:
    """Return the tiers of the cache's models, as `penstock status` shows them. The device is the empty string."""
    with HubClient.connect(None) as hub:
        return {held.identity.model: held.tier for member in hub.status().members for held in member.holdings}


def test_attached_models_are_promoted_from_host_and_disk(runtime, tmp_path: Path) -> None:
    for seed, name in enumerate("abc"):
        write_llama(tmp_path / name, total_bytes=120_000_000, seed=seed)
    wanted = {name: by_safetensors(tmp_path / name) for name in "abc"}
    bounds = ["--memory-bytes", "150M", "--host-bytes", "192M", "--disk", str(tmp_path / "spill")]
    uris = [str(tmp_path / name) for name in "abc"]
    with KeeperProcess([*uris, "--device", "cuda:0", *bounds], timeout_s=120) as keeper:
        assert tiers() == {"a": "disk", "b": "host", "c": ""}
        for name in "abcacb":
            attached = ps.cache.attach(name, timeout_s=20.0)
            assert attached.report.verified
            assert_same(attached, wanted[name], device="cuda:0")
            wait_until(lambda name=name: tiers()[name] == "")
            del attached
            gc.collect()
        assert sorted(tiers().values()) == ["", "disk", "host"]
        assert keeper.process.poll() is None


def test_tier_benchmark_runs_on_gpu(tmp_path: Path) -> None:
    found = run_benchmark("--device", "cuda:0", "--dir", str(tmp_path))
    assert "| host -> gpu |" in found and "| gpu -> host, first |" in found, found
