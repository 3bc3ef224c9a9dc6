"""A model in a cache: its weights while they are on the device, and its moves between memory tiers."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np
import torch

from penstock.digest.leaf import num_leaves, take_leaves
from penstock.errors import ConfigError, PenstockError, SourceChanged
from penstock.fetcher.discover import PlacedTarget
from penstock.fetcher.join import Fleet
from penstock.fetcher.report import FetchReport
from penstock.holding.placement import PlacedChunks
from penstock.holding.weight_layout import WeightLayout
from penstock.loader.progress import ProgressOption
from penstock.memory.arena import Arena, offsets_of
from penstock.memory.tier import Room, TierBlock
from penstock.memory.tier_cuda import CudaRoom
from penstock.memory.tier_host import ArenaRoom
from penstock.peer.local_weights import LocalWeights
from penstock.storage.file_names import stem_of
from penstock.storage.weight_set import Uris
from penstock.types import Manifest, TensorTable


class ResidentState(StrEnum):
    """The state of a model in a cache."""

    KEPT = "kept"
    RELOADING = "reloading"
    LOST = "lost"
    DROPPING = "dropping"
    """The model waits for engines and readers to leave, and cannot return from a lower tier. After a timeout the
    previous state is restored."""
    DROPPED = "dropped"


_NEXT = {
    ResidentState.KEPT: {ResidentState.RELOADING, ResidentState.DROPPING, ResidentState.DROPPED},
    # `RELOADING` cannot become `DROPPING`, because the reload thread is still writing to the model's memory.
    ResidentState.RELOADING: {ResidentState.KEPT, ResidentState.LOST, ResidentState.DROPPED},
    ResidentState.LOST: {ResidentState.DROPPING, ResidentState.DROPPED},
    ResidentState.DROPPING: {ResidentState.KEPT, ResidentState.LOST, ResidentState.DROPPED},
    ResidentState.DROPPED: set[ResidentState](),
}


class _InArena(PlacedTarget):
    """A target that places new tensors in an arena, in the order of the layout."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arenas: Sequence[Arena] = (arena,)

    def place(self, layout: WeightLayout) -> list[torch.Tensor]:
        arena, nbytes = self.arenas[0], layout.table.nbytes.tolist()
        return arena.runs_at(arena.place(nbytes), nbytes)


