"""Files of this host: opened as regular files only, held to the state they had, and asked about by system call.

In: paths and descriptors. Out: open descriptors, `FileState`s, typed errors, and what the kernel says of a file: which
of its pages are cached, how direct I/O must be aligned, whether there is room for it.
Not here: reading into buffers (`files`), mapping into memory (`mapped`).

The system calls are those that Python's `os` does not have. Elsewhere than Linux each question answers "unknown".
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import descriptors, interrupts
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
from penstock.types import GIB, MIB

PAGE_BYTES = mmap.PAGESIZE

# 1024: buffers of one readv(2) or writev(2). Source: UIO_MAXIOV, include/uapi/linux/uio.h.
MAX_BUFFERS = 1024

# The clock that the kernel stamps files with. Source: clock_gettime(2); Python has no name for it.
_COARSE_CLOCK = getattr(time, "CLOCK_REALTIME_COARSE", 5)
# 2 MiB: the kernel's own step of forced readahead, which also bounds one call by read_ahead_kb. Source: mm/readahead.c.
_WILLNEED_BYTES = 2 * MIB
# How long an open waits for a file that is written to again and again: that is no finished checkpoint.
_SETTLE_S = 1.0
# Pause between looks at the clock, whose tick is 1 to 10 ms (CONFIG_HZ).
_TICK_S = 0.001
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
        # A chmod or a new hard link sets ctime and leaves the bytes alone, so a new ctime counts only without one.
        return self.ctime_ns == other.ctime_ns or self.access != other.access


class LocalFile:
    """A regular file, open for reading and held to the state that it was opened in.

    Attributes:
        uri, nbytes, identity: see `Source`. The identity is `dev:inode:mtime_ns:size`.
        state: what later looks at the file are compared with.

    Raises:
        NotFound, PermissionDenied: as their names say.
        SourceUnavailable: a directory, pipe, socket or device, or opening failed.
        SourceChanged: it is being written to, for `_SETTLE_S` now.
    """

    def __init__(self, path: str) -> None:
        self.uri = path
        # The process may change its directory before the path is looked at again.
        self._path = os.path.abspath(path)
        self._fd, self.state = _open_regular(path)
        self.nbytes = self.state.nbytes
        self.identity = self.state.identity
        self._written = (self.nbytes, self.state.mtime_ns, self.state.ctime_ns)

    def require_unmodified(self) -> None:
        """Raise unless the open file is as it was when it was opened, whatever its path names now. One system call.

        Raises:
            SourceChanged: it was written to. SourceTruncated: it is shorter now.
        """
        # Called after every read. What differs in these three is looked at closely; the rest is of the same open file.
        try:
            now = os.fstat(self._fd)
        except OSError as error:
            raise typed_error(error, self.uri, None) from error
        if (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != self._written:
            self._require_unchanged(None)

    def check_unchanged(self) -> None:
        """Raise unless the path still names the file that was opened, unmodified. Two system calls.

        Raises:
            SourceChanged: modified, replaced or removed since it was opened. SourceTruncated: now shorter.
        """
        self._require_unchanged(self._path)

    def _require_unchanged(self, path: str | None) -> None:
        """Raise if the open file, or the file now at `path` if one is given, is not the one that was opened."""
        try:
            current = state_of(os.fstat(self._fd))
            now = current if path is None else state_of(os.stat(path))
        except FileNotFoundError as error:
            raise SourceChanged("file was removed since it was opened", uri=self.uri) from error
        except OSError as error:
            raise typed_error(error, self.uri, None) from error
        before = self.state
        # Ahead of the test for a change, which a truncation is too: this error names the bytes that are gone.
        if current.nbytes < before.nbytes:
            message = f"file had {before.nbytes} bytes when it was opened and has {current.nbytes} now"
            raise SourceTruncated(message, uri=self.uri, byte_range=(current.nbytes, before.nbytes))
        if not before.same_content(current):
            raise SourceChanged("file was modified since it was opened", uri=self.uri, hint=_HINT)
        if now.identity != before.identity:
            raise SourceChanged("file was replaced since it was opened", uri=self.uri)

    def read_ahead(self, offset: int, nbytes: int) -> None:
        """Ask the kernel to bring a range into the page cache, in single pages, without waiting for it."""
        # Not by faults that read 2 MiB folios (MADV_HUGEPAGE), though they take a tenth of the CPU: those folios come
        # out of large free blocks, which a virtual machine has given back to its host, and getting them again takes
        # three times as long as the disk. Source: benchmarks/results/cpu2_202611/files.md.
        for start in range(offset, offset + nbytes, _WILLNEED_BYTES):
            os.posix_fadvise(self._fd, start, min(_WILLNEED_BYTES, offset + nbytes - start), os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """See `Source.close`."""
        # Forgotten before it is closed: a second close must never hit a descriptor that was given out again.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # By getattr: where opening failed, there is no descriptor.
        if getattr(self, "_fd", -1) >= 0:
            # A finalizer runs between any two instructions, and Python drops what it raises: Ctrl-C would be lost here.
            with interrupts.defer_in_finalizer():
                self.close()


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


def _open_regular(path: str) -> tuple[int, FileState]:
    """Open a regular file for reading, once no write to it is under way."""
    try:
        # O_NONBLOCK: opening a pipe that has no writer would hang. It means nothing for a regular file.
        fd = descriptors.opened(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), path)
    except PenstockError:
        raise
    except OSError as error:
        raise typed_error(error, path, None) from error
    try:
        # Of the descriptor, not of the path: the path may name another file by the time it is looked at.
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            kind = "directory" if stat.S_ISDIR(mode) else "pipe, socket or device"
            raise SourceUnavailable(f"not a regular file but a {kind}", uri=path)
        return fd, _settled(fd, path)
    except BaseException:
        os.close(fd)
        raise


def _settled(fd: int, path: str) -> FileState:
    """Return the file's state at a moment when every write that comes later will change it."""
    deadline = time.monotonic() + _SETTLE_S
    before = state_of(os.fstat(fd))
    while True:
        # A write sets the times when it begins, and then copies for as long as it takes: one of gigabytes may be under
        # way with times that will not change again. SEEK_DATA waits for the inode's lock, which a write holds (ext4,
        # btrfs, tmpfs; on XFS reads themselves wait). ENXIO: an empty file; EINVAL: this file system has no SEEK_DATA.
        with contextlib.suppress(OSError):
            os.lseek(fd, 0, os.SEEK_DATA)
        state = state_of(os.fstat(fd))
        # A second write in the same tick of the kernel's clock would leave the times as they are, so the tick must
        # pass. A time far ahead is another clock's (a file server's): its tick cannot be waited for.
        ahead_ns = state.ctime_ns - time.clock_gettime_ns(_COARSE_CLOCK)
        if state == before and not 0 <= ahead_ns < 1_000_000_000:
            return state
        if time.monotonic() > deadline:
            raise SourceChanged("file is being written to", uri=path, hint=_HINT)
        if state == before:
            time.sleep(_TICK_S)
        before = state


