"""Code for Run:ai Model Streamer runs unchanged with `penstock_hf.runai_streamer`."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.ranks import run_ranks

from penstock.errors import ConfigError, FormatError, PenstockError
from penstock_hf import runai_streamer
from penstock_hf.runai_streamer import (
    DistributedStreamer,
    FileChunks,
    FileStreamer,
    ObjectStorageModel,
    S3Credentials,
    SafetensorsStreamer,
    list_safetensors,
    pull_files,
)

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.arange(7, dtype=torch.bfloat16),
    "b.odd": torch.arange(5, dtype=torch.uint8),
    "c.none": torch.zeros(0, 3, dtype=torch.float16),
    "c.scalar": torch.tensor(3, dtype=torch.int64),
    "c.big": torch.arange(700_000, dtype=torch.int32),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({n: t for n, t in TENSORS.items() if n[0] < "c"}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({n: t for n, t in TENSORS.items() if n[0] >= "c"}, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def files(model: Path) -> list[str]:
    return sorted(list_safetensors(str(model)))


def assert_all(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor] = TENSORS) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def read_as_the_readme_does(path: str) -> dict[str, torch.Tensor]:
    found = {}
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)
        for name, tensor in streamer.get_tensors():
            found[name] = tensor.to("cpu")
    return found


def read_as_engines_do(paths: list[str], is_distributed: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths, device="cpu", is_distributed=is_distributed)
        total = sum(len(tensors_meta) for tensors_meta in streamer.files_to_tensors_metadata.values())
        count = 0
        for name, tensor in streamer.get_tensors():
            tensor.untyped_storage().from_an_engine = True  # type: ignore[attr-defined]
            count += 1
            yield name, tensor
        assert count == total


class TestSafetensorsStreamer:
    def test_readme_example_matches_safetensors(self, model: Path) -> None:
        for path in files(model):
            assert_all(read_as_the_readme_does(path), load_file(path))

    @pytest.mark.parametrize("is_distributed", [False, True])
    def test_streamed_tensors_match_safetensors(self, model: Path, is_distributed: bool) -> None:
        assert_all(dict(read_as_engines_do(files(model), is_distributed)))

    def test_retained_streamed_tensors_do_not_change(self, model: Path) -> None:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(files(model))
            kept = list(streamer.get_tensors())
        assert_all(dict(kept))

    def test_metadata_lists_every_file(self, model: Path) -> None:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(files(model), None, "cpu")
            assert set(streamer.files_to_tensors_metadata) == {0, 1}
            for i, path in enumerate(files(model)):
                true = load_file(path)
                described = streamer.files_to_tensors_metadata[i]
                assert {one.name for one in described} == set(true)
                starts = [one.offsets.start for one in described]
                assert starts == sorted(starts)
                for one in described:
                    tensor = true[one.name]
                    assert one.shape == list(tensor.shape)
                    assert one.get_torch_dtype() == tensor.dtype
                    assert one.get_bytesize() == one.offsets.get_diff() == tensor.nbytes
                    assert one.get_item_count() * one.get_element_size() == tensor.nbytes
            assert streamer.total_size == sum(t.nbytes for t in TENSORS.values())
            assert streamer.device_str == "cpu"

    def test_only_requested_names_are_streamed(self, model: Path) -> None:
        wanted = {"a.weight", "c.big"}
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(files(model), tensor_names=wanted)
            assert streamer.total_size == sum(TENSORS[name].nbytes for name in wanted)
            assert_all(dict(streamer.get_tensors()), {name: TENSORS[name] for name in wanted})

    @pytest.mark.parametrize("names", ["a.weight", [], ["nope"]])
    def test_invalid_tensor_names_are_refused(self, model: Path, names: Any) -> None:
        with SafetensorsStreamer() as streamer, pytest.raises(ValueError, match="tensor_names"):
            streamer.stream_files(files(model), tensor_names=names)

    def test_files_with_equal_names_are_both_streamed(self, model: Path) -> None:
        save_file({"a.weight": torch.ones(2)}, model / "other.safetensors")
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(files(model))
            found = list(streamer.get_tensors())
            assert [name for name, _ in found].count("a.weight") == 2
            with pytest.raises(ValueError, match="more than one file"):
                streamer.stream_files(files(model), tensor_names=["a.weight"])

    def test_one_streamer_streams_several_files_in_turn(self, model: Path) -> None:
        with SafetensorsStreamer() as streamer:
            for path in files(model):
                streamer.stream_file(path)
                assert_all(dict(streamer.get_tensors()), load_file(path))

    def test_streamer_is_reusable_after_abandoned_iteration(self, model: Path) -> None:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(files(model))
            for _ in streamer.get_tensors():
                break
            streamer.stream_files(files(model))
            assert_all(dict(streamer.get_tensors()))

    def test_streamer_outside_with_block_raises(self, model: Path) -> None:
        streamer = SafetensorsStreamer()
        with pytest.raises(ValueError, match="not initialized"):
            streamer.stream_files(files(model))
        with streamer:
            pass
        with pytest.raises(ValueError, match="not initialized"):
            next(streamer.get_tensors())

    @pytest.mark.parametrize("raw", [b"", b"abc", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"])
    def test_invalid_file_raises_format_error(self, tmp_path: Path, raw: bytes) -> None:
        path = tmp_path / "bad.safetensors"
        path.write_bytes(raw)
        with SafetensorsStreamer() as streamer, pytest.raises(ValueError) as caught:
            streamer.stream_file(str(path))
        assert isinstance(caught.value, FormatError)

    def test_truncated_and_missing_files_raise_value_error(self, model: Path) -> None:
        path = Path(files(model)[0])
        path.write_bytes(path.read_bytes()[:-1])
        with SafetensorsStreamer() as streamer:
            for name in (str(path), str(path) + ".none"):
                with pytest.raises(ValueError) as caught:
                    streamer.stream_file(name)
                assert isinstance(caught.value, PenstockError)

    def test_streamer_memory_limit_is_read_from_environment(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RUNAI_STREAMER_MEMORY_LIMIT", str(16 << 20))
        monkeypatch.setenv("RUNAI_STREAMER_CONCURRENCY", "2")
        assert_all(dict(read_as_engines_do(files(model))))
        monkeypatch.setenv("RUNAI_STREAMER_CONCURRENCY", "none")
        with SafetensorsStreamer() as streamer, pytest.raises(ConfigError, match="RUNAI_STREAMER_CONCURRENCY"):
            streamer.stream_files(files(model))


def sums_of_every_tensor(rank: int, world_size: int, paths: list[str]) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in read_as_engines_do(paths, is_distributed=True)}


@pytest.mark.parametrize("dist", ["auto", "1", "0"])
def test_all_ranks_receive_every_tensor(model: Path, dist: str) -> None:
    outcomes = run_ranks(sums_of_every_tensor, 2, files(model), environ={"RUNAI_STREAMER_DIST": dist})
    wanted = {name: float(tensor.double().sum()) for name, tensor in TENSORS.items()}
    assert [outcome.value for outcome in outcomes] == [wanted, wanted]


class TestFileStreamer:
    @pytest.fixture
    def data(self, tmp_path: Path) -> tuple[str, np.ndarray[Any, Any]]:
        raw = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
        (tmp_path / "raw").write_bytes(raw.tobytes())
        return str(tmp_path / "raw"), raw

    @pytest.mark.parametrize("memory_limit", [None, 1, 200_000, -1])
    def test_requested_byte_ranges_are_streamed(
        self, data: tuple[str, np.ndarray[Any, Any]], memory_limit: int | None
    ) -> None:
        path, raw = data
        requests = [
            FileChunks.contiguous(7, path, 100, [10, 0, 100_000, 1]),
            FileChunks(8, path, [900_000, 5, 400_000], [148_576, 1, 300_000]),
        ]
        with FileStreamer() as streamer:
            streamer.stream_files(requests, None, "cpu", memory_limit)
            found = {(id, index): tensor for id, index, tensor in streamer.get_chunks()}
        wanted = {
            (r.id, i): raw[at : at + n]
            for r in requests
            for i, (at, n) in enumerate(zip(r.offsets, r.sizes, strict=True))
        }
        assert found.keys() == wanted.keys()
        for key, tensor in found.items():
            assert tensor.shape == (1, len(wanted[key]))
            assert tensor.dtype == torch.uint8
            assert tensor.numpy().tobytes() == wanted[key].tobytes()

    def test_file_chunks_compute_offsets_and_sizes(self) -> None:
        chunks = FileChunks.contiguous(1, "x", 10, [5, 7, 2])
        assert chunks.offsets == [10, 15, 22]
        assert (chunks.total_size(), chunks.max_chunk_size()) == (14, 7)
        assert FileChunks.contiguous(1, "x", 10, []).offsets == []
        assert "3 ranges" in repr(chunks)
        with pytest.raises(ValueError):
            FileChunks(1, "x", [1], [])

    def test_second_stream_before_first_finishes_raises(self, data: tuple[str, np.ndarray[Any, Any]]) -> None:
        requests = [FileChunks(0, data[0], [0, 10], [10, 10])]
        with FileStreamer() as streamer:
            streamer.stream_files(requests)
            with pytest.raises(ValueError, match="new stream"):
                streamer.stream_files(requests)
            for _ in streamer.get_chunks():
                break
            streamer.stream_files(requests)
            assert len(list(streamer.get_chunks())) == 2
        with pytest.raises(ValueError, match="not initialized"):
            streamer.stream_files(requests)

    def test_invalid_chunks_and_devices_are_refused(
        self, data: tuple[str, np.ndarray[Any, Any]], tmp_path: Path
    ) -> None:
        with FileStreamer() as streamer:
            streamer.stream_files([FileChunks(0, data[0], [0, 1 << 20], [10, 1])])
            with pytest.raises(ValueError):
                list(streamer.get_chunks())
            with pytest.raises(ValueError):
                streamer.stream_files([FileChunks(0, str(tmp_path / "none"), [0], [1])])
            with pytest.raises(ValueError, match="multiple source types"):
                streamer.stream_files([FileChunks(0, data[0], [0], [1]), FileChunks(1, "s3://b/k", [0], [1])])
            with pytest.raises(ValueError, match="device"):
                streamer.stream_files([FileChunks(0, data[0], [0], [1])], device="bogus")

    def test_distributed_streamer_reads_ranges(self, data: tuple[str, np.ndarray[Any, Any]]) -> None:
        path, raw = data
        with DistributedStreamer() as streamer:
            streamer.stream_files([FileChunks.contiguous(0, path, 8, [8, 8])], None, "cpu", True)
            found = {index: tensor.numpy().tobytes() for _, index, tensor in streamer.get_chunks()}
        assert found == {0: raw[8:16].tobytes(), 1: raw[16:24].tobytes()}

    def test_file_listing_filters_by_pattern(self, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        for name, nbytes in (("a.json", 3), ("b.safetensors", 5), ("in/c.json", 7)):
            (tmp_path / name).write_bytes(b"x" * nbytes)
        root = str(tmp_path)
        assert [n for _, n in FileStreamer().list_files(root)] == [3, 5, 7]
        assert [n for _, n in FileStreamer().list_files(root, is_recursive=False)] == [3, 5]
        assert [n for _, n in FileStreamer().list_files(root, True, ["*.json"])] == [3, 7]
        assert [n for _, n in FileStreamer().list_files(root, True, None, ["*.json"])] == [5]


class TestFiles:
    def test_list_safetensors_is_not_recursive(self, model: Path) -> None:
        (model / "deep").mkdir()
        save_file({"x": torch.ones(1)}, model / "deep" / "x.safetensors")
        (model / "config.json").write_text("{}")
        assert [Path(p).name for p in files(model)] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        assert list_safetensors(str(model / "none")) == []

    def test_pull_from_local_directory_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(NotImplementedError):
            pull_files(str(tmp_path), str(tmp_path / "to"))
        with pytest.raises(ValueError, match="model_path"):
            ObjectStorageModel(str(tmp_path), str(tmp_path / "to"))

    def test_credentials_repr_omits_secret_key(self) -> None:
        credentials = S3Credentials(access_key_id="id", secret_access_key="hidden", endpoint="http://h")
        assert "hidden" not in repr(credentials)


class TestInstall:
    def test_engine_imports_resolve_to_replacement(self, model: Path) -> None:
        code = (
            "from penstock_hf import runai_streamer; runai_streamer.install(); runai_streamer.install();"
            "from runai_model_streamer import SafetensorsStreamer, list_safetensors, pull_files, ObjectStorageModel;"
            "from runai_model_streamer.s3_utils.s3_utils import S3Credentials;"
            "from runai_model_streamer.file_streamer.requests_iterator import FileChunks;"
            "assert SafetensorsStreamer is runai_streamer.SafetensorsStreamer"
        )
        done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def test_install_after_library_import_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "runai_model_streamer", type(sys)("runai_model_streamer"))
        with pytest.raises(ConfigError, match="already imported"):
            runai_streamer.install()
