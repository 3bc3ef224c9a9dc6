"""Lossless compression of weights on a link: a codec that separates byte planes, and the decision whether to use it.

A frame groups bytes of the same significance into planes, and compresses with zstd those planes that shrink enough. A
BF16 weight has about 2.7 bits of information in the byte with its exponent, and 8 bits in the other byte. The element
width is derived from the histograms of each block, so callers need not know the dtype.

A link is first measured without compression. Compression is then tried if it is promising, and kept if it is faster.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from penstock.errors import FormatError
from penstock.types import GB, MIB

U8 = npt.NDArray[np.uint8]

BLOCK_BYTES = MIB
"""Maximum size of a block, which takes 6 ms on a 1 Gb/s link when compressed. Each peer uses this much more memory."""
WIDTHS = (1, 2, 4)
"""Bytes of an element: 1 for FP8 and integers, 2 for BF16 and FP16, 4 for FP32."""
_HEAD = struct.Struct("<II")
"""Size of the block and width. The stored size of each plane follows."""
MAX_FRAME_BYTES = _HEAD.size + 4 * WIDTHS[-1] + BLOCK_BYTES
_PIECES = 4
_PIECE_BYTES = 8 << 10
"""Number and size of the samples from which a block's width is estimated. The error is at most 0.1 bit per element."""
_WORTH = 0.92
"""A plane is compressed if its entropy is below this fraction of its size."""

_HUFFMAN = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1, window_log=19, target_length=0
)
"""Parameters for output as small as with entropy coding alone, because matches among exponents are chance. Source:
benchmarks/results/cpu2_202611/ compress.md: 0.9 GB/s and 2.80 bits. Level 1 reaches 0.11 GB/s and 2.99 bits."""


