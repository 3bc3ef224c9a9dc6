"""Tensors without storage, and the effect of each torch operator on the known provenance of their elements.

A piece of a buffer is a box of a checkpoint tensor, a number, or unknown with a reason. Operators that allocate
(`MAKE`) or copy elements (`RULES`) have rules. Views need no rules, and other operators make their results unknown.
"""

from __future__ import annotations

import bisect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from penstock.errors import PlanError
from penstock.loader.tensor import dtype_of
from penstock.sync.recording.buffers import Buffer, BufferPiece, LiveBuffer, View, grid_of, identity
from penstock.sync.recording.layout import Step, live_tensors
from penstock.sync.recording.stride_map import NotBoxes, StrideGrid, StrideMap
from penstock.types import Box


class ReadsValues(Exception):
    """The loader read values, which do not exist during a recording. This error ends the run."""


class Recorded(torch.Tensor):
    """A tensor with a dtype, shape and strides but no values. A recorder tracks the provenance of the elements."""

    _meta: torch.Tensor
    _recorder: LoadRecorder
    _buffer: Buffer | None

    @staticmethod
    def __new__(
        cls, meta: torch.Tensor, recorder: LoadRecorder, device: torch.device, buffer: Buffer | None
    ) -> Recorded:
        """Return a view of `buffer` with the shape and strides of `meta`. `buffer` is None if there are no elements."""
        recorded: Recorded = torch.Tensor._make_wrapper_subclass(
            cls, meta.size(), meta.stride(), meta.storage_offset(), dtype=meta.dtype, device=device
        )
        recorded._meta = meta
        recorded._recorder = recorder
        recorded._buffer = buffer
        return recorded

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Pass the operator to the recorder. In threads without a watch, only this method calls the recorder."""
        tensor = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, Recorded))
        return tensor._recorder.dispatch(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Recorded({list(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """Raise `ReadsValues`, because the tensor has no values."""
        raise self._recorder.refuse([self], "tolist")

    def numpy(self, *, force: bool = False) -> Any:
        """Raise `ReadsValues`, because the tensor has no values."""
        raise self._recorder.refuse([self], "numpy")


class _OperatorWatch(TorchDispatchMode):
    """Dispatch mode that passes all operators of this thread to the recorder, because any may write live tensors."""

    def __init__(self, recorder: LoadRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch's default wrapper imports Dynamo, which takes 1 to 4 s in the first update of a process.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.dispatch(func, args, kwargs or {})


class _HiddenWatch(_OperatorWatch):
    """An `_OperatorWatch` that is hidden from Dynamo, for processes that have imported Dynamo."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


