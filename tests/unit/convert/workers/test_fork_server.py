"""Processes forked from one that imported for all: how they end is known, and they end with who had them forked."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import PeerLost
from penstock_convert.workers.fork_server import Forked, ForkServer

ENDED_S = 20.0
"""A busy machine takes some time to end a process."""


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    with ForkServer.start(["json", "not_installed_anywhere"]) as fork_server:
        yield fork_server


def sleeping(fork_server: ForkServer) -> Forked:
    return fork_server.fork("time:sleep", [600])


def ends(pid: int) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], ENDED_S)[0])
    finally:
        os.close(fd)


def test_forked_process_exits_with_function_result(fork_server: ForkServer) -> None:
    process = fork_server.fork("operator:add", [2, 3])
    assert process.wait(ENDED_S) == 5
    assert process.wait(ENDED_S) == process.poll() == 5
    with pytest.raises(ProcessLookupError):
        process.send_signal(signal.SIGKILL)


def test_output_and_traceback_go_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with ForkServer.start([]) as fork_server:
        assert fork_server.fork("os:system", ["echo hello"]).wait(ENDED_S) == 0
        assert fork_server.fork("operator:truediv", [1, 0]).wait(ENDED_S) == 1
    found = capfd.readouterr()
    assert "hello" in found.err and "ZeroDivisionError" in found.err and not found.out


def test_arguments_are_hidden_from_proc(fork_server: ForkServer) -> None:
    process = fork_server.fork("time:sleep", [600.125])
    for name in ("cmdline", "environ"):
        assert b"600.125" not in Path(f"/proc/{process.pid}/{name}").read_bytes()


def test_suspended_process_is_killed_by_sigkill(fork_server: ForkServer) -> None:
    process = sleeping(fork_server)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGKILL)
    assert process.wait(ENDED_S) == -signal.SIGKILL


def test_children_exit_with_fork_server(fork_server: ForkServer) -> None:
    process = sleeping(fork_server)
    process.send_signal(signal.SIGSTOP)
    os.kill(fork_server.pid, signal.SIGKILL)
    assert ends(process.pid)
    with pytest.raises(PeerLost):
        process.wait(ENDED_S)
    with pytest.raises(PeerLost):
        sleeping(fork_server)
    assert not fork_server.is_alive


def test_killed_fork_server_leaks_no_descriptor(fork_server: ForkServer) -> None:
    process = sleeping(fork_server)
    os.kill(fork_server.pid, signal.SIGKILL)
    assert ends(process.pid)
    with pytest.raises(PeerLost):
        process.wait(ENDED_S)
    del process
    gc.collect()
    open_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in open_files if "pidfd" in path]


def test_unresponsive_fork_server_is_reported_dead(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_convert.workers.fork_server.ANSWER_S", 0.5)
    process = sleeping(fork_server)
    os.kill(fork_server.pid, signal.SIGSTOP)
    with pytest.raises(PeerLost, match="does not respond"):
        sleeping(fork_server)
    assert not fork_server.is_alive
    assert ends(process.pid)


def test_interrupted_request_stops_fork_server_and_children(fork_server: ForkServer) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    process = sleeping(fork_server)
    os.kill(fork_server.pid, signal.SIGSTOP)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            sleeping(fork_server)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not fork_server.is_alive
    assert ends(process.pid)


def test_fork_server_exits_when_starting_thread_exits() -> None:
    found = list[tuple[ForkServer, Forked]]()

    def start() -> None:
        fork_server = ForkServer.start([])
        found.append((fork_server, sleeping(fork_server)))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    ((fork_server, process),) = found
    assert ends(process.pid) and ends(fork_server.pid)
    fork_server.close()


def test_caller_exiting_before_response_prints_nothing() -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.send(json.dumps({"function": "time:sleep", "arguments": [600]}).encode())
    mine.close()
    command = [sys.executable, "-m", "penstock_convert.workers.fork_server", str(theirs.fileno())]
    done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=60, check=False)
    theirs.close()
    assert (done.returncode, done.stderr) == (0, "")


def test_child_forked_in_except_block_prints_nothing() -> None:
    code = (
        "import os\n"
        "from penstock_convert.workers.fork_server import _child\n"
        "try:\n"
        "    raise ValueError('of the parent')\n"
        "except ValueError:\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        _child('penstock_convert.workers.launch:num_gpus', [], ())\n"
        "    os.waitpid(pid, 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
