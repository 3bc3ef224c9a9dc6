"""The outcomes of a request for a part, and their message."""

from __future__ import annotations

import msgspec
import pytest

from penstock.hub.messages import FleetDecision
from penstock.sync.commit.outcome import (
    Granted,
    LayoutNeeded,
    NotYet,
    PartOutcome,
    Withdrawn,
    of_part_reply,
    to_part_reply,
)
from penstock.sync.messages import PartReply

WITHDRAWN = Withdrawn(epoch="r", version=4, why="not finite")
DECISION = FleetDecision(epoch="r", version=4, outcome="withdrawn", why="not finite")


@pytest.mark.parametrize(
    ("outcome", "reply"),
    [
        (LayoutNeeded(), PartReply(needs_layout=True)),
        (NotYet(why="soon", epoch="r", version=3), PartReply(not_yet="soon", epoch="r", version=3)),
        (WITHDRAWN, PartReply(refused=DECISION, epoch="r", version=4)),
        (
            Granted(epoch="r", version=3, key="k", part=b"p", decide_s=1.5, later=WITHDRAWN, check=b"c"),
            PartReply(epoch="r", version=3, key="k", part=b"p", decide_s=1.5, withdrawn=DECISION, check=b"c"),
        ),
        (Granted(epoch="r"), PartReply(epoch="r")),
    ],
)
def test_plan_outcome_round_trips_through_message(outcome: PartOutcome, reply: PartReply) -> None:
    raw = msgspec.msgpack.encode(to_part_reply(outcome))
    assert raw == msgspec.msgpack.encode(reply)
    assert of_part_reply(msgspec.msgpack.decode(raw, type=PartReply)) == outcome


def test_withdrawal_takes_precedence_over_waiting() -> None:
    reply = PartReply(epoch="r", version=4, refused=DECISION, not_yet="soon", part=b"p")
    assert of_part_reply(reply) == WITHDRAWN
