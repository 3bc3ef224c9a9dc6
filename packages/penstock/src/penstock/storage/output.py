"""Writers of weight sets, whose tensors arrive in any order. A weight set is published completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from penstock import descriptors
from penstock.config import Settings
from penstock.errors import ConfigError, DestinationError, DiskFull, FormatError, IntegrityError, NotFound, SourceError
from penstock.logs import log_named
from penstock.report import bytes_text
from penstock.storage.file_names import STEM, index_name, names_of
from penstock.storage.files import FileSource
from penstock.storage.headers import GGUF_SUFFIX, read_header
from penstock.storage.local import exchange, is_in_memory, reserve
from penstock.storage.locate import INDEX_SUFFIX, SIDECAR, SUFFIX
from penstock.storage.manifest import decode
from penstock.storage.place import STAMP, OutputPlace, fill, foreign, locked, unlock
from penstock.storage.safetensors import encode_header, parse_header
from penstock.storage.write import MAKE_ROOM, free_bytes, short_name, typed
from penstock.types import DType, TensorTable
from penstock.waits import Threads

log = log_named("penstock.storage")

Content = bytes | Callable[[], bytes]
"""Content of a small file, or a function that returns it when the file is written."""
GGUF_FILE = "model.gguf"
"""File name of a result in GGUF format."""

# Do not follow symlinks, because a symlink in place of an output file would redirect the written bytes.
_OWN_FILE = os.O_NOFOLLOW | os.O_CLOEXEC

DISK_WRITE_BYTES = 1 << 20
"""Size of one write to a disk's page cache. For larger writes Linux allocates 2 MiB blocks, which a virtual machine may
have to get from its host first. Converting 4 GB to FP8 on ext4 then took twice as long. Source:
benchmarks/results/cpu2_202611/convert.md."""

UPLOADING = "penstock.uploading"
"""Marker object under a prefix during an upload."""

# Number of concurrent uploads, each in several parts.
_UPLOADS = 4


_Entry = tuple[str, DType, tuple[int, ...], int, int]
"""Name, dtype, shape, offset in the file and size of one tensor."""


_READ_BACK_HINT = "nothing was replaced: check the disk, and write the file again"


class OutputSet:
    """A hidden directory of files with a fixed layout, written in any order. `publish` makes the directory visible.

    Several processes may open the set. Each process may write its bytes more than once.

    Args:
        directory: the staging directory, made by `create`.
        table: `file_index` and `offset` locate each tensor. Offsets are relative to the file's first body.
        body_nbytes: size of the bodies in each file.
        groups: group of each file, if the output contains several sets and names in `table` begin with the group.
        gguf_header: header of the only file, if it is a GGUF file. None writes safetensors.
        stem: first part of the file names, before the shard number.

    Attributes:
        names: the file names.
        data_offset: offset of the first body in each file, in bytes.
    """

    def __init__(
        self,
        directory: Path,
        table: TensorTable,
        body_nbytes: Sequence[int],
        metadata: Mapping[str, str] | None = None,
        groups: Sequence[str] = (),
        gguf_header: bytes | None = None,
        stem: str = STEM,
    ) -> None:
        count = len(body_nbytes)
        self.groups = tuple(groups) or ("",) * count
        self._stem = stem
        self.directory = directory
        self.table = table
        self._body_nbytes = body_nbytes
        self.metadata = dict(metadata or {})
        self._fds: list[int] = []
        self._write_bytes = DISK_WRITE_BYTES
        if gguf_header is not None:
            self.names, self._headers, self.data_offset = [GGUF_FILE], [gguf_header], [len(gguf_header)]
            return
        self.names = names_of(self.groups, stem)
        order = np.lexsort((table.offset, table.file_index)).tolist()
        entries: list[list[tuple[str, DType, Sequence[int], int, int]]] = [[] for _ in range(count)]
        for row in order:
            start = int(table.offset[row])
            entry = (self.name_of(row), table.dtypes[row], table.shapes[row], start, start + int(table.nbytes[row]))
            entries[int(table.file_index[row])].append(entry)
        named = zip(entries, self.names, strict=True)
        self._headers = [encode_header(some, metadata, uri=str(directory / name)) for some, name in named]
        self.data_offset = [len(header) for header in self._headers]

    @property
    def file_nbytes(self) -> list[int]:
        """Size of each file."""
        return [header + body for header, body in zip(self.data_offset, self._body_nbytes, strict=True)]

    def create(self) -> None:
        """Make the directory and files, write headers and reserve space. Keep existing files. Raises DiskFull."""
        # An existing directory holds bytes that a resumed job needs.
        is_new = not self.directory.exists()
        try:
            self.make()
            self.allocate()
        except BaseException:
            if is_new:
                self.remove()
            raise

    def make(self) -> None:
        """Make the directory and its files as `create` does, without reserving space."""
        with typed(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            for name, header in zip(self.names, self._headers, strict=True):
                (self.directory / name).parent.mkdir(exist_ok=True)
                # Do not use O_TRUNC, because a resumed job needs the bytes that it wrote before.
                fd = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | _OWN_FILE, 0o666)
                try:
                    os.pwrite(fd, header, 0)
                finally:
                    os.close(fd)

    def allocate(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Reserve space for all bodies in the files from `make`. Stop if `is_over` returns True. Raises DiskFull.

        On tmpfs this takes 0.3 s for each GB of a file, because pages are allocated. Files are processed in parallel.
        """
        # A container may have fewer cores than `cpu_count` returns.
        with self._typed(), Threads(len(os.sched_getaffinity(0)), "penstock-allocate") as pool:
            needed = 0
            for name, nbytes in zip(self.names, self.file_nbytes, strict=True):
                entry = (self.directory / name).stat()
                # A resumed file may have reserved space or holes, so count its allocated blocks.
                if entry.st_size < nbytes:
                    needed += max(0, nbytes - entry.st_blocks * 512)
            require_space(self.directory, needed)
            for _ in pool.map(partial(self._allocate, is_over), self.names, self.file_nbytes):
                pass

    def _typed(self, path: Path | None = None) -> contextlib.AbstractContextManager[None]:
        return typed(path or self.directory, needed=sum(self.file_nbytes))

    def _allocate(self, is_over: Callable[[], bool], name: str, nbytes: int) -> None:
        fd = os.open(self.directory / name, os.O_RDWR | _OWN_FILE)
        try:
            if nbytes > os.fstat(fd).st_size:
                reserve(fd, nbytes, is_over)
        finally:
            os.close(fd)

    def open(self) -> None:
        """Open the files that `create` made in this or another process."""
        descriptors.make_room(len(self.names))
        with typed(self.directory):
            for name in self.names:
                self._fds.append(os.open(self.directory / name, os.O_RDWR | os.O_CLOEXEC))
        if self._fds and is_in_memory(self._fds[0]):
            self._write_bytes = sys.maxsize

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes at an offset from the file's first body. Thread-safe. Raises DiskFull or DestinationError."""
        at = self.data_offset[file] + offset
        with self._typed(self.directory / self.names[file]):
            # One call writes at most 2 GiB on Linux, and less on a full disk.
            while data.nbytes:
                done = os.pwrite(self._fds[file], data[: self._write_bytes], at)
                at, data = at + done, data[done:]

    def read(self, file: int, offset: int, into: memoryview) -> None:
        """Read bytes back. See `write` for `offset`. Raises DestinationError if the file is too short."""
        at = self.data_offset[file] + offset
        with typed(self.directory / self.names[file]):
            while into.nbytes:
                done = os.preadv(self._fds[file], [into], at)
                # The space was reserved, so another process truncated the file.
                if not done:
                    raise DestinationError("an output file was truncated", uri=str(self.directory))
                at, into = at + done, into[done:]

    def name_of(self, row: int) -> str:
        """Return the name under which a file stores the tensor."""
        group = self.groups[int(self.table.file_index[row])]
        return self.table.names[row][len(group) + 1 if group else 0 :]

    def index(self) -> dict[str, bytes]:
        """Return the index files by name. A group that has one file, or a star in its name, has no index."""
        indexes = {}
        for group in dict.fromkeys(self.groups):
            rows = [row for row, file in enumerate(self.table.file_index.tolist()) if self.groups[file] == group]
            if self.groups.count(group) == 1 or "*" in group:
                continue
            # Shard names are relative to the index, which is in the group's directory.
            place = f"{group}/" if group else ""
            names = (self.names[file].removeprefix(place) for file in self.table.file_index[rows].tolist())
            shards = dict(zip(map(self.name_of, rows), names, strict=True))
            total = {"total_size": int(self.table.nbytes[rows].sum())}
            raw = msgspec.json.format(msgspec.json.encode({"metadata": total, "weight_map": shards}), indent=2)
            indexes[f"{place}{index_name(self._stem)}"] = raw
        return indexes

    def sync(self) -> None:
        """Write the files' bytes to disk."""
        with self._typed():
            for fd in self._fds:
                os.fsync(fd)

    def read_back(self, small: Mapping[str, Content]) -> None:
        """Read back headers, and manifests and weights in `small`. Raises DestinationError if any of them differs."""
        rows: list[dict[str, _Entry]] = [{} for _ in self.names]
        table = self.table
        for row, (file, at, nbytes) in enumerate(
            zip(table.file_index.tolist(), table.offset.tolist(), table.nbytes.tolist(), strict=True)
        ):
            name = self.name_of(row)
            rows[file][name] = name, table.dtypes[row], table.shapes[row], self.data_offset[file] + at, nbytes
        for file_name, nbytes, wanted in zip(self.names, self.file_nbytes, rows, strict=True):
            path = self.directory / file_name
            with _readable(path), closing(FileSource.open(str(path))) as source:
                size, found = source.nbytes, read_header(source).tensors
            if size != nbytes:
                message = f"{nbytes} bytes were written, but the file has {size}"
                raise DestinationError(message, uri=str(path), hint=_READ_BACK_HINT)
            columns = (found.names, found.dtypes, found.shapes, found.offset.tolist(), found.nbytes.tolist())
            actual = {entry[0]: entry for entry in zip(*columns, strict=True)}
            # The headers of GGUF files cannot be compared, because the table contains no GGUF types.
            if file_name != GGUF_FILE and actual != wanted:
                name = next(name for name in (*wanted, *actual) if actual.get(name) != wanted.get(name))
                message = "the header on disk differs from the header written"
                raise DestinationError(message, uri=str(path), tensor=name, hint=_READ_BACK_HINT)
        for name, content in small.items():
            path = self.directory / name
            # Skip functions, which return copies of a source's files and no weights or manifests.
            if isinstance(content, bytes):
                with _readable(path):
                    if path.name == SIDECAR:
                        decode(content, uri=str(path))
                    elif path.name.endswith(SUFFIX):
                        stop = 8 + int.from_bytes(content[:8], "little")
                        parse_header(content[8:stop], file_nbytes=len(content), uri=str(path))

    def publish(self, into: Path, small: Mapping[str, Content], *, replace: bool = False) -> None:
        """Sync all files, add the `small` files (content by name), and publish the set at `into` atomically.

        With `replace`, an old weight set at `into` is replaced and then removed. Raises ConfigError if `into` contains
        other files. If DiskFull or DestinationError is raised, nothing was published or removed.
        """
        # Sync bytes before names, so that after a crash no name refers to an incomplete file.
        self.sync()
        with typed(self.directory):
            folders = {self.directory, *((self.directory / name).parent for name in self.names)}
            for name, content in {**self.index(), **small}.items():
                data = content if isinstance(content, bytes) else content()
                folder = (self.directory / name).parent
                folder.mkdir(parents=True, exist_ok=True)
                while folder != self.directory:
                    folders.add(folder)
                    folder = folder.parent
                # An earlier attempt may have left a longer file.
                fd = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _OWN_FILE, 0o666)
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(fd)
            for folder in folders:
                # A file is durable only after its directory is synced.
                _sync_directory(folder)
        self.read_back(small)
        with typed(into):
            # Check again as late as possible, because the lock excludes only writers that use Penstock.
            with locked(self.directory.parent):
                place = OutputPlace.at(into)
                place.require_free(replace=replace)
                unlock(self.directory)
                if self.directory.parent == place.path:
                    fill(place.path, self.directory, _rank)
                    _sync_directory(place.path)
                    return
                if replace and os.path.lexists(place.path):
                    self._take_place_of(place.path)
                else:
                    os.rename(self.directory, place.path)
                # The rename is durable only after the parent directory is synced.
                _sync_directory(place.path.parent)
            # After a replacement, `directory` contains the old set. Keep files in it that others added.
            if not self.directory.is_symlink() and self.directory.is_dir() and (others := foreign(self.directory)):
                kept = place.path.with_name(f"{short_name(place.path)}.replaced-{secrets.token_hex(4)}")
                os.rename(self.directory, kept)
                log.warning("the old files are kept in %s because files were added there: %s", kept, ", ".join(others))
            self.remove()

    def _take_place_of(self, into: Path) -> None:
        try:
            exchange(self.directory, into)
            return
        except OSError as error:
            # NFS and kernels before 3.15 do not support this call.
            if error.errno not in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
                raise
            why = error.strerror
        log.warning("replacing %s in two steps, because its file system cannot exchange names: %s", into, why)
        old = self.directory.with_name(f"{self.directory.name}.old")
        os.rename(into, old)
        try:
            os.rename(self.directory, into)
        except BaseException:
            os.rename(old, into)
            raise
        os.rename(old, self.directory)

    def remove(self) -> None:
        """Remove the directory and all its files."""
        if self.directory.is_symlink():
            self.directory.unlink()
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        """Close the files. Idempotent."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def publish_remote(
    out: OutputSet,
    uri: str,
    small: Mapping[str, Content],
    *,
    settings: Settings,
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Upload a set, with the index and manifest last, and remove the local files.

    `small` contains small files by name, including the manifest. Raises ConfigError if the prefix contains a weight set
    or other files. After an error during the upload, there is no manifest, and the next upload may overwrite the files.
    """
    from penstock.storage.objects import remove_object, upload_file, write_small

    prefix = uri.rstrip("/")
    require_free_remote(prefix, settings=settings, storage_options=storage_options)

    out.read_back(small)
    # The marker allows the next call to overwrite the files of an interrupted upload.
    write_small(f"{prefix}/{UPLOADING}", b"", settings=settings, storage_options=storage_options)

    def upload(name: str) -> None:
        path = out.directory / name
        upload_file(f"{prefix}/{name}", path, settings=settings, storage_options=storage_options)

    with Threads(_UPLOADS, thread_name_prefix="penstock-upload") as pool:
        for done in [pool.submit(upload, name) for name in out.names]:
            done.result()
    # Upload index and manifest last, because readers that find them must also find all other files.
    last: dict[str, Content] = {**out.index(), SIDECAR: small[SIDECAR]}
    for name, content in [*((n, d) for n, d in small.items() if n not in last), *last.items()]:
        data = content if isinstance(content, bytes) else content()
        write_small(f"{prefix}/{name}", data, settings=settings, storage_options=storage_options)
    try:
        remove_object(f"{prefix}/{UPLOADING}", settings=settings, storage_options=storage_options)
    except SourceError as error:
        # The set is complete, and some users have permission to write objects but not to remove them.
        log.warning("%s/%s stays, because it cannot be removed: %s", prefix, UPLOADING, error.message)
    out.remove()


