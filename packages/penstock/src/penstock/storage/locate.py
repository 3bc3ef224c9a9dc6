"""Find the files that a URI names: weights, index and manifest. `weight_set` reads their content."""

from __future__ import annotations

import contextlib
import functools
import glob
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import PurePosixPath
from urllib.parse import urlsplit

import msgspec

from penstock.config import Settings
from penstock.errors import ConfigError, NotFound, PenstockError, PermissionDenied
from penstock.logs import log_named
from penstock.report import names_text
from penstock.storage import (
    is_remote,
    list_uris,
    local_path,
    open_source,
    pinned,
    read_small,
    registered_schemes,
    text_of,
)
from penstock.storage.headers import GGUF_SUFFIX, is_pickled_name, pickle_refusal
from penstock.storage.safetensors import format_hint, parse_index
from penstock.waits import Threads

SIDECAR = "penstock.manifest"
"""Name of the manifest in a directory. The manifest of a single file is `<file>.penstock.manifest`."""
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w.-]+)?")
"""A Hugging Face name: owner and repository, optionally with a revision."""
_INDEX = f"model{INDEX_SUFFIX}"
_USE_WEIGHT_FILES = (
    "name a weight file, or a directory or prefix that directly contains safetensors files or one GGUF model"
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
"""Number of concurrent lookups of small files."""
# Source: `llama-gguf-split`.
_PART = re.compile(r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

log = log_named("penstock.storage")

# Mistral publishes its weights twice, as files for transformers and as `consolidated` files for its own code. Source:
# mistralai/Mistral-7B-Instruct-v0.3 and later.
_MODEL_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors", re.IGNORECASE)
_CONSOLIDATED = re.compile(r"consolidated([.-].*)?\.safetensors(\.index\.json)?", re.IGNORECASE)
# Adapter files from PEFT and diffusers.
_ADAPTER = re.compile(
    r"(adapter_model|adapter|pytorch_lora_weights)([.-].*)?\.safetensors(\.index\.json)?", re.IGNORECASE
)
# Variants of the same weights from transformers and diffusers: different precision, or with or without averaging (EMA).
_VARIANT = re.compile(
    r"(?P<stem>.+?)(?P<part>-\d+-of-\d+)?\.(?P<variant>fp16|bf16|fp32|fp8|float16|bfloat16|float32|float8|half|int8|non_ema|ema)"
    r"(?P<later>-\d+-of-\d+)?\.safetensors(?P<index>\.index\.json)?",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"(?P<stem>.+?)(-\d+-of-\d+)?\.safetensors", re.IGNORECASE)
_MAX_NAMES = 5
_HIDDEN = "hidden"
_DUPLICATE = "the directory has the same weights under other names"

Uri = str | os.PathLike[str]
Uris = Uri | Sequence[Uri]


class Location(msgspec.Struct, frozen=True, kw_only=True):
    """Files that form one weight set."""

    uri: str
    """The URI from the user, without secrets."""
    files: tuple[tuple[str, str], ...]
    """Pairs of a relative name and a URI, sorted by name."""
    weight_map: Mapping[str, str] | None = None
    """File name of each tensor. None if no index is used."""
    index_uri: str | None = None
    sidecar_uri: str | None
    """URI of the manifest, whether it exists or not. None if no manifest is possible."""
    index_bytes: int = 0


def resolve(uri: Uris, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> Location:
    """Find the files of a weight set, without reading them.

    In a directory, the files are the shards listed in `model.safetensors.index.json`, or in the only index file.
    Without an index, the files are all `*.safetensors` except adapters, variants, duplicates and hidden files, see
    `_weight_files`. Subdirectories are ignored. A directory without safetensors files may contain one GGUF model. The
    URI of one part of a split GGUF model selects all parts.

    Raises:
        NotFound: the URI does not exist, or has no weight files.
        FormatError: the index is malformed, or names files outside its directory.
        UnsafeFormat: there are only pickled weights.
        ConfigError: one directory has several GGUF models or several variants.
    """
    # Resolve the revision once, because the branch may move and files of two commits must not be mixed.
    named = texts_of(uri)
    with _explains_name(uri):
        texts = [pinned(text, settings=settings, storage_options=storage_options) for text in named]
    # Treat a list with one file like the file itself.
    if len(texts) != 1:
        return _locate_list(texts)
    place = texts[0]
    prefix = _prefix_of(place)
    if prefix is not None and place.endswith(INDEX_SUFFIX):
        raw = read_small(place, settings=settings, storage_options=storage_options)
        if raw is None:
            raise NotFound("the index file does not exist", uri=display(place))
        return _locate_index(place, place, raw, prefix)
    if _is_file(place):
        return _locate_files(place, _parts(place), _sidecar_of_only_file(place) or _sidecar_of(place))
    # A local file's content is checked when the file is opened.
    if is_remote(place) and not _is_glob(place) and is_pickled_name(place):
        raise pickle_refusal([place], display(place))
    if prefix is None or _is_glob(place):
        try:
            listed = list_uris(place, settings=settings, storage_options=storage_options)
        except NotFound:
            if not is_remote(place):
                raise
            # `model[1]` may also be the name of a directory.
            with contextlib.suppress(NotFound):
                return _locate_directory(place, directory_prefix(place), settings, storage_options)
            raise
        if listed == [place] and place.endswith(_FILES):
            # `model[1].safetensors` may be the name of a file.
            return _locate_files(place, _parts(place), _sidecar_of(place))
        return _locate_files(place, _weights(listed, place, None), None if prefix is None else f"{prefix}{SIDECAR}")
    return _locate_directory(place, prefix, settings, storage_options)


@contextlib.contextmanager
def _explains_name(uri: Uris) -> Iterator[None]:
    """Add a hint to an error if a name was read as a repository, because the name may be a mistyped path."""
    try:
        yield
    except PenstockError as error:
        entries = [text_of(entry) for entry in (uri if not isinstance(uri, str | os.PathLike) else [uri])]
        names = [text for text in entries if not is_remote(text) and is_remote(_text(text))]
        if names:
            name = names[0]
            hint = (
                f"there is no file or directory {name!r}, so it was read as a Hugging Face repository; for a path "
                f"on this host write ./{name}"
            )
            error.hint = hint if error.hint is None else f"{hint}; for the repository: {error.hint}"
        raise


def require_local(uri: Uri) -> None:
    """Raise NotFound unless a local path exists and has weights. Open no file, and ignore remote URIs."""
    place = _text(uri)
    if is_remote(place):
        return
    if _is_file(place) or place.endswith(INDEX_SUFFIX):
        if not os.path.exists(place):
            with contextlib.suppress(NotFound):
                # Raises PermissionDenied if a parent directory cannot be searched.
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


def _locate_directory(place: str, prefix: str, settings: Settings, options: Mapping[str, str] | None) -> Location:
    if _is_http(place):
        return _locate_published(place, prefix, settings, options)
    try:
        uris = list_uris(prefix, settings=settings, storage_options=options)
    except PermissionDenied:
        if not is_remote(place):
            raise
        # Public buckets often allow reads but forbid listing.
        return _locate_published(place, prefix, settings, options)
    except NotFound as error:
        if not is_remote(place):
            raise _nothing_at(place) from error
        # The URI may name an object without a known suffix.
        if list_uris(place, settings=settings, storage_options=options) != [place]:
            raise
        return _locate_files(place, [place], _sidecar_of(place))
    index = _choose_index(prefix, uris)
    if index is not None:
        raw = read_small(index, settings=settings, storage_options=options)
        if raw is None:
            raise NotFound("the index was removed while the directory was read", uri=display(index))
        return _locate_index(place, index, raw, prefix)
    return _locate_files(place, _weights(uris, place, prefix), f"{prefix}{SIDECAR}")


def _nothing_at(path: str) -> NotFound:
    if os.path.isdir(path):
        if os.path.isdir(os.path.join(path, "snapshots")):
            name = os.path.basename(path.rstrip("/")).removeprefix("models--").replace("--", "/", 1)
            hint = f"this is the cache of a repository: give {name}, or {path.rstrip('/')}/snapshots/COMMIT"
            return NotFound("the directory has no weights itself, only snapshots", uri=path, hint=hint)
        return NotFound(f"the directory has no *{SUFFIX} or *{GGUF_SUFFIX}", uri=path, hint=_USE_WEIGHT_FILES)
    # `s3:/bucket` is a valid path, but probably a typo.
    scheme, _, rest = path.partition(":/")
    slashes = f"write two slashes: {scheme}://{rest.lstrip('/')}" if scheme in registered_schemes() else None
    return NotFound("no such file or directory", uri=path, hint=slashes or "check the path")


def _locate_published(place: str, prefix: str, settings: Settings, options: Mapping[str, str] | None) -> Location:
    index = f"{prefix}{_INDEX}"
    try:
        raw = read_small(index, settings=settings, storage_options=options)
    except PermissionDenied:
        # Stores reply 403 for an absent object if the user may not list the bucket.
        raw = None
    if raw is not None:
        return _locate_index(place, index, raw, prefix)
    return _locate_files(place, [f"{prefix}model{SUFFIX}"], f"{prefix}{SIDECAR}")


def list_files(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> list[str]:
    """Return the files that `uri` names, as `list_uris` does. Also accept the URL of an HTTP directory.

    HTTP has no listing, so only the weights, the index, the manifest and small files with usual names are found.
    """
    is_small = os.path.splitext(uri.partition("?")[0])[1] in _SMALL_SUFFIXES
    if not _is_http(uri) or _is_file(uri) or uri.endswith(INDEX_SUFFIX) or is_small:
        return list_uris(uri, settings=settings, storage_options=storage_options)
    place = resolve(uri, settings=settings, storage_options=storage_options)
    prefix = directory_prefix(uri)

    def is_there(name: str) -> bool:
        try:
            open_source(f"{prefix}{name}", settings=settings, storage_options=storage_options).close()
        except (NotFound, PermissionDenied):
            # Stores reply 403 for an absent object if the user may not list the bucket.
            return False
        return True

    names = (_INDEX, SIDECAR, f"{SIDECAR}.sig", *PUBLISHED)
    with Threads(_LOOKUPS, thread_name_prefix="penstock-lookup") as pool:
        found = [f"{prefix}{name}" for name, there in zip(names, pool.map(is_there, names), strict=True) if there]
    return sorted({*found, *(file for _, file in place.files)})


def directory_prefix(uri: str) -> str:
    """Return the URI with exactly one trailing slash."""
    return f"{uri.rstrip('/')}/"


def sidecar_uri(uri: Uri) -> str:
    """Return the URI of the manifest in a directory or next to a file. Raises ConfigError if there cannot be one."""
    place = _text(uri)
    prefix = _prefix_of(place)
    where = _sidecar_of(place) if _is_file(place) else None if prefix is None else f"{prefix}{SIDECAR}"
    if where is None:
        raise ConfigError("a glob over directories or a URL with a query cannot have a manifest", uri=display(place))
    return where


def signature_uri(uri: Uri) -> str:
    """Return the URI of the manifest's detached signature."""
    return f"{sidecar_uri(uri)}.sig"


def display(uri: str) -> str:
    """Return `uri` without credentials and query, which may contain secrets."""
    if not _is_http(uri):
        return uri
    # Import HTTP only here, because local files do not need it.
    from penstock.storage.http import clean

    return clean(uri)


def texts_of(uri: Uris) -> list[str]:
    """Return each path or URI as text, without `file://`. Raises the same errors as `text_of`."""
    several = uri if isinstance(uri, Sequence) and not isinstance(uri, str | bytes) else [uri]
    return [_text(entry) for entry in several]


def _text(uri: object) -> str:
    text = text_of(uri)
    if is_remote(text):
        return text
    # If a directory `models` exists, `models/llama` is a mistyped path. A name with a weight suffix is also a path.
    is_name = _REPOSITORY.fullmatch(text) and not text.endswith((*_FILES, INDEX_SUFFIX))
    if is_name and not os.path.lexists(text) and not os.path.lexists(text.partition("/")[0]):
        return f"hf://{text}"
    return local_path(text)


def model_name(uri: str) -> str:
    """Return the last segment of a path as the default name of a weight set. Raises ConfigError for a glob."""
    last = PurePosixPath(urlsplit(uri).path or uri).name
    if (part := _PART.fullmatch(last)) is not None:
        last = part["model"]
    for ending in (INDEX_SUFFIX.removeprefix(SUFFIX), *_FILES):
        last = last.removesuffix(ending)
    if not last or any(letter in last for letter in "*?["):
        raise ConfigError(f"{uri!r} does not contain a name for the model", hint="pass --model NAME")
    return last


def _is_http(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _is_glob(uri: str) -> bool:
    """Return whether `uri` is a glob. URLs, in which `?` begins a query, and existing local paths are not globs."""
    # A trailing slash denotes a directory, and globs do not match directories.
    if _is_http(uri) or not glob.has_magic(uri) or (is_remote(uri) and uri.endswith("/")):
        return False
    return is_remote(uri) or not os.path.lexists(local_path(uri))


def _is_file(uri: str) -> bool:
    if _is_glob(uri):
        return False
    if not is_remote(uri):
        # A missing path with a weight suffix also counts as a file, for a better error.
        return os.path.isfile(local_path(uri)) or (uri.endswith(_FILES) and not os.path.isdir(local_path(uri)))
    return uri.partition("?")[0].endswith(_FILES) if _is_http(uri) else uri.endswith(_FILES)


def _prefix_of(uri: str) -> str | None:
    """Return the common prefix of the files (empty, or ending in a slash), or None for a glob over directories."""
    if uri.endswith(INDEX_SUFFIX) or _is_glob(uri):
        prefix = uri[: uri.rfind("/") + 1]
        return None if _is_glob(prefix.rstrip("/")) else prefix
    return directory_prefix(uri)


def _is_child(uri: str, prefix: str | None) -> bool:
    return prefix is None or "/" not in uri.removeprefix(prefix)


def _sidecar_of(file: str) -> str | None:
    return None if _is_http(file) and "?" in file else f"{_parts(file)[0]}.{SIDECAR}"


def is_part(name: str) -> bool:
    """Return whether a file name denotes a part of a split GGUF model."""
    return _PART.fullmatch(name) is not None


def _parts(file: str) -> list[str]:
    part = _PART.fullmatch(file)
    if part is None or not int(part["number"]) <= int(part["count"]) or "00000" in (part["number"], part["count"]):
        return [file]
    return [f"{part['model']}-{i + 1:05}-of-{part['count']}{GGUF_SUFFIX}" for i in range(int(part["count"]))]


def _sidecar_of_only_file(file: str) -> str | None:
    if is_remote(file) or not file.endswith(_FILES) or os.path.exists(f"{_parts(file)[0]}.{SIDECAR}"):
        return None
    prefix = file[: file.rfind("/") + 1]
    if not (os.path.isfile(file) and os.path.isfile(f"{prefix}{SIDECAR}")):
        return None
    try:
        only = [f"{prefix}{name}" for name in _weights(os.listdir(prefix or "."), file, "")]
    except (PermissionError, ConfigError):
        # In a directory that cannot be listed or resolved, the manifest may also cover other files.
        return None
    return f"{prefix}{SIDECAR}" if only == _parts(file) else None


def _weights(uris: Sequence[str], place: str, prefix: str | None) -> list[str]:
    here = [name for name in uris if _is_child(name, prefix)]
    # Some systems write MODEL.SAFETENSORS.
    files = [name for name in here if name.lower().endswith(SUFFIX)]
    if prefix is not None and files:
        files = _weight_files(files, uri=display(place))
    return files or _gguf_files(here, place, prefix)


def _gguf_files(uris: Sequence[str], place: str, prefix: str | None) -> list[str]:
    files = sorted(name for name in uris if name.lower().endswith(GGUF_SUFFIX))
    if prefix is not None:
        files = [file for file in files if not file.rpartition("/")[2].startswith(".")]
    if not files:
        unsafe = sorted(filter(is_pickled_name, uris))
        if unsafe:
            raise pickle_refusal(unsafe, display(place))
        raise NotFound(f"no *{SUFFIX} or *{GGUF_SUFFIX} found", uri=display(place), hint=_USE_WEIGHT_FILES)
    models = {tuple(_parts(file)) for file in files}
    # A repository may hold one model in several quantised types, and no rule chooses between them.
    if prefix is not None and len(models) > 1:
        names = ", ".join(sorted(model[0].rpartition("/")[2] for model in models)[:8])
        message = f"there are {len(models)} GGUF models: {names}{', ...' if len(models) > 8 else ''}"
        raise ConfigError(message, uri=display(place), hint="pass the path of one of these files")
    # List all parts of a split model, so that a missing part raises an error.
    return [part for model in sorted(models) for part in model]


def left_out(uri: str, taken: Collection[str]) -> list[str]:
    """Return the safetensors files in a local directory that do not belong to its weight set. Empty for other URIs."""
    path = local_path(uri) if not is_remote(uri) else ""
    if not os.path.isdir(path):
        return []
    uris = list_uris(path, settings=Settings.read())
    return [file for file in uris if file.endswith(SUFFIX) and os.path.basename(file) not in taken]


def _choose_index(prefix: str, uris: Sequence[str]) -> str | None:
    indexes = [name for name in uris if name.endswith(INDEX_SUFFIX) and _is_child(name, prefix)]
    named = [name for name in indexes if name.rpartition("/")[2] == _INDEX]
    if named:
        return named[0]
    weights = [name for name in uris if name.lower().endswith(SUFFIX) and _is_child(name, prefix)]
    indexes = _weight_files(indexes, also=weights, uri=display(prefix))
    # No rule chooses between several indexes with unusual names.
    return indexes[0] if len(indexes) == 1 else None


@format_hint()
def _locate_index(place: str, index: str, raw: bytes, prefix: str) -> Location:
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


def _locate_files(place: str, uris: Sequence[str], sidecar: str | None) -> Location:
    return Location(uri=display(place), files=_names_and_uris(uris), sidecar_uri=sidecar)


def _locate_list(uris: Sequence[str]) -> Location:
    if not uris:
        raise ConfigError("the list of files is empty")
    seen: set[str] = set()
    for uri in uris:
        if uri in seen:
            raise ConfigError("the list contains this file twice", uri=display(uri))
        seen.add(uri)
    # Files from several directories have no common manifest.
    prefixes = {uri[: uri.rfind("/") + 1] for uri in uris}
    sidecar = None if len(prefixes) > 1 or any(map(_is_http, uris)) else f"{prefixes.pop()}{SIDECAR}"
    return _locate_files(", ".join(map(display, uris[:3])) + (", ..." if len(uris) > 3 else ""), uris, sidecar)


def _names_and_uris(uris: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Name each file by its last path segment. If names clash, use the path below the common directory."""
    names = [(uri.partition("?")[0] if _is_http(uri) else uri).rpartition("/")[2] for uri in uris]
    if len(set(names)) < len(names):
        parts = [uri.split("/") for uri in uris]
        shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False)))
        names = ["/".join(part[shared:]) for part in parts]
    return tuple(sorted(zip(names, uris, strict=True)))


def _weight_files(files: Sequence[str], *, also: Sequence[str] = (), uri: str) -> list[str]:
    """Return the weight files or indexes that belong together, and log the other files. `also` lists more names."""
    kept = _without(list(files), _HIDDEN, lambda name: name.startswith("."), uri)
    names = [_last_segment(file) for file in (*kept, *also)]
    if any(not _ADAPTER.fullmatch(name) and not name.startswith(".") for name in names):
        kept = _without(kept, "adapter of a model", lambda name: _ADAPTER.fullmatch(name) is not None, uri)
    if any(_MODEL_FILE.fullmatch(name) for name in names):
        kept = _without(kept, _DUPLICATE, lambda name: _CONSOLIDATED.fullmatch(name) is not None, uri)
    plain = {match["stem"] for name in names if not _VARIANT.fullmatch(name) and (match := _PLAIN.fullmatch(name))}

    def has_plain(name: str) -> bool:
        match = _VARIANT.fullmatch(name)
        return match is not None and match["stem"] in plain

    kept = _without(kept, "variant of a plain file", has_plain, uri)
    seen: dict[str, dict[str, str]] = {}
    for file in kept:
        if match := _VARIANT.fullmatch(_last_segment(file)):
            seen.setdefault(match["stem"], {}).setdefault(match["variant"], _last_segment(file))
    for stem, found in seen.items():
        if len(found) > 1:
            message = f"{stem!r} exists in {len(found)} variants: {', '.join(sorted(found.values()))}"
            suffix = f"*.{min(found)}*.safetensors"
            raise ConfigError(message, uri=uri, hint=f"pass one of these files, or a glob such as {suffix}")
    return kept


def _last_segment(file: str) -> str:
    return file.rpartition("/")[2]


def _without(files: list[str], why: str, is_other: Callable[[str], bool], uri: str) -> list[str]:
    others = [file for file in files if is_other(_last_segment(file))]
    if not others:
        return files
    _log_once(uri, why, tuple(map(_last_segment, others)))
    return [file for file in files if file not in set(others)]


@functools.lru_cache(maxsize=256)
def _log_once(uri: str, why: str, names: tuple[str, ...]) -> None:
    level = logging.INFO if why in {_HIDDEN, _DUPLICATE} else logging.WARNING
    log.log(level, "%s: left out %s (%s). Name a file to load it.", uri, names_text(names, _MAX_NAMES), why)
