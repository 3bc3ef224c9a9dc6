"""The loop of a serving engine: it waits for each new version and makes it live."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from penstock.errors import Cancelled, PeerLost, SourceError, VersionRefused
from penstock.logs import log_named
from penstock.sync.report import UpdateReport

log = log_named("penstock")


class Waiting(Protocol):
    """The part of a subscriber that the loop needs."""

    name: str

    @property
    def version(self) -> int:
        """Return the live version."""
        ...

    @property
    def revision(self) -> str:
        """Return the publishers' epoch and the live version."""
        ...

    def wait(self, version: int | None = None, timeout_s: float | None = None) -> int:
        """Wait for a version."""
        ...

    def update(self) -> UpdateReport:
        """Make the newest version live."""
        ...


def each_version(subscriber: Waiting, pause_s: float) -> Iterator[UpdateReport]:
    """Yield a report for each new version. See `Subscriber.__iter__`.

    Args:
        subscriber: waits and updates.
        pause_s: seconds to wait after an update that failed.
    """
    after, told = -1, ""
    while True:
        before = subscriber.revision
        try:
            subscriber.wait(max(after, subscriber.version) + 1)
            report = subscriber.update()
        except Cancelled:
            return
        except (SourceError, PeerLost, VersionRefused) as error:
            if error.mutated:
                raise
            if isinstance(error, VersionRefused):
                # This version never goes live. Without this line the loop would request it again at once.
                after = max(after, error.version)
            if error.message != told:
                state = f"serves version {subscriber.version}" if subscriber.version >= 0 else "has no version yet"
                log.warning("%r %s and waits for the next one: %s", subscriber.name, state, error.message)
                told = error.message
            time.sleep(pause_s)
            continue
        told = ""
        if subscriber.revision != before:
            yield report
