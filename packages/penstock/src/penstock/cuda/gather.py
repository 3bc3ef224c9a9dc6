"""Copies many short runs of device memory with one kernel, because copy engines would spend their time starting copies.

The kernel runs on the reader's device and loads the holder's memory over NVLink. Import this module on first use,
because it imports Triton.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl

from penstock.cuda.pack import plan_copy
from penstock.segments import Rectangles, Segments
from penstock.types import I64, U64

TILE_BYTES = tl.constexpr(16 << 10)
"""Bytes per program. 128 threads with eight 16-byte loads each in flight hide the microsecond of NVLink."""

_WIDTH = 16
"""Bytes of the widest load."""


@triton.jit(do_not_specialize=["num_tiles"])
def _copy_tiles(table: tl.tensor, num_tiles: tl.tensor, WIDE: tl.constexpr) -> None:
    """Copy a tile.

    table: int64 [3, num_tiles]: destination, source and length, which is at most TILE_BYTES. With WIDE all are
    multiples of 16.
    """
    tile = tl.program_id(0).to(tl.int64)
    dst, src = tl.load(table + tile), tl.load(table + num_tiles + tile)
    nbytes = tl.load(table + 2 * num_tiles + tile)
    if WIDE:
        at = tl.arange(0, TILE_BYTES // 8)
        mask = at < tl.multiple_of(nbytes // 8, 2)
        words = tl.load(tl.multiple_of(src, 16).to(tl.pointer_type(tl.uint64)) + at, mask=mask)
        tl.store(tl.multiple_of(dst, 16).to(tl.pointer_type(tl.uint64)) + at, words, mask=mask)
    else:
        at = tl.arange(0, TILE_BYTES)
        mask = at < nbytes
        single = tl.load(src.to(tl.pointer_type(tl.uint8)) + at, mask=mask)
        tl.store(dst.to(tl.pointer_type(tl.uint8)) + at, single, mask=mask)


def gather(dst: U64, src: U64, nbytes: U64, device: int, stream: int) -> None:
    """Queue the copies on a stream of this device, with one or two launches and a table of 24 bytes for each 16 KiB.

    Runs whose source and destination differ in alignment to 16 bytes are copied byte by byte, which is slower.
    """
    wide, narrow = tiles(dst.astype(np.int64), src.astype(np.int64), nbytes.astype(np.int64))
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
        for table, is_wide in ((wide, True), (narrow, False)):
            if table.shape[1]:
                run(torch.from_numpy(table).to(f"cuda:{device}"), is_wide)


def lay_out_rectangles(rows: Rectangles, device: int, stream: int) -> Callable[[], None]:
    """Return a function that queues copies between addresses on this stream, any number of times."""
    queue_stream = torch.cuda.ExternalStream(stream, device)
    columns = (rows.dst, rows.src, rows.run_bytes, rows.num_rows, rows.dst_pitch, rows.src_pitch)
    with torch.cuda.device(device), torch.cuda.stream(queue_stream):
        table = plan_copy(*columns, torch.device("cuda", device))

    def queue() -> None:
        with torch.cuda.device(device), torch.cuda.stream(queue_stream):
            table.run()

    return queue


def run(table: torch.Tensor, is_wide: bool) -> None:
    """Launch the kernel for a table of tiles."""
    _copy_tiles[(table.shape[1],)](table, table.shape[1], WIDE=is_wide, num_warps=4)


def tiles(dst: I64, src: I64, nbytes: I64) -> tuple[I64, I64]:
    """Return the runs as two tables of tiles: the aligned 16-byte words, and the bytes before and after the words."""
    # A copy of 16-byte words requires that source and destination have the same alignment.
    same_alignment = (dst ^ src) % _WIDTH == 0
    head = np.where(same_alignment, np.minimum(-dst % _WIDTH, nbytes), nbytes)
    body = (nbytes - head) // _WIDTH * _WIDTH
    tail = nbytes - head - body
    narrow = [_tiled(dst, src, head), _tiled(dst + head + body, src + head + body, tail)]
    return _tiled(dst + head, src + head, body), np.concatenate(narrow, axis=1)


def _tiled(dst: I64, src: I64, nbytes: I64) -> I64:
    cut = Segments(src=src, dst=dst, nbytes=nbytes).cut(int(TILE_BYTES.value))
    return np.stack([cut.dst, cut.src, cut.nbytes])
