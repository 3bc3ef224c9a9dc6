"""Conditional range requests: exchanges that are checked against the object first seen, and pauses between attempts.

`storage.http` and `storage.objects` contain the loops over attempts. `RequestFailed` means that another attempt may
succeed, and other errors are final. `Patience` counts failures and silence since the last byte, and never the total
time, because a slow source is not broken.
"""

from __future__ import annotations

import contextlib
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Protocol
from urllib.parse import SplitResult

import msgspec

from penstock import waits
from penstock.config import Settings
from penstock.errors import (
    FormatError,
    NotFound,
    PenstockError,
    PermissionDenied,
    SourceChanged,
    SourceStalled,
    SourceTruncated,
    SourceUnavailable,
)
from penstock.http.client import HttpReply, TooLong
from penstock.http.head import MalformedMessage
from penstock.http.network import CERTIFICATE_HINT
from penstock.http.pool import Pool, PooledConnection, wrong_proxy_user
from penstock.interrupts import is_of_handler
from penstock.totals import Total

retried_requests = Total()
"""Number of requests that this process retried."""
_FIRST_PAUSE_S = 0.1
"""Seconds before the first retry. Source: the default `init_backoff` of obstore's RetryConfig."""
_LONGEST_PAUSE_S = 5.0
"""Maximum length of one pause in seconds. Five retries reach 1.6 s, so this limits only larger numbers of retries."""
ATTEMPTS_PER_STALL = 3
"""A silent connection is replaced after this fraction of `stall_s`, so that it does not make the source stalled."""


class Arrivals:
    """How often, and when last, bytes arrived from a source. Shared by all readers of the source."""

    def __init__(self) -> None:
        self.count = 0
        self.last_s = 0.0


class Patience:
    """Remaining retries for one range of a source. Each received byte restores all retries.

    Bytes from other ranges also reset the number of failures. With many concurrent requests, a server that refuses
    every second request refuses some ranges several times in a row. Silence is counted for this range alone. `arrivals`
    is shared by all ranges.
    """

    def __init__(
        self,
        uri: str,
        settings: Settings,
        *,
        arrivals: Arrivals | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = waits.pause,
    ) -> None:
        self._uri = uri
        self._retries = settings.retries
        self._stall_s = settings.stall_s
        self._clock = clock
        self._sleep = sleep
        self._arrivals = Arrivals() if arrivals is None else arrivals
        self._num_seen = self._arrivals.count
        self._failures = 0
        self._num_pauses = 0
        self._last_byte_s = clock()

    def progress(self) -> None:
        """Record that bytes arrived, and reset failures and silence."""
        self._failures = 0
        self._num_pauses = 0
        self._last_byte_s = self._arrivals.last_s = self._clock()
        self._arrivals.count += 1
        self._num_seen = self._arrivals.count

    def pause(self, failed: RequestFailed, byte_range: tuple[int, int] | None) -> None:
        """Count a failure to read the missing bytes `[start, stop)`, and pause before the next attempt.

        Raises:
            SourceStalled: no byte arrived for `stall_s`, or there were too many consecutive timeouts.
            SourceUnavailable: there were too many consecutive failures, or the server deferred requests for `stall_s`.
        """
        # A cancelled call aborts its own connection, which is not a failure of the source.
        waits.require_wanted()
        # Bytes from other ranges prove that the source works, so count only later failures.
        if self._arrivals.count != self._num_seen:
            self._num_seen, self._failures = self._arrivals.count, 0
        self._failures += failed.wait_s is None
        self._num_pauses += 1
        now_s = self._clock()
        silent_s = now_s - self._last_byte_s
        # Allow 1 %, because three silent attempts of a third of `stall_s` may end slightly early.
        if failed.silent and (silent_s >= 0.99 * self._stall_s or self._failures > self._retries):
            message, hint = (
                f"no byte arrived for {silent_s:.1f} s ({failed})",
                "raise stall_s if the source is only slow",
            )
            raise SourceStalled(message, uri=self._uri, byte_range=byte_range, hint=hint) from failed.cause
        if self._failures > self._retries:
            message = f"{self._failures} attempts made no progress, the last: {failed}"
            raise SourceUnavailable(message, uri=self._uri, byte_range=byte_range) from failed.cause
        # Without jitter, ranges that failed together would all be requested again at the same moment.
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._num_pauses - 1, 10)) * waits.jitter(0.5, 1.0)
        if failed.wait_s is not None:
            # A server that limits requests serves the ranges in turn, so measure silence from the source's last byte.
            left_s = self._stall_s - (now_s - max(self._last_byte_s, self._arrivals.last_s))
            if left_s <= 0:
                message = f"for {self._stall_s:.1f} s the server asked to wait and sent no byte ({failed})"
                hint = "raise stall_s to wait longer"
                raise SourceUnavailable(message, uri=self._uri, byte_range=byte_range, hint=hint) from failed.cause
            pause_s = min(max(pause_s, failed.wait_s), left_s)
        retried_requests.add()
        self._sleep(pause_s)


