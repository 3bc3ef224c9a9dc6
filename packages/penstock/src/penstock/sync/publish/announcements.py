"""What a publisher rank tells receivers and the hub about its versions.

In: versions that begin, end or are withdrawn; the fleet's decisions. Out: the news for receivers, heartbeats.
Not here: the bytes of a version (`registered`), when it is shown (`strategy`).
"""

from __future__ import annotations

from penstock.hub.messages import FleetDecision
from penstock.peer.member import Member
from penstock.sync.local_version import VersionStatus


class Announcements:
    """The versions of one rank, as others hear of them. One thread at a time changes them.

    Attributes:
        epoch: the epoch of the publishers: the member id of their rank 0.
        version: the newest version that was announced, or whose number is used up; -1: none.
        status: the news for receivers.
        decision: the newest decision of the fleet; None: there is none.
    """

    def __init__(self, member: Member) -> None:
        self.epoch = ""
        self.version = -1
        self.status = VersionStatus()
        self.decision: FleetDecision | None = None
        self._member = member
        # The status before the newest version, for a version that is withdrawn.
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
        """Tell receivers and the hub that the version cannot be read here; after a withdrawal name the one before."""
        # Otherwise subscribers that request the newest version would request the withdrawn one.
        newest, withdrawn = (self._before.version, self.decision) if self.is_withdrawn else (self.version, None)
        self.status.post(self.epoch, newest, is_open=False, withdrawn=withdrawn)
        self._member.beat_now()

    def decided(self, decision: FleetDecision) -> None:
        """Keep the fleet's decision, which the hub hears with the next heartbeat."""
        self.decision = decision
        self._member.beat_now()
