"""Merged PEFT adapters: transformers loads the result, and its logits equal those of PEFT's own model.

The reference is the model with the separate adapter, as it was trained. PEFT's `merge_and_unload` adds to a tied
embedding in place and so changes the tied head as well. Its logits then differ and are no reference.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.compare import by_safetensors

transformers = pytest.importorskip("transformers", minversion="5.23")
peft = pytest.importorskip("peft", minversion="0.18")

from tests.unit.sync.small_models import CONFIGS, SMALL, make  # noqa: E402 - after what it needs

from penstock.errors import ConfigError, PlanError  # noqa: E402
from penstock_convert.convert import WorkerSettings, convert  # noqa: E402

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")

MODELS: dict[str, Callable[[], Any]] = CONFIGS | {
    "biased": lambda: transformers.LlamaConfig(**SMALL, attention_bias=True),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64),
    "gemma": lambda: transformers.GemmaConfig(**SMALL, head_dim=8),
}
ATTENTION = ["q_proj", "o_proj"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"target_modules": "all-linear"}),
    "patterns": (
        "llama",
        {
            "target_modules": [*ATTENTION, "down_proj"],
            "rank_pattern": {"layers.1.mlp.down_proj": 2},
            "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 3},
        },
    ),
    "rslora": ("llama", {"target_modules": ATTENTION, "use_rslora": True}),
    "experts apart": ("qwen3-moe", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate"]}),
    "latent attention": ("deepseek-v3", {"target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gemma": ("gemma", {"target_modules": "all-linear"}),
    "embedding and head": ("llama", {"target_modules": [*ATTENTION, "embed_tokens", "lm_head"]}),
    "embedding saved": ("llama", {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens"]}),
    "head saved": ("llama", {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "norm"]}),
    "tied, embedding saved": ("tied", {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens"]}),
    "tied, head saved": ("gemma", {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]}),
    "tied, both saved": ("tied", {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied, kept tied": (
        "tied",
        {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tied, embedding": ("tied", {"target_modules": [*ATTENTION, "embed_tokens"]}),
    "tied, head": ("tied", {"target_modules": [*ATTENTION, "lm_head"]}),
    "tied, embedding kept tied": (
        "tied",
        {"target_modules": [*ATTENTION, "embed_tokens"], "ensure_weight_tying": True},
    ),
    "tied, wte": ("gpt2", {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True}),
    "transposed, with a head": ("gpt2", {"target_modules": ["c_attn", "c_proj", "lm_head"], "fan_in_fan_out": True}),
    "all biases": ("biased", {"target_modules": ["q_proj"], "bias": "all"}),
    "its biases": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "bias": "lora_only"}),
    "bias of the factors": ("biased", {"target_modules": ["q_proj", "k_proj"], "lora_bias": True, "use_rslora": True}),
}
STAYS_TIED = {"tied, kept tied", "tied, embedding kept tied", "gemma", "transposed", "its biases"}

RESIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {"target_modules": ATTENTION}),
    "tied": ("tied", {"target_modules": ATTENTION}),
    "tied, embedding saved": ("tied", {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens"]}),
    "untied, embedding": ("llama", {"target_modules": [*ATTENTION, "embed_tokens", "lm_head"]}),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def trained(which: str, options: dict[str, Any], into: Path, *, vocab_size: int | None = None) -> torch.Tensor:
    """Write a base and a random adapter. Return the logits of the model with the separate adapter."""
    torch.manual_seed(3)
    make(MODELS[which]()).save_pretrained(into / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of tied embeddings, of Conv1D, of what it saves
        model = transformers.AutoModelForCausalLM.from_pretrained(into / "base")
        if vocab_size is not None:
            model.resize_token_embeddings(vocab_size)
        config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | options)
        model = peft.get_peft_model(model, config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(into / "adapter")
        return logits(model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(24).view(2, 12)).logits


def merge(into: Path, task_bytes: str | None = None) -> Path:
    words = [{"op": "lora-merge"}]
    workers = WorkerSettings(num_workers=1, task_bytes=task_bytes)
    convert([into / "base", into / "adapter"], into / "merged", operations=words, devices="cpu", workers=workers)
    return into / "merged"


def assert_computes(merged: Path, wanted: torch.Tensor) -> Any:
    """Check that the checkpoint is complete, has no unexpected tensor, and gives these logits."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    found = logits(model)
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-4), (found - wanted).abs().max()
    return model


@pytest.mark.parametrize("case", CASES)
def test_merged_adapter_matches_peft_logits(case: str, tmp_path: Path) -> None:
    which, options = CASES[case]
    wanted = trained(which, options, tmp_path)
    merged = merge(tmp_path)
    assert_computes(merged, wanted)
    before, after = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("base", "merged"))
    was_tied = bool(before.get("tie_word_embeddings"))
    assert bool(after.get("tie_word_embeddings")) == (was_tied and case in STAYS_TIED)
    after["tie_word_embeddings"] = before.get("tie_word_embeddings")
    assert after == {"tie_word_embeddings": None} | before, "nothing else of the configuration changes"


@pytest.mark.parametrize("case", RESIZED)
def test_resized_vocabulary_updates_config(case: str, tmp_path: Path) -> None:
    which, options = RESIZED[case]
    wanted = trained(which, options, tmp_path, vocab_size=104)
    model = assert_computes(merge(tmp_path), wanted)
    assert model.config.vocab_size == 104
    assert model.config.tie_word_embeddings == (case == "tied")


def test_fp32_adapter_keeps_base_dtype(tmp_path: Path) -> None:
    torch.manual_seed(3)
    trained("tied", {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens"], "lora_alpha": 0}, tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    found = by_safetensors(merge(tmp_path, task_bytes="2K"))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert torch.equal(found["lm_head.weight"], base.get_input_embeddings().weight)
    given = by_safetensors(tmp_path / "adapter")["base_model.model.model.embed_tokens.weight"]
    assert torch.equal(found["model.embed_tokens.weight"], given.bfloat16())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("alora_invocation_tokens", [1, 2]),
        ("use_dora", True),
        ("trainable_token_indices", [3]),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("init_lora_weights", "lora_ga"),
    ],
)
def test_non_additive_adapter_is_refused_before_reading(option: str, value: object, tmp_path: Path) -> None:
    trained("llama", {"target_modules": ATTENTION}, tmp_path)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {option: value}))
    with pytest.raises(ConfigError, match=option):
        merge(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["adapter", "base"]


def test_fused_expert_adapter_is_refused(tmp_path: Path) -> None:
    trained("qwen3-moe", {"target_modules": "all-linear"}, tmp_path)
    with pytest.raises(PlanError, match="fused experts"):
        merge(tmp_path)


def test_trained_token_adapter_is_refused(tmp_path: Path) -> None:
    trained("tied", {"target_modules": ATTENTION, "trainable_token_indices": [1, 2]}, tmp_path)
    with pytest.raises((ConfigError, PlanError), match="token"):
        merge(tmp_path)
