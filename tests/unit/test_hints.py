"""Errors that a user can fix have a hint about the fix."""

from __future__ import annotations

import json
import re
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("torch")
import torch
from safetensors.torch import save_file
from tests.support.servers.http_server import RangeServer

import penstock
import penstock_convert
from penstock.config import Settings
from penstock.entry_points import install_hint
from penstock.errors import PenstockError
from penstock.fetcher.report import Provenance
from penstock.hub.auth import first_token
from penstock.hub.client import HubClient
from penstock.hub.messages import Status
from penstock.peer.server import PeerServer
from penstock.storage.manifest import check_signature, sign
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB
from penstock_convert.request import plan
from penstock_convert.workers.launch import LocalLauncher
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_llama(tmp_path / "llama", total_bytes=MIB, shards=2)
    return tmp_path / "llama"


def hint_of(call: Callable[[], object]) -> str:
    with pytest.raises(PenstockError) as caught:
        call()
    assert caught.value.hint is not None, caught.value
    return caught.value.hint


def test_every_fleet_error_has_hint(tmp_path: Path) -> None:
    def status(url: str) -> Status:
        with HubClient.connect(url, timeout_s=0.2) as client:
            return client.status()

    assert "running" in hint_of(lambda: status("http://127.0.0.1:1"))
    with RangeServer({"v1/status": b"[]"}) as other:
        assert "penstock version" in hint_of(lambda: status(other.url))
    assert "openssl rand" in hint_of(lambda: first_token(tmp_path / "none"))
    tokens = tmp_path / "tokens"
    tokens.write_text("t" * 16)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "Port 0 selects" in hint_of(lambda: bind(listen, Auth.of(token_file=tokens)))
        assert "port 0" in hint_of(lambda: PeerServer.start(tmp_path / "door", lambda _: None, listen=listen))
    (tmp_path / "bad.pem").write_text("no")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_CA_FILE", str(tmp_path / "bad.pem"))
        assert "PENSTOCK_CA_FILE" in hint_of(lambda: status("https://127.0.0.1:1"))


def test_every_storage_error_has_hint(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "inspect" in hint_of(lambda: penstock.load(llama, names="nobody"))
    (tmp_path / "empty").mkdir()
    assert "safetensors" in hint_of(lambda: penstock.inspect(tmp_path / "empty"))
    next(llama.glob("*-00001-*")).unlink()
    assert "copy it again" in hint_of(lambda: penstock.inspect(llama))
    assert "openssl genpkey" in hint_of(lambda: sign(b"", b"no key"))
    assert "openssl pkey" in hint_of(lambda: check_signature(b"", b"", b"no key"))
    monkeypatch.setenv("PENSTOCK_STALL_S", "soon")
    assert "tuning.md" in hint_of(Settings.read)


def test_corrupt_weight_errors_have_hints(llama: Path, tmp_path: Path) -> None:
    def inspect(uri: Path) -> object:
        return penstock.inspect(uri)

    bad = tmp_path / "bad.safetensors"
    bad.write_bytes((2).to_bytes(8, "little") + b"[]")
    assert "copy it again" in hint_of(lambda: inspect(bad))
    index = next(llama.glob("*.index.json"))
    index.write_text("{")
    assert "copy it again" in hint_of(lambda: inspect(llama))
    index.unlink()
    manifest = Path(penstock.manifest(llama).written[-1])
    save_file({"other": torch.zeros(3)}, next(llama.glob("*-00001-of-*.safetensors")))
    assert "penstock manifest URI --force" in hint_of(lambda: inspect(llama))
    manifest.write_text("{}")
    assert "copy it again" in hint_of(lambda: inspect(llama))


def test_every_conversion_error_has_hint(llama: Path, tmp_path: Path) -> None:
    def of(count: int, **word: object) -> Callable[[], object]:
        return lambda: plan([llama] * count, operations=[word])

    assert "linear:weights" in hint_of(of(2, op="linear", weights=[1.0]))
    assert "linear" in hint_of(of(3, op="slerp", t=0.5))
    assert "merge the sources first" in hint_of(of(2, op="copy"))
    write_llama(tmp_path / "other", total_bytes=2 * MIB)
    assert "inspect" in hint_of(lambda: plan([llama, tmp_path / "other"], operations=[{"op": "average"}]))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1}))
    save_file({"nobody.lora_A.weight": torch.zeros(1, 4)}, tmp_path / "adapter" / "adapter_model.safetensors")
    assert "inspect" in hint_of(lambda: plan([llama, tmp_path / "adapter"], operations=[{"op": "lora-merge"}]))
    with LocalLauncher() as launcher:
        assert "doctor" in hint_of(lambda: launcher.spawn("w", "cuda:99", "", ""))


