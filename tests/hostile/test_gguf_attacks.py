"""GGUF headers that lie: each is refused by a typed error that names the file, in bounded time and memory.

The package's own reader is the judge where a mutated file is accepted: it must then see the same tensors.
"""

from __future__ import annotations

import contextlib
import struct
import tempfile
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import gguf_file

import penstock
from penstock.errors import FormatError, NotFound, PenstockError, SourceTruncated
from penstock.storage import MemorySource
from penstock.storage.gguf import GgufHeader
from penstock.storage.headers import GGUF_MAGIC, read_header

U8, U16, I32, U32, BOOL, STRING, ARRAY = 0, 2, 5, 4, 7, 8, 9
BIG = 2**64 - 1


def text(value: bytes | str) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: bytes | str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: bytes | str = "a", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_of(
    *parts: bytes, fields: int = 0, tensors: int = 0, version: int = 3, body: int = 256, alignment: int = 32
) -> bytes:
    head = GGUF_MAGIC + struct.pack("<IQQ", version, tensors, fields) + b"".join(parts)
    return head + bytes(-len(head) % alignment) + bytes(body)


def one_field(kind: int, value: bytes, key: bytes | str = "k") -> bytes:
    return file_of(entry(key, kind, value), fields=1)


def one_tensor(**arguments: object) -> bytes:
    return file_of(info(**arguments), tensors=1)  # type: ignore[arg-type]


LIES: dict[str, tuple[bytes, str]] = {
    "another version": (file_of(version=1), "GGUF version 1"),
    "version zero": (file_of(version=0), "GGUF version 0"),
    "a later version": (file_of(version=4), "GGUF version 4"),
    "big-endian": (GGUF_MAGIC + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many tensors": (file_of(tensors=BIG), "tensors, above the limit"),
    "more tensors than bytes": (file_of(tensors=1000), "1000 tensors cannot fit in a file of"),
    "many entries": (file_of(fields=BIG), "entries, above the limit"),
    "more entries than bytes": (file_of(fields=1000), "1000 entries of metadata cannot fit in a file of"),
    "a long key": (file_of(struct.pack("<Q", BIG), fields=1), "a key of the metadata has"),
    "a key that is not UTF-8": (one_field(U8, b"\1", key=b"\xff"), "not UTF-8"),
    "a key twice": (file_of(entry("k", U8, b"\1"), entry("k", U8, b"\2"), fields=2), "duplicate key 'k'"),
    "a reader's key": (one_field(STRING, text("{}"), key="GGUF.types"), "reserved for readers"),
    "an unknown type": (one_field(13, b"\1"), "unknown type 13"),
    "a long string": (one_field(STRING, struct.pack("<Q", BIG)), "the value of 'k' has"),
    "a string that is not UTF-8": (one_field(STRING, text(b"\xc3\x28")), "not UTF-8"),
    "a long array": (one_field(ARRAY, struct.pack("<IQ", U32, 2**61)), "elements of 'k' cannot fit in a file of"),
    "a long array of strings": (
        one_field(ARRAY, struct.pack("<IQ", STRING, BIG)),
        "elements of 'k' cannot fit in a file of",
    ),
    "an array of arrays": (one_field(ARRAY, struct.pack("<IQ", ARRAY, 1)), "an array of arrays"),
    "an array of an unknown type": (one_field(ARRAY, struct.pack("<IQ", 99, 1)), "an array of the unknown type 99"),
    "alignment of another type": (one_field(U16, b"\x20\0", key="general.alignment"), "general.alignment 32"),
    "alignment zero": (one_field(U32, bytes(4), key="general.alignment"), "general.alignment 0"),
    "an odd alignment": (one_field(U32, b"\x30\0\0\0", key="general.alignment"), "general.alignment 48"),
    "a wide alignment": (one_field(U32, b"\0\0\0\x80", key="general.alignment"), "general.alignment 2147483648"),
    "alignment as text": (one_field(STRING, text("32"), key="general.alignment"), "general.alignment 32"),
    "alignment as a list": (
        one_field(ARRAY, struct.pack("<IQI", U32, 1, 32), key="general.alignment"),
        "general.alignment",
    ),
    "a long name": (file_of(struct.pack("<Q", 2**20) + bytes(40), tensors=1), "the name of a tensor has 1048576"),
    "a name that is not UTF-8": (one_tensor(name=b"\xfe"), "not UTF-8"),
    "a name twice": (file_of(info("a"), info("a", offset=32), tensors=2), "lists this tensor twice"),
    "five dims": (one_tensor(dims=(1, 1, 1, 1, 1)), "rank 5"),
    "a rank of 32 bits": (file_of(text("a") + b"\xff" * 30, tensors=1), "rank 4294967295"),
    "an unknown tensor type": (one_tensor(kind=4), "unknown tensor type 4"),
    "a type that was removed": (one_tensor(kind=31), "unknown tensor type 31"),
    "half a block": (one_tensor(dims=(40,), kind=8), "rows must be multiples of 32"),
    "blocks without dims": (one_tensor(dims=(), kind=8), "rows must be multiples of 32"),
    "a dim of 64 bits": (one_tensor(dims=(BIG,)), "impossible shape"),
    "dims that overflow": (one_tensor(dims=(2**32, 2**31)), "impossible shape"),
    "an empty tensor that overflows": (one_tensor(dims=(2**40, 2**40, 0)), "impossible shape"),
    "an offset of 64 bits": (one_tensor(offset=BIG - 31), "offset 18446744073709551584"),
    "an offset that is not aligned": (one_tensor(offset=4), "offset 4"),
    "a gap": (file_of(info("a"), info("b", offset=64), tensors=2), "offset 64, but the tensors before it end at 32"),
    "an overlap": (file_of(info("a", dims=(16,)), info("b", offset=32), tensors=2), "offset 32, but"),
    "the same bytes": (file_of(info("a"), info("b", offset=0), tensors=2), "offset 0, but"),
}


@pytest.mark.parametrize("case", LIES)
def test_inconsistent_header_raises_format_error(case: str, tmp_path: Path) -> None:
    data, fault = LIES[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        penstock.load(path)
    assert fault in str(caught.value) and "model.gguf" in str(caught.value) and len(str(caught.value)) < 2000
    with pytest.raises(FormatError):
        penstock.inspect(path)


def test_unmodified_attack_input_is_valid() -> None:
    data = file_of(
        entry("k", BOOL, b"\1"),
        entry("l", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("")),
        info("a"),
        info("b", dims=(64,), kind=8, offset=32),
        info("c", dims=(), offset=128),
        fields=2,
        tensors=3,
    )
    header = read_header(MemorySource(data))
    assert header.tensors.names == ("a", "b", "c") and header.tensors.shapes == ((8,), (68,), ())
    assert dict(header.metadata) == {"GGUF.version": "3", "k": "true", "l": '["x", ""]', "GGUF.types": '{"b": "Q8_0"}'}


def test_file_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    (path,) = gguf_file.write(tmp_path / "m.gguf", tokens=20)
    data = path.read_bytes()
    end = gguf.GGUFReader(path).tensors[-1]
    for stop in {
        *range(0, 1200, 7),
        *range(1200, end.data_offset + end.n_bytes, 97),
        end.data_offset + end.n_bytes - 1,
    }:
        with pytest.raises((FormatError, SourceTruncated)) as caught:
            read_header(MemorySource(data[:stop], uri="memory:m.gguf"))
        assert "memory:m.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (one_tensor(dims=(2**50,)), "the tensor has 4503599627370496 bytes"),
        (
            file_of(*(info(chr(97 + i), dims=(40,), offset=160 * i) for i in range(3)), tensors=3),
            "before the last tensor",
        ),
    ],
)
def test_short_tensor_data_raises_source_truncated(data: bytes, fault: str) -> None:
    with pytest.raises((SourceTruncated, FormatError), match=fault):
        read_header(MemorySource(data))


