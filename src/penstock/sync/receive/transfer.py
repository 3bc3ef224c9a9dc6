"""Transfer of one receiver's part of a sync from several sources at once, with verification.

In: a `Part`, memory to read into, a link to each source. Out: every byte verified in place, or a typed error.
Not here: choosing sources and version (`subscriber`), the use of the bytes (`sync.recording.requirements`,
`staging_copy`).

    steps --fetch: read, at most watermark_bytes unverified--> --compute: digest, compare--> next window
          --ask: the source's digests, many steps at once-----'

From a source that had all rows at the start, the digests of many steps are requested together (`AskStep`) while the
steps are read; from any other source, the digests of each step are requested before it is read.

Digests of the last version in this receiver's memory, so that only changed strips are read.

In: for each step of a transfer the last verified digests, and those of the next version. Out: the strips to read, and
the reason.
Not here: reading and verifying (`transfer`): a strip that is not read is digested like one that was, so the stored
digests only decide what to skip, and are never trusted.

    first run: everything is read, and its digests stored -> next run: digests are requested before a step is read, and
    only strips that differ are read. Then the measured density and bandwidth decide whether to request digests first;
    if not, they are requested while everything is read.

Progress reports of a receiver to the planner of its part, during a transfer.

In: a running transfer. Out: `Progress`, twice a second and at the end.
Not here: the planner's use of it (`sync.publish.progress`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from penstock.digest.strip import Strips
from penstock.engine.executors import Executor, Pending, Ticket, Work
from penstock.engine.trace import Trace
from penstock.errors import BudgetTooSmall, Cancelled, IntegrityError, PenstockError, PlanError
from penstock.hub.messages import Progress
from penstock.lifecycle import quick_handover
from penstock.plan.sync import AHEAD_WINDOWS, ASK_BYTES, READS_AT_ONCE, READS_OF_ONE, WATERMARK_BYTES, Part
from penstock.sync.local_version import Regions
from penstock.sync.membership import Membership
from penstock.sync.receive.batches import DigestRequest, Step, Windows, cut, some_of
from penstock.sync.receive.sources import SourceLink, SourceRead, TransferReport, TransferStats
from penstock.types import GB, I64, MIB, U64

CUT_S = 50e-6
"""Time to select some strips of a step: about twenty numpy calls."""


def pays(nbytes: int, changed_bytes: float, bytes_per_s: float, cost_s: float) -> bool:
    """Return whether spending `cost_s` and reading only the changed bytes is quicker than reading all.

    Args:
        bytes_per_s: the measured rate of the wire; 0: not known, and the answer is False.
    """
    return bytes_per_s > 0 and (nbytes - changed_bytes) / bytes_per_s > cost_s


class Delta:
    """The digests of one `Transfer`: of one plan's key, and one receiver's memory.

    Attributes:
        asks_first: whether this run requests a step's digests before it reads the step.
        density: the share of bytes in strips that changed at the last version; None: not measured yet.
    """

    def __init__(self) -> None:
        self.asks_first = False
        self.density: float | None = None
        self._digests: dict[Step, U64] = {}
        # A read that failed midway leaves strips of two versions: the stored digests of its step are then worthless.
        self._unsure: set[Step] = set()
        self._bytes_per_s = self._ask_s = 0.0
        self._changed_bytes = 0
        self._is_whole = False
        self._why = ""

    def begin(self, nbytes: int) -> None:
        """Start a run of `nbytes`, and decide whether it requests digests first."""
        self._changed_bytes, self._is_whole = 0, bool(self._digests)
        if not self._digests:
            self.asks_first, self._why = False, "this plan has received no version yet"
        elif self.density is None:
            self.asks_first, self._why = True, "the share of changed bytes is being measured"
        else:
            # By the last version's density: training steps of one run change about the same share of the weights.
            self.asks_first = pays(nbytes, self.density * nbytes, self._bytes_per_s, self._ask_s)
            word = "pays" if self.asks_first else "does not pay"
            self._why = (
                f"{self.density:.0%} changed the last time: at {self._bytes_per_s / GB:.1f} GB/s, and "
                f"{self._ask_s:.3f} s for digests, reading only changes {word}"
            )

    def lacking(self, step: Step, wanted: U64) -> Step | None:
        """Return the strips of a step that must be read because they changed: all, some, or None for no strips."""
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
        """Treat a step's bytes as unknown until they are verified again. Order: before the first byte is read."""
        self._unsure.add(step)

    def proven(self, step: Step, digests: U64) -> None:
        """Store the digests that this receiver's memory was verified to have."""
        before = self._digests.get(step)
        if before is None:
            self._is_whole = False  # the change of this step is unknown, so this run measures no density
        else:
            self._changed_bytes += int(step.ours.nbytes[before != digests].sum())
        self._digests[step] = digests
        self._unsure.discard(step)

    def ended(self, report: TransferReport) -> None:
        """Note the figures of a run that completed, for the decision of the next."""
        if self._is_whole and report.nbytes:
            self.density = self._changed_bytes / report.nbytes
        if report.moved_bytes and report.wire_s > 0:
            self._bytes_per_s = report.moved_bytes / report.wire_s
        self._ask_s = max((link.ready_s for link in report.links), default=0.0)

    def summary(self, report: TransferReport) -> str:
        """Return a line of text about the last run."""
        return f"delta: moved {report.moved_bytes} of {report.nbytes} bytes, {self._why}"


