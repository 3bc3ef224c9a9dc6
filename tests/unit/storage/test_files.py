"""FileSource returns the same bytes on every path, and raises a typed error for each fault of the file."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import NotFound, PermissionDenied, SourceChanged, SourceTruncated, SourceUnavailable
from penstock.storage import files, local
from penstock.storage.files import FileSource

MIB = 1 << 20
NBYTES = 9 * MIB + 1234
PAGE = local.PAGE_BYTES


@pytest.fixture(scope="module")
def body() -> bytes:
    return np.random.default_rng(2).integers(0, 256, NBYTES, dtype=np.uint8).tobytes()


@pytest.fixture
def path(tmp_path: Path, body: bytes) -> str:
    name = tmp_path / "model.safetensors"
    name.write_bytes(body)
    return str(name)


@pytest.fixture
def source(path: str) -> Iterator[FileSource]:
    found = FileSource.open(path)
    yield found
    found.close()


def evict(path: str, start: int = 0, nbytes: int = 0) -> None:
    """Drop a range from the page cache. Skips if the file system keeps it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)
        left = local.resident_pages(fd, start, nbytes or os.fstat(fd).st_size)
    finally:
        os.close(fd)
    if left is None:
        pytest.skip("this kernel does not say what is cached")
    if left and not nbytes:
        pytest.skip("this file system does not give up cached pages")


def aligned(nbytes: int, shift: int = 0) -> memoryview:
    """Return memory whose first byte is `shift` bytes after a page boundary."""
    return memoryview(mmap.mmap(-1, nbytes + PAGE))[shift : shift + nbytes]


def needs_direct(path: str) -> None:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"this file system has no direct I/O: {error}")


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def num_resident(path: str, offset: int, nbytes: int) -> int | None:
    """Return the number of cached pages of a range, or None if the kernel does not report it."""
    with open(path, "rb") as file:
        return local.resident_pages(file.fileno(), offset, nbytes)