def hundred_mb(piece: bytes, head: bytes) -> bytes:
    return head + piece * ((100_000_000 - len(head)) // len(piece))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(
            hundred_mb(
                bytes(8),
                GGUF_MAGIC + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", ARRAY, STRING, 300_000),
            ),
            id="empty strings",
        ),
        pytest.param(
            hundred_mb(
                bytes(8),
                GGUF_MAGIC + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", ARRAY, STRING, 12_000_000),
            ),
            id="more strings than are read",
        ),
        pytest.param(
            hundred_mb(text("") + struct.pack("<IB", U8, 0), GGUF_MAGIC + struct.pack("<IQQ", 3, 0, 65_536)),
            id="empty keys",
        ),
        pytest.param(hundred_mb(info("", dims=()), GGUF_MAGIC + struct.pack("<IQQ", 3, 1 << 19, 0)), id="empty names"),
    ],
)
def test_longest_header_uses_little_memory(data: bytes) -> None:
    source = MemorySource(data)
    tracemalloc.start()
    begun = time.monotonic()
    with contextlib.suppress(FormatError):
        read_header(source)
    took, (_, peak) = time.monotonic() - begun, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Its bytes are read once, and copied once when the buffer grows. The time is a bound for hangs, not a measurement.
    assert peak < 3 * len(data) and took < 60


def test_hundred_thousand_tensors_are_read() -> None:
    count = 100_000
    data = file_of(*(info(str(i), dims=(0,)) for i in range(count)), tensors=count, body=0)
    assert len(read_header(MemorySource(data)).tensors) == count


