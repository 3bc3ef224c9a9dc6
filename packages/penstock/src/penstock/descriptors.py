"""File descriptors of this process: the soft limit is raised when it is too low, and the error names the limit.

In: the number that is needed, or a call that opens something. Out: a higher limit, or a ConfigError with `ulimit -n`.
Not here: the number of connections that a listener admits (`net.admission`).

The limit is raised only when more descriptors are needed, because a program that calls select(2) cannot use those above
1,024. It stays raised for the rest of the process.
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
# Raised to this where the hard limit allows it: more than any load needs, and subprocesses that close every possible
# descriptor are still quick.
_ROOM = 1 << 16
# For sockets, pipes and libraries beside the files of a load.
_SPARE = 64
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE})
"""The errors of the system that say that no descriptor is left, for this process or for the host."""
# The most that was needed by one call, for the error of a later one.
_needed = 0


def limit() -> int:
    """Return the number of file descriptors that this process may have open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_limit(needed: int | None = None) -> int:
    """Raise the soft limit as far as the hard one allows; return the limit.

    Args:
        needed: do nothing where this many are allowed already, else go to a moderate number. None: to the hard limit.
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
    """Raise the soft limit where it may be too low for so many more descriptors.

    Nothing is raised if the hard limit is too low as well: fewer may do, and whatever opens one too many says so.
    """
    global _needed
    # Most loads have a few files: then the open descriptors need not be counted.
    if count > limit() // 4:
        _needed = max(_needed, _open_now() + count + _SPARE)
        raise_limit(_needed)


def opened(call: Callable[[], T], uri: str | None = None) -> T:
    """Return what a call opens. If no descriptor is left, raise the limit and call it again.

    Args:
        uri: what is opened, for the error.

    Raises:
        ConfigError: the hard limit is reached. Whatever else the call raises.
    """
    try:
        return retried(call)
    except OSError as error:
        if error.errno not in SHORTAGES:
            raise
        raise exhausted(error, uri) from error


def retried(call: Callable[[], T]) -> T:
    """Return what a call opens, as `opened`, but raise the OSError of the system where the hard limit is reached."""
    try:
        return call()
    except OSError as error:
        before = limit()
        if error.errno != errno.EMFILE or raise_limit(max(_needed, 2 * before)) <= before:
            raise
    return retried(call)


def exhausted(error: OSError, uri: str | None = None) -> ConfigError:
    """Return the error for an OSError that says that no file descriptor is left."""
    if error.errno == errno.ENFILE:
        hint = "raise fs.file-max, or end programs that have many files open"
        return ConfigError("this host has no file descriptor left", uri=uri, hint=hint)
    allowed = limit()
    enough = max(_needed, 2 * allowed)
    return ConfigError(
        f"this process may have {allowed} files open, and all are in use",
        uri=uri,
        hint=f"allow {enough} open files: `ulimit -n {enough}`, LimitNOFILE= of systemd, --ulimit of a container",
    )


def hint_of(error: BaseException) -> str | None:
    """Return the hint for an error of the system that says that no descriptor is left; None for other errors."""
    return exhausted(error).hint if isinstance(error, OSError) and error.errno in SHORTAGES else None


def _open_now() -> int:
    """Return the number of descriptors that are open now; a guess where /proc does not say."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return _SPARE
