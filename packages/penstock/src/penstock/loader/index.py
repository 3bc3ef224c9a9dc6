"""Reduces an index to the bounding box that must be read and the index to apply to that box.

    shape (8, 6), index [2:7:2, -1]  ->  box rows 2..7, column 5..6, remaining index [::2, 0]

Torch decides which indices it allows. The rules for numpy are in this module.
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
    """An index has a form that cannot be read, or lies outside the tensor."""


class StepRefused(IndexRefused, OverflowError):
    """A slice for numpy steps backwards. safetensors cannot convert such a step to its unsigned numbers."""


def bounding_box(index: Any, shape: Sequence[int]) -> tuple[Box, tuple[Any, ...]]:
    """Return the smallest box that contains everything that `index` selects, and the index to apply to that box.

    Integers, slices with a positive step, `...` and `None` narrow the box. From the first other entry on (lists,
    arrays, masks, booleans, a second `...`) dims are taken whole. An index that does not fit the shape yields some box
    inside it.
    """
    # An index that does not fit raises no error here. The caller applies the index to a tensor, and the framework
    # raises its usual error.
    entries = index if isinstance(index, tuple) else (index,)
    start, stop = [0] * len(shape), list(shape)
    rest: list[Any] = []
    dim = 0
    for at, entry in enumerate(entries):
        if entry is None:
            # None adds a dim to the result and selects nothing.
            rest.append(None)
            continue
        if isinstance(entry, EllipsisType):
            # The entries after the ellipsis count from the last dim. For masks and booleans the number of their dims is
            # unknown.
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
            # The framework refuses a negative step.
            count = len(range(first, last, step)) if step > 0 else 0
            # End the box at the last selected element and not at the slice's stop. For example, [0:8:3] needs no byte
            # after row 6.
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
    """Return whether `index` has only integers, slices, `...` and `None`, so that selecting needs no copy."""
    return all(_is_basic(entry) for entry in (index if isinstance(index, tuple) else (index,)))


def _is_basic(entry: Any) -> bool:
    if entry is None or isinstance(entry, slice | EllipsisType):
        return True
    # For Python a bool is an int, but for torch and numpy it is a mask that adds a dim.
    return isinstance(entry, int | np.integer) and not isinstance(entry, bool)


def numpy_index(index: Any, shape: Sequence[int]) -> tuple[int | slice, ...]:
    """Check `index` by the rules of safetensors' numpy framework. Return one int or slice for each dim.

    Allowed are integers (and objects with `__index__`, booleans too), slices with a positive step, one `...`, a tuple
    of these, and an empty list, which selects nothing. Negative, reversed and overlong slices mean the same as in
    numpy.

    Raises:
        IndexRefused: the index has a different form, an integer is out of bounds, or there are more entries than dims.
    """
    if isinstance(index, list):
        if index:
            raise IndexRefused("an index by a list is not supported", hint='use framework="pt"')
        index = slice(0, 0)
    # Use `isinstance` and not `in`, because an entry may be an array, which compares element by element.
    given = index if isinstance(index, tuple) else (index,)
    # Check slices first, as safetensors does, because its errors describe them.
    entries = [_numpy_slice(entry) if isinstance(entry, slice) else entry for entry in given]
    if sum(isinstance(entry, EllipsisType) for entry in entries) > 1:
        raise IndexRefused("only one ellipsis (...) is allowed in an index")
    num_given = sum(not isinstance(entry, EllipsisType) for entry in entries)
    if num_given > len(shape):
        raise IndexRefused(f"{num_given} indices for a tensor with {len(shape)} dims")
    bounds: list[int | slice] = []
    for position, entry in enumerate(entries):
        if isinstance(entry, EllipsisType):
            bounds.extend([slice(None)] * (len(shape) - num_given))
        else:
            bounds.append(_numpy_entry(entry, shape[len(bounds)], position))
    return tuple(bounds)


def _numpy_slice(entry: slice) -> slice:
    """Return a slice with integers. Raise TypeError for other bounds, and StepRefused if it steps backwards."""
    bounds = [None if b is None else operator.index(b) for b in (entry.start, entry.stop, entry.step)]
    if bounds[2] is not None and bounds[2] <= 0:
        raise StepRefused(f"a slice's step must be positive, not {bounds[2]}")
    return slice(*bounds)


def _numpy_entry(entry: Any, size: int, position: int) -> int | slice:
    if isinstance(entry, slice):
        return entry
    # Check this here and not in numpy, because the box must be known before anything is read.
    try:
        number = operator.index(entry)
    except TypeError:
        kind = type(entry).__name__
        hint = 'use framework="pt" for it'
        raise IndexRefused(f"index {position}: expected slice, int or ellipsis, not {kind}", hint=hint) from None
    if not -size <= number < size:
        raise IndexRefused(f"index {number} is out of bounds for dim {position} of size {size}")
    return number
