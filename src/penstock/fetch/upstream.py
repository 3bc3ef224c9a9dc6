"""One upstream of a fetch: lease, map and log by a thread of its own; what may be read from it now.

In: a `PeerClient`. Out: which chunks it has, their leaves, transports and segments; why it failed.
Not here: which chunks are taken from it (`run`).
"""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np

from penstock.engine.executors import guarded
from penstock.engine.ticket import Silence, Ticket
from penstock.errors import (
    FormatError,
    IntegrityError,
    PenstockError,
    PlanError,
    SourceStalled,
    StaleDescriptor,
    without_frames,
)
from penstock.hub.messages import HoldingMap, LogReply, Proof
from penstock.hub.proof import make_proof
from penstock.peer.client import PeerClient
from penstock.peer.local_weights import LocalWeights, decode_column, locate_rows
from penstock.segments import Segments
from penstock.transport.choose import Links, Reaching
from penstock.transport.descriptor import Descriptor, decode
from penstock.transport.protocol import Coding, Handle, Transport
from penstock.types import GB, I64, U64

NEWS_S = 1.0
"""How long a log request waits for news; it renews the lease too."""
GATHER_S = 0.002
"""Least time between two log requests: what an upstream gains meanwhile is one answer and one wake-up."""
PLENTY_S = 0.02
"""An upstream of which more is known than one read takes is asked again after this at the latest; else at once."""
SPARE_S = 0.25
"""One that only stands in is connected to, and asked, so much later: most fetches end without it."""
PATIENCE_S = 0.5
"""An upstream that gained nothing and gave nothing for this long no longer holds back those after it."""
STEP_S = 0.02
"""What one read from it should take: short beside a stall, long beside the cost of a step (0.1 ms)."""
MAPPED_STEP_CHUNKS = 32
"""The first steps from memory that is mapped, 512 MiB: `STEP_S` of PCIe. From one chunk on it takes rounds of Python,
10 ms, until a step is as long as its Python; more keeps a chain's next member waiting for its first news."""
MAX_STEP_CHUNKS = 128
"""2 GiB. A step costs a receiver 1 to 2 ms of Python, 0.6 GB of NVLink. Source: docs/design/003-fetch.md."""
CAPPED_STEP_S = 0.1
"""What one read takes of a capped upstream's time: its bytes come evenly, not in bursts."""
JUDGED_AFTER_S = 1.0
"""An upstream's pace is compared with the floor once it was read for this long: the first reads set up links."""
PROBE_S = 1.0
"""A later upstream is asked for one chunk this often, to know what it could give."""
MUCH_FASTER = 4.0
"""A later upstream is taken from beside an earlier one once it gives so many times as much: well above what the two can
differ by where they share a link."""
END_S = 0.5
"""How long an ending waits for threads that only talk: what they do after it concerns nobody."""

Read = tuple[Transport, Handle, Descriptor, Segments]
"""What is posted: the transport, our memory, the peer's, and what of it."""


