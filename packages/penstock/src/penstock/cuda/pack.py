"""Rectangles of device memory, of which neither end need lie in one piece, copied by one kernel.

In: addresses and pitches, in memory that the device reaches (its own, a peer's). Out: the bytes, in stream order.
Not here: the kernel (`pack_triton`); long runs, which copy engines move without one.

A table holds a rectangle in 72 bytes, however many runs it has; `gather` has an entry for each run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.cuda.kernel_cache import Launch
from penstock.types import I64

TILE_BYTES = 16 << 10
"""Bytes of a program: 128 threads with eight 16-byte loads each in flight, which hide NVLink's microsecond."""

WIDTHS = (16, 4, 1)
"""Bytes of a load: the widest of which all of a rectangle's numbers are multiples."""

_LONGEST_RUN = 1 << 30
"""A longer run is copied as several: units within a row are counted in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackTable:
    """Rectangles laid out for the kernel, to be copied any number of times. Made by `plan_pack` or `plan_copy`."""

    launches: tuple[Launch, ...]

    def run(self) -> None:
        """Queue the copies on the device's current stream: the one it was planned on, or one that waits for it.

        One thread at a time.
        """
        for part in self.launches:
            part.run()


def plan_pack(
    dst: I64, src: I64, run_bytes: I64, src_pitch: I64, start: I64, nbytes: I64, device: torch.device
) -> PackTable:
    """Plan copies of `nbytes` of each strip, from its packed byte `start` on, into one piece; see `plan_copy`."""
    return _plan(dst - start, src, run_bytes, run_bytes, src_pitch, start, nbytes, device)


def plan_copy(
    dst: I64, src: I64, run_bytes: I64, num_rows: I64, dst_pitch: I64, src_pitch: I64, device: torch.device
) -> PackTable:
    """Plan copies of rectangles from one place to another.

    Args:
        dst, src: addresses of the first run.
        run_bytes: bytes of a run, at least 1.
        num_rows: number of runs, at least 1.
        dst_pitch, src_pitch: bytes from the start of a run to the start of the next.
        device: runs the kernel; the CPU only under Triton's interpreter.

    Cost: tables of 72 bytes a rectangle, and 4 a tile of 16 KiB that are made on the device; up to three launches when
        run; no synchronisation.
    """
    # Each long run becomes several rectangles, side by side, of the same rows.
    parts = -(-run_bytes // _LONGEST_RUN)
    at = np.repeat(np.arange(len(parts)), parts)
    skipped = (np.arange(len(at)) - np.repeat(np.cumsum(parts) - parts, parts)) * _LONGEST_RUN
    run = np.minimum(run_bytes[at] - skipped, _LONGEST_RUN)
    nbytes, none = run * num_rows[at], np.zeros(len(at), np.int64)
    return _plan(dst[at] + skipped, src[at] + skipped, run, dst_pitch[at], src_pitch[at], none, nbytes, device)


def _plan(
    dst: I64,
    src: I64,
    run_bytes: I64,
    dst_pitch: I64,
    src_pitch: I64,
    start: I64,
    nbytes: I64,
    device: torch.device,
) -> PackTable:
    # The pitches of a single run mean nothing: as 0 they do not keep it from the widest loads.
    one_row = start + nbytes <= run_bytes
    table = np.stack([dst, src, run_bytes, np.where(one_row, 0, dst_pitch), np.where(one_row, 0, src_pitch), start])
    table = np.concatenate([table, nbytes[None]])
    # The OR of all numbers of a rectangle: a power of two divides each of them where it divides this.
    odd = np.bitwise_or.reduce(table, axis=0)
    launches = []
    left = np.arange(len(dst))
    for width in WIDTHS:
        fits = odd[left] % width == 0
        mine, left = left[fits], left[~fits]
        if not len(mine):
            continue
        counts = -(-nbytes[mine] // (TILE_BYTES * width // 16))
        columns = np.concatenate([table[:, mine], (np.cumsum(counts) - counts)[None], counts[None]])
        host = torch.from_numpy(np.ascontiguousarray(columns))
        # Pinned: a copy from pageable memory would make the call wait for the device.
        on = (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
        # Made on the device: a tile for each 16 KiB is many times the table.
        which = torch.arange(len(mine), dtype=torch.int32, device=device)
        tiles = torch.repeat_interleave(which, on[8], output_size=int(counts.sum()))
        constants = {"TILE_BYTES": TILE_BYTES * width // 16, "WIDTH": width}
        arguments = on, tiles, on.shape[1]
        launches.append(Launch("penstock.cuda.pack_triton", "copy_tiles", len(tiles), arguments, constants))
    return PackTable(launches=tuple(launches))
