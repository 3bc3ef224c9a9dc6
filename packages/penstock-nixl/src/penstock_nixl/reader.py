"""NIXL's agent, and the reader of the `nixl` transport, which has a separate agent.

A transfer in flight cannot be cancelled. Over TCP, a stopped peer that continues after its reader gave up still writes
its bytes, even if the memory was released or the peer disconnected. So a read that gives up with transfers in flight
closes the whole agent, which stops the transfers. Other reads resume with a new agent where they stopped.

An agent is not thread-safe (sync mode NONE), so a lock is held during each call, and no call waits. NIXL's progress
thread stays off, since it occupies a core as long as the agent is alive. With a progress thread at each peer, TCP
reached half of its rate. Transfers progress when they are polled, and the thread of `nixl` serves peers. Source:
benchmarks/results/cpu2_202611/hosts.md.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
import numpy as np

from penstock.config import ucx_variables
from penstock.entry_points import install_hint
from penstock.errors import (
    Cancelled,
    ConfigError,
    MissingExtra,
    PeerLost,
    PenstockError,
    SourceStalled,
    StaleDescriptor,
)
from penstock.segments import Segments, gathered
from penstock.transport.host_endpoint import checksum_of
from penstock.transport.protocol import Descriptor, Memory
from penstock.types import I64, MIB


class Discarded(Cancelled):
    """This agent was closed, and a new one can be opened."""


class PostedTransfer:
    """A posted transfer. `xfer` is NIXL's handle, or None after its release."""

    __slots__ = ("xfer",)

    def __init__(self, xfer: Any) -> None:
        self.xfer = xfer


