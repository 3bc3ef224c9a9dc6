"""Local files: opened as regular files only, told from changed ones, and the typed error for each refusal.

In: paths and descriptors. Out: open descriptors, `FileState`s, errors.
Not here: reading (`files`), mapping (`mapped`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from dataclasses import dataclass

from penstock.errors import (
    FormatError,
    NotFound,
    PenstockError,
    PermissionDenied,
    SourceChanged,
    SourceError,
    SourceTruncated,
    SourceUnavailable,
)

_COARSE_CLOCK = getattr(time, "CLOCK_REALTIME_COARSE", 5)
"""The clock that the kernel stamps files with. Source: clock_gettime(2); Python has no name for it."""

_SETTLE_S = 1.0
"""How long an open waits for a file that is written to again and again. Reason: that is no finished checkpoint."""

_TICK_S = 0.001
"""Pause between looks at the clock, whose tick is 1 to 10 ms (CONFIG_HZ)."""

_HINT = "load it when nobody writes to it; to replace a file, write a new one and rename it"


@dataclass(frozen=True, slots=True)
class FileState:
    """The parts of fstat(2) that tell one content of a file from another."""

    dev: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int
    """Set by the kernel alone: it shows a write after which the modification time was put back (rsync, cp -p)."""
    access: tuple[int, int, int, int]
    """Mode, owner, group, links: a change of these sets `ctime_ns` too and changes no byte."""

    @property
    def identity(self) -> str:
        """`dev:inode:mtime_ns:size`, see `Source.identity`."""
        return f"{self.dev}:{self.inode}:{self.mtime_ns}:{self.nbytes}"

    def same_content(self, other: FileState) -> bool:
        """Return whether nothing was written to the file between the two."""
        if self.identity != other.identity:
            return False
        return self.ctime_ns == other.ctime_ns or self.access != other.access


def state_of(result: os.stat_result) -> FileState:
    """Return the parts of a stat result that matter here."""
    return FileState(
        dev=result.st_dev,
        inode=result.st_ino,
        nbytes=result.st_size,
        mtime_ns=result.st_mtime_ns,
        ctime_ns=result.st_ctime_ns,
        access=(result.st_mode, result.st_uid, result.st_gid, result.st_nlink),
    )


def open_regular(path: str) -> tuple[int, FileState]:
    """Open a regular file for reading, once no write to it is under way.

    O_NONBLOCK so that a pipe without a writer does not hang.

    Raises:
        NotFound, PermissionDenied: as their names say.
        SourceUnavailable: a directory, pipe, socket or device, or opening failed.
        SourceChanged: it is being written to, for `_SETTLE_S` now.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise typed_error(error, path, None) from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            kind = "directory" if stat.S_ISDIR(mode) else "pipe, socket or device"
            raise SourceUnavailable(f"not a regular file but a {kind}", uri=path)
        return fd, _settled(fd, path)
    except BaseException:
        os.close(fd)
        raise


def _settled(fd: int, path: str) -> FileState:
    """Return the file's state at a moment when every write that comes later will change it.

    A write sets the times when it begins, and then copies for as long as it takes: one of gigabytes may be under way
    with times that will not change again. SEEK_DATA waits for the inode's lock, which a write holds (ext4, btrfs,
    tmpfs; on XFS reads themselves wait). A second write in the same tick of the kernel's clock would leave the times
    as they are, so wait for the tick to pass.
    """
    deadline = time.monotonic() + _SETTLE_S
    before = state_of(os.fstat(fd))
    while True:
        with contextlib.suppress(OSError):  # ENXIO: an empty file; EINVAL: this file system has no SEEK_DATA
            os.lseek(fd, 0, os.SEEK_DATA)
        state = state_of(os.fstat(fd))
        # A time far ahead is another clock's (a file server's): its tick cannot be waited for.
        ahead_ns = state.ctime_ns - time.clock_gettime_ns(_COARSE_CLOCK)
        if state == before and not 0 <= ahead_ns < 1_000_000_000:
            return state
        if time.monotonic() > deadline:
            raise SourceChanged("file is being written to", uri=path, hint=_HINT)
        if state == before:
            time.sleep(_TICK_S)
        before = state


def require_unchanged(fd: int, path: str | None, uri: str, state: FileState) -> None:
    """Raise if the open file, or the file now at `path` if one is given, is not the one of `state`."""
    try:
        current = state_of(os.fstat(fd))
        now = current if path is None else state_of(os.stat(path))
    except FileNotFoundError as error:
        raise SourceChanged("file was removed since it was opened", uri=uri) from error
    except OSError as error:
        raise typed_error(error, uri, None) from error
    # Before the test for a change, which a truncation is too: this error names the bytes that are gone.
    if current.nbytes < state.nbytes:
        message = f"file had {state.nbytes} bytes when it was opened and has {current.nbytes} now"
        raise SourceTruncated(message, uri=uri, byte_range=(current.nbytes, state.nbytes))
    if not state.same_content(current):
        raise SourceChanged("file was modified since it was opened", uri=uri, hint=_HINT)
    if now.identity != state.identity:
        raise SourceChanged("file was replaced since it was opened", uri=uri)


def read_bounded(path: str, max_bytes: int) -> bytes:
    """Return all of a small regular file (an index, a manifest, a key).

    Raises:
        FormatError: it has more than `max_bytes`. SourceChanged: it was written to meanwhile. Others: `open_regular`.
    """
    fd, state = open_regular(path)
    try:
        if state.nbytes > max_bytes:
            raise FormatError(f"{state.nbytes} bytes are too many; at most {max_bytes} are read", uri=path)
        parts, left = [], state.nbytes
        # read(2) gives at most 2 GiB at once, and may give less on a network file system.
        while left and (part := os.read(fd, left)):
            parts.append(part)
            left -= len(part)
        require_unchanged(fd, None, path, state)
    except PenstockError:
        raise
    except OSError as error:
        raise typed_error(error, path, None) from error
    finally:
        os.close(fd)
    return b"".join(parts)


def typed_error(error: OSError, uri: str, byte_range: tuple[int, int] | None) -> SourceError:
    """Map an OSError of a local file to a SourceError."""
    if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}:
        return NotFound("no such file", uri=uri, byte_range=byte_range)
    if error.errno in {errno.EACCES, errno.EPERM}:
        return PermissionDenied("the file mode forbids reading", uri=uri, byte_range=byte_range)
    return SourceUnavailable(f"{error.strerror or error}", uri=uri, byte_range=byte_range)
