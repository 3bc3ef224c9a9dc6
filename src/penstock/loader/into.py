"""The verb `load_into`: straight into live parameters, keeping every `data_ptr`.

In: a module or a dict of tensors, and a URI. Out: a report; an error says whether anything was touched.
Not here: the run itself (`session`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from penstock.arguments import require_type
from penstock.engine.place import place_on
from penstock.errors import PenstockError, PlanError
from penstock.loader.load import deferred_interrupts, open_session, reports_failure
from penstock.loader.pending import own_tensor
from penstock.loader.progress import ProgressOption
from penstock.loader.report import LoadReport, outcome_of
from penstock.loader.session import Options, Session
from penstock.loader.tensor import torch_dtype, torch_shape
from penstock.loader.tied import differing_rows
from penstock.memory.rehome import rehome
from penstock.memory.targets import note_written, require_initialised, sources_differ, tied_targets
from penstock.storage.weight_set import Names, Uris
from penstock.telemetry.journey import Journey
from penstock.types import TensorTable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Rename = Callable[[str], str | None] | Mapping[str, str] | None
"""Checkpoint name -> target name; None leaves the tensor out. A mapping leaves out the names that it does not have."""


def load_into(
    target: torch.nn.Module | Mapping[str, torch.Tensor],
    uri: Uris,
    *,
    strict: bool = True,
    rename: Rename = None,
    arena: bool = False,
    names: Names = None,
    verify: bool | None = None,
    group: ProcessGroup | None = None,
    memory_bytes: int | str | None = None,
    storage_options: Mapping[str, str] | None = None,
    progress: ProgressOption = None,
    trace: str | os.PathLike[str] | None = None,
) -> LoadReport:
    """Fill live parameters and buffers in place from a weight set.

    Args:
        target: a module (its parameters and persistent buffers, tied ones filled once) or tensors by name.
        uri: the weight set; see `load`.
        names: the tensors to load; see `load`.
        verify: whether bytes are compared with digests; see `load`.
        group: ranks that read a part each and exchange it; see `load`.
        memory_bytes: limit of host staging; see `load`.
        storage_options: credentials and endpoint of an object store; see `load`.
        progress: a bar, nothing, or a function; see `load`.
        trace: a file for a Chrome trace; see `load`.
        strict: every tensor must have a target and every target a tensor; False fills what both sides have.
        rename: checkpoint name to target name.
        arena: first move the target into one arena (`memory.rehome`), so that peers reach it by one registration.

    Raises:
        PlanError: names, shapes or dtypes do not fit (lists the first ten); nothing was touched.
        PenstockError: with `mutated=True` when the target was touched: it must be filled again before use.

    Ownership: the target's memory stays where it is: `data_ptr`s, optimizer references and CUDA graphs hold. With
        `arena` it moves, once: parameters stay the same objects, the arena lives as long as any of them.
    """
    # Before anything is opened: a target that cannot be filled needs no request to a store.
    targets = targets_of(target)
    device = device_of(targets)
    options = Options(
        device=device, names=names, verify=verify, storage_options=storage_options, progress=progress, trace=trace
    )
    with deferred_interrupts(group), Journey("load", uri=str(uri), device=str(device)) as journey:
        report = _load_into(
            target, targets, uri, options, memory_bytes, group, journey, strict=strict, rename=rename, arena=arena
        )
        journey.outcome = outcome_of(report)
        return report


def _load_into(
    target: torch.nn.Module | Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    uri: Uris,
    options: Options,
    memory_bytes: int | str | None,
    group: ProcessGroup | None,
    journey: Journey,
    *,
    strict: bool,
    rename: Rename,
    arena: bool,
) -> LoadReport:
    """Run `load_into`; a function of its own so that its locals, files among them, end where a signal is only noted."""
    with open_session(uri, options, memory_bytes, group) as session:
        journey.received = session.received
        session.phases.enter("plan")
        with reports_failure(group, options, session.settings.stall_s):
            table = session.table()
            rows, filled = match_targets(session, table, targets, rename, strict)
            if arena:
                # After the match: a target that does not fit must not have been moved.
                rehome(target)
                rows, filled = match_targets(session, table, targets_of(target), rename, strict)
        # Tensors without a target, and tied targets' second names, are not read.
        table = table.take(rows)
        report = _fill(session, table, filled) if group is None else _from_group(session, group, table, filled)
        if isinstance(target, torch.nn.Module):
            put_back(target)
        return report


def targets_of(target: torch.nn.Module | Mapping[str, torch.Tensor], *, whole: bool = False) -> dict[str, torch.Tensor]:
    """Return a module's parameters and persistent buffers, or tensors by name: detached, with the same memory.

    Args:
        target: a module, or tensors by name.
        whole: see `own_state`.

    Raises:
        ConfigError: it is neither, or the module is being loaded. PlanError: a parameter is not initialised.
    """
    if isinstance(target, torch.nn.Module):
        tensors: Mapping[str, torch.Tensor] = own_state(target, whole=whole)
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
        ConfigError: the module is being loaded (`start_loading`), or with `whole` its memory was given back.
    """
    # The state dict and not the parameters: buffers that a checkpoint never has are not in it. What a module gives as
    # its extra state (`get_extra_state`) is a copy, or no tensor at all, so it cannot be filled.
    return {
        name: own_tensor(value, whole=whole)
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and name.rpartition(".")[2] != _EXTRA_STATE_KEY_SUFFIX
    }


