"""The members of a sync, and the conversations with them: listed by the hub, and usable while the hub is away.

In: this process's member, a name. Out: the members of the sync; answers to requests: layouts, parts, maps, digests,
news; typed errors.
Not here: the server side (`request_handler`), the use of the answers (`publish.publisher`, `receive.update`,
`planner`), reading bytes (`receive.transfer`).

    Membership.look: hub -> members;  Membership.ask: grant (once) -> session -> one SyncClient per member and channel

A session outlives versions and the hub: known members need no hub until one of them restarts.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec
import numpy as np
import torch
from blake3 import blake3

from penstock.arguments import require_type, wrong
from penstock.config import ConnectionSettings, Settings
from penstock.digest.strip import Strips
from penstock.errors import (
    MALFORMED,
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
from penstock.hub.messages import Fault, MemberSession, SessionRequest, SyncMember, Upstream, sync_key
from penstock.peer.client import PeerClient, refusal_of
from penstock.peer.member import Member
from penstock.plan.layout import Layout, decode
from penstock.sync.local_version import Answer, VersionMap
from penstock.sync.messages import (
    BeginsAfter,
    Decision,
    DigestReply,
    DigestRequest,
    NewsReply,
    PackLeases,
    PackReply,
    PackRequest,
    PartReply,
    PartRequest,
    RankProgress,
    TableReply,
)
from penstock.timing import Timing

T = TypeVar("T")
_OfStrips = TypeVar("_OfStrips", DigestReply, PackReply)
Whereabouts = Literal["there", "left", "gone"]


def joined(stack: contextlib.ExitStack, connection: ConnectionSettings) -> tuple[Member, float]:
    """Return this process as a member, which leaves with the stack, and its stall deadline."""
    stall_s = Settings.read(stall_s=connection.stall_s).stall_s
    # A third of the stall deadline: a hub that hangs must leave time for the peers to be asked within the deadline.
    client = HubClient.connect(connection.hub, connection.token, timeout_s=min(TIMEOUT_S, stall_s / 3))
    member = Member.join(client, connection, stall_s=stall_s)
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
        timing: the waiting times.
    """

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
        # One session per member, shared by its connections: a grant can be used once.
        self._sessions: dict[str, str] = {}
        # By member and channel.
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
            self._is_partial = reply.is_new
            self._members = before | {other.member: other for other in reply.members}
            self._looked_at = time.monotonic()
            # A member that left will not come back under its id: close its connections.
            self._drop(set(self._sessions).difference(self._members))
            return tuple(self._members.values())

    def look_at_all(self, within_s: float) -> tuple[SyncMember, ...]:
        """Return all members; wait at most `within_s` until a hub that was just restarted knows them again."""
        deadline = time.monotonic() + within_s
        while True:
            members = self.look()
            if not self._is_partial or time.monotonic() > deadline:
                return members
            time.sleep(self.timing.restarted_hub_pause_s)

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

    def _sync_client(self, member: str, channel: str) -> SyncClient:
        """Return the connection to a member for a channel, opened at its first use."""
        with self._lock:
            sync_client = self._clients.get((member, channel))
            session = self._sessions.get(member, "")
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
        # Outside the lock: connecting to a member that hangs takes up to the stall deadline.
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
        # The connection was opened without the lock, so two threads may have opened one each: both use the first.
        if shared is not sync_client:
            sync_client.close()
        return shared

    def connect(self, other: SyncMember, stall_s: float) -> SyncClient:
        """Return a client of a member, which connects at its first request."""
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
        """Close the connections to these members, and forget their sessions. Order: the caller has the lock."""
        for member in members:
            self._sessions.pop(member, None)
        for key in [key for key in self._clients if key[0] in members]:
            self._clients.pop(key).close()

    def is_gone(self, other: SyncMember) -> bool:
        """Return whether a member's server refuses connections; False for a process that is stopped or out of reach."""
        # A connection of its own with a short deadline: the shared one may be busy with a long poll.
        with contextlib.closing(self.connect(other, self.timing.alive_s)) as sync_client:
            try:
                sync_client.alive()
            except SourceStalled:
                # Connected, without an answer: a stopped or busy process, which may go on.
                return False
            except PeerLost as error:
                # On this host a failed connection to the Unix socket proves that the process ended. From another
                # host only an active refusal does: a timeout or an unreachable network says nothing about it.
                refused = (ConnectionError, FileNotFoundError)
                return sync_client.must_be_on_host or isinstance(error.__cause__, refused)
            except PenstockError:
                # An answer of any kind comes from a process that lives.
                return False
        return False

    def whereabouts(self, member: str, *, max_age_s: float) -> Whereabouts:
        """Return whether a member takes part, left the sync, or died; the list may be `max_age_s` old."""
        known = next((other for other in self.look(max_age_s=max_age_s) if other.member == member), None)
        if known is None:
            return "left"
        return "gone" if self.is_gone(known) else "there"

    def has_left(self, member: str, *, max_age_s: float) -> bool:
        """Return whether a member left the sync, or its process is gone; the list may be `max_age_s` old."""
        return self.whereabouts(member, max_age_s=max_age_s) != "there"

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with self._lock:
            self._drop({member for member, _ in self._clients})


