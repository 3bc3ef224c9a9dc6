"""Simulate a sync: a `SyncPlan` on a described cluster, read by read.

A source transforms its buckets in order, but digests requested bytes before it continues. A receiver gets its part of
the plan and the locations of the sources' tensors, and then posts its reads. The bytes of each read are digested and
compared on arrival.

A receiver reads its windows in order, two at a time, below a watermark, as in `sync.receive.transfer`. A receiver reads
from sources in its node one after another, and from other sources in parallel. A receiver's work in Python is
sequential.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.plan.layout import Layout
from penstock.plan.packing import NUM_BUFFERS, PACK_BYTES, packable
from penstock.plan.sync import (
    AHEAD_WINDOWS,
    ASK_BYTES,
    GROUP_BYTES,
    NEAR_READS,
    READS_AT_ONCE,
    READS_OF_ONE,
    WATERMARK_BYTES,
    ReceiverPlan,
    SyncPlan,
    step_bytes,
)
from penstock.segments import Rectangles, spread
from penstock.types import GB, I64, MIB
from penstock_convert.plan.cluster import Cluster, Rates, slowdowns
from penstock_convert.plan.simulate import Prediction, Span, Stage, assumed, bottleneck
from penstock_tools.links import F64, ClusterLinks, Meter, fair_rates
from penstock_tools.machine import SHORT_RUN_BYTES, SLAB_BYTES

ANSWERS_BEFORE, ANSWERS_AFTER = 2, 1
"""Number of replies that an update waits for. Before the reads these are the receiver's part and the sources' maps, and
after the reads the acknowledgement of the version. The first two are counted sequentially, as in the measurements on
four GPUs. Receivers now send the first two requests at once."""

BUFFER_BYTES = PACK_BYTES // NUM_BUFFERS
BATCH_BYTES = 1024 * MIB
"""Bytes of BF16 that a source transforms at once. Source: `sync.publish.transformed.BATCH_BYTES`, in codes."""

_STEPS = 4000
"""Minimum number of time steps. Reads that begin or end within the same step are handled together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """A table of a sync's reads in the order in which the receivers post the reads.

    The reads are sorted by receiver and by window. Within a window the sources alternate.
    """

    receiver: I64
    window: I64
    """Number of the read's window, which is a group of joined buckets. Windows are numbered over all receivers."""
    source: I64
    turn: I64
    """Position of the read's source in the order in which the receiver reads from sources."""
    bucket: I64
    """Last bucket that contains bytes of the read. The read can begin when the source has finished this bucket."""
    nbytes: I64
    far_s: F64
    """Time in seconds for the read's runs from outside the node, each of which is requested separately. Posting, and
    runs that the source packs, are excluded."""
    packed_bytes: I64
    """Number of bytes that the source packs for a reader outside its node. The reader reads the source's buffers in
    order."""
    packed_s: F64
    """Time in seconds to request the packed bytes, run by run. Posting the reads of the buffers is excluded."""
    num_copies: I64
    """Number of long runs inside the node, each of which is a separate copy."""
    short_bytes: I64
    """Number of bytes in short runs inside the node, which a kernel on the reader's device copies."""

    @classmethod
    def of(cls, plan: SyncPlan, rates: Rates, *, watermark_bytes: int = WATERMARK_BYTES) -> StageWork:
        """Return the steps into which each receiver splits its part of the plan."""
        names = ("window", "source", "turn", "bucket", "nbytes", "packed_bytes", "num_copies", "short_bytes")
        collected: dict[str, list[np.ndarray]] = {name: [np.zeros(0, np.int64)] for name in (*names, "receiver")}
        collected |= {"far_s": [np.zeros(0)], "packed_s": [np.zeros(0)]}
        num_windows = 0
        # Compute one part at a time, because the parts of a model with a trillion parameters would take gigabytes in
        # total.
        for r in range(len(plan.receivers)):
            part = plan.part(r)
            if not len(part.source):
                continue
            columns = _steps(part, rates, watermark_bytes)
            columns["receiver"] = np.full(len(columns["window"]), r)
            columns["window"] += num_windows
            num_windows = int(columns["window"][-1]) + 1
            for name, column in columns.items():
                collected[name].append(column)
        return cls(**{name: np.concatenate(columns) for name, columns in collected.items()})


