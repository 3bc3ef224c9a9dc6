"""transformers moves local files to a GPU through Penstock inside `patched_libraries()`, bit for bit.

This host has no GPU, so the CPU takes the place of the device. `tests/gpu/test_accelerated_gpu.py` uses a real one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.support.hugging_face import assert_same_model
from tests.support.tiny_models import save_llama
from transformers import core_model_loading

from penstock_hf import safetensors as compat
from penstock_hf.patched_libraries import reading
from penstock_hf.transformers import patched_libraries

AutoModelForCausalLM = transformers.AutoModelForCausalLM
ORIGINAL = core_model_loading._materialize_copy


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "one": save_llama(root / "one"),
        "sharded": save_llama(root / "sharded", dtype=torch.bfloat16, max_shard_size="60KB"),
        "tied": save_llama(root / "tied", tie_word_embeddings=True),
    }


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the CPU be the GPU, and return the names of the tensors that Penstock has moved."""
    names: list[str] = []
    tensor_on = reading.DiskFile.tensor_on

    def noted(self: reading.DiskFile, device: torch.device, name: str) -> torch.Tensor:
        names.append(name)
        return tensor_on(self, device, name)

    monkeypatch.setattr(compat, "is_gpu", lambda device: True)
    monkeypatch.setattr(compat, "is_large", lambda path: True)
    monkeypatch.setattr(reading, "gpu_of", lambda device: torch.device("cpu"))
    monkeypatch.setattr(reading.DiskFile, "tensor_on", noted)
    return names


@pytest.mark.parametrize("name", ["one", "sharded", "tied"])
@pytest.mark.parametrize("dtype", ["auto", torch.float16])
def test_local_model_is_moved_by_penstock(name: str, dtype: Any, models: dict[str, Path], moved: list[str]) -> None:
    true = AutoModelForCausalLM.from_pretrained(models[name], dtype=dtype)
    with patched_libraries() as report:
        mine = AutoModelForCausalLM.from_pretrained(models[name], dtype=dtype)
    assert_same_model(mine, true)
    assert len(moved) == len(set(moved)) == len(list(true.parameters()))
    assert set(report.local) == {str(path) for path in models[name].glob("*.safetensors")}
    # The last context restores the function.
    assert core_model_loading._materialize_copy is ORIGINAL


def test_nested_contexts_restore_function_once(models: dict[str, Path], moved: list[str]) -> None:
    true = AutoModelForCausalLM.from_pretrained(models["one"])
    with patched_libraries(), patched_libraries():
        assert_same_model(AutoModelForCausalLM.from_pretrained(models["one"]), true)
        assert core_model_loading._materialize_copy is not ORIGINAL
        assert_same_model(AutoModelForCausalLM.from_pretrained(models["one"]), true)
    assert core_model_loading._materialize_copy is ORIGINAL and moved


def test_unknown_transformers_reads_by_itself(
    models: dict[str, Path], moved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_other_arguments(tensor: Any, place: Any = None, dtype: Any = None) -> Any:
        return ORIGINAL(tensor, place, dtype)

    true = AutoModelForCausalLM.from_pretrained(models["one"])
    monkeypatch.setattr(core_model_loading, "_materialize_copy", with_other_arguments)
    with patched_libraries():
        assert_same_model(AutoModelForCausalLM.from_pretrained(models["one"]), true)
    assert not moved and core_model_loading._materialize_copy is with_other_arguments


def test_damaged_file_raises_and_restores_function(models: dict[str, Path], moved: list[str], tmp_path: Path) -> None:
    copy = tmp_path / "one"
    shutil.copytree(models["one"], copy)
    weights = next(copy.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"safetensors|Safetensor|truncated|incomplete") as stock:
        AutoModelForCausalLM.from_pretrained(copy)
    with pytest.raises(type(stock.value)), patched_libraries():
        AutoModelForCausalLM.from_pretrained(copy)
    assert core_model_loading._materialize_copy is ORIGINAL
