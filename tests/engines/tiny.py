"""Tiny models of several architectures with random weights, and their logits in transformers and vLLM, as ground truth.

`test_convert_truth` and `test_merge_truth` compare results with these logits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

PROMPT = (1, 5, 9, 200, 17, 33, 2, 8)
VOCAB = 320
_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 319,
}
_LATENT = {
    # kv_a_proj_with_mqa has 128 + 128 rows, which are whole blocks. convert/test_quantised.py tests partial blocks.
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 128,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, Callable[..., Any]] = {
    "llama": lambda **more: transformers.LlamaConfig(**_SHARED, num_key_value_heads=2, **more),
    "qwen3_moe": lambda **more: transformers.Qwen3MoeConfig(
        **_SHARED,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        **more,
    ),
    "deepseek_v3": lambda **more: transformers.DeepseekV3Config(**_SHARED, num_key_value_heads=4, **_LATENT, **more),
    "gemma3": lambda **more: transformers.Gemma3TextConfig(**_SHARED, num_key_value_heads=2, head_dim=64, **more),
    "gpt2": lambda **more: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=256, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=319, **more
    ),
}
"""Configuration for each architecture. The sizes have several blocks of 128, and no partial block."""

_ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    prompt, vocab, dtype, *models = json.loads(sys.argv[1])
    for model in models:
        llm = LLM(
            model=model, skip_tokenizer_init=True, enforce_eager=True, dtype=dtype, max_model_len=64, seed=0,
            max_logprobs=vocab,
        )
        asked = SamplingParams(temperature=0, max_tokens=1, logprobs=vocab, detokenize=False)
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        found = answer.outputs[0].logprobs[0]
        print("LOGPROBS", json.dumps([found[token].logprob for token in range(vocab)]), flush=True)
        del llm
"""


def write(
    name: str, directory: Path, *, tied: bool = False, seed: int = 0, dtype: str = "bfloat16", **options: Any
) -> Path:
    """Write a model whose weights are so large that a wrong one changes the logits. Options go to its config."""
    torch.manual_seed(seed)
    config = MODELS[name](tie_word_embeddings=tied, dtype=dtype, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.05)
    model.save_pretrained(directory)
    return directory


def transformers_logits(directory: Path, dtype: str = "auto") -> torch.Tensor:
    """Return the logits for all positions of the prompt, [tokens, vocab] float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([PROMPT])).logits[0].float()
    return found


def vllm_logprobs(directories: Sequence[Path], scratch: Path, dtype: str = "float32") -> list[torch.Tensor]:
    """Return the log-probabilities of the token after the prompt, [vocab] for each model. All use one process."""
    script = scratch / "engine.py"
    script.write_text(_ENGINE)
    environ = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CACHE_ROOT": str(scratch / "cache")}
    asked = json.dumps([list(PROMPT), VOCAB, dtype, *map(str, directories)])
    # On two busy cores, the process needs two minutes to start, and each model up to one more.
    timeout = 180 + 60 * len(directories)
    done = subprocess.run(
        [sys.executable, str(script), asked], env=environ, capture_output=True, text=True, timeout=timeout
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOGPROBS ")]
    assert len(lines) == len(directories), done.stderr[-4000:]
    return [torch.tensor(json.loads(line.removeprefix("LOGPROBS "))) for line in lines]
