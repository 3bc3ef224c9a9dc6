"""Positions of boxes in memory: the byte runs of a box in a row-major tensor, and the layout of one rank's boxes.

Layouts and plans are sent as msgpack, with each int64 column as little-endian bytes. Decoding does not check the
numbers. The `check` method of each type checks the numbers.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from blake3 import blake3

from penstock.errors import MALFORMED, FormatError, PlanError
from penstock.types import I64, Box, DType

T = TypeVar("T")


@functools.cache
def _decoder(kind: type) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_to_column)


def encode(value: object) -> bytes:
    """Return the value as bytes. Equal values have equal bytes."""
    return msgspec.msgpack.encode(value, enc_hook=_to_bytes)


def decode(raw: bytes, kind: type[T]) -> T:
    """Decode a value of a struct, without checking its numbers. Raise FormatError for malformed bytes."""
    try:
        return cast(T, _decoder(cast("type", kind)).decode(raw))
    except MALFORMED as error:
        raise FormatError(f"cannot decode the bytes as {kind.__name__}: {error}") from error


def _to_bytes(column: object) -> bytes:
    assert isinstance(column, np.ndarray) and column.dtype == np.int64
    # Plans are compared by the digest of their bytes, so the bytes are little-endian on every machine.
    return column.astype("<i8", copy=False).tobytes()


def _to_column(kind: type, raw: object) -> I64:
    if not isinstance(raw, bytes) or len(raw) % 8:
        raise ValueError("a column must be bytes, with eight bytes for each number")
    # On little-endian machines, the result is a read-only view of `raw`, not a copy.
    return np.frombuffer(raw, "<i8").astype(np.int64, copy=False)


MAX_DIMS = 8
"""Maximum number of dims in a form. The corners of a box are 2^dims rows of the coverage proof. Known checkpoints have
at most 5."""
MAX_ELEMENTS = 1 << 48
"""Maximum number of elements in a tensor. With MAX_DIMS and 64-bit elements, every offset in bits stays below 2^62."""


class Runs(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Equal rectangles of bytes, each with `num_rows` runs of `run_bytes`, `pitch_bytes` apart.

    The runs of all rectangles, concatenated in order, are the row-major bytes of the box.
    """

    offsets: I64
    """Offset in bytes of the first run in each rectangle, from the tensor's first byte."""
    num_rows: int
    run_bytes: int
    pitch_bytes: int

    @property
    def nbytes(self) -> int:
        """Return the size of the box in bytes."""
        return len(self.offsets) * self.num_rows * self.run_bytes


