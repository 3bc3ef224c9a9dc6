"""Operations that change how values are stored: casts and block formats, and back.

In / Out: see `operation`.
Not here: what the bits are, and which tensors a format is for when nobody says (`penstock.transform`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, PlanError
from penstock.jobs.operations.operation import all_of, as_it_is, one, specs_of, whole
from penstock.plan.tasks import Output, Recipe, Spec
from penstock.transform.formats import Format, format_of
from penstock.transform.geometry import alignment, fault, outputs
from penstock.transform.select import KEEP, Selection, quantization_config, select
from penstock.transform.stored import Quantised, declared, find, is_in, unreadable, without_declared
from penstock.types import Box, DType, TensorTable

if TYPE_CHECKING:
    import torch

_CACHED = 1 << 18
"""Elements made at a time on the CPU. Reason: 1 MiB in FP32, a core's L2 cache."""
_SHOWN_CHARACTERS = 400
"""Of a configuration in a message."""
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
        format: a tag of `transform.formats.FORMATS`.
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
        tensors = [_told(spec) for spec in specs]
        dtypes = {spec.name: spec.dtype for spec in specs}
        found = find(tensors)
        stored = [layout.codes for layout in found.stored.values() if is_in(self._form, layout, dtypes)]
        other = [one.codes for one in found.stored.values() if not is_in(self._form, one, dtypes)] + [
            *found.unread,
            *sorted(found.plain),
        ]
        if other:
            more = f", as {len(other) - 1} more tensors" if len(other) > 1 else ""
            raise PlanError(
                f"{self.name}: the source stores it quantised in another format{more}",
                tensor=other[0],
                hint="put `dequantise` before, to store all in one format",
            )
        only, keep = self._only or ("*.weight",), self._keep or KEEP
        self._selection = select(self._form, tensors, only=only, keep=keep, stored=stored)
        return frozenset(self._selection.names)

    def _cast(self, specs: Sequence[Spec]) -> frozenset[str]:
        def named(spec: Spec, patterns: Sequence[str]) -> bool:
            return any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in patterns)

        found = find(map(_told, specs))
        return frozenset(
            spec.name
            for spec in specs
            if spec.name not in found.companions  # scales have the dtype that their readers ask for
            and named(spec, self._only or ("*",))
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
    """Return rows of a tensor that are made at a time."""
    rows = _CACHED // max(1, tensor.numel() // max(1, len(tensor))) if tensor.ndim else 1
    return max(1, rows // align) * align


def _with_dtype(config: Mapping[str, Any], dtype: DType) -> dict[str, Any]:
    """A model's configuration that names a dtype: under `dtype`, as of transformers 5, or `torch_dtype`, as before."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    return {**config, key: _CONFIG_DTYPES[dtype]}


@dataclass(frozen=True, slots=True)
class Dequantise:
    """Tensors out of the codes and scales that they are stored as; the others as they are.

    Every tensor that has to do with quantisation is either read or refused, and what is of activations is left out, so
    that nothing quantised is left once the configuration says nothing of it.

    Args:
        to: the dtype they get.
        quantization: the `quantization_config` of the source, if it has one.

    Raises:
        ConfigError: `to` is not a dtype to dequantise to.
    """

    to: str = "BF16"
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.to not in {"F32", "F16", "BF16", "F64"}:
            raise ConfigError(f"{self.to!r} is not a dtype to dequantise to", hint="one of BF16, F16, F32, F64")

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"dequantise to {self.to}"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`. PlanError also where something quantised cannot be read."""
        specs = {spec.name: spec for spec in specs_of(one(sources, self.name))}
        found = find(map(_told, specs.values()), self.quantization)
        self._check_readable(found)
        recipes = []
        by_codes = {one.codes: one for one in found.stored.values()}
        for spec in specs.values():
            if spec.name in found.plain:
                as_values = as_it_is(0, spec)
                values = replace(as_values.outputs[0], spec=replace(spec, dtype=DType(self.to)))
                recipes.append(replace(as_values, outputs=(values,), copies=False))
            elif layout := by_codes.get(spec.name):
                out = Spec(name=layout.name, dtype=DType(self.to), shape=layout.shape)
                others = tuple(all_of(0, specs[name]) for name in layout.parts[1:])
                rows = layout.shape[0] if layout.shape else 1
                given = whole(0, spec) if layout.shape else all_of(0, spec)
                recipes.append(
                    Recipe(
                        outputs=(Output(spec=out, per=1 if layout.shape else 0),),
                        inputs=(given, *others),
                        num_rows=rows,
                        align=1 if layout.shape else 0,
                    )
                )
            elif spec.name not in found.companions:
                recipes.append(as_it_is(0, spec))
        return recipes

    def _check_readable(self, found: Quantised) -> None:
        """Raise PlanError for a configuration or tensors that are of no known layout."""
        said = self.quantization
        hint = f"the configuration says {_shortened(said)}" if said else "no quantization_config says how it is stored"
        if said and (why := unreadable(said)):
            raise PlanError(f"{self.name}: the quantization_config cannot be read: {why}", hint=hint)
        if found.unread:
            name, why = next(iter(found.unread.items()))
            more = f" ({len(found.unread) - 1} more tensors likewise)" if len(found.unread) > 1 else ""
            raise PlanError(f"{self.name}: a quantised tensor cannot be read: {why}{more}", tensor=name, hint=hint)

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        import torch

        from penstock.transform.quantize import read_codes

        present = [tensor for tensor in inputs if tensor is not None]
        if recipe.copies:
            return present
        if len(present) == 1:
            return [read_codes(present[0], torch.ones((), device=present[0].device), (1, 1), DType(self.to))]
        codes, scales, *rest = present
        (layout,) = find((_told(given.spec) for given in recipe.inputs), self.quantization).stored.values()
        if scales.numel() > 1:
            scales = scales.view(layout.shape_of_scales())
        is_stack = len(layout.shape) > 2 and scales.numel() > 1

        def read(first: int, last: int) -> torch.Tensor:
            return read_codes(
                codes[first:last] if layout.shape else codes,
                scales[start + first : start + last] if is_stack else scales,
                layout.block,
                DType(self.to),
                whole=rest[0] if rest else None,
                packed=layout.packed,
                first_row=0 if is_stack else start + first,
            )

        step = _rows(codes, 1)
        if codes.device.type != "cpu" or not layout.shape or len(codes) <= step:
            return [read(0, stop - start)]
        return [torch.cat([read(at, min(at + step, stop - start)) for at in range(0, stop - start, step)])]

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation.config`. PlanError: it declares another quantisation than the plan was made for."""
        if (said := declared(config)) != self.quantization:
            message = f"{self.name}: config.json has another quantization_config than the tensors were read by"
            raise PlanError(message, hint=f"it says {_shortened(said)}; planned for {_shortened(self.quantization)}")
        return _with_dtype(without_declared(config), DType(self.to))


def _told(spec: Spec) -> tuple[str, DType, tuple[int, ...]]:
    return spec.name, spec.dtype, spec.shape


def _shortened(quantization: Mapping[str, Any] | None) -> str:
    """Return a `quantization_config` in a message, without its lists of modules."""
    if quantization is None:
        return "nothing"
    left = {key: value for key, value in quantization.items() if key not in ("ignore", "modules_to_not_convert")}
    text = str(left)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
