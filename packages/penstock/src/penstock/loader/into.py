"""The verb `load_into`: straight into live parameters, keeping every `data_ptr`.

In: a module or a dict of tensors, and a URI. Out: a report; an error says whether anything was touched.
Not here: the run itself (`session`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from penstock.arguments import require_type
from penstock.config import ReadSettings
from penstock.engine.place import place_on
from penstock.errors import PenstockError, PlanError
from penstock.lifecycle import paused_gc
from penstock.loader.load import Weights, deferred_interrupts, load, open_session, reports_failure
from penstock.loader.match import Cast, Matched, Rename, can_cast, match_targets, require_cast
from penstock.loader.pending import own_tensor, own_tensors
from penstock.loader.progress import ProgressOption
from penstock.loader.report import LoadReport, outcome_of
from penstock.loader.session import LoadSession, ReadOptions
from penstock.loader.tensor import as_tensor
from penstock.memory.rehome import rehome
from penstock.memory.targets import note_written, require_initialised
from penstock.storage.weight_set import Names, Uris
from penstock.telemetry.journey import Journey

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def load_into(
    target: torch.nn.Module | Mapping[str, torch.Tensor],
    uri: Uris,
    *,
    strict: bool = True,
    rename: Rename = None,
    dtype: Cast = None,
    names: Names = None,
    verify: bool | None = None,
    group: ProcessGroup | None = None,
    progress: ProgressOption = None,
    settings: ReadSettings | None = None,
) -> LoadReport:
    """Fill live parameters and buffers in place from a weight set.

    Args:
        target: a module (its parameters and persistent buffers, tied ones filled once) or tensors by name. Of a DTensor
            this rank's part is filled. An empty dict receives new tensors on the CPU, all or none.
        uri: the weight set; see `load`.
        names: the tensors to load; see `load`.
        verify: whether bytes are compared with digests; see `load`.
        group: ranks that read a part each and exchange it; see `load`.
        progress: a bar, nothing, or a function; see `load`.
        settings: the memory limit, an arena for the target, and more (`ReadSettings`).
        strict: every tensor must have a target and every target a tensor; False fills what both sides have.
        rename: checkpoint name to target name.
        dtype: cast floating-point tensors to this dtype, or with `"target"` to the dtype of their target. None: a
            tensor of another dtype than its target is an error.

    Raises:
        PlanError: names, shapes or dtypes do not fit, the target has no tensors, or its tensors overlap; nothing was
            touched.
        PenstockError: with `mutated=True` when the target was touched: it must be filled again before use.

    Ownership: the target's memory stays where it is: `data_ptr`s, optimizer references and CUDA graphs hold. With
        `settings.arena` it moves, once: parameters stay the same objects, the arena lives as long as any of them.
    """
    # Before anything is opened: a target that cannot be filled needs no request to a store.
    require_cast(dtype)
    settings = ReadSettings.of(settings)
    if isinstance(target, MutableMapping) and not target:
        read = dataclasses.replace(settings, arena=False)
        load_all = partial(load, uri, names=names, verify=verify, group=group, progress=progress, settings=read)
        return _into_empty(target, rename, dtype, settings.arena, load_all)
    targets = targets_of(target, written=strict)
    device = device_of(targets)
    options = ReadOptions(device=device, names=names, verify=verify, progress=progress, settings=settings)
    with deferred_interrupts(group), Journey("load", uri=str(uri), device=str(device)) as journey:
        report = _load_into(target, targets, uri, options, group, journey, strict=strict, rename=rename, dtype=dtype)
        journey.outcome = outcome_of(report)
        return report


def _load_into(
    target: torch.nn.Module | Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    uri: Uris,
    options: ReadOptions,
    group: ProcessGroup | None,
    journey: Journey,
    *,
    strict: bool,
    rename: Rename,
    dtype: Cast,
) -> LoadReport:
    """Run `load_into`; a function of its own so that its locals, files among them, end where a signal is only noted."""
    # Some small objects for each tensor, all of which stay until the end.
    with paused_gc(), open_session(uri, options, group) as session:
        journey.received = session.received
        session.phases.enter("plan")
        with reports_failure(group, options, session.settings.stall_s):
            # Tensors without a target, and tied targets' second names, are not read.
            matched = match_targets(session, targets, rename, strict, cast=dtype)
            if not strict and isinstance(target, torch.nn.Module):
                require_no_copies(target, filled_of(targets, matched))
            if options.settings.arena:
                # After the match: a target that does not fit must not have been moved.
                rehome(target)
                matched = match_targets(session, targets_of(target), rename, strict, cast=dtype)
        report = _fill(session, matched) if group is None else _from_group(session, group, matched)
        if isinstance(target, torch.nn.Module):
            put_back(target)
        return report


def _into_empty(
    target: MutableMapping[str, torch.Tensor],
    rename: Rename,
    dtype: Cast,
    arena: bool,
    load_all: Callable[[], Weights],
) -> LoadReport:
    """Fill an empty mapping with new tensors under the target's names, all or none."""
    weights = load_all()
    made: dict[str, torch.Tensor] = {}
    for name in list(weights):
        wanted = name if rename is None else rename(name) if callable(rename) else rename.get(name)
        tensor = weights.pop(name)
        if wanted is None:
            continue
        if wanted in made:
            raise PlanError(f"{name} and another tensor both go to {wanted}", hint="correct rename=")
        made[wanted] = tensor.to(dtype) if isinstance(dtype, torch.dtype) and can_cast(tensor.dtype, dtype) else tensor
    if arena:
        rehome(made)
    target.update(made)
    return weights.report


