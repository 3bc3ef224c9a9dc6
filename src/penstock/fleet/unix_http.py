"""HTTP over a Unix socket for httpx, which leaves the socket open when nobody listens.

In: a path. Out: a transport whose failures are httpx's own. Not here: what is asked (`client`).
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

import httpcore
import httpx

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


class UnixTransport(httpx.BaseTransport):
    """Requests to whoever listens at a path; answers are read whole."""

    def __init__(self, path: str, *, max_connections: int) -> None:
        self._pool = httpcore.ConnectionPool(
            uds=path, max_connections=max_connections, keepalive_expiry=30.0, network_backend=_Closing()
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        url = request.url
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


class _Closing(httpcore.NetworkBackend):
    """httpcore's own, but for closing a socket that could not connect."""

    def __init__(self) -> None:
        self._own = httpcore.SyncBackend()

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(timeout)
            try:
                probe.connect(path)
            except TimeoutError as error:
                raise httpcore.ConnectTimeout(str(error)) from error
            except OSError as error:
                raise httpcore.ConnectError(str(error)) from error
        return self._own.connect_unix_socket(path, timeout, socket_options)
