"""Files next to the weights: configurations, vocabularies, a second copy of the model, and leftovers of a failure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.support.compare import by_safetensors
from tests.support.servers.http_server import RangeServer

import penstock
from penstock.errors import DiskFull, FormatError, OperationFailed, PlanError, SourceChanged, SourceTruncated
from penstock_convert.convert import WorkerSettings, convert
from penstock_convert.operations.operation import CopyOperation
from penstock_convert.result import Journal

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")

TOLD: dict[str, Any] = {"devices": "cpu", "workers": 1}
SMALL: dict[str, Any] = {"devices": "cpu", "workers": WorkerSettings(num_workers=1, task_bytes="256K")}
"""Convert with tasks of a quarter of a MiB."""
BESIDE = [
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "vocab.bpe",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
    "modeling_own.py",
    "sentencepiece.bpe.model",
]
NOT_COPIED = ["pytorch_model.bin", "README.md", "tokenizer.onnx"]


def write(directory: Path, config: bytes | None = b"{}", count: int = 2) -> Path:
    directory.mkdir()
    save_file({f"{i}.weight": torch.randn(256, 256) for i in range(count)}, directory / "model.safetensors")
    if config is not None:
        (directory / "config.json").write_bytes(config)
    return directory


@pytest.mark.parametrize("config", [b"[1, 2]", b"{", b'"text"', b"\xff\xfe{}", b"", b"[" * 100_000])
def test_invalid_config_is_reported_before_reading(config: bytes, tmp_path: Path) -> None:
    source, done = write(tmp_path / "source", config), list[int]()
    with pytest.raises(FormatError, match=r"config\.json"):
        convert(source, tmp_path / "out", progress=lambda *_: done.append(1), **TOLD)
    assert not done and [path.name for path in tmp_path.iterdir()] == ["source"]


class Configured(CopyOperation):
    """A user's operation whose `config` is wrong."""

    def __init__(self, gives: str) -> None:
        object.__setattr__(self, "gives", gives)

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.gives == "raises":  # type: ignore[attr-defined]
            raise KeyError("hidden_size")
        return {"list": [1], "object": {"of": object()}}[self.gives]  # type: ignore[attr-defined,return-value]


@pytest.mark.parametrize("gives", ["raises", "list", "object"])
def test_failing_config_method_raises_before_reading(gives: str, tmp_path: Path) -> None:
    source, done = write(tmp_path / "source"), list[int]()
    word = {"op": "function", "function": f"{__name__}:Configured", "gives": gives}
    with pytest.raises(OperationFailed, match=r"config\(\) failed on config.json") as caught:
        convert(source, tmp_path / "out", operations=[word], progress=lambda *_: done.append(1), **TOLD)
    assert not done and not caught.value.mutated
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_tokenizer_is_copied_but_unrelated_weights_are_not(tmp_path: Path) -> None:
    source = write(tmp_path / "source", json.dumps({"model_type": "own"}).encode())
    for name in BESIDE + NOT_COPIED:
        (source / name).write_bytes(name.encode())
    convert(source, tmp_path / "out", **TOLD)
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {*BESIDE, "config.json", "model.safetensors", "penstock.manifest", "penstock.job"}
    assert all((tmp_path / "out" / name).read_bytes() == name.encode() for name in BESIDE)


