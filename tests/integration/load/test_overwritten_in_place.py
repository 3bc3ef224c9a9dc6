"""A file without a manifest that another process overwrites during a read gives one content or an error.

The writer is a real process. It writes all bodies in one system call, whose file times are those of its start, or piece
by piece. Readers start as soon as the file's times have changed, so in the middle of the write.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import penstock
from penstock.errors import SourceChanged, SourceTruncated
from penstock.types import MIB
from penstock_hf.runai_streamer import FileChunks, FileStreamer, SafetensorsStreamer

NUM_TENSORS, TENSOR_BYTES = 8, 8 * MIB
ROUNDS = 64 if os.environ.get("DRILLS") == "all" else 6
NEWEST = 255
"""The largest byte value. Digests, whose order means nothing, are larger."""

WRITER = """
import os, sys
path, start, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
fd = os.open(path, os.O_RDWR)
print("ready", flush=True)
for line in sys.stdin:
    value, piece = map(int, line.split())
    data = bytes([value]) * piece
    for at in range(0, nbytes, piece):
        os.pwrite(fd, data, start + at)
    print("done", flush=True)
"""


class Writer:
    """A process that overwrites the bodies of one file on request."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
        command = [sys.executable, "-c", WRITER, str(path), str(start), str(NUM_TENSORS * TENSOR_BYTES)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.wait()

    def begin(self, value: int, piece: int) -> None:
        """Request the write, and return once it has begun."""
        before = os.stat(self.path).st_mtime_ns
        assert self._process.stdin is not None
        self._process.stdin.write(f"{value} {piece}\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + 60
        while os.stat(self.path).st_mtime_ns == before:
            assert time.monotonic() < deadline

    def wait(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() in {"ready", "done"}

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    path = tmp_path / "model.safetensors"
    save_file({f"t{i}": torch.zeros(TENSOR_BYTES, dtype=torch.uint8) for i in range(NUM_TENSORS)}, path)
    running = Writer(path)
    yield running
    running.close()


def values(tensors: Any) -> list[int]:
    """Return the byte values in these tensors or arrays in order, without equal neighbours."""
    found: list[int] = []
    for tensor in tensors:
        found = changes(np.append(found, np.asarray(tensor).reshape(-1).view(np.uint8)[::509]).astype(np.int64))
    return found


def changes(found: np.ndarray[Any, Any]) -> list[int]:
    """Return the elements that differ from their predecessor."""
    return [int(value) for value in found[np.append(True, found[1:] != found[:-1])]]


LIVE = {f"t{i}": torch.zeros(TENSOR_BYTES, dtype=torch.uint8) for i in range(NUM_TENSORS)}


def into_live_tensors(path: Path) -> list[int]:
    before = {name: tensor.clone() for name, tensor in LIVE.items()}
    try:
        penstock.load_into(LIVE, path)
    except SourceChanged as error:
        # A change during the read of the headers is reported before the first byte of a tensor.
        assert error.mutated or all(torch.equal(LIVE[name], tensor) for name, tensor in before.items())
        raise
    return values(LIVE.values())


def load_a_copy(path: Path) -> list[int]:
    return values(penstock.load(path, settings=penstock.ReadSettings(copy=True)).values())


def stream_a_copy(path: Path) -> list[int]:
    with penstock.stream(path, settings=penstock.ReadSettings(copy=True, memory_bytes="8M")) as tensors:
        return values(tensor for _, tensor in tensors)


def stream_mapped(path: Path) -> list[int]:
    with penstock.stream(path) as tensors:
        return values(tensor for _, tensor in tensors)


def open_and_get(path: Path) -> list[int]:
    with penstock.safe_open(path, framework="pt", backend="pread") as file:
        return values([file.get_tensor(name) for name in sorted(LIVE)])


def open_and_slice(path: Path) -> list[int]:
    with penstock.safe_open(path, framework="np", backend="pread") as file:
        return values([file.get_slice(name)[: TENSOR_BYTES // 2] for name in sorted(LIVE)])


def runai_tensors(path: Path) -> list[int]:
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        return values(tensor for _, tensor in streamer.get_tensors())


def runai_ranges(path: Path) -> list[int]:
    start = path.stat().st_size - NUM_TENSORS * TENSOR_BYTES
    with FileStreamer() as streamer:
        streamer.stream_files([FileChunks.contiguous(0, str(path), start, [TENSOR_BYTES] * NUM_TENSORS)])
        return values(tensor for _, _, tensor in streamer.get_chunks())


def manifest(path: Path) -> list[int]:
    """Return the digests of one of the two contents."""
    from penstock.config import Settings
    from penstock.storage.weight_set import build, open_weights

    with open_weights(path, settings=Settings.read()) as weights:
        leaves = build(weights).leaves
    assert leaves is not None
    return changes(leaves)


PATHS: list[Callable[[Path], list[int]]] = [
    into_live_tensors,
    load_a_copy,
    stream_a_copy,
    stream_mapped,
    open_and_get,
    open_and_slice,
    runai_tensors,
    runai_ranges,
    manifest,
]


def num_contents(found: list[int], turn: int) -> int:
    """Return the contents in the result. New bytes up to an offset and old bytes after it are the file at one moment.

    On a busy machine the writer pauses between two pieces for as long as a read takes, and nobody can distinguish that
    file from a finished one.
    """
    is_of_an_instant = turn % 3 == 0 and len(found) == 2 and (found[0] == turn or max(found) > NEWEST)
    return 1 if is_of_an_instant else len(set(found))


@pytest.mark.parametrize("read", PATHS, ids=lambda read: read.__name__)
def test_load_of_overwritten_file_never_mixes_contents(writer: Writer, read: Callable[[Path], list[int]]) -> None:
    pause = random.Random(12)
    outcomes = []
    for turn in range(1, ROUNDS + 1):
        writer.begin(turn, NUM_TENSORS * TENSOR_BYTES if turn % 3 else MIB)
        time.sleep(pause.choice([0.0, 0.0, 0.002, 0.01]))
        try:
            outcomes.append(num_contents(read(writer.path), turn))
        except (SourceChanged, SourceTruncated) as error:
            assert error.uri == str(writer.path)
            outcomes.append(0)
        writer.wait()
    assert set(outcomes) <= {0, 1}, outcomes
    assert len(read(writer.path)) == 1


def test_fetch_of_overwritten_file_is_consistent(writer: Writer) -> None:
    for turn in range(1, ROUNDS + 1):
        with penstock.join(f"overwritten-{turn}") as fleet:
            writer.begin(turn, NUM_TENSORS * TENSOR_BYTES if turn % 2 else MIB)
            target: dict[str, torch.Tensor] = {}
            try:
                fleet.fetch(target, fallback=writer.path)
                assert len(values(target.values())) == 1
            except SourceChanged:
                assert not target
            writer.wait()


def test_conversion_of_overwritten_file_is_consistent(writer: Writer, tmp_path: Path) -> None:
    for turn in range(1, 3):
        destination = tmp_path / f"made-{turn}"
        writer.begin(turn, NUM_TENSORS * TENSOR_BYTES)
        try:
            penstock.convert(writer.path, destination)
        except SourceChanged:
            assert not destination.exists()
        else:
            assert len(values(penstock.load(destination).values())) == 1
        writer.wait()


def test_write_with_restored_modification_time_is_detected(tmp_path: Path) -> None:
    """The file has the same size and modification time, as after rsync --inplace."""
    path = tmp_path / "model.safetensors"
    save_file({"t": torch.zeros(4 * MIB, dtype=torch.uint8)}, path)
    with penstock.safe_open(path, framework="pt", backend="pread") as file:
        before = os.stat(path)
        with open(path, "r+b") as written:
            written.seek(-1, os.SEEK_END)
            written.write(b"\1")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(SourceChanged):
            file.get_tensor("t")


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_open_file_changed_later_raises(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(MIB, dtype=torch.uint8), "b": torch.zeros(MIB, dtype=torch.uint8)}, path)
    with penstock.safe_open(path, framework="pt", backend=backend) as file:
        file.get_tensor("a")
        with open(path, "r+b") as written:
            written.seek(-1, os.SEEK_END)
            written.write(b"\1")
        with pytest.raises(SourceChanged):
            file.get_tensor("b")


@pytest.mark.parametrize("harmless", ["chmod", "link", "unlink", "rename over it"])
def test_open_file_survives_changes_that_keep_its_bytes(tmp_path: Path, harmless: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"t": torch.ones(MIB, dtype=torch.uint8)}, path)
    with penstock.safe_open(path, framework="pt", backend="pread") as file:
        if harmless == "chmod":
            path.chmod(0o600 if path.stat().st_mode & 0o077 else 0o644)
        elif harmless == "link":
            os.link(path, tmp_path / "other")
        elif harmless == "unlink":
            path.unlink()
        else:
            save_file({"t": torch.zeros(MIB, dtype=torch.uint8)}, tmp_path / "new")
            os.replace(tmp_path / "new", path)
        assert bool((file.get_tensor("t") == 1).all())
