"""The target of a subscriber, whose tensors an engine may move between two updates."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch

from penstock.hub.messages import layout_digest
from penstock.sync.placed import Placed
from penstock.sync.receive.target import Target, requirements_for, tensors_of
from penstock.sync.recording.layout import Load
from penstock.sync.recording.requirements import Requirements
from penstock.sync.shards import Declarable
from penstock.types import TensorTable


class FollowedTarget(msgspec.Struct, eq=False, dict=True):
    """A target, and the addresses that its tensors had when its requirements were determined."""

    target: Target
    load: Load | None
    strict: bool

    def __post_init__(self) -> None:
        self._tensors: torch.nn.Module | Mapping[str, Declarable] = {}
        self._checkpoint = ""
        self._placed: Placed | None = None
        self._unfilled: set[str] = set()  # tensors that may move, because no version fills them

    def requirements(self, table: TensorTable, tags: Mapping[str, str]) -> Requirements:
        """Return the requirements of the target's current tensors. Raises the same errors as `requirements_for`."""
        checkpoint = layout_digest(table)
        # If the target is a function, call it only once for each checkpoint. The tensors from it may move later.
        if isinstance(self.target, torch.nn.Module | Mapping) or self._checkpoint != checkpoint:
            self._tensors, self._checkpoint = tensors_of(self.target, table), checkpoint
        requirements = requirements_for(self._tensors, table, self.load, strict=self.strict, tags=tags)
        # Watch the dict itself. An empty dict receives tensors later, and the user may replace tensors in a dict.
        self._placed = Placed(self._tensors, self.target if isinstance(self.target, Mapping) else None)
        filled = requirements.storages()
        self._unfilled = {
            name
            for name, view in self._placed.views()
            if filled is not None and view.untyped_storage()._cdata not in filled
        }
        return requirements

    def moved(self) -> list[str]:
        """Return the names of the moved tensors among those that a version fills."""
        is_empty = isinstance(self.target, Mapping) and not self.target  # the first version adds its tensors
        if is_empty or self._placed is None or self._placed.is_same():
            return []
        moved = [name for name in self._placed.moved() if name not in self._unfilled]
        if not moved:
            self._placed.refresh()
        return moved
