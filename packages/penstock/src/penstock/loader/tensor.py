"""Views bytes of the safetensors format as torch tensors and numpy arrays, without a copy if their address is aligned.

The dtypes are those of safetensors 0.8: F4 becomes `float4_e2m1fn_x2` with half the last dim, and F6 is unsupported.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.place import Bytes as HostBytes
from penstock.engine.place import HostPlace
from penstock.errors import MissingExtra, PlanError
from penstock.plan.schedule import LoadPlan
from penstock.storage import Source, local_path
from penstock.storage.files import FileSource
from penstock.storage.mapped import MappedFile
from penstock.types import DType

Bytes = memoryview | torch.Tensor
"""`[nbytes]` uint8, contiguous. Either a writable memoryview with format "B", or a tensor on any device."""

_ALIKE = 4
"""Minimum number of tensors for which comparing their dtypes and shapes saves time."""

_TORCH: dict[DType, torch.dtype] = {
    DType.BOOL: torch.bool,
    DType.F4: torch.float4_e2m1fn_x2,
    DType.U8: torch.uint8,
    DType.I8: torch.int8,
    DType.F8_E5M2: torch.float8_e5m2,
    DType.F8_E4M3: torch.float8_e4m3fn,
    DType.F8_E8M0: torch.float8_e8m0fnu,
    DType.F8_E4M3FNUZ: torch.float8_e4m3fnuz,
    DType.F8_E5M2FNUZ: torch.float8_e5m2fnuz,
    DType.I16: torch.int16,
    DType.U16: torch.uint16,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.I32: torch.int32,
    DType.U32: torch.uint32,
    DType.F32: torch.float32,
    DType.C64: torch.complex64,
    DType.F64: torch.float64,
    DType.I64: torch.int64,
    DType.U64: torch.uint64,
}
_WITHOUT = "leave these tensors out with names= of a load, or with `rename` of a conversion"
_FROM_TORCH = {theirs: ours for ours, theirs in _TORCH.items()}

_F8 = {DType.F8_E5M2, DType.F8_E4M3, DType.F8_E8M0, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ}
_IN_ML_DTYPES = _F8 | {DType.BF16}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return the torch dtype for `dtype`.

    Raises:
        PlanError: torch lacks this dtype (the F6 types). Nothing was read.
    """
    try:
        return _TORCH[dtype]
    except KeyError:
        raise PlanError(f"torch has no dtype for {dtype}", hint=_WITHOUT) from None


def dtype_of(dtype: torch.dtype) -> DType:
    """Return the format's dtype for a torch dtype, or raise PlanError if there is none, as for complex128."""
    try:
        return _FROM_TORCH[dtype]
    except KeyError:
        raise PlanError(f"the safetensors format has no dtype for {dtype}") from None


