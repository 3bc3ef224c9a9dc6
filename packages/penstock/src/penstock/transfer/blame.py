"""Decides which source is at fault when a transfer fails, and when that source may be read again.

After a failed read or wrong bytes, `FailedSources` excludes the source at fault. An update stops and begins again
without the source. A fetch continues without the source, complains about it to the hub, and retries it after a pause.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from penstock.engine.run import RunState
from penstock.errors import Cancelled, DestinationError, PenstockError, SourceBusy, SourceStalled
from penstock.hub.messages import MEMBER_PREFIX
from penstock.timing import DEFAULT, Timing

BUSY_TRIES = 10
"""Number of consecutive refusals after which a parent counts as full. The next member is then reported as parent."""


class SourceFailed(Exception):
    """The failure of one source. The caller can continue with other sources. `error` is the reason."""

    # SourceFailed is not a PenstockError, because an update without remaining sources raises `error` instead.

    def __init__(self, member: str, error: PenstockError) -> None:
        super().__init__(member)
        self.member = member
        self.error = error


def ends_transfer(error: PenstockError) -> bool:
    """Return whether an error is no fault of a source, because this process cancelled the read or its memory failed."""
    return isinstance(error, Cancelled | DestinationError)


@contextlib.contextmanager
def blamed(member: str, ticket: RunState) -> Iterator[None]:
    """Stop a run for an error that is the fault of this source. For errors of other sides, only raise the error."""
    try:
        yield
    except PenstockError as error:
        if error.blame == "source":
            if member not in (error.uri or ""):
                error.uri = f"{member} {error.uri or ''}".rstrip()
            ticket.fail(error, source=member)
        raise


def is_fault(error: PenstockError) -> bool:
    """Return whether a source that ended with this error is faulty. A source without a free slot is not."""
    # Complaints about full holders made eight cold starts read storage 3 to 6 times.
    return not isinstance(error, SourceBusy)


class FailedSources:
    """The sources that failed in one fetch or one update, by member id. The owner's lock guards this object.

    Times come from `time.monotonic()`.

    Attributes:
        errors: the last error of each faulty source. An update reads from none of these sources again.
        since_progress: sources that failed since the last verified byte.
        reported: sources about which the hub accepted a complaint since the last verified byte.
    """

    def __init__(self, *, stall_s: float = math.inf, timing: Timing = DEFAULT) -> None:
        self._stall_s = stall_s
        self._timing = timing
        self.errors: dict[str, PenstockError] = {}
        self.since_progress: set[str] = set()
        self.reported: set[str] = set()
        self._failed: dict[str, tuple[float, float]] = {}
        """For each failed source: when it may be retried, and the pause after its last failure."""
        self._full: dict[str, tuple[float, int]] = {}
        """For each full source: when it may be retried, and the number of its consecutive refusals."""

    @property
    def last(self) -> PenstockError:
        """Return the error of the source that failed last."""
        return next(reversed(self.errors.values()))

    def at_fault(self, asked: str, error: PenstockError) -> str:
        """Return the source to blame for a failed request: a member that `asked` could not reach, or `asked` itself."""
        uri = error.uri or ""
        named = uri.removeprefix(MEMBER_PREFIX)
        return named if named != uri and named not in self.errors else asked

    def note(self, member: str, error: PenstockError, now: float, *, can_read_storage: bool, is_too_slow: bool) -> None:
        """Exclude a source for a pause that doubles after each failure, or until the end if it is too slow."""
        if not is_fault(error):
            self._full[member] = (now + self._timing.full_pause_s, self._full.get(member, (0.0, 0))[1] + 1)
            return
        wait_s = min(2 * self._failed.get(member, (0.0, self._timing.failed_pause_s / 2))[1], self._stall_s)
        if isinstance(error, SourceStalled) and can_read_storage:
            # A pending read from a silent source blocks storage, and three silent sources could block it forever.
            wait_s = self._timing.silent_pause_s
        self.errors[member] = error
        self._failed[member] = (math.inf if is_too_slow else now + wait_s, wait_s)

    def note_place(self, member: str) -> None:
        """Record that a source has reserved a slot for this reader."""
        self._full.pop(member, None)

    def note_progress(self) -> None:
        """Record that bytes were verified. Until the next failure, no source counts as failed."""
        self.since_progress.clear()
        self.reported.clear()

    def has_unreported(self) -> bool:
        """Return whether a source failed since the last verified byte, and its failure is unreported."""
        return bool(self.since_progress - self.reported)

    # The time is an argument, so that all sources in one reply from the hub are judged at the same time.
    def has_failed(self, member: str, now: float) -> bool:
        """Return True if a source failed and may not be retried at `now`."""
        return self._failed.get(member, (0.0, 0.0))[0] > now

    def full_s(self, member: str, now: float) -> float:
        """Return the seconds until a full source may be retried, or 0 if it may be retried now."""
        return max(0.0, self._full.get(member, (0.0, 0))[0] - now)

    def may_try(self, member: str, now: float) -> bool:
        """Return whether a source may be read from at `now`."""
        return not (self.has_failed(member, now) or self.full_s(member, now))

    def may_be_parent(self, member: str, now: float) -> bool:
        """Return whether a source may be reported as parent, even if the source has been full for a short time."""
        return not self.has_failed(member, now) and self._full.get(member, (0.0, 0))[1] < BUSY_TRIES
