"""Q8_0 and the other types of ggml, bit for bit as the format's own package has them."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.errors import OperationFailed
from penstock.storage.gguf import BLOCK_TYPES
from penstock_convert.operations.ggml import dequantise, quantise_q8_0

Floats = npt.NDArray[np.float32]
TINY, LARGE = np.float32(1e-45), np.float32(65504 * 127)


def theirs(values: Floats) -> bytes:
    # Division by a denormal overflows there, and is meant to.
    with np.errstate(all="ignore"):
        return quants.quantize(values, Type.Q8_0).tobytes()


def ours(values: Floats) -> bytes:
    return quantise_q8_0(torch.from_numpy(values)).numpy().tobytes()


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-7, 1e-3, 1.0, 300.0, 1e6])
@pytest.mark.parametrize("seed", range(3))
def test_quantised_random_values_match_gguf_package(scale: float, seed: int) -> None:
    values = (np.random.default_rng(seed).standard_normal((64, 512)) * scale).astype(np.float32)
    assert ours(values) == theirs(values)


SPECIAL = [0.0, -0.0, TINY, -TINY, np.float32(1.1754944e-38), np.float32(3e-39), 1.0, -1.0, 0.5, 127.0, -127.0, 63.5,
           -63.5, 126.5, 2.5, LARGE, -LARGE]  # fmt: skip


@pytest.mark.parametrize("value", SPECIAL)
def test_quantised_constant_blocks_match_gguf_package(value: float) -> None:
    same, one = np.full((1, 32), value, np.float32), np.zeros((1, 32), np.float32)
    one[0, 7] = value
    for values in (same, one):
        assert ours(values) == theirs(values)


def test_half_integers_are_rounded_away_from_zero() -> None:
    values = np.concatenate([np.arange(-15.5, 15.5), [127.0]]).astype(np.float32).reshape(1, 32)
    assert ours(values) == theirs(values)
    codes = np.frombuffer(ours(values), np.int8)[2:]
    assert codes[:3].tolist() == [-16, -15, -14] and codes[30] == 15


@settings(max_examples=150, deadline=None)
@given(arrays.arrays(np.float32, (2, 64), elements=st.floats(-float(LARGE), float(LARGE), width=32)))
def test_quantised_finite_values_match_gguf_package(values: Floats) -> None:
    assert ours(values) == theirs(values)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 8.4e6, 3.4e38])
def test_unrepresentable_values_are_refused(value: float) -> None:
    values = np.ones((4, 64), np.float32)
    values[2, 40] = value
    with pytest.raises(OperationFailed, match="Q8_0 cannot hold"):
        ours(values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_non_fp32_input_is_quantised_like_fp32(dtype: torch.dtype) -> None:
    values = torch.randn(8, 3, 64).to(dtype)
    assert quantise_q8_0(values).numpy().tobytes() == theirs(values.float().numpy())


@pytest.mark.parametrize("kind", [kind.name for kind in BLOCK_TYPES.values()])
def test_dequantised_values_match_gguf_package(kind: str) -> None:
    elements, nbytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    raw = np.random.default_rng(0).integers(0, 256, (5, 3 * nbytes), np.uint8)
    try:
        with np.errstate(all="ignore"):
            expected = quants.dequantize(raw, Type[kind])
    except NotImplementedError:
        with pytest.raises(OperationFailed, match=f"does not read values of type {kind}"):
            dequantise(kind, torch.from_numpy(raw))
        return
    with np.errstate(all="ignore"):
        values = dequantise(kind, torch.from_numpy(raw)).numpy()
        # Any row alone, and any rows together, are the same bits: tasks are cut by rows.
        alone = np.concatenate([dequantise(kind, torch.from_numpy(raw[row : row + 1])).numpy() for row in range(5)])
    assert values.shape == (5, 3 * elements)
    # Random scales may be no numbers, whose payload no one promises.
    assert np.array_equal(values, expected, equal_nan=True)
    assert np.array_equal(alone, expected, equal_nan=True)
