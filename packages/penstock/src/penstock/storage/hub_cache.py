"""Write files of a Hugging Face repository into the local cache that huggingface_hub shares with other tools.

Blobs are written first, each under the library's lock, then the symlinks of the snapshot, then the reference. After a
crash the cache has complete blobs and no snapshot that looks complete.
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
"""Copies files by name to paths. Calls the function with each name whose file is complete and verified."""

# Maximum number of open lock files. A data set may have a hundred thousand files.
_AT_ONCE = 64
# Seconds for one attempt to lock. Files that another process has locked are fetched last.
_NO_WAIT_S = 0.01
# Seconds after which the writer of an incomplete blob has failed.
_ABANDONED_S = 3600.0
_GIT = "git:"


class HubCache:
    """A repository's directory in the local cache.

    Args:
        stall_s: longest wait, in seconds, for a file of another process that does not grow.

    Attributes:
        snapshot: the directory of the commit's files.
    """

    def __init__(self, contents: Contents, *, stall_s: float) -> None:
        self._hub = library()
        # The revision from the URI becomes a file name.
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
            PenstockError: `copy` failed. No file of the commit is visible then.
        """
        with typed(self._root):
            self._locks.mkdir(parents=True, exist_ok=True)
            (self._repository / "blobs").mkdir(parents=True, exist_ok=True)
        # Files with the same content share a blob.
        missing: dict[str, str] = {}
        for name in self._contents.files:
            etag = self._etag(name)
            # `exists` raises if the name is too long for the file system.
            with typed(self.snapshot / name):
                if not (self.snapshot / name).exists():
                    missing.setdefault(etag, name)
        written: list[str] = []
        left = list(missing.items())
        while left:
            batch, left = left[:_AT_ONCE], left[_AT_ONCE:]
            busy = self._fetch(batch, copy, written, wait=False)
            # Other processes write these files, so wait for one file at a time.
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
        """Write missing blobs under their locks. Return the blobs that another process has locked."""
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
                # Another process may have written the blob during the wait.
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
                held[name].close()

            try:
                if partial:
                    copy(partial, publish)
            finally:
                for path in partial.values():
                    path.unlink(missing_ok=True)
        return busy

    def _locked(self, lock: ExitStack, etag: str, *, wait: bool) -> bool:
        """Acquire the library's lock for a blob. Without `wait`, return False if another process holds the lock.

        With `wait`, continue without the lock once the other process has written nothing for `stall_s` seconds. The
        lock only
        avoids a second transfer.
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
                # Timeout is an OSError, but not an error of the file system.
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
        states = []
        for path in self._incomplete(etag):
            with contextlib.suppress(OSError):
                state = path.stat()
                states.append((path.name, state.st_size, state.st_mtime_ns))
        return sorted(states)

    def _incomplete(self, etag: str) -> Iterator[Path]:
        return (self._repository / "blobs").glob(f"{etag}.*.incomplete")

    def _remove_abandoned(self, etag: str) -> None:
        # Locks may be stale, so age decides.
        for path in self._incomplete(etag):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()

    def _link(self, written: set[str]) -> None:
        has_links = self._hub.file_download.are_symlinks_supported(self._root)
        etags = {name: self._etag(name) for name in self._contents.files}
        last = {etag: name for name, etag in etags.items()}
        for name, etag in etags.items():
            target, blob = self.snapshot / name, self._blob(etag)
            with typed(target):
                if target.exists():
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                # The rename also replaces a symlink to a removed blob.
                new = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
                try:
                    if has_links:
                        new.symlink_to(os.path.relpath(blob, target.parent))
                    # The library also copies an existing blob and moves a new one.
                    elif etag in written and last[etag] == name:
                        os.replace(blob, new)
                    else:
                        shutil.copyfile(blob, new)
                    os.replace(new, target)
                finally:
                    new.unlink(missing_ok=True)

    def _refer(self) -> None:
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
        file = self._contents.files[name]
        etag = file.sha256 or file.identity.removeprefix(_GIT)
        if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", etag):
            uri = self._contents.uri_of(name)
            raise FormatError("the hub lists no digest for this file, so the cache has no name for it", uri=uri)
        return etag

    def _path(self, name: str, etag: str) -> Path:
        blob = self._blob(etag)
        return blob if blob.exists() else self.snapshot / name


def _check_git_id(path: Path, file: RepositoryFile, uri: str) -> None:
    if file.sha256 is not None:
        return
    # Source: git-hash-object(1). Hubs store large files outside git, so these files are small.
    digest = hashlib.sha1(b"blob %d\0" % file.nbytes, usedforsecurity=False)
    with typed(path), path.open("rb") as content:
        while piece := content.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != file.identity.removeprefix(_GIT):
        hint = "try again; if the error repeats, the hub or a proxy sends other bytes than were committed"
        raise IntegrityError("the content does not match its git id", uri=uri, hint=hint)
