"""Downloads of models into the local cache of their hub's library, for Penstock and other tools."""

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

# Weight formats that a load does not read. Repositories often contain the model in several formats.
_OTHER_WEIGHTS = (SUFFIX, ".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".tflite")


@dataclass(frozen=True, slots=True, kw_only=True)
class FillReport(Summarised):
    """The outcome of one `fill`."""

    uri: str
    directory: str
    """The directory of the files. Other tools find it by the model's name."""
    num_files: int
    nbytes: int
    fetched_files: int
    """Number of files written by this call and verified against the hub's digests."""
    fetched_bytes: int
    wall_s: float

    @property
    def gb_per_s(self) -> float:
        """Download rate in decimal GB/s."""
        return self.fetched_bytes / self.wall_s / 1e9 if self.wall_s else 0.0

    def summary(self) -> str:
        """Return two lines of text for users."""
        size = f"{self.num_files} files, {bytes_text(self.nbytes)}"
        fetched = f"{self.fetched_files} fetched and checked against the hub's digests: "
        fetched += f"{bytes_text(self.fetched_bytes)} in {self.wall_s:.1f} s, {self.gb_per_s:.2f} GB/s"
        others = f"; {self.num_files - self.fetched_files} existed" if self.num_files > self.fetched_files else ""
        return f"{self.uri}: {size}; {fetched}{others}\nin the cache: {self.directory}"


def fill(
    uri: Uri,
    *,
    settings: Settings | None = None,
    storage_options: Mapping[str, str] | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> FillReport:
    """Write a repository's files to the local cache of its hub's library, where other tools find them.

    Each file appears complete and verified against the hub's digest, or not at all. The call waits for other processes
    that download the same model, even with the library's tools.

    Args:
        uri: `org/name`, `hf://org/name@REVISION`, or a file, folder or glob in it.
        settings: limits. None reads them from the environment.
        storage_options: `token`, `endpoint`.
        on_bytes: called with the number of bytes fetched so far and the total.

    Raises:
        ConfigError: the URI is not a repository on a hub.
        DiskFull, DestinationError: the cache cannot be written.
        IntegrityError: a file differs from the hub's digest.
        SourceError: the hub failed.
    """
    return _fill(texts_of(uri)[0], None, settings or Settings.read(), storage_options or {}, on_bytes)


def fill_weights(
    uri: Uri,
    *,
    settings: Settings,
    storage_options: Mapping[str, str] | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> FillReport:
    """Fill the cache with the files that a load of `uri` reads, and the small files next to them.

    Raises as `fill`. Weights in other formats and subdirectories are omitted, because engines do not need them.
    """
    text = texts_of(uri)[0]
    _storage(text)
    place = pinned(text, settings=settings, storage_options=storage_options)
    weights = {_inside(file) for _, file in resolve(place, settings=settings, storage_options=storage_options).files}
    is_index = place.endswith(INDEX_SUFFIX)
    folder = _inside(place).rpartition("/")[0] if is_index else _inside(place)

    def is_needed(name: str) -> bool:
        is_sibling = name.rpartition("/")[0] == folder and not name.endswith(_OTHER_WEIGHTS)
        return name in weights or is_sibling

    return _fill(text.rpartition("/")[0] if is_index else text, is_needed, settings, storage_options or {}, on_bytes)


def _fill(
    uri: str,
    is_needed: Callable[[str], bool] | None,
    settings: Settings,
    options: Mapping[str, str],
    on_bytes: Callable[[int, int], None] | None,
) -> FillReport:
    started = time.perf_counter()
    storage = _storage(uri)
    default = str(library().constants.DEFAULT_REVISION)
    contents = storage.contents(uri, default=default, settings=settings, storage_options=options)
    if is_needed is not None:
        contents = replace(contents, files={name: file for name, file in contents.files.items() if is_needed(name)})
    total_bytes = fetched_bytes = 0

    def copy(paths: Mapping[str, Path], publish: Callable[[str], None]) -> None:
        nonlocal total_bytes
        names = {contents.uri_of(name): name for name in paths}
        total_bytes += sum(contents.files[name].nbytes for name in paths)
        download(
            {uri: paths[name] for uri, name in names.items()},
            # The hub's cache suffices, so bypass the chunk cache.
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
        wall_s=time.perf_counter() - started,
    )


def _storage(uri: str) -> HuggingFaceStorage:
    storage = storage_for("hf") if uri.startswith("hf://") else None
    if not isinstance(storage, HuggingFaceStorage):
        hint = "use org/name or hf://; PENSTOCK_CACHE_DIR caches reads from any storage"
        raise ConfigError("only a model hub has a cache that can be filled", uri=uri, hint=hint)
    return storage


def _inside(uri: str) -> str:
    """Return the path of a pinned URI inside its repository, or "" for the repository itself."""
    return uri.partition("@")[2].partition("/")[2].rstrip("/")
