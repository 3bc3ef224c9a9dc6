"""`penstock storage-initializer`, started as KServe does: the files in the directory, and the exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.commands import run
from tests.support.compare import assert_same
from tests.support.fork_server import ForkServer
from tests.support.servers.hugging_face import HuggingFaceServer
from tests.support.servers.s3 import SwiftServer, Unavailable

import penstock as ps
from penstock.cli.checkpoints import manifest
from penstock.config import Settings
from penstock.errors import SourceError
from penstock.fetcher import storage_initializer
from penstock.fetcher.storage_initializer import PARTIAL
from penstock.hub.local_hub import find_hub
from penstock.testing.checkpoints import write_llama

SMALL_FILES = {"config.json": b"{}", "tokenizer.json": b"[1]", "1_Pooling/config.json": b"{2}", "empty.txt": b""}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two shards with more than one range, a manifest, and files next to and below them."""
    directory = tmp_path_factory.mktemp("source") / "llama"
    write_llama(directory, total_bytes=40_000_000, shards=2)
    for name, data in SMALL_FILES.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)
    manifest(str(directory))
    return directory


@pytest.fixture(scope="module")
def s3() -> Iterator[SwiftServer]:
    try:
        SwiftServer.check()
    except Unavailable as why:
        pytest.skip(str(why))
    folder = Path(tempfile.mkdtemp(prefix="ps-s3-"))
    try:
        with SwiftServer(folder) as server:
            server.make_bucket("models")
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def upload(server: SwiftServer, directory: Path, prefix: str) -> str:
    for path in directory.rglob("*"):
        if path.is_file():
            server.store("models").put(f"{prefix}/{path.relative_to(directory)}", path.read_bytes())
    return f"s3://models/{prefix}"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def environ(s3: SwiftServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return credentials as KServe passes them to an init container."""
    for name, value in s3.storage_options.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)


@pytest.mark.usefixtures("environ")
def test_initializer_copies_and_verifies_s3_sources(
    s3: SwiftServer, model: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    source = upload(s3, model, "llama")
    s3.store("models").put("sklearn/model.joblib", b"no weights")
    first, second = tmp_path / "mnt" / "models", tmp_path / "other"
    # The volume exists before the container, and a killed attempt leaves its files.
    (first / PARTIAL).mkdir(parents=True)
    (first / PARTIAL / "model.safetensors").write_bytes(b"half")
    done = run(
        fork_server, ["storage-initializer", f"penstock+{source}/", str(first), "s3://models/sklearn/", str(second)]
    )
    assert done.returncode == 0, done.stderr
    assert contents(first) == contents(model)
    assert contents(second) == {"model.joblib": b"no weights"}
    lines = done.stdout.splitlines()
    assert f"{source}/ -> {first}: 8 files" in lines[0] and "; verified: " in lines[0]
    assert "NOT verified: there are no safetensors files" in lines[1]
    # Run it again over the existing files, as after a restart of the pod.
    assert run(fork_server, ["storage-initializer", source, str(first)]).returncode == 0
    assert contents(first) == contents(model)


@pytest.mark.usefixtures("environ")
def test_corrupt_weights_never_reach_engine(
    s3: SwiftServer, model: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    source = upload(s3, model, "damaged")
    shard = next(model.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    s3.store("models").put(f"damaged/{shard.name}", bytes(data))
    done = run(fork_server, ["storage-initializer", source, str(tmp_path / "models")])
    assert done.returncode == 3
    assert "digest" in done.stderr
    assert not (tmp_path / "models").exists(), "the directory was new"


def test_all_repository_files_are_copied_from_one_commit(model: Path, tmp_path: Path) -> None:
    files = {name: data for name, data in contents(model).items() if name != "penstock.manifest"}
    whole, single = tmp_path / "whole", tmp_path / "single"
    words = [sys.executable, "-m", "penstock", "storage-initializer"]
    words += ["penstock+hf://org/tiny", str(whole), "hf://org/tiny/config.json", str(single)]
    with HuggingFaceServer({"org/tiny": files}, token="secret") as hub:
        # Use a separate process, because huggingface_hub reads its variables at import.
        environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(words, env=os.environ | environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert contents(whole) == files
    assert contents(single) == {"config.json": files["config.json"]}
    assert "NOT verified" in done.stdout


def test_single_file_is_verified_against_its_manifest(model: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    source = tmp_path / "one.safetensors"
    shutil.copy(next(model.glob("*.safetensors")), source)
    manifest(str(source))
    done = run(fork_server, ["storage-initializer", source.as_uri(), str(tmp_path / "out"), "--format", "json"])
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    assert report["verified"] and report["num_files"] == 2
    assert contents(tmp_path / "out")["one.safetensors"] == source.read_bytes()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = tempfile.mkdtemp(prefix="pk-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    yield Path(directory)
    shutil.rmtree(directory)


def test_hub_option_fetches_weights_from_members(
    runtime: Path, model: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    with ps.cache.WeightCache() as keeper:
        keeper.keep("llama", model)
        hub = find_hub(runtime)
        assert hub is not None
        done = run(fork_server, ["storage-initializer", str(model), str(tmp_path / "out"), "--hub", hub])
    assert done.returncode == 0, done.stderr
    assert "; 100% shm <- " in done.stdout and "; verified: the manifest's digests" in done.stdout
    assert ps.verify(str(tmp_path / "out")).revision == ps.verify(str(model)).revision
    small = {name: data for name, data in contents(tmp_path / "out").items() if name in SMALL_FILES}
    assert small == SMALL_FILES


def test_weights_and_small_files_come_from_same_commit(
    runtime: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: data for name, data in contents(model).items() if name != "penstock.manifest"}
    write_llama(tmp_path / "new", total_bytes=1_000_000, shards=2, seed=7)
    with HuggingFaceServer({"org/tiny": files}) as repositories, ps.cache.WeightCache():
        constants = {"ENDPOINT": repositories.url, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": tmp_path}
        # It keeps the endpoint from its import.
        constants["HUGGINGFACE_CO_URL_TEMPLATE"] = f"{repositories.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        for name, value in constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        alone = storage_initializer.initialize("hf://org/tiny", tmp_path / "alone")
        # There is no manifest. The repository's own digests were compared during the copy.
        num_files = len(list((tmp_path / "alone").glob("*.safetensors")))
        assert alone.verified and alone.why == f"the SHA-256 of {num_files} of {num_files} files equals the storage's"
        listing = storage_initializer._files

        def move_branch(place: str, settings: Settings) -> dict[str, str]:
            listed = listing(place, settings)
            repositories.commit("org/tiny", {**contents(tmp_path / "new"), "config.json": b"new"})
            return listed

        monkeypatch.setattr(storage_initializer, "_files", move_branch)
        report = storage_initializer.initialize("hf://org/tiny", tmp_path / "out", connection=find_hub(runtime))
    assert any(path.startswith("storage hf://") for path in report.nbytes_by_path)
    written = ps.load(str(tmp_path / "out"), "cpu")
    assert_same(written, dict(ps.load(str(model), "cpu")))
    assert (tmp_path / "out" / "config.json").read_bytes() == files["config.json"]


def test_unreachable_hub_is_reported_before_reading_storage(
    runtime: Path, model: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    gone = f"unix://{runtime}/gone.sock"
    done = run(fork_server, ["storage-initializer", str(model), str(tmp_path / "out"), "--hub", gone])
    assert done.returncode == 0, done.stderr
    assert "reading from storage" in done.stderr
    assert contents(tmp_path / "out") == contents(model)


def test_initializer_rejects_destination_with_foreign_weights(
    model: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "model-00001-of-00009.safetensors").write_bytes(b"another model")
    done = run(fork_server, ["storage-initializer", str(model), str(target)])
    assert done.returncode == 2
    assert "the destination has weights of a different model: model-00001-of-00009.safetensors" in done.stderr
    assert contents(target) == {"model-00001-of-00009.safetensors": b"another model"}


def test_source_without_destination_is_usage_error(tmp_path: Path, fork_server: ForkServer) -> None:
    done = run(fork_server, ["storage-initializer", "s3://models/a", str(tmp_path / "a"), "s3://models/b"])
    assert done.returncode == 2
    assert "'s3://models/b' has no destination" in done.stderr
    assert not (tmp_path / "a").exists()


def test_failed_download_removes_created_directories(model: Path, tmp_path: Path, monkeypatch) -> None:
    def is_full(*arguments: object, **options: object) -> None:
        raise ps.errors.DiskFull("cannot write")

    monkeypatch.setattr(storage_initializer, "download", is_full)
    with pytest.raises(ps.errors.DiskFull):
        storage_initializer.initialize(str(model), tmp_path / "full" / "m")
    assert list(tmp_path.iterdir()) == []


def test_source_symlinks_are_resolved_once(tmp_path: Path) -> None:
    source, shared = tmp_path / "source", tmp_path / "shared"
    write_llama(source, total_bytes=100_000, shards=1)
    shared.mkdir()
    (shared / "vocab.txt").write_text("x")
    for name in ("a", "b", "c"):
        (source / name).symlink_to(source)
    (source / "part").symlink_to(shared)
    storage_initializer.initialize(str(source), tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert "part/vocab.txt" in found and not any(name.startswith(("a/", "b/", "c/")) for name in found)
    (source / "tokenizer.json").symlink_to("nowhere")
    with pytest.raises(SourceError, match="a broken link"):
        storage_initializer.initialize(str(source), tmp_path / "again")
