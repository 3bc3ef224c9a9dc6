"""The safetensors header parser and writer on valid files, compared with the safetensors library."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tensor_file import write_file

import penstock
from penstock.errors import ConfigError, DestinationError, FormatError, PlanError, SourceTruncated
from penstock.storage import MemorySource, is_remote, local_path
from penstock.storage.safetensors import Header, encode_header, num_strings, parse_index, read_header
from penstock.types import DType


def file_of(header: Mapping[str, object] | bytes, body: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + body


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def header_of(data: bytes) -> Header:
    return read_header(MemorySource(data))


def rows_of(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    table = header_of(data).tensors
    places = zip(table.offset.tolist(), table.nbytes.tolist(), strict=True)
    bodies = [data[offset : offset + nbytes] for offset, nbytes in places]
    return {
        n: (d.value, list(s), b) for n, d, s, b in zip(table.names, table.dtypes, table.shapes, bodies, strict=True)
    }


def library_rows(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    return {name: (row["dtype"], row["shape"], bytes(row["data"])) for name, row in safetensors.deserialize(data)}


def test_header_columns_have_absolute_offsets() -> None:
    body = bytes(range(14))
    data = file_of({"late": entry("U8", [2], 12, 14), "early": entry("F32", [3], 0, 12)}, body)
    header = header_of(data)
    assert header.tensors.names == ("early", "late")
    assert header.tensors.dtypes == (DType.F32, DType.U8)
    assert header.tensors.shapes == ((3,), (2,))
    assert header.tensors.offset.tolist() == [header.data_offset, header.data_offset + 12]
    assert header.tensors.nbytes.tolist() == [12, 2]
    assert header.tensors.file_index.tolist() == [0, 0]
    assert header.nbytes == len(data) and data[header.data_offset :] == body


@pytest.mark.parametrize("dtype", list(DType))
def test_every_dtype_matches_safetensors_library(dtype: DType, tmp_path: Path) -> None:
    tensors = {
        "matrix": (dtype, (3, 8), bytes(range(3 * dtype.bits))),
        "empty": (dtype, (0, 6), b""),
        "vector": (dtype, (16,), bytes(2 * dtype.bits)),
    }
    if dtype.bits >= 8:
        tensors["scalar"] = (dtype, (), bytes(dtype.bits // 8))
    write_file(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    data = (tmp_path / "x.safetensors").read_bytes()
    assert rows_of(data) == library_rows(data)
    assert {n: (d.value, list(s), bytes(b)) for n, (d, s, b) in tensors.items()} == rows_of(data)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint16, np.float16, np.float32, np.complex64, np.uint64])
def test_files_written_by_safetensors_are_parsed(dtype: type, tmp_path: Path) -> None:
    arrays = {"b": np.ones((4, 3), dtype), "a": np.zeros((), dtype), "z": np.zeros((2, 0, 3), dtype)}
    data = safetensors.numpy.save(arrays, {"framework": "np"})
    found = rows_of(data)
    assert found == library_rows(data)
    assert {name: body for name, (_, _, body) in found.items()} == {n: a.tobytes() for n, a in arrays.items()}
    assert header_of(data).metadata == {"framework": "np"}


SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=8).filter(lambda name: name != "__metadata__")


@settings(max_examples=150, deadline=None)
@given(
    kinds=st.dictionaries(NAMES, st.tuples(st.sampled_from(list(DType)), SHAPES), max_size=8),
    metadata=st.none() | st.dictionaries(NAMES, NAMES, max_size=3),
    ascii_only=st.booleans(),
)
def test_random_valid_files_match_safetensors_library(
    kinds: dict[str, tuple[DType, tuple[int, ...]]], metadata: dict[str, str] | None, ascii_only: bool
) -> None:
    header: dict[str, object] = {}
    at = 0
    for name, (dtype, shape) in kinds.items():
        # Readers store two F4 values as one element, so an odd last dim is impossible.
        halved = dtype is DType.F4 and bool(shape) and shape[-1] % 2 == 1
        if math.prod(shape) * dtype.bits % 8 == 0 and not halved:
            nbytes = math.prod(shape) * dtype.bits // 8
            header[name] = entry(dtype.value, list(shape), at, at + nbytes)
            at += nbytes
    if metadata is not None:
        header["__metadata__"] = metadata
    data = file_of(json.dumps(header, ensure_ascii=ascii_only).encode(), bytes(i % 251 for i in range(at)))
    assert rows_of(data) == library_rows(data)
    assert header_of(data).metadata == (metadata or {})


def test_empty_tensors_at_neighbour_offsets_are_parsed() -> None:
    header = {
        "full": entry("U8", [2], 0, 2),
        "between": entry("F32", [0, 7], 2, 2),
        "too": entry("F4", [0], 2, 2),
        "rest": entry("U8", [1], 2, 3),
        "last": entry("U8", [0], 3, 3),
        "first": entry("U8", [0], 0, 0),
    }
    data = file_of(header, b"abc")
    assert rows_of(data) == library_rows(data)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{ "__metadata__" : {"k" : "v"} , "a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}  ',
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"__metadata__":{"k":"v"}}',
        b'{"__metadata__":{"k":"\\u0076"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"__meta\\u0064ata__":{"k":"v"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"\\u00558","shape":[1],"data_offset\\u0073":[0,1]},"__metadata__":{"\\u006b":"v"}}',
    ],
)
def test_metadata_is_found_at_any_position(raw: bytes) -> None:
    header = header_of(file_of(raw, b"x"))
    assert header.metadata == {"k": "v"}
    assert header.tensors.names == ("a",)


def test_metadata_with_braces_is_parsed_unchanged() -> None:
    metadata = {"config": json.dumps({"a": {"b": '"\\"'}}), "__metadata__": "}", "": "{"}
    data = file_of({"__metadata__": metadata, "a": entry("U8", [1], 0, 1)}, b"x")
    assert header_of(data).metadata == metadata


@pytest.mark.parametrize("value", ["}}", "},", "a}} b", "} , c", "}", "{}", "}}}"])
def test_brace_in_metadata_string_is_parsed(value: str) -> None:
    data = file_of({"__metadata__": {"format": value, "k": "v"}, "a": entry("U8", [1], 0, 1)}, b"x")
    assert header_of(data).metadata == {"format": value, "k": "v"}


def test_null_metadata_is_read_as_empty_dict() -> None:
    assert header_of(file_of({"__metadata__": None})).metadata == {}
    assert header_of(file_of(b'{"__meta\\u0064ata__":null}')).metadata == {}


def test_unknown_header_fields_are_ignored() -> None:
    data = file_of({"a": entry("U8", [1], 0, 1) | {"note": {"deep": [1, {"x": None}]}}}, b"x")
    assert rows_of(data) == library_rows(data)


def test_tensors_named_like_header_fields_are_parsed() -> None:
    header = {name: entry("U8", [1], i, i + 1) for i, name in enumerate(["dtype", "shape", "data_offsets", "U8", ""])}
    data = file_of(header, b"abcde")
    assert rows_of(data) == library_rows(data)


@pytest.mark.parametrize("guess_bytes", [1, 8, 40, 1 << 20])
def test_long_header_is_read_in_two_requests(guess_bytes: int) -> None:
    data = file_of({f"t{i}": entry("U8", [1], i, i + 1) for i in range(50)}, bytes(50))
    source = MemorySource(data)
    reads: list[int] = []
    readv = source.readv

    def counted(offset: int, buffers: Sequence[memoryview]) -> str:
        reads.append(sum(buffer.nbytes for buffer in buffers))
        return readv(offset, buffers)

    source.readv = counted  # type: ignore[method-assign]
    header = read_header(source, guess_bytes=guess_bytes)
    assert len(header.tensors) == 50
    assert len(reads) == (1 if guess_bytes > 4000 else 2)
    assert sum(reads) <= max(header.data_offset, min(guess_bytes, len(data)))


def test_digest_covers_header_json_only() -> None:
    one, two = file_of({"a": entry("U8", [1], 0, 1)}, b"x"), file_of({"a": entry("U8", [1], 0, 1)}, b"y")
    assert header_of(one).digest == header_of(two).digest
    assert header_of(one).digest != header_of(file_of({"b": entry("U8", [1], 0, 1)}, b"x")).digest


def test_writer_reorders_only_unaligned_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    kept = {"z": (DType.F32, (1,), b"1234"), "a": (DType.F32, (1,), b"5678"), "m": (DType.U8, (1,), b"9")}
    write_file(path, kept)
    assert header_of(path.read_bytes()).tensors.names == ("z", "a", "m")
    moved = {"byte": (DType.U8, (1,), b"1"), "half": (DType.F16, (1,), b"23"), "wide": (DType.F64, (1,), b"12345678")}
    write_file(path, moved)
    header = header_of(path.read_bytes())
    assert header.tensors.names == ("wide", "half", "byte")
    assert header.data_offset % 8 == 0
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_writer_refuses_bytes_that_contradict_shape(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="3 bytes"):
        write_file(tmp_path / "x", {"a": (DType.F32, (1,), b"123")})
    with pytest.raises(FormatError, match="whole bytes"):
        write_file(tmp_path / "x", {"a": (DType.F4, (3,), b"12")})
    with pytest.raises(FormatError, match="out of range"):
        write_file(tmp_path / "x", {"a": (DType.U8, (-1,), b"")})
    assert not list(tmp_path.iterdir())


def test_failed_write_error_names_path(tmp_path: Path) -> None:
    with pytest.raises(DestinationError) as caught:
        write_file(tmp_path / "absent" / "x", {})
    assert caught.value.uri == str(tmp_path / "absent" / "x")


def test_writer_refuses_header_above_format_limit(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="the format allows"):
        write_file(tmp_path / "x", {}, {"long": "x" * 100_000_000})


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        (b"", "a file of 0 bytes is not a safetensors file", "copy it again"),
        (b"12345", "a file of 5 bytes", "copy it again"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
            "Git LFS pointer .* not the weights",
            "git lfs pull",
        ),
        (b"#!/bin/sh\necho secret", "not a safetensors file: it begins with b'#!/bin/s' ", "pass a safetensors file"),
        ((100).to_bytes(8, "little") + b"{", "header of 100 bytes in a file of 9", "copy it again"),
    ],
)
def test_invalid_file_raises_format_error_with_hint(tmp_path: Path, data: bytes, message: str, hint: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message) as caught:
        penstock.load(path)
    assert hint in str(caught.value.hint) and "secret" not in str(caught.value)


def test_truncated_file_error_suggests_copying_again(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, {"a": (DType.U8, (100,), bytes(100))})
    whole = path.stat().st_size
    os.truncate(path, whole - 10)
    with pytest.raises(SourceTruncated, match=f"has {whole - 10} bytes, but its header describes {whole}") as caught:
        penstock.load(path)
    assert caught.value.hint == "the file is incomplete, so copy it again"


def test_index_maps_tensors_to_shards() -> None:
    raw = json.dumps(
        {"metadata": {"total_size": 3}, "weight_map": {"a": "x-1.safetensors", "é": "sub/x-2.safetensors"}}
    )
    assert parse_index(raw.encode(), uri="i") == {"a": "x-1.safetensors", "é": "sub/x-2.safetensors"}


def test_index_with_escaped_names_is_parsed() -> None:
    assert parse_index(b'{"weight_map":{"a\\"b":"\\u0078.safetensors"}}', uri="i") == {'a"b': "x.safetensors"}


def test_strings_with_json_escapes_are_counted_correctly() -> None:
    for value in ({}, {"a": "b"}, {'"': "\\"}, {"\\": '\\"'}, {"\\\\": "\n"}, {'\\"\\': '"\\"'}):
        assert num_strings(json.dumps(value).encode()) == 2 * len(value)


def test_uris_are_classified_as_local_or_remote() -> None:
    assert [is_remote(u) for u in ("s3://b/k", "https://h/p", "gs://b", "az://c")] == [True] * 4
    assert [is_remote(u) for u in ("/a/b", "rel", "file:///a", "C:thing")] == [False] * 4
    assert local_path("file:///a%20b") == "/a b" and local_path("/a%20b") == "/a%20b"
    with pytest.raises(ConfigError, match="ftp"):
        is_remote("ftp://h/p")


@pytest.mark.parametrize(
    "names", [["__metadata__"], ["w", "__metadata__"], ["a\ud800"], ["w", "w"]], ids=["key", "second", "utf8", "twice"]
)
def test_header_with_invalid_tensor_name_is_rejected(names: list[str]) -> None:
    entries = [(name, DType.U8, (2,), 2 * row, 2 * row + 2) for row, name in enumerate(names)]
    for metadata in (None, {"format": "pt"}):
        with pytest.raises(PlanError) as caught:
            encode_header(entries, metadata, uri="file")
        assert caught.value.tensor == names[-1]


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", 'a"\\', "\U0001f600"])
def test_unusual_tensor_names_round_trip(name: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    path.write_bytes(encode_header([(name, DType.U8, (2,), 0, 2)], None, uri=str(path)) + b"ab")
    assert bytes(safetensors.numpy.load_file(path)[name]) == b"ab"
