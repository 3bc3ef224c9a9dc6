"""Transports beside the copy they cannot beat: GB/s of one read by the length of its segments.

    python -m benchmarks.bench_transport [--transport loopback|shm] [--mib 512] [--reps 9] [--threads 1] [--json]
    python -m benchmarks.bench_transport --transport cuda_ipc --mib 16384 [--source-device cuda:1] [--streams 1,2]

The limit is a plain copy of the same bytes within one process, and takes turns with each read; "paired" is the median
of each read's rate over that of the limit's turn just before it. Loopback and shm: ctypes.memmove in one call a thread,
between touched memory. cuda_ipc: torch's copy between the same devices. But for loopback the holder is another
process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import numpy as np
from tests.support.holder import TILE_BYTES, HolderProcess, allocate, fill, tile

from penstock.segments import Segments
from penstock.transport import cuda_ipc
from penstock.transport.loopback import LoopbackTransport
from penstock.transport.protocol import Descriptor, Memory, Transport
from penstock.transport.shm import ShmTransport
from penstock.types import GB, MIB

SEGMENT_BYTES = (0, 8 * MIB, MIB, 64 << 10, 4 << 10)
"""0: one segment for everything a thread reads."""

MANY = 30_000
"""Small segments read at once on a device: a model of that many tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    case: str
    num_segments: int
    gb_per_s: float
    low: float
    high: float
    paired: float
    post_ms: float = 0.0
    """Of it in `post_read`, where that is not the whole."""


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


def on_host(opened: ExitStack, name: str, nbytes: int) -> tuple[Transport, Descriptor]:
    """A transport to read by, and what a holder of the pattern gave."""
    if name == "shm":
        return ShmTransport(), opened.enter_context(HolderProcess("shm", nbytes=nbytes)).descriptor
    transport, memory = LoopbackTransport(), Memory.of_buffer(memoryview(np.empty(nbytes, np.uint8)))
    fill(memory, 1)
    return transport, transport.register(memory).descriptor


def bench(name: str, total_bytes: int, reps: int, num_threads: int) -> list[Row]:
    part = total_bytes // num_threads
    found: list[Row] = []
    limits: list[float] = []
    beside, mine = allocate(total_bytes, "cpu"), allocate(total_bytes, "cpu")
    fill(beside, 1)
    into = np.ctypeslib.as_array((ctypes.c_uint8 * total_bytes).from_address(mine.address))
    with ThreadPoolExecutor(num_threads) as pool, ExitStack() as opened:
        transport, source = on_host(opened, name, total_bytes)
        opened.callback(transport.close)
        handle = transport.register(mine)

        def limit(thread: int) -> None:
            at = thread * part
            ctypes.memmove(mine.address + at, beside.address + at, part)

        for segment_bytes in SEGMENT_BYTES:
            if segment_bytes >= part:
                continue
            segments = [rows_of(i * part, part, segment_bytes) for i in range(num_threads)]

            def read(thread: int, segments: list[Segments] = segments) -> None:
                transport.wait(transport.post_read(handle, source, segments[thread]), stall_s=30)

            rates, ratios = [], []
            for rep in range(reps + 1):
                into[:] = 0
                plain = part * num_threads / seconds(pool, limit, num_threads) / GB
                into[:] = 0
                rate = part * num_threads / seconds(pool, read, num_threads) / GB
                if rep:  # the first turn warms up
                    limits.append(plain)
                    rates.append(rate)
                    ratios.append(rate / plain)
            for one in segments:
                check(one, lambda at, nbytes: into[at : at + nbytes])
            label = f"{segment_bytes >> 10} KiB segments" if segment_bytes else "one segment a thread"
            found.append(row(f"{name}, {label}", sum(len(one.src) for one in segments), rates, ratios))
    return [row("memmove: the limit", num_threads, limits, [1.0]), *found]


