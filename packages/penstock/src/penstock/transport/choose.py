"""Registration of transports, the ones that this process has open, and the choice between them for a peer.

In: a `TransportKind`; the device of some memory, the transports allowed, where a peer is. Out: registrations of memory,
and the nearest transport that both ends have, with the reason against each nearer one.
Not here: how bytes move (the module of each transport), which peer is read (`plan.relay`).

    register_transport(TransportKind(name="wire", open=WireTransport, reach="network", rank=35))

    open_links -> Links --register--> handles, whose descriptors peers get
                       `--choose----> per pair of regions: a transport, the peer's descriptor, why no nearer one
"""

from __future__ import annotations

import contextlib
import functools
import re
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from penstock.arguments import require_type
from penstock.cuda.driver import CudaDriver
from penstock.entry_points import entry_points, load
from penstock.errors import ConfigError, MissingExtra, PlanError
from penstock.lifecycle import Closeable
from penstock.logs import log_named
from penstock.transport.into_device import DEVICE_TARGETS, PinnedTransport, StagedTransport
from penstock.transport.loopback import LoopbackTransport
from penstock.transport.protocol import Descriptor, Filling, Handle, Memory, Reaching, Sweeping, Transport, decode

ENTRY_POINTS = "penstock.transports"
"""Group of entry points in which an installed package names its transports; each is a `TransportKind`.

Reason: both ends of a read need the transport, and members are often other processes than the one that registers it.
"""

Reach = Literal["process", "host", "network"]

