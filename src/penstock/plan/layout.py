"""Where a box's bytes lie inside a tensor stored row-major.

In: a shape, a `Box`, an element width. Out: `Runs`, the byte runs of the box in the order of its own row-major bytes.
Not here: files and chunks (`schedule`), holdings of several ranks (`intersect`).

    shape (4, 6), box rows 1..3, columns 2..5 of 2-byte elements:
    runs of 6 bytes, 2 rows, pitch 12, from offset 16
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.errors import PlanError
from penstock.types import I64, Box


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Runs:
    """Equal rectangles of bytes: each is `num_rows` runs of `run_bytes`, `pitch_bytes` apart.

    Concatenating the runs of every rectangle in order gives the box's own row-major bytes.
    """

    offsets: I64
    """Byte offset of each rectangle's first run, from the tensor's first byte."""
    num_rows: int
    run_bytes: int
    pitch_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return len(self.offsets) * self.num_rows * self.run_bytes


def box_runs(shape: tuple[int, ...], box: Box, bits: int) -> Runs:
    """The byte runs of `box` inside a row-major tensor of `shape` with elements of `bits` bits.

    Raises:
        PlanError: the box lies outside the shape, or cuts a byte that packed elements share.
    """
    if len(box.start) != len(shape) or any(b > n for b, n in zip(box.stop, shape, strict=True)):
        raise PlanError(f"box [{box.start}, {box.stop}) lies outside shape {shape}")
    if box.num_elements == 0:
        return Runs(offsets=np.zeros(0, np.int64), num_rows=0, run_bytes=0, pitch_bytes=0)
    dims = _merge(shape, box)
    inner_start, inner_extent, _ = dims[-1]
    strides = [bits] * len(dims)
    for d in range(len(dims) - 2, -1, -1):
        strides[d] = strides[d + 1] * dims[d + 1][2]
    whole = [inner_start * bits, inner_extent * bits, *strides[:-1]]
    if any(n % 8 for n in whole):
        raise PlanError(f"box [{box.start}, {box.stop}) of shape {shape} cuts inside a byte of {bits}-bit elements")
    run_bytes = inner_extent * bits // 8
    first = sum(start * stride for (start, _, _), stride in zip(dims, strides, strict=True)) // 8
    if len(dims) == 1:
        return Runs(offsets=np.array([first], np.int64), num_rows=1, run_bytes=run_bytes, pitch_bytes=run_bytes)
    num_rows, pitch = dims[-2][1], strides[-2] // 8
    offsets = np.array([first], np.int64)
    for (_, extent, _), stride in zip(dims[:-2], strides[:-2], strict=True):
        offsets = (offsets[:, None] + np.arange(extent, dtype=np.int64) * (stride // 8)).reshape(-1)
    return Runs(offsets=offsets, num_rows=num_rows, run_bytes=run_bytes, pitch_bytes=pitch)


def _merge(shape: tuple[int, ...], box: Box) -> list[tuple[int, int, int]]:
    """Dims as (start, extent, size), a dim folded into the one before it wherever the box takes all of it."""
    dims: list[tuple[int, int, int]] = [(0, 1, 1)]
    for start, stop, size in zip(box.start, box.stop, shape, strict=True):
        outer_start, outer_extent, outer_size = dims[-1]
        extent = stop - start
        if extent == size:
            dims[-1] = (outer_start * size, outer_extent * size, outer_size * size)
        elif outer_extent == 1 and outer_size == 1:
            dims[-1] = (start, extent, size)
        elif outer_extent == 1:
            dims[-1] = (outer_start * size + start, extent, outer_size * size)
        else:
            dims.append((start, extent, size))
    return dims


def shard_box(shape: tuple[int, ...], dim: int, rank: int, world_size: int) -> Box:
    """The box that `rank` of `world_size` holds when `dim` is split evenly, as tensor parallelism does.

    Raises:
        PlanError: `dim` does not exist or is not divisible by `world_size`.
    """
    if not -len(shape) <= dim < len(shape):
        raise PlanError(f"dim {dim} does not exist in shape {shape}")
    dim %= len(shape)
    if not 0 <= rank < world_size or shape[dim] % world_size:
        raise PlanError(f"dim {dim} of shape {shape} does not split over {world_size} ranks (rank {rank})")
    width = shape[dim] // world_size
    start = tuple(rank * width if d == dim else 0 for d in range(len(shape)))
    stop = tuple((rank + 1) * width if d == dim else n for d, n in enumerate(shape))
    return Box(start=start, stop=stop)


def box_nbytes(box: Box, bits: int) -> int:
    """Bytes of the box's elements packed row-major; PlanError unless they fill whole bytes."""
    total = math.prod(box.shape) * bits
    if total % 8:
        raise PlanError(f"box [{box.start}, {box.stop}) of {bits}-bit elements does not fill whole bytes")
    return total // 8
