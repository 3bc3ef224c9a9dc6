"""Files of weights as they are written: a set whose tensors come in any order, published whole or not at all.

In: a table of tensors that have places, then their bytes, by any thread or process. Out: a directory or a prefix of
objects that is a whole weight set when it appears.
Not here: what is written (`jobs`), the header's text (`safetensors`), one object (`objects`).

    OutputSet.create -> DST.penstock-KEY/ --write(file, offset, bytes)--> publish: sync, index, rename -> DST/
                                                                          publish_remote: upload, index, manifest
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from penstock import descriptors
from penstock.config import Settings
from penstock.errors import ConfigError, DestinationError, DiskFull, NotFound, SourceError
from penstock.logs import log_named
from penstock.report import bytes_text
from penstock.storage.file_names import STEM, index_name, names_of
from penstock.storage.local import exchange, is_in_memory, reserve
from penstock.storage.locate import GGUF_SUFFIX, INDEX_SUFFIX, SIDECAR, SUFFIX
from penstock.storage.place import STAMP, OutputPlace, fill, foreign, locked, unlock
from penstock.storage.read_back import Entry, require_readable, require_readable_bytes
from penstock.storage.safetensors import encode_header
from penstock.storage.write import MAKE_ROOM, short_name, typed
from penstock.storage.write import free_bytes as _free_bytes
from penstock.types import DType, TensorTable
from penstock.waits import Threads

log = log_named("penstock.storage")

Content = bytes | Callable[[], bytes]
"""Content of a small file, or a function that reads it when it is written."""
GGUF_FILE = "model.gguf"
"""Name of a result that is one GGUF file."""

# The files are this writer's own: one that is a link would lead to another.
_OWN = os.O_NOFOLLOW | os.O_CLOEXEC

_DISK_WRITE_BYTES = 1 << 20
"""Bytes of one write into the page cache of a disk. For larger ones Linux takes memory in pieces of 2 MiB, which a
virtual machine may have to get from its host first: 4 GB to FP8 on ext4 took twice as long.
Source: benchmarks/results/cpu2_202611/convert.md."""

UPLOADING = "penstock.uploading"
"""Object that is under a prefix for as long as an upload has not ended."""

# Files uploaded at once, each in several parts; see `objects.upload_file`.
_UPLOADS = 4


class OutputSet:
    """A directory of files whose tensors have places before they have bytes; hidden until `publish`.

    Several processes may hold it open; each writes the bytes it has, in any order, once or more.

    Args:
        directory: where the set grows; made by `create`.
        table: `file_index` and `offset` (from the first body of the file) say where each tensor goes.
        body_nbytes: of each file.
        metadata: of every file.
        groups: of each file, where the set is several: in `table` its tensors have that and a slash before their names.
        gguf_header: what the one file begins with, which is then a GGUF file; None: files of safetensors.
        stem: the part of the files' names before their number.

    Attributes:
        names: of the files.
        data_offset: where the bodies of each file begin.
        metadata: of every file of safetensors.
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
        self._write_bytes = _DISK_WRITE_BYTES
        if gguf_header is not None:
            self.names, self._headers, self.data_offset = [GGUF_FILE], [gguf_header], [len(gguf_header)]
            return
        self.names = names_of(self.groups, stem)
        # Entries in the order of the bodies, as all known writers leave them.
        order = np.lexsort((table.offset, table.file_index)).tolist()
        entries: list[list[tuple[str, DType, Sequence[int], int, int]]] = [[] for _ in range(count)]
        for row in order:
            start = int(table.offset[row])
            entry = (self.name_of(row), table.dtypes[row], table.shapes[row], start, start + int(table.nbytes[row]))
            entries[int(table.file_index[row])].append(entry)
        named = zip(entries, self.names, strict=True)
        # Made now: a header's length is where the first body goes.
        self._headers = [encode_header(some, metadata, uri=str(directory / name)) for some, name in named]
        self.data_offset = [len(header) for header in self._headers]

    @property
    def file_nbytes(self) -> list[int]:
        """Size of each file."""
        return [header + body for header, body in zip(self.data_offset, self._body_nbytes, strict=True)]

    def create(self) -> None:
        """Make the directory and the files, each with its header and room for its bodies; what is there already stays.

        Raises:
            DiskFull: there is no room for all of it; what was made is removed.
        """
        # A directory of an earlier try has bytes that a resumed job goes on with: a full disk must not take them.
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
                fd = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | _OWN, 0o666)
                try:
                    os.pwrite(fd, header, 0)
                finally:
                    os.close(fd)

    def allocate(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Reserve room for all bodies in files that `make` made, unless `is_over` says to stop. DiskFull; files stay.

        Cost: in tmpfs 0.3 s a GB of a file, for its pages are allocated; files do not wait for each other.
        """
        # sched_getaffinity and not cpu_count: a container has fewer cores than its host.
        with self._typed(), Threads(len(os.sched_getaffinity(0)), "penstock-allocate") as pool:
            self._check_room()
            for _ in pool.map(partial(self._allocate, is_over), self.names, self.file_nbytes):
                pass

    def _check_room(self) -> None:
        """Raise DiskFull where the file system has less room than the files still need."""
        needed = 0
        for name, nbytes in zip(self.names, self.file_nbytes, strict=True):
            there = (self.directory / name).stat()
            # Blocks and not the length: a file that was begun may have room reserved, or a hole.
            if there.st_size < nbytes:
                needed += max(0, nbytes - there.st_blocks * 512)
        require_room(self.directory, needed)

    def _typed(self, path: Path | None = None) -> contextlib.AbstractContextManager[None]:
        """Map an OSError of a write to an error that says how large the set is."""
        return typed(path or self.directory, needed=sum(self.file_nbytes))

    def _allocate(self, is_over: Callable[[], bool], name: str, nbytes: int) -> None:
        """Reserve room for one file; one that a resumed job finds at its length has it already."""
        fd = os.open(self.directory / name, os.O_RDWR | _OWN)
        try:
            if nbytes > os.fstat(fd).st_size:
                reserve(fd, nbytes, is_over)
        finally:
            os.close(fd)

    def open(self) -> None:
        """Open the files, which `create` made, here or in another process."""
        descriptors.make_room(len(self.names))
        with typed(self.directory):
            for name in self.names:
                self._fds.append(os.open(self.directory / name, os.O_RDWR | os.O_CLOEXEC))
        if self._fds and is_in_memory(self._fds[0]):
            self._write_bytes = sys.maxsize

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes, `offset` counting from the file's first body. Any thread. DiskFull, DestinationError."""
        at = self.data_offset[file] + offset
        with self._typed(self.directory / self.names[file]):
            # A write may be short: Linux writes at most 2 GiB at once, and less where the disk fills up.
            while data.nbytes:
                done = os.pwrite(self._fds[file], data[: self._write_bytes], at)
                at, data = at + done, data[done:]

    def read(self, file: int, offset: int, into: memoryview) -> None:
        """Read bytes back, `offset` as in `write`. DestinationError where they are not there."""
        at = self.data_offset[file] + offset
        with typed(self.directory / self.names[file]):
            while into.nbytes:
                done = os.preadv(self._fds[file], [into], at)
                # The room was reserved, so an end within it means that another process has cut the file.
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
            # Relative to the index, which lies in the group's directory.
            place = f"{group}/" if group else ""
            names = (self.names[file].removeprefix(place) for file in self.table.file_index[rows].tolist())
            shards = dict(zip(map(self.name_of, rows), names, strict=True))
            total = {"total_size": int(self.table.nbytes[rows].sum())}
            raw = msgspec.json.format(msgspec.json.encode({"metadata": total, "weight_map": shards}), indent=2)
            indexes[f"{place}{index_name(self._stem)}"] = raw
        return indexes

    def sync(self) -> None:
        """Write the files' bytes to the disk."""
        with self._typed():
            for fd in self._fds:
                os.fsync(fd)

    def read_back(self, small: Mapping[str, Content]) -> None:
        """Read the headers again by Penstock's own reader: only what can be read may take the place of another set.

        Args:
            small: the files that are published beside it; manifests and files of weights among them are read too.

        Raises:
            DestinationError: a file is not what was written.
        """
        rows: list[dict[str, Entry]] = [{} for _ in self.names]
        table = self.table
        for row, (file, at, nbytes) in enumerate(
            zip(table.file_index.tolist(), table.offset.tolist(), table.nbytes.tolist(), strict=True)
        ):
            name = self.name_of(row)
            rows[file][name] = name, table.dtypes[row], table.shapes[row], self.data_offset[file] + at, nbytes
        for name, nbytes, wanted in zip(self.names, self.file_nbytes, rows, strict=True):
            # The types of GGUF's tensors are not those of the table.
            require_readable(self.directory / name, nbytes, None if name == GGUF_FILE else wanted)
        for name, content in small.items():
            # The others are copies of a source's files, which have no weights and no manifest.
            if isinstance(content, bytes):
                require_readable_bytes(self.directory / name, content)

    def publish(self, into: Path, small: Mapping[str, Content], *, replace: bool = False) -> None:
        """Sync all, add small files (index, manifest, configuration) and let it all appear at once as `into`.

        Args:
            small: content by name; a name may have folders in it.
            replace: take the place of a weight set at `into`, which is removed afterwards.

        Raises:
            ConfigError: something else is at `into`. DiskFull, DestinationError: nothing appeared, nothing is removed.
        """
        # Bytes before names: after a crash no name may lead to a file without its content.
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
                # With O_TRUNC: an earlier try may have left a longer one.
                fd = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _OWN, 0o666)
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(fd)
            for folder in folders:
                # A file is durable only once the directory that names it is.
                _sync_directory(folder)
        self.read_back(small)
        with typed(into):
            # Checked again, and as late as possible. The lock keeps other writers of Penstock's out, and no others.
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
                # The rename too is durable only with the directory that it happened in.
                _sync_directory(place.path.parent)
            # After a replacement it is the old set; else there is nothing.
            self._remove_old(place.path)

    def _remove_old(self, into: Path) -> None:
        """Remove the weight set that was replaced. It is kept if somebody has put files there since it was checked."""
        if not self.directory.is_symlink() and self.directory.is_dir() and (others := foreign(self.directory)):
            kept = into.with_name(f"{short_name(into)}.replaced-{secrets.token_hex(4)}")
            os.rename(self.directory, kept)
            log.warning("the old files are kept in %s, because it has files of others: %s", kept, ", ".join(others))
        self.remove()

    def _take_place_of(self, into: Path) -> None:
        """Exchange the directory and what is at `into`: at every moment one of them is there."""
        try:
            exchange(self.directory, into)
            return
        except OSError as error:
            # File systems without it, as NFS; kernels before 3.15.
            if error.errno not in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
                raise
            why = error.strerror
        log.warning("%s is replaced in two steps, because its file system cannot exchange names: %s", into, why)
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
        # A link, where one was replaced: what it leads to stays.
        if self.directory.is_symlink():
            self.directory.unlink()
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

    # The base class' constructor is not called: it would encode a header, which memory has none of.
    def __init__(self, path: Path, table: TensorTable) -> None:
        self.directory = path
        self.table = table
        self.groups = ("",)
        self.names = [""]
        self.data_offset = [0]
        self._body_nbytes = [int(table.nbytes.sum())]
        self._headers = [b""]
        self.metadata = {"format": "pt"}
        self._fds = []
        self._write_bytes = _DISK_WRITE_BYTES

    def allocate(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Do nothing: the memory exists already."""


def publish_remote(
    out: OutputSet,
    uri: str,
    small: Mapping[str, Content],
    *,
    settings: Settings,
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Upload a set, the index and the manifest after everything else, and remove the local files.

    Args:
        out: the set; all its bytes are written.
        uri: the prefix.
        small: small files by their names (manifest, configuration); the manifest is required.
        settings: `retries`, `stall_s`, `ca_file`.
        storage_options: options of the store by obstore's names.

    Raises:
        ConfigError: a weight set is under the prefix already, or files of others.
        SourceUnavailable, PermissionDenied: of the store; what was uploaded has no manifest, and may be overwritten.
    """
    # Imported on first use: obstore takes 100 ms, which a conversion to local files need not pay.
    from penstock.storage.objects import remove_object, upload_file, write_small

    prefix = uri.rstrip("/")
    require_free_remote(prefix, settings=settings, storage_options=storage_options)

    out.read_back(small)
    # First: the next call may then overwrite what this one leaves if it is killed.
    write_small(f"{prefix}/{UPLOADING}", b"", settings=settings, storage_options=storage_options)

    def upload(name: str) -> None:
        path = out.directory / name
        upload_file(f"{prefix}/{name}", path, settings=settings, storage_options=storage_options)

    with Threads(_UPLOADS, thread_name_prefix="penstock-upload") as pool:
        for done in [pool.submit(upload, name) for name in out.names]:
            done.result()
    # Index and manifest last: a reader that finds them finds every file that they name.
    last: dict[str, Content] = {**out.index(), SIDECAR: small[SIDECAR]}
    for name, content in [*((n, d) for n, d in small.items() if n not in last), *last.items()]:
        data = content if isinstance(content, bytes) else content()
        write_small(f"{prefix}/{name}", data, settings=settings, storage_options=storage_options)
    try:
        remove_object(f"{prefix}/{UPLOADING}", settings=settings, storage_options=storage_options)
    except SourceError as error:
        # All is there. A user may have the right to write and not to remove.
        log.warning("%s/%s stays, because it cannot be removed: %s", prefix, UPLOADING, error.message)
    out.remove()


def _rank(name: str) -> int:
    """Return in which turn a file is moved into a directory that has to stay; see `fill`."""
    if name == SIDECAR or name.endswith(INDEX_SUFFIX):
        return 0
    # The stamp says that all is there.
    return 3 if name == STAMP else 2 if "." in name and not name.endswith((SUFFIX, GGUF_SUFFIX)) else 1


def require_free_remote(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None) -> None:
    """Raise ConfigError where a weight set is under the prefix already, whole or not uploaded by Penstock."""
    from penstock.storage.objects import list_objects

    prefix = uri.rstrip("/")
    try:
        listed = list_objects(f"{prefix}/", settings=settings, storage_options=storage_options)
    except NotFound:
        return
    there = {name.rpartition("/")[2] for name in listed}
    hint = "remove it, or write elsewhere"
    if SIDECAR in there:
        raise ConfigError("a weight set is there already", uri=prefix, hint=hint)
    # What an upload of Penstock's left that did not end may be overwritten, and no other weights or configuration.
    others = sorted(name for name in there if name.endswith((SUFFIX, GGUF_SUFFIX, ".json")))
    if others and UPLOADING not in there:
        message = f"files that Penstock did not write are there already: {', '.join(others[:5])}"
        raise ConfigError(message, uri=prefix, hint=hint)


def _sync_directory(path: Path) -> None:
    """Write a directory's entries to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def require_room(path: Path, needed: int) -> None:
    """Raise DiskFull where the file system of a path has less than these bytes free, and says so."""
    free = _free_bytes(path)
    if free is not None and needed > free:
        message = f"no room: {bytes_text(needed)} are needed, {bytes_text(free)} are free"
        raise DiskFull(message, uri=str(path), hint=MAKE_ROOM)
