"""SGLang's loader on a CPU: its default one beside `--load-format penstock`.

    python -m benchmarks.bench_sglang --gib 0.5 --runs 5 --out benchmarks/results/cpu2_202611

Run it in the environment that `scripts/test_sglang.sh` builds. Each run is a process, forked from one that has imported
SGLang, which resolves the arguments and then calls SGLang's `get_model`; the seconds are those of `get_model`, storage
bytes those that the hub sent meanwhile. The hub is `penstock.testing.HuggingFaceServer` on loopback; the cache of
huggingface_hub is empty before each run. A second replica knows the address of Penstock's hub and no other option; the
first one, which read the storage, still runs. The parameters of all runs are equal, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.engines import sglang_loads
from tests.support.servers.hugging_face import HuggingFaceServer

from penstock.hub.auth import Auth
from penstock.hub.directory import Directory
from penstock.hub.server import HubThread, bind
from penstock.hub.store import MemoryStore
from penstock.testing.checkpoints import write_llama
from penstock.types import GIB, MIB

ROWS = {
    "local": "directory in the page cache",
    "hub": "model of a hub, nothing in the cache",
    "replica": "second replica of a model of a hub",
}


def serve() -> None:
    """Fork a process for each job that is read from stdin, and print its result; jobs that stay end with stdin."""
    # The imports, for all processes that are forked.
    importlib.import_module("sglang.srt.managers.scheduler")
    stays = []
    for line in sys.stdin:
        job = json.loads(line)
        results, result = os.pipe()
        until_end, end = os.pipe()
        if (child := os.fork()) == 0:
            os.close(results)
            os.close(end)
            os.environ.update(job["environ"])
            _, load = sglang_loads.loader(0, sglang_loads.resolve(job["arguments"]))
            began = time.perf_counter()
            model = load()
            seconds = time.perf_counter() - began
            with open(result, "w") as file:
                json.dump({"seconds": seconds, "digest": digest(model.state_dict())}, file)
            if job["stays"]:
                os.read(until_end, 1)
            # Handlers of the process that was forked must not run here; the members' memory goes with the process.
            os._exit(0)
        os.close(result)
        os.close(until_end)
        with open(results) as file:
            print(file.read(), flush=True)
        if job["stays"]:
            stays.append((child, end))
        else:
            os.close(end)
            os.waitpid(child, 0)
    for child, end in stays:
        os.close(end)
        os.waitpid(child, 0)


def digest(state: Mapping[str, Any]) -> str:
    """Return a digest of all names, dtypes and bytes."""
    import torch

    total = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        total.update(f"{name} {state[name].dtype}".encode())
        total.update(state[name].contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


class Engines:
    """The processes of SGLang of one benchmark."""

    def __init__(self, process: subprocess.Popen[str], store: HuggingFaceServer, cache: Path) -> None:
        self._process = process
        self._store = store
        self._cache = cache

    def load(self, model: str, load_format: str, *, hub: str = "", stays: bool = False) -> tuple[float, int, str]:
        """Load a model; return the seconds, the bytes that storage sent, and the digest of the parameters."""
        shutil.rmtree(self._cache, ignore_errors=True)
        arguments = ["--model-path", model, "--load-format", load_format, "--served-model-name", "llama"]
        job = {"arguments": arguments, "environ": {"PENSTOCK_HUB": hub} if hub else {}, "stays": stays}
        before = self._store.storage.num_bytes_sent
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        while not (line := self._process.stdout.readline()).startswith("{"):
            if not line:
                raise SystemExit("a process of SGLang failed; its messages are above")
        answer = json.loads(line)
        return answer["seconds"], self._store.storage.num_bytes_sent - before, answer["digest"]


@contextmanager
def engines(directory: Path, store: HuggingFaceServer) -> Iterator[Engines]:
    """Start a process that has imported SGLang."""
    runtime = directory / "run"
    runtime.mkdir(mode=0o700)
    environ = {
        **os.environ,
        **sglang_loads.environment(directory, store.url),
        "HF_HUB_DISABLE_XET": "1",
        "PENSTOCK_RUNTIME_DIR": str(runtime),
    }
    environ.pop("PENSTOCK_HUB", None)
    command = [sys.executable, "-m", "benchmarks.bench_sglang", "--serve"]
    with subprocess.Popen(command, env=environ, stdin=-1, stdout=-1, text=True) as process:
        try:
            yield Engines(process, store, Path(environ["HF_HOME"]))
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()


def measure(directory: Path, gib: float, runs: int, kinds: list[str]) -> Iterator[dict[str, object]]:
    """Yield the rows of each kind when it is done; in it the sides take turns."""
    model = directory / "llama"
    write_llama(model, total_bytes=int(gib * GIB), hidden=1024, vocab=16000, fp8=False, shards=4)
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    weights = [file for file in model.iterdir() if file.suffix == ".safetensors"]
    nbytes = sum(file.stat().st_size for file in weights)
    digests = set()
    with ExitStack() as stack:
        store = stack.enter_context(HuggingFaceServer({"org/llama": files}))
        fleet = HubThread(Directory(MemoryStore(), fresh=True), bind(f"unix://{directory}/hub.sock", Auth()))
        fleet.start()
        stack.callback(fleet.stop)
        started = stack.enter_context(engines(directory, store))
        sides: dict[str, dict[str, Callable[[], tuple[float, int, str]]]] = {
            "local": {
                "stock": lambda: started.load(str(model), "auto"),
                "penstock": lambda: started.load(str(model), "penstock"),
                "limit": lambda: (read_files(weights), 0, ""),
            },
            "hub": {
                "stock": lambda: started.load("org/llama", "auto"),
                "penstock": lambda: started.load("hf://org/llama", "penstock"),
                "limit": lambda: (read_hub(store, weights), 0, ""),
            },
            "replica": {
                "stock": lambda: started.load("org/llama", "auto"),
                "penstock": lambda: started.load("hf://org/llama", "penstock", hub=fleet.url),
                "limit": lambda: (read_files(weights), 0, ""),
            },
        }
        for kind in kinds:
            if kind == "replica":
                started.load("hf://org/llama", "penstock", hub=fleet.url, stays=True)
            seconds: dict[str, list[float]] = {}
            storage: dict[str, list[int]] = {}
            for _ in range(runs):
                for who, load in sides[kind].items():
                    took, num_bytes, found = load()
                    seconds.setdefault(who, []).append(took)
                    storage.setdefault(who, []).append(num_bytes)
                    digests |= {found} - {""}
            if len(digests) != 1:
                raise SystemExit(f"{kind}: the loaders made different parameters")
            for who, values in seconds.items():
                yield {
                    "row": f"{who}, {ROWS[kind]}",
                    "weights_bytes": nbytes,
                    "median_s": round(statistics.median(values), 3),
                    "spread_s": [round(min(values), 3), round(max(values), 3)],
                    "storage_bytes": max(storage[who]) if who != "limit" else None,
                    "n": len(values),
                }


def read_files(files: list[Path]) -> float:
    """Return the seconds of one thread that reads files into memory that it has touched."""
    buffer = bytearray(16 * MIB)
    began = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def read_hub(store: HuggingFaceServer, files: list[Path]) -> float:
    """Return the seconds of one thread that downloads files into memory that it has touched."""
    buffer = memoryview(bytearray(MIB))
    began = time.perf_counter()
    for file in files:
        location = urlsplit(f"{store.url}/org/llama/resolve/main/{file.name}")
        while True:
            connection = http.client.HTTPConnection(location.netloc, timeout=60)
            connection.request("GET", f"{location.path}?{location.query}")
            answer = connection.getresponse()
            if answer.status != 302:
                break
            location = urlsplit(answer.headers["Location"])
        while answer.readinto(buffer):
            pass
        connection.close()
    return time.perf_counter() - began


def main() -> None:
    """Run the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kinds", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--dir", type=Path, help="where the files are made; default: a temporary directory")
    parser.add_argument("--out", type=Path, help="directory: rows are appended to sglang.jsonl")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    with tempfile.TemporaryDirectory(prefix="ps-", dir=args.dir) as directory:
        for row in measure(Path(directory), args.gib, args.runs, args.kinds):
            print(json.dumps(row), flush=True)
            if args.out:
                with (args.out / "sglang.jsonl").open("a") as file:
                    print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
