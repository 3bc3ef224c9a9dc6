"""Reference implementation of the formats with torch, on any device. The Triton kernels give the same bits.

Every number is FP32 and every step is one IEEE operation rounded to nearest even, so the bits are the same everywhere.
The amax of a block is its largest magnitude, and at least TINY where the amax is a divisor.

    amax   scale = amax / 448                                  code = E4M3(clamp(x * (1 / scale)))
    pow2   scale = 2^ceil(log2(amax / 448))                    code = E4M3(clamp(x * (1 / scale)))
    mx     scale = 2^max(up(amax) - 8, -127)                   code = E4M3(clamp(x * (1 / scale)))
    mx_floor
           scale = 2^max(floor(log2(amax)) - 8, -127)          code = E4M3(clamp(x * (1 / scale)))
    nv     scale = E4M3(clamp(G * (amax / 6))), at least 2^-9  code = E2M1(x * (G / scale)), G = 2688 / tensor's amax

up(amax) is floor(log2(amax)), plus one if amax is at least 1.75 * 2^floor(log2(amax)), so that amax / scale stays below
448. `mx_floor` never adds one and clamps values, which raises the RMS error of normal weights from 0.0266 to 0.0293.

A value is code * scale, and in NVFP4 code * (scale / G). A block (in NVFP4, a tensor) with a NaN or an infinity gets a
NaN scale (255 in E8M0) and NaN codes (0 in E2M1, which has no NaN).

Sources: DeepGEMM and vLLM 0.32, `per_block_cast_to_fp8`. OCP Microscaling Formats 1.0, section 6.3 (`mx_floor`).
compressed-tensors 0.20, `generate_mx_scales` (`mx`), `calculate_qparams` and `generate_gparam`. compressed-tensors
divides by the scale instead of multiplying by its inverse, so codes differ if the quotient is on the edge between two
codes.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from penstock.errors import PlanError
from penstock.transform.formats import WHOLE, Format, check, outputs
from penstock.types import Box, DType

TINY = 2.0**-100
"""Minimum amax for computing a scale, so that the scale and its inverse are normal numbers and zeros stay zeros."""

E4M3_MAX = 448.0
"""Source: OCP FP8 1.0, table 1."""
E5M2_MAX = 57344.0
E2M1_MAX = 6.0
"""Source: OCP Microscaling Formats 1.0, table 5."""

MX_ELEMENT_EXPONENT = 8
"""Exponent of the largest power of two in E4M3. Source: OCP Microscaling Formats 1.0, section 6.3."""

MX_ROUND_UP_BITS = 1 << 21
"""If this number is added to the bits of an FP32, a mantissa of at least 1.75 (448 / 256) carries into the exponent.
Source: compressed-tensors 0.20, `round_to_power_2` with one bit of mantissa."""

INFINITY_BITS = 0x7F800000
E4M3_NAN = 0x7F
E8M0_NAN = 0xFF

# Midpoints between neighbouring E2M1 codes, and whether each midpoint rounds up (ties to even).
_E2M1_EDGES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))

_TORCH = {
    DType.F64: torch.float64,
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F8_E4M3: torch.float8_e4m3fn,
    DType.F8_E5M2: torch.float8_e5m2,
    DType.F8_E8M0: torch.float8_e8m0fnu,
    DType.U8: torch.uint8,
}
_DTYPE = {theirs: ours for ours, theirs in _TORCH.items()}
_NAN_BITS = {DType.F32: 0x7FC00000, DType.F16: 0x7E00, DType.BF16: 0x7FC0, DType.F8_E4M3: 0x7F, DType.F8_E5M2: 0x7F}
"""Bits of the NaN that casts store."""


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return the torch dtype for a `DType` that a format reads or stores."""
    return _TORCH[dtype]


def dtype_of(tensor: torch.Tensor) -> DType:
    """Return the dtype of a tensor. Raises PlanError if no format reads or stores this dtype."""
    try:
        return _DTYPE[tensor.dtype]
    except KeyError:
        raise PlanError(f"no transform supports {tensor.dtype}") from None