class LoadRecorder:
    """The record of one run of a loader."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.watch = (_HiddenWatch if "torch._dynamo" in sys.modules else _OperatorWatch)(self)
        self.device = device
        self.read: dict[str, str] = {}
        """Tensors whose values were read, with the reason. Such a run is unusable."""
        self.lost: dict[str, str] = {}
        """Tensors that were copied to an unknown place, with the reason."""
        # Loaders copy from several threads. The lock is re-entrant because an operator may decompose into others.
        self._lock = threading.RLock()
        self._live: dict[int, list[LiveBuffer]] = {}
        # Checkpoint tensors with the same dtype and shape differ only in their buffers.
        self._metas: dict[tuple[torch.dtype, tuple[int, ...]], tuple[torch.Tensor, StrideGrid, StrideMap]] = {}
        # Record larger tensors first, so that a tensor inside another tensor's memory becomes part of its record.
        for name, tensor in sorted(live_tensors(model).items(), key=lambda item: -item[1].numel()):
            if tensor.numel() and tensor.layout is torch.strided and self._buffer(tensor) is None:
                buffers = self._live.setdefault(_storage(tensor), [])
                bisect.insort(buffers, LiveBuffer(tensor, name), key=lambda buffer: buffer.start_bytes)

    def checkpoint_tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the recording tensor for one tensor of the checkpoint."""
        alike = self._metas.get((dtype, shape))
        if alike is None:
            meta = torch.empty(shape, dtype=dtype, device="meta")
            alike = self._metas[dtype, shape] = meta, grid_of(shape, meta.stride()), identity(Box.full(shape))
        meta, grid, whole = alike
        buffer = None if 0 in shape else Buffer(dtype, grid, piece=BufferPiece(map=whole, names=(name,)))
        return Recorded(meta, self, self.device, buffer)

    def live_pieces(self) -> Iterator[tuple[str, list[BufferPiece]]]:
        """Yield the name and the pieces of each live tensor. Tied tensors appear under their first name."""
        for buffers in self._live.values():
            yield from ((buffer.name, buffer.pieces) for buffer in buffers)

    def replaced(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the name of each live tensor in which checkpoint tensors were overwritten, with their replacements."""
        for buffers in self._live.values():
            yield from ((buffer.name, buffer.replaced) for buffer in buffers if buffer.replaced)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name under which a live tensor's memory is recorded."""
        view = self._view(tensor)
        return view.buffer.name if view and isinstance(view.buffer, LiveBuffer) else None

    def assigned(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Record that the loader replaced the tensor `old` with `new`."""
        names = self.names([new])
        # If `names` is empty, the values of the new tensor are not from the checkpoint.
        if old.shape == new.shape and names:
            self.write(old, new)
        else:
            self._lose(names, "the loader replaced a parameter with a tensor of a different shape")
            self.unknown([old], names, "the loader replaced it with another tensor")

    def refuse(self, tensors: Iterable[torch.Tensor], what: str) -> ReadsValues:
        """Record that the values of `tensors` are read, and return the error to raise."""
        names = self.names(tensors)
        # Without a checkpoint tensor to leave out, the next run would fail in the same place.
        if not names:
            raise PlanError(f"the loader reads values that are not from the checkpoint ({what}); it cannot be recorded")
        self.read |= dict.fromkeys(names, f"its values are read ({what})")
        return ReadsValues(what)

    def _buffer(self, tensor: torch.Tensor) -> Buffer | None:
        if isinstance(tensor, Recorded):
            return tensor._buffer
        if tensor.layout is not torch.strided:
            return None
        buffers = self._live.get(_storage(tensor))
        if buffers is None:
            return None
        # Compare bytes, because parameters may share a storage and a view's dtype may differ from its buffer's.
        start = tensor.storage_offset() * tensor.itemsize
        at = bisect.bisect_right(buffers, start, key=lambda buffer: buffer.start_bytes) - 1
        return buffers[at] if at >= 0 and start < buffers[at].stop_bytes else None

    def _view(self, tensor: torch.Tensor) -> View | None:
        buffer = self._buffer(tensor)
        return None if buffer is None else self._view_of(buffer, tensor)

    def _view_of(self, buffer: Buffer, tensor: torch.Tensor) -> View:
        meta = tensor._meta if isinstance(tensor, Recorded) else tensor
        if meta.itemsize != buffer.dtype.itemsize or meta.is_conj() or meta.is_neg():
            raise NotBoxes(f"{buffer.dtype} viewed as {meta.dtype}")
        offset = int(meta.storage_offset() - buffer.offset)
        return View(buffer=buffer, offset=offset, shape=tuple(meta.shape), strides=meta.stride(), dtype=meta.dtype)

    def names(self, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Return the checkpoint tensors in the buffers of `tensors`."""
        buffers = [self._buffer(tensor) for tensor in tensors if tensor.numel()]
        return tuple(dict.fromkeys(name for buffer in buffers if buffer for name in buffer.names()))

    def is_tracked(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is recorded or the loader wrote to it, so that its values are unknown."""
        if isinstance(tensor, Recorded):
            return True
        buffer = self._buffer(tensor)
        return buffer is not None and bool(buffer.pieces)

    def _lose(self, names: Iterable[str], why: str) -> None:
        self.lost |= dict.fromkeys(names, why)

    def unknown(self, tensors: Iterable[torch.Tensor], names: tuple[str, ...], why: str) -> None:
        """Mark all elements in these tensors as unknown."""
        for tensor in tensors:
            buffer = self._buffer(tensor) if tensor.numel() else None
            if buffer is None:
                # The tensor is not tracked, so later copies from it would be lost.
                self._lose(names, why)
                continue
            try:
                view = self._view(tensor)
                maps = view.region() if view else []
            except NotBoxes:
                # The elements do not form boxes, so the whole buffer counts as unknown.
                maps = [identity(Box.full(buffer.grid.shape))]
            buffer.put([(BufferPiece(map=region, names=names, why=why), region.target_box()) for region in maps])

    def set_number(self, target: torch.Tensor, value: float) -> None:
        """Record that all elements of a tensor are set to one number."""
        if not target.numel():
            return
        try:
            if view := self._view(target):
                view.buffer.put(
                    [(BufferPiece(map=region, value=value), region.target_box()) for region in view.region()]
                )
        except NotBoxes as error:
            self.unknown([target], (), str(error))

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Record `target.copy_(source)`."""
        if not target.numel():
            return
        buffer = self._buffer(target)
        if buffer is None:
            self._lose(self.names([source]), "copied into a tensor that is not a parameter or buffer of the model")
        elif not self.is_tracked(source):
            # The loader created this scalar, for example padding, so its value is real and the same in every load.
            if source.numel() == 1 and self._buffer(source) is None and not source.is_meta:
                self.set_number(target, source.item())
            else:
                self.unknown([target], self.names([source]), "values that are not from the checkpoint")
        else:
            try:
                self._copy(buffer, target, source)
            except (NotBoxes, PlanError) as error:
                self.unknown([target], self.names([source]), str(error))

    def _copy(self, buffer: Buffer, target: torch.Tensor, source: torch.Tensor) -> None:
        expanded = source
        if source.shape != target.shape:
            expanded = self.view_of(source, lambda meta: meta.expand(target.shape))
        to, view = self._view_of(buffer, target), self._view(expanded)
        if view is None:
            return
        # A view of a buffer's bits as another dtype may precede or follow a conversion of the values.
        steps: list[Step] = []
        if view.dtype != view.buffer.dtype:
            steps.append(("view", dtype_of(view.dtype)))
        if to.dtype != view.dtype:
            steps.append(("cast", dtype_of(to.dtype)))
        if to.dtype != to.buffer.dtype:
            steps.append(("view", dtype_of(to.buffer.dtype)))
        pieces = [(piece, piece.map.target_box()) for piece in view.pieces_to(to)]
        # A real load would copy garbage from elements that were never written, so the target is unknown.
        if not view.buffer.untouched and sum(box.num_elements for _, box in pieces) < target.numel():
            self.unknown([target], self.names([source]), "elements that were never written")
        if steps:
            pieces = [
                (p if p.value is not None or p.why else replace(p, steps=(*p.steps, *steps)), box) for p, box in pieces
            ]
        to.buffer.put(pieces)

    def view_of(self, tensor: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return a view of a recorded or live tensor."""
        if not isinstance(tensor, Recorded):
            return view(tensor)
        return Recorded(view(tensor._meta), self, tensor.device, tensor._buffer)

    def allocated(self, meta: torch.Tensor, device: torch.device, piece: BufferPiece | None = None) -> Recorded:
        """Return a new recording tensor that consists of one piece, or has no known elements."""
        if not meta.numel():
            return Recorded(meta, self, device, None)
        grid = grid_of(tuple(meta.shape), meta.stride())
        return Recorded(meta, self, device, Buffer(meta.dtype, grid, int(meta.storage_offset()), piece=piece))

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Apply one operator to the recorded provenance. Run operators on other tensors as usual."""
        with self._lock:
            packet = func.overloadpacket
            # Handle views first, because most of a loader's operators are views.
            if packet in VIEWS:
                whole = args[0]
                if not isinstance(whole, Recorded):
                    return func(*args, **kwargs)
                out = func(whole._meta, *args[1:], **kwargs)
                if isinstance(out, torch.Tensor):
                    return Recorded(out, self, whole.device, whole._buffer)
                return tree_map(lambda meta: Recorded(meta, self, whole.device, whole._buffer), out)
            if packet in MAKE:
                return make(self, func, args, kwargs)
            # Most writes of a loader are `copy_`, so do not examine all arguments.
            if packet is _aten.copy_ and len(args) > 1 and (self.is_tracked(args[1]) or self._buffer(args[0])):
                return _copy(self, func, args, kwargs)
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            writes = [t for t in written(func, args, kwargs) if isinstance(t, Recorded) or self._buffer(t)]
            if not writes and not any(self.is_tracked(tensor) for tensor in tensors):
                return func(*args, **kwargs)
            rule = RULES.get(packet)
            out = rule(self, func, args, kwargs) if rule else NotImplemented
            if out is not NotImplemented:
                return out
            return self._other(func, args, kwargs, tensors)

    def _other(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        what = func.overloadpacket.__name__
        names, why = self.names(tensors), f"{what} of its values"
        if writes := written(func, args, kwargs):
            self.unknown(writes, names, why)
            return writes[0] if func._schema.returns else None
        # Composite operators decompose into operators with rules, for example reshapes and einsums with one operand.
        with self.watch:
            simpler = func.decompose(*args, **kwargs)
        if simpler is not NotImplemented:
            return simpler
        try:
            out = func(*_on_meta(args), **_on_meta(kwargs))
        except (NotImplementedError, RuntimeError) as error:
            # The operator has no meta kernel, so the shape of its result depends on values.
            raise self.refuse(tensors, what) from error

        def unknown(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return self.allocated(
                leaf, tensors[0].device, BufferPiece(map=identity(Box.full(leaf.shape)), names=names, why=why)
            )

        return tree_map(unknown, out)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


_aten = torch.ops.aten

VIEWS = frozenset(
    {_aten.alias, _aten.detach, _aten.as_strided, _aten.diagonal, _aten.expand, _aten.permute, _aten.select}
    | {_aten.slice, _aten.split, _aten.split_with_sizes, _aten.unsafe_split, _aten.unsafe_split_with_sizes}
    | {_aten.squeeze, _aten.t, _aten.transpose, _aten.unbind, _aten.unfold, _aten.unsqueeze, _aten.view}
    | {_aten._unsafe_view, _aten._reshape_alias, _aten.lift_fresh}
)
"""Operators that view the same elements. Operators such as narrow, chunk, reshape and T decompose into these."""

_EMPTY = frozenset({_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided})
_ZEROS = frozenset({_aten.zeros, _aten.zeros_like, _aten.new_zeros})

MAKE = _EMPTY | _ZEROS
"""Operators that allocate a tensor, which a loader may fill piece by piece."""


def _on_meta(arguments: Any) -> Any:
    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("meta")
        if not isinstance(leaf, torch.Tensor):
            return leaf
        meta = getattr(leaf, "_meta", None)
        if isinstance(meta, torch.Tensor):
            return meta
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")

    return tree_map(to_meta, arguments)


def written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator changes according to its schema."""
    tensors: list[torch.Tensor] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            values = value if isinstance(value, list | tuple) else [value]
            tensors.extend(tensor for tensor in values if isinstance(tensor, torch.Tensor))
    return tensors


def make(recorder: LoadRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Allocate a recording tensor if it can become a weight. Integer tensors are allocated as usual."""
    like = args[0] if args and isinstance(args[0], torch.Tensor) else None
    dtype = kwargs.get("dtype") or (like.dtype if like is not None else torch.get_default_dtype())
    device = torch.device(kwargs.get("device") or (like.device if like is not None else recorder.device))
    # A tensor that the loader creates without storage cannot become a weight.
    if device.type == "meta":
        return func(*args, **kwargs)
    # Integers such as expert maps need values. `like` may have no values, so replace it.
    if not dtype.is_floating_point:
        return func(*([torch.empty(like.shape, dtype=like.dtype), *args[1:]] if like is not None else args), **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in {"device", "pin_memory"}}
    meta = func(*_on_meta(args), **kwargs, device="meta")
    whole = identity(Box.full(meta.shape))
    return recorder.allocated(
        meta, device, BufferPiece(map=whole, value=0.0) if func.overloadpacket in _ZEROS else None
    )


def _copy(recorder: LoadRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    recorder.write(args[0], args[1])
    return args[0]


def _copy_each(recorder: LoadRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    for target, source in zip(args[0], args[1], strict=True):
        recorder.write(target, source)
    return args[0] if func._schema.returns else None


def _fill(recorder: LoadRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    value = args[1] if len(args) > 1 else 0
    if isinstance(value, torch.Tensor):
        recorder.write(args[0], value)
    else:
        recorder.set_number(args[0], value)
    return args[0]


def _clone(recorder: LoadRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    device = kwargs.get("device") or args[0].device
    kwargs = {name: value for name, value in kwargs.items() if name not in {"device", "pin_memory", "non_blocking"}}
    out = recorder.allocated(func(*_on_meta(args), **kwargs), torch.device(device))
    recorder.write(out, args[0])
    return out


def _cat(recorder: LoadRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    meta = func(*_on_meta(args), **_on_meta(kwargs))
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(meta.ndim, 1)
    out, at = recorder.allocated(meta, args[0][0].device), 0
    for part in args[0]:
        # Torch's `cat` ignores an empty tensor of one dim.
        if part.ndim != meta.ndim:
            continue
        extent = part.shape[dim]
        recorder.write(recorder.view_of(out, lambda m, at=at, n=extent: m.narrow(dim, at, n)), part)  # type: ignore[misc]
        at += extent
    return out


def _stack(recorder: LoadRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    meta = func(*_on_meta(args), **_on_meta(kwargs))
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    out = recorder.allocated(meta, args[0][0].device)
    for at, part in enumerate(args[0]):
        recorder.write(recorder.view_of(out, lambda m, at=at: m.select(dim, at)), part)  # type: ignore[misc]
    return out


def _pad(recorder: LoadRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    source, pads = args[0], list(args[1])
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    meta = func(*_on_meta(args), **_on_meta(kwargs))
    out = recorder.allocated(meta, source.device, BufferPiece(map=identity(Box.full(meta.shape)), value=value))
    if min(pads, default=0) < 0:
        recorder.unknown([out], recorder.names([source]), "constant_pad_nd with a negative padding")
        return out

    def inside(m: torch.Tensor) -> torch.Tensor:
        # Torch lists paddings from the last dim, as pairs (before, after).
        for i, before in enumerate(pads[::2]):
            m = m.narrow(-1 - i, before, source.shape[-1 - i])
        return m

    recorder.write(recorder.view_of(out, inside), source)
    return out


def _pick(recorder: LoadRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    if func.overloadpacket is _aten.index_select:
        dim, index = args[1] % max(source.ndim, 1), args[2]
    else:
        indices = [(at, index) for at, index in enumerate(args[1]) if index is not None]
        dim, index = indices[0]
        if len(indices) > 1:
            return NotImplemented
    real = (
        not recorder.is_tracked(index) and not index.is_meta and index.ndim == 1 and not index.dtype.is_floating_point
    )
    if not real or index.dtype in (torch.bool, torch.uint8) or source.ndim == 0:
        return NotImplemented
    rows = [int(row) % max(source.shape[dim], 1) for row in index.tolist()]
    shape = (*source.shape[:dim], len(rows), *source.shape[dim + 1 :])
    out = recorder.allocated(torch.empty(shape, dtype=source.dtype, device="meta"), source.device)
    for at, row in enumerate(rows):
        part = recorder.view_of(source, lambda m, row=row: m.select(dim, row))  # type: ignore[misc]
        recorder.write(recorder.view_of(out, lambda m, at=at: m.select(dim, at)), part)  # type: ignore[misc]
    return out


def _value(recorder: LoadRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    recorder.refuse(args[:1], "item")
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
"""The rule for each operator that is not a view. A rule that returns NotImplemented leaves the operator to `_other`."""
