"""Prepare copies between memories with the same layout, and hold the staging copy that a flip makes live.

The copy engine copies long runs. One kernel per region, or numpy on the host, copies all short runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
import torch

from penstock.cuda.device_memory import memory_of
from penstock.cuda.driver import load_driver
from penstock.cuda.events import wait_events
from penstock.cuda.pack import plan_copy
from penstock.digest.strip import Bytes, Strips, memory_at
from penstock.errors import DestinationError, PenstockError, PlanError
from penstock.holding.regions import VersionRegions, locate
from penstock.lifecycle import Closeable
from penstock.memory.arena import Arena
from penstock.plan.sync import ReceiverPlan
from penstock.segments import Segments
from penstock.transport.choose import PeerLinks
from penstock.transport.protocol import Memory
from penstock.types import I64

SHORT_BYTES = 256 << 10
"""Shorter runs are copied by a kernel, because starting one copy takes 0.7 us, as measured in
benchmarks/results/h200x2_202611/transport.md."""


class _Region(msgspec.Struct, frozen=True, eq=False):
    """The copies within one region. Offsets are the same in source and destination."""

    dst: Memory
    src: Memory
    long: Segments
    short: Strips

    @property
    def device(self) -> str:
        return self.src.device if self.dst.device == "cpu" else self.dst.device

    def queue(self) -> None:
        driver, device = load_driver(), torch.device(self.device)
        at = self.long.dst.astype(np.uint64)
        # Copy all long runs with one driver call, because a Python call takes longer than a copy.
        stream = torch.cuda.current_stream(device).cuda_stream
        to, of = np.uint64(self.dst.address), np.uint64(self.src.address)
        driver.copy(at + to, at + of, self.long.nbytes.astype(np.uint64), stream)
        if len(self.short):
            some = self.short
            dst, src = some.at + self.dst.address, some.at + self.src.address
            plan_copy(dst, src, some.run_bytes, some.num_rows, some.pitch, some.pitch, device).run()

    def copy_on_host(self) -> None:
        to, of = memory_at(self.dst.address, self.dst.nbytes), memory_at(self.src.address, self.src.nbytes)
        for at, nbytes in zip(self.long.dst.tolist(), self.long.nbytes.tolist(), strict=True):
            to[at : at + nbytes] = of[at : at + nbytes]
        for at, *shape in zip(*(column.tolist() for column in self.short.columns), strict=True):
            _strip_view(to, at, *shape)[...] = _strip_view(of, at, *shape)


def _strip_view(memory: Bytes, at: int, run: int, rows: int, pitch: int) -> Bytes:
    return np.lib.stride_tricks.as_strided(memory[at:], (rows, run), (pitch, 1))


class MemoryCopy:
    """A repeatable copy between memories of equal sizes. The regions of a pair are on one device, or one is pinned."""

    def __init__(
        self,
        dst: Sequence[Memory],
        src: Sequence[Memory],
        strips: Strips | None = None,
        streams: Mapping[str, torch.cuda.Stream] | None = None,
    ) -> None:
        sizes = [memory.nbytes for memory in src]
        if sizes != [memory.nbytes for memory in dst]:
            raise PlanError(
                f"cannot copy: the sizes of the source regions ({sizes} bytes) and of the destination differ"
            )
        first = np.cumsum([0, *sizes], dtype=np.int64)
        if strips is None:
            # Leave out empty strips, which `locate` cannot find.
            at = np.flatnonzero(sizes)
            size = np.array(sizes, np.int64)[at]
            strips = Strips(at=first[at], run_bytes=size, num_rows=np.ones(len(at), np.int64), pitch=size)
        strips.check(int(first[-1]))
        region = locate(first, strips.at, strips.stop)
        used = sorted(set(region.tolist()))
        self._regions = [_split(dst[i], src[i], strips[region == i], int(first[i])) for i in used]
        self._streams = streams_of([*dst, *src]) if streams is None else streams
        self.nbytes = int(strips.nbytes.sum())

    def run(
        self, *, stall_s: float = 30.0, meanwhile: Callable[[], None] = lambda: None, mutates: bool = True
    ) -> float:
        """Copy after the work on the current streams. Return the seconds. Raise DestinationError if a device fails."""
        begun = time.perf_counter()
        events = self.queue()
        meanwhile()
        wait_events(events, stall_s, work="copy", mutated=mutates)
        return time.perf_counter() - begun

    def queue(self) -> list[torch.cuda.Event]:
        """Queue the copies after the work on each device's current stream. Return one event per region."""
        events = []
        for name, stream in self._streams.items():
            # Without this wait the copies could read weights that an optimizer step is still writing.
            stream.wait_stream(torch.cuda.current_stream(name))
        for region in self._regions:
            if region.device == "cpu":
                region.copy_on_host()
                continue
            stream = self._streams[region.device]
            with torch.cuda.device(region.device), torch.cuda.stream(stream):
                region.queue()
                # The stall deadline counts from the last completed region.
                events.append(stream.record_event())
        return events


