"""Client for one member of a sync: open a session at its server, then send requests in it.

In: a `SyncMember` from the hub, with a grant. Out: layouts, parts, maps, digests, news; typed errors.
Not here: the server side (`request_handler`), choosing the member (`membership`), reading bytes
(`sync.receive.transfer`).
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
from penstock.hub.messages import (
    Decision,
    DigestReply,
    DigestRequest,
    Fault,
    NewsReply,
    PartReply,
    PartRequest,
    Progress,
    Session,
    SessionRequest,
    SyncMember,
    TableReply,
    Upstream,
)
from penstock.peer.client import PeerClient
from penstock.plan.layout import Layout, decode
from penstock.sync.local_version import Answer, VersionMap

T = TypeVar("T")


class SyncClient(PeerClient):
    """A session with one member; one request at a time, from any thread.

    Args:
        other: the member to talk to, with a grant.
        member: the id of this member.
        key: the key of the sync's name.
        same_host: whether the member's Unix socket can be reached.
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
        self.same_host = same_host
        self._handler = handler
        # HTTP/1.1 carries one request at a time on a connection: a second thread waits here. Callers that must not
        # wait for a long poll use a client of their own (`Membership.ask(channel=)`).
        self._asking = threading.Lock()
        self._session = ""

    def open(self, session: str = "") -> str:
        """Open a session with the grant, or continue `session`; return the session's id.

        Raises:
            PermissionDenied: the grant is not accepted. NotFound: the member takes no part in this sync.
            PeerLost, SourceStalled: the member is gone, or does not answer.
        """
        if not session:  # a grant can be used once; further connections to this member continue its session
            request = SessionRequest(member=self._member, key=self._key, grant=self.upstream.grant)
            body = msgspec.msgpack.encode(request)
            with self._asking:
                opened = self._ask("POST", f"/v1/{self._handler}", Session, body)
            self._check_version(opened.protocol)
            session = opened.session
        self._session = session
        return session

    def alive(self) -> None:
        """Return if the member's server answers. PeerLost, SourceStalled: it does not."""
        with self._asking:
            self._ask("GET", "/v1/alive", type(None))

    def layout(self) -> Layout:
        """Return the member's layout. FormatError, PlanError: the answer is not a valid layout."""
        layout = decode(self._question("GET", "layout", bytes), Layout)
        if layout.member != self.upstream.member:
            raise FormatError(f"the peer sent the layout of another member, {layout.member}", uri=self._uri())
        layout.check()  # it comes from another process: offsets are used as addresses later
        return layout

    def checkpoint(self) -> TableReply:
        """Return the names, dtypes and shapes that all publishers hold together."""
        return self._question("GET", "table", TableReply)

    def part(self, request: PartRequest) -> PartReply:
        """Request the part that this receiver reads; see `Planner.part`."""
        return self._question("POST", "part", PartReply, request)

    def news(self, after: int, wait_s: float) -> NewsReply:
        """Return the member's version status once it has begun a version above `after`, or after `wait_s`."""
        return self._question("GET", f"news?after={after}&wait_ms={int(wait_s * 1000)}", NewsReply)

    def version_map(self, version: int, wait_s: float) -> VersionMap:
        """Return the descriptors to read a version by, once the member has begun it.

        Raises:
            StaleDescriptor: the member is past that version. NotFound: it did not begin the version within `wait_s`.
        """
        version_map = self._question("GET", f"map?version={version}&wait_ms={int(wait_s * 1000)}", VersionMap)
        self.check_data_ports(version_map.regions)
        return version_map

    def digests(self, strips: Strips, version: int, generation: int, wait_s: float) -> Answer:
        """See `LocalVersion.digests`."""
        columns = (strips.at, strips.run_bytes, strips.num_rows, strips.pitch)
        sent = [np.ascontiguousarray(column, "<i8").tobytes() for column in columns]
        # The strips are the same for every version of a plan and can be megabytes: send their name alone, and the
        # columns only when the member does not remember them.
        request = DigestRequest(version=version, generation=generation, strips=name_of(*sent), wait_s=wait_s)
        reply = self._question("POST", "digests", DigestReply, request)
        if reply.is_unknown:
            at, run_bytes, num_rows, pitch = sent
            full = msgspec.structs.replace(request, at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
            reply = self._question("POST", "digests", DigestReply, full)
        if reply.digests is None:
            return Answer(digests=None, num_ready=reply.num_ready)
        # A short answer would leave the last strips without a comparison.
        if len(reply.digests) != 8 * len(strips):
            raise FormatError(
                "the peer answered with a different number of digests than was requested", uri=self._uri()
            )
        return Answer(digests=np.frombuffer(reply.digests, "<u8").astype(np.uint64), num_ready=reply.num_ready)

    def progress(self, progress: Progress) -> None:
        """Report this receiver's progress to a planner."""
        self._question("POST", "progress", type(None), progress)

    def decision(self, version: int, wait_s: float) -> Decision:
        """Return rank 0's decision about a live version: whether it may end, and the outcome per subscriber."""
        return self._question("GET", f"decision?version={version}&wait_ms={int(wait_s * 1000)}", Decision)

    def _question(self, verb: str, path: str, kind: type[T], body: object = None) -> T:
        raw = None if body is None else msgspec.msgpack.encode(body)
        with self._asking:
            return self._ask(verb, f"/v1/{self._handler}/{self._session}/{path}", kind, raw)

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
            raise FormatError(f"the peer's answer cannot be decoded: {error}", uri=self._uri()) from error

    def _send(self, verb: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Send a request; send it again where a connection that was open before turns out to be closed."""
        was_open = self._connection is not None and self._connection.is_open
        try:
            return super()._send(verb, path, body)
        except PeerLost:
            # The server closes idle connections, and a request that crosses that close fails although the peer lives.
            # All requests of this protocol are idempotent, so one more attempt on a new connection is safe.
            if not was_open:
                raise
            return super()._send(verb, path, body)

    def close(self) -> None:
        """Close the connection; the member ends the session after a time without requests. Idempotent."""
        # Not under `_asking`: a close must also end a request that waits for its answer.
        with self._ending:
            self._is_ending = True
        if self._connection is not None:
            self._connection.close()


def name_of(*columns: bytes) -> bytes:
    """Return the name of a set of strips: a digest of their number and their columns."""
    digest = blake3(len(columns[0]).to_bytes(8, "little"))
    for column in columns:
        digest.update(column)
    return digest.digest(length=16)


_KINDS: dict[int, type[PenstockError]] = {409: PlanError, 410: StaleDescriptor}


def _fault(raw: bytes) -> str:
    try:
        return msgspec.msgpack.decode(raw, type=Fault).error
    except msgspec.DecodeError:
        return "the peer gave no reason"
