"""Find the small files of a model to copy with its weights: configurations, vocabularies, templates and code."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from penstock.config import Settings
from penstock.errors import FormatError, NotFound, PenstockError
from penstock.report import bytes_text
from penstock.storage import is_remote, list_uris, local_path, open_source, read_small
from penstock.storage.locate import INDEX_SUFFIX, PUBLISHED, SIDECAR, directory_prefix, display, list_files
from penstock.storage.small_files import MAX_FILES, TOO_MANY, walk
from penstock.types import GIB
from penstock.waits import Threads

_SMALL = re.compile(
    r"\.(json|jsonl|txt|model|jinja2?|tiktoken|py|bpe|vocab|spm|ya?ml|toml)$"
    r"|^(tokenizer|tekken|vocab|merges|sentencepiece|spiece)\."
)
"""Names of files to copy: configurations, vocabularies (`tokenizer.model.v3`, `vocab.bpe`), templates and code."""
_WEIGHTS = re.compile(
    r"\.(safetensors|bin|pt|pth|ckpt|gguf|ggml|h5|msgpack|onnx|onnx_data(_\d+)?|ot|tflite|mlmodel|engine|pkl|pickle|npz)"
    r"(\.(data|gz|xz|zip|zst))?$"
)
_INDEX = re.compile(r"\.(safetensors|bin|h5|msgpack)\.index(\.[\w-]+)?\.json$")
"""Names of indexes and their variants (`model.safetensors.index.fp16.json`)."""
_DESCRIBES_WEIGHTS = re.compile(
    rf"(^|/)([^/]*\.)?({re.escape(SIDECAR)}(\.sig)?|penstock\.job)(/|$)|\.safetensors\.index(\.[\w-]+)?\.json$"
)
"""Names of files that describe the source's weight files."""
_OTHER_FORMATS = re.compile(
    r"^(onnx|original|openvino|coreml|metal|tflite|runs|wandb|__pycache__|checkpoint-\d+|global_step\d+)$"
)
"""Folders with the model in another format, or with an earlier state."""
_MODULES = "modules.json"
"""File in which sentence-transformers lists the folders of a model."""
_MAX_BYTES = GIB
"""Maximum size of a copied file. Vocabularies of 80 MiB are common."""
_SINGLE_FILE = "files next to a single file are not copied: convert its directory instead"
_LOOKUPS = 8
"""Number of concurrent lookups of the sizes of remote files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFiles:
    """The files next to a model's weights, divided into those to copy and those to omit."""

    files: Mapping[str, str]
    """The files to copy: URI by relative name."""
    left_out: Mapping[str, str]
    """Why each other file is not copied, by its URI without user and query."""


NO_SMALL_FILES = SmallFiles(files={}, left_out={})
"""The value for a result without small files."""


def find_small_files(
    uri: str, weights: Collection[str], *, settings: Settings, storage_options: Mapping[str, str] | None = None
) -> SmallFiles:
    """Find the small files of a model without reading them. For a single file or a glob, return no small files.

    Hidden files are ignored. Symlinks to files are followed, and symlinks to folders are not.

    Args:
        uri: a directory, prefix or index.
        weights: names of the weight files relative to `uri`.

    Raises:
        NotFound, PermissionDenied, SourceUnavailable: the storage cannot list the files.
        FormatError: a file directly in the directory would be copied, but is not a regular file.
    """
    if uri.endswith(INDEX_SUFFIX):
        uri = uri.rpartition("/")[0] or "."
    found, left_out = _below(uri, settings, storage_options)
    parts = _folders_of_model(found.get(_MODULES), settings, storage_options)
    models = _other_models(found, parts)
    copied: dict[str, str] = {}
    for name, file in found.items():
        # A name that is not valid Unicode cannot be in the JSON that lists the files of a result.
        if _printable(name) != name:
            left_out[file] = "a name that is not Unicode"
            continue
        if _DESCRIBES_WEIGHTS.search(name) or name in weights:
            continue
        if why := _why_not(name, models):
            left_out[file] = why
        else:
            copied[name] = file
    for name, why in _too_large(copied, settings, storage_options).items():
        left_out[copied.pop(name)] = why
    return SmallFiles(files=copied, left_out={_printable(display(file)): why for file, why in left_out.items()})


