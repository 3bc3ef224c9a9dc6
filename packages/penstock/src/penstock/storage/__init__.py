"""Storage: open, list, read and write files and objects by URI.

In: a URI. Out: a `Source` that fills the caller's buffers, a list of URIs, or the bytes of a small file.
Not here: what a source is (`source`), what the bytes mean (`safetensors`, `weight_set`), where they go (`engine`).

    uri --open_source--> Source --readv(offset, buffers)--> the caller's memory

Files: `local`, `files`, `mapped`, `io_uring`, `network_files`. Objects: `object_stores`, `objects`, `aws_config`,
`http`. Model hubs: `repository`, `hugging_face`, `model_scope`; `hub_cache` and `fill` write huggingface_hub's own
cache. `cache` and `cache_directory` keep ranges on a local disk. Headers: `headers` chooses between `safetensors`
and `gguf` by content, and `pickled` weights are refused. `locate`, `alternatives`, `weight_set`, `manifest`: which
files are a weight set. `beside`, `foreign_json`: small files. Writing: `output`, `file_names`, `place`, `write`,
`read_back`. Also `download` of whole files, and `file_digest`, the SHA-256 of a file that is read in any order.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from penstock.config import Settings
from penstock.errors import ConfigError, NotFound, PermissionDenied, SourceUnavailable
from penstock.storage.files import FileSource
from penstock.storage.local import read_bounded
from penstock.storage.source import (
    MAX_SMALL_BYTES,
    Counting,
    Digested,
    MemorySource,
    PinningStorage,
    Source,
    Storage,
    TimedReads,
    WritableStorage,
    is_registered,
    read_whole,
    register_storage,
    registered_schemes,
    storage_for,
)

__all__ = [
    "Counting",
    "Digested",
    "MemorySource",
    "PinningStorage",
    "Source",
    "Storage",
    "WritableStorage",
    "is_remote",
    "list_uris",
    "local_path",
    "open_source",
    "pinned",
    "read_small",
    "read_whole",
    "register_storage",
    "registered_schemes",
    "text_of",
    "timed",
    "write_small",
]

_READABLE = "this user needs the right to read it, and to enter every directory above it"


def text_of(uri: object) -> str:
    """Return the text of a path or URI that a user gave, with `~` expanded as a shell does, and a scheme in lower case.

    Raises:
        ConfigError: it is neither a string nor a path, it is empty, or the system cannot have a file of that name.
    """
    text = os.fspath(uri) if isinstance(uri, os.PathLike) else uri
    if not isinstance(text, str):
        hint = "give a str or an os.PathLike of one"
        raise ConfigError(f"{type(uri).__name__} is not a path or URI", hint=hint)
    if not text:
        raise ConfigError("an empty path")
    # Checked here, once: a NUL or a lone surrogate would else fail deep inside, as a ValueError of `os`.
    try:
        is_name = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ConfigError(f"no file can have this name: {text[:200]!r}")
    scheme, separator, rest = text.partition("://")
    lower = scheme.lower()
    if separator and scheme != lower and (lower == "file" or is_registered(lower)):
        # RFC 3986, 3.1: the case of a scheme means nothing.
        text = f"{lower}://{rest}"
    if lower in {"http", "https"}:
        # A fragment is never sent to a server. In the name of an object or a file `#` is a letter.
        return text.partition("#")[0]
    # Shells leave it in Python strings and in `--out=~/x`, and a directory called `~` is dangerous to remove.
    return os.path.expanduser(text) if text.startswith("~") else text


def is_remote(uri: str) -> bool:
    """Return whether `uri` names a registered storage rather than a local path.

    Raises:
        ConfigError: no storage has this scheme, or see `text_of`.
    """
    return _scheme_of(text_of(uri)) is not None


def timed(source: Source, uri: str, settings: Settings) -> Source:
    """Return a source for the small reads of a file's header: those of a remote file have a longest time."""
    return TimedReads(source, settings.stall_s) if is_remote(uri) else source


def _storage_of(uri: str) -> Storage | None:
    """Return the storage of a remote `uri`; None for a local path."""
    scheme = _scheme_of(text_of(uri))
    return None if scheme is None else storage_for(scheme)


def _scheme_of(uri: str) -> str | None:
    """Return the registered scheme of a remote `uri`; None for a local path. ConfigError: no storage has it."""
    scheme, separator, _ = uri.partition("://")
    if not separator or scheme == "file":
        return None
    if not is_registered(scheme):
        known = ", ".join(f"{name}://" for name in registered_schemes())
        hint = f"give a path, file:// or one of {known}; penstock.storage.register_storage adds a scheme"
        raise ConfigError(f"no storage for {scheme}://", uri=uri, hint=hint)
    return scheme


def _object_stores() -> Storage:
    # Imported on first use: obstore takes 100 ms, which a load of local files need not pay.
    from penstock.storage.objects import ObjectStorage

    return ObjectStorage()


