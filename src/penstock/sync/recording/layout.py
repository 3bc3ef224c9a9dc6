"""Recorded copies of a loader as values: from a box of a checkpoint tensor to a box of a parameter.

In: the copies that `record` observed. Out: the boxes needed of each checkpoint tensor; `fill`, which applies the
records to real tensors and is the reference for every transfer.
Not here: the recording itself (`record`), the plan of a transfer (`plan`).
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
"""A conversion of each element: its value cast to another dtype, or its bits viewed as one of the same width."""

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
        """Return whether both boxes have their elements in the same order, so that nothing is permuted on arrival."""
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
    """The shapes of the checkpoint tensors that are recorded or unrecorded."""
    records: tuple[Record, ...]
    constants: tuple[Constant, ...]
    unrecorded: Mapping[str, str]
    """Checkpoint tensors that must be received whole and pass through the loader itself, with the reason."""
    unused: tuple[str, ...]
    """Checkpoint tensors that fill nothing in this model, for example those of other ranks."""
    unfilled: Mapping[str, int]
    """The number of elements that neither records nor constants fill, for each parameter and persistent buffer."""

    def wants(self) -> tuple[TensorRequirement, ...]:
        """Return the boxes needed of each checkpoint tensor, sorted by name; unrecorded tensors are needed whole."""
        boxes: dict[str, dict[Box, None]] = {}
        for record in self.records:
            boxes.setdefault(record.source, {})[record.source_box] = None
        for name in self.unrecorded:
            boxes[name] = {Box.full(self.shapes[name]): None}
        return tuple(
            TensorRequirement(name=name, boxes=_outermost(needed), whole=name in self.unrecorded)
            for name, needed in sorted(boxes.items())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRequirement:
    """The boxes that one receiver needs of one checkpoint tensor."""

    name: str
    boxes: tuple[Box, ...]
    """No box lies inside another; two may overlap where a loader uses elements twice."""
    whole: bool = False
    """Whether the tensor is unrecorded: it must be received whole, and passed through the loader."""


def _outermost(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Return the boxes that lie in no other box, in order."""
    # The largest first: a box can only lie in one that is at least as large.
    outermost: list[Box] = []
    for box in sorted(boxes, key=lambda box: (-box.num_elements, box.start)):
        if not any(_inside(box, other) for other in outermost):
            outermost.append(box)
    return tuple(sorted(outermost, key=lambda box: box.start))


def _inside(box: Box, other: Box) -> bool:
    return all(a >= b for a, b in zip(box.start, other.start, strict=True)) and all(
        a <= b for a, b in zip(box.stop, other.stop, strict=True)
    )


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers under all their names, detached, with the same memory."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def fill(
    recording: Recording, source: Mapping[str, torch.Tensor], model: torch.nn.Module, *, load: Load | None = None
) -> None:
    """Fill a model from whole checkpoint tensors by the records alone: the reference for every transfer.

    Args:
        recording: of this model, or of a model with the same parameters.
        source: the checkpoint's tensors by name.
        model: filled in place.
        load: the model's own loader, for unrecorded tensors.

    Raises:
        PlanError: tensors are unrecorded and there is no `load`; the model is untouched.
    """
    if recording.unrecorded and load is None:
        some = "; ".join(f"{name}: {why}" for name, why in list(recording.unrecorded.items())[:10])
        hint = "pass the model's loader as load="
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
    """Copy a record's source box, on any device and of that box's shape, to its place in the target."""
    value = piece.reshape(record.split).permute(record.permutation)
    for kind, dtype in record.steps:
        value = value.to(torch_dtype(dtype)) if kind == "cast" else value.view(torch_dtype(dtype))
    with torch.no_grad():
        cut(target, record.target_box).copy_(value.reshape(record.target_box.shape))


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a view of a box of a tensor."""
    return tensor[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] if box.start else tensor
