"""The client for another member's server. The client requests leases, memory maps, tensor tables and chunk logs."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from penstock.errors import (
    MALFORMED,
    FormatError,
    NotFound,
    PeerLost,
    PenstockError,
    PermissionDenied,
    PlanError,
    SourceBusy,
    SourceStalled,
    printable,
)
from penstock.holding.weight_layout import TableMessage
from penstock.http.control import Connect, ControlConnection, over_tcp
from penstock.hub import messages
from penstock.hub.address import PeerAddress, connect_peer_socket, parse_peer_url
from penstock.hub.auth import certificate_names
from penstock.interrupts import is_of_handler
from penstock.lifecycle import Closeable
from penstock.net.unix_sockets import private_socket_fault
from penstock.transport.http import LOOPBACK, data_port

T = TypeVar("T")


class PeerClient(Closeable):
    """A client for one peer's server and one key. Only `interrupt` may be called concurrently."""

    refusals: Mapping[int, type[PenstockError]] = {403: PermissionDenied, 404: NotFound, 426: PlanError}
    """The error for each status of a refusal. Other statuses raise PeerLost."""

    def __init__(
        self,
        upstream: messages.Upstream,
        *,
        member: str,
        key: str,
        same_host: bool,
        stall_s: float,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        # Never send the hub's token to a peer, because malicious members could collect tokens.
        self.upstream = upstream
        self._member = member
        self._key = key
        self._trust = trust
        self._lease: messages.Lease | None = None
        self._ending = threading.Lock()
        self._is_ending = False
        self._is_requesting = False
        self._is_interrupted = False
        self._same_host = same_host
        self._stall_s = stall_s
        self._connection: ControlConnection | None = None
        self._address: PeerAddress | None = None

    def _open(self) -> ControlConnection:
        why: list[str] = []
        for url in self.upstream.doors:
            address = parse_peer_url(url)
            if address is None:
                why.append(f"{url!r} is not a valid address of a peer")
            elif address.path and not self._same_host:
                why.append(f"{url} is on another host")
            elif address.path and (fault := private_socket_fault(address.path)):
                # Containers on one host may have separate /tmp directories, or another user may own the socket.
                why.append(f"{url}: {fault}")
            else:
                self._address = address
                return ControlConnection(self._connect_to(address), address.host or "localhost")
        message = f"cannot connect to any address of the member: {'; '.join(why)}"
        hint = "start a member on another host with --listen or ConnectionSettings(listen=HOST:PORT)"
        raise PeerLost(message, uri=self._uri(), hint=hint)

    @property
    def is_on_host(self) -> bool:
        """Return whether the last request used the peer's Unix socket, so that the peer can share memory."""
        return self._address is not None and bool(self._address.path)

    def _connect_to(self, address: PeerAddress) -> Connect:
        if address.path:
            return lambda timeout_s: connect_peer_socket(address.path, timeout_s)
        if not address.is_tls:
            return over_tcp(address.host, address.port)
        connect = over_tcp(address.host, address.port, self._trust or ssl.create_default_context())

        def connect_to_certificate(timeout_s: float) -> socket.socket:
            sock = connect(timeout_s)
            assert isinstance(sock, ssl.SSLSocket)
            shown, names = certificate_names(sock.getpeercert() or {}), self.upstream.certificate
            # All members have certificates from one authority, so only the names identify the member.
            if names and shown != names:
                sock.close()
                message = f"the peer's certificate names {shown}, but the hub knows the member as {names}"
                # `_send` maps an OSError to PeerLost, so the reader tries the next source.
                raise PermissionError(message)
            return sock

        return connect_to_certificate

    def check_data_ports(self, regions: Iterable[Mapping[str, bytes]]) -> None:
        """Raise FormatError unless the data ports in a map belong to the address of the member's server."""
        # Without this check a malicious descriptor could make this process send requests to any address.
        assert self._address is not None
        hosts = {self._address.host}
        if self._address.path:
            # A peer on a Unix socket is a process of this user on this host, so its loopback ports are trusted.
            addresses = (parse_peer_url(url) for url in self.upstream.doors)
            hosts = {"", *LOOPBACK, *(address.host for address in addresses if address is not None)}
        for offered in regions:
            if "http" in offered:
                address = data_port(offered["http"])
                if ("" if address.path else address.host) not in hosts:
                    where = address.path or f"{address.host}:{address.port}"
                    message = f"the member's map has a data port at {where}, which is not the address of its server"
                    hint = "let the member listen at one address for both ports"
                    raise FormatError(message, uri=self._uri(), hint=hint)

    def lease(self, *, attach: bool = False) -> messages.Lease:
        """Get a lease for reading, or if `attach` is set, for mapping a weight cache's memory."""
        request = messages.LeaseRequest(member=self._member, key=self._key, grant=self.upstream.grant, attach=attach)
        self._lease = lease = self._ask("POST", "/v1/leases", messages.Lease, request)
        return lease

    def _decode(self, raw: bytes, kind: type[T]) -> T:
        # Decode the version first, because fields of another version may not decode here.
        if kind is messages.Lease or kind is messages.MemberSession:
            theirs = msgspec.msgpack.decode(raw, type=messages.AnnouncedVersion).protocol
            if theirs and (
                fault := messages.version_fault(theirs, f"member {self.upstream.member[:8]}", "this process")
            ):
                raise PlanError(fault, uri=self._uri(), hint=messages.UPGRADE_HINT)
        return msgspec.msgpack.decode(raw, type=kind)

    def map(self) -> messages.HoldingMap:
        """Return the peer's memory map. Call `lease` first."""
        peer_map = self._ask("GET", f"{self._path()}/map", messages.HoldingMap)
        self.check_data_ports(peer_map.regions)
        return peer_map

    def table(self) -> TableMessage:
        """Return the peer's tensor table. Call `lease` first."""
        return self._ask("GET", f"{self._path()}/table", TableMessage)

    def log(self, after: int, wait_s: float) -> messages.LogReply:
        """Renew the lease and return the chunks verified since serial `after`. Raise PeerLost after `interrupt`."""
        # `interrupt` sets and reads these flags in the opposite order, so it either prevents or aborts the request.
        self._is_requesting = True
        if self._is_interrupted:
            raise PeerLost("the connection to the member's server was interrupted", uri=self._uri())
        return self._ask("GET", f"{self._path()}/log?after={after}&wait_ms={int(wait_s * 1000)}", messages.LogReply)

    def recheck(self, chunk: int) -> None:
        """Ask the peer to digest a chunk that arrived corrupt. Raise SourceBusy if the peer's chunk is corrupt too."""
        self._ask("POST", f"{self._path()}/doubt?chunk={chunk}", type(None))

    def _path(self) -> str:
        assert self._lease is not None
        return f"/v1/leases/{self._lease.lease}"

    def _ask(self, verb: str, path: str, kind: type[T], body: object = None) -> T:
        code, raw = self._send(verb, path, None if body is None else msgspec.msgpack.encode(body))
        if code == 204 and kind is type(None):
            return None
        if code != 200:
            raise refusal_of(self._uri(), code, raw, self.refusals)
        try:
            return self._decode(raw, kind)
        except MALFORMED as error:
            raise FormatError(f"cannot decode the peer's reply: {error}", uri=self._uri()) from error

    def _send(self, verb: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = self._open()
        try:
            self._is_requesting = True
            return self._connection.request(verb, path, body, timeout_s=self._stall_s)
        except OSError as error:
            if is_of_handler(error):
                raise
            if isinstance(error, TimeoutError):
                message = f"the member's server did not respond to {verb} within {self._stall_s:g} s"
                raise SourceStalled(message, uri=self._uri()) from error
            raise PeerLost(f"the connection to the member's server failed: {error}", uri=self._uri()) from error
        finally:
            self._is_requesting = False

    def _uri(self) -> str:
        return messages.MEMBER_PREFIX + self.upstream.member

    def interrupt(self) -> None:
        """Abort a request in another thread, which then raises PeerLost. `close` still releases the lease."""
        self._is_interrupted = True
        with self._ending:
            # Keep an idle connection for the release of the lease.
            if self._is_requesting and self._connection is not None and not self._is_ending:
                self._connection.interrupt()

    def close(self) -> None:
        """Release the lease if the peer responds, and close the connection. Idempotent."""
        with self._ending:
            self._is_ending = True
        connection, lease = self._connection, self._lease
        self._lease = None
        if connection is None:
            return
        if lease is not None:
            # `interrupt` may have closed the socket, so retry once with a new socket. Otherwise the lease expires.
            for _ in range(2):
                try:
                    connection.request("DELETE", f"/v1/leases/{lease.lease}", timeout_s=self._stall_s)
                    break
                except TimeoutError:
                    break
                except OSError:
                    continue
        connection.close()


def refusal_of(uri: str, code: int, raw: bytes, kinds: Mapping[int, type[PenstockError]]) -> PenstockError:
    """Return the error for a failed response of a member. A member named in the response replaces `uri` in errors."""
    try:
        fault = msgspec.msgpack.decode(raw, type=messages.MemberFault)
    except MALFORMED:
        fault = messages.MemberFault(error=f"HTTP {code}")
    fault = msgspec.structs.replace(fault, error=printable(fault.error), hint=printable(fault.hint))
    if code == 429:
        others = ", ".join(reader[:8] for reader in fault.alternatives)
        return SourceBusy(fault.error, uri=uri, hint=f"read from one of its readers instead: {others}")
    kind = kinds.get(code, PeerLost)
    named = uri if fault.member is msgspec.UNSET else messages.MEMBER_PREFIX + fault.member
    return kind(fault.error, uri=named, hint=fault.hint or None)
