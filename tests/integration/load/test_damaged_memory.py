"""Weights that change in memory after verification are not served, and a cache loads them again.

The tests flip a bit in the memory of a running process.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.compare import assert_same, by_safetensors
from tests.support.damage import arenas
from tests.support.fork_server import ForkServer
from tests.support.keeper import KeeperProcess

import penstock as ps
from penstock.cache import attached as attaching
from penstock.hub.client import HubClient
from penstock.hub.local_hub import find_hub
from penstock.peer.local_weights import LocalWeights
from penstock.testing.checkpoints import write_llama
from penstock.timing import Timing


@pytest.fixture
def runtime(monkeypatch) -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="pk-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    monkeypatch.setattr(attaching, "TIMING", Timing(lease_renew_s=0.1))
    yield directory
    gc.collect()
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "large"
    write_llama(directory, total_bytes=30_000_000)
    return directory


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "small"
    write_llama(directory, total_bytes=3_000_000, seed=7)
    return directory


def wait_until(happens, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def corruption_reasons() -> list[str]:
    """Return the corruption that members on this host report about their holdings."""
    with HubClient.connect(find_hub()) as hub:
        return [held.why for member in hub.status().members for held in member.holdings]


def test_cache_reloads_corrupt_model_and_serves_other_model(runtime, large, small, fork_server: ForkServer) -> None:
    wanted, others = by_safetensors(large), by_safetensors(small)
    with KeeperProcess([str(large), str(small)], fork_server=fork_server) as keeper:
        engine, other = ps.cache.attach("large"), ps.cache.attach("small")
        damaged = arenas(keeper.process.pid)[0]
        assert damaged.nbytes > 20_000_000
        damaged.flip()
        wait_until(lambda: engine.lease_state == "damaged")
        with pytest.raises(ps.IntegrityError, match="bytes of this memory changed"):
            engine.check()
        with ps.cache.attach("large", timeout_s=30.0) as again:
            assert again.report.verified
            assert_same(again, wanted)
        wait_until(lambda: any("loaded again and verified" in line for line in keeper.errors))
        assert any("chunk 0 of 'large' changed in memory" in line for line in keeper.errors)
        wait_until(
            lambda: any(
                "chunk 0 of 'large' changed in memory" in why and "loaded again" in why for why in corruption_reasons()
            )
        )
        assert other.lease_state == "kept"
        other.check()
        assert_same(ps.cache.attach("small"), others)
        assert keeper.process.poll() is None
        engine.close()


def test_cache_exits_if_corrupt_model_cannot_be_reloaded(runtime, large, tmp_path, fork_server: ForkServer) -> None:
    source = tmp_path / "model"
    shutil.copytree(large, source)
    with KeeperProcess([str(source)], fork_server=fork_server) as keeper:
        shutil.rmtree(source)
        arenas(keeper.process.pid)[0].flip()
        assert keeper.process.wait(timeout=60) == 3
        wait_until(lambda: any("IntegrityError" in line for line in keeper.errors))
        said = "".join(keeper.errors)
        assert "chunk 0 of 'model' changed in memory" in said and "could not be loaded again" in said, said


def test_corrupt_model_is_reloaded_from_members(runtime, small) -> None:
    with ps.join("small") as fleet, ps.cache.WeightCache() as keeper:
        fleet.fetch({}, fallback=small)
        keeper.keep("small", small)
        keeper.member.weights[0].memory.rows[1][5] ^= 1
        wait_until(lambda: keeper.models()[0].num_reloads == 1)
        (holding,) = keeper.member.weights
        assert holding.fetch.path == f"100% shm <- {fleet.member.id[:8]}"
        with ps.cache.attach("small", timeout_s=10.0) as attached:
            assert_same(attached, by_safetensors(small))


def test_weight_cache_object_reports_corrupt_model(runtime, small, tmp_path) -> None:
    source = tmp_path / "model"
    shutil.copytree(small, source)
    with ps.cache.WeightCache() as keeper:
        keeper.keep("model", source)
        keeper.member.weights[0].memory.rows[1][5] ^= 1
        wait_until(lambda: keeper.models()[0].num_reloads == 1)
        (kept,) = keeper.models()
        assert (kept.state, kept.tier) == ("kept", "host")
        assert "changed in memory" in kept.why and "loaded again and verified" in kept.why
        keeper.check()
        keeper.serve(timeout_s=0.0)
        shutil.rmtree(source)
        keeper.member.weights[0].memory.rows[1][5] ^= 1
        wait_until(lambda: keeper.models()[0].state == "lost")
        assert "could not be loaded again" in keeper.models()[0].why
        with pytest.raises(ps.IntegrityError, match="chunk 0 of 'model' changed in memory"):
            keeper.serve(timeout_s=60.0)


def test_attach_detects_flipped_byte_by_default(runtime, large, monkeypatch) -> None:
    """The cache does not check its own memory here. The engine detects the corruption, and the cache repairs it."""
    monkeypatch.setattr(LocalWeights, "spot_check", lambda self, chance: None)
    with ps.cache.WeightCache() as keeper:
        keeper.keep("large", large)
        with ps.cache.attach("large") as attached:
            assert attached.report.verified and "verified here" in attached.report.summary()
        keeper.member.weights[0].memory.rows[-1][-1] ^= 1
        with ps.cache.attach("large", verify=False) as attached:
            assert not attached.report.verified and "not verified here" in attached.report.summary()
            with pytest.raises(AssertionError):
                assert_same(attached, by_safetensors(large))
        with ps.cache.attach("large") as attached:
            assert_same(attached, by_safetensors(large))
        assert keeper.models()[0].num_reloads == 1


def test_member_with_changed_memory_stops_serving(host, large) -> None:
    worker = host.start(
        model="m", fallback=str(large), constants={"penstock.holding.weight_layout.CHUNK_BYTES": 16 << 20}
    )
    worker.wait_for("digests")
    worker.wait_for("serving")
    memory = arenas(worker.process.pid)[0]
    memory.flip()
    failed = worker.wait_for("failed", timeout_s=60.0)
    assert failed["error"] == "IntegrityError"
    assert "chunk 0 of 'm' changed in memory" in failed["message"]
    assert worker.process.wait(timeout=30) == 3


def test_status_reports_changed_memory_until_new_fetch(runtime, small) -> None:
    with ps.join("m") as fleet:
        weights: dict[str, torch.Tensor] = {}
        fleet.fetch(weights, fallback=small)
        fleet.check()
        weights["lm_head.weight"].view(-1).view(torch.uint8)[0] ^= 1
        wait_until(lambda: any("'m' changed in memory" in why for why in corruption_reasons()))
        with pytest.raises(ps.IntegrityError, match="of 'm' changed in memory"):
            fleet.check()
        with ps.join("m") as reader, pytest.raises(ps.NotFound):
            reader.fetch({}, timeout_s=1.0)
        fleet.fetch(weights, fallback=small)
        fleet.check()
        assert_same(weights, by_safetensors(small))


def test_chunk_changed_during_fetch_fails_fetch(host, large) -> None:
    worker = host.start(model="m", fallback=str(large), storage_pause_s=0.05)
    worker.wait_for("joined")
    host.wait_for_holdings(lambda held: any(sum(stop - start for start, stop in one.have) > 20 for one in held))
    memory = arenas(worker.process.pid)[0]
    for offset in range(0, memory.nbytes, 256 << 10):  # a bit of each chunk; those that are yet to come mend theirs
        memory.flip(offset)
    failed = worker.wait_for("failed", timeout_s=60.0)
    assert failed["error"] == "IntegrityError" and "changed in memory" in failed["message"]
    assert not failed["num_tensors"], "an empty dict stays empty"
