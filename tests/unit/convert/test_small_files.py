"""Small files of remote places: what is copied, and names that lead elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from penstock.config import Settings
from penstock.errors import NotFound, SourceUnavailable
from penstock.storage import MemorySource, Source, register_storage
from penstock_convert.small_files import find_small_files

FILES: dict[str, bytes] = {}
BROKEN: list[str] = []


class Shelf:
    """A storage of `shelf://` whose names may be anything."""

    def open(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> Source:
        if uri not in FILES:
            raise NotFound("no such file", uri=uri)
        return MemorySource(FILES[uri], uri=uri)

    def list(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> list[str]:
        if BROKEN and "*" in uri:
            raise SourceUnavailable(BROKEN[0], uri=uri)
        prefix = uri.removesuffix("**").rstrip("/") + "/"
        return sorted(name for name in FILES if name.startswith(prefix) and ("*" in uri or name.count("/") == 3))

    def read_small(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> bytes | None:
        return FILES.get(uri)


@pytest.fixture(scope="module", autouse=True)
def shelf() -> None:
    register_storage("shelf", Shelf)


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    FILES.update(
        {
            "shelf://m/model.safetensors": b"x",
            "shelf://m/config.json": b"{}",
            "shelf://m/1_Pooling/config.json": b"{}",
            "shelf://m/../evil.json": b"{}",
            "shelf://m/a/../../evil.json": b"{}",
            "shelf://m/a//b.json": b"{}",
            "shelf://m/.git/config.json": b"{}",
            "shelf://m/onnx/config.json": b"{}",
            "shelf://m/pytorch_model.bin": b"x",
        }
    )
    yield
    FILES.clear()
    BROKEN.clear()


def test_names_outside_model_directory_are_skipped() -> None:
    found = find_small_files("shelf://m", ["model.safetensors"], settings=Settings.read())
    assert set(found.files) == {"config.json", "1_Pooling/config.json"}
    out = "a name that leads out of the directory"
    assert {name.removeprefix("shelf://m/"): why for name, why in found.left_out.items()} == {
        "../evil.json": out,
        "a/../../evil.json": out,
        "a//b.json": out,
        "onnx/config.json": "the folder onnx is not part of the model in this format",
        "pytorch_model.bin": "weights in another format",
    }


def test_unlistable_folders_are_reported() -> None:
    BROKEN.append("the store is away")
    del FILES["shelf://m/../evil.json"]
    found = find_small_files("shelf://m", ["model.safetensors"], settings=Settings.read())
    assert set(found.files) == {"config.json"}
    assert found.left_out["shelf://m/"] == "the folders cannot be listed: the store is away"
