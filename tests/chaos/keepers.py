"""Rounds with a weight cache that is killed, stopped and restarted while engines attach and hold its memory.

Violations are wrong bytes before or after the cache's death, and an engine that cannot attach again. Tiers and canaries
are tested in `tests/integration/cache`.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from tests.chaos.harness import Process, Round

PASSING = {"NotFound", "PeerLost", "StaleDescriptor", "SourceStalled", "HubUnavailable", "SourceUnavailable"}
"""Errors that are allowed while a cache has just ended or is stopped."""


class KeeperRound(Round):
    """Engines attach, the cache is disturbed and restarts if it has ended, and all engines attach again."""

    kind = "keeper"
    at_once = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rng = self.rng
        self.num_engines, self.hold_s = rng.choice([1, 2, 3]), rng.random() * 0.5
        self.checkpoint = self.world.checkpoints[rng.choice(["plain", "sealed", "many"])]
        self.how = rng.choice(["kill", "kill", "pause", "terminate", "none"])
        self.delay_s = rng.random() ** 2 * 0.8
        self.num_keepers = 0

    def __str__(self) -> str:
        return f"{self.num_engines} engines of {self.hold_s:.2f} s; keeper: {self.how} at {self.delay_s:.2f} s"

    def keeper(self) -> Process:
        """Start `penstock cache`, and wait until it holds the model."""
        errors = self.directory / f"keeper{self.num_keepers}.err"
        self.num_keepers += 1
        words = ["cache", str(self.checkpoint.directory), "--model", "m", "--drain-s", "10"]
        environ = dict(os.environ) | self.environ()
        told = [str(self.directory), environ, "", str(errors), words]
        process = self.start("tests.support.commands:main", told)
        while not (errors.exists() and "keeping" in errors.read_text()):
            if process.process.poll() is not None:
                raise OSError(f"the keeper ended: {errors.read_text()[-300:]}")
            if not self.left_s():
                self.hang("the cache does not hold the model")
            time.sleep(0.01)
        return process

    def run(self) -> None:
        keeper = self.keeper()
        engines = [
            self.start("engine", {"model": "m", "wait_s": 5.0, "hold_s": self.hold_s}) for _ in range(self.num_engines)
        ]
        for engine in engines:
            self.expect(engine, "ready")
            engine.send("attach")
        time.sleep(self.delay_s)
        self.hit(keeper)
        for engine in engines:
            self.check(engine, may_fail=self.how != "none")
        if self.how == "kill":
            keeper = self.keeper()
        if self.how != "terminate":
            for engine in engines:
                engine.events.pop("attached", None)
                engine.send("attach")
            for engine in engines:
                self.check(engine, may_fail=False)
            keeper.kill(signal.SIGTERM)
        self.leave([keeper, *engines])

    def hit(self, keeper: Process) -> None:
        if self.how == "none":
            return
        self.fault(f"keeper: {self.how}")
        if self.how == "kill":
            self.outcome.num_deaths += 1
            keeper.kill(signal.SIGKILL)
            keeper.process.wait(timeout=10)
        elif self.how == "terminate":
            keeper.kill(signal.SIGTERM)
        else:
            keeper.kill(signal.SIGSTOP)
            time.sleep(self.rng.random() * 2)
            keeper.kill(signal.SIGCONT)

    def check(self, engine: Process, *, may_fail: bool) -> None:
        said = self.expect(engine, "attached")
        if "error" in said:
            if not may_fail or said["error"] not in PASSING:
                self.violate("unexpected error", f"attach: {said['error']}: {said['message']}")
            return
        if {said["digests"], said["again"]} != {self.checkpoint.digests}:
            self.violate("wrong bytes", f"attached {said['digests'][:12]}, then {said['again'][:12]}")
