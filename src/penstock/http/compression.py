"""Decide whether compressing a link's bytes pays: measured raw, tried if promising, kept if it was faster.

In: bytes as they arrive, the clock. Out: raw or coded for the next request, and why in words.
Not here: the code (`byte_planes`), the connections (`transport.http_reader`).

    raw: sample --> time --> ratio x link, codec > link?  --yes--> coded: time --> more than raw? --yes--> coded
                                     `--no--> raw                                       `--no--> raw; watched on

Weights made smaller without loss: bytes of one significance together, those that repeat themselves coded by zstd.

In: a block of bytes. Out: a frame that is never much longer; and the block again, into memory that is there.
Not here: whether that pays on a link (`compression`), how frames cross (`connection`).

    block: e0 m0 e1 m1 ...  --width 2-->  m0 m1 ... (as they are)  |  e0 e1 ... (zstd)

A BF16 weight has about 2.7 bits in the byte with its exponent and 8 in the other. The width follows from each block's
own histograms, so no caller needs to know what a block is of.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from penstock.errors import FormatError
from penstock.types import GB, MIB

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


SKIP_BYTES = 24 * MIB
"""After a change, before the clock counts: what was in flight, what filled sockets while samples were coded (6 MiB each
is the kernel's own bound), a shaper's burst."""
TIMED_BYTES = 32 * MIB
"""What a rate is measured over: 0.27 s of a 1 Gb/s link, 14 ms of 20 Gb/s."""
PIECE_BYTES, REQUEST_BYTES = MIB, 8 * MIB
"""Taken in one call, asked for in one request, while the clock counts: its ends are sharp, and a trial is soon over."""
SAMPLE_BYTES, NUM_SAMPLES = MIB // 4, 8
"""Coded and decoded here, of what came raw: 2 ms in all."""
MARGIN = 1.1
"""What coding must promise over raw. Reason: for less the processors have better to do."""
KEPT = 1.05
"""What it must be over raw once it is used."""
AGAIN_S = 60.0
"""A link may be another after this long: it is measured anew, for 56 MiB raw."""


@dataclass(slots=True)
class _Sampled:
    """The result of compressing samples."""

    count: int = 0
    nbytes: int = 0
    coded_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0

    @property
    def ratio(self) -> float:
        return self.nbytes / self.coded_bytes if self.coded_bytes else 1.0

    @property
    def bytes_per_s(self) -> float:
        """Return the rate of the slower end."""
        return self.nbytes / max(self.encode_s, self.decode_s, 1e-9)


class Choice:
    """The decision for one link. Used by all connections to one peer.

    Args:
        always: True: coded from the first byte on; False: raw; None: as measured.
    """

    def __init__(self, always: bool | None = None) -> None:
        self._always, self._lock = always, threading.Lock()
        self._active = [0, 0]
        self._at = self._decided_at = time.monotonic()
        self._num_bytes = self._wire_bytes = 0
        self._why = {None: "too little was read to tell", True: "asked for", False: "not allowed"}[always]
        self._raw, self._sampled = 0.0, _Sampled()
        self._restart(is_coded=bool(always))

    def _restart(self, *, is_coded: bool) -> None:
        self.is_coded, self._is_open = is_coded, self._always is None
        self._seen = self._timed = 0
        self._busy_s = 0.0
        if not is_coded:
            self._sampled = _Sampled()

    def begin(self) -> bool:
        """Count a request that is about to be sent; return whether to request it compressed. Call `end` after it."""
        with self._lock:
            now = time.monotonic()
            # The time between requests is not the link's: measure from the first one after a pause.
            if not any(self._active):
                self._at = now
            if self._always is None and not self._is_open and now - self._decided_at > AGAIN_S:
                self._restart(is_coded=False)
            self._active[self.is_coded] += 1
            return self.is_coded

    def end(self, is_coded: bool) -> None:
        """Count a request of `begin` as ended, whether its answer came or not."""
        with self._lock:
            self._active[is_coded] -= 1

    def declined(self) -> None:
        """Note that the peer does not compress."""
        with self._lock:
            if self.is_coded:
                self._decide(is_coded=False, why="the peer does not compress")

    @property
    def is_open(self) -> bool:
        """Return whether the link is being measured, or about to be."""
        return self._is_open

    def sample(self, piece: memoryview, planes: Planes) -> None:
        """Compress a sample of raw bytes, to learn the codec's ratio and speed on them."""
        # The lock is given up while the codec runs: other connections receive meanwhile.
        with self._lock:
            is_wanted = self._is_open and not self.is_coded and self._sampled.count < NUM_SAMPLES
            if not is_wanted or len(piece) < SAMPLE_BYTES:
                return
            self._sampled.count += 1
        block = np.frombuffer(piece[:SAMPLE_BYTES], np.uint8)
        # Processor time of this thread, not wall time: the trial with compressed requests shows the effect of others
        # that use the processors.
        began = time.thread_time()
        frame = memoryview(b"".join(planes.encode(block)))
        encoded = time.thread_time()
        planes.decode(frame, np.empty_like(block))
        decoded = time.thread_time()
        with self._lock:
            self._sampled.nbytes += len(block)
            self._sampled.coded_bytes += len(frame)
            self._sampled.encode_s += encoded - began
            self._sampled.decode_s += decoded - encoded

    def got(self, nbytes: int, wire_bytes: int, *, is_coded: bool) -> None:
        """Note `nbytes` that are in place, and the `wire_bytes` that crossed the link for them."""
        with self._lock:
            now = time.monotonic()
            if is_coded:
                self._num_bytes += nbytes
                self._wire_bytes += wire_bytes
            is_watched = self._always is None and (self._is_open or is_coded)
            # While requests of both kinds are under way, the rate belongs to neither: do not measure it.
            if not is_watched or is_coded != self.is_coded or self._active[not is_coded]:
                self._at = now
                return
            self._seen += nbytes
            # The first bytes after a change were sent before it, see `SKIP_BYTES`: they are of the other way.
            if self._seen > SKIP_BYTES:
                self._timed += nbytes
                self._busy_s += now - self._at
            self._at = now
            if self._timed >= TIMED_BYTES:
                self._measured(self._timed / max(self._busy_s, 1e-9))

    def _measured(self, rate: float) -> None:
        """Decide by the measured rate of the present way, raw or compressed."""
        sampled = self._sampled
        if not self.is_coded:
            self._raw = rate
            promised = min(rate * sampled.ratio, sampled.bytes_per_s)
            measured = f"the link gives {rate / GB:.2f} GB/s, the codec {sampled.ratio:.2f}x at "
            self._why = f"{measured}{sampled.bytes_per_s / GB:.2f} GB/s"
            if promised > rate * MARGIN:
                self._restart(is_coded=True)
            else:
                self._decide(is_coded=False, why=self._why)
        elif rate < self._raw * KEPT:
            measured = f"compressed gave {rate / GB:.2f} GB/s, raw {self._raw / GB:.2f}"
            self._decide(is_coded=False, why=measured)
        else:
            if self._is_open:
                self._decide(is_coded=True, why=f"{rate / GB:.2f} GB/s, raw {self._raw / GB:.2f}")
            # Other work may take the processors later: keep measuring, to go back to raw when compression gets slow.
            self._timed, self._busy_s = 0, 0.0

    def _decide(self, *, is_coded: bool, why: str) -> None:
        self.is_coded, self._is_open, self._why, self._decided_at = is_coded, False, why, time.monotonic()

    def decision(self) -> tuple[bool, str]:
        """Return whether the next request is compressed, and why."""
        with self._lock:
            if self.is_coded:
                ratio = self._num_bytes / self._wire_bytes if self._wire_bytes else self._sampled.ratio
                return True, f"{ratio:.2f}x by byte planes: {self._why}"
            return False, f"not compressed: {self._why}"
