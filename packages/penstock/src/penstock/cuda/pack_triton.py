"""Triton kernel that copies rectangles. Source and destination may differ in pitch.

Each program copies one tile of a rectangle's packed bytes. `cuda.pack` builds the tables and launches the kernel.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns"])
def copy_tiles(
    table: tl.tensor, tiles: tl.tensor, columns: tl.tensor, TILE_BYTES: tl.constexpr, WIDTH: tl.constexpr
) -> None:
    """Copy a tile of a rectangle.

    table: int64, columns of `columns` rectangles: dst, src, run_bytes, dst_pitch, src_pitch, first packed byte, number
    of packed bytes, first tile. All bytes are multiples of WIDTH.

    tiles: int32, the rectangle of each tile.

    Packed byte p is byte p % run of row p // run. A run has less than 2^31 units of WIDTH.
    """
    tile = tl.program_id(0)
    at = table + tl.load(tiles + tile).to(tl.int64)
    dst, src = tl.load(at), tl.load(at + columns)
    run = tl.load(at + 2 * columns) // WIDTH
    dst_pitch, src_pitch = tl.load(at + 3 * columns), tl.load(at + 4 * columns)
    skipped = (tile - tl.load(at + 7 * columns)) * TILE_BYTES
    first = (tl.load(at + 5 * columns) + skipped) // WIDTH
    left = ((tl.load(at + 6 * columns) - skipped) // WIDTH).to(tl.int32)
    row = first // run
    unit = tl.arange(0, TILE_BYTES // WIDTH)
    # Count from this tile's first row in 32 bits, since a 64-bit division is several times slower.
    p = (first - row * run).to(tl.uint32) + unit.to(tl.uint32)
    turn = p // run.to(tl.uint32)
    column = (p - turn * run.to(tl.uint32)).to(tl.int64) * WIDTH
    row += turn.to(tl.int64)
    source, target = src + row * src_pitch + column, dst + row * dst_pitch + column
    if WIDTH == 16:
        word = tl.arange(0, 2)
        mask = tl.broadcast_to((unit < left)[:, None], (TILE_BYTES // WIDTH, 2))
        wide_source = source.to(tl.pointer_type(tl.uint64))[:, None] + word[None, :]
        wide_target = target.to(tl.pointer_type(tl.uint64))[:, None] + word[None, :]
        words = tl.load(tl.multiple_of(wide_source, (16, 16)), mask=mask)
        tl.store(tl.multiple_of(wide_target, (16, 16)), words, mask=mask)
    elif WIDTH == 4:
        single = tl.load(source.to(tl.pointer_type(tl.uint32)), mask=unit < left)
        tl.store(target.to(tl.pointer_type(tl.uint32)), single, mask=unit < left)
    else:
        single = tl.load(source.to(tl.pointer_type(tl.uint8)), mask=unit < left)
        tl.store(target.to(tl.pointer_type(tl.uint8)), single, mask=unit < left)
