"""Local places that are written to: checked before the work, and taken by one writer at a time.

In: a path that a user gave. Out: a `OutputPlace`, or an error before any work was done; a directory in which files
grow.
Not here: the files themselves (`output`), object stores (`output.require_free_remote`).

    Place.at(path)    an absolute path, through a link
      .require_free() refuses a source of the work, files of others, and what cannot be replaced
      .staging(token) a hidden directory beside the place, or in it where the place itself has to stay
      Claim(...)      makes that directory and locks it; a second writer of the place is refused
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.errors import (
    MALFORMED,
    ConfigError,
    DestinationError,
    FormatError,
    IntegrityError,
    NotFound,
    SourceError,
)
from penstock.lifecycle import Closeable, release_after_fork
from penstock.storage import is_remote, list_uris, local_path, text_of
from penstock.storage.local import read_bounded
from penstock.storage.locate import GGUF_SUFFIX, INDEX_SUFFIX, SIDECAR, SUFFIX
from penstock.storage.manifest import decode
from penstock.storage.source import MAX_SMALL_BYTES
from penstock.storage.write import remove_empty, short_name, typed
from penstock.waits import pause

STAMP = "penstock.job"
"""File in the result of a conversion that names the job and the other files that the job wrote."""
ARTIFACTS = "penstock-artifacts"
"""Name of the directory beside a model for bundles of compiled code."""
# A file system reserves this directory in its root: an empty volume has it.
_LOST = "lost+found"
_LOCK = ".penstock-lock"
# Names of the files that are being moved into a place; see `fill`.
_MOVING = ".penstock-moving"
# Longest wait for another process that checks or publishes in the same directory: it takes milliseconds.
_WAIT_S = 10.0
_LOOK_S = 0.01
_NAMED = 5
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlace:
    """A local directory that a weight set is published as."""

    path: Path
    """Absolute. A link to an empty directory was followed."""
    is_kept: bool
    """Files are moved into the directory, because another one cannot take its name: it is a mount point, the working
    directory, or in a directory that cannot be written."""

    @classmethod
    def at(cls, destination: str | os.PathLike[str]) -> OutputPlace:
        """Return the place of a path or file:// URI.

        Raises:
            ConfigError: no file can have this name. DestinationError: the place cannot be looked at.
        """
        path = _final(destination)
        with typed(path):
            # A name that is too long, and a circle of links, are errors here. `lexists` takes both for absent.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(path)
            is_kept = False
            if path.is_dir() and not path.is_symlink():
                # A directory in which an earlier call has begun to write has only files of that call.
                is_kept = bool(_kept(path)) or (any(_growing_in(path, path)) and not _entries(path))
        return cls(path=path, is_kept=is_kept)

    def require_free(self, *, replace: bool = False, sources: Iterable[str] = ()) -> None:
        """Raise unless nothing is here, or a weight set of Penstock's that `replace` allows to be replaced.

        Args:
            sources: URIs that the work reads.

        Raises:
            ConfigError: something else is here, a source is here, or what is here cannot be replaced.
            DestinationError: the place cannot be looked at.
        """
        with typed(self.path):
            require_apart(sources, self.path, replace=replace)
            require_free(self.path, replace=replace)

    def staging(self, token: str) -> Path:
        """Return the hidden directory in which the files of a writer grow."""
        return (self.path if self.is_kept else self.path.parent) / f"{_prefix(self.path)}{token}"


def _final(destination: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a destination, through a link to an empty directory."""
    path = Path(local_path(text_of(destination)))
    # `.`, `..` and `/` have no name, beside which files could grow.
    if path.name in {"", ".."}:
        return Path(os.path.realpath(path))
    path = path.absolute()
    with typed(path):
        # A link to a weight set is replaced itself, and what it leads to stays.
        if path.is_symlink() and path.is_dir() and not _entries(Path(os.path.realpath(path))):
            return Path(os.path.realpath(path))
    return path


def _prefix(path: Path) -> str:
    return f".{short_name(path)}.penstock-"


def _kept(path: Path) -> str:
    """Return why a directory has to stay, in words; "" if another one may take its name."""
    if _is_mount(path):
        return "it is a mount point"
    # The working directory may have been removed.
    with contextlib.suppress(OSError):
        if path.samefile(os.curdir):
            return "it is the working directory"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return "this user cannot write to the directory above it"
    return ""


