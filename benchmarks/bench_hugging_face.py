"""A repository of the hub of Hugging Face into host memory, beside huggingface_hub with safetensors.

    python -m benchmarks.bench_hugging_face --gib 1 --out benchmarks/results/cpu2_202611

The hub is `tests.support.servers.hugging_face` in a process of its own; `--mb-per-s` limits its storage. Each run is
a fresh process with an empty local cache, or with one that a first run has filled. Stock is `snapshot_download` and
then `safetensors.torch.load_file` for each shard, which is what `from_pretrained` does. The time begins after imports
and ends when every byte of every tensor was read once, so that mapping alone is no load. The rows of the cache end when
`snapshot_download` or `penstock fetch --cache` has written the repository to an empty one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from tests.support.servers.http_server import Faults
from tests.support.servers.hugging_face import HuggingFaceServer

from penstock.types import GIB

_SHARDS = 4


def repository(gib: float) -> dict[str, bytes]:
    """Return the files of a model of BF16 tensors of 32 MiB in four shards, with an index."""
    import torch
    from safetensors.torch import save

    generator = np.random.default_rng(7)
    count = max(_SHARDS, int(gib * GIB / (32 << 20)))
    tensors = {
        f"layers.{i}.weight": torch.from_numpy(generator.integers(0, 1 << 15, (4096, 4096), np.uint16)).view(
            torch.bfloat16
        )
        for i in range(count)
    }
    files, weight_map = {}, {}
    for shard in range(_SHARDS):
        name = f"model-{shard + 1:05}-of-{_SHARDS:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[shard::_SHARDS]}
        files[name] = save(part)
        weight_map |= dict.fromkeys(part, name)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return files


def serve(gib: float, mb_per_s: float) -> None:
    """Serve until standard input ends; print the address, and for each line read the bytes sent so far."""
    with HuggingFaceServer({"org/model": repository(gib)}) as hub:
        if mb_per_s:
            hub.storage.faults = Faults(total_bytes_per_s=int(mb_per_s * 1e6))
        print(hub.url, flush=True)
        for _ in sys.stdin:
            print(hub.storage.num_bytes_sent, flush=True)


def run(kind: str) -> None:
    """Load the repository once, in this process; print the seconds."""
    import huggingface_hub
    import huggingface_hub.hf_api
    import torch
    from safetensors.torch import load_file

    import penstock as ps

    _ = ps.load, huggingface_hub.snapshot_download
    from penstock.storage.fill import fill

    began = time.monotonic()
    if kind in {"stock fills", "penstock fills"}:
        place = huggingface_hub.snapshot_download("org/model") if kind == "stock fills" else fill("org/model").directory
        seconds = time.monotonic() - began
        total = sum(os.path.getsize(file) for file in Path(place).iterdir())
        print(json.dumps({"seconds": seconds, "total": total, "how": "cache"}))
        return
    if kind == "stock":
        place = huggingface_hub.snapshot_download("org/model")
        tensors = {
            key: value for file in sorted(Path(place).glob("*.safetensors")) for key, value in load_file(file).items()
        }
        how = "safetensors"
    else:
        weights = ps.load("hf://org/model", "cpu")
        tensors, how = dict(weights), weights.report.why
    total = sum(int(tensor.view(torch.int64).sum()) for tensor in tensors.values())
    print(json.dumps({"seconds": time.monotonic() - began, "total": total, "how": how}))


def main() -> None:
    """Run the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--mb-per-s", type=float, nargs="*", default=[0.0, 200.0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="directory: rows are appended to hugging_face.jsonl")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--run", choices=["stock", "penstock", "stock fills", "penstock fills"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.gib, args.serve)
        return
    if args.run:
        run(args.run)
        return
    for rate in args.mb_per_s:
        for row in measure(args.gib, rate, args.runs):
            print(json.dumps(row), flush=True)
            if args.out:
                with (args.out / "hugging_face.jsonl").open("a") as file:
                    print(json.dumps(row), file=file)


def measure(gib: float, rate: float, runs: int) -> list[dict[str, object]]:
    """Return the rows of one bandwidth: both kinds in turn, cold and from the local cache."""
    command = [sys.executable, "-m", "benchmarks.bench_hugging_face", "--gib", str(gib)]
    server = subprocess.Popen([*command, "--serve", str(rate)], stdin=-1, stdout=-1, text=True)
    assert server.stdin is not None and server.stdout is not None
    stop = threading.Timer(3600, server.kill)
    stop.start()
    url = server.stdout.readline().strip()
    seconds: dict[tuple[str, str], list[float]] = {}
    sent: dict[tuple[str, str], int] = {}
    totals: dict[bool, set[int]] = {False: set(), True: set()}

    def once(kind: str, state: str, home: str) -> None:
        environ = os.environ | {"HF_ENDPOINT": url, "HF_HOME": home, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        assert server.stdin is not None and server.stdout is not None
        print(file=server.stdin, flush=True)
        before = int(server.stdout.readline())
        done = subprocess.run([*command, "--run", kind], env=environ, stdout=-1, text=True, timeout=1800, check=True)
        print(file=server.stdin, flush=True)
        sent[kind, state] = int(server.stdout.readline()) - before
        answer = json.loads(done.stdout.splitlines()[-1])
        totals[kind.endswith("fills")].add(answer["total"])
        seconds.setdefault((kind, state), []).append(answer["seconds"])

    for _ in range(runs):
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as home:
            once("penstock", "cold", home)
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as home:
            once("stock", "cold", home)
            once("stock", "cached", home)
            once("penstock", "cached", home)
        for kind in ("penstock fills", "stock fills"):
            with tempfile.TemporaryDirectory(prefix="penstock-bench-") as home:
                once(kind, "the local cache", home)
    server.stdin.close()
    server.wait(60)
    stop.cancel()
    if {len(found) for found in totals.values()} != {1}:
        raise SystemExit(f"the runs loaded different bytes: {totals}")
    return [
        {
            "row": f"{kind} {state}" if kind.endswith("fills") else f"{kind}, {state}",
            "gib": gib,
            "mb_per_s": rate,
            "median_s": round(statistics.median(values), 3),
            "spread_s": [round(min(values), 3), round(max(values), 3)],
            "n": len(values),
            "sent_bytes": sent[kind, state],
        }
        for (kind, state), values in seconds.items()
    ]


if __name__ == "__main__":
    main()
