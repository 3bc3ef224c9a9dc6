"""Checking slabs against the manifest's leaf digests, on the device they are on.

In: complete slabs in device memory. Out: Pendings that raise an IntegrityError where a leaf differs.
Not here: the kernel (`digest.cuda`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from penstock.digest.cuda import leaf_digests_cuda, warm_up
from penstock.engine.check import Expected
from penstock.types import I64, MIB

_warm: set[torch.device] = set()
"""Devices whose kernels this process has loaded."""


class CudaChecker:
    """Checks slabs with the Triton kernel, a batch at a time, on a stream of its own."""

    num_threads = 1
    batch_bytes = 512 * MIB
    """Enough leaves to fill the device (2.4 TB/s), and few batches: each takes the GIL from the thread that moves bytes
    for a millisecond. Source: benchmarks/results/h100_202611/digest.md."""

    def __init__(self, expected: Expected, slab: Callable[[int], torch.Tensor], device: torch.device) -> None:
        self._expected, self._slab, self._device = expected, slab, device
        self._stream = torch.cuda.Stream(device)
        self._warming: Future[None] | None = None
        if device not in _warm:
            # Some milliseconds, but seconds where the kernels must be compiled: the first bytes come meanwhile.
            with_one = ThreadPoolExecutor(1, thread_name_prefix="penstock-digest-kernels")
            self._warming = with_one.submit(self._warm_up)
            with_one.shutdown(wait=False)

    def _warm_up(self) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            warm_up(self._device)
            self._stream.synchronize()
        _warm.add(self._device)

    def check(self, slabs: Sequence[int]) -> _DigestPending | None:
        """See `Checker.check`. The slabs' copies are complete, so no stream is waited for."""
        if self._warming is not None:
            self._warming.result()
            self._warming = None
        expected, plan = self._expected, self._expected.plan
        rows = np.concatenate([expected.rows(slab) for slab in slabs])
        if not len(rows):
            return None
        base = np.array([self._slab(slab).data_ptr() for slab in slabs], np.int64)
        at = np.searchsorted(np.sort(slabs), plan.row_slab[rows])
        address = base[np.argsort(slabs, kind="stable")][at] + plan.row_offset[rows]
        counts = expected.counts[rows]
        row_of = np.repeat(np.arange(len(rows)), counts)
        number = np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts, counts)
        start = number * expected.leaf_bytes
        nbytes = np.minimum(plan.row_nbytes[rows][row_of] - start, expected.leaf_bytes)
        wanted = expected.leaves[expected.first[rows][row_of] + number]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            got = leaf_digests_cuda(address[row_of] + start, nbytes, self._device)
            # Compared on the host: eight bytes a leaf, and no kernels to launch in the midst of the copies.
            host = torch.empty(len(wanted), dtype=torch.int64, pin_memory=True)
            host.copy_(got, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _DigestPending(event, host, wanted, rows[row_of], number, expected)


class _DigestPending:
    """Digests on their way to the host; `done` compares them."""

    def __init__(
        self,
        event: torch.cuda.Event,
        got: torch.Tensor,
        wanted: np.ndarray[tuple[int], np.dtype[np.uint64]],
        rows: I64,
        number: I64,
        expected: Expected,
    ) -> None:
        self._event, self._got, self._wanted = event, got, wanted
        self._rows, self._number, self._expected = rows, number, expected

    def done(self) -> bool:
        """See `Pending.done`."""
        if not self._event.query():
            return False
        wrong = np.flatnonzero(self._got.numpy().view(np.uint64) != self._wanted)
        if len(wrong):
            raise self._expected.fault(int(self._rows[wrong[0]]), int(self._number[wrong[0]]))
        return True
