"""The common part of the storages of model hubs: addresses, listings, sources that compare the hub's SHA-256.

In: a URI, `SCHEME://[KIND/]org/name[@revision][/file]`, and a hub's own part (`Hub`): its listing, its cache, its URLs.
Out: sources, listings, small files; manifests of repositories, kept beside the local cache of the hub's library.
Not here: the hubs (`hugging_face`, `model_scope`), ranges over HTTP (`http`), the digest (`file_digest`).

    hf://org/name --pin--> hf://org/name@COMMIT/file --open--> its file in the local cache, which can be mapped
                                                     `-------> ranges over HTTP: nothing is written to a disk
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

import msgspec

from penstock.config import Settings
from penstock.errors import MALFORMED, ConfigError, FormatError, NotFound, PermissionDenied, SourceUnavailable
from penstock.http.range_request import Validators
from penstock.storage.file_digest import FileDigest
from penstock.storage.files import FileSource
from penstock.storage.http import HttpSource, PlainAddress, ask, open_address
from penstock.storage.source import GLOB, MAX_SMALL_BYTES, Source, glob_pattern, read_whole
from penstock.storage.write import new_file, typed

_URI = re.compile(
    r"(?P<scheme>\w+)://(?:(?P<kind>datasets|models|spaces)/)?(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<rest>.+)|/(?P<path>.*))?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
"""A revision that never moves."""
# A revision with slashes is written with %2F; the hub's own references of pull requests and conversions need not be.
_REVISION = re.compile(r"(?P<revision>refs/(?:pr/\d+|convert/[\w.-]+)|[^/]+)(?:/(?P<path>.*))?")
# Listings of commits that stay: a commit never changes, and one takes a few hundred bytes a file.
_LISTINGS = 64
# Names that these storages keep beside the repository, in the user's own cache: a hub is not written to.
_OWN = ("penstock.manifest", "penstock.manifest.sig")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryFile:
    """A file of one commit, as the hub lists it."""

    nbytes: int
    """-1: a mirror lists no sizes."""
    sha256: str | None
    """Digest of the content; None for a small file that is in git itself."""
    identity: str
    """The hub's name of the content: SHA-256, or git's blob id; empty where a mirror lists neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryAddress:
    """The parts of a repository's URI."""

    scheme: str
    kind: str
    """`model`, `dataset` or `space`."""
    name: str
    revision: str | None
    path: str

    @property
    def repository(self) -> str:
        """Return the URI of the repository, without revision and path."""
        return f"{self.scheme}://{'' if self.kind == 'model' else f'{self.kind}s/'}{self.name}"

    def at(self, revision: str, path: str) -> str:
        """Return the URI of a file or directory of a revision."""
        # Commits have nothing to quote.
        return f"{self.repository}@{quote(revision, safe='~')}{f'/{path}' if path else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Files of one commit of a repository."""

    uri: str
    """As asked for, pinned."""
    root: str
    """The repository, pinned."""
    name: str
    kind: str
    """`model`, `dataset` or `space`."""
    revision: str
    commit: str
    files: Mapping[str, RepositoryFile]

    def uri_of(self, name: str) -> str:
        """Return the pinned URI of a file."""
        return f"{self.root}/{name}"


def parse(uri: str, scheme: str) -> RepositoryAddress:
    """Return the parts of a repository's URI. ConfigError if it is none."""
    hint = f"write it as {scheme}://[datasets/]org/name[@revision][/file]"
    match = _URI.fullmatch(uri)
    if match is None or match["scheme"] != scheme:
        raise ConfigError("not the URI of a repository", uri=uri, hint=hint)
    revision, path = None, match["path"] or ""
    if match["rest"]:
        at = _REVISION.fullmatch(match["rest"])
        if at is None:
            raise ConfigError("not the URI of a repository", uri=uri, hint=hint)
        revision, path = unquote(at["revision"]), at["path"] or ""
    kind = (match["kind"] or "models").removesuffix("s")
    if ".." in path.split("/") or path.startswith("/"):
        raise ConfigError("a file of a repository cannot have this name", uri=uri)
    return RepositoryAddress(scheme=scheme, kind=kind, name=match["name"], revision=revision, path=path.rstrip("/"))


MAX_LISTING_BYTES = 256 << 20
"""Longest answer of a hub about a repository: a million files of 250 bytes each."""

A = TypeVar("A")


def ask_hub(
    url: str, kind: type[A], *, token: str, cookie: str = "", uri: str, settings: Settings
) -> tuple[int, Mapping[str, str], A | None]:
    """Ask a hub about a repository; return the status, the headers and the answer. A refusal has no answer.

    The token and the cookie go to the origin of `url` only. Raises as `http.ask`; FormatError: the answer is malformed.
    """
    address = PlainAddress(url, {"bearer_token": token} if token else {}, cookie=cookie)
    status, headers, raw = ask(uri, address, limit=MAX_LISTING_BYTES, settings=settings)
    if status >= 300:
        return status, headers, None
    try:
        return status, headers, msgspec.json.decode(raw, type=kind)
    except MALFORMED as error:
        message = f"the hub's answer about a repository is malformed: {error}"
        raise FormatError(message[:300], uri=uri) from error


