"""Move live parameters into one arena per device, so that a whole model is one registration."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.errors import PlanError
from penstock.memory.arena import Arena, needed_bytes


def rehome(
    target: torch.nn.Module | Mapping[str, torch.Tensor], *, copy: bool = True, is_remappable: bool = False
) -> tuple[Arena, ...]:
    """Move a module's parameters and buffers, or tensors by name, into one arena per device.

    Objects, dtypes, shapes, strides, hooks and gradients stay. Tied weights and views of one tensor still share memory.
    Flatten parameters for an optimizer, or capture CUDA graphs, only after this call, because addresses change.

    Args:
        copy: whether to copy the values, device by device. With `copy=False`, the new values are undefined.
        is_remappable: see `Arena.allocate`.

    Raises:
        PlanError: a tensor is on the meta device or not a plain strided tensor. Nothing was moved.
        DestinationError, DeviceOutOfMemory: see `Arena.allocate`. Earlier devices were moved.

    The tensors keep the memory of the arenas alive. The weights need twice their memory until the last tensor is moved.
    """
    if isinstance(target, torch.nn.Module):
        target = dict([*target.named_parameters(), *target.named_buffers()])
    # Sort by name, because members read tensors in name order, and the bytes they read together are then adjacent.
    tensors = sorted(target.items(), key=lambda pair: pair[0])
    for name, tensor in tensors:
        if tensor.is_meta:
            hint = "materialise it: module.to_empty(device=...)"
            raise PlanError("cannot move a tensor on the meta device", tensor=name, hint=hint)
        if tensor.layout is not torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
            raise PlanError(f"cannot move a {type(tensor).__name__} with layout {tensor.layout}", tensor=name)
    devices: dict[torch.device, dict[int, list[torch.Tensor]]] = {}
    for _, tensor in tensors:
        # Group by storage, because tensors that share a storage must share it after the move.
        if tensor.untyped_storage().nbytes():
            storages = devices.setdefault(tensor.device, {})
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return tuple(_move(device, list(storages.values()), copy, is_remappable) for device, storages in devices.items())


def _move(device: torch.device, groups: list[list[torch.Tensor]], copy: bool, is_remappable: bool) -> Arena:
    spans = [_span(group) for group in groups]
    nbytes = needed_bytes(stop - start for start, stop in spans)
    arena = Arena.allocate(nbytes, device, is_remappable=is_remappable)
    offsets = arena.place(stop - start for start, stop in spans)
    with torch.no_grad():
        for group, (start, stop), offset in zip(groups, spans, offsets, strict=True):
            run = arena.bytes_at(offset, stop - start)
            if copy:
                storage = torch.empty(0, dtype=torch.uint8, device=device).set_(group[0].untyped_storage())
                run.copy_(storage[start:stop])
            for tensor in group:
                # Count in bytes, because tensors of different dtypes may share a storage.
                first = run[tensor.storage_offset() * tensor.element_size() - start :]
                whole = first[: first.numel() // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
                # Assigning `.data` keeps the object, which optimizers and hooks refer to.
                tensor.data = whole.as_strided(tensor.shape, tensor.stride())
    return arena


def _span(group: list[torch.Tensor]) -> tuple[int, int]:
    """Return the bytes `[start, stop)` that these tensors cover in their storage. The start is a multiple of 16."""
    starts, stops = [], []
    for tensor in group:
        reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
        starts.append(int(tensor.storage_offset()) * tensor.element_size())
        stops.append(starts[-1] + (int(reach + 1) * tensor.element_size() if tensor.numel() else 0))
    # Keep the alignment for the vector loads of kernels.
    return min(starts) // 16 * 16, max(stops)
