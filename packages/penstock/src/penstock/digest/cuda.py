"""XXH3-64 digests of device memory at memory speed, of leaves and of strips, with the same bits as the CPU's.

In: addresses and lengths of leaves, or strips from an address on, in a CUDA device's memory. Out: one digest each, in
an int64 tensor on that device, as often as the memory is refilled.
Not here: the kernels (`digest.xxh3_triton`), the CPU references (`digest.leaf`, `digest.strip`), the meaning of leaves
(`types.Manifest`), the packing kernel (`cuda.pack`).

    leaves ---------------------------------------------------> leaf digests
    strips in one piece --------------------------------------> leaves in place --.
    strips with gaps --packed into scratch, a slab at a time--> leaves of it -----'--> leaf digests --> strip digests
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
import torch

from penstock.cuda.kernel_cache import Launch, device_context
from penstock.cuda.pack import PackTable, plan_pack
from penstock.digest import xxh3_constants
from penstock.digest.leaf import LEAF_BYTES, num_leaves
from penstock.digest.strip import Strips
from penstock.types import I64, MIB, U64
from penstock.waits import Threads

_KERNELS = "penstock.digest.xxh3_triton"
_BLOCK_BYTES = xxh3_constants.BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Shapes of the launches; all give the same digests.

    Source of the defaults: benchmarks/results/h100_202611/digest.md, by `benchmarks/bench_digest.py --sweep`.
    """

    tile_blocks: int = 8
    """1024-byte blocks that a program of the parallel pass reads; a power of two."""
    tile_warps: int = 1
    """Warps of such a program; 8 blocks a warp keep sixteen 16-byte loads a thread in flight."""
    run_stripes: int = 8
    """Stripes of 64 bytes that one load takes of a block; 8 are a warp's 512 contiguous bytes. Aligned leaves only."""
    finish_leaves: int = 4
    """Leaves that a program of the serial pass chains; 4 leaves of 8 lanes fill its one warp."""
    finish_unroll: int = 16
    """Blocks whose sums the serial pass loads ahead of those it chains."""
    slab_blocks: int = 1024 * 1024
    """Blocks of a slab: 1 GiB of equally long leaves, with 64 MiB of sums. As fast as slabs of 256 MiB, whose sums stay
    in the L2 cache (50 MB), with a quarter of the launches."""
    short_warps: int = 4
    """Warps of a program of the short kernel; a thread a leaf."""


