"""Open the transports of this process, and choose the nearest one that both ends have, with the reason.

In: the device of the memory, names allowed, where the peer is. Out: registrations, a choice with its reason.
Not here: how a transport moves bytes (its own room), which peer (`plan.relay`, `fleet`).

Order: `loopback` (one process), `cuda_ipc` and `shm` (one host), `nixl` (RDMA, device memory), `http` (everywhere).
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.closing import Closing
from penstock.cuda.driver import CudaDriver
from penstock.errors import ConfigError, MissingExtra, PlanError
from penstock.transport.descriptor import Descriptor, decode
from penstock.transport.loopback import LoopbackTransport
from penstock.transport.protocol import Filling, Handle, Memory, Transport
from penstock.transport.staged import INNER, StagedTransport

NAMES = ("loopback", "cuda_ipc", "shm", "nixl", "http")
"""Nearest first."""


@runtime_checkable
class Sweeping(Protocol):
    """A transport that keeps peers' memory mapped between reads."""

    def sweep(self) -> None:
        """Let go of memory of peers that are gone or gave it up."""
        ...


@runtime_checkable
class Reaching(Protocol):
    """A transport whose first read of a peer's memory maps it, which takes milliseconds."""

    def reach(self, into: Handle, source: Descriptor) -> None:
        """Map it now, so that the first read does not wait for it."""
        ...


ONE_HOST = frozenset({"loopback", "cuda_ipc", "shm", "pinned_shm", "staged_shm"})
ORDER = ("loopback", "cuda_ipc", "shm", "pinned_shm", "staged_shm", "nixl", "http", "staged_http")
"""Nearest first: the transports, and what goes by them into the memory of a device."""
BY = {"pinned_shm": "shm", **INNER}
"""Which transport's descriptors each of those takes."""


