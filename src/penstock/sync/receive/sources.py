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
from penstock.sync.local_version import Answer, HeldMap
from penstock.sync.membership import Roster
from penstock.sync.receive.source_link import SourceLink

ASK_S = 1.0
"""How long a source is asked to wait for its version, before it is asked again."""
_AT_ONCE = 16


class DoorLink:
    """See `SourceLink`: a member that is asked at its door.

    Args:
        roster: asks it.
        member: whom.
        found: its map of the version wanted.
        same_host: whether it is on this host.
    """

    same_process = False

    def __init__(self, roster: Roster, member: str, found: HeldMap, *, same_host: bool) -> None:
        self._roster, self.member, self.map, self.same_host = roster, member, found, same_host
        self._lines, self._num_lines = list[str](), itertools.count()

    def digests(self, strips: Strips, *, wait_s: float) -> Answer:
        """See `SourceLink.digests`. Threads that ask at once do so by a line each: an answer may be waited for."""
        version, generation = self.map.version, self.map.generation
        try:
            line = self._lines.pop()
        except IndexError:
            line = f"digests {next(self._num_lines)}"
        try:
            return self._roster.ask(
                self.member, lambda talk: talk.digests(strips, version, generation, wait_s), line=line
            )
        finally:
            self._lines.append(line)


class SourceFailed(Exception):
    """A source could not be asked; its cause is the error."""

    def __init__(self, member: str, error: PenstockError) -> None:
        super().__init__(member)
        self.member, self.error = member, error


def open_links(roster: Roster, members: Sequence[str], version: int, stall_s: float) -> dict[str, SourceLink]:
    """Links to all of these, each with its map of the version.

    Raises:
        SourceFailed: one cannot be asked, is past the version, or did not begin it for `stall_s`.
    """
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(members)))) as pool:
        found = list(pool.map(lambda member: _open(roster, member, version, stall_s), members))
    return {link.member: link for link in found}


def _open(roster: Roster, member: str, version: int, stall_s: float) -> SourceLink:
    deadline = time.monotonic() + stall_s
    try:
        while True:
            try:
                found = roster.ask(member, lambda talk: talk.held_map(version, ASK_S))
                break
            except NotFound as error:
                if time.monotonic() > deadline:
                    message = f"it did not begin version {version} in {stall_s:g} s"
                    raise SourceStalled(message, uri=f"penstock:{member}") from error
        return DoorLink(roster, member, found, same_host=roster.is_near(member))
    except PenstockError as error:
        raise SourceFailed(member, error) from error


_fits: type[SourceLink] = DoorLink
