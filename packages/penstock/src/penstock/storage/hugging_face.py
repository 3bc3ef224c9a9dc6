"""The Hugging Face hub as storage: `hf://[datasets/]org/name[@revision][/file]`, streamed or from its local cache.

Tokens, endpoints and the cache are those of huggingface_hub. This module sends its own requests, because the library
limits neither the size nor the time of a response.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

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
    SourceUnavailable,
)
from penstock.storage.files import FileSource
from penstock.storage.http import PlainOrigin
from penstock.storage.repository import COMMIT, RepositoryAddress, RepositoryFile, RepositoryStorage, ask_hub, file_of

# Source: save_torch_state_dict of huggingface_hub.
_SHARD = re.compile(r"(?P<model>.*)-\d+-of-(?P<total>\d{1,6})(?P<suffix>\.\w+)")
_SIGN_IN = "HF_TOKEN, or `hf auth login`"
_NO_ANSWER = "check the network and HF_ENDPOINT; HF_HUB_OFFLINE=1 reads only the local cache"


class _Lfs(msgspec.Struct):
    sha256: str


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = None
    lfs: _Lfs | None = None
    blobId: str | None = None


class _Info(msgspec.Struct):
    sha: str | None = None
    siblings: list[_Sibling] | None = None


class HuggingFaceStorage(RepositoryStorage):
    """The storage for hf://. Pinned revisions are commits."""

    scheme = "hf"
    sign_in = _SIGN_IN

    def list_revision(
        self, where: RepositoryAddress, settings: Settings, options: Mapping[str, str], *, is_new: bool
    ) -> tuple[str, Mapping[str, RepositoryFile]]:
        """See `RepositoryStorage.list_revision`."""
        hub = library()
        if hub.constants.HF_HUB_OFFLINE:
            place = ("", where.kind, where.name, str(hub.constants.HF_HUB_CACHE))
            if where.revision is not None and not is_new and (found := self.listed(*place, where.revision)):
                return where.revision, found
            return self.keep(place, *_cached_listing(where))
        token = _token(options)
        api = hub.HfApi(endpoint=options.get("endpoint"), token=token or False)
        # The key includes the token, because another user may see more repositories.
        key = (api.endpoint, where.kind, where.name, token or "")
        # Branches and tags may move, so only listings of commits are cached.
        if where.revision is not None and (found := self.listed(*key, where.revision)):
            return where.revision, found
        uri = where.repository if where.revision is None else f"{where.repository}@{where.revision}"
        try:
            hub.utils.validate_repo_id(where.name)
        except hub.errors.HFValidationError as error:
            message, hint = f"the repository's name is invalid: {error}", "write it as hf://org/name"
            raise ConfigError(message, uri=uri, hint=hint) from error
        revision = "" if where.revision is None else f"/revision/{quote(where.revision, safe='')}"
        url = f"{api.endpoint}/api/{where.kind}s/{where.name}{revision}?blobs=True"
        try:
            status, headers, info = ask_hub(url, _Info, token=token or "", uri=uri, settings=settings)
        except SourceUnavailable as error:
            message = f"cannot list the repository at {api.endpoint}: {error.message}"
            raise SourceUnavailable(message, uri=uri, hint=error.hint or _NO_ANSWER) from error
        if info is None:
            raise _refusal(status, headers, uri, where, api.endpoint)
        commit = str(info.sha)
        if not COMMIT.fullmatch(commit):
            raise FormatError("the hub's response has no commit", uri=uri)
        files = dict(
            file_of(entry.rfilename, entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blobId, uri)
            for entry in info.siblings or ()
        )
        return self.keep(key, commit, files)

    def open_cached(self, where: RepositoryAddress, revision: str, file: RepositoryFile) -> FileSource | None:
        """See `RepositoryStorage.open_cached`."""
        # `penstock_hf.patched_libraries` wraps the function to find files outside the cache too.
        look_up = inspect.unwrap(library().try_to_load_from_cache)
        found = look_up(where.name, where.path, revision=revision, repo_type=where.kind)
        return FileSource.open(found) if isinstance(found, str) else None

    def origin_of(
        self, where: RepositoryAddress, revision: str, options: Mapping[str, str]
    ) -> tuple[PlainOrigin, str, bool]:
        """See `RepositoryStorage.origin_of`."""
        url = library().hf_hub_url(
            where.name, where.path, repo_type=where.kind, revision=revision, endpoint=options.get("endpoint")
        )
        token = _token(options)
        origin = PlainOrigin(url, {"bearer_token": token} if token else {})
        return origin, url.partition("/resolve/")[0], token is not None

    def home(self) -> Path:
        """See `RepositoryStorage.home`."""
        return Path(library().constants.HF_HOME)

    def require_complete(self, where: RepositoryAddress, revision: str, paths: Sequence[str]) -> None:
        """Raise NotFound if the hub is offline and the local cache holds an incomplete model."""
        if not library().constants.HF_HUB_OFFLINE:
            return
        # Without an index, the present shards would be loaded as the whole model.
        shards = Counter(match.group("model", "total", "suffix") for match in map(_SHARD.fullmatch, paths) if match)
        for (_, total, suffix), count in shards.items():
            if count != int(total):
                message = f"HF_HUB_OFFLINE is set, but the local cache has {count} of {int(total)} *{suffix} files"
                hint = "unset HF_HUB_OFFLINE, or download the repository while online"
                raise NotFound(message, uri=where.at(revision, where.path), hint=hint)


