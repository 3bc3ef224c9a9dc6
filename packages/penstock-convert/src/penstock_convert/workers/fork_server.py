"""A fork server that imports the large libraries once, and then forks each process in tens of milliseconds.

    caller --socketpair--> fork server: torch imported, no thread, no device --fork--> function(*arguments)

The fork server exits when the thread that started it ends, for whatever reason, and its forked processes exit with it.
This module is also the fork server's main program, so it imports few modules.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from functools import partial
from typing import NoReturn, Self

from penstock import descriptors
from penstock.errors import PeerLost
from penstock.lifecycle import Closeable

START_S = 120.0
"""Deadline in seconds for the imports of a new fork server, which can take a minute on a busy machine."""
ANSWER_S = 30.0
"""Deadline in seconds for later responses. The deadline is short, because the fork server does no other work."""
END_S = 5.0
"""Maximum wait in seconds for a killed process. A process that still exists is stuck in the kernel and is abandoned."""
_MAX_MESSAGE_BYTES = 64 << 10
_PR_SET_PDEATHSIG = 1
"""Source: Linux, include/uapi/linux/prctl.h."""


class Forked:
    """A process that the fork server forked.

    The caller is not the process's parent, so it watches the process with a pidfd.
    """

    def __init__(self, fork_server: ForkServer, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._fork_server = fork_server
        self._code = -1
        # The process is reaped only after this descriptor reports the exit, so the PID is not reused before the report.
        self._pidfd: int | None = pidfd
        # The finalizer also closes the descriptor if the fork server was killed, when no exit code is available.
        self._close = weakref.finalize(self, os.close, pidfd)
        # Do not close the descriptor when the interpreter exits, because other threads still use it. The kernel closes
        # it when the process ends.
        self._close.atexit = False

    def send_signal(self, number: int) -> None:
        """Send a signal, or do nothing if the process has ended. Raise ProcessLookupError after `wait` has returned."""
        if self._pidfd is None:
            raise ProcessLookupError(self.pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def forget(self) -> None:
        """Close the pidfd, which `send_signal` and `wait` use. Idempotent."""
        self._close()
        self._pidfd = None

    def poll(self) -> int | None:
        """Return the exit code, which is minus the signal for a killed process, or None while the process runs."""
        try:
            return self.wait(timeout=0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = 60.0) -> int:
        """Wait for the process to end, and return its exit code.

        Raises:
            TimeoutExpired: the process is still running.
            PeerLost: the process ended together with the fork server, and its exit code is lost.
        """
        if self._pidfd is not None:
            # Use `poll`, because `select` cannot wait for descriptors above 1023.
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            # Only the parent of the process can get its exit code.
            self._code = self._fork_server.reap(self.pid)
            self.forget()
        return self._code


class ForkServer(Closeable):
    """A handle for the fork server's process. A context manager. Thread-safe."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        # Allow only one request at a time, because responses contain no request ID.
        self._lock = threading.Lock()
        # The first response may take longer, because it waits for the imports.
        self._patience_s = START_S
        self._connection = connection
        self._process = process

    @classmethod
    def start(cls, imports: Sequence[str]) -> Self:
        """Start the process without waiting for its imports.

        Args:
            imports: modules to import. A missing module is reported later by the process that needs it.

        Raises:
            PeerLost: the process cannot be started.
        """
        # Use a packet socket, so that a request arrives together with its descriptors and needs no framing.
        connection, theirs = descriptors.opened(partial(socket.socketpair, socket.AF_UNIX, socket.SOCK_SEQPACKET))
        command = [sys.executable, "-m", "penstock_convert.workers.fork_server", str(theirs.fileno()), *imports]
        try:
            # Functions print to stderr, because stdout belongs to the caller. In a separate session, the fork server
            # does not receive Ctrl-C from the terminal. Only the caller receives it and ends the workers.
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
            )
        except OSError as error:
            connection.close()
            raise PeerLost(f"cannot start a process: {error.strerror}") from error
        finally:
            # Close this process's copy of the fork server's end, so that this process detects the fork server's exit.
            theirs.close()
        return cls(connection, process)

    @property
    def pid(self) -> int:
        """Return the PID."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Return whether the fork server is running."""
        return self._process.poll() is None

    def fork(self, function: str, arguments: Sequence[object], stdio: Sequence[int] = ()) -> Forked:
        """Call `module:function` in a new process, which exits with the function's result as its exit code.

        Args:
            function: import path of the function.
            arguments: JSON values, less than 64 KiB in total. Other users on the host cannot see these values, although
                they could see command-line arguments.
            stdio: descriptors for the new process's standard input and output. If `stdio` is empty, the new process has
                no input, and its output goes to stderr.

        Raises:
            PeerLost: the fork server has exited or does not respond.
        """
        pid = self._request({"function": function, "arguments": list(arguments)}, stdio)
        try:
            return Forked(self, pid, os.pidfd_open(pid))
        except OSError as error:
            raise PeerLost(f"a forked process ended immediately: {error.strerror}") from error

    def reap(self, pid: int) -> int:
        """Return the exit code of a process that has ended. Raises the same errors as `fork`."""
        return self._request({"reap": pid})

    def _request(self, what: object, fds: Sequence[int] = ()) -> int:
        with self._lock:
            try:
                self._connection.settimeout(self._patience_s)
                socket.send_fds(self._connection, [json.dumps(what).encode()], fds)
                answer = self._connection.recv(_MAX_MESSAGE_BYTES)
            except OSError as error:
                # Stop the fork server, because a late response would be mistaken for the response to the next request.
                self._kill()
                raise PeerLost(f"the fork server does not respond: {error.strerror or error}") from error
            except BaseException:
                # A signal handler raised an exception during the wait, so a late response could arrive here too.
                self._kill()
                raise
            if not answer:
                self._kill()
                raise PeerLost("the fork server has exited")
            self._patience_s = ANSWER_S
            return int(answer)

    def close(self) -> None:
        """End the fork server, even during its imports, and all processes that it forked. Idempotent."""
        self._connection.close()
        self._kill()

    def _kill(self) -> None:
        """Kill the fork server and wait until it has ended, so that `is_alive` is False afterwards."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that forked it ends, even during a C call or while stopped.

    Args:
        parent: PID of the process that forked this one. If the parent has already exited, this process exits too.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # If the parent ended before the call above, the kernel sends no signal.
    if os.getppid() != parent:
        os._exit(1)


def _serve(line: socket.socket) -> None:
    """Respond to requests until the caller closes its end of the socket."""
    me = os.getpid()
    while True:
        body, fds, _, _ = socket.recv_fds(line, _MAX_MESSAGE_BYTES, 2)
        if not body:
            return
        request = json.loads(body)
        # `waitpid` does not wait, because the caller's pidfd has already reported that the process ended.
        if "reap" in request:
            line.send(str(os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])).encode())
            continue
        # The child closes this pipe after it has called `end_with_parent`, and the read below then returns.
        begun, begins = os.pipe()
        pid = os.fork()
        if not pid:
            end_with_parent(me)
            line.close()
            os.close(begun)
            os.close(begins)
            _child(request["function"], request["arguments"], fds)
        for fd in (begins, *fds):
            os.close(fd)
        # Without this wait, a child that is stopped right after the fork could outlive this process.
        os.read(begun, 1)
        os.close(begun)
        line.send(str(pid).encode())


def _child(function: str, arguments: Sequence[object], stdio: Sequence[int]) -> NoReturn:
    """Call a function in a forked process. Exit with `os._exit`, which skips cleanup that belongs to the parent."""
    code = 1
    # A child that is forked inside an `except` block inherits the parent's exception. Do not report that exception.
    inherited = sys.exception()
    try:
        os.setsid()
        for number, fd in enumerate(stdio):
            os.dup2(fd, number)
            os.close(fd)
        module, _, name = function.partition(":")
        code = getattr(importlib.import_module(module), name)(*arguments)
        sys.stdout.flush()
    finally:
        if sys.exception() is not inherited:
            traceback.print_exc()
        os._exit(code)


def main() -> None:
    """Run the fork server without threads.

    A fork copies only the calling thread, so a lock that another thread holds would never be released in the child.
    """
    # If the parent has already ended, its end of the socket is closed, and `_serve` returns.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # Imports create many objects that are never freed. Garbage collections would take a tenth of the import time.
    gc.disable()
    for name in sys.argv[2:]:
        # A missing optional package is reported by the process that needs it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    # Freeze all objects, because a garbage collection in a child would write to the headers of unfrozen objects and
    # copy all shared pages.
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=int(sys.argv[1])) as line, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        # The caller may exit before it has read a response.
        _serve(line)


if __name__ == "__main__":
    main()
