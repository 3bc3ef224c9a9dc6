"""Reduces an index to the bounding box that must be read and the index to apply to that box.

For example, with shape (8, 6), [2:7:2, -1] reads rows 2 to 6 of column 5, and [::2, 0] is then applied to that box.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import numpy as np

from penstock.errors import PlanError
from penstock.types import Box


class IndexRefused(PlanError, IndexError):
    """An index has an unsupported form, or lies outside the tensor."""


class StepRefused(IndexRefused, OverflowError):
    """A slice for numpy steps backwards, which safetensors does not support."""


def bounding_box(index: Any, shape: Sequence[int]) -> tuple[Box, tuple[Any, ...]]:
    """Return the smallest box that contains everything that `index` selects, and the index to apply to that box.

    Integers, slices with a positive step, `...` and `None` narrow the box. The first entry of any other type and all
    entries after it do not. An index that does not fit the shape has an arbitrary box, and raises an error if applied.
    """
    entries = index if isinstance(index, tuple) else (index,)
    start, stop = [0] * len(shape), list(shape)
    rest: list[Any] = []
    dim = 0
    for at, entry in enumerate(entries):
        if entry is None:
            rest.append(None)
            continue
        if isinstance(entry, EllipsisType):
            # Count the entries after the ellipsis from the last dim. A mask may span any number of dims.
            after = entries[at + 1 :]
            rest.append(entry)
            if not all(_is_basic(e) for e in after) or any(e is Ellipsis for e in after):
                rest.extend(after)
                break
            dim = max(dim, len(shape) - sum(e is not None for e in after))
            continue
        if dim >= len(shape) or not _is_basic(entry):
            rest.extend(entries[at:])
            break
        size = shape[dim]
        if isinstance(entry, slice):
            first, last, step = entry.indices(size)
            # Torch rejects a negative step later.
            count = len(range(first, last, step)) if step > 0 else 0
            # End the box after the last selected element, so that [0:8:3] needs no byte after row 6.
            start[dim], stop[dim] = (first, first + (count - 1) * step + 1) if count else (0, 0)
            rest.append(slice(None, None, step))
        else:
            number = operator.index(entry)
            if not -size <= number < size:
                rest.extend(entries[at:])
                break
            start[dim] = number % size
            stop[dim] = start[dim] + 1
            rest.append(0)
        dim += 1
    return Box(start=tuple(start), stop=tuple(stop)), tuple(rest)


def is_basic(index: Any) -> bool:
    """Return whether `index` contains only integers, slices, `...` and `None`, so that selecting needs no copy."""
    return all(_is_basic(entry) for entry in (index if isinstance(index, tuple) else (index,)))


def _is_basic(entry: Any) -> bool:
    if entry is None or isinstance(entry, slice | EllipsisType):
        return True
    # In Python a bool is an int, but torch and numpy treat it as a mask that adds a dim.
    return isinstance(entry, int | np.integer) and not isinstance(entry, bool)


def numpy_index(index: Any, shape: Sequence[int]) -> tuple[int | slice, ...]:
    """Check `index` against the rules of safetensors' numpy framework. Return one int or slice for each dim.

    Supported forms are integers, slices with a positive step, one `...`, tuples of these, and an empty list. Raise
    IndexRefused for a different form, an index out of bounds, or more entries than dims.
    """
    if isinstance(index, list):
        if index:
            raise IndexRefused("indexing with a list is not supported", hint='use framework="pt"')
        index = slice(0, 0)
    raw = index if isinstance(index, tuple) else (index,)
    entries = [_numpy_slice(entry) if isinstance(entry, slice) else entry for entry in raw]
    if sum(isinstance(entry, EllipsisType) for entry in entries) > 1:
        raise IndexRefused("only one ellipsis (...) is allowed in an index")
    num_indices = sum(not isinstance(entry, EllipsisType) for entry in entries)
    if num_indices > len(shape):
        raise IndexRefused(f"too many indices: {num_indices} for a tensor with {len(shape)} dims")
    bounds: list[int | slice] = []
    for position, entry in enumerate(entries):
        if isinstance(entry, EllipsisType):
            bounds.extend([slice(None)] * (len(shape) - num_indices))
        else:
            bounds.append(_numpy_entry(entry, shape[len(bounds)], position))
    return tuple(bounds)


def _numpy_slice(entry: slice) -> slice:
    bounds = [None if b is None else operator.index(b) for b in (entry.start, entry.stop, entry.step)]
    if bounds[2] is not None and bounds[2] <= 0:
        raise StepRefused(f"a slice's step must be positive, not {bounds[2]}")
    return slice(*bounds)


def _numpy_entry(entry: Any, size: int, position: int) -> int | slice:
    if isinstance(entry, slice):
        return entry
    # Check the bounds before numpy would, because the box must be known before anything is read.
    try:
        number = operator.index(entry)
    except TypeError:
        kind = type(entry).__name__
        hint = 'use framework="pt" for this index'
        raise IndexRefused(f"index {position}: expected slice, int or ellipsis, not {kind}", hint=hint) from None
    if not -size <= number < size:
        raise IndexRefused(f"index {number} is out of bounds for dim {position} of size {size}")
    return number
