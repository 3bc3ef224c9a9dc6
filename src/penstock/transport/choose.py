"""Open the transports of this process, and choose the nearest one that both ends have, with the reason.

In: the device of the memory, names allowed, where the peer is. Out: registrations, a choice with its reason.
Not here: which transports there are (`registry`), how they move bytes (their own modules), which peer (`plan.relay`).
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from penstock.closing import Closing
from penstock.cuda.driver import CudaDriver
from penstock.errors import ConfigError, MissingExtra, PlanError
from penstock.transport.descriptor import Descriptor, decode
from penstock.transport.protocol import Filling, Handle, Memory, Transport
from penstock.transport.registry import Reach, TransportKind, TransportSetup, broken_transports, transport_kinds
from penstock.transport.staged import INNER, StagedTransport


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


DEVICE_TARGETS = {"pinned_shm": "shm", **INNER}
"""Transports into the memory of a device, each with the transport whose descriptors it takes; nearer ones first."""


class _Route(NamedTuple):
    name: str
    offered_as: str
    """The transport whose descriptor the peer must offer."""
    reach: Reach


def _routes() -> Iterator[_Route]:
    """Each transport followed by what goes by it into the memory of a device, nearest first."""
    for kind in transport_kinds():
        yield _Route(kind.name, kind.name, kind.reach)
        for name, inner in DEVICE_TARGETS.items():
            if inner == kind.name:
                yield _Route(name, inner, kind.reach)


class Links(Closing):
    """The transports of one process, each opened once; a context manager.

    Args:
        makers: how to open each, by name, nearest first; a maker that raises is left out, and `refused` says why.

    Attributes:
        refused: name -> why this process has not got it.
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
        # Not worth a reason: they are for the other kind of memory, or add to one that is named anyway.
        unnamed = {"loopback", "pinned_shm", "cuda_ipc" if on_host else "shm", *(INNER if on_host else ())}
        for name, offered_as, reach in _routes():
            if (reach != "network" and not same_host) or (reach == "process" and not same_process):
                continue
            if name in ours and offered_as in offered:
                descriptor = decode(offered[offered_as])
                if descriptor.transport != offered_as:
                    raise PlanError(f"a descriptor offered as {offered_as} is of {descriptor.transport}")
                return self.transports[name], descriptor, "; ".join(why)
            if name not in unnamed:
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
        ConfigError: no transport has one of the names.
    """
    kinds = {kind.name: kind for kind in transport_kinds()}
    broken = broken_transports()
    unknown = set(only or ()) - set(kinds)
    if unknown & set(broken):
        raise ConfigError("; ".join(broken[name] for name in sorted(unknown & set(broken))))
    if unknown:
        raise ConfigError(f"no transport is called {', '.join(sorted(unknown))}", hint=f"there are {', '.join(kinds)}")
    refused = dict(broken)
    makers: dict[str, Callable[[], Transport]] = {}
    for name, kind in kinds.items():
        if only is not None and name not in only:
            refused[name] = "not among the transports allowed"
            continue
        setup = TransportSetup(listen=listen, tls=tls, trust=trust, is_named=only is not None)
        if why := kind.unless(setup):
            refused[name] = why
        else:
            makers[name] = _maker(kind, setup)
    links = Links(makers)
    links.add_staged()
    links.refused |= refused
    return links


def _maker(kind: TransportKind, setup: TransportSetup) -> Callable[[], Transport]:
    return lambda: kind.open(setup)
