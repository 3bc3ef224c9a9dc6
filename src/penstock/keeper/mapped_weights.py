"""Map a keeper's regions into this process, view them as tensors, and compare their digests.

In: a layout, a map, a log. Out: tensors over the keeper's memory.
Not here: finding a keeper, its lease (`attach`); mapping one region (`transport.mapped_region`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from penstock.errors import ConfigError, FormatError
from penstock.hub.messages import HoldingMap, HoldingState, LogReply
from penstock.loader.tensor import as_tensors
from penstock.peer.local_weights import LocalWeights, decode_column, locate_rows
from penstock.peer.weight_layout import WeightLayout
from penstock.transport.descriptor import decode
from penstock.transport.mapped_region import Region, map_region
from penstock.types import I64, U64

NEAREST = ("shm", "cuda_ipc")
"""Transports whose memory can be mapped."""
MAX_THREADS = 16
"""Most threads that digest host memory: at 10 GB/s each they use the memory bandwidth of a host."""


def leaves_in(layout: WeightLayout, log: LogReply) -> U64:
    """Return the keeper's digests in the order of the layout. Raises FormatError unless every leaf has one."""
    chunks, given = decode_column(log.chunks, "<u4"), decode_column(log.leaves, "<u8").view(np.uint64)
    count = layout.chunks.num_chunks
    if len(chunks) != count or not np.array_equal(np.sort(chunks), np.arange(count)):
        raise FormatError(f"a keeper's log names {len(chunks)} chunks of {count}")
    leaves = np.zeros(len(layout.chunks.leaf_row), np.uint64)
    at = layout.chunks.leaves_of(chunks)
    if len(at) != len(given):
        raise FormatError(f"a keeper's log has {len(given)} digests for {len(at)} leaves")
    leaves[at] = given
    return leaves


def map_regions(where: HoldingMap, device: int | None) -> list[Region]:
    """Map every region of the keeper's weights. Raises ConfigError if one has no descriptor that can be mapped."""
    regions = []
    for offered in where.regions:
        name = next((name for name in NEAREST if name in offered), None)
        if name is None:
            raise ConfigError(f"the keeper's memory is reached by {', '.join(offered)} only, which cannot be mapped")
        regions.append(map_region(decode(offered[name]), device=device))
    return regions


def tensors_in(
    layout: WeightLayout, where: HoldingMap, regions: Sequence[Region]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return each row's bytes and all tensors by name, as views that keep the regions mapped."""
    region_of, offset_of = locate_rows(layout, where, [one.nbytes for one in regions])
    table = layout.table
    made: dict[int, torch.Tensor] = {}
    rows = [torch.empty(0, dtype=torch.uint8)] * len(table)
    for number, region in enumerate(regions):
        whole = _bytes_of(region)
        mine = np.flatnonzero((region_of == number) & (table.nbytes > 0)).tolist()
        offsets = offset_of[mine].tolist()
        dtypes, shapes = [table.dtypes[row] for row in mine], [table.shapes[row] for row in mine]
        made |= zip(mine, as_tensors(whole, dtypes, shapes, offsets), strict=True)
        for row, offset in zip(mine, offsets, strict=True):
            rows[row] = whole[offset : offset + int(table.nbytes[row])]
    empty = [row for row in range(len(table)) if row not in made]
    device = torch.device(regions[0].device if regions else "cpu")
    none = torch.empty(0, dtype=torch.uint8, device=device)
    for row in empty:
        made[row] = as_tensors(none, [table.dtypes[row]], [table.shapes[row]], [0])[0]
        rows[row] = none
    return rows, {name: made[row] for row, name in enumerate(table.names)}


def _bytes_of(region: Region) -> torch.Tensor:
    """Return a region as a `[nbytes]` uint8 tensor, a view that keeps the region mapped."""
    if region.device == "cpu":
        whole = torch.frombuffer(region.owner, dtype=torch.uint8)
        return whole[region.offset : region.offset + region.nbytes]
    # Kernels that use the memory may still be queued when the last tensor is freed; unmapping does not wait for them.
    weakref.finalize(region.owner, _settle, os.getpid(), region.device).atexit = False
    return torch.as_tensor(region.owner, device=region.device)


def _settle(pid: int, device: str) -> None:
    if pid == os.getpid():  # a forked child has no device
        torch.cuda.synchronize(device)


def differing_chunks(held: HoldingState, layout: WeightLayout, rows: Sequence[torch.Tensor], leaves: U64) -> I64:
    """Digest every chunk of this mapping; return the chunks that differ from their digests.

    Raises:
        IntegrityError: the digests are not those of the revision.

    Cost: reads all of the memory; on the host with one thread for each core of the process, 16 at most.
    """
    mapped = LocalWeights(held.identity, layout, rows, leaves=leaves)
    mapped.check_revision(held.revision)
    chunks = np.arange(layout.chunks.num_chunks)
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), len(chunks))
    if mapped.device.type != "cpu" or num_threads < 2:
        digests = mapped.digest(chunks)
    else:
        # Several parts for each thread: a core that other processes use, too, delays one part and not the whole.
        parts = np.array_split(chunks, min(len(chunks), 4 * num_threads))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="penstock-digest") as pool:
            digests = np.concatenate(list(pool.map(mapped.digest, parts)))
    return mapped.differing_chunks(chunks, digests, leaves)