# -- split models


def parts_of(tmp_path: Path) -> list[Path]:
    parts = gguf_file.write(tmp_path / "m.gguf", parts=3)
    assert [part.name for part in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return parts


def test_missing_gguf_split_error_names_file(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    parts[1].unlink()
    for place in (parts[0], parts[2], tmp_path):
        with pytest.raises(NotFound, match=r"'m-00002-of-00003\.gguf', a part of a model split over several files"):
            penstock.load(place)


def test_truncated_gguf_split_error_names_file(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    parts[2].write_bytes(parts[2].read_bytes()[:-200])
    with pytest.raises(SourceTruncated, match=r"m-00003-of-00003\.gguf"):
        penstock.load(parts[0])


def test_renamed_gguf_split_is_rejected(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    alone = parts[1].rename(tmp_path / "whole.gguf")
    with pytest.raises(FormatError, match=r"'whole.gguf' is one of 3 parts of a model, but 1 files were opened"):
        penstock.load(alone)
    with pytest.raises(FormatError, match="one of 3 parts"):
        penstock.load([parts[0], alone])


def test_swapped_gguf_split_is_rejected(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(FormatError, match=r"part 3 of 3 per its header, and so is 'm-00002-of-00003.gguf'"):
        penstock.load(parts[0])


def test_gguf_splits_from_two_models_are_rejected(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    (tmp_path / "other").mkdir()
    writer = gguf.GGUFWriter(tmp_path / "other" / "o.gguf", "llama", split_max_tensors=1)
    for i in range(3):
        writer.add_tensor(f"t{i}", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts[2].write_bytes((tmp_path / "other" / "o-00003-of-00003.gguf").read_bytes())
    with pytest.raises(FormatError, match="says that the model has"):
        penstock.load(parts[0])


# -- mutations

ORIGINAL: list[bytes] = []


def original() -> bytes:
    """A real file's bytes, made once."""
    if not ORIGINAL:
        with tempfile.TemporaryDirectory() as folder:
            (path,) = gguf_file.write(Path(folder) / "m.gguf", tokens=70)
            ORIGINAL.append(path.read_bytes())
    return ORIGINAL[0]


INTERESTING = [0, 1, 4, 8, 9, 31, 32, 33, 2**31, 2**32 - 1, 2**61, 2**63 - 1, 2**63, BIG]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(original())
    header_bytes = read_header(MemorySource(bytes(data))).data_offset
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(header_bytes, len(data)) - 1))
        kind = draw(st.sampled_from(["byte", "u32", "u64", "cut", "drop", "double"]))
        if kind == "byte":
            data[at] = draw(st.integers(0, 255))
        elif kind in {"u32", "u64"}:
            width = 4 if kind == "u32" else 8
            value = draw(st.sampled_from(INTERESTING)) % (1 << 8 * width)
            data[at : at + width] = value.to_bytes(width, "little")
        elif kind == "cut":
            del data[draw(st.integers(at, len(data) - 1)) :]
        elif kind == "drop":
            del data[at : at + draw(st.integers(1, 40))]
        else:
            data[at:at] = data[at : at + draw(st.integers(1, 40))]
        if not data:
            break
        header_bytes = min(header_bytes, len(data))
    return bytes(data)


@settings(max_examples=400, deadline=None)
@given(mutated() | st.binary(max_size=80).map(lambda tail: GGUF_MAGIC + struct.pack("<I", 3) + tail))
def test_accepted_mutated_gguf_files_match_gguf_package(data: bytes) -> None:
    try:
        header = read_header(MemorySource(data, uri="memory:m.gguf"))
    except PenstockError as error:
        assert isinstance(error, FormatError | SourceTruncated) and "m.gguf" in str(error)
        return
    assert isinstance(header, GgufHeader)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(data)
        reader = gguf.GGUFReader(path)
        table = header.tensors
        theirs = [(entry.name, entry.data_offset, entry.n_bytes) for entry in reader.tensors]
        assert [*zip(table.names, table.offset.tolist(), table.nbytes.tolist(), strict=True)] == theirs
        tensors, truth = penstock.load(path), gguf_file.expected_tensors(path)
    for name, tensor in truth.items():
        bits = tensors[name].contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(bits, tensor.contiguous().reshape(-1).view(torch.uint8)), name


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_only_typed_errors(data: bytes) -> None:
    for head in (b"", GGUF_MAGIC, GGUF_MAGIC + struct.pack("<IQQ", 3, 1, 1)):
        with contextlib.suppress(FormatError, SourceTruncated):
            read_header(MemorySource(head + data, uri="memory:m.gguf"))
