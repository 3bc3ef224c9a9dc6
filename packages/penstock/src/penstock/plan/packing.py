"""Decide which short runs of a read are packed at the source, and cut them into batches that fit into a packed buffer.

Tensor parallelism splits some tensors by columns. A receiver that wants an eighth of the columns may read only 256
bytes of each row. A transport between hosts requests each run of bytes separately, and the request takes longer than
the transfer of so few bytes. A kernel at the source packs short runs at memory speed.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.segments import Rectangles, Segments
from penstock.types import I64, MIB

PACK_BYTES = 512 * MIB
"""Default memory for a publisher's packed runs, two buckets of a sync. Buffers are allocated when first requested."""
NUM_BUFFERS = 8
"""Number of buffers that share this memory. Each buffer serves one reader at a time. While one is packed, which takes
about 2 ms, the others keep a 50 GB/s link busy for 9 ms."""
LEAST_PACK_BYTES = NUM_BUFFERS * (64 << 10)
"""Minimum of this memory unless it is 0. With smaller buffers, requests would cost more than separate runs."""
PACK_RUN_BYTES = 8 << 10
"""Runs below this size are packed. A 50 GB/s link transfers 8 KiB in 0.16 us, less than a request for a run takes (0.2
to 1 us). Source: benchmarks/results/h200x2_202611/transport.md, and benchmarks/results/cpu2_202611/packing.md for
`http` over TCP."""
LEAST_GAIN = 4
"""Minimum number of runs that packing must join into one, because a packed buffer costs its reader one more request."""


def packable(rows: Rectangles, buffer_bytes: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the rectangles to pack at the source. The mask is empty if packing would not pay off.

    `rows` is one read between a region of the source and a region of the reader. A `buffer_bytes` of 0 means that the
    source does not pack.
    """
    run = rows.longest_runs()
    # A rectangle with gaps at the reader has short runs even if it is packed at the source.
    is_whole_here = (rows.num_rows == 1) | (rows.dst_pitch == rows.run_bytes)
    mask: npt.NDArray[np.bool_] = (run < min(PACK_RUN_BYTES, buffer_bytes // 4)) & is_whole_here
    nbytes = rows.nbytes[mask]
    num_before = int((nbytes // run[mask]).sum())
    # Sort by the reader's addresses, because adjacent rectangles then join into one run.
    begin = np.sort(rows.dst[mask])
    stop = (rows.dst[mask] + nbytes)[np.argsort(rows.dst[mask], kind="stable")]
    num_after = len(begin) - int((begin[1:] == stop[:-1]).sum())
    return mask if num_after * LEAST_GAIN <= num_before and num_before else np.zeros_like(mask)


def batches(rows: Rectangles, buffer_bytes: int) -> list[Rectangles]:
    """Return packable rectangles as batches of at most `buffer_bytes`, in the order of the reader's memory."""
    rows = rows[np.argsort(rows.dst, kind="stable")]
    # Cut between rows, so that a batch can fill its buffer. A run is at most a quarter of a buffer.
    rows_each = np.maximum(buffer_bytes // 4 // rows.run_bytes, 1)
    blocks = -(-rows.num_rows // rows_each)
    at = np.repeat(np.arange(len(rows)), blocks)
    row = (np.arange(len(at)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * rows_each[at]
    cut = Rectangles(
        src=rows.src[at] + row * rows.src_pitch[at],
        dst=rows.dst[at] + row * rows.dst_pitch[at],
        run_bytes=rows.run_bytes[at],
        num_rows=np.minimum(rows.num_rows[at] - row, rows_each[at]),
        src_pitch=rows.src_pitch[at],
        dst_pitch=rows.dst_pitch[at],
    )
    stop = np.cumsum(cut.nbytes)
    edges = [0]
    while edges[-1] < len(cut):
        done = int(stop[edges[-1] - 1]) if edges[-1] else 0
        edges.append(int(np.searchsorted(stop, done + buffer_bytes, side="right")))
    return [cut[begin:end] for begin, end in pairwise(edges)]


def packed_segments(batch: Rectangles) -> Segments:
    """Return the reads of a packed batch, which begins at the start of its buffer."""
    nbytes: I64 = batch.nbytes
    return Segments(src=np.cumsum(nbytes) - nbytes, dst=batch.dst, nbytes=nbytes).joined()
