"""Puts a model's files in a directory before an engine starts, from a fleet or from storage.

KServe passes a URI and a directory to an init container, which calls `initialize`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import ConnectionSettings, Settings
from penstock.errors import ConfigError, SourceUnavailable
from penstock.report import Summarised, bytes_text, shares_text
from penstock.storage import is_remote, list_uris, pinned, read_small
from penstock.storage.download import download, inside
from penstock.storage.locate import (
    INDEX_SUFFIX,
    SIDECAR,
    SUFFIX,
    directory_prefix,
    display,
    list_files,
    model_name,
    texts_of,
)
from penstock.storage.place import DestinationClaim, OutputPlace, clear, require_apart, unlock
from penstock.storage.small_files import walk
from penstock.storage.write import new_directory, typed

if TYPE_CHECKING:
    from penstock.fetcher.report import FetchReport

FLEET_PREFIX = "penstock+"
"""Prefix for URIs that another storage initializer in the cluster would also claim."""
PARTIAL = ".penstock.partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class InitializeReport(Summarised):
    """The outcome of `initialize`."""

    uri: str
    destination: str
    num_files: int
    nbytes: int
    """Total size of the files in bytes."""
    wall_s: float
    nbytes_by_path: Mapping[str, int]
    """Bytes received by each path, such as `shm <- MEMBER` or `storage URI`."""
    verified: bool
    why: str
    """What the weights were compared with, or why there was nothing to compare with."""
    faults: tuple[str, ...]
    """Sources that failed, with the reasons."""

    def summary(self) -> str:
        """Return one line with the size, the paths and the verification, and one line for each fault."""
        size = f"{self.num_files} files, {bytes_text(self.nbytes)} in {self.wall_s:.1f} s"
        verdict = f"{'verified' if self.verified else 'NOT verified'}: {self.why}"
        line = f"{self.uri} -> {self.destination}: {size}; {shares_text(self.nbytes_by_path)}; {verdict}"
        return "\n".join([line, *(f"fault: {fault}" for fault in self.faults)])


def initialize(
    uri: str, destination: str | os.PathLike[str], *, connection: ConnectionSettings | str | None = None
) -> InitializeReport:
    """Put all files of a model into a directory, and verify the weights.

    If a hub is set (`connection`, `PENSTOCK_HUB`), weights are fetched from fleet members, and from storage if no
    member has them. The other files are copied from storage. If the hub does not respond, this function logs a
    warning and copies everything from storage.

    Args:
        uri: a directory, prefix or file as for `load`, with files of any format. The prefix `penstock+` is
            allowed. The last segment is the model's name in the fleet.
        destination: a directory, which may exist. Files with the same names are replaced.
        connection: the hub, or its address. See `penstock.join`.

    Raises:
        ConfigError: the destination contains weights of a different model, or is the source. Nothing was changed.
        IntegrityError: weights differ from the manifest. The destination did not receive any file.
        DiskFull, DestinationError: the destination cannot be written, or another process writes to it.
        SourceError, FormatError: the storage failed, or the weights are malformed.
    """
    from penstock.hub.client import resolve_connection

    begun = time.perf_counter()
    uri = uri.removeprefix(FLEET_PREFIX)
    settings, connection = Settings.read(), resolve_connection(connection)
    target = OutputPlace.at(destination).path
    partial = target / PARTIAL
    # Pin the URI, because a branch may move while its files are copied.
    place = pinned(texts_of(uri)[0], settings=settings)
    with typed(target):
        require_apart([place], target, replace=True)
    files = _files(place, settings)
    with new_directory(target), DestinationClaim.open(target, partial):
        try:
            with typed(target):
                clear(partial)
            weights = {name for name in files if _is_weights(name)}
            if not any(name.endswith(SUFFIX) for name in weights):
                # A fetch would write the blocks of GGUF files as safetensors, so copy these files unchanged.
                weights = set()
            fetched = None
            if connection.hub is not None and weights:
                fetched = _from_fleet(model_name(uri), place, partial, connection)
            if fetched is None:
                # Check before copying. Files from a fleet may have other names, which are checked when they exist.
                _require_no_others(target, [name for name in files if _is_weights(name)])
            copied = [name for name in files if fetched is None or name not in weights]
            paths = {} if fetched is None else dict(fetched.nbytes_by_path)
            downloaded = download({files[name]: inside(partial, name, uri=uri) for name in copied}, settings=settings)
            if downloaded.nbytes:
                at = f"storage {display(uri)}"
                paths[at] = paths.get(at, 0) + downloaded.nbytes
            if fetched is None:
                compared = {name for name in copied if files[name] in downloaded.compared}
                verified, why = _verify(partial, weights, compared)
            else:
                verified, why = fetched.verified, fetched.verified_against
            unlock(partial)
            num_files, nbytes = _publish(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return InitializeReport(
        uri=display(uri),
        destination=str(target),
        num_files=num_files,
        nbytes=nbytes,
        wall_s=time.perf_counter() - begun,
        nbytes_by_path=paths,
        verified=verified,
        why=why,
        faults=() if fetched is None else fetched.faults,
    )


def copy_other_files(
    place: str, target: Path, extra: Mapping[str, bytes], storage_options: Mapping[str, str] | None = None
) -> None:
    """Put all files of a model except its weights into a directory: configuration, tokenizer, index.

    Several processes may copy the same files at once. Each file appears complete and replaces an existing file.

    Args:
        place: a pinned URI.
        target: a directory, created if it does not exist.
        extra: content of further files by name, written last.
        storage_options: see `penstock.load`.

    Raises:
        NotFound, SourceError: storage does not have the files, or failed.
        DiskFull, DestinationError: the directory cannot be written.
    """
    settings = Settings.read()
    files = _files(place, settings, storage_options)
    with typed(target):
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=target) as temporary:
            partial = Path(temporary)
            wanted = {uri: inside(partial, name, uri=place) for name, uri in files.items() if not name.endswith(_BULK)}
            for path in wanted.values():
                path.parent.mkdir(parents=True, exist_ok=True)
            download(wanted, settings=settings, storage_options=storage_options)
            for name, content in extra.items():
                (partial / name).write_bytes(content)
            names = [str(path.relative_to(partial)) for path in wanted.values()]
            for name in (*names, *extra):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(partial / name, target / name)


_BULK = (SUFFIX, ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", SIDECAR)
"""Endings of weight files in any format, and of the manifest, which describes weights that are not copied."""


def _files(place: str, settings: Settings, storage_options: Mapping[str, str] | None = None) -> dict[str, str]:
    listed = list_files(place, settings=settings, storage_options=storage_options)
    if listed == [place]:
        name = display(place).rpartition("/")[2]
        manifest = f"{place}.{SIDECAR}"
        # A URI with a query has no manifest next to the file.
        if not name.endswith(SUFFIX) or display(place) != place or read_small(manifest, settings=settings) is None:
            return {name: place}
        return {name: place, f"{name}.{SIDECAR}": manifest}
    if place.startswith(("http://", "https://")):
        # HTTP has no directory listings, so `list_files` finds the files by their published names.
        return {file.removeprefix(directory_prefix(place)): file for file in listed}
    root = listed[0].rpartition("/")[0]
    if not is_remote(place):
        # Copy all files, as the cluster's initializers do. A symlink to a parent directory is followed once.
        found, left_out = walk(root, follow_links=True, max_below=None)
        # A skipped directory was already visited under a different name. Skipping a file would leave a gap in the copy.
        for path, why in left_out.items():
            if not os.path.isdir(path) or not os.access(path, os.R_OK | os.X_OK):
                raise SourceUnavailable(why, uri=path, hint="repair or remove this path")
        return found
    return {
        file.removeprefix(f"{root}/"): file
        for file in list_uris(f"{root}/**", settings=settings, storage_options=storage_options)
    }


def _is_weights(name: str) -> bool:
    return "/" not in name and name.endswith((SUFFIX, INDEX_SUFFIX, SIDECAR))


def _from_fleet(model: str, place: str, partial: Path, connection: ConnectionSettings) -> FetchReport | None:
    # Both modules import torch, which copying files does not need.
    from penstock.fetcher.join import join_or_warn
    from penstock.fetcher.to_files import fetch_to_files

    fetched = partial / "fetched"
    joined = join_or_warn(model, place, connection=connection, needs_hub=True)
    if joined is None:
        return None
    with joined as fleet:
        report = fetch_to_files(fleet, to=fetched, fallback=place)
    with typed(partial):
        for file in fetched.iterdir():
            file.rename(partial / file.name)
        fetched.rmdir()
    return report


def _verify(directory: Path, weights: Collection[str], compared: Collection[str]) -> tuple[bool, str]:
    from penstock.loader.verify import verify

    if not weights:
        return False, "there are no safetensors files"
    # A single file has a separate manifest. A directory has one manifest for all files.
    own = [name for name in weights if f"{name}.{SIDECAR}" in weights]
    verdict = verify(str(directory / own[0] if own else directory))
    shards = {name for name in weights if name.endswith(SUFFIX)}
    if not verdict.verified and shards.issubset(compared):
        return True, f"the SHA-256 of {len(shards)} of {len(shards)} files equals the storage's"
    return verdict.verified, verdict.why


def _require_no_others(target: Path, names: Collection[str]) -> None:
    if others := {path.name for path in target.iterdir() if _is_weights(path.name)} - set(names):
        message = f"the destination has weights of a different model: {', '.join(sorted(others)[:3])}"
        raise ConfigError(message, uri=str(target), hint="remove these files, or pass an empty directory")


def _publish(partial: Path, target: Path) -> tuple[int, int]:
    names = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
    _require_no_others(target, names)
    nbytes = sum((partial / name).stat().st_size for name in names)
    with typed(target):
        for name in sorted(names, key=lambda name: name.endswith((INDEX_SUFFIX, SIDECAR))):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / name, target / name)
    return len(names), nbytes
