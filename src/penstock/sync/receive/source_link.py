"""A source as a receiver sees it: where its memory is, and what it says the bytes digest to.

In: a holder in this process, or whatever the control plane talks to one by. Out: `SourceLink`.
Not here: the conversation between processes (`sources`), reading (`transfer`).
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
            StaleDescriptor: it holds another version by now.
            PeerLost, SourceUnavailable: it is gone, or does not answer.
        """
        ...


class LocalLink:
    """See `SourceLink`: a holder in this process.

    Args:
        held: has a version.
        same_process: False has it read as if it were another process of this host.
    """

    same_host = True

    def __init__(self, held: LocalVersion, *, same_process: bool = True) -> None:
        self.held, self.map, self.same_process = held, held.map(), same_process
        self.member = held.layout.member

    def digests(self, strips: Strips, *, wait_s: float) -> Answer:
        """See `SourceLink.digests`."""
        return self.held.digests(strips, version=self.map.version, generation=self.map.generation, wait_s=wait_s)


_fits: type[SourceLink] = LocalLink