def box_runs(shape: tuple[int, ...], box: Box, bits: int) -> Runs:
    """Return the byte runs of `box` in a row-major tensor of `shape` with elements of `bits` bits.

    Raises PlanError if the box lies outside the shape, or cuts a byte that packed elements share.
    """
    if len(box.start) != len(shape) or any(b > n for b, n in zip(box.stop, shape, strict=True)):
        raise PlanError(f"box [{box.start}, {box.stop}) lies outside shape {shape}")
    # Handle an empty box separately, because it has no first byte.
    if box.num_elements == 0:
        return Runs(offsets=np.zeros(0, np.int64), num_rows=0, run_bytes=0, pitch_bytes=0)
    # After the merge, the last dim is one run, the dim before it counts the rows, and the other dims count rectangles.
    dims = _merge(shape, box)
    inner_start, inner_extent, _ = dims[-1]
    strides = [bits] * len(dims)
    for d in range(len(dims) - 2, -1, -1):
        strides[d] = strides[d + 1] * dims[d + 1][2]
    byte_aligned = [inner_start * bits, inner_extent * bits, *strides[:-1]]
    # Do not check the last stride, an element's width, because four-bit elements are allowed inside a run.
    if any(n % 8 for n in byte_aligned):
        raise PlanError(f"box [{box.start}, {box.stop}) of shape {shape} cuts through a byte of {bits}-bit elements")
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
    """Return the dims as (start, extent, size). A dim that the box covers is folded into the dim before it."""
    # Start with a dim of one element, because a scalar has no dims, and its box is one run.
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


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of one box of a tensor in memory. A rank may have 70,000 rows but only about twenty forms."""

    dtype: DType
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    strides: tuple[int, ...] | None = None
    """Distance in elements between neighbours in each dim of the rank's memory. None means that the box is packed
    row-major. The stride is stored as 0 where the box has no neighbours."""
    tag: str = ""
    """Name of the conversion that was applied to the values, such as `fp8-block128`. Only equal tags match."""

    def __post_init__(self) -> None:
        # Normalise the strides, so that equal layouts have equal forms.
        extents = self.box.shape
        strides = self.strides
        if strides is None:
            strides = tuple(math.prod(extents[d + 1 :]) for d in range(len(extents)))
        if len(strides) == len(extents):
            alone = self.box.num_elements == 0
            strides = tuple(0 if alone or n == 1 else step for n, step in zip(extents, strides, strict=True))
        msgspec.structs.force_setattr(self, "strides", strides)

    @property
    def spec(self) -> str:
        """Return the dtype, shape and tag as text. Publisher and receiver must agree on the text."""
        return f"{self.dtype} {list(self.shape)}{' ' + self.tag if self.tag else ''}"

    @property
    def values(self) -> tuple[DType, tuple[int, ...], Box, str]:
        """Return all fields except the strides. Rows with equal `values` hold the same elements."""
        return self.dtype, self.shape, self.box, self.tag

    @property
    def span_bytes(self) -> int:
        """Return the size of the box in memory in bytes, including gaps."""
        assert self.strides is not None
        if not self.box.num_elements:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.box.shape, self.strides, strict=True))
        return -(-(last + 1) * self.dtype.bits // 8)

    def fault(self) -> str | None:
        """Return the reason why this form cannot be a box in memory, or None if it can."""
        # `__post_init__` leaves these checks to `Layout.check`, which reports the fault with the rank's name.
        assert self.strides is not None
        box, shape = self.box, self.shape
        if len(shape) > MAX_DIMS or not 0 <= math.prod(shape) <= MAX_ELEMENTS or any(n < 0 for n in shape):
            return f"shape {shape} has over {MAX_DIMS} dims, over {MAX_ELEMENTS} elements, or a negative dim"
        if len(box.start) != len(shape) or any(b > n for b, n in zip(box.stop, shape, strict=True)):
            return f"box [{box.start}, {box.stop}) lies outside shape {shape}"
        if len(self.strides) != len(shape):
            return f"{len(self.strides)} strides for {len(shape)} dims"
        reach = 0
        # Each stride must exceed the span of all smaller strides, or two elements would share an address.
        for step, extent in sorted(zip(self.strides, box.shape, strict=True)):
            if extent < 2 or not box.num_elements:
                continue
            if step <= reach:
                return f"strides {self.strides} of extents {box.shape} overlap"
            reach += (extent - 1) * step
        return f"strides {self.strides} reach too far" if reach >= MAX_ELEMENTS else None


class Layout(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Boxes that one rank holds or wants. Row i is the box `forms[form[i]]` of tensor `names[i]` at `offset[i]`.

    A tensor may have several rows (a strided shard), and a box several copies (tied weights).
    """

    member: str
    """Id of the rank's process. A restarted process has a new id."""
    address: str = ""
    """Identifies the memory registrations, for example by a digest of their descriptors."""
    regions: tuple[int, ...]
    """Size of each registration in bytes. Offsets count as if the registrations were adjacent, in this order."""
    forms: tuple[Form, ...]
    names: tuple[str, ...]
    form: I64
    offset: I64

    def check(self) -> None:
        """Raise PlanError with the first fault unless every row lies in one region and every form is valid."""
        if not len(self.names) == len(self.form) == len(self.offset):
            counts = f"{len(self.names)} names, {len(self.form)} forms and {len(self.offset)} offsets"
            raise PlanError(f"{self.member}: the columns differ in length: {counts}")
        # The limit is 2^60, so that sums of offsets and spans stay within int64 whatever a peer sent.
        if min(self.regions, default=0) < 0 or sum(self.regions) >= 1 << 60:
            raise PlanError(f"{self.member}: invalid region sizes: {self.regions}")
        for form in self.forms:
            if fault := form.fault():
                raise PlanError(f"{self.member}: {fault}")
        # A rank may hold no tensor of a model.
        if not len(self.names):
            return
        outside = (self.form < 0) | (self.form >= len(self.forms)) | (self.offset < 0)
        if not outside.any():
            span = np.array([form.span_bytes for form in self.forms], np.int64)[self.form]
            stop = np.cumsum(np.array((*self.regions, 0), np.int64))
            region = np.searchsorted(stop[:-1], self.offset, side="right")
            # Ignore empty boxes, which may be anywhere. Subtract, because an offset plus a span could overflow.
            outside = (span > 0) & ((self.offset >= stop[-1]) | (span > stop[region] - self.offset))
        if outside.any():
            i = int(outside.argmax())
            where = f"form {self.form[i]} at {self.offset[i]}"
            raise PlanError(f"{self.member}: {where} does not exist or lies outside the regions", tensor=self.names[i])

    def digest(self) -> str:
        """Return a digest of all fields, including member and address, as 32 hex digits."""
        return str(blake3(encode(self)).hexdigest(length=16))
