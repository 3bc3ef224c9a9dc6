"""The part of a DTensor on this rank, as boxes of the whole tensor and views of the rank's local tensor.

DTensor [10, 4], mesh (2, 2), (_StridedShard(0, split_factor=2), Shard(0)) -> rows 0..2 and 5..6 of it, two boxes
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import torch

from penstock.errors import PlanError
from penstock.types import Box

Runs = list[tuple[int, int]]
"""Index ranges `[start, stop)` of one dim that a rank has, in the order in which its memory holds them."""


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    # Torch's module takes long to import. Where it was not imported, there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_parts(name: str, value: Any) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of a DTensor that this rank has by mesh and placements, as views of its local tensor.

    Raises:
        PlanError: it is a partial sum, or its local tensor does not have the shape that its placements give.
    """
    with torch.no_grad():
        local: torch.Tensor = value.detach().to_local()
    shape = tuple(value.shape)
    coordinate = value.device_mesh.get_coordinate()
    # If this rank is not in the mesh, other ranks have the tensor.
    if coordinate is None:
        return
    # Collect the mesh axes that shard each dim, as size, coordinate of this rank and split factor.
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for axis, placement in enumerate(value.placements):
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            hint = "reduce the tensor first: tensor.redistribute(placements=...)"
            raise PlanError(
                f"the tensor is {placement} on mesh axis {axis}, so no rank has its values", tensor=name, hint=hint
            )
        # Only strided shards have a split factor. Their class is private in torch, so check the attribute.
        cuts[placement.dim].append(
            (value.device_mesh.size(axis), coordinate[axis], int(getattr(placement, "split_factor", 1)))
        )
    runs = [local_runs(num, cut) for num, cut in zip(shape, cuts, strict=True)]
    extent = tuple(sum(stop - start for start, stop in dim) for dim in runs)
    # The code above repeats torch's rule for uneven shards. If the two differ, a declared box would be wrong.
    if extent != tuple(local.shape):
        raise PlanError(
            f"the local tensor has shape {list(local.shape)}, but its placements give {list(extent)}", tensor=name
        )
    for box in product(*(_placed(dim) for dim in runs)):
        part = local[tuple(slice(at, at + stop - start) for start, stop, at in box)] if box else local
        # A rank without elements has nothing to declare, but a tensor that is empty everywhere keeps its name.
        if part.numel() or 0 in shape:
            start = tuple(start for start, _, _ in box)
            yield Box(start=start, stop=tuple(at + n for at, n in zip(start, part.shape, strict=True))), part


def local_runs(num: int, parts: Iterable[tuple[int, int, int]]) -> Runs:
    """Return the index ranges of a dim of size `num` that a rank has after repeated splits, as in DTensor's placements.

    Args:
        parts: size, coordinate of this rank and split factor of each mesh axis that shards the dim, in the mesh's
            order. The split factor is 1 for a plain shard. With factor k the dim is split into k pieces, and the shard
            is this rank's chunk of each piece, joined.
    """
    # Each mesh axis splits the result of the axes before it, as in DTensor.
    runs: Runs = [(0, num)]
    for size, coordinate, split_factor in parts:
        total = sum(stop - start for start, stop in runs)
        mine: Runs = []
        for first, last in _chunks(0, total, split_factor):
            low, high = _chunks(first, last, size)[coordinate]
            mine += _select(runs, low, high)
        runs = mine
    return runs


def _placed(runs: Runs) -> list[tuple[int, int, int]]:
    """Return each run and its start in memory, or one empty run if there are no runs."""
    # The empty run keeps the product over dims from vanishing. A tensor without elements still has a row.
    placed, at = [], 0
    for start, stop in runs or [(0, 0)]:
        placed.append((start, stop, at))
        at += stop - start
    return placed


def _chunks(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """Split `[start, stop)` like `torch.chunk`, with empty chunks at the end."""
    width = -(-(stop - start) // count)
    return [(min(start + i * width, stop), min(start + (i + 1) * width, stop)) for i in range(count)]


def _select(runs: Runs, low: int, high: int) -> Runs:
    """Return the elements `[low, high)` of the joined runs, as runs."""
    selected, at = [], 0
    for start, stop in runs:
        first, last = max(low - at, 0), min(high - at, stop - start)
        if first < last:
            selected.append((start + first, start + last))
        at += stop - start
    return selected
