"""After a staging model installs weights, a vLLM model generates the same tokens as a new engine with these weights."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engines.device import DEVICE, vllm_environ, vllm_options

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

ENGINES = """
import json, sys
from dataclasses import dataclass, field
from pathlib import Path

import torch, transformers
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config

from penstock.errors import PlanError
from penstock.holding.weight_layout import tabulate
from penstock_vllm.staging import StagingModel
from penstock.loader.tensor import dtype_of
from penstock.sync.recording.layout import fill
from penstock.sync.recording.requirements import record
from penstock.sync.recording.requirements import wanted
from penstock_convert.convert import convert

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}
CONFIGS = {
    "tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "biases": lambda: transformers.Qwen2Config(**SMALL),
    "experts": lambda: transformers.Qwen3MoeConfig(
        **SMALL, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "latent attention": lambda: transformers.DeepseekV3Config(
        **SMALL, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_method="noaux_tc", topk_group=1,
        moe_intermediate_size=32, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=32, v_head_dim=32,
    ),
    "fp8": lambda: transformers.LlamaConfig(**SMALL | {"hidden_size": 256, "intermediate_size": 256}),
}


def written(config, directory, seed):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0, 0.3)
    from safetensors.torch import load_file
    if kind == "fp8":
        model.save_pretrained(f"{directory}-bf16")
        # vLLM has no CPU kernel for blocks.
        form = "fp8-channel" if device == "cpu" else "fp8-block128"
        convert(f"{directory}-bf16", directory, to=form, devices="cpu", workers=1)
    else:
        model.save_pretrained(directory)
    return {name: one for file in Path(directory).glob("*.safetensors") for name, one in load_file(file).items()}


def engine(directory):
    return LLM(model=directory, **options)


def tokens(llm):
    llm.reset_prefix_cache()
    greedy = SamplingParams(temperature=0, max_tokens=16, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": [1, 5, 9, 20, 17, 33, 2, 8]}], greedy)
    return list(answer.outputs[0].token_ids)


def lacks_a_name(staging, true):
    some = {name: tensor for name, tensor in true.items() if "layers.1.self_attn.o_proj" not in name}
    try:
        staging.check(requirements_for(staging, some))
    except PlanError as error:
        return "layers.1.self_attn.o_proj" in str(error)
    return False


def requirements_for(staging, weights):
    values = weights.values()
    table = tabulate(list(weights), [dtype_of(t.dtype) for t in values], [tuple(t.shape) for t in values])
    global recording
    recording = record(staging, table)
    assert not recording.unrecorded, recording.unrecorded
    return wanted(staging, recording, table)


if __name__ == "__main__":
    kind, directory, device, options = sys.argv[1:]
    options = json.loads(options)
    config = CONFIGS[kind]()
    first, second = (written(config, f"{directory}/{seed}", seed) for seed in (0, 1))
    llm = engine(f"{directory}/0")
    said = {"old": tokens(llm)}
    worker = llm.llm_engine.model_executor.driver_worker.worker
    staging = StagingModel(worker.get_model(), worker.vllm_config, device)
    said["lacking is named"] = lacks_a_name(staging, second)
    made = requirements_for(staging, second)
    staging.check(made)
    for name, weights in (("new", second), ("old again", first), ("new again", second)):
        fill(recording, weights, staging)
        said[f"before {name}"] = tokens(llm)
        with set_current_vllm_config(worker.vllm_config):
            staging.install(made)
        said[name] = tokens(llm)
    del llm, worker, staging
    said["true"] = tokens(engine(f"{directory}/1"))
    print("SAID", json.dumps(said))
"""


@pytest.mark.parametrize("kind", ["experts", "fp8", "latent attention", "tied", "biases"])
def test_staged_weights_match_fresh_engine(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "engines.py"
    script.write_text(ENGINES)
    environ = vllm_environ(tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    options = vllm_options(dtype="bfloat16", max_model_len=64)
    command = [sys.executable, str(script), kind, str(tmp_path), DEVICE, json.dumps(options)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert lines, done.stderr[-4000:]
    said = json.loads(lines[0].removeprefix("SAID "))
    assert said["lacking is named"]
    assert said["true"] != said["old"]
    assert said["new"] == said["new again"] == said["true"]
    assert said["old again"] == said["old"]
    assert said["before new"] == said["before new again"] == said["old"]
    assert said["before old again"] == said["true"]
