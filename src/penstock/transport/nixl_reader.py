"""The reading end of the `nixl` transport: one agent that only reads, the peers it met, and reads carried out by it.

In: descriptors' payloads, pieces to read. Out: bytes in place, or why not.
Not here: the agent (`nixl_agent`), handles and words as their owner keeps them (`nixl`).

    the holder's word -> pieces, a window of them in flight -> the word again

A transfer in flight cannot be called back: over TCP the bytes of a peer that was stopped, given up, and goes on are
written, whatever was released or disconnected. So a read that gives up with transfers in flight ends the whole agent,
which does stop them; the other reads by it go on by the next one from where they were.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from penstock.errors import ConfigError, PeerLost, PenstockError, SourceStalled, StaleDescriptor
from penstock.segments import Segments, gathered
from penstock.transport.descriptor import Descriptor
from penstock.transport.generation_table import seal_of
from penstock.transport.nixl_agent import Agent, Discarded, PostedTransfer, place_of
from penstock.transport.protocol import Memory
from penstock.types import I64, MIB

PIECE_BYTES = 64 * MIB
"""One transfer: what progress is counted in. Source: benchmarks/results/cpu2_202611/hosts.md."""
PIECE_SEGMENTS = 4096
WINDOW = 2
"""Transfers of one read in flight."""
POLL_S = 2e-4
"""Between two looks at a transfer, after the first few. Reason: on few cores a tight loop starves the copy."""
TELL_S = 0.5
"""How often a peer that is read from is told so: one that serves by its processor looks more often then."""
NUM_SCRATCH = 1024
"""Reads waited for at once."""
WORD_BYTES = 16

Piece = tuple[I64, I64]
"""Rows of (address, bytes, device): ours and the peer's."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of a registration and its word, with what NIXL needs to reach either."""

    agent: bytes
    word_agent: bytes
    address: _Count
    word: _Count


@dataclass(slots=True, eq=False)
class _Remote:
    """A peer's agent as this one knows it."""

    name: str
    met: set[bytes] = field(default_factory=set)
    num_reads: int = 0
    progress_at: float = field(default_factory=time.monotonic)
    told_at: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """The rest of a read; `owner` stands for the registration read into."""

    owner: object
    memory: Memory
    source: Descriptor
    payload: Payload
    todo: collections.deque[Piece]
    landed: Callable[[int], None]
    check_wanted: Callable[[], None]
    """Raises if nobody wants the rest any more."""
    stall_s: float


