"""A cache that demotes idle models to lower tiers and promotes them again."""

from __future__ import annotations

import gc
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.compare import assert_same, by_safetensors
from tests.support.keeper import KeeperProcess
from typer.testing import CliRunner

import penstock as ps
from penstock.cache import attached as attaching
from penstock.cli.main import app
from penstock.memory.memfd import shared_at
from penstock.testing.checkpoints import write_llama
from penstock.timing import Timing

BOUND = 45_000_000
"""Memory limit in bytes that fits one model but not two."""


@pytest.fixture(autouse=True)
def runtime(monkeypatch) -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="pk-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    monkeypatch.setattr(attaching, "TIMING", Timing(lease_renew_s=0.1))
    yield directory
    gc.collect()
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    directories = {name: tmp_path_factory.mktemp("kept") / name for name in ("a", "b", "c")}
    for seed, directory in enumerate(directories.values()):
        write_llama(directory, total_bytes=30_000_000, seed=seed)
    return directories


@pytest.fixture(scope="module")
def wanted(models) -> dict[str, dict[str, torch.Tensor]]:
    return {name: by_safetensors(directory) for name, directory in models.items()}


def tiers(keeper: ps.cache.WeightCache) -> dict[str, str]:
    return {model.model: model.tier for model in keeper.models()}


def wait_until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


def test_model_is_demoted_and_promoted_without_source(models, wanted, tmp_path) -> None:
    with ps.cache.WeightCache(memory_bytes=BOUND, disk=tmp_path / "spill") as keeper:
        keeper.keep("a", models["a"])
        memory = weakref.ref(shared_at(keeper.member.weights[0].regions.memories[0].address, 1))
        keeper.keep("b", models["b"])
        assert tiers(keeper) == {"a": "disk", "b": "host"}
        assert memory() is None, "the memory must be released"
        assert not list((tmp_path / "spill").iterdir()), "the files must have no names"
        moved = models["a"].rename(models["a"].with_name("away"))  # the source is gone
        try:
            for name in ("a", "b", "a"):
                attached = ps.cache.attach(name, verify=True)
                assert_same(attached, wanted[name])
                assert tiers(keeper)[name] == "host"
                del attached
                gc.collect()
                wait_until(lambda: not any(model.num_attached for model in keeper.models()))
        finally:
            moved.rename(models["a"])
        stats = keeper.stats()
        assert stats.links["source", "host"].num_moves == 2
        assert stats.links["disk", "host"].num_moves == 3
        assert stats.tiers["host"].peak_bytes <= BOUND


def test_model_in_use_is_not_demoted(models, wanted, tmp_path) -> None:
    with ps.cache.WeightCache(memory_bytes=BOUND, disk=tmp_path) as keeper:
        keeper.keep("a", models["a"])
        attached = ps.cache.attach("a")
        with pytest.raises(ps.errors.BudgetTooSmall) as caught:
            keeper.keep("b", models["b"])
        assert caught.value.minimum_bytes > 59_000_000
        assert tiers(keeper) == {"a": "host"}
        attached.check()
        attached.close()
        wait_until(lambda: not keeper.models()[0].num_attached)
        keeper.keep("b", models["b"])
        with ps.cache.attach("b"), pytest.raises(ps.PenstockError, match="cannot be brought back now"):
            ps.cache.attach("a", timeout_s=0.0)
        assert_same(attached, wanted["a"])  # mapped host memory stays valid
        with pytest.raises((ps.errors.StaleDescriptor, ps.errors.PeerLost)):
            attached.check()
        assert_same(ps.cache.attach("a", timeout_s=20.0, verify=True), wanted["a"])


def test_fetch_promotes_demoted_model(models, wanted, tmp_path) -> None:
    with ps.cache.WeightCache(memory_bytes=BOUND, disk=tmp_path) as keeper:
        keeper.keep("a", models["a"])
        keeper.keep("b", models["b"])
        with ps.join("a") as fleet:
            tensors: dict[str, torch.Tensor] = {}
            report = fleet.fetch(tensors)
            assert_same(tensors, wanted["a"])
            assert report.storage_bytes == 0
        assert tiers(keeper) == {"a": "host", "b": "disk"}


def test_model_is_reread_from_source_if_disk_tier_is_small(models, wanted, tmp_path) -> None:
    with ps.cache.WeightCache(memory_bytes=BOUND, disk=tmp_path, disk_bytes=35_000_000) as keeper:
        for name, directory in models.items():
            keeper.keep(name, directory)
        assert tiers(keeper) == {"a": "source", "b": "disk", "c": "host"} or tiers(keeper) == {
            "a": "disk",
            "b": "source",
            "c": "host",
        }
        for name in models:
            assert_same(ps.cache.attach(name, verify=True, timeout_s=20.0), wanted[name])
            gc.collect()
            wait_until(lambda: not any(model.num_attached for model in keeper.models()))
        assert keeper.stats().links["source", "host"].num_moves >= 4
        assert keeper.stats().tiers["disk"].peak_bytes <= 35_000_000


def test_model_is_reread_from_source_if_disk_tier_is_full(models, wanted, small_disk, caplog) -> None:
    with ps.cache.WeightCache(memory_bytes=BOUND, disk=small_disk(10 << 20)) as keeper:  # without a known limit
        keeper.keep("a", models["a"])
        keeper.keep("b", models["b"])
        assert tiers(keeper) == {"a": "source", "b": "host"}
        assert "from host to disk: cannot write: No space left" in caplog.text
        for name in ("a", "b"):
            assert_same(ps.cache.attach(name, verify=True, timeout_s=20.0), wanted[name])
            gc.collect()
            wait_until(lambda: not any(model.num_attached for model in keeper.models()))
        assert keeper.stats().tiers["disk"].used_bytes == 0


