"""Functions that run in the processes of a chaos round. They record descriptors, threads and memory before and after.

Each sends its events and at the end a line `census` with what it left behind. `harness` starts these processes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.fleet import digests, send_event, set_constants

SETTLE_S = 4.0
"""Seconds after the stall deadline in which threads and descriptors must end when the work is done. A request to a
silent member takes that long."""
GROWTH_BYTES = 128 << 20
"""Allowed growth of resident memory by work on 8 MiB, for libraries and threads' stacks but not for copies."""
_before: dict[str, Any] = {}
_NUMBER = re.compile(r"[0-9]+")


def descriptors() -> list[str]:
    """Return the target of each open descriptor, without numbers that differ between runs."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.append(_NUMBER.sub("N", os.readlink(f"/proc/self/fd/{fd}")))
    return sorted(what for what in found if not what.endswith(".err"))  # where a command sends its errors


def threads() -> list[str]:
    """Return the names of all threads, including those of libraries."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            found.append(Path(f"/proc/self/task/{thread}/comm").read_text().strip())
    return sorted(found)


def memory() -> tuple[int, int]:
    """Return the resident bytes of this process, and the bytes of Penstock's shared memory that it maps."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    shared = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:penstock" in line:
            start, _, stop = line.split()[0].partition("-")
            shared += int(stop, 16) - int(start, 16)
    return resident, shared


def census() -> dict[str, Any]:
    """Return what this process has open, runs and maps."""
    resident, shared = memory()
    return {"descriptors": descriptors(), "threads": threads(), "resident": resident, "shared": shared}


def leaks(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """Return what a process newly has open, runs or maps, by kind of violation."""
    found = {}
    descriptors = Counter(after["descriptors"]) - Counter(before["descriptors"])
    if descriptors["socket:[N]"] <= before["pooled"]:
        del descriptors["socket:[N]"]
    if descriptors:
        found["leaked descriptors"] = str(dict(descriptors))
    threads = Counter(after["threads"]) - Counter(before["threads"])
    if threads:
        found["leaked threads"] = str(dict(threads))
    if after["shared"] > before["shared"]:
        found["leaked memory"] = f"{after['shared'] - before['shared']} bytes of shared memory are mapped still"
    elif (growth := after["resident"] - before["resident"]) > GROWTH_BYTES:
        found["leaked memory"] = f"{growth >> 20} MiB more are resident"
    return found


def mark(*, pooled: int = 0) -> None:
    """Use the present state for the comparison at the end, after libraries have started their permanent threads.

    Args:
        pooled: number of further connections that a library may keep open for the next request.
    """
    gc.collect()
    _before.clear()
    _before.update(census() | {"pooled": pooled})


def run(told: dict[str, Any]) -> int:
    """Call `told["function"]` in the round's directory and return its result.

    Its stderr, and the stacks of all threads at SIGUSR1, go to a file there.
    """
    os.chdir(told["directory"])
    errors = os.open(told["name"] + ".err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    os.close(errors)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    module, _, name = told["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    mark()
    code = int(function(told["argument"]) or 0)
    begun, settle_s = time.monotonic(), SETTLE_S + float(os.environ["PENSTOCK_STALL_S"])
    gc.collect()
    while (found := leaks(_before, census())) and time.monotonic() < begun + settle_s:
        time.sleep(0.05)
        gc.collect()
    if found:
        faulthandler.dump_traceback(all_threads=True)
    with contextlib.suppress(BrokenPipeError):
        send_event("census", leaks=found, settle_s=time.monotonic() - begun)
    return code


def hub(told: dict[str, Any]) -> int:
    """Run a hub whose clock is set by lines of input, in seconds ahead of the machine's clock."""
    from penstock_hub.directory import Directory
    from penstock_hub.server import run_hub
    from penstock_hub.store import MemoryStore, Store

    ahead_s, time_of_day = [float(told["ahead_s"])], time.time
    vars(time)["time"] = lambda: time_of_day() + ahead_s[0]

    def listen() -> None:
        for line in sys.stdin:
            ahead_s[0] = float(line)
            send_event("clock", ahead_s=ahead_s[0])

    set_constants(told["constants"])
    store: Store = MemoryStore()
    if told["redis"]:
        from penstock_hub.store import RedisStore

        store = RedisStore(told["redis"])
    directory = Directory(store, fresh=told["fresh"], beat_s=told["beat_s"], ttl_s=told["ttl_s"])
    threading.Thread(target=listen, daemon=True).start()
    mark(pooled=2)  # to Redis, by requests that were under way at the end
    run_hub(directory, told["listen"], ready=lambda url: send_event("ready", url=url))
    store.close()
    return 0


