"""A real redis-server on a Unix socket of its own, which can be killed and started again.

In: a directory. Out: a running server's URL. Not here: its installation (`scripts/setup_redis.sh`).
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

START_S = 20.0


def missing() -> str | None:
    """Return why it cannot run here; None: it can."""
    return None if shutil.which("redis-server") else "redis-server is not installed: scripts/setup_redis.sh"


class RedisServer:
    """Started by `start` or `with`; keeps nothing on disk. With a password it answers no client without it."""

    def __init__(self, directory: Path, *, password: str | None = None) -> None:
        self._directory, self._password = directory, password
        self._socket = directory / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    def start(self) -> RedisServer:
        """Return once it answers."""
        command = ["redis-server", "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._directory), "--logfile", "redis.log"]
        if self._password is not None:
            command += ["--requirepass", self._password]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                log = self._directory / "redis.log"
                said = log.read_text()[-500:] if log.exists() else "nothing"
                raise RuntimeError(f"redis-server did not start; it ended with {self._process.poll()}, saying {said}")
            time.sleep(0.01)
        return self

    def kill(self) -> None:
        """SIGKILL: what it knew is lost."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(10)
        self._socket.unlink(missing_ok=True)

    def pause(self) -> None:
        """SIGSTOP: it takes connections and does not answer."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.settimeout(1.0)
            probe.connect(str(self._socket))
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        return False

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
