"""`python -m benchmarks.load`: writes the checkpoints, runs the rows in turn within a time budget, prints the page.

In: rows, loaders, sizes, repetitions, seconds. Out: `load.jsonl` and `load.md` in `--out`; the page on stdout.
Not here: one measurement (`measure`), the rows (`rows`), the page (`report`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.load import cache, checkpoints, measure
from benchmarks.load.checkpoints import Checkpoint
from benchmarks.load.loaders import LOADERS, missing
from benchmarks.load.report import render
from benchmarks.load.rows import ROWS, Row


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="a,b,c,e,f,g", help="letters of benchmarks/load/rows.py")
    parser.add_argument("--loaders", default="", help="only these (default: each row's own); limits always run")
    parser.add_argument("--also", default="", help="these beside each row's own, e.g. prototype")
    parser.add_argument("--total-gb", type=float, default=0.0, help="rows a, b, c, f, g (default 14; 2 on a CPU)")
    parser.add_argument("--group-gb", type=float, default=26.0, help="dense checkpoint of row d")
    parser.add_argument("--moe-tensors", type=int, default=60_000, help="tensors of 64 KiB of row e")
    parser.add_argument("--world-size", type=int, default=0, help="ranks of row d (default 4)")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=500.0, help="no measurement starts that would end after it")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--shm-dir", default="/dev/shm")
    parser.add_argument("--disk-dir", default=tempfile.gettempdir())
    parser.add_argument("--out", default="benchmarks/results/local")
    parser.add_argument("--render", nargs="+", metavar="JSONL", help="only print the page of earlier runs")
    arguments = parser.parse_args(argv)
    if arguments.device == "auto":
        arguments.device = "cuda" if _shell("nvidia-smi -L") else "cpu"
    arguments.total_gb = arguments.total_gb or (14.0 if arguments.device == "cuda" else 2.0)
    return arguments


class Run:
    """A run of the program: the place of its files, its measurements, the time that is left."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.began = time.monotonic()
        self.out = Path(arguments.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.samples: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        self.places = {
            "shm": f"{arguments.shm_dir}/penstock-bench-shm-{os.getpid()}",
            "disk": f"{arguments.disk_dir}/penstock-bench-disk-{os.getpid()}",
        }
        self.made: dict[tuple[str, str], Checkpoint] = {}
        self.references: dict[str, list[str]] = {}
        self.cost_s: dict[tuple[str, str], float] = {}
        self.late: dict[tuple[str, str], int] = {}
        """Rows and loaders cut short by the budget, and after how many repetitions."""

    def left_s(self) -> float:
        """Seconds of the budget still there."""
        return float(self.arguments.budget_s) - (time.monotonic() - self.began)

    def say(self, text: str) -> None:
        """A line of progress, on stderr."""
        print(f"[{time.monotonic() - self.began:6.1f}] {text}", file=sys.stderr, flush=True)

    def checkpoint(self, row: Row) -> Checkpoint:
        """The row's checkpoint, written at first use."""
        key = (row.model, row.place)
        if key not in self.made:
            if row.model == "digested":
                self.made[key] = self._digested(row)
            else:
                self.made[key] = self._written(row)
        return self.made[key]

    def _written(self, row: Row) -> Checkpoint:
        arguments = self.arguments
        wanted = arguments.group_gb if row.model == "group" else arguments.total_gb
        if row.model == "moe":
            shapes = checkpoints.moe_shapes(arguments.moe_tensors)
        else:
            root = arguments.shm_dir if row.place == "shm" else arguments.disk_dir
            room = checkpoints.room_bytes(root) * 0.9
            if room < wanted * 1e9:
                self.skipped.append(f"row {row.key} at {wanted} GB: only {room / 1e9:.1f} GB of room, so that much")
            shapes = checkpoints.dense_shapes(int(min(wanted * 1e9, room)))
        started = time.monotonic()
        made = checkpoints.write(f"{self.places[row.place]}/{row.model}", shapes)
        took = time.monotonic() - started
        self.say(f"wrote {made.nbytes / 1e9:.1f} GB to {made.directory} in {took:.1f} s")
        return made

    def _digested(self, row: Row) -> Checkpoint:
        plain = self.checkpoint(replace(row, model="dense"))
        linked = checkpoints.link(plain, f"{self.places[row.place]}/digested")
        self.references[linked.directory] = self.references.get(plain.directory, [])
        answer = self.one(row, "digests:write", linked, 0)
        self.say(f"digests written: {answer.get('error') or answer.get('sidecar_bytes')}")
        return linked

    def one(self, row: Row, loader: str, at: Checkpoint, turn: int) -> dict[str, Any]:
        """Make one measurement and record it."""
        job = measure.Job(
            row=row.key,
            loader="safetensors" if loader == "reference" else loader,
            checkpoint=at,
            device=self.arguments.device,
            world_size=row.world_size if loader in LOADERS or loader == "limit:group-read" else 1,
            memory_bytes=row.memory_bytes,
            sample_memory=row.memory_bytes is not None,
            timeout_s=min(row.timeout_s, max(10.0, self.left_s())),
            turn=turn,
        )
        state: dict[str, Any] = {"num_files": len(at.files), "file_system": cache.file_system(at.directory)}

        def settle() -> None:
            if loader in LOADERS and state["file_system"] != "tmpfs":
                state["resident"] = cache.evict(at.files) if row.cold else cache.warm(at.files)

        sample = measure.run(job, settle) | state | {"loader": loader, "turn": turn}
        if loader == "reference":
            sample.pop("seconds", None)
            self.references[at.directory] = sample.get("fingerprints", [])
        if "fingerprints" in sample:
            sample["expected"] = self.references.get(at.directory, [])
        self.samples.append(sample)
        self.cost_s[row.key, loader] = sample["process_s"]
        return sample

    def row(self, row: Row, budget_s: float) -> None:
        """Rounds over the row's loaders until `--reps` or the row's share of the budget is used up."""
        arguments, deadline = self.arguments, time.monotonic() + budget_s
        asked = [name for name in arguments.loaders.split(",") if name]
        loaders = [name for name in row.loaders if not asked or name in asked]
        if row.world_size == 1 and row.model != "digested":
            loaders += [name for name in arguments.also.split(",") if name]
        reasons = {name: missing(name, arguments.device) for name in loaders}
        self.skipped += [f"row {row.key}, {name}: {reason}" for name, reason in reasons.items() if reason]
        limits = [name for name in row.limits if arguments.device == "cuda" or name != "limit:digest"]
        contestants = [*limits, *(name for name in loaders if not reasons[name])]
        at = self.checkpoint(row)
        if not self.references.get(at.directory):
            self.one(replace(row, world_size=1), "reference", at, 0)
        broken: dict[str, int] = {}
        for turn in range(min(arguments.reps, row.max_reps)):
            for index in range(len(contestants)):
                name = contestants[(index + turn) % len(contestants)]
                if broken.get(name, 0) >= 2 or self._too_late(row, name, turn, deadline):
                    continue
                self._report(row, self.one(row, name, at, turn), broken)

    def _too_late(self, row: Row, name: str, turn: int, deadline: float) -> bool:
        expected = self.cost_s.get((row.key, name), 8.0)
        late = time.monotonic() + expected > deadline and turn > 0
        if late or self.left_s() < expected:
            self.late.setdefault((row.key, name), turn)
            return True
        return False

    def _report(self, row: Row, sample: dict[str, Any], broken: dict[str, int]) -> None:
        name = sample["loader"]
        if "error" in sample:
            broken[name] = broken.get(name, 0) + 1
            self.say(f"{row.key} {name:24s} FAILED {sample['error'].splitlines()[-1][:300]}")
            return
        same = not sample.get("expected") or sample["fingerprints"] == sample["expected"]
        cached = f" cached {sample['resident']:.0%}" if "resident" in sample else ""
        self.say(
            f"{row.key} {name:24s} {sample.get('seconds', 0):7.3f} s {sample['gb_per_s']:8.2f} GB/s"
            f"{cached} {'' if same else 'WRONG BYTES '}({sample['process_s']} s in all) {sample.get('shape', '')}"
        )

    def save(self) -> str:
        """Writes the JSON lines and the page; returns the page."""
        head = {
            "machine": machine(self.arguments),
            "command": "python -m benchmarks.load " + " ".join(sys.argv[1:]),
            "topology": _shell("nvidia-smi topo -m") if self.arguments.device == "cuda" else "",
            "skipped": [
                *self.skipped,
                *(f"row {key}, {name}: {n} repetitions, then no time was left" for (key, name), n in self.late.items()),
            ],
        }
        lines = [json.dumps(item) for item in [head, *self.samples]]
        (self.out / "load.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        page = render([str(self.out / "load.jsonl")])
        (self.out / "load.md").write_text(page, encoding="utf-8")
        return page


_CPU_NAME = "lscpu | grep 'Model name' | cut -d: -f2"


def _shell(command: str) -> str:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip()


def machine(arguments: argparse.Namespace) -> dict[str, str]:
    """Hardware and versions, as a reader of the page needs them."""
    import torch

    packages = ["penstock", *sorted({loader.package for loader in LOADERS.values()} - {"", "penstock"})]
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} (from the tree)" if package == "penstock" else f"{package} absent")
    memory = int(Path("/proc/meminfo").read_text(encoding="utf-8").split()[1]) * 1024
    gpus = _shell("nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader").splitlines()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "-"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "GPU": f"{len(gpus)} x {gpus[0]}" if gpus and arguments.device == "cuda" else "none used",
        "CPU": f"{_shell(_CPU_NAME).strip()}, {os.cpu_count()} cores",
        "memory": f"{memory / (1 << 30):.0f} GiB at the end of the run (it may grow on demand)",
        "kernel": platform.release(),
        "Python, torch, CUDA, NCCL": f"{platform.python_version()}, {torch.__version__}, {torch.version.cuda}, {nccl}",
        "versions": ", ".join(versions),
    }


def main(argv: list[str] | None = None) -> int:
    """Entry point; 1 if a load gave wrong bytes."""
    arguments = _arguments(argv)
    if arguments.render:
        print(render(arguments.render), end="")
        return 0
    multiprocessing.set_forkserver_preload(["torch", "benchmarks.load.measure"])
    run = Run(arguments)
    rows = [ROWS[key] for key in arguments.rows.split(",")]
    if arguments.world_size:
        rows = [replace(row, world_size=min(row.world_size, arguments.world_size)) for row in rows]
    try:
        for index, row in enumerate(rows):
            share = row.share / sum(each.share for each in rows[index:])
            run.row(row, run.left_s() * share)
            run.save()
    finally:
        page = run.save()
        for place in run.places.values():
            shutil.rmtree(place, ignore_errors=True)
    print(page, end="")
    return int("wrong bytes" in page)


if __name__ == "__main__":
    sys.exit(main())
