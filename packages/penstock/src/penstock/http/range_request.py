"""Ranged, conditional requests for objects: one exchange, checked against the object first seen, and patience between.

In: an `Origin` (where the object is now), a range, the validators first seen. Out: bytes, or a typed error.
Not here: connections (`pool`), the loop over the attempts (`storage.http`, `storage.objects`), signing
(`storage.objects`).

    Exchange --checked--> bytes
             `--Failed--> Patience --pause--> another Exchange
                                   `--too many, too long--> SourceUnavailable, SourceStalled

What another attempt may cure is `RequestFailed`; everything else is an error at once. `Patience` counts failures and
silence since the last byte, never total time: a slow source is not a broken one.
"""

from __future__ import annotations

import contextlib
import random
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Protocol, TypedDict
from urllib.parse import SplitResult

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
"""Requests of this process that failed, or were refused for now, and were sent again."""

_FIRST_PAUSE_S = 0.1
"""Seconds before the first retry. Source: the default `init_backoff` of obstore's RetryConfig."""

_LONGEST_PAUSE_S = 5.0
"""Seconds one pause may last. Reason: five retries reach 1.6 s; this bounds larger counts."""

ATTEMPTS_PER_STALL = 3
"""A silent connection is replaced after `stall_s` over this, so that one bad connection is not yet a stalled source."""


class Arrivals:
    """The arrivals from a source, counted over all its readers: a source that serves others is alive.

    Attributes:
        count: answers that brought bytes.
        last_s: when the last of them did, by the readers' clock.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last_s = 0.0


class Patience:
    """The patience left with one range of one source; a received byte restores it whole.

    Failures are forgotten when bytes of the source's other ranges arrive: with many requests under way, a server that
    refuses every second one refuses the same range several times in a row. Silence is counted for the range alone.

    Args:
        uri: the source, for the error.
        settings: `retries` failures, or `stall_s` seconds of silence, without a byte between them are too many.
        arrivals: of all ranges of the source; None: there is only this one.
        clock, sleep: seconds; replaced in tests.
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
        """Note that bytes arrived: failures and silence count from here."""
        self._failures = 0
        self._num_pauses = 0
        self._last_byte_s = self._arrivals.last_s = self._clock()
        self._arrivals.count += 1
        self._num_seen = self._arrivals.count

    def failed(
        self,
        why: str,
        *,
        byte_range: tuple[int, int] | None,
        silent: bool = False,
        wait_s: float | None = None,
        cause: Exception | None,
    ) -> None:
        """Pause before the next attempt.

        Args:
            why: one sentence for the error.
            byte_range: what is still missing, `[start, stop)`; None for a question that is not about a range.
            silent: the failure was a timeout.
            wait_s: seconds that the server asked for. Such an answer is no failure: the request is repeated until
                `stall_s` have passed without a byte of the source.
            cause: the library's error, chained.

        Raises:
            SourceStalled: silence for `stall_s`, or too many timeouts in a row.
            SourceUnavailable: too many failures in a row, or nothing but requests to wait for `stall_s`.
            Cancelled, KeyboardInterrupt: the call was left, see `waits`.
        """
        # A connection that was cut because the call was left is no failure of the source.
        waits.require_wanted()
        # Bytes of other ranges prove that the source works: only failures since then count.
        if self._arrivals.count != self._num_seen:
            self._num_seen, self._failures = self._arrivals.count, 0
        self._failures += wait_s is None
        self._num_pauses += 1
        now_s = self._clock()
        silent_s = now_s - self._last_byte_s
        # 0.99: three silent attempts of a third of `stall_s` each may end a little before it.
        if silent and (silent_s >= 0.99 * self._stall_s or self._failures > self._retries):
            raise SourceStalled(
                f"no byte for {silent_s:.1f} s ({why})",
                uri=self._uri,
                byte_range=byte_range,
                hint="raise stall_s if the source is only slow",
            ) from cause
        if self._failures > self._retries:
            raise SourceUnavailable(
                f"{self._failures} attempts without progress, the last: {why}", uri=self._uri, byte_range=byte_range
            ) from cause
        # With jitter: ranges that failed together would otherwise all come back at the same moment.
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._num_pauses - 1, 10)) * random.uniform(0.5, 1.0)
        if wait_s is not None:
            # By the source's last byte, not this range's: a server that limits requests serves them in turns.
            left_s = self._stall_s - (now_s - max(self._last_byte_s, self._arrivals.last_s))
            if left_s <= 0:
                message = f"the server asked to wait for {self._stall_s:.1f} s and sent no byte ({why})"
                hint = "raise stall_s to wait longer"
                raise SourceUnavailable(message, uri=self._uri, byte_range=byte_range, hint=hint) from cause
            pause_s = min(max(pause_s, wait_s), left_s)
        retried_requests.add()
        self._sleep(pause_s)


