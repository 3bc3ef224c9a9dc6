"""Detection of the tensors that a checkpoint stores as codes and scales, whichever tool wrote them.

In: names, dtypes and shapes; the checkpoint's `quantization_config`. Out: which tensors are codes, which scales belong
to each, in blocks of which shape; tensors that cannot be read, with the reason.
Not here: values (`quantize`), operations on them (`jobs`).

    q_proj.weight           F8_E4M3 [256, 512]     codes   -->  BF16 [256, 512], blocks of 128 x 128
    q_proj.weight_scale_inv BF16    [2, 4]         scales
    q_proj.input_scale      F32     [1]            companion: of activations, dropped with the codes

The shape of the scales tells the shape of the blocks. The configuration decides where several would fit.

Every tensor of a quantised checkpoint is explained: it is codes, a scale of codes, a tensor without a meaning for
weights (a scale of activations, a marker), or plain. Any other tensor is unread, and never taken for weights.

Sources: transformers 5.23, `Fp8Dequantize` and `FineGrainedFP8HfQuantizer` (also DeepSeek-V4's packed experts);
compressed-tensors 0.20, `compressors`; FBGEMM's `weight_scale` [rows, 1] as transformers 5.23 saves it (`fbgemm_fp8`);
ComfyUI's `scaled_fp8` files (`scale_weight`, value = code * scale) and `comfy_quant`; ModelOpt 0.47, `NVFP4QTensor`;
transformers 5.23, `convert_moe_packed_tensors` (MXFP4 of gpt-oss) and the renaming of Mistral's `qscale_weight`;
torchao 0.18, `Float8Tensor` and `flatten_tensor_state_dict`.
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
"""Rows and columns; WHOLE: all of the dim."""

FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
FP8 = frozenset({DType.F8_E4M3, DType.F8_E5M2})
"""Dtypes of codes that can be read."""
_EXPONENTS = frozenset({DType.F8_E8M0, DType.U8})
_OTHER_FLOATS = frozenset({DType.F4, DType.F6_E2M3, DType.F6_E3M2, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ})
_INTEGERS = frozenset({DType.I8, DType.U8, DType.I16, DType.U16, DType.I32, DType.U32})
"""Dtypes of codes in formats that are not read, and in INT8 and FP4 that are. I64 and BOOL are never codes."""
CODES = FP8 | _OTHER_FLOATS | _INTEGERS
"""Dtypes that codes may have."""

METHODS = frozenset({"fp8", "compressed-tensors", "fbgemm_fp8", "modelopt", "mxfp4", "torchao"})
"""Values of `quant_method` whose layouts are known."""
_MODELOPT = frozenset({"FP8", "NVFP4"})
"""Values of ModelOpt's `quant_algo` whose layouts are known. Others scale the inputs too, or store other codes."""

_BLOCKS: tuple[Block, ...] = ((1, WHOLE), (WHOLE, WHOLE), (128, 128), (1, 128), (1, 32))
"""Blocks tried in this order where the configuration declares none. Two that fit the same scales mean the same."""

_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of a configuration that say how weights are quantised. The last is that of MLX, whose formats are not read, and
of Mistral's `params.json`."""
CONFIG_FILES = (
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_map.json",
)
"""Files that only say how a checkpoint is quantised, as ModelOpt, AutoGPTQ, AutoAWQ and quanto write them."""

