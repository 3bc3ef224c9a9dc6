"""vLLM with `--load-format penstock` streams the weights of a hub's model, and leaves no copy of them on disk."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.vllm_engines import EngineProcess
from tests.support.servers.hugging_face import HuggingFaceServer, sha256_of

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture
def hub(sharded_llama: Path) -> Iterator[HuggingFaceServer]:
    files = {path.name: path.read_bytes() for path in sharded_llama.iterdir()}
    with HuggingFaceServer({"org/llama": files}) as server:
        yield server


def environment(hub: HuggingFaceServer, home: Path) -> dict[str, str]:
    """Return the variables of a process that finds the hub through huggingface_hub."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }


def test_loading_from_hub_writes_no_disk_copy(hub: HuggingFaceServer, llama: Path, tmp_path: Path) -> None:
    with EngineProcess(tmp_path / "engine", **environment(hub, tmp_path / "hf")) as engines:
        default = engines.start(model=str(llama), load_format="auto")
        found = engines.start(model="org/llama", load_format="penstock")
    assert found.same(default), found.error
    weights = [path for path in (tmp_path / "hf").rglob("*") if path.name.endswith(".safetensors")]
    assert not weights
    commit = hub.files_of("org/llama", "main")[0]
    assert f"hf://org/llama@{commit}" in found.log and "equals the storage's" in found.log
    shards = {sha256_of(data) for name, data in hub.files_of("org/llama", "main")[1].items() if "safetensors" in name}
    assert {request.path.partition("?")[0].strip("/") for request in hub.storage.requests} <= shards


def test_weights_are_downloaded_to_configured_directory(hub: HuggingFaceServer, tmp_path: Path) -> None:
    with EngineProcess(tmp_path / "engine", **environment(hub, tmp_path / "hf")) as engines:
        found = engines.start(model="org/llama", load_format="penstock", download_dir=str(tmp_path / "models"))
    assert found.tokens, found.error
    assert "download_dir is set" in found.log
    assert list((tmp_path / "models").rglob("*.safetensors"))
