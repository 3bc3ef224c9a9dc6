"""The hub's audit log: to stderr or files of bounded size, with a rate limit for each caller.

In: records of the logger `penstock.audit`. Out: lines; for suppressed lines one line with their number.
Not here: the events (`app`, `grants`, `directory`).
"""

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
"""Caller of the request that is being answered: `Caller.name`, or `stranger`."""
STRANGER = "stranger"
"""All callers that show no token of this hub's: they share one rate. The network of each has a smaller one."""
LINES_PER_S, LINES_AT_ONCE = 100.0, 10_000
"""Rate and burst of one caller. 1,000 members that start together are issued 4,000 grants within seconds; a caller that
is refused in a loop writes 15 KB a second at most, and takes 6 hours to fill the files."""
STRANGER_LINES_PER_S, STRANGER_LINES_AT_ONCE = 10.0, 1_000
"""The same for the network of a stranger, so that one address does not use up the rate of all strangers."""
FILE_BYTES, NUM_OLD_FILES = 64 << 20, 4
"""Size at which a new file is started, and the number of old files that stay: 320 MiB in all."""
_FORMAT = "%(asctime)s %(name)s %(message)s"


def stranger(address: str) -> str:
    """Return the name of a caller that shows no token of this hub's, by its address."""
    return f"{STRANGER} {network_of(address)}"


class LimitedHandler(logging.Handler):
    """A handler that passes records on to another one, at a bounded rate for each caller.

    Args:
        inner: receives the records; closed together with this handler.
    """

    def __init__(self, inner: logging.Handler) -> None:
        super().__init__()
        self._inner = inner
        inner.setFormatter(logging.Formatter(_FORMAT))
        self._limit = RateLimit(LINES_PER_S, LINES_AT_ONCE)
        self._stranger_limit = RateLimit(STRANGER_LINES_PER_S, STRANGER_LINES_AT_ONCE)
        self._counting = threading.Lock()
        # Caller -> its lines that were suppressed since the last one that was not.
        self._left_out = Counter[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it if its caller's rate is exhausted."""
        # By caller, so that one that is refused in a loop cannot push the lines of the others out of the files.
        caller, is_allowed = CALLER.get(), True
        if caller.startswith(STRANGER):
            is_allowed, caller = self._stranger_limit.allow(caller), STRANGER
        if not (is_allowed and self._limit.allow(caller)):
            with self._counting:
                self._left_out[caller] += 1
            return
        with self._counting:
            count = self._left_out.pop(caller, 0)
        # Written outside the lock: a slow disk must not hold up the threads that only count.
        if count:
            self._report_left_out(caller, count)
        self._inner.handle(record)

    def _report_left_out(self, caller: str, count: int) -> None:
        """Write the number of a caller's suppressed lines."""
        # Made here and not logged: a record by the logger would come back to this handler, and count as a line.
        message = f"event=left_out caller={caller} lines={count}"
        self._inner.handle(logging.LogRecord("penstock.audit", logging.WARNING, __file__, 0, message, None, None))

    def close(self) -> None:
        """See logging. Writes the number of lines that were left out last."""
        with self._counting:
            left_out, self._left_out = self._left_out, Counter[str]()
        for caller, count in left_out.items():
            self._report_left_out(caller, count)
        self._inner.close()
        super().close()


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """Files that only their user reads: lines name models and members."""

    def _open(self) -> TextIOWrapper:
        # With its mode at once: between an open and a chmod others could open it.
        descriptor = os.open(self.baseFilename, os.O_APPEND | os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8")


def audit_handler(path: Path | None) -> LimitedHandler:
    """Return a handler that appends to a file, or with None writes to stderr.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        return LimitedHandler(logging.StreamHandler())
    try:
        return LimitedHandler(_PrivateFile(path, maxBytes=FILE_BYTES, backupCount=NUM_OLD_FILES))
    except OSError as error:
        hint = "a file in a directory that the hub's user can write to"
        raise ConfigError(f"the audit cannot be written to {path}: {error}", hint=hint) from error
