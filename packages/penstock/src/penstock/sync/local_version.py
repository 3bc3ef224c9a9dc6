"""The memory that one rank serves: the registrations, the layout, the version, and the ready rows.

The owner calls `fence` before bytes change, then `begin`, and then `ready` for filled rows. A reader requests a map and
digests, and then reads. If the generation is unchanged afterwards, the bytes belong to the map's version.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta

from penstock.cuda.events import record_events
from penstock.digest.strip import Strips
from penstock.errors import ConfigError, DestinationError, DeviceOutOfMemory, PlanError, StaleDescriptor
from penstock.holding.digester import PrecomputedDigests
from penstock.holding.holding import Holding
from penstock.holding.regions import VersionRegions, locate
from penstock.hub.messages import prepare
from penstock.plan.layout import Layout
from penstock.sync.messages import PackReply
from penstock.sync.packer import Packer
from penstock.transport.choose import PeerLinks
from penstock.transport.protocol import Memory
from penstock.types import I64, U64

# Seconds between two checks in `settle`, which runs inside `publish`. A longer sleep would delay all receivers.
_NAP_S = 0.0002

MAX_METADATA_KEYS = 16
MAX_METADATA_CHARS = 64 << 10
"""Limits for the metadata of a version. An adapter's configuration takes 1 to 2 KiB, and a configuration that names
each of 1,000 modules takes 40 KiB."""


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise ConfigError unless these strings are valid metadata for a version."""
    for key, text in metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ConfigError(f"metadata of a version must map str to str, but {key!r} has type {type(text).__name__}")
        if len(key) > MAX_METADATA_CHARS or len(text) > MAX_METADATA_CHARS:
            hint = f"pass at most {MAX_METADATA_CHARS} characters, or publish a tensor instead"
            raise ConfigError(
                f"metadata {key[:64]!r} of a version has {max(len(key), len(text))} characters", hint=hint
            )
    if len(metadata) > MAX_METADATA_KEYS:
        raise ConfigError(f"a version can have at most {MAX_METADATA_KEYS} metadata entries, not {len(metadata)}")


_Text = Annotated[str, Meta(max_length=MAX_METADATA_CHARS)]


class VersionMap(msgspec.Struct, frozen=True, kw_only=True):
    """The descriptors with which a peer reads one generation of a rank's memory."""

    member: str
    version: int
    generation: int
    sizes: tuple[int, ...]
    """Size of each region in bytes."""
    regions: tuple[dict[str, bytes], ...]
    """Encoded descriptors of each region, by transport."""
    is_ready: bool = False
    """Whether all rows were ready when the map was created, so that reads need not wait for digests."""
    metadata: Annotated[dict[_Text, _Text], Meta(max_length=MAX_METADATA_KEYS)] = {}
    """Metadata that the trainer published with the version."""
    address: str = ""
    """Registration of the memory (`Layout.address`). Plans for a different registration have different offsets."""
    pack_buffer_bytes: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Maximum number of bytes in short runs that one request packs (`LocalVersion.pack`). 0 means no packing."""

    def __post_init__(self) -> None:
        # Check a map from another process, because readers use a region's number as an index into `sizes`.
        if len(self.regions) != len(self.sizes):
            raise ValueError(f"the map has {len(self.regions)} regions, but {len(self.sizes)} sizes")


prepare(VersionMap)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of strips, or None while their bytes are not ready."""

    digests: U64 | None
    num_ready: int
    """Number of ready rows in this version, which grows while the source makes progress."""