class UpstreamReader:
    """What is known of one upstream while it is followed.

    Attributes:
        rank: its place in the hub's order; 0 is the parent.
        has: chunks that can be read from it.
        num_flying: reads under way.
        fault: why it is no longer used; "" while it is.
        is_too_slow: whether that is its pace.
        proof: that it said wrong digests, where that is its fault and can be shown.
        path: transport and member, for reports.
        why: path -> why no nearer transport, and why it is compressed or not.

    Args:
        min_bytes_per_s: an upstream that gives less while it is read, or caps its readers below it, is used no more by
            this fetch; 0: any pace will do.
    """

    def __init__(
        self,
        peer: PeerClient,
        rank: int,
        weights: LocalWeights,
        links: Links,
        ticket: Ticket,
        *,
        same_host: bool,
        min_bytes_per_s: float = 0.0,
    ) -> None:
        self.peer, self.rank, self.upstream = peer, rank, peer.upstream
        self._weights, self._links, self._same_host, self._ticket = weights, links, same_host, ticket
        count = weights.layout.chunks.num_chunks
        self.has = np.zeros(count, bool)
        self.leaves: U64 = np.zeros(len(weights.layout.chunks.leaf_row), np.uint64)
        self.num_flying = self.moved_bytes = 0
        self.step_chunks = 1
        self.not_before = 0.0
        self.error: PenstockError | None = None
        self.is_too_slow = False
        self.path = self._why_no_nearer = ""
        self.why: dict[str, str] = {}
        self._cap, self._min_bytes_per_s = 0, min_bytes_per_s
        self._read_s, self._read_until = 0.0, 0.0
        self._alive_at = self._probed_at = time.monotonic()
        self._gives, self._silence = _Pace(self._alive_at), Silence()
        self._closing, self._hurry = threading.Event(), threading.Event()
        self._generation = -1
        self._doubted: int | None = None
        self.proof: Proof | None = None
        self._transports: dict[tuple[int, int], tuple[Transport, Handle, Descriptor]] = {}
        self._row_region: I64 = np.zeros(0, np.int64)
        self._row_offset: I64 = np.zeros(0, np.int64)
        self.thread = threading.Thread(target=guarded, args=(ticket, self._follow), name="penstock-follow", daemon=True)
        self.thread.start()

    @property
    def fault(self) -> str:
        """Why it is no longer used."""
        return self.error.message if self.error is not None else ""

    @property
    def holds_back(self) -> bool:
        """Whether those after it should wait for what it has or will have."""
        return self.error is None and time.monotonic() - self._alive_at < PATIENCE_S

    @property
    def pace(self) -> float:
        """Bytes per second while it is read; 0: not known yet."""
        read = self.moved_bytes / self._read_s if self._read_s else 0.0
        return min(read, self._cap) if self._cap else read

    def is_much_faster_than(self, other: UpstreamReader) -> bool:
        """Whether waiting for an earlier one is a waste: it gives little, be its link slow or what it waits for."""
        return self.pace > MUCH_FASTER * other._gives.value(time.monotonic())

    def should_probe(self) -> bool:
        """Whether it is time to ask it for a chunk out of turn."""
        now = time.monotonic()
        if now - self._probed_at < PROBE_S:
            return False
        self._probed_at = now
        return True

    def came_by(self, transport: Transport, source: Descriptor) -> None:
        """Bytes were read; a transport that codes some says by now whether these were."""
        if isinstance(transport, Coding):
            name, why = transport.way(source)
            self._by(name, "; ".join(filter(None, (self._why_no_nearer, why))))

    def _by(self, name: str, why: str) -> None:
        self.path = f"{name} <- {self.upstream.member[:8]}"
        self.why[self.path] = why

    def hurry(self) -> None:
        """More is wanted of it than is known."""
        self._hurry.set()

    def _rest(self) -> None:
        """Until news of it are worth asking for."""
        self._hurry.wait(SPARE_S if self.rank else PLENTY_S)
        self._hurry.clear()

    def reads(self, chunks: I64) -> list[Read]:
        """What to post for these chunks, transport by transport."""
        found = []
        for pair, segments in self._weights.segments(chunks, self._row_region, self._row_offset).items():
            found.append((*self._transports[pair], segments))
        return found

    def gave(self, nbytes: int, seconds: float) -> None:
        """Note a read: its pace sets how much the next one takes."""
        self._alive_at = now = time.monotonic()
        self.moved_bytes += nbytes
        self._gives.add(now, nbytes)
        self._read_s += now - max(now - seconds, self._read_until)
        self._read_until = now
        if self._read_s > JUDGED_AFTER_S:
            self._judge(self.moved_bytes / self._read_s, "gives")
        if seconds < STEP_S:
            is_full = 2 * nbytes >= self.step_chunks * self._weights.layout.chunks.chunk_bytes
            more = 8 if is_full and seconds < STEP_S / 8 else 2
            self.step_chunks = min(more * self.step_chunks, MAX_STEP_CHUNKS)
        elif seconds > 4 * STEP_S:
            self.step_chunks = max(1, self.step_chunks // 2)
        if self._cap:
            most = int(self._cap * CAPPED_STEP_S / self._weights.layout.chunks.chunk_bytes)
            self.step_chunks = max(1, min(self.step_chunks, most))
            self.not_before = max(self.not_before, now - seconds) + nbytes / self._cap

    def is_silent(self, received_bytes: int, stall_s: float, *, is_read: bool) -> bool:
        """Whether its reads under way, which have received so much, got less than `LEAST_BYTES` for so long.

        Of all of them together, since they may share a connection.
        """
        if not is_read:
            self._silence.begin()
            return False
        return self._silence.look(self.moved_bytes, received_bytes) > stall_s

    def _judge(self, bytes_per_s: float, how: str) -> None:
        """Stop using the upstream if it gives less than the caller's floor.

        The only holder is held to the floor too: the fetch then reads storage, or fails.
        """
        floor = self._min_bytes_per_s
        if bytes_per_s < floor:
            self.is_too_slow = True
            message = f"{self.path or 'it'} {how} {bytes_per_s / GB:.3f} GB/s, below the floor of {floor / GB:.3f}"
            self.fail(SourceStalled(message, hint="see why no nearer transport was taken, or lower min_gb_per_s"))

    def _heed_cap(self, max_bytes_per_s: int) -> None:
        """Keep to what the holder lets this reader take a second; 0: no cap."""
        self._cap = max_bytes_per_s
        if max_bytes_per_s:
            self._judge(max_bytes_per_s, "gives at most")

    def gave_wrong(self, chunk: int) -> None:
        """Have the holder digest this chunk again, once it is no longer read from: it gives up what is damaged.

        The hub believes no reader about another member's bytes, so this is how the others are kept from them.
        """
        self._doubted = chunk

    def fail(self, error: PenstockError) -> None:
        """Use it no more; the first error stays, without the frames it came through.

        They refer to this, and this to the memory that is filled: one dead upstream would keep all weights of a fetch
        that is long over, until Python's collector comes by.
        """
        if self.error is None:
            self.error = without_frames(error)
        self._closing.set()
        self._hurry.set()
        self._ticket.wake()

    def close(self) -> None:
        """End the following; the lease is given back by its thread. Waits for that, a moment at most."""
        self._closing.set()
        self._hurry.set()
        self.peer.interrupt()
        self.thread.join(timeout=END_S)

    def _follow(self) -> None:
        if self.rank:
            self._rest()
        if self._closing.is_set():
            return
        try:
            with self.peer as peer:
                lease = peer.lease()
                self._heed_cap(lease.max_bytes_per_s)
                self._connect(peer.map())
                self._alive_at = time.monotonic()
                try:
                    self._read_log(peer)
                finally:
                    if self._doubted is not None:
                        with contextlib.suppress(PenstockError):  # gone, or SourceBusy: it was damaged, and is given up
                            peer.recheck(self._doubted)
        except PenstockError as error:
            if not self._closing.is_set():
                self.fail(error)

    def _connect(self, found: HoldingMap) -> None:
        """Hold its map to our line, and choose a transport for each pair of regions.

        Raises:
            PlanError: it cuts the line another way, or no transport reaches it. FormatError: the map does not fit.
        """
        chunks, ours = self._weights.layout.chunks, self._weights.place
        same = (found.leaf_bytes, found.chunk_bytes, found.num_chunks)
        if same != (chunks.leaf_bytes, chunks.chunk_bytes, chunks.num_chunks):
            raise PlanError(f"its chunks are cut another way: {same}")
        room = [min((decode(raw).nbytes for raw in offered.values()), default=0) for offered in found.regions]
        self._row_region, self._row_offset = region, _ = locate_rows(self._weights.layout, found, room)
        held = ours.row_region >= 0
        for theirs, mine in sorted(set(zip(region[held].tolist(), ours.row_region[held].tolist(), strict=True))):
            handles = self._weights.handles(mine)
            transport, descriptor, why = self._links.choose(
                handles, found.regions[theirs], same_host=self._same_host, same_process=False
            )
            if isinstance(transport, Reaching):
                transport.reach(handles[transport.name], descriptor)
                self.step_chunks = self.step_chunks if self._cap else MAPPED_STEP_CHUNKS
            self._transports[theirs, mine] = transport, handles[transport.name], descriptor
            self._why_no_nearer = why
            self._by(transport.name, why)
        self._generation = found.generation

    def _read_log(self, peer: PeerClient) -> None:
        serial = 0
        while not self._closing.is_set():
            reply = peer.log(serial, NEWS_S)
            self._heed_cap(reply.max_bytes_per_s)
            if reply.generation != self._generation or reply.state == "damaged":
                raise StaleDescriptor("its weights changed", uri=f"penstock:{self.upstream.member}")
            chunks = decode_column(reply.chunks, "<u4")
            if len(chunks):
                self._learn(chunks, decode_column(reply.leaves, "<u8").view(np.uint64), reply)
            if reply.state == "whole" or len(chunks):
                self._alive_at = time.monotonic()
            if reply.state != "filling" and reply.serial == serial:
                self._closing.wait(NEWS_S)  # nothing more will come; only the lease is renewed
            elif len(chunks):
                self._closing.wait(GATHER_S)
                self._rest()
            serial = reply.serial

    def _learn(self, chunks: I64, leaves: U64, reply: LogReply) -> None:
        layout, table = self._weights.layout, self._weights.layout.chunks
        if chunks.max() >= table.num_chunks:
            raise FormatError("its log names a chunk past the end", uri=f"penstock:{self.upstream.member}")
        at = table.leaves_of(chunks)
        if len(leaves) != len(at):
            raise FormatError("its log's leaves do not fit its chunks", uri=f"penstock:{self.upstream.member}")
        clash = self._weights.contradicting_chunks(chunks, leaves)
        if len(clash):
            self.proof = make_proof(reply, layout.table, table, self._weights.leaves)
            message = f"its digests of chunk {int(clash[0])} are not the manifest's"
            raise IntegrityError(message, uri=f"penstock:{self.upstream.member}")
        try:
            self._weights.record_digests(chunks, leaves, f"member {self.upstream.member}")
        except IntegrityError as error:
            self._ticket.fail(error)
            raise
        self.leaves[at] = leaves
        self.has[chunks] = True
        self._ticket.wake()


class _Pace:
    """Bytes per second of the clock, over the last one to two `PROBE_S`."""

    def __init__(self, now: float) -> None:
        self._since, self._nbytes, self._before = now, 0, 0.0

    def add(self, now: float, nbytes: int) -> None:
        self._turn(now)
        self._nbytes += nbytes

    def value(self, now: float) -> float:
        self._turn(now)
        return max(self._before, self._nbytes / max(now - self._since, PROBE_S / 2))

    def _turn(self, now: float) -> None:
        passed_s = now - self._since  # looked at once: another thread may turn it meanwhile
        if passed_s >= PROBE_S:
            self._before, self._since, self._nbytes = self._nbytes / passed_s, now, 0
