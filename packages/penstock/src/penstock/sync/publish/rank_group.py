"""How a trainer's ranks agree. Only one epoch at a time publishes under a name, and its rank 0 decides on versions.

An epoch is identified by the member id of its rank 0.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from penstock.errors import Cancelled, ConfigError, HubUnavailable, NotFound, PeerLost, SourceStalled
from penstock.hub.messages import FleetDecision, SyncMember
from penstock.sync.commit_rules import Ballot, Standing, Stragglers, Verdict
from penstock.sync.membership import Membership, Whereabouts
from penstock.sync.messages import Decision, RankProgress
from penstock.timing import Timing
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


def decided(membership: Membership, epoch: str, version: int) -> Decision:
    """Request rank 0's decision on a version. Raise PeerLost or SourceStalled if rank 0 sends no decision."""
    stall_s, wait_s = membership.stall_s, membership.timing.decision_wait_s
    since = time.monotonic()
    while True:
        try:
            decision = membership.ask(
                epoch, lambda sync_client: sync_client.decision(version, wait_s), channel="decision"
            )
        except PeerLost as error:
            raise PeerLost(f"rank 0 of the publishers is gone: {error.message}", uri=error.uri) from error
        if decision.is_over:
            return decision
        # Wait without limit for a version that has begun, because rank 0 enforces the version's deadlines.
        if decision.is_begun:
            since = time.monotonic()
        elif time.monotonic() - since > stall_s:
            raise SourceStalled(
                f"rank 0 did not begin version {version} within {stall_s:g} s",
                uri=f"penstock:{epoch}",
                hint="publish the same versions on all ranks",
            )


def recorded(membership: Membership, decision: FleetDecision, within_s: float) -> FleetDecision:
    """Record a decision at the hub as rank 0. Return the recorded decision, which may be an earlier decision."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            standing = membership.member.decide(membership.name, decision).decision
            if standing is not None:
                return standing
        except HubUnavailable:
            if time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise HubUnavailable(f"the hub did not record a decision within {within_s:g} s")
        time.sleep(membership.timing.record_pause_s)


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


_KEPT = 8


class _Expected(msgspec.Struct):
    """A subscriber that a publish waits for."""

    progressed: float
    moved_bytes: int = -1


class CommitTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a two-phase commit. See `Publisher.publish`."""

    timeout_s: float
    stragglers: Stragglers
    needs_check: bool


class _VersionProgress(msgspec.Struct):
    """The subscribers' progress on a version. `cancelled` is the reason for a withdrawal. `fleet` is the decision."""

    expected: dict[str, _Expected]
    ballot: Ballot | None = None
    due: float = 0.0
    cancelled: str = ""
    fleet: FleetDecision | None = None
    committed: list[str] = msgspec.field(default_factory=list)
    late: list[str] = msgspec.field(default_factory=list)
    failed: dict[str, str] = msgspec.field(default_factory=dict)
    is_over: bool = False

    def decision(self) -> Decision:
        # Another thread encodes the response while these lists grow, so copy them.
        return Decision(
            is_over=self.is_over,
            is_begun=True,
            committed=tuple(self.committed),
            late=tuple(self.late),
            failed=dict(self.failed),
            fleet=self.fleet,
        )


