"""The members of a sync and sessions with them: listed by the hub, and usable while the hub is away.

In: this process's member, a name. Out: the members of the sync; a `SyncClient` for each, opened at first use.
Not here: the requests themselves (`sync.publish.publisher`, `sync.receive.subscriber`, `planner`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from penstock.arguments import require_type, wrong
from penstock.config import ConnectionSettings, Settings
from penstock.errors import HubUnavailable, NotFound, PeerLost, PenstockError, PermissionDenied, SourceStalled
from penstock.hub.client import TIMEOUT_S, HubClient
from penstock.hub.messages import SyncMember, sync_key
from penstock.peer.member import Member
from penstock.sync.client import SyncClient

T = TypeVar("T")
ALIVE_S = 2.0
"""Deadline of an alive check. A server that answers later may be a stopped process: only a refused connection proves
that the process is gone."""


def joined(stack: contextlib.ExitStack, connection: ConnectionSettings) -> tuple[Member, float]:
    """Return this process as a member, which leaves with the stack, and its stall deadline."""
    stall_s = Settings.read(stall_s=connection.stall_s).stall_s
    # A third of the stall deadline: a hub that hangs must leave time for the peers to be asked within the deadline.
    client = HubClient.connect(connection.hub, connection.token, timeout_s=min(TIMEOUT_S, stall_s / 3))
    member = Member(client, connection, stall_s=stall_s)
    stack.callback(member.leave, 0.0)
    return member, stall_s


def rank_of(rank: tuple[int, int] | None) -> tuple[int, int]:
    """Return this rank and the number of ranks of its side.

    Args:
        rank: as the caller gives it; None: of torch.distributed where it is initialised, else (0, 1).

    Raises:
        ConfigError: it is not a pair of numbers, or the rank is not below the number of ranks.
    """
    if rank is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1
    expected = "(rank, world_size), as (0, 4): ranks count from 0"
    require_type("rank", rank, tuple, expected)
    for number in rank:
        require_type("rank", number, int, expected)
    if len(rank) != 2 or not 0 <= rank[0] < rank[1]:
        raise wrong("rank", rank, expected)
    return rank


class Membership:
    """See the module. Used by any number of threads; a context manager by its `close`.

    Args:
        member: this process.
        name: the name of the sync.
        stall_s: the deadline of answers.
        handler: the name of the request handler at the members' servers.
    """

    def __init__(self, member: Member, name: str, stall_s: float, *, handler: str = "sync") -> None:
        self.member, self.name, self.key, self.stall_s = member, name, sync_key(name), stall_s
        self._handler = handler
        self._lock = threading.Lock()
        self._members: dict[str, SyncMember] = {}
        self._looked_at = float("-inf")
        self._sessions: dict[str, str] = {}
        self._clients: dict[tuple[str, str], SyncClient] = {}

    def look(self, *, max_age_s: float = 0.0) -> tuple[SyncMember, ...]:
        """Return all members of the sync, the oldest first; the last known ones while the hub is away.

        Raises:
            HubUnavailable: the hub is away, and never answered before.
        """
        with self._lock:
            was_asked = self._looked_at > float("-inf")
            if time.monotonic() - self._looked_at <= max_age_s or (was_asked and self.member.hub_is_away):
                return tuple(self._members.values())
        # Not under the lock: a hub that hangs would block every thread that only needs an open session.
        try:
            reply = self.member.sync(self.name)
        except HubUnavailable:
            with self._lock:
                if self._looked_at == float("-inf"):
                    raise
                # Counts as a look, so that callers in a loop do not wait for the hub's timeout every time.
                self._looked_at = time.monotonic()
                return tuple(self._members.values())
        with self._lock:
            # A hub that was just restarted lists only the members that have reported again since: keep the others,
            # whose sessions still work, until its table is complete.
            before = self._members if reply.is_new else {}
            self._members = before | {other.member: other for other in reply.members}
            self._looked_at = time.monotonic()
            self._drop(set(self._sessions).difference(self._members))
            return tuple(self._members.values())

    def ask(self, member: str, question: Callable[[SyncClient], T], *, channel: str = "") -> T:
        """Send a request to a member; open a new session where the member does not know the old one.

        Args:
            member: the member's id.
            question: makes the request with the client it is passed.
            channel: requests on different channels do not wait for each other.

        Raises:
            PeerLost: the member left the sync, or is gone. NotFound: a restarted hub does not know it yet. All errors
                of `question`.
        """
        try:
            return question(self._sync_client(member, channel))
        except PermissionDenied:
            # The session expired or the member restarted. Once only: a fresh grant that is refused too is an error.
            with self._lock:
                self._drop({member})
            return question(self._sync_client(member, channel))

    def is_near(self, member: str) -> bool:
        """Return whether a known member is on this host."""
        with self._lock:
            known = self._members.get(member)
        return known is not None and known.host == self.member.host

    def _sync_client(self, member: str, channel: str) -> SyncClient:
        with self._lock:
            sync_client, session = self._clients.get((member, channel)), self._sessions.get(member, "")
            known = self._members.get(member)
        if sync_client is not None:
            return sync_client
        if not session or known is None:
            # Only a new session needs the hub, which gives the grant: open sessions go on while it is away.
            reply = self.member.sync(self.name, grants=(member,))
            known = next((other for other in reply.members if other.member == member), None)
            if known is None and reply.is_new:
                raise NotFound("the hub was restarted, and does not know this member yet", uri=f"penstock:{member}")
            if known is None:
                raise PeerLost("the member left this sync", uri=f"penstock:{member}")
        sync_client = self._make(known, self.stall_s)
        try:
            session = sync_client.open(session)
        except BaseException:
            sync_client.close()
            raise
        with self._lock:
            self._members.setdefault(member, known)
            self._sessions[member] = session
            shared = self._clients.setdefault((member, channel), sync_client)
        # The connection was opened without the lock, so two threads may have opened one each: both use the first.
        if shared is not sync_client:
            sync_client.close()
        return shared

    def _make(self, other: SyncMember, stall_s: float) -> SyncClient:
        return SyncClient(
            other,
            member=self.member.id,
            key=self.key,
            same_host=other.host == self.member.host,
            stall_s=stall_s,
            trust=self.member.trust,
            handler=self._handler,
        )

    def _drop(self, members: set[str]) -> None:
        for member in members:
            self._sessions.pop(member, None)
        for key in [key for key in self._clients if key[0] in members]:
            self._clients.pop(key).close()

    def is_gone(self, other: SyncMember) -> bool:
        """Return whether a member's server refuses connections; False for a process that is stopped or out of reach."""
        # A connection of its own with a short deadline: the shared one may be busy with a long poll.
        with contextlib.closing(self._make(other, ALIVE_S)) as sync_client:
            try:
                sync_client.alive()
            except SourceStalled:
                return False
            except PeerLost as error:
                # On this host a failed connection to the Unix socket proves that the process ended. From another
                # host only an active refusal does: a timeout or an unreachable network says nothing about it.
                refused = (ConnectionError, FileNotFoundError)
                return sync_client.same_host or isinstance(error.__cause__, refused)
            except PenstockError:
                return False
        return False

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with self._lock:
            self._drop({member for member, _ in self._clients})
