"""The chunk cache: hits, misses, corruption, eviction, concurrent processes, full and read-only disks."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import xxhash

from penstock.config import Settings
from penstock.errors import SourceUnavailable
from penstock.storage import MemorySource, Source, cache, cache_directory
from penstock.storage.cache import CachedSource, open_cached
from penstock.testing.source_suite import read, sample

CHUNK = 10_000
NBYTES = 95_000
DATA = sample(NBYTES)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CACHE_CHUNK_BYTES", CHUNK)


class CountingSource(MemorySource):
    """A source of `data` with a fixed identity that counts its reads."""

    def __init__(self, data: bytes = DATA, *, uri: str = "s3://b/k", identity: str = '"etag"') -> None:
        super().__init__(data, uri=uri)
        self.identity = identity
        self.reads: list[tuple[int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.closed = 0

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        self.reads.append((offset, sum(view.nbytes for view in buffers)))
        assert self.gate.wait(60)
        return super().readv(offset, buffers)

    def close(self) -> None:
        self.closed += 1


def cached(source: Source, folder: Path, *, cache_bytes: int = 1 << 30) -> CachedSource:
    opened = open_cached(source, settings=Settings(cache_dir=folder, cache_bytes=cache_bytes))
    assert isinstance(opened, CachedSource)
    return opened


def chunk_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_second_reader_uses_cache_only(tmp_path: Path) -> None:
    first, second = CountingSource(), CountingSource()
    source = cached(first, tmp_path)
    assert read(source, 0, [NBYTES]) == (DATA, "memory")
    assert (source.stats.hits, source.stats.misses, source.stats.miss_bytes) == (0, 10, NBYTES)
    again = cached(second, tmp_path)
    assert read(again, 0, [NBYTES]) == (DATA, "cache")
    assert (again.stats.hits, again.stats.misses, again.stats.asked_bytes) == (10, 0, NBYTES)
    assert second.reads == []
    assert source.why is None and again.why is None


def test_partial_read_caches_complete_chunk(tmp_path: Path) -> None:
    inner = CountingSource()
    source = cached(inner, tmp_path)
    assert read(source, 12_345, [1, 0, 10])[0] == DATA[12_345:12_356]
    assert inner.reads == [(10_000, CHUNK)]
    assert read(source, 19_990, [20])[0] == DATA[19_990:20_010]
    assert inner.reads == [(10_000, CHUNK), (20_000, CHUNK)]
    assert read(source, 90_001, [4_999]) == (DATA[90_001:], "memory")
    assert read(source, 90_001, [4_999]) == (DATA[90_001:], "cache")


@pytest.mark.parametrize(
    "other", [{"uri": "s3://b/other"}, {"identity": '"new"'}, {"data": DATA[:-1]}], ids=["uri", "identity", "size"]
)
def test_changed_object_is_not_read_from_cache(tmp_path: Path, other: dict[str, object]) -> None:
    read(cached(CountingSource(), tmp_path), 0, [NBYTES])
    inner = CountingSource(**other)  # type: ignore[arg-type]
    read(cached(inner, tmp_path), 0, [inner.nbytes])
    assert len(inner.reads) == 10


def test_source_without_cache_directory_or_identity_is_not_cached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = CountingSource()
    assert open_cached(plain, settings=Settings()) is plain
    nameless = CountingSource(identity="")
    assert open_cached(nameless, settings=Settings(cache_dir=tmp_path)) is nameless
    assert "not cached" in caplog.text


@pytest.mark.parametrize("how", ["flip", "flip digest", "truncate", "append", "empty", "another chunk"])
def test_corrupt_chunk_is_detected_and_replaced(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    read(cached(CountingSource(), tmp_path), 0, [NBYTES])
    file, another = chunk_files(tmp_path)[3:5]
    raw = bytearray(file.read_bytes())
    if how == "flip":
        raw[77] ^= 1
    elif how == "flip digest":
        raw[-1] ^= 1
    elif how == "truncate":
        del raw[-100:]
    elif how == "append":
        raw += b"x"
    elif how == "empty":
        raw.clear()
    else:
        raw = bytearray(another.read_bytes())
        raw[0] ^= 0xFF
    file.write_bytes(raw)
    inner = CountingSource()
    source = cached(inner, tmp_path)
    assert read(source, 0, [NBYTES])[0] == DATA
    assert inner.reads == [(30_000, CHUNK)]
    assert source.stats.rotten == 1
    assert "corrupt" in caplog.text
    again = CountingSource()
    assert read(cached(again, tmp_path), 0, [NBYTES]) == (DATA, "cache")
    assert again.reads == []


def test_full_cache_evicts_oldest_chunks(tmp_path: Path) -> None:
    limit = 200_000
    for number in range(6):
        source = cached(CountingSource(uri=f"s3://b/{number}"), tmp_path, cache_bytes=limit)
        assert read(source, 0, [NBYTES])[0] == DATA
        for file in chunk_files(tmp_path):  # File times are coarse, so make each object clearly older.
            state = file.stat()
            os.utime(file, (state.st_atime - 100, state.st_mtime - 100))
        assert sum(file.stat().st_size for file in chunk_files(tmp_path)) <= limit
    newest, oldest = CountingSource(uri="s3://b/5"), CountingSource(uri="s3://b/0")
    assert read(cached(newest, tmp_path, cache_bytes=limit), 0, [NBYTES]) == (DATA, "cache")
    assert read(cached(oldest, tmp_path, cache_bytes=limit), 0, [NBYTES])[0] == DATA
    assert len(oldest.reads) == 10


def test_object_larger_than_cache_is_readable(tmp_path: Path) -> None:
    for _ in range(3):
        source = cached(CountingSource(), tmp_path, cache_bytes=35_000)
        assert read(source, 0, [NBYTES])[0] == DATA
        assert sum(file.stat().st_size for file in chunk_files(tmp_path)) <= 35_000
    source = cached(CountingSource(), tmp_path, cache_bytes=100)
    assert read(source, 0, [NBYTES])[0] == DATA


def test_eviction_keeps_unrelated_files(tmp_path: Path) -> None:
    mine = [tmp_path / "notes.txt", tmp_path / "00000001", tmp_path / "penstock-chunks" / "notes.txt"]
    mine[2].parent.mkdir()
    for path in mine:
        path.write_bytes(b"x" * 50_000)
        os.utime(path, (1, 1))
    for number in range(3):
        read(cached(CountingSource(uri=f"s3://b/{number}"), tmp_path, cache_bytes=120_000), 0, [NBYTES])
    assert all(path.read_bytes() == b"x" * 50_000 for path in mine)


def test_abandoned_temporary_files_are_removed(tmp_path: Path) -> None:
    read(cached(CountingSource(), tmp_path), 0, [NBYTES])
    left_over = chunk_files(tmp_path)[0].with_name(".00000000-123-0123abcd")
    left_over.write_bytes(b"half")
    os.utime(left_over, (1, 1))
    read(cached(CountingSource(uri="s3://b/2"), tmp_path, cache_bytes=1 << 29), 0, [NBYTES])
    assert not left_over.exists()


def test_eviction_during_reads_keeps_bytes_correct(tmp_path: Path) -> None:
    wrong: list[int] = []
    sources = [cached(CountingSource(uri=f"s3://b/{n}"), tmp_path, cache_bytes=60_000) for n in range(4)]

    def work(source: CachedSource) -> None:
        for _ in range(20):
            if read(source, 0, [NBYTES])[0] != DATA:
                wrong.append(1)

    threads = [threading.Thread(target=work, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(source.why is None for source in sources)


def test_concurrent_threads_fetch_chunk_once(tmp_path: Path) -> None:
    inner = CountingSource()
    inner.gate.clear()
    source = cached(inner, tmp_path)
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(read(source, 5, [100])[0])) for _ in range(6)]
    for thread in threads:
        thread.start()
    inner.gate.set()
    for thread in threads:
        thread.join()
    assert got == [DATA[5:105]] * 6
    assert len(inner.reads) == 1


def in_a_thread(source: CachedSource) -> tuple[threading.Thread, list[bytes]]:
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(read(source, 5, [100])[0]))
    thread.start()
    return thread, got


def test_concurrent_processes_fetch_chunk_once(tmp_path: Path) -> None:
    """Two directory objects of one path share no lock, like two processes."""
    inner, other = CountingSource(), CountingSource()
    inner.gate.clear()
    first, got = in_a_thread(cached(inner, tmp_path))
    while not inner.reads:
        time.sleep(0.001)
    second, got_too = in_a_thread(cached(other, tmp_path, cache_bytes=1 << 29))
    second.join(0.3)
    assert second.is_alive()
    inner.gate.set()
    for thread in (first, second):
        thread.join()
    assert got == got_too == [DATA[5:105]]
    assert (len(inner.reads), other.reads) == (1, [])


def test_stalled_reader_does_not_block_other_readers(tmp_path: Path) -> None:
    inner, other = CountingSource(), CountingSource()
    inner.gate.clear()
    first, _ = in_a_thread(cached(inner, tmp_path))
    while not inner.reads:
        time.sleep(0.001)
    settings = Settings(cache_dir=tmp_path, cache_bytes=1 << 29, stall_s=0.2)
    source = open_cached(other, settings=settings)
    assert read(source, 5, [100])[0] == DATA[5:105]
    assert len(other.reads) == 1
    inner.gate.set()
    first.join()


def test_read_of_many_chunks_has_one_deadline(tmp_path, monkeypatch) -> None:
    until, claimed = list[float](), cache_directory._host_lock

    def noting(name: str, deadline: float) -> AbstractContextManager[None]:
        until.append(deadline)
        return claimed(name, deadline)

    monkeypatch.setattr(cache_directory, "_host_lock", noting)
    read(cached(CountingSource(), tmp_path), 5, [3 * CHUNK])
    assert len(until) == 4 and len(set(until)) == 1


def test_reader_without_writable_cache_never_waits_for_lock(tmp_path: Path) -> None:
    (tmp_path / "penstock-chunks").write_bytes(b"")
    inner, other = CountingSource(), CountingSource()
    inner.gate.clear()
    settings = Settings(cache_dir=tmp_path, cache_bytes=1 << 29, stall_s=600.0)
    source = open_cached(other, settings=settings)
    assert isinstance(source, CachedSource)
    read(source, 2 * CHUNK, [10])
    assert source.why is not None
    first, _ = in_a_thread(cached(inner, tmp_path))
    while not inner.reads:
        time.sleep(0.001)
    second, got = in_a_thread(source)
    second.join(20)
    waited = second.is_alive()
    inner.gate.set()
    for thread in (first, second):
        thread.join()
    assert not waited and got == [DATA[5:105]]


def test_forked_child_inherits_no_chunk_lock(tmp_path: Path) -> None:
    directory, until = cache_directory.directory_at(tmp_path, 1 << 30), time.monotonic() + 600.0
    file = directory.path / "ab" / "00000000"
    hold, go = os.pipe()
    with directory.single_fetch(file, wait_s=1.0, until=until):
        child = os.fork()
        if not child:
            os.close(go)
            os.read(hold, 1)
            os._exit(0)
    entered = threading.Event()

    def again() -> None:
        with directory.single_fetch(file, wait_s=1.0, until=until):
            entered.set()

    thread = threading.Thread(target=again)
    thread.start()
    is_free = entered.wait(20)
    for fd in (go, hold):
        os.close(fd)
    os.waitpid(child, 0)
    thread.join()
    assert is_free


def test_cached_sources_share_scratch_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CACHE_CHUNK_BYTES", 1 << 20)
    sources = [cached(CountingSource(uri=f"s3://b/{i}"), tmp_path) for i in range(8)]
    tracemalloc.start()
    for source in sources:
        read(source, 5, [10])
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 2 << 20
    for source in sources:
        source.close()


def test_cached_chunks_are_listed_after_partial_read(tmp_path: Path) -> None:
    source, again = cached(CountingSource(), tmp_path), cached(CountingSource(), tmp_path / "elsewhere")
    assert source.cached_chunks() == again.cached_chunks() == frozenset()
    read(source, 12_345, [10_000])
    assert source.cached_chunks() == {1, 2} and again.cached_chunks() == frozenset()
    assert source.shared_as == cached(CountingSource(uri="s3://b/2"), tmp_path, cache_bytes=1 << 29).shared_as
    assert source.shared_as != again.shared_as
    assert read(source, 20_000, [10]) == (DATA[20_000:20_010], "cache")
    assert (source.stats.asked_bytes, source.stats.miss_bytes) == (10_010, 20_000)


def test_failed_fetch_does_not_fail_other_readers(tmp_path: Path) -> None:
    class Failing(CountingSource):
        def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
            super().readv(offset, buffers)
            if len(self.reads) == 1:
                raise SourceUnavailable("503", uri=self.uri)
            return "memory"

    source = cached(Failing(), tmp_path)
    with pytest.raises(SourceUnavailable):
        read(source, 0, [10])
    assert read(source, 0, [10])[0] == DATA[:10]
    assert len(chunk_files(tmp_path)) == 1


def _read_in_a_process(folder: Path, seed: int, answers: multiprocessing.Queue[tuple[bool, int]]) -> None:
    cache.CACHE_CHUNK_BYTES = CHUNK
    right, misses = True, 0
    for number in range(20):
        source = cached(CountingSource(uri=f"s3://b/{(number * seed) % 5}"), folder, cache_bytes=150_000)
        right = right and read(source, 0, [NBYTES])[0] == DATA
        misses += source.stats.misses
    answers.put((right, misses))


def test_two_processes_share_cached_chunks(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[tuple[bool, int]] = context.Queue()
    processes = [context.Process(target=_read_in_a_process, args=(tmp_path, seed, answers)) for seed in (1, 2)]
    for process in processes:
        process.start()
    got = [answers.get(timeout=100) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert all(right for right, _ in got)
    assert not [path for path in chunk_files(tmp_path) if path.name.startswith(".")]


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB. Skips if this user may not mount it."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True
        ).returncode
    ):
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_falls_back_to_source(tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmpfs / "in the way").write_bytes(b"x" * 60_000)
    source = cached(CountingSource(), tmpfs)
    assert read(source, 0, [NBYTES])[0] == DATA
    assert source.why is not None and "No space left" in source.why
    assert sum("No space left" in record.message for record in caplog.records) == 1
    assert chunk_files(tmpfs) == [tmpfs / "in the way"]
    assert read(source, 0, [NBYTES])[0] == DATA


def test_full_disk_evicts_old_chunks(tmpfs: Path) -> None:
    for number in range(4):
        source = cached(CountingSource(sample(25_000, number), uri=f"s3://b/{number}"), tmpfs)
        assert read(source, 0, [25_000])[0] == sample(25_000, number)
        assert source.why is None
    assert chunk_files(tmpfs)


def test_read_only_cache_falls_back_to_source(tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(cached(CountingSource(), tmpfs), 0, [15_000])
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    inner = CountingSource()
    source = cached(inner, tmpfs)
    assert read(source, 0, [15_000]) == (DATA[:15_000], "cache")
    assert read(source, 0, [NBYTES])[0] == DATA
    assert source.why is not None and "Read-only" in source.why
    assert len(inner.reads) == 8
    assert "Read-only" in caplog.text


@pytest.mark.parametrize("depth", ["cache_dir", "below"])
def test_unusable_cache_directory_logs_one_warning(
    tmp_path: Path, depth: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "penstock-chunks" if depth == "below" else tmp_path / "file"
    file.write_bytes(b"")
    source = cached(CountingSource(), tmp_path if depth == "below" else file)
    assert read(source, 0, [NBYTES])[0] == DATA
    assert source.why is not None
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_unwritable_directory_falls_back_to_source(tmp_path: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o555)
    source = cached(CountingSource(), tmp_path)
    assert read(source, 0, [NBYTES])[0] == DATA
    assert source.why is not None and "denied" in source.why


def test_closing_cached_source_closes_inner_source(tmp_path: Path) -> None:
    inner = CountingSource()
    source = cached(inner, tmp_path)
    read(source, 5, [10])
    source.close()
    assert inner.closed == 1


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def test_swapped_chunks_of_same_object_are_refetched(tmp_path: Path) -> None:
    read(cached(CountingSource(), tmp_path), 0, [NBYTES])
    files = chunk_files(tmp_path)
    swap(files[3], files[5])
    again = CountingSource()
    source = cached(again, tmp_path)
    assert read(source, 0, [NBYTES])[0] == DATA
    assert (again.reads, source.stats.rotten) == ([(30_000, CHUNK), (50_000, CHUNK)], 2)
    assert read(cached(CountingSource(), tmp_path), 0, [NBYTES]) == (DATA, "cache")


@pytest.mark.parametrize(
    "other", [{"uri": "s3://b/other"}, {"identity": '"new"'}, {"data": DATA + b"x"}], ids=["uri", "identity", "size"]
)
def test_chunks_from_different_object_are_refetched(tmp_path: Path, other: dict[str, object]) -> None:
    data = bytes(other.get("data", sample(NBYTES, 7)))  # type: ignore[arg-type]
    ours = CountingSource(**{"data": data, **other})  # type: ignore[arg-type]
    read(cached(ours, tmp_path / "a"), 0, [len(data)])
    read(cached(CountingSource(), tmp_path / "b"), 0, [NBYTES])
    for theirs, mine in zip(chunk_files(tmp_path / "a"), chunk_files(tmp_path / "b"), strict=True):
        shutil.copy(theirs, mine)
    inner = CountingSource()
    assert read(cached(inner, tmp_path / "b"), 0, [NBYTES])[0] == DATA
    assert len(inner.reads) == 10


def test_chunk_in_old_format_is_replaced(tmp_path: Path) -> None:
    read(cached(CountingSource(), tmp_path), 0, [NBYTES])
    file = chunk_files(tmp_path)[2]
    data = DATA[20_000:30_000]
    file.write_bytes(data + struct.pack("<8sQQ", b"PSCHUNK1", len(data), xxhash.xxh3_64(data).intdigest()))
    inner = CountingSource()
    assert read(cached(inner, tmp_path), 0, [NBYTES])[0] == DATA
    assert inner.reads == [(20_000, CHUNK)]


def put_in_place(path: Path, what: str, victim: Path) -> None:
    """Replace a chunk file or a cache directory with a foreign path."""
    shutil.move(path, victim / path.name)
    if what == "link":
        path.symlink_to(victim / path.name)
    elif what == "dangling link":
        path.symlink_to(victim / "absent")
    elif what == "link to itself":
        path.symlink_to(path.name)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            os.chdir(path.parent)
            server.bind(path.name)
    elif what == "empty directory":
        path.mkdir()
    elif what == "directory":
        path.mkdir()
        (path / "notes.txt").write_text("precious")
    elif what == "file":
        path.write_text("precious")
    elif what == "device":
        path.symlink_to("/dev/zero")


_STRANGE = [
    "link",
    "dangling link",
    "link to itself",
    "pipe",
    "socket",
    "empty directory",
    "directory",
    "file",
    "device",
]


@pytest.mark.parametrize("what", _STRANGE)
@pytest.mark.parametrize("level", ["chunk", "object", "prefix"])
def test_symlinked_cache_entry_is_replaced(
    tmp_path: Path, what: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache_dir, victim = tmp_path / "cache", tmp_path / "victim"
    victim.mkdir()
    read(cached(CountingSource(), cache_dir), 0, [NBYTES])
    file = chunk_files(cache_dir)[1]
    place = {"chunk": file, "object": file.parent, "prefix": file.parent.parent}[level]
    put_in_place(place, what, victim)
    before = sorted((path, path.read_bytes()) for path in victim.rglob("*") if path.is_file())
    inner = CountingSource()
    source = cached(inner, cache_dir)
    source.cached_chunks()
    assert read(source, 0, [NBYTES])[0] == DATA
    assert len(inner.reads) == (1 if level == "chunk" else 10)
    assert source.why is None
    source.forget(0, NBYTES)
    # The symlink's target and the foreign files are unchanged.
    assert sorted((path, path.read_bytes()) for path in victim.rglob("*") if path.is_file()) == before
    if what == "directory":
        assert [path.read_text() for path in cache_dir.rglob("notes.txt")] == ["precious"]
    again = CountingSource()
    read(cached(again, cache_dir), 0, [NBYTES])
    assert read(cached(again, cache_dir), 0, [NBYTES]) == (DATA, "cache")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("level", ["chunk", "object"])
def test_entry_owned_by_another_user_is_replaced(tmp_path: Path, level: str) -> None:
    read(cached(CountingSource(), tmp_path), 0, [NBYTES])
    file = chunk_files(tmp_path)[1]
    os.chown(file if level == "chunk" else file.parent, 12345, 12345)
    inner = CountingSource()
    assert read(cached(inner, tmp_path), 0, [NBYTES])[0] == DATA
    assert len(inner.reads) == (1 if level == "chunk" else 10)
    assert file.stat().st_uid == file.parent.stat().st_uid == 0
