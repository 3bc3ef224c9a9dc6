"""Tier on a local disk: an unnamed file per block, whose bytes are digested when written and verified when read."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Self

import numpy as np

from penstock.digest.leaf import LEAF_BYTES, leaf_digests
from penstock.errors import ConfigError, DestinationError, IntegrityError
from penstock.memory.tier import UncachedTier
from penstock.storage import text_of
from penstock.storage.files import FileSource
from penstock.storage.local import address_of, reserve
from penstock.storage.write import typed
from penstock.types import U64

_PAGE_BYTES = 4096
"""Alignment of addresses, offsets and lengths for direct I/O, see `storage.files`."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class SpillRoom:
    """A room in an unnamed file. `why` says why bytes went through the page cache, or is empty for direct I/O."""

    def __init__(self, directory: Path, nbytes: int, fd: int) -> None:
        self.nbytes = nbytes
        self._directory = directory
        self._leaves: U64 = np.zeros(-(-nbytes // LEAF_BYTES), np.uint64)
        self._lock = threading.Lock()
        self._source: FileSource | None = None
        self._fd = fd
        self._direct_fd = -1
        self.why = ""

    @classmethod
    def open(cls, directory: Path, nbytes: int) -> SpillRoom:
        """Make an unnamed file of this size. Raise DestinationError if the disk is full or not writable."""
        with typed(directory):
            room = cls(directory, nbytes, os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
        try:
            # Reserve the space now, so that a full disk is detected before the block leaves its old tier.
            with typed(directory):
                reserve(room._fd, nbytes)
            room._open_direct()
        except DestinationError:
            room.close()
            raise
        return room

    def _open_direct(self) -> None:
        try:
            self._direct_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_CLOEXEC | _DIRECT)
        except OSError as error:
            self.why = f"direct I/O refused at open ({error.strerror})"

    def write(self, offset: int, data: memoryview) -> None:
        """See `Room.write`. On return, only bytes in the page cache may still be missing on disk."""
        first = offset // LEAF_BYTES
        leaf_digests(data, LEAF_BYTES, self._leaves[first : first + -(-len(data) // LEAF_BYTES)])
        with typed(self._directory):
            done = self._write_direct(offset, data)
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)

    def _write_direct(self, offset: int, data: memoryview) -> int:
        aligned_bytes = len(data) // _PAGE_BYTES * _PAGE_BYTES
        if self.why or not aligned_bytes or data.readonly or address_of(data) % _PAGE_BYTES or offset % _PAGE_BYTES:
            return 0
        try:
            # Round a short write down to whole pages, because the remaining bytes must start at a page boundary.
            return os.pwrite(self._direct_fd, data[:aligned_bytes], offset) // _PAGE_BYTES * _PAGE_BYTES
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.why = "direct I/O refused at the first write (EINVAL)"
            return 0

    def read(self, offset: int, into: memoryview) -> None:
        """See `Room.read`. The copy is complete on return."""
        with self._lock:
            if self._source is None:
                self._source = FileSource.open(f"/proc/self/fd/{self._fd}")
        self._source.readv(offset, [into])
        first = offset // LEAF_BYTES
        leaves: U64 = np.empty(-(-len(into) // LEAF_BYTES), np.uint64)
        leaf_digests(into, LEAF_BYTES, leaves)
        if not np.array_equal(leaves, self._leaves[first : first + len(leaves)]):
            message = "spilled bytes are damaged: their digest differs from the digest at the time of writing"
            raise IntegrityError(message, uri=str(self._directory), byte_range=(offset, offset + len(into)))

    def settle(self) -> None:
        """See `Room.settle`. Bytes that went through the page cache are dropped from the cache."""
        with typed(self._directory):
            # Write dirty pages back before dropping them, because the kernel drops only clean pages.
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """See `Room.close`."""
        if self._source is not None:
            self._source.close()
        fds = {self._fd, self._direct_fd} - {-1}
        # Forget the descriptors before closing them, so that a second call does not close reused numbers.
        self._fd = -1
        self._direct_fd = -1
        for fd in fds:
            os.close(fd)


class SpillTier(UncachedTier):
    """Tier in one directory on a local disk, with an unnamed file for each block."""

    name, unit_bytes, num_threads = "disk", _PAGE_BYTES, 8

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Self:
        """Create the directory. Raise ConfigError if the directory is not writable or lacks O_TMPFILE."""
        path = Path(text_of(directory))
        try:
            path.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except OSError as error:
            message = f"cannot write spilled bytes: {error.strerror}"
            raise ConfigError(message, uri=str(directory), hint="use a directory on a local disk") from error
        return cls(path)

    def open_room(self, nbytes: int) -> SpillRoom:
        """See `Tier.open_room`."""
        return SpillRoom.open(self.directory, nbytes)
