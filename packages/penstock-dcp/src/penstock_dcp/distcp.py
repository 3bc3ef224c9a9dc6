"""Reads DCP's own format without executing it: `.metadata`, and the torch.save archives in `.distcp` files.

    archive: data.pkl (dtype, shape, strides) | small records | data/0 (the elements) | ... | directory of a zip file

The records are not compressed. The elements of a stored tensor are contiguous in the file, so they can be read directly
into the target tensor. `pickled` decodes the pickles, and `reader` reads the files.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from penstock.errors import FormatError
from penstock.plan.intersect import Boxes, uncovered
from penstock.storage.safetensors import clip
from penstock.types import Box
from penstock_dcp.pickled import DTYPES, PERSISTENT, SIZE, Global, PickleRecord, decode, is_sizes

METADATA_NAME = ".metadata"

HEAD_BYTES = 1 << 10
"""Bytes to read from an archive's start. torch 2.8 to 2.13 put the header of `data/0` at byte 600 for a tensor of rank
2."""

TAIL_BYTES = 1 << 10
"""Bytes to read from an archive's end. The zip directory there takes about 600 bytes."""

_MAX_DIRECTORY_BYTES = 1 << 20

_META = "torch.distributed.checkpoint.metadata"
_METADATA = Global(_META, "Metadata")
_TENSOR = Global(_META, "TensorStorageMetadata")
_BYTES = Global(_META, "BytesStorageMetadata")
_PROPERTIES = Global(_META, "TensorProperties")
_CHUNK = Global(_META, "ChunkStorageMetadata")
_INDEX = Global(_META, "MetadataIndex")
_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
# Names that may occur in the metadata, but whose values are not used.
_UNUSED = {
    Global(_META, "_MEM_FORMAT_ENCODING"),
    # Python 3.11.0 to 3.11.3 pickle an enum member as a call of `getattr`. The decoder never calls `getattr`.
    Global("builtins", "getattr"),
    Global(_META, "StorageMeta"),
    Global("torch.serialization", "_get_layout"),
    Global("pathlib", "PosixPath"),
    Global("pathlib", "WindowsPath"),
    Global("pathlib._local", "PosixPath"),
    Global("pathlib._local", "WindowsPath"),
}
_METADATA_NAMES = frozenset({_METADATA, _TENSOR, _BYTES, _PROPERTIES, _CHUNK, _INDEX, _INFO, SIZE, *DTYPES, *_UNUSED})

_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_3 = Global("torch._utils", "_rebuild_tensor_v3")
_ORDERED = Global("collections", "OrderedDict")
_UNTYPED = Global("torch.storage", "UntypedStorage")
# Source: `torch.storage._dtype_to_storage_type_map` in torch 2.13. Dtypes without an entry are written untyped.
_STORAGES = {
    Global("torch", f"{name}Storage"): dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
    }.items()
}
_TENSOR_NAMES = frozenset({_REBUILD, _REBUILD_3, _ORDERED, _UNTYPED, SIZE, *_STORAGES, *DTYPES})


Path = tuple[str | int, ...]
"""The keys that lead to a value in a nested state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistcpEntry:
    """A stored item: a byte range in a file that contains a torch.save archive."""

    file: str
    """Plain file name relative to the checkpoint."""
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """The tensor in an archive. `order` lists the dims by decreasing stride, which is the order of the bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    offset: int
    """Offset of the elements from the start of the archive."""


def parse_metadata(raw: bytes, *, uri: str) -> Metadata:
    """Parse a checkpoint's metadata. The `storage_data` of the result maps each index to a `DistcpEntry`.

    Raises:
        FormatError: the file is not a pickle of DCP metadata, or its entries contradict each other.
    """
    root = _record(decode(raw, _METADATA_NAMES, uri=uri), _METADATA, uri)
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, value in _dict(root.get("state_dict_metadata"), uri).items():
        if not isinstance(name, str):
            raise FormatError("a name in the metadata is not a string", uri=uri)
        tensors[name] = _tensor(name, value, uri)
    entries: dict[MetadataIndex, DistcpEntry] = {}
    for key, value in _dict(root.get("storage_data"), uri).items():
        index = _record(key, _INDEX, uri)
        name, offset = index.get("fqn"), index.get("offset")
        if not isinstance(name, str) or name not in tensors:
            raise FormatError(f"an entry refers to {_shown(name)}, which has no metadata", uri=uri)
        entries[MetadataIndex(name, None if offset is None else _sizes(offset, name, uri))] = _entry(name, value, uri)
    _require_entries(tensors, entries, uri)
    return Metadata(tensors, planner_data=_paths(root.get("planner_data"), uri), storage_data=entries)


