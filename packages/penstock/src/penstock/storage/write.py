"""Write to local file systems with typed errors and without partial files."""

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

MAKE_ROOM = "free some space there, or write to another disk"
"""The hint for a full disk."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# A name may have at most 255 bytes on Linux, and a temporary file has a longer name than the final file.
_MAX_NAME_BYTES = 180


@contextlib.contextmanager
def typed(path: Path, *, needed: int | None = None) -> Iterator[None]:
    """Map an OSError from a write to DiskFull or DestinationError.

    Args:
        path: the file or directory, for the message.
        needed: total size of the output in bytes, for the message.
    """
    try:
        yield
    except PenstockError:
        # NotFound and PermissionDenied from reads are also OSErrors.
        raise
    except OSError as error:
        if error.errno in SHORTAGES:
            raise exhausted(error, str(path)) from error
        if error.errno not in _FULL:
            raise DestinationError(f"cannot write: {error.strerror}", uri=str(path)) from error
        facts = [] if needed is None else [f"{bytes_text(needed)} needed in total"]
        # If a quota or a limit of the process is reached, do not report the free space.
        if error.errno == errno.ENOSPC and (free := free_bytes(path)) is not None:
            facts.append(f"{bytes_text(free)} free")
        message = f"cannot write: {error.strerror}" + (f"; {', '.join(facts)}" if facts else "")
        raise DiskFull(message, uri=str(path), hint=MAKE_ROOM) from error


def free_bytes(path: Path) -> int | None:
    """Return how many bytes this user may write to the file system at a path, or None if unknown."""
    while not path.exists() and path != path.parent:
        path = path.parent
    with contextlib.suppress(OSError):
        state = os.statvfs(path)
        return state.f_bavail * state.f_frsize if state.f_blocks else None
    return None


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[None]:
    """Create a directory and its parents. If the `with` block raises, remove the new directories that are empty.

    Raises DestinationError or DiskFull if a directory cannot be made.
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
    """Remove each of the given directories if it is empty. The caller passes inner directories first."""
    for directory in directories:
        # Another process may have added a file.
        with contextlib.suppress(OSError):
            directory.rmdir()


@contextlib.contextmanager
def new_file(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a new file that is synced and renamed to `path` at the end of the block.

    During the block the file has a random name, so that another user's symlink is neither followed nor replaced.
    """
    new = path.with_name(f".{short_name(path)}.{secrets.token_hex(8)}")
    with typed(path):
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                yield file
                file.flush()
                os.fchmod(fd, mode)
                # Sync before the rename, so that the name cannot refer to an empty file after a power loss.
                os.fsync(fd)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)


def short_name(path: Path) -> str:
    """Return the name of a path, or a digest of the name if a name derived from it would be too long."""
    raw = os.fsencode(path.name)
    return path.name if len(raw) <= _MAX_NAME_BYTES else hashlib.blake2b(raw, digest_size=16).hexdigest()
