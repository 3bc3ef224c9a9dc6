"""The members of a sync, and requests to them.

The hub lists the members and issues grants for sessions. Known members and open sessions stay usable while the hub is
unreachable.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

import msgspec
import numpy as np
import torch
from blake3 import blake3

from penstock.arguments import require_type, wrong
from penstock.config import ConnectionSettings, Settings
from penstock.digest.strip import Strips
from penstock.errors import (
    FormatError,
    HubUnavailable,
    NotFound,
    PeerLost,
    PenstockError,
    PermissionDenied,
    PlanError,
    SourceStalled,
    StaleDescriptor,
)
from penstock.hub.client import TIMEOUT_S, HubClient
from penstock.hub.messages import MemberSession, SessionRequest, SyncMember, Upstream, sync_key
from penstock.peer.client import PeerClient
from penstock.peer.member import Member
from penstock.plan.layout import Layout, decode
from penstock.sync import messages
from penstock.sync.local_version import Answer, VersionMap
from penstock.timing import Timing

T = TypeVar("T")
_OfStrips = TypeVar("_OfStrips", messages.DigestReply, messages.PackReply)
Whereabouts = Literal["there", "left", "gone"]


def joined(stack: contextlib.ExitStack, connection: ConnectionSettings) -> tuple[Member, float]:
    """Join the fleet. Return the member and its stall deadline. The member leaves when `stack` closes."""
    stall_s = Settings.read(stall_s=connection.stall_s).stall_s
    # Use a third of the stall deadline, so that time is left for requests to peers if the hub hangs.
    client = HubClient.connect(connection.hub, connection.token, timeout_s=min(TIMEOUT_S, stall_s / 3))
    member = Member.join(client, connection, stall_s=stall_s)
    stack.callback(member.leave, 0.0)
    return member, stall_s


def rank_of(rank: tuple[int, int] | None) -> tuple[int, int]:
    """Return rank and world size. Without `rank`, use torch.distributed, or (0, 1) if it is not initialised."""
    if rank is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1
    expected = "(rank, world_size) with ranks from 0, such as (0, 4)"
    require_type("rank", rank, tuple, expected)
    for number in rank:
        require_type("rank", number, int, expected)
    if len(rank) != 2 or not 0 <= rank[0] < rank[1]:
        raise wrong("rank", rank, expected)
    return rank


class Membership:
    """The members of a sync, and one connection for each member and channel. Thread-safe."""

    def __init__(
        self, member: Member, name: str, stall_s: float, *, handler: str = "sync", timing: Timing | None = None
    ) -> None:
        self.member = member
        self.name = name
        self.key = sync_key(name)
        self.stall_s = stall_s
        self.timing = Timing() if timing is None else timing
        self._handler = handler
        self._lock = threading.Lock()
        self._members: dict[str, SyncMember] = {}
        self._looked_at = float("-inf")
        self._is_partial = False
        # All connections to a member share a session, because a grant can be used only once.
        self._sessions: dict[str, str] = {}
        self._clients: dict[tuple[str, str], SyncClient] = {}  # by member and channel

    def look(self, *, max_age_s: float = 0.0) -> tuple[SyncMember, ...]:
        """Return all members, oldest first. If the hub is unavailable, return known members or raise HubUnavailable."""
        with self._lock:
            is_listed = self._looked_at > float("-inf")
            if time.monotonic() - self._looked_at <= max_age_s or (is_listed and self.member.registration.hub_is_away):
                return tuple(self._members.values())
        # Do not hold the lock, because a hub that hangs must not block threads that use open sessions.
        try:
            reply = self.member.sync(self.name)
        except HubUnavailable:
            with self._lock:
                if self._looked_at == float("-inf"):
                    raise
                # Record the time after a failure, so that callers in a loop do not wait for the hub each time.
                self._looked_at = time.monotonic()
                return tuple(self._members.values())
        with self._lock:
            # A restarted hub lists only members that have reported after the restart, so add the previous members.
            previous = self._members if reply.is_new else {}
            self._is_partial = reply.is_new
            self._members = previous | {other.member: other for other in reply.members}
            self._looked_at = time.monotonic()
            self._drop(set(self._sessions).difference(self._members))
            return tuple(self._members.values())

    def look_at_all(self, within_s: float) -> tuple[SyncMember, ...]:
        """Return all members. Wait at most `within_s` seconds until a restarted hub knows all members again."""
        deadline = time.monotonic() + within_s
        while True:
            members = self.look()
            if not self._is_partial or time.monotonic() > deadline:
                return members
            time.sleep(self.timing.restarted_hub_pause_s)

    def ask(self, member: str, question: Callable[[SyncClient], T], *, channel: str = "") -> T:
        """Send a request to a member with `question`, in a new session if the member does not know the old one.

        Raise PeerLost if the member left or died, or NotFound if a restarted hub does not know the member yet.
        """
        try:
            return question(self._sync_client(member, channel))
        except PermissionDenied:
            # The session expired or the member restarted, so retry once in a new session.
            with self._lock:
                self._drop({member})
            return question(self._sync_client(member, channel))

    def _sync_client(self, member: str, channel: str) -> SyncClient:
        with self._lock:
            sync_client = self._clients.get((member, channel))
            session = self._sessions.get(member, "")
            known = self._members.get(member)
        if sync_client is not None:
            return sync_client
        if not session or known is None:
            reply = self.member.sync(self.name, grants=(member,))
            known = next((other for other in reply.members if other.member == member), None)
            if known is None and reply.is_new:
                raise NotFound("the hub was restarted and does not know this member yet", uri=f"penstock:{member}")
            if known is None:
                raise PeerLost("the member left this sync", uri=f"penstock:{member}")
        # Do not hold the lock, because connecting to a member that hangs takes up to the stall deadline.
        sync_client = self.connect(known, self.stall_s)
        try:
            session = sync_client.open(session)
        except BaseException:
            sync_client.close()
            raise
        with self._lock:
            self._members.setdefault(member, known)
            self._sessions[member] = session
            shared = self._clients.setdefault((member, channel), sync_client)
        if shared is not sync_client:
            sync_client.close()
        return shared

    def connect(self, other: SyncMember, stall_s: float) -> SyncClient:
        """Return a client for a member. The client connects at its first request."""
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
        """Close the connections to these members and drop their sessions. The caller holds the lock."""
        for member in members:
            self._sessions.pop(member, None)
        for key in [key for key in self._clients if key[0] in members]:
            self._clients.pop(key).close()

    def is_gone(self, other: SyncMember) -> bool:
        """Return whether a member's server refuses connections. A stopped or unreachable process is not gone."""
        # Open a new connection, because the shared connection may be busy with a long poll.
        with contextlib.closing(self.connect(other, self.timing.alive_s)) as sync_client:
            try:
                sync_client.alive()
            except SourceStalled:
                return False  # a stopped process that accepts a connection may continue later
            except PeerLost as error:
                # A refused connection or a failed Unix socket proves that the process exited. A timeout proves nothing.
                refused = (ConnectionError, FileNotFoundError)
                return sync_client.must_be_on_host or isinstance(error.__cause__, refused)
            except PenstockError:
                pass  # the process replied, so it is alive
        return False

    def whereabouts(self, member: str, *, max_age_s: float) -> Whereabouts:
        """Return whether a member takes part, left the sync, or died. The member list may be `max_age_s` old."""
        known = next((other for other in self.look(max_age_s=max_age_s) if other.member == member), None)
        if known is None:
            return "left"
        return "gone" if self.is_gone(known) else "there"

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with self._lock:
            self._drop({member for member, _ in self._clients})


