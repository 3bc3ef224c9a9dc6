"""Storage: open, list and read files and objects by URI.

In: a URI. Out: a `Source` that fills the caller's buffers.
Not here: what a source is (`source`), what the bytes mean (`safetensors`, `weight_set`), where they go (`engine`).

    uri --open_source--> Source --readv(offset, buffers)--> the caller's memory
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from penstock.config import Settings
from penstock.errors import ConfigError, NotFound, PermissionDenied, SourceUnavailable
from penstock.storage.local import read_bounded
from penstock.storage.source import MAX_SMALL_BYTES, Counting, MemorySource, Source

__all__ = [
    "Counting",
    "MemorySource",
    "Source",
    "is_remote",
    "list_uris",
    "local_path",
    "open_source",
    "read_small",
    "text_of",
]

REMOTE_SCHEMES = frozenset({"s3", "gs", "az", "http", "https"})
"""What `storage.objects` opens; everything else without `://` is a local path."""

_READABLE = "this user needs the right to read it, and to enter every directory above it"


def text_of(uri: object) -> str:
    """Return the text of a path or URI that a user gave.

    Raises:
        ConfigError: it is neither a string nor a path, it is empty, or the system cannot have a file of that name.
    """
    text = os.fspath(uri) if isinstance(uri, os.PathLike) else uri
    if not isinstance(text, str):
        hint = "give a str or an os.PathLike of one"
        raise ConfigError(f"{type(uri).__name__} is not a path or URI", hint=hint)
    if not text:
        raise ConfigError("an empty path")
    try:
        is_name = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ConfigError(f"no file can have this name: {text[:200]!r}")
    return text


def is_remote(uri: str) -> bool:
    """Whether `uri` names an object store or web server rather than a local path. Raises ConfigError: see `text_of`."""
    uri = text_of(uri)
    scheme, separator, _ = uri.partition("://")
    if not separator or scheme == "file":
        return False
    if scheme not in REMOTE_SCHEMES:
        raise ConfigError(
            f"no storage for {scheme}://", uri=uri, hint=f"one of {sorted(REMOTE_SCHEMES)}, file, or a path"
        )
    return True


def local_path(uri: str) -> str:
    """The path that a local `uri` (plain, or `file://`) names."""
    return unquote(urlsplit(uri).path) if uri.startswith("file://") else uri


def open_source(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> Source:
    """Open one file or object; a remote one through the cache when `settings.cache_dir` is set.

    Raises:
        NotFound, PermissionDenied, SourceUnavailable: as their names say.
        ConfigError: no storage has this scheme.
    """
    if not is_remote(uri):
        from penstock.storage.files import FileSource

        return FileSource(local_path(uri), settings=settings)
    from penstock.storage.objects import open_object

    source = open_object(uri, settings=settings, storage_options=storage_options)
    if settings.cache_dir is None:
        return source
    from penstock.storage.cache import open_cached

    return open_cached(source, settings=settings)


def list_uris(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> list[str]:
    """Every file that `uri` names, sorted: those of a directory or prefix, those a glob matches, or the one file.

    Links that lead nowhere, pipes and devices are named too: opening one is an error, leaving it out would be silent.

    Raises:
        NotFound: nothing is there.
        PermissionDenied, SourceUnavailable: the place cannot be listed.
    """
    if is_remote(uri):
        from penstock.storage.objects import list_objects

        return list_objects(uri, settings=settings, storage_options=storage_options)
    path = local_path(uri)
    found: list[str]
    try:
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                found = sorted(os.path.join(path, entry.name) for entry in entries if not _is_directory(entry))
        elif os.path.lexists(path):
            found = [path]
        else:
            found = sorted(name for name in glob.iglob(path, recursive=True) if not os.path.isdir(name))
    except PermissionError as error:
        raise PermissionDenied("directory cannot be listed", uri=uri, hint=_READABLE) from error
    except OSError as error:
        raise SourceUnavailable(f"directory cannot be listed: {error.strerror}", uri=uri) from error
    if not found:
        raise NotFound("no such file, directory or match", uri=uri)
    return found


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a directory, or a link to one; False where that cannot be told (a circle of links)."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def read_small(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> bytes | None:
    """A whole small file or object (an index, a manifest); None when it is not there.

    Raises:
        NotFound: a link of this name is there and leads nowhere. FormatError: it has more than `MAX_SMALL_BYTES`.
        SourceUnavailable: it is not a regular file. Others as `open_source`.
    """
    if is_remote(uri):
        from penstock.storage import objects

        return objects.read_small(uri, settings=settings, storage_options=storage_options)
    path = local_path(uri)
    try:
        return read_bounded(path, MAX_SMALL_BYTES)
    except NotFound as error:
        if os.path.lexists(path):
            raise NotFound("a link that leads to no file", uri=uri) from error
        return None
    except PermissionDenied as error:
        raise PermissionDenied("file cannot be read", uri=uri, hint=_READABLE) from error