def _is_mount(path: Path) -> bool:
    """Return whether a file system is mounted at a directory, or another directory of the same file system."""
    if os.path.ismount(path):
        return True
    real = os.fsencode(os.path.realpath(path))
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    # Source: proc_pid_mountinfo(5); the fifth field, in which spaces and such are octal.
    points = (line.split(b" ")[4] for line in lines if line.count(b" ") > 4)
    return any(re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), point) == real for point in points)


def _entries(path: Path) -> list[str]:
    """Return the names in a directory, without that of an empty volume and those of files that grow for this place."""
    ignored = _LOST if _is_mount(path) else ""
    return [name for name in os.listdir(path) if name != ignored and not _is_growing(path, name)]


def _is_growing(path: Path, name: str) -> bool:
    """Return whether a name in the place `path` belongs to a directory of growing files, or to the journal of one."""
    return name.startswith(_prefix(path)) and (path / name).lstat().st_uid == os.geteuid()


def _growing_in(where: Path, path: Path) -> Iterator[Path]:
    """Yield the directories of this user in which files grow for the place `path`."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(where) as entries:
        for entry in entries:
            if entry.name.startswith(_prefix(path)) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        yield Path(entry.path)


def require_free(into: Path, *, replace: bool = False) -> None:
    """Raise ConfigError where something is at `into` already; an empty directory does not count.

    Args:
        replace: a weight set that Penstock wrote does not count either, if nothing else is in its directory.
    """
    if not os.path.lexists(into) or (into.is_dir() and not _entries(into)):
        return
    if not replace:
        hint = "replace it with --force (replace=True), remove it, or write elsewhere"
        raise ConfigError("something is there already", uri=str(into), hint=hint)
    names = os.listdir(into) if into.is_dir() else []
    if not any(name == SIDECAR or name.endswith((SUFFIX, GGUF_SUFFIX)) for name in names):
        message = "only a directory with a weight set is replaced, and this has none"
        raise ConfigError(message, uri=str(into), hint="remove it, or write elsewhere")
    # A link is replaced itself, so nothing that it leads to is removed.
    if into.is_symlink():
        return
    if why := _kept(into):
        hint = "write to a new directory, or remove the files that are there"
        raise ConfigError(f"the directory cannot be replaced: {why}", uri=str(into), hint=hint)
    if others := foreign(into):
        # A slip in the path must not cost a home directory, nor the models of other people.
        named = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if len(others) > _NAMED else "")
        message = f"only files that Penstock wrote are replaced, and here are others: {named}"
        raise ConfigError(message, uri=str(into), hint="move them away, or write elsewhere")


class _Files(msgspec.Struct):
    """The part of `STAMP` that says which files a job wrote."""

    files: tuple[str, ...] = ()


def foreign(directory: Path) -> list[str]:
    """Return the relative paths of the files and directories in a weight set's directory that Penstock did not write.

    The manifest names the files of weights, and `STAMP` the others. Without a manifest all are foreign.
    """
    written = {*_written(directory), *(name for name in os.listdir(directory) if _is_growing(directory, name))}
    found = []
    for root, folders, files in os.walk(directory):
        place = "" if root == str(directory) else f"{os.path.relpath(root, directory)}/"
        for folder in list(folders):
            name = f"{place}{folder}"
            is_link = os.path.islink(os.path.join(root, folder))
            if is_link or not (
                name == ARTIFACTS or name in written or any(one.startswith(f"{name}/") for one in written)
            ):
                # Not looked into: a link may lead anywhere, and a home directory has a million files.
                folders.remove(folder)
                found.append(f"{name}/")
        found += [f"{place}{file}" for file in files if not _is_written(f"{place}{file}", written)]
    return sorted(found)


def _is_written(name: str, written: Collection[str]) -> bool:
    return (
        name in written
        or name.partition("/")[0] in written
        or (name.startswith(f"{ARTIFACTS}/") and name.endswith(SUFFIX))
    )


def _written(directory: Path) -> frozenset[str]:
    """Return the names of the files that Penstock wrote to a directory; none without a manifest."""
    try:
        manifest = decode(read_bounded(str(directory / SIDECAR), MAX_SMALL_BYTES), uri=str(directory / SIDECAR))
    except (FormatError, IntegrityError, SourceError):
        return frozenset()
    names = [file.name for file in manifest.files]
    with contextlib.suppress(FormatError, SourceError, *MALFORMED):
        names += msgspec.json.decode(read_bounded(str(directory / STAMP), MAX_SMALL_BYTES), type=_Files).files
    sidecars = [SIDECAR, *(f"{file.name}.{SIDECAR}" for file in manifest.files)]
    return frozenset([*names, *sidecars, *(f"{name}.sig" for name in sidecars), STAMP, f"model{INDEX_SUFFIX}"])


def require_apart(sources: Iterable[str], into: Path, *, replace: bool = False) -> None:
    """Raise ConfigError if a local source is the destination or in it, or if a source would lose what is replaced.

    Links are followed, also those of single files, and a directory that is mounted twice is one.
    """
    try:
        target = os.stat(into)
    except OSError:
        target = None
    real_target = Path(os.path.realpath(into))

    def is_target(level: Path) -> bool:
        with contextlib.suppress(OSError):
            return level == real_target or (target is not None and os.path.samestat(level.stat(), target))
        return False

    for source in sources:
        if is_remote(source):
            continue
        path = Path(local_path(source))
        for one in (path, *_links(path)):
            real = Path(os.path.realpath(one))
            if any(is_target(level) for level in (real, *real.parents)):
                message = f"the destination {'is' if is_target(real) else 'has'} the source {real}"
                hint = "write to another place, then replace the source yourself if you want to"
                raise ConfigError(message, uri=str(into), hint=hint)
        # What is in the destination is removed, and may belong to the source: an index can name shards below it.
        real = Path(os.path.realpath(path))
        if replace and real_target.is_relative_to(real):
            hint = "write to a place that is not in the source"
            raise ConfigError(f"the destination is in the source {real}", uri=str(into), hint=hint)


def _links(path: Path) -> Iterator[Path]:
    """Yield the links in a directory, or all that a glob matches: their files may lie elsewhere."""
    if path.is_dir():
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            yield from [Path(entry.path) for entry in entries if entry.is_symlink()]
    elif not os.path.lexists(path):
        from penstock.config import Settings

        with contextlib.suppress(NotFound, SourceError):
            yield from map(Path, list_uris(str(path), settings=Settings.read()))


class DestinationClaim(Closeable):
    """The directory in which one writer's files grow, made and locked; closing it releases the lock.

    The lock is one of the kernel's, on a file in the directory: it ends with the process, however that ends.

    Args:
        place: of the result.
        staging: from `place.staging`, or any directory for results that are uploaded.
        mode: of the directory, before the umask.
        is_shared: allow other writers of the place at the same time. The last to publish decides.

    Raises:
        DestinationError: another process writes to this place, something else has the directory's name, or it cannot be
            made.
    """

    def __init__(self, place: Path, staging: Path, *, mode: int = 0o777, is_shared: bool = False) -> None:
        self.staging = staging
        self._release: weakref.finalize[..., DestinationClaim] | None = None
        where = staging.parent
        with typed(place):
            self._new = [directory for directory in (where, *where.parents) if not directory.exists()]
            try:
                where.mkdir(parents=True, exist_ok=True)
                with locked(where):
                    for other in _growing_in(where, place):
                        if other != staging and _is_locked(other) and not is_shared:
                            raise _busy(place)
                    self._make(place, mode)
            except BaseException:
                self.close()
                raise
        _claims.add(self)

    def _make(self, place: Path, mode: int) -> None:
        """Make the directory if it is not there, and lock it."""
        with contextlib.suppress(FileExistsError):
            self.staging.mkdir(mode)
            # Removed with the directories above it, if it stays empty.
            self._new.insert(0, self.staging)
        try:
            folder = os.open(self.staging, _FOLDER_FLAGS)
        except OSError as error:
            raise _planted(self.staging) from error
        try:
            if os.fstat(folder).st_uid != os.geteuid():
                raise _planted(self.staging)
            fd = _lock_file(folder)
            if fd < 0:
                raise _busy(place)
            # Also where its owner fails and is dropped. At the interpreter's end the kernel does it.
            self._release = weakref.finalize(self, os.close, fd)
            self._release.atexit = False
            if os.path.lexists(self.staging / _MOVING):
                _move_back(place, self.staging)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Release the lock; remove directories above it that were made for it, if they are empty. Idempotent."""
        if self._release is not None:
            self._release()
        new, self._new = self._new, []
        remove_empty(new)

    def let_go(self) -> None:
        """Close the descriptor in a forked child, in which the lock would live on."""
        if self._release is not None:
            self._release()