LEAST_BYTES = MIB
"""Least watermark: below it every strip would be cut to a few leaves of its digest."""


class Transfer:
    """A receiver's part of a sync; `run` it for each version, as long as the plan's key is the same.

    Attributes:
        moved_bytes: bytes verified in this run, or the last; only grows during a run.
        proven: strips of the receiver's memory with their verified digests, of the last run.
        lost: the source whose failure ended the last run, so that the caller plans without it; None: no source failed.

    Args:
        part: checked against both ends at the first run.
        into: the receiver's memory; offsets of the part's `dst` count in it.
        names: the names of the receiver's rows, for errors.
        watermark_bytes: most bytes read and not yet verified.
        stall_s: the deadline for progress.
        trace: records spans.
        delta: skips strips that did not change since the last version; None: everything is read.

    Raises:
        BudgetTooSmall: `watermark_bytes` is below `LEAST_BYTES`.
    """

    def __init__(
        self,
        part: Part,
        into: Regions,
        *,
        names: Sequence[str] = (),
        watermark_bytes: int = WATERMARK_BYTES,
        stall_s: float = 30.0,
        trace: Trace | None = None,
        delta: Delta | None = None,
    ) -> None:
        if watermark_bytes < LEAST_BYTES:
            raise BudgetTooSmall(f"a watermark of {watermark_bytes} bytes", minimum_bytes=LEAST_BYTES)
        self.part, self.into, self.names, self.stall_s = part, into, names, stall_s
        self.watermark_bytes, self.delta = watermark_bytes, delta
        self._trace = Trace(enabled=False) if trace is None else trace
        self._windows: Windows | None = None
        self._sizes: list[tuple[int, ...]] = []
        self.lost: str | None = None
        self.moved_bytes = 0
        self.proven: list[tuple[Strips, U64]] = []

    def run(self, sources: Mapping[str, SourceLink]) -> TransferReport:
        """Read the part; return once every byte is verified in place.

        Args:
            sources: the part's sources by member; all of one version.

        Raises:
            PlanError: the part does not match both ends, a source is missing, or the sources have several versions.
            StaleDescriptor: a source changed its bytes; PeerLost, SourceUnavailable, SourceStalled: it is gone or
                silent; IntegrityError: its bytes differ from its digests. `lost` names the source.
            DestinationError: the receiver's device failed, or may still be written to.

        After any error nothing writes to the memory any more, and `mutated` says if a byte of it was touched.
        """
        self.lost, self.moved_bytes, self.proven = None, 0, []
        windows = self._prepare(sources)
        if self.delta is not None:
            self.delta.begin(self.part.nbytes)
        report = _TransferRun(self, windows, sources, self._trace).run()
        if self.delta is not None:
            self.delta.ended(report)
        return report

    def _prepare(self, sources: Mapping[str, SourceLink]) -> Windows:
        """Return the steps; they depend only on the plan and the sizes of regions, and are kept for the next run."""
        used = np.flatnonzero(self.part.link_bytes()).tolist()
        missing = [self.part.sources[i] for i in used if self.part.sources[i] not in sources]
        if missing:
            raise PlanError(f"{self.part.receiver}: no link to {', '.join(missing)}")
        taken = [sources[self.part.sources[i]] for i in used]
        if len({link.map.version for link in taken}) > 1:
            versions = ", ".join(f"{link.member}: {link.map.version}" for link in taken)
            raise PlanError(f"{self.part.receiver}: sources of several versions: {versions}")
        sizes = [sources[name].map.sizes if i in used else () for i, name in enumerate(self.part.sources)]
        if self._windows is None or sizes != self._sizes:
            # Sizes come from other processes: a part that reaches past a region must fail here, not as a wild read.
            self.part.check(src_nbytes=[sum(regions) for regions in sizes], dst_nbytes=self.into.nbytes)
            first = [np.cumsum([0, *regions], dtype=np.int64) for regions in sizes]
            self._windows = cut(
                self.part,
                first,
                self.into.first,
                window_bytes=self.watermark_bytes // AHEAD_WINDOWS,
                piece_bytes=self.watermark_bytes // 16,
            )
            self._sizes = sizes
        return self._windows


