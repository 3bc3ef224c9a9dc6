"""The process of one worker: it connects to the coordinator, plans the same job, and runs the tasks it receives.

In: the coordinator's address and secret, a name, a device. Out: an exit code.
Not here: running a task (`worker`), assigning tasks (`jobs.coordinator`).

Threads: the main one reads messages and sends beats; one posts tasks, which waits for memory; those of the executors
send `Began` and `TaskDone`.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from penstock.config import Settings
from penstock.cuda.driver import load_driver
from penstock.digest.cuda import warm_up
from penstock.engine.run import RunFailed, guarded
from penstock.engine.trace import Trace
from penstock.errors import BudgetTooSmall, OperationFailed, PeerLost, PenstockError, PlanError
from penstock.jobs.job import ConversionJob, cached_tasks, plan_job, shared_as
from penstock.jobs.messages import (
    Began,
    JobSpec,
    Ready,
    Stop,
    TaskDone,
    TaskFailure,
    TaskWork,
    ToWorker,
    Wire,
    WorkerBeat,
    WorkerHello,
    check_version,
    end_with_peer,
)
from penstock.jobs.operations.spec import operation_of
from penstock.jobs.result import output_of
from penstock.jobs.workers.worker import Worker
from penstock.loader.session import resolve_device
from penstock.net.unix_sockets import connect_unix
from penstock.storage.output import OutputRegion
from penstock.storage.weight_set import WeightSet, open_weights
from penstock.types import U64
from penstock.waits import Threads, start_thread

BEAT_S = 0.5
"""Interval of a worker's progress messages: a tenth of the shortest stall deadline that makes sense."""
ALONE = 3
"""Exit code of a worker whose coordinator is gone."""


def connect(address: str, timeout_s: float) -> Wire:
    """Connect to a coordinator at `unix:PATH` or `tcp:HOST:PORT`. PeerLost if it cannot be reached."""
    kind, _, where = address.partition(":")
    try:
        if kind == "unix":
            connection = connect_unix(f"\0{where}", timeout_s)
        else:
            host, _, port = where.rpartition(":")
            connection = socket.create_connection((host, int(port)), timeout=timeout_s)
            end_with_peer(connection, Settings.read().stall_s)
    except OSError as error:
        raise PeerLost(f"the job's coordinator is not at {address}: {error.strerror or error}") from error
    # No timeout from here on: a coordinator may be silent for hours, and its end closes the connection.
    connection.settimeout(None)
    return Wire(connection)


def serve(wire: Wire, worker: str, secret: str, device: torch.device) -> None:
    """Run tasks until a `Stop`, or until the coordinator is gone. Nothing is written once this has returned or raised.

    The connection is closed after the last write, before memory is unpinned and freed.

    Raises:
        PenstockError: the error that stopped the worker; it was sent to the coordinator.
        PeerLost: the coordinator is gone.
    """
    trace = Trace(enabled=True)
    # Left on an error too: running steps are drained before the memory that they read and write is freed.
    with ExitStack() as stack:
        waking = stack.enter_context(Threads(1, "penstock-wake"))
        # While the job is planned.
        awake = waking.submit(_wake, device, trace)
        waking.end()
        wire.send(WorkerHello(worker=worker, secret=secret, device=str(device)))
        try:
            with trace.stage("wait for the job"):
                job_spec = _receive_job(wire)
        except PlanError as error:
            wire.send(failure_of(error))
            raise
        if job_spec is None:
            # The device may take long, and nothing needs it any more.
            waking.leave()
            return
        try:
            _serve(wire, job_spec, awake, trace, stack)
        except PeerLost:
            raise
        except PenstockError as error:
            if isinstance(error, OperationFailed) and error.__cause__ is not None:
                # The line in a user's code is only known here.
                traceback.print_exception(error.__cause__)
            # Before running tasks are drained: they may hang.
            wire.send(failure_of(error))
            raise


def _receive_job(wire: Wire) -> JobSpec | None:
    """Wait for the job and return it; None: it ended before this worker was ready.

    Raises:
        PlanError: the coordinator's messages are of another major version.
    """
    messages: list[ToWorker] = []
    while not messages:
        messages = wire.to_worker()
    job_spec, *more = messages
    assert isinstance(job_spec, JobSpec)
    check_version(job_spec.protocol, "the coordinator", "this worker")
    # The second message can only be a `Stop`.
    return None if more else job_spec


def failure_of(error: PenstockError) -> TaskFailure:
    """Return an error as a message for the coordinator."""
    return TaskFailure(
        kind=type(error).__name__,
        message=error.message,
        hint=error.hint or "",
        uri=error.uri or "",
        byte_range=error.byte_range,
        tensor=error.tensor or "",
        minimum_bytes=error.minimum_bytes if isinstance(error, BudgetTooSmall) else 0,
    )


def _wake(device: torch.device, trace: Trace) -> torch.device:
    """Return the device as torch knows it, with its context created and the digest kernels compiled.

    Raises:
        ConfigError: there is no such device. MissingExtra: Triton is not installed.
    """
    if device.type == "cuda":
        # By the driver's own calls, which release the interpreter's lock, so planning goes on; torch uses this context.
        with trace.stage("context"), load_driver().entered(device.index or 0):
            pass
    resolved = resolve_device(device)
    if resolved.type == "cuda":
        with trace.stage("kernels"), torch.cuda.device(resolved):
            warm_up(resolved)
            torch.cuda.current_stream().synchronize()
    return resolved


