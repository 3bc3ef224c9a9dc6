"""The safetensors format: read headers and index files, write headers.

The reader is as strict as the safetensors library, and also rejects duplicate keys, JSON that does not start with `{`,
and deep nesting. The reader checks every number against the file's size before it allocates memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
from blake3 import blake3

from penstock.errors import FormatError, PlanError, SourceTruncated
from penstock.storage.foreign_json import strict
from penstock.storage.source import Source
from penstock.types import I64, MIB, DType, TensorTable, bits_to_bytes

T = TypeVar("T")

MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header. Source: `MAX_HEADER_SIZE` of safetensors 0.8.0; README, "Format"."""

MAX_TENSORS = 1 << 19
"""Maximum number of tensors in one file, eight times the 60,000 of the largest mixture-of-experts checkpoint. Parsing
takes about a second. Source: measured on a 2-core machine, 2026-11."""

MAX_RANK = 64
"""Maximum number of dimensions of a tensor. Source: NPY_MAXDIMS of NumPy 2."""

MAX_METADATA_KEYS = 1 << 16
"""Maximum number of entries in `__metadata__`. Training tools write some hundred. A hundred megabytes of empty entries
would take six seconds. Source: measured on a 2-core machine, 2026-11."""

HEADER_GUESS_BYTES = 16 << 10
"""Bytes of the first read from a file. A longer header costs a second read of exactly the rest. This covers 130
tensors, a shard of a dense model. With 1 MiB, 1,000 members would read 42 GB for 40 files."""

_INT64_MAX = 2**63 - 1
_METADATA = "__metadata__"
# A header below this size cannot exceed the limits by much, so its entries are not counted before decoding.
_LARGE_BYTES = 16 * MIB


