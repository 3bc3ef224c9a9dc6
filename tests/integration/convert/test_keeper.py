"""Conversions into a cache equal those into a directory, and nothing is written to disk."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.compare import assert_same, by_safetensors

import penstock as ps
import penstock_convert
from penstock.cache import attached as attaching
from penstock.errors import BudgetTooSmall, ConfigError, OperationFailed
from penstock.fetcher.to_files import fetch_to_files
from penstock.testing.checkpoints import write_llama
from penstock.timing import Timing
from penstock_convert.workers.launch import LocalLauncher

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")


@pytest.fixture(autouse=True)
def _runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="pk-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    monkeypatch.setattr(attaching, "TIMING", Timing(lease_renew_s=0.1))
    yield
    gc.collect()
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("into") / "llama"
    write_llama(directory, total_bytes=12_000_000, shards=2)
    return directory


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, Any]]:
    """Return the arguments of every conversion. The workers are forked from one process."""
    with LocalLauncher() as launcher:
        yield {
            "to": "cast:F32",
            "devices": "cpu",
            "workers": penstock_convert.WorkerSettings(num_workers=2, launcher=launcher, task_bytes="1M"),
        }


@pytest.fixture(scope="module")
def wanted(source: Path, told, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the revision and the tensors of the same conversion into a directory."""
    into = tmp_path_factory.mktemp("wanted") / "f32"
    return ps.convert(source, into, **told).revision, by_safetensors(into)


def test_converting_process_serves_its_result(source: Path, wanted, tmp_path: Path) -> None:
    revision, tensors = wanted
    command = [sys.executable, "-m", "penstock.cli.main", "convert", str(source), "cache:f32", "--to", "cast:F32"]
    process = subprocess.Popen(
        [*command, "--devices", "cpu", "--workers", "2", "--task-bytes", "1M"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        assert process.stdout.readline().split() == ["cache:f32", revision]
        while "keeping f32" not in (line := process.stderr.readline()):
            assert line, "it ended"
        with ps.cache.attach("f32", verify=True, timeout_s=10) as attached:
            assert attached.report.revision == revision
            assert_same(attached, tensors)
        with ps.join("f32") as fleet:
            fetched: dict[str, torch.Tensor] = {}
            report = fleet.fetch(fetched, timeout_s=10)
            assert report.storage_bytes == 0
            assert_same(fetched, tensors)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
    assert not list(tmp_path.iterdir())


def test_converted_adapter_keeps_its_file_name(told, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    weights = {"base_model.model.a.lora_A.weight": torch.ones(4, 8)}
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors")
    with ps.cache.WeightCache() as keeper:
        ps.convert(tmp_path / "adapter", keeper.into("adapter"), **told)
        with ps.join("adapter") as fleet:
            fetch_to_files(fleet, to=tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["adapter_model.safetensors"]
    assert_same(by_safetensors(tmp_path / "out"), weights)


def test_converted_model_moves_between_memory_tiers(source: Path, told, wanted, tmp_path: Path) -> None:
    revision, tensors = wanted
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with ps.cache.WeightCache(memory_bytes=nbytes + 4096, disk=tmp_path) as keeper:
        report = ps.convert(source, keeper.into("f32"), **told)
        assert (report.uri, report.revision, report.num_resumed) == ("cache:f32", revision, 0)
        keeper.keep("plain", str(source))
        assert [one.tier for one in keeper.models()] == ["disk", "host"]
        with ps.cache.attach("f32", verify=True, timeout_s=10) as attached:
            assert_same(attached, tensors)
        with pytest.raises(ConfigError, match="already kept"):
            ps.convert(source, keeper.into("f32"), **told)
        assert [one.model for one in keeper.models()] == ["f32", "plain"]


def test_failed_conversion_leaves_no_cached_model(source: Path, told, wanted) -> None:
    _, tensors = wanted
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with ps.cache.WeightCache(memory_bytes=nbytes) as keeper:
        raises = [{"op": "function", "function": "tests.support.jobs:raises"}]
        for error, other in (
            (OperationFailed, told | {"operations": raises}),
            (ConfigError, told | {"operations": [{"op": "reshard", "to": 2, "heads": [32, 8]}], "to": None}),
            (BudgetTooSmall, told | {"workers": dataclasses.replace(told["workers"], memory_bytes="100K")}),
        ):
            with pytest.raises(error):
                ps.convert(source, keeper.into("f32"), **other)
            assert keeper.models() == [] == keeper.member.weights
            assert keeper.stats().tiers["host"].used_bytes == 0
        ps.convert(source, keeper.into("f32"), **told)
        with pytest.raises(BudgetTooSmall):
            ps.convert(source, keeper.into("more"), **told)
        assert [one.model for one in keeper.models()] == ["f32"]


def test_cache_uri_without_cache_is_refused(source: Path, told) -> None:
    with pytest.raises(ConfigError, match="cannot write to a weight cache through a URI"):
        ps.convert(source, "cache:f32", **told)


def test_published_memory_is_read_only(source: Path, told) -> None:
    with ps.cache.WeightCache() as keeper:
        ps.convert(source, keeper.into("f32"), **told)
        (holding,) = keeper.member.weights
        (region,) = holding.regions.memories
        fd = os.open(region.owner.path, os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
        finally:
            os.close(fd)
