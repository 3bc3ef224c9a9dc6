"""Connections to a job's coordinator from outside: another user of the host, and many strangers."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs import convert_as
from tests.support.users import STRANGER, run_as

from penstock.errors import PlanError
from penstock_convert import messages
from penstock_convert.convert import WorkerSettings
from penstock_convert.workers.launch import LocalLauncher

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")

TOLD: dict[str, Any] = {"devices": "cpu", "task_bytes": "256K", "shard_bytes": 2_000_000}


class OtherUser(LocalLauncher):
    """A launcher whose coordinator first receives a silent connection from another user of the host."""

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        self.seconds: list[float] = []

        def visit() -> float:
            began = time.monotonic()
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(30)
                sock.connect("\0" + address.removeprefix("unix:"))
                assert sock.recv(1) == b""
            return time.monotonic() - began

        self.visitor = threading.Thread(target=lambda: self.seconds.append(run_as(STRANGER, visit)))
        self.visitor.start()
        name, deadline = address.removeprefix("unix:"), time.monotonic() + 20
        while Path("/proc/net/unix").read_text().count(name) < 2:  # the listener, and who connected to it
            assert time.monotonic() < deadline
            time.sleep(0.01)
        super().spawn(worker, device, address, secret)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_different_user_cannot_reach_coordinator(
    small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket has a name but no file, so no file mode keeps others out.

    They were held until the hello's deadline before.
    """
    monkeypatch.setattr(messages, "HELLO_S", 60.0)
    seen: list[bool] = []

    def look(done: int, total: int) -> None:
        if done == 1:
            launcher.visitor.join(20)  # cut off while the job runs, not by its end
            seen.append(launcher.visitor.is_alive())

    with OtherUser() as launcher:
        convert_as(
            small_checkpoint,
            tmp_path / "out",
            workers=WorkerSettings(num_workers=1, launcher=launcher),
            progress=look,
            **TOLD,
        )
        launcher.visitor.join(30)
    assert seen == [False] and len(launcher.seconds) == 1


class Strangers(LocalLauncher):
    """A launcher reached by TCP, with 100 silent connections from one other address."""

    listen: str | None = "127.0.0.1"

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        port = int(address.rpartition(":")[2])
        self.strangers = [socket.create_connection(("127.0.0.1", port), 10, ("127.0.0.2", 0)) for _ in range(100)]
        super().spawn(worker, device, address, secret)

    def num_open(self) -> int:
        count = 0
        for sock in self.strangers:
            sock.setblocking(False)
            try:
                sock.recv(1)
            except BlockingIOError:
                count += 1
            except ConnectionError:
                pass
        return count


def test_number_of_unauthenticated_connections_is_limited(
    small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "descriptor_limit", lambda: 2 * (128 + 64))
    counts = []
    with ExitStack() as stack, Strangers() as launcher:
        convert_as(
            small_checkpoint,
            tmp_path / "out",
            workers=WorkerSettings(num_workers=1, launcher=launcher),
            progress=lambda done, total: counts.append(launcher.num_open()),
            **TOLD,
        )
        for sock in launcher.strangers:
            stack.enter_context(sock)
    # An address without a hello gets a quarter of the 32 places. All 100 were held before.
    assert counts and counts[0] <= 8, counts


def test_silent_connection_is_closed_at_deadline(
    small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "HELLO_S", 0.5)
    counts = []

    def look(done: int, total: int) -> None:
        if done == 1:
            time.sleep(1.0)  # longer than a worker that has said who it is has nothing else to say
        counts.append(launcher.num_open())

    with ExitStack() as stack, Strangers() as launcher:
        report = convert_as(
            small_checkpoint,
            tmp_path / "out",
            workers=WorkerSettings(num_workers=1, launcher=launcher),
            progress=look,
            **TOLD,
        )
        for sock in launcher.strangers:
            stack.enter_context(sock)
    assert counts[-1] == 0, counts
    assert len(report.workers) == 1  # none was lost and replaced


class Newer(LocalLauncher):
    """A launcher whose workers use the next major version. A stranger claims so before each."""

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        self.open: list[socket.socket] = []
        for shown in ("not the secret", secret):
            hello = messages.WorkerHello(worker=worker, secret=shown, device=device, protocol="2.0")
            self.open.append(sock := socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.connect("\0" + address.removeprefix("unix:"))
            messages.Wire(sock).send(hello)

    def ended(self, worker: str) -> str | None:
        return None

    def kill(self, worker: str) -> None:
        for sock in self.open:
            sock.close()


def test_worker_with_different_protocol_fails_job(small_checkpoint: Path, tmp_path: Path) -> None:
    expected = rf"worker w0 speaks job protocol 2.0, the coordinator speaks {messages.JOB_PROTOCOL}"
    with Newer() as launcher, pytest.raises(PlanError, match=expected):
        convert_as(small_checkpoint, tmp_path / "out", workers=WorkerSettings(num_workers=1, launcher=launcher), **TOLD)
