"""The coordinator of a job: starts workers, hands out tasks, notes what is done, outlives workers that die or hang.

In: a job in words, a journal, devices. Out: every task done, and who did what.
Not here: which task to whom (`plan.placement`), the work (`jobs.workers.worker`), publishing (`convert`).

    spawn --> Hello, Words, Ready --> placement.join --> Work ... Done --> journal --> Stop
                silent or dead: placement.lost, killed, replaced
"""

from __future__ import annotations

import contextlib
import math
import secrets
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock import errors
from penstock.closing import Closing
from penstock.errors import BudgetTooSmall, FormatError, OperationFailed, PeerLost, PenstockError
from penstock.jobs.job import Job
from penstock.jobs.journal import Journal
from penstock.jobs.messages import (
    HELLO_BYTES,
    MAX_FRAME_BYTES,
    Beat,
    Began,
    Done,
    Failure,
    FromWorker,
    Hello,
    Ready,
    Stop,
    Wire,
    Words,
    Work,
    end_with_peer,
    listen,
)
from penstock.jobs.workers.launch import Launcher, WorkerStats, WorkerTrace
from penstock.net.admission import Connection
from penstock.plan.placement import Placement, depth_of

TURN_S = 0.2
"""Longest pause between looks at who is idle or silent."""
LAST_S = 3.0
"""What workers are given at the end to say how busy they were and to save their traces."""
PAUSE_S = 5.0
"""A turn that took longer means that the coordinator itself stood still (stopped, swapped): nobody else is to blame."""
STRIKES = 3
"""Workers that may die or hang while the operation runs on one task before it is the task's fault."""
RESPAWNS = 3
"""Times a worker's place is filled anew."""
BEGIN_S = 120.0
"""Within which a new worker must be ready: it imports torch, opens the sources, plans."""


@dataclass(slots=True)
class _Place:
    """One worker as the coordinator sees it."""

    stats: WorkerStats
    trace: WorkerTrace
    begun: float
    respawns: int
    wire: Wire | None = None
    is_ready: bool = False
    spoke: float = 0.0
    """When it last got on."""
    at: int = -1
    """The task that the operation last began to run on."""
    num_reports: int = 0
    """Times that the operation said that it gets on, as its last beat said."""

    def note(self, beat: Beat) -> None:
        """Take over what it says of itself."""
        self.stats.moved_bytes, self.stats.busy_s = beat.moved_bytes, beat.busy_s
        self.num_reports = beat.num_reports
        self.stats.came(beat.fetched_bytes, beat.asked_bytes)
        self.stats.peak_bytes = max(self.stats.peak_bytes, beat.peak_bytes)
        self.trace.spans += beat.spans
        self.trace.behind_s = min(self.trace.behind_s, time.perf_counter() - beat.clock)


