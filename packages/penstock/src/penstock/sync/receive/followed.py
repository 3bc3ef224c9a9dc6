"""The target of a subscriber, and whether its tensors are still where its requirements say.

An engine may move its weights between two updates: it offloads them, casts them, or gives them to `spawn`. An update
must not write to the former memory, which the engine does not read any more and may have freed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.hub.messages import layout_digest
from penstock.sync.placed import Placed
from penstock.sync.receive.target import Target, tensors_of, wanted_of
from penstock.sync.recording.layout import Load
from penstock.sync.recording.requirements import Requirements
from penstock.sync.shards import Declarable
from penstock.types import TensorTable


class FollowedTarget:
    """A target, and the places of its tensors when its requirements were made.

    Args:
        target, load, strict: see `subscriber`.
    """

    def __init__(self, target: Target, load: Load | None, *, strict: bool) -> None:
        self._target = target
        self._load = load
        self._strict = strict
        self._tensors: torch.nn.Module | Mapping[str, Declarable] = {}
        self._checkpoint = ""
        self._placed: Placed | None = None
        # The tensors that no version fills: they may move.
        self._unfilled: set[str] = set()

    def requirements(self, table: TensorTable, tags: Mapping[str, str]) -> Requirements:
        """Return the requirements of the tensors that the target has now. Errors as `wanted_of`."""
        checkpoint = layout_digest(table)
        # A function is called once for each checkpoint: its tensors may have moved since.
        if isinstance(self._target, torch.nn.Module | Mapping) or self._checkpoint != checkpoint:
            self._tensors, self._checkpoint = tensors_of(self._target, table), checkpoint
        requirements = wanted_of(self._tensors, table, self._load, strict=self._strict, tags=tags)
        # A dict that was given empty gets its tensors later, and the user may replace them there.
        self._placed = Placed(self._tensors, self._target if isinstance(self._target, Mapping) else None)
        filled = requirements.storages()
        self._unfilled = {
            name
            for name, view in self._placed.views()
            if filled is not None and view.untyped_storage()._cdata not in filled
        }
        return requirements

    def moved(self) -> list[str]:
        """Return the names of the tensors that a version fills and that are somewhere else now."""
        if self._placed is None or self._placed.is_same():
            return []
        if isinstance(self._target, Mapping) and not self._target:
            # It was given empty, and gets its tensors with the first version.
            return []
        moved = [name for name in self._placed.moved() if name not in self._unfilled]
        if not moved:
            # A table of positions, perhaps, which the model itself makes again for longer texts.
            self._placed.refresh()
        return moved
