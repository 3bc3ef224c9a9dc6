"""XXH3-64 digests of leaves and strips in device memory at memory speed, bit-identical to the CPU's digests.

Leaves and contiguous strips are digested in place. Strips with gaps are packed into scratch, a slab at a time. The
kernels are in `digest.xxh3_triton`, and the references on the CPU in `digest.leaf` and `digest.strip`.
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np
import torch

from penstock.cuda.kernel_cache import Launch, device_context
from penstock.cuda.pack import PackTable, plan_pack
from penstock.digest import xxh3_constants
from penstock.digest.leaf import LEAF_BYTES, num_leaves
from penstock.digest.strip import Strips
from penstock.types import I64, MIB
from penstock.waits import Threads

_KERNELS = "penstock.digest.xxh3_triton"
_BLOCK_BYTES = xxh3_constants.BLOCK_BYTES


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """Launch parameters, which do not affect the digests. Source: benchmarks/results/h100_202611/digest.md."""

    tile_blocks: int = 8
    """Number of 1024-byte blocks that a program of the parallel pass reads. It must be a power of two."""
    tile_warps: int = 1
    """Warps per program of the parallel pass. With 8 blocks each, a thread keeps sixteen 16-byte loads in flight."""
    run_stripes: int = 8
    """Stripes of 64 bytes that one load reads from a block of an aligned leaf: 512 contiguous bytes per warp."""
    finish_leaves: int = 4
    """Number of leaves that a program of the serial pass chains. Four leaves with 8 lanes fill its one warp."""
    finish_unroll: int = 16
    """Number of blocks whose sums the serial pass loads ahead."""
    slab_blocks: int = 1024 * 1024
    """Blocks per slab: 1 GiB of equally long leaves, with 64 MiB of sums. Slabs of 256 MiB, whose sums fit the L2
    cache (50 MB), are not faster and need four times the launches."""
    short_warps: int = 4
    """Warps per program of the short kernel, which handles one leaf per thread."""


DEFAULT_TUNING = Tuning()


class _Slab(msgspec.Struct, frozen=True, kw_only=True):
    """Leaves whose block sums are computed by one launch and used by the next launch."""

    first_leaf: int
    stop_leaf: int
    tiles: int
    """Number of tiles for each leaf, determined by the longest leaf in the slab."""
    aligned: bool

    @property
    def num_tiles(self) -> int:
        return (self.stop_leaf - self.first_leaf) * self.tiles


class LeafTable(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Leaves laid out for the kernels, whose memory the caller must keep until every digest is done."""

    device: torch.device
    num_leaves: int
    kernels: _Kernels
    slabs: tuple[_Slab, ...]
    first_short: int
    """First leaf that uses the short algorithms, or `num_leaves`."""
    num_sums: int
    """Number of rows of sums that the largest slab needs."""

    def digest(self, *, out: torch.Tensor | None = None, sums: torch.Tensor | None = None) -> torch.Tensor:
        """Digest the current bytes of every leaf. Not thread-safe.

        The digests are queued on the device's current stream, which must be the planning stream or wait for it.

        Args:
            out: [num_leaves] int64 on the table's device, contiguous, with a row for each value of `into`.
            sums: scratch, uint64 [at least num_sums, 8], which earlier and later digests of the stream may share.

        Returns:
            [num_leaves] int64: the uint64 bits of each leaf's XXH3-64, in the order of the planned rows.
        """
        if out is None:
            out = torch.empty(self.num_leaves, dtype=torch.int64, device=self.device)
        if self.num_leaves == 0:
            return out
        # All slabs share one scratch, since the launches of a stream run in order.
        if sums is None:
            sums = _scratch(self.num_sums, self.device)
        with device_context(self.device):
            for slab in self.slabs:
                self.kernels.run_slab(slab, sums, out)
            if self.first_short < self.num_leaves:
                self.kernels.run_short(self.first_short, self.num_leaves, out)
        return out


