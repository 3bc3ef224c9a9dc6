"""Reduction of an index to the box that must be read, and the index to apply to that box.

In: an index as `x[index]` takes it, the shape it applies to. Out: the bounding `Box`, and the index to apply to it.
Not here: reading (`safe_open`), which index forms a framework allows (torch decides its own; numpy's are below).

    shape (8, 6), index [2:7:2, -1]  ->  box rows 2..7, column 5..6;  left: [::2, 0]
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
    """An index is not of a form that can be read, or lies outside the tensor."""


class StepRefused(IndexRefused, OverflowError):
    """A slice of numpy steps backwards. safetensors cannot convert such a step to its unsigned numbers."""


def bounding_box(index: Any, shape: Sequence[int]) -> tuple[Box, tuple[Any, ...]]:
    """Return the least box that contains all that `index` selects, and the index that selects it from that box.

    Integers, slices of positive step, `...` and `None` narrow the box. From the first other entry on (lists, arrays,
    masks, booleans, a second `...`) dims are taken whole. An index that does not fit the shape gives some box in it.
    """
    # An index that does not fit is no error here: the caller applies the rest, or the index itself, to a tensor, and
    # the framework raises its own error with its own words.
    entries = index if isinstance(index, tuple) else (index,)
    start, stop = [0] * len(shape), list(shape)
    rest: list[Any] = []
    dim = 0
    for at, entry in enumerate(entries):
        if entry is None:
            # A new dim of the result: it selects nothing.
            rest.append(None)
            continue
        if isinstance(entry, EllipsisType):
            # The entries after the ellipsis count from the last dim. That needs their number of dims, which masks and
            # booleans do not tell.
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
            # A negative step is the framework's to refuse.
            count = len(range(first, last, step)) if step > 0 else 0
            # To the last element that is selected, not to the slice's stop: [0:8:3] needs no byte after row 6.
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
    """Return whether `index` has only integers, slices, `...` and `None`, so that selecting by it makes no copy."""
    return all(_is_basic(entry) for entry in (index if isinstance(index, tuple) else (index,)))


def _is_basic(entry: Any) -> bool:
    if entry is None or isinstance(entry, slice | EllipsisType):
        return True
    # A bool is an int to Python and a mask to torch and numpy, which adds a dim.
    return isinstance(entry, int | np.integer) and not isinstance(entry, bool)


def numpy_index(index: Any, shape: Sequence[int]) -> tuple[int | slice, ...]:
    """Check `index` by the rules of safetensors' numpy framework; return it as one int or slice per dim.

    Allowed are integers (and objects with `__index__`, booleans too), slices of positive step, one `...`, a tuple of
    these, and an empty list, which selects nothing. Negative, reversed and overlong slices mean the same as in numpy.

    Raises:
        IndexRefused: another form, an integer outside its dim, or more entries than dims.
    """
    if isinstance(index, list):
        if index:
            raise IndexRefused("an index by a list is not supported", hint='use framework="pt" for it')
        index = slice(0, 0)
    # By `isinstance`, not `in`: an entry may be an array, which compares element by element.
    given = index if isinstance(index, tuple) else (index,)
    # Slices first, as safetensors does, whose errors say what is wrong in them.
    entries = [_numpy_slice(entry) if isinstance(entry, slice) else entry for entry in given]
    if sum(isinstance(entry, EllipsisType) for entry in entries) > 1:
        raise IndexRefused("only one ellipsis (...) is allowed in an index")
    num_given = sum(not isinstance(entry, EllipsisType) for entry in entries)
    if num_given > len(shape):
        raise IndexRefused(f"{num_given} indices for a tensor of {len(shape)} dims")
    bounds: list[int | slice] = []
    for position, entry in enumerate(entries):
        if isinstance(entry, EllipsisType):
            bounds.extend([slice(None)] * (len(shape) - num_given))
        else:
            bounds.append(_numpy_entry(entry, shape[len(bounds)], position))
    return tuple(bounds)


def _numpy_slice(entry: slice) -> slice:
    """Return a slice of integers. TypeError: it has something else. StepRefused: it steps backwards."""
    bounds = [None if b is None else operator.index(b) for b in (entry.start, entry.stop, entry.step)]
    if bounds[2] is not None and bounds[2] <= 0:
        raise StepRefused(f"a slice's step must be positive, not {bounds[2]}")
    return slice(*bounds)


def _numpy_entry(entry: Any, size: int, position: int) -> int | slice:
    if isinstance(entry, slice):
        return entry
    # Checked here and not by numpy: the box must be known before anything is read.
    try:
        number = operator.index(entry)
    except TypeError:
        kind = type(entry).__name__
        hint = 'use framework="pt" for it'
        raise IndexRefused(f"index {position}: expected slice, int or ellipsis, not {kind}", hint=hint) from None
    if not -size <= number < size:
        raise IndexRefused(f"index {number} is out of bounds for dim {position} of size {size}")
    return number
