"""Ranks of TRL's AsyncGRPOTrainer that send versions to a vLLM server in the trainer's own step, without training.

    python trl_syncs.py model WHERE
    torchrun --nproc-per-node 2 trl_syncs.py sync WHERE URL [--whole | --lora]

TRL 1.16 trains only on CUDA, because its attention comes from the package `kernels`.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

WORDS = ["<pad>", "<s>", "</s>", "<a>", *(f"w{number}" for number in range(28))]


def write_model(directory: Path) -> None:
    """Write a model with random weights, and a tokenizer with a few words and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    messages = "<s>{% for message in messages %} {{ message['content'] }}{% endfor %}"
    tokenizer.chat_template = messages + "{% if add_generation_prompt %} <a>{% endif %}"
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Return the same reward for every answer, because nothing is trained here."""
    return [0.0 for _ in completions]


def sync(directory: Path, url: str, *, attached: bool, lora: bool) -> None:
    """Send three versions, and print the largest difference of log-probabilities after each."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

    from penstock_rl.trl import PenstockWeightTransfer
    from penstock_vllm.trainer import PenstockTrainerInitInfo

    # TRL 1.16 asks CUDA for the device's speed, for a metric.
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    transfer = PenstockWeightTransfer(url, PenstockTrainerInitInfo(name="trl-policy", rank=0, stall_s=30.0))
    trainer = AsyncGRPOTrainer(
        model=str(directory),
        reward_funcs=reward,
        args=AsyncGRPOConfig(
            output_dir=str(directory / "trained"),
            vllm_server_base_url=url,
            max_steps=3,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "w3"}]]}),
        processing_class=transformers.AutoTokenizer.from_pretrained(directory),
        weight_transfer=transfer,
        peft_config=peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]) if lora else None,
    )
    if attached:
        transfer.attach(trainer)
    model = trainer.accelerator.unwrap_model(trainer.model)
    # TRL's own attention has kernels only for CUDA.
    model.set_attn_implementation("sdpa")
    is_main = trainer.accelerator.is_main_process
    if is_main:
        transfer.init_weight_transfer()
    for version in range(3):
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.3)
        trainer._sync_weight()
        if is_main:
            print(json.dumps({"version": trainer.model_version, "difference": difference(model, directory, url)}))
    transfer.destroy()


def difference(model: Any, directory: Path, url: str) -> float:
    """Return the largest difference between the log-probabilities of the server's answer and those of `model`."""
    prompt = [1, 9, 12, 3]
    body = {"model": str(directory), "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body | {"return_token_ids": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        choice = json.loads(answer.read())["choices"][0]
    tokens = choice["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    mine = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((mine - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().max())


def main() -> None:
    """Write the model, or send its versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["model", "sync"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--lora", action="store_true", help="train an adapter, which is merged at the source")
    parser.add_argument("--whole", action="store_true", help="send whole tensors from one process, without attach")
    args = parser.parse_args()
    if args.what == "model":
        write_model(args.directory)
    else:
        sync(args.directory, args.url, attached=not args.whole, lora=args.lora)


if __name__ == "__main__":
    main()
