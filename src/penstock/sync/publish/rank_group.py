"""Group the publisher ranks of one run, and let only one group publish a name.

In: the roster. Out: the run that a rank belongs to: the member id of its rank 0; errors that name the earlier group.
Not here: versions (`publisher`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from penstock.errors import ConfigError, PeerLost, SourceStalled
from penstock.hub.sync_messages import Decision, SyncMember
from penstock.sync.membership import Membership

_LOOK_S = 0.2
ASK_S = 1.0
"""How long another rank waits for rank 0's decision before it asks again."""


def claim(membership: Membership) -> str:
    """As rank 0, be the one group that publishes the name; our run.

    An earlier group that is gone is not waited for; one that fell silent until the hub has forgotten it is over.

    Raises:
        ConfigError: another group publishes the name, and lives. HubUnavailable: the hub does not answer.
    """
    heard: dict[str, float] = {}
    while True:
        others = _earlier(membership, membership.look())
        for other in others:
            if other.seen > heard.setdefault(other.member, other.seen):
                raise taken(membership.name, other)
        if not others:
            return membership.member.id
        time.sleep(_LOOK_S * random.uniform(0.75, 1.25))


def check_alone(membership: Membership) -> None:
    """Raise ConfigError if another group publishes the name, and lives; nothing where the hub is away."""
    for other in _earlier(membership, membership.look()):
        raise taken(membership.name, other)


def taken(name: str, other: SyncMember) -> ConfigError:
    """Return the error for a name that another group publishes."""
    message = f"{name!r} is published by {other.called} (member {other.member[:8]}) already"
    return ConfigError(message, hint="close that publisher, or publish under another name")


def join(membership: Membership, rank: int, world_size: int, now: str, stall_s: float) -> str:
    """As another rank, the run to belong to: the one we are in while its rank 0 lives, else the newest with our place.

    Raises:
        ConfigError: every run has a rank like us. SourceStalled: no rank 0 came for `stall_s`.
    """
    deadline = time.monotonic() + stall_s
    while True:
        members = membership.look()
        zeros = [one for one in members if one.state.side == "publisher" and one.state.rank == 0]
        if any(one.member == now for one in zeros):
            return now
        same = [one for one in zeros if one.state.world_size == world_size and one.state.run == one.member]
        rivals = []
        for zero in sorted(same, key=lambda one: -one.since):
            rival = _holder(membership, members, zero.member, rank)
            if rival is None and not membership.is_gone(zero):
                return zero.member
            rivals += [rival] if rival is not None else []
        if time.monotonic() > deadline:
            if rivals:
                raise ConfigError(f"rank {rank} of {membership.name!r} is {rivals[0].called} already")
            hint = "start all ranks of the trainer with the same world_size, rank 0 among them"
            raise SourceStalled(
                f"no rank 0 of {world_size} ranks published {membership.name!r} in {stall_s:g} s", hint=hint
            )
        time.sleep(_LOOK_S * random.uniform(0.75, 1.25))


def decided(membership: Membership, run: str, version: int, stall_s: float) -> Decision:
    """As another rank, what rank 0 decides of a version.

    Raises:
        PeerLost: it is gone. SourceStalled: it did not begin the version for `stall_s`.
    """
    since = time.monotonic()
    while True:
        try:
            said = membership.ask(run, lambda sync_client: sync_client.decision(version, ASK_S), line="decision")
        except PeerLost as error:
            raise PeerLost(f"rank 0 of the publishers is gone: {error.message}", uri=error.uri) from error
        if said.is_over:
            return said
        if said.is_begun:
            since = time.monotonic()
        elif time.monotonic() - since > stall_s:
            raise SourceStalled(f"rank 0 does not publish version {version}", uri=f"penstock:{run}")


def _holder(membership: Membership, members: Sequence[SyncMember], run: str, rank: int) -> SyncMember | None:
    """Return another member that has this rank of a run."""
    for one in members:
        is_same = (one.state.side, one.state.run, one.state.rank) == ("publisher", run, rank)
        if is_same and one.member != membership.member.id and not membership.is_gone(one):
            return one
    return None


def _earlier(membership: Membership, members: Sequence[SyncMember]) -> list[SyncMember]:
    """Rank 0 of other runs that came before us and are not gone."""
    mine = next(((one.since, one.member) for one in members if one.member == membership.member.id), (float("inf"), ""))
    zeros = [one for one in members if one.state.side == "publisher" and one.state.rank == 0]
    others = [one for one in zeros if one.member != membership.member.id and (one.since, one.member) < mine]
    return [one for one in others if not membership.is_gone(one)]