class SubscriberProgress:
    """The progress of all subscribers, held by a publisher's rank 0. Thread-safe."""

    def __init__(self, timing: Timing | None = None) -> None:
        self._probe_s = (Timing() if timing is None else timing).probe_interval_s
        self._changed = threading.Condition()
        self._versions: OrderedDict[int, _VersionProgress] = OrderedDict()
        self._check: tuple[int, bytes] = (-1, b"")
        self.absent: set[str] = set()

    def begin(self, version: int, expected: Iterable[str]) -> None:
        """Begin to wait for the expected subscribers of a version."""
        now = time.monotonic()
        # Leave out subscribers that were late, because they would delay every version by the stall deadline.
        present = [member for member in expected if member not in self.absent]
        self._add(version, _VersionProgress({member: _Expected(now) for member in present}))

    def _add(self, version: int, progress: _VersionProgress) -> None:
        with self._changed:
            self._versions[version] = progress
            while len(self._versions) > _KEPT:
                self._versions.popitem(last=False)

    def begin_two_phase(self, version: int, expected: Iterable[str], terms: CommitTerms) -> None:
        """Begin to collect reports on a version with a two-phase commit."""
        now = time.monotonic()
        # With `withdraw` every subscriber counts, even a subscriber that was late before.
        voters = [member for member in expected if terms.stragglers == "withdraw" or member not in self.absent]
        ballot = Ballot.of(voters, terms.stragglers, needs_check=terms.needs_check)
        waiting = {member: _Expected(now) for member in voters}
        self._add(version, _VersionProgress(waiting, ballot=ballot, due=now + terms.timeout_s))

    def note_request(self, member: str) -> None:
        """Record a receiver's request for its part, which proves that the receiver is alive."""
        with self._changed:
            self.absent.discard(member)
            # Count the request as progress on every version, because a request need not name a version.
            for state in self._versions.values():
                if member in state.expected:
                    state.expected[member].progressed = time.monotonic()

    def note_progress(self, member: str, progress: RankProgress) -> None:
        """Record a receiver's progress report."""
        with self._changed:
            self.absent.discard(member)
            # A receiver that failed before it knew the version number reports -1.
            newest = next(reversed(self._versions), -1)
            state = self._versions.get(progress.version if progress.version >= 0 else newest)
            # Ignore reports after the decision, because other ranks may have acted on it.
            if state is None or state.is_over:
                return
            expected = state.expected.get(member)
            if state.ballot is not None and progress.outcome:
                # Subscribers of old releases report `committed`, but receive no version before the decision.
                standing: Standing = progress.outcome if progress.outcome in ("prepared", "refused") else "failed"
                state.ballot = state.ballot.reported(member, standing, progress.why, is_checked=progress.is_checked)
            elif progress.outcome == "failed":
                # A receiver may fail and then succeed within the same publish. The last report counts.
                state.failed[member] = progress.why
            elif progress.outcome:
                state.failed.pop(member, None)
                if member not in state.committed:
                    state.committed.append(member)
            # A report without new bytes is not progress, because the receiver's source may hang.
            elif expected is not None and progress.moved_bytes != expected.moved_bytes:
                expected.moved_bytes, expected.progressed = progress.moved_bytes, time.monotonic()
            if progress.outcome:
                state.expected.pop(member, None)
                self._changed.notify_all()

    def cancel(self, why: str) -> None:
        """Abort the wait for undecided versions. Versions with a two-phase commit are withdrawn."""
        with self._changed:
            for state in self._versions.values():
                state.cancelled = state.cancelled or why
            self._changed.notify_all()

    def wait_decision(self, version: int, *, whereabouts: Callable[[str], Whereabouts]) -> Verdict:
        """Wait for the verdict on a version with a two-phase commit, at most until its deadline."""
        with self._changed:
            state = self._versions[version]
        assert state.ballot is not None
        while True:
            with self._changed:
                now = time.monotonic()
                if state.cancelled:
                    return Verdict(is_commit=False, why=state.cancelled)
                verdict = state.ballot.decide(is_due=now >= state.due)
                if verdict is not None:
                    self.absent.update(verdict.late)
                    return verdict
                silent = self._silent_after(state, min(self._probe_s, state.due - now))
            for member in silent:
                place = whereabouts(member)
                with self._changed:
                    if place == "there" or state.expected.pop(member, None) is None:
                        continue
                    # A subscriber that left no longer votes. A dead subscriber counts as not prepared.
                    if place == "left":
                        state.ballot = state.ballot.without(member)
                    else:
                        state.ballot = state.ballot.reported(member, "gone", "its process is gone")

    def _silent_after(self, state: _VersionProgress, wait_s: float) -> list[str]:
        """Wait for a change. Return subscribers without recent progress, which the caller probes without the lock."""
        self._changed.wait(wait_s)
        silent_since = time.monotonic() - self._probe_s
        return [name for name, expected in state.expected.items() if expected.progressed < silent_since]

    def settle(self, version: int, verdict: Verdict, decision: FleetDecision) -> Decision:
        """From now on, reply to requests with the recorded decision on a version."""
        with self._changed:
            state = self._versions[version]
            state.fleet = decision
            state.is_over = True
            state.committed = list(verdict.prepared) if decision.outcome == "committed" else []
            state.late = list(verdict.late)
            state.failed = dict(verdict.failed)
            self._changed.notify_all()
            return state.decision()

    def decide_s(self, version: int) -> float | None:
        """Return the maximum seconds until the decision on a version, or None if no decision is pending."""
        with self._changed:
            state = self._versions.get(version)
            if state is None or state.ballot is None or state.is_over:
                return None
            return max(0.0, state.due - time.monotonic())

    def offer_check(self, version: int, values: bytes) -> None:
        """Store the values for checks of the newest version."""
        with self._changed:
            self._check = version, values

    def check_of(self, version: int) -> bytes:
        """Return the stored values for checks of a version, or empty bytes if no values are stored for the version."""
        with self._changed:
            return self._check[1] if self._check[0] == version else b""

    def refused(self, version: int) -> FleetDecision | None:
        """Return the decision that withdrew a version, or None."""
        with self._changed:
            state = self._versions.get(version)
            decision = None if state is None else state.fleet
            return decision if decision is not None and decision.outcome == "withdrawn" else None

    def wait(self, version: int, *, stall_s: float, is_gone: Callable[[str], bool]) -> Decision:
        """Wait until every expected subscriber has finished, left or stalled. Raise Cancelled after `cancel`."""
        with self._changed:
            state = self._versions[version]
        while True:
            with self._changed:
                if state.cancelled:
                    raise Cancelled(state.cancelled)
                now = time.monotonic()
                for member, expected in list(state.expected.items()):
                    if now - expected.progressed > stall_s:
                        del state.expected[member]
                        state.late.append(member)
                        self.absent.add(member)
                if not state.expected:
                    state.is_over = True
                    self._changed.notify_all()
                    return state.decision()
                silent = self._silent_after(state, min(self._probe_s, stall_s))
            for member in silent:
                if is_gone(member):
                    with self._changed:
                        if state.expected.pop(member, None) is not None:
                            state.failed[member] = "its process is gone"

    def decision(self, version: int, wait_s: float) -> Decision:
        """Return the decision when a version is decided, or the progress after `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                state = self._versions.get(version)
                remaining = deadline - time.monotonic()
                if (state is not None and state.is_over) or remaining <= 0:
                    return Decision(is_over=False) if state is None else state.decision()
                self._changed.wait(remaining)
