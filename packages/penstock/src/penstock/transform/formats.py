"""Formats in which tensors can be stored: their registration by tag, and the tensors and boxes that each format stores.

A block belongs to the rank that holds the block's first element, so that exactly one rank quantises it.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from penstock.arguments import require_type
from penstock.entry_points import entry_points, load
from penstock.errors import ConfigError, PlanError
from penstock.types import Box, DType

ENTRY_POINTS = "penstock.formats"
"""Entry point group in which an installed package lists its formats by tag, each a `Format`. Worker processes of a
conversion rely on it, because a call to `register_format` does not affect them."""

Scaling = Literal["none", "amax", "pow2", "mx", "mx_floor", "nv"]
"""Rule that computes the scale of a block from the block's largest magnitude. See `quantize`."""

WHOLE = 0
"""Side of a block that spans the whole dim."""

SOURCES = frozenset({DType.F32, DType.F16, DType.BF16})
"""Dtypes that block formats accept as input."""

CASTS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16, DType.F8_E4M3, DType.F8_E5M2})
"""Dtypes that a cast can produce. A cast accepts only dtypes of at least 16 bits."""

MAX_BLOCK = 128
"""Maximum side of a block that does not span the dim. The kernels' tiles have 128 columns and cut no block."""

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A way to store a tensor: the shape of its blocks, and the numbers stored for each block."""

    tag: str
    values: DType
    """Dtype of the codes. F4 codes are stored as U8, two per byte, the first in the low nibble."""
    scaling: Scaling
    block: tuple[int, int] = (1, 1)
    """Elements of a block in the last two dims."""
    scales: DType = DType.F32
    values_suffix: str = ""
    scales_suffix: str = "_scale"
    global_suffix: str = ""
    """Name suffix of the FP32 scale for the whole tensor. Empty if the format has no such scale."""
    whole_blocks: bool = False
    """Whether the last dim must be a multiple of the block's last dim, because readers accept no partial block."""
    config: Callable[[Sequence[str]], dict[str, Any]] | None = None
    """Returns `quantization_config` for `config.json` from the names of the unchanged modules. None if engines need no
    entry."""


_lock = threading.Lock()
_formats: dict[str, Format] = {}
FORMATS: Mapping[str, Format] = MappingProxyType(_formats)
"""Formats registered in this process, by tag."""


def register_format(form: Format) -> None:
    """Register a format in this process, so that conversions and syncs accept its tag.

    The format's `scaling` selects the computation. The CPU and a device store the same bits.

    Raises:
        ConfigError: the tag is malformed or used by a different format, or the kernels cannot store such blocks.
    """
    require_type("form", form, Format, "a penstock.transform.Format")
    if why := _registration_fault(form):
        raise ConfigError(f"cannot register the format {form.tag!r}: {why}")
    with _lock:
        # The module of an entry point may itself register the format.
        if _formats.setdefault(form.tag, form) != form:
            message = f"cannot register the format {form.tag!r}: its tag is taken"
            raise ConfigError(message, hint="choose a different tag")


def _registration_fault(form: Format) -> str | None:
    """Return why the format cannot be registered, or None."""
    rows, cols = form.block
    if not _TAG.fullmatch(form.tag):
        return "a tag must be 1 to 64 letters, digits or _.:-"
    if form.scaling == "none":
        return None if form.values in CASTS and form.block == (1, 1) else "a cast has no blocks and produces a float"
    # Blocks whose sides are powers of two divide the kernels' tiles, so no block spans two tiles.
    if any(side != WHOLE and not (0 < side <= MAX_BLOCK and side & (side - 1) == 0) for side in form.block):
        return f"sides of block {rows} x {cols} are not powers of two up to {MAX_BLOCK} or {WHOLE} for the whole dim"
    # The kernel reads a block that spans the whole dim in two passes, and supports only such blocks of one row.
    if rows != 1 and WHOLE in form.block:
        return f"block {rows} x {cols} spans the dim, so it must have one row"
    if (form.scaling == "nv") != (form.values is DType.F4) or (form.scaling == "nv") != bool(form.global_suffix):
        return "F4 values, scaling 'nv' and global_suffix must be used together"
    if form.scaling != "nv" and form.values is not DType.F8_E4M3:
        return f"block formats store F8_E4M3 or F4, not {form.values}"
    return None


