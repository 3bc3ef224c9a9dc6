"""Strategies of a rank that publishes: each subscriber goes live independently, or rank 0 decides for all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial

import msgspec

from penstock.errors import HubUnavailable, PenstockError, StaleDescriptor
from penstock.hub.messages import FleetDecision
from penstock.sync.commit_rules import Verdict
from penstock.sync.membership import Membership
from penstock.sync.messages import Decision
from penstock.sync.publish import rank_group
from penstock.sync.publish.announcements import Announcements
from penstock.sync.publish.rank_group import CommitTerms, SubscriberProgress
from penstock.sync.publish.registered import Registered


class TrainerRank(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The parts of a publisher rank that every strategy uses."""

    rank: int
    membership: Membership
    registered: Registered
    announcements: Announcements
    progress: SubscriberProgress

    def subscribers(self) -> list[str]:
        """Return the subscribers to wait for. Call this before the version is announced."""
        # A receiver may report as soon as the version is announced, so list the subscribers first.
        members = self.membership.look(max_age_s=self.membership.timing.group_list_s)
        return [other.member for other in members if other.state.side == "subscriber"]

    def decided(self, version: int) -> Decision:
        """Return rank 0's decision to another rank."""
        decision = rank_group.decided(self.membership, self.announcements.epoch, version)
        if decision.fleet is not None:
            self.announcements.decided(decision.fleet)
        return decision

    def show(self, version: int, metadata: Mapping[str, str]) -> float:
        """Let receivers read the parameters or a copy, and return how many seconds the copy took."""
        registered, offer, epoch = self.registered, self.registered.offer, self.announcements.epoch
        local_version, snapshot = registered.local_version, registered.snapshot
        # Fill the tagged rows first, because a copy in host memory contains them too.
        if snapshot is not None and offer.is_copied:
            offer.fill(version, epoch, lambda rows: None, stall_s=self.membership.stall_s)
        copy_s = 0.0
        if snapshot is None:
            local_version.begin(version, metadata)
            local_version.ready(offer.plain_rows)
            # Wait for the rows, because receivers would otherwise request digests before every read.
            local_version.settle(self.membership.stall_s)
            self.announcements.begin(version)
        else:
            copy_s = snapshot.snapshot(
                version,
                rows=None if offer.is_copied else offer.plain_rows,
                metadata=metadata,
                announce=partial(self.announcements.begin, version),
                stall_s=self.membership.stall_s,
            )
        # Receivers read rows without a tag while tagged rows are filled, and wait only for the tagged rows they need.
        if not offer.is_copied:
            offer.fill(version, epoch, partial(local_version.ready, is_written=True), stall_s=self.membership.stall_s)
        return copy_s

    def end_reads(self) -> None:
        """Invalidate reads of the version from this rank, and announce that it is no longer readable."""
        with contextlib.suppress(StaleDescriptor):
            self.registered.local_version.fence()
        self.announcements.end()


class OnePhase(msgspec.Struct, frozen=True):
    """Each subscriber goes live independently. The trainer waits for subscribers that read its live parameters."""

    is_two_phase = False
    _rank: TrainerRank

    def show(self, version: int, metadata: Mapping[str, str]) -> float:
        """Let receivers read a version, and return how many seconds its copy took."""
        if self._rank.rank == 0 and self._rank.registered.snapshot is None:
            self._rank.progress.begin(version, self._rank.subscribers())
        return self._rank.show(version, metadata)

    def wait(self, version: int) -> Decision:
        """Wait until every subscriber that was known at the start has finished, is late or is gone."""
        rank = self._rank
        if rank.rank != 0:
            return rank.decided(version)
        is_gone = partial(rank.membership.has_left, max_age_s=rank.membership.timing.group_list_s)
        return rank.progress.wait(version, stall_s=rank.membership.stall_s, is_gone=is_gone)


class TwoPhase(msgspec.Struct, frozen=True):
    """All subscribers prepare a version, and rank 0 decides whether all of them go live or none."""

    is_two_phase = True
    _rank: TrainerRank
    _terms: CommitTerms

    def show(self, version: int, metadata: Mapping[str, str]) -> float:
        """Let receivers read a version, and return how many seconds its copy took. Withdraw it after an error."""
        if self._rank.rank == 0:
            self._rank.progress.begin_two_phase(version, self._rank.subscribers(), self._terms)
        with self._withdrawn_on_error(version):
            return self._rank.show(version, metadata)

    def wait(self, version: int) -> Decision:
        """Return the recorded decision. Raise HubUnavailable if the hub may or may not have recorded the commit."""
        rank = self._rank
        if rank.rank != 0:
            return rank.decided(version)
        whereabouts = partial(rank.membership.whereabouts, max_age_s=rank.membership.timing.group_list_s)
        with self._withdrawn_on_error(version):
            verdict = rank.progress.wait_decision(version, whereabouts=whereabouts)
        return self._settle(version, verdict, self._recorded(version, verdict))

    def _recorded(self, version: int, verdict: Verdict) -> FleetDecision:
        rank = self._rank
        proposal = verdict.decision(rank.announcements.epoch, version)
        try:
            # A withdrawal need not be recorded, because no subscriber goes live without a recorded commit.
            return rank_group.recorded(rank.membership, proposal, rank.membership.stall_s if verdict.is_commit else 0.0)
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
        try:
            yield
        except BaseException as error:
            if self._rank.rank == 0:
                verdict = Verdict(is_commit=False, why=f"rank 0 failed: {str(error) or type(error).__name__}")
                # Do not reuse the number, because a subscriber may know that this version was withdrawn.
                self._rank.announcements.version = version
                self._settle(version, verdict, verdict.decision(self._rank.announcements.epoch, version))
            raise


Strategy = OnePhase | TwoPhase
"""A way to publish one version: call `show`, and then `wait`."""
