"""Sources over HTTP(S): ranged reads into the caller's buffers, resumed from the last byte after a failure.

In: an `Origin` (where the object is now, and how to find out again) and the settings. Out: an `HttpSource`.
Not here: one request and its checks (`http.range_request`), connections (`http.pool`), signing (`objects`).
"""

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
    """The storage of plain http:// and https:// URLs. It cannot list: a URL names one file."""

    def open(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> Source:
        """See `Storage.open`."""
        return open_http(uri, settings=settings, storage_options=storage_options)

    def list(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> list[str]:
        """Return the URL itself, if something is there."""
        open_http(uri, settings=settings, storage_options=storage_options).close()
        return [uri]

    def read_small(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> bytes | None:
        """See `Storage.read_small`."""
        try:
            source = open_http(uri, settings=settings, storage_options=storage_options)
        except NotFound:
            return None
        return read_whole(source, stall_s=settings.stall_s)


class PlainAddress:
    """A URL as the user wrote it, and the target of its redirect until that target is refused.

    Args:
        uri: http:// or https://, with user and password or not.
        options: `bearer_token`, or `username` and `password`; sent to the URL's own origin only.
        cookie: a token in the form `name=value`, sent there too.
    """

    def __init__(self, uri: str, options: Mapping[str, str], *, cookie: str = "") -> None:
        try:
            self._origin = urlsplit(uri)
            # `port` is parsed when it is read: a bad one must fail here, as a ConfigError, and not in the first
            # request.
            _ = self._origin.port
        except ValueError as error:
            raise ConfigError(f"{clean(uri)} is not a URL: {error}") from error
        if self._origin.scheme not in {"http", "https"} or not self._origin.hostname:
            raise ConfigError(f"{clean(uri)} is not an http(s) URL")
        unknown = set(options) - {"bearer_token", "username", "password"}
        if unknown:
            raise ConfigError(f"storage_options {sorted(unknown)} mean nothing for http(s)")
        self._headers: dict[str, str] = {}
        user = options.get("username", unquote(self._origin.username or ""))
        if "bearer_token" in options:
            self._headers["Authorization"] = f"Bearer {options['bearer_token']}"
        elif user:
            pair = f"{user}:{options.get('password', unquote(self._origin.password or ''))}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        if cookie:
            self._headers["Cookie"] = cookie
        self._origin = self._origin._replace(netloc=self._origin.netloc.rpartition("@")[2], fragment="")
        self._current = self._origin

    def url(self) -> SplitResult:
        """See `Origin.url`."""
        return self._current

    def headers(self, url: SplitResult) -> Mapping[str, str]:
        """See `Origin.headers`."""
        same = (url.scheme, url.netloc) == (self._origin.scheme, self._origin.netloc)
        # A redirect to another host must not carry the credentials of the first.
        return self._headers if same else {}

    def renew(self, url: SplitResult, status: int) -> bool:
        """See `Origin.renew`. What a redirect led to may have expired."""
        if url == self._origin or status not in {400, 401, 403, 404, 410}:
            return False
        # Not the new one that another thread has found meanwhile.
        if self._current == url:
            self._current = self._origin
        return True

    def is_foreign(self, url: SplitResult) -> bool:
        """See `Origin.is_foreign`. A user who names such a host may be redirected to others of the kind."""
        return url.netloc != self._origin.netloc and not is_local_service(self._origin.hostname or "")

    def moved(self, url: SplitResult, location: str) -> str | None:
        """See `Origin.moved`. Never from https to http, never to another scheme."""
        try:
            target = urlsplit(urljoin(url.geturl(), location))
            _ = target.port
        except ValueError:
            return "it redirects to something that is no URL"
        if target.scheme not in {"http", "https"} or not target.hostname:
            return "it redirects to something that is no http(s) URL"
        if url.scheme == "https" and target.scheme == "http":
            return "it redirects from https to http"
        # Kept: following the redirect again for every range would double the requests.
        self._current = target._replace(netloc=target.netloc.rpartition("@")[2], fragment="")
        return None


class HttpSource:
    """A `Source` over HTTP(S). Opened by `open_http` or `objects.open_object`.

    Args:
        uri: what errors call it; without secrets.
        address: where it is.
        seen: what it was when first seen.
        settings: `retries`, `stall_s`, `ca_file`.
        trusted: certificates; None: see `network.bundles`.
    """

    def __init__(
        self,
        uri: str,
        address: Origin,
        seen: Validators,
        *,
        settings: Settings,
        trusted: tuple[Bundle, ...] | None = None,
    ) -> None:
        self.uri = uri
        self.nbytes = seen.nbytes
        self.identity = seen.identity
        self._address = address
        self._seen = seen
        self._settings = settings
        self._pool = _hold_pool(settings, bundles(settings) if trusted is None else trusted)
        self._arrivals = Arrivals()
        self._is_capped = False
        self._open = True
        self._lock = threading.Lock()
        self.received_bytes = 0

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`. One ranged request fills all `buffers`; after a failure the rest is requested again.

        A server that answers with less than the range gets one request for all from there on: servers that limit the
        length of ranges often let a whole object pass. Where they do not, the rest is requested range by range.
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
                    self._address,
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
                        got = exchange.readinto(left[0][: exchange.stop - offset])
                        offset += got
                        self.received_bytes += got
                        left[0] = left[0][got:]
                        if not left[0].nbytes:
                            del left[0]
                patience.progress()
            except RequestFailed as failed:
                # Bytes came, so this is a new failure, with all its retries and a renewal of the address.
                if offset > before:
                    patience.progress()
                    renewed = False
                failed.ask(patience, (offset, stop))
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
    """Open a plain http(s) URL.

    Args:
        uri: the URL; user and password in it are sent, never shown.
        settings: `retries`, `stall_s`, `ca_file`.
        storage_options: `bearer_token`, or `username` and `password`.

    Raises:
        ConfigError, FormatError, and the SourceErrors: as their names say.
    """
    address, name = PlainAddress(uri, storage_options or {}), clean(uri)
    return open_address(
        name, address, lambda seen: HttpSource(name, address, seen, settings=settings), settings=settings
    )


def open_address(uri: str, address: Origin, make: Callable[[Validators], S], *, settings: Settings) -> S:
    """Return the source that `make` makes of what is at `address` now. Raises as `open_http`; `uri` is for errors."""
    pool = _hold_pool(settings, bundles(settings))
    try:
        return make(_probe(uri, address, pool, settings))
    finally:
        # The source holds the pool for itself by now; after an error nothing does.
        pool.drop()


def ask(uri: str, address: Origin, *, limit: int, settings: Settings) -> tuple[int, Mapping[str, str], bytes]:
    """Return the status, the headers and the body of an answer that is no object, such as a hub's listing.

    The body of a refusal is left out. Refusals that may pass are repeated, as for an object.

    Args:
        uri: for errors.
        limit: longest accepted body, in bytes. Its time is bounded by its bytes.

    Raises:
        FormatError: the answer is longer, or compressed. SourceUnavailable, SourceStalled: as their names say.
    """
    pool, patience = _hold_pool(settings, bundles(settings)), Patience(uri, settings)
    try:
        while True:
            try:
                with RangeExchange(uri, address, pool, byte_range=None, seen=None) as exchange:
                    status, headers = exchange.reply.status, exchange.reply.headers
                    is_refusal = 300 <= status < 500 and status not in {407, 408, 425, 429}
                    return status, headers, b"" if is_refusal else exchange.read_whole(limit)
            except RequestFailed as failed:
                failed.ask(patience, None)
    finally:
        pool.drop()


def _probe(uri: str, address: Origin, pool: Pool, settings: Settings) -> Validators:
    """Return what is at `address`, by a GET of its first byte: signed URLs often allow no HEAD."""
    patience, renewed = Patience(uri, settings), False
    while True:
        try:
            with RangeExchange(uri, address, pool, byte_range=(0, 1), seen=None) as exchange:
                if not renewed and exchange.refused():
                    renewed = True
                    continue
                seen = exchange.first_seen()
                if exchange.reply.status == 206:
                    # An answer that is read to its end leaves a connection that the first range can use.
                    exchange.readinto(memoryview(bytearray(1)))
                return seen
        except RequestFailed as failed:
            failed.ask(patience, (0, 1))


def clean(uri: str) -> str:
    """Return `uri` without user information, query and fragment, fit to be shown. Object store URIs hold none."""
    if not uri.lower().startswith(("http://", "https://")):
        return uri
    scheme, _, rest = uri.partition("://")
    authority, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
