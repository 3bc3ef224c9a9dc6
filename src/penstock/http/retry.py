"""Patience with a remote source: retries with back-off, counted by progress, never by total time.

In: failures and bytes received. Out: a pause, or the typed error that ends the wait.
Not here: what counts as a failure (`storage.http`, `storage.objects`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from penstock.config import Settings
from penstock.errors import SourceStalled, SourceUnavailable

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
        self.count, self.last_s = 0, 0.0


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
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._uri = uri
        self._retries = settings.retries
        self._stall_s = settings.stall_s
        self._clock = clock
        self._sleep = sleep
        self._arrivals = Arrivals() if arrivals is None else arrivals
        self._num_seen = self._arrivals.count
        self._failures = self._num_pauses = 0
        self._last_byte_s = clock()

    def progress(self) -> None:
        """Note that bytes arrived: failures and silence count from here."""
        self._failures = self._num_pauses = 0
        self._last_byte_s = self._arrivals.last_s = self._clock()
        self._arrivals.count += 1
        self._num_seen = self._arrivals.count

    def failed(
        self,
        why: str,
        *,
        byte_range: tuple[int, int],
        silent: bool = False,
        wait_s: float | None = None,
        cause: Exception | None,
    ) -> None:
        """Pause before the next attempt.

        Args:
            why: one sentence for the error.
            byte_range: what is still missing, `[start, stop)`.
            silent: the failure was a timeout.
            wait_s: seconds that the server asked for. Such an answer is no failure: the request is repeated until
                `stall_s` have passed without a byte of the source.
            cause: the library's error, chained.

        Raises:
            SourceStalled: silence for `stall_s`, or too many timeouts in a row.
            SourceUnavailable: too many failures in a row, or nothing but requests to wait for `stall_s`.
        """
        # Bytes of other ranges prove that the source works: only failures since then count.
        if self._arrivals.count != self._num_seen:
            self._num_seen, self._failures = self._arrivals.count, 0
        self._failures += wait_s is None
        self._num_pauses += 1
        now_s = self._clock()
        silent_s = now_s - self._last_byte_s
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
            left_s = self._stall_s - (now_s - max(self._last_byte_s, self._arrivals.last_s))
            if left_s <= 0:
                message = f"the server asked to wait for {self._stall_s:.1f} s and sent no byte ({why})"
                hint = "raise stall_s to wait longer"
                raise SourceUnavailable(message, uri=self._uri, byte_range=byte_range, hint=hint) from cause
            pause_s = min(max(pause_s, wait_s), left_s)
        self._sleep(pause_s)