def read_bounded(path: str, max_bytes: int) -> bytes:
    """Return all of a small regular file (an index, a manifest, a key).

    Raises:
        FormatError: it has more than `max_bytes`. SourceChanged: it was written to meanwhile. Others: `LocalFile`.
    """
    file = LocalFile(path)
    try:
        if file.nbytes > max_bytes:
            raise FormatError(f"{file.nbytes} bytes are too many; at most {max_bytes} are read", uri=path)
        parts, left = [], file.nbytes
        # read(2) gives at most 2 GiB at once, and may give less on a network file system.
        while left and (part := os.read(file._fd, left)):
            parts.append(part)
            left -= len(part)
        file.require_unmodified()
    except PenstockError:
        # NotFound and PermissionDenied are OSErrors too, and are typed already.
        raise
    except OSError as error:
        raise typed_error(error, path, None) from error
    finally:
        file.close()
    return b"".join(parts)


def typed_error(error: OSError, uri: str, byte_range: tuple[int, int] | None) -> SourceError:
    """Map an OSError of a local file to a SourceError."""
    # A path that cannot exist is as absent as one that does not: a link in a circle, a name too long, a file as parent.
    if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}:
        return NotFound("no such file", uri=uri, byte_range=byte_range)
    if error.errno in {errno.EACCES, errno.EPERM}:
        return PermissionDenied("the file mode forbids reading", uri=uri, byte_range=byte_range)
    return SourceUnavailable(f"{error.strerror or error}", uri=uri, byte_range=byte_range)


