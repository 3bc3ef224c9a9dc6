"""Answer a sync member's peers: its map, digests, parts that it plans, and its progress.

In: sessions opened by grants, questions. Out: answers; see `hub.sync_messages`.
Not here: the asking side (`client`), the door itself (`peer.server`), planning (`planner`).

    POST   /v1/sync                     SessionRequest -> Session
    GET    /v1/sync/S/layout            the Layout that it holds
    GET    /v1/sync/S/table             TableReply, of a planner
    POST   /v1/sync/S/part              PartRequest -> PartReply, of a planner
    GET    /v1/sync/S/news?after=V&wait_ms=W      NewsReply
    GET    /v1/sync/S/map?version=V&wait_ms=W     HeldMap
    POST   /v1/sync/S/digests           DigestRequest -> DigestReply
    POST   /v1/sync/S/progress          Progress
    GET    /v1/sync/S/decision?version=V&wait_ms=W   Decision, of a publisher's rank 0
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from penstock.digest.strip import Strips
from penstock.errors import FormatError, NotFound, PermissionDenied, StaleDescriptor
from penstock.hub.messages import LeaseRequest
from penstock.hub.sync_messages import (
    DigestReply,
    DigestRequest,
    PartReply,
    PartRequest,
    Progress,
    Session,
    SessionRequest,
    TableReply,
)
from penstock.peer.local_weights import decode_column
from penstock.peer.server import MAX_BODY_BYTES, MAX_WAIT_S, check_version
from penstock.plan.columns import encode
from penstock.sync.client import name_of
from penstock.sync.local_version import LocalVersion, VersionMap
from penstock.sync.publish.progress import SubscriberProgress
from penstock.sync.version_status import VersionStatus

SESSION_S = 600.0
"""A session not used for this long ends: longer than a training step, so that steps go on without the hub."""
MAX_MESSAGE_BYTES = 256 << 20
"""Longest question in a session: a layout of four million rows, or the strips of a step."""


MAX_STRIPS = 4 << 20
"""Strips that are remembered by name, of all askers: 128 MiB."""


class Plans(Protocol):
    """A planner for others: `planner.Planner`, and among publishers `boundary_exchange.BoundaryPlanner`."""

    def part(self, asker: str, request: PartRequest) -> PartReply:
        """Return the part that the requester reads."""
        ...

    def table(self) -> TableReply:
        """Return the table of the tensors on offer."""
        ...


@dataclass(slots=True)
class _Known:
    member: str
    seen: float


class SyncHandler:
    """See the module; `peer.server.Room`. Used by the door's threads.

    Args:
        key: of the sync's name: what grants must be for.
        admit: raises unless a grant may be used.
        held: what this member holds now.
        board: what it says of its versions.
        planner: plans for others.
        audience: of a publisher's rank 0, whom it waits for.
        check: raises unless what is held may be given.
    """

    def __init__(
        self,
        key: str,
        admit: Callable[[LeaseRequest], None],
        *,
        held: Callable[[], LocalVersion | None],
        version_status: VersionStatus,
        planner: Plans,
        subscriber_progress: SubscriberProgress | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._key, self._admit, self._held, self._version_status = key, admit, held, version_status
        self._planner, self._subscriber_progress, self._check = planner, subscriber_progress, check
        self._lock = threading.Lock()
        self._sessions: dict[str, _Known] = {}
        self._strips: OrderedDict[bytes, Strips] = OrderedDict()

    def answer(
        self, verb: str, path: list[str], query: Mapping[str, list[str]], body: Callable[[int], bytes]
    ) -> object:
        """See `Room`."""
        if verb == "POST" and not path:
            raw = body(MAX_BODY_BYTES)
            check_version(raw)
            return self._open(msgspec.msgpack.decode(raw, type=SessionRequest))
        if verb not in ("GET", "POST") or len(path) != 2:
            raise NotFound("no such thing here")
        who = self._who(path[0])
        raw = body(MAX_MESSAGE_BYTES if who is not None else MAX_BODY_BYTES) if verb == "POST" else b""
        if who is None:
            raise PermissionDenied("no such session, or it has ended", hint="ask the hub for a grant")
        if verb == "POST":
            return self._post(who, path[1], raw)
        number = {name: _number(query, name) for name in ("after", "version", "wait_ms")}
        return self._get(path[1], number, min(number["wait_ms"] / 1000, MAX_WAIT_S))

    def _open(self, request: SessionRequest) -> Session:
        if request.key != self._key:
            raise NotFound("this member is not in this sync")
        self._admit(LeaseRequest(member=request.member, key=request.key, grant=request.grant))
        session = secrets.token_hex(16)
        with self._lock:
            now = time.monotonic()
            for old in [name for name, one in self._sessions.items() if now - one.seen > SESSION_S]:
                del self._sessions[old]
            self._sessions[session] = _Known(request.member, now)
        return Session(session=session, ttl_s=SESSION_S)

    def _who(self, session: str) -> str | None:
        with self._lock:
            known = self._sessions.get(session)
            if known is None or time.monotonic() - known.seen > SESSION_S:
                return None
            known.seen = time.monotonic()
            return known.member

    def _get(self, what: str, number: Mapping[str, int], wait_s: float) -> object:
        if what == "layout":
            return encode(self._holding().layout)
        if what == "table":
            return self._planner.table()
        if what == "news":
            return self._version_status.wait(number["after"], wait_s)
        if what == "map":
            return self._map(number["version"], wait_s)
        if what == "decision" and self._subscriber_progress is not None:
            return self._subscriber_progress.decision(number["version"], wait_s)
        raise NotFound("no such thing here")

    def _post(self, who: str, what: str, raw: bytes) -> object:
        if what == "part":
            if self._subscriber_progress is not None:
                self._subscriber_progress.asked(who)
            return self._planner.part(who, msgspec.msgpack.decode(raw, type=PartRequest))
        if what == "digests":
            return self._digests(msgspec.msgpack.decode(raw, type=DigestRequest))
        if what == "progress":
            told = msgspec.msgpack.decode(raw, type=Progress)
            if self._subscriber_progress is not None:
                self._subscriber_progress.heard(who, told)
            return None
        raise NotFound("no such thing here")

    def _holding(self) -> LocalVersion:
        held = self._held()
        if held is None:
            raise NotFound("this member has no version yet")
        return held

    def _map(self, version: int, wait_s: float) -> VersionMap:
        """The map of a version, waited for while it is still to come."""
        self._check()
        held, deadline = self._holding(), time.monotonic() + wait_s
        with held.changed:
            while held.version is None or held.version < version:
                left = deadline - time.monotonic()
                if self._version_status.now.version > version or (
                    held.version is None and self._version_status.now.version == version
                ):
                    break
                if left <= 0:
                    raise NotFound(f"version {version} is not begun here yet")
                held.changed.wait(min(left, 0.1))
            found = held.map()  # StaleDescriptor between versions
        if found.version != version:
            raise StaleDescriptor(f"version {version} was replaced by version {found.version}")
        return found

    def _digests(self, request: DigestRequest) -> DigestReply:
        strips = self._known_strips(request)
        if strips is None:
            return DigestReply(digests=None, num_ready=0, is_unknown=True)
        found = self._holding().digests(
            strips,
            version=request.version,
            generation=request.generation,
            wait_s=min(request.wait_s, MAX_WAIT_S),
        )
        said = None if found.digests is None else np.ascontiguousarray(found.digests, "<u8").tobytes()
        return DigestReply(digests=said, num_ready=found.num_ready)

    def _known_strips(self, request: DigestRequest) -> Strips | None:
        """Return the strips sent under this name, before or now; None: they must be sent."""
        with self._lock:
            found = self._strips.get(request.strips)
            if found is not None:
                self._strips.move_to_end(request.strips)
                return found
        columns = (request.at, request.run_bytes, request.num_rows, request.pitch)
        if name_of(*columns) != request.strips:
            return None
        at, run_bytes, num_rows, pitch = (decode_column(raw, "<i8") for raw in columns)
        found = Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
        with self._lock:
            self._strips[request.strips] = found
            while sum(map(len, self._strips.values())) > MAX_STRIPS and len(self._strips) > 1:
                self._strips.popitem(last=False)
        return found


def _number(query: Mapping[str, list[str]], name: str) -> int:
    value = int(query.get(name, ["0"])[0])
    if value < -1:
        raise FormatError(f"{name} is not {value}")
    return value
