"""Local destinations for weight sets: checks before the work starts, and locks against a second writer.

`OutputPlace` resolves and checks a destination and names its staging directory. `DestinationClaim` makes and locks the
staging directory.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from penstock.errors import MALFORMED, ConfigError, DestinationError, FormatError, IntegrityError, NotFound, SourceError
from penstock.lifecycle import Closeable, release_after_fork
from penstock.report import names_text
from penstock.storage import is_remote, list_uris, local_path, text_of
from penstock.storage.headers import GGUF_SUFFIX
from penstock.storage.local import read_bounded
from penstock.storage.locate import INDEX_SUFFIX, SIDECAR, SUFFIX
from penstock.storage.manifest import decode
from penstock.storage.source import MAX_SMALL_BYTES
from penstock.storage.write import remove_empty, short_name, typed
from penstock.waits import pause

STAMP = "penstock.job"
"""File that a conversion writes into its result. It names the job and the files other than weights."""
BUNDLES = "penstock-artifacts"
"""Name of the directory next to a model for bundles of compiled code."""
_LOST_AND_FOUND = "lost+found"
_LOCK = ".penstock-lock"
# File that lists the names of the files that `fill` is moving.
_MOVING = ".penstock-moving"
# Maximum seconds to wait for another process that checks or publishes in the directory.
_WAIT_S = 10.0
_POLL_S = 0.01
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class OutputPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A local directory to which a weight set is published."""

    path: Path
    """Absolute path. A symlink to an empty directory was resolved."""
    keeps_directory: bool
    """Whether the directory itself must stay and files are moved into it: a mount point, the working directory, or a
    directory whose parent cannot be written."""

    @classmethod
    def at(cls, destination: str | os.PathLike[str]) -> OutputPlace:
        """Return the output place for a path or file:// URI. Raises ConfigError or DestinationError."""
        path = Path(local_path(text_of(destination)))
        # `.`, `..` and `/` have no name from which to derive the name of a staging directory.
        path = Path(os.path.realpath(path)) if path.name in {"", ".."} else path.absolute()
        with typed(path):
            # Resolve only a symlink to an empty directory. A symlink to a weight set is replaced, not followed.
            if path.is_symlink() and path.is_dir() and not _entries(Path(os.path.realpath(path))):
                path = Path(os.path.realpath(path))
            # lstat raises for names that are too long and for symlink loops. `lexists` would report such paths as
            # missing.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(path)
            keeps_directory = False
            if path.is_dir() and not path.is_symlink():
                # A directory that contains only the files of an interrupted write must also be kept.
                keeps_directory = bool(_reason_to_stay(path)) or (any(_staging_in(path, path)) and not _entries(path))
        return cls(path=path, keeps_directory=keeps_directory)

    def require_free(self, *, replace: bool = False, sources: Iterable[str] = ()) -> None:
        """Raise ConfigError unless the destination is free or, if `replace` is True, contains only a weight set.

        No local path in `sources` may be inside the destination.
        """
        with typed(self.path):
            require_apart(sources, self.path, replace=replace)
            require_free(self.path, replace=replace)

    def staging(self, token: str) -> Path:
        """Return the hidden directory in which a writer creates its files."""
        return (self.path if self.keeps_directory else self.path.parent) / f"{_prefix(self.path)}{token}"


def _prefix(path: Path) -> str:
    return f".{short_name(path)}.penstock-"


def _reason_to_stay(path: Path) -> str:
    if _is_mount(path):
        return "it is a mount point"
    with contextlib.suppress(OSError):
        if path.samefile(os.curdir):
            return "it is the working directory"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return "this user cannot write to the directory above it"
    return ""


def _is_mount(path: Path) -> bool:
    if os.path.ismount(path):
        return True
    # `ismount` does not detect bind mounts.
    real = os.fsencode(os.path.realpath(path))
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    # Source: proc_pid_mountinfo(5). The fifth field is the path, with octal escapes.
    points = (line.split(b" ")[4] for line in lines if line.count(b" ") > 4)
    return any(re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), point) == real for point in points)


def _entries(path: Path) -> list[str]:
    """Return the names in a directory, except a volume's `lost+found` and this place's staging directories."""
    ignored = _LOST_AND_FOUND if _is_mount(path) else ""
    return [name for name in os.listdir(path) if name != ignored and not _is_staging(path, name)]


def _is_staging(path: Path, name: str) -> bool:
    return name.startswith(_prefix(path)) and (path / name).lstat().st_uid == os.geteuid()


