"""The hub of ModelScope as a storage: `ms://[datasets/]org/name[@revision][/file]`, streamed or from its local cache.

In: the environment by modelscope's names (`MODELSCOPE_API_TOKEN`, `MODELSCOPE_ENDPOINT`, `MODELSCOPE_CACHE`). Out:
listings, URLs, files of the local cache.
Not here: what hubs have in common (`repository`).

Tokens, endpoints and the cache are the library's. Requests are made here: see `_Listing`.

The library tells no commit for a branch. So a pinned revision is the branch and a digest of its listing,
`master~3f2a...`: the listing has the SHA-256 of every file, and one that is not the pinned one is SourceChanged.
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
from penstock.storage.http import PlainAddress
from penstock.storage.repository import COMMIT, RepositoryAddress, RepositoryFile, RepositoryStorage, ask_hub, file_of
from penstock.types import MIB

logger = log_named(__name__)

_DEFAULT_REVISION = "master"
_NO_ANSWER = "check the network and MODELSCOPE_ENDPOINT"
_SIGN_IN = "MODELSCOPE_API_TOKEN, or `modelscope login`"
# Not a letter of git's branches and tags. Source: git-check-ref-format(1).
_MARK = "~"
# Of the digest in a pinned revision: 64 bits tell the states of one branch apart.
_DIGEST_LETTERS = 16


class ModelScopeStorage(RepositoryStorage):
    """The storage of ms://; see `RepositoryStorage`."""

    scheme = "ms"
    sign_in = _SIGN_IN

    def list_revision(
        self, where: RepositoryAddress, settings: Settings, options: Mapping[str, str], *, is_new: bool
    ) -> tuple[str, Mapping[str, RepositoryFile]]:
        """See `RepositoryStorage.list_revision`."""
        if where.kind == "space":
            raise ConfigError("ModelScope has no spaces", uri=where.repository, hint="ms://[datasets/]org/name")
        revision, _, pinned = (where.revision or _DEFAULT_REVISION).partition(_MARK)
        uri = where.at(revision, "")
        with _mapped(uri, where):
            hub = _hub(where, options)
            # Of this token: a listing must not be shown to a user who may not see the repository.
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
            self.keep(*key, revision, files=files)
            return revision, files
        listing = "".join(f"{name}\0{file.nbytes}\0{file.identity}\n" for name, file in sorted(files.items()))
        digest = hashlib.sha256(listing.encode()).hexdigest()[:_DIGEST_LETTERS]
        if pinned not in {"", digest}:
            raise SourceChanged(f"{revision} has moved since it was pinned", uri=where.at(where.revision or "", ""))
        self.keep(*key, f"{revision}{_MARK}{digest}", files=files)
        return f"{revision}{_MARK}{digest}", files

    def open_cached(self, where: RepositoryAddress, revision: str, file: RepositoryFile) -> FileSource | None:
        """See `RepositoryStorage.open_cached`.

        The cache names branches, not contents: a file is compared with the listing's SHA-256 once in a process, which
        reads it from the disk once more. Another content is not used.
        """
        name = revision.partition(_MARK)[0]
        library = _library()
        try:
            path = library.HubApi(config=library.HubConfig()).download_file(
                where.name, where.kind, where.path, revision=name, local_files_only=True
            )
        except (library.errors.HubError, ValueError):
            return None
        source = FileSource(str(path))
        if source.identity in self._compared:
            return source
        if source.nbytes != file.nbytes or file.sha256 is None or _sha256_of(source) != file.sha256:
            logger.warning("%s is of another state of %s; it is read from the hub", path, where.at(revision, ""))
            source.close()
            return None
        self._compared.add(source.identity)
        return source

    def address_of(
        self, where: RepositoryAddress, revision: str, options: Mapping[str, str]
    ) -> tuple[PlainAddress, str, bool]:
        """See `RepositoryStorage.address_of`."""
        with _mapped(where.at(revision, where.path), where):
            hub = _hub(where, options)
            name = revision.partition(_MARK)[0]
            url = hub.legacy.get_download_url(where.name, where.kind, where.path, name)
            token = hub.legacy.token
        page = f"{hub.legacy.endpoint}/{where.kind}s/{where.name}"
        return (
            PlainAddress(url, {"bearer_token": token} if token else {}, cookie=_cookie(token or "")),
            page,
            bool(token),
        )

    def home(self) -> Path:
        """See `RepositoryStorage.home`."""
        return Path(_library().HubConfig().cache_dir)

    def require_complete(self, where: RepositoryAddress, revision: str, paths: Sequence[str]) -> None:
        """Return: a listing is always the hub's, never the cache's."""