def _below(
    uri: str, settings: Settings, storage_options: Mapping[str, str] | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the files below a URI by name, and the reason why each remaining file cannot belong to a model."""
    if not is_remote(uri):
        path = local_path(uri)
        if not os.path.isdir(path):
            near = (os.path.join(os.path.dirname(path), name) for name in PUBLISHED)
            return {}, {file: _SINGLE_FILE for file in near if os.path.isfile(file)}
        found, left_out = walk(path)
        for file, why in left_out.items():
            name = os.path.basename(file)
            if os.path.samefile(os.path.dirname(file), path) and _SMALL.search(name) and not os.path.isdir(file):
                hint = "replace or remove it, because the result would lack this file"
                raise FormatError(f"{name} is {why}", uri=file, hint=hint)
        return found, left_out
    listed = list_files(uri, settings=settings, storage_options=storage_options)
    is_http = uri.startswith(("http://", "https://"))
    if listed == [uri] or (glob.has_magic(uri) and not is_http):
        # Do not search for small files, because the search would send additional requests.
        path = uri.partition("?")[0] if is_http else uri
        return {}, {f"{path.rpartition('/')[0]}/": _SINGLE_FILE}
    prefix, below = directory_prefix(uri), dict[str, str]()
    if is_http:
        below[prefix] = "HTTP has no listing, so only files with the usual names are copied"
    else:
        if not all(file.startswith(prefix) for file in listed):
            # The storage may extend the URIs that it lists, for example with the revision of a repository.
            prefix = f"{min(listed, key=lambda file: file.count('/')).rpartition('/')[0]}/"
        try:
            listed = list_uris(f"{prefix}**", settings=settings, storage_options=storage_options)
        except PenstockError as error:
            # Continue, because the model's own files have already been listed. An object in a folder may have a name
            # that every client rejects, such as `a/../b`.
            below[prefix] = f"the folders cannot be listed: {error.message}"
    found, left_out = {}, below
    names = {file.removeprefix(prefix): file for file in listed}
    num_below = 0
    for name, file in sorted(names.items(), key=lambda item: (item[0].count("/"), item[0])):
        num_below += "/" in name
        if num_below > MAX_FILES:
            left_out[prefix] = TOO_MANY
        elif not _is_plain(name):
            left_out[file] = "a name that leads out of the directory"
        elif not any(part.startswith(".") for part in name.split("/")):
            found[name] = file
    return found, left_out


def _is_plain(name: str) -> bool:
    """Return whether an object's name, used as a relative path, stays inside the directory."""
    return str(PurePosixPath(name)) == name and name[:1] != "/" and ".." not in name.split("/") and "\0" not in name


def _printable(path: str) -> str:
    return path.encode(errors="backslashreplace").decode()


def _folders_of_model(
    modules: str | None, settings: Settings, storage_options: Mapping[str, str] | None
) -> frozenset[str]:
    """Return the folders in `modules.json`, which belong to the model even if the folders contain weights."""
    raw = None if modules is None else read_small(modules, settings=settings, storage_options=storage_options)
    if raw is None:
        return frozenset()
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError):
        # An invalid `modules.json` is not an error here, because the file is copied unchanged.
        return frozenset()
    named = entries if isinstance(entries, list) else []
    return frozenset(str(entry.get("path")) for entry in named if isinstance(entry, dict))


def _other_models(found: Mapping[str, str], parts: Collection[str]) -> frozenset[str]:
    """Return the folders that contain a different model: weights with a configuration, or a manifest."""
    folders: dict[str, set[str]] = {}
    for name in found:
        folder, _, last = name.rpartition("/")
        if folder:
            kind = "manifest" if last == SIDECAR else "weights" if _WEIGHTS.search(last) else last
            folders.setdefault(folder, set()).add(kind)
    return frozenset(
        folder
        for folder, kinds in folders.items()
        if folder not in parts and ("manifest" in kinds or {"weights", "config.json"} <= kinds)
    )


def _why_not(name: str, models: Collection[str]) -> str:
    """Return the reason why a file is not copied, or "" if it is copied."""
    folders, _, last = name.rpartition("/")
    parents = folders.split("/") if folders else []
    if other := next((folder for folder in parents if _OTHER_FORMATS.search(folder)), None):
        return f"the folder {other} is not part of the model in this format"
    if any("/".join(parents[: i + 1]) in models for i in range(len(parents))):
        return "in a folder with another model: convert that too"
    if last.endswith(".safetensors"):
        return "not part of the weight set" if not folders else "weights in a folder, which are not converted"
    if _INDEX.search(last):
        return "an index of weights that are not copied"
    if _WEIGHTS.search(last):
        return "weights in another format"
    return "" if _SMALL.search(last) else "neither a configuration nor a tokenizer, by its name"


def _too_large(
    files: Mapping[str, str], settings: Settings, storage_options: Mapping[str, str] | None
) -> dict[str, str]:
    def size(file: str) -> int | None:
        try:
            if not is_remote(file):
                return os.stat(local_path(file)).st_size
            with contextlib.closing(open_source(file, settings=settings, storage_options=storage_options)) as source:
                return source.nbytes
        except (OSError, NotFound):
            return None

    with Threads(_LOOKUPS, thread_name_prefix="penstock-lookup") as pool:
        sizes = dict(zip(files, pool.map(size, files.values()), strict=True))
    limit = bytes_text(_MAX_BYTES)
    return {name: f"{bytes_text(n)}, above the limit of {limit}" for name, n in sizes.items() if n and n > _MAX_BYTES}


def read_file(file: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> bytes:
    """Return the content of a file from `find_small_files`. Raise NotFound if the file was removed."""
    raw = read_small(file, settings=settings, storage_options=storage_options)
    if raw is None:
        raise NotFound("the file was removed during the conversion", uri=display(file), hint="run the conversion again")
    return raw
