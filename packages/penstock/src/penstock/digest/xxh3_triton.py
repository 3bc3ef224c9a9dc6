"""XXH3-64 (seed 0, default secret) as three Triton kernels, with the bits of `xxhash.xxh3_64_intdigest`.

    leaf > 240 bytes   1024-byte blocks --block_sums (parallel, reads all bytes)--> 64 bytes a block
                       --finish_leaves (serial over blocks, 8 lanes a leaf)--> digest
    leaf <= 240 bytes  --short_leaves (a thread a leaf)--> digest

Only the scramble between two blocks is serial. The numbers that a block adds to the eight accumulators do not depend on
the accumulators' values. So the length of a leaf limits parallelism only in `finish_leaves`, which reads 1/16 of the
bytes. `digest.cuda` builds the tables and launches the kernels.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from penstock.digest import xxh3_constants

BLOCK_BYTES = tl.constexpr(xxh3_constants.BLOCK_BYTES)

# Multipliers and finishers, without unit. Source: XXH3 spec, "Final mixing step", "XXH3 algorithm (small inputs)".
PRIME32_1 = tl.constexpr(0x9E3779B1)
PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
PRIME64_2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
PRIME64_3 = tl.constexpr(0x165667B19E3779F9)
AVALANCHE = tl.constexpr(0x165667919E3779F9)
RRMXMX = tl.constexpr(0x9FB21C651E98DF25)

SHORT_BYTES = tl.constexpr(xxh3_constants.SHORT_BYTES)
INIT_AT = tl.constexpr(xxh3_constants.INIT_AT)
KEYS_AT = tl.constexpr(xxh3_constants.KEYS_AT)


@triton.jit
def _pointer(address: tl.tensor) -> tl.tensor:
    return address.to(tl.pointer_type(tl.uint64))


@triton.jit
def _word(address: tl.tensor, num_bytes: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Return `num_bytes` (1..8) from any address in the low bytes. Load only the aligned words that contain them."""
    shift = ((address & 7) * 8).to(tl.uint64)
    low = tl.load(_pointer(address & -8), mask=mask, other=0)
    high = tl.load(_pointer((address + num_bytes - 1) & -8), mask=mask, other=0)
    return (low >> shift) | ((high << 1) << (63 - shift))


@triton.jit
def _low_times_high(key: tl.tensor) -> tl.tensor:
    return key.to(tl.uint32).to(tl.uint64) * (key >> 32).to(tl.uint32).to(tl.uint64)


