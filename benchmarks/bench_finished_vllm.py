"""Restart of vLLM on the CPU: its own loader, Penstock's from files and from a keeper, and finished parameters.

    python -m benchmarks.bench_finished_vllm                1 GiB of BF16, two runs of each way, in turn
    python -m benchmarks.bench_finished_vllm --sizes 2 1    an engine of 1 rank, beside the parameters of 2 ranks

In the environment of the engine tests. Each run is a process: imports, the engine, one token. The line of the log that
says how long the weights took is printed beside the seconds of the three.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bench_finished import save

import penstock as ps

WAYS: dict[str, dict[str, Any]] = {
    "auto": {"load_format": "auto"},
    "files": {"load_format": "penstock"},
    "attach": {"load_format": "penstock", "model_loader_extra_config": {"keeper": "model"}},
    "finished": {"load_format": "penstock", "model_loader_extra_config": {"finished": True}},
}
ENGINE = """
import json, sys, time
begun = time.perf_counter()
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    imported = time.perf_counter()
    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, seed=0, **json.loads(sys.argv[1]))
    ready = time.perf_counter()
    one = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": [1, 5, 9, 200, 17, 33, 2, 8]}], one)
    seconds = [imported - begun, ready - imported, time.perf_counter() - ready]
    print("RESULT", json.dumps([*seconds, list(answer.outputs[0].token_ids)]))
"""
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
QUIET |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Several ranks on one host.
QUIET |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SAID = ("Loading weights took", "finished parameters", "handed over", "was recorded in", "re-sharded")


def run(way: str, work: Path, size: int = 1) -> None:
    """Start one engine of so many ranks, and print its seconds, and this machine's load before it."""
    arguments = json.dumps({"model": str(work / "model"), "tensor_parallel_size": size, **WAYS[way]})
    command = [sys.executable, str(work / "engine.py"), arguments]
    load = os.getloadavg()[0]
    done = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True, timeout=600, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    result = next((line for line in lines if line.startswith("RESULT ")), None)
    if result is None:
        raise RuntimeError("\n".join(lines[-40:]))
    imports, engine, token, tokens = json.loads(result.removeprefix("RESULT "))
    said = "; ".join(line.partition("] ")[2] or line for line in lines if any(word in line for word in SAID))
    seconds = f"imports {imports:.2f} s, engine {engine:.2f} s, token {token:.2f} s"
    print(f"{way}, {size} ranks, load {load:.1f}: {seconds} {tokens}: {said}", flush=True)


def run_sizes(kept: int, size: int, runs: int, work: Path) -> None:
    """Start engines of one size while the parameters of another are kept, in turn with engines that read the files."""
    with ps.Keeper(accept=True) as keeper:
        run("finished", work, kept)
        before = {model.revision for model in keeper.models()}
        for _ in range(runs):
            for way in ("auto", "files", "finished"):
                run(way, work, size)
            # What the last one handed over: the next run shall not find it.
            for model in keeper.models():
                if model.revision not in before:
                    keeper.drop(model.model, revision=model.revision)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs=2, help="kept ranks, and ranks of the engines that are measured")
    parser.add_argument("--directory", default="/dev/shm", help="where the model is written")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=asked.directory) as root, tempfile.TemporaryDirectory(prefix="ps-") as sockets:
        os.environ["PENSTOCK_RUNTIME_DIR"] = sockets
        work = Path(root)
        (work / "engine.py").write_text(ENGINE)
        save("llama", work / "model", int(asked.gib * (1 << 30)), "cpu")
        if asked.sizes:
            run_sizes(*asked.sizes, asked.runs, work)
            return
        with ps.Keeper(accept=True) as keeper:
            keeper.keep("model", str(work / "model"), progress=False)
            # Loads, and hands over.
            run("finished", work)
            for _ in range(asked.runs):
                for way in WAYS:
                    run(way, work)


if __name__ == "__main__":
    main()
