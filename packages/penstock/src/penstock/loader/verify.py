"""The verbs `inspect`, `manifest` and `verify`: the content of a weight set, its digests, and the comparison with them.

In: a URI; optionally a private key to sign a manifest with, or a public key to check it. Out: frozen reports; from
`manifest` the sidecar next to the weights and its detached signature, by which every later load is verified.
Not here: digests, encoding and signatures (`storage.weight_set`), moving weights (`load`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

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
"""Longest PEM file of a key that is read. Reason: an Ed25519 key has 200 bytes, with a certificate chain a few KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectReport(Summarised):
    """Content of a weight set, from its headers alone."""

    uri: str
    manifest: Manifest
    num_tensors: int
    nbytes: int
    dtypes: Mapping[str, int]
    """Bytes of each dtype; of each type of GGUF, such as `Q4_K`, where tensors are blocks of that type."""
    not_loadable: tuple[str, ...]
    """Tensors of dtypes that the format has and torch has not: `load` refuses them, `names=` leaves them out."""
    blocks: Mapping[str, GgufBlocks] = field(default_factory=dict)
    """Type and shape in elements of the quantised tensors of GGUF files, by name. `load` gives their bytes, U8."""

    def summary(self) -> str:
        """Return a line for people, and a second one for tensors that cannot be loaded."""
        dtypes = ", ".join(f"{dtype} {bytes_text(nbytes)}" for dtype, nbytes in self.dtypes.items())
        line = f"{self.uri}: {self.num_tensors} tensors, {bytes_text(self.nbytes)}: {dtypes or 'empty'}"
        return f"{line}\nnot loadable: {', '.join(self.not_loadable)}" if self.not_loadable else line

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, with the revision in the place of the manifest."""
        # The manifest has a row for each tensor: too much for a line of JSON.
        fields = {name: getattr(self, name) for name in ("uri", "num_tensors", "nbytes", "dtypes", "not_loadable")}
        return {**plain(fields), "revision": self.manifest.revision}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(Summarised):
    """The result of `verify`; `verified` is False only where there was nothing to verify against."""

    verified: bool
    why: str
    num_leaves: int
    nbytes: int
    revision: str
    signature: str
    """`good`, `not asked` or `none`."""

    def summary(self) -> str:
        """Return a line for people."""
        verdict = "verified" if self.verified else "not verified"
        return (
            f"{verdict}: {self.why}; {bytes_text(self.nbytes)}, revision {self.revision[:19]}, "
            f"signature {self.signature}"
        )


def inspect(uri: Uris, *, storage_options: Mapping[str, str] | None = None) -> InspectReport:
    """Read the headers, the index and the manifest of a weight set, and no bodies.

    Raises:
        FormatError, SourceError: as `load`.
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
    """Read every body and compare it with the manifest's digests; with a key, check the manifest's signature first.

    Args:
        uri: as `load`.
        public_key: path of an Ed25519 public key in PEM.
        storage_options: credentials and endpoint of an object store; see `load`.
        progress: a bar, nothing, or a function; see `load`.

    Raises:
        ConfigError: the key cannot be read.
        IntegrityError: a leaf differs (the tensor and range are named), or the signature does not hold.
        NotFound: a key was given and there is no manifest, or no signature of it.
        SourceError, FormatError: as `load`.
    """
    settings = Settings.read()
    signature = "not asked"
    signed_revision: str | None = None
    if public_key is not None:
        signed_revision = _check_signed(uri, public_key, settings, storage_options)
        signature = "good"
    with open_weights(uri, settings=settings, storage_options=storage_options) as weights:
        stated = weights.manifest
        # Read twice, for its signature and to open the weights: it may have been replaced between the two.
        if signed_revision not in {None, stated.revision}:
            raise IntegrityError("the manifest changed after its signature was checked", uri=weights.uri)
        # No error: a set without digests is normal, and a caller may ask for all that can be verified.
        if stated.leaves is None:
            return VerifyReport(
                verified=False,
                why=weights.why_unverified or "no digests",
                num_leaves=0,
                nbytes=stated.nbytes,
                revision=stated.revision,
                signature=signature,
            )
        counter = Counter(stated.nbytes)
        # The leaf size of the manifest, not today's default: other leaves have other digests.
        with Progress(progress, weights.uri) as shown, shown.watching(counter.look):
            measured = build(weights, leaf_bytes=stated.leaf_bytes, on_bytes=counter.add)
        places = [source.uri for source in weights.sources]
    assert measured.leaves is not None
    # After all bodies: the error says how many leaves differ, which tells a damaged disk from a wrong file.
    wrong = np.flatnonzero(measured.leaves != stated.leaves)
    if len(wrong):
        raise _fault(stated, places, int(wrong[0]), len(wrong))
    return VerifyReport(
        verified=True,
        why=f"{len(stated.leaves)} leaf digests compared",
        num_leaves=len(stated.leaves),
        nbytes=stated.nbytes,
        revision=stated.revision,
        signature=signature,
    )


