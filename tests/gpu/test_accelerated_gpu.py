"""transformers on a GPU inside `patched_libraries()`: bit-identical models and limited host memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("huggingface_hub")

from tests.support.hugging_face import serving  # noqa: E402 - after what it needs
from tests.support.own_memory import OwnMemoryPeak  # noqa: E402
from tests.support.servers.hugging_face import HuggingFaceServer  # noqa: E402

from penstock.types import MIB  # noqa: E402
from penstock_hf.patched_libraries import patched_libraries  # noqa: E402

pytestmark = pytest.mark.gpu

BOUND = 64 * MIB


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16
    )
    model = transformers.LlamaForCausalLM(llama).to(torch.bfloat16)
    model.save_pretrained(root / "llama", max_shard_size="300MB")
    mixtral = transformers.MixtralConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.MixtralForCausalLM(mixtral).save_pretrained(root / "mixtral")
    return {"org/llama": root / "llama", "org/mixtral": root / "mixtral"}


@pytest.fixture
def hub(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HuggingFaceServer]:
    with serving(models, tmp_path / "hf", monkeypatch) as server:
        yield server


def assert_same(mine: Any, true: Any) -> None:
    ours, theirs = mine.state_dict(), true.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].device == tensor.device and ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("name", ["org/llama", "org/mixtral"])
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float16}])
def test_patched_libraries_load_model_on_gpu(
    name: str, options: dict[str, Any], hub: HuggingFaceServer, models: dict[str, Path]
) -> None:
    auto = transformers.AutoModelForCausalLM
    with patched_libraries() as report:
        mine = auto.from_pretrained(name, device_map="cuda", **options)
    assert report.streamed
    assert_same(mine, auto.from_pretrained(models[name], device_map="cuda", **options))
    with patched_libraries():
        assert_same(auto.from_pretrained(models[name], device_map="cuda", **options), mine)


def test_loading_to_gpu_uses_limited_host_memory(hub: HuggingFaceServer, models: dict[str, Path]) -> None:
    auto = transformers.AutoModelForCausalLM
    # The first load allocates the driver's own memory.
    auto.from_pretrained(models["org/mixtral"], device_map="cuda")
    size = sum(os.path.getsize(path) for path in models["org/llama"].glob("*.safetensors"))
    # In another process the hub would not count. Here its files were in memory before.
    with patched_libraries(memory_bytes=BOUND), OwnMemoryPeak() as peak:
        auto.from_pretrained("org/llama", device_map="cuda")
    # This allows four tensors in flight, of 66 MB at most, and the interpreter's own objects.
    assert peak.nbytes < BOUND + 4 * 66e6 + 100e6 < size
