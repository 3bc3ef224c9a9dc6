"""Transports by name: how far each reaches, how it is opened, and their registration.

In: a `TransportKind`. Out: the kinds that this process can open, nearest first.
Not here: opening and choosing (`choose`), reading (`protocol`).

    register_transport(TransportKind(name="wire", open=WireTransport, reach="network", rank=35))
"""

from __future__ import annotations

import functools
import logging
import re
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.arguments import require_type
from penstock.entry_points import entry_points, load
from penstock.errors import ConfigError
from penstock.transport.loopback import LoopbackTransport
from penstock.transport.protocol import Transport

ENTRY_POINTS = "penstock.transports"
"""Group of entry points in which an installed package names its transports; each is a `TransportKind`.

Reason: both ends of a read need the transport, and members are often other processes than the one that registers it.
"""

Reach = Literal["process", "host", "network"]

_log = logging.getLogger("penstock.transport")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSetup:
    """What a transport is opened with.

    Attributes:
        listen: `host:port` at which other hosts reach this one; None: this host only.
        tls: context of the side that serves; None: plain.
        trust: context of the side that reads; None: as the system checks certificates.
        is_named: the user allowed this transport by name.
    """

    listen: str | None = None
    tls: ssl.SSLContext | None = None
    trust: ssl.SSLContext | None = None
    is_named: bool = False


def _always(setup: TransportSetup) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """One way to read a peer's memory.

    Attributes:
        name: as in descriptors, reports and `ConnectionSettings.transports`.
        open: opens it for this process; called once. ConfigError or MissingExtra: this process cannot have it, and the
            message is shown where a user asks why.
        reach: the farthest peer whose memory it reads: in this process, on this host, or on any host. A host is one
            boot of one kernel, for one user and one PID namespace: two containers are two hosts.
        rank: the transport with the lowest rank that both ends have is used. Penstock's own: loopback 0, cuda_ipc 10,
            shm 20, nixl 30, http 40.
        unless: returns the reason not to open it with this setup; empty: it is opened.
    """

    name: str
    open: Callable[[TransportSetup], Transport]
    reach: Reach
    rank: int
    unless: Callable[[TransportSetup], str] = _always


_lock = threading.Lock()
_kinds: dict[str, TransportKind] = {}


def register_transport(kind: TransportKind) -> None:
    """Register a transport in this process. Call it before this process joins a fleet, which opens the transports.

    Raises:
        ConfigError: the name is none, or another transport has it.
    """
    require_type("kind", kind, TransportKind, "a penstock.transport.TransportKind")
    if not _NAME.fullmatch(kind.name) or kind.name.startswith(("staged_", "pinned_")):
        hint = "up to 32 lower-case letters, digits and _; staged_ and pinned_ are taken"
        raise ConfigError(f"cannot register a transport called {kind.name!r}: not a name", hint=hint)
    with _lock:
        if _kinds.setdefault(kind.name, kind) != kind:
            raise ConfigError(f"cannot register a transport called {kind.name!r}: there is one")


def transport_kinds() -> list[TransportKind]:
    """Return the transports that are registered here or by installed packages, nearest first."""
    broken_transports()
    return sorted(_kinds.values(), key=lambda kind: kind.rank)


@functools.cache
def broken_transports() -> dict[str, str]:
    """Register the transports of installed packages, and return why some cannot be: name -> reason.

    A package that is broken must not keep this process from the other transports.
    """
    broken: dict[str, str] = {}
    for entry in entry_points(ENTRY_POINTS):
        try:
            kind = load(entry)
            if not isinstance(kind, TransportKind) or kind.name != entry.name:
                raise ConfigError(f"the entry point {entry.name} of {ENTRY_POINTS} is {kind!r}, not its TransportKind")
            register_transport(kind)
        except ConfigError as error:
            broken[entry.name] = error.message
            _log.warning("%s", error)
    return broken


def _open_cuda_ipc(setup: TransportSetup) -> Transport:
    from penstock.transport.cuda_ipc import CudaIpcTransport

    return CudaIpcTransport()


def _open_shm(setup: TransportSetup) -> Transport:
    from penstock.transport.shm import ShmTransport

    return ShmTransport()


def _open_nixl(setup: TransportSetup) -> Transport:
    from penstock.transport.nixl import NixlTransport

    return NixlTransport()


def _unless_nixl(setup: TransportSetup) -> str:
    """Return why NIXL is not used: `http` beats it without RDMA, except for device memory, which `http` cannot reach.

    Over TCP it is no faster, it does not protect memory from a process that has a descriptor, and a holder that was
    stopped until its readers gave up is aborted by UCX when it continues. Source: docs/design/002-transport.md.
    """
    if setup.is_named:
        return ""
    if setup.listen is None:
        return "it needs ConnectionSettings(listen=)"
    has_rdma = any(Path("/sys/class/infiniband").glob("*"))
    return "" if has_rdma or Path("/proc/driver/nvidia").exists() else "neither RDMA nor a GPU here"


def _open_http(setup: TransportSetup) -> Transport:
    from penstock.transport.http import HttpTransport

    return HttpTransport(listen=setup.listen, tls=setup.tls, trust=setup.trust)


for _built_in in (
    TransportKind(name="loopback", open=lambda setup: LoopbackTransport(), reach="process", rank=0),
    TransportKind(name="cuda_ipc", open=_open_cuda_ipc, reach="host", rank=10),
    TransportKind(name="shm", open=_open_shm, reach="host", rank=20),
    TransportKind(name="nixl", open=_open_nixl, reach="network", rank=30, unless=_unless_nixl),
    TransportKind(name="http", open=_open_http, reach="network", rank=40),
):
    register_transport(_built_in)
