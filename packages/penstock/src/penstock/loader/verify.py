"""The verbs `inspect`, `manifest` and `verify`: the content of a weight set, its digests, and their comparison."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from penstock.config import Settings
from penstock.digest.leaf import LEAF_BYTES
from penstock.errors import ConfigError, FormatError, IntegrityError, NotFound, PermissionDenied, SourceError
from penstock.loader.progress import Counter, Progress, ProgressOption
from penstock.report import Summarised, bytes_text, plain
from penstock.storage import is_remote, local_path, pinned, read_small, text_of, weight_set, write_small
from penstock.storage.gguf import GgufBlocks, blocks_of
from penstock.storage.local import read_bounded
from penstock.storage.locate import texts_of
from penstock.storage.weight_set import Uris, build, check_signature, decode, open_weights, sidecar_uri, signature_uri
from penstock.storage.write import new_file
from penstock.types import NOT_IN_TORCH, Manifest

MAX_KEY_BYTES = 64 << 10
"""Maximum size of a PEM key file. An Ed25519 key with a certificate chain has a few KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectReport(Summarised):
    """The content of a weight set, from its headers alone."""

    uri: str
    manifest: Manifest
    num_tensors: int
    nbytes: int
    dtypes: Mapping[str, int]
    """Bytes for each dtype, or for each GGUF block type such as `Q4_K`."""
    not_loadable: tuple[str, ...]
    """Tensors whose dtype torch does not have. `load` rejects them, and `names=` can leave them out."""
    blocks: Mapping[str, GgufBlocks] = field(default_factory=dict)
    """Type and shape in elements of the quantised tensors in GGUF files, by name. `load` returns their bytes as U8."""

    def summary(self) -> str:
        """Return a line of text for users, and a second line for tensors that cannot be loaded."""
        dtypes = ", ".join(f"{dtype} {bytes_text(nbytes)}" for dtype, nbytes in self.dtypes.items())
        line = f"{self.uri}: {self.num_tensors} tensors, {bytes_text(self.nbytes)}: {dtypes or 'empty'}"
        return f"{line}\nnot loadable: {', '.join(self.not_loadable)}" if self.not_loadable else line

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, with the revision instead of the manifest."""
        # The manifest contains a row for each tensor, which is too much for a line of JSON.
        fields = {name: getattr(self, name) for name in ("uri", "num_tensors", "nbytes", "dtypes", "not_loadable")}
        return {**plain(fields), "revision": self.manifest.revision}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(Summarised):
    """The result of `verify`. `verified` is False only if there were no digests."""

    verified: bool
    why: str
    num_leaves: int
    nbytes: int
    revision: str
    signature: str
    """`good`, `not asked` or `none`."""

    def summary(self) -> str:
        """Return a line of text for users."""
        verdict = "verified" if self.verified else "not verified"
        return (
            f"{verdict}: {self.why}; {bytes_text(self.nbytes)}, revision {self.revision[:19]}, "
            f"signature {self.signature}"
        )


def inspect(uri: Uris, *, storage_options: Mapping[str, str] | None = None) -> InspectReport:
    """Read the headers, the index and the manifest of a weight set, but no tensor bytes.

    Raises:
        FormatError, SourceError: like `load`.
    """
    with open_weights(uri, settings=Settings.read(), storage_options=storage_options) as weights:
        table = weights.manifest.tensors
        blocks = blocks_of(weights.manifest)
        dtypes: dict[str, int] = {}
        for name, dtype, nbytes in zip(table.names, table.dtypes, table.nbytes.tolist(), strict=True):
            kind = blocks[name].type if name in blocks else dtype.value
            dtypes[kind] = dtypes.get(kind, 0) + nbytes
        return InspectReport(
            uri=weights.uri,
            manifest=weights.manifest,
            num_tensors=len(table),
            nbytes=weights.manifest.nbytes,
            dtypes=dtypes,
            blocks=blocks,
            not_loadable=tuple(n for n, dtype in zip(table.names, table.dtypes, strict=True) if dtype in NOT_IN_TORCH),
        )


def verify(
    uri: Uris,
    *,
    public_key: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, str] | None = None,
    progress: ProgressOption = None,
) -> VerifyReport:
    """Read all tensor bytes and compare them with the manifest's digests.

    Args:
        uri, storage_options, progress: see `load`.
        public_key: path of an Ed25519 public key in PEM format. The signature is checked before any tensor is read.

    Raises:
        ConfigError: the key cannot be read.
        IntegrityError: a leaf differs (the error names the tensor and range), or the signature is invalid.
        NotFound: a key was passed, but there is no manifest or no signature for it.
        SourceError, FormatError: like `load`.
    """
    settings = Settings.read()
    signed_revision: str | None = None
    if public_key is not None:
        signed_revision = _check_signed(uri, public_key, settings, storage_options)
    with open_weights(uri, settings=settings, storage_options=storage_options) as weights:
        stated = weights.manifest
        # The manifest was read twice, for its signature and to open the weights.
        if signed_revision not in {None, stated.revision}:
            raise IntegrityError("the manifest changed after its signature was checked", uri=weights.uri)
        report = VerifyReport(
            verified=stated.leaves is not None,
            why=weights.why_unverified or "no digests",
            num_leaves=0,
            nbytes=stated.nbytes,
            revision=stated.revision,
            signature="not asked" if public_key is None else "good",
        )
        if stated.leaves is None:
            return report
        counter = Counter(stated.nbytes)
        with Progress(progress, weights.uri) as shown, shown.watching(counter.look):
            measured = build(weights, leaf_bytes=stated.leaf_bytes, on_bytes=counter.add)
        places = [source.uri for source in weights.sources]
    assert measured.leaves is not None
    # Raise after reading everything, because the number of wrong leaves distinguishes a bad disk from a wrong file.
    wrong = np.flatnonzero(measured.leaves != stated.leaves)
    if len(wrong):
        raise _fault(stated, places, int(wrong[0]), len(wrong))
    num_leaves = len(stated.leaves)
    return replace(report, why=f"{num_leaves} leaf digests compared", num_leaves=num_leaves)


def _check_signed(
    uri: Uris, public_key: str | os.PathLike[str], settings: Settings, storage_options: Mapping[str, str] | None
) -> str:
    pem = read_key(public_key)
    if not isinstance(uri, str | os.PathLike):
        raise ConfigError(
            "a signature can only be checked for one weight set", hint="pass one directory, prefix or file"
        )
    place = str(uri)
    raw = read_small(sidecar_uri(place), settings=settings, storage_options=storage_options)
    signature = read_small(signature_uri(place), settings=settings, storage_options=storage_options)
    if raw is None or signature is None:
        missing = "manifest" if raw is None else "signature"
        raise NotFound(
            f"there is no {missing} to verify", uri=place, hint="create it with `penstock manifest URI --sign KEY`"
        )
    # Check the signature first, so that unsigned bytes are not parsed.
    check_signature(raw, signature, pem)
    return decode(raw, uri=sidecar_uri(place)).revision


def read_key(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a key file. Raise ConfigError if the file cannot be read or is too long for a key."""
    name = text_of(path)
    # Limit the size, because a wrong path may lead to a large file or to a device.
    try:
        return read_bounded(name, MAX_KEY_BYTES)
    except (SourceError, FormatError) as error:
        raise ConfigError(f"cannot read the key {name}: {error.message}") from error


