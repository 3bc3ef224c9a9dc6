"""`--cache` writes repositories into huggingface_hub's local cache, which the real library then reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import WeakFileLock
from tests.integration.hugging_face.test_hugging_face import TENSORS, TINY, hub, sharded
from tests.support import commands
from tests.support.compare import assert_same
from tests.support.fork_server import ForkServer
from tests.support.servers.http_server import Faults
from tests.support.servers.hugging_face import HubHandler, HuggingFaceServer, sha256_of

import penstock as ps
from penstock.config import Settings
from penstock.errors import ConfigError, DestinationError, IntegrityError, PermissionDenied
from penstock.storage import file_digest
from penstock.storage.fill import fill
from penstock.types import MIB

__all__ = ["hub"]

SHARD = "model-00001-of-00003.safetensors"


def filled(hub: HuggingFaceServer, uri: str = "org/sharded") -> Path:
    return Path(fill(uri, storage_options={"endpoint": hub.url}).directory)


def offline(name: str, **options: str) -> Path:
    return Path(huggingface_hub.snapshot_download(name, local_files_only=True, **options))


def layout(root: Path) -> dict[str, str]:
    """Return the paths in a repository's part of the cache, with the targets of symlinks."""
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_bytes().hex()
        for path in root.rglob("*")
        if not path.is_dir() and "trees" not in path.parts
    }


def test_cache_layout_matches_huggingface_hub(
    hub: HuggingFaceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit("org/sharded", sharded() | {"sub/copy.safetensors": sharded()[SHARD], "sub/a.txt": b"text"})
    stock = Path(huggingface_hub.snapshot_download("org/sharded", endpoint=hub.url))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "ours"))
    ours = filled(hub)
    assert ours == tmp_path / "ours" / "models--org--sharded" / "snapshots" / stock.name
    assert layout(ours.parent.parent) == layout(stock.parent.parent)
    assert offline("org/sharded") == ours
    modes = {path.stat().st_mode for path in (ours.parent.parent / "blobs").iterdir()}
    assert modes == {path.stat().st_mode for path in (stock.parent.parent / "blobs").iterdir()}
    # The library does not download existing files.
    hub.storage.requests.clear()
    assert Path(huggingface_hub.snapshot_download("org/sharded", endpoint=hub.url)) == ours
    assert not hub.storage.requests


def test_load_fills_and_maps_cache(hub: HuggingFaceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"config.json": b"{}", "pytorch_model.bin": b"x" * 1000, "original/model.safetensors": b"x"}
    hub.commit("org/sharded", sharded() | extra)
    weights = ps.load("org/sharded", settings=ps.ReadSettings(cache=True, storage_options={"endpoint": hub.url}))
    assert_same(weights, TENSORS)
    assert {file.path for file in weights.report.files} == {"mmap"}
    assert weights.report.verified and "SHA-256 of 3 of 3" in weights.report.why
    sent = sum(len(data) for name, data in sharded().items() if name.endswith(".safetensors"))
    assert sent <= hub.storage.num_bytes_sent <= sent + 3
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert sorted(path.name for path in offline("org/sharded").iterdir()) == sorted([*sharded(), "config.json"])
    again = ps.load("org/sharded", settings=ps.ReadSettings(cache=True))
    assert_same(again, TENSORS)
    with ps.stream("org/sharded", "cpu", settings=ps.ReadSettings(cache=True)) as stream:
        assert_same(dict(stream), TENSORS)


