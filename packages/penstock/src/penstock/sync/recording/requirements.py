"""The checkpoint data that a receiver needs. `record` runs the model's loader once, and `wanted` derives rows.

A record whose target has the same order, dtype and contiguous runs gets a row in the parameter itself, and other
records get rows in scratch. `install` permutes, casts and copies the arrived rows. `finish` passes unrecorded tensors
through the loader and sets constants.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import msgspec
import torch

from penstock.errors import PlanError, printable
from penstock.hub.messages import layout_digest
from penstock.loader.target_tensors import targets_of
from penstock.loader.tensor import torch_dtype, torch_shape
from penstock.memory.arena import Arena, needed_bytes
from penstock.memory.targets import tied_targets
from penstock.plan.intersect import common_box, minus
from penstock.report import bytes_text, names_text
from penstock.sync.recording.layout import Constant, LayoutRecord, Load, Recording, cut, install, live_tensors
from penstock.sync.recording.loader_run import (
    LoaderRaised,
    Specs,
    error_text,
    follow,
    own_loader,
    span,
    targets_written_by,
    user_code,
)
from penstock.sync.recording.meta_tensors import LoadRecorder
from penstock.sync.shards import ShardRow, row_of
from penstock.types import Box, TensorTable


def record(
    model: torch.nn.Module, table: TensorTable, *, load: Load | None = None, device: torch.device | str = "cpu"
) -> Recording:
    """Record a model's loader as copies of boxes. The model is bit-identical afterwards.

    If the loader reads a tensor's values (`item`, a comparison), it runs again without that tensor, which later passes
    through the loader at each update. If the loader fails when a tensor is left out, all tensors pass through it. Side
    effects of the loader outside the model's tensors remain. The checkpoint tensors need no memory. Each operator of
    the loader takes about 50 us of Python. Nothing else may use the model during the call.

    Args:
        model: the live model, on any device, including "meta". Copies into the model's tensors are recorded.
        table: the checkpoint's tensors, from its manifest or its publisher.
        load: function that receives the tensors as pairs (name, tensor). If `load` is None, the loader is
            `model.load_weights`, or else `model.load_state_dict`.
        device: the device that the recording tensors report.

    Raises:
        PlanError: the loader raised an error (the exception's cause), or reads values that are not from the checkpoint.
    """
    run = load or own_loader(model)
    left_out: dict[str, str] = {}
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, dtype, shape in zip(table.names, table.dtypes, table.shapes, strict=True):
        try:
            specs[name] = torch_dtype(dtype), torch_shape(dtype, shape)
        except PlanError as error:
            # A tensor whose dtype torch does not support cannot be passed to a loader, and the model may not use it.
            left_out[name] = error.message
    device, unheld = torch.device(device), dict(left_out)
    try:
        recorder = follow(model, specs, run, device, left_out)
    except LoaderRaised as raised:
        if not raised.was_incomplete:
            raise PlanError(
                f"the loader raised {error_text(raised.__cause__)} while it was recorded",
                tensor=raised.last or None,
                hint="the loader must accept the published names, dtypes and shapes",
            ) from raised.__cause__
        return _unrecorded(model, table, specs, unheld, raised)
    recording = _recording(model, table, recorder, left_out)
    alone = {name: spec for name, spec in specs.items() if name in recording.unrecorded}
    if not alone:
        return recording
    try:
        touched = targets_written_by(model, alone, run, device)
    except LoaderRaised as raised:
        return _unrecorded(model, table, specs, unheld, raised)
    fillable = None if recording.fillable is None else recording.fillable | touched
    return msgspec.structs.replace(recording, touched=touched, fillable=fillable)


def _unrecorded(
    model: torch.nn.Module, table: TensorTable, specs: Specs, unheld: Mapping[str, str], raised: LoaderRaised
) -> Recording:
    why = f"the loader needs all tensors in one call: with some of them it raised {error_text(raised.__cause__)}"
    return Recording(
        layout=layout_digest(table),
        shapes={name: tuple(shape) for name, shape in zip(table.names, table.shapes, strict=True)},
        records=(),
        constants=(),
        unrecorded={**unheld, **dict.fromkeys(specs, why)},
        unused=(),
        unfilled={name: tensor.numel() for name, tensor in targets_of(model).items() if tensor.numel()},
    )


def _recording(
    model: torch.nn.Module, table: TensorTable, recorder: LoadRecorder, left_out: Mapping[str, str]
) -> Recording:
    unrecorded = {**left_out, **recorder.lost}
    records: list[LayoutRecord] = []
    constants: list[Constant] = []
    filled: dict[str, int] = {}
    computed: set[str] = set()
    for target, pieces in recorder.live_pieces():
        for piece in pieces:
            box = piece.map.target_box()
            if piece.why:
                # The loader may or may not fill this box from unrecorded tensors, so the box counts as unfilled.
                unrecorded |= dict.fromkeys(piece.names, piece.why)
                computed.add(target)
                continue
            filled[target] = filled.get(target, 0) + box.num_elements
            if piece.value is not None:
                constants.append(Constant(target=target, target_box=box, value=piece.value))
                continue
            split, permutation = piece.map.order()
            records.append(
                LayoutRecord(
                    source=piece.names[0],
                    source_box=piece.map.source_box(),
                    split=split,
                    permutation=permutation,
                    target=target,
                    target_box=box,
                    steps=piece.steps,
                )
            )
    used = {entry.source for entry in records} | unrecorded.keys()
    shapes = {name: tuple(shape) for name, shape in zip(table.names, table.shapes, strict=True) if name in used}
    # Tied parameters, and parameters inside another parameter's memory, are recorded under that parameter's name.
    homes = {name: (tensor, recorder.name_of(tensor)) for name, tensor in targets_of(model).items()}
    missing = {name: tensor.numel() - filled.get(home, 0) for name, (tensor, home) in homes.items() if home is not None}
    # If the loader read values or copied values to an unknown place, they may decide which tensors it fills.
    is_known = not left_out and not recorder.lost
    unused = [n for n, shape in zip(table.names, table.shapes, strict=True) if n not in used and 0 not in shape]
    return Recording(
        layout=layout_digest(table),
        shapes=shapes,
        records=tuple(records),
        constants=tuple(constants),
        unrecorded=unrecorded,
        unused=tuple(unused),
        unfilled={name: count for name, count in missing.items() if count},
        fillable=frozenset(name for name, (_, home) in homes.items() if home in computed) if is_known else None,
        repeated=_repeated(records, recorder, Counter(home for _, home in homes.values())),
    )


def _repeated(
    records: Sequence[LayoutRecord], recorder: LoadRecorder, num_names: Mapping[str | None, int]
) -> dict[str, str]:
    targets: dict[str, set[str]] = {}
    for entry in records:
        targets.setdefault(entry.source, set()).add(entry.target)
    repeated = {}
    for home, replaced in recorder.replaced():
        # If a parameter has only one name, the loader overwrites it intentionally.
        for name in replaced if num_names[home] > 1 else ():
            last = name
            # A loader may copy two tensors alternately, which makes a cycle, so bound the iterations.
            for _ in replaced:
                if last not in targets:
                    last = replaced.get(last, last)
            if name not in targets and targets.get(last) == {home}:
                repeated[name] = last
    return repeated


_NAMED = 10


class _Step(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A conversion of received bytes that `record` describes, or a plain copy if `record` is None."""

    piece: torch.Tensor
    target: torch.Tensor
    record: LayoutRecord | None = None

    def run(self) -> None:
        if self.record is None:
            self.target.copy_(self.piece)
        else:
            install(self.record, self.piece, self.target)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Requirements:
    """The rows that a receiver needs and later offers. Call `install` and `finish` after the rows arrive."""

    rows: tuple[ShardRow, ...]
    num_live: int
    """Number of rows in live memory. Later rows are in scratch, or share the memory of earlier rows (`tied`)."""
    scratch_bytes: int
    tied: tuple[tuple[int, ...], ...] = ()
    """Groups of rows with the same memory under several names. Their sources must have identical bytes."""
    unrecorded: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are received unsliced and pass through the loader, with the reason."""
    unfilled: Mapping[str, int] = field(default_factory=dict)
    """Number of elements that no version fills, for each parameter and buffer. They retain their values."""
    unsure: tuple[str, ...] = ()
    """Parameters that the loader may fill from unrecorded tensors, depending on values."""
    _steps: Mapping[str, tuple[_Step, ...]] = field(default_factory=dict, repr=False)
    _last: tuple[_Step, ...] = field(default=(), repr=False)
    _constants: tuple[tuple[torch.Tensor, float], ...] = field(default=(), repr=False)
    _whole: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    _load: Load | None = field(default=None, repr=False)
    _model: torch.nn.Module | None = field(default=None, repr=False)
    _is_inference: bool = False
    """Whether some of the model's tensors were created in inference mode."""

    @classmethod
    def as_declared(cls, rows: Sequence[ShardRow]) -> Requirements:
        """Return requirements for these rows, which need no conversion. Raise PlanError if rows share memory."""
        tied = tied_targets([row.name for row in rows], [row.tensor for row in rows])
        return cls(rows=tuple(rows), num_live=len(rows), scratch_bytes=0, tied=tuple(map(tuple, tied)))

    def with_tied(self, others: Mapping[str, str]) -> Requirements:
        """Return these requirements with additional rows for other names of the same memory.

        Args:
            others: maps each additional name to the name whose rows share its memory.
        """
        rows, tied = list(self.rows), []
        for other, name in others.items():
            for number, row in enumerate(self.rows):
                if row.name == name:
                    tied.append((number, len(rows)))
                    rows.append(replace(row, name=other))
        return replace(self, rows=tuple(rows), tied=(*self.tied, *tied))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the required checkpoint tensors."""
        return tuple(dict.fromkeys(row.name for row in self.rows))

    def storages(self) -> frozenset[int] | None:
        """Return the storages that an update writes to, or None if the loader itself fills tensors."""
        if self.unrecorded:
            return None
        steps = [step.target for mine in (*self._steps.values(), self._last) for step in mine]
        filled = [*(row.tensor for row in self.rows), *steps, *(target for target, _ in self._constants)]
        return frozenset(tensor.untyped_storage()._cdata for tensor in filled)

    def why(self) -> tuple[str, ...]:
        """Return the report's text about unrecorded tensors, or () if every tensor is recorded."""
        if not self.unrecorded:
            return ()
        nbytes = sum(tensor.nbytes for tensor in self._whole.values())
        reasons = [f"{name}: {why}" for name, why in list(self.unrecorded.items())[:_NAMED]]
        more = [f"and {len(self.unrecorded) - _NAMED} more"] if len(self.unrecorded) > _NAMED else []
        head = f"{len(self.unrecorded)} tensors are received whole, {bytes_text(nbytes)}, and pass through the loader"
        unsure = f"; only it can fill {names_text(self.unsure)}, which keep their values if it does not"
        return (f"{head}: {'; '.join(reasons + more)}{unsure if self.unsure else ''}",)

    def _writing(self) -> AbstractContextManager[object]:
        return torch.inference_mode() if self._is_inference else torch.no_grad()

    def install(self, names: Iterable[str] | None = None) -> None:
        """Permute, cast and copy the verified rows of these tensors on the current stream. None means all tensors."""
        with self._writing():
            for name in self._steps if names is None else names:
                for step in self._steps.get(name, ()):
                    step.run()

    def in_copy(self, moved: Callable[[torch.Tensor], torch.Tensor | None]) -> tuple[dict[str, torch.Tensor], set[str]]:
        """Compute what the live tensors would contain after an update, from rows in a copy of the memory.

        Live memory does not change.

        Args:
            moved: returns a tensor's counterpart in the copy, or None if the copy does not cover its memory.

        Returns:
            The filled tensors by name, and the names of tensors with unknown values, which the loader itself fills.
        """
        if self._model is None:
            names = Counter(row.name for row in self.rows)
            return {
                row.name if names[row.name] == 1 else f"{row.name}{list(row.form.box.start)}": tensor
                for row in self.rows
                if (tensor := moved(row.tensor)) is not None
            }, set()
        live = live_tensors(self._model)
        others: dict[int, torch.Tensor] = {}

        def staged(tensor: torch.Tensor) -> torch.Tensor:
            copied = moved(tensor)
            if copied is not None:
                return copied
            # A tensor that is filled only from scratch is in no region, so a clone of its storage represents it.
            storage = tensor.untyped_storage()
            home = others.get(storage._cdata)
            if home is None:
                home = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage.clone())
                others[storage._cdata] = home
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return view.set_(home.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

        steps = [step for mine in self._steps.values() for step in mine] + list(self._last)
        with self._writing():
            # Writing into the copy is safe here: no row arrives at these targets, so a flip does not copy them.
            for step in steps:
                msgspec.structs.replace(step, piece=staged(step.piece), target=staged(step.target)).run()
            for target, value in self._constants:
                staged(target).fill_(value)
            unknown = set(self.unfilled) if self.unrecorded else set()
            tensors = {}
            for name, tensor in live.items():
                num_unfilled = self.unfilled.get(name, 0)
                if name in unknown or num_unfilled == tensor.numel():
                    continue
                tensors[name] = staged(tensor) if not num_unfilled else self._partly(tensor, steps, staged)
        return tensors, unknown

    def _partly(
        self, tensor: torch.Tensor, steps: Sequence[_Step], staged: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        whole = tensor.clone(memory_format=torch.preserve_format)
        pieces = [row.tensor for row in self.rows[: self.num_live]]
        pieces += [step.target if step.record is None else cut(step.target, step.record.target_box) for step in steps]
        pieces += [target for target, _ in self._constants]
        storage, start, stop = span(tensor)
        for piece in pieces:
            piece_storage, first, last = span(piece)
            if piece_storage == storage and start <= first and last <= stop and whole.stride() == tensor.stride():
                offset = (first - start) // piece.itemsize
                into = whole.view(piece.dtype) if whole.itemsize == piece.itemsize else whole
                torch.as_strided(into, piece.shape, piece.stride(), offset).copy_(staged(piece))
        return whole

    def finish(self) -> None:
        """Run the loader on unrecorded tensors, and set constants, after `install`. A PlanError has `mutated` set."""
        with self._writing():
            if self._whole and self._model is not None and self._load is not None:
                before = _addresses(self._model)
                # A loader may compute in place, but this process serves the received bytes, so pass clones.
                with user_code(f"the loader, given {names_text(list(self._whole))},", mutated=True):
                    self._load((name, tensor.clone()) for name, tensor in self._whole.items())
                if changed := dict(before.items() - _addresses(self._model).items()):
                    # Registrations and rows refer to the old memory, so the engine would miss the next version.
                    hint = "use a loader that copies into the parameters"
                    message = f"the loader replaced the memory of {len(changed)} tensors"
                    raise PlanError(message, mutated=True, tensor=min(changed), hint=hint)
            # The loader may write to the tensors below, so set constants and run the last steps after the loader.
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
    """Return a model's requirements from the recorded checkpoint. Rows keep live memory and scratch alive.

    Raises:
        PlanError: the recording is for a different table, the model is on the meta device, or torch lacks a dtype.
        DestinationError: there is not enough memory for the scratch.
    """
    if recording.layout != layout_digest(table):
        raise PlanError("the model was recorded with a different checkpoint", hint="record it again")
    if any(tensor.is_meta for tensor in live_tensors(model).values()):
        raise PlanError("the model is on the meta device", hint="materialise it first: module.to_empty(device=...)")
    run = load or own_loader(model)
    places = _Destinations(model, recording.touched)
    by_source: dict[str, list[LayoutRecord]] = {}
    for entry in recording.records:
        by_source.setdefault(entry.source, []).append(entry)
    for name, dtype, shape in zip(table.names, table.dtypes, table.shapes, strict=True):
        if name in by_source or name in recording.unrecorded:
            source = _Source(name=name, kind=torch_dtype(dtype), shape=torch_shape(dtype, shape))
            places.lay(source, by_source.get(name, []), whole=name in recording.unrecorded)
    requirements = places.requirements(recording, run, tags or {})
    # Unrecorded tensors cost memory and time at each update, so warn immediately and not only in the report.
    for line in requirements.why():
        warnings.warn(printable(line), RuntimeWarning, stacklevel=2)
    return requirements


class _Source(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint tensor with its dtype and shape in torch, which counts two F4 elements as one."""

    name: str
    kind: torch.dtype
    shape: tuple[int, ...]


class _BoxPlace(msgspec.Struct, eq=False, kw_only=True):
    """A destination for a box of a checkpoint tensor. `tensor` is None until the scratch is allocated."""

    source: _Source
    box: Box
    device: torch.device
    tensor: torch.Tensor | None

    def cut(self, box: Box) -> torch.Tensor:
        assert self.tensor is not None
        if box == self.box:
            return self.tensor
        begin = self.box.start
        start = tuple(a - b for a, b in zip(box.start, begin, strict=True))
        return cut(self.tensor, Box(start=start, stop=tuple(a - b for a, b in zip(box.stop, begin, strict=True))))


class _Destinations:
    """The destinations of all required boxes. Scratch is allocated when all destinations are known."""

    def __init__(self, model: torch.nn.Module, touched: frozenset[str]) -> None:
        self._model = model
        self._live = live_tensors(model)
        self._touched = touched
        self._device = next((t.device for t in self._live.values()), torch.device("cpu"))
        self._places: list[_BoxPlace] = []
        self._whole: dict[str, _BoxPlace] = {}
        self._rows: list[tuple[_BoxPlace, Box]] = []
        self._copies: list[tuple[_BoxPlace, _BoxPlace, Box]] = []
        self._moves: list[tuple[_BoxPlace, LayoutRecord]] = []

    def lay(self, source: _Source, records: Sequence[LayoutRecord], *, whole: bool) -> None:
        mine: list[_BoxPlace] = []
        # The loader receives the unsliced tensor from scratch. Records of this tensor are also copied from scratch.
        if whole:
            mine.append(self._add(source, Box.full(source.shape), self._device, None))
            self._rows.append((mine[0], mine[0].box))
            self._whole[source.name] = mine[0]
        views = [(entry, None if whole else self._direct(entry, source)) for entry in records]
        # Process larger boxes first, because a box inside an earlier box needs no row. Of equal boxes, prefer a direct
        # read.
        views.sort(key=lambda pair: (-pair[0].source_box.num_elements, pair[1] is None))
        # A layer's experts have hundreds of boxes. If one dim separates all boxes, skip the pairwise comparison.
        apart = not whole and _apart([entry.source_box for entry in records])
        for entry, view in views:
            overlapping = [] if apart else [(p, m) for p in mine if (m := common_box(p.box, entry.source_box))]
            if inside := next((place for place, common in overlapping if common == entry.source_box), None):
                self._moves.append((inside, entry))
                continue
            place = self._add(source, entry.source_box, self._live[entry.target].device, view)
            # Copy elements that another destination already receives, so that no element is transferred twice.
            missing = [place.box]
            for other, _ in overlapping:
                for common in filter(None, [common_box(rest, other.box) for rest in missing]):
                    self._copies.append((place, other, common))
                missing = [part for rest in missing for part in minus(rest, other.box)]
            self._rows += [(place, rest) for rest in missing]
            mine.append(place)
            if view is None:
                self._moves.append((place, entry))

    def _add(self, source: _Source, box: Box, device: torch.device, view: torch.Tensor | None) -> _BoxPlace:
        self._places.append(_BoxPlace(source=source, box=box, device=device, tensor=view))
        return self._places[-1]

    def _direct(self, record: LayoutRecord, source: _Source) -> torch.Tensor | None:
        if not record.in_order or record.target in self._touched or any(kind == "cast" for kind, _ in record.steps):
            return None
        target = cut(self._live[record.target], record.target_box)
        if target.shape != record.source_box.shape:
            try:
                target = target.view(record.source_box.shape)
            except RuntimeError:
                return None
        # Without a contiguous innermost dim every element would be a separate read.
        inner = next((step for n, step in zip(target.shape[::-1], target.stride()[::-1], strict=True) if n > 1), 1)
        if inner != 1:
            return None
        return target if target.dtype == source.kind else target.view(source.kind)

    def requirements(self, recording: Recording, load: Load, tags: Mapping[str, str]) -> Requirements:
        live = {id(place) for place in self._places if place.tensor is not None}
        scratch_bytes = self._allocate([place for place in self._places if place.tensor is None])
        rows = sorted(self._rows, key=lambda pair: id(pair[0]) not in live)
        steps: dict[str, list[_Step]] = {}
        last: list[_Step] = []
        params = dict(self._model.named_parameters(remove_duplicate=False)) if recording.unrecorded else {}
        for place, other, box in self._copies:
            steps.setdefault(place.source.name, []).append(_Step(piece=other.cut(box), target=place.cut(box)))
        for place, entry in self._moves:
            step = _Step(piece=place.cut(entry.source_box), target=self._live[entry.target], record=entry)
            (last if entry.target in self._touched else steps.setdefault(place.source.name, [])).append(step)
        return Requirements(
            rows=tuple(
                row_of(p.source.name, p.cut(b), p.source.shape, b.start, tag=tags.get(p.source.name, ""))
                for p, b in rows
            ),
            num_live=sum(id(place) in live for place, _ in rows),
            scratch_bytes=scratch_bytes,
            unrecorded=recording.unrecorded,
            unfilled=recording.unfilled,
            # Later writes cannot be detected, because threads and code outside of torch are not recorded.
            unsure=tuple(name for name in recording.unfilled if recording.fillable is None and name in params),
            _steps={name: tuple(mine) for name, mine in steps.items()},
            _last=tuple(last),
            _constants=tuple(
                (cut(self._live[constant.target], constant.target_box), constant.value)
                for constant in recording.constants
            ),
            _whole={name: place.cut(place.box) for name, place in self._whole.items()},
            _load=load,
            _model=self._model,
            _is_inference=any(tensor.is_inference() for tensor in self._live.values()),
        )

    def _allocate(self, places: Sequence[_BoxPlace]) -> int:
        total = 0
        for device in dict.fromkeys(place.device for place in places):
            mine = [place for place in places if place.device == device]
            nbytes = [place.box.num_elements * place.source.kind.itemsize for place in mine]
            # A flip exchanges the memory of either all regions or none, so the arena must be remappable.
            arena = Arena.allocate(needed_bytes(nbytes), device, is_remappable=True)
            for place, length, offset in zip(mine, nbytes, arena.place(nbytes), strict=True):
                place.tensor = arena.bytes_at(offset, length).view(place.source.kind).view(place.box.shape)
            total += arena.nbytes
        return total


def _apart(boxes: Sequence[Box]) -> bool:
    for dim in range(len(boxes[0].start)) if boxes else ():
        runs = sorted((box.start[dim], box.stop[dim]) for box in boxes)
        if all(run[1] <= other[0] for run, other in pairwise(runs)):
            return True
    return len(boxes) < 2


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in live_tensors(model).items()}