class Links(Closing):
    """The transports of one process, each opened once; a context manager.

    Args:
        makers: how to open each, by name; a maker that raises is left out, and `refused` says why.

    Attributes:
        refused: name -> why this process has not got it.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Transport]]) -> None:
        self.transports: dict[str, Transport] = {}
        self.refused: dict[str, str] = {}
        for name in NAMES:
            if name not in makers:
                continue
            try:
                self.transports[name] = makers[name]()
            except (ConfigError, MissingExtra) as error:
                self.refused[name] = str(error.message)
            except BaseException:
                self.close()
                raise

    def add_staged(self, driver: CudaDriver | None = None) -> None:
        """Have peers' host memory read into devices too, where there is a CUDA driver, by what reaches it."""
        from penstock.transport.pinned import PinnedTransport
        from penstock.transport.shm import ShmTransport

        shm = self.transports.get("shm")
        if isinstance(shm, ShmTransport):
            try:
                self.transports["pinned_shm"] = PinnedTransport(shm, driver)
            except ConfigError as error:
                self.refused["pinned_shm"] = error.message
        for name, inner in INNER.items():
            if inner in self.transports:
                try:
                    self.transports[name] = StagedTransport(name, self.transports[inner], driver)
                except ConfigError as error:
                    self.refused[name] = error.message

    def register(self, memory: Memory) -> dict[str, Handle]:
        """Register with every transport that can show this memory to peers.

        Raises:
            ConfigError: none can; says why of each.
        """
        found: dict[str, Handle] = {}
        why = dict(self.refused)
        try:
            for name, transport in self.transports.items():
                try:
                    found[name] = transport.register(memory)
                except ConfigError as error:
                    why[name] = error.message
        except BaseException:
            for handle in found.values():
                handle.close()
            raise
        if not found:
            said = "; ".join(f"{name}: {reason}" for name, reason in why.items())
            raise ConfigError(f"no transport reaches memory on {memory.device}: {said}")
        return found

    def register_into(
        self, memory: Memory, shown: Mapping[str, Handle], *, is_repeated: bool = False
    ) -> dict[str, Handle]:
        """Handles to read into: those of `register`, and of transports that only fill such memory.

        Args:
            memory: ours.
            shown: of `register`.
            is_repeated: the same peers are read again and again: it pays to pin their memory here.
        """
        found = dict(shown)
        for name, transport in self.transports.items():
            if name not in found and isinstance(transport, Filling) and (is_repeated or name != "pinned_shm"):
                with contextlib.suppress(ConfigError):  # it does not reach this kind of memory
                    found[name] = transport.register_into(memory)
        return found

    def choose(
        self, ours: Mapping[str, Handle], offered: Mapping[str, bytes], *, same_host: bool, same_process: bool
    ) -> tuple[Transport, Descriptor, str]:
        """The nearest transport that both ends have for a pair of regions, and why no nearer one.

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
        beside = {"loopback", "pinned_shm", "cuda_ipc" if on_host else "shm", *(INNER if on_host else ())}
        for name in ORDER:
            if (name in ONE_HOST and not same_host) or (name == "loopback" and not same_process):
                continue
            given = BY.get(name, name)
            if name in ours and given in offered:
                descriptor = decode(offered[given])
                if descriptor.transport != given:
                    raise PlanError(f"a descriptor offered as {given} is of {descriptor.transport}")
                return self.transports[name], descriptor, "; ".join(why)
            if name not in beside:
                why.append(f"{name}: {self._missing(name, ours)}")
        raise PlanError(f"no transport reaches the peer: {'; '.join(why)}", hint="give both ends one in common")

    def _missing(self, name: str, ours: Mapping[str, Handle]) -> str:
        """Return which side lacks a transport, and why."""
        if name in ours:
            return f"the peer does not offer {INNER.get(name, 'it')}"
        return "it does not reach our memory" if name in self.transports else self.refused.get(name, "not opened here")

    def sweep(self) -> None:
        """Let go of memory of peers that are gone. A read does so too; call it while nothing is read."""
        for transport in self.transports.values():
            if isinstance(transport, Sweeping):
                transport.sweep()

    def close(self) -> None:
        """Close every transport. Idempotent."""
        for transport in reversed(self.transports.values()):  # what goes by another before that
            transport.close()


def open_links(
    *,
    only: Sequence[str] | None = None,
    listen: str | None = None,
    tls: ssl.SSLContext | None = None,
    trust: ssl.SSLContext | None = None,
) -> Links:
    """The transports of this process.

    Args:
        only: names allowed; None: all that work here.
        listen: address where other hosts reach this one; None: this host only, and no transport that crosses hosts
            but `http` on a Unix socket.
        tls: what `http` serves by; None: plain.
        trust: how readers over `http` check a peer's certificate, and what they show.

    Raises:
        ConfigError: a name is none of `NAMES`.
    """
    unknown = set(only or ()) - set(NAMES)
    if unknown:
        raise ConfigError(f"no transport is called {', '.join(sorted(unknown))}", hint=f"there are {', '.join(NAMES)}")
    makers: dict[str, Callable[[], Transport]] = {
        "loopback": LoopbackTransport,
        "cuda_ipc": _cuda_ipc,
        "shm": _shm,
        "http": lambda: _http(listen, tls, trust),
    }
    if "nixl" in (only or ()) or (listen is not None and _suits_nixl()):
        makers["nixl"] = _nixl
    links = Links({name: make for name, make in makers.items() if only is None or name in only})
    links.add_staged()
    for name in NAMES:
        if name not in links.transports:
            excluded = only is not None and name not in only
            needs = "it needs listen=" if listen is None else "neither RDMA nor a GPU here"
            links.refused.setdefault(name, "not among the transports allowed" if excluded else needs)
    return links


def _suits_nixl() -> bool:
    """Return whether NIXL beats `http` here: there is RDMA, or device memory, which `http` cannot reach.

    Over TCP it is no faster, protects no memory from who has a descriptor, and a holder that was stopped until its
    readers gave up is aborted by UCX when it goes on. Source: docs/design/002-transport.md.
    """
    return any(Path("/sys/class/infiniband").glob("*")) or Path("/proc/driver/nvidia").exists()


def _cuda_ipc() -> Transport:
    from penstock.transport.cuda_ipc import CudaIpcTransport

    return CudaIpcTransport()


def _shm() -> Transport:
    from penstock.transport.shm import ShmTransport

    return ShmTransport()


def _nixl() -> Transport:
    from penstock.transport.nixl import NixlTransport

    return NixlTransport()


def _http(listen: str | None, tls: ssl.SSLContext | None, trust: ssl.SSLContext | None) -> Transport:
    from penstock.transport.http import HttpTransport

    return HttpTransport(listen=listen, tls=tls, trust=trust)