class LocalVersion(Holding):
    """The memory of one rank and its version, which is None between a fence and the next `begin`. Thread-safe.

    The owner of the memory calls `fence`, `begin` and `ready`. Server threads call the remaining methods.
    """

    regions: VersionRegions

    def __init__(
        self,
        layout: Layout,
        memories: Sequence[Memory],
        links: PeerLinks,
        *,
        precomputed: Sequence[PrecomputedDigests] = (),
        pack_bytes: int = 0,
    ) -> None:
        layout.check()
        if layout.regions != tuple(memory.nbytes for memory in memories):
            raise PlanError(f"the layout of {layout.member} describes different regions from its memory")
        super().__init__(VersionRegions(memories, links, precomputed=precomputed))
        self.layout = layout
        self.packer = Packer(links, pack_bytes) if pack_bytes else None
        self.version: int | None = None
        self.metadata: Mapping[str, str] = {}
        self._rows = _RowSpans(layout)
        self._is_ready = np.zeros(len(layout.names), bool)
        self._not_ready: I64 = np.zeros(0, np.int64)
        self._events: list[torch.cuda.Event] = []
        self._is_closed = False

    @property
    def num_ready(self) -> int:
        """Return the number of ready rows in this version."""
        return int(self._is_ready.sum())

    def fence(self) -> None:
        """Make every map stale, and end the version. Call this before any byte changes."""
        with self.lock:
            self._check_open()
            super().fence()
            if self.packer is not None:
                self.packer.fence()
            self.version = None
            self._is_ready[:] = False
            self._events.clear()

    def begin(self, version: int, metadata: Mapping[str, str] | None = None) -> None:
        """Begin a version without ready rows. Raise PlanError unless the previous version was fenced."""
        with self.lock:
            self._check_open()
            if self.version is not None:
                message = f"cannot begin version {version}, because the memory still has version {self.version}"
                raise PlanError(message, hint="call fence() first")
            self.version = version
            self.metadata = dict(metadata or {})
            self._count()
            self.wake()

    def ready(self, rows: I64 | Sequence[int] | None = None, *, is_written: bool = False) -> None:
        """Let readers read `rows`, which are filled. None means all rows.

        Unless `is_written` is set, readers wait for the kernels queued on the current stream.
        """
        with self.lock:
            self._check_open()
            if self.version is None:
                raise PlanError("cannot mark rows as ready, because no version was begun", hint="call begin() first")
            self._is_ready[slice(None) if rows is None else np.asarray(rows, np.int64)] = True
            if not is_written:
                # Digests wait for these events, so the trainer need not wait. Drop finished events to bound the list.
                self._events = [pending for pending in self._events if not pending.query()]
                self._events += record_events({memory.device for memory in self.regions.memories} - {"cpu"})
            self._count()
            self.wake()

    def settle(self, stall_s: float) -> None:
        """Wait until the kernels that fill the ready rows have finished, or for `stall_s` seconds."""
        deadline = time.monotonic() + stall_s
        while time.monotonic() < deadline:
            with self.lock:
                if all(event.query() for event in self._events):
                    return
            time.sleep(_NAP_S)

    def _count(self) -> None:
        # With prefix sums, one subtraction shows whether a span contains a row that is not ready.
        self._not_ready = np.cumsum(np.append(False, ~self._is_ready[self._rows.order]), dtype=np.int64)

    def map(self) -> VersionMap:
        """Return the map with which peers read this generation. Raise StaleDescriptor if there is no version."""
        with self.lock:
            self._check_open()
            if self.version is None:
                raise StaleDescriptor("this rank currently has no version", uri=self.layout.member)
            return VersionMap(
                member=self.layout.member,
                version=self.version,
                generation=self.generation,
                sizes=self.regions.sizes,
                regions=self.regions.descriptors(),
                is_ready=not self._not_ready[-1] and all(event.query() for event in self._events),
                metadata=dict(self.metadata),
                address=self.layout.address,
                pack_buffer_bytes=0 if self.packer is None else self.packer.buffer_bytes,
            )

    def digests(self, strips: Strips, *, version: int, generation: int, wait_s: float) -> Answer:
        """Return the digest of each strip when all rows in the strips are ready, or None after `wait_s` seconds."""
        strips.check(self.regions.nbytes)
        events = self._wait_ready(strips, version, generation, time.monotonic() + wait_s)
        if events is None:
            return Answer(digests=None, num_ready=self.num_ready)
        num_ready = self.num_ready
        # Do not hold the lock, because a fence must not wait for digests. After a fence, the check below fails.
        digests = self.regions.digests(strips, after=events)
        with self.lock:
            self._check(version, generation)
        return Answer(digests=digests, num_ready=num_ready)

    def pack(self, strips: Strips, *, version: int, generation: int, wait_s: float) -> PackReply:
        """Pack strips from one region into a buffer when their rows are ready, and let the caller read the buffer."""
        strips.check(self.regions.nbytes)
        packer = self.packer
        region = np.unique(locate(self.regions.first, strips.at, strips.stop))
        # Sum Python integers, because the sum of hostile lengths could overflow int64.
        if packer is None or len(region) != 1 or sum(strips.nbytes.tolist()) > packer.buffer_bytes:
            limit = 0 if packer is None else packer.buffer_bytes
            raise PlanError(f"cannot pack {len(strips)} strips from {len(region)} regions into {limit} bytes")
        deadline = time.monotonic() + wait_s
        events = self._wait_ready(strips, version, generation, deadline)
        if events is None:
            return PackReply(progress=self._progress(packer))
        self.regions.require_there(region.tolist())
        memory = self.regions.memories[int(region[0])]
        try:
            buffer = packer.take(memory.device, deadline - time.monotonic())
        except (ConfigError, DeviceOutOfMemory, DestinationError) as error:
            return PackReply(why=error.message, progress=self._progress(packer))
        if buffer is None:
            return PackReply(progress=self._progress(packer), is_full=True)
        try:
            packer.fill(buffer, memory, strips.shifted(-self.regions.first[region[0]]), events)
            with self.lock:
                # Check and grant under one lock, so that no lease is granted after a fence has ended all leases.
                self._check(version, generation)
                regions, lease = packer.grant(buffer)
        except (DeviceOutOfMemory, DestinationError) as error:
            packer.give_back(buffer)
            return PackReply(why=error.message, progress=self._progress(packer))
        except BaseException:
            packer.give_back(buffer)
            raise
        return PackReply(regions=regions, lease=lease, progress=self._progress(packer))

    def hold_packed(self, keep: Sequence[str], release: Sequence[str]) -> None:
        """Extend the leases in `keep`, and end the leases in `release`. See `Packer.hold`."""
        if self.packer is not None:
            self.packer.hold(keep, release)

    def _progress(self, packer: Packer) -> int:
        return self.num_ready + packer.num_packed

    def _wait_ready(
        self, strips: Strips, version: int, generation: int, deadline: float
    ) -> tuple[torch.cuda.Event, ...] | None:
        with self.lock:
            self._check(version, generation)
            if not self._not_ready[-1] or self._are_ready(spans := self._rows.spans(strips)):
                return tuple(self._events)
            self.wait_until(lambda: generation != self.generation or self._are_ready(spans), deadline)
            self._check(version, generation)
            return tuple(self._events) if self._are_ready(spans) else None

    def _are_ready(self, spans: tuple[I64, I64]) -> bool:
        return not (self._not_ready[spans[1]] - self._not_ready[spans[0]]).any()

    def _check(self, version: int, generation: int) -> None:
        self._check_open()
        if (version, generation) != (self.version, self.generation):
            current = "none" if self.version is None else f"version {self.version}"
            message = f"version {version} of generation {generation} is gone, and this rank now has {current}"
            raise StaleDescriptor(message, uri=self.layout.member)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StaleDescriptor("this rank stopped serving its memory", uri=self.layout.member)

    def close(self) -> None:
        """See `Holding.close`. Later calls of other methods raise StaleDescriptor."""
        super().close()
        if self.packer is not None:
            self.packer.close()

    def _mark_closed(self) -> None:
        self._is_closed = True
        self.version = None


class _RowSpans:
    """The rows sorted by their first byte, to find all rows that a strip may touch."""

    def __init__(self, layout: Layout) -> None:
        stop = layout.offset + np.array([form.span_bytes for form in layout.forms], np.int64)[layout.form]
        self.order: I64 = np.argsort(layout.offset, kind="stable")
        self._start: I64 = layout.offset[self.order]
        # Column slices of one tensor interleave, so store the maximum end of all rows up to each row.
        self._reach: I64 = np.maximum.accumulate(stop[self.order]) if len(stop) else stop

    def spans(self, strips: Strips) -> tuple[I64, I64]:
        first = np.searchsorted(self._reach, strips.at, side="right")
        stop = np.searchsorted(self._start, strips.stop, side="left")
        return first, np.maximum(first, stop)