class SyncClient(PeerClient):
    """A session with one member. Any thread may call it, but it sends one request at a time."""

    # Only members of a sync send the statuses 409 and 410.
    refusals: Mapping[int, type[PenstockError]] = {**PeerClient.refusals, 409: PlanError, 410: StaleDescriptor}

    def __init__(
        self,
        other: SyncMember,
        *,
        member: str,
        key: str,
        same_host: bool,
        stall_s: float,
        trust: ssl.SSLContext | None = None,
        handler: str = "sync",
    ) -> None:
        upstream = Upstream(
            member=other.member,
            host=other.host,
            doors=other.doors,
            device="",
            state="whole",
            num_have=0,
            grant=other.grant,
            certificate=other.certificate,
        )
        super().__init__(upstream, member=member, key=key, same_host=same_host, stall_s=stall_s, trust=trust)
        self._handler = handler
        # HTTP/1.1 allows one request at a time on a connection, so a second thread waits for this lock.
        self._requesting = threading.Lock()
        self._session_path = ""

    @property
    def must_be_on_host(self) -> bool:
        """Return whether the member is reachable only at its Unix socket."""
        return self._same_host and (self._address is None or self.is_on_host)

    def open(self, session: str = "") -> str:
        """Open a new session with the grant, or continue the session with the id `session`. Return the session's id."""
        if not session:
            request = SessionRequest(member=self._member, key=self._key, grant=self.upstream.grant)
            session = self._ask("POST", f"/v1/{self._handler}", MemberSession, request).session
        self._session_path = f"/v1/{self._handler}/{session}"
        return session

    def alive(self) -> None:
        """Check that the member's server replies. Raise PeerLost or SourceStalled if the server does not reply."""
        self._ask("GET", "/v1/alive", type(None))

    def layout(self) -> Layout:
        """Return the member's layout. Raise FormatError or PlanError if the layout is invalid."""
        layout = decode(self._ask("GET", f"{self._session_path}/layout", bytes), Layout)
        if layout.member != self.upstream.member:
            raise FormatError(f"the peer sent the layout of a different member, {layout.member}", uri=self._uri())
        # Check the offsets, because they come from another process and are later used as addresses.
        layout.check()
        return layout

    def checkpoint(self) -> messages.TableReply:
        """Return the names, dtypes and shapes of all tensors that the publishers offer."""
        return self._ask("GET", f"{self._session_path}/table", messages.TableReply)

    def part(self, request: messages.PartRequest) -> messages.PartReply:
        """Request this receiver's part of the plan. See `Planner.part`."""
        return self._ask("POST", f"{self._session_path}/part", messages.PartReply, request)

    def news(self, after: int, wait_s: float) -> messages.NewsReply:
        """Return the member's status after a version above `after` has begun, or after `wait_s` seconds."""
        return self._ask(
            "GET", f"{self._session_path}/news?after={after}&wait_ms={int(wait_s * 1000)}", messages.NewsReply
        )

    def version_map(self, version: int, wait_s: float) -> VersionMap:
        """Return a version's descriptors. Raise StaleDescriptor for an outdated version, or NotFound after `wait_s`."""
        query = f"version={version}&wait_ms={int(wait_s * 1000)}"
        version_map = self._ask("GET", f"{self._session_path}/map?{query}", VersionMap)
        # Check the descriptors, which must not make this process connect to a different host.
        self.check_data_ports(version_map.regions)
        return version_map

    def digests(self, strips: Strips, version: int, generation: int, wait_s: float) -> Answer:
        """See `LocalVersion.digests`."""
        request = messages.DigestRequest(version=version, generation=generation, strips=b"", wait_s=wait_s)
        reply = self._ask_of(strips, "digests", request, messages.DigestReply)
        if reply.digests is None:
            return Answer(digests=None, num_ready=reply.num_ready)
        # Reject a short reply, which would leave the last strips unverified.
        if len(reply.digests) != 8 * len(strips):
            raise FormatError("the peer sent a different number of digests from the number requested", uri=self._uri())
        return Answer(digests=np.frombuffer(reply.digests, "<u8").astype(np.uint64), num_ready=reply.num_ready)

    def pack(
        self, strips: Strips, version: int, generation: int, wait_s: float, release: tuple[str, ...]
    ) -> messages.PackReply:
        """Release the leases in `release`, and request a buffer with these strips. See `LocalVersion.pack`."""
        request = messages.PackRequest(
            version=version, generation=generation, strips=b"", wait_s=wait_s, release=release
        )
        reply = self._ask_of(strips, "pack", request, messages.PackReply)
        if reply.regions is not None:
            self.check_data_ports((reply.regions,))
        return reply

    def hold_packed(self, keep: tuple[str, ...], release: tuple[str, ...]) -> None:
        """See `LocalVersion.hold_packed`."""
        self._ask("POST", f"{self._session_path}/packed", type(None), messages.PackLeases(keep=keep, release=release))

    def progress(self, progress: messages.RankProgress) -> None:
        """Report this receiver's progress to a planner."""
        self._ask("POST", f"{self._session_path}/progress", type(None), progress)

    def decision(self, version: int, wait_s: float) -> messages.Decision:
        """Return rank 0's decision about a live version, with the outcome for each subscriber."""
        query = f"version={version}&wait_ms={int(wait_s * 1000)}"
        return self._ask("GET", f"{self._session_path}/decision?{query}", messages.Decision)

    def begins_after(self, rank: int, wait_s: float) -> int:
        """Return the version that a rank's versions must exceed. Raise NotFound if rank 0 does not own the name yet."""
        query = f"rank={rank}&wait_ms={int(wait_s * 1000)}"
        return self._ask("GET", f"{self._session_path}/begins_after?{query}", messages.BeginsAfter).version

    def _ask_of(self, strips: Strips, route: str, request: messages.DigestRequest, kind: type[_OfStrips]) -> _OfStrips:
        sent = [np.ascontiguousarray(column, "<i8").tobytes() for column in strips.columns]
        # The strips of a plan can take megabytes, so send their digest, and send them only if the digest is unknown.
        named = msgspec.structs.replace(request, strips=name_of_strips(*sent))
        reply = self._ask("POST", f"{self._session_path}/{route}", kind, named)
        if reply.is_unknown:
            at, run_bytes, num_rows, pitch = sent
            full = msgspec.structs.replace(named, at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
            reply = self._ask("POST", f"{self._session_path}/{route}", kind, full)
        return reply

    def _send(self, verb: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        with self._requesting:
            was_open = self._connection is not None and self._connection.is_open
            try:
                return super()._send(verb, path, body)
            except PeerLost:
                # Retry once, because the server closes idle connections. A repeated `pack` only uses a second buffer.
                if not was_open:
                    raise
                return super()._send(verb, path, body)

    def close(self) -> None:
        """Close the connection. The member ends a session that sends no requests for some time. Idempotent."""
        # Do not acquire `_requesting`, because `close` must also interrupt a request that waits for its reply.
        with self._ending:
            self._is_ending = True
        if self._connection is not None:
            self._connection.close()


def name_of_strips(*columns: bytes) -> bytes:
    """Return a digest that identifies strips, computed from their number and their columns."""
    # Include the number of strips, because columns of different lengths could otherwise have the same digest.
    digest = blake3(len(columns[0]).to_bytes(8, "little"))
    for column in columns:
        digest.update(column)
    return digest.digest(length=16)
