"""The values that all rooms share: dtypes, boxes, tensor tables, manifests.

In / Out: nothing; plain frozen values. numpy for columns, no torch, no I/O, no clock.
Not here: reading them from storage (`storage`), moving them (`plan`, `engine`).
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

GB = 10**9
MIB = 1 << 20
GIB = 1 << 30


class DType(enum.StrEnum):
    """Element types of the safetensors format, by the names it writes.

    Source: the `Dtype` enum of safetensors 0.8.0.
    """

    BOOL = "BOOL"
    F4 = "F4"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"
    U8 = "U8"
    I8 = "I8"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    C64 = "C64"
    F64 = "F64"
    I64 = "I64"
    U64 = "U64"

    @property
    def bits(self) -> int:
        """Return the bits of one element; 4 and 6 for the packed types."""
        return _BITS[self]


NOT_IN_TORCH = frozenset({DType.F6_E2M3, DType.F6_E3M2})
"""Dtypes of the format that no torch dtype holds. Source: `_TORCH` of `loader.tensor`, which a test holds to this."""

_BITS: Mapping[DType, int] = {
    DType.BOOL: 8,
    DType.F4: 4,
    DType.F6_E2M3: 6,
    DType.F6_E3M2: 6,
    DType.U8: 8,
    DType.I8: 8,
    DType.F8_E5M2: 8,
    DType.F8_E4M3: 8,
    DType.F8_E8M0: 8,
    DType.F8_E4M3FNUZ: 8,
    DType.F8_E5M2FNUZ: 8,
    DType.I16: 16,
    DType.U16: 16,
    DType.F16: 16,
    DType.BF16: 16,
    DType.I32: 32,
    DType.U32: 32,
    DType.F32: 32,
    DType.C64: 64,
    DType.F64: 64,
    DType.I64: 64,
    DType.U64: 64,
}


def bits_to_bytes(num_elements: int, dtype: DType) -> int:
    """Return the bytes of `num_elements` packed elements. ValueError unless they fill whole bytes."""
    bits = num_elements * dtype.bits
    # The format packs 4- and 6-bit elements without gaps, so that a shape may end in the middle of a byte.
    if bits % 8:
        raise ValueError(f"{num_elements} elements of {dtype} are {bits} bits, not whole bytes")
    return bits // 8


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned region of a global tensor: per dim `[start, stop)`, in elements.

    `Box((0, 2), (4, 6))` and `Box.of(slice(0, 4), slice(2, 6))` are the same box.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"box start {self.start} and stop {self.stop} differ in rank")
        # Equal start and stop are allowed: a rank may have no rows of a tensor that is cut over more ranks than rows.
        # A plain loop, since a recorded loader makes several boxes of each tensor.
        for a, b in zip(self.start, self.stop, strict=True):
            if a < 0 or b < a:
                raise ValueError(f"box [{self.start}, {self.stop}) is not a region")

    @classmethod
    def of(cls, *slices: slice) -> Box:
        """Return the box of a slice for each dim. ValueError: one has no stop, or a step other than 1."""
        for one in slices:
            if one.stop is None or one.step not in {None, 1}:
                raise ValueError(f"{one} is not a part [start, stop) of a dim whose size is not known here")
        return cls(tuple(one.start or 0 for one in slices), tuple(one.stop for one in slices))

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Return the whole of a tensor of `shape`."""
        return cls(start=(0,) * len(shape), stop=tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the extent of the region, in elements."""
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the region as the index of a tensor."""
        return tuple(map(slice, self.start, self.stop))

    @property
    def num_elements(self) -> int:
        """Return the number of elements in the region; 1 for a scalar's box."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TensorTable:
    """Tensors as columns; row i is one tensor. Names are unique."""

    # Columns, because an MoE checkpoint has 60,000 rows: planning must not run Python code for each.

    names: tuple[str, ...]
    dtypes: tuple[DType, ...]
    shapes: tuple[tuple[int, ...], ...]
    file_index: I64
    """Index of the row's file in the manifest."""
    offset: I64
    """Absolute byte offset of the row's bytes in its file."""
    nbytes: I64

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def take(self, rows: Sequence[int]) -> TensorTable:
        """Return the table of these rows, in this order."""
        at = np.asarray(rows, dtype=np.int64)
        return TensorTable(
            names=tuple(self.names[i] for i in rows),
            dtypes=tuple(self.dtypes[i] for i in rows),
            shapes=tuple(self.shapes[i] for i in rows),
            file_index=self.file_index[at],
            offset=self.offset[at],
            nbytes=self.nbytes[at],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file or object of a weight set."""

    name: str
    """Path relative to the manifest; `/` separates."""
    nbytes: int
    identity: str = ""
    """ETag of an object, `dev:inode:mtime_ns:size` of a file: a file with another one has changed. Not part of the
    revision."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The `__metadata__` of the file's header."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Manifest:
    """The immutable description of a weight set.

    `leaves` holds, row after row of `tensors`, the XXH3-64 digest of every `leaf_bytes` run of that tensor's bytes
    (the last run of a tensor may be shorter; a tensor of no bytes has no leaf). None: not digested yet.
    """

    files: tuple[FileEntry, ...]
    tensors: TensorTable
    leaf_bytes: int
    leaves: U64 | None
    revision: str
    """`w1-...`: root over names, dtypes, shapes and leaves, independent of the files. `h1-...`: of the headers only."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors, without headers and gaps."""
        return int(self.tensors.nbytes.sum())
