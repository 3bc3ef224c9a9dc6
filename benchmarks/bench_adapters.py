"""Bytes and time of a version of a LoRA adapter beside one of the whole weights, from a trainer's process to another.

    python -m benchmarks.bench_adapters [--hidden 512 --layers 8 --rank 8 --repeat 9]

Three ways in turn, in one run: the merged weights as a whole, the adapter into a model of PEFT, and the adapter into a
directory in /dev/shm, as engines load it. A time is from the call of `publish` until the other process has the version.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import peft
import torch
import transformers

import penstock as ps
from penstock_hf.adapter import AdapterDirectory
from penstock_hf.adapter import adapter_subscriber as plain_subscriber
from penstock_hf.lora_merge import merged_publisher
from penstock_hf.peft import adapter_publisher, adapter_subscriber, adapter_tensors

WAYS = ("whole weights, merged", "adapter, into PEFT's model", "adapter, into a directory")
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make(args: argparse.Namespace) -> Any:
    """Return a Llama with a LoRA adapter, in BF16."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    lora = peft.LoraConfig(r=args.rank, lora_alpha=16, target_modules=MODULES, init_lora_weights=False)
    return peft.get_peft_model(base, lora, autocast_adapter_dtype=False)


def receive(args: argparse.Namespace) -> None:
    """Receive a version for each line of the standard input, and answer with its bytes."""
    model = make(args)
    whole = {name: torch.zeros_like(one) for name, one in model.unload().state_dict().items()}
    model = make(args)
    with ExitStack() as stack:
        full = stack.enter_context(ps.subscriber("whole", whole))
        into_model = stack.enter_context(adapter_subscriber("adapter", model, base="b"))
        plain = stack.enter_context(plain_subscriber("adapter", base="b"))
        files = stack.enter_context(AdapterDirectory(plain))
        print("{}", flush=True)
        for line in sys.stdin:
            way, version = json.loads(line)
            receiver = (full, into_model, plain)[way]
            report = receiver.update(version, timeout_s=60)
            if way == 2:
                files.write()
            said = {"version_bytes": report.version_bytes, "read_bytes": report.nbytes, "path": report.path}
            print(json.dumps(said), flush=True)


def main() -> None:
    """Publish versions, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        receive(args)
        return
    model = make(args)
    command = [sys.executable, __file__, *sys.argv[1:], "--receive"]
    with (
        merged_publisher("whole", model, mode="snapshot") as whole,
        adapter_publisher("adapter", model, base="b") as adapter,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver,
    ):
        assert receiver.stdin is not None and receiver.stdout is not None
        receiver.stdout.readline()
        times: dict[int, list[float]] = {way: [] for way in range(len(WAYS))}
        trained: dict[int, list[float]] = {way: [] for way in range(len(WAYS))}
        said: dict[int, Any] = {}
        for version in range(1, (args.repeat + 1) * len(WAYS) + 1):
            way = version % len(WAYS)
            with torch.no_grad():
                for tensor in adapter_tensors(model).values():
                    tensor.add_(torch.randn_like(tensor) * 0.01)
            began = time.perf_counter()
            (whole if way == 0 else adapter).publish(version)
            published = time.perf_counter()
            receiver.stdin.write(json.dumps([way, version]) + "\n")
            receiver.stdin.flush()
            said[way] = json.loads(receiver.stdout.readline())
            times[way].append(time.perf_counter() - began)
            trained[way].append(published - began)
        receiver.stdin.close()
    for way, name in enumerate(WAYS):
        # The first of each plans and connects.
        taken, waits = times[way][1:], trained[way][1:]
        row = {
            "way": name,
            **said[way],
            "version_s": round(statistics.median(taken), 4),
            "spread_s": [round(min(taken), 4), round(max(taken), 4)],
            "training_waits_s": round(statistics.median(waits), 4),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