def streams_of(memories: Iterable[Memory]) -> dict[str, torch.cuda.Stream]:
    """Create a stream for each device of the memories."""
    return {name: torch.cuda.Stream(name) for name in {memory.device for memory in memories} - {"cpu"}}


def _split(dst: Memory, src: Memory, strips: Strips, first: int) -> _Region:
    packed = strips.is_packed()
    # Adjacent tensors are merged into one run of many MiB.
    whole, gapped = strips[packed], strips[~packed]
    at = whole.at - first
    joined = Segments(src=at, dst=at, nbytes=whole.nbytes).joined()
    long = joined.nbytes >= SHORT_BYTES
    is_long = gapped.run_bytes >= SHORT_BYTES
    runs = _one_by_one(gapped[is_long], first)
    nbytes = np.concatenate([joined.nbytes[long], runs.nbytes])
    begin = np.concatenate([joined.dst[long], runs.dst])
    small = gapped[~is_long]
    ones = np.ones(int((~long).sum()), np.int64)
    short = Strips(
        at=np.concatenate([joined.dst[~long], small.at - first]),
        run_bytes=np.concatenate([joined.nbytes[~long], small.run_bytes]),
        num_rows=np.concatenate([ones, small.num_rows]),
        pitch=np.concatenate([joined.nbytes[~long], small.pitch]),
    )
    return _Region(dst, src, Segments(src=begin, dst=begin, nbytes=nbytes), short)


def _one_by_one(some: Strips, first: int) -> Segments:
    at: I64 = np.repeat(np.arange(len(some)), some.num_rows)
    number = np.arange(len(at)) - np.repeat(np.cumsum(some.num_rows) - some.num_rows, some.num_rows)
    begin = some.at[at] + number * some.pitch[at] - first
    return Segments(src=begin, dst=begin, nbytes=some.run_bytes[at])


def received(part: ReceiverPlan) -> Strips:
    """Return the strips that a part of the plan fills in the receiver's memory."""
    return Strips(at=part.dst, run_bytes=part.run_bytes, num_rows=part.num_rows, pitch=part.dst_pitch)


def allocate_like(memories: Sequence[Memory], *, is_remappable: bool = False) -> list[Memory]:
    """Allocate arenas with the same sizes on the same devices."""
    copies = []
    for memory in memories:
        # Allocate one byte for an empty region, because its registration needs an address.
        arena = Arena.allocate(max(memory.nbytes, 1), memory.device, is_remappable=is_remappable)
        copies.append(Memory(address=arena.address, nbytes=memory.nbytes, device=arena.device, owner=arena))
    return copies


MAX_RUNS = 1 << 20
"""Maximum number of runs for a flip by exchange. Finding the unfilled bytes between them takes 0.1 s per plan."""
REST_SHARE = 0.25
"""Largest ratio of unfilled to filled bytes for a flip by exchange, which must copy the unfilled bytes."""


def aliases_of(memories: Sequence[Memory]) -> tuple[Memory, ...] | None:
    """Map memory at additional addresses. Return None if some memory, such as host memory, cannot be exchanged."""
    found = [memory_of(memory.address) for memory in memories]
    # A flip exchanges the whole allocation at an address, so the region must cover all of it.
    if not all(one is not None and one.nbytes == memory.nbytes for one, memory in zip(found, memories, strict=True)):
        return None
    arenas = [Arena.over(one.alias()) for one in found if one is not None]
    return tuple(Memory(address=a.address, nbytes=a.nbytes, device=a.device, owner=a) for a in arenas)


