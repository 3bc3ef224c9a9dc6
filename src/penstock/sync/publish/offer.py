"""The rows that a publisher rank serves: the plain ones, and tagged ones that are filled at each publish.

In: declared rows, `transforms=`. Out: all rows on offer; a version's tagged rows, exact across shards.
Not here: memory and jobs (`transformed`), other ranks' elements (`boundary_exchange`), versions (`publisher`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from penstock.errors import BudgetTooSmall, PlanError
from penstock.peer.member import Member
from penstock.sync.publish.boundary_exchange import BoundaryExchange
from penstock.sync.publish.transformed import Transformed, Transforms, choose, required_bytes
from penstock.sync.shards import Row, regions_of
from penstock.transform.formats import format_of
from penstock.transport.protocol import Memory
from penstock.types import I64


class Offer:
    """The rows that one rank serves; a context manager by its `close`.

    Attributes:
        kept: rows served without a transformation.
        memories: the memory that a snapshot copies: behind `kept`, and for a host copy behind the tagged rows too.
        filled: the regions of the tagged rows that are not copied.
        is_copied: whether the tagged rows are copied too, once they are filled.
        seconds: the time of the last `fill`.

    Args:
        rows: all declared rows.
        transforms: see `publisher`; None: only plain rows are served.
        keep_plain: serve tagged rows without the transformation too.
        world_size: the number of ranks.
        copies: where `memories` are copied to: `device` or `cpu`; None: they are not copied.
        memory_bytes: bound of the copies and the transformed tensors together.

    Raises:
        ConfigError: an unknown tag. PlanError: a tag that no tensor here can have.
        BudgetTooSmall: more than `memory_bytes` is needed; has the minimum.
        DeviceOutOfMemory, DestinationError: there is not enough memory.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        transforms: Transforms | None,
        *,
        keep_plain: bool,
        world_size: int,
        copies: str | None,
        memory_bytes: int | None,
    ) -> None:
        chosen = () if transforms is None else choose(transforms, rows)
        # With several ranks, one of them may have none of the chosen tensors.
        if transforms is not None and not chosen and world_size == 1:
            raise PlanError(f"no tensor can be transformed to {transforms!r}", hint="change the patterns, or the tags")
        names = {choice.row.name for choice in chosen}
        self.kept = tuple(row for row in rows if keep_plain or row.name not in names)
        self.memories = regions_of(self.kept)
        nbytes, boundary_bytes = required_bytes(chosen)
        # A host snapshot reads from pinned host memory, but quantising runs on the device: fill there, then copy.
        self.is_copied = copies == "cpu" and any(choice.row.tensor.device.type != "cpu" for choice in chosen)
        copied = (sum(memory.nbytes for memory in self.memories) if copies else 0) + nbytes * self.is_copied
        needed = copied + nbytes + boundary_bytes
        if memory_bytes is not None and needed > memory_bytes:
            message = (
                f"publishing needs {copied} bytes for copies, {nbytes} for transformed tensors and {boundary_bytes} "
                "for blocks at the edges of shards"
            )
            raise BudgetTooSmall(message, minimum_bytes=needed)
        self.transformed = Transformed(chosen)
        self.rows = (*self.kept, *self.transformed.rows)
        self.filled: tuple[Memory, ...] = regions_of(self.transformed.rows)
        if self.is_copied:
            self.memories, self.filled = (*self.memories, *self.filled), ()
        # One row for each box: it may be chosen in several formats.
        blocked = {id(choice.row): choice.row for choice in chosen if choice.form.scaling != "none"}
        self._held = tuple(blocked.values())
        tags = () if transforms is None else (transforms,) if isinstance(transforms, str) else tuple(transforms)
        # By the tags alone, not by `chosen`: every rank must take part in the exchange, also one that needs nothing.
        self._has_blocks = world_size > 1 and any(format_of(tag).scaling != "none" for tag in tags)
        self._boundary_exchange: BoundaryExchange | None = None
        self.seconds = 0.0

    @property
    def plain(self) -> I64 | None:
        """Return the numbers of the rows that are ready without a `fill`; None: all."""
        return np.arange(len(self.kept)) if self.transformed.rows else None

    @property
    def moved_bytes(self) -> int:
        """Return the bytes read from other ranks for the last version."""
        return 0 if self._boundary_exchange is None else self._boundary_exchange.moved_bytes

    def connect(self, member: Member, name: str, *, rank: int, world_size: int, stall_s: float) -> None:
        """Join the boundary exchange of the ranks, where there is one. Order: before any `fill`."""
        if self._has_blocks:
            self._boundary_exchange = BoundaryExchange(
                member,
                name,
                self._held,
                self.transformed.wants,
                is_first=rank == 0,
                world_size=world_size,
                stall_s=stall_s,
            )

    def fill(self, version: int, run: str, ready: Callable[[I64], None], *, stall_s: float) -> None:
        """Transform the parameters' current values; call `ready` with the rows of the layout that became ready.

        Raises:
            PeerLost, SourceStalled: the exchange failed on a rank; see `BoundaryExchange.exchanged`.
            DestinationError: a device failed.
        """
        begun = time.perf_counter()
        with (
            contextlib.nullcontext()
            if self._boundary_exchange is None
            else self._boundary_exchange.exchanged(version, run)
        ):
            self.transformed.fill(lambda rows: ready(len(self.kept) + rows), stall_s=stall_s)
        self.seconds = time.perf_counter() - begun

    def close(self) -> None:
        """End the registrations and connections. Idempotent."""
        if self._boundary_exchange is not None:
            self._boundary_exchange.close()
