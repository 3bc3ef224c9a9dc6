"""Lookup of the files that a URI stands for: their names, their index and their manifest.

In: a file, directory, prefix, glob, index or list of files. Out: `Location`.
Not here: what the files hold (`weight_set`), how they are opened (`open_source`).

    directory --index there?--> its shards, else every *.safetensors --> Place(files, weight_map, sidecar)
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from penstock.config import Settings
from penstock.errors import ConfigError, FormatError, NotFound, PenstockError, PermissionDenied
from penstock.storage import (
    is_remote,
    list_uris,
    local_path,
    open_source,
    pickled,
    pinned,
    read_small,
    registered_schemes,
    text_of,
)
from penstock.storage.alternatives import belonging
from penstock.storage.safetensors import parse_index
from penstock.waits import Threads

SIDECAR = "penstock.manifest"
"""Name of the manifest beside a directory's files; a single file's is `<file>.penstock.manifest`."""
SUFFIX = ".safetensors"
GGUF_SUFFIX = ".gguf"
INDEX_SUFFIX = ".safetensors.index.json"
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w.-]+)?")
"""A name as Hugging Face has it: an owner and a repository, with a revision or not."""
_INDEX = f"model{INDEX_SUFFIX}"
_ONLY = (
    "name a file, or a directory or prefix that has files of safetensors or one GGUF model itself; no others are read"
)
_FILES = (SUFFIX, GGUF_SUFFIX)
PUBLISHED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "params.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "hf_quant_config.json",
    "adapter_config.json",
)
"""Small files of model repositories, as transformers, its processors, PEFT and Mistral name them."""
_SMALL_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_LOOKUPS = 8
"""Requests at once that ask whether a small file is there."""
# As `llama-gguf-split` names the parts of a model.
_PART = re.compile(r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

Uri = str | os.PathLike[str]
Uris = Uri | Sequence[Uri]


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Files that are one weight set."""

    uri: str
    """As the user named it, without secrets; for messages."""
    files: tuple[tuple[str, str], ...]
    """(name relative to the place, URI), sorted by name."""
    weight_map: Mapping[str, str] | None
    """Tensor -> file name, when an index was honoured."""
    index_uri: str | None
    sidecar_uri: str | None
    """Where the manifest would be; None where there is no place for one. Files of one directory share its manifest."""
    index_bytes: int = 0
    """Size of the index that was read."""


