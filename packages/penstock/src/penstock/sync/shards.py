"""Declaration of a rank's tensors as shards in memory."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.arguments import require_type
from penstock.errors import PlanError
from penstock.holding.placement import place_rows
from penstock.loader.tensor import dtype_of
from penstock.memory.arena import Arena
from penstock.memory.local_shards import is_sharded, local_parts, local_tensor
from penstock.memory.rehome import rehome
from penstock.memory.targets import require_initialised, require_stored
from penstock.plan.layout import Form, Layout
from penstock.transport.protocol import Memory
from penstock.types import Box, DType


# Rows compare by identity, because torch compares tensors element by element.
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShardRow:
    """A shard of a tensor in this rank's memory."""

    name: str
    tensor: torch.Tensor = field(repr=False)
    """A view of exactly the elements of the shard, with any strides."""
    form: Form


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Shard:
    """The shard of a tensor on this rank, as its owner declares it.

    `tag` names the transformation that was applied to the values.
    """

    tensor: torch.Tensor = field(repr=False)
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tag: str = ""


Declarable = torch.Tensor | Shard | Sequence[Shard]

_PARALLEL = torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel

_DECLARABLE = "a torch.nn.Module, or a dict of tensors, Shards or lists of Shards by name"


def declared(params: torch.nn.Module | Mapping[str, Declarable]) -> tuple[ShardRow, ...]:
    """Return the rows of all tensors on a rank, which view the live memory and keep it alive.

    A module with FSDP2 is resharded, as by `state_dict`, so call `declared` between steps.

    Args:
        params: a module (its parameters and persistent buffers, tied parameters under each name), or tensors by name:
            unsliced tensors, DTensors, a `Shard` or several Shards.

    Raises:
        PlanError: a tensor cannot be declared, because it is a partial sum or a wrapper, its dtype is unsupported, its
            memory overlaps itself, or it is outside its global shape.
    """
    require_type("params", params, (torch.nn.Module, Mapping), _DECLARABLE)
    tensors = _state(params) if isinstance(params, torch.nn.Module) else params
    for name in tensors:
        require_type("the name of a tensor", name, str, "names that are str")
    return tuple(row for name, value in tensors.items() for row in _rows(name, value))


def row_of(
    name: str, tensor: torch.Tensor, global_shape: Sequence[int], offset: Sequence[int], *, tag: str = ""
) -> ShardRow:
    """Return the row for a tensor that is the shard at `offset`. Raise PlanError if the tensor cannot be declared."""
    tensor = tensor.detach()
    # Quantised, nested and sparse tensors have several buffers, or memory that does not contain the values.
    if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
        raise PlanError(
            f"a {type(tensor).__name__} is not a single plain tensor", tensor=name, hint="declare its inner tensors"
        )
    # Torch conjugates and negates lazily with a bit on the tensor, which a peer that reads the bytes would miss.
    if tensor.is_conj() or tensor.is_neg():
        raise PlanError("its values differ from the bytes in memory", tensor=name, hint="declare tensor.resolve_conj()")
    if not len(tensor.shape) == len(global_shape) == len(offset):
        message = f"shape {list(tensor.shape)}, offset {list(offset)} and global shape {list(global_shape)}"
        raise PlanError(f"{message} have different numbers of dims", tensor=name)
    require_stored(name, tensor)
    try:
        form = _form_of(tensor.dtype, tuple(global_shape), tuple(offset), tuple(tensor.shape), tensor.stride(), tag)
    except PlanError as error:
        # `_form_of` is cached and does not receive the tensor's name, so add the name here.
        error.tensor = name
        raise
    return ShardRow(name=name, tensor=tensor, form=form)


@functools.lru_cache(maxsize=1 << 12)
def _form_of(
    kind: torch.dtype,
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    tag: str = "",
) -> Form:
    """Return the form of a torch tensor's memory. Raise PlanError if no form describes the memory."""
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


def regions_of(rows: Iterable[ShardRow], arenas: Sequence[Arena] = ()) -> tuple[Memory, ...]:
    """Return the memory of the rows, which is an arena or a torch storage. Raise PlanError for meta tensors."""
    tensors = []
    for row in rows:
        if row.tensor.is_meta:
            raise PlanError("it is on the meta device and has no memory", tensor=row.name)
        tensors.append(row.tensor)
    return place_rows(tensors, arenas).regions


