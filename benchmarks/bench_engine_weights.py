"""Where vLLM's worker spends the time of loading weights: in the reader, or in its own loop over the tensors.

    python -m benchmarks.bench_engine_weights --gb 11 --runs 3 --ways instanttensor penstock "penstock verified"
    python -m benchmarks.bench_engine_weights --gb 11 --ways penstock --samples
    python -m benchmarks.bench_engine_weights --gb 11 --ways penstock "penstock PENSTOCK_MEMORY_BYTES=1G"

Each run is a new process with vLLM's real worker in it, which ends when the weights are loaded, so a run takes 13 s and
not the 40 s of a whole start. Files are in tmpfs, and the ways take turns. A way may end with environment variables.

`weights` are the seconds of all tensors, as in vLLM's line "Loading weights took". `first` is the wait for the first
tensor, `waits` are those for the others, and `loop` is the rest: vLLM's loop, which copies each tensor into its
parameter. `--samples` prints the most frequent stacks of all threads, which slows the load.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.bench_engines import QUIET, ROOT, format_of

MARK = "WEIGHTS "
PAUSE_S = 0.002
"""Seconds between two samples."""
PARTS = ("weights", "first", "waits", "loop", "load_model")


class Sampler(threading.Thread):
    """Counts the stacks of all other threads."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stacks: collections.Counter[str] = collections.Counter()
        self.ended = threading.Event()

    def run(self) -> None:
        """Sample until `ended` is set."""
        while not self.ended.wait(PAUSE_S):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident == self.ident:
                    continue
                places = []
                at: Any = frame
                while at is not None and len(places) < 6:
                    code = at.f_code
                    places.append(f"{Path(code.co_filename).name}:{at.f_lineno} {code.co_name}")
                    at = at.f_back
                self.stacks[f"{names.get(ident, '?')}: {' < '.join(places)}"] += 1


def run(model: str, way: str, *, samples: bool) -> None:
    """Load the weights in this process, print the seconds, and end the process."""
    from vllm import LLM
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.v1.worker import gpu_worker

    waits: list[float] = []
    sampler = Sampler()
    get_all_weights, load_model = DefaultModelLoader.get_all_weights, gpu_worker.Worker.load_model
    row: dict[str, Any] = {"way": way}

    def timed(self: Any, *arguments: Any, **named: Any) -> Iterator[Any]:
        if samples:
            sampler.start()
        began = time.perf_counter()
        tensors = get_all_weights(self, *arguments, **named)
        while True:
            asked = time.perf_counter()
            tensor = next(tensors, None)
            waits.append(time.perf_counter() - asked)
            if tensor is None:
                break
            yield tensor
        row["weights"] = time.perf_counter() - began
        sampler.ended.set()

    def load(self: Any, *arguments: Any, **named: Any) -> None:
        began = time.perf_counter()
        load_model(self, *arguments, **named)
        row["load_model"] = time.perf_counter() - began
        row.update({"first": waits[0], "waits": sum(waits[1:]), "tensors": len(waits) - 1})
        row["loop"] = row["weights"] - row["first"] - row["waits"]
        print(MARK + json.dumps(row), flush=True)
        for stack, count in sampler.stacks.most_common(40):
            print(count, stack, flush=True)
        os._exit(0)

    DefaultModelLoader.get_all_weights = timed
    gpu_worker.Worker.load_model = load
    options = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 1024}
    LLM(model=model, gpu_memory_utilization=0.4, **options, **format_of(way))


def main() -> int:
    """Run all ways in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the model")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--ways", nargs="+", default=["instanttensor", "penstock", "penstock verified"])
    parser.add_argument("--samples", action="store_true", help="print the most frequent stacks")
    parser.add_argument("--directory", default="/dev/shm", help="parent of the model's directory")
    parser.add_argument("--job", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.job is not None:
        run(*asked.job, samples=asked.samples)
    sources = [str(ROOT), *map(str, sorted(ROOT.glob("packages/*/src"))), os.environ.get("PYTHONPATH", "")]
    environ = {
        **os.environ,
        **QUIET,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTHONPATH": ":".join(filter(None, sources)),
    }
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in asked.ways}
    with tempfile.TemporaryDirectory(dir=asked.directory) as model:
        command = [sys.executable, "-m", "benchmarks.bench_engines", "job", "model", model, str(asked.gb)]
        subprocess.run(command, env=environ, cwd=ROOT, check=True, capture_output=True)
        for number in range(asked.runs):
            for way in asked.ways if number % 2 == 0 else reversed(asked.ways):
                variables = dict(word.split("=", 1) for word in way.split() if "=" in word)
                name = " ".join(word for word in way.split() if "=" not in word)
                command = [sys.executable, "-m", "benchmarks.bench_engine_weights", "--job", model, name]
                command += ["--samples"] if asked.samples else []
                done = subprocess.run(
                    command, env=environ | variables, cwd=ROOT, capture_output=True, text=True, timeout=600
                )
                said = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
                if not said:
                    raise SystemExit(f"{way} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
                rows[way].append(json.loads(said[0]))
                print(said[0], flush=True)
                if asked.samples:
                    print(done.stdout.partition(MARK)[2], flush=True)
    print(f"| way | n | {' | '.join(PARTS)} |\n|---|---|{'---|' * len(PARTS)}")
    for way, found in rows.items():
        cells = []
        for part in PARTS:
            values = [row[part] for row in found]
            cells.append(f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})")
        print(f"| {way} | {len(found)} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
