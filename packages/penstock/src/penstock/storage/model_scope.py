"""The ModelScope hub as storage: `ms://[datasets/]org/name[@revision][/file]`, streamed or from its local cache.

Tokens, endpoints and the cache are those of the modelscope library. The library does not return the commit of a branch,
so a pinned revision is the branch and a digest of its listing, as in `master~3f2a...`. The listing contains the SHA-256
of each file. A changed listing raises SourceChanged.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from penstock.config import Settings
from penstock.entry_points import install_hint
from penstock.errors import (
    ConfigError,
    FormatError,
    MissingExtra,
    NotFound,
    PenstockError,
    PermissionDenied,
    SourceChanged,
    SourceUnavailable,
)
from penstock.logs import log_named
from penstock.storage.files import FileSource
from penstock.storage.http import PlainOrigin
from penstock.storage.repository import COMMIT, RepositoryAddress, RepositoryFile, RepositoryStorage, ask_hub, file_of
from penstock.types import MIB

logger = log_named(__name__)

_DEFAULT_REVISION = "master"
_NO_ANSWER = "check the network and MODELSCOPE_ENDPOINT"
_SIGN_IN = "MODELSCOPE_API_TOKEN, or `modelscope login`"
# Separates branch and digest. git does not allow this character in branches and tags. Source: git-check-ref-format(1).
_MARK = "~"
# Number of hexadecimal digits of the digest in a pinned revision.
_DIGEST_LETTERS = 16


class ModelScopeStorage(RepositoryStorage):
    """The storage for ms:// URIs, see `RepositoryStorage`."""

    scheme = "ms"
    sign_in = _SIGN_IN

    def list_revision(
        self, where: RepositoryAddress, settings: Settings, options: Mapping[str, str], *, is_new: bool
    ) -> tuple[str, Mapping[str, RepositoryFile]]:
        """See `RepositoryStorage.list_revision`."""
        if where.kind == "space":
            raise ConfigError("ModelScope has no spaces", uri=where.repository, hint="write ms://[datasets/]org/name")
        revision, _, pinned = (where.revision or _DEFAULT_REVISION).partition(_MARK)
        uri = where.at(revision, "")
        with _mapped(uri, where):
            hub = _hub(where, options)
            # The key includes the token, because another user may see more repositories.
            key = (hub.legacy.endpoint, where.kind, where.name, hub.legacy.token or "")
            if where.revision is not None and (found := self.listed(*key, where.revision)):
                return where.revision, found
        requests = _Listing(hub.legacy.endpoint, hub.legacy.token or "", where, revision, settings)
        files = dict(
            file_of(entry.Path, entry.Size, entry.Sha256 or None, entry.BlobId or entry.Sha256, uri)
            for entry in requests.entries()
            if entry.Type != "tree"
        )
        if COMMIT.fullmatch(revision):
            return self.keep(key, revision, files)
        listing = "".join(f"{name}\0{file.nbytes}\0{file.identity}\n" for name, file in sorted(files.items()))
        digest = hashlib.sha256(listing.encode()).hexdigest()[:_DIGEST_LETTERS]
        if pinned not in {"", digest}:
            raise SourceChanged(f"{revision} has moved since it was pinned", uri=where.at(where.revision or "", ""))
        return self.keep(key, f"{revision}{_MARK}{digest}", files)

    def open_cached(self, where: RepositoryAddress, revision: str, file: RepositoryFile) -> FileSource | None:
        """See `RepositoryStorage.open_cached`.

        The cache identifies branches, not contents, so each file is compared once per process with the SHA-256 in the
        listing.
        """
        name = revision.partition(_MARK)[0]
        library = _library()
        try:
            path = library.HubApi(config=library.HubConfig()).download_file(
                where.name, where.kind, where.path, revision=name, local_files_only=True
            )
        except (library.errors.HubError, ValueError):
            return None
        source = FileSource.open(str(path))
        if source.identity in self._compared:
            return source
        if source.nbytes != file.nbytes or file.sha256 is None or _sha256_of(source) != file.sha256:
            logger.warning("%s differs from %s, so the file is read from the hub", path, where.at(revision, ""))
            source.close()
            return None
        self._compared.add(source.identity)
        return source

    def origin_of(
        self, where: RepositoryAddress, revision: str, options: Mapping[str, str]
    ) -> tuple[PlainOrigin, str, bool]:
        """See `RepositoryStorage.origin_of`."""
        with _mapped(where.at(revision, where.path), where):
            hub = _hub(where, options)
            name = revision.partition(_MARK)[0]
            url = hub.legacy.get_download_url(where.name, where.kind, where.path, name)
            token = hub.legacy.token
        page = f"{hub.legacy.endpoint}/{where.kind}s/{where.name}"
        return (
            PlainOrigin(url, {"bearer_token": token} if token else {}, cookie=_cookie(token or "")),
            page,
            bool(token),
        )

    def home(self) -> Path:
        """See `RepositoryStorage.home`."""
        return Path(_library().HubConfig().cache_dir)

    def require_complete(self, where: RepositoryAddress, revision: str, paths: Sequence[str]) -> None:
        """Do nothing, because a listing always comes from the hub."""


class _ListedFile(msgspec.Struct):
    Path: str
    Size: int = 0
    Sha256: str | None = None
    BlobId: str | None = None
    Type: str = "blob"


class _FileList(msgspec.Struct):
    Files: list[_ListedFile] | None = None


class _Answer(msgspec.Struct):
    Data: _FileList | list[_ListedFile] | None = None