def layout_of(rows: Sequence[ShardRow], member: str, address: str, regions: Sequence[Memory]) -> Layout:
    """Return the layout of rows, with byte offsets across all `regions`. Raise PlanError for a row in no region."""
    order = sorted(range(len(regions)), key=lambda i: regions[i].address)
    begin = np.array([regions[i].address for i in order], np.uint64)
    end = np.array([regions[i].address + regions[i].nbytes for i in order], np.uint64)
    nbytes = np.array([region.nbytes for region in regions], np.int64)
    first = (np.cumsum(nbytes) - nbytes)[order]
    numbers: dict[Form, int] = {}
    form = np.fromiter((numbers.setdefault(row.form, len(numbers)) for row in rows), np.int64, len(rows))
    span = np.array([form.span_bytes for form in numbers] or [0], np.int64)[form]
    address_of = np.fromiter((row.tensor.data_ptr() for row in rows), np.uint64, len(rows))
    offset = np.zeros(len(rows), np.int64)
    some = np.flatnonzero(span)
    at = np.searchsorted(begin, address_of[some], side="right") - 1
    outside = at < 0 if len(regions) else np.ones(len(some), bool)
    if not outside.any():
        outside = address_of[some] + span[some].astype(np.uint64) > end[at]
    if outside.any():
        raise PlanError("its memory is in none of the regions", tensor=rows[int(some[outside.argmax()])].name)
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
    """Move the declared tensors into one arena per device. See `memory.rehome`."""
    if isinstance(params, torch.nn.Module):
        named: dict[str, torch.Tensor] = {**dict(params.named_parameters()), **dict(params.named_buffers())}
    else:
        named = {}
        for name, value in params.items():
            parts = [value] if isinstance(value, torch.Tensor | Shard) else value
            for number, part in enumerate(parts):
                named[f"{name} {number}"] = part.tensor if isinstance(part, Shard) else part
    local = {name: local_tensor(tensor) for name, tensor in named.items()}
    rehome(local, is_remappable=is_remappable)
    if isinstance(params, torch.nn.Module):
        # FSDP2 updates its references to the shards' memory only in `_apply`, so apply the identity.
        params._apply(lambda tensor: tensor)


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = module.state_dict(keep_vars=True)
    # A module may contain wrapped modules, such as an actor and a critic. Process the innermost wrappers first.
    wrappers = [path for path, inner in module.named_modules(remove_duplicate=False) if isinstance(inner, _PARALLEL)]
    for path in reversed(wrappers):
        outer = f"{path}." if path else ""
        prefix = f"{outer}module."
        state = {(outer + n.removeprefix(prefix) if n.startswith(prefix) else n): t for n, t in state.items()}
    return {
        name.replace("_orig_mod.", ""): value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not name.endswith("_extra_state")
    }


def _wrapped_in(module: torch.nn.Module) -> torch.nn.Module | None:
    if isinstance(module, _PARALLEL):
        inner: torch.nn.Module = module.module
        return inner
    # Detect a compiled module by this name, because importing its class takes seconds.
    return module._modules.get("_orig_mod")


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside all wrappers of torch.compile and data parallelism."""
    while (inner := _wrapped_in(module)) is not None:
        module = inner
    return module


def _rows(name: str, value: Declarable) -> Iterator[ShardRow]:
    if isinstance(value, Shard):
        yield row_of(name, value.tensor, value.global_shape, value.offset, tag=value.tag)
    elif not isinstance(value, torch.Tensor):
        require_type(f"{name!r}", value, (list, tuple), _DECLARABLE)
        for shard in value:
            yield from _rows(name, shard)
    elif is_sharded(value):
        for box, part in local_parts(name, value):
            yield row_of(name, part, value.shape, box.start)
    else:
        require_initialised(name, value)
        if value.is_nested:
            raise PlanError(
                "a nested tensor is not a single plain tensor in memory", tensor=name, hint="declare its inner tensors"
            )
        yield row_of(name, value, value.shape, (0,) * value.ndim)
