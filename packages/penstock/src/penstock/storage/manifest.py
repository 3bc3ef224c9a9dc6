"""Encode, decode and sign (Ed25519) manifests, which are stored next to the weights. Decoding checks all content."""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec
import numpy as np

from penstock.digest import leaf
from penstock.errors import ConfigError, FormatError, IntegrityError
from penstock.storage.safetensors import MAX_RANK, table_nbytes
from penstock.types import GIB, I64, U64, DType, FileEntry, Manifest, TensorTable

MAGIC = b"penstock manifest 1\n"
# Blocks of `Sidecar.body`, see `digest.leaf.canonical`: dtypes in use, each row's dtype, ranks, dims, name lengths,
# names.
_NUM_BLOCKS = 6
_DTYPES = {dtype.value.encode(): dtype for dtype in DType}
# Form of the revision of a manifest without digests. Such a revision covers only the headers.
_HEADERS_REVISION = re.compile(r"h1-[0-9a-f]{64}")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    nbytes: int
    identity: str
    metadata: dict[str, str]


class Sidecar(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a manifest file. Rows are sorted by name, and blocks are little-endian."""

    leaf_bytes: int
    revision: str
    files: list[_File]
    body: bytes
    """Names, dtypes and shapes; see `digest.leaf.canonical`."""
    file_index: bytes
    offset: bytes
    """One int64 for each row, in bytes from the start of the file."""
    leaves: bytes | None
    """One uint64 for each leaf, in the order of the rows. None without digests."""


_SIDECAR = msgspec.msgpack.Decoder(Sidecar)


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest. Equal manifests have equal bytes."""
    table = manifest.tensors
    # Sort by name, so that a copy with different shards has the same revision.
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
    """Decode a manifest, and check its types, leaf size and revision, but not its rows. Raises like `decode`."""
    if not raw.startswith(MAGIC):
        raise FormatError("the file is not a Penstock manifest", uri=uri)
    try:
        # Use a view, because a slice would copy a manifest of a gigabyte.
        sidecar = _SIDECAR.decode(memoryview(raw)[len(MAGIC) :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"malformed manifest: {error}", uri=uri) from error
    except RecursionError as error:
        raise FormatError("the manifest is nested too deeply", uri=uri) from error
    # Limit the leaf size, because each reader allocates memory for one leaf.
    if not 1 <= sidecar.leaf_bytes <= GIB:
        raise FormatError(f"the manifest has leaves of {sidecar.leaf_bytes} bytes, not of 1 byte to 1 GiB", uri=uri)
    if sidecar.leaves is None:
        if not _HEADERS_REVISION.fullmatch(sidecar.revision):
            raise FormatError("the manifest has no leaves, but its revision does not begin with h1-", uri=uri)
        return sidecar
    if len(sidecar.leaves) % 8:
        raise FormatError(f"the leaf digests have {len(sidecar.leaves)} bytes, not a multiple of 8", uri=uri)
    # The revision is the root of the leaves, so this check detects any changed leaf.
    revision = leaf.root(sidecar.body, sidecar.leaf_bytes, np.frombuffer(sidecar.leaves, "<u8").astype(np.uint64))
    if revision != sidecar.revision:
        raise IntegrityError(f"the revision is {sidecar.revision[:70]!r}, but the content has {revision}", uri=uri)
    return sidecar


def decode(raw: bytes, *, uri: str) -> Manifest:
    """Decode and check a manifest. Raises FormatError, or IntegrityError if the revision does not match the content."""
    return unpack(read_sidecar(raw, uri=uri), uri=uri)


def unpack(sidecar: Sidecar, *, uri: str) -> Manifest:
    """Check the rows of a sidecar, and return the sidecar as a manifest. Raises the same errors as `decode`."""
    names, dtypes, shapes = _parse_body(sidecar.body, uri)
    # Sizes follow from dtype and shape, so a manifest cannot state false sizes.
    nbytes = table_nbytes(dtypes, shapes)
    if nbytes.size and nbytes.min() < 0:
        raise FormatError("the manifest has an invalid shape", uri=uri, tensor=names[int(nbytes.argmin())][:200])
    file_index = _column(sidecar.file_index, len(names), "file_index", uri)
    offset = _column(sidecar.offset, len(names), "offset", uri)
    if any(file.nbytes < 0 for file in sidecar.files):
        raise FormatError("the manifest has a file of negative size", uri=uri)
    # msgpack integers can exceed int64.
    sizes = np.array([min(file.nbytes, 2**63 - 1) for file in sidecar.files] or [0], np.int64)
    wrong = (file_index < 0) | (file_index >= len(sidecar.files))
    # Subtract, because offset + nbytes could overflow in a hostile manifest.
    wrong |= (offset < 0) | (offset > sizes[np.where(wrong, 0, file_index)] - nbytes)
    if wrong.any():
        message = "the manifest puts the tensor outside its file"
        raise FormatError(message, uri=uri, tensor=names[int(wrong.argmax())][:200])
    leaves = None
    if sidecar.leaves is not None:
        leaves = np.frombuffer(sidecar.leaves, "<u8").astype(np.uint64)
        # Sum as floats, because hostile sizes could overflow int64 and real counts are far below 2^53.
        expected = leaf.num_leaves(nbytes, sidecar.leaf_bytes).sum(dtype=np.float64)
        if expected != leaves.size:
            raise FormatError(f"the manifest has {leaves.size} leaves, but its tensors have {expected:.0f}", uri=uri)
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
    # Check all lengths before any values become Python objects.
    used, codes, ranks, dims, lengths, text = _split_blocks(body, uri)
    in_use = used.split(b"\n") if used else []
    dtypes = [_DTYPES.get(name) for name in in_use]
    if None in dtypes:
        raise FormatError("the manifest has unknown dtypes", uri=uri)
    num_rows = len(codes)
    if len(ranks) != num_rows or len(lengths) != 4 * num_rows:
        raise FormatError("the columns of the manifest have different lengths", uri=uri)
    if num_rows and (max(codes) >= len(dtypes) or max(ranks) > MAX_RANK):
        raise FormatError("the manifest has a dtype or rank out of range", uri=uri)
    # Require one encoding, so that the same tensors cannot have several revisions.
    if set(codes) != set(range(len(dtypes))) or any(a >= b for a, b in pairwise(in_use)):
        raise FormatError("the dtypes of the manifest must be the sorted set of its rows' dtypes", uri=uri)
    if len(dims) != 8 * sum(ranks):
        raise FormatError("the dims of the manifest do not match its ranks", uri=uri)
    # The lengths of names that fit into memory cannot overflow int64.
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.frombuffer(lengths, "<u4"), dtype=np.int64)))
    if int(ends[-1]) != len(text):
        raise FormatError("the names of the manifest do not match their lengths", uri=uri)
    try:
        # In ASCII, byte offsets are character offsets, so decode once and slice.
        whole = text.decode() if text.isascii() else None
        spans = pairwise(ends.tolist())
        names = tuple(text[a:b].decode() if whole is None else whole[a:b] for a, b in spans)
    except UnicodeDecodeError as error:
        raise FormatError("the manifest has a name that is not UTF-8", uri=uri) from error
    if any(a >= b for a, b in pairwise(names)):
        raise FormatError("the names of the manifest must be sorted and unique", uri=uri)
    flat: list[int] = np.frombuffer(dims, "<i8").tolist()
    stops = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.frombuffer(ranks, np.uint8), dtype=np.int64)))
    shapes = tuple(tuple(flat[a:b]) for a, b in pairwise(stops.tolist()))
    return names, tuple(dtypes[code] for code in codes), shapes  # type: ignore[misc]  # None was rejected above


