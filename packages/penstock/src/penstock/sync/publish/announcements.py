"""The announcements of a publisher rank to receivers and the hub: versions that begin, end or are withdrawn."""

from __future__ import annotations

from penstock.hub.messages import FleetDecision
from penstock.peer.member import Member
from penstock.sync.local_version import VersionStatus


class Announcements:
    """The versions of one rank, as other members see them. One thread at a time changes them.

    Attributes:
        epoch: the publishers' epoch, which is the member id of their rank 0.
        version: the newest version that was announced or whose number is used up, or -1.
        status: the version status for receivers.
        decision: the newest decision of the fleet, or None.
    """

    def __init__(self, member: Member) -> None:
        self.epoch = ""
        self.version = -1
        self.status = VersionStatus()
        self.decision: FleetDecision | None = None
        self._member = member
        # The previous status, which is needed if the newest version is withdrawn.
        self._before = self.status.now

    @property
    def is_withdrawn(self) -> bool:
        """Return whether the newest version was withdrawn."""
        known = self.decision
        return known is not None and (known.epoch, known.version, known.outcome) == (
            self.epoch,
            self.version,
            "withdrawn",
        )

    def begin(self, version: int) -> None:
        """Tell receivers and the hub that a version can be read here."""
        self.version = version
        self._before = self.status.now
        self.status.post(self.epoch, version, is_open=True)
        self._member.beat_now()

    def end(self) -> None:
        """Tell receivers and the hub that the version can no longer be read here.

        After a withdrawal name the previous version.
        """
        # Otherwise subscribers would request the withdrawn version as the newest one.
        newest, withdrawn = (self._before.version, self.decision) if self.is_withdrawn else (self.version, None)
        self.status.post(self.epoch, newest, is_open=False, withdrawn=withdrawn)
        self._member.beat_now()

    def decided(self, decision: FleetDecision) -> None:
        """Keep the fleet's decision. The next heartbeat reports it to the hub."""
        self.decision = decision
        self._member.beat_now()