class Header(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The checked content of one file's header."""

    tensors: TensorTable
    """The tensors in file order. `file_index` is 0, and offsets count from the start of the file."""
    metadata: Mapping[str, str]
    data_offset: int
    """Offset of the first body in bytes."""
    nbytes: int
    digest: bytes
    """BLAKE3 of the JSON. For a GGUF file, of all bytes before the bodies."""
    read_nbytes: int = 0
    """Bytes that were read from the source for this header."""


# Exclude these structs from garbage collection. A header may have 60,000 of them, and they form no cycles.
class _DataOffsets(msgspec.Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    start: int
    stop: int


# Accept unknown fields, as other readers do. A header with unknown fields is walked to find duplicate keys.
class _TensorEntry(msgspec.Struct, gc=False):
    dtype: DType
    shape: tuple[int, ...]
    data_offsets: _DataOffsets


class _MetadataOnly(msgspec.Struct, rename={"value": _METADATA}):
    value: msgspec.Raw = msgspec.Raw(b"null")


class _Index(msgspec.Struct):
    weight_map: msgspec.Raw


_ENTRY = msgspec.json.Decoder(_TensorEntry)
_ENTRIES = msgspec.json.Decoder(dict[str, _TensorEntry | None])
_RAW_ENTRIES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_METADATA_ONLY = msgspec.json.Decoder(_MetadataOnly)
_STRINGS = msgspec.json.Decoder(dict[str, str])
_INDEX = msgspec.json.Decoder(_Index)

_COPY_AGAIN = "the file is incomplete, so copy it again"
_SIGNATURE_BYTES = 32

# Writers usually put a small `__metadata__` without escapes first. Finding it saves a pass over the header.
_LEADING_METADATA = re.compile(rb'\{\s*"__metadata__"\s*:\s*(\{[^{}\\]{0,65536}\})\s*[,}]')


@contextmanager
def format_hint(
    hint: str = "the file is damaged, or its writer does not keep to the format: copy it again",
) -> Iterator[None]:
    """Add `hint` to a FormatError that the block raises, unless the error already has a hint."""
    try:
        yield
    except FormatError as error:
        error.hint = error.hint or hint
        raise


@format_hint()
def read_header(source: Source, *, guess_bytes: int = HEADER_GUESS_BYTES, first: bytearray | None = None) -> Header:
    """Read and check a file's header, in one read if it fits in `guess_bytes`, otherwise in two.

    Args:
        first: the file's first bytes, if the caller has read them.

    Raises:
        FormatError: the header is malformed or inconsistent.
        SourceTruncated: the file ends before the bodies that its header describes.
    """
    if source.nbytes < 8:
        message = f"a file of {source.nbytes} bytes is not a safetensors file, which has at least 8"
        raise FormatError(message, uri=source.uri, hint=_COPY_AGAIN)
    if first is None:
        first = bytearray(min(max(guess_bytes, 8), source.nbytes))
        source.readv(0, [memoryview(first)])
    header_bytes = int.from_bytes(first[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise _other_format(bytes(first[:_SIGNATURE_BYTES]), header_bytes, source)
    stop = 8 + header_bytes
    if stop > source.nbytes:
        message = f"header of {header_bytes} bytes in a file of {source.nbytes}"
        raise FormatError(message, uri=source.uri, hint=_COPY_AGAIN)
    if stop > len(first):
        rest = bytearray(stop - len(first))
        source.readv(len(first), [memoryview(rest)])
        first += rest
    header = parse_header(bytes(memoryview(first)[8:stop]), file_nbytes=source.nbytes, uri=source.uri)
    return msgspec.structs.replace(header, read_nbytes=len(first))


def _other_format(first: bytes, header_bytes: int, source: Source) -> FormatError:
    if first.startswith(b"version https://git-lfs"):
        hint = "get the file itself: run `git lfs pull` in its repository, or download it"
        message = f"this is a Git LFS pointer ({source.nbytes} bytes), not the weights"
        return FormatError(message, uri=source.uri, hint=hint)
    would_be = f"the header has {header_bytes} bytes, but the format allows {MAX_HEADER_BYTES}"
    message = f"not a safetensors file: it begins with {first[:8]!r} ({would_be})"
    return FormatError(message, uri=source.uri, hint="pass a safetensors file, or a GGUF file named *.gguf")


def parse_header(raw: bytes, *, file_nbytes: int, uri: str) -> Header:
    """Check a header's JSON, without the length field, against the file size. Raises FormatError or SourceTruncated."""
    if len(raw) > MAX_HEADER_BYTES:
        raise FormatError(f"the header has {len(raw)} bytes, but the format allows {MAX_HEADER_BYTES}", uri=uri)
    if not raw.startswith(b"{"):
        raise FormatError("the header does not begin with '{'", uri=uri)
    _check_utf8(raw, uri=uri)
    metadata, rest = _split_metadata(raw, uri)
    entries = _decode_entries(rest, uri)
    data_offset = 8 + len(raw)
    tensors = _table(entries, data_offset=data_offset, data_nbytes=file_nbytes - data_offset, uri=uri)
    digest = blake3(raw).digest()
    return Header(tensors=tensors, metadata=metadata, data_offset=data_offset, nbytes=file_nbytes, digest=digest)


def _split_metadata(raw: bytes, uri: str) -> tuple[dict[str, str], bytes]:
    leading = _LEADING_METADATA.match(raw)
    # If the number of quotes is odd, the matched closing brace is inside a string.
    if leading is not None and leading[1].count(b'"') % 2 == 0:
        value, rest = leading[1], raw[: leading.start(1)] + b"null" + raw[leading.end(1) :]
    else:
        # The key may be escaped (`\u005f`), so search for it only in a header without backslashes.
        if b"__metadata__" not in raw and b"\\" not in raw:
            return {}, raw
        raw_value = _decode(_METADATA_ONLY, raw, uri=uri).value
        if bytes(raw_value) == b"null":
            return {}, raw
        value, rest = bytes(raw_value), _blank(raw, raw_value)
    if num_strings(value) > 2 * MAX_METADATA_KEYS:
        raise FormatError(f"{_METADATA} has more than {MAX_METADATA_KEYS} entries", uri=uri)
    try:
        metadata = _STRINGS.decode(value)
    except msgspec.DecodeError as error:
        raise FormatError(f"{_METADATA} is not an object of strings: {error}", uri=uri) from error
    if num_strings(value) != 2 * len(metadata):
        raise FormatError(f"{_METADATA} has a duplicate key", uri=uri)
    return metadata, rest


def _decode_entries(rest: bytes, uri: str) -> dict[str, _TensorEntry]:
    if len(rest) > _LARGE_BYTES:
        # Python objects for all entries of a hostile header would take gigabytes.
        objects = _count_byte(rest, b"{")
        if objects > MAX_TENSORS + 1:
            raise FormatError(f"the header has {objects} objects, but may list at most {MAX_TENSORS} tensors", uri=uri)
        if _count_byte(rest, b",") > (objects + 1) * (MAX_RANK + 4):
            raise FormatError(f"the header has lists that are too long for tensors of rank {MAX_RANK}", uri=uri)
    try:
        entries = _ENTRIES.decode(rest)
    except RecursionError as error:
        raise FormatError("the JSON is nested too deeply", uri=uri) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # msgspec does not say which key failed, so decode a bad header again, entry by entry.
        _raise_for_entry(rest, error, uri)
    has_metadata = entries.pop(_METADATA, entries) is None
    # Each tensor has five strings: its name, three keys and its dtype.
    if num_strings(rest) != 5 * len(entries) + has_metadata:
        _refuse_duplicates(rest, uri=uri)
    return entries  # type: ignore[return-value]  # a None that remains fails in _table, with the tensor's name


def _raise_for_entry(rest: bytes, error: Exception, uri: str) -> NoReturn:
    for name, raw in _decode(_RAW_ENTRIES, rest, uri=uri).items():
        if name == _METADATA and bytes(raw) == b"null":
            continue
        try:
            _ENTRY.decode(raw)
        except msgspec.DecodeError as fault:
            raise FormatError(f"invalid entry: {fault}", uri=uri, tensor=clip(name)) from fault
    raise FormatError(f"invalid entry with a duplicate key: {error}", uri=uri) from error


class _NbytesByKind(dict[tuple[DType, tuple[int, ...]], int]):
    def __missing__(self, kind: tuple[DType, tuple[int, ...]]) -> int:
        self[kind] = -1 if _shape_fault(*kind) else bits_to_bytes(math.prod(kind[1]), kind[0])
        return self[kind]


def _shape_fault(dtype: DType, shape: tuple[int, ...]) -> str | None:
    if len(shape) > MAX_RANK:
        return f"rank {len(shape)}; at most {MAX_RANK} dimensions are read"
    if shape and not 0 <= min(shape) <= max(shape) <= _INT64_MAX:
        return f"dimension out of range in shape {clip(list(shape))}"
    if math.prod(d for d in shape if d) * dtype.bits > _INT64_MAX:
        return f"shape {clip(list(shape))} of {dtype} overflows 64 bits"
    if math.prod(shape) * dtype.bits % 8:
        return f"shape {clip(list(shape))} of {dtype} does not fill whole bytes"
    # Readers pack two F4 values along the last dimension into one element.
    if dtype is DType.F4 and shape[-1] % 2:
        return f"shape {clip(list(shape))} of {dtype}: the last dimension is not divisible by 2"
    return None


def table_nbytes(dtypes: Sequence[DType], shapes: Sequence[tuple[int, ...]]) -> I64:
    """Return the size of each tensor in bytes, or -1 if no tensor can have its dtype and shape."""
    kinds = _NbytesByKind()
    return np.fromiter(map(kinds.__getitem__, zip(dtypes, shapes, strict=True)), np.int64, len(dtypes))


def _table(entries: dict[str, _TensorEntry], *, data_offset: int, data_nbytes: int, uri: str) -> TensorTable:
    # Check columns with numpy, because a Python loop over 60,000 entries would take longer than decoding.
    names = tuple(entries)
    try:
        dtypes = [entry.dtype for entry in entries.values()]
    except AttributeError:
        # A null entry has no dtype. Catching the error avoids searching valid headers.
        name = next(name for name, entry in entries.items() if entry is None)
        raise FormatError("the entry is null", uri=uri, tensor=clip(name)) from None
    shapes = [entry.shape for entry in entries.values()]
    nbytes = table_nbytes(dtypes, shapes)
    if nbytes.size and nbytes.min() < 0:
        row = int(nbytes.argmin())
        raise FormatError(str(_shape_fault(dtypes[row], shapes[row])), uri=uri, tensor=clip(names[row]))
    start, stop = _offsets(entries, uri)
    wrong = np.flatnonzero((start < 0) | (stop - start != nbytes))
    if wrong.size:
        row = int(wrong[0])
        # `wrong` also contains rows whose stop offset is below the start offset.
        span, kind = f"[{start[row]}, {stop[row]}]", f"{dtypes[row]} {clip(list(shapes[row]))}"
        fault = f"data_offsets are {span}, but {kind} has {nbytes[row]} bytes"
        raise FormatError(fault, uri=uri, tensor=clip(names[row]))
    table = TensorTable(
        names=names,
        dtypes=tuple(dtypes),
        shapes=tuple(shapes),
        file_index=np.zeros(len(names), np.int64),
        offset=start,
        nbytes=nbytes,
    )
    # All known writers write the entries in file order, so sorting is rarely needed.
    if bool(np.any(start[1:] < start[:-1])) or bool(np.any(stop[1:] < stop[:-1])):
        table = table.take(np.lexsort((stop, start)).tolist())
    end = _check_contiguous(table, uri)
    if end > data_nbytes:
        raise SourceTruncated(
            f"the file has {data_offset + data_nbytes} bytes, but its header describes {data_offset + end}",
            uri=uri,
            byte_range=(data_offset + data_nbytes, data_offset + end),
            hint=_COPY_AGAIN,
        )
    if end < data_nbytes:
        raise FormatError(f"the file has {data_nbytes - end} bytes after the last tensor", uri=uri)
    np.add(table.offset, data_offset, out=table.offset)
    return table


def _offsets(entries: dict[str, _TensorEntry], uri: str) -> tuple[I64, I64]:
    spans = [entry.data_offsets for entry in entries.values()]
    try:
        return (
            np.fromiter([span.start for span in spans], np.int64, len(spans)),
            np.fromiter([span.stop for span in spans], np.int64, len(spans)),
        )
    except OverflowError:
        # JSON integers can be too large for numpy.
        row = next(i for i, span in enumerate(spans) if max(abs(span.start), abs(span.stop)) > _INT64_MAX)
        raise FormatError("data_offsets overflow 64 bits", uri=uri, tensor=clip(list(entries)[row])) from None


def _check_contiguous(table: TensorTable, uri: str) -> int:
    stop = table.offset + table.nbytes
    expected = np.concatenate((np.zeros(1, np.int64), stop))
    wrong = np.flatnonzero(table.offset != expected[:-1])
    if wrong.size:
        row = int(wrong[0])
        begins, expects = int(table.offset[row]), int(expected[row])
        fault = f"there is a gap of {begins - expects} bytes before this tensor"
        if begins < expects:
            fault = f"the tensor overlaps {clip(table.names[row - 1])!r} by {expects - begins} bytes"
        raise FormatError(fault, uri=uri, tensor=clip(table.names[row]))
    return int(expected[-1])


def parse_index(raw: bytes, *, uri: str) -> dict[str, str]:
    """Return the `weight_map` of a `*.safetensors.index.json`: the shard file of each tensor, relative to the index.

    Raises FormatError if the index is malformed, contains a duplicate name, or names a shard outside its directory.
    """
    if len(raw) > MAX_HEADER_BYTES:
        raise FormatError(f"the index has {len(raw)} bytes, but may have at most {MAX_HEADER_BYTES}", uri=uri)
    # Accept NaN, which `total_size` may be, and a byte order mark.
    raw = strict(raw)
    _check_utf8(raw, uri=uri)
    raw_map = _decode(_INDEX, raw, uri=uri).weight_map
    weight_map = _decode(_STRINGS, raw_map, uri=uri)
    if num_strings(bytes(raw_map)) != 2 * len(weight_map):
        raise FormatError("weight_map names a tensor twice", uri=uri)
    # Walk the rest of the index, which is small, to find duplicate keys.
    _refuse_duplicates(_blank(raw, raw_map), uri=uri)
    for shard in dict.fromkeys(weight_map.values()):
        if not _is_below(shard):
            tensor = next(name for name, at in weight_map.items() if at == shard)
            raise FormatError(f"shard {clip(shard)!r} is outside the index's directory", uri=uri, tensor=clip(tensor))
    return weight_map


def _is_below(shard: str) -> bool:
    parts = PurePosixPath(shard).parts
    # Backslash and colon are separators on other systems, and NUL terminates a name in C.
    hostile = "\\" in shard or "\0" in shard or ":" in shard
    return bool(parts) and not hostile and parts[0] != "/" and ".." not in parts


def require_name(name: str, *, uri: str | None = None) -> None:
    """Raise PlanError for a name that no tensor of the format can have."""
    hint = "rename the tensor"
    if name == _METADATA:
        message = f"{_METADATA!r} is reserved by the format and cannot be the name of a tensor"
        raise PlanError(message, uri=uri, tensor=name, hint=hint)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        message = f"the name of a tensor is not valid Unicode: {error.reason} at character {error.start}"
        raise PlanError(message, uri=uri, tensor=clip(name), hint=hint) from error


def encode_header(
    entries: Iterable[tuple[str, DType, Sequence[int], int, int]], metadata: Mapping[str, str] | None, *, uri: str
) -> bytes:
    """Return the bytes before a file's bodies: the length and the JSON, padded so that the bodies are aligned.

    Raises FormatError if the bytes of a tensor do not match its shape, and PlanError for an invalid or duplicate name.

    Args:
        entries: name, dtype, shape, start and stop of each body, in bytes from the first body.
    """
    header: dict[str, object] = {} if metadata is None else {_METADATA: dict(metadata)}
    for name, dtype, shape, start, stop in entries:
        require_name(name, uri=uri)
        if name in header:
            raise PlanError("two tensors in the file have the same name", uri=uri, tensor=clip(name))
        fault = _shape_fault(dtype, tuple(shape))
        if fault is not None or bits_to_bytes(math.prod(shape), dtype) != stop - start:
            raise FormatError(fault or f"{stop - start} bytes for {dtype} {list(shape)}", uri=uri, tensor=name)
        header[name] = {"dtype": dtype.value, "shape": list(shape), "data_offsets": [start, stop]}
    raw = msgspec.json.encode(header)
    # The format pads with spaces. An alignment of 8 bytes is sufficient for all dtypes.
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER_BYTES:
        raise FormatError(f"the header has {len(raw)} bytes, but the format allows {MAX_HEADER_BYTES}", uri=uri)
    return len(raw).to_bytes(8, "little") + raw


# Of two equal keys, msgspec keeps the last. If a document has as many strings as its decoded value, it has no duplicate
# key. Otherwise the pairs are walked, which takes five times as long as decoding.

# Maximum size of a document that is walked. Python's json walks about 50 MB/s, and a hostile header must be rejected in
# about a second. Source: measured on a 2-core machine, 2026-11.
_WALK_LIMIT_BYTES = 32 * MIB


def _decode(decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw, *, uri: str) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"malformed JSON: {error}", uri=uri) from error
    except RecursionError as error:
        raise FormatError("the JSON is nested too deeply", uri=uri) from error


def _check_utf8(raw: bytes, *, uri: str) -> None:
    """Raise FormatError unless all of `raw` is UTF-8. msgspec checks only the strings that it keeps."""
    if raw.isascii():
        return
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"not UTF-8: {error.reason} at byte {error.start}", uri=uri) from error


def _count_byte(raw: bytes, byte: bytes) -> int:
    # If the byte is frequent, numpy is five times faster than `bytes.count`.
    return int(np.count_nonzero(np.frombuffer(raw, np.uint8) == byte[0]))


def num_strings(raw: bytes) -> int:
    """Return the number of strings in valid JSON, including keys."""
    # JSON has backslashes only inside strings. After escapes are removed, every quote opens or closes a string.
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    return _count_byte(raw, b'"') // 2


def _refuse_duplicates(raw: bytes, *, uri: str) -> None:
    if len(raw) > _WALK_LIMIT_BYTES:
        raise FormatError(f"the JSON of {len(raw)} bytes has duplicate keys, nulls or unknown fields", uri=uri)

    def unique(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise FormatError("duplicate JSON key", uri=uri, tensor=clip(key))
            seen.add(key)

    try:
        json.loads(raw, object_pairs_hook=unique)
    except RecursionError as error:
        raise FormatError("the JSON is nested too deeply", uri=uri) from error
    except ValueError as error:
        raise FormatError(f"malformed JSON: {error}", uri=uri) from error


def _blank(raw: bytes, value: msgspec.Raw) -> bytes:
    # Find the value by its address, because the document may contain the same bytes twice.
    start = _address(memoryview(value)) - _address(memoryview(raw))
    return raw[:start] + b"null" + raw[start + len(memoryview(value)) :]


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def clip(value: object) -> str:
    """Return at most 200 characters of a value for a message. A hostile name may be a hundred megabytes long."""
    text = value[:201] if isinstance(value, str) else str(value[:32] if isinstance(value, list) else value)
    return text if len(text) <= 200 else text[:200] + "..."
