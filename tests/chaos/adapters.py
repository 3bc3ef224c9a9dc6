"""Sync rounds whose versions are adapters. Each is for one base, and the receivers' base may change.

They check what sync rounds check, and that no adapter is live on a base that it was not made for. `syncs` kills and
stops processes and compares bytes.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tests.chaos.syncs import REFUSALS, ROLES, SyncRound
from tests.support.sync import SyncWorker

from penstock_hf.adapter import BASE

OLD, NEW = "base:1", "base:2"


class AdapterRound(SyncRound):
    """A round with three versions of an adapter while ranks are killed or stopped.

    Version 1 is for the old base and version 2 for either base. Each receiver's base changes before version 2, while it
    is staged, or not at all. Version 3 is for the new base, which all receivers have by then.
    """

    kind = "adapters"
    refusals: ClassVar[frozenset[str]] = REFUSALS | {"BaseMismatch"}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rng = self.rng
        # With shared memory a receiver's tensors are in an arena, but an adapter has its own tensors.
        self.tag, self.transport = "", "http"
        self.expected = rng.choice([OLD, NEW])
        self.moves = [
            rng.choice(["before", "never", "after staging"] if mode == "staged" else ["before", "never"])
            for mode in self.modes
        ]
        self.hits = sorted(
            (rng.random() ** 2 * 0.8, rng.choice(ROLES), rng.choice(["kill", "kill", "stop", "pause"]))
            for _ in range(rng.choice([0, 1, 1, 2]))
        )

    def __str__(self) -> str:
        return f"adapters, version 2 for {self.expected}, bases move {', '.join(self.moves)}: {super().__str__()}"

    def rank(self, side: str, **task: Any) -> SyncWorker:
        if task.get("name") is None:
            task["base"] = OLD
        return super().rank(side, **task)

    def move(self, workers: list[SyncWorker], base: str) -> None:
        for one in workers:
            one.send(f"base {base}")

    def step(self, publishers: list[SyncWorker], subscribers: list[SyncWorker], version: int) -> None:
        if version != 2:
            self.move([*publishers, *subscribers], OLD if version == 1 else NEW)
            super().step(publishers, subscribers, version)
            return
        self.move(publishers, self.expected)
        for one in publishers:
            one.send("publish 2")
        for one, moves in zip(subscribers, self.moves, strict=True):
            if moves == "before":
                one.send(f"base {NEW}")
            one.send("wait 2")
            if moves == "after staging":
                one.send("stage 2")
                one.send(f"base {NEW}")
            one.send("commit" if self.commits(moves) else "update")

    def commits(self, moves: str) -> bool:
        """Return whether a receiver commits a staged version although its base changed after staging."""
        return moves == "after staging" and self.expected == OLD

    def check_outcome(self, publishers: list[SyncWorker], subscribers: list[SyncWorker]) -> None:
        """Check that a receiver with a different base refuses version 2 and keeps version 1.

        Check the others as in any sync.
        """
        have = {}
        for worker, moves in zip(subscribers, self.moves, strict=True):
            if worker in self.lost:
                continue
            is_staged = moves == "after staging" and "error" not in self.done(worker, "stage 2")
            line = "commit" if self.commits(moves) else "update"
            said = self.done(worker, line)
            if line == "commit" and not is_staged and said.get("error") == "ConfigError":
                # Nothing was staged, because a publisher was lost.
                worker.send("digests")
                said = self.done(worker, "digests")
            elif "error" not in said and "metadata" not in said:
                self.violate("unexpected error", f"{line}: {said}")
            has = OLD if moves == "never" else NEW
            if has != self.expected and said.get("error", "none") not in self.refusals and said["version"] != 1:
                self.violate("adapter on another base", f"version 2 is for {self.expected}, the base is {has}: {said}")
            if said.get("error") == "BaseMismatch":
                self.outcome.results["another base: refused"] += 1
                if has == self.expected or said["mutated"]:
                    self.violate("unexpected error", f"{self.expected} of version 2, {has} here: {said['message']}")
            version = self.check(worker, said, {1, 2} if has == self.expected else {1})
            # A publisher counts a receiver that has staged the version. That it did not commit follows later.
            have[worker.events["joined"]["member"]] = 2 if is_staged else version
            self.check_metadata(worker, version)
        self.check_publishers(publishers, have)

    def check_metadata(self, worker: SyncWorker, version: int) -> None:
        """Check that a receiver names the base of the version that it has."""
        worker.send("digests")
        said = self.done(worker, "digests")
        due = {1: OLD, 2: self.expected}.get(version)
        if version and said["metadata"].get(BASE) != due:
            self.violate("adapter on another base", f"version {version} with {said['metadata']}; due: {due}")
