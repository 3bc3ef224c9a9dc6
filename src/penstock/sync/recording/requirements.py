"""The rows that a receiver requires, and the steps after their arrival: each element comes once, to one place.

In: a live model, the recording of its loader, the table it was recorded of. Out: `Requirements`: rows for the planner,
in live parameters where the bytes of the wire are theirs, else in scratch; `install` and `finish` for the arrived rows.
Not here: recording (`record`), who sends what (`plan`), shadows of live memory (`sync.receive.staging_copy`).

    record in order, dtype of the wire  -> row in the parameter itself
    permuted or cast                    -> row in scratch  -> install: into the parameter
    elements used twice                 -> one row         -> install: copied
    unrecorded                          -> whole, scratch  -> finish: through the loader
    constants                                              -> finish
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import PlanError
from penstock.hub.identity import layout_digest
from penstock.loader.tensor import torch_dtype, torch_shape
from penstock.memory.arena import Arena, needed_bytes
from penstock.plan.intersect import minus
from penstock.sync.recording.layout import Load, Record, Recording, cut, install, live_tensors
from penstock.sync.recording.meta_tensors import Recorded, written
from penstock.sync.recording.record import own_loader, record
from penstock.sync.recording.stride_map import meet
from penstock.sync.shards import Row, row_of
from penstock.types import MIB, Box, TensorTable

_NAMED = 10
"""Unrecorded tensors that a warning names; the rest are counted."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Step:
    """A step on arrived bytes: as a record says, or, where there is none, a plain copy."""

    piece: torch.Tensor
    target: torch.Tensor
    record: Record | None = None

    def run(self) -> None:
        if self.record is None:
            self.target.copy_(self.piece)
        else:
            install(self.record, self.piece, self.target)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Requirements:
    """The rows that a receiver needs, and serves once it has a version; scratch has no other use.

    Staged: live memory's rows arrive in a shadow and are flipped; scratch's arrive in scratch, which no engine computes
    with. Then `install` and `finish`, as in direct mode.
    """

    rows: tuple[Row, ...]
    num_live: int
    """Rows before this one lie in live memory; the others in scratch."""
    scratch_bytes: int
    unrecorded: Mapping[str, str] = field(default_factory=dict)
    """Tensors that come whole and pass through the loader, and why."""
    unfilled: Mapping[str, int] = field(default_factory=dict)
    """Elements that no version fills, of each parameter and buffer that has any: they stay as they are."""
    _steps: Mapping[str, tuple[_Step, ...]] = field(default_factory=dict, repr=False)
    _last: tuple[_Step, ...] = field(default=(), repr=False)
    _constants: tuple[tuple[torch.Tensor, float], ...] = field(default=(), repr=False)
    _whole: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    _load: Load | None = field(default=None, repr=False)
    _model: torch.nn.Module | None = field(default=None, repr=False)

    @classmethod
    def as_declared(cls, rows: Sequence[Row]) -> Requirements:
        """Return these rows as requirements, each as it is: there are no steps after arrival."""
        return cls(rows=tuple(rows), num_live=len(rows), scratch_bytes=0)

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoint tensors wanted."""
        return tuple(dict.fromkeys(row.name for row in self.rows))

    def why(self) -> tuple[str, ...]:
        """Return the report's text about the fallback: nothing where all is recorded."""
        if not self.unrecorded:
            return ()
        nbytes = sum(tensor.nbytes for tensor in self._whole.values())
        told = [f"{name}: {why}" for name, why in list(self.unrecorded.items())[:_NAMED]]
        more = [f"and {len(self.unrecorded) - _NAMED} more"] if len(self.unrecorded) > _NAMED else []
        head = f"{len(self.unrecorded)} tensors come whole, {nbytes / MIB:.1f} MiB, and pass through the loader"
        return (f"{head}: {'; '.join(told + more)}",)

    def install(self, names: Iterable[str] | None = None) -> None:
        """Permute, cast and copy what arrived of these tensors; None: of all.

        Order: once all rows of a tensor hold a verified version, in live memory; on the current stream. Again after
            every update.
        """
        with torch.no_grad():
            for name in self._steps if names is None else names:
                for step in self._steps.get(name, ()):
                    step.run()

    def finish(self) -> None:
        """Run the steps that need all tensors: the loader's own part, and constants.

        Raises:
            PlanError: with `mutated=True`, the loader put other memory in the place of a parameter's.

        Order: after `install` of all tensors.
        """
        with torch.no_grad():
            if self._whole and self._model is not None and self._load is not None:
                before = _addresses(self._model)
                # Copies: a loader may compute in place, and what was received is what others are given.
                self._load((name, tensor.clone()) for name, tensor in self._whole.items())
                if changed := dict(before.items() - _addresses(self._model).items()):
                    hint = "give a loader that copies into the parameters"
                    message = f"the loader put other memory in the place of {len(changed)} tensors"
                    raise PlanError(message, mutated=True, tensor=min(changed), hint=hint)
            for target, value in self._constants:
                target.fill_(value)
            for step in self._last:
                step.run()


