"""Operations that change how values are stored: casts and block formats, and back.

In / Out: see `operation`.
Not here: what the bits are, and which tensors a format is for when nobody says (`penstock.transform`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, PlanError
from penstock.jobs.operation import all_of, as_it_is, one, specs_of, whole
from penstock.plan.tasks import Output, Recipe, Spec
from penstock.transform.geometry import FORMATS, Format, alignment, fault, format_of, outputs
from penstock.transform.select import KEEP, Selection, quantization_config, select
from penstock.types import Box, DType, TensorTable

if TYPE_CHECKING:
    import torch

_CACHED = 1 << 18
"""Elements made at a time on the CPU. Reason: 1 MiB in FP32, a core's L2 cache."""
_CONFIG_DTYPES = {
    DType.F64: "float64",
    DType.F32: "float32",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F8_E4M3: "float8_e4m3fn",
    DType.F8_E5M2: "float8_e5m2",
}
"""What a cast or a dequantisation gives, as `config.json` says it: torch's name."""


class Store:
    """Tensors in a format: those that are selected and that it takes; the others as they are.

    On a device by one kernel a tensor, whose bits are those of the CPU (`transform.fuse`).

    Args:
        format: a tag of `transform.geometry.FORMATS`.
        only: a shell pattern of names, or several, the whole name; none: linear weights for block formats,
            everything for casts.
        keep: likewise, of names that stay as they are; none: what `transform.select` keeps, nothing for casts.

    Raises:
        ConfigError: no format has this tag.
    """

    def __init__(self, format: str, only: str | Sequence[str] = (), keep: str | Sequence[str] = ()) -> None:
        self._form = format_of(format)
        self._only, self._keep = ((one,) if isinstance(one, str) else tuple(one) for one in (only, keep))
        self._selection: Selection | None = None

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        told = [*(f"only {one}" for one in self._only), *(f"not {one}" for one in self._keep)]
        return f"to {self._form.tag}" + (f" ({', '.join(told)})" if told else "")

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`. PlanError also where nothing is left to store so."""
        specs = specs_of(one(sources, self.name))
        taken = self._cast(specs) if self._form.scaling == "none" else self._quantised(specs)
        return [self._recipe(spec) if spec.name in taken else as_it_is(0, spec) for spec in specs]

    def _quantised(self, specs: Sequence[Spec]) -> frozenset[str]:
        only, keep = self._only or ("*.weight",), self._keep or KEEP
        tensors = ((spec.name, spec.dtype, spec.shape) for spec in specs)
        self._selection = select(self._form, tensors, only=only, keep=keep)
        return frozenset(self._selection.names)

    def _cast(self, specs: Sequence[Spec]) -> frozenset[str]:
        def named(spec: Spec, patterns: Sequence[str]) -> bool:
            return any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in patterns)

        return frozenset(
            spec.name
            for spec in specs
            if named(spec, self._only or ("*",))
            and not named(spec, self._keep)
            and spec.dtype is not self._form.values
            and fault(self._form, spec.dtype, spec.shape) is None
        )

    def _recipe(self, spec: Spec) -> Recipe:
        form = self._form
        made = outputs(form, spec.name, spec.dtype, spec.shape, Box.full(spec.shape))
        align = 0 if form.global_suffix or not spec.shape else alignment(form, spec.shape)[0]
        pers = [1 if i == 0 or len(spec.shape) > 2 else align for i in range(len(made))] if align else [0] * len(made)
        given = (whole(0, spec),) if align else (all_of(0, spec),)
        return Recipe(
            outputs=tuple(
                Output(spec=Spec(name=out.name, dtype=out.dtype, shape=out.shape), per=per)
                for out, per in zip(made, pers, strict=True)
            ),
            inputs=given,
            num_rows=spec.shape[0] if align else 1,
            align=align,
        )

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        import torch

        from penstock.transform.fuse import Job as FusedJob
        from penstock.transform.fuse import fuse
        from penstock.transform.quantize import dtype_of, torch_dtype

        (source,) = inputs
        assert source is not None
        if recipe.outputs[0].spec == recipe.inputs[0].spec:
            return [source]
        shape = tuple(source.shape)
        parts = outputs(self._form, "", dtype_of(source), shape, Box.full(shape))
        made = tuple(torch.empty(part.shape, dtype=torch_dtype(part.dtype), device=source.device) for part in parts)
        if source.device.type == "cpu":
            _quantise_rows(self._form, source, made)
        else:
            fuse(self._form, [FusedJob(source=source, outputs=made)]).run()
        return made

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation.config`."""
        if self._selection is None:
            return _with_dtype(config, self._form.values)
        return {**config, "quantization_config": quantization_config(self._form, self._selection)}


def _quantise_rows(form: Format, source: torch.Tensor, made: Sequence[torch.Tensor]) -> None:
    """`quantise`, some rows after others: what it makes meanwhile stays in the cache."""
    import torch

    from penstock.transform.quantize import magnitude, quantise

    amax = None
    if form.global_suffix and source.numel():
        amax = torch.stack([magnitude(some.float()).amax() for some in source.split(_rows(source, 1))]).amax()
        amax = amax.view(torch.float32)
    align = alignment(form, tuple(source.shape))[0] if source.ndim else 1
    step = _rows(source, align)
    for start in range(0, max(1, len(source)) if source.ndim else 1, step):
        some = source[start : start + step] if source.ndim else source
        for number, (out, part) in enumerate(zip(made, quantise(form, some, amax=amax), strict=True)):
            if number == 2 or not source.ndim:
                out.copy_(part)
                continue
            at = start if number == 0 or source.ndim > 2 else start // align
            out[at : at + len(part)].copy_(part)


def _rows(tensor: torch.Tensor, align: int) -> int:
    """Rows of a tensor that are made at a time."""
    rows = _CACHED // max(1, tensor.numel() // max(1, len(tensor))) if tensor.ndim else 1
    return max(1, rows // align) * align


def _with_dtype(config: Mapping[str, Any], dtype: DType) -> dict[str, Any]:
    """A model's configuration that names a dtype: under `dtype`, as of transformers 5, or `torch_dtype`, as before."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    return {**config, key: _CONFIG_DTYPES[dtype]}


