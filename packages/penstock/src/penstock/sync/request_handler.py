"""The request handler of a sync member, which serves the member's map, digests, planned parts and progress to peers.

`POST /v1/sync` opens a session. `SyncHandler._get` and `_post` list the routes below `/v1/sync/SESSION`. A client
repeats a request whose connection broke. All requests are idempotent except `pack`. A repeated `pack` uses a second
buffer until the lease of the first buffer expires.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import numpy as np

from penstock.digest.strip import Strips
from penstock.errors import FormatError, NotFound, PermissionDenied, StaleDescriptor
from penstock.holding.placement import decode_column
from penstock.hub.messages import LeaseRequest, MemberSession, SessionRequest
from penstock.peer.server import MAX_BODY_BYTES, MAX_WAIT_S, check_version
from penstock.plan.layout import encode
from penstock.sync import messages
from penstock.sync.commit.announced import VersionStatus
from penstock.sync.commit.coordinator import CommitCoordinator
from penstock.sync.commit.outcome import PartOutcome, to_decision, to_part_reply
from penstock.sync.local_version import LocalVersion, VersionMap
from penstock.sync.membership import name_of_strips
from penstock.sync.publish.rank_group import FirstVersions

SESSION_S = 600.0
"""Seconds after which an unused session ends. A training step is shorter, so the session outlives it."""
MAX_MESSAGE_BYTES = 256 << 20
"""Maximum size of a request in a session, such as a layout with four million rows."""
MAX_STRIPS = 4 << 20
"""Maximum number of strips stored by name for all peers in total. They take 128 MiB."""


class Plans(Protocol):
    """A planner for other members: a sync's `Planner`, or among publishers a `BoundaryPlanner`."""

    def part(self, asker: str, request: messages.PartRequest) -> PartOutcome:
        """Return the requester's part of the plan."""

    def table(self) -> messages.TableReply:
        """Return the table of the offered tensors."""


class _OpenSession(msgspec.Struct):
    member: str
    seen: float


