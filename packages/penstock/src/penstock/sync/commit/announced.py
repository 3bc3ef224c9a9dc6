"""The announcements of a rank: which of its versions begin, end, or are withdrawn, as other members see them."""

from __future__ import annotations

import threading
import time

from penstock.peer.member import Member
from penstock.sync.commit.outcome import Decided, Withdrawn
from penstock.sync.messages import NewsReply


class VersionStatus:
    """The status of a member's newest version, created before the member's `LocalVersion`. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # The epoch, the version, and whether the version can be read from this member, as one immutable object, so that
        # reading the status needs no lock.
        self.now = NewsReply(epoch="", version=-1, is_open=False)

    def post(self, epoch: str, version: int, *, is_open: bool, withdrawn: Withdrawn | None = None) -> None:
        """Set the status and wake the threads that wait for a newer version."""
        record = None if withdrawn is None else withdrawn.record()
        with self._changed:
            self.now = NewsReply(epoch=epoch, version=version, is_open=is_open, withdrawn=record)
            self._changed.notify_all()

    def wait(self, after: int, wait_s: float) -> NewsReply:
        """Return the status once a version above `after` has begun or was withdrawn, or after `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while self._newest() <= after and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self.now

    def is_past(self, version: int) -> bool:
        """Return whether this version or a later version has begun or was withdrawn."""
        return self._newest() >= version

    def _newest(self) -> int:
        withdrawn = self.now.withdrawn
        return self.now.version if withdrawn is None else max(self.now.version, withdrawn.version)


class Announcements(VersionStatus):
    """One publisher rank's versions as other members see them. Only one thread at a time may change them."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self.epoch = ""
        self.version = -1
        self.outcome: Decided | None = None
        self._member = member
        # A withdrawal of the newest version restores the previous status.
        self._before = self.now

    @property
    def withdrawn(self) -> Withdrawn | None:
        """Return the withdrawal of the newest version, or None."""
        known, newest = self.outcome, (self.epoch, self.version)
        return known if isinstance(known, Withdrawn) and (known.epoch, known.version) == newest else None

    def begin(self, version: int) -> None:
        """Announce to receivers and the hub that a version can be read here."""
        self.version = version
        self._before = self.now
        self.post(self.epoch, version, is_open=True)
        self._member.beat_now()

    def end(self) -> None:
        """Announce that the version can no longer be read here. If it was withdrawn, announce the previous version."""
        # Subscribers must not request a withdrawn version as the newest version.
        withdrawn = self.withdrawn
        newest = self.version if withdrawn is None else self._before.version
        self.post(self.epoch, newest, is_open=False, withdrawn=withdrawn)
        self._member.beat_now()

    def decided(self, outcome: Decided) -> None:
        """Store the fleet's outcome. The next heartbeat reports it to the hub."""
        self.outcome = outcome
        self._member.beat_now()
