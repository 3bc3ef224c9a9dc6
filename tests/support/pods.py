"""Processes in pods. A pod has separate namespaces (PID, mount, network, UTS, IPC) and may share a directory.

`Pod.prefix` holds the words before a command that make it process 1 of the pod. `KeeperProcess`, `Worker` and
`SyncWorker` accept these words as `prefix`. An `Engine` attaches and fetches inside a pod.

    pod = Pod(shared=directory);  KeeperProcess([...], prefix=pod.prefix, environ=pod.environ)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.fleet import Worker, digests, send_event
from tests.support.sources import SOURCES
from tests.support.users import STRANGER, run_as

from penstock.errors import PenstockError

NAMESPACES = ("pid", "mnt", "net", "uts", "ipc")
CODE = Path(__file__).parents[2]
NEEDED = tuple(sorted({str(CODE), sys.prefix, sys.base_prefix, *filter(os.path.isdir, sys.path)}))
"""Directories of the host that every test in a pod needs."""
ROOT = next(
    path
    for path in ("/mnt", "/srv", "/media", "/home")
    if os.path.isdir(path) and not any(Path(needed).is_relative_to(path) for needed in NEEDED)
)
"""Path of a pod's own directories, seen from outside. It is empty on most hosts, and is covered for the pod only."""
RUNTIME = f"{ROOT}/run/penstock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod with its own /tmp, /dev/shm and /proc. The other files are the host's.

    Attributes:
        shared: directory mounted as its runtime directory. None means that it has its own.
        mounts: maps host directories to names below `ROOT`. They are mounted read-only.
        has_network: whether it has its own network namespace.
        has_pids: whether it has its own PID namespace.
        has_proc: whether it has its own /proc.
    """

    shared: Path | None = None
    mounts: Mapping[Path, str] = field(default_factory=dict)
    has_network: bool = True
    has_pids: bool = True
    has_proc: bool = True

    @property
    def environ(self) -> dict[str, str]:
        """Return the environment of a process in the pod."""
        # Keep other package directories of this process, such as one from `pip install --target`.
        others = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path and not _is_of_code(path)]
        code = [f"{ROOT}/code/{source.relative_to(CODE)}" for source in SOURCES]
        return {
            "PENSTOCK_RUNTIME_DIR": RUNTIME,
            "PENSTOCK_STALL_S": "15",
            "PYTHONPATH": ":".join([*code, f"{ROOT}/code", *others]),
            "TMPDIR": "/tmp",
        }

    @property
    def prefix(self) -> list[str]:
        """Return the words that run a command in the pod."""
        steps = ["set -e", f"mount -t tmpfs pod {ROOT}", f"mkdir -p {ROOT}/run"]
        binds = [(CODE, f"{ROOT}/code", "ro"), *((path, f"{ROOT}/{name}", "ro") for path, name in self.mounts.items())]
        if self.shared is not None:
            binds.append((self.shared, RUNTIME, "rw"))
        # Keep an interpreter below /tmp visible, in a clone too.
        kept = [
            path
            for path in NEEDED
            if path.startswith("/tmp/")
            and not any(Path(path).is_relative_to(other) for other in NEEDED if other != path)
        ]
        binds += [(Path(path), f"{ROOT}/kept{number}", "rw") for number, path in enumerate(kept)]
        for source, target, mode in binds:
            steps += [f"mkdir -p {target}", f"mount --bind {shlex.quote(str(source))} {target}"]
            if mode == "ro":
                steps.append(f"mount -o remount,bind,ro {target}")
        steps += ["mount -t tmpfs pod /tmp", "mount -t tmpfs pod /dev/shm"]
        for number, path in enumerate(kept):
            steps += [f"mkdir -p {shlex.quote(path)}", f"mount --bind {ROOT}/kept{number} {shlex.quote(path)}"]
        steps += ["mount -t proc proc /proc"] * self.has_proc + [f"cd {ROOT}/code", 'exec "$@"']
        words = ["unshare", "--mount", "--fork", "--kill-child", "--uts", "--ipc"]
        words += ["--net"] * self.has_network + ["--pid"] * self.has_pids
        words += ["--user", "--map-root-user"] * (os.geteuid() != 0)
        return [*words, "sh", "-c", "\n".join(steps), "pod"]

    def refusal(self) -> str:
        """Return why this system does not permit the pod, or "" if it does."""
        try:
            tried = subprocess.run([*self.prefix, "true"], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"unshare cannot be run: {error}"
        return f"unshare is not permitted: {tried.stderr.strip()}" if tried.returncode else ""


def _is_of_code(path: str) -> bool:
    return Path(path).is_relative_to(CODE)


def inside(pid: int) -> int:
    """Return the id (in this namespace) of process 1 in the pod whose `unshare` has this id."""
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        # An OSError means that it has ended. The parent is the second word after the name, which may contain blanks.
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                return int(entry)
    raise ProcessLookupError(f"process {pid} has no child")


def namespaces(pid: int | str) -> dict[str, str]:
    """Return the namespaces of a process."""
    return {name: os.readlink(f"/proc/{pid}/ns/{name}") for name in NAMESPACES}


def arenas(pid: int | str) -> set[int]:
    """Return the inodes of the arenas that a process has mapped. Equal inodes are the same physical memory."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if re.search("memfd:penstock-arena", line)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTask:
    """Task of an `Engine`."""

    model: str
    device: str = "cpu"
    environ: dict[str, str] = field(default_factory=dict)


