"""The hub of ModelScope as a storage: `ms://[datasets/]org/name[@revision][/file]`, streamed or from its local cache.

In: the environment by modelscope's names (`MODELSCOPE_API_TOKEN`, `MODELSCOPE_ENDPOINT`, `MODELSCOPE_CACHE`). Out:
listings, URLs, files of the local cache.
Not here: what hubs have in common (`repository`).

Requests about a repository, tokens, endpoints and the cache are the library's; only ranges of files are read here.

The library tells no commit for a branch. So a pinned revision is the branch and a digest of its listing,
`master~3f2a...`: the listing has the SHA-256 of every file, and one that is not the pinned one is SourceChanged.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from penstock.storage.files import FileSource
from penstock.storage.http import PlainAddress
from penstock.storage.repository import COMMIT, Address, RepositoryFile, RepositoryStorage, file_of
from penstock.types import MIB

logger = logging.getLogger(__name__)

_DEFAULT_REVISION = "master"
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
        self, where: Address, settings: Settings, options: Mapping[str, str], *, is_new: bool
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
            entries = hub.list_repo_files(where.name, where.kind, revision=revision)
            files = dict(
                file_of(entry.path, entry.size, entry.sha256 or None, entry.blob_id, uri)
                for entry in entries
                if not entry.is_dir
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

    def open_cached(self, where: Address, revision: str, file: RepositoryFile) -> FileSource | None:
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

    def address_of(self, where: Address, revision: str, options: Mapping[str, str]) -> tuple[PlainAddress, str, bool]:
        """See `RepositoryStorage.address_of`."""
        with _mapped(where.at(revision, where.path), where):
            hub = _hub(where, options)
            name = revision.partition(_MARK)[0]
            url = hub.legacy.get_download_url(where.name, where.kind, where.path, name)
            token = hub.legacy.token
        # As the library: older servers know the cookie alone. A token that cannot be one is refused by the server.
        cookie = f"m_session_id={token}" if token and re.fullmatch(r"[\w.~+/=-]+", token) else ""
        page = f"{hub.legacy.endpoint}/{where.kind}s/{where.name}"
        return PlainAddress(url, {"bearer_token": token} if token else {}, cookie=cookie), page, bool(token)

    def home(self) -> Path:
        """See `RepositoryStorage.home`."""
        return Path(_library().HubConfig().cache_dir)

    def require_complete(self, where: Address, revision: str, paths: Sequence[str]) -> None:
        """Return: a listing is always the hub's, never the cache's."""


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


def _hub(where: Address, options: Mapping[str, str]) -> Any:
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
def _mapped(uri: str, where: Address) -> Iterator[None]:
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
        hint = "check the network and MODELSCOPE_ENDPOINT"
        raise SourceUnavailable(message, uri=uri, hint=hint) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        # The library parses the answer without checks.
        raise FormatError(f"the hub's answer about {where.name} is malformed: {error}"[:300], uri=uri) from error
