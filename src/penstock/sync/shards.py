"""Declaration of the boxes of tensors in a rank's memory, as views.

In: a module, or tensors by name: whole, DTensors of any mesh, `Shard`s. Out: `Row`s; the regions of memory behind them;
the `Layout` that a planner needs.
Not here: a receiver's requirements (`sync.recording.requirements`), Megatron's names (`integrations.megatron`),
registering memory (`local_version`).

    DTensor [10, 4], mesh (2, 2), (_StridedShard(0, split_factor=2), Shard(0)) -> rows 0..2 and 5..6 of it, two Rows
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.arguments import require_type
from penstock.errors import PlanError
from penstock.loader.tensor import dtype_of
from penstock.memory.arena import Arena
from penstock.memory.rehome import rehome
from penstock.peer.local_weights import place_rows
from penstock.plan.layout import Form, Layout
from penstock.transport.protocol import Memory
from penstock.transport.storages import require_memory
from penstock.types import Box, DType

Runs = list[tuple[int, int]]
"""The index ranges `[start, stop)` of one dim that a rank has, in the order in which they lie in its memory."""


# `eq=False`, here and below: rows compare by identity, because torch compares tensors element by element.
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Row:
    """A box of one tensor in this rank's memory."""

    name: str
    tensor: torch.Tensor = field(repr=False)
    """A view of exactly the box's elements, of any strides."""
    form: Form


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Shard:
    """The part of one tensor that a rank has, as declared by its owner; shapes and offset as torch shows the tensor."""

    tensor: torch.Tensor = field(repr=False)
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tag: str = ""
    """The transformation that was applied to the values; see `Form`."""


Declarable = torch.Tensor | Shard | Sequence[Shard]

_DECLARABLE = "a torch.nn.Module, or a dict of tensors, Shards or lists of Shards by name"


def declared(params: torch.nn.Module | Mapping[str, Declarable]) -> tuple[Row, ...]:
    """Return the rows of all tensors of a rank.

    Args:
        params: a module (its parameters and persistent buffers, tied ones under each name), or tensors by name: whole
            ones, DTensors, a `Shard`, several Shards.

    Raises:
        PlanError: names the tensor that cannot be declared: partial sums, wrappers, no dtype of the format, memory
            that overlaps itself, or a box outside its tensor.

    Ownership: rows view the live memory and keep it alive.
    Order: for FSDP2 between steps; this reshards the module, as its `state_dict` does.
    """
    require_type("params", params, (torch.nn.Module, Mapping), _DECLARABLE)
    tensors = _state(params) if isinstance(params, torch.nn.Module) else params
    return tuple(row for name, value in tensors.items() for row in _rows(name, value))


def row_of(
    name: str, tensor: torch.Tensor, global_shape: Sequence[int], offset: Sequence[int], *, tag: str = ""
) -> Row:
    """Return the row of a tensor that is the box at `offset` of a tensor of `global_shape`.

    Raises:
        PlanError: as `declared`.
    """
    tensor = tensor.detach()
    # Wrappers (quantised, nested, sparse tensors) have several memories, or one that is not the values.
    if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
        raise PlanError(f"a {type(tensor).__name__} has no memory of its own", tensor=name, hint="declare its parts")
    # Torch conjugates and negates lazily, by a bit on the tensor: a peer that reads the bytes would miss it.
    if tensor.is_conj() or tensor.is_neg():
        raise PlanError("its values differ from its memory", tensor=name, hint="declare tensor.resolve_conj()")
    if not len(tensor.shape) == len(global_shape) == len(offset):
        message = f"shape {list(tensor.shape)}, offset {list(offset)} and global shape {list(global_shape)}"
        raise PlanError(f"{message} have different numbers of dims", tensor=name)
    require_memory(name, tensor)
    try:
        form = form_of(tensor.dtype, tuple(global_shape), tuple(offset), tuple(tensor.shape), tensor.stride(), tag)
    except PlanError as error:
        # `form_of` is cached over tensors, so it cannot know the name.
        error.tensor = name
        raise
    return Row(name=name, tensor=tensor, form=form)


