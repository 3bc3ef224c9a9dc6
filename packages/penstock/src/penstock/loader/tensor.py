"""Bytes of the safetensors format as torch tensors and numpy arrays, without a copy where addresses allow.

In: a buffer (memoryview, or a uint8 tensor on any device), or mapped files; dtypes, shapes. Out: tensors or arrays that
view it; for mapped files the slabs of a `LoadPlan`, and the sources that bring them into memory.
Not here: reading the bytes (`storage`, `engine`), their places (`plan`), the choice to map (`load`), the mapping of one
file (`storage.mapped`).

The dtypes are those of safetensors 0.8: F4 becomes `float4_e2m1fn_x2` with the last dim halved; F6 has no torch or
numpy dtype and is refused.
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
"""`[nbytes]` uint8, contiguous: a writable memoryview of format "B", or a tensor on any device."""

_ALIKE = 4
"""Fewer tensors than this are not compared: the comparison costs more than it saves."""

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
# F6 has no dtype in torch: see the module.
_WITHOUT = "leave these tensors out: names= of a load, or a conversion whose `rename` gives them no name"
_FROM_TORCH = {theirs: ours for ours, theirs in _TORCH.items()}

# Little-endian, as the format is, whatever the host is.
_NUMPY: dict[DType, str] = {
    DType.BOOL: "bool",
    DType.U8: "u1",
    DType.I8: "i1",
    DType.I16: "<i2",
    DType.U16: "<u2",
    DType.F16: "<f2",
    DType.I32: "<i4",
    DType.U32: "<u4",
    DType.F32: "<f4",
    DType.C64: "<c8",
    DType.F64: "<f8",
    DType.I64: "<i8",
    DType.U64: "<u8",
}
_ML_DTYPES: dict[DType, str] = {
    DType.BF16: "bfloat16",
    DType.F8_E5M2: "float8_e5m2",
    DType.F8_E4M3: "float8_e4m3fn",
    DType.F8_E8M0: "float8_e8m0fnu",
    DType.F8_E4M3FNUZ: "float8_e4m3fnuz",
    DType.F8_E5M2FNUZ: "float8_e5m2fnuz",
}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return the torch dtype that holds `dtype`.

    Raises:
        PlanError: torch has none (the F6 types); nothing was read.
    """
    try:
        return _TORCH[dtype]
    except KeyError:
        raise PlanError(f"torch has no dtype for {dtype}", hint=_WITHOUT) from None


def dtype_of(dtype: torch.dtype) -> DType:
    """Return the format's name of a torch dtype. PlanError if the format has none (quantised, complex128, ...)."""
    try:
        return _FROM_TORCH[dtype]
    except KeyError:
        raise PlanError(f"the safetensors format has no dtype for {dtype}") from None


def torch_shape(dtype: DType, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape torch shows for a tensor of the format: its own, but F4 packs two elements in one.

    Raises:
        PlanError: F4 with an odd last dim, which torch cannot hold; nothing was read.
    """
    if dtype is not DType.F4:
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise PlanError(f"float4_e2m1fn_x2 needs a last dim divisible by 2, not shape {list(shape)}")
    return (*shape[:-1], shape[-1] // 2)


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the numpy dtype that holds `dtype`; for BF16 and the F8 types that of `ml_dtypes`.

    Raises:
        MissingExtra: `ml_dtypes` is needed and not installed.
        PlanError: numpy has none even so (F4, F6).
    """
    if dtype in _NUMPY:
        return np.dtype(_NUMPY[dtype])
    if dtype not in _ML_DTYPES:
        raise PlanError(f"numpy has no dtype for {dtype}", hint='open the file with framework="pt"')
    # Imported on first use: an extra, which few programs need.
    try:
        kind: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), _ML_DTYPES[dtype]))
    except ModuleNotFoundError as error:
        hint = 'pip install ml_dtypes, or open the file with framework="pt"'
        raise MissingExtra(f"numpy alone has no dtype for {dtype}", hint=hint) from error
    return kind


def as_bytes(buffer: Bytes) -> torch.Tensor:
    """Return `buffer` as a `[nbytes]` uint8 tensor.

    Ownership: a view; it keeps the buffer alive.
    """
    if isinstance(buffer, torch.Tensor):
        return buffer
    # `frombuffer` refuses an empty buffer.
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer.nbytes else torch.empty(0, dtype=torch.uint8)


def as_tensor(buffer: Bytes, dtype: DType, shape: Sequence[int]) -> torch.Tensor:
    """Return all of `buffer` as one contiguous tensor; `shape` in elements of the format, as its header gives it.

    Raises:
        PlanError: torch cannot hold the dtype or shape.

    Ownership: a view of `buffer`, which it keeps alive; a copy if the address is not aligned for the dtype.
    """
    return as_tensors(buffer, (dtype,), (shape,), (0,))[0]