_log = log_named("penstock.transport")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSetup:
    """The settings that a transport is opened with.

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


def _any_peer(into: Handle, source: Descriptor) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """The registration of a transport: its name, how to open it, and which peers it reads.

    Attributes:
        name: as in descriptors, reports and `ConnectionSettings.transports`.
        open: opens it for this process; called once. ConfigError or MissingExtra: this process cannot have it, and the
            message is shown where a user asks why.
        reach: the farthest peer whose memory it reads: in this process, on this host, or on any host. A host is one
            boot of one kernel, for one user and one runtime directory: two containers are one host where both mount it.
        rank: the transport with the lowest rank that both ends have is used. Penstock's own: loopback 0, cuda_ipc 10,
            shm 20, nixl 30, http 40.
        unless: returns the reason not to open it with this setup; empty: it is opened.
        unless_peer: returns the reason not to read this memory of a peer into ours, given our handle and the peer's
            descriptor; empty: it is read. The next transport is then tried, and the reason is in reports. Called for
            each pair of regions before the first read, so it must be quick; it is the only place to refuse one peer,
            since an error of `post_read` or `wait` ends the use of the peer by any transport.
    """

    name: str
    open: Callable[[TransportSetup], Transport]
    reach: Reach
    rank: int
    unless: Callable[[TransportSetup], str] = _always
    unless_peer: Callable[[Handle, Descriptor], str] = _any_peer


_lock = threading.Lock()
_kinds: dict[str, TransportKind] = {}


def register_transport(kind: TransportKind) -> None:
    """Register a transport in this process. Call it before this process joins a fleet, which opens the transports.

    Raises:
        ConfigError: the name is none, or another transport has it.
    """
    require_type("kind", kind, TransportKind, "a penstock.transport.TransportKind")
    # These names are of the ways in which bytes of `shm` and `http` reach a device; reports show them as paths.
    if not _NAME.fullmatch(kind.name) or kind.name.startswith(("staged_", "pinned_")):
        hint = "up to 32 lower-case letters, digits and _; staged_ and pinned_ are taken"
        raise ConfigError(f"cannot register a transport called {kind.name!r}: not a name", hint=hint)
    with _lock:
        # The same kind twice is no error: a module that registers may also be named by an entry point.
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


# Imported when opened: ctypes structures, a listener or NIXL's bindings cost time that a process on one host can save.
def _open_cuda_ipc(setup: TransportSetup) -> Transport:
    from penstock.transport.cuda_ipc import CudaIpcTransport

    return CudaIpcTransport()


def _refuse_cuda_ipc(into: Handle, source: Descriptor) -> str:
    from penstock.transport.cuda_ipc import refusal

    return refusal(into, source) or _refuse_shm(into, source)


def _refuse_shm(into: Handle, source: Descriptor) -> str:
    """Return why a peer of this host cannot be read: the previous release sends no descriptors to other containers."""
    from penstock.transport.host_endpoint import is_within_reach

    return "" if is_within_reach(source) else "the peer's release passes no file descriptors"


def _open_shm(setup: TransportSetup) -> Transport:
    from penstock.transport.shm import ShmTransport

    return ShmTransport()


def _open_nixl(setup: TransportSetup) -> Transport:
    from penstock.transport.nixl import NixlTransport

    return NixlTransport.open()


def _unless_nixl(setup: TransportSetup) -> str:
    """Return why NIXL is not used: `http` beats it without RDMA, except for device memory, which `http` cannot reach.

    Over TCP it is no faster, it does not protect memory from a process that has a descriptor, and a holder that was
    stopped until its readers gave up is aborted by UCX when it continues. Source: docs/design/fetch.md.
    """
    if setup.is_named:
        return ""
    if setup.listen is None:
        return "it needs ConnectionSettings(listen=)"
    has_rdma = any(Path("/sys/class/infiniband").glob("*"))
    return "" if has_rdma or Path("/proc/driver/nvidia").exists() else "neither RDMA nor a GPU here"


def _open_http(setup: TransportSetup) -> Transport:
    from penstock.transport.http import HttpTransport

    return HttpTransport.open(listen=setup.listen, tls=setup.tls, trust=setup.trust)


for _built_in in (
    TransportKind(name="loopback", open=lambda setup: LoopbackTransport(), reach="process", rank=0),
    TransportKind(name="cuda_ipc", open=_open_cuda_ipc, reach="host", rank=10, unless_peer=_refuse_cuda_ipc),
    TransportKind(name="shm", open=_open_shm, reach="host", rank=20, unless_peer=_refuse_shm),
    TransportKind(name="nixl", open=_open_nixl, reach="network", rank=30, unless=_unless_nixl),
    TransportKind(name="http", open=_open_http, reach="network", rank=40),
):
    register_transport(_built_in)


class _Route(NamedTuple):
    name: str
    offered_as: str
    """The transport whose descriptor the peer must offer."""
    kind: TransportKind
    """The kind of `offered_as`, which says what can be reached."""


def _routes() -> Iterator[_Route]:
    """Yield each transport followed by those that go by it into the memory of a device, nearest first."""
    for kind in transport_kinds():
        yield _Route(kind.name, kind.name, kind)
        for name, inner in DEVICE_TARGETS.items():
            if inner == kind.name:
                yield _Route(name, inner, kind)


class PeerLinks(Closeable):
    """The transports of one process, each opened once; a context manager.

    Args:
        makers: how to open each, by name, nearest first; a maker that raises is left out, and `refused` says why.

    Attributes:
        transports: the open ones by name, nearest first.
        refused: name -> the reason why this process does not have the transport.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Transport]]) -> None:
        self.transports: dict[str, Transport] = {}
        self.refused: dict[str, str] = {}
        for name, make in makers.items():
            try:
                self.transports[name] = make()
            except (ConfigError, MissingExtra) as error:
                self.refused[name] = str(error.message)
            except BaseException:
                # Those opened so far have listeners and threads, and no caller gets the object to close them.
                self.close()
                raise

    def add_device_targets(self, driver: CudaDriver | None = None) -> None:
        """Let peers' host memory be read into devices too, where there is a CUDA driver, by the transports here.

        Args:
            driver: stands in for the CUDA driver, in tests.
        """
        from penstock.transport.shm import ShmTransport

        for name, inner_name in DEVICE_TARGETS.items():
            inner = self.transports.get(inner_name)
            try:
                if name == "pinned_shm" and isinstance(inner, ShmTransport):
                    self.transports[name] = PinnedTransport(inner, driver)
                elif name != "pinned_shm" and inner is not None:
                    self.transports[name] = StagedTransport(name, inner, driver)
            except ConfigError as error:
                self.refused[name] = error.message

    def reach(self, name: str) -> Reach:
        """Return how far a transport reads; one that fills a device's memory by another, as far as that.

        Raises:
            KeyError: it is not registered.
        """
        transport_kinds()
        return _kinds[DEVICE_TARGETS.get(name, name)].reach

    def register(self, memory: Memory, *, reach: Reach | None = None) -> dict[str, Handle]:
        """Register memory with every transport that can show it to peers.

        Args:
            memory: ours.
            reach: only with transports of this reach; None: with all.

        Raises:
            ConfigError: none can; says why of each.
        """
        handles: dict[str, Handle] = {}
        why = dict(self.refused)
        try:
            for name, transport in self.transports.items():
                if reach is not None and self.reach(name) != reach:
                    continue
                try:
                    handles[name] = transport.register(memory)
                except ConfigError as error:
                    why[name] = error.message
        except BaseException:
            # A handle keeps the memory alive and readable by peers, and the caller never gets it to close it.
            for handle in handles.values():
                handle.close()
            raise
        if not handles:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in why.items())
            raise ConfigError(f"no transport reaches memory on {memory.device}: {reasons}")
        return handles

    def register_into(
        self, memory: Memory, shown: Mapping[str, Handle], *, is_repeated: bool = False
    ) -> dict[str, Handle]:
        """Return handles to read into: those of `register`, and of transports that only fill such memory.

        Args:
            memory: ours.
            shown: of `register`.
            is_repeated: the same peers are read again and again: it pays to pin their memory here.
        """
        handles = dict(shown)
        for name, transport in self.transports.items():
            if name not in handles and isinstance(transport, Filling) and (is_repeated or name != "pinned_shm"):
                with contextlib.suppress(ConfigError):  # it does not reach this kind of memory
                    handles[name] = transport.register_into(memory)
        return handles

    def choose(
        self, ours: Mapping[str, Handle], offered: Mapping[str, bytes], *, same_host: bool, same_process: bool
    ) -> tuple[Transport, Descriptor, str]:
        """Return the nearest transport for a pair of regions, the peer's descriptor, and why no nearer transport.

        Args:
            ours: our region's registrations.
            offered: the peer's descriptors of its region, encoded.
            same_host: whether the peer is on this host.
            same_process: whether it is this very process.

        Raises:
            PlanError: there is none; says why.
            FormatError: a descriptor is malformed.
        """
        why: list[str] = []
        on_host = all(handle.memory.device == "cpu" for handle in ours.values())
        # Not worth a reason: they are for the other kind of memory, or add to one that is named anyway.
        unnamed = {"loopback", "pinned_shm", "cuda_ipc" if on_host else "shm", *(DEVICE_TARGETS if on_host else ())}
        for name, offered_as, kind in _routes():
            if (kind.reach != "network" and not same_host) or (kind.reach == "process" and not same_process):
                continue
            if name in ours and offered_as in offered:
                descriptor = decode(offered[offered_as])
                # The name comes from the peer too: by another's descriptor a transport would decode a foreign payload.
                if descriptor.transport != offered_as:
                    raise PlanError(f"a descriptor offered as {offered_as} is of {descriptor.transport}")
                refusal = kind.unless_peer(ours[name], descriptor)
                if not refusal:
                    return self.transports[name], descriptor, "; ".join(why)
                why.append(f"{name}: {refusal}")
            elif name not in unnamed:
                why.append(f"{name}: {self._missing(name, ours)}")
        raise PlanError(f"no transport reaches the peer: {'; '.join(why)}", hint="give both ends one in common")

    def reach_device(self, device: str, regions: Iterable[Mapping[str, bytes]]) -> None:
        """Map a peer's device memory for a device of ours, before there is memory to read into.

        The first read, of the same registrations, then does not wait for it. Nothing happens for memory that the
        device cannot map.

        Raises:
            PenstockError: as `Transport.post_read`: the choice for a read, which comes later, says what is wrong.
        """
        transport = self.transports.get("cuda_ipc")
        if isinstance(transport, Reaching):
            for offered in regions:
                if "cuda_ipc" in offered:
                    transport.reach(device, decode(offered["cuda_ipc"]))

    def _missing(self, name: str, ours: Mapping[str, Handle]) -> str:
        """Return which side lacks a transport, and why."""
        if name in ours:
            return f"the peer does not offer {DEVICE_TARGETS.get(name, 'it')}"
        return "it does not reach our memory" if name in self.transports else self.refused.get(name, "not opened here")

    def sweep(self) -> None:
        """Let go of memory of peers that are gone. A read does so too; call it while nothing is read."""
        for transport in self.transports.values():
            if isinstance(transport, Sweeping):
                transport.sweep()

    def close(self) -> None:
        """Close every transport. Idempotent."""
        # Last opened first: a transport that goes by another ends before it.
        for transport in reversed(self.transports.values()):
            transport.close()


