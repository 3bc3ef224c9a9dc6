"""vLLM with `--load-format penstock` streams the weights of a hub's model, and leaves no copy of them on disk."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.test_vllm import run, tokens
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
    """Return the environment of a process that finds the hub through huggingface_hub's own variables."""
    return {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        # TRL, which another test imports, sets ERROR in this process.
        "VLLM_LOGGING_LEVEL": "INFO",
    }


def test_loading_from_hub_writes_no_disk_copy(hub: HuggingFaceServer, llama: Path, tmp_path: Path) -> None:
    environ = environment(hub, tmp_path / "hf")
    (tmp_path / "a").mkdir()
    true = tokens(tmp_path / "a", model=str(llama), load_format="auto")
    done = run(tmp_path, environ, model="org/llama", load_format="penstock")
    assert f"TOKENS {true}" in done.stdout, done.stderr[-4000:]
    weights = [path for path in (tmp_path / "hf").rglob("*") if path.name.endswith(".safetensors")]
    assert not weights
    commit = hub.files_of("org/llama", "main")[0]
    said = done.stdout + done.stderr
    assert f"hf://org/llama@{commit}" in said and "equals the storage's" in said
    shards = {sha256_of(data) for name, data in hub.files_of("org/llama", "main")[1].items() if "safetensors" in name}
    assert {request.path.partition("?")[0].strip("/") for request in hub.storage.requests} <= shards


def test_weights_are_downloaded_to_configured_directory(hub: HuggingFaceServer, tmp_path: Path) -> None:
    environ = environment(hub, tmp_path / "hf")
    done = run(tmp_path, environ, model="org/llama", load_format="penstock", download_dir=str(tmp_path / "models"))
    assert "TOKENS" in done.stdout, done.stderr[-4000:]
    assert "download_dir is set" in done.stdout + done.stderr
    assert list((tmp_path / "models").rglob("*.safetensors"))
