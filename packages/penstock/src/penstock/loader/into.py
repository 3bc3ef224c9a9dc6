"""The verb `load_into`, which reads directly into live parameters and keeps every `data_ptr`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from penstock.config import ReadSettings
from penstock.engine.place import place_on
from penstock.errors import PenstockError, PlanError
from penstock.lifecycle import paused_gc
from penstock.loader.load import Weights, deferred_interrupts, load, open_session, reports_failure
from penstock.loader.match import Cast, Matched, Rename, can_cast, match_targets, require_cast
from penstock.loader.progress import ProgressOption
from penstock.loader.report import LoadReport
from penstock.loader.session import LoadSession, ReadOptions
from penstock.loader.target_tensors import device_of, filled_of, put_back, require_no_copies, targets_of
from penstock.loader.tensor import as_tensor
from penstock.memory.rehome import rehome
from penstock.memory.targets import note_written
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

    The target's memory stays where it is, so `data_ptr`s, optimizer references and CUDA graphs stay valid. With
    `settings.arena` the memory moves once, and the parameters stay the same objects.

    Args:
        target: a module (its parameters and persistent buffers, tied weights filled once), or tensors by name. For a
            DTensor, this rank's shard is filled. An empty dict receives new tensors on the CPU.
        uri, names, verify, group, progress: see `load`.
        settings: memory limit, an arena for the target, and more. See `ReadSettings`.
        strict: if True, every tensor must have a target and every target a tensor. If False, only matches are filled.
        rename: maps a checkpoint name to a target name.
        dtype: cast floating-point tensors to this dtype, or with `"target"` to the dtype of their target. If
            `dtype` is None, different dtypes are an error.

    Raises:
        PlanError: names, shapes or dtypes do not match, the target has no tensors, or its tensors overlap. Nothing was
            touched.
        PenstockError: with `mutated=True` the target was touched and must be filled again before use.
    """
    # Check the target first, so that an invalid target causes no request to a store.
    require_cast(dtype)
    settings = ReadSettings.of(settings)
    if isinstance(target, MutableMapping) and not target:
        read = msgspec.structs.replace(settings, arena=False)
        load_all = partial(load, uri, names=names, verify=verify, group=group, progress=progress, settings=read)
        return _into_empty(target, rename, dtype, settings.arena, load_all)
    targets = targets_of(target, written=strict)
    device = device_of(targets)
    options = ReadOptions(device=device, names=names, verify=verify, progress=progress, settings=settings)
    with deferred_interrupts(group), Journey("load", uri=str(uri), device=str(device)) as journey:
        match = partial(match_targets, rename=rename, strict=strict, cast=dtype)
        return _load_into(target, targets, uri, options, group, journey, strict=strict, match=match)


def _load_into(
    target: torch.nn.Module | Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    uri: Uris,
    options: ReadOptions,
    group: ProcessGroup | None,
    journey: Journey,
    *,
    strict: bool,
    match: Callable[[LoadSession, Mapping[str, torch.Tensor]], Matched],
) -> LoadReport:
    """Run `load_into` in a separate function, so that its locals are released inside the block that defers Ctrl-C."""
    # The load creates small objects for each tensor, and all of them live until its end.
    with paused_gc(), open_session(uri, options, group) as session:
        journey.received = session.received
        session.phases.enter("plan")
        with reports_failure(group, options, session.settings.stall_s):
            matched = match(session, targets)
            if not strict and isinstance(target, torch.nn.Module):
                require_no_copies(target, filled_of(targets, matched))
            if options.settings.arena:
                # Move the target only after the match, so that an unmatched target stays where it is.
                rehome(target)
                matched = match(session, targets_of(target))
        with marks_target(session):
            nbytes = fill(session, matched) if group is None else _exchange_into(session, group, matched)
            report = session.finish(num_tensors=len(matched.table), nbytes=nbytes)
        if isinstance(target, torch.nn.Module):
            put_back(target)
        journey.report = report
        return report


