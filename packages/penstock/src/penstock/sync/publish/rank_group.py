"""The agreement between a trainer's ranks.

One epoch publishes a name at a time, and its rank 0 decides when a version ends.

The epoch is the member id of its rank 0.

    rank 0:       claim -> (check_alone -> SubscriberProgress.begin .. wait) for each version
    other ranks:  join  -> (join        -> decided: ask rank 0)              for each version
    first number: rank 0 finds the newest version of other members once, and tells each rank that joins
    all:          SubscriberProgress.begin_two_phase .. wait_decision -> record at the hub -> settle
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.errors import Cancelled, ConfigError, HubUnavailable, NotFound, PeerLost, SourceStalled
from penstock.hub.messages import FleetDecision, SyncMember
from penstock.sync.commit_rules import Ballot, Standing, Stragglers, Verdict
from penstock.sync.membership import Membership, Whereabouts
from penstock.sync.messages import Decision, RankProgress
from penstock.timing import Timing
from penstock.waits import jitter


def claim(membership: Membership) -> str:
    """As rank 0, claim the name for this group, and return its epoch.

    An earlier group whose process is gone does not count. A silent one counts until the hub forgets it.

    Raises:
        ConfigError: another group publishes the name and is alive.
        HubUnavailable: the hub does not answer.
        SourceStalled: the hub lists a silent group for longer than it should.
    """
    # The hub forgets a silent member after its TTL. The stall deadline covers a hub that is slow or was restarted.
    within_s = membership.member.welcome.ttl_s + membership.stall_s
    deadline = time.monotonic() + within_s
    # The last report of each other group to the hub, when this rank first saw it.
    first_seen: dict[str, float] = {}
    while True:
        others = _earlier(membership, membership.look())
        for other in others:
            # An earlier rank 0 that still sends heartbeats is alive and keeps the name. If it is listed but sends none,
            # its host may have died, so wait until the hub drops it.
            if other.seen > first_seen.setdefault(other.member, other.seen):
                raise taken(membership.name, other)
        if not others:
            return membership.member.id
        if time.monotonic() > deadline:
            raise SourceStalled(
                f"{others[0].called} holds the name {membership.name!r} and has been silent for {within_s:g} s",
                uri=f"penstock:{others[0].member}",
                hint="end that process, or publish under a different name",
            )
        _pause(membership)


def _pause(membership: Membership) -> None:
    # Add jitter, because hundreds of ranks start together and would ask the hub in lockstep.
    time.sleep(membership.timing.group_pause_s * jitter(0.75, 1.25))


def check_alone(membership: Membership) -> None:
    """Raise ConfigError if another live group publishes the name. Return if there is none, or if the hub is away."""
    # Check at every version, because two groups that could not see each other at the start must not both continue.
    for other in _earlier(membership, membership.look()):
        raise taken(membership.name, other)


def taken(name: str, other: SyncMember) -> ConfigError:
    """Return the error for a name that another group publishes."""
    message = f"{name!r} is already published by {other.called} (member {other.member[:8]})"
    return ConfigError(message, hint="close that publisher, or publish under a different name")


def join(membership: Membership, rank: int, world_size: int, now: str) -> str:
    """As another rank, return the epoch to join:

    `now` while its rank 0 is alive, and otherwise the newest without this rank.

    Raises:
        ConfigError: every epoch has this rank already.
        SourceStalled: no rank 0 joined within the stall deadline.
    """
    stall_s = membership.stall_s
    deadline = time.monotonic() + stall_s
    while True:
        members = membership.look()
        zeros = [member for member in members if member.state.side == "publisher" and member.state.rank == 0]
        if any(zero.member == now for zero in zeros):
            return now
        # Compare world_size too, because ranks of an old trainer must not mix with a restarted one of a different size.
        same = [zero for zero in zeros if zero.state.world_size == world_size and zero.state.epoch == zero.member]
        rivals = []
        # Take the newest first. A restarted trainer is listed twice until the hub drops the old epoch.
        for zero in sorted(same, key=lambda zero: -zero.since):
            rival = _holder(membership, members, zero.member, rank)
            if rival is None and not membership.is_gone(zero):
                return zero.member
            if rival is not None:
                rivals.append(rival)
        if time.monotonic() > deadline:
            if rivals:
                raise ConfigError(
                    f"rank {rank} of {membership.name!r} is already published by {rivals[0].called}",
                    hint="give every process of the trainer a different rank",
                )
            hint = "start all ranks of the trainer with the same world_size, rank 0 among them"
            raise SourceStalled(
                f"no rank 0 of {world_size} ranks published {membership.name!r} in {stall_s:g} s", hint=hint
            )
        _pause(membership)


def begins_after(membership: Membership, epoch: str, rank: int) -> int:
    """As another rank, ask rank 0 for the version above which this rank begins. See `FirstVersions`.

    Raises:
        PeerLost: rank 0 is gone.
        SourceStalled: rank 0 did not own the name within the stall deadline.
    """
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
    """The version above which each rank begins, kept by rank 0. Thread-safe.

    All ranks must begin with the same number, and only rank 0 can provide it. A rank that looked for itself could find
    a version that another rank of this group has just published, or miss the version of a member that left.

    Args:
        newest: returns the newest version that rank 0 has published.
    """

    def __init__(self, newest: Callable[[], int]) -> None:
        self._newest = newest
        self._changed = threading.Condition()
        self._latest: int | None = None
        # The process that asked first, for each rank.
        self._members: dict[int, str] = {}

    def begin(self, latest: int) -> None:
        """Set the newest version of all members outside this group."""
        with self._changed:
            self._latest = latest
            self._changed.notify_all()

    def of(self, rank: int, member: str, wait_s: float) -> int:
        """Return the version above which a process of a rank begins.

        Raises:
            NotFound: rank 0 has not begun within `wait_s` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._latest is not None, wait_s) or self._latest is None:
                raise NotFound("rank 0 does not own the name yet")
            # A later process of a rank replaces one that may have published everything that rank 0 has.
            is_first = self._members.setdefault(rank, member) == member
            return self._latest if is_first else max(self._latest, self._newest())


