"""The rows that a publisher rank serves: as they are, and under tags, filled at each publish.

In: declared rows, `transforms=`. Out: all rows shown; a version's tagged rows, exact across shards.
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
from penstock.sync.publish.transformed import Transformed, Transforms, choose, room
from penstock.sync.shards import Row, regions_of
from penstock.transform.formats import format_of
from penstock.transport.protocol import Memory
from penstock.types import I64


class Offer:
    """The rows that one rank serves; a context manager by its `close`.

    Attributes:
        kept: rows shown as they are.
        memories: what a snapshot copies: behind `kept`, and on its way to host memory behind the tagged rows too.
        filled: the regions behind those: of the tagged rows.
        is_copied: whether the tagged rows are copied too, once they are filled.
        seconds: that the last `fill` took.

    Args:
        rows: all that is declared.
        transforms: see `publisher`; None: everything is shown as it is alone.
        keep_plain: show as it is also what is tagged.
        world_size: ranks.
        copies: where `memories` are copied to: `device` or `cpu`; None: nowhere.
        memory_bytes: bound of all that.

    Raises:
        ConfigError: a tag that is none. PlanError: one that no tensor here can have.
        BudgetTooSmall: it takes more than `memory_bytes`; has the least.
        DeviceOutOfMemory, DestinationError: there is no room.
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
        if transforms is not None and not chosen and world_size == 1:
            raise PlanError(f"no tensor can be had as {transforms!r}", hint="change the patterns, or the tags")
        names = {one.row.name for one in chosen}
        self.kept = tuple(row for row in rows if keep_plain or row.name not in names)
        self.memories = regions_of(self.kept)
        nbytes, seam_bytes = room(chosen)
        self.is_copied = copies == "cpu" and any(one.row.tensor.device.type != "cpu" for one in chosen)
        copied = (sum(memory.nbytes for memory in self.memories) if copies else 0) + nbytes * self.is_copied
        needed = copied + nbytes + seam_bytes
        if memory_bytes is not None and needed > memory_bytes:
            message = (
                f"{copied} bytes of copies, {nbytes} of transformed tensors, {seam_bytes} of blocks at shards' edges"
            )
            raise BudgetTooSmall(message, minimum_bytes=needed)
        self.transformed = Transformed(chosen)
        self.rows = (*self.kept, *self.transformed.rows)
        self.filled: tuple[Memory, ...] = regions_of(self.transformed.rows)
        if self.is_copied:
            self.memories, self.filled = (*self.memories, *self.filled), ()
        # One row for each box: it may be chosen in several formats.
        blocked = {id(one.row): one.row for one in chosen if one.form.scaling != "none"}
        self._held = tuple(blocked.values())
        tags = () if transforms is None else (transforms,) if isinstance(transforms, str) else tuple(transforms)
        self._has_blocks = world_size > 1 and any(format_of(tag).scaling != "none" for tag in tags)
        self._boundary_exchange: BoundaryExchange | None = None
        self.seconds = 0.0

    @property
    def plain(self) -> I64 | None:
        """Numbers of the rows that are whole without a `fill`; None: all."""
        return np.arange(len(self.kept)) if self.transformed.rows else None

    @property
    def moved_bytes(self) -> int:
        """Taken of other ranks in the last version."""
        return 0 if self._boundary_exchange is None else self._boundary_exchange.moved_bytes

    def connect(self, member: Member, name: str, *, rank: int, world_size: int, stall_s: float) -> None:
        """Take part in the exchange of the ranks, where there is one. Order: before any `fill`."""
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
        """Transform the parameters as they are; `ready` is told rows of the layout as they are whole.

        Raises:
            PeerLost, SourceStalled: a rank could not be given, or did not give; see `BoundaryExchange.exchanged`.
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
        """End the registrations and conversations. Idempotent."""
        if self._boundary_exchange is not None:
            self._boundary_exchange.close()