def _serve(wire: Wire, job_spec: JobSpec, awake: Future[torch.device], trace: Trace, stack: ExitStack) -> None:
    """Plan the job, start the executors, and run tasks until a `Stop`."""
    trace.enabled = job_spec.trace
    with trace.stage("plan"):
        sources, job = _planned(job_spec, stack)
    out = (
        OutputRegion(Path(job_spec.directory), job.files.table)
        if job_spec.in_memory
        else output_of(job, sources, Path(job_spec.directory))
    )
    stack.callback(out.close)
    out.open()
    todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def began(task: int) -> None:
        """Send that the operation runs on a task now."""
        # An executor's thread cannot handle it; `_listen` gets the same error.
        with contextlib.suppress(PeerLost):
            wire.send(Began(task=task))

    def done(task: int, digests: U64) -> None:
        """Send that a task's bytes are written."""
        fetched_bytes, asked_bytes = worker.bytes_read()
        raw = digests.astype("<u8").tobytes()
        with contextlib.suppress(PeerLost):
            wire.send(TaskDone(task=task, digests=raw, fetched_bytes=fetched_bytes, asked_bytes=asked_bytes))

    with trace.stage("device"):
        worker = stack.enter_context(
            Worker(
                job,
                sources,
                out,
                device=awake.result(),
                memory_bytes=job_spec.memory_bytes,
                stall_s=job_spec.stall_s,
                on_began=began,
                on_done=done,
                trace=trace,
            )
        )
    poster = threading.Thread(target=_post_all, args=(worker, todo), name="penstock-post", daemon=True)
    # A thread of its own: posting waits for memory, and a waiting worker must still send beats and skip revoked tasks.
    start_thread(poster)
    # On the way out the thread is told to end: None is no task.
    stack.callback(todo.put, None)
    # Looked at only once, before the first task: what other workers cache meanwhile is found by the reads themselves.
    holds = cached_tasks(job, sources) if job_spec.reports_cached else []
    wire.send(Ready(key=job.key, at=shared_as(sources), holds=holds))
    _listen(wire, worker, todo)
    worker.ticket.check()
    # Before draining, which may hang: then this beat is the last.
    wire.send(_beat(worker))
    with trace.stage("end"):
        worker.end()
    wire.send(_beat(worker))
    # Output of a user's function: once the connection is closed, the coordinator may kill us.
    sys.stdout.flush()
    wire.close()


def _planned(job_spec: JobSpec, stack: ExitStack) -> tuple[list[WeightSet], ConversionJob]:
    """Return the sources, open until the stack ends, and the job. PlanError if it is not the coordinator's job."""
    settings = Settings.read(stall_s=job_spec.stall_s)
    options = job_spec.storage_options or None
    sources = [
        stack.enter_context(open_weights(uri, settings=settings, storage_options=options)) for uri in job_spec.sources
    ]
    job = plan_job(
        operation_of(job_spec.operation),
        [weights.manifest for weights in sources],
        task_bytes=job_spec.task_bytes,
        shard_bytes=job_spec.shard_bytes,
        leaf_bytes=job_spec.leaf_bytes,
        verify=job_spec.verify,
        operation_specs=job_spec.operation,
    )
    # Checked before any task: a worker with another plan would write right bytes to the wrong places.
    if job.key != job_spec.key:
        raise PlanError(
            "this worker planned another job than the coordinator: a source, Penstock or the operation's code differs"
        )
    return sources, job


def _listen(wire: Wire, worker: Worker, todo: queue.SimpleQueue[int | None]) -> None:
    """Handle messages and send beats, until a `Stop` or until a task fails."""
    beat_at = time.monotonic()
    # A failed task stops the ticket; `_serve` then raises its error.
    while not worker.ticket.stopped:
        if (now := time.monotonic()) >= beat_at:
            wire.send(_beat(worker))
            beat_at = now + BEAT_S
        if not wire.is_readable(beat_at - now):
            continue
        for message in wire.to_worker():
            if isinstance(message, Stop):
                return
            if isinstance(message, TaskWork):
                for task in message.revoked:
                    worker.revoke(task)
                for task in message.tasks:
                    worker.expect(task)
                    todo.put(task)


def _beat(worker: Worker) -> WorkerBeat:
    """Return the worker's progress and statistics, with the trace's spans since the last beat."""
    fetched_bytes, asked_bytes = worker.bytes_read()
    return WorkerBeat(
        moved_bytes=worker.ticket.moved_bytes,
        num_reports=worker.num_reports,
        fetched_bytes=fetched_bytes,
        asked_bytes=asked_bytes,
        busy_s=worker.trace.busy_s(),
        peak_bytes=worker.peak_bytes,
        spans=worker.trace.take(),
        clock=time.perf_counter(),
    )


def _post_all(worker: Worker, todo: queue.SimpleQueue[int | None]) -> None:
    """Post tasks until None, or until the ticket fails. The root of a thread: `guarded` gives errors to the ticket."""
    while (task := todo.get()) is not None:
        if isinstance(guarded(worker.ticket, partial(worker.post, task)), RunFailed):
            return


def work(address: str, worker: str, device: str, secret: str) -> int:
    """Run a worker in a process of its own, which ends with its parent; return the exit code."""
    where = torch.device(device)
    # There is one worker for each core: more torch threads would only compete with the other workers.
    torch.set_num_threads(1 if where.type == "cpu" else torch.get_num_threads())
    try:
        serve(connect(address, timeout_s=30.0), worker, secret, where)
    except PeerLost:
        return ALONE
    except PenstockError:
        # The coordinator has the error.
        return 1
    return 0
