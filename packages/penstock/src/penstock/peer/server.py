"""The server of a member: grants leases, and answers requests for memory maps, tensor tables and verified chunks.

In: HTTP/1.1 on a Unix socket, and on TCP for other hosts; msgpack bodies. Out: leases, maps, tables, logs.
Not here: weight bytes (`transport`), connections (`http.server`), the client (`client`), grants (`hub.grants`).

    POST   /v1/leases                       LeaseRequest -> Lease; 429 when all readers' places are taken
    GET    /v1/leases/L/map                 HoldingMap
    GET    /v1/leases/L/table               TableMessage
    GET    /v1/leases/L/log?after=N&wait_ms=W   LogReply; renews the lease
    POST   /v1/leases/L/doubt?chunk=N       204 if the chunk is as it was verified; 429 if it changed, and is given up
    DELETE /v1/leases/L
    GET    /v1/phases                       the start of this process as JSON, or as events: see `http.phases`
    GET    /v1/ready                        200 once it is ready, else 503; without authentication, as the next
    GET    /v1/alive                        204
           /v1/NAME/...                     answered by a registered handler, see `RequestHandler`

Members do not run the hub's ASGI stack. Starlette and uvicorn in a thread take 70 to 90 ms of processor time to import
and start and 4 MiB of memory (2 cores, Python 3.11). A request without work took 85 us there under FastAPI, or 190 us
in the thread pool, where handlers that wait for news must run. This server takes 6 ms, 0.1 MiB and 28 us, in a process
whose engine or trainer needs the memory and the interpreter lock.
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
"""Name of the Unix socket in a member's directory."""
MAX_BODY_BYTES = 64 << 10
"""Longest request body; a lease request is under 1 KiB."""
MAX_WAIT_S = 5.0
"""Longest wait of a log request for news."""
LEASE_TTL_S = 15.0
"""A lease not renewed for this long frees its reader's place. Renewals come with each log request, seconds apart."""

CheckGrant = Callable[[LeaseRequest], str]
"""Returns the caller that the reader counts for; empty: the hub named none. Raises PermissionDenied unless the request
may read."""
Recall = Callable[[str], AbstractContextManager[str]]
"""Brings weights of a key back from another tier and pins them; yields the reason if they are not back yet."""
Query = Mapping[str, list[str]]
"""The parameters behind the `?` of a request, as `parse_qs` returns them."""


class RequestHandler(Protocol):
    """A handler of all requests below one path. It must check grants itself before it answers."""

    def answer(self, verb: str, path: list[str], query: Query, body: Callable[[int], bytes]) -> object:
        """Return a value for msgpack, or None for an empty answer; errors are sent as a `Fault`.

        Args:
            path: parts of the path below the handler's own.
            body: reads the body; raises FormatError if it is empty or longer than its argument.
        """
        ...


