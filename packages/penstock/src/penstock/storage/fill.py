"""Downloads of models into the local cache of their hub's library, for Penstock and other tools."""

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
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.config import Settings
from penstock.errors import ConfigError, FormatError, IntegrityError
from penstock.logs import log_named
from penstock.report import Summarised, bytes_text
from penstock.storage import pinned
from penstock.storage.download import download
from penstock.storage.hugging_face import HuggingFaceStorage, library
from penstock.storage.locate import INDEX_SUFFIX, SUFFIX, Uri, resolve, texts_of
from penstock.storage.repository import Contents, RepositoryFile
from penstock.storage.source import storage_for
from penstock.storage.write import new_file, typed

# Weight formats that a load does not read. Repositories often contain the model in several formats.
_OTHER_WEIGHTS = (SUFFIX, ".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".tflite")


logger = log_named(__name__)

Copy = Callable[[Mapping[str, Path], Callable[[str], None]], None]
"""Copies files, given by name, to local paths. Calls the function with the name of each complete, verified file."""

# Maximum number of open lock files. A data set may contain a hundred thousand files.
_AT_ONCE = 64
# Seconds for one attempt to lock. Files that another process has locked are fetched last.
_NO_WAIT_S = 0.01
# Age in seconds from which an incomplete blob counts as abandoned by its writer.
_ABANDONED_S = 3600.0
_GIT = "git:"


@dataclass(frozen=True, slots=True, kw_only=True)
class FillReport(Summarised):
    """The outcome of one `fill`."""

    uri: str
    directory: str
    """The directory that holds the files. Other tools find it by the model's name."""
    num_files: int
    nbytes: int
    fetched_files: int
    """Number of files written by this call and verified against the hub's digests."""
    fetched_bytes: int
    wall_s: float

    @property
    def gb_per_s(self) -> float:
        """Download rate in decimal GB/s."""
        return self.fetched_bytes / self.wall_s / 1e9 if self.wall_s else 0.0

    def summary(self) -> str:
        """Return two lines of text for users."""
        size = f"{self.num_files} files, {bytes_text(self.nbytes)}"
        fetched = f"{self.fetched_files} fetched and checked against the hub's digests: "
        fetched += f"{bytes_text(self.fetched_bytes)} in {self.wall_s:.1f} s, {self.gb_per_s:.2f} GB/s"
        others = f"; {self.num_files - self.fetched_files} existed" if self.num_files > self.fetched_files else ""
        return f"{self.uri}: {size}; {fetched}{others}\nin the cache: {self.directory}"


def fill(
    uri: Uri,
    *,
    settings: Settings | None = None,
    storage_options: Mapping[str, str] | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> FillReport:
    """Write a repository's files to the local cache of its hub's library, where other tools find them.

    Each file appears complete and verified against the hub's digest, or not at all. The call waits for other processes
    that download the same model, even with the library's tools.

    Args:
        uri: `org/name`, `hf://org/name@REVISION`, or a file, folder or glob in it.
        on_bytes: called with the number of bytes fetched so far and the total.

    Raises:
        ConfigError: the URI is not a repository on a hub.
        DiskFull, DestinationError: the cache cannot be written.
        IntegrityError, SourceError: a file differs from the hub's digest, or the hub failed.
    """
    return _fill(texts_of(uri)[0], None, settings or Settings.read(), storage_options or {}, on_bytes)


def fill_weights(
    uri: Uri,
    *,
    settings: Settings,
    storage_options: Mapping[str, str] | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> FillReport:
    """Fill the cache with the files that a load of `uri` reads, and the small files next to them.

    Raises like `fill`. Weights in other formats and subdirectories are omitted, because engines do not need them.
    """
    text = texts_of(uri)[0]
    _storage(text)
    place = pinned(text, settings=settings, storage_options=storage_options)
    weights = {_inside(file) for _, file in resolve(place, settings=settings, storage_options=storage_options).files}
    is_index = place.endswith(INDEX_SUFFIX)
    folder = _inside(place).rpartition("/")[0] if is_index else _inside(place)

    def is_needed(name: str) -> bool:
        is_sibling = name.rpartition("/")[0] == folder and not name.endswith(_OTHER_WEIGHTS)
        return name in weights or is_sibling

    return _fill(text.rpartition("/")[0] if is_index else text, is_needed, settings, storage_options or {}, on_bytes)


def _fill(
    uri: str,
    is_needed: Callable[[str], bool] | None,
    settings: Settings,
    options: Mapping[str, str],
    on_bytes: Callable[[int, int], None] | None,
) -> FillReport:
    started = time.perf_counter()
    storage = _storage(uri)
    default = str(library().constants.DEFAULT_REVISION)
    contents = storage.contents(uri, default=default, settings=settings, storage_options=options)
    if is_needed is not None:
        contents = msgspec.structs.replace(
            contents, files={name: file for name, file in contents.files.items() if is_needed(name)}
        )
    total_bytes = fetched_bytes = 0

    def copy(paths: Mapping[str, Path], publish: Callable[[str], None]) -> None:
        nonlocal total_bytes
        names = {contents.uri_of(name): name for name in paths}
        total_bytes += sum(contents.files[name].nbytes for name in paths)
        download(
            {uri: paths[name] for uri, name in names.items()},
            # The hub's cache suffices, so bypass the chunk cache.
            settings=msgspec.structs.replace(settings, cache_dir=None),
            storage_options=options,
            on_file=lambda uri: publish(names[uri]),
            on_bytes=count,
        )

    def count(nbytes: int) -> None:
        nonlocal fetched_bytes
        fetched_bytes += nbytes
        if on_bytes is not None:
            on_bytes(fetched_bytes, total_bytes)

    cache = _HubCache(contents, stall_s=settings.stall_s)
    written = cache.fill(copy)
    for path in written:
        storage.trust(str(path))
    return FillReport(
        uri=contents.uri,
        directory=str(cache.snapshot),
        num_files=len(contents.files),
        nbytes=sum(file.nbytes for file in contents.files.values()),
        fetched_files=len(written),
        fetched_bytes=fetched_bytes,
        wall_s=time.perf_counter() - started,
    )


def _storage(uri: str) -> HuggingFaceStorage:
    storage = storage_for("hf") if uri.startswith("hf://") else None
    if not isinstance(storage, HuggingFaceStorage):
        hint = "use org/name or hf://; PENSTOCK_CACHE_DIR caches reads from any storage"
        raise ConfigError("only a model hub has a cache that can be filled", uri=uri, hint=hint)
    return storage


def _inside(uri: str) -> str:
    return uri.partition("@")[2].partition("/")[2].rstrip("/")


class _HubCache:
    def __init__(self, contents: Contents, *, stall_s: float) -> None:
        self._hub = library()
        # The revision from the URI becomes a file name.
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
        with typed(self._root):
            self._locks.mkdir(parents=True, exist_ok=True)
            (self._repository / "blobs").mkdir(parents=True, exist_ok=True)
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
            for blob in busy:
                self._fetch([blob], copy, written, wait=True)
        new = set(written)
        self._link(new)
        if self._contents.revision != self._contents.commit:
            path, commit = self._repository / "refs" / self._contents.revision, self._contents.commit
            with typed(path):
                is_current = path.exists() and path.read_text() == commit
                path.parent.mkdir(parents=True, exist_ok=True)
            if not is_current:
                with new_file(path) as file:
                    file.write(commit.encode())
        # Without symlinks the snapshot itself holds the bytes.
        blobs = {etag: self._blob(etag) for etag in new}
        return [
            blobs[etag] if blobs[etag].exists() else self.snapshot / name
            for etag, name in missing.items()
            if etag in new
        ]

    def _fetch(
        self, blobs: Iterable[tuple[str, str]], copy: Copy, written: list[str], *, wait: bool
    ) -> list[tuple[str, str]]:
        """Write missing blobs while holding their locks. Return the blobs that another process has locked."""
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
                if self._blob(etag).exists():
                    continue
                # Locks may be stale, so remove incomplete blobs by their age.
                for path in self._incomplete(etag):
                    with contextlib.suppress(OSError):
                        if time.time() - path.stat().st_mtime > _ABANDONED_S:
                            path.unlink()
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
        """Acquire the library's lock for a blob. With `wait=False`, return False if another process holds the lock.

        With `wait=True`, continue without the lock once the other process has written nothing for `stall_s` seconds.
        The lock only avoids a second transfer.
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
                # Timeout is an OSError, but does not mean that the file system failed.
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
                    # Like the library, copy an existing blob and move a new one.
                    elif etag in written and last[etag] == name:
                        os.replace(blob, new)
                    else:
                        shutil.copyfile(blob, new)
                    os.replace(new, target)
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
