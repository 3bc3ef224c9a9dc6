"""Computes the values of tensors that are stored as codes and scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.errors import PlanError
from penstock.transform.formats import CASTS, WHOLE, Format, outputs
from penstock.transform.quantize import E8M0_NAN, cast, dtype_of
from penstock.types import Box, DType

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise(form: Format, parts: Sequence[torch.Tensor], dtype: DType) -> torch.Tensor:
    """Return the values of tensors that are stored in a format, computed in FP32 and then cast.

    Args:
        parts: result of `quantise`, or boxes of the result that contain whole blocks.
        dtype: one of CASTS.

    Raises:
        PlanError: the dtype is not one of CASTS, or the parts do not match the format.
    """
    if dtype not in CASTS:
        raise PlanError(f"cannot restore values as {dtype}, only as {', '.join(sorted(CASTS))}")
    if form.scaling == "none":
        return cast(parts[0], dtype)
    codes, scales = parts[0], parts[1]
    packed = form.values is DType.F4
    shape = (*codes.shape[:-1], codes.shape[-1] * 2) if packed else tuple(codes.shape)
    want = outputs(form, "", DType.F32, shape, Box.full(shape))
    if [(tuple(part.shape), dtype_of(part)) for part in parts] != [(part.shape, part.dtype) for part in want]:
        actual = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
        raise PlanError(f"tensors {actual} do not match the tensors of {form.tag}")
    return read_codes(codes, scales, form.block, dtype, whole=parts[2] if form.global_suffix else None, packed=packed)


def read_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    dtype: DType,
    *,
    whole: torch.Tensor | None = None,
    multiplies: bool = False,
    packed: bool = False,
    first_row: int = 0,
) -> torch.Tensor:
    """Return the values of codes and scales in any layout, computed in FP32 and then cast.

    Args:
        codes: FP8, INT8, or E2M1 with two codes per byte.
        scales: scales of the whole tensor, even if `codes` are only some rows, in any floating-point dtype or as
            exponents (E8M0 or U8). The scales' last two dims count blocks. A single scale applies to the whole tensor.
        block: numbers of rows and columns of values that share a scale. WHOLE means the whole dim.
        dtype: one of CASTS.
        whole: number by which all scales are divided, or None.
        multiplies: whether scales are multiplied by `whole` instead of divided by `whole`.
        packed: whether codes are E2M1, two per byte.
        first_row: row of the whole tensor, in the second-to-last dim, at which the codes begin.
    """
    # Look up the sixteen codes in a table, because torch cannot compute with E2M1.
    if packed:
        table = torch.tensor([*_E2M1_VALUES, *(-v for v in _E2M1_VALUES)], device=codes.device)
        # DeepSeek-V4 stores the bytes as I8, and a right shift would extend their sign.
        codes = codes.view(torch.uint8)
        values = table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()]
    else:
        values = codes.float()
    if not values.numel():
        return cast(values, dtype)
    factor = _scale_values(scales)
    if whole is not None:
        factor = factor * whole if multiplies else factor / whole
    # A single scale applies to all values, regardless of `block` and the shape.
    if factor.numel() == 1:
        return cast(values * factor.reshape(()), dtype)
    rows, cols = block
    if factor.shape[-2] > 1 and rows != WHOLE:
        # The codes of a shard may begin at any row of the scales, even inside a block.
        count = torch.arange(first_row, first_row + values.shape[-2], device=factor.device)
        factor = factor[..., count // rows, :]
    if cols != WHOLE and factor.shape[-1] > 1:
        factor = factor.repeat_interleave(cols, -1)[..., : values.shape[-1]]
    return cast(values * factor, dtype)


def _scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as FP32. Scales in U8 and E8M0 are exponents."""
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scales.float()
    exponent = scales.view(torch.uint8).int()
    # 2^-127 is the only scale below the range of normal FP32 numbers.
    bits = torch.where(exponent == 0, 1 << 22, exponent << 23)
    return torch.where(exponent == E8M0_NAN, 0x7FC00000, bits).view(torch.float32)