@dataclass(slots=True)
class _Leased:
    reader: str
    caller: str
    """Whose share of the places it takes."""
    weights: LocalWeights
    attached: bool
    is_displaced: bool = False
    """Its place went to a caller with fewer. It is refused from now on, and ends once its reader has released it."""
    seen: float = field(default_factory=time.monotonic)

    @property
    def takes_place(self) -> bool:
        """Whether it takes one of the places for readers."""
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
            message = f"cannot listen on {listen}: it is not an address that other members can connect to"
            raise ConfigError(message, hint="listen on the address by which other hosts reach this one")
        server = self._open(listen, (host, port), tls)
        host_part = f"[{host}]" if ":" in host else host
        # The port of the socket, not of `listen`, which may be 0.
        self.addresses.append(f"{'http' if tls is None else 'https'}://{host_part}:{server.address[1]}")

    def _open(self, listen: str, address: str | tuple[str, int], tls: ssl.SSLContext | None) -> HttpServer:
        try:
            bound = bound_socket(address)
        except (OSError, OverflowError) as error:
            hint = hint_of(error) or "an address of this host; port 0 takes a free one"
            raise ConfigError(f"the member's server cannot listen at {listen}: {error}", hint=hint) from error
        server = HttpServer(
            bound,
            self._answer,
            name="peer server",
            thread_name="penstock-peer",
            # Not 503, which is a fault of the member: a reader treats it as busy, and asks another.
            full_status=HTTPStatus.TOO_MANY_REQUESTS,
            tls=tls,
        )
        server.start()
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
            return sum(leased.weights.key == key and leased.attached for leased in self._leases.values())

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
            # Only for the wording of a refusal: a reader then knows that asking again is no use.
            self._draining.add(key)
        self.hide(key)
        deadline = time.monotonic() + wait_s
        # Polled: a lease whose reader is gone ends by the clock alone, which wakes nobody.
        while (left := self.num_readers(key)) and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._lock:
            self._draining.discard(key)
        return left

    def close(self) -> None:
        """Stop listening and cut all connections. Idempotent."""
        # Dropped, so that no cycle of references keeps the weights until the next run of the garbage collector.
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()

    def lease(self, request: LeaseRequest) -> Lease | Fault:
        """Grant a lease, or return the reason against it. Weights in another tier are brought back first.

        Raises:
            PermissionDenied: the grant is not valid. NotFound: this member does not serve the key.
        """
        # A hub before 2.6 names no caller: each member is then one.
        caller = self._check_grant(request) or request.member
        lease = self._lease(request, caller)
        if lease is None:
            with self.recall(request.key) as why:
                if why:
                    return Fault(error=why, hint="ask again")
                # Inside the block: until a lease is counted, only `recall` keeps the weights in memory.
                lease = self._lease(request, caller)
        if lease is None:
            with self._lock:
                is_draining = request.key in self._draining
            if is_draining:
                raise NotFound("this member is draining and takes no new readers of that key")
            raise NotFound("this member does not hold that key")
        return lease

    def _lease(self, request: LeaseRequest, caller: str) -> Lease | Fault | None:
        """Grant a lease of weights that are in memory; return None if they are not.

        A caller that has fewer places than another gets one of that caller's, so that a token with many members cannot
        keep the others out.
        """
        with self._lock:
            self._expire()
            weights = self._weights.get(request.key)
            if weights is None:
                return None
            if request.attach and not (weights.kept and weights.state == "whole"):
                raise PermissionDenied("this member does not keep memory for engines", hint="run `penstock cache`")
            same_key = [(lease, leased) for lease, leased in self._leases.items() if leased.weights.key == request.key]
            # Engines that map the memory cost the member nothing while they read, so they take no reader's place.
            reading = [(lease, one) for lease, one in same_key if one.reader != request.member and one.takes_place]
            displaced: tuple[str, ...] = ()
            if not request.attach:
                places = Shares[str](weights.max_readers)
                for lease, leased in reading:
                    places.enter(lease, leased.caller)
                gave_way = places.enter(request.member, caller, displaces_own=False)
                if gave_way is None:
                    others = tuple(leased.reader for _, leased in reading)
                    message = "all readers' places are taken"
                    return Fault(error=message, hint="read from one of them", alternatives=others)
                displaced = gave_way
            for lease in displaced:
                self._leases[lease].is_displaced = True
            for lease, leased in same_key:
                if leased.reader == request.member:
                    # The reader restarted or reconnected; it needs no second place.
                    self._end(lease)
            # Random: this name is all that authorises the requests that follow.
            new_lease = secrets.token_hex(16)
            self._leases[new_lease] = _Leased(request.member, caller, weights, request.attach)
            weights.num_readers = len(reading) - len(displaced) + (not request.attach)
        return Lease(lease=new_lease, ttl_s=LEASE_TTL_S, max_bytes_per_s=self.share())

    def share(self) -> int:
        """Return the limit of each reader now, in bytes/s, so that all together stay within the total; 0: no limit."""
        with self._lock:
            return self._max_bytes_per_s // max(1, sum(not leased.attached for leased in self._leases.values()))

    def leased(self, lease: str) -> LocalWeights:
        """Renew a lease and return its weights.

        Raises:
            PermissionDenied: it is unknown or has expired. SourceBusy: its place went to another caller.
        """
        with self._lock:
            self._expire()
            leased = self._leases.get(lease)
            if leased is None:
                raise PermissionDenied("the lease is unknown or has expired", hint="get a new lease")
            if leased.is_displaced:
                # Not ended here: reads under way would fail, and look like a fault of this member to the reader.
                raise SourceBusy("the place went to a token that has fewer of them", hint="read from another member")
            leased.seen = time.monotonic()
            return leased.weights

    def map(self, lease: str) -> HoldingMap:
        """Return the memory map for a lease, valid while the lease lasts. Raises as `leased`."""
        weights = self.leased(lease)
        # Without the lock: descriptors of many regions take a while.
        holding_map = weights.map(lease)
        with self._lock:
            if lease not in self._leases:
                # It ended meanwhile, before these descriptors existed: revoke them now.
                weights.take_back(lease)
        return holding_map

    def release(self, lease: str) -> bool:
        """End a lease; return False if there is none of this name, as when it was ended before."""
        with self._lock:
            is_known = self._end(lease)
            self._expire()
        return is_known

    def expire(self) -> None:
        """End leases that were not renewed in time, and revoke their descriptors; called with each heartbeat."""
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
        """Answer one request, in the thread of its connection."""
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
            # Before ValueError, which ConfigError is too.
            _send(exchange, HTTPStatus.SERVICE_UNAVAILABLE, fault_of(error))
        except ValueError as error:
            _send_malformed(exchange, error)
        else:
            if value is _ANSWERED:
                return
            if isinstance(value, Fault):
                # Not an error of either side: the reader asks again, or asks another member.
                _send(exchange, HTTPStatus.TOO_MANY_REQUESTS, value)
            else:
                _send(exchange, HTTPStatus.NO_CONTENT if value is None else HTTPStatus.OK, value)

    def _route(self, exchange: ServerExchange) -> object:
        """Return the value to answer with; None: an empty answer."""
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
        # Here the caller has shown a grant, a lease or a session. The requests that need none return above: a stranger
        # must not take the places that are reserved for members.
        exchange.prove()
        return value

    def _check_watcher(self, exchange: ServerExchange) -> None:
        """Check that a caller may see the phases: they name models, and errors.

        Raises:
            PermissionDenied: it came by TCP, and shows no certificate of the fleet.
        """
        # A token would have to be the hub's, which no caller should send to a member's port: another process may listen
        # there by now.
        if not (exchange.is_local or self._is_tls):
            message = "the phases of this process are shown on its Unix socket, or by TLS with a certificate"
            raise PermissionDenied(message, hint="ask on its Unix socket, or where it serves its metrics")

    def _get(self, lease: str, name: str, query: Query) -> object:
        weights = self.leased(lease)
        if name == "map":
            return self.map(lease)
        if name == "table":
            return to_message(weights.layout)
        if name == "log":
            after, wait_ms = (int(query.get(parameter, ["0"])[0]) for parameter in ("after", "wait_ms"))
            if not (0 <= after < 1 << 63 and 0 <= wait_ms < 1 << 63):
                raise FormatError("after and wait_ms are numbers of 63 bits")
            # Bounded, because the wait occupies a thread.
            reply = weights.log_after(after, min(wait_ms / 1000, MAX_WAIT_S))
            # The share is computed after the wait: readers come and go meanwhile.
            return msgspec.structs.replace(reply, max_bytes_per_s=self.share())
        raise NotFound("no such thing here")

    def _doubt(self, lease: str, chunk: int) -> Fault | None:
        if self.recheck(self.leased(lease), chunk):
            return Fault(error=f"chunk {chunk} changed in the holder's memory, which it gave up", hint="ask again")
        return None


