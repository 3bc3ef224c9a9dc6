"""The coordinator of a job: starts workers, assigns tasks, records finished tasks, replaces workers that die or hang.

In: a job spec, a journal, devices. Out: every task done, and statistics of each worker.
Not here: which worker gets a task (`plan.placement`), the work (`jobs.workers.worker`), publishing (`convert`).

    spawn --> Hello, JobSpec, Ready --> placement.join --> Work ... Done --> journal --> Stop
                silent or dead: placement.remove, killed, replaced
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

from penstock.errors import (
    BudgetTooSmall,
    FormatError,
    OperationFailed,
    PeerLost,
    PenstockError,
    PlanError,
    class_named,
)
from penstock.hub.job_state import MAX_WORKERS, WorkerState, cut
from penstock.jobs.job import ConversionJob
from penstock.jobs.messages import (
    HELLO_BYTES,
    MAX_FRAME_BYTES,
    Began,
    FromWorker,
    JobSpec,
    Ready,
    Stop,
    TaskDone,
    TaskFailure,
    TaskWork,
    Wire,
    WorkerBeat,
    WorkerHello,
    check_version,
    end_with_peer,
)
from penstock.jobs.report import WorkerStats, WorkerTrace
from penstock.jobs.result import Journal
from penstock.jobs.workers.launch import Launcher
from penstock.lifecycle import Closeable
from penstock.net.admission import Connection
from penstock.net.listener import GuardedListener
from penstock.plan.placement import Placement, depth_of

TURN_S = 0.2
"""Longest pause between two checks for idle or silent workers."""
LAST_BEATS_S = 3.0
"""Time that workers have at the end to send their last statistics and trace spans."""
PAUSE_S = 5.0
"""A turn that took longer means that the coordinator itself was stopped or swapped out, so no worker is blamed."""
STRIKES = 3
"""Workers that may die or hang while the operation runs on one task, before the job fails because of that task."""
RESPAWNS = 3
"""Times a lost worker is replaced."""
BEGIN_S = 120.0
"""Within which a new worker must be ready: it imports torch, opens the sources, plans."""


@dataclass(slots=True)
class _WorkerRecord:
    """The coordinator's record of one worker, from its start to its end or its loss."""

    stats: WorkerStats
    trace: WorkerTrace
    begun: float
    """Monotonic time at which it was started."""
    respawns: int
    """Workers of this device that were lost before it, one after the other."""
    wire: Wire | None = None
    """None until it has connected and identified itself."""
    is_ready: bool = False
    """True once it has planned the job, and so is known to the placement."""
    spoke: float = 0.0
    """Monotonic time at which it last made progress."""
    at: int = -1
    """The task that the operation last began to run on."""
    num_reports: int = 0
    """Progress reports of the operation, as the last beat counted them."""

    def note(self, beat: WorkerBeat) -> None:
        """Record the statistics and spans of a beat."""
        self.stats.moved_bytes = beat.moved_bytes
        self.stats.busy_s = beat.busy_s
        self.num_reports = beat.num_reports
        self.stats.note_read(beat.fetched_bytes, beat.asked_bytes)
        self.stats.peak_bytes = max(self.stats.peak_bytes, beat.peak_bytes)
        self.trace.spans += beat.spans
        # A message can only arrive late, so the smallest difference seen is the closest to the true clock offset.
        self.trace.behind_s = min(self.trace.behind_s, time.perf_counter() - beat.clock)


