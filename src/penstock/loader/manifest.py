"""The verb `manifest`: write the digests of a weight set next to it, so that every later load is verified.

In: a URI, a private key perhaps. Out: the sidecar, its detached signature, a report.
Not here: digests, encoding and signatures (`storage.weight_set`), comparing (`verify`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.config import Settings
from penstock.errors import ConfigError
from penstock.loader.progress import Counter, ProgressOption, looked_at
from penstock.loader.verify import read_key
from penstock.report import Summarised
from penstock.storage import is_remote, local_path, text_of, weight_set, write_small
from penstock.storage.output import typed
from penstock.types import GB


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestReport(Summarised):
    """Outcome of `manifest`: what it read and wrote."""

    uri: str
    revision: str
    """The `w1-` root of all digests."""
    num_tensors: int
    nbytes: int
    num_leaves: int
    leaf_bytes: int
    """Most bytes that one digest is of."""
    written: tuple[str, ...]
    """The manifest, and before it its signature where a key was given."""

    def summary(self) -> str:
        """Return two lines for people."""
        return (
            f"{self.uri}: {self.num_tensors} tensors, {self.nbytes / GB:.2f} GB, {self.num_leaves} digests of at most "
            f"{self.leaf_bytes} bytes; revision {self.revision}\nwritten: {', '.join(self.written)}"
        )


def manifest(
    uri: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    sign: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, str] | None = None,
    progress: ProgressOption = None,
) -> ManifestReport:
    """Read every body once and write the manifest with its digests, so that every later load is verified.

    Args:
        uri: a file, directory, index or prefix; see `load`.
        out: where to write; None: next to the weights.
        sign: path of an Ed25519 private key in PEM; a detached signature is written beside the manifest.
        storage_options: see `load`; of reading and of writing.
        progress: see `load`.

    Raises:
        ConfigError: the destination cannot be written to (plain http), or the key cannot be read.
        SourceError, FormatError: as `load`. DestinationError, DiskFull: nothing was written.
    """
    place, settings = text_of(uri), Settings.read()
    target = weight_set.sidecar_uri(place) if out is None else text_of(out)
    if target.startswith(("http://", "https://")):
        raise ConfigError("plain http(s) cannot be written", uri=target, hint="give --out FILE and upload it there")
    key = None if sign is None else read_key(sign)
    with weight_set.open_weights(place, settings=settings, storage_options=storage_options) as weights:
        counter = Counter(weights.manifest.nbytes)
        with looked_at(progress, place, counter.look):
            built = weight_set.build(weights, on_bytes=counter.add)
    raw = weight_set.encode(built)
    # The signature first: a reader that finds the new manifest finds the signature of it.
    files = {target: raw} if key is None else {f"{target}.sig": weight_set.sign(raw, key), target: raw}
    for file, data in files.items():
        _write_whole(file, data, settings, storage_options)
    return ManifestReport(
        uri=place,
        revision=built.revision,
        num_tensors=len(built.tensors),
        nbytes=built.nbytes,
        num_leaves=0 if built.leaves is None else len(built.leaves),
        leaf_bytes=built.leaf_bytes,
        written=tuple(files),
    )


def _write_whole(uri: str, data: bytes, settings: Settings, storage_options: Mapping[str, str] | None) -> None:
    """Write a small file or object that appears whole, or leaves the one before it."""
    if is_remote(uri):
        write_small(uri, data, settings=settings, storage_options=storage_options)
        return
    path = Path(local_path(uri))
    with typed(path):
        # In the same directory: a rename is atomic only within a file system.
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # mkstemp makes it 0600: other users who may read the weights must be able to verify them.
            Path(partial).chmod(0o644)
            Path(partial).replace(path)
        finally:
            Path(partial).unlink(missing_ok=True)