_ANSWERED = object()
"""Returned for a request that was answered already."""


class RefusedVersion(Exception):
    """An error for a reader that speaks another major version of the protocol."""


def check_version(body: bytes) -> None:
    """Check the protocol version of a request before the rest of it is decoded.

    Raises:
        VersionRefused: another major version. One of `MALFORMED`: it is no message.
    """
    # This field alone: another release may send others that do not decode, and must be refused for its version instead.
    announced = msgspec.msgpack.decode(body, type=AnnouncedVersion)
    if fault := version_fault(announced.protocol or UNANNOUNCED, f"reader {announced.sender}", "this member"):
        raise RefusedVersion(fault)


def _body(exchange: ServerExchange, max_bytes: int) -> bytes:
    """Receive a body, which must not be empty. Raises FormatError if it is, or is longer than `max_bytes`."""
    if not 0 < exchange.body_bytes <= max_bytes:
        raise FormatError(f"a body of {exchange.body_bytes} bytes; at most {max_bytes}")
    return exchange.read_body(max_bytes)


def fault_of(error: PenstockError) -> Fault:
    """Return the answer that stands for an error; of a lost member it names that one."""
    message, hint = error.message, error.hint or ""
    # A planner that cannot reach a rank lives: the rank is to be named, and not the planner.
    is_about_member = isinstance(error, PeerLost | SourceStalled) and (error.uri or "").startswith(MEMBER_PREFIX)
    if is_about_member:
        return MemberFault(error=message, hint=hint, member=str(error.uri).removeprefix(MEMBER_PREFIX))
    return Fault(error=message, hint=hint)


def _send_malformed(exchange: ServerExchange, error: Exception) -> None:
    # Nothing is known of a client that sends this; the connection is not worth keeping.
    exchange.closes = True
    _send(exchange, HTTPStatus.BAD_REQUEST, Fault(error=str(error)[:512]))


def _send(exchange: ServerExchange, status: int, value: object) -> None:
    exchange.answer(status, b"" if value is None else msgspec.msgpack.encode(value))
