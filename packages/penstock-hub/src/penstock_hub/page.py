"""The fleet page: static files for a browser, and a stream of changes to the fleet's status.

The page requests `/v1/events?since=CURSOR` with its bearer token and receives the rows that changed since CURSOR. The
page reads the stream with `fetch`, because a browser's EventSource cannot send a token. A stream ends after `STREAM_S`,
before the hub's deadline for a response, and the page requests the next stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.resources import files
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.errors import PenstockError
from penstock.hub.auth import Caller
from penstock.hub.messages import FleetFailure, HoldingState, JobStatus, MemberStatus, Status, SyncState
from penstock.logs import log_named
from penstock.net.shares import Shares
from penstock_hub.routes import HubApp

INTERVAL_S = 1.0
"""Seconds between two reads of the status while there are viewers."""
SLOW_INTERVAL_S = 2.0
"""Seconds between two reads with more than `MANY` members. Reading the status of 1,000 members takes tens of
milliseconds."""
MANY = 200
STREAM_S = 50.0
"""Duration of one stream in seconds. The hub closes a response after 60 s (`connection.REQUEST_S`)."""
HISTORY_S = 3600.0
SAMPLE_S = 5.0
"""Seconds between two points in the charts, which gives 720 points in an hour."""
SILENT_S = 5.0
"""Seconds without a heartbeat after which a member is shown as silent. Members of a fleet send a heartbeat every 2
s."""
MAX_GONE = 10_000
"""Maximum number of removed members to remember for viewers. A viewer that missed more removals gets all rows again."""
MAX_FAILURES = 50
"""Maximum number of failures that are shown."""
MAX_VIEWERS = 32
"""Maximum number of concurrent streams. Each stream encodes the changes separately, which takes at most about a
millisecond a second. One caller may use all streams until another caller requests one."""
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_log = log_named("penstock.hub")
_ASSETS = {
    **dict.fromkeys(("app.js", "format.js", "members.js", "pictures.js"), "text/javascript"),
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
}
_CURSOR = re.compile(r"([0-9a-f]{16})\.(\d{1,18})")
_SHARE = re.compile(r"(\d+)% ([\w-]+)(?: (?:<- )?(.+?))?(?=, \d+% |$)")

Row = dict[str, Any]
"""A member as the page shows it: plain JSON values, without running clocks."""


def shares(path: str) -> list[dict[str, Any]]:
    """Split a path such as `75% shm <- MEMBER, 25% storage URI` into transports, sources and percentages."""
    return [
        {"percent": int(percent), "transport": transport, "source": source or ""}
        for percent, transport, source in _SHARE.findall(path)
    ]


def row_of(member: MemberStatus) -> Row:
    """Return the row for a member."""
    return {
        **_values(member, "name", "host", "rack", "complaints"),
        "id": member.member,
        "silent": member.silent_s > SILENT_S,
        "drain": None if member.drain is None else {"by": member.drain.by, "reason": member.drain.reason},
        "holdings": [_weights_row(holding) for holding in member.holdings],
        "syncs": [_sync_row(state) for state in member.syncs],
    }


def _weights_row(holding: HoldingState) -> Row:
    # A draining holder that reports no ranges was complete.
    is_whole = holding.state == "whole" or (holding.state == "draining" and not holding.have)
    have = holding.num_chunks if is_whole else sum(stop - start for start, stop in holding.have)
    return {
        **_values(holding, "state", "nbytes", "device", "tier", "kept", "max_readers", "parent", "why"),
        "model": holding.identity.model,
        "revision": holding.revision or holding.identity.revision,
        "share": have / max(1, holding.num_chunks),
        "readers": holding.num_readers,
        "path": shares(holding.path),
        "gb_per_s": round(holding.gb_per_s, 3),
    }


def _sync_row(state: SyncState) -> Row:
    return {
        **_values(state, "name", "side", "rank", "world_size", "version", "state", "prepared", "fleet", "nbytes"),
        "path": shares(state.path),
        "took_s": round(state.took_s, 3),
        "pause_s": round(state.pause_s, 3),
    }


def _values(struct: msgspec.Struct, *names: str) -> Row:
    return {name: getattr(struct, name) for name in names}


def failure_row_of(failure: FleetFailure) -> Row:
    """Return the row for a failure, with the time of the failure instead of its growing age."""
    row: Row = msgspec.to_builtins(failure)
    # Round to 10 s, because the ages from several hubs differ slightly and each difference would be sent to viewers.
    return {**row, "at": round((time.time() - row.pop("age_s")) / 10) * 10}


def job_row_of(job: JobStatus) -> Row:
    """Return the row for a conversion."""
    state: Row = msgspec.to_builtins(job.state)
    late = {worker.worker for worker in job.state.workers if worker.is_late}
    # Round the workers' clocks, because each change would be sent to viewers.
    workers = [
        {**worker, "task_s": round(worker["task_s"]), "is_late": worker["worker"] in late}
        for worker in state["workers"]
    ]
    silent = job.silent_s > SILENT_S and not job.state.is_over
    return {"id": job.job, **state, "workers": workers, "elapsed_s": round(state["elapsed_s"]), "silent": silent}


def totals(rows: Mapping[str, Row]) -> Row:
    """Return the values for the charts: members, bytes held, total transfer rate, and bytes not read from storage."""
    holdings = [holding for row in rows.values() for holding in row["holdings"]]
    held = saved = 0.0
    for holding in holdings:
        nbytes = holding["nbytes"] * holding["share"]
        held += nbytes
        from_storage = sum(part["percent"] for part in holding["path"] if part["transport"] == "storage")
        saved += nbytes * (1 - from_storage / 100) if holding["path"] else 0.0
    rate = round(sum(holding["gb_per_s"] for holding in holdings if holding["state"] == "filling"), 3)
    return {"members": len(rows), "held_bytes": int(held), "gb_per_s": rate, "saved_bytes": int(saved)}


class FleetFeed:
    """The status for viewers: rows with the serial number of their last change, and totals for an hour. Thread-safe.

    Args:
        status: returns the members. All viewers share one read.
        on_gone: called with each member that has disappeared since the last read.
    """

    def __init__(
        self,
        status: Callable[[], Status],
        *,
        clock: Callable[[], float] = time.monotonic,
        on_gone: Callable[[MemberStatus], None] = lambda member: None,
    ) -> None:
        self._status = status
        self._on_gone = on_gone
        self._members: dict[str, MemberStatus] = {}
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[str, Row] = {}
        self._changed: dict[str, int] = {}
        # There are few conversions and failures, so all of them are sent when any of them changes.
        self._jobs: list[Row] = []
        self._failures: list[Row] = []
        self._lists_changed = 0
        self._may_drain = False
        self._gone: deque[tuple[int, str]] = deque()
        # Serial numbers are valid in one process only. A viewer's next stream may come from another hub, which detects
        # a foreign number by this value.
        self._life = secrets.token_hex(8)
        self._serial = 0
        self._forgotten = 0
        """Serial number up to which changes may be forgotten."""
        self._refreshed_s = float("-inf")
        self._history: deque[Row] = deque(maxlen=int(HISTORY_S / SAMPLE_S))
        self._sampled_s = float("-inf")

    @property
    def interval_s(self) -> float:
        """Return the number of seconds between two reads, which depends on the number of members."""
        return SLOW_INTERVAL_S if len(self._rows) > MANY else INTERVAL_S

    def refresh(self) -> None:
        """Compare the status with the rows, unless another thread did so within the interval."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._refreshed_s < self.interval_s * 0.9:
                return
            status = self._status()
            rows = {member.member: row_of(member) for member in status.members}
            before, self._members = self._members, {member.member: member for member in status.members}
            for name in before.keys() - self._members.keys():
                self._on_gone(before[name])
            lists = (
                [job_row_of(job) for job in status.jobs],
                [failure_row_of(f) for f in status.failures[:MAX_FAILURES]],
            )
            # For `penstock ui`, the hub reports whether the token that `penstock ui` uses is an operator's.
            self._may_drain = status.may_drain
            self._refreshed_s = now_s
            changed = [name for name, row in rows.items() if self._rows.get(name) != row]
            gone = [name for name in self._rows if name not in rows]
            is_new = lists != (self._jobs, self._failures)
            if changed or gone or is_new:
                self._serial += 1
            if is_new:
                (self._jobs, self._failures), self._lists_changed = lists, self._serial
            for name in changed:
                self._changed[name] = self._serial
            for name in gone:
                del self._changed[name]
                self._gone.append((self._serial, name))
            while len(self._gone) > MAX_GONE:
                self._forgotten = self._gone.popleft()[0]
            self._rows = rows
            if now_s - self._sampled_s >= SAMPLE_S * 0.9:
                self._sampled_s = now_s
                self._history.append({"at": time.time(), **totals(rows)})

    def changes(self, cursor: str, caller: Caller) -> tuple[str, bytes]:
        """Return the current cursor and a message, which contains the changes since the viewer's cursor or is empty.

        Args:
            cursor: the viewer's cursor. If the cursor is empty or from a different process, all rows are sent.
            caller: the viewer. The message covers only the models that this caller may access.
        """
        with self._lock:
            present = f"{self._life}.{self._serial}"
            if cursor == present and caller.models is None:
                return present, b""
            parts = _CURSOR.fullmatch(cursor)
            since = int(parts[2]) if parts and parts[1] == self._life else -1
            # Always send all visible rows to a caller that is limited to some models, because naming removed rows would
            # reveal hidden members.
            is_full = not self._forgotten <= since < self._serial or caller.models is not None
            rows = [self._rows[name] for name, serial in self._changed.items() if is_full or serial > since]
            message: dict[str, Any] = {
                "cursor": present,
                "full": is_full,
                "rows": [visible for row in rows if (visible := visible_to(row, caller)) is not None],
                "gone": [] if is_full else [name for serial, name in self._gone if serial > since],
                "may_drain": caller.is_operator or self._may_drain,
            }
            if is_full or self._lists_changed > since:
                message["jobs"] = [job for job in self._jobs if caller.may_ask((job["name"],))]
                message["failures"] = [failure for failure in self._failures if caller.may_ask((failure["model"],))]
            if caller.models is None:
                message["totals"] = totals(self._rows)
                message["history"] = list(self._history) if is_full else list(self._history)[-1:]
                return present, msgspec.json.encode(message)
            # Derive the cursor from the visible content, because a serial number also counts hidden changes.
            message["cursor"] = seen = f"{self._life}.{_number(message)}"
            return seen, b"" if seen == cursor else msgspec.json.encode(message)


