"""The reads of one open file: large ones on the engine, others one after the other on the calling thread.

In: a plan of the file. Out: its slabs, filled, on the CPU or a device.
Not here: what is read (`safe_open`), loads of weight sets (`session`).

Both, because the engine starts threads and, for a GPU, pins staging: 0.3 ms for a tensor of 4 KiB that is read here in
0.02, 17 ms for one of 64 MiB to a GPU that takes 11 here.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from penstock import interrupt
from penstock.config import Settings
from penstock.engine.choose_place import place_on, registrar_of
from penstock.engine.run import LoadRun
from penstock.engine.trace import Trace
from penstock.loader.intake import Intake
from penstock.loader.tensor import as_bytes
from penstock.plan.schedule import LoadPlan
from penstock.storage import Source, is_remote
from penstock.types import MIB

ENGINE_BYTES = 16 * MIB
"""Reads of local files onto the CPU go to the engine from here on. Source: two cores, files in memory: 32 MiB take
20 ms here and 6 there, 256 MiB 150 and 31; what counts is that several threads fault the new pages."""

ENGINE_CUDA_BYTES = 96 * MIB
"""The same to a GPU. Source: one H200, files in memory: 64 MiB take 11 ms here and 17 there, 96 MiB 16 and 17,
128 MiB 22 and 15, 256 MiB 41 and 21."""


class FileReader:
    """Reads of `source` into fresh memory, from any thread. Keeps its staging, at most `memory_bytes`, until `close`.

    Args:
        source: the caller's to close, after the reader.
        device: where most slabs go; staging is pinned for it.
        settings: budget and deadlines.
    """

    def __init__(self, source: Source, device: torch.device, settings: Settings) -> None:
        self._source, self._device, self._settings = source, device, settings
        self._intake = Intake(settings, device)
        self._intake.is_remote = is_remote(source.uri)
        self._turn = threading.Lock()

    @property
    def chunk_bytes(self) -> int:
        """Largest read that a plan may hold. BudgetTooSmall: see `Intake.chunk_bytes`."""
        return self._intake.chunk_bytes

    def read_run(self, offset: int, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return `[offset, offset + nbytes)` by one read, as `[nbytes]` uint8 on `device`. Raises as `read`."""
        run = torch.empty(nbytes, dtype=torch.uint8, device=device)
        is_host = device.type == "cpu"
        staging = run if is_host else torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        if nbytes:
            self._source.readv(offset, [staging.numpy().data])
        return run if is_host else run.copy_(staging)

    def read(self, plan: LoadPlan, device: torch.device) -> list[torch.Tensor]:
        """Read every range of `plan` and put its bytes where the plan says.

        Returns:
            One `[nbytes]` uint8 tensor a slab, on `device`; filled when this returns.

        Raises:
            SourceError: the bytes could not be read. DestinationError: no room for them. The slabs are dropped.
        """
        enough = ENGINE_CUDA_BYTES if device.type == "cuda" else ENGINE_BYTES
        if plan.num_reads <= 1 or (not self._intake.is_remote and int(plan.read_nbytes.sum()) < enough):
            return _read_here(plan, self._source, device)
        with self._turn, interrupt.deferred():
            return self._read_on_engine(plan, device)

    def _read_on_engine(self, plan: LoadPlan, device: torch.device) -> list[torch.Tensor]:
        nbytes, stall_s = plan.slab_nbytes.tolist(), self._settings.stall_s
        is_cuda = device.type == "cuda"
        if is_cuda:
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        place: Any = place_on(device if is_cuda else torch.device("cpu"), nbytes)
        staged = is_cuda or not bool(plan.covered().all())
        pool = (self._intake.pool or self._intake.open_pool(registrar_of(self._device))) if staged else None
        try:
            with LoadRun(
                plan,
                [self._source] * (int(plan.read_file.max()) + 1),
                place,
                pool=pool,
                num_fetch_threads=min(self._intake.num_reads, plan.num_reads),
                ring=self._intake.open_ring() if staged else None,
                stall_s=stall_s,
                trace=Trace(enabled=False),
            ) as run:
                run.start().wait(stall_s=stall_s)
        except BaseException:
            self.close()  # a run that stops cancels its pool; the next one gets another
            raise
        slabs = map(place.take, range(len(nbytes)))
        return list(slabs) if is_cuda else [as_bytes(slab.data).to(device) for slab in slabs]

    def close(self) -> None:
        """Free the staging. Idempotent."""
        self._intake.close(wait=True)


def _read_here(plan: LoadPlan, source: Source, device: torch.device) -> list[torch.Tensor]:
    """Make the plan's reads one after the other, through one staging buffer where they cannot go to the slabs."""
    slabs = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in plan.slab_nbytes.tolist()]
    is_host = device.type == "cpu"
    direct = plan.covered().tolist() if is_host else [False] * plan.num_reads
    pinned = device.type == "cuda"
    staging = torch.empty(0 if all(direct) else plan.max_read_nbytes, dtype=torch.uint8, pin_memory=pinned)
    for read, is_direct in enumerate(direct):
        offset, nbytes = int(plan.read_offset[read]), int(plan.read_nbytes[read])
        segments = range(int(plan.seg_first[read]), int(plan.seg_first[read + 1]))
        if is_direct:
            source.readv(offset, [_target(plan, slabs, segment).numpy().data for segment in segments])
            continue
        source.readv(offset, [staging.numpy().data[:nbytes]])
        for segment in segments:
            rows, run, pitch = (int(column[segment]) for column in (plan.seg_rows, plan.seg_run, plan.seg_pitch))
            piece = staging.as_strided((rows, run), (pitch, 1), int(plan.seg_src[segment]))
            # Blocking, so that the staging buffer may be filled again.
            _target(plan, slabs, segment).view(rows, run).copy_(piece)
    return slabs


def _target(plan: LoadPlan, slabs: list[torch.Tensor], segment: int) -> torch.Tensor:
    nbytes = int(plan.seg_rows[segment] * plan.seg_run[segment])
    return slabs[int(plan.seg_slab[segment])].narrow(0, int(plan.seg_dst[segment]), nbytes)
