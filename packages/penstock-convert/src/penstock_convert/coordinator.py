"""Starts the workers of a job, assigns tasks, records finished tasks, and replaces workers that die or hang.

`plan.placement` assigns tasks to workers, `workers.worker` runs a task, and `convert` publishes the result.

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
    sendable,
)
from penstock.hub.job_state import MAX_TEXT, MAX_WORKERS, WorkerState
from penstock.lifecycle import Closeable
from penstock.net.admission import Connection
from penstock.net.listener import GuardedListener
from penstock_convert.job import ConversionJob
from penstock_convert.messages import (
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
from penstock_convert.plan.placement import Placement, depth_of
from penstock_convert.report import WorkerStats, WorkerTrace
from penstock_convert.result import Journal
from penstock_convert.workers.launch import Launcher

TURN_S = 0.2
"""Maximum pause in seconds between checks for idle or silent workers."""
LAST_BEATS_S = 3.0
"""Time in seconds that workers have at the end to send their last statistics and trace spans."""
PAUSE_S = 5.0
"""Duration of an iteration in seconds above which the coordinator itself was stopped or swapped out. In that case no
worker is blamed."""
STRIKES = 3
"""Number of workers that die or hang while the operation runs on the same task, after which the job fails."""
RESPAWNS = 3
"""Maximum number of successive replacements for a lost worker."""
BEGIN_S = 120.0
"""Time in seconds within which a new worker must be ready. It imports torch, opens the sources and plans the job."""


@dataclass(slots=True)
class _WorkerRecord:
    """The coordinator's record of one worker, from the worker's start to its exit or loss."""

    stats: WorkerStats
    trace: WorkerTrace
    started_at: float
    """Monotonic time at which the worker was started."""
    respawns: int
    """Number of successive workers that were lost on this device before this worker."""
    wire: Wire | None = None
    """Connection to the worker. None until the worker has connected and identified itself."""
    is_ready: bool = False
    """Whether the worker has planned the job and joined the placement."""
    progressed_at: float = 0.0
    """Monotonic time at which the worker last made progress."""
    task: int = -1
    """The task on which the operation last began to run, or -1."""
    num_reports: int = 0
    """Number of progress reports from the operation, according to the last beat."""

    def note(self, beat: WorkerBeat) -> None:
        self.stats.moved_bytes = beat.moved_bytes
        self.stats.busy_s = beat.busy_s
        self.num_reports = beat.num_reports
        self.stats.note_read(beat.fetched_bytes, beat.asked_bytes)
        self.stats.peak_bytes = max(self.stats.peak_bytes, beat.peak_bytes)
        self.trace.spans += beat.spans
        # A message can only arrive late, so the smallest observed difference is closest to the true clock offset.
        self.trace.behind_s = min(self.trace.behind_s, time.perf_counter() - beat.clock)


class Coordinator(Closeable):
    """Runs a job in one thread: assigns tasks to workers, and replaces lost workers.

    A worker is started (`begin`), connects (`WorkerHello`), reports that it is ready (`Ready`), and then receives tasks
    until the job is finished. A worker is lost if its connection closes, if it sends an invalid message, or if it makes
    no progress for `stall_s`.

    Args:
        job, job_spec: the planned job, and the specification that is sent to workers.
        journal: journal of the finished tasks, to which this run adds the tasks that it finishes.
        launcher: starts workers.
        devices: device of each worker.
        listener, address: result of `messages.listen`. The coordinator closes the listener.
        on_progress: called after each task with the number of finished tasks and the total.
        on_turn: called a few times per second while the job runs, and must not block.

    Attributes:
        num_workers: number of workers that run at the same time.
        placement: assigns the tasks. See `plan.placement`.
        stats, traces: statistics and spans of every worker, including replaced ones.
        repeated: tasks on which the operation has run more than once.
        num_resumed: number of tasks that earlier runs finished.
        done_bytes: bytes read and written for all finished tasks.
        resumed_bytes: bytes read and written for the tasks that earlier runs finished.
        began: monotonic time at which the first worker was ready. Infinite before that.
        moving_s: time in seconds from `began` to the end of the last task.
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
        # Workers on one host share a cache, so cache locality matters only if workers may be on several hosts.
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
        self._workers: dict[str, _WorkerRecord] = {}
        self._strikes: dict[int, int] = {}
        self._tried = set[int]()
        """Tasks on which the operation has begun to run."""
        self.repeated = set[int]()
        # Each worker sends this secret in its `WorkerHello`. Without a secret, any process that can reach the
        # socket could act as a worker.
        self._secret = secrets.token_hex(16)
        self._numbers = 0
        self.began = math.inf
        self.moving_s = 0.0
        self._unidentified: dict[Wire, Connection] = {}
        """Connections that have not yet sent a valid `WorkerHello`, with the objects by which admission counts them."""
        self._checked_at = time.monotonic()
        self._select = selectors.DefaultSelector()
        self._listener = listener
        self._address = address
        self._select.register(self._listener, selectors.EVENT_READ, None)

    def begin(self) -> None:
        """Start the workers without waiting until they have loaded their libraries. Raise ConfigError or PeerLost."""
        for device in () if self.placement.is_done else self._devices:
            self._spawn(device, 0)

    def run(self) -> None:
        """Run until the journal contains every task and no worker writes any more. Call `begin` first.

        Raises:
            PenstockError: an error that stopped a worker.
            OperationFailed: workers died or hung on the same task.
            PeerLost: all workers are lost, including their replacements.
        """
        if self.placement.is_done:
            return
        while not self.placement.is_done:
            # One thread serves all connections, so placement, journal and statistics need no locks.
            for key, _ in self._select.select(TURN_S):
                if key.data is None:
                    self._accept()
                elif isinstance(key.data, Wire):
                    self._identify(key.data)
                else:
                    self._receive(key.data)
            self._check_workers()
            # Copy the names, because sending a task may fail, and a lost worker is removed from `_workers`.
            for name in [name for name, record in self._workers.items() if record.is_ready]:
                self._assign(name)
            if self._on_turn is not None:
                self._on_turn()
            # Without workers the loop would never end. Every worker was lost and replaced `RESPAWNS` times.
            if not self._workers:
                ends = "; ".join(dict.fromkeys(stats.end for stats in self.stats))
                raise PeerLost(
                    f"all workers of the job were lost: {ends}", hint="run the conversion again to resume it"
                )
        self.moving_s = time.monotonic() - self.began
        self._collect_last_beats()

    def workers(self) -> tuple[tuple[WorkerState, ...], int]:
        """Return the states of at most `MAX_WORKERS` workers for an observer, and the number of late workers."""
        now = time.monotonic()
        states = []
        for stats in self.stats:
            record = self._workers.get(stats.worker)
            standing = self.placement.progress(stats.worker, now) if record is not None and record.is_ready else None
            task, task_s, expected_s = standing or (-1, 0.0, 0.0)
            is_lost = record is None or record.stats is not stats
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
        # Never reuse a name, because a late message from a lost worker must not be attributed to its replacement.
        name = f"w{self._numbers}"
        self._numbers += 1
        stats, trace = WorkerStats(name, device), WorkerTrace(f"{name} {device}")
        self.stats.append(stats)
        self.traces.append(trace)
        self._launcher.spawn(name, device, self._address, self._secret)
        self._workers[name] = _WorkerRecord(stats, trace, time.monotonic(), respawns)

    # -- messages received

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # The peer has already closed the connection, or admission has refused it.
            return
        # Set a timeout, because a send to a worker that no longer reads would block this thread for all workers.
        connection.settimeout(self._stall_s)
        if self._launcher.listen is not None:
            end_with_peer(connection, self._stall_s)
        wire = Wire(connection, max_frame_bytes=HELLO_BYTES)
        self._unidentified[wire] = connection.connection
        self._select.register(wire, selectors.EVENT_READ, wire)

    def _identify(self, wire: Wire) -> None:
        """Match a new connection to a started worker by its `WorkerHello`, or close the connection."""
        try:
            messages = wire.from_worker()
        except (PeerLost, FormatError, PlanError):
            # A peer without the secret must not stop the job, not even with an incompatible version.
            self._turn_away(wire)
            return
        if not messages:
            return
        hello = messages[0]
        record = self._workers.get(hello.worker) if isinstance(hello, WorkerHello) else None
        # Accept only one connection for each worker, because a second connection would mix the messages of two
        # processes.
        if not isinstance(hello, WorkerHello) or record is None or record.wire is not None or not self._is_ours(hello):
            self._turn_away(wire)
            return
        # Fail the job, because a replacement would have the same incompatible version.
        check_version(hello.protocol, f"worker {hello.worker}", "the coordinator")
        admitted = self._unidentified.pop(wire)
        admitted.prove(hello.worker)
        # Remove the deadline for `WorkerHello`, because from now on `_check_workers` applies the progress deadline.
        admitted.begin(math.inf)
        # Allow large frames only from identified workers, because large frames make this process allocate memory.
        wire.max_frame_bytes = MAX_FRAME_BYTES
        self._select.modify(wire, selectors.EVENT_READ, hello.worker)
        record.wire = wire
        record.progressed_at = time.monotonic()
        self._send(hello.worker, self._job_spec)

    def _turn_away(self, wire: Wire) -> None:
        del self._unidentified[wire]
        self._select.unregister(wire)
        wire.close()

    def _is_ours(self, hello: WorkerHello) -> bool:
        # Compare in constant time, because the time of an ordinary comparison reveals how much of a guess is correct.
        return secrets.compare_digest(hello.secret.encode(), self._secret.encode())

    def _receive(self, name: str) -> None:
        record = self._workers.get(name)
        # The worker may have been lost because of another event in the same iteration.
        if record is None or record.wire is None:
            return
        try:
            messages = record.wire.from_worker()
        except (PeerLost, FormatError) as error:
            self._lose(name, error.message if isinstance(error, FormatError) else None)
            return
        for message in messages:
            self._handle(name, record, message)

    def _handle(self, name: str, record: _WorkerRecord, message: FromWorker) -> None:
        now = time.monotonic()
        if isinstance(message, TaskDone):
            record.progressed_at = now
            record.stats.num_tasks += 1
            record.stats.note_read(message.fetched_bytes, message.asked_bytes)
            self._ended(name, message, now)
        elif isinstance(message, Began):
            self._begins(record, message.task)
        elif isinstance(message, WorkerBeat):
            moves = message.moved_bytes != record.stats.moved_bytes or message.num_reports != record.num_reports
            # A beat alone does not prove progress, because the thread that sends beats also runs while the operation
            # hangs. Idle workers cannot hang.
            if moves or not self._assigned(name):
                record.progressed_at = now
            record.note(message)
        elif isinstance(message, Ready):
            record.is_ready = True
            record.progressed_at = now
            self.began = min(self.began, now)
            # Check numbers from another process before using them as indexes.
            holds = (task for task in message.holds if 0 <= task < len(self._job.tasks))
            self.placement.join(name, now, holds=holds, at=message.at)
        elif isinstance(message, TaskFailure):
            # Fail the job, because an error in the operation, a source or the plan would stop every other worker too.
            raise _error_of(message)

    def _begins(self, record: _WorkerRecord, task: int) -> None:
        # Do not blame a copy for a loss, because copies run no operation and may run at the same time as an operation.
        if not all(self._job.recipes[index].copies for index, _, _ in self._job.tasks.entries(task)):
            record.task = task
        # A second run may have overwritten the bytes of the first run, so `check_repeated` reads these bytes back.
        (self.repeated if task in self._tried else self._tried).add(task)

    def _ended(self, name: str, message: TaskDone, now: float) -> None:
        if not 0 <= message.task < len(self._job.tasks):
            return
        digests = np.frombuffer(message.digests, "<u8").astype(np.uint64)
        if len(digests) != self._job.num_pieces(message.task):
            expected = self._job.num_pieces(message.task)
            raise FormatError(f"worker {name} reported {len(digests)} digests for task {message.task}, not {expected}")
        outcome = self.placement.done(name, message.task, now)
        # A task may finish on two workers. Record only the first result, so that progress counts it once.
        if outcome.first:
            # Record the task only after its bytes are written. Otherwise a resumed job would skip unwritten bytes.
            self._journal.add(message.task, digests)
            self.done_bytes += int(self._job.tasks.cost[message.task])
            if self._on_progress is not None:
                total = len(self._job.tasks)
                self._on_progress(total - self.placement.num_left, total)
        self._revoke(outcome.revoked)

    # -- messages sent

    def _assign(self, name: str) -> None:
        if name not in self._workers:
            return
        assignment = self.placement.next(name, time.monotonic())
        self._revoke(assignment.revoked)
        if assignment.tasks:
            if len(self._assigned(name)) == len(assignment.tasks):
                self._workers[name].progressed_at = time.monotonic()
            self._send(name, TaskWork(tasks=assignment.tasks))

    def _revoke(self, revoked: Sequence[tuple[str, int]]) -> None:
        for name, task in revoked:
            if name in self._workers:
                self._send(name, TaskWork(revoked=(task,)))

    def _send(self, name: str, message: JobSpec | TaskWork | Stop) -> None:
        wire = self._workers[name].wire
        assert wire is not None
        try:
            wire.send(message)
        except PeerLost:
            self._lose(name, None)

    def _assigned(self, name: str) -> tuple[int, ...]:
        return self.placement.assigned(name) if self._workers[name].is_ready else ()

    # -- lost workers

    def _check_workers(self) -> None:
        now = time.monotonic()
        stood_s = now - self._checked_at
        self._checked_at = now
        self._listener.admission.sweep()
        for name, record in list(self._workers.items()):
            # While this process was stopped, messages waited in the sockets, so extend every deadline by the same time.
            if stood_s > PAUSE_S:
                record.started_at += stood_s
                record.progressed_at += stood_s
            # The exit of a connected worker is detected through its connection, after its last message has been read.
            if record.wire is None and self._launcher.ended(name):
                self._lose(name, None)
            # A stall deadline above `BEGIN_S` also applies to the start, because new workers read the slow storage too.
            elif not record.is_ready and now - record.started_at > max(BEGIN_S, self._stall_s):
                self._lose(name, "it was not ready in time")
            elif record.is_ready and self._assigned(name) and now - record.progressed_at > self._stall_s:
                self._lose(name, f"it made no progress for {self._stall_s:g} s")

    def _lose(self, name: str, why: str | None) -> None:
        """Remove a worker that has exited or hangs, return its tasks to the placement, and start a replacement.

        If `why` is None, the reason comes from the launcher.
        """
        record = self._workers.pop(name)
        assigned = self.placement.assigned(name) if record.is_ready else ()
        if record.is_ready:
            self.placement.remove(name)
        if record.wire is not None:
            self._select.unregister(record.wire)
            record.wire.close()
        # Kill the worker before its tasks run elsewhere, because a worker that was only delayed could overwrite a
        # later result.
        self._launcher.kill(name)
        record.stats.end = why or self._launcher.ended(name) or "its connection was lost"
        # Blame only the task on which the operation ran. The other tasks were queued, or were being read or written.
        if record.task in assigned:
            self._strike(record.task, record.stats.end)
        # Do not restart workers forever if they die immediately.
        if record.respawns < RESPAWNS:
            self._spawn(record.stats.device, record.respawns + 1)

    def _strike(self, task: int, why: str) -> None:
        """Count a worker that was lost while the operation ran on a task. Fail the job after `STRIKES` losses."""
        self._strikes[task] = self._strikes.get(task, 0) + 1
        if self._strikes[task] >= STRIKES:
            # Name the task's first tensor, because it is unknown which of its tensors caused the loss.
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
        # Kill the workers instead of asking them to stop, because workers must not write another byte after an error.
        for name, record in self._workers.items():
            self._launcher.kill(name)
            if record.wire is not None:
                record.wire.close()
        for wire in self._unidentified:
            wire.close()
        self._workers.clear()
        self._unidentified.clear()
        self._select.close()
        self._listener.close()

    def _collect_last_beats(self) -> None:
        """Record the workers' last beats for up to `LAST_BEATS_S`, and kill workers that have not exited by then."""
        left = {name: record for name, record in self._workers.items() if record.wire is not None}
        for record in left.values():
            assert record.wire is not None
            # If a worker died after its last task, the read below detects it.
            with contextlib.suppress(PeerLost):
                record.wire.send(Stop())
        deadline = time.monotonic() + LAST_BEATS_S
        while left and (wait_s := deadline - time.monotonic()) > 0:
            for name in [key.data for key, _ in self._select.select(wait_s) if key.data in left]:
                record = left[name]
                assert record.wire is not None
                try:
                    for message in record.wire.from_worker():
                        if isinstance(message, WorkerBeat):
                            record.note(message)
                        elif isinstance(message, Began):
                            self._begins(record, message.task)
                except (PeerLost, FormatError) as error:
                    self._select.unregister(record.wire)
                    del left[name]
                    # A worker closes its connection when it exits. A worker that sends invalid bytes may keep running.
                    if isinstance(error, FormatError):
                        self._launcher.kill(name)
        # Kill the remaining workers, which may hang in a user's function. All of their tasks are done.
        for name in left:
            self._launcher.kill(name)


def _error_of(failure: TaskFailure) -> PenstockError:
    """Return the error that stopped a worker, as an instance of the same class."""
    if failure.kind == BudgetTooSmall.__name__:
        return BudgetTooSmall(failure.message, minimum_bytes=failure.minimum_bytes)
    return class_named(failure.kind, PenstockError)(
        failure.message,
        uri=failure.uri or None,
        tensor=failure.tensor or None,
        byte_range=failure.byte_range,
        hint=failure.hint or None,
    )


def cut(text: str) -> str:
    """Truncate a text to the length that a state allows."""
    text = sendable(text, MAX_TEXT + 1)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