def decided(membership: Membership, epoch: str, version: int) -> Decision:
    """As another rank, return rank 0's decision about a version.

    Raises:
        PeerLost: rank 0 is gone.
        SourceStalled: rank 0 did not begin the version within the stall deadline.
    """
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
        # Once the version has begun, rank 0 enforces the deadline for its subscribers, which may be hours.
        if decision.is_begun:
            since = time.monotonic()
        elif time.monotonic() - since > stall_s:
            raise SourceStalled(
                f"rank 0 did not begin version {version} within {stall_s:g} s",
                uri=f"penstock:{epoch}",
                hint="publish the same versions on all ranks",
            )


def recorded(membership: Membership, decision: FleetDecision, within_s: float) -> FleetDecision:
    """As rank 0, record a decision at the hub, and return the recorded decision, which may be an earlier one.

    Raises:
        HubUnavailable: the hub did not answer. It may or may not have the decision.
    """
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
    """Return another live member with this rank in an epoch."""
    for member in members:
        is_same = (member.state.side, member.state.epoch, member.state.rank) == ("publisher", epoch, rank)
        if is_same and member.member != membership.member.id and not membership.is_gone(member):
            return member
    return None


def _earlier(membership: Membership, members: Sequence[SyncMember]) -> list[SyncMember]:
    """Return rank 0 of each earlier epoch whose process is not gone."""
    # The order of arrival at the hub decides, and then the id, so two groups that start together agree on the first.
    mine = next(
        ((member.since, member.member) for member in members if member.member == membership.member.id),
        (float("inf"), ""),
    )
    zeros = [member for member in members if member.state.side == "publisher" and member.state.rank == 0]
    others = [zero for zero in zeros if zero.member != membership.member.id and (zero.since, zero.member) < mine]
    return [zero for zero in others if not membership.is_gone(zero)]


_KEPT = 8
"""Number of versions whose decision other ranks may still request."""


@dataclass(slots=True)
class _Listener:
    """A subscriber for which a publish waits."""

    seen: float
    """Time of its last progress."""
    moved_bytes: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitTerms:
    """The terms of a two-phase commit. See `Publisher.publish`."""

    timeout_s: float
    stragglers: Stragglers
    needs_check: bool


@dataclass(slots=True)
class _Showing:
    """The state of a version while a publish waits for it."""

    waited: dict[str, _Listener]
    ballot: Ballot | None = None
    """The ballot of a version with a two-phase commit."""
    due: float = 0.0
    """Time at which the decision is due."""
    cancelled: str = ""
    """Why the version must be withdrawn now. Empty if there is no reason."""
    fleet: FleetDecision | None = None
    """The recorded decision."""
    committed: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    is_over: bool = False

    def decision(self) -> Decision:
        # Copy the lists, because they grow while another thread encodes the answer.
        return Decision(
            is_over=self.is_over,
            is_begun=True,
            committed=tuple(self.committed),
            late=tuple(self.late),
            failed=dict(self.failed),
            fleet=self.fleet,
        )


