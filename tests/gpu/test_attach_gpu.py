"""Engines that attach cached device memory: mapping, verification, and the death of the cache."""

from __future__ import annotations

import gc
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.compare import assert_same, by_safetensors
from tests.support.keeper import KeeperProcess

import penstock as ps
from penstock.peer.local_weights import LocalWeights
from penstock.testing.checkpoints import write_llama

pytestmark = pytest.mark.gpu

NBYTES = 300_000_000


@pytest.fixture(autouse=True)
def runtime(monkeypatch) -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="pk-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    yield
    gc.collect()
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("kept") / "llama"
    write_llama(directory, total_bytes=NBYTES)
    return directory


@pytest.mark.parametrize("segments", ["False", "True"])
def test_attach_shares_cached_device_memory(llama, allocated, segments: str) -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{segments}"}
    with KeeperProcess([str(llama), "--device", "cuda:0"], environ=environ, timeout_s=120) as keeper:
        attached = ps.cache.attach("llama", device="cuda:0")
        assert attached.report.verified
        assert attached.report.path.startswith("cuda_ipc, mapped: ")
        assert torch.cuda.memory_allocated() - allocated < NBYTES // 10
        wanted = by_safetensors(llama)
        assert_same(attached, wanted, device="cuda:0")
        head = torch.nn.Linear(*wanted["lm_head.weight"].shape[::-1], bias=False, device="meta", dtype=torch.bfloat16)
        holder = torch.nn.Module()
        holder.lm_head = head
        attached.attach_into(holder, strict=False)
        assert head.weight.data_ptr() == attached["lm_head.weight"].data_ptr()
        x = torch.randn(4, head.in_features, device="cuda:0", dtype=torch.bfloat16)
        torch.testing.assert_close(head(x), x @ wanted["lm_head.weight"].to("cuda:0").T)
        with pytest.raises(ps.NotFound):
            ps.cache.attach("llama", device="cpu", timeout_s=0.0)
        keeper.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while attached.lease_state != "draining":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert keeper.process.poll() is None
        del head, holder, x
        attached.close()
        del attached
        assert keeper.process.wait(timeout=30) == 0


def test_next_engine_attaches_same_memory(llama, allocated) -> None:
    with KeeperProcess([str(llama), "--device", "cuda:0"], timeout_s=120):
        for _ in range(3):
            with ps.cache.attach("llama") as attached:
                assert_same(attached, by_safetensors(llama), device="cuda:0")
            del attached
            gc.collect()


def test_corrupt_device_memory_is_reloaded_before_attach(llama, allocated, monkeypatch) -> None:
    """The engine digests on the device and reports to the cache, whose own checks are disabled."""
    wanted = by_safetensors(llama)
    with monkeypatch.context() as patched, ps.cache.WeightCache(device="cuda:0") as keeper:
        patched.setattr(LocalWeights, "spot_check", lambda self, chance: None)
        keeper.keep("llama", llama)
        keeper.member.weights[0].memory.rows[-1][-1] ^= 1
        with ps.cache.attach("llama", verify=False) as attached:
            assert not attached.report.verified
            with pytest.raises(AssertionError):
                assert_same(attached, wanted, device="cuda:0")
        del attached
        gc.collect()
        with ps.cache.attach("llama", timeout_s=60.0) as attached:
            assert attached.report.verified
            assert_same(attached, wanted, device="cuda:0")
        assert keeper.models()[0].num_reloads == 1
        del attached
        gc.collect()


def test_cache_detects_flipped_bit_in_device_memory(llama, allocated) -> None:
    with ps.cache.WeightCache(device="cuda:0") as keeper:
        keeper.keep("llama", llama)
        attached = ps.cache.attach("llama")
        for row in keeper.member.weights[0].memory.rows:
            row[:1] ^= 1
        deadline = time.monotonic() + 60
        while attached.lease_state != "damaged":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(ps.IntegrityError):
            attached.check()
        attached.close()  # the cache waits for this before it frees the memory
        del attached
        gc.collect()
        while keeper.models()[0].num_reloads == 0:
            assert time.monotonic() < deadline and keeper.models()[0].state != "lost", keeper.models()
            time.sleep(0.05)
        with ps.cache.attach("llama") as attached:
            assert_same(attached, by_safetensors(llama), device="cuda:0")
        del attached
        gc.collect()


@pytest.mark.gpus(2)
def test_attach_to_wrong_device_is_rejected(llama) -> None:
    with KeeperProcess([str(llama), "--device", "cuda:1"], timeout_s=120):
        with pytest.raises(ps.ConfigError, match="kept on cuda:1"):
            ps.cache.attach("llama", device="cuda:0", timeout_s=0.0)
        assert str(next(iter(ps.cache.attach("llama").values())).device) == "cuda:1"
