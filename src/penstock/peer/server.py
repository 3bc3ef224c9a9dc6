"""The server of a member: grants leases, and serves memory maps, tensor tables and logs of verified chunks.

In: HTTP/1.1 on a Unix socket, and on TCP for other hosts; msgpack bodies. Out: maps, leases, logs.
Not here: weight bytes (`transport`), sockets (`http_listener`), the client (`client`), grants (`hub.grants`).

    POST   /v1/leases                       LeaseRequest -> Lease; 429 when all readers' places are taken
    GET    /v1/leases/L/map                 HoldingMap
    GET    /v1/leases/L/table               TableMessage
    GET    /v1/leases/L/log?after=N&wait_ms=W   LogReply; renews the lease
    POST   /v1/leases/L/doubt?chunk=N       204 if the chunk is as it was verified; 429 if it changed, and is given up
    DELETE /v1/leases/L
    GET    /v1/alive                        204; the only request without authentication
           /v1/NAME/...                     answered by a registered handler, see `RequestHandler`

The sockets of a member's server: one thread for each connection, within the limits of `net.limits`.

In: an address, a handler of requests. Out: its connections, over TLS if there is a context.
Not here: requests and answers (`server`), admission of connections (`net.listener`).
"""

from __future__ import annotations

import http.server
import io
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

import msgspec

from penstock.errors import (
    ConfigError,
    FormatError,
    NotFound,
    PenstockError,
    PermissionDenied,
    PlanError,
    StaleDescriptor,
)
from penstock.hub.messages import (
    UPGRADE_HINT,
    AnnouncedVersion,
    Fault,
    HoldingMap,
    Lease,
    LeaseRequest,
    LogReply,
    version_fault,
)
from penstock.net.admission import MIN_BYTES_PER_S, Admission, Connection, ConnectionLimits
from penstock.net.listener import ThreadedListener
from penstock.net.timed import TimedReader
from penstock.peer.local_weights import LocalWeights, to_message
from penstock.transport.http import EVERYWHERE, host_and_port

LIMITS = ConnectionLimits()
"""Limits of each listening socket: far above the number of readers that a holder has."""
_FULL = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""Answer to a connection that is refused: a reader treats the member as busy, and asks another."""


class BoundedRequestHandler(http.server.BaseHTTPRequestHandler):
    """A request handler with a deadline for each request and each answer. One instance serves one connection.

    Attributes:
        place: admission of this connection; a handler that has authenticated the caller calls `place.prove`.
        peer: the caller's host; empty for a Unix socket.
    """

    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def __init__(self, sock: socket.socket, place: Connection, peer: str) -> None:
        self.place, self.peer = place, peer
        super().__init__(sock, (peer, 0), None)  # type: ignore[arg-type]

    def setup(self) -> None:
        """Prepare the connection: no Nagle delay, since answers are small and waited for; reads with a deadline."""
        super().setup()
        if self.connection.family != socket.AF_UNIX:
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rfile.close()
        self._incoming = TimedReader(self.connection, self.place.limits.head_s)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        """Serve one request; `http.server` ends the connection at a TimeoutError."""
        limits = self.place.limits
        first_s = limits.idle_s if self.place.is_proven else limits.head_s
        self._incoming.expect(limits.head_s, limits.head_bytes, first_s=first_s)
        super().handle_one_request()
        self.place.end()

    def parse_request(self) -> bool:
        """Parse the head of a request, which is complete now; see `http.server`."""
        # The answer may wait for news. Sending it has its own deadline, see `taking`.
        self.place.begin(self.place.limits.idle_s + self.place.limits.answer_s)
        return super().parse_request()

    def take_body(self, nbytes: int) -> bytes:
        """Read a body of `nbytes` bytes that follows the head."""
        self._incoming.allow(nbytes)
        return self.rfile.read(nbytes)

    def taking(self, nbytes: int) -> None:
        """Set the deadline by which the caller must have read an answer of this length."""
        self.place.begin(self.place.limits.answer_s + nbytes / MIN_BYTES_PER_S)
        self.connection.settimeout(None)

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing: the audit line is written where the grant is checked."""

    def address_string(self) -> str:
        """Return the peer's host, or "unix": a Unix peer has no address."""
        return self.peer or "unix"


def listen_tcp(
    host: str, port: int, handler: Callable[[socket.socket, Connection, str], object], tls: ssl.SSLContext | None
) -> ThreadedListener:
    """Serve on `host:port`; port 0 takes a free one. Raises OSError or OverflowError if it cannot be bound."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _listen(bound, (host, port), handler, tls)


def listen_unix(path: str, handler: Callable[[socket.socket, Connection, str], object]) -> ThreadedListener:
    """Serve on a Unix socket, to this user's processes only. Raises OSError if it cannot be bound."""
    return _listen(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), os.fspath(path), handler, None)


