"""Conversions from and to GGUF have the bits of the format's own package, for any size of a task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from safetensors.torch import load_file, save_file
from tests.support import gguf_file
from tests.support.compare import assert_same

import penstock as ps
import penstock_convert
from penstock.errors import ConfigError, OperationFailed, PlanError

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")


def convert(sources: Any, into: Path, workers: penstock_convert.WorkerSettings | int = 1, **options: Any) -> Path:
    ps.convert(sources, into, devices="cpu", workers=workers, **options)
    return into


def values_of(path: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a file as the package reads it, with quantised ones as F32."""
    return {
        entry.name: torch.from_numpy(np.array(quants.dequantize(entry.data, entry.tensor_type)))
        if entry.tensor_type.name in {kind.type for kind in ps.inspect(path).blocks.values()}
        else gguf_file.expected_tensors(path)[entry.name]
        for entry in gguf.GGUFReader(path).tensors
    }


def fields_of(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields.items()
    return {key: field.contents() for key, field in fields if not key.startswith("GGUF.")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path,) = gguf_file.write(tmp_path_factory.mktemp("source") / "tiny.gguf")
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    tensors = {
        "embed.weight": torch.randn(64, 96).bfloat16(),
        "experts": torch.randn(3, 10, 64).half(),
        "norm.weight": torch.randn(33).bfloat16(),
        "odd.weight": torch.randn(5, 40),
        "ids": torch.arange(6),
        "scalar": torch.tensor(2.5),
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    return directory


@pytest.mark.parametrize(("to", "task_bytes"), [("F32", "64M"), ("BF16", 700), ("F16", 3000)])
def test_dequantised_values_match_gguf_package(model: Path, tmp_path: Path, to: str, task_bytes: int | str) -> None:
    out = convert(
        model,
        tmp_path / "out",
        operations=f"dequantise:to={to}",
        workers=penstock_convert.WorkerSettings(num_workers=1, task_bytes=task_bytes),
    )
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[to]
    blocks = ps.inspect(model).blocks
    wanted = {name: tensor.to(dtype) if name in blocks else tensor for name, tensor in values_of(model).items()}
    assert_same(load_file(out / "model.safetensors"), wanted)
    assert ps.verify(out).verified


def test_quantised_blocks_are_not_copied_to_safetensors(model: Path, tmp_path: Path) -> None:
    for options in ({}, {"to": "cast:F16"}, {"operations": {"op": "rename", "rules": [["a", "b"]]}}):
        with pytest.raises(PlanError, match=r"GGUF file that stores the tensor as Q8_0.*put `dequantise` first"):
            convert(model, tmp_path / "out", **options)
    with pytest.raises(PlanError, match=r"stores the tensor as Q8_0.*put `dequantise:to=F32` before"):
        convert(model, tmp_path / "out", to="gguf:BF16")
    assert not (tmp_path / "out").exists()


def test_merge_uses_dequantised_values_of_quantised_models(tmp_path: Path) -> None:
    models = [gguf_file.write(tmp_path / f"{seed}.gguf", seed=seed)[0] for seed in (0, 1)]
    merged = load_file(convert(models, tmp_path / "out", operations="average") / "model.safetensors")
    a, b = (values_of(path)["blk.0.attn_q.weight"].bfloat16().float() for path in models)
    assert torch.equal(merged["blk.0.attn_q.weight"], ((a + b) / 2).bfloat16())


def test_gguf_copy_preserves_blocks_and_metadata(model: Path, tmp_path: Path) -> None:
    out = convert(model, tmp_path / "out", to="gguf") / "model.gguf"
    assert_same(gguf_file.expected_tensors(out), gguf_file.expected_tensors(model))
    assert fields_of(out) == fields_of(model)
    assert ps.inspect(out).blocks == ps.inspect(model).blocks
    assert ps.verify(tmp_path / "out").verified


def test_split_gguf_is_merged_into_one_file(tmp_path: Path) -> None:
    parts = gguf_file.write(tmp_path / "tiny.gguf", parts=4)
    out = convert(parts[0], tmp_path / "out", to="gguf") / "model.gguf"
    assert_same(gguf_file.expected_tensors(out), gguf_file.expected_tensors(*parts))
    assert not [key for key in fields_of(out) if key.startswith("split.")]


@pytest.mark.parametrize(("kind", "file_type"), [("Q8_0", 7), ("BF16", 32), ("F16", 1), ("F32", 0)])
def test_requantised_gguf_matches_gguf_package(model: Path, tmp_path: Path, kind: str, file_type: int) -> None:
    workers = penstock_convert.WorkerSettings(num_workers=1, task_bytes=5000)
    out = convert(model, tmp_path / "out", workers, operations="dequantise:to=F32", to=f"gguf:{kind}") / "model.gguf"
    _check(out, values_of(model), kind)
    fields = fields_of(out)
    assert fields.pop("general.file_type") == file_type
    assert fields.pop("general.quantization_version", 2) == 2
    assert fields == fields_of(model)


@pytest.mark.parametrize("kind", ["Q8_0", "BF16", "F16"])
def test_safetensors_are_converted_to_gguf(llama: Path, tmp_path: Path, kind: str) -> None:
    operation = {"op": "gguf", "type": kind, "architecture": "llama"}
    out = (
        convert(
            llama,
            tmp_path / "out",
            operations=operation,
            workers=penstock_convert.WorkerSettings(num_workers=1, task_bytes=2000),
        )
        / "model.gguf"
    )
    _check(out, load_file(llama / "model.safetensors"), kind)
    assert fields_of(out)["general.architecture"] == "llama"


def test_gguf_round_trip_keeps_tensors(llama: Path, tmp_path: Path) -> None:
    there = convert(llama, tmp_path / "there", to="gguf")
    assert fields_of(there / "model.gguf") == {"general.architecture": "unknown"}
    back = convert(there, tmp_path / "back")
    assert_same(load_file(back / "model.safetensors"), load_file(llama / "model.safetensors"))


def _check(path: Path, source: Mapping[str, torch.Tensor], kind: str) -> None:
    """Compare a file with the package's result for each tensor."""
    entries = {entry.name: entry for entry in gguf.GGUFReader(path).tensors}
    assert sorted(entries) == sorted(source)
    for name, tensor in source.items():
        entry = entries[name]
        wanted = kind
        if not tensor.is_floating_point():
            wanted = {torch.int32: "I32", torch.int64: "I64"}[tensor.dtype]
        elif tensor.ndim < 2:
            wanted = "F32"
        elif kind == "Q8_0" and tensor.shape[-1] % 32:
            wanted = "F16"
        assert entry.tensor_type.name == wanted, name
        assert entry.shape.tolist()[::-1] == list(tensor.shape)
        raw = np.ascontiguousarray(entry.data).tobytes()
        if wanted == "Q8_0":
            assert raw == quants.quantize(tensor.float().numpy(), Type.Q8_0).tobytes(), name
            continue
        dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        expected = tensor.to(dtypes.get(wanted, tensor.dtype)).contiguous().reshape(-1).view(torch.uint8)
        assert raw == expected.numpy().tobytes(), name


@pytest.mark.parametrize(
    ("tensors", "options", "fault"),
    [
        ({"a": torch.ones(2, 32)}, {"to": "gguf:Q4_K"}, r"cannot write GGUF tensors of type 'Q4_K'"),
        ({"a": torch.ones(2, 2).bool()}, {"to": "gguf"}, "GGUF does not support BOOL"),
        ({"a": torch.ones(2, 2).to(torch.float8_e4m3fn)}, {"to": "gguf:F16"}, "GGUF does not support F8_E4M3"),
        ({"a": torch.ones(1, 1, 1, 1, 2)}, {"to": "gguf"}, "at most 4 dims, but this tensor has 5"),
        ({"a": torch.ones(2, 2)}, {"operations": ["gguf", "copy"]}, "gguf must be the last operation"),
        ({"a": torch.full((2, 32), float("nan"))}, {"to": "gguf:Q8_0"}, r"Q8_0 cannot hold .*tensor 'a'"),
    ],
)
def test_conversion_to_unsupported_gguf_is_refused(
    tensors: dict[str, torch.Tensor], options: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises((PlanError, ConfigError, OperationFailed), match=fault):
        convert(tmp_path / "model.safetensors", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_reserved_gguf_tensor_name_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    writer.add_tensor("__metadata__", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(PlanError, match="__metadata__"):
        convert(tmp_path / "odd.gguf", tmp_path / "out", operations="copy")
    save_file({"w": torch.ones(2)}, tmp_path / "plain.safetensors")
    rename = {"op": "rename", "rules": [("w", "__metadata__")]}
    with pytest.raises(PlanError, match="__metadata__"):
        convert(tmp_path / "plain.safetensors", tmp_path / "out", operations=[rename])
    assert not (tmp_path / "out").exists()
