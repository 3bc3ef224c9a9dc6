"""A worker as a process of its own: connects to the coordinator, plans the same job, does what it is told.

In: the coordinator's address and secret, a name, a device. Out: an exit code.
Not here: tasks (`worker`), who is told what (`jobs.coordinator`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from penstock.config import Settings
from penstock.cuda.driver import load_driver
from penstock.digest.cuda import warm_up
from penstock.engine.executors import Failed, guarded
from penstock.engine.trace import Trace
from penstock.errors import BudgetTooSmall, OperationFailed, PeerLost, PenstockError, PlanError
from penstock.jobs.cache_locality import cached_tasks, shared_as
from penstock.jobs.job import Job, plan_job
from penstock.jobs.messages import (
    Beat,
    Began,
    Done,
    Failure,
    Hello,
    Ready,
    Stop,
    ToWorker,
    Wire,
    Words,
    Work,
    end_with_peer,
)
from penstock.jobs.operations.spec import operation_of
from penstock.jobs.publish import METADATA
from penstock.jobs.workers.worker import Worker
from penstock.loader.session import resolve_device
from penstock.net.peercred import connect_unix
from penstock.storage.output import OutputRegion, OutputSet
from penstock.storage.weight_set import WeightSet, open_weights
from penstock.types import U64

BEAT_S = 0.5
"""How often a worker says how far it is: a tenth of the shortest stall deadline that makes sense."""
ALONE = 3
"""Exit code of a worker whose coordinator is gone."""


def connect(address: str, timeout_s: float) -> Wire:
    """To a coordinator at `unix:PATH` or `tcp:HOST:PORT`. PeerLost when it is not there."""
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
    connection.settimeout(None)
    return Wire(connection)


def serve(wire: Wire, worker: str, secret: str, device: torch.device) -> None:
    """Work until told to stop. Where the coordinator is gone, the process ends at once and writes nothing more.

    The connection ends when nothing is written any more, before memory is unpinned and freed.

    Raises:
        PenstockError: what it could not go on for; the coordinator was told.
    """
    trace = Trace(enabled=True)
    with_one = ThreadPoolExecutor(1, thread_name_prefix="penstock-wake")
    awake = with_one.submit(_wake, device, trace)  # while the job is planned
    with_one.shutdown(wait=False)
    try:
        wire.send(Hello(worker=worker, secret=secret, device=str(device)))
        said: list[ToWorker] = []
        with trace.stage("wait for words"):
            while not said:
                said = wire.to_worker()
        words, *more = said
        assert isinstance(words, Words)
        if more:
            return  # it is told to stop before it began
        with ExitStack() as stack:
            try:
                _serve(wire, words, awake, trace, stack)
            except PeerLost:
                raise
            except PenstockError as error:
                if isinstance(error, OperationFailed) and error.__cause__ is not None:
                    traceback.print_exception(error.__cause__)  # where in a user's code, which only this process knows
                wire.send(failure_of(error))  # before what runs has ended: it may hang
                raise
    except PeerLost:
        os._exit(ALONE)


def failure_of(error: PenstockError) -> Failure:
    """Return an error as a message for the coordinator."""
    return Failure(
        kind=type(error).__name__,
        message=error.message,
        hint=error.hint or "",
        uri=error.uri or "",
        byte_range=error.byte_range,
        tensor=error.tensor or "",
        minimum_bytes=error.minimum_bytes if isinstance(error, BudgetTooSmall) else 0,
    )


def _wake(device: torch.device, trace: Trace) -> torch.device:
    """Return the device as torch knows it, with its context made and the digest kernels there.

    Raises:
        ConfigError: it is not there. MissingExtra: Triton is not.
    """
    if device.type == "cuda":
        # By the driver's own calls, which let go of the interpreter's lock; torch takes the same context then.
        with trace.stage("context"), load_driver().entered(device.index or 0):
            pass
    found = resolve_device(device)
    if found.type == "cuda":
        with trace.stage("kernels"), torch.cuda.device(found):
            warm_up(found)
            torch.cuda.current_stream().synchronize()
    return found


def _serve(wire: Wire, words: Words, awake: Future[torch.device], trace: Trace, stack: ExitStack) -> None:
    trace.enabled = words.trace
    with trace.stage("plan"):
        sources, job = _planned(words, stack)
    out = (
        OutputRegion(Path(words.directory), job.files.table)
        if words.in_memory
        else OutputSet(Path(words.directory), job.files.table, job.files.body_nbytes, METADATA, job.files.groups)
    )
    stack.callback(out.close)
    out.open()
    todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def began(task: int) -> None:
        with contextlib.suppress(PeerLost):  # the loop below notices
            wire.send(Began(task=task))

    def done(task: int, digests: U64) -> None:
        fetched_bytes, asked_bytes = worker.came()
        raw = digests.astype("<u8").tobytes()
        with contextlib.suppress(PeerLost):
            wire.send(Done(task=task, digests=raw, fetched_bytes=fetched_bytes, asked_bytes=asked_bytes))

    with trace.stage("device"):
        worker = stack.enter_context(
            Worker(
                job,
                sources,
                out,
                device=awake.result(),
                memory_bytes=words.memory_bytes,
                stall_s=words.stall_s,
                on_began=began,
                on_done=done,
                trace=trace,
            )
        )
    poster = threading.Thread(target=_post_all, args=(worker, todo), name="penstock-post", daemon=True)
    poster.start()
    stack.callback(todo.put, None)
    holds = cached_tasks(job, sources) if words.asks_held else []
    wire.send(Ready(key=job.key, at=shared_as(sources), holds=holds))
    _listen(wire, worker, todo)
    worker.ticket.check()
    wire.send(_beat(worker))  # what runs still may hang
    with trace.stage("end"):
        worker.end()
    wire.send(_beat(worker))
    sys.stdout.flush()  # what a user's function printed: the process may be killed from here on
    wire.close()


def _planned(words: Words, stack: ExitStack) -> tuple[list[WeightSet], Job]:
    """Return the sources, open until the stack ends, and the job. PlanError: it is another than the coordinator's."""
    settings = Settings.read(stall_s=words.stall_s)
    options = words.storage_options or None
    sources = [
        stack.enter_context(open_weights(uri, settings=settings, storage_options=options)) for uri in words.sources
    ]
    job = plan_job(
        operation_of(words.operation),
        [one.manifest for one in sources],
        task_bytes=words.task_bytes,
        shard_bytes=words.shard_bytes,
        leaf_bytes=words.leaf_bytes,
        verify=words.verify,
        words=words.operation,
    )
    if job.key != words.key:
        raise PlanError("this worker does not plan the same job: a source, Penstock or the operation's code differs")
    return sources, job