class Coordinator(Closing):
    """Runs one job. One thread.

    Args:
        job, words: the same job, both ways.
        journal: what was done before; what is done now is added.
        launcher: who starts workers.
        devices: one worker for each.
        stall_s: a worker that does not get on for so long is replaced.
        on_progress: called with tasks done and tasks in all, after each.
    """

    def __init__(
        self,
        job: Job,
        words: Words,
        journal: Journal,
        launcher: Launcher,
        devices: Sequence[str],
        *,
        stall_s: float,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._job, self._journal, self._launcher = job, journal, launcher
        self._words = msgspec.structs.replace(words, asks_held=launcher.listen is not None)
        self._devices, self._stall_s, self._on_progress = devices, stall_s, on_progress
        self.num_workers = len(devices)
        self.placement = Placement(job.tasks.cost.tolist(), depth=depth_of(devices), done=journal.done)
        self.stats: list[WorkerStats] = []
        self.traces: list[WorkerTrace] = []
        self._places: dict[str, _Place] = {}
        self._strikes: dict[int, int] = {}
        self._tried, self.repeated = set[int](), set[int]()
        """Tasks that the operation began to run on, and those of them on which it did again."""
        self._secret = secrets.token_hex(16)
        self._numbers = 0
        self.began, self.moving_s = math.inf, 0.0
        """When the first worker was ready, and seconds from then to the last task's end."""
        self._unknown: dict[Wire, Connection] = {}
        """Connections that have not said who they are, and their places at the listener."""
        self._looked = time.monotonic()
        self._select = selectors.DefaultSelector()
        self._listener, self._address = listen(launcher.listen, secrets.token_hex(8))
        self._select.register(self._listener, selectors.EVENT_READ, None)

    def begin(self) -> None:
        """Start the workers, which get ready to be told words. ConfigError, PeerLost."""
        for device in () if self.placement.is_done else self._devices:
            self._spawn(device, 0)

    def run(self) -> None:
        """Return once every task is done and in the journal, and no worker writes any more. Order: after `begin`.

        Raises:
            PenstockError: what a worker could not go on for.
            OperationFailed: workers died or hung at one task.
            PeerLost: all workers are gone, and replacing them did not help.
        """
        if self.placement.is_done:
            return
        while not self.placement.is_done:
            for key, _ in self._select.select(TURN_S):
                if key.data is None:
                    self._accept()
                elif isinstance(key.data, Wire):
                    self._greet(key.data)
                else:
                    self._hear(key.data)
            self._look()
            for name in [name for name, place in self._places.items() if place.is_ready]:
                self._feed(name)
            if not self._places:
                ends = "; ".join(dict.fromkeys(one.end for one in self.stats))
                raise PeerLost(f"every worker of the job is gone: {ends}", hint="run it again: finished tasks are kept")
        self.moving_s = time.monotonic() - self.began
        self._last_words()

    def _spawn(self, device: str, respawns: int) -> None:
        name = f"w{self._numbers}"
        self._numbers += 1
        stats, trace = WorkerStats(name, device), WorkerTrace(f"{name} {device}")
        self.stats.append(stats)
        self.traces.append(trace)
        self._launcher.spawn(name, device, self._address, self._secret)
        self._places[name] = _Place(stats, trace, time.monotonic(), respawns)

    # -- what comes

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it gave up meanwhile, or was not let in
        connection.settimeout(self._stall_s)
        if self._launcher.listen is not None:
            end_with_peer(connection, self._stall_s)
        wire = Wire(connection, max_frame_bytes=HELLO_BYTES)
        self._unknown[wire] = connection.connection
        self._select.register(wire, selectors.EVENT_READ, wire)

    def _greet(self, wire: Wire) -> None:
        """Find out who somebody is; whoever is nobody of ours is turned away."""
        try:
            said = wire.from_worker()
        except (PeerLost, FormatError):
            self._turn_away(wire)
            return
        if not said:
            return
        hello = said[0]
        place = self._places.get(hello.worker) if isinstance(hello, Hello) else None
        if not isinstance(hello, Hello) or place is None or place.wire is not None or not self._is_ours(hello):
            self._turn_away(wire)
            return
        admitted = self._unknown.pop(wire)
        admitted.prove(hello.worker)
        admitted.begin(math.inf)  # from here on `_look` judges it, by what it does
        wire.max_frame_bytes = MAX_FRAME_BYTES
        self._select.modify(wire, selectors.EVENT_READ, hello.worker)
        place.wire, place.spoke = wire, time.monotonic()
        self._tell(hello.worker, self._words)

    def _turn_away(self, wire: Wire) -> None:
        del self._unknown[wire]
        self._select.unregister(wire)
        wire.close()

    def _is_ours(self, hello: Hello) -> bool:
        return secrets.compare_digest(hello.secret.encode(), self._secret.encode())

    def _hear(self, name: str) -> None:
        place = self._places.get(name)
        if place is None or place.wire is None:
            return
        try:
            said = place.wire.from_worker()
        except (PeerLost, FormatError) as error:
            self._lose(name, error.message if isinstance(error, FormatError) else None)
            return
        for message in said:
            self._take(name, place, message)

    def _take(self, name: str, place: _Place, message: FromWorker) -> None:
        now = time.monotonic()
        if isinstance(message, Done):
            place.spoke = now
            place.stats.num_tasks += 1
            place.stats.came(message.fetched_bytes, message.asked_bytes)
            self._ended(name, message, now)
        elif isinstance(message, Began):
            self._begins(place, message.task)
        elif isinstance(message, Beat):
            moves = message.moved_bytes != place.stats.moved_bytes or message.num_reports != place.num_reports
            if moves or not self._given(name):
                place.spoke = now
            place.note(message)
        elif isinstance(message, Ready):
            place.is_ready, place.spoke = True, now
            self.began = min(self.began, now)
            holds = (task for task in message.holds if 0 <= task < len(self._job.tasks))
            self.placement.join(name, now, holds=holds, at=message.at)
        elif isinstance(message, Failure):
            raise _error_of(message)

    def _begins(self, place: _Place, task: int) -> None:
        place.at = task
        (self.repeated if task in self._tried else self._tried).add(task)

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
        if name not in self._places:
            return  # it was lost while another was told something
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
        except PeerLost:
            self._lose(name, None)

    def _given(self, name: str) -> tuple[int, ...]:
        return self.placement.given(name) if self._places[name].is_ready else ()

    # -- who is still there

    def _look(self) -> None:
        now = time.monotonic()
        stood_s, self._looked = now - self._looked, now
        self._listener.admission.sweep()
        for name, place in list(self._places.items()):
            if stood_s > PAUSE_S:
                place.begun, place.spoke = place.begun + stood_s, place.spoke + stood_s
            if place.wire is None and self._launcher.ended(name):
                self._lose(name, None)
            elif not place.is_ready and now - place.begun > max(BEGIN_S, self._stall_s):
                self._lose(name, "it did not get ready")
            elif place.is_ready and self._given(name) and now - place.spoke > self._stall_s:
                self._lose(name, f"it made no progress for {self._stall_s:g} s")

    def _lose(self, name: str, why: str | None) -> None:
        """A worker is gone, or taken for it: its tasks are others', its place is filled. `why` None: as it ended."""
        place = self._places.pop(name)
        given = self.placement.given(name) if place.is_ready else ()
        if place.is_ready:
            self.placement.lost(name)
        if place.wire is not None:
            self._select.unregister(place.wire)
            place.wire.close()
        self._launcher.kill(name)
        place.stats.end = why or self._launcher.ended(name) or "its connection was lost"
        if place.at in given:
            self._strike(place.at, place.stats.end)
        if place.respawns < RESPAWNS:
            self._spawn(place.stats.device, place.respawns + 1)

    def _strike(self, task: int, why: str) -> None:
        """A worker was lost while the operation ran on a task: once may be chance."""
        self._strikes[task] = self._strikes.get(task, 0) + 1
        if self._strikes[task] >= STRIKES:
            recipe = self._job.recipes[next(self._job.tasks.entries(task))[0]]
            raise OperationFailed(
                f"{self._strikes[task]} workers were lost while {self._job.operation.name} ran on one task: {why}",
                tensor=recipe.outputs[0].spec.name,
                hint="if it takes so long: have it call operation.report_progress, or raise PENSTOCK_STALL_S"
                if "progress" in why
                else None,
            )

    def close(self) -> None:
        """End the workers. Idempotent."""
        for name, place in self._places.items():
            self._launcher.kill(name)
            if place.wire is not None:
                place.wire.close()
        for wire in self._unknown:
            wire.close()
        self._places.clear()
        self._unknown.clear()
        self._select.close()
        self._listener.close()

    def _last_words(self) -> None:
        """Hear all last beats: until every connection has ended, or `LAST_S`. All that workers then do is to end."""
        left = {name: place for name, place in self._places.items() if place.wire is not None}
        for place in left.values():
            assert place.wire is not None
            with contextlib.suppress(PeerLost):
                place.wire.send(Stop())
        deadline = time.monotonic() + LAST_S
        while left and (wait_s := deadline - time.monotonic()) > 0:
            for name in [key.data for key, _ in self._select.select(wait_s) if key.data in left]:
                place = left[name]
                assert place.wire is not None
                try:
                    for message in place.wire.from_worker():
                        if isinstance(message, Beat):
                            place.note(message)
                        elif isinstance(message, Began):
                            self._begins(place, message.task)
                except (PeerLost, FormatError) as error:
                    self._select.unregister(place.wire)
                    del left[name]
                    if isinstance(error, FormatError):
                        self._launcher.kill(name)
        for name in left:
            self._launcher.kill(name)


def _error_of(failure: Failure) -> PenstockError:
    """Return what a worker could not go on for, as the error it was there."""
    kind = getattr(errors, failure.kind, PenstockError)
    if kind is BudgetTooSmall:
        return BudgetTooSmall(failure.message, minimum_bytes=failure.minimum_bytes)
    if not (isinstance(kind, type) and issubclass(kind, PenstockError)):
        kind = PenstockError
    found: PenstockError = kind(
        failure.message,
        uri=failure.uri or None,
        tensor=failure.tensor or None,
        byte_range=failure.byte_range,
        hint=failure.hint or None,
    )
    return found
