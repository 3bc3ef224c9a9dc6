"""The HTTP/1.1 server of a member, on a Unix socket, and on TCP for other hosts. Bodies are msgpack.

    POST   /v1/leases                       LeaseRequest -> Lease, or 429 if there are too many readers
    GET    /v1/leases/L/map                 HoldingMap
    GET    /v1/leases/L/table               TableMessage
    GET    /v1/leases/L/log?after=N&wait_ms=W   LogReply, and renews the lease
    POST   /v1/leases/L/doubt?chunk=N       204 if the chunk is unchanged, 429 if it changed and is no longer served
    DELETE /v1/leases/L
    GET    /v1/phases                       startup phases of this process as JSON or as events, see `http.phases`
    GET    /v1/ready                        200 if the process is ready, else 503, without authentication
    GET    /v1/alive                        204, without authentication
           /v1/NAME/...                     requests for a registered handler, see `RequestHandler`

Members do not use the hub's ASGI stack. Starlette and uvicorn take 70 to 90 ms of CPU time and 4 MiB of memory to start
in a thread (2 cores, Python 3.11), and an empty request takes 85 to 190 us. This server needs 6 ms, 0.1 MiB and 28 us.
"""

from __future__ import annotations

import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

import msgspec

from penstock.descriptors import hint_of
from penstock.errors import (
    MALFORMED,
    ConfigError,
    FormatError,
    NotFound,
    PeerLost,
    PenstockError,
    PermissionDenied,
    PlanError,
    SourceBusy,
    SourceStalled,
    StaleDescriptor,
)
from penstock.holding.weight_layout import to_message
from penstock.http.phases import PhasesHandler, answer_ready
from penstock.http.server import HttpServer, RequestRefused, ServerExchange
from penstock.hub import messages
from penstock.net.listener import bound_socket
from penstock.net.shares import Shares
from penstock.peer.local_weights import LocalWeights
from penstock.transport.http import EVERYWHERE, host_and_port

SOCKET_NAME = "peer.sock"
MAX_BODY_BYTES = 64 << 10
"""Maximum size of a request body in bytes. A lease request is smaller than 1 KiB."""
MAX_WAIT_S = 5.0
LEASE_TTL_S = 15.0
"""Seconds after which a lease expires. Each log request renews the lease, every few seconds."""

CheckGrant = Callable[[messages.LeaseRequest], str]
"""Checks a grant and returns the caller that the hub named, or an empty string. Raises PermissionDenied."""
Recall = Callable[[str], AbstractContextManager[str]]
"""Brings the weights of a key back from a lower tier and pins them. Yields a reason if they are not back yet."""
Query = Mapping[str, list[str]]


class RequestHandler(Protocol):
    """A handler of all requests below one path. The handler must check grants itself."""

    def answer(self, verb: str, path: list[str], query: Query, body: Callable[[int], bytes]) -> object:
        """Return a value for msgpack, or None for an empty response. Errors are sent as a `Fault`."""
        ...


class _Leased(msgspec.Struct):
    reader: str
    caller: str
    weights: LocalWeights
    attached: bool
    is_displaced: bool = False
    """Whether a caller with fewer readers received the slot of this lease. Requests with this lease are refused."""
    seen: float = msgspec.field(default_factory=time.monotonic)

    @property
    def takes_place(self) -> bool:
        return not (self.attached or self.is_displaced)