class Coordinator(Closeable):
    """The process that runs a job: it assigns tasks to workers, and replaces workers that are lost. One thread.

    A worker goes through: started (`begin`), connected (`WorkerHello`), ready (`Ready`), and then has tasks. It leaves
    at the job's end, or is lost when its connection ends, when it sends no message that can be read, or when it makes
    no progress for `stall_s`.

    Args:
        job, job_spec: the same job, planned, and in the form that is sent to workers.
        journal: tasks that earlier runs finished; tasks that this run finishes are added.
        launcher: starts workers.
        devices: one worker for each.
        listener, address: The socket for workers, from `messages.listen`, and its address. The coordinator closes it.
        on_progress: called with tasks done and tasks in all, after each.
        on_turn: called a few times a second while it runs; must not block.

    Attributes:
        num_workers: workers that run at the same time.
        placement: assigns the tasks; see `plan.placement`.
        stats, traces: of every worker, replaced ones included.
        repeated: tasks that the operation ran on more than once.
        num_resumed: tasks that earlier runs finished.
        done_bytes, resumed_bytes: read and written for the tasks that are done, and for those of earlier runs alone.
        began: monotonic time at which the first worker was ready; infinite before.
        moving_s: seconds from then to the last task's end.
    """

    def __init__(
        self,
        job: ConversionJob,
        job_spec: JobSpec,
        journal: Journal,
        launcher: Launcher,
        devices: Sequence[str],
        *,
        listener: GuardedListener,
        address: str,
        on_progress: Callable[[int, int], None] | None = None,
        on_turn: Callable[[], None] | None = None,
    ) -> None:
        self._job = job
        self._journal = journal
        self._launcher = launcher
        # Workers of this host share one cache, so locality only matters once they may be on several hosts.
        self._job_spec = msgspec.structs.replace(job_spec, reports_cached=launcher.listen is not None)
        self._devices = devices
        self._stall_s = job_spec.stall_s
        self._on_progress = on_progress
        self._on_turn = on_turn
        self.num_workers = len(devices)
        self.placement = Placement(job.tasks.cost.tolist(), depth=depth_of(devices), done=journal.done)
        self.num_resumed = len(journal.kept)
        self.done_bytes = self.resumed_bytes = int(job.tasks.cost[list(journal.done)].sum())
        self.stats: list[WorkerStats] = []
        self.traces: list[WorkerTrace] = []
        self._places: dict[str, _WorkerRecord] = {}
        self._strikes: dict[int, int] = {}
        self._tried = set[int]()
        """Tasks that the operation began to run on."""
        self.repeated = set[int]()
        # Shown by each worker in its `WorkerHello`: any process of the host may connect to the listener, and on a
        # cluster any process that reaches the port.
        self._secret = secrets.token_hex(16)
        self._numbers = 0
        self.began = math.inf
        self.moving_s = 0.0
        self._unidentified: dict[Wire, Connection] = {}
        """Connections without a valid `WorkerHello` so far, with the listener's connection that admission counts."""
        self._checked_at = time.monotonic()
        self._select = selectors.DefaultSelector()
        self._listener = listener
        self._address = address
        self._select.register(self._listener, selectors.EVENT_READ, None)

    def begin(self) -> None:
        """Start the workers; they load their libraries while this process goes on. ConfigError, PeerLost."""
        for device in () if self.placement.is_done else self._devices:
            self._spawn(device, 0)

    def run(self) -> None:
        """Return once every task is done and in the journal, and no worker writes any more. Order: after `begin`.

        Raises:
            PenstockError: the error that stopped a worker.
            OperationFailed: workers died or hung at one task.
            PeerLost: all workers are gone, and replacing them did not help.
        """
        if self.placement.is_done:
            return
        while not self.placement.is_done:
            # One thread for all connections, so that placement, journal and statistics need no locks.
            for key, _ in self._select.select(TURN_S):
                if key.data is None:
                    self._accept()
                elif isinstance(key.data, Wire):
                    self._identify(key.data)
                else:
                    self._receive(key.data)
            self._check_workers()
            # A copy of the names: assigning a task can lose a worker, which changes `_places`.
            for name in [name for name, place in self._places.items() if place.is_ready]:
                self._assign(name)
            if self._on_turn is not None:
                self._on_turn()
            # Empty only when every worker was lost and replaced `RESPAWNS` times: waiting for more would be for ever.
            if not self._places:
                ends = "; ".join(dict.fromkeys(stats.end for stats in self.stats))
                raise PeerLost(f"every worker of the job is gone: {ends}", hint="run it again: finished tasks are kept")
        self.moving_s = time.monotonic() - self.began
        self._collect_last_beats()

    def workers(self) -> tuple[tuple[WorkerState, ...], int]:
        """Return the workers for an observer, at most `MAX_WORKERS`, and the number of those that are late."""
        now = time.monotonic()
        states = []
        for stats in self.stats:
            place = self._places.get(stats.worker)
            standing = self.placement.progress(stats.worker, now) if place is not None and place.is_ready else None
            task, task_s, expected_s = standing or (-1, 0.0, 0.0)
            is_lost = place is None or place.stats is not stats
            states.append(
                WorkerState(
                    worker=stats.worker,
                    device=cut(stats.device),
                    num_tasks=stats.num_tasks,
                    state="lost" if is_lost else "starting" if standing is None else "running" if task >= 0 else "idle",
                    task=task,
                    task_s=task_s,
                    expected_s=expected_s,
                    end=cut(stats.end) if is_lost else "",
                )
            )
        states.sort(key=lambda worker: (not worker.is_late, worker.state != "lost"))
        return tuple(states[:MAX_WORKERS]), sum(worker.is_late for worker in states)

    def _spawn(self, device: str, respawns: int) -> None:
        # Never the same name twice: a late message of a lost worker must not count as its replacement's.
        name = f"w{self._numbers}"
        self._numbers += 1
        stats, trace = WorkerStats(name, device), WorkerTrace(f"{name} {device}")
        self.stats.append(stats)
        self.traces.append(trace)
        self._launcher.spawn(name, device, self._address, self._secret)
        self._places[name] = _WorkerRecord(stats, trace, time.monotonic(), respawns)

    # -- messages received

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # The peer closed the connection meanwhile, or admission refused it.
            return
        # Sends block this one thread, so a worker that no longer reads must not hold up all the others for ever.
        connection.settimeout(self._stall_s)
        if self._launcher.listen is not None:
            end_with_peer(connection, self._stall_s)
        wire = Wire(connection, max_frame_bytes=HELLO_BYTES)
        self._unidentified[wire] = connection.connection
        self._select.register(wire, selectors.EVENT_READ, wire)

    def _identify(self, wire: Wire) -> None:
        """Match a new connection with a spawned worker by its `WorkerHello`; close it if there is no such worker."""
        try:
            messages = wire.from_worker()
        except (PeerLost, FormatError, PlanError):
            # PlanError too: what does not show the secret must not stop the job.
            self._turn_away(wire)
            return
        if not messages:
            return
        hello = messages[0]
        place = self._places.get(hello.worker) if isinstance(hello, WorkerHello) else None
        # One connection a worker: a second one under the same name would mix the messages of two processes.
        if not isinstance(hello, WorkerHello) or place is None or place.wire is not None or not self._is_ours(hello):
            self._turn_away(wire)
            return
        # Not turned away as a stranger: every replacement would be of the same release.
        check_version(hello.protocol, f"worker {hello.worker}", "the coordinator")
        admitted = self._unidentified.pop(wire)
        admitted.prove(hello.worker)
        # From here on `_check_workers` applies the deadline by progress instead.
        admitted.begin(math.inf)
        # Before the secret was checked, a large frame could have made this process allocate memory for a stranger.
        wire.max_frame_bytes = MAX_FRAME_BYTES
        self._select.modify(wire, selectors.EVENT_READ, hello.worker)
        place.wire = wire
        place.spoke = time.monotonic()
        self._send(hello.worker, self._job_spec)

    def _turn_away(self, wire: Wire) -> None:
        del self._unidentified[wire]
        self._select.unregister(wire)
        wire.close()

    def _is_ours(self, hello: WorkerHello) -> bool:
        # In constant time: the time of an ordinary comparison would tell a stranger how far its guess is right.
        return secrets.compare_digest(hello.secret.encode(), self._secret.encode())

    def _receive(self, name: str) -> None:
        place = self._places.get(name)
        # The selector's answer may be older than the worker's loss, which another event of the same turn caused.
        if place is None or place.wire is None:
            return
        try:
            messages = place.wire.from_worker()
        except (PeerLost, FormatError) as error:
            self._lose(name, error.message if isinstance(error, FormatError) else None)
            return
        for message in messages:
            self._handle(name, place, message)

    def _handle(self, name: str, place: _WorkerRecord, message: FromWorker) -> None:
        now = time.monotonic()
        if isinstance(message, TaskDone):
            place.spoke = now
            place.stats.num_tasks += 1
            place.stats.note_read(message.fetched_bytes, message.asked_bytes)
            self._ended(name, message, now)
        elif isinstance(message, Began):
            self._begins(place, message.task)
        elif isinstance(message, WorkerBeat):
            moves = message.moved_bytes != place.stats.moved_bytes or message.num_reports != place.num_reports
            # A beat alone is no progress: its thread also runs while the operation hangs. An idle worker cannot hang.
            if moves or not self._assigned(name):
                place.spoke = now
            place.note(message)
        elif isinstance(message, Ready):
            place.is_ready = True
            place.spoke = now
            self.began = min(self.began, now)
            # Numbers come from another process, so they are checked before they index anything.
            holds = (task for task in message.holds if 0 <= task < len(self._job.tasks))
            self.placement.join(name, now, holds=holds, at=message.at)
        elif isinstance(message, TaskFailure):
            # The job ends: an error of the operation, of a source or of the plan would stop every other worker as well.
            raise _error_of(message)

    def _begins(self, place: _WorkerRecord, task: int) -> None:
        # A copy runs no operation, and several begin beside one that does: a lost worker is not blamed on it.
        if not all(self._job.recipes[index].copies for index, _, _ in self._job.tasks.entries(task)):
            place.at = task
        # A second run may have written over the first one's bytes: `check_repeated` reads those tasks back at the end.
        (self.repeated if task in self._tried else self._tried).add(task)

    def _ended(self, name: str, message: TaskDone, now: float) -> None:
        # As with `Ready`: a number from another process is checked before it indexes anything.
        if not 0 <= message.task < len(self._job.tasks):
            return
        digests = np.frombuffer(message.digests, "<u8").astype(np.uint64)
        if len(digests) != self._job.num_pieces(message.task):
            expected = self._job.num_pieces(message.task)
            raise FormatError(f"worker {name} reported {len(digests)} digests of task {message.task}, not {expected}")
        outcome = self.placement.done(name, message.task, now)
        # A task may finish on two workers; only the first result is recorded, so progress never counts it twice.
        if outcome.first:
            # After its bytes are written, which `TaskDone` says: a journal that is ahead of the files could resume
            # wrongly.
            self._journal.add(message.task, digests)
            self.done_bytes += int(self._job.tasks.cost[message.task])
            if self._on_progress is not None:
                total = len(self._job.tasks)
                self._on_progress(total - self.placement.num_left, total)
        self._revoke(outcome.revoked)

    # -- messages sent

    def _assign(self, name: str) -> None:
        if name not in self._places:
            # It was lost while a message was sent to another worker.
            return
        assignment = self.placement.next(name, time.monotonic())
        self._revoke(assignment.revoked)
        if assignment.tasks:
            if len(self._assigned(name)) == len(assignment.tasks):
                # It was idle until now: its deadline starts here.
                self._places[name].spoke = time.monotonic()
            self._send(name, TaskWork(tasks=assignment.tasks))

    def _revoke(self, revoked: Sequence[tuple[str, int]]) -> None:
        for name, task in revoked:
            if name in self._places:
                self._send(name, TaskWork(revoked=(task,)))

    def _send(self, name: str, message: JobSpec | TaskWork | Stop) -> None:
        wire = self._places[name].wire
        assert wire is not None
        try:
            wire.send(message)
        except PeerLost:
            self._lose(name, None)

    def _assigned(self, name: str) -> tuple[int, ...]:
        return self.placement.assigned(name) if self._places[name].is_ready else ()

    # -- lost workers

    def _check_workers(self) -> None:
        now = time.monotonic()
        stood_s = now - self._checked_at
        self._checked_at = now
        self._listener.admission.sweep()
        for name, place in list(self._places.items()):
            # Messages of workers waited in the socket while this process stood still: move every deadline by that time.
            if stood_s > PAUSE_S:
                place.begun += stood_s
                place.spoke += stood_s
            # Once connected, a worker's end is the end of its connection, after its last message was read.
            if place.wire is None and self._launcher.ended(name):
                self._lose(name, None)
            # A longer stall deadline also covers the start: who raises it expects slow storage, and planning reads it.
            elif not place.is_ready and now - place.begun > max(BEGIN_S, self._stall_s):
                self._lose(name, "it did not get ready")
            elif place.is_ready and self._assigned(name) and now - place.spoke > self._stall_s:
                self._lose(name, f"it made no progress for {self._stall_s:g} s")

    def _lose(self, name: str, why: str | None) -> None:
        """Remove a worker that ended or hangs, return its tasks, start another. `why` None: as the launcher says."""
        place = self._places.pop(name)
        assigned = self.placement.assigned(name) if place.is_ready else ()
        if place.is_ready:
            self.placement.remove(name)
        if place.wire is not None:
            self._select.unregister(place.wire)
            place.wire.close()
        # Killed before its tasks run elsewhere: a worker that only hung must not write over a later result.
        self._launcher.kill(name)
        place.stats.end = why or self._launcher.ended(name) or "its connection was lost"
        # Only the task under the operation is blamed: the others were queued, or were being read or written.
        if place.at in assigned:
            self._strike(place.at, place.stats.end)
        # Bounded: where every worker dies at once, processes must not be started for ever.
        if place.respawns < RESPAWNS:
            self._spawn(place.stats.device, place.respawns + 1)

    def _strike(self, task: int, why: str) -> None:
        """Count a worker that was lost while the operation ran on a task; OperationFailed after `STRIKES`."""
        self._strikes[task] = self._strikes.get(task, 0) + 1
        if self._strikes[task] >= STRIKES:
            # The first tensor of the task stands for all: which one of them was at fault is not known.
            recipe = self._job.recipes[next(self._job.tasks.entries(task))[0]]
            raise OperationFailed(
                f"{self._strikes[task]} workers were lost while {self._job.operation.name} ran on one task: {why}",
                tensor=recipe.outputs[0].spec.name,
                hint="if a task may take this long: call operation.report_progress in it, or raise PENSTOCK_STALL_S"
                if "progress" in why
                else None,
            )

    def close(self) -> None:
        """Kill the workers and close every connection. Idempotent."""
        # Killed, not asked to stop: on the way out of an error a worker must not write another byte.
        for name, place in self._places.items():
            self._launcher.kill(name)
            if place.wire is not None:
                place.wire.close()
        for wire in self._unidentified:
            wire.close()
        self._places.clear()
        self._unidentified.clear()
        self._select.close()
        self._listener.close()

    def _collect_last_beats(self) -> None:
        """Record the last beats until every connection has ended, or for `LAST_BEATS_S`; then end the workers."""
        left = {name: place for name, place in self._places.items() if place.wire is not None}
        for place in left.values():
            assert place.wire is not None
            # A worker that died since its last task is found below, when its connection is read.
            with contextlib.suppress(PeerLost):
                place.wire.send(Stop())
        deadline = time.monotonic() + LAST_BEATS_S
        while left and (wait_s := deadline - time.monotonic()) > 0:
            for name in [key.data for key, _ in self._select.select(wait_s) if key.data in left]:
                place = left[name]
                assert place.wire is not None
                try:
                    for message in place.wire.from_worker():
                        if isinstance(message, WorkerBeat):
                            place.note(message)
                        elif isinstance(message, Began):
                            self._begins(place, message.task)
                except (PeerLost, FormatError) as error:
                    self._select.unregister(place.wire)
                    del left[name]
                    # A lost connection is how a worker ends here; one that sends garbage may go on running.
                    if isinstance(error, FormatError):
                        self._launcher.kill(name)
        # Those that did not end in time may hang in a user's function; their tasks are all done.
        for name in left:
            self._launcher.kill(name)


def _error_of(failure: TaskFailure) -> PenstockError:
    """Return the error that stopped a worker, of the class that it had there."""
    if failure.kind == BudgetTooSmall.__name__:
        return BudgetTooSmall(failure.message, minimum_bytes=failure.minimum_bytes)
    return class_named(failure.kind, PenstockError)(
        failure.message,
        uri=failure.uri or None,
        tensor=failure.tensor or None,
        byte_range=failure.byte_range,
        hint=failure.hint or None,
    )
