"""An upstream of a fetch. A thread follows the upstream's log to learn which chunks are available.

The thread records digests in the weights, sets `has`, and wakes the fetch. The fetch's threads read the digests and
`has`, and record finished reads. A stale value changes the choice of a source but never the bytes.
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
from penstock.holding.placement import decode_column, decode_digests, locate_rows
from penstock.hub.messages import NUM_TREES, HoldingMap, Upstream
from penstock.peer.client import PeerClient
from penstock.peer.local_weights import LocalWeights
from penstock.segments import Segments
from penstock.timing import Timing
from penstock.transport.choose import PeerLinks
from penstock.transport.protocol import Coding, Descriptor, Handle, Reaching, Transport, decode
from penstock.types import GB, I64, U64
from penstock.waits import start_thread

UNNAMED = 1 << 16
"""Rank of an upstream in an order that does not contain it."""
PATIENCE_S = 0.5
"""If an upstream sends no new chunks and no bytes for this many seconds, later upstreams no longer wait for it."""
STEP_S = 0.02
"""Target duration of a read in seconds: short compared with a stall, long compared with its cost (0.1 ms)."""
MAPPED_STEP_CHUNKS = 32
"""Size of the first reads from mapped memory (512 MiB), which is `STEP_S` of PCIe. Growing from one chunk costs 10 ms
of Python."""
MAX_STEP_CHUNKS = 128
"""Maximum size of a read (2 GiB). A read costs 1 to 2 ms of Python, in which NVLink moves 0.6 GB. Source:
docs/design/fetch.md."""
_FIRST_S = 5.0
"""Maximum wait in seconds for the first read under a rate limit, the time of a 16 MiB chunk at 3 MB/s. A slower reader
should exceed the limit once rather than seem to stall."""
LIMITED_STEP_S = 0.1
"""Duration of one read from an upstream that limits its readers, in seconds."""
JUDGED_AFTER_S = 1.0
"""Seconds of reading before an upstream's pace is compared with the minimum. The first reads set up connections."""
PROBE_S = 1.0
"""Interval in seconds at which one chunk is read from a later upstream to measure its pace, and the age at which an
earlier upstream is compared with it. With two trees, the upstream after a parent connects for this measurement only."""
MUCH_FASTER = 4.0
"""A later upstream is used in addition to an earlier one if it is this many times as fast. Upstreams that share a
network link differ by less."""

Read = tuple[Transport, Handle, Descriptor, Segments]


