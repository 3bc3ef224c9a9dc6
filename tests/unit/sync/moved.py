"""A sync in one process, which copies the planned bytes between real memories."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from penstock.plan.sync import SyncPlan, plan_sync
from penstock.sync.shards import ShardRow, layout_of, regions_of
from penstock.transport.protocol import Memory

SPOILED = 0xA5


def assert_same(mine: nn.Module, true: nn.Module) -> None:
    for (name, a), (_, b) in zip(mine.state_dict().items(), true.state_dict().items(), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), name


def spoil(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(SPOILED)


def array(memory: Memory) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * memory.nbytes).from_address(memory.address), np.uint8)


class Memories:
    def __init__(self, regions: Sequence[Memory]) -> None:
        self.regions = regions
        self.arrays = [array(one) for one in regions]
        self.stop = np.cumsum([one.nbytes for one in regions])

    def run(self, offset: int, nbytes: int) -> np.ndarray:
        region = int(np.searchsorted(self.stop, offset, side="right"))
        at = offset - int(self.stop[region]) + self.regions[region].nbytes
        assert at + nbytes <= self.regions[region].nbytes
        return self.arrays[region][at : at + nbytes]


def move(
    holders: Sequence[Sequence[ShardRow]], wants: Sequence[Sequence[ShardRow]], *, bucket_bytes: int = 4096
) -> SyncPlan:
    sources, sinks = [regions_of(rows) for rows in holders], [regions_of(rows) for rows in wants]
    holdings = [layout_of(rows, f"p{i}", "", mine) for i, (rows, mine) in enumerate(zip(holders, sources, strict=True))]
    wanted = [layout_of(rows, f"r{i}", "", mine) for i, (rows, mine) in enumerate(zip(wants, sinks, strict=True))]
    plan = plan_sync(holdings, wanted, bucket_bytes=bucket_bytes)
    theirs = [Memories(mine) for mine in sources]
    for r, rows in enumerate(wants):
        part, mine = plan.part(r), Memories(sinks[r])
        times = np.zeros(int(mine.stop[-1]) if len(mine.stop) else 0, np.uint8)
        source = np.repeat(part.source, part.num_rows)
        columns = [column.tolist() for column in (source, *part.runs(0, len(part.source)))]
        for s, src, dst, nbytes in zip(*columns, strict=True):
            mine.run(dst, nbytes)[:] = theirs[s].run(src, nbytes)
            times[dst : dst + nbytes] += 1
        assert times.max(initial=0) <= 1
        assert int(times.sum()) == sum(row.tensor.nbytes for row in rows)
    return plan
