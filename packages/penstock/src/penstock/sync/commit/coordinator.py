"""The coordinator at rank 0 of the publishers: the ballots with a lock, a clock, and probes of silent subscribers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from penstock.errors import Cancelled
from penstock.sync.commit.ballot import Ballot
from penstock.sync.commit.outcome import Committed, Decided, Granted, NotYet, Open, Received, Reported, Withdrawn
from penstock.sync.membership import Whereabouts
from penstock.sync.messages import PartRequest, RankProgress
from penstock.timing import Timing

_KEPT = 8
_EACH = Ballot()


class CommitCoordinator:
    """The ballots on recent versions, held by a publisher's rank 0. Thread-safe."""

    def __init__(self, timing: Timing | None = None) -> None:
        self._probe_s = (Timing() if timing is None else timing).probe_interval_s
        self._changed = threading.Condition()
        self._ballots: dict[int, Ballot] = {}
        self.absent: set[str] = set()

    def begin(self, version: int, expected: Iterable[str], ballot: Ballot = _EACH) -> None:
        """Begin to collect reports on a version, on the terms of `ballot`."""
        # Leave out subscribers that were late, because they would delay every version. With `withdraw` all count.
        is_all = ballot.stragglers == "withdraw"
        members = [member for member in expected if is_all or member not in self.absent]
        with self._changed:
            self._ballots[version] = ballot.begun(members, version, time.monotonic())
            while len(self._ballots) > _KEPT:
                del self._ballots[next(iter(self._ballots))]

    def note_request(self, member: str) -> None:
        """Record a receiver's request for its part, which proves that the receiver is alive."""
        with self._changed:
            self.absent.discard(member)
            # Count the request as progress on every version, because a request need not name a version.
            for version, ballot in self._ballots.items():
                self._ballots[version] = ballot.alive(member, time.monotonic())

    def note_progress(self, member: str, progress: RankProgress) -> None:
        """Record a receiver's progress report."""
        with self._changed:
            self.absent.discard(member)
            # A receiver that failed before it knew the version number reports -1.
            version = progress.version if progress.version >= 0 else next(reversed(self._ballots), -1)
            ballot = self._ballots.get(version)
            # Ignore reports after the decision, because other ranks may have acted on it.
            if ballot is None or ballot.is_over:
                return
            if progress.outcome:
                self._set(version, ballot.ended(member, progress))
            else:
                self._ballots[version] = ballot.alive(member, time.monotonic(), progress.moved_bytes)

    def _set(self, version: int, ballot: Ballot) -> None:
        """Replace a ballot and wake the waiting threads. The caller holds the lock."""
        self._ballots[version] = ballot
        self._changed.notify_all()

    def cancel(self, why: str) -> None:
        """Abort the wait for undecided versions. Versions with a two-phase commit are withdrawn."""
        with self._changed:
            for version, ballot in self._ballots.items():
                self._set(version, msgspec.structs.replace(ballot, cancelled=ballot.cancelled or why))

    def propose(
        self, version: int, *, stall_s: float, whereabouts: Callable[[str], Whereabouts]
    ) -> Received | Committed | Withdrawn:
        """Wait for the proposal, at most until the deadline. Raise Cancelled after `cancel` if nothing is decided.

        A version without a deadline is awaited until every subscriber has finished, left, or stalled for `stall_s`.
        """
        while True:
            with self._changed:
                now = time.monotonic()
                ballot = self._ballots[version]
                left_s = ballot.due - now
                if not ballot.is_two_phase:
                    if ballot.cancelled:
                        raise Cancelled(ballot.cancelled)
                    left_s = stall_s
                    for member in ballot.waiting(now - stall_s):
                        ballot = ballot.reported(member, "late")
                        self.absent.add(member)
                    self._ballots[version] = ballot
                proposal = ballot.decide(is_due=left_s <= 0)
                if proposal is not None:
                    if isinstance(proposal, Received):
                        self._set(version, msgspec.structs.replace(ballot, outcome=proposal))  # nothing to record
                    else:
                        self.absent.update(proposal.late)
                    return proposal
                self._changed.wait(min(self._probe_s, left_s))
                silent = self._ballots[version].waiting(time.monotonic() - self._probe_s)
            # Probe subscribers without the lock, because a probe may take seconds.
            for member in silent:
                place = whereabouts(member)
                with self._changed:
                    ballot = self._ballots[version]
                    if place != "there" and member in ballot.waiting():
                        self._set(version, ballot.lost(member, has_left=place == "left"))

    def settle(self, version: int, outcome: Decided) -> None:
        """From now on, reply to requests with the recorded outcome of a version."""
        with self._changed:
            self._set(version, msgspec.structs.replace(self._ballots[version], outcome=outcome))

    def give_up(self, version: int) -> None:
        """From now on, reply as for an unknown version, because it is unknown what the hub has recorded."""
        # Keep the ballot, because receivers must still ask for the outcome before they go live.
        with self._changed:
            self._set(version, msgspec.structs.replace(self._ballots[version], outcome=Open(is_begun=False)))

    def outcome(self, version: int, wait_s: float) -> Reported:
        """Return the outcome of a version when it is final, or its current state after `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                ballot = self._ballots.get(version)
                remaining = deadline - time.monotonic()
                if remaining <= 0 or (ballot is not None and ballot.is_over):
                    return Open(is_begun=False) if ballot is None else ballot.outcome
                self._changed.wait(remaining)

    def terms(self, member: str, request: PartRequest, epoch: str, version: int) -> NotYet | Withdrawn | Granted:
        """Return the terms on which a receiver may read a version. See `Planner`."""
        with self._changed:
            ballot = self._ballots.get(version)
        if ballot is None:
            return Granted(epoch=epoch, version=version)
        terms = ballot.terms(request, time.monotonic())
        if isinstance(terms, NotYet):
            # The subscriber has no staging copy in which the version could wait for the decision.
            why = "it cannot keep a version staged, because its mode is direct or its release is older"
            self.note_progress(member, RankProgress(version=version, outcome="failed", why=why))
        return terms