class _Entry(msgspec.Struct):
    """A file or a directory, as the hub lists it."""

    Path: str
    Size: int = 0
    Sha256: str | None = None
    BlobId: str | None = None
    Type: str = "blob"


class _Files(msgspec.Struct):
    """The inner part of an answer."""

    Files: list[_Entry] | None = None


class _Answer(msgspec.Struct):
    """The hub's answer about the files of a revision."""

    Data: _Files | list[_Entry] | None = None


# The hub sends no more files of a model at once, and does not say when it left some out. Source: modelscope_hub,
# `REPO_FILES_TRUNCATION_LIMIT`.
_MOST_FILES = 3000
# Files of a data set in one answer. Source: modelscope_hub, `list_dataset_files_paginated`.
_PAGE = 200
# Requests for one listing. Reason: 200,000 files of a data set.
_MOST_REQUESTS = 1000


class _Listing:
    """The requests for the files of one revision. The library's own send the token to any port of the host."""

    def __init__(self, endpoint: str, token: str, where: RepositoryAddress, revision: str, settings: Settings) -> None:
        what = "tree" if where.kind == "dataset" else "files"
        self._url = f"{endpoint}/api/v1/{where.kind}s/{where.name}/repo/{what}"
        self._token = token
        self._where = where
        self._revision = revision
        self._settings = settings
        self._uri = where.at(revision, "")
        self._num_requests = 0

    def entries(self) -> list[_Entry]:
        """Return all files and directories. Raises as `RepositoryStorage.list_revision`."""
        return self._pages() if self._where.kind == "dataset" else self._below("")

    def _pages(self) -> list[_Entry]:
        found: list[_Entry] = []
        while True:
            page = self._ask(Recursive="True", PageNumber=str(len(found) // _PAGE + 1), PageSize=str(_PAGE))
            found += page
            # A longer page would never end the row of pages.
            if len(page) != _PAGE:
                return found

    def _below(self, root: str) -> list[_Entry]:
        """Return what is below a directory, by one request or one for each directory in it."""
        named = {"Root": root} if root else {}
        found = self._ask(Recursive="True", **named)
        if len(found) < _MOST_FILES:
            return found
        found = self._ask(Recursive="False", **named)
        if len(found) >= _MOST_FILES:
            raise FormatError(f"the directory {root or '/'!r} has more files than the hub lists", uri=self._uri)
        directories = [entry.Path for entry in found if entry.Type == "tree" and entry.Path != root]
        return found + [entry for directory in directories for entry in self._below(directory)]

    def _ask(self, **parameters: str) -> list[_Entry]:
        self._num_requests += 1
        if self._num_requests > _MOST_REQUESTS:
            raise FormatError(f"its listing takes more than {_MOST_REQUESTS} requests", uri=self._uri)
        url = f"{self._url}?{urlencode({'Revision': self._revision, **parameters})}"
        try:
            status, _, answer = ask_hub(
                url,
                _Answer,
                token=self._token,
                cookie=_cookie(self._token),
                uri=self._uri,
                settings=self._settings,
            )
        except SourceUnavailable as error:
            message = f"no answer from the hub: {error.message}"
            raise SourceUnavailable(message, uri=self._uri, hint=error.hint or _NO_ANSWER) from error
        if answer is None:
            raise _refusal(status, self._uri)
        data = answer.Data.Files if isinstance(answer.Data, _Files) else answer.Data
        return data or []


def _cookie(token: str) -> str:
    """Return the token as a cookie, which older servers know alone; empty: it cannot be one."""
    return f"m_session_id={token}" if token and re.fullmatch(r"[\w.~+/=-]+", token) else ""


def _refusal(status: int, uri: str) -> PenstockError:
    """Return the error for an answer that is a refusal."""
    if status in {401, 403}:
        hint = f"the repository may be private or gated: give a token that may read it ({_SIGN_IN})"
        return PermissionDenied(f"the hub answers HTTP {status}", uri=uri, hint=hint)
    if status == 404:
        hint = f"check the name and the revision; a private repository needs a token ({_SIGN_IN})"
        return NotFound("no such repository or revision", uri=uri, hint=hint)
    return SourceUnavailable(f"the hub answers HTTP {status}", uri=uri, hint=_NO_ANSWER)


def _library() -> Any:
    """Return the package modelscope_hub, by which modelscope speaks to its hub. MissingExtra: it is not installed."""
    try:
        import modelscope_hub
        import modelscope_hub.errors
    except ImportError as error:
        raise MissingExtra("ms:// needs modelscope", hint=install_hint("ms")) from error
    return modelscope_hub


# One for an endpoint and a token: each has connections.
_hubs: dict[tuple[str, str], Any] = {}


def _hub(where: RepositoryAddress, options: Mapping[str, str]) -> Any:
    """Return the library's client of the site that has the repository."""
    library = _library()
    # A configuration of its own: the environment may have changed since that of the process was read.
    config = library.HubConfig(endpoint=options.get("endpoint"), token=options.get("token"))
    hub = library.HubApi(config=config)
    # Of its two sites, the one that has the repository, unless the user named one.
    endpoint = hub.resolve_endpoint_for_read(where.name, repo_type=where.kind)
    key = (endpoint, hub.legacy.token or "")
    if key not in _hubs:
        _hubs[key] = library.HubApi(config=library.HubConfig(endpoint=endpoint, token=hub.legacy.token or ""))
    return _hubs[key]


def _sha256_of(source: FileSource) -> str:
    """Return the SHA-256 of a local file."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(8 * MIB))
    for start in range(0, source.nbytes, piece.nbytes):
        part = piece[: source.nbytes - start]
        source.readv(start, [part])
        digest.update(part)
    return digest.hexdigest()


@contextmanager
def _mapped(uri: str, where: RepositoryAddress) -> Iterator[None]:
    """Map the library's errors to typed ones. It has tried again itself where another attempt may help."""
    errors = _library().errors
    try:
        yield
    except PenstockError:
        raise
    except errors.NotExistError as error:
        hint = f"check the name and the revision; a private repository needs a token ({_SIGN_IN})"
        raise NotFound("no such repository or revision", uri=uri, hint=hint) from error
    except (errors.AuthenticationError, errors.PermissionDeniedError) as error:
        hint = f"the repository may be private or gated: give a token that may read it ({_SIGN_IN})"
        raise PermissionDenied(f"the hub answers HTTP {error.status_code}", uri=uri, hint=hint) from error
    except errors.InvalidParameter as error:
        raise ConfigError(f"the hub refuses the request: {error}"[:300], uri=uri) from error
    # ConnectionError and TimeoutError of the library, and those of `requests` below it, are OSErrors.
    except (errors.HubError, OSError) as error:
        message = f"no answer from the hub: {type(error).__name__}: {error}"[:300]
        raise SourceUnavailable(message, uri=uri, hint=_NO_ANSWER) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        # The library parses the answer without checks.
        raise FormatError(f"the hub's answer about {where.name} is malformed: {error}"[:300], uri=uri) from error
