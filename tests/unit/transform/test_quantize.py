"""Quantised values against a second implementation in plain Python and numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from penstock.errors import PlanError  # noqa: E402
from penstock.transform.formats import FORMATS, foreign, format_of, outputs, owned  # noqa: E402  # noqa: E402
from penstock.transform.fuse import KernelJob, fuse  # noqa: E402
from penstock.transform.quantize import quantise, torch_dtype  # noqa: E402
from penstock.types import Box, DType  # noqa: E402
from penstock_convert.operations.read_codes import dequantise  # noqa: E402

F = np.float32
E4M3 = [(-1 if code & 128 else 1) * (
    (8 + code % 8) * 2.0 ** ((code >> 3 & 15) - 10) if code >> 3 & 15 else code % 8 * 2.0**-9
) for code in range(256)]  # fmt: skip
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def nearest(value: float, table: list[float]) -> int:
    """Return the code of the nearest number in a table of positive numbers, ties to even."""
    best = min(abs(abs(value) - one) for one in table)
    codes = [code for code, one in enumerate(table) if abs(abs(value) - one) == best]
    return next((code for code in codes if code % 2 == 0), codes[0])


def e4m3(value: float) -> int:
    return nearest(value, E4M3[:127]) | (128 if math.copysign(1, value) < 0 else 0)


def slowly(tag: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes (one a byte) and scales of finite float32 as numbers."""
    form = FORMATS[tag]
    rows, cols = form.block[0], form.block[1] or x.shape[1]
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((-(-x.shape[0] // rows), -(-x.shape[1] // cols)))
    top = F(2688) / F(max(np.abs(x).max(), 2.0**-100))
    for i, j in np.ndindex(*scales.shape):
        at = slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols)
        amax = F(np.abs(x[at]).max())
        floored = F(max(amax, 2.0**-100))
        if tag == "nvfp4":
            scale = E4M3[max(1, e4m3(min(448.0, float(top * F(amax / F(6))))))]
            inverse = F(top / F(scale))
        elif form.scaling in ("mx", "mx_floor"):
            mantissa, exponent = math.frexp(
                amax
            )  # The mantissa is in [0.5, 1), so 0.875 is 1.75 of the next lower power.
            exponent += form.scaling == "mx" and mantissa >= 0.875
            scale = 2.0 ** max(-127, (exponent - 1 if amax else -1000) - 8)
            inverse = F(1 / scale)
        else:
            scale = float(F(floored / F(448)))
            if form.scaling == "pow2":
                mantissa, exponent = math.frexp(scale)
                scale = 2.0 ** (exponent - (mantissa == 0.5))
            inverse = F(F(1) / F(scale))
        scales[i, j] = scale
        for k in np.ndindex(*x[at].shape):
            product = float(F(x[at][k] * inverse))
            code = e4m3(max(-448.0, min(448.0, product)))
            if tag == "nvfp4":
                code = nearest(min(6.0, abs(product)), E2M1) | (8 if math.copysign(1, product) < 0 else 0)
            codes[at][k] = code
    return codes, scales


def sample(seed: int = 0) -> np.ndarray:
    chance = np.random.default_rng(seed)
    x = chance.normal(size=(131, 160)).astype(F) * np.exp2(chance.integers(-30, 6, (131, 1))).astype(F)
    x[5] = 0
    x[6, :4] = [448, 464, -480, 2.0**-120]
    x[7, :8] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    return x


@pytest.mark.parametrize("tag", [tag for tag in sorted(FORMATS) if not tag.startswith("cast")])
def test_quantised_values_match_format_definition(tag: str) -> None:
    x = sample()
    codes, scales = slowly(tag, x)
    parts = quantise(format_of(tag), torch.from_numpy(x))
    got = parts[0].view(torch.uint8).numpy()
    if tag == "nvfp4":
        got = np.stack([got & 15, got >> 4], -1).reshape(x.shape)
        assert parts[2].item() == F(2688) / np.abs(x).max()
    assert np.array_equal(got, codes)
    stored = parts[1]
    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        assert np.array_equal(np.exp2(stored.view(torch.uint8).numpy() - 127.0), scales)
    else:
        assert np.array_equal(stored.float().numpy(), scales.astype(F))
    table = np.array(E4M3 if tag != "nvfp4" else [*E2M1, *(-v for v in E2M1)], F)
    rows, cols = format_of(tag).block
    factor = np.repeat(np.repeat(scales.astype(F), rows, 0), cols or 160, 1)[:131, :160]
    if tag == "nvfp4":
        factor = factor / F(parts[2].item())
    assert np.array_equal(dequantise(format_of(tag), parts, DType.F32).numpy(), table[codes] * factor)


@pytest.mark.parametrize("tag", [tag for tag in sorted(FORMATS) if not tag.startswith("cast")])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_non_finite_block_dequantises_to_nan(tag: str, odd: float) -> None:
    form = format_of(tag)
    x = torch.from_numpy(sample()).bfloat16()
    x[3, 40] = odd
    back = dequantise(form, quantise(form, x), DType.F32)
    rows, cols = form.block[0], form.block[1] or 160
    nan = torch.zeros(131, 160, dtype=torch.bool)
    nan[3 // rows * rows : 3 // rows * rows + rows, 40 // cols * cols : 40 // cols * cols + cols] = True
    assert torch.equal(back.isnan(), nan | (tag == "nvfp4"))


@pytest.mark.parametrize("tag", ["fp8-block128", "fp8-block1x128-e8m0", "fp8-channel", "mxfp8", "mxfp8-floor", "nvfp4"])
def test_shards_straddling_blocks_match_unsharded_tensor(tag: str) -> None:
    """Three ranks hold rows cut anywhere, receive foreign elements, and write one output."""
    form, x = format_of(tag), torch.from_numpy(sample()).bfloat16()
    shape = tuple(x.shape)
    whole = quantise(form, x)
    outs = [torch.zeros_like(part) for part in whole]
    amax = x.abs().max().float()
    for start, stop in ((0, 50), (50, 51), (51, 131)):
        held = Box(start=(start, 0), stop=(stop, 160))
        mine = owned(form, shape, held)
        if not mine.num_elements:
            continue
        scratch = torch.full(shape, math.nan, dtype=torch.bfloat16)
        for box in (held, *foreign(held, mine)):
            at = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            scratch[at] = x[at]
        at = tuple(slice(a, b) for a, b in zip(mine.start, mine.stop, strict=True))
        places = [
            out[tuple(slice(a, b) for a, b in zip(one.box.start, one.box.stop, strict=True))]
            for out, one in zip(outs, outputs(form, "w", DType.BF16, shape, mine), strict=True)
        ]
        given = amax if tag == "nvfp4" else None
        if not all(place.numel() for place in places):
            places = places[:2]
        fuse(form, [KernelJob(source=scratch[at], outputs=tuple(places), amax=given)]).run()
    for got, part in zip(outs, whole, strict=True):
        assert torch.equal(got.view(torch.uint8), part.view(torch.uint8))


def test_mxfp8_is_bit_identical_to_compressed_tensors() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import MXFP8
    from compressed_tensors.quantization.utils import calculate_qparams

    x = torch.from_numpy(sample()).bfloat16()
    x[8, :4] = torch.tensor([1.75, 1.7421875, 0.5, -1.0])
    x[9, :32] = torch.tensor([1.7421875, *[0.3] * 31])
    groups = x.unflatten(-1, (-1, 32))
    scheme = QuantizationScheme(targets=["Linear"], **MXFP8)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    compressor = BaseCompressor.get_value_from_registry("mxfp8-quantized")
    theirs = compressor.compress({"weight": x, "weight_scale": scale.float()}, scheme)
    codes, scales = quantise(format_of("mxfp8"), x)
    assert torch.equal(scales, theirs["weight_scale"])
    assert torch.equal(codes.view(torch.uint8), theirs["weight"].view(torch.uint8))


def test_mxfp8_exponents_round_up_instead_of_clamping() -> None:
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    error = {
        tag: (dequantise(format_of(tag), quantise(format_of(tag), x), DType.F32) - x).pow(2).mean().sqrt().item()
        for tag in ("mxfp8", "mxfp8-floor")
    }
    assert error["mxfp8"] < 0.95 * error["mxfp8-floor"], error


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_casts_match_torch_for_representable_values(dtype: str) -> None:
    x = torch.from_numpy(sample())
    (cast,) = quantise(format_of(f"cast:{dtype}"), x)
    assert torch.equal(cast, x.to(torch_dtype(DType(dtype))))
    (code,) = quantise(format_of("cast:F8_E4M3"), torch.tensor([500.0, -1e9, math.inf, math.nan, -0.0, 2.0**-9]))
    assert code.view(torch.uint8).tolist() == [0x7E, 0xFE, 0x7F, 0x7F, 0x80, 1]
    (code,) = quantise(format_of("cast:F8_E5M2"), torch.tensor([6e4, -1e9, math.inf, -math.inf, math.nan]))
    assert code.view(torch.uint8).tolist() == [0x7B, 0xFB, 0x7C, 0xFC, 0x7F]


def test_mismatched_jobs_are_refused() -> None:
    form, x = format_of("fp8-block128"), torch.zeros(130, 64)
    codes, scales = torch.zeros(130, 64).to(torch.float8_e4m3fn), torch.zeros(2, 1)
    fuse(form, [KernelJob(source=x, outputs=(codes, scales))]).run()
    for outs in ((codes,), (codes, scales[:1]), (codes.float(), scales), (codes.t().contiguous().t(), scales)):
        with pytest.raises(PlanError, match="job 0"):
            fuse(form, [KernelJob(source=x, outputs=outs)])
    with pytest.raises(PlanError, match="do not match the tensors of"):
        dequantise(form, (codes, scales[:1]), DType.BF16)
    with pytest.raises(PlanError, match="cannot restore values as I32"):
        dequantise(form, (codes, scales), DType.I32)
