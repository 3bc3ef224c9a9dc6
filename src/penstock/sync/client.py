"""Ask one member of a sync at its server: open a session, then send questions in it.

In: a `SyncMember` of the hub's, with a grant. Out: layouts, parts, maps, digests, news; typed errors.
Not here: the other side (`request_handler`), who is asked (`membership`), reading bytes (`sync.receive.transfer`).
"""

from __future__ import annotations

import ssl
import threading
from typing import TypeVar

import msgspec
import numpy as np
from blake3 import blake3

from penstock.digest.strip import Strips
from penstock.errors import FormatError, PeerLost, PenstockError, PlanError, StaleDescriptor
from penstock.hub.messages import Fault, Upstream
from penstock.hub.sync_messages import (
    Decision,
    DigestReply,
    DigestRequest,
    NewsReply,
    PartReply,
    PartRequest,
    Progress,
    Session,
    SessionRequest,
    SyncMember,
    TableReply,
)
from penstock.peer.client import PeerClient
from penstock.plan.columns import decode
from penstock.plan.layout import Layout
from penstock.sync.local_version import Answer, VersionMap

T = TypeVar("T")


class SyncClient(PeerClient):
    """A session with one member; one question at a time, from any thread.

    Args:
        other: whom, with a grant.
        member: who we are.
        key: of the sync's name.
        same_host: whether its Unix door can be reached.
        stall_s: deadline of every answer.
        room: of its door.
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
        room: str = "sync",
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
        self.same_host, self._room = same_host, room
        self._asking = threading.Lock()
        self._session = ""

    def open(self, session: str = "") -> str:
        """Begin, by our grant or in the session of another conversation of ours; which session it is.

        Raises:
            PermissionDenied: the grant does not do. NotFound: it takes no part in this sync.
            PeerLost, SourceStalled: it is gone, or does not answer.
        """
        if not session:
            request = SessionRequest(member=self._member, key=self._key, grant=self.upstream.grant)
            body = msgspec.msgpack.encode(request)
            with self._asking:
                opened = self._ask("POST", f"/v1/{self._room}", Session, body)
            self._check_version(opened.protocol)
            session = opened.session
        self._session = session
        return session

    def alive(self) -> None:
        """Return if its door answers. PeerLost, SourceStalled: it does not."""
        with self._asking:
            self._ask("GET", "/v1/alive", type(None))

    def layout(self) -> Layout:
        """Return its layout. FormatError, PlanError: what it sent is not one."""
        found = decode(self._question("GET", "layout", bytes), Layout)
        if found.member != self.upstream.member:
            raise FormatError(f"it sent a layout of {found.member}", uri=self._uri())
        found.check()
        return found

    def checkpoint(self) -> TableReply:
        """The checkpoint that all publishers hold together."""
        return self._question("GET", "table", TableReply)

    def part(self, request: PartRequest) -> PartReply:
        """Request the part that this receiver reads; see `Planner.part`."""
        return self._question("POST", "part", PartReply, request)

    def news(self, after: int, wait_s: float) -> NewsReply:
        """Return its version status once it has begun a version above `after`, or after `wait_s`."""
        return self._question("GET", f"news?after={after}&wait_ms={int(wait_s * 1000)}", NewsReply)

    def held_map(self, version: int, wait_s: float) -> VersionMap:
        """Return the map by which a version is read, once the member has begun it.

        Raises:
            StaleDescriptor: it is past that version. NotFound: it has not begun it in `wait_s`.
        """
        found = self._question("GET", f"map?version={version}&wait_ms={int(wait_s * 1000)}", VersionMap)
        self.check_data_ports(found.regions)
        return found

    def digests(self, strips: Strips, version: int, generation: int, wait_s: float) -> Answer:
        """See `LocalVersion.digests`."""
        columns = (strips.at, strips.run_bytes, strips.num_rows, strips.pitch)
        told = [np.ascontiguousarray(column, "<i8").tobytes() for column in columns]
        request = DigestRequest(version=version, generation=generation, strips=name_of(*told), wait_s=wait_s)
        reply = self._question("POST", "digests", DigestReply, request)
        if reply.is_unknown:
            at, run_bytes, num_rows, pitch = told
            full = msgspec.structs.replace(request, at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
            reply = self._question("POST", "digests", DigestReply, full)
        if reply.digests is None:
            return Answer(digests=None, num_ready=reply.num_ready)
        if len(reply.digests) != 8 * len(strips):
            raise FormatError(
                "the peer answered with a different number of digests than was requested", uri=self._uri()
            )
        return Answer(digests=np.frombuffer(reply.digests, "<u8").astype(np.uint64), num_ready=reply.num_ready)

    def progress(self, progress: Progress) -> None:
        """Tell a planner how far we are."""
        self._question("POST", "progress", type(None), progress)

    def decision(self, version: int, wait_s: float) -> Decision:
        """Return whether rank 0 reports that a live version may end."""
        return self._question("GET", f"decision?version={version}&wait_ms={int(wait_s * 1000)}", Decision)

    def _question(self, verb: str, path: str, kind: type[T], body: object = None) -> T:
        raw = None if body is None else msgspec.msgpack.encode(body)
        with self._asking:
            return self._ask(verb, f"/v1/{self._room}/{self._session}/{path}", kind, raw)

    def _ask(self, verb: str, path: str, kind: type[T], body: bytes | None = None) -> T:
        code, raw = self._send(verb, path, body)
        if code == 204 and kind is type(None):
            return None
        if code in _KINDS:
            raise _KINDS[code](_fault(raw), uri=self._uri())
        if code != 200:
            raise self._refusal(code, raw)
        try:
            return msgspec.msgpack.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            raise FormatError(f"a malformed answer: {error}", uri=self._uri()) from error

    def _send(self, verb: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Every question may be put twice: it is, where the connection was closed for being idle."""
        had = self._connection is not None and self._connection.is_open
        try:
            return super()._send(verb, path, body)
        except PeerLost:
            if not had:
                raise
            return super()._send(verb, path, body)

    def close(self) -> None:
        """Let go of the connection; the session ends there by silence. Idempotent."""
        with self._ending:
            self._is_ending = True
        if self._connection is not None:
            self._connection.close()


def name_of(*columns: bytes) -> bytes:
    """Return the name of a set of strips: their number and a digest of their columns."""
    digest = blake3(len(columns[0]).to_bytes(8, "little"))
    for column in columns:
        digest.update(column)
    return digest.digest(length=16)


_KINDS: dict[int, type[PenstockError]] = {409: PlanError, 410: StaleDescriptor}


def _fault(raw: bytes) -> str:
    try:
        return msgspec.msgpack.decode(raw, type=Fault).error
    except msgspec.DecodeError:
        return "no reason is given"