def test_load_from_earlier_download_reports_unverified(hub: HuggingFaceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(hub)
    # A new process does not know which files were compared.
    monkeypatch.setattr("penstock.storage.source._storages", {})
    assert not ps.load("org/sharded", settings=ps.ReadSettings(storage_options={"endpoint": hub.url})).report.verified


def test_single_file_and_dataset_are_cached(hub: HuggingFaceServer) -> None:
    filled(hub, "hf://datasets/org/data")
    assert (offline("org/data", repo_type="dataset") / "config.json").read_bytes() == TINY["config.json"]
    place = filled(hub, f"hf://org/sharded/{SHARD}")
    assert [path.name for path in place.iterdir()] == [SHARD]


def test_cached_files_are_not_fetched_again(hub: HuggingFaceServer) -> None:
    huggingface_hub.hf_hub_download("org/sharded", SHARD, endpoint=hub.url)
    first = fill("org/sharded", storage_options={"endpoint": hub.url})
    assert (first.num_files, first.fetched_files) == (4, 3)
    hub.storage.requests.clear()
    again = fill("org/sharded", storage_options={"endpoint": hub.url})
    assert again.fetched_files == again.fetched_bytes == 0 and not hub.storage.requests
    assert "4 existed" in again.summary()


def test_cached_branch_is_updated_after_new_commit(hub: HuggingFaceServer) -> None:
    old = filled(hub, "org/tiny")
    hub.commit("org/tiny", TINY | {"config.json": b"{}"})
    assert offline("org/tiny") == old
    new = filled(hub, "org/tiny")
    assert offline("org/tiny") == new != old
    # A commit sets no reference. A branch with a slash is a directory of references.
    hub.commit("org/tiny", TINY, branch="feature/x")
    assert (
        offline("org/tiny", revision="feature/x") == filled(hub, "hf://org/tiny@feature%2Fx")
        if filled(hub, "hf://org/tiny@feature%2Fx")
        else None
    )
    filled(hub, f"hf://org/tiny@{old.name}")
    assert offline("org/tiny") == new


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_content_differing_from_hub_is_not_cached(
    hub: HuggingFaceServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = bytearray(TINY[name])
    damaged[-1] ^= 1
    if name == "config.json":
        send = HubHandler.send
        monkeypatch.setattr(
            HubHandler, "send", lambda *given: send(*(bytes(damaged) if one == TINY[name] else one for one in given))
        )
    else:
        hub.storage.replace(sha256_of(TINY[name]), bytes(damaged))
    with pytest.raises(IntegrityError, match=r"git id|SHA-256") as caught:
        fill("org/tiny", storage_options={"endpoint": hub.url})
    assert name in str(caught.value.uri)
    with pytest.raises(LocalEntryNotFoundError):
        offline("org/tiny")
    assert not [path for path in Path(constants.HF_HUB_CACHE).rglob("*") if "incomplete" in path.name]


def test_content_without_digest_check_is_not_cached(hub: HuggingFaceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first range arrives later than `stall_s`, so no digest can be checked.
    monkeypatch.setattr(file_digest, "_MAX_AHEAD_BYTES", 1)
    content = bytes(20 * MIB)
    hub.commit("org/tiny", {"model.safetensors": content})
    hub.storage.replace(sha256_of(content), b"damaged" + content[7:])
    hub.storage.faults = Faults(ranges_with="bytes=0-8", slow_bytes_per_s=5 * MIB)
    with pytest.raises(IntegrityError, match="after the stall deadline"):
        fill("org/tiny", settings=Settings(stall_s=0.5), storage_options={"endpoint": hub.url})
    with pytest.raises(LocalEntryNotFoundError):
        offline("org/tiny")


@pytest.mark.parametrize("name", ["../../../elsewhere", "{tmp_path}/elsewhere", "a//b"])
def test_branch_name_containing_path_is_rejected(hub: HuggingFaceServer, tmp_path: Path, name: str) -> None:
    name = name.format(tmp_path=tmp_path)
    hub.commit("org/tiny", TINY, branch=name)
    before = set(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="no branch or tag"):
        filled(hub, f"hf://org/tiny@{quote(name, safe='')}")
    assert set(tmp_path.iterdir()) == before


def test_too_long_file_name_raises_destination_error(hub: HuggingFaceServer) -> None:
    hub.commit("org/tiny", TINY | {"x" * 300: b""})
    with pytest.raises(DestinationError, match="File name too long"):
        filled(hub, "org/tiny")


def test_killed_download_leaves_no_complete_file(hub: HuggingFaceServer) -> None:
    sha, last = sha256_of(sharded()[SHARD]), sha256_of(sharded()["model-00003-of-00003.safetensors"])
    blobs = Path(constants.HF_HUB_CACHE, "models--org--sharded", "blobs")
    code = "from penstock.storage.fill import fill; fill('org/sharded')"
    environ = {"HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": constants.HF_HUB_CACHE, "HF_ENDPOINT": hub.url}
    with pytest.MonkeyPatch.context() as patch:
        # The first shard arrives, and the bytes of the last one stop midway.
        saw = hub.storage.saw
        stalled = Faults(stall_after=1000)
        patch.setattr(hub.storage, "saw", lambda request: stalled if last in request.path else saw(request))
        with subprocess.Popen([sys.executable, "-c", code], env=os.environ | environ) as process:
            until = time.monotonic() + 60
            while not (blobs / sha).exists() and time.monotonic() < until:
                time.sleep(0.01)
            process.kill()
    assert [path for path in blobs.iterdir() if path.name.endswith(".incomplete")]
    with pytest.raises(LocalEntryNotFoundError):
        offline("org/sharded")
    hub.storage.requests.clear()
    place = filled(hub)
    assert offline("org/sharded") == place
    assert_same(ps.load("org/sharded", settings=ps.ReadSettings(storage_options={"endpoint": hub.url})), TENSORS)
    assert not [request for request in hub.storage.requests if sha in request.path], "the complete shard is kept"


def test_leftovers_from_killed_processes_are_removed(hub: HuggingFaceServer) -> None:
    blobs = Path(constants.HF_HUB_CACHE, "models--org--tiny", "blobs")
    blobs.mkdir(parents=True)
    sha = sha256_of(TINY["model.safetensors"])
    old, new = blobs / f"{sha}.0000.incomplete", blobs / f"{sha}.0001.incomplete"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    filled(hub, "org/tiny")
    assert not old.exists() and new.exists()


def test_download_waits_for_library_download(hub: HuggingFaceServer) -> None:
    hub.storage.faults = Faults(total_bytes_per_s=4_000_000)
    with ThreadPoolExecutor(2) as pool:
        stock = pool.submit(huggingface_hub.snapshot_download, "org/sharded", endpoint=hub.url)
        ours = pool.submit(filled, hub)
        assert stock.result(60) == str(ours.result(60))
    nbytes = sum(len(data) for name, data in sharded().items() if name.endswith(".safetensors"))
    assert hub.storage.num_bytes_sent < 1.2 * nbytes, "each file was fetched by one of them"
    assert_same(ps.load(str(offline("org/sharded"))), TENSORS)


def test_stale_lock_does_not_block_download(hub: HuggingFaceServer, caplog: pytest.LogCaptureFixture) -> None:
    locks = Path(constants.HF_HUB_CACHE, ".locks", "models--org--tiny")
    locks.mkdir(parents=True)
    held, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with WeakFileLock(locks / f"{sha256_of(TINY['model.safetensors'])}.lock"):
            held.set()
            ended.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    fill("org/tiny", settings=Settings(stall_s=0.5), storage_options={"endpoint": hub.url})
    ended.set()
    holder.join(10)
    assert "has written nothing for 0.5 s" in caplog.text
    assert offline("org/tiny")


def test_cache_is_filled_without_symlink_support(hub: HuggingFaceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    hub.commit("org/tiny", TINY | {"copy/model.safetensors": TINY["model.safetensors"]})
    place = filled(hub, "org/tiny")
    assert not [path for path in place.rglob("*") if path.is_symlink()]
    assert offline("org/tiny") == place
    assert (place / "copy" / "model.safetensors").read_bytes() == TINY["model.safetensors"]
    hub.storage.requests.clear()
    assert_same(
        ps.load("org/tiny", settings=ps.ReadSettings(cache=True, storage_options={"endpoint": hub.url})), TENSORS
    )
    assert not hub.storage.requests


def test_unwritable_cache_raises_destination_error(
    hub: HuggingFaceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    with pytest.raises(DestinationError, match=r"Not a directory|File exists"):
        filled(hub, "org/tiny")


def test_gated_repository_raises_permission_denied(hub: HuggingFaceServer) -> None:
    hub.gated = ("org/tiny",)
    with pytest.raises(PermissionDenied, match="HF_TOKEN"):
        filled(hub, "org/tiny")
    with pytest.raises(LocalEntryNotFoundError):
        offline("org/tiny")


@pytest.mark.parametrize("uri", ["/somewhere/model.safetensors", "s3://bucket/model"])
def test_filling_cache_from_non_hub_uri_raises(uri: str) -> None:
    with pytest.raises(ConfigError, match="only a model hub"):
        fill(uri)


def test_fetch_and_load_commands_fill_cache(
    hub: HuggingFaceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer
) -> None:
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    done = commands.run(fork_server, ["fetch", "org/tiny", "--cache"])
    assert done.returncode == 0, done.stderr
    assert "2 files" in done.stdout and f"in the cache: {offline('org/tiny')}" in done.stdout
    loaded = commands.run(fork_server, ["load", "org/sharded", "--cache", "--format", "json"])
    assert loaded.returncode == 0, loaded.stderr
    assert json.loads(loaded.stdout)["verified"] and offline("org/sharded")
    for wrong in (["--device", "cpu"], ["--fallback", "org/tiny"]):
        assert commands.run(fork_server, ["fetch", "org/tiny", "--cache", *wrong]).returncode == 2
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert commands.run(fork_server, ["load", "org/sharded"]).returncode == 0
