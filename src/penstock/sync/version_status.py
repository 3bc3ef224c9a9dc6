"""The newest version of a member, for peers that wait for the next one.

In: each version as it begins and ends. Out: the newest, and whether it can be read.
Not here: the memory of the version (`local_version`), answering peers (`request_handler`).
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
        return self._now  # no lock: the status is one immutable object, replaced as a whole

    def post(self, run: str, version: int, *, is_open: bool) -> None:
        """Set the status, and wake the threads that wait for a newer version."""
        with self._changed:
            self._now = NewsReply(run=run, version=version, is_open=is_open)
            self._changed.notify_all()

    def wait(self, after: int, wait_s: float) -> NewsReply:
        """Return the status once its version is above `after`, or after `wait_s`."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while self._now.version <= after and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._now