class UpstreamReader:
    """The state of an upstream, which a thread updates from its log.

    Attributes:
        ranks: position in the hub's order for each tree of chunks, or in the single order. 0 is the parent.
        why: for each path, why no nearer transport was chosen, and why bytes are compressed or not.
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
        self.has = np.zeros(weights.layout.chunks.num_chunks, bool)
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
        # One value per tree, because an upstream whose parent stalls in one tree still sends the other tree's chunks.
        self._alive_at = [self._probed_at] * NUM_TREES
        self._recent_pace = _Pace(self._probed_at)
        self._silence = StallTimer()
        self._closing = threading.Event()
        self._news_wanted = threading.Event()
        self._generation = -1
        # A wrong chunk, which the holder is asked to digest again when this reader ends. The hub does not trust a
        # reader's report about another member's bytes. A corrupt holder stops serving.
        self.suspect_chunk: int | None = None
        self._transports: dict[tuple[int, int], tuple[Transport, Handle, Descriptor]] = {}
        self._row_region: I64 = np.zeros(0, np.int64)
        self._row_offset: I64 = np.zeros(0, np.int64)
        self.thread = threading.Thread(target=guarded, args=(ticket, self._follow), name="penstock-follow", daemon=True)

    def start(self) -> None:
        """Start the thread that follows the upstream."""
        start_thread(self.thread)

    @property
    def fault(self) -> str:
        """Return the reason why the upstream is no longer used, or "" while it is used."""
        return self.error.message if self.error is not None else ""

    @property
    def is_parent(self) -> bool:
        """Return whether this upstream is the first choice for all chunks or for a tree of chunks."""
        return 0 in self.ranks

    @property
    def is_measured(self) -> bool:
        """Return whether this upstream was read from, or was connected long enough for a read."""
        return self.is_connected and (self.moved_bytes > 0 or time.monotonic() - self._followed_at >= PROBE_S)

    @property
    def is_connected(self) -> bool:
        """Return whether this upstream granted a lease and its memory can be read."""
        return self._generation >= 0

    def holds_back(self, tree: int) -> bool:
        """Return whether later upstreams should wait because this upstream holds or will receive a tree's chunks."""
        if self.error is not None or self.ranks[tree] == UNNAMED:
            return False
        alive_at = self._alive_at[tree] if len(self.ranks) > 1 else max(self._alive_at)
        return time.monotonic() - alive_at < PATIENCE_S

    @property
    def pace(self) -> float:
        """Return the rate of reading in bytes per second, or 0 while the rate is unknown."""
        read = self.moved_bytes / self._read_s if self._read_s else 0.0
        return min(read, self._max_bytes_per_s) if self._max_bytes_per_s else read

    def is_much_faster_than(self, other: UpstreamReader) -> bool:
        """Return True if the earlier upstream `other` is so much slower that waiting for it wastes time."""
        now = time.monotonic()
        # The first chunks of a tree may still be several hops away.
        is_new = now - other._followed_at < PROBE_S
        return not is_new and self.pace > MUCH_FASTER * other._recent_pace.value(now)

    def should_probe(self) -> bool:
        """Return True at most once in `PROBE_S`, when it is time to read one chunk to measure the pace."""
        now = time.monotonic()
        if now - self._probed_at < PROBE_S:
            return False
        self._probed_at = now
        return True

    def note_transport_used(self, transport: Transport, source: Descriptor) -> None:
        """Record a finished read's transport, which knows only now whether it compressed the bytes."""
        if isinstance(transport, Coding):
            name, why = transport.way(source)
            self._set_path(name, "; ".join(filter(None, (self._why_no_nearer, why))))

    def _set_path(self, name: str, why: str) -> None:
        self.path = f"{name} <- {self.upstream.member[:8]}"
        self.why[self.path] = why

    def request_news(self) -> None:
        """Send the next log request now, because the fetch can read more chunks than are known."""
        self._news_wanted.set()

    def renew(self, upstream: Upstream) -> None:
        """Use a newer grant from the hub, because grants are valid for 30 to 45 s and a spare may connect later."""
        if not self.is_connected:
            self.upstream = self.peer.upstream = upstream

    def _wait_until_needed(self) -> None:
        begun = time.monotonic()
        while not (self.is_parent or self._closing.is_set() or self._news_wanted.wait(self._timing.spare_pause_s)):
            if len(self.ranks) == 1 or (1 in self.ranks and time.monotonic() - begun >= 2 * PROBE_S):
                return
        self._news_wanted.clear()

    def reads_of(self, chunks: I64) -> list[Read]:
        """Return the reads to post for these chunks, one for each pair of regions."""
        return [
            (*self._transports[pair], segments)
            for pair, segments in self._weights.memory.segments(chunks, self._row_region, self._row_offset).items()
        ]

    def note_read(self, chunks: I64, nbytes: int, seconds: float) -> None:
        """Record a finished read, whose pace determines the size of the next read."""
        self.last_read = now = time.monotonic()
        self._note_alive(chunks)
        self.moved_bytes += nbytes
        self._recent_pace.add(now, nbytes)
        # Reads overlap, so do not count time twice.
        self._read_s += now - max(now - seconds, self._read_until)
        self._read_until = now
        if self._read_s > JUDGED_AFTER_S:
            self._check_minimum(self.moved_bytes / self._read_s, "sends")
        if seconds < STEP_S:
            # Grow faster only after a read of about the allowed size, because a small read says little about the rate.
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
        # The holder cannot slow down one-sided reads, so readers respect the limit and count a read when it begins.
        if self._max_bytes_per_s:
            self.not_before = max(self.not_before, time.monotonic()) + nbytes / self._max_bytes_per_s

    def _note_alive(self, chunks: I64) -> None:
        now = time.monotonic()
        for tree in set((chunks % NUM_TREES).tolist()):
            self._alive_at[tree] = now

    def is_silent(self, received_bytes: int, stall_s: float, *, is_read: bool) -> bool:
        """Return True if the running reads received less than `LEAST_BYTES` within `stall_s`."""
        # Judge all reads from this upstream as a group, because they may share a connection.
        if not is_read:
            self._silence.begin()
            return False
        return self._silence.look(self.moved_bytes, received_bytes) > stall_s

    def _check_minimum(self, bytes_per_s: float, how: str) -> None:
        """Stop using the upstream if it is slower than the caller's minimum, even if it is the only holder."""
        minimum = self._min_bytes_per_s
        if bytes_per_s < minimum:
            self.is_too_slow = True
            message = (
                f"{self.path or 'the peer'} {how} {bytes_per_s / GB:.3f} GB/s, below the minimum of {minimum / GB:.3f}"
            )
            why = why_command(self._weights.identity.model)
            hint = f"run `{why}` to see why no nearer transport was chosen, or lower min_bytes_per_s"
            self.fail(SourceStalled(message, hint=hint))

    def _apply_limit(self, max_bytes_per_s: int) -> None:
        if max_bytes_per_s and not self.not_before:
            # A read begins once the limit allows all of its bytes, so the first read waits too.
            chunk_s = self._weights.layout.chunks.chunk_bytes / max_bytes_per_s
            first_s = min(_FIRST_S, max(LIMITED_STEP_S, chunk_s))
            self.not_before = time.monotonic() + first_s
        self._max_bytes_per_s = max_bytes_per_s
        if max_bytes_per_s:
            self._check_minimum(max_bytes_per_s, "sends at most")

    def fail(self, error: PenstockError) -> None:
        """Stop using the upstream. Keep the first error without its traceback."""
        # The traceback's frames would keep the destination memory allocated until the cyclic collector runs.
        if self.error is None:
            self.error = without_frames(error)
        self._closing.set()
        self._news_wanted.set()
        self._ticket.wake()

    def close(self) -> None:
        """Stop following the log. Wait at most `Timing.fetch_end_s` for the thread, which releases the lease."""
        self._closing.set()
        self._news_wanted.set()
        self.peer.interrupt()
        self.thread.join(timeout=self._timing.fetch_end_s)

    def _follow(self) -> None:
        self._wait_until_needed()
        if self._closing.is_set():
            return
        try:
            with self.peer as peer:
                self._apply_limit(peer.lease().max_bytes_per_s)
                self._connect(peer.map())
                self._alive_at = [time.monotonic()] * NUM_TREES
                try:
                    self._read_log(peer)
                finally:
                    if self.suspect_chunk is not None:
                        # SourceBusy is expected: the holder detected the corruption and stopped serving.
                        with contextlib.suppress(PenstockError):
                            peer.recheck(self.suspect_chunk)
        except PenstockError as error:
            # While this reader is closing, the error only means that the request was aborted.
            if not self._closing.is_set():
                self.fail(error)

    def _connect(self, peer_map: HoldingMap) -> None:
        chunks, ours = self._weights.layout.chunks, self._weights.memory.place
        theirs_are = (peer_map.leaf_bytes, peer_map.chunk_bytes, peer_map.num_chunks)
        expected = (chunks.leaf_bytes, chunks.chunk_bytes, chunks.num_chunks)
        if theirs_are != expected:
            message = f"the peer has (leaf_bytes, chunk_bytes, num_chunks) {theirs_are} instead of {expected}"
            raise PlanError(message, hint="run releases with the same chunk size on all members")
        capacities = [min((decode(raw).nbytes for raw in offered.values()), default=0) for offered in peer_map.regions]
        self._row_region, self._row_offset = locate_rows(self._weights.layout, peer_map, capacities)
        has_bytes = ours.row_region >= 0
        pairs = set(zip(self._row_region[has_bytes].tolist(), ours.row_region[has_bytes].tolist(), strict=True))
        for theirs, mine in sorted(pairs):
            handles = self._weights.regions.handles(mine)
            transport, descriptor, why = self._links.choose(
                handles, peer_map.regions[theirs], same_host=self.peer.is_on_host, same_process=False
            )
            # Map before the first read, so that the read's duration does not include the mapping.
            if isinstance(transport, Reaching):
                transport.reach(handles[transport.name].memory.device, descriptor)
                self.step_chunks = self.step_chunks if self._max_bytes_per_s else MAPPED_STEP_CHUNKS
            self._transports[theirs, mine] = transport, handles[transport.name], descriptor
            self._why_no_nearer = why
            self._set_path(transport.name, why)
        # Set `_generation` last, because another thread reads `_followed_at` once the generation is set.
        self._followed_at = time.monotonic()
        self._generation = peer_map.generation

    def _read_log(self, peer: PeerClient) -> None:
        serial = 0
        while not self._closing.is_set():
            reply = peer.log(serial, self._timing.log_wait_s)
            self._apply_limit(reply.max_bytes_per_s)
            if reply.generation != self._generation or reply.state == "damaged":
                raise StaleDescriptor("the peer's weights changed", uri=f"penstock:{self.upstream.member}")
            chunks = decode_column(reply.chunks, "<u4")
            if len(chunks):
                self._add_news(chunks, decode_digests(reply.leaves))
            if reply.state == "whole":
                self._alive_at = [time.monotonic()] * NUM_TREES
            self._note_alive(chunks)
            if reply.state != "filling" and reply.serial == serial:
                self._closing.wait(self._timing.log_wait_s)
            elif len(chunks):
                self._closing.wait(self._timing.log_gather_s)
                self._news_wanted.wait(self._timing.log_pause_s if self.is_parent else self._timing.spare_pause_s)
                self._news_wanted.clear()
            serial = reply.serial

    def _add_news(self, chunks: I64, leaves: U64) -> None:
        table = self._weights.layout.chunks
        if chunks.max() >= table.num_chunks:
            raise FormatError(
                "the peer's log names a chunk that does not exist", uri=f"penstock:{self.upstream.member}"
            )
        if len(leaves) != table.leaf_counts(chunks).sum():
            message = "the peer's log has the wrong number of leaf digests for its chunks"
            raise FormatError(message, uri=f"penstock:{self.upstream.member}")
        # Digests that contradict the manifest prove that the member is corrupt or lying.
        clash = self._weights.verified.contradicting(chunks, leaves)
        if len(clash):
            message = f"the peer's digests of chunk {int(clash[0])} differ from the manifest's"
            raise IntegrityError(message, uri=f"penstock:{self.upstream.member}")
        try:
            self._weights.record_digests(chunks, leaves, f"member {self.upstream.member}")
        except IntegrityError as error:
            self._ticket.fail(error)
            raise
        # Keep this last, because another thread reads the digests of all chunks in `has`.
        self.has[chunks] = True
        self._ticket.wake()


class _Pace:
    """A moving average in bytes per second of wall time, over the last one to two `PROBE_S`."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._nbytes = 0
        self._before = 0.0

    def add(self, now: float, nbytes: int) -> None:
        self._turn(now)
        self._nbytes += nbytes

    def value(self, now: float) -> float:
        self._turn(now)
        return max(self._before, self._nbytes / max(now - self._since, PROBE_S / 2))

    def _turn(self, now: float) -> None:
        # Another thread may change `_since` between the check and the use.
        passed_s = now - self._since
        if passed_s >= PROBE_S:
            self._before = self._nbytes / passed_s
            self._since = now
            self._nbytes = 0
