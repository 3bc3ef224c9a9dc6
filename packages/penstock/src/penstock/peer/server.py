"""The server of a member. It grants leases and answers requests for memory maps, tensor tables and verified chunks.

It speaks HTTP/1.1 on a Unix socket, and on TCP for other hosts. Bodies are msgpack.

    POST   /v1/leases                       LeaseRequest -> Lease, or 429 if there are too many readers
    GET    /v1/leases/L/map                 HoldingMap
    GET    /v1/leases/L/table               TableMessage
    GET    /v1/leases/L/log?after=N&wait_ms=W   LogReply, and renews the lease
    POST   /v1/leases/L/doubt?chunk=N       204 if the chunk is unchanged, 429 if it changed and is not served any more
    DELETE /v1/leases/L
    GET    /v1/phases                       the start of this process as JSON or as events, see `http.phases`
    GET    /v1/ready                        200 if the process is ready, else 503, without authentication
    GET    /v1/alive                        204, without authentication
           /v1/NAME/...                     answered by a registered handler, see `RequestHandler`

Members do not use the hub's ASGI stack. Importing and starting Starlette and uvicorn in a thread takes 70 to 90 ms of
CPU time and 4 MiB of memory (2 cores, Python 3.11). An empty request took 85 us with FastAPI, or 190 us in the thread
pool, which handlers that wait for news need. This server takes 6 ms, 0.1 MiB and 28 us. It runs in an engine or a
trainer, which needs the memory and the GIL.
"""

from __future__ import annotations

import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
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
from penstock.http.phases import PhasesHandler, answer_ready
from penstock.http.server import HttpServer, RequestRefused, ServerExchange
from penstock.hub.messages import (
    MEMBER_PREFIX,
    UNANNOUNCED,
    UPGRADE_HINT,
    AnnouncedVersion,
    Fault,
    HoldingMap,
    Lease,
    LeaseRequest,
    MemberFault,
    version_fault,
)
from penstock.net.listener import bound_socket
from penstock.net.shares import Shares
from penstock.peer.local_weights import LocalWeights, to_message
from penstock.transport.http import EVERYWHERE, host_and_port

SOCKET_NAME = "peer.sock"
"""File name of the Unix socket in a member's directory."""
MAX_BODY_BYTES = 64 << 10
"""Maximum size of a request body. A lease request is smaller than 1 KiB."""
MAX_WAIT_S = 5.0
"""Maximum time that a log request waits for news, in seconds."""
LEASE_TTL_S = 15.0
"""Seconds after which a lease ends unless it is renewed. Each log request renews it, every few seconds."""

CheckGrant = Callable[[LeaseRequest], str]
"""Checks a grant and returns the caller to which the reader counts, or an empty text if the hub named none. Raises
PermissionDenied if the request may not read."""
Recall = Callable[[str], AbstractContextManager[str]]
"""Loads the weights of a key back from another tier and pins them. Yields the reason if they are not back yet."""
Query = Mapping[str, list[str]]
"""The query parameters of a request, as `parse_qs` returns them."""


class RequestHandler(Protocol):
    """A handler for all requests below one path. It must check grants before it answers."""

    def answer(self, verb: str, path: list[str], query: Query, body: Callable[[int], bytes]) -> object:
        """Return a value for msgpack, or None for an empty answer. Errors are sent as a `Fault`.

        Args:
            path: parts of the path below the handler's path.
            body: reads the body. Raises FormatError if the body is empty or longer than its argument.
        """
        ...


@dataclass(slots=True)
class _Leased:
    reader: str
    caller: str
    """The caller to which this reader counts."""
    weights: LocalWeights
    attached: bool
    is_displaced: bool = False
    """Whether another caller with fewer readers took its place. It is refused from now on, and ends when its reader
    releases it."""
    seen: float = field(default_factory=time.monotonic)

    @property
    def takes_place(self) -> bool:
        """Return whether the lease counts as a reader."""
        return not (self.attached or self.is_displaced)


