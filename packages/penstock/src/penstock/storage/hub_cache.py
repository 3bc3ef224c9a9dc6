"""Files of the hub of Hugging Face, written into the local cache that huggingface_hub keeps for all its users.

In: the files of one commit, as the hub lists them, and a function that copies some of them to paths. Out: the cache's
own layout, complete for these files; other tools find them there, offline too.
Not here: which files (`hugging_face`), ranges and SHA-256 (`download`), reading the cache (huggingface_hub).

    copy --> blobs/ETAG.*.incomplete --compared, renamed--> blobs/ETAG    each under the library's lock
    then     snapshots/COMMIT/FILE -> blobs/ETAG                          for all files
    then     refs/REVISION = COMMIT                                       what offline readers look for

The links and the reference come last: after a crash the cache has whole blobs, and no snapshot that looks complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from penstock.errors import ConfigError, FormatError, IntegrityError
from penstock.logs import log_named
from penstock.storage.hugging_face import library
from penstock.storage.repository import Contents, RepositoryFile
from penstock.storage.write import typed

logger = log_named(__name__)

Copy = Callable[[Mapping[str, Path], Callable[[str], None]], None]
"""Copies files by name to paths, and calls the function with each name once its file is complete and compared."""

# Locks held at once: each is an open file, and a data set may have a hundred thousand files.
_AT_ONCE = 64
# Long enough for one attempt: a lock that another process holds is left for the end.
_NO_WAIT_S = 0.01
# Age of an incomplete blob whose writer is gone for sure: a writer that has not written for this long has failed.
_ABANDONED_S = 3600.0
_GIT = "git:"


class HubCache:
    """The part of the local cache that belongs to a repository. Nothing is read or written before `fill`.

    Args:
        contents: the files wanted.
        stall_s: seconds to wait for a file of another process that does not grow.

    Attributes:
        snapshot: the directory of the commit's files.
    """

    def __init__(self, contents: Contents, *, stall_s: float) -> None:
        self._hub = library()
        # A reference is a file of its name, and the name came with the URI.
        if contents.revision.startswith("/") or {"", ".", ".."} & set(contents.revision.split("/")):
            raise ConfigError(f"no branch or tag can have the name {contents.revision[:200]!r}", uri=contents.uri)
        self._contents = contents
        self._root: Path = Path(self._hub.constants.HF_HUB_CACHE).expanduser()
        folder: str = self._hub.file_download.repo_folder_name(repo_id=contents.name, repo_type=contents.kind)
        self._repository = self._root / folder
        self.snapshot = self._repository / "snapshots" / contents.commit
        self._locks = self._root / ".locks" / folder
        self._stall_s = stall_s

    def fill(self, copy: Copy) -> list[Path]:
        """Bring the files into the cache; return the paths of those that were written now.

        Raises:
            DiskFull, DestinationError: the cache cannot be written.
            FormatError: the hub gave a file no digest. IntegrityError: a content is not the hub's.
            PenstockError: as `copy`. No file of the commit has become visible then.
        """
        with typed(self._root):
            self._locks.mkdir(parents=True, exist_ok=True)
            (self._repository / "blobs").mkdir(parents=True, exist_ok=True)
        # Names of one content share its blob.
        wanted: dict[str, str] = {}
        for name in self._contents.files:
            etag = self._etag(name)
            # A name may be longer than the file system allows.
            with typed(self.snapshot / name):
                if not (self.snapshot / name).exists():
                    wanted.setdefault(etag, name)
        written: list[str] = []
        left = list(wanted.items())
        while left:
            batch, left = left[:_AT_ONCE], left[_AT_ONCE:]
            busy = self._fetch(batch, copy, written, wait=False)
            # Those that another process brings meanwhile, one after the other.
            for one in busy:
                self._fetch([one], copy, written, wait=True)
        new = set(written)
        self._link(new)
        if self._contents.revision != self._contents.commit:
            self._refer()
        return [self._place(name, etag) for etag, name in wanted.items() if etag in new]

    def _fetch(
        self, blobs: Iterable[tuple[str, str]], copy: Copy, written: list[str], *, wait: bool
    ) -> list[tuple[str, str]]:
        """Write blobs that are not there, under their locks; return those whose lock another process holds."""
        busy, partial = [], {}
        with ExitStack() as locks:
            held: dict[str, ExitStack] = {}
            for etag, name in blobs:
                if self._blob(etag).exists():
                    continue
                lock = locks.enter_context(ExitStack())
                if not self._locked(lock, etag, wait=wait):
                    busy.append((etag, name))
                    continue
                held[name] = lock
                # Looked for again: its writer may have ended while this process waited.
                if self._blob(etag).exists():
                    continue
                self._remove_abandoned(etag)
                partial[name] = self._blob(f"{etag}.{secrets.token_hex(4)}.incomplete")

            def publish(name: str) -> None:
                etag = self._etag(name)
                _compare_git(partial[name], self._contents.files[name], self._contents.uri_of(name))
                with typed(self._blob(etag)):
                    os.replace(partial[name], self._blob(etag))
                written.append(etag)
                # A process that waits for this file need not wait for the others.
                held[name].close()

            try:
                if partial:
                    copy(partial, publish)
            finally:
                for path in partial.values():
                    path.unlink(missing_ok=True)
        return busy

    def _locked(self, lock: ExitStack, etag: str, *, wait: bool) -> bool:
        """Take the library's lock of a blob. Return False if another process holds it and `wait` is not set.

        With `wait`, True is returned without the lock after `stall_s` seconds in which the other process wrote nothing:
        by the library's own rules a lock only saves a second transfer.
        """
        from filelock import Timeout

        path = str(self._locks / f"{etag}.lock")
        wait_s = min(1.0, self._stall_s) if wait else _NO_WAIT_S
        seen, since = self._growth(etag), time.monotonic()
        while True:
            with typed(self._locks):
                try:
                    lock.enter_context(self._hub.utils.WeakFileLock(path, timeout=wait_s))
                    return True
                # It is an OSError too, and no fault of the file system.
                except Timeout:
                    if not wait:
                        return False
            now = self._growth(etag)
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._stall_s:
                logger.warning(
                    "another process holds %s and has written nothing for %g s; the file is fetched by this one too",
                    path,
                    self._stall_s,
                )
                return True

    def _growth(self, etag: str) -> list[tuple[str, int, int]]:
        """Return what changes while another process writes a blob."""
        states = []
        for path in self._incomplete(etag):
            with contextlib.suppress(OSError):
                state = path.stat()
                states.append((path.name, state.st_size, state.st_mtime_ns))
        return sorted(states)

    def _incomplete(self, etag: str) -> Iterator[Path]:
        return (self._repository / "blobs").glob(f"{etag}.*.incomplete")

    def _remove_abandoned(self, etag: str) -> None:
        """Remove what killed processes left of a blob. Others may write under broken locks, so age decides."""
        for path in self._incomplete(etag):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()

    def _link(self, written: set[str]) -> None:
        """Make the files of the commit visible: links to blobs, or files where the file system has no links."""
        has_links = self._hub.file_download.are_symlinks_supported(self._root)
        etags = {name: self._etag(name) for name in self._contents.files}
        last = {etag: name for name, etag in etags.items()}
        for name, etag in etags.items():
            target, blob = self.snapshot / name, self._blob(etag)
            with typed(target):
                if target.exists():
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                # In place of a link to a blob that was removed, too.
                new = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
                try:
                    if has_links:
                        new.symlink_to(os.path.relpath(blob, target.parent))
                    # As the library does: a blob that others may use is copied, a new one becomes the file.
                    elif etag in written and last[etag] == name:
                        os.replace(blob, new)
                    else:
                        shutil.copyfile(blob, new)
                    os.replace(new, target)
                finally:
                    new.unlink(missing_ok=True)

    def _refer(self) -> None:
        """Set the branch or tag to the commit."""
        path, commit = self._repository / "refs" / self._contents.revision, self._contents.commit
        with typed(path):
            if path.exists() and path.read_text() == commit:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
            try:
                new.write_text(commit)
                os.replace(new, path)
            finally:
                new.unlink(missing_ok=True)

    def _blob(self, name: str) -> Path:
        return self._repository / "blobs" / name

    def _etag(self, name: str) -> str:
        """Return the name of a file's blob. FormatError: the hub gave none."""
        file = self._contents.files[name]
        etag = file.sha256 or file.identity.removeprefix(_GIT)
        if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", etag):
            uri = self._contents.uri_of(name)
            raise FormatError("the hub lists no digest of this file, by which the cache would name it", uri=uri)
        return etag

    def _place(self, name: str, etag: str) -> Path:
        """Return where a blob's bytes are: without links, under the file's name."""
        blob = self._blob(etag)
        return blob if blob.exists() else self.snapshot / name


def _compare_git(path: Path, file: RepositoryFile, uri: str) -> None:
    """Compare a file without a SHA-256 with git's name of its content. IntegrityError if it differs."""
    if file.sha256 is not None:
        return
    # Source: git-hash-object(1). Such files are small: a hub keeps large ones outside of git.
    digest = hashlib.sha1(b"blob %d\0" % file.nbytes, usedforsecurity=False)
    with typed(path), path.open("rb") as content:
        while piece := content.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != file.identity.removeprefix(_GIT):
        hint = "try again; if it stays, the hub or a proxy gives other bytes than were committed"
        raise IntegrityError("the content is not the one that git's id names", uri=uri, hint=hint)
