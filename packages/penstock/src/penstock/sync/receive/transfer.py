"""The transfer of one receiver's part of a sync from several sources at once, with verification.

Source devices on this host share one queue per receiving device, because concurrent reads would compete for links. If
`Transfer.delta` is set, only strips that changed since the last version are read where measurements show a gain. A
skipped strip is digested like a strip that was read, so the stored digests are never trusted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np

from penstock.digest.strip import Strips
from penstock.engine.run import Item, Run
from penstock.engine.threads import KeptThreads
from penstock.engine.trace import Trace
from penstock.errors import BudgetTooSmall, Cancelled, IntegrityError, PenstockError, PlanError, StaleDescriptor
from penstock.holding.regions import VersionRegions
from penstock.plan.sync import (
    AHEAD_WINDOWS,
    ASK_BYTES,
    NEAR_READS,
    READS_AT_ONCE,
    READS_OF_ONE,
    WATERMARK_BYTES,
    ReceiverPlan,
    step_bytes,
)
from penstock.sync.membership import Membership
from penstock.sync.messages import RankProgress
from penstock.sync.receive.packed import BufferLeases
from penstock.sync.receive.sources import SourceLink, SourceRead, TransferCounts
from penstock.sync.receive.steps import Step, Windows, cut, joined, some_of
from penstock.timing import DEFAULT, Timing
from penstock.transfer.blame import blamed
from penstock.types import GB, I64, MIB, U64

CUT_S = 50e-6
"""Seconds for selecting some strips of a step, which takes about twenty numpy calls."""


def require_planned(part: ReceiverPlan, links: Iterable[SourceLink]) -> None:
    """Raise StaleDescriptor if a source registered its memory again, because the plan's offsets are then invalid."""
    if moved := part.moved({link.member: link.map.address for link in links}):
        raise StaleDescriptor("the source has registered its memory again", uri=f"penstock:{moved[0]}")


def pays(nbytes: int, changed_bytes: float, bytes_per_s: float, cost_s: float) -> bool:
    """Return whether it is faster to spend `cost_s` seconds and read only changed bytes. A rate of 0 means unknown."""
    return bytes_per_s > 0 and (nbytes - changed_bytes) / bytes_per_s > cost_s


class ChangedRanges:
    """The verified digests of one `Transfer`, for one plan and one receiver memory."""

    def __init__(self) -> None:
        self.asks_first = False
        self.density: float | None = None
        self._digests: dict[Step, U64] = {}
        # A read that failed midway leaves strips of two versions.
        self._unsure: set[Step] = set()
        self._bytes_per_s = 0.0
        self._ask_s = 0.0
        self._changed_bytes = 0
        self._is_whole = False
        self._why = ""

    def begin(self, nbytes: int) -> None:
        """Begin a run of `nbytes`, and decide whether the run requests digests before it reads bytes."""
        self._changed_bytes = 0
        self._is_whole = bool(self._digests)
        if not self._digests:
            self.asks_first = False
            self._why = "because no earlier version was received with this plan in this memory"
        elif self.density is None:
            self.asks_first = True
            self._why = "while the fraction of changed bytes is measured"
        else:
            # Training steps in one run change about the same fraction of the weights.
            self.asks_first = pays(nbytes, self.density * nbytes, self._bytes_per_s, self._ask_s)
            word = "pays" if self.asks_first else "does not pay"
            self._why = (
                f"{self.density:.0%} changed the last time: at {self._bytes_per_s / GB:.1f} GB/s, and "
                f"{self._ask_s:.3f} s for digests, reading only changes {word}"
            )

    def lacking(self, step: Step, wanted: U64) -> Step | None:
        """Return a step with the strips that must be read, or None if no strip of this step changed."""
        known = None if step in self._unsure else self._digests.get(step)
        if known is None:
            return step
        changed = known != wanted
        if not changed.any():
            return None
        changed_bytes = int(step.ours.nbytes[changed].sum())
        if not pays(step.nbytes, changed_bytes, self._bytes_per_s, CUT_S):
            return step
        return some_of(step, np.flatnonzero(changed))

    def reading(self, step: Step) -> None:
        """Treat a step's bytes as unknown until they are verified again. Call this before the step is read."""
        self._unsure.add(step)

    def proven(self, step: Step, digests: U64) -> None:
        """Store the digests that were verified for this receiver's memory."""
        previous = self._digests.get(step)
        if previous is None:
            self._is_whole = False
        else:
            self._changed_bytes += int(step.ours.nbytes[previous != digests].sum())
        self._digests[step] = digests
        self._unsure.discard(step)

    def ended(self, counts: TransferCounts, *, were_ready: bool) -> None:
        """Record the rates of a completed run. If `were_ready`, also record how long the run's digest requests took."""
        if self._is_whole and counts.nbytes:
            self.density = self._changed_bytes / counts.nbytes
        if counts.moved_bytes and counts.wire_s > 0:
            self._bytes_per_s = counts.moved_bytes / counts.wire_s
        if were_ready:
            self._ask_s = max((read.ready_s for read in counts.reads), default=0.0)

    def summary(self, counts: TransferCounts) -> str:
        """Describe the last run in one line."""
        return f"delta: moved {counts.moved_bytes} of {counts.nbytes} bytes, {self._why}"


