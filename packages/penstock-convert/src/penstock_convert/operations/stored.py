"""Finds the tensors that a checkpoint stores as codes and scales, whichever tool wrote the checkpoint.

For example, the codes `q_proj.weight` (F8_E4M3 [256, 512]) and the scales `q_proj.weight_scale_inv` (BF16 [2, 4]) store
a weight in blocks of 128 x 128. `q_proj.input_scale` is a companion, which is dropped with the codes. The shape of the
scales determines the shape of the blocks. If several shapes fit, the configuration decides.

Every tensor of a quantised checkpoint is classified as codes, as a scale of codes, as a tensor that does not affect
weights, or as plain. Any other tensor counts as unread and is never used as weights.

The layouts are taken from transformers 5.23 (`Fp8Dequantize`, `FineGrainedFP8HfQuantizer`, `fbgemm_fp8`,
`convert_moe_packed_tensors` and the renaming of Mistral's `qscale_weight`), compressed-tensors 0.20 (`compressors`),
ComfyUI (`scaled_fp8` files and `comfy_quant`), ModelOpt 0.47 (`NVFP4QTensor`), and torchao 0.18 (`Float8Tensor` and
`flatten_tensor_state_dict`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.transform.formats import WHOLE, Format, fault, outputs
from penstock.types import Box, DType

Tensor = tuple[str, DType, tuple[int, ...]]
"""Name, dtype and shape."""
_Specs = Mapping[str, tuple[DType, tuple[int, ...]]]
"""Dtype and shape by name."""
Block = tuple[int, int]
"""Numbers of rows and columns in a block. WHOLE means the whole dim."""

FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
FP8 = frozenset({DType.F8_E4M3, DType.F8_E5M2})
"""Dtypes of FP8 codes, which can be read."""
_EXPONENTS = frozenset({DType.F8_E8M0, DType.U8})
_OTHER_FLOATS = frozenset({DType.F4, DType.F6_E2M3, DType.F6_E3M2, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ})
_INTEGERS = frozenset({DType.I8, DType.U8, DType.I16, DType.U16, DType.I32, DType.U32})
"""Dtypes of codes in formats that cannot be read, and in INT8 and FP4, which can. I64 and BOOL are never codes."""
CODES = FP8 | _OTHER_FLOATS | _INTEGERS
"""Dtypes that codes may have."""

METHODS = frozenset({"fp8", "compressed-tensors", "fbgemm_fp8", "modelopt", "mxfp4", "torchao"})
"""Values of `quant_method` whose layouts are known."""
_MODELOPT = frozenset({"FP8", "NVFP4"})
"""Values of ModelOpt's `quant_algo` whose layouts are known. Other algorithms also scale the inputs, or store different
codes."""

_BLOCKS: tuple[Block, ...] = ((1, WHOLE), (WHOLE, WHOLE), (128, 128), (1, 128), (1, 32))
"""Blocks that are tried in this order if the configuration declares none. Two blocks that fit the same scales are
equivalent."""

_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of a configuration that say how weights are quantised. MLX, whose formats cannot be read, and Mistral's
`params.json` use the last key."""
CONFIG_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_map.json")
"""Files that only say how a checkpoint is quantised, written by ModelOpt, AutoGPTQ, AutoAWQ and quanto."""

