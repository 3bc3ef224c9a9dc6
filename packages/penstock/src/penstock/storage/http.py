"""Sources over HTTP(S), with ranged reads that fill the caller's buffers and resume where they failed."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from penstock.config import Settings
from penstock.errors import ConfigError, NotFound
from penstock.http.network import Bundle, bundles, is_local_service
from penstock.http.pool import Pool, shared_pool
from penstock.http.range_request import (
    ATTEMPTS_PER_STALL,
    Arrivals,
    Origin,
    Patience,
    RangeExchange,
    RequestFailed,
    Validators,
)
from penstock.storage.source import Source, read_whole, span

S = TypeVar("S", bound="HttpSource")


class HttpStorage:
    """The storage for http:// and https:// URLs, each of which names one file."""

    def open(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> Source:
        """See `Storage.open`."""
        return open_http(uri, settings=settings, storage_options=storage_options)

    def list(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> list[str]:
        """Return the URL itself, if the file exists."""
        open_http(uri, settings=settings, storage_options=storage_options).close()
        return [uri]

    def read_small(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> bytes | None:
        """See `Storage.read_small`."""
        try:
            source = open_http(uri, settings=settings, storage_options=storage_options)
        except NotFound:
            return None
        return read_whole(source, stall_s=settings.stall_s)


class PlainOrigin:
    """The user's URL, or the target of a redirect from that URL until a request to the target is refused.

    Args:
        uri: http:// or https://, optionally with user and password.
        options: `bearer_token`, or `username` and `password`. Credentials are sent only to the URL's own host.
        cookie: a token in the form `name=value`, sent only to the URL's own host.
    """

    def __init__(self, uri: str, options: Mapping[str, str], *, cookie: str = "") -> None:
        try:
            self._user_url = urlsplit(uri)
            # Parse the port, so that a bad port is a ConfigError.
            _ = self._user_url.port
        except ValueError as error:
            raise ConfigError(f"{clean(uri)} is not a URL: {error}") from error
        if self._user_url.scheme not in {"http", "https"} or not self._user_url.hostname:
            raise ConfigError(f"{clean(uri)} is not an http(s) URL")
        unknown = set(options) - {"bearer_token", "username", "password"}
        if unknown:
            raise ConfigError(f"storage_options {sorted(unknown)} are unknown for http(s)")
        self._headers: dict[str, str] = {}
        user = options.get("username", unquote(self._user_url.username or ""))
        if "bearer_token" in options:
            self._headers["Authorization"] = f"Bearer {options['bearer_token']}"
        elif user:
            pair = f"{user}:{options.get('password', unquote(self._user_url.password or ''))}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        if cookie:
            self._headers["Cookie"] = cookie
        self._user_url = self._user_url._replace(netloc=self._user_url.netloc.rpartition("@")[2], fragment="")
        self._current = self._user_url

    def url(self) -> SplitResult:
        """See `Origin.url`."""
        return self._current

    def headers(self, url: SplitResult) -> Mapping[str, str]:
        """See `Origin.headers`."""
        same = (url.scheme, url.netloc) == (self._user_url.scheme, self._user_url.netloc)
        # Do not send credentials to the host of a redirect.
        return self._headers if same else {}

    def renew(self, url: SplitResult, status: int) -> bool:
        """Request the user's URL again, because the target of a redirect may have expired. See `Origin.renew`."""
        if url == self._user_url or status not in {400, 401, 403, 404, 410}:
            return False
        # Another thread may already have followed a new redirect, so reset only an unchanged URL.
        if self._current == url:
            self._current = self._user_url
        return True

    def is_redirected(self, url: SplitResult) -> bool:
        """See `Origin.is_redirected`. A local service of the user may redirect to local services."""
        return url.netloc != self._user_url.netloc and not is_local_service(self._user_url.hostname or "")

    def moved(self, url: SplitResult, location: str) -> str | None:
        """See `Origin.moved`. Redirects from https to http or to other schemes are refused."""
        try:
            target = urlsplit(urljoin(url.geturl(), location))
            _ = target.port
        except ValueError:
            return "the server redirects to an invalid URL"
        if target.scheme not in {"http", "https"} or not target.hostname:
            return "the server redirects to a URL that is not http(s)"
        if url.scheme == "https" and target.scheme == "http":
            return "the server redirects from https to http"
        # Following the redirect for every range would double the requests.
        self._current = target._replace(netloc=target.netloc.rpartition("@")[2], fragment="")
        return None


class HttpSource:
    """A `Source` over HTTP(S), opened by `open_http` or `objects.open_object`.

    Args:
        uri: name for errors, without secrets.
        seen: validators from the first response.
        trusted: certificates. None uses `network.bundles`.
    """

    def __init__(
        self,
        uri: str,
        origin: Origin,
        seen: Validators,
        *,
        settings: Settings,
        trusted: tuple[Bundle, ...] | None = None,
    ) -> None:
        self.uri = uri
        self.nbytes = seen.nbytes
        self.identity = seen.identity
        self._origin = origin
        self._seen = seen
        self._settings = settings
        self._pool = _hold_pool(settings, bundles(settings) if trusted is None else trusted)
        self._arrivals = Arrivals()
        self._is_capped = False
        self._open = True
        self._lock = threading.Lock()
        self.received_bytes = 0

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`. One ranged request fills all `buffers`. After a failure the rest is requested again.

        If the response is shorter than the range, the next request asks for all bytes to the object's end, because
        servers that limit ranges often send whole objects. If the response to the second request is short too, the rest
        is requested range by range.
        """
        stop, left = span(self, offset, buffers)
        patience = Patience(self.uri, self._settings, arrivals=self._arrivals)
        renewed = is_short = False
        while left:
            before = offset
            to_the_end = is_short and not self._is_capped
            try:
                with RangeExchange(
                    self.uri,
                    self._origin,
                    self._pool,
                    byte_range=(offset, stop),
                    seen=self._seen,
                    to_the_end=to_the_end,
                ) as exchange:
                    if not renewed and exchange.refused():
                        renewed = True
                        continue
                    exchange.check()
                    is_short = exchange.stop < stop
                    self._is_capped |= is_short and to_the_end
                    while offset < exchange.stop:
                        received = exchange.readinto(left[0][: exchange.stop - offset])
                        offset += received
                        self.received_bytes += received
                        left[0] = left[0][received:]
                        if not left[0].nbytes:
                            del left[0]
                patience.progress()
            except RequestFailed as failed:
                # Bytes arrived, so treat this as a new failure: allow all retries and another renewal.
                if offset > before:
                    patience.progress()
                    renewed = False
                patience.pause(failed, (offset, stop))
        return "http"

    def close(self) -> None:
        """See `Source.close`."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        self._pool.drop()


def _hold_pool(settings: Settings, trusted: tuple[Bundle, ...]) -> Pool:
    pool = shared_pool(trusted=trusted, silence_s=settings.stall_s / ATTEMPTS_PER_STALL)
    pool.hold()
    return pool


def open_http(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> HttpSource:
    """Open an http(s) URL. A user and password in the URL are sent, never shown. Raises ConfigError or SourceError."""
    origin, name = PlainOrigin(uri, storage_options or {}), clean(uri)
    return open_origin(name, origin, lambda seen: HttpSource(name, origin, seen, settings=settings), settings=settings)


def open_origin(uri: str, origin: Origin, make: Callable[[Validators], S], *, settings: Settings) -> S:
    """Probe the object at `origin`, and return the source that `make` creates for it. Raises like `open_http`."""
    pool, patience, renewed = _hold_pool(settings, bundles(settings)), Patience(uri, settings), False
    try:
        while True:
            try:
                # Signed URLs often do not allow HEAD, so request the first byte.
                with RangeExchange(uri, origin, pool, byte_range=(0, 1), seen=None) as exchange:
                    if not renewed and exchange.refused():
                        renewed = True
                        continue
                    seen = exchange.first_seen()
                    if exchange.reply.status == 206:
                        # Reading the response to its end lets the first range reuse the connection.
                        exchange.readinto(memoryview(bytearray(1)))
                return make(seen)
            except RequestFailed as failed:
                patience.pause(failed, (0, 1))
    finally:
        # The source holds its own reference to the pool.
        pool.drop()


def ask(uri: str, origin: Origin, *, limit: int, settings: Settings) -> tuple[int, Mapping[str, str], bytes]:
    """Request something other than an object, such as a hub's listing. Return the status, headers and body.

    The body of a refusal is empty. The request is retried after temporary refusals. Raises FormatError if the response
    is compressed or longer than `limit` bytes, and SourceUnavailable or SourceStalled.
    """
    pool, patience = _hold_pool(settings, bundles(settings)), Patience(uri, settings)
    try:
        while True:
            try:
                with RangeExchange(uri, origin, pool, byte_range=None, seen=None) as exchange:
                    status, headers = exchange.reply.status, exchange.reply.headers
                    is_refusal = 300 <= status < 500 and status not in {407, 408, 425, 429}
                    return status, headers, b"" if is_refusal else exchange.read_whole(limit)
            except RequestFailed as failed:
                patience.pause(failed, None)
    finally:
        pool.drop()


def clean(uri: str) -> str:
    """Return `uri` without user, query and fragment, for messages. Other URIs are returned unchanged."""
    if not uri.lower().startswith(("http://", "https://")):
        return uri
    scheme, _, rest = uri.partition("://")
    authority, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
