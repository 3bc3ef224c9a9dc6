"""Loads that fail raise a typed error quickly, and the process stays usable."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.servers.http_server import Faults, RangeServer

import penstock
from penstock.errors import (
    NotFound,
    PenstockError,
    PermissionDenied,
    SourceChanged,
    SourceError,
    SourceStalled,
    SourceTruncated,
    SourceUnavailable,
)
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

NUM_TENSORS, TENSOR_BYTES = 16, 2 * MIB
SOON_S = 20.0
"""A time far below any default deadline and far above the duration on a loaded machine."""


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "model.safetensors"
    torch.manual_seed(5)
    save_file({f"t{i:02}": torch.randint(0, 1 << 62, (TENSOR_BYTES // 8,)) for i in range(NUM_TENSORS)}, path)
    return path


@pytest.fixture
def big(small_checkpoint: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a separate copy of the checkpoint."""
    path = tmp_path / "model.safetensors"
    shutil.copyfile(small_checkpoint, path)
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_llama(tmp_path / "sharded", num_layers=2, hidden=128, shards=3)
    return tmp_path / "sharded"


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set short timeouts for servers, and check after each test that no thread is left."""
    monkeypatch.setenv("PENSTOCK_STALL_S", "1.5")
    monkeypatch.setenv("PENSTOCK_RETRIES", "2")
    yield
    deadline = time.monotonic() + 10
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def targets() -> dict[str, torch.Tensor]:
    return {f"t{i:02}": torch.zeros(TENSOR_BYTES // 8, dtype=torch.int64) for i in range(NUM_TENSORS)}


def do_load(uri: Any) -> None:
    penstock.load(uri)


def do_copy(uri: Any) -> None:
    penstock.load(uri, settings=penstock.ReadSettings(copy=True))


def do_stream(uri: Any) -> None:
    with penstock.stream(uri, settings=penstock.ReadSettings(memory_bytes="4M")) as tensors:
        for _ in tensors:
            pass


def do_load_into(uri: Any) -> None:
    penstock.load_into(targets(), uri)


def do_boxes(uri: Any) -> None:
    penstock.load(uri, boxes=lambda name, shape: penstock.Box(start=(3,), stop=(shape[0] - 3,)))


DOES = [do_load, do_copy, do_boxes, do_stream, do_load_into]


def fails(do: Callable[[Any], None], uri: Any, *kinds: type[PenstockError]) -> PenstockError:
    began = time.monotonic()
    with pytest.raises(kinds) as caught:
        do(uri)
    assert time.monotonic() - began < SOON_S
    return caught.value


@pytest.mark.parametrize("do", DOES)
def test_truncated_file_raises_source_truncated(big: Path, do: Callable[[Any], None]) -> None:
    os.truncate(big, big.stat().st_size - 1)
    error = fails(do, big, SourceTruncated)
    assert not error.mutated and error.uri == str(big)


def change(path: Path, how: str) -> None:
    if how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "emptied":
        os.truncate(path, 0)
    elif how == "removed":
        path.unlink()
    elif how == "replaced":
        other = path.with_suffix(".other")
        other.write_bytes(bytes(path.stat().st_size))
        other.replace(path)
    else:
        with path.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"modified")


HOWS = ["truncated", "emptied", "removed", "replaced", "modified"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("ring", ["0", "1"])
def test_unmapped_file_changed_during_stream_raises(
    big: Path, how: str, ring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_IO_URING", ring)
    wanted = {name: tensor.clone() for name, tensor in load_file(big).items()}
    given: dict[str, torch.Tensor] = {}
    with penstock.stream(big, settings=penstock.ReadSettings(copy=True, memory_bytes="4M")) as tensors:
        given.update([next(tensors)])
        change(big, how)
        with pytest.raises((SourceTruncated, SourceChanged)) as caught:
            for name, tensor in tensors:
                given[name] = tensor
    assert caught.value.uri == str(big)
    if how in {"truncated", "emptied", "removed", "replaced"}:
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in given.items())


MAPPED = """
import shutil, sys
from pathlib import Path
import penstock
from tests.integration.load.test_faults import HOWS, change
given = Path(sys.argv[1])
for how in HOWS:
    path = given.with_name(how + ".safetensors")
    shutil.copy(given, path)
    with penstock.stream(path, settings=penstock.ReadSettings(memory_bytes="4M")) as tensors:
        next(tensors)
        change(path, how)
        try:
            for _, tensor in tensors:
                del tensor
            print(how, "unnoticed")
        except (penstock.errors.SourceTruncated, penstock.errors.SourceChanged):
            print(how)
