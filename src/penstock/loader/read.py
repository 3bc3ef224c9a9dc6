"""The plainest way to run a `LoadPlan`: one thread, one staging buffer, one read after the other.

In: a plan and the source it reads. Out: its slabs, filled, on the CPU or a device.
Not here: overlap, budgets, digests (`engine`), which the small reads of `safe_open` do not need.
"""

from __future__ import annotations

import torch

from penstock.plan.schedule import LoadPlan
from penstock.storage import Source


def read_slabs(plan: LoadPlan, source: Source, device: torch.device) -> list[torch.Tensor]:
    """Read every range of `plan` (of one file) from `source` and put its bytes where the plan says.

    Returns:
        One `[nbytes]` uint8 tensor a slab, on `device`; filled when this returns.

    Raises:
        SourceError: the bytes could not be read; the slabs are dropped.
    """
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
