"""Immutable values that the whole package uses: dtypes, boxes, tensor tables and manifests. No torch and no I/O."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.units import GB as GB
from penstock.units import GIB as GIB
from penstock.units import MIB as MIB

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


class DType(enum.StrEnum):
    """Element types of the safetensors format, by their names in the file.

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
        """Return the number of bits in one element, which is 4 or 6 for packed types."""
        return _BITS[self]


NOT_IN_TORCH = frozenset({DType.F6_E2M3, DType.F6_E3M2})
"""Dtypes without a counterpart in torch."""

# The first number in each name except BOOL is the number of bits.
_BITS = {dtype: 8 if dtype is DType.BOOL else int(dtype.partition("_")[0].strip("BCFIU")) for dtype in DType}


def bits_to_bytes(num_elements: int, dtype: DType) -> int:
    """Return the size of `num_elements` packed elements in bytes. Raise ValueError for a partial byte."""
    bits = num_elements * dtype.bits
    # The format packs elements of 4 and 6 bits without gaps.
    if bits % 8:
        raise ValueError(f"{num_elements} elements of {dtype} are {bits} bits, not whole bytes")
    return bits // 8


class Box(msgspec.Struct, frozen=True):
    """An axis-aligned region of a global tensor: `[start, stop)` in elements for each dim.

    `Box((0, 2), (4, 6))` and `Box.of(slice(0, 4), slice(2, 6))` are the same box.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"box start {self.start} and stop {self.stop} have different numbers of dims")
        # An empty box is allowed, because a tensor may have fewer rows than there are ranks.
        for a, b in zip(self.start, self.stop, strict=True):
            if a < 0 or b < a:
                raise ValueError(f"box [{self.start}, {self.stop}) has a negative start or a stop below its start")

    @classmethod
    def of(cls, *slices: slice) -> Box:
        """Return the box for one slice per dim. Raise ValueError if a slice has no stop or a step other than 1."""
        for one in slices:
            if one.stop is None or one.step not in {None, 1}:
                raise ValueError(f"{one} needs a stop and a step of 1, because the size of the dim is unknown here")
        return cls(tuple(one.start or 0 for one in slices), tuple(one.stop for one in slices))

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return cls(start=(0,) * len(shape), stop=tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the region, in elements."""
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the region as an index for a tensor."""
        return tuple(map(slice, self.start, self.stop))

    @property
    def num_elements(self) -> int:
        """Return the number of elements in the region. The box of a scalar has one element."""
        return math.prod(self.shape)


class TensorTable(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A table of tensors, stored as columns. Each row is one tensor, and names are unique.

    An MoE checkpoint has 60,000 rows. With columns, planning runs no Python code for each row.
    """

    names: tuple[str, ...]
    dtypes: tuple[DType, ...]
    shapes: tuple[tuple[int, ...], ...]
    file_index: I64
    """Index in the manifest of the file that contains the tensor."""
    offset: I64
    """Byte offset of the tensor from the start of its file."""
    nbytes: I64

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def take(self, rows: Sequence[int]) -> TensorTable:
        """Return a table with the given rows, in the given order."""
        at = np.asarray(rows, dtype=np.int64)
        return TensorTable(
            names=tuple(self.names[i] for i in rows),
            dtypes=tuple(self.dtypes[i] for i in rows),
            shapes=tuple(self.shapes[i] for i in rows),
            file_index=self.file_index[at],
            offset=self.offset[at],
            nbytes=self.nbytes[at],
        )


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file or object in a weight set."""

    name: str
    """Path relative to the manifest, with `/` between its parts."""
    nbytes: int
    identity: str = ""
    """The ETag of an object, or `dev:inode:mtime_ns:size` for a file. The revision does not depend on it."""
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    """`__metadata__` from the file's header."""


class Manifest(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The immutable description of a weight set.

    `leaves` contains XXH3-64 digests in the order of `tensors`: one for each run of `leaf_bytes` bytes in a tensor. The
    last run of a tensor may be shorter, and an empty tensor has no leaf. `leaves` is None if no digest was computed.
    """

    files: tuple[FileEntry, ...]
    tensors: TensorTable
    leaf_bytes: int
    leaves: U64 | None
    revision: str
    """`w1-...` is a digest over names, dtypes, shapes and leaves. `h1-...` covers only the headers."""

    @property
    def nbytes(self) -> int:
        """Return the total size of all tensors in bytes, without headers and gaps."""
        return int(self.tensors.nbytes.sum())
