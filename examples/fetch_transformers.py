"""A transformers model generates text after a fetch, and the text equals that of the process that it fetched from.

    python examples/fetch_transformers.py

One process loads a checkpoint, generates, and serves. It starts a second process, which never sees the checkpoint. The
second builds the model from its configuration, fills the live parameters from the first process, and generates too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import penstock as ps

try:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
except ImportError:
    print("skipped: this example needs transformers (pip install transformers)")
    sys.exit(0)

PROMPT = "a penstock is"


def replica(config: str) -> None:
    """Run the second process, which reads only the configuration from disk."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config)).eval()
    with ps.join("transformers-example") as fleet:
        # Fill the live parameters in place. There is no fallback, so every byte comes from a member.
        report = fleet.fetch(model, timeout_s=30)
        print(report.summary(), file=sys.stderr)
        print(json.dumps({"text": generate(model), "storage_bytes": report.storage_bytes}))


def first(directory: str) -> int:
    """Offer the weights that this process computes with."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    text = generate(model)
    with tempfile.TemporaryDirectory() as config, ps.join("transformers-example") as fleet:
        model.config.save_pretrained(config)
        fleet.offer(model)
        done = subprocess.run(
            [sys.executable, __file__, config], stdout=subprocess.PIPE, text=True, check=True, timeout=120
        )
    second = json.loads(done.stdout)
    print(f"first:  {text!r}\nsecond: {second['text']!r}")
    print(f"equal: {text == second['text']}; read from storage by the second: {second['storage_bytes']} bytes")
    return 0 if text == second["text"] and second["storage_bytes"] == 0 else 1


def generate(model: torch.nn.Module) -> str:
    """Generate text greedily. Characters are the tokens, so that no tokenizer has to be downloaded."""
    tokens = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        made = model.generate(tokens, max_new_tokens=24, do_sample=False, pad_token_id=0)
    return bytes(made[0].tolist()).decode("latin-1")


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)  # far from zero, so that a wrong weight changes the text
    return model


if __name__ == "__main__":
    if len(sys.argv) > 1:
        replica(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as made_up:
            tiny().save_pretrained(made_up)
            sys.exit(first(made_up))