@functools.lru_cache(maxsize=1 << 12)
def form_of(
    kind: torch.dtype,
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    tag: str = "",
) -> Form:
    """Return the form of a torch tensor's memory: two elements of F4 are one element in torch.

    Raises:
        PlanError: the memory has no form; says why.
    """
    # Cached: the experts of a model are thousands of tensors with a handful of forms.
    dtype = dtype_of(kind)
    if dtype is DType.F4:
        if not shape or (shape[-1] > 1 and strides[-1] != 1):
            raise PlanError("its packed elements are not contiguous in the last dim")
        strides = (*(2 * step for step in strides[:-1]), 1)
        global_shape, offset, shape = ((*dims[:-1], 2 * dims[-1]) for dims in (global_shape, offset, shape))
    if min(offset, default=0) < 0:
        raise PlanError(f"its offset {list(offset)} is negative")
    box = Box(start=offset, stop=tuple(a + n for a, n in zip(offset, shape, strict=True)))
    form = Form(dtype=dtype, shape=global_shape, box=box, strides=strides, tag=tag)
    if fault := form.fault():
        raise PlanError(fault)
    return form


def local_runs(num: int, parts: Iterable[tuple[int, int, int]]) -> Runs:
    """Return the index ranges of a dim of `num` that a rank has after repeated cuts, as by DTensor's placements.

    Args:
        parts: for each mesh axis that shards the dim, in the mesh's order: its size, this rank's coordinate, and the
            split factor: 1 for a plain shard; with factor k the dim is cut into k pieces, and the shard is this rank's
            chunk of each, joined.
    """
    # Each mesh axis cuts what the axes before it have left, as DTensor applies its placements.
    runs: Runs = [(0, num)]
    for size, coordinate, split_factor in parts:
        total = sum(stop - start for start, stop in runs)
        mine: Runs = []
        for first, last in _chunks(0, total, split_factor):
            low, high = _chunks(first, last, size)[coordinate]
            mine += _select(runs, low, high)
        runs = mine
    return runs


def regions_of(rows: Iterable[Row], arenas: Sequence[Arena] = ()) -> tuple[Memory, ...]:
    """Return the memory behind rows: the arena that a row lies in, else its torch storage.

    Raises:
        PlanError: a row has no memory.
    """
    tensors = []
    for row in rows:
        if row.tensor.is_meta:
            raise PlanError("it is on the meta device and has no memory", tensor=row.name)
        tensors.append(row.tensor)
    return place_rows(tensors, arenas).regions


def layout_of(rows: Sequence[Row], member: str, address: str, regions: Sequence[Memory]) -> Layout:
    """Return the layout of rows, as a planner receives it.

    Args:
        rows: from `declared`, or a receiver's requirements.
        member: the id of this member.
        address: identifies the registrations of `regions`, so that a new registration is a new layout.
        regions: in the order in which offsets count through them.

    Raises:
        PlanError: a row lies in none of the regions.
    """
    # Columns instead of a loop over rows: an MoE has hundreds of thousands of rows.
    order = sorted(range(len(regions)), key=lambda i: regions[i].address)
    begin = np.array([regions[i].address for i in order], np.uint64)
    end = np.array([regions[i].address + regions[i].nbytes for i in order], np.uint64)
    nbytes = np.array([region.nbytes for region in regions], np.int64)
    first = (np.cumsum(nbytes) - nbytes)[order]
    # A form for each kind of row, and a number for each row: the layout is sent to other processes.
    numbers: dict[Form, int] = {}
    form = np.fromiter((numbers.setdefault(row.form, len(numbers)) for row in rows), np.int64, len(rows))
    span = np.array([form.span_bytes for form in numbers] or [0], np.int64)[form]
    address_of = np.fromiter((row.tensor.data_ptr() for row in rows), np.uint64, len(rows))
    offset = np.zeros(len(rows), np.int64)
    # Rows without elements have no address, and keep offset 0.
    some = np.flatnonzero(span)
    at = np.searchsorted(begin, address_of[some], side="right") - 1
    outside = at < 0 if len(regions) else np.ones(len(some), bool)
    if not outside.any():
        outside = address_of[some] + span[some].astype(np.uint64) > end[at]
    if outside.any():
        raise PlanError("its memory lies in none of the regions", tensor=rows[int(some[outside.argmax()])].name)
    if len(some):
        offset[some] = first[at] + (address_of[some] - begin[at]).astype(np.int64)
    layout = Layout(
        member=member,
        address=address,
        regions=tuple(nbytes.tolist()),
        forms=tuple(numbers),
        names=tuple(row.name for row in rows),
        form=form,
        offset=offset,
    )
    layout.check()
    return layout


