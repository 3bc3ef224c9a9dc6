"""GGUF files through every verb, from disk, HTTP and a hub, compared with the `gguf` package."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from gguf import quants
from safetensors.torch import load_file
from tests.integration.conftest import Host, assert_fetched
from tests.support import gguf_file
from tests.support.commands import run
from tests.support.compare import assert_same
from tests.support.fork_server import ForkServer
from tests.support.servers.http_server import RangeServer
from tests.support.servers.hugging_face import HuggingFaceServer

import penstock as ps
from penstock.errors import ConfigError, IntegrityError, NotFound, UnsafeFormat


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (path,) = gguf_file.write(tmp_path / "model" / "tiny-Q8_0.gguf")
    return path


def test_load_matches_gguf_package(model: Path) -> None:
    truth = gguf_file.expected_tensors(model)
    loaded = ps.load(model)
    assert_same(loaded, truth)
    assert_same(ps.load(model.parent), truth)
    assert_same(dict(ps.stream(model)), truth)
    assert_same(ps.load(model, names="blk.0.*"), {n: t for n, t in truth.items() if n.startswith("blk.0.")})
    into = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
    ps.load_into(into, model)
    assert_same(into, truth)


def test_dequantised_blocks_match_gguf_package(model: Path) -> None:
    report, loaded = ps.inspect(model), ps.load(model)
    for entry in gguf.GGUFReader(model).tensors:
        if entry.name not in report.blocks:
            continue
        blocks = report.blocks[entry.name]
        values = quants.dequantize(loaded[entry.name].numpy(), gguf.GGMLQuantizationType[blocks.type])
        assert values.shape == blocks.shape
        assert values.tobytes() == quants.dequantize(entry.data, entry.tensor_type).tobytes()


def test_gguf_manifest_detects_changed_byte(model: Path) -> None:
    written = ps.manifest(model)
    assert ps.load(model, verify=True).report.verified
    assert ps.verify(model).verified
    assert ps.inspect(model).manifest.revision == written.revision
    data = bytearray(model.read_bytes())
    data[gguf.GGUFReader(model).tensors[2].data_offset + 5] ^= 1
    model.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"blk\.0\.attn_k\.weight"):
        ps.load(model, verify=True)


def test_any_part_of_split_gguf_loads_model(tmp_path: Path) -> None:
    parts = gguf_file.write(tmp_path / "tiny.gguf", parts=4)
    truth = gguf_file.expected_tensors(*parts)
    for place in (tmp_path, *parts, [*parts]):
        assert_same(ps.load(place), truth)
    written = ps.manifest(parts[1])
    assert written.written == (f"{parts[0]}.penstock.manifest",)
    assert all(ps.load(part, verify=True).report.verified for part in parts)


def test_ambiguous_gguf_directory_error_lists_models(model: Path) -> None:
    gguf_file.write(model.parent / "tiny-BF16.gguf", seed=1)
    with pytest.raises(ConfigError, match=r"there are 2 GGUF models: tiny-BF16\.gguf, tiny-Q8_0\.gguf.*pass the path"):
        ps.load(model.parent)
    assert_same(ps.load(model), gguf_file.expected_tensors(model))


def test_safetensors_take_precedence_over_gguf(model: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, model.parent / "model.safetensors")
    assert list(ps.load(model.parent)) == ["a"]


def test_inspect_shows_quantised_types_and_shapes(model: Path, fork_server: ForkServer) -> None:
    shown = run(fork_server, ["inspect", str(model)]).stdout
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "Q4_K" in lines["blk.0.ffn_up.weight"] and "[8, 256]" in lines["blk.0.ffn_up.weight"]
    report = json.loads(run(fork_server, ["inspect", str(model), "--format", "json"]).stdout)
    row = next(row for row in report["tensors"] if row["name"] == "blk.0.ffn_gate_exps.weight")
    assert (row["dtype"], row["shape"], row["type"], row["elements"]) == ("U8", [2, 8, 210], "Q6_K", [2, 8, 256])
    assert report["dtypes"]["Q6_K"] == 2 * 8 * 210
    assert report["files"][0]["metadata"]["general.architecture"] == "llama"


def test_gguf_header_over_http_needs_one_request(model: Path) -> None:
    truth = gguf_file.expected_tensors(model)
    with RangeServer({"m.gguf": model.read_bytes()}) as server:
        ps.inspect(f"{server.url}/m.gguf")
        reads = [request for request in server.requests if request.method == "GET" and request.path == "/m.gguf"]
        # The first request reads one byte, to identify the file.
        assert len(reads) == 2
        assert_same(ps.load(f"{server.url}/m.gguf"), truth)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HuggingFaceServer]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("penstock.storage.source._storages", {})
    (padded,) = gguf_file.write(tmp_path / "padded.gguf")
    filled = tmp_path / "filled.gguf"
    writer = gguf.GGUFWriter(filled, "llama")
    for name in ("a", "b"):
        writer.add_tensor(name, torch.arange(64.0).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = gguf_file.write(tmp_path / "split.gguf", parts=4)
    repositories = {
        "org/many": {"m-Q8_0.gguf": padded.read_bytes(), "m-F32.gguf": filled.read_bytes()},
        "org/split": {part.name: part.read_bytes() for part in parts},
        "org/pickled": {"pytorch_model.bin": b"PK\x03\x04", "config.json": b"{}"},
    }
    with HuggingFaceServer(repositories, token="secret") as server:
        yield server


def test_gguf_file_in_repository_is_loaded(hub: HuggingFaceServer, tmp_path: Path) -> None:
    options = {"endpoint": hub.url, "token": "secret"}
    truth = gguf_file.expected_tensors(tmp_path / "padded.gguf")
    assert_same(ps.load("hf://org/many/m-Q8_0.gguf", settings=ps.ReadSettings(storage_options=options)), truth)
    # Without padding every byte is read and compared with the hub's SHA-256.
    report = ps.load("hf://org/many/m-F32.gguf", settings=ps.ReadSettings(storage_options=options)).report
    assert report.verified and "SHA-256" in report.why
    with pytest.raises(ConfigError, match="pass the path of one of these files"):
        ps.load("hf://org/many", settings=ps.ReadSettings(storage_options=options))
    parts = sorted(tmp_path.glob("split-*.gguf"))
    for uri in ("hf://org/split", f"hf://org/split/{parts[2].name}"):
        assert_same(ps.load(uri, settings=ps.ReadSettings(storage_options=options)), gguf_file.expected_tensors(*parts))
    for uri in ("hf://org/pickled", "hf://org/pickled/pytorch_model.bin"):
        with pytest.raises(UnsafeFormat, match=r"pytorch_model\.bin: this is a pickle.*download the files"):
            ps.load(uri, settings=ps.ReadSettings(storage_options=options))


def test_members_fetch_gguf_from_each_other(host: Host, model: Path) -> None:
    truth = gguf_file.expected_tensors(model)
    first = host.start(fallback=str(model))
    assert_fetched(first, truth)
    assert assert_fetched(host.start(), truth)["storage_bytes"] == 0


def test_pickled_weights_error_suggests_conversion(tmp_path: Path) -> None:
    tied = torch.arange(12.0).reshape(3, 4)
    state = {"embed.weight": tied, "head.weight": tied, "norm": torch.ones(4, 3).t().bfloat16()}
    places = {"pytorch_model.bin": state, "old.pth": state, "last.ckpt": {"state_dict": state, "epoch": 3}}
    for name, content in places.items():
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=name != "old.pth")
        for verb in (ps.load, ps.inspect, lambda path: ps.convert(path, tmp_path / "out")):
            with pytest.raises(UnsafeFormat, match=f"{name}: this is a pickle") as caught:
                verb(tmp_path / name)
        assert caught.value.hint is not None
        command = shlex.split(caught.value.hint.partition(": ")[2])
        assert command[:2] == ["python", "-c"] and command[3:] == [str(tmp_path / name)]
        subprocess.run([sys.executable, *command[1:]], check=True, timeout=120)
        converted = (tmp_path / name).with_suffix(".safetensors")
        assert_same(ps.load(converted), state)
        assert_same(load_file(converted), state)
        converted.unlink()


@pytest.mark.parametrize("header_bytes", [0x280, 0x380, 0x480, 0x580, 0x10280])
def test_header_length_resembling_pickle_is_loaded(tmp_path: Path, header_bytes: int) -> None:
    raw = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(header_bytes)
    (tmp_path / "model.safetensors").write_bytes(header_bytes.to_bytes(8, "little") + raw + b"\7")
    assert ps.load(tmp_path)["a"].tolist() == [7]


def test_directory_with_pickled_weights_raises(tmp_path: Path) -> None:
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "training_args.bin"):
        torch.save({name: torch.ones(2)}, tmp_path / name)
    with pytest.raises(UnsafeFormat) as caught:
        ps.load(tmp_path)
    assert caught.value.hint is not None and "training_args" not in caught.value.hint
    command = shlex.split(caught.value.hint.partition(": ")[2])
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=120)
    assert sorted(ps.load(tmp_path)) == ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    with pytest.raises(NotFound):
        ps.load(tmp_path / "absent.gguf")
