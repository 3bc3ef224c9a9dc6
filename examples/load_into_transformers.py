"""Fill a transformers model in place from its checkpoint: python examples/load_into_transformers.py [DIRECTORY]

The model is created empty on its final device, and `load_into` fills its live parameters. Without a directory,
transformers saves a tiny Llama first, and the logits are compared.
"""

from __future__ import annotations

import sys
import tempfile

import penstock as ps

try:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
except ImportError:
    print("skipped: this example needs transformers (pip install transformers)")
    sys.exit(0)


def main(directory: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    report = ps.load_into(model, directory)
    print(report.summary())
    return model.eval()


def tiny() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    return LlamaForCausalLM(config).eval()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory, torch.no_grad():
            reference = tiny()
            reference.save_pretrained(directory)
            tokens = torch.arange(8).unsqueeze(0)
            same = torch.equal(main(directory)(tokens).logits, reference(tokens).logits)
            print(f"logits equal: {same}")
            sys.exit(0 if same else 1)
