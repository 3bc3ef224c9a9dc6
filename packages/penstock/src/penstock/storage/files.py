"""Local files as a `Source`: cached ranges are copied, and absent ranges are read with direct I/O.

The source remembers for each window of 64 MiB whether it is in the page cache. A stale entry costs time but never
causes wrong bytes, because each read reports how much it read.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from typing import Self

from penstock import interrupts
from penstock.errors import SourceChanged, SourceError, SourceTruncated, SourceUnavailable
from penstock.storage.local import (
    MAX_BUFFERS,
    FileState,
    LocalFile,
    address_of,
    direct_alignment,
    is_in_memory,
    num_pages,
    resident_pages,
    state_of,
    typed_error,
)
from penstock.storage.source import take
from penstock.types import MIB

# Each cachestat call covers a window of 64 MiB and costs about as much as copying 30 KiB.
_WINDOW_SHIFT = 26
# Unit for splitting a partly cached request. With smaller units, a seek costs more than the saved copy.
_GRANULE_BYTES = MIB
# Shorter absent ranges are read with buffered I/O. The unaligned head and tail would cost more than the middle.
_DIRECT_MIN_BYTES = 64 << 10
# Used if statx does not state an alignment (before Linux 6.1). All current devices accept this alignment.
_DIRECT_ALIGNMENT = (4096, 4096)
# Bytes per direct read. A disk delivered 3.4-4.1 GB/s with 12 to 16 in flight, but 3.0-3.7 with 8 MiB reads. Source:
# benchmarks/results/h200x1_202611/load-history.md, row c.
_DIRECT_STEP_BYTES = MIB
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
_DIRECT: int = getattr(os, "O_DIRECT", 0)
# Errors from a file system that does not support direct I/O at this alignment.
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}

_UNKNOWN, _RESIDENT, _MIXED = 0, 1, 2


class FileSource(LocalFile):
    """A local file as a `Source`. Raises the same errors as `LocalFile`.

    Direct I/O fills most of a buffer whose address equals the file offset modulo 4096, and only the head and tail of
    the request are copied. On a device with few segments per request, reads into huge pages are 2.5 times as fast as
    reads into 4 KiB pages. Source: benchmarks/results/cpu2_202611/files.md.

    Attributes:
        why: the reason that some absent bytes were not read with direct I/O. "" if all were.
    """

    def __init__(self, path: str, fd: int, state: FileState) -> None:
        self._direct_fd = -1
        super().__init__(path, fd, state)
        self.why = "" if _DIRECT else "this system has no direct I/O"
        self._nowait = _NOWAIT
        self._refused = bool(self.why)
        # Failed reads count too, because they may have written to their buffers.
        self.received_bytes = 0
        # No lock is needed, because concurrent threads store the same value.
        self._windows = bytearray([_UNKNOWN]) * ((self.nbytes >> _WINDOW_SHIFT) + 1)
        self._lock = threading.Lock()
        self._alignment = _DIRECT_ALIGNMENT

    @classmethod
    def open(cls, path: str) -> Self:
        """See `LocalFile.open`."""
        source = super().open(path)
        if is_in_memory(source._fd):
            source._nowait = 0
            # cachestat would count the pages of a file in memory one by one, 0.24 ms per window.
            source._windows = bytearray([_RESIDENT]) * len(source._windows)
        if not source._refused:
            # Disable readahead, which would read bytes that direct I/O reads again.
            os.posix_fadvise(source._fd, 0, 0, os.POSIX_FADV_RANDOM)
        return source

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`. The possible paths of a read are `page-cache`, `direct` and `buffered`.

        Raises SourceChanged if the file was written to before the read ended. All successful reads, from any thread,
        return bytes from the same file state. A read that hangs in the kernel (a dead NFS server) cannot be
        interrupted.
        """
        # This hot path nearly always has one buffer, so it does not use `span`.
        nbytes = buffers[0].nbytes if len(buffers) == 1 else sum([b.nbytes for b in buffers])
        stop = offset + nbytes
        if stop > self.nbytes or offset < 0:
            raise SourceTruncated(f"the file has {self.nbytes} bytes", uri=self.uri, byte_range=(offset, stop))
        first, last = offset >> _WINDOW_SHIFT, stop >> _WINDOW_SHIFT
        if self._windows.count(_RESIDENT, first, last + 1) == last + 1 - first and len(buffers) <= MAX_BUFFERS:
            # RWF_NOWAIT fails for evicted pages, which direct I/O then reads. A plain read would wait for readahead.
            nbytes_read = -1
            try:
                nbytes_read = os.preadv(self._fd, buffers, offset, self._nowait)
            except OSError as error:
                # Some file systems lack RWF_NOWAIT. Other errors recur in `_read_split` and are converted there.
                if error.errno == errno.EOPNOTSUPP:
                    self._nowait = 0
            self.received_bytes += max(0, nbytes_read)
            if nbytes_read == nbytes:
                self.require_unmodified()
                return "page-cache"
            # Some pages were evicted, so check before each further read in these windows.
            self._windows[first : last + 1] = bytes([_MIXED]) * (last + 1 - first)
        path = self._read_split(offset, [b for b in buffers if b.nbytes], nbytes)
        self.require_unmodified()
        return path

    def read_through(self, offset: int, buffer: memoryview) -> str:
        """Fill a buffer through the page cache, for a range that `read_ahead` has requested. Raises like `readv`.

        Returns:
            `page-cache` if the range was cached when it was first checked, otherwise `buffered`.
        """
        stop = offset + buffer.nbytes
        if stop > self.nbytes or offset < 0:
            raise SourceTruncated(f"the file has {self.nbytes} bytes", uri=self.uri, byte_range=(offset, stop))
        is_cached = self.cached_fd(offset, buffer.nbytes) is not None
        self._read_buffered(offset, [buffer])
        self.require_unmodified()
        if is_cached:
            return "page-cache"
        self.why = self.why or "read ahead into the page cache, because the destination is not aligned for direct I/O"
        return "buffered"

    def learn_cached(self, start: int, stop: int, is_over: Callable[[], bool]) -> None:
        """Query in advance whether a range is cached, until `is_over` returns True."""
        for window in range(start >> _WINDOW_SHIFT, (stop - 1 >> _WINDOW_SHIFT) + 1):
            if is_over():
                return
            if self._windows[window] == _UNKNOWN:
                self._query_windows(window << _WINDOW_SHIFT, window << _WINDOW_SHIFT)

    def cached_fd(self, offset: int, nbytes: int) -> int | None:
        """Return a descriptor for a range in the page cache, or None if the range might not be cached."""
        first, last, stop = offset >> _WINDOW_SHIFT, (offset + nbytes) >> _WINDOW_SHIFT, offset + nbytes
        if stop > self.nbytes:
            return None
        if self._windows.count(_UNKNOWN, first, last + 1):
            self._query_windows(offset, stop)
        return self._fd if self._windows.count(_RESIDENT, first, last + 1) == last + 1 - first else None

    def close(self) -> None:
        """See `Source.close`."""
        fd, self._direct_fd = self._direct_fd, -1
        if fd >= 0:
            os.close(fd)
        super().close()

    def _read_split(self, offset: int, buffers: list[memoryview], nbytes: int) -> str:
        paths = set()
        for start, stop, path in self._parts(offset, nbytes):
            part = take(buffers, stop - start)
            if path == "direct":
                path = self._read_absent(start, part)
            else:
                self._read_buffered(start, part)
            paths.add(path)
        return next((path for path in ("direct", "buffered") if path in paths), "page-cache")

    def _parts(self, offset: int, nbytes: int) -> list[tuple[int, int, str]]:
        stop = offset + nbytes
        if not nbytes:
            return []
        cached = resident_pages(self._fd, offset, nbytes)
        if cached is None:
            return [(offset, stop, self._sample(offset, stop))]
        if cached == 0:
            return [(offset, stop, "direct")]
        if cached >= num_pages(offset, nbytes) and self._arrived(stop - 1):
            self._query_windows(offset, stop)
            return [(offset, stop, "page-cache")]
        runs: list[tuple[int, int, str]] = []
        for start in range(offset - offset % _GRANULE_BYTES, stop, _GRANULE_BYTES):
            a, b = max(start, offset), min(start + _GRANULE_BYTES, stop)
            # Copying a mostly cached unit and reading the rest buffered is cheaper than reading all of it from the
            # device.
            mostly = (resident_pages(self._fd, a, b - a) or 0) * 2 > num_pages(a, b - a)
            path = "page-cache" if mostly and self._arrived(b - 1) else "direct"
            if runs and runs[-1][2] == path:
                a = runs.pop()[0]
            runs.append((a, b, path))
        return runs

    def _arrived(self, position: int) -> bool:
        """Return whether the byte's page is cached and filled. Return True if RWF_NOWAIT is unsupported."""
        # cachestat also counts pages that readahead has only requested. Reading them would request the next pages, and
        # a file with a cached head would be read at the speed of readahead, a third to a half of direct I/O.
        if not self._nowait:
            return True
        try:
            return os.preadv(self._fd, [bytearray(1)], position, self._nowait) == 1
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise typed_error(error, self.uri, (position, position + 1)) from error
            self._nowait = 0
            return True

    def _query_windows(self, offset: int, stop: int) -> None:
        for window in range(offset >> _WINDOW_SHIFT, (stop >> _WINDOW_SHIFT) + 1):
            if self._windows[window] == _UNKNOWN:
                start = window << _WINDOW_SHIFT
                nbytes = min(1 << _WINDOW_SHIFT, self.nbytes - start)
                whole = (resident_pages(self._fd, start, nbytes) or 0) >= num_pages(start, nbytes) if nbytes else True
                self._windows[window] = _RESIDENT if whole else _MIXED

    def _sample(self, offset: int, stop: int) -> str:
        # Probe only two bytes. On absent pages RWF_NOWAIT starts readahead, and direct I/O would read them again.
        arrived = self._arrived(offset) and self._arrived(stop - 1)
        # Without RWF_NOWAIT read buffered, which is slower than direct I/O but always correct.
        if not self._nowait:
            return "buffered"
        if not arrived:
            return "direct"
        for window in range(offset >> _WINDOW_SHIFT, (stop >> _WINDOW_SHIFT) + 1):
            if self._windows[window] == _UNKNOWN:
                self._windows[window] = _RESIDENT
        return "page-cache"

    def _read_buffered(self, offset: int, buffers: list[memoryview]) -> None:
        while buffers:
            try:
                received = os.preadv(self._fd, buffers[:MAX_BUFFERS], offset)
            except OSError as error:
                raise typed_error(error, self.uri, (offset, offset + sum(b.nbytes for b in buffers))) from error
            if received == 0:
                raise self._ended(offset)
            self.received_bytes += received
            take(buffers, received)
            offset += received

    def _read_absent(self, offset: int, buffers: list[memoryview]) -> str:
        fd = self._open_direct()
        if fd < 0:
            self._read_buffered(offset, buffers)
            return "buffered"
        path = "buffered"
        for start, direct, part in _align(offset, buffers, self._alignment):
            if direct and not self._refused:
                start = self._read_direct(fd, start, part)
                path = "buffered" if self._refused else "direct"
            self._read_buffered(start, part)
        if path == "buffered" and not self.why:
            self.why = "the pieces are shorter than 64 KiB, or the buffers are not aligned like their file offset"
        return path

    def _read_direct(self, fd: int, offset: int, buffers: list[memoryview]) -> int:
        """Read with direct I/O and return the offset reached. The buffers that are not filled yet stay in `buffers`."""
        # A short read may end anywhere, but direct I/O needs an aligned offset.
        while buffers and offset % self._alignment[1] == 0:
            try:
                received = os.preadv(fd, take(buffers[:MAX_BUFFERS], _DIRECT_STEP_BYTES), offset)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise typed_error(error, self.uri, (offset, offset + sum(b.nbytes for b in buffers))) from error
                self._refuse_direct(f"direct I/O was refused at the first read ({errno.errorcode[error.errno]})")
                break
            if received == 0:
                raise self._ended(offset)
            self.received_bytes += received
            take(buffers, received)
            offset += received
        return offset

    def _open_direct(self) -> int:
        if self._direct_fd >= 0 or self._refused:
            return -1 if self._refused else self._direct_fd
        # Ctrl-C between the open and the assignment would leak the descriptor.
        with self._lock, interrupts.deferred():
            if self._direct_fd >= 0 or self._refused:
                return -1 if self._refused else self._direct_fd
            # O_DIRECT applies to the open file, so direct reads need a separate descriptor.
            alignment = direct_alignment(self._fd)
            if alignment == (0, 0):
                return self._refuse_direct("this file has no direct I/O (statx)")
            try:
                fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | _DIRECT)
            except OSError as error:
                return self._refuse_direct(
                    f"direct I/O was refused at open ({errno.errorcode.get(error.errno or 0, error)})"
                )
            if state_of(os.fstat(fd)).identity != self.identity:
                os.close(fd)
                self.check_unchanged()
                raise SourceChanged("the file was replaced while it was being reopened", uri=self.uri)
            self._alignment = alignment or _DIRECT_ALIGNMENT
            self._direct_fd = fd
            return fd

    def _refuse_direct(self, why: str) -> int:
        self.why = why
        self._refused = True
        # Buffered reads need the readahead that `open` disabled.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_NORMAL)
        return -1

    def _ended(self, offset: int) -> SourceError:
        try:
            self.require_unmodified()
        except SourceError as error:
            return error
        return SourceUnavailable(f"the read returned no bytes at offset {offset} of {self.nbytes}", uri=self.uri)


def _align(
    offset: int, buffers: list[memoryview], alignment: tuple[int, int]
) -> list[tuple[int, bool, list[memoryview]]]:
    """Split the request into `(offset, whether direct I/O works, buffers)`, and merge neighbours of the same kind."""
    address_step, offset_step = alignment
    runs: list[tuple[int, bool, list[memoryview]]] = []
    for buffer in buffers:
        head = -offset % offset_step
        middle = (buffer.nbytes - head) // offset_step * offset_step
        # The kernel returns EINVAL unless offset and address are aligned.
        if middle < _DIRECT_MIN_BYTES or (address_of(buffer) + head) % address_step:
            head, middle = buffer.nbytes, 0
        for start, stop, direct in (
            (0, head, False),
            (head, head + middle, True),
            (head + middle, buffer.nbytes, False),
        ):
            if start == stop:
                continue
            if runs and runs[-1][1] == direct:
                runs[-1][2].append(buffer[start:stop])
            else:
                runs.append((offset + start, direct, [buffer[start:stop]]))
        offset += buffer.nbytes
    return runs