def _steps(part: ReceiverPlan, rates: Rates, watermark_bytes: int) -> dict[str, np.ndarray]:
    """Return the columns of `StageWork` for each step of a part, in the order in which the steps are posted."""
    edges = np.array(part.windows(watermark_bytes // AHEAD_WINDOWS), np.int64)
    bucket = np.repeat(np.arange(len(part.bucket_first) - 1), np.diff(part.bucket_first))
    window = np.searchsorted(edges, bucket, side="right") - 1
    nbytes = part.run_bytes * part.num_rows
    far_s = np.where(part.run_bytes < SHORT_RUN_BYTES, rates.short_run_s, rates.run_s) * part.num_rows
    # A packed strip is one run. The simulation decides for all strips of the part at once, although a real receiver
    # decides for each read.
    is_packed = packable(_rectangles(part), BUFFER_BYTES if rates.pack_gb_per_s else 0)
    packed_bytes = np.where(is_packed, nbytes, 0)
    packed_s = np.where(is_packed, np.where(nbytes < SHORT_RUN_BYTES, rates.short_run_s, rates.run_s), 0.0)
    far_s = np.where(is_packed, 0.0, far_s)
    # Memory that is contiguous at the source and at the receiver counts as one run, as in
    # `transport.Rectangles.longest_runs`.
    is_whole = (part.src_pitch == part.run_bytes) & (part.dst_pitch == part.run_bytes)
    is_short = np.where(is_whole, nbytes, part.run_bytes) < SHORT_RUN_BYTES
    num_copies = np.where(is_short, 0, np.where(is_whole, 1, part.num_rows))
    short_bytes = np.where(is_short, nbytes, 0)
    # Sort by window and source, then split steps that would be too large.
    turn = part.turn_of(part.source)
    order = np.lexsort((bucket, turn, window))
    piece_bytes = step_bytes(watermark_bytes)
    cuts = -(-nbytes[order] // piece_bytes)
    window, source, turn, bucket = (np.repeat(column[order], cuts) for column in (window, part.source, turn, bucket))
    piece, of = spread(np.zeros(len(cuts), np.int64), cuts), np.repeat(cuts, cuts)

    def share(column: np.ndarray) -> np.ndarray:
        """Return each piece's share of a strip's bytes or copies."""
        each = np.repeat(column[order], cuts)
        # Use differences of rounded sums, so that the pieces add up to the exact total.
        return each * (piece + 1) // of - each * piece // of

    amounts = {"nbytes": share(nbytes), "num_copies": share(num_copies), "short_bytes": share(short_bytes)}
    amounts["packed_bytes"] = share(packed_bytes)
    # A piece of a strip with a long run takes at least one copy. Rounding down to zero copies would make the piece
    # free.
    amounts["num_copies"] = np.maximum(amounts["num_copies"], np.repeat((num_copies > 0)[order], cuts))
    amounts["far_s"] = np.repeat(far_s[order] / cuts, cuts)
    amounts["packed_s"] = np.repeat(packed_s[order] / cuts, cuts)
    stop = np.cumsum(amounts["nbytes"])
    fresh = np.ones(len(window), bool)
    fresh[1:] = (np.diff(window) != 0) | (np.diff(source) != 0)
    begin = (stop - amounts["nbytes"])[np.flatnonzero(fresh)][np.cumsum(fresh) - 1]
    fresh[1:] |= np.diff((stop - begin - 1) // piece_bytes) != 0
    head = np.flatnonzero(fresh)
    last = np.append(head[1:], len(window)) - 1
    pair = window[head] * (int(turn.max()) + 1) + turn[head]
    number = np.arange(len(head)) - np.searchsorted(pair, pair)
    # Order as in `sync.receive.steps.cut`: the first read from every source, then the second read from every source,
    # and so on.
    order = np.lexsort((number, window[head]))
    columns = {"window": window[head], "source": source[head], "turn": turn[head], "bucket": bucket[last]}
    columns |= {name: np.add.reduceat(column, head) for name, column in amounts.items()}
    return {name: column[order] for name, column in columns.items()}


def _rectangles(part: ReceiverPlan) -> Rectangles:
    return Rectangles(
        src=part.src,
        dst=part.dst,
        run_bytes=part.run_bytes,
        num_rows=part.num_rows,
        src_pitch=part.src_pitch,
        dst_pitch=part.dst_pitch,
    )


def transformed_bytes(plan: SyncPlan, holdings: Sequence[Layout], wants: Sequence[Layout]) -> I64:
    """Return [num_sources, num_buckets]: number of BF16 bytes that each source reads to quantise its tensors."""
    bucket_of: dict[str, int] = {}
    for r, want in enumerate(wants):
        rows = slice(int(plan.want_first[r]), int(plan.want_first[r + 1]))
        named = zip(plan.want_row[rows].tolist(), plan.want_bucket[rows].tolist(), strict=True)
        bucket_of.update((want.names[row], bucket) for row, bucket in named)
    nbytes = np.zeros((len(holdings), plan.num_buckets), np.int64)
    for s, holding in enumerate(holdings):
        elements = np.array([f.box.num_elements if f.tag and f.dtype.bits <= 8 else 0 for f in holding.forms], np.int64)
        bucket = np.array([bucket_of.get(name, -1) for name in holding.names], np.int64)
        wanted = bucket >= 0
        # Count two bytes per element, because a quantised tensor is made from its BF16 original.
        np.add.at(nbytes[s], bucket[wanted], 2 * elements[holding.form[wanted]])
    return nbytes


def simulate_sync(
    plan: SyncPlan,
    cluster: Cluster,
    rates: Rates,
    *,
    transformed: I64 | None = None,
    watermark_bytes: int = WATERMARK_BYTES,
    reads_of_one: int = READS_OF_ONE,
    staged: bool = True,
    in_arenas: bool = False,
    one_node: bool = False,
    seed: int = 0,
) -> Prediction:
    """Simulate the plan on the cluster, with as many nodes as both sides require.

    Args:
        plan: result of `plan_sync`.
        cluster: the cluster. Sources use the cluster's first GPUs, and receivers start on the next node.
        rates: rates of the machine's stages.
        transformed: number of bytes that each source transforms in each bucket (`transformed_bytes`). None means no
            transforms.
        watermark_bytes: maximum number of bytes that a receiver has requested but not verified.
        reads_of_one: number of reads in flight from one source. All sources in the receiver's node count as one source.
        staged: whether to count the flip at the end, which copies all bytes on the device.
        in_arenas: whether staged targets are in arenas (`SubscriberSettings.arena`), so that the flip swaps memory
            instead of copying.
        one_node: whether receivers use the GPUs directly after those of the sources, even in the same node.
        seed: seed for the slow and the failing members.
    """
    rates.check()
    # Receivers begin on a new node, or with `one_node` on the GPU after the last source's.
    per_node = 1 if one_node else cluster.gpus_per_node
    first = -(-len(plan.sources) // per_node) * per_node
    cluster = cluster.with_gpus(first + len(plan.receivers))
    links = ClusterLinks(cluster, slowdowns(cluster, seed))
    work = StageWork.of(plan, rates, watermark_bytes=watermark_bytes)
    ready = _ready(plan, rates, transformed)
    run = _SyncEvents(work, len(plan.receivers), links, first, rates, ready, watermark_bytes, reads_of_one)
    # Without transforms, all digests are available from the start, so they are requested before the reads.
    if transformed is None or not transformed.any():
        run.answered = _answered(work, rates)
    run.go()
    flip_gb_per_s = rates.exchange_gb_per_s if in_arenas else rates.device_copy_gb_per_s
    flip_s = run.nbytes_of / flip_gb_per_s / GB if staged else np.zeros(len(plan.receivers))
    done = np.where(run.nbytes_of > 0, run.done + ANSWERS_AFTER * rates.answer_s, 0.0) + flip_s
    total_s = float(done.max(initial=0.0))
    nominal = ClusterLinks(cluster, np.ones(cluster.num_gpus)).capacity
    stages = _stages(run, ready[:, -1] - ready[:, 0], flip_s, plan)
    loads = run.meter.loads(total_s)
    return Prediction(
        kind="sync",
        what=f"{len(plan.sources)} sources -> {len(plan.receivers)} receivers, {plan.num_buckets} buckets",
        predicted_s=total_s,
        limit_s=run.meter.limit_s(nominal),
        bottleneck=bottleneck(stages, loads, total_s, "waiting: for answers, for the window before"),
        moved_bytes=round(run.moved),
        num_receivers=len(plan.receivers),
        first_s=float(done.min(initial=total_s)),
        median_s=float(np.median(done)) if len(done) else 0.0,
        stages=stages,
        links=loads,
        timeline=_timeline(run, plan, ready, flip_s),
        failed=_failures(run, plan, cluster, total_s, seed),
        assumed=assumed(rates, _USED),
    )


_USED = (
    "quantise_gb_per_s",
    "digest_gb_per_s",
    "device_copy_gb_per_s",
    "step_s",
    "slab_s",
    "post_s",
    "run_s",
    "short_run_s",
    "near_post_s",
    "copy_s",
    "gap_s",
    "gather_s",
    "gather_gb_per_s",
    "pack_gb_per_s",
    "answer_s",
)


def _ready(plan: SyncPlan, rates: Rates, transformed: I64 | None) -> F64:
    """Return [num_sources, num_buckets + 1]: the times at which each source begins and its buckets are ready.

    The times do not include digests that are requested during the transform. See `_SyncEvents._answer`.
    """
    ready = np.full((len(plan.sources), plan.num_buckets + 1), ANSWERS_BEFORE * rates.answer_s)
    if transformed is not None:
        # Buckets are transformed one after the other in batches, in the order in which receivers read them.
        nbytes = np.cumsum(transformed, axis=1)
        made = np.minimum(-(-nbytes // BATCH_BYTES) * BATCH_BYTES, nbytes[:, -1:])
        ready[:, 1:] += np.where(nbytes > 0, rates.step_s + made / rates.quantise_gb_per_s / GB, 0.0)
    return ready


def _answered(work: StageWork, rates: Rates) -> F64:
    """Return [num_reads]: the times at which ready sources deliver digests that were requested in advance."""
    pair = work.source * (int(work.receiver.max(initial=0)) + 1) + work.receiver
    order = np.argsort(pair, kind="stable")
    begin = np.cumsum(work.nbytes[order]) - work.nbytes[order]
    turn = np.zeros(len(order), np.int64)
    turn[order] = (begin - begin[np.searchsorted(pair[order], pair[order])]) // ASK_BYTES
    # Each source serves the first request from every receiver, then the second request from every receiver, and so on.
    questions, which = np.unique(np.stack((work.source, turn, work.receiver)), axis=1, return_inverse=True)
    which = which.reshape(-1)
    took = np.bincount(which, weights=work.nbytes) / rates.digest_gb_per_s / GB + rates.step_s
    done = np.cumsum(took)
    # The running sum covers all sources, so subtract the total of the previous sources.
    done -= (done - took)[np.searchsorted(questions[0], questions[0])]
    answered_s: F64 = (ANSWERS_BEFORE + 1) * rates.answer_s + done[which]
    return answered_s


def queued(work: StageWork, near: npt.NDArray[np.bool_], num_receivers: int) -> list[tuple[deque[int], deque[int]]]:
    """Return each receiver's reads from inside the node and from outside, each in the order of its requests."""
    # Use the order of `sync.receive.transfer`. Inside the node, sort by window, and then by source.
    queues: list[tuple[deque[int], deque[int]]] = [(deque(), deque()) for _ in range(num_receivers)]
    order = np.lexsort((np.arange(len(near)), np.where(near, work.turn, 0), work.window))
    for read, r, is_near in zip(order.tolist(), work.receiver[order].tolist(), near[order].tolist(), strict=True):
        queues[r][not is_near].append(read)
    return queues


class _SyncEvents:
    def __init__(
        self,
        work: StageWork,
        num_receivers: int,
        links: ClusterLinks,
        first: int,
        rates: Rates,
        ready: F64,
        watermark: int,
        reads_of_one: int,
    ) -> None:
        self.work = work
        self.rates = rates
        self.num = num_receivers
        self._links = links
        self._watermark = watermark
        self._reads_of_one = reads_of_one
        self.meter = Meter(links)
        self._flow_links = links.between(work.source, first + work.receiver)
        self.first = np.searchsorted(work.receiver, np.arange(num_receivers + 1))
        count = len(work.receiver)
        # Times at which each read reached its stages, for the timeline.
        self.asked = np.zeros(count)
        self.posted = np.zeros(count)
        self.begun = np.zeros(count)
        self.landed = np.zeros(count)
        self.verified = np.zeros(count)
        self.done = np.zeros(num_receivers)
        self.nbytes_of = np.bincount(work.receiver, weights=work.nbytes, minlength=num_receivers)
        self.moved = 0.0
        # Use plain lists, because single elements are read, and that is several times slower with NumPy.
        self._receiver = work.receiver.tolist()
        self._source = work.source.tolist()
        self._nbytes = work.nbytes.tolist()
        self._window = work.window.tolist()
        near = links.near(work.source, first + work.receiver)
        # Over NVLink a single short run costs nothing, because a kernel copies a whole group of short runs.
        gathers = -(-work.short_bytes // GROUP_BYTES)
        near_s = (rates.near_post_s or rates.post_s) + work.num_copies * rates.copy_s + gathers * rates.gather_s
        cost_s = np.where(near, near_s, rates.post_s + work.far_s)
        self._cost_s = cost_s.tolist()
        # Number of buffers of packed bytes that each read receives one after another, after its other bytes.
        packed_bytes = np.where(near, 0, work.packed_bytes)
        num_batches = -(-packed_bytes // BUFFER_BYTES)
        self._batch_bytes = (packed_bytes / np.maximum(num_batches, 1)).tolist()
        self._batch_s = (rates.post_s + work.packed_s / np.maximum(num_batches, 1)).tolist()
        self._batches_left = num_batches.tolist()
        self.cost_s = cost_s + num_batches * rates.post_s + np.where(near, 0.0, work.packed_s)
        """Time in seconds that the receiver's host takes to post each read, including the reads of its buffers."""
        self._flow_bytes: list[float] = (work.nbytes - packed_bytes).tolist()
        """Number of bytes that each read sends over the wire next."""
        self._is_packed = [False] * count
        """Whether the bytes that each read sends next come from a buffer."""
        self._free_buffers: dict[int, int] = {}
        self._wait_buffer: dict[int, deque[int]] = {}
        # Time at which each source's device has packed all bytes that were requested so far.
        self._packer_free: dict[int, float] = {}
        stretch = links.stretch(work.nbytes, work.num_copies, work.short_bytes, rates)
        self._stretch = np.where(near, stretch, 1.0)
        self._ready: list[float] = ready[work.source, work.bucket + 1].tolist()
        self._transformed: list[float] = ready[:, -1].tolist()
        """Time at which each source has transformed all of its bytes if nothing delays the transform."""
        # Delay of each source's transform by digests, and the time at which its device has finished the requested
        # digests.
        self._delay = [0.0] * len(ready)
        self._digest_free = [0.0] * len(ready)
        self.answered: F64 | None = None
        """Time at which each read's digests arrive from ready sources. None means that digests are requested before
        each read."""
        # Number of unverified reads in each window. A receiver's windows before `_whole` are complete.
        windows = int(work.window[-1]) + 1 if count else 0
        self._left = np.bincount(work.window, minlength=windows).tolist()
        self._window_stop = np.searchsorted(work.receiver, np.arange(1, num_receivers + 1)).tolist()
        self._window_stop = [self._window[stop - 1] + 1 if stop else 0 for stop in self._window_stop]
        self._whole = [self._window[start] if start < count else windows for start in self.first[:-1].tolist()]
        self._near = near.tolist()
        self._queues = queued(work, near, num_receivers)
        # Number of further reads inside the node that may begin now, and the reads that wait for their turn.
        self._turns = [NEAR_READS] * num_receivers
        self._wait_turn: list[deque[int]] = [deque() for _ in range(num_receivers)]
        # Numbers of reads and bytes in flight, for a receiver's limits. All sources in its node count as one source,
        # with number -1.
        self._flying = [0] * num_receivers
        self._of_one: dict[tuple[int, int], int] = {}
        self._unverified = [0] * num_receivers
        # Times at which each receiver's Python thread and its device have finished their queued work.
        self._host_free = [0.0] * num_receivers
        self._device_free = [0.0] * num_receivers
        self._events: list[tuple[float, int, int]] = []
        """Heap of (time, read, next stage). See `_happen`."""
        self._new: list[int] = []
        """Reads that were posted since the last step. These reads share the links from now on."""

    def go(self) -> None:
        """Run until every read is verified."""
        work, links = self.work, self._links
        busiest = max(
            (np.bincount(column, weights=work.nbytes, minlength=len(links.capacity)) / links.capacity).max(initial=0.0)
            for column in self._flow_links.T
        )
        quantum = busiest / _STEPS
        # Reads on the wire, and the remaining bytes of each read.
        active: I64 = np.zeros(0, np.int64)
        left = np.zeros(0)
        for r in range(self.num):
            self._ask(r, ANSWERS_BEFORE * self.rates.answer_s)
        now = 0.0
        while len(active) or self._events:
            rates = fair_rates(self._flow_links[active], links.capacity) if len(active) else left
            ends = now + left / rates if len(active) else left
            first = min(float(ends.min(initial=np.inf)), self._events[0][0] if self._events else np.inf)
            # Advance one quantum beyond the first event, so that thousands of reads that end at almost the same time
            # form one step.
            until = first + quantum
            moved = np.minimum(rates * (until - now), left)
            over = ends <= until
            # Set the value exactly. The product of rate and time has a rounding error, and would leave some bytes in
            # flight.
            moved[over] = left[over]
            # `_stretch` lengthens the time that a read occupies a link. Count only the read's real bytes as moved.
            carried = moved / self._stretch[active]
            self.meter.add(now, until, self._flow_links[active], carried)
            self.moved += float(carried.sum())
            left = left - moved
            for read, at in zip(active[over].tolist(), ends[over].tolist(), strict=True):
                self._sent(read, at)
            active, left, now = active[~over], left[~over], until
            while self._events and self._events[0][0] <= now:
                self._happen(*heapq.heappop(self._events))
            if self._new:
                fresh = np.array(self._new, np.int64)
                self._new = []
                self.begun[fresh] = now
                active = np.concatenate((active, fresh))
                sent = np.array([self._flow_bytes[read] for read in fresh.tolist()])
                left = np.concatenate((left, sent * self._stretch[fresh]))

    def _ask(self, r: int, at: float) -> None:
        """Make a receiver request the reads that its limits allow."""
        for queue in self._queues[r]:
            while queue and self._flying[r] < READS_AT_ONCE:
                read = queue[0]
                pair = self._pair(read)
                room = self._watermark - self._unverified[r]
                # A read that is larger than the watermark may be posted when no other read is in flight.
                late = self._window[read] >= self._whole[r] + AHEAD_WINDOWS or (
                    self._unverified[r] and self._nbytes[read] > room
                )
                if late or self._of_one.get(pair, 0) >= self._reads_of_one:
                    break
                queue.popleft()
                self._flying[r] += 1
                self._of_one[pair] = self._of_one.get(pair, 0) + 1
                self._unverified[r] += self._nbytes[read]
                self.asked[read] = at
                heapq.heappush(self._events, (at, read, 0 if self.answered is not None else 7))

    def _pair(self, read: int) -> tuple[int, int]:
        """Return the key under which a read counts towards the limit of reads in flight from one source."""
        return self._receiver[read], -1 if self._near[read] else self._source[read]

    def _happen(self, at: float, read: int, what: int) -> None:
        """Handle an event.

        In event 0 the read may be posted, in event 1 the read is posted, in event 2 the read's bytes and digests have
        arrived, and in event 3 the read is verified. Events 4 to 6 concern a buffer of packed bytes. In event 4 the
        buffer is packed, in event 5 the buffer's read is posted, and in event 6 the buffer is free again. In event 7
        the read's digests are requested from a source that transforms.
        """
        r = self._receiver[read]
        if what == 0:
            self._post(read, at)
        elif what == 1 and not self._flow_bytes[read] and self._batches_left[read]:
            self._ask_packed(read, at)
        elif what in (1, 5):
            self._new.append(read)
        elif what == 4:
            self._host_free[r] = max(self._host_free[r], at) + self._batch_s[read]
            heapq.heappush(self._events, (self._host_free[r], read, 5))
        elif what == 6:
            self._give_buffer(self._source[read], at)
        elif what == 7:
            self._answer(read, at)
        elif what == 2:
            # The host launches a kernel for each slab, so a long read takes more of the host's time than a short read.
            slabs = self._nbytes[read] // SLAB_BYTES
            self._host_free[r] = max(self._host_free[r], at) + self.rates.step_s + slabs * self.rates.slab_s
            took = self._nbytes[read] / self.rates.digest_gb_per_s / GB
            self._device_free[r] = max(self._device_free[r], self._host_free[r]) + took
            heapq.heappush(self._events, (self._device_free[r], read, 3))
        else:
            self._check(r, read, at)

    def _answer(self, read: int, at: float) -> None:
        """Make a source digest the bytes of a read once the source has transformed them."""
        source = self._source[read]
        ready_s = self._ready[read] + self._delay[source]
        if at < ready_s:
            # Check again at `ready_s`, because digests for other readers may delay the transform further.
            heapq.heappush(self._events, (ready_s, read, 7))
            return
        begun = max(at, self._digest_free[source])
        took = self.rates.step_s + self._nbytes[read] / self.rates.digest_gb_per_s / GB
        self._digest_free[source] = begun + took
        # Digests run on a stream with a higher priority than the transform, so they delay the transform.
        if begun < self._transformed[source] + self._delay[source]:
            self._delay[source] += took
        heapq.heappush(self._events, (begun + took + self.rates.answer_s, read, 0))

    def _post(self, read: int, at: float) -> None:
        """Post a read. Inside the node, wait until fewer than `NEAR_READS` other reads are in flight."""
        r = self._receiver[read]
        if self._near[read]:
            if not self._turns[r]:
                self._wait_turn[r].append(read)
                return
            self._turns[r] -= 1
        self.posted[read] = start = max(self._host_free[r], at)
        # Python posts one read at a time.
        self._host_free[r] = start + self._cost_s[read]
        heapq.heappush(self._events, (self._host_free[r], read, 1))

    def _sent(self, read: int, at: float) -> None:
        """Handle the arrival of a read's bytes. The read may continue with buffers from the source."""
        if self._is_packed[read]:
            self._batches_left[read] -= 1
            heapq.heappush(self._events, (at + self.rates.answer_s, read, 6))
        if self._batches_left[read]:
            self._ask_packed(read, at)
        else:
            self._land(read, at)

    def _ask_packed(self, read: int, at: float) -> None:
        """Request the next buffer for a read from its source, or make the read wait for a free buffer."""
        source = self._source[read]
        self._flow_bytes[read], self._is_packed[read] = self._batch_bytes[read], True
        free = self._free_buffers.setdefault(source, NUM_BUFFERS)
        if not free:
            self._wait_buffer.setdefault(source, deque()).append(read)
            return
        self._free_buffers[source] = free - 1
        self._pack(read, at)

    def _give_buffer(self, source: int, at: float) -> None:
        """Assign a free buffer to the read that has waited longest."""
        waiting = self._wait_buffer.get(source)
        if waiting:
            self._pack(waiting.popleft(), at)
        else:
            self._free_buffers[source] += 1

    def _pack(self, read: int, at: float) -> None:
        source, took = self._source[read], self._batch_bytes[read] / self.rates.pack_gb_per_s / GB
        begun = max(at, self._packer_free.get(source, 0.0))
        self._packer_free[source] = begun + took
        heapq.heappush(self._events, (begun + took + self.rates.answer_s, read, 4))

    def _land(self, read: int, at: float) -> None:
        """Handle a complete read.

        The read is digested after earlier reads, and its digests are compared with the source's.
        """
        r = self._receiver[read]
        self.landed[read] = at
        self._flying[r] -= 1
        self._of_one[self._pair(read)] -= 1
        if self._near[read]:
            self._turns[r] += 1
            if self._wait_turn[r]:
                self._post(self._wait_turn[r].popleft(), at)
        digests_s = at if self.answered is None else float(self.answered[read])
        heapq.heappush(self._events, (max(at, digests_s), read, 2))
        self._ask(r, at)

    def _check(self, r: int, read: int, at: float) -> None:
        """Handle a verified read. If the read's window is complete, the receiver may begin a further window."""
        self.verified[read] = at
        self.done[r] = max(self.done[r], at)
        self._unverified[r] -= self._nbytes[read]
        self._left[self._window[read]] -= 1
        while self._whole[r] < self._window_stop[r] and not self._left[self._whole[r]]:
            self._whole[r] += 1
        self._ask(r, at)


def _stages(run: _SyncEvents, transform_s: F64, flip_s: F64, plan: SyncPlan) -> tuple[Stage, ...]:
    """Return each stage's time on the member that is busiest in that stage."""
    work = run.work
    post_s = np.bincount(work.receiver, weights=run.cost_s, minlength=run.num)
    reads = np.bincount(work.receiver, minlength=run.num)
    digest_s = reads * run.rates.step_s + run.nbytes_of / run.rates.digest_gb_per_s / GB
    given = (np.bincount(work.source, column, minlength=len(plan.sources)) for column in (None, work.nbytes))
    given_s = next(given) * run.rates.step_s + next(given) / run.rates.digest_gb_per_s / GB
    stages = []
    for name, times, members in (
        ("transform and digest", transform_s + given_s, plan.sources),
        ("posting reads", post_s, plan.receivers),
        ("digest and compare", digest_s, plan.receivers),
        ("flip", flip_s, plan.receivers),
    ):
        if len(times) and times.max() > 0:
            most = int(times.argmax())
            detail = f"{reads[most]} reads" if members is plan.receivers else ""
            stages.append(Stage(name=name, member=members[most], busy_s=float(times[most]), detail=detail))
    return tuple(stages)


def _timeline(run: _SyncEvents, plan: SyncPlan, ready: F64, flip_s: F64) -> tuple[Span, ...]:
    """Return spans: the buckets of the source that sends the most, and the windows of the slowest receiver."""
    if not len(run.done) or not len(run.work.receiver):
        return ()
    last = int((run.done + flip_s).argmax())
    given_bytes = np.bincount(run.work.source, weights=run.work.nbytes, minlength=len(plan.sources))
    most = int(given_bytes.argmax())
    spans = [
        Span(lane=plan.sources[most], stage="transform", start_s=float(a), stop_s=float(b))
        for a, b in pairwise(ready[most])
        if b > a
    ]
    name = plan.receivers[last]
    reads = slice(int(run.first[last]), int(run.first[last + 1]))
    heads = np.flatnonzero(np.diff(run.work.window[reads], prepend=-1))
    for stage, start, stop in (
        ("ask", run.asked[reads], run.posted[reads]),
        ("post", run.posted[reads], run.begun[reads]),
        ("wire", run.begun[reads], run.landed[reads]),
        ("digest", run.landed[reads], run.verified[reads]),
    ):
        begins, ends = np.minimum.reduceat(start, heads), np.maximum.reduceat(stop, heads)
        pairs = zip(begins.tolist(), ends.tolist(), strict=True)
        spans += [Span(lane=f"{name} {stage}", stage=stage, start_s=a, stop_s=b) for a, b in pairs]
    if flip_s[last]:
        end = float(run.done[last])
        spans.append(Span(lane=f"{name} flip", stage="flip", start_s=end, stop_s=end + float(flip_s[last])))
    return tuple(spans)


def _failures(run: _SyncEvents, plan: SyncPlan, cluster: Cluster, total_s: float, seed: int) -> tuple[str, ...]:
    """Return the members that die according to the seed, and how many receivers stay on the previous version."""
    chance = np.random.default_rng((seed, 1))
    sides = len(plan.sources) + len(plan.receivers)
    count = int(chance.poisson(cluster.failures_per_gpu_hour * sides * total_s / 3600))
    texts = []
    for member in chance.choice(sides, min(count, sides), replace=False).tolist():
        at = float(chance.uniform(0.0, total_s))
        # A receiver that dies does not affect other members. A source that dies leaves receivers with incomplete
        # versions.
        if member >= len(plan.sources):
            texts.append(f"{plan.receivers[member - len(plan.sources)]} dies at {at:.3f} s; it delays nobody")
            continue
        short = np.unique(run.work.receiver[(run.work.source == member) & (run.landed > at)])
        texts.append(
            f"{plan.sources[member]} dies at {at:.3f} s; {len(short)} receivers stay on the previous version until "
            "another source, or a receiver that has it, sends the rest"
        )
    return tuple(texts)
