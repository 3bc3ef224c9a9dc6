"""The hub of Hugging Face as a storage: `hf://[datasets/]org/name[@revision][/file]`, streamed or from its local cache.

In: a URI; the environment by huggingface_hub's names (`HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_HOME`). Out:
sources, listings, small files; a pinned URI names a commit, or is the path of a snapshot in the local cache.
Not here: ranges over HTTP (`http`), what the files hold (`weight_set`).

    hf://org/name --pin--> hf://org/name@COMMIT/file --open--> its file in the local cache, which can be mapped
                                                     `-------> ranges over HTTP: nothing is written to a disk

Requests about a repository, tokens, endpoints and the cache are huggingface_hub's; only ranges of files are read here.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from penstock.config import Settings
from penstock.entry_points import install_hint
from penstock.errors import (
    ConfigError,
    DestinationError,
    FormatError,
    IntegrityError,
    MissingExtra,
    NotFound,
    PenstockError,
    PermissionDenied,
    SourceUnavailable,
)
from penstock.http.range_request import Failed, Patience, Validators
from penstock.storage.files import FileSource
from penstock.storage.http import HttpSource, PlainAddress, open_address
from penstock.storage.source import GLOB, MAX_SMALL_BYTES, Source, glob_pattern, read_whole
from penstock.types import MIB

_URI = re.compile(
    r"hf://(?:(?P<kind>datasets|models|spaces)/)?(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<rest>.+)|/(?P<path>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# A revision with slashes is written with %2F; the hub's own references of pull requests and conversions need not be.
_REVISION = re.compile(r"(?P<revision>refs/(?:pr/\d+|convert/[\w.-]+)|[^/]+)(?:/(?P<path>.*))?")
# Names of the files of one model that is published in several. Source: save_torch_state_dict of huggingface_hub.
_SHARD = re.compile(r"(?P<model>.*)-\d+-of-(?P<total>\d{1,6})(?P<suffix>\.\w+)")
_WRITE_AS = "hf://[datasets/]org/name[@revision][/file]"
# Listings of commits that stay: a commit never changes, and one takes a few hundred bytes a file.
_LISTINGS = 64
# Longest a digest runs ahead of what it may hash next: reads of a file end in another order than they began.
_MAX_AHEAD_BYTES = 256 * MIB
# Names that this storage keeps beside the repository, in the user's own cache: a hub is not written to.
_OWN = ("penstock.manifest", "penstock.manifest.sig")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryFile:
    """A file of one commit, as the hub lists it."""

    nbytes: int
    sha256: str | None
    """Digest of the content; None for a small file that is in git itself."""
    identity: str
    """The hub's name of the content: SHA-256, or git's blob id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    """The parts of an hf:// URI."""

    kind: str
    """`model`, `dataset` or `space`."""
    name: str
    revision: str | None
    path: str

    @property
    def repository(self) -> str:
        """Return the URI of the repository, without revision and path."""
        return f"hf://{'' if self.kind == 'model' else f'{self.kind}s/'}{self.name}"

    def at(self, commit: str, path: str) -> str:
        """Return the URI of a file or directory of a commit."""
        return f"{self.repository}@{commit}{f'/{path}' if path else ''}"


