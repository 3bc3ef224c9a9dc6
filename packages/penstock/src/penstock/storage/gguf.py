"""The GGUF format: read headers of versions 2 and 3, which are little-endian.

Tensors of plain types receive the matching safetensors dtype. A quantised tensor becomes a U8 tensor that holds
the file's blocks, with the bytes of a row as its last dim. The metadata key `GGUF.types` states the quantised types.

The reader is as strict as llama.cpp. The reader checks every count and length against the file's size before it
allocates memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from penstock.errors import FormatError, SourceTruncated
from penstock.storage.safetensors import MAX_HEADER_BYTES, MAX_METADATA_KEYS, MAX_TENSORS, Header, clip, table_nbytes
from penstock.storage.source import Source
from penstock.types import MIB, DType, Manifest, TensorTable

TYPES = "GGUF.types"
"""Key in the metadata of a `FileEntry` for the types of its quantised tensors, as a JSON object from name to type."""

_RESERVED_PREFIX = "GGUF."
_VERSIONS = (2, 3)
ALIGNMENT = 32
"""Alignment of bodies in written files, and in files that do not state another alignment."""
# Maximum length of a key, set by the format.
_MAX_NAME_BYTES = 65_535
# Source: GGML_MAX_DIMS.
_MAX_DIMS = 4
# Limit the count, as skipping a string takes 0.3 us. The largest tokenizers have 260,000 tokens and 510,000 merges.
_MAX_STRINGS = 1 << 21
# The manifest's metadata only describes values beyond these limits, because a tokenizer takes megabytes.
_MAX_TEXT_BYTES = 64 << 10
_MAX_LIST = 64

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_INT64_MAX = 2**63 - 1
# Struct formats of a tensor's dims, type and offset, indexed by rank.
_INFOS = tuple(struct.Struct(f"<{rank}QIQ") for rank in range(_MAX_DIMS + 1))

_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_VALUE_TYPES = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32"),
    *("bool", "string", "array", "uint64", "int64", "float64"),
)
_INTEGERS = {0, 1, 2, 3, 4, 5, 10, 11}


class BlockType(msgspec.Struct, frozen=True, kw_only=True):
    """A quantised type that stores every `elements` consecutive values of a row in `nbytes` bytes."""

    name: str
    elements: int
    nbytes: int


class GgufBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The type and shape of a quantised tensor, in elements."""

    type: str
    shape: tuple[int, ...]


PLAIN: Mapping[int, DType] = {
    0: DType.F32,
    1: DType.F16,
    24: DType.I8,
    25: DType.I16,
    26: DType.I32,
    27: DType.I64,
    28: DType.F64,
    30: DType.BF16,
}
"""Types that safetensors supports too, by number. Source: enum ggml_type."""

