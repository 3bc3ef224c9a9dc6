"""Rounds with another user of the host who tries to reach every socket, port, process and file of a fleet.

Violations are anything that the stranger gets, and members that it blocks.
`tests/integration/fetch/test_fleet_refused.py` tests token holders that misuse their rights.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.chaos.harness import SHORT_TIMEOUTS, Process, Round
from tests.support.fleet import Task, Worker

from penstock.types import MIB

FETCH_S = 40.0
"""Time limit in seconds for a fetch of 8 MiB while a stranger holds connections. Without a stranger it takes one
second."""


class StrangerRound(Round):
    """A round with a holder, a stranger, then a reader."""

    kind = "users"
    at_once = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.transports = self.rng.choice([None, ["shm"], ["http"]])
        self.num_held = self.rng.choice([0, 50, 200, 600])
        self.checkpoint = self.world.checkpoints["plain"]

    def __str__(self) -> str:
        return f"{','.join(self.transports or ['any'])}; a stranger with {self.num_held} connections a port"

    def member(self) -> Worker:
        connection: dict[str, Any] = {"transports": self.transports} if self.transports else {}
        task = Task(fallback=str(self.checkpoint.directory), constants=SHORT_TIMEOUTS, connection=connection)
        return self.stack.enter_context(Worker(task, self))  # type: ignore[arg-type]

    def run(self) -> None:
        if os.geteuid() != 0:
            return  # nobody else's rights can be taken on here
        holder = self.member()
        self.expect(holder, "fetched")
        secret = next(self.checkpoint.directory.glob("*.safetensors")).read_bytes()[2 * MIB :][:64].hex()
        stranger = self.start("stranger", {"secret": secret})
        self.expect(stranger, "ready")
        paths, ports = self.reachable([holder.process.pid])
        words = [",".join(paths) or "-", ",".join(map(str, ports)) or "-", str(holder.process.pid)]
        self.fault("stranger reaches", len(paths) + len(ports) + 1)
        self.told(stranger, f"reach {' '.join(words)}", "reach")
        if ports and self.num_held:
            self.fault("stranger's connections", self.num_held * len(ports))
            self.told(stranger, f"hold {','.join(map(str, ports))} {self.num_held}", "hold")
        reader, begun = self.member(), time.monotonic()
        report = self.expect(reader, "fetched")
        if self.expect(reader, "digests")["digests"] != self.checkpoint.digests:
            self.violate("wrong bytes", "received with a stranger present")
        if time.monotonic() - begun > FETCH_S:
            self.violate("bounded waits", f"a fetch with a stranger present took {time.monotonic() - begun:.0f} s")
        if report["storage_bytes"]:
            self.violate("storage factor", f"a stranger had {report['storage_bytes']} bytes read from storage again")
        self.leave([holder, reader])

    def told(self, stranger: Process, line: str, word: str) -> None:
        stranger.events.pop(word, None)
        stranger.send(line)
        for what in self.expect(stranger, word)["found"]:
            self.violate("given to a stranger", what)

    def reachable(self, pids: list[int]) -> tuple[list[str], list[int]]:
        """Return the Unix sockets and TCP ports on which these processes listen."""
        inodes = set[str]()
        for pid in pids:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    found = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}"))
                    if found:
                        inodes.add(found[1])
        paths, ports = list[str](), list[int]()
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            words = line.split()
            if len(words) > 7 and words[6] in inodes and words[5] == "01":
                paths.append(words[7])
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes and words[3] == "0A":
                ports.append(int(words[1].rpartition(":")[2], 16))
        return paths, ports
