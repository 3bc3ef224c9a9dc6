"""Digests of strips, which are runs of equal length at a fixed pitch, such as a tensor's shard in memory.

A digest is computed as if the strip were packed, because holder and reader have the same runs at different pitches. The
digest of a strip with one leaf is that leaf's XXH3-64. The digest of a strip with several leaves is the XXH3-64 of the
leaves' digests, as little-endian uint64.
"""

from __future__ import annotations

import ctypes

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from penstock.digest.leaf import LEAF_BYTES, leaf_digests, num_leaves
from penstock.errors import PlanError
from penstock.types import I64, U64

Bytes = npt.NDArray[np.uint8]


class Strips(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Strips as columns. Strip i has `num_rows[i]` runs of `run_bytes[i]` bytes from `at[i]`, `pitch[i]` apart."""

    at: I64
    run_bytes: I64
    num_rows: I64
    pitch: I64

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, rows: I64 | npt.NDArray[np.bool_] | slice) -> Strips:
        """Return the selected strips."""
        at, run_bytes, num_rows, pitch = (column[rows] for column in self.columns)
        return Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)

    @property
    def columns(self) -> tuple[I64, I64, I64, I64]:
        """Return the columns `at`, `run_bytes`, `num_rows` and `pitch`."""
        return self.at, self.run_bytes, self.num_rows, self.pitch

    def shifted(self, by: int | I64) -> Strips:
        """Return the same strips with `by` added to their offsets."""
        return Strips(at=self.at + by, run_bytes=self.run_bytes, num_rows=self.num_rows, pitch=self.pitch)

    @property
    def nbytes(self) -> I64:
        """Return the number of bytes of each strip."""
        return self.run_bytes * self.num_rows

    @property
    def stop(self) -> I64:
        """Return the offset after the last byte of each strip."""
        return self.at + (self.num_rows - 1) * self.pitch + self.run_bytes

    def is_packed(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the strips that are contiguous."""
        packed: npt.NDArray[np.bool_] = (self.num_rows == 1) | (self.pitch == self.run_bytes)
        return packed

    def check(self, nbytes: int) -> None:
        """Raise PlanError unless all strips fit in a memory region of `nbytes` bytes."""
        num = len(self.at)
        if not num == len(self.run_bytes) == len(self.num_rows) == len(self.pitch):
            raise PlanError("the columns of the strip table differ in length")
        room = nbytes - self.at - self.run_bytes
        wrong = (self.at < 0) | (self.run_bytes < 1) | (self.num_rows < 1) | (self.pitch < 0)
        wrong |= (self.run_bytes > nbytes) | (self.at > nbytes) | (room < 0)
        # Divide, since the product of a hostile pitch and number of rows could overflow. Refuse overlapping runs, since
        # a strip with a pitch of 0 could have any length and take days to digest.
        wrong |= (self.num_rows > 1) & (
            (self.pitch < self.run_bytes) | (self.num_rows - 1 > room // np.maximum(self.pitch, 1))
        )
        if wrong.any():
            i = int(wrong.argmax())
            extent = f"{self.num_rows[i]} runs of {self.run_bytes[i]} bytes from {self.at[i]}, {self.pitch[i]} apart"
            raise PlanError(f"strip {i} is outside the memory of {nbytes} bytes: {extent}")


def memory_at(address: int, nbytes: int) -> Bytes:
    """Return host memory as an array. The caller must keep the memory alive."""
    if not nbytes:
        return np.zeros(0, np.uint8)
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)


def strip_digests(memory: Bytes, strips: Strips, *, leaf_bytes: int = LEAF_BYTES) -> U64:
    """Return the digest of each strip in host memory. Call `Strips.check` first."""
    out = np.empty(len(strips), np.uint64)
    counts = num_leaves(strips.nbytes, leaf_bytes)
    leaves = np.empty(int(counts.max(initial=0)), np.uint64)
    packed = strips.is_packed().tolist()
    buffer = np.empty(leaf_bytes, np.uint8)
    columns = (column.tolist() for column in (*strips.columns, counts))
    for i, (at, run, rows, pitch, count) in enumerate(zip(*columns, strict=True)):
        if packed[i]:
            leaf_digests(memory[at : at + run * rows].data, leaf_bytes, leaves)
        else:
            for leaf in range(count):
                part = buffer[: min(leaf_bytes, run * rows - leaf * leaf_bytes)]
                _pack(memory[at:], run, pitch, leaf * leaf_bytes, part)
                leaf_digests(part.data, leaf_bytes, leaves[leaf : leaf + 1])
        out[i] = leaves[0] if count == 1 else xxhash.xxh3_64_intdigest(leaves[:count].astype("<u8", copy=False).data)
    return out


def pack_strips(memory: Bytes, strips: Strips, out: Bytes) -> None:
    """Copy strips from host memory to `out`, one after the other."""
    done = 0
    for at, run, rows, pitch in zip(*(column.tolist() for column in strips.columns), strict=True):
        _pack(memory[at:], run, pitch, 0, out[done : done + run * rows])
        done += run * rows


def _pack(memory: Bytes, run: int, pitch: int, start: int, out: Bytes) -> None:
    """Copy bytes `[start, start + len(out))` of the packed form of the strip at the start of `memory`."""
    # Copy the end of a run, then whole runs in one strided copy, then the start of a run.
    row, skipped = divmod(start, run)
    head = min(run - skipped, len(out)) if skipped else 0
    out[:head] = memory[row * pitch + skipped :][:head]
    row += bool(skipped)
    num_whole = (len(out) - head) // run
    if num_whole:
        # Copy a run as one numpy element. A copy of short runs byte by byte would be mostly overhead.
        kind = np.dtype((np.void, run))
        rows = np.ndarray((num_whole,), kind, memory[row * pitch :].data, strides=(pitch,))
        out[head : head + num_whole * run].view(kind)[...] = rows
    done = head + num_whole * run
    out[done:] = memory[(row + num_whole) * pitch :][: len(out) - done]
