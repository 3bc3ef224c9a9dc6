"""A receiver's layout as values: which box of which checkpoint tensor goes to which box of which parameter.

In: what `record` saw a loader do. Out: the boxes wanted of each checkpoint tensor; `fill`, which applies the records to
real tensors and is what any transfer must equal.
Not here: the recording (`record`), who sends what (`plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from penstock.errors import PlanError
from penstock.loader.tensor import torch_dtype
from penstock.types import Box, DType

Step = tuple[Literal["cast", "view"], DType]
"""What becomes of each element: its value in another dtype, or its bits read as another of the same width."""

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""A model's `load_weights`: it takes tensors by their checkpoint names and fills the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A copy of one box of a checkpoint tensor into one box of a parameter or buffer.

    target[target_box] = source[source_box].reshape(split).permute(permutation).reshape(target_box.shape), by `steps`.
    Boxes are of tensors as torch shows them: two elements of F4 count as one.
    """

    source: str
    source_box: Box
    split: tuple[int, ...]
    permutation: tuple[int, ...]
    target: str
    target_box: Box
    steps: tuple[Step, ...] = ()

    @property
    def in_order(self) -> bool:
        """Return whether both boxes have the same row-major elements, so that nothing is permuted on arrival."""
        return self.permutation == tuple(range(len(self.permutation)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A box that the loader sets to one number: padding."""

    target: str
    target_box: Box
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The copies of a loader from a checkpoint, without values. No element of a parameter is in two records."""

    layout: str
    """Digest of the checkpoint's names, dtypes and shapes that were recorded."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the checkpoint tensors that are recorded or unrecorded."""
    records: tuple[Record, ...]
    constants: tuple[Constant, ...]
    unrecorded: Mapping[str, str]
    """Checkpoint tensors that must come whole and pass through the loader itself, and why."""
    unused: tuple[str, ...]
    """Checkpoint tensors that leave nothing in this model: of other ranks, or not asked for."""
    unfilled: Mapping[str, int]
    """Elements that neither records nor constants fill, of each parameter and persistent buffer that has any."""

    def wants(self) -> tuple[TensorRequirement, ...]:
        """The boxes needed of each checkpoint tensor, sorted by name; whole tensors for what is unrecorded."""
        boxes: dict[str, dict[Box, None]] = {}
        for record in self.records:
            boxes.setdefault(record.source, {})[record.source_box] = None
        for name in self.unrecorded:
            boxes[name] = {Box.full(self.shapes[name]): None}
        return tuple(
            TensorRequirement(name=name, boxes=_outermost(found), whole=name in self.unrecorded)
            for name, found in sorted(boxes.items())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRequirement:
    """The boxes that one receiver needs of one checkpoint tensor."""

    name: str
    boxes: tuple[Box, ...]
    """None lies inside another; two may overlap where a loader uses elements twice."""
    whole: bool = False
    """It is left to the fallback: the tensor must be put together, and passed through the loader."""


def _outermost(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The boxes that lie in no other, in order."""
    kept: list[Box] = []
    for box in sorted(boxes, key=lambda box: (-box.num_elements, box.start)):
        if not any(_inside(box, other) for other in kept):
            kept.append(box)
    return tuple(sorted(kept, key=lambda box: box.start))


def _inside(box: Box, other: Box) -> bool:
    return all(a >= b for a, b in zip(box.start, other.start, strict=True)) and all(
        a <= b for a, b in zip(box.stop, other.stop, strict=True)
    )


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters and buffers under all their names, detached: the same memory."""
    held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in held}


def fill(
    recording: Recording, source: Mapping[str, torch.Tensor], model: torch.nn.Module, *, load: Load | None = None
) -> None:
    """Fill a model from whole checkpoint tensors by the records alone: the reference of what a transfer must give.

    Args:
        recording: of this model, or of one of the same parameters.
        source: the checkpoint's tensors by name.
        model: filled in place.
        load: the model's own loader, for what is unrecorded.

    Raises:
        PlanError: tensors are unrecorded and there is no `load`; the model is untouched.
    """
    if recording.unrecorded and load is None:
        some = "; ".join(f"{name}: {why}" for name, why in list(recording.unrecorded.items())[:10])
        hint = "give the model's loader as the fallback"
        raise PlanError(f"{len(recording.unrecorded)} tensors are unrecorded: {some}", hint=hint)
    if recording.unrecorded and load is not None:
        load((name, source[name]) for name in recording.unrecorded)
    targets = live_tensors(model)
    with torch.no_grad():
        for constant in recording.constants:
            cut(targets[constant.target], constant.target_box).fill_(constant.value)
        for record in recording.records:
            install(record, cut(source[record.source], record.source_box), targets[record.target])


def install(record: Record, piece: torch.Tensor, target: torch.Tensor) -> None:
    """Put a record's source box, on any device and of that box's shape, where it belongs in its target."""
    value = piece.reshape(record.split).permute(record.permutation)
    for kind, dtype in record.steps:
        value = value.to(torch_dtype(dtype)) if kind == "cast" else value.view(torch_dtype(dtype))
    with torch.no_grad():
        cut(target, record.target_box).copy_(value.reshape(record.target_box.shape))


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The box of a tensor: a view."""
    return tensor[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] if box.start else tensor
