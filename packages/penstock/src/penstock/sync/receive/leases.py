"""Leases on the live version. A flip waits while a reader holds a lease.

A reader sees one version from the start to the end of its lease, or gets an error.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator

from penstock.errors import VersionNotLive


class Leases:
    """The leases on a subscriber's live version. Thread-safe. `live` returns the live version, or -1."""

    def __init__(self, live: Callable[[], int]) -> None:
        self._live = live
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._ends: dict[int, float] = {}  # expiry time of each lease by its number
        self._is_closed_to_readers = False

    @contextlib.contextmanager
    def lease(self, version: int | None, ttl_s: float) -> Iterator[int]:
        """Hold a lease on the live version during the block, for at most `ttl_s` seconds. See `Subscriber.pinned`."""
        deadline = time.monotonic() + ttl_s
        with self._changed:
            while self._is_closed_to_readers and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            live = self._live()
            if self._is_closed_to_readers or live < 0 or (version is not None and version != live):
                why = "there is none" if live < 0 else f"version {live} is"
                why = "another version is being installed" if self._is_closed_to_readers else why
                wanted = "a version" if version is None else f"version {version}"
                raise VersionNotLive(f"{wanted} is not live: {why}", live=live, hint="update, or use another replica")
            number = next(self._numbers)
            self._ends[number] = time.monotonic() + ttl_s
        try:
            yield live
        finally:
            with self._changed:
                is_valid = self._ends.pop(number, None) is not None
                self._changed.notify_all()
        if not is_valid:
            raise VersionNotLive(
                f"the lease on version {live} ended after {ttl_s:g} s, and another version was installed",
                live=self._live(),
                hint="discard the results, and pass a longer ttl_s",
            )

    def close_to_readers(self) -> None:
        """Wait until all leases have ended or expired. New readers wait until `open_to_readers`."""
        with self._changed:
            self._is_closed_to_readers = True
            while self._ends:
                left = max(self._ends.values()) - time.monotonic()
                if left <= 0:
                    self._ends.clear()
                    return
                self._changed.wait(left)

    def open_to_readers(self) -> None:
        """Admit readers again. Idempotent."""
        with self._changed:
            self._is_closed_to_readers = False
            self._changed.notify_all()