class ResidentModel:
    """A model in a cache. The memory tiers call the model's methods, one call at a time."""

    can_reload = True

    def __init__(
        self,
        fleet: Fleet,
        revision: str,
        nbytes: int,
        uri: Uris | None = None,
        storage_options: Mapping[str, str] | None = None,
        progress: ProgressOption = False,
    ) -> None:
        self.name = fleet.identity.model
        self.revision = revision
        self.nbytes = nbytes
        # Revisions and ranks of a model need separate blocks, even if their bytes are identical.
        coordinates = "".join(f" {axis} {at}" for axis, at in sorted(fleet.identity.parallel.items()))
        self.block = TierBlock(f"{self.name}@{revision}{coordinates}", 0, nbytes)
        self.report: FetchReport | None = None
        self.weights: LocalWeights | None = None
        self.state = ResidentState.KEPT
        self._changing = threading.Lock()
        self.why = ""
        self.num_reloads = 0
        self.reloaded: Future[None] | None = None
        self._fleet = fleet
        self._uri = uri
        self._storage_options = storage_options
        self._progress = progress

    @property
    def served(self) -> LocalWeights:
        """Return the served weights. Call only after the first fetch."""
        assert self.weights is not None
        return self.weights

    @property
    def is_leaving(self) -> bool:
        """Return whether the model is being dropped, so that it must not return from a lower tier."""
        return self.state in (ResidentState.DROPPING, ResidentState.DROPPED)

    def become(self, state: ResidentState, why: str | None = None) -> bool:
        """Change the state and its reason. Return False and change nothing if the transition is not permitted."""
        with self._changing:
            if state not in _NEXT[self.state]:
                return False
            # Set the reason first, because other threads read the reason after the state.
            self.why = self.why if why is None else why
            self.state = state
            return True

    def fill(self, room: Room) -> None:
        """Fetch the model from members and storage. Raise SourceChanged if the source has a different revision."""
        assert isinstance(room, ArenaRoom | CudaRoom) and room.arena is not None
        member, before = self._fleet.member, self.weights
        try:
            self.report = self._fleet.fetch(
                _InArena(room.arena),
                fallback=self._uri,
                device=room.arena.device,
                storage_options=self._storage_options,
                progress=self._progress,
            )
            # Show no progress of later reloads, because reloads run in threads long after `keep` has returned.
            self._progress = False
            weights = next(served for served in member.weights if served.key == self.report.key)
            if before is not None and weights.key != before.key:
                # Do not serve these weights, because engines would get a different model under the same name.
                member.hide(weights, 0.0)
                revision = weights.identity.revision
                message = f"{self.name!r} was kept in revision {self.revision}, but storage has {revision}"
                raise SourceChanged(message, hint="drop the model, then keep it again")
        except PenstockError:
            # The fetch removed the earlier weights from the member's list, but the hub must continue to list them.
            if before is not None:
                member.announce(before)
            raise
        self.weights = weights
        self.weights.kept = True
        # The fetch leaves reference cycles that keep the memory alive, and an evicted model must free its memory.
        gc.collect()

    def vacate(self) -> bool:
        """Prepare the model to leave the device. Return False if the model is corrupt, or engines or readers use it."""
        member, weights = self._fleet.member, self.served
        is_sound = weights.damage is None and any(served is weights for served in member.weights)
        if self.is_leaving or not is_sound or not member.server.retire(weights.key):
            return False
        # Close only after `retire`, which fails while there is a lease, because `close` invalidates the descriptors.
        weights.close()
        return True

    def moved(self, tier: str, room: Room | None) -> None:
        """Serve the weights after a move into memory, or release them after a move to a lower tier."""
        weights, member = self.served, self._fleet.member
        if not isinstance(room, ArenaRoom | CudaRoom):
            weights.move(PlacedChunks(weights.layout, ()), tier)
        elif not self.is_leaving and (weights.tier or weights.state != "whole"):
            assert room.arena is not None
            weights.move(PlacedChunks(weights.layout, self._rows(room.arena), [room.arena]), "")
            member.show(weights)
        member.beat_now()

    def _rows(self, arena: Arena) -> list[torch.Tensor]:
        nbytes = self.served.layout.table.nbytes.tolist()
        return arena.runs_at(offsets_of(nbytes)[0], nbytes)


class ConvertedModel(ResidentModel):
    """A model whose bytes a conversion writes into memory with `make`. The model cannot be reloaded from storage."""

    can_reload = False

    def __init__(
        self, fleet: Fleet, key: str, nbytes: int, make: Callable[[Path], Manifest], *, max_readers: int
    ) -> None:
        super().__init__(fleet, f"job-{key}", nbytes)
        self._make = make
        self._max_readers = max_readers

    def fill(self, room: Room) -> None:
        """Run the conversion into the reserved memory. Raise ConfigError if the result is already kept."""
        # The conversion's workers write to the arena's memfd through its path under /proc.
        assert isinstance(room, ArenaRoom) and room.arena is not None
        member, manifest = self._fleet.member, self._make(Path(room.arena.path))
        stem = stem_of(file.name for file in manifest.files)
        layout = WeightLayout.of(manifest.tensors, leaf_bytes=manifest.leaf_bytes, stem=stem)
        assert manifest.leaves is not None
        row_of = {name: row for row, name in enumerate(manifest.tensors.names)}
        order = np.array([row_of[name] for name in layout.table.names], np.int64)
        leaves = take_leaves(manifest.leaves, num_leaves(manifest.tensors.nbytes, manifest.leaf_bytes), order)
        identity = msgspec.structs.replace(self._fleet.identity, revision=manifest.revision, layout=layout.digest)
        if any(served.key == identity.key() for served in member.weights):
            raise ConfigError(f"{self.name!r} is already kept in this revision: {manifest.revision}")
        rows = _rows_as_written(layout.table, room.arena)
        weights = LocalWeights(
            identity, layout, rows, leaves=leaves, arenas=[room.arena], max_readers=self._max_readers
        )
        weights.mark_verified(np.arange(layout.chunks.num_chunks), leaves)
        weights.fetch.path = "converted"
        weights.kept = True
        weights.set_state("whole")
        self.weights = weights
        member.show(weights)

    def _rows(self, arena: Arena) -> list[torch.Tensor]:
        return _rows_as_written(self.served.layout.table, arena)


def _rows_as_written(table: TensorTable, arena: Arena) -> list[torch.Tensor]:
    return [arena.bytes_at(*run) for run in zip(table.offset.tolist(), table.nbytes.tolist(), strict=True)]
