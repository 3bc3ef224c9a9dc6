"""Triton kernels that compute the formats over many tensors at once, with the same bits as `quantize`.

The table lists matrices by raw address, and each program handles one tile of a matrix. `fuse` builds the table and
launches the kernels.

    quantise_tiles   block formats: blocks of BLOCK_ROWS x BLOCK_COLS within a tile, or whole rows, read twice
    measure_tiles    the largest magnitude of a whole tensor, for the format with a scale per tensor
    cast_tiles       casts

BF16 is widened by shifting its bits. E4M3 is also rounded in software where the processor cannot round it: before
compute capability 8.9, and in Triton's interpreter, which does not round to even.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

SRC = tl.constexpr(0)
ROW_STRIDE = tl.constexpr(1)
COL_STRIDE = tl.constexpr(2)
ROWS = tl.constexpr(3)
COLS = tl.constexpr(4)
OUT = tl.constexpr(5)
OUT_PITCH = tl.constexpr(6)
SCALES = tl.constexpr(7)
SCALES_PITCH = tl.constexpr(8)
PEAK = tl.constexpr(9)
FIRST_TILE = tl.constexpr(10)

INFINITY_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
TINY_BITS = tl.constexpr(27 << 23)
"""2^-100, as in `quantize`."""


@triton.jit
def _matrix(table: tl.tensor, columns: tl.tensor, tiles: tl.tensor, TILE_COLS: tl.constexpr, STRIP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the entry of this program's matrix, and the row and column of its tile among the matrix's tiles.

    table: int64, column by column, followed by the matrix of each tile.
    """
    tile = tl.program_id(0)
    entry = tl.load(table + tiles + tile)
    number = tile - tl.load(table + FIRST_TILE * columns + entry)
    if STRIP:
        row, col = number, number * 0
    else:
        across = tl.cdiv(tl.load(table + COLS * columns + entry), TILE_COLS)
        row, col = number // across, number % across
    return entry, row, col


