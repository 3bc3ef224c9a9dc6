"""Operations that change how values are stored: `StoreOperation` casts or quantises, and `Dequantise` restores values.

`penstock.transform` defines the bits of each format and the default selection of tensors.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, PlanError
from penstock.storage.foreign_json import write_object
from penstock.transform.formats import Format, alignment, fault, format_of, outputs
from penstock.types import Box, DType, TensorTable
from penstock_convert.operations.operation import (
    Chain,
    Operation,
    Unchanged,
    all_of,
    copy_recipe,
    only_source,
    specs_of,
    whole,
)
from penstock_convert.operations.stored import Quantised, declared, find, is_in, unreadable, without_declared
from penstock_convert.plan.tasks import Recipe, Spec, TaskOutput

if TYPE_CHECKING:
    import torch

    from penstock_convert.operations.select import Selection

_CACHED = 1 << 18
"""Number of elements computed at a time on the CPU. 1 MiB in FP32 fits a core's L2 cache."""
_SHOWN_CHARACTERS = 400
"""Maximum number of characters of a configuration in a message."""
_CONFIG_DTYPES = {
    DType.F64: "float64",
    DType.F32: "float32",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F8_E4M3: "float8_e4m3fn",
    DType.F8_E5M2: "float8_e5m2",
}
"""Maps the result dtype of a cast or a dequantisation to torch's name, which `config.json` uses."""
_DTYPE_KEYS = ("dtype", "torch_dtype")
_NOT_READ = "no operation can read this format: restore the weights with the library that wrote them"