class SyncHandler(msgspec.Struct, eq=False, dict=True):
    """The handler of a member. `admit` consumes a grant, and `check` tests whether the memory may be served."""

    key: str
    admit: Callable[[LeaseRequest], object]
    local_version: Callable[[], LocalVersion | None]
    version_status: VersionStatus
    planner: Plans
    coordinator: CommitCoordinator | None = None
    first_versions: FirstVersions | None = None
    check: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, _OpenSession] = {}
        self._strips: OrderedDict[bytes, Strips] = OrderedDict()  # least recently used first

    def answer(
        self, verb: str, path: list[str], query: Mapping[str, list[str]], body: Callable[[int], bytes]
    ) -> object:
        """See `peer.server.RequestHandler`."""
        if verb == "POST" and not path:
            raw = body(MAX_BODY_BYTES)
            # Check the version first, because the fields of another release may not decode.
            check_version(raw)
            return self._open(msgspec.msgpack.decode(raw, type=SessionRequest))
        if verb not in ("GET", "POST") or len(path) != 2:
            raise NotFound(f"there is no route for {verb} with {len(path)} path segments")
        member = self._member_of(path[0])
        # Read every body, to reuse the connection. Only a member with a session may send 256 MiB.
        raw = body(MAX_MESSAGE_BYTES if member is not None else MAX_BODY_BYTES) if verb == "POST" else b""
        if member is None:
            raise PermissionDenied("the session is unknown or has ended", hint="request a new grant from the hub")
        if verb == "POST":
            return self._post(member, path[1], raw)
        number = {name: _number(query, name) for name in ("after", "version", "rank", "wait_ms")}
        return self._get(member, path[1], number, min(number["wait_ms"] / 1000, MAX_WAIT_S))

    def _open(self, request: SessionRequest) -> MemberSession:
        if request.key != self.key:
            raise NotFound("this member is not part of the requested sync")
        self.admit(LeaseRequest(member=request.member, key=request.key, grant=request.grant))
        # The id is the only authorisation of later requests.
        session = secrets.token_hex(16)
        with self._lock:
            now = time.monotonic()
            for expired in [name for name, known in self._sessions.items() if now - known.seen > SESSION_S]:
                del self._sessions[expired]
            self._sessions[session] = _OpenSession(request.member, now)
        return MemberSession(session=session, ttl_s=SESSION_S)

    def _member_of(self, session: str) -> str | None:
        with self._lock:
            known = self._sessions.get(session)
            if known is None or time.monotonic() - known.seen > SESSION_S:
                return None
            known.seen = time.monotonic()
            return known.member

    def _get(self, member: str, route: str, number: Mapping[str, int], wait_s: float) -> object:
        match route:
            case "layout":
                return encode(self._served().layout)
            case "table":
                return self.planner.table()
            case "news":
                return self.version_status.wait(number["after"], wait_s)
            case "map":
                return self._map(number["version"], wait_s)
            case "decision" if self.coordinator is not None:
                return to_decision(self.coordinator.outcome(number["version"], wait_s))
            case "begins_after" if self.first_versions is not None:
                return messages.BeginsAfter(version=self.first_versions.of(number["rank"], member, wait_s))
        raise NotFound(f"there is no route GET {route[:64]!r} at this member")

    def _post(self, member: str, route: str, raw: bytes) -> object:
        coordinator = self.coordinator
        match route:
            case "part":
                # Planning may take longer than the deadline of a live publish.
                if coordinator is not None:
                    coordinator.note_request(member)
                return to_part_reply(self.planner.part(member, msgspec.msgpack.decode(raw, type=messages.PartRequest)))
            case "digests":
                return self._digests(msgspec.msgpack.decode(raw, type=messages.DigestRequest))
            case "pack":
                return self._pack(msgspec.msgpack.decode(raw, type=messages.PackRequest))
            case "packed":
                leases = msgspec.msgpack.decode(raw, type=messages.PackLeases)
                self._served().hold_packed(leases.keep, leases.release)
                return None
            case "progress":
                report = msgspec.msgpack.decode(raw, type=messages.RankProgress)
                if coordinator is not None:
                    coordinator.note_progress(member, report)
                return None
        raise NotFound(f"there is no route POST {route[:64]!r} at this member")

    def _served(self) -> LocalVersion:
        served = self.local_version()
        if served is None:
            raise NotFound("this member has no version yet")
        return served

    def _map(self, version: int, wait_s: float) -> VersionMap:
        # The check digests all of the memory, so it does not run for each digest request.
        self.check()
        served = self._served()
        deadline = time.monotonic() + wait_s
        with served.lock:
            while served.version is None or served.version < version:
                if self.version_status.is_past(version):
                    break
                if (now := time.monotonic()) >= deadline:
                    raise NotFound(f"this member has not begun version {version} yet")
                # The version status has a separate condition variable, so check it ten times a second.
                served.wait_until(
                    lambda: served.version is not None and served.version >= version, min(deadline, now + 0.1)
                )
            # Hold the lock, so that no fence happens between the check above and reading the map.
            version_map = served.map()
        if version_map.version != version:
            raise StaleDescriptor(f"version {version} was replaced by version {version_map.version}")
        return version_map

    def _digests(self, request: messages.DigestRequest) -> messages.DigestReply:
        strips = self._known_strips(request)
        if strips is None:
            return messages.DigestReply(digests=None, num_ready=0, is_unknown=True)
        wait_s = min(request.wait_s, MAX_WAIT_S)
        answer = self._served().digests(strips, version=request.version, generation=request.generation, wait_s=wait_s)
        encoded = None if answer.digests is None else np.ascontiguousarray(answer.digests, "<u8").tobytes()
        return messages.DigestReply(digests=encoded, num_ready=answer.num_ready)

    def _pack(self, request: messages.PackRequest) -> messages.PackReply:
        served = self._served()
        # Release buffers first, because the caller may receive a buffer that this request releases.
        served.hold_packed((), request.release)
        strips = self._known_strips(request)
        if strips is None:
            return messages.PackReply(is_unknown=True)
        wait_s = min(request.wait_s, MAX_WAIT_S)
        return served.pack(strips, version=request.version, generation=request.generation, wait_s=wait_s)

    def _known_strips(self, request: messages.DigestRequest) -> Strips | None:
        """Return the strips that were sent under this name, or None if the peer must send them."""
        with self._lock:
            strips = self._strips.get(request.strips)
            if strips is not None:
                self._strips.move_to_end(request.strips)
                return strips
        columns = (request.at, request.run_bytes, request.num_rows, request.pitch)
        # All peers share these names, so check that the columns match the requested name.
        if name_of_strips(*columns) != request.strips:
            return None
        at, run_bytes, num_rows, pitch = (decode_column(raw, "<i8") for raw in columns)
        strips = Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
        with self._lock:
            self._strips[request.strips] = strips
            # Keep the newest strips regardless of their number, because they are about to be used.
            while sum(map(len, self._strips.values())) > MAX_STRIPS and len(self._strips) > 1:
                self._strips.popitem(last=False)
        return strips


def _number(query: Mapping[str, list[str]], name: str) -> int:
    value = int(query.get(name, ["0"])[0])
    if value < -1:  # -1 means the newest version
        raise FormatError(f"the query parameter {name} must be at least -1, not {value}")
    return value
