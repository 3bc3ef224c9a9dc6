"""One model of a keeper, wherever it is: its holding while it is on the device, and how it comes back when it is not.

In: rooms of memory tiers. Out: a holding that is shown while the bytes are where engines can use them.
Not here: which model is where (`memory.tiers`), what the keeper's user calls (`keeper`).

    vacate: no lease? no new ones --> close: descriptors stale --> moved down: rest
    lease asked for --> door: recall --> moved up: wake, register, show --> lease
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch

from penstock.digest.leaf import num_leaves, take_leaves
from penstock.errors import ConfigError, PenstockError, SourceChanged
from penstock.fetch.discover import PlacedTarget
from penstock.fetch.join import Fleet
from penstock.fetch.report import FetchReport
from penstock.jobs.job import Job
from penstock.memory.arena import Arena, offsets_of
from penstock.memory.tier import Block, Room
from penstock.memory.tier_cuda import CudaRoom
from penstock.memory.tier_host import ArenaRoom
from penstock.peer.local_weights import LocalWeights
from penstock.peer.weight_layout import WeightLayout
from penstock.storage.weight_set import Uris
from penstock.types import Manifest, TensorTable

ResidentState = Literal["kept", "reloading", "lost"]


class _InArena(PlacedTarget):
    """New tensors in an arena, in the order of the line."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arenas: Sequence[Arena] = (arena,)

    def place(self, table: TensorTable) -> list[torch.Tensor]:
        """See `PlacedTarget.place`."""
        arena, nbytes = self.arenas[0], table.nbytes.tolist()
        return [arena.bytes_at(*run) for run in zip(arena.place(nbytes), nbytes, strict=True)]


class ResidentModel:
    """A tenant of the fastest tier. The tiers call it, one call at a time.

    Args:
        fleet: whose member keeps it.
        revision: what it is to be.
        nbytes: of memory, gaps between tensors included.
        uri, storage_options: see `Keeper.keep`.

    Attributes:
        report: of the last fetch.
        holding: None until the first.
        is_leaving: it is being dropped: nobody brings it back.
        state: `kept`; `reloading`, its memory was damaged and it is read again; `lost`, that failed.
        why: of a state other than `kept`; of the last reload, once it is kept again.
        num_reloads: how often its memory was damaged and it was read again.
        reloaded: the end of the last reload; None: there was none.
    """

    can_reload = True
    """Whether `fill` can be called again."""

    def __init__(
        self, fleet: Fleet, revision: str, nbytes: int, uri: Uris, storage_options: Mapping[str, str] | None
    ) -> None:
        self.name, self.revision, self.nbytes = fleet.identity.model, revision, nbytes
        self.block = Block(f"{self.name}@{revision}", 0, nbytes)
        self.report: FetchReport | None = None
        self.weights: LocalWeights | None = None
        self.is_leaving = False
        self.state: ResidentState = "kept"
        self.why, self.num_reloads = "", 0
        self.reloaded: Future[None] | None = None
        self._fleet, self._uri, self._storage_options = fleet, uri, storage_options

    @property
    def shown(self) -> LocalWeights:
        """The holding; there is one once it was fetched."""
        assert self.weights is not None
        return self.weights

    def fill(self, room: Room) -> None:
        """Fetch it into the room: from members that have it, and from storage what they have not.

        Raises:
            SourceChanged: it is not what was kept before. PenstockError: see `Fleet.fetch`.
        """
        assert isinstance(room, ArenaRoom | CudaRoom) and room.arena is not None
        member, before = self._fleet.member, self.weights
        try:
            self.report = self._fleet.fetch(
                _InArena(room.arena),
                fallback=self._uri,
                device=room.arena.device,
                storage_options=self._storage_options,
            )
            found = next(one for one in member.weights if one.key == self.report.key)
            if before is not None and found.key != before.key:
                member.hide(found, 0.0)
                now = found.identity.revision
                raise SourceChanged(f"{self.name!r} was kept in revision {self.revision}, and is {now} there now")
        except PenstockError:
            if before is not None:
                member.announce(before)
            raise
        self.weights = found
        self.weights.kept = True
        gc.collect()  # what fetched it refers to its memory in circles, and is to give way when the model does

    def vacate(self) -> bool:
        """See `Tenant.vacate`: engines attached and readers hold it where it is; so does damage, which is not moved."""
        member, weights = self._fleet.member, self.shown
        is_sound = weights.damage is None and any(one is weights for one in member.weights)
        if self.is_leaving or not is_sound or not member.server.retire(weights.key):
            return False
        self.shown.close()
        return True

    def moved(self, tier: str, room: Room | None) -> None:
        """See `Tenant.moved`."""
        weights, member = self.shown, self._fleet.member
        if not isinstance(room, ArenaRoom | CudaRoom):
            weights.move_out(tier)
        elif not self.is_leaving and (weights.tier or weights.state != "whole"):
            assert room.arena is not None
            weights.move_in(self._rows(room.arena), [room.arena])
            member.show(weights)
        member.beat_now()

    def _rows(self, arena: Arena) -> list[torch.Tensor]:
        """The line's bytes, as `_InArena` placed them."""
        nbytes = self.shown.layout.table.nbytes.tolist()
        return [arena.bytes_at(*run) for run in zip(offsets_of(nbytes)[0], nbytes, strict=True)]


class ConvertedModel(ResidentModel):
    """One that a conversion makes in its room, as one file without a header: there is no source to read it from again.

    Args:
        fleet: whose member keeps it.
        job: what makes it.
        make: has it run, with a path to write to.
        max_readers: of the holding.
    """

    can_reload = False

    def __init__(self, fleet: Fleet, job: Job, make: Callable[[Path], Manifest], *, max_readers: int) -> None:
        super().__init__(fleet, f"job-{job.key}", int(job.files.body_nbytes[0]), (), None)
        self._make, self._max_readers = make, max_readers

    def fill(self, room: Room) -> None:
        """Have it made in the room, and show it: with the digests of what was made, which readers compare.

        Raises:
            ConfigError: the result is kept already. PenstockError: of the conversion.
        """
        assert isinstance(room, ArenaRoom) and room.arena is not None
        member, made = self._fleet.member, self._make(Path(room.arena.path))
        layout = WeightLayout.of(made.tensors, leaf_bytes=made.leaf_bytes)
        assert made.leaves is not None
        row_of = {name: row for row, name in enumerate(made.tensors.names)}
        order = np.array([row_of[name] for name in layout.table.names], np.int64)
        leaves = take_leaves(made.leaves, num_leaves(made.tensors.nbytes, made.leaf_bytes), order)
        identity = msgspec.structs.replace(self._fleet.identity, revision=made.revision, layout=layout.digest)
        if any(one.key == identity.key() for one in member.weights):
            raise ConfigError(f"{self.name!r} is kept already, in this revision: {made.revision}")
        rows = _lying(layout.table, room.arena)
        weights = LocalWeights(
            identity, layout, rows, leaves=leaves, arenas=[room.arena], max_readers=self._max_readers
        )
        weights.mark_verified(np.arange(layout.chunks.num_chunks), leaves)
        weights.path, weights.kept = "converted", True
        weights.set_state("whole")
        self.weights = weights
        member.show(weights)

    def _rows(self, arena: Arena) -> list[torch.Tensor]:
        return _lying(self.shown.layout.table, arena)


def _lying(table: TensorTable, arena: Arena) -> list[torch.Tensor]:
    """Bytes of each row, where it was written."""
    return [arena.bytes_at(*run) for run in zip(table.offset.tolist(), table.nbytes.tolist(), strict=True)]
