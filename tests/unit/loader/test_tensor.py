"""Views of bytes as tensors: dtypes, alignment, packing and ownership."""

import math

import numpy as np
import pytest
import torch

from penstock.errors import MissingExtra, PlanError
from penstock.loader.tensor import as_array, as_tensor, as_tensors, dtype_of, numpy_dtype, torch_dtype, torch_shape
from penstock.types import DType, bits_to_bytes

F6 = {DType.F6_E2M3, DType.F6_E3M2}
HELD = [d for d in DType if d not in F6]


def some_bytes(nbytes: int, *, most: int = 256) -> bytearray:
    return bytearray(np.random.default_rng(nbytes).integers(0, most, nbytes, dtype=np.uint8).tobytes())


@pytest.mark.parametrize("dtype", HELD)
@pytest.mark.parametrize("shape", [(4, 8), (2,), (3, 1, 2), (0, 4), (4, 0)])
def test_every_dtype_preserves_its_bytes(dtype: DType, shape: tuple[int, ...]) -> None:
    raw = some_bytes(bits_to_bytes(math.prod(shape), dtype), most=2 if dtype is DType.BOOL else 256)
    tensor = as_tensor(memoryview(raw), dtype, shape)
    assert tensor.dtype == torch_dtype(dtype)
    assert tuple(tensor.shape) == torch_shape(dtype, shape)
    assert tensor.is_contiguous()
    assert bytes(tensor.view(torch.uint8).flatten().tolist()) == bytes(raw)


@pytest.mark.parametrize("dtype", HELD)
def test_torch_dtype_conversion_has_inverse(dtype: DType) -> None:
    assert dtype_of(torch_dtype(dtype)) is dtype


def test_scalar_tensor_has_no_dims() -> None:
    assert as_tensor(memoryview(bytearray(b"\0\0\x80\x3f")), DType.F32, ()).item() == 1.0


def test_only_misaligned_tensors_are_copied() -> None:
    raw = torch.zeros(64, dtype=torch.uint8)
    aligned, misaligned = as_tensors(raw, (DType.F32, DType.F32), ((2,), (2,)), (8, 17))
    assert aligned.data_ptr() == raw.data_ptr() + 8
    assert misaligned.data_ptr() % 4 == 0
    raw.fill_(1)
    assert aligned.view(torch.uint8).tolist() == [1] * 8
    assert misaligned.view(torch.uint8).tolist() == [0] * 8


@pytest.mark.parametrize("skip", range(9))
def test_tensors_are_read_from_unaligned_buffer(skip: int) -> None:
    raw = torch.arange(80, dtype=torch.uint8)[skip:]
    for offset in range(9):
        (tensor,) = as_tensors(raw, (DType.I64,), ((3,),), (offset,))
        assert tensor.view(torch.uint8).tolist() == list(range(skip + offset, skip + offset + 24))
        assert tensor.data_ptr() % 8 == 0


def test_tensor_view_keeps_buffer_alive() -> None:
    tensor = as_tensor(memoryview(bytearray(b"\x07" * 8)), DType.U8, (8,))
    assert tensor.tolist() == [7] * 8


@pytest.mark.parametrize("dtype", sorted(F6))
def test_f6_dtype_raises_for_torch_and_numpy(dtype: DType) -> None:
    with pytest.raises(PlanError, match=dtype):
        torch_dtype(dtype)
    with pytest.raises(PlanError, match=dtype):
        numpy_dtype(dtype)


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_f4_requires_even_last_dim(shape: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="divisible by 2"):
        torch_shape(DType.F4, shape)


def test_unsupported_torch_dtype_raises_plan_error() -> None:
    with pytest.raises(PlanError, match="complex128"):
        dtype_of(torch.complex128)


@pytest.mark.parametrize("dtype", [d for d in HELD if d.name[:2] not in ("F4", "F8", "BF")])
def test_numpy_array_matches_torch_tensor(dtype: DType) -> None:
    raw = some_bytes(bits_to_bytes(12, dtype), most=2)
    array = as_array(memoryview(raw), dtype, (3, 4))
    tensor = as_tensor(memoryview(raw), dtype, (3, 4))
    assert array.tobytes() == tensor.numpy().tobytes()
    assert array.dtype == tensor.numpy().dtype


def test_missing_ml_dtypes_error_mentions_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(MissingExtra, match="ml_dtypes"):
        numpy_dtype(DType.BF16)
