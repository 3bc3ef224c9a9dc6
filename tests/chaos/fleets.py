"""Rounds with a fleet that fetches while members, hubs, Redis, clocks or storage fail.

Violations are wrong bytes, hangs, and storage that is read more than once. `strangers` has hostile users, and
`downloads` has a single process that reads storage.
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

from tests.chaos.harness import SHORT_TIMEOUTS, STALL_S, Process, Round
from tests.support import redis_server
from tests.support.fleet import Task, Worker
from tests.support.redis_server import RedisServer
from tests.support.servers.http_server import Faults, RangeServer

from penstock.errors import PenstockError
from penstock.types import MIB

FORGOTTEN_BYTES = 2 * MIB
"""Bytes in two claim pieces with the constants in `SHORT_TIMEOUTS`.

A member claims this much at a time, and a hub that lost its state may assign it again.
"""
TRANSIENT = ("slow", "cut", "reset", "busy", "stall")
LIES = ("shifted range", "wrong total")


def storage_faults(kind: str, count: int) -> Faults:
    """Return the faults of a server for this number of requests."""
    return {
        "slow": Faults(slow_bytes_per_s=4 * MIB),
        "cut": Faults(truncate_after=100_000, num_requests=count),
        "reset": Faults(reset_after=50_000, num_requests=count),
        "busy": Faults(status=503, retry_after="1", num_requests=count),
        "stall": Faults(stall_after=70_000, num_requests=min(count, 2)),
        "shifted range": Faults(wrong_content_range=True, num_requests=count),
        "wrong total": Faults(wrong_total=True, num_requests=count),
    }[kind]


class FleetRound(Round):
    """Members join, start together or with a whole holder, fetch, and leave. Some are killed or stopped."""

    kind = "fetch"
    hubs = ("local",)
    """Place of the hub: in a member (`local`), in a process (`separate`), or in two processes with one Redis
    (`two`)."""
    at_once = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rng = self.rng
        self.hub_form = rng.choice([form for form in self.hubs if form != "two" or not redis_server.missing()])
        self.num_readers = rng.choice([2, 3, 4, 6, 8, 12] if self.kind == "fetch" else [2, 3, 4])
        self.warm = rng.random() < (0.3 if self.kind != "clock" else 0.7)
        self.transports = rng.choice([["shm"], ["http"], None])
        self.checkpoint = self.world.checkpoints[rng.choice(["plain", "sealed"])]
        self.by_server = rng.random() < 0.7
        self.pause_s = rng.choice([0.0, 0.03])
        self.storage_fault = ""
        self.num_mute = 0
        self.hits: list[tuple[float, str]] = []
        if self.kind == "fetch":
            if self.by_server and rng.random() < 0.4:
                self.storage_fault = rng.choice([*TRANSIENT, *LIES])
            if rng.random() < 0.15:
                self.num_mute = rng.choice([1, 2])
            for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
                self.hits.append((rng.random() ** 2 * 1.2, rng.choice(["kill", "kill", "stop", "pause"])))
        self.hits.sort()
        self.dead: list[Worker] = []
        self.hit_clients: set[str] = set()
        """The client names under which killed, stopped or paused members read storage."""
        self.num_forgotten = 0
        """Number of claims that a hub may have forgotten."""
        self.hub_urls: list[str | None] = [None]
        self.hub_processes: list[Process] = []
        self.redis: RedisServer | None = None
        self.server: RangeServer | None = None

    def __str__(self) -> str:
        start = "beside a whole holder" if self.warm else "cold"
        words = [f"{self.num_readers} members {start}, {','.join(self.transports or ['any'])}, hub {self.hub_form}"]
        words += [f"storage {self.storage_fault or 'sound'}"] if self.by_server else ["a directory"]
        words += [f"{self.num_mute} mute holders"] if self.num_mute else []
        return "; ".join(words + [f"{what} at {at:.2f} s" for at, what in self.hits])

    def environ(self) -> dict[str, str]:
        # A member without an answer from its hub for half of this reads storage without a claim, as documented. Rounds
        # without a hub for two seconds do not test that.
        return super().environ() | ({} if self.kind == "fetch" else {"PENSTOCK_STALL_S": "14"})

    def run(self) -> None:
        self.start_hubs()
        uri = str(self.checkpoint.directory)
        if self.by_server:
            self.server = self.serve(self.checkpoint)
            # Read the index by its name, because the first shard alone does not lead to the others.
            uri = f"{self.server.url}/model.safetensors.index.json"
        holders = [self.member(0, str(self.checkpoint.directory), whole=True)] if self.warm else []
        for holder in holders:
            self.expect(holder, "fetched")
        mute = [self.member(0, str(self.checkpoint.directory), mute=True) for _ in range(self.num_mute)]
        for holder in mute:
            self.expect(holder, "fetched")
            self.fault("data port gives nothing")
        if self.server is not None and self.storage_fault:
            self.server.faults = storage_faults(self.storage_fault, self.rng.randint(1, 4))
            self.fault(f"storage: {self.storage_fault}")
        readers = [self.member(number, uri, held=True) for number in range(self.num_readers)]
        for reader in readers:
            self.expect(reader, "ready")
        begun = time.monotonic()
        for reader in readers:
            reader.proceed()
        self.disturb(readers, holders)
        self.check_outcome(readers, begun)
        for one in mute:
            one.kill()
            self.is_rough = True
        self.leave([one for one in [*holders, *readers] if one not in self.dead])
        self.end_hubs()

    # Members and hubs.

    def member(self, number: int, uri: str, *, whole: bool = False, held: bool = False, mute: bool = False) -> Worker:
        join: dict[str, Any] = {}
        connection: dict[str, Any] = {}
        if self.transports:
            connection["transports"] = self.transports
        if whole:
            join["max_bytes_per_s"] = 16 * MIB  # its readers have it for about half a second
        if mute:
            connection["transports"] = ["http"]  # whose port takes requests and gives no byte, while beats go on
        task = Task(
            storage_options={"bearer_token": f"member-{len(self.forked)}"} if uri.startswith("http") else {},
            hub=self.hub_urls[number % len(self.hub_urls)],
            fallback=uri,
            storage_pause_s=0.0 if whole or mute else self.pause_s,
            constants=SHORT_TIMEOUTS,
            connection=connection,
            join=join,
            waits_for_input=held,
            data_bytes_per_s=0.0 if mute else None,
        )
        return self.stack.enter_context(Worker(task, self))  # type: ignore[arg-type]

    def start_hub(self, number: int, *, fresh: bool, ahead_s: float = 0.0) -> Process:
        told = {
            "listen": f"unix://{self.directory}/hub{number}.sock",
            "fresh": fresh,
            "beat_s": 1.0,
            "ttl_s": 4.0,
            "redis": self.redis.url if self.redis is not None else None,
            "constants": SHORT_TIMEOUTS,
            "ahead_s": ahead_s,
        }
        hub = self.start("hub", told)
        self.expect(hub, "ready")
        return hub

    def start_hubs(self) -> None:
        if self.hub_form == "local":
            return
        num_hubs = 1
        if self.hub_form == "two" or self.kind == "redis":
            (self.directory / "redis").mkdir()
            self.redis = self.stack.enter_context(RedisServer(self.directory / "redis"))
            num_hubs = 2 if self.hub_form == "two" else 1
        apart_s = self.rng.choice([-60.0, 60.0]) if self.kind == "clock" and num_hubs == 2 else 0.0
        if apart_s:
            self.fault("hubs' clocks 60 s apart")
        self.hub_processes = [
            self.start_hub(number, fresh=not number, ahead_s=number * apart_s) for number in range(num_hubs)
        ]
        self.hub_urls = [f"unix://{self.directory}/hub{number}.sock" for number in range(num_hubs)]

    def end_hubs(self) -> None:
        for hub in self.hub_processes:
            hub.kill(signal.SIGTERM)
            self.ended(hub)

    # Faults.

    def disturb(self, readers: list[Worker], holders: list[Worker]) -> None:
        """Kill, stop and pause members at the planned times."""
        begun, candidates = time.monotonic(), [*readers, *holders]
        for at, what in self.hits:
            time.sleep(max(0.0, begun + at - time.monotonic()))
            left = [one for one in candidates if one not in self.dead]
            if len(left) <= 2:
                return
            self.hit(self.rng.choice(left), what)

    def hit(self, worker: Worker, what: str) -> None:
        self.fault({"kill": "member killed", "stop": "member stopped", "pause": "member paused"}[what])
        self.outcome.num_deaths += 1  # one that is paused for long is taken for dead
        self.hit_clients.add(f"Bearer {worker.task.storage_options.get('bearer_token')}")
        if what == "kill":
            worker.kill()
            self.dead.append(worker)
        elif what == "stop":
            worker.kill(signal.SIGSTOP)
            self.dead.append(worker)
        else:
            worker.kill(signal.SIGSTOP)
            time.sleep(self.rng.random() * 1.5)
            worker.kill(signal.SIGCONT)

    # What must hold.

    def check_outcome(self, readers: list[Worker], begun: float) -> None:
        reported, said = 0, list[str]()
        for reader in readers:
            if reader in self.dead:
                continue
            report = self.fetched(reader)
            if report is None:
                continue
            reported += report["storage_bytes"]
            said += report["faults"]
            if self.num_mute and not self.hits and report["seconds"] > (self.num_mute + 1) * STALL_S + 5:
                self.violate("bounded waits", f"{report['seconds']:.1f} s with {self.num_mute} mute holders")
        self.outcome.weight_bytes = self.checkpoint.nbytes
        self.outcome.served_bytes = self.checkpoint.weight_bytes_of(self.server) if self.server else reported
        self.outcome.allowed_bytes = self.num_forgotten * FORGOTTEN_BYTES
        if self.server is not None:
            self.outcome.allowed_bytes += self.checkpoint.weight_bytes_of(self.server, self.hit_clients)
        elif self.hit_clients:
            self.outcome.allowed_bytes += self.checkpoint.nbytes  # a directory does not say who read it
        if self.storage_fault:
            self.outcome.weight_bytes = 0  # what a faulty server sends twice says nothing of the fleet
        elif self.outcome.served_bytes > self.outcome.weight_bytes + self.outcome.allowed_bytes:
            factor = self.outcome.served_bytes / self.checkpoint.nbytes
            self.violate("storage factor", f"{factor:.2f} with {self.outcome.num_deaths} deaths; {said[:6]}")

    def fetched(self, worker: Worker) -> dict[str, Any] | None:
        """Return a survivor's report after comparing its bytes, or None if it may fail and did."""
        try:
            report = self.expect(worker, "fetched")
            got = self.expect(worker, "digests")["digests"]
        except PenstockError as error:
            said = worker.events.get("failed")
            if said is None:
                raise
            if self.may_fail():
                self.dead.append(worker)
                self.fault("fetch refused")
                self.ended(worker, due=3)
                return None
            raise PenstockError(f"{said['error']}: {said['message']}") from error
        if got != self.checkpoint.digests:
            self.violate("wrong bytes", f"delivered {got[:12]}, stored {self.checkpoint.digests[:12]}")
        return report

    def may_fail(self) -> bool:
        """Return whether a fetch may raise a typed error, because storage is wrong and nobody else has the bytes."""
        return self.storage_fault in LIES