def put_back(module: torch.nn.Module) -> None:
    """Put a module's own tensors into its places again, where pending ones of a load that failed are left."""
    for members, name in chain.from_iterable(places_of(module).values()):
        members[name] = own_tensor(members[name])  # type: ignore[arg-type]


def device_of(targets: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the one device of all targets. PlanError: there are several, or the meta device is among them."""
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


_RENAME = "give the weights of this target; load_into(rename=) gives the target's names where they differ"


def match_targets(
    session: Session, table: TensorTable, targets: Mapping[str, torch.Tensor], rename: Rename, strict: bool
) -> tuple[list[int], list[torch.Tensor]]:
    """Return the rows to load, and the tensor that each fills.

    Args:
        session: opened; it reads tensors that go to one memory and have no digests, to compare them.
        table: the rows of the weight set.
        targets: tensors by name.
        rename, strict: see `load_into`.

    Raises:
        PlanError: names, shapes or dtypes do not fit; lists the first ten offenders. Not strict: no name fits. Targets
            share memory, and one would overwrite the other.
    """
    rows: list[int] = []
    filled: list[torch.Tensor] = []
    used: dict[str, str] = {}
    faults: list[str] = []
    absent: list[str] = []
    for row, name in enumerate(table.names):
        wanted = name if rename is None else rename(name) if callable(rename) else rename.get(name)
        if wanted is None:
            continue
        if wanted not in targets:
            if strict:
                absent.append(f"{name}: the target has no {'such tensor' if wanted == name else wanted}")
            continue
        if wanted in used:
            faults.append(f"{name} and {used[wanted]} both go to {wanted}")
            continue
        used[wanted] = name
        tensor = targets[wanted]
        dtype, shape = torch_dtype(table.dtypes[row]), torch_shape(table.dtypes[row], table.shapes[row])
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            faults.append(f"{name}: {dtype} {list(shape)} does not fit {wanted}: {tensor.dtype} {list(tensor.shape)}")
            continue
        rows.append(row)
        filled.append(tensor)
    if strict:
        places = set(map(place_of, filled)) if len(used) < len(targets) else set()
        missing = [n for n, t in targets.items() if n not in used and t.numel() and place_of(t) not in places]
        # First: of a large checkpoint there may be many tensors too many, and these few are the reason.
        absent = [*(f"{name}: the weight set has no tensor for it" for name in missing), *absent]
    elif not used and targets and len(table):
        message = f"no tensor fits: the weight set has {_some(table.names)}, and the target {_some(list(targets))}"
        raise PlanError(message, hint=_RENAME)
    # All offenders before one error: a wrong `rename` is then plain from a single run.
    if misfits := [*faults, *absent]:
        more = f" (and {len(misfits) - 10} more)" if len(misfits) > 10 else ""
        hint = "or pass strict=False" if used else _RENAME
        if faults:
            hint = "tensors are filled unchanged: nothing is cast or reshaped"
        raise PlanError(f"{len(misfits)} tensors do not fit: {'; '.join(misfits[:10])}{more}", hint=hint)
    return _once(session, table, rows, filled)


def _once(
    session: Session, table: TensorTable, rows: list[int], filled: list[torch.Tensor]
) -> tuple[list[int], list[torch.Tensor]]:
    """Return rows and tensors with each memory once: a module lists a tied weight under all its names.

    Raises:
        PlanError: two of the tensors share a part of their memory, or are one memory and their rows have other bytes.
    """
    groups = tied_targets([table.names[row] for row in rows], filled)
    if not groups:
        return rows, filled
    if pair := differing_rows(session, table, [[rows[at] for at in group] for group in groups]):
        raise sources_differ(*(table.names[row] for row in pair))
    second = {at for group in groups for at in group[1:]}
    kept = [at for at in range(len(rows)) if at not in second]
    return [rows[at] for at in kept], [filled[at] for at in kept]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the bytes of a tensor: equal for tied weights."""
    return tensor.data_ptr(), tensor.nbytes


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory in which a tensor lies, perhaps with others."""
    return tensor.untyped_storage().data_ptr()


def _fill(session: Session, table: TensorTable, filled: list[torch.Tensor]) -> LoadReport:
    with marks_target(session):
        nbytes = fill_slabs(session, table, filled)
        return session.finish(num_tensors=len(table), nbytes=nbytes)


def fill_slabs(
    session: Session,
    table: TensorTable,
    filled: list[torch.Tensor],
    order: Sequence[int] | None = None,
    on_filled: Callable[[int], None] | None = None,
) -> int:
    """Read every row into its tensor; return the bytes.

    Args:
        session: opened; the caller finishes it.
        table: the rows, in file order.
        filled: the tensor of each row.
        order: indices of the tensors that have bytes, counted among themselves: the order in which they are wanted;
            None: file order.
        on_filled: called with such an index once the tensor is complete and verified.
    """
    plan = session.make_plan(table, [None] * len(table), pack=False, exact=session.options.device.type == "cpu")
    filled_by_slab = [filled[row] for row in np.flatnonzero(plan.row_slab >= 0).tolist()]
    if order is not None:
        plan = session.plan = plan.in_order_of(order)
    # The targets themselves are the slabs, so that no second copy of the weights is needed. A target that is not
    # contiguous is filled through a slab of its own, and copied when that is complete.
    flat = [
        (tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device))
        .reshape(-1)
        .view(torch.uint8)
        for tensor in filled_by_slab
    ]
    place = place_on(session.options.device, plan.slab_nbytes.tolist(), flat)
    checker = session.checker(plan, place)
    # With a bound that is never reached, slabs are also checked one by one as they are waited for.
    window_bytes = 0 if order is None else plan.nbytes
    run = session.begin(plan, place, checker=checker, window_bytes=window_bytes, order=order)
    session.enter_move()
    not_noted = set(range(len(filled_by_slab)))
    try:
        for slab in run.slabs():
            # Verified by now: where digests are compared, a damaged slab is never copied.
            target = filled_by_slab[slab]
            if target.is_contiguous():
                note_written([target])
            else:
                target.copy_(flat[slab].view(target.dtype).view(target.shape))
                if order is not None and target.device.type == "cuda":
                    # The copy is queued on the stream that was current where the load began; its user may have another.
                    torch.cuda.current_stream(target.device).synchronize()
            not_noted.remove(slab)
            if on_filled is not None:
                on_filled(slab)
    except BaseException:
        # First the reads that are under way: only then is it known whether a target was written to.
        run.close()
        if run.is_touched:
            note_written(filled_by_slab[slab] for slab in not_noted)
        raise
    with session.progress() as progress:
        progress.follow(run.ticket, stall_s=session.settings.stall_s)
    return plan.nbytes


def _from_group(session: Session, group: ProcessGroup, table: TensorTable, filled: list[torch.Tensor]) -> LoadReport:
    from penstock.loader.group import exchange

    nbytes = 0
    # The ranks exchange through slabs of their own: a parameter's memory is not laid out as a round is.
    with marks_target(session):
        targets = iter(filled)
        for _, tensors in exchange(session, group, table, [None] * len(table)):
            for tensor in tensors:
                next(targets).copy_(tensor)
                nbytes += tensor.nbytes
        return session.finish(num_tensors=len(table), nbytes=nbytes)


@contextmanager
def marks_target(session: Session) -> Iterator[None]:
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
