"""Two hundred syncs lose a rank at a random moment. Every receiver ends with a whole version and reports which one.

A seed decides the world sizes, the modes, the transport, which rank is lost, how (SIGKILL or SIGSTOP), and when. Then
the trainer restarts and publishes the next version to all receivers that are alive. Batch 7 of
`test_sync_survives_random_faults` runs seeds 140 to 159. One batch runs by default, and `DRILLS=all` runs all of them.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support import long_running
from tests.support.fork_server import ForkServer
from tests.support.sync import SyncTask, SyncWorker, expected_digest

from penstock.errors import PenstockError

NUM_BATCHES, BATCH = 10, 20
BATCHES = range(NUM_BATCHES) if os.environ.get("DRILLS") == "all" else range(1)
AT_ONCE = 4
DONE_S = 90.0
"""Time limit for a drill, which takes some seconds."""
STALL_S = "6.0"
SHORT_TIMEOUTS = {
    "penstock.hub.client.ATTEMPT_S": 1.0,
    "penstock.hub.local_hub.BEAT_S": 0.25,
    "penstock.hub.local_hub.TTL_S": 2.0,
}
ROLES = ("publisher 0", "publisher", "subscriber", "host of the hub")
REFUSALS = {"PeerLost", "SourceStalled", "StaleDescriptor", "NotFound", "HubUnavailable", "SourceUnavailable"}
"""Errors that are allowed for a version that is unavailable."""


class FaultRun:
    def __init__(self, seed: int, fork_server: ForkServer, tag: str = "") -> None:
        self.tag = tag
        self.seed, self.fork_server, self.rng, self.stack = seed, fork_server, random.Random(seed), ExitStack()
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-drill-", dir="/tmp"))
        self.stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.role = ROLES[seed % len(ROLES)]
        self.number = signal.SIGSTOP if self.rng.random() < 0.3 else signal.SIGKILL
        self.transport = self.rng.choice(["shm", "http"])
        self.source = self.rng.choice(["live", "snapshot"])
        self.num_publishers, self.num_subscribers = self.rng.choice([1, 2, 3]), self.rng.choice([1, 2, 3])
        self.modes = [self.rng.choice(["staged", "direct"]) for _ in range(self.num_subscribers)]
        self.delay_s = self.rng.random() ** 2 * 0.6

    def __str__(self) -> str:
        verb = "stopped" if self.number == signal.SIGSTOP else "killed"
        sides = f"{self.num_publishers} {self.source} -> {', '.join(self.modes)}"
        return f"seed {self.seed}: {sides}, {self.transport}; {self.role} {verb} after {self.delay_s:.2f} s"

    def start(self, side: str, **task: Any) -> SyncWorker:
        options: dict[str, Any] = {"arena": True}
        connection = {"transports": [self.transport]}
        if self.tag:
            task |= {"rows": 300, "columns": 384}
            if side == "publisher":
                options["transforms"] = {self.tag: ["*"]}
            elif task.get("name") is None:
                task["tag"] = self.tag
        environ = {"PENSTOCK_RUNTIME_DIR": str(self.directory), "PENSTOCK_STALL_S": STALL_S}
        made = SyncTask(
            side=side,
            connection=connection,
            options=options,
            environ=environ,
            constants=SHORT_TIMEOUTS,
            num_layers=8,
            **task,
        )
        return self.stack.enter_context(SyncWorker(made, self.fork_server))

    def start_trainer(self, world_size: int) -> list[SyncWorker]:
        found = [self.start("publisher", rank=r, world_size=world_size, mode=self.source) for r in range(world_size)]
        for one in found:
            one.wait_for("joined")
        return found

    def run(self) -> None:
        """Lose a process, and raise the resulting errors."""
        with self.stack:
            host = self.start("subscriber", name="other")  # hosts the hub
            host.wait_for("joined")
            publishers = self.start_trainer(self.num_publishers)
            subscribers = [
                self.start(
                    "subscriber", rank=r, world_size=self.num_subscribers, dim=1, mode=mode, pause_s=0.15, wait_s=10.0
                )
                for r, mode in enumerate(self.modes)
            ]
            for one in subscribers:
                one.wait_for("joined")
            publishers[0].call(f"subscribers {len(subscribers)}")
            self.step(publishers, subscribers, 1)
            for worker in subscribers:
                self.check(worker, worker.result("update"), {1})
            for worker in publishers:
                assert "error" not in worker.result("publish 1"), worker.events
            self.step(publishers, subscribers, 2)
            time.sleep(self.delay_s)
            lost = self.choose(host, publishers, subscribers)
            lost.kill(self.number)
            self.check_outcome(lost, publishers, subscribers)
            self.go_on(lost, publishers, [one for one in subscribers if one is not lost])

    def step(self, publishers: list[SyncWorker], subscribers: list[SyncWorker], version: int) -> None:
        for one in publishers:
            one.send(f"publish {version}")
        for one in subscribers:
            one.send(f"wait {version}")
            one.send("update")

    def choose(self, host: SyncWorker, publishers: list[SyncWorker], subscribers: list[SyncWorker]) -> SyncWorker:
        if self.role == "host of the hub":
            return host
        if self.role == "subscriber":
            return self.rng.choice(subscribers)
        return publishers[0] if self.role == "publisher 0" else publishers[-1]

    def check_outcome(self, lost: SyncWorker, publishers: list[SyncWorker], subscribers: list[SyncWorker]) -> None:
        """Check that each survivor reports its version, and that publishers report no false success."""
        have = {}
        for worker in subscribers:
            if worker is not lost:
                result = worker.result("update", timeout_s=DONE_S)
                have[worker.events["joined"]["member"]] = self.check(worker, result, {1, 2})
        for worker in publishers:
            if worker is not lost:
                result = worker.result("publish 2", timeout_s=DONE_S)
                assert result.get("error", "PeerLost") in REFUSALS, result
                false = [one for one in result.get("committed", ()) if have.get(one, 2) != 2]
                assert not false, f"{false} are reported with version 2"

    def check(self, worker: SyncWorker, result: dict[str, Any], versions: set[int]) -> int:
        """Return the version of a survivor, or 0 if it reports a dirty target."""
        if "error" in result:
            assert result["error"] in REFUSALS, result
            is_touched, result = result["mutated"], worker.call("digests", timeout_s=DONE_S)
            assert result["is_dirty"] == is_touched and (not is_touched or worker.task.mode == "direct"), result
            if result["is_dirty"]:
                return 0
        assert result["version"] in versions and not result["is_dirty"], result
        assert result["digests"] == expected_digest(worker.task, result["version"]), (
            f"not the bytes of version {result['version']}"
        )
        return int(result["version"])

    def go_on(self, lost: SyncWorker, publishers: list[SyncWorker], subscribers: list[SyncWorker]) -> None:
        """Publish the next version from the same or a restarted trainer to all live subscribers."""
        if lost in publishers:
            for one in publishers:
                one.kill(signal.SIGKILL)
            publishers = self.start_trainer(self.rng.choice([1, 2, 3]))
        if not subscribers:
            return
        publishers[0].call(f"subscribers {len(subscribers)}", timeout_s=DONE_S)
        self.step(publishers, subscribers, 3)
        for worker in subscribers:
            result = worker.result("update", timeout_s=DONE_S)
            assert "error" not in result, result
            self.check(worker, result, {3})
        for worker in publishers:
            assert "error" not in worker.result("publish 3", timeout_s=DONE_S), worker.events


def run_with_fault(seed: int, fork_server: ForkServer, tag: str = "") -> tuple[str, str, float]:
    one, begun, verdict = FaultRun(seed, fork_server, tag), time.monotonic(), ""
    try:
        one.run()
    except (PenstockError, OSError, AssertionError, RuntimeError) as error:  # reported with its seed
        verdict = f"{type(error).__name__}: {error}"
    return str(one), verdict, time.monotonic() - begun


@pytest.mark.parametrize("batch", BATCHES)
def test_sync_survives_random_faults(batch: int, fork_server: ForkServer) -> None:
    assert_no_failures(range(batch * BATCH, (batch + 1) * BATCH), fork_server)


@long_running.long_running
def test_quantising_sync_survives_random_faults(fork_server: ForkServer) -> None:
    assert_no_failures(range(1000, 1000 + BATCH * len(BATCHES) // 2), fork_server, "fp8-block128")


def assert_no_failures(seeds: range, fork_server: ForkServer, tag: str = "") -> None:
    """Run all drills, and raise their failures."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda seed: run_with_fault(seed, fork_server, tag), seeds))
    for name, verdict, seconds in found:
        print(f"{name}: {verdict or 'held'} ({seconds:.1f} s)")
    assert not [f"{name}: {verdict}" for name, verdict, _ in found if verdict]
