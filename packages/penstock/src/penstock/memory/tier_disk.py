"""The tier of a local disk: a nameless file a block, its bytes digested on the way out and compared on the way back.

In: a directory. Out: rooms that leave nothing behind, however the process ends.
Not here: which blocks lie there (`tiers`); the cache of remote objects, which outlives a process
(`storage.cache`).
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np

from penstock.digest.leaf import LEAF_BYTES, leaf_digests
from penstock.errors import ConfigError, DestinationError, IntegrityError
from penstock.storage import text_of
from penstock.storage.files import FileSource
from penstock.storage.local import address_of, reserve
from penstock.storage.write import typed
from penstock.types import U64

_PAGE_BYTES = 4096
"""Alignment that direct I/O needs of addresses, offsets and lengths; see `storage.files`."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class SpillRoom:
    """A room in one file without a name.

    Attributes:
        why: the reason why bytes went through the page cache; empty while those of whole pages did not.
    """

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self._directory = directory
        self._leaves: U64 = np.zeros(-(-nbytes // LEAF_BYTES), np.uint64)
        self._lock = threading.Lock()
        self._source: FileSource | None = None
        with typed(directory):
            self._fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._direct_fd = -1
        self.why = ""
        try:
            # Now: a full disk should be found before the block leaves its old tier, not while it is written.
            with typed(directory):
                reserve(self._fd, nbytes)
            self._open_direct()
        except DestinationError:
            self.close()
            raise

    def _open_direct(self) -> None:
        try:
            # By /proc: the file has no name to open it by a second time.
            self._direct_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_CLOEXEC | _DIRECT)
        except OSError as error:
            self.why = f"direct I/O refused at open ({error.strerror})"

    def write(self, offset: int, data: memoryview) -> None:
        """See `Room.write`. Done on return, except for pages that the system has not written out yet."""
        first = offset // LEAF_BYTES
        leaf_digests(data, LEAF_BYTES, self._leaves[first : first + -(-len(data) // LEAF_BYTES)])
        with typed(self._directory):
            done = self._write_direct(offset, data)
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)

    def _write_direct(self, offset: int, data: memoryview) -> int:
        """Write the whole pages past the page cache; return the bytes written."""
        whole = len(data) // _PAGE_BYTES * _PAGE_BYTES
        if self.why or not whole or data.readonly or address_of(data) % _PAGE_BYTES or offset % _PAGE_BYTES:
            return 0
        try:
            # Rounded down: after a short write the rest begins at a page again, or goes through the page cache.
            return os.pwrite(self._direct_fd, data[:whole], offset) // _PAGE_BYTES * _PAGE_BYTES
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.why = "direct I/O refused at the first write (EINVAL)"
            return 0

    def read(self, offset: int, into: memoryview) -> None:
        """See `Room.read`. Done on return."""
        with self._lock:
            if self._source is None:
                self._source = FileSource(f"/proc/self/fd/{self._fd}")
        self._source.readv(offset, [into])
        first = offset // LEAF_BYTES
        leaves: U64 = np.empty(-(-len(into) // LEAF_BYTES), np.uint64)
        leaf_digests(into, LEAF_BYTES, leaves)
        # Most file systems have no checksums of data, and a model with damaged weights still answers.
        if not np.array_equal(leaves, self._leaves[first : first + len(leaves)]):
            message = "cannot use spilled bytes: their digest differs from the one at the time of writing"
            raise IntegrityError(message, uri=str(self._directory), byte_range=(offset, offset + len(into)))

    def settle(self) -> None:
        """See `Room.settle`. Bytes that went through the page cache do not stay there."""
        with typed(self._directory):
            # Before the advice, since the kernel drops only pages that are written out.
            os.fdatasync(self._fd)
            # The block was moved here to free memory: its copy in the page cache would keep it taken.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """See `Room.close`."""
        if self._source is not None:
            self._source.close()
        fds = {self._fd, self._direct_fd} - {-1}
        # Before they are closed: a second call must not close numbers that other files have by then.
        self._fd = -1
        self._direct_fd = -1
        for fd in fds:
            os.close(fd)


class SpillTier:
    """The tier of one directory of a local disk: a file without a name for each block.

    Args:
        directory: made if it is not there.

    Raises:
        ConfigError: the file system has no files without names (O_TMPFILE), or the directory cannot be written to.
    """

    name, unit_bytes, num_threads = "disk", _PAGE_BYTES, 8

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(text_of(directory))
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except OSError as error:
            message = f"cannot write spilled bytes: {error.strerror}"
            raise ConfigError(message, uri=str(directory), hint="name a directory of a local disk") from error

    def open_room(self, nbytes: int) -> SpillRoom:
        """See `Tier.open_room`."""
        return SpillRoom(self.directory, nbytes)

    def trim(self) -> None:
        """See `Tier.trim`."""

    def close(self) -> None:
        """See `Tier.close`."""