def format_of(tag: str) -> Format:
    """Return the format of a tag that this process or an installed package registers. Raises ConfigError."""
    if not is_format(tag):
        hint = f"use one of {', '.join(FORMATS)}, or a tag that a package lists under the entry points {ENTRY_POINTS}"
        wanted = tag.lower().removeprefix("torch.").removeprefix("cast:").replace("_", "-")
        tags = {name.lower().removeprefix("cast:").replace("_", "-"): name for name in FORMATS} | _OTHER_NAMES
        if similar := difflib.get_close_matches(wanted, tags, n=1, cutoff=0.75):
            hint = f"did you mean {tags[similar[0]]!r}? Otherwise {hint}"
        raise ConfigError(f"there is no transform {tag!r}", hint=hint)
    return _formats[tag]


_OTHER_NAMES = {
    "fp8": "fp8-block128",
    "float8": "fp8-block128",
    "fp8-block": "fp8-block128",
    "fp8-dynamic": "fp8-channel",
    "fp4": "nvfp4",
    "nvfp4a16": "nvfp4",
    "fp16": "cast:F16",
    "half": "cast:F16",
    "float16": "cast:F16",
    "bfloat16": "cast:BF16",
    "float32": "cast:F32",
    "fp32": "cast:F32",
    "float": "cast:F32",
    "float64": "cast:F64",
    "fp64": "cast:F64",
    "float8-e4m3fn": "cast:F8_E4M3",
    "float8-e5m2": "cast:F8_E5M2",
    "q8-0": "gguf:Q8_0",
}
"""Tags of formats, by the formats' other common names."""


def is_format(tag: str) -> bool:
    """Return whether this process or an installed package has registered a format with this tag."""
    if tag in _formats:
        return True
    # An unknown tag ends in an error, so do not cache this lookup.
    for entry in entry_points(ENTRY_POINTS, tag):
        form = load(entry)
        if not isinstance(form, Format) or form.tag != tag:
            raise ConfigError(f"the entry point {tag} of {ENTRY_POINTS} is {form!r}, not a Format with this tag")
        register_format(form)
        return True
    return False


def _compressed_tensors(
    layout: str, weights: dict[str, Any], activations: dict[str, Any] | None
) -> Callable[[Sequence[str]], dict[str, Any]]:
    """Return the config of a compressed-tensors layout.

    Source: compressed-tensors 0.20, `QuantizationConfig` and its presets FP8_DYNAMIC, MXFP8 and NVFP4A16.
    """
    number = {"type": "float", "symmetric": True}
    inputs = None if activations is None else number | activations

    def config(kept: Sequence[str]) -> dict[str, Any]:
        group = {"targets": ["Linear"], "weights": number | weights, "input_activations": inputs, "format": layout}
        return {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(kept),
        }

    return config


def _block128(tag: str, rows: int) -> tuple[Format, ...]:
    """Return FP8 formats with blocks of rows x 128. A scale is any FP32, or a power of two stored as FP32 or as a byte.

    Source: DeepSeek-V3, README_WEIGHTS.md (`weight_scale_inv`, value = code * scale_inv, [ceil(n/128), ceil(k/128)]).
    DeepSeek-V3.1, config.json (`scale_fmt: ue8m0`, FP32 kept). transformers 5, FineGrainedFP8Config, and vLLM 0.32,
    fp8.py (`is_scale_e8m0`): float8_e8m0fnu, as in DeepSeek-V4.
    """

    def form(suffix: str, scaling: Scaling, scales: DType) -> Format:
        def config(kept: Sequence[str]) -> dict[str, Any]:
            described: dict[str, Any] = {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": [rows, 128],
                "modules_to_not_convert": list(kept),
            }
            return described | ({"scale_fmt": "ue8m0"} if scaling == "pow2" else {})

        return Format(
            tag=tag + suffix,
            values=DType.F8_E4M3,
            scaling=scaling,
            block=(rows, 128),
            scales=scales,
            scales_suffix="_scale_inv",
            config=config,
        )

    return form("", "amax", DType.F32), form("-ue8m0", "pow2", DType.F32), form("-e8m0", "pow2", DType.F8_E8M0)