class Engine(Worker):
    """A process that attaches and fetches.

    Commands: `attach`, `check`, `fetch`. Three commands attach and return the error: `attempt`, `stranger` (as a
    different user) and `elsewhere` (with a different runtime directory).
    """

    module = "tests.support.pods"

    def call(self, command: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Send a command and wait for its result."""
        self.events.pop(command, None)
        self.send(command)
        return self.wait_for(command, timeout_s=timeout_s)


def _attach(task: EngineTask, kept: list[Any]) -> dict[str, Any]:
    import torch

    import penstock as ps

    free_bytes = torch.cuda.mem_get_info()[0] if task.device != "cpu" else 0
    attached = ps.cache.attach(task.model, device=task.device, timeout_s=10.0)
    kept.append(attached)
    report = attached.report
    device = {}
    if task.device != "cpu":
        torch.cuda.synchronize()
        used_bytes = free_bytes - torch.cuda.mem_get_info()[0]
        device = {"used_bytes": used_bytes, "allocated_bytes": torch.cuda.memory_allocated()}
    return {
        **device,
        "path": report.path,
        "verified": report.verified,
        "device": report.device,
        "digests": digests(dict(attached)),
        "arenas": sorted(arenas("self")),
    }


def _check(kept: list[Any]) -> dict[str, Any]:
    try:
        kept[-1].check()
    except PenstockError as error:
        return {"error": type(error).__name__}
    return {"error": ""}


def _fetch(task: EngineTask) -> dict[str, Any]:
    import penstock as ps

    weights: dict[str, Any] = {}
    with ps.join(task.model) as fleet:
        report = fleet.fetch(weights, device=task.device, timeout_s=20.0)
        return {
            "paths": dict(report.nbytes_by_path),
            "why": dict(report.why),
            "faults": list(report.faults),
            "verified": report.verified,
            "digests": digests(weights),
        }


def _failure(task: EngineTask, device: str) -> dict[str, Any]:
    """Attach, and return the error."""
    import penstock as ps

    try:
        ps.cache.attach(task.model, device=device, timeout_s=0.5)
    except PenstockError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "", "message": ""}


def _stranger(task: EngineTask) -> dict[str, Any]:
    """Attach as another user. Then connect to every socket as that user, even if its mode would permit it."""
    # Use no device, because a forked child cannot use its parent's.
    said: dict[str, Any] = run_as(STRANGER, lambda: _failure(task, "cpu"))
    runtime = Path(os.environ["PENSTOCK_RUNTIME_DIR"])
    sockets = list(runtime.rglob("*.sock"))
    modes = {path: path.stat().st_mode for path in {runtime, *sockets, *(path.parent for path in sockets)}}
    try:
        for path in modes:
            path.chmod(0o777)
        said["answers"] = run_as(STRANGER, lambda: {str(path): _answer(path) for path in sockets})
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    return said


def _answer(path: Path) -> str:
    """Return the bytes and descriptors that a socket sends to another user."""
    is_packets = path.name == "fds.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if is_packets else socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        try:
            sock.connect(str(path))
            sock.send(struct.pack("<Q", 0) if is_packets else b"GET /v1/alive HTTP/1.1\r\nHost: a\r\n\r\n")
            data, fds, _, _ = socket.recv_fds(sock, 100, 10)
        except (ConnectionError, BrokenPipeError):
            return ""
    return f"{data!r} and {len(fds)} descriptors" if data or fds else ""


def _elsewhere(task: EngineTask) -> dict[str, Any]:
    """Attach as in a pod that does not mount the directory."""
    runtime = os.environ["PENSTOCK_RUNTIME_DIR"]
    os.environ["PENSTOCK_RUNTIME_DIR"] = "/tmp/own"
    try:
        return _failure(task, "cpu")
    finally:
        os.environ["PENSTOCK_RUNTIME_DIR"] = runtime


def main() -> int:
    """Run an engine."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # process 1 has no default action
    task = EngineTask(**json.loads(sys.argv[1]))
    import torch

    torch.set_num_threads(1)
    kept: list[Any] = []
    words = {
        "attach": lambda: _attach(task, kept),
        "check": lambda: _check(kept),
        "fetch": lambda: _fetch(task),
        "attempt": lambda: _failure(task, task.device),
        "stranger": lambda: _stranger(task),
        "elsewhere": lambda: _elsewhere(task),
    }
    numbers = [name for name in os.listdir("/proc") if name.isdecimal()]
    send_event("ready", pid=os.getpid(), namespaces=namespaces("self"), processes=len(numbers))
    for line in sys.stdin:
        try:
            send_event(line.strip(), **words[line.strip()]())
        except PenstockError as error:
            send_event("failed", error=type(error).__name__, message=str(error))
    return 0


if __name__ == "__main__":
    threading.current_thread().name = "engine"
    sys.exit(main())