# Maximum number of a model's files in one response. The response does not say whether it is incomplete. Source:
# modelscope_hub, `REPO_FILES_TRUNCATION_LIMIT`.
_MAX_FILES = 3000
# Number of a data set's files in one response. Source: modelscope_hub, `list_dataset_files_paginated`.
_PAGE = 200
# Maximum number of requests for one listing, which allows 200,000 files in a data set.
_MAX_REQUESTS = 1000


class _Listing:
    """The requests that list one revision. The library's own requests would send the token to any port on the host."""

    def __init__(self, endpoint: str, token: str, where: RepositoryAddress, revision: str, settings: Settings) -> None:
        listing = "tree" if where.kind == "dataset" else "files"
        self._url = f"{endpoint}/api/v1/{where.kind}s/{where.name}/repo/{listing}"
        self._token = token
        self._where = where
        self._revision = revision
        self._settings = settings
        self._uri = where.at(revision, "")
        self._num_requests = 0

    def entries(self) -> list[_ListedFile]:
        return self._pages() if self._where.kind == "dataset" else self._below("")

    def _pages(self) -> list[_ListedFile]:
        found: list[_ListedFile] = []
        while True:
            page = self._ask(Recursive="True", PageNumber=str(len(found) // _PAGE + 1), PageSize=str(_PAGE))
            found += page
            # Also stop at a page that is longer than requested, because a faulty hub might send such pages forever.
            if len(page) != _PAGE:
                return found

    def _below(self, root: str) -> list[_ListedFile]:
        named = {"Root": root} if root else {}
        found = self._ask(Recursive="True", **named)
        if len(found) < _MAX_FILES:
            return found
        found = self._ask(Recursive="False", **named)
        if len(found) >= _MAX_FILES:
            raise FormatError(f"the directory {root or '/'!r} has more files than the hub lists", uri=self._uri)
        directories = [entry.Path for entry in found if entry.Type == "tree" and entry.Path != root]
        return found + [entry for directory in directories for entry in self._below(directory)]

    def _ask(self, **parameters: str) -> list[_ListedFile]:
        self._num_requests += 1
        if self._num_requests > _MAX_REQUESTS:
            raise FormatError(f"the listing takes more than {_MAX_REQUESTS} requests", uri=self._uri)
        url = f"{self._url}?{urlencode({'Revision': self._revision, **parameters})}"
        try:
            status, _, answer = ask_hub(
                url, _Answer, token=self._token, cookie=_cookie(self._token), uri=self._uri, settings=self._settings
            )
        except SourceUnavailable as error:
            message = f"the hub does not answer: {error.message}"
            raise SourceUnavailable(message, uri=self._uri, hint=error.hint or _NO_ANSWER) from error
        if answer is None:
            raise _refusal(status, self._uri)
        data = answer.Data.Files if isinstance(answer.Data, _FileList) else answer.Data
        return data or []


def _cookie(token: str) -> str:
    return f"m_session_id={token}" if token and re.fullmatch(r"[\w.~+/=-]+", token) else ""


def _refusal(status: int, uri: str) -> PenstockError:
    if status in {401, 403}:
        hint = f"the repository may be private or gated: use a token that may read it ({_SIGN_IN})"
        return PermissionDenied(f"the hub answered HTTP {status}", uri=uri, hint=hint)
    if status == 404:
        hint = f"check the name and the revision; a private repository needs a token ({_SIGN_IN})"
        return NotFound("there is no such repository or revision", uri=uri, hint=hint)
    return SourceUnavailable(f"the hub answered HTTP {status}", uri=uri, hint=_NO_ANSWER)


def _library() -> Any:
    try:
        import modelscope_hub
        import modelscope_hub.errors
    except ImportError as error:
        raise MissingExtra("ms:// needs modelscope", hint=install_hint("ms")) from error
    return modelscope_hub


# Clients by endpoint and token. Each client keeps its connections.
_hubs: dict[tuple[str, str], Any] = {}


def _hub(where: RepositoryAddress, options: Mapping[str, str]) -> Any:
    library = _library()
    # The environment may have changed since the last call.
    config = library.HubConfig(endpoint=options.get("endpoint"), token=options.get("token"))
    hub = library.HubApi(config=config)
    # The hub has two sites, and a repository may be on either site.
    endpoint = hub.resolve_endpoint_for_read(where.name, repo_type=where.kind)
    key = (endpoint, hub.legacy.token or "")
    if key not in _hubs:
        _hubs[key] = library.HubApi(config=library.HubConfig(endpoint=endpoint, token=hub.legacy.token or ""))
    return _hubs[key]


def _sha256_of(source: FileSource) -> str:
    digest, piece = hashlib.sha256(), memoryview(bytearray(8 * MIB))
    for start in range(0, source.nbytes, piece.nbytes):
        part = piece[: source.nbytes - start]
        source.readv(start, [part])
        digest.update(part)
    return digest.hexdigest()


@contextmanager
def _mapped(uri: str, where: RepositoryAddress) -> Iterator[None]:
    errors = _library().errors
    try:
        yield
    except PenstockError:
        raise
    except errors.NotExistError as error:
        raise _refusal(404, uri) from error
    except (errors.AuthenticationError, errors.PermissionDeniedError) as error:
        raise _refusal(error.status_code or 403, uri) from error
    except errors.InvalidParameter as error:
        raise ConfigError(f"the hub refuses the request: {error}"[:300], uri=uri) from error
    # Connection errors and timeouts of the library and of `requests` are OSErrors.
    except (errors.HubError, OSError) as error:
        message = f"the hub does not answer: {type(error).__name__}: {error}"[:300]
        raise SourceUnavailable(message, uri=uri, hint=_NO_ANSWER) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        # The library parses responses without checks.
        raise FormatError(f"the hub's answer about {where.name} is malformed: {error}"[:300], uri=uri) from error
