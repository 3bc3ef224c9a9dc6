"""vLLM generates the same tokens with processed parameters from a cache, and the second engine does not load."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.test_vllm import run, tokens
from tests.support.keeper import KeeperProcess

import penstock as ps

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("own_runtime"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
FINISHED = {"load_format": "penstock", "model_loader_extra_config": {"finished": True}}
BIND = "VLLM_CPU_OMP_THREADS_BIND"
"""Engines with several ranks on one host need `nobind`."""


@pytest.fixture
def keeper() -> Iterator[KeeperProcess]:
    with KeeperProcess(["--accept", "--memory-bytes", "256M"]) as process:
        yield process


@pytest.mark.parametrize("name", ["llama", "tied_llama"])
def test_second_engine_attaches_without_loading(
    name: str, keeper: KeeperProcess, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    llama: Path = request.getfixturevalue(name)
    (tmp_path / "true").mkdir()
    true = tokens(tmp_path / "true", model=str(llama), load_format="auto")
    for said, unsaid in (("handed over", "processed parameters"), ("processed parameters", "handed over")):
        done = run(tmp_path, model=str(llama), **FINISHED)
        assert str(true) in done.stdout, done.stderr[-4000:]
        log = done.stdout + done.stderr
        assert said in log and unsaid not in log
    # Other values with the same shapes are a different model.
    (other,) = llama.glob("*.safetensors")
    data = bytearray(other.read_bytes())
    data[-200:] = bytes(reversed(data[-200:]))
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in llama.iterdir():
        (changed / file.name).write_bytes(bytes(data) if file == other else file.read_bytes())
    done = run(tmp_path, model=str(changed), **FINISHED)
    assert "handed over" in done.stdout + done.stderr


def test_each_rank_caches_separate_parameters(keeper: KeeperProcess, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "true").mkdir()
    true = tokens(tmp_path / "true", model=str(llama), load_format="auto")
    for said in ("handed over", "processed parameters"):
        done = run(tmp_path, {**os.environ, BIND: "nobind"}, model=str(llama), tensor_parallel_size=2, **FINISHED)
        assert str(true) in done.stdout, done.stderr[-4000:]
        assert (done.stdout + done.stderr).count(said) >= 2


def test_missing_cache_is_logged_and_engine_loads(llama: Path, tmp_path: Path) -> None:
    done = run(tmp_path, model=str(llama), **FINISHED)
    assert "TOKENS" in done.stdout, done.stderr[-4000:]
    assert "are not kept for the next engine" in done.stdout + done.stderr


def start(llama: Path, directory: Path, size: int, true: list[int]) -> str:
    """Run an engine of this size, check its tokens, and return its log."""
    done = run(directory, {**os.environ, BIND: "nobind"}, model=str(llama), tensor_parallel_size=size, **FINISHED)
    assert str(true) in done.stdout, done.stderr[-4000:]
    return done.stdout + done.stderr


def revisions() -> dict[str, str]:
    """Return a digest of the cached parameters' names, shapes and bytes for each rank."""
    holdings = [holding for member in ps.hub.status().members for holding in member.holdings if holding.kept]
    return {holding.identity.parallel["rank"]: holding.revision for holding in holdings}


@pytest.fixture
def true(llama: Path, tmp_path: Path) -> list[int]:
    (tmp_path / "true").mkdir()
    return tokens(tmp_path / "true", model=str(llama), load_format="auto")


@pytest.mark.timeout(900)
def test_engine_with_different_size_reuses_parameters(llama: Path, true: list[int], tmp_path: Path) -> None:
    kept: list[dict[str, str]] = []
    for sizes in ((1, 2), (2, 1)):
        with ps.cache.WeightCache(accept=True):
            for number, size in enumerate(sizes):
                log = start(llama, tmp_path, size, true)
                assert log.count("handed over: ") == size
                assert log.count(f"re-sharded from {sizes[0]} kept ranks") == number * size
            kept.append(revisions())
    # Parameters for another size give the same bytes as the files.
    assert sorted(kept[0]) == ["0/1", "0/2", "1/2"]
    assert kept[0] == kept[1]


@pytest.mark.timeout(900)
def test_unusable_parameters_are_loaded_again(
    llama: Path, true: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_STALL_S", "3")
    with ps.cache.WeightCache(accept=True) as keeper:
        start(llama, tmp_path, 2, true)
        (weights,) = [w for w in keeper.member.weights if w.identity.parallel["rank"] == "1/2"]
        weights.rows[2][5] ^= 1
        log = start(llama, tmp_path, 1, true)
        assert "is not made of the parameters of" in log and "re-sharded" not in log
        # These are the damaged rank, and the parameters that the engine with one rank handed over.
        for rank, revision in revisions().items():
            if rank != "0/2":
                keeper.drop(weights.identity.model, revision=revision)
        log = start(llama, tmp_path, 1, true)
        assert "of 2 ranks, rank 1 is not kept on this host" in log
        assert "re-sharded" not in log and "handed over: " in log