def check(segments: Segments, got: Callable[[int, int], np.ndarray]) -> None:
    """Some of the segments have the holder's bytes."""
    doubled = np.resize(tile(1), 3 * TILE_BYTES)
    for src, dst, nbytes in zip(segments.src, segments.dst, segments.nbytes, strict=True):
        if (src // nbytes) % 97 == 0:
            nbytes = min(int(nbytes), TILE_BYTES)
            assert (got(int(dst), nbytes) == doubled[src % TILE_BYTES :][:nbytes]).all(), f"wrong bytes at {dst}"


def on_device(
    total_bytes: int, reps: int, device: str, source_device: str, streams: list[int], env: dict[str, str]
) -> list[Row]:
    import torch

    mine = allocate(total_bytes, device)
    into = mine.owner.bytes_at(0, total_bytes)  # type: ignore[attr-defined]
    plain = torch.empty(total_bytes, dtype=torch.uint8, device=source_device)
    cases: list[tuple[int, int]] = [(0, total_bytes), (16 * MIB, total_bytes), (MIB, total_bytes)]
    cases += [(width, MANY * width) for width in (64 << 10, 4 << 10) if MANY * width <= total_bytes]
    found, limits = [], []

    def limit() -> float:
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        into.copy_(plain)
        torch.cuda.synchronize(device)
        return total_bytes / (time.perf_counter() - began) / GB

    with HolderProcess("cuda_ipc", nbytes=total_bytes, device=source_device, env=env) as holder:
        for num_streams in streams:
            transport = cuda_ipc.CudaIpcTransport(num_streams=num_streams)
            began = time.perf_counter()
            handle = transport.register(mine)
            registered = time.perf_counter()
            transport.wait(transport.post_read(handle, holder.descriptor, rows_of(0, 512, 0)), stall_s=30)
            first = time.perf_counter() - registered
            found.append(row(f"register {registered - began:.4f} s, first read {first:.4f} s", 1, [0.0], [0.0]))
            for width, nbytes in cases:
                segments = rows_of(0, nbytes, width)
                rates, ratios, posts = [], [], []
                for rep in range(reps + 1):
                    beside = limit()
                    began = time.perf_counter()
                    pending = transport.post_read(handle, holder.descriptor, segments)
                    posted = time.perf_counter()
                    transport.wait(pending, stall_s=30)
                    rate = nbytes / (time.perf_counter() - began) / GB
                    if rep:
                        limits.append(beside)
                        rates.append(rate)
                        ratios.append(rate / beside)
                        posts.append((posted - began) * 1e3)
                check(segments, lambda at, n: into[at : at + n].cpu().numpy())
                label = f"{width >> 10} KiB segments" if width else "one segment"
                name = f"cuda_ipc, {source_device} -> {device}, {num_streams} streams, {label}"
                found.append(row(name, len(segments.src), rates, ratios, statistics.median(posts)))
            transport.close()
    return [row(f"torch copy {source_device} -> {device}: the limit", 1, limits, [1.0]), *found]


def row(case: str, num_segments: int, rates: list[float], ratios: list[float], post_ms: float = 0.0) -> Row:
    return Row(
        case=case,
        num_segments=num_segments,
        gb_per_s=statistics.median(rates),
        low=min(rates),
        high=max(rates),
        paired=statistics.median(ratios),
        post_ms=post_ms,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("loopback", "shm", "cuda_ipc"), default="loopback")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--reps", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--source-device", default="cuda:0")
    parser.add_argument("--streams", default="2", help="numbers of streams to try, as 1,2,4")
    parser.add_argument("--short-kib", type=int, help="segments below this are copied by a kernel")
    parser.add_argument("--expandable", action="store_true", help="the holder's memory is of expandable_segments")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.short_kib is not None:
        cuda_ipc.SHORT_BYTES = asked.short_kib << 10
    if asked.transport == "cuda_ipc":
        setting = "expandable_segments:True"
        env = {"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting} if asked.expandable else {}
        streams = [int(one) for one in asked.streams.split(",")]
        rows = on_device(asked.mib * MIB, asked.reps, asked.device, asked.source_device, streams, env)
    else:
        rows = bench(asked.transport, asked.mib * MIB, asked.reps, asked.threads)
    if asked.json:
        print(json.dumps([asdict(one) for one in rows]))
        return
    print("| case | segments | GB/s median | min-max | of the limit, paired | post, ms |\n|---|---|---|---|---|---|")
    for one in rows:
        rates = f"{one.gb_per_s:.2f} | {one.low:.2f}-{one.high:.2f} | {one.paired:.2f} | {one.post_ms:.2f}"
        print(f"| {one.case} | {one.num_segments:,} | {rates} |")


if __name__ == "__main__":
    main()
