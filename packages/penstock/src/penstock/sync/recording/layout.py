"""Data types for the recorded copies of a loader, and functions that apply the copies.

A `Recording` lists the required boxes of each checkpoint tensor. `fill` applies the records and is the reference
implementation of every transfer. `checkpoint_shards` declares a trainer's parameters as `Shard`s of checkpoint tensors,
for example a merged expert tensor as the experts' separate tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import product
from typing import Literal

import msgspec
import torch

from penstock.errors import PlanError
from penstock.loader.tensor import torch_dtype, torch_shape
from penstock.memory.targets import require_initialised
from penstock.plan.intersect import common_box
from penstock.sync.recording.stride_map import Digit, StrideMap, boxes, restrict
from penstock.sync.shards import Declarable, Shard, ShardRow, declared
from penstock.types import Box, DType

Step = tuple[Literal["cast", "view"], DType]
"""A conversion of each element: a cast of the value, or a view of the bits as another dtype of the same width."""

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""A model's `load_weights`, which accepts tensors by their checkpoint names and fills the model."""


class LayoutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A copy from one box of a checkpoint tensor into one box of a parameter or buffer.

    target[target_box] = source[source_box].reshape(split).permute(permutation).reshape(target_box.shape), after
    `steps`. Boxes count torch's elements. Torch counts two F4 elements as one.
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
        """Return whether both boxes have the same order of elements."""
        return self.permutation == tuple(range(len(self.permutation)))


class Constant(msgspec.Struct, frozen=True, kw_only=True):
    """A box that the loader sets to one number, such as padding."""

    target: str
    target_box: Box
    value: float


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The copies that a loader makes from a checkpoint into a model. No element of a parameter is in two records."""

    layout: str
    shapes: Mapping[str, tuple[int, ...]]
    records: tuple[LayoutRecord, ...]
    constants: tuple[Constant, ...]
    unrecorded: Mapping[str, str]
    """Checkpoint tensors that must be received unsliced and pass through the loader itself, with the reason."""
    unused: tuple[str, ...]
    """Checkpoint tensors that fill nothing in this model, for example tensors for other ranks."""
    unfilled: Mapping[str, int]
    """Number of elements that neither records nor constants fill, for each parameter and persistent buffer."""
    touched: frozenset[str] = frozenset()
    """Live tensors that the loader writes to when it receives only the unrecorded tensors. Install records into these
    tensors after the loader has run."""
    fillable: frozenset[str] | None = None
    """Live tensors that the unrecorded tensors may fill. None means any, because the loader decides by values."""
    repeated: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Checkpoint tensors that were replaced in a tied parameter, each with the tensor that replaced it."""

    def wants(self) -> tuple[TensorRequirement, ...]:
        """Return the required boxes of each checkpoint tensor, sorted by name."""
        boxes: dict[str, dict[Box, None]] = {}
        for record in self.records:
            boxes.setdefault(record.source, {})[record.source_box] = None
        for name in self.unrecorded:
            boxes[name] = {Box.full(self.shapes[name]): None}
        return tuple(
            TensorRequirement(name=name, boxes=_outermost(needed), whole=name in self.unrecorded)
            for name, needed in sorted(boxes.items())
        )


class TensorRequirement(msgspec.Struct, frozen=True, kw_only=True):
    """The boxes that a receiver needs from one checkpoint tensor."""

    name: str
    boxes: tuple[Box, ...]
    """No box contains another. Boxes may overlap if a loader uses elements twice."""
    whole: bool = False
    """Whether the tensor is unrecorded, so that it must be received unsliced and passed through the loader."""


def _outermost(boxes: Iterable[Box]) -> tuple[Box, ...]:
    outermost: list[Box] = []
    for box in sorted(boxes, key=lambda box: (-box.num_elements, box.start)):
        if not any(common_box(box, other) == box for other in outermost):
            outermost.append(box)
    return tuple(sorted(outermost, key=lambda box: box.start))


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's detached parameters and buffers, under all names. Raise PlanError for a lazy tensor."""
    # A loader may fill a tied weight under either name, and buffers that are in no state dict.
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        require_initialised(name, tensor)
    return {name: tensor.detach() for name, tensor in named}


