"""Transport that reads a peer's host memory over HTTP/1.1, between any two hosts that can connect in one direction.

A process with a descriptor may read the memory that it describes. The descriptor contains a key of 16 random bytes,
which the server requires and compares in constant time. TLS hides the key and the bytes. A reader only sends requests
to the address in a descriptor. Members of a fleet only accept descriptors with the address of the sending member
(`data_port`). `http_reader` is the client, and `http.region_server` the server.
"""

from __future__ import annotations

import ctypes
import secrets
import socket
import ssl
import threading
import weakref
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.errors import Cancelled, ConfigError
from penstock.http.compression import CompressionChoice
from penstock.http.region_messages import ReadRequest
from penstock.http.region_server import RegionServer, ServedRegion
from penstock.lifecycle import release_after_fork
from penstock.net.listener import bound_socket
from penstock.net.unix_sockets import RuntimeDir
from penstock.segments import Segments
from penstock.transport.http_reader import Peer, Read, RegionAddress, cut_into_parts
from penstock.transport.protocol import Descriptor, Handle, Memory, PendingRead, Transport, decode, decode_payload

CONNECTIONS = 2
"""Default number of connections to one peer. Source: benchmarks/results/cpu2_202611/hosts.md."""
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
EVERYWHERE = frozenset({"", "*", "0.0.0.0", "::"})


class _Payload(msgspec.Struct, frozen=True, kw_only=True):
    key: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    host: Annotated[str, msgspec.Meta(max_length=253, pattern=r"^[A-Za-z0-9.:_-]*\Z")] = ""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    path: Annotated[str, msgspec.Meta(max_length=107)] = ""
    is_tls: bool = False

    @property
    def address(self) -> RegionAddress:
        return RegionAddress(host=self.host, port=self.port, path=self.path, is_tls=self.is_tls)


_DECODER = msgspec.msgpack.Decoder(_Payload)

_transports: weakref.WeakSet[HttpTransport] = release_after_fork(lambda transport: transport.forget())


class HttpHandle:
    """See `Handle`."""

    def __init__(self, transport: HttpTransport, memory: Memory) -> None:
        self.transport = transport
        self.memory = memory
        self.is_open = True
        self.view = memoryview((ctypes.c_ubyte * memory.nbytes).from_address(memory.address)).cast("B")
        self.reads: weakref.WeakSet[Read] = weakref.WeakSet()
        self._region, self.descriptor = self._begin()

    def _begin(self) -> tuple[ServedRegion, Descriptor]:
        region = self.transport.server.show(self.view, self.memory.is_there)
        return region, self._described(region, region.key)

    def _described(self, region: ServedRegion, key: bytes) -> Descriptor:
        at, address = self.transport, self.transport.address
        payload = _Payload(key=key, host=address.host, port=address.port, path=address.path, is_tls=address.is_tls)
        return Descriptor(
            transport=at.name,
            endpoint=at.endpoint,
            generation=region.generation,
            nbytes=self.memory.nbytes,
            payload=msgspec.msgpack.encode(payload),
        )

    def lend(self, borrower: str) -> Descriptor:
        """See `RevocableHandle.lend`."""
        with self.transport.changing:
            self.check_open()
            return self._described(self._region, self.transport.server.lend(self._region, borrower))

    def take_back(self, borrower: str) -> None:
        """See `RevocableHandle.take_back`."""
        self.transport.server.take_back(self._region, borrower)

    def fence(self) -> Descriptor:
        """See `Handle.fence`. Aborts the connections of responses in progress."""
        self.check_open()
        with self.transport.changing:
            self.check_open()
            self.transport.server.hide(self._region)
            self._region, self.descriptor = self._begin()
            return self.descriptor

    def close(self) -> None:
        """See `Handle.close`. Does nothing in a forked child."""
        if not self.transport.is_mine:
            self.is_open = False
            return
        with self.transport.changing:
            self.is_open = False
            self.transport.server.hide(self._region)
            self.transport.handles.discard(self)
            reads = list(self.reads)
        for read in reads:
            read.fail(Cancelled("the registration is closed"))

    def check_open(self) -> None:
        """Raise Cancelled if the handle is closed or belongs to a parent process from before a fork."""
        if not self.is_open or not self.transport.is_mine:
            raise Cancelled("the registration is closed")