def as_tensors(
    buffer: Bytes, dtypes: Sequence[DType], shapes: Sequence[Sequence[int]], offsets: Sequence[int]
) -> list[torch.Tensor]:
    """Return several tensors inside one buffer, each at its byte offset, as `as_tensor` returns one.

    Cost: 1.2 us each; 0.3 us where all are alike and side by side, as experts are.
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
            # Its offset may be the end of the buffer, where no view can begin.
            tensors.append(torch.empty(extent, dtype=kind, device=raw.device))
            continue
        # A misaligned tensor is copied: CUDA refuses to read one, and no CPU kernel promises to. Address and storage
        # offset both count: torch counts a view's offset in elements of its storage, kernels load from the address.
        if (address + offset) % width or (raw.storage_offset() + offset) % width:
            piece = raw.narrow(0, offset, num_elements * width).clone()
            tensors.append(piece.view(kind).view(extent))
            continue
        if kind not in typed:
            # Same address modulo the width as every tensor of this kind that may view it.
            skip = -raw.storage_offset() % width
            typed[kind] = raw.narrow(0, skip, (raw.numel() - skip) // width * width).view(kind)
        # One `as_strided`: slice, view and reshape would take 4 us together, for 60,000 tensors.
        base = typed[kind]
        place = (raw.storage_offset() + offset) // width
        tensors.append(base.as_strided(extent, _strides(extent), place))
    return tensors


def _alike(
    raw: torch.Tensor, dtypes: Sequence[DType], shapes: Sequence[Sequence[int]], offsets: Sequence[int]
) -> list[torch.Tensor] | None:
    """Return the result of `as_tensors` by one call of torch; None unless all are alike and lie side by side."""
    dtype, shape, count = dtypes[0], shapes[0], len(shapes)
    kind, extent = torch_dtype(dtype), torch_shape(dtype, shape)
    nbytes = math.prod(extent) * kind.itemsize
    if not nbytes or list(offsets) != list(range(offsets[0], offsets[0] + count * nbytes, nbytes)):
        return None
    if dtypes.count(dtype) != count or shapes.count(shape) != count:
        return None
    if (raw.data_ptr() + offsets[0]) % kind.itemsize or (raw.storage_offset() + offsets[0]) % kind.itemsize:
        return None
    # One view of all of them, taken apart by one call.
    run = raw.narrow(0, offsets[0], count * nbytes)
    return list(run.view(kind).view(count, *extent).unbind(0))


def as_array(buffer: memoryview, dtype: DType, shape: Sequence[int]) -> npt.NDArray[Any]:
    """Return all of `buffer` as one C-contiguous numpy array.

    Raises:
        MissingExtra, PlanError: as `numpy_dtype`.

    Ownership: a view of `buffer`, which it keeps alive.
    """
    kind = numpy_dtype(dtype)
    return np.frombuffer(buffer, kind).reshape(tuple(shape)) if buffer.nbytes else np.empty(tuple(shape), kind)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return tuple(strides)


class TensorMappings:
    """The mapped files of one load. Views outlive `close`."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._files = files

    @classmethod
    def open(cls, sources: Sequence[FileSource]) -> TensorMappings:
        """Map local files. Each is mapped only if it is still the file that the source opened.

        Raises:
            SourceChanged: a file was replaced since its source was opened.
            SourceError: a file cannot be opened.
        """
        with ExitStack() as opened:
            # By `state`: a path may name another file by now than the one whose header was read.
            files = [
                opened.enter_context(closing(MappedFile.open(local_path(source.uri), state=source.state)))
                for source in sources
            ]
            opened.pop_all()
        return cls(files)

    def are_ready(self) -> bool:
        """Return whether all files are in the page cache already."""
        return all(file.is_ready() for file in self._files)

    def place(self, plan: LoadPlan, *, is_ready: bool) -> tuple[HostPlace, list[Source]]:
        """Return a place whose slabs are views of the files, and sources whose reads bring these views into memory.

        Args:
            plan: of the files, each slab one run of one of them.
            is_ready: bring nothing in; the pages fault when they are touched.

        Ownership: each view keeps its own range mapped; the sources live as long as this.
        """
        # The first row of each slab says where the slab lies in its file.
        first = np.flatnonzero((plan.row_slab >= 0) & (plan.row_offset == 0))
        table, nbytes = plan.table, plan.slab_nbytes.tolist()
        columns = (table.file_index[first].tolist(), table.offset[first].tolist(), nbytes)
        slabs: list[HostBytes | None] = [
            np.frombuffer(self._files[file].view(offset, length), np.uint8)
            for file, offset, length in zip(*columns, strict=True)
        ]
        return HostPlace(nbytes, slabs), [_MappedSource(file, is_ready) for file in self._files]

    def check_unchanged(self) -> None:
        """See `FileSource.check_unchanged`, of every file."""
        for file in self._files:
            file.check_unchanged()

    def close(self) -> None:
        """Close the files; views live on. Idempotent."""
        for file in self._files:
            file.close()


class _MappedSource:
    """A mapped file as a source whose bytes are in place already: a read only brings their pages in."""

    def __init__(self, mapped: MappedFile, is_ready: bool) -> None:
        self._mapped = mapped
        self._is_ready = is_ready
        self.uri = mapped.uri
        self.nbytes = mapped.nbytes
        self.identity = mapped.identity

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`; `buffers` are views of this very range."""
        # In step with the engine's reads, so that progress, deadlines and a file cut short are as for any source.
        if not self._is_ready:
            self._mapped.prefetch(offset, sum(buffer.nbytes for buffer in buffers))
        return "mmap"

    def close(self) -> None:
        """Do nothing: `TensorMappings` closes the file."""