def targets_of(
    target: torch.nn.Module | Mapping[str, torch.Tensor], *, whole: bool = False, written: bool = False
) -> dict[str, torch.Tensor]:
    """Return a module's parameters and persistent buffers, or tensors by name: detached, with the same memory.

    Args:
        target: a module, or tensors by name.
        whole: see `own_state`.
        written: the caller writes to the memory of all of them, so the module itself must use that memory.

    Raises:
        ConfigError: it is neither, or the module is being loaded. PlanError: a parameter is not initialised, or with
            `written` the module's state dict has copies.
    """
    if isinstance(target, torch.nn.Module):
        tensors: Mapping[str, torch.Tensor] = own_state(target, whole=whole)
        if written:
            require_no_copies(target, tensors)
    else:
        require_tensors("the target", target)
        tensors = target
    for name, tensor in tensors.items():
        # Before it is detached, which torch refuses for a parameter without a shape.
        require_initialised(name, tensor)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def own_state(module: torch.nn.Module, *, whole: bool = False) -> dict[str, torch.Tensor]:
    """Return a module's parameters and persistent buffers: the objects themselves, also after a load that failed.

    A load into the module that failed or was closed has written its last byte when this returns.

    Args:
        module: the module.
        whole: the values are to be read: raise the error of a load that failed.

    Raises:
        ConfigError: the module is being loaded (`load_in_background`), or with `whole` its memory was given back.
    """
    # The state dict and not the parameters: buffers that a checkpoint never has are not in it. What a module gives as
    # its extra state (`get_extra_state`) is a copy, or no tensor at all, so it cannot be filled.
    with own_tensors(whole):
        state = module.state_dict(keep_vars=True)
    return {
        name: own_tensor(value, whole=whole)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name.rpartition(".")[2] != _EXTRA_STATE_KEY_SUFFIX
    }


def require_no_copies(module: torch.nn.Module, written: Mapping[str, torch.Tensor]) -> None:
    """Raise PlanError if the state dict has copies, made by a hook or an override: the module never sees writes there.

    Views of the module's memory are no copies, and neither are tensors that the module keeps as plain attributes.

    Args:
        module: the module.
        written: tensors of its state dict that are to be written.
    """
    # Parameters are what the module has. Most modules have no other tensors, or buffers alone.
    others = {name: tensor for name, tensor in written.items() if not isinstance(tensor, torch.nn.Parameter)}
    if not others:
        return
    own = [own_tensor(tensor) for tensor in chain(module.parameters(), module.buffers())]
    ids = {id(tensor) for tensor in own}
    others = {name: tensor for name, tensor in others.items() if id(tensor) not in ids and tensor.numel()}
    memories = {memory_of(tensor) for tensor in own} if others else set()
    others = {name: tensor for name, tensor in others.items() if memory_of(tensor) not in memories}
    again = own_state(module) if others else {}
    for name, tensor in others.items():
        # `written` still holds the first copy, so a second copy has another address.
        if name not in again or memory_of(again[name]) != memory_of(tensor):
            why = "the module's state dict has a copy of it, so bytes written there would not reach the module"
            raise PlanError(
                why, tensor=name, hint="load its tensors with load, and give them to module.load_state_dict"
            )


