"""The tensors that a caller passed to a sync, to detect that a tensor was moved or replaced.

A trainer or an engine may move a parameter at any time, so every call compares the tensors before it uses an address.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.memory.local_shards import is_sharded, local_tensor
from penstock.sync.shards import Declarable, Shard

# Use the methods of the base class, because a tensor subclass may intercept each call in Python.
_is_set_to: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C.TensorBase.is_set_to
_dtype_of: Callable[[torch.Tensor], torch.dtype] = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]

_Source = torch.nn.Module | Mapping[str, Declarable]


class Placed:
    """The tensors of a module or a mapping, with views that keep their storages alive. Later checks use `later`."""

    def __init__(self, source: _Source, later: _Source | None = None) -> None:
        self._source = source
        self.refresh()
        self._source = source if later is None else later

    def refresh(self) -> None:
        """Record the tensors and where their memory currently is."""
        source = self._source
        self._parents: list[torch.nn.Module] = []
        self._children: list[dict[str, torch.nn.Module | None]] = []
        self._filled: list[dict[str, object]] = []
        self._empty: list[dict[str, object]] = []
        if isinstance(source, torch.nn.Module):
            for module in source.modules():
                for members in (module._parameters, module._buffers, module._modules):
                    (self._filled if members else self._empty).append(members)  # type: ignore[arg-type]
            # Record these dicts, because a container replaces its dict of modules when a module is deleted.
            self._parents = [module for module in source.modules() if module._modules]
            self._children = [module._modules for module in self._parents]
        self._sizes = list(map(len, self._filled))
        self._keys, self._objects = list(self._names_now()), list(self._objects_now())
        # The tensors in DTensors and lists of shards may also be replaced.
        self._composites = [
            value for value in self._objects if is_sharded(value) or isinstance(value, Shard | list | tuple)
        ]
        self._parts = [part for value in self._composites for part in _parts(value)]
        named = [(name, tensor) for name, tensor in _named(source) if _has_memory(tensor)]
        self._names = [name for name, _ in named]
        self._tensors = [tensor for _, tensor in named]
        # Assigning `.data` does not change a view from `detach`, so comparing tensor and view detects a move.
        self._views = [tensor.detach() for tensor in self._tensors]
        self._dtypes = list(map(_dtype_of, self._tensors))

    def is_same(self) -> bool:
        """Return whether every tensor is the same object in the same memory. 30,000 tensors take 9 to 17 ms."""
        if any(self._empty) or list(map(len, self._filled)) != self._sizes:
            return False
        if not all(map(operator.is_, map(operator.attrgetter("_modules"), self._parents), self._children)):
            return False
        if list(self._names_now()) != self._keys or not all(map(operator.is_, self._objects_now(), self._objects)):
            return False
        parts = [part for value in self._composites for part in _parts(value)]
        if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            return False
        # An address alone does not reveal a transposed view of the same memory. `is_set_to` does, but ignores dtypes.
        with torch._C.DisableTorchFunctionSubclass():
            if list(map(_dtype_of, self._tensors)) != self._dtypes:
                return False
            try:
                return all(map(_is_set_to, self._tensors, self._views))
            except RuntimeError:
                return False  # torch cannot compare tensors on two devices

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor's name and a view of the tensor in the recorded memory."""
        return zip(self._names, self._views, strict=True)

    def moved(self) -> list[str]:
        """Return the names of the tensors that are no longer in the recorded memory."""
        now: dict[str, list[torch.Tensor]] = {}
        for name, tensor in _named(self._source):
            now.setdefault(name, []).append(tensor)
        # Compare places and not names, because a wrapper, such as an adapter, renames a parameter without moving it.
        places = {_place(tensor) for each in now.values() for tensor in each if _has_memory(tensor)}
        return [
            name
            for name, view in self.views()
            if not (any(is_at(tensor, view) for tensor in now[name]) if name in now else _place(view) in places)
        ]

    def _names_now(self) -> Iterator[str]:
        return chain.from_iterable(self._filled) if isinstance(self._source, torch.nn.Module) else iter(self._source)

    def _objects_now(self) -> Iterator[object]:
        if isinstance(self._source, torch.nn.Module):
            return chain.from_iterable(map(dict[str, object].values, self._filled))
        return iter(self._source.values())


def _named(source: _Source) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(source, torch.nn.Module):
        for members in (source.named_parameters, source.named_buffers):
            for name, tensor in members(remove_duplicate=False):
                yield name, local_tensor(tensor)
        return
    for name, value in source.items():
        for part in _parts(value):
            yield name, part


def _parts(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield local_tensor(value)
    elif isinstance(value, Shard):
        yield from _parts(value.tensor)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)


def _has_memory(tensor: torch.Tensor) -> bool:
    return not (
        tensor.is_meta or is_lazy(tensor) or tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor)
    )


def is_at(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Return whether a tensor has the same memory, shape, strides and dtype as a view."""
    return _has_memory(tensor) and _place(tensor) == _place(view)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
