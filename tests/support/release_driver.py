"""Processes of a release, forked from one: drivers, which answer calls of the public API, and `penstock` commands.

Requests for processes arrive on the socket named on the command line, and their process ids are returned. A driver
receives lines of `{"call": function, "arguments": {...}}` and sends lines of `{"result": ...}` or `{"error": type,
"message": ...}`. It uses only the public API that both releases have, and no other file of this tree.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import json
import os
import signal
import socket
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from blake3 import blake3

import penstock as ps
from penstock.hub.messages import PROTOCOL

# Public modules of this release. In the previous release their names are at the top, and a cache is `Keeper`.
_CACHE: Any
_HUB: Any
_IS_PREVIOUS = hasattr(ps, "Keeper")
_CACHE, _HUB = (ps, ps) if _IS_PREVIOUS else (ps.cache, ps.hub)
_SERVER = "penstock.hub" if _IS_PREVIOUS else "penstock_hub"

IMPORTS = (
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "anyio._backends._asyncio",
    "redis",
    "penstock.cli.main",
    "penstock.hub.local_hub",
    f"{_SERVER}.server",
    f"{_SERVER}.app",
    f"{_SERVER}.metrics",
    "penstock.sync.publish.publisher",
    "penstock.sync.receive.subscriber",
    "penstock.transport.http",
    "penstock.transport.shm",
)
"""Modules that most processes need."""
_open: dict[str, Any] = {}
"""Fleets, publishers, subscribers and attached models, by the name from the test."""
_tensors: dict[str, dict[str, torch.Tensor]] = {}
_published: dict[str, Future[Any]] = {}
_thread = ThreadPoolExecutor(1)


def about() -> dict[str, str]:
    """Return the release's description."""
    return {"file": str(ps.__file__), "protocol": PROTOCOL}


def set_environ(values: dict[str, str]) -> None:
    os.environ.update(values)


def digests(tensors: dict[str, torch.Tensor]) -> str:
    digest = blake3()
    for name in sorted(tensors):
        flat = tensors[name].detach().contiguous().view(-1).view(torch.uint8)
        digest.update(name.encode()).update(flat.numpy().data)
    return digest.hexdigest()


def join(name: str, model: str, connection: dict[str, Any]) -> str:
    """Join a fleet and return the member's id."""
    fleet = _open[name] = ps.join(model, connection=ps.ConnectionSettings(**connection))
    return fleet.member.id


def fetch(name: str, fallback: str | None = None) -> dict[str, Any]:
    """Fetch the model of a fleet and serve it from then on."""
    weights: dict[str, torch.Tensor] = {}
    report = _open[name].fetch(weights, fallback=fallback, **_waiting(20.0))
    return {
        "digests": digests(weights),
        "paths": dict(report.nbytes_by_path),
        "storage_bytes": report.storage_bytes,
        "faults": list(report.faults),
        "revision": report.revision,
    }


def _waiting(seconds: float) -> dict[str, float]:
    """Return the timeout argument under the name that this release has for it."""
    return {"timeout_s" if "timeout_s" in inspect.signature(_CACHE.attach).parameters else "wait_s": seconds}


