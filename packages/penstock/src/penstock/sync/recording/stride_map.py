"""Copies between strided tensors, described as digits. Each digit maps a run in a source dim to a run in a target dim.

For example, a transpose of `W [heads * 4, n]`, viewed as `[heads, 4, n]`, to `P [4, heads * n]` has three digits:
`heads` maps dim 0 step 4 to dim 1 step n, `4` maps dim 0 step 1 to dim 0 step 1, and `n` maps dim 1 step 1 to dim 1
step 1.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from penstock.plan.intersect import common_box
from penstock.types import Box

MAX_BOXES = 1 << 14
"""Maximum number of boxes of one copy. With more boxes the loader itself is faster. DeepSeek-V3 needs 128 boxes."""

Digit = tuple[int, int, int, int, int]
"""Extent, source dim, source step, target dim, target step. Source dim -1 with step 0 repeats one element."""


class NotBoxes(Exception):
    """A copy that cannot be described as copies between a few boxes. The message states the reason."""


# A recording creates these values several times for each tensor, and dataclasses take five times as long as Structs.
class StrideMap(msgspec.Struct, frozen=True, kw_only=True):
    """A set of element copies, one for each combination of digit values. An index is start plus value times step."""

    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    digits: tuple[Digit, ...]

    def source_box(self) -> Box:
        """Return the box that is read. The map must be a result of `boxes`."""
        return _box(self.source_start, _extents(self.digits, 1, len(self.source_start)))

    def target_box(self) -> Box:
        """Return the box that is written. The map must be a result of `boxes`."""
        return _box(self.target_start, _extents(self.digits, 3, len(self.target_start)))

    def flipped(self) -> StrideMap:
        """Return the map of the same elements in the other direction."""
        digits = tuple((n, td, ts, sd, ss) for n, sd, ss, td, ts in self.digits)
        return StrideMap(source_start=self.target_start, target_start=self.source_start, digits=digits)

    def order(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape into which to split the source box, and the permutation that gives the target's order."""
        return _order(self.digits)


# A loader's copies have thousands of starts but few digits, so results that depend only on digits are cached.


