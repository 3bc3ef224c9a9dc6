"""Checks of tensors that a caller wants to fill, and marks for autograd after they are filled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.errors import PlanError

_MAX_WORK = 1 << 16
"""Work limit of numpy's search for a shared element of two strided views. Column slices of a tensor need below 100."""

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


_Extent = tuple[int, int, tuple[int, ...], tuple[int, ...], int]
"""Memory of one tensor: address, bytes up to the end of the last element, shape, strides, and bytes per element. A
contiguous tensor has an empty shape and strides."""


def require_initialised(name: str, tensor: torch.Tensor) -> None:
    """Raise PlanError if a parameter or buffer has no shape yet, as in `torch.nn.LazyLinear`."""
    if is_lazy(tensor):
        hint = "run one forward pass, which gives it its shape, or build the module with its sizes"
        raise PlanError("the tensor is not initialised and has no shape yet", tensor=name, hint=hint)


def require_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise PlanError for wrappers such as DTensors, and for sparse, meta and lazily conjugated tensors."""
    require_initialised(name, tensor)
    if tensor.is_meta:
        hint = "materialise it first: module.to_empty(device=...)"
        raise PlanError("the tensor is on the meta device and has no memory", tensor=name, hint=hint)
    # Wrappers have several memories, or a memory that does not hold the values.
    if tensor.layout is not torch.strided or (
        type(tensor) not in _PLAIN and (is_traceable_wrapper_subclass(tensor) or not _has_storage(tensor))
    ):
        raise PlanError(f"a {type(tensor).__name__} has no memory itself", tensor=name, hint="pass its plain tensors")
    # Torch conjugates and negates lazily with a bit on the tensor, which raw bytes do not contain.
    if tensor.is_conj() or tensor.is_neg():
        raise PlanError("the tensor is lazily conjugated or negated", tensor=name, hint="pass tensor.resolve_conj()")


def require_stored(name: str, tensor: torch.Tensor, span_bytes: int | None = None) -> None:
    """Raise PlanError if a strided tensor extends beyond the end of its storage, because reading it would crash."""
    if not tensor.numel():
        return
    itemsize = tensor.element_size()
    if span_bytes is None:
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        span_bytes = (sum((size - 1) * step for size, step in dims) + 1) * itemsize
    if int(tensor.storage_offset()) * itemsize + span_bytes > tensor.untyped_storage().nbytes():
        hint = "restore the storage first, for example from where it was offloaded"
        raise PlanError("the storage of the tensor was freed or shrunk", tensor=name, hint=hint)


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def tied_targets(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Check all tensors of one call before they are written. Return groups of indices of tensors with the same memory.

    If the sources of a group differ, the caller raises `sources_differ`. Raise PlanError if a tensor has no memory,
    if its elements share memory (an expanded tensor), or if it shares part of its memory with another tensor.
    """
    places: dict[_Extent, list[int]] = {}
    for index, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        require_memory(name, tensor)
        if tensor.numel():
            places.setdefault(_extent(name, tensor), []).append(index)
    extents = list(places)
    start = np.array([extent[0] for extent in extents], np.uint64)
    stop = start + np.array([extent[1] for extent in extents], np.uint64)
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(stop[order])
    for at in (np.flatnonzero(start[order][1:] < reach[:-1]) + 1).tolist():
        this = int(order[at])
        before = at - 1
        while before >= 0 and reach[before] > start[this]:
            other = int(order[before])
            before -= 1
            if stop[other] > start[this] and _share(extents[this], extents[other]):
                first, second = sorted((places[extents[this]][0], places[extents[other]][0]))
                pair = f"{names[first]} and {names[second]}"
                raise PlanError(
                    f"{pair} share part of their memory, so one would overwrite the other",
                    hint="pass targets with separate memory, or pass the same whole tensor for both names",
                )
    return [group for group in places.values() if len(group) > 1]


def sources_differ(first: str, second: str) -> PlanError:
    """Return the error for two targets that share all their memory but whose sources have different bytes."""
    return PlanError(
        f"{first} and {second} are one memory (tied), but their sources differ, so one would overwrite the other",
        hint="leave out one of the two names, or untie the targets by giving one of them separate memory",
    )


def note_written(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that these tensors were changed in place, as `copy_` does.

    Writing bytes by address leaves torch's version counter unchanged, so `backward` would silently use the new values.
    Tensors created in inference mode have no version counter.
    """
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def _extent(name: str, tensor: torch.Tensor) -> _Extent:
    nbytes, itemsize = tensor.nbytes, tensor.element_size()
    if tensor.is_contiguous():
        extent: _Extent = tensor.data_ptr(), nbytes, (), (), 1
    else:
        shape = tuple(tensor.shape)
        dims = [(step, size) for step, size in zip(tensor.stride(), shape, strict=True) if size > 1]
        reach = 0
        # Visit strides in ascending order. Each stride must exceed the largest offset that the smaller strides reach.
        for step, size in sorted(dims):
            if step <= reach:
                message = f"elements of shape {list(shape)} with strides {list(tensor.stride())} share memory"
                hint = "pass a tensor with memory for every element, such as tensor.contiguous()"
                raise PlanError(message, tensor=name, hint=hint)
            reach += (size - 1) * step
        nbytes = (reach + 1) * itemsize
        strides = tuple(step * itemsize for step, _ in dims)
        extent = tensor.data_ptr(), nbytes, tuple(size for _, size in dims), strides, itemsize
    require_stored(name, tensor, nbytes)
    return extent


def _described(extent: _Extent) -> npt.NDArray[np.void]:
    """Return an array over the memory, which numpy compares by address and never reads."""
    address, nbytes, shape, strides, itemsize = extent
    interface = {"version": 3, "data": (address, True), "shape": shape or (nbytes,), "typestr": f"|V{itemsize}"}
    return np.asarray(SimpleNamespace(__array_interface__=interface | {"strides": strides or (1,)}))


def _share(one: _Extent, other: _Extent) -> bool:
    if not one[3] and not other[3]:
        return True
    try:
        return np.shares_memory(_described(one), _described(other), max_work=_MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