def _in_arena(name: str) -> dict[str, Any]:
    """Return the arguments that move tensors into an arena, in the form that this release has for them."""
    kind = getattr(ps.sync, name, None)
    return {"arena": True} if kind is None else {"settings": kind(arena=True)}


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version of a sync."""
    chance = torch.Generator().manual_seed(version)
    return {f"layers.{layer}.weight": torch.randn(64, 96, generator=chance) for layer in range(4)}


def publisher(name: str, sync: str, connection: dict[str, Any], options: dict[str, Any]) -> str:
    _tensors[name] = weights_of(0)
    settings = ps.ConnectionSettings(**connection)
    opened = _open[name] = ps.publisher(
        sync, _tensors[name], connection=settings, **_in_arena("PublisherSettings"), **options
    )
    return opened.member.id


def publish(name: str, version: int, subscribers: int = 0) -> None:
    """Start to publish a version in a thread, once `subscribers` have joined. See `published`."""
    _open[name].wait_subscribers(subscribers)
    for tensor, new in zip(_tensors[name].values(), weights_of(version).values(), strict=True):
        tensor.copy_(new)
    # Use a thread, because a live publish waits for the subscribers, and one of them may be in this process.
    _published[name] = _thread.submit(_open[name].publish, version)


def published(name: str) -> dict[str, Any]:
    """Wait for the last publish and return its outcome."""
    report = _published.pop(name).result(30)
    return {"committed": list(report.committed), "late": list(report.late), "failed": dict(report.failed)}


def subscriber(name: str, sync: str, connection: dict[str, Any], options: dict[str, Any]) -> str:
    dtype = torch.bfloat16 if "transforms" in options else torch.float32
    _tensors[name] = {tensor: torch.zeros_like(value, dtype=dtype) for tensor, value in weights_of(0).items()}
    settings = ps.ConnectionSettings(**connection)
    opened = _open[name] = ps.subscriber(
        sync, _tensors[name], connection=settings, **_in_arena("SubscriberSettings"), **options
    )
    return opened.member.id


def update(name: str, version: int) -> dict[str, Any]:
    """Wait for a version and update to it."""
    # Earlier releases call it `wait_version`.
    wait = getattr(_open[name], "wait", None) or _open[name].wait_version
    wait(version, timeout_s=30.0)
    report = _open[name].update(version)
    return {
        "version": _open[name].version,
        "digests": digests(_tensors[name]),
        "sources": dict(report.sources),
        "path": report.path,
        "attempts": report.attempts,
    }


def attach(name: str, model: str, hub: str | None = None) -> dict[str, Any]:
    attached = _open[name] = _CACHE.attach(model, connection=hub, **_waiting(20.0))
    return {"digests": digests(dict(attached)), "path": attached.report.path, "verified": attached.report.verified}


def standing(name: str) -> str:
    attached = _open[name]
    return attached.lease_state if hasattr(attached, "lease_state") else attached.standing


def check(name: str) -> None:
    _open[name].check()


def status(model: str | None = None, hub: str | None = None) -> dict[str, list[str]]:
    """Return each member's whole models."""
    members = _HUB.status(model, connection=hub).members
    return {
        member.member: [held.identity.model for held in member.holdings if held.state == "whole"] for member in members
    }


def why(model: str, hub: str | None = None) -> list[str]:
    return list(_HUB.why(model, connection=hub).lines)


def close(name: str) -> None:
    """Close the object with this name."""
    opened = _open.pop(name)
    _tensors.pop(name, None)
    (opened.leave if hasattr(opened, "leave") else opened.close)()


def close_all() -> None:
    """Close all objects, the latest first."""
    for name in reversed(list(_open)):
        close(name)


def answer(connection: socket.socket) -> None:
    """Answer calls until the socket is closed."""
    torch.set_num_threads(1)
    with connection, connection.makefile("rw") as lines:
        for line in lines:
            request = json.loads(line)
            try:
                answer = {"result": globals()[request["call"]](**request["arguments"])}
            except ps.PenstockError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            print(json.dumps(answer), file=lines, flush=True)


def run(words: list[str], environ: dict[str, str], fd: int) -> int:
    """Run a driver on this socket, or a `penstock` command if `words` are given. Return the exit code."""
    os.environ.update(environ)
    if not words:
        answer(socket.socket(fileno=fd))
        return 0
    from penstock.cli.main import run as command

    for number in (1, 2):
        os.dup2(fd, number)
    os.close(fd)
    try:
        command(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def main() -> None:
    """Fork a process for each request `{"words": ..., "environ": ...}` with a socket. Reap it at `{"reap": pid}`.

    Imports take seconds, so they are done once here. This process has no threads, because a fork would not copy them.
    """
    for name in IMPORTS:
        importlib.import_module(name)
    parent = os.getpid()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        while True:
            raw, fds, _, _ = socket.recv_fds(requests, 1 << 16, 1)
            if not raw:
                return
            request = json.loads(raw)
            if "reap" in request:
                code = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
                requests.send(str(code).encode())
                continue
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    # No process outlives the test, however the test ends. Source: Linux, PR_SET_PDEATHSIG.
                    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
                    requests.close()
                    if os.getppid() == parent:
                        code = run(request["words"], request["environ"], *fds)
                    sys.stdout.flush()
                finally:
                    if code:
                        traceback.print_exc()
                    os._exit(code)
            os.close(fds[0])
            requests.send(str(pid).encode())


if __name__ == "__main__":
    main()
