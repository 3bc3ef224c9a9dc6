"""The GGUF header parser on valid files, compared with the gguf package."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import gguf_file

from penstock.config import Settings
from penstock.errors import FormatError
from penstock.storage import MemorySource
from penstock.storage.gguf import BLOCK_TYPES, PLAIN, TYPES, GgufHeader, blocks_of
from penstock.storage.headers import GGUF_GUESS_BYTES, read_header
from penstock.storage.weight_set import open_weights
from penstock.types import DType


class Counted(MemorySource):
    """A source that records its reads."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, uri="memory:x.gguf")
        self.reads: list[tuple[int, int]] = []

    def readv(self, offset: int, buffers: object) -> str:
        self.reads.append((offset, sum(len(buffer) for buffer in buffers)))
        return super().readv(offset, buffers)


def header_of(data: bytes) -> GgufHeader:
    header = read_header(MemorySource(data))
    assert isinstance(header, GgufHeader)
    return header


def test_gguf_type_table_matches_gguf_package() -> None:
    theirs = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in Type}
    ours = {number: (kind.name, kind.elements, kind.nbytes) for number, kind in BLOCK_TYPES.items()}
    ours |= {number: (dtype.value, 1, dtype.bits // 8) for number, dtype in PLAIN.items()}
    assert ours == theirs


def test_gguf_header_matches_gguf_package(tmp_path: Path) -> None:
    (path,) = gguf_file.write(tmp_path / "m.gguf")
    data = path.read_bytes()
    header, reader = header_of(data), gguf.GGUFReader(path)
    table = header.tensors
    assert table.names == tuple(entry.name for entry in reader.tensors)
    assert table.offset.tolist() == [entry.data_offset for entry in reader.tensors]
    assert table.nbytes.tolist() == [entry.n_bytes for entry in reader.tensors]
    for row, entry in enumerate(reader.tensors):
        # The package returns BF16 as bytes.
        shape = list(entry.data.shape) if entry.tensor_type is not Type.BF16 else entry.shape.tolist()[::-1]
        assert list(table.shapes[row]) == shape
    assert header.data_offset == reader.data_offset and header.alignment == 32


def test_gguf_metadata_text_summarises_long_values(tmp_path: Path) -> None:
    (path,) = gguf_file.write(tmp_path / "m.gguf", tokens=300)
    metadata = dict(header_of(path.read_bytes()).metadata)
    assert metadata.pop(TYPES).startswith('{"token_embd.weight": "Q8_0", "blk.0.attn_q.weight": "Q4_0"')
    assert metadata == {
        "GGUF.version": "3",
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": "1",
        "llama.rope.freq_base": "10000.5",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": "300 x string",
        "tokenizer.ggml.scores": "300 x float32",
        "tiny.short": "[1, 2, 3]",
        "tokenizer.ggml.add_bos_token": "true",
    }


def test_gguf_block_shapes_match_gguf_package(tmp_path: Path) -> None:
    (path,) = gguf_file.write(tmp_path / "m.gguf")
    with open_weights(path, settings=Settings.read()) as weights:
        blocks = blocks_of(weights.manifest)
    theirs = {e.name: (e.tensor_type.name, tuple(e.shape.tolist()[::-1])) for e in gguf.GGUFReader(path).tensors}
    plain = {"F32", "F16", "BF16", "I32"}
    expected = {name: kind for name, kind in theirs.items() if kind[0] not in plain}
    assert {name: (kind.type, kind.shape) for name, kind in blocks.items()} == expected


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_custom_gguf_alignment_is_honoured(tmp_path: Path, alignment: int) -> None:
    (path,) = gguf_file.write(tmp_path / "m.gguf", alignment=alignment)
    header = header_of(path.read_bytes())
    assert header.alignment == alignment and not (header.tensors.offset % alignment).any()
    assert header.tensors.offset.tolist() == [entry.data_offset for entry in gguf.GGUFReader(path).tensors]


def test_gguf_version_2_is_parsed(tmp_path: Path) -> None:
    (path,) = gguf_file.write(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    newer = header_of(bytes(data))
    data[4] = 2
    older = header_of(bytes(data))
    assert older.metadata["GGUF.version"] == "2"
    assert older.tensors.offset.tolist() == newer.tensors.offset.tolist() and older.digest != newer.digest


def test_large_gguf_header_is_read_in_two_requests(tmp_path: Path) -> None:
    (path,) = gguf_file.write(tmp_path / "m.gguf", tokens=150_000)
    source = Counted(path.read_bytes())
    header = read_header(source)
    assert header.data_offset > 2 * GGUF_GUESS_BYTES
    assert len(source.reads) == 2 and source.reads[0] == (0, GGUF_GUESS_BYTES)
    assert header.read_nbytes == sum(nbytes for _, nbytes in source.reads)
    (small,) = gguf_file.write(tmp_path / "small.gguf")
    source = Counted(small.read_bytes())
    read_header(source)
    assert len(source.reads) == 1


def test_gguf_file_with_metadata_only_has_no_tensors(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = header_of((tmp_path / "v.gguf").read_bytes())
    assert len(header.tensors) == 0 and header.metadata["general.architecture"] == "llama"


def test_trailing_gguf_bytes_are_ignored(tmp_path: Path) -> None:
    (path,) = gguf_file.write(tmp_path / "m.gguf")
    data = path.read_bytes()
    assert header_of(data + bytes(100)).tensors.offset.tolist() == header_of(data).tensors.offset.tolist()


def test_gguf_file_without_magic_raises_format_error() -> None:
    with pytest.raises(FormatError, match="does not begin with 'GGUF'"):
        read_header(MemorySource(b"\x02\0\0\0\0\0\0\0{}", uri="memory:x.gguf"))
    with pytest.raises(FormatError, match="does not begin with 'GGUF'"):
        read_header(MemorySource(b"", uri="memory:x.gguf"))


KINDS = [
    Type.F32,
    Type.F16,
    Type.BF16,
    Type.F64,
    Type.I8,
    Type.I16,
    Type.I32,
    Type.I64,
    Type.Q8_0,
    Type.Q2_K,
    Type.MXFP4,
]
NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
VALUES = st.one_of(
    st.booleans(),
    st.text(max_size=20),
    st.lists(st.integers(-9, 9), min_size=1, max_size=5),
    st.lists(st.text(max_size=5), min_size=1, max_size=5),
    st.integers(-(2**31), 2**31 - 1),
    st.floats(width=32),
)


@settings(max_examples=80, deadline=None)
@given(
    tensors=st.dictionaries(
        NAMES, st.tuples(st.sampled_from(KINDS), st.lists(st.integers(1, 4), min_size=1, max_size=4)), max_size=6
    ),
    fields=st.dictionaries(NAMES.map("x.{}".format), VALUES, max_size=5),
)
def test_random_gguf_files_match_gguf_package(
    tensors: dict[str, tuple[Type, list[int]]], fields: dict[str, object]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        writer = gguf.GGUFWriter(path, "any")
        for key, value in fields.items():
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        for name, (kind, shape) in tensors.items():
            elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
            # The package writes blocks only as bytes.
            raw = np.zeros((*shape[:-1], shape[-1] * nbytes), np.uint8)
            writer.add_tensor(
                name, raw, raw_shape=(*shape[:-1], shape[-1] * nbytes), raw_dtype=kind
            ) if elements > 1 else writer.add_tensor_info(
                name, (*shape[:-1], shape[-1] * nbytes), np.dtype(np.uint8), raw.nbytes, kind
            )
            if elements == 1:
                writer.tensors[-1][name].tensor = raw
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        header, reader = header_of(path.read_bytes()), gguf.GGUFReader(path)
        table = header.tensors
        assert [*zip(table.names, table.offset.tolist(), table.nbytes.tolist(), strict=True)] == [
            (entry.name, entry.data_offset, entry.n_bytes) for entry in reader.tensors
        ]
        assert all(
            dtype is DType.U8
            for dtype, e in zip(table.dtypes, reader.tensors, strict=True)
            if e.tensor_type in {Type.Q8_0, Type.Q2_K, Type.MXFP4}
        )
        assert set(header.fields) == {key for key in reader.fields if not key.startswith("GGUF.")}
        for key, value in fields.items():
            stored = header.fields[key].value
            stored = stored[2] if isinstance(stored, tuple) else stored
            assert stored == value or (stored != stored and value != value)
