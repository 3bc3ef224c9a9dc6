"""Two hundred fleets lose a process at a random moment. Nobody hangs, no byte is wrong, and storage is read once.

A seed decides which process is lost, how (SIGKILL, or SIGSTOP so that it is alive but silent), when, which transport
moves the bytes, and whether a manifest exists. Batch 7 of `test_fetches_complete_under_random_faults` runs seeds 140 to
159. Half of the batches run by default, and `DRILLS=all` runs all of them.
"""

from __future__ import annotations

import contextlib
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
from tests.integration.conftest import SMALL_CHUNKS
from tests.support import redis_server
from tests.support.compare import by_safetensors
from tests.support.fleet import Task, Worker, digests
from tests.support.fork_server import Forked, ForkServer
from tests.support.redis_server import RedisServer

from penstock.cli.checkpoints import manifest
from penstock.errors import HubUnavailable, PenstockError
from penstock.hub.client import HubClient
from penstock.hub.local_hub import find_hub
from penstock.testing.checkpoints import write_llama

NUM_BATCHES, BATCH = 10, 20
BATCHES = range(NUM_BATCHES if os.environ.get("DRILLS") == "all" else NUM_BATCHES // 10)
AT_ONCE = 6
DONE_S = 60.0
"""Time limit for a drill. It takes two seconds, or some more if a process falls silent."""
SHORT_TIMEOUTS = SMALL_CHUNKS | {
    "penstock.hub.client.ATTEMPT_S": 1.0,
    "penstock.hub.client._MAX_PAUSE_S": 0.1,  # A new hub waits one and a half heartbeats.
    "penstock.hub.local_hub.BEAT_S": 0.25,
    "penstock.hub.local_hub.TTL_S": 2.0,
    "penstock_hub.claims.CLAIM_STALL_S": 3.0,
    "penstock_hub.store.ANSWER_S": 0.5,
}
STALL_S = "8.0"
CAP = 8 << 20
"""Rate limit of a whole holder, so that its weights of 8 MiB take about a second."""
ROLES = ("source", "receiver", "relay", "reader of storage", "host of the hub", "hub", "redis")


class FaultRun:
    """A fleet that loses a process."""

    def __init__(self, seed: int, fork_server: ForkServer, uris: tuple[str, str]) -> None:
        self.seed, self.fork_server = seed, fork_server
        self.rng, self.stack = random.Random(seed), ExitStack()
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-drill-", dir="/tmp"))
        self.stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.hub_url: str | None = None
        self.hub: Forked | None = None
        self.redis: RedisServer | None = None
        self.role = ROLES[self.seed % len(ROLES)]
        if self.role == "redis" and redis_server.missing():
            self.role = "hub"
        self.number = signal.SIGSTOP if self.rng.random() < 0.3 else signal.SIGKILL
        self.transport = self.rng.choice(["shm", "http"])
        self.fallback = self.rng.choice(uris)
        self.is_cold = self.role == "reader of storage" or (self.role in ROLES[4:] and self.rng.random() < 0.5)
        self.delay_s = self.rng.random() ** 2 * 1.2

    def __str__(self) -> str:
        start = "cold" if self.is_cold else "one whole holder"
        verb = "stopped" if self.number == signal.SIGSTOP else "killed"
        return f"seed {self.seed}: {start}, {self.transport}; {self.role} {verb} after {self.delay_s:.2f} s"

    def start(self, *, fallback: bool = True, whole: bool = False) -> Worker:
        join: dict[str, Any] = {"max_bytes_per_s": CAP if whole else 3 * CAP}
        task = Task(
            hub=self.hub_url,
            fallback=self.fallback if fallback else None,
            storage_pause_s=0.0 if whole else 0.03,
            constants=SHORT_TIMEOUTS,
            connection={"transports": [self.transport]},
            join=join,
            environ={"PENSTOCK_RUNTIME_DIR": str(self.directory), "PENSTOCK_STALL_S": STALL_S},
        )
        return self.stack.enter_context(Worker(task, self.fork_server))

    def start_hub(self) -> None:
        """Start a hub process on the same socket each time."""
        values = {
            "listen": f"unix://{self.directory}/hub.sock",
            "fresh": self.hub is None,
            "beat_s": 1.0,
            "ttl_s": 4.0,
            "redis": self.redis.url if self.redis is not None else None,
            "constants": SHORT_TIMEOUTS,
        }
        self.hub = self.stack.enter_context(self.fork_server.fork("tests.support.fleet:run_hub_process", values))
        assert b"ready" in self.hub.stdout.readline()
        self.hub_url = str(values["listen"])

    def run(self) -> None:
        """Lose a process, and raise the resulting error."""
        with self.stack:
            if self.role == "redis":
                (self.directory / "redis").mkdir()
                self.redis = self.stack.enter_context(RedisServer(self.directory / "redis"))
            if self.role in {"hub", "redis"}:
                self.start_hub()
            workers = self.begin()
            time.sleep(self.delay_s)
            self.check_outcome(workers, self.lose(workers))

    def begin(self) -> list[Worker]:
        """The first member hosts the hub if no process does. The last member cannot read storage."""
        first = self.start(whole=not self.is_cold)
        first.wait_for("joined" if self.is_cold else "fetched")
        return [first, self.start(), self.start(), self.start(fallback=False)]

    def lose(self, workers: list[Worker]) -> Worker | None:
        if self.role == "hub":
            assert self.hub is not None
            self.hub.send_signal(self.number)
            time.sleep(self.rng.random())
            if self.number == signal.SIGSTOP:
                self.hub.send_signal(signal.SIGCONT)
            else:
                self.hub.wait()
                self.start_hub()
            return None
        if self.role == "redis":
            assert self.redis is not None
            stopped = self.number == signal.SIGSTOP
            self.redis.pause() if stopped else self.redis.kill()
            time.sleep(self.rng.random())
            self.redis.resume() if stopped else self.redis.start()
            return None
        if self.role in {"source", "host of the hub"}:
            lost = workers[0]
        elif self.role == "relay":
            lost = self.relay(workers) or workers[2]
        else:
            lost = workers[self.rng.choice([1, 2])]
        lost.kill(self.number)
        return lost

    def relay(self, workers: list[Worker]) -> Worker | None:
        """Return a receiver that another receiver is reading."""
        url = find_hub(self.directory)
        if url is None:
            return None
        with HubClient.connect(url, timeout_s=2.0) as hub, contextlib.suppress(HubUnavailable):
            held = [one for member in hub.status().members for one in member.holdings]
            parents = {one.parent for one in held if one.state == "filling"}
            for worker in workers[1:3]:
                with contextlib.suppress(PenstockError):
                    if worker.wait_for("joined", timeout_s=0.2)["member"] in parents:
                        return worker
        return None

    def check_outcome(self, workers: list[Worker], lost: Worker | None) -> None:
        deadline = time.monotonic() + DONE_S
        read = nbytes = 0
        for worker in workers:
            if worker is not lost:
                nbytes, storage_bytes = self.check(worker, deadline)
                read += storage_bytes if worker is not workers[0] or self.is_cold else 0
        # Others may read again only what the lost member read or claimed. But a new hub learns of claims from members
        # within one and a half heartbeats. On a busy machine a member may be late, and then its pieces are assigned
        # again.
        again = nbytes // 2 if self.role in ROLES[4:] else 0
        assert read <= nbytes + again, f"survivors read {read} of {nbytes} bytes"
        if lost is not None and self.number == signal.SIGSTOP:
            lost.kill(signal.SIGCONT)
            self.check(lost, deadline)  # The process was only silent, and continues.

    def check(self, worker: Worker, deadline: float) -> tuple[int, int]:
        """Check the bytes. Return their number and the number of bytes from storage."""
        report = worker.wait_for("fetched", timeout_s=deadline - time.monotonic())
        got = worker.wait_for("digests", timeout_s=deadline - time.monotonic())["digests"]
        assert got == _wanted[self.fallback], "wrong bytes"
        assert sum(report["paths"].values()) == report["nbytes"], report["paths"]
        return report["nbytes"], report["storage_bytes"]


_wanted: dict[str, str] = {}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Write weights of 8 MiB in few tensors, without and with a manifest."""
    plain = tmp_path_factory.mktemp("few") / "plain"
    write_llama(plain, num_layers=1, hidden=512, vocab=2048, shards=2)
    sealed = plain.with_name("sealed")
    shutil.copytree(plain, sealed)
    manifest(str(sealed))
    wanted = digests(by_safetensors(plain))
    _wanted.update({str(plain): wanted, str(sealed): wanted})
    return str(plain), str(sealed)


def run_with_fault(seed: int, fork_server: ForkServer, places: tuple[str, str]) -> tuple[str, str, float]:
    """Return a description, the failure, and the seconds."""
    one, begun, verdict = FaultRun(seed, fork_server, places), time.monotonic(), ""
    try:
        one.run()
    # Report the seed, and continue with the other seeds.
    except (PenstockError, OSError, AssertionError, RuntimeError) as error:
        verdict = f"{type(error).__name__}: {error}"
    return str(one), verdict, time.monotonic() - begun


@pytest.mark.parametrize("batch", BATCHES)
def test_fetches_complete_under_random_faults(batch: int, fork_server: ForkServer, places: tuple[str, str]) -> None:
    seeds = range(batch * BATCH, (batch + 1) * BATCH)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda seed: run_with_fault(seed, fork_server, places), seeds))
    for name, verdict, seconds in found:
        print(f"{name}: {verdict or 'held'} ({seconds:.1f} s)")
    assert not [f"{name}: {verdict}" for name, verdict, _ in found if verdict]
