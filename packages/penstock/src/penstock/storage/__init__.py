"""Storage: open, list, read and write files and objects by URI.

`open_source` returns a `Source`, whose `readv` fills the caller's memory. `locate` and `weight_set` find and open the
files of a model, and `output` writes them.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import os
from collections.abc import Callable, Mapping
from urllib.parse import unquote, urlsplit

from penstock.config import Settings
from penstock.errors import ConfigError, NotFound, PermissionDenied, SourceUnavailable
from penstock.storage.files import FileSource
from penstock.storage.local import READABLE, read_bounded
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


def text_of(uri: object) -> str:
    """Return the text of a user's path or URI, with `~` expanded and the scheme in lower case.

    Raises:
        ConfigError: the value is not a path or URI, or no file can have this name.
    """
    text = os.fspath(uri) if isinstance(uri, os.PathLike) else uri
    if not isinstance(text, str):
        raise ConfigError(f"{type(uri).__name__} is not a path or URI", hint="pass a str or an os.PathLike of str")
    if not text:
        raise ConfigError("the path is empty")
    # Without this check, a NUL or a lone surrogate raises ValueError deep inside `os`.
    try:
        is_name = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ConfigError(f"no file can have this name: {text[:200]!r}")
    scheme, separator, rest = text.partition("://")
    lower = scheme.lower()
    if separator and scheme != lower and (lower == "file" or is_registered(lower)):
        # Schemes are case-insensitive (RFC 3986, 3.1).
        text = f"{lower}://{rest}"
    if lower in {"http", "https"}:
        # Clients do not send fragments. Elsewhere `#` is an ordinary character.
        return text.partition("#")[0]
    # Shells do not expand `~` in `--out=~/x`.
    return os.path.expanduser(text) if text.startswith("~") else text


def is_remote(uri: str) -> bool:
    """Return whether `uri` names a registered storage and not a local path.

    Raises:
        ConfigError: no storage has this scheme, or `text_of` rejects the value.
    """
    return _scheme_of(text_of(uri)) is not None


def timed(source: Source, uri: str, settings: Settings) -> Source:
    """Return a source for reading a file's header, with a deadline for reads of remote files."""
    return TimedReads(source, settings.stall_s) if is_remote(uri) else source


def _storage_of(uri: str) -> Storage | None:
    scheme = _scheme_of(text_of(uri))
    return None if scheme is None else storage_for(scheme)


def _scheme_of(uri: str) -> str | None:
    scheme, separator, _ = uri.partition("://")
    if not separator or scheme == "file":
        return None
    if not is_registered(scheme):
        known = ", ".join(f"{name}://" for name in registered_schemes())
        hint = f"use a path, file:// or one of {known}; penstock.storage.register_storage adds a scheme"
        raise ConfigError(f"no storage supports {scheme}://", uri=uri, hint=hint)
    return scheme


# Import a storage at its first use, because importing obstore takes 100 ms and local files do not need it.
@functools.cache
def _first_use(module: str, name: str) -> Callable[[], Storage]:
    def make() -> Storage:
        storage: Storage = getattr(importlib.import_module(f"penstock.storage.{module}"), name)()
        return storage

    return make


for _scheme, _module, _class in (
    ("s3", "objects", "ObjectStorage"),
    ("gs", "objects", "ObjectStorage"),
    ("az", "objects", "ObjectStorage"),
    ("http", "http", "HttpStorage"),
    ("https", "http", "HttpStorage"),
    ("hf", "hugging_face", "HuggingFaceStorage"),
    ("ms", "model_scope", "ModelScopeStorage"),
):
    register_storage(_scheme, _first_use(_module, _class))


def local_path(uri: str) -> str:
    """Return the path of a local `uri`, which is a plain path or begins with `file://`."""
    return unquote(urlsplit(uri).path) if uri.startswith("file://") else uri


def open_source(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> Source:
    """Open a file or object. Remote objects go through the cache if `settings.cache_dir` is set.

    Raises:
        NotFound, PermissionDenied, SourceUnavailable: the storage did not return the object.
        ConfigError: no storage has this scheme.
    """
    storage = _storage_of(uri)
    if storage is None:
        return FileSource.open(local_path(uri))
    source = storage.open(uri, settings=settings, storage_options=storage_options or {})
    if settings.cache_dir is None:
        return source
    from penstock.storage.cache import open_cached

    return open_cached(source, settings=settings)


def pinned(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> str:
    """Pin `uri` to its current content. Return `uri` unchanged if its storage has no revisions.

    Raises the same errors as `open_source`.
    """
    storage = _storage_of(uri)
    if not isinstance(storage, PinningStorage):
        return uri
    return storage.pin(uri, settings=settings, storage_options=storage_options or {})


def list_uris(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> list[str]:
    """Return the sorted URIs of one file, of the files in a directory or prefix, or of the matches of a glob.

    Broken symlinks, FIFOs and devices are included, so that opening them raises an error.

    Raises:
        NotFound: there are no files.
        PermissionDenied, SourceUnavailable: the directory or prefix cannot be listed.
    """
    if storage := _storage_of(uri):
        return storage.list(uri, settings=settings, storage_options=storage_options or {})
    path = local_path(uri)
    uris: list[str]
    # An existing path takes precedence over a glob, because `model[1].safetensors` is a valid name.
    try:
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                uris = sorted(os.path.join(path, entry.name) for entry in entries if not _is_directory(entry))
        elif os.path.lexists(path):
            uris = [path]
        else:
            # lstat raises PermissionError if a parent directory cannot be searched.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(path)
            uris = sorted(name for name in glob.iglob(path, recursive=True) if not os.path.isdir(name))
    except PermissionError as error:
        raise PermissionDenied("the directory cannot be read", uri=uri, hint=READABLE) from error
    except OSError as error:
        raise SourceUnavailable(f"the directory cannot be listed: {error.strerror}", uri=uri) from error
    if not uris:
        raise NotFound("there is no such file, directory or match", uri=uri, hint="check the path")
    return uris


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def read_small(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> bytes | None:
    """Return the content of a small file or object (an index, a manifest), or None if it is absent.

    Raises:
        NotFound: the file is a broken symlink.
        FormatError: the file has more than `MAX_SMALL_BYTES`.
        SourceUnavailable: the file is not a regular file.
        ConfigError, PermissionDenied: see `open_source`.
    """
    if storage := _storage_of(uri):
        return storage.read_small(uri, settings=settings, storage_options=storage_options or {})
    path = local_path(uri)
    try:
        return read_bounded(path, MAX_SMALL_BYTES)
    except NotFound as error:
        # Do not report a broken symlink as absent, because the weights would then load without the file.
        if os.path.lexists(path):
            raise NotFound("this is a symlink to a file that does not exist", uri=uri) from error
        return None
    except PermissionDenied as error:
        raise PermissionDenied("the file cannot be read", uri=uri, hint=READABLE) from error


def write_small(uri: str, data: bytes, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> None:
    """Write a small file (a manifest, a signature) to a remote storage atomically.

    Raises:
        ConfigError: `uri` is a local path, or its storage is read-only.
        PermissionDenied, SourceUnavailable: the storage did not accept the file.
    """
    scheme = _scheme_of(text_of(uri))
    if scheme is None:
        raise ConfigError(f"{uri} is a local path, not a remote storage", hint="write the file with open()")
    storage = storage_for(scheme)
    if not isinstance(storage, WritableStorage):
        raise ConfigError(f"the storage of {scheme}:// is read-only", hint="write to a local path")
    storage.write_small(uri, data, settings=settings, storage_options=storage_options or {})