def _require_entries(
    tensors: Mapping[str, TensorStorageMetadata | BytesStorageMetadata],
    entries: Mapping[MetadataIndex, DistcpEntry],
    uri: str,
) -> None:
    """Raise FormatError unless every chunk in the metadata has an entry."""
    for name, item in tensors.items():
        chunks = item.chunks if isinstance(item, TensorStorageMetadata) else ()
        wanted = [MetadataIndex(name, chunk.offsets) for chunk in chunks]
        for index in wanted or [MetadataIndex(name)]:
            if index not in entries:
                raise FormatError("the metadata has no location for the tensor", uri=uri, tensor=clip(name))


def _record(value: Any, call: Global, uri: str) -> dict[str, Any]:
    """Return the fields of a dataclass instance in a decoded pickle."""
    if not isinstance(value, PickleRecord) or value.call != call or value.args or value.items:
        raise FormatError(f"expected a {call.name} in the metadata", uri=uri)
    state = {} if value.state is None else value.state
    # The state of a dataclass may be a pair, whose first element is the dict of its fields.
    return _dict(state, uri)


def _dict(value: Any, uri: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise FormatError("expected a dict in the metadata", uri=uri)
    return value


def _shown(value: Any) -> str:
    """Return a text for an error message: the content of a string, or only the type of another value.

    A small pickle can contain a value with a huge `repr`.
    """
    return repr(clip(value)) if isinstance(value, str) else f"a {type(value).__name__}"


def _sizes(value: Any, name: str, uri: str) -> torch.Size:
    if isinstance(value, PickleRecord) and value.call == SIZE and len(value.args) == 1 and is_sizes(value.args[0]):
        return torch.Size(value.args[0])
    raise FormatError("the metadata has malformed sizes", uri=uri, tensor=clip(name))


def _tensor(name: str, value: Any, uri: str) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, PickleRecord) and value.call == _BYTES:
        return BytesStorageMetadata()
    fields = _record(value, _TENSOR, uri)
    properties, size = fields.get("properties"), _sizes(fields.get("size"), name, uri)
    state = properties.state if isinstance(properties, PickleRecord) and properties.call == _PROPERTIES else None
    dtype = DTYPES.get(state[0]) if isinstance(state, tuple) and state and isinstance(state[0], Global) else None
    stored = fields.get("chunks")
    if dtype is None or not isinstance(stored, list):
        raise FormatError("the tensor's metadata has no dtype or no chunks", uri=uri, tensor=clip(name))
    chunks: list[ChunkStorageMetadata] = []
    for each in stored:
        chunk = _record(each, _CHUNK, uri)
        sizes, offsets = _sizes(chunk.get("sizes"), name, uri), _sizes(chunk.get("offsets"), name, uri)
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
    require_covered(name, size, chunks, uri)
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=chunks)


def require_covered(name: str, size: torch.Size, chunks: list[ChunkStorageMetadata], uri: str) -> None:
    """Raise FormatError unless each element of the tensor is in exactly one chunk."""
    total = 0
    for chunk in chunks:
        if len(chunk.sizes) != len(size) or len(chunk.offsets) != len(size):
            raise FormatError("a part has a different number of dims than the tensor", uri=uri, tensor=clip(name))
        if any(at + extent > whole for at, extent, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            raise FormatError("a part lies outside the tensor", uri=uri, tensor=clip(name))
        total += math.prod(chunk.sizes)
    if total != math.prod(size):
        fault = f"the parts have {total} elements, the tensor {math.prod(size)}: a shard is missing or duplicated"
        raise FormatError(fault, uri=uri, tensor=clip(name))
    if total and len(chunks) > 1 and not _are_apart(size, chunks):
        raise FormatError("parts overlap: one shard is duplicated, another is missing", uri=uri, tensor=clip(name))


def _are_apart(size: torch.Size, chunks: list[ChunkStorageMetadata]) -> bool:
    """Return whether chunks do not overlap.

    The caller has checked that the chunks lie inside the tensor and have as many elements as the tensor in total.
    """
    chunks = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    cut = {dim for chunk in chunks for dim, extent in enumerate(chunk.sizes) if extent != size[dim]}
    if len(cut) == 1:
        (dim,) = cut
        ends = sorted((chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]) for chunk in chunks)
        return all(stop <= start for (_, stop), (start, _) in pairwise(ends))
    # Reject sizes that overflow 64 bits, because no file can contain so large a tensor.
    if math.prod(extent + 1 for extent in size) >= 1 << 62:
        return False
    boxes = [
        Box(start=tuple(chunk.offsets), stop=tuple(at + n for at, n in zip(chunk.offsets, chunk.sizes, strict=True)))
        for chunk in chunks
    ]
    return not len(uncovered(Boxes.of([Box.full(tuple(size))]), np.zeros(len(boxes), np.int64), Boxes.of(boxes)))


