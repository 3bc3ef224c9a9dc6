"""Keep-alive connections for reading objects from any number of servers, with proxies and certificates."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Mapping
from functools import partial
from urllib.parse import SplitResult, quote

from penstock import descriptors, waits
from penstock.errors import ConfigError
from penstock.http.client import ClientConnection, HttpReply, open_tcp
from penstock.http.network import Bundle, Proxy, proxy_of, read_bundle, require_public
from penstock.lifecycle import release_after_fork
from penstock.net.listener import cut

_IDLE_CONNECTIONS = 64
"""Maximum number of idle connections for each server. No load uses more."""
_IDLE_S = 15.0
"""Seconds until an idle connection is closed. Common servers close it after 5 to 75 s."""
_TARGET_SAFE = "/%:@!$&'()*+,;=~-._?[]"
"""Characters in a URL's path and query that are not percent-encoded. Source: RFC 3986, 3.3."""


class PooledConnection(ClientConnection):
    """A connection to a server, or to a proxy that forwards requests and therefore requires the whole URL.

    `silence_s` limits the wait for a head and each read of a body. A connection that `was_used` may be closed already.
    """

    def __init__(self, sock: socket.socket, *, silence_s: float, forwarded_by: Proxy | None) -> None:
        super().__init__(sock, pace_s=silence_s)
        self._forwarded_by = forwarded_by
        self.was_used = False
        self.idle_since_s = 0.0
        self.is_redirected = False
        self._scope: waits.Scope | None = None
        self._wait: int | None = None

    def begin(self) -> None:
        """Register this connection with the calling thread's scope, so that a cancelled call aborts it. See `waits`."""
        self._scope = waits.current()
        if self._scope is not None:
            self._wait = self._scope.add(self.wire.cut)
            if self._wait is None:
                self.close()
                waits.require_wanted()

    def end(self) -> None:
        """Record that no thread is waiting for this connection. Idempotent."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.remove(self._wait)

    def close(self) -> None:
        """See `ClientConnection.close`."""
        self.end()
        super().close()

    def get(self, url: SplitResult, headers: Mapping[str, str]) -> HttpReply:
        """Send a GET and receive the head of its response. See `ClientConnection.request`."""
        target = quote(url.path or "/", safe=_TARGET_SAFE)
        if url.query:
            target += "?" + quote(url.query, safe=_TARGET_SAFE)
        fields = [("Host", _authority(url))]
        if self._forwarded_by is not None:
            target = f"http://{_authority(url)}{target}"
            fields += self._forwarded_by.headers
        # Ranges of a compressed response would not match ranges of the object.
        fields += [("Accept-Encoding", "identity"), ("Accept", "*/*"), *headers.items()]
        reply = self.request("GET", target, fields, wait_s=self.pace_s)
        self.was_used = True
        return reply


class Pool:
    """Idle connections to any number of servers. Thread-safe. A forked child starts without connections.

    `trusted` certificates are used in addition to the system's. `silence_s` limits a connect, a head or a read.
    """

    def __init__(self, *, trusted: tuple[Bundle, ...] = (), silence_s: float) -> None:
        self._trusted = trusted
        self._silence_s = silence_s
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[tuple[str, str, bool], list[PooledConnection]] = {}
        self._lock = threading.Lock()
        self._holders = 0
        _pools.add(self)

    def get(self, url: SplitResult, *, fresh: bool = False, is_redirected: bool = False) -> PooledConnection:
        """Return an idle connection to `url`'s server, or a new one. Raises OSError or ConfigError.

        If a server chose the host (`is_redirected`), a local service as host raises SourceUnavailable.
        """
        dropped = []
        with self._lock:
            idle = self._idle.get((url.scheme, url.netloc, is_redirected), [])
            now_s = time.monotonic()
            reusable = None
            while idle and reusable is None:
                candidate = idle.pop()
                is_old = now_s - candidate.idle_since_s > _IDLE_S
                if fresh or is_old or not candidate.wire.is_silent:
                    dropped.append(candidate)
                else:
                    reusable = candidate
        for connection in dropped:
            connection.close()
        connection = reusable or self._connect(url, is_redirected=is_redirected)
        connection.begin()
        return connection

    def put(self, url: SplitResult, connection: PooledConnection, reply: HttpReply | None) -> None:
        """Return a connection to the pool after `reply`, or close it if it cannot be reused."""
        connection.end()
        if reply is not None and reply.is_reusable:
            connection.idle_since_s = time.monotonic()
            with self._lock:
                idle = self._idle.setdefault((url.scheme, url.netloc, connection.is_redirected), [])
                if self._holders and len(idle) < _IDLE_CONNECTIONS:
                    idle.append(connection)
                    return
        connection.close()

    def hold(self) -> None:
        """Add a user. The last `drop` closes the idle connections."""
        with self._lock:
            self._holders += 1

    def drop(self) -> None:
        """Remove a user."""
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
        """In a forked child, close the copies of the parent's connections."""
        # Another thread of the parent may have held the lock at the fork.
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):
            self.clear()

    def _connect(self, url: SplitResult, *, is_redirected: bool) -> PooledConnection:
        if url.hostname is None:
            raise ConfigError("the URL has no host")
        is_tls = url.scheme == "https"
        port = url.port or (443 if is_tls else 80)
        proxy = proxy_of(url)
        try:
            # Check every name now, because `wrap_socket` does not close its socket if a name is invalid.
            url.hostname.encode("idna")
        except UnicodeError as error:
            raise ConfigError("the URL's host name is not valid") from error
        where = (proxy.host, proxy.port) if proxy else (url.hostname, port)
        connect = partial(open_tcp, *where, self._silence_s)
        if is_redirected:
            require_public(url.hostname, url.hostname)
            if proxy is None:
                connect = partial(connect, check=partial(require_public, host=url.hostname))
        sock = descriptors.opened(connect, _authority(url))
        try:
            with waits.ended_by(partial(cut, sock)):
                if is_tls:
                    if proxy:
                        host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
                        _open_tunnel(sock, proxy, f"{host}:{port}", wait_s=self._silence_s)
                        sock.settimeout(self._silence_s)
                    sock = self._context().wrap_socket(sock, server_hostname=url.hostname)
            connection = PooledConnection(sock, silence_s=self._silence_s, forwarded_by=None if is_tls else proxy)
            connection.is_redirected = is_redirected
            return connection
        except BaseException:
            sock.close()
            raise

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                self._tls = ssl.create_default_context()
                for bundle in self._trusted:
                    try:
                        self._tls.load_verify_locations(cadata=read_bundle(bundle).decode("ascii", "ignore"))
                    except OSError as error:
                        self._tls = None
                        raise ConfigError(f"cannot load {bundle.name} {bundle.path}: {error}") from error
            return self._tls


