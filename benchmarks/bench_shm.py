"""A fetch between two processes of one host beside one plain copy of the same bytes, all in whole new processes.

    python -m benchmarks.bench_shm [--gb 2.12] [--reps 5] [--pages as-is|kept] [--json]

One holder lives through the run. Every other row is a new process for each repetition, in random order. The copies are
`np.copyto` from the holder's mapped memory into new memory: numpy's, in huge pages, and an anonymous mapping in small
pages. "fetch" receives new tensors, and "fetch into" fills tensors whose memory was written before.

`--pages kept`: each process writes to as much memory as it will need, and gives it back, just before the time starts.
Without it, a virtual machine's host may take long to provide pages that no process has used for seconds.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.types import GB

CASES = ("copy, huge pages", "copy, small pages", "fetch", "fetch into")
MODEL = "bench-shm"


def new_memory(nbytes: int, advice: int) -> np.ndarray:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    return np.frombuffer(memory, np.uint8)


def measured(work: Callable[[], Any], nbytes: int, keep_pages: bool) -> dict[str, Any]:
    """Seconds and CPU seconds of `work`, and seconds since this process was started."""
    if keep_pages:
        new_memory(nbytes * 11 // 10, mmap.MADV_HUGEPAGE)[::4096] = 1
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    # Keep the memory, so that the time does not include giving it back.
    kept = work()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    del kept
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_s": cpu_s, "since_start_s": time.time() - float(os.environ["STARTED"])}


def hold(checkpoint: str) -> None:
    """Fetch the checkpoint from storage into shared memory, print where it is, and serve until stdin ends."""
    import penstock as ps
    from penstock.memory.memfd import shared_at

    with ps.join(MODEL) as fleet:
        tensors: dict[str, Any] = {}
        nbytes = fleet.fetch(tensors, fallback=checkpoint).nbytes
        memory = shared_at(next(iter(tensors.values())).data_ptr(), 1)
        assert memory is not None
        path = f"/proc/{os.getpid()}/fd/{memory.fd}"
        shapes = {name: (list(t.shape), str(t.dtype).partition(".")[2]) for name, t in tensors.items()}
        print(json.dumps({"path": path, "nbytes": nbytes, "shapes": shapes}), flush=True)
        sys.stdin.read()


def copy(path: str, nbytes: int, advice: int, keep_pages: bool) -> dict[str, Any]:
    def work() -> tuple[np.ndarray, np.ndarray]:
        with open(path, "rb") as file:
            source = np.frombuffer(mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ), np.uint8)
        into = new_memory(nbytes, advice)
        np.copyto(into, source)
        return into, source

    return measured(work, nbytes, keep_pages)


def fetch(nbytes: int, shapes: dict[str, Any], keep_pages: bool) -> dict[str, Any]:
    import torch

    import penstock as ps

    tensors = {name: torch.ones(shape, dtype=getattr(torch, kind)) for name, (shape, kind) in shapes.items()}
    with ps.join(MODEL) as fleet:
        reports: list[Any] = []
        found = measured(lambda: reports.append(fleet.fetch(tensors)), nbytes, keep_pages)
    return found | {"paths": dict(reports[0].nbytes_by_path), "verified": reports[0].verified}


def one(case: str, place: dict[str, Any], pages: str) -> dict[str, Any]:
    """Run a row once in a new process."""
    command = [sys.executable, "-m", "benchmarks.bench_shm", "--pages", pages, "--run", case]
    environ = os.environ | {"STARTED": str(time.time())}
    done = subprocess.run(command, input=json.dumps(place), stdout=subprocess.PIPE, text=True, env=environ, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(case: str, pages: str) -> None:
    place, keep = json.load(sys.stdin), pages == "kept"
    if case.startswith("copy"):
        advice = mmap.MADV_HUGEPAGE if case == CASES[0] else mmap.MADV_NOHUGEPAGE
        found = copy(place["path"], place["nbytes"], advice, keep)
    else:
        found = fetch(place["nbytes"], place["shapes"] if case == "fetch into" else {}, keep)
    print(json.dumps(found))


def bench(gb: float, reps: int, pages: str, directory: str) -> dict[str, list[dict[str, Any]]]:
    from penstock.testing.checkpoints import write_llama

    with tempfile.TemporaryDirectory(dir=directory) as files, tempfile.TemporaryDirectory() as runtime:
        os.environ["PENSTOCK_RUNTIME_DIR"] = runtime
        write_llama(files, total_bytes=int(gb * GB), fp8=False)
        command = [sys.executable, "-m", "benchmarks.bench_shm", "--hold", files]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            try:
                place = json.loads(holder.stdout.readline())
                found: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
                for rep in range(reps):
                    for case in random.Random(rep).sample(CASES, len(CASES)):
                        found[case].append(one(case, place, pages) | {"nbytes": place["nbytes"]})
                return found
            finally:
                holder.stdin.close()


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def table(found: dict[str, list[dict[str, Any]]], reps: int, pages: str) -> str:
    lines = [f"n = {reps}, pages {pages}, load average {os.getloadavg()[0]:.0f}", ""]
    lines += ["| row | seconds | CPU seconds | of the copy in huge pages | of the copy in small pages | from start |"]
    lines += ["|---|---|---|---|---|---|"]
    huge, small = ([each["seconds"] for each in found[case]] for case in CASES[:2])
    for case, turns in found.items():
        taken = [each["seconds"] for each in turns]
        ratios = [statistics.median(a / b for a, b in zip(taken, limit, strict=True)) for limit in (huge, small)]
        cpu, start = (spread([each[name] for each in turns]) for name in ("cpu_s", "since_start_s"))
        lines += [f"| {case} | {spread(taken)} | {cpu} | {ratios[0]:.2f} | {ratios[1]:.2f} | {start} |"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.12)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--pages", choices=("as-is", "kept"), default="as-is")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the checkpoint is written")
    parser.add_argument("--json", action="store_true")
    for inner in ("--hold", "--run"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.hold:
        hold(asked.hold)
    elif asked.run:
        run(asked.run, asked.pages)
    else:
        found = bench(asked.gb, asked.reps, asked.pages, asked.dir)
        print(json.dumps(found) if asked.json else table(found, asked.reps, asked.pages))


if __name__ == "__main__":
    main()