def _report(attempt: Callable[[], dict[str, Any]], word: str) -> None:
    """Send an event with the result of `attempt`, or with the typed error that it raised."""
    from penstock.errors import PenstockError

    begun = time.monotonic()
    try:
        told = attempt()
    except PenstockError as error:
        told = {"error": type(error).__name__, "message": str(error), "mutated": error.mutated}
    send_event(word, seconds=time.monotonic() - begun, **told)


def load(told: dict[str, Any]) -> int:
    """Load a checkpoint with `how` for each line of input. Send the digest of the result or the typed error."""
    import torch

    import penstock as ps

    torch.set_num_threads(1)
    options = {"settings": ps.ReadSettings(storage_options=told["storage_options"]), "progress": False}
    uri = told["uri"]

    def attempt() -> dict[str, Any]:
        if told["how"] == "load":
            return {"digests": digests(dict(ps.load(uri, **options)))}
        if told["how"] == "stream":
            with ps.stream(uri, **options) as stream:
                return {"digests": digests({name: tensor.clone() for name, tensor in stream})}
        target = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in told["tensors"]}
        try:
            ps.load_into(target, uri, **options)
        except ps.PenstockError as error:
            touched = any(bool(tensor.view(torch.uint8).any()) for tensor in target.values() if tensor.numel())
            if touched and not error.mutated:
                return {
                    "untold": f"{type(error).__name__} says that the destination is unchanged, but it changed: {error}"
                }
            raise
        return {"digests": digests(target)}

    for word in sys.stdin:
        _report(attempt, "loaded")
        if word.startswith("first"):
            mark(pooled=4)  # of the client of an object store, which is kept from one load to the next
    return 0


def engine(told: dict[str, Any]) -> int:
    """Attach to a cached model at each line of input, send the digest of its tensors, and return the lease."""
    import torch

    import penstock as ps

    torch.set_num_threads(1)

    def attempt() -> dict[str, Any]:
        with ps.cache.attach(told["model"], timeout_s=told["wait_s"]) as attached:
            found = {"digests": digests(dict(attached)), "revision": attached.report.revision}
            time.sleep(told["hold_s"])
            found["again"] = digests(dict(attached))
            return found | {"standing": attached.lease_state}

    send_event("ready")
    for _ in sys.stdin:
        _report(attempt, "attached")
    return 0


def convert(told: dict[str, Any]) -> int:
    """Convert with workers forked as in production. Send events for started workers, progress, and the end."""
    import resource

    import torch

    from penstock.errors import PenstockError
    from penstock_convert.convert import WorkerSettings
    from penstock_convert.convert import convert as convert_now
    from penstock_convert.workers import launch as launcher

    torch.set_num_threads(1)
    if told["limit_file_bytes"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (told["limit_file_bytes"], resource.RLIM_INFINITY))
    vars(launcher)["ForkServer"] = SimpleNamespace(start=lambda imports: fork_server())
    try:
        arguments = told["arguments"]
        workers = WorkerSettings(num_workers=arguments.pop("workers"), task_bytes="256K")
        report = convert_now(
            progress=lambda num, total: send_event("done", num=num, total=total), workers=workers, **arguments
        )
    except PenstockError as error:
        send_event("failed", kind=type(error).__name__, text=str(error))
        return 0
    send_event("converted", revision=report.revision, num_tasks=report.num_tasks, num_resumed=report.num_resumed)
    return 0