BLOCK_TYPES: Mapping[int, BlockType] = {
    number: BlockType(name=name, elements=elements, nbytes=nbytes)
    for number, name, elements, nbytes in (
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (29, "IQ1_M", 256, 56),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}
"""Quantised types by number. Source: enum ggml_type, and `gguf.constants` of gguf 0.19. ggml itself uses 36 bytes for
Q8_1 and never writes the type to files."""

BY_NAME: Mapping[str, BlockType] = {kind.name: kind for kind in BLOCK_TYPES.values()}


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of a file's metadata."""

    type: int
    value: Any
    """A bool, int, float or str. An array is (element type, count, list), without the list if it is long."""
    raw: bytes
    """Key, type and value as encoded in the file."""


class GgufHeader(Header, frozen=True, eq=False, kw_only=True):
    """The checked header of one GGUF file."""

    fields: Mapping[str, Field]
    alignment: int


class _Reader:
    def __init__(self, source: Source, first: bytearray) -> None:
        self.data = first
        self.at = 0
        self._source = source
        self.nbytes = source.nbytes
        self.uri = source.uri

    def need(self, stop: int) -> None:
        if stop <= len(self.data):
            return
        if stop > self.nbytes:
            raise SourceTruncated(
                "the file ends inside its header",
                uri=self.uri,
                byte_range=(self.nbytes, min(stop, _INT64_MAX)),
                hint="the file is incomplete, so copy it again",
            )
        if stop > MAX_HEADER_BYTES:
            raise FormatError(f"the header has more than {MAX_HEADER_BYTES} bytes", uri=self.uri)
        target = min(max(stop, 4 * len(self.data), MIB), self.nbytes, MAX_HEADER_BYTES)
        more = bytearray(target - len(self.data))
        self._source.readv(len(self.data), [memoryview(more)])
        # Extend in place, because `skip_strings` and `_tensor_infos` keep a reference.
        self.data += more

    def take(self, count: int) -> bytes:
        start, stop = self.at, self.at + count
        if stop > len(self.data):
            self.need(stop)
        self.at = stop
        return bytes(self.data[start:stop])

    def number(self, form: struct.Struct) -> Any:
        at = self.at
        if at + form.size > len(self.data):
            self.need(at + form.size)
        self.at = at + form.size
        return form.unpack_from(self.data, at)[0]

    def text(self, what: str, max_bytes: int) -> str:
        nbytes = self.number(_U64)
        if nbytes > max_bytes:
            raise FormatError(f"{what} has {nbytes} bytes, above the limit of {max_bytes}", uri=self.uri)
        try:
            return self.take(nbytes).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{what} is not UTF-8: {error.reason} at byte {error.start}", uri=self.uri) from error

    def skip_strings(self, count: int) -> None:
        # Local names are faster. Tokenizers have half a million strings, and this loop takes most of the time to
        # open a file.
        at, data, here, unpack = self.at, self.data, len(self.data), _U64.unpack_from
        for _ in range(count):
            if at + 8 > here:
                self.need(at + 8)
                here = len(data)
            at += 8 + unpack(data, at)[0]
        self.need(at)
        self.at = at

    def check_fits(self, count: int, each: int, what: str) -> None:
        if count * each > self.nbytes - self.at:
            raise FormatError(f"{count} {what} cannot fit in a file of {self.nbytes} bytes", uri=self.uri)


def read_header(source: Source, first: bytearray) -> GgufHeader:
    """Read and check a header. `first` begins with the magic. Raises FormatError or SourceTruncated."""
    reader = _Reader(source, first)
    uri = source.uri
    reader.take(4)
    version = reader.number(_U32)
    if version & 0xFFFF == 0 and version:
        hint = "convert it to little-endian: gguf_convert_endian.py of the gguf package"
        raise FormatError("big-endian GGUF files are not supported", uri=uri, hint=hint)
    if version not in _VERSIONS:
        raise FormatError(f"GGUF version {version} is not supported, only versions 2 and 3", uri=uri)
    num_tensors, num_fields = reader.number(_U64), reader.number(_U64)
    if num_tensors > MAX_TENSORS:
        raise FormatError(f"the file has {num_tensors} tensors, above the limit of {MAX_TENSORS}", uri=uri)
    if num_fields > MAX_METADATA_KEYS:
        raise FormatError(f"the metadata has {num_fields} entries, above the limit of {MAX_METADATA_KEYS}", uri=uri)
    # A metadata entry has at least 13 bytes, and a tensor entry without dims has 24.
    reader.check_fits(num_fields, 13, "entries of metadata")
    reader.check_fits(num_tensors, 24, "tensors")
    fields = _fields(reader, num_fields)
    alignment = _alignment(fields, uri)
    names, numbers, dims, offsets = _tensor_infos(reader, num_tensors)
    header_bytes = reader.at
    data_offset = -(-header_bytes // alignment) * alignment
    # A file without tensors may end without padding.
    if num_tensors or data_offset <= source.nbytes:
        reader.need(data_offset)
    table = _table(
        names, numbers, dims, offsets, alignment=alignment, data_offset=data_offset, nbytes=source.nbytes, uri=uri
    )
    types = {name: BLOCK_TYPES[n].name for name, n in zip(names, numbers, strict=True) if n in BLOCK_TYPES}
    metadata = {f"{_RESERVED_PREFIX}version": str(version)} | {key: _text(field) for key, field in fields.items()}
    if types:
        metadata[TYPES] = json.dumps(types, ensure_ascii=False)
    return GgufHeader(
        tensors=table,
        metadata=metadata,
        data_offset=data_offset,
        nbytes=source.nbytes,
        digest=blake3(memoryview(reader.data)[:header_bytes]).digest(),
        read_nbytes=len(reader.data),
        fields=fields,
        alignment=alignment,
    )


def _fields(reader: _Reader, count: int) -> dict[str, Field]:
    fields: dict[str, Field] = {}
    for _ in range(count):
        start = reader.at
        key = reader.text("a key of the metadata", _MAX_NAME_BYTES)
        if key in fields:
            raise FormatError(f"the metadata has a duplicate key {clip(key)!r}", uri=reader.uri)
        if key.startswith(_RESERVED_PREFIX):
            raise FormatError(f"metadata key {clip(key)!r} has a prefix that is reserved for readers", uri=reader.uri)
        kind = reader.number(_U32)
        if kind == _ARRAY:
            value: Any = _array(reader, key)
        elif kind == _STRING:
            value = reader.text(f"the value of {clip(key)!r}", MAX_HEADER_BYTES)
        elif kind in _SCALARS:
            value = reader.number(_SCALARS[kind])
        else:
            raise FormatError(f"metadata key {clip(key)!r} has the unknown type {kind}", uri=reader.uri)
        fields[key] = Field(type=kind, value=value, raw=bytes(memoryview(reader.data)[start : reader.at]))
    return fields


def _array(reader: _Reader, key: str) -> tuple[int, int, list[Any] | None]:
    kind, count = reader.number(_U32), reader.number(_U64)
    what = f"elements of {clip(key)!r}"
    if kind == _STRING:
        reader.check_fits(count, 8, what)
        if count > _MAX_STRINGS:
            raise FormatError(f"{count} {what} are above the limit of {_MAX_STRINGS} strings", uri=reader.uri)
        if count > _MAX_LIST:
            reader.skip_strings(count)
            return kind, count, None
        return kind, count, [reader.text(what, MAX_HEADER_BYTES) for _ in range(count)]
    if kind not in _SCALARS:
        named = "arrays, which is not supported" if kind == _ARRAY else f"the unknown type {kind}"
        raise FormatError(f"metadata key {clip(key)!r} is an array of {named}", uri=reader.uri)
    form = _SCALARS[kind]
    reader.check_fits(count, form.size, what)
    reader.need(reader.at + count * form.size)
    values = None
    if count <= _MAX_LIST:
        values = [form.unpack_from(reader.data, reader.at + i * form.size)[0] for i in range(count)]
    reader.at += count * form.size
    return kind, count, values


def _text(field: Field) -> str:
    value = field.value
    if field.type == _ARRAY:
        kind, count, values = value
        text = None if values is None else json.dumps(values, ensure_ascii=False)
        return text if text is not None and len(text) <= _MAX_TEXT_BYTES else f"{count} x {_VALUE_TYPES[kind]}"
    text = value if field.type == _STRING else json.dumps(value)
    return text if len(text) <= _MAX_TEXT_BYTES else f"string of {len(text)} characters"


def _alignment(fields: Mapping[str, Field], uri: str) -> int:
    field = fields.get("general.alignment")
    if field is None:
        return ALIGNMENT
    if field.type != 4 or field.value < 1 or field.value & (field.value - 1) or field.value > MIB:
        message = f"general.alignment {clip(field.value)} is not a uint32 that is a power of two up to {MIB}"
        raise FormatError(message, uri=uri)
    return int(field.value)


def _tensor_infos(reader: _Reader, count: int) -> tuple[tuple[str, ...], list[int], list[tuple[int, ...]], list[int]]:
    names: dict[str, None] = {}
    numbers, shapes, offsets = [], [], []
    data = reader.data
    for _ in range(count):
        name = reader.text("the name of a tensor", _MAX_NAME_BYTES)
        if name in names:
            raise FormatError("the header lists this tensor twice", uri=reader.uri, tensor=clip(name))
        names[name] = None
        at = reader.at
        reader.need(at + 16)
        (rank,) = _U32.unpack_from(data, at)
        if rank > _MAX_DIMS:
            fault = f"rank {rank}; the format has at most {_MAX_DIMS} dims"
            raise FormatError(fault, uri=reader.uri, tensor=clip(name))
        form = _INFOS[rank]
        reader.need(at + 4 + form.size)
        *dims, number, offset = form.unpack_from(data, at + 4)
        # The format stores the innermost dimension first.
        shapes.append(tuple(reversed(dims)))
        numbers.append(number)
        offsets.append(offset)
        reader.at = at + 4 + form.size
    return tuple(names), numbers, shapes, offsets


def _table(
    names: tuple[str, ...],
    numbers: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    offsets: Sequence[int],
    *,
    alignment: int,
    data_offset: int,
    nbytes: int,
    uri: str,
) -> TensorTable:
    dtypes, stored = [], []
    for name, number, shape in zip(names, numbers, shapes, strict=True):
        if number not in PLAIN and number not in BLOCK_TYPES:
            hint = "ggml may have removed this type, so create the file again with a current llama.cpp"
            raise FormatError(f"unknown tensor type {number}", uri=uri, tensor=clip(name), hint=hint)
        if (kind := BLOCK_TYPES.get(number)) is None:
            dtypes.append(PLAIN[number])
            stored.append(shape)
            continue
        if not shape or shape[-1] % kind.elements:
            fault = f"shape {list(shape)} of {kind.name}: rows must be multiples of {kind.elements} elements"
            raise FormatError(fault, uri=uri, tensor=clip(name))
        dtypes.append(DType.U8)
        stored.append((*shape[:-1], shape[-1] // kind.elements * kind.nbytes))
    sizes = table_nbytes(dtypes, stored)
    if sizes.size and sizes.min() < 0:
        row = int(sizes.argmin())
        raise FormatError(f"impossible shape {list(shapes[row])}", uri=uri, tensor=clip(names[row]))
    data_nbytes = max(nbytes - data_offset, 0)
    # Check each size first, so that their sum cannot overflow.
    if sizes.size and sizes.max() > data_nbytes:
        row = int(sizes.argmax())
        raise SourceTruncated(
            f"the tensor has {sizes[row]} bytes, but the file has only {data_nbytes} after its header",
            uri=uri,
            tensor=clip(names[row]),
            byte_range=(nbytes, data_offset + int(sizes[row])),
        )
    padded = -(-sizes // alignment) * alignment
    start = np.cumsum(padded) - padded
    # Compare Python integers, because an offset may need 64 unsigned bits.
    if start.tolist() != list(offsets):
        row = next(row for row, (a, b) in enumerate(zip(start.tolist(), offsets, strict=True)) if a != b)
        fault = f"offset {offsets[row]}, but the tensors before it end at {start[row]}, padded to {alignment}"
        raise FormatError(fault, uri=uri, tensor=clip(names[row]))
    if sizes.size and int((start + sizes).max()) > data_nbytes:
        raise SourceTruncated(
            "the file ends before the last tensor that its header describes",
            uri=uri,
            byte_range=(nbytes, data_offset + int((start + sizes).max())),
            hint="the file is incomplete, so copy it again",
        )
    return TensorTable(
        names=names,
        dtypes=tuple(dtypes),
        shapes=tuple(stored),
        file_index=np.zeros(len(names), np.int64),
        offset=start + data_offset,
        nbytes=sizes,
    )


def check_parts(headers: Sequence[tuple[str, Header]], uri: str) -> None:
    """Raise FormatError unless a split model has each of its parts exactly once, and all of its tensors."""
    parts = [(name, header) for name, header in headers if isinstance(header, GgufHeader)]
    counts = {_part(header, "split.count", name, uri) for name, header in parts}
    if not counts or counts == {0} or (counts == {1} and len(parts) == 1):
        return
    hint = "pass the first file of the model, NAME-00001-of-N.gguf, and keep all parts in its directory"
    if len(counts) > 1 or len(parts) != max(counts):
        name, header = next((n, h) for n, h in parts if _part(h, "split.count", n, uri))
        count = _part(header, "split.count", name, uri)
        message = f"{clip(name)!r} is one of {count} parts of a model, but {len(headers)} files were opened"
        raise FormatError(message, uri=uri, hint=hint)
    seen: dict[int, str] = {}
    for name, header in parts:
        number = _part(header, "split.no", name, uri)
        if number in seen or not 0 <= number < len(parts):
            other = f", and so is {clip(seen[number])!r}" if number in seen else ""
            raise FormatError(
                f"{clip(name)!r} is part {number + 1} of {len(parts)} per its header{other}", uri=uri, hint=hint
            )
        seen[number] = name
        stated = _part(header, "split.tensors.count", name, uri)
        actual = sum(len(h.tensors) for _, h in parts)
        if stated not in {0, actual}:
            message = f"{clip(name)!r} says that the model has {stated} tensors, but its parts have {actual}"
            raise FormatError(message, uri=uri, hint="the files belong to different models: copy them again")


def _part(header: GgufHeader, key: str, name: str, uri: str) -> int:
    field = header.fields.get(key)
    if field is None:
        return 0
    if field.type not in _INTEGERS:
        raise FormatError(f"{key} of {clip(name)!r} is not an integer", uri=uri)
    return int(field.value)


def blocks_of(manifest: Manifest) -> dict[str, GgufBlocks]:
    """Return the type and the shape in elements of every quantised GGUF tensor, by name."""
    types = [
        {name: BY_NAME[kind] for name, kind in json.loads(file.metadata.get(TYPES, "{}")).items()}
        for file in manifest.files
    ]
    table = manifest.tensors
    found: dict[str, GgufBlocks] = {}
    for name, shape, file in zip(table.names, table.shapes, table.file_index.tolist(), strict=True):
        if (kind := types[file].get(name)) is not None:
            elements = shape[-1] // kind.nbytes * kind.elements
            found[name] = GgufBlocks(type=kind.name, shape=(*shape[:-1], elements))
    return found
