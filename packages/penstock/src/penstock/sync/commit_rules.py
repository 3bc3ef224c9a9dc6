"""The rules of a two-phase commit, with which all subscribers of a fleet commit a version or none does.

The functions and classes in this module use no clocks, messages or threads.

1. Subscribers stage a version, check it, and report prepared, failed or refused.
2. Rank 0 of the publishers is the coordinator. The coordinator reaches its verdict (`Ballot.decide`) by the deadline.
3. The hub records a commit before the coordinator reports it to a subscriber. The first proposal to the hub counts.
4. A subscriber goes live only after the coordinator or the hub reported `committed`.
5. If the coordinator does not reply, a subscriber proposes a withdrawal to the hub, which returns the recorded
   decision. A subscriber without a decision keeps its version.

No subscriber goes live before the hub has recorded a commit, which is final. So all subscribers make the same choice.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Literal

import msgspec

from penstock.errors import VersionRefused
from penstock.hub.messages import FleetDecision

Stragglers = Literal["leave_out", "withdraw"]
"""`leave_out` commits without late or failed subscribers. `withdraw` commits with all subscribers or with none."""
Standing = Literal["waiting", "prepared", "failed", "gone", "late", "refused"]

MAX_REASON_CHARS = 1024


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one subscriber on a version."""

    standing: Standing = "waiting"
    why: str = ""
    is_checked: bool = False


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's decision before the hub records it."""

    is_commit: bool
    by: str = ""  # id of the subscriber that refused the version
    why: str = ""
    prepared: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    failed: Mapping[str, str] = msgspec.field(default_factory=dict)

    def decision(self, epoch: str, version: int) -> FleetDecision:
        """Return the verdict as a decision that the hub can record."""
        outcome: Literal["committed", "withdrawn"] = "committed" if self.is_commit else "withdrawn"
        return FleetDecision(epoch=epoch, version=version, outcome=outcome, by=self.by, why=self.why[:MAX_REASON_CHARS])


class Ballot(msgspec.Struct, frozen=True, kw_only=True):
    """The reports of all subscribers on one version. A ballot is immutable."""

    stragglers: Stragglers
    needs_check: bool = False
    votes: Mapping[str, Vote] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, expected: Iterable[str], stragglers: Stragglers, *, needs_check: bool = False) -> Ballot:
        """Return an empty ballot for these subscribers."""
        votes = dict.fromkeys(sorted(expected), Vote())
        return cls(stragglers=stragglers, needs_check=needs_check, votes=votes)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Return the expected subscribers that have not reported."""
        return tuple(member for member, vote in self.votes.items() if vote.standing == "waiting")

    def reported(self, member: str, standing: Standing, why: str = "", *, is_checked: bool = False) -> Ballot:
        """Return the ballot after a report. The last report of a subscriber counts."""
        previous = self.votes.get(member)
        # A subscriber that joined later counts only if it prepared or refused the version.
        if previous is None and standing not in ("prepared", "refused"):
            return self
        if previous is not None and previous.standing == "refused":
            return self
        return msgspec.structs.replace(
            self, votes={**self.votes, member: Vote(standing=standing, why=why, is_checked=is_checked)}
        )

    def without(self, member: str) -> Ballot:
        """Return the ballot after a subscriber left the sync. A refusal by the subscriber still counts."""
        previous = self.votes.get(member)
        if previous is None or previous.standing == "refused":
            return self
        return msgspec.structs.replace(self, votes={name: vote for name, vote in self.votes.items() if name != member})

    def decide(self, *, is_due: bool) -> Verdict | None:
        """Return the verdict, or None while reports are missing. `is_due` is True once the deadline has passed."""
        for member, why in self._named("refused").items():
            return self._verdict(why=why, by=member)
        lacking = {**self._named("failed"), **self._named("gone"), **self._named("late")}
        if self.waiting:
            # With `withdraw`, one failure decides, so the remaining subscribers can stop staging.
            if is_due:
                due = self
                for member in self.waiting:
                    due = due.reported(member, "late", "it did not prepare the version before the deadline")
                return due.decide(is_due=True)
            if not lacking or self.stragglers == "leave_out":
                return None
        prepared = self._named("prepared")
        for member, why in lacking.items():
            if self.stragglers == "withdraw":
                return self._verdict(why=f"subscriber {member[:8]} did not prepare it: {why}")
            if not prepared:
                return self._verdict(why=f"no subscriber prepared it (subscriber {member[:8]}: {why})")
        if self.needs_check and prepared and not any(self.votes[member].is_checked for member in prepared):
            return self._verdict(
                why="it was published with values for a check, but no prepared subscriber checks versions"
            )
        return self._verdict()

    def _named(self, standing: Standing) -> dict[str, str]:
        return {member: vote.why for member, vote in self.votes.items() if vote.standing == standing}

    def _verdict(self, *, why: str = "", by: str = "") -> Verdict:
        return Verdict(
            is_commit=not (why or by),
            why=why,
            by=by,
            prepared=tuple(self._named("prepared")),
            late=tuple(self._named("late")),
            failed={**self._named("failed"), **self._named("gone"), **self._named("refused")},
        )


def refusal(name: str, decision: FleetDecision) -> VersionRefused:
    """Return the error for a withdrawn version."""
    by = f" by subscriber {decision.by[:8]}" if decision.by else ""
    what = "refused" if decision.by else "withdrawn"
    return VersionRefused(
        f"version {decision.version} of {name!r} was {what}{by}: {decision.why}",
        version=decision.version,
        member=decision.by,
        reason=decision.why,
        hint="the previous version stays live, so publish a later version",
    )


Question = Literal["coordinator", "hub"]
"""The process to ask next. Asking the hub proposes a withdrawal, and the hub returns the recorded decision."""


class DecisionReply(msgspec.Struct, frozen=True, kw_only=True):
    """A process's reply to a question, or the fact that it did not reply."""

    at: float
    decision: FleetDecision | None = None
    kind: Literal["open", "gone", "silent", "past"] = "open"
    """State without a decision: not decided yet, process gone, no reply in time, or later versions already decided."""


class Undecided(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a wait that ended without a decision."""

    is_past: bool


def learn(
    begun: float, *, limit_s: float, stall_s: float
) -> Generator[Question, DecisionReply, FleetDecision | Undecided]:
    """Yield the process to ask and receive its reply, until the decision is known or cannot be learned."""
    last_reply = begun
    while True:
        reply = yield "coordinator"
        if reply.decision is not None:
            return reply.decision
        if reply.kind == "open":
            last_reply = reply.at
            if reply.at - begun <= limit_s:
                continue
        # Keep asking, because a coordinator that does not reply may be about to commit.
        elif reply.kind == "silent" and reply.at - last_reply <= stall_s:
            continue
        reply = yield "hub"
        if reply.decision is not None:
            return reply.decision
        if reply.kind == "past":
            return Undecided(is_past=True)
        if reply.at - last_reply > stall_s or reply.at - begun > limit_s + stall_s:
            return Undecided(is_past=False)
