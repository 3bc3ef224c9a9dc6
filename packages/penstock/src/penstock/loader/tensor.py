"""Views bytes of the safetensors format as torch tensors and numpy arrays, without a copy if their address is aligned.

Mapped files become the slabs of a `LoadPlan`, with sources that bring their pages into memory. The dtypes are those of
safetensors 0.8: F4 becomes `float4_e2m1fn_x2` with half the last dim. F6 has no dtype in torch or numpy and is refused.
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
"""Minimum number of tensors for which a comparison of their dtypes and shapes saves time."""

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
# F6 has no dtype in torch.
_WITHOUT = "leave these tensors out with names= of a load, or with `rename` of a conversion"
_FROM_TORCH = {theirs: ours for ours, theirs in _TORCH.items()}

# The format is little-endian on every host.
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
    """Return the torch dtype for `dtype`.

    Raises:
        PlanError: torch has no such dtype (the F6 types). Nothing was read.
    """
    try:
        return _TORCH[dtype]
    except KeyError:
        raise PlanError(f"torch has no dtype for {dtype}", hint=_WITHOUT) from None


def dtype_of(dtype: torch.dtype) -> DType:
    """Return the format's dtype for a torch dtype. Raise PlanError if there is none (quantised, complex128, ...)."""
    try:
        return _FROM_TORCH[dtype]
    except KeyError:
        raise PlanError(f"the safetensors format has no dtype for {dtype}") from None


def torch_shape(dtype: DType, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that torch shows for a tensor. For F4 it packs two elements into one.

    Raises:
        PlanError: the last dim of F4 is odd, which torch cannot represent. Nothing was read.
    """
    if dtype is not DType.F4:
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise PlanError(f"float4_e2m1fn_x2 needs a last dim divisible by 2, not shape {list(shape)}")
    return (*shape[:-1], shape[-1] // 2)


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the numpy dtype for `dtype`. For BF16 and the F8 types it comes from `ml_dtypes`.

    Raises:
        MissingExtra: `ml_dtypes` is needed and not installed.
        PlanError: there is no such dtype even in `ml_dtypes` (F4, F6).
    """
    if dtype in _NUMPY:
        return np.dtype(_NUMPY[dtype])
    if dtype not in _ML_DTYPES:
        raise PlanError(f"numpy has no dtype for {dtype}", hint='open the file with framework="pt"')
    # Import this only here, because few programs need this extra.
    try:
        kind: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), _ML_DTYPES[dtype]))
    except ModuleNotFoundError as error:
        hint = 'pip install ml_dtypes, or open the file with framework="pt"'
        raise MissingExtra(f"numpy alone has no dtype for {dtype}", hint=hint) from error
    return kind


def as_bytes(buffer: Bytes) -> torch.Tensor:
    """Return a view of `buffer` as a `[nbytes]` uint8 tensor, which keeps the buffer alive."""
    if isinstance(buffer, torch.Tensor):
        return buffer
    # `frombuffer` refuses an empty buffer.
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer.nbytes else torch.empty(0, dtype=torch.uint8)


def as_tensor(buffer: Bytes, dtype: DType, shape: Sequence[int]) -> torch.Tensor:
    """View all of `buffer` as one contiguous tensor. `shape` is in elements of the format, as in its header.

    The view keeps `buffer` alive. If the address is not aligned for the dtype, the result is a copy.

    Raises:
        PlanError: torch cannot represent the dtype or shape.
    """
    return as_tensors(buffer, (dtype,), (shape,), (0,))[0]


