"""Writes files of a Hugging Face repository into the local cache that huggingface_hub shares with other tools.

`hugging_face` lists the files of a commit, and `download` copies them.

    copy --> blobs/ETAG.*.incomplete --checked, renamed--> blobs/ETAG     each under the library's lock
    then     snapshots/COMMIT/FILE -> blobs/ETAG                          for all files
    then     refs/REVISION = COMMIT                                       for offline readers

Links and reference are written last. After a crash the cache has whole blobs and no snapshot that looks complete.
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
"""Copies files by name to paths. It calls the function with each name once the file is complete and checked."""

# Most locks held at once. Each is an open file, and a data set may have a hundred thousand files.
_AT_ONCE = 64
# Time for one attempt to lock. A file whose lock is held by another process is fetched last.
_NO_WAIT_S = 0.01
# The writer of an incomplete blob this old has failed.
_ABANDONED_S = 3600.0
_GIT = "git:"


class HubCache:
    """A repository's directory in the local cache. Nothing is read or written before `fill`.

    Args:
        stall_s: longest wait, in seconds, for a file of another process that does not grow.

    Attributes:
        snapshot: the directory of the commit's files.
    """

    def __init__(self, contents: Contents, *, stall_s: float) -> None:
        self._hub = library()
        # The revision comes from the URI and becomes a file name.
        if contents.revision.startswith("/") or {"", ".", ".."} & set(contents.revision.split("/")):
            raise ConfigError(f"no branch or tag can be called {contents.revision[:200]!r}", uri=contents.uri)
        self._contents = contents
        self._root: Path = Path(self._hub.constants.HF_HUB_CACHE).expanduser()
        folder: str = self._hub.file_download.repo_folder_name(repo_id=contents.name, repo_type=contents.kind)
        self._repository = self._root / folder
        self.snapshot = self._repository / "snapshots" / contents.commit
        self._locks = self._root / ".locks" / folder
        self._stall_s = stall_s

    def fill(self, copy: Copy) -> list[Path]:
        """Write missing files into the cache, and return the paths of the files written.

        Raises:
            DiskFull, DestinationError: the cache cannot be written.
            FormatError: the hub states no digest for a file.
            IntegrityError: a file differs from the hub's digest.
            PenstockError: `copy` failed. No file of the commit has become visible then.
        """
        with typed(self._root):
            self._locks.mkdir(parents=True, exist_ok=True)
            (self._repository / "blobs").mkdir(parents=True, exist_ok=True)
        # Files with the same content share a blob.
        missing: dict[str, str] = {}
        for name in self._contents.files:
            etag = self._etag(name)
            # `exists` may raise, because the name may be too long for the file system.
            with typed(self.snapshot / name):
                if not (self.snapshot / name).exists():
                    missing.setdefault(etag, name)
        written: list[str] = []
        left = list(missing.items())
        while left:
            batch, left = left[:_AT_ONCE], left[_AT_ONCE:]
            busy = self._fetch(batch, copy, written, wait=False)
            # Other processes are writing these files, so wait for one file at a time.
            for blob in busy:
                self._fetch([blob], copy, written, wait=True)
        new = set(written)
        self._link(new)
        if self._contents.revision != self._contents.commit:
            self._refer()
        return [self._path(name, etag) for etag, name in missing.items() if etag in new]

    def _fetch(
        self, blobs: Iterable[tuple[str, str]], copy: Copy, written: list[str], *, wait: bool
    ) -> list[tuple[str, str]]:
        """Write missing blobs under their locks. Return blobs whose lock another process holds."""
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
                # Check again, because another process may have written it during the wait.
                if self._blob(etag).exists():
                    continue
                self._remove_abandoned(etag)
                partial[name] = self._blob(f"{etag}.{secrets.token_hex(4)}.incomplete")

            def publish(name: str) -> None:
                etag = self._etag(name)
                _check_git_id(partial[name], self._contents.files[name], self._contents.uri_of(name))
                with typed(self._blob(etag)):
                    os.replace(partial[name], self._blob(etag))
                written.append(etag)
                # Another process may be waiting for this file.
                held[name].close()

            try:
                if partial:
                    copy(partial, publish)
            finally:
                for path in partial.values():
                    path.unlink(missing_ok=True)
        return busy

    def _locked(self, lock: ExitStack, etag: str, *, wait: bool) -> bool:
        """Take the library's lock for a blob. Without `wait`, return False if another process holds it.

        With `wait`, return True without the lock once the other process has written nothing for `stall_s` seconds. By
        the library's rules, a lock only saves a second transfer.
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
                # Timeout is an OSError too, but no failure of the file system.
                except Timeout:
                    if not wait:
                        return False
            now = self._growth(etag)
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._stall_s:
                logger.warning(
                    "another process holds %s and has written nothing for %g s, so this process fetches the file too",
                    path,
                    self._stall_s,
                )
                return True

    def _growth(self, etag: str) -> list[tuple[str, int, int]]:
        """Return values that change while another process writes a blob."""
        states = []
        for path in self._incomplete(etag):
            with contextlib.suppress(OSError):
                state = path.stat()
                states.append((path.name, state.st_size, state.st_mtime_ns))
        return sorted(states)

    def _incomplete(self, etag: str) -> Iterator[Path]:
        return (self._repository / "blobs").glob(f"{etag}.*.incomplete")

    def _remove_abandoned(self, etag: str) -> None:
        """Remove incomplete blobs of killed processes. Locks may be broken, so age decides."""
        for path in self._incomplete(etag):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()

    def _link(self, written: set[str]) -> None:
        """Make the files of the commit visible, as links to blobs or, if links are not supported, as files."""
        has_links = self._hub.file_download.are_symlinks_supported(self._root)
        etags = {name: self._etag(name) for name in self._contents.files}
        last = {etag: name for name, etag in etags.items()}
        for name, etag in etags.items():
            target, blob = self.snapshot / name, self._blob(etag)
            with typed(target):
                if target.exists():
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                # This also replaces a link to a blob that was removed.
                new = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
                try:
                    if has_links:
                        new.symlink_to(os.path.relpath(blob, target.parent))
                    # As in the library: an existing blob is copied, and a new blob is moved.
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
        """Return the name of a file's blob. FormatError if the hub states no digest."""
        file = self._contents.files[name]
        etag = file.sha256 or file.identity.removeprefix(_GIT)
        if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", etag):
            uri = self._contents.uri_of(name)
            raise FormatError("the hub lists no digest for this file, so the cache has no name for it", uri=uri)
        return etag

    def _path(self, name: str, etag: str) -> Path:
        """Return the path of a blob's bytes, which is in the snapshot if the file system has no links."""
        blob = self._blob(etag)
        return blob if blob.exists() else self.snapshot / name


def _check_git_id(path: Path, file: RepositoryFile, uri: str) -> None:
    """Check a file without a SHA-256 against git's id of its content. IntegrityError if it differs."""
    if file.sha256 is not None:
        return
    # Source: git-hash-object(1). Such files are small, because hubs keep large files outside git.
    digest = hashlib.sha1(b"blob %d\0" % file.nbytes, usedforsecurity=False)
    with typed(path), path.open("rb") as content:
        while piece := content.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != file.identity.removeprefix(_GIT):
        hint = "try again; if the error repeats, the hub or a proxy sends other bytes than were committed"
        raise IntegrityError("the content does not match its git id", uri=uri, hint=hint)