"""


def test_mapped_file_changed_during_stream_raises(big: Path) -> None:
    """Use a separate process, which SIGBUS would end."""
    command = [sys.executable, "-c", MAPPED, str(big)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == HOWS


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("do", DOES)
def test_file_changed_during_load_raises(
    big: Path, do: Callable[[Any], None], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first body read changes the file, so the change happens midway on any machine."""
    from penstock.storage.files import FileSource
    from penstock.storage.mapped import MappedFile

    lock, done = threading.Lock(), [False]

    def once() -> None:
        with lock:
            if not done[0]:
                done[0] = True
                change(big, how)

    read, cached_fd = FileSource.readv, FileSource.cached_fd
    prefetch, is_ready = MappedFile.prefetch, MappedFile.is_ready

    def readv(self: FileSource, offset: int, buffers: Any) -> str:
        if offset:
            once()
        return read(self, offset, buffers)

    def by_ring(self: FileSource, offset: int, nbytes: int) -> int | None:
        found = cached_fd(self, offset, nbytes)
        once()
        return found

    def fetch(self: MappedFile, offset: int, nbytes: int) -> None:
        once()
        prefetch(self, offset, nbytes)

    def mapped(self: MappedFile) -> bool:
        found = is_ready(self)
        once()
        return found

    monkeypatch.setattr(MappedFile, "is_ready", mapped)
    monkeypatch.setattr(FileSource, "readv", readv)
    monkeypatch.setattr(FileSource, "cached_fd", by_ring)
    monkeypatch.setattr(MappedFile, "prefetch", fetch)
    error = fails(do, big, SourceTruncated, SourceChanged)
    assert error.uri == str(big) and done[0]


@pytest.mark.parametrize("do", DOES)
def test_missing_shard_error_contains_file_name(sharded: Path, do: Callable[[Any], None]) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    error = fails(do, sharded, NotFound, penstock.errors.FormatError)
    assert shard.name in str(error) and not error.mutated


def test_missing_checkpoint_raises(tmp_path: Path) -> None:
    for uri in [tmp_path / "nothing", tmp_path, f"{tmp_path}/*.safetensors", [tmp_path / "nothing.safetensors"]]:
        fails(do_load, uri, SourceError, penstock.errors.FormatError)


FORBIDDEN = """
import os, sys
import penstock
penstock.load(sys.argv[1])
os.chmod(sys.argv[1], 0)
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    penstock.load(sys.argv[1])
except penstock.errors.PermissionDenied as error:
    print(error.uri)
"""