def _into_empty(
    target: MutableMapping[str, torch.Tensor], rename: Rename, dtype: Cast, arena: bool, load_all: Callable[[], Weights]
) -> LoadReport:
    """Fill an empty mapping with new tensors under the target's names, or leave it empty on an error."""
    weights = load_all()
    made: dict[str, torch.Tensor] = {}
    for name in list(weights):
        wanted = name if rename is None else rename(name) if callable(rename) else rename.get(name)
        tensor = weights.pop(name)
        if wanted is None:
            continue
        if wanted in made:
            raise PlanError(f"rename= maps {name} and another tensor to {wanted}", hint="use distinct names")
        made[wanted] = tensor.to(dtype) if isinstance(dtype, torch.dtype) and can_cast(tensor.dtype, dtype) else tensor
    if arena:
        rehome(made)
    target.update(made)
    return weights.report


def fill(
    session: LoadSession,
    matched: Matched,
    order: Sequence[int] | None = None,
    on_filled: Callable[[int], None] | None = None,
) -> int:
    """Read every row into its tensors, and return the number of bytes.

    `order` is the order of filling, as indices among the tensors that have bytes. `on_filled` is called with the
    index of each tensor that is complete and verified.
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
    # Use the targets as slabs, so that no second copy of the weights is needed. A target that is not contiguous, is
    # cast, or is cut from leaves is copied from a separate slab once that slab is complete.
    line_of_slab = [row if regions is None else regions.line_of(row) for row in rows]
    direct = [None if line is None else lines.memory(line) for line in line_of_slab]
    place = place_on(device, plan.slab_nbytes.tolist(), direct)
    checker = session.checker(plan, place, None if regions is None else regions.leaves)
    window_bytes = session.settings.memory_bytes if any(memory is None for memory in direct) else 0
    # If `order` is set, use a window limit that is never reached, so that the run checks each slab when it is awaited.
    window_bytes = window_bytes if order is None else plan.nbytes
    run = session.begin(plan, place, checker=checker, window_bytes=window_bytes, order=order)
    session.enter_move()
    not_noted = set(range(len(lines.tensors)))
    cut_bytes = {} if regions is None else regions.cut_bytes()

    def memory(line: int) -> torch.Tensor:
        own = lines.memory(line)
        return torch.as_tensor(place_on(device, [cut_bytes[line]]).take(0)) if own is None else own

    try:
        for slab in run.slabs():
            # The slab is verified by now, so corrupted bytes are never copied.
            line = line_of_slab[slab]
            if direct[slab] is not None and line is not None:
                # Without a callback, the versions of all tensors are incremented in one call at the end.
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
                    if tensor.data_ptr() != target.data_ptr():
                        target.copy_(tensor)
                        not_noted.discard(line)
                if order is not None and device.type == "cuda":
                    # The copy runs on the stream on which the load started, but the user may use a different stream.
                    torch.cuda.current_stream(device).synchronize()
            if on_filled is not None:
                on_filled(slab)
    except BaseException:
        # End the running reads first, because a running read may still write to a target.
        run.close()
        if run.is_touched:
            note_written(lines.tensors[line] for line in not_noted)
        raise
    note_written(lines.tensors[line] for line in not_noted)
    with session.progress() as progress:
        progress.follow(run.ticket, stall_s=session.settings.stall_s)
    return sum(tensor.nbytes for tensor in lines.tensors)


def _exchange_into(session: LoadSession, group: ProcessGroup, matched: Matched) -> int:
    from penstock.loader.group import exchange

    nbytes = 0
    # Exchange whole tensors through separate slabs, so that all ranks have the same rows.
    parts = iter(matched.parts)
    for _, tensors in exchange(session, group, matched.table, [None] * len(matched.table)):
        for tensor in tensors:
            for box, target in next(parts):
                target.copy_(tensor if box is None else tensor[box.slices])
                nbytes += target.nbytes
    return nbytes


@contextmanager
def marks_target(session: LoadSession) -> Iterator[None]:
    """Set `mutated` on an error from the block if any byte may have reached the target."""
    try:
        yield
    except PenstockError as error:
        session.phases.fail(error)
        # Close the session first, because a running read could still write to the target.
        session.close()
        run = session.run
        error.mutated = error.mutated or session.is_touched or (run is not None and run.is_touched)
        raise