def _listen(
    bound: socket.socket,
    where: object,
    handler: Callable[[socket.socket, Connection, str], object],
    tls: ssl.SSLContext | None,
) -> ThreadedListener:
    try:
        bound.bind(where)  # type: ignore[arg-type]
    except BaseException:
        bound.close()
        raise

    def serve(sock: socket.socket, place: Connection, peer: str) -> None:
        handler(sock, place, peer)

    refusal = _FULL if tls is None else b""
    return ThreadedListener(
        bound, Admission(LIMITS, name="peer server"), serve, name="penstock-peer", tls=tls, refusal=refusal
    )


MAX_BODY_BYTES = 64 << 10
"""Longest request body; a lease request is under 1 KiB."""
MAX_WAIT_S = 5.0
"""Longest wait of a log request for news."""
LEASE_TTL_S = 15.0
"""A lease not renewed for this long frees its reader's place. Renewals come with each log request, seconds apart."""

CheckGrant = Callable[[LeaseRequest], None]
"""Raises PermissionDenied unless the request may read."""


Recall = Callable[[str], AbstractContextManager[str]]
"""Brings weights of a key back from another tier and pins them; yields the reason if they are not back yet."""


class RequestHandler(Protocol):
    """A handler of all requests below one path. It must check grants itself before it answers."""

    def answer(
        self, verb: str, path: list[str], query: Mapping[str, list[str]], body: Callable[[int], bytes]
    ) -> object:
        """Return a value for msgpack, or None for an empty answer; errors are sent as a `Fault`.

        Args:
            path: parts of the path below the handler's own.
            body: reads the body; raises FormatError if it is empty or longer than its argument.
        """
        ...


@dataclass(slots=True)
class _Leased:
    reader: str
    weights: LocalWeights
    attached: bool
    seen: float = field(default_factory=time.monotonic)