@triton.jit
def _fold(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return the low half XOR the high half of the 128-bit product."""
    return (a * b) ^ tl.umulhi(a, b)


@triton.jit
def _avalanche(h: tl.tensor) -> tl.tensor:
    h = (h ^ (h >> 37)) * AVALANCHE
    return h ^ (h >> 32)


@triton.jit
def _load_u64(address: tl.tensor, at: tl.tensor, mask: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    """Load uint64 values `at` from `address`, by one load if the address is a multiple of 16, or by two and a shift.

    One load reads its bytes once. It evicts them first, which leaves the L2 cache to the sums. Two loads share bytes in
    L1.
    """
    if ALIGNED:
        source = tl.multiple_of(_pointer(address) + at, (16, 16))
        return tl.load(source, mask=mask, other=0, eviction_policy="evict_first")
    shift = ((address & 7) * 8).to(tl.uint64)
    low = tl.load(_pointer(address & -8) + at, mask=mask, other=0)
    high = tl.load(_pointer((address + 7) & -8) + at, mask=mask, other=0)
    return (low >> shift) | ((high << 1) << (63 - shift))


@triton.jit(do_not_specialize=["columns", "first_leaf", "tiles"])
def block_sums(
    table: tl.tensor,
    columns: tl.tensor,
    constants: tl.tensor,
    first_leaf: tl.tensor,
    tiles: tl.tensor,
    sums: tl.tensor,
    TILE_BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    """Compute the sums that each 1024-byte block adds to the accumulators. A program handles TILE_BLOCKS blocks of a
    leaf.

    table: int64 columns address and nbytes, each `columns` long.

    tiles: number of tiles of each leaf in this launch. Tiles after a leaf's last block and tiles of short leaves do
    nothing.

    sums: uint64 [num_leaves * tiles * TILE_BLOCKS, 8]. Rows after a leaf's last block are not written.

    ALIGNED: every address is a multiple of 16. RUN: stripes per load, a power of two up to 16.
    """
    tile = tl.program_id(0)
    leaf = first_leaf + tile // tiles
    nbytes = tl.load(table + columns + leaf)
    first_block = (tile % tiles).to(tl.int64) * TILE_BLOCKS
    if (first_block > (nbytes - 1) // BLOCK_BYTES) | (nbytes <= SHORT_BYTES):
        return
    address = tl.load(table + leaf) + first_block * BLOCK_BYTES

    # A load reads RUN stripes of each block, 16 bytes per thread, so that a warp reads whole lines. Even and odd lanes
    # are separate, since each lane also adds its neighbour's words.
    block = tl.arange(0, TILE_BLOCKS)
    word = tl.arange(0, 8 * RUN)
    at = block[:, None] * 128 + word[None, :]
    # The last stripe of a leaf has a different key, even if it is whole. finish_leaves handles it.
    num_stripes = (nbytes - 1) // 64 - (first_block + block) * 16
    even_sum = tl.zeros((TILE_BLOCKS, RUN, 4), dtype=tl.uint64)
    odd_sum = even_sum
    for stripe in tl.static_range(0, 16, RUN):
        inside = stripe + word[None, :] // 8 < num_stripes[:, None]
        data = _load_u64(address + stripe * 64, at, inside, ALIGNED)
        product = _low_times_high(data ^ tl.load(constants + KEYS_AT + stripe * 8 + word)[None, :])
        even, odd = tl.split(tl.reshape(tl.where(inside, data, 0), (TILE_BLOCKS, RUN, 4, 2)))
        even_product, odd_product = tl.split(tl.reshape(tl.where(inside, product, 0), (TILE_BLOCKS, RUN, 4, 2)))
        even_sum += odd + even_product
        odd_sum += even + odd_product
    total = tl.join(tl.sum(even_sum, axis=1), tl.sum(odd_sum, axis=1))
    row = tile.to(tl.int64) * TILE_BLOCKS + block
    used = (block <= (nbytes - 1) // BLOCK_BYTES - first_block)[:, None]
    lane = tl.arange(0, 8)[None, :]
    tl.store(sums + row[:, None] * 8 + lane, tl.reshape(total, (TILE_BLOCKS, 8)), mask=used)


@triton.jit
def _rows(source: tl.tensor, start: tl.tensor, stop: tl.tensor, ROWS: tl.constexpr) -> tl.tuple:
    """Return ROWS rows of eight words from row `start`, with 0 from row `stop`."""
    rows = ()
    for step in tl.static_range(ROWS):
        row = tl.load(source + (start + step) * 8, mask=(start + step < stop)[:, None], other=0)
        rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no unpacking
    return rows


@triton.jit(do_not_specialize=["columns", "first_leaf", "stop_leaf", "tiles"])
def finish_leaves(
    table: tl.tensor,
    columns: tl.tensor,
    constants: tl.tensor,
    first_leaf: tl.tensor,
    stop_leaf: tl.tensor,
    tiles: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    TILE_BLOCKS: tl.constexpr,
    LEAVES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """Chain the block sums of LEAVES leaves through the scramble, add the last stripe of each, and merge.

    table: int64 columns address, nbytes and row of `out`, each `columns` long.

    tiles, sums: the same as in `block_sums`.

    out: int64 [num_leaves]. Rows of short leaves are not written.
    """
    place = tl.program_id(0).to(tl.int64) * LEAVES + tl.arange(0, LEAVES)
    leaf = first_leaf + place
    live = leaf < stop_leaf
    nbytes = tl.load(table + columns + leaf, mask=live, other=1)
    live &= nbytes > SHORT_BYTES
    nbytes = tl.where(live, nbytes, 1)
    address = tl.load(table + leaf, mask=live, other=0)
    row = tl.where(live, place, 0) * tiles * TILE_BLOCKS
    num_scrambles = ((nbytes - 1) // BLOCK_BYTES).to(tl.int32)

    lane = tl.arange(0, 8)[None, :]
    source = sums + row[:, None] * 8 + lane
    scramble = tl.load(constants + 128 + lane * 8)
    acc = tl.broadcast_to(tl.load(constants + INIT_AT + lane), (LEAVES, 8))
    last = tl.max(num_scrambles, axis=0)
    ahead = _rows(source, 0, num_scrambles, UNROLL)
    start = 0
    while start < last:
        rows = ahead
        ahead = _rows(source, start + UNROLL, num_scrambles, UNROLL)
        for step in tl.static_range(UNROLL):
            mixed = acc + rows[step]
            mixed = (mixed ^ (mixed >> 47) ^ scramble) * PRIME32_1
            acc = tl.where((start + step < num_scrambles)[:, None], mixed, acc)
        start += UNROLL
    acc += tl.load(source + num_scrambles[:, None] * 8, mask=live[:, None], other=0)

    # The last stripe is the last 64 bytes, with any alignment. Each word is read for its lane and for the neighbouring
    # lane.
    end = (address + nbytes - 64)[:, None]
    mask = tl.broadcast_to(live[:, None], (LEAVES, 8))
    acc += _word(end + (lane ^ 1) * 8, 8, mask)
    acc += _low_times_high(_word(end + lane * 8, 8, mask) ^ tl.load(constants + 121 + lane * 8))

    acc ^= tl.load(constants + 11 + lane * 8)
    even, odd = tl.split(tl.reshape(acc, (LEAVES, 4, 2)))
    total = nbytes.to(tl.uint64) * PRIME64_1 + tl.sum(_fold(even, odd), axis=1)
    at = tl.load(table + 2 * columns + leaf, mask=live, other=0)
    tl.store(out + at, _avalanche(total).to(tl.int64, bitcast=True), mask=live)


@triton.jit
def _mix16(address: tl.tensor, constants: tl.tensor, secret: tl.constexpr, mask: tl.tensor) -> tl.tensor:
    """Return 16 bytes folded with 16 bytes of the secret from byte `secret`, or 0 where masked."""
    low = _word(address, 8, mask) ^ tl.load(constants + secret)
    high = _word(address + 8, 8, mask) ^ tl.load(constants + secret + 8)
    return tl.where(mask, _fold(low, high), 0)


@triton.jit
def _up_to_16(address: tl.tensor, n: tl.tensor, constants: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Return the digest of 1 to 16 bytes. For other lengths the result is undefined."""
    length = n.to(tl.uint64)
    # For 1 to 3 bytes, use the first, middle and last byte and the length.
    is_3 = live & (n <= 3)
    first = _word(address, 1, is_3) & 0xFF
    middle = _word(address + (n >> 1), 1, is_3) & 0xFF
    final = _word(address + n - 1, 1, is_3) & 0xFF
    h = (first << 16) | (middle << 24) | final | (length << 8)
    flip = tl.load(constants)
    h ^= (flip ^ (flip >> 32)) & 0xFFFFFFFF
    h = (h ^ (h >> 33)) * PRIME64_2
    h = (h ^ (h >> 29)) * PRIME64_3
    h3 = h ^ (h >> 32)
    # For 4 to 8 bytes, use two overlapping 32-bit words.
    is_8 = live & (n >= 4) & (n <= 8)
    h = (_word(address + n - 4, 4, is_8) & 0xFFFFFFFF) + (_word(address, 4, is_8) << 32)
    h ^= tl.load(constants + 8) ^ tl.load(constants + 16)
    h ^= ((h << 49) | (h >> 15)) ^ ((h << 24) | (h >> 40))
    h *= RRMXMX
    h ^= (h >> 35) + length
    h *= RRMXMX
    h8 = h ^ (h >> 28)
    # For 9 to 16 bytes, use two overlapping 64-bit words.
    is_16 = live & (n >= 9) & (n <= 16)
    low = _word(address, 8, is_16) ^ tl.load(constants + 24) ^ tl.load(constants + 32)
    high = _word(address + n - 8, 8, is_16) ^ tl.load(constants + 40) ^ tl.load(constants + 48)
    swapped = ((low & 0x00FF00FF00FF00FF) << 8) | ((low >> 8) & 0x00FF00FF00FF00FF)
    swapped = ((swapped & 0x0000FFFF0000FFFF) << 16) | ((swapped >> 16) & 0x0000FFFF0000FFFF)
    swapped = (swapped << 32) | (swapped >> 32)
    h16 = _avalanche(length + swapped + high + _fold(low, high))
    return tl.where(n <= 3, h3, tl.where(n <= 8, h8, h16))


@triton.jit
def _up_to_240(address: tl.tensor, n: tl.tensor, constants: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Return the digest of 17 to 240 bytes. For other lengths the result is undefined."""
    is_128 = live & (n > 16) & (n <= 128)
    is_240 = live & (n > 128)
    near = n.to(tl.uint64) * PRIME64_1
    far = near
    for i in tl.static_range(4):  # 17 to 128: pairs of 16 bytes, inwards from both ends.
        mask = is_128 & (n > 32 * i)
        near += _mix16(address + 16 * i, constants, 32 * i, mask)
        near += _mix16(address + n - 16 * (i + 1), constants, 32 * i + 16, mask)
    for i in tl.static_range(8):  # 129 to 240: eight runs of 16 bytes, ...
        far += _mix16(address + 16 * i, constants, 16 * i, is_240)
    far = _avalanche(far)
    for i in tl.static_range(7):  # ... then the whole runs left, ...
        far += _mix16(address + 16 * (i + 8), constants, 16 * i + 3, is_240 & (n >= 16 * (i + 9)))
    far += _mix16(address + n - 16, constants, 119, is_240)  # ... and the last 16 bytes.
    return _avalanche(tl.where(n <= 128, near, far))


@triton.jit(do_not_specialize=["columns", "first_leaf", "stop_leaf"])
def short_leaves(
    table: tl.tensor,
    columns: tl.tensor,
    constants: tl.tensor,
    first_leaf: tl.tensor,
    stop_leaf: tl.tensor,
    out: tl.tensor,
    LEAVES: tl.constexpr,
) -> None:
    """Digest leaves of 1 to 240 bytes, one per thread, and skip longer leaves. `table` and `out` are those of
    `finish_leaves`."""
    leaf = first_leaf + tl.program_id(0).to(tl.int64) * LEAVES + tl.arange(0, LEAVES)
    live = leaf < stop_leaf
    n = tl.load(table + columns + leaf, mask=live, other=1)
    live &= n <= SHORT_BYTES
    n = tl.where(live, n, 1)
    address = tl.load(table + leaf, mask=live, other=0)
    at = tl.load(table + 2 * columns + leaf, mask=live, other=0)
    digest = _up_to_16(address, n, constants, live)
    if tl.max(n, axis=0) > 16:
        digest = tl.where(n <= 16, digest, _up_to_240(address, n, constants, live))
    tl.store(out + at, digest.to(tl.int64, bitcast=True), mask=live)
