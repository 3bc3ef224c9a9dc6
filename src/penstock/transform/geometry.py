"""Blocks of a format in a tensor and in the shard that a rank holds: shapes and boxes, no values.

In: a format, a tensor's name, dtype and shape, the box a rank holds. Out: the tensors that are stored, and their boxes.
Not here: the formats (`formats`), values (`quantize`), kernels (`fuse`), which tensors are quantised (`select`).

A block is given by who holds its first element, so every block is quantised once, by one rank:

    rows held [100, 300)   blocks of 128   owned [128, 384)   foreign [300, 384)
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import PlanError
from penstock.transform.formats import CASTS, SOURCES, WHOLE, Format
from penstock.types import Box, DType


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A tensor that a format stores, and the box of it that comes of some box of the source."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    box: Box


def fault(form: Format, dtype: DType, shape: tuple[int, ...]) -> str | None:
    """Why a tensor of this dtype and shape cannot be stored so; None where it can."""
    if form.scaling == "none":
        return None if dtype in CASTS and dtype.bits >= 16 else f"{dtype} is not cast"
    if dtype not in SOURCES:
        return f"{dtype} is not quantised, only F32, F16 and BF16"
    if len(shape) < 2 or (form.global_suffix and len(shape) > 2):
        return f"{form.tag} needs {'2' if form.global_suffix else '2 or more'} dims, not shape {list(shape)}"
    if form.whole_blocks and shape[-1] % form.block[1]:
        return f"{form.tag} needs a last dim divisible by {form.block[1]}, not shape {list(shape)}"
    return None


def check(form: Format, name: str, dtype: DType, shape: tuple[int, ...], box: Box) -> None:
    """Raise PlanError unless the tensor can be stored so and the box lies in it."""
    if why := fault(form, dtype, shape):
        raise PlanError(why, tensor=name)
    if len(box.start) != len(shape) or any(stop > n for stop, n in zip(box.stop, shape, strict=True)):
        raise PlanError(f"box [{box.start}, {box.stop}) lies outside shape {shape}", tensor=name)


def alignment(form: Format, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements per dim at whose multiples a box may be cut (or at the tensor's end) so that it cuts no block."""
    if form.scaling == "none":
        return (1,) * len(shape)
    rows, cols = (max(1, n) if step == WHOLE else step for step, n in zip(form.block, shape[-2:], strict=True))
    return (*(1,) * (len(shape) - 2), rows, cols)


def widened(form: Format, shape: tuple[int, ...], box: Box) -> Box:
    """Return the smallest box around `box` that cuts no block; an empty one stays."""
    if not box.num_elements:
        return box
    step = alignment(form, shape)
    start = tuple(a // s * s for a, s in zip(box.start, step, strict=True))
    stop = tuple(min(n, -(-b // s) * s) for b, s, n in zip(box.stop, step, shape, strict=True))
    return Box(start=start, stop=stop)


def owned(form: Format, shape: tuple[int, ...], box: Box) -> Box:
    """The elements of the blocks whose first element lies in the box: boxes that tile a tensor own its blocks once."""
    step = alignment(form, shape)
    start = tuple(min(n, -(-a // s) * s) for a, s, n in zip(box.start, step, shape, strict=True))
    stop = tuple(min(n, -(-b // s) * s) for b, s, n in zip(box.stop, step, shape, strict=True))
    return Box(start=start, stop=stop)


def needed(form: Format, shape: tuple[int, ...], box: Box, *, amax_given: bool = False) -> Box:
    """The elements on which what the box owns depends: those it owns; all, where the tensor has a scale of its own.

    Args:
        amax_given: the tensor's largest magnitude comes from elsewhere (a maximum over the ranks).
    """
    mine = owned(form, shape, box)
    return Box.full(shape) if form.global_suffix and not amax_given and mine.num_elements else mine


def foreign(held: Box, wanted: Box) -> tuple[Box, ...]:
    """`wanted` less `held`, as boxes that do not overlap: what a rank must be given to quantise what it owns."""
    left, start, stop = [], list(wanted.start), list(wanted.stop)
    for dim, (a, b) in enumerate(zip(held.start, held.stop, strict=True)):
        for low, high in ((start[dim], min(a, stop[dim])), (max(b, start[dim]), stop[dim])):
            if low < high:
                cut = Box(
                    start=(*start[:dim], low, *start[dim + 1 :]),
                    stop=(*stop[:dim], high, *stop[dim + 1 :]),
                )
                if cut.num_elements:
                    left.append(cut)
        start[dim], stop[dim] = max(start[dim], a), min(stop[dim], b)
        if start[dim] >= stop[dim]:
            break
    return tuple(left)


def outputs(form: Format, name: str, dtype: DType, shape: tuple[int, ...], box: Box) -> tuple[Output, ...]:
    """Return what a format stores of a tensor, codes first, and which box of each comes of `box`, which cuts no block.

    Raises:
        PlanError: the tensor cannot be stored so, or the box cuts blocks; the hint has the box that does not.
    """
    check(form, name, dtype, shape, box)
    if (wide := widened(form, shape, box)) != box:
        hint = f"widen it to [{wide.start}, {wide.stop})"
        raise PlanError(f"box [{box.start}, {box.stop}) cuts blocks of {form.tag}", tensor=name, hint=hint)
    packed = form.values is DType.F4
    step = (*(1,) * (len(shape) - 1), 2) if packed else (1,) * len(shape)
    values = DType.U8 if packed else form.values
    codes = _blocks(name + form.values_suffix, values, shape, box, step)
    if form.scaling == "none":
        return (codes,)
    scales = _blocks(name + form.scales_suffix, form.scales, shape, box, alignment(form, shape))
    if not form.global_suffix:
        return codes, scales
    first = bool(box.num_elements) and not any(box.start)
    whole = Box(start=(0,), stop=(int(first),))
    return codes, scales, Output(name=name + form.global_suffix, dtype=DType.F32, shape=(1,), box=whole)


def _blocks(name: str, dtype: DType, shape: tuple[int, ...], box: Box, step: tuple[int, ...]) -> Output:
    """Return the tensor that has one element for each block of `step`."""
    count = tuple(-(-n // s) for n, s in zip(shape, step, strict=True))
    start = tuple(-(-a // s) for a, s in zip(box.start, step, strict=True))
    stop = tuple(-(-b // s) for b, s in zip(box.stop, step, strict=True))
    return Output(name=name, dtype=dtype, shape=count, box=Box(start=start, stop=stop))
