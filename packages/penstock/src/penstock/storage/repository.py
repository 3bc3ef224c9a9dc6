"""Common code for model hubs as storage: addresses, listings, and sources that check the hub's SHA-256.

A URI is `SCHEME://[KIND/]org/name[@revision][/file]`. A pinned file is opened in the local cache of the hub's library,
or streamed over HTTP without being written to disk. Manifests of repositories are stored next to this cache.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

import msgspec

from penstock.config import Settings
from penstock.errors import MALFORMED, ConfigError, FormatError, NotFound, PermissionDenied, SourceUnavailable
from penstock.http.range_request import Validators
from penstock.storage.file_digest import FileDigest, HashedReads
from penstock.storage.files import FileSource
from penstock.storage.http import HttpSource, PlainOrigin, ask, open_origin
from penstock.storage.source import GLOB, MAX_SMALL_BYTES, Source, glob_pattern, read_whole
from penstock.storage.write import new_file, typed

_URI = re.compile(
    r"(?P<scheme>\w+)://(?:(?P<kind>datasets|models|spaces)/)?(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<rest>.+)|/(?P<path>.*))?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
"""A revision that never moves."""
# A slash in a revision is written as %2F, except in the hub's references to pull requests and conversions.
_REVISION = re.compile(r"(?P<revision>refs/(?:pr/\d+|convert/[\w.-]+)|[^/]+)(?:/(?P<path>.*))?")
# Number of cached listings, each with a few hundred bytes per file.
_LISTINGS = 64
# Files that are stored in the user's cache and not on the hub.
_KEPT_LOCALLY = ("penstock.manifest", "penstock.manifest.sig")


class RepositoryFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file in a commit, as the hub lists it."""

    nbytes: int
    """Size in bytes, or -1 if a mirror lists no sizes."""
    sha256: str | None
    """Digest of the content. None for a small file that git stores itself."""
    identity: str
    """SHA-256 or git's blob id. Empty if a mirror lists neither."""


class RepositoryAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The components of a repository's URI."""

    scheme: str
    kind: str
    name: str
    revision: str | None
    path: str

    @property
    def repository(self) -> str:
        """The URI of the repository, without revision and path."""
        return f"{self.scheme}://{'' if self.kind == 'model' else f'{self.kind}s/'}{self.name}"

    def at(self, revision: str, path: str) -> str:
        """Return the URI of a file or directory at a revision."""
        return f"{self.repository}@{quote(revision, safe='~')}{f'/{path}' if path else ''}"


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """The files that a URI names in one commit of a repository."""

    uri: str
    """The requested URI, pinned to the commit."""
    root: str
    """The repository's URI, pinned to the commit."""
    name: str
    kind: str
    revision: str
    commit: str
    files: Mapping[str, RepositoryFile]

    def uri_of(self, name: str) -> str:
        """Return the pinned URI of a file."""
        return f"{self.root}/{name}"


def parse(uri: str, scheme: str) -> RepositoryAddress:
    """Split a repository's URI into its components. Raises ConfigError if the URI is malformed."""
    hint = f"write it as {scheme}://[datasets/]org/name[@revision][/file]"
    match = _URI.fullmatch(uri)
    if match is None or match["scheme"] != scheme:
        raise ConfigError("the URI does not name a repository", uri=uri, hint=hint)
    revision, path = None, match["path"] or ""
    if match["rest"]:
        at = _REVISION.fullmatch(match["rest"])
        if at is None:
            raise ConfigError("the URI does not name a repository", uri=uri, hint=hint)
        revision, path = unquote(at["revision"]), at["path"] or ""
    kind = (match["kind"] or "models").removesuffix("s")
    if ".." in path.split("/") or path.startswith("/"):
        raise ConfigError("a file in a repository cannot have this name", uri=uri)
    return RepositoryAddress(scheme=scheme, kind=kind, name=match["name"], revision=revision, path=path.rstrip("/"))


MAX_LISTING_BYTES = 256 << 20
"""Maximum response of a hub, a million files of 250 bytes each."""

A = TypeVar("A")


def ask_hub(
    url: str, kind: type[A], *, token: str, cookie: str = "", uri: str, settings: Settings
) -> tuple[int, Mapping[str, str], A | None]:
    """Send a request to a hub. Return status, headers, and the response, which is None after a refusal.

    Token and cookie go only to the host in `url`. Raises the errors of `http.ask`, or FormatError for bad data.
    """
    origin = PlainOrigin(url, {"bearer_token": token} if token else {}, cookie=cookie)
    status, headers, raw = ask(uri, origin, limit=MAX_LISTING_BYTES, settings=settings)
    if status >= 300:
        return status, headers, None
    try:
        return status, headers, msgspec.json.decode(raw, type=kind)
    except MALFORMED as error:
        raise FormatError(f"the hub's response about a repository is malformed: {error}"[:300], uri=uri) from error


