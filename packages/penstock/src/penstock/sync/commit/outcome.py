"""The outcome of a version as one union, the terms on which a receiver may read it, and their messages.

`record` and the `to_` and `of_` functions convert to messages and back. No other module of `sync` reads the hub's
record of an outcome, which is `FleetDecision`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from penstock.errors import VersionRefused
from penstock.hub.messages import FleetDecision
from penstock.sync.messages import MAX_REASON_CHARS, Decision, PartReply


class _Counted(msgspec.Struct, frozen=True, kw_only=True):
    committed: tuple[str, ...] = ()
    """The subscribers that have the version, or that go live with it."""
    late: tuple[str, ...] = ()
    failed: Mapping[str, str] = msgspec.field(default_factory=dict)


class Open(_Counted, frozen=True, kw_only=True):
    """The version is not decided yet, or has no fleet-wide decision."""

    is_begun: bool = True
    """False if the coordinator does not know the version, because it has not begun or was forgotten."""


class Received(_Counted, frozen=True, kw_only=True):
    """Each subscriber went live independently, and the trainer waits for no more subscribers."""


class Committed(_Counted, frozen=True, kw_only=True):
    """The fleet commits the version. This is final once the hub has recorded it."""

    is_commit: ClassVar[bool] = True
    epoch: str
    version: int

    def record(self) -> FleetDecision:
        """Return the hub's record of the outcome."""
        return FleetDecision(epoch=self.epoch, version=self.version, outcome="committed")


class Withdrawn(_Counted, frozen=True, kw_only=True):
    """The version never goes live."""

    is_commit: ClassVar[bool] = False
    epoch: str
    version: int
    by: str = ""
    """The subscriber that refused the version. Empty if no single subscriber refused it."""
    why: str = ""

    def record(self) -> FleetDecision:
        """Return the hub's record of the outcome."""
        why = self.why[:MAX_REASON_CHARS]
        return FleetDecision(epoch=self.epoch, version=self.version, outcome="withdrawn", by=self.by, why=why)

    def error(self, name: str) -> VersionRefused:
        """Return the error for this version of the sync `name`."""
        by = f" by subscriber {self.by[:8]}" if self.by else ""
        what = "refused" if self.by else "withdrawn"
        return VersionRefused(
            f"version {self.version} of {name!r} was {what}{by}: {self.why}",
            version=self.version,
            member=self.by,
            reason=self.why,
            hint="the previous version stays live, so publish a later version",
        )


class Unknown(msgspec.Struct, frozen=True, kw_only=True):
    """No process returned the outcome."""

    is_past: bool = False
    """Whether later versions are already decided."""


Decided = Committed | Withdrawn
Reported = Open | Received | Committed | Withdrawn
"""The outcomes that the coordinator reports to other members."""
Outcome = Reported | Unknown


class LayoutNeeded(msgspec.Struct, frozen=True, kw_only=True):
    """The planner does not know the receiver's layout, so the receiver must send it."""


class NotYet(msgspec.Struct, frozen=True, kw_only=True):
    """There is no part yet, so the receiver must repeat its request."""

    why: str
    epoch: str = ""
    version: int = -1


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    """The terms on which a receiver may read a version, and the receiver's part of the plan."""

    epoch: str
    version: int = -1
    """Version number, or -1 for the publishers' next version."""
    key: str = ""
    part: bytes | None = None
    """None if the receiver has the part already or needs none."""
    decide_s: float | None = None
    """Maximum number of seconds until the fleet's decision. None means that the version may go live at once."""
    later: Withdrawn | None = None
    """A later version that was withdrawn."""
    check: bytes = b""


PartOutcome = LayoutNeeded | NotYet | Withdrawn | Granted
"""A planner's reply to a receiver's request for its part."""


def of_record(record: FleetDecision | None) -> Decided | None:
    """Convert the hub's record to an outcome. None means that there is no record."""
    match record:
        case FleetDecision(outcome="committed", epoch=epoch, version=version):
            return Committed(epoch=epoch, version=version)
        case FleetDecision(outcome="withdrawn", epoch=epoch, version=version):
            return Withdrawn(epoch=epoch, version=version, by=record.by, why=record.why)
    return None


def recorded(proposal: Decided, record: Decided | None) -> Decided | Unknown:
    """Return the outcome of a proposal to the hub. `record` is None if the hub did not reply.

    The hub's record is the outcome, because another proposal may have been first.
    """
    if record is None:
        # A withdrawal need not be recorded, because no subscriber goes live without a recorded commit.
        return Unknown() if proposal.is_commit else proposal
    committed = proposal.committed if record.is_commit else ()
    return msgspec.structs.replace(record, committed=committed, late=proposal.late, failed=proposal.failed)


def to_decision(outcome: Reported) -> Decision:
    """Convert the coordinator's outcome to its reply."""
    return Decision(
        is_over=not isinstance(outcome, Open),
        is_begun=not isinstance(outcome, Open) or outcome.is_begun,
        committed=outcome.committed,
        late=outcome.late,
        failed=dict(outcome.failed),
        fleet=outcome.record() if isinstance(outcome, Decided) else None,
    )


def of_decision(reply: Decision) -> Reported:
    """Convert the coordinator's reply to an outcome."""
    outcome = of_record(reply.fleet) or (Received() if reply.is_over else Open(is_begun=reply.is_begun))
    return msgspec.structs.replace(outcome, committed=reply.committed, late=reply.late, failed=reply.failed)


def to_part_reply(outcome: PartOutcome) -> PartReply:
    """Convert a planner's reply to a message."""
    match outcome:
        case LayoutNeeded():
            return PartReply(needs_layout=True)
        case NotYet(why=why, epoch=epoch, version=version):
            return PartReply(version=version, epoch=epoch, not_yet=why)
        case Withdrawn(epoch=epoch, version=version):
            return PartReply(version=version, epoch=epoch, refused=outcome.record())
        case Granted(later=later):
            # The other fields have the same names in the message.
            reply = msgspec.convert(outcome, PartReply, from_attributes=True)
            return msgspec.structs.replace(reply, withdrawn=None if later is None else later.record())


def of_part_reply(reply: PartReply) -> PartOutcome:
    """Convert a message to a planner's reply."""
    if reply.needs_layout:
        return LayoutNeeded()
    if isinstance(refused := of_record(reply.refused), Withdrawn):
        return refused
    if reply.not_yet:
        return NotYet(why=reply.not_yet, epoch=reply.epoch, version=reply.version)
    later = of_record(reply.withdrawn)
    granted = msgspec.convert(reply, Granted, from_attributes=True)
    return msgspec.structs.replace(granted, later=later if isinstance(later, Withdrawn) else None)
