"""How a trainer's ranks agree. Only one epoch at a time publishes under a name, and its rank 0 decides on versions.

An epoch is identified by the member id of its rank 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from penstock.errors import ConfigError, NotFound, PeerLost, SourceStalled
from penstock.hub.messages import SyncMember
from penstock.sync.commit.outcome import Open, Reported, of_decision
from penstock.sync.membership import Membership
from penstock.sync.messages import Decision
from penstock.waits import jitter


def claim(membership: Membership) -> None:
    """Claim the name as rank 0. Raise ConfigError if an earlier group is alive, or SourceStalled if it stays listed."""
    # The hub forgets a member without heartbeats after its TTL. The stall deadline covers a slow or restarted hub.
    within_s = membership.member.registration.welcome.ttl_s + membership.stall_s
    deadline = time.monotonic() + within_s
    # Last heartbeat of each other group at the time when this rank first saw the group.
    first_seen: dict[str, float] = {}
    while True:
        others = _earlier(membership, membership.look())
        for other in others:
            # A group with a new heartbeat is alive. The host of a group without heartbeats may have died, so wait.
            if other.seen > first_seen.setdefault(other.member, other.seen):
                raise _taken(membership.name, other)
        if not others:
            return
        if time.monotonic() > deadline:
            raise SourceStalled(
                f"{others[0].called} holds the name {membership.name!r} and has been silent for {within_s:g} s",
                uri=f"penstock:{others[0].member}",
                hint="terminate that process, or publish under a different name",
            )
        _pause(membership)


def _pause(membership: Membership) -> None:
    # Hundreds of ranks start together, so jitter spreads their requests to the hub.
    time.sleep(membership.timing.group_pause_s * jitter(0.75, 1.25))


def check_alone(membership: Membership) -> None:
    """Raise ConfigError if an earlier group that is alive publishes the name. Do nothing if the hub is unavailable."""
    # If two groups could not detect each other at the start, the later group must stop.
    for other in _earlier(membership, membership.look()):
        raise _taken(membership.name, other)


def _taken(name: str, other: SyncMember) -> ConfigError:
    message = f"{name!r} is already published by {other.called} (member {other.member[:8]})"
    return ConfigError(message, hint="close that publisher, or publish under a different name")


def join(membership: Membership, rank: int, world_size: int, now: str) -> str:
    """Return the epoch for a rank above 0: `now` if its rank 0 is alive, or else the newest epoch that lacks this rank.

    Raise ConfigError if every epoch already has this rank, or SourceStalled if no rank 0 joined.
    """
    stall_s = membership.stall_s
    deadline = time.monotonic() + stall_s
    while True:
        members = membership.look()
        zeros = [member for member in members if member.state.side == "publisher" and member.state.rank == 0]
        if any(zero.member == now for zero in zeros):
            return now
        # Ranks of an old trainer must not mix with a restarted trainer of a different size.
        same = [zero for zero in zeros if zero.state.world_size == world_size and zero.state.epoch == zero.member]
        rivals = []
        # Try the newest epoch first, because the hub lists a restarted trainer twice until it drops the old epoch.
        for zero in sorted(same, key=lambda zero: -zero.since):
            rival = _holder(membership, members, zero.member, rank)
            if rival is None and not membership.is_gone(zero):
                return zero.member
            if rival is not None:
                rivals.append(rival)
        if time.monotonic() > deadline:
            if rivals:
                message = f"rank {rank} of {membership.name!r} is already published by {rivals[0].called}"
                raise ConfigError(message, hint="pass a different rank in every process of the trainer")
            message = f"no rank 0 of {world_size} ranks published {membership.name!r} in {stall_s:g} s"
            hint = "start all ranks of the trainer with the same world_size, including rank 0"
            raise SourceStalled(message, hint=hint)
        _pause(membership)


def begins_after(membership: Membership, epoch: str, rank: int) -> int:
    """Ask rank 0 for its last version, on a rank other than 0. This rank then publishes only higher versions."""
    stall_s, wait_s = membership.stall_s, membership.timing.decision_wait_s
    deadline = time.monotonic() + stall_s
    while True:
        try:
            return membership.ask(epoch, lambda sync_client: sync_client.begins_after(rank, wait_s))
        except NotFound as error:
            if time.monotonic() > deadline:
                message = f"rank 0 of {membership.name!r} did not begin to publish within {stall_s:g} s"
                raise SourceStalled(message, uri=f"penstock:{epoch}") from error
            _pause(membership)


class FirstVersions:
    """The version that each rank's first version must exceed, held by rank 0 for all ranks. Thread-safe."""

    def __init__(self, newest: Callable[[], int]) -> None:
        self._newest = newest
        self._changed = threading.Condition()
        self._latest: int | None = None
        self._members: dict[int, str] = {}

    def begin(self, latest: int) -> None:
        """Set the newest version that members outside this group have."""
        with self._changed:
            self._latest = latest
            self._changed.notify_all()

    def of(self, rank: int, member: str, wait_s: float) -> int:
        """Return the version that a process must exceed. Raise NotFound if rank 0 does not own the name yet."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._latest is not None, wait_s) or self._latest is None:
                raise NotFound("rank 0 does not own the name yet")
            # Start a replacement after rank 0's newest version, because the replaced process may have published it.
            is_first = self._members.setdefault(rank, member) == member
            return self._latest if is_first else max(self._latest, self._newest())


def decided(membership: Membership, epoch: str, version: int) -> Reported:
    """Request rank 0's final outcome of a version. Raise PeerLost or SourceStalled if rank 0 sends none."""
    stall_s, wait_s = membership.stall_s, membership.timing.decision_wait_s
    since = time.monotonic()
    while True:
        try:
            reply: Decision = membership.ask(
                epoch, lambda sync_client: sync_client.decision(version, wait_s), channel="decision"
            )
        except PeerLost as error:
            raise PeerLost(f"rank 0 of the publishers is gone: {error.message}", uri=error.uri) from error
        outcome = of_decision(reply)
        if not isinstance(outcome, Open):
            return outcome
        # Rank 0 enforces the deadlines of a version that has begun, and ends its ballot if it learns no outcome.
        if outcome.is_begun:
            since = time.monotonic()
        elif time.monotonic() - since > stall_s:
            raise SourceStalled(
                f"rank 0 did not begin version {version} within {stall_s:g} s, or learned no outcome of it",
                uri=f"penstock:{epoch}",
                hint="publish the same versions on all ranks",
            )


def _holder(membership: Membership, members: Sequence[SyncMember], epoch: str, rank: int) -> SyncMember | None:
    for member in members:
        is_same = (member.state.side, member.state.epoch, member.state.rank) == ("publisher", epoch, rank)
        if is_same and member.member != membership.member.id and not membership.is_gone(member):
            return member
    return None


def _earlier(membership: Membership, members: Sequence[SyncMember]) -> list[SyncMember]:
    mine = next(
        ((member.since, member.member) for member in members if member.member == membership.member.id),
        (float("inf"), ""),
    )
    zeros = [member for member in members if member.state.side == "publisher" and member.state.rank == 0]
    others = [zero for zero in zeros if zero.member != membership.member.id and (zero.since, zero.member) < mine]
    return [zero for zero in others if not membership.is_gone(zero)]
