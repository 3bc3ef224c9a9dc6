"""The parts of a load. A part is a box in a stored item, and the tensors in the state that the box fills.

`reader` orders the parts, and `local_files` and `loader` read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import ReadItem

from penstock.errors import PlanError
from penstock.loader.tensor import torch_dtype, torch_shape
from penstock.types import Box, DType
from penstock_dcp.checkpoint import CheckpointRow


@dataclass(slots=True, kw_only=True)
class FilePart:
    """A box in a stored item, and the plan's items that read this box."""

    row: CheckpointRow
    box: Box | None
    """The box, with its dims in the order of the stored bytes, or None for the whole row."""
    items: list[ReadItem]
    targets: list[torch.Tensor]
    data: bytes = b""
    """The bytes of a value that is not a tensor, or empty for a tensor."""

    @property
    def device(self) -> torch.device:
        """Return the device of the targets, with its index."""
        device = self.targets[0].device
        return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device

    def span(self) -> tuple[int, int, bool]:
        """Return the offset of the box in its file, the number of bytes that it spans, and whether it is contiguous."""
        row, box = self.row, self.box
        if box is None:
            return row.offset, row.nbytes, True
        # `box_of` has already refused boxes in F4 tensors, whose elements share bytes.
        width = stride = torch_dtype(row.dtype).itemsize
        first, last = 0, 0
        is_cut, is_run = False, True
        for start, stop, size in zip(reversed(box.start), reversed(box.stop), reversed(row.shape), strict=True):
            if stop == start:
                return row.offset, 0, True
            # If an inner dim is cut, each additional index of an outer dim starts a new run.
            is_run &= not is_cut or stop - start == 1
            is_cut |= stop - start != size
            first += start * stride
            last += (stop - 1) * stride
            stride *= size
        return row.offset + first, last + width - first, is_run

    def memory(self) -> torch.Tensor | None:
        """Return the memory of the first target, or None if bytes cannot be read directly into that memory."""
        if not self.targets:
            return None
        target = self._ordered(self.targets[0])
        if not target.is_contiguous() or target.dtype != torch_dtype(self.row.dtype):
            return None
        return target.reshape(-1).view(torch.uint8)

    def deliver(self, memory: torch.Tensor) -> None:
        """Copy the box to all targets, except a target into which the bytes were read directly."""
        if self.row.is_bytes:
            self.data = memory.numpy().tobytes()
            return
        shape = self.row.shape if self.box is None else self.box.shape
        self.deliver_tensor(memory.view(torch_dtype(self.row.dtype)).view(torch_shape(self.row.dtype, shape)))

    def deliver_tensor(self, stored: torch.Tensor) -> None:
        """Copy the box to all targets, except a target that shares memory with `stored`.

        The dims of `stored` are in the order of the bytes.
        """
        for target in self.targets:
            ordered = self._ordered(target)
            if ordered.data_ptr() != stored.data_ptr():
                ordered.copy_(stored)

    def _ordered(self, target: torch.Tensor) -> torch.Tensor:
        """Return a target with its dims permuted into the order of the stored bytes."""
        return target if self.row.order is None else target.permute(self.row.order)


def box_of(item: ReadItem, row: CheckpointRow) -> Box | None:
    """Return the box that an item reads from a row, with dims in the order of the bytes, or None for the whole row.

    Raises:
        PlanError: the box lies outside the row, or is a part of an F4 tensor.
    """
    if row.order is None and tuple(item.lengths) == row.shape and not any(item.storage_offsets):
        return None
    start = tuple(item.storage_offsets)
    stop = tuple(at + length for at, length in zip(start, item.lengths, strict=True))
    if row.order is not None:
        start, stop = (tuple(ends[dim] for dim in row.order) for ends in (start, stop))
    box = Box(start=start, stop=stop)
    shape = torch_shape(row.dtype, row.shape)
    if len(start) != len(shape) or any(end > size for end, size in zip(stop, shape, strict=True)):
        raise PlanError(f"an item of the plan lies outside a stored part with shape {list(shape)}", tensor=row.name)
    if box == Box.full(shape):
        return None
    if row.dtype is DType.F4:
        raise PlanError("an F4 tensor can only be loaded whole", tensor=row.name)
    return box
