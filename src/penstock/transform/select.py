"""Which tensors of a model are quantised, and what its config.json then says, so that engines load the result.

In: names, dtypes and shapes; a format; patterns. Out: the names to quantise, why the others are kept, a dict.
Not here: how (`geometry`, `quantize`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import PlanError
from penstock.transform.geometry import Format, fault
from penstock.types import DType

KEEP = (
    "*embed*",
    "*lm_head*",
    "*norm*",
    "*.gate.weight",
    "*router*",
    "*shared_expert_gate*",
    "*.eh_proj.weight",
    "*.weights_proj.weight",
    "*conv*",
    "*visual*",
    "*vision*",
)
"""Patterns of names that are kept as they are. Source: what stays BF16 in the checkpoints of DeepSeek-V3 and V3.2
(embeddings, norms, `mlp.gate`, `eh_proj`, the indexer's `weights_proj`, `lm_head`) and Qwen3-FP8 (`mlp.gate`,
`lm_head`, norms); vision towers and convolutions by the recipes of llm-compressor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What becomes of each tensor."""

    names: tuple[str, ...]
    """Quantised, in the order given."""
    kept: Mapping[str, str]
    """The others, and why."""

    def modules_kept(self) -> tuple[str, ...]:
        """Modules whose weight stays: what engines must be told, since they take any linear layer for quantised."""
        return tuple(sorted(name.removesuffix(".weight") for name in self.kept if name.endswith(".weight")))


def select(
    form: Format,
    tensors: Iterable[tuple[str, DType, tuple[int, ...]]],
    *,
    keep: Sequence[str] = KEEP,
    only: Sequence[str] = ("*.weight",),
) -> Selection:
    """Linear weights: two dims, a name among `only` and not among `keep` (shell patterns, the whole name).

    Raises:
        PlanError: nothing is left to quantise.
    """
    names, kept = [], {}
    for name, dtype, shape in tensors:
        if why := reason(form, name, dtype, shape, keep=keep, only=only):
            kept[name] = why
        else:
            names.append(name)
    if not names:
        raise PlanError(f"no tensor is left to store as {form.tag}", hint="change the patterns")
    return Selection(names=tuple(names), kept=kept)


def reason(
    form: Format,
    name: str,
    dtype: DType,
    shape: tuple[int, ...],
    *,
    keep: Sequence[str] = KEEP,
    only: Sequence[str] = ("*.weight",),
) -> str:
    """Why one tensor is kept as it is; empty: it is quantised. See `select`."""
    if not any(fnmatch.fnmatchcase(name, pattern) for pattern in only):
        return "its name is none of those asked for"
    if pattern := next((pattern for pattern in keep if fnmatch.fnmatchcase(name, pattern)), None):
        return f"its name is like {pattern}"
    if len(shape) != 2:
        return f"{len(shape)} dims, not 2"
    return fault(form, dtype, shape) or ""


def quantization_config(form: Format, selection: Selection) -> dict[str, Any]:
    """What `config.json` says under `quantization_config`.

    Source: DeepSeek-V3.1's config.json and transformers' FineGrainedFP8Config for blocks; compressed-tensors 0.17,
    `QuantizationConfig` and its presets FP8_DYNAMIC, MXFP8 and NVFP4A16 for the others.

    Raises:
        PlanError: a cast, of which engines need not be told.
    """
    kept = list(selection.modules_kept())
    if form.scales_suffix == "_scale_inv" and form.scaling != "none":
        said: dict[str, Any] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": list(form.block),
            "modules_to_not_convert": kept,
        }
        return said | ({"scale_fmt": "ue8m0"} if form.scaling == "pow2" else {})
    number = {"type": "float", "symmetric": True}
    activations: dict[str, Any] | None
    if form.tag == "fp8-channel":
        layout, weights = "float-quantized", number | {"num_bits": 8, "strategy": "channel", "dynamic": False}
        activations = number | {"num_bits": 8, "strategy": "token", "dynamic": True}
    elif form.tag == "mxfp8":
        layout = "mxfp8-quantized"
        group = number | {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
        weights, activations = group | {"dynamic": False}, group | {"dynamic": True}
    elif form.tag == "nvfp4":
        layout, activations = "nvfp4-pack-quantized", None
        weights = number | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": False}
        weights |= {"scale_dtype": "torch.float8_e4m3fn"}
    else:
        raise PlanError(f"{form.tag} has no quantization_config; its dtype is the tensors' own")
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": layout}
        },
        "ignore": kept,
    }
