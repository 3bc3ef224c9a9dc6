"""An upstream of a fetch: its lease, map and log, followed by a thread, and the chunks that can be read from it now.

In: a `PeerClient`. Out: its chunks and their leaf digests, transports and segments; the reason if it failed.
Not here: the choice of chunks to read from it (`choice`).

The thread records digests in the weights, writes `has`, then wakes the fetch, whose threads read both and note finished
reads. Values that both sides write are single attributes: a stale one changes the choice of a source, never the bytes.
"""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np

from penstock.engine.run import RunState, StallTimer, guarded
from penstock.errors import (
    FormatError,
    IntegrityError,
    PenstockError,
    PlanError,
    SourceStalled,
    StaleDescriptor,
    without_frames,
)
from penstock.fetcher.report import why_command
from penstock.hub.messages import HoldingMap, Upstream
from penstock.peer.client import PeerClient
from penstock.peer.local_weights import LocalWeights, decode_column, decode_digests, locate_rows
from penstock.plan.relay_parents import NUM_TREES
from penstock.segments import Segments
from penstock.timing import Timing
from penstock.transport.choose import PeerLinks
from penstock.transport.protocol import Coding, Descriptor, Handle, Reaching, Transport, decode
from penstock.types import GB, I64, U64
from penstock.waits import start_thread

UNNAMED = 1 << 16
"""Rank of an upstream in an order of the hub that it is not in."""
PATIENCE_S = 0.5
"""After this long without new chunks and without bytes, an upstream no longer holds back those after it."""
STEP_S = 0.02
"""Target duration of one read: short compared with a stall, long compared with the cost of a read (0.1 ms)."""
MAPPED_STEP_CHUNKS = 32
"""Size of the first reads from mapped memory, 512 MiB: `STEP_S` of PCIe. Growing from one chunk took 10 ms of Python;
starting larger delays the first news for the next member of a chain."""
MAX_STEP_CHUNKS = 128
"""2 GiB. A read costs 1 to 2 ms of Python, the time of 0.6 GB over NVLink. Source: docs/design/fetch.md."""
_FIRST_S = 5.0
"""Longest wait for the first read under a limit. Reason: a chunk of 16 MiB takes it at 3 MB/s. A slower reader should
rather exceed the limit once than seem to stall."""
LIMITED_STEP_S = 0.1
"""Duration of one read of an upstream that limits its readers: its bytes arrive evenly, not in bursts."""
JUDGED_AFTER_S = 1.0
"""Time of reading before an upstream's pace is compared with the floor: the first reads set up links."""
PROBE_S = 1.0
"""Interval at which a later upstream is read for one chunk, to measure its pace; and time before an earlier one is
compared with it. Of two trees the upstream after a parent is connected to for that alone, after twice this time, and
left at once if it is not much faster."""
MUCH_FASTER = 4.0
"""A later upstream is used together with an earlier one once it is this many times as fast: well above the difference
of two upstreams that share a link."""

Read = tuple[Transport, Handle, Descriptor, Segments]
"""One read to post: the transport, our memory, the peer's memory, and the segments."""


