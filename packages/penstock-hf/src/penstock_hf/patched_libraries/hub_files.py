"""Replace huggingface_hub's downloads: a *pointer file* stands in for a weight file that is missing from the cache.

`hf_hub_download`, `snapshot_download` and `try_to_load_from_cache` still return paths. For a weight file
(`*.safetensors`) that is missing from the local cache, these functions return the path of a small pointer file in a
private directory (`views`). `HubFiles.find` returns the URI with a commit that a pointer file refers to.
huggingface_hub itself downloads all other files to the cache. Any other reader rejects a pointer file, because its
first eight bytes are not a valid header length.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.errors import FormatError, PenstockError
from penstock.spi import (
    Settings,
    is_remote,
    list_uris,
    local_path,
    open_weights,
    pinned_uri,
    read_small,
    release_after_fork,
)
from penstock_hf.patched_libraries.views import make_directory, views

POINTER = b"penstock"
"""The first bytes of a pointer file. As the length of a safetensors header they mean 7.7e18, which every reader
rejects."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = ".safetensors"
# Suffixes of other weight formats. Libraries do not use these files if there are safetensors files.
_NOT_SMALL = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth"}
# Names of a model's files other than its weights, for storage that cannot be listed.
_CONFIGURATION = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True, slots=True)
class Pointer:
    """The content of a pointer file: it refers to a file on a hub or in an object store."""

    uri: str
    """URI of the file. On a hub, it includes a commit."""
    storage_options: Mapping[str, str]


