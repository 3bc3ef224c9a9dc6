"""The rules by which a fleet commits a version as a whole. They use no clocks, messages or threads.

1. Subscribers stage a version, check it, and report prepared, failed or refused.
2. Rank 0 of the publishers, the coordinator, reaches a verdict (`Ballot.decide`), at the deadline at the latest.
3. For a commit, the hub records the verdict before rank 0 tells any subscriber. The first proposal for a version wins.
4. A subscriber goes live only after it learned `committed` from the coordinator or the hub.
5. If the coordinator is gone, or silent until the stall deadline, a subscriber proposes to withdraw. The hub answers
   with the recorded decision. A subscriber that learns nothing keeps its version.

After step 3 a commit cannot be undone, and before it no subscriber is live. Therefore all subscribers act alike.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from penstock.errors import VersionRefused
from penstock.hub.messages import FleetDecision

Stragglers = Literal["leave_out", "withdraw"]
"""`leave_out` commits without subscribers that are late or failed. `withdraw` commits with all subscribers or not at
all."""
Standing = Literal["waiting", "prepared", "failed", "gone", "late", "refused"]

MAX_REASON_CHARS = 1024
"""Maximum length of a reason in the messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The state of one subscriber for a version."""

    standing: Standing = "waiting"
    why: str = ""
    is_checked: bool = False
    """Whether the subscriber's check of the version passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The coordinator's decision before it is recorded."""

    is_commit: bool
    by: str = ""
    """The subscriber that refused the version."""
    why: str = ""
    prepared: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    def decision(self, epoch: str, version: int) -> FleetDecision:
        """Return the verdict in the form that the hub records."""
        outcome: Literal["committed", "withdrawn"] = "committed" if self.is_commit else "withdrawn"
        return FleetDecision(epoch=epoch, version=version, outcome=outcome, by=self.by, why=self.why[:MAX_REASON_CHARS])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """The reports of all subscribers on one version. It is immutable, and every report creates a new ballot."""

    stragglers: Stragglers
    needs_check: bool = False
    """Whether at least one check of the version must pass."""
    votes: Mapping[str, Vote] = field(default_factory=dict)

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
        before = self.votes.get(member)
        # Do not wait for a subscriber that joined later. Its report counts only if it prepared or refused the version.
        if before is None and standing not in ("prepared", "refused"):
            return self
        # A refused version stays refused, whatever the subscriber reports about another attempt.
        if before is not None and before.standing == "refused":
            return self
        return replace(self, votes={**self.votes, member: Vote(standing=standing, why=why, is_checked=is_checked)})

    def without(self, member: str) -> Ballot:
        """Return the ballot after a subscriber left the sync, unless it refused the version."""
        before = self.votes.get(member)
        if before is None or before.standing == "refused":
            return self
        return replace(self, votes={name: vote for name, vote in self.votes.items() if name != member})

    def decide(self, *, is_due: bool) -> Verdict | None:
        """Return the verdict, or None while reports are missing.

        Args:
            is_due: whether the deadline has passed.
        """
        named = self._named("refused")
        if named:
            member, why = next(iter(named.items()))
            return self._withdrawn(why, by=member)
        lacking = {**self._named("failed"), **self._named("gone"), **self._named("late")}
        if self.waiting:
            # With `withdraw`, one failure decides, and the other subscribers can stop staging.
            if not is_due and not (lacking and self.stragglers == "withdraw"):
                return None
            if is_due:
                due = self
                for member in self.waiting:
                    due = due.reported(member, "late", "it did not prepare the version before the deadline")
                return due.decide(is_due=True)
        prepared = self._named("prepared")
        if lacking and self.stragglers == "withdraw":
            member, why = next(iter(lacking.items()))
            return self._withdrawn(f"subscriber {member[:8]} did not prepare it: {why}")
        if lacking and not prepared:
            member, why = next(iter(lacking.items()))
            return self._withdrawn(f"no subscriber prepared it (subscriber {member[:8]}: {why})")
        if self.needs_check and prepared and not any(self.votes[member].is_checked for member in prepared):
            return self._withdrawn(
                "it was published with values for a check, but no prepared subscriber checks versions"
            )
        return self._verdict(is_commit=True)

    def _named(self, standing: Standing) -> dict[str, str]:
        return {member: vote.why for member, vote in self.votes.items() if vote.standing == standing}

    def _withdrawn(self, why: str, *, by: str = "") -> Verdict:
        return self._verdict(is_commit=False, why=why, by=by)

    def _verdict(self, *, is_commit: bool, why: str = "", by: str = "") -> Verdict:
        return Verdict(
            is_commit=is_commit,
            why=why,
            by=by,
            prepared=tuple(self._named("prepared")),
            late=tuple(self._named("late")),
            failed={**self._named("failed"), **self._named("gone"), **self._named("refused")},
        )


def refusal(name: str, decision: FleetDecision) -> VersionRefused:
    """Return the error for a version that was withdrawn."""
    by = f" by subscriber {decision.by[:8]}" if decision.by else ""
    what = "refused" if decision.by else "withdrawn"
    return VersionRefused(
        f"version {decision.version} of {name!r} was {what}{by}: {decision.why}",
        version=decision.version,
        member=decision.by,
        reason=decision.why,
        hint="the previous version stays live, so publish a later version",
    )


# -- The wait of a subscriber that has prepared a version.

Question = Literal["coordinator", "hub"]
"""The process to ask next. A question to the hub is a proposal to withdraw, and the hub answers with the recorded
decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionReply:
    """An answer to a question, or the absence of an answer."""

    at: float
    """Time of the answer in seconds, by a clock that never goes back."""
    decision: FleetDecision | None = None
    kind: Literal["open", "gone", "silent", "past"] = "open"
    """The state without a decision. `open`: there is none yet. `gone`: the process is gone. `silent`: it did not
    answer. `past`: later versions are already decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """The end of a wait without a decision."""

    is_past: bool
    """Whether later versions are decided, so that this one will not be."""


def learn(
    begun: float, *, limit_s: float, stall_s: float
) -> Generator[Question, DecisionReply, FleetDecision | Undecided]:
    """Ask until the decision is known or cannot be learned. This generator yields questions and receives replies.

    Args:
        begun: start time in seconds.
        limit_s: seconds during which the coordinator may answer that there is no decision.
        stall_s: seconds during which the coordinator, and then the hub, may be silent.
    """
    answered = begun
    while True:
        reply = yield "coordinator"
        if reply.decision is not None:
            return reply.decision
        if reply.kind == "open":
            answered = reply.at
            if reply.at - begun <= limit_s:
                continue
        # A silent coordinator may be about to commit, so it has until the stall deadline.
        elif reply.kind == "silent" and reply.at - answered <= stall_s:
            continue
        reply = yield "hub"
        if reply.decision is not None:
            return reply.decision
        if reply.kind == "past":
            return Undecided(is_past=True)
        if reply.at - max(answered, begun) > stall_s or reply.at - begun > limit_s + stall_s:
            return Undecided(is_past=False)
