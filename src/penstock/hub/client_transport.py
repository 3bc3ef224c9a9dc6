"""HTTP for httpx with one deadline for each answer, over Unix sockets and TCP.

In: where a hub listens. Out: a transport whose failures are httpx's own. Not here: what is asked (`client`).

httpx and httpcore time each read by itself: a hub that sent a byte now and then held `fetch.join` for 45 s. Over a Unix
socket httpx also leaves the socket open when nobody listens.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from penstock.net.peercred import connect_unix
from penstock.net.timed import MessageDeadline

_FAILURES: tuple[tuple[type[Exception], type[httpx.TransportError]], ...] = (
    (httpcore.ConnectTimeout, httpx.ConnectTimeout),
    (httpcore.ReadTimeout, httpx.ReadTimeout),
    (httpcore.WriteTimeout, httpx.WriteTimeout),
    (httpcore.PoolTimeout, httpx.PoolTimeout),
    (httpcore.ConnectError, httpx.ConnectError),
    (httpcore.ReadError, httpx.ReadError),
    (httpcore.WriteError, httpx.WriteError),
    (httpcore.ProtocolError, httpx.RemoteProtocolError),
    (httpcore.TimeoutException, httpx.ReadTimeout),
    (httpcore.NetworkError, httpx.ReadError),
)
_SLICE_BYTES = 64 << 10
"""Sent before the deadline is looked at again."""


class HubTransport(httpx.BaseTransport):
    """Requests to one hub; answers are read whole, each under the request's read timeout as its deadline.

    Args:
        path: of a Unix socket of this user; None: by TCP, to the URL's host.
        trust: how a hub's certificate is checked, and what it is shown.
        max_connections: at once.
    """

    def __init__(self, path: str | None, *, max_connections: int, trust: ssl.SSLContext | None = None) -> None:
        self._backend = _Timed(path)
        self._pool = httpcore.ConnectionPool(
            ssl_context=trust, max_connections=max_connections, keepalive_expiry=30.0, network_backend=self._backend
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        url = request.url
        self._backend.begin(request.extensions["timeout"]["read"])
        try:
            answer = self._pool.request(
                request.method,
                httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                headers=request.headers.raw,
                content=request.read(),
                extensions=request.extensions,
            )
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            kind = next(theirs for ours, theirs in _FAILURES if isinstance(error, ours))
            raise kind(str(error), request=request) from error
        return httpx.Response(answer.status, headers=answer.headers, content=answer.content)

    def close(self) -> None:
        """See httpx."""
        self._pool.close()


class _Timed(httpcore.NetworkBackend):
    """Connections whose reads and writes share the deadline of the thread's question."""

    def __init__(self, path: str | None) -> None:
        self._own, self._path, self._asking = httpcore.SyncBackend(), path, threading.local()

    def begin(self, seconds: float) -> None:
        """This thread asks a question."""
        self._asking.deadline = MessageDeadline(seconds)

    @property
    def deadline(self) -> MessageDeadline:
        """Of this thread's question."""
        found: MessageDeadline = self._asking.deadline
        return found

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        if self._path is None:
            return _Stream(self, self._own.connect_tcp(host, port, timeout, local_address, socket_options))
        try:
            # Tried first: where nobody listens, httpcore leaves its socket open. Another user's is refused here.
            connect_unix(self._path, self.deadline.left_s() if timeout is None else timeout).close()
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        return _Stream(self, self._own.connect_unix_socket(self._path, timeout, socket_options))

    def sleep(self, seconds: float) -> None:
        self._own.sleep(seconds)


class _Stream(httpcore.NetworkStream):
    """One connection; whichever thread's question it carries has its deadline."""

    def __init__(self, backend: _Timed, own: httpcore.NetworkStream) -> None:
        self._backend, self._own = backend, own

    def _left_s(self, timeout: float | None, kind: type[httpcore.TimeoutException]) -> float:
        try:
            left = self._backend.deadline.left_s()
        except TimeoutError as error:
            raise kind(str(error)) from error
        return left if timeout is None else min(left, timeout)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._own.read(max_bytes, self._left_s(timeout, httpcore.ReadTimeout))
        self._backend.deadline.add_bytes(len(data))
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _SLICE_BYTES):
            piece = buffer[start : start + _SLICE_BYTES]
            self._own.write(piece, self._left_s(timeout, httpcore.WriteTimeout))
            self._backend.deadline.add_bytes(len(piece))

    def close(self) -> None:
        self._own.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._backend, self._own.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._own.get_extra_info(info)
