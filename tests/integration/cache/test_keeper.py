"""Processes that attach to a cache: shared memory, restarts, draining and loss of the cache."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.compare import all_bits, assert_same, by_safetensors
from tests.support.fork_server import ForkServer
from tests.support.keeper import KeeperProcess

import penstock as ps
from penstock.cache import attached as attaching
from penstock.testing.checkpoints import write_llama
from penstock.timing import Timing

ENGINE = """
import json, sys
import penstock as ps
from tests.support.compare import all_bits
attached = ps.cache.attach("llama")
maps = [line for line in open("/proc/self/maps") if "memfd:penstock-arena" in line]
print(json.dumps({"bits": all_bits(attached), "path": attached.report.path, "wall_s": attached.report.wall_s,
                  "private": all(line.split()[1] == "rw-p" for line in maps), "num_maps": len(maps)}))
"""


@pytest.fixture(autouse=True)
def runtime(monkeypatch) -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="pk-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    monkeypatch.setattr(attaching, "TIMING", Timing(lease_renew_s=0.1))
    yield directory
    gc.collect()
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("kept") / "llama"
    write_llama(directory, total_bytes=30_000_000)
    return directory


@pytest.fixture(scope="module")
def wanted(llama: Path) -> dict[str, torch.Tensor]:
    return by_safetensors(llama)


@pytest.fixture
def keeper(llama: Path, fork_server: ForkServer) -> Iterator[KeeperProcess]:
    with KeeperProcess([str(llama)], fork_server=fork_server) as process:
        yield process


def wait_until(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


def test_consecutive_engines_attach_same_memory(keeper, wanted) -> None:
    for _ in range(2):
        found = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, check=True, timeout=60)
        found = json.loads(found.stdout)
        assert found["bits"] == all_bits(wanted)
        assert found["path"].startswith("shm, mapped: ")
        assert (found["num_maps"], found["private"]) == (1, True)
        assert found["wall_s"] < 5
    assert keeper.process.poll() is None


def test_engine_writes_do_not_change_cache(keeper, wanted) -> None:
    first, second = ps.cache.attach("llama", verify=False), ps.cache.attach("llama")
    assert second.report.verified and not first.report.verified
    first["model.norm.weight"].zero_()
    assert first["model.norm.weight"].eq(0).all()
    assert_same(second, wanted)
    assert_same(ps.cache.attach("llama"), wanted)


def test_attached_module_uses_cache_memory(keeper, wanted) -> None:
    class Part(torch.nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(
                torch.empty(wanted["lm_head.weight"].shape, dtype=torch.bfloat16, device=device)
            )
            self.tied = self.weight

    attached = ps.cache.attach("llama")

    class Module(torch.nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.lm_head = Part(device)

    for device in ("cpu", "meta"):
        module = Module(device)
        before = module.lm_head.weight
        with pytest.raises(ps.PlanError, match="do not fit"):
            attached.attach_into(module)
        assert module.lm_head.weight is before
        attached.attach_into(module, strict=False)
        assert module.lm_head.weight.data_ptr() == attached["lm_head.weight"].data_ptr()
        assert module.lm_head.tied is module.lm_head.weight
        assert (module.lm_head.weight is before) == (device == "cpu")


def test_attaching_different_tensors_to_tied_parameters_raises(keeper) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = torch.nn.Parameter(torch.empty_like(attached["lm_head.weight"]))
            self.lm_head, self.model = torch.nn.Module(), torch.nn.Module()
            self.model.embed_tokens = torch.nn.Module()
            self.lm_head.weight = self.model.embed_tokens.weight = shared

    attached = ps.cache.attach("llama")
    assert attached["lm_head.weight"].shape == attached["model.embed_tokens.weight"].shape
    module = Tied()
    before = module.lm_head.weight.data_ptr()
    with pytest.raises(ps.PlanError, match="are one memory"):
        attached.attach_into(module, strict=False)
    assert module.lm_head.weight.data_ptr() == before
    attached["lm_head.weight"].copy_(attached["model.embed_tokens.weight"])
    attached.attach_into(module, strict=False)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    with pytest.raises(ps.PlanError, match="not initialised"):
        attached.attach_into(torch.nn.ModuleDict({"lm_head": torch.nn.LazyLinear(4)}), strict=False)


def test_missing_model_raises_not_found(llama) -> None:
    begun = time.monotonic()
    with pytest.raises(ps.NotFound, match="no hub runs"):
        ps.cache.attach("llama", timeout_s=0.0)
    with ps.join("llama") as fleet:
        fleet.fetch({}, fallback=llama)
        with pytest.raises(ps.NotFound, match="here: not kept"):  # a member holds the model, but may change it
            ps.cache.attach("llama", timeout_s=0.0)
        with pytest.raises(ps.NotFound, match="no weight cache on this host has 'other'"):
            ps.cache.attach("other", timeout_s=0.0)
    assert time.monotonic() - begun < 20
    with pytest.raises(ps.HubUnavailable):
        ps.cache.attach("llama", connection="unix:///nowhere/hub.sock", timeout_s=0.0)


def test_attach_waits_for_cache_to_start(llama, wanted) -> None:
    with KeeperProcess([str(llama)]):
        assert_same(ps.cache.attach("llama", timeout_s=30.0, device="cpu"), wanted)


def test_stopping_cache_waits_for_attached_engine(keeper, wanted) -> None:
    attached = ps.cache.attach("llama")
    keeper.process.send_signal(signal.SIGTERM)
    wait_until(lambda: attached.lease_state == "draining")
    with pytest.raises(ps.NotFound):
        ps.cache.attach("llama", timeout_s=0.0)
    attached.check()
    assert keeper.process.poll() is None
    attached.close()
    assert attached.lease_state == "given back"
    assert keeper.process.wait(timeout=20) == 0
    with pytest.raises((ps.errors.PeerLost, ps.errors.StaleDescriptor)):
        attached.check()
    assert_same(attached, wanted)  # mapped host memory stays valid


def test_killed_cache_raises_peer_lost(keeper, wanted) -> None:
    attached = ps.cache.attach("llama")
    keeper.process.send_signal(signal.SIGKILL)
    keeper.process.wait(timeout=20)
    with pytest.raises(ps.errors.PeerLost):
        attached.check()
    wait_until(lambda: attached.lease_state == "lost")
    assert_same(attached, wanted)
    attached.close()


def test_several_models_share_memory_limit(llama, wanted, tmp_path) -> None:
    write_llama(tmp_path / "draft", total_bytes=3_000_000, seed=7)
    draft = by_safetensors(tmp_path / "draft")
    with ps.cache.WeightCache(memory_bytes=40_000_000) as keeper:
        keeper.keep("llama", llama)
        keeper.keep("draft", tmp_path / "draft")
        with pytest.raises(ps.errors.BudgetTooSmall) as caught:
            keeper.keep("again", llama)
        assert caught.value.minimum_bytes > 60_000_000
        with pytest.raises(ps.ConfigError, match="already kept"):
            keeper.keep("llama", llama)
        assert_same(ps.cache.attach("llama"), wanted)
        assert_same(ps.cache.attach("draft"), draft)
        assert [model.model for model in keeper.models()] == ["llama", "draft"]


def test_dropping_attached_model_raises(llama) -> None:
    with ps.cache.WeightCache() as keeper:
        keeper.keep("llama", llama)
        attached = ps.cache.attach("llama")
        with pytest.raises(ps.errors.SourceBusy, match="1 engines and 0 readers"):
            keeper.drop("llama", drain_s=0.1)
        assert keeper.models()[0].num_attached == 1
        attached.check()
        tensor = attached["model.norm.weight"]
        del attached
        gc.collect()
        assert keeper.models()[0].num_attached == 1  # a tensor still exists
        del tensor
        gc.collect()
        wait_until(lambda: keeper.models()[0].num_attached == 0)
        keeper.drop("llama", drain_s=5)
        assert keeper.models() == []
        with pytest.raises(ps.NotFound):
            ps.cache.attach("llama", timeout_s=0.0)
        with pytest.raises(ps.NotFound):
            keeper.drop("llama")


def test_cache_holds_two_revisions_of_model(llama, wanted, tmp_path) -> None:
    write_llama(tmp_path / "new", total_bytes=30_000_000, seed=3)
    with ps.cache.WeightCache() as keeper:
        keeper.keep("llama", llama)
        keeper.keep("llama", tmp_path / "new")
        wait_until(lambda: [holding.kept for holding in keeper.member.hub.status().members[0].holdings] == [True, True])
        old = keeper.models()[0].revision
        with pytest.raises(ps.ConfigError, match="several revisions") as caught:
            ps.cache.attach("llama")
        short = next(word.strip(",") for word in caught.value.message.split() if old.startswith(word.strip(",")))
        for found in (old, short):  # the error states the short form
            assert_same(ps.cache.attach("llama", revision=found), wanted)
        keeper.drop("llama", revision=old, drain_s=5)
        assert_same(ps.cache.attach("llama"), by_safetensors(tmp_path / "new"))


def test_attached_engine_uses_no_reader_slot(llama, wanted) -> None:
    with ps.cache.WeightCache(max_readers=1) as keeper:
        keeper.keep("llama", llama)
        engines = [ps.cache.attach("llama") for _ in range(3)]
        with ps.join("llama") as fleet:
            tensors: dict[str, torch.Tensor] = {}
            report = fleet.fetch(tensors)
        assert report.storage_bytes == 0
        assert_same(tensors, wanted)
        assert keeper.models()[0].num_attached == len(engines)
        del engines


def test_closing_in_forked_child_keeps_parent_lease(keeper) -> None:
    attached = ps.cache.attach("llama")
    child = os.fork()
    if child == 0:
        attached.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    time.sleep(0.5)
    assert attached.lease_state == "kept"


def test_keep_command_reports_invalid_arguments(llama, tmp_path) -> None:
    with pytest.raises(ChildProcessError, match="BudgetTooSmall"):
        KeeperProcess([str(llama), "--memory-bytes", "1M"])
    with pytest.raises(ChildProcessError, match="NotFound"):
        KeeperProcess([str(tmp_path / "none")])
    with pytest.raises(ChildProcessError, match="1 names for 2"):
        KeeperProcess([str(llama), str(llama), "--model", "a"])
