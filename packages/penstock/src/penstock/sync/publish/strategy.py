"""Three ways to publish a version, with one interface: `show`, `wait`, `withdraw`.

Live:      receivers read the parameters. `wait` returns when they are done or late
Snapshot:  receivers read a copy. Nothing waits for them
TwoPhase:  one of the above. `wait` returns when the fleet has committed or withdrawn the version
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from penstock.errors import HubUnavailable, PenstockError, StaleDescriptor
from penstock.hub.messages import FleetDecision
from penstock.sync.commit_rules import Verdict
from penstock.sync.membership import Membership
from penstock.sync.messages import Decision
from penstock.sync.publish import rank_group
from penstock.sync.publish.announcements import Announcements
from penstock.sync.publish.rank_group import CommitTerms, SubscriberProgress
from penstock.sync.publish.registered import Registered


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainerRank:
    """The parts of a rank that every strategy uses."""

    rank: int
    membership: Membership
    registered: Registered
    announcements: Announcements
    progress: SubscriberProgress
    """The progress of the subscribers, which rank 0 collects."""

    @property
    def stall_s(self) -> float:
        """Return the deadline for progress."""
        return self.membership.stall_s

    def subscribers(self) -> list[str]:
        """Return the subscribers whose reports count. Call it before the version is announced."""
        # A receiver's first report must find a version that expects it.
        members = self.membership.look(max_age_s=self.membership.timing.group_list_s)
        return [other.member for other in members if other.state.side == "subscriber"]

    def decided(self, version: int) -> Decision:
        """As another rank, return rank 0's decision."""
        decision = rank_group.decided(self.membership, self.announcements.epoch, version)
        if decision.fleet is not None:
            self.announcements.decided(decision.fleet)
        return decision

    def end_reads(self) -> None:
        """End all reads of the version from this rank, and tell the fleet."""
        # If the publisher was closed, its registrations and reads have ended already.
        with contextlib.suppress(StaleDescriptor):
            self.registered.local_version.fence()
        self.announcements.end()


Show = Callable[[TrainerRank, int, Mapping[str, str]], float]
"""Lets receivers read a version with its metadata, and returns the seconds of the copy."""


class Strategy(Protocol):
    """A way to publish a version. Its methods are called in this order, once for each version."""

    is_two_phase: bool
    """Whether the fleet decides about the version."""

    def show(self, version: int, metadata: Mapping[str, str]) -> float:
        """Let receivers read a version, and return the seconds of its copy."""
        ...

    def wait(self, version: int) -> Decision:
        """Wait for the outcome of the version and return it."""
        ...

    def withdraw(self) -> None:
        """End all reads of the version from this rank."""
        ...


class Live:
    """A strategy in which receivers read the parameters and the trainer waits for them."""

    is_two_phase = False

    def __init__(self, rank: TrainerRank) -> None:
        self._rank = rank

    def show(self, version: int, metadata: Mapping[str, str]) -> float:
        """See `Strategy`."""
        if self._rank.rank == 0:
            self._rank.progress.begin(version, self._rank.subscribers())
        return show_parameters(self._rank, version, metadata)

    def wait(self, version: int) -> Decision:
        """Wait until every subscriber that was known at the start is done, late or gone."""
        rank = self._rank
        if rank.rank != 0:
            return rank.decided(version)
        is_gone = partial(rank.membership.has_left, max_age_s=rank.membership.timing.group_list_s)
        return rank.progress.wait(version, stall_s=rank.stall_s, is_gone=is_gone)

    def withdraw(self) -> None:
        """See `Strategy`."""
        self._rank.end_reads()


class Snapshot:
    """A strategy in which receivers read a copy while training continues."""

    is_two_phase = False

    def __init__(self, rank: TrainerRank) -> None:
        self._rank = rank

    def show(self, version: int, metadata: Mapping[str, str]) -> float:
        """See `Strategy`."""
        return show_copy(self._rank, version, metadata)

    def wait(self, version: int) -> Decision:
        """Return at once, because receivers read the copy later and there is no outcome yet."""
        return Decision(is_over=True)

    def withdraw(self) -> None:
        """See `Strategy`."""
        self._rank.end_reads()


