"""A small HTTP/1.1 range server with injected faults, for tests and benchmarks.

The server serves a directory or a mapping from names to bytes, and records every request and the bytes sent.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

_PIECE_BYTES = 1 << 20
"""Size of one `sendfile` call in bytes, small enough to place faults precisely."""
_STALL_S = 120.0
"""Maximum time in seconds that a stalled response stays open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults that a server injects. Byte counts refer to the body of one response."""

    num_requests: int | None = None
    """Affect only this many GET requests after the faults are set. None means all requests."""
    ranges_with: str = ""
    """Affect only requests whose `Range` begins with this text."""
    every: int = 1
    """Affect only every n-th of these requests."""
    status: int = 0
    absent_status: int = 404
    """Respond with this status if an object does not exist. Stores send 403 to users without permission to list."""
    retry_after: str = ""
    error_code: str = ""
    """The `<Code>` in the XML body, sent with `status`, as object stores do."""
    reset_after: int | None = None
    """Reset the connection (RST) after this many bytes."""
    truncate_after: int | None = None
    """Close the connection normally after this many bytes."""
    truncate_share: float | None = None
    """Close the connection normally after this share of the body, but after at least one byte."""
    most_bytes: int | None = None
    """Send at most this many bytes of a closed range (`bytes=A-B`), with a matching `Content-Range`."""
    also_open_ranges: bool = False
    """Also apply `most_bytes` to ranges without an end (`bytes=A-`)."""
    stall_after: int | None = None
    """Stop sending after this many bytes but keep the connection open. -1 means before the head."""
    latency_s: float = 0.0
    """Wait this many seconds before each response, as distant storage does."""
    slow_bytes_per_s: int | None = None
    """Limit each response to this rate."""
    total_bytes_per_s: int | None = None
    """Limit the total rate of all responses, like storage with a bandwidth that all readers share."""
    ignore_range: bool = False
    ignore_if_match: bool = False
    """Serve the object even if the condition does not hold."""
    wrong_content_range: bool = False
    """Send a `Content-Range` shifted by one byte."""
    wrong_total: bool = False
    """Send a total size that is one byte too large."""
    weak_etag: bool = False
    no_etag: bool = False
    """Send `Last-Modified` only."""
    no_validators: bool = False
    content_encoding: str = ""
    chunked: bool = False
    redirect_to: str = ""
    """Redirect (302) to this absolute URL. If it ends in `/`, append the request's path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that the server received."""

    method: str
    path: str
    headers: Mapping[str, str]

    @property
    def range(self) -> tuple[int, int] | None:
        """Return the requested bytes `[start, stop)`, or None without a Range header."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The bytes `[start, stop)` of an object that were sent, with the request's `Authorization`."""

    path: str
    client: str
    start: int
    stop: int


