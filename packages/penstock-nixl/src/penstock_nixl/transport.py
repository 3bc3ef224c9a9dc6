"""Transport that reads a peer's memory with NIXL, over RDMA, NVLink, shared memory or TCP, as its back end (UCX)
chooses.

Each registration has a word in the holder's registered memory, with the generation and the descriptor's checksum.
A holder changes this word before it changes a byte of the memory. If a read sees the same word before its first and
after its last byte, all bytes are from one generation. NIXL's own descriptors are pickles, so ours are sent instead.

Released memory stays registered and alive for `LINGER_S`, for readers that checked the word just before the release.
Over NIXL's TCP, a process with a descriptor can reach all memory of the holding process, so use it in trusted networks
only.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from penstock.config import Settings
from penstock.errors import Cancelled, ConfigError, PenstockError
from penstock.lifecycle import release_after_fork
from penstock.segments import Segments
from penstock.transport.host_endpoint import checksum_of
from penstock.transport.protocol import DeferredRead, Descriptor, Handle, Memory, PendingRead, Transport, decode_payload
from penstock.waits import start_thread
from penstock_nixl.reader import WORD_BYTES, Agent, Discarded, NixlPost, Payload, Reader, pieces, place_of

LINGER_S = 3.0
"""Seconds for which released memory stays registered. A reader posts within milliseconds of reading the word, and has
at most a window of 128 MiB in flight."""
BUSY_POLL_S = 1e-4
"""Seconds between polls of the serving thread while peers read. TCP is served only in these polls."""
IDLE_POLL_S = 1e-2
"""Seconds between polls of the serving thread while no peer reads."""
BUSY_S = 2.0
"""Seconds for which a peer counts as reading after a notification. A reading peer sends one every half second."""
NUM_SLOTS = 4096
"""Maximum number of open registrations."""

_DECODER = msgspec.msgpack.Decoder(Payload)
_transports: weakref.WeakSet[NixlTransport] = release_after_fork(lambda transport: transport.forget())


def _at_exit() -> None:
    # The daemon thread could be inside a NIXL call when the interpreter is torn down.
    for transport in list(_transports):
        transport.close()


atexit.register(_at_exit)


class NixlHandle:
    """See `Handle`."""

    def __init__(self, transport: NixlTransport, memory: Memory, slot: int) -> None:
        self.transport = transport
        self.memory = memory
        self.is_open = True
        self.num_reads = 0
        self.slot = slot
        self.registration = transport.agent.register(memory) if memory.nbytes else None
        self._payload = msgspec.msgpack.encode(
            Payload(
                agent=transport.agent.metadata(self.registration) if memory.nbytes else b"",
                word_agent=transport.word_metadata,
                address=memory.address,
                word=transport.word_address + WORD_BYTES * slot,
            )
        )
        self.descriptor = self._begin()

    def _begin(self) -> Descriptor:
        at = self.transport
        descriptor = Descriptor(
            transport=at.name,
            endpoint=at.endpoint,
            generation=at.next_generation(),
            nbytes=self.memory.nbytes,
            device=self.memory.device,
            payload=self._payload,
        )
        # A reader must never see a new generation with an old checksum.
        at.words[self.slot, 0] = 0
        at.words[self.slot, 1] = checksum_of(descriptor)
        at.words[self.slot, 0] = descriptor.generation
        return descriptor

    def fence(self) -> Descriptor:
        """See `Handle.fence`."""
        self.check_open()
        with self.transport.changing:
            self.check_open()
            self.descriptor = descriptor = self._begin()
        return descriptor

    def close(self) -> None:
        """See `Handle.close`. The memory stays alive for `LINGER_S`. Does nothing in a forked child."""
        with self.transport.changing:
            if self.is_open and self.transport.is_mine:
                self.transport.words[self.slot, 0] = 0
                self.transport.retire(self)
            self.is_open = False

    def check_open(self) -> None:
        """Raise Cancelled if the handle is closed or belongs to a parent process from before a fork."""
        if not self.is_open or not self.transport.is_mine:
            raise Cancelled("the registration is closed")


class NixlRead(DeferredRead[NixlHandle, Descriptor, Payload, Segments]):
    """See `PendingRead`."""

    def __init__(self, into: NixlHandle, source: Descriptor, payload: Payload, segments: Segments) -> None:
        super().__init__(int(segments.nbytes.sum()), into, source, payload, segments)

    def _carry(
        self, stall_s: float, into: NixlHandle, source: Descriptor, payload: Payload, segments: Segments
    ) -> None:
        if not self.nbytes:
            return
        try:
            job = NixlPost(
                owner=into,
                memory=into.memory,
                source=source,
                payload=payload,
                todo=collections.deque(pieces(into.memory, payload.address, source.device, segments)),
                landed=self._landed,
                check_wanted=into.check_open,
                stall_s=stall_s,
            )
            # Retry if another read gave up on its peer and closed the shared agent.
            while True:
                try:
                    with into.transport.reading(into) as reader:
                        reader.carry(job)
                        return
                except Discarded:
                    into.check_open()
        except PenstockError as error:
            error.uri = source.uri
            raise

    def _landed(self, nbytes: int) -> None:
        self.moved_bytes += nbytes


class NixlTransport:
    """See `Transport`. This transport reaches host memory, and device memory if the back end does."""

    name = "nixl"

    def __init__(self, agent: Agent, endpoint: str, backends: tuple[str, ...], tls: str) -> None:
        self.endpoint = endpoint
        self.is_mine = True
        self._backends = backends
        self._tls = tls
        self.agent = agent
        self._reader: Reader | None = None
        self.changing = threading.RLock()
        self.next_generation = itertools.count(1).__next__
        self.words: np.ndarray[Any, np.dtype[np.uint64]] = np.zeros((NUM_SLOTS, 2), np.uint64)
        self.word_address = int(self.words.ctypes.data)
        self._free_slots = list(range(NUM_SLOTS))
        words = agent.register(Memory(address=self.word_address, nbytes=self.words.nbytes, owner=self.words))
        self.word_metadata = agent.metadata(words)
        self._handles = set[NixlHandle]()
        self._retired = list[tuple[float, NixlHandle]]()
        self._closing = threading.Event()
        _transports.add(self)

    @classmethod
    def open(cls, *, backends: tuple[str, ...] = ("UCX",), tls: str | None = None) -> NixlTransport:
        """Create an agent of NIXL, and serve reading peers in a new thread. Raises like `Agent.open`.

        Args:
            tls: transports of UCX, as in `UCX_TLS`, or None for `PENSTOCK_NIXL_TLS` or else UCX's own choice.
        """
        tls = Settings.read().nixl_tls if tls is None else tls
        endpoint = secrets.token_hex(8)
        transport = cls(Agent.open(endpoint, backends, tls), endpoint, backends, tls)
        start_thread(threading.Thread(target=transport._serve, name="penstock-nixl", daemon=True))
        return transport

    def register(self, memory: Memory) -> NixlHandle:
        """See `Transport.register`. Raises Cancelled if the transport is closed."""
        place_of(memory.device)
        with self.changing:
            self._check_open()
            if not self._free_slots:
                hint = "put the tensors into one arena and register the arena"
                raise ConfigError(f"{NUM_SLOTS} registrations are open, which is the maximum", hint=hint)
            slot = self._free_slots.pop()
            try:
                handle = NixlHandle(self, memory, slot)
            except BaseException:
                self._free_slots.append(slot)
                raise
            self._handles.add(handle)
        return handle

    def retire(self, handle: NixlHandle) -> None:
        """Keep the registration of a released handle for `LINGER_S`. The caller holds `changing`."""
        self._handles.discard(handle)
        self._free_slots.append(handle.slot)
        self._retired.append((time.monotonic() + LINGER_S, handle))

    @contextmanager
    def reading(self, into: NixlHandle) -> Iterator[Reader]:
        """Yield the reading agent, or a new one if it was closed. `into` stays registered during the block."""
        with self.changing:
            into.check_open()
            if self._reader is None or not self._reader.agent.is_open:
                self._reader = Reader.open(self._backends, self._tls)
            into.num_reads += 1
            reader = self._reader
        try:
            yield reader
        finally:
            with self.changing:
                into.num_reads -= 1

    def post_read(self, into: Handle, source: Descriptor, segments: Segments) -> NixlRead:
        """See `Transport.post_read`."""
        if source.transport != self.name or not isinstance(into, NixlHandle) or into.transport is not self:
            raise ConfigError(f"{self.name} got a {source.transport} descriptor or another transport's handle")
        self._check_open()
        into.check_open()
        segments.check(src_nbytes=source.nbytes, dst_nbytes=into.memory.nbytes)
        return NixlRead(into, source, decode_payload(source, _DECODER), segments)

    def wait(self, pending: PendingRead, *, stall_s: float) -> None:
        """See `Transport.wait`."""
        assert isinstance(pending, NixlRead)
        pending.run(stall_s)

    def close(self) -> None:
        """See `Transport.close`. Frees the memory immediately."""
        if not self.is_mine:
            return
        with self.changing:
            for handle in list(self._handles):
                handle.close()
            self.is_mine = False
            self._retired.clear()
            reader = self._reader
        self._closing.set()
        if reader is not None:
            reader.agent.close()
        self.agent.close()

    def forget(self) -> None:
        """Close in a forked child without calling NIXL, since its agents belong to the parent."""
        self.is_mine = False
        # Another thread of the parent may have held these locks during the fork.
        self.changing = threading.RLock()
        self._closing = threading.Event()
        self._closing.set()
        self.agent.forget()
        if self._reader is not None:
            self._reader.agent.forget()

    def _check_open(self) -> None:
        if not self.is_mine:
            raise Cancelled("the transport is closed")

    def _serve(self) -> None:
        busy_until = sweep_at = 0.0
        try:
            while not self._closing.is_set():
                now = time.monotonic()
                if self.agent.progress():
                    busy_until = now + BUSY_S
                if now > sweep_at:
                    sweep_at = now + LINGER_S / 8
                    self._sweep(now)
                time.sleep(BUSY_POLL_S if now < busy_until else IDLE_POLL_S)
        except Discarded:
            return

    def _sweep(self, now: float) -> None:
        """Unregister memory that was released `LINGER_S` ago."""
        with self.changing:
            expired = [handle for when, handle in self._retired if when < now and not handle.num_reads]
            self._retired = [(when, handle) for when, handle in self._retired if handle not in expired]
            for handle in expired:
                if handle.registration is not None:
                    self.agent.deregister(handle.registration)
                if self._reader is not None:
                    self._reader.release(handle)


_fits: type[Transport] = NixlTransport
