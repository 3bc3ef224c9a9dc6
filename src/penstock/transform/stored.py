"""Detection of the tensors that a checkpoint stores as codes and scales, whichever tool wrote them.

In: names, dtypes and shapes; the checkpoint's `quantization_config`. Out: which tensors are codes, which scales belong
to each, in blocks of which shape; tensors that cannot be read, with the reason.
Not here: values (`quantize`), operations on them (`jobs`).

    q_proj.weight           F8_E4M3 [256, 512]     codes   -->  BF16 [256, 512], blocks of 128 x 128
    q_proj.weight_scale_inv BF16    [2, 4]         scales
    q_proj.input_scale      F32     [1]            companion: of activations, dropped with the codes

The shape of the scales tells the shape of the blocks; the configuration decides where several would fit. A
tensor that looks like a part of a quantised one and fits no known layout is listed as unread, never taken for weights.

Sources: transformers 5.23, `Fp8Dequantize` and `FineGrainedFP8HfQuantizer`; compressed-tensors 0.20, `compressors`;
FBGEMM's `weight_scale` [rows, 1] as transformers 5.23 saves it (`fbgemm_fp8`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.transform.formats import WHOLE, Format, fault, outputs
from penstock.types import Box, DType

Tensor = tuple[str, DType, tuple[int, ...]]
"""Name, dtype and shape."""
Block = tuple[int, int]
"""Rows and columns; WHOLE: all of the dim."""

FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
FP8 = frozenset({DType.F8_E4M3, DType.F8_E5M2})
"""Dtypes of codes that can be read."""
_EXPONENTS = frozenset({DType.F8_E8M0, DType.U8})
_OTHER_FLOATS = frozenset({DType.F4, DType.F6_E2M3, DType.F6_E3M2, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ})
_INTEGERS = frozenset({DType.I8, DType.U8, DType.I32, DType.U32})
"""Dtypes of codes in formats that are not read, and in compressed-tensors' INT8 and FP4."""

METHODS = frozenset({"fp8", "compressed-tensors", "fbgemm_fp8"})
"""Values of `quant_method` whose layouts are known."""

_BLOCKS: tuple[Block, ...] = ((1, WHOLE), (WHOLE, WHOLE), (128, 128), (1, 128), (1, 32))
"""Blocks tried in this order where the configuration declares none. Two that fit the same scales mean the same."""

_CONFIG_KEYS = ("quantization_config", "compression_config")

