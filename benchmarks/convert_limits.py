"""The limits of a conversion: its bytes read, copied to devices and back, and written, with nothing else running.

In: a checkpoint, room on the same file system, how many devices. Out: GB of the checkpoint a second, of each.
Not here: the conversion (`bench_convert`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from penstock.types import GB, MIB
from penstock_convert.workers.worker import DEVICE_READS, LOCAL_READS

T = TypeVar("T")
READ_BYTES = 8 * MIB


def limit_gb_per_s(source: Path, scratch: Path, share: float, gpus: int) -> dict[str, float]:
    """Rates in bytes of the source a second: reading, to the devices, back, and writing `share` bytes of each byte."""
    threads = DEVICE_READS * gpus if gpus else min(LOCAL_READS, len(os.sched_getaffinity(0)))
    paths = sorted(source.glob("*.safetensors"))[:2]
    total = sum(path.stat().st_size for path in paths)
    blocks = [(path, at) for path in paths for at in range(0, path.stat().st_size, READ_BYTES)]
    rates = {"read": _timed(blocks, threads, lambda: _reader(), total)}
    rates["write"] = _write(scratch, int(total * share), max(1, threads // 2)) / share
    if gpus:
        rates["to device"], back = _pcie(gpus)
        rates["to host"] = back / share
    return rates


def _write(scratch: Path, nbytes: int, threads: int) -> float:
    """To a file for each thread, as a file system lets one write to a file at a time."""
    data, size = memoryview(bytes(READ_BYTES)), max(READ_BYTES, nbytes // threads)
    with ExitStack() as stack:
        fds = []
        for i in range(threads):
            path = scratch / f"limit{i}"
            fds.append(stack.enter_context(open(path, "wb")).fileno())
            stack.callback(path.unlink)
            os.posix_fallocate(fds[-1], 0, size)
        jobs = [(fd, at) for at in range(0, size - READ_BYTES + 1, READ_BYTES) for fd in fds]
        return _timed(jobs, threads, lambda: lambda job: os.pwrite(job[0], data, job[1]), READ_BYTES * len(jobs))


def _reader() -> Callable[[tuple[Path, int]], object]:
    buffer, fds = memoryview(bytearray(READ_BYTES)), dict[Path, int]()

    def read(block: tuple[Path, int]) -> object:
        path, at = block
        if path not in fds:
            fds[path] = os.open(path, os.O_RDONLY)
        return os.preadv(fds[path], [buffer], at)

    return read


def _timed(jobs: Sequence[T], threads: int, make: Callable[[], Callable[[T], object]], nbytes: int) -> float:
    began = time.monotonic()

    def work(index: int) -> None:
        call = make()
        for job in jobs[index::threads]:
            call(job)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return nbytes / GB / (time.monotonic() - began)


def _pcie(gpus: int) -> tuple[float, float]:
    """To and from all devices at once, both ways at the same time."""
    nbytes, times = 512 * MIB, 8
    up = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(gpus)]
    down = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(gpus)]
    there = [[torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{i}") for _ in range(2)] for i in range(gpus)]
    took = []
    for _ in range(2):
        for i in range(gpus):
            torch.cuda.synchronize(i)
        began = time.monotonic()
        for i in range(gpus):
            for stream, pair in (
                (torch.cuda.Stream(i), (there[i][0], up[i])),
                (torch.cuda.Stream(i), (down[i], there[i][1])),
            ):
                with torch.cuda.stream(stream):
                    for _ in range(times):
                        pair[0].copy_(pair[1], non_blocking=True)
        for i in range(gpus):
            torch.cuda.synchronize(i)
        took.append(time.monotonic() - began)
    rate = gpus * nbytes * times / GB / took[-1]
    return rate, rate
