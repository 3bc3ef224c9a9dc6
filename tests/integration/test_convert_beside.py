"""Files beside the weights: configurations, vocabularies, a second copy of the model; what a failure leaves behind."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.truth import by_safetensors

import penstock
from penstock.errors import DiskFull, FormatError, OperationFailed, SourceChanged, SourceTruncated
from penstock.jobs.convert import convert
from penstock.jobs.operations.operation import Copy
from penstock.jobs.result import Journal

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")

TOLD: dict[str, Any] = {"devices": "cpu", "workers": 1}
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
def test_a_configuration_that_is_none_is_told_before_anything_is_read(config: bytes, tmp_path: Path) -> None:
    source, done = write(tmp_path / "source", config), list[int]()
    with pytest.raises(FormatError, match=r"config\.json"):
        convert(source, tmp_path / "out", progress=lambda *_: done.append(1), **TOLD)
    assert not done and [path.name for path in tmp_path.iterdir()] == ["source"]


class Configured(Copy):
    """A user's operation whose `config` does not do what it should."""

    def __init__(self, gives: str) -> None:
        object.__setattr__(self, "gives", gives)

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.gives == "raises":  # type: ignore[attr-defined]
            raise KeyError("hidden_size")
        return {"list": [1], "object": {"of": object()}}[self.gives]  # type: ignore[attr-defined,return-value]


@pytest.mark.parametrize("gives", ["raises", "list", "object"])
def test_an_operation_whose_config_fails_is_named_before_anything_is_read(gives: str, tmp_path: Path) -> None:
    source, done = write(tmp_path / "source"), list[int]()
    word = {"op": "function", "function": f"{__name__}:Configured", "gives": gives}
    with pytest.raises(OperationFailed, match=r"config\(\) failed on config.json") as caught:
        convert(source, tmp_path / "out", operations=[word], progress=lambda *_: done.append(1), **TOLD)
    assert not done and not caught.value.mutated
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_vocabularies_and_code_go_along_and_weights_of_other_formats_do_not(tmp_path: Path) -> None:
    source = write(tmp_path / "source", json.dumps({"model_type": "own"}).encode())
    for name in BESIDE + NOT_COPIED:
        (source / name).write_bytes(name.encode())
    convert(source, tmp_path / "out", **TOLD)
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {*BESIDE, "config.json", "model.safetensors", "penstock.manifest", "penstock.job"}
    assert all((tmp_path / "out" / name).read_bytes() == name.encode() for name in BESIDE)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_second_copy_of_the_model_is_left_out_and_the_report_says_so(shards: int, tmp_path: Path) -> None:
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


def test_nothing_is_left_behind_by_a_source_that_was_cut_short(tmp_path: Path) -> None:
    source = write(tmp_path / "source", count=16)

    def cut(done: int, total: int) -> None:
        if done == 2:
            os.truncate(source / "model.safetensors", 1 << 20)

    with pytest.raises((SourceTruncated, SourceChanged)):
        convert(source, tmp_path / "out", progress=cut, task_bytes="256K", **TOLD)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_journal_that_has_no_room_for_its_first_line_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Journal, line: bytes) -> None:
        raise DiskFull("cannot write: no space left on device", uri=str(self.path))

    monkeypatch.setattr(Journal, "_write", full)
    with pytest.raises(DiskFull):
        convert(write(tmp_path / "source"), tmp_path / "out", **TOLD)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_is_kept_of_a_failed_conversion_is_said(tmp_path: Path) -> None:
    source = write(tmp_path / "source", count=16)

    def fail(done: int, total: int) -> None:
        if done == 3:
            raise DiskFull("cannot write: no space left on device", uri=str(tmp_path / "out"))

    with pytest.raises(DiskFull) as caught:
        convert(source, tmp_path / "out", progress=fail, task_bytes="256K", **TOLD)
    (kept,) = [path for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith(".out")]
    assert caught.value.hint is not None
    assert "3 finished tasks are kept" in caught.value.hint and str(kept) in caught.value.hint
    report = convert(source, tmp_path / "out", task_bytes="256K", **TOLD)
    assert report.num_resumed >= 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