class Agent:
    """A NIXL agent, created by `open`. After `close` and in a forked child every call raises Discarded."""

    def __init__(self, name: str, agent: Any, bind: Any) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._agent: Any = agent
        self._transfers: set[PostedTransfer] = set()
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
        """Return a new agent. Raises MissingExtra without NIXL, and ConfigError if a back end does not start."""
        # UCX reads its variables when it is loaded and when a back end starts.
        with ucx_variables(tls):
            try:
                from nixl import _api as api
            except ImportError as error:
                message = f"cannot import NIXL: {error}"
                raise MissingExtra(message, hint=install_hint("nixl")) from error
            bind = api.nixlBind
            failed: tuple[type[Exception], ...] = (*_errors(bind), RuntimeError)
            try:
                agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
                for backend in backends:
                    agent.create_backend(backend)
            except failed as error:
                raise ConfigError(f"cannot start NIXL's back ends {', '.join(backends)}: {error}") from error
        return cls(name, agent, bind)

    @property
    def is_open(self) -> bool:
        """Return whether the agent is open."""
        return self._agent is not None

    def _check_open(self) -> Any:
        if self._agent is None:
            raise Discarded("the transport is closed")
        return self._agent

    def register(self, memory: Memory) -> Any:
        """Return NIXL's registration of this memory. Raises ConfigError if no back end reaches the memory."""
        kind, device = place_of(memory.device)
        with self._lock:
            agent = self._check_open()
            try:
                return agent.register_memory([(memory.address, memory.nbytes, device, "")], kind)
            except self._failed as error:
                raise ConfigError(f"NIXL cannot register {memory.nbytes} bytes on {memory.device}: {error}") from error

    def deregister(self, registration: Any) -> None:
        """Close a registration that no read uses."""
        # After a failure, NIXL frees the registration with the agent.
        with self._lock, contextlib.suppress(*self._failed):
            if self._agent is not None:
                self._agent.deregister_memory(registration)

    def metadata(self, registration: Any) -> bytes:
        """Return the metadata with which a peer reaches this registration."""
        with self._lock:
            return bytes(self._check_open().get_partial_agent_metadata(registration, True))

    def add_peer(self, metadata: bytes) -> str:
        """Add a peer and return the name of its agent. Raises StaleDescriptor for invalid metadata, and PeerLost."""
        with self._lock:
            agent = self._check_open()
            try:
                return str(agent.add_remote_agent(metadata).decode())
            except self._unreachable as error:
                raise PeerLost(f"cannot connect to the peer: {error}") from error
            except self._failed as error:
                raise StaleDescriptor(f"the descriptor has no valid NIXL metadata: {error}") from error

    def remove_peer(self, peer: str) -> None:
        """Forget a peer and disconnect from it."""
        with self._lock:
            # On failure the agent no longer knows the peer.
            if self._agent is not None:
                with contextlib.suppress(*self._failed):
                    self._agent.remove_remote_agent(peer)

    def read(self, peer: str, kinds: tuple[str, str], mine: I64, theirs: I64) -> PostedTransfer:
        """Post a transfer of rows (address, bytes, device) into our memory. Raises StaleDescriptor or PeerLost."""
        with self._lock:
            agent = self._check_open()
            try:
                local = agent.get_xfer_descs(mine.astype(np.uint64), kinds[0])
                remote = agent.get_xfer_descs(theirs.astype(np.uint64), kinds[1])
                transfer = PostedTransfer(agent.initialize_xfer("READ", local, remote, peer))
                # `close` must abort the transfer even if this call does not return.
                self._transfers.add(transfer)
                agent.transfer(transfer.xfer)
                return transfer
            except self._not_found as error:
                raise StaleDescriptor(f"the memory is in no registration of the peer: {error}") from error
            except self._failed as error:
                raise PeerLost(f"cannot connect to the peer: {error}") from error

    def is_done(self, transfer: PostedTransfer) -> bool:
        """Make progress, and return whether a transfer is complete. Raises PeerLost if the transfer failed."""
        with self._lock:
            agent = self._check_open()
            try:
                state = agent.check_xfer_state(transfer.xfer)
            except self._failed as error:
                raise PeerLost(f"the peer is gone: {error}") from error
        if state == "ERR":
            raise PeerLost("the transfer failed")
        return bool(state == "DONE")

    def drop(self, transfer: PostedTransfer) -> None:
        """Release a transfer that is done."""
        with self._lock:
            self._transfers.discard(transfer)
            self._release(transfer)

    def notify(self, peer: str, message: bytes) -> None:
        """Send a peer a notification, which may be lost."""
        with self._lock, contextlib.suppress(*self._failed):
            self._check_open().send_notif(peer, message)

    def progress(self) -> bool:
        """Serve reads of peers, and return whether any peer sent a notification."""
        with self._lock:
            try:
                return bool(self._check_open().get_new_notifs())
            except self._failed:
                return False

    def _release(self, transfer: PostedTransfer) -> None:
        xfer, transfer.xfer = transfer.xfer, None
        # On failure NIXL frees the transfer with the agent.
        with contextlib.suppress(*self._failed):
            if xfer is not None and not self._is_left:
                xfer.release()

    def close(self) -> None:
        """Close the agent and abort its transfers, so that nothing is written any more. Idempotent."""
        with self._lock:
            transfers, self._transfers = self._transfers, set()
            for transfer in transfers:
                # Each transfer refers to the agent, which is freed with the last reference.
                self._release(transfer)
            self._agent = None

    def forget(self) -> None:
        """Never use the agent again in a forked child, and do not free it."""
        _left_behind.extend([self._agent, self._transfers])
        self._agent = None
        self._is_left = True
        # Another thread of the parent may have held the lock during the fork.
        self._lock = threading.Lock()


def _errors(bind: Any) -> tuple[type[Exception], ...]:
    return tuple(kind for kind in vars(bind).values() if isinstance(kind, type) and issubclass(kind, Exception))


_left_behind: list[Any] = []
"""Agents of the parent in a forked child. They are never freed, since their connections belong to the parent."""


def place_of(device: str) -> tuple[str, int]:
    """Return NIXL's name for the memory of a device, and its number. Raises ConfigError for an unknown device."""
    name, _, number = device.partition(":")
    if name == "cpu":
        return "DRAM", 0
    if name == "cuda":
        return "VRAM", int(number) if number.isdigit() else 0
    raise ConfigError(f"nixl cannot reach memory on {device}")


PIECE_BYTES = 64 * MIB
"""Bytes of one transfer, which is the unit of progress. Source: benchmarks/results/cpu2_202611/hosts.md."""
PIECE_SEGMENTS = 4096
"""Maximum number of short segments that are grouped into one transfer."""
WINDOW = 2
"""Maximum number of transfers in flight for one read."""
POLL_S = 2e-4
"""Seconds between two polls of a transfer after the first few. With few cores a tight loop starves the copy."""
NOTIFY_S = 0.5
"""Seconds between notifications to a peer that it is being read. A peer that serves with its processor then polls
faster."""
NUM_SCRATCH = 1024
"""Maximum number of reads with a waiting thread."""
WORD_BYTES = 16
"""Bytes of a registration's word, which holds a generation and a checksum of 8 bytes each."""
Piece = tuple[I64, I64]
"""Rows of (address, bytes, device), for our memory and the peer's."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of a registration and its word, and the metadata that NIXL needs to reach both."""

    agent: bytes
    word_agent: bytes
    address: _Count
    word: _Count