def _staging_in(where: Path, path: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(where) as entries:
        for entry in entries:
            if entry.name.startswith(_prefix(path)) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        yield Path(entry.path)


def require_free(into: Path, *, replace: bool = False) -> None:
    """Raise ConfigError if a path exists. Allow an empty directory and, with `replace`, Penstock's weight sets."""
    if not os.path.lexists(into) or (into.is_dir() and not _entries(into)):
        return
    if not replace:
        hint = "replace it with --force (replace=True), remove it, or write to another path"
        raise ConfigError("the destination already exists", uri=str(into), hint=hint)
    names = os.listdir(into) if into.is_dir() else []
    if not any(name == SIDECAR or name.endswith((SUFFIX, GGUF_SUFFIX)) for name in names):
        message = "the destination exists and has no weight set, and only weight sets are replaced"
        raise ConfigError(message, uri=str(into), hint="remove the destination, or write to another path")
    # A symlink can always be replaced, because its target stays.
    if into.is_symlink():
        return
    if why := _reason_to_stay(into):
        hint = "write to a new directory, or remove the files in it"
        raise ConfigError(f"the directory cannot be replaced: {why}", uri=str(into), hint=hint)
    if others := foreign(into):
        # A mistyped path must not destroy a home directory or other people's models.
        named = names_text(others, 5)
        message = f"only files that Penstock wrote are replaced, but this directory has other files: {named}"
        raise ConfigError(message, uri=str(into), hint="move the other files away, or write to another path")


class _StampedFiles(msgspec.Struct):
    files: tuple[str, ...] = ()


def foreign(directory: Path) -> list[str]:
    """Return relative paths of all files and directories in a weight set's directory that Penstock did not write.

    The manifest names weight files, and `STAMP` names other files. Without a manifest, every file counts as foreign.
    """
    written = {*_written(directory), *(name for name in os.listdir(directory) if _is_staging(directory, name))}
    found = []
    for root, folders, files in os.walk(directory):
        place = "" if root == str(directory) else f"{os.path.relpath(root, directory)}/"
        for folder in list(folders):
            name = f"{place}{folder}"
            is_known = name == BUNDLES or name in written or any(one.startswith(f"{name}/") for one in written)
            if os.path.islink(os.path.join(root, folder)) or not is_known:
                # Do not descend, because a symlink may lead anywhere and a home directory may contain a million files.
                folders.remove(folder)
                found.append(f"{name}/")
        for name in (f"{place}{file}" for file in files):
            is_bundle = name.startswith(f"{BUNDLES}/") and name.endswith(SUFFIX)
            if not is_bundle and not {name, name.partition("/")[0]} & written:
                found.append(name)
    return sorted(found)


def _written(directory: Path) -> frozenset[str]:
    try:
        manifest = decode(read_bounded(str(directory / SIDECAR), MAX_SMALL_BYTES), uri=str(directory / SIDECAR))
    except (FormatError, IntegrityError, SourceError):
        return frozenset()
    names = [file.name for file in manifest.files]
    with contextlib.suppress(FormatError, SourceError, *MALFORMED):
        names += msgspec.json.decode(read_bounded(str(directory / STAMP), MAX_SMALL_BYTES), type=_StampedFiles).files
    sidecars = [SIDECAR, *(f"{file.name}.{SIDECAR}" for file in manifest.files)]
    return frozenset([*names, *sidecars, *(f"{name}.sig" for name in sidecars), STAMP, f"model{INDEX_SUFFIX}"])


def require_apart(sources: Iterable[str], into: Path, *, replace: bool = False) -> None:
    """Raise ConfigError if the destination contains a local source, or if `replace` would remove a source's files.

    Symlinks are followed. Different mounts of a directory count as the same directory.
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
                message = f"the destination {'is' if is_target(real) else 'contains'} the source {real}"
                hint = "write to another path, and then replace the source yourself if necessary"
                raise ConfigError(message, uri=str(into), hint=hint)
        # Files in the destination may belong to the source, because the source's index can name shards there.
        real = Path(os.path.realpath(path))
        if replace and real_target.is_relative_to(real):
            hint = "write to a path outside the source"
            raise ConfigError(f"the destination is inside the source {real}", uri=str(into), hint=hint)


def _links(path: Path) -> Iterator[Path]:
    """Yield the symlinks in a directory, or all matches of a glob, because their files may be elsewhere."""
    if path.is_dir():
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            yield from [Path(entry.path) for entry in entries if entry.is_symlink()]
    elif not os.path.lexists(path):
        from penstock.config import Settings

        with contextlib.suppress(NotFound, SourceError):
            yield from map(Path, list_uris(str(path), settings=Settings.read()))


class DestinationClaim(Closeable):
    """A writer's locked staging directory. Closing the claim or exiting the process releases the lock."""

    def __init__(self, staging: Path, fd: int, new: list[Path]) -> None:
        self.staging = staging
        self._new = new
        # Dropping the claim closes the descriptor. At exit, the kernel closes it.
        self._release = weakref.finalize(self, os.close, fd)
        self._release.atexit = False
        _claims.add(self)

    @classmethod
    def open(cls, place: Path, staging: Path, *, mode: int = 0o777, is_shared: bool = False) -> DestinationClaim:
        """Make the directory and lock it. Raises DestinationError.

        Args:
            staging: the directory from `place.staging`, or any directory if the result is uploaded.
            is_shared: whether to allow concurrent writers. The writer that publishes last wins.
        """
        where = staging.parent
        with typed(place):
            new = [directory for directory in (where, *where.parents) if not directory.exists()]
            try:
                where.mkdir(parents=True, exist_ok=True)
                with locked(where):
                    for other in _staging_in(where, place):
                        if other != staging and _is_locked(other) and not is_shared:
                            raise _busy(place)
                    with contextlib.suppress(FileExistsError):
                        staging.mkdir(mode)
                        new.insert(0, staging)
                    return cls(staging, _locked_folder(staging, place), new)
            except BaseException:
                remove_empty(new)
                raise

    def close(self) -> None:
        """Release the lock, and remove the empty directories that this claim created. Idempotent."""
        self._release()
        new, self._new = self._new, []
        remove_empty(new)


_claims: weakref.WeakSet[DestinationClaim] = release_after_fork(lambda claim: claim._release())


def _locked_folder(staging: Path, place: Path) -> int:
    try:
        folder = os.open(staging, _FOLDER_FLAGS)
    except OSError as error:
        raise _not_ours(staging) from error
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            raise _not_ours(staging)
        fd = _lock_file(folder)
    finally:
        os.close(folder)
    if fd < 0:
        raise _busy(place)
    try:
        if os.path.lexists(staging / _MOVING):
            _move_back(place, staging)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _busy(place: Path) -> DestinationError:
    hint = "wait until it ends, or write to another place"
    return DestinationError("another process writes to this place", uri=str(place), hint=hint)


def _not_ours(staging: Path) -> DestinationError:
    message = "the staging directory is not a directory of this user"
    return DestinationError(message, uri=str(staging), hint="find out who made it, and remove it")


def _lock_file(folder: int) -> int:
    fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EEXIST, f"{_LOCK} is not a regular file")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    except BlockingIOError:
        os.close(fd)
        return -1
    except BaseException:
        os.close(fd)
        raise