class SyncClient(PeerClient):
    """A session with one member; one request at a time, from any thread.

    Args:
        other: the member to talk to, with a grant.
        member: the id of this member.
        key: the key of the sync's name.
        same_host: see `PeerClient`.
        stall_s: the deadline of every answer.
        handler: the name of the request handler at the member's server.
        trust: see `PeerClient`.
    """

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
        # HTTP/1.1 carries one request at a time on a connection: a second thread waits here. Callers that must not
        # wait for a long poll use a client of their own (`Membership.ask(channel=)`).
        self._asking = threading.Lock()
        # The path of the session's requests, once it is open.
        self._session_path = ""

    @property
    def must_be_on_host(self) -> bool:
        """Return whether the member is reached at its Unix socket or not at all."""
        return self._same_host and (self._address is None or self.is_on_host)

    def open(self, session: str = "") -> str:
        """Open a session with the grant, or continue `session`; return the session's id.

        Raises:
            PermissionDenied: the grant is not accepted. NotFound: the member takes no part in this sync.
            PeerLost, SourceStalled: the member is gone, or does not answer.
        """
        # A grant can be used once; further connections to this member continue its session.
        if not session:
            request = SessionRequest(member=self._member, key=self._key, grant=self.upstream.grant)
            session = self._ask("POST", f"/v1/{self._handler}", MemberSession, request).session
        self._session_path = f"/v1/{self._handler}/{session}"
        return session

    def alive(self) -> None:
        """Return if the member's server answers. PeerLost, SourceStalled: it does not."""
        self._ask("GET", "/v1/alive", type(None))

    def layout(self) -> Layout:
        """Return the member's layout. FormatError, PlanError: the answer is not a valid layout."""
        layout = decode(self._ask("GET", f"{self._session_path}/layout", bytes), Layout)
        if layout.member != self.upstream.member:
            raise FormatError(f"the peer sent the layout of another member, {layout.member}", uri=self._uri())
        # It comes from another process, and its offsets are used as addresses later.
        layout.check()
        return layout

    def checkpoint(self) -> TableReply:
        """Return the names, dtypes and shapes of all publishers' tensors together."""
        return self._ask("GET", f"{self._session_path}/table", TableReply)

    def part(self, request: PartRequest) -> PartReply:
        """Request the part that this receiver reads; see `Planner.part`."""
        return self._ask("POST", f"{self._session_path}/part", PartReply, request)

    def news(self, after: int, wait_s: float) -> NewsReply:
        """Return the member's version status once it has begun a version above `after`, or after `wait_s`."""
        return self._ask("GET", f"{self._session_path}/news?after={after}&wait_ms={int(wait_s * 1000)}", NewsReply)

    def version_map(self, version: int, wait_s: float) -> VersionMap:
        """Return the descriptors to read a version by, once the member has begun it.

        Raises:
            StaleDescriptor: the member is past that version. NotFound: it did not begin the version within `wait_s`.
        """
        query = f"version={version}&wait_ms={int(wait_s * 1000)}"
        version_map = self._ask("GET", f"{self._session_path}/map?{query}", VersionMap)
        # A peer may only name ports of its own host: a descriptor must not send this process to another address.
        self.check_data_ports(version_map.regions)
        return version_map

    def digests(self, strips: Strips, version: int, generation: int, wait_s: float) -> Answer:
        """See `LocalVersion.digests`."""
        request = DigestRequest(version=version, generation=generation, strips=b"", wait_s=wait_s)
        reply = self._ask_of(strips, "digests", request, DigestReply)
        if reply.digests is None:
            return Answer(digests=None, num_ready=reply.num_ready)
        # A short answer would leave the last strips without a comparison.
        if len(reply.digests) != 8 * len(strips):
            raise FormatError(
                "the peer answered with a different number of digests than was requested", uri=self._uri()
            )
        return Answer(digests=np.frombuffer(reply.digests, "<u8").astype(np.uint64), num_ready=reply.num_ready)

    def pack(self, strips: Strips, version: int, generation: int, wait_s: float, release: tuple[str, ...]) -> PackReply:
        """See `LocalVersion.pack`; first ends the leases of `release`."""
        request = PackRequest(version=version, generation=generation, strips=b"", wait_s=wait_s, release=release)
        reply = self._ask_of(strips, "pack", request, PackReply)
        if reply.regions is not None:
            self.check_data_ports((reply.regions,))
        return reply

    def hold_packed(self, keep: tuple[str, ...], release: tuple[str, ...]) -> None:
        """See `LocalVersion.hold_packed`."""
        self._ask("POST", f"{self._session_path}/packed", type(None), PackLeases(keep=keep, release=release))

    def progress(self, progress: RankProgress) -> None:
        """Report this receiver's progress to a planner."""
        self._ask("POST", f"{self._session_path}/progress", type(None), progress)

    def decision(self, version: int, wait_s: float) -> Decision:
        """Return rank 0's decision about a live version: whether it may end, and the outcome per subscriber."""
        query = f"version={version}&wait_ms={int(wait_s * 1000)}"
        return self._ask("GET", f"{self._session_path}/decision?{query}", Decision)

    def begins_after(self, rank: int, wait_s: float) -> int:
        """Return the version above which a rank begins, from rank 0. NotFound: it does not own the name yet."""
        query = f"rank={rank}&wait_ms={int(wait_s * 1000)}"
        return self._ask("GET", f"{self._session_path}/begins_after?{query}", BeginsAfter).version

    def _ask_of(self, strips: Strips, route: str, request: DigestRequest, kind: type[_OfStrips]) -> _OfStrips:
        """Send a request about strips and decode the answer."""
        columns = (strips.at, strips.run_bytes, strips.num_rows, strips.pitch)
        sent = [np.ascontiguousarray(column, "<i8").tobytes() for column in columns]
        # The strips are the same for every version of a plan and can be megabytes: send their name alone, and the
        # columns only when the member does not remember them.
        named = msgspec.structs.replace(request, strips=name_of_strips(*sent))
        reply = self._ask("POST", f"{self._session_path}/{route}", kind, named)
        if reply.is_unknown:
            at, run_bytes, num_rows, pitch = sent
            full = msgspec.structs.replace(named, at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
            reply = self._ask("POST", f"{self._session_path}/{route}", kind, full)
        return reply

    def _ask(self, verb: str, path: str, kind: type[T], body: object = None) -> T:
        """Send a request and decode the answer; raise the error that the member answered with."""
        encoded = None if body is None else msgspec.msgpack.encode(body)
        with self._asking:
            code, raw = self._send(verb, path, encoded)
        if code == 204 and kind is type(None):
            return None
        if code in _KINDS:
            fault = _fault(raw)
            raise _KINDS[code](fault.error, uri=self._uri(), hint=fault.hint or None)
        if code != 200:
            raise refusal_of(self._uri(), code, raw)
        try:
            return self._decode(raw, kind)
        except MALFORMED as error:
            raise FormatError(f"the peer's answer cannot be decoded: {error}", uri=self._uri()) from error

    def _send(self, verb: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Send a request; send it again where a connection that was open before turns out to be closed."""
        was_open = self._connection is not None and self._connection.is_open
        try:
            return super()._send(verb, path, body)
        except PeerLost:
            # The server closes idle connections, and a request that crosses that close fails although the peer lives.
            # One more attempt on a new connection is safe: requests are idempotent. Only `pack` takes a second buffer,
            # and the lease of the first lapses.
            if not was_open:
                raise
            return super()._send(verb, path, body)

    def close(self) -> None:
        """Close the connection; the member ends the session after a time without requests. Idempotent."""
        # Not under `_asking`: a close must also end a request that waits for its answer.
        with self._ending:
            # From here on `interrupt` leaves the connection alone.
            self._is_ending = True
        if self._connection is not None:
            self._connection.close()


def name_of_strips(*columns: bytes) -> bytes:
    """Return the name of a set of strips: a digest of their number and their columns."""
    # With the number: columns of other lengths could else join to the same bytes.
    digest = blake3(len(columns[0]).to_bytes(8, "little"))
    for column in columns:
        digest.update(column)
    return digest.digest(length=16)


_KINDS: dict[int, type[PenstockError]] = {409: PlanError, 410: StaleDescriptor}
"""The errors that only a sync's members answer with; the others are those of `PeerClient`."""


def _fault(raw: bytes) -> Fault:
    try:
        return msgspec.msgpack.decode(raw, type=Fault)
    except MALFORMED:
        return Fault(error="the peer gave no reason")