@triton.jit
def _place(base: tl.tensor, at: tl.tensor, row_in: tl.tensor, col_in: tl.tensor, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return pointers and mask, with hints that the compiler cannot infer from addresses in a table: sixteen neighbours
    are in one row and are all inside or all outside. The hints are on new values, since hints on arguments are lost."""
    pointer, mask = base + at, row_in & col_in
    if WIDE:
        pointer = tl.max_contiguous(tl.multiple_of(pointer, (1, 16)), (1, 16))
        mask = tl.max_constancy(mask, (1, 16))
    return pointer, mask


@triton.jit
def _floats(
    address: tl.tensor, at: tl.tensor, row_in: tl.tensor, col_in: tl.tensor, SOURCE: tl.constexpr, WIDE: tl.constexpr
) -> tl.tensor:
    """Return the values at these addresses in FP32 (FP64 unchanged), or 0 where masked. SOURCE is the name of the
    dtype."""
    if SOURCE == "BF16":
        pointer, mask = _place(address.to(tl.pointer_type(tl.uint16)), at, row_in, col_in, WIDE)
        values = (tl.load(pointer, mask=mask, other=0).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif SOURCE == "F16":
        pointer, mask = _place(address.to(tl.pointer_type(tl.float16)), at, row_in, col_in, WIDE)
        values = tl.load(pointer, mask=mask, other=0).to(tl.float32)
    elif SOURCE == "F32":
        pointer, mask = _place(address.to(tl.pointer_type(tl.float32)), at, row_in, col_in, WIDE)
        values = tl.load(pointer, mask=mask, other=0)
    else:
        pointer, mask = _place(address.to(tl.pointer_type(tl.float64)), at, row_in, col_in, WIDE)
        values = tl.load(pointer, mask=mask, other=0)
    return values


@triton.jit
def _keep(
    address: tl.tensor, at: tl.tensor, values: tl.tensor, row_in: tl.tensor, col_in: tl.tensor, WIDE: tl.constexpr
) -> None:
    pointer, mask = _place(address.to(tl.pointer_type(values.dtype)), at, row_in, col_in, WIDE)
    tl.store(pointer, values, mask=mask)


@triton.jit
def _magnitude(values: tl.tensor) -> tl.tensor:
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _fp8(values: tl.tensor, MANTISSA: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:
    """Return the codes of numbers within the range, computed from their bits."""
    bits = values.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    shift: tl.constexpr = 23 - MANTISSA
    even = (size >> shift) & 1
    normal = ((size + ((1 << (shift - 1)) - 1) + even) >> shift) - ((127 - BIAS) << MANTISSA)
    # Below the normal numbers a code counts steps of 2^(1 - BIAS - MANTISSA). Adding 2^23, whose last bit is one,
    # rounds to it.
    steps = size.to(tl.float32, bitcast=True) * (1 << (BIAS + MANTISSA - 1)) + 8388608.0
    small = size < ((128 - BIAS) << 23)
    code = tl.where(small, steps.to(tl.uint32, bitcast=True) & 0xFF, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _e4m3(values: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    if NATIVE:  # noqa: SIM108 - Triton has no other form of it
        code = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = _fp8(values, 3, 7)
    return code


@triton.jit
def _e2m1(values: tl.tensor) -> tl.tensor:
    size = tl.abs(values)
    code = (size > 0.25).to(tl.uint8) + (size >= 0.75).to(tl.uint8) + (size > 1.25).to(tl.uint8)
    code += (size >= 1.75).to(tl.uint8) + (size > 2.5).to(tl.uint8) + (size >= 3.5).to(tl.uint8)
    code += (size > 5.0).to(tl.uint8)
    return code | ((values.to(tl.uint32, bitcast=True) >> 28) & 8).to(tl.uint8)


@triton.jit
def _from_e4m3(code: tl.tensor) -> tl.tensor:
    """Return the FP32 values of positive codes that are not NaN."""
    wide = code.to(tl.uint32)
    normal = ((wide << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(wide < 8, wide.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _scaled(peak: tl.tensor, whole: tl.tensor, SCALING: tl.constexpr, BYTES: tl.constexpr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the factor of a block and the bits of its stored scale (uint8 if BYTES, or int32)."""
    bad = peak >= INFINITY_BITS
    finite = tl.where(bad, 0, peak)
    if SCALING == "nv":
        top = tl.div_rn(2688.0, tl.maximum(whole, TINY_BITS).to(tl.float32, bitcast=True))
        code = tl.maximum(_e4m3(top * tl.div_rn(finite.to(tl.float32, bitcast=True), 6.0), NATIVE), 1)
        inverse = tl.div_rn(top, _from_e4m3(code))
        stored = tl.where(bad, 0x7F, code).to(tl.uint8)
    elif SCALING == "amax":
        scale = tl.div_rn(tl.maximum(finite, TINY_BITS).to(tl.float32, bitcast=True), 448.0)
        inverse = tl.div_rn(1.0, scale)
        stored = tl.where(bad, NAN_BITS, scale.to(tl.int32, bitcast=True))
    else:
        if SCALING == "mx":
            exponent = tl.maximum(((finite + (1 << 21)) >> 23) - 8, 0)
        elif SCALING == "mx_floor":
            exponent = tl.maximum((finite >> 23) - 8, 0)
        else:
            scale = tl.div_rn(tl.maximum(finite, TINY_BITS).to(tl.float32, bitcast=True), 448.0)
            exponent = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        if BYTES:  # noqa: SIM108
            stored = tl.where(bad, 0xFF, exponent).to(tl.uint8)
        else:
            stored = tl.where(bad, NAN_BITS, exponent << 23)
    return inverse, stored


@triton.jit(do_not_specialize=["columns", "tiles"])
def quantise_tiles(
    table: tl.tensor,
    columns: tl.tensor,
    tiles: tl.tensor,
    SOURCE: tl.constexpr,
    SCALING: tl.constexpr,
    BYTES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    STRIP: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """Quantise a tile in blocks. With STRIP, each row of the tile is one block, as long as a row of the matrix.

    With WIDE, source, codes and columns are aligned to 16 bytes, and neighbours in a row are neighbours in memory.
    """
    entry, tile_row, tile_col = _matrix(table, columns, tiles, TILE_COLS, STRIP)
    rows = tl.load(table + ROWS * columns + entry)
    cols = tl.load(table + COLS * columns + entry)
    row = tile_row * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    col = tile_col * TILE_COLS + tl.arange(0, TILE_COLS)[None, :]
    src = tl.load(table + SRC * columns + entry)
    out = tl.load(table + OUT * columns + entry)
    row_stride = tl.load(table + ROW_STRIDE * columns + entry)
    out_pitch = tl.load(table + OUT_PITCH * columns + entry)
    scales = tl.load(table + SCALES * columns + entry)
    scales_pitch = tl.load(table + SCALES_PITCH * columns + entry)
    col_stride = tl.load(table + COL_STRIDE * columns + entry)
    if STRIP:
        peak = tl.zeros([TILE_ROWS], tl.int32)
        start = cols * 0
        while start < cols:
            values = _floats(
                src, row * row_stride + (col + start) * col_stride, row < rows, col + start < cols, SOURCE, WIDE
            )
            peak = tl.maximum(peak, tl.max(_magnitude(values), axis=1))
            start += TILE_COLS
        inverse, stored = _scaled(peak, peak, SCALING, BYTES, NATIVE)
        bits = tl.where(peak[:, None] >= INFINITY_BITS, 0x7F, 0).to(tl.uint8)
        start = cols * 0
        while start < cols:
            values = _floats(
                src, row * row_stride + (col + start) * col_stride, row < rows, col + start < cols, SOURCE, WIDE
            )
            codes = tl.where(bits != 0, bits, _e4m3(values * inverse[:, None], NATIVE))
            _keep(out, row * out_pitch + col + start, codes, row < rows, col + start < cols, WIDE)
            start += TILE_COLS
        at = tile_row * TILE_ROWS + tl.arange(0, TILE_ROWS)
        tl.store(scales.to(tl.pointer_type(tl.int32)) + at * scales_pitch, stored, mask=at < rows)
    else:
        values = _floats(src, row * row_stride + col * col_stride, row < rows, col < cols, SOURCE, WIDE)
        down: tl.constexpr = TILE_ROWS // BLOCK_ROWS
        across: tl.constexpr = TILE_COLS // BLOCK_COLS
        blocks = tl.reshape(values, (down, BLOCK_ROWS, across, BLOCK_COLS))
        peak = tl.max(tl.max(_magnitude(blocks), axis=3), axis=1)
        whole = peak
        if SCALING == "nv":
            peak_at = tl.load(table + PEAK * columns + entry)
            whole = tl.load(peak_at.to(tl.pointer_type(tl.int32))) & 0x7FFFFFFF
            peak = tl.where(whole >= INFINITY_BITS, whole, peak)
        inverse, stored = _scaled(peak, whole, SCALING, BYTES, NATIVE)
        scaled = blocks * inverse[:, None, :, None]
        bad = (peak >= INFINITY_BITS)[:, None, :, None]
        down_at = tile_row * down + tl.arange(0, down)[:, None]
        across_at = tile_col * across + tl.arange(0, across)[None, :]
        is_inside = (down_at < tl.cdiv(rows, BLOCK_ROWS)) & (across_at < tl.cdiv(cols, BLOCK_COLS))
        scale_at = down_at * scales_pitch + across_at
        if BYTES:
            tl.store(scales.to(tl.pointer_type(tl.uint8)) + scale_at, stored, mask=is_inside)
        else:
            tl.store(scales.to(tl.pointer_type(tl.int32)) + scale_at, stored, mask=is_inside)
        if SCALING == "nv":
            codes = tl.where(bad, 0, _e2m1(scaled)).to(tl.uint8)
            low, high = tl.split(tl.reshape(codes, (TILE_ROWS, TILE_COLS // 2, 2)))
            pair = tile_col * (TILE_COLS // 2) + tl.arange(0, TILE_COLS // 2)[None, :]
            _keep(out, row * out_pitch + pair, low | (high << 4), row < rows, pair < cols // 2, WIDE)
        else:
            codes = tl.where(bad, 0x7F, _e4m3(scaled, NATIVE)).to(tl.uint8)
            _keep(out, row * out_pitch + col, tl.reshape(codes, (TILE_ROWS, TILE_COLS)), row < rows, col < cols, WIDE)


@triton.jit(do_not_specialize=["columns", "tiles"])
def measure_tiles(
    table: tl.tensor,
    columns: tl.tensor,
    tiles: tl.tensor,
    SOURCE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Take the largest magnitude of each matrix into its PEAK, as the bits of an FP32. PEAK must start as 0."""
    entry, tile_row, tile_col = _matrix(table, columns, tiles, TILE_COLS, False)
    rows = tl.load(table + ROWS * columns + entry)
    cols = tl.load(table + COLS * columns + entry)
    row = tile_row * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    col = tile_col * TILE_COLS + tl.arange(0, TILE_COLS)[None, :]
    src = tl.load(table + SRC * columns + entry)
    row_stride = tl.load(table + ROW_STRIDE * columns + entry)
    col_stride = tl.load(table + COL_STRIDE * columns + entry)
    values = _floats(src, row * row_stride + col * col_stride, row < rows, col < cols, SOURCE, WIDE)
    peak = tl.max(tl.max(_magnitude(values), axis=1), axis=0)
    tl.atomic_max(tl.load(table + PEAK * columns + entry).to(tl.pointer_type(tl.int32)), peak)


@triton.jit(do_not_specialize=["columns", "tiles"])
def cast_tiles(
    table: tl.tensor,
    columns: tl.tensor,
    tiles: tl.tensor,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Cast each value. TARGET is the name of the dtype, and OUT_PITCH is in elements."""
    entry, tile_row, tile_col = _matrix(table, columns, tiles, TILE_COLS, False)
    rows = tl.load(table + ROWS * columns + entry)
    cols = tl.load(table + COLS * columns + entry)
    row = tile_row * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    col = tile_col * TILE_COLS + tl.arange(0, TILE_COLS)[None, :]
    src = tl.load(table + SRC * columns + entry)
    out = tl.load(table + OUT * columns + entry)
    row_stride = tl.load(table + ROW_STRIDE * columns + entry)
    out_pitch = tl.load(table + OUT_PITCH * columns + entry)
    col_stride = tl.load(table + COL_STRIDE * columns + entry)
    values = _floats(src, row * row_stride + col * col_stride, row < rows, col < cols, SOURCE, WIDE)
    at = row * out_pitch + col
    if TARGET == "F64":
        wide = values.to(tl.float64)
        bits64 = tl.where(wide != wide, 0x7FF8000000000000, wide.to(tl.int64, bitcast=True))
        _keep(out, at, bits64, row < rows, col < cols, WIDE)
    else:
        values = values.to(tl.float32)
        lost = values != values
        bits = values.to(tl.uint32, bitcast=True)
        endless = (bits & 0x7FFFFFFF) == INFINITY_BITS
        if TARGET == "F32":
            _keep(out, at, tl.where(lost, NAN_BITS, bits).to(tl.uint32), row < rows, col < cols, WIDE)
        elif TARGET == "BF16":
            half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            _keep(out, at, tl.where(lost, 0x7FC0, half).to(tl.uint16), row < rows, col < cols, WIDE)
        elif TARGET == "F16":
            half = values.to(tl.float16).to(tl.uint16, bitcast=True)
            _keep(out, at, tl.where(lost, 0x7E00, half).to(tl.uint16), row < rows, col < cols, WIDE)
        elif TARGET == "F8_E4M3":
            code = _fp8(tl.minimum(tl.maximum(values, -448.0), 448.0), 3, 7)
            _keep(out, at, tl.where(lost | endless, 0x7F, code).to(tl.uint8), row < rows, col < cols, WIDE)
        else:
            code = _fp8(tl.minimum(tl.maximum(values, -57344.0), 57344.0), 2, 15)
            code = tl.where(endless, ((bits >> 24) & 0x80) | 0x7C, code.to(tl.uint32))
            _keep(out, at, tl.where(lost, 0x7F, code).to(tl.uint8), row < rows, col < cols, WIDE)