def test_unreadable_file_raises_permission_denied() -> None:
    """Drop the process's rights, because root can read everything."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        path = Path(directory) / "model.safetensors"
        save_file({"a": torch.zeros(3)}, path)
        command = [sys.executable, "-c", FORBIDDEN, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.strip() == str(path), done.stderr


@pytest.fixture
def server(big: Path) -> Iterator[RangeServer]:
    with RangeServer(big.parent) as running:
        yield running


FAULTS: dict[str, tuple[Faults, tuple[type[PenstockError], ...]]] = {
    "403": (Faults(status=403), (PermissionDenied,)),
    "401": (Faults(status=401), (PermissionDenied,)),
    "404": (Faults(status=404), (NotFound, SourceChanged)),
    "416": (Faults(status=416), (SourceTruncated, SourceChanged)),
    "412": (Faults(status=412), (SourceChanged,)),
    "500": (Faults(status=500), (SourceUnavailable,)),
    "503": (Faults(status=503), (SourceUnavailable,)),
    "reset at once": (Faults(reset_after=0), (SourceUnavailable,)),
    "closed at once": (Faults(truncate_after=0), (SourceUnavailable, SourceTruncated)),
    "silent": (Faults(stall_after=-1), (SourceStalled,)),
    "range ignored": (Faults(wrong_content_range=True), (PenstockError,)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("do", [do_load, do_stream, do_load_into])
def test_server_failing_mid_response_raises(server: RangeServer, do: Callable[[Any], None], fault: str) -> None:
    faults, kinds = FAULTS[fault]
    uri = f"{server.url}/model.safetensors"
    opened = penstock.loader.session.open_weights  # type: ignore[attr-defined]

    def then_fail(*args: Any, **options: Any) -> Any:
        found = opened(*args, **options)
        server.faults = faults
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.loader.session.open_weights", then_fail)
        error = fails(do, uri, *kinds)
    assert error.blame == "source" and server.url in str(error.uri)
    assert not error.mutated or do is do_load_into
    server.faults = Faults()
    do(uri)


@pytest.mark.parametrize("fault", ["403", "404", "500", "reset at once", "silent"])
def test_server_failing_every_request_raises(server: RangeServer, fault: str) -> None:
    faults, kinds = FAULTS[fault]
    server.faults = faults
    fails(do_load, f"{server.url}/model.safetensors", *kinds)


@pytest.mark.parametrize(
    "faults",
    [
        Faults(num_requests=3, status=503),
        Faults(num_requests=3, status=429, retry_after="0"),
        Faults(num_requests=4, reset_after=100_000),
        Faults(num_requests=4, truncate_after=500_000),
        Faults(num_requests=1, stall_after=300_000),
    ],
)
def test_load_recovers_from_retryable_fault(server: RangeServer, big: Path, faults: Faults) -> None:
    wanted = load_file(big)
    with penstock.stream(
        f"{server.url}/model.safetensors", settings=penstock.ReadSettings(memory_bytes="8M")
    ) as tensors:
        server.faults = faults
        found = dict(tensors)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_object_changed_between_ranges_is_never_mixed(server: RangeServer, big: Path) -> None:
    wanted = {name: tensor.clone() for name, tensor in load_file(big).items()}
    given: dict[str, torch.Tensor] = {}
    with penstock.stream(
        f"{server.url}/model.safetensors", settings=penstock.ReadSettings(memory_bytes="2M")
    ) as tensors:
        given.update([next(tensors)])
        change(big, "replaced")
        with pytest.raises(SourceChanged):
            for name, tensor in tensors:
                given[name] = tensor
    assert len(given) < NUM_TENSORS
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in given.items())


CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits "ignored"
import penstock
print("going", flush=True)
if sys.argv[2] == "stream":
    with penstock.stream(sys.argv[1], settings=penstock.ReadSettings(memory_bytes="8M")) as tensors:
        for _ in tensors:
            pass
else:
    penstock.load(sys.argv[1])
"""


@pytest.mark.parametrize("verb", ["load", "stream"])
def test_interrupt_aborts_load_after_pending_reads(server: RangeServer, verb: str) -> None:
    """There are 32 reads of a second each, two at a time."""
    server.faults = Faults(slow_bytes_per_s=1_000_000)
    environ = os.environ | {"PENSTOCK_STALL_S": "600", "PENSTOCK_CHUNK_BYTES": "1M", "PENSTOCK_FETCH_THREADS": "2"}
    command = [sys.executable, "-c", CHILD, f"{server.url}/model.safetensors", verb]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == "going\n"
        deadline = time.monotonic() + 60
        while not any(request.range and request.range[0] >= MIB for request in server.requests):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        try:
            child.wait(13)
        finally:
            child.kill()
        assert "KeyboardInterrupt" in child.stderr.read()
    assert child.returncode != 0


def load_and_sum(path: str, copy: bool) -> int:
    """Use a zlib checksum, because torch's own threads do not survive a fork."""
    return sum(
        zlib.crc32(memoryview(tensor.numpy()))
        for tensor in penstock.load(path, settings=penstock.ReadSettings(copy=copy)).values()
    )


@pytest.mark.parametrize("copy", [True, False])
def test_forked_child_loads_after_parent(big: Path, copy: bool) -> None:
    """Use a plain fork, because no thread of a load is left."""
    wanted = load_and_sum(str(big), copy)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = b"failed"
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            answer = str(load_and_sum(str(big), copy)).encode()
        finally:
            os.write(writer, answer)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read().decode() == str(wanted)
    os.waitpid(pid, 0)


def test_spawned_children_load_concurrently(big: Path) -> None:
    wanted = load_and_sum(str(big), False)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.starmap(load_and_sum, [(str(big), True), (str(big), False)]) == [wanted] * 2