class Reader:
    """A reading agent until it is discarded: then every call raises Discarded. Raises as `Agent.open`."""

    def __init__(self, backends: tuple[str, ...], tls: str) -> None:
        self._agent = Agent.open(secrets.token_hex(8), backends, tls)
        self._lock = threading.RLock()
        self._scratch: np.ndarray[Any, np.dtype[np.uint64]] = np.zeros((NUM_SCRATCH, 2), np.uint64)
        self._free = list(range(NUM_SCRATCH))
        memory = Memory(address=int(self._scratch.ctypes.data), nbytes=self._scratch.nbytes, owner=self._scratch)
        self._agent.register(memory)
        self._registrations: dict[object, Any] = {}
        self._remotes: dict[str, _Remote] = {}

    def release(self, owner: object) -> None:
        """End our registration of this memory, if there is one; no read uses it."""
        with self._lock:
            registration = self._registrations.pop(owner, None)
        if registration is not None:
            self._agent.deregister(registration)

    def discard(self) -> None:
        """End the agent and all its transfers in flight. Idempotent."""
        self._agent.close()

    @property
    def is_discarded(self) -> bool:
        """Return whether `discard` was called."""
        return not self._agent.is_open

    def forget(self) -> None:
        """In a forked child: never touch the agent again."""
        self._agent.forget()

    def carry(self, job: Job) -> None:
        """Carry out a read. Raises as `Transport.wait`, or Discarded: what is left is still to do."""
        with self._met(job) as remote, self._scratch_word() as slot:
            flights: collections.deque[tuple[PostedTransfer, Piece]] = collections.deque()
            # The same word before and after: one generation for all bytes in between.
            try:
                self._check_word(job, remote, slot)
                self._move(job, remote, flights)
                self._check_word(job, remote, slot)
            except Discarded:
                # Another read ended the agent: what was in flight may be incomplete, and is read again.
                job.todo.extendleft(piece for _, piece in reversed(flights))
                raise
            except SourceStalled:
                # The transfer in flight may still write when the peer goes on: only the agent's end stops it.
                self.discard()
                raise
            except PeerLost:
                self._part(remote, [flight for flight, _ in flights])
                raise
            except PenstockError:
                self._drain(job, remote, flights)
                raise

    def _move(self, job: Job, remote: _Remote, flights: collections.deque[tuple[PostedTransfer, Piece]]) -> None:
        kinds = (place_of(job.memory.device)[0], place_of(job.source.device)[0])
        while job.todo or flights:
            while job.todo and len(flights) < WINDOW:
                job.check_wanted()
                flights.append((self._agent.read(remote.name, kinds, *job.todo[0]), job.todo[0]))
                job.todo.popleft()
            self._land(job, remote, flights)
        job.check_wanted()

    def _land(self, job: Job, remote: _Remote, flights: collections.deque[tuple[PostedTransfer, Piece]]) -> None:
        self._wait(job, remote, flights[0][0])
        flight, piece = flights.popleft()
        self._agent.drop(flight)
        job.landed(int(piece[0][:, 1].sum()))

    def _drain(self, job: Job, remote: _Remote, flights: collections.deque[tuple[PostedTransfer, Piece]]) -> None:
        """Wait for reads in flight: they would write to the memory after the caller was told that they ended."""
        try:
            while flights:
                self._land(job, remote, flights)
        except PenstockError:
            self.discard()

    def _wait(self, job: Job, remote: _Remote, flight: PostedTransfer) -> None:
        """Wait until it has landed. SourceStalled, PeerLost, Discarded."""
        began = time.monotonic()
        for turn in itertools.count():
            now = time.monotonic()
            if self._agent.is_done(flight):
                remote.progress_at = now
                return
            if now - max(began, remote.progress_at) > job.stall_s:
                raise SourceStalled(f"no byte arrived for {job.stall_s} s")
            if now - remote.told_at > TELL_S:
                remote.told_at = now
                self._agent.tell(remote.name, b"reading")
            time.sleep(POLL_S if turn > 4 else POLL_S / 10)

    def _check_word(self, job: Job, remote: _Remote, slot: int) -> None:
        mine = np.array([[int(self._scratch.ctypes.data) + WORD_BYTES * slot, WORD_BYTES, 0]], np.int64)
        theirs = np.array([[job.payload.word, WORD_BYTES, 0]], np.int64)
        flight = self._agent.read(remote.name, ("DRAM", "DRAM"), mine, theirs)
        self._wait(job, remote, flight)
        self._agent.drop(flight)
        if self._scratch[slot].tolist() != [job.source.generation, seal_of(job.source)]:
            raise StaleDescriptor(f"generation {job.source.generation} is gone")

    def _part(self, remote: _Remote, flights: list[PostedTransfer]) -> None:
        """Disconnect from a peer that is gone; whatever is not known to have ended is ended with the agent."""
        deadline = time.monotonic() + 1.0
        for flight in flights:
            with contextlib.suppress(PeerLost):
                while not self._agent.is_done(flight):
                    if time.monotonic() > deadline:
                        self.discard()
                        return
                    time.sleep(POLL_S)
            self._agent.drop(flight)
        with self._lock:
            if self._remotes.get(remote.name) is remote:
                del self._remotes[remote.name]
                self._agent.part(remote.name)

    @contextlib.contextmanager
    def _scratch_word(self) -> Iterator[int]:
        with self._lock:
            if not self._free:
                raise ConfigError(f"{NUM_SCRATCH} reads are waited for at once, which is the most at one time")
            slot = self._free.pop()
        try:
            yield slot
        finally:
            self._free.append(slot)

    @contextlib.contextmanager
    def _met(self, job: Job) -> Iterator[_Remote]:
        """The peer, known and counted as read from. StaleDescriptor if the metadata is another's."""
        name = job.source.endpoint
        with self._lock:
            if job.owner not in self._registrations:
                self._registrations[job.owner] = self._agent.register(job.memory)
            remote = self._remotes.get(name) or _Remote(name)
            for metadata in (job.payload.word_agent, job.payload.agent):
                if metadata not in remote.met:
                    if self._agent.meet(metadata) != name:
                        raise StaleDescriptor("the descriptor is not of the endpoint it names")
                    remote.met.add(metadata)
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
                # What it told of memory that is gone must not be taken for memory registered later at that address.
                if is_stale and not remote.num_reads and self._remotes.get(name) is remote:
                    del self._remotes[name]
                    self._agent.part(name)


def pieces(memory: Memory, theirs: int, device: str, rows: Segments) -> Iterator[Piece]:
    """The transfers of a read: long segments split, short ones gathered."""
    cut = rows.cut(PIECE_BYTES)
    ours, devices = place_of(memory.device)[1], np.ones_like(cut.nbytes)
    here = np.stack([memory.address + cut.dst, cut.nbytes, ours * devices], axis=1)
    there = np.stack([theirs + cut.src, cut.nbytes, place_of(device)[1] * devices], axis=1)
    for some in gathered(cut.nbytes, PIECE_BYTES, most_rows=PIECE_SEGMENTS):
        yield here[some], there[some]