def plan_leaves(
    addresses: I64, nbytes: I64, device: torch.device, *, into: I64 | None = None, tuning: Tuning = DEFAULT_TUNING
) -> LeafTable:
    """Lay out leaves for the kernels, without synchronisation. Raises ValueError for malformed columns.

    Args:
        addresses: [num_leaves] address of each leaf in the memory of `device`, best aligned to 16 bytes.
        nbytes: [num_leaves] size of each leaf in bytes, at least 1.
        device: CUDA device. The CPU works only under Triton's interpreter.
        into: [num_leaves] row of each leaf's digest in `digest(out=...)`. If `into` is None, leaf i uses row i.
    """
    _require_columns(addresses, nbytes)
    num_leaves = len(nbytes)
    rows = np.arange(num_leaves) if into is None else into
    # All leaves of a launch use the same code: 16-byte loads if aligned, and separate algorithms for short leaves.
    kind = np.where(nbytes > xxh3_constants.SHORT_BYTES, addresses & 15 != 0, _SHORT)
    tiles = -(-nbytes // (tuning.tile_blocks * _BLOCK_BYTES))
    # All leaves of a slab get the same number of tiles, so also sort by length if lengths differ widely.
    if kind.any() or num_leaves * tiles.max(initial=0) > 2 * tiles.sum():
        order = np.lexsort((tiles, kind))
        addresses, nbytes, rows = addresses[order], nbytes[order], rows[order]
        kind, tiles = kind[order], tiles[order]
    first_unaligned, first_short = np.searchsorted(kind, [1, _SHORT]).tolist()
    slab_tiles = tuning.slab_blocks // tuning.tile_blocks
    slabs = (
        *_slabs(tiles, 0, first_unaligned, True, slab_tiles),
        *_slabs(tiles, first_unaligned, first_short, False, slab_tiles),
    )

    return LeafTable(
        device=device,
        num_leaves=num_leaves,
        kernels=_kernels(_columns(addresses, nbytes, rows, device), tuning),
        slabs=slabs,
        first_short=first_short,
        num_sums=max((slab.num_tiles for slab in slabs), default=0) * tuning.tile_blocks,
    )


class OrderedLeaves:
    """Leaves laid out in their original order, so that ranges can be digested while other leaves are filled.

    Digesting a range takes a few kernel launches and no planning. To digest all leaves at once, use the faster
    `plan_leaves`, which also documents the arguments and errors. The scratch is 1/16 of the longest slab, at most
    64 MiB unless a single leaf needs more. The caller must keep the memory of the leaves until every digest is done.
    """

    def __init__(self, addresses: I64, nbytes: I64, device: torch.device, *, tuning: Tuning = DEFAULT_TUNING) -> None:
        _require_columns(addresses, nbytes)
        self.device = device
        self.num_leaves = len(nbytes)
        self._kernels = _kernels(_columns(addresses, nbytes, np.arange(self.num_leaves), device), tuning)
        self._tiles: I64 = -(-nbytes // (tuning.tile_blocks * _BLOCK_BYTES))
        self._slab_tiles = tuning.slab_blocks // tuning.tile_blocks
        is_short, is_aligned = nbytes <= xxh3_constants.SHORT_BYTES, addresses & 15 == 0
        self._short = np.flatnonzero(is_short)
        self._aligned, self._unaligned = np.flatnonzero(~is_short & is_aligned), np.flatnonzero(~is_short & ~is_aligned)
        most = int(self._tiles.max(initial=0))
        num_tiles = max(most, min(self._slab_tiles, most * self.num_leaves))
        self._sums = _scratch(num_tiles * tuning.tile_blocks, device)

    def digest(self, first: int, stop: int, *, out: torch.Tensor) -> None:
        """Digest the leaves `[first, stop)` into their rows of `out`, [num_leaves] int64. Not thread-safe.

        The digests are queued on the current stream, which must be the stream of the previous call or wait for it.
        """
        with device_context(self.device):
            for slab in _slabs(self._tiles, first, stop, True, self._slab_tiles):
                if _has(self._unaligned, slab.first_leaf, slab.stop_leaf):
                    slab = msgspec.structs.replace(slab, aligned=False)
                self._kernels.run_slab(slab, self._sums, out)
            if _has(self._short, first, stop):
                self._kernels.run_short(first, stop, out)

    def warm_up(self, *, out: torch.Tensor) -> None:
        """Compile or load the kernels that these leaves need, by digesting one leaf of each kind into `out`."""
        for leaves in (self._aligned, self._unaligned, self._short):
            for leaf in leaves[:1].tolist():
                self.digest(leaf, leaf + 1, out=out)


def _has(leaves: I64, first: int, stop: int) -> bool:
    """Return whether any index in `leaves`, which are in ascending order, is in `[first, stop)`."""
    return len(leaves) > 0 and bool(np.searchsorted(leaves, first) < np.searchsorted(leaves, stop))


def _scratch(num_sums: int, device: torch.device) -> torch.Tensor:
    return torch.empty((num_sums, 8), dtype=torch.uint64, device=device)


def _require_columns(addresses: I64, nbytes: I64) -> None:
    if addresses.shape != nbytes.shape or addresses.ndim != 1:
        raise ValueError(f"addresses {addresses.shape} and nbytes {nbytes.shape} are not columns of one table")
    if nbytes.size and int(nbytes.min()) < 1:
        raise ValueError(f"leaf {int(nbytes.argmin())} is empty, but a digest needs at least one byte")


def _columns(addresses: I64, nbytes: I64, rows: I64, device: torch.device) -> torch.Tensor:
    """Return the kernels' table, int64 [3, num_leaves], whose copy to the device is queued."""
    # A copy from pageable memory would make the call wait for the device.
    host = torch.empty((3, len(nbytes)), dtype=torch.int64, pin_memory=device.type == "cuda")
    host.numpy()[:] = addresses, nbytes, rows
    return host.to(device, non_blocking=True)


_SHORT = 2
"""Kind of the leaves for the short kernel. Aligned leaves have kind 0 and other leaves kind 1."""


class _Kernels(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    tuning: Tuning
    add_blocks: tuple[Launch, Launch]
    """Parallel pass over leaves at any address, and over aligned leaves."""
    finish: Launch
    short: Launch

    def run_slab(self, slab: _Slab, sums: torch.Tensor, out: torch.Tensor) -> None:
        self.add_blocks[slab.aligned].run(slab.first_leaf, slab.tiles, sums, num_programs=slab.num_tiles)
        num_programs = -(-(slab.stop_leaf - slab.first_leaf) // self.tuning.finish_leaves)
        self.finish.run(slab.first_leaf, slab.stop_leaf, slab.tiles, sums, out, num_programs=num_programs)

    def run_short(self, first_leaf: int, stop_leaf: int, out: torch.Tensor) -> None:
        num_programs = -(-(stop_leaf - first_leaf) // (32 * self.tuning.short_warps))
        self.short.run(first_leaf, stop_leaf, out, num_programs=num_programs)


def _kernels(columns: torch.Tensor, tuning: Tuning) -> _Kernels:
    arguments = (columns, columns.shape[1], _constants(columns.device))

    def launch(name: str, constants: dict[str, int | str], num_warps: int = 1) -> Launch:
        return Launch(_KERNELS, name, 0, arguments, constants, num_warps=num_warps)

    tile = {"TILE_BLOCKS": tuning.tile_blocks}
    return _Kernels(
        tuning=tuning,
        add_blocks=(
            launch("block_sums", {**tile, "ALIGNED": False, "RUN": 1}, tuning.tile_warps),
            launch("block_sums", {**tile, "ALIGNED": True, "RUN": tuning.run_stripes}, tuning.tile_warps),
        ),
        finish=launch("finish_leaves", {**tile, "LEAVES": tuning.finish_leaves, "UNROLL": tuning.finish_unroll}),
        short=launch("short_leaves", {"LEAVES": 32 * tuning.short_warps}, tuning.short_warps),
    )


def _slabs(tiles: I64, first_leaf: int, stop_leaf: int, aligned: bool, slab_tiles: int) -> list[_Slab]:
    """Split leaves into slabs of up to `slab_tiles` tiles or one leaf. All leaves of a slab get equally many tiles."""
    slabs = []
    while first_leaf < stop_leaf:
        # At most this many leaves fit in the slab. All of them fit if no leaf is longer than the first leaf.
        stop = min(stop_leaf, first_leaf + max(1, slab_tiles // int(tiles[first_leaf])))
        candidates = tiles[first_leaf:stop]
        max_tiles = int(candidates.max())
        if max_tiles > candidates[0]:
            longest = np.maximum.accumulate(candidates)
            fits = np.searchsorted(longest * np.arange(1, len(longest) + 1), slab_tiles, side="right")
            # The serial pass needs all sums of a leaf at once, so a leaf may exceed `slab_tiles`.
            stop = first_leaf + max(1, int(fits))
            max_tiles = int(longest[stop - first_leaf - 1])
        slabs.append(_Slab(first_leaf=first_leaf, stop_leaf=stop, tiles=max_tiles, aligned=aligned))
        first_leaf = stop
    return slabs


@functools.lru_cache(maxsize=64)
def _constants(device: torch.device) -> torch.Tensor:
    # Use another thread, since an engine may remove the memory that its loading thread allocates.
    with Threads(1, "penstock-constants") as pool:
        return pool.submit(lambda: torch.from_numpy(xxh3_constants.constants()).to(device)).result()


def leaf_digests_cuda(addresses: I64, nbytes: I64, device: torch.device) -> torch.Tensor:
    """Return the XXH3-64 of each leaf, [num_leaves] int64 on `device`, asynchronously on its current stream.

    The memory of the leaves must stay unchanged until the stream has finished this work.
    """
    return plan_leaves(addresses, nbytes, device).digest()


def warm_up(device: torch.device) -> None:
    """Compile the kernels for `device` or read them from a cache, which takes seconds once per process. Thread-safe."""
    data = torch.zeros(2048, dtype=torch.uint8, device=device)
    at = data.data_ptr()
    plan_leaves(np.array([at, at + 1, at]), np.array([1024, 1024, 4]), device).digest()


SCRATCH_BYTES = 256 * MIB
"""Scratch into which strips with gaps are packed, enough for leaves that fill a device several times."""


class StripTable(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Strips laid out for the kernels, with memory for their digests."""

    leaves: torch.Tensor
    """Digests of every strip, then of the leaves of strips with several leaves."""
    num_strips: int
    whole: LeafTable
    slabs: tuple[tuple[PackTable, LeafTable], ...]
    tops: LeafTable
    """Strips of several leaves, digested over the digests of their leaves."""
    scratch: torch.Tensor

    def digest(self) -> torch.Tensor:
        """Return [num_strips] int64 on the device: the digests' uint64 bits, which the next call overwrites.

        The digests are queued on the device's current stream, which must be the planning stream.
        """
        # Each torch call releases the GIL, and reacquiring it takes up to a millisecond.
        tables = (self.whole, *(leaves for _, leaves in self.slabs), self.tops)
        sums = _scratch(max(table.num_sums for table in tables), self.leaves.device)
        self.whole.digest(out=self.leaves, sums=sums)
        for pack, leaves in self.slabs:
            pack.run()
            leaves.digest(out=self.leaves, sums=sums)
        self.tops.digest(out=self.leaves, sums=sums)
        return self.leaves[: self.num_strips]


def plan_strips(
    address: int, strips: Strips, device: torch.device, scratch: torch.Tensor, *, leaf_bytes: int = LEAF_BYTES
) -> StripTable:
    """Lay out strips of device memory for the kernels.

    Args:
        address: base address of the strips' offsets, which the caller must have checked.
        scratch: flat uint8 on the device, at least one leaf if a strip has gaps. Tables run in turn may share scratch.
        leaf_bytes: size of a leaf in bytes. In a sync, both the holder and the reader use the default.
    """
    counts = num_leaves(strips.nbytes, leaf_bytes)
    first = np.cumsum(counts) - counts
    strip = np.repeat(np.arange(len(counts)), counts)
    start = (np.arange(len(strip)) - first[strip]) * leaf_bytes
    nbytes = np.minimum(strips.nbytes[strip] - start, leaf_bytes)
    # The digest of a strip with one leaf is written directly to the strip's row.
    is_one_of_many = counts[strip] > 1
    row = np.where(is_one_of_many, len(strips) + np.cumsum(is_one_of_many) - 1, strip)
    leaves = torch.empty(len(strips) + int(is_one_of_many.sum()), dtype=torch.int64, device=device)
    packed = strips.is_packed()[strip]
    whole, gapped, many = np.flatnonzero(packed), np.flatnonzero(~packed), np.flatnonzero(counts > 1)
    # Scratch for all strips with gaps would be as large as the weights.
    slabs = []
    for batch, at in _row_slabs(gapped, nbytes[gapped], scratch):
        batch_strips = strips[strip[batch]]
        columns = address + batch_strips.at, batch_strips.run_bytes, batch_strips.pitch, start[batch], nbytes[batch]
        pack = plan_pack(at, *columns, device)
        slabs.append((pack, plan_leaves(at, nbytes[batch], device, into=row[batch])))
    return StripTable(
        leaves=leaves,
        num_strips=len(strips),
        whole=plan_leaves(address + strips.at[strip[whole]] + start[whole], nbytes[whole], device, into=row[whole]),
        slabs=tuple(slabs),
        tops=plan_leaves(leaves.data_ptr() + 8 * row[first[many]], 8 * counts[many], device, into=many),
        scratch=scratch,
    )


def _row_slabs(rows: I64, nbytes: I64, scratch: torch.Tensor) -> list[tuple[I64, I64]]:
    padded = -(-nbytes // 16) * 16
    stop = np.cumsum(padded)
    batches, begin = [], 0
    while begin < len(rows):
        base = int(stop[begin] - padded[begin])
        end = int(np.searchsorted(stop, base + scratch.numel(), side="right"))
        assert end > begin, "the scratch is smaller than a leaf"
        batches.append((rows[begin:end], scratch.data_ptr() + (stop - padded)[begin:end] - base))
        begin = end
    return batches