LEAST_BYTES = MIB
"""Smallest watermark. Below it every strip would be split into a few leaves of its digest."""


class Transfer(msgspec.Struct, eq=False, dict=True):
    """The transfer of a receiver's part of a sync. Call `run` for each version, while the plan's key is the same.

    `watermark_bytes` limits the bytes that are read and not yet verified. `lost` is the source that failed, or None.
    """

    part: ReceiverPlan
    into: VersionRegions
    names: Sequence[str] = ()
    watermark_bytes: int = WATERMARK_BYTES
    stall_s: float = 30.0
    trace: Trace = msgspec.field(default_factory=lambda: Trace(enabled=False))
    delta: ChangedRanges | None = None
    threads: KeptThreads | None = None
    timing: Timing = DEFAULT

    def __post_init__(self) -> None:
        if self.watermark_bytes < LEAST_BYTES:
            message = f"a watermark of {self.watermark_bytes} bytes is too small"
            raise BudgetTooSmall(message, minimum_bytes=LEAST_BYTES)
        self._other_delta: ChangedRanges | None = None
        self._windows: Windows | None = None
        self._sizes: list[tuple[int, ...]] = []
        self.lost: str | None = None
        self.moved_bytes = 0
        self.proven: list[tuple[Strips, U64]] = []

    def run(self, sources: Mapping[str, SourceLink]) -> TransferCounts:
        """Read the part from sources with one version, and return when every byte is verified in place.

        Raises:
            PlanError: the part does not match the memory, a source is missing, or the sources have several versions.
            StaleDescriptor, PeerLost, SourceStalled, IntegrityError: `lost` names the source that failed.
            DestinationError: the receiver's device failed, or may still be written to.
        """
        self.lost = None
        self.moved_bytes = 0
        self.proven = []
        windows = self._prepare(sources)
        if self.delta is not None:
            self.delta.begin(self.part.nbytes)
        begun = time.perf_counter()
        run = _TransferRun(self, windows, sources)
        try:
            with run:
                run.carry_out()
        except PenstockError as error:
            # A running read can write to the memory until the run is closed.
            error.mutated = run.is_touched
            self.lost = run.ticket.blamed
            raise
        counts = run.counts
        counts.seconds = time.perf_counter() - begun
        if self.delta is not None:
            self.delta.ended(counts, were_ready=all(link.map.is_ready for link in sources.values()))
        return counts

    def note_exchange(self) -> None:
        """Record that a flip swapped the memory of `into` with the memory that the run before last filled."""
        # The memory of `into` now contains the previous version.
        if self.delta is not None:
            self.delta, self._other_delta = self._other_delta or ChangedRanges(), self.delta

    def _prepare(self, sources: Mapping[str, SourceLink]) -> Windows:
        used = np.flatnonzero(self.part.link_bytes()).tolist()
        missing = [self.part.sources[i] for i in used if self.part.sources[i] not in sources]
        if missing:
            raise PlanError(f"{self.part.receiver} has no link to {', '.join(missing)}")
        links = [sources[self.part.sources[i]] for i in used]
        require_planned(self.part, links)
        if len({link.map.version for link in links}) > 1:
            versions = ", ".join(f"{link.member}: {link.map.version}" for link in links)
            raise PlanError(f"the sources for {self.part.receiver} have different versions: {versions}")
        sizes = [sources[name].map.sizes if i in used else () for i, name in enumerate(self.part.sources)]
        if self._windows is None or sizes != self._sizes:
            # Sizes come from other processes. A part that extends beyond a region must not cause an out-of-bounds read.
            self.part.check(src_nbytes=[sum(regions) for regions in sizes], dst_nbytes=self.into.nbytes)
            first = [np.cumsum([0, *regions], dtype=np.int64) for regions in sizes]
            self._windows = cut(
                self.part,
                first,
                self.into.first,
                window_bytes=self.watermark_bytes // AHEAD_WINDOWS,
                piece_bytes=step_bytes(self.watermark_bytes),
            )
            self._sizes = sizes
        return self._windows


class _Queue(msgspec.Struct, eq=False):
    """A queue of waiting steps. `turns` limits concurrent reads, if several sources share the queue."""

    turns: contextlib.AbstractContextManager[object]
    steps: deque[Step] = msgspec.field(default_factory=deque)
    num_flying: int = 0