def resolve(uri: Uris, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> Location:
    """Find the files of a weight set; bodies and headers are not read.

    A directory's `model.safetensors.index.json` is honoured, or the one other index that is there; else all its
    `*.safetensors` count, not those of directories below, nor those that `alternatives` leaves out: hidden files, and
    beside the model adapters, variants and `consolidated*`. A directory without them may have one model of GGUF. Any
    file of a split one stands for all its parts.

    Raises:
        NotFound: no such place, or no file of weights in it.
        FormatError: the index is malformed, or names files outside its directory. UnsafeFormat: pickled weights only.
        ConfigError: several models of GGUF, or several variants, in one directory.
    """
    # Once, for all files: a branch that moves meanwhile must not be mixed of two commits.
    named = texts_of(uri)
    with _explains_name(uri):
        texts = [pinned(text, settings=settings, storage_options=storage_options) for text in named]
    # A list of one file is that file: it has the same manifest, and the same name.
    if len(texts) != 1:
        return _of_list(texts)
    place = texts[0]
    prefix = _prefix_of(place)
    if prefix is not None and place.endswith(INDEX_SUFFIX):
        raw = read_small(place, settings=settings, storage_options=storage_options)
        if raw is None:
            raise NotFound("no such index", uri=display(place))
        return _of_index(place, place, raw, prefix)
    if _is_file(place):
        return _of_files(place, _parts(place), _sidecar_of_only_file(place) or _sidecar_of(place))
    # A local file is judged by its content, when it is opened.
    if is_remote(place) and not _is_glob(place) and pickled.is_weights(place):
        raise pickled.refusal([place], display(place))
    if prefix is None or _is_glob(place):
        try:
            listed = list_uris(place, settings=settings, storage_options=storage_options)
        except NotFound:
            if not is_remote(place):
                raise
            # Only a listing tells that `model[1]` is the name of a directory.
            with contextlib.suppress(NotFound):
                return _of_directory(place, directory_prefix(place), settings, storage_options)
            raise
        if listed == [place] and place.endswith(_FILES):
            # Nor that `model[1].safetensors` is the name of a file.
            return _of_files(place, _parts(place), _sidecar_of(place))
        return _of_files(place, _weights(listed, place, None), None if prefix is None else f"{prefix}{SIDECAR}")
    return _of_directory(place, prefix, settings, storage_options)


@contextlib.contextmanager
def _explains_name(uri: Uris) -> Iterator[None]:
    """Say in an error that a name which may be a mistyped path was read as a repository's."""
    try:
        yield
    except PenstockError as error:
        entries = [text_of(entry) for entry in (uri if not isinstance(uri, str | os.PathLike) else [uri])]
        names = [text for text in entries if not is_remote(text) and is_remote(_text(text))]
        if names:
            name = names[0]
            hint = (
                f"there is no file or directory {name!r}, so it was read as a repository of Hugging Face; for a path "
                f"on this host write ./{name}"
            )
            error.hint = hint if error.hint is None else f"{hint}; for the repository: {error.hint}"
        raise


@contextlib.contextmanager
def format_hint(
    hint: str = "the file is damaged, or its writer does not keep to the format: copy it again",
) -> Iterator[None]:
    """Give a FormatError of the block this hint, where it has none."""
    try:
        yield
    except FormatError as error:
        error.hint = error.hint or hint
        raise


def look(uri: Uri) -> None:
    """Raise unless a local place is there, before torch is imported to read it; open no file, ask no remote storage.

    Raises:
        NotFound: it is not there, or has no file of weights. UnsafeFormat, ConfigError: as `resolve`.
        PermissionDenied, SourceUnavailable: see `list_uris`.
    """
    place = _text(uri)
    # A remote place is a round trip away, and reading it will tell.
    if is_remote(place):
        return
    if _is_file(place) or place.endswith(INDEX_SUFFIX):
        if not os.path.exists(place):
            with contextlib.suppress(NotFound):
                # PermissionDenied where a directory above it hides whether it is there.
                list_uris(place, settings=Settings.read())
            raise _nothing_at(place)
        return
    prefix = _prefix_of(place)
    try:
        uris = list_uris(place if prefix is None or _is_glob(place) else prefix, settings=Settings.read())
    except NotFound as error:
        raise _nothing_at(place) from error
    if _choose_index(prefix or "", uris) is None:
        _weights(uris, place, prefix)


def _of_directory(place: str, prefix: str, settings: Settings, options: Mapping[str, str] | None) -> Location:
    """Return the weight set of a directory or prefix, with an index or without."""
    # HTTP has no listing.
    if _is_http(place):
        return _as_published(place, prefix, settings, options)
    try:
        uris = list_uris(prefix, settings=settings, storage_options=options)
    except PermissionDenied:
        if not is_remote(place):
            raise
        # Public buckets often allow reading and forbid listing.
        return _as_published(place, prefix, settings, options)
    except NotFound as error:
        if not is_remote(place):
            raise _nothing_at(place) from error
        # An object may be called anything; only its listing tells it from a prefix.
        if list_uris(place, settings=settings, storage_options=options) != [place]:
            raise
        return _of_files(place, [place], _sidecar_of(place))
    index = _choose_index(prefix, uris)
    if index is not None:
        raw = read_small(index, settings=settings, storage_options=options)
        # It was listed a moment ago.
        if raw is None:
            raise NotFound("the index was removed while the directory was read", uri=display(index))
        return _of_index(place, index, raw, prefix)
    return _of_files(place, _weights(uris, place, prefix), f"{prefix}{SIDECAR}")


def _nothing_at(path: str) -> NotFound:
    """Return the error for a local path that is not there, or has no file of weights in it."""
    if os.path.isdir(path):
        if os.path.isdir(os.path.join(path, "snapshots")):
            name = os.path.basename(path.rstrip("/")).removeprefix("models--").replace("--", "/", 1)
            hint = f"this is the cache of a repository: give {name}, or {path.rstrip('/')}/snapshots/COMMIT"
            return NotFound("no weights there, but snapshots of them", uri=path, hint=hint)
        return NotFound(f"no *{SUFFIX} or *{GGUF_SUFFIX} there", uri=path, hint=_ONLY)
    # `s3:/bucket` is a path to the system, and a slip to its user.
    scheme, _, rest = path.partition(":/")
    slashes = f"two slashes: {scheme}://{rest.lstrip('/')}" if scheme in registered_schemes() else None
    return NotFound("no such file or directory", uri=path, hint=slashes)


def _as_published(place: str, prefix: str, settings: Settings, options: Mapping[str, str] | None) -> Location:
    """Return where nothing can be listed: the two names under which checkpoints are published."""
    index = f"{prefix}{_INDEX}"
    try:
        raw = read_small(index, settings=settings, storage_options=options)
    except PermissionDenied:
        # What stores answer for an absent object to a user who may not list.
        raw = None
    if raw is not None:
        return _of_index(place, index, raw, prefix)
    return _of_files(place, [f"{prefix}model{SUFFIX}"], f"{prefix}{SIDECAR}")


def list_files(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> list[str]:
    """Return the files that `uri` names, as `list_uris`; of the URL of a directory the published files that are there.

    HTTP has no listing, so these are the weights as `resolve` finds them, the index, the manifest, and small files
    under the names that model repositories use.

    Raises:
        NotFound, PermissionDenied, SourceUnavailable: see `list_uris`. FormatError: the index is malformed.
    """
    if not _is_http(uri) or _is_file(uri) or uri.endswith(INDEX_SUFFIX):
        return list_uris(uri, settings=settings, storage_options=storage_options)
    # A URL of one other file names itself, as in every storage.
    if os.path.splitext(uri.partition("?")[0])[1] in _SMALL_SUFFIXES:
        return list_uris(uri, settings=settings, storage_options=storage_options)
    place = resolve(uri, settings=settings, storage_options=storage_options)
    prefix = directory_prefix(uri)

    def is_there(name: str) -> bool:
        try:
            open_source(f"{prefix}{name}", settings=settings, storage_options=storage_options).close()
        except (NotFound, PermissionDenied):
            # 403 is what stores answer for an absent object to a user who may not list.
            return False
        return True

    names = (_INDEX, SIDECAR, f"{SIDECAR}.sig", *PUBLISHED)
    with Threads(_LOOKUPS, thread_name_prefix="penstock-lookup") as pool:
        found = [f"{prefix}{name}" for name, there in zip(names, pool.map(is_there, names), strict=True) if there]
    return sorted({*found, *(file for _, file in place.files)})


def directory_prefix(uri: str) -> str:
    """Return the text before the names of a directory's files: the URI up to one slash."""
    return f"{uri.rstrip('/')}/"


def sidecar_uri(uri: Uri) -> str:
    """Return where the manifest of `uri` is written and looked for: in the directory, or beside the single file.

    Raises:
        ConfigError: a glob over directories, or a URL with a query, has no such place.
    """
    place = _text(uri)
    prefix = _prefix_of(place)
    where = _sidecar_of(place) if _is_file(place) else None if prefix is None else f"{prefix}{SIDECAR}"
    if where is None:
        raise ConfigError("a glob over directories or a query has no place for a manifest", uri=display(place))
    return where


def signature_uri(uri: Uri) -> str:
    """Return where the detached signature of that manifest is."""
    return f"{sidecar_uri(uri)}.sig"


def display(uri: str) -> str:
    """Return `uri` without the user and query of a URL, where secrets stand."""
    if not _is_http(uri):
        return uri
    # Imported on first use: a load of local files needs no HTTP.
    from penstock.storage.http import clean

    return clean(uri)


def texts_of(uri: Uris) -> list[str]:
    """Return the text of every path or URI given, `file://` taken away. ConfigError: see `text_of`."""
    several = uri if isinstance(uri, Sequence) and not isinstance(uri, str | bytes) else [uri]
    return [_text(entry) for entry in several]


def _text(uri: object) -> str:
    """Return the text of one path or URI, `file://` taken away; the name of a repository becomes its hf:// URI."""
    text = text_of(uri)
    if is_remote(text):
        return text
    # As engines take it: a path first. `models/llama` beside a directory `models` is a slip, not a repository. So is a
    # file of weights that is not there.
    is_name = _REPOSITORY.fullmatch(text) and not text.endswith((*_FILES, INDEX_SUFFIX))
    if is_name and not os.path.lexists(text) and not os.path.lexists(text.partition("/")[0]):
        return f"hf://{text}"
    return local_path(text)


def model_name(uri: str) -> str:
    """Return the default name of a weight set: the last part of its path. ConfigError for a glob."""
    last = PurePosixPath(urlsplit(uri).path or uri).name
    if (part := _PART.fullmatch(last)) is not None:
        last = part["model"]
    for ending in (INDEX_SUFFIX.removeprefix(SUFFIX), *_FILES):
        last = last.removesuffix(ending)
    if not last or any(letter in last for letter in "*?["):
        raise ConfigError(f"{uri!r} gives the model no name", hint="give --model NAME")
    return last


def _is_http(uri: str) -> bool:
    """Return whether `uri` is a plain URL, which has no listing, no glob, and a query that may hold secrets."""
    return uri.startswith(("http://", "https://"))


def _is_glob(uri: str) -> bool:
    """Return whether `uri` is a glob. HTTP has none (`?` begins a query); a local path that exists is itself."""
    # With a slash at its end it names a directory: no glob matches those.
    if _is_http(uri) or not glob.has_magic(uri) or (is_remote(uri) and uri.endswith("/")):
        return False
    return is_remote(uri) or not os.path.lexists(local_path(uri))


def _is_file(uri: str) -> bool:
    """Return whether `uri` names one file of weights: a local path by looking, a remote one by its name."""
    if _is_glob(uri):
        return False
    if not is_remote(uri):
        # By its name too where it is absent: the error must then be of a missing file, not of an empty directory.
        return os.path.isfile(local_path(uri)) or (uri.endswith(_FILES) and not os.path.isdir(local_path(uri)))
    return uri.partition("?")[0].endswith(_FILES) if _is_http(uri) else uri.endswith(_FILES)


def _prefix_of(uri: str) -> str | None:
    """Return what stands before the names of `uri`'s files, "" or up to a slash; None for a glob over directories."""
    if uri.endswith(INDEX_SUFFIX) or _is_glob(uri):
        prefix = uri[: uri.rfind("/") + 1]
        return None if _is_glob(prefix.rstrip("/")) else prefix
    return directory_prefix(uri)


def _is_child(uri: str, prefix: str | None) -> bool:
    """Return whether `uri` lies in the place itself and not in a directory below it."""
    return prefix is None or "/" not in uri.removeprefix(prefix)


def _sidecar_of(file: str) -> str | None:
    """Return where a single file's manifest is, beside the first part of several; a URL with a query has no place."""
    return None if _is_http(file) and "?" in file else f"{_parts(file)[0]}.{SIDECAR}"


def is_part(name: str) -> bool:
    """Return whether a file's name says that it is one of several parts of a model of GGUF."""
    return _PART.fullmatch(name) is not None


def _parts(file: str) -> list[str]:
    """Return all files of a split model of GGUF of which one is named; else the file."""
    part = _PART.fullmatch(file)
    # One is enough to know the others, and a part alone is no model.
    if part is None or not int(part["number"]) <= int(part["count"]) or "00000" in (part["number"], part["count"]):
        return [file]
    return [f"{part['model']}-{i + 1:05}-of-{part['count']}{GGUF_SUFFIX}" for i in range(int(part["count"]))]


def _sidecar_of_only_file(file: str) -> str | None:
    """Return the manifest of a local directory whose only weights are `file`, unless the file has one of its own.

    Engines find the files of a model themselves, and pass a model of one file as this file.
    """
    if is_remote(file) or not file.endswith(_FILES) or os.path.exists(f"{_parts(file)[0]}.{SIDECAR}"):
        return None
    prefix = file[: file.rfind("/") + 1]
    if not (os.path.isfile(file) and os.path.isfile(f"{prefix}{SIDECAR}")):
        return None
    try:
        names = os.listdir(prefix or ".")
    except PermissionError:
        # A directory may be entered and not listed: then nothing says that the manifest is of this file alone.
        return None
    try:
        only = [f"{prefix}{name}" for name in _weights(names, file, "")]
    except ConfigError:
        # Several models of GGUF: the directory's manifest is of none of them.
        return None
    return f"{prefix}{SIDECAR}" if only == _parts(file) else None


def _weights(uris: Sequence[str], place: str, prefix: str | None) -> list[str]:
    """Return the files of weights among `uris`. NotFound where there is none; UnsafeFormat where all are pickled."""
    here = [name for name in uris if _is_child(name, prefix)]
    # In any case: some systems write MODEL.SAFETENSORS.
    files = [name for name in here if name.lower().endswith(SUFFIX)]
    if prefix is not None and files:
        files = belonging(files, uri=display(place))
    return files or _gguf_files(here, place, prefix)


def _gguf_files(uris: Sequence[str], place: str, prefix: str | None) -> list[str]:
    """Return the files of the one model of GGUF in a directory, or all that a glob matches."""
    files = sorted(name for name in uris if name.lower().endswith(GGUF_SUFFIX))
    if prefix is not None:
        files = [file for file in files if not file.rpartition("/")[2].startswith(".")]
    if not files:
        unsafe = sorted(filter(pickled.is_weights, uris))
        if unsafe:
            raise pickled.refusal(unsafe, display(place))
        raise NotFound(f"no *{SUFFIX} or *{GGUF_SUFFIX} there", uri=display(place), hint=_ONLY)
    models = {tuple(_parts(file)) for file in files}
    # Repositories hold one model in many types. None of them is more right than another.
    if prefix is not None and len(models) > 1:
        names = ", ".join(sorted(model[0].rpartition("/")[2] for model in models)[:8])
        message = f"{len(models)} models of GGUF there: {names}{', ...' if len(models) > 8 else ''}"
        raise ConfigError(message, uri=display(place), hint="name one of these files")
    # Of a split model all its parts: one that was not listed is missing.
    return [part for model in sorted(models) for part in model]


def left_out(uri: str, taken: Collection[str]) -> list[str]:
    """Return paths of a local directory's safetensors files that its weight set leaves out; none for other places."""
    path = local_path(uri) if not is_remote(uri) else ""
    if not os.path.isdir(path):
        return []
    uris = list_uris(path, settings=Settings.read())
    return [file for file in uris if file.endswith(SUFFIX) and os.path.basename(file) not in taken]


def _choose_index(prefix: str, uris: Sequence[str]) -> str | None:
    """Return the index to honour; None: all files count."""
    indexes = [name for name in uris if name.endswith(INDEX_SUFFIX) and _is_child(name, prefix)]
    named = [name for name in indexes if name.rpartition("/")[2] == _INDEX]
    if named:
        return named[0]
    weights = [name for name in uris if name.lower().endswith(SUFFIX) and _is_child(name, prefix)]
    indexes = belonging(indexes, also=weights, uri=display(prefix))
    # Of several indexes under unusual names none is more right than another: then all files count.
    return indexes[0] if len(indexes) == 1 else None


@format_hint()
def _of_index(place: str, index: str, raw: bytes, prefix: str) -> Location:
    """Return the weight set of an index."""
    weight_map = parse_index(raw, uri=display(index))
    shards = sorted(set(weight_map.values()))
    return Location(
        uri=display(place),
        files=tuple((shard, f"{prefix}{shard}") for shard in shards),
        weight_map=weight_map,
        index_uri=display(index),
        sidecar_uri=f"{prefix}{SIDECAR}",
        index_bytes=len(raw),
    )


def _of_files(place: str, uris: Sequence[str], sidecar: str | None) -> Location:
    """Return the weight set of files without an index."""
    return Location(uri=display(place), files=_named(uris), weight_map=None, index_uri=None, sidecar_uri=sidecar)


def _of_list(uris: Sequence[str]) -> Location:
    """Return the weight set of a list of files."""
    if not uris:
        raise ConfigError("an empty list of files")
    seen: set[str] = set()
    for uri in uris:
        if uri in seen:
            raise ConfigError("a file stands twice in the list", uri=display(uri))
        seen.add(uri)
    # Files of several directories have several manifests, of which none covers them all.
    prefixes = {uri[: uri.rfind("/") + 1] for uri in uris}
    sidecar = None if len(prefixes) > 1 or any(map(_is_http, uris)) else f"{prefixes.pop()}{SIDECAR}"
    return _of_files(", ".join(map(display, uris[:3])) + (", ..." if len(uris) > 3 else ""), uris, sidecar)


def _named(uris: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return files by their last part, or by all below the directory they share where last parts clash."""
    names = [(uri.partition("?")[0] if _is_http(uri) else uri).rpartition("/")[2] for uri in uris]
    if len(set(names)) < len(names):
        parts = [uri.split("/") for uri in uris]
        shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False)))
        names = ["/".join(part[shared:]) for part in parts]
    return tuple(sorted(zip(names, uris, strict=True)))
