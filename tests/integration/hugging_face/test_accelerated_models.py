"""Kinds of models and of `from_pretrained` calls load the same bits inside `patched_libraries()`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.integration.convert.test_quantised import QWEN3, by_compressed_tensors, qwen3, rewrite, write_llama
from tests.integration.hugging_face.test_accelerated_transformers import assert_same_model
from tests.support.hugging_face import serving
from tests.support.servers.hugging_face import HuggingFaceServer
from tests.support.tiny_models import save_llama

from penstock_hf.patched_libraries import patched_libraries

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    mixtral = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    transformers.MixtralForCausalLM(mixtral).to(torch.bfloat16).save_pretrained(root / "mixtral", max_shard_size="90KB")
    moe = transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32)
    transformers.Qwen3MoeForCausalLM(moe).save_pretrained(root / "moe")
    plain = write_llama(root / "plain")
    rewrite(plain, root / "fp8", qwen3, QWEN3)
    for preset in ("FP8_DYNAMIC", "INT8"):
        rewrite(plain, root / preset, *by_compressed_tensors(preset))
    nested = root / "nested"
    save_llama(nested / "inner")
    save_llama(nested, variant="fp16", dtype=torch.float16)
    bert = transformers.BertConfig(**{**SIZES, "num_key_value_heads": 4}, num_labels=3)
    classifier = transformers.BertForSequenceClassification(bert)
    classifier.save_pretrained(root / "bert")
    (root / "bert" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    transformers.BertTokenizer.from_pretrained(root / "bert").save_pretrained(root / "bert")
    names = ("mixtral", "moe", "plain", "fp8", "FP8_DYNAMIC", "INT8", "nested", "bert")
    return {f"org/{name}": root / name for name in names}


@pytest.fixture
def hub(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HuggingFaceServer]:
    with serving(models, tmp_path / "hf", monkeypatch) as server:
        yield server


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixtral", {}),
        ("mixtral", {"dtype": torch.float32}),
        ("mixtral", {"device_map": "auto"}),
        ("moe", {"dtype": torch.bfloat16}),
        ("fp8", {}),
        ("FP8_DYNAMIC", {}),
        ("INT8", {}),
        ("plain", {"device_map": "cpu"}),
        ("plain", {"device_map": {"": "cpu"}}),
        ("nested", {"subfolder": "inner"}),
        ("nested", {"variant": "fp16", "dtype": "auto"}),
    ],
    ids=str,
)
def test_model_matches_unpatched_transformers(
    name: str, options: dict[str, Any], hub: HuggingFaceServer, models: dict[str, Path]
) -> None:
    with patched_libraries() as report:
        mine = transformers.AutoModelForCausalLM.from_pretrained(f"org/{name}", **options)
        again = transformers.AutoModelForCausalLM.from_pretrained(models[f"org/{name}"], **options)
    assert report.streamed and report.local
    true = transformers.AutoModelForCausalLM.from_pretrained(models[f"org/{name}"], **options)
    assert_same_model(mine, true)
    assert_same_model(again, true)


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"])
def test_models_with_different_heads_match_transformers(
    auto: str, hub: HuggingFaceServer, models: dict[str, Path]
) -> None:
    results = []
    for block, place in (
        (patched_libraries(), "org/bert"),
        (patched_libraries(), models["org/bert"]),
        (None, models["org/bert"]),
    ):
        # Heads that the checkpoint lacks are initialised at random.
        torch.manual_seed(1)
        if block is None:
            results.append(getattr(transformers, auto).from_pretrained(place))
            continue
        with block:
            results.append(getattr(transformers, auto).from_pretrained(place))
    assert_same_model(results[0], results[2])
    assert_same_model(results[1], results[2])


def test_transformers_pipeline_is_streamed(hub: HuggingFaceServer, models: dict[str, Path]) -> None:
    with patched_libraries() as report:
        mine = transformers.pipeline("text-classification", "org/bert", device="cpu")
    assert report.streamed
    true = transformers.pipeline("text-classification", str(models["org/bert"]), device="cpu")
    assert_same_model(mine.model, true.model)
    assert mine("a b") == true("a b")


def test_requested_revision_is_streamed(hub: HuggingFaceServer, models: dict[str, Path], tmp_path: Path) -> None:
    files = {
        path.name: path.read_bytes() for path in save_llama(tmp_path / "other", tie_word_embeddings=True).iterdir()
    }
    commit = hub.commit("org/plain", files, branch="other")
    for revision in ("other", commit):
        with patched_libraries() as report:
            mine = transformers.AutoModelForCausalLM.from_pretrained("org/plain", revision=revision)
        assert report.streamed == [f"hf://org/plain@{commit}/model.safetensors"]
        assert_same_model(mine, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "other"))