class HuggingFaceStorage:
    """The storage of hf://. It reads; manifests of repositories are kept in the user's cache.

    `storage_options`: `token` and `endpoint`, in place of `HF_TOKEN` and `HF_ENDPOINT`.
    """

    def __init__(self) -> None:
        self._listings: OrderedDict[tuple[str, ...], Mapping[str, RepositoryFile]] = OrderedDict()
        self._lock = threading.Lock()

    def pin(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> str:
        """Return `uri` with the commit that its revision is now.

        Raises:
            NotFound: the repository or revision does not exist, or `HF_HUB_OFFLINE` is set and it is not in the cache.
            PermissionDenied, SourceUnavailable: as their names say. MissingExtra: huggingface_hub is not installed.
        """
        where = _parse(uri)
        commit, _ = self._listing(where, settings, storage_options, is_new=True)
        return where.at(commit, where.path)

    def open(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> Source:
        """See `Storage.open`. A file of the local cache is opened there."""
        where = _parse(uri)
        commit, files = self._listing(where, settings, storage_options)
        file = files.get(where.path)
        if file is None:
            raise NotFound("the repository has no such file at this commit", uri=where.at(commit, where.path))
        cached = _cached(where, commit, where.path)
        if cached is not None:
            return FileSource(cached)
        return _open_remote(where, commit, file, settings, storage_options)

    def list(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> list[str]:
        """See `Storage.list`; the URIs are pinned."""
        where = _parse(uri)
        commit, files = self._listing(where, settings, storage_options)
        # A file of this name is itself, even if it reads as a glob.
        if where.path in files:
            paths = [where.path]
        elif GLOB.search(where.path):
            paths = list(filter(glob_pattern(where.path).fullmatch, files))
        else:
            prefix = f"{where.path.rstrip('/')}/" if where.path else ""
            paths = [path for path in files if path.startswith(prefix) and "/" not in path.removeprefix(prefix)]
            if _hub().constants.HF_HUB_OFFLINE:
                _require_all_shards(paths, where.at(commit, where.path))
        if not paths:
            raise NotFound("the repository has no such file or directory", uri=where.at(commit, where.path))
        return [where.at(commit, path) for path in sorted(paths)]

    def read_small(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> bytes | None:
        """See `Storage.read_small`. A manifest that the repository lacks is looked for in the user's cache."""
        where = _parse(uri)
        commit, files = self._listing(where, settings, storage_options)
        if where.path in files:
            return read_whole(self.open(uri, settings=settings, storage_options=storage_options))
        if not where.path.endswith(_OWN):
            return None
        try:
            with self._own_path(where, commit).open("rb") as file:
                raw = file.read(MAX_SMALL_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SourceUnavailable(
                f"cannot be read: {error.strerror}", uri=str(self._own_path(where, commit))
            ) from error
        if len(raw) > MAX_SMALL_BYTES:
            raise FormatError("too large for a manifest", uri=str(self._own_path(where, commit)))
        return raw

    def write_small(self, uri: str, data: bytes, *, settings: Settings, storage_options: Mapping[str, str]) -> None:
        """Keep a repository's manifest or its signature in the user's cache, by commit.

        Raises:
            ConfigError: it is another file; this storage only reads.
            DestinationError: the cache cannot be written.
        """
        where = _parse(uri)
        if not where.path.endswith(_OWN):
            raise ConfigError("a repository of the hub is not written to", uri=uri, hint="write to a local path")
        commit, _ = self._listing(where, settings, storage_options)
        path = self._own_path(where, commit)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, partial = tempfile.mkstemp(dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(partial, path)
            except BaseException:
                os.unlink(partial)
                raise
        except OSError as error:
            raise DestinationError(f"cannot write: {error.strerror}", uri=str(path)) from error

    @staticmethod
    def _own_path(where: _Address, commit: str) -> Path:
        folder = f"{where.kind}s--{where.name.replace('/', '--')}"
        return Path(_hub().constants.HF_HOME, "penstock", folder, commit, where.path.replace("/", "--"))

    def _listing(
        self, where: _Address, settings: Settings, options: Mapping[str, str], *, is_new: bool = False
    ) -> tuple[str, Mapping[str, RepositoryFile]]:
        """Return the commit of a revision and its files. One request, or none for a commit listed before.

        Args:
            is_new: offline, look at the local cache again: another process may have filled it meanwhile.
        """
        unknown = set(options) - {"token", "endpoint"}
        if unknown:
            raise ConfigError(f"storage_options {sorted(unknown)} mean nothing for hf://", hint="token, endpoint")
        hub = _hub()
        if hub.constants.HF_HUB_OFFLINE:
            place = ("", where.kind, where.name, str(hub.constants.HF_HUB_CACHE))
            with self._lock:
                if (
                    where.revision is not None
                    and not is_new
                    and (found := self._listings.get((*place, where.revision)))
                ):
                    return where.revision, found
            commit, files = _cached_listing(where)
            self._keep((*place, commit), files)
            return commit, files
        token = _token(options)
        api = hub.HfApi(endpoint=options.get("endpoint"), token=token or False)
        # Of this token: a listing must not be shown to a user who may not see the repository.
        key = (api.endpoint, where.kind, where.name, token or "")
        if where.revision is not None and _COMMIT.fullmatch(where.revision):
            with self._lock:
                if found := self._listings.get((*key, where.revision)):
                    return where.revision, found
        uri = where.repository if where.revision is None else f"{where.repository}@{where.revision}"
        patience = Patience(uri, settings)
        while True:
            try:
                with _mapped(uri, where, api.endpoint):
                    info = api.repo_info(
                        where.name,
                        revision=where.revision,
                        repo_type=where.kind,
                        files_metadata=True,
                        timeout=settings.stall_s,
                    )
                break
            except Failed as failed:
                try:
                    failed.ask(patience, None)
                except SourceUnavailable as error:
                    error.hint = "check the network and HF_ENDPOINT; HF_HUB_OFFLINE=1 reads the local cache alone"
                    raise
        commit = str(info.sha)
        if not _COMMIT.fullmatch(commit):
            raise FormatError("the hub answered without a commit", uri=uri)
        files = dict(_file_of(entry, uri) for entry in info.siblings or ())
        self._keep((*key, commit), files)
        return commit, files

    def _keep(self, key: tuple[str, ...], files: Mapping[str, RepositoryFile]) -> None:
        """Remember a listing, and forget the oldest."""
        with self._lock:
            self._listings[key] = files
            while len(self._listings) > _LISTINGS:
                self._listings.popitem(last=False)


class HubSource(HttpSource):
    """A file of the hub, streamed; its SHA-256 is compared while it is read, if `check_whole` was called."""

    def __init__(
        self, file: RepositoryFile, address: PlainAddress, seen: Validators, *, uri: str, settings: Settings
    ) -> None:
        super().__init__(uri, address, seen, settings=settings)
        self.identity = f"hf:{file.identity}"
        self._digest = None if file.sha256 is None else _FileDigest(file.sha256, self.nbytes, uri, settings.stall_s)

    @property
    def is_checked(self) -> bool:
        """See `Digested`."""
        return self._digest is not None and self._digest.is_equal

    def check_whole(self) -> bool:
        """Compare the digest of the whole file, which is read once from now on. Return False if the hub gave none.

        A read that brings the last missing bytes raises IntegrityError if the content is not the hub's. Cost: one
        SHA-256 of the file, in the threads that read, and at most 256 MiB for bytes that arrived out of order.
        """
        if self._digest is None:
            return False
        self._digest.is_wanted = True
        return True

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`."""
        views = list(buffers)
        try:
            path = super().readv(offset, views)
        except BaseException:
            if self._digest is not None:
                # Reads that wait for the bytes of this one must not wait for ever.
                self._digest.abandon()
            raise
        if self._digest is not None:
            self._digest.add(offset, views)
        return path


class _FileDigest:
    """The SHA-256 of a file whose parts arrive in any order, each hashed by the thread that brings the one before it.

    Args:
        stall_s: seconds that a part waits for those before it; then the digest is given up.

    Attributes:
        is_wanted: whether parts that come early are kept. Until then only parts that follow on the last are hashed, as
            those of a header, which is read before it is known whether the rest will be.
        is_equal: the whole file was hashed, and has the expected digest.
    """

    def __init__(self, expected: str, nbytes: int, uri: str, stall_s: float) -> None:
        self.is_wanted = False
        self.is_equal = False
        self._stall_s = stall_s
        self._expected = expected
        self._nbytes = nbytes
        self._uri = uri
        self._sha = hashlib.sha256()
        self._next = 0
        self._ahead: dict[int, bytes] = {}
        self._is_busy = False
        self._is_over = False
        self._changed = threading.Condition()

    def abandon(self) -> None:
        """Hash no more, and let every waiting thread go on: a read has failed."""
        with self._changed:
            self._is_over = True
            self._ahead.clear()
            self._changed.notify_all()

    def add(self, offset: int, views: Sequence[memoryview]) -> None:
        """Hash a part, or keep a copy until its turn. IntegrityError: the whole file differs from the hub's digest."""
        nbytes = sum(view.nbytes for view in views)
        with self._changed:
            if self._is_over:
                return
            if offset > self._next or self._is_busy:
                if not self.is_wanted:
                    return
                # Bounded: one slow range must not bring the rest of the file into memory.
                if not self._changed.wait_for(lambda: self._has_room(offset), self._stall_s):
                    self.abandon()
                if self._is_over:
                    return
                if offset > self._next or self._is_busy:
                    self._ahead[offset] = b"".join(views)
                    return
            if offset + nbytes <= self._next:
                return
            self._is_busy = True
        self._hash(offset, views)

    def _has_room(self, offset: int) -> bool:
        ahead_bytes = sum(map(len, self._ahead.values()))
        return self._is_over or (offset <= self._next and not self._is_busy) or ahead_bytes < _MAX_AHEAD_BYTES

    def _hash(self, offset: int, views: Sequence[memoryview | bytes]) -> None:
        """Hash a part whose turn it is, and the kept parts that follow it."""
        while True:
            skip = self._next - offset
            for view in views:
                if skip < len(view):
                    # It releases the interpreter lock for the time.
                    self._sha.update(memoryview(view)[max(0, skip) :])
                skip -= len(view)
            with self._changed:
                self._next = max(self._next, offset + sum(map(len, views)))
                ready = [at for at in self._ahead if at <= self._next]
                self._changed.notify_all()
                if not ready:
                    self._is_busy = False
                    if self._next < self._nbytes or self._is_over:
                        return
                    self._is_over = True
                    self.is_equal = self._sha.hexdigest() == self._expected
                    break
                offset = min(ready)
                views = [self._ahead.pop(offset)]
        if not self.is_equal:
            raise IntegrityError(
                "the content's SHA-256 is not the one that the hub lists",
                uri=self._uri,
                hint="load again; if it stays, the hub or a proxy gives other bytes than were uploaded",
            )


def _hub() -> Any:
    """Return huggingface_hub. MissingExtra if it is not installed."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise MissingExtra("hf:// needs huggingface_hub", hint=install_hint("hf")) from error
    return huggingface_hub


def _token(options: Mapping[str, str]) -> str | None:
    """Return the token to send: the caller's, or huggingface_hub's own unless its user forbids that."""
    if token := options.get("token"):
        return token
    hub = _hub()
    return None if hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else hub.get_token()


def _parse(uri: str) -> _Address:
    """Return the parts of an hf:// URI. ConfigError if it is none."""
    match = _URI.fullmatch(uri)
    if match is None:
        raise ConfigError("not the URI of a repository", uri=uri, hint=f"write it as {_WRITE_AS}")
    revision, path = None, match["path"] or ""
    if match["rest"]:
        at = _REVISION.fullmatch(match["rest"])
        if at is None:
            raise ConfigError("not the URI of a repository", uri=uri, hint=f"write it as {_WRITE_AS}")
        revision, path = unquote(at["revision"]), at["path"] or ""
    kind = (match["kind"] or "models").removesuffix("s")
    if ".." in path.split("/") or path.startswith("/"):
        raise ConfigError("a file of a repository cannot have this name", uri=uri)
    return _Address(kind=kind, name=match["name"], revision=revision, path=path.rstrip("/"))


def _file_of(entry: Any, uri: str) -> tuple[str, RepositoryFile]:
    """Return one entry of the hub's listing, checked: its name and the file."""
    name = entry.rfilename
    # As git's names are. The names of a hub that is not to be trusted become local paths where files are copied.
    if not isinstance(name, str) or {"", ".", ".."} & set(name.split("/")):
        raise FormatError(
            f"the hub lists a file of the name {str(name)[:200]!r}, which no repository can have", uri=uri
        )
    sha = None if entry.lfs is None else str(entry.lfs.sha256)
    if not isinstance(entry.size, int) or entry.size < 0 or (sha is not None and not re.fullmatch("[0-9a-f]{64}", sha)):
        raise FormatError(f"the hub's listing of {str(entry.rfilename)[:200]!r} has no valid size or digest", uri=uri)
    return name, RepositoryFile(nbytes=entry.size, sha256=sha, identity=sha or f"git:{entry.blob_id}")


def _cached(where: _Address, commit: str, path: str) -> str | None:
    """Return the path of a file in the local cache; None if it is not there."""
    found = _hub().try_to_load_from_cache(where.name, path, revision=commit, repo_type=where.kind)
    return found if isinstance(found, str) else None


def _cached_listing(where: _Address) -> tuple[str, Mapping[str, RepositoryFile]]:
    """Return the commit of a revision and its files by the local cache alone. NotFound if it is not there."""
    hub = _hub()
    try:
        root = Path(
            hub.snapshot_download(where.name, repo_type=where.kind, revision=where.revision, local_files_only=True)
        )
    except (hub.errors.LocalEntryNotFoundError, ValueError) as error:
        hint = f"unset HF_HUB_OFFLINE, or download it while online: hf download {where.name}"
        message = "HF_HUB_OFFLINE is set, and the local cache does not hold this revision"
        raise NotFound(message, uri=where.repository, hint=hint) from error
    files = {}
    for path in root.rglob("*"):
        if path.is_file():
            # The cache names contents as the hub does.
            blob = path.resolve().name
            sha = blob if re.fullmatch("[0-9a-f]{64}", blob) else None
            files[str(path.relative_to(root))] = RepositoryFile(
                nbytes=path.stat().st_size, sha256=sha, identity=sha or f"git:{blob}"
            )
    return root.name, files


def _require_all_shards(paths: Sequence[str], uri: str) -> None:
    """Raise NotFound if the local cache holds a part of the files that were published together.

    Without their index, which may be missing too, they would be loaded as the whole model.
    """
    shards = Counter(match.group("model", "total", "suffix") for match in map(_SHARD.fullmatch, paths) if match)
    for (_, total, suffix), count in shards.items():
        if count != int(total):
            message = f"HF_HUB_OFFLINE is set, and the local cache holds {count} of {int(total)} *{suffix} files"
            raise NotFound(message, uri=uri, hint="unset HF_HUB_OFFLINE, or download the repository while online")


def _open_remote(
    where: _Address, commit: str, file: RepositoryFile, settings: Settings, options: Mapping[str, str]
) -> Source:
    """Open a file for streaming; the redirect to signed storage is followed, and again when it expires."""
    hub = _hub()
    uri = where.at(commit, where.path)
    endpoint = options.get("endpoint")
    url = hub.hf_hub_url(where.name, where.path, repo_type=where.kind, revision=commit, endpoint=endpoint)
    token = _token(options)
    address = PlainAddress(url, {"bearer_token": token} if token else {})
    try:
        source = open_address(
            uri, address, lambda seen: HubSource(file, address, seen, uri=uri, settings=settings), settings=settings
        )
    except PermissionDenied as error:
        page = url.partition("/resolve/")[0]
        hint = f"accept its conditions at {page}, and " if token else "it may be gated or private: "
        hint += "give a token that may read it (HF_TOKEN, or `hf auth login`)"
        raise PermissionDenied(f"the hub refuses this file: {error.message}", uri=uri, hint=hint) from error
    except NotFound as error:
        raise NotFound("the hub lists this file and does not serve it", uri=uri) from error
    if source.nbytes != file.nbytes:
        source.close()
        raise FormatError(f"it has {source.nbytes} bytes; the hub lists {file.nbytes}", uri=uri)
    return source


@contextmanager
def _mapped(uri: str, where: _Address, endpoint: str) -> Iterator[None]:
    """Map huggingface_hub's errors to typed ones, or to `Failed` where another attempt may help."""
    errors = _hub().errors
    try:
        yield
    except PenstockError:
        raise
    except errors.GatedRepoError as error:
        hint = f"accept its conditions at {endpoint}/{where.name} and set HF_TOKEN, or run `hf auth login`"
        raise PermissionDenied("the repository is gated", uri=uri, hint=hint) from error
    except errors.RepositoryNotFoundError as error:
        hint = "check the name; a private repository needs HF_TOKEN, or `hf auth login`"
        raise NotFound(f"no such repository at {endpoint}", uri=uri, hint=hint) from error
    except errors.RevisionNotFoundError as error:
        hint = "name a branch, a tag or a whole commit"
        raise NotFound("the repository has no such revision", uri=uri, hint=hint) from error
    except errors.HFValidationError as error:
        raise ConfigError(f"not the name of a repository: {error}", uri=uri, hint=f"write it as {_WRITE_AS}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 429 or status >= 500:
            after = error.response.headers.get("Retry-After", "")
            wait_s = float(after) if re.fullmatch(r"\d{1,9}", after) else None
            raise Failed(f"HTTP {status}", wait_s=wait_s, cause=error) from error
        if status in {401, 403}:
            hint = "check the token (HF_TOKEN, or `hf auth whoami`) and what it may read"
            raise PermissionDenied(f"the hub answers HTTP {status}", uri=uri, hint=hint) from error
        raise SourceUnavailable(f"the hub answers HTTP {status}", uri=uri) from error
    except errors.HTTPError as error:
        raise Failed(f"no answer from {endpoint}: {type(error).__name__}: {error}"[:200], cause=error) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        # The library parses the answer without checks.
        raise FormatError(f"the hub's answer about a repository is malformed: {error}"[:300], uri=uri) from error
