"""A real redis-server on its own Unix socket, which can be killed and restarted. See `scripts/setup_redis.sh`."""

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
    """Return why it cannot run here, or None if it can."""
    return None if shutil.which("redis-server") else "redis-server is not installed: scripts/setup_redis.sh"


class RedisServer:
    """A server started by `start` or `with`. It keeps nothing on disk.

    With a password it refuses clients without it.
    """

    def __init__(self, directory: Path, *, password: str | None = None) -> None:
        self._directory, self._password = directory, password
        self._socket = directory / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    def start(self) -> RedisServer:
        """Start the server and wait until it answers."""
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
        """Send SIGKILL. The data is lost."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(10)
        self._socket.unlink(missing_ok=True)

    def pause(self) -> None:
        """Send SIGSTOP. It then accepts connections but does not answer."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
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
