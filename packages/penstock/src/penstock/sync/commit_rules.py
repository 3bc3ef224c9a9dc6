"""The decision on a version that a fleet commits as a whole: pure rules, without clocks, messages or threads.

In: what subscribers report of a version; answers of the coordinator and of the hub, with times. Out: a `Verdict`; for a
subscriber the next question, and at the end the decision or None.
Not here: messages and waiting (`publish.rank_group`, `receive.participant`), the hub's record (`hub.snapshot.decide`).

    1. subscribers stage a version, check it, and report: prepared, failed or refused
    2. rank 0 of the publishers, the coordinator, reaches a verdict (`Ballot.decide`): at the deadline at the latest
    3. commit: the hub records it before rank 0 tells any subscriber; the first proposal for a version stands
    4. a subscriber goes live only after it learned `committed`, from the coordinator or from the hub
    5. a subscriber whose coordinator is gone, or silent for the stall deadline, proposes to withdraw: the hub answers
       with what stands; a subscriber that learns nothing keeps its version

After step 3 a commit cannot be undone, and before it no subscriber is live: therefore all subscribers act alike.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from penstock.errors import VersionRefused
from penstock.hub.messages import FleetDecision

Stragglers = Literal["leave_out", "withdraw"]
"""`leave_out`: commit without subscribers that are late or failed. `withdraw`: commit with all, or not at all."""
Standing = Literal["waiting", "prepared", "failed", "gone", "late", "refused"]

MAX_REASON_CHARS = 1024
"""The limit of the messages' fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The state of one subscriber for a version."""

    standing: Standing = "waiting"
    why: str = ""
    is_checked: bool = False
    """Whether a check of the version passed there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The coordinator's decision, before it is recorded."""

    is_commit: bool
    by: str = ""
    """The subscriber that refused the version."""
    why: str = ""
    prepared: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    def decision(self, epoch: str, version: int) -> FleetDecision:
        """Return the verdict as the hub records it."""
        outcome: Literal["committed", "withdrawn"] = "committed" if self.is_commit else "withdrawn"
        return FleetDecision(epoch=epoch, version=version, outcome=outcome, by=self.by, why=self.why[:MAX_REASON_CHARS])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """The reports of all subscribers on one version. Immutable: every report makes a new ballot."""

    stragglers: Stragglers
    needs_check: bool = False
    """Whether the version needs one check that passed."""
    votes: Mapping[str, Vote] = field(default_factory=dict)

    @classmethod
    def of(cls, expected: Iterable[str], stragglers: Stragglers, *, needs_check: bool = False) -> Ballot:
        """Return the ballot of these subscribers."""
        votes = dict.fromkeys(sorted(expected), Vote())
        return cls(stragglers=stragglers, needs_check=needs_check, votes=votes)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Return the expected subscribers that have not reported."""
        return tuple(member for member, vote in self.votes.items() if vote.standing == "waiting")

    def reported(self, member: str, standing: Standing, why: str = "", *, is_checked: bool = False) -> Ballot:
        """Return the ballot after a report; of several reports of one subscriber the last counts."""
        before = self.votes.get(member)
        # A subscriber that joined later is not waited for; that it has the version, or refuses it, counts.
        if before is None and standing not in ("prepared", "refused"):
            return self
        # A bad version stays bad, whatever the subscriber reports of another attempt.
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
        """Return the verdict, or None while reports are awaited.

        Args:
            is_due: whether the deadline has passed.
        """
        named = self._named("refused")
        if named:
            member, why = next(iter(named.items()))
            return self._withdrawn(why, by=member)
        lacking = {**self._named("failed"), **self._named("gone"), **self._named("late")}
        if self.waiting:
            # With `withdraw` one failure decides: the rest need not go on staging.
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
            return self._withdrawn(f"no subscriber prepared it; {member[:8]}: {why}")
        if self.needs_check and prepared and not any(self.votes[member].is_checked for member in prepared):
            return self._withdrawn(
                "it was published with values for a check, and no prepared subscriber checks versions"
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
        hint="the version before stays live; publish a later version",
    )


# -- A subscriber that has prepared a version, and waits.

Question = Literal["coordinator", "hub"]
"""The process to ask next. The hub is asked by a proposal to withdraw; it answers with what stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionReply:
    """An answer to a question, or the lack of one."""

    at: float
    """The time of the answer, in seconds by any clock that does not go back."""
    decision: FleetDecision | None = None
    kind: Literal["open", "gone", "silent", "past"] = "open"
    """Without a decision: none is made yet; the process is gone; no answer; later versions are decided already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """The end of a wait without a decision."""

    is_past: bool
    """Whether later versions are decided: this one will not be."""


def learn(
    begun: float, *, limit_s: float, stall_s: float
) -> Generator[Question, DecisionReply, FleetDecision | Undecided]:
    """Ask until the decision is known, or cannot be learned. A generator: it yields questions and is sent replies.

    Args:
        begun: the time of the start.
        limit_s: how long the coordinator may answer that there is no decision.
        stall_s: how long the coordinator, and then the hub, may be silent.
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
        # A coordinator that is only silent may be about to commit: the stall deadline is what it has.
        elif reply.kind == "silent" and reply.at - answered <= stall_s:
            continue
        reply = yield "hub"
        if reply.decision is not None:
            return reply.decision
        if reply.kind == "past":
            return Undecided(is_past=True)
        if reply.at - max(answered, begun) > stall_s or reply.at - begun > limit_s + stall_s:
            return Undecided(is_past=False)
