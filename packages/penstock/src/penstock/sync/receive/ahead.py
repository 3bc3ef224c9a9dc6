"""A transfer in two parts: bytes that are staged while the engine serves, and the rest, read into the live memory.

In: a receiver's `ReceiverPlan`, its regions, a bound in bytes. Out: a run like that of `Transfer`, which pauses the
engine only for what does not fit the bound.
Not here: the steps of a run and their verification (`transfer`), the choice of the version and retries (`update`).

    part --split--> first bytes: read into packed memory, verify | pause | the rest: read in place, verify; then copy
                                                                            the first bytes to their places

The order after the pause is deliberate: if a source is lost before a byte of the rest has arrived, the live memory is
untouched and the engine goes on with the version before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from penstock.cuda.driver import load_driver, ordinal
from penstock.cuda.events import wait_events
from penstock.digest.strip import Strips, memory_at
from penstock.engine.threads import KeptThreads
from penstock.errors import PenstockError
from penstock.memory.arena import Arena
from penstock.plan.sync import ReceiverPlan
from penstock.segments import Rectangles
from penstock.sync.local_version import VersionRegions, locate
from penstock.sync.receive.packed import ShortRuns
from penstock.sync.receive.sources import LinkReport, SourceLink, TransferReport
from penstock.sync.receive.transfer import ChangedRanges, Transfer
from penstock.transport.protocol import Memory
from penstock.types import I64, U64

ALIGN_BYTES = 16
"""Alignment of each strip in the packed memory: the widest load of the kernel that copies short runs."""
_SEGMENT_COLUMNS = ("row", "source", "src", "dst", "run_bytes", "num_rows", "src_pitch", "dst_pitch")


def split(part: ReceiverPlan, ahead_bytes: int) -> tuple[ReceiverPlan, ReceiverPlan]:
    """Return the segments of a part that fit `ahead_bytes` once they are packed, in order, and the other segments.

    The segment at the edge is cut between two rows, or inside its only row. The key of both is the part's own.
    """
    padded = _padded(part.run_bytes * part.num_rows)
    num = int(np.searchsorted(np.cumsum(padded), ahead_bytes, side="right"))
    left = ahead_bytes - int(padded[:num].sum())
    before = {name: getattr(part, name)[:num] for name in _SEGMENT_COLUMNS}
    after = {name: getattr(part, name)[num:] for name in _SEGMENT_COLUMNS}
    if num < len(part.row):
        edge = {name: int(getattr(part, name)[num]) for name in _SEGMENT_COLUMNS}
        run = left // ALIGN_BYTES * ALIGN_BYTES
        # Of what is left once it is padded: rows that fit before may not fit after.
        rows = min(run // edge["run_bytes"], edge["num_rows"] - 1)
        if edge["num_rows"] > 1 and rows:
            head = edge | {"num_rows": rows}
            tail = edge | {"num_rows": edge["num_rows"] - rows}
            tail |= {end: edge[end] + rows * edge[f"{end}_pitch"] for end in ("src", "dst")}
        elif edge["num_rows"] == 1 and run:
            head = edge | {"run_bytes": run}
            tail = edge | {"run_bytes": edge["run_bytes"] - run} | {end: edge[end] + run for end in ("src", "dst")}
        else:
            head, tail = {}, edge
        if head:
            before = {name: np.append(column, head[name]) for name, column in before.items()}
        after = {name: np.append(tail[name], column[1:]) for name, column in after.items()}
    # The edge's bucket ends in one half and goes on in the other.
    count = len(before["row"])
    first = np.minimum(part.bucket_first, count)
    rest = np.maximum(part.bucket_first - num, 0)
    rest[-1] = len(after["row"])
    first[-1] = count
    return replace(part, bucket_first=first, **before), replace(part, bucket_first=rest, **after)


def _padded(nbytes: I64) -> I64:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


class SplitTransfer:
    """A receiver's part, of which the first bytes are staged in packed memory; `run` it for each version.

    Attributes:
        part: the whole part.
        staging_bytes: bytes of the packed memory, which is kept from one version to the next.
        ahead_bytes: bytes of the part that are staged.
        proven: strips of the receiver's memory with their verified digests, of the last run.
        lost: the source whose failure ended the last run; None: no source failed.

    Args:
        part: of the planner.
        into: the receiver's memory.
        ahead_bytes: bound of the packed memory.
        names, watermark_bytes, stall_s, threads: see `Transfer`.

    Raises:
        DeviceOutOfMemory, DestinationError: there is no room for the packed memory.
    """

    def __init__(
        self,
        part: ReceiverPlan,
        into: VersionRegions,
        *,
        ahead_bytes: int,
        names: Sequence[str],
        watermark_bytes: int,
        stall_s: float,
        threads: KeptThreads | None = None,
    ) -> None:
        self.part = part
        self._stall_s = stall_s
        self._into = into
        self._live, rest = split(part, ahead_bytes)
        self._packed = _Packed(self._live, into)
        self.staging_bytes = self._packed.nbytes
        self.ahead_bytes = self._live.nbytes
        options = {"names": names, "watermark_bytes": watermark_bytes, "stall_s": stall_s, "threads": threads}
        self._first = Transfer(self._packed.part, self._packed.regions, delta=ChangedRanges(), **options)  # type: ignore[arg-type]
        self._rest = Transfer(rest, into, delta=ChangedRanges(), **options)  # type: ignore[arg-type]
        self.proven: list[tuple[Strips, U64]] = []
        self.lost: str | None = None

    @property
    def moved_bytes(self) -> int:
        """Return the bytes verified in this run, or the last."""
        return self._first.moved_bytes + self._rest.moved_bytes

    def run(self, sources: Mapping[str, SourceLink], before_live: Callable[[], None]) -> TransferReport:
        """Read the part; return once every byte is verified and in its place.

        Args:
            sources: see `Transfer.run`.
            before_live: called once the first bytes are verified: the live memory may change when it returns.

        Raises:
            PenstockError: as `Transfer.run`; `mutated` says if a byte of the live memory was touched.
        """
        self.lost = None
        self.proven = []
        # The count of the run before would show as progress of this one.
        self._rest.moved_bytes = 0
        try:
            first = self._first.run(sources)
        except PenstockError as error:
            # Only the packed memory was written to.
            error.mutated = False
            self.lost = self._first.lost
            raise
        before_live()
        try:
            rest = self._rest.run(sources)
        except PenstockError:
            self.lost = self._rest.lost
            raise
        self._packed.flip(stall_s=self._stall_s)
        self.proven = [(self._packed.in_place(strips), wanted) for strips, wanted in self._first.proven]
        self.proven += self._rest.proven
        return _joined(first, rest)

    def summary(self, report: TransferReport) -> str:
        """Return a line of text about how much of the version was read."""
        whole = f"moved {report.moved_bytes} of {report.nbytes} bytes"
        return f"delta: {whole}, {self.ahead_bytes} of the version staged before the pause"

    def close(self) -> None:
        """Free the packed memory. Idempotent."""
        self._packed.close()


class _Packed:
    """Memory in which the strips of a part lie one after the other, on the devices of the live memory."""

    def __init__(self, live: ReceiverPlan, into: VersionRegions) -> None:
        self._live = live
        self._into = into
        self._region = locate(into.first, live.dst, live.dst + (live.num_rows - 1) * live.dst_pitch + live.run_bytes)
        padded = _padded(live.run_bytes * live.num_rows)
        devices = list(dict.fromkeys(memory.device for memory in into.memories))
        number = np.array([devices.index(memory.device) for memory in into.memories], np.int64)
        on = number[self._region] if len(padded) else np.zeros(0, np.int64)
        memories = []
        self._at = np.zeros(len(padded), np.int64)
        base = 0
        for i, device in enumerate(devices):
            mine = np.flatnonzero(on == i)
            self._at[mine] = base + np.cumsum(padded[mine]) - padded[mine]
            nbytes = int(padded[mine].sum())
            base += nbytes
            # One byte for an empty region, whose registration needs an address.
            arena = Arena.allocate(max(nbytes, 1), device)
            memories.append(Memory(address=arena.address, nbytes=nbytes, device=arena.device, owner=arena))
        self.nbytes = base
        self.regions = VersionRegions(memories, into.links)
        self.part = replace(live, dst=self._at, dst_pitch=live.run_bytes)
        # Sorted for `in_place`: with several devices the order of the part is not that of the memory.
        self._order = np.argsort(self._at, kind="stable")
        self._copies = [self._rectangles(i) for i in range(len(into.memories))]
        self._queues: dict[int, tuple[torch.cuda.Stream, Callable[[], None]]] = {}

    def _rectangles(self, region: int) -> Rectangles:
        """Return the copies into one region of the live memory, with addresses."""
        mine = np.flatnonzero(self._region == region)
        live, memory = self._live, self._into.memories[region]
        home = locate(self.regions.first, self._at[mine], self._at[mine] + 1)
        base = np.array([memory.address for memory in self.regions.memories], np.int64) - self.regions.first[:-1]
        return Rectangles(
            src=self._at[mine] + base[home],
            dst=live.dst[mine] - int(self._into.first[region]) + memory.address,
            run_bytes=live.run_bytes[mine],
            num_rows=live.num_rows[mine],
            src_pitch=live.run_bytes[mine],
            dst_pitch=live.dst_pitch[mine],
        )

    def flip(self, *, stall_s: float) -> None:
        """Copy the strips to their places.

        Raises:
            DestinationError: the device failed, or finished no region for `stall_s`; `mutated`.

        Order: while nothing reads the live memory.
        """
        events: list[torch.cuda.Event] = []
        for region, rows in enumerate(self._copies):
            if not len(rows):
                continue
            device = torch.device(self._into.memories[region].device)
            if device.type == "cpu":
                _copy_on_host(rows)
                continue
            if region not in self._queues:
                stream = torch.cuda.Stream(device)
                lay_out = load_driver().lay_out_rectangles
                self._queues[region] = stream, lay_out(rows, ordinal(str(device)), stream.cuda_stream)
            stream, queue = self._queues[region]
            # The engine's last forward pass may still be queued.
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.device(device):
                queue()
                event = torch.cuda.Event()
                event.record(stream)
            events.append(event)
        wait_events(events, stall_s, work="copy", mutated=True)

    def in_place(self, strips: Strips) -> Strips:
        """Return the strips of the live memory that these strips of the packed memory were copied to."""
        at = self._order[np.searchsorted(self._at[self._order], strips.at, side="right") - 1]
        live = self._live
        skipped: I64 = strips.at - self._at[at]
        row: I64 = skipped // live.run_bytes[at]
        column: I64 = skipped % live.run_bytes[at]
        return Strips(
            at=live.dst[at] + row * live.dst_pitch[at] + column,
            run_bytes=strips.run_bytes,
            num_rows=strips.num_rows,
            # The pitch of a single run means nothing, and must not be below the run.
            pitch=np.where(strips.num_rows > 1, live.dst_pitch[at], strips.run_bytes),
        )

    def close(self) -> None:
        """End the registration and free the memory. Idempotent."""
        self.regions.close()
        self._queues.clear()


def _copy_on_host(rows: Rectangles) -> None:
    columns = (rows.src, rows.dst, rows.run_bytes, rows.num_rows, rows.dst_pitch)
    for src, dst, run, count, pitch in zip(*(column.tolist() for column in columns), strict=True):
        to = memory_at(dst, (count - 1) * pitch + run)
        of = memory_at(src, count * run).reshape(count, run)
        np.lib.stride_tricks.as_strided(to, (count, run), (pitch, 1))[...] = of


def _joined(first: TransferReport, rest: TransferReport) -> TransferReport:
    """Return the figures of two runs, one after the other, as of one."""
    links = [*first.links, *rest.links]
    members = dict.fromkeys(link.member for link in links)
    return TransferReport(
        nbytes=first.nbytes + rest.nbytes,
        moved_bytes=first.moved_bytes + rest.moved_bytes,
        seconds=first.seconds + rest.seconds,
        wire_s=first.wire_s + rest.wire_s,
        ready_s=first.ready_s + rest.ready_s,
        digest_s=first.digest_s + rest.digest_s,
        peak_bytes=max(first.peak_bytes, rest.peak_bytes),
        links=tuple(_one([link for link in links if link.member == member]) for member in members),
    )


def _one(links: Sequence[LinkReport]) -> LinkReport:
    """Return the figures of one source in two runs."""
    # A run that read nothing from a source has no path.
    return LinkReport(
        member=links[0].member,
        path="+".join(dict.fromkeys(link.path for link in links if link.path)),
        why="; ".join(dict.fromkeys(link.why for link in links if link.why)),
        nbytes=sum(link.nbytes for link in links),
        wire_s=sum(link.wire_s for link in links),
        ready_s=sum(link.ready_s for link in links),
        short_runs=ShortRuns(
            packed_bytes=sum(link.short_runs.packed_bytes for link in links),
            num_runs=sum(link.short_runs.num_runs for link in links),
            num_reads=sum(link.short_runs.num_reads for link in links),
            why="; ".join(dict.fromkeys(link.short_runs.why for link in links if link.short_runs.why)),
        ),
    )
