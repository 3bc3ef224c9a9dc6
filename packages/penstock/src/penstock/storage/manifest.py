"""Manifests as bytes: the sidecar beside the weights, and its Ed25519 signature.

In: a `Manifest`, or bytes that claim to be one. Out: the other; nothing of a claim is believed before it is checked.
Not here: reading weights to make one (`weight_set`), the digests themselves (`digest`).

    magic | msgpack: leaf bytes, revision, files, body (names, dtypes, shapes; sorted by name), places, leaves
"""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec
import numpy as np
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from penstock.digest import leaf
from penstock.errors import ConfigError, FormatError, IntegrityError
from penstock.storage.safetensors import MAX_RANK, table_nbytes
from penstock.types import GIB, I64, U64, DType, FileEntry, Manifest, TensorTable

MAGIC = b"penstock manifest 1\n"
# Of `Sidecar.body`: dtypes in use, each row's dtype, ranks, dims, lengths of names, names; see `digest.leaf.canonical`.
_NUM_BLOCKS = 6
_DTYPES = {dtype.value.encode(): dtype for dtype in DType}
# Of a manifest without digests of bodies: the digest of the headers alone.
_HEADERS_REVISION = re.compile(r"h1-[0-9a-f]{64}")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    nbytes: int
    identity: str
    metadata: dict[str, str]


