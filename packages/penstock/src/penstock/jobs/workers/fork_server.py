"""The fork server: a process that imports the large libraries once, and forks others in tens of milliseconds each.

In: a function by name, plain arguments. Out: processes to signal and to wait for.
Not here: the code of these processes (`process`), starting workers (`launch`).

This module is also the program of the fork server, so it imports little.

    caller --socketpair--> fork server: torch imported, no thread, no device --fork--> function(*arguments)

It ends with the thread that started it, however that thread ends, and the processes that it forked end with it.
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
"""Deadline for the imports of a new fork server: they take seconds, or a minute on a busy machine."""
ANSWER_S = 30.0
"""Deadline for later answers: the fork server does nothing else."""
END_S = 5.0
"""A killed process that still exists after this time is stuck in the kernel; nothing can end it, so it is left."""
_MAX_MESSAGE_BYTES = 64 << 10
_PR_SET_PDEATHSIG = 1
"""Source: Linux, include/uapi/linux/prctl.h."""


class Forked:
    """A process that the fork server forked. The caller is not its parent, so it is watched by a descriptor."""

    def __init__(self, fork_server: ForkServer, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._fork_server = fork_server
        self._code = -1
        # The process is only reaped after this descriptor reports its end, so its number cannot be reused before.
        self._pidfd: int | None = pidfd
        # Closed also where the fork server was killed, and no exit code will ever be known.
        self._close = weakref.finalize(self, os.close, pidfd)
        # Not at the interpreter's exit, where other threads still use it. The kernel closes it then.
        self._close.atexit = False

    def send_signal(self, number: int) -> None:
        """Send a signal; do nothing if the process has ended. ProcessLookupError: it was waited for already."""
        if self._pidfd is None:
            raise ProcessLookupError(self.pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def forget(self) -> None:
        """Close the descriptor. Order: after the last signal or wait. Idempotent."""
        self._close()
        self._pidfd = None

    def poll(self) -> int | None:
        """Return the exit code (minus the signal that ended it), or None while the process runs."""
        try:
            return self.wait(timeout=0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = 60.0) -> int:
        """Wait for the process to end; return its exit code.

        Raises:
            TimeoutExpired: it still runs.
            PeerLost: it ended, and the fork server with it: its exit code is lost.
        """
        if self._pidfd is not None:
            # Not `select`, which cannot wait for descriptors above 1023: a program may have more.
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            # Only its parent can learn the exit code.
            self._code = self._fork_server.reap(self.pid)
            self.forget()
        return self._code


class ForkServer(Closeable):
    """A handle of the fork server's process. A context manager. Any thread."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        # One request and its answer at a time: answers carry no number that would match them with requests.
        self._lock = threading.Lock()
        # Longer for the first answer, which waits for the imports.
        self._patience_s = START_S
        self._connection = connection
        self._process = process

    @classmethod
    def start(cls, imports: Sequence[str]) -> Self:
        """Start the process, without waiting for its imports.

        Args:
            imports: Modules to import. A missing module is an error later, in the process that needs it.

        Raises:
            PeerLost: no process can be started.
        """
        # Packets: a request and its descriptors arrive together, and need no framing.
        connection, theirs = descriptors.opened(partial(socket.socketpair, socket.AF_UNIX, socket.SOCK_SEQPACKET))
        command = [sys.executable, "-m", "penstock.jobs.workers.fork_server", str(theirs.fileno()), *imports]
        try:
            # What a function prints goes to stderr: stdout is the caller's.
            # A session of its own: Ctrl-C in the terminal reaches the caller alone, which then ends the workers.
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
            )
        except OSError as error:
            connection.close()
            raise PeerLost(f"no process can be started: {error.strerror}") from error
        finally:
            # Else this process would hold the other end open, and never see it close.
            theirs.close()
        return cls(connection, process)

    @property
    def pid(self) -> int:
        """Return the process number."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def fork(self, function: str, arguments: Sequence[object], stdio: Sequence[int] = ()) -> Forked:
        """Call `module:function` in a new process; its result is the exit code.

        Args:
            function: its import path.
            arguments: values of JSON, below 64 KiB. Unlike a command line, other users of the host cannot read them.
            stdio: descriptors for its standard input and output; none: no input, and stderr.

        Raises:
            PeerLost: the fork server has ended, or does not answer.
        """
        pid = self._request({"function": function, "arguments": list(arguments)}, stdio)
        try:
            return Forked(self, pid, os.pidfd_open(pid))
        except OSError as error:
            raise PeerLost(f"a process ended as soon as it was forked: {error.strerror}") from error

    def reap(self, pid: int) -> int:
        """Return the exit code of a process that ended. PeerLost as for `fork`."""
        return self._request({"reap": pid})

    def _request(self, what: object, fds: Sequence[int] = ()) -> int:
        with self._lock:
            try:
                self._connection.settimeout(self._patience_s)
                socket.send_fds(self._connection, [json.dumps(what).encode()], fds)
                answer = self._connection.recv(_MAX_MESSAGE_BYTES)
            except OSError as error:
                # A late answer would be read as the answer to the next request.
                self._kill()
                raise PeerLost(f"the process that forks others does not answer: {error.strerror or error}") from error
            except BaseException:
                # A signal handler raised while this waited: the answer would come later, too.
                self._kill()
                raise
            if not answer:
                self._kill()
                raise PeerLost("the process that forks others has ended")
            self._patience_s = ANSWER_S
            return int(answer)

    def close(self) -> None:
        """End the process and all that it forked, also while it still imports. Idempotent."""
        self._connection.close()
        self._kill()

    def _kill(self) -> None:
        """Kill the process and wait for its end, so that `is_alive` is false afterwards."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends, even if it is stopped or in a C call.

    Args:
        parent: process of that thread; if it has ended already, this process exits at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # A parent that ended before the call above sends no signal any more.
    if os.getppid() != parent:
        os._exit(1)


def _serve(line: socket.socket) -> None:
    """Answer requests until the caller closes its end of the socket."""
    me = os.getpid()
    while True:
        body, fds, _, _ = socket.recv_fds(line, _MAX_MESSAGE_BYTES, 2)
        if not body:
            return
        request = json.loads(body)
        # The caller has seen the process end by its descriptor, so this does not wait.
        if "reap" in request:
            line.send(str(os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])).encode())
            continue
        # The pipe's write end is open in the child until `end_with_parent` has run: reading it waits for that.
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
        # Without this, a child stopped right after the fork could outlive this process.
        os.read(begun, 1)
        os.close(begun)
        line.send(str(pid).encode())


def _child(function: str, arguments: Sequence[object], stdio: Sequence[int]) -> NoReturn:
    """Call a function in a forked process, and end the process by `os._exit`, which runs no cleanup of the parent's."""
    code = 1
    # A fork inside an `except` block begins with that exception, which is none of this child's.
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
    """Run the fork server, without threads: a fork copies only one thread, and locks of the others stay taken."""
    # A parent that is gone already has closed its end of the socket, which ends `_serve`.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # Imports make objects that stay: collecting among them would take a tenth of the time.
    gc.disable()
    for name in sys.argv[2:]:
        # A missing optional package is reported by the process that needs it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    # A collection in a child would write to every object's header, and so copy all shared pages.
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=int(sys.argv[1])) as line, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        # Until the caller is gone, perhaps before it read an answer.
        _serve(line)


if __name__ == "__main__":
    main()