class UpstreamReader:
    """The state of an upstream, kept up to date by a thread that follows its log.

    Attributes:
        ranks: its position in the hub's order of each tree of chunks; 0 is the parent. Without trees it is one order.
        has: per chunk, True if it can be read from this upstream.
        num_flying: reads under way.
        last_read: when the last read ended.
        fault: the reason why it is no longer used; "" while it is used.
        is_too_slow: True if its pace is that reason.
        path: transport and member, for reports.
        why: path -> why no nearer transport, and why it is compressed or not.

    Args:
        min_bytes_per_s: stop using the upstream if it is slower, or limits its readers to less; 0: no minimum.
        timing: waiting times.
    """

    def __init__(
        self,
        peer: PeerClient,
        ranks: tuple[int, ...],
        weights: LocalWeights,
        links: PeerLinks,
        ticket: RunState,
        *,
        min_bytes_per_s: float = 0.0,
        timing: Timing,
    ) -> None:
        self.peer = peer
        self._timing = timing
        self.ranks = ranks
        self.upstream = peer.upstream
        self._weights = weights
        self._links = links
        self._ticket = ticket
        count = weights.layout.chunks.num_chunks
        self.has = np.zeros(count, bool)
        self.num_flying = self.moved_bytes = 0
        self.step_chunks = 1
        self.not_before = self.last_read = 0.0
        self.error: PenstockError | None = None
        self.is_too_slow = False
        self.path = self._why_no_nearer = ""
        self.why: dict[str, str] = {}
        self._max_bytes_per_s = 0
        self._min_bytes_per_s = min_bytes_per_s
        self._read_s = 0.0
        self._read_until = 0.0
        self._followed_at = self._probed_at = time.monotonic()
        # Per tree: one whose parent stalls gives nothing of it, though it goes on giving chunks of the other.
        self._alive_at = [self._probed_at] * NUM_TREES
        self._recent_pace = _Pace(self._probed_at)
        self._silence = StallTimer()
        self._closing = threading.Event()
        self._news_wanted = threading.Event()
        self._generation = -1
        self._suspect_chunk: int | None = None
        self._transports: dict[tuple[int, int], tuple[Transport, Handle, Descriptor]] = {}
        self._row_region: I64 = np.zeros(0, np.int64)
        self._row_offset: I64 = np.zeros(0, np.int64)
        self.thread = threading.Thread(target=guarded, args=(ticket, self._follow), name="penstock-follow", daemon=True)

    def start(self) -> None:
        """Start the thread that follows the upstream."""
        start_thread(self.thread)

    @property
    def fault(self) -> str:
        """Return the reason why the upstream is no longer used; empty: it is used."""
        return self.error.message if self.error is not None else ""

    @property
    def is_parent(self) -> bool:
        """Return whether it is the first one to read from, of all chunks or of a tree of them."""
        return 0 in self.ranks

    @property
    def is_measured(self) -> bool:
        """Return whether it was read, or was connected for long enough to be read once if it had a missing chunk."""
        return self.is_connected and (self.moved_bytes > 0 or time.monotonic() - self._followed_at >= PROBE_S)

    @property
    def is_connected(self) -> bool:
        """Return whether it has given a lease and its memory can be read."""
        return self._generation >= 0

    def holds_back(self, tree: int) -> bool:
        """Return whether later upstreams should not be read for a tree's chunks that this one has or will have.

        One that the hub does not name for a tree is no reason to wait there: its own chunks of it may come from here.
        """
        if self.error is not None or self.ranks[tree] == UNNAMED:
            return False
        alive_at = self._alive_at[tree] if len(self.ranks) > 1 else max(self._alive_at)
        return time.monotonic() - alive_at < PATIENCE_S

    @property
    def pace(self) -> float:
        """Return bytes per second while it is read; 0: not known yet."""
        read = self.moved_bytes / self._read_s if self._read_s else 0.0
        return min(read, self._max_bytes_per_s) if self._max_bytes_per_s else read

    def is_much_faster_than(self, other: UpstreamReader) -> bool:
        """Return True if waiting for an earlier upstream wastes time, because it provides far less than this one."""
        now = time.monotonic()
        # Not before its bytes could have come: one tree's parent gives while the other's chunks are some hops away.
        is_new = now - other._followed_at < PROBE_S
        return not is_new and self.pace > MUCH_FASTER * other._recent_pace.value(now)

    def should_probe(self) -> bool:
        """Return True at most once in `PROBE_S`: time to read one chunk out of turn and measure the pace."""
        now = time.monotonic()
        if now - self._probed_at < PROBE_S:
            return False
        self._probed_at = now
        return True

    def note_transport_used(self, transport: Transport, source: Descriptor) -> None:
        """Record a finished read's transport: one that compresses says only now whether it compressed these bytes."""
        if isinstance(transport, Coding):
            name, why = transport.way(source)
            self._set_path(name, "; ".join(filter(None, (self._why_no_nearer, why))))

    def _set_path(self, name: str, why: str) -> None:
        self.path = f"{name} <- {self.upstream.member[:8]}"
        self.why[self.path] = why

    def request_news(self) -> None:
        """Send the next log request now: more chunks are wanted than are known."""
        self._news_wanted.set()

    def renew(self, upstream: Upstream) -> None:
        """Use a newer grant of the hub: a spare may connect later than the 30 to 45 s for which a grant is good."""
        if not self.is_connected:
            self.upstream = self.peer.upstream = upstream

    def _wait_for_news(self) -> None:
        """Wait until the next log request is useful."""
        self._news_wanted.wait(self._timing.log_pause_s if self.is_parent else self._timing.spare_pause_s)
        self._news_wanted.clear()

    def _wait_until_needed(self) -> None:
        """Wait until a lease may be needed. A parent's is needed now; see `Timing.spare_pause_s` and `PROBE_S`."""
        begun = time.monotonic()
        while not (self.is_parent or self._closing.is_set() or self._news_wanted.wait(self._timing.spare_pause_s)):
            if len(self.ranks) == 1 or (1 in self.ranks and time.monotonic() - begun >= 2 * PROBE_S):
                return
        self._news_wanted.clear()

    def reads_of(self, chunks: I64) -> list[Read]:
        """Return the reads to post for these chunks, one for each pair of regions."""
        return [
            (*self._transports[pair], segments)
            for pair, segments in self._weights.segments(chunks, self._row_region, self._row_offset).items()
        ]

    def note_read(self, chunks: I64, nbytes: int, seconds: float) -> None:
        """Record a finished read; its pace determines the size of the next one."""
        self.last_read = now = time.monotonic()
        self._note_alive(chunks)
        self.moved_bytes += nbytes
        self._recent_pace.add(now, nbytes)
        # Reads overlap: time that an earlier one has counted is not counted again.
        self._read_s += now - max(now - seconds, self._read_until)
        self._read_until = now
        if self._read_s > JUDGED_AFTER_S:
            self._check_floor(self.moved_bytes / self._read_s, "gives")
        if seconds < STEP_S:
            # Faster growth only after a read that was about as large as allowed: a small one says little of the rate.
            is_full = 2 * nbytes >= self.step_chunks * self._weights.layout.chunks.chunk_bytes
            more = 8 if is_full and seconds < STEP_S / 8 else 2
            self.step_chunks = min(more * self.step_chunks, MAX_STEP_CHUNKS)
        elif seconds > 4 * STEP_S:
            self.step_chunks = max(1, self.step_chunks // 2)
        if self._max_bytes_per_s:
            most = int(self._max_bytes_per_s * LIMITED_STEP_S / self._weights.layout.chunks.chunk_bytes)
            self.step_chunks = max(1, min(self.step_chunks, most))

    def charge(self, nbytes: int) -> None:
        """Count a read that begins now against the holder's limit."""
        # The holder relies on its readers to keep to the limit: reads are one-sided, so it cannot slow them down.
        # A read counts when it begins, because several are under way at once.
        if self._max_bytes_per_s:
            self.not_before = max(self.not_before, time.monotonic()) + nbytes / self._max_bytes_per_s

    def _note_alive(self, chunks: I64) -> None:
        """Record that it gave, or now has, these chunks."""
        now = time.monotonic()
        for tree in set((chunks % NUM_TREES).tolist()):
            self._alive_at[tree] = now

    def is_silent(self, received_bytes: int, stall_s: float, *, is_read: bool) -> bool:
        """Return True if the reads under way received less than `LEAST_BYTES` within `stall_s`."""
        # All reads of this upstream together, because they may share a connection.
        if not is_read:
            self._silence.begin()
            return False
        return self._silence.look(self.moved_bytes, received_bytes) > stall_s

    def _check_floor(self, bytes_per_s: float, how: str) -> None:
        """Stop using the upstream if it is slower than the caller's minimum."""
        # The only holder is no exception: the fetch then reads storage, or fails.
        floor = self._min_bytes_per_s
        if bytes_per_s < floor:
            self.is_too_slow = True
            message = f"{self.path or 'it'} {how} {bytes_per_s / GB:.3f} GB/s, below the floor of {floor / GB:.3f}"
            why = why_command(self._weights.identity.model)
            hint = f"run `{why}` to see why no nearer transport was chosen, or lower min_bytes_per_s"
            self.fail(SourceStalled(message, hint=hint))

    def _apply_limit(self, max_bytes_per_s: int) -> None:
        """Apply the holder's limit for this reader, in bytes/s; 0: no limit."""
        if max_bytes_per_s and not self.not_before:
            # A read begins once the limit allows all of its bytes. The first one waits as long as the largest takes.
            chunk_s = self._weights.layout.chunks.chunk_bytes / max_bytes_per_s
            first_s = min(_FIRST_S, max(LIMITED_STEP_S, chunk_s))
            self.not_before = time.monotonic() + first_s
        self._max_bytes_per_s = max_bytes_per_s
        if max_bytes_per_s:
            self._check_floor(max_bytes_per_s, "gives at most")

    def note_wrong_chunk(self, chunk: int) -> None:
        """Remember a wrong chunk. When this reader ends, the holder digests it again."""
        # The hub does not trust one reader's word about another member's bytes. The holder stops serving damaged
        # weights itself, and that protects the other readers.
        self._suspect_chunk = chunk

    def fail(self, error: PenstockError) -> None:
        """Stop using the upstream; keep the first error, without its traceback."""
        # The traceback's frames refer to this object, and this to the destination memory: one dead upstream would keep
        # all weights of a finished fetch alive until Python's cyclic collector runs.
        if self.error is None:
            self.error = without_frames(error)
        self._closing.set()
        self._news_wanted.set()
        self._ticket.wake()

    def close(self) -> None:
        """Stop following the log; the thread releases the lease. Waits for the thread `Timing.fetch_end_s` at most."""
        self._closing.set()
        self._news_wanted.set()
        # A log request may be waiting at the peer for news.
        self.peer.interrupt()
        self.thread.join(timeout=self._timing.fetch_end_s)

    def _follow(self) -> None:
        """Get a lease, connect, and follow the log: the body of the thread."""
        self._wait_until_needed()
        if self._closing.is_set():
            return
        try:
            with self.peer as peer:
                lease = peer.lease()
                self._apply_limit(lease.max_bytes_per_s)
                self._connect(peer.map())
                self._alive_at = [time.monotonic()] * NUM_TREES
                try:
                    self._read_log(peer)
                finally:
                    if self._suspect_chunk is not None:
                        # An error is expected: SourceBusy says that the holder found the damage and stopped serving.
                        with contextlib.suppress(PenstockError):
                            peer.recheck(self._suspect_chunk)
        except PenstockError as error:
            # An error while it is closed is the interrupted request.
            if not self._closing.is_set():
                self.fail(error)

    def _connect(self, peer_map: HoldingMap) -> None:
        """Check the peer's map against our layout, and choose a transport for each pair of regions.

        Raises:
            PlanError: the peer's chunks differ, or no transport reaches it. FormatError: the map does not fit.
        """
        chunks, ours = self._weights.layout.chunks, self._weights.place
        theirs_are = (peer_map.leaf_bytes, peer_map.chunk_bytes, peer_map.num_chunks)
        if theirs_are != (chunks.leaf_bytes, chunks.chunk_bytes, chunks.num_chunks):
            expected = (chunks.leaf_bytes, chunks.chunk_bytes, chunks.num_chunks)
            message = f"(leaf_bytes, chunk_bytes, num_chunks) are {theirs_are} at the peer and {expected} here"
            raise PlanError(message, hint="members must run releases with the same chunk size")
        room = [min((decode(raw).nbytes for raw in offered.values()), default=0) for offered in peer_map.regions]
        region, offset = locate_rows(self._weights.layout, peer_map, room)
        self._row_region = region
        self._row_offset = offset
        has_bytes = ours.row_region >= 0
        pairs = set(zip(region[has_bytes].tolist(), ours.row_region[has_bytes].tolist(), strict=True))
        for theirs, mine in sorted(pairs):
            handles = self._weights.handles(mine)
            transport, descriptor, why = self._links.choose(
                handles, peer_map.regions[theirs], same_host=self.peer.is_on_host, same_process=False
            )
            # Mapped ahead of the first read, whose time would otherwise be that of the mapping.
            if isinstance(transport, Reaching):
                transport.reach(handles[transport.name].memory.device, descriptor)
                self.step_chunks = self.step_chunks if self._max_bytes_per_s else MAPPED_STEP_CHUNKS
            self._transports[theirs, mine] = transport, handles[transport.name], descriptor
            self._why_no_nearer = why
            self._set_path(transport.name, why)
        # In this order: another thread reads the time once it sees that this upstream is connected.
        self._followed_at = time.monotonic()
        self._generation = peer_map.generation

    def _read_log(self, peer: PeerClient) -> None:
        """Follow the log until this reader is closed."""
        serial = 0
        while not self._closing.is_set():
            reply = peer.log(serial, self._timing.log_wait_s)
            self._apply_limit(reply.max_bytes_per_s)
            if reply.generation != self._generation or reply.state == "damaged":
                raise StaleDescriptor("its weights changed", uri=f"penstock:{self.upstream.member}")
            chunks = decode_column(reply.chunks, "<u4")
            if len(chunks):
                self._add_news(chunks, decode_digests(reply.leaves))
            if reply.state == "whole":
                self._alive_at = [time.monotonic()] * NUM_TREES
            self._note_alive(chunks)
            if reply.state != "filling" and reply.serial == serial:
                # Nothing more will come; only the lease is renewed.
                self._closing.wait(self._timing.log_wait_s)
            elif len(chunks):
                self._closing.wait(self._timing.log_gather_s)
                self._wait_for_news()
            serial = reply.serial

    def _add_news(self, chunks: I64, leaves: U64) -> None:
        """Check and record chunks that the peer has verified, with their digests."""
        table = self._weights.layout.chunks
        if chunks.max() >= table.num_chunks:
            raise FormatError("its log names a chunk past the end", uri=f"penstock:{self.upstream.member}")
        if len(leaves) != table.leaf_counts(chunks).sum():
            raise FormatError("its log's leaves do not fit its chunks", uri=f"penstock:{self.upstream.member}")
        # Before a byte is read: digests that contradict the manifest prove a damaged or lying member.
        clash = self._weights.contradicting_chunks(chunks, leaves)
        if len(clash):
            message = f"its digests of chunk {int(clash[0])} are not the manifest's"
            raise IntegrityError(message, uri=f"penstock:{self.upstream.member}")
        try:
            self._weights.record_digests(chunks, leaves, f"member {self.upstream.member}")
        except IntegrityError as error:
            self._ticket.fail(error)
            raise
        # Last: another thread reads the digests of chunks that it sees in `has`. They are now those in our weights: of
        # the manifest, or recorded from the first source that stated them.
        self.has[chunks] = True
        self._ticket.wake()


class _Pace:
    """A moving average of bytes per second of wall time, over the last one to two `PROBE_S`."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._nbytes = 0
        self._before = 0.0

    def add(self, now: float, nbytes: int) -> None:
        """Add bytes that arrived now."""
        self._turn(now)
        self._nbytes += nbytes

    def value(self, now: float) -> float:
        """Return the average now."""
        self._turn(now)
        return max(self._before, self._nbytes / max(now - self._since, PROBE_S / 2))

    def _turn(self, now: float) -> None:
        """Begin a new interval if the present one is over."""
        # Computed once: another thread may change `_since` between check and use.
        passed_s = now - self._since
        if passed_s >= PROBE_S:
            self._before = self._nbytes / passed_s
            self._since = now
            self._nbytes = 0
