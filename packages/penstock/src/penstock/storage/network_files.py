"""Files on network file systems (NFS, SMB, FUSE), read in large requests.

Page faults of a mapped file become requests of 4 to 128 KiB, each with a round trip to the server. A `NetworkFile` asks
the kernel to start a whole read before it waits for the first bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from penstock.errors import SourceTruncated
from penstock.storage.local import MAX_BUFFERS, LocalFile, file_system_type, num_pages, resident_pages, typed_error
from penstock.storage.source import span, take

# Source: include/uapi/linux/magic.h and statfs(2).
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

# Default read_ahead_kb of NFS and FUSE mounts. One posix_fadvise(WILLNEED) reads at most this many bytes. Source:
# force_page_cache_ra, mm/readahead.c.
_WILLNEED_BYTES = 128 << 10


def network_file_system(path: str) -> str:
    """Return the name of the network file system that holds `path`, or "" if it is local or unknown.

    FUSE counts as a network file system, because a page fault costs a round trip to another process. The call blocks if
    the mount's server does not respond.
    """
    return _MAGIC.get(file_system_type(path), "")


class NetworkFile(LocalFile):
    """A file on a network file system as a `Source`. Raises the same errors as `LocalFile`."""

    received_bytes = 0

    def is_cached(self) -> bool:
        """Return whether the whole file is in the page cache, or False if unknown."""
        return not self.nbytes or resident_pages(self._fd, 0, self.nbytes) == num_pages(0, self.nbytes)

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`. The path is `network-file`. A read that hangs in the kernel cannot be interrupted."""
        stop, left = span(self, offset, buffers)
        start = offset
        try:
            if stop - start > _WILLNEED_BYTES:
                # A file system may reject the advice, but the read still works.
                with contextlib.suppress(OSError):
                    for at in range(start, stop, _WILLNEED_BYTES):
                        os.posix_fadvise(self._fd, at, _WILLNEED_BYTES, os.POSIX_FADV_WILLNEED)
            while left:
                nbytes = os.preadv(self._fd, left[:MAX_BUFFERS], start)
                if not nbytes:
                    raise SourceTruncated("the file ends inside the range", uri=self.uri, byte_range=(start, stop))
                self.received_bytes += nbytes
                start += nbytes
                take(left, nbytes)
        except OSError as error:
            if isinstance(error, SourceTruncated):
                raise
            raise typed_error(error, self.uri, (offset, stop)) from error
        self.require_unmodified()
        return "network-file"