class StagingCopy(Closeable):
    """Staging memory for a target's regions, with the same sizes on the same devices.

    A flip copies the staged bytes, or exchanges physical memory if `served` registers remappable memory (`aliases_of`).
    """

    def __init__(self, live: Sequence[Memory], links: PeerLinks, *, served: VersionRegions | None = None) -> None:
        self._live = tuple(live)
        self._served = served
        self.regions = VersionRegions(allocate_like(live, is_remappable=served is not None), links)
        if any(memory_of(memory.address) is None for memory in self.regions.memories):
            self._served = None
        self._copies: dict[tuple[str, int, int], MemoryCopy] = {}
        self._rest: tuple[str, Strips | None] = ("", None)

    def flip(self, part: ReceiverPlan, *, stall_s: float = 30.0) -> bool:
        """Make a part's strips live. No process may use the live memory during the call.

        Return whether memory was exchanged. A DestinationError with `mutated` means that the target mixes two versions.
        """
        rest = None
        if self._served is not None:
            for memory in self._live:
                if (live := memory_of(memory.address)) is not None and not live.is_mapped:
                    message = (
                        f"a failed flip left {memory.nbytes} bytes of the target on {memory.device} without memory"
                    )
                    raise DestinationError(message, mutated=True, hint="restart this engine")
            if self._rest[0] != part.key:
                self._rest = part.key, rest_of(received(part), self.regions.first, part.nbytes)
            rest = self._rest[1]
        if rest is None:
            # Copy only filled strips. The engine may have changed the other bytes of a region.
            self._copy(part, self._live, self.regions.memories, received(part)).run(stall_s=stall_s)
            return False
        if len(rest):
            self._copy(part, self.regions.memories, self._live, rest).run(stall_s=stall_s, mutates=False)
        self._exchange()
        return True

    def _copy(self, part: ReceiverPlan, dst: Sequence[Memory], src: Sequence[Memory], strips: Strips) -> MemoryCopy:
        # The addresses belong to the key, because a flip by exchange changes them.
        key = part.key, dst[0].address if dst else 0, src[0].address if src else 0
        if key not in self._copies:
            kept = {name: copy for name, copy in self._copies.items() if name[0] == part.key}
            self._copies = {**kept, key: MemoryCopy(dst, src, strips)}
        return self._copies[key]

    def _exchange(self) -> None:
        assert self._served is not None
        done: list[tuple[Memory, Memory]] = []
        try:
            for live, served, staged in zip(self._live, self._served.memories, self.regions.memories, strict=True):
                done.append((live, served))
                _map_memory(live, staged)
        except PenstockError as error:
            for live, former in done:
                try:
                    _map_memory(live, former)
                except PenstockError:
                    error.mutated = True  # the driver also refused to undo the exchange
            raise
        self.regions.exchange(self._served)

    def close(self) -> None:
        """Close the registrations and release the memory. Idempotent."""
        self.regions.close()
        self._copies.clear()


def _map_memory(live: Memory, other: Memory) -> None:
    mine, new = memory_of(live.address), memory_of(other.address)
    assert mine is not None
    assert new is not None
    mine.take(new)


def rest_of(filled: Strips, first: I64, nbytes: int) -> Strips | None:
    """Return the strips that `filled` does not cover in the regions at `first`, or None if they are too many."""
    whole = filled.is_packed()
    gapped = filled[~whole]
    if int(gapped.num_rows.sum()) > MAX_RUNS:
        return None
    runs = _one_by_one(gapped, 0)
    # Add empty runs at region edges, because a strip must not cross an edge.
    begin = np.concatenate([filled.at[whole], runs.dst, first])
    stop = np.concatenate([filled.stop[whole], runs.dst + runs.nbytes, first])
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(stop[order])
    gaps = begin[1:] - reach[:-1]
    some = np.flatnonzero(gaps > 0)
    size = gaps[some]
    if size.sum() > REST_SHARE * nbytes:
        return None
    return Strips(at=reach[some], run_bytes=size, num_rows=np.ones(len(some), np.int64), pitch=size)
