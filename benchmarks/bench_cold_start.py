"""Workers that start at once without a copy anywhere: how often storage is read, and how long that takes.

    python -m benchmarks.bench_cold_start --out benchmarks/results/cpu2_202611

Storage is a range server in a process of its own, which counts the bytes it sends; with `--mb-per-s` all its answers
share that bandwidth. Workers are real processes, forked from one that has imported torch and penstock, so that 64 of
them start within seconds. Each row stands beside one load of a single process and beside as many independent loads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.fleet import Task, Worker
from tests.support.fork_server import ForkServer
from tests.support.servers.http_server import Faults, RangeServer

from penstock.cli.checkpoints import manifest
from penstock.testing.checkpoints import write_llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The times of one start of `num_workers` workers."""

    num_workers: int
    seconds: float
    """Until the last worker had every byte, from the moment all were told to begin."""
    sent_bytes: int
    """By the storage server's own count, headers too."""
    faults: tuple[str, ...]
    """What the workers' reports say of faults."""


@contextmanager
def storage(directory: Path, mb_per_s: float) -> Iterator[RangeServer]:
    """A range server of the directory; 0 MB/s: as fast as it goes."""
    faults = Faults(total_bytes_per_s=int(mb_per_s * 1e6)) if mb_per_s else Faults()
    with RangeServer(directory, faults=faults) as server:
        yield server


def start(fork_server: ForkServer, server: RangeServer, name: str, count: int, *, alone: bool, timeout_s: float) -> Run:
    """Start `count` workers at once, each with the default settings; with `alone` no fleet: each loads by itself.

    Raises:
        PenstockError: a worker failed.
    """
    with ExitStack() as stack:
        runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))
        task = Task(
            fallback=f"{server.url}/{name}",
            loads_alone=alone,
            waits_for_input=True,
            environ={"PENSTOCK_RUNTIME_DIR": runtime},
        )
        workers = [stack.enter_context(Worker(task, fork_server)) for _ in range(count)]
        for worker in workers:
            worker.wait_for("ready", timeout_s=timeout_s)
        before, began = server.num_bytes_sent, time.monotonic()
        for worker in workers:
            worker.proceed()
        word = "loaded" if alone else "fetched"
        said = [worker.wait_for(word, timeout_s=timeout_s) for worker in workers]
        seconds = time.monotonic() - began
        sent = server.num_bytes_sent - before
        digests = {worker.wait_for("digests", timeout_s=timeout_s)["digests"] for worker in workers}
        if len(digests) != 1:
            raise SystemExit(f"workers have different bytes: {digests}")
        faults = tuple(fault for one in said for fault in one.get("faults", ()))
    return Run(num_workers=count, seconds=seconds, sent_bytes=sent, faults=faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Runs of one number of workers."""

    storage: str
    num_workers: int
    runs: Sequence[Run]
    alone_s: float
    """One process that loads by itself."""
    independent_s: float | None
    """As many processes as workers, each loading by itself at once; None: not measured."""


def measure(asked: argparse.Namespace, root: Path, mb_per_s: float, fork_server: ForkServer) -> Iterator[Row]:
    """Every number of workers from storage of one bandwidth."""
    label = f"{mb_per_s:g} MB/s" if mb_per_s else "unthrottled"
    with storage(root, mb_per_s) as server:
        alone = start(fork_server, server, "m", 1, alone=True, timeout_s=asked.timeout_s).seconds
        for count in [int(word) for word in asked.workers.split(",")]:
            runs = [
                start(fork_server, server, "m", count, alone=False, timeout_s=asked.timeout_s)
                for _ in range(asked.reps)
            ]
            independent = None
            if not asked.no_loads:
                independent = start(fork_server, server, "m", count, alone=True, timeout_s=asked.timeout_s).seconds
            yield Row(storage=label, num_workers=count, runs=runs, alone_s=alone, independent_s=independent)


def line_of(row: Row, nbytes: int) -> str:
    """A row of the page."""
    factors = [run.sent_bytes / nbytes for run in row.runs]
    times = [run.seconds for run in row.runs]
    independent = "-" if row.independent_s is None else f"{row.independent_s:.2f} s"
    num_faults = sum(len(run.faults) for run in row.runs)
    return (
        f"| {row.storage} | {row.num_workers} | {len(times)} | {min(factors):.4f}-{max(factors):.4f} | "
        f"{statistics.median(times):.2f} s ({min(times):.2f}-{max(times):.2f}) | {row.alone_s:.2f} s | {independent} | "
        f"{num_faults} |"
    )


def page(lines: Sequence[str], asked: argparse.Namespace, nbytes: int) -> str:
    """The results page."""
    manifest_word = "with a manifest" if asked.manifest else "without a manifest"
    return "\n".join(
        [
            "# Cold start: how often storage is read",
            "",
            f"`python -m benchmarks.bench_cold_start {' '.join(sys.argv[1:])}`, {os.cpu_count()} cores, "
            f"{nbytes / 1e6:.0f} MB in 4 files {manifest_word}, {time.strftime('%Y-%m-%d')}. Storage is a range server "
            "on the same machine; workers are processes of one host with the default settings, told to begin at once. "
            "Other work ran on the machine meanwhile.",
            "",
            "*Storage read* is what the server sent, headers included, over the bytes of the files: 1.0000 is each "
            "byte once. *Fleet* is until the last worker has every byte.",
            "",
            "| storage | workers | n | storage read | fleet: median (spread) | one load "
            "| as many loads at once | faults |",
            "|---|---|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="8,32", help="numbers of workers")
    parser.add_argument("--mb", type=float, default=128.0)
    parser.add_argument("--mb-per-s", default="0,50", help="bandwidths of storage; 0: no bound")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--manifest", action="store_true")
    parser.add_argument("--no-loads", action="store_true", help="leave out as many independent loads")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--out", default="benchmarks/results/local")
    asked = parser.parse_args()
    lines = []
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-", dir="/dev/shm")))
        write_llama(root / "m", total_bytes=int(asked.mb * 1e6), fp8=False, shards=4)
        if asked.manifest:
            manifest(str(root / "m"))
        nbytes = sum(path.stat().st_size for path in (root / "m").glob("*.safetensors"))
        fork_server = stack.enter_context(ForkServer())
        for word in asked.mb_per_s.split(","):
            for row in measure(asked, root, float(word), fork_server):
                lines.append(line_of(row, nbytes))
                print(lines[-1], flush=True)
                for fault in sorted({fault for run in row.runs for fault in run.faults}):
                    print("    ", fault, file=sys.stderr)
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "cold-start.md").write_text(page(lines, asked, nbytes), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