def fork_server() -> Any:
    """Return a production fork server that was itself forked, which saves the import of torch."""
    from tests.support.fork_server import Graft

    from penstock_convert.workers import fork_server

    class Process:
        def __init__(self, pid: int) -> None:
            self.pid, self._code = pid, None

        def poll(self) -> int | None:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
            return self._code

        def send_signal(self, number: int) -> None:
            os.kill(self.pid, number)

        def wait(self, timeout: float | None = None) -> int | None:
            while self.poll() is None:
                time.sleep(0.005)
            return self._code

    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    me, pid = os.getpid(), os.fork()
    if not pid:
        fork_server.end_with_parent(me)
        line = os.dup2(there.fileno(), 3)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.closerange(4, 1 << 16)  # the coordinator's own: the lock of its journal, its connections
        sys.argv[1:] = [str(line)]
        try:
            fork_server.main()
        finally:
            os._exit(0)
    there.close()
    send_event("fork server", pid=pid)
    return Graft(here, Process(pid))


def stranger(told: dict[str, Any]) -> int:
    """Try, as another user, to reach every socket, port, file and process of the round. Send what was reachable."""
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    send_event("ready")
    held: list[socket.socket] = []
    for line in sys.stdin:
        found: list[str] = []
        words = line.split()
        if words[0] == "reach":
            paths, ports, pids = (part.split(",") if part != "-" else [] for part in words[1:4])
            found += [f"connected to {path}" for path in paths if _connects(path)]
            for port in map(int, ports):
                found += [f"port {port} gave {len(got)} bytes: {got[:60]!r}" for got in _asks(port, told["secret"])]
            found += [what for pid in pids for what in _looks_into(int(pid))]
        elif words[0] == "hold":
            held += [connection for port in words[1].split(",") for connection in _holds(int(port), int(words[2]))]
        send_event(words[0], found=found, num_held=len(held))
    return 0


def _connects(path: str) -> bool:
    """Return whether a Unix socket (abstract if it begins with `@`) sends anything but a refusal."""
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.settimeout(2.0)
        probe.connect(path.replace("@", "\0", 1) if path.startswith("@") else path)
        # A listener that checks the caller's user after accepting closes the connection without an answer.
        probe.sendall(b"GET /v1/status HTTP/1.1\r\nHost: hub\r\n\r\n")
        answer = probe.recv(4096)
        return bool(answer) and not answer.startswith(b"HTTP/1.1 4")
    return False


def _asks(port: int, secret: str) -> list[bytes]:
    """Return responses from a port that contain weights or a success."""
    found = []
    asks = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /0 HTTP/1.1\r\nHost: x\r\nRange: bytes=0-1048575\r\n\r\n",
        os.urandom(512),
    ]
    for ask in asks:
        got = bytearray()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.settimeout(1.0)
            probe.connect(("127.0.0.1", port))
            probe.sendall(ask)
            while len(got) < 1 << 20 and (piece := probe.recv(1 << 16)):
                got += piece
        if bytes.fromhex(secret) in got or got.startswith((b"HTTP/1.1 200", b"HTTP/1.1 206")):
            found.append(bytes(got))
    return found


def _holds(port: int, count: int) -> list[socket.socket]:
    """Return open connections that sent half a request or nothing."""
    held = []
    for number in range(count):
        probe = socket.socket()
        probe.settimeout(1.0)
        try:
            probe.connect(("127.0.0.1", port))
            if number % 2:
                probe.sendall(b"GET / HTTP/1.1\r\nHost: ")
            held.append(probe)
        except OSError:
            probe.close()
    return held


def _looks_into(pid: int) -> list[str]:
    """Return which descriptors and memory of a process another user can list, open or map."""
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/fd/{fd}", "rb"):
                found.append(f"opened descriptor {fd} of process {pid}")
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "rb"):
        found.append(f"opened the memory of process {pid}")
    return found