@dataclass(frozen=True, slots=True)
class Dequantise:
    """Tensors out of whatever block format they are in; the others as they are.

    Args:
        to: the dtype they get.

    Raises:
        ConfigError: it is none.
    """

    to: str = "BF16"

    def __post_init__(self) -> None:
        if self.to not in {"F32", "F16", "BF16", "F64"}:
            raise ConfigError(f"{self.to!r} is not a dtype to dequantise to", hint="one of BF16, F16, F32, F64")

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"dequantise to {self.to}"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`."""
        specs = {spec.name: spec for spec in specs_of(one(sources, self.name))}
        found = self._stored(specs)
        parts = {spec.name for _, stored in found.values() for spec in stored}
        recipes = [as_it_is(0, spec) for spec in specs.values() if spec.name not in parts]
        for base, (form, stored) in found.items():
            codes = stored[0]
            shape = (*codes.shape[:-1], codes.shape[-1] * 2) if form.values is DType.F4 else codes.shape
            out = Spec(name=base, dtype=DType(self.to), shape=shape)
            others = tuple(all_of(0, spec) for spec in stored[1:])
            align = alignment(form, shape)[0] if len(shape) == 2 else 1
            recipe = Recipe(
                outputs=(Output(spec=out),), inputs=(whole(0, codes), *others), num_rows=shape[0], align=align
            )
            recipes.append(recipe)
        place = {name: i for i, name in enumerate(specs)}
        return sorted(recipes, key=lambda recipe: place[recipe.inputs[0].spec.name])

    def _stored(self, specs: Mapping[str, Spec]) -> dict[str, tuple[Format, list[Spec]]]:
        """What of these is a tensor in a block format, by the tensor's name: the first format whose parts fit."""
        found: dict[str, tuple[Format, list[Spec]]] = {}
        for form in FORMATS.values():
            if form.scaling == "none":
                continue
            for spec in specs.values():
                base = spec.name.removesuffix(form.values_suffix) if form.values_suffix else spec.name
                if base in found or not spec.name.endswith(form.values_suffix) or not spec.shape:
                    continue
                shape = (*spec.shape[:-1], spec.shape[-1] * 2) if form.values is DType.F4 else spec.shape
                if fault(form, DType.BF16, shape) is not None:
                    continue
                wanted = outputs(form, base, DType.BF16, shape, Box.full(shape))
                stored = [specs.get(out.name) for out in wanted]
                if all(
                    have is not None and (have.dtype, have.shape) == (out.dtype, out.shape)
                    for have, out in zip(stored, wanted, strict=True)
                ):
                    found[base] = form, [have for have in stored if have is not None]
        return found

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        import torch

        from penstock.transform.quantize import dequantise

        present = [tensor for tensor in inputs if tensor is not None]
        if len(present) == 1:
            return present
        form = self._form_of(recipe)
        codes, scales, *rest = present
        align = max(recipe.align, 1)
        scales, step = scales[start // align : -(-stop // align)], _rows(codes, align)
        if codes.device.type != "cpu" or len(codes) <= step:
            return [dequantise(form, [codes, scales, *rest], DType(self.to))]
        made = [
            dequantise(
                form, [codes[at : at + step], scales[at // align : -(-(at + step) // align)], *rest], DType(self.to)
            )
            for at in range(0, len(codes), step)
        ]
        return [torch.cat(made)]

    def _form_of(self, recipe: Recipe) -> Format:
        specs = {given.spec.name: given.spec for given in recipe.inputs}
        for form, stored in self._stored(specs).values():
            if len(stored) == len(specs):
                return form
        raise PlanError("not the tensors of a format", tensor=recipe.outputs[0].spec.name)

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation.config`."""
        left = {key: value for key, value in config.items() if key != "quantization_config"}
        return _with_dtype(left, DType(self.to))
