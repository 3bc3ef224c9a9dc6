"""The live version of a subscriber as a source for other members."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.plan.layout import Layout
from penstock.sync.local_version import LocalVersion, VersionStatus
from penstock.sync.receive.update import UpdateLoop


class Serving:
    """A subscriber's live version, which others may read. One thread at a time changes it.

    In direct mode the memory is registered even if it is not served.
    """

    def __init__(self, update_loop: UpdateLoop, *, serves: bool) -> None:
        self.status = VersionStatus()
        self._update_loop = update_loop
        self._serves = serves

    def layout(self) -> Layout | None:
        """Return the layout of the target's memory, or None before the first update."""
        buffers = self._update_loop.buffers
        return None if buffers is None else buffers.layout

    def local_version(self) -> LocalVersion | None:
        """Return the target's memory, or None if it is not served or before the first update."""
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
        # Change the status first, because a planner must not send a fenced reader back here.
        self.status.post(epoch, version, is_open=False)
        local_version = self.local_version()
        if local_version is not None and local_version.version is not None:
            local_version.fence()
