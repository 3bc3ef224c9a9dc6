"""Digests of strips of device memory, the same bits as the CPU's.

In: an address, strips from it on. Out: one digest a strip, an int64 tensor on that device, as often as asked.
Not here: what a strip's digest is (`digest.strip`), leaves (`digest.cuda`), packing (`cuda.pack`).

    strips in one piece --------------------------------------> leaves in place --.
    strips with gaps --packed into scratch, a slab at a time--> leaves of it -----'--> leaf digests --> strip digests
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.cuda.pack import PackTable, plan_pack
from penstock.digest.cuda import LeafTable, plan_leaves
from penstock.digest.leaf import LEAF_BYTES, num_leaves
from penstock.digest.strip import Strips
from penstock.types import I64, MIB

SCRATCH_BYTES = 256 * MIB
"""What strips with gaps are packed into at once: enough leaves to fill a device several times over."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StripTable:
    """Strips laid out for the kernels; digest them as often as the memory is refilled. Made by `plan_strips`.

    Ownership: holds its own tables and results on the device, 0.2 % of the bytes, and the scratch it was given.
    """

    leaves: torch.Tensor
    whole: LeafTable
    slabs: tuple[tuple[PackTable, LeafTable], ...]
    tops: LeafTable
    """Strips of several leaves: over their digests."""
    out: torch.Tensor
    first: torch.Tensor
    """Of each strip its first leaf."""
    scratch: torch.Tensor

    def digest(self) -> torch.Tensor:
        """Digest every strip from its current bytes.

        Returns:
            [num_strips] int64 on the device, the uint64 bits; overwritten by the next call.

        Order: asynchronous on the device's current stream: the one the table was planned on. Cost: reads the bytes
            once, and writes and reads once more what has gaps; some launches a slab, no synchronisation.
        """
        self.whole.digest(out=self.leaves)
        for pack, leaves in self.slabs:
            pack.run()
            leaves.digest(out=self.leaves)
        torch.index_select(self.leaves, 0, self.first, out=self.out)
        self.tops.digest(out=self.out)
        return self.out


def plan_strips(
    address: int, strips: Strips, device: torch.device, scratch: torch.Tensor, *, leaf_bytes: int = LEAF_BYTES
) -> StripTable:
    """Lay out strips of a device's memory for the kernels.

    Args:
        address: what the strips' offsets count from; they were checked.
        strips: any number, of any lengths.
        device: of the memory; the CPU only under Triton's interpreter.
        scratch: flat uint8 on it, at least a leaf, if a strip has gaps; tables that share it are used by turns.
        leaf_bytes: bytes of a leaf; both ends of a sync use the default.

    Cost: numpy over strips, leaves and their 8 KiB tiles, never over runs.
    """
    counts = num_leaves(strips.nbytes, leaf_bytes)
    first = np.cumsum(counts) - counts
    strip = np.repeat(np.arange(len(counts)), counts)
    start = (np.arange(len(strip)) - first[strip]) * leaf_bytes
    nbytes = np.minimum(strips.nbytes[strip] - start, leaf_bytes)
    leaves = torch.empty(len(strip), dtype=torch.int64, device=device)
    packed = strips.is_packed()[strip]
    whole, gapped, many = np.flatnonzero(packed), np.flatnonzero(~packed), np.flatnonzero(counts > 1)
    slabs = []
    for some, at in _slabs(gapped, nbytes[gapped], scratch):
        mine = strips[strip[some]]
        pack = plan_pack(at, address + mine.at, mine.run_bytes, mine.pitch, start[some], nbytes[some], device)
        slabs.append((pack, plan_leaves(at, nbytes[some], device, into=some)))
    return StripTable(
        leaves=leaves,
        whole=plan_leaves(address + strips.at[strip[whole]] + start[whole], nbytes[whole], device, into=whole),
        slabs=tuple(slabs),
        tops=plan_leaves(leaves.data_ptr() + 8 * first[many], 8 * counts[many], device, into=many),
        out=torch.empty(len(strips), dtype=torch.int64, device=device),
        first=torch.from_numpy(first).to(device),
        scratch=scratch,
    )


def _slabs(rows: I64, nbytes: I64, scratch: torch.Tensor) -> list[tuple[I64, I64]]:
    """Return batches of leaves, each as many as fit the scratch, and where each leaf lies in it."""
    room = -(-nbytes // 16) * 16  # at a multiple of 16, where the kernels are fastest
    stop = np.cumsum(room)
    batches, begin = [], 0
    while begin < len(rows):
        base = int(stop[begin] - room[begin])
        end = int(np.searchsorted(stop, base + scratch.numel(), side="right"))
        assert end > begin, "the scratch is smaller than a leaf"
        batches.append((rows[begin:end], scratch.data_ptr() + (stop - room)[begin:end] - base))
        begin = end
    return batches
