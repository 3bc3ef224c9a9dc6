"""Converts tensors to the bytes that safetensors files store, and refuses tensors that cannot be stored."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.errors import DeviceOutOfMemory, PlanError
from penstock.loader.tensor import dtype_of

_ODD = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError)
"""Errors from tensor subclasses that wrap other tensors. Each subclass reacts to the same calls differently."""
_HINT = "save a dense tensor of its values, or leave it out of the state"


def require_storable(tensor: torch.Tensor, name: str) -> None:
    """Raise PlanError if a tensor cannot be stored. No byte of the tensor is read."""
    fault = _fault_of(tensor)
    if fault is not None:
        raise refusal(fault, name)
    try:
        dtype_of(tensor.dtype)
    except PlanError as error:
        error.tensor = name
        raise


def _fault_of(tensor: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "it is not initialised yet"
    if tensor.is_nested:
        return "it is nested"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_quantized:
        return f"it is quantised: {tensor.dtype}"
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return "it has no values: it is a fake tensor, or on the meta device"
    if has_own_storage(tensor):
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
            there = tensor.untyped_storage().nbytes()
            # Reading from the tensor's address would crash the process.
            if there < needed:
                return f"its storage was freed: it has {there} bytes, but {needed} are needed"
        return None
    if hasattr(tensor, "__create_write_items__") or isinstance(tensor, ShardedTensor):
        return None
    try:
        TensorProperties.create_from_tensor(tensor)
        tensor.size()
    except _ODD as error:
        return f"{type(tensor).__name__}: {error}"
    return None


def refusal(fault: str, name: str) -> PlanError:
    """Return the error for a tensor that cannot be stored."""
    return PlanError(f"a tensor cannot be stored: {fault}", tensor=name, hint=_HINT)


def has_own_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are in its own storage and not in tensors that a subclass wraps."""
    return not is_traceable_wrapper_subclass(tensor) and (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def bytes_of(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor's elements, with conjugate and negative views resolved, as row-major bytes on its device.

    Args:
        tensor: a tensor with any strides. A contiguous tensor is not copied.
        name: name of the tensor, for error messages.

    Raises:
        PlanError: the tensor cannot be stored.
        DeviceOutOfMemory: there is not enough memory to make the tensor contiguous.
    """
    require_storable(tensor, name)
    try:
        whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
        # Do not use `reshape`. A dim with one element keeps its stride, and a view as bytes rejects some strides.
        raw = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
        if has_own_storage(raw):
            return raw
    except torch.OutOfMemoryError as error:
        message = f"{tensor.device} has no memory to make a tensor contiguous"
        raise DeviceOutOfMemory(message, tensor=name, hint="save contiguous tensors") from error
    except _ODD as error:
        raise refusal(f"{type(tensor).__name__}: {error}", name) from error
    raise refusal(f"{type(tensor).__name__} wraps other tensors", name)
