"""Copies rectangles of device memory with one kernel. Source and destination may have gaps.

A table entry holds a rectangle in 72 bytes, however many runs it has. The memory must be reachable from the device, as
the device's own memory or as a peer's memory, which the kernel loads over NVLink.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import torch

from penstock.cuda.kernel_cache import Launch
from penstock.segments import Rectangles
from penstock.types import I64, U64

TILE_BYTES = 16 << 10
"""Bytes per program. 128 threads with eight 16-byte loads each in flight hide the microsecond of NVLink."""
WIDTHS = (16, 4, 1)
"""Possible widths of a load in bytes. The kernel uses the widest that divides all numbers of a rectangle."""
_LONGEST_RUN = 1 << 30
"""A longer run is copied as several runs, since offsets within a row are counted in 32 bits."""


class PackTable(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Rectangles laid out for the kernel, to be copied any number of times."""

    launches: tuple[Launch, ...]

    def run(self) -> None:
        """Queue the copies on the current stream, which must be the planning stream or wait for it. Not thread-safe."""
        for part in self.launches:
            part.run()


def plan_pack(
    dst: I64, src: I64, run_bytes: I64, src_pitch: I64, start: I64, nbytes: I64, device: torch.device
) -> PackTable:
    """Plan to copy `nbytes` of each strip, from its packed byte `start`, into a contiguous piece; see `plan_copy`."""
    return _plan(dst - start, src, run_bytes, run_bytes, src_pitch, start, nbytes, device)


def plan_copy(
    dst: I64, src: I64, run_bytes: I64, num_rows: I64, dst_pitch: I64, src_pitch: I64, device: torch.device
) -> PackTable:
    """Plan to copy rectangles, without synchronisation, in up to three launches.

    Args:
        dst, src: addresses of the first run.
        run_bytes: bytes of a run, at least 1.
        num_rows: number of runs, at least 1.
        dst_pitch, src_pitch: bytes from the start of a run to the start of the next.
        device: device that runs the kernel. The CPU works only under Triton's interpreter.
    """
    # Split each long run into adjacent rectangles with the same rows.
    parts = -(-run_bytes // _LONGEST_RUN)
    at = np.repeat(np.arange(len(parts)), parts)
    skipped = (np.arange(len(at)) - np.repeat(np.cumsum(parts) - parts, parts)) * _LONGEST_RUN
    run = np.minimum(run_bytes[at] - skipped, _LONGEST_RUN)
    nbytes, none = run * num_rows[at], np.zeros(len(at), np.int64)
    return _plan(dst[at] + skipped, src[at] + skipped, run, dst_pitch[at], src_pitch[at], none, nbytes, device)


def _plan(
    dst: I64, src: I64, run_bytes: I64, dst_pitch: I64, src_pitch: I64, start: I64, nbytes: I64, device: torch.device
) -> PackTable:
    # A single run needs no pitch. A pitch of 0 does not prevent the widest loads.
    one_row = start + nbytes <= run_bytes
    table = np.stack([dst, src, run_bytes, np.where(one_row, 0, dst_pitch), np.where(one_row, 0, src_pitch), start])
    table = np.concatenate([table, nbytes[None]])
    # A power of two divides every number in a rectangle's table entry if it divides the bitwise OR of the numbers.
    all_bits = np.bitwise_or.reduce(table, axis=0)
    launches = []
    left = np.arange(len(dst))
    for width in WIDTHS:
        fits = all_bits[left] % width == 0
        mine, left = left[fits], left[~fits]
        if not len(mine):
            continue
        counts = -(-nbytes[mine] // (TILE_BYTES * width // 16))
        columns = np.concatenate([table[:, mine], (np.cumsum(counts) - counts)[None], counts[None]])
        host = torch.from_numpy(np.ascontiguousarray(columns))
        # A copy from pageable memory would make the call wait for the device.
        device_table = (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
        # The array of tiles is many times larger than the table, so create it on the device.
        rectangle = torch.arange(len(mine), dtype=torch.int32, device=device)
        tiles = torch.repeat_interleave(rectangle, device_table[8], output_size=int(counts.sum()))
        constants = {"TILE_BYTES": TILE_BYTES * width // 16, "WIDTH": width}
        arguments = device_table, tiles, device_table.shape[1]
        launches.append(Launch("penstock.cuda.pack_triton", "copy_tiles", len(tiles), arguments, constants))
    return PackTable(launches=tuple(launches))


def plan_runs(dst: I64, src: I64, nbytes: I64, device: torch.device) -> PackTable:
    """Plan to copy runs at any addresses. See `plan_copy`.

    Runs whose source and destination differ in alignment to 16 bytes are copied byte by byte, which is slower.
    """
    width = WIDTHS[0]
    # Split a run into whole words and the bytes before and after them, which need separate loads.
    head = np.where((dst ^ src) % width == 0, np.minimum(-dst % width, nbytes), nbytes)
    body = (nbytes - head) // width * width
    skipped, lengths = np.concatenate([0 * head, head, head + body]), np.concatenate([head, body, nbytes - head - body])
    at = np.flatnonzero(lengths)
    one, run = np.ones(len(at), np.int64), at % max(1, len(dst))
    return plan_copy(dst[run] + skipped[at], src[run] + skipped[at], lengths[at], one, one, one, device)


def gather(dst: U64, src: U64, nbytes: U64, device: int, stream: int) -> None:
    """Queue many short copies on a stream of a device, because copy engines would spend their time starting copies.

    The caller keeps the memory until the stream has finished. Raise MissingExtra if there is no kernel for the device.

    Args:
        dst, src: [n] addresses that the device can reach.
        nbytes: [n] sizes of the copies in bytes. A size may be 0.
        device: index of the device.
        stream: CUDA's handle of the stream.
    """
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
        to, source, length = (column.astype(np.int64) for column in (dst, src, nbytes))
        plan_runs(to, source, length, torch.device("cuda", device)).run()


def lay_out_rectangles(rows: Rectangles, device: int, stream: int) -> Callable[[], None]:
    """Return a function that queues copies between addresses on this stream, any number of times. See `gather`."""
    queue_stream = torch.cuda.ExternalStream(stream, device)
    columns = (rows.dst, rows.src, rows.run_bytes, rows.num_rows, rows.dst_pitch, rows.src_pitch)
    with torch.cuda.device(device), torch.cuda.stream(queue_stream):
        table = plan_copy(*columns, torch.device("cuda", device))

    def queue() -> None:
        with torch.cuda.device(device), torch.cuda.stream(queue_stream):
            table.run()

    return queue
