"""Rates of a sync's data plane on devices: strips digested, read over NVLink, flipped, taken as a snapshot.

    python -m benchmarks.bench_strips [--gb 8] [--host-gb 4]

In: one device, two for what crosses. Out: a line of JSON for each rate.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import torch
from tests.support.shards import shard_box

from penstock.digest.cuda import SCRATCH_BYTES, plan_strips
from penstock.digest.strip import Strips
from penstock.engine.trace import Trace
from penstock.memory.arena import Arena
from penstock.plan.layout import Form, Layout
from penstock.plan.sync import plan_sync
from penstock.segments import Rectangles
from penstock.sync.copy_plan import MemoryCopy, StagingCopy
from penstock.sync.local_version import LocalVersion
from penstock.sync.publish.offer import VersionSnapshot
from penstock.sync.receive.sources import LocalLink
from penstock.sync.receive.transfer import Transfer
from penstock.transport.choose import PeerLinks, open_links
from penstock.transport.protocol import Memory
from penstock.types import GB, DType

REPEATS = 4


def arena(nbytes: int, device: str) -> Memory:
    """Device memory that peers reach, of random enough bytes."""
    made = Arena.allocate(nbytes, device)
    made.bytes_at(0, nbytes).random_()
    return Memory(address=made.address, nbytes=nbytes, device=made.device, owner=made)


def say(what: str, nbytes: int, seconds: list[float], **more: object) -> None:
    """Print a line."""
    best, median = min(seconds), sorted(seconds)[len(seconds) // 2]
    rate = {"gb_per_s": round(nbytes / GB / median, 1), "best_gb_per_s": round(nbytes / GB / best, 1)}
    print(json.dumps({"what": what, "nbytes": nbytes, "ms": round(median * 1e3, 2), **rate, **more}), flush=True)


def timed(work: Callable[[], object]) -> list[float]:
    """Seconds of each of the repeats, after one that is not counted."""
    work()
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return found


def gapped(nbytes: int, run: int, matrix_bytes: int = 128 << 20) -> Strips:
    """Every other run of each matrix."""
    at = np.arange(0, nbytes, matrix_bytes)
    ones = np.ones(len(at), np.int64)
    return Strips(at=at, run_bytes=run * ones, num_rows=matrix_bytes // (2 * run) * ones, pitch=2 * run * ones)


def digests(nbytes: int) -> None:
    """Measure the time that a source and a receiver spend on digests."""
    memory, device = arena(nbytes, "cuda:0"), torch.device("cuda:0")
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
    for run in (4 << 10, 16 << 10, 1 << 20):
        gaps = gapped(nbytes, run)
        packed = msgspec.structs.replace(gaps, pitch=gaps.run_bytes)
        for kind, strips in (("gapped", gaps), ("packed", packed)):
            begun = time.perf_counter()
            table = plan_strips(memory.address, strips, device, scratch)
            made = time.perf_counter() - begun
            seconds = timed(lambda: table.digest().cpu())  # noqa: B023
            say(f"digest of {kind} runs of {run}", int(strips.nbytes.sum()), seconds, planned_s=round(made, 4))


def reads(nbytes: int, links: PeerLinks) -> None:
    """Runs of a peer device's memory into packed memory of ours."""
    source, into = links.register(arena(nbytes, "cuda:1"))["cuda_ipc"], arena(nbytes // 2, "cuda:0")
    handle, transport = links.register(into)["cuda_ipc"], links.transports["cuda_ipc"]
    for run in (4 << 10, 16 << 10, 64 << 10, 1 << 20):
        strips = gapped(nbytes, run)
        columns = {"run_bytes": strips.run_bytes, "num_rows": strips.num_rows, "src_pitch": strips.pitch}
        rows = Rectangles(src=strips.at, dst=strips.at // 2, dst_pitch=strips.run_bytes, **columns)

        def read(rows: Rectangles = rows) -> None:
            pending = transport.post_rectangles(handle, source.descriptor, rows)  # type: ignore[attr-defined]
            transport.wait(pending, stall_s=30)

        say(f"NVLink read of runs of {run}", int(rows.nbytes.sum()), timed(read))


def layouts(side: str, nbytes: int, dims: tuple[int, int], world_size: int) -> list[Layout]:
    """Square BF16 matrices of 8192, alternately split by `dims`."""
    shapes = [(8192, 8192)] * (nbytes // (8192 * 8192 * 2))
    found = []
    for rank in range(world_size):
        boxes = [shard_box(shape, dims[i % 2], rank, world_size) for i, shape in enumerate(shapes)]
        forms = tuple(Form(dtype=DType.BF16, shape=s, box=b) for s, b in zip(shapes, boxes, strict=True))
        spans = np.array([form.span_bytes for form in forms], np.int64)
        names = tuple(f"model.layers.{i // 4}.{i % 4}.weight" for i in range(len(shapes)))
        form = np.arange(len(forms))
        total = (int(spans.sum()),)
        offset = np.cumsum(spans) - spans
        found.append(Layout(member=f"{side}{rank}", regions=total, forms=forms, names=names, form=form, offset=offset))
    return found


def sources(holdings: list[Layout], links: PeerLinks) -> Iterator[LocalVersion]:
    """Publishers on the second device, of this process."""
    for one in holdings:
        held = LocalVersion(one, [arena(nbytes, "cuda:1") for nbytes in one.regions], links)
        held.begin(1)
        held.ready()
        yield held


def takes(nbytes: int, links: PeerLinks) -> None:
    """Two publishers' rows to one of two receivers' columns and rows, digests on; then the flip."""
    holdings, wants = layouts("p", nbytes, (0, 0), 2), layouts("s", nbytes, (0, 1), 2)
    begun = time.perf_counter()
    part = plan_sync(holdings, wants).part(0)
    planned = time.perf_counter() - begun
    given = {one.layout.member: LocalLink(one) for one in sources(holdings, links)}
    live = [arena(size, "cuda:0") for size in wants[0].regions]
    with StagingCopy(live, links) as staging_copy:
        trace = Trace(enabled=False)
        transfer = Transfer(part, staging_copy.regions, trace=trace)
        reports = [transfer.run(given) for _ in range(REPEATS + 1)]
        seconds, last = [one.seconds for one in reports], reports[-1]
        busy = {f"{name}_busy_s": one / (REPEATS + 1) for name, one in trace.busy_s().items()}
        parts = {"wire_s": last.wire_s, "ready_s": last.ready_s, "digest_s": last.digest_s, "planned_s": planned}
        parts |= busy
        say("take, in one process", part.nbytes, seconds[1:], **{key: round(v, 4) for key, v in parts.items()})
        say("flip of a part", part.nbytes, timed(lambda: staging_copy.flip(part)))


def flips(nbytes: int) -> None:
    """Whole regions on one device."""
    dst, src = arena(nbytes, "cuda:0"), arena(nbytes, "cuda:0")
    copy = MemoryCopy([dst], [src])
    copy.run()
    say("flip of whole regions", nbytes, [copy.run() for _ in range(REPEATS)])


def snapshots(nbytes: int, host_nbytes: int, links: PeerLinks) -> None:
    """A publisher's memory to its own device, and to pinned host memory."""
    for on_host, size in ((False, nbytes), (True, host_nbytes)):
        one = layouts("p", size, (0, 0), 1)[0]
        live = [arena(length, "cuda:0") for length in one.regions]
        begun = time.perf_counter()
        with VersionSnapshot(one, live, links, on_host=on_host) as replica:
            made = time.perf_counter() - begun
            replica.snapshot(0)
            seconds = [replica.snapshot(1) for _ in range(REPEATS)]
        where = "pinned host memory" if on_host else "the device"
        say(f"snapshot to {where}", sum(one.regions), seconds, made_s=round(made, 2))


def main() -> None:
    """All of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--host-gb", type=float, default=4.0)
    options = parser.parse_args()
    nbytes, host_nbytes = (int(gb * GB) >> 28 << 28 for gb in (options.gb, options.host_gb))
    with open_links(only=["cuda_ipc", "shm"]) as links:
        digests(nbytes)
        if torch.cuda.device_count() > 1:
            reads(nbytes, links)
            takes(4 * nbytes, links)
        torch.cuda.empty_cache()
        flips(4 * nbytes)
        snapshots(nbytes, host_nbytes, links)


if __name__ == "__main__":
    main()
