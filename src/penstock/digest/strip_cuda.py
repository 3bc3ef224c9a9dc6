"""Digests of strips of device memory, the same bits as the CPU's.

In: an address, strips from it on. Out: one digest a strip, an int64 tensor on that device.
Not here: what a strip's digest is (`digest.strip`), leaves (`digest.cuda`), packing (`digest.pack_cuda`).

    strips in one piece --------------------------------------> leaves in place --.
    strips with gaps --packed into scratch, a slab at a time--> leaves of it -----'--> leaf digests --> strip digests
"""

from __future__ import annotations

import numpy as np
import torch

from penstock.digest.cuda import leaf_digests_cuda
from penstock.digest.leaf import LEAF_BYTES, num_leaves
from penstock.digest.pack_cuda import pack
from penstock.digest.strip import Strips
from penstock.types import I64, MIB

SLAB_BYTES = 128 * MIB
"""Scratch that strips with gaps are packed into: enough leaves to fill a device, and twice of it is the most in use."""


def strip_digests_cuda(
    address: int, strips: Strips, device: torch.device, *, leaf_bytes: int = LEAF_BYTES, slab_bytes: int = SLAB_BYTES
) -> torch.Tensor:
    """The digest of each strip of a device's memory.

    Args:
        address: what the strips' offsets count from; they were checked.
        strips: any number, of any lengths.
        device: of the memory.
        leaf_bytes: bytes of a leaf; both ends of a sync use the default.
        slab_bytes: of scratch; at least a leaf.

    Returns:
        [num_strips] int64 on `device`: the uint64 bits.

    Order: asynchronous on the device's current stream. Cost: numpy over strips and leaves, never over runs; reads the
        bytes once, and writes and reads once more what has gaps.
    """
    counts = num_leaves(strips.nbytes, leaf_bytes)
    first = np.cumsum(counts) - counts
    strip = np.repeat(np.arange(len(counts)), counts)
    start = (np.arange(len(strip)) - first[strip]) * leaf_bytes
    nbytes = np.minimum(strips.nbytes[strip] - start, leaf_bytes)
    leaves = torch.empty(len(strip), dtype=torch.int64, device=device)
    packed = strips.is_packed()[strip]
    whole = np.flatnonzero(packed)
    if len(whole):
        _put(leaves, whole, leaf_digests_cuda(address + strips.at[strip[whole]] + start[whole], nbytes[whole], device))
    gapped = np.flatnonzero(~packed)
    if len(gapped):
        _gapped(address, strips, strip, start, nbytes, gapped, leaves, max(slab_bytes // leaf_bytes, 1) * leaf_bytes)
    many = np.flatnonzero(counts > 1)
    if not len(many):
        return leaves
    found = leaves[_on(device, first)]
    _put(found, many, leaf_digests_cuda(leaves.data_ptr() + 8 * first[many], 8 * counts[many], device))
    return found


def _gapped(
    address: int,
    strips: Strips,
    strip: I64,
    start: I64,
    nbytes: I64,
    rows: I64,
    leaves: torch.Tensor,
    slab_bytes: int,
) -> None:
    """Digest these leaves of strips with gaps: pack as many as fit a slab, digest them there, and so on."""
    device = leaves.device
    # Each leaf at a multiple of 16, where the kernels are fastest.
    room = -(-nbytes[rows] // 16) * 16
    stop = np.cumsum(room)
    scratch = torch.empty(min(int(stop[-1]), slab_bytes), dtype=torch.uint8, device=device)
    begin = 0
    while begin < len(rows):
        base = int(stop[begin] - room[begin])
        end = max(int(np.searchsorted(stop, base + scratch.numel(), side="right")), begin + 1)
        some = rows[begin:end]
        at = scratch.data_ptr() + stop[begin:end] - room[begin:end] - base
        mine = strips[strip[some]]
        pack(at, address + mine.at, mine.run_bytes, mine.pitch, start[some], nbytes[some], device)
        _put(leaves, some, leaf_digests_cuda(at, nbytes[some], device))
        begin = end


def _put(into: torch.Tensor, rows: I64, values: torch.Tensor) -> None:
    into.index_copy_(0, _on(into.device, rows), values)


def _on(device: torch.device, column: I64) -> torch.Tensor:
    """A column on the device; the copy is queued behind what the stream has."""
    host = torch.from_numpy(np.ascontiguousarray(column))
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