class _Remote(msgspec.Struct, eq=False):
    """State of a peer's agent."""

    name: str
    metadata: set[bytes] = msgspec.field(default_factory=set)
    num_reads: int = 0
    progress_at: float = msgspec.field(default_factory=time.monotonic)
    notified_at: float = 0.0


class NixlPost(msgspec.Struct, eq=False, kw_only=True):
    """The remaining pieces of a read. `owner` identifies the registration into which the read writes."""

    owner: object
    memory: Memory
    source: Descriptor
    payload: Payload
    todo: collections.deque[Piece]
    landed: Callable[[int], None]
    check_wanted: Callable[[], None]
    """Raises Cancelled if the read is no longer wanted."""
    stall_s: float


class Reader:
    """A reading `agent`. After the agent is closed, every call raises Discarded."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._lock = threading.RLock()
        self._scratch: np.ndarray[Any, np.dtype[np.uint64]] = np.zeros((NUM_SCRATCH, 2), np.uint64)
        self._free = list(range(NUM_SCRATCH))
        memory = Memory(address=int(self._scratch.ctypes.data), nbytes=self._scratch.nbytes, owner=self._scratch)
        agent.register(memory)
        self._registrations: dict[object, Any] = {}
        self._remotes: dict[str, _Remote] = {}

    @classmethod
    def open(cls, backends: tuple[str, ...], tls: str) -> Reader:
        """Create an agent that reads. Raises like `Agent.open`."""
        return cls(Agent.open(secrets.token_hex(8), backends, tls))

    def release(self, owner: object) -> None:
        """Close our registration of this memory, if there is one. No read may use the registration."""
        with self._lock:
            registration = self._registrations.pop(owner, None)
        if registration is not None:
            self.agent.deregister(registration)

    def carry(self, job: NixlPost) -> None:
        """Carry out a read. Raises like `Transport.wait`, or Discarded with the remaining pieces in `job.todo`."""
        with self._connected(job) as remote, self._scratch_word() as slot:
            transfers: collections.deque[tuple[PostedTransfer, Piece]] = collections.deque()
            try:
                self._check_word(job, remote, slot)
                self._move(job, remote, transfers)
                self._check_word(job, remote, slot)
            except Discarded:
                # Another read closed the agent, so transfers in flight may be incomplete.
                job.todo.extendleft(piece for _, piece in reversed(transfers))
                raise
            except SourceStalled:
                # The transfer may still write when the peer continues. Only closing the agent stops it.
                self.agent.close()
                raise
            except PeerLost:
                self._disconnect(remote, [transfer for transfer, _ in transfers])
                raise
            except PenstockError:
                self._drain(job, remote, transfers)
                raise

    def _move(self, job: NixlPost, remote: _Remote, transfers: collections.deque[tuple[PostedTransfer, Piece]]) -> None:
        # Post up to a window and wait in order, so that the next piece is in flight while one arrives.
        kinds = (place_of(job.memory.device)[0], place_of(job.source.device)[0])
        while job.todo or transfers:
            while job.todo and len(transfers) < WINDOW:
                job.check_wanted()
                transfers.append((self.agent.read(remote.name, kinds, *job.todo[0]), job.todo[0]))
                job.todo.popleft()
            self._land(job, remote, transfers)
        job.check_wanted()

    def _land(self, job: NixlPost, remote: _Remote, transfers: collections.deque[tuple[PostedTransfer, Piece]]) -> None:
        self._wait(job, remote, transfers[0][0])
        transfer, piece = transfers.popleft()
        self.agent.drop(transfer)
        job.landed(int(piece[0][:, 1].sum()))

    def _drain(
        self, job: NixlPost, remote: _Remote, transfers: collections.deque[tuple[PostedTransfer, Piece]]
    ) -> None:
        # A read in flight could write to the memory after the caller received the error.
        try:
            while transfers:
                self._land(job, remote, transfers)
        except PenstockError:
            self.agent.close()

    def _wait(self, job: NixlPost, remote: _Remote, transfer: PostedTransfer) -> None:
        began = time.monotonic()
        for turn in itertools.count():
            now = time.monotonic()
            if self.agent.is_done(transfer):
                remote.progress_at = now
                return
            # Transfers of several reads take turns on the link, so any progress of the peer counts.
            if now - max(began, remote.progress_at) > job.stall_s:
                raise SourceStalled(f"no byte arrived for {job.stall_s} s")
            if now - remote.notified_at > NOTIFY_S:
                remote.notified_at = now
                self.agent.notify(remote.name, b"reading")
            time.sleep(POLL_S if turn > 4 else POLL_S / 10)

    def _check_word(self, job: NixlPost, remote: _Remote, slot: int) -> None:
        mine = np.array([[int(self._scratch.ctypes.data) + WORD_BYTES * slot, WORD_BYTES, 0]], np.int64)
        theirs = np.array([[job.payload.word, WORD_BYTES, 0]], np.int64)
        transfer = self.agent.read(remote.name, ("DRAM", "DRAM"), mine, theirs)
        self._wait(job, remote, transfer)
        self.agent.drop(transfer)
        if self._scratch[slot].tolist() != [job.source.generation, checksum_of(job.source)]:
            raise StaleDescriptor(f"generation {job.source.generation} of the memory is no longer current")

    def _disconnect(self, remote: _Remote, transfers: list[PostedTransfer]) -> None:
        # If a transfer may still run, close the agent too.
        deadline = time.monotonic() + 1.0
        for transfer in transfers:
            with contextlib.suppress(PeerLost):
                while not self.agent.is_done(transfer):
                    if time.monotonic() > deadline:
                        self.agent.close()
                        return
                    time.sleep(POLL_S)
            self.agent.drop(transfer)
        with self._lock:
            if self._remotes.get(remote.name) is remote:
                del self._remotes[remote.name]
                self.agent.remove_peer(remote.name)

    @contextlib.contextmanager
    def _scratch_word(self) -> Iterator[int]:
        with self._lock:
            if not self._free:
                raise ConfigError(f"{NUM_SCRATCH} reads are in progress, which is the maximum")
            slot = self._free.pop()
        try:
            yield slot
        finally:
            self._free.append(slot)

    @contextlib.contextmanager
    def _connected(self, job: NixlPost) -> Iterator[_Remote]:
        name = job.source.endpoint
        with self._lock:
            # Agents are replaced, and each new agent needs its own registration of the memory.
            if job.owner not in self._registrations:
                self._registrations[job.owner] = self.agent.register(job.memory)
            remote = self._remotes.get(name) or _Remote(name)
            # The word and the memory are two registrations, each with its metadata.
            for metadata in (job.payload.word_agent, job.payload.agent):
                if metadata not in remote.metadata:
                    if self.agent.add_peer(metadata) != name:
                        raise StaleDescriptor("the descriptor does not belong to the endpoint that it names")
                    remote.metadata.add(metadata)
            self._remotes[name] = remote
            remote.num_reads += 1
        is_stale = False
        try:
            yield remote
        except StaleDescriptor:
            is_stale = True
            raise
        finally:
            with self._lock:
                remote.num_reads -= 1
                # Stale metadata must not be used for memory that is registered later at the same address.
                if is_stale and not remote.num_reads and self._remotes.get(name) is remote:
                    del self._remotes[name]
                    self.agent.remove_peer(name)


def pieces(memory: Memory, theirs: int, device: str, rows: Segments) -> Iterator[Piece]:
    """Yield the transfers of a read. Long segments are split and short ones grouped."""
    cut = rows.cut(PIECE_BYTES)
    local_device, devices = place_of(memory.device)[1], np.ones_like(cut.nbytes)
    local_rows = np.stack([memory.address + cut.dst, cut.nbytes, local_device * devices], axis=1)
    remote_rows = np.stack([theirs + cut.src, cut.nbytes, place_of(device)[1] * devices], axis=1)
    for group in gathered(cut.nbytes, PIECE_BYTES, most_rows=PIECE_SEGMENTS):
        yield local_rows[group], remote_rows[group]
