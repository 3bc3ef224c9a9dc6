"""A pseudo-terminal of a given size that shows what a user sees of a command. `pyte` emulates the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence

import pyte
from tests.support import commands
from tests.support.fork_server import Forked, ForkServer

DEADLINE_S = 60.0
ENVIRON = {"TERM": "xterm-256color", "PENSTOCK_PROGRESS": "", "COLUMNS": "", "LINES": ""}


class Terminal:
    """A terminal with one command. As a context manager it hangs up and kills the command on exit.

    Attributes:
        seen: every screen that the command has drawn, as text.
    """

    def __init__(self, *, columns: int = 80, rows: int = 24) -> None:
        self._master, self._slave = pty.openpty()
        self._screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.ByteStream(self._screen)
        self._process: Forked | subprocess.Popen[bytes] | None = None
        self.seen: list[str] = []
        self.resize(columns, rows)

    def fork(self, fork_server: ForkServer, words: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        """Start `penstock` with these arguments from the fork server, which has imported what it needs."""
        path = os.ttyname(self._slave)
        self._process = commands.start(fork_server, words, {**ENVIRON, **(environ or {})}, terminal=path)

    def spawn(self, words: Sequence[str], command: Sequence[str] = (sys.executable, "-m", "penstock")) -> None:
        """Start a new interpreter as the foreground job. Ctrl-C reaches all of its processes, as in a shell."""
        self._process = subprocess.Popen(
            [*command, *words],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, **ENVIRON},
        )

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, as a user does by dragging the window."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen.resize(rows, columns)

    def press(self, keys: bytes) -> None:
        """Type keys. `b"\\x03"` is Ctrl-C."""
        os.write(self._master, keys)

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def lines(self) -> list[str]:
        """Return the lines on the screen and above it, without empty lines."""
        above = ["".join(row[at].data for at in range(self._screen.columns)) for row in self._screen.history.top]
        return [line.rstrip() for line in [*above, *self._screen.display] if line.strip()]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def until(self, reached: Callable[[], bool]) -> None:
        """Read until `reached` returns True. Raise AssertionError if the command ends before."""
        deadline = time.monotonic() + DEADLINE_S
        while not reached():
            assert self._read(deadline), f"it has ended:\n{self.text}"

    def end(self) -> int:
        """Read to the end of the command and return its exit code."""
        deadline = time.monotonic() + DEADLINE_S
        while self._read(deadline):
            pass
        assert self._process is not None
        return self._process.wait(1.0)

    def _read(self, deadline: float) -> bool:
        """Feed the next output to the screen. Return False once the command has ended and all output was read."""
        assert self._process is not None
        is_over = self._process.poll() is not None
        if not select.select([self._master], [], [], 0.0 if is_over else 0.1)[0]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {DEADLINE_S} s the screen shows:\n{self.text}")
            return not is_over
        self._stream.feed(os.read(self._master, 65536))
        self.seen.append(self.text)
        return True

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._process, Forked):
            self._process.__exit__()
        elif self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._master)
        os.close(self._slave)
