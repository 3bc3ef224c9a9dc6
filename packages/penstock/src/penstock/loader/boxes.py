"""Converts the `boxes=` argument of a load into the boxes of each row, in elements of the whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import NamedTuple

import torch

from penstock.arguments import require_type
from penstock.config import Settings
from penstock.errors import ConfigError, PlanError
from penstock.plan.tensor_parallel import TensorParallelRank, heads_of
from penstock.storage.foreign_json import read_object
from penstock.storage.small_files import read_sibling
from penstock.types import Box, TensorTable

Slices = slice | EllipsisType | tuple[slice | EllipsisType, ...]
"""A region written as slices, such as `numpy.s_[0:4, :]`."""

Region = Box | Slices | None

Boxes = Mapping[str, Region] | Callable[[str, tuple[int, ...]], Region] | TensorParallelRank | None
"""Regions by tensor name, or a function from name and shape to the region, or the regions of a tensor-parallel rank.
None means all of every tensor."""

_BOXES = 'boxes by tensor name: {"w": penstock.Box((0, 0), (2, 4))} or {"w": numpy.s_[0:2, :]}'


class Wanted(NamedTuple):
    """The rows of a load with their boxes. A row with several boxes appears once for each box."""

    table: TensorTable
    boxes: tuple[Box | None, ...]
    num_boxes: tuple[int, ...] | None
    """Number of boxes for each tensor. None means one box for each tensor."""

    @property
    def dims(self) -> dict[str, int]:
        """Return, for each tensor with several boxes, the dim along which they are joined."""
        dims: dict[str, int] = {}
        row = 0
        for count in self.num_boxes or ():
            one, other = self.boxes[row], self.boxes[row + count - 1]
            if count > 1 and one is not None and other is not None:
                differ = [dim for dim, (a, b) in enumerate(zip(one.start, other.start, strict=True)) if a != b]
                dims[self.table.names[row]] = differ[0]
            row += count
        return dims

    def of_several(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return the parts `(dim, start, length)` of each tensor with several boxes, which are joined along the dim."""
        dims = self.dims
        parts: dict[str, list[tuple[int, int, int]]] = {}
        for name, box in zip(self.table.names, self.boxes, strict=True):
            if name in dims and box is not None:
                dim = dims[name]
                parts.setdefault(name, []).append((dim, box.start[dim], box.shape[dim]))
        return parts


def wanted_regions(
    boxes: Boxes, table: TensorTable, uri: str, settings: Settings, storage_options: Mapping[str, str] | None
) -> Wanted:
    """Return the rows of a table with the requested regions.

    Args:
        boxes: see `penstock.load`.
        table: the requested rows, in file order.
        uri: URI of the weights. The numbers of heads are read from the configuration next to it.
        settings, storage_options: for reading that configuration.

    Raises:
        ConfigError: a region has the wrong type.
        PlanError: a box names a tensor that does not exist or does not fit its tensor, or a tensor cannot be split.
    """
    if boxes is None:
        return Wanted(table, (None,) * len(table), None)
    if isinstance(boxes, TensorParallelRank):
        return _of_rank(boxes, table, uri, settings, storage_options)
    if callable(boxes):
        pairs = zip(table.names, table.shapes, strict=True)
        return Wanted(table, tuple(_box(name, boxes(name, shape), shape) for name, shape in pairs), None)
    require_type("boxes", boxes, Mapping, _BOXES)
    unknown = sorted(map(str, set(boxes) - set(table.names)))
    if unknown:
        raise PlanError(f"boxes= names tensors that the weights do not have: {', '.join(unknown[:5])}")
    pairs = zip(table.names, table.shapes, strict=True)
    return Wanted(table, tuple(_box(name, boxes.get(name), shape) for name, shape in pairs), None)


def _of_rank(
    rank: TensorParallelRank,
    table: TensorTable,
    uri: str,
    settings: Settings,
    storage_options: Mapping[str, str] | None,
) -> Wanted:
    heads: tuple[int, ...] = ()
    if rank.heads is None:
        raw = read_sibling(uri, "config.json", settings, storage_options)
        if raw is not None:
            heads = heads_of(read_object(raw, uri, hint="repair config.json, or give tensor_parallel(heads=)"))
    found = rank.boxes(dict(zip(table.names, table.shapes, strict=True)), heads)
    rows = [row for row, name in enumerate(table.names) for _ in found[name]]
    shapes = table.shapes
    # A whole tensor is not treated as a region, so its digests are compared without widening.
    boxes = tuple(
        None if box == Box.full(shapes[row]) else box for row, name in enumerate(table.names) for box in found[name]
    )
    counts = tuple(len(found[name]) for name in table.names)
    return Wanted(table.take(rows), boxes, counts) if max(counts, default=1) > 1 else Wanted(table, boxes, None)


def _box(name: object, region: object, shape: tuple[int, ...]) -> Box | None:
    """Return a region as a box.

    Raise ConfigError for a wrong type, and PlanError if the region does not fit the shape.
    """
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
                f"a region cannot have steps, but {part} has one", tensor=str(name), hint="load all rows, then select"
            )
        start.append(low)
        stop.append(max(low, high))
    return Box(tuple(start), tuple(stop))


def joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Join the boxes of one tensor into one tensor."""
    dtype = parts[0].dtype
    # View elements of one byte as bytes, because torch cannot join all of these dtypes.
    plain = [part.view(torch.uint8) if dtype.itemsize == 1 else part for part in parts]
    return torch.cat(plain, dim).view(dtype)
