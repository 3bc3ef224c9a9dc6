"""The announcements of a publisher rank to receivers and the hub: versions that open, close or are withdrawn."""

from __future__ import annotations

from penstock.hub.messages import FleetDecision
from penstock.peer.member import Member
from penstock.sync.local_version import VersionStatus


class Announcements:
    """One rank's versions as other members see them. Only one thread at a time may change them."""

    def __init__(self, member: Member) -> None:
        self.epoch = ""
        self.version = -1
        self.status = VersionStatus()
        self.decision: FleetDecision | None = None
        self._member = member
        # A withdrawal of the newest version restores the previous status.
        self._before = self.status.now

    @property
    def is_withdrawn(self) -> bool:
        """Return whether the newest version was withdrawn."""
        known = self.decision
        newest = (self.epoch, self.version, "withdrawn")
        return known is not None and (known.epoch, known.version, known.outcome) == newest

    def begin(self, version: int) -> None:
        """Announce to receivers and the hub that a version can be read here."""
        self.version = version
        self._before = self.status.now
        self.status.post(self.epoch, version, is_open=True)
        self._member.beat_now()

    def end(self) -> None:
        """Announce that the version can no longer be read here. If it was withdrawn, announce the previous version."""
        # Subscribers must not request a withdrawn version as the newest version.
        newest, withdrawn = (self._before.version, self.decision) if self.is_withdrawn else (self.version, None)
        self.status.post(self.epoch, newest, is_open=False, withdrawn=withdrawn)
        self._member.beat_now()

    def decided(self, decision: FleetDecision) -> None:
        """Store the fleet's decision. The next heartbeat reports the decision to the hub."""
        self.decision = decision
        self._member.beat_now()
