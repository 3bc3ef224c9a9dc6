"""The first version of a sync: what new processes do once, in seconds of a core, process by process.

    python -m benchmarks.bench_first_version                    30,000 expert tensors, 2 + 2 processes, the CPU; 3 runs
    python -m benchmarks.bench_first_version --kind llama       a dense model
    python -m benchmarks.bench_first_version --prepare          engines call `prepare` before the first version
    python -m benchmarks.bench_first_version --small --runs 1   300 expert tensors
    python -m benchmarks.bench_first_version --device cuda --total-gb 32

Each run has new processes. Tensors are small on the CPU: what is done once for each tensor counts, and not the bytes.
Seconds are of all threads of a process; wall time is given beside them, and depends on what else the machine does.
`open` is `publisher()` or `subscriber()`, with what these import.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.bench_sync import SyncBench

PHASES = ("open", "prepare", "first", "second")


def one_run(asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each phase: of a core for each process, and of the wall."""
    with ExitStack() as stack:
        bench = SyncBench(asked, stack, Path(asked.files_dir))
        bench.start()
        bench.make(asked.kind, int(1e9 * asked.total_gb))
        ranks = range(asked.world_size)
        cpu = [bench.ask(ranks, "cpu_s")]
        bench.open("direct", "live")
        cpu.append(bench.ask(ranks, "cpu_s"))
        prepared = bench.ask(bench.engines, "prepare") if asked.prepare else [0.0]
        cpu.append(bench.ask(ranks, "cpu_s"))
        steps = []
        for _ in range(2):
            steps.append(bench.step())
            cpu.append(bench.ask(ranks, "cpu_s"))
        bench.ask(bench.engines, "check", turn=bench.turn, count=12)
        bench.close()
    phases = {
        name: [after - before for before, after in zip(cpu[i], cpu[i + 1], strict=True)]
        for i, name in enumerate(PHASES)
    }
    wall = {"prepare": max(prepared), "first": steps[0]["wall_s"], "second": steps[1]["wall_s"]}
    return {"cpu_s": phases, "wall_s": wall, "steps": steps}


def spread(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="moe", choices=("moe", "llama"))
    parser.add_argument("--small", action="store_true", help="few tensors")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--world-size", type=int, default=4, help="ranks; half of them train")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--total-gb", type=float, default=0.0, help="of the checkpoint; default 0.064, with cuda 32")
    parser.add_argument("--prepare", action="store_true", help="engines prepare before the first version is published")
    parser.add_argument("--no-arena", action="store_true", help="leave tensors where torch puts them")
    parser.add_argument("--budget-s", type=float, default=300.0, help="of a run")
    asked = parser.parse_args(arguments)
    asked.total_gb = asked.total_gb or (32.0 if asked.device == "cuda" else 0.064)
    asked.files_dir = tempfile.gettempdir()
    asked.few = asked.small or (asked.kind == "llama" and asked.device == "cpu")
    runs = [one_run(asked) for _ in range(asked.runs)]
    half = asked.world_size // 2
    print("seconds of a core: median (least-most)", *PHASES, sep=" | ")
    for rank in range(asked.world_size):
        name = f"trainer {rank}" if rank < half else f"engine {rank - half}"
        print(name, *(spread([run["cpu_s"][phase][rank] for run in runs]) for phase in PHASES), sep=" | ")
    totals = [[sum(run["cpu_s"][phase]) for run in runs] for phase in PHASES]
    print("all", *map(spread, totals), sep=" | ")
    print("wall", "", *(spread([run["wall_s"][phase] for run in runs]) for phase in PHASES[1:]), sep=" | ")
    return runs


if __name__ == "__main__":
    main()
    sys.exit(0)
