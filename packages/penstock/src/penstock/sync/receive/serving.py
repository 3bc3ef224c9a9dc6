"""The live version of a subscriber as a source for other members.

It is announced, served, and withdrawn before it changes.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import StaleDescriptor
from penstock.plan.layout import Layout
from penstock.sync.local_version import LocalVersion, VersionStatus
from penstock.sync.receive.update import UpdateLoop


class Serving:
    """A subscriber's live version, which others may read.

    One thread at a time changes it, and the server's threads read it.

    Attributes:
        status: epoch and version, and whether the version can be read here.

    Args:
        update_loop: has the memory.
        serves: whether others may read it. In direct mode the memory is registered in any case.
    """

    def __init__(self, update_loop: UpdateLoop, *, serves: bool) -> None:
        self.status = VersionStatus()
        self._update_loop = update_loop
        self._serves = serves

    # These are methods and not values, because the receive buffers are replaced when the publishers' checkpoint
    # changes.

    def layout(self) -> Layout | None:
        """Return the layout of the target's memory, or None before the first update."""
        buffers = self._update_loop.buffers
        return None if buffers is None else buffers.layout

    def local_version(self) -> LocalVersion | None:
        """Return the target's memory, which others read.

        Return None if it is not served, or before the first update.
        """
        buffers = self._update_loop.buffers
        return None if buffers is None else buffers.local_version

    def begin(self, epoch: str, version: int, metadata: Mapping[str, str]) -> None:
        """Serve the live version to others, if this subscriber is a source."""
        local_version = self.local_version()
        if local_version is None or not self._serves or not epoch:
            return
        if local_version.version is not None:
            local_version.fence()
        local_version.begin(version, metadata)
        local_version.ready()
        self.status.post(epoch, version, is_open=True)

    def withdraw(self, epoch: str, version: int) -> None:
        """Stop serving the live version, because its memory is about to change or has changed."""
        # Change the status first. A fenced reader asks a planner at once, which must not send it back here.
        self.status.post(epoch, version, is_open=False)
        local_version = self.local_version()
        if local_version is not None and local_version.version is not None:
            local_version.fence()

    def require_unchanged(self) -> None:
        """Raise StaleDescriptor if the engine changed the weights in place since they were verified."""
        if not self._update_loop.is_proven():
            message = "the weights were modified after the update, so this process no longer serves them"
            raise StaleDescriptor(message, hint="set serve=False for an engine that changes weights in place")