class PeerServer:
    """The server of one member. Thread-safe."""

    def __init__(self, check_grant: CheckGrant, *, is_tls: bool = False, max_bytes_per_s: int = 0) -> None:
        self._check_grant = check_grant
        self._max_bytes_per_s = max_bytes_per_s
        self._is_tls = is_tls
        self._weights: dict[str, LocalWeights] = {}
        self._leases: dict[str, _Leased] = {}
        self._draining: set[str] = set()
        self._lock = threading.Lock()
        self._servers: list[HttpServer] = []
        self.addresses: list[str] = []
        self.handlers: dict[str, RequestHandler] = {}
        self.recall: Recall = lambda key: nullcontext("")
        self.recheck: Callable[[LocalWeights, int], bool] = lambda weights, chunk: False
        self.phases = PhasesHandler(lambda boot: boot)

    @classmethod
    def start(
        cls,
        path: Path,
        check_grant: CheckGrant,
        *,
        listen: str | None = None,
        tls: ssl.SSLContext | None = None,
        max_bytes_per_s: int = 0,
    ) -> PeerServer:
        """Serve at a Unix socket in a private directory, and at a host address if one is given.

        `listen` is `host:port` or `[v6]:port`, where port 0 means any. Raise ConfigError if an address cannot be bound.
        """
        server = cls(check_grant, is_tls=tls is not None, max_bytes_per_s=max_bytes_per_s)
        try:
            server._open(str(path), str(path), None)
            server.addresses.append(f"unix://{path}")
            if listen is not None:
                server._listen(listen, tls)
        except BaseException:
            server.close()
            raise
        return server

    def _listen(self, listen: str, tls: ssl.SSLContext | None) -> None:
        host, port = host_and_port(listen)
        if host in EVERYWHERE:
            message = f"cannot listen on {listen}, because other members cannot connect to this address"
            raise ConfigError(message, hint="listen on an address where other hosts reach this host")
        server = self._open(listen, (host, port), tls)
        host_part = f"[{host}]" if ":" in host else host
        # Use the port of the socket, because the port in `listen` may be 0.
        self.addresses.append(f"{'http' if tls is None else 'https'}://{host_part}:{server.address[1]}")

    def _open(self, listen: str, address: str | tuple[str, int], tls: ssl.SSLContext | None) -> HttpServer:
        try:
            bound = bound_socket(address)
        except (OSError, OverflowError) as error:
            hint = hint_of(error) or "give an address of this host, with port 0 for any free port"
            raise ConfigError(f"the member's server cannot listen on {listen}: {error}", hint=hint) from error
        server = HttpServer(
            bound,
            self._answer,
            name="peer server",
            thread_name="penstock-peer",
            # A 503 response would count as a fault of the member. After 429 the reader tries another member.
            full_status=HTTPStatus.TOO_MANY_REQUESTS,
            tls=tls,
        )
        server.start()
        self._servers.append(server)
        return server

    def show(self, weights: LocalWeights) -> None:
        """Grant leases for these weights, which must be registered."""
        with self._lock:
            self._weights[weights.key] = weights

    def hide(self, key: str) -> None:
        """Refuse new leases for this key."""
        with self._lock:
            self._weights.pop(key, None)

    def num_readers(self, key: str) -> int:
        """Return the number of leases for this key, including leases of engines that map the memory."""
        with self._lock:
            self._expire()
            return sum(leased.weights.key == key for leased in self._leases.values())

    def num_attached(self, key: str) -> int:
        """Return the number of engines that map the memory for this key."""
        with self._lock:
            self._expire()
            return sum(leased.weights.key == key and leased.attached for leased in self._leases.values())

    def retire(self, key: str) -> bool:
        """Refuse new leases for this key and return True, or return False if the key has leases."""
        with self._lock:
            self._expire()
            if any(leased.weights.key == key for leased in self._leases.values()):
                return False
            self._weights.pop(key, None)
            return True

    def drain(self, key: str, wait_s: float) -> int:
        """Refuse new leases, wait at most `wait_s` seconds for readers, and return the number of remaining readers."""
        with self._lock:
            # `lease` then reports that the member is draining, so readers do not retry.
            self._draining.add(key)
        self.hide(key)
        deadline = time.monotonic() + wait_s
        # Poll, because the lease of a vanished reader expires without waking a thread.
        while (remaining := self.num_readers(key)) and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._lock:
            self._draining.discard(key)
        return remaining

    def close(self) -> None:
        """Stop listening and close all connections. Idempotent."""
        # Drop the servers, because they and this object form a reference cycle that would keep the weights alive.
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()

    def lease(self, request: messages.LeaseRequest) -> messages.Lease | messages.Fault:
        """Grant a lease, or return the reason for a refusal. Weights in a lower tier are restored first."""
        # A hub before version 2.6 names no caller, so each member counts as a separate caller.
        caller = self._check_grant(request) or request.member
        lease = self._lease(request, caller)
        if lease is None:
            with self.recall(request.key) as why:
                if why:
                    return messages.Fault(error=why, hint="retry")
                # Until the lease exists, only `recall` keeps the weights in memory.
                lease = self._lease(request, caller)
        if lease is None:
            with self._lock:
                is_draining = request.key in self._draining
            if is_draining:
                raise NotFound("this member is draining and accepts no new readers for this key")
            raise NotFound("this member does not hold the weights of this key")
        return lease

    def _lease(self, request: messages.LeaseRequest, caller: str) -> messages.Lease | messages.Fault | None:
        with self._lock:
            self._expire()
            weights = self._weights.get(request.key)
            if weights is None:
                return None
            if request.attach and not (weights.kept and weights.state == "whole"):
                raise PermissionDenied("this member is not a weight cache for engines", hint="run `penstock cache`")
            same_key = [(lease, leased) for lease, leased in self._leases.items() if leased.weights.key == request.key]
            # Engines that map the memory cause no transfers, so they do not count as readers.
            reading = [(lease, one) for lease, one in same_key if one.reader != request.member and one.takes_place]
            displaced: tuple[str, ...] = ()
            if not request.attach:
                places = Shares[str](weights.max_readers)
                for lease, leased in reading:
                    places.enter(lease, leased.caller)
                gave_way = places.enter(request.member, caller, displaces_own=False)
                if gave_way is None:
                    others = tuple(leased.reader for _, leased in reading)
                    message = "this member has reached its maximum number of readers"
                    return messages.Fault(error=message, hint="read from one of its readers", alternatives=others)
                displaced = gave_way
            for lease in displaced:
                self._leases[lease].is_displaced = True
            for lease, leased in same_key:
                if leased.reader == request.member:
                    self._end(lease)
            # The random id of a lease is the only authorisation of later requests.
            new_lease = secrets.token_hex(16)
            self._leases[new_lease] = _Leased(request.member, caller, weights, request.attach)
            weights.num_readers = len(reading) - len(displaced) + (not request.attach)
        return messages.Lease(lease=new_lease, ttl_s=LEASE_TTL_S, max_bytes_per_s=self.share())

    def share(self) -> int:
        """Return each reader's current share of the limit in bytes per second. 0 means no limit."""
        with self._lock:
            return self._max_bytes_per_s // max(1, sum(not leased.attached for leased in self._leases.values()))

    def leased(self, lease: str) -> LocalWeights:
        """Renew a lease and return its weights. PermissionDenied means an expired lease, SourceBusy a displaced one."""
        with self._lock:
            self._expire()
            leased = self._leases.get(lease)
            if leased is None:
                raise PermissionDenied("the lease is unknown or has expired", hint="get a new lease")
            if leased.is_displaced:
                # Do not revoke the lease, because running reads would fail and look like a fault of this member.
                raise SourceBusy("a caller with fewer readers displaced the lease", hint="read from another member")
            leased.seen = time.monotonic()
            return leased.weights

    def map(self, lease: str) -> messages.HoldingMap:
        """Return the memory map, which is valid while the lease lasts. Raise the same errors as `leased`."""
        weights = self.leased(lease)
        # Creating descriptors for many regions takes a while, so do not hold the lock.
        holding_map = weights.map(lease)
        with self._lock:
            if lease not in self._leases:
                # The lease ended while the descriptors were created, so revoke the descriptors.
                weights.regions.take_back(lease)
        return holding_map

    def release(self, lease: str) -> bool:
        """End a lease. Return False if the lease is unknown or has expired."""
        with self._lock:
            is_known = self._end(lease)
            self._expire()
        return is_known

    def expire(self) -> None:
        """Revoke expired leases and their descriptors. Each heartbeat calls this."""
        with self._lock:
            self._expire()

    def _end(self, lease: str) -> bool:
        ended = self._leases.pop(lease, None)
        if ended is not None:
            ended.weights.regions.take_back(lease)
        return ended is not None

    def _expire(self) -> None:
        now = time.monotonic()
        for lease in [lease for lease, leased in self._leases.items() if now - leased.seen > LEASE_TTL_S]:
            self._end(lease)
        for weights in self._weights.values():
            weights.num_readers = sum(
                leased.weights is weights and leased.takes_place for leased in self._leases.values()
            )

    def _answer(self, exchange: ServerExchange) -> None:
        if exchange.head.method not in {"GET", "POST", "DELETE"}:
            raise RequestRefused(HTTPStatus.NOT_IMPLEMENTED)
        try:
            value = self._route(exchange)
        except RefusedVersion as error:
            _send(exchange, HTTPStatus.UPGRADE_REQUIRED, messages.Fault(error=str(error), hint=messages.UPGRADE_HINT))
        except PermissionDenied as error:
            _send(exchange, HTTPStatus.FORBIDDEN, fault_of(error))
        except NotFound as error:
            _send(exchange, HTTPStatus.NOT_FOUND, messages.Fault(error=error.message))
        except SourceBusy as error:
            _send(exchange, HTTPStatus.TOO_MANY_REQUESTS, fault_of(error))
        except PlanError as error:
            _send(exchange, HTTPStatus.CONFLICT, fault_of(error))
        except StaleDescriptor as error:
            _send(exchange, HTTPStatus.GONE, fault_of(error))
        except (FormatError, *MALFORMED) as error:
            _send_malformed(exchange, error)
        except PenstockError as error:
            # ConfigError is a subclass of ValueError, so this clause must precede ValueError.
            _send(exchange, HTTPStatus.SERVICE_UNAVAILABLE, fault_of(error))
        except ValueError as error:
            _send_malformed(exchange, error)
        else:
            if value is _ANSWERED:
                return
            if isinstance(value, messages.Fault):
                # Neither side is at fault. The reader retries or tries another member.
                _send(exchange, HTTPStatus.TOO_MANY_REQUESTS, value)
            else:
                _send(exchange, HTTPStatus.NO_CONTENT if value is None else HTTPStatus.OK, value)

    def _route(self, exchange: ServerExchange) -> object:
        method = exchange.head.method
        url = urlsplit(exchange.head.target)
        path = url.path.strip("/").split("/")
        query = parse_qs(url.query, keep_blank_values=True)
        handler = self.handlers.get(path[1]) if path[0] == "v1" and len(path) > 1 else None
        if handler is not None:
            value = handler.answer(method, path[2:], query, lambda max_bytes: _body(exchange, max_bytes))
        else:
            match method, path:
                case "GET", ["v1", "alive"]:
                    return None
                case "GET", ["v1", "ready"]:
                    answer_ready(exchange)
                    return _ANSWERED
                case "GET", ["v1", "phases"]:
                    # The phases contain model names and errors. Do not accept the hub's token for them here, because a
                    # caller could send the token to another process that now uses this port.
                    if not (exchange.is_local or self._is_tls):
                        message = "the phases are available on this process's Unix socket, or by TLS with a certificate"
                        hint = "request them over the Unix socket or from the metrics endpoint"
                        raise PermissionDenied(message, hint=hint)
                    exchange.prove()
                    self.phases.answer(exchange, query, exchange.peer)
                    return _ANSWERED
                case "GET", ["v1", "leases", lease, name]:
                    value = self._get(lease, name, query)
                case "POST", ["v1", "leases"]:
                    body = _body(exchange, MAX_BODY_BYTES)
                    check_version(body)
                    value = self.lease(msgspec.msgpack.decode(body, type=messages.LeaseRequest))
                case "POST", ["v1", "leases", lease, "doubt"]:
                    value = self._recheck(lease, int(query.get("chunk", ["-1"])[0]))
                case "DELETE", ["v1", "leases", lease]:
                    if not self.release(lease):
                        return None
                    value = None
                case _:
                    raise NotFound("no such path")
        # An unauthenticated caller must not occupy the connections that are reserved for members.
        exchange.prove()
        return value

    def _get(self, lease: str, name: str, query: Query) -> object:
        weights = self.leased(lease)
        if name == "map":
            return self.map(lease)
        if name == "table":
            return to_message(weights.layout)
        if name == "log":
            after, wait_ms = (int(query.get(parameter, ["0"])[0]) for parameter in ("after", "wait_ms"))
            if not (0 <= after < 1 << 63 and 0 <= wait_ms < 1 << 63):
                raise FormatError("after and wait_ms must be numbers below 2**63")
            # A waiting request occupies a thread, so limit the wait.
            reply = weights.log_after(after, min(wait_ms / 1000, MAX_WAIT_S))
            return msgspec.structs.replace(reply, max_bytes_per_s=self.share())
        raise NotFound("no such path")

    def _recheck(self, lease: str, chunk: int) -> messages.Fault | None:
        if self.recheck(self.leased(lease), chunk):
            return messages.Fault(
                error=f"chunk {chunk} changed in the holder's memory, which it no longer serves",
                hint="read from another member",
            )
        return None