def quantise(form: Format, source: torch.Tensor, *, amax: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Return the tensors, codes first, that the format stores for a tensor, or for a shard whose edges cut no block.

    Args:
        source: tensor with any strides.
        amax: largest magnitude in the whole tensor as one float32, for a format with a scale for the whole tensor. If
            `amax` is None, the largest magnitude is measured in `source`.

    Raises:
        PlanError: the format does not accept this dtype or shape.
    """
    shape = tuple(source.shape)
    check(form, "", dtype_of(source), shape, Box.full(shape))
    if form.scaling == "none":
        return (cast(source, form.values),)
    rows, cols = (n if step == WHOLE else step for step, n in zip(form.block, shape[-2:], strict=True))
    # The shape becomes [..., blocks down, rows, blocks across, cols]. Elements beyond the edge are zero.
    padded = functional.pad(source.float(), (0, -shape[-1] % max(cols, 1), 0, -shape[-2] % max(rows, 1)))
    if not padded.numel():
        return _empty(form, source, amax)
    blocks = padded.unflatten(-1, (-1, cols)).unflatten(-3, (-1, rows))
    # As an integer, a NaN's bits exceed those of infinity, so a single comparison finds both.
    peak = magnitude(blocks).amax(dim=(-3, -1))
    # A NaN or an infinity makes the global scale wrong for all blocks.
    whole = None
    if form.scaling == "nv":
        whole = magnitude(source.float() if amax is None else amax).amax()
        peak = torch.where(whole >= INFINITY_BITS, whole, peak)
    inverse, scales, extra = _scales(form, peak, whole)
    scaled = blocks * inverse[..., :, None, :, None]
    codes = _e2m1(scaled) if form.values is DType.F4 else _e4m3(scaled.clamp(-E4M3_MAX, E4M3_MAX)).view(torch.uint8)
    bad = (peak >= INFINITY_BITS)[..., :, None, :, None]
    codes = torch.where(bad, 0 if form.values is DType.F4 else E4M3_NAN, codes)
    codes = codes.flatten(-4, -3).flatten(-2)[..., : shape[-2], : shape[-1]].contiguous()
    if form.values is DType.F4:
        # Put the first of two codes into the low bits, as compressed-tensors does.
        return codes[..., ::2] | (codes[..., 1::2] << 4), scales, *extra
    return codes.view(torch.float8_e4m3fn), scales, *extra


def magnitude(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of |x| in FP32 as int32, which sort like the numbers, followed by infinity and NaN."""
    return values.view(torch.int32) & 0x7FFFFFFF


def _scales(
    form: Format, peak: torch.Tensor, whole: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return each block's factor and stored scale, and the scale of the whole tensor if there is one."""
    bad = peak >= INFINITY_BITS
    finite = torch.where(bad, 0, peak)
    nan = math.nan
    if whole is not None:
        top = torch.where(whole >= INFINITY_BITS, nan, whole_scale(whole.view(torch.float32))).reshape(1)
        scale = _e4m3((top * _over(finite.view(torch.float32), E2M1_MAX)).clamp(max=E4M3_MAX)).view(torch.uint8)
        # A scale of zero would make the inverse infinite.
        scale = torch.where(bad, E4M3_NAN, scale.clamp(min=1)).view(torch.float8_e4m3fn)
        return top / scale.float(), scale, (top,)
    # Use the exponent bits, because log2 in floating point may round up to the next power of two.
    if form.scaling in ("mx", "mx_floor"):
        peak_bits = finite + MX_ROUND_UP_BITS if form.scaling == "mx" else finite
        exponent = ((peak_bits >> 23) - MX_ELEMENT_EXPONENT).clamp(min=0)
    else:
        scale = _over(finite.view(torch.float32).clamp(min=TINY), E4M3_MAX)
        if form.scaling == "amax":
            return scale.reciprocal(), torch.where(bad, nan, scale), ()
        # Adding all mantissa bits rounds up to the next power of two.
        exponent = (scale.view(torch.int32) + 0x7FFFFF) >> 23
    # The exponents of a power of two and its inverse, both with bias 127, sum to 254.
    inverse = ((254 - exponent) << 23).view(torch.float32)
    # E8M0 and U8 store the exponent itself.
    if form.scales is DType.F32:
        return inverse, torch.where(bad, nan, (exponent << 23).view(torch.float32)), ()
    return inverse, torch.where(bad, E8M0_NAN, exponent).to(torch.uint8).view(torch_dtype(form.scales)), ()


def whole_scale(amax: torch.Tensor) -> torch.Tensor:
    """Return NVFP4's tensor scale, which maps the largest magnitude to the largest code times the largest scale."""
    return torch.full_like(amax, E4M3_MAX * E2M1_MAX) / amax.clamp(min=TINY)


def _over(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide by `divisor` as a tensor. For a plain number, torch multiplies by the inverse, which rounds twice."""
    return values / torch.full_like(values, divisor)


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round numbers within the range of E4M3 to E4M3. Outside the range of E4M3, torch versions differ."""
    return values.to(torch.float8_e4m3fn)


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    """Return four-bit codes as uint8. Numbers beyond 6 become 6."""
    size = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for edge, closed in _E2M1_EDGES:
        codes += (size >= edge) if closed else (size > edge)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def cast(source: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Cast through FP32. FP8 saturates to the largest number, and in E4M3 an infinity becomes NaN."""
    # Do not go through FP32, which would lose precision of F64.
    if dtype is DType.F64:
        cast = source.double()
        return torch.where(cast.isnan(), math.nan, cast)
    values = source.float()
    lost = values.isnan()
    if dtype is DType.F8_E4M3:
        lost = lost | values.isinf()
        values = values.clamp(-E4M3_MAX, E4M3_MAX)
    elif dtype is DType.F8_E5M2:
        values = torch.where(values.isinf(), values, values.clamp(-E5M2_MAX, E5M2_MAX))
    cast = values.to(torch_dtype(dtype))
    # Processors produce different bits for a NaN, so replace every NaN with torch.nan in this dtype.
    bits = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[dtype.bits]
    return torch.where(lost, _NAN_BITS[dtype], cast.view(bits)).view(cast.dtype)


def _empty(form: Format, source: torch.Tensor, amax: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return the outputs for a tensor without elements."""
    shape = tuple(source.shape)
    parts = outputs(form, "", dtype_of(source), shape, Box.full(shape))
    empty_parts = [torch.empty(part.shape, dtype=torch_dtype(part.dtype), device=source.device) for part in parts]
    if form.global_suffix:
        whole = magnitude(source.new_zeros((), dtype=torch.float32) if amax is None else amax).amax()
        empty_parts[-1] = _scales(form, whole, whole)[2][0]
    return tuple(empty_parts)