def _mxfp8(tag: str, scaling: Scaling) -> Format:
    """Return an MXFP8 format. Engines decode both roundings of the exponents in the same way.

    Source: compressed-tensors 0.20, "mxfp8-quantized" (uint8 scales) and `generate_mx_scales`. `-floor`: OCP
    Microscaling Formats 1.0, section 6.3, whose exponent clamps the largest eighth of a block's range.
    """
    group = {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return Format(
        tag=tag,
        values=DType.F8_E4M3,
        scaling=scaling,
        block=(1, 32),
        scales=DType.U8,
        whole_blocks=True,
        config=_compressed_tensors("mxfp8-quantized", group | {"dynamic": False}, group | {"dynamic": True}),
    )


for _built_in in (
    *(Format(tag=f"cast:{dtype}", values=dtype, scaling="none") for dtype in sorted(CASTS)),
    *_block128("fp8-block128", 128),
    *_block128("fp8-block1x128", 1),
    # Source: compressed-tensors 0.17, "float-quantized" with strategy "channel": weight_scale [rows, 1].
    Format(
        tag="fp8-channel",
        values=DType.F8_E4M3,
        scaling="amax",
        block=(1, WHOLE),
        config=_compressed_tensors(
            "float-quantized",
            {"num_bits": 8, "strategy": "channel", "dynamic": False},
            {"num_bits": 8, "strategy": "token", "dynamic": True},
        ),
    ),
    _mxfp8("mxfp8", "mx"),
    _mxfp8("mxfp8-floor", "mx_floor"),
    # Source: compressed-tensors 0.17, "nvfp4-pack-quantized", compressors/nvfp4.
    Format(
        tag="nvfp4",
        values=DType.F4,
        scaling="nv",
        block=(1, 16),
        scales=DType.F8_E4M3,
        values_suffix="_packed",
        global_suffix="_global_scale",
        whole_blocks=True,
        config=_compressed_tensors(
            "nvfp4-pack-quantized",
            {
                "num_bits": 4,
                "strategy": "tensor_group",
                "group_size": 16,
                "dynamic": False,
                "scale_dtype": "torch.float8_e4m3fn",
            },
            None,
        ),
    ),
):
    register_format(_built_in)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOutput:
    """A tensor that a format stores, and the box of that tensor that is computed from a box of the source."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    box: Box


def fault(form: Format, dtype: DType, shape: tuple[int, ...]) -> str | None:
    """Return why a tensor of this dtype and shape cannot be stored in a format, or None if it can."""
    if form.scaling == "none":
        return None if dtype in CASTS and dtype.bits >= 16 else f"{dtype} cannot be cast"
    if dtype not in SOURCES:
        return f"{dtype} cannot be quantised, only F32, F16 and BF16"
    if len(shape) < 2 or (form.global_suffix and len(shape) > 2):
        return f"{form.tag} needs {'2' if form.global_suffix else '2 or more'} dims, not shape {list(shape)}"
    if form.whole_blocks and shape[-1] % form.block[1]:
        return f"{form.tag} needs a last dim divisible by {form.block[1]}, not shape {list(shape)}"
    return None


def check(form: Format, name: str, dtype: DType, shape: tuple[int, ...], box: Box) -> None:
    """Raise PlanError unless the tensor can be stored in the format and the box is inside the tensor."""
    if why := fault(form, dtype, shape):
        raise PlanError(why, tensor=name)
    if len(box.start) != len(shape) or any(stop > n for stop, n in zip(box.stop, shape, strict=True)):
        raise PlanError(f"box [{box.start}, {box.stop}) lies outside shape {shape}", tensor=name)


def alignment(form: Format, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a multiple per dim: a box whose edges are such multiples, or the tensor's edges, cuts no block."""
    if form.scaling == "none":
        return (1,) * len(shape)
    rows, cols = (max(1, n) if step == WHOLE else step for step, n in zip(form.block, shape[-2:], strict=True))
    return (*(1,) * (len(shape) - 2), rows, cols)


def widened(form: Format, shape: tuple[int, ...], box: Box) -> Box:
    """Return the smallest box that contains `box` and cuts no block. An empty box stays empty."""
    if not box.num_elements:
        return box
    step = alignment(form, shape)
    start = tuple(a // s * s for a, s in zip(box.start, step, strict=True))
    stop = tuple(min(n, -(-b // s) * s) for b, s, n in zip(box.stop, step, shape, strict=True))
    return Box(start=start, stop=stop)


def owned(form: Format, shape: tuple[int, ...], box: Box) -> Box:
    """Return the elements of all blocks whose first element is in the box."""
    step = alignment(form, shape)
    start = tuple(min(n, -(-a // s) * s) for a, s, n in zip(box.start, step, shape, strict=True))
    stop = tuple(min(n, -(-b // s) * s) for b, s, n in zip(box.stop, step, shape, strict=True))
    return Box(start=start, stop=stop)


def needed(form: Format, shape: tuple[int, ...], box: Box, *, amax_given: bool = False) -> Box:
    """Return the elements needed to quantise the blocks that a box owns.

    Args:
        amax_given: whether the tensor's largest magnitude is known, for example as a maximum over the ranks.
    """
    mine = owned(form, shape, box)
    return Box.full(shape) if form.global_suffix and not amax_given and mine.num_elements else mine


def foreign(held: Box, wanted: Box) -> tuple[Box, ...]:
    """Return `wanted` minus `held` as disjoint boxes, which a rank must receive to quantise its blocks."""
    # In each dim, cut off the boxes below and above the held range, and continue with the rest.
    left, start, stop = [], list(wanted.start), list(wanted.stop)
    for dim, (a, b) in enumerate(zip(held.start, held.stop, strict=True)):
        for low, high in ((start[dim], min(a, stop[dim])), (max(b, start[dim]), stop[dim])):
            if low < high:
                cut = Box(start=(*start[:dim], low, *start[dim + 1 :]), stop=(*stop[:dim], high, *stop[dim + 1 :]))
                if cut.num_elements:
                    left.append(cut)
        start[dim], stop[dim] = max(start[dim], a), min(stop[dim], b)
        if start[dim] >= stop[dim]:
            break
    return tuple(left)


def outputs(form: Format, name: str, dtype: DType, shape: tuple[int, ...], box: Box) -> tuple[FormatOutput, ...]:
    """Return the tensors that a format stores for one tensor, codes first, with the boxes that are computed from `box`.

    Raises:
        PlanError: the tensor cannot be stored in the format, or the box cuts blocks (the hint gives a wider box).
    """
    check(form, name, dtype, shape, box)
    if (wide := widened(form, shape, box)) != box:
        hint = f"widen the box to [{wide.start}, {wide.stop})"
        raise PlanError(f"box [{box.start}, {box.stop}) cuts blocks of {form.tag}", tensor=name, hint=hint)
    # A byte holds two F4 codes, so the stored tensor has half the columns.
    packed = form.values is DType.F4
    step = (*(1,) * (len(shape) - 1), 2) if packed else (1,) * len(shape)
    values = DType.U8 if packed else form.values
    codes = _blocks(name + form.values_suffix, values, shape, box, step)
    if form.scaling == "none":
        return (codes,)
    scales = _blocks(name + form.scales_suffix, form.scales, shape, box, alignment(form, shape))
    if not form.global_suffix:
        return codes, scales
    # The rank that holds the tensor's first element stores the scale of the whole tensor.
    first = bool(box.num_elements) and not any(box.start)
    whole = Box(start=(0,), stop=(int(first),))
    return codes, scales, FormatOutput(name=name + form.global_suffix, dtype=DType.F32, shape=(1,), box=whole)


def _blocks(name: str, dtype: DType, shape: tuple[int, ...], box: Box, step: tuple[int, ...]) -> FormatOutput:
    count = tuple(-(-n // s) for n, s in zip(shape, step, strict=True))
    start = tuple(-(-a // s) for a, s in zip(box.start, step, strict=True))
    stop = tuple(-(-b // s) for b, s in zip(box.stop, step, strict=True))
    return FormatOutput(name=name, dtype=dtype, shape=count, box=Box(start=start, stop=stop))