QUANTIZATION_METADATA = "_quantization_metadata"
"""Key of a file's metadata under which ComfyUI says how each layer is quantised."""
_TORCHAO_NAMES = "tensor_names"
"""Key of a file's metadata under which torchao lists its tensors."""
_TORCHAO_ENTRY = '{"_type"'
"""Beginning of torchao's description of a tensor, which the metadata has under the tensor's name."""
_MARKERS = re.compile(r"(^|\.)(comfy_quant|scaled_fp8)$")
"""Names of ComfyUI's tensors that mark a file or a layer as quantised. They contain no weights."""
_ACTIVATIONS = re.compile(
    r"(^|\.)((input|output|activation|act|q|k|v|kv|prob)_(global_)?scale(_inv|_ub)?|qscale_act|scale_(input|output)"
    r"|(input|output)_zero_point)$"
    r"|_(input|activation)_(global_)?scale(_inv|_ub)?$"
)
"""Names of scales that do not apply to weights. They are useless without quantised layers."""
_PARTS = re.compile(
    r"(?P<base>.+?)(_scale|_scale_inv|_scale_2|_global_scale|_zero_point|_packed|_g_idx|\.scales|\.g_idx|_scales|_blocks)$"
)
"""Names that are parts of a quantised tensor only if the tensor to which they may belong exists."""
_PART_NAMES = re.compile(
    r"(^|[._])weight_(scales?|scale_inv|scale_2|scalar|global_scale|zero_point|packed|shape|g_idx|format|qdata)$"
    r"|(^|\.)(qweight|qzeros|qscale_weight|scale_weight|wscales|SCB|W_q)$|_packed$|_scale_inv$"
    r"|\.weight\.(absmax|nested_absmax|quant_map|nested_quant_map|quant_state\..*|_data|_scale|_shift)$"
)
"""Names that are always parts of a quantised tensor, from compressed-tensors, GPTQ, AWQ, Mistral, ComfyUI,
bitsandbytes, HQQ, torchao and quanto."""
_SCALE_NAMES = re.compile(
    r"(^|[._])(w?t?scales?|scale_\w+|zeros?|zero_points?|g_idx|amax|codebooks?|smooth_\w+|biases)(_inv|_2)?$"
)
"""Names that are parts of a quantised tensor if their module has codes."""
_WORDS = re.compile(
    "scale|scalar|zero|quant|packed|g_idx|blocks|shape|format|qdata|qweight|SCB|W_q|absmax|_data|_shift|amax|codebook|smooth|biases"
)
"""Words of which at least one is in every name that the patterns above match."""
_MISFIT = "scales "
"""Beginning of the reasons about the shape of scales."""
_TORCHAO = re.compile(r"(?<![^.])_(\w+)_qdata$")
"""Names of torchao's codes. The parameter `weight` of a module is `_weight_qdata`."""
_NEVER_PARTS = re.compile(r"(^|[._])(logit|layer|residual|skip|hc_\w+)_scale$|(^|\.)scale_shift_table$")
"""Names of model parameters that `_SCALE_NAMES` would match too."""
_NEVER_CODES = re.compile(
    r"(^|[._])(bias|mask|ids?|idxs?|index(es)?|indices|positions?|coords|offsets?|lengths?|seqlens|counts?|steps?|maps?"
    r"|palette|lut|table|vocab|tokens|tid2eid|num_(batches_tracked|updates))$"
)
"""Names of integer tensors that are not codes, even in quantised models: masks, positions, counters, routing tables."""
_WEIGHT = re.compile(r"weight$|_(packed|blocks)$|qdata$")
"""Names of integers that may be codes whatever their shape. Integers with other names are codes only if they have rows
and columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """A tensor that is stored as codes and scales."""

    name: str
    """Name of the tensor whose values the codes and scales store."""
    shape: tuple[int, ...]
    """Shape of the values, in the order of the codes."""
    codes: str
    scales: str
    block: Block
    """Rows and columns of values that share a scale, in the last two dims."""
    whole: str = ""
    """Name of the number by which all scales are divided. Empty means that there is no such number."""
    multiplies: bool = False
    """Whether all scales are multiplied by that number instead, as in ModelOpt."""
    packed: bool = False
    """Whether the codes are E2M1, two per byte."""
    transposed: bool = False
    """Whether the codes and `shape` are transposed. gpt-oss stores [experts, in, out] as [experts, out, in]."""

    def shape_of_scales(self) -> tuple[int, ...]:
        """Return the shape of the scales, with as many dims as the values, or all 1 for a single scale."""
        if len(self.shape) < 2:
            return (1,) * len(self.shape)
        steps = (max(1, n) if step == WHOLE else step for n, step in zip(self.shape[-2:], self.block, strict=True))
        counts = tuple(-(-n // step) for n, step in zip(self.shape[-2:], steps, strict=True))
        return (*self.shape[:-2], *counts)

    @property
    def shape_of_result(self) -> tuple[int, ...]:
        """Return the shape of the restored tensor."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the stored tensors, codes first."""
        return (self.codes, self.scales, *([self.whole] if self.whole else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """Quantised tensors of a checkpoint, grouped by whether and how they can be read."""

    stored: Mapping[str, StoredFormat]
    """Tensors that can be read, by the name of the tensor whose values they store."""
    companions: frozenset[str]
    """Tensors that have no meaning without the codes, including scales."""
    unread: Mapping[str, str]
    """Tensors that are parts of a quantised tensor with an unknown layout, with the reason."""
    foreign: frozenset[str]
    """Unread tensors that are the codes and scales of one module. They are recognised, but their values
    cannot be read."""
    plain: frozenset[str]
    """FP8 tensors of a checkpoint without scales, whose codes are their values."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of codes, and then of the scales and other tensors that belong to codes."""
        codes = (layout.codes for layout in self.stored.values())
        return (*codes, *self.unread, *sorted(self.plain), *sorted(self.companions))

    @property
    def any(self) -> str:
        """Return the name of a quantised tensor, or an empty string if no tensor is quantised."""
        return next(iter(self.names), "")


def described_layers(files: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return torchao's descriptions of tensors from the metadata of all files."""
    if not any(_TORCHAO_NAMES in metadata for metadata in files):
        return {}
    entries = {key: value for metadata in files for key, value in metadata.items() if value.startswith(_TORCHAO_ENTRY)}
    return {**entries, _TORCHAO_NAMES: json.dumps(list(entries))}


def find(tensors: Iterable[Tensor], config: Mapping[str, Any] | None = None) -> Quantised:
    """Find the quantised tensors of a checkpoint.

    Args:
        tensors: all tensors of the checkpoint.
        config: the checkpoint's `quantization_config`, from `declared`. None if it is missing or unknown.
    """
    specs = {name: (dtype, shape) for name, dtype, shape in tensors}
    blocks = tuple(_declared_blocks(config or {}))
    stored: dict[str, StoredFormat] = {}
    unread: dict[str, str] = {}
    used: set[str] = set()
    # Check packed tensors first, because their scales may be E4M3 and look like codes.
    for name in sorted(specs, key=lambda name: not name.endswith("_packed")):
        if name in used or specs[name][0] not in CODES or _MARKERS.search(name):
            continue
        layout = _layout(name, specs, blocks, config)
        # A result cannot contain two tensors with the same name.
        if isinstance(layout, StoredFormat) and layout.name != name and (layout.name in specs or layout.name in stored):
            layout = f"a different tensor is also named {layout.name}"
        if isinstance(layout, StoredFormat):
            stored[layout.name] = layout
            used.update(layout.parts)
        elif layout:
            unread[name] = layout
    companions = {part for tensor in stored.values() for part in tensor.parts[1:]}
    unread |= _unexplained(specs, used, unread, is_declared=config is not None)
    # A marker or a scale of activations also shows that the checkpoint is quantised. In that case, FP8 without scales
    # indicates corruption.
    is_quantised = bool(stored or unread or config is not None)
    unscaled = frozenset(name for name in specs if name not in used and name not in unread and specs[name][0] in FP8)
    candidates = [name for name in specs if _WORDS.search(name)]
    has_evidence = any(_MARKERS.search(name) or (unscaled and _ACTIVATIONS.search(name)) for name in candidates)
    if is_quantised or has_evidence:
        companions |= {name for name in candidates if _MARKERS.search(name) or _ACTIVATIONS.search(name)} - used
        for name, (dtype, shape) in specs.items():
            if name in used or name in unread or name in companions:
                continue
            if dtype in FP8 | _OTHER_FLOATS:
                unread[name] = "it has no scales"
            elif dtype in {DType.I8, DType.U8} and len(shape) > 1 and not _NEVER_CODES.search(name):
                unread[name] = f"it is {dtype} in a quantised checkpoint and has no scales"
    return Quantised(
        stored=stored,
        companions=frozenset(companions - unread.keys()),
        unread=unread,
        foreign=_of_known_modules(specs, unread),
        plain=frozenset() if is_quantised or has_evidence else unscaled,
    )


def _unexplained(specs: _Specs, used: Collection[str], unread: Collection[str], *, is_declared: bool) -> dict[str, str]:
    """Return unused tensors that belong to codes according to their names or modules, with the reasons."""
    modules = {_module(name) for name, (dtype, shape) in specs.items() if _may_be_codes(name, dtype, shape)}
    is_quantised = bool(used or unread or is_declared)
    # Norms and routers have a parameter `scale` too. Treat `scale` as a scale of codes only if any codes use this name.
    is_scale_used = any(name.endswith(".scale") for name in used)
    found = {}
    for name, (dtype, _) in specs.items():
        # Skip most tensors quickly, because models have up to a hundred thousand tensors.
        if name in used or name in unread or not (_WORDS.search(name) or dtype is DType.F8_E8M0):
            continue
        if _MARKERS.search(name) or _ACTIVATIONS.search(name):
            continue
        # A module may hold a float `weight` and a parameter `scale` without any quantisation.
        is_scale_name = bool(_SCALE_NAMES.search(name)) and not _NEVER_PARTS.search(name)
        belongs = _module(name) in modules and (is_scale_name or dtype is DType.F8_E8M0)
        is_next_to_weight = is_scale_used and name.endswith(".scale") and f"{name.removesuffix('scale')}weight" in specs
        is_exponents = dtype is DType.F8_E8M0 and (is_scale_name or is_quantised)
        if is_exponents or belongs or is_next_to_weight or _is_part(name, specs):
            found[name] = "its codes are missing or have an unknown layout"
    # The codes of these modules count as unread too, because codes without scales would be treated as numbers.
    without = set(map(_module, found))
    for name, (dtype, shape) in specs.items():
        is_free = name not in used and name not in unread and name not in found
        if is_free and dtype in _INTEGERS and _module(name) in without and _may_be_codes(name, dtype, shape):
            found[name] = f"{dtype} codes of an unknown format"
    return found


def _of_known_modules(specs: _Specs, unread: Mapping[str, str]) -> frozenset[str]:
    """Return the unread tensors of modules that have integer codes with their scales, for example from GPTQ."""
    codes = {
        _module(name)
        for name, why in unread.items()
        if _may_be_codes(name, *specs[name]) and specs[name][0] in _INTEGERS and not why.startswith(_MISFIT)
    }
    parts = {
        _module(name) for name in unread if _SCALE_NAMES.search(name) or ".weight." in name or name.endswith(".SCB")
    }
    return frozenset(name for name in unread if _module(name) in codes & parts)


def _module(name: str) -> str:
    """Return the module of a tensor, or of the weight to which the tensor belongs (`q` for `q.weight.absmax`)."""
    return name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0]


def _may_be_codes(name: str, dtype: DType, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor could be codes according to its dtype and name."""
    return (
        dtype in CODES
        and len(shape) > 0
        and (len(shape) > 1 or dtype not in _INTEGERS or _WEIGHT.search(name) is not None)
        and not (_NEVER_CODES.search(name) or _MARKERS.search(name) or _SCALE_NAMES.search(name))
    )


def is_in(form: Format, layout: StoredFormat, dtypes: Mapping[str, DType]) -> bool:
    """Return whether a tensor is stored exactly as in `form`. The checkpoint's configuration must name this format.

    Args:
        dtypes: dtypes of the tensors by name.
    """
    if fault(form, DType.BF16, layout.shape) is not None or form.scaling == "none":
        return False
    want = outputs(form, layout.name, DType.BF16, layout.shape, Box.full(layout.shape))
    return [(part.name, part.dtype) for part in want] == [(name, dtypes[name]) for name in layout.parts] and (
        want[1].shape == layout.shape_of_scales()
    )


def declared(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of a `config.json`, or None.

    If nested configurations contain different entries, return an entry with an unknown `quant_method`.
    """
    found = list(_declarations(config))
    if any(other != found[0] for other in found[1:]):
        return {"quant_method": f"of {len(found)} different quantisations", "parts": found}
    return found[0] if found else None


def _declarations(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the entries that declare how weights are quantised, including entries in nested configurations."""
    keys = [key for key, value in config.items() if _is_declaration(key, value)]
    # Use only one key, because MLX writes the same entry under two keys.
    if keys:
        yield config[min(keys, key=_CONFIG_KEYS.index)]
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in keys:
            yield from _declarations(value)


def _is_declaration(key: str, value: object) -> bool:
    """Return whether an entry of a configuration declares how weights are quantised."""
    if key not in _CONFIG_KEYS or not isinstance(value, Mapping):
        return False
    return key != _CONFIG_KEYS[-1] or not value.keys().isdisjoint(
        ("bits", "group_size", "quant_method", "qformat_weight")
    )


def declared_by_writer(name: str, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantisation that a file other than `config.json` declares, as a `quantization_config`.

    Args:
        name: a file name in CONFIG_FILES, or `params.json` from Mistral.
    """
    if name == "hf_quant_config.json" and isinstance(config.get("quantization"), Mapping):
        return {"quant_method": "modelopt", **config["quantization"]}
    if name != "params.json":
        return {"quant_method": f"of {name}"}
    found = declared(config)
    if found is None or "quant_method" in found:
        return found
    method = "fp8" if found.get("qformat_weight") == "fp8_e4m3" else f"of {name}"
    return {**found, "quant_method": method}


def without_declared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `config.json` without the entries that `declared` finds."""
    # DeepSeek-V4 has a separate entry for the dtype of its FP4 experts.
    is_declared = any(_is_declaration(key, value) for key, value in config.items())
    return {
        key: without_declared(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not (_is_declaration(key, value) or (is_declared and key == "expert_dtype"))
    }


def unreadable(config: Mapping[str, Any]) -> str:
    """Return the reason why a `quantization_config` is unsupported, or an empty string if it may be supported."""
    # Reject unknown methods, because names and shapes could fit by chance and the values would be wrong.
    method = config.get("quant_method")
    if method not in METHODS:
        return f"its quant_method {method!r} is not one of {', '.join(sorted(METHODS))}"
    if method == "modelopt" and config.get("quant_algo") not in _MODELOPT:
        return f"its quant_algo {config.get('quant_algo')!r} is not one of {', '.join(sorted(_MODELOPT))}"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return f"its weights are sparse ({config['sparsity_config']['format']})"
    if (config.get("transform_config") or {}).get("config_groups"):
        return "its weights were rotated (transform_config)"
    return ""


def _is_part(name: str, specs: _Specs) -> bool:
    """Return whether a tensor belongs to codes according to the names of all tensors."""
    if _PART_NAMES.search(name):
        return not (name.endswith("_packed") and specs[name][0] in FLOATS)
    match = _PARTS.match(name)
    base = match["base"] if match else ""
    if not base:
        return False
    # A module may have a parameter `norm_scale` next to a layer `norm`, whose weight is not codes.
    weight, is_inner = f"{base}.weight", name.startswith(f"{base}.")
    if weight in specs and (is_inner or specs[weight][0] not in FLOATS):
        return True
    others = (base, f"{base}.qweight", f"{base}_blocks" if name.endswith("_scales") else "")
    return any(other in specs for other in others)


def _layout(
    name: str, specs: _Specs, blocks: tuple[Block, ...], config: Mapping[str, Any] | None
) -> StoredFormat | str:
    """Return the layout of codes, the reason why codes cannot be read, or an empty string if there are no scales."""
    if name.endswith("_packed"):
        return _packed(name, specs)
    if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in specs:
        return _packed_blocks(name, specs)
    if specs[name][0] is DType.U8 and f"{name}_scale_2" in specs:
        return _packed(name, specs)
    return _plain(name, specs, blocks, config)


def _plain(name: str, specs: _Specs, blocks: tuple[Block, ...], config: Mapping[str, Any] | None) -> StoredFormat | str:
    """Return the layout of codes that have the weight's own name. See `_layout` for the other results."""
    dtype, shape = specs[name]
    # torchao stores `a.weight` as `a._weight_qdata` and `a._weight_scale`.
    is_torchao = _TORCHAO.search(name) is not None
    base = name.removesuffix("_qdata") if is_torchao else name
    module = name.removesuffix(".weight")
    names = [f"{base}_scale_inv", f"{base}_scale"]
    names += [] if module == name else [f"{module}.{scale}" for scale in ("scale", "scale_weight", "qscale_weight")]
    scales, *others = [candidate for candidate in names if candidate in specs] or [""]
    if not scales:
        return ""
    kind, shape_of_scales = specs[scales]
    # Refuse a second scale or a zero point, because ignoring it would yield wrong weights.
    if others or any(f"{base}_{other}" in specs for other in ("scale_2", "global_scale", "zero_point", "scalar")):
        return "it has scales of an unknown format"
    # Refuse torchao's MXFP8 and INT8, because the tensors do not show the order of their scales. Only the header does.
    if is_torchao and (dtype not in FP8 or kind not in FLOATS):
        return f"{dtype} codes of an unknown format"
    if dtype is DType.I8 and kind is DType.F8_E8M0:
        return _packed_experts(name, scales, specs)
    if dtype not in FP8 and not (dtype is DType.I8 and _declares_int8(config)):
        return f"{dtype} codes of an unknown format"
    if kind is DType.U8 and (config or {}).get("scale_fmt") != "ue8m0":
        # Only MXFP8 stores exponents as U8 without a declaration.
        blocks = ((1, 32),)
    block = _block_of(shape, shape_of_scales, blocks)
    if block is None:
        detail = f"; the configuration declares blocks {[list(size) for size in blocks]}" if blocks else ""
        return f"{_MISFIT}{list(shape_of_scales)} do not fit {list(shape)}{detail}"
    if kind not in FLOATS | _EXPONENTS or (kind is DType.U8 and WHOLE in block):
        return f"its scales are {kind}, which is not supported"
    # ComfyUI's block scales have a different order, and its integers may be rotated. The name and the shape of
    # `comfy_quant` do not show this.
    if f"{module}.comfy_quant" in specs and (dtype not in FP8 or block[1] != WHOLE or kind not in FLOATS):
        return "the order of ComfyUI's blocks (comfy_quant) is unknown"
    own_name = _TORCHAO.sub(r"\1", name)
    return StoredFormat(name=own_name, shape=shape, codes=name, scales=scales, block=block)


def _packed_experts(name: str, scales: str, specs: _Specs) -> StoredFormat | str:
    """Return the layout of DeepSeek-V4's experts (E2M1 in I8, an exponent for 32 values), or why it does not fit."""
    shape = specs[name][1]
    values = (*shape[:-1], shape[-1] * 2) if shape else ()
    if len(values) < 2 or values[-1] % 32 or specs[scales][1] != (*values[:-1], values[-1] // 32):
        return f"{_MISFIT}{list(specs[scales][1])} do not fit blocks of 32 E2M1 values in {list(shape)} bytes"
    return StoredFormat(name=name, shape=values, codes=name, scales=scales, block=(1, 32), packed=True)


def _packed_blocks(name: str, specs: _Specs) -> StoredFormat | str:
    """Return the layout of gpt-oss's experts (blocks of 16 bytes with one exponent), or why it does not fit."""
    base = name.removesuffix("_blocks")
    scales = f"{base}_scales"
    (dtype, shape), (kind, shape_of_scales) = specs[name], specs[scales]
    if dtype is not DType.U8 or len(shape) != 4 or shape[-1] != 16 or f"{base}_zero_point" in specs:
        return f"{dtype} codes of an unknown format"
    if kind not in _EXPONENTS or shape_of_scales != shape[:-1]:
        return f"{_MISFIT}{kind} {list(shape_of_scales)} do not fit blocks {list(shape)}"
    values = (*shape[:2], shape[2] * 32)
    return StoredFormat(name=base, shape=values, codes=name, scales=scales, block=(1, 32), packed=True, transposed=True)


def _packed(name: str, specs: _Specs) -> StoredFormat | str:
    """Return the layout of NVFP4 or MXFP4 with two codes per byte, or the reason why no layout fits.

    Unlike compressed-tensors, ModelOpt keeps the weight's name and stores the inverse of the global scale.
    """
    base = name.removesuffix("_packed")
    dtype, shape = specs[name]
    scales, whole = f"{base}_scale", f"{base}_scale_2" if base == name else f"{base}_global_scale"
    if dtype is not DType.U8 or len(shape) != 2 or scales not in specs or f"{base}_zero_point" in specs:
        return f"{dtype} codes of an unknown format"
    values = (shape[0], shape[1] * 2)
    kind, shape_of_scales = specs[scales]
    cols, scale_dtype = (16, DType.F8_E4M3) if whole in specs else (32, DType.U8)
    if kind is not scale_dtype or shape_of_scales != (values[0], values[1] // cols) or values[1] % cols:
        return f"{_MISFIT}{kind} {list(shape_of_scales)} do not fit blocks of {cols} E2M1 values"
    if whole in specs and (specs[whole][0] is not DType.F32 or math.prod(specs[whole][1]) != 1):
        return f"its global scale is {specs[whole][0]} {list(specs[whole][1])}, not one F32"
    return StoredFormat(
        name=base,
        shape=values,
        codes=name,
        scales=scales,
        block=(1, cols),
        whole=whole if whole in specs else "",
        multiplies=base == name,
        packed=True,
    )


def _block_of(shape: tuple[int, ...], scales: tuple[int, ...], blocks: tuple[Block, ...]) -> Block | None:
    """Return the block shape for scales of this shape, or None if no block shape fits."""
    # A vector has no rows and columns, so only a single scale fits.
    if len(shape) < 2:
        return (WHOLE, WHOLE) if math.prod(scales) == 1 else None

    def fits(block: Block) -> bool:
        steps = (max(1, n) if step == WHOLE else step for n, step in zip(shape[-2:], block, strict=True))
        counts = tuple(-(-n // step) for n, step in zip(shape[-2:], steps, strict=True))
        return scales == (*shape[:-2], *counts)

    # Try declared blocks first, because several block shapes may fit the scales of a small tensor.
    if declared_block := next(filter(fits, blocks), None):
        return declared_block
    if math.prod(scales) == 1 or scales == shape[:-2]:
        return (WHOLE, WHOLE)
    if scales == shape[:-1]:
        return (1, WHOLE)
    return next(filter(fits, _BLOCKS[:2] if blocks else _BLOCKS), None)


def _declared_blocks(config: Mapping[str, Any]) -> Iterator[Block]:
    """Yield the block shapes that a configuration declares for weights, except rows and whole tensors."""
    size = config.get("weight_block_size")
    if isinstance(size, list | tuple) and len(size) == 2:
        yield int(size[0]), int(size[1])
    for weights in _weights(config):
        if weights.get("strategy") == "block" and weights.get("block_structure"):
            rows, cols = weights["block_structure"]
            yield int(rows), int(cols)
        elif weights.get("strategy") in {"group", "tensor_group"} and weights.get("group_size"):
            yield 1, int(weights["group_size"])


def _weights(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries for weights in the config groups of compressed-tensors."""
    groups = config.get("config_groups")
    entries = [
        entry for entry in (groups.values() if isinstance(groups, Mapping) else ()) if isinstance(entry, Mapping)
    ]
    return [entry["weights"] for entry in entries if isinstance(entry.get("weights"), Mapping)]


def _declares_int8(config: Mapping[str, Any] | None) -> bool:
    """Return whether all weights are declared as symmetric INT8, which needs no zero points."""
    weights = _weights(config or {})
    kinds = {(entry.get("type"), entry.get("num_bits"), entry.get("symmetric", True)) for entry in weights}
    return kinds == {("int", 8, True)}