class Sidecar(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a manifest file. Rows are sorted by name; blocks are little-endian."""

    leaf_bytes: int
    revision: str
    files: list[_File]
    body: bytes
    """Names, dtypes and shapes; see `digest.leaf.canonical`."""
    file_index: bytes
    """int64 a row."""
    offset: bytes
    """int64 a row: absolute in its file."""
    leaves: bytes | None
    """uint64 a leaf, in the order of the rows."""


_SIDECAR = msgspec.msgpack.Decoder(Sidecar)


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as bytes; the same manifest always gives the same bytes."""
    table = manifest.tensors
    # By name, whatever the files' order is: a copy of the weights in other shards has the same revision.
    rows = leaf.name_order(table)
    order = np.asarray(rows, np.int64)
    leaves = leaves_of(manifest, order)
    sidecar = Sidecar(
        leaf_bytes=manifest.leaf_bytes,
        revision=manifest.revision,
        files=[
            _File(name=f.name, nbytes=f.nbytes, identity=f.identity, metadata=dict(sorted(f.metadata.items())))
            for f in manifest.files
        ],
        body=leaf.canonical(table, rows),
        file_index=table.file_index[order].astype("<i8").tobytes(),
        offset=table.offset[order].astype("<i8").tobytes(),
        leaves=None if leaves is None else leaves.astype("<u8").tobytes(),
    )
    return MAGIC + msgspec.msgpack.encode(sidecar)


def read_sidecar(raw: bytes, *, uri: str) -> Sidecar:
    """Take a sidecar apart; its types, leaf size and revision are checked, its rows are not.

    Raises:
        FormatError: not a manifest.
        IntegrityError: its revision is not that of its content.
    """
    if not raw.startswith(MAGIC):
        raise FormatError("not a penstock manifest", uri=uri)
    try:
        # A view: a manifest may have a gigabyte, and a slice of bytes would copy it.
        sidecar = _SIDECAR.decode(memoryview(raw)[len(MAGIC) :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"malformed manifest: {error}", uri=uri) from error
    except RecursionError as error:
        raise FormatError("manifest nested too deep", uri=uri) from error
    # A leaf is digested in one piece, so its length is memory that each reader allocates.
    if not 1 <= sidecar.leaf_bytes <= GIB:
        raise FormatError(f"leaves of {sidecar.leaf_bytes} bytes", uri=uri)
    if sidecar.leaves is None:
        if not _HEADERS_REVISION.fullmatch(sidecar.revision):
            raise FormatError("manifest without leaves has no h1- revision", uri=uri)
        return sidecar
    if len(sidecar.leaves) % 8:
        raise FormatError(f"leaves are {len(sidecar.leaves)} bytes, not a multiple of 8", uri=uri)
    # The revision is the root of the leaves: a manifest whose leaves were changed is refused before one is used.
    revision = leaf.root(sidecar.body, sidecar.leaf_bytes, np.frombuffer(sidecar.leaves, "<u8").astype(np.uint64))
    if revision != sidecar.revision:
        raise IntegrityError(f"manifest says {sidecar.revision[:70]!r}, its content is {revision}", uri=uri)
    return sidecar


def decode(raw: bytes, *, uri: str) -> Manifest:
    """Check every claim of a manifest's bytes; rows come sorted by name.

    Raises:
        FormatError: malformed, or it contradicts itself; names the tensor where one is to blame.
        IntegrityError: its revision is not that of its content.
    """
    return unpack(read_sidecar(raw, uri=uri), uri=uri)


def unpack(sidecar: Sidecar, *, uri: str) -> Manifest:
    """Return the rows of a sidecar, checked. Raises as `decode`."""
    names, dtypes, shapes = _parse_body(sidecar.body, uri)
    # The sizes are not in the sidecar: they follow from dtype and shape, so a manifest cannot lie about them.
    nbytes = table_nbytes(dtypes, shapes)
    if nbytes.size and nbytes.min() < 0:
        raise FormatError("impossible shape", uri=uri, tensor=names[int(nbytes.argmin())][:200])
    file_index = _column(sidecar.file_index, len(names), "file_index", uri)
    offset = _column(sidecar.offset, len(names), "offset", uri)
    if any(file.nbytes < 0 for file in sidecar.files):
        raise FormatError("file of negative size", uri=uri)
    # msgpack's integers go to 2^64, which an int64 column cannot hold.
    sizes = np.array([min(file.nbytes, 2**63 - 1) for file in sidecar.files] or [0], np.int64)
    wrong = (file_index < 0) | (file_index >= len(sidecar.files))
    # Subtracted, not added: offset + nbytes of a hostile manifest could wrap around.
    wrong |= (offset < 0) | (offset > sizes[np.where(wrong, 0, file_index)] - nbytes)
    if wrong.any():
        raise FormatError("place outside its file", uri=uri, tensor=names[int(wrong.argmax())][:200])
    leaves = None
    if sidecar.leaves is not None:
        leaves = np.frombuffer(sidecar.leaves, "<u8").astype(np.uint64)
        # In floats: a sum of hostile sizes wraps in int64, and every honest count is far below 2^53.
        expected = leaf.num_leaves(nbytes, sidecar.leaf_bytes).sum(dtype=np.float64)
        if expected != leaves.size:
            raise FormatError(f"{leaves.size} leaves; the tensors have {expected:.0f}", uri=uri)
    return Manifest(
        files=tuple(
            FileEntry(name=file.name, nbytes=file.nbytes, identity=file.identity, metadata=file.metadata)
            for file in sidecar.files
        ),
        tensors=TensorTable(
            names=names, dtypes=dtypes, shapes=shapes, file_index=file_index, offset=offset, nbytes=nbytes
        ),
        leaf_bytes=sidecar.leaf_bytes,
        leaves=leaves,
        revision=sidecar.revision,
    )


def _parse_body(body: bytes, uri: str) -> tuple[tuple[str, ...], tuple[DType, ...], tuple[tuple[int, ...], ...]]:
    """Return names, dtypes and shapes from `digest.leaf.canonical` bytes."""
    # Lengths first, values after: until all blocks agree on the number of rows, none of them is made into objects.
    used, codes, ranks, dims, lengths, text = _split_blocks(body, uri)
    in_use = used.split(b"\n") if used else []
    dtypes = [_DTYPES.get(name) for name in in_use]
    if None in dtypes:
        raise FormatError("manifest of unknown dtypes", uri=uri)
    num_rows = len(codes)
    if len(ranks) != num_rows or len(lengths) != 4 * num_rows:
        raise FormatError("columns of a manifest differ in length", uri=uri)
    if num_rows and (max(codes) >= len(dtypes) or max(ranks) > MAX_RANK):
        raise FormatError("dtype or rank out of range in a manifest", uri=uri)
    # One table, one body: else the same tensors could have several revisions.
    if set(codes) != set(range(len(dtypes))) or any(a >= b for a, b in pairwise(in_use)):
        raise FormatError("dtypes of a manifest are not those of its rows, sorted", uri=uri)
    if len(dims) != 8 * sum(ranks):
        raise FormatError("ranks and dims of a manifest differ", uri=uri)
    # Summed in int64, which the lengths of any manifest that fits into memory cannot overflow.
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.frombuffer(lengths, "<u4"), dtype=np.int64)))
    if int(ends[-1]) != len(text):
        raise FormatError("names of a manifest differ from their lengths", uri=uri)
    try:
        names = _names(text, ends)
    except UnicodeDecodeError as error:
        raise FormatError("name in a manifest is not UTF-8", uri=uri) from error
    # Strictly rising proves both at once: sorted, and no name twice.
    if any(a >= b for a, b in pairwise(names)):
        raise FormatError("names of a manifest are not sorted, or one stands twice", uri=uri)
    flat: list[int] = np.frombuffer(dims, "<i8").tolist()
    stops = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.frombuffer(ranks, np.uint8), dtype=np.int64)))
    shapes = tuple(tuple(flat[a:b]) for a, b in pairwise(stops.tolist()))
    return names, tuple(dtypes[code] for code in codes), shapes  # type: ignore[misc]  # None was refused