def _check_signed(
    uri: Uris, public_key: str | os.PathLike[str], settings: Settings, storage_options: Mapping[str, str] | None
) -> str:
    """Check the signature of a manifest; return the manifest's revision. Errors as `verify`."""
    pem = read_key(public_key)
    if not isinstance(uri, str | os.PathLike):
        raise ConfigError("a signature belongs to one manifest", hint="give one directory, prefix or file")
    place = str(uri)
    raw = read_small(sidecar_uri(place), settings=settings, storage_options=storage_options)
    signature = read_small(signature_uri(place), settings=settings, storage_options=storage_options)
    if raw is None or signature is None:
        missing = "manifest" if raw is None else "signature"
        raise NotFound(f"there is no {missing} to verify", uri=place, hint="penstock manifest URI --sign KEY")
    # Before decoding: bytes that nobody signed are not parsed.
    check_signature(raw, signature, pem)
    return decode(raw, uri=sidecar_uri(place)).revision


def read_key(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a key file. ConfigError: it cannot be read, or is longer than a key."""
    name = text_of(path)
    # Bounded: a path given by mistake may name a file of many GB, or a device.
    try:
        return read_bounded(name, MAX_KEY_BYTES)
    except (SourceError, FormatError) as error:
        raise ConfigError(f"cannot read the key {name}: {error.message}") from error


def _fault(manifest: Manifest, places: Sequence[str], leaf: int, count: int) -> IntegrityError:
    """Return the error that names the tensor and range of the first leaf that differs."""
    # Leaves are numbered over all tensors, in the table's order; none crosses from one tensor to the next.
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
        hint="download the file again; if it is the right one, write a new manifest with penstock manifest URI --force",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestReport(Summarised):
    """The result of `manifest`."""

    uri: str
    revision: str
    """The `w1-` root of all digests."""
    num_tensors: int
    nbytes: int
    num_leaves: int
    leaf_bytes: int
    """Most bytes that one digest covers."""
    written: tuple[str, ...]
    """The files in the order of writing: the signature, where a key was given, and the manifest. Empty: the manifest
    that was there is up to date."""

    def summary(self) -> str:
        """Return two lines for people."""
        return (
            f"{self.uri}: {self.num_tensors} tensors, {bytes_text(self.nbytes)}, {self.num_leaves} digests of at most "
            f"{bytes_text(self.leaf_bytes)}; revision {self.revision}\nwritten: {self.written_text}"
        )

    @property
    def written_text(self) -> str:
        """Return the names of the written files as text; or that there are none, and why."""
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
    """Read every body once and write the manifest with its digests, so that every later load is verified.

    A manifest that is there and has the same digests is left as it is, or signed anew. One with other digests is not
    replaced unless `replace` is True: the weights may be damaged.

    Args:
        uri: a file, directory, index or prefix; see `load`.
        out: path or URI of the manifest; None: next to the weights.
        sign: path of an Ed25519 private key in PEM; a detached signature is written next to the manifest.
        replace: write the manifest even if the one that is there has other digests, or cannot be read. For weights
            that were changed on purpose.
        storage_options: see `load`; for reading and for writing.
        progress: see `load`.

    Raises:
        ConfigError: the destination cannot be written to (plain http, not a regular file), the key cannot be read, or
            the manifest would be replaced, is signed, and `sign` is None. Nothing was written.
        IntegrityError: the manifest that is there has other digests; nothing was written.
        FormatError: that manifest cannot be read; nothing was written. Others as `load`.
        SourceError: as `load`. DestinationError, DiskFull: nothing was written.
    """
    settings = Settings.read()
    # Pinned before anything is read: the manifest must be kept for the commit whose bytes it digests.
    place = pinned(texts_of(text_of(uri))[0], settings=settings, storage_options=storage_options)
    target = weight_set.sidecar_uri(place) if out is None else text_of(out)
    if target.startswith(("http://", "https://")):
        raise ConfigError("plain http(s) cannot be written", uri=target, hint="give --out FILE and upload it there")
    # Before the bodies are read, which may take minutes: a wrong path fails at once.
    key = None if sign is None else read_key(sign)
    sidecar = _SidecarFile(target, settings, storage_options)
    sidecar.require_regular()
    before = sidecar.read()
    stated = None if before is None or replace else _decode_stated(before, target)
    # Without the manifest that may be there: open_weights would refuse weights that it does not describe.
    with weight_set.open_weights(
        place, settings=settings, storage_options=storage_options, with_manifest=False
    ) as weights:
        _require_no_weights(target, weights)
        counter = Counter(weights.manifest.nbytes)
        # With the leaf size of the manifest that is there: other leaves have other digests.
        leaf_bytes = LEAF_BYTES if stated is None else stated.leaf_bytes
        with Progress(progress, place) as shown, shown.watching(counter.look):
            built = weight_set.build(weights, leaf_bytes=leaf_bytes, on_bytes=counter.add)
        places = [source.uri for source in weights.sources]
    raw = weight_set.encode(built)
    if stated is not None and stated.leaves is not None and stated.revision != built.revision:
        raise _other_weights(stated, decode(raw, uri=target), places, target)
    is_current = before is not None and _without_identities(before) == _without_identities(raw)
    if is_current and before is not None:
        # The same bytes as before: a signature of them still holds.
        raw = before
    elif before is not None and key is None and sidecar.is_signed():
        raise ConfigError(
            "the manifest is signed, and the signature would not hold for a new manifest; nothing was written",
            uri=f"{target}.sig",
            hint="sign the new manifest with --sign KEY, or remove the signature first",
        )
    # The signature first: a reader that finds the new manifest finds the signature of it.
    files = {target: raw} if key is None else {f"{target}.sig": weight_set.sign(raw, key), target: raw}
    if is_current and key is None:
        files = {}
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


def _require_no_weights(target: str, weights: weight_set.WeightSet) -> None:
    """Raise ConfigError if the manifest, or its signature, would take the place of a file that it describes."""
    for file in (target, f"{target}.sig"):
        for source in weights.sources:
            is_same = source.uri == file
            if not is_same and not is_remote(file) and not is_remote(source.uri):
                with contextlib.suppress(OSError):
                    is_same = os.path.samefile(local_path(file), local_path(source.uri))
            if is_same:
                hint = "give the manifest another name"
                raise ConfigError("the manifest would replace a file of the weights", uri=file, hint=hint)


class _SidecarFile:
    """The manifest that may be at a place, and the signature next to it."""

    def __init__(self, uri: str, settings: Settings, storage_options: Mapping[str, str] | None) -> None:
        self._uri = uri
        self._settings = settings
        self._storage_options = storage_options

    def require_regular(self) -> None:
        """Raise ConfigError if something that is not a regular file has one of the two names."""
        for file in () if is_remote(self._uri) else (self._uri, f"{self._uri}.sig"):
            path = local_path(file)
            # A rename would replace a device, a pipe or a socket by a file: root can do that to /dev/full.
            if os.path.exists(path) and not os.path.isfile(path):
                hint = "give the path of a file, or of one that does not exist yet"
                raise ConfigError(
                    "the manifest cannot be written here: this is not a regular file", uri=file, hint=hint
                )

    def read(self) -> bytes | None:
        """Return the bytes of the manifest; None: there is none."""
        return self._read(self._uri)

    def is_signed(self) -> bool:
        """Return whether a signature is beside the manifest."""
        return self._read(f"{self._uri}.sig") is not None

    def _read(self, uri: str) -> bytes | None:
        try:
            return read_small(uri, settings=self._settings, storage_options=self._storage_options)
        except PermissionDenied:
            # A bucket that may be read but not listed says "forbidden" for "absent".
            if is_remote(uri):
                return None
            raise


def _decode_stated(raw: bytes, uri: str) -> Manifest:
    """Decode the manifest that is at the destination. FormatError: it is damaged, or another file."""
    try:
        return decode(raw, uri=uri)
    except (FormatError, IntegrityError) as error:
        raise FormatError(
            f"the file that is there cannot be read as a manifest ({error.message}); nothing was written",
            uri=uri,
            hint="write a new manifest in its place with --force (replace=True) if the weights are known to be good",
        ) from error


def _other_weights(stated: Manifest, measured: Manifest, places: Sequence[str], uri: str) -> IntegrityError:
    """Return the error for weights, in the files `places`, that differ from the manifest that is there.

    Both manifests are in the order of names.
    """
    fault = IntegrityError("their tensors differ in name, dtype or shape", uri=uri)
    same = [getattr(stated.tensors, name) == getattr(measured.tensors, name) for name in ("names", "dtypes", "shapes")]
    if all(same) and stated.leaves is not None and measured.leaves is not None:
        wrong = np.flatnonzero(measured.leaves != stated.leaves)
        fault = _fault(measured, places, int(wrong[0]), len(wrong))
    return IntegrityError(
        f"the weights differ from the manifest that is there, which has revision {stated.revision[:19]} while the "
        f"weights have {measured.revision[:19]}: {fault.message}; nothing was written",
        uri=fault.uri,
        tensor=fault.tensor,
        byte_range=fault.byte_range,
        hint="get the files again if they are damaged; if they were changed on purpose, replace the manifest with "
        "--force (replace=True)",
    )


def _without_identities(raw: bytes) -> bytes | None:
    """Return a manifest's bytes without the identities of files, which a copy changes; None: it cannot be read."""
    try:
        manifest = decode(raw, uri="")
    except (FormatError, IntegrityError):
        return None
    return weight_set.encode(
        dataclasses.replace(manifest, files=tuple(dataclasses.replace(file, identity="") for file in manifest.files))
    )


def _write_whole(uri: str, data: bytes, settings: Settings, storage_options: Mapping[str, str] | None) -> None:
    """Write a small file or object that appears complete, or leave the one before it."""
    # An object store's PUT is atomic already.
    if is_remote(uri):
        write_small(uri, data, settings=settings, storage_options=storage_options)
        return
    path = Path(local_path(uri))
    # Other users who may read the weights must be able to verify them.
    with new_file(path, 0o644) as file:
        file.write(data)
