"""The SHA-256 of a whole file whose ranges are read in any order."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence

from penstock.errors import IntegrityError
from penstock.types import MIB

# Maximum number of bytes held for later hashing.
_MAX_AHEAD_BYTES = 256 * MIB


class FileDigest:
    """The SHA-256 of a file whose ranges arrive in any order.

    A range waits at most `stall_s` for the ranges before it. After `stall_s` seconds, the digest is abandoned.

    Attributes:
        is_wanted: whether to keep ranges that arrive out of order. While `is_wanted` is False, only consecutive ranges
            are hashed, because the rest of the file may never be read.
        is_equal: whether the whole file was hashed and its digest matches.
    """

    def __init__(self, expected: str, nbytes: int, uri: str, stall_s: float) -> None:
        self.is_wanted = False
        self.is_equal = False
        self._stall_s = stall_s
        self._expected = expected
        self._nbytes = nbytes
        self._uri = uri
        self._sha = hashlib.sha256()
        self._next = 0
        self._ahead: dict[int, bytes] = {}
        self._is_busy = False
        self._is_over = False
        self._changed = threading.Condition()

    def abandon(self) -> None:
        """Stop hashing after a failed read, and wake all waiting threads."""
        with self._changed:
            self._is_over = True
            self._ahead.clear()
            self._changed.notify_all()

    def add(self, offset: int, views: Sequence[memoryview]) -> None:
        """Hash a range, or keep a copy for later. Raises IntegrityError if the whole file differs from the digest."""
        nbytes = sum(view.nbytes for view in views)
        with self._changed:
            if self._is_over:
                return
            if offset > self._next or self._is_busy:
                if not self.is_wanted:
                    return
                # Wait, so that the rest of the file does not pile up in memory behind one slow range.
                if not self._changed.wait_for(lambda: self._may_keep(offset), self._stall_s):
                    self.abandon()
                if self._is_over:
                    return
                if offset > self._next or self._is_busy:
                    self._ahead[offset] = b"".join(views)
                    return
            if offset + nbytes <= self._next:
                return
            self._is_busy = True
        self._hash(offset, views)

    def _may_keep(self, offset: int) -> bool:
        ahead_bytes = sum(map(len, self._ahead.values()))
        return self._is_over or (offset <= self._next and not self._is_busy) or ahead_bytes < _MAX_AHEAD_BYTES

    def _hash(self, offset: int, views: Sequence[memoryview | bytes]) -> None:
        while True:
            skip = self._next - offset
            for view in views:
                if skip < len(view):
                    self._sha.update(memoryview(view)[max(0, skip) :])
                skip -= len(view)
            with self._changed:
                self._next = max(self._next, offset + sum(map(len, views)))
                ready = [at for at in self._ahead if at <= self._next]
                self._changed.notify_all()
                if not ready:
                    self._is_busy = False
                    if self._next < self._nbytes or self._is_over:
                        return
                    self._is_over = True
                    self.is_equal = self._sha.hexdigest() == self._expected
                    break
                offset = min(ready)
                views = [self._ahead.pop(offset)]
        if not self.is_equal:
            raise IntegrityError(
                "the SHA-256 of the content differs from the hub's",
                uri=self._uri,
                hint="load again. If the error repeats, the hub or a proxy sends bytes that differ from the upload",
            )


class HashedReads:
    """A mixin that checks a source's reads against the digest from the storage, if there is one."""

    _digest: FileDigest | None = None

    @property
    def is_checked(self) -> bool:
        """See `Digested`."""
        return self._digest is not None and self._digest.is_equal

    def check_whole(self) -> bool:
        """See `Digested`. Out-of-order ranges take up to 256 MiB of memory."""
        if self._digest is not None:
            self._digest.is_wanted = True
        return self._digest is not None

    def _read_hashed(
        self, read: Callable[[int, Sequence[memoryview]], str], offset: int, buffers: Sequence[memoryview]
    ) -> str:
        views = list(buffers)
        try:
            path = read(offset, views)
        except BaseException:
            if self._digest is not None:
                self._digest.abandon()
            raise
        if self._digest is not None:
            self._digest.add(offset, views)
        return path