DEFAULT_TUNING = Tuning()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slab:
    """Leaves whose block sums are computed by one launch and used by the next."""

    first_leaf: int
    stop_leaf: int
    tiles: int
    """Tiles that each leaf is given: as many as the longest of the slab needs."""
    aligned: bool

    @property
    def num_tiles(self) -> int:
        """Return the programs of the parallel pass."""
        return (self.stop_leaf - self.first_leaf) * self.tiles


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeafTable:
    """Leaves laid out for the kernels, to be digested as often as their memory is refilled.

    Ownership: holds its own small device table, not the leaves' memory, which must outlive every digest of it.
    """

    device: torch.device
    num_leaves: int
    kernels: _Kernels
    slabs: tuple[_Slab, ...]
    first_short: int
    """The first of the leaves that take the short algorithms; `num_leaves` where there are none."""
    num_sums: int
    """Rows of the sums of the largest slab."""

    def digest(self, *, out: torch.Tensor | None = None, sums: torch.Tensor | None = None) -> torch.Tensor:
        """Digest every leaf from its current bytes. One thread at a time.

        Args:
            out: [num_leaves] int64, or as many as the rows planned, on the table's device, contiguous; made if None.
            sums: scratch, uint64 [at least num_sums, 8], shared with what the stream digests before and after.

        Returns:
            [num_leaves] int64: the uint64 bits of each leaf's XXH3-64, in the order of the planned rows.

        Order: asynchronous on the device's current stream: the one the table was planned on, or one that waits for it.
        Cost: two launches for each slab plus one for short leaves; scratch of 1/16 of a slab's tiles, at most 64 MiB
            unless one leaf alone needs more; no synchronisation.
        """
        if out is None:
            out = torch.empty(self.num_leaves, dtype=torch.int64, device=self.device)
        if self.num_leaves == 0:
            return out
        # One scratch for all slabs: the launches of a stream run in order, so a slab's sums are used before the next
        # slab overwrites them.
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
    """Lay out leaves for the kernels.

    Args:
        addresses: [num_leaves] first byte of each leaf, in `device`'s memory; any alignment, by 16 is fastest.
        nbytes: [num_leaves] bytes of each leaf, at least 1.
        device: the CUDA device; the CPU only under Triton's interpreter.
        into: [num_leaves] the row of the result for each, in a result that `digest` is given; None: their order.
        tuning: launch shapes, for benchmarks.

    Raises:
        ValueError: the columns differ in length, or a leaf is empty.

    Cost: numpy over the leaves; one copy of 24 bytes a leaf from pinned memory, on the current stream; no
        synchronisation.
    """
    _require_columns(addresses, nbytes)
    num_leaves = len(nbytes)
    rows = np.arange(num_leaves) if into is None else into
    # In groups, since a launch takes one path: aligned leaves load 16 bytes at once, short leaves have algorithms of
    # their own.
    kind = np.where(nbytes > xxh3_constants.SHORT_BYTES, addresses & 15 != 0, _SHORT)
    tiles = -(-nbytes // (tuning.tile_blocks * _BLOCK_BYTES))
    # By length, too, where lengths differ much: leaves of a slab get equally many tiles, used or not.
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
    """Leaves laid out for the kernels in their own order, to be digested a range at a time while others are filled.

    A range costs some launches and no planning. Leaves of one range may differ in kind and length, at the cost of
    programs that find nothing to do; leaves that are digested all at once are faster by `plan_leaves`.

    Args:
        addresses, nbytes, device: as `plan_leaves`.
        tuning: as `plan_leaves`.

    Raises:
        ValueError: the columns differ in length, or a leaf is empty.

    Cost: numpy over the leaves; one copy of 24 bytes a leaf from pinned memory, on the current stream; scratch of 1/16
        of the longest slab, at most 64 MiB unless one leaf alone needs more.
    Ownership: holds its tables and the scratch; the leaves' memory must outlive every digest of it.
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
        """Digest the leaves `[first, stop)` from their current bytes. One thread at a time.

        Args:
            out: [num_leaves] int64 on the device; the rows of these leaves are written.

        Order: asynchronous on the current stream, always the same one, or one that waits for it.
        """
        with device_context(self.device):
            for slab in _slabs(self._tiles, first, stop, True, self._slab_tiles):
                if _has(self._unaligned, slab.first_leaf, slab.stop_leaf):
                    slab = dataclasses.replace(slab, aligned=False)
                self._kernels.run_slab(slab, self._sums, out)
            if _has(self._short, first, stop):
                self._kernels.run_short(first, stop, out)

    def warm_up(self, *, out: torch.Tensor) -> None:
        """Compile or load the kernels that these leaves need, by digests of a leaf of each kind; `out` as `digest`."""
        for leaves in (self._aligned, self._unaligned, self._short):
            for leaf in leaves[:1].tolist():
                self.digest(leaf, leaf + 1, out=out)


def _has(leaves: I64, first: int, stop: int) -> bool:
    """Return whether one of these leaves, ascending, is among `[first, stop)`."""
    return len(leaves) > 0 and bool(np.searchsorted(leaves, first) < np.searchsorted(leaves, stop))


def _scratch(num_sums: int, device: torch.device) -> torch.Tensor:
    """Return memory for the sums of as many blocks."""
    return torch.empty((num_sums, 8), dtype=torch.uint64, device=device)


def _require_columns(addresses: I64, nbytes: I64) -> None:
    """Raise ValueError unless these are columns of one table, of leaves with bytes."""
    if addresses.shape != nbytes.shape or addresses.ndim != 1:
        raise ValueError(f"addresses {addresses.shape} and nbytes {nbytes.shape} are not columns of one table")
    if nbytes.size and int(nbytes.min()) < 1:
        raise ValueError(f"leaf {int(nbytes.argmin())} is empty; a digest needs at least one byte")


def _columns(addresses: I64, nbytes: I64, rows: I64, device: torch.device) -> torch.Tensor:
    """Return the kernels' table, int64 [3, num_leaves], on its way to the device."""
    # Pinned: a copy from pageable memory would make the call wait for the device.
    host = torch.empty((3, len(nbytes)), dtype=torch.int64, pin_memory=device.type == "cuda")
    host.numpy()[:] = addresses, nbytes, rows
    return host.to(device, non_blocking=True)


_SHORT = 2
"""The kind of leaves for the short kernel, after the aligned ones (0) and the others (1)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kernels:
    """The launches over a table of leaves; each takes its range, then what it writes to."""

    tuning: Tuning
    add_blocks: tuple[Launch, Launch]
    """The parallel pass: over leaves at any address, and over aligned ones."""
    finish: Launch
    short: Launch

    def run_slab(self, slab: _Slab, sums: torch.Tensor, out: torch.Tensor) -> None:
        """Queue both passes over the longer leaves of a slab."""
        self.add_blocks[slab.aligned].run(slab.first_leaf, slab.tiles, sums, num_programs=slab.num_tiles)
        num_programs = -(-(slab.stop_leaf - slab.first_leaf) // self.tuning.finish_leaves)
        self.finish.run(slab.first_leaf, slab.stop_leaf, slab.tiles, sums, out, num_programs=num_programs)

    def run_short(self, first_leaf: int, stop_leaf: int, out: torch.Tensor) -> None:
        """Queue the pass over the short leaves among `[first_leaf, stop_leaf)`."""
        num_programs = -(-(stop_leaf - first_leaf) // (32 * self.tuning.short_warps))
        self.short.run(first_leaf, stop_leaf, out, num_programs=num_programs)


def _kernels(columns: torch.Tensor, tuning: Tuning) -> _Kernels:
    """Return the launches over a table, int64 [3, num_leaves] on the device: address, length, result row."""
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
    """Cut leaves `[first_leaf, stop_leaf)` so that a slab has at most `slab_tiles` tiles, or one leaf.

    Each leaf of a slab gets as many tiles as its longest, so that a program finds its leaf by a division: a table of
    tiles was eight times as large as that of leaves.
    """
    slabs = []
    while first_leaf < stop_leaf:
        # The most that can fit, which is what does fit where no leaf is longer than the first.
        stop = min(stop_leaf, first_leaf + max(1, slab_tiles // int(tiles[first_leaf])))
        candidates = tiles[first_leaf:stop]
        max_tiles = int(candidates.max())
        if max_tiles > candidates[0]:
            longest = np.maximum.accumulate(candidates)
            fits = np.searchsorted(longest * np.arange(1, len(longest) + 1), slab_tiles, side="right")
            # A leaf of more tiles than a slab is a slab of its own: the serial pass needs all sums of a leaf at once.
            stop = first_leaf + max(1, int(fits))
            max_tiles = int(longest[stop - first_leaf - 1])
        slabs.append(_Slab(first_leaf=first_leaf, stop_leaf=stop, tiles=max_tiles, aligned=aligned))
        first_leaf = stop
    return slabs


@functools.lru_cache(maxsize=64)
def _constants(device: torch.device) -> torch.Tensor:
    """Return the kernels' constants on a device, where they stay for the life of the process."""
    # In a thread of its own: while an engine with a sleep mode loads a model, what the calling thread allocates goes to
    # a pool whose memory is taken away. Constants in it would be garbage after the sleep, and all digests wrong.
    with Threads(1, "penstock-constants") as pool:
        return pool.submit(_place, xxh3_constants.constants(), device).result()


def _place(values: U64, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)


def leaf_digests_cuda(addresses: I64, nbytes: I64, device: torch.device) -> torch.Tensor:
    """Return the XXH3-64 of each leaf, for leaves that are digested once; else see `plan_leaves`.

    Returns:
        [num_leaves] int64 on `device`: the uint64 bits, in the order of the rows.

    Raises:
        ValueError: the columns differ in length, or a leaf is empty.

    Order: asynchronous on the device's current stream.
    Ownership: the leaves' memory must live, unchanged, until the stream has passed.
    """
    return plan_leaves(addresses, nbytes, device).digest()


def warm_up(device: torch.device) -> None:
    """Compile the kernels for `device`, or read them from Triton's cache: seconds, once a process; any thread.

    Order: while the first reads are under way, so that the first digest does not wait for the compiler.
    """
    # One leaf for each kernel: aligned, not aligned, and short.
    data = torch.zeros(2048, dtype=torch.uint8, device=device)
    at = data.data_ptr()
    plan_leaves(np.array([at, at + 1, at]), np.array([1024, 1024, 4]), device).digest()


SCRATCH_BYTES = 256 * MIB
"""Bytes into which strips with gaps are packed at once: enough leaves to fill a device several times over."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StripTable:
    """Strips laid out for the kernels, to be digested as often as their memory is refilled. Made by `plan_strips`.

    Ownership: holds its own tables and results on the device, 0.02 % of the bytes, and the scratch it was given.
    """

    leaves: torch.Tensor
    """Digests: of every strip, then of the leaves of strips that have several."""
    num_strips: int
    whole: LeafTable
    slabs: tuple[tuple[PackTable, LeafTable], ...]
    tops: LeafTable
    """Strips of several leaves, digested over their leaves' digests."""
    scratch: torch.Tensor

    def digest(self) -> torch.Tensor:
        """Digest every strip from its current bytes.

        Returns:
            [num_strips] int64 on the device, the uint64 bits; overwritten by the next call.

        Order: asynchronous on the device's current stream: the one the table was planned on. Cost: reads the bytes
            once, and writes and reads once more what has gaps; some launches a slab, no synchronisation.
        """
        # Made once: each call of torch's lets go of the GIL, and to get it back takes up to a millisecond.
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
    """Lay out strips of a device's memory for the kernels.

    Args:
        address: the address from which the strips' offsets count; they were checked.
        strips: any number, of any lengths.
        device: of the memory; the CPU only under Triton's interpreter.
        scratch: flat uint8 on it, at least a leaf, if a strip has gaps; tables that share it are used in turns.
        leaf_bytes: bytes of a leaf; both ends of a sync use the default.

    Cost: numpy over strips and leaves, never over runs.
    """
    counts = num_leaves(strips.nbytes, leaf_bytes)
    first = np.cumsum(counts) - counts
    strip = np.repeat(np.arange(len(counts)), counts)
    start = (np.arange(len(strip)) - first[strip]) * leaf_bytes
    nbytes = np.minimum(strips.nbytes[strip] - start, leaf_bytes)
    # The digest of a strip of one leaf is the leaf's: it goes straight to the strip's row.
    is_one_of_many = counts[strip] > 1
    row = np.where(is_one_of_many, len(strips) + np.cumsum(is_one_of_many) - 1, strip)
    leaves = torch.empty(len(strips) + int(is_one_of_many.sum()), dtype=torch.int64, device=device)
    packed = strips.is_packed()[strip]
    whole, gapped, many = np.flatnonzero(packed), np.flatnonzero(~packed), np.flatnonzero(counts > 1)
    # Packed slab by slab, since scratch for all strips with gaps would be as large as the weights.
    slabs = []
    for some, at in _row_slabs(gapped, nbytes[gapped], scratch):
        mine = strips[strip[some]]
        pack = plan_pack(at, address + mine.at, mine.run_bytes, mine.pitch, start[some], nbytes[some], device)
        slabs.append((pack, plan_leaves(at, nbytes[some], device, into=row[some])))
    return StripTable(
        leaves=leaves,
        num_strips=len(strips),
        whole=plan_leaves(address + strips.at[strip[whole]] + start[whole], nbytes[whole], device, into=row[whole]),
        slabs=tuple(slabs),
        tops=plan_leaves(leaves.data_ptr() + 8 * row[first[many]], 8 * counts[many], device, into=many),
        scratch=scratch,
    )


def _row_slabs(rows: I64, nbytes: I64, scratch: torch.Tensor) -> list[tuple[I64, I64]]:
    """Return batches of leaves, each as many as fit the scratch, and where each leaf lies in it."""
    # At multiples of 16, where the kernels are fastest.
    room = -(-nbytes // 16) * 16
    stop = np.cumsum(room)
    batches, begin = [], 0
    while begin < len(rows):
        base = int(stop[begin] - room[begin])
        end = int(np.searchsorted(stop, base + scratch.numel(), side="right"))
        assert end > begin, "the scratch is smaller than a leaf"
        batches.append((rows[begin:end], scratch.data_ptr() + (stop - room)[begin:end] - base))
        begin = end
    return batches