class SubscriberProgress:
    """The progress of all subscribers, kept by a publisher's rank 0. Thread-safe.

    Args:
        timing: waiting times.

    Attributes:
        absent: subscribers that were late and have not begun another update since. A publish does not wait for them.
    """

    def __init__(self, timing: Timing | None = None) -> None:
        self._probe_s = (Timing() if timing is None else timing).probe_interval_s
        self._changed = threading.Condition()
        self._shown: OrderedDict[int, _Showing] = OrderedDict()
        self._check: tuple[int, bytes] = (-1, b"")
        self.absent: set[str] = set()

    def begin(self, version: int, expected: Iterable[str]) -> None:
        """Begin waiting for the expected subscribers of a version."""
        now = time.monotonic()
        # Otherwise a subscriber that was late once would cost the trainer the stall deadline at every version.
        self._show(version, _Showing({member: _Listener(now) for member in expected if member not in self.absent}))

    def _show(self, version: int, showing: _Showing) -> None:
        with self._changed:
            self._shown[version] = showing
            while len(self._shown) > _KEPT:
                self._shown.popitem(last=False)

    def begin_two_phase(self, version: int, expected: Iterable[str], terms: CommitTerms) -> None:
        """Begin collecting reports on a version that the fleet commits as a whole."""
        now = time.monotonic()
        # With `withdraw` every subscriber counts, even one that was late before.
        voters = [member for member in expected if terms.stragglers == "withdraw" or member not in self.absent]
        ballot = Ballot.of(voters, terms.stragglers, needs_check=terms.needs_check)
        waited = {member: _Listener(now) for member in voters}
        self._show(version, _Showing(waited, ballot=ballot, due=now + terms.timeout_s))

    def note_request(self, member: str) -> None:
        """Record a receiver's request for its part, which shows that the receiver is alive."""
        with self._changed:
            self.absent.discard(member)
            # The request may ask for the newest version without a number, so it counts for every version.
            for showing in self._shown.values():
                if member in showing.waited:
                    showing.waited[member].seen = time.monotonic()

    def note_progress(self, member: str, progress: RankProgress) -> None:
        """Record a receiver's progress report."""
        with self._changed:
            self.absent.discard(member)
            # A receiver that failed before it knew the version number reports -1.
            newest = next(reversed(self._shown), -1)
            showing = self._shown.get(progress.version if progress.version >= 0 else newest)
            # A report after the decision changes nothing, because the other ranks may have acted on the decision.
            if showing is None or showing.is_over:
                return
            listener = showing.waited.get(member)
            if showing.ballot is not None and progress.outcome:
                self._vote(showing, member, progress)
            elif progress.outcome:
                showing.waited.pop(member, None)
                # A receiver may fail and then succeed within the same publish. The last report counts.
                showing.failed.pop(member, None)
                if progress.outcome == "failed":
                    showing.failed[member] = progress.why
                elif member not in showing.committed:
                    showing.committed.append(member)
                self._changed.notify_all()
            # A report without new bytes is not progress. Otherwise a publish would wait for ever for a receiver whose
            # source hangs.
            elif listener is not None and progress.moved_bytes != listener.moved_bytes:
                listener.moved_bytes, listener.seen = progress.moved_bytes, time.monotonic()

    def _vote(self, showing: _Showing, member: str, progress: RankProgress) -> None:
        """Record a report on a version with a two-phase commit. The caller holds the lock."""
        assert showing.ballot is not None
        # Subscribers with a release that does not know such versions would report `committed` when they have the bytes.
        # They are sent none before the decision.
        standing: Standing = progress.outcome if progress.outcome in ("prepared", "refused") else "failed"
        showing.ballot = showing.ballot.reported(member, standing, progress.why, is_checked=progress.is_checked)
        showing.waited.pop(member, None)
        self._changed.notify_all()

    def cannot_wait(self, member: str, version: int) -> None:
        """Record that a subscriber has no staging copy in which a version could wait for its decision."""
        why = "it cannot keep a version staged, because its mode is direct or its release is older"
        self.note_progress(member, RankProgress(version=version, outcome="failed", why=why))

    def cancel(self, why: str) -> None:
        """End the wait for undecided versions, and withdraw a version with a two-phase commit."""
        with self._changed:
            for showing in self._shown.values():
                showing.cancelled = showing.cancelled or why
            self._changed.notify_all()

    def wait_decision(self, version: int, *, whereabouts: Callable[[str], Whereabouts]) -> Verdict:
        """Return the verdict on a version with a two-phase commit, at its deadline at the latest."""
        with self._changed:
            showing = self._shown[version]
        assert showing.ballot is not None
        while True:
            with self._changed:
                now = time.monotonic()
                if showing.cancelled:
                    return Verdict(is_commit=False, why=showing.cancelled)
                verdict = showing.ballot.decide(is_due=now >= showing.due)
                if verdict is not None:
                    self.absent.update(verdict.late)
                    return verdict
                self._changed.wait(min(self._probe_s, showing.due - now))
                now = time.monotonic()
                silent = [name for name, listener in showing.waited.items() if now - listener.seen > self._probe_s]
            # Release the lock for this, as in `wait`.
            for member in silent:
                place = whereabouts(member)
                with self._changed:
                    if place == "there" or showing.waited.pop(member, None) is None:
                        continue
                    # A subscriber that signed off no longer takes part. A subscriber that died did not prepare the
                    # version.
                    if place == "left":
                        showing.ballot = showing.ballot.without(member)
                    else:
                        showing.ballot = showing.ballot.reported(member, "gone", "its process is gone")

    def settle(self, version: int, verdict: Verdict, decision: FleetDecision) -> Decision:
        """Answer requests with the recorded decision on a version from now on."""
        with self._changed:
            showing = self._shown[version]
            showing.fleet = decision
            showing.is_over = True
            # The hub may have recorded a withdrawal before this verdict.
            showing.committed = list(verdict.prepared) if decision.outcome == "committed" else []
            showing.late = list(verdict.late)
            showing.failed = dict(verdict.failed)
            self._changed.notify_all()
            return showing.decision()

    def decide_s(self, version: int) -> float | None:
        """Return the maximum number of seconds until the decision on a version, or None if it may go live at once."""
        with self._changed:
            showing = self._shown.get(version)
            if showing is None or showing.ballot is None or showing.is_over:
                return None
            return max(0.0, showing.due - time.monotonic())

    def offer_check(self, version: int, values: bytes) -> None:
        """Keep the values for checks of the newest version."""
        with self._changed:
            self._check = version, values

    def check_of(self, version: int) -> bytes:
        """Return the values for checks of a version. Empty if there are none, or if the version is past."""
        with self._changed:
            return self._check[1] if self._check[0] == version else b""

    def refused(self, version: int) -> FleetDecision | None:
        """Return the decision by which a version was withdrawn, or None if it was not."""
        with self._changed:
            showing = self._shown.get(version)
            decision = None if showing is None else showing.fleet
            return decision if decision is not None and decision.outcome == "withdrawn" else None

    def wait(self, version: int, *, stall_s: float, is_gone: Callable[[str], bool]) -> Decision:
        """Wait until every expected subscriber is done, is gone, or made no progress for `stall_s` seconds.

        Raises:
            Cancelled: `cancel` was called.
        """
        with self._changed:
            showing = self._shown[version]
        while True:
            with self._changed:
                if showing.cancelled:
                    raise Cancelled(showing.cancelled)
                now = time.monotonic()
                for member, listener in list(showing.waited.items()):
                    if now - listener.seen > stall_s:
                        del showing.waited[member]
                        showing.late.append(member)
                        self.absent.add(member)
                if not showing.waited:
                    showing.is_over = True
                    self._changed.notify_all()
                    return showing.decision()
                self._changed.wait(min(self._probe_s, stall_s))
                now = time.monotonic()
                # Probe only silent members, because a probe opens a connection and can take `Timing.alive_s`.
                silent = [name for name, listener in showing.waited.items() if now - listener.seen > self._probe_s]
            # Release the lock for this, because reports arrive during the probe. The member may be done by the time it
            # is removed.
            for member in silent:
                if is_gone(member):
                    with self._changed:
                        if showing.waited.pop(member, None) is not None:
                            showing.failed[member] = "its process is gone"

    def decision(self, version: int, wait_s: float) -> Decision:
        """Return the decision about a version when it is over, or its state after `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                showing = self._shown.get(version)
                left = deadline - time.monotonic()
                if (showing is not None and showing.is_over) or left <= 0:
                    return Decision(is_over=False) if showing is None else showing.decision()
                self._changed.wait(left)
