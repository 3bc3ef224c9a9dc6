"""hf:// URIs with a hub on loopback, compared with the real huggingface_hub, which downloads from the same hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from msgspec.structs import replace
from safetensors.torch import save
from tests.support.compare import assert_same
from tests.support.servers.hugging_face import HuggingFaceServer

import penstock as ps
from penstock import storage
from penstock.config import Settings
from penstock.errors import (
    ConfigError,
    DestinationError,
    FormatError,
    IntegrityError,
    NotFound,
    PenstockError,
    PermissionDenied,
    SourceUnavailable,
)
from penstock.storage import hugging_face
from penstock.storage.download import download
from penstock.storage.file_digest import FileDigest
from penstock.storage.repository import HubSource, parse
from penstock.storage.safetensors import HEADER_GUESS_BYTES

TENSORS = {f"layer.{i}.weight": torch.arange(i, i + 60_000, dtype=torch.float32).reshape(200, 300) for i in range(12)}
TINY = {"model.safetensors": save(TENSORS), "config.json": b'{"model_type": "tiny"}'}


def sharded() -> dict[str, bytes]:
    names = list(TENSORS)
    shards = {f"model-{i + 1:05}-of-00003.safetensors": {name: TENSORS[name] for name in names[i::3]} for i in range(3)}
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return {"model.safetensors.index.json": index} | {shard: save(part) for shard, part in shards.items()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HuggingFaceServer]:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    # Each test has its own storage, because it caches the listings of commits.
    monkeypatch.setattr("penstock.storage.source._storages", {})
    repositories = {"org/tiny": TINY, "org/sharded": sharded(), "datasets/org/data": TINY}
    with HuggingFaceServer(repositories, token="secret") as server:
        yield server


def load(hub: HuggingFaceServer, uri: str, *, settings: ps.ReadSettings | None = None, **options: object) -> ps.Weights:
    settings = settings or ps.ReadSettings()
    storage_options = {"endpoint": hub.url, **(settings.storage_options or {})}
    return ps.load(uri, "cpu", **options, settings=replace(settings, storage_options=storage_options))


def test_load_streams_and_compares_hub_digest(hub: HuggingFaceServer, tmp_path: Path) -> None:
    weights = load(hub, "hf://org/tiny")
    assert_same(weights, TENSORS)
    commit = hub.files_of("org/tiny", "main")[0]
    assert weights.report.uri == f"hf://org/tiny@{commit}"
    assert weights.report.verified and "SHA-256 of 1 of 1" in weights.report.why
    assert not (tmp_path / "hf" / "hub").exists(), "nothing is written to a disk"
    # Expect the content once, the header, and one byte to check that the file exists.
    assert hub.storage.num_bytes_sent <= len(TINY["model.safetensors"]) + (16 << 10) + 1


def test_model_from_mirror_without_digests_loads_unverified(hub: HuggingFaceServer, tmp_path: Path) -> None:
    hub.lists_names_only = True
    for name in ("org/tiny", "org/sharded"):
        weights = load(hub, f"hf://{name}")
        assert_same(weights, TENSORS)
        # A mirror states no digest.
        assert not weights.report.verified


def test_header_longer_than_first_read_is_verified(hub: HuggingFaceServer) -> None:
    many = {f"model.layers.{i}.self_attn.q_proj.weight": torch.full((8,), float(i)) for i in range(400)}
    data = save(many)
    assert int.from_bytes(data[:8], "little") > HEADER_GUESS_BYTES
    hub.commit("org/tiny", {"model.safetensors": data})
    weights = load(hub, "hf://org/tiny", verify=True)
    assert_same(weights, many)
    assert weights.report.verified and "SHA-256 of 1 of 1" in weights.report.why


def test_partial_load_skips_file_digest(hub: HuggingFaceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # A reader that waited for the skipped tensors would wait for `stall_s`.
    monkeypatch.setattr(HubSource, "check_whole", lambda source: pytest.fail("a part of the file is not read"))
    target = {"layer.11.weight": torch.zeros(200, 300)}
    report = ps.load_into(
        target, "hf://org/tiny", strict=False, settings=ps.ReadSettings(storage_options={"endpoint": hub.url})
    )
    assert_same(target, {"layer.11.weight": TENSORS["layer.11.weight"]})
    assert not report.verified and report.why


def test_abandoned_digest_comparison_reports_unverified(
    hub: HuggingFaceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileDigest, "add", lambda digest, offset, views: digest.abandon())
    weights = load(hub, "hf://org/sharded")
    assert not weights.report.verified and "SHA-256 of 0 of 3" in weights.report.why
    with pytest.raises(IntegrityError, match="SHA-256 of 0 of 3"):
        load(hub, "hf://org/sharded", verify=True)


@pytest.mark.parametrize(
    "uri", ["hf://org/sharded", "hf://org/sharded@main", "hf://models/org/sharded/", "org/sharded"]
)
def test_all_shards_in_index_are_loaded(hub: HuggingFaceServer, uri: str) -> None:
    weights = load(hub, uri)
    assert_same(weights, TENSORS)
    assert "SHA-256 of 3 of 3" in weights.report.why


@pytest.mark.parametrize(
    "uri", ["hf://datasets/org/data", "hf://org/tiny/model.safetensors", "hf://org/tiny/mod*.safetensors"]
)
def test_every_supported_uri_syntax_is_accepted(hub: HuggingFaceServer, uri: str) -> None:
    assert_same(load(hub, uri), TENSORS)


def test_glob_matches_hub_files_like_local_files(hub: HuggingFaceServer) -> None:
    # Repositories have a second copy of the weights in a subdirectory.
    hub.commit("org/tiny", TINY | {"original/model.safetensors": save({"w": torch.ones(3)}), "m[1].txt": b"x"})

    def names(path: str) -> list[str]:
        listed = storage.list_uris(f"hf://org/tiny/{path}", settings=Settings(), storage_options={"endpoint": hub.url})
        return [uri.partition("@")[2].partition("/")[2] for uri in listed]

    assert names("*.safetensors") == ["model.safetensors"]
    assert names("**/*.safetensors") == ["model.safetensors", "original/model.safetensors"]
    assert names("**") == ["config.json", "m[1].txt", "model.safetensors", "original/model.safetensors"]
    assert names("m[1].txt") == ["m[1].txt"]
    hub.commit("org/tiny", TINY | {"d[1]/a.txt": b"x", "d1": b"y"})
    assert names("d[1]") == names("d[1]/") == ["d[1]/a.txt"]
    assert_same(load(hub, "hf://org/tiny/*.safetensors"), TENSORS)


def test_partial_read_reports_unverified(hub: HuggingFaceServer) -> None:
    weights = load(hub, "hf://org/sharded", names="layer.0.weight")
    assert_same(weights, {"layer.0.weight": TENSORS["layer.0.weight"]})
    assert not weights.report.verified
    assert hub.storage.num_bytes_sent < 2 * TENSORS["layer.0.weight"].nbytes


def test_streamed_tensors_are_verified(hub: HuggingFaceServer) -> None:
    with ps.stream(
        "hf://org/sharded", "cpu", settings=ps.ReadSettings(storage_options={"endpoint": hub.url})
    ) as stream:
        assert_same(dict(stream), TENSORS)
    assert stream.report.verified


def test_moved_branch_never_mixes_revisions(hub: HuggingFaceServer) -> None:
    options = {"endpoint": hub.url}
    pinned = storage.pinned("hf://org/tiny", settings=Settings(), storage_options=options)
    moved = {"model.safetensors": save({name: tensor + 1 for name, tensor in TENSORS.items()})}
    hub.commit("org/tiny", moved)
    assert_same(load(hub, pinned), TENSORS)
    assert_same(load(hub, "hf://org/tiny"), {name: tensor + 1 for name, tensor in TENSORS.items()})


def test_revision_containing_slash_is_loaded(hub: HuggingFaceServer) -> None:
    other = {name: tensor * 2 for name, tensor in TENSORS.items()}
    for branch in ("feature/x", "refs/pr/7"):
        hub.commit("org/tiny", {"model.safetensors": save(other)}, branch=branch)
    assert_same(load(hub, "hf://org/tiny@feature%2Fx"), other)
    assert_same(load(hub, "hf://org/tiny@refs/pr/7/model.safetensors"), other)


def test_content_differing_from_hub_is_refused(hub: HuggingFaceServer) -> None:
    sha = next(name for name in hub.storage._objects)
    damaged = bytearray(TINY["model.safetensors"])
    damaged[-1] ^= 1
    for name, (_, nbytes, _) in list(hub.storage._objects.items()):
        if nbytes == len(damaged):
            sha = name
    hub.storage.replace(sha, bytes(damaged))
    with pytest.raises(IntegrityError, match="SHA-256"):
        ps.manifest("hf://org/tiny", storage_options={"endpoint": hub.url})
    with pytest.raises(IntegrityError, match="SHA-256") as caught:
        load(hub, "hf://org/tiny")
    assert "model.safetensors" in str(caught.value.uri)


def test_expired_signed_urls_are_renewed(hub: HuggingFaceServer) -> None:
    hub.signed_s = 0.3
    with ps.stream(
        "hf://org/sharded", "cpu", settings=ps.ReadSettings(storage_options={"endpoint": hub.url}, memory_bytes=1 << 20)
    ) as stream:
        found = {}
        for name, tensor in stream:
            found[name] = tensor
            if len(found) in {2, 6}:
                # Wait until the URLs for the headers have expired.
                time.sleep(0.4)
    assert_same(found, TENSORS)
    assert stream.report.verified
    assert sum("/resolve/" in request for request in hub.requests) > 3


def test_unrenewable_link_raises_permission_denied(hub: HuggingFaceServer) -> None:
    hub.signed_s = -1.0
    with pytest.raises(PermissionDenied, match="refuses to send this file") as caught:
        load(hub, "hf://org/tiny")
    assert not caught.value.mutated and "model.safetensors" in str(caught.value.uri)


def test_gated_repository_error_suggests_token(hub: HuggingFaceServer) -> None:
    hub.gated = ("org/tiny",)
    with pytest.raises(PermissionDenied, match="HF_TOKEN"):
        load(hub, "hf://org/tiny")
    weights = load(hub, "hf://org/tiny", settings=ps.ReadSettings(storage_options={"token": "secret"}))
    assert_same(weights, TENSORS)
    # Servers behind a redirect must not receive the token.
    assert not any("authorization" in request.headers for request in hub.storage.requests)


@pytest.mark.parametrize(
    ("uri", "match"),
    [
        ("hf://org/nothing", "no such repository"),
        ("hf://org/tiny@nothing", "no such revision"),
        ("hf://org/tiny/nothing.safetensors", "no such file"),
        ("hf://org/tiny/folder", "no such file or directory"),
    ],
)
def test_missing_repository_or_file_raises_not_found(hub: HuggingFaceServer, uri: str, match: str) -> None:
    with pytest.raises(NotFound, match=match):
        load(hub, uri)


def test_private_repository_without_token_raises(hub: HuggingFaceServer) -> None:
    hub.private = ("org/tiny",)
    with pytest.raises(NotFound, match="HF_TOKEN"):
        load(hub, "hf://org/tiny")
    assert_same(load(hub, "hf://org/tiny", settings=ps.ReadSettings(storage_options={"token": "secret"})), TENSORS)


def test_empty_token_overrides_environment_token(hub: HuggingFaceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.private = ("org/tiny",)
    assert_same(load(hub, "hf://org/tiny"), TENSORS)
    with pytest.raises(NotFound):
        load(hub, "hf://org/tiny", settings=ps.ReadSettings(storage_options={"token": ""}))


def test_cached_listing_requires_same_token(hub: HuggingFaceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private = ("org/tiny",)
    commit = hub.files_of("org/tiny", "main")[0]
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert_same(load(hub, f"hf://org/tiny@{commit}"), TENSORS)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(NotFound, match="HF_TOKEN"):
        load(hub, f"hf://org/tiny@{commit}")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    with pytest.raises(NotFound, match="HF_TOKEN"):
        load(hub, f"hf://org/tiny@{commit}")


@pytest.mark.parametrize("name", ["../../model.safetensors", "/etc/model.safetensors", "a//b", "./a", ""])
def test_invalid_file_names_in_repository_are_refused(hub: HuggingFaceServer, name: str) -> None:
    hub.commit("org/tiny", {name: b"x"})
    with pytest.raises(FormatError, match="which no repository can have"):
        load(hub, "hf://org/tiny")


def test_unwritable_cache_raises_destination_error(
    hub: HuggingFaceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "file"))
    with pytest.raises(DestinationError, match="Not a directory"):
        ps.manifest("hf://org/tiny", storage_options={"endpoint": hub.url})


def test_missing_shard_in_repository_raises_not_found(hub: HuggingFaceServer) -> None:
    files = sharded()
    del files["model-00002-of-00003.safetensors"]
    hub.commit("org/sharded", files)
    with pytest.raises(NotFound, match=r"names shard 'model-00002-of-00003\.safetensors'"):
        load(hub, "hf://org/sharded")


def test_retry_after_header_from_hub_is_honoured(hub: HuggingFaceServer) -> None:
    hub.status, hub.num_status, hub.retry_after = 429, 2, "0"
    assert_same(load(hub, "hf://org/tiny"), TENSORS)


def test_broken_hub_raises_source_unavailable(hub: HuggingFaceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RETRIES", "1")
    hub.status, hub.num_status = 503, 1000
    with pytest.raises(SourceUnavailable, match="HTTP 503"):
        load(hub, "hf://org/tiny")


def test_unreachable_hub_error_names_endpoint(monkeypatch: pytest.MonkeyPatch, hub: HuggingFaceServer) -> None:
    monkeypatch.setenv("PENSTOCK_RETRIES", "1")
    with pytest.raises(SourceUnavailable, match=r"the repository at http://127\.0\.0\.1:9") as caught:
        ps.load("hf://org/tiny", "cpu", settings=ps.ReadSettings(storage_options={"endpoint": "http://127.0.0.1:9"}))
    assert "HF_ENDPOINT" in str(caught.value.hint)


def test_local_cache_is_mapped(hub: HuggingFaceServer) -> None:
    huggingface_hub.snapshot_download("org/sharded", endpoint=hub.url)
    hub.requests.clear()
    hub.storage.requests.clear()
    weights = load(hub, "hf://org/sharded")
    assert_same(weights, TENSORS)
    assert {file.path for file in weights.report.files} == {"mmap"}
    assert len(hub.requests) == 1 and not hub.storage.requests, "only the commit is asked for"


def test_files_in_partial_cache_are_reused(hub: HuggingFaceServer) -> None:
    huggingface_hub.hf_hub_download("org/sharded", "model-00001-of-00003.safetensors", endpoint=hub.url)
    hub.storage.requests.clear()
    weights = load(hub, "hf://org/sharded")
    assert_same(weights, TENSORS)
    assert len({request.path.partition("?")[0] for request in hub.storage.requests}) == 2


def test_incomplete_offline_cache_raises_not_found(hub: HuggingFaceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for shard in (1, 2):
        huggingface_hub.hf_hub_download("org/sharded", f"model-0000{shard}-of-00003.safetensors", endpoint=hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFound, match="has 2 of 3"):
        ps.load("hf://org/sharded", "cpu")
    first = ps.load("hf://org/sharded/model-00001-of-00003.safetensors", "cpu")
    assert set(first) == {f"layer.{i}.weight" for i in (0, 3, 6, 9)}


def test_download_with_wrong_content_is_rejected(hub: HuggingFaceServer, tmp_path: Path) -> None:
    damaged = bytearray(TINY["model.safetensors"])
    damaged[-1] ^= 1
    hub.storage.replace(hashlib.sha256(TINY["model.safetensors"]).hexdigest(), bytes(damaged))
    files = {"hf://org/tiny/model.safetensors": tmp_path / "model.safetensors"}
    with pytest.raises(IntegrityError, match="SHA-256"):
        download(files, settings=Settings(), storage_options={"endpoint": hub.url})


def test_offline_load_lists_cache_once(hub: HuggingFaceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub.snapshot_download("org/sharded", endpoint=hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    listed, list_cache = [], hugging_face._cached_listing

    def count(where: object) -> object:
        listed.append(where)
        return list_cache(where)

    monkeypatch.setattr(hugging_face, "_cached_listing", count)
    for number in (1, 2):
        assert_same(load(hub, "hf://org/sharded"), TENSORS)
        assert len(listed) == number


def test_huggingface_hub_environment_variables_are_honoured(hub: HuggingFaceServer, tmp_path: Path) -> None:
    """A command in a separate process reads `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and `HF_HUB_OFFLINE`."""
    hub.private = ("org/tiny",)
    environ = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    environ["HF_HUB_OFFLINE"] = "0"

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(command, env=environ | more, capture_output=True, text=True, timeout=120)

    assert run("penstock", "load", "org/tiny", "--device", "cpu").returncode != 0
    done = run("penstock", "load", "org/tiny", "--device", "cpu", HF_TOKEN="secret")
    assert done.returncode == 0, done.stderr
    away = run("penstock", "load", "hf://org/tiny", "--device", "cpu", HF_HUB_OFFLINE="1", HF_TOKEN="secret")
    assert away.returncode != 0 and "HF_HUB_OFFLINE" in away.stderr
    code = "import huggingface_hub; huggingface_hub.snapshot_download('org/tiny')"
    filled = subprocess.run([sys.executable, "-c", code], env=environ | {"HF_TOKEN": "secret"}, timeout=120)
    assert filled.returncode == 0
    hub.requests.clear()
    cached = run("penstock", "load", "hf://org/tiny", "--device", "cpu", HF_HUB_OFFLINE="1")
    assert cached.returncode == 0, cached.stderr
    assert not hub.requests


def test_manifest_is_stored_per_commit(hub: HuggingFaceServer) -> None:
    options = {"endpoint": hub.url}
    report = ps.manifest("hf://org/tiny", storage_options=options)
    weights = load(hub, "hf://org/tiny", names="layer.3.weight")
    assert weights.report.verified and "leaf digests" in weights.report.why
    assert weights.report.revision == report.revision
    # Another commit has no manifest yet.
    hub.commit("org/tiny", TINY | {"README.md": b"new"})
    assert "SHA-256" in load(hub, "hf://org/tiny").report.why


def test_mistyped_local_path_sends_no_hub_request(
    hub: HuggingFaceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("models/llama", "absent/model.safetensors", "absent/model.safetensors.index.json"):
        with pytest.raises(NotFound, match=r"no such|does not exist"):
            load(hub, path)
    assert not hub.requests


def test_missing_path_error_explains_repository_lookup(
    hub: HuggingFaceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PenstockError) as caught:
        load(hub, "weights/llama")
    hint = caught.value.hint or ""
    assert "no file or directory 'weights/llama'" in hint and "write ./weights/llama" in hint
    # An existing repository name needs no further hint.
    with pytest.raises(PenstockError) as caught:
        load(hub, "hf://weights/llama")
    assert "file or directory" not in (caught.value.hint or "")


@pytest.mark.parametrize("uri", ["hf://", "hf://org", "hf://org/", "hf://org/a/../b", "hf://org/a@", "hf://a b/c"])
def test_invalid_uri_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError):
        parse(uri, "hf")


def test_out_of_order_reads_are_hashed_correctly() -> None:
    import random
    import threading

    data = random.Random(7).randbytes(1 << 20)
    digest = FileDigest(hashlib.sha256(data).hexdigest(), len(data), "hf://x/y/z", 10.0)
    view = memoryview(bytearray(data))
    digest.add(0, [view[:5000]])
    digest.is_wanted = True
    starts = list(range(0, len(data), 4096))
    random.Random(8).shuffle(starts)
    parts = [starts[i::4] for i in range(4)]

    def work(mine: list[int]) -> None:
        for start in mine:
            digest.add(start, [view[start : start + 1000], view[start + 1000 : start + 4096]])

    threads = [threading.Thread(target=work, args=(mine,)) for mine in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert digest.is_equal


def test_digest_is_abandoned_beyond_out_of_order_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.file_digest._MAX_AHEAD_BYTES", 10_000)
    digest = FileDigest("0" * 64, 1 << 20, "hf://x/y/z", 0.1)
    digest.is_wanted = True
    view = memoryview(bytearray(1 << 20))
    for start in range(4096, 1 << 20, 4096):
        digest.add(start, [view[start : start + 4096]])
    assert not digest._ahead and not digest.is_equal, "it is given up, and keeps nothing"


def test_chunk_cache_content_is_compared_with_hub_digest(
    hub: HuggingFaceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "chunks"))
    for _ in range(2):
        weights = load(hub, "hf://org/sharded", verify=True)
        assert_same(weights, TENSORS)
        assert "SHA-256 of 3 of 3" in weights.report.why
    # The second load reads chunks from the disk, and requests one byte of each file for its ETag.
    assert hub.storage.num_bytes_sent < 1.5 * sum(tensor.nbytes for tensor in TENSORS.values())
    sha = hashlib.sha256(TINY["model.safetensors"]).hexdigest()
    damaged = bytearray(TINY["model.safetensors"])
    damaged[-1] ^= 1
    hub.storage.replace(sha, bytes(damaged))
    for _ in range(2):
        with pytest.raises(IntegrityError, match="SHA-256"):
            load(hub, "hf://org/tiny")
    # The corrupt chunks were removed.
    hub.storage.replace(sha, TINY["model.safetensors"])
    assert_same(load(hub, "hf://org/tiny", verify=True), TENSORS)
