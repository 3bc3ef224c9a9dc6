"""The physical limits, measured in the same run: the link, the page cache, the disk, several processes at once.

In: files and a device. Out: decimal GB/s. Plain reads and copies only; nothing of Penstock.
Not here: which row has which limit as its ceiling (`rows`).
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

MIB = 1 << 20
GB = 10**9


class Ring:
    """Page-aligned anonymous memory, touched, and registered with CUDA if asked, until `unregister`.

    The driver refuses whatever later comes to lie at addresses that were freed while registered: its own memory too.
    """

    def __init__(self, nbytes: int, *, register: bool, huge: bool = False, touch_threads: int = 1) -> None:
        import torch

        self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self.map)
        self.tensor = torch.frombuffer(self.map, dtype=torch.uint8)
        start = time.perf_counter()
        edges = [nbytes * i // touch_threads // 4096 * 4096 for i in range(touch_threads)] + [nbytes]
        in_threads([lambda a=a, b=b: self.tensor[a:b:4096].fill_(1) for a, b in itertools.pairwise(edges)])
        self.touch_s = time.perf_counter() - start
        self.register_s = 0.0
        if register:
            start = time.perf_counter()
            code = int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), nbytes, 0))
            if code:
                raise RuntimeError(f"cudaHostRegister: error {code}")
            self.register_s = time.perf_counter() - start

    def unregister(self) -> None:
        """Let CUDA forget it; no copy may be under way."""
        import torch

        torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())


def in_threads(jobs: Sequence[Any]) -> None:
    """Runs every job in a thread of its own; raises the first failure."""
    failures: list[BaseException] = []

    def guarded(job: Any) -> None:
        try:
            job()
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def h2d(device: str, *, chunk_bytes: int = 256 * MIB, total_bytes: int = 8 << 30) -> float:
    """Large copies from registered memory to `device`, one stream."""
    import torch

    ring = None
    if not device.startswith("cuda"):
        source = torch.ones(chunk_bytes // 4, dtype=torch.uint8)
        target = torch.empty_like(source)
        total_bytes //= 16
    else:
        ring = Ring(chunk_bytes, register=True)
        source = ring.tensor
        target = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)
    rounds = max(1, total_bytes // source.numel())
    target.copy_(source, non_blocking=True)
    synchronize(device)
    start = time.perf_counter()
    for _ in range(rounds):
        target.copy_(source, non_blocking=True)
    synchronize(device)
    seconds = time.perf_counter() - start
    if ring is not None:
        ring.unregister()
    return rounds * source.numel() / seconds / GB


def synchronize(device: str) -> None:
    """Waits for `device`, if it is one that must be waited for."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(torch.device(device))


def read(
    files: Sequence[str],
    *,
    threads: int,
    chunk_bytes: int,
    direct: bool = False,
    ring: Ring | None = None,
    part: tuple[int, int] = (0, 1),
) -> float:
    """Every byte of `files` (or part r of n) once through a ring of two chunks a thread; GB/s.

    Cost: reads only; with `direct` past the page cache, of whole 4 KiB blocks.
    """
    ring = ring or Ring(2 * threads * chunk_bytes, register=False)
    jobs = []
    for path in files:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        nbytes = os.fstat(fd).st_size // 4096 * 4096 if direct else os.fstat(fd).st_size
        jobs += [(fd, at, min(chunk_bytes, nbytes - at)) for at in range(0, nbytes, chunk_bytes)]
    jobs = jobs[len(jobs) * part[0] // part[1] : len(jobs) * (part[0] + 1) // part[1]]
    work, lock = iter(jobs), threading.Lock()

    def pull(slot: int) -> None:
        for turn in range(len(jobs)):
            with lock:
                job = next(work, None)
            if job is None:
                return
            fd, at, nbytes = job
            start = (2 * slot + (turn & 1)) * chunk_bytes
            got = 0
            while got < nbytes:
                got += os.preadv(fd, [ring.view[start + got : start + nbytes]], at + got)

    start_s = time.perf_counter()
    in_threads([lambda i=i: pull(i) for i in range(threads)])
    rate = sum(nbytes for _, _, nbytes in jobs) / (time.perf_counter() - start_s) / GB
    for fd in {job[0] for job in jobs}:
        os.close(fd)
    return rate


# (threads, chunk): the shapes that were best somewhere on hosts of 16 and 64 cores; the ceiling is the best of them.
SHAPES = ((8, 8 * MIB), (12, 8 * MIB), (16, 8 * MIB), (16, 4 * MIB))
DIRECT_SHAPES = ((8, 8 * MIB), (16, 8 * MIB), (16, 1 * MIB))
GROUP_SHAPES = ((6, 4 * MIB), (8, 8 * MIB), (10, 8 * MIB), (15, 4 * MIB))


def best_read(files: Sequence[str], *, register: bool) -> tuple[float, str]:
    """Best rate of reading cached files into one registered ring, over `SHAPES`."""
    ring = Ring(max(2 * t * c for t, c in SHAPES), register=register)
    rates = {f"{t} x {c // MIB} MiB": read(files, threads=t, chunk_bytes=c, ring=ring) for t, c in SHAPES}
    best = max(rates, key=lambda shape: rates[shape])
    return rates[best], best


def digest_kernel(device: str, *, nbytes: int = 8 << 30, rounds: int = 5) -> float:
    """The leaf digest kernel alone over `nbytes` of device memory, by CUDA events."""
    import numpy as np
    import torch

    from penstock.digest.cuda import leaf_digests_cuda
    from penstock.digest.leaf import LEAF_BYTES

    body = torch.randint(0, 1 << 62, (nbytes // 8,), dtype=torch.int64, device=device)
    addresses = body.data_ptr() + np.arange(0, nbytes, LEAF_BYTES, dtype=np.int64)
    lengths = np.full(len(addresses), LEAF_BYTES, dtype=np.int64)
    leaf_digests_cuda(addresses, lengths, torch.device(device))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(rounds):
        leaf_digests_cuda(addresses, lengths, torch.device(device))
    events[1].record()
    torch.cuda.synchronize()
    return rounds * nbytes / (events[0].elapsed_time(events[1]) / 1e3) / GB
