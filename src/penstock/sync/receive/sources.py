"""Sources of one version in other processes, by their doors.

In: a roster, the members that a part takes something of. Out: a `SourceLink` each.
Not here: which members (`sync.planner`), reading their memory (`source_read`).
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
"""How long a source is asked to wait for its version, before it is asked again."""
_AT_ONCE = 16


class PeerLink:
    """See `SourceLink`: a member that is asked at its door.

    Args:
        roster: asks it.
        member: whom.
        found: its map of the version wanted.
        same_host: whether it is on this host.
    """

    same_process = False

    def __init__(self, membership: Membership, member: str, found: VersionMap, *, same_host: bool) -> None:
        self._membership, self.member, self.map, self.same_host = membership, member, found, same_host
        self._lines, self._num_lines = list[str](), itertools.count()

    def digests(self, strips: Strips, *, wait_s: float) -> Answer:
        """See `SourceLink.digests`. Threads that ask at once do so by a line each: an answer may be waited for."""
        version, generation = self.map.version, self.map.generation
        try:
            line = self._lines.pop()
        except IndexError:
            line = f"digests {next(self._num_lines)}"
        try:
            return self._membership.ask(
                self.member, lambda sync_client: sync_client.digests(strips, version, generation, wait_s), line=line
            )
        finally:
            self._lines.append(line)


class SourceFailed(Exception):
    """A source could not be asked; its cause is the error."""

    def __init__(self, member: str, error: PenstockError) -> None:
        super().__init__(member)
        self.member, self.error = member, error


def open_links(membership: Membership, members: Sequence[str], version: int, stall_s: float) -> dict[str, SourceLink]:
    """Links to all of these, each with its map of the version.

    Raises:
        SourceFailed: one cannot be asked, is past the version, or did not begin it for `stall_s`.
    """
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(members)))) as pool:
        found = list(pool.map(lambda member: _open(membership, member, version, stall_s), members))
    return {link.member: link for link in found}


def _open(membership: Membership, member: str, version: int, stall_s: float) -> SourceLink:
    deadline = time.monotonic() + stall_s
    try:
        while True:
            try:
                found = membership.ask(member, lambda sync_client: sync_client.held_map(version, ASK_S))
                break
            except NotFound as error:
                if time.monotonic() > deadline:
                    message = f"it did not begin version {version} in {stall_s:g} s"
                    raise SourceStalled(message, uri=f"penstock:{member}") from error
        return PeerLink(membership, member, found, same_host=membership.is_near(member))
    except PenstockError as error:
        raise SourceFailed(member, error) from error


_fits: type[SourceLink] = PeerLink