class TwoPhase:
    """A strategy in which all subscribers prepare a version, and rank 0 decides whether all of them go live or none.

    Args:
        rank: this rank.
        show: how receivers read the version: `show_parameters` or `show_copy`.
        terms: terms of the decision.
    """

    is_two_phase = True

    def __init__(self, rank: TrainerRank, show: Show, terms: CommitTerms) -> None:
        self._rank = rank
        self._show = show
        self._terms = terms

    def show(self, version: int, metadata: Mapping[str, str]) -> float:
        """Let receivers read a version. If this fails, withdraw the version, so that no subscriber waits for it."""
        if self._rank.rank == 0:
            self._rank.progress.begin_two_phase(version, self._rank.subscribers(), self._terms)
        with self._withdrawn_on_error(version):
            return self._show(self._rank, version, metadata)

    def wait(self, version: int) -> Decision:
        """Return the decision on the version, as the hub recorded it.

        Raises:
            HubUnavailable: it is unknown whether the hub recorded the commit.
            PeerLost, SourceStalled: another rank lost rank 0.
        """
        rank = self._rank
        if rank.rank != 0:
            return rank.decided(version)
        whereabouts = partial(rank.membership.whereabouts, max_age_s=rank.membership.timing.group_list_s)
        with self._withdrawn_on_error(version):
            verdict = rank.progress.wait_decision(version, whereabouts=whereabouts)
        return self._settle(version, verdict, self._recorded(version, verdict))

    def withdraw(self) -> None:
        """See `Strategy`."""
        self._rank.end_reads()

    def _recorded(self, version: int, verdict: Verdict) -> FleetDecision:
        """Return the decision that the hub recorded."""
        rank = self._rank
        proposal = verdict.decision(rank.announcements.epoch, version)
        try:
            # A withdrawal needs no record, because without a recorded commit no subscriber goes live. It is recorded
            # for operators, and for subscribers that cannot reach this rank.
            return rank_group.recorded(rank.membership, proposal, rank.stall_s if verdict.is_commit else 0.0)
        except PenstockError as error:
            if not verdict.is_commit:
                return proposal
            name = rank.membership.name
            message = f"it is unknown whether version {version} of {name!r} is committed: {error.message}"
            hint = "publish the next version. Until then subscribers keep the previous one, or learn from the hub"
            raise HubUnavailable(message, hint=hint) from error

    def _settle(self, version: int, verdict: Verdict, standing: FleetDecision) -> Decision:
        decision = self._rank.progress.settle(version, verdict, standing)
        self._rank.announcements.decided(standing)
        return decision

    @contextlib.contextmanager
    def _withdrawn_on_error(self, version: int) -> Iterator[None]:
        """As rank 0, withdraw the version if the block fails."""
        try:
            yield
        except BaseException as error:
            if self._rank.rank == 0:
                verdict = Verdict(is_commit=False, why=f"rank 0 failed: {str(error) or type(error).__name__}")
                # The number is used up, because a subscriber may know that it was withdrawn.
                self._rank.announcements.version = version
                self._settle(version, verdict, verdict.decision(self._rank.announcements.epoch, version))
            raise


def show_parameters(rank: TrainerRank, version: int, metadata: Mapping[str, str]) -> float:
    """Let receivers read the parameters, and then the tagged rows when they are filled."""
    local_version, offer = rank.registered.local_version, rank.registered.offer
    local_version.begin(version, metadata)
    local_version.ready(offer.plain_rows)
    # A map that is created while the device still fills the rows marks them as not ready. Receivers would then request
    # digests before every read.
    local_version.settle(rank.stall_s)
    rank.announcements.begin(version)
    # Fill after the announcement, so that receivers read the plain rows while the tagged ones are quantised. A reader
    # waits only for the tagged rows that it needs, because `fill` reports rows after the device has written them.
    ready = partial(local_version.ready, is_written=True)
    offer.fill(version, rank.announcements.epoch, ready, stall_s=rank.stall_s)
    return 0.0


def show_copy(rank: TrainerRank, version: int, metadata: Mapping[str, str]) -> float:
    """Copy the parameters and let receivers read the copy. Return the seconds of the copy."""
    registered, offer, epoch = rank.registered, rank.registered.offer, rank.announcements.epoch
    assert registered.snapshot is not None
    # A host copy contains the tagged rows too, so they must be complete before the copy. Otherwise they are served from
    # the device, and receivers may read the plain rows first.
    if offer.is_copied:
        offer.fill(version, epoch, lambda rows: None, stall_s=rank.stall_s)
    copy_s = registered.snapshot.snapshot(
        version,
        rows=None if offer.is_copied else offer.plain_rows,
        metadata=metadata,
        announce=partial(rank.announcements.begin, version),
        stall_s=rank.stall_s,
    )
    if not offer.is_copied:
        ready = partial(registered.local_version.ready, is_written=True)
        offer.fill(version, epoch, ready, stall_s=rank.stall_s)
    return copy_s