class RangeServer:
    """An HTTP server of files or bytes on a free port, as a context manager. Supports range and conditional requests.

    Args:
        content: a directory, or a mapping from names to bytes. Names have no leading `/`.
        faults: initial faults. `faults` may be set again at any time.
        tls: a server-side context, which makes the URL begin with `https://`.
        host: address to listen on. There is no access control.
    """

    def __init__(
        self,
        content: Path | str | Mapping[str, bytes],
        *,
        faults: Faults | None = None,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._host = host
        self._directory: Path | None = None
        self._objects: dict[str, tuple[int, int, float]] = {}
        self._given: Mapping[str, bytes] = {}
        if isinstance(content, Mapping):
            self._given = content
        else:
            self._directory = Path(os.path.abspath(content))
        self._faults = faults or Faults()
        self._suffered = 0
        self._tls = tls
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self.closing = threading.Event()
        self.requests: list[Request] = []
        self.sent: list[Sent] = []
        self.num_connections = 0
        self.num_bytes_sent = 0
        """Total size of all bodies in bytes, including faulty responses."""
        self._next_send = 0.0

    def __enter__(self) -> Self:
        for name, data in self._given.items():
            self.replace(name, data)
        self._server = _RangeHttpServer((self._host, 0), _Handler)
        self._server.owner = self
        if self._tls is not None:  # The connection's thread does the handshake at its first read.
            self._server.socket = self._tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="range-server")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self.drop_connections()
        self._server.server_close()
        for descriptor, _, _ in self._objects.values():
            os.close(descriptor)
        self._objects.clear()

    @property
    def url(self) -> str:
        """Return the URL without a trailing slash."""
        return f"{'https' if self._tls else 'http'}://{self._host}:{self._server.server_address[1]}"

    @property
    def faults(self) -> Faults:
        """Return the injected faults. Assigning new faults restarts the count of requests."""
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        with self._lock:
            self._faults, self._suffered = faults, 0

    def replace(self, name: str, data: bytes) -> None:
        """Replace the bytes of `name` in the served mapping, with a new ETag, from the next request on."""
        descriptor = os.memfd_create("range-server")
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(data)
        with self._lock:
            version, old = 1.0, self._objects.get(name)
            if old is not None:
                version = old[2] + 1.0
                os.close(old[0])
            self._objects[name] = (descriptor, len(data), version)

    def drop_connections(self) -> None:
        """Close every open connection, as a server does with idle connections."""
        with self._lock:
            for connection in self._connections:
                # The client may have closed the connection first.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def open(self, name: str) -> tuple[int, int, float] | None:
        """Return a new descriptor, the object's size in bytes and version in seconds, or None if there is no object."""
        if self._directory is None:
            with self._lock:
                entry = self._objects.get(name)
                # Duplicate the descriptor, because the object may be replaced while this response is sent.
                return None if entry is None else (os.dup(entry[0]), entry[1], entry[2])
        # Follow symlinks inside the directory, because model caches use them.
        path = self._directory / name
        if ".." in name.split("/") or not path.is_file():
            return None
        descriptor = os.open(path, os.O_RDONLY)
        state = os.fstat(descriptor)
        return descriptor, state.st_size, state.st_mtime

    def saw(self, request: Request) -> Faults:
        """Record `request` and return the faults for its response."""
        with self._lock:
            self.requests.append(request)
            if request.method != "GET":
                return Faults()
            if not request.headers.get("range", "").startswith(self._faults.ranges_with):
                return Faults()
            self._suffered += 1
            limit = self._faults.num_requests
            suffers = (limit is None or self._suffered <= limit) and self._suffered % self._faults.every == 0
            return self._faults if suffers else Faults()

    def send_turn(self, nbytes: int, bytes_per_s: int) -> float:
        """Reserve time to send `nbytes` at a shared bandwidth. Return the seconds until the reserved time begins."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next_send)
            self._next_send = start + nbytes / bytes_per_s
            return start - now

    def count_sent(self, nbytes: int) -> None:
        """Count body bytes that are passed to the network. A negative number subtracts bytes that were not sent."""
        with self._lock:
            self.num_bytes_sent += nbytes

    def record_sent(self, sent: Sent) -> None:
        """Record that bytes of an object were sent, whether or not the client read them."""
        with self._lock:
            self.sent.append(sent)

    def track(self, connection: socket.socket, *, opened: bool) -> None:
        """Record an open or closed connection, so that leaving the `with` block closes open connections."""
        with self._lock:
            if opened:
                self.num_connections += 1
                self._connections.add(connection)
            else:
                self._connections.discard(connection)


class _RangeHttpServer(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 128
    owner: RangeServer

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing, because clients of a faulty server often disconnect in the middle of a response."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _RangeHttpServer

    def setup(self) -> None:
        super().setup()
        self.server.owner.track(self.connection, opened=True)

    def finish(self) -> None:
        try:
            super().finish()
        except OSError:
            self.close_connection = True
        finally:
            self.server.owner.track(self.connection, opened=False)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because `RangeServer.requests` is the log."""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        faults = self.server.owner.saw(Request(method=self.command, path=self.path, headers=headers))
        if faults.stall_after == -1:
            self.server.owner.closing.wait(_STALL_S)
            self.close_connection = True
            return
        if faults.latency_s:
            self.server.owner.closing.wait(faults.latency_s)
        if faults.redirect_to:
            where = faults.redirect_to + (self.path.lstrip("/") if faults.redirect_to.endswith("/") else "")
            self._refuse(302, {"Location": where})
            return
        if faults.status:
            code = f"<Error><Code>{faults.error_code}</Code></Error>".encode() if faults.error_code else b""
            self._refuse(faults.status, {"Retry-After": faults.retry_after} if faults.retry_after else {}, code)
            return
        opened = self.server.owner.open(unquote(urlsplit(self.path).path).lstrip("/"))
        if opened is None:
            self._refuse(faults.absent_status, {})
            return
        try:
            self._serve(*opened, headers=headers, faults=faults, body=body)
        except OSError:
            self.close_connection = True
        finally:
            os.close(opened[0])

    def _refuse(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _serve(
        self, descriptor: int, nbytes: int, version: float, *, headers: Mapping[str, str], faults: Faults, body: bool
    ) -> None:
        etag = f'"{version:.6f}-{nbytes}"'
        modified = formatdate(version, usegmt=True)
        if not faults.ignore_if_match:
            unchanged_since = headers.get("if-unmodified-since", modified)
            if headers.get("if-match", etag) not in {etag, "*"} or unchanged_since != modified:
                self._refuse(412, {})
                return
        start, stop, status = 0, nbytes, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        if asked and not faults.ignore_range:
            start, stop, status = int(asked[1]), min(nbytes, int(asked[2] or nbytes - 1) + 1), 206
            if start >= nbytes:
                self._refuse(416, {"Content-Range": f"bytes */{nbytes}"})
                return
            if faults.most_bytes is not None and (asked[2] or faults.also_open_ranges):
                stop = min(stop, start + faults.most_bytes)
        self.send_response(status)
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            shift = 1 if faults.wrong_content_range else 0
            total = nbytes + (1 if faults.wrong_total else 0)
            self.send_header("Content-Range", f"bytes {start + shift}-{stop - 1 + shift}/{total}")
        if not (faults.no_etag or faults.no_validators):
            self.send_header("ETag", f"W/{etag}" if faults.weak_etag else etag)
        if not faults.no_validators:
            self.send_header("Last-Modified", modified)
        if faults.content_encoding:
            self.send_header("Content-Encoding", faults.content_encoding)
        if faults.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.wfile.flush()
        if body:
            self._send(descriptor, start, stop, faults)

    def _send(self, descriptor: int, start: int, stop: int, faults: Faults) -> None:
        share = None if faults.truncate_share is None else max(1, int((stop - start) * faults.truncate_share))
        limits = [n for n in (faults.reset_after, faults.truncate_after, faults.stall_after, share) if n is not None]
        end = min(stop, start + min(limits)) if limits else stop
        began, at = time.monotonic(), start
        try:
            while at < end:
                piece = min(_PIECE_BYTES, end - at)
                if faults.slow_bytes_per_s:
                    piece = min(piece, max(1, faults.slow_bytes_per_s // 20))
                    ahead_s = (at - start) / faults.slow_bytes_per_s - (time.monotonic() - began)
                    if ahead_s > 0 and self.server.owner.closing.wait(ahead_s):
                        break
                if faults.total_bytes_per_s:
                    piece = min(piece, max(1, faults.total_bytes_per_s // 200))
                    wait_s = self.server.owner.send_turn(piece, faults.total_bytes_per_s)
                    if wait_s > 0 and self.server.owner.closing.wait(wait_s):
                        break
                # Count first and then send, because a client may check the count as soon as it has read all bytes.
                self.server.owner.count_sent(piece)
                sent = 0
                try:
                    sent = self._send_piece(descriptor, at, piece, chunked=faults.chunked)
                finally:
                    self.server.owner.count_sent(sent - piece)
                at += sent
        finally:
            client = self.headers.get("Authorization", "")
            self.server.owner.record_sent(Sent(path=self.path, client=client, start=start, stop=at))
        if at >= stop:
            if faults.chunked:
                self.connection.sendall(b"0\r\n\r\n")
            return
        self.close_connection = True
        if faults.stall_after is not None:
            self.server.owner.closing.wait(_STALL_S)
        elif faults.reset_after is not None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def _send_piece(self, descriptor: int, at: int, nbytes: int, *, chunked: bool) -> int:
        if not chunked and not isinstance(self.connection, ssl.SSLSocket):
            return os.sendfile(self.connection.fileno(), descriptor, at, nbytes)
        data = os.pread(descriptor, nbytes, at)
        self.connection.sendall(f"{len(data):x}\r\n".encode() + data + b"\r\n" if chunked else data)
        return len(data)
