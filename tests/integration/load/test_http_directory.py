"""Conversions and the storage initializer read the URL of a directory without listings, like loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.compare import assert_same, by_safetensors
from tests.support.servers.http_server import Faults, RangeServer

import penstock
from penstock.cli.checkpoints import manifest
from penstock.fetcher.storage_initializer import initialize
from penstock.testing.checkpoints import write_llama
from penstock_convert.convert import convert

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")

SMALL_FILES = {"config.json": b'{"torch_dtype": "bfloat16"}', "tokenizer.json": b"[1]", "merges.txt": b"a b\n"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "llama"
    write_llama(directory, total_bytes=6_000_000, fp8=False, shards=2)
    for name, data in SMALL_FILES.items():
        (directory / name).write_bytes(data)
    manifest(str(directory))
    return directory


@pytest.fixture(params=[404, 403])
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[RangeServer]:
    # nginx sends 403 for a directory, and object stores for every missing object.
    with RangeServer(model.parent, faults=Faults(absent_status=request.param)) as server:
        yield server


def test_conversion_from_url_copies_tokenizer_files(server: RangeServer, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = convert([f"{server.url}/llama"], out, to="cast:BF16", devices="cpu", workers=1)
    assert report.verified
    assert {name: (out / name).read_bytes() for name in ("tokenizer.json", "merges.txt")} == {
        name: SMALL_FILES[name] for name in ("tokenizer.json", "merges.txt")
    }
    assert b"bfloat16" in (out / "config.json").read_bytes()
    assert_same(by_safetensors(out), by_safetensors(model))
    asked = {request.path for request in server.requests}
    assert asked.isdisjoint({"/llama", "/llama/"})


def test_initializer_copies_every_file(server: RangeServer, model: Path, tmp_path: Path) -> None:
    report = initialize(f"{server.url}/llama/", tmp_path / "models")
    assert report.verified
    copied = {path.name: path.read_bytes() for path in (tmp_path / "models").iterdir()}
    assert copied == {path.name: path.read_bytes() for path in model.iterdir()}
    penstock.load(tmp_path / "models", verify=True)


def test_url_credentials_are_sent_with_every_request(server: RangeServer, tmp_path: Path) -> None:
    url = server.url.replace("http://", "http://reader:secret@")
    convert([f"{url}/llama"], tmp_path / "out", to="cast:BF16", devices="cpu", workers=1)
    assert all("authorization" in request.headers for request in server.requests)
