"""Compression by byte planes: round trips, sizes, and corrupt frames."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FormatError
from penstock.http.compression import BLOCK_BYTES, MAX_FRAME_BYTES, Planes, block_bytes


def weights(width: int, nbytes: int = BLOCK_BYTES) -> np.ndarray:
    """Return normal weights with a scale for each row of 1,024, as F32 or as its upper half."""
    chance = np.random.default_rng(width)
    scale = np.exp(chance.normal(-4, 0.35, (nbytes // 1024 + 1, 1)))
    found = (chance.standard_normal((len(scale), 1024)) * scale).astype(np.float32).reshape(-1)
    kept = found.view(np.uint8).reshape(-1, 4)[:, 4 - width :]
    return np.ascontiguousarray(kept).reshape(-1)[:nbytes].copy()


def frame_of(block: np.ndarray) -> memoryview:
    return memoryview(b"".join(Planes().encode(block)))


def back(frame: memoryview, nbytes: int) -> np.ndarray:
    into = np.full(nbytes, 0xAA, np.uint8)
    Planes().decode(frame, into)
    return into


@pytest.mark.parametrize(("width", "ratio"), [(2, 1.45), (4, 1.18)])
@pytest.mark.parametrize("nbytes", [BLOCK_BYTES, BLOCK_BYTES - 4097, 65_539])
def test_weights_of_any_element_width_are_compressed(width: int, ratio: float, nbytes: int) -> None:
    block = weights(width, nbytes)
    frame = frame_of(block)
    assert nbytes / len(frame) > ratio
    assert (back(frame, nbytes) == block).all()


def test_incompressible_block_grows_by_few_bytes() -> None:
    block = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES, np.uint8)
    frame = frame_of(block)
    assert len(block) < len(frame) <= MAX_FRAME_BYTES
    assert (back(frame, len(block)) == block).all()


@given(st.binary(min_size=1, max_size=5000), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_arbitrary_bytes_round_trip_through_compression(data: bytes, times: int) -> None:
    block = np.frombuffer(data * times, np.uint8)
    frame = frame_of(block)
    assert block_bytes(frame) == len(block)
    assert (back(frame, len(block)) == block).all()


def test_partly_compressible_block_round_trips() -> None:
    block = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES, np.uint8)
    block[: 32 << 10] = weights(2, 32 << 10)
    assert (back(frame_of(block), len(block)) == block).all()


GOOD = bytes(frame_of(weights(2, 1 << 16)))
PLANE = 1 << 15


def frame(*planes: bytes, nbytes: int = 1 << 16, width: int = 2, sizes: tuple[int, ...] | None = None) -> bytes:
    said = sizes or tuple(len(plane) for plane in planes)
    return struct.pack(f"<II{len(said)}I", nbytes, width, *said) + b"".join(planes)


bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
unsaid = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(PLANE))
longer = zstandard.ZstdCompressor().compress(bytes(PLANE + 1))
fits = zstandard.ZstdCompressor().compress(bytes(PLANE))
low = bytes(PLANE)


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        GOOD[:7],
        GOOD[:15],
        GOOD[:-1],
        GOOD + b"x",
        frame(low, low, width=3),
        frame(low, low, width=0),
        frame(low, low, width=2**31),
        frame(b"", b"", nbytes=0),
        frame(low, low, nbytes=BLOCK_BYTES + 2),
        frame(low, low, nbytes=2**32 - 1),
        frame(low, low, sizes=(2**32 - 1, PLANE)),
        frame(low, low, sizes=(PLANE + 1, PLANE - 1)),
        frame(low, bomb),
        frame(low, unsaid),
        frame(low, longer),
        frame(low, fits + b"x"),
        frame(low, fits[:-1]),
        frame(low, fits + fits),
        frame(low, b"no zstd"),
        frame(low, b""),
    ],
)
def test_hostile_frame_raises_and_writes_nothing(hostile: bytes) -> None:
    into = np.full(1 << 16, 0xAA, np.uint8)
    with pytest.raises(FormatError):
        Planes().decode(memoryview(hostile), into)
    assert (into == 0xAA).all()


def test_wrong_block_length_is_refused() -> None:
    with pytest.raises(FormatError, match="65536 bytes instead of 65535"):
        Planes().decode(memoryview(GOOD), np.empty((1 << 16) - 1, np.uint8))


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_flipped_byte_never_crashes_decoder(at: int, by: int) -> None:
    damaged = bytearray(GOOD)
    damaged[at] ^= by
    into = np.empty(1 << 16, np.uint8)
    with contextlib.suppress(FormatError):
        Planes().decode(memoryview(damaged), into)