_claims = release_after_fork(DestinationClaim.let_go)


def _busy(place: Path) -> DestinationError:
    hint = "wait until it has ended, or write elsewhere"
    return DestinationError("another process writes to this place", uri=str(place), hint=hint)


def _planted(staging: Path) -> DestinationError:
    message = "the directory for files that are not complete is no directory of this user's"
    return DestinationError(message, uri=str(staging), hint="find out who made it, and remove it")


def _lock_file(folder: int) -> int:
    """Lock a directory of growing files; return the descriptor of the lock, or -1 if another process has it."""
    fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EEXIST, f"{_LOCK} is no regular file")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    except BlockingIOError:
        os.close(fd)
        return -1
    except BaseException:
        os.close(fd)
        raise


def _is_locked(staging: Path) -> bool:
    """Return whether a process writes to a directory of growing files now."""
    with contextlib.suppress(OSError):
        fd = os.open(staging / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False


def remove_dead(place: OutputPlace, kind: str) -> None:
    """Remove the directories of growing files whose token begins with `kind` and whose writer has ended."""
    staging = place.staging(kind)
    with typed(place.path):
        for other in list(_growing_in(staging.parent, place.path)):
            if other.name.startswith(staging.name) and not _is_locked(other):
                _move_back(place.path, other)
                shutil.rmtree(other, ignore_errors=True)


def lock_within(fd: int, wait_s: float) -> None:
    """Lock an open file or directory. The lock ends with the descriptor.

    Raises:
        BlockingIOError: another process has held it for `wait_s`. OSError: this file system has no locks of its kind.
        Cancelled, KeyboardInterrupt: as `waits.pause`.
    """
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        pause(_LOOK_S)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory's lock for a moment, while names in it are checked and changed.

    Raises:
        DestinationError: another process has held it for too long.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            lock_within(fd, _WAIT_S)
        except BlockingIOError as error:
            raise _busy(directory) from error
        except OSError:
            # NFS locks no directories. Two writers that begin at the same moment may then refuse each other.
            pass
        yield
    finally:
        os.close(fd)


def clear(staging: Path) -> None:
    """Remove what an earlier writer left in a directory of growing files. Order: its lock is held."""
    for path in list(staging.iterdir()):
        if path.name == _LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def unlock(staging: Path) -> None:
    """Remove the lock file from a directory that is complete.

    The lock itself is held until its `DestinationClaim` is closed.
    """
    (staging / _LOCK).unlink(missing_ok=True)


def fill(place: Path, staging: Path, order: Callable[[str], int]) -> None:
    """Move all files of a complete directory into a place that has to stay, and remove the directory.

    A call that is killed meanwhile leaves a list of the files, by which the next one moves them back.

    Args:
        order: rank of a name. Those of the lowest rank are moved first: a manifest and an index make readers find an
            incomplete set, and not a part of one.
    """
    names = sorted((name for name in os.listdir(staging) if name != _LOCK), key=lambda name: (order(name), name))
    with open(staging / _MOVING, "xb") as file:
        file.write(msgspec.json.encode(names))
        file.flush()
        os.fsync(file.fileno())
    try:
        for name in names:
            os.rename(staging / name, place / name)
    except BaseException:
        _move_back(place, staging)
        raise
    shutil.rmtree(staging)


def _move_back(place: Path, staging: Path) -> None:
    """Undo a `fill` that was interrupted, if there was one."""
    with contextlib.suppress(NotFound, FormatError, *MALFORMED):
        names = msgspec.json.decode(read_bounded(str(staging / _MOVING), MAX_SMALL_BYTES), type=list[str])
        for name in names:
            if "/" not in name and name not in {"", ".", ".."} and not os.path.lexists(staging / name):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(place / name, staging / name)
        (staging / _MOVING).unlink(missing_ok=True)