def _fault(manifest: Manifest, places: Sequence[str], leaf: int, count: int) -> IntegrityError:
    """Return the error for the first leaf that differs. Leaves are numbered over all tensors in table order."""
    table = manifest.tensors
    stops = np.cumsum(-(-table.nbytes // manifest.leaf_bytes))
    row = int(np.searchsorted(stops, leaf, side="right"))
    inside = leaf - (int(stops[row - 1]) if row else 0)
    start = inside * manifest.leaf_bytes
    stop = min(start + manifest.leaf_bytes, int(table.nbytes[row]))
    at = int(table.offset[row])
    return IntegrityError(
        f"{count} of the manifest's digests differ, the first at bytes [{start}, {stop}) of the tensor",
        uri=places[int(table.file_index[row])],
        tensor=table.names[row],
        byte_range=(at + start, at + stop),
        hint="download the file again. If it is right, write a new manifest with `penstock manifest URI --force`",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestReport(Summarised):
    """The result of `manifest`."""

    uri: str
    revision: str
    """The `w1-` revision, which is the root of all digests."""
    num_tensors: int
    nbytes: int
    num_leaves: int
    leaf_bytes: int
    """Maximum number of bytes that one digest covers."""
    written: tuple[str, ...]
    """The files that were written, in order. Empty if the existing manifest is up to date."""

    def summary(self) -> str:
        """Return two lines of text for users."""
        return (
            f"{self.uri}: {self.num_tensors} tensors, {bytes_text(self.nbytes)}, {self.num_leaves} digests of at most "
            f"{bytes_text(self.leaf_bytes)}; revision {self.revision}\nwritten: {self.written_text}"
        )

    @property
    def written_text(self) -> str:
        """Return the names of the written files as text, or why no file was written."""
        return ", ".join(self.written) or "nothing, the manifest is up to date"


def manifest(
    uri: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    sign: str | os.PathLike[str] | None = None,
    replace: bool = False,
    storage_options: Mapping[str, str] | None = None,
    progress: ProgressOption = None,
) -> ManifestReport:
    """Read all tensor bytes once and write the manifest with their digests, so that every later load is verified.

    An existing manifest with the same digests is kept, or signed again. A manifest with different digests is replaced
    only with `replace=True`, because the weights may be corrupted.

    Args:
        uri: a file, directory, index or prefix. See `load`.
        out: path or URI of the manifest, or None to write the manifest next to the weights.
        sign: path of an Ed25519 private key in PEM format. A detached signature is written next to the manifest.
        replace: overwrite a manifest that has different digests or cannot be read, for weights that were changed on
            purpose.
        storage_options, progress: see `load`.

    Raises:
        ConfigError: the destination cannot be written (plain http, or not a regular file), the key cannot be read, or
            the existing manifest is signed and `sign` is None. Nothing was written.
        IntegrityError: the existing manifest has different digests. Nothing was written.
        FormatError: the existing manifest cannot be read. Nothing was written.
        SourceError: like `load`.
        DestinationError, DiskFull: nothing was written.
    """
    settings = Settings.read()
    # Pin the revision before reading, because the manifest must belong to the commit whose bytes it digests.
    place = pinned(texts_of(text_of(uri))[0], settings=settings, storage_options=storage_options)
    target = weight_set.sidecar_uri(place) if out is None else text_of(out)
    if target.startswith(("http://", "https://")):
        raise ConfigError("cannot write to an http(s) URL", uri=target, hint="pass --out FILE, and upload that file")
    # Check before reading the tensor bytes, so that a wrong path fails at once.
    key = None if sign is None else read_key(sign)
    _require_regular(target)
    before = _read_existing(target, settings, storage_options)
    stated = None if before is None or replace else _decode_stated(before, target)
    # Ignore an existing manifest, because `open_weights` rejects weights that differ from it.
    with open_weights(place, settings=settings, storage_options=storage_options, with_manifest=False) as weights:
        _require_no_weights(target, weights)
        counter = Counter(weights.manifest.nbytes)
        # Use the leaf size of the existing manifest, so that the digests are comparable.
        leaf_bytes = LEAF_BYTES if stated is None else stated.leaf_bytes
        with Progress(progress, place) as shown, shown.watching(counter.look):
            built = build(weights, leaf_bytes=leaf_bytes, on_bytes=counter.add)
        places = [source.uri for source in weights.sources]
    raw = weight_set.encode(built)
    if stated is not None and stated.leaves is not None and stated.revision != built.revision:
        raise _other_weights(stated, decode(raw, uri=target), places, target)
    is_current = before is not None and _without_identities(before) == _without_identities(raw)
    if is_current and before is not None:
        # The bytes are unchanged, so an existing signature stays valid.
        raw = before
    elif before is not None and key is None and _read_existing(f"{target}.sig", settings, storage_options) is not None:
        raise ConfigError(
            "the existing manifest is signed, and its signature would not match the new manifest. Nothing was written",
            uri=f"{target}.sig",
            hint="sign the new manifest with --sign KEY, or remove the signature first",
        )
    # Write the signature first, so that a reader that finds the new manifest also finds its signature.
    files = {target: raw} if key is None else {f"{target}.sig": weight_set.sign(raw, key), target: raw}
    if is_current and key is None:
        files = {}
    for file, data in files.items():
        if is_remote(file):
            write_small(file, data, settings=settings, storage_options=storage_options)
            continue
        # Other users who may read the weights must be able to verify them.
        with new_file(Path(local_path(file)), 0o644) as opened:
            opened.write(data)
    return ManifestReport(
        uri=place,
        revision=built.revision,
        num_tensors=len(built.tensors),
        nbytes=built.nbytes,
        num_leaves=0 if built.leaves is None else len(built.leaves),
        leaf_bytes=built.leaf_bytes,
        written=tuple(files),
    )


def _require_no_weights(target: str, weights: weight_set.WeightSet) -> None:
    """Raise ConfigError if the manifest or its signature would replace a file that the manifest describes."""
    for file in (target, f"{target}.sig"):
        for source in weights.sources:
            is_same = source.uri == file
            if not is_same and not is_remote(file) and not is_remote(source.uri):
                with contextlib.suppress(OSError):
                    is_same = os.path.samefile(local_path(file), local_path(source.uri))
            if is_same:
                hint = "use a different name for the manifest"
                raise ConfigError("the manifest would replace a file of the weights", uri=file, hint=hint)


def _require_regular(uri: str) -> None:
    for file in () if is_remote(uri) else (uri, f"{uri}.sig"):
        path = local_path(file)
        # A rename as root would replace a device such as /dev/full with a file.
        if os.path.exists(path) and not os.path.isfile(path):
            hint = "use the path of a regular file or of a new file"
            raise ConfigError("the manifest's path is not a regular file", uri=file, hint=hint)


def _read_existing(uri: str, settings: Settings, storage_options: Mapping[str, str] | None) -> bytes | None:
    try:
        return read_small(uri, settings=settings, storage_options=storage_options)
    except PermissionDenied:
        # A bucket that may be read but not listed responds with "forbidden" for an absent object.
        if is_remote(uri):
            return None
        raise


def _decode_stated(raw: bytes, uri: str) -> Manifest:
    try:
        return decode(raw, uri=uri)
    except (FormatError, IntegrityError) as error:
        raise FormatError(
            f"the existing file is not a readable manifest ({error.message}). Nothing was written",
            uri=uri,
            hint="replace it with --force (replace=True) if the weights are known to be correct",
        ) from error


def _other_weights(stated: Manifest, measured: Manifest, places: Sequence[str], uri: str) -> IntegrityError:
    """Return the error for weights that differ from the existing manifest. Both manifests are sorted by name."""
    fault = IntegrityError("their tensors differ in name, dtype or shape", uri=uri)
    same = [getattr(stated.tensors, name) == getattr(measured.tensors, name) for name in ("names", "dtypes", "shapes")]
    if all(same) and stated.leaves is not None and measured.leaves is not None:
        wrong = np.flatnonzero(measured.leaves != stated.leaves)
        fault = _fault(measured, places, int(wrong[0]), len(wrong))
    return IntegrityError(
        f"the weights differ from the existing manifest, which has revision {stated.revision[:19]} while the "
        f"weights have {measured.revision[:19]}: {fault.message}. Nothing was written",
        uri=fault.uri,
        tensor=fault.tensor,
        byte_range=fault.byte_range,
        hint="download damaged files again. If they were changed on purpose, replace the manifest with "
        "--force (replace=True)",
    )


def _without_identities(raw: bytes) -> bytes | None:
    """Return a manifest's bytes without the files' identities, or None if the manifest cannot be read."""
    try:
        manifest = decode(raw, uri="")
    except (FormatError, IntegrityError):
        return None
    return weight_set.encode(
        structs.replace(manifest, files=tuple(structs.replace(file, identity="") for file in manifest.files))
    )
