"""The hub's audit log, to stderr or to files of bounded size, with a rate limit for each caller."""

from __future__ import annotations

import contextvars
import logging
import logging.handlers
import os
import threading
from collections import Counter
from io import TextIOWrapper
from pathlib import Path

from penstock.errors import ConfigError
from penstock.hub.auth import RateLimit
from penstock.net.admission import network_of

CALLER: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="hub")
"""`Caller.name` of the current request's caller, or the name from `stranger`."""
STRANGER = "stranger"
"""The shared name of all callers without a valid token. They share one rate, and each network has a lower rate."""
LINES_PER_S, LINES_AT_ONCE = 100.0, 10_000
"""Rate and burst for one caller. 1,000 members that start together receive 4,000 grants within seconds. A caller that
is refused in a loop causes at most 15 KB a second, and takes 6 hours to fill the files."""
STRANGER_LINES_PER_S, STRANGER_LINES_AT_ONCE = 10.0, 1_000
"""Rate and burst for one network of strangers, so that one address does not use up the rate of all strangers."""
FILE_BYTES, NUM_OLD_FILES = 64 << 20, 4
"""Size at which a new file is started, and the number of old files to keep. The total size is 320 MiB."""
_FORMAT = "%(asctime)s %(name)s %(message)s"


def stranger(address: str) -> str:
    """Return a name, derived from the address, for a caller without a valid token."""
    return f"{STRANGER} {network_of(address)}"


class LimitedHandler(logging.Handler):
    """A handler that passes records to an inner handler, which it owns, with a rate limit for each caller."""

    def __init__(self, inner: logging.Handler) -> None:
        super().__init__()
        self._inner = inner
        inner.setFormatter(logging.Formatter(_FORMAT))
        self._limit = RateLimit(LINES_PER_S, LINES_AT_ONCE)
        self._stranger_limit = RateLimit(STRANGER_LINES_PER_S, STRANGER_LINES_AT_ONCE)
        self._counting = threading.Lock()
        # For each caller, the number of lines suppressed since its last written line.
        self._left_out = Counter[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it if its caller's rate is exhausted."""
        # A caller that is refused in a loop must not displace the lines of other callers from the files.
        caller, is_allowed = CALLER.get(), True
        if caller.startswith(STRANGER):
            is_allowed, caller = self._stranger_limit.allow(caller), STRANGER
        if not (is_allowed and self._limit.allow(caller)):
            with self._counting:
                self._left_out[caller] += 1
            return
        with self._counting:
            count = self._left_out.pop(caller, 0)
        # A slow disk must not block threads that only count lines, so write without holding the lock.
        if count:
            self._report_left_out(caller, count)
        self._inner.handle(record)

    def _report_left_out(self, caller: str, count: int) -> None:
        # Bypass the logger, which would return this record to the handler and count it as a line.
        message = f"event=left_out caller={caller} lines={count}"
        self._inner.handle(logging.LogRecord("penstock.audit", logging.WARNING, __file__, 0, message, None, None))

    def close(self) -> None:
        """Write the numbers of suppressed lines, and close the inner handler."""
        with self._counting:
            left_out, self._left_out = self._left_out, Counter[str]()
        for caller, count in left_out.items():
            self._report_left_out(caller, count)
        self._inner.close()
        super().close()


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """A log file that only its user can read, because lines name models and members."""

    def _open(self) -> TextIOWrapper:
        # Set the mode at creation. Between an open and a chmod other users could open the file.
        descriptor = os.open(self.baseFilename, os.O_APPEND | os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8")


def audit_handler(path: Path | None) -> LimitedHandler:
    """Return a handler that writes to `path`, or to stderr if None. Raise ConfigError if the file is not writable."""
    if path is None:
        return LimitedHandler(logging.StreamHandler())
    try:
        return LimitedHandler(_PrivateFile(path, maxBytes=FILE_BYTES, backupCount=NUM_OLD_FILES))
    except OSError as error:
        hint = "choose a file in a directory to which the hub's user can write"
        raise ConfigError(f"cannot write the audit log to {path}: {error}", hint=hint) from error