class StoreOperation:
    """Stores the selected tensors in a format. Other tensors, and tensors that do not suit the format, are copied.

    On a device, one kernel per tensor produces the same bits as the CPU (`transform.fuse`).

    Args:
        format: a tag in `transform.formats.FORMATS`.
        only: one or several shell patterns that match whole tensor names. Empty means linear weights for block formats,
            and all tensors for casts.
        keep: shell patterns for the names of tensors that are copied unchanged. Empty means the patterns in
            `transform.select` for block formats, and no pattern for casts.
        quantization: the `quantization_config` of the source, if it has one.

    Raises:
        ConfigError: no format has this tag.
    """

    def __init__(
        self,
        format: str,
        only: str | Sequence[str] = (),
        keep: str | Sequence[str] = (),
        quantization: Mapping[str, Any] | None = None,
    ) -> None:
        self._form = format_of(format)
        self._quantization = quantization
        self._only = (only,) if isinstance(only, str) else tuple(only)
        self._keep = (keep,) if isinstance(keep, str) else tuple(keep)
        # `recipes` sets the selection for `config`, because the configuration lists the modules that are not quantised.
        self._selection: Selection | None = None

    @property
    def is_cast(self) -> bool:
        """Return whether the format has no scales."""
        return self._form.scaling == "none"

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        filters = [*(f"only {pattern}" for pattern in self._only), *(f"not {pattern}" for pattern in self._keep)]
        return f"to {self._form.tag}" + (f" ({', '.join(filters)})" if filters else "")

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`.

        Raises:
            PlanError: no tensor remains to be stored in this format, or the source has quantised tensors in an unknown
                layout.
        """
        specs = specs_of(only_source(sources, self.name))
        taken = self._cast(specs) if self._form.scaling == "none" else self._quantised(specs)
        return [self._recipe(spec) if spec.name in taken else copy_recipe(0, spec) for spec in specs]

    def _quantised(self, specs: Sequence[Spec]) -> frozenset[str]:
        """Return the tensors to quantise. Raise PlanError if any tensor is quantised in a different format."""
        from penstock.transform.select import KEEP
        from penstock_convert.operations.select import select

        tensors = [_named_layout(spec) for spec in specs]
        dtypes = {spec.name: spec.dtype for spec in specs}
        stored_as = find(tensors, self._quantization)
        stored = [layout.codes for layout in stored_as.stored.values() if is_in(self._form, layout, dtypes)]
        other = [layout.codes for layout in stored_as.stored.values() if not is_in(self._form, layout, dtypes)]
        other = [*stored_as.unread, *other, *sorted(stored_as.plain)]
        # Refuse tensors in other formats, because a configuration can declare only one format.
        if other:
            more = f" (and {len(other) - 1} more tensors)" if len(other) > 1 else ""
            is_read = not (stored_as.unread or (self._quantization and unreadable(self._quantization)))
            raise PlanError(
                f"{self.name}: the tensor is already quantised in a different format{more}",
                tensor=other[0],
                hint="put `dequantise` before this operation" if is_read else _NOT_READ,
            )
        only, keep = self._only or ("*.weight",), self._keep or KEEP
        self._selection = select(self._form, tensors, only=only, keep=keep, stored=stored)
        return frozenset(self._selection.names)

    def _cast(self, specs: Sequence[Spec]) -> frozenset[str]:
        def named(spec: Spec, patterns: Sequence[str]) -> bool:
            return any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in patterns)

        stored_as = find(map(_named_layout, specs), self._quantization)
        # Leave codes and scales unchanged. Refuse a scale without codes and codes without scales, which indicate
        # corruption or an unknown format.
        for name, why in stored_as.unread.items():
            if name not in stored_as.foreign:
                raise PlanError(
                    f"{self.name}: the tensor is stored in an unknown format: {why}", tensor=name, hint=_NOT_READ
                )
        return frozenset(
            spec.name
            for spec in specs
            # Scales keep the dtype that their readers expect.
            if spec.name not in stored_as.companions
            and spec.name not in stored_as.unread
            and named(spec, self._only or ("*",))
            and not named(spec, self._keep)
            and spec.dtype is not self._form.values
            and fault(self._form, spec.dtype, spec.shape) is None
        )

    def _recipe(self, spec: Spec) -> Recipe:
        """Return the recipe for a tensor's codes and scales, cut at whole blocks of rows if the format allows it."""
        form = self._form
        stored_parts = outputs(form, spec.name, spec.dtype, spec.shape, Box.full(spec.shape))
        # A format with a scale for the whole tensor requires the whole tensor at once.
        align = 0 if form.global_suffix or not spec.shape else alignment(form, spec.shape)[0]
        # A row of the scales covers `align` rows of the tensor. For stacked matrices, codes and scales are both cut
        # along the stack.
        pers = (
            [1 if i == 0 or len(spec.shape) > 2 else align for i in range(len(stored_parts))]
            if align
            else [0] * len(stored_parts)
        )
        inputs = (whole(0, spec),) if align else (all_of(0, spec),)
        return Recipe(
            outputs=tuple(
                TaskOutput(spec=Spec(name=out.name, dtype=out.dtype, shape=out.shape), per=per)
                for out, per in zip(stored_parts, pers, strict=True)
            ),
            inputs=inputs,
            num_rows=spec.shape[0] if align else 1,
            align=align,
        )

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        import torch

        from penstock.transform.fuse import KernelJob as FusedJob
        from penstock.transform.fuse import lay_out
        from penstock.transform.quantize import dtype_of, torch_dtype

        (source,) = inputs
        assert source is not None
        # This tensor is only copied, because it is not selected or its shape does not suit the format.
        if recipe.outputs[0].spec == recipe.inputs[0].spec:
            return [source]
        shape = tuple(source.shape)
        parts = outputs(self._form, "", dtype_of(source), shape, Box.full(shape))
        results = tuple(torch.empty(part.shape, dtype=torch_dtype(part.dtype), device=source.device) for part in parts)
        if source.device.type == "cpu":
            _quantise_rows(self._form, source, results)
        else:
            # Skip the check in `fuse`, because these outputs already fit the format.
            lay_out(self._form, (FusedJob(source=source, outputs=results),), source.device).run()
        return results

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation.config`."""
        if self._selection is None:
            return with_dtype(config, self._form.values)
        from penstock_convert.operations.select import quantization_config

        return {**without_declared(config), "quantization_config": quantization_config(self._form, self._selection)}


def keeps_codes(operation: Operation) -> bool:
    """Return whether an operation leaves the codes and scales of quantised tensors unchanged."""
    if isinstance(operation, Chain):
        return all(map(keeps_codes, operation.operations))
    return isinstance(operation, Unchanged) or (isinstance(operation, StoreOperation) and operation.is_cast)


def _quantise_rows(form: Format, source: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
    """Quantise a few rows at a time, so that intermediate values stay in the processor's cache."""
    import torch

    from penstock.transform.quantize import magnitude, quantise

    amax = None
    # If the format has a scale for the whole tensor, determine the largest magnitude in a first pass.
    if form.global_suffix and source.numel():
        amax = torch.stack([magnitude(some.float()).amax() for some in source.split(_rows(source, 1))]).amax()
        amax = amax.view(torch.float32)
    align = alignment(form, tuple(source.shape))[0] if source.ndim else 1
    step = _rows(source, align)
    for start in range(0, max(1, len(source)) if source.ndim else 1, step):
        some = source[start : start + step] if source.ndim else source
        for number, (out, part) in enumerate(zip(results, quantise(form, some, amax=amax), strict=True)):
            # The third output is the scale of the whole tensor, which is the same for all rows.
            if number == 2 or not source.ndim:
                out.copy_(part)
                continue
            at = start if number == 0 or source.ndim > 2 else start // align
            out[at : at + len(part)].copy_(part)