def _split_blocks(body: bytes, uri: str) -> list[bytes]:
    blocks = []
    at = 0
    for _ in range(_NUM_BLOCKS):
        nbytes = int.from_bytes(body[at : at + 8], "little")
        if at + 8 + nbytes > len(body):
            raise FormatError("the manifest is truncated", uri=uri)
        blocks.append(body[at + 8 : at + 8 + nbytes])
        at += 8 + nbytes
    if at != len(body):
        raise FormatError(f"the manifest has {len(body) - at} extra bytes", uri=uri)
    return blocks


def _column(raw: bytes, num_rows: int, name: str, uri: str) -> I64:
    if len(raw) != 8 * num_rows:
        raise FormatError(f"column {name} of the manifest has {len(raw)} bytes for {num_rows} rows", uri=uri)
    return np.frombuffer(raw, "<i8").astype(np.int64)


def sign(raw: bytes, private_key_pem: bytes) -> bytes:
    """Return the detached Ed25519 signature (64 bytes) of a manifest. Raises ConfigError for an invalid key."""
    # Importing cryptography takes 30 ms, and most loads check no signature.
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(private_key_pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        hint = "use Ed25519 in PEM, without a password: openssl genpkey -algorithm ed25519"
        raise ConfigError(f"the private key cannot be read: {error}", hint=hint) from error
    if not isinstance(key, Ed25519PrivateKey):
        hint = "make a key with: openssl genpkey -algorithm ed25519"
        raise ConfigError("the private key is not an Ed25519 key", hint=hint)
    return key.sign(raw)


def check_signature(raw: bytes, signature: bytes, public_key_pem: bytes) -> None:
    """Raise IntegrityError unless the signature matches the manifest and the key, or ConfigError for an invalid key."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    hint = "export the public key with: openssl pkey -in KEY -pubout"
    try:
        key = load_pem_public_key(public_key_pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"the public key cannot be read: {error}", hint=hint) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError("the public key is not an Ed25519 key", hint=hint)
    try:
        key.verify(signature, raw)
    except InvalidSignature as error:
        raise IntegrityError("the signature does not match this manifest and this key") from error


def leaves_of(manifest: Manifest, rows: I64) -> U64 | None:
    """Return the leaves of the given rows, in the given order, or None if `manifest` has no digests."""
    if manifest.leaves is None:
        return None
    return leaf.take_leaves(manifest.leaves, leaf.num_leaves(manifest.tensors.nbytes, manifest.leaf_bytes), rows)