def filled_of(targets: Mapping[str, torch.Tensor], matched: Matched) -> dict[str, torch.Tensor]:
    """Return the targets that a load fills."""
    memories = {memory_of(tensor) for tensor in matched.lines().tensors}
    return {name: tensor for name, tensor in targets.items() if memory_of(tensor) in memories}


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, of a DTensor that of this rank's part; 0: it has none."""
    try:
        return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()
    except (RuntimeError, ValueError):
        # Sparse, nested, fake or not initialised.
        return 0


def members_in(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], verb: str) -> dict[int, Member]:
    """Return the parameters and buffers that use the memory of these tensors, with their places, by their id.

    Args:
        module: the module. Pending tensors that a failed load left stand for its own tensors.
        tensors: of the module's state dict, by name.
        verb: for the error.

    Raises:
        PlanError: a tensor's memory is used by no parameter or buffer, so nothing can stand in its place.
    """
    memories = {memory_of(tensor): name for name, tensor in tensors.items() if tensor.numel()}
    members: dict[int, Member] = {}
    for places in places_of(module).values():
        own = own_tensor(places[0][0][places[0][1]])  # type: ignore[arg-type]
        if own.numel() and memory_of(own) in memories:
            members.setdefault(id(own), (own, []))[1].extend(places)
    found = {memory_of(own) for own, _ in members.values()}
    for memory, name in memories.items():
        if memory not in found:
            why = f"it is no parameter or buffer of the module, so {verb} cannot keep it from being used meanwhile"
            raise PlanError(why, tensor=name, hint="register it as a buffer, or use load_into")
    return members


def put_back(module: torch.nn.Module) -> None:
    """Put a module's own tensors into its places again, where pending ones of a load that failed are left."""
    for members, name in chain.from_iterable(places_of(module).values()):
        members[name] = own_tensor(members[name])  # type: ignore[arg-type]


