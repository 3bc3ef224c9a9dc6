"""The coordinator of a job: starts workers, hands out tasks, notes what is done, outlives workers that die or hang.

In: a job in words, a journal, devices. Out: every task done, and who did what.
Not here: which task to whom (`plan.placement`), the work (`worker`), publishing (`convert`).

    spawn --> Hello, Words, Ready --> placement.join --> Work ... Done --> journal --> Stop
                silent or dead: placement.lost, killed, replaced
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from penstock import errors
from penstock.errors import BudgetTooSmall, FormatError, OperationFailed, PeerLost, PenstockError
from penstock.jobs.job import Job
from penstock.jobs.journal import Journal
from penstock.jobs.messages import Beat, Done, Failure, Hello, Ready, Stop, Wire, Words, Work
from penstock.plan.placement import Placement

TURN_S = 0.2
"""Longest pause between looks at who is idle or silent."""
HELLO_S = 5.0
"""Within which a connection must say who it is."""
STRIKES = 2
"""Workers that may die or hang at one task before it is the task's fault."""
RESPAWNS = 3
"""Times a worker's place is filled anew."""
BEGIN_S = 120.0
"""Within which a new worker must be ready: it imports torch, opens the sources, plans."""


class Crew(Protocol):
    """Who starts workers and ends them.

    Attributes:
        listen: where they reach the coordinator: a name or address of this host; None: from this host alone.
    """

    listen: str | None

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """Have a worker of this name connect to `address`."""
        ...

    def is_alive(self, worker: str) -> bool:
        """Whether it may still connect, or speak."""
        ...

    def kill(self, worker: str) -> None:
        """End it at once. Idempotent."""
        ...


class LocalCrew:
    """Processes of this host."""

    listen: str | None = None

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """See `Crew.spawn`."""
        command = [sys.executable, "-m", "penstock.jobs.process", address, worker, device]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(secret + "\n")
            process.stdin.close()
        self._processes[worker] = process

    def is_alive(self, worker: str) -> bool:
        """See `Crew.is_alive`."""
        return self._processes[worker].poll() is None

    def kill(self, worker: str) -> None:
        """See `Crew.kill`."""
        process = self._processes[worker]
        if process.poll() is None:
            process.kill()
        process.wait()


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
class _Place:
    """One worker as the coordinator sees it."""

    stats: WorkerStats
    begun: float
    respawns: int
    wire: Wire | None = None
    is_ready: bool = False
    spoke: float = 0.0
    """When it last got on."""