def file_of(name: object, nbytes: object, sha256: str | None, blob_id: object, uri: str) -> tuple[str, RepositoryFile]:
    """Return the name and file of one entry in a hub's listing. Raises FormatError if the entry is invalid."""
    # Accept only names that git allows, because names from an untrusted hub become local paths.
    if not isinstance(name, str) or {"", ".", ".."} & set(name.split("/")):
        raise FormatError(f"the hub lists the file name {str(name)[:200]!r}, which no repository can have", uri=uri)
    is_digest = sha256 is None or re.fullmatch("[0-9a-f]{64}", sha256) is not None
    # Mirrors may list only names. The size then comes from the response, and no digest is checked.
    is_name_alone = nbytes is None and sha256 is None
    if not is_digest or not (is_name_alone or (isinstance(nbytes, int) and nbytes >= 0)):
        raise FormatError(f"the hub's listing has no valid size or digest for {name[:200]!r}", uri=uri)
    identity = sha256 or (f"git:{blob_id}" if blob_id else "")
    return name, RepositoryFile(nbytes=nbytes if isinstance(nbytes, int) else -1, sha256=sha256, identity=identity)


def paths_of(where: RepositoryAddress, files: Mapping[str, RepositoryFile], *, below: bool = False) -> list[str]:
    """Return the names of the files at an address. `below` includes files in subdirectories."""
    # A file or directory with this exact name takes precedence over a glob.
    if where.path in files:
        return [where.path]
    prefix = f"{where.path.rstrip('/')}/" if where.path else ""
    named = [path for path in files if path.startswith(prefix) and (below or "/" not in path.removeprefix(prefix))]
    return named or list(filter(glob_pattern(where.path).fullmatch, files))


