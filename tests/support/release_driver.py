"""A process of a release that answers calls of the public API, for this release and the previous one.

In: `{"call": function, "arguments": {...}}` on the descriptor named on the command line. Out: `{"result": ...}` or
`{"error": type, "message": ...}`.
Not here: which release runs it (`tests.support.releases`).

Only the public API is used, as far as both releases have it, and nothing of this tree but this file.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from blake3 import blake3

import penstock as ps
from penstock.hub.messages import PROTOCOL

_open: dict[str, Any] = {}
"""Fleets, publishers, subscribers and attached models, by the name that the test chose."""
_tensors: dict[str, dict[str, torch.Tensor]] = {}
_published: dict[str, Future[Any]] = {}
_thread = ThreadPoolExecutor(1)


def about() -> dict[str, str]:
    """Return which release this is."""
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
    """Join a fleet; return the member's id."""
    fleet = _open[name] = ps.join(model, connection=ps.ConnectionSettings(**connection))
    return fleet.member.id


def fetch(name: str, fallback: str | None = None) -> dict[str, Any]:
    """Fetch the model of a fleet and serve it from then on."""
    weights: dict[str, torch.Tensor] = {}
    report = _open[name].fetch(weights, fallback=fallback, wait_s=20.0)
    return {
        "digests": digests(weights),
        "paths": dict(report.nbytes_by_path),
        "storage_bytes": report.storage_bytes,
        "faults": list(report.faults),
        "revision": report.revision,
    }


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version of a sync."""
    chance = torch.Generator().manual_seed(version)
    return {f"layers.{layer}.weight": torch.randn(64, 96, generator=chance) for layer in range(4)}


def publisher(name: str, sync: str, connection: dict[str, Any], options: dict[str, Any]) -> str:
    _tensors[name] = weights_of(0)
    settings = ps.ConnectionSettings(**connection)
    opened = _open[name] = ps.publisher(sync, _tensors[name], connection=settings, arena=True, **options)
    return opened.member.id


def publish(name: str, version: int, subscribers: int = 0) -> None:
    """Begin to publish a version in a thread, once `subscribers` of them joined; see `published`."""
    _open[name].wait_subscribers(subscribers)
    for tensor, new in zip(_tensors[name].values(), weights_of(version).values(), strict=True):
        tensor.copy_(new)
    # In a thread: a live publish waits for the subscribers, and one of them may be in this process.
    _published[name] = _thread.submit(_open[name].publish, version)


def published(name: str) -> dict[str, Any]:
    """Return the outcome of the publish that was begun last, once it is over."""
    report = _published.pop(name).result(30)
    return {"committed": list(report.committed), "late": list(report.late), "failed": dict(report.failed)}


def subscriber(name: str, sync: str, connection: dict[str, Any], options: dict[str, Any]) -> str:
    dtype = torch.bfloat16 if "transforms" in options else torch.float32
    _tensors[name] = {tensor: torch.zeros_like(value, dtype=dtype) for tensor, value in weights_of(0).items()}
    settings = ps.ConnectionSettings(**connection)
    opened = _open[name] = ps.subscriber(sync, _tensors[name], connection=settings, arena=True, **options)
    return opened.member.id


def update(name: str, version: int) -> dict[str, Any]:
    """Wait for a version and take it."""
    _open[name].wait_version(version, timeout_s=30.0)
    report = _open[name].update(version)
    return {
        "version": _open[name].version,
        "digests": digests(_tensors[name]),
        "sources": dict(report.sources),
        "path": report.path,
        "attempts": report.attempts,
    }


def attach(name: str, model: str, hub: str | None = None) -> dict[str, Any]:
    attached = _open[name] = ps.attach(model, connection=hub, wait_s=20.0)
    return {"digests": digests(dict(attached)), "path": attached.report.path, "verified": attached.report.verified}


def standing(name: str) -> str:
    return _open[name].standing


def check(name: str) -> None:
    _open[name].check()


def status(model: str | None = None, hub: str | None = None) -> dict[str, list[str]]:
    """Return each member's whole models."""
    members = ps.status(model, connection=hub).members
    return {
        member.member: [held.identity.model for held in member.holdings if held.state == "whole"] for member in members
    }


def why(model: str, hub: str | None = None) -> list[str]:
    return list(ps.why(model, connection=hub).lines)


def close(name: str) -> None:
    """End what has this name."""
    opened = _open.pop(name)
    _tensors.pop(name, None)
    (opened.leave if hasattr(opened, "leave") else opened.close)()


def close_all() -> None:
    """End everything, the latest first."""
    for name in reversed(list(_open)):
        close(name)


def main() -> None:
    """Answer calls until the socket is closed."""
    torch.set_num_threads(1)
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rw") as lines:
        for line in lines:
            request = json.loads(line)
            try:
                answer = {"result": globals()[request["call"]](**request["arguments"])}
            except ps.PenstockError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            print(json.dumps(answer), file=lines, flush=True)


if __name__ == "__main__":
    main()
