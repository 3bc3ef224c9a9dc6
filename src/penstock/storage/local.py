"""A local file's identity, how it is opened, and the typed error for each way the system refuses it.

In: paths and descriptors. Out: open descriptors of regular files, identities, errors.
Not here: reading (`files`), mapping (`mapped`).
"""

from __future__ import annotations

import errno
import os
import stat

from penstock.errors import (
    NotFound,
    PermissionDenied,
    SourceChanged,
    SourceError,
    SourceTruncated,
    SourceUnavailable,
)


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; O_NONBLOCK so that a pipe without a writer does not hang."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise typed_error(error, path, None) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        kind = "directory" if stat.S_ISDIR(found.st_mode) else "pipe, socket or device"
        raise SourceUnavailable(f"not a regular file but a {kind}", uri=path)
    return fd, found


def identity_of(found: os.stat_result) -> str:
    """`dev:inode:mtime_ns:size`: what "changed" is judged by."""
    return f"{found.st_dev}:{found.st_ino}:{found.st_mtime_ns}:{found.st_size}"


def require_unchanged(fd: int, path: str | None, uri: str, identity: str, nbytes: int) -> None:
    """Raise if the open file, or the file now at `path` if one is given, is not the one of `identity`."""
    try:
        found = os.fstat(fd)
        now = found if path is None else os.stat(path)
    except FileNotFoundError as error:
        raise SourceChanged("file was removed since it was opened", uri=uri) from error
    except OSError as error:
        raise typed_error(error, uri, None) from error
    if found.st_size < nbytes:
        message = f"file had {nbytes} bytes when it was opened and has {found.st_size} now"
        raise SourceTruncated(message, uri=uri, byte_range=(found.st_size, nbytes))
    if identity_of(found) != identity:
        raise SourceChanged("file was modified since it was opened", uri=uri)
    if identity_of(now) != identity:
        raise SourceChanged("file was replaced since it was opened", uri=uri)


def typed_error(error: OSError, uri: str, byte_range: tuple[int, int] | None) -> SourceError:
    """The house's error for an OSError of a local file."""
    if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}:
        return NotFound("no such file", uri=uri, byte_range=byte_range)
    if error.errno in {errno.EACCES, errno.EPERM}:
        return PermissionDenied("the file mode forbids reading", uri=uri, byte_range=byte_range)
    return SourceUnavailable(f"{error.strerror or error}", uri=uri, byte_range=byte_range)
