"""Decides when a fetch may read again from members that failed or were full. Times come from `time.monotonic()`."""

from __future__ import annotations

import math

from penstock.errors import PenstockError, SourceStalled
from penstock.timing import Timing

BUSY_TRIES = 10
"""Number of consecutive refusals after which a parent counts as full. The next member is then reported as parent."""


class RetryTimes:
    """Members that failed or were full, by member id. The caller holds the lock of the fetch."""

    def __init__(self, stall_s: float, timing: Timing) -> None:
        self._stall_s = stall_s
        self._timing = timing
        self._failed: dict[str, tuple[float, float]] = {}
        """For each failed member: when it may be retried, and the pause after its last failure."""
        self._full: dict[str, tuple[float, int]] = {}
        """For each full member: when it may be retried, and the number of its consecutive refusals."""

    def note_failure(
        self, member: str, error: PenstockError, now: float, *, can_read_storage: bool, is_too_slow: bool
    ) -> None:
        """Record a failed member. A member that is too slow is not retried."""
        wait_s = min(2 * self._failed.get(member, (0.0, self._timing.failed_pause_s / 2))[1], self._stall_s)
        if isinstance(error, SourceStalled) and can_read_storage:
            # A pending read from a silent member blocks storage, and three silent members could block it forever.
            wait_s = self._timing.silent_pause_s
        self._failed[member] = (math.inf if is_too_slow else now + wait_s, wait_s)

    def note_full(self, member: str, now: float) -> None:
        """Record that a member has no free slot for this reader."""
        self._full[member] = (now + self._timing.full_pause_s, self._full.get(member, (0.0, 0))[1] + 1)

    def note_place(self, member: str) -> None:
        """Record that a member has reserved a slot for this reader."""
        self._full.pop(member, None)

    # The time is an argument, so that all members in one reply from the hub are judged at the same time.
    def has_failed(self, member: str, now: float) -> bool:
        """Return True if a member failed and may not be retried at `now`."""
        return self._failed.get(member, (0.0, 0.0))[0] > now

    def full_s(self, member: str, now: float) -> float:
        """Return the seconds until a full member may be retried, or 0 if it may be retried now."""
        return max(0.0, self._full.get(member, (0.0, 0))[0] - now)

    def may_try(self, member: str, now: float) -> bool:
        """Return whether a member may be read from at `now`."""
        return not (self.has_failed(member, now) or self.full_s(member, now))

    def may_be_parent(self, member: str, now: float) -> bool:
        """Return whether a member may be reported as parent, even if the member has been full for a short time."""
        return not self.has_failed(member, now) and self._full.get(member, (0.0, 0))[1] < BUSY_TRIES
