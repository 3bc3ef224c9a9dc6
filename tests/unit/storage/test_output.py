"""Output sets accept bytes in any order, repeatedly, from two processes, and appear only when complete."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.errors import ConfigError, DestinationError, DiskFull
from penstock.storage import local
from penstock.storage.file_names import file_names
from penstock.storage.output import OutputSet
from penstock.types import DType
from penstock_convert.output_region import OutputRegion
from penstock_convert.plan.tasks import OutputFiles, Spec, lay_out

SHAPES = {"a": (7, 5), "b": (3,), "c": (64, 64), "d": (0, 4), "e": ()}
TENSORS = {name: np.random.default_rng(7).integers(0, 1 << 20, shape, np.int32) for name, shape in SHAPES.items()}


def laid_out(shard_bytes: int = 8192) -> OutputFiles:
    specs = [Spec(name=name, dtype=DType.I32, shape=array.shape) for name, array in TENSORS.items()]
    return lay_out(specs, shard_bytes=shard_bytes)


def make_output(directory: Path, files: OutputFiles) -> OutputSet:
    return OutputSet(directory, files.table, files.body_nbytes, {"format": "pt"})


def pieces(files: OutputFiles) -> list[tuple[int, int, bytes]]:
    """Return all (file, offset, bytes) to write, with at most 1,000 bytes each."""
    found = []
    for row, name in enumerate(files.table.names):
        raw, at = TENSORS[name].tobytes(), int(files.table.offset[row])
        for start in range(0, len(raw), 1000):
            found.append((int(files.table.file_index[row]), at + start, raw[start : start + 1000]))
    return found


@pytest.mark.parametrize("shard_bytes", [1 << 20, 8192, 100])
def test_interleaved_writers_produce_valid_files(tmp_path, shard_bytes):
    files = laid_out(shard_bytes)
    first, second = make_output(tmp_path / "growing", files), make_output(tmp_path / "growing", files)
    first.create()
    first.open()
    second.open()
    todo = pieces(files) + pieces(files)[::3]
    random.Random(3).shuffle(todo)
    for turn, (file, offset, data) in enumerate(todo):
        (first, second)[turn % 2].write(file, offset, memoryview(data))
    first.publish(tmp_path / "done", {"config.json": b"{}"})
    first.close()
    second.close()
    assert not (tmp_path / "growing").exists()
    found = {}
    for name in file_names(len(files.body_nbytes)):
        found |= load_file(tmp_path / "done" / name)
    assert found.keys() == TENSORS.keys()
    assert all((found[name] == TENSORS[name]).all() for name in found)
    assert (tmp_path / "done" / "config.json").read_bytes() == b"{}"
    index = tmp_path / "done" / "model.safetensors.index.json"
    assert index.exists() == (len(files.body_nbytes) > 1)
    if index.exists():
        said = json.loads(index.read_text())
        assert said["weight_map"].keys() == TENSORS.keys()
        assert said["metadata"]["total_size"] == sum(array.nbytes for array in TENSORS.values())


def test_two_writers_fill_one_output_region():
    files, fd = laid_out(1 << 20), os.memfd_create("region")
    nbytes = int(files.table.nbytes.sum())
    os.ftruncate(fd, nbytes)
    first, second = (OutputRegion(Path(f"/proc/{os.getpid()}/fd/{fd}"), files.table) for _ in range(2))
    first.open()
    second.open()
    todo = pieces(files) + pieces(files)[::3]
    random.Random(3).shuffle(todo)
    for turn, (file, offset, data) in enumerate(todo):
        (first, second)[turn % 2].write(file, offset, memoryview(data))
    body = os.pread(fd, nbytes, 0)
    for row, name in enumerate(files.table.names):
        start = int(files.table.offset[row])
        assert body[start : start + int(files.table.nbytes[row])] == TENSORS[name].tobytes()
    again = bytearray(nbytes)
    second.read(0, 0, memoryview(again))
    assert again == body and first.file_nbytes == [nbytes]
    first.close()
    second.close()
    os.close(fd)
    with pytest.raises(DestinationError):
        first.open()


def test_creating_output_again_keeps_written_bytes(tmp_path):
    files = laid_out()
    out = make_output(tmp_path / "growing", files)
    out.create()
    out.open()
    out.write(0, 8, memoryview(b"12345678"))
    again = make_output(tmp_path / "growing", files)
    again.create()
    again.open()
    back = bytearray(8)
    again.read(0, 8, memoryview(back))
    assert back == b"12345678"
    out.close()
    again.close()


def test_publish_onto_nonempty_directory_is_refused(tmp_path):
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "other").write_text("mine")
    out = make_output(tmp_path / "growing", laid_out())
    out.create()
    out.open()
    with pytest.raises(ConfigError, match="already"):
        out.publish(tmp_path / "done", {})
    out.close()
    assert (tmp_path / "done" / "other").read_text() == "mine"
    assert [path.name for path in (tmp_path / "done").iterdir()] == ["other"]


def test_publish_onto_empty_directory_succeeds(tmp_path):
    (tmp_path / "done").mkdir()
    out = make_output(tmp_path / "growing", laid_out())
    out.create()
    out.open()
    out.publish(tmp_path / "done", {})
    out.close()
    assert sorted(path.name for path in (tmp_path / "done").glob("*.safetensors")) == out.names


def test_full_disk_raises_before_first_write(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_fallocate", lambda *_: errno.ENOSPC)
    with pytest.raises(DiskFull) as caught:
        make_output(tmp_path / "growing", laid_out()).create()
    assert not caught.value.mutated
    assert not (tmp_path / "growing").exists()


def test_file_length_is_set_if_fallocate_is_unsupported(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_fallocate", lambda *_: errno.EOPNOTSUPP)
    out = make_output(tmp_path / "growing", laid_out())
    out.create()
    found = [path.stat() for path in sorted((tmp_path / "growing").iterdir())]
    assert [one.st_size for one in found] == out.file_nbytes
    fd = os.open(tmp_path / "longer", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 10)
    local.reserve(fd, 5)
    assert os.fstat(fd).st_size == 10
    os.close(fd)


def test_disk_reservation_stops_when_cancelled(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_RESERVED_BYTES", 4096)
    turns = iter([False, False, True])
    with open(tmp_path / "file", "wb") as file:
        local.reserve(file.fileno(), 100_000, lambda: next(turns))
        assert os.fstat(file.fileno()).st_size == 8192
        local.reserve(file.fileno(), 10_000)
        assert os.fstat(file.fileno()).st_size == 10_000
        assert os.fstat(file.fileno()).st_blocks * 512 >= 10_000


def test_files_exist_before_space_is_reserved(tmp_path):
    out = make_output(tmp_path / "growing", laid_out())
    out.make()
    out.open()
    assert [path.stat().st_size for path in sorted((tmp_path / "growing").iterdir())] == out.data_offset
    out.write(0, 0, memoryview(b"early"))
    out.allocate()
    assert [path.stat().st_size for path in sorted((tmp_path / "growing").iterdir())] == out.file_nbytes
    back = bytearray(5)
    out.read(0, 0, memoryview(back))
    assert back == b"early"
    out.close()


def test_truncated_output_file_raises_destination_error(tmp_path):
    out = make_output(tmp_path / "growing", laid_out())
    out.create()
    out.open()
    os.truncate(tmp_path / "growing" / out.names[0], 20)
    with pytest.raises(DestinationError, match="truncated"):
        out.read(0, 0, memoryview(bytearray(8)))
    out.close()
