"""Views of MappedFile have the file's bytes and private writes, and dropped views are unmapped."""

from __future__ import annotations

import gc
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import DestinationError, NotFound, SourceChanged, SourceTruncated, SourceUnavailable
from penstock.memory import mapping
from penstock.storage import local
from penstock.storage.mapped import MappedFile

MIB = 1 << 20
NBYTES = 9 * MIB + 1234
PAGE = local.PAGE_BYTES
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads /proc/self/maps")


@pytest.fixture(scope="module")
def body() -> bytes:
    return np.random.default_rng(3).integers(0, 256, NBYTES, dtype=np.uint8).tobytes()


@pytest.fixture
def path(tmp_path: Path, body: bytes) -> str:
    name = tmp_path / "model.safetensors"
    name.write_bytes(body)
    return str(name)


def evict(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def num_mapped_pages(path: str) -> int:
    """Return the number of pages of address space that map the file."""
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if path in line]
    return sum(int(stop, 16) - int(start, 16) for start, stop in spans) // PAGE


def num_populated_bytes(path: str) -> int:
    """Return the bytes of the file in this process's page tables."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = path in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, NBYTES), (8, 100), (PAGE, PAGE), (PAGE - 1, 2), (2 * MIB + 5, 4 * MIB), (NBYTES - 1, 1)]
)
def test_view_matches_file_bytes(path: str, body: bytes, offset: int, nbytes: int, cold: bool) -> None:
    if cold:
        evict(path)
    file = MappedFile.open(path)
    view = file.view(offset, nbytes)
    file.prefetch(offset, nbytes)
    assert (view.format, view.readonly, view.contiguous, view.nbytes) == ("B", False, True, nbytes)
    assert view == body[offset : offset + nbytes]


def test_empty_view_maps_nothing(path: str, tmp_path: Path) -> None:
    file = MappedFile.open(path)
    assert file.view(NBYTES, 0).nbytes == 0
    assert num_mapped_pages(path) == 0
    (tmp_path / "empty").touch()
    empty = MappedFile.open(str(tmp_path / "empty"))
    assert empty.view(0, 0).nbytes == 0
    empty.prefetch(0, 0)


def test_private_writes_are_invisible_in_other_views(path: str, body: bytes) -> None:
    file = MappedFile.open(path)
    first, second = file.view(100, MIB), file.view(100, MIB)
    first[:5] = b"local"
    assert bytes(first[:5]) == b"local"
    assert second == body[100 : 100 + MIB]
    assert Path(path).read_bytes() == body


def test_private_writes_survive_prefetch(path: str, body: bytes) -> None:
    file = MappedFile.open(path)
    view = file.view(0, NBYTES)
    view[MIB : MIB + 3] = b"own"
    file.prefetch(0, NBYTES)
    assert bytes(view[MIB - 1 : MIB + 4]) == body[MIB - 1 : MIB] + b"own" + body[MIB + 3 : MIB + 4]


def test_dropping_view_unmaps_only_its_pages(path: str, body: bytes) -> None:
    file = MappedFile.open(path)
    views = [file.view(i * MIB, MIB) for i in range(9)]
    assert num_mapped_pages(path) == local.num_pages(0, NBYTES)
    kept = np.frombuffer(views[4], np.uint8)[17:]  # An array of a view keeps the view alive.
    del views
    gc.collect()
    assert num_mapped_pages(path) == MIB // PAGE + 1  # No view held the tail.
    assert kept.tobytes() == body[4 * MIB + 17 : 5 * MIB]
    del kept
    gc.collect()
    assert num_mapped_pages(path) == 0


def test_views_retain_pages_shared_with_dropped_view(path: str, body: bytes) -> None:
    file = MappedFile.open(path)
    first, middle, last = file.view(0, MIB + 100), file.view(MIB + 100, MIB), file.view(2 * MIB + 100, MIB)
    first[-1], last[0] = 7, 8
    del middle
    gc.collect()
    assert (first[-1], last[0]) == (7, 8)
    assert first[:-1] == body[: MIB + 99]
    assert last[1:] == body[2 * MIB + 101 : 3 * MIB + 100]
    again = file.view(MIB + 100, MIB)  # A dropped range can be viewed again.
    file.prefetch(0, NBYTES)
    assert again == body[MIB + 100 : 2 * MIB + 100]


def test_dropped_view_frees_private_writes(path: str) -> None:
    def private_kib() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

    file = MappedFile.open(path)
    kept, view = file.view(0, 100), file.view(100, 8 * MIB)
    before = private_kib()
    view[:] = bytes(8 * MIB)
    assert private_kib() - before > 7 * 1024
    del view
    gc.collect()
    assert private_kib() - before < 1024
    assert kept.nbytes == 100


def test_views_stay_readable_after_file_is_closed(path: str, body: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = MappedFile.open(path)
    views = [file.view(i * PAGE, PAGE) for i in range(500)]
    file.close()
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before
    os.unlink(path)
    assert views[499] == body[499 * PAGE : 500 * PAGE]


def test_prefetch_without_views_fills_page_cache(path: str) -> None:
    evict(path)
    file = MappedFile.open(path)
    file.prefetch(MIB + 5, 2 * MIB)
    with open(path, "rb") as reader:
        cached = local.resident_pages(reader.fileno(), MIB + 5, 2 * MIB)
    assert cached in {None, local.num_pages(MIB + 5, 2 * MIB)}
    assert num_mapped_pages(path) == 0


@pytest.mark.parametrize("cold", [False, True])
def test_prefetch_populates_page_tables_of_live_views(path: str, cold: bool) -> None:
    if cold:
        evict(path)
    file = MappedFile.open(path)
    gone, left, right = file.view(0, MIB), file.view(MIB, 4 * MIB), file.view(6 * MIB + 7, 3 * MIB)
    del gone
    assert num_populated_bytes(path) == 0
    file.prefetch(0, NBYTES)
    assert num_populated_bytes(path) >= left.nbytes + right.nbytes


def test_prefetch_without_madvise_populate_keeps_bytes_correct(
    path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "_MADV_POPULATE_READ", 9999)
    evict(path)
    file = MappedFile.open(path)
    view = file.view(0, NBYTES)
    file.prefetch(0, NBYTES)
    assert view == body


def test_prefetch_range_beyond_file_end_is_clipped(path: str, body: bytes) -> None:
    file = MappedFile.open(path)
    view = file.view(NBYTES - 10, 10)
    file.prefetch(NBYTES, 1)
    assert num_populated_bytes(path) == 0
    file.prefetch(NBYTES - 10, 8 * MIB)
    assert num_populated_bytes(path) > 0
    assert view == body[-10:]


def test_concurrent_views_and_prefetches_return_correct_bytes(path: str, body: bytes) -> None:
    evict(path)
    file = MappedFile.open(path)

    def work(index: int) -> bool:
        start = index * 77_777 % (NBYTES - MIB)
        view = file.view(start, MIB)
        file.prefetch(start - start % 100, MIB)
        return view == body[start : start + MIB]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(300)))
    gc.collect()
    assert num_mapped_pages(path) == 0


@pytest.mark.parametrize(("offset", "nbytes"), [(NBYTES, 1), (0, NBYTES + 1), (-1, 1), (0, -1), (1 << 62, 1)])
def test_range_outside_file_raises_source_truncated(path: str, offset: int, nbytes: int) -> None:
    with pytest.raises(SourceTruncated):
        MappedFile.open(path).view(offset, nbytes)


@pytest.mark.parametrize("populate", [True, False])
def test_prefetch_of_truncated_file_raises_source_truncated(
    path: str, populate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not populate:
        monkeypatch.setattr(mapping, "_MADV_POPULATE_READ", 9999)
    file = MappedFile.open(path)
    view = file.view(0, NBYTES)
    evict(path)
    os.truncate(path, MIB)
    with pytest.raises(SourceTruncated):
        file.prefetch(0, NBYTES)
    with pytest.raises(SourceTruncated):
        file.check_unchanged()
    assert view.nbytes == NBYTES


def test_changed_or_removed_file_raises_source_changed(path: str) -> None:
    file = MappedFile.open(path)
    file.check_unchanged()
    assert MappedFile.open(path, state=file.state).identity == file.identity
    Path(path + ".new").write_bytes(bytes(NBYTES))
    os.replace(path + ".new", path)
    with pytest.raises(SourceChanged, match="replaced"):
        file.check_unchanged()
    with pytest.raises(SourceChanged):
        MappedFile.open(path, state=file.state)
    os.unlink(path)
    with pytest.raises(SourceChanged, match="removed"):
        file.check_unchanged()


def test_mapped_open_rejects_directory_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        MappedFile.open(str(tmp_path / "absent"))
    with pytest.raises(SourceUnavailable, match="directory"):
        MappedFile.open(str(tmp_path))


def test_exhausted_mapping_limit_raises_destination_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mapping.Mapping, "map", full)
    with pytest.raises(DestinationError, match="max_map_count"):
        MappedFile.open(path).view(0, 1)


def test_view_is_mapped_separately_if_whole_file_mapping_fails(
    path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mapping.Mapping.map

    def small(fd: int, offset: int, nbytes: int) -> mapping.Mapping:
        if nbytes > 4 * MIB:
            raise OSError(12, "Cannot allocate memory")
        return real(fd, offset, nbytes)

    monkeypatch.setattr(mapping.Mapping, "map", small)
    file = MappedFile.open(path)
    view = file.view(MIB + 3, MIB)
    file.prefetch(MIB, MIB)
    assert view == body[MIB + 3 : 2 * MIB + 3]


def test_exhausted_address_space_raises_destination_error(path: str) -> None:
    file = MappedFile.open(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * MIB, hard))
    try:
        with pytest.raises(DestinationError):
            file.view(0, NBYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_writes_do_not_reach_parent(path: str, body: bytes) -> None:
    file = MappedFile.open(path)
    view = file.view(0, NBYTES)
    view[:3] = b"mum"
    pid = os.fork()
    if not pid:
        good = bytes(view[:3]) == b"mum" and view[3:] == body[3:]
        view[:3] = b"kid"
        file.prefetch(0, NBYTES)
        del view
        os._exit(0 if good and num_mapped_pages(path) == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert bytes(view[:3]) == b"mum"
    assert view[3:] == body[3:]


def test_mapped_file_is_ready_only_when_cached(path: str, tmp_path: Path) -> None:
    file = MappedFile.open(path)
    with open(path, "rb") as reader:
        cached = local.resident_pages(reader.fileno(), 0, NBYTES)
    if cached is None:
        assert not file.is_ready()
        return
    assert file.is_ready()
    evict(path)
    assert not file.is_ready()
    file.prefetch(0, NBYTES)
    assert file.is_ready()
    (tmp_path / "empty").touch()
    assert MappedFile.open(str(tmp_path / "empty")).is_ready()
