"""What a URI stands for: which files of weights, called what, with which index and manifest beside them.

In: a file, directory, prefix, glob, index or list of files. Out: `Place`.
Not here: what the files hold (`manifest`), how they are opened (`open_source`).

    directory --index there?--> its shards, else every *.safetensors --> Place(files, weight_map, sidecar)
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from penstock.config import Settings
from penstock.errors import ConfigError, NotFound
from penstock.storage import is_remote, list_uris, local_path, read_small
from penstock.storage.safetensors import parse_index

SIDECAR = "penstock.manifest"
"""Name of the manifest beside a directory's files; a single file's is `<file>.penstock.manifest`."""
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_INDEX = f"model{INDEX_SUFFIX}"

Uri = str | os.PathLike[str]
Uris = Uri | Sequence[Uri]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Files that are one weight set."""

    uri: str
    """As the user named it."""
    files: tuple[tuple[str, str], ...]
    """(name relative to the place, URI), sorted by name."""
    weight_map: Mapping[str, str] | None
    """Tensor -> file name, when an index was honoured."""
    index_uri: str | None
    sidecar_uri: str | None
    """Where the manifest would be; None where there is no place for one."""


def resolve(uri: Uris, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> Place:
    """Find the files of a weight set; bodies and headers are not read.

    A directory's `model.safetensors.index.json` is honoured, or the one other index that is there; else all its
    `*.safetensors` count, not those of directories below.

    Raises:
        NotFound: no such place, or no safetensors file in it.
        FormatError: the index is malformed, or names files outside its directory.
    """
    if not isinstance(uri, str | os.PathLike):
        return _of_list([_text(one) for one in uri])
    place = _text(uri)
    directory = _directory_of(place)
    if place.endswith(INDEX_SUFFIX):
        return _of_index(place, place, directory, settings, storage_options)
    if _is_file(place):
        return _of_files(place, [place], sidecar_uri(place))
    found = _list(place, settings, storage_options)
    if directory is not None and not _is_glob(place):
        index = _choose_index(directory, found)
        if index is not None:
            return _of_index(place, index, directory, settings, storage_options)
    files = [name for name in found if name.endswith(SUFFIX) and _is_child(name, directory)]
    if not files:
        raise NotFound(f"no *{SUFFIX} there", uri=place)
    return _of_files(place, files, None if directory is None else f"{directory}/{SIDECAR}")


def sidecar_uri(uri: Uri) -> str:
    """Where the manifest of `uri` is written and looked for: in the directory, or beside the single file.

    Raises:
        ConfigError: a glob over directories, or a URL with a query, has no such place.
    """
    place = _text(uri)
    if is_remote(place) and "?" in place and not _is_glob(place):
        raise ConfigError("a URL with a query has no place for a manifest beside it", uri=place)
    if _is_file(place):
        return f"{place}.{SIDECAR}"
    directory = _directory_of(place)
    if directory is None:
        raise ConfigError("a glob over directories has no place for a manifest", uri=place)
    return f"{directory}/{SIDECAR}"


def signature_uri(uri: Uri) -> str:
    """Where the detached signature of that manifest is."""
    return f"{sidecar_uri(uri)}.sig"


def _text(uri: Uri) -> str:
    return os.fspath(uri) if isinstance(uri, os.PathLike) else uri


def _is_http(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _is_glob(uri: str) -> bool:
    """HTTP has no listing, and `?` begins a query there; a local path that exists is itself, whatever its letters."""
    if _is_http(uri) or not glob.has_magic(uri):
        return False
    return is_remote(uri) or not os.path.lexists(local_path(uri))


def _is_file(uri: str) -> bool:
    """Whether `uri` names one file of weights: a local path by looking, a remote one by its name."""
    if _is_glob(uri):
        return False
    if not is_remote(uri):
        return os.path.isfile(local_path(uri)) or (uri.endswith(SUFFIX) and not os.path.isdir(local_path(uri)))
    return uri.partition("?")[0].endswith(SUFFIX) if _is_http(uri) else uri.endswith(SUFFIX)


def _directory_of(uri: str) -> str | None:
    """The directory or prefix whose files `uri` names, without a slash at its end; None for a glob over directories."""
    if uri.endswith(INDEX_SUFFIX) or _is_glob(uri):
        directory = uri.rpartition("/")[0] if "/" in uri else "."
        return None if _is_glob(directory) else directory or "/"
    return uri.rstrip("/") or "/"


def _is_child(uri: str, directory: str | None) -> bool:
    return directory is None or directory == "." or "/" not in uri.removeprefix(f"{directory.rstrip('/')}/")


def _list(place: str, settings: Settings, options: Mapping[str, str] | None) -> list[str]:
    if _is_http(place):
        # A web server lists nothing: look for the two names under which checkpoints are published.
        base = place.rstrip("/")
        if read_small(f"{base}/{_INDEX}", settings=settings, storage_options=options) is not None:
            return [f"{base}/{_INDEX}"]
        return [f"{base}/model{SUFFIX}"]
    is_prefix = is_remote(place) and not _is_glob(place) and not place.endswith("/")
    return list_uris(f"{place}/" if is_prefix else place, settings=settings, storage_options=options)


def _choose_index(directory: str, found: Sequence[str]) -> str | None:
    indexes = [name for name in found if name.endswith(INDEX_SUFFIX) and _is_child(name, directory)]
    named = [name for name in indexes if name.rpartition("/")[2] == _INDEX]
    if named:
        return named[0]
    return indexes[0] if len(indexes) == 1 else None


def _of_index(
    place: str, index: str, directory: str | None, settings: Settings, options: Mapping[str, str] | None
) -> Place:
    raw = read_small(index, settings=settings, storage_options=options)
    if raw is None or directory is None:
        raise NotFound("no such index", uri=index)
    weight_map = parse_index(raw, uri=index)
    shards = sorted(set(weight_map.values()))
    return Place(
        uri=place,
        files=tuple((shard, f"{directory}/{shard}") for shard in shards),
        weight_map=weight_map,
        index_uri=index,
        sidecar_uri=f"{directory}/{SIDECAR}",
    )


def _of_files(place: str, uris: Sequence[str], sidecar: str | None) -> Place:
    return Place(uri=place, files=_named(uris), weight_map=None, index_uri=None, sidecar_uri=sidecar)


def _of_list(uris: Sequence[str]) -> Place:
    if not uris:
        raise ConfigError("an empty list of files")
    seen: set[str] = set()
    for uri in uris:
        if uri in seen:
            raise ConfigError("a file stands twice in the list", uri=uri)
        seen.add(uri)
    return _of_files(", ".join(uris[:3]) + (", ..." if len(uris) > 3 else ""), uris, None)


def _named(uris: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Files by their last part, or by all below the directory they share where last parts clash."""
    names = [uri.partition("?")[0].rpartition("/")[2] for uri in uris]
    if len(set(names)) < len(names):
        parts = [uri.split("/") for uri in uris]
        shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False)))
        names = ["/".join(part[shared:]) for part in parts]
    return tuple(sorted(zip(names, uris, strict=True)))
