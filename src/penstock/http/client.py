"""HTTP/1.1 GET over kept-alive connections, the body received straight into the caller's memory.

In: a URL and headers. Out: a `Reply`: status, headers and `readinto`. Replies are parsed by the standard library;
only the socket reads are ours, so that a head has a deadline and a body needs few system calls.
Not here: retries, ranges, conditions and redirects (`storage.http`).

    Pool --get--> Connection --request--> Reply --readinto--> the caller's memory
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

from penstock.errors import ConfigError
from penstock.lifecycle import let_go_in_children

_WHOLE_BYTES = 64 << 10
"""From this many bytes on the kernel is asked to fill the buffer before it returns (MSG_WAITALL).

Reason: fewer turns of the interpreter a chunk. Source: benchmarks/results/cpu2_202611/objects.md (0.23 -> 0.17 s of CPU
for 512 MiB at the same speed).
"""

_IDLE_CONNECTIONS = 64
"""Connections kept for reuse at most, per pool. Reason: more than any load reads with at once."""

_IDLE_S = 15.0
"""Seconds after which an idle connection is not trusted any more. Reason: common servers drop one after 5 to 75 s."""

_TARGET_SAFE = "/%:@!$&'()*+,;=~-._?[]"
"""Characters of a URL's path and query sent as they are; others are percent-encoded. Source: RFC 3986, 3.3."""


class Reply:
    """A response. `readinto` until it returns 0, or drop it; then return the connection to the pool."""

    def __init__(self, response: http.client.HTTPResponse, wire: _Wire, reader: io.BufferedReader[_Wire]) -> None:
        self._response = response
        self._wire = wire
        self._reader = reader
        self.status = response.status
        self.headers = response.headers
        self.length: int | None = None if response.chunked else response.length
        """Bytes of body still to come; None where only the end of the stream tells."""

    def readinto(self, view: memoryview) -> int:
        """Receive some bytes into `view`; how many, 0 at the end of the body or of the connection.

        Raises:
            TimeoutError, OSError, http.client.HTTPException: as the socket and the parser raise them.
        """
        if self.length is None:  # in pieces, so that little is lost when one fails
            return self._response.readinto(view[:_WHOLE_BYTES])
        want = min(self.length, view.nbytes)
        if not want:
            return 0
        self._wire.fill = want >= _WHOLE_BYTES
        got = self._reader.readinto1(view[:want])
        self.length -= got
        return got

    @property
    def reusable(self) -> bool:
        """The whole answer was read and the server keeps the connection."""
        done = self._response.isclosed() if self.length is None else self.length == 0
        return done and not self._response.will_close


class _Wire(io.RawIOBase):
    """The socket as a raw stream, for one reply; closing it does not close the socket."""

    def __init__(self, sock: socket.socket, *, tls: bool, head_s: float) -> None:
        self._sock = sock
        self._tls = tls
        self._head_deadline_s: float | None = time.monotonic() + head_s
        self.fill = False

    def readable(self) -> bool:
        return True

    def makefile(self, mode: str) -> io.BufferedReader[_Wire]:
        """Return the file object that `HTTPResponse` reads from."""
        self.reader = io.BufferedReader(self)
        return self.reader

    def head_done(self) -> None:
        self._head_deadline_s = None

    def readinto(self, buffer: Any) -> int:
        if self._head_deadline_s is not None and time.monotonic() > self._head_deadline_s:
            raise TimeoutError("the server did not finish the response headers in time")
        flags = socket.MSG_WAITALL if self.fill and not self._tls else 0
        try:
            return self._sock.recv_into(buffer, 0, flags)
        except BlockingIOError as error:  # SO_RCVTIMEO ran out
            raise TimeoutError("timed out") from error


