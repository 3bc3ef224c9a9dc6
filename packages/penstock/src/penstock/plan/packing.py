"""The rule by which short runs of a read are packed at their source, and the batches in which they are read then.

In: the rectangles of a read; the bytes of a packed buffer of the source. Out: which of them are packed, and
batches that fit the buffer.
Not here: the buffers (`sync.packer`), reading from them (`sync.receive.sources`), the simulation (`simulate_sync`).

    rectangles --short, one piece at the reader--> batches of at most a buffer --packed in order--> long runs
               '-others-------------------------> read run by run, as they are

Tensor parallelism cuts some tensors along their columns: a receiver of an eighth of the columns takes 256 bytes of each
row. A transport between hosts requests each run by itself, which takes longer than its bytes do. A kernel of the source
packs such runs at memory speed, and the reader's memory has them in one piece.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.segments import Rectangles, Segments
from penstock.types import I64, MIB

PACK_BYTES = 512 * MIB
"""Default bound of a publisher's memory for packed runs: two buckets of a sync. It is allocated buffer by buffer, when
readers ask for it."""
NUM_BUFFERS = 8
"""Buffers that this memory is divided into: each serves one reader at a time. While one is packed and asked for, which
takes about 2 ms, the others keep a link of 50 GB/s busy for 9 ms."""
LEAST_PACK_BYTES = NUM_BUFFERS * (64 << 10)
"""Least memory above 0: with smaller buffers the requests would cost more than the runs."""
PACK_RUN_BYTES = 8 << 10
"""Shorter runs are packed. Reason: a link of 50 GB/s carries 8 KiB in 0.16 us, less than requesting a run costs (0.2
to 1 us). Source: benchmarks/results/h200x2_202611/transport.md; over `http` and TCP:
benchmarks/results/cpu2_202611/packing.md."""
LEAST_GAIN = 4
"""Packing must join at least this many runs to one: a packed buffer costs its reader a request more."""


def packable(rows: Rectangles, buffer_bytes: int) -> npt.NDArray[np.bool_]:
    """Return the mask of the rectangles that are to be packed at the source; none where it would not pay.

    Args:
        rows: one read between a region of the source and one of the reader.
        buffer_bytes: of the source; 0: it does not pack.
    """
    run = rows.longest_runs()
    # A rectangle that has gaps at the reader has short runs there too, however it is packed.
    is_whole_here = (rows.num_rows == 1) | (rows.dst_pitch == rows.run_bytes)
    mask: npt.NDArray[np.bool_] = (run < min(PACK_RUN_BYTES, buffer_bytes // 4)) & is_whole_here
    nbytes = rows.nbytes[mask]
    num_before = int((nbytes // run[mask]).sum())
    # In the order of the reader's memory, neighbours join to one run.
    begin = np.sort(rows.dst[mask])
    stop = (rows.dst[mask] + nbytes)[np.argsort(rows.dst[mask], kind="stable")]
    num_after = len(begin) - int((begin[1:] == stop[:-1]).sum())
    return mask if num_after * LEAST_GAIN <= num_before and num_before else np.zeros_like(mask)


def batches(rows: Rectangles, buffer_bytes: int) -> list[Rectangles]:
    """Return packable rectangles, in the order of the reader's memory, as batches of at most `buffer_bytes`."""
    rows = rows[np.argsort(rows.dst, kind="stable")]
    # Cut between rows, so that a batch can fill its buffer: a run is at most a quarter of a buffer.
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
    """Return the reads of a batch from the buffer that it is packed into, from its start."""
    nbytes: I64 = batch.nbytes
    return Segments(src=np.cumsum(nbytes) - nbytes, dst=batch.dst, nbytes=nbytes).joined()