QUANTIZATION_METADATA = "_quantization_metadata"
"""Key of a file's metadata in which ComfyUI says how each layer is quantised."""
_TORCHAO_NAMES = "tensor_names"
"""Key of a file's metadata in which torchao lists its tensors."""
_TORCHAO_ENTRY = '{"_type"'
"""Beginning of torchao's description of a tensor, which is in the metadata under the tensor's name."""
_MARKERS = re.compile(r"(^|\.)(comfy_quant|scaled_fp8)$")
"""Names of ComfyUI's tensors that say that a file or a layer is quantised. They hold no weights."""
_ACTIVATIONS = re.compile(
    r"(^|\.)((input|output|activation|act|q|k|v|kv|prob)_(global_)?scale(_inv|_ub)?|qscale_act|scale_(input|output)"
    r"|(input|output)_zero_point)$"
    r"|_(input|activation)_(global_)?scale(_inv|_ub)?$"
)
"""Names of scales that are not of weights: without quantised layers nothing needs them."""
_PARTS = re.compile(
    r"(?P<base>.+?)(_scale|_scale_inv|_scale_2|_global_scale|_zero_point|_packed|_g_idx|\.scales|\.g_idx|_scales|_blocks)$"
)
"""Names of parts, where there is a tensor that they may be parts of."""
_NOTHING_ELSE = re.compile(
    r"(^|[._])weight_(scales?|scale_inv|scale_2|scalar|global_scale|zero_point|packed|shape|g_idx|format|qdata)$"
    r"|(^|\.)(qweight|qzeros|qscale_weight|scale_weight|wscales|SCB|W_q)$|_packed$|_scale_inv$"
    r"|\.weight\.(absmax|nested_absmax|quant_map|nested_quant_map|quant_state\..*|_data|_scale|_shift)$"
)
"""Names of parts only: of compressed-tensors, GPTQ, AWQ, Mistral, ComfyUI, bitsandbytes, HQQ, torchao, quanto."""
_SPEAKS = re.compile(
    r"(^|[._])(w?t?scales?|scale_\w+|zeros?|zero_points?|g_idx|amax|codebooks?|smooth_\w+|biases)(_inv|_2)?$"
)
"""Names that are parts of a quantised tensor where their own module has codes."""
_WORDS = re.compile(
    "scale|scalar|zero|quant|packed|g_idx|blocks|shape|format|qdata|qweight|SCB|W_q|absmax|_data|_shift|amax|codebook|smooth|biases"
)
"""Words of which every name has one that a pattern above matches."""
_MISFIT = "scales "
"""Beginning of the reasons that are about the shape of scales."""
_TORCHAO = re.compile(r"(?<![^.])_(\w+)_qdata$")
"""Names of torchao's codes: the parameter `weight` of a module is `_weight_qdata`."""
_NEVER_PARTS = re.compile(r"(^|[._])(logit|layer|residual|skip|hc_\w+)_scale$|(^|\.)scale_shift_table$")
"""Names of parameters of models that `_SPEAKS` would match too."""
_NEVER_CODES = re.compile(
    r"(^|[._])(bias|mask|ids?|idxs?|index(es)?|indices|positions?|coords|offsets?|lengths?|seqlens|counts?|steps?|maps?"
    r"|palette|lut|table|vocab|tokens|tid2eid|num_(batches_tracked|updates))$"
)
"""Names of integers that are no codes, in quantised models too: masks, positions, counters, tables of a router."""
_WEIGHT = re.compile(r"weight$|_(packed|blocks)$|qdata$")
"""Names of integers that may be codes whatever their shape. Others are codes only if they have rows and columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """A tensor that is stored as codes and scales."""

    name: str
    """Name of the tensor that they stand for."""
    shape: tuple[int, ...]
    """Shape of its values, in the order of the codes."""
    codes: str
    scales: str
    block: Block
    """Rows and columns of values that share a scale, in the last two dims."""
    whole: str = ""
    """Name of the one number by which all scales are divided; empty: there is none."""
    multiplies: bool = False
    """All scales are multiplied by the number of `whole`, as ModelOpt has it, and not divided by it."""
    packed: bool = False
    """Codes are E2M1, two a byte."""
    transposed: bool = False
    """Codes and `shape` have rows and columns exchanged: gpt-oss stores [experts, out, in] of [experts, in, out]."""

    def shape_of_scales(self) -> tuple[int, ...]:
        """Return the scales' shape with a dim for each of the values'; all ones where a single scale is for all."""
        if len(self.shape) < 2:
            return (1,) * len(self.shape)
        steps = (max(1, n) if step == WHOLE else step for n, step in zip(self.shape[-2:], self.block, strict=True))
        counts = tuple(-(-n // step) for n, step in zip(self.shape[-2:], steps, strict=True))
        return (*self.shape[:-2], *counts)

    @property
    def shape_of_result(self) -> tuple[int, ...]:
        """Return the shape of the tensor that is restored."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of its tensors, codes first."""
        return (self.codes, self.scales, *([self.whole] if self.whole else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """The quantised tensors of a checkpoint, by how they can be read."""

    stored: Mapping[str, StoredFormat]
    """Tensors that can be read, by the name of what they stand for."""
    companions: frozenset[str]
    """Tensors that mean nothing without the codes, scales among them."""
    unread: Mapping[str, str]
    """Tensors that are parts of a quantised one and fit no known layout, with the reason."""
    foreign: frozenset[str]
    """Tensors among the unread ones that are the codes and scales of one module: what they are is known, and their
    values are not."""
    plain: frozenset[str]
    """Tensors in FP8 of a checkpoint that has no scales: their codes are their values."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the tensors that are not stored in the dtype they are computed with, codes first, and their parts."""
        codes = (layout.codes for layout in self.stored.values())
        return (*codes, *self.unread, *sorted(self.plain), *sorted(self.companions))

    @property
    def any(self) -> str:
        """Return the name of some tensor that is not stored in the dtype it is computed with; empty: there is none."""
        return next(iter(self.names), "")


def described_layers(files: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return what torchao says of tensors in the metadata of files, for all files together."""
    if not any(_TORCHAO_NAMES in metadata for metadata in files):
        return {}
    entries = {key: value for metadata in files for key, value in metadata.items() if value.startswith(_TORCHAO_ENTRY)}
    return {**entries, _TORCHAO_NAMES: json.dumps(list(entries))}


def find(tensors: Iterable[Tensor], config: Mapping[str, Any] | None = None) -> Quantised:
    """Find the quantised tensors of a checkpoint.

    Args:
        tensors: all of the checkpoint.
        config: its `quantization_config`, as `declared` finds it; None: there is none, or it is not known.
    """
    specs = {name: (dtype, shape) for name, dtype, shape in tensors}
    blocks = tuple(_declared_blocks(config or {}))
    stored: dict[str, StoredFormat] = {}
    unread: dict[str, str] = {}
    used: set[str] = set()
    # Packed tensors first: their scales may be E4M3, and would be taken for codes.
    for name in sorted(specs, key=lambda name: not name.endswith("_packed")):
        if name in used or specs[name][0] not in CODES or _MARKERS.search(name):
            continue
        layout = _layout(name, specs, blocks, config)
        # Both would be written under one name.
        if isinstance(layout, StoredFormat) and layout.name != name and (layout.name in specs or layout.name in stored):
            layout = f"there is another tensor {layout.name}"
        if isinstance(layout, StoredFormat):
            stored[layout.name] = layout
            used.update(layout.parts)
        elif layout:
            unread[name] = layout
    companions = {part for tensor in stored.values() for part in tensor.parts[1:]}
    unread |= _unexplained(specs, used, unread, is_declared=config is not None)
    # A marker or a scale of activations also says that the checkpoint is quantised. Then FP8 without scales is damage.
    is_quantised = bool(stored or unread or config is not None)
    bare = frozenset(name for name in specs if name not in used and name not in unread and specs[name][0] in FP8)
    spoken = [name for name in specs if _WORDS.search(name)]
    says_more = any(_MARKERS.search(name) or (bare and _ACTIVATIONS.search(name)) for name in spoken)
    if is_quantised or says_more:
        companions |= {name for name in spoken if _MARKERS.search(name) or _ACTIVATIONS.search(name)} - used
        for name, (dtype, shape) in specs.items():
            if name in used or name in unread or name in companions:
                continue
            if dtype in FP8 | _OTHER_FLOATS:
                unread[name] = "it has no scales"
            elif dtype in {DType.I8, DType.U8} and len(shape) > 1 and not _NEVER_CODES.search(name):
                unread[name] = f"{dtype} in a quantised checkpoint, without scales"
    return Quantised(
        stored=stored,
        companions=frozenset(companions - unread.keys()),
        unread=unread,
        foreign=_of_known_modules(specs, unread),
        plain=frozenset() if is_quantised or says_more else bare,
    )


def _unexplained(specs: _Specs, used: Collection[str], unread: Collection[str], *, is_declared: bool) -> dict[str, str]:
    """Return the tensors that belong to codes by their names or their module, and are not used, with the reason."""
    modules = {_module(name) for name, (dtype, shape) in specs.items() if _may_be_codes(name, dtype, shape)}
    is_quantised = bool(used or unread or is_declared)
    # Norms and routers have a parameter `scale` too. It is a scale of codes only where the writer calls these so.
    is_scale_used = any(name.endswith(".scale") for name in used)
    found = {}
    for name, (dtype, _) in specs.items():
        # The names of nearly all tensors have none of these words, and models have a hundred thousand tensors.
        if name in used or name in unread or not (_WORDS.search(name) or dtype is DType.F8_E8M0):
            continue
        if _MARKERS.search(name) or _ACTIVATIONS.search(name):
            continue
        # Two modules may hold a float `weight` and a parameter `scale` without any quantisation.
        speaks = bool(_SPEAKS.search(name)) and not _NEVER_PARTS.search(name)
        belongs = _module(name) in modules and (speaks or dtype is DType.F8_E8M0)
        beside = is_scale_used and name.endswith(".scale") and f"{name.removesuffix('scale')}weight" in specs
        is_exponents = dtype is DType.F8_E8M0 and (speaks or is_quantised)
        if is_exponents or belongs or beside or _is_part(name, specs):
            found[name] = "the codes that it belongs to are not there, or in no known layout"
    # The codes of such a module are unread too: they would be left as numbers without their scales.
    without = set(map(_module, found))
    for name, (dtype, shape) in specs.items():
        is_free = name not in used and name not in unread and name not in found
        if is_free and dtype in _INTEGERS and _module(name) in without and _may_be_codes(name, dtype, shape):
            found[name] = f"{dtype} codes of a format that is not known"
    return found


def _of_known_modules(specs: _Specs, unread: Mapping[str, str]) -> frozenset[str]:
    """Return the unread tensors whose module has both codes that are integers and their parts: GPTQ's, for example."""
    codes = {
        _module(name)
        for name, why in unread.items()
        if _may_be_codes(name, *specs[name]) and specs[name][0] in _INTEGERS and not why.startswith(_MISFIT)
    }
    parts = {_module(name) for name in unread if _SPEAKS.search(name) or ".weight." in name or name.endswith(".SCB")}
    return frozenset(name for name in unread if _module(name) in codes & parts)


def _module(name: str) -> str:
    """Return the module that a tensor is in; of a part of a weight (`q.weight.absmax`) the weight's."""
    return name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0]


def _may_be_codes(name: str, dtype: DType, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor could be codes, going by its dtype and name."""
    return (
        dtype in CODES
        and len(shape) > 0
        and (len(shape) > 1 or dtype not in _INTEGERS or _WEIGHT.search(name) is not None)
        and not (_NEVER_CODES.search(name) or _MARKERS.search(name) or _SPEAKS.search(name))
    )


def is_in(form: Format, layout: StoredFormat, dtypes: Mapping[str, DType]) -> bool:
    """Return whether a tensor is stored as `form` stores it; the checkpoint's configuration must name that format.

    Args:
        dtypes: of the tensors by name.
    """
    if fault(form, DType.BF16, layout.shape) is not None or form.scaling == "none":
        return False
    want = outputs(form, layout.name, DType.BF16, layout.shape, Box.full(layout.shape))
    return [(part.name, part.dtype) for part in want] == [(name, dtypes[name]) for name in layout.parts] and (
        want[1].shape == layout.shape_of_scales()
    )


def declared(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of a `config.json`; None: it has none.

    Models of several parts keep one in the configuration of each part. If these differ, the result has no
    `quant_method` that can be read.
    """
    found = list(_declarations(config))
    if any(other != found[0] for other in found[1:]):
        return {"quant_method": f"of {len(found)} different quantisations", "parts": found}
    return found[0] if found else None


def _declarations(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of a configuration, and of the configurations in it, that say how weights are quantised."""
    keys = [key for key, value in config.items() if _is_declaration(key, value)]
    # MLX writes the same under two keys.
    if keys:
        yield config[min(keys, key=_CONFIG_KEYS.index)]
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in keys:
            yield from _declarations(value)


def _is_declaration(key: str, value: object) -> bool:
    """Return whether an entry of a configuration says how weights are quantised."""
    if key not in _CONFIG_KEYS or not isinstance(value, Mapping):
        return False
    return key != _CONFIG_KEYS[-1] or not value.keys().isdisjoint(
        ("bits", "group_size", "quant_method", "qformat_weight")
    )


def declared_by_writer(name: str, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a file other than `config.json` says of the quantisation, in the terms of a `quantization_config`.

    Args:
        name: of the file, one of CONFIG_FILES or `params.json`, which Mistral writes.
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
    """Return a `config.json` without what `declared` finds in it."""
    # DeepSeek-V4 says of its experts that they are FP4 beside the declaration.
    is_declared = any(_is_declaration(key, value) for key, value in config.items())
    return {
        key: without_declared(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not (_is_declaration(key, value) or (is_declared and key == "expert_dtype"))
    }


def unreadable(config: Mapping[str, Any]) -> str:
    """Return why no tensor under this `quantization_config` can be read; empty: they may be readable."""
    # Unknown methods are refused as a whole: names and shapes alone could fit by chance, and values would be wrong.
    method = config.get("quant_method")
    if method not in METHODS:
        return f"its quant_method {method!r} is none of {', '.join(sorted(METHODS))}"
    if method == "modelopt" and config.get("quant_algo") not in _MODELOPT:
        return f"its quant_algo {config.get('quant_algo')!r} is none of {', '.join(sorted(_MODELOPT))}"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return f"its weights are sparse ({config['sparsity_config']['format']})"
    if (config.get("transform_config") or {}).get("config_groups"):
        return "its weights were rotated (transform_config)"
    return ""


def _is_part(name: str, specs: _Specs) -> bool:
    """Return whether a tensor belongs to codes, going by its name and those of the others."""
    if _NOTHING_ELSE.search(name):
        return not (name.endswith("_packed") and specs[name][0] in FLOATS)
    match = _PARTS.match(name)
    base = match["base"] if match else ""
    if not base:
        return False
    # A module may have a parameter `norm_scale` next to a layer `norm`, whose weight then is no code.
    weight, is_inner = f"{base}.weight", name.startswith(f"{base}.")
    if weight in specs and (is_inner or specs[weight][0] not in FLOATS):
        return True
    others = (base, f"{base}.qweight", f"{base}_blocks" if name.endswith("_scales") else "")
    return any(other in specs for other in others)


def _layout(
    name: str,
    specs: _Specs,
    blocks: tuple[Block, ...],
    config: Mapping[str, Any] | None,
) -> StoredFormat | str:
    """Return the layout of codes, going by their name; or the reason why they cannot be read; empty: no scales."""
    if name.endswith("_packed"):
        return _packed(name, specs)
    if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in specs:
        return _packed_blocks(name, specs)
    if specs[name][0] is DType.U8 and f"{name}_scale_2" in specs:
        return _packed(name, specs)
    return _plain(name, specs, blocks, config)


def _plain(
    name: str,
    specs: _Specs,
    blocks: tuple[Block, ...],
    config: Mapping[str, Any] | None,
) -> StoredFormat | str:
    """Return the layout of codes under the tensor's own name, or the reason why it cannot be read; empty: no scales."""
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
    # Two scales, or a scale and a zero point, change the values. To ignore one would give wrong weights.
    if others or any(f"{base}_{other}" in specs for other in ("scale_2", "global_scale", "zero_point", "scalar")):
        return "it has scales of a format that is not known"
    # Its scales of other dtypes belong to MXFP8 and INT8, whose order only the header of the file tells.
    if is_torchao and (dtype not in FP8 or kind not in FLOATS):
        return f"{dtype} codes of a format that is not known"
    if dtype is DType.I8 and kind is DType.F8_E8M0:
        return _packed_experts(name, scales, specs)
    if dtype not in FP8 and not (dtype is DType.I8 and _declares_int8(config)):
        return f"{dtype} codes of a format that is not known"
    if kind is DType.U8 and (config or {}).get("scale_fmt") != "ue8m0":
        # MXFP8 is the one format that stores exponents as U8 without declaring it.
        blocks = ((1, 32),)
    block = _block_of(shape, shape_of_scales, blocks)
    if block is None:
        detail = f"; the configuration declares blocks {[list(size) for size in blocks]}" if blocks else ""
        return f"{_MISFIT}{list(shape_of_scales)} do not fit {list(shape)}{detail}"
    if kind not in FLOATS | _EXPONENTS or (kind is DType.U8 and WHOLE in block):
        return f"its scales are {kind}"
    # ComfyUI's scales of blocks are in another order, and its integers may be rotated. `comfy_quant` does not tell by
    # its name or shape.
    if f"{module}.comfy_quant" in specs and (dtype not in FP8 or block[1] != WHOLE or kind not in FLOATS):
        return "ComfyUI's blocks (comfy_quant) are in an order that is not known"
    own_name = _TORCHAO.sub(r"\1", name)
    return StoredFormat(name=own_name, shape=shape, codes=name, scales=scales, block=block)


def _packed_experts(name: str, scales: str, specs: _Specs) -> StoredFormat | str:
    """Return the layout of DeepSeek-V4's experts, E2M1 two a byte in I8 with an exponent for 32; or why it is not."""
    shape = specs[name][1]
    values = (*shape[:-1], shape[-1] * 2) if shape else ()
    if len(values) < 2 or values[-1] % 32 or specs[scales][1] != (*values[:-1], values[-1] // 32):
        return f"{_MISFIT}{list(specs[scales][1])} are not those of 32 E2M1 values each in {list(shape)} bytes"
    return StoredFormat(name=name, shape=values, codes=name, scales=scales, block=(1, 32), packed=True)


def _packed_blocks(name: str, specs: _Specs) -> StoredFormat | str:
    """Return the layout of gpt-oss's experts, blocks of 16 bytes with an exponent each; or the reason why it is not."""
    base = name.removesuffix("_blocks")
    scales = f"{base}_scales"
    (dtype, shape), (kind, shape_of_scales) = specs[name], specs[scales]
    if dtype is not DType.U8 or len(shape) != 4 or shape[-1] != 16 or f"{base}_zero_point" in specs:
        return f"{dtype} codes of a format that is not known"
    if kind not in _EXPONENTS or shape_of_scales != shape[:-1]:
        return f"{_MISFIT}{kind} {list(shape_of_scales)} are not those of blocks {list(shape)}"
    values = (*shape[:2], shape[2] * 32)
    return StoredFormat(name=base, shape=values, codes=name, scales=scales, block=(1, 32), packed=True, transposed=True)


def _packed(name: str, specs: _Specs) -> StoredFormat | str:
    """Return the layout of two codes a byte: NVFP4 or MXFP4 of compressed-tensors, NVFP4 of ModelOpt; or why it is not.

    Other than compressed-tensors, ModelOpt keeps the name of the weight, and the inverse of the global scale.
    """
    base = name.removesuffix("_packed")
    dtype, shape = specs[name]
    scales, whole = f"{base}_scale", f"{base}_scale_2" if base == name else f"{base}_global_scale"
    if dtype is not DType.U8 or len(shape) != 2 or scales not in specs or f"{base}_zero_point" in specs:
        return f"{dtype} codes of a format that is not known"
    values = (shape[0], shape[1] * 2)
    kind, shape_of_scales = specs[scales]
    cols, scale_dtype = (16, DType.F8_E4M3) if whole in specs else (32, DType.U8)
    if kind is not scale_dtype or shape_of_scales != (values[0], values[1] // cols) or values[1] % cols:
        return f"{_MISFIT}{kind} {list(shape_of_scales)} are not those of {cols} E2M1 values each"
    if whole in specs and (specs[whole][0] is not DType.F32 or math.prod(specs[whole][1]) != 1):
        return f"its global scale is {specs[whole][0]} {list(specs[whole][1])}"
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
    """Return the block that makes scales of this shape; None: none does."""
    # A vector has no rows and columns: only a single scale fits it.
    if len(shape) < 2:
        return (WHOLE, WHOLE) if math.prod(scales) == 1 else None

    def fits(block: Block) -> bool:
        steps = (max(1, n) if step == WHOLE else step for n, step in zip(shape[-2:], block, strict=True))
        counts = tuple(-(-n // step) for n, step in zip(shape[-2:], steps, strict=True))
        return scales == (*shape[:-2], *counts)

    # Declared blocks first: with scales of a small tensor several shapes fit, and only the writer knows which.
    if declared_block := next(filter(fits, blocks), None):
        return declared_block
    if math.prod(scales) == 1 or scales == shape[:-2]:
        return (WHOLE, WHOLE)
    if scales == shape[:-1]:
        return (1, WHOLE)
    return next(filter(fits, _BLOCKS[:2] if blocks else _BLOCKS), None)


def _declared_blocks(config: Mapping[str, Any]) -> Iterator[Block]:
    """Yield the blocks of weights that a configuration names, besides rows and whole tensors."""
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
    """Return the entries for weights in compressed-tensors' groups."""
    groups = config.get("config_groups")
    entries = [
        entry for entry in (groups.values() if isinstance(groups, Mapping) else ()) if isinstance(entry, Mapping)
    ]
    return [entry["weights"] for entry in entries if isinstance(entry.get("weights"), Mapping)]


def _declares_int8(config: Mapping[str, Any] | None) -> bool:
    """Return whether all weights are declared as symmetric INT8, whose codes need no zero points."""
    weights = _weights(config or {})
    kinds = {(entry.get("type"), entry.get("num_bits"), entry.get("symmetric", True)) for entry in weights}
    return kinds == {("int", 8, True)}
