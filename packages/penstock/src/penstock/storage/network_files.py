"""Files on network file systems (NFS, SMB, FUSE and others): which files those are, and reading them by large reads.

In: a path. Out: the name of its network file system; a `NetworkFile`, which is a `Source`.
Not here: what is read when (`loader.read_ahead`), files of local disks (`files`).

A mapped file is read by page faults, which the kernel turns into requests of 4 to 128 KiB, one after the other: each
costs a round trip to the server. A `NetworkFile` asks the kernel for a whole read before it waits for any of it.
Reads go through the page cache, never by direct I/O: the next program that opens the file finds it in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Any

from penstock.errors import SourceTruncated
from penstock.storage.local import MAX_BUFFERS, LocalFile, num_pages, resident_pages, typed_error
from penstock.storage.source import span

# Source: include/uapi/linux/magic.h and each file system's own header (statfs(2) lists most of them).
_MAGIC = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
    0x65735546: "FUSE",
    0x01021997: "9p",
    0x0BD00BD0: "Lustre",
    0x00C36400: "Ceph",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0xAAD7AAEA: "PanFS",
    0x786F4256: "VirtualBox shared folder",
    0xBACBACBC: "VMware shared folder",
}

# 128 KiB: the least that one posix_fadvise(WILLNEED) starts to read (read_ahead_kb of NFS and FUSE mounts by default);
# of a longer range the kernel takes only the beginning. Source: force_page_cache_ra, mm/readahead.c.
_WILLNEED_BYTES = 128 << 10

_LINUX = sys.platform == "linux"
# Without errno: only success counts, and ctypes would exchange it before and after each call.
_libc: Any = ctypes.CDLL(None)
# 15 words: struct statfs has 120 bytes where a long has 64 bits. Source: statfs(2).
_Statfs = ctypes.c_ulong * 15
_HAS_STATFS = _LINUX and ctypes.sizeof(ctypes.c_ulong) == 8


def network_file_system(path: str) -> str:
    """Return the name of the network file system that holds `path`; "" for a local one, or where that is unknown.

    FUSE counts as one: a page fault there is at least a round trip to another process.

    Cost: one system call, 3 us. It waits as long as any call on a mount whose server does not answer.
    """
    if not _HAS_STATFS:
        return ""
    result = _Statfs()
    if _libc.statfs(os.fsencode(path), result) != 0:
        return ""
    # The magic number is a signed word in some kernels' headers: only its low 32 bits count.
    return _MAGIC.get(result[0] & 0xFFFFFFFF, "")


class NetworkFile(LocalFile):
    """A file on a network file system as a `Source`; opened by the constructor.

    Attributes:
        received_bytes: see `Counting`.

    Raises:
        NotFound, PermissionDenied, SourceUnavailable, SourceChanged: as `LocalFile`.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.received_bytes = 0

    def is_cached(self) -> bool:
        """Return whether the whole file is in the page cache; False where that is unknown."""
        return not self.nbytes or resident_pages(self._fd, 0, self.nbytes) == num_pages(0, self.nbytes)

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`. Path: `network-file`.

        Order: as `Source.readv`. A read that hangs in the kernel (a dead server) cannot be interrupted.
        """
        stop, left = span(self, offset, buffers)
        start = offset
        try:
            self._ask_for(start, stop - start)
            while left:
                nbytes = os.preadv(self._fd, left[:MAX_BUFFERS], start)
                if not nbytes:
                    raise SourceTruncated("file ended early", uri=self.uri, byte_range=(start, stop))
                self.received_bytes += nbytes
                start += nbytes
                while nbytes:
                    part = min(nbytes, left[0].nbytes)
                    left[0] = left[0][part:]
                    nbytes -= part
                    if not left[0].nbytes:
                        del left[0]
        except OSError as error:
            if isinstance(error, SourceTruncated):
                raise
            raise typed_error(error, self.uri, (offset, stop)) from error
        self.require_unmodified()
        return "network-file"

    def _ask_for(self, offset: int, nbytes: int) -> None:
        """Start to read all of a range into the page cache; a range of one step is left to the read itself."""
        # A file system may refuse advice; the read that follows brings the bytes all the same.
        with contextlib.suppress(OSError):
            for start in range(offset, offset + nbytes if nbytes > _WILLNEED_BYTES else offset, _WILLNEED_BYTES):
                os.posix_fadvise(self._fd, start, _WILLNEED_BYTES, os.POSIX_FADV_WILLNEED)
