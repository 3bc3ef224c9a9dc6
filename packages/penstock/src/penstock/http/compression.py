"""Lossless compression of weights on a link: the code by byte planes, and the decision whether it pays.

In: blocks of bytes; bytes as they arrive, the clock. Out: frames and blocks again; raw or coded for the next request.
Not here: the messages that carry frames (`region_messages`), the connections (`transport.http_reader`).

A frame keeps bytes of one significance together, and codes by zstd those planes that repeat themselves:

    block: e0 m0 e1 m1 ...  --width 2-->  m0 m1 ... (as they are)  |  e0 e1 ... (zstd)

A BF16 weight has about 2.7 bits in the byte with its exponent and 8 in the other. The width follows from each block's
own histograms, so no caller needs to know the type of the numbers.

A link is measured raw; coding is tried if it is promising, and kept if it was faster:

    raw: sample --> time --> ratio x link, codec > link?  --yes--> coded: time --> more than raw? --yes--> coded
                                     `--no--> raw                                       `--no--> raw; watched on
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
"""Longest block of one frame: 6 ms of a 1 Gb/s link once it is coded, and the memory that each end needs besides."""
WIDTHS = (1, 2, 4)
"""Bytes of an element: FP8 and integers, BF16 and FP16, FP32."""
_HEAD = struct.Struct("<II")
"""Bytes of the block, and the width; the stored length of each plane follows. A plane is stored coded if that is
shorter."""
MAX_FRAME_BYTES = _HEAD.size + 4 * WIDTHS[-1] + BLOCK_BYTES
_PIECES = 4
_PIECE_BYTES = 8 << 10
"""Number and length of the pieces of a block that its width is estimated from. Reason: the estimate is right to 0.1 bit
an element, in a tenth of the time of coding."""
_WORTH = 0.92
"""A plane is coded if its entropy promises less than this share of its length."""

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
        """Return the frame of a block, in pieces; those that are not coded may be views of the block itself."""
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
        """Decode the block of a frame into memory of just its size.

        Raises:
            FormatError: it is no frame, or its block has another size; nothing was written.
        """
        # The frame comes from a peer: its numbers are checked before anything is allocated from them, and every plane
        # is decoded before the first byte of the destination is written.
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
            # The decoder allocates what the frame states: a few bytes could otherwise ask for gigabytes.
            if zstandard.frame_content_size(stored) != count:
                raise FormatError("the length of a plane differs from its block's")
            plain = self._decoder.decompress(stored, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise FormatError(f"a damaged plane: {error}") from error
        if len(plain) != count:
            raise FormatError("the length of a plane differs from the length it states")
        return np.frombuffer(plain, np.uint8)


def block_bytes(frame: memoryview) -> int:
    """Return the bytes of a frame's block, at most `BLOCK_BYTES`. FormatError if it is no frame."""
    return _head(frame)[0]


def _head(frame: memoryview) -> tuple[int, Sequence[int], int]:
    """Return the bytes of the block, the stored length of each plane, and the offset of the first."""
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
    """Return the width that makes a block shortest by its planes' entropy, and which planes are worth coding."""
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
        # A greater width must be worth its copies.
        if whole < best[0] - 0.01:
            best = (whole, width, coded)
    return best[1], best[2]


def _entropy(seen: npt.NDArray[np.int64]) -> float:
    """Return the bits that a byte carries, from the counts of its values."""
    share = seen[seen > 0] / seen.sum()
    return float(-(share * np.log2(share)).sum())


SKIP_BYTES = 24 * MIB
"""Bytes after a change that are not timed. They are bytes that were in flight, that filled sockets while samples were
coded (6 MiB each is the kernel's own bound), or that a traffic shaper let pass in a burst."""
TIMED_BYTES = 32 * MIB
"""Bytes that a rate is measured over: 0.27 s of a 1 Gb/s link, 14 ms of 20 Gb/s."""
PIECE_BYTES = MIB
REQUEST_BYTES = 8 * MIB
"""Bytes of one receiving call and of one request while a rate is measured. Reason: the ends of the interval are sharp,
and a trial is soon over."""
SAMPLE_BYTES = MIB // 4
NUM_SAMPLES = 8
"""Samples of the raw bytes that are coded and decoded here: 2 ms in all."""
MARGIN = 1.1
"""Gain over raw that coding must promise. Reason: for less, the processors have better to do."""
KEPT = 1.05
"""Gain over raw that coding must have once it is used."""
AGAIN_S = 60.0
"""Seconds after which a link is measured anew, for 56 MiB raw. Reason: it may have changed."""


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


class CompressionChoice:
    """The decision for one link. Used by all connections to one peer.

    Args:
        always: True: coded from the first byte on; False: raw; None: as measured.
    """

    def __init__(self, always: bool | None = None) -> None:
        self._always = always
        self._lock = threading.Lock()
        # Requests under way, raw and coded.
        self._active = [0, 0]
        self._at = self._decided_at = time.monotonic()
        self._num_bytes = 0
        self._wire_bytes = 0
        self._why = {None: "too little was read to tell", True: "asked for", False: "not allowed"}[always]
        self._raw = 0.0
        self._sampled = _Sampled()
        self._restart(is_coded=bool(always))

    def _restart(self, *, is_coded: bool) -> None:
        self.is_coded = is_coded
        self._is_open = self._always is None
        self._seen = 0
        self._timed = 0
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
        """Return whether the link is being measured. `begin` may start another measurement."""
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
        self.is_coded = is_coded
        self._is_open = False
        self._why = why
        self._decided_at = time.monotonic()

    def decision(self) -> tuple[bool, str]:
        """Return whether the next request is compressed, and why."""
        with self._lock:
            if self.is_coded:
                ratio = self._num_bytes / self._wire_bytes if self._wire_bytes else self._sampled.ratio
                return True, f"{ratio:.2f}x by byte planes: {self._why}"
            return False, f"not compressed: {self._why}"