class _TransferRun:
    """A single run of a transfer."""

    def __init__(
        self,
        transfer: Transfer,
        windows: Windows,
        sources: Mapping[str, SourceLink],
        trace: Trace,
    ) -> None:
        self._transfer, self._windows = transfer, windows
        self.stall_s = transfer.stall_s
        # A queue per source: a slow source must not keep the steps of the others waiting behind its own.
        self._queues: dict[int, deque[Step]] = {}
        for step in windows.steps:
            self._queues.setdefault(step.source, deque()).append(step)
        self.reads = {i: SourceRead(sources[transfer.part.sources[i]], transfer.into) for i in self._queues}
        self._wanted: dict[Step, U64] = {}
        """Digests of steps that have not arrived yet."""
        self._here: set[Step] = set()
        """Steps that arrived before their digests."""
        self._skipped: set[Step] = set()
        """Steps with strips that were not read."""
        self._left = np.bincount(np.array([step.window for step in windows.steps], np.int64), minlength=len(windows))
        self._flying = dict.fromkeys(self._queues, 0)
        self._under_way_bytes = self._next_window = 0
        self._lock = threading.RLock()
        num_reads = min(READS_AT_ONCE, READS_OF_ONE * max(1, len(self._queues)))
        self._ask = Executor("ask", min(READS_AT_ONCE, max(1, len(self._queues))), trace=trace, stall_s=self.stall_s)
        self._fetch = Executor("fetch", num_reads, trace=trace, stall_s=self.stall_s)
        # Two, so that one can queue launches while the other waits for the device's digests.
        self._compute = Executor("compute", 2, trace=trace, stall_s=self.stall_s)
        self._executors = (self._ask, self._fetch, self._compute)
        self.ticket = Ticket(transfer.part.nbytes, lambda: any(executor.is_busy() for executor in self._executors))
        self.stats = TransferStats(self.reads)

    def run(self) -> TransferReport:
        try:
            with self._lock:
                self._advance()
                self._assign()
            for source, read in self.reads.items():
                if read.is_ready and not self.asks_first:
                    self._ask.post(
                        *(AskStep(self, read, some) for some in self._windows.digest_requests(source, ASK_BYTES))
                    )
            with quick_handover():
                self.ticket.wait(stall_s=self.stall_s)
        except PenstockError as error:
            # Close first: a read that is still under way can touch the memory until its executor has ended.
            self._close()
            error.mutated = self.stats.is_touched
            raise
        finally:
            self._close()
            self.ticket.release()  # its references would keep this run, and with it peers' mapped memory, alive
        return self.stats.report(self._transfer.part.nbytes)

    def _close(self) -> None:
        if not self.ticket.done:  # an exception in the caller's thread, for example an interrupt
            self.ticket.cancel()
        for executor in self._executors:
            executor.close()

    def _assign(self) -> None:
        """Post the reads that may start now. Order: the caller has the lock."""
        # Three bounds: reads per source, so that a slow one does not take all threads; unverified bytes, which is the
        # user's memory bound; and windows ahead, so that the first tensors are complete early.
        posts = []
        for source, queue in self._queues.items():
            while queue and self._flying[source] < READS_OF_ONE:
                step = queue[0]
                room = self._transfer.watermark_bytes - self._under_way_bytes
                if step.nbytes > room or step.window >= self._next_window + AHEAD_WINDOWS:
                    break
                queue.popleft()
                self._flying[source] += 1
                self._under_way_bytes += step.nbytes
                self.stats.peak_bytes = max(self.stats.peak_bytes, self._under_way_bytes)
                posts.append(ReadStep(self, self.reads[source], step))
        if posts:
            self._fetch.post(*posts)

    def _advance(self) -> None:
        """Pass the verified windows in order, and finish after the last. Order: the caller has the lock."""
        while self._next_window < len(self._windows) and not self._left[self._next_window]:
            self._next_window += 1
        if self._next_window == len(self._windows):
            self.ticket.finish()

    # -- Called by the steps.

    def arrived(self, step: Step) -> None:
        """Note that a step's bytes have arrived, and are not verified yet."""
        with self._lock:
            self._flying[step.source] -= 1
            self._here.add(step)
            self._assign()
            self._verify(step)

    @property
    def asks_first(self) -> bool:
        """Return whether a step's digests are requested before the step is read, from every source."""
        return self._transfer.delta is not None and self._transfer.delta.asks_first

    def lacking(self, step: Step, wanted: U64 | None) -> Step | None:
        """Return the strips of a step that must be read; None: the receiver has all of them."""
        delta = self._transfer.delta
        if delta is None or wanted is None:
            return step
        missing = delta.lacking(step, wanted)
        if missing is not step:
            self._skipped.add(step)
        return missing

    def read(self, step: Step, some: Step) -> None:
        """Read strips of a step, or all of it."""
        source = self.reads[step.source]
        if self._transfer.delta is not None:
            self._transfer.delta.reading(step)
        try:
            with self.stats.reading(source.member):
                failed, is_touched = source.read(some, stall_s=self.stall_s)
            # Also where the read failed: a partial read has written bytes.
            self.stats.is_touched |= is_touched
            if failed is not None:
                raise failed
        except PenstockError as error:
            self.lost(source.member, error)
            raise
        self.stats.took(source.member, some.nbytes)

    def note_digests(self, step: Step, wanted: U64) -> None:
        """Note the digests that the source reports for a step."""
        with self._lock:
            self._wanted[step] = wanted
            self._verify(step)

    def _verify(self, step: Step) -> None:
        """Post the verification of a step, if both its bytes and its digests have arrived.

        Order: the caller has the lock, so that only the later of the two posts it.
        """
        if step in self._here and step in self._wanted:
            self._here.remove(step)
            self._compute.post(VerifyStep(self, step, self._wanted.pop(step)))

    def lost(self, member: str, error: PenstockError) -> None:
        """Note the first source whose failure ends the run, and add its name to the error."""
        # After the first error the other reads are cancelled, and fail as a consequence: they say nothing about their
        # sources.
        if not self.ticket.stopped and not isinstance(error, Cancelled) and error.blame == "source":
            self._transfer.lost = member
            error.uri = error.uri if error.uri and member in error.uri else f"{member} {error.uri or ''}".rstrip()

    def verify(self, step: Step, wanted: U64) -> None:
        """Digest a step's strips, read or skipped, and compare them with the source's digests."""
        got = self._digests(step)
        wrong: I64 = np.flatnonzero(got != wanted)
        if len(wrong) and step in self._skipped:
            # The engine changed skipped strips in place since the last version: read the whole step after all.
            self.read(step, step)
            got = self._digests(step)
            wrong = np.flatnonzero(got != wanted)
        if len(wrong):
            member = self._transfer.part.sources[step.source]
            row = int(step.rows[wrong[0]])
            names = self._transfer.names
            error = IntegrityError(
                f"{len(wrong)} of {len(got)} strips from {member} differ from the digests it gave",
                tensor=names[row] if row < len(names) else None,
                uri=member,
                hint="the bytes were damaged on the way, or the source changed them without a fence",
            )
            self.lost(member, error)
            raise error
        self._transfer.proven.append((step.ours, got))
        if self._transfer.delta is not None:
            self._transfer.delta.proven(step, got)

    def _digests(self, step: Step) -> U64:
        begun = time.perf_counter()
        got = self._transfer.into.digests(step.ours)
        self.stats.digested(time.perf_counter() - begun)
        return got

    def verified(self, step: Step) -> None:
        """Note that a step's bytes match the source's digests."""
        with self._lock:
            # Only now, not on arrival: the watermark bounds bytes that may turn out wrong.
            self._under_way_bytes -= step.nbytes
            self._left[step.window] -= 1
            self.ticket.moved_bytes += step.nbytes
            self._transfer.moved_bytes = self.ticket.moved_bytes
            self._advance()
            self._assign()
        self.ticket.wake()


