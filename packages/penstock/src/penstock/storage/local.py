"""Local files: open them, detect changes, and call system calls that Python's `os` lacks.

On systems other than Linux the calls return "unknown".
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
from pathlib import Path
from typing import Any, Self

import msgspec

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

# Maximum number of buffers for readv(2) or writev(2). Source: UIO_MAXIOV, include/uapi/linux/uio.h.
MAX_BUFFERS = 1024

# The kernel's clock for file times. Source: clock_gettime(2).
_COARSE_CLOCK = getattr(time, "CLOCK_REALTIME_COARSE", 5)
# The kernel's step size for forced readahead. Source: mm/readahead.c.
_WILLNEED_BYTES = 2 * MIB
# Maximum seconds to wait for writes to finish.
_SETTLE_S = 1.0
# Pause between two checks of the clock, whose tick is 1 to 10 ms (CONFIG_HZ).
_TICK_S = 0.001
_HINT = "load it when no process writes to it; to replace a file, write a new file and rename it"


class FileState(msgspec.Struct, frozen=True):
    """The fields of fstat(2) that identify one version of a file's content."""

    dev: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int
    """Time that only the kernel sets. It reveals a write even if the modification time was restored (rsync, cp -p)."""
    access: tuple[int, int, int, int]
    """Mode, owner, group and links. Changing these also changes `ctime_ns`, but no bytes."""

    @property
    def identity(self) -> str:
        """`dev:inode:mtime_ns:size`, see `Source.identity`."""
        return f"{self.dev}:{self.inode}:{self.mtime_ns}:{self.nbytes}"

    def same_content(self, other: FileState) -> bool:
        """Return whether the file was not written to between the two states."""
        if self.identity != other.identity:
            return False
        # A chmod or a new hard link changes ctime but no bytes.
        return self.ctime_ns == other.ctime_ns or self.access != other.access


