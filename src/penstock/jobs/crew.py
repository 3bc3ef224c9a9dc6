"""Who starts a job's workers and ends them; and what a report says of each.

In: names, devices, the coordinator's address. Out: processes that connect to it.
Not here: workers elsewhere (`ray_crew`), what they are told (`run`).
"""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.engine.trace import Span
from penstock.errors import PeerLost

END_S = 5.0
"""A killed process that is not gone by then is stuck in the kernel, where nobody can end it: it is left there."""


class Crew(Protocol):
    """Who starts workers and ends them.

    Attributes:
        listen: where they reach the coordinator: a name or address of this host; None: from this host alone.
    """

    listen: str | None

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """Have a worker of this name connect to `address`. PeerLost where none can be started."""
        ...

    def ended(self, worker: str) -> str | None:
        """How it ended; None: it may still connect, or speak."""
        ...

    def kill(self, worker: str) -> None:
        """End it at once. Idempotent."""
        ...


class LocalCrew:
    """Processes of this host. They end with the thread that started them, whatever ends that."""

    listen: str | None = None

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """See `Crew.spawn`. What a user's function prints goes to stderr: stdout is the caller's."""
        command = [sys.executable, "-m", "penstock.jobs.process", address, worker, device]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, text=True, start_new_session=True)
        except OSError as error:
            raise PeerLost(f"a worker cannot be started: {error.strerror}") from error
        self._processes[worker] = process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(secret + "\n")
            process.stdin.close()

    def ended(self, worker: str) -> str | None:
        """See `Crew.ended`."""
        code = self._processes[worker].poll()
        if code is None:
            return None
        return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"

    def kill(self, worker: str) -> None:
        """See `Crew.kill`."""
        process = self._processes[worker]
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)


@dataclass(slots=True)
class WorkerStats:
    """One worker of a run, for the report."""

    worker: str
    device: str
    num_tasks: int = 0
    moved_bytes: int = 0
    busy_s: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    end: str = "finished"


@dataclass(slots=True)
class WorkerTrace:
    """One worker's spans, by its own clock."""

    row: str
    spans: list[Span] = field(default_factory=list)
    behind_s: float = math.inf
    """What is to be added to its clock to have this process's."""


def rows_of(traces: Sequence[WorkerTrace], executors: Sequence[str]) -> dict[str, list[Span]]:
    """All spans by the clock of this process, for one trace: a row for each worker's executor."""
    rows: dict[str, list[Span]] = {f"{one.row} {name}": [] for one in traces for name in executors}
    for one in traces:
        for name, what, thread, start, stop, nbytes in one.spans:
            rows[f"{one.row} {name}"].append((name, what, thread, start + one.behind_s, stop + one.behind_s, nbytes))
    return rows
