"""Tensors larger than a worker's memory, and operations that take longer than a worker may be silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.compare import by_safetensors

import penstock
from penstock.cli.checkpoints import manifest
from penstock.errors import BudgetTooSmall, ConfigError
from penstock.types import MIB
from penstock_convert.convert import WorkerSettings, convert

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")

ROWS, COLUMNS = 1024, 1536  # 6 MiB of FP32
SMALL = "8M"
LARGE = "256M"
MERGES: dict[str, tuple[int, dict[str, Any]]] = {
    "slerp": (2, {"operations": [{"op": "slerp", "t": 0.3}]}),
    "slerp, then stored": (2, {"operations": [{"op": "slerp", "t": 0.3}], "to": "fp8-block128"}),
    "ties": (3, {"operations": [{"op": "ties", "density": 0.3, "weights": [0.7, 0.5]}]}),
    "ties, then cast": (3, {"operations": [{"op": "ties", "density": 0.3}], "to": "cast:BF16"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return three models with one large tensor and some small ones. Two have a manifest."""
    chance, found = torch.Generator().manual_seed(7), list[Path]()
    base = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(ROWS, COLUMNS, generator=chance),
        "model.norm.weight": torch.randn(COLUMNS, generator=chance),
        "steps": torch.arange(5),
    }
    for i in range(3):
        directory = tmp_path_factory.mktemp(f"model{i}")
        tensors = {
            name: t + torch.randn(t.shape, generator=chance) if t.is_floating_point() else t for name, t in base.items()
        }
        if i == 1:
            tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
        if i < 2:
            manifest(str(directory))
        found.append(directory)
    return found


def single(memory_bytes: int | str) -> WorkerSettings:
    """Convert with one worker with this memory limit."""
    return WorkerSettings(num_workers=1, memory_bytes=memory_bytes)


@pytest.mark.parametrize("case", MERGES)
def test_tensor_above_memory_limit_merges_bit_identically(case: str, models: list[Path], tmp_path: Path) -> None:
    count, words = MERGES[case]
    told = {"devices": "cpu"} | words
    whole = convert(models[:count], tmp_path / "whole", workers=single(LARGE), **told)
    parts = convert(models[:count], tmp_path / "parts", workers=single(SMALL), **told)
    assert whole.peak_bytes > 8 * MIB >= parts.peak_bytes
    assert parts.revision == whole.revision
    assert penstock.verify(tmp_path / "parts").verified


def test_task_size_is_limited_by_memory(models: list[Path], tmp_path: Path) -> None:
    report = convert(
        models[:2],
        tmp_path / "out",
        operations=[{"op": "linear"}],
        devices="cpu",
        workers=single("4M"),
    )
    assert report.peak_bytes <= 4 * MIB and report.num_tasks > 4
    found, (first, second) = by_safetensors(tmp_path / "out"), map(by_safetensors, models[:2])
    for name, tensor in found.items():
        wanted = (first[name].float() + second[name].float()) / 2 if name != "steps" else first[name]
        assert torch.allclose(tensor, wanted, atol=1e-5)


def test_error_for_too_little_memory_states_minimum(models: list[Path], tmp_path: Path) -> None:
    told: dict[str, Any] = {"operations": [{"op": "slerp", "t": 0.5}], "devices": "cpu"}
    with pytest.raises(BudgetTooSmall) as caught:
        convert(models[:2], tmp_path / "out", workers=single("1M"), **told)
    convert(models[:2], tmp_path / "out", workers=single(caught.value.minimum_bytes), **told)


def test_slow_operation_reporting_progress_is_not_aborted(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_STALL_S", "2")
    words = [{"op": "function", "function": "tests.support.jobs:reports"}]
    report = convert(models[0], tmp_path / "out", operations=words, devices="cpu", workers=1)
    assert [one.end for one in report.workers] == ["finished"]


@pytest.mark.parametrize(
    "word",
    [
        {"op": "slerp", "t": 7},
        {"op": "slerp", "t": -0.1},
        {"op": "slerp", "t": float("nan")},
        {"op": "linear", "weights": [float("nan"), 1]},
        {"op": "linear", "weights": [float("inf"), 1]},
        {"op": "linear", "weights": [1e999, 1], "normalize": False},
        {"op": "ties", "density": 0.5, "weights": [float("nan")]},
        {"op": "ties", "density": 0.5, "scale": float("inf")},
    ],
)
def test_invalid_merge_settings_are_rejected(word: dict[str, Any], models: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=word["op"]):
        convert(models[:2], tmp_path / "out", operations=[word], devices="cpu", workers=1)
    assert not list(tmp_path.iterdir())