class HttpTransport:
    """See `Transport`. This transport only reaches host memory."""

    name = "http"

    def __init__(
        self,
        server: RegionServer,
        address: RegionAddress,
        *,
        home: RuntimeDir | None,
        trust: ssl.SSLContext | None,
        num_connections: int,
        compress: bool | None,
    ) -> None:
        self.server = server
        self.address = address
        self._home = home
        self.endpoint = server.endpoint
        self.is_mine = True
        self.changing = threading.RLock()
        self.handles = set[HttpHandle]()
        self._trust = trust
        self._num_connections = num_connections
        self._compress = compress
        self._peers: dict[RegionAddress, Peer] = {}
        _transports.add(self)

    @classmethod
    def open(
        cls,
        listen: str | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        trust: ssl.SSLContext | None = None,
        num_connections: int = CONNECTIONS,
        compress: bool | None = None,
    ) -> HttpTransport:
        """Start a server for readers. Raises ConfigError if the address is malformed or cannot be bound.

        Args:
            listen: `host:port` (port 0 selects a free one), `unix:/path`, or None for a Unix socket in a directory of
                this process, since a loopback port would be open to every user of the host.
            compress: whether bytes are compressed, or None to compress where measurements show a gain.
        """
        if num_connections < 1:
            raise ConfigError(f"num_connections must be positive, not {num_connections}")
        home = RuntimeDir.open() if listen is None else None
        try:
            listen_at = listen if home is None else f"unix:{home.path}/data.sock"
            assert listen_at is not None
            bound, address = _listen(listen_at, tls is not None)
            server = RegionServer(bound, endpoint=secrets.token_hex(8), tls=tls)
            server.start()
        except BaseException:
            if home is not None:
                home.close()
            raise
        return cls(server, address, home=home, trust=trust, num_connections=num_connections, compress=compress)

    def register(self, memory: Memory) -> HttpHandle:
        """See `Transport.register`. Raises Cancelled if the transport is closed."""
        if memory.device != "cpu":
            raise ConfigError(f"http only reaches host memory, not {memory.device}")
        with self.changing:
            self._check_open()
            handle = HttpHandle(self, memory)
            self.handles.add(handle)
        return handle

    def post_read(self, into: Handle, source: Descriptor, segments: Segments) -> Read:
        """See `Transport.post_read`."""
        if source.transport != self.name or not isinstance(into, HttpHandle) or into.transport is not self:
            raise ConfigError(f"{self.name} got a {source.transport} descriptor or another transport's handle")
        segments.check(src_nbytes=source.nbytes, dst_nbytes=into.memory.nbytes)
        payload = decode_payload(source, _DECODER)
        read = Read(
            generation=source.generation,
            request=ReadRequest(endpoint=source.endpoint, key=payload.key, nbytes=source.nbytes, src=b"", length=b""),
            uri=source.uri,
            nbytes=int(segments.nbytes.sum()),
            owners=(into, into.memory.owner),
        )
        parts = cut_into_parts(read, into.view, segments)
        with self.changing:
            self._check_open()
            into.check_open()
            # Add the read before posting it, so that closing the handle or the transport fails it too.
            into.reads.add(read)
            read.peer = self._peer(payload.address)
        read.peer.post(parts)
        return read

    def wait(self, pending: PendingRead, *, stall_s: float) -> None:
        """See `Transport.wait`. Also raises PermissionDenied (the peer refuses our certificate) and FormatError."""
        assert isinstance(pending, Read)
        pending.wait(stall_s)

    def way(self, source: Descriptor) -> tuple[str, str]:
        """See `Coding.way`."""
        with self.changing:
            peer = self._peers.get(decode_payload(source, _DECODER).address)
        is_coded, why = (False, "") if peer is None else peer.choice.decision()
        return f"{self.name}+zstd" if is_coded else self.name, why

    def close(self) -> None:
        """See `Transport.close`."""
        if not self.is_mine:
            return
        with self.changing:
            self.is_mine = False
            handles, peers = list(self.handles), list(self._peers.values())
            self.handles.clear()
        for handle in handles:
            handle.is_open = False
            for read in list(handle.reads):
                read.fail(Cancelled("the transport is closed"))
        for peer in peers:
            peer.close()
        self.server.close()
        # The kernel does not remove the name of a Unix socket.
        if self.address.path:
            Path(self.address.path).unlink(missing_ok=True)
        if self._home is not None:
            self._home.close()

    def forget(self) -> None:
        """Close in a forked child, and leave the connections and the listener to the parent."""
        self.is_mine = False
        # Another thread of the parent may have held the lock during the fork.
        self.changing = threading.RLock()

    def _check_open(self) -> None:
        if not self.is_mine:
            raise Cancelled("the transport is closed")

    def _peer(self, address: RegionAddress) -> Peer:
        # Connections to a member serve all its registrations and generations.
        if address not in self._peers:
            choice = CompressionChoice(self._compress)
            self._peers[address] = Peer(address, self._trust, self._num_connections, choice)
        return self._peers[address]


def _listen(listen: str, is_tls: bool) -> tuple[socket.socket, RegionAddress]:
    """Return a bound socket and its address for readers."""
    if listen.startswith("unix:"):
        path = listen.removeprefix("unix:")
        return _bound(path, listen), RegionAddress(path=path, is_tls=is_tls)
    host, port = host_and_port(listen)
    if host in EVERYWHERE:
        message = f"cannot serve memory at {listen}: readers cannot connect to an address that means every interface"
        raise ConfigError(message, hint="use the address at which other hosts reach this host, such as 10.0.0.5:0")
    bound = _bound((host, port), listen)
    return bound, RegionAddress(host=host, port=bound.getsockname()[1], is_tls=is_tls)


def data_port(encoded: bytes) -> RegionAddress:
    """Return the address in this transport's encoded descriptor. Raises FormatError if the descriptor is malformed."""
    return decode_payload(decode(encoded), _DECODER).address


def host_and_port(listen: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`. Raises ConfigError if `listen` has a different format."""
    host, _, port = listen.rpartition(":")
    if port.isascii() and port.isdigit() and int(port) > 65535:
        raise ConfigError(f"{listen!r} has an invalid port", hint="use a port from 0 to 65535")
    if not (port.isascii() and port.isdigit()) or (":" in host and host[0] + host[-1] != "[]"):
        raise ConfigError(f"{listen!r} is not host:port", hint="put an IPv6 address in brackets: [::1]:0")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _bound(address: str | tuple[str, int], listen: str) -> socket.socket:
    try:
        return bound_socket(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot serve memory at {listen}: {error}") from error


_fits: type[Transport] = HttpTransport
