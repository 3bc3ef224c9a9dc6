"""Weight sets from every kind of location, checked against index and manifest, digested, encoded and signed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.support.tensor_file import write_file
from tests.support.users import STRANGER, run_as

from penstock import storage
from penstock.config import Settings
from penstock.digest import leaf
from penstock.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    NotFound,
    PenstockError,
    PermissionDenied,
    PlanError,
    SourceChanged,
    SourceTruncated,
)
from penstock.storage import MemorySource, locate, weight_set
from penstock.storage import manifest as manifest_file
from penstock.storage.files import FileSource
from penstock.storage.weight_set import WeightSet, build, decode, encode, open_weights, sidecar_uri, signature_uri
from penstock.types import DType, FileEntry, TensorTable

SETTINGS = Settings()
BODIES = random.Random(1)


def tensor(*shape: int, dtype: DType = DType.U8) -> tuple[DType, tuple[int, ...], bytes]:
    return dtype, shape, BODIES.randbytes(int(np.prod(shape)) * dtype.bits // 8)


def shards_of(folder: Path) -> dict[str, tuple[DType, tuple[int, ...], bytes]]:
    """Write three shards with unsorted names and one empty tensor."""
    parts: list[dict[str, tuple[DType, tuple[int, ...], bytes]]] = [
        {"m.w": tensor(300, 7, dtype=DType.F16), "a.w": tensor(5), "m.empty": tensor(0, 3)},
        {"b.w": tensor(64), "a.scale": tensor(dtype=DType.F32)},
        {"z.w": tensor(1000)},
    ]
    for index, part in enumerate(parts):
        write_file(folder / f"model-{index}.safetensors", part, {"part": str(index)})
    return {name: value for part in parts for name, value in part.items()}


def write_index(folder: Path, changes: Mapping[str, str | None] | None = None, name: str = "model") -> Path:
    weight_map = {
        "m.w": "model-0.safetensors",
        "a.w": "model-0.safetensors",
        "m.empty": "model-0.safetensors",
        "b.w": "model-1.safetensors",
        "a.scale": "model-1.safetensors",
        "z.w": "model-2.safetensors",
    } | (changes or {})
    path = folder / f"{name}.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": {k: v for k, v in weight_map.items() if v is not None}}))
    return path


def bodies_of(weights: WeightSet) -> dict[str, bytes]:
    table = weights.manifest.tensors
    found = {}
    for row, name in enumerate(table):
        body = bytearray(int(table.nbytes[row]))
        weights.sources[int(table.file_index[row])].readv(int(table.offset[row]), [memoryview(body)])
        found[name] = bytes(body)
    return found


def open_all(uri: weight_set.Uris, **kwargs: object) -> tuple[WeightSet, dict[str, bytes]]:
    with open_weights(uri, settings=SETTINGS, **kwargs) as weights:  # type: ignore[arg-type]
        return weights, bodies_of(weights)


def write_sidecar(uri: str | os.PathLike[str], leaf_bytes: int = 128) -> manifest_file.Manifest:
    with open_weights(uri, settings=SETTINGS) as weights:
        made = build(weights, leaf_bytes=leaf_bytes)
    Path(sidecar_uri(uri)).write_bytes(encode(made))
    return made


ALL = ["m.w", "a.w", "m.empty", "b.w", "a.scale", "z.w"]


@pytest.mark.parametrize("kind", ["directory", "slash", "path", "file uri", "glob", "index", "list", "deep glob"])
def test_every_location_kind_opens_same_weights(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model dir"
    folder.mkdir()
    expected = {name: body for name, (_, _, body) in shards_of(folder).items()}
    if kind == "index":
        write_index(folder)
    (folder / "config.json").write_text("{}")
    uri: weight_set.Uris = {
        "directory": str(folder),
        "slash": f"{folder}/",
        "path": folder,
        "file uri": folder.as_uri(),
        "glob": f"{folder}/model-*.safetensors",
        "index": folder / "model.safetensors.index.json",
        "list": [folder / f"model-{i}.safetensors" for i in (2, 0, 1)],
        "deep glob": f"{tmp_path}/*/*.safetensors",
    }[kind]
    weights, bodies = open_all(uri)
    assert bodies == expected
    assert list(weights.manifest.tensors) == ALL
    assert [file.name for file in weights.manifest.files] == [f"model-{i}.safetensors" for i in range(3)]
    assert weights.manifest.files[1].metadata == {"part": "1"}
    assert [file.nbytes for file in weights.manifest.files] == [source.nbytes for source in weights.sources]
    assert weights.manifest.revision.startswith("h1-") and weights.manifest.leaves is None
    assert weights.why_unverified is not None and "manifest" in weights.why_unverified


def test_single_weight_file_is_opened(tmp_path: Path) -> None:
    write_file(tmp_path / "x.bin", {"a": tensor(3)})
    weights, bodies = open_all(tmp_path / "x.bin")
    assert len(bodies["a"]) == 3
    assert weights.why_unverified == f"no manifest at {tmp_path}/x.bin.penstock.manifest"
    assert list(open_all([tmp_path / "x.bin"])[1]) == ["a"]


def test_single_file_uses_manifest_in_its_directory(tmp_path: Path, monkeypatch) -> None:
    """Engines pass the file of a model with one file, or a list of it."""
    file = tmp_path / "model.safetensors"
    write_file(file, {"a": tensor(3)})
    write_sidecar(tmp_path)
    monkeypatch.chdir(tmp_path)
    revision = open_all(tmp_path)[0].manifest.revision
    for uri in (file, [file], "model.safetensors", ["model.safetensors"]):
        weights, _ = open_all(uri)
        assert weights.why_unverified is None and weights.manifest.revision == revision
    write_file(tmp_path / "consolidated.safetensors", {"a": tensor(3)})
    assert open_all(file)[0].why_unverified is None
    write_file(tmp_path / "other.safetensors", {"b": tensor(3)})
    assert open_all(file)[0].why_unverified == f"no manifest at {file}.penstock.manifest"


def test_relative_paths_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_sidecar(".")
    for uri in (".", "*.safetensors", "./model-*.safetensors"):
        weights, bodies = open_all(uri)
        assert list(bodies) == ALL and weights.why_unverified is None
    index = write_index(tmp_path)
    assert list(open_all(index.name)[1]) == ALL


def test_weights_in_subdirectories_are_ignored(tmp_path: Path) -> None:
    shards_of(tmp_path)
    (tmp_path / "original").mkdir()
    write_file(tmp_path / "original" / "other.safetensors", {"q": tensor(1)})
    assert list(open_all(tmp_path)[1]) == ALL


def test_index_selects_files_in_directory(tmp_path: Path) -> None:
    shards_of(tmp_path)
    write_file(tmp_path / "consolidated.safetensors", {name: tensor(1) for name in ALL})
    write_index(tmp_path)
    assert list(open_all(tmp_path)[1]) == ALL
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "diffusion.safetensors.index.json")
    assert list(open_all(tmp_path)[1]) == ALL
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(FormatError, match="two files"):
        open_weights(tmp_path, settings=SETTINGS)


def test_index_can_name_files_in_subdirectories(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write_file(tmp_path / "sub" / "a.safetensors", {"a": tensor(1)})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map":{"a":"sub/a.safetensors"}}')
    weights, _ = open_all(tmp_path)
    assert weights.manifest.files[0].name == "sub/a.safetensors"


def test_files_with_same_name_are_distinguished_by_directory(tmp_path: Path) -> None:
    for name in ("unet", "vae"):
        (tmp_path / name).mkdir()
        write_file(tmp_path / name / "model.safetensors", {name: tensor(1)})
    weights, _ = open_all([tmp_path / "vae" / "model.safetensors", tmp_path / "unet" / "model.safetensors"])
    assert [file.name for file in weights.manifest.files] == ["unet/model.safetensors", "vae/model.safetensors"]
    assert weights.why_unverified == "these files have no place for a manifest"


INDEX_LIES: dict[str, tuple[dict[str, str | None], str, str]] = {
    "tensor in another shard": ({"b.w": "model-2.safetensors"}, "b.w", "puts it in 'model-2.safetensors'"),
    "tensor left out": ({"b.w": None}, "b.w", "does not name it"),
    "tensor that is nowhere": ({"ghost": "model-1.safetensors"}, "ghost", "does not hold it"),
}


@pytest.mark.parametrize("lie", INDEX_LIES)
def test_invalid_index_is_rejected(lie: str, tmp_path: Path) -> None:
    shards_of(tmp_path)
    changes, name, words = INDEX_LIES[lie]
    write_index(tmp_path, changes)
    with pytest.raises(FormatError, match=words) as caught:
        open_weights(tmp_path, settings=SETTINGS)
    assert caught.value.tensor == name


def test_missing_shard_error_contains_file_name(tmp_path: Path) -> None:
    shards_of(tmp_path)
    write_index(tmp_path, {"q": "model-9.safetensors"})
    with pytest.raises(NotFound, match=r"model-9\.safetensors") as caught:
        open_weights(tmp_path, settings=SETTINGS)
    assert caught.value.uri == f"{tmp_path}/model-9.safetensors"


def test_duplicate_tensor_name_is_refused(tmp_path: Path) -> None:
    shards_of(tmp_path)
    write_file(tmp_path / "model-3.safetensors", {"a.w": tensor(5)})
    with pytest.raises(FormatError, match=r"'model-0\.safetensors' and 'model-3\.safetensors'") as caught:
        open_weights(tmp_path, settings=SETTINGS)
    assert caught.value.tensor == "a.w"


def test_missing_files_in_list_raise_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        open_weights([tmp_path / "x.safetensors", tmp_path / "y.safetensors"], settings=SETTINGS)


@pytest.mark.parametrize(
    ("path", "said"), [("no", "no such file"), ("empty", "no \\*.safetensors"), ("", "no \\*.saf")]
)
def test_missing_path_error_shows_requested_path(tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match=said) as caught:
        open_weights(tmp_path / path, settings=SETTINGS)
    assert caught.value.uri == str(tmp_path / path)


def test_single_slash_uri_error_suggests_correct_uri() -> None:
    with pytest.raises(NotFound) as caught:
        open_weights("s3:/bucket/llama", settings=SETTINGS)
    assert caught.value.hint == "write two slashes: s3://bucket/llama"


def test_location_without_weights_raises(tmp_path: Path) -> None:
    (tmp_path / "readme").write_text("")
    for uri in (tmp_path, tmp_path / "no", f"{tmp_path}/*.safetensors", tmp_path / "x.safetensors.index.json"):
        with pytest.raises(NotFound):
            open_weights(uri, settings=SETTINGS)
    with pytest.raises(ConfigError, match="list of files is empty"):
        open_weights([], settings=SETTINGS)
    with pytest.raises(ConfigError, match="twice"):
        open_weights([tmp_path / "a", tmp_path / "a"], settings=SETTINGS)
    with pytest.raises(ConfigError, match="ftp"):
        open_weights("ftp://host/x", settings=SETTINGS)


def test_failed_open_closes_all_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards_of(tmp_path)
    (tmp_path / "model-1.safetensors").write_bytes(b"not a file of weights")
    opened: list[str] = []
    closed: list[str] = []
    open_source, close = storage.open_source, FileSource.close

    def opening(uri: str, **kwargs: object) -> storage.Source:
        opened.append(uri)
        return open_source(uri, **kwargs)  # type: ignore[arg-type]

    def closing(source: FileSource) -> None:
        closed.append(source.uri)
        close(source)

    monkeypatch.setattr(weight_set, "open_source", opening)
    monkeypatch.setattr(FileSource, "close", closing)
    with pytest.raises(FormatError):
        open_weights(tmp_path, settings=SETTINGS)
    assert set(opened) <= set(closed)


NAME_CHOICES: list[tuple[weight_set.Names, list[str]]] = [
    (None, ALL),
    ("a.*", ["a.w", "a.scale"]),
    ("z.w", ["z.w"]),
    (["m.w", "*.scale"], ["m.w", "a.scale"]),
    (re.compile("^m"), ["m.w", "m.empty"]),
    (lambda name: name < "b", ["a.w", "a.scale"]),
    (re.compile("^nothing"), []),
    ([], []),
]


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("names, expected", NAME_CHOICES, ids=range(len(NAME_CHOICES)))
def test_names_option_selects_tensors(
    names: weight_set.Names, expected: list[str], with_index: bool, tmp_path: Path
) -> None:
    shards_of(tmp_path)
    if with_index:
        write_index(tmp_path)
    made = write_sidecar(tmp_path)
    weights, bodies = open_all(tmp_path, names=names)
    assert list(bodies) == expected
    assert weights.manifest.revision == made.revision
    leaves = weights.manifest.leaves
    assert leaves is not None
    assert leaves.tolist() == [
        xxhash.xxh3_64_intdigest(body[i : i + 128]) for body in bodies.values() for i in range(0, len(body), 128)
    ]


def test_index_opens_only_needed_files(tmp_path: Path) -> None:
    shards_of(tmp_path)
    write_index(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    weights, bodies = open_all(tmp_path, names="b.w")
    assert list(bodies) == ["b.w"]
    assert [file.name for file in weights.manifest.files] == ["model-1.safetensors"]


def test_unknown_tensor_name_raises_plan_error(tmp_path: Path) -> None:
    shards_of(tmp_path)
    with pytest.raises(PlanError, match="no such tensor: nope"):
        open_weights(tmp_path, settings=SETTINGS, names="nope")
    with pytest.raises(PlanError, match=r"no such tensor: nope\*; "):
        open_weights(tmp_path, settings=SETTINGS, names=["a.*", "nope*"])
    with pytest.raises(PlanError, match="no such tensor: nope0, nope1, nope2, nope3, nope4 and 2 more"):
        open_weights(tmp_path, settings=SETTINGS, names=["a.w", *(f"nope{i}" for i in range(7))])


@pytest.mark.parametrize("threads", [0, 1, 5])
@pytest.mark.parametrize("leaf_bytes", [1, 7, 128, 4096, 1 << 20])
def test_manifest_build_digests_every_leaf(
    leaf_bytes: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_set, "_WINDOW_BYTES", 512)
    tensors = shards_of(tmp_path)
    with open_weights(tmp_path, settings=SETTINGS) as weights:
        made = build(weights, leaf_bytes=leaf_bytes, threads=threads)
    bodies = [tensors[name][2] for name in ALL]
    assert made.leaves is not None
    assert made.leaves.tolist() == [
        xxhash.xxh3_64_intdigest(body[i : i + leaf_bytes]) for body in bodies for i in range(0, len(body), leaf_bytes)
    ]
    assert made.revision == leaf.revision(made.tensors, leaf_bytes, made.leaves)


def test_revision_is_independent_of_file_layout(tmp_path: Path) -> None:
    tensors = shards_of(tmp_path)
    (tmp_path / "one").mkdir()
    write_file(tmp_path / "one" / "all.safetensors", dict(sorted(tensors.items())), {"other": "metadata"})
    revisions = set()
    for uri in (tmp_path, tmp_path / "one" / "all.safetensors"):
        with open_weights(uri, settings=SETTINGS) as weights:
            revisions.add(build(weights).revision)
    assert len(revisions) == 1


def test_manifest_build_stops_when_source_fails(tmp_path: Path) -> None:
    shards_of(tmp_path)
    with open_weights(tmp_path, settings=SETTINGS) as weights:
        short = MemorySource(b"", uri="mem:short")
        broken = msgspec.structs.replace(weights, sources=(weights.sources[0], short, weights.sources[2]))
        with pytest.raises(SourceTruncated, match="mem:short"):
            build(broken)
        with pytest.raises(ConfigError):
            build(weights, leaf_bytes=0)


def test_manifest_of_empty_tensors_is_verified(tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", {"e": tensor(0)})
    made = write_sidecar(tmp_path / "x.safetensors")
    assert made.leaves is not None and made.leaves.size == 0
    weights, _ = open_all(tmp_path / "x.safetensors")
    assert weights.why_unverified is None and weights.manifest.revision == made.revision


@pytest.mark.parametrize("kind", ["directory", "glob", "index", "list", "some", "file"])
def test_matching_manifest_sidecar_is_used(kind: str, tmp_path: Path) -> None:
    shards_of(tmp_path)
    write_index(tmp_path)
    made = write_sidecar(tmp_path / "model-0.safetensors" if kind == "file" else tmp_path)
    uri: weight_set.Uris = {
        "directory": tmp_path,
        "glob": f"{tmp_path}/*.safetensors",
        "index": tmp_path / "model.safetensors.index.json",
        "list": [tmp_path / f"model-{i}.safetensors" for i in range(3)],
        "some": [tmp_path / "model-2.safetensors", tmp_path / "model-1.safetensors"],
        "file": tmp_path / "model-0.safetensors",
    }[kind]
    weights, bodies = open_all(uri)
    assert weights.why_unverified is None
    assert weights.manifest.revision == made.revision and weights.manifest.leaf_bytes == 128
    assert weights.manifest.leaves is not None
    assert weights.manifest.leaves.tolist() == [
        xxhash.xxh3_64_intdigest(body[i : i + 128]) for body in bodies.values() for i in range(0, len(body), 128)
    ]


def changed_file(folder: Path, tensors: Mapping[str, tuple[DType, tuple[int, ...], bytes]]) -> None:
    write_file(folder / "model-1.safetensors", tensors, {"part": "1"})


SIDECAR_LIES: dict[str, tuple[dict[str, tuple[DType, tuple[int, ...], bytes]], str | None, str]] = {
    "dtype": ({"b.w": tensor(64, dtype=DType.I8), "a.scale": tensor(dtype=DType.F32)}, "b.w", "dtype, shape or offset"),
    "shape": ({"b.w": tensor(32, dtype=DType.U16), "a.scale": tensor(1, dtype=DType.F32)}, None, "manifest"),
    "name": ({"b.x": tensor(64), "a.scale": tensor(dtype=DType.F32)}, "b.x", "does not list the tensor"),
    "size": ({"b.w": tensor(6400), "a.scale": tensor(dtype=DType.F32)}, None, r"bytes, but \d+ in the manifest"),
}


@pytest.mark.parametrize("lie", SIDECAR_LIES)
def test_sidecar_contradicting_headers_is_refused(lie: str, tmp_path: Path) -> None:
    shards_of(tmp_path)
    write_sidecar(tmp_path)
    tensors, name, words = SIDECAR_LIES[lie]
    changed_file(tmp_path, tensors)
    with pytest.raises(FormatError, match=words) as caught:
        open_weights(tmp_path, settings=SETTINGS)
    assert name is None or caught.value.tensor == name
    assert caught.value.uri == f"{tmp_path}/penstock.manifest"


@pytest.mark.parametrize("column", ["offset", "file_index", "shapes"])
def test_sidecar_with_wrong_rows_is_refused(column: str, tmp_path: Path) -> None:
    shards_of(tmp_path)
    table = write_sidecar(tmp_path).tensors
    row = table.names.index("b.w")
    values = [*getattr(table, column)]
    values[row] = {"offset": 8, "file_index": 0, "shapes": (8, 8)}[column]
    changed = replace(table, **{column: tuple(values) if column == "shapes" else np.array(values, np.int64)})
    whole = decode((tmp_path / "penstock.manifest").read_bytes(), uri="mem:m")
    rows = np.array([whole.tensors.names.index(name) for name in table.names])
    leaves = manifest_file.leaves_of(whole, rows)
    assert leaves is not None
    lie = replace(whole, tensors=changed, leaves=leaves, revision=leaf.revision(changed, 128, leaves))
    (tmp_path / "penstock.manifest").write_bytes(encode(lie))
    with pytest.raises(FormatError, match="dtype, shape or offset") as caught:
        open_weights(tmp_path, settings=SETTINGS)
    assert caught.value.tensor == "b.w"


def test_sidecar_missing_a_file_is_refused(tmp_path: Path) -> None:
    shards_of(tmp_path)
    write_sidecar(tmp_path)
    write_file(tmp_path / "new.safetensors", {"new": tensor(1)})
    with pytest.raises(FormatError, match=r"does not list the file 'new\.safetensors'"):
        open_weights(tmp_path, settings=SETTINGS)


def test_sidecar_with_extra_tensor_is_refused(tmp_path: Path) -> None:
    shards_of(tmp_path)
    with open_weights(tmp_path, settings=SETTINGS) as weights:
        made = weights.manifest
    table = made.tensors
    more = TensorTable(
        names=(*table.names, "ghost"),
        dtypes=(*table.dtypes, DType.U8),
        shapes=(*table.shapes, (0,)),
        file_index=np.append(table.file_index, 1),
        offset=np.append(table.offset, 0),
        nbytes=np.append(table.nbytes, 0),
    )
    (tmp_path / "penstock.manifest").write_bytes(encode(replace(made, tensors=more)))
    with pytest.raises(FormatError, match="does not contain") as caught:
        open_weights(tmp_path, settings=SETTINGS)
    assert caught.value.tensor == "ghost"


def test_sidecar_with_too_few_leaves_is_refused(tmp_path: Path) -> None:
    shards_of(tmp_path)
    made = write_sidecar(tmp_path)
    (tmp_path / "penstock.manifest").write_bytes(packed(made, leaves=bytes(8)))
    with pytest.raises(FormatError, match="1 leaves, but the tensors have"):
        open_weights(tmp_path, settings=SETTINGS)


def test_manifest_without_digests_is_reported_as_unverified(tmp_path: Path) -> None:
    shards_of(tmp_path)
    with open_weights(tmp_path, settings=SETTINGS) as weights:
        raw = encode(weights.manifest)
    (tmp_path / "penstock.manifest").write_bytes(raw)
    for uri in (tmp_path, f"{tmp_path}/model-1*"):
        weights, _ = open_all(uri)
        assert weights.why_unverified == f"the manifest at {tmp_path}/penstock.manifest was made without digests"


def test_encoded_manifest_decodes_sorted_by_name(tmp_path: Path) -> None:
    shards_of(tmp_path)
    made = write_sidecar(tmp_path)
    back = decode(encode(made), uri="mem:m")
    rows = sorted(range(len(made.tensors)), key=made.tensors.names.__getitem__)
    expected = made.tensors.take(rows)
    assert back.files == made.files and back.revision == made.revision and back.leaf_bytes == made.leaf_bytes
    for column in ("names", "dtypes", "shapes"):
        assert getattr(back.tensors, column) == getattr(expected, column)
    for column in ("file_index", "offset", "nbytes"):
        assert getattr(back.tensors, column).tolist() == getattr(expected, column).tolist()
    assert encode(back) == encode(made)
    bare = replace(made, leaves=None, revision=f"h1-{'0' * 64}")
    assert decode(encode(bare), uri="mem:m").leaves is None


@pytest.fixture(scope="module")
def built_manifest(tmp_path_factory: pytest.TempPathFactory) -> manifest_file.Manifest:
    folder = tmp_path_factory.mktemp("made")
    shards_of(folder)
    write_file(folder / "model-3.safetensors", {"é": tensor(2, 2)})
    return write_sidecar(folder)


def packed(made: manifest_file.Manifest, **changes: object) -> bytes:
    """Return the manifest's bytes with changed fields and a matching revision."""
    raw = encode(made)
    sidecar = msgspec.msgpack.decode(raw[len(manifest_file.MAGIC) :]) | changes
    if sidecar["leaves"] is not None and "revision" not in changes and len(sidecar["leaves"]) % 8 == 0:
        leaves = np.frombuffer(sidecar["leaves"], np.uint64)
        sidecar["revision"] = leaf.root(sidecar["body"], sidecar["leaf_bytes"], leaves)
    return manifest_file.MAGIC + msgspec.msgpack.encode(sidecar)


