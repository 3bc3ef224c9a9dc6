"""One publisher rank in a publication: it shows a version, waits for the outcome, and carries messages to the hub."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import partial

import msgspec

from penstock.errors import HubUnavailable, PenstockError, StaleDescriptor
from penstock.sync.commit.announced import Announcements
from penstock.sync.commit.ballot import Ballot
from penstock.sync.commit.coordinator import CommitCoordinator
from penstock.sync.commit.outcome import Decided, Received, Reported, Unknown, Withdrawn, of_record, recorded
from penstock.sync.membership import Membership
from penstock.sync.publish import rank_group
from penstock.sync.publish.registered import Registered


class TrainerRank(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One rank of the publishers. The ballot says whether each subscriber goes live independently."""

    rank: int
    membership: Membership
    registered: Registered
    announcements: Announcements
    coordinator: CommitCoordinator

    def show(self, version: int, metadata: Mapping[str, str], ballot: Ballot) -> float:
        """Let receivers read the parameters or a copy, and return how many seconds the copy took.

        A version with a two-phase commit is withdrawn after an error.
        """
        if self.rank == 0:
            is_awaited = ballot.is_two_phase or self.registered.snapshot is None
            # A receiver may report as soon as the version is announced, so list the subscribers first.
            members = self.membership.look(max_age_s=self.membership.timing.group_list_s) if is_awaited else ()
            expected = [other.member for other in members if other.state.side == "subscriber"]
            self.coordinator.begin(version, expected, ballot)
        with self._withdrawn_on_error(version, ballot):
            return self._show(version, metadata)

    def _show(self, version: int, metadata: Mapping[str, str]) -> float:
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

    def wait(self, version: int, ballot: Ballot) -> Reported:
        """Return the final outcome. Raise VersionRefused if the version was withdrawn.

        Raise HubUnavailable if the hub may or may not have recorded the commit.
        """
        membership = self.membership
        if self.rank != 0:
            outcome = rank_group.decided(membership, ballot.epoch, version)
        else:
            whereabouts = partial(membership.whereabouts, max_age_s=membership.timing.group_list_s)
            with self._withdrawn_on_error(version, ballot):
                proposal = self.coordinator.propose(version, stall_s=membership.stall_s, whereabouts=whereabouts)
            outcome = proposal if isinstance(proposal, Received) else self._recorded(proposal)
        if isinstance(outcome, Decided):
            self._settle(version, outcome)
        if isinstance(outcome, Withdrawn):
            raise outcome.error(membership.name)
        return outcome

    def _recorded(self, proposal: Decided) -> Decided:
        membership, record = self.membership, None
        # Propose a withdrawal only once, because it need not be recorded.
        within_s = membership.stall_s if proposal.is_commit else 0.0
        deadline = time.monotonic() + within_s
        while record is None:
            failure: PenstockError = HubUnavailable(f"the hub did not record a decision within {within_s:g} s")
            try:
                record = of_record(membership.member.decide(membership.name, proposal.record()).decision)
            except PenstockError as error:
                failure = error
            if record is None:
                if time.monotonic() > deadline or not isinstance(failure, HubUnavailable):
                    break
                time.sleep(membership.timing.record_pause_s)
        outcome = recorded(proposal, record)
        if isinstance(outcome, Unknown):
            # Without this, the other ranks would wait for an outcome that rank 0 never learns.
            self.coordinator.give_up(proposal.version)
            message = f"it is unknown whether version {proposal.version} of {membership.name!r} is committed"
            hint = "publish the next version. Until then subscribers keep the previous one, or learn from the hub"
            raise HubUnavailable(f"{message}: {failure.message}", hint=hint) from failure
        return outcome

    def _settle(self, version: int, outcome: Decided) -> None:
        if self.rank == 0:
            self.coordinator.settle(version, outcome)
        self.announcements.decided(outcome)

    @contextlib.contextmanager
    def _withdrawn_on_error(self, version: int, ballot: Ballot) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self.rank == 0 and ballot.is_two_phase:
                # Do not reuse the number, because a subscriber may know that this version was withdrawn.
                self.announcements.version = version
                why = f"rank 0 failed: {str(error) or type(error).__name__}"
                self._settle(version, Withdrawn(epoch=ballot.epoch, version=version, why=why))
            raise