def typed_error(error: BaseException) -> PenstockError | None:
    """Return Penstock's error for an error from huggingface_hub that names a URL, otherwise None."""
    errors = library().errors
    if not isinstance(error, errors.HfHubHTTPError):
        return None
    url = str(error.response.request.url).partition("?")[0]
    match = re.search(r"(?P<endpoint>.*)/(?P<name>[\w.-]+/[\w.-]+)/resolve/(?P<commit>[^/]+)/(?P<path>.+)", url)
    uri = f"hf://{match['name']}@{match['commit']}/{match['path']}" if match else url
    where = RepositoryAddress(scheme="hf", kind="model", name=match["name"] if match else "", revision=None, path="")
    return _refusal(error.response.status_code, error.response.headers, uri, where, match["endpoint"] if match else url)


def library() -> Any:
    """Return huggingface_hub. Raises MissingExtra if huggingface_hub is not installed."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.file_download
        import huggingface_hub.utils
    except ImportError as error:
        raise MissingExtra("hf:// needs huggingface_hub", hint=install_hint("hf")) from error
    return huggingface_hub


def _token(options: Mapping[str, str]) -> str | None:
    """Return the token from the caller or from huggingface_hub, unless the user has forbidden implicit tokens."""
    token = options.get("token")
    # An empty token disables tokens, like `token=False` in the library.
    if token is not None:
        return token or None
    hub = library()
    return None if hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else hub.get_token()


def _cached_listing(where: RepositoryAddress) -> tuple[str, Mapping[str, RepositoryFile]]:
    hub = library()
    try:
        root = Path(
            hub.snapshot_download(where.name, repo_type=where.kind, revision=where.revision, local_files_only=True)
        )
    except (hub.errors.LocalEntryNotFoundError, ValueError) as error:
        hint = f"unset HF_HUB_OFFLINE, or download it while online: hf download {where.name}"
        message = "HF_HUB_OFFLINE is set, but the local cache does not have this revision"
        raise NotFound(message, uri=where.repository, hint=hint) from error
    files = {}
    for path in root.rglob("*"):
        if path.is_file():
            # The cache names files after the hub's digests.
            blob = path.resolve().name
            sha = blob if re.fullmatch("[0-9a-f]{64}", blob) else None
            files[str(path.relative_to(root))] = RepositoryFile(
                nbytes=path.stat().st_size, sha256=sha, identity=sha or f"git:{blob}"
            )
    return root.name, files


def _refusal(
    status: int, headers: Mapping[str, str], uri: str, where: RepositoryAddress, endpoint: str
) -> PenstockError:
    """Return the error for a refusal. Source: huggingface_hub, `hf_raise_for_status`."""
    named = {name.lower(): value for name, value in headers.items()}
    code, message = named.get("x-error-code", ""), named.get("x-error-message", "")
    if code == "GatedRepo":
        hint = f"accept its conditions at {endpoint}/{where.name} and set HF_TOKEN, or run `hf auth login`"
        return PermissionDenied("the repository is gated", uri=uri, hint=hint)
    if code == "RevisionNotFound":
        return NotFound("the repository has no such revision", uri=uri, hint="name a branch, a tag or a full commit")
    # The hub replies 401 for an absent repository if the caller sent no token.
    is_hidden = status == 401 and message != "Invalid credentials in Authorization header"
    if code == "RepoNotFound" or is_hidden:
        hint = "check the name; a private repository needs HF_TOKEN, or `hf auth login`"
        return NotFound(f"there is no such repository at {endpoint}", uri=uri, hint=hint)
    if status in {401, 403}:
        hint = "check the token (HF_TOKEN, or `hf auth whoami`) and its permissions"
        return PermissionDenied(f"the hub answered HTTP {status}", uri=uri, hint=hint)
    return SourceUnavailable(f"the hub answered HTTP {status}", uri=uri)