@pytest.mark.parametrize("state", ["cached", "absent", "head cached", "tail cached", "islands"])
@pytest.mark.parametrize("shift", [0, 8, 512, 1000])
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, NBYTES),
        (0, MIB),
        (4096, 2 * MIB),
        (1000, 3 * MIB),
        (1, 1),
        (NBYTES - 1, 1),
        (NBYTES, 0),
        (5 * MIB + 8, 100_000),
    ],
)
def test_reads_match_file_in_every_page_cache_state(
    path: str, body: bytes, state: str, shift: int, offset: int, nbytes: int
) -> None:
    ranges = {
        "cached": [],
        "absent": [(0, 0)],
        "head cached": [(3 * MIB, NBYTES)],
        "tail cached": [(0, 6 * MIB)],
        "islands": [(MIB, MIB // 2), (4 * MIB, 2 * MIB)],
    }[state]
    for start, length in ranges:
        evict(path, start, length)
    source = FileSource.open(path)
    buffer = aligned(nbytes, shift)
    for _ in range(2):
        source.readv(offset, [buffer])
        assert buffer == body[offset : offset + nbytes]
        buffer[:] = bytes(nbytes)
    source.close()


@pytest.mark.parametrize("cold", [False, True])
def test_scatter_reads_fill_buffers_in_order(path: str, body: bytes, cold: bool) -> None:
    if cold:
        evict(path)
    source = FileSource.open(path)
    lengths = [4096, 0, 1, 130_000, 2 * MIB, 77, 65_536, MIB + 1, 512]
    buffers = [aligned(n, shift) for n, shift in zip(lengths, [0, 0, 7, 0, 0, 3, 512, 9, 0], strict=True)]
    source.readv(8192, buffers)
    assert b"".join(buffers) == body[8192 : 8192 + sum(lengths)]
    source.close()


def test_scatter_read_above_iov_max_succeeds(source: FileSource, path: str, body: bytes) -> None:
    whole = aligned(3000 * 1024)
    buffers = [whole[i * 1024 : (i + 1) * 1024] for i in range(3000)]
    for _ in range(2):
        assert source.readv(100, buffers) == "page-cache"
        assert whole == body[100 : 100 + whole.nbytes]
        whole[:] = bytes(whole.nbytes)


def test_cached_bytes_are_read_from_page_cache(source: FileSource) -> None:
    assert source.readv(0, [aligned(NBYTES)]) == "page-cache"
    assert source.readv(0, [aligned(NBYTES)]) == "page-cache"


def test_uncached_read_uses_direct_io_without_caching(source: FileSource, path: str) -> None:
    needs_direct(path)
    evict(path)
    assert source.readv(0, [aligned(8 * MIB)]) == "direct"
    assert num_resident(path, 0, NBYTES) == 0
    assert source.why == ""


def test_read_of_cached_start_does_not_cache_remainder(source: FileSource, path: str) -> None:
    needs_direct(path)
    evict(path)
    with open(path, "rb", buffering=0) as reader:
        # Some disks set readahead to 8 MiB, which would cache the whole file.
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        reader.read(MIB)
    taken = [source.readv(start, [aligned(MIB)]) for start in range(0, 8 * MIB, MIB)]
    assert taken[0] == "page-cache" and "direct" in taken
    source.readv(0, [aligned(8 * MIB)])


def test_evicted_pages_are_read_again(source: FileSource, path: str, body: bytes) -> None:
    buffer = aligned(8 * MIB)
    assert source.readv(0, [buffer]) == "page-cache"
    evict(path)
    buffer[:] = bytes(8 * MIB)
    source.readv(0, [buffer])
    assert buffer == body[: 8 * MIB]


def test_unaligned_buffers_use_buffered_reads(path: str, body: bytes) -> None:
    evict(path)
    source = FileSource.open(path)
    buffer = aligned(2 * MIB, 1)
    assert source.readv(0, [buffer]) == "buffered"
    assert buffer == body[: 2 * MIB]
    assert "not aligned" in source.why
    needs_direct(path)
    evict(path)
    assert source.readv(0, [aligned(2 * MIB)]) == "direct"
    source.close()


def test_buffered_read_is_used_if_open_refuses_direct_io(
    source: FileSource, path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    evict(path)
    real = os.open

    def refuse(name: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(name, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    buffer = aligned(MIB)
    assert source.readv(0, [buffer]) == "buffered"
    assert buffer == body[:MIB]
    assert "EINVAL" in source.why


def test_buffered_read_is_used_if_read_refuses_direct_io(
    source: FileSource, path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_direct(path)
    evict(path)
    real = os.preadv

    def refuse(fd: int, *rest: object) -> int:
        if is_direct(fd):
            raise OSError(95, "Operation not supported")
        return real(fd, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", refuse)
    buffer = aligned(MIB)
    assert source.readv(0, [buffer]) == "buffered"
    assert buffer == body[:MIB]
    assert "ENOTSUP" in source.why or "EOPNOTSUPP" in source.why
    assert source.readv(MIB, [buffer]) in {"buffered", "page-cache"}


def test_short_direct_reads_are_completed(
    source: FileSource, path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_direct(path)
    evict(path)
    real = os.preadv

    def shorten(fd: int, buffers: list[memoryview], *rest: int) -> int:
        short = [buffers[0][:4096]] if buffers[0].nbytes > 4096 and is_direct(fd) else buffers
        return real(fd, short, *rest)

    monkeypatch.setattr(os, "preadv", shorten)
    buffer = aligned(256 << 10)
    source.readv(0, [buffer])
    assert buffer == body[: 256 << 10]


@pytest.mark.parametrize("nowait", [True, False])
def test_page_cache_is_sampled_without_cachestat(
    path: str, body: bytes, nowait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "resident_pages", lambda *_: None)
    real = os.preadv

    def refuse_nowait(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags and not nowait:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", refuse_nowait)
    source = FileSource.open(path)
    buffer = aligned(8 * MIB)
    for _ in range(2):
        assert source.readv(0, [buffer]) == ("page-cache" if nowait else "buffered")
        assert buffer == body[: 8 * MIB]
    evict(path)
    buffer[:] = bytes(8 * MIB)
    # A probe starts readahead, which may finish before the next probe.
    assert source.readv(0, [buffer]) in {"direct", "buffered", *(["page-cache"] if nowait else [])}
    assert buffer == body[: 8 * MIB]
    source.close()


def test_tmpfs_file_is_read(body: bytes) -> None:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(body)
        file.truncate(NBYTES + MIB)  # The file ends in a hole, which no page holds.
        file.flush()
        source = FileSource.open(file.name)
        buffer = aligned(NBYTES)
        for _ in range(2):
            assert source.readv(0, [buffer]) == "page-cache"
            assert buffer == body
        hole = aligned(MIB - PAGE)
        source.readv(NBYTES + PAGE - NBYTES % PAGE, [hole[: MIB - 2 * PAGE]])
        assert not any(hole)
        source.close()


def test_read_of_empty_file_or_range_succeeds(tmp_path: Path, source: FileSource) -> None:
    (tmp_path / "empty").touch()
    empty = FileSource.open(str(tmp_path / "empty"))
    empty.readv(0, [])
    empty.readv(0, [aligned(0)])
    source.readv(NBYTES, [])
    with pytest.raises(SourceTruncated):
        empty.readv(0, [aligned(1)])
    empty.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(NBYTES, 1), (NBYTES - 1, 2), (1 << 62, 1), (-1, 1)])
def test_range_outside_file_raises_source_truncated(source: FileSource, offset: int, nbytes: int) -> None:
    with pytest.raises(SourceTruncated, match=str(NBYTES)):
        source.readv(offset, [aligned(nbytes)])


@pytest.mark.parametrize("known", [False, True])
def test_truncation_while_open_raises_source_truncated(source: FileSource, path: str, known: bool) -> None:
    if known:
        source.readv(0, [aligned(NBYTES)])
    os.truncate(path, 5 * MIB)
    with pytest.raises(SourceTruncated, match="when it was opened"):
        source.readv(4 * MIB, [aligned(2 * MIB)])
    with pytest.raises(SourceTruncated):
        source.check_unchanged()


def test_in_place_modification_raises_source_changed(source: FileSource, path: str) -> None:
    source.check_unchanged()
    with open(path, "r+b") as file:
        file.write(b"changed")
    os.utime(path, ns=(1, 1))
    with pytest.raises(SourceChanged, match="modified"):
        source.check_unchanged()


def test_replaced_file_is_read_but_check_raises_source_changed(source: FileSource, path: str, body: bytes) -> None:
    Path(path + ".new").write_bytes(bytes(NBYTES))
    os.replace(path + ".new", path)
    buffer = aligned(MIB)
    source.readv(0, [buffer])
    assert buffer == body[:MIB]
    with pytest.raises(SourceChanged, match="replaced"):
        source.check_unchanged()


def test_replacement_before_direct_open_raises_source_changed(source: FileSource, path: str) -> None:
    evict(path)
    Path(path + ".new").write_bytes(bytes(NBYTES))
    os.replace(path + ".new", path)
    with pytest.raises(SourceChanged):
        source.readv(0, [aligned(MIB)])


def test_removed_open_file_raises_source_changed(source: FileSource, path: str) -> None:
    os.unlink(path)
    with pytest.raises(SourceChanged, match="removed"):
        source.check_unchanged()


def test_file_identity_contains_inode_mtime_and_size(source: FileSource, path: str) -> None:
    found = os.stat(path)
    assert source.identity == f"{found.st_dev}:{found.st_ino}:{found.st_mtime_ns}:{found.st_size}"
    assert (source.uri, source.nbytes) == (path, NBYTES)


def test_relative_path_survives_chdir(path: str, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    evict(path)
    monkeypatch.chdir(os.path.dirname(path))
    source = FileSource.open(os.path.basename(path))
    monkeypatch.chdir("/")
    buffer = aligned(MIB)
    source.readv(0, [buffer])
    assert buffer == body[:MIB]
    source.check_unchanged()
    source.close()


def test_missing_file_raises_not_found(tmp_path: Path) -> None:
    for name in ("absent", "model/../absent", "x" * 300):
        with pytest.raises(NotFound):
            FileSource.open(str(tmp_path / name))


def test_file_as_parent_directory_raises_not_found(path: str) -> None:
    with pytest.raises(NotFound):
        FileSource.open(path + "/x")


def test_non_regular_file_raises_source_unavailable(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in (tmp_path, tmp_path / "pipe", tmp_path / "socket", "/dev/zero"):
            with pytest.raises(SourceUnavailable) as raised:
                FileSource.open(str(name))
            assert raised.value.uri == str(name)


def test_unreadable_file_raises_permission_denied(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    secret.chmod(0)
    root = os.geteuid() == 0
    if root:
        tmp_path.chmod(0o755)
        os.seteuid(65534)
    try:
        with pytest.raises((PermissionDenied, NotFound)):
            FileSource.open(str(secret))
    finally:
        if root:
            os.seteuid(0)


def test_kernel_read_error_raises_source_unavailable() -> None:
    try:
        source = FileSource.open("/proc/self/mem")  # This regular file returns EIO at address 0.
    except PermissionDenied as error:
        pytest.skip(str(error))
    source.nbytes = 4096
    with pytest.raises(SourceUnavailable) as raised:
        source.readv(0, [aligned(4096)])
    assert raised.value.byte_range == (0, 4096)
    source.close()


def test_concurrent_reads_return_correct_bytes(source: FileSource, path: str, body: bytes) -> None:
    evict(path)

    def read(index: int) -> bool:
        start = index * 100_003 % (NBYTES - MIB)
        buffer = aligned(MIB, start % PAGE if index % 2 else 0)
        source.readv(start, [buffer])
        return buffer == body[start : start + MIB]

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(read, range(200)))


def test_closed_source_refuses_reads(source: FileSource) -> None:
    source.close()
    source.close()
    with pytest.raises(SourceUnavailable):
        source.readv(0, [aligned(1)])


def test_garbage_collected_source_closes_descriptors(path: str) -> None:
    evict(path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        source = FileSource.open(path)
        source.readv(0, [aligned(MIB)])
        del source
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() < 20
