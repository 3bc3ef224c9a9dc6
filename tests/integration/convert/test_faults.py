"""Two hundred conversions lose a worker or the coordinator at a random moment. The resumed run writes the same files.

A seed decides which process is lost, how (SIGKILL, or SIGSTOP so that it is alive but silent), in which phase, and how
many workers run. It also decides whether the next run finds files of the interrupted run. Batch 7 of
`test_conversion_survives_random_faults` runs seeds 140 to 159.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.fork_server import Forked, ForkServer
from tests.support.jobs import convert_as

import penstock
from penstock.errors import PenstockError

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")

NUM_BATCHES, BATCH, ALWAYS = 10, 20, 1
"""`DRILLS=all` runs the other seeds, in two minutes."""
AT_ONCE = 4
DONE_S = 90.0
"""Time limit for a drill. It takes a second or two, or some seconds more if a process falls silent."""
STALL_S = "4.0"
TOLD: dict[str, Any] = {
    "operations": [{"op": "function", "function": "tests.support.jobs:slowly"}],
    "to": "cast:F32",
    "devices": "cpu",
    "task_bytes": "256K",
    "shard_bytes": 10_000_000,
}
PHASES = ("spawn", "begin", "run", "end", "publish")


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


class Run:
    """One coordinator and its workers."""

    def __init__(self, process: Forked) -> None:
        self.process, self.workers = process, list[int]()

    def next(self, deadline: float) -> dict[str, Any]:
        """Return its next event, or nothing at its end."""
        assert select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0], "it hangs"
        line = self.process.stdout.readline()
        if not line:
            return {"event": "ended"}
        said: dict[str, Any] = json.loads(line)
        if said["event"] == "spawned":
            with suppress(ProcessLookupError):
                self.workers.append(os.pidfd_open(said["pid"]))
        return said

    def until(self, phase: str, rng: random.Random, deadline: float) -> dict[str, Any]:
        """Wait for a moment in a phase. Return how the run ended if it ended before."""
        share = {"spawn": None, "begin": None, "run": rng.random(), "end": 0.98, "publish": 1.0}[phase]
        while (said := self.next(deadline))["event"] in {"spawned", "done"}:
            is_there = (
                said["event"] == "spawned"
                if share is None
                else said.get("num_done", -1) >= share * said.get("total", 1)
            )
            if is_there:
                time.sleep(
                    rng.random() * {"spawn": 0.03, "begin": 0.6, "run": 0.02, "end": 0.02, "publish": 0.1}[phase]
                )
                break
        return said

    def wait_for_workers(self) -> None:
        """Check that none of the processes remains, after the time that a busy machine needs to end a process."""
        for worker in self.workers:
            assert select.select([worker], [], [], 20.0)[0], "a worker outlived its coordinator"

    def close(self) -> None:
        for worker in self.workers:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
            os.close(worker)


class FaultRun:
    """A conversion and its losses."""

    def __init__(self, seed: int, fork_server: ForkServer, source: Path, expected: dict[str, bytes]) -> None:
        self.fork_server, self.source, self.expected = fork_server, source, expected
        self.rng, self.stack = random.Random(seed), ExitStack()
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-drill-", dir="/tmp"))
        self.stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.num_workers = self.rng.choice([1, 2, 2, 3])
        self.hits = [self.hit() for _ in range(self.rng.choice([1, 1, 2]))]
        self.beside = self.rng.random() < 0.5
        self.name = f"seed {seed}: {self.num_workers} workers; " + ", then ".join(" ".join(hit) for hit in self.hits)
        self.deadline = time.monotonic() + DONE_S

    def hit(self) -> tuple[str, str, str]:
        who = self.rng.choice(["worker", "coordinator"])
        how = "stopped" if self.rng.random() < 0.25 else "killed"
        return who, how, self.rng.choice(PHASES)

    def start(self) -> Run:
        values = {"sources": str(self.source), "destination": str(self.directory / "out"), "workers": self.num_workers}
        environ = {"PENSTOCK_STALL_S": STALL_S}
        process = self.fork_server.fork("tests.support.jobs:coordinate", values | TOLD, environ)
        run = Run(self.stack.enter_context(process))
        self.stack.callback(run.close)
        return run

    def run(self) -> None:
        """Convert through all faults. Raise what went wrong."""
        with self.stack:
            run, said = self.start(), dict[str, Any]()
            for who, how, phase in self.hits:
                said = run.until(phase, self.rng, self.deadline)
                if said["event"] not in {"spawned", "done"}:
                    break
                if self.strike(run, who, how):
                    run = self.start()
            while said["event"] in {"spawned", "done"}:
                said = run.next(self.deadline)
            run.process.wait()
            run.wait_for_workers()
            assert said["event"] == "converted", said
            assert files(self.directory / "out") == self.expected
            assert [path.name for path in self.directory.iterdir()] == ["out"]
            assert penstock.verify(self.directory / "out").verified

    def strike(self, run: Run, who: str, how: str) -> bool:
        """Inject the fault. Return whether the run is over."""
        number = signal.SIGSTOP if how == "stopped" else signal.SIGKILL
        if who == "worker":
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.rng.choice(run.workers), number)
            return False
        run.process.send_signal(number)
        if how == "stopped":
            time.sleep(self.rng.random() * 2)
            run.process.send_signal(signal.SIGCONT)
            return False
        run.process.wait()
        while run.next(self.deadline)["event"] != "ended":
            pass
        if not self.beside:
            run.wait_for_workers()
        return True


@pytest.fixture(scope="module")
def expected(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the output's files, made by one undisturbed worker."""
    into = tmp_path_factory.mktemp("expected") / "out"
    assert convert_as(small_checkpoint, into, workers=1, **TOLD).num_tasks > 40
    return files(into)


def run_with_fault(
    seed: int, fork_server: ForkServer, source: Path, expected: dict[str, bytes]
) -> tuple[str, str, float]:
    """Run a conversion with a fault. Return a description, the failure or an empty text, and the seconds."""
    one, begun, verdict = FaultRun(seed, fork_server, source, expected), time.monotonic(), ""
    try:
        one.run()
    except (PenstockError, OSError, AssertionError, RuntimeError) as error:  # beside its seed, and the others go on
        verdict = f"{type(error).__name__}: {error}"
    return one.name, verdict, time.monotonic() - begun


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_conversion_survives_random_faults(
    batch: int, fork_server: ForkServer, small_checkpoint: Path, expected: dict[str, bytes]
) -> None:
    if batch >= ALWAYS and os.environ.get("DRILLS") != "all":
        pytest.skip("run with DRILLS=all")
    seeds = range(batch * BATCH, (batch + 1) * BATCH)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda seed: run_with_fault(seed, fork_server, small_checkpoint, expected), seeds))
    for name, verdict, seconds in found:
        print(f"{name}: {verdict or 'held'} ({seconds:.1f} s)")
    assert not [f"{name}: {verdict}" for name, verdict, _ in found if verdict]
