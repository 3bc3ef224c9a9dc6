"""A subscriber's rules: which process to ask for an outcome, when to stop asking, and which outcomes it knows."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.sync.commit.outcome import Committed, Decided, Granted, NotYet, Open, Outcome, Unknown, Withdrawn

_MAX_KNOWN = 64
"""Number of stored withdrawals. A withdrawn version is past long before its withdrawal is dropped."""


class Inquiry(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared subscriber's wait for the outcome of a version. It goes live only if the wait ends in `Committed`."""

    begun: float
    limit_s: float
    stall_s: float
    last_reply: float
    """Time of the coordinator's last reply, or of the beginning."""
    question: Literal["coordinator", "hub"] = "coordinator"
    """The process to ask next. Asking the hub proposes a withdrawal, and the hub returns the recorded outcome."""

    def after(self, reply: Outcome, at: float) -> Inquiry | Committed | Withdrawn | Unknown:
        """Return the wait after a reply, or its end. `Unknown` as a reply means that the process did not reply."""
        if isinstance(reply, Decided):
            return reply
        if self.question == "coordinator":
            if isinstance(reply, Unknown):
                # Ask again, because a coordinator that does not reply may be about to commit.
                last_reply, is_again = self.last_reply, at - self.last_reply <= self.stall_s
            else:
                # Rank 0 forgets a version after many later versions, so an unknown version is asked of the hub.
                is_begun = not isinstance(reply, Open) or reply.is_begun
                last_reply = at if is_begun else self.last_reply
                is_again = is_begun and at - self.begun <= self.limit_s
            question: Literal["coordinator", "hub"] = "coordinator" if is_again else "hub"
            return msgspec.structs.replace(self, last_reply=last_reply, question=question)
        if isinstance(reply, Unknown) and reply.is_past:
            return reply
        if at - self.last_reply > self.stall_s or at - self.begun > self.limit_s + self.stall_s:
            return Unknown()
        return msgspec.structs.replace(self, question="coordinator")


class KnownOutcomes(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes that a subscriber knows. Immutable, so that other threads may read it."""

    newest: Decided | None = None
    """The outcome that heartbeats report, for a hub that lost its state."""
    withdrawals: tuple[Withdrawn, ...] = ()
    """The last known withdrawals, which include versions that failed a check here."""

    def noted(self, outcome: Decided) -> KnownOutcomes:
        """Return the known outcomes and this one. A withdrawal counts even if the fleet commits the version later."""
        if isinstance(outcome, Committed) or self.withdrawn(outcome.epoch, outcome.version) is not None:
            return msgspec.structs.replace(self, newest=outcome)
        return KnownOutcomes(newest=outcome, withdrawals=(*self.withdrawals, outcome)[-_MAX_KNOWN:])

    def withdrawn(self, epoch: str, version: int) -> Withdrawn | None:
        """Return the withdrawal of a version, if it is known."""
        return next((one for one in self.withdrawals if (one.epoch, one.version) == (epoch, version)), None)

    def refused(self, outcome: NotYet | Withdrawn | Granted) -> Withdrawn | None:
        """Return the withdrawal of the version in a planner's reply. A withdrawn version is never read again."""
        return outcome if isinstance(outcome, Withdrawn) else self.withdrawn(outcome.epoch, outcome.version)

    def is_behind(self, version: int) -> bool:
        """Return whether the fleet has committed a version above the live one."""
        return isinstance(self.newest, Committed) and self.newest.version > version
