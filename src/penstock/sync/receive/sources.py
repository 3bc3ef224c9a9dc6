"""Sources of one version in other processes, reached through their servers.

In: the members of the sync, the sources of a part. Out: a `SourceLink` for each.
Not here: choosing the sources (`sync.planner`), reading their memory (`source_read`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from penstock.digest.strip import Strips
from penstock.errors import NotFound, PenstockError, SourceStalled
from penstock.sync.local_version import Answer, VersionMap
from penstock.sync.membership import Membership
from penstock.sync.receive.source_link import SourceLink

ASK_S = 1.0
"""How long one request waits at the source for its version, before it is repeated."""
# Each source is one round trip that mostly waits: enough threads that hundreds of sources open in a few rounds.
_AT_ONCE = 16


class PeerLink:
    """A `SourceLink` to another member, through its server.

    Args:
        membership: the sessions with members.
        member: the member's id.
        version_map: its map of the version to read.
        same_host: whether it is on this host.
    """

    same_process = False

    def __init__(self, membership: Membership, member: str, version_map: VersionMap, *, same_host: bool) -> None:
        self._membership, self.member, self.map, self.same_host = membership, member, version_map, same_host
        self._channels, self._num_channels = list[str](), itertools.count()

    def digests(self, strips: Strips, *, wait_s: float) -> Answer:
        """See `SourceLink.digests`."""
        # Threads that ask at the same time use a channel each: an answer can wait for rows, and on one connection the
        # others would wait behind it. `list.pop` and `append` are atomic, so the free list needs no lock.
        version, generation = self.map.version, self.map.generation
        try:
            channel = self._channels.pop()
        except IndexError:
            channel = f"digests {next(self._num_channels)}"
        try:
            return self._membership.ask(
                self.member,
                lambda sync_client: sync_client.digests(strips, version, generation, wait_s),
                channel=channel,
            )
        finally:
            self._channels.append(channel)


class SourceFailed(Exception):
    """Failure of one source, so that the caller can go on without it; `error` is the reason."""

    def __init__(self, member: str, error: PenstockError) -> None:
        super().__init__(member)
        self.member, self.error = member, error


def open_links(membership: Membership, members: Sequence[str], version: int, stall_s: float) -> dict[str, SourceLink]:
    """Return links to all members, each with its map of the version.

    Raises:
        SourceFailed: a member cannot be reached, is past the version, or did not begin it within `stall_s`.
    """
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(members)))) as pool:
        links = list(pool.map(lambda member: _open(membership, member, version, stall_s), members))
    return {link.member: link for link in links}


def _open(membership: Membership, member: str, version: int, stall_s: float) -> SourceLink:
    deadline = time.monotonic() + stall_s
    try:
        while True:
            try:
                version_map = membership.ask(member, lambda sync_client: sync_client.version_map(version, ASK_S))
                break
            except NotFound as error:
                if time.monotonic() > deadline:
                    message = f"the source did not begin version {version} within {stall_s:g} s"
                    raise SourceStalled(message, uri=f"penstock:{member}") from error
        return PeerLink(membership, member, version_map, same_host=membership.is_near(member))
    except PenstockError as error:
        raise SourceFailed(member, error) from error


_fits: type[SourceLink] = PeerLink