def as_tensors(
    buffer: Bytes, dtypes: Sequence[DType], shapes: Sequence[Sequence[int]], offsets: Sequence[int]
) -> list[torch.Tensor]:
    """View several tensors in one buffer, each at its byte offset, like `as_tensor`.

    Each takes 1.2 us, or 0.3 us if all are alike and adjacent, as experts are.
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
        # Copy a misaligned tensor. CUDA refuses to read it, and CPU kernels do not promise to. Both the address and the
        # storage offset matter, because torch counts a view's offset in elements of its storage and kernels load from
        # the address.
        if (address + offset) % width or (raw.storage_offset() + offset) % width:
            piece = raw.narrow(0, offset, num_elements * width).clone()
            tensors.append(piece.view(kind).view(extent))
            continue
        if kind not in typed:
            # This has the same address modulo the width as every tensor of this dtype that may view it.
            skip = -raw.storage_offset() % width
            typed[kind] = raw.narrow(0, skip, (raw.numel() - skip) // width * width).view(kind)
        # Use one `as_strided`, because slice, view and reshape would take 4 us together, for 60,000 tensors.
        base = typed[kind]
        place = (raw.storage_offset() + offset) // width
        tensors.append(base.as_strided(extent, _strides(extent), place))
    return tensors


def _alike(
    raw: torch.Tensor, dtypes: Sequence[DType], shapes: Sequence[Sequence[int]], offsets: Sequence[int]
) -> list[torch.Tensor] | None:
    """Return the result of `as_tensors` with one call of torch, or None unless all tensors are alike and adjacent."""
    dtype, shape, count = dtypes[0], shapes[0], len(shapes)
    kind, extent = torch_dtype(dtype), torch_shape(dtype, shape)
    nbytes = math.prod(extent) * kind.itemsize
    if not nbytes or list(offsets) != list(range(offsets[0], offsets[0] + count * nbytes, nbytes)):
        return None
    if dtypes.count(dtype) != count or shapes.count(shape) != count:
        return None
    if (raw.data_ptr() + offsets[0]) % kind.itemsize or (raw.storage_offset() + offsets[0]) % kind.itemsize:
        return None
    # Create one view of all tensors and split it with one call.
    run = raw.narrow(0, offsets[0], count * nbytes)
    return list(run.view(kind).view(count, *extent).unbind(0))


def as_array(buffer: memoryview, dtype: DType, shape: Sequence[int]) -> npt.NDArray[Any]:
    """View all of `buffer` as one C-contiguous numpy array, which keeps `buffer` alive.

    Raises:
        MissingExtra, PlanError: like `numpy_dtype`.
    """
    kind = numpy_dtype(dtype)
    return np.frombuffer(buffer, kind).reshape(tuple(shape)) if buffer.nbytes else np.empty(tuple(shape), kind)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return tuple(strides)


class TensorMappings:
    """The mapped files of one load. Views stay valid after `close`.

    Args:
        sources: local files. Each is mapped only if it is still the file that was opened.

    Raises:
        SourceChanged: a file was replaced after its source was opened.
        SourceError: a file cannot be opened.
    """

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._files = files

    @classmethod
    def open(cls, sources: Sequence[FileSource]) -> TensorMappings:
        """Map local files. Each is mapped only if it is still the file that the source opened.

        Raises:
            SourceChanged: a file was replaced after its source was opened.
            SourceError: a file cannot be opened.
        """
        with ExitStack() as opened:
            # Compare `state`, because the path may lead to a different file from the one whose header was read.
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

        Each view keeps its range mapped. The sources are alive as long as this object.

        Args:
            plan: plan of the files. Each slab is one run of one file.
            is_ready: read nothing ahead. The pages fault in when they are touched.
        """
        # The first row of each slab tells its offset in the file.
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
    """A mapped file as a source. Its bytes are in place, so a read only brings in their pages."""

    def __init__(self, mapped: MappedFile, is_ready: bool) -> None:
        self._mapped = mapped
        self._is_ready = is_ready
        self.uri = mapped.uri
        self.nbytes = mapped.nbytes
        self.identity = mapped.identity

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`. `buffers` are views of this very range."""
        # Bring pages in together with the engine's reads, so that progress, deadlines and truncated files work as for
        # any source.
        if not self._is_ready:
            self._mapped.prefetch(offset, sum(buffer.nbytes for buffer in buffers))
        return "mmap"

    def close(self) -> None:
        """Do nothing, because `TensorMappings` closes the file."""