class AskStep(Work):
    """Request for the digests of several steps of one source."""

    __slots__ = ("_asked", "_run", "_source", "_wanted")

    def __init__(self, run: _TransferRun, source: SourceRead, request: DigestRequest) -> None:
        super().__init__(run.ticket, request.steps[0].window, f"ask {source.member}")
        self._run, self._source, self._asked = run, source, request
        self._wanted: U64 | None = None

    def start(self) -> Pending | None:
        """See `Step.start`."""
        run, begun = self._run, time.perf_counter()
        try:
            strips = self._asked.theirs
            self._wanted = self._source.ask(strips, stall_s=run.stall_s, is_over=lambda: run.ticket.stopped)
        except PenstockError as error:
            run.lost(self._source.member, error)
            raise
        run.stats.answered(self._source.member, time.perf_counter() - begun)
        return None

    def finish(self) -> None:
        """See `Step.finish`."""
        assert self._wanted is not None
        for step, wanted in zip(self._asked.steps, self._asked.split(self._wanted), strict=True):
            self._run.note_digests(step, wanted)


class ReadStep(Work):
    """Read of a step's missing strips, after a request for its digests unless those come from an `AskStep`."""

    __slots__ = ("_run", "_source", "_step", "_wanted")

    def __init__(self, run: _TransferRun, source: SourceRead, step: Step) -> None:
        super().__init__(run.ticket, step.window, f"{source.member} window {step.window}", step.nbytes)
        self._run, self._source, self._step = run, source, step
        self._wanted: U64 | None = None

    def start(self) -> Pending | None:
        """See `Step.start`."""
        run, source = self._run, self._source
        if run.asks_first or not source.is_ready:
            begun = time.perf_counter()
            try:
                strips = self._step.theirs
                self._wanted = source.ask(strips, stall_s=run.stall_s, is_over=lambda: run.ticket.stopped)
            except PenstockError as error:
                run.lost(source.member, error)
                raise
            run.stats.answered(source.member, time.perf_counter() - begun)
        lacking = run.lacking(self._step, self._wanted)
        if lacking is not None:
            run.read(self._step, lacking)
        return None

    def finish(self) -> None:
        """See `Step.finish`."""
        self._run.arrived(self._step)
        if self._wanted is not None:
            self._run.note_digests(self._step, self._wanted)