class LocalFile:
    """A regular file, open for reading. The methods detect changes since the file was opened.

    Attributes:
        uri, nbytes, identity: see `Source`. The identity is `dev:inode:mtime_ns:size`.
        state: the file's state when it was opened, with which the methods compare its later states.

    Raises:
        NotFound, PermissionDenied: there is no such file, or it may not be read.
        SourceUnavailable: the path is a directory, FIFO, socket or device, or cannot be opened.
        SourceChanged: the file was still being written to after `_SETTLE_S` seconds.
    """

    def __init__(self, path: str, fd: int, state: FileState) -> None:
        self._fd = fd
        self.state = state
        self.uri = path
        self._path = os.path.abspath(path)
        self.nbytes = self.state.nbytes
        self.identity = self.state.identity
        self._written = (self.nbytes, self.state.mtime_ns, self.state.ctime_ns)

    @classmethod
    def open(cls, path: str) -> Self:
        """Open a regular file. Raises the errors that `LocalFile` lists."""
        fd, state = _open_regular(path)
        return cls(path, fd, state)

    def require_unmodified(self) -> None:
        """Raise SourceChanged or SourceTruncated if the open file was modified, whatever the path names now."""
        # Every read calls this method, so compare all fields only if size, mtime or ctime differ.
        try:
            now = os.fstat(self._fd)
        except OSError as error:
            raise typed_error(error, self.uri, None) from error
        if (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != self._written:
            self._require_unchanged(None)

    def check_unchanged(self) -> None:
        """Raise SourceChanged or SourceTruncated unless the path still names the opened file, unmodified."""
        self._require_unchanged(self._path)

    def _require_unchanged(self, path: str | None) -> None:
        try:
            current = state_of(os.fstat(self._fd))
            now = current if path is None else state_of(os.stat(path))
        except FileNotFoundError as error:
            raise SourceChanged("the file was removed after it was opened", uri=self.uri) from error
        except OSError as error:
            raise typed_error(error, self.uri, None) from error
        before = self.state
        # Check for a truncation first, because its error names the missing bytes.
        if current.nbytes < before.nbytes:
            message = f"the file had {before.nbytes} bytes when it was opened, and now has {current.nbytes}"
            raise SourceTruncated(message, uri=self.uri, byte_range=(current.nbytes, before.nbytes))
        if not before.same_content(current):
            raise SourceChanged("the file was modified after it was opened", uri=self.uri, hint=_HINT)
        if now.identity != before.identity:
            raise SourceChanged("the file was replaced after it was opened", uri=self.uri)

    def read_ahead(self, offset: int, nbytes: int) -> None:
        """Start to read a range into the page cache."""
        # Page faults with MADV_HUGEPAGE would take a tenth of the CPU time, but in a virtual machine the host takes
        # three times as long as the disk to provide large free blocks. Source: benchmarks/results/cpu2_202611/files.md.
        for start in range(offset, offset + nbytes, _WILLNEED_BYTES):
            os.posix_fadvise(self._fd, start, min(_WILLNEED_BYTES, offset + nbytes - start), os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """See `Source.close`."""
        # Clear the attribute first, so that a second call cannot close a reused descriptor.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if self._fd >= 0:
            # Python ignores exceptions in a finalizer, so Ctrl-C would be lost.
            with interrupts.defer_in_finalizer():
                self.close()


def state_of(result: os.stat_result) -> FileState:
    """Return the file state in a stat result."""
    return FileState(
        dev=result.st_dev,
        inode=result.st_ino,
        nbytes=result.st_size,
        mtime_ns=result.st_mtime_ns,
        ctime_ns=result.st_ctime_ns,
        access=(result.st_mode, result.st_uid, result.st_gid, result.st_nlink),
    )


def _open_regular(path: str) -> tuple[int, FileState]:
    try:
        # Without O_NONBLOCK, opening a FIFO without a writer would hang.
        fd = descriptors.opened(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), path)
    except PenstockError:
        raise
    except OSError as error:
        raise typed_error(error, path, None) from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            kind = "directory" if stat.S_ISDIR(mode) else "pipe, socket or device"
            raise SourceUnavailable(f"this is a {kind}, not a regular file", uri=path, hint="pass the path of a file")
        return fd, _settled(fd, path)
    except BaseException:
        os.close(fd)
        raise


def _settled(fd: int, path: str) -> FileState:
    """Wait until any further write would change the file's state, and return the state."""
    deadline = time.monotonic() + _SETTLE_S
    before = state_of(os.fstat(fd))
    while True:
        # A write sets the times at its start, so a long write may never change them again. SEEK_DATA waits for the
        # inode's lock, which a write holds (ext4, btrfs, tmpfs; on XFS reads themselves wait). SEEK_DATA fails with
        # ENXIO for an empty file and with EINVAL if the file system does not support it.
        with contextlib.suppress(OSError):
            os.lseek(fd, 0, os.SEEK_DATA)
        state = state_of(os.fstat(fd))
        # A second write in the same tick of the kernel's clock would not change the times. A time far in the future
        # comes from the clock of a file server.
        ahead_ns = state.ctime_ns - time.clock_gettime_ns(_COARSE_CLOCK)
        if state == before and not 0 <= ahead_ns < 1_000_000_000:
            return state
        if time.monotonic() > deadline:
            raise SourceChanged("the file is being written to", uri=path, hint=_HINT)
        if state == before:
            time.sleep(_TICK_S)
        before = state


def read_bounded(path: str, max_bytes: int) -> bytes:
    """Return the content of a small regular file. Raises FormatError above `max_bytes`, or SourceError."""
    file = LocalFile.open(path)
    try:
        if file.nbytes > max_bytes:
            raise FormatError(f"the file has {file.nbytes} bytes, above the limit of {max_bytes}", uri=path)
        parts, left = [], file.nbytes
        # read(2) returns at most 2 GiB at once, and may return less on a network file system.
        while left and (part := os.read(file._fd, left)):
            parts.append(part)
            left -= len(part)
        file.require_unmodified()
    except PenstockError:
        # NotFound and PermissionDenied are OSErrors too.
        raise
    except OSError as error:
        raise typed_error(error, path, None) from error
    finally:
        file.close()
    return b"".join(parts)


READABLE = "give this user the right to read it, and to enter every directory above it"


def typed_error(error: OSError, uri: str, byte_range: tuple[int, int] | None) -> SourceError:
    """Map an OSError of a local file to a SourceError."""
    # Paths that cannot exist count as absent.
    if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}:
        return NotFound("there is no such file", uri=uri, byte_range=byte_range, hint="check the path")
    if error.errno in {errno.EACCES, errno.EPERM}:
        return PermissionDenied("the file mode forbids reading", uri=uri, byte_range=byte_range, hint=READABLE)
    return SourceUnavailable(f"{error.strerror or error}", uri=uri, byte_range=byte_range)


