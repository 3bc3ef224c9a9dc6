"""Restart of a transformers model to its first token: from files, from a keeper's checkpoint, from finished parameters.

    python -m benchmarks.bench_finished                 2 GiB of BF16; 5 runs of each way, in turn
    python -m benchmarks.bench_finished --small         a few MB
    python -m benchmarks.bench_finished --device cuda:0 --gib 8 --models llama     13 processes

Each run is a process of its own: imports, then the model until it has its weights, then one token for a prompt of 16.
Files are in memory (tmpfs). `stock` is transformers' from_pretrained, `files` is Penstock's. `attach` maps the
checkpoint that a keeper has and loads it by transformers' rules; where these change nothing, the parameters are mapped.
`finished` maps the parameters that an earlier process handed over. Models: a Llama, whose checkpoint is its parameters,
and a Mixtral, whose experts transformers merges.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import penstock as ps

WAYS = ("stock", "files", "attach", "finished")
CHILD = """
import json, resource, sys, time
begun = time.perf_counter()
import torch, transformers
import penstock as ps
from penstock_hf.transformers import from_pretrained, weights_loader
from transformers import initialization
transformers.LlamaForCausalLM, transformers.MixtralForCausalLM
way, directory, name, device = sys.argv[1:]
auto = transformers.AutoModelForCausalLM
if device != "cpu":
    torch.zeros(1, device=device)
def end():
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()
imported = time.perf_counter()
if way == "stock":
    model = auto.from_pretrained(directory, device_map=device)
elif way == "files":
    model = from_pretrained(auto, directory, device_map=device)
elif way == "finished":
    model = from_pretrained(auto, directory, device_map=device, keeper=True)
else:
    attached = ps.attach(name)
    config = transformers.AutoConfig.from_pretrained(directory)
    with initialization.no_init_weights(), torch.device(device):
        model = auto.from_config(config, dtype=config.dtype)
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()
    if model.state_dict().keys() == set(attached):
        attached.attach_into(model)
    else:
        weights_loader(model)(attached.items())
    model.eval()
loaded = end()
with torch.inference_mode():
    token = int(model(torch.arange(16, device=device)[None] * 7).logits[0, -1].argmax())
print(json.dumps({
    "import_s": imported - begun, "load_s": loaded - imported, "token_s": end() - loaded,
    "token": token, "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


def save(kind: str, directory: Path, num_bytes: int, device: str) -> None:
    """Save a model of about so many bytes of BF16, with random weights, which the device draws, and a manifest."""
    import torch
    import transformers

    hidden = 4096 if num_bytes > 4 << 30 else 1024 if num_bytes > 1 << 28 else 128
    shape = {"hidden_size": hidden, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    shape |= {"vocab_size": 8192}
    if kind == "llama":
        layers = max(2, num_bytes // (2 * 12 * hidden * hidden))
        config = transformers.LlamaConfig(intermediate_size=hidden * 8 // 3, num_hidden_layers=layers, **shape)
        make: Any = transformers.LlamaForCausalLM
    else:
        layers = max(2, num_bytes // (2 * 28 * hidden * hidden))
        experts = {"num_local_experts": 8, "intermediate_size": hidden}
        config = transformers.MixtralConfig(num_hidden_layers=layers, **experts, **shape)
        make = transformers.MixtralForCausalLM
    with torch.device(device):
        make(config).to(torch.bfloat16).save_pretrained(directory)
    if device != "cpu":
        torch.cuda.empty_cache()
    ps.manifest(str(directory))


def run(way: str, directory: Path, name: str, device: str) -> dict[str, Any]:
    """Run one way in a process; return its times."""
    command = [sys.executable, "-c", CHILD, way, str(directory), name, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few MB, one run")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--directory", default="/dev/shm", help="where the models are written")
    parser.add_argument("--models", default="llama,mixtral")
    parser.add_argument("--json", type=Path, help="file to which each row is added")
    asked = parser.parse_args(arguments)
    num_bytes, runs = (2 << 20, 1) if asked.small else (int(asked.gib * (1 << 30)), asked.runs)
    rows = []
    with tempfile.TemporaryDirectory(dir=asked.directory) as root, tempfile.TemporaryDirectory(prefix="ps-") as sockets:
        os.environ["PENSTOCK_RUNTIME_DIR"] = sockets
        for kind in asked.models.split(","):
            directory = Path(root) / kind
            save(kind, directory, num_bytes, asked.device)
            with ps.Keeper(device=asked.device, accept=True) as keeper:
                keeper.keep(kind, str(directory), progress=False)
                # The first process with `finished` loads, and hands over.
                first = run("finished", directory, kind, asked.device)
                found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
                for _ in range(runs):
                    for way in WAYS:
                        found[way].append(run(way, directory, kind, asked.device))
                nbytes = keeper.models()[0].nbytes
            tokens = {one["token"] for of_way in found.values() for one in of_way}
            assert len(tokens) == 1, tokens
            for way, ran in found.items():
                rows.append(_row(kind, way, nbytes, ran))
            print(f"{kind}: the first process, which hands over: {first['load_s']:.2f} s")
            if asked.json:
                with asked.json.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows[-len(WAYS) :])
    return rows


def _row(kind: str, way: str, nbytes: int, ran: list[dict[str, Any]]) -> dict[str, Any]:
    """Return and print one row."""
    columns = ("import_s", "load_s", "token_s")
    row = {
        "model": kind,
        "way": way,
        "nbytes": nbytes,
        "n": len(ran),
        **{column: [round(one[column], 3) for one in ran] for column in columns},
        "rss_bytes": max(one["rss_bytes"] for one in ran),
    }
    load, token = (statistics.median(row[column]) for column in ("load_s", "token_s"))
    whole = statistics.median(sum(one[column] for column in columns) for one in ran)
    print(
        f"{kind}, {nbytes / 1e9:.2f} GB, {way}: weights {load:.2f} s ({min(row['load_s'])}-{max(row['load_s'])}), "
        f"token {token:.2f} s, whole process {whole:.2f} s, n = {len(ran)}"
    )
    return row


if __name__ == "__main__":
    main()
