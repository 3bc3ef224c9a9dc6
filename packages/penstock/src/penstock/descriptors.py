"""Raises the soft limit on open file descriptors.

The limit is raised only on demand, because a program that calls select(2) cannot use descriptors above 1,023. The
raised limit applies until the process exits.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from typing import TypeVar

from penstock.errors import ConfigError

T = TypeVar("T")

_UNLIMITED = 1 << 30
# The soft limit is raised to at least this number. No load uses more, and a subprocess that closes every possible
# descriptor still starts quickly.
_ROOM = 1 << 16
# Descriptors for sockets, pipes and libraries, in addition to the files of a load.
_SPARE = 64
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE})
# The largest number of descriptors that any call has needed. A later error suggests this number as the limit.
_needed = 0


def limit() -> int:
    """Return the soft limit on this process's open file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_limit(needed: int | None = None) -> int:
    """Raise the soft limit, at most to the hard limit, and return the new soft limit.

    The soft limit is unchanged if it allows `needed` descriptors, and becomes the hard limit if `needed` is None.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or (needed is not None and soft >= needed):
        return limit()
    most = _UNLIMITED if hard == resource.RLIM_INFINITY else hard
    wanted = most if needed is None else min(most, max(needed, _ROOM))
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if needed is None else wanted, hard))
    return limit()


def make_room(count: int) -> None:
    """Raise the soft limit if it may be too low for `count` more descriptors.

    A hard limit that is too low raises no error here, because fewer descriptors may suffice.
    """
    global _needed
    # Most loads have few files, so skip the count of open descriptors for them.
    if count > limit() // 4:
        _needed = max(_needed, _open_now() + count + _SPARE)
        raise_limit(_needed)


def opened(call: Callable[[], T], uri: str | None = None) -> T:
    """Call a function that opens a file or a URL. If no descriptor is free, raise the limit and call again.

    Raises ConfigError if the hard limit is reached. Other errors from the call are raised unchanged.
    """
    try:
        return retried(call)
    except OSError as error:
        if error.errno not in SHORTAGES:
            raise
        raise exhausted(error, uri) from error


def retried(call: Callable[[], T]) -> T:
    """Call a function that opens a file, as `opened` does, but raise OSError if the hard limit is reached."""
    try:
        return call()
    except OSError as error:
        before = limit()
        if error.errno != errno.EMFILE or raise_limit(max(_needed, 2 * before)) <= before:
            raise
    return retried(call)


def exhausted(error: OSError, uri: str | None = None) -> ConfigError:
    """Return the ConfigError for an OSError about exhausted file descriptors."""
    if error.errno == errno.ENFILE:
        hint = "raise fs.file-max, or end programs that have many open files"
        return ConfigError("this host has no free file descriptors", uri=uri, hint=hint)
    allowed = limit()
    enough = max(_needed, 2 * allowed)
    return ConfigError(
        f"this process has reached its limit of {allowed} open files",
        uri=uri,
        hint=f"allow {enough} open files: `ulimit -n {enough}`, LimitNOFILE= of systemd, --ulimit of a container",
    )


def hint_of(error: BaseException) -> str | None:
    """Return the hint for an OSError about exhausted file descriptors, or None for another error."""
    return exhausted(error).hint if isinstance(error, OSError) and error.errno in SHORTAGES else None


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        # /proc is not mounted.
        return _SPARE
