"""Rounds with a sync: trainer ranks publish, subscribers update, some processes are killed or stopped.

The survivors then get a last version. Violations are a torn or wrong version, an uninformative error, and a hang. With
a two-phase commit, subscribers must not be on different versions or on a withdrawn version. `fleets` has fleets that
fetch a checkpoint.
"""

from __future__ import annotations

import signal
import time
from typing import Any, ClassVar

from tests.chaos.harness import SHORT_TIMEOUTS, STALL_S, Round
from tests.support.fleet import Worker
from tests.support.sync import SyncTask, SyncWorker, expected_digest

REFUSALS = frozenset(
    {"PeerLost", "SourceStalled", "StaleDescriptor", "NotFound", "HubUnavailable", "SourceUnavailable"}
)
"""Errors that are allowed for a version that was not available."""
DEADLINE_S = 4.0
"""Seconds until a decision. The versions take some tenths of a second."""
SLACK_S = 10.0
"""Additional seconds for a busy machine."""
ROLES = ("publisher 0", "publisher", "subscriber", "host of the hub")


class SyncRound(Round):
    """Two versions, of which the second loses ranks, then a third for all ranks that are alive."""

    kind = "sync"
    at_once = 2
    refusals: ClassVar[frozenset[str]] = REFUSALS

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rng = self.rng
        self.transport, self.source = rng.choice(["shm", "http"]), rng.choice(["live", "snapshot"])
        self.num_publishers, self.num_subscribers = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
        self.modes = [rng.choice(["staged", "direct"]) for _ in range(self.num_subscribers)]
        self.tag = "fp8-block128" if rng.random() < 0.2 else ""
        self.hits = sorted(
            (rng.random() ** 2 * 0.8, rng.choice(ROLES), rng.choice(["kill", "kill", "stop", "pause"]))
            for _ in range(rng.choice([0, 1, 1, 2]))
        )
        self.lost: list[SyncWorker] = []

    def __str__(self) -> str:
        sides = f"{self.num_publishers} {self.source} -> {', '.join(self.modes)}, {self.transport} {self.tag}".strip()
        return "; ".join([sides] + [f"{who} {how} at {at:.2f} s" for at, who, how in self.hits])

    def rank(self, side: str, **task: Any) -> SyncWorker:
        # An adapter has its own tensors in a receiver.
        options: dict[str, Any] = {} if side == "subscriber" and "base" in task else {"arena": True}
        connection = {"transports": [self.transport]}
        if self.tag:
            task |= {"rows": 300, "columns": 384}
            if side == "publisher":
                options["transforms"] = {self.tag: ["*"]}
            elif task.get("name") is None:
                task["tag"] = self.tag
        made = SyncTask(
            side=side, connection=connection, options=options, constants=SHORT_TIMEOUTS, num_layers=8, **task
        )
        return self.stack.enter_context(SyncWorker(made, self))  # type: ignore[arg-type]

    def trainer(self, world_size: int) -> list[SyncWorker]:
        found = [self.rank("publisher", rank=r, world_size=world_size, mode=self.source) for r in range(world_size)]
        for one in found:
            self.expect(one, "joined")
        return found

    def run(self) -> None:
        host = self.rank("subscriber", name="other")  # hosts the hub
        self.expect(host, "joined")
        publishers = self.trainer(self.num_publishers)
        subscribers = [
            self.rank("subscriber", rank=r, world_size=self.num_subscribers, dim=1, mode=mode, pause_s=0.1, wait_s=10.0)
            for r, mode in enumerate(self.modes)
        ]
        for one in subscribers:
            self.expect(one, "joined")
        publishers[0].send(f"subscribers {len(subscribers)}")
        self.done(publishers[0], f"subscribers {len(subscribers)}")
        self.step(publishers, subscribers, 1)
        self.all_have(publishers, subscribers, 1)
        self.step(publishers, subscribers, 2)
        self.disturb(host, publishers, subscribers)
        self.check_outcome(publishers, subscribers)
        publishers, subscribers = self.go_on(publishers, subscribers)
        self.leave([one for one in [host, *publishers, *subscribers] if one not in self.lost])

    def done(self, worker: Worker, line: str) -> dict[str, Any]:
        return self.expect(worker, f"{line} done")

    def step(self, publishers: list[SyncWorker], subscribers: list[SyncWorker], version: int) -> None:
        for one in publishers:
            one.send(f"publish {version}")
        for one in subscribers:
            one.send(f"wait {version}")
            one.send("update")

    def all_have(self, publishers: list[SyncWorker], subscribers: list[SyncWorker], version: int) -> None:
        for worker in subscribers:
            said = self.done(worker, "update")
            if "error" in said:
                self.violate("unexpected error", f"update to {version}: {said['error']}: {said['message']}")
            self.check(worker, said, {version})
        for worker in publishers:
            said = self.done(worker, f"publish {version}")
            if "error" in said:
                self.violate("unexpected error", f"publish {version}: {said['error']}: {said['message']}")

    def disturb(self, host: SyncWorker, publishers: list[SyncWorker], subscribers: list[SyncWorker]) -> None:
        begun = time.monotonic()
        for at, role, how in self.hits:
            time.sleep(max(0.0, begun + at - time.monotonic()))
            if role == "host of the hub":
                worker = host
            elif role == "subscriber":
                worker = self.rng.choice(subscribers)
            else:
                worker = publishers[0] if role == "publisher 0" else publishers[-1]
            if worker in self.lost:
                continue
            self.fault(f"{role.removesuffix(' 0')}: {how}")
            self.outcome.num_deaths += 1
            if how == "pause":
                worker.kill(signal.SIGSTOP)
                time.sleep(self.rng.random())
                worker.kill(signal.SIGCONT)
            else:
                worker.kill(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
                self.lost.append(worker)

    def check_outcome(self, publishers: list[SyncWorker], subscribers: list[SyncWorker]) -> None:
        """Check that each survivor reports the version that it has, and that publishers claim no false success."""
        have = {}
        for worker in subscribers:
            if worker not in self.lost:
                have[worker.events["joined"]["member"]] = self.check(worker, self.done(worker, "update"), {1, 2})
        self.check_publishers(publishers, have)

    def check_publishers(self, publishers: list[SyncWorker], have: dict[str, int]) -> None:
        for worker in publishers:
            if worker not in self.lost:
                said = self.done(worker, "publish 2")
                if said.get("error", "PeerLost") not in REFUSALS:
                    self.violate("unexpected error", f"publish 2: {said['error']}: {said['message']}")
                false = [one for one in said.get("committed", ()) if have.get(one, 2) != 2]
                if false:
                    self.violate("torn version", f"{false} are reported to have version 2 but do not have it")

    def check(self, worker: SyncWorker, said: dict[str, Any], versions: set[int]) -> int:
        """Return the version that a subscriber has whole, or 0 if it knows that it is dirty."""
        if "error" in said:
            if said["error"] not in self.refusals:
                self.violate("unexpected error", f"update: {said['error']}: {said['message']}")
            is_touched = said["mutated"]
            worker.send("digests")
            said = self.done(worker, "digests")
            if said["is_dirty"] != is_touched or (is_touched and worker.task.mode != "direct"):
                self.violate("torn version", f"touched: {is_touched}, dirty: {said['is_dirty']}, {worker.task.mode}")
            if said["is_dirty"]:
                return 0
        if said["version"] not in versions or said["is_dirty"]:
            self.violate("torn version", f"version {said['version']}, dirty {said['is_dirty']}; due: {versions}")
        elif said["digests"] != expected_digest(worker.task, said["version"]):
            self.violate("wrong bytes", f"the bytes differ from version {said['version']}")
        return int(said["version"])

    def go_on(
        self, publishers: list[SyncWorker], subscribers: list[SyncWorker]
    ) -> tuple[list[SyncWorker], list[SyncWorker]]:
        """Send the next version, from the same or a restarted trainer, to all that are alive. Return them."""
        if any(one in self.lost for one in publishers):
            for one in publishers:
                one.kill(signal.SIGKILL)
            publishers = self.trainer(self.rng.choice([1, 2, 3]))
        subscribers = [one for one in subscribers if one not in self.lost]
        if subscribers:
            publishers[0].send(f"subscribers {len(subscribers)}")
            self.done(publishers[0], f"subscribers {len(subscribers)}")
            self.step(publishers, subscribers, 3)
            self.all_have(publishers, subscribers, 3)
        return publishers, subscribers


class TogetherRound(SyncRound):
    """A sync round whose versions the fleet commits together.

    Some rounds have a replica whose check refuses version 2.
    """

    kind = "together"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rng = self.rng
        self.tag = ""
        self.num_subscribers = rng.choice([2, 3, 4])
        self.modes = ["staged"] * self.num_subscribers
        self.stragglers = rng.choice(["leave_out", "withdraw"])
        self.refuser = rng.randrange(self.num_subscribers) if rng.random() < 0.25 else -1
        self.hits = sorted(
            (rng.random() ** 2 * 1.2, rng.choice(ROLES), rng.choice(["kill", "kill", "stop", "pause"]))
            for _ in range(rng.choice([0, 1, 1, 2, 2]))
        )

    def __str__(self) -> str:
        refuser = f", {self.refuser} refuses 2" if self.refuser >= 0 else ""
        return f"together, {self.stragglers}{refuser}: {super().__str__()}"

    def rank(self, side: str, **task: Any) -> SyncWorker:
        if side == "publisher":
            task["terms"] = {"stragglers": self.stragglers, "timeout_s": DEADLINE_S}
        elif task.get("name") is None and task["rank"] == self.refuser:
            task["refuses"] = (2,)
        return super().rank(side, **task)

    def step(self, publishers: list[SyncWorker], subscribers: list[SyncWorker], version: int) -> None:
        for one in publishers:
            one.send(f"together {version}")
        for one in subscribers:
            one.send(f"wait {version}")
            one.send("update")

    def decided(self, publishers: list[SyncWorker], version: int) -> list[dict[str, Any]]:
        """Return the decision as the live publishers report it."""
        said = []
        for one in publishers:
            if one not in self.lost:
                found = self.done(one, f"together {version}")
                if found.get("outcome") == "pending":
                    one.send("decision")
                    found = self.done(one, "decision")
                said.append(found)
        return said

    def all_have(self, publishers: list[SyncWorker], subscribers: list[SyncWorker], version: int) -> None:
        for worker in subscribers:
            said = self.done(worker, "update")
            if "error" in said:
                self.violate("unexpected error", f"update to {version}: {said['error']}: {said['message']}")
            self.check(worker, said, {version})
        for said in self.decided(publishers, version):
            if said.get("outcome") != "committed":
                self.violate("unexpected error", f"together {version}: {said}")

    def check_outcome(self, publishers: list[SyncWorker], subscribers: list[SyncWorker]) -> None:
        """Check that all survivors have one version, the previous one or a new one that was not withdrawn."""
        begun, told = time.monotonic(), {}
        alive = [one for one in subscribers if one not in self.lost]
        for worker in alive:
            told[worker] = self.done(worker, "update")
        ends = self.decided(publishers, 2)
        if (took_s := time.monotonic() - begun) > DEADLINE_S + 3 * STALL_S + SLACK_S:
            self.violate("hang", f"the last rank was done after {took_s:.1f} s")
        outcomes = {said["outcome"] for said in ends if "error" not in said}
        errors = {said["error"] for said in ends if "error" in said}
        if unknown := errors - REFUSALS - {"VersionRefused"}:
            self.violate("unexpected error", f"together 2: {unknown}: {ends}")
        # Update again, because a subscriber that was late receives the version that the fleet decided on.
        versions = {}
        for worker in alive:
            for said in (told[worker], None):
                if said is None:
                    worker.send("update")
                    said = self.done(worker, "update")
                if said.get("error", "VersionRefused") not in REFUSALS | {"VersionRefused"}:
                    self.violate("unexpected error", f"update: {said['error']}: {said['message']}")
            worker.send("digests")
            versions[worker] = self.check(worker, self.done(worker, "digests"), {1, 2})
        refuser = subscribers[self.refuser] if self.refuser >= 0 else None
        if refuser in versions and 2 in versions.values():
            # The fleet may commit without a replica that was late or failed. That replica then refuses the version
            # itself.
            member = refuser.events["joined"]["member"]  # type: ignore[union-attr]
            if not any(member in (*said.get("late", ()), *said.get("failed", ())) for said in ends):
                self.violate("withdrawn version", "the version is live although a replica refused it")
            told.pop(refuser)  # type: ignore[arg-type]
            versions.pop(refuser)  # type: ignore[arg-type]
        if self.stragglers == "leave_out":
            # A rank that reports that it did not prepare the version may stay behind. These are ranks of one engine
            # with separate parts, and if a publisher died no member has those bytes. A rank that prepared the version
            # may not stay behind.
            for worker, said in told.items():
                is_left_out = said.get("error") in REFUSALS and "cannot learn the fleet" not in said["message"]
                if is_left_out and versions[worker] == 1:
                    versions.pop(worker)
        if len(set(versions.values())) > 1:
            self.violate("mixed fleet", f"{sorted(versions.values())}; publishers: {ends}; {list(told.values())}")
        is_withdrawn = "VersionRefused" in errors or any(
            said.get("error") == "VersionRefused" for said in told.values()
        )
        if 2 in versions.values() and is_withdrawn:
            self.violate("withdrawn version", f"{sorted(versions.values())}; publishers: {ends}; {list(told.values())}")
        self.outcome.results["decision: " + ("committed" if 2 in versions.values() else "withdrawn or none")] += 1
        if "committed" in outcomes and 1 in versions.values():
            self.violate("mixed fleet", f"said to be committed, and {sorted(versions.values())} live")

    def go_on(
        self, publishers: list[SyncWorker], subscribers: list[SyncWorker]
    ) -> tuple[list[SyncWorker], list[SyncWorker]]:
        if self.lost:
            # Wait until dead members are no longer listed, because a version that all must have would be withdrawn.
            time.sleep(SHORT_TIMEOUTS["penstock.hub.local_hub.TTL_S"] + 1.0)
        return super().go_on(publishers, subscribers)