@functools.lru_cache(maxsize=1 << 12)
def _order(digits: tuple[Digit, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # Merge digits that continue each other, after which most copies need no permutation.
    merged: list[Digit] = []
    for n, sd, ss, td, ts in sorted(digits, key=lambda digit: (digit[1], -digit[2])):
        if merged and merged[-1][1:] == (sd, ss * n, td, ts * n):
            merged[-1] = (merged[-1][0] * n, sd, ss, td, ts)
        else:
            merged.append((n, sd, ss, td, ts))
    permutation = sorted(range(len(merged)), key=lambda i: (merged[i][3], -merged[i][4]))
    return tuple(digit[0] for digit in merged), tuple(permutation)


@functools.lru_cache(maxsize=1 << 12)
def _extents(digits: tuple[Digit, ...], dim_at: int, num_dims: int) -> tuple[int, ...]:
    extents = [1] * num_dims
    for digit in digits:
        extents[digit[dim_at]] *= digit[0]
    return tuple(extents)


def _box(start: tuple[int, ...], extents: tuple[int, ...]) -> Box:
    return Box(start=start, stop=tuple(map(operator.add, start, extents)))


class StrideGrid:
    """A tensor's shape and strides, to locate element offsets. The tensor must have elements."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.strides = tuple(strides)
        wide = [dim for dim, extent in enumerate(self.shape) if extent > 1]
        self._outer_first = sorted(wide, key=lambda dim: -self.strides[dim])

    def start(self, offset: int) -> tuple[int, ...]:
        """Return the index of the element at an offset."""
        start, rest = [0] * len(self.shape), offset
        for dim in self._outer_first:
            if self.strides[dim] < 1:
                raise NotBoxes("the viewed tensor repeats its own elements")
            start[dim], rest = divmod(rest, self.strides[dim])
        if rest or any(a >= n for a, n in zip(start, self.shape, strict=True)):
            raise NotBoxes("the view begins outside the tensor")
        return tuple(start)

    def place(self, offset: int, dims: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], list[list[Digit]]]:
        """Return the first element of a view with `dims` (extent, stride), and each dim's digits, outermost first."""
        start = self.start(offset)
        placed = [self._split(extent, stride, start) for extent, stride in dims]
        last = list(start)
        for n, dim, step, _, _ in itertools.chain.from_iterable(placed):
            if dim >= 0:
                last[dim] += step * (n - 1)
        # Check the last element too, because the dims together may exceed a row even if each dim fits.
        if any(a >= n for a, n in zip(last, self.shape, strict=True)):
            raise NotBoxes("the view continues from one row into the next")
        return start, placed

    def has(self, start: Sequence[int], reach: Sequence[int]) -> bool:
        """Return whether the element at `start` plus `reach` is inside the tensor in every dim."""
        # This runs twice for each copy of a loader, so use a plain loop.
        for a, b, n in zip(start, reach, self.shape, strict=True):  # noqa: SIM110
            if a + b >= n:
                return False
        return True

    def _split(self, extent: int, stride: int, start: tuple[int, ...]) -> list[Digit]:
        if extent == 1:
            return []
        if stride == 0:
            return [(extent, -1, 0, 0, 0)]
        level = next((i for i, dim in enumerate(self._outer_first) if self.strides[dim] <= stride), None)
        if level is None:
            raise NotBoxes("the stride of the view is smaller than an element")
        # Start in the dim with the largest stride up to the view's stride, and continue in the dims around it.
        inner: list[Digit] = []
        while True:
            dim = self._outer_first[level]
            step, uneven = divmod(stride, self.strides[dim])
            if not uneven and start[dim] + step * (extent - 1) < self.shape[dim]:
                return [(extent, dim, step, 0, 0), *inner] if extent > 1 else inner
            count, rest = divmod(self.shape[dim], max(step, 1))
            outer = self._outer_first[level - 1] if level else dim
            dense = level and self.strides[outer] == self.strides[dim] * self.shape[dim]
            if uneven or rest or not count or not dense or extent % count:
                raise NotBoxes("the view steps unevenly across rows")
            inner.insert(0, (count, dim, step, 0, 0))
            extent, stride, level = extent // count, stride * count, level - 1


class StridedView(NamedTuple):
    """A view of a tensor. The offset and the strides count elements."""

    grid: StrideGrid
    offset: int
    strides: tuple[int, ...]


def between(source: StridedView, target: StridedView, shape: tuple[int, ...]) -> StrideMap:
    """Return the strides of a copy between two views of shape `shape`. Raise NotBoxes if a view steps unevenly."""
    # Views of experts differ only in their starts, on which the digits usually do not depend.
    even = _even(source._replace(offset=0), target._replace(offset=0), shape)
    if even is not None:
        digits, source_reach, target_reach = even
        source_start = source.grid.start(source.offset)
        if source.grid.has(source_start, source_reach):
            target_start = target.grid.start(target.offset)
            if target.grid.has(target_start, target_reach):
                return StrideMap(source_start=source_start, target_start=target_start, digits=digits)
    return _between(source, target, shape)


@functools.lru_cache(maxsize=1 << 12)
def _even(
    source: StridedView, target: StridedView, shape: tuple[int, ...]
) -> tuple[tuple[Digit, ...], tuple[int, ...], tuple[int, ...]] | None:
    try:
        whole = _between(source, target, shape)
    except NotBoxes:
        return None
    # If each dim of the view has exactly one digit, no dim was split at the end of a tensor dim.
    if len(whole.digits) != sum(extent > 1 for extent in shape):
        return None
    reach = [[0] * len(source.grid.shape), [0] * len(target.grid.shape)]
    for n, source_dim, source_step, target_dim, target_step in whole.digits:
        for ends, dim, step in ((reach[0], source_dim, source_step), (reach[1], target_dim, target_step)):
            if dim >= 0:
                ends[dim] += (n - 1) * step
    return whole.digits, tuple(reach[0]), tuple(reach[1])


def _between(source: StridedView, target: StridedView, shape: tuple[int, ...]) -> StrideMap:
    # Locate the source's digits in the target, which may split them again.
    source_start, placed = source.grid.place(source.offset, list(zip(shape, source.strides, strict=True)))
    halves: list[tuple[Digit, int]] = []
    for digits, stride in zip(placed, target.strides, strict=True):
        below = 1
        for digit in reversed(digits):
            halves.append((digit, stride * below))
            below *= digit[0]
    target_start, ends = target.grid.place(target.offset, [(digit[0], stride) for digit, stride in halves])
    joined: list[Digit] = []
    for ((_, dim, step, _, _), _), parts in zip(halves, ends, strict=True):
        below = 1
        for n, target_dim, target_step, _, _ in reversed(parts):
            joined.append((n, dim, step * below, target_dim, target_step))
            below *= n
    return StrideMap(source_start=source_start, target_start=target_start, digits=tuple(joined))


def boxes(whole: StrideMap) -> list[StrideMap]:
    """Cut a map into maps from one box to one box. Raise NotBoxes if there are more than `MAX_BOXES`."""
    if _are_dense(whole.digits):
        return [whole]
    loops: set[int] = set()
    # Removing a digit can leave a gap under another digit, so repeat until the source and the target are boxes.
    while True:
        gaps = _gaps(whole.digits, loops)
        if not gaps:
            break
        loops |= gaps
    inner = tuple(digit for i, digit in enumerate(whole.digits) if i not in loops)
    looped = [whole.digits[i] for i in sorted(loops)]
    if (count := math.prod(digit[0] for digit in looped)) > MAX_BOXES:
        raise NotBoxes(f"the copy consists of {count} separate boxes, more than {MAX_BOXES}")
    # The digits with gaps become loops, with one map for each combination of their values.
    maps = []
    for values in itertools.product(*(range(digit[0]) for digit in looped)):
        source, target = list(whole.source_start), list(whole.target_start)
        for value, (_, source_dim, source_step, target_dim, target_step) in zip(values, looped, strict=True):
            if source_dim >= 0:
                source[source_dim] += value * source_step
            target[target_dim] += value * target_step
        maps.append(StrideMap(source_start=tuple(source), target_start=tuple(target), digits=inner))
    return maps


@functools.lru_cache(maxsize=1 << 12)
def _are_dense(digits: tuple[Digit, ...]) -> bool:
    return not _gaps(digits, set())


def _gaps(digits: tuple[Digit, ...], loops: set[int]) -> set[int]:
    uneven: set[int] = set()
    # In a digit, index 1 is the source dim and index 3 the target dim, each followed by its step.
    for dim_at in (1, 3):
        run: dict[int, int] = {}
        for i in sorted(range(len(digits)), key=lambda i: digits[i][dim_at + 1]):
            dim, step = digits[i][dim_at], digits[i][dim_at + 1]
            if i in loops or i in uneven:
                continue
            if dim < 0 or step != run.get(dim, 1):
                uneven.add(i)
            else:
                run[dim] = step * digits[i][0]
    return uneven


def restrict(whole: StrideMap, box: Box) -> list[StrideMap]:
    """Return the maps that write into `box`. There are several maps if the box ends inside an outer digit."""
    parts = [whole]
    for dim in range(len(box.start)):
        at, stop = box.start[dim], box.stop[dim]
        parts = [part for old in parts for part in _restrict_dim(old, dim, at, stop)]
    return parts


def _restrict_dim(whole: StrideMap, dim: int, start: int, stop: int) -> Iterator[StrideMap]:
    mine = sorted((digit for digit in whole.digits if digit[3] == dim), key=lambda digit: -digit[4])
    first = whole.target_start[dim]
    if (start, stop) == (first, first + math.prod(digit[0] for digit in mine)):
        yield whole
        return
    others = tuple(digit for digit in whole.digits if digit[3] != dim)
    for cuts in _cut([digit[0] for digit in mine], start - first, stop - first):
        source, target, rest_digits = list(whole.source_start), list(whole.target_start), list(others)
        for (skip, extent), (_, source_dim, source_step, _, target_step) in zip(cuts, mine, strict=True):
            source[source_dim] += skip * source_step
            target[dim] += skip * target_step
            if extent > 1:
                rest_digits.append((extent, source_dim, source_step, dim, target_step))
        yield StrideMap(source_start=tuple(source), target_start=tuple(target), digits=tuple(rest_digits))


def _cut(extents: list[int], start: int, stop: int) -> Iterator[list[tuple[int, int]]]:
    if not extents:
        yield []
        return
    # Split the range into elements before the first full outer step, full steps, and elements after the last one.
    below = math.prod(extents[1:])
    edges = {start, stop, min(-(-start // below) * below, stop), max(stop // below * below, start)}
    for low, high in itertools.pairwise(sorted(edges)):
        if low % below == 0 and high % below == 0:
            yield [(low // below, (high - low) // below), *((0, extent) for extent in extents[1:])]
            continue
        digit = low // below
        for rest in _cut(extents[1:], low - digit * below, high - digit * below):
            yield [(digit, 1), *rest]


def chain(first: StrideMap, then: StrideMap) -> Iterator[StrideMap]:
    """Compose two maps. The results may not be boxes yet. Raise NotBoxes if the digits do not divide each other."""
    shared = common_box(first.target_box(), then.source_box())
    if shared is None:
        return
    for reader in restrict(then.flipped(), shared):
        for writer in restrict(first, reader.target_box()):
            if writer.target_box() == reader.target_box():
                yield _joined(writer, reader)
            else:
                # This writer fills only part of the reader's box, so restrict the reader to this part.
                yield from chain(writer, reader.flipped())


def _joined(writer: StrideMap, reader: StrideMap) -> StrideMap:
    joined: list[Digit] = []
    for dim in range(len(writer.target_start)):
        left, right = _below(writer, dim), _below(reader, dim)
        # Pop one digit from each map at a time, innermost first, and cut the pair to the smaller digit.
        while left and right:
            (n, d, s), (m, e, t) = left.pop(), right.pop()
            common = min(n, m)
            if n % common or m % common:
                raise NotBoxes("incompatible reshapes: their dimensions do not divide each other")
            joined.append((common, d, s, e, t))
            if n > common:
                left.append((n // common, d, s * common))
            if m > common:
                right.append((m // common, e, t * common))
    return StrideMap(source_start=writer.source_start, target_start=reader.source_start, digits=tuple(joined))


def _below(strides: StrideMap, dim: int) -> list[tuple[int, int, int]]:
    mine = sorted((digit for digit in strides.digits if digit[3] == dim), key=lambda digit: -digit[4])
    return [digit[:3] for digit in mine]
