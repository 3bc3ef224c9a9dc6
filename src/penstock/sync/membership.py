"""The members of a sync and sessions with them: listed by the hub, and kept while it is away.

In: a member, a name. Out: the members of the sync; a `SyncClient` with any of them, opened when first used.
Not here: what is asked (`sync.publish.publisher`, `sync.receive.subscriber`, `planner`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.config import Settings
from penstock.errors import HubUnavailable, NotFound, PeerLost, PenstockError, PermissionDenied, SourceStalled
from penstock.hub.client import TIMEOUT_S, HubClient
from penstock.hub.sync_messages import SyncMember, sync_key
from penstock.peer.member import Member
from penstock.sync.client import SyncClient

T = TypeVar("T")
ALIVE_S = 2.0
"""A door that takes longer to say that it lives may be stopped; only one that nobody listens at is gone."""


def joined(
    stack: contextlib.ExitStack,
    hub: str | None,
    token: str | None,
    *,
    rack: str,
    listen: str | None,
    transports: Sequence[str] | None,
    stall_s: float | None,
) -> tuple[Member, float]:
    """This process as a member, which leaves with the stack, and its stall deadline; see `publisher`."""
    deadline_s = Settings.read(stall_s=stall_s).stall_s
    client = HubClient.connect(hub, token=token, timeout_s=min(TIMEOUT_S, deadline_s / 3))
    member = Member(client, rack=rack, listen=listen, transports=transports, stall_s=deadline_s)
    stack.callback(member.leave, 0.0)
    return member, deadline_s


class Membership:
    """See the module. Used by any number of threads; a context manager by its `close`.

    Args:
        member: us.
        name: of the sync.
        stall_s: deadline of answers.
        room: of doors: where they answer.
    """

    def __init__(self, member: Member, name: str, stall_s: float, *, room: str = "sync") -> None:
        self.member, self.name, self.key, self.stall_s = member, name, sync_key(name), stall_s
        self._room = room
        self._lock = threading.Lock()
        self._found: dict[str, SyncMember] = {}
        self._looked_at = float("-inf")
        self._sessions: dict[str, str] = {}
        self._talks: dict[tuple[str, str], SyncClient] = {}

    def look(self, *, max_age_s: float = 0.0) -> tuple[SyncMember, ...]:
        """Everybody who takes part, the earlier first; as last known where the hub is away.

        Raises:
            HubUnavailable: it is away, and was never asked.
        """
        with self._lock:
            was_asked = self._looked_at > float("-inf")
            if time.monotonic() - self._looked_at <= max_age_s or (was_asked and self.member.hub_is_away):
                return tuple(self._found.values())
        try:
            reply = self.member.sync(self.name)
        except HubUnavailable:
            with self._lock:
                if self._looked_at == float("-inf"):
                    raise
                self._looked_at = time.monotonic()
                return tuple(self._found.values())
        with self._lock:
            before = self._found if reply.is_new else {}
            self._found = before | {one.member: one for one in reply.members}
            self._looked_at = time.monotonic()
            self._drop(set(self._sessions).difference(self._found))
            return tuple(self._found.values())

    def ask(self, member: str, question: Callable[[SyncClient], T], *, line: str = "") -> T:
        """Ask a member; a session that it does not know any more is begun anew.

        Args:
            member: whom.
            question: what.
            line: questions of different lines do not wait for each other.

        Raises:
            PeerLost: it takes no part any more, or is gone. NotFound: a new hub does not know it yet. Whatever the
                question raises.
        """
        try:
            return question(self._sync_client(member, line))
        except PermissionDenied:
            with self._lock:
                self._drop({member})
            return question(self._sync_client(member, line))

    def is_near(self, member: str) -> bool:
        """Return whether a member that was asked is on this host."""
        with self._lock:
            known = self._found.get(member)
        return known is not None and known.host == self.member.host

    def _sync_client(self, member: str, line: str) -> SyncClient:
        with self._lock:
            sync_client, session = self._talks.get((member, line)), self._sessions.get(member, "")
            known = self._found.get(member)
        if sync_client is not None:
            return sync_client
        if not session or known is None:
            reply = self.member.sync(self.name, grants=(member,))
            known = next((one for one in reply.members if one.member == member), None)
            if known is None and reply.is_new:
                raise NotFound("the hub was restarted, and does not know this member yet", uri=f"penstock:{member}")
            if known is None:
                raise PeerLost("it left this sync", uri=f"penstock:{member}")
        sync_client = self._make(known, self.stall_s)
        try:
            session = sync_client.open(session)
        except BaseException:
            sync_client.close()
            raise
        with self._lock:
            self._found.setdefault(member, known)
            self._sessions[member] = session
            kept = self._talks.setdefault((member, line), sync_client)
        if kept is not sync_client:
            sync_client.close()  # another thread was first
        return kept

    def _make(self, other: SyncMember, stall_s: float) -> SyncClient:
        return SyncClient(
            other,
            member=self.member.id,
            key=self.key,
            same_host=other.host == self.member.host,
            stall_s=stall_s,
            trust=self.member.trust,
            room=self._room,
        )

    def _drop(self, members: set[str]) -> None:
        for member in members:
            self._sessions.pop(member, None)
        for key in [key for key in self._talks if key[0] in members]:
            self._talks.pop(key).close()

    def is_gone(self, other: SyncMember) -> bool:
        """Return whether its server refuses connections; False for a process that is stopped or out of reach."""
        with contextlib.closing(self._make(other, ALIVE_S)) as sync_client:
            try:
                sync_client.alive()
            except SourceStalled:
                return False
            except PeerLost as error:
                refused = (ConnectionError, FileNotFoundError)
                return sync_client.same_host or isinstance(error.__cause__, refused)
            except PenstockError:
                return False
        return False

    def close(self) -> None:
        """End all conversations. Idempotent."""
        with self._lock:
            self._drop({member for member, _ in self._talks})