def _rank(name: str) -> int:
    """Return a number that orders the moves of files into an existing directory, see `place.fill`."""
    if name == SIDECAR or name.endswith(INDEX_SUFFIX):
        return 0
    # The stamp moves last, because it marks the result as complete.
    return 3 if name == STAMP else 2 if "." in name and not name.endswith((SUFFIX, GGUF_SUFFIX)) else 1


def require_free_remote(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None) -> None:
    """Raise ConfigError if the prefix contains a weight set, or files that Penstock did not upload."""
    from penstock.storage.objects import list_objects

    prefix = uri.rstrip("/")
    try:
        listed = list_objects(f"{prefix}/", settings=settings, storage_options=storage_options)
    except NotFound:
        return
    there = {name.rpartition("/")[2] for name in listed}
    hint = "remove it, or write to another prefix"
    if SIDECAR in there:
        raise ConfigError("the prefix already contains a weight set", uri=prefix, hint=hint)
    # Files of an interrupted upload may be overwritten.
    others = sorted(name for name in there if name.endswith((SUFFIX, GGUF_SUFFIX, ".json")))
    if others and UPLOADING not in there:
        message = f"the prefix already contains files that Penstock did not write: {', '.join(others[:5])}"
        raise ConfigError(message, uri=prefix, hint=hint)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def require_space(path: Path, needed: int) -> None:
    """Raise DiskFull if the file system of a path has less free space than `needed` bytes."""
    free = free_bytes(path)
    if free is not None and needed > free:
        message = f"not enough disk space: {bytes_text(needed)} needed, {bytes_text(free)} free"
        raise DiskFull(message, uri=str(path), hint=MAKE_ROOM)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (FormatError, SourceError, IntegrityError) as error:
        message = f"the file cannot be read back: {error.message}"
        raise DestinationError(message, uri=str(path), hint=_READ_BACK_HINT) from error
