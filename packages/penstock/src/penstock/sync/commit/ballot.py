"""The coordinator's rules: the reports of all subscribers on one version, the proposal, and the terms for readers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from penstock.sync.commit.outcome import Committed, Granted, NotYet, Open, Received, Reported, Withdrawn
from penstock.sync.messages import PartRequest, RankProgress

Stragglers = Literal["leave_out", "withdraw"]
"""`leave_out` commits without late or failed subscribers. `withdraw` commits with all subscribers or with none."""
Standing = Literal["waiting", "prepared", "failed", "gone", "late", "refused"]


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one subscriber on a version."""

    standing: Standing = "waiting"
    why: str = ""
    is_checked: bool = False
    progressed: float = 0.0
    """Time of the last sign of life."""
    moved_bytes: int = -1


class Ballot(msgspec.Struct, frozen=True, kw_only=True):
    """One version at its coordinator: the terms, the reports of all subscribers, and the outcome. Immutable."""

    stragglers: Stragglers | None = None
    """None if each subscriber goes live independently, so that there is nothing to decide."""
    epoch: str = ""
    version: int = -1
    needs_check: bool = False
    check: bytes = b""
    """The trainer's values for a check of the version."""
    timeout_s: float = 0.0
    """Seconds from the beginning until `due`, when subscribers without a report count as late."""
    due: float = 0.0
    votes: Mapping[str, Vote] = msgspec.field(default_factory=dict)
    cancelled: str = ""
    """Why the publisher gave up the version before the outcome."""
    outcome: Reported = Open()
    """The outcome that other members may know. It is final once it is not `Open`."""

    def begun(self, expected: Iterable[str], version: int = -1, now: float = 0.0) -> Ballot:
        """Return the ballot on a version, with the subscribers that must report."""
        votes = dict.fromkeys(sorted(expected), Vote(progressed=now))
        return msgspec.structs.replace(self, version=version, votes=votes, due=now + self.timeout_s)

    @property
    def is_two_phase(self) -> bool:
        """Return whether the fleet decides once for all subscribers."""
        return self.stragglers is not None

    @property
    def is_over(self) -> bool:
        """Return whether the outcome is final."""
        return not isinstance(self.outcome, Open)

    def waiting(self, silent_since: float = math.inf) -> list[str]:
        """Return the expected subscribers that have not reported, and have made no progress since a time."""
        votes = self.votes.items()
        return [member for member, vote in votes if vote.standing == "waiting" and vote.progressed < silent_since]

    def alive(self, member: str, now: float, moved_bytes: int | None = None) -> Ballot:
        """Return the ballot after a sign of life by a subscriber."""
        vote = self.votes.get(member)
        # A report without new bytes is not progress, because the receiver's source may hang.
        if vote is None or vote.standing != "waiting" or vote.moved_bytes == moved_bytes:
            return self
        moved_bytes = vote.moved_bytes if moved_bytes is None else moved_bytes
        return self._with(member, msgspec.structs.replace(vote, progressed=now, moved_bytes=moved_bytes))

    def reported(self, member: str, standing: Standing, why: str = "", *, is_checked: bool = False) -> Ballot:
        """Return the ballot after a report. The last report of a subscriber counts."""
        previous = self.votes.get(member)
        # A subscriber that joined later counts only if it prepared or refused the version.
        if previous is None and self.is_two_phase and standing not in ("prepared", "refused"):
            return self
        if previous is not None and previous.standing == "refused":
            return self
        return self._with(member, Vote(standing=standing, why=why, is_checked=is_checked))

    def ended(self, member: str, progress: RankProgress) -> Ballot:
        """Return the ballot after a receiver's report of its outcome."""
        standing: Standing = "failed"
        if not self.is_two_phase:
            standing = "failed" if progress.outcome == "failed" else "prepared"
        # Subscribers of old releases report `committed`, but receive no version before the decision.
        elif progress.outcome == "prepared" or progress.outcome == "refused":
            standing = progress.outcome
        return self.reported(member, standing, progress.why, is_checked=progress.is_checked)

    def lost(self, member: str, *, has_left: bool) -> Ballot:
        """Return the ballot after a subscriber left the sync or died. A dead subscriber counts as not prepared."""
        previous = self.votes.get(member)
        # A refusal still counts after the subscriber left.
        if not has_left or not self.is_two_phase or previous is None or previous.standing == "refused":
            return self.reported(member, "gone", "its process is gone")
        return msgspec.structs.replace(self, votes={name: vote for name, vote in self.votes.items() if name != member})

    def decide(self, *, is_due: bool) -> Received | Committed | Withdrawn | None:
        """Return the proposed outcome, or None while reports are missing. `is_due` is True after the deadline."""
        prepared, late = self._named("prepared"), tuple(self._named("late"))
        if not self.is_two_phase:
            received = Received(committed=tuple(prepared), late=late, failed=self._bad())
            return None if self.waiting() else received
        if self.cancelled:
            return self.withdrawn(self.cancelled)
        for member, why in self._named("refused").items():
            return self.withdrawn(why, by=member)
        lacking = {**self._named("failed"), **self._named("gone"), **self._named("late")}
        if self.waiting():
            # With `withdraw`, one failure decides, so the remaining subscribers can stop staging.
            if is_due:
                due = self
                for member in self.waiting():
                    due = due.reported(member, "late", "it did not prepare the version before the deadline")
                return due.decide(is_due=True)
            if not lacking or self.stragglers == "leave_out":
                return None
        for member, why in lacking.items():
            if self.stragglers == "withdraw":
                return self.withdrawn(f"subscriber {member[:8]} did not prepare it: {why}")
            if not prepared:
                return self.withdrawn(f"no subscriber prepared it (subscriber {member[:8]}: {why})")
        if self.needs_check and prepared and not any(self.votes[member].is_checked for member in prepared):
            why = "it was published with values for a check, but no prepared subscriber checks versions"
            return self.withdrawn(why)
        committed, failed = tuple(prepared), self._bad()
        return Committed(epoch=self.epoch, version=self.version, committed=committed, late=late, failed=failed)

    def withdrawn(self, why: str, by: str = "") -> Withdrawn:
        """Return the proposal to withdraw the version."""
        late, failed = tuple(self._named("late")), self._bad()
        return Withdrawn(epoch=self.epoch, version=self.version, by=by, why=why, late=late, failed=failed)

    def terms(self, request: PartRequest, now: float) -> NotYet | Withdrawn | Granted:
        """Return the terms on which a receiver may read the version."""
        if isinstance(self.outcome, Withdrawn):
            return self.outcome
        decide_s = max(0.0, self.due - now) if self.is_two_phase and not self.is_over else None
        if decide_s is not None and not request.can_wait:
            return NotYet(version=self.version, epoch=self.epoch, why=f"version {self.version} is not decided yet")
        check = self.check if request.wants_check else b""
        return Granted(epoch=self.epoch, version=self.version, decide_s=decide_s, check=check)

    def _with(self, member: str, vote: Vote) -> Ballot:
        return msgspec.structs.replace(self, votes={**self.votes, member: vote})

    def _named(self, standing: Standing) -> dict[str, str]:
        return {member: vote.why for member, vote in self.votes.items() if vote.standing == standing}

    def _bad(self) -> dict[str, str]:
        return {**self._named("failed"), **self._named("gone"), **self._named("refused")}