class HubRound(FleetRound):
    """The hub fails: the member that hosts it, a separate process, or one of two with one Redis."""

    kind = "hub"
    hubs = ("local", "separate", "two")

    def disturb(self, readers: list[Worker], holders: list[Worker]) -> None:
        time.sleep(self.rng.random() ** 2 * 1.0)
        how = self.rng.choice(["kill", "kill", "stop"])
        if self.hub_form == "local":
            self.fault(f"host of the hub: {how}")
            host = self.host([*holders, *readers])
            if host is not None:
                self.outcome.num_deaths += 1
                self.num_forgotten += len(readers)
                self.hit_clients.add(f"Bearer {host.task.storage_options.get('bearer_token')}")
                host.kill(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
                self.dead.append(host)
            return
        number = self.rng.randrange(len(self.hub_processes))
        hub = self.hub_processes[number]
        self.fault(f"hub: {how}")
        self.outcome.num_deaths += 1
        self.num_forgotten += len(readers)
        if how == "stop":
            hub.kill(signal.SIGSTOP)
            time.sleep(self.rng.random() * 2)
            hub.kill(signal.SIGCONT)
            return
        hub.kill()
        hub.process.wait(timeout=10)
        time.sleep(self.rng.random())
        with contextlib.suppress(FileNotFoundError):
            (self.directory / f"hub{number}.sock").unlink()
        self.hub_processes[number] = self.start_hub(number, fresh=False)

    def host(self, workers: list[Worker]) -> Worker | None:
        """Return the member that holds the lock of the current hub."""
        locks = {path.stat().st_ino for path in self.runtime.glob("hub-*.lock")} if self.runtime.is_dir() else set()
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            words = line.split()
            if int(words[5].rpartition(":")[2]) in locks:
                for worker in workers:
                    if worker.process.pid == int(words[4]):
                        return worker
        return None


class RedisRound(FleetRound):
    """Redis is killed and restarts empty, or is stopped for a while."""

    kind = "redis"
    hubs = ("separate", "two")

    def disturb(self, readers: list[Worker], holders: list[Worker]) -> None:
        assert self.redis is not None
        time.sleep(self.rng.random() ** 2 * 1.0)
        self.outcome.num_deaths += 1
        self.num_forgotten += len(readers)
        if self.rng.random() < 0.4:
            self.fault("Redis stopped")
            self.redis.pause()
            time.sleep(self.rng.random() * 2)
            self.redis.resume()
        else:
            self.fault("Redis killed, restarted empty")
            self.redis.kill()
            time.sleep(self.rng.random())
            self.redis.start()


class ClockRound(FleetRound):
    """The hub's clock jumps by a minute, forwards or back, once or more."""

    kind = "clock"
    hubs = ("separate", "two")

    def disturb(self, readers: list[Worker], holders: list[Worker]) -> None:
        ahead_s = 0.0
        for _ in range(self.rng.choice([1, 1, 2])):
            time.sleep(self.rng.random() ** 2)
            ahead_s += self.rng.choice([-60.0, -30.0, 30.0, 60.0])
            hub = self.rng.choice(self.hub_processes)
            hub.events.pop("clock", None)
            hub.send(str(ahead_s))
            self.expect(hub, "clock")
            self.fault("clock stepped")