def _entry(name: str, value: Any, uri: str) -> DistcpEntry:
    fields = _record(value, _INFO, uri)
    file, offset, nbytes = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    # The file name is appended to the checkpoint's URI, and must not lead outside the checkpoint.
    if not isinstance(file, str) or not file or "/" in file or "\\" in file or "\0" in file or file in {".", ".."}:
        raise FormatError(f"{_shown(file)} is not a valid file name", uri=uri, tensor=clip(name))
    if not isinstance(offset, int) or not isinstance(nbytes, int) or not is_sizes((offset, nbytes, offset + nbytes)):
        raise FormatError("the tensor's range in the file is invalid", uri=uri, tensor=clip(name))
    if fields.get("transform_descriptors"):
        hint = "load it with torch's reader and its extensions"
        raise FormatError("the tensor is stored with an extension of DCP", uri=uri, tensor=clip(name), hint=hint)
    return DistcpEntry(file=file, offset=offset, nbytes=nbytes)


def _paths(value: Any, uri: str) -> dict[str, Path] | None:
    """Return the planner's data: for each flat name, the keys that lead to the value in the nested state."""
    if value is None:
        return None
    paths: dict[str, Path] = {}
    for name, path in _dict(value, uri).items():
        # An int in a path is a list index. A planner creates a list that is long enough for the index, so `is_key`
        # limits it.
        if not isinstance(name, str) or not isinstance(path, tuple) or not all(map(is_key, path)):
            raise FormatError("the planner's data in the metadata is malformed", uri=uri)
        paths[name] = path
    return paths


def is_key(key: Any) -> bool:
    """Return whether a value can be a key in a planner's path: a string, or a list index below a limit."""
    return isinstance(key, str) or (type(key) is int and 0 <= key < 1 << 20)


# Source: APPNOTE.TXT for the zip format, 4.3.7 (local header), 4.3.12 (directory), 4.3.14 to 4.3.16 (its end, zip64).
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    start: int
    """Offset of the member's local header."""
    nbytes: int


def directory(tail: bytes, nbytes: int, *, uri: str, tensor: str) -> dict[str, _Member] | int:
    """Return the members of an archive. If `tail` is too short, return the number of bytes that it must contain.

    Args:
        tail: the archive's last bytes.
        nbytes: size of the archive.
        uri, tensor: URI and tensor name for error messages.

    Raises:
        FormatError: the archive does not end like a zip file, or a member is compressed or lies outside the archive.
    """

    def fault(why: str) -> FormatError:
        return FormatError(f"not a torch.save archive: {why}", uri=uri, tensor=clip(tensor))

    at = len(tail) - _END.size
    if at < 0 or tail[at : at + 4] != b"PK\x05\x06":
        raise fault("the archive does not end like a zip file")
    _, _, _, _, count, size, start, _ = _END.unpack_from(tail, at)
    at_64 = at - 20 - _END_64.size
    if at_64 >= 0 and tail[at_64 : at_64 + 4] == b"PK\x06\x06":
        _, _, _, _, _, _, _, count, size, start = _END_64.unpack_from(tail, at_64)
    if start + size > nbytes or count > 1 << 16:
        raise fault("the zip directory lies outside the archive")
    begin = start - (nbytes - len(tail))
    if nbytes - start > _MAX_DIRECTORY_BYTES:
        # Reject the stated length before memory is allocated for the directory.
        raise fault("the zip directory is too long")
    if begin < 0:
        return nbytes - int(start)
    members: dict[str, _Member] = {}
    at = begin
    for _ in range(count):
        if at + _CENTRAL.size > min(begin + size, len(tail)) or tail[at : at + 4] != b"PK\x01\x02":
            raise fault("the zip directory is truncated")
        _, _, _, _, method, _, _, _, packed, length, name_len, extra_len, comment_len, _, _, _, head = (
            _CENTRAL.unpack_from(tail, at)
        )
        at += _CENTRAL.size
        name = tail[at : at + name_len].decode("utf-8", "replace")
        extra = tail[at + name_len : at + name_len + extra_len]
        at += name_len + extra_len + comment_len
        length, packed, head = _zip64(extra, length, packed, head)
        if method or packed != length or head + _LOCAL.size + length > start or name in members:
            raise fault(f"the member {clip(name)!r} is compressed, duplicated, or outside the archive")
        members[name] = _Member(start=head, nbytes=length)
    return members


