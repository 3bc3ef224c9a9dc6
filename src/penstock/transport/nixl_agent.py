"""NIXL's agent of this process, as the `nixl` transport uses it: locked, its errors ours, never its pickles.

In: addresses. Out: registrations, transfers in flight and their states, messages of peers.
Not here: whose memory it is and which generation (`nixl`).

An agent is used by many threads and is not safe for them (sync mode NONE), so one lock is held over each call, none of
which waits. NIXL's progress thread stays off: it takes a core for as long as the agent lives, and with one on both ends
TCP reached half. Transfers move when they are polled, peers are served by `nixl`'s thread.
Source: benchmarks/results/cpu2_202611/hosts.md.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np

from penstock.config import ucx_variables
from penstock.errors import Cancelled, ConfigError, MissingExtra, PeerLost, StaleDescriptor
from penstock.transport.protocol import Memory
from penstock.types import I64


class Discarded(Cancelled):
    """This agent was ended; another can be opened."""


class PostedTransfer:
    """A posted transfer."""

    __slots__ = ("xfer",)

    def __init__(self, xfer: Any) -> None:
        self.xfer = xfer


class Agent:
    """A NIXL agent. Made by `open`; after `close`, and in a forked child, every call raises Discarded."""

    def __init__(self, name: str, agent: Any, bind: Any) -> None:
        self.name, self._lock = name, threading.Lock()
        self._agent: Any = agent
        self._flights: set[PostedTransfer] = set()
        self._is_left = False
        self._unreachable: tuple[type[Exception], ...] = (bind.nixlBackendError, bind.nixlRemoteDisconnectError)
        self._not_found: tuple[type[Exception], ...] = (
            bind.nixlNotFoundError,
            bind.nixlMismatchError,
            bind.nixlInvalidParamError,
        )
        self._failed = _errors(bind)

    @classmethod
    def open(cls, name: str, backends: tuple[str, ...], tls: str) -> Agent:
        """A new agent with these back ends.

        Raises:
            MissingExtra: NIXL is not installed.
            ConfigError: a back end does not start.
        """
        with ucx_variables(tls):
            try:
                from nixl import _api as api
            except ImportError as error:
                message = f"NIXL does not import: {error}"
                raise MissingExtra(message, hint="pip install 'penstock[nixl]'") from error
            bind = api.nixlBind
            failed: tuple[type[Exception], ...] = (*_errors(bind), RuntimeError)
            try:
                agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
                for backend in backends:
                    agent.create_backend(backend)
            except failed as error:
                raise ConfigError(f"NIXL's {', '.join(backends)} does not start: {error}") from error
        return cls(name, agent, bind)

    @property
    def is_open(self) -> bool:
        """Return whether `close` was not called yet."""
        return self._agent is not None

    def _check_open(self) -> Any:
        if self._agent is None:
            raise Discarded("the transport is closed")
        return self._agent

    def register(self, memory: Memory) -> Any:
        """NIXL's registration of this memory. ConfigError if none of the back ends reaches it."""
        kind, device = place_of(memory.device)
        with self._lock:
            agent = self._check_open()
            try:
                return agent.register_memory([(memory.address, memory.nbytes, device, "")], kind)
            except self._failed as error:
                raise ConfigError(f"NIXL cannot register {memory.nbytes} bytes on {memory.device}: {error}") from error

    def deregister(self, registration: Any) -> None:
        """End a registration. Nothing is read from it or into it any more."""
        with self._lock, contextlib.suppress(*self._failed):  # NIXL frees it with the agent then
            if self._agent is not None:
                self._agent.deregister_memory(registration)

    def metadata(self, registration: Any) -> bytes:
        """Return the metadata by which a peer reaches this registration."""
        with self._lock:
            return bytes(self._check_open().get_partial_agent_metadata(registration, True))

    def meet(self, metadata: bytes) -> str:
        """Take in a peer's metadata; the name of its agent.

        Raises:
            StaleDescriptor: it is none.
            PeerLost: the peer cannot be connected to.
        """
        with self._lock:
            agent = self._check_open()
            try:
                return str(agent.add_remote_agent(metadata).decode())
            except self._unreachable as error:
                raise PeerLost(f"no connection to the peer: {error}") from error
            except self._failed as error:
                raise StaleDescriptor(f"no metadata of an agent: {error}") from error

    def part(self, peer: str) -> None:
        """Forget a peer and disconnect from it."""
        with self._lock:
            if self._agent is not None:
                try:
                    self._agent.remove_remote_agent(peer)
                except self._failed:
                    return  # it was not known any more

    def read(self, peer: str, kinds: tuple[str, str], mine: I64, theirs: I64) -> PostedTransfer:
        """Post a transfer: rows of (address, bytes, device) of the peer's memory into ours; kinds are (ours, its).

        Raises:
            StaleDescriptor: the peer's rows are in no registration it told us of.
            PeerLost: no connection to it.
        """
        with self._lock:
            agent = self._check_open()
            try:
                here = agent.get_xfer_descs(mine.astype(np.uint64), kinds[0])
                there = agent.get_xfer_descs(theirs.astype(np.uint64), kinds[1])
                flight = PostedTransfer(agent.initialize_xfer("READ", here, there, peer))
                self._flights.add(flight)
                agent.transfer(flight.xfer)
                return flight
            except self._not_found as error:
                raise StaleDescriptor(f"not in a registration of the peer: {error}") from error
            except self._failed as error:
                raise PeerLost(f"no connection to the peer: {error}") from error

    def is_done(self, flight: PostedTransfer) -> bool:
        """Return whether it has landed; makes progress. PeerLost if it never will."""
        with self._lock:
            agent = self._check_open()
            try:
                state = agent.check_xfer_state(flight.xfer)
            except self._failed as error:
                raise PeerLost(f"the peer is gone: {error}") from error
        if state == "ERR":
            raise PeerLost("the transfer failed")
        return bool(state == "DONE")

    def drop(self, flight: PostedTransfer) -> None:
        """Let go of a transfer that has ended."""
        with self._lock:
            self._flights.discard(flight)
            self._release(flight)

    def tell(self, peer: str, message: bytes) -> None:
        """Send a peer a word, which nothing depends on."""
        with self._lock:
            try:
                self._check_open().send_notif(peer, message)
            except self._failed:
                return  # whoever waits for the peer's bytes finds out

    def progress(self) -> bool:
        """Serve what peers ask for; whether any of them said a word."""
        with self._lock:
            try:
                return bool(self._check_open().get_new_notifs())
            except self._failed:
                return False

    def _release(self, flight: PostedTransfer) -> None:
        xfer, flight.xfer = flight.xfer, None
        try:
            if xfer is not None and not self._is_left:
                xfer.release()
        except self._failed:
            return  # NIXL frees it with the agent

    def close(self) -> None:
        """End the agent and all it has in flight: nothing is written any more. Idempotent."""
        with self._lock:
            flights, self._flights = self._flights, set()
            for flight in flights:
                self._release(flight)  # each holds the agent
            self._agent = None

    def forget(self) -> None:
        """In a forked child: never touch the agent again, not even to free it."""
        _left_behind.extend([self._agent, self._flights])
        self._agent, self._lock, self._is_left = None, threading.Lock(), True


def _errors(bind: Any) -> tuple[type[Exception], ...]:
    return tuple(kind for kind in vars(bind).values() if isinstance(kind, type) and issubclass(kind, Exception))


_left_behind: list[Any] = []


def place_of(device: str) -> tuple[str, int]:
    """NIXL's word for a device's memory, and its number. ConfigError for one it does not know."""
    name, _, number = device.partition(":")
    if name == "cpu":
        return "DRAM", 0
    if name == "cuda":
        return "VRAM", int(number) if number.isdigit() else 0
    raise ConfigError(f"nixl does not reach memory on {device}")
