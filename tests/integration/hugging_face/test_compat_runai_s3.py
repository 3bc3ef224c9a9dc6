"""The names of Run:ai Model Streamer on a real S3 server: listing, pulling and streaming."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
import torch
from safetensors.torch import save
from tests.support.servers.s3 import S3Server, SwiftServer, Unavailable

from penstock.errors import PenstockError
from penstock.loader.safe_open import safe_open
from penstock_hf.runai_streamer import (
    FileChunks,
    FileStreamer,
    ObjectStorageModel,
    S3Credentials,
    SafetensorsStreamer,
    list_safetensors,
    pull_files,
)

SHARDS = {
    "model-1.safetensors": {"a": torch.arange(300_000, dtype=torch.float32).reshape(300, 1000)},
    "model-2.safetensors": {"b": torch.arange(9, dtype=torch.bfloat16), "c": torch.zeros(0, 2)},
}
OTHERS = {"config.json": b"{}", "tokenizer/vocab.json": b"[1]", "notes.txt": b"x"}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    folder = tempfile.mkdtemp(prefix="penstock-s3-")
    try:
        SwiftServer.check()
        with SwiftServer(folder) as running:
            running.make_bucket("models")
            store = running.store("models")
            for name, tensors in SHARDS.items():
                obstore.put(store, f"llama/{name}", save(tensors))
            for name, data in OTHERS.items():
                obstore.put(store, f"llama/{name}", data)
            yield running
    except Unavailable as reason:
        pytest.skip(str(reason))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def credentials(server: S3Server) -> S3Credentials:
    options = server.storage_options
    return S3Credentials(
        access_key_id=options["access_key_id"],
        secret_access_key=options["secret_access_key"],
        region_name=options.get("region"),
        endpoint=options["endpoint"],
    )


@pytest.fixture
def environment(credentials: S3Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(credentials.access_key_id))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", str(credentials.secret_access_key))
    monkeypatch.setenv("AWS_REGION", str(credentials.region_name or "us-east-1"))
    monkeypatch.setenv("RUNAI_STREAMER_S3_ENDPOINT", str(credentials.endpoint))
    monkeypatch.setenv("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "0")


def stream(paths: list[str], credentials: S3Credentials | None = None) -> dict[str, torch.Tensor]:
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths, credentials)
        return dict(streamer.get_tensors())


def assert_all(found: dict[str, torch.Tensor]) -> None:
    wanted = {name: tensor for tensors in SHARDS.values() for name, tensor in tensors.items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("path", ["s3://models/llama", "s3://models/llama/"])
def test_files_are_streamed_with_credentials(credentials: S3Credentials, path: str) -> None:
    found = list_safetensors(path, credentials)
    assert sorted(found) == [f"s3://models/llama/{name}" for name in SHARDS]
    assert_all(stream(found, credentials))


@pytest.mark.usefixtures("environment")
def test_files_are_streamed_with_environment_credentials() -> None:
    assert_all(stream(list_safetensors("s3://models/llama")))
    assert list_safetensors("s3://models/none") == []


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("allow", "ignore", "wanted"),
    [
        (None, None, {*SHARDS, *OTHERS}),
        (["*.json"], None, {"config.json", "tokenizer/vocab.json"}),
        (None, ["*.safetensors", "*.txt"], {"config.json", "tokenizer/vocab.json"}),
        (["*.json"], ["*vocab*"], {"config.json"}),
        (["*.none"], None, set()),
    ],
)
def test_files_are_pulled_by_pattern(
    tmp_path: Path, allow: list[str] | None, ignore: list[str] | None, wanted: set[str]
) -> None:
    pull_files("s3://models/llama", str(tmp_path), allow, ignore)
    found = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()}
    assert set(found) == wanted
    for name, path in found.items():
        assert path.read_bytes() == (OTHERS[name] if name in OTHERS else save(SHARDS[name]))


@pytest.mark.usefixtures("environment")
def test_object_ranges_and_sizes_are_read() -> None:
    uri = "s3://models/llama/model-1.safetensors"
    raw = save(SHARDS["model-1.safetensors"])
    with FileStreamer() as streamer:
        assert (uri, len(raw)) in streamer.list_files("s3://models/llama", True, ["*.safetensors"])
        streamer.stream_files([FileChunks(0, uri, [0, 1000], [8, 50_000])])
        found = {index: tensor.numpy().tobytes() for _, index, tensor in streamer.get_chunks()}
    assert found == {0: raw[:8], 1: raw[1000:51_000]}


@pytest.mark.usefixtures("environment")
def test_model_is_pulled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock_hf.runai_streamer import objects

    pulled = []
    monkeypatch.setattr(objects, "pull_files", lambda *a: (pulled.append(a), pull_files(*a))[1])
    target = str(tmp_path / "copy")

    def pull(_: int) -> list[str]:
        with ObjectStorageModel("s3://models/llama", target) as model:
            model.pull_files(ignore_pattern=["*.safetensors"])
            return sorted(os.listdir(model.dir))

    with ThreadPoolExecutor(3) as pool:
        listings = list(pool.map(pull, range(3)))
    assert len(pulled) == 1
    assert all(set(listing) >= {"config.json", "notes.txt", "tokenizer"} for listing in listings)
    assert ObjectStorageModel.SENTINEL_NAME in os.listdir(target)


@pytest.mark.usefixtures("environment")
def test_failed_or_empty_pull_is_repeated(tmp_path: Path) -> None:
    target = str(tmp_path / "copy")
    with pytest.raises(KeyError), ObjectStorageModel("s3://models/llama", target) as model:
        model.pull_files(["config.json"])
        raise KeyError
    with pytest.raises(RuntimeError, match="no files"), ObjectStorageModel("s3://models/none", target) as model:
        model.pull_files()
    with ObjectStorageModel("s3://models/llama", target) as model:
        model.pull_files(["*.json"])
    assert (tmp_path / "copy" / "config.json").read_bytes() == b"{}"


def test_wrong_credentials_raise_value_error(credentials: S3Credentials) -> None:
    credentials.secret_access_key = "wrong"
    with pytest.raises(ValueError) as caught:
        stream(["s3://models/llama/model-1.safetensors"], credentials)
    assert isinstance(caught.value, PenstockError)
    assert "wrong" not in str(caught.value)


def test_safe_open_reads_object(server: S3Server) -> None:
    uri = "s3://models/llama/model-1.safetensors"
    with safe_open(uri, "pt", storage_options=server.storage_options) as file:
        assert torch.equal(file.get_slice("a")[10:20, ::7], SHARDS["model-1.safetensors"]["a"][10:20, ::7])
