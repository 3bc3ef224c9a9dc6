"""Safetensors files as they are written: one from tensors in memory, or a set whose tensors come in any order.

In: tensors; or a table of tensors that have places, then their bytes, by any thread or process. Out: files that are
whole when they appear.
Not here: what is written (`jobs`), the header's text (`safetensors`), objects' uploads (`upload`).

    OutputSet.create -> DST.penstock-KEY/ --write(file, offset, bytes)--> publish: sync, index, rename -> DST/

Digest every body of a weight set, reading each byte once, in bounded memory.

In: sources and a tensor table. Out: leaf digests, row after row.
Not here: digests of bytes that a load moves anyway (`engine`).

    table --windows--> threads: readv into the thread's own buffer --> leaves of the pieces in it
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from penstock.digest import leaf
from penstock.errors import ConfigError, DestinationError, DiskFull, PenstockError
from penstock.storage.local import reserve
from penstock.storage.safetensors import encode_header
from penstock.storage.source import Source
from penstock.types import MIB, U64, DType, TensorTable

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class OutputSet:
    """A directory of safetensors files whose tensors have places before they have bytes; hidden until `publish`.

    Several processes may hold it open; each writes the bytes it has, in any order, once or more.

    Args:
        directory: where the set grows; made by `create`.
        table: `file_index` and `offset` (from the first body of the file) say where each tensor goes.
        body_nbytes: of each file.
        metadata: of every file.
        groups: of each file, where the set is several: in `table` its tensors have that and a slash before their names.

    Attributes:
        names: of the files.
        data_offset: where the bodies of each file begin.
    """

    def __init__(
        self,
        directory: Path,
        table: TensorTable,
        body_nbytes: Sequence[int],
        metadata: Mapping[str, str] | None = None,
        groups: Sequence[str] = (),
    ) -> None:
        count = len(body_nbytes)
        self.groups = tuple(groups) or ("",) * count
        self.directory = directory
        self.table = table
        self._body_nbytes = body_nbytes
        self.names = names_of(self.groups)
        order = np.lexsort((table.offset, table.file_index)).tolist()
        entries: list[list[tuple[str, DType, Sequence[int], int, int]]] = [[] for _ in range(count)]
        for row in order:
            start = int(table.offset[row])
            entry = (self.name_of(row), table.dtypes[row], table.shapes[row], start, start + int(table.nbytes[row]))
            entries[int(table.file_index[row])].append(entry)
        named = zip(entries, self.names, strict=True)
        self._headers = [encode_header(some, metadata, uri=str(directory / name)) for some, name in named]
        self.data_offset = [len(header) for header in self._headers]
        self._fds: list[int] = []

    @property
    def file_nbytes(self) -> list[int]:
        """Size of each file."""
        return [header + body for header, body in zip(self.data_offset, self._body_nbytes, strict=True)]

    def create(self) -> None:
        """Make the directory and the files, each with its header and room for its bodies; what is there already stays.

        Raises:
            DiskFull: there is no room for all of it; what was made is removed.
        """
        is_new = not self.directory.exists()
        try:
            self.make()
            self.allocate()
        except BaseException:
            if is_new:
                self.remove()
            raise

    def make(self) -> None:
        """Make the directory and the files as `create` does, but reserve no room."""
        with typed(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            for name, header in zip(self.names, self._headers, strict=True):
                (self.directory / name).parent.mkdir(exist_ok=True)
                # Without O_TRUNC: a job that is resumed finds the bytes it wrote before.
                fd = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    os.pwrite(fd, header, 0)
                finally:
                    os.close(fd)

    def allocate(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Reserve room for all bodies in files that `make` made, unless `is_over` says to stop. DiskFull; files stay.

        Cost: in tmpfs 0.3 s a GB of a file, for its pages are allocated; files do not wait for each other.
        """
        # sched_getaffinity and not cpu_count: a container has fewer cores than its host.
        with typed(self.directory), ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for _ in pool.map(partial(self._allocate, is_over), self.names, self.file_nbytes):
                pass

    def _allocate(self, is_over: Callable[[], bool], name: str, nbytes: int) -> None:
        fd = os.open(self.directory / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            if nbytes > os.fstat(fd).st_size:
                reserve(fd, nbytes, is_over)
        finally:
            os.close(fd)

    def open(self) -> None:
        """Open the files, which `create` made, here or in another process."""
        with typed(self.directory):
            for name in self.names:
                self._fds.append(os.open(self.directory / name, os.O_RDWR | os.O_CLOEXEC))

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes, `offset` counting from the file's first body. Any thread. DiskFull, DestinationError."""
        at = self.data_offset[file] + offset
        with typed(self.directory / self.names[file]):
            while data.nbytes:
                done = os.pwrite(self._fds[file], data, at)
                at, data = at + done, data[done:]

    def read(self, file: int, offset: int, into: memoryview) -> None:
        """Read bytes back, `offset` as in `write`. DestinationError where they are not there."""
        at = self.data_offset[file] + offset
        with typed(self.directory / self.names[file]):
            while into.nbytes:
                done = os.preadv(self._fds[file], [into], at)
                if not done:
                    raise DestinationError("a file of the output was cut short", uri=str(self.directory))
                at, into = at + done, into[done:]

    def name_of(self, row: int) -> str:
        """Return a tensor's name in its file."""
        group = self.groups[int(self.table.file_index[row])]
        return self.table.names[row][len(group) + 1 if group else 0 :]

    def index(self) -> dict[str, bytes]:
        """Return the index files by their names; none where a single file needs none, or a name has a star."""
        indexes = {}
        for group in dict.fromkeys(self.groups):
            rows = [row for row, file in enumerate(self.table.file_index.tolist()) if self.groups[file] == group]
            if self.groups.count(group) == 1 or "*" in group:
                continue
            place = f"{group}/" if group else ""
            names = (self.names[file].removeprefix(place) for file in self.table.file_index[rows].tolist())
            shards = dict(zip(map(self.name_of, rows), names, strict=True))
            total = {"total_size": int(self.table.nbytes[rows].sum())}
            raw = msgspec.json.format(msgspec.json.encode({"metadata": total, "weight_map": shards}), indent=2)
            indexes[f"{place}model.safetensors.index.json"] = raw
        return indexes

    def sync(self) -> None:
        """Write the files' bytes to the disk."""
        with typed(self.directory):
            for fd in self._fds:
                os.fsync(fd)

    def publish(self, into: Path, small: Mapping[str, bytes]) -> None:
        """Sync all, add small files (index, manifest, configuration) and let it all appear at once as `into`.

        Raises:
            ConfigError: something is at `into`. DiskFull, DestinationError: nothing appeared.
        """
        # Bytes before names: after a crash no name may lead to a file without its content.
        self.sync()
        with typed(self.directory):
            for name, data in {**self.index(), **small}.items():
                fd = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(fd)
            for directory in dict.fromkeys([*((self.directory / name).parent for name in self.names), self.directory]):
                # A file is durable only once the directory that names it is.
                _sync_directory(directory)
        # As late as possible: the shorter the time before the rename, the less can take the name. (Not atomic:
        # rename(2) of a directory replaces an empty one, and fails on any other.)
        require_free(into)
        with typed(into):
            os.rename(self.directory, into)
            _sync_directory(into.parent)

    def remove(self) -> None:
        """Remove the directory and all its files."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        """Close the files. Idempotent."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class OutputRegion(OutputSet):
    """An output set in memory, for one file: its bodies alone, by a path that processes of this host can open.

    The owner of the memory creates, shares and frees it; this class only names and writes it.
    """

    def __init__(self, path: Path, table: TensorTable) -> None:
        self.directory = path
        self.table = table
        self.groups = ("",)
        self.names = [""]
        self.data_offset = [0]
        self._body_nbytes = [int(table.nbytes.sum())]
        self._headers = [b""]
        self._fds = []

    def allocate(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Do nothing: the memory exists already."""


def file_names(count: int) -> list[str]:
    """Return the names that checkpoints' shards have everywhere."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def names_of(groups: Sequence[str]) -> list[str]:
    """Return the files of a set, given each one's group: in a directory per group, or with the part for a star."""
    seen: dict[str, list[str]] = {}
    for group in dict.fromkeys(groups):
        count = groups.count(group)
        if "*" in group:
            seen[group] = [f"{group.replace('*', str(part))}.safetensors" for part in range(count)]
        else:
            seen[group] = [f"{group}/{name}" if group else name for name in file_names(count)]
    return [seen[group].pop(0) for group in groups]


def require_free(into: Path) -> None:
    """Raise ConfigError where something is at `into` already; an empty directory does not count."""
    if into.is_dir() and not any(into.iterdir()):
        return
    if into.exists() or into.is_symlink():
        raise ConfigError("something is there already", uri=str(into), hint="remove it, or write elsewhere")


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def typed(path: Path) -> Iterator[None]:
    """Map an OSError of the file system that is written to, to DiskFull or DestinationError."""
    try:
        yield
    except PenstockError:  # of what is read meanwhile; NotFound and PermissionDenied are OSErrors too
        raise
    except OSError as error:
        kind = DiskFull if error.errno in _DISK_FULL else DestinationError
        raise kind(f"cannot write: {error.strerror}", uri=str(path)) from error


WINDOW_BYTES = 8 * MIB
"""Bytes one thread reads at once; the chunk of a load. Source: `Settings.chunk_bytes`."""

_Piece = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """A run of a file, and the pieces of tensors in it."""

    file: int
    offset: int
    nbytes: int
    pieces: tuple[_Piece, ...]
    """(offset in the window, bytes, first leaf); each but a tensor's last is whole leaves."""


def digest_bodies(
    sources: Sequence[Source],
    table: TensorTable,
    *,
    leaf_bytes: int,
    threads: int,
    on_bytes: Callable[[int], None] | None = None,
) -> U64:
    """Return leaf digests of all tensors, in the order of `table`; `on_bytes` is called with bytes as they are read.

    Raises:
        SourceError: as `Source.readv`; the other threads stop at their next window.

    Cost: `threads` buffers of `WINDOW_BYTES`, or of one leaf where that is longer.
    """
    counts = leaf.num_leaves(table.nbytes, leaf_bytes)
    leaves = np.zeros(int(counts.sum()), np.uint64)
    window_bytes = max(WINDOW_BYTES // leaf_bytes, 1) * leaf_bytes
    windows = _windows(table, np.cumsum(counts) - counts, leaf_bytes, window_bytes)
    lock = threading.Lock()
    stop = threading.Event()

    def next_window() -> _Window | None:
        with lock:
            return None if stop.is_set() else next(windows, None)

    def work() -> None:
        # An anonymous mapping begins at a page, so direct I/O may fill it; shared ones get no huge pages.
        memory = mmap.mmap(-1, window_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = memoryview(memory)
        try:
            while (window := next_window()) is not None:
                sources[window.file].readv(window.offset, [buffer[: window.nbytes]])
                for start, nbytes, first in window.pieces:
                    leaf.leaf_digests(buffer[start : start + nbytes], leaf_bytes, leaves[first:])
                if on_bytes is not None:
                    # Under the lock, so that a caller's counter need not be safe for threads.
                    with lock:
                        on_bytes(window.nbytes)
        finally:
            # After an error the other threads must not read on; after the end there is nothing left for them.
            stop.set()

    with ThreadPoolExecutor(threads, thread_name_prefix="penstock-digest") as pool:
        jobs = [pool.submit(work) for _ in range(threads)]
        try:
            for job in jobs:
                job.result()
        finally:
            stop.set()
    return leaves


def _windows(table: TensorTable, first_leaf: np.ndarray, leaf_bytes: int, window_bytes: int) -> Iterator[_Window]:
    """Yield runs of files in order, at most `window_bytes` long, small neighbours together."""
    order = np.lexsort((table.offset, table.file_index))
    columns = (table.file_index[order], table.offset[order], table.nbytes[order], first_leaf[order])
    file = start = stop = -1
    pieces: list[_Piece] = []
    for row_file, offset, nbytes, row_leaf in zip(*(column.tolist() for column in columns), strict=True):
        for skip in range(0, nbytes, window_bytes):
            at, length = offset + skip, min(window_bytes, nbytes - skip)
            if pieces and (row_file != file or at != stop or at + length - start > window_bytes):
                yield _Window(file=file, offset=start, nbytes=stop - start, pieces=tuple(pieces))
                pieces = []
            if not pieces:
                file, start = row_file, at
            stop = at + length
            pieces.append((at - start, length, row_leaf + skip // leaf_bytes))
    if pieces:
        yield _Window(file=file, offset=start, nbytes=stop - start, pieces=tuple(pieces))
