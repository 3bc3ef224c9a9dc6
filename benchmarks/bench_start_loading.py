"""First token of a transformers model while its weights arrive, beside a load that ends first.

    python -m benchmarks.bench_start_loading                     1 GB; a storage of 0.2, 0.4 and 0.8 GB/s; 5 runs
    python -m benchmarks.bench_start_loading --small             a few MB
    python -m benchmarks.bench_start_loading --device cuda --gib 14 --gbps 2,8

The storage is a server in a process of its own, which sends all answers together at a given rate. Each run is a forward
pass over a prompt with an empty model: `after` waits for the load, then computes; `while` computes while it loads. The
limit is the longer one of the load alone and the forward pass alone. Rows `text of a vision model` have a vision tower
that a prompt of text does not use: `while` gives the language model's globs as `first`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.support.servers.http_server import Faults, RangeServer

import penstock as ps
from penstock_hf.transformers import from_pretrained, start_from_pretrained

WAIT_S = 60.0
TEXT = ["model.language_model.*", "lm_head.*"]


def _serve(directory: str, bytes_per_s: int, connection: Connection) -> None:
    """Serve a directory until the other side closes; the body of the process."""
    with RangeServer(directory, faults=Faults(total_bytes_per_s=bytes_per_s)) as server:
        connection.send(server.url)
        with contextlib.suppress(EOFError):
            connection.recv()


@contextlib.contextmanager
def storage(directory: Path, bytes_per_s: int) -> Iterator[str]:
    """Yield the URL of a storage with a bandwidth, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(str(directory), bytes_per_s, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(WAIT_S):
            raise TimeoutError("the server did not start")
        yield ours.recv()
    finally:
        ours.close()
        process.join(WAIT_S)


def save_text(directory: Path, num_bytes: int, device: str) -> None:
    """Save a Llama of about so many bytes of BF16, whose weights the device draws."""
    hidden = 1024 if num_bytes > 1 << 28 else 128
    layers = max(2, num_bytes // (2 * 12 * hidden * hidden))
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=8192,
    )
    with torch.device(device):
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    ps.manifest(str(directory))


def save_vision(directory: Path, num_bytes: int, device: str) -> None:
    """Save a Llava whose vision tower has about half of so many bytes of BF16."""
    hidden = 1024 if num_bytes > 1 << 28 else 128
    layers = max(2, num_bytes // 2 // (2 * 12 * hidden * hidden))
    text = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=8192,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        image_size=56,
        patch_size=14,
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=8000)
    with torch.device(device):
        transformers.LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(directory)
    ps.manifest(str(directory))


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few MB")
    parser.add_argument("--gib", type=float, default=1.0, help="size of each model")
    parser.add_argument("--gbps", default="0.2,0.4,0.8", help="rates of the storage, in GB/s")
    parser.add_argument("--tokens", type=int, default=64, help="length of the prompt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--directory", default="/dev/shm", help="where the models are written")
    parser.add_argument("--json", type=Path, help="file to which each row is added")
    asked = parser.parse_args(arguments)
    num_bytes, runs, rates = int(asked.gib * (1 << 30)), asked.runs, asked.gbps
    if asked.small:
        num_bytes, runs, rates = 2 << 20, 1, "0.05"
    rows = []
    with tempfile.TemporaryDirectory(dir=asked.directory) as root:
        kinds: list[tuple[str, Any, Any, list[str]]] = [
            ("text", save_text, transformers.AutoModelForCausalLM, []),
            ("text of a vision model", save_vision, transformers.LlavaForConditionalGeneration, TEXT),
        ]
        for name, save, model_class, first in kinds:
            directory = Path(root) / name.replace(" ", "-")
            save(directory, num_bytes, asked.device)
            for rate in map(float, rates.split(",")):
                rows.append(_row(name, directory, model_class, first, rate, asked.device, asked.tokens, runs))
                if asked.json:
                    with asked.json.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    return rows


@torch.inference_mode()
def _row(
    name: str, directory: Path, model_class: Any, first: list[str], rate: float, device: str, tokens: int, runs: int
) -> dict[str, Any]:
    """Measure one model at one rate, the ways in turn; print and return the row."""
    seconds: dict[str, list[float]] = {"load": [], "forward": [], "after": [], "while": []}
    prompt = (torch.arange(tokens, device=device) * 7 % 7999)[None]
    answers = []

    def end(begun_s: float) -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - begun_s

    with storage(directory, int(rate * 1e9)) as url:
        # The first of each is a warm-up: kernels and threads of torch.
        for run in range(runs + 1):
            begun_s = time.perf_counter()
            model = from_pretrained(model_class, url, device_map=device, progress=False)
            load_s = end(begun_s)
            answers.append(model(prompt).logits[0, -1].float().cpu())
            after_s = end(begun_s)
            del model
            begun_s = time.perf_counter()
            with start_from_pretrained(model_class, url, device_map=device, first=first, progress=False) as loading:
                answers.append(loading.module(prompt).logits[0, -1].float().cpu())
                while_s = end(begun_s)
                nbytes = loading.wait().nbytes
            del loading
            if run:
                for key, value in zip(seconds, (load_s, after_s - load_s, after_s, while_s), strict=True):
                    seconds[key].append(value)
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    row = {
        "model": name,
        "nbytes": nbytes,
        "storage_gbps": rate,
        "device": device,
        "tokens": tokens,
        "n": runs,
        **{f"{key}_s": [round(value, 3) for value in values] for key, values in seconds.items()},
        "limit_s": round(max(median["load"], median["forward"]), 3),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(
        f"{name}, {nbytes / 1e9:.2f} GB at {rate} GB/s: load {median['load']:.2f} s, "
        f"forward {median['forward']:.2f} s, limit {row['limit_s']:.2f} s; "
        f"first token after {median['after']:.2f} s, while loading {median['while']:.2f} s, "
        f"{median['after'] / median['while']:.2f} times as fast, n = {runs}"
    )
    return row


if __name__ == "__main__":
    main()
