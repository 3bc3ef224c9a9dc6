"""A small HTTP/1.1 range server, on loopback unless told otherwise, with faults on demand: for tests and benchmarks.

In: a directory, or a mapping of names to bytes. Out: `RangeServer.url`, a record of every request, bytes sent.
Not here: S3 semantics (`tests.support.servers.s3` runs real ones).
"""

from __future__ import annotations

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
"""Bytes of one `sendfile` call. Reason: large enough to cost nothing, small enough that faults are placed well."""

_STALL_S = 120.0
"""Seconds a stalled answer waits for the client or for the server's end. Reason: no wait without a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults that a server injects. Byte counts are of one answer's body."""

    num_requests: int | None = None
    """Only the first so many GET requests since the faults were set suffer; None: every one."""
    ranges_with: str = ""
    """Of those, only requests whose `Range` begins so."""
    every: int = 1
    """Of those, only each so manyth."""
    status: int = 0
    """Answer with this status instead."""
    absent_status: int = 404
    """Answer with this status for what is not there; stores answer 403 to a user who may not list."""
    retry_after: str = ""
    """`Retry-After` sent with `status`."""
    error_code: str = ""
    """The `<Code>` of the XML body sent with `status`, as object stores do."""
    reset_after: int | None = None
    """Reset the connection (RST) after so many bytes."""
    truncate_after: int | None = None
    """Close the connection in good order after so many bytes."""
    truncate_share: float | None = None
    """Close the connection in good order after this share of the body, at least one byte."""
    most_bytes: int | None = None
    """Answer no more than so many bytes of a closed range (`bytes=A-B`), and say so in `Content-Range`."""
    also_open_ranges: bool = False
    """Limit ranges to the end (`bytes=A-`) as well."""
    stall_after: int | None = None
    """Fall silent after so many bytes, connection open; -1: before the header."""
    latency_s: float = 0.0
    """Wait so long before each answer, as a distant storage does."""
    slow_bytes_per_s: int | None = None
    """Send each answer no faster than this."""
    total_bytes_per_s: int | None = None
    """Send all answers together no faster than this: the bandwidth of a storage that every reader shares."""
    ignore_range: bool = False
    """Answer 200 with everything."""
    ignore_if_match: bool = False
    """Serve whatever is there, whatever the condition."""
    wrong_content_range: bool = False
    """Claim a range shifted by one byte."""
    wrong_total: bool = False
    """Claim a total one byte longer."""
    weak_etag: bool = False
    """Mark the ETag as weak."""
    no_etag: bool = False
    """Send `Last-Modified` only."""
    no_validators: bool = False
    """Send neither ETag nor `Last-Modified`."""
    content_encoding: str = ""
    """Claim this `Content-Encoding`."""
    chunked: bool = False
    """Send the body with chunked transfer encoding and no `Content-Length`."""
    redirect_to: str = ""
    """Redirect (302) to this absolute URL, or to this URL with the request's path where it ends in `/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as the server saw it."""

    method: str
    path: str
    headers: Mapping[str, str]

    @property
    def range(self) -> tuple[int, int] | None:
        """`[start, stop)` asked for, in bytes; None without a Range header."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Bytes `[start, stop)` of an object that were sent, with the request's `Authorization`."""

    path: str
    client: str
    start: int
    stop: int


class RangeServer:
    """Serves files or bytes with ranges and conditions on a free port while its `with` block runs.

    Args:
        content: a directory, or names to bytes (a name has no leading `/`).
        faults: what to do wrong from the start; `faults` may be set again at any time.
        tls: a server-side context; the URL is then https://.
        host: the address that it listens on. It has no access control: use only one of this machine, or of a network
            namespace.
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
        """What was sent of bodies."""
        self.num_connections = 0
        self.num_bytes_sent = 0
        """Bytes of bodies, of all answers, faulty ones too."""
        self._next_send = 0.0

    def __enter__(self) -> Self:
        for name, data in self._given.items():
            self.replace(name, data)
        self._server = _RangeHttpServer((self._host, 0), _Handler)
        self._server.owner = self
        if self._tls is not None:  # the handshake happens in the connection's own thread, at its first read
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
        """`http://127.0.0.1:PORT` (or https, or another host), without a trailing slash."""
        return f"{'https' if self._tls else 'http'}://{self._host}:{self._server.server_address[1]}"

    @property
    def faults(self) -> Faults:
        """Return the faults that it injects; setting them starts its count of requests anew."""
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        with self._lock:
            self._faults, self._suffered = faults, 0

    def replace(self, name: str, data: bytes) -> None:
        """Make `name` hold `data` from the next request on, under a new ETag. For servers of bytes only."""
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
        """End every open connection, as a server does with idle ones."""
        with self._lock:
            for connection in self._connections:
                _shutdown(connection)

    def open(self, name: str) -> tuple[int, int, float] | None:
        """Return a new descriptor, the size in bytes and the version (seconds) of `name`; None when absent."""
        if self._directory is None:
            with self._lock:
                entry = self._objects.get(name)
                # A descriptor of its own: the object may be replaced while this answer is sent.
                return None if entry is None else (os.dup(entry[0]), entry[1], entry[2])
        path = self._directory / name  # symbolic links inside the directory are followed: caches of models use them
        if ".." in name.split("/") or not path.is_file():
            return None
        descriptor = os.open(path, os.O_RDONLY)
        state = os.fstat(descriptor)
        return descriptor, state.st_size, state.st_mtime

    def saw(self, request: Request) -> Faults:
        """Record `request`; return the faults for its answer."""
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
        """Reserve the time that `nbytes` take of a bandwidth all answers share; return the seconds until it begins."""
        with self._lock:
            now = time.monotonic()
            # One clock for all answers: connections share the bandwidth, as they do on a network card.
            start = max(now, self._next_send)
            self._next_send = start + nbytes / bytes_per_s
            return start - now

    def count_sent(self, nbytes: int) -> None:
        """Add bytes of a body that are given to the network; negative: that were not, after all."""
        with self._lock:
            self.num_bytes_sent += nbytes

    def record_sent(self, sent: Sent) -> None:
        """Note that bytes of an object were sent, whether or not the client read them."""
        with self._lock:
            self.sent.append(sent)

    def track(self, connection: socket.socket, *, opened: bool) -> None:
        """Remember an open connection, so that leaving the `with` block ends it."""
        with self._lock:
            if opened:
                self.num_connections += 1
                self._connections.add(connection)
            else:
                self._connections.discard(connection)


def _shutdown(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the client was first


class _RangeHttpServer(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 128
    owner: RangeServer

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients of a faulty server leave mid-answer; that is no news."""


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
        """Say nothing: `RangeServer.requests` is the log."""

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
                # Before they are sent: a client that has read all of them may look at the count at once.
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
