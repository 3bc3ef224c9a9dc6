"""Transports beside the copy they cannot beat: GB/s of one read by the length of its segments.

    python -m benchmarks.bench_transport [--mib 512] [--reps 9] [--threads 1] [--json]

Loopback's limit is ctypes.memmove of the same bytes, in one call a thread, between the same touched memory. Limit and
transport take turns; "paired" is the median of each read's rate over that of the limit's turn just before it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np

from penstock.transport.loopback import LoopbackTransport
from penstock.transport.protocol import Memory, Segments
from penstock.types import GB, MIB

SEGMENT_BYTES = (0, 8 * MIB, MIB, 64 << 10, 4 << 10)
"""0: one segment for everything a thread reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    case: str
    num_segments: int
    gb_per_s: float
    low: float
    high: float
    paired: float


def rows_of(start: int, nbytes: int, segment_bytes: int) -> Segments:
    """Segments of one thread's part: neighbours at the source, in a shuffled order at the destination."""
    width = min(segment_bytes or nbytes, nbytes)
    src = np.arange(start, start + nbytes - width + 1, width)
    dst = np.random.default_rng(1).permutation(src)
    return Segments(src=src, dst=dst, nbytes=np.full(len(src), width))


def seconds(pool: ThreadPoolExecutor, call: Callable[[int], object], num_threads: int) -> float:
    began = time.perf_counter()
    list(pool.map(call, range(num_threads)))
    return time.perf_counter() - began


def bench(total_bytes: int, reps: int, num_threads: int) -> list[Row]:
    part = total_bytes // num_threads
    source, into = (np.full(total_bytes, value, np.uint8) for value in (1, 2))
    source[:] = np.arange(total_bytes, dtype=np.uint32).astype(np.uint8)
    transport = LoopbackTransport()
    held, mine = (transport.register(Memory.of_buffer(memoryview(array))) for array in (source, into))

    def limit(thread: int) -> None:
        at = thread * part
        ctypes.memmove(mine.memory.address + at, held.memory.address + at, part)

    found = []
    with ThreadPoolExecutor(num_threads) as pool:
        limits: list[float] = []
        for segment_bytes in SEGMENT_BYTES:
            if segment_bytes >= part:
                continue
            segments = [rows_of(i * part, part, segment_bytes) for i in range(num_threads)]

            def read(thread: int, segments: list[Segments] = segments) -> None:
                transport.wait(transport.post_read(mine, held.descriptor, segments[thread]), stall_s=30)

            rates, ratios = [], []
            for rep in range(reps + 1):
                into[:] = 0
                beside = part * num_threads / seconds(pool, limit, num_threads) / GB
                into[:] = 0
                rate = part * num_threads / seconds(pool, read, num_threads) / GB
                if rep:  # the first turn warms up
                    limits.append(beside)
                    rates.append(rate)
                    ratios.append(rate / beside)
            for one in segments:
                for src, dst in zip(one.src[::997], one.dst[::997], strict=True):
                    assert (into[dst : dst + one.nbytes[0]] == source[src : src + one.nbytes[0]]).all()
            name = f"{segment_bytes >> 10} KiB segments" if segment_bytes else "one segment a thread"
            found.append(row(f"loopback, {name}", sum(len(one.src) for one in segments), rates, ratios))
    transport.close()
    return [row("memmove: the limit", num_threads, limits, [1.0]), *found]


def row(case: str, num_segments: int, rates: list[float], ratios: list[float]) -> Row:
    return Row(
        case=case,
        num_segments=num_segments,
        gb_per_s=statistics.median(rates),
        low=min(rates),
        high=max(rates),
        paired=statistics.median(ratios),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--reps", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = bench(asked.mib * MIB, asked.reps, asked.threads)
    if asked.json:
        print(json.dumps([asdict(one) for one in rows]))
        return
    print("| case | segments | GB/s median | min-max | of the limit, paired |\n|---|---|---|---|---|")
    for one in rows:
        rates = f"{one.gb_per_s:.2f} | {one.low:.2f}-{one.high:.2f} | {one.paired:.2f}"
        print(f"| {one.case} | {one.num_segments:,} | {rates} |")


if __name__ == "__main__":
    main()
