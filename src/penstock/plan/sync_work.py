"""The reads of a sync as its receivers make them, as columns, for a simulation.

In: a `SyncPlan`, rates, a watermark. Out: `Work`: reads in the order in which they are posted, and what each costs.
Not here: when they run, over which links (`simulate_sync`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.plan.cluster import SHORT_RUN_BYTES, Rates
from penstock.plan.flow import F64
from penstock.plan.layout import Layout
from penstock.plan.sync import Part, SyncPlan
from penstock.segments import spread
from penstock.types import GIB, I64, MIB

# How `sync.receive.transfer` runs a part; the simulation uses the same constants.
WATERMARK_BYTES = 16 * GIB
"""Bytes under way by default: steps of 1 to 2 GiB, some milliseconds of NVLink each, so that the threads' own work for
each is small in comparison. They are read into their final places, so this bounds no memory of its own."""
ASK_BYTES = 16 * GIB
"""Digests of this many bytes are requested at once from a source that has them: half a second of a host's core."""
READS_AT_ONCE = 16
"""Steps under way of all sources."""
READS_OF_ONE = 4
"""Steps under way of one source: two or more, so that its link is not idle while one is posted."""
AHEAD_WINDOWS = 2
"""Windows under way: the one being verified, and the next."""
GROUP_BYTES = 256 * MIB
"""Short runs that one kernel of the reader copies, as in `transport.cuda_ipc`; a test compares the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The reads of a sync, as columns, by receiver, then by window; within a window the sources take turns."""

    receiver: I64
    window: I64
    """Buckets joined, counted over all receivers."""
    source: I64
    bucket: I64
    """The last it has something of."""
    nbytes: I64
    far_s: F64
    """The cost of its runs, other than posting it, where each is requested by itself: beyond the node."""
    num_copies: I64
    """Within the node: copies of their own, which long runs are."""
    short_bytes: I64
    """Within the node: the bytes that a kernel of the reader copies."""

    @classmethod
    def of(cls, plan: SyncPlan, rates: Rates, *, watermark_bytes: int = WATERMARK_BYTES) -> Work:
        """Return the steps into which each receiver cuts its part. Cost: that of all parts."""
        names = ("window", "source", "bucket", "nbytes", "far_s", "num_copies", "short_bytes")
        collected: dict[str, list[np.ndarray]] = {name: [np.zeros(0, np.int64)] for name in (*names, "receiver")}
        collected["far_s"] = [np.zeros(0)]
        num_windows = 0
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


def _steps(part: Part, rates: Rates, watermark_bytes: int) -> dict[str, np.ndarray]:
    """Return the columns of `Work` for each step of a part, in the order in which they are posted."""
    edges = np.array(part.windows(watermark_bytes // AHEAD_WINDOWS), np.int64)
    bucket = np.repeat(np.arange(len(part.bucket_first) - 1), np.diff(part.bucket_first))
    window = np.searchsorted(edges, bucket, side="right") - 1
    nbytes = part.run_bytes * part.num_rows
    far_s = np.where(part.run_bytes < SHORT_RUN_BYTES, rates.short_run_s, rates.run_s) * part.num_rows
    # As `transport.Rectangles.longest_runs` has it: what lies in one piece at both ends is one run.
    is_whole = (part.src_pitch == part.run_bytes) & (part.dst_pitch == part.run_bytes)
    is_short = np.where(is_whole, nbytes, part.run_bytes) < SHORT_RUN_BYTES
    num_copies = np.where(is_short, 0, np.where(is_whole, 1, part.num_rows))
    short_bytes = np.where(is_short, nbytes, 0)
    # By window and source, then cut where a step would be too large.
    order = np.lexsort((bucket, part.source, window))
    piece_bytes = max(watermark_bytes // 16, 1)
    cuts = -(-nbytes[order] // piece_bytes)
    window, source, bucket = (np.repeat(column[order], cuts) for column in (window, part.source, bucket))
    turn, of = spread(np.zeros(len(cuts), np.int64), cuts), np.repeat(cuts, cuts)

    def share(column: np.ndarray) -> np.ndarray:
        """Return what each piece has of a strip's bytes or copies."""
        each = np.repeat(column[order], cuts)
        # As differences of rounded sums, so that the pieces add up to the whole exactly.
        return each * (turn + 1) // of - each * turn // of

    amounts = {"nbytes": share(nbytes), "num_copies": share(num_copies), "short_bytes": share(short_bytes)}
    # A piece of a strip with a long run is at least part of one copy; rounding down would make it free.
    amounts["num_copies"] = np.maximum(amounts["num_copies"], np.repeat((num_copies > 0)[order], cuts))
    amounts["far_s"] = np.repeat(far_s[order] / cuts, cuts)
    stop = np.cumsum(amounts["nbytes"])
    fresh = np.ones(len(window), bool)
    fresh[1:] = (np.diff(window) != 0) | (np.diff(source) != 0)
    begin = (stop - amounts["nbytes"])[np.flatnonzero(fresh)][np.cumsum(fresh) - 1]
    fresh[1:] |= np.diff((stop - begin - 1) // piece_bytes) != 0
    head = np.flatnonzero(fresh)
    last = np.append(head[1:], len(window)) - 1
    pair = window[head] * (int(source.max()) + 1) + source[head]
    number = np.arange(len(head)) - np.searchsorted(pair, pair)
    # The first read of every source, then the second of each: so receivers post, that no link is left idle.
    turns = np.lexsort((number, window[head]))
    columns = {"window": window[head][turns], "source": source[head][turns], "bucket": bucket[last][turns]}
    return columns | {name: np.add.reduceat(column, head)[turns] for name, column in amounts.items()}


def transformed_bytes(plan: SyncPlan, holdings: Sequence[Layout], wants: Sequence[Layout]) -> I64:
    """Return [num_sources, num_buckets]: bytes of BF16 that each source reads for the tensors it holds under a tag."""
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
        # Two bytes an element: a quantised tensor is made from its BF16 original.
        np.add.at(nbytes[s], bucket[wanted], 2 * elements[holding.form[wanted]])
    return nbytes