def _names(text: bytes, ends: I64) -> tuple[str, ...]:
    """Cut the names out of their block."""
    if text.isascii():
        # In ASCII byte offsets are character offsets: one decode for all names, then slices.
        whole = text.decode()
        return tuple(whole[a:b] for a, b in pairwise(ends.tolist()))
    return tuple(text[a:b].decode() for a, b in pairwise(ends.tolist()))


def _split_blocks(body: bytes, uri: str) -> list[bytes]:
    """Return the blocks of a body, each of which begins with its length in 8 bytes."""
    blocks = []
    at = 0
    for _ in range(_NUM_BLOCKS):
        nbytes = int.from_bytes(body[at : at + 8], "little")
        if at + 8 + nbytes > len(body):
            raise FormatError("manifest ends early", uri=uri)
        blocks.append(body[at + 8 : at + 8 + nbytes])
        at += 8 + nbytes
    if at != len(body):
        raise FormatError(f"{len(body) - at} bytes too many in a manifest", uri=uri)
    return blocks


def _column(raw: bytes, num_rows: int, name: str, uri: str) -> I64:
    """Return a column of int64, in the byte order of this machine."""
    if len(raw) != 8 * num_rows:
        raise FormatError(f"column {name} of a manifest has {len(raw)} bytes for {num_rows} rows", uri=uri)
    return np.frombuffer(raw, "<i8").astype(np.int64)


def sign(raw: bytes, private_key_pem: bytes) -> bytes:
    """Return the detached Ed25519 signature, 64 bytes, over a manifest's bytes.

    Raises:
        ConfigError: the key is not an unencrypted Ed25519 private key in PEM.
    """
    try:
        key = load_pem_private_key(private_key_pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        hint = "Ed25519 in PEM, without a password: openssl genpkey -algorithm ed25519"
        raise ConfigError(f"private key cannot be read: {error}", hint=hint) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError("private key is not an Ed25519 key", hint="openssl genpkey -algorithm ed25519")
    return key.sign(raw)


def check_signature(raw: bytes, signature: bytes, public_key_pem: bytes) -> None:
    """Verify a manifest's bytes against their signature.

    Raises:
        IntegrityError: the signature is not this key's over these bytes.
        ConfigError: the key is not an Ed25519 public key in PEM.
    """
    try:
        key = load_pem_public_key(public_key_pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"public key cannot be read: {error}", hint="openssl pkey -in KEY -pubout") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError("public key is not an Ed25519 key", hint="openssl pkey -in KEY -pubout")
    try:
        key.verify(signature, raw)
    except InvalidSignature as error:
        raise IntegrityError("signature does not hold for this manifest and this key") from error


def leaves_of(manifest: Manifest, rows: I64) -> U64 | None:
    """Return the leaves of these rows of `manifest`, in this order; None when it has none."""
    if manifest.leaves is None:
        return None
    return leaf.take_leaves(manifest.leaves, leaf.num_leaves(manifest.tensors.nbytes, manifest.leaf_bytes), rows)