def wanted(
    model: torch.nn.Module,
    recording: Recording,
    table: TensorTable,
    *,
    load: Load | None = None,
    tags: Mapping[str, str] | None = None,
) -> Requirements:
    """Return a model's requirements of the checkpoint that was recorded.

    Args:
        model: live; the one that was recorded, or one alike.
        recording: of this table.
        table: what publishers hold, by name.
        load: as for `record`; only called for what is unrecorded.
        tags: of the tensors that are wanted transformed: their name -> tag.

    Raises:
        PlanError: the recording is of another table, the model has no memory, or a tensor that is left to the loader
            has a dtype that torch has not.
        DestinationError: there is no room for the scratch.

    Ownership: rows keep live memory and scratch alive.
    """
    if recording.layout != layout_digest(table):
        raise PlanError("the model was recorded with another checkpoint", hint="record it again")
    if any(tensor.is_meta for tensor in live_tensors(model).values()):
        raise PlanError("the model is on the meta device", hint="materialise it first: module.to_empty(device=...)")
    run = load or own_loader(model)
    kept = _Keep(model, _touched(model, recording, table, run))
    by_source: dict[str, list[Record]] = {}
    for one in recording.records:
        by_source.setdefault(one.source, []).append(one)
    for name, dtype, shape in zip(table.names, table.dtypes, table.shapes, strict=True):
        if name in by_source or name in recording.unrecorded:
            source = _Source(name=name, kind=torch_dtype(dtype), shape=torch_shape(dtype, shape))
            kept.lay(source, by_source.get(name, []), whole=name in recording.unrecorded)
    made = kept.made(recording, run, tags or {})
    for line in made.why():
        warnings.warn(line, RuntimeWarning, stacklevel=2)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A checkpoint tensor, as torch shows it."""

    name: str
    kind: torch.dtype
    shape: tuple[int, ...]


@dataclass(slots=True, eq=False, kw_only=True)
class _Place:
    """A destination of a box of a checkpoint tensor; scratch has no tensor before it is allocated."""

    source: _Source
    box: Box
    device: torch.device
    tensor: torch.Tensor | None

    def cut(self, box: Box) -> torch.Tensor:
        """Return the part of this place that a box inside it covers."""
        assert self.tensor is not None
        begin = self.box.start
        start = tuple(a - b for a, b in zip(box.start, begin, strict=True))
        return cut(self.tensor, Box(start=start, stop=tuple(a - b for a, b in zip(box.stop, begin, strict=True))))


class _Keep:
    """The destinations, tensor after tensor; scratch is allocated when all are known."""

    def __init__(self, model: torch.nn.Module, touched: frozenset[str]) -> None:
        self._model, self._live, self._touched = model, live_tensors(model), touched
        self._device = next((t.device for t in self._live.values()), torch.device("cpu"))
        self._places: list[_Place] = []
        self._whole: dict[str, _Place] = {}
        self._rows: list[tuple[_Place, Box]] = []
        self._copies: list[tuple[_Place, _Place, Box]] = []
        self._moves: list[tuple[_Place, Record]] = []

    def lay(self, source: _Source, records: Sequence[Record], *, whole: bool) -> None:
        """Find places for what is wanted of one tensor, the larger boxes first."""
        mine: list[_Place] = []
        if whole:
            mine.append(self._add(source, Box.full(source.shape), self._device, None))
            self._rows.append((mine[0], mine[0].box))
            self._whole[source.name] = mine[0]
        views = [(one, None if whole else self._direct(one, source)) for one in records]
        views.sort(key=lambda pair: (-pair[0].source_box.num_elements, pair[1] is None))
        apart = not whole and _apart([one.source_box for one in records])
        for one, view in views:
            overlapping = [] if apart else [(p, m) for p in mine if (m := meet(p.box, one.source_box))]
            if inside := next((place for place, common in overlapping if common == one.source_box), None):
                self._moves.append((inside, one))
                continue
            place = self._add(source, one.source_box, self._live[one.target].device, view)
            left = [place.box]
            for other, _ in overlapping:
                for common in filter(None, [meet(rest, other.box) for rest in left]):
                    self._copies.append((place, other, common))
                left = [part for rest in left for part in minus(rest, other.box)]
            self._rows += [(place, rest) for rest in left]
            mine.append(place)
            if view is None:
                self._moves.append((place, one))

    def _add(self, source: _Source, box: Box, device: torch.device, view: torch.Tensor | None) -> _Place:
        self._places.append(_Place(source=source, box=box, device=device, tensor=view))
        return self._places[-1]

    def _direct(self, one: Record, source: _Source) -> torch.Tensor | None:
        """The target's own memory as the source box, where that can be read into: in order, in runs, the same bits."""
        if not one.in_order or one.target in self._touched or any(kind == "cast" for kind, _ in one.steps):
            return None
        target = cut(self._live[one.target], one.target_box)
        if target.shape != one.source_box.shape:
            try:
                target = target.view(one.source_box.shape)
            except RuntimeError:  # torch's word for strides that do not allow it
                return None
        inner = next((step for n, step in zip(target.shape[::-1], target.stride()[::-1], strict=True) if n > 1), 1)
        return target.view(source.kind) if inner == 1 else None

    def made(self, recording: Recording, load: Load, tags: Mapping[str, str]) -> Requirements:
        """All of it, with scratch allocated."""
        live = {id(place) for place in self._places if place.tensor is not None}
        scratch_bytes = self._allocate([place for place in self._places if place.tensor is None])
        rows = sorted(self._rows, key=lambda pair: id(pair[0]) not in live)
        steps: dict[str, list[_Step]] = {}
        last: list[_Step] = []
        for place, other, box in self._copies:
            steps.setdefault(place.source.name, []).append(_Step(piece=other.cut(box), target=place.cut(box)))
        for place, one in self._moves:
            step = _Step(piece=place.cut(one.source_box), target=self._live[one.target], record=one)
            (last if one.target in self._touched else steps.setdefault(place.source.name, [])).append(step)
        return Requirements(
            rows=tuple(
                row_of(p.source.name, p.cut(b), p.source.shape, b.start, tag=tags.get(p.source.name, ""))
                for p, b in rows
            ),
            num_live=sum(id(place) in live for place, _ in rows),
            scratch_bytes=scratch_bytes,
            unrecorded=recording.unrecorded,
            unfilled=recording.unfilled,
            _steps={name: tuple(mine) for name, mine in steps.items()},
            _last=tuple(last),
            _constants=tuple((cut(self._live[one.target], one.target_box), one.value) for one in recording.constants),
            _whole={name: place.cut(place.box) for name, place in self._whole.items()},
            _load=load,
            _model=self._model,
        )

    def _allocate(self, places: Sequence[_Place]) -> int:
        """Allocate one arena per device for all rows in scratch; return the bytes."""
        total = 0
        for device in dict.fromkeys(place.device for place in places):
            mine = [place for place in places if place.device == device]
            nbytes = [place.box.num_elements * place.source.kind.itemsize for place in mine]
            arena = Arena.allocate(needed_bytes(nbytes), device)
            for place, length, offset in zip(mine, nbytes, arena.place(nbytes), strict=True):
                place.tensor = arena.bytes_at(offset, length).view(place.source.kind).view(place.box.shape)
            total += arena.nbytes
        return total


