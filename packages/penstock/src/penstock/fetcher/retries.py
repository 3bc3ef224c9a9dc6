"""Decides when a fetch may read again from members that failed or were full.

Times are values of `time.monotonic()`. `choice` chooses among the members that may be tried, and `run` complains to the
hub.
"""

from __future__ import annotations

import math

from penstock.errors import PenstockError, SourceStalled
from penstock.timing import Timing

BUSY_TRIES = 10
"""After this many refusals in a row a parent counts as full for longer, because the spares of a chain keep their places
to the end. The next member is then reported as parent, so that the hub counts what is read from it."""


class RetryTimes:
    """Members that failed or were full, by their ids. The caller holds the lock of the fetch.

    Args:
        stall_s: the longest pause after a failure, in seconds.
        timing: the pauses.
    """

    def __init__(self, stall_s: float, timing: Timing) -> None:
        self._stall_s = stall_s
        self._timing = timing
        self._failed: dict[str, tuple[float, float]] = {}
        """For each failed member: when it may be tried again, and the pause after its last failure."""
        self._full: dict[str, tuple[float, int]] = {}
        """For each full member: when it may be tried again, and how often it refused in a row."""

    def note_failure(
        self, member: str, error: PenstockError, now: float, *, can_read_storage: bool, is_too_slow: bool
    ) -> None:
        """Note a failed member. A member that is too slow is not tried again."""
        wait_s = min(2 * self._failed.get(member, (0.0, self._timing.failed_pause_s / 2))[1], self._stall_s)
        if isinstance(error, SourceStalled) and can_read_storage:
            # A read from a silent member keeps its chunks from being read from storage. When three silent holders were
            # tried one after another, the last chunks were never read and the fetch failed.
            wait_s = self._timing.silent_pause_s
        self._failed[member] = (math.inf if is_too_slow else now + wait_s, wait_s)

    def note_full(self, member: str, now: float) -> None:
        """Note a member that had no free place for us."""
        self._full[member] = (now + self._timing.full_pause_s, self._full.get(member, (0.0, 0))[1] + 1)

    def note_place(self, member: str) -> None:
        """Note a member that gave us a place."""
        self._full.pop(member, None)

    # The time is an argument, so that all members in one answer from the hub are judged at the same time. A member that
    # may not be tried yet then always has a pause left.

    def has_failed(self, member: str, now: float) -> bool:
        """Return True if a member failed and may not be tried again at `now`."""
        return self._failed.get(member, (0.0, 0.0))[0] > now

    def full_s(self, member: str, now: float) -> float:
        """Return the seconds until a full member may be tried again, or 0 if it may be tried now."""
        return max(0.0, self._full.get(member, (0.0, 0))[0] - now)

    def may_try(self, member: str, now: float) -> bool:
        """Return whether a member may be read from at `now`."""
        return not (self.has_failed(member, now) or self.full_s(member, now))

    def may_be_parent(self, member: str, now: float) -> bool:
        """Return whether a member may be reported as parent. It may be full now, but not for long."""
        return not self.has_failed(member, now) and self._full.get(member, (0.0, 0))[1] < BUSY_TRIES