_ACTIVATIONS = re.compile(
    r"(^|\.)((input|output|activation|act|q|k|v|kv|prob)_(global_)?scale(_inv|_ub)?|qscale_act|(input|output)_zero_point)$"
)
"""Names of scales that are not of weights: without quantised layers nothing needs them."""
_PARTS = re.compile(
    r"(?P<base>.+?)(_scale|_scale_inv|_scale_2|_global_scale|_zero_point|_packed|_g_idx|\.scales|\.g_idx|_scales|_blocks)$"
)
"""Names of parts, where there is a tensor that they may be parts of."""
_NOTHING_ELSE = re.compile(
    r"\.weight_(scale|scale_inv|scale_2|global_scale|zero_point|packed|shape|g_idx|format)$"
    r"|\.(qweight|qzeros|qscale_weight)$|_packed$"
    r"|\.weight\.(absmax|nested_absmax|quant_map|nested_quant_map|quant_state\..*)$"
)
"""Names that only parts have: of compressed-tensors, GPTQ and AWQ, Mistral, bitsandbytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor that is stored as codes and scales."""

    name: str
    """Name of the tensor that they stand for."""
    shape: tuple[int, ...]
    """Shape of its values."""
    codes: str
    scales: str
    block: Block
    """Rows and columns of values that share a scale, in the last two dims."""
    whole: str = ""
    """Name of the one number by which all scales are divided; empty: there is none."""
    packed: bool = False
    """Codes are E2M1, two a byte."""

    def shape_of_scales(self) -> tuple[int, ...]:
        """Return the scales' shape with a dim for each of the values'; all ones where a single scale is for all."""
        if len(self.shape) < 2:
            return (1,) * len(self.shape)
        steps = (max(1, n) if step == WHOLE else step for n, step in zip(self.shape[-2:], self.block, strict=True))
        counts = tuple(-(-n // step) for n, step in zip(self.shape[-2:], steps, strict=True))
        return (*self.shape[:-2], *counts)

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of its tensors, codes first."""
        return (self.codes, self.scales, *([self.whole] if self.whole else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """The quantised tensors of a checkpoint, by how they can be read."""

    stored: Mapping[str, Stored]
    """Tensors that can be read, by the name of what they stand for."""
    companions: frozenset[str]
    """Tensors that mean nothing without the codes, scales among them."""
    unread: Mapping[str, str]
    """Tensors that are parts of a quantised one and fit no known layout, with the reason."""
    plain: frozenset[str]
    """Tensors in FP8 of a checkpoint that has no scales: their codes are their values."""

    @property
    def any(self) -> str:
        """Return the name of some tensor that is not stored in the dtype it is computed with; empty: there is none."""
        codes = (layout.codes for layout in self.stored.values())
        return next(iter((*codes, *self.unread, *sorted(self.plain))), "")


def find(tensors: Iterable[Tensor], config: Mapping[str, Any] | None = None) -> Quantised:
    """Find the quantised tensors of a checkpoint.

    Args:
        tensors: all of the checkpoint.
        config: its `quantization_config`, as `declared` finds it; None: there is none, or it is not known.
    """
    specs = {name: (dtype, shape) for name, dtype, shape in tensors}
    blocks = tuple(_declared_blocks(config or {}))
    stored: dict[str, Stored] = {}
    unread: dict[str, str] = {}
    used: set[str] = set()
    # Packed tensors first: their scales may be E4M3, and would be taken for codes.
    for name in sorted(specs, key=lambda name: not name.endswith("_packed")):
        dtype = specs[name][0]
        if name in used or not (dtype in FP8 or _has_scales(name, dtype, specs)):
            continue
        layout = _packed(name, specs) if name.endswith("_packed") else _plain(name, specs, blocks, config)
        if isinstance(layout, Stored):
            stored[layout.name] = layout
            used.update(layout.parts)
        elif layout:
            unread[name] = layout
    # Only now, since a scale of activations or FP8 without scales means damage in a quantised checkpoint, and is plain
    # data in another one.
    is_quantised = bool(stored or unread or config)
    companions = {part for tensor in stored.values() for part in tensor.parts[1:]}
    for name, (dtype, _) in specs.items():
        if name in used or name in unread:
            continue
        if is_quantised and _ACTIVATIONS.search(name):
            companions.add(name)
        elif _is_part(name, specs):
            unread[name] = "the codes that it belongs to are not there, or in no known layout"
            companions.add(name)
        elif is_quantised and dtype in FP8 | _OTHER_FLOATS:
            unread[name] = "it has no scales"
    plain = frozenset() if is_quantised or unread else frozenset(name for name in specs if specs[name][0] in FP8)
    return Quantised(stored=stored, companions=frozenset(companions), unread=unread, plain=plain)


def is_in(form: Format, layout: Stored, dtypes: Mapping[str, DType]) -> bool:
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
    """Return the `quantization_config` of a `config.json`; None: it has none."""
    # Also one level down: models of several parts keep it in the part's own configuration.
    for place in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for key in _CONFIG_KEYS:
            if isinstance(place.get(key), Mapping):
                quantization: Mapping[str, Any] = place[key]
                return quantization
    return None


def without_declared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` without what `declared` finds in it."""
    left = {key: value for key, value in config.items() if key not in _CONFIG_KEYS}
    return {
        key: {k: v for k, v in value.items() if k not in _CONFIG_KEYS} if isinstance(value, Mapping) else value
        for key, value in left.items()
    }


def unreadable(config: Mapping[str, Any]) -> str:
    """Return why no tensor under this `quantization_config` can be read; empty: they may be readable."""
    # Unknown methods are refused as a whole: names and shapes alone could fit by chance, and values would be wrong.
    method = config.get("quant_method")
    if method not in METHODS:
        return f"its quant_method {method!r} is none of {', '.join(sorted(METHODS))}"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return f"its weights are sparse ({config['sparsity_config']['format']})"
    if (config.get("transform_config") or {}).get("config_groups"):
        return "its weights were rotated (transform_config)"
    return ""


def _has_scales(name: str, dtype: DType, specs: Mapping[str, tuple[DType, tuple[int, ...]]]) -> bool:
    """Return whether a tensor of a dtype that codes may have is codes, going by its name or a tensor of scales."""
    return dtype in _INTEGERS | _OTHER_FLOATS and (
        name.endswith("_packed") or f"{name}_scale" in specs or f"{name}_scale_inv" in specs
    )


def _is_part(name: str, specs: Mapping[str, tuple[DType, tuple[int, ...]]]) -> bool:
    """Return whether a tensor belongs to codes, going by its name and those of the others."""
    if _NOTHING_ELSE.search(name):
        return True
    match = _PARTS.match(name)
    base = match["base"] if match else ""
    others = (base, f"{base}.weight", f"{base}.qweight", f"{base}_blocks" if name.endswith("_scales") else "")
    return bool(base) and any(other in specs for other in others)


def _plain(
    name: str,
    specs: Mapping[str, tuple[DType, tuple[int, ...]]],
    blocks: tuple[Block, ...],
    config: Mapping[str, Any] | None,
) -> Stored | str:
    """Return the layout of codes under the tensor's own name, or the reason why it cannot be read; empty: no scales."""
    dtype, shape = specs[name]
    module = name.removesuffix(".weight")
    names = [f"{name}_scale_inv", f"{name}_scale", *([f"{module}.scale"] if module != name else [])]
    scales = next((candidate for candidate in names if candidate in specs), None)
    if scales is None:
        return ""
    kind, shape_of_scales = specs[scales]
    if dtype not in FP8 and not (dtype is DType.I8 and _declares_int8(config) and f"{name}_zero_point" not in specs):
        return f"{dtype} codes of a format that is not known"
    # A second scale or a zero point changes the values: to ignore it would read weights that are wrong.
    if any(f"{name}_{other}" in specs for other in ("scale_2", "global_scale", "zero_point")):
        return "it has scales of a format that is not known"
    if kind is DType.U8 and (config or {}).get("scale_fmt") != "ue8m0":
        # MXFP8 is the one format that stores exponents as U8 without declaring it.
        blocks = ((1, 32),)
    block = _block_of(shape, shape_of_scales, blocks)
    if block is None:
        detail = f"; the configuration declares blocks {[list(size) for size in blocks]}" if blocks else ""
        return f"scales {list(shape_of_scales)} do not fit {list(shape)}{detail}"
    if kind not in FLOATS | _EXPONENTS or (kind is DType.U8 and WHOLE in block):
        return f"its scales are {kind}"
    return Stored(name=name, shape=shape, codes=name, scales=scales, block=block)


def _packed(name: str, specs: Mapping[str, tuple[DType, tuple[int, ...]]]) -> Stored | str:
    """Return the layout of two codes a byte, NVFP4 or MXFP4 of compressed-tensors; or the reason why it is neither."""
    base = name.removesuffix("_packed")
    dtype, shape = specs[name]
    scales, whole = f"{base}_scale", f"{base}_global_scale"
    if dtype is not DType.U8 or len(shape) != 2 or scales not in specs or f"{base}_zero_point" in specs:
        return f"{dtype} codes of a format that is not known"
    values = (shape[0], shape[1] * 2)
    kind, shape_of_scales = specs[scales]
    cols, scale_dtype = (16, DType.F8_E4M3) if whole in specs else (32, DType.U8)
    if kind is not scale_dtype or shape_of_scales != (values[0], values[1] // cols) or values[1] % cols:
        return f"scales {kind} {list(shape_of_scales)} are not those of {cols} E2M1 values each"
    if whole in specs and (specs[whole][0] is not DType.F32 or math.prod(specs[whole][1]) != 1):
        return f"its global scale is {specs[whole][0]} {list(specs[whole][1])}"
    return Stored(
        name=base,
        shape=values,
        codes=name,
        scales=scales,
        block=(1, cols),
        whole=whole if whole in specs else "",
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
