"""One upstream, as a reader sees it: ask its door for a lease, its map, and what it gains.

In: an `Upstream` of the hub's. Out: a `Lease`, a `HoldingMap`, `LogReply`s; typed errors.
Not here: the other side (`server`), reading the bytes (`transport`), which chunks (`fetch.run`).
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import threading
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from penstock.closing import Closing
from penstock.errors import (
    FormatError,
    NotFound,
    PeerLost,
    PenstockError,
    PermissionDenied,
    PlanError,
    SourceBusy,
    SourceStalled,
)
from penstock.hub.address import PeerAddress, connect_peer_socket, parse_peer_url, private_socket_fault
from penstock.hub.messages import Fault, HoldingMap, Lease, LeaseRequest, LogReply, Upstream
from penstock.hub.tls import certificate_names
from penstock.hub.version_negotiation import UPGRADE_HINT, version_fault
from penstock.net.timed import TimedReader
from penstock.peer.weight_layout import TableMessage
from penstock.transport.http import LOOPBACK, data_port

T = TypeVar("T")

MAX_REPLY_BYTES = 256 << 20
"""Longest answer that is read: the table of four million tensors."""


class _Answer(http.client.HTTPResponse):
    """An answer under one deadline, from its first wait to its last byte; longer only for the bytes that came."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        seconds = sock.gettimeout()
        assert seconds is not None
        self.fp.close()
        self.fp = io.BufferedReader(TimedReader(sock, seconds))


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path, self._timeout_s = path, timeout_s

    def connect(self) -> None:
        self.sock = connect_peer_socket(self._path, self._timeout_s)


class _TlsConnection(http.client.HTTPSConnection):
    """To a door that must show the certificate by which the hub knows its member, where it knows one."""

    def __init__(self, host: str, port: int, timeout_s: float, trust: ssl.SSLContext | None, names: str) -> None:
        super().__init__(host, port, timeout=timeout_s, context=trust)
        self._names = names

    def connect(self) -> None:
        super().connect()
        assert isinstance(self.sock, ssl.SSLSocket)
        shown = certificate_names(self.sock.getpeercert() or {})
        if self._names and shown != self._names:
            self.close()
            raise PermissionError(f"it shows the certificate of {shown}, and the hub knows it by {self._names}")


