"""Only the user can read their cache of remote weights."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from tests.support.servers.http_server import RangeServer

import penstock
from penstock.testing.checkpoints import write_llama


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}


def load(cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> penstock.LoadReport:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(cache))
    with RangeServer(model) as server:
        return penstock.load(f"{server.url}/model.safetensors.index.json").report


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_llama(tmp_path / "model", num_layers=1, hidden=64, shards=2)
    return tmp_path / "model"


def test_cache_is_private_to_user(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        load(tmp_path / "cache", model, monkeypatch)
    finally:
        os.umask(before)
    assert modes(tmp_path / "cache" / "penstock-chunks") == {0o700, 0o600}


def test_cache_from_older_version_becomes_private(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache" / "penstock-chunks"
    folder.mkdir(parents=True, mode=0o755)
    folder.chmod(0o755)
    load(tmp_path / "cache", model, monkeypatch)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("how", ["another user's", "a link"])
def test_cache_created_by_another_user_is_rejected(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder = tmp_path / "cache" / "penstock-chunks"
    if how == "a link":
        folder.parent.mkdir()
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory away")
        folder.mkdir(parents=True)
        os.chown(folder, 65534, 65534)
    report = load(tmp_path / "cache", model, monkeypatch)
    assert {file.path for file in report.files} == {"http"}
    assert all("another user" in file.why or "not a directory" in file.why for file in report.files)
    assert not list(folder.iterdir())