def blocks(body: bytes) -> list[bytes]:
    return manifest_file._split_blocks(body, "mem:m")


def joined(parts: list[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def body_with(made: manifest_file.Manifest, index: int, block: bytes) -> bytes:
    rows = leaf.name_order(made.tensors)
    parts = blocks(leaf.canonical(made.tensors, rows))
    return joined([*parts[:index], block, *parts[index + 1 :]])


HUGE = (2**62).to_bytes(8, "little")
NUM_ROWS = 7


def test_contradictory_manifest_is_refused(built_manifest: manifest_file.Manifest) -> None:
    rows = leaf.name_order(built_manifest.tensors)
    body = leaf.canonical(built_manifest.tensors, rows)
    dtypes, codes, ranks, dims, lengths, text = blocks(body)
    file = {"name": "x", "nbytes": 10**6, "identity": "", "metadata": {}}
    bad = {
        "not a Penstock manifest": [b"", b"{}", b"PENSTOCK", manifest_file.MAGIC[:-1]],
        "malformed": [
            manifest_file.MAGIC,
            manifest_file.MAGIC + b"\xc0",
            encode(built_manifest)[:-1],
            encode(built_manifest) + b"\0",
            packed(built_manifest, extra=1),
            packed(built_manifest, leaf_bytes="1", revision="w1-"),
            packed(built_manifest, files=[{"name": "x"}]),
        ],
        "leaves of": [packed(built_manifest, leaf_bytes=n, revision="w1-") for n in (0, -1, 2**40)],
        "not begin with h1-": [
            packed(built_manifest, leaves=None, revision="w1-"),
            packed(built_manifest, leaves=None, revision="h1-\n"),
        ],
        "multiple of 8": [packed(built_manifest, leaves=b"1234567")],
        "its tensors have": [packed(built_manifest, leaves=bytes(8)), packed(built_manifest, leaf_bytes=1)],
        "is truncated": [
            packed(built_manifest, body=b""),
            packed(built_manifest, body=body[:-1]),
            packed(built_manifest, body=HUGE + body[8:]),
        ],
        "extra bytes": [packed(built_manifest, body=body + b"x")],
        "unknown dtypes": [packed(built_manifest, body=body_with(built_manifest, 0, b"F12"))],
        "have different lengths": [
            packed(built_manifest, body=body_with(built_manifest, 1, b"")),
            packed(built_manifest, body=body_with(built_manifest, 4, b"")),
        ],
        "out of range": [
            packed(built_manifest, body=body_with(built_manifest, 0, b"")),
            packed(built_manifest, body=body_with(built_manifest, 1, b"\xff" * NUM_ROWS)),
            packed(built_manifest, body=body_with(built_manifest, 2, b"\xff" * NUM_ROWS)),
        ],
        "sorted set of its rows": [
            packed(built_manifest, body=body_with(built_manifest, 0, dtypes + b"\nU8")),
            packed(built_manifest, body=body_with(built_manifest, 0, b"\n".join(reversed(dtypes.split(b"\n"))))),
        ],
        "match its ranks": [packed(built_manifest, body=body_with(built_manifest, 3, dims[8:]))],
        "match their lengths": [packed(built_manifest, body=body_with(built_manifest, 5, text + b"x"))],
        "not UTF-8": [packed(built_manifest, body=body_with(built_manifest, 5, text[:-1] + b"x"))],
        "sorted": [packed(built_manifest, body=body_with(built_manifest, 5, b"z" * len(text)))],
        "invalid shape": [
            packed(built_manifest, body=body_with(built_manifest, 3, b"\xff" * len(dims))),
            packed(built_manifest, body=body_with(built_manifest, 3, HUGE * (len(dims) // 8))),
        ],
        "column file_index": [packed(built_manifest, file_index=b"")],
        "column offset": [packed(built_manifest, offset=bytes(8))],
        "negative size": [packed(built_manifest, files=[file | {"nbytes": -1}] * 4)],
        "outside its file": [
            packed(built_manifest, file_index=b"\xff" * 8 * NUM_ROWS),
            packed(built_manifest, file_index=bytes([99] + [0] * 7) * NUM_ROWS),
            packed(built_manifest, offset=b"\xff" * 8 * NUM_ROWS),
            packed(built_manifest, offset=HUGE * NUM_ROWS),
            packed(built_manifest, files=[]),
            packed(built_manifest, files=[file | {"nbytes": 10}] * 4),
        ],
    }
    for words, raws in bad.items():
        for raw in raws:
            with pytest.raises(FormatError, match=words):
                decode(raw, uri="mem:m")
    assert (
        decode(packed(built_manifest, files=[file | {"nbytes": 2**64 - 1}] * 4), uri="mem:m").files[0].nbytes
        == 2**64 - 1
    )
    assert (len(codes), len(ranks), len(lengths)) == (NUM_ROWS, NUM_ROWS, 4 * NUM_ROWS) and dtypes


def test_deeply_nested_manifest_is_refused() -> None:
    with pytest.raises(FormatError):
        decode(manifest_file.MAGIC + b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0", uri="mem:m")


@pytest.mark.parametrize("field", ["leaves", "body", "revision", "leaf_bytes"])
def test_changed_manifest_raises_integrity_error(field: str, built_manifest: manifest_file.Manifest) -> None:
    sidecar = msgspec.msgpack.decode(encode(built_manifest)[len(manifest_file.MAGIC) :])
    changed = {
        "leaves": lambda v: bytes([v[0] ^ 1]) + v[1:],
        "body": lambda v: v[:-1] + bytes([v[-1] ^ 1]),
        "revision": lambda v: "w1-" + "0" * 64,
        "leaf_bytes": lambda v: v + 1,
    }[field](sidecar[field])
    raw = manifest_file.MAGIC + msgspec.msgpack.encode(sidecar | {field: changed})
    with pytest.raises(IntegrityError, match="the content has"):
        decode(raw, uri="mem:m")


@hypothesis_settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_manifest_raises_only_documented_errors(
    data: st.DataObject, built_manifest: manifest_file.Manifest
) -> None:
    raw = bytearray(encode(built_manifest))
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    with contextlib.suppress(PenstockError):
        assert decode(bytes(raw), uri="mem:m").revision == built_manifest.revision, (
            "other content under the same revision"
        )
    body = bytearray(leaf.canonical(built_manifest.tensors, leaf.name_order(built_manifest.tensors)))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PenstockError):
        found = decode(packed(built_manifest, body=bytes(body)), uri="mem:m")
        assert leaf.canonical(found.tensors, leaf.name_order(found.tensors)) == bytes(body)


def test_signature_is_checked_against_public_key() -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    signature = weight_set.sign(b"manifest", private)
    assert len(signature) == 64
    weight_set.check_signature(b"manifest", signature, public)
    for raw, text in ((b"manifesT", signature), (b"manifest", signature[:-1]), (b"manifest", b"")):
        with pytest.raises(IntegrityError):
            weight_set.check_signature(raw, text, public)
    other = ec.generate_private_key(ec.SECP256R1())
    other_private = other.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    other_public = other.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    locked = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x"))
    for bad in (b"", b"junk", public, other_private, locked):
        with pytest.raises(ConfigError, match="private key"):
            weight_set.sign(b"manifest", bad)
    for bad in (b"", b"junk", private, other_public):
        with pytest.raises(ConfigError, match="public key"):
            weight_set.check_signature(b"manifest", signature, bad)


def test_manifest_uri_is_derived_from_location(tmp_path: Path) -> None:
    shards_of(tmp_path)
    folder = str(tmp_path)
    beside = f"{folder}/penstock.manifest"
    assert sidecar_uri(folder) == sidecar_uri(f"{folder}/") == sidecar_uri(f"file://{folder}") == beside
    assert sidecar_uri(f"{folder}/*.safetensors") == sidecar_uri(f"{folder}/model.safetensors.index.json") == beside
    assert sidecar_uri(f"{folder}/model-0.safetensors") == f"{folder}/model-0.safetensors.penstock.manifest"
    assert sidecar_uri("s3://b/m") == sidecar_uri("s3://b/m/*.safetensors") == "s3://b/m/penstock.manifest"
    assert sidecar_uri("s3://b/m/x.safetensors") == "s3://b/m/x.safetensors.penstock.manifest"
    assert signature_uri(folder) == f"{beside}.sig"
    for uri in (f"{folder}/*/x.safetensors", "s3://b/*/x.safetensors", "https://h/x.safetensors?sig=secret"):
        with pytest.raises(ConfigError) as caught:
            sidecar_uri(uri)
        assert "secret" not in str(caught.value)


class Bucket:
    """Objects by URI, for `open_source`, `list_uris` and `read_small`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, objects: Mapping[str, bytes]) -> None:
        self.objects = objects
        self.may_list = True
        self.absent: type[PenstockError] = NotFound
        for name in ("open_source", "list_uris", "read_small"):
            for module in (weight_set, locate):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, getattr(self, name))

    def open_source(self, uri: str, **_: object) -> MemorySource:
        if uri not in self.objects:
            raise self.absent("absent", uri=uri)
        return MemorySource(self.objects[uri], uri=uri)

    def list_uris(self, uri: str, **_: object) -> list[str]:
        if not self.may_list:
            raise PermissionDenied("no listing", uri=uri)
        if uri in self.objects:
            return [uri]
        found = sorted(name for name in self.objects if name.startswith(uri.rstrip("/") + "/"))
        if not found:
            raise NotFound("nothing", uri=uri)
        return found

    def read_small(self, uri: str, **_: object) -> bytes | None:
        if uri not in self.objects and self.absent is PermissionDenied:
            raise PermissionDenied("forbidden", uri=uri)
        return self.objects.get(uri)


def objects_of(folder: Path, base: str) -> dict[str, bytes]:
    return {f"{base}{path.name}": path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("uri", ["s3://b/m", "s3://b/m/", "gs://b/m/model.safetensors.index.json"])
def test_object_store_prefix_is_opened(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards_of(tmp_path)
    write_index(tmp_path)
    write_sidecar(tmp_path)
    Bucket(monkeypatch, objects_of(tmp_path, f"{uri.partition(':')[0]}://b/m/"))
    weights, bodies = open_all(uri)
    assert list(bodies) == ALL and weights.why_unverified is None


def test_object_without_weight_suffix_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "x", {"a": tensor(1)})
    Bucket(monkeypatch, {"s3://b/blobs/0123": (tmp_path / "x").read_bytes()})
    assert list(open_all("s3://b/blobs/0123")[1]) == ["a"]
    with pytest.raises(NotFound):
        open_weights("s3://b/other", settings=SETTINGS)


@pytest.mark.parametrize("uri", ["s3://b/m", "https://host/m"])
@pytest.mark.parametrize("with_index", [True, False])
def test_location_without_list_permission_is_opened(
    uri: str, with_index: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_index:
        shards_of(tmp_path)
        write_index(tmp_path)
    else:
        write_file(tmp_path / "model.safetensors", {"a": tensor(1)})
    bucket = Bucket(monkeypatch, objects_of(tmp_path, f"{uri}/"))
    bucket.may_list = False
    bucket.absent = PermissionDenied if uri.startswith("s3") else NotFound
    weights, bodies = open_all(uri)
    assert list(bodies) == (ALL if with_index else ["a"])
    assert weights.why_unverified == f"no manifest at {uri}/penstock.manifest"


def test_secrets_in_urls_are_removed_from_reported_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "x", {"a": tensor(1)})
    url = "https://user:secret@host/x.safetensors?sig=secret"
    Bucket(monkeypatch, {url: (tmp_path / "x").read_bytes()})
    weights, _ = open_all(url)
    assert weights.uri == "https://host/x.safetensors"
    assert weights.manifest.files[0].name == "x.safetensors"
    assert "secret" not in str(weights.why_unverified)


def test_unlistable_directory_raises_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(monkeypatch, {})
    bucket.may_list = False
    with pytest.raises(PermissionDenied):
        open_weights(tmp_path, settings=SETTINGS)


def test_unreadable_sidecar_raises_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "x.safetensors", {"a": tensor(1)})
    bucket = Bucket(monkeypatch, {str(tmp_path / "x.safetensors"): (tmp_path / "x.safetensors").read_bytes()})
    bucket.absent = PermissionDenied
    with pytest.raises(PermissionDenied):
        open_weights(tmp_path / "x.safetensors", settings=SETTINGS)


def test_manifest_build_raises_if_source_changes(tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", {"a": tensor(100)})
    with open_weights(tmp_path / "x.safetensors", settings=SETTINGS) as weights:
        write_file(tmp_path / "y.safetensors", {"a": tensor(101)})
        with (tmp_path / "x.safetensors").open("r+b") as file:
            file.truncate(10)
        with pytest.raises((SourceChanged, SourceTruncated)):
            build(weights)


def test_directory_listing_is_sorted_and_flat(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_text("")
    (tmp_path / "below").mkdir()
    names = [f"{tmp_path}/a", f"{tmp_path}/b"]
    assert storage.list_uris(str(tmp_path), settings=SETTINGS) == names
    assert storage.list_uris(f"file://{tmp_path}/", settings=SETTINGS) == names
    assert storage.list_uris(f"{tmp_path}/*", settings=SETTINGS) == names
    assert storage.list_uris(names[0], settings=SETTINGS) == names[:1]
    for uri in (tmp_path / "c", f"{tmp_path}/c*", tmp_path / "below"):
        with pytest.raises(NotFound):
            storage.list_uris(str(uri), settings=SETTINGS)


def test_small_file_above_size_limit_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small"
    assert storage.read_small(str(path), settings=SETTINGS) is None
    path.write_bytes(b"text")
    assert storage.read_small(str(path), settings=SETTINGS) == b"text"
    assert storage.read_small(f"{path}/below", settings=SETTINGS) is None
    with pytest.raises(PenstockError):
        storage.read_small(str(tmp_path), settings=SETTINGS)
    monkeypatch.setattr(storage, "MAX_SMALL_BYTES", 3)
    with pytest.raises(FormatError, match="above the limit"):
        storage.read_small(str(path), settings=SETTINGS)


def test_manifest_file_entry_contains_size_and_identity(tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", {"a": tensor(1)})
    weights, _ = open_all(tmp_path / "x.safetensors")
    nbytes = (tmp_path / "x.safetensors").stat().st_size
    identity = weights.sources[0].identity
    assert weights.manifest.files == (FileEntry(name="x.safetensors", nbytes=nbytes, identity=identity),)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("name", ["inner", "inner/model.safetensors", "inner/*.safetensors", ""])
def test_unsearchable_directory_raises_permission_denied(tmp_path: Path, name: str) -> None:
    """`NotFound` would mislead the user, because the file may exist."""
    closed = tmp_path / "closed"
    (closed / "inner").mkdir(parents=True)
    closed.chmod(0o700)
    # Only this user can search the directories of pytest.
    for directory in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        directory.chmod(0o755)

    def try_all() -> list[str]:
        kinds = []
        for call in (
            lambda: locate.require_local(str(closed / name)),
            lambda: open_weights(str(closed / name), settings=Settings()),
        ):
            try:
                call()
            except PenstockError as error:
                kinds.append(type(error).__name__)
        return kinds

    assert run_as(STRANGER, try_all) == ["PermissionDenied", "PermissionDenied"]
