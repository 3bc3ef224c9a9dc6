"""Leaf digests on the CPU, and the root over them, which is the revision of a weight set: `w1-` and 64 hex digits.

XXH3 detects faults but not forgeries, since an author of the bytes can make two leaves collide. A signature protects
the manifest against forgery.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import TypeVar

import numpy as np
import xxhash
from blake3 import blake3

from penstock.types import I64, U64, TensorTable

T = TypeVar("T")

LEAF_BYTES = 256 * 1024
"""Bytes per digest. A device digests thousands of leaves at once, faults are located closely, and the leaves of 1 TB
are only 32 MB. Source: docs/design/load.md."""

_MAGIC = b"penstock weights 1\0"
_HEADERS_MAGIC = b"penstock headers 1\0"


def num_leaves(nbytes: I64, leaf_bytes: int) -> I64:
    """Return the number of leaves in tensors of `nbytes` bytes, which is 0 for an empty tensor."""
    return -(-nbytes // leaf_bytes)


def leaf_digests(data: memoryview, leaf_bytes: int, out: U64) -> None:
    """Write the XXH3-64 (seed 0) of each leaf in `data` to `out`. Each leaf but the last has `leaf_bytes`."""
    digest = xxhash.xxh3_64_intdigest
    for row, start in enumerate(range(0, data.nbytes, leaf_bytes)):
        out[row] = digest(data[start : start + leaf_bytes])


def name_order(table: TensorTable) -> list[int]:
    """Return the rows sorted by name, which is the order of the root and does not depend on the files."""
    return sorted(range(len(table)), key=table.names.__getitem__)


def take_leaves(leaves: U64, counts: I64, rows: I64) -> U64:
    """Return the leaves of the given rows, in the order of `rows`. `counts` holds the number of leaves of each row."""
    row_counts = counts[rows]
    before = np.cumsum(row_counts) - row_counts
    starts = (np.cumsum(counts) - counts)[rows]
    return leaves[np.repeat(starts - before, row_counts) + np.arange(int(row_counts.sum()))]


def canonical(table: TensorTable, rows: Sequence[int]) -> bytes:
    """Encode the names, dtypes and shapes of `rows`, in the given order, as unambiguous bytes.

    There are six little-endian blocks, each after its length (uint64). The first block lists the dtypes that occur
    (sorted ASCII, separated by newlines). The other blocks hold, for each row, the index of its dtype (uint8), its
    rank (uint8), its dims (int64 each), the length of its name in bytes (uint32), and its name (UTF-8).
    """
    names = _pick(table.names, rows)
    dtypes = _pick(table.dtypes, rows)
    shapes = _pick(table.shapes, rows)
    used = sorted(set(dtypes))
    codes = {dtype: code for code, dtype in enumerate(used)}
    # Nearly all names are ASCII, and an ASCII name has as many bytes as characters.
    text = "".join(names).encode()
    ascii_only = text.isascii()
    lengths = map(len, names) if ascii_only else (len(name.encode()) for name in names)
    blocks = (
        b"\n".join(dtype.value.encode() for dtype in used),
        bytes(map(codes.__getitem__, dtypes)),
        bytes(map(len, shapes)),
        np.fromiter(chain.from_iterable(shapes), "<i8").tobytes(),
        np.fromiter(lengths, "<u4", len(names)).tobytes(),
        text,
    )
    return b"".join(part for block in blocks for part in (len(block).to_bytes(8, "little"), block))


def _pick(column: tuple[T, ...], rows: Sequence[int]) -> tuple[T, ...]:
    # itemgetter takes a fifth of the time of a comprehension for 60,000 values, but returns a bare value for one row.
    return itemgetter(*rows)(column) if len(rows) > 1 else tuple(column[row] for row in rows)


def root(body: bytes, leaf_bytes: int, leaves: U64) -> str:
    """Return the revision of a weight set from `body` (`canonical` of the rows sorted by name) and the rows' leaves."""
    # Each part follows its length, so that no two weight sets have the same bytes here.
    hasher = blake3(_MAGIC)
    hasher.update(leaf_bytes.to_bytes(8, "little"))
    hasher.update(len(body).to_bytes(8, "little"))
    hasher.update(body)
    hasher.update(np.ascontiguousarray(leaves, "<u8").view(np.uint8).data)
    return f"w1-{hasher.hexdigest()}"


def revision(table: TensorTable, leaf_bytes: int, leaves: U64) -> str:
    """Return the revision `w1-...` of the weights, which does not depend on the files and offsets."""
    rows = name_order(table)
    # Rows that are already sorted, as in a fetch, need no reordering, which takes 3 ms for the leaves of 60 GB.
    if rows != list(range(len(table))):
        leaves = take_leaves(leaves, num_leaves(table.nbytes, leaf_bytes), np.asarray(rows, np.int64))
    return root(canonical(table, rows), leaf_bytes, leaves)


def headers_revision(headers: list[bytes]) -> str:
    """Return the revision `h1-...` of files from the BLAKE3 digests of their headers, which may be in any order."""
    return f"h1-{blake3(_HEADERS_MAGIC + b''.join(sorted(headers))).hexdigest()}"
