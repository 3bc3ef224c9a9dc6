"""ms:// URIs with a hub on loopback, compared with the real modelscope, which downloads from the same hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.hugging_face.test_hugging_face import TENSORS, TINY, sharded
from tests.support.compare import assert_same
from tests.support.servers.hugging_face import sha256_of
from tests.support.servers.model_scope import ModelScopeServer

import penstock as ps
from penstock import storage
from penstock.config import Settings
from penstock.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    NotFound,
    PermissionDenied,
    SourceChanged,
    SourceUnavailable,
)
from penstock.storage import model_scope
from penstock.storage.fill import fill

modelscope_hub = pytest.importorskip("modelscope_hub")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelScopeServer]:
    for name in ("MODELSCOPE_API_TOKEN", "MODELSCOPE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    # Each test has its own storage, because it caches listings.
    monkeypatch.setattr("penstock.storage.source._storages", {})
    repositories = {"org/tiny": TINY, "org/sharded": sharded(), "datasets/org/data": TINY}
    with ModelScopeServer(repositories, token="secret") as server:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)
        yield server
    for api in model_scope._hubs.values():
        close(api)
    model_scope._hubs.clear()


def close(api: modelscope_hub.HubApi) -> None:
    """Close the library's connections, which it leaves to the garbage collector."""
    for session in (api.legacy._session, api.legacy._read_session):
        session.close()


def downloaded(name: str, kind: str = "model", **options: str) -> Path:
    """Download a repository with the real library."""
    api = modelscope_hub.HubApi(config=modelscope_hub.HubConfig())
    place = Path(api.download_repo(name, kind, **options))
    close(api)
    return place


def test_load_streams_and_compares_hub_digest(hub: ModelScopeServer, tmp_path: Path) -> None:
    weights = ps.load("ms://org/sharded")
    assert_same(weights, TENSORS)
    assert weights.report.uri.startswith("ms://org/sharded@master~")
    assert weights.report.verified and "SHA-256 of 3 of 3" in weights.report.why
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()], "nothing is written to a disk"


@pytest.mark.parametrize(
    "uri",
    [
        "ms://datasets/org/data",
        "ms://models/org/tiny@master",
        "ms://org/tiny/model.safetensors",
        "ms://org/tiny/m*.safetensors",
    ],
)
def test_every_supported_uri_syntax_is_accepted(hub: ModelScopeServer, uri: str) -> None:
    assert_same(ps.load(uri), TENSORS)


def test_library_download_is_mapped_from_cache(hub: ModelScopeServer) -> None:
    place = downloaded("org/sharded")
    hub.storage.requests.clear()
    weights = ps.load("ms://org/sharded")
    assert_same(weights, TENSORS)
    assert {file.path for file in weights.report.files} == {"mmap"} and weights.report.verified
    assert not hub.storage.requests
    # The cache is keyed by branch, so its files may be older.
    moved = {name: tensor + 1 for name, tensor in TENSORS.items()}
    hub.commit("org/sharded", {"model.safetensors": ps_save(moved)})
    assert (place / "model-00001-of-00003.safetensors").exists()
    assert_same(ps.load("ms://org/sharded"), moved)


def test_cached_file_with_wrong_content_is_ignored(hub: ModelScopeServer, caplog: pytest.LogCaptureFixture) -> None:
    downloaded("org/tiny")
    moved = {name: tensor + 1 for name, tensor in TENSORS.items()}
    hub.commit("org/tiny", {"model.safetensors": ps_save(moved)})
    assert_same(ps.load("ms://org/tiny"), moved)
    assert "is read from the hub" in caplog.text


def ps_save(tensors: dict[str, object]) -> bytes:
    from safetensors.torch import save

    return save(tensors)


def test_branch_moved_after_pinning_is_refused(hub: ModelScopeServer) -> None:
    place = storage.pinned("ms://org/tiny", settings=Settings())
    assert place == storage.pinned("ms://org/tiny", settings=Settings())
    hub.commit("org/tiny", {"model.safetensors": ps_save({name: tensor + 1 for name, tensor in TENSORS.items()})})
    # This process has cached the listing, but the content no longer exists.
    with pytest.raises((IntegrityError, FormatError)):
        ps.load(place)
    storage.source._storages.clear()
    with pytest.raises(SourceChanged, match="has moved since it was pinned"):
        ps.load(place)


