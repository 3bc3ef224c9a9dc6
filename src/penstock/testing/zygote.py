"""A process that has imported what workers need and forks them: some tens of milliseconds each, not seconds.

In: a function of this package by name, its argument, an environment. Out: processes to talk to, stop and kill.
Not here: what workers do (`testing.fleet`).

    with Zygote() as zygote:
        process = zygote.fork("penstock.testing.fleet:work", task);  process.kill(signal.SIGKILL);  process.wait()
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

IMPORTS = (
    "torch",
    "httpx",
    "redis",
    "uvicorn",
    "uvicorn.protocols.http.auto",
    "uvicorn.loops.asyncio",
    "uvicorn.loops.auto",
    "uvicorn.lifespan.on",
    "anyio._backends._asyncio",
    "penstock",
    "penstock.api",
    "penstock.fleet.hub",
    "penstock.fleet.join",
    "penstock.fleet.local",
    "penstock.fleet.metrics",
    "penstock.fleet.openapi",
    "penstock.fleet.store_redis",
    "penstock.fleet.unix_http",
    "penstock.jobs.formats",
    "penstock.jobs.function",
    "penstock.sync.publish",
    "penstock.sync.subscribe",
    "penstock.transport.cuda_ipc",
    "penstock.transport.http",
    "penstock.transport.shm",
    "penstock.testing.fleet",
    "penstock.testing.jobs",
    "penstock.testing.sync",
)
_MAX_MESSAGE_BYTES = 64 << 10
_START_S = 60.0


class Forked:
    """One forked process. `stdin` and `stdout` are its own. A context manager: leaving it kills the process."""

    def __init__(self, zygote: Zygote, pid: int, stdin: int, stdout: int) -> None:
        self.pid, self._zygote, self._code = pid, zygote, -1
        # It is not waited for before this descriptor says that it ended, so its number is nobody else's.
        self._pidfd: int | None = os.pidfd_open(pid)
        self.stdin, self.stdout = os.fdopen(stdin, "wb", buffering=0), os.fdopen(stdout, "rb")

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing if it has ended. ProcessLookupError: it was waited for already."""
        if self._pidfd is None:
            raise ProcessLookupError(self.pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def poll(self) -> int | None:
        """Its exit code (minus the signal that ended it), or None while it runs."""
        try:
            return self.wait(timeout=0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = 60.0) -> int:
        """Its exit code. TimeoutExpired: it runs still."""
        if self._pidfd is not None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            self._code = self._zygote.reap(self.pid)
            os.close(self._pidfd)
            self._pidfd = None
        return self._code

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


class Zygote:
    """See the module. A context manager; its processes should have ended before it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(_START_S)
        command = [sys.executable, "-m", "penstock.testing.zygote", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()

    def fork(self, function: str, argument: object, environ: Mapping[str, str] | None = None) -> Forked:
        """Call `module:function` with a value of JSON in a new process; its result is the exit code.

        Args:
            function: where it is.
            argument: plain values.
            environ: what changes in the environment.
        """
        child_in, stdin = os.pipe()
        stdout, child_out = os.pipe()
        body = json.dumps({"function": function, "argument": argument, "environ": dict(environ or {})}).encode()
        try:
            with self._lock:
                socket.send_fds(self._line, [body], [child_in, child_out])
                pid = int(self._line.recv(_MAX_MESSAGE_BYTES))
        finally:
            os.close(child_in)
            os.close(child_out)
        return Forked(self, pid, stdin, stdout)

    def reap(self, pid: int) -> int:
        """The exit code of a process that ended."""
        with self._lock:
            self._line.send(json.dumps({"reap": pid}).encode())
            return int(self._line.recv(_MAX_MESSAGE_BYTES))

    def close(self) -> None:
        """End it. Idempotent."""
        self._line.close()
        self._process.wait(_START_S)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(line: socket.socket) -> None:
    while True:
        body, fds, _, _ = socket.recv_fds(line, _MAX_MESSAGE_BYTES, 2)
        if not body:
            return
        asked = json.loads(body)
        if "reap" in asked:
            line.send(str(os.waitstatus_to_exitcode(os.waitpid(asked["reap"], 0)[1])).encode())
            continue
        pid = os.fork()
        if not pid:
            line.close()
            _child(asked, *fds)
        for fd in fds:
            os.close(fd)
        line.send(str(pid).encode())


def _child(asked: dict[str, Any], stdin: int, stdout: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.close(stdin)
        os.close(stdout)
        os.environ.update(asked["environ"])
        random.seed()
        faulthandler.enable()
        module, _, name = asked["function"].partition(":")
        code = getattr(importlib.import_module(module), name)(asked["argument"])
        sys.stdout.flush()
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(code)


def main() -> None:
    """The zygote's process: no threads, so that forks of it are whole."""
    for name in IMPORTS:
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in a child leave what it shares with the others alone
    with socket.socket(fileno=int(sys.argv[1])) as line:
        _serve(line)


if __name__ == "__main__":
    main()