_LINUX = sys.platform == "linux"
# This call number is the same on every architecture except alpha. Source: include/uapi/asm-generic/unistd.h, Linux 6.5.
_SYS_CACHESTAT = 451
# STATX_DIOALIGN, and the offset of dio_mem_align and dio_offset_align. Source: include/uapi/linux/stat.h, Linux 6.1.
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIOALIGN_AT = 0x98
_AT_EMPTY_PATH = 0x1000
# Bytes reserved by one call, which takes 0.3 s in tmpfs because it allocates the pages.
_RESERVED_BYTES = GIB

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
if _LINUX:
    # Without argtypes, ctypes truncates offsets above 4 GiB.
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_TwoWords = ctypes.c_uint64 * 2
_FiveWords = ctypes.c_uint64 * 5
# struct statfs has 120 bytes on 64-bit systems and begins with the type of the file system.
_StatFs = ctypes.c_uint64 * 32
# TMPFS_MAGIC and RAMFS_MAGIC. Source: include/uapi/linux/magic.h.
_MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)


def resident_pages(fd: int, offset: int, nbytes: int) -> int | None:
    """Return the number of pages of a range that are in the page cache, without blocking or starting I/O.

    None before Linux 6.5, on hugetlbfs, or (since 6.15) for a file that the caller neither owns nor may write. One call
    takes about 3 us, plus 10 ns per cached folio.
    """
    if not _LINUX:
        return None
    # struct cachestat begins with the number of cached pages.
    answer = _FiveWords()
    byte_range = _TwoWords(offset, nbytes)
    if _libc.syscall(ctypes.c_long(_SYS_CACHESTAT), fd, ctypes.byref(byte_range), ctypes.byref(answer), 0):
        return None
    return int(answer[0])


def file_system_type(file: int | str) -> int:
    """Return the magic number of the file system of a descriptor or path, or 0 if unknown."""
    if not _LINUX:
        return 0
    result = _StatFs()
    failed = _libc.fstatfs(file, result) if isinstance(file, int) else _libc.statfs(os.fsencode(file), result)
    if failed:
        return 0
    # Some kernels declare the magic number as signed.
    return int(result[0]) & 0xFFFFFFFF


def is_in_memory(fd: int) -> bool:
    """Return whether a file is in a tmpfs or ramfs."""
    return file_system_type(fd) in _MEMORY_FILE_SYSTEMS


def num_pages(offset: int, nbytes: int) -> int:
    """Return the number of pages in `[offset, offset + nbytes)`."""
    return (offset + nbytes + PAGE_BYTES - 1) // PAGE_BYTES - offset // PAGE_BYTES


def direct_alignment(fd: int) -> tuple[int, int] | None:
    """Return the (address, offset) alignment for direct I/O. Return (0, 0) if unsupported, and None if unknown."""
    statx = getattr(_libc, "statx", None) if _LINUX else None
    if statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer):
        return None
    mask: int = struct.unpack_from("=I", answer, 0)[0]
    # Before Linux 6.1, statx does not return the alignment.
    if not mask & _STATX_DIOALIGN:
        return None
    address, offset = struct.unpack_from("=II", answer, _STATX_DIOALIGN_AT)
    return int(address), int(offset)


def address_of(buffer: memoryview) -> int:
    """Return the address of the first byte of a writable, non-empty buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def reserve(fd: int, nbytes: int, is_over: Callable[[], bool] = lambda: False) -> None:
    """Extend a file to at least `nbytes` and reserve space for all of it, until `is_over` returns True. Raises OSError.

    Only the length is set if the file system cannot reserve space (NFS before 4.2, ZFS, ramfs).
    """
    for at in range(0, nbytes, _RESERVED_BYTES):
        if is_over():
            return
        # `posix_fallocate` would write every page if the file system lacks fallocate.
        code = _fallocate(fd, at, min(_RESERVED_BYTES, nbytes - at))
        if code in {errno.EOPNOTSUPP, errno.ENOSYS}:
            os.ftruncate(fd, max(nbytes, os.fstat(fd).st_size))
            return
        if code:
            raise OSError(code, os.strerror(code))


# Source: include/uapi/linux/fcntl.h and fs.h.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(one: Path, other: Path) -> None:
    """Exchange two names atomically. Raises OSError (EINVAL) if the file system cannot do this."""
    if not _LINUX or not hasattr(_libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _fallocate(fd: int, offset: int, nbytes: int) -> int:
    if not _LINUX:
        return errno.ENOSYS
    while _libc.fallocate(fd, 0, offset, nbytes):
        # fallocate keeps the reserved part when a signal interrupts the call.
        if (code := ctypes.get_errno()) != errno.EINTR:
            return code
    return 0
