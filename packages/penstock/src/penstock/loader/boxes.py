"""Converts the `boxes=` argument of a load into the boxes of each row, in elements of the whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from penstock.arguments import require_type
from penstock.config import Settings
from penstock.errors import ConfigError, PlanError
from penstock.storage.foreign_json import read_object
from penstock.storage.small_files import read_sibling
from penstock.types import Box, TensorTable

if TYPE_CHECKING:
    from penstock.plan.tensor_parallel import TensorParallelRank

Slices = slice | EllipsisType | tuple[slice | EllipsisType, ...]
"""A region written as slices, such as `numpy.s_[0:4, :]`."""

Region = Box | Slices | None

Boxes: TypeAlias = "Mapping[str, Region] | Callable[[str, tuple[int, ...]], Region] | TensorParallelRank | None"
"""Regions by tensor name, a function from name and shape to a region, or the regions of a tensor-parallel rank.
None means every tensor in full."""

_BOXES = 'boxes by tensor name: {"w": penstock.Box((0, 0), (2, 4))} or {"w": numpy.s_[0:2, :]}'


class Wanted(NamedTuple):
    """The rows of a load with their boxes. A row with several boxes appears once for each box."""

    table: TensorTable
    boxes: tuple[Box | None, ...]

    def of_several(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return the parts `(dim, start, length)` of each tensor with several boxes, which are joined along the dim."""
        boxes: dict[str, list[Box]] = {}
        for name, box in zip(self.table.names, self.boxes, strict=True):
            if box is not None:
                boxes.setdefault(name, []).append(box)
        parts = {}
        for name, several in boxes.items():
            if len(several) > 1:
                dim = next(dim for dim, start in enumerate(several[0].start) if start != several[-1].start[dim])
                parts[name] = [(dim, box.start[dim], box.shape[dim]) for box in several]
        return parts


def wanted_regions(
    boxes: Boxes, table: TensorTable, uri: str, settings: Settings, storage_options: Mapping[str, str] | None
) -> Wanted:
    """Return the rows of a table with the regions that `penstock.load(boxes=)` requests.

    Raise ConfigError for a region of the wrong type, and PlanError for an unknown tensor or a region that does not fit.
    """
    if boxes is None:
        return Wanted(table, (None,) * len(table))
    from penstock.plan.tensor_parallel import TensorParallelRank, heads_of

    if isinstance(boxes, TensorParallelRank):
        heads: tuple[int, ...] = ()
        if boxes.heads is None and (raw := read_sibling(uri, "config.json", settings, storage_options)) is not None:
            heads = heads_of(read_object(raw, uri, hint="repair config.json, or give tensor_parallel(heads=)"))
        return _of_rank(boxes, heads, table)
    if not callable(boxes):
        require_type("boxes", boxes, Mapping, _BOXES)
        if unknown := sorted(map(str, set(boxes) - set(table.names))):
            raise PlanError(f"boxes= names tensors that the weights do not have: {', '.join(unknown[:5])}")
    pairs = zip(table.names, table.shapes, strict=True)
    regions: Iterator[tuple[str, Region, tuple[int, ...]]] = (
        (name, boxes(name, shape) if callable(boxes) else boxes.get(name), shape) for name, shape in pairs
    )
    return Wanted(table, tuple(_box(*region) for region in regions))


def _of_rank(rank: TensorParallelRank, heads: tuple[int, ...], table: TensorTable) -> Wanted:
    found = rank.boxes(dict(zip(table.names, table.shapes, strict=True)), heads)
    rows = [row for row, name in enumerate(table.names) for _ in found[name]]
    # A box of the whole tensor is not a region, so its digests are compared without widening.
    pairs = zip(rows, (box for name in table.names for box in found[name]), strict=True)
    boxes = tuple(None if box == Box.full(table.shapes[row]) else box for row, box in pairs)
    return Wanted(table.take(rows), boxes)


def _box(name: object, region: object, shape: tuple[int, ...]) -> Box | None:
    if region is None or isinstance(region, Box):
        return region
    parts = region if isinstance(region, tuple) else (region,)
    if not all(isinstance(part, slice | EllipsisType) for part in parts):
        require_type(f"the box of {name!r}", region, (Box, type(None)), _BOXES)
    at = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(at) > 1 or len(parts) - len(at) > len(shape):
        raise PlanError(f"slices {region} do not fit shape {list(shape)}", tensor=str(name))
    before = at[0] if at else len(parts)
    after = len(parts) - before - 1 if at else 0
    whole = (slice(None),) * (len(shape) - before - after)
    start, stop = [], []
    for part, size in zip((*parts[:before], *whole, *parts[len(parts) - after :]), shape, strict=True):
        try:
            low, high, step = part.indices(size)
        except TypeError as error:
            raise ConfigError(f"the box of {name!r}: {error}", hint=_BOXES) from error
        if step != 1:
            raise PlanError(
                f"a region needs slices with step 1, not {part}", tensor=str(name), hint="load all rows, then select"
            )
        start.append(low)
        stop.append(max(low, high))
    return Box(tuple(start), tuple(stop))


def joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Join the boxes of one tensor into one tensor."""
    dtype = parts[0].dtype
    # View one-byte elements as uint8, because torch cannot concatenate all one-byte dtypes.
    plain = [part.view(torch.uint8) if dtype.itemsize == 1 else part for part in parts]
    return torch.cat(plain, dim).view(dtype)