def device_of(targets: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the one device of all targets. PlanError: there are several, or the meta device is among them."""
    if not targets:
        hint = "pass an empty dict to load_into to receive new tensors, or a module that has tensors"
        raise PlanError("the target has no tensors to fill", hint=hint)
    devices = {tensor.device for tensor in targets.values() if tensor.numel()}
    if any(device.type == "meta" for device in devices):
        raise PlanError(
            "some targets are on the meta device", hint="materialise them first: module.to_empty(device=...)"
        )
    # One device for one load: staging, streams and the checker are of one. A target without elements has none.
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    if devices:
        raise PlanError("targets are on several devices", hint="call load_into once for the targets of each device")
    return device


Place = tuple[dict[str, torch.Tensor | None], str]
"""Where a module has a tensor: one of its dicts of parameters or buffers, and the name in it."""

Member = tuple[torch.Tensor, list[Place]]
"""A module's parameter or buffer, and its places."""


def places_of(module: torch.nn.Module) -> dict[int, list[Place]]:
    """Return the places of each parameter and buffer by its id; a tied one has several."""
    places: dict[int, list[Place]] = {}
    for submodule in module.modules():
        for members in (submodule._parameters, submodule._buffers):
            for name, tensor in members.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((members, name))  # type: ignore[arg-type]
    return places


def require_tensors(what: str, tensors: object) -> None:
    """Raise ConfigError unless this is a mapping of names to tensors."""
    expected = "a torch.nn.Module, or a dict of tensors by name"
    require_type(what, tensors, Mapping, expected)
    assert isinstance(tensors, Mapping)
    for name, tensor in tensors.items():
        require_type(f"{what}[{name!r}]", tensor, torch.Tensor, expected)


def _fill(session: LoadSession, matched: Matched) -> LoadReport:
    with marks_target(session):
        nbytes = fill(session, matched)
        return session.finish(num_tensors=len(matched.table), nbytes=nbytes)


def fill(
    session: LoadSession,
    matched: Matched,
    order: Sequence[int] | None = None,
    on_filled: Callable[[int], None] | None = None,
) -> int:
    """Read every row into its tensors; return the bytes.

    Args:
        session: opened; the caller finishes it.
        matched: the rows and their tensors.
        order: indices of the tensors that have bytes, counted among themselves: the order in which they are wanted;
            None: file order. Not with parts of tensors.
        on_filled: called with such an index once the tensor is complete and verified.
    """
    lines = matched.lines()
    device = session.options.device
    regions = session.regions(lines.table, lines.boxes)
    table, boxes = (lines.table, lines.boxes) if regions is None else (regions.table, regions.boxes)
    is_exact = device.type == "cpu" and not any(box is not None for box in boxes)
    plan = session.make_plan(table, boxes, pack=False, exact=is_exact)
    rows: list[int] = np.flatnonzero(plan.row_slab >= 0).tolist()
    if order is not None:
        plan = session.plan = plan.in_order_of(order)
    # The targets themselves are the slabs, so that no second copy of the weights is needed. A target that is not
    # contiguous, is cast or is cut from leaves is filled through a slab, and copied when that is complete.
    by_itself = [row if regions is None else regions.line_of(row) for row in rows]
    direct = [None if line is None else lines.memory(line) for line in by_itself]
    place = place_on(device, plan.slab_nbytes.tolist(), direct)
    checker = session.checker(plan, place, None if regions is None else regions.leaves)
    window_bytes = session.settings.memory_bytes if any(memory is None for memory in direct) else 0
    # In order, with a bound that is never reached: slabs are then checked one by one as they are waited for.
    window_bytes = window_bytes if order is None else plan.nbytes
    run = session.begin(plan, place, checker=checker, window_bytes=window_bytes, order=order)
    session.enter_move()
    not_noted = set(range(len(lines.tensors)))
    cut_bytes = {} if regions is None else regions.cut_bytes()

    def memory(line: int) -> torch.Tensor:
        """Return the memory for a box that is cut: the target's own where that takes the bytes as they are."""
        own = lines.memory(line)
        return torch.as_tensor(place_on(device, [cut_bytes[line]]).take(0)) if own is None else own

    try:
        for slab in run.slabs():
            # Verified by now: where digests are compared, a damaged slab is never copied.
            line = by_itself[slab]
            if direct[slab] is not None and line is not None:
                # All in one call at the end, unless this one can be used from now on.
                if on_filled is not None:
                    note_written([lines.tensors[line]])
                    not_noted.discard(line)
            else:
                row, box = rows[slab], boxes[rows[slab]]
                shape = table.shapes[row] if box is None else box.shape
                stored = as_tensor(torch.as_tensor(place.take(slab)), table.dtypes[row], shape)
                for line, tensor in [(row, stored)] if regions is None else regions.arrived(row, stored, memory):
                    session.is_touched = True
                    target = lines.tensors[line]
                    # Not one that was cut into the target itself.
                    if tensor.data_ptr() != target.data_ptr():
                        target.copy_(tensor)
                        not_noted.discard(line)
                if order is not None and device.type == "cuda":
                    # The copy is queued on the stream that was current where the load began; its user may have another.
                    torch.cuda.current_stream(device).synchronize()
            if on_filled is not None:
                on_filled(slab)
    except BaseException:
        # First the reads that are under way: only then is it known whether a target was written to.
        run.close()
        if run.is_touched:
            note_written(lines.tensors[line] for line in not_noted)
        raise
    note_written(lines.tensors[line] for line in not_noted)
    with session.progress() as progress:
        progress.follow(run.ticket, stall_s=session.settings.stall_s)
    return sum(tensor.nbytes for tensor in lines.tensors)


def _from_group(session: LoadSession, group: ProcessGroup, matched: Matched) -> LoadReport:
    from penstock.loader.group import exchange

    nbytes = 0
    # The ranks exchange through slabs of their own: a parameter's memory is not laid out as a round is. Tensors come
    # whole, so that all ranks have the same rows.
    with marks_target(session):
        parts = iter(matched.parts)
        for _, tensors in exchange(session, group, matched.table, [None] * len(matched.table)):
            for tensor in tensors:
                for box, target in next(parts):
                    target.copy_(tensor if box is None else tensor[box.slices])
                    nbytes += target.nbytes
        return session.finish(num_tensors=len(matched.table), nbytes=nbytes)


@contextmanager
def marks_target(session: LoadSession) -> Iterator[None]:
    """Set `mutated` of an error from the block, if any byte can have reached the target."""
    try:
        yield
    except PenstockError as error:
        session.phases.fail(error)
        # Closed first: a read that is still under way may write to the target after this look.
        session.close()
        run = session.run
        error.mutated = error.mutated or session.is_touched or (run is not None and run.is_touched)
        raise