class PeerServer:
    """The server of one member, with one thread for each connection. Started by the constructor.

    Args:
        path: path of the Unix socket; its directory must be private to the user.
        check_grant: validates a grant.
        listen: `host:port` or `[v6]:port` for other hosts; port 0 takes a free one. None: this host only.
        tls: TLS context of the listening TCP socket; None: plain.
        max_bytes_per_s: limit for all readers together; 0: no limit.

    Raises:
        ConfigError: an address cannot be bound.
    """

    def __init__(
        self,
        path: Path,
        check_grant: CheckGrant,
        *,
        listen: str | None = None,
        tls: ssl.SSLContext | None = None,
        max_bytes_per_s: int = 0,
    ) -> None:
        self._check_grant, self._max_bytes_per_s = check_grant, max_bytes_per_s
        self._weights: dict[str, LocalWeights] = {}
        self._leases: dict[str, _Leased] = {}
        self._draining: set[str] = set()
        self._lock = threading.Lock()
        self._servers: list[ThreadedListener] = []
        self.addresses: list[str] = []
        self.handlers: dict[str, RequestHandler] = {}
        self.recall: Recall = lambda key: nullcontext("")
        self.recheck: Callable[[LocalWeights, int], bool] = lambda weights, chunk: False
        self.sign: Callable[[LocalWeights, LogReply], LogReply] = lambda weights, reply: reply
        try:
            self._open(str(path), lambda: listen_unix(str(path), _handler(self)))
            self.addresses.append(f"unix://{path}")
            if listen is not None:
                self._listen(listen, tls)
        except BaseException:
            self.close()
            raise

    def _listen(self, listen: str, tls: ssl.SSLContext | None) -> None:
        host, port = host_and_port(listen)
        if host in EVERYWHERE:
            message = f"cannot listen on {listen}: it is not an address that other members can connect to"
            raise ConfigError(message, hint="listen on the address by which other hosts reach this one")
        server = self._open(listen, lambda: listen_tcp(host, port, _handler(self), tls))
        where = f"[{host}]" if ":" in host else host
        self.addresses.append(f"{'http' if tls is None else 'https'}://{where}:{server.address[1]}")

    def _open(self, where: str, bind: Callable[[], ThreadedListener]) -> ThreadedListener:
        try:
            server = bind()
        except (OSError, OverflowError) as error:
            hint = "an address of this host; port 0 takes a free one"
            raise ConfigError(f"the member's server cannot listen at {where}: {error}", hint=hint) from error
        self._servers.append(server)
        return server

    def show(self, weights: LocalWeights) -> None:
        """Let readers get leases for these weights, which must be registered."""
        with self._lock:
            self._weights[weights.key] = weights

    def hide(self, key: str) -> None:
        """Grant no new leases for this key."""
        with self._lock:
            self._weights.pop(key, None)

    def num_readers(self, key: str) -> int:
        """Return the number of leases of this key, including those of engines that map the memory."""
        with self._lock:
            self._expire()
            return sum(leased.weights.key == key for leased in self._leases.values())

    def num_attached(self, key: str) -> int:
        """Return the number of engines that map the memory of this key."""
        with self._lock:
            self._expire()
            return sum(one.weights.key == key and one.attached for one in self._leases.values())

    def retire(self, key: str) -> bool:
        """Stop granting leases for this key if it has none; return True if that was done."""
        with self._lock:
            self._expire()
            is_free = all(leased.weights.key != key for leased in self._leases.values())
            if is_free:
                self._weights.pop(key, None)
        return is_free

    def drain(self, key: str, wait_s: float) -> int:
        """Grant no new leases, wait at most `wait_s` for the readers to finish, and return how many are left."""
        with self._lock:
            self._draining.add(key)
        self.hide(key)
        deadline = time.monotonic() + wait_s
        while (left := self.num_readers(key)) and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._lock:
            self._draining.discard(key)
        return left

    def close(self) -> None:
        """Stop listening and cut all connections. Idempotent."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
            # A stopped peer process leaves its connection open; the connection's thread would keep the weights alive.
            server.admission.cut_all()

    # What the handler asks.

    def lease(self, request: LeaseRequest) -> Lease | Fault:
        """Grant a lease, or return the reason against it. Weights in another tier are brought back first."""
        self._check_grant(request)
        given = self._lease(request)
        if given is None:
            with self.recall(request.key) as why:
                if why:
                    return Fault(error=why, hint="ask again")
                given = self._lease(request)
        if given is None:
            with self._lock:
                is_draining = request.key in self._draining
            if is_draining:
                raise NotFound("this member is draining and takes no new readers of that key")
            raise NotFound("this member does not hold that key")
        return given

    def _lease(self, request: LeaseRequest) -> Lease | Fault | None:
        """Grant a lease of weights that are in memory; return None if they are not."""
        with self._lock:
            self._expire()
            weights = self._weights.get(request.key)
            if weights is None:
                return None
            if request.attach and not (weights.kept and weights.state == "whole"):
                raise PermissionDenied("this member does not keep memory for engines", hint="run `penstock keep`")
            mine = [id_ for id_, one in self._leases.items() if one.weights.key == request.key]
            others = [one for one in mine if self._leases[one].reader != request.member]
            others = [one for one in others if not self._leases[one].attached]
            if len(others) >= weights.max_readers and not request.attach:
                readers = tuple(self._leases[one].reader for one in others)
                return Fault(error="all readers' places are taken", hint="read from one of them", alternatives=readers)
            for one in mine:
                if self._leases[one].reader == request.member:
                    self._end(one)  # the reader restarted or reconnected; it needs no second place
            lease = secrets.token_hex(16)
            self._leases[lease] = _Leased(request.member, weights, request.attach)
            weights.num_readers = len(others) + (not request.attach)
        return Lease(lease=lease, ttl_s=LEASE_TTL_S, max_bytes_per_s=self.share())

    def share(self) -> int:
        """Return the limit of each reader now, in bytes/s, so that all together stay within the total; 0: no limit."""
        with self._lock:
            return self._max_bytes_per_s // max(1, sum(not one.attached for one in self._leases.values()))

    def leased(self, lease: str) -> LocalWeights:
        """Renew a lease and return its weights. Raises PermissionDenied if it is unknown or has expired."""
        with self._lock:
            self._expire()
            found = self._leases.get(lease)
            if found is None:
                raise PermissionDenied("the lease is unknown or has expired", hint="get a new lease")
            found.seen = time.monotonic()
            return found.weights

    def map(self, lease: str) -> HoldingMap:
        """Return the memory map for a lease, valid while the lease lasts. Raises PermissionDenied as `leased`."""
        weights = self.leased(lease)
        found = weights.map(lease)
        with self._lock:
            if lease not in self._leases:  # it ended meanwhile, before these descriptors existed: revoke them now
                weights.take_back(lease)
        return found

    def release(self, lease: str) -> None:
        """End a lease. Idempotent."""
        with self._lock:
            self._end(lease)
            self._expire()

    def expire(self) -> None:
        """End leases that were not renewed in time, and revoke their descriptors; called with each heartbeat."""
        with self._lock:
            self._expire()

    def _end(self, lease: str) -> None:
        ended = self._leases.pop(lease, None)
        if ended is not None:
            ended.weights.take_back(lease)

    def _expire(self) -> None:
        now = time.monotonic()
        for lease in [lease for lease, one in self._leases.items() if now - one.seen > LEASE_TTL_S]:
            self._end(lease)
        for weights in self._weights.values():
            mine = (one for one in self._leases.values() if one.weights is weights and not one.attached)
            weights.num_readers = sum(1 for _ in mine)


class VersionRefused(Exception):
    """An error for a reader that speaks another major version of the protocol."""


def check_version(body: bytes) -> None:
    """Check the protocol version of a request before the rest of it is decoded.

    Raises:
        VersionRefused: another major version. msgspec.DecodeError: it is malformed.
    """
    announced = msgspec.msgpack.decode(body, type=AnnouncedVersion)
    if fault := version_fault(announced.protocol, "the reader", "this member"):
        raise VersionRefused(fault)


def _handler(server: PeerServer) -> type[BoundedRequestHandler]:
    return type("_PeerHandler", (_Handler,), {"peer_server": server})


class _Handler(BoundedRequestHandler):
    """The HTTP handler of one connection."""

    peer_server: PeerServer

    def do_GET(self) -> None:
        """Answer requests for map, table, log and alive."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Answer requests for a lease or a recheck."""
        self._answer(self._post)

    def do_DELETE(self) -> None:
        """Release a lease."""
        self._answer(self._delete)

    def _answer(self, reply: Callable[[list[str], Mapping[str, list[str]]], object]) -> None:
        url = urlsplit(self.path)
        try:
            path, query = url.path.strip("/").split("/"), parse_qs(url.query)
            room = self.peer_server.handlers.get(path[1]) if path[0] == "v1" and len(path) > 1 else None
            found = reply(path, query) if room is None else room.answer(self.command, path[2:], query, self._body)
        except VersionRefused as error:
            self._send(426, Fault(error=str(error), hint=UPGRADE_HINT))
        except PermissionDenied as error:
            self._send(403, Fault(error=error.message, hint=error.hint or ""))
        except NotFound as error:
            self._send(404, Fault(error=error.message))
        except (PlanError, StaleDescriptor) as error:
            self._send(409 if isinstance(error, PlanError) else 410, Fault(error=error.message, hint=error.hint or ""))
        except (FormatError, msgspec.DecodeError) as error:
            self._refuse(error)
        except PenstockError as error:  # before ValueError, which ConfigError is too
            self._send(503, Fault(error=error.message, hint=error.hint or ""))
        except ValueError as error:
            self._refuse(error)
        else:
            if url.path != "/v1/alive":
                # The caller had a valid grant, lease or session: every request but `alive` needs one.
                self.place.prove(self.peer)
            self._send(429 if isinstance(found, Fault) else 200 if found is not None else 204, found)

    def _refuse(self, error: Exception) -> None:
        self.close_connection = True
        self._send(400, Fault(error=str(error)[:512]))

    def _send(self, code: int, value: object) -> None:
        body = msgspec.msgpack.encode(value) if value is not None else b""
        self.taking(len(body))
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def _get(self, path: list[str], query: Mapping[str, list[str]]) -> object:
        if path == ["v1", "alive"]:
            return None
        if len(path) != 4 or path[:2] != ["v1", "leases"]:
            raise NotFound("no such thing here")
        weights = self.peer_server.leased(path[2])
        if path[3] == "map":
            return self.peer_server.map(path[2])
        if path[3] == "table":
            return to_message(weights.layout)
        if path[3] == "log":
            after, wait_ms = (int(query.get(name, ["0"])[0]) for name in ("after", "wait_ms"))
            if after < 0 or wait_ms < 0:
                raise FormatError("after and wait_ms are not negative")
            reply = self.peer_server.sign(weights, weights.log_after(after, min(wait_ms / 1000, MAX_WAIT_S)))
            return msgspec.structs.replace(reply, max_bytes_per_s=self.peer_server.share())
        raise NotFound("no such thing here")

    def _post(self, path: list[str], query: Mapping[str, list[str]]) -> object:
        if len(path) == 4 and path[:2] == ["v1", "leases"] and path[3] == "doubt":
            chunk = int(query.get("chunk", ["-1"])[0])
            if self.peer_server.recheck(self.peer_server.leased(path[2]), chunk):
                return Fault(error=f"chunk {chunk} changed in the holder's memory, which it gave up", hint="ask again")
            return None
        if path != ["v1", "leases"]:
            raise NotFound("no such thing here")
        body = self._body(MAX_BODY_BYTES)
        check_version(body)
        return self.peer_server.lease(msgspec.msgpack.decode(body, type=LeaseRequest))

    def _body(self, most: int) -> bytes:
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 < length <= most:
            raise FormatError(f"a body of {length} bytes; at most {most}")
        return self.take_body(length)

    def _delete(self, path: list[str], query: Mapping[str, list[str]]) -> object:
        if len(path) != 3 or path[:2] != ["v1", "leases"]:
            raise NotFound("no such thing here")
        self.peer_server.release(path[2])
        return None
