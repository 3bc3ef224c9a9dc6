"""The versions of a member, for peers that wait for the next one.

In: versions as they are begun and ended. Out: the newest, and whether it can be read.
Not here: the memory that holds it (`local_version`), who is told (`request_handler`).
"""

from __future__ import annotations

import threading
import time

from penstock.hub.sync_messages import NewsReply


class VersionStatus:
    """See the module. Used by any number of threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = NewsReply(run="", version=-1, is_open=False)

    @property
    def now(self) -> NewsReply:
        """Return the current status."""
        return self._now

    def post(self, run: str, version: int, *, is_open: bool) -> None:
        """Say so."""
        with self._changed:
            self._now = NewsReply(run=run, version=version, is_open=is_open)
            self._changed.notify_all()

    def wait(self, after: int, wait_s: float) -> NewsReply:
        """Return the status once it is of a version above `after`, or after `wait_s`."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while self._now.version <= after and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._now
