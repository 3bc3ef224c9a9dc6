"""Forks test processes from a process that has imported what they need, in tens of milliseconds instead of seconds.

    with ForkServer() as fork_server:
        process = fork_server.fork("tests.support.fleet:run_worker", task);  process.send_signal(signal.SIGKILL)

`jobs.workers.fork_server` does the forking, and `tests.support.fleet` is a worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

from penstock.lifecycle import Closeable
from penstock_convert.workers import fork_server
from penstock_convert.workers import launch as launcher

IMPORTS = (
    "torch",
    "numpy.ma",
    "encodings.ascii",
    "encodings.idna",
    "redis",
    "uvicorn",
    "uvicorn.protocols.http.auto",
    "uvicorn.loops.asyncio",
    "uvicorn.loops.auto",
    "uvicorn.lifespan.on",
    "anyio._backends._asyncio",
    "penstock",
    "penstock.cli.main",
    "penstock_hub.app",
    "penstock.fetcher.join",
    "penstock.hub.local_hub",
    "penstock_hub.metrics",
    "penstock_hub.app",
    "penstock_hub.store",
    *launcher.IMPORTS,
    "penstock_convert.operations.spec",
    "penstock.sync.publish.publisher",
    "penstock.sync.receive.subscribe",
    "penstock.transport.cuda_ipc",
    "penstock.transport.http",
    "penstock.transport.into_device",
    "penstock.transport.mapped_region",
    "penstock.transport.shm",
    "tests.support.fleet",
    "tests.support.jobs",
    "tests.support.sync",
    "tests.support.fork_server",
)


class Forked:
    """A forked process with its own `stdin` and `stdout`. As a context manager it kills the process on exit."""

    def __init__(self, process: fork_server.Forked, stdin: int, stdout: int) -> None:
        self.pid, self.send_signal, self.poll, self.wait = process.pid, process.send_signal, process.poll, process.wait
        self.stdin, self.stdout = os.fdopen(stdin, "wb", buffering=0), os.fdopen(stdout, "rb")

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGCONT)
            self.send_signal(signal.SIGKILL)
        self.wait()
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class ForkServer(Closeable):
    """A process that has imported the slow packages and forks. As a context manager it ends its processes on exit."""

    def __init__(self) -> None:
        self._fork_server = fork_server.ForkServer.start(IMPORTS)

    def fork(self, function: str, argument: object, environ: Mapping[str, str] | None = None) -> Forked:
        """Call `module:function` with a JSON value in a new process. Its result is the exit code.

        Args:
            function: the module and the function.
            argument: plain JSON values.
            environ: changes to the environment.
        """
        child_in, stdin = os.pipe()
        stdout, child_out = os.pipe()
        arguments = [function, argument, dict(environ or {})]
        try:
            process = self._fork_server.fork(f"{__name__}:begin", arguments, (child_in, child_out))
        finally:
            # Close it at once. While this process keeps its copy, the child never sees the end of its input.
            os.close(child_in)
            os.close(child_out)
        return Forked(process, stdin, stdout)

    def graft(self) -> Graft:
        """Return a fork server for a launcher of workers, as `penstock_convert.workers.launch` starts it."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            return Graft(here, self._fork_server.fork(f"{__name__}:serve", surroundings(), (there.fileno(), 2)))

    def close(self) -> None:
        """End the process. Idempotent."""
        self._fork_server.close()


class Graft(fork_server.ForkServer):
    """A fork server that was itself forked, which saves the time of its imports."""

    def __init__(self, line: socket.socket, process: fork_server.Forked) -> None:
        self._lock, self._patience_s, self._connection = threading.Lock(), fork_server.START_S, line
        self._forked = process

    @property
    def pid(self) -> int:
        """Return the id of its process."""
        return self._forked.pid

    @property
    def is_alive(self) -> bool:
        """Return whether its process is running."""
        return self._forked.poll() is None

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._forked.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._forked.wait(fork_server.END_S)


def surroundings() -> tuple[str, dict[str, str]]:
    """Return the directory and environment of this process, for `settle`."""
    return os.getcwd(), dict(os.environ)


def settle(directory: str, environ: Mapping[str, str]) -> None:
    """Set this process's directory and environment, as if it was started with them."""
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = [place for place in environ.get("PYTHONPATH", "").split(os.pathsep) if place not in sys.path]


def serve(directory: str, environ: Mapping[str, str]) -> int:
    """Serve forks, in the forked process, to the process at the other end of standard input."""
    settle(directory, environ)
    line = os.dup(0)
    os.dup2(1, 2)  # what its own print goes where the caller's errors go now
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.argv[1:] = [str(line), *launcher.IMPORTS]
    fork_server.main()
    return 0


def begin(function: str, argument: object, environ: Mapping[str, str]) -> int:
    """Call the function, in the forked process and this environment. Return its result."""
    os.environ.update(environ)
    faulthandler.enable()
    module, _, name = function.partition(":")
    code: int = getattr(importlib.import_module(module), name)(argument)
    return code
