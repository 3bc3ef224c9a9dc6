"""Registration of transports, the transports that this process has open, and the choice of a transport for a peer."""

from __future__ import annotations

import contextlib
import functools
import re
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.arguments import require_type
from penstock.cuda.driver import CudaDriver
from penstock.entry_points import entry_points, install_hint, load
from penstock.errors import ConfigError, MissingExtra, PlanError
from penstock.lifecycle import Closeable
from penstock.logs import log_named
from penstock.transport.host_endpoint import is_within_reach
from penstock.transport.into_device import DERIVED, HOST_TARGET, IntoHost, PinnedTransport, StagedTransport
from penstock.transport.loopback import LoopbackTransport
from penstock.transport.protocol import Descriptor, Filling, Handle, Memory, Reaching, Sweeping, Transport, decode
from penstock.transport.shm import ShmTransport

ENTRY_POINTS = "penstock.transports"
"""Group of entry points in which an installed package lists its transports. Each entry is a `TransportKind`."""
Reach = Literal["process", "host", "network"]
_log = log_named("penstock.transport")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


class TransportSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which a transport is opened.

    Attributes:
        listen: `host:port` at which other hosts reach this host, or None for this host only.
        tls: TLS context for serving, or None for no TLS.
        trust: TLS context for reading, or None for the system's trusted certificates.
        is_named: whether the user allowed this transport by name.
    """

    listen: str | None = None
    tls: ssl.SSLContext | None = None
    trust: ssl.SSLContext | None = None
    is_named: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """Registration of a transport: its name, how to open it, and which peers it can read.

    Attributes:
        name: name in descriptors, reports and `ConnectionSettings.transports`.
        open: function that opens the transport for this process, called once. `open` raises ConfigError or
            MissingExtra, with a message for the user, if this process cannot use the transport.
        reach: the farthest peer whose memory the transport reads: in this process, on this host, or on any host. A host
            is one boot of one kernel, for one user and one runtime directory. Two containers are one host if both mount
            the same runtime directory.
        rank: of the transports that both processes have, the one with the lowest rank is used. Penstock's transports
            have loopback 0, cuda_ipc 10, shm 20, nixl 30 and http 40.
        unless: returns the reason not to open the transport with this setup, or an empty string.
        unless_peer: returns the reason not to read this memory of a peer, given our handle and the peer's descriptor,
            or an empty string. If `unless_peer` returns a reason, the next transport is tried. `unless_peer` must be
            quick, since it is called for each pair of regions before the first read. An error of `post_read` or `wait`
            ends the use of the peer with any transport.
    """

    name: str
    open: Callable[[TransportSetup], Transport]
    reach: Reach
    rank: int
    unless: Callable[[TransportSetup], str] = lambda setup: ""
    unless_peer: Callable[[Handle, Descriptor], str] = lambda into, source: ""


_lock = threading.Lock()
_kinds: dict[str, TransportKind] = {}


def register_transport(kind: TransportKind) -> None:
    """Register a transport in this process. Call this before joining a fleet, because joining opens the transports.

    Raises:
        ConfigError: the name is malformed or used by a different transport.
    """
    require_type("kind", kind, TransportKind, "a penstock.transport.TransportKind")
    # Reports use these prefixes for the paths on which `shm` and `http` reach a device.
    if not _NAME.fullmatch(kind.name) or kind.name.startswith(("staged_", "pinned_")):
        hint = "use up to 32 lower-case letters, digits and _, without the prefixes staged_ and pinned_"
        raise ConfigError(f"cannot register the transport {kind.name!r}: its name is malformed", hint=hint)
    with _lock:
        # Registering the same kind again is allowed, since an entry point may name a module that registers it.
        if _kinds.setdefault(kind.name, kind) != kind:
            raise ConfigError(f"cannot register the transport {kind.name!r}: its name is taken")


def transport_kinds() -> list[TransportKind]:
    """Return the transports that are registered here or by installed packages, nearest first."""
    broken_transports()
    return sorted(_kinds.values(), key=lambda kind: kind.rank)


@functools.cache
def broken_transports() -> dict[str, str]:
    """Register the transports of installed packages. Return by name why a transport cannot be registered."""
    broken: dict[str, str] = {}
    for entry in entry_points(ENTRY_POINTS):
        try:
            kind = load(entry)
            if not isinstance(kind, TransportKind) or kind.name != entry.name:
                raise ConfigError(
                    f"the entry point {entry.name} of {ENTRY_POINTS} is {kind!r}, not a TransportKind with this name"
                )
            register_transport(kind)
        except ConfigError as error:
            broken[entry.name] = error.message
            _log.warning("%s", error)
    return broken


# Import on use, since cuda_ipc and a listener take 30 to 150 ms.
def _open_cuda_ipc(setup: TransportSetup) -> Transport:
    from penstock.transport.cuda_ipc import CudaIpcTransport

    return CudaIpcTransport()


def _refuse_cuda_ipc(into: Handle, source: Descriptor) -> str:
    from penstock.transport.cuda_ipc import refusal

    return refusal(into, source) or _refuse_shm(into, source)


def _refuse_shm(into: Handle, source: Descriptor) -> str:
    return "" if is_within_reach(source) else "the peer's release sends no file descriptors"


def _open_http(setup: TransportSetup) -> Transport:
    from penstock.transport.http import HttpTransport

    return HttpTransport.open(listen=setup.listen, tls=setup.tls, trust=setup.trust)


for _built_in in (
    TransportKind(name="loopback", open=lambda setup: LoopbackTransport(), reach="process", rank=0),
    TransportKind(name="cuda_ipc", open=_open_cuda_ipc, reach="host", rank=10, unless_peer=_refuse_cuda_ipc),
    TransportKind(name="shm", open=lambda setup: ShmTransport(), reach="host", rank=20, unless_peer=_refuse_shm),
    TransportKind(name="http", open=_open_http, reach="network", rank=40),
):
    register_transport(_built_in)


def _routes() -> Iterator[tuple[str, str, TransportKind]]:
    """Yield the name of each transport, nearest first, with the transport whose descriptor the peer must offer."""
    for kind in transport_kinds():
        yield kind.name, kind.name, kind
        yield from ((name, inner, kind) for name, inner in DERIVED.items() if inner == kind.name)


class PeerLinks(Closeable):
    """Transports of one process by name, nearest first. `refused` states why other transports could not be opened."""

    def __init__(self, makers: Mapping[str, Callable[[], Transport]]) -> None:
        self.transports: dict[str, Transport] = {}
        self.refused: dict[str, str] = {}
        for name, make in makers.items():
            try:
                self.transports[name] = make()
            except (ConfigError, MissingExtra) as error:
                self.refused[name] = str(error.message)
            except BaseException:
                # The open transports have listeners and threads, and the caller receives no object to close.
                self.close()
                raise

    def add_derived(self, driver: CudaDriver | None = None) -> None:
        """If there is a CUDA driver, let these transports also read between host memory and devices."""
        for name, inner_name in DERIVED.items():
            inner = self.transports.get(inner_name)
            try:
                if name == "pinned_shm" and isinstance(inner, ShmTransport):
                    self.transports[name] = PinnedTransport(inner, driver)
                elif name != "pinned_shm" and inner is not None:
                    kind = IntoHost if name == HOST_TARGET else StagedTransport
                    self.transports[name] = kind(name, inner, driver)
            except ConfigError as error:
                self.refused[name] = error.message

    def reach(self, name: str) -> Reach:
        """Return the reach of a transport, or of the transport from which it is derived."""
        transport_kinds()
        return _kinds[DERIVED.get(name, name)].reach

    def register(self, memory: Memory, *, reach: Reach | None = None) -> dict[str, Handle]:
        """Register memory with all transports of this reach that accept it. Raise ConfigError if no transport does."""
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
            # A handle keeps the memory alive and readable by peers, and the caller could not close it.
            for handle in handles.values():
                handle.close()
            raise
        if not handles:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in why.items())
            raise ConfigError(f"no transport reaches memory on {memory.device}: {reasons}")
        return handles

    def register_into(
        self, memory: Memory, registered: Mapping[str, Handle], *, is_repeated: bool = False
    ) -> dict[str, Handle]:
        """Return `registered` with handles of transports that can only fill the memory. Pin if `is_repeated`."""
        handles = dict(registered)
        for name, transport in self.transports.items():
            # `cuda_ipc` fills the pinned buffers of `staged_cuda_ipc` only.
            others = {*handles, "cuda_ipc"} if is_repeated else {*handles, "cuda_ipc", "pinned_shm"}
            if name not in others and isinstance(transport, Filling):
                with contextlib.suppress(ConfigError):  # the transport does not reach this kind of memory
                    handles[name] = transport.register_into(memory)
        return handles

    def choose(
        self, ours: Mapping[str, Handle], offered: Mapping[str, bytes], *, same_host: bool, same_process: bool
    ) -> tuple[Transport, Descriptor, str]:
        """Return the nearest transport for two regions, its descriptor, and the reasons against nearer transports.

        Args:
            ours: registrations of our region.
            offered: encoded descriptors of the peer's region, whose decoding may raise FormatError.

        Raises:
            PlanError: no transport reaches the peer, for the reasons in the message.
        """
        why: list[str] = []
        on_host = all(handle.memory.device == "cpu" for handle in ours.values())
        # Give no reason for transports that are for the other kind of memory, or that extend a refused transport.
        unnamed = {"loopback", "shm", "pinned_shm", HOST_TARGET}
        if on_host:
            unnamed = {"loopback", "cuda_ipc", *DERIVED} - {HOST_TARGET if "cuda_ipc" in offered else ""}
        for name, offered_as, kind in _routes():
            if (kind.reach != "network" and not same_host) or (kind.reach == "process" and not same_process):
                continue
            if name in ours and offered_as in offered:
                descriptor = decode(offered[offered_as])
                # The peer also chooses the name. With a wrong name, a transport would decode a foreign payload.
                if descriptor.transport != offered_as:
                    raise PlanError(f"the peer offered a {descriptor.transport} descriptor as one for {offered_as}")
                refusal = kind.unless_peer(ours[name], descriptor)
                if not refusal:
                    return self.transports[name], descriptor, "; ".join(why)
                why.append(f"{name}: {refusal}")
            elif name not in unnamed:
                why.append(f"{name}: {self._missing(name, ours)}")
        raise PlanError(
            f"no transport reaches the peer: {'; '.join(why)}", hint="allow the same transport in both processes"
        )

    def reach_device(self, device: str, regions: Iterable[Mapping[str, bytes]]) -> None:
        """Map a peer's device memory, so that the first read does not wait for the mapping. Raises like `post_read`."""
        transport = self.transports.get("cuda_ipc")
        if isinstance(transport, Reaching):
            for offered in regions:
                if "cuda_ipc" in offered:
                    transport.reach(device, decode(offered["cuda_ipc"]))

    def _missing(self, name: str, ours: Mapping[str, Handle]) -> str:
        if name in ours:
            return f"the peer does not offer {DERIVED.get(name, 'it')}"
        if name in self.transports:
            return "it cannot reach our memory"
        return self.refused.get(name, "it is not open in this process")

    def sweep(self) -> None:
        """Release the memory of peers that are gone, as each read also does."""
        for transport in self.transports.values():
            if isinstance(transport, Sweeping):
                transport.sweep()

    def close(self) -> None:
        """Close every transport. Idempotent."""
        # Close in reverse order, so that a transport that uses another is closed first.
        for transport in reversed(self.transports.values()):
            transport.close()