def _authority(url: SplitResult) -> str:
    return url.netloc.rpartition("@")[2]


def _open_tunnel(sock: socket.socket, proxy: Proxy, authority: str, *, wait_s: float) -> None:
    """Request a tunnel from a proxy. Raises OSError if the proxy refuses, or ConfigError for wrong credentials."""
    # Do not close the connection object, because TLS continues to use the socket.
    fields = [("Host", authority), *proxy.headers]
    reply = ClientConnection(sock, pace_s=wait_s).request("CONNECT", authority, fields, wait_s=wait_s)
    if reply.status == 407:
        raise wrong_proxy_user()
    if reply.status != 200:
        raise OSError(f"the proxy refused a tunnel with HTTP {reply.status}")


def wrong_proxy_user() -> ConfigError:
    """Return the error for HTTP 407 from a proxy."""
    hint = "write HTTPS_PROXY, HTTP_PROXY or ALL_PROXY as http://user:password@host:port"
    return ConfigError("the proxy refuses the user or password (HTTP 407)", hint=hint)


_pools: weakref.WeakSet[Pool] = release_after_fork(lambda pool: pool.after_fork())
_shared: weakref.WeakValueDictionary[tuple[tuple[Bundle, ...], float], Pool] = weakref.WeakValueDictionary()


def shared_pool(*, trusted: tuple[Bundle, ...], silence_s: float) -> Pool:
    """Return the process's pool for these options, which all files of a checkpoint share."""
    return _shared.setdefault((trusted, silence_s), Pool(trusted=trusted, silence_s=silence_s))
