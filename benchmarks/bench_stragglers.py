"""Convert with a worker that is slowed or killed, beside the ideal: what the rest could do at their own pace.

    python benchmarks/bench_stragglers.py [--repeats 3]

The operation sleeps a millisecond at a time, so that workers do not share cores, and a worker that is stopped for four
fifths of the time is five times slower. Times count from when all workers work to the end of the last task.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

from penstock.testing.checkpoints import write_llama
from penstock_convert.convert import WorkerSettings, convert
from penstock_convert.workers.launch import LocalLauncher

WORKERS, SLOWER = 4, 5
TASK_S = 0.08
NUM_TASKS = 400
STOPPED_S = 0.04
"""Of a twentieth of a second: below the length of a task, far above that of a millisecond's sleep."""


def in_milliseconds(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Takes `TASK_S` of a worker that runs, in steps of one millisecond of its own time."""
    left = int(TASK_S * 1000)
    while left:
        time.sleep(0.001)
        left -= 1
    return tensor


in_milliseconds.rows = True  # type: ignore[attr-defined]


class Watched(LocalLauncher):
    """Does something to one worker once every worker has had a task for sure."""

    def __init__(self, fate: str) -> None:
        super().__init__()
        self.fate, self.began, self.last, self.done_before = fate, 0.0, 0.0, 0
        self._over = threading.Event()

    def progress(self, done: int, total: int) -> None:
        self.last = time.monotonic()
        if not self.began and done >= total // 10:
            self.began, self.done_before = self.last, done
            victim = self._processes["w0"]
            if self.fate == "killed":
                victim.send_signal(signal.SIGKILL)
            elif self.fate == "slowed":
                threading.Thread(target=self._slow, args=(victim.pid,), daemon=True).start()
        if done == total:
            self._over.set()

    def _slow(self, pid: int) -> None:
        while not self._over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            self._over.wait(STOPPED_S / (SLOWER - 1))


def once(source: Path, fate: str, task_bytes: int) -> dict[str, float]:
    """Seconds from the tenth of the tasks to the last, and those of workers at their own pace."""
    with tempfile.TemporaryDirectory(prefix="ps-stragglers-") as folder, Watched(fate) as launcher:
        report = convert(
            source,
            Path(folder) / "out",
            operations=[{"op": "function", "function": "benchmarks.bench_stragglers:in_milliseconds"}],
            devices="cpu",
            workers=WorkerSettings(num_workers=WORKERS, launcher=launcher, task_bytes=task_bytes),
            progress=launcher.progress,
        )
    seconds = launcher.last - launcher.began
    return {
        "seconds": seconds,
        "rate": (report.num_tasks - launcher.done_before) / seconds,
        "tasks": report.num_tasks,
        "stolen": report.num_stolen,
        "twice": report.num_twice,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-tasks", type=int, default=NUM_TASKS)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ps-stragglers-"))
    try:
        write_llama(folder / "source", num_layers=2, hidden=256, vocab=8192, fp8=False)
        nbytes = sum(path.stat().st_size for path in (folder / "source").glob("*.safetensors"))
        found = {
            fate: [once(folder / "source", fate, 2 * nbytes // options.num_tasks) for _ in range(options.repeats)]
            for fate in ("well", "slowed", "killed")
        }
    finally:
        shutil.rmtree(folder)
    rate = statistics.median(one["rate"] for one in found["well"])
    shares = {"well": WORKERS, "slowed": WORKERS - 1 + 1 / SLOWER, "killed": WORKERS - 1}
    for fate, runs in found.items():
        ideal = rate * shares[fate] / WORKERS
        times = [ideal / one["rate"] for one in runs]
        middle = runs[times.index(sorted(times)[len(times) // 2])]
        row = {"worker": fate, "times_of_ideal": statistics.median(times), "worst": max(times), **middle}
        print(json.dumps({name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()}))


if __name__ == "__main__":
    main()