def test_commit_revision_is_used_unchanged(hub: ModelScopeServer) -> None:
    commit = hub.files_of("org/tiny", "master")[0]
    hub.commit("org/tiny", {"model.safetensors": b"moved"})
    weights = ps.load(f"ms://org/tiny@{commit}")
    assert_same(weights, TENSORS)
    assert weights.report.uri == f"ms://org/tiny@{commit}"


def test_manifest_is_stored_in_cache_directory(hub: ModelScopeServer, tmp_path: Path) -> None:
    ps.manifest("ms://org/tiny")
    weights = ps.load("ms://org/tiny", names="layer.3.weight")
    assert weights.report.verified and "leaf digests" in weights.report.why


def test_content_differing_from_hub_is_refused(hub: ModelScopeServer) -> None:
    damaged = bytearray(TINY["model.safetensors"])
    damaged[-1] ^= 1
    hub.storage.replace(sha256_of(TINY["model.safetensors"]), bytes(damaged))
    with pytest.raises(IntegrityError, match="SHA-256") as caught:
        ps.load("ms://org/tiny")
    assert "model.safetensors" in str(caught.value.uri)


def test_private_or_gated_repository_requires_token(hub: ModelScopeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private, hub.gated = ("org/tiny",), ("org/sharded",)
    with pytest.raises(NotFound, match="MODELSCOPE_API_TOKEN"):
        ps.load("ms://org/tiny")
    with pytest.raises(PermissionDenied, match="MODELSCOPE_API_TOKEN"):
        ps.load("ms://org/sharded")
    assert_same(ps.load("ms://org/tiny", settings=ps.ReadSettings(storage_options={"token": "secret"})), TENSORS)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
    assert_same(ps.load("ms://org/sharded"), TENSORS)
    assert not any({"authorization", "cookie"} & set(request.headers) for request in hub.storage.requests)


def test_unrenewable_signed_url_is_refused(hub: ModelScopeServer) -> None:
    hub.signed_s = -1.0
    with pytest.raises(PermissionDenied, match="refuses to send this file") as caught:
        ps.load("ms://org/tiny")
    assert "model.safetensors" in str(caught.value.uri)


@pytest.mark.parametrize(
    ("uri", "error"),
    [
        ("ms://org/nothing", NotFound),
        ("ms://org/tiny@nothing", NotFound),
        ("ms://org/tiny/nothing.safetensors", NotFound),
        ("ms://spaces/org/tiny", ConfigError),
        ("ms://org", ConfigError),
    ],
)
def test_missing_repository_or_file_raises(hub: ModelScopeServer, uri: str, error: type[ps.PenstockError]) -> None:
    with pytest.raises(error):
        ps.load(uri)


def test_missing_shard_in_repository_raises_not_found(hub: ModelScopeServer) -> None:
    files = sharded()
    del files["model-00002-of-00003.safetensors"]
    hub.commit("org/sharded", files)
    with pytest.raises(NotFound, match=r"names shard 'model-00002-of-00003\.safetensors'"):
        ps.load("ms://org/sharded")


def test_retry_after_header_from_hub_is_honoured(hub: ModelScopeServer) -> None:
    hub.status, hub.num_status, hub.retry_after = 429, 1, "0"
    assert_same(ps.load("ms://org/tiny"), TENSORS)


def test_unreachable_hub_error_names_endpoint(hub: ModelScopeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelscope_hub._legacy_api.REPO_TREE_PAGE_MAX_ATTEMPTS", 1)
    with pytest.raises(SourceUnavailable, match="MODELSCOPE_ENDPOINT"):
        ps.load("ms://org/tiny", settings=ps.ReadSettings(storage_options={"endpoint": "http://127.0.0.1:9"}))


def test_loading_does_not_write_model_scope_cache(hub: ModelScopeServer) -> None:
    with pytest.raises(ConfigError, match="cache that can be filled"):
        fill("ms://org/tiny")
