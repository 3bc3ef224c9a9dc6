"""The source of a transfer as a receiver sees it: its map, and its digests of strips.

In: a `LocalVersion` of this process, or a connection to another member. Out: `SourceLink`.
Not here: requests to other processes (`sources`), reading (`transfer`).
"""

from __future__ import annotations

from typing import Protocol

from penstock.digest.strip import Strips
from penstock.sync.local_version import Answer, LocalVersion, VersionMap


class SourceLink(Protocol):
    """A link to one source of one version, while a receiver reads from it. Used by several threads at once."""

    @property
    def member(self) -> str:
        """Return the member's id, as in the plan's sources."""
        ...

    @property
    def map(self) -> VersionMap:
        """Return the map of the version and generation to read."""
        ...

    @property
    def same_host(self) -> bool:
        """Return whether the source is on this host."""
        ...

    @property
    def same_process(self) -> bool:
        """Return whether the source is this process."""
        ...

    def digests(self, strips: Strips, *, wait_s: float) -> Answer:
        """Return the source's digests of strips of its memory, of the map's version and generation.

        See `LocalVersion.digests`.

        Raises:
            StaleDescriptor: the source has another version now.
            PeerLost, SourceUnavailable: the source is gone, or does not answer.
        """
        ...


class LocalLink:
    """A `SourceLink` to a `LocalVersion` of this process.

    Args:
        local_version: must have a version.
        same_process: False reads it as if it were in another process of this host.
    """

    same_host = True

    def __init__(self, local_version: LocalVersion, *, same_process: bool = True) -> None:
        self.local_version, self.map, self.same_process = local_version, local_version.map(), same_process
        self.member = local_version.layout.member

    def digests(self, strips: Strips, *, wait_s: float) -> Answer:
        """See `SourceLink.digests`."""
        return self.local_version.digests(
            strips, version=self.map.version, generation=self.map.generation, wait_s=wait_s
        )


_fits: type[SourceLink] = LocalLink
