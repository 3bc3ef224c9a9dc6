"""Directories with adapters, variants, hidden files or duplicate copies next to the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import penstock as ps
from penstock.errors import ConfigError, FormatError, NotFound
from penstock.storage import text_of

PLAIN = "model.safetensors"


def write(directory: Path, *names: str, tensor: str = "w") -> None:
    """Write files with one tensor each, whose value is the number of the file."""
    directory.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        save_file({tensor: np.full(2, number, np.float32)}, str(directory / name))


def write_index(directory: Path, weight_map: dict[str, str], name: str = f"{PLAIN}.index.json") -> None:
    (directory / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def files_of(place: object) -> list[str]:
    return [file.name for file in ps.inspect(place).manifest.files]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        "model.fp16.safetensors",
        "model.BF16.safetensors",
        "model.non_ema.safetensors",
        "model.fp16-00001-of-00002.safetensors",
        "model-00001-of-00002.fp8.safetensors",
        "consolidated.safetensors",
        "consolidated.00.safetensors",
        "adapter_model.safetensors",
        "pytorch_lora_weights.safetensors",
        "._model.safetensors",
        ".model-backup.safetensors",
    ],
)
def test_alternative_file_next_to_model_is_ignored(tmp_path: Path, other: str) -> None:
    write(tmp_path, PLAIN, other)
    # Weights with other names are ignored too.
    write(tmp_path, other, tensor="only in the other")
    assert files_of(tmp_path) == [PLAIN]
    assert files_of(tmp_path / other) == [other]
    assert files_of([tmp_path / PLAIN, tmp_path / other]) == sorted([PLAIN, other])


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "x.fp16.safetensors", "consolidated.safetensors"])
def test_alternative_file_without_model_is_loaded(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    assert files_of(tmp_path) == [name]


def test_dotted_shard_names_form_one_model(tmp_path: Path) -> None:
    write(tmp_path, PLAIN, tensor="a")
    write(tmp_path, "model.vision.safetensors", tensor="b")
    assert files_of(tmp_path) == [PLAIN, "model.vision.safetensors"]


def test_several_variants_without_plain_file_raise_config_error(tmp_path: Path) -> None:
    write(tmp_path, "unet.fp16.safetensors", "unet.bf16.safetensors")
    with pytest.raises(ConfigError, match=r"unet\.bf16\.safetensors, unet\.fp16\.safetensors") as caught:
        ps.inspect(tmp_path)
    assert "glob" in str(caught.value.hint)
    assert files_of(f"{tmp_path}/*.fp16*.safetensors") == ["unet.fp16.safetensors"]


@pytest.mark.parametrize(
    "index", ["consolidated.safetensors.index.json", "model.fp16.safetensors.index.json", "._x.safetensors.index.json"]
)
def test_index_of_alternative_file_is_ignored(tmp_path: Path, index: str) -> None:
    other = index.removesuffix(".index.json")
    write(tmp_path, PLAIN, other)
    write_index(tmp_path, {"w": other}, index)
    assert files_of(tmp_path) == [PLAIN]
    (tmp_path / PLAIN).unlink()
    if not index.startswith("."):
        assert files_of(tmp_path) == [other]


def test_directory_with_only_hidden_weights_raises(tmp_path: Path) -> None:
    write(tmp_path, ".hidden.safetensors")
    with pytest.raises(NotFound):
        ps.inspect(tmp_path)


@pytest.mark.parametrize("name", ["MODEL.SAFETENSORS", "Model.SafeTensors"])
def test_uppercase_extension_is_found(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    assert files_of(tmp_path) == [name]


def test_index_selects_shard_for_duplicate_tensor(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    save_file({"a": np.zeros(2, np.float32), "b": np.ones(2, np.float32)}, str(tmp_path / "1.safetensors"))
    save_file({"a": np.full(2, 5, np.float32), "c": np.ones(2, np.float32)}, str(tmp_path / "2.safetensors"))
    with pytest.raises(FormatError, match="two files") as caught:
        ps.inspect(tmp_path)
    assert "copy it again" not in str(caught.value.hint) and "glob" in str(caught.value.hint)
    for file, value in (("1.safetensors", 0.0), ("2.safetensors", 5.0)):
        write_index(tmp_path, {"a": file, "b": "1.safetensors", "c": "2.safetensors"})
        loaded = ps.load(tmp_path, progress=False)
        assert sorted(loaded) == ["a", "b", "c"] and float(loaded["a"][0]) == value
        manifest = tmp_path / "penstock.manifest"
        ps.manifest(tmp_path, progress=False)
        assert ps.verify(tmp_path, progress=False).verified
        manifest.unlink()


def test_index_contradicting_files_raises_with_hint(tmp_path: Path) -> None:
    write(tmp_path, PLAIN)
    for weight_map, fault in (
        ({"w": PLAIN, "gone": PLAIN}, "does not hold it"),
        ({"other": PLAIN}, "does not name it"),
    ):
        write_index(tmp_path, weight_map)
        with pytest.raises(FormatError, match=fault) as caught:
            ps.inspect(tmp_path)
        assert "copy it again" not in str(caught.value.hint) and "*.safetensors" in str(caught.value.hint)
    assert files_of(f"{tmp_path}/*.safetensors") == [PLAIN]


def test_valid_tensors_load_despite_stale_index(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write(tmp_path, PLAIN)
    write_index(tmp_path, {"w": PLAIN, "gone": PLAIN})
    assert list(ps.load(tmp_path, names="w", progress=False)) == ["w"]
    with pytest.raises(FormatError, match="does not hold it"):
        ps.load(tmp_path, names=["w", "gone"], progress=False)


def test_index_with_byte_order_mark_is_read(tmp_path: Path) -> None:
    write(tmp_path, "a.safetensors")
    index = tmp_path / f"{PLAIN}.index.json"
    index.write_bytes(b"\xef\xbb\xbf" + json.dumps({"weight_map": {"w": "a.safetensors"}}).encode())
    assert files_of(tmp_path) == ["a.safetensors"]


def test_hub_cache_path_error_suggests_snapshot_path(tmp_path: Path) -> None:
    place = tmp_path / "models--org--some--name"
    (place / "snapshots" / "abc").mkdir(parents=True)
    with pytest.raises(NotFound) as caught:
        ps.inspect(place)
    assert f"{place}/snapshots/COMMIT" in str(caught.value.hint) and "org/some--name" in str(caught.value.hint)


def test_file_names_with_question_mark_are_opened(tmp_path: Path) -> None:
    write(tmp_path, "what?.safetensors", "a#b.safetensors")
    assert files_of(tmp_path / "what?.safetensors") == ["what?.safetensors"]
    assert files_of(tmp_path / "a#b.safetensors") == ["a#b.safetensors"]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("HTTP://Host/A.safetensors#part", "http://Host/A.safetensors"),
        ("https://h/a?x=%23#b", "https://h/a?x=%23"),
        ("S3://Bucket/a#b", "s3://Bucket/a#b"),
        ("FILE:///a#b", "file:///a#b"),
        ("HF://org/Name", "hf://org/Name"),
        ("a#b", "a#b"),
    ],
)
def test_scheme_is_lowercased_and_http_fragment_is_removed(given: str, read: str) -> None:
    assert text_of(given) == read