@pytest.mark.parametrize("extra", ["metrics", "redis", "aws", "ray", "torch"])
def test_missing_extra_hint_names_installable_packages(extra: str) -> None:
    hint = install_hint(extra)
    assert re.fullmatch(r"pip install( '[a-z0-9-]+[<>=0-9.,]+')+", hint) and "penstock" not in hint


def test_error_messages_mention_only_published_packages() -> None:
    sources = [Path(package.__file__).parent for package in (penstock, penstock_convert)]
    files = [path for source in sources for path in source.rglob("*.py")]
    assert [path.name for path in files if "pip install 'penstock" in path.read_text(encoding="utf-8")] == []


def test_missing_package_hint_names_its_extra() -> None:
    file = Path(__file__).resolve().parents[2] / "packages" / "penstock" / "pyproject.toml"
    extras = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    own = {name for name, packages in extras.items() if any(text.startswith("penstock-") for text in packages)}
    assert own >= {"convert", "compile-cache", "tools", "vllm"}
    named = {extra for extra in extras if install_hint(extra) == f'pip install "penstock[{extra}]"'}
    assert named == own


def test_https_request_to_plain_hub_hint_suggests_http(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-this-hub\n")
    auth = Auth.of(token_file=tokens)
    hub = HubThread(Directory(MemoryStore()), bind("127.0.0.1:0", auth), auth)
    hub.start()
    try:
        with HubClient.connect(hub.url.replace("http://", "https://"), "a-token-of-this-hub") as client:
            assert "http://" in hint_of(lambda: client.status(None))
    finally:
        hub.stop()


@pytest.mark.parametrize("uri", ["hf://owner/model", "owner/model"])
def test_uncached_repository_hint_suggests_download(uri: str) -> None:
    assert "hf download owner/model" in hint_of(lambda: penstock.inspect(uri))


@pytest.mark.parametrize("replace", [False, True])
def test_destination_overlapping_source_error_names_source(llama: Path, replace: bool) -> None:
    def convert_to(destination: Path) -> str:
        with pytest.raises(penstock.ConfigError) as caught:
            penstock.convert(llama, destination, to="cast:F32", replace=replace)
        assert "replace=True" not in str(caught.value.hint)
        return caught.value.message

    assert convert_to(llama) == f"the destination is the source {llama}"
    assert convert_to(llama.parent) == f"the destination contains the source {llama}"


def test_stall_hint_includes_model_name() -> None:
    error = Provenance("big model").stall_error(penstock.errors.SourceStalled, "no progress", "no hub")
    assert "`penstock why 'big model'`" in str(error.hint)


def test_average_of_single_source_raises(llama: Path) -> None:
    assert plan([llama, llama], operations="average").operation.name.endswith("average()")
    with pytest.raises(PenstockError, match="average: got 1 sources"):
        plan([llama], operations="average")


def test_verify_error_names_corrupt_file(llama: Path) -> None:
    penstock.manifest(llama)
    path = sorted(llama.glob("*.safetensors"))[0]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(penstock.IntegrityError) as caught:
        penstock.verify(llama)
    assert caught.value.uri == str(path)


def test_no_space_error_hint_names_destination(llama: Path, tmp_path: Path, monkeypatch) -> None:
    def is_full(path: Path) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock_convert.result._locked", is_full)
    hint = hint_of(lambda: penstock.convert(llama, tmp_path / "out", to="cast:F32", devices="cpu"))
    assert f"these files become {tmp_path / 'out'} when the conversion is complete" in hint