def open_links(
    *,
    only: Sequence[str] | None = None,
    listen: str | None = None,
    tls: ssl.SSLContext | None = None,
    trust: ssl.SSLContext | None = None,
) -> PeerLinks:
    """Open the transports of this process. Raises ConfigError if `only` has an unknown name."""
    kinds = {kind.name: kind for kind in transport_kinds()}
    broken = broken_transports()
    unknown = set(only or ()) - set(kinds)
    # Report a broken package first, or its user would suspect a wrong name.
    if unknown & set(broken):
        raise ConfigError("; ".join(broken[name] for name in sorted(unknown & set(broken))))
    if unknown:
        more = f", or install nixl: {install_hint('nixl')}" if "nixl" in unknown else ""
        hint = f"use one of {', '.join(kinds)}{more}"
        raise ConfigError(f"there is no transport {', '.join(sorted(unknown))}", hint=hint)
    setup = TransportSetup(listen=listen, tls=tls, trust=trust, is_named=only is not None)
    refused = dict(broken)
    makers: dict[str, Callable[[], Transport]] = {}
    for name, kind in kinds.items():
        if only is not None and name not in only:
            refused[name] = "it is not among the allowed transports"
        elif why := kind.unless(setup):
            refused[name] = why
        else:
            makers[name] = functools.partial(kind.open, setup)
    links = PeerLinks(makers)
    links.add_derived()
    links.refused |= refused
    return links
