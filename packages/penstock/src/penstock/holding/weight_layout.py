"""The layout of the weights of one key, and its messages.

All members with the same weights have the same layout: tensors sorted by name and divided into chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np
import torch

from penstock.digest.leaf import LEAF_BYTES, headers_revision, name_order
from penstock.errors import FormatError, PlanError
from penstock.hub.messages import layout_digest, prepare
from penstock.loader.tensor import dtype_of
from penstock.memory.targets import require_stored
from penstock.plan.schedule import CHUNK_BYTES, ChunkTable, chunk_table
from penstock.storage.file_names import STEM, is_safe_stem
from penstock.types import DType, Manifest, TensorTable, bits_to_bytes

MAX_TENSORS = 1 << 22
"""Maximum number of tensors that a peer's layout may declare. The largest known checkpoint has 70,000 tensors."""


class WeightLayout(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The tensor table and the chunks that all holders of a key share."""

    table: TensorTable
    """The tensors, sorted by name. Files and offsets refer to storage if the layout was read from storage."""
    chunks: ChunkTable
    digest: str
    """Digest of the table without the stem."""
    stem: str = STEM
    """Beginning of the file names in storage, before their number. Members that write files use the same names."""

    @classmethod
    def of(
        cls, table: TensorTable, *, leaf_bytes: int = LEAF_BYTES, chunk_bytes: int | None = None, stem: str = STEM
    ) -> WeightLayout:
        """Create the layout for tensors in any order."""
        rows = name_order(table)
        ordered = table if rows == list(range(len(table))) else table.take(rows)
        chunk_bytes = max(CHUNK_BYTES if chunk_bytes is None else chunk_bytes, leaf_bytes)
        chunks = chunk_table(ordered.nbytes, leaf_bytes=leaf_bytes, chunk_bytes=chunk_bytes)
        return cls(table=ordered, chunks=chunks, digest=layout_digest(ordered), stem=stem)

    @property
    def nbytes(self) -> int:
        """Return the total size of all tensors in bytes."""
        return int(self.table.nbytes.sum())


class TableMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A layout on the wire."""

    leaf_bytes: int
    chunk_bytes: int
    names: tuple[str, ...]
    dtypes: tuple[DType, ...]
    shapes: tuple[tuple[int, ...], ...]
    stem: str = STEM


prepare(TableMessage)


def to_message(layout: WeightLayout) -> TableMessage:
    """Convert a layout to a message."""
    table, chunks = layout.table, layout.chunks
    return TableMessage(
        leaf_bytes=chunks.leaf_bytes,
        chunk_bytes=chunks.chunk_bytes,
        names=table.names,
        dtypes=table.dtypes,
        shapes=table.shapes,
        stem=layout.stem if is_safe_stem(layout.stem) else STEM,
    )


def from_message(message: TableMessage) -> WeightLayout:
    """Return the layout that a peer described. Raise FormatError if the message is inconsistent."""
    if not len(message.names) == len(message.dtypes) == len(message.shapes) <= MAX_TENSORS:
        raise FormatError("a peer's tensor table has columns of different lengths, or too many rows")
    if len(set(message.names)) < len(message.names):
        raise FormatError("a peer's tensor table has a duplicate name")
    if message.leaf_bytes < 1 or message.chunk_bytes < message.leaf_bytes:
        raise FormatError(f"a peer's chunks of {message.chunk_bytes} bytes cannot hold leaves of {message.leaf_bytes}")
    if min(chain.from_iterable(message.shapes), default=0) < 0:
        raise FormatError("a peer's tensor table has a negative dimension")
    if not is_safe_stem(message.stem):
        raise FormatError(f"a peer sent the stem {message.stem[:100]!r}, which is not valid in a file name")
    table = tabulate(message.names, message.dtypes, message.shapes)
    return WeightLayout.of(table, leaf_bytes=message.leaf_bytes, chunk_bytes=message.chunk_bytes, stem=message.stem)


def tabulate(names: Sequence[str], dtypes: Sequence[DType], shapes: Sequence[tuple[int, ...]]) -> TensorTable:
    """Return a table for tensors in memory, without files and offsets. Raise FormatError if the sizes are invalid."""
    bits = {dtype: dtype.bits for dtype in set(dtypes)}
    # A peer's shapes may be huge. Python integers do not overflow, unlike numpy's product.
    nbytes = [math.prod(shape) * bits[dtype] // 8 for dtype, shape in zip(dtypes, shapes, strict=True)]
    if any(width % 8 for width in bits.values()):
        try:
            for dtype, shape in zip(dtypes, shapes, strict=True):
                bits_to_bytes(math.prod(shape), dtype)
        except ValueError as error:
            raise FormatError(f"a tensor does not end at a byte boundary: {error}") from error
    if sum(nbytes) >= 1 << 62:
        raise FormatError(f"the tensors have {sum(nbytes)} bytes in total, above the limit of 4 EiB")
    none = np.zeros(len(nbytes), np.int64)
    return TensorTable(
        names=tuple(names),
        dtypes=tuple(dtypes),
        shapes=tuple(shapes),
        file_index=none,
        offset=none,
        nbytes=np.array(nbytes, np.int64),
    )


def layout_of_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[WeightLayout, list[torch.Tensor]]:
    """Return the layout of live tensors, and each row's bytes as a flat uint8 view. Tied tensors become one row.

    Raise PlanError if a tensor is not contiguous, or its dtype is unsupported.
    """
    seen: set[tuple[int, int]] = set()
    names, dtypes, shapes, flat = [], [], [], []
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        place = (tensor.data_ptr(), tensor.nbytes)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        if not tensor.is_contiguous():
            message = f"a tensor with strides {tensor.stride()} cannot be exchanged because it is not contiguous"
            raise PlanError(message, tensor=name, hint="call .contiguous() on the tensor")
        require_stored(name, tensor)
        dtype = dtype_of(tensor.dtype)
        shape = tuple(tensor.shape)
        # Torch counts two packed F4 elements as one element, but safetensors counts two.
        if dtype is DType.F4:
            shape = (*shape[:-1], shape[-1] * 2)
        names.append(name)
        dtypes.append(dtype)
        shapes.append(shape)
        flat.append(tensor.reshape(-1).view(torch.uint8))
    return WeightLayout.of(tabulate(names, dtypes, shapes)), flat


def revision_of(manifest: Manifest) -> str:
    """Return a revision that is equal for two readers of storage only if both read the same bytes."""
    if manifest.leaves is not None:
        return manifest.revision
    identities = [f"{file.name}\0{file.nbytes}\0{file.identity}".encode() for file in manifest.files]
    return headers_revision([manifest.revision.encode(), *identities])