class _TransferRun(Run):
    def __init__(self, transfer: Transfer, windows: Windows, sources: Mapping[str, SourceLink]) -> None:
        nbytes, stall_s = transfer.part.nbytes, transfer.stall_s
        super().__init__(nbytes, trace=transfer.trace, stall_s=stall_s, is_quick=True, threads=transfer.threads)
        self._transfer = transfer
        self._windows = windows
        self._delta = transfer.delta
        self._asks_first = self._delta is not None and self._delta.asks_first
        # A reference to `self` would be a cycle that keeps the receiver's memory alive until Python collects it.
        ticket = self.ticket
        self._leases = BufferLeases(lambda: ticket.stopped, transfer.threads)
        self._reads = {
            i: SourceRead(sources[transfer.part.sources[i]], transfer.into, self._leases, timing=transfer.timing)
            for i in dict.fromkeys(step.source for step in windows.steps)
        }
        self._queues = self._queued(windows.steps)
        self.counts = TransferCounts(nbytes, self._reads.values())
        num_queues = max(1, len(self._queues))
        self._ask = self.executor("ask", min(READS_AT_ONCE, max(1, len(self._reads))))
        self._fetch = self.executor("fetch", min(READS_AT_ONCE, READS_OF_ONE * num_queues))
        # One thread can queue launches while the other waits for the device's digests.
        self._compute = self.executor("compute", 2)

        # The lock guards the fields below, and `counts.peak_bytes`.
        self._lock = threading.Lock()
        self._wanted: dict[Step, U64] = {}
        """Digests of steps that have not arrived yet."""
        self._here: set[Step] = set()
        """Steps that arrived before their digests."""
        self._skipped: set[Step] = set()
        """Steps with strips that were not read."""
        self._left = np.bincount(np.array([step.window for step in windows.steps], np.int64), minlength=len(windows))
        """Number of unverified steps in each window."""
        self._unverified_bytes = 0
        self._next_window = 0

    def _queued(self, steps: Sequence[Step]) -> dict[int | str, _Queue]:
        # Use one queue per source, so that a slow source does not delay others. Devices on this host share a queue.
        queues: dict[int | str, _Queue] = {}
        part = self._transfer.part
        sources = np.array([step.source for step in steps], np.int64)
        windows = np.array([step.window for step in steps], np.int64)
        for i in np.lexsort((np.arange(len(steps)), part.turn_of(sources), windows)).tolist():
            key = self._key_of(steps[i])
            if key not in queues:
                is_shared = isinstance(key, str)
                queues[key] = _Queue(threading.BoundedSemaphore(NEAR_READS) if is_shared else contextlib.nullcontext())
            queues[key].steps.append(steps[i])
        return queues

    def _key_of(self, step: Step) -> int | str:
        device = self._reads[step.source].near_device(step)
        return step.source if device is None else device

    def carry_out(self) -> None:
        with self._lock:
            self._advance()
            self._assign()
        for number, source in self._reads.items():
            if source.link.map.is_ready and not self._asks_first:
                for steps in self._windows.digest_requests(number, ASK_BYTES):
                    start = partial(self._request_digests, source, steps)
                    self._ask.post(Item(steps[0].window, f"ask {source.member}", 0, start=start))
        with self._leases:
            self.wait()

    def _assign(self) -> None:
        """Post the reads that may start now. The caller holds the lock."""
        # Three limits apply: reads per queue, unverified bytes, and windows ahead of the first incomplete window.
        items = []
        for queue in self._queues.values():
            while queue.steps and queue.num_flying < READS_OF_ONE:
                step = queue.steps[0]
                remaining = self._transfer.watermark_bytes - self._unverified_bytes
                if step.nbytes > remaining or step.window >= self._next_window + AHEAD_WINDOWS:
                    break
                queue.steps.popleft()
                queue.num_flying += 1
                self._unverified_bytes += step.nbytes
                self.counts.peak_bytes = max(self.counts.peak_bytes, self._unverified_bytes)
                source = self._reads[step.source]
                items.append(
                    Item(
                        step.window,
                        f"{source.member} window {step.window}",
                        step.nbytes,
                        start=partial(self._read_step, source, step),
                        finish=partial(self._arrived, step),
                    )
                )
        if items:
            self._fetch.post(*items)

    def _advance(self) -> None:
        """Advance past the verified windows in order, and finish after the last window. The caller holds the lock."""
        while self._next_window < len(self._windows) and not self._left[self._next_window]:
            self._next_window += 1
        if self._next_window == len(self._windows):
            self.ticket.finish()

    def _post_verification(self, step: Step) -> None:
        """Post a step's verification when both its bytes and its digests have arrived. The caller holds the lock."""
        if step in self._here and step in self._wanted:
            self._here.remove(step)
            self._compute.post(
                Item(
                    step.window,
                    f"verify window {step.window}",
                    step.nbytes,
                    start=partial(self._verify, step, self._wanted.pop(step)),
                    finish=partial(self._verified, step),
                )
            )

    def _request_digests(self, source: SourceRead, steps: Sequence[Step]) -> None:
        digests = self._digests_of(source, joined([step.theirs for step in steps]))
        ends = np.cumsum([len(step.theirs) for step in steps])
        for step, wanted in zip(steps, np.split(digests, ends[:-1]), strict=True):
            self._note_digests(step, wanted)

    def _digests_of(self, source: SourceRead, strips: Strips) -> U64:
        begun = time.perf_counter()
        with blamed(source.member, self.ticket):
            digests = source.ask(strips, stall_s=self.stall_s, is_over=lambda: self.ticket.stopped)
        self.counts.add(source, ready_s=time.perf_counter() - begun)
        return digests

    def _note_digests(self, step: Step, wanted: U64) -> None:
        with self._lock:
            self._wanted[step] = wanted
            self._post_verification(step)

    def _read_step(self, source: SourceRead, step: Step) -> None:
        missing: Step | None = step
        if self._asks_first or not source.link.map.is_ready:
            wanted = self._digests_of(source, step.theirs)
            self._note_digests(step, wanted)
            if self._delta is not None:
                missing = self._delta.lacking(step, wanted)
                if missing is not step:
                    self._skipped.add(step)
        if missing is not None:
            self._read(source, step, missing)

    def _read(self, source: SourceRead, step: Step, strips: Step) -> None:
        if self._delta is not None:
            self._delta.reading(step)
        with blamed(source.member, self.ticket):
            # A step that waits for its source's rows must not occupy the link, so the turn begins only here. Each read
            # ends at its deadline, so the wait for a turn is bounded.
            with self._queues[self._key_of(step)].turns, self.counts.reading():
                if self.ticket.stopped:
                    raise Cancelled("the transfer was cancelled")
                failed, is_touched = source.read(strips, stall_s=self.stall_s)
            if is_touched:
                self.is_touched = True
            if failed is not None:
                raise failed
        self.counts.add(source, nbytes=strips.nbytes)

    def _arrived(self, step: Step) -> None:
        with self._lock:
            self._queues[self._key_of(step)].num_flying -= 1
            self._here.add(step)
            self._assign()
            self._post_verification(step)

    def _verify(self, step: Step, wanted: U64) -> None:
        source = self._reads[step.source]
        digests = self._own_digests(step)
        wrong: I64 = np.flatnonzero(digests != wanted)
        if len(wrong) and step in self._skipped:
            # The engine changed skipped strips in place, so read the whole step.
            self._read(source, step, step)
            digests = self._own_digests(step)
            wrong = np.flatnonzero(digests != wanted)
        if len(wrong):
            row, names = int(step.rows[wrong[0]]), self._transfer.names
            with blamed(source.member, self.ticket):
                raise IntegrityError(
                    f"{len(wrong)} of {len(digests)} strips from {source.member} differ from its digests",
                    tensor=names[row] if row < len(names) else None,
                    uri=source.member,
                    hint="update again. The bytes were damaged on the way, or the source changed them without a fence",
                )
        self._transfer.proven.append((step.ours, digests))
        if self._delta is not None:
            self._delta.proven(step, digests)

    def _own_digests(self, step: Step) -> U64:
        begun = time.perf_counter()
        digests = self._transfer.into.digests(step.ours)
        self.counts.add(self._reads[step.source], digest_s=time.perf_counter() - begun)
        return digests

    def _verified(self, step: Step) -> None:
        with self._lock:
            self._unverified_bytes -= step.nbytes
            self._left[step.window] -= 1
            self.ticket.moved_bytes += step.nbytes
            self._transfer.moved_bytes = self.ticket.moved_bytes
            self._advance()
            self._assign()
        self.ticket.wake()


@contextlib.contextmanager
def reporting_progress(
    membership: Membership, planner: str, version: int, transfer: Transfer, threads: KeptThreads
) -> Iterator[None]:
    """Report progress during the block, in one of `threads`."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(transfer.timing.progress_interval_s):
            report(membership, planner, RankProgress(version=version, moved_bytes=transfer.moved_bytes))

    # Use a separate thread: the transfer's threads wait for the link, and a receiver without reports counts as late.
    reporter = threads.start(work, "penstock-progress")
    assert reporter is not None
    try:
        yield
    finally:
        over.set()
        reporter.join()  # no report may arrive after the next attempt has begun


def report(membership: Membership, planner: str, progress: RankProgress) -> None:
    """Send a report. A planner that cannot be reached counts this receiver as late, and the update continues."""
    with contextlib.suppress(PenstockError):
        membership.ask(planner, lambda sync_client: sync_client.progress(progress), channel="progress")
