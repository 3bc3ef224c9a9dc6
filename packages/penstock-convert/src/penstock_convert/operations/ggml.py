"""Quantises and dequantises ggml's types, with the same bits as `gguf.quants` on every device.

This module reads and writes Q8_0, and the `gguf` package reads the other types. A Q8_0 block stores 32 values in 34
bytes: a scale in F16, which is the largest magnitude divided by 127, and 32 signed bytes.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from penstock.entry_points import install_hint
from penstock.errors import MissingExtra, OperationFailed

Q8_0_ELEMENTS, Q8_0_BYTES = 32, 34


def quantise_q8_0(values: torch.Tensor) -> torch.Tensor:
    """Return the blocks of float values `[..., n]` as uint8 `[..., n / 32 * 34]`. n must be a multiple of 32.

    Raises:
        OperationFailed: a value is infinite or NaN, or too large for a scale in F16.
    """
    blocks = values.float().reshape(-1, Q8_0_ELEMENTS)
    amax = blocks.abs().amax(dim=1, keepdim=True)
    # Divide by a tensor, because CUDA would multiply by the inverse of a Python number, which yields different bits.
    scale = amax / torch.full((), 127.0, device=amax.device)
    half = scale.half()
    if not bool(torch.isfinite(half).all()):
        raise OperationFailed(
            "Q8_0 cannot hold a value that is infinite, NaN or above 8.3 million",
            hint="store the tensor as F32, or repair the source",
        )
    inverse = 1 / scale
    # If the inverse overflows, the scale in F16 is zero, so the codes do not matter.
    inverse = torch.where(torch.isfinite(inverse), inverse, torch.zeros_like(inverse))
    codes = _rounded(blocks * inverse).to(torch.int8)
    raw = torch.cat((half.view(torch.uint8), codes.view(torch.uint8)), dim=1)
    return raw.reshape(*values.shape[:-1], values.shape[-1] // Q8_0_ELEMENTS * Q8_0_BYTES)


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """Round to integers with halves away from zero, unlike torch, which rounds halves to even."""
    magnitude = values.abs()
    floor = magnitude.floor()
    return values.sign() * (floor + (2 * (magnitude - floor)).floor())


def dequantise(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the F32 values `[..., n]` of contiguous uint8 blocks `[..., bytes of a row]`.

    Raises:
        MissingExtra: the type is not Q8_0 and the `gguf` package is not installed.
        OperationFailed: the `gguf` package cannot read this type.
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
            message, hint="dequantise the file with llama.cpp: llama-quantize --allow-requantize"
        ) from error
    return torch.from_numpy(values).to(blocks.device)


def _package() -> Any:
    # Import the package on first use, because Q8_0 does not require it.
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "values of K-quants and IQ types need the gguf package", hint=install_hint("gguf")
        ) from error
