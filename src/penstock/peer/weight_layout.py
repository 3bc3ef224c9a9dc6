"""The layout of weights: tensors sorted by name and divided into chunks, equal on all members with the same weights.

In: a tensor table, or tensors by name. Out: a `WeightLayout`.
Not here: dividing into chunks (`plan.chunks`), the tensors' memory (`local_weights`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from penstock.digest.leaf import LEAF_BYTES, headers_revision, name_order
from penstock.errors import FormatError, PlanError
from penstock.hub.identity import layout_digest
from penstock.hub.messages import prepare
from penstock.loader.tensor import dtype_of
from penstock.plan.chunks import CHUNK_BYTES, ChunkTable, chunk_table
from penstock.types import DType, Manifest, TensorTable, bits_to_bytes

MAX_TENSORS = 1 << 22
"""Most tensors accepted in a peer's layout; the largest checkpoint of today has 70,000."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WeightLayout:
    """The tensor table and the chunks that all holders of a key share."""

    table: TensorTable
    """Sorted by name. Files and offsets are those of storage, if the layout was made from there."""
    chunks: ChunkTable
    digest: str

    @classmethod
    def of(cls, table: TensorTable, *, leaf_bytes: int = LEAF_BYTES, chunk_bytes: int | None = None) -> WeightLayout:
        """Return the layout of these tensors, given in any order."""
        ordered = table.take(name_order(table))
        most = max(CHUNK_BYTES if chunk_bytes is None else chunk_bytes, leaf_bytes)
        chunks = chunk_table(ordered.nbytes, leaf_bytes=leaf_bytes, chunk_bytes=most)
        return cls(table=ordered, chunks=chunks, digest=layout_digest(ordered))

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return int(self.table.nbytes.sum())


class TableMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message that describes a layout to another member."""

    leaf_bytes: int
    chunk_bytes: int
    names: tuple[str, ...]
    dtypes: tuple[DType, ...]
    shapes: tuple[tuple[int, ...], ...]


prepare(TableMessage)


def to_message(layout: WeightLayout) -> TableMessage:
    """Return the message that describes a layout."""
    table, chunks = layout.table, layout.chunks
    return TableMessage(
        leaf_bytes=chunks.leaf_bytes,
        chunk_bytes=chunks.chunk_bytes,
        names=table.names,
        dtypes=table.dtypes,
        shapes=table.shapes,
    )


def from_message(message: TableMessage) -> WeightLayout:
    """Return the layout that a peer described. Raises FormatError if the message is inconsistent."""
    if not len(message.names) == len(message.dtypes) == len(message.shapes) <= MAX_TENSORS:
        raise FormatError("a peer's tensor table has columns of different lengths, or too many rows")
    if len(set(message.names)) < len(message.names):
        raise FormatError("a peer's tensor table names a tensor twice")
    if message.leaf_bytes < 1 or message.chunk_bytes < message.leaf_bytes:
        raise FormatError(f"a peer's chunks of {message.chunk_bytes} bytes cannot hold leaves of {message.leaf_bytes}")
    if any(extent < 0 for shape in message.shapes for extent in shape):
        raise FormatError("a peer's tensor table has a negative dim")
    table = tabulate(message.names, message.dtypes, message.shapes)
    return WeightLayout.of(table, leaf_bytes=message.leaf_bytes, chunk_bytes=message.chunk_bytes)


def tabulate(names: Sequence[str], dtypes: Sequence[DType], shapes: Sequence[tuple[int, ...]]) -> TensorTable:
    """Return a table of tensors that are not in files."""
    nbytes = []
    for dtype, shape in zip(dtypes, shapes, strict=True):
        count = 1
        for extent in shape:
            count *= extent
        try:
            nbytes.append(bits_to_bytes(count, dtype))
        except ValueError as error:
            raise FormatError(f"a tensor does not fill whole bytes: {error}") from error
    if sum(nbytes) >= 1 << 62:
        raise FormatError(f"the tensors' sizes add up to {sum(nbytes)} bytes, above the limit of 4 EiB")
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
    """Return the layout of live tensors, and each row's bytes as a flat uint8 view.

    Tied tensors (one memory under several names) are one row, under the name that sorts first.

    Raises:
        PlanError: a tensor is not contiguous, or has a dtype that the format does not support.
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
            message = f"a tensor of strides {tensor.stride()} cannot be exchanged: it is not contiguous"
            raise PlanError(message, tensor=name, hint="call .contiguous() on it")
        dtype = dtype_of(tensor.dtype)
        shape = tuple(tensor.shape)
        if dtype is DType.F4:
            shape = (*shape[:-1], shape[-1] * 2)
        names.append(name)
        dtypes.append(dtype)
        shapes.append(shape)
        flat.append(tensor.reshape(-1).view(torch.uint8))
    return WeightLayout.of(tabulate(names, dtypes, shapes)), flat


def revision_of(manifest: Manifest) -> str:
    """Return a revision that is equal for two readers of storage only if they read the same bytes.

    With digests it is the manifest's `w1-` revision. Headers alone do not prove that, so without digests the files'
    identities are part of it.
    """
    if manifest.leaves is not None:
        return manifest.revision
    told = [f"{file.name}\0{file.nbytes}\0{file.identity}".encode() for file in manifest.files]
    return headers_revision([manifest.revision.encode(), *told])