def _zip64(extra: bytes, length: int, packed: int, head: int) -> tuple[int, int, int]:
    """Return a member's sizes and offset. Values that do not fit in 32 bits are read from the zip64 field."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + size]
        at += 4 + size
    values = []
    for value in (length, packed, head):
        if value == 0xFFFFFFFF and len(wide) >= 8:
            value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        values.append(value)
    return values[0], values[1], values[2]


def body_start(head: bytes, member: _Member, *, uri: str, tensor: str) -> int:
    """Return the offset of a member's bytes in the archive. `head` begins with the member's local header."""
    if len(head) < _LOCAL.size or head[:4] != b"PK\x03\x04":
        raise FormatError("not a torch.save archive: a member has no header", uri=uri, tensor=clip(tensor))
    fields = _LOCAL.unpack_from(head)
    return member.start + _LOCAL.size + int(fields[-2]) + int(fields[-1])


def member(members: Mapping[str, _Member], name: str, *, uri: str, tensor: str) -> _Member:
    """Return the member `<any directory>/<name>`. Raise FormatError unless exactly one member matches."""
    found = [each for path, each in members.items() if path.partition("/")[2] == name]
    if len(found) != 1:
        raise FormatError(f"not a torch.save archive: {name} is missing or duplicated", uri=uri, tensor=clip(tensor))
    return found[0]


def member_of(archive: bytes, name: str, *, uri: str, tensor: str) -> bytes:
    """Return a member's bytes from a complete archive. Raise FormatError if the member is missing or malformed."""
    members = directory(archive, len(archive), uri=uri, tensor=tensor)
    # The result is an int only if the zip directory would begin before the start of the archive.
    if isinstance(members, int):
        raise FormatError(
            "not a torch.save archive: the zip directory lies outside the archive", uri=uri, tensor=clip(tensor)
        )
    found = member(members, name, uri=uri, tensor=tensor)
    start = body_start(archive[found.start :], found, uri=uri, tensor=tensor)
    if start + found.nbytes > len(archive):
        raise FormatError("a member ends outside the archive", uri=uri, tensor=clip(tensor))
    return archive[start : start + found.nbytes]


def parse_tensor(raw: bytes, *, uri: str, tensor: str) -> tuple[StoredTensor, str, int]:
    """Parse an archive's `data.pkl`.

    Return the tensor, the member that holds its elements, and the member's required size.

    The tensor's offset is relative to the beginning of the member.

    Raises:
        FormatError: the archive does not hold exactly one tensor whose elements are stored without gaps.
    """

    def fault(why: str) -> FormatError:
        return FormatError(f"cannot read a stored tensor: {why}", uri=uri, tensor=clip(tensor))

    root = decode(raw, _TENSOR_NAMES, uri=uri)
    if not isinstance(root, PickleRecord) or root.call not in {_REBUILD, _REBUILD_3} or len(root.args) < 4:
        raise fault("the object is not a plain tensor")
    storage, first, shape, strides = root.args[:4]
    shape, strides = (
        value.args[0] if isinstance(value, PickleRecord) and value.call == SIZE and len(value.args) == 1 else value
        for value in (shape, strides)
    )
    pid = storage.args[0] if isinstance(storage, PickleRecord) and storage.call == PERSISTENT else None
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[2], str):
        raise fault("the tensor has no storage")
    dtype = _STORAGES.get(pid[1]) if isinstance(pid[1], Global) else None
    if root.call == _REBUILD_3 and pid[1] == _UNTYPED and len(root.args) >= 7 and isinstance(root.args[6], Global):
        dtype = DTYPES.get(root.args[6])
    if dtype is None:
        raise fault("the dtype is unknown")
    if not is_sizes(shape) or not is_sizes(strides) or not is_sizes((first,)) or len(shape) != len(strides):
        raise fault("the shape or the strides are malformed")
    elements = math.prod(shape)
    # Sort dims by decreasing strides, which is the order of the bytes. Dims with one element do not matter.
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim)))
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != expected and elements:
            raise fault("the elements are not contiguous")
        expected *= shape[dim]
    start = first * dtype.itemsize
    return (
        StoredTensor(dtype=dtype, shape=tuple(shape), order=order, offset=start),
        pid[2],
        start + elements * dtype.itemsize,
    )