def file_of(name: object, nbytes: object, sha256: str | None, blob_id: object, uri: str) -> tuple[str, RepositoryFile]:
    """Return one entry of a hub's listing, checked: its name and the file. FormatError: it cannot be one."""
    # As git's names are. The names of a hub that is not to be trusted become local paths where files are copied.
    if not isinstance(name, str) or {"", ".", ".."} & set(name.split("/")):
        raise FormatError(
            f"the hub lists a file of the name {str(name)[:200]!r}, which no repository can have", uri=uri
        )
    is_digest = sha256 is None or re.fullmatch("[0-9a-f]{64}", sha256) is not None
    # Mirrors list names alone: the size is then that of the answer, and there is no digest to compare with.
    is_name_alone = nbytes is None and sha256 is None
    if not is_digest or not (is_name_alone or (isinstance(nbytes, int) and nbytes >= 0)):
        raise FormatError(f"the hub's listing of {name[:200]!r} has no valid size or digest", uri=uri)
    identity = sha256 or (f"git:{blob_id}" if blob_id else "")
    return name, RepositoryFile(nbytes=nbytes if isinstance(nbytes, int) else -1, sha256=sha256, identity=identity)


def paths_of(where: RepositoryAddress, files: Mapping[str, RepositoryFile], *, below: bool = False) -> list[str]:
    """Return the names of the files that a URI names, of a directory also those in directories below if asked."""
    # A file of this name is itself, even if it reads as a glob.
    if where.path in files:
        return [where.path]
    prefix = f"{where.path.rstrip('/')}/" if where.path else ""
    named = [path for path in files if path.startswith(prefix) and (below or "/" not in path.removeprefix(prefix))]
    # A directory of this name is itself, too.
    return named or list(filter(glob_pattern(where.path).fullmatch, files))


