"""Splits a tensor evenly over ranks, as tensor parallelism does."""

from __future__ import annotations

from penstock.errors import PlanError
from penstock.types import Box


def shard_box(shape: tuple[int, ...], dim: int, rank: int, world_size: int) -> Box:
    """Return the box that `rank` of `world_size` holds when `dim` is split evenly, as tensor parallelism does.

    Raises:
        PlanError: `dim` does not exist or is not divisible by `world_size`.
    """
    if not -len(shape) <= dim < len(shape):
        raise PlanError(f"dim {dim} does not exist in shape {shape}")
    dim %= len(shape)
    if not 0 <= rank < world_size or shape[dim] % world_size:
        raise PlanError(f"dim {dim} of shape {shape} cannot be split evenly over {world_size} ranks (rank {rank})")
    width = shape[dim] // world_size
    start = tuple(rank * width if d == dim else 0 for d in range(len(shape)))
    stop = tuple((rank + 1) * width if d == dim else n for d, n in enumerate(shape))
    return Box(start=start, stop=stop)