_MAX_REDIRECTS = 5
"""Maximum number of redirects for one range. Model hubs use 1 or 2."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which to retry. Source: RFC 9110 15.5.9, 15.6; RFC 6585 4; RFC 8470; the S3 API's errors."""
_CREDENTIAL_CODES = frozenset({"ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "AuthorizationHeaderMalformed"})
"""Codes in HTTP 400 responses for wrong credentials. Source: the S3 API's list of error responses."""
_ERROR_BODY_BYTES = 16 << 10
"""Maximum number of bytes of an error's body to search for its code. S3's bodies are under 1 KiB."""
_ERROR_BODY_S = 2.0
"""Maximum seconds to wait for an error's body. The status is known, and the body usually arrives with the head."""


class Validators(msgspec.Struct, frozen=True, kw_only=True):
    """The size of an object, and the headers that identify one state of it."""

    etag: str = ""
    """The ETag as sent, with quotes and the `W/` prefix if it has one."""
    last_modified: str = ""
    """HTTP date."""
    nbytes: int

    @property
    def condition(self) -> dict[str, str]:
        """The header that makes the request fail with 412 if the object has changed."""
        if self.etag and not self.etag.startswith("W/"):
            return {"If-Match": self.etag}
        return {"If-Unmodified-Since": self.last_modified} if self.last_modified else {}

    @property
    def identity(self) -> str:
        """The ETag, the modification date if there is no ETag, or "" if there is neither."""
        return self.etag or self.last_modified

    def differs(self, headers: Mapping[str, str]) -> str | None:
        """Return how the headers of a response differ from these validators, or None if they match."""
        etag, modified = headers.get("etag", ""), headers.get("last-modified", "")
        if self.etag and etag:
            same = etag.removeprefix("W/") == self.etag.removeprefix("W/")
            return None if same else f"its ETag changed from {self.etag} to {etag}"
        if self.last_modified and modified:
            same = modified == self.last_modified
            return None if same else f"its modification date changed from {self.last_modified} to {modified}"
        return "responses no longer have an ETag or Last-Modified" if self.identity else None


class Origin(Protocol):
    """The location of an object: its current URL and the headers to send."""

    def url(self) -> SplitResult:
        """Return the URL to read from, after signing and redirects."""

    def headers(self, url: SplitResult) -> Mapping[str, str]:
        """Return the headers for `url`, without range and condition."""

    def renew(self, url: SplitResult, status: int) -> bool:
        """Discard `url`, which was refused with `status`. Return False if a new URL would be refused too."""

    def moved(self, url: SplitResult, location: str) -> str | None:
        """Follow a redirect from `url`. Return None, or the reason to refuse the redirect."""

    def is_redirected(self, url: SplitResult) -> bool:
        """Return whether a server chose the host of `url` by a redirect."""


class RequestFailed(Exception):
    """A failed attempt that may be retried. See `Patience.pause`.

    `wait_s` is the `Retry-After` of a server that deferred the request. The request is retried until the source sends
    no byte for `stall_s`. A timeout is `silent`.
    """

    def __init__(
        self, why: str, *, silent: bool = False, wait_s: float | None = None, cause: Exception | None = None
    ) -> None:
        super().__init__(why)
        self.silent = silent
        self.wait_s = wait_s
        self.cause = cause


class RangeExchange:
    """A request and its response, after redirects. Leaving the block returns the connection to the pool.

    Args:
        byte_range: the bytes to request, `[start, stop)`. If None, read the whole response with `read_whole`.
        seen: validators of the first response, or None for the first request.
        to_the_end: request all bytes from `start`, so that the same response can continue past `stop`.

    Attributes:
        stop: end of the bytes in the response, after `check`. The server may have shortened the range.
        code: the error code in the body of a refusal, or "".
    """

    reply: HttpReply
    _connection: PooledConnection

    def __init__(
        self,
        uri: str,
        origin: Origin,
        pool: Pool,
        *,
        byte_range: tuple[int, int] | None,
        seen: Validators | None,
        to_the_end: bool = False,
    ) -> None:
        self._uri = uri
        self._origin = origin
        self._pool = pool
        self._seen = seen
        self._range = start, stop = byte_range or (0, 0)
        self._limit = seen.nbytes if to_the_end and seen else stop
        ranged = {} if byte_range is None else {"Range": f"bytes={start}-{'' if to_the_end else stop - 1}"}
        self._headers = {**ranged, **(seen.condition if seen else {})}
        self.stop = stop
        self.code = ""

    def __enter__(self) -> RangeExchange:
        for _ in range(_MAX_REDIRECTS + 1):
            self._url = self._origin.url()
            self._send()
            location = self.reply.headers.get("location") if self.reply.status in _REDIRECTS else None
            if location is None:
                if self.reply.status >= 300:
                    self._read_code()
                return self
            self._read_code()
            self._pool.put(self._url, self._connection, self.reply)
            why_not = self._origin.moved(self._url, location)
            if why_not:
                raise SourceUnavailable(why_not, uri=self._uri)
        raise SourceUnavailable(f"the server sent more than {_MAX_REDIRECTS} redirects", uri=self._uri)

    def _read_code(self) -> None:
        """Read a refusal's short body to get its error code, and so that the connection can be reused."""
        try:
            body = self.reply.read_some(_ERROR_BODY_BYTES, wait_s=_ERROR_BODY_S)
        except BaseException:
            # `__exit__` is not called after an exception here.
            self._connection.close()
            raise
        code = re.search(rb"<Code>([A-Za-z]{1,64})</Code>", body)
        self.code = code[1].decode() if code else ""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.put(self._url, self._connection, None if kind else self.reply)

    def _send(self) -> None:
        """Send the request. Retry once if the request used an idle connection that the server had closed."""
        headers = {**self._headers, **self._origin.headers(self._url)}
        for fresh in (False, True):
            with _typed_errors(self._uri):
                is_redirected = self._origin.is_redirected(self._url)
                self._connection = self._pool.get(self._url, fresh=fresh, is_redirected=is_redirected)
            was_used = self._connection.was_used
            try:
                with _typed_errors(self._uri):
                    self.reply = self._connection.get(self._url, headers)
                return
            except BaseException as error:
                self._connection.close()
                is_stale = isinstance(error, RequestFailed) and isinstance(
                    error.cause, ConnectionError | MalformedMessage
                )
                if fresh or not was_used or not is_stale:
                    raise

    def refused(self) -> bool:
        """Return whether the request was refused but may succeed with a new URL, and discard the old URL if so."""
        return self.reply.status in {400, 401, 403, 404, 410} and self._origin.renew(self._url, self.reply.status)

    def check(self) -> None:
        """Raise an error unless the response has bytes in the requested range of the object first seen. Set `stop`."""
        status, headers = self.reply.status, self.reply.headers
        start, stop = self._range
        if status not in {200, 206}:
            raise self._error()
        self._require_plain()
        if self._seen is None:
            return
        differs = self._seen.differs(headers)
        if differs:
            raise self._changed(differs)
        # A server that ignores `Range` responds 200 with the whole object, which contains a range at its start.
        if status == 200:
            if self.reply.length not in {None, self._seen.nbytes}:
                raise self._changed(f"the object's size changed from {self._seen.nbytes} to {self.reply.length} bytes")
            if start:
                raise self._protocol("the server ignores Range and would send the whole object")
            return
        first, last, total = self._content_range()
        if total not in {None, self._seen.nbytes}:
            raise self._changed(f"the object's size changed from {self._seen.nbytes} to {total} bytes")
        if first != start or not start <= last < self._limit:
            raise self._protocol(f"the response has bytes {first}-{last} instead of bytes {start}-{self._limit - 1}")
        if self.reply.length not in {None, last + 1 - first}:
            raise self._protocol(f"the response has {self.reply.length} bytes instead of {last + 1 - first}")
        self.stop = min(last + 1, stop)

    def first_seen(self) -> Validators:
        """Return the object's validators and size from the first response. Raises like `check`."""
        headers = self.reply.headers
        nbytes: int | None
        if self.reply.status == 416 and headers.get("content-range", "").replace(" ", "") == "bytes*/0":
            nbytes = 0
        else:
            self.check()
            nbytes = self._content_range()[2] if self.reply.status == 206 else self.reply.length
        if nbytes is None:
            raise self._protocol("the server does not send the object's size")
        return Validators(etag=headers.get("etag", ""), last_modified=headers.get("last-modified", ""), nbytes=nbytes)

    def read_whole(self, limit: int) -> bytes:
        """Return the body of a response. Raises like `check`, and FormatError if the body exceeds `limit` bytes."""
        if self.reply.status not in {200, 206}:
            raise self._error()
        self._require_plain()
        with _typed_errors(self._uri):
            try:
                return self.reply.read(limit)
            except TooLong as error:
                raise FormatError(error.message, uri=self._uri) from error

    def _require_plain(self) -> None:
        coding = self.reply.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise FormatError(
                f"the object is stored or sent with Content-Encoding {coding[:40]!r}",
                uri=self._uri,
                hint="store the object without encoding, because weights are read in ranges",
            )

    def readinto(self, view: memoryview) -> int:
        """Receive at least one byte into `view` and return the byte count. Raises RequestFailed if no byte arrives."""
        with _typed_errors(self._uri):
            received = self.reply.readinto(view)
        if not received:
            raise RequestFailed("the connection was closed before the end of the response")
        return received

    def _content_range(self) -> tuple[int, int, int | None]:
        text = self.reply.headers.get("content-range", "")
        match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", text.strip())
        if not match:
            raise self._protocol(f"the response has the invalid Content-Range {text[:80]!r}")
        return int(match[1]), int(match[2]), None if match[3] == "*" else int(match[3])

    def _changed(self, how: str) -> SourceChanged:
        return SourceChanged(how, uri=self._uri, byte_range=self._range, hint="load again to read the new object")

    def _protocol(self, what: str) -> SourceUnavailable:
        return SourceUnavailable(what, uri=self._uri, byte_range=self._range, hint="the server or a proxy is at fault")

    def _error(self) -> Exception:
        """Return the error for the status, which is `RequestFailed` if another attempt may help."""
        status = self.reply.status
        if status == 407:
            return wrong_proxy_user()
        what = f"HTTP {status}" + (f" {self.code}" if self.code else "")
        uri, byte_range = self._uri, self._range if self._seen else None
        if status in _RETRIED:
            return RequestFailed(what, wait_s=_seconds_of(self.reply.headers.get("retry-after", "")))
        if status in {401, 403} or (status == 400 and self.code in _CREDENTIAL_CODES):
            hint = "check the credentials and their permissions"
            return PermissionDenied(what, uri=uri, byte_range=byte_range, hint=hint)
        if status in {404, 410}:
            return NotFound(what, uri=uri, byte_range=byte_range)
        if status == 412:
            return self._changed("the object has changed since it was opened (HTTP 412)")
        if status == 416:
            total = re.fullmatch(r"bytes \*/(\d{1,18})", self.reply.headers.get("content-range", ""))
            if self._seen and total and int(total[1]) != self._seen.nbytes:
                return self._changed(f"the object's size changed from {self._seen.nbytes} to {total[1]} bytes")
            return SourceTruncated(what, uri=uri, byte_range=byte_range)
        region = self.reply.headers.get("x-amz-bucket-region", "")
        wrong_region = f"the bucket is in region {region[:40]}: set AWS_REGION" if region else None
        return SourceUnavailable(what, uri=uri, byte_range=byte_range, hint=wrong_region)


def _seconds_of(after: str) -> float | None:
    """Return the seconds that a `Retry-After` header states as a number or a date, or None if it is invalid."""
    if re.fullmatch(r"\d{1,9}", after):
        return float(after)
    try:
        return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


@contextlib.contextmanager
def _typed_errors(uri: str) -> Iterator[None]:
    """Map socket, TLS and parser errors to typed errors, or to `RequestFailed`."""
    try:
        yield
    except MalformedMessage as error:
        # This FormatError is about one response. The next response may be valid.
        raise RequestFailed(error.message[:200], cause=error) from error
    except PenstockError:
        # NotFound and PermissionDenied are also OSErrors.
        raise
    except ssl.SSLCertVerificationError as error:
        message = f"the server's certificate cannot be verified: {error.verify_message}"
        raise SourceUnavailable(message, uri=uri, hint=CERTIFICATE_HINT) from error
    except OSError as error:
        if is_of_handler(error):
            raise
        if isinstance(error, TimeoutError | BlockingIOError):
            raise RequestFailed("the request timed out", silent=True, cause=error) from error
        raise RequestFailed(f"{type(error).__name__}: {error}"[:200], cause=error) from error