def _listen(wire: Wire, worker: Worker, todo: queue.SimpleQueue[int | None]) -> None:
    """Do as told, and say how far it is, until told to stop or until the work fails."""
    beat_at = time.monotonic()
    while not worker.ticket.stopped:
        if (now := time.monotonic()) >= beat_at:
            wire.send(_beat(worker))
            beat_at = now + BEAT_S
        if not wire.is_readable(beat_at - now):
            continue
        for message in wire.to_worker():
            if isinstance(message, Stop):
                return
            if isinstance(message, Work):
                for task in message.revoked:
                    worker.revoke(task)
                for task in message.tasks:
                    worker.expect(task)
                    todo.put(task)


def _beat(worker: Worker) -> Beat:
    fetched_bytes, asked_bytes = worker.came()
    return Beat(
        moved_bytes=worker.ticket.moved_bytes,
        num_reports=worker.num_reports,
        fetched_bytes=fetched_bytes,
        asked_bytes=asked_bytes,
        busy_s=worker.trace.busy_s(),
        peak_bytes=worker.buffers.peak_bytes,
        spans=worker.trace.take(),
        clock=time.perf_counter(),
    )


def _post_all(worker: Worker, todo: queue.SimpleQueue[int | None]) -> None:
    while (task := todo.get()) is not None:
        if isinstance(guarded(worker.ticket, partial(worker.post, task)), Failed):
            return


def work(address: str, worker: str, device: str, secret: str) -> int:
    """Be a worker, in a process that is for this alone and ends with its parent; its exit code."""
    where = torch.device(device)
    torch.set_num_threads(1 if where.type == "cpu" else torch.get_num_threads())
    try:
        serve(connect(address, timeout_s=30.0), worker, secret, where)
    except PeerLost:
        return ALONE
    except PenstockError:
        return 1  # the coordinator was told
    return 0
