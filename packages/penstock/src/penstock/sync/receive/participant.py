"""A subscriber's part in a commit: the check of a version, the vote, and the wait for the fleet's decision."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch

from penstock.errors import ConfigError, PeerLost, PenstockError, SourceStalled, StaleDescriptor
from penstock.report import names_text
from penstock.sync.check import Check, fault_of, staged_version
from penstock.sync.commit.learned import Inquiry
from penstock.sync.commit.outcome import Decided, Granted, Open, Outcome, Unknown, Withdrawn, of_decision, of_record
from penstock.sync.membership import Membership
from penstock.sync.messages import Decision, PartRequest
from penstock.sync.receive.staged import Staged
from penstock.sync.receive.target import Target
from penstock.sync.receive.update import UpdateLoop
from penstock.timing import Timing


class Participant(msgspec.Struct, eq=False):
    """A subscriber that takes part in fleet commits. `check_open` raises Cancelled if the subscriber is closed."""

    membership: Membership
    update_loop: UpdateLoop
    target: Target
    check: Check | None
    check_open: Callable[[], None]
    timing: Timing
    check_values: tuple[int, bytes] = (-1, b"")

    def vote(self, staged: Staged) -> None:
        """Check a staged version, and report the outcome. Raise VersionRefused if the check failed."""
        if self.check is not None:
            self._run_check(staged, self.check)
        if staged.decide_by is not None:
            self.update_loop.report("prepared")
        elif self.check is not None:
            self.update_loop.report("committed")

    def _run_check(self, staged: Staged, check: Check) -> None:
        buffers = self.update_loop.buffers
        assert buffers is not None and buffers.staging_copy is not None
        self.check_values = staged.version, staged.check
        model = self.target if isinstance(self.target, torch.nn.Module) else None
        try:
            copy = buffers.staging_copy.regions.memories
            view = staged_version(staged.version, buffers.wanted, buffers.memories, copy, staged.check, model)
            why, cause = fault_of(check, view)
            if not why and (altered := self.update_loop.altered()):
                why = f"its check changed the staged weights of {names_text(altered)}"
        except BaseException as error:
            self.update_loop.report("failed", f"the check did not run: {str(error) or type(error).__name__}")
            raise
        if why:
            self.update_loop.report("refused" if staged.decide_by is not None else "failed", why)
            refused = Withdrawn(epoch=staged.epoch, version=staged.version, by=self.membership.member.id, why=why)
            # A version that failed its check never goes live here, even if the fleet commits it.
            self.update_loop.note_outcome(refused, cause)

    def require_unaltered(self, staged: Staged) -> None:
        """Raise ConfigError if the staged bytes have changed since the check."""
        if self.check is not None and (altered := self.update_loop.altered()):
            raise ConfigError(
                f"the staged weights of {names_text(altered)} changed after the check of version {staged.version}",
                hint="do not store results of call() in the check or state in the module, and call update() again",
            )

    def await_commit(self, staged: Staged, decide_by: float) -> None:
        """Wait until the fleet has decided to commit a version.

        Raise VersionRefused for a withdrawn version, StaleDescriptor if later versions are decided, or SourceStalled.
        """
        epoch, version = staged.epoch, staged.version
        begun = time.monotonic()
        # Add the stall deadline, because rank 0 may need this time to record the decision.
        stall_s = self.membership.stall_s
        limit_s = max(0.0, decide_by - begun) + stall_s
        step: Inquiry | Outcome = Inquiry(begun=begun, limit_s=limit_s, stall_s=stall_s, last_reply=begun)
        while isinstance(step, Inquiry):
            self.check_open()
            is_of_hub = step.question == "hub"
            reply = self._ask_hub(epoch, version) if is_of_hub else self._ask_rank_0(epoch, version)
            step = step.after(reply, time.monotonic())
            # Rank 0 delays its reply until it has a decision, so only other replies need a pause.
            if isinstance(step, Inquiry) and (is_of_hub or not isinstance(reply, Open) or not reply.is_begun):
                time.sleep(self.timing.decision_pause_s)
        if isinstance(step, Decided):
            self.update_loop.note_outcome(step)
            return
        name = self.membership.name
        if isinstance(step, Unknown) and step.is_past:
            raise StaleDescriptor(f"{name!r} already has a later version than {version}", hint="call update()")
        message = f"cannot learn the fleet's decision on version {version} of {name!r}"
        message = f"{message} in {time.monotonic() - begun:.1f} s: neither rank 0 nor the hub replies"
        raise SourceStalled(message, hint="the previous version stays live, so call commit() or update() again")

    def _ask_rank_0(self, epoch: str, version: int) -> Outcome:
        wait_s = self.timing.decision_wait_s
        try:
            reply: Decision = self.membership.ask(
                epoch, lambda sync_client: sync_client.decision(version, wait_s), channel="decision"
            )
        except PeerLost:
            is_there = self.membership.whereabouts(epoch, max_age_s=wait_s) == "there"
            return Unknown() if is_there else Open(is_begun=False)
        except PenstockError:
            return Unknown()
        return of_decision(reply)

    def _ask_hub(self, epoch: str, version: int) -> Outcome:
        member = self.membership.member
        why = f"subscriber {member.id[:8]} could not learn the decision from rank 0 of the publishers"
        try:
            reply = member.decide(self.membership.name, Withdrawn(epoch=epoch, version=version, why=why).record())
        except PenstockError:
            return Unknown()
        return of_record(reply.decision) or Unknown(is_past=reply.is_past)

    def terms(self, asker: str, request: PartRequest, epoch: str, version: int) -> Withdrawn | Granted:
        """Return the terms for reading a version when this subscriber plans for another receiver. See `Planner`."""
        check = self.check_values[1] if request.wants_check and self.check_values[0] == version else b""
        return self.update_loop.known.withdrawn(epoch, version) or Granted(version=version, epoch=epoch, check=check)