def writing(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """Return a context in which these tensors may be written, even if they were created in inference mode."""
    return torch.inference_mode() if any(tensor.is_inference() for tensor in tensors) else torch.no_grad()


def fill(
    recording: Recording, source: Mapping[str, torch.Tensor], model: torch.nn.Module, *, load: Load | None = None
) -> None:
    """Fill a model from whole checkpoint tensors using only the records. `fill` is the reference for every transfer."""
    if recording.unrecorded and load is None:
        examples = "; ".join(f"{name}: {why}" for name, why in list(recording.unrecorded.items())[:10])
        hint = "pass the model's loader as load="
        raise PlanError(f"{len(recording.unrecorded)} tensors are unrecorded: {examples}", hint=hint)
    if load is not None and recording.unrecorded:
        # Records and constants may overwrite writes of the loader.
        load((name, source[name]) for name in recording.unrecorded)
    targets = live_tensors(model)
    with writing(targets.values()):
        for constant in recording.constants:
            cut(targets[constant.target], constant.target_box).fill_(constant.value)
        for record in recording.records:
            install(record, cut(source[record.source], record.source_box), targets[record.target])


def install(record: LayoutRecord, piece: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a record's source box into the target. `piece` has that box's shape and may be on any device."""
    value = piece.reshape(record.split).permute(record.permutation)
    for kind, dtype in record.steps:
        value = value.to(torch_dtype(dtype)) if kind == "cast" else value.view(torch_dtype(dtype))
    with writing([target]):
        cut(target, record.target_box).copy_(value.reshape(record.target_box.shape))


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a view of a box of a tensor."""
    return tensor[tuple(map(slice, box.start, box.stop))] if box.start else tensor


def checkpoint_shards(
    params: torch.nn.Module | Mapping[str, Declarable], recording: Recording
) -> dict[str, Sequence[Shard]]:
    """Return the shards of checkpoint tensors that a rank's model holds, without elements that no record fills.

    `recording` records the loader of the unsharded model. Raise PlanError if the loader was only partly recorded.
    """
    if recording.unrecorded:
        examples = "; ".join(f"{name}: {why}" for name, why in list(recording.unrecorded.items())[:10])
        hint = "declare the parameters under your own names"
        raise PlanError(f"{len(recording.unrecorded)} tensors are not recorded: {examples}", hint=hint)
    by_target: dict[str, list[LayoutRecord]] = {}
    for record in recording.records:
        by_target.setdefault(record.target, []).append(record)
    shards_of: dict[str, list[Shard]] = {}
    for row in declared(params):
        for record in by_target.get(row.name, ()):
            shards_of.setdefault(record.source, []).extend(_shards(row, record, recording.shapes[record.source]))
    return {name: shards for name, shards in shards_of.items() if shards}


def _shards(row: ShardRow, record: LayoutRecord, shape: tuple[int, ...]) -> Iterator[Shard]:
    box = _torch_box(row)
    common = common_box(box, record.target_box)
    if common is None:
        return
    if any(kind == "view" for kind, _ in record.steps):
        # A shard declares values of one dtype, so viewed bits would be sent as wrong values.
        raise PlanError(f"the loader views the bits as another dtype in {record.target}", tensor=record.source)
    global_shape = torch_shape(row.form.dtype, shape)
    strides = row.tensor.stride()
    first = int(row.tensor.storage_offset())
    # Restrict the recorded map to this rank's part of the target, and cut it until its source and target are boxes.
    for part in (piece for cut in restrict(_map_of(record), common) for piece in boxes(cut)):
        inside = zip(part.target_start, box.start, strides, strict=True)
        begin = first + sum((at - start) * step for at, start, step in inside)
        for start, extent, steps, offset in _boxes(part, strides):
            tensor = row.tensor.as_strided(extent, steps, begin + offset)
            yield Shard(tensor=tensor, global_shape=global_shape, offset=start, tag=row.form.tag)


def _torch_box(row: ShardRow) -> Box:
    """Return a row's box in torch's elements, where two F4 elements count as one."""
    start = row.form.box.start
    if row.form.dtype is DType.F4:
        start = (*start[:-1], start[-1] // 2)
    return Box(start=start, stop=tuple(a + n for a, n in zip(start, row.tensor.shape, strict=True)))


def _map_of(record: LayoutRecord) -> StrideMap:
    # A record stores shapes but no steps. Derive the steps: the digits of a box fill its dims, outermost dim first.
    source = _places(record.source_box.shape, record.split)
    target = _places(record.target_box.shape, tuple(record.split[i] for i in record.permutation))
    back = {digit: at for at, digit in enumerate(record.permutation)}
    digits: tuple[Digit, ...] = tuple((n, *source[i], *target[back[i]]) for i, n in enumerate(record.split) if n > 1)
    return StrideMap(source_start=record.source_box.start, target_start=record.target_box.start, digits=digits)


def _places(shape: Sequence[int], digits: Sequence[int]) -> list[tuple[int, int]]:
    places: list[tuple[int, int]] = []
    dim, remaining = -1, 1
    for n in digits:
        while remaining == 1 and n > 1:
            dim += 1
            remaining = shape[dim]
        remaining //= n
        places.append((max(dim, 0), remaining))
    return places


def _boxes(
    part: StrideMap, strides: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]]:
    # A dim that the loader split into several runs becomes several boxes, because `as_strided` has one stride per dim.
    dims: list[list[tuple[int, int]]] = []
    for dim in range(len(part.source_start)):
        runs = [(1, 1)]
        for n, _, _, target_dim, target_step in sorted((d for d in part.digits if d[1] == dim), key=lambda d: d[2]):
            step = target_step * strides[target_dim]
            if runs[-1][0] == 1:
                runs[-1] = (n, step)
            elif step == runs[-1][0] * runs[-1][1]:
                runs[-1] = (runs[-1][0] * n, runs[-1][1])
            else:
                runs.append((n, step))
        dims.append(runs)
    outer = [(dim, *level) for dim, runs in enumerate(dims) for level in _levels(runs)]
    for values in product(*(range(n) for _, n, _, _ in outer)):
        start, offset = list(part.source_start), 0
        for value, (dim, _, below, step) in zip(values, outer, strict=True):
            start[dim] += value * below
            offset += value * step
        yield tuple(start), tuple(runs[0][0] for runs in dims), tuple(runs[0][1] for runs in dims), offset


def _levels(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    below = runs[0][0]
    for n, step in runs[1:]:
        yield n, below, step
        below *= n