@pytest.mark.parametrize("shards", [1, 2])
def test_second_weight_format_is_skipped_and_reported(shards: int, tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    wanted = by_safetensors(source)
    if shards == 2:
        (source / "model.safetensors").unlink()
        for i, name in enumerate(wanted, 1):
            save_file({name: wanted[name]}, source / f"model-{i:05d}-of-00002.safetensors")
    save_file({"layers.0.a": torch.randn(64, 64)}, source / "consolidated.safetensors")
    report = convert(source, tmp_path / "out", **TOLD)
    assert by_safetensors(tmp_path / "out").keys() == wanted.keys()
    assert report.left_out == (str(source / "consolidated.safetensors"),)
    assert set(penstock.load(source)) == set(wanted)
    alone = tmp_path / "alone"
    alone.mkdir()
    (source / "consolidated.safetensors").rename(alone / "consolidated.safetensors")
    assert set(penstock.load(alone)) == {"layers.0.a"}


def test_truncated_source_leaves_no_files(tmp_path: Path) -> None:
    source = write(tmp_path / "source", count=16)

    def cut(done: int, total: int) -> None:
        if done == 2:
            os.truncate(source / "model.safetensors", 1 << 20)

    with pytest.raises((SourceTruncated, SourceChanged)):
        convert(source, tmp_path / "out", progress=cut, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_journal_is_removed_if_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Journal, line: bytes) -> None:
        raise DiskFull("cannot write: no space left on device", uri=str(self.path))

    monkeypatch.setattr(Journal, "_write", full)
    with pytest.raises(DiskFull):
        convert(write(tmp_path / "source"), tmp_path / "out", **TOLD)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_failed_conversion_reports_resumable_progress(tmp_path: Path) -> None:
    source = write(tmp_path / "source", count=16)

    def fail(done: int, total: int) -> None:
        if done == 3:
            raise DiskFull("cannot write: no space left on device", uri=str(tmp_path / "out"))

    with pytest.raises(DiskFull) as caught:
        convert(source, tmp_path / "out", progress=fail, **SMALL)
    (kept,) = [path for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith(".out")]
    assert caught.value.hint is not None
    assert "3 finished tasks are kept" in caught.value.hint and str(kept) in caught.value.hint
    report = convert(source, tmp_path / "out", **SMALL)
    assert report.num_resumed >= 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


BIG = 123456789012345678901234567890
ODD = b'\xef\xbb\xbf{"limit": [0.0, Infinity], "low": -Infinity, "none": NaN, "big": %d}' % BIG


@pytest.mark.parametrize(
    "given", [{}, {"to": "cast:BF16"}, {"operations": "dequantise"}, {"operations": {"op": "reshard", "to": 1}}]
)
def test_infinity_and_nan_in_config_are_copied(given: dict[str, Any], tmp_path: Path) -> None:
    source = write(tmp_path / "source", ODD)
    (source / "generation_config.json").write_bytes(ODD)
    rules = {"rules": [["weight", "replicate"]]} if isinstance(given.get("operations"), dict) else {}
    operations = {**given["operations"], **rules} if rules else given.get("operations", ())
    convert(source, tmp_path / "out", **TOLD, **{**given, "operations": operations})
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found["limit"] == [0.0, float("inf")] and found["low"] == -float("inf")
    assert found["none"] != found["none"] and found["big"] == BIG
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == ODD


def test_infinity_in_adapter_config_is_parsed(tmp_path: Path) -> None:
    base = write(tmp_path / "base", b'{"quantization_config": {"quant_method": "fp8", "limit": NaN, "top": Infinity}}')
    codes = torch.full((128, 128), 8.0).to(torch.float8_e4m3fn)
    save_file({"a.weight": codes, "a.weight_scale": torch.tensor(0.5)}, base / "model.safetensors")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    pair = {"a.lora_A.weight": torch.ones(1, 128), "a.lora_B.weight": torch.ones(128, 1)}
    save_file({f"base_model.model.{name}": one for name, one in pair.items()}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('\ufeff{"r": 1, "lora_alpha": 1, "runtime_limit": Infinity}')
    convert([base, adapter], tmp_path / "out", operations="lora-merge", **TOLD)
    assert set(penstock.load(tmp_path / "out")["a.weight"].flatten().tolist()) == {5.0}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_index_with_nan_or_bom_is_parsed(tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    names = list(by_safetensors(source))
    index = {
        "metadata": {"total_size": float("nan"), "NaN": "Infinity"},
        "weight_map": dict.fromkeys(names, "model.safetensors"),
    }
    (source / "model.safetensors.index.json").write_text("\ufeff" + json.dumps(index))
    convert(source, tmp_path / "out", **TOLD)
    assert set(penstock.load(tmp_path / "out")) == set(names)


@pytest.mark.parametrize(
    ("names", "single", "index"),
    [
        (["model.safetensors"], "model.safetensors", "model.safetensors.index.json"),
        (["adapter_model.safetensors"], "adapter_model.safetensors", "adapter_model.safetensors.index.json"),
        (["consolidated.safetensors"], "consolidated.safetensors", "consolidated.safetensors.index.json"),
        (
            ["diffusion_pytorch_model.fp16.safetensors"],
            "diffusion_pytorch_model.fp16.safetensors",
            "diffusion_pytorch_model.safetensors.index.fp16.json",
        ),
        (
            [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)],
            "diffusion_pytorch_model.safetensors",
            "diffusion_pytorch_model.safetensors.index.json",
        ),
        (["left.safetensors", "right.safetensors"], "model.safetensors", "model.safetensors.index.json"),
    ],
)
def test_output_file_name_keeps_source_stem(names: list[str], single: str, index: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for i, name in enumerate(names):
        save_file({f"{i}.{part}.weight": torch.randn(64, 64) for part in "ab"}, source / name)
    wanted = by_safetensors(source)
    for into, given in (
        ("copy", {}),
        ("cast", {"to": "cast:F64"}),
        ("renamed", {"operations": {"op": "rename", "rules": [["a", "c"]]}}),
    ):
        convert(source, tmp_path / into, **TOLD, **given)
        assert [path.name for path in (tmp_path / into).glob("*.safetensors*")] == [single]
    convert(source, tmp_path / "shards", shard_bytes="20K", **TOLD)
    stem, count = single.removesuffix(".safetensors"), 2 * len(names)
    shards = {f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)}
    assert {path.name for path in (tmp_path / "shards").glob("*.safetensors*")} == {*shards, index}
    assert penstock.load(tmp_path / "shards").keys() == wanted.keys()
    assert penstock.verify(tmp_path / "shards").verified
    # The result is a valid source.
    convert(tmp_path / "shards", tmp_path / "again", **TOLD)
    assert [path.name for path in (tmp_path / "again").glob("*.safetensors*")] == [single]


def test_report_lists_uncopied_files_in_subfolders(tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    copied = {
        "modules.json": '[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]',
        "1_Pooling/config.json": "{}",
        "2_Dense/config.json": "{}",
        "additional_chat_templates/tool.jinja": "x",
        "deep/er/vocab.txt": "x",
    }
    named = {
        "onnx/config.json": "{}",
        "original/params.json": "{}",
        "2_Dense/model.safetensors": "x",
        "other/config.json": "{}",
        "other/model.safetensors": "x",
        "checkpoint-500/trainer_state.json": "{}",
        "pytorch_model.bin": "x",
        "pytorch_model.bin.index.json": "{}",
        "model.safetensors.index.fp16.json": "{}",
        "README.md": "x",
    }
    for name, text in (copied | named | {".git/config.json": "{}", "sub/penstock.manifest": "x"}).items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    del named["model.safetensors.index.fp16.json"]
    report = convert(source, tmp_path / "out", **TOLD)
    there = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert there == {*copied, "config.json", "model.safetensors", "penstock.manifest", "penstock.job"}
    assert set(report.left_out) == {str(source / name) for name in named} == set(report.why_left_out)
    assert all((tmp_path / "out" / name).read_text() == text for name, text in copied.items())
    assert "onnx" in report.summary()


def test_symlinks_and_special_files_are_not_copied(tmp_path: Path) -> None:
    source, secret = write(tmp_path / "source"), tmp_path / "secret"
    secret.mkdir()
    (secret / "key.txt").write_text("x")
    (source / "vocab.txt").symlink_to(secret / "key.txt")
    (source / "loop").symlink_to(source)
    (source / "away").symlink_to(secret)
    odd = os.fsencode(source) + b"/odd-\xff.json"
    with open(odd, "wb") as file:
        file.write(b"{}")
    (source / "part").mkdir()
    (source / "part" / "merges.txt").symlink_to("nowhere")
    os.mkfifo(source / "part" / "tokenizer.json")
    report = convert(source, tmp_path / "out", **TOLD)
    assert set(report.left_out) == {
        str(source / name) for name in ("loop", "away", "part/merges.txt", "part/tokenizer.json", "odd-\\udcff.json")
    }
    assert (tmp_path / "out" / "vocab.txt").read_text() == "x" and not (tmp_path / "out" / "vocab.txt").is_symlink()


@pytest.mark.parametrize("odd", ["a broken link", "not a regular file"])
def test_invalid_tokenizer_fails_conversion_before_reading(odd: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    if "link" in odd:
        (source / "tokenizer.json").symlink_to("nowhere")
    else:
        os.mkfifo(source / "tokenizer.json")
    with pytest.raises(FormatError, match=odd):
        convert(source, tmp_path / "out", **TOLD)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_large_vocabulary_is_copied_to_every_rank(tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    (source / "part").mkdir()
    with open(source / "part" / "tokenizer.json", "wb") as file:
        file.truncate(65 << 20)
    word = {"op": "reshard", "to": 2, "rules": [["weight", "0"]]}
    report = convert(source, tmp_path / "out", operations=word, **TOLD)
    ranks = [tmp_path / "out" / f"rank-0000{rank}-of-00002" for rank in range(2)]
    assert all((rank / "part" / "tokenizer.json").stat().st_size == 65 << 20 for rank in ranks)
    assert all((rank / "model.safetensors").is_file() for rank in ranks) and not report.left_out


def test_large_skipped_folder_is_reported_as_one_entry(tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    for folder in "ab":
        (source / folder).mkdir()
        for i in range(1001):
            (source / folder / f"{i}.txt").touch()
    (source / "b" / "c").mkdir()
    report = convert(source, tmp_path / "out", **TOLD)
    assert report.left_out == (str(source / "b" / "c"),)
    assert (tmp_path / "out" / "a" / "7.txt").exists()


def test_tilde_in_path_expands_to_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    write(tmp_path / "home" / "source")
    report = convert("~/source", "~/out", devices="cpu", workers=WorkerSettings(num_workers=1, trace="~/trace.json"))
    assert report.uri == str(tmp_path / "home" / "out")
    assert penstock.load("~/out").keys() == penstock.load(Path("~/source")).keys()
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"source", "out", "trace.json"}
    assert not (tmp_path / "~").exists()
    # No user has this name, so it is a plain file name.
    convert("~/source", "~no-such-user-x", **TOLD)
    assert (tmp_path / "~no-such-user-x").is_dir()


def test_uncopied_files_next_to_single_source_are_reported(tmp_path: Path) -> None:
    source = tmp_path / "unet"
    source.mkdir()
    save_file({"a": torch.ones(4, 4)}, source / "diffusion_pytorch_model.safetensors")
    only = convert(source / "diffusion_pytorch_model.safetensors", tmp_path / "only", **TOLD)
    assert not only.left_out
    for name in ("config.json", "adapter_config.json", ".hidden.json"):
        (source / name).write_text("{}")
    wanted = "files next to a single file are not copied: convert its directory instead"
    for given in (source / "diffusion_pytorch_model.safetensors", source / "*.safetensors"):
        report = convert(given, tmp_path / "one", **TOLD, replace=True)
        assert not (tmp_path / "one/config.json").exists()
        assert report.why_left_out == {str(source / name): wanted for name in ("adapter_config.json", "config.json")}
    with RangeServer(source) as server:
        url = f"{server.url}/diffusion_pytorch_model.safetensors"
        for given in (url, f"{url}?signature=secret"):
            report = convert(given, tmp_path / "http", **TOLD, replace=True)
            assert report.why_left_out == {f"{server.url}/": wanted}
            assert (tmp_path / "http/diffusion_pytorch_model.safetensors").is_file()


def test_report_names_http_directory_that_cannot_be_listed(tmp_path: Path) -> None:
    source = tmp_path / "adapter"
    (source / "1_Pooling").mkdir(parents=True)
    save_file({"a": torch.ones(4, 4)}, source / "model.safetensors")
    for name in ("config.json", "1_Pooling/config.json"):
        (source / name).write_text("{}")
    with RangeServer(source) as server:
        report = convert(server.url, tmp_path / "out", **TOLD)
        (place,) = report.left_out
        assert place.rstrip("/") == server.url.rstrip("/") and "HTTP has no listing" in report.why_left_out[place]
    assert (tmp_path / "out/config.json").is_file() and not (tmp_path / "out/1_Pooling").exists()


def test_valid_file_metadata_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "flux.safetensors"
    layers = json.dumps({"layers": {"a": {"format": "float8_e4m3fn"}}})
    told = {
        "modelspec.title": "x",
        "_quantization_metadata": layers,
        "penstock.dcp.bytes": "{}",
        "DCP_SHARDING_INFO": "{}",
    }
    codes = torch.full((128, 128), 8.0).to(torch.float8_e4m3fn)
    save_file({"a.weight": codes, "a.weight_scale": torch.tensor(0.5), "b": torch.ones(4)}, source, metadata=told)
    for into, given in (("copy", {}), ("cast", {"to": "cast:BF16"}), ("values", {"operations": "dequantise"})):
        convert(source, tmp_path / into, **TOLD, **given)
        with safe_open(tmp_path / into / "flux.safetensors", "pt") as file:
            found = file.metadata()
        wanted = {"format": "pt", "modelspec.title": "x"} | (
            {} if into == "values" else {"_quantization_metadata": layers}
        )
        assert found == wanted, into
    told["_quantization_metadata"] = json.dumps({"layers": {"a": {"format": "mxfp8"}}})
    save_file({"a.weight": codes, "a.weight_scale": torch.ones(128, 4, dtype=torch.uint8)}, source, metadata=told)
    with pytest.raises(PlanError, match="_quantization_metadata: mxfp8"):
        convert(source, tmp_path / "refused", operations="dequantise", **TOLD)
