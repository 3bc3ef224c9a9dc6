"""The operators a recording follows: views, copies, and what makes room for copies. All others make elements unknown.

In: an operator's arguments. Out: what it returns, written on the tape.
Not here: what is known of which elements (`meta_tensors`, `provenance`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from penstock.sync.recording.provenance import Piece, identity
from penstock.types import Box

if TYPE_CHECKING:
    from penstock.sync.recording.meta_tensors import Tape

_aten = torch.ops.aten

VIEWS = frozenset(
    {_aten.alias, _aten.detach, _aten.as_strided, _aten.diagonal, _aten.expand, _aten.permute, _aten.select}
    | {_aten.slice, _aten.split, _aten.split_with_sizes, _aten.unsafe_split, _aten.unsafe_split_with_sizes}
    | {_aten.squeeze, _aten.t, _aten.transpose, _aten.unbind, _aten.unfold, _aten.unsqueeze, _aten.view}
    | {_aten._unsafe_view, _aten._reshape_alias, _aten.lift_fresh}
)
"""Operators that show the same elements; narrow, chunk, reshape, T, indexing and the like come down to these."""

_EMPTY = frozenset({_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided})
_ZEROS = frozenset({_aten.zeros, _aten.zeros_like, _aten.new_zeros})

MAKE = _EMPTY | _ZEROS
"""Operators that make room, which a loader may fill piece by piece."""


def on_meta(arguments: Any) -> Any:
    """Arguments of an operator with meta tensors, and the meta device, in the place of others."""

    def turned(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("meta")
        if not isinstance(leaf, torch.Tensor):
            return leaf
        meta = getattr(leaf, "_meta", None)
        if isinstance(meta, torch.Tensor):
            return meta
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")

    return tree_map(turned, arguments)


def written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator changes, by its schema."""
    found: list[torch.Tensor] = []
    for at, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(one.name)
            values = value if isinstance(value, list | tuple) else [value]
            found.extend(tensor for tensor in values if isinstance(tensor, torch.Tensor))
    return found


def make(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """Room for elements: recorded, if they can be a weight's; counters and indices stay real."""
    like = args[0] if args and isinstance(args[0], torch.Tensor) else None
    dtype = kwargs.get("dtype") or (like.dtype if like is not None else torch.get_default_dtype())
    device = torch.device(kwargs.get("device") or (like.device if like is not None else tape.device))
    if device.type == "meta":
        return func(*args, **kwargs)
    if not dtype.is_floating_point:
        return func(*([torch.empty(like.shape, dtype=like.dtype), *args[1:]] if like is not None else args), **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in {"device", "pin_memory"}}
    meta = func(*on_meta(args), **kwargs, device="meta")
    whole = identity(Box.full(meta.shape))
    return tape.made(meta, device, Piece(map=whole, value=0.0) if func.overloadpacket in _ZEROS else None)


def _copy(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    tape.write(args[0], args[1])
    return args[0]


def _copy_each(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    for target, source in zip(args[0], args[1], strict=True):
        tape.write(target, source)
    return args[0] if func._schema.returns else None


def _fill(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    value = args[1] if len(args) > 1 else 0
    if isinstance(value, torch.Tensor):
        tape.write(args[0], value)
    else:
        tape.set_number(args[0], value)
    return args[0]


def _clone(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    device = kwargs.get("device") or args[0].device
    kwargs = {name: value for name, value in kwargs.items() if name not in {"device", "pin_memory", "non_blocking"}}
    out = tape.made(func(*on_meta(args), **kwargs), torch.device(device))
    tape.write(out, args[0])
    return out


def _cat(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    meta = func(*on_meta(args), **on_meta(kwargs))
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(meta.ndim, 1)
    out, at = tape.made(meta, args[0][0].device), 0
    for part in args[0]:
        if part.ndim != meta.ndim:
            continue  # an empty tensor of one dim: `cat` lets it be
        extent = part.shape[dim]
        tape.write(tape.shown(out, lambda m, at=at, n=extent: m.narrow(dim, at, n)), part)  # type: ignore[misc]
        at += extent
    return out


def _stack(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    meta = func(*on_meta(args), **on_meta(kwargs))
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    out = tape.made(meta, args[0][0].device)
    for at, part in enumerate(args[0]):
        tape.write(tape.shown(out, lambda m, at=at: m.select(dim, at)), part)  # type: ignore[misc]
    return out


def _pad(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    source, pads = args[0], list(args[1])
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    meta = func(*on_meta(args), **on_meta(kwargs))
    out = tape.made(meta, source.device, Piece(map=identity(Box.full(meta.shape)), value=value))
    if min(pads, default=0) < 0:
        tape.unknown([out], tape.names([source]), "constant_pad_nd by less than nothing")
        return out

    def inside(m: torch.Tensor) -> torch.Tensor:
        for i, before in enumerate(pads[::2]):
            m = m.narrow(-1 - i, before, source.shape[-1 - i])
        return m

    tape.write(tape.shown(out, inside), source)
    return out


def _pick(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """Rows by a list of numbers: `w[[2, 5]]`, `index_select`."""
    source = args[0]
    if func.overloadpacket is _aten.index_select:
        dim, index = args[1] % max(source.ndim, 1), args[2]
    else:
        given = [(at, one) for at, one in enumerate(args[1]) if one is not None]
        dim, index = given[0]
        if len(given) > 1:
            return NotImplemented
    real = not tape.told(index) and not index.is_meta and index.ndim == 1 and not index.dtype.is_floating_point
    if not real or index.dtype in (torch.bool, torch.uint8) or source.ndim == 0:
        return NotImplemented
    rows = [int(row) % max(source.shape[dim], 1) for row in index.tolist()]
    shape = (*source.shape[:dim], len(rows), *source.shape[dim + 1 :])
    out = tape.made(torch.empty(shape, dtype=source.dtype, device="meta"), source.device)
    for at, row in enumerate(rows):
        part = tape.shown(source, lambda m, row=row: m.select(dim, row))  # type: ignore[misc]
        tape.write(tape.shown(out, lambda m, at=at: m.select(dim, at)), part)  # type: ignore[misc]
    return out


def _value(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """One value, read: this run is void, but it can go on and show what else is read."""
    tape.refuse(args[:1], "item")
    dtype = args[0].dtype
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


RULES: dict[Any, Callable[[Any, Any, Any, Any], Any]] = {
    _aten.copy_: _copy,
    _aten._foreach_copy_: _copy_each,
    _aten.fill_: _fill,
    _aten.zero_: _fill,
    _aten.clone: _clone,
    _aten._to_copy: _clone,
    _aten.cat: _cat,
    _aten.stack: _stack,
    _aten.constant_pad_nd: _pad,
    _aten.index: _pick,
    _aten.index_select: _pick,
    _aten._local_scalar_dense: _value,
}
"""What each operator does that is no view; NotImplemented leaves it to the rule for all others."""