class RepositoryStorage(ABC):
    """The storage of a model hub. It reads; manifests of repositories are kept in the user's cache.

    `storage_options`: `token` and `endpoint`, in place of those of the environment. An empty token sends none.

    Attributes:
        scheme: of its URIs.
        sign_in: how a user shows a token to the hub, for hints.
    """

    scheme: str
    sign_in: str

    def __init__(self) -> None:
        self._listings: OrderedDict[tuple[str, ...], Mapping[str, RepositoryFile]] = OrderedDict()
        self._lock = threading.Lock()
        # Identities of files in the local cache that this process has compared with the hub's digest.
        self._compared: set[str] = set()

    @abstractmethod
    def list_revision(
        self, where: RepositoryAddress, settings: Settings, options: Mapping[str, str], *, is_new: bool
    ) -> tuple[str, Mapping[str, RepositoryFile]]:
        """Return a revision that does not move, and its files. One request, or none for one listed before.

        Args:
            where: its revision may move.
            settings, options: see `Storage.open`.
            is_new: offline, look at the local cache again: another process may have filled it meanwhile.

        Raises:
            NotFound: the repository or revision does not exist, or the hub may not be asked and it is not in the cache.
            PermissionDenied, SourceUnavailable: as their names say. MissingExtra: the hub's library is not installed.
        """

    @abstractmethod
    def open_cached(self, where: RepositoryAddress, revision: str, file: RepositoryFile) -> FileSource | None:
        """Return a file of the library's local cache; None if it is not there."""

    @abstractmethod
    def address_of(
        self, where: RepositoryAddress, revision: str, options: Mapping[str, str]
    ) -> tuple[PlainAddress, str, bool]:
        """Return where a file is read, the page of its repository for people, and whether a token is sent."""

    @abstractmethod
    def home(self) -> Path:
        """Return the directory in which the hub's library keeps what is the user's."""

    @abstractmethod
    def require_complete(self, where: RepositoryAddress, revision: str, paths: Sequence[str]) -> None:
        """Raise NotFound if the listing of a directory may have a part of a model's files."""

    def pin(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> str:
        """See `PinningStorage.pin`; raises as `list_revision`."""
        where = parse(uri, self.scheme)
        revision, _ = self._listing(where, settings, storage_options, is_new=True)
        return where.at(revision, where.path)

    def open(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> Source:
        """See `Storage.open`. A file of the local cache is opened there."""
        where = parse(uri, self.scheme)
        revision, files = self._listing(where, settings, storage_options)
        file = files.get(where.path)
        if file is None:
            raise NotFound("the repository has no such file at this revision", uri=where.at(revision, where.path))
        cached = self.open_cached(where, revision, file)
        if cached is None:
            return self._open_remote(where, revision, file, settings, storage_options)
        if cached.identity not in self._compared:
            return cached
        cached.close()
        return ComparedFile(cached.uri)

    def contents(self, uri: str, *, default: str, settings: Settings, storage_options: Mapping[str, str]) -> Contents:
        """Return the files that a URI names now, those of directories below too; raises as `list`.

        Args:
            default: the revision that a URI without one means.
        """
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
        """Note that this process has compared a file of the local cache with the hub's digest."""
        with closing(FileSource(path)) as source:
            self._compared.add(source.identity)

    def list(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> list[str]:
        """See `Storage.list`; the URIs are pinned."""
        where = parse(uri, self.scheme)
        revision, files = self._listing(where, settings, storage_options)
        paths = paths_of(where, files)
        if where.path not in files and not GLOB.search(where.path):
            self.require_complete(where, revision, paths)
        if not paths:
            raise NotFound("the repository has no such file or directory", uri=where.at(revision, where.path))
        return [where.at(revision, path) for path in sorted(paths)]

    def read_small(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> bytes | None:
        """See `Storage.read_small`. A manifest that the repository lacks is looked for in the user's cache."""
        where = parse(uri, self.scheme)
        revision, files = self._listing(where, settings, storage_options)
        if where.path in files:
            source = self.open(uri, settings=settings, storage_options=storage_options)
            return read_whole(source, stall_s=settings.stall_s)
        if not where.path.endswith(_OWN):
            return None
        path = self._own_path(where, revision)
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_SMALL_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SourceUnavailable(f"cannot be read: {error.strerror}", uri=str(path)) from error
        if len(raw) > MAX_SMALL_BYTES:
            raise FormatError("too large for a manifest", uri=str(path))
        return raw

    def write_small(self, uri: str, data: bytes, *, settings: Settings, storage_options: Mapping[str, str]) -> None:
        """Keep a repository's manifest or its signature in the user's cache, by revision.

        Raises:
            ConfigError: it is another file; this storage only reads.
            DestinationError: the cache cannot be written.
        """
        where = parse(uri, self.scheme)
        if not where.path.endswith(_OWN):
            raise ConfigError("a repository of the hub is not written to", uri=uri, hint="write to a local path")
        revision, _ = self._listing(where, settings, storage_options)
        path = self._own_path(where, revision)
        with typed(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with new_file(path, 0o600) as file:
            file.write(data)

    def listed(self, *key: str) -> Mapping[str, RepositoryFile] | None:
        """Return a listing that was kept."""
        with self._lock:
            return self._listings.get(key)

    def keep(self, *key: str, files: Mapping[str, RepositoryFile]) -> None:
        """Remember a listing, and forget the oldest."""
        with self._lock:
            self._listings[key] = files
            while len(self._listings) > _LISTINGS:
                self._listings.popitem(last=False)

    def _listing(
        self, where: RepositoryAddress, settings: Settings, options: Mapping[str, str], *, is_new: bool = False
    ) -> tuple[str, Mapping[str, RepositoryFile]]:
        unknown = set(options) - {"token", "endpoint"}
        if unknown:
            message = f"storage_options {sorted(unknown)} mean nothing for {self.scheme}://"
            raise ConfigError(message, hint="token, endpoint")
        return self.list_revision(where, settings, options, is_new=is_new)

    def _own_path(self, where: RepositoryAddress, revision: str) -> Path:
        folder = f"{where.kind}s--{where.name.replace('/', '--')}"
        return self.home() / "penstock" / folder / revision.replace("/", "--") / where.path.replace("/", "--")

    def _open_remote(
        self,
        where: RepositoryAddress,
        revision: str,
        file: RepositoryFile,
        settings: Settings,
        options: Mapping[str, str],
    ) -> Source:
        """Open a file for streaming; the redirect to signed storage is followed, and again when it expires."""
        uri = where.at(revision, where.path)
        address, page, has_token = self.address_of(where, revision, options)
        try:
            source = open_address(
                uri, address, lambda seen: HubSource(file, address, seen, uri=uri, settings=settings), settings=settings
            )
        except PermissionDenied as error:
            hint = f"accept its conditions at {page}, and " if has_token else "it may be gated or private: "
            hint += f"give a token that may read it ({self.sign_in})"
            raise PermissionDenied(f"the hub refuses this file: {error.message}", uri=uri, hint=hint) from error
        except NotFound as error:
            raise NotFound("the hub lists this file and does not serve it", uri=uri) from error
        if file.nbytes >= 0 and source.nbytes != file.nbytes:
            source.close()
            raise FormatError(f"it has {source.nbytes} bytes; the hub lists {file.nbytes}", uri=uri)
        return source


class ComparedFile(FileSource):
    """A file of the local cache that this process has compared with the hub's digest."""

    is_checked = True
    """See `Digested`."""

    def check_whole(self) -> bool:
        """See `Digested`."""
        return True


class HubSource(HttpSource):
    """A file of the hub, streamed; its SHA-256 is compared while it is read, if `check_whole` was called."""

    def __init__(
        self, file: RepositoryFile, address: PlainAddress, seen: Validators, *, uri: str, settings: Settings
    ) -> None:
        super().__init__(uri, address, seen, settings=settings)
        # Without a name of the content, that of the server: its ETag.
        if file.identity:
            self.identity = f"hf:{file.identity}"
        self.sha256 = file.sha256
        self._digest = None if file.sha256 is None else FileDigest(file.sha256, self.nbytes, uri, settings.stall_s)

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

    def leave_unchecked(self) -> None:
        """Hash nothing more: the reader of this source compares the digest itself."""
        if self._digest is not None:
            self._digest.abandon()

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
