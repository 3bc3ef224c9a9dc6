"""Weights made smaller without loss: bytes of one significance together, those that repeat themselves coded by zstd.

In: a block of bytes. Out: a frame that is never much longer; and the block again, into memory that is there.
Not here: whether that pays on a link (`compression`), how frames cross (`connection`).

    block: e0 m0 e1 m1 ...  --width 2-->  m0 m1 ... (as they are)  |  e0 e1 ... (zstd)

A BF16 weight has about 2.7 bits in the byte with its exponent and 8 in the other. The width follows from each block's
own histograms, so no caller needs to know what a block is of.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zstandard

from penstock.errors import FormatError
from penstock.types import MIB

U8 = npt.NDArray[np.uint8]

BLOCK_BYTES = MIB
"""Of one frame at most: 6 ms of a 1 Gb/s link, and what both ends hold besides."""
WIDTHS = (1, 2, 4)
"""Bytes of an element: FP8 and integers, BF16 and FP16, FP32."""
_HEAD = struct.Struct("<II")
"""Bytes of the block, and the width; then what each plane is stored in: coded, if that is fewer than it has."""
MAX_FRAME_BYTES = _HEAD.size + 4 * WIDTHS[-1] + BLOCK_BYTES
_PIECES, _PIECE_BYTES = 4, 8 << 10
"""What is looked at of each block to tell its width. Reason: 0.1 bit an element, in a tenth of the coding's time."""
_WORTH = 0.92
"""A plane is coded if its entropy says it comes out below this."""

_HUFFMAN = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1, window_log=19, target_length=0
)
"""As good as entropy coding alone: matches among exponents are chance, and looking for them costs both speed and size.
Source: benchmarks/results/cpu2_202611/compress.md: 0.9 GB/s of a plane and 2.80 bits, level 1 gives 0.11 and 2.99."""


class Planes:
    """A coder and decoder for one thread."""

    def __init__(self) -> None:
        self._coder = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
        self._decoder = zstandard.ZstdDecompressor(max_window_size=BLOCK_BYTES)

    def encode(self, block: U8) -> list[memoryview]:
        """The frame of a block, in pieces; those that are not coded may be views of the block itself."""
        width, coded = _shape(block)
        count = len(block) // width
        planes = [np.ascontiguousarray(block[at : count * width : width]) for at in range(width)]
        stored: list[memoryview] = []
        for plane, is_worth in zip(planes, coded, strict=True):
            smaller = memoryview(self._coder.compress(plane.data)) if is_worth else plane.data
            stored.append(smaller if len(smaller) < count else plane.data)
        head = _HEAD.pack(len(block), width) + struct.pack(f"<{width}I", *map(len, stored))
        return [memoryview(head), *stored, block[count * width :].data]

    def decode(self, frame: memoryview, into: U8) -> None:
        """The block of a frame, into memory of just its size.

        Raises:
            FormatError: it is no frame, or of another block; nothing was written. Checked before anything is allocated.
        """
        nbytes, sizes, at = _head(frame)
        if nbytes != len(into):
            raise FormatError(f"a block of {nbytes} bytes where {len(into)} were expected")
        width = len(sizes)
        count = nbytes // width
        planes = []
        for size in sizes:
            planes.append(self._plane(frame[at : at + size], count))
            at += size
        for plane, plain in enumerate(planes):
            into[plane : count * width : width] = plain
        into[count * width :] = np.frombuffer(frame[at:], np.uint8)

    def _plane(self, stored: memoryview, count: int) -> U8:
        if len(stored) == count:
            return np.frombuffer(stored, np.uint8)
        try:
            if zstandard.frame_content_size(stored) != count:
                raise FormatError("the length of a plane differs from its block's")
            plain = self._decoder.decompress(stored, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise FormatError(f"a damaged plane: {error}") from error
        if len(plain) != count:
            raise FormatError("the length of a plane differs from the length it states")
        return np.frombuffer(plain, np.uint8)


def block_bytes(frame: memoryview) -> int:
    """Bytes of a frame's block, at most `BLOCK_BYTES`. FormatError if it is no frame."""
    return _head(frame)[0]


def _head(frame: memoryview) -> tuple[int, Sequence[int], int]:
    """Bytes of the block, what each plane is stored in, where the first begins."""
    if len(frame) < _HEAD.size:
        raise FormatError(f"a frame of {len(frame)} bytes")
    nbytes, width = _HEAD.unpack_from(frame)
    at = _HEAD.size + 4 * width
    if width not in WIDTHS or not 0 < nbytes <= BLOCK_BYTES or len(frame) < at:
        raise FormatError(f"a frame of width {width} and {nbytes} bytes")
    sizes = struct.unpack_from(f"<{width}I", frame, _HEAD.size)
    if max(sizes) > nbytes // width or len(frame) != at + sum(sizes) + nbytes % width:
        raise FormatError(f"planes of {sizes} bytes in a frame of {len(frame)}")
    return nbytes, sizes, at


def _shape(block: U8) -> tuple[int, Sequence[bool]]:
    """The width under which a block comes out shortest by its planes' entropy, and which planes are worth coding."""
    pieces = max(1, min(_PIECES, len(block) // _PIECE_BYTES))
    starts = [(len(block) - len(block) // pieces) * i // max(1, pieces - 1) // 4 * 4 for i in range(pieces)]
    looked_at = np.concatenate([block[at : at + _PIECE_BYTES] for at in starts])
    rows = looked_at[: len(looked_at) // 4 * 4].reshape(-1, 4)
    if not len(rows):
        return 1, (False,)
    seen = np.stack([np.bincount(rows[:, at], minlength=256) for at in range(4)])
    best: tuple[float, int, tuple[bool, ...]] = (1.0, 1, (False,))
    for width in WIDTHS:
        shares = [_entropy(seen[at::width].sum(axis=0)) / 8 for at in range(width)]
        coded = tuple(share < _WORTH for share in shares)
        whole = sum(share if is_worth else 1.0 for share, is_worth in zip(shares, coded, strict=True)) / width
        if whole < best[0] - 0.01:  # a wider one must be worth its copies
            best = (whole, width, coded)
    return best[1], best[2]


def _entropy(seen: npt.NDArray[np.int64]) -> float:
    """Bits a byte."""
    share = seen[seen > 0] / seen.sum()
    return float(-(share * np.log2(share)).sum())
