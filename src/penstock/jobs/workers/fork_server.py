"""A process that has imported what others need and forks them: tens of milliseconds each, and its memory is theirs too.

In: a function by name, plain arguments. Out: processes to signal and to wait for.
Not here: what they do (`process`), whose they are (`launch`).

    caller --socketpair--> fork server: torch imported, no thread, no device --fork--> function(*arguments)

It ends with the thread that started it, however that ends, and those that it forked end with it.
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
from typing import NoReturn

from penstock.closing import Closing
from penstock.errors import PeerLost

START_S = 120.0
"""Within which a new fork server has imported what it is told to: seconds, or a minute where the machine is busy."""
ANSWER_S = 30.0
"""Within which it answers later: it does nothing else."""
END_S = 5.0
"""A killed process that is not gone by then is stuck in the kernel, where nobody can end it: it is left there."""
_MAX_MESSAGE_BYTES = 64 << 10
_PR_SET_PDEATHSIG = 1
"""Source: Linux, include/uapi/linux/prctl.h."""


class Forked:
    """One forked process."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self.pid, self._fork_server, self._code = pid, fork_server, -1
        # It is not waited for before this descriptor says that it ended, so its number is nobody else's.
        self._pidfd: int | None = os.pidfd_open(pid)
        # Also where the fork server was killed, and nobody can say how this process ended.
        self._close = weakref.finalize(self, os.close, self._pidfd)

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing if it has ended. ProcessLookupError: it was waited for already."""
        if self._pidfd is None:
            raise ProcessLookupError(self.pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def forget(self) -> None:
        """Let go of it; nobody signals or waits for it any more. Idempotent."""
        self._close()
        self._pidfd = None

    def poll(self) -> int | None:
        """Its exit code (minus the signal that ended it), or None while it runs."""
        try:
            return self.wait(timeout=0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = 60.0) -> int:
        """Its exit code.

        Raises:
            TimeoutExpired: it runs still.
            PeerLost: it ended, and the fork server with it: nobody knows how.
        """
        if self._pidfd is not None:
            # Not `select`: a program may have more descriptors than that can name.
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            self._code = self._fork_server.reap(self.pid)
            self.forget()
        return self._code


class ForkServer(Closing):
    """See the module. A context manager. Any thread.

    Args:
        imports: modules that it imports; one that is not installed is left to who needs it.

    Raises:
        PeerLost: no process can be started.
    """

    def __init__(self, imports: Sequence[str]) -> None:
        self._lock, self._patience_s = threading.Lock(), START_S
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "penstock.jobs.workers.fork_server", str(theirs.fileno()), *imports]
        try:
            # What a function prints goes to stderr: stdout is the caller's.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
            )
        except OSError as error:
            self._line.close()
            raise PeerLost(f"no process can be started: {error.strerror}") from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def fork(self, function: str, arguments: Sequence[object], stdio: Sequence[int] = ()) -> Forked:
        """Call `module:function` in a new process; its result is the exit code.

        Args:
            function: where it is.
            arguments: values of JSON, below 64 KiB. Nobody else on the host sees them.
            stdio: descriptors for its standard input and output; none: nothing, and stderr.

        Raises:
            PeerLost: the fork server has ended, or does not answer.
        """
        said = self._ask({"function": function, "arguments": list(arguments)}, stdio)
        try:
            return Forked(self, said)
        except OSError as error:
            raise PeerLost(f"a process is gone as soon as it was forked: {error.strerror}") from error

    def reap(self, pid: int) -> int:
        """Return the exit code of a process that ended. PeerLost: as of `fork`."""
        return self._ask({"reap": pid})

    def _ask(self, what: object, fds: Sequence[int] = ()) -> int:
        with self._lock:
            try:
                self._line.settimeout(self._patience_s)
                socket.send_fds(self._line, [json.dumps(what).encode()], fds)
                said = self._line.recv(_MAX_MESSAGE_BYTES)
            except OSError as error:
                self._kill()  # what it may say later would be taken for another answer
                raise PeerLost(f"the process that forks others does not answer: {error.strerror or error}") from error
            except BaseException:  # a signal
                self._kill()
                raise
            if not said:
                self._kill()
                raise PeerLost("the process that forks others has ended")
            self._patience_s = ANSWER_S
            return int(said)

    def close(self) -> None:
        """End it, and with it all that it forked, also while it imports. Idempotent."""
        self._line.close()
        self._kill()

    def _kill(self) -> None:
        """It has ended when this returns, so that nobody takes it for alive."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)


def end_with_parent(parent: int) -> None:
    """Have this process killed when the thread that forked it ends: also while it is stopped, or in a C call.

    Args:
        parent: whose thread that was; where it is gone already, this process ends here.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _serve(line: socket.socket) -> None:
    me = os.getpid()
    while True:
        body, fds, _, _ = socket.recv_fds(line, _MAX_MESSAGE_BYTES, 2)
        if not body:
            return
        request = json.loads(body)
        if "reap" in request:
            line.send(str(os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])).encode())
            continue
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
        os.read(begun, 1)  # its end: nobody can stop the child before it is bound to end with this process
        os.close(begun)
        line.send(str(pid).encode())


def _child(function: str, arguments: Sequence[object], stdio: Sequence[int]) -> NoReturn:
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
    """The fork server's process: no threads, so that forks of it are whole."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))  # one that is gone already has closed the line
    gc.disable()  # a tenth of the time of what follows
    for name in sys.argv[2:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in a child leave what it shares with the others alone
    gc.enable()
    with socket.socket(fileno=int(sys.argv[1])) as line, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _serve(line)  # until who asks is gone, perhaps before it was answered


if __name__ == "__main__":
    main()