def _apart(boxes: Sequence[Box]) -> bool:
    """Return whether one dim alone separates all boxes; they may be separate where none does."""
    for dim in range(len(boxes[0].start)) if boxes else ():
        runs = sorted((box.start[dim], box.stop[dim]) for box in boxes)
        if all(one[1] <= other[0] for one, other in pairwise(runs)):
            return True
    return len(boxes) < 2


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in live_tensors(model).items()}


class _Watch(TorchDispatchMode):
    """Notes what memory operators write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spans: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.spans += [_span(one) for one in written(func, args, kwargs or {}) if not isinstance(one, Recorded)]
        return func(*args, **(kwargs or {}))


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Storage, first byte and past the last."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first = int(tensor.storage_offset()) * tensor.itemsize
    return int(tensor.untyped_storage()._cdata), first, first + (int(reach) * tensor.itemsize if tensor.numel() else 0)


def _touched(model: torch.nn.Module, recording: Recording, table: TensorTable, load: Load) -> frozenset[str]:
    """Live tensors that the loader writes to when it is given the unrecorded tensors alone: records of these come after
    it."""
    if not recording.unrecorded:
        return frozenset()
    seen = _Watch()

    def watched(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with seen:
            load(weights)

    some = [row for row, name in enumerate(table.names) if name in recording.unrecorded]
    record(model, table.take(some), load=watched)
    live = {name: _span(tensor) for name, tensor in live_tensors(model).items()}
    return frozenset(_meeting(live, seen.spans))


def _meeting(live: Mapping[str, tuple[int, int, int]], spans: Iterable[tuple[int, int, int]]) -> Iterator[str]:
    by_storage: dict[int, list[tuple[int, int]]] = {}
    for storage, start, stop in spans:
        by_storage.setdefault(storage, []).append((start, stop))
    for name, (storage, start, stop) in live.items():
        if any(a < stop and start < b for a, b in by_storage.get(storage, ())):
            yield name