class VerifyStep(Work):
    """Verification of a step's bytes against the source's digests."""

    __slots__ = ("_run", "_step", "_wanted")

    def __init__(self, run: _TransferRun, step: Step, wanted: U64) -> None:
        super().__init__(run.ticket, step.window, f"verify window {step.window}", step.nbytes)
        self._run, self._step, self._wanted = run, step, wanted

    def start(self) -> Pending | None:
        """See `Step.start`."""
        self._run.verify(self._step, self._wanted)
        return None

    def finish(self) -> None:
        """See `Step.finish`."""
        self._run.verified(self._step)


REPORT_S = 0.5
"""Interval of reports: well below the smallest stall deadline, and cheap for a rank 0 with hundreds of receivers."""


@contextlib.contextmanager
def reporting_progress(membership: Membership, planner: str, version: int, transfer: Transfer) -> Iterator[None]:
    """Report progress while the body runs; at its end, report that the version is complete and verified."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(REPORT_S):
            _report(membership, planner, Progress(version=version, moved_bytes=transfer.moved_bytes))

    # A thread of its own: the transfer's threads wait for the wire, and a silent receiver would count as late.
    reporter = threading.Thread(target=work, name="penstock-tell", daemon=True)
    reporter.start()
    try:
        yield
        _report(membership, planner, Progress(version=version, moved_bytes=transfer.moved_bytes, outcome="committed"))
    finally:
        over.set()
        reporter.join()  # so that no report of this attempt arrives after the next one has begun


def tell_failed(membership: Membership, request: tuple[str, int] | None, error: BaseException) -> None:
    """Report a failure to the planner that was asked last, so that a publish does not wait for this receiver."""
    if request is not None:
        planner, version = request
        _report(
            membership, planner, Progress(version=version, outcome="failed", why=str(error)[:1024])
        )  # the field's limit


def _report(membership: Membership, planner: str, progress: Progress) -> None:
    """Send a report. A planner that cannot be reached counts this receiver as late; the update goes on."""
    with contextlib.suppress(PenstockError):
        membership.ask(planner, lambda sync_client: sync_client.progress(progress), channel="progress")