class Coordinator:
    """Runs one job. One thread.

    Args:
        job, words: the same job, both ways.
        journal: what was done before; what is done now is added.
        crew: who starts workers.
        devices: one worker for each.
        stall_s: a worker that does not get on for so long is replaced.
        on_progress: called with tasks done and tasks in all, after each.
    """

    def __init__(
        self,
        job: Job,
        words: Words,
        journal: Journal,
        crew: Crew,
        devices: Sequence[str],
        *,
        stall_s: float,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._job, self._words, self._journal, self._crew = job, words, journal, crew
        self._devices, self._stall_s, self._on_progress = devices, stall_s, on_progress
        self.placement = Placement(job.tasks.cost.tolist(), done=journal.done)
        self.stats: list[WorkerStats] = []
        self._places: dict[str, _Place] = {}
        self._strikes: dict[int, int] = {}
        self._secret = secrets.token_hex(16)
        self._numbers = 0
        self._select = selectors.DefaultSelector()
        self._home = tempfile.mkdtemp(prefix="penstock-job-")
        self._listener, self._address = _listen(crew.listen, self._home)
        self._select.register(self._listener, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Return once every task is done and in the journal.

        Raises:
            PenstockError: what a worker could not go on for.
            OperationFailed: workers died or hung at one task.
            PeerLost: all workers are gone, and replacing them did not help.
        """
        if self.placement.is_done:
            return
        for device in self._devices:
            self._spawn(device, 0)
        while not self.placement.is_done:
            for key, _ in self._select.select(TURN_S):
                if key.data is None:
                    self._accept()
                else:
                    self._hear(key.data)
            self._look()
            for name in [name for name, place in self._places.items() if place.is_ready]:
                self._feed(name)
            if not self._places:
                ends = "; ".join(dict.fromkeys(one.end for one in self.stats))
                raise PeerLost(f"every worker of the job is gone: {ends}", hint="run it again: finished tasks are kept")

    def _spawn(self, device: str, respawns: int) -> None:
        name = f"w{self._numbers}"
        self._numbers += 1
        stats = WorkerStats(name, device)
        self.stats.append(stats)
        self._places[name] = _Place(stats, time.monotonic(), respawns)
        self._crew.spawn(name, device, self._address, self._secret)

    # -- what comes

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(HELLO_S)
        wire = Wire(connection)
        try:
            hello = wire.from_worker()
        except (PeerLost, FormatError):
            wire.close()
            return
        place = self._places.get(hello.worker) if isinstance(hello, Hello) else None
        if place is None or place.wire is not None or not isinstance(hello, Hello) or not self._is_ours(hello):
            wire.close()
            return
        connection.settimeout(self._stall_s)
        place.wire, place.spoke = wire, time.monotonic()
        self._select.register(wire, selectors.EVENT_READ, hello.worker)
        self._tell(hello.worker, self._words)

    def _is_ours(self, hello: Hello) -> bool:
        return secrets.compare_digest(hello.secret, self._secret)

    def _hear(self, name: str) -> None:
        place = self._places.get(name)
        if place is None or place.wire is None:
            return
        try:
            message = place.wire.from_worker()
        except (PeerLost, FormatError) as error:
            self._lose(name, error.message)
            return
        now = time.monotonic()
        if isinstance(message, Done):
            place.spoke = now
            place.stats.num_tasks += 1
            self._ended(name, message, now)
        elif isinstance(message, Beat):
            if message.moved_bytes != place.stats.moved_bytes or not self._given(name):
                place.spoke = now
            place.stats.moved_bytes, place.stats.busy_s = message.moved_bytes, message.busy_s
            place.stats.peak_bytes = max(place.stats.peak_bytes, message.peak_bytes)
        elif isinstance(message, Ready):
            place.is_ready, place.spoke = True, now
            self.placement.join(name, now)
        elif isinstance(message, Failure):
            raise _error_of(message)

    def _ended(self, name: str, message: Done, now: float) -> None:
        if not 0 <= message.task < len(self._job.tasks):
            return
        digests = np.frombuffer(message.digests, "<u8").astype(np.uint64)
        if len(digests) != self._job.num_pieces(message.task):
            raise FormatError(f"worker {name} reported {len(digests)} digests of task {message.task}")
        outcome = self.placement.done(name, message.task, now)
        if outcome.first:
            self._journal.add(message.task, digests)
            if self._on_progress is not None:
                total = len(self._job.tasks)
                self._on_progress(total - self.placement.num_left, total)
        self._revoke(outcome.revoked)

    # -- what goes

    def _feed(self, name: str) -> None:
        given = self.placement.next(name, time.monotonic())
        self._revoke(given.revoked)
        if given.tasks:
            if len(self._given(name)) == len(given.tasks):
                self._places[name].spoke = time.monotonic()  # it had nothing to do until now
            self._tell(name, Work(tasks=given.tasks))

    def _revoke(self, revoked: Sequence[tuple[str, int]]) -> None:
        for name, task in revoked:
            if name in self._places:
                self._tell(name, Work(revoked=(task,)))

    def _tell(self, name: str, message: Words | Work | Stop) -> None:
        wire = self._places[name].wire
        assert wire is not None
        try:
            wire.send(message)
        except PeerLost as error:
            self._lose(name, error.message)

    def _given(self, name: str) -> tuple[int, ...]:
        return self.placement.given(name) if self._places[name].is_ready else ()

    # -- who is still there

    def _look(self) -> None:
        now = time.monotonic()
        for name, place in list(self._places.items()):
            if name not in self._places:
                continue
            if place.wire is None and not self._crew.is_alive(name):
                self._lose(name, "it ended before it connected")
            elif not place.is_ready and now - place.begun > max(BEGIN_S, self._stall_s):
                self._lose(name, "it did not get ready")
            elif place.is_ready and self._given(name) and now - place.spoke > self._stall_s:
                self._lose(name, f"it made no progress for {self._stall_s} s")

    def _lose(self, name: str, why: str) -> None:
        """A worker is gone, or taken for it: its tasks are others', its place is filled."""
        place = self._places[name]
        given = self._given(name)
        if place.is_ready:
            self.placement.lost(name)
        del self._places[name]
        if place.wire is not None:
            self._select.unregister(place.wire)
            place.wire.close()
        self._crew.kill(name)
        place.stats.end = why
        if given:
            task = given[0]
            self._strikes[task] = self._strikes.get(task, 0) + 1
            if self._strikes[task] >= STRIKES:
                recipe = self._job.recipes[next(self._job.tasks.entries(task))[0]]
                message = f"{self._strikes[task]} workers were lost at one task: {why}"
                raise OperationFailed(message, tensor=recipe.outputs[0].spec.name)
        if place.respawns < RESPAWNS:
            self._spawn(place.stats.device, place.respawns + 1)

    def close(self) -> None:
        """Let workers finish, then end those that do not. Idempotent."""
        for name, place in list(self._places.items()):
            if place.wire is not None:
                with contextlib.suppress(PeerLost):
                    place.wire.send(Stop())
                self._last_words(name, place)
                place.wire.close()
            self._crew.kill(name)
        self._places.clear()
        self._select.close()
        self._listener.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def _last_words(self, name: str, place: _Place) -> None:
        """Hear its last beat: until the connection ends, or nothing came for a while."""
        assert place.wire is not None
        deadline = time.monotonic() + HELLO_S
        with contextlib.suppress(PeerLost, FormatError):
            while place.wire.is_readable(max(0.0, deadline - time.monotonic())):
                message = place.wire.from_worker()
                if isinstance(message, Beat):
                    place.stats.moved_bytes, place.stats.busy_s = message.moved_bytes, message.busy_s
                    place.stats.peak_bytes = max(place.stats.peak_bytes, message.peak_bytes)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listen(host: str | None, home: str) -> tuple[socket.socket, str]:
    """Where workers connect, and what they are told of it."""
    if host is None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = os.path.join(home, "job.sock")
        listener.bind(path)
        told = f"unix:{path}"
    else:
        listener = socket.create_server((host, 0))
        told = f"tcp:{host}:{listener.getsockname()[1]}"
    listener.listen(256)
    return listener, told


def _error_of(failure: Failure) -> PenstockError:
    """What a worker could not go on for, as the error it was there."""
    kind = getattr(errors, failure.kind, PenstockError)
    if kind is BudgetTooSmall:
        return BudgetTooSmall(failure.message, minimum_bytes=failure.minimum_bytes)
    if not (isinstance(kind, type) and issubclass(kind, PenstockError)):
        kind = PenstockError
    found: PenstockError = kind(
        failure.message, uri=failure.uri or None, tensor=failure.tensor or None, hint=failure.hint or None
    )
    return found