class PeerClient(Closing):
    """One reader's conversation with one door. A context manager; one thread uses it, any may interrupt it.

    The grant, and then the secret name of the lease, are all that a door is shown. A member announces its own doors, so
    whatever else went there, the reader's token for one, would be that member's to use.

    Args:
        upstream: whom, and the grant to show.
        member: who we are.
        key: what we want.
        same_host: whether its Unix door can be reached.
        stall_s: deadline of every answer.
        trust: how a door's certificate is checked, and what it is shown; None: as the system does.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        member: str,
        key: str,
        same_host: bool,
        stall_s: float,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self.upstream, self._member, self._key = upstream, member, key
        self._trust = trust
        self._lease: Lease | None = None
        self._ending, self._is_ending = threading.Lock(), False
        self._same_host, self._stall_s = same_host, stall_s
        self._connection: http.client.HTTPConnection | None = None
        self._door: PeerAddress | None = None

    def _connect(self) -> http.client.HTTPConnection:
        why: list[str] = []
        for door in self.upstream.doors:
            address = parse_peer_url(door)
            if address is None:
                why.append(f"{door!r} is no address of a door")
            elif address.path and not self._same_host:
                why.append(f"{door} is on another host")
            elif address.path and (fault := private_socket_fault(address.path)):
                why.append(f"{door}: {fault}")  # containers of one host may share no /tmp, or somebody else owns it
            else:
                self._door = address
                if address.path:
                    return _UnixConnection(address.path, self._stall_s)
                if address.is_tls:
                    names = self.upstream.certificate
                    return _TlsConnection(address.host, address.port, self._stall_s, self._trust, names)
                return http.client.HTTPConnection(address.host, address.port, timeout=self._stall_s)
        raise PeerLost(f"it has no door to be reached from here: {'; '.join(why)}", uri=self._uri())

    def check_data_ports(self, regions: Iterable[Mapping[str, bytes]]) -> None:
        """Check that a map's data ports are at the member's own address: where its door is.

        A descriptor may name any address, and this process would connect to it and send it a request.

        Raises:
            FormatError: one is elsewhere, or malformed.
        """
        assert self._door is not None
        hosts = {self._door.host}
        if self._door.path:
            # Connected to by Unix socket, so it is a process of this user on this host.
            doors = (parse_peer_url(door) for door in self.upstream.doors)
            hosts = {"", *LOOPBACK, *(door.host for door in doors if door is not None)}
        for offered in regions:
            if "http" in offered:
                address = data_port(offered["http"])
                if ("" if address.path else address.host) not in hosts:
                    where = address.path or f"{address.host}:{address.port}"
                    message = f"its map names a data port at {where}, which is not where its door is"
                    raise FormatError(message, uri=self._uri(), hint="its member listens at one address for both")

    def lease(self, *, attach: bool = False) -> Lease:
        """The right to read; with `attach`, to use the memory itself, which a keeper keeps for as long.

        Raises:
            SourceBusy: all places are taken. PermissionDenied: the grant does not do, or it keeps nothing for others.
            NotFound: it has not got the key.
            PeerLost: it is gone. SourceStalled: it does not answer.
            PlanError: it speaks another major version of the protocol.
        """
        body = msgspec.msgpack.encode(
            LeaseRequest(member=self._member, key=self._key, grant=self.upstream.grant, attach=attach)
        )
        lease = self._ask("POST", "/v1/leases", Lease, body)
        self._check_version(lease.protocol)
        self._lease = lease
        return lease

    def _check_version(self, theirs: str) -> None:
        """PlanError where the door speaks another major version."""
        if fault := version_fault(theirs, "the member", "this process"):
            raise PlanError(fault, uri=self._uri(), hint=UPGRADE_HINT)

    def map(self) -> HoldingMap:
        """Where its bytes are; after `lease`."""
        found = self._ask("GET", f"{self._path()}/map", HoldingMap)
        self.check_data_ports(found.regions)
        return found

    def table(self) -> TableMessage:
        """Its tensors; after `lease`."""
        return self._ask("GET", f"{self._path()}/table", TableMessage)

    def log(self, after: int, wait_s: float) -> LogReply:
        """What it gained since, waiting for news at most `wait_s`; renews the lease."""
        return self._ask("GET", f"{self._path()}/log?after={after}&wait_ms={int(wait_s * 1000)}", LogReply)

    def recheck(self, chunk: int) -> None:
        """Have it digest a chunk that differs here; returns if the chunk is right there.

        Raises:
            SourceBusy: it differs there, too; the holder no longer serves that memory.
        """
        code, raw = self._send("POST", f"{self._path()}/doubt?chunk={chunk}", None)
        if code != 204:
            raise self._refusal(code, raw)

    def _path(self) -> str:
        assert self._lease is not None
        return f"/v1/leases/{self._lease.lease}"

    def _ask(self, verb: str, path: str, kind: type[T], body: bytes | None = None) -> T:
        code, raw = self._send(verb, path, body)
        if code == 200:
            try:
                return msgspec.msgpack.decode(raw, type=kind)
            except msgspec.DecodeError as error:
                raise FormatError(f"a malformed answer: {error}", uri=self._uri()) from error
        raise self._refusal(code, raw)

    def _send(self, verb: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = self._connect()
        connection = self._connection
        try:
            connection.response_class = _Answer
            if connection.sock is not None:
                connection.sock.settimeout(self._stall_s)  # the last answer's deadline left a shorter one
            with contextlib.suppress(BrokenPipeError):
                # A full door answers before it is asked, and closes; its answer says so.
                connection.request(verb, path, body)
            response = connection.getresponse()
            raw = response.read(MAX_REPLY_BYTES)
            return response.status, raw
        except TimeoutError as error:
            self._connection.close()
            raise SourceStalled("its door does not answer", uri=self._uri()) from error
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            self._connection.close()
            raise PeerLost(f"its door is gone: {error}", uri=self._uri()) from error

    def _refusal(self, code: int, raw: bytes) -> PenstockError:
        try:
            fault = msgspec.msgpack.decode(raw, type=Fault)
        except msgspec.DecodeError:
            fault = Fault(error=f"HTTP {code}")
        if code == 429:
            others = ", ".join(one[:8] for one in fault.alternatives)
            return SourceBusy(fault.error, uri=self._uri(), hint=f"its readers have or will have the same: {others}")
        kinds: dict[int, type[PenstockError]] = {403: PermissionDenied, 404: NotFound, 426: PlanError}
        kind = kinds.get(code, PeerLost)
        return kind(fault.error, uri=self._uri(), hint=fault.hint or None)

    def _uri(self) -> str:
        return f"penstock:{self.upstream.member}"

    def interrupt(self) -> None:
        """End a request under way in another thread; it raises PeerLost there. The goodbye of `close` is left alone."""
        with self._ending:
            waiting = None if self._is_ending or self._connection is None else self._connection.sock
            if waiting is not None:
                with contextlib.suppress(OSError):  # it has just ended by itself
                    waiting.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the lease back, if the door still listens. Idempotent."""
        with self._ending:
            self._is_ending = True
        connection, lease = self._connection, self._lease
        self._lease = None
        if connection is not None:
            connection.close()  # it may have been interrupted
            if lease is not None and not self._release(connection, lease):
                self._release(connection, lease)  # it was of an interrupted request; else it expires there
            connection.close()

    def _release(self, connection: http.client.HTTPConnection, lease: Lease) -> bool:
        """Whether there is no use in asking again."""
        try:
            if connection.sock is not None:
                connection.sock.settimeout(self._stall_s)
            connection.request("DELETE", f"/v1/leases/{lease.lease}")
            connection.getresponse().read()
        except TimeoutError:
            return True
        except (OSError, http.client.HTTPException):
            connection.close()
            return False
        return True
