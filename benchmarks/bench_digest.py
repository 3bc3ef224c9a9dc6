"""Leaf digests: GB/s on a CUDA device beside its own copy and read limits, or GB/s per thread of the CPU.

    python benchmarks/bench_digest.py [--device cuda|cpu] [--max-bytes 4G] [--sweep] [--json]

On a device each figure is the median of CUDA-event times with the launches queued behind a pause, so that Python's time
is shown beside it and not within it; batches below the buffer's size take turns over it, so that no batch finds its
bytes in the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from penstock.types import GIB, MIB

KIB = 1 << 10
PAUSE_CYCLES = 6_000_000
"""GPU clock cycles a sample waits before its first kernel: 3 ms, longer than Python takes to queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured case; `low` and `high` are the slowest and the fastest sample."""

    case: str
    nbytes: int
    gb_per_s: float
    low: float
    high: float
    device_us: float
    host_us: float
    """Python's time to post one call."""
    of_read: float | None = None
    """Fraction of the device's read limit in this run."""


def device_seconds(calls: Sequence[Callable[[], object]], samples: int) -> tuple[list[float], float]:
    """Device time of each sampled call, taken in turns from `calls`; and the host's median time to post one."""
    posts, events = [], []
    for index in range(samples + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(PAUSE_CYCLES)
        start.record()
        began = time.perf_counter()
        calls[index % len(calls)]()
        posts.append(time.perf_counter() - began)
        stop.record()
        torch.cuda.synchronize()
        events.append((start, stop))
    return [a.elapsed_time(b) / 1e3 for a, b in events[3:]], statistics.median(posts[3:])


def measured(case: str, nbytes: int, calls: Sequence[Callable[[], object]], samples: int, limit: float | None) -> Row:
    seconds, post = device_seconds(calls, samples)
    median = statistics.median(seconds)
    rate = nbytes / median / 1e9
    return Row(
        case=case,
        nbytes=nbytes,
        gb_per_s=rate,
        low=nbytes / max(seconds) / 1e9,
        high=nbytes / min(seconds) / 1e9,
        device_us=median * 1e6,
        host_us=post * 1e6,
        of_read=rate / limit if limit else None,
    )


def batches(
    data: torch.Tensor, nbytes: int, leaf_bytes: int, shift: int = 0, **tuning: object
) -> list[Callable[[], object]]:
    """Digests of up to 16 different runs of `nbytes` of the buffer, each in leaves of `leaf_bytes`."""
    from penstock.digest import cuda

    num_leaves = nbytes // leaf_bytes
    calls: list[Callable[[], object]] = []
    for start in range(0, min(data.numel() - nbytes - shift, 15 * nbytes) + 1, nbytes):
        addresses = data.data_ptr() + start + shift + np.arange(num_leaves) * leaf_bytes
        lengths = np.full(num_leaves, leaf_bytes)
        calls.append(cuda.plan_leaves(addresses, lengths, data.device, tuning=cuda.Tuning(**tuning)).digest)
    return calls


def bench_cuda(max_bytes: int, samples: int, searched: bool) -> list[Row]:
    from penstock.digest import cuda

    device = torch.device("cuda")
    data = torch.empty(max_bytes, dtype=torch.uint8, device=device)
    data.view(torch.int64).random_()
    began = time.perf_counter()
    cuda.warm_up(device)
    torch.cuda.synchronize()
    print(f"warm_up (compile or cache): {time.perf_counter() - began:.2f} s", file=sys.stderr)

    shape = sweep(data, samples) if searched else {}
    half = max_bytes // 2
    words = data.view(torch.int64)
    read = measured("torch sum of int64: the read limit", max_bytes, [words.sum], samples, None)
    limit = read.gb_per_s
    copy = measured(
        "device copy, read + written", 2 * half, [lambda: data[:half].copy_(data[half : 2 * half])], samples, limit
    )
    rows = [read, copy]
    for nbytes, leaf in itertools.product((64 * MIB, 256 * MIB, 4 * GIB), (64 * KIB, 128 * KIB, 256 * KIB, MIB)):
        if nbytes <= max_bytes:
            case = f"{nbytes // MIB} MiB of {leaf // KIB} KiB leaves"
            rows.append(measured(case, nbytes, batches(data, nbytes, leaf, **shape), samples, limit))
    for case, nbytes, leaf, shift in (
        ("60,000 leaves of 64 KiB", 60_000 * 64 * KIB, 64 * KIB, 0),
        ("8 KiB leaves", 256 * MIB, 8 * KIB, 0),
        ("256 KiB leaves, addresses by 8", 256 * MIB, 256 * KIB, 8),
        ("256 KiB leaves, odd addresses", 256 * MIB, 256 * KIB, 1),
        ("60,000 scalars of 4 bytes", 240_000, 4, 0),
    ):
        if nbytes + shift <= max_bytes:
            rows.append(measured(case, nbytes, batches(data, nbytes, leaf, shift, **shape)[:15], samples, limit))
    if max_bytes >= 256 * MIB:
        addresses, lengths = data.data_ptr() + np.arange(1024) * 256 * KIB, np.full(1024, 256 * KIB)
        call = lambda: cuda.leaf_digests_cuda(addresses, lengths, device)  # noqa: E731
        rows.append(measured("256 MiB of 256 KiB leaves, planned anew", 256 * MIB, [call], samples, limit))
    return rows


SWEEP: Sequence[Sequence[dict[str, Any]]] = (
    [
        {"run_stripes": run, "tile_blocks": blocks, "tile_warps": warps}
        for run, blocks, warps in (
            *((1, 16, 2), (2, 8, 1), (2, 16, 2), (2, 32, 4), (2, 16, 1), (2, 8, 2)),
            *((4, 8, 1), (4, 16, 2), (4, 32, 4), (8, 8, 1), (8, 16, 2)),
        )
    ],
    [
        {"finish_leaves": leaves, "finish_unroll": unroll}
        for leaves, unroll in itertools.product((1, 2, 4), (8, 16, 32))
    ],
    [{"slab_blocks": mib * KIB} for mib in (128, 256, 512, 1024)],
)
"""Groups of launch shapes, searched one after the other."""


def sweep(data: torch.Tensor, samples: int) -> dict[str, Any]:
    """The launch shapes with the best geometric mean over five batches; prints each trial to stderr."""
    cases = ((64, 256 * KIB, 0), (256, 256 * KIB, 0), (1024, 256 * KIB, 0), (256, 8 * KIB, 0), (256, 256 * KIB, 1))
    best: dict[str, Any] = {}
    for group in SWEEP:
        scores = []
        for shape in group:
            rates = [
                measured("", mib * MIB, batches(data, mib * MIB, leaf, shift, **best | shape), samples, None).gb_per_s
                for mib, leaf, shift in cases
            ]
            scores.append(statistics.geometric_mean(rates))
            print(" ".join(f"{rate:6.0f}" for rate in (*rates, scores[-1])), shape, file=sys.stderr)
        best |= group[scores.index(max(scores))]
    print(f"best: {best}", file=sys.stderr)
    return best


def bench_cpu(max_bytes: int, samples: int) -> list[Row]:
    """xxhash with one thread, and with a thread a core; bytes from memory, not from a cache."""
    data = np.random.default_rng(0).integers(0, 256, min(max_bytes, 256 * MIB), dtype=np.uint8)
    view = memoryview(data)
    rows = []
    for num_threads, leaf in itertools.product(sorted({1, os.cpu_count() or 1}), (64 * KIB, 256 * KIB, MIB)):

        def digest(thread: int, num_threads: int = num_threads, leaf: int = leaf) -> None:
            for start in range(thread * leaf, data.nbytes, num_threads * leaf):
                xxhash.xxh3_64_intdigest(view[start : start + leaf])

        seconds = []
        with ThreadPoolExecutor(num_threads) as pool:
            for _ in range(samples):
                began = time.perf_counter()
                list(pool.map(digest, range(num_threads)))
                seconds.append(time.perf_counter() - began)
        median, share = statistics.median(seconds), data.nbytes / num_threads
        rows.append(
            Row(
                case=f"xxhash, {leaf // KIB} KiB leaves, each of {num_threads} threads",
                nbytes=data.nbytes,
                gb_per_s=share / median / 1e9,
                low=share / max(seconds) / 1e9,
                high=share / min(seconds) / 1e9,
                device_us=0.0,
                host_us=median * 1e6,
            )
        )
    return rows


def main() -> None:
    from penstock.config import parse_bytes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-bytes", type=parse_bytes, default=4 * GIB, help="size of the buffer, a multiple of 16")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--sweep", action="store_true", help="search the launch shapes first, then use the best")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.device == "cuda":
        rows = bench_cuda(args.max_bytes, args.samples, args.sweep)
        where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    else:
        rows = bench_cpu(args.max_bytes, args.samples)
        where = f"CPU, {os.cpu_count()} cores, xxhash {xxhash.VERSION}"
    if args.json:
        print(json.dumps({"device": where, "samples": args.samples, "rows": [asdict(row) for row in rows]}))
        return
    print(f"{where}; median of {args.samples}, slowest and fastest\n")
    print("| case | GB/s | range | of the read limit | device us | host us a call |\n|---|---|---|---|---|---|")
    for row in rows:
        share = "" if row.of_read is None else f"{row.of_read:.0%}"
        spread = f"{row.low:,.1f}-{row.high:,.1f}"
        print(f"| {row.case} | {row.gb_per_s:,.1f} | {spread} | {share} | {row.device_us:,.1f} | {row.host_us:,.1f} |")


if __name__ == "__main__":
    main()