class RepositoryStorage(ABC):
    """A model hub as read-only storage. Manifests of repositories are stored in the user's cache.

    The options `token` and `endpoint` in `storage_options` replace the values from the environment. With an empty
    token, no token is sent.
    """

    scheme: str
    sign_in: str
    """How a user signs in to the hub, for hints."""

    def __init__(self) -> None:
        self._listings: OrderedDict[tuple[str, ...], Mapping[str, RepositoryFile]] = OrderedDict()
        self._lock = threading.Lock()
        # Identities of cached files that this process has compared with the hub's digest.
        self._compared: set[str] = set()

    @abstractmethod
    def list_revision(
        self, where: RepositoryAddress, settings: Settings, options: Mapping[str, str], *, is_new: bool
    ) -> tuple[str, Mapping[str, RepositoryFile]]:
        """Return a fixed revision and its files, with at most one request. Raises SourceError or MissingExtra.

        If the hub is offline and `is_new` is True, read the local cache again, which another process may have filled.
        """

    @abstractmethod
    def open_cached(self, where: RepositoryAddress, revision: str, file: RepositoryFile) -> FileSource | None:
        """Return a file from the library's local cache, or None if it is absent."""

    @abstractmethod
    def origin_of(
        self, where: RepositoryAddress, revision: str, options: Mapping[str, str]
    ) -> tuple[PlainOrigin, str, bool]:
        """Return the origin of a file, the web page of its repository, and whether a token is sent."""

    @abstractmethod
    def home(self) -> Path:
        """Return the directory in which the hub's library stores this user's files."""

    @abstractmethod
    def require_complete(self, where: RepositoryAddress, revision: str, paths: Sequence[str]) -> None:
        """Raise NotFound if a directory's listing may be incomplete."""

    def pin(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> str:
        """See `PinningStorage.pin`. Raises the same errors as `list_revision`."""
        where = parse(uri, self.scheme)
        revision, _ = self._listing(where, settings, storage_options, is_new=True)
        return where.at(revision, where.path)

    def open(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> Source:
        """See `Storage.open`. A cached file is opened in the local cache."""
        where = parse(uri, self.scheme)
        revision, files = self._listing(where, settings, storage_options)
        file = files.get(where.path)
        if file is None:
            uri = where.at(revision, where.path)
            raise NotFound("the repository has no such file at this revision", uri=uri)
        if (cached := self.open_cached(where, revision, file)) is not None:
            if cached.identity not in self._compared:
                return cached
            cached.close()
            return ComparedFile.open(cached.uri)
        uri = where.at(revision, where.path)
        origin, page, has_token = self.origin_of(where, revision, storage_options)
        try:
            source = open_origin(
                uri, origin, lambda seen: HubSource(file, origin, seen, uri=uri, settings=settings), settings=settings
            )
        except PermissionDenied as error:
            hint = f"accept its conditions at {page}, and " if has_token else "it may be gated or private: "
            hint += f"use a token that may read it ({self.sign_in})"
            raise PermissionDenied(f"the hub refuses to send this file: {error.message}", uri=uri, hint=hint) from error
        except NotFound as error:
            raise NotFound("the hub lists this file but does not serve it", uri=uri) from error
        if file.nbytes >= 0 and source.nbytes != file.nbytes:
            source.close()
            raise FormatError(f"the file has {source.nbytes} bytes, but the hub lists {file.nbytes}", uri=uri)
        return source

    def contents(self, uri: str, *, default: str, settings: Settings, storage_options: Mapping[str, str]) -> Contents:
        """Return the files that a URI names now, also in subdirectories. `default` replaces a missing revision."""
        where = parse(uri, self.scheme)
        revision, files = self._listing(where, settings, storage_options, is_new=True)
        named = {path: files[path] for path in paths_of(where, files, below=True)}
        if not named:
            raise NotFound("the repository has no such file or directory", uri=where.at(revision, where.path))
        return Contents(
            uri=where.at(revision, where.path),
            root=where.at(revision, ""),
            name=where.name,
            kind=where.kind,
            revision=where.revision or default,
            commit=revision,
            files=named,
        )

    def trust(self, path: str) -> None:
        """Record that this process has compared a file in the local cache with the hub's digest."""
        with closing(FileSource.open(path)) as source:
            self._compared.add(source.identity)

    def list(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> list[str]:
        """See `Storage.list`. The returned URIs are pinned."""
        where = parse(uri, self.scheme)
        revision, files = self._listing(where, settings, storage_options)
        paths = paths_of(where, files)
        if where.path not in files and not GLOB.search(where.path):
            self.require_complete(where, revision, paths)
        if not paths:
            raise NotFound("the repository has no such file or directory", uri=where.at(revision, where.path))
        return [where.at(revision, path) for path in sorted(paths)]

    def read_small(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> bytes | None:
        """See `Storage.read_small`. If the repository has no manifest, read it from the user's cache."""
        where = parse(uri, self.scheme)
        revision, files = self._listing(where, settings, storage_options)
        if where.path in files:
            source = self.open(uri, settings=settings, storage_options=storage_options)
            return read_whole(source, stall_s=settings.stall_s)
        if not where.path.endswith(_KEPT_LOCALLY):
            return None
        path = self._own_path(where, revision)
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_SMALL_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SourceUnavailable(f"cannot read the file: {error.strerror}", uri=str(path)) from error
        if len(raw) > MAX_SMALL_BYTES:
            raise FormatError("the file is too large for a manifest", uri=str(path))
        return raw

    def write_small(self, uri: str, data: bytes, *, settings: Settings, storage_options: Mapping[str, str]) -> None:
        """Store a manifest or signature in the user's cache for its revision. Raises ConfigError for any other file."""
        where = parse(uri, self.scheme)
        if not where.path.endswith(_KEPT_LOCALLY):
            raise ConfigError("a repository on the hub is read-only", uri=uri, hint="write to a local path")
        revision, _ = self._listing(where, settings, storage_options)
        path = self._own_path(where, revision)
        with typed(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with new_file(path, 0o600) as file:
            file.write(data)

    def listed(self, *key: str) -> Mapping[str, RepositoryFile] | None:
        """Return a cached listing, or None."""
        with self._lock:
            return self._listings.get(key)

    def keep(
        self, place: tuple[str, ...], revision: str, files: Mapping[str, RepositoryFile]
    ) -> tuple[str, Mapping[str, RepositoryFile]]:
        """Cache a listing, and drop the oldest listing if the cache is full. Return the revision and its files."""
        with self._lock:
            self._listings[*place, revision] = files
            while len(self._listings) > _LISTINGS:
                self._listings.popitem(last=False)
        return revision, files

    def _listing(
        self, where: RepositoryAddress, settings: Settings, options: Mapping[str, str], *, is_new: bool = False
    ) -> tuple[str, Mapping[str, RepositoryFile]]:
        unknown = set(options) - {"token", "endpoint"}
        if unknown:
            message = f"storage_options {sorted(unknown)} are unknown for {self.scheme}://"
            raise ConfigError(message, hint="use the options token and endpoint")
        return self.list_revision(where, settings, options, is_new=is_new)

    def _own_path(self, where: RepositoryAddress, revision: str) -> Path:
        folder = f"{where.kind}s--{where.name.replace('/', '--')}"
        return self.home() / "penstock" / folder / revision.replace("/", "--") / where.path.replace("/", "--")


class ComparedFile(FileSource):
    """A file in the local cache that this process has compared with the hub's digest."""

    is_checked = True

    def check_whole(self) -> bool:
        """See `Digested`."""
        return True


class HubSource(HashedReads, HttpSource):
    """A file streamed from a hub. After `check_whole`, its SHA-256 is checked during the read."""

    def __init__(
        self, file: RepositoryFile, origin: PlainOrigin, seen: Validators, *, uri: str, settings: Settings
    ) -> None:
        super().__init__(uri, origin, seen, settings=settings)
        # Without an identity from the hub, use the server's ETag.
        if file.identity:
            self.identity = f"hf:{file.identity}"
        if file.sha256 is not None:
            self._digest = FileDigest(file.sha256, self.nbytes, uri, settings.stall_s)

    def take_digest(self) -> FileDigest | None:
        """Return the digest to a caller that checks the digest itself, and stop checking it here."""
        digest, self._digest = self._digest, None
        return digest

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`."""
        return self._read_hashed(super().readv, offset, buffers)
