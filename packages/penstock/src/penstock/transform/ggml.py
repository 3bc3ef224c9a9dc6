"""Values of ggml's quantised types: Q8_0 both ways, the others read by the `gguf` package.

In: values, or the blocks of rows as bytes. Out: the other. The same bits as `gguf.quants`, on every device.
Not here: files of the format (`storage.gguf`), operations (`jobs.operations.gguf`).

    Q8_0: 32 values are 34 bytes: their scale, F16, the largest magnitude divided by 127; then 32 signed bytes
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from penstock.entry_points import install_hint
from penstock.errors import MissingExtra, OperationFailed

Q8_0_ELEMENTS, Q8_0_BYTES = 32, 34


def quantise_q8_0(values: torch.Tensor) -> torch.Tensor:
    """Return the blocks of float values `[..., n]` as uint8 `[..., n / 32 * 34]`; 32 divides n.

    Raises:
        OperationFailed: a value is infinite or no number, or too large for a scale in F16; a block cannot hold it.
    """
    blocks = values.float().reshape(-1, Q8_0_ELEMENTS)
    amax = blocks.abs().amax(dim=1, keepdim=True)
    # A tensor and not a number: CUDA would multiply by its reciprocal, which gives other bits.
    scale = amax / torch.full((), 127.0, device=amax.device)
    half = scale.half()
    if not bool(torch.isfinite(half).all()):
        raise OperationFailed(
            "Q8_0 cannot hold a value that is infinite, no number, or above 8.3 million",
            hint="store this tensor as F32, or repair the source",
        )
    inverse = 1 / scale
    # Zeros, and blocks so small that the inverse overflows: their scale in F16 is zero, whatever their bytes are.
    inverse = torch.where(torch.isfinite(inverse), inverse, torch.zeros_like(inverse))
    codes = _rounded(blocks * inverse).to(torch.int8)
    raw = torch.cat((half.view(torch.uint8), codes.view(torch.uint8)), dim=1)
    return raw.reshape(*values.shape[:-1], values.shape[-1] // Q8_0_ELEMENTS * Q8_0_BYTES)


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """Return values rounded to integers, halves away from zero, as C's roundf. Torch rounds halves to even."""
    magnitude = values.abs()
    floor = magnitude.floor()
    return values.sign() * (floor + (2 * (magnitude - floor)).floor())


def dequantise(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the values, F32 `[..., n]`, of the blocks of rows, uint8 `[..., bytes of a row]`, contiguous.

    Raises:
        MissingExtra: a type other than Q8_0, without the `gguf` package.
        OperationFailed: the package does not read this type.
    """
    if kind != "Q8_0":
        return _by_package(kind, blocks)
    raw = blocks.reshape(-1, Q8_0_BYTES)
    scale = raw[:, :2].contiguous().view(torch.float16).float()
    values = raw[:, 2:].contiguous().view(torch.int8).float() * scale
    return values.reshape(*blocks.shape[:-1], blocks.shape[-1] // Q8_0_BYTES * Q8_0_ELEMENTS)


def _by_package(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    package = _package()
    try:
        values = package.quants.dequantize(blocks.cpu().numpy(), package.GGMLQuantizationType[kind])
    except (NotImplementedError, KeyError) as error:
        message = f"the gguf package does not read values of type {kind}"
        raise OperationFailed(
            message, hint="dequantise it with llama.cpp: llama-quantize --allow-requantize"
        ) from error
    return torch.from_numpy(values).to(blocks.device)


def _package() -> Any:
    # Imported on first use: an extra, which Q8_0 does not need.
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "values of K-quants and IQ types need the gguf package", hint=install_hint("gguf")
        ) from error