def to_arenas(params: torch.nn.Module | Mapping[str, Declarable], *, is_remappable: bool = False) -> None:
    """Move the declared tensors into one arena per device; see `memory.rehome`."""
    if isinstance(params, torch.nn.Module):
        named: dict[str, torch.Tensor] = {**dict(params.named_parameters()), **dict(params.named_buffers())}
    else:
        named = {}
        for name, value in params.items():
            parts = [value] if isinstance(value, torch.Tensor | Shard) else value
            for number, part in enumerate(parts):
                named[f"{name} {number}"] = part.tensor if isinstance(part, Shard) else part
    local = {name: tensor._local_tensor if isinstance(tensor, DTensor) else tensor for name, tensor in named.items()}
    rehome(local, is_remappable=is_remappable)
    if isinstance(params, torch.nn.Module):
        # FSDP2 keeps references to its shards' memory from the first forward on, and takes new ones when a module is
        # converted: without this it would compute with the memory that the parameters were moved out of.
        params._apply(lambda tensor: tensor)


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's tensors by checkpoint names: without `torch.compile`'s prefix, and without extra state."""
    state = module.state_dict(keep_vars=True)
    return {
        name.replace("_orig_mod.", ""): value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not name.endswith("_extra_state")
    }


def _rows(name: str, value: Declarable) -> Iterator[Row]:
    """Yield the rows of one declared value."""
    if isinstance(value, Shard):
        yield row_of(name, value.tensor, value.global_shape, value.offset, tag=value.tag)
    elif not isinstance(value, torch.Tensor):
        require_type(f"{name!r}", value, (list, tuple), _DECLARABLE)
        for shard in value:
            yield from _rows(name, shard)
    elif isinstance(value, DTensor):
        yield from _sharded(name, value)
    else:
        yield row_of(name, value, value.shape, (0,) * value.ndim)


def _sharded(name: str, value: DTensor) -> Iterator[Row]:
    """Yield the rows of a DTensor: the boxes of this rank by mesh and placements, as views of its local tensor."""
    with torch.no_grad():
        local: torch.Tensor = value.detach().to_local()  # type: ignore[attr-defined]
    shape = tuple(value.shape)
    coordinate = value.device_mesh.get_coordinate()
    # This rank is not in the mesh: other ranks have the tensor.
    if coordinate is None:
        return
    # For each dim, the mesh axes that shard it: size, this rank's coordinate, split factor.
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for axis, placement in enumerate(value.placements):
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            hint = "reduce it first: tensor.redistribute(placements=...)"
            raise PlanError(f"it is {placement} on mesh axis {axis}: no rank has its values", tensor=name, hint=hint)
        # Only strided shards have a split factor; torch keeps the class private, so ask for the attribute.
        cuts[placement.dim].append(
            (value.device_mesh.size(axis), coordinate[axis], int(getattr(placement, "split_factor", 1)))
        )
    runs = [local_runs(num, cut) for num, cut in zip(shape, cuts, strict=True)]
    extent = tuple(sum(stop - start for start, stop in dim) for dim in runs)
    # Torch's own rule for uneven shards is repeated above: where the two differ, a declared box would be wrong.
    if extent != tuple(local.shape):
        raise PlanError(
            f"its local tensor has shape {list(local.shape)}, and its placements say {list(extent)}", tensor=name
        )
    for box in product(*(_placed(dim) for dim in runs)):
        part = local[tuple(slice(at, at + stop - start) for start, stop, at in box)] if box else local
        # A rank without elements has nothing to declare; but a tensor that is empty everywhere keeps its name.
        if part.numel() or 0 in shape:
            yield row_of(name, part, shape, tuple(start for start, _, _ in box))


def _placed(runs: Runs) -> list[tuple[int, int, int]]:
    """Return each run and its start in memory; one empty run where there are no runs."""
    # The empty run keeps the product over dims from vanishing: a tensor without elements still has a row.
    placed, at = [], 0
    for start, stop in runs or [(0, 0)]:
        placed.append((start, stop, at))
        at += stop - start
    return placed


def _chunks(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """Cut `[start, stop)` as `torch.chunk` does, with empty chunks after the last."""
    width = -(-(stop - start) // count)
    return [(min(start + i * width, stop), min(start + (i + 1) * width, stop)) for i in range(count)]


def _select(runs: Runs, low: int, high: int) -> Runs:
    """Return the elements `[low, high)` of the joined runs, as runs."""
    selected, at = [], 0
    for start, stop in runs:
        first, last = max(low - at, 0), min(high - at, stop - start)
        if first < last:
            selected.append((start + first, start + last))
        at += stop - start
    return selected