class PeerServer:
    """The server of one member. Its methods may be called from any thread.

    Attributes:
        addresses: URLs at which other members reach this one.
        handlers: handlers of the paths `/v1/NAME`, by name.
        recall: see `Recall`.
        recheck: digests a chunk again, and returns True if it changed.
        phases: answers requests for the phases of this process.
    """

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
        """Serve at a Unix socket, and at a host address if one is given.

        Args:
            path: Path of the Unix socket. Its directory must be private to the user.
            check_grant: Validates a grant.
            listen: `host:port` or `[v6]:port` for other hosts. Port 0 takes any free port. None means this host only.
            tls: TLS context of the listening TCP socket. None means no TLS.
            max_bytes_per_s: Limit for all readers together. 0 means no limit.

        Raises:
            ConfigError: an address cannot be bound.
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
            # Do not send 503, which counts as a fault of the member. After 429 the reader asks another member.
            full_status=HTTPStatus.TOO_MANY_REQUESTS,
            tls=tls,
        )
        server.start()
        self._servers.append(server)
        return server

    def show(self, weights: LocalWeights) -> None:
        """Allow leases for these weights, which must be registered."""
        with self._lock:
            self._weights[weights.key] = weights

    def hide(self, key: str) -> None:
        """Refuse new leases for this key."""
        with self._lock:
            self._weights.pop(key, None)

    def num_readers(self, key: str) -> int:
        """Return the number of leases for this key, including those of engines that map the memory."""
        with self._lock:
            self._expire()
            return sum(leased.weights.key == key for leased in self._leases.values())

    def num_attached(self, key: str) -> int:
        """Return the number of engines that map the memory for this key."""
        with self._lock:
            self._expire()
            return sum(leased.weights.key == key and leased.attached for leased in self._leases.values())

    def retire(self, key: str) -> bool:
        """Refuse new leases for this key if it has no lease now. Return whether it had none."""
        with self._lock:
            self._expire()
            is_free = all(leased.weights.key != key for leased in self._leases.values())
            if is_free:
                self._weights.pop(key, None)
        return is_free

    def drain(self, key: str, wait_s: float) -> int:
        """Refuse new leases and wait at most `wait_s` seconds for the readers to finish.

        Return the number of remaining readers.
        """
        with self._lock:
            # The refusal then says that the member is draining, so the reader does not ask again.
            self._draining.add(key)
        self.hide(key)
        deadline = time.monotonic() + wait_s
        # Poll, because the lease of a vanished reader ends by the clock alone, which wakes no thread.
        while (left := self.num_readers(key)) and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._lock:
            self._draining.discard(key)
        return left

    def close(self) -> None:
        """Stop listening and cut all connections. Idempotent."""
        # Drop the servers, so that no reference cycle keeps the weights alive until the garbage collector runs.
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()

    def lease(self, request: LeaseRequest) -> Lease | Fault:
        """Grant a lease, or return the reason for a refusal. Weights in another tier are loaded back first.

        Raises:
            PermissionDenied: the grant is not valid.
            NotFound: this member does not serve the key.
        """
        # A hub older than 2.6 names no caller. Each member then counts as a separate caller.
        caller = self._check_grant(request) or request.member
        lease = self._lease(request, caller)
        if lease is None:
            with self.recall(request.key) as why:
                if why:
                    return Fault(error=why, hint="ask again")
                # Count the lease inside this block, because only `recall` keeps the weights in memory until then.
                lease = self._lease(request, caller)
        if lease is None:
            with self._lock:
                is_draining = request.key in self._draining
            if is_draining:
                raise NotFound("this member is draining and accepts no new readers for that key")
            raise NotFound("this member does not hold that key")
        return lease

    def _lease(self, request: LeaseRequest, caller: str) -> Lease | Fault | None:
        """Grant a lease for weights in memory. Return None if they are not in memory.

        A caller with fewer readers than another caller takes one of its places. A token with many members therefore
        cannot keep the others out.
        """
        with self._lock:
            self._expire()
            weights = self._weights.get(request.key)
            if weights is None:
                return None
            if request.attach and not (weights.kept and weights.state == "whole"):
                raise PermissionDenied("this member is not a weight cache for engines", hint="run `penstock cache`")
            same_key = [(lease, leased) for lease, leased in self._leases.items() if leased.weights.key == request.key]
            # Engines that map the memory cost this member nothing while they read, so they do not count as readers.
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
                    return Fault(error=message, hint="read from one of its readers", alternatives=others)
                displaced = gave_way
            for lease in displaced:
                self._leases[lease].is_displaced = True
            for lease, leased in same_key:
                if leased.reader == request.member:
                    # The reader restarted or reconnected and needs only one place.
                    self._end(lease)
            # The random name of a lease is the only authorisation of the requests that follow.
            new_lease = secrets.token_hex(16)
            self._leases[new_lease] = _Leased(request.member, caller, weights, request.attach)
            weights.num_readers = len(reading) - len(displaced) + (not request.attach)
        return Lease(lease=new_lease, ttl_s=LEASE_TTL_S, max_bytes_per_s=self.share())

    def share(self) -> int:
        """Return the current limit for each reader in bytes per second, so that the total stays within its limit.

        0 means none.
        """
        with self._lock:
            return self._max_bytes_per_s // max(1, sum(not leased.attached for leased in self._leases.values()))

    def leased(self, lease: str) -> LocalWeights:
        """Renew a lease and return its weights.

        Raises:
            PermissionDenied: the lease is unknown or has expired.
            SourceBusy: another caller took its place.
        """
        with self._lock:
            self._expire()
            leased = self._leases.get(lease)
            if leased is None:
                raise PermissionDenied("the lease is unknown or has expired", hint="get a new lease")
            if leased.is_displaced:
                # Do not end the lease here. Running reads would fail and look like a fault of this member.
                raise SourceBusy("a token with fewer readers took this place", hint="read from another member")
            leased.seen = time.monotonic()
            return leased.weights

    def map(self, lease: str) -> HoldingMap:
        """Return the memory map for a lease. It is valid while the lease lasts. Raises the same errors as `leased`."""
        weights = self.leased(lease)
        # Do not hold the lock, because creating descriptors for many regions takes a while.
        holding_map = weights.map(lease)
        with self._lock:
            if lease not in self._leases:
                # The lease ended before these descriptors existed, so revoke them now.
                weights.take_back(lease)
        return holding_map

    def release(self, lease: str) -> bool:
        """End a lease. Return False if there is no lease with this name, for example because it ended before."""
        with self._lock:
            is_known = self._end(lease)
            self._expire()
        return is_known

    def expire(self) -> None:
        """End the leases that were not renewed in time, and revoke their descriptors. Each heartbeat calls this."""
        with self._lock:
            self._expire()

    def _end(self, lease: str) -> bool:
        ended = self._leases.pop(lease, None)
        if ended is not None:
            ended.weights.take_back(lease)
        return ended is not None

    def _expire(self) -> None:
        now = time.monotonic()
        for lease in [lease for lease, leased in self._leases.items() if now - leased.seen > LEASE_TTL_S]:
            self._end(lease)
        for weights in self._weights.values():
            weights.num_readers = sum(
                leased.weights is weights and leased.takes_place for leased in self._leases.values()
            )

    # -- Requests.

    def _answer(self, exchange: ServerExchange) -> None:
        """Answer one request in the thread of its connection."""
        if exchange.head.method not in {"GET", "POST", "DELETE"}:
            raise RequestRefused(HTTPStatus.NOT_IMPLEMENTED)
        try:
            value = self._route(exchange)
        except RefusedVersion as error:
            _send(exchange, HTTPStatus.UPGRADE_REQUIRED, Fault(error=str(error), hint=UPGRADE_HINT))
        except PermissionDenied as error:
            _send(exchange, HTTPStatus.FORBIDDEN, fault_of(error))
        except NotFound as error:
            _send(exchange, HTTPStatus.NOT_FOUND, Fault(error=error.message))
        except SourceBusy as error:
            _send(exchange, HTTPStatus.TOO_MANY_REQUESTS, fault_of(error))
        except PlanError as error:
            _send(exchange, HTTPStatus.CONFLICT, fault_of(error))
        except StaleDescriptor as error:
            _send(exchange, HTTPStatus.GONE, fault_of(error))
        except (FormatError, *MALFORMED) as error:
            _send_malformed(exchange, error)
        except PenstockError as error:
            # Catch this before ValueError, because ConfigError is a ValueError.
            _send(exchange, HTTPStatus.SERVICE_UNAVAILABLE, fault_of(error))
        except ValueError as error:
            _send_malformed(exchange, error)
        else:
            if value is _ANSWERED:
                return
            if isinstance(value, Fault):
                # Neither side is at fault. The reader asks again or asks another member.
                _send(exchange, HTTPStatus.TOO_MANY_REQUESTS, value)
            else:
                _send(exchange, HTTPStatus.NO_CONTENT if value is None else HTTPStatus.OK, value)

    def _route(self, exchange: ServerExchange) -> object:
        """Return the value for the answer, or None for an empty answer."""
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
                    self._check_watcher(exchange)
                    exchange.prove()
                    self.phases.answer(exchange, query, exchange.peer)
                    return _ANSWERED
                case "GET", ["v1", "leases", lease, name]:
                    value = self._get(lease, name, query)
                case "POST", ["v1", "leases"]:
                    body = _body(exchange, MAX_BODY_BYTES)
                    check_version(body)
                    value = self.lease(msgspec.msgpack.decode(body, type=LeaseRequest))
                case "POST", ["v1", "leases", lease, "doubt"]:
                    value = self._doubt(lease, int(query.get("chunk", ["-1"])[0]))
                case "DELETE", ["v1", "leases", lease]:
                    if not self.release(lease):
                        return None
                    value = None
                case _:
                    raise NotFound("no such thing here")
        # At this point the caller has sent a grant, a lease or a session. Requests that need none have returned above,
        # because a stranger must not take the connections that are reserved for members.
        exchange.prove()
        return value

    def _check_watcher(self, exchange: ServerExchange) -> None:
        """Check that a caller may see the phases, which contain model names and errors.

        Raises:
            PermissionDenied: the caller came by TCP without a certificate of the fleet.
        """
        # A token would have to be the hub's token. No caller should send that to a member's port, because another
        # process may listen there by now.
        if not (exchange.is_local or self._is_tls):
            message = "the phases of this process are available on its Unix socket, or by TLS with a certificate"
            raise PermissionDenied(message, hint="ask on its Unix socket or at its metrics endpoint")

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
            # Limit the wait, because it occupies a thread.
            reply = weights.log_after(after, min(wait_ms / 1000, MAX_WAIT_S))
            # Compute the share after the wait, because readers may have come and gone.
            return msgspec.structs.replace(reply, max_bytes_per_s=self.share())
        raise NotFound("no such thing here")

    def _doubt(self, lease: str, chunk: int) -> Fault | None:
        if self.recheck(self.leased(lease), chunk):
            return Fault(
                error=f"chunk {chunk} changed in the holder's memory, which it no longer serves", hint="ask again"
            )
        return None


_ANSWERED = object()
"""Returned for a request that was answered already."""


class RefusedVersion(Exception):
    """The error for a reader that speaks another major version of the protocol."""


def check_version(body: bytes) -> None:
    """Check the protocol version of a request before decoding the rest.

    Raises:
        VersionRefused: the version is another major version. A malformed request raises one of `MALFORMED`.
    """
    # Decode this field alone. Another release may send fields that do not decode, and the refusal must name the
    # version.
    announced = msgspec.msgpack.decode(body, type=AnnouncedVersion)
    if fault := version_fault(announced.protocol or UNANNOUNCED, f"reader {announced.sender}", "this member"):
        raise RefusedVersion(fault)


def _body(exchange: ServerExchange, max_bytes: int) -> bytes:
    """Receive a body. Raise FormatError if it is empty or longer than `max_bytes`."""
    if not 0 < exchange.body_bytes <= max_bytes:
        raise FormatError(f"the body has {exchange.body_bytes} bytes, but must have 1 to {max_bytes}")
    return exchange.read_body(max_bytes)


def fault_of(error: PenstockError) -> Fault:
    """Return the answer for an error. If a member was lost, the answer names that member."""
    message, hint = error.message, error.hint or ""
    # A planner that cannot reach a rank is alive, so the answer must name the rank and not the planner.
    is_about_member = isinstance(error, PeerLost | SourceStalled) and (error.uri or "").startswith(MEMBER_PREFIX)
    if is_about_member:
        return MemberFault(error=message, hint=hint, member=str(error.uri).removeprefix(MEMBER_PREFIX))
    return Fault(error=message, hint=hint)


def _send_malformed(exchange: ServerExchange, error: Exception) -> None:
    # Close the connection, because nothing is known about a client that sends malformed requests.
    exchange.closes = True
    _send(exchange, HTTPStatus.BAD_REQUEST, Fault(error=str(error)[:512]))


def _send(exchange: ServerExchange, status: int, value: object) -> None:
    exchange.answer(status, b"" if value is None else msgspec.msgpack.encode(value))
