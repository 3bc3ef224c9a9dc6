"""The outcomes of a receiver's request for its part of the plan."""

from __future__ import annotations

import msgspec

from penstock.hub.messages import FleetDecision
from penstock.sync.messages import PartReply


class LayoutNeeded(msgspec.Struct, frozen=True, kw_only=True):
    """The planner does not know the receiver's layout, so the receiver must send it."""


class NotYet(msgspec.Struct, frozen=True, kw_only=True):
    """There is no part yet, so the receiver must repeat its request."""

    why: str
    epoch: str = ""
    version: int = -1


class Withdrawn(msgspec.Struct, frozen=True, kw_only=True):
    """The version was withdrawn and must not go live."""

    epoch: str
    version: int
    decision: FleetDecision


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
    later: FleetDecision | None = None
    check: bytes = b""


PartOutcome = LayoutNeeded | NotYet | Withdrawn | Granted


def encode_outcome(outcome: PartOutcome) -> PartReply:
    """Convert an outcome to a message."""
    match outcome:
        case LayoutNeeded():
            return PartReply(needs_layout=True)
        case NotYet(why=why, epoch=epoch, version=version):
            return PartReply(version=version, epoch=epoch, not_yet=why)
        case Withdrawn(epoch=epoch, version=version, decision=decision):
            return PartReply(version=version, epoch=epoch, refused=decision)
        case Granted():
            return PartReply(
                version=outcome.version,
                epoch=outcome.epoch,
                key=outcome.key,
                part=outcome.part,
                decide_s=outcome.decide_s,
                withdrawn=outcome.later,
                check=outcome.check,
            )


def decode_outcome(reply: PartReply) -> PartOutcome:
    """Convert a message to an outcome."""
    if reply.needs_layout:
        return LayoutNeeded()
    if reply.refused is not None:
        return Withdrawn(epoch=reply.epoch, version=reply.version, decision=reply.refused)
    if reply.not_yet:
        return NotYet(why=reply.not_yet, epoch=reply.epoch, version=reply.version)
    return Granted(
        epoch=reply.epoch,
        version=reply.version,
        key=reply.key,
        part=reply.part,
        decide_s=reply.decide_s,
        later=reply.withdrawn,
        check=reply.check,
    )