def torch_shape(dtype: DType, shape: Sequence[int]) -> tuple[int, ...]:
    """Return torch's shape for a tensor. Torch packs two elements of F4 into one element.

    Raises:
        PlanError: the last dim of F4 is odd, which torch cannot represent. Nothing was read.
    """
    if dtype is not DType.F4:
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise PlanError(f"float4_e2m1fn_x2 needs a last dim divisible by 2, not shape {list(shape)}")
    return (*shape[:-1], shape[-1] // 2)


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the little-endian numpy dtype for `dtype`, which for BF16 and the F8 types comes from `ml_dtypes`.

    Raise MissingExtra if `ml_dtypes` is not installed, and PlanError for F4 and F6.
    """
    if dtype is DType.F4 or dtype not in _TORCH:
        raise PlanError(f"numpy has no dtype for {dtype}", hint='open the file with framework="pt"')
    # Numpy and ml_dtypes have torch's names for these dtypes.
    name = str(_TORCH[dtype]).removeprefix("torch.")
    if dtype not in _IN_ML_DTYPES:
        return np.dtype(name).newbyteorder("<")
    try:
        kind: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except ModuleNotFoundError as error:
        hint = 'pip install ml_dtypes, or open the file with framework="pt"'
        raise MissingExtra(f"numpy has no dtype for {dtype} without ml_dtypes", hint=hint) from error
    return kind


def as_bytes(buffer: Bytes) -> torch.Tensor:
    """Return a view of `buffer` as a `[nbytes]` uint8 tensor, which keeps the buffer alive."""
    if isinstance(buffer, torch.Tensor):
        return buffer
    # `frombuffer` rejects an empty buffer.
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer.nbytes else torch.empty(0, dtype=torch.uint8)


def as_tensor(buffer: Bytes, dtype: DType, shape: Sequence[int]) -> torch.Tensor:
    """View all of `buffer` as one contiguous tensor. `shape` is in elements of the format, as in its header.

    The view keeps `buffer` alive. If the address is not aligned for the dtype, the result is a copy. Raise PlanError if
    torch cannot represent the dtype or shape.
    """
    return as_tensors(buffer, (dtype,), (shape,), (0,))[0]


def as_tensors(
    buffer: Bytes, dtypes: Sequence[DType], shapes: Sequence[Sequence[int]], offsets: Sequence[int]
) -> list[torch.Tensor]:
    """View several tensors in one buffer, each at its byte offset, like `as_tensor`.

    Each tensor takes 1.2 us, or 0.3 us if all have the same dtype and shape and are adjacent.
    """
    if len(shapes) >= _ALIKE and (alike := _alike(as_bytes(buffer), dtypes, shapes, offsets)):
        return alike
    raw = as_bytes(buffer)
    address = raw.data_ptr()
    typed: dict[torch.dtype, torch.Tensor] = {}
    tensors: list[torch.Tensor] = []
    for dtype, shape, offset in zip(dtypes, shapes, offsets, strict=True):
        kind, extent = torch_dtype(dtype), torch_shape(dtype, shape)
        width = kind.itemsize
        num_elements = math.prod(extent)
        if num_elements == 0:
            # The offset may be the end of the buffer, where no view can begin.
            tensors.append(torch.empty(extent, dtype=kind, device=raw.device))
            continue
        # Copy a misaligned tensor, which CUDA cannot read. Both the address and the storage offset must be aligned,
        # because torch counts a view's offset in elements of its storage.
        if (address + offset) % width or (raw.storage_offset() + offset) % width:
            piece = raw.narrow(0, offset, num_elements * width).clone()
            tensors.append(piece.view(kind).view(extent))
            continue
        if kind not in typed:
            # The base view has the same alignment as every tensor of this dtype.
            skip = -raw.storage_offset() % width
            typed[kind] = raw.narrow(0, skip, (raw.numel() - skip) // width * width).view(kind)
        # One `as_strided` is faster than slice, view and reshape, which take 4 us.
        base = typed[kind]
        place = (raw.storage_offset() + offset) // width
        tensors.append(base.as_strided(extent, _strides(extent), place))
    return tensors


def _alike(
    raw: torch.Tensor, dtypes: Sequence[DType], shapes: Sequence[Sequence[int]], offsets: Sequence[int]
) -> list[torch.Tensor] | None:
    """Return the result of `as_tensors` if all tensors are adjacent with the same dtype and shape, or None."""
    dtype, shape, count = dtypes[0], shapes[0], len(shapes)
    kind, extent = torch_dtype(dtype), torch_shape(dtype, shape)
    nbytes = math.prod(extent) * kind.itemsize
    if not nbytes or list(offsets) != list(range(offsets[0], offsets[0] + count * nbytes, nbytes)):
        return None
    if dtypes.count(dtype) != count or shapes.count(shape) != count:
        return None
    if (raw.data_ptr() + offsets[0]) % kind.itemsize or (raw.storage_offset() + offsets[0]) % kind.itemsize:
        return None
    run = raw.narrow(0, offsets[0], count * nbytes)
    return list(run.view(kind).view(count, *extent).unbind(0))


def as_array(buffer: memoryview, dtype: DType, shape: Sequence[int]) -> npt.NDArray[Any]:
    """View all of `buffer` as one C-contiguous numpy array, which keeps `buffer` alive. Raise like `numpy_dtype`."""
    kind = numpy_dtype(dtype)
    return np.frombuffer(buffer, kind).reshape(tuple(shape)) if buffer.nbytes else np.empty(tuple(shape), kind)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return tuple(strides)


class TensorMappings:
    """The mapped files of one load. Views stay valid after `close`."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._files = files

    @classmethod
    def open(cls, sources: Sequence[FileSource]) -> TensorMappings:
        """Map local files. Raise SourceChanged if a file was replaced after its source was opened."""
        with ExitStack() as opened:
            # Compare `state`, because the path may lead to a different file now.
            files = [
                opened.enter_context(closing(MappedFile.open(local_path(source.uri), state=source.state)))
                for source in sources
            ]
            opened.pop_all()
        return cls(files)

    def are_ready(self) -> bool:
        """Return whether all files are in the page cache."""
        return all(file.is_ready() for file in self._files)

    def place(self, plan: LoadPlan, *, is_ready: bool) -> tuple[HostPlace, list[Source]]:
        """Return a place whose slabs are views of the files, and sources whose reads fault in these views.

        If `is_ready` is set, no pages are faulted in ahead of the reads.
        """
        # Each slab is one run of one file, so a slab's offset in the file is the offset of its first row.
        first = np.flatnonzero((plan.row_slab >= 0) & (plan.row_offset == 0))
        table, nbytes = plan.table, plan.slab_nbytes.tolist()
        columns = (table.file_index[first].tolist(), table.offset[first].tolist(), nbytes)
        slabs: list[HostBytes | None] = [
            np.frombuffer(self._files[file].view(offset, length), np.uint8)
            for file, offset, length in zip(*columns, strict=True)
        ]
        return HostPlace(nbytes, slabs), [_MappedSource(file, is_ready) for file in self._files]

    def check_unchanged(self) -> None:
        """Check every file like `FileSource.check_unchanged`."""
        for file in self._files:
            file.check_unchanged()

    def close(self) -> None:
        """Close the files. Views stay valid. Idempotent."""
        for file in self._files:
            file.close()


class _MappedSource:
    """A mapped file as a source, whose reads only fault in pages."""

    def __init__(self, mapped: MappedFile, is_ready: bool) -> None:
        self._mapped = mapped
        self._is_ready = is_ready
        self.uri = mapped.uri
        self.nbytes = mapped.nbytes
        self.identity = mapped.identity

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        # Fault in pages in the engine's reads, which have progress, deadlines and errors for truncated files.
        if not self._is_ready:
            self._mapped.prefetch(offset, sum(buffer.nbytes for buffer in buffers))
        return "mmap"

    def close(self) -> None:
        """Do nothing, because `TensorMappings` closes the file."""