def _http() -> Storage:
    # On first use too: it brings connections, their pool and TLS.
    from penstock.storage.http import HttpStorage

    return HttpStorage()


def _hugging_face() -> Storage:
    # On first use: it brings huggingface_hub.
    from penstock.storage.hugging_face import HuggingFaceStorage

    return HuggingFaceStorage()


def _model_scope() -> Storage:
    from penstock.storage.model_scope import ModelScopeStorage

    return ModelScopeStorage()


# By the same call that users register theirs with.
for _scheme in ("s3", "gs", "az"):
    register_storage(_scheme, _object_stores)
for _scheme in ("http", "https"):
    register_storage(_scheme, _http)
register_storage("hf", _hugging_face)
register_storage("ms", _model_scope)


def local_path(uri: str) -> str:
    """Return the path that a local `uri` (plain, or `file://`) names."""
    return unquote(urlsplit(uri).path) if uri.startswith("file://") else uri


def open_source(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> Source:
    """Open one file or object; a remote one through the cache when `settings.cache_dir` is set.

    Raises:
        NotFound, PermissionDenied, SourceUnavailable: as their names say.
        ConfigError: no storage has this scheme.
    """
    storage = _storage_of(uri)
    if storage is None:
        return FileSource(local_path(uri))
    source = storage.open(uri, settings=settings, storage_options=storage_options or {})
    if settings.cache_dir is None:
        return source
    # On first use: most loads have no cache.
    from penstock.storage.cache import open_cached

    return open_cached(source, settings=settings)


def pinned(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> str:
    """Return the URI of the content that `uri` names now, where its storage has revisions; else `uri` itself.

    Raises:
        NotFound, PermissionDenied, SourceUnavailable: as their names say.
    """
    storage = _storage_of(uri)
    if not isinstance(storage, PinningStorage):
        return uri
    return storage.pin(uri, settings=settings, storage_options=storage_options or {})


def list_uris(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> list[str]:
    """Return the files that `uri` names, sorted: those of a directory or prefix, those a glob matches, or the one file.

    Links that lead nowhere, pipes and devices are named too: opening one is an error, leaving it out would be silent.

    Raises:
        NotFound: nothing is there.
        PermissionDenied, SourceUnavailable: the place cannot be listed.
    """
    if storage := _storage_of(uri):
        return storage.list(uri, settings=settings, storage_options=storage_options or {})
    path = local_path(uri)
    uris: list[str]
    # A path that exists is itself, even if it reads as a glob: `model[1].safetensors` is a good name.
    try:
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                uris = sorted(os.path.join(path, entry.name) for entry in entries if not _is_directory(entry))
        elif os.path.lexists(path):
            uris = [path]
        else:
            _require_searchable(path)
            uris = sorted(name for name in glob.iglob(path, recursive=True) if not os.path.isdir(name))
    except PermissionError as error:
        raise PermissionDenied("directory cannot be read", uri=uri, hint=_READABLE) from error
    except OSError as error:
        raise SourceUnavailable(f"directory cannot be listed: {error.strerror}", uri=uri) from error
    if not uris:
        raise NotFound("no such file, directory or match", uri=uri)
    return uris


def _require_searchable(path: str) -> None:
    """Raise PermissionError if a directory above `path` hides whether it is there: its absence would be a guess."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(path)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory, or a link to one; False where that is unknown (a circle of links)."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def read_small(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> bytes | None:
    """Return a whole small file or object (an index, a manifest); None when it is not there.

    Raises:
        NotFound: a link of this name is there and leads nowhere. FormatError: it has more than `MAX_SMALL_BYTES`.
        SourceUnavailable: it is not a regular file. Others as `open_source`.
    """
    if storage := _storage_of(uri):
        return storage.read_small(uri, settings=settings, storage_options=storage_options or {})
    path = local_path(uri)
    try:
        return read_bounded(path, MAX_SMALL_BYTES)
    except NotFound as error:
        # "Absent" would be a lie: the user has put something there, and the set would load without it.
        if os.path.lexists(path):
            raise NotFound("a link that leads to no file", uri=uri) from error
        return None
    except PermissionDenied as error:
        raise PermissionDenied("file cannot be read", uri=uri, hint=_READABLE) from error


def write_small(uri: str, data: bytes, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> None:
    """Write a whole small file to a remote storage (a manifest, a signature); it appears at once or not at all.

    Raises:
        ConfigError: `uri` is a local path, or its storage cannot be written. Others as `open_source`.
    """
    scheme = _scheme_of(text_of(uri))
    if scheme is None:
        raise ConfigError(f"{uri} is a local path, not a remote storage", hint="write the file itself")
    storage = storage_for(scheme)
    if not isinstance(storage, WritableStorage):
        raise ConfigError(f"{scheme}:// cannot be written: its storage only reads", hint="write to a local path")
    storage.write_small(uri, data, settings=settings, storage_options=storage_options or {})