def _number(message: dict[str, Any]) -> int:
    """Return a number for the content of a message, with at most 18 digits."""
    content = msgspec.json.encode({name: value for name, value in message.items() if name != "cursor"})
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest())


def visible_to(row: Row, caller: Caller) -> Row | None:
    """Return a row as a caller may see it, or None if it may see nothing."""
    if caller.models is None:
        return row
    visible = {
        **row,
        "holdings": [holding for holding in row["holdings"] if caller.may_ask((holding["model"],))],
        "syncs": [state for state in row["syncs"] if caller.may_ask((state["name"],))],
    }
    if len(visible["holdings"]) < len(row["holdings"]):
        # Hide the number of complaints, because it includes complaints about hidden holdings.
        visible["complaints"] = 0
    return visible if visible["holdings"] or visible["syncs"] else None


async def keep_sampling(feed: FleetFeed) -> None:
    """Read the status for the charts even without viewers. Skip a point if the store is unavailable."""
    was_read = True
    while True:
        try:
            await run_in_threadpool(feed.refresh)
            was_read = True
        except PenstockError as error:
            if was_read:  # log an outage once
                _log.warning("cannot read the status for the fleet page: %s", error.message)
            was_read = False
        await asyncio.sleep(SAMPLE_S)


def add_page(app: HubApp, feed: FleetFeed, caller_of: Callable[[Request], Caller]) -> None:
    """Add the page's files and its stream to an app. `caller_of` authenticates a request or raises an error."""
    assets = files("penstock_hub") / "assets"
    viewers = Shares[object](MAX_VIEWERS)

    async def index(_: Request) -> Response:
        return Response((assets / "index.html").read_bytes(), media_type="text/html", headers=SECURITY_HEADERS)

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _ASSETS:
            return Response(status_code=404, headers=SECURITY_HEADERS)
        return Response((assets / name).read_bytes(), media_type=_ASSETS[name], headers=SECURITY_HEADERS)

    async def events(request: Request) -> Response:
        caller = caller_of(request)
        since = request.query_params.get("since", "")
        if since and not _CURSOR.fullmatch(since):
            return Response(status_code=422, headers=SECURITY_HEADERS)
        if not viewers.has_room(caller.name, displaces_own=False):
            return Response(status_code=503, headers={**SECURITY_HEADERS, "Retry-After": "10"})

        async def stream() -> AsyncIterator[bytes]:
            place = object()
            viewers.enter(place, caller.name, displaces_own=False)
            try:
                cursor, end_s = since, time.monotonic() + STREAM_S
                # Stop if another caller has received this viewer's reservation.
                while time.monotonic() < end_s and place in viewers:
                    try:
                        # Use a thread, because the status may be in Redis and 1,000 rows are compared.
                        await run_in_threadpool(feed.refresh)
                        cursor, message = await run_in_threadpool(feed.changes, cursor, caller)
                    except PenstockError as error:
                        # The response has begun, so its status cannot become 503. Send the error in the stream.
                        message = msgspec.json.encode({"error": error.message})
                    # A comment line keeps the connection alive and shows the viewer that the hub responds.
                    yield b"data: " + message + b"\n\n" if message else b":\n\n"
                    await asyncio.sleep(feed.interval_s)
            finally:
                viewers.drop(place)

        return StreamingResponse(stream(), media_type="text/event-stream", headers=SECURITY_HEADERS)

    app.add_route("/", index, "GET")
    app.add_route("/assets/{name}", asset, "GET")
    app.add_route("/v1/events", events, "GET")