_LINUX = sys.platform == "linux"
# One number on every architecture but alpha. Source: include/uapi/asm-generic/unistd.h, Linux 6.5.
_SYS_CACHESTAT = 451
# Source: include/uapi/linux/stat.h, Linux 6.1: the mask, and where dio_mem_align and dio_offset_align stand.
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIOALIGN_AT = 0x98
_AT_EMPTY_PATH = 0x1000
# Of a file at once: 0.3 s in tmpfs, whose pages are made then.
_RESERVED_BYTES = GIB

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
if _LINUX:
    # ctypes takes an int for 32 bits, and cuts an offset above 4 GiB without a word.
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_TwoWords = ctypes.c_uint64 * 2
_FiveWords = ctypes.c_uint64 * 5
# struct statfs has 120 bytes on 64-bit systems, and the type of the file system first.
_StatFs = ctypes.c_uint64 * 32
# TMPFS_MAGIC and RAMFS_MAGIC. Source: include/uapi/linux/magic.h.
_MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)


def resident_pages(fd: int, offset: int, nbytes: int) -> int | None:
    """Return the pages of a range that are in the page cache, without blocking and without starting I/O.

    None where the kernel will not say: before Linux 6.5, on hugetlbfs, or (since 6.15) on a file that the caller
    neither owns nor may write.

    Cost: one system call, about 3 us, plus 10 ns a cached folio.
    """
    if not _LINUX:
        return None
    # struct cachestat: cached, dirty, under writeback, evicted, evicted recently. Only the first is of use here.
    answer = _FiveWords()
    byte_range = _TwoWords(offset, nbytes)
    if _libc.syscall(ctypes.c_long(_SYS_CACHESTAT), fd, ctypes.byref(byte_range), ctypes.byref(answer), 0):
        return None
    return int(answer[0])


def is_in_memory(fd: int) -> bool:
    """Return whether a file has no other place than memory: it is of a tmpfs or ramfs."""
    if not _LINUX:
        return False
    answer = _StatFs()
    return not _libc.fstatfs(fd, answer) and answer[0] in _MEMORY_FILE_SYSTEMS


def num_pages(offset: int, nbytes: int) -> int:
    """Return the number of pages that `[offset, offset + nbytes)` touches."""
    return (offset + nbytes + PAGE_BYTES - 1) // PAGE_BYTES - offset // PAGE_BYTES


def direct_alignment(fd: int) -> tuple[int, int] | None:
    """Return the (address, offset) alignment that direct I/O on this file needs; (0, 0): it has none; None: unknown."""
    statx = getattr(_libc, "statx", None) if _LINUX else None
    if statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer):
        return None
    mask: int = struct.unpack_from("=I", answer, 0)[0]
    # A kernel may have statx without this field; the mask says which fields it filled.
    if not mask & _STATX_DIOALIGN:
        return None
    address, offset = struct.unpack_from("=II", answer, _STATX_DIOALIGN_AT)
    return int(address), int(offset)


def address_of(buffer: memoryview) -> int:
    """Return the address of the first byte of a writable buffer of at least one byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def reserve(fd: int, nbytes: int, is_over: Callable[[], bool] = lambda: False) -> None:
    """Make a file `nbytes` long at least, with room for all of it, unless `is_over` says to stop.

    A file system that promises no room (NFS before 4.2, ZFS, ramfs) gives it the length alone.

    Raises:
        OSError: there is no room; the file may have some of it.
    """
    for at in range(0, nbytes, _RESERVED_BYTES):
        # Looked at for every GiB: one call for the whole file would take seconds in tmpfs.
        if is_over():
            return
        # Not the C library's `posix_fallocate`: where the file system has no fallocate, that writes to every page.
        code = _fallocate(fd, at, min(_RESERVED_BYTES, nbytes - at))
        if code in {errno.EOPNOTSUPP, errno.ENOSYS}:
            os.ftruncate(fd, max(nbytes, os.fstat(fd).st_size))
            return
        if code:
            raise OSError(code, os.strerror(code))


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
"""Source of both: Linux, include/uapi/linux/fcntl.h and fs.h; rename(2)."""


def exchange(one: Path, other: Path) -> None:
    """Exchange two names of one file system, atomically. OSError: EINVAL where the file system cannot do that."""
    if not _LINUX or not hasattr(_libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _fallocate(fd: int, offset: int, nbytes: int) -> int:
    """Call fallocate(2); return 0 or an errno."""
    if not _LINUX:
        return errno.ENOSYS
    while _libc.fallocate(fd, 0, offset, nbytes):
        # A signal ends a long fallocate; what it reserved stays, and the next call goes on.
        if (code := ctypes.get_errno()) != errno.EINTR:
            return code
    return 0