class HubFiles:
    """The downloads of one context: pointer files for weights, and the directories that contain them.

    `storage_options` contains the token and the endpoint for reading weights. A call's own arguments take precedence.
    """

    def __init__(self, settings: Settings, storage_options: Mapping[str, str]) -> None:
        self._settings = settings
        self._options = dict(storage_options)
        self._pointers: dict[str, Pointer] = {}
        # Commits by cache directory, repository folder and revision, for lookups in the cache that name a branch.
        self._commits: dict[tuple[str, str, str], str] = {}
        self._lock = threading.Lock()
        # Paths of the pointer files in commit views. `directory` writes its pointer files to a separate directory.
        self._in_views: list[Path] = []
        self._root: Path | None = None
        self._pid = os.getpid()
        _alive.add(self)

    def find(self, path: str) -> Pointer | None:
        """Return the content of the pointer file at `path`, or None for any other file."""
        if not self._pointers:
            return None
        with self._lock:
            return self._pointers.get(os.path.abspath(path))

    def close(self) -> None:
        """Remove the pointer files.

        Symlinks to small files stay until the process exits, because tokenizers use them.
        """
        with self._lock:
            pointers, self._pointers = self._pointers, {}
            in_views, self._in_views = self._in_views, []
        views.remove(in_views)
        # A forked child that exits the context must not remove the files of its parent.
        if os.getpid() == self._pid:
            for path in pointers.keys() - set(map(str, in_views)):
                Path(path).unlink(missing_ok=True)

    def let_go(self) -> None:
        """Replace the lock in a forked child, because another thread of the parent may have held it."""
        self._lock = threading.Lock()

    def directory(self, uri: str) -> str:
        """Return a directory with copies of the small files at a URI, and pointer files for the weight files.

        An http(s) URL cannot be listed, so its directory contains the weights that the index names, and configuration
        files with the usual names. Raise NotFound, PermissionDenied or SourceUnavailable if the storage cannot be read.
        """
        settings, options = self._settings, self._options
        if not is_remote(uri):
            return local_path(uri)
        if uri.startswith(("http://", "https://")):
            return str(self._directory_of_urls(uri.rstrip("/")))
        root = pinned_uri(uri, settings=settings, storage_options=options).rstrip("/")
        uris = list_uris(f"{root}/**", settings=settings, storage_options=options)
        # Derive the directory name from the pinned URI, so that a second call finds the files.
        place = self._make_root() / _short_name(root)
        for name in uris:
            path = _inside(place, name.removeprefix(f"{root}/"))
            if path.suffix == _WEIGHTS:
                self._write_pointer(path, Pointer(name, options))
            elif path.suffix not in _NOT_SMALL and not path.exists():
                raw = read_small(name, settings=settings, storage_options=options)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(raw or b"")
        return str(place)

    def _directory_of_urls(self, root: str) -> Path:
        settings, options = self._settings, self._options
        with open_weights(root, settings=settings, storage_options=options) as weights:
            table, uris = weights.manifest.tensors, [source.uri for source in weights.sources]
        place = self._make_root() / _short_name(root)
        place.mkdir(exist_ok=True)
        for name in _CONFIGURATION:
            raw = read_small(f"{root}/{name}", settings=settings, storage_options=options)
            if raw is not None:
                (place / name).write_bytes(raw)
        # The original file names are unknown, so use the file names that transformers searches for.
        names = ["model.safetensors"]
        if len(uris) > 1:
            names = [f"model-{at + 1:05}-of-{len(uris):05}.safetensors" for at in range(len(uris))]
            weight_map = dict(zip(table.names, (names[at] for at in table.file_index.tolist()), strict=True))
            index = json.dumps({"metadata": {}, "weight_map": weight_map})
            (place / "model.safetensors.index.json").write_text(index)
        for name, uri in zip(names, uris, strict=True):
            self._write_pointer(place / name, Pointer(uri, options))
        return place

    def hf_hub_download(self, stock: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Return the path of one file, as `huggingface_hub.hf_hub_download` does."""
        subfolder, filename = given.get("subfolder"), given["filename"]
        path = f"{subfolder}/{filename}" if subfolder else filename
        if not path.endswith(_WEIGHTS) or not _may_stream(given):
            return stock(**given)
        repository = self._repository(given)
        if not given.get("force_download") and repository.cached(path) is not None:
            return stock(**given)
        if path not in repository.files():
            # The repository has no such file. Let the original function raise its error.
            return stock(**given)
        return self._point(repository, path)

    def snapshot_download(self, stock: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Return a directory with the files of a commit, as `huggingface_hub.snapshot_download` does."""
        if not _may_stream(given):
            return stock(**given)
        import huggingface_hub.utils

        utils: Any = huggingface_hub.utils
        repository = self._repository(given)
        patterns = {name: given.get(name) for name in ("allow_patterns", "ignore_patterns")}
        wanted = list(utils.filter_repo_objects(repository.files(), **patterns))
        is_forced = bool(given.get("force_download"))
        weights = [
            path for path in wanted if path.endswith(_WEIGHTS) and (is_forced or repository.cached(path) is None)
        ]
        if not weights:
            return stock(**given)
        if len(wanted) > len(weights):
            ignored = patterns["ignore_patterns"] or []
            ignored = [*([ignored] if isinstance(ignored, str) else ignored), *map(glob.escape, weights)]
            # Download the small files from the same commit, even if the branch has moved meanwhile.
            stock(**given | {"ignore_patterns": ignored, "revision": repository.commit})
        directory = self._directory(repository)
        views.link(repository.snapshot(), directory)
        for path in weights:
            self._point(repository, path)
        return str(directory)

    def try_to_load_from_cache(self, stock: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Return the path of a cached file or a pointer, as `huggingface_hub.try_to_load_from_cache` does."""
        found = stock(**given)
        if isinstance(found, str) or not given["filename"].endswith(_WEIGHTS):
            return found
        revision = given.get("revision") or "main"
        key = (*_place(given), str(revision))
        commit = getattr(revision, "resolved", None) or self._commits.get(key, str(revision))
        if not views.is_made:
            return found
        path = str(self._directory_of(*_place(given), commit) / given["filename"])
        with self._lock:
            return path if path in self._pointers else found

    def _repository(self, given: Mapping[str, Any]) -> _Repository:
        """Return the repository and commit that the arguments of a call refer to."""
        from huggingface_hub import HfApi

        cache_dir, folder = _place(given)
        token, endpoint = given.get("token"), given.get("endpoint")
        options = dict(self._options)
        if token is False:
            options["token"] = ""
        elif isinstance(token, str):
            options["token"] = token
        if endpoint:
            options["endpoint"] = endpoint
        kind = given.get("repo_type") or "model"
        uri = f"hf://{'' if kind == 'model' else f'{kind}s/'}{given['repo_id']}"
        revision = given.get("revision") or "main"
        commit = getattr(revision, "resolved", None)
        if commit is None and _COMMIT.fullmatch(revision):
            commit = str(revision)
        if commit is None and hasattr(HfApi, "resolve_revision"):
            # Like a download, `resolve_revision` records the branch's commit in the cache, for later use offline.
            sent = options.get("token", token)
            api = HfApi(endpoint=options.get("endpoint"), token=False if sent == "" else sent)
            commit = api.resolve_revision(
                given["repo_id"], revision=revision, repo_type=kind, cache_dir=given.get("cache_dir")
            ).resolved
        if commit is None:
            with _library_errors():
                at = pinned_uri(f"{uri}@{quote(revision, safe='')}", settings=self._settings, storage_options=options)
            commit = at.rpartition("@")[2]
        self._commits[cache_dir, folder, str(revision)] = commit
        return _Repository(f"{uri}@{commit}", commit, cache_dir, folder, options, self._settings)

    def _point(self, repository: _Repository, path: str) -> str:
        """Write the pointer file for a file in a repository, and return its path."""
        place, pointer = (
            _inside(self._directory(repository), path),
            Pointer(f"{repository.uri}/{path}", repository.options),
        )
        with self._lock:
            if str(place) not in self._pointers:
                views.add(place, _text_of(pointer))
                self._in_views.append(place)
            self._pointers[str(place)] = pointer
        return str(place)

    def _write_pointer(self, place: Path, pointer: Pointer) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            # Do not write the same pointer file again, because another thread may be about to open it.
            if self._pointers.get(str(place)) != pointer:
                place.unlink(missing_ok=True)
                place.write_bytes(_text_of(pointer))
            self._pointers[str(place)] = pointer

    def _directory(self, repository: _Repository) -> Path:
        return self._directory_of(repository.cache_dir, repository.folder, repository.commit)

    def _make_root(self) -> Path:
        """Return the parent of the directories that `directory` returns, and create the parent if it does not exist."""
        with self._lock:
            if self._root is None:
                self._root = make_directory()
            return self._root

    @staticmethod
    def _directory_of(cache_dir: str, folder: str, commit: str) -> Path:
        # Use the same layout as the cache, because libraries parse the commit from the path.
        return views.root / _short_name(cache_dir) / folder / "snapshots" / commit


_alive = release_after_fork(HubFiles.let_go)


class _Repository:
    """The commit of a repository that the arguments of a call refer to.

    Attributes:
        uri: `hf://org/name@COMMIT`.
        commit: 40 hexadecimal digits.
        cache_dir, folder: location of the repository in the cache.
        options: token and endpoint for requests.
    """

    def __init__(
        self,
        uri: str,
        commit: str,
        cache_dir: str,
        folder: str,
        options: Mapping[str, str],
        settings: Settings,
    ) -> None:
        self.uri = uri
        self.commit = commit
        self.cache_dir = cache_dir
        self.folder = folder
        self.options = options
        self._settings = settings
        self._files: list[str] | None = None

    def files(self) -> list[str]:
        """Return the names of all files in the commit. Only the first call sends a request."""
        if self._files is None:
            with _library_errors():
                uris = list_uris(f"{self.uri}/**", settings=self._settings, storage_options=self.options)
            self._files = [uri.removeprefix(f"{self.uri}/") for uri in uris]
        return self._files

    def snapshot(self) -> Path:
        """Return the path of the commit's directory in the cache. The directory may not exist."""
        return Path(self.cache_dir, self.folder, "snapshots", self.commit)

    def cached(self, path: str) -> Path | None:
        """Return the path of a file in the cache, or None if the cache does not contain the file."""
        place = self.snapshot() / path
        return place if place.exists() else None


def _text_of(pointer: Pointer) -> bytes:
    """Return the content of a pointer file."""
    return b"%s pointer 1\n%s\nThis file is read inside `patched_libraries()` only.\n" % (POINTER, pointer.uri.encode())


def _may_stream(given: Mapping[str, Any]) -> bool:
    """Return whether a call's arguments allow pointer files, which require the network and the cache."""
    from huggingface_hub import constants

    is_online = not (given.get("local_files_only") or constants.HF_HUB_OFFLINE)
    has_storage = given.get("repo_type") in {None, "model", "dataset", "space"}
    return is_online and has_storage and not given.get("local_dir") and not given.get("dry_run")


def _place(given: Mapping[str, Any]) -> tuple[str, str]:
    """Return the cache directory for a call, and the name of the repository's folder in it."""
    from huggingface_hub import constants

    cache_dir = Path(given.get("cache_dir") or constants.HF_HUB_CACHE).expanduser().resolve()
    kind = given.get("repo_type") or "model"
    return str(cache_dir), f"{kind}s--{given['repo_id'].replace('/', '--')}"


@contextmanager
def _library_errors() -> Iterator[None]:
    """If an error of huggingface_hub caused a Penstock error, raise the original error, which libraries handle."""
    try:
        yield
    except PenstockError as error:
        cause = error.__cause__
        if cause is not None and type(cause).__module__.startswith("huggingface_hub"):
            raise cause from error
        raise


def _short_name(text: str) -> str:
    """Return a short name for a path or a URI, because the whole text may be too long for a file name."""
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


def _inside(directory: Path, name: str) -> Path:
    """Return the path for a name in a directory. Raise FormatError if the name leads outside the directory."""
    if not name or name.startswith("/") or ".." in name.split("/"):
        raise FormatError(f"the file name {name[:200]!r} is outside its directory")
    return directory / name
