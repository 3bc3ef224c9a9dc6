"""This rank's shards of a DTensor, as boxes of the whole tensor and views of the rank's local tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import torch

from penstock.errors import PlanError
from penstock.types import Box

Runs = list[tuple[int, int]]
"""Index ranges `[start, stop)` of one dim on a rank, in memory order."""


def is_sharded(value: object) -> bool:
    """Return whether a value is a DTensor."""
    # No DTensor can exist before torch's module, which is slow to import, has been imported.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor. Return other tensors unchanged."""
    local: torch.Tensor = getattr(tensor, "_local_tensor") if is_sharded(tensor) else tensor  # noqa: B009
    return local


def local_parts(name: str, value: Any) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield this rank's boxes of a DTensor with views of its local tensor. Raise PlanError for a partial sum."""
    with torch.no_grad():
        local: torch.Tensor = value.detach().to_local()
    shape = tuple(value.shape)
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return
    # For each dim, the size, coordinate of this rank and split factor of the mesh axes that shard it.
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for axis, placement in enumerate(value.placements):
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            hint = "reduce the tensor first: tensor.redistribute(placements=...)"
            raise PlanError(
                f"the tensor is {placement} on mesh axis {axis}, so no rank has the values", tensor=name, hint=hint
            )
        # Only strided shards, whose class is private in torch, have a split factor.
        cuts[placement.dim].append(
            (value.device_mesh.size(axis), coordinate[axis], int(getattr(placement, "split_factor", 1)))
        )
    runs = [local_runs(num, cut) for num, cut in zip(shape, cuts, strict=True)]
    extent = tuple(sum(stop - start for start, stop in dim) for dim in runs)
    # If torch's rule for uneven shards ever changes, the boxes would be wrong.
    if extent != tuple(local.shape):
        raise PlanError(
            f"the local tensor has shape {list(local.shape)}, but its placements imply {list(extent)}", tensor=name
        )
    for box in product(*(_placed(dim) for dim in runs)):
        part = local[tuple(slice(at, at + stop - start) for start, stop, at in box)] if box else local
        # A tensor that is empty on every rank still yields its name.
        if part.numel() or 0 in shape:
            start = tuple(start for start, _, _ in box)
            yield Box(start=start, stop=tuple(at + n for at, n in zip(start, part.shape, strict=True))), part


def local_runs(num: int, parts: Iterable[tuple[int, int, int]]) -> Runs:
    """Return this rank's index ranges of a dim of size `num` after repeated splits, as in DTensor's placements.

    Args:
        parts: size, coordinate of this rank and split factor of each mesh axis that shards the dim, in mesh order. With
            split factor k, the dim is split into k pieces, and the shard joins this rank's chunk of each piece.
    """
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
    # The empty run keeps the product over dims from having no entries.
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
    selected, at = [], 0
    for start, stop in runs:
        first, last = max(low - at, 0), min(high - at, stop - start)
        if first < last:
            selected.append((start + first, start + last))
        at += stop - start
    return selected
