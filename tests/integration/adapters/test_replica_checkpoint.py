"""The checkpoint for an engine's replica comes from a cache, from a fleet or from storage, and the log says which."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("starlette")

from tests.support.servers.hugging_face import HuggingFaceServer  # noqa: E402

import penstock as ps  # noqa: E402
from penstock.errors import ConfigError, SourceTruncated  # noqa: E402
from penstock.fetcher.storage_initializer import copy_other_files  # noqa: E402
from penstock.spi import engine_weights as replica  # noqa: E402
from penstock.testing.checkpoints import write_llama  # noqa: E402
from penstock.types import MIB  # noqa: E402
from penstock_hub.auth import Auth  # noqa: E402
from penstock_hub.directory import Directory  # noqa: E402
from penstock_hub.server import HubThread, bind  # noqa: E402
from penstock_hub.store import MemoryStore  # noqa: E402

LOG = logging.getLogger("engine")
ALONE = replica.RankInfo(rank=lambda: 0, device=lambda: "cpu", group=lambda: None)


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Use a separate hub in a directory whose name is short enough for a socket."""
    caplog.set_level(logging.INFO, "engine")
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
        yield


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_llama(tmp_path / "llama", total_bytes=4 * MIB, shards=2)
    return tmp_path / "llama"


def read(files: Path, wanted: Any = None, **extra: Any) -> dict[str, torch.Tensor]:
    """Load as an engine does: check the options and copy each tensor as it arrives."""
    options = replica.read_options(extra)
    tensors = replica.checkpoint(str(files), wanted, options, ALONE, model=str(files), log=LOG, progress=False)
    return {name: tensor.clone() for name, tensor in tensors}


def assert_equal(found: Mapping[str, torch.Tensor], true: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == true.keys()
    assert all(torch.equal(found[name].view(torch.uint8), true[name].view(torch.uint8)) for name in true)


def test_replica_falls_back_from_cache_to_storage(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    true = ps.load(str(llama), "cpu")
    with ps.cache.WeightCache(memory_bytes=40_000_000) as keeper:
        keeper.keep("kept", str(llama))
        assert_equal(read(llama, weight_cache="kept"), true)
        assert "no copy" in caplog.text
        only = {name for name in true if "norm" in name}
        assert read(llama, only.__contains__, weight_cache="kept").keys() == only
        # The name is right but the weights differ.
        write_llama(tmp_path / "other", total_bytes=2 * MIB)
        with pytest.raises(ConfigError, match="different tensors from the checkpoint") as caught:
            read(tmp_path / "other", weight_cache="kept")
        assert str(tmp_path / "other") in str(caught.value)
    caplog.clear()
    assert_equal(read(llama, weight_cache="kept"), true)
    assert "not attached to kept in the weight cache" in caplog.text
    assert str(llama) in caplog.text


def test_replica_serves_weights_unless_disabled(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = read(llama, fleet="seeds")
    caplog.clear()
    assert_equal(read(llama, fleet="seeds", serve=False), first)
    assert " <- " in caplog.text


def test_truncated_replica_shard_yields_no_tensor(llama: Path) -> None:
    shard = max(llama.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-64])
    tensors = replica.checkpoint(str(llama), None, {}, ALONE, model=str(llama), log=LOG, progress=False)
    with pytest.raises(SourceTruncated, match=shard.name):
        next(tensors)


@pytest.mark.parametrize(
    "extra",
    [
        {"weight_cache": ""},
        {"weight_cache": True},
        {"fleet": "f", "distributed": True},
        {"weight_cache": "m", "distributed": True},
        {"finished": True, "distributed": True},
    ],
)
def test_invalid_option_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replica.read_options(extra)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Use a hub from the environment, with defaults for everything else."""
    directory = os.environ["PENSTOCK_RUNTIME_DIR"]
    running = HubThread(Directory(MemoryStore(), fresh=True), bind(f"unix://{directory}/own.sock", Auth()))
    running.start()
    monkeypatch.setenv("PENSTOCK_HUB", running.url)
    yield running.url
    running.stop()


def test_replica_joins_hub_from_environment(llama: Path, hub: str, caplog: pytest.LogCaptureFixture) -> None:
    first = read(llama)
    assert f"storage {llama}" in caplog.text
    # This heartbeat is sent at the end of the fetch, which does not wait for it.
    deadline = time.monotonic() + 10
    states: list[str] = []
    while states != ["whole"] and time.monotonic() < deadline:
        (member,) = ps.hub.status("llama").members
        states = [holding.state for holding in member.holdings]
    assert states == ["whole"]
    caplog.clear()
    assert_equal(read(llama, serve=False), first)
    assert " <- " in caplog.text
    assert "storage" not in caplog.text.partition("verified")[0]
    caplog.clear()
    assert_equal(read(llama, fleet=False), first)
    assert f"storage {llama}" in caplog.text or str(llama) in caplog.text
    assert " <- " not in caplog.text


def test_new_model_weights_replace_previous_weights(llama: Path, hub: str) -> None:
    former = read(llama)
    write_llama(llama, total_bytes=4 * MIB, shards=2, seed=1)
    assert_equal(read(llama), ps.load(str(llama), "cpu"))
    (member,) = ps.hub.status("llama").members
    assert len(member.holdings) == 1
    assert not torch.equal(former["lm_head.weight"], read(llama)["lm_head.weight"])


def test_cache_is_found_by_model_name(llama: Path, hub: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    true = ps.load(str(llama), "cpu")
    with ps.cache.WeightCache(memory_bytes=40_000_000) as keeper:
        keeper.keep("llama", str(llama))
        assert_equal(read(llama), true)
        assert "no copy" in caplog.text
        caplog.clear()
        assert_equal(read(llama, weight_cache=False, serve=False), true)
        assert "no copy" not in caplog.text
        keeper.keep("another-name", str(llama))
        caplog.clear()
        assert_equal(read(llama, fleet="another-name"), true)
        assert "another-name" in caplog.text and "no copy" in caplog.text
        # Names and shapes are equal, but the values differ.
        other = tmp_path / "other" / "llama"
        write_llama(other, total_bytes=4 * MIB, shards=2, seed=1)
        caplog.clear()
        assert_equal(read(other, serve=False), ps.load(str(other), "cpu"))
        assert "no copy" not in caplog.text
        assert "not attached to a weight cache of llama" in caplog.text


def test_all_files_except_weights_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    files = {"config.json": b"{}", "sub/tokenizer.json": b"[1]", "model.safetensors": b"x" * 64, "old.bin": b"y"}
    with HuggingFaceServer({"org/tiny": files}) as hub:
        stores = {"endpoint": hub.url}
        for content in (b"1", b"2"):
            copy_other_files("hf://org/tiny", tmp_path / "a", {"note.json": content}, stores)
        assert json.loads((tmp_path / "a" / "note.json").read_text()) == 2
        found = {str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*") if path.is_file()}
        assert found == {"config.json", "sub/tokenizer.json", "note.json"}
        hub.commit("org/tiny", {"../../outside.json": b"{}"})
        with pytest.raises(ps.PenstockError):
            copy_other_files("hf://org/tiny", tmp_path / "b", {}, stores)
    assert not list(tmp_path.rglob("outside.json"))
    assert [path for path in (tmp_path / "b").rglob("*") if path.is_file()] == []
