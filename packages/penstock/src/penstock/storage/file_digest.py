"""The SHA-256 of a whole file, compared while its parts are read in any order.

In: parts of a file, from the threads that read them. Out: whether the file is the one that its storage lists.
Not here: which storage lists digests (`repository`), who reads (`engine`).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

from penstock.errors import IntegrityError
from penstock.types import MIB

# Longest a digest runs ahead of what it may hash next: reads of a file end in another order than they began.
_MAX_AHEAD_BYTES = 256 * MIB


class FileDigest:
    """The SHA-256 of a file whose parts arrive in any order, each hashed by the thread that brings the one before it.

    Args:
        stall_s: seconds that a part waits for those before it; then the digest is given up.

    Attributes:
        is_wanted: whether parts that come early are kept. Until then only parts that follow on the last are hashed, as
            those of a header, which is read before it is known whether the rest will be.
        is_equal: the whole file was hashed, and has the expected digest.
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
        """Hash no more, and let every waiting thread go on: a read has failed."""
        with self._changed:
            self._is_over = True
            self._ahead.clear()
            self._changed.notify_all()

    def add(self, offset: int, views: Sequence[memoryview]) -> None:
        """Hash a part, or keep a copy until its turn. IntegrityError: the whole file differs from the hub's digest."""
        nbytes = sum(view.nbytes for view in views)
        with self._changed:
            if self._is_over:
                return
            if offset > self._next or self._is_busy:
                if not self.is_wanted:
                    return
                # Bounded: one slow range must not bring the rest of the file into memory.
                if not self._changed.wait_for(lambda: self._has_room(offset), self._stall_s):
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

    def _has_room(self, offset: int) -> bool:
        ahead_bytes = sum(map(len, self._ahead.values()))
        return self._is_over or (offset <= self._next and not self._is_busy) or ahead_bytes < _MAX_AHEAD_BYTES

    def _hash(self, offset: int, views: Sequence[memoryview | bytes]) -> None:
        """Hash a part whose turn it is, and the kept parts that follow it."""
        while True:
            skip = self._next - offset
            for view in views:
                if skip < len(view):
                    # It releases the interpreter lock for the time.
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
                "the content's SHA-256 is not the one that the hub lists",
                uri=self._uri,
                hint="load again; if it stays, the hub or a proxy gives other bytes than were uploaded",
            )