_MAX_REDIRECTS = 5
"""Redirects followed for one range. Reason: model hubs need 1 or 2, and a circle should end soon."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})

_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers worth another attempt. Source: RFC 9110 15.5.9, 15.6; RFC 6585 4; RFC 8470; the S3 API's errors."""

_CREDENTIAL_CODES = frozenset({"ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "AuthorizationHeaderMalformed"})
"""Codes of HTTP 400 that mean the credentials are wrong. Source: the S3 API's list of error responses."""

_ERROR_BODY_BYTES = 16 << 10
"""Bytes of an error's body read to find its code. Reason: S3's are under 1 KiB; nothing larger is worth waiting for."""

_ERROR_BODY_S = 2.0
"""Seconds for all of an error's body. Reason: its status is known already, and it comes in the packet of its head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validators:
    """The headers that tell one state of an object from another."""

    etag: str = ""
    """As sent, with its quotes and weakness mark."""
    last_modified: str = ""
    """HTTP date."""
    nbytes: int

    @property
    def condition(self) -> dict[str, str]:
        """The header that makes a request fail (412) if the object is another one."""
        if self.etag and not self.etag.startswith("W/"):
            return {"If-Match": self.etag}
        return {"If-Unmodified-Since": self.last_modified} if self.last_modified else {}

    @property
    def identity(self) -> str:
        """The ETag, or else the date; "" where the server gave neither."""
        return self.etag or self.last_modified

    def differs(self, headers: Mapping[str, str]) -> str | None:
        """Return the difference in an answer's headers that shows another object; None if there is none."""
        etag, modified = headers.get("etag", ""), headers.get("last-modified", "")
        if self.etag and etag:
            same = etag.removeprefix("W/") == self.etag.removeprefix("W/")
            return None if same else f"its ETag was {self.etag} and is {etag}"
        if self.last_modified and modified:
            same = modified == self.last_modified
            return None if same else f"it was last modified {self.last_modified} and now {modified}"
        return "the answer carries neither ETag nor Last-Modified any more" if self.identity else None


class Origin(Protocol):
    """An object's current URL, and its headers."""

    def url(self) -> SplitResult:
        """The URL to read from, signed or redirected as need be."""
        ...

    def headers(self, url: SplitResult) -> Mapping[str, str]:
        """Return the headers for `url` besides range and condition."""
        ...

    def renew(self, url: SplitResult, status: int) -> bool:
        """Forget `url`, which was refused with `status`; return False if another one cannot help."""
        ...

    def moved(self, url: SplitResult, location: str) -> str | None:
        """Follow a redirect from `url`; return None, or the reason why it is not followed."""
        ...

    def is_foreign(self, url: SplitResult) -> bool:
        """Return whether a server chose the host of `url`, by a redirect, and not the user."""
        ...


class RequestFailed(Exception):
    """An attempt that ended early; another one may succeed. See `Patience.failed` for the attributes."""

    def __init__(
        self, why: str, *, silent: bool = False, wait_s: float | None = None, cause: Exception | None = None
    ) -> None:
        super().__init__(why)
        self.why = why
        self.silent = silent
        self.wait_s = wait_s
        self.cause = cause

    def ask(self, patience: Patience, byte_range: tuple[int, int] | None) -> None:
        """Pause before another attempt, or raise as `Patience.failed`."""
        patience.failed(self.why, byte_range=byte_range, silent=self.silent, wait_s=self.wait_s, cause=self.cause)


class RangeExchange:
    """A request and its answer, redirects followed; a context manager that returns the connection.

    Args:
        uri: the object's name in errors.
        address: where it is.
        pool: connections.
        byte_range: wanted, `[start, stop)`; None: a question, whose answer is read by `read_whole`.
        seen: the validators of the first answer; None: this is the first request.
        to_the_end: request all bytes from `start` on; no more than the range is read of the answer.

    Attributes:
        reply: the answer, after the block was entered.
        stop: end of the bytes in the answer, after `check`; less than the range's where the server shortened it.
        code: the error code in a refusal's body; empty if there is none.
    """

    reply: HttpReply
    _connection: PooledConnection

    def __init__(
        self,
        uri: str,
        address: Origin,
        pool: Pool,
        *,
        byte_range: tuple[int, int] | None,
        seen: Validators | None,
        to_the_end: bool = False,
    ) -> None:
        self._uri = uri
        self._address = address
        self._pool = pool
        self._seen = seen
        self._range = start, stop = byte_range or (0, 0)
        self._limit = seen.nbytes if to_the_end and seen else stop
        wanted = {} if byte_range is None else {"Range": f"bytes={start}-{'' if to_the_end else stop - 1}"}
        self._headers = {**wanted, **(seen.condition if seen else {})}
        self.stop = stop
        self.code = ""

    def __enter__(self) -> RangeExchange:
        for _ in range(_MAX_REDIRECTS + 1):
            self._url = self._address.url()
            self._send()
            location = self.reply.headers.get("location") if self.reply.status in _REDIRECTS else None
            if location is None:
                if self.reply.status >= 300:
                    self._read_code_or_close()
                return self
            self._read_code_or_close()
            self._pool.put(self._url, self._connection, self.reply)
            why_not = self._address.moved(self._url, location)
            if why_not:
                raise SourceUnavailable(why_not, uri=self._uri)
        raise SourceUnavailable(f"the server redirects more than {_MAX_REDIRECTS} times", uri=self._uri)

    def _read_code_or_close(self) -> None:
        """Read the code of an error; close the connection if that fails, since `__exit__` is not called then."""
        try:
            self._read_code()
        except BaseException:
            self._connection.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.put(self._url, self._connection, None if kind else self.reply)

    def _send(self) -> None:
        """Send the request; a kept-alive connection that the server closed meanwhile is replaced at once."""
        headers = {**self._headers, **self._address.headers(self._url)}
        for fresh in (False, True):
            with _failing(self._uri):
                is_foreign = self._address.is_foreign(self._url)
                self._connection = self._pool.get(self._url, fresh=fresh, is_foreign=is_foreign)
            was_used = self._connection.was_used
            try:
                with _failing(self._uri):
                    self.reply = self._connection.get(self._url, headers)
                return
            except BaseException as error:
                self._connection.close()
                # A server may close a kept connection at any moment: that says nothing of the object.
                is_stale = isinstance(error, RequestFailed) and isinstance(
                    error.cause, ConnectionError | MalformedMessage
                )
                if fresh or not was_used or not is_stale:
                    raise

    def _read_code(self) -> None:
        """Read a refusal's short body, for its code and so that the connection can be used again."""
        # A body that comes slowly or breaks off has no code. The status decides, and must not wait for the body.
        body = self.reply.read_some(_ERROR_BODY_BYTES, wait_s=_ERROR_BODY_S)
        code = re.search(rb"<Code>([A-Za-z]{1,64})</Code>", body)
        self.code = code[1].decode() if code else ""

    def refused(self) -> bool:
        """Return True for a refusal that a new URL may cure; the old URL is forgotten."""
        return self.reply.status in {400, 401, 403, 404, 410} and self._address.renew(self._url, self.reply.status)

    def check(self) -> None:
        """Raise unless the answer holds bytes of the requested range, of the object first seen; set `stop`."""
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
        # 200 is the whole object, from a server that ignores `Range`; its start is as good as a range.
        if status == 200:
            if self.reply.length not in {None, self._seen.nbytes}:
                raise self._changed(f"it had {self._seen.nbytes} bytes and has {self.reply.length}")
            if start:
                raise self._protocol("the server ignores Range and would send everything")
            return
        first, last, total = self._content_range()
        if total not in {None, self._seen.nbytes}:
            raise self._changed(f"it had {self._seen.nbytes} bytes and has {total}")
        if first != start or not start <= last < self._limit:
            raise self._protocol(f"asked for bytes {start}-{self._limit - 1}, the answer holds {first}-{last}")
        if self.reply.length not in {None, last + 1 - first}:
            raise self._protocol(f"the answer for {last + 1 - first} bytes holds {self.reply.length}")
        self.stop = min(last + 1, stop)

    def first_seen(self) -> Validators:
        """Return the object's validators and size from the first answer; raises as `check`."""
        headers = self.reply.headers
        nbytes: int | None
        if self.reply.status == 416 and headers.get("content-range", "").replace(" ", "") == "bytes*/0":
            nbytes = 0
        else:
            self.check()
            nbytes = self._content_range()[2] if self.reply.status == 206 else self.reply.length
        if nbytes is None:
            raise self._protocol("the server does not send the size")
        return Validators(etag=headers.get("etag", ""), last_modified=headers.get("last-modified", ""), nbytes=nbytes)

    def read_whole(self, limit: int) -> bytes:
        """Return the body of an answer; raises as `check`. FormatError: it has more than `limit` bytes."""
        if self.reply.status not in {200, 206}:
            raise self._error()
        self._require_plain()
        with _failing(self._uri):
            try:
                return self.reply.read(limit)
            except TooLong as error:
                raise FormatError(error.message, uri=self._uri) from error

    def _require_plain(self) -> None:
        coding = self.reply.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise FormatError(
                f"it is stored or sent with Content-Encoding {coding[:40]!r}",
                uri=self._uri,
                hint="store it as it is: weights are read in ranges",
            )

    def readinto(self, view: memoryview) -> int:
        """Receive some bytes of the body into `view`, at least one; return their number. Failed if there are none."""
        with _failing(self._uri):
            received = self.reply.readinto(view)
        if not received:
            raise RequestFailed("the connection closed before the end of the answer")
        return received

    def _content_range(self) -> tuple[int, int, int | None]:
        text = self.reply.headers.get("content-range", "")
        match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", text.strip())
        if not match:
            raise self._protocol(f"the answer's Content-Range is {text[:80]!r}")
        return int(match[1]), int(match[2]), None if match[3] == "*" else int(match[3])

    def _changed(self, how: str) -> SourceChanged:
        return SourceChanged(how, uri=self._uri, byte_range=self._range, hint="load again to read the new one")

    def _protocol(self, what: str) -> SourceUnavailable:
        return SourceUnavailable(what, uri=self._uri, byte_range=self._range, hint="the server or a proxy is at fault")

    def _error(self) -> Exception:
        """Return the error for the answer's status: one of ours, or `RequestFailed` where another attempt may help."""
        status = self.reply.status
        if status == 407:
            return wrong_proxy_user()
        what = f"HTTP {status}" + (f" {self.code}" if self.code else "")
        where: _Where = {"uri": self._uri, "byte_range": self._range if self._seen else None}
        if status in _RETRIED:
            return RequestFailed(what, wait_s=_seconds_of(self.reply.headers.get("retry-after", "")))
        if status in {401, 403} or (status == 400 and self.code in _CREDENTIAL_CODES):
            return PermissionDenied(what, **where, hint="check the credentials and what they may read")
        if status in {404, 410}:
            return NotFound(what, **where)
        if status == 412:
            return self._changed("the object is not the one first seen (HTTP 412)")
        if status == 416:
            total = re.fullmatch(r"bytes \*/(\d{1,18})", self.reply.headers.get("content-range", ""))
            if self._seen and total and int(total[1]) != self._seen.nbytes:
                return self._changed(f"it had {self._seen.nbytes} bytes and has {total[1]}")
            return SourceTruncated(what, **where)
        region = self.reply.headers.get("x-amz-bucket-region", "")
        hint = f"the bucket is in region {region[:40]}: set AWS_REGION" if region else None
        return SourceUnavailable(what, **where, hint=hint)


def _seconds_of(after: str) -> float | None:
    """Return the seconds of a `Retry-After`, a number or a date; None if it is neither."""
    if re.fullmatch(r"\d{1,9}", after):
        return float(after)
    try:
        return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


class _Where(TypedDict):
    uri: str
    byte_range: tuple[int, int] | None


@contextlib.contextmanager
def _failing(uri: str) -> Iterator[None]:
    """Map the errors of sockets, TLS and the parser to typed errors, or to `RequestFailed`."""
    try:
        yield
    except MalformedMessage as error:
        # A FormatError of one answer, not of the object: the next answer may be right.
        raise RequestFailed(error.message[:200], cause=error) from error
    except PenstockError:
        # Mapped already; NotFound and PermissionDenied are OSErrors too.
        raise
    except ssl.SSLCertVerificationError as error:
        raise SourceUnavailable(
            f"the server's certificate does not verify: {error.verify_message}",
            uri=uri,
            hint=CERTIFICATE_HINT,
        ) from error
    except OSError as error:
        if is_of_handler(error):
            raise
        if isinstance(error, TimeoutError | BlockingIOError):
            raise RequestFailed("timed out", silent=True, cause=error) from error
        raise RequestFailed(f"{type(error).__name__}: {error}"[:200], cause=error) from error