def test_model_with_missing_source_stays_listed(models, wanted, tmp_path) -> None:
    source = tmp_path / "a"
    shutil.copytree(models["a"], source)
    with ps.cache.WeightCache(memory_bytes=BOUND, disk=tmp_path / "spill", disk_bytes=4096) as keeper:
        keeper.keep("a", source)
        keeper.keep("b", models["b"])
        assert tiers(keeper) == {"a": "source", "b": "host"}
        away = source.rename(tmp_path / "away")
        with pytest.raises(ps.PenstockError):
            ps.cache.attach("a", timeout_s=0.0)
        assert tiers(keeper)["a"] == "source"
        away.rename(source)
        assert_same(ps.cache.attach("a", timeout_s=20.0, verify=True), wanted["a"])


def test_changed_source_is_not_loaded(models, wanted, tmp_path) -> None:
    source = tmp_path / "a"
    shutil.copytree(models["a"], source)
    with ps.cache.WeightCache(memory_bytes=BOUND, disk=tmp_path / "spill", disk_bytes=4096) as keeper:
        keeper.keep("a", source)
        keeper.keep("b", models["b"])
        shutil.rmtree(source)
        shutil.copytree(models["c"], source)
        with pytest.raises(ps.PenstockError, match="was kept in revision"):
            ps.cache.attach("a", timeout_s=0.0)
        assert tiers(keeper)["a"] == "source"
        assert {weights.identity.model for weights in keeper.member.weights} == {"a", "b"}


def test_corrupt_memory_is_reloaded_before_demotion(models, wanted, tmp_path) -> None:
    with ps.cache.WeightCache(memory_bytes=BOUND, disk=tmp_path) as keeper:
        keeper.keep("a", models["a"])
        for row in keeper.member.weights[0].memory.rows:
            row[:1] ^= 1
        wait_until(lambda: keeper.models()[0].num_reloads == 1)  # each heartbeat checks a chunk
        assert tiers(keeper) == {"a": "host"}
        keeper.keep("b", models["b"])
        assert tiers(keeper) == {"a": "disk", "b": "host"}
        assert_same(ps.cache.attach("a", timeout_s=20.0), wanted["a"])
        links = keeper.stats().links
        assert (links["source", "host"].num_moves, links["host", "disk"].num_moves) == (3, 2)


def test_corrupt_memory_without_source_is_not_demoted(models, tmp_path) -> None:
    source = tmp_path / "a"
    shutil.copytree(models["a"], source)
    with ps.cache.WeightCache(memory_bytes=BOUND, disk=tmp_path / "spill") as keeper:
        keeper.keep("a", source)
        shutil.rmtree(source)
        for row in keeper.member.weights[0].memory.rows:
            row[:1] ^= 1
        wait_until(lambda: keeper.models()[0].state == "lost")
        keeper.keep("b", models["b"])
        with pytest.raises(ps.IntegrityError, match=r"chunk . of 'a' changed in memory"):
            keeper.check()
        assert tiers(keeper) == {"a": "source", "b": "host"}
        keeper.drop("a", drain_s=5)
        keeper.check()


def test_dropping_demoted_model_frees_memory(models, tmp_path) -> None:
    with ps.cache.WeightCache(memory_bytes=BOUND, disk=tmp_path) as keeper:
        keeper.keep("a", models["a"])
        keeper.keep("b", models["b"])
        keeper.drop("a", drain_s=5)
        keeper.drop("b", drain_s=5)
        assert keeper.models() == []
        assert {tier.used_bytes for tier in keeper.stats().tiers.values()} == {0}
        with pytest.raises(ps.NotFound):
            ps.cache.attach("a", timeout_s=0.0)


def test_alternating_engines_always_receive_correct_bytes(models, wanted, tmp_path) -> None:
    faults: list[BaseException] = []

    def engine(name: str) -> None:
        try:
            for _ in range(4):
                with ps.cache.attach(name, timeout_s=60.0, verify=True) as attached:
                    assert_same(attached, wanted[name])
                    attached.check()
        except BaseException as error:
            faults.append(error)
            raise

    with ps.cache.WeightCache(memory_bytes=BOUND, disk=tmp_path) as keeper:
        for name in ("a", "b"):
            keeper.keep(name, models[name])
        threads = [threading.Thread(target=engine, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults
        assert keeper.stats().tiers["host"].peak_bytes <= BOUND


def test_demotion_without_limit_or_directory_raises(tmp_path) -> None:
    with pytest.raises(ps.ConfigError, match="require memory_bytes"):
        ps.cache.WeightCache(disk=tmp_path)
    with pytest.raises(ps.ConfigError, match="are in host memory"):
        ps.cache.WeightCache(memory_bytes="1G", host_bytes=BOUND)
    with pytest.raises(ps.ConfigError, match="requires disk"):
        ps.cache.WeightCache(disk_bytes="1G")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ps.ConfigError, match="cannot write spilled bytes"):
        ps.cache.WeightCache(memory_bytes=BOUND, disk=tmp_path / "file").open()


def test_keep_command_demotes_models_above_memory_limit(models, wanted, tmp_path) -> None:
    uris = [str(models[name]) for name in ("a", "b")]
    bounds = ["--memory-bytes", str(BOUND), "--disk", str(tmp_path)]
    with KeeperProcess([*uris, *bounds]) as keeper:
        assert any("a in disk" in line for line in keeper.errors)
        shown = CliRunner().invoke(app, ["status"]).stdout
        rows = {line.split()[3]: line for line in shown.splitlines()[1:]}
        assert " disk " in rows["a"] and " host " in rows["b"], shown
        assert_same(ps.cache.attach("a", verify=True), wanted["a"])