_ANSWERED = object()
"""Returned after a handler has sent the response."""


class RefusedVersion(Exception):
    """The reader uses a different major version of the protocol."""


def check_version(body: bytes) -> None:
    """Raise RefusedVersion if the reader's major version differs. A malformed request raises one of `MALFORMED`."""
    # Decode only this field, because the other fields of another version may not decode.
    announced = msgspec.msgpack.decode(body, type=messages.AnnouncedVersion)
    if fault := messages.version_fault(
        announced.protocol or messages.UNANNOUNCED, f"reader {announced.sender}", "this member"
    ):
        raise RefusedVersion(fault)


def _body(exchange: ServerExchange, max_bytes: int) -> bytes:
    if not 0 < exchange.body_bytes <= max_bytes:
        raise FormatError(f"the body has {exchange.body_bytes} bytes, but must have 1 to {max_bytes}")
    return exchange.read_body(max_bytes)


def fault_of(error: PenstockError) -> messages.Fault:
    """Return the response for an error. If a member was lost, the response names that member."""
    message, hint = error.message, error.hint or ""
    # A planner that cannot reach a rank is alive, so the response must name the rank and not the planner.
    if isinstance(error, PeerLost | SourceStalled) and (error.uri or "").startswith(messages.MEMBER_PREFIX):
        return messages.MemberFault(
            error=message, hint=hint, member=str(error.uri).removeprefix(messages.MEMBER_PREFIX)
        )
    return messages.Fault(error=message, hint=hint)


def _send_malformed(exchange: ServerExchange, error: Exception) -> None:
    # After a malformed request the rest of the stream cannot be trusted.
    exchange.closes = True
    _send(exchange, HTTPStatus.BAD_REQUEST, messages.Fault(error=str(error)[:512]))


def _send(exchange: ServerExchange, status: int, value: object) -> None:
    exchange.answer(status, b"" if value is None else msgspec.msgpack.encode(value))
