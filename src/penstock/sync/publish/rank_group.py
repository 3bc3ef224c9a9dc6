"""Membership of publisher ranks in a run; only one run publishes a name at a time.

In: the members of the sync. Out: the run of a rank, which is the member id of its rank 0; errors that name the earlier
group.
Not here: versions (`publisher`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from penstock.errors import ConfigError, PeerLost, SourceStalled
from penstock.hub.sync_messages import Decision, SyncMember
from penstock.sync.membership import Membership

# With jitter below: hundreds of ranks start together, and would ask the hub in step.
_LOOK_S = 0.2
ASK_S = 1.0
"""How long another rank waits for rank 0's decision before it asks again."""


def claim(membership: Membership) -> str:
    """As rank 0, claim the name for this group, and return its run.

    An earlier group whose process is gone does not count; one that is silent counts until the hub forgets it.

    Raises:
        ConfigError: another group publishes the name, and lives. HubUnavailable: the hub does not answer.
    """
    heard: dict[str, float] = {}
    while True:
        others = _earlier(membership, membership.look())
        for other in others:
            # An earlier rank 0 that still beats lives and keeps the name. One that is listed but does not beat may be
            # a host that died without a word: wait until the hub drops it.
            if other.seen > heard.setdefault(other.member, other.seen):
                raise taken(membership.name, other)
        if not others:
            return membership.member.id
        time.sleep(_LOOK_S * random.uniform(0.75, 1.25))


def check_alone(membership: Membership) -> None:
    """Raise ConfigError if another live group publishes the name; return if there is none, or the hub is away."""
    for other in _earlier(membership, membership.look()):
        raise taken(membership.name, other)


def taken(name: str, other: SyncMember) -> ConfigError:
    """Return the error for a name that another group publishes."""
    message = f"{name!r} is already published by {other.called} (member {other.member[:8]})"
    return ConfigError(message, hint="close that publisher, or publish under another name")


def join(membership: Membership, rank: int, world_size: int, now: str, stall_s: float) -> str:
    """As another rank, return the run to belong to: `now` while its rank 0 lives, else the newest without this rank.

    Raises:
        ConfigError: every run has this rank already. SourceStalled: no rank 0 came for `stall_s`.
    """
    deadline = time.monotonic() + stall_s
    while True:
        members = membership.look()
        zeros = [member for member in members if member.state.side == "publisher" and member.state.rank == 0]
        if any(zero.member == now for zero in zeros):
            return now
        # By world_size too: ranks of an old trainer that was restarted with another size must not mix with the new.
        same = [zero for zero in zeros if zero.state.world_size == world_size and zero.state.run == zero.member]
        rivals = []
        for zero in sorted(same, key=lambda one: -one.since):
            rival = _holder(membership, members, zero.member, rank)
            if rival is None and not membership.is_gone(zero):
                return zero.member
            rivals += [rival] if rival is not None else []
        if time.monotonic() > deadline:
            if rivals:
                raise ConfigError(
                    f"rank {rank} of {membership.name!r} is already published by {rivals[0].called}",
                    hint="give every process of the trainer its own rank",
                )
            hint = "start all ranks of the trainer with the same world_size, rank 0 among them"
            raise SourceStalled(
                f"no rank 0 of {world_size} ranks published {membership.name!r} in {stall_s:g} s", hint=hint
            )
        time.sleep(_LOOK_S * random.uniform(0.75, 1.25))


def decided(membership: Membership, run: str, version: int, stall_s: float) -> Decision:
    """As another rank, return rank 0's decision about a version.

    Raises:
        PeerLost: rank 0 is gone. SourceStalled: it did not begin the version for `stall_s`.
    """
    since = time.monotonic()
    while True:
        try:
            decision = membership.ask(run, lambda sync_client: sync_client.decision(version, ASK_S), channel="decision")
        except PeerLost as error:
            raise PeerLost(f"rank 0 of the publishers is gone: {error.message}", uri=error.uri) from error
        if decision.is_over:
            return decision
        # Once the version has begun, rank 0 itself enforces the deadline for its subscribers.
        if decision.is_begun:
            since = time.monotonic()
        elif time.monotonic() - since > stall_s:
            raise SourceStalled(
                f"rank 0 did not begin version {version} within {stall_s:g} s",
                uri=f"penstock:{run}",
                hint="all ranks must publish the same versions",
            )


def _holder(membership: Membership, members: Sequence[SyncMember], run: str, rank: int) -> SyncMember | None:
    """Return another live member that has this rank of a run."""
    for member in members:
        is_same = (member.state.side, member.state.run, member.state.rank) == ("publisher", run, rank)
        if is_same and member.member != membership.member.id and not membership.is_gone(member):
            return member
    return None


def _earlier(membership: Membership, members: Sequence[SyncMember]) -> list[SyncMember]:
    """Return the rank 0 of each earlier run whose process is not gone."""
    # The hub's order of arrival decides, then the id: two groups that start together agree on the first.
    mine = next(
        ((member.since, member.member) for member in members if member.member == membership.member.id),
        (float("inf"), ""),
    )
    zeros = [member for member in members if member.state.side == "publisher" and member.state.rank == 0]
    others = [zero for zero in zeros if zero.member != membership.member.id and (zero.since, zero.member) < mine]
    return [zero for zero in others if not membership.is_gone(zero)]
