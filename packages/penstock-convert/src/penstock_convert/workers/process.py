"""The process of one worker, which connects to the coordinator, plans the same job, and runs the assigned tasks.

The main thread reads messages and sends heartbeats. A second thread waits for memory and posts tasks. The executors'
threads send `Began` and `TaskDone`. `worker` runs the tasks.
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
from penstock.loader.session import resolve_device
from penstock.net.unix_sockets import connect_unix
from penstock.storage.weight_set import WeightSet, open_weights
from penstock.types import U64
from penstock.waits import Threads, start_thread
from penstock_convert.job import ConversionJob, cached_tasks, plan_job, shared_as
from penstock_convert.messages import (
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
from penstock_convert.operations.spec import operation_of
from penstock_convert.output_region import OutputRegion
from penstock_convert.result import output_of
from penstock_convert.workers.worker import Worker

BEAT_S = 0.5
"""Interval in seconds of a worker's progress messages, a tenth of the shortest useful stall deadline."""
ALONE = 3
"""Exit code of a worker whose coordinator is gone."""


def connect(address: str, timeout_s: float) -> Wire:
    """Connect to a coordinator at `unix:PATH` or `tcp:HOST:PORT`. Raise PeerLost if no connection is possible."""
    kind, _, where = address.partition(":")
    try:
        if kind == "unix":
            connection = connect_unix(f"\0{where}", timeout_s)
        else:
            host, _, port = where.rpartition(":")
            connection = socket.create_connection((host, int(port)), timeout=timeout_s)
            end_with_peer(connection, Settings.read().stall_s)
    except OSError as error:
        raise PeerLost(f"cannot reach the job's coordinator at {address}: {error.strerror or error}") from error
    # Use no timeout for messages. A coordinator may send nothing for hours, and its exit closes the connection.
    connection.settimeout(None)
    return Wire(connection)


def serve(wire: Wire, worker: str, secret: str, device: torch.device) -> None:
    """Run tasks until a `Stop` arrives or the coordinator is gone. No byte is written after this function has ended.

    The connection is closed after the last write, before memory is unpinned and freed.

    Raises:
        PenstockError: the error that stopped the worker, after it was sent to the coordinator.
        PeerLost: the coordinator is gone.
    """
    trace = Trace(enabled=True)
    # Even after an error, the exit stack waits for running steps before it frees the memory of these steps.
    with ExitStack() as stack:
        waking = stack.enter_context(Threads(1, "penstock-wake"))
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
            # Do not wait for the device, because no task will use it.
            waking.leave()
            return
        try:
            _serve(wire, job_spec, awake, trace, stack)
        except PeerLost:
            raise
        except PenstockError as error:
            if isinstance(error, OperationFailed) and error.__cause__ is not None:
                # Print the traceback here, because it is not sent to the coordinator.
                traceback.print_exception(error.__cause__)
            # Send the error before waiting for running tasks, because a task may hang.
            wire.send(failure_of(error))
            raise


def _receive_job(wire: Wire) -> JobSpec | None:
    """Wait for the job and return it, or return None if the job ended before this worker was ready.

    Raises:
        PlanError: the coordinator's messages have a different major version.
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
    """Return the torch device, with its context created and the digest kernels compiled.

    Raises:
        ConfigError: the device does not exist.
        MissingExtra: Triton is not installed.
    """
    if device.type == "cuda":
        # Call the driver directly, because its calls release the GIL, so that planning runs at the same time.
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
        # Ignore the error in an executor's thread, because `_listen` also raises it.
        with contextlib.suppress(PeerLost):
            wire.send(Began(task=task))

    def done(task: int, digests: U64) -> None:
        fetched_bytes, asked_bytes = worker.sources.bytes_read()
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
    # Post tasks in a separate thread, because posting waits for memory and this thread must still handle messages.
    start_thread(poster)
    # None makes the thread exit.
    stack.callback(todo.put, None)
    # Check only once, before the first task, which tasks are in the cache. Reads still use bytes that are cached later.
    holds = cached_tasks(job, sources) if job_spec.reports_cached else []
    wire.send(Ready(key=job.key, at=shared_as(sources), holds=holds))
    _listen(wire, worker, todo)
    worker.ticket.check()
    # Send a heartbeat before waiting for running tasks. If a task hangs, this heartbeat is the last.
    wire.send(_beat(worker))
    with trace.stage("end"):
        worker.end()
    wire.send(_beat(worker))
    # Flush the output of a user's function. The coordinator may kill this process after the connection is closed.
    sys.stdout.flush()
    wire.close()


def _planned(job_spec: JobSpec, stack: ExitStack) -> tuple[list[WeightSet], ConversionJob]:
    """Open the sources and plan the job. Raise PlanError if the coordinator planned a different job."""
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
    # Compare the plans before any task runs. With a different plan, a worker would write its bytes to wrong offsets.
    if job.key != job_spec.key:
        raise PlanError(
            "the worker and the coordinator planned different jobs: their sources, Penstock or operation code differ"
        )
    return sources, job


def _listen(wire: Wire, worker: Worker, todo: queue.SimpleQueue[int | None]) -> None:
    """Handle messages and send heartbeats until a `Stop` arrives or a task fails."""
    beat_at = time.monotonic()
    # If a task fails, the ticket stops, and `_serve` raises the error of the task.
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
    """Return a heartbeat with the worker's progress and statistics, and the trace spans since the last heartbeat."""
    fetched_bytes, asked_bytes = worker.sources.bytes_read()
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
    """Post tasks until None arrives or the ticket fails.

    `_post_all` is the body of a thread, so `guarded` passes errors to the ticket.
    """
    while (task := todo.get()) is not None:
        if isinstance(guarded(worker.ticket, partial(worker.post, task)), RunFailed):
            return


def work(address: str, worker: str, device: str, secret: str) -> int:
    """Run a worker in this process, and return the exit code."""
    where = torch.device(device)
    # On the CPU, use one torch thread, because there is one worker for each core.
    torch.set_num_threads(1 if where.type == "cpu" else torch.get_num_threads())
    try:
        serve(connect(address, timeout_s=30.0), worker, secret, where)
    except PeerLost:
        return ALONE
    except PenstockError:
        return 1
    return 0
