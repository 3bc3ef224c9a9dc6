"""Writing to local file systems: typed errors, whole files, and directories that a failure removes.

In: paths and bytes. Out: files that appear complete or not at all, or DiskFull and DestinationError.
Not here: which places may be written (`place`), sets of files (`output`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from penstock.descriptors import SHORTAGES, exhausted
from penstock.errors import DestinationError, DiskFull, PenstockError
from penstock.report import bytes_text

MAKE_ROOM = "make room there, or write to another disk"
"""The hint for a full disk."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# A name has at most 255 bytes on Linux. The name of a temporary file is longer than that of the file.
_MAX_NAME_BYTES = 180


@contextlib.contextmanager
def typed(path: Path, *, needed: int | None = None) -> Iterator[None]:
    """Map an OSError of the file system that is written to, to DiskFull or DestinationError.

    Args:
        needed: size of all that is written, for the message.
    """
    try:
        yield
    except PenstockError:
        # Errors about what is read meanwhile: NotFound and PermissionDenied are OSErrors too.
        raise
    except OSError as error:
        if error.errno in SHORTAGES:
            raise exhausted(error, str(path)) from error
        if error.errno not in _FULL:
            raise DestinationError(f"cannot write: {error.strerror}", uri=str(path)) from error
        facts = [] if needed is None else [f"{bytes_text(needed)} are needed in all"]
        # Where a quota or a limit of the process is reached, the free bytes are no help.
        if error.errno == errno.ENOSPC and (free := free_bytes(path)) is not None:
            facts.append(f"{bytes_text(free)} are free")
        message = f"cannot write: {error.strerror}" + (f"; {', '.join(facts)}" if facts else "")
        raise DiskFull(message, uri=str(path), hint=MAKE_ROOM) from error


def free_bytes(path: Path) -> int | None:
    """Return the bytes that this user may still write to the file system of a path; None: it does not say."""
    while not path.exists() and path != path.parent:
        path = path.parent
    # Some network and FUSE file systems report no size at all.
    with contextlib.suppress(OSError):
        state = os.statvfs(path)
        return state.f_bavail * state.f_frsize if state.f_blocks else None
    return None


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[None]:
    """Make a directory and its parents for the block; remove those that are new and empty if it raises.

    Raises:
        DestinationError, DiskFull: they cannot be made.
    """
    with typed(path):
        new = [directory for directory in (path, *path.parents) if not directory.exists()]
    try:
        with typed(path):
            path.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        remove_empty(new)
        raise


def remove_empty(directories: Iterable[Path]) -> None:
    """Remove those of some new directories that are empty, the innermost first."""
    for directory in directories:
        # Another process may have put a file there meanwhile, and some may not have been made.
        with contextlib.suppress(OSError):
            directory.rmdir()


@contextlib.contextmanager
def new_file(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a file that takes the name `path` at the end of the block, complete and synced.

    Its name until then is random and new, so that a link which another user planted is neither followed nor replaced.

    Raises:
        DestinationError, DiskFull: it cannot be written; what was at `path` is still there.
    """
    new = path.with_name(f".{short_name(path)}.{secrets.token_hex(8)}")
    with typed(path):
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                yield file
                file.flush()
                os.fchmod(fd, mode)
                # Before the rename: after a power cut the name could else stand for an empty file.
                os.fsync(fd)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)


def short_name(path: Path) -> str:
    """Return the name of a path, or a digest of it where longer names made from it would be too long."""
    raw = os.fsencode(path.name)
    return path.name if len(raw) <= _MAX_NAME_BYTES else hashlib.blake2b(raw, digest_size=16).hexdigest()