class Connection:
    """A connection to one origin; one request at a time."""

    def __init__(self, sock: socket.socket, *, tls: bool, silence_s: float, absolute: bool) -> None:
        self.sock = sock
        self._tls = tls
        self._silence_s = silence_s
        self._absolute = absolute
        self.idle_since_s = 0.0
        self.used = False

    def request(self, url: SplitResult, headers: Mapping[str, str]) -> Reply:
        """Send a GET and read the answer's head. Raises what sockets and the parser raise."""
        target = quote(url.path or "/", safe=_TARGET_SAFE)
        if url.query:
            target += "?" + quote(url.query, safe=_TARGET_SAFE)
        if self._absolute:
            target = f"http://{_authority(url)}{target}"
        lines = [f"GET {target} HTTP/1.1", f"Host: {_authority(url)}", "Accept-Encoding: identity", "Accept: */*"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if any("\r" in line or "\n" in line for line in lines):
            raise ConfigError("a line break in a request header")
        try:
            head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        except UnicodeEncodeError as error:
            raise ConfigError("a request header that is not Latin-1") from error
        self.sock.sendall(head)
        wire = _Wire(self.sock, tls=self._tls, head_s=self._silence_s)
        response = http.client.HTTPResponse(wire, method="GET")  # type: ignore[arg-type]
        response.begin()
        wire.head_done()
        self.used = True
        return Reply(response, wire, wire.reader)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.sock.close()


class Pool:
    """Kept-alive connections to any number of origins. Thread-safe; a forked child starts with none.

    Args:
        ca_file: PEM bundle trusted besides the system's roots.
        silence_s: seconds a connect, a head or a read may be silent.
    """

    def __init__(self, *, ca_file: Path | None, silence_s: float) -> None:
        self._ca_file = ca_file
        self._silence_s = silence_s
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[tuple[str, str], list[Connection]] = {}
        self._lock = threading.Lock()
        self._holders = 0
        _pools.add(self)

    def get(self, url: SplitResult, *, fresh: bool = False) -> Connection:
        """An idle connection to `url`'s origin, or a new one. `fresh` never reuses. Raises OSError or ConfigError."""
        dropped = []
        with self._lock:
            idle = self._idle.get((url.scheme, url.netloc), [])
            now_s = time.monotonic()
            reusable = None
            while idle and reusable is None:
                candidate = idle.pop()
                if fresh or now_s - candidate.idle_since_s > _IDLE_S:
                    dropped.append(candidate)
                else:
                    reusable = candidate
        for connection in dropped:
            connection.close()
        return reusable or self._connect(url)

    def put(self, url: SplitResult, connection: Connection, reply: Reply | None) -> None:
        """Give a connection back after `reply`; it is closed unless it can be used again."""
        if reply is not None and reply.reusable:
            connection.idle_since_s = time.monotonic()
            with self._lock:
                idle = self._idle.setdefault((url.scheme, url.netloc), [])
                if self._holders and len(idle) < _IDLE_CONNECTIONS:
                    idle.append(connection)
                    return
        connection.close()

    def hold(self) -> None:
        """Count one more user. The last `drop` closes the idle connections."""
        with self._lock:
            self._holders += 1

    def drop(self) -> None:
        """Count one user fewer."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self.clear()

    def clear(self) -> None:
        """Close every idle connection."""
        with self._lock:
            idle = [connection for group in self._idle.values() for connection in group]
            self._idle.clear()
        for connection in idle:
            connection.close()

    def after_fork(self) -> None:
        """In a forked child: the parent's connections are the parent's. Closing our copies does not end them."""
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):
            self.clear()

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                self._tls = ssl.create_default_context()
                if self._ca_file is not None:
                    try:
                        self._tls.load_verify_locations(self._ca_file)
                    except OSError as error:
                        raise ConfigError(f"ca_file {self._ca_file} does not load: {error}") from error
            return self._tls

    def _connect(self, url: SplitResult) -> Connection:
        if url.hostname is None:
            raise ConfigError("a URL without a host")
        tls = url.scheme == "https"
        port = url.port or (443 if tls else 80)
        proxy = _proxy(url)
        where = (proxy.hostname or "", proxy.port or 80) if proxy else (url.hostname, port)
        try:
            sock = socket.create_connection(where, timeout=self._silence_s)
        except UnicodeError as error:
            raise ConfigError("the URL's host name is not valid") from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls:
                if proxy:
                    _tunnel(sock, f"{url.hostname}:{port}", head_s=self._silence_s)
                sock = self._context().wrap_socket(sock, server_hostname=url.hostname)
            else:  # a blocking socket with kernel timeouts, for MSG_WAITALL
                limit = struct.pack("ll", int(self._silence_s), int(self._silence_s % 1 * 1e6))
                sock.settimeout(None)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        except BaseException:
            sock.close()
            raise
        return Connection(sock, tls=tls, silence_s=self._silence_s, absolute=proxy is not None and not tls)


def _authority(url: SplitResult) -> str:
    """Host and port, without user information."""
    return url.netloc.rpartition("@")[2]


def _proxy(url: SplitResult) -> SplitResult | None:
    """The proxy the environment names for `url` (`http_proxy`, `https_proxy`, `no_proxy`), if any."""
    from urllib.request import getproxies, proxy_bypass

    named = getproxies().get(url.scheme)
    if not named or proxy_bypass(url.hostname or ""):
        return None
    return urlsplit(named if "://" in named else f"http://{named}")


def _tunnel(sock: socket.socket, authority: str, *, head_s: float) -> None:
    """Ask a proxy for a tunnel. OSError when it refuses."""
    sock.sendall(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode("ascii"))
    response = http.client.HTTPResponse(_Wire(sock, tls=True, head_s=head_s), method="CONNECT")  # type: ignore[arg-type]
    response.begin()
    if response.status != 200:
        raise OSError(f"the proxy refused a tunnel: {response.status}")


_pools: weakref.WeakSet[Pool] = let_go_in_children(lambda pool: pool.after_fork())
_shared: weakref.WeakValueDictionary[tuple[Path | None, float], Pool] = weakref.WeakValueDictionary()


def shared_pool(*, ca_file: Path | None, silence_s: float) -> Pool:
    """The process's pool for these options, so that the shards of one checkpoint share their connections."""
    return _shared.setdefault((ca_file, silence_s), Pool(ca_file=ca_file, silence_s=silence_s))
