"""Models in the local cache of their hub's own library, written by Penstock for other tools too.

In: the URI of a repository. Out: its files in that cache, and a report.
Not here: the cache's layout (`hub_cache`), loading (`loader`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config import Settings
from penstock.errors import ConfigError
from penstock.report import Summarised, bytes_text
from penstock.storage import pinned
from penstock.storage.download import download
from penstock.storage.hub_cache import HubCache
from penstock.storage.hugging_face import HuggingFaceStorage, library
from penstock.storage.locate import INDEX_SUFFIX, SUFFIX, Uri, resolve, texts_of
from penstock.storage.source import storage_for

# Weights in formats that a load does not read: often the whole model a second time.
_OTHER_WEIGHTS = (SUFFIX, ".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".tflite")


@dataclass(frozen=True, slots=True, kw_only=True)
class FillReport(Summarised):
    """The outcome of one `fill`."""

    uri: str
    """Pinned: it names the commit."""
    directory: str
    """Where the files are; other tools find them there by the model's name."""
    num_files: int
    nbytes: int
    fetched_files: int
    """Files that were written now; each was compared with the hub's digest. The others were there already."""
    fetched_bytes: int
    wall_s: float

    @property
    def gb_per_s(self) -> float:
        """Return the rate of what was fetched, in decimal GB/s."""
        return self.fetched_bytes / self.wall_s / 1e9 if self.wall_s else 0.0

    def summary(self) -> str:
        """Return two lines for people."""
        size = f"{self.num_files} files, {bytes_text(self.nbytes)}"
        fetched = f"{self.fetched_files} fetched and compared with the hub's digests: "
        fetched += f"{bytes_text(self.fetched_bytes)} in {self.wall_s:.1f} s, {self.gb_per_s:.2f} GB/s"
        there = f"; {self.num_files - self.fetched_files} were there" if self.num_files > self.fetched_files else ""
        return f"{self.uri}: {size}; {fetched}{there}\nin the cache: {self.directory}"


def fill(
    uri: Uri,
    *,
    settings: Settings | None = None,
    storage_options: Mapping[str, str] | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> FillReport:
    """Write a repository's files to the local cache of its hub's own library, where other tools find them.

    Each file appears there complete and compared with the hub's digest, or not at all; a later call fetches
    the files that are missing. It waits for processes that download the same model, also with the library's tools.

    Args:
        uri: `org/name`, `hf://org/name@REVISION`, or a file, folder or glob of it.
        settings: limits; None: from the environment.
        storage_options: `token`, `endpoint`.
        on_bytes: called with the bytes done and the bytes in all.

    Raises:
        ConfigError: no repository of a hub. DiskFull, DestinationError: the cache cannot be written.
        IntegrityError: a content is not the hub's. SourceError: the hub failed.
    """
    return _fill(texts_of(uri)[0], None, settings or Settings.read(), storage_options or {}, on_bytes)


def fill_weights(
    uri: Uri,
    *,
    settings: Settings,
    storage_options: Mapping[str, str] | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> FillReport:
    """Write to that cache what a load of `uri` reads, and the small files next to it; raises as `fill`.

    Not the same weights in other formats, nor directories below: engines need neither.
    """
    text = texts_of(uri)[0]
    _storage(text)
    place = pinned(text, settings=settings, storage_options=storage_options)
    read = {_inside(file) for _, file in resolve(place, settings=settings, storage_options=storage_options).files}
    is_index = place.endswith(INDEX_SUFFIX)
    folder = _inside(place).rpartition("/")[0] if is_index else _inside(place)

    def wanted(name: str) -> bool:
        is_beside = name.rpartition("/")[0] == folder and not name.endswith(_OTHER_WEIGHTS)
        return name in read or is_beside

    return _fill(text.rpartition("/")[0] if is_index else text, wanted, settings, storage_options or {}, on_bytes)


def _fill(
    uri: str,
    wanted: Callable[[str], bool] | None,
    settings: Settings,
    options: Mapping[str, str],
    on_bytes: Callable[[int, int], None] | None,
) -> FillReport:
    """Fill the cache with the files of a URI whose names a function wants; None: all of them."""
    begun = time.perf_counter()
    storage = _storage(uri)
    default = str(library().constants.DEFAULT_REVISION)
    contents = storage.contents(uri, default=default, settings=settings, storage_options=options)
    if wanted is not None:
        contents = replace(contents, files={name: file for name, file in contents.files.items() if wanted(name)})
    total_bytes = fetched_bytes = 0

    def copy(paths: Mapping[str, Path], publish: Callable[[str], None]) -> None:
        nonlocal total_bytes
        names = {contents.uri_of(name): name for name in paths}
        total_bytes += sum(contents.files[name].nbytes for name in paths)
        download(
            {uri: paths[name] for uri, name in names.items()},
            # What goes into one cache need not go into another.
            settings=replace(settings, cache_dir=None),
            storage_options=options,
            on_file=lambda uri: publish(names[uri]),
            on_bytes=count,
        )

    def count(nbytes: int) -> None:
        nonlocal fetched_bytes
        fetched_bytes += nbytes
        if on_bytes is not None:
            on_bytes(fetched_bytes, total_bytes)

    cache = HubCache(contents, stall_s=settings.stall_s)
    written = cache.fill(copy)
    for path in written:
        storage.trust(str(path))
    return FillReport(
        uri=contents.uri,
        directory=str(cache.snapshot),
        num_files=len(contents.files),
        nbytes=sum(file.nbytes for file in contents.files.values()),
        fetched_files=len(written),
        fetched_bytes=fetched_bytes,
        wall_s=time.perf_counter() - begun,
    )


def _storage(uri: str) -> HuggingFaceStorage:
    """Return the storage of a model hub. ConfigError: the URI is of another one."""
    storage = storage_for("hf") if uri.startswith("hf://") else None
    if not isinstance(storage, HuggingFaceStorage):
        hint = "give org/name or hf://; PENSTOCK_CACHE_DIR keeps what is read of any storage"
        raise ConfigError("only a model hub has a cache of its own to fill", uri=uri, hint=hint)
    return storage


def _inside(uri: str) -> str:
    """Return the name that a pinned URI has inside its repository; empty for the repository itself."""
    return uri.partition("@")[2].partition("/")[2].rstrip("/")