def _is_locked(staging: Path) -> bool:
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
    """Remove the staging directories whose token begins with `kind` and whose writer has exited."""
    staging = place.staging(kind)
    with typed(place.path):
        for other in list(_staging_in(staging.parent, place.path)):
            if other.name.startswith(staging.name) and not _is_locked(other):
                _move_back(place.path, other)
                shutil.rmtree(other, ignore_errors=True)


def lock_within(fd: int, wait_s: float) -> None:
    """Lock an open file until its descriptor is closed. Raises BlockingIOError after `wait_s`, or another OSError."""
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        pause(_POLL_S)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory's lock while names in it are checked and changed. Raises DestinationError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            lock_within(fd, _WAIT_S)
        except BlockingIOError as error:
            raise _busy(directory) from error
        except OSError:
            # NFS cannot lock directories. Two writers that start at the same moment on NFS may reject each other.
            pass
        yield
    finally:
        os.close(fd)


def clear(staging: Path) -> None:
    """Remove all files that an earlier writer left in a staging directory. The caller holds the directory's lock."""
    for path in list(staging.iterdir()):
        if path.name == _LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def unlock(staging: Path) -> None:
    """Remove the lock file from a complete directory. The lock itself is held until `DestinationClaim.close`."""
    (staging / _LOCK).unlink(missing_ok=True)


def fill(place: Path, staging: Path, order: Callable[[str], int]) -> None:
    """Move all files from a complete staging directory into an existing directory, and remove the staging directory.

    If the process is killed midway, the next writer uses the list in the staging directory to move the files back.

    Args:
        order: returns the rank of a file name. Files with low ranks move first: manifest and index, so that a reader
            detects missing files.
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
    with contextlib.suppress(NotFound, FormatError, *MALFORMED):
        names = msgspec.json.decode(read_bounded(str(staging / _MOVING), MAX_SMALL_BYTES), type=list[str])
        for name in names:
            if "/" not in name and name not in {"", ".", ".."} and not os.path.lexists(staging / name):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(place / name, staging / name)
        (staging / _MOVING).unlink(missing_ok=True)