class Planes:
    """Encodes and decodes frames, for one thread."""

    def __init__(self) -> None:
        self._coder = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
        self._decoder = zstandard.ZstdDecompressor(max_window_size=BLOCK_BYTES)

    def encode(self, block: U8) -> list[memoryview]:
        """Return the pieces of a block's frame. Uncompressed pieces may be views of the block."""
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
        """Decode a frame into memory of exactly the size of its block. A FormatError means that nothing was written."""
        # The frame comes from a peer, so check its numbers before allocating memory.
        nbytes, sizes, at = _head(frame)
        if nbytes != len(into):
            raise FormatError(f"the frame has a block of {nbytes} bytes instead of {len(into)}")
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
            # Check the size in the frame, because the decoder allocates that size and it comes from a peer.
            if zstandard.frame_content_size(stored) != count:
                raise FormatError("the decompressed size of a plane does not match the block")
            plain = self._decoder.decompress(stored, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise FormatError(f"a plane is corrupt: {error}") from error
        if len(plain) != count:
            raise FormatError("a decompressed plane does not have its stated size")
        return np.frombuffer(plain, np.uint8)


def block_bytes(frame: memoryview) -> int:
    """Return the size of a frame's block, at most `BLOCK_BYTES`. Raises FormatError if the frame is malformed."""
    return _head(frame)[0]


def _head(frame: memoryview) -> tuple[int, Sequence[int], int]:
    """Return the size of the block, the stored size of each plane, and the offset of the first plane."""
    if len(frame) < _HEAD.size:
        raise FormatError(f"the frame has {len(frame)} bytes, which is less than its header")
    nbytes, width = _HEAD.unpack_from(frame)
    at = _HEAD.size + 4 * width
    if width not in WIDTHS or not 0 < nbytes <= BLOCK_BYTES or len(frame) < at:
        raise FormatError(f"the frame has an invalid header: width {width}, block of {nbytes} bytes")
    sizes = struct.unpack_from(f"<{width}I", frame, _HEAD.size)
    if max(sizes) > nbytes // width or len(frame) != at + sum(sizes) + nbytes % width:
        raise FormatError(f"planes of {sizes} bytes do not fit a frame of {len(frame)} bytes")
    return nbytes, sizes, at


def _shape(block: U8) -> tuple[int, Sequence[bool]]:
    """Return the element width with the smallest total entropy, and whether to compress each plane."""
    pieces = max(1, min(_PIECES, len(block) // _PIECE_BYTES))
    starts = [(len(block) - len(block) // pieces) * i // max(1, pieces - 1) // 4 * 4 for i in range(pieces)]
    sampled = np.concatenate([block[at : at + _PIECE_BYTES] for at in starts])
    rows = sampled[: len(sampled) // 4 * 4].reshape(-1, 4)
    if not len(rows):
        return 1, (False,)
    seen = np.stack([np.bincount(rows[:, at], minlength=256) for at in range(4)])
    best: tuple[float, int, tuple[bool, ...]] = (1.0, 1, (False,))
    for width in WIDTHS:
        shares = [_entropy(seen[at::width].sum(axis=0)) / 8 for at in range(width)]
        coded = tuple(share < _WORTH for share in shares)
        whole = sum(share if is_worth else 1.0 for share, is_worth in zip(shares, coded, strict=True)) / width
        # A larger width requires more copies, so accept it only for a gain.
        if whole < best[0] - 0.01:
            best = (whole, width, coded)
    return best[1], best[2]


def _entropy(seen: npt.NDArray[np.int64]) -> float:
    """Return the entropy in bits per byte, from the counts of byte values."""
    share = seen[seen > 0] / seen.sum()
    return float(-(share * np.log2(share)).sum())


SKIP_BYTES = 24 * MIB
"""Bytes that are not timed after a switch. They were in flight, filled sockets while samples were compressed (up to
6 MiB each in the kernel), or passed a traffic shaper in a burst."""
TIMED_BYTES = 32 * MIB
"""Number of bytes over which a rate is measured, in 0.27 s on a 1 Gb/s link and 14 ms on a 20 Gb/s link."""
PIECE_BYTES = MIB
REQUEST_BYTES = 8 * MIB
"""Bytes per receiving call and per request during a measurement, so that the interval has precise ends."""
SAMPLE_BYTES = MIB // 4
NUM_SAMPLES = 8
"""Number of samples that are compressed and decompressed locally. They take 2 ms in total."""
MARGIN = 1.1
"""Minimum predicted gain for a trial. A smaller gain is not worth the processor time."""
KEPT = 1.05
"""Minimum measured gain to keep compression."""
AGAIN_S = 60.0
"""Seconds until a link is measured again, for 56 MiB uncompressed, because the link may have changed."""


class _Sampled(msgspec.Struct):
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
        """Rate of encoding or decoding, whichever is slower, in bytes per second."""
        return self.nbytes / max(self.encode_s, self.decode_s, 1e-9)


class CompressionChoice:
    """The decision for one link, shared by all connections to a peer. If `always` is None, measurements decide."""

    def __init__(self, always: bool | None = None) -> None:
        self._always = always
        self._lock = threading.Lock()
        # Number of requests in flight without and with compression.
        self._active = [0, 0]
        self._at = self._decided_at = time.monotonic()
        self._num_bytes = 0
        self._wire_bytes = 0
        self._why = {None: "too few bytes were read to decide", True: "requested", False: "not allowed"}[always]
        self._raw = 0.0
        self._sampled = _Sampled()
        self._restart(is_coded=bool(always))

    def _restart(self, *, is_coded: bool) -> None:
        self.is_coded = is_coded
        # True while the link is being measured. `begin` may start another measurement.
        self.is_open = self._always is None
        self._seen = 0
        self._timed = 0
        self._busy_s = 0.0
        if not is_coded:
            self._sampled = _Sampled()

    def begin(self) -> bool:
        """Count a request that is about to be sent. Return whether to compress the response. Call `end` afterwards."""
        with self._lock:
            now = time.monotonic()
            # A pause between requests must not count.
            if not any(self._active):
                self._at = now
            if self._always is None and not self.is_open and now - self._decided_at > AGAIN_S:
                self._restart(is_coded=False)
            self._active[self.is_coded] += 1
            return self.is_coded

    def end(self, is_coded: bool) -> None:
        """Count a request as done or failed."""
        with self._lock:
            self._active[is_coded] -= 1

    def declined(self) -> None:
        """Record that the peer does not compress."""
        with self._lock:
            if self.is_coded:
                self._decide(is_coded=False, why="the peer does not compress")

    def sample(self, piece: memoryview, planes: Planes) -> None:
        """Compress a sample of raw bytes, to measure the codec's ratio and speed."""
        # Do not hold the lock while the codec runs, so that other connections can receive.
        with self._lock:
            is_wanted = self.is_open and not self.is_coded and self._sampled.count < NUM_SAMPLES
            if not is_wanted or len(piece) < SAMPLE_BYTES:
                return
            self._sampled.count += 1
        block = np.frombuffer(piece[:SAMPLE_BYTES], np.uint8)
        # Measure this thread's CPU time. The trial will show whether other work competes for the processors.
        started = time.thread_time()
        frame = memoryview(b"".join(planes.encode(block)))
        encoded = time.thread_time()
        planes.decode(frame, np.empty_like(block))
        decoded = time.thread_time()
        with self._lock:
            self._sampled.nbytes += len(block)
            self._sampled.coded_bytes += len(frame)
            self._sampled.encode_s += encoded - started
            self._sampled.decode_s += decoded - encoded

    def add_bytes(self, nbytes: int, wire_bytes: int, *, is_coded: bool) -> None:
        """Record that `nbytes` were received, for which `wire_bytes` were sent over the link."""
        with self._lock:
            now = time.monotonic()
            if is_coded:
                self._num_bytes += nbytes
                self._wire_bytes += wire_bytes
            is_watched = self._always is None and (self.is_open or is_coded)
            # Skip this measurement if requests of the other kind are in flight, because these would distort the rate.
            if not is_watched or is_coded != self.is_coded or self._active[not is_coded]:
                self._at = now
                return
            self._seen += nbytes
            if self._seen > SKIP_BYTES:
                self._timed += nbytes
                self._busy_s += now - self._at
            self._at = now
            if self._timed >= TIMED_BYTES:
                self._measured(self._timed / max(self._busy_s, 1e-9))

    def _measured(self, rate: float) -> None:
        sampled = self._sampled
        if not self.is_coded:
            self._raw = rate
            promised = min(rate * sampled.ratio, sampled.bytes_per_s)
            measured = f"the link has {rate / GB:.2f} GB/s, the codec {sampled.ratio:.2f}x at "
            self._why = f"{measured}{sampled.bytes_per_s / GB:.2f} GB/s"
            if promised > rate * MARGIN:
                self._restart(is_coded=True)
            else:
                self._decide(is_coded=False, why=self._why)
        elif rate < self._raw * KEPT:
            self._decide(is_coded=False, why=f"compressed {rate / GB:.2f} GB/s, raw {self._raw / GB:.2f}")
        else:
            if self.is_open:
                self._decide(is_coded=True, why=f"{rate / GB:.2f} GB/s, raw {self._raw / GB:.2f}")
            # Measure again later, because other work may then occupy the processors and slow compression down.
            self._timed, self._busy_s = 0, 0.0

    def _decide(self, *, is_coded: bool, why: str) -> None:
        self.is_coded = is_coded
        self.is_open = False
        self._why = why
        self._decided_at = time.monotonic()

    def decision(self) -> tuple[bool, str]:
        """Return whether the next request is compressed, and the reason."""
        with self._lock:
            if self.is_coded:
                ratio = self._num_bytes / self._wire_bytes if self._wire_bytes else self._sampled.ratio
                return True, f"{ratio:.2f}x by byte planes: {self._why}"
            return False, f"not compressed: {self._why}"