def _rows(tensor: torch.Tensor, align: int) -> int:
    rows = _CACHED // max(1, tensor.numel() // max(1, len(tensor))) if tensor.ndim else 1
    return max(1, rows // align) * align


def with_dtype(config: Mapping[str, Any], dtype: DType) -> dict[str, Any]:
    """Return a copy of a model's configuration, including nested configurations, with a different dtype."""
    name = _CONFIG_DTYPES[dtype]
    changed = _with_dtype(config, name)
    # The configurations of diffusers components contain no dtype.
    if "_class_name" in changed or any(key in changed for key in _DTYPE_KEYS):
        return changed
    return {**changed, "torch_dtype": name}


def _with_dtype(config: Mapping[str, Any], name: str, *, is_part: bool = False) -> dict[str, Any]:
    """Replace the dtypes in a configuration with `name`. In a nested configuration, replace only known dtypes."""
    changed = dict(config)
    for key, value in config.items():
        # A nested configuration without a dtype has the dtype of the whole model.
        if key in _DTYPE_KEYS and (not is_part or str(value).removeprefix("torch.") in _CONFIG_DTYPES.values()):
            changed[key] = name
        elif isinstance(value, Mapping) and key != "quantization_config":
            changed[key] = _with_dtype(value, name, is_part=True)
    return changed


@dataclass(frozen=True, slots=True)
class Dequantise:
    """Restores tensors from their codes and scales. Other tensors are copied.

    A quantised tensor that cannot be read is refused. Scales of activations are omitted, because the result's
    configuration declares no quantisation.

    Args:
        to: dtype of the restored tensors.
        quantization: the `quantization_config` of the source, if it has one.

    Raises:
        ConfigError: `to` is not a supported dtype.
    """

    to: str = "BF16"
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.to not in {"F32", "F16", "BF16", "F64"}:
            raise ConfigError(f"cannot dequantise to {self.to!r}", hint="pass BF16, F16, F32 or F64")

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"dequantise to {self.to}"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`. Raise PlanError if a quantised tensor cannot be read."""
        specs = {spec.name: spec for spec in specs_of(only_source(sources, self.name))}
        stored_as = find(map(_named_layout, specs.values()), self.quantization)
        self._check_readable(stored_as)
        recipes = []
        # Keep the file order of the codes. The scales of a tensor are read with its codes.
        by_codes = {layout.codes: layout for layout in stored_as.stored.values()}
        for spec in specs.values():
            # In a source without quantisation, cast FP8 values without scales.
            if spec.name in stored_as.plain:
                as_values = copy_recipe(0, spec)
                values = replace(as_values.outputs[0], spec=replace(spec, dtype=DType(self.to)))
                recipes.append(replace(as_values, outputs=(values,), copies=False))
            elif layout := by_codes.get(spec.name):
                out = Spec(name=layout.name, dtype=DType(self.to), shape=layout.shape_of_result)
                others = tuple(all_of(0, specs[name]) for name in layout.parts[1:])
                rows = layout.shape[0] if layout.shape else 1
                codes = whole(0, spec) if layout.shape else all_of(0, spec)
                recipes.append(
                    Recipe(
                        outputs=(TaskOutput(spec=out, per=1 if layout.shape else 0),),
                        inputs=(codes, *others),
                        num_rows=rows,
                        align=1 if layout.shape else 0,
                    )
                )
            elif spec.name not in stored_as.companions:
                recipes.append(copy_recipe(0, spec))
        return recipes

    def _check_readable(self, stored_as: Quantised) -> None:
        """Raise PlanError if the configuration declares, or a tensor has, an unknown layout."""
        config = self.quantization
        hint = (
            f"the configuration has {_shortened(config)}" if config else "no quantization_config describes the tensor"
        )
        if config and (why := unreadable(config)):
            raise PlanError(f"{self.name}: cannot read the quantization_config: {why}", hint=hint)
        if stored_as.unread:
            name, why = next(iter(stored_as.unread.items()))
            more = f" (and {len(stored_as.unread) - 1} more tensors)" if len(stored_as.unread) > 1 else ""
            raise PlanError(f"{self.name}: cannot read a quantised tensor: {why}{more}", tensor=name, hint=hint)

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        import torch

        from penstock_convert.operations.read_codes import read_codes

        present = [tensor for tensor in inputs if tensor is not None]
        if recipe.copies:
            return present
        if len(present) == 1:
            return [read_codes(present[0], torch.ones((), device=present[0].device), (1, 1), DType(self.to))]
        codes, scales, *rest = present
        # Determine the layout again from the recipe's tensors, because `run` has no state from `recipes`.
        (layout,) = find(
            (_named_layout(recipe_input.spec) for recipe_input in recipe.inputs), self.quantization
        ).stored.values()
        # The codes of gpt-oss have an extra dim for blocks, which values do not have.
        if codes.ndim > len(layout.shape):
            codes = codes.flatten(-2)
        if scales.numel() > 1:
            scales = scales.view(layout.shape_of_scales())
        # Stacked experts have separate scales along the first dim, so cut the scales together with the rows. In a plain
        # matrix, the number of the first row determines the scales.
        is_stack = len(layout.shape) > 2 and scales.numel() > 1

        def read(first: int, last: int) -> torch.Tensor:
            values = read_codes(
                codes[first:last] if layout.shape else codes,
                scales[start + first : start + last] if is_stack else scales,
                layout.block,
                DType(self.to),
                whole=rest[0] if rest else None,
                multiplies=layout.multiplies,
                packed=layout.packed,
                first_row=0 if is_stack else start + first,
            )
            return values.transpose(-2, -1).contiguous() if layout.transposed else values

        # Process a few rows at a time, as in `_quantise_rows`. Kernels on a device process all rows at once.
        step = _rows(codes, 1)
        if codes.device.type != "cpu" or not layout.shape or len(codes) <= step:
            return [read(0, stop - start)]
        return [torch.cat([read(at, min(at + step, stop - start)) for at in range(0, stop - start, step)])]

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation.config`. Raise PlanError if `config` declares a different quantisation than the plan."""
        declares = declared(config)
        # Compare text, because NaN is not equal to itself. Some writers declare the quantisation in a separate file.
        if declares is not None and _text(declares) != _text(self.quantization):
            message = (
                f"{self.name}: the quantization_config in config.json differs from the one used to plan the conversion"
            )
            raise PlanError(
                message,
                hint=f"config.json has {_shortened(declares)}, but the plan used {_shortened(self.quantization)}",
            )
        return with_dtype(without_declared(config), DType(self.to))


def _named_layout(spec: Spec) -> tuple[str, DType, tuple[int, ...]]:
    return spec.name, spec.dtype, spec.shape


def _text(quantization: Mapping[str, Any] | None) -> bytes | None:
    return None if quantization is None else write_object(quantization, sort_keys=True)


def _shortened(quantization: Mapping[str, Any] | None) -> str:
    """Return a `quantization_config` for a message, without its lists of modules."""
    if quantization is None:
        return "nothing"
    left = {key: value for key, value in quantization.items() if key not in ("ignore", "modules_to_not_convert")}
    text = str(left)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