def open_links(
    *,
    only: Sequence[str] | None = None,
    listen: str | None = None,
    tls: ssl.SSLContext | None = None,
    trust: ssl.SSLContext | None = None,
) -> PeerLinks:
    """Open the transports of this process.

    Args:
        only: names allowed; None: all that work here.
        listen: address where other hosts reach this one; None: this host only, and no transport that crosses hosts
            but `http` on a Unix socket.
        tls: what `http` serves by; None: plain.
        trust: how readers over `http` check a peer's certificate, and what they show.

    Raises:
        ConfigError: no transport has one of the names.
    """
    kinds = {kind.name: kind for kind in transport_kinds()}
    broken = broken_transports()
    unknown = set(only or ()) - set(kinds)
    # The reason of a broken package first: its user would look for a wrong name otherwise.
    if unknown & set(broken):
        raise ConfigError("; ".join(broken[name] for name in sorted(unknown & set(broken))))
    if unknown:
        raise ConfigError(f"no transport is called {', '.join(sorted(unknown))}", hint=f"there are {', '.join(kinds)}")
    setup = TransportSetup(listen=listen, tls=tls, trust=trust, is_named=only is not None)
    refused = dict(broken)
    makers: dict[str, Callable[[], Transport]] = {}
    for name, kind in kinds.items():
        if only is not None and name not in only:
            refused[name] = "not among the transports allowed"
        elif why := kind.unless(setup):
            refused[name] = why
        else:
            makers[name] = functools.partial(kind.open, setup)
    links = PeerLinks(makers)
    links.add_device_targets()
    links.refused |= refused
    return links
