"""A worker as a process of its own: connects to the coordinator, plans the same job, does what it is told.

In: `python -m penstock.jobs.process ADDRESS WORKER DEVICE`, the secret on standard input. Out: an exit code.
Not here: tasks (`worker`), who is told what (`run`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import torch

from penstock.config import Settings
from penstock.engine.trace import Trace
from penstock.errors import BudgetTooSmall, PeerLost, PenstockError, PlanError
from penstock.jobs.job import plan_job
from penstock.jobs.messages import Beat, Done, Failure, Hello, Ready, Stop, Wire, Words, Work
from penstock.jobs.words import operation_of
from penstock.jobs.worker import Worker
from penstock.storage.manifest import open_weights
from penstock.storage.output import OutputSet
from penstock.types import U64

BEAT_S = 0.5
"""How often a worker says how far it is: a tenth of the shortest stall deadline that makes sense."""


def connect(address: str, timeout_s: float) -> Wire:
    """To a coordinator at `unix:PATH` or `tcp:HOST:PORT`. PeerLost when it is not there."""
    kind, _, where = address.partition(":")
    try:
        if kind == "unix":
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(timeout_s)
            connection.connect(where)
        else:
            host, _, port = where.rpartition(":")
            connection = socket.create_connection((host, int(port)), timeout=timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise PeerLost(f"the job's coordinator is not at {address}: {error.strerror or error}") from error
    connection.settimeout(None)
    return Wire(connection)


def serve(wire: Wire, worker: str, secret: str, device: torch.device) -> None:
    """Work until told to stop, or until the coordinator is gone.

    Raises:
        PenstockError: what it could not go on for; the coordinator was told.
    """
    wire.send(Hello(worker=worker, secret=secret, pid=os.getpid(), device=str(device)))
    words = wire.to_worker()
    assert isinstance(words, Words)
    try:
        with ExitStack() as stack:
            _serve(wire, words, device, stack)
    except PeerLost:
        raise
    except PenstockError as error:
        wire.send(failure_of(error))
        raise


def failure_of(error: PenstockError) -> Failure:
    """An error, to be told."""
    return Failure(
        kind=type(error).__name__,
        message=error.message,
        hint=error.hint or "",
        uri=error.uri or "",
        tensor=error.tensor or "",
        minimum_bytes=error.minimum_bytes if isinstance(error, BudgetTooSmall) else 0,
    )


def _serve(wire: Wire, words: Words, device: torch.device, stack: ExitStack) -> None:
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
    )
    if job.key != words.key:
        raise PlanError("this worker does not plan the same job: a source changed, or its Penstock is another version")
    out = OutputSet(Path(words.directory), job.files.table, job.files.body_nbytes, {"format": "pt"})
    stack.callback(out.close)
    out.open()
    trace = Trace(enabled=bool(words.trace))
    todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def done(task: int, digests: U64) -> None:
        with contextlib.suppress(PeerLost):  # the loop below notices
            wire.send(Done(task=task, digests=digests.astype("<u8").tobytes()))

    worker = stack.enter_context(
        Worker(
            job,
            sources,
            out,
            device=device,
            memory_bytes=words.memory_bytes,
            stall_s=words.stall_s,
            on_done=done,
            trace=trace,
        )
    )
    poster = threading.Thread(target=_post_all, args=(worker, todo), name="penstock-post", daemon=True)
    poster.start()
    stack.callback(todo.put, None)
    wire.send(Ready(key=job.key))
    while not worker.ticket.stopped:
        if not wire.is_readable(BEAT_S):
            wire.send(
                Beat(moved_bytes=worker.ticket.moved_bytes, busy_s=trace.busy_s(), peak_bytes=worker.buffers.peak_bytes)
            )
            continue
        message = wire.to_worker()
        if isinstance(message, Stop):
            break
        if isinstance(message, Work):
            for task in message.revoked:
                worker.revoke(task)
            for task in message.tasks:
                worker.expect(task)
                todo.put(task)
    worker.ticket.check()
    wire.send(Beat(moved_bytes=worker.ticket.moved_bytes, busy_s=trace.busy_s(), peak_bytes=worker.buffers.peak_bytes))
    if words.trace:
        trace.save(words.trace)


def _post_all(worker: Worker, todo: queue.SimpleQueue[int | None]) -> None:
    while (task := todo.get()) is not None:
        try:
            worker.post(task)
        except PenstockError as error:
            worker.ticket.fail(error)
            return


def main() -> int:
    """See the module."""
    address, name, device = sys.argv[1:4]
    secret = sys.stdin.readline().strip()
    where = torch.device(device)
    torch.set_num_threads(1 if where.type == "cpu" else torch.get_num_threads())
    try:
        wire = connect(address, timeout_s=30.0)
        serve(wire, name, secret, where)
    except PeerLost:
        return 3  # nobody is left to tell
    except PenstockError as error:
        sys.stderr.write(f"{error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
