"""Runs workers as threads of this process, because starting a process takes longer than a small conversion.

The workers run the same code as a separate process (`process.serve`). A thread cannot be killed, so a worker is ended
by closing its connection. `convert` decides which conversions run in threads.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.entry_points import extras_named
from penstock.errors import PenstockError
from penstock.lifecycle import Closeable
from penstock.waits import start_thread
from penstock_convert.workers.fork_server import END_S

if TYPE_CHECKING:
    from penstock_convert.messages import Wire


@dataclass(slots=True, eq=False)
class _WorkerThread:
    """A worker's thread, and the worker's connection after the worker has connected."""

    thread: threading.Thread | None = None
    wire: Wire | None = None
    is_killed: threading.Event = field(default_factory=threading.Event)


class ThreadLauncher(Closeable):
    """Starts workers on the CPU as threads of this process. A context manager.

    Raises:
        MissingExtra: torch is not installed.
    """

    listen: str | None = None

    def __init__(self) -> None:
        # Import torch in this thread. The import takes seconds, and Ctrl-C cannot interrupt it in other threads.
        with extras_named():
            importlib.import_module("torch")
        self._workers: dict[str, _WorkerThread] = {}

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """See `Launcher.spawn`. Raise DestinationError if the system cannot start more threads."""
        started = _WorkerThread()
        # Use a daemon thread, so that the program can exit while a read hangs in the kernel.
        started.thread = threading.Thread(
            target=_work, args=(started, worker, device, address, secret), name=f"penstock-{worker}", daemon=True
        )
        self._workers[worker] = started
        start_thread(started.thread, is_needed=True)

    def ended(self, worker: str) -> str | None:
        """See `Launcher.ended`."""
        thread = self._workers[worker].thread
        return None if thread is None or thread.is_alive() else "its thread has ended"

    def kill(self, worker: str) -> None:
        """See `Launcher.kill`. A worker whose read or write hangs in the kernel is abandoned after `END_S`."""
        ending = self._workers[worker]
        ending.is_killed.set()
        if ending.wire is not None:
            ending.wire.shut_down()
        if ending.thread is not None and ending.thread.ident is not None:
            ending.thread.join(END_S)

    def close(self) -> None:
        """End all workers. Idempotent."""
        for worker in self._workers:
            self.kill(worker)


def _work(state: _WorkerThread, worker: str, device: str, address: str, secret: str) -> None:
    """Run a worker until its job ends or it is killed. Each worker's thread runs `_work`."""
    import torch

    from penstock_convert.workers.process import connect, serve

    # Ignore the error, because the coordinator has already received it or has exited.
    with contextlib.suppress(PenstockError):
        wire = connect(address, timeout_s=30.0)
        state.wire = wire
        # `kill` may have run before the connection was stored.
        if state.is_killed.is_set():
            wire.shut_down()
        try:
            serve(wire, worker, secret, torch.device(device))
        finally:
            wire.close()
