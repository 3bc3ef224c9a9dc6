"""Operations for GGUF files. `DequantiseBlocks` restores quantised values, and `StoreGguf` writes a GGUF file.

`ggml` defines the bits of each type, and `storage.gguf` defines the file format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, OperationFailed, PlanError
from penstock.storage.gguf import BLOCK_TYPES, BY_NAME, PLAIN, GgufHeader
from penstock.types import DType, TensorTable
from penstock_convert.operations.formats import Dequantise, with_dtype
from penstock_convert.operations.gguf_header import Info, encode_header, number_field, text_field
from penstock_convert.operations.operation import (
    FLOATS,
    Chain,
    Operation,
    Unchanged,
    all_of,
    copy_recipe,
    only_source,
    specs_of,
    whole,
)
from penstock_convert.operations.stored import find
from penstock_convert.plan.tasks import Recipe, Spec, TaskOutput

if TYPE_CHECKING:
    import torch

_CACHED = 1 << 18
"""Number of elements computed at a time, as in `formats`."""
_NUMBERS = {kind.value: number for number, kind in PLAIN.items()} | {
    kind.name: number for number, kind in BLOCK_TYPES.items()
}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""Maps the type of most tensors to `general.file_type`. Source: enum llama_ftype."""
_OWN_KEYS = ("general.alignment", "split.")
"""Metadata about a file's own layout, which must not be copied to another file."""
_OF_TYPES = ("general.file_type", "general.quantization_version")


@dataclass(frozen=True, slots=True)
class DequantiseBlocks:
    """Restores the values of quantised tensors in GGUF files. Other tensors are copied.

    Args:
        to: dtype of the restored tensors.
        blocks: type of each quantised tensor in the source.

    Raises:
        ConfigError: `to` is not a supported dtype.
    """

    to: str = "BF16"
    blocks: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        Dequantise(self.to)

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"dequantise to {self.to}"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`. Raise PlanError if a type's values cannot be read."""
        specs = specs_of(only_source(sources, self.name))
        self._check_readable([spec for spec in specs if spec.name in self.blocks])
        return [self._recipe(spec) if spec.name in self.blocks else copy_recipe(0, spec) for spec in specs]

    def _check_readable(self, specs: Sequence[Spec]) -> None:
        import torch

        from penstock_convert.operations.ggml import dequantise

        for kind in dict.fromkeys(self.blocks[spec.name] for spec in specs):
            try:
                dequantise(kind, torch.zeros((1, BY_NAME[kind].nbytes), dtype=torch.uint8))
            except OperationFailed as error:
                tensor = next(spec.name for spec in specs if self.blocks[spec.name] == kind)
                raise PlanError(f"{self.name}: {error.message}", tensor=tensor, hint=error.hint) from error

    def _recipe(self, spec: Spec) -> Recipe:
        kind = BY_NAME[self.blocks[spec.name]]
        shape = (*spec.shape[:-1], spec.shape[-1] // kind.nbytes * kind.elements)
        out = Spec(name=spec.name, dtype=DType(self.to), shape=shape)
        # A 1-D tensor is a single row of the recipe.
        if len(shape) == 1:
            return Recipe(outputs=(TaskOutput(spec=out, per=0),), inputs=(all_of(0, spec),), num_rows=1, align=0)
        return Recipe(outputs=(TaskOutput(spec=out),), inputs=(whole(0, spec),), num_rows=shape[0], align=1)

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        import torch

        from penstock.transform.quantize import torch_dtype
        from penstock_convert.operations.ggml import dequantise

        (blocks,) = inputs
        assert blocks is not None
        if recipe.copies:
            return [blocks]
        name = recipe.inputs[0].spec.name
        out = recipe.outputs[0].spec
        kind, dtype = self.blocks[name], torch_dtype(out.dtype)
        rows = blocks.reshape(-1, blocks.shape[-1])
        result = torch.empty((len(rows), out.shape[-1]), dtype=dtype, device=blocks.device)
        step = max(1, _CACHED // max(1, out.shape[-1]))
        for at in range(0, len(rows), step):
            result[at : at + step] = dequantise(kind, rows[at : at + step]).to(dtype)
        return [result.reshape(*blocks.shape[:-1], out.shape[-1])]

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation.config`."""
        return with_dtype(config, DType(self.to))


class StoreGguf(Unchanged):
    """Stores tensors in one GGUF file, as the last operation of a conversion.

    Floating-point tensors with at least two dims are stored in `type`. Vectors are stored as F32, as in llama.cpp, and
    tensors whose rows cannot be divided into blocks are stored as F16. Names and the order of heads stay unchanged,
    although llama.cpp expects the names and the order from its own converter.

    Args:
        type: F32, F16, BF16 or Q8_0. `keep` means that every tensor keeps its type.
        architecture: `general.architecture` of the result if the source is not a GGUF file.
        blocks: type of each quantised tensor in the source.

    Raises:
        ConfigError: the type is unknown.
    """

    def __init__(
        self, type: str = "keep", architecture: str = "unknown", blocks: Mapping[str, str] | None = None
    ) -> None:
        if type not in {"keep", *_FILE_TYPES}:
            hint = f"pass keep, {', '.join(_FILE_TYPES)}"
            raise ConfigError(f"cannot write GGUF tensors of type {type!r}", hint=hint)
        self._type = type
        self._architecture = architecture
        self._blocks = dict(blocks or {})
        # The type number of each tensor and the tensor's shape in elements, which `recipes` sets before `run`.
        self._infos: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._is_changed = type != "keep"

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"to GGUF ({self._type})"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`. Raise PlanError for quantised codes, and for a tensor that GGUF cannot store."""
        specs = specs_of(only_source(sources, self.name))
        # GGUF cannot store the scales of other formats, so a reader would treat codes as numbers.
        found = find((spec.name, spec.dtype, spec.shape) for spec in specs if spec.name not in self._blocks)
        if codes := next(iter((*(layout.codes for layout in found.stored.values()), *found.unread)), None):
            message = f"{self.name}: the source tensor is quantised, but GGUF cannot store its scales"
            raise PlanError(message, tensor=codes, hint="put `dequantise` before this operation")
        return [self._recipe(spec) for spec in specs]

    def _recipe(self, spec: Spec) -> Recipe:
        """Return the recipe for a tensor, and record the tensor's type."""
        if len(spec.shape) > 4:
            raise PlanError(
                f"{self.name}: GGUF tensors have at most 4 dims, but this tensor has {len(spec.shape)}",
                tensor=spec.name,
            )
        stored = self._blocks.get(spec.name) if spec.dtype is DType.U8 else None
        if stored is not None:
            if self._type not in {"keep", stored}:
                message = f"{self.name}: the source stores the tensor as {stored}"
                raise PlanError(message, tensor=spec.name, hint="put `dequantise:to=F32` before this operation")
            kind = BY_NAME[stored]
            self._infos[spec.name] = _NUMBERS[stored], (*spec.shape[:-1], spec.shape[-1] // kind.nbytes * kind.elements)
            return copy_recipe(0, spec)
        # An earlier operation dequantised this tensor, so the source's metadata about types is no longer correct.
        self._is_changed |= spec.name in self._blocks
        wanted = self._wanted(spec)
        if wanted == "Q8_0":
            kind = BY_NAME["Q8_0"]
            self._infos[spec.name] = _NUMBERS[wanted], spec.shape
            out = Spec(
                name=spec.name,
                dtype=DType.U8,
                shape=(*spec.shape[:-1], spec.shape[-1] // kind.elements * kind.nbytes),
            )
            return Recipe(outputs=(TaskOutput(spec=out),), inputs=(whole(0, spec),), num_rows=spec.shape[0], align=1)
        if wanted not in {kind.value for kind in PLAIN.values()}:
            hint = "leave the tensor out with a `rename` to an empty name, or put `dequantise` before this operation"
            raise PlanError(f"{self.name}: GGUF does not support {spec.dtype}", tensor=spec.name, hint=hint)
        self._infos[spec.name] = _NUMBERS[wanted], spec.shape
        if wanted == spec.dtype.value:
            return copy_recipe(0, spec)
        out = Spec(name=spec.name, dtype=DType(wanted), shape=spec.shape)
        if not spec.shape:
            return Recipe(outputs=(TaskOutput(spec=out, per=0),), inputs=(all_of(0, spec),), num_rows=1, align=0)
        return Recipe(outputs=(TaskOutput(spec=out),), inputs=(whole(0, spec),), num_rows=spec.shape[0], align=1)

    def _wanted(self, spec: Spec) -> str:
        if self._type == "keep" or spec.dtype not in FLOATS:
            return spec.dtype.value
        if len(spec.shape) < 2:
            return "F32"
        return "F16" if self._type == "Q8_0" and spec.shape[-1] % BY_NAME["Q8_0"].elements else self._type

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`. Raise OperationFailed if Q8_0 cannot represent a value."""
        import torch

        from penstock.transform.quantize import torch_dtype
        from penstock_convert.operations.ggml import quantise_q8_0

        (source,) = inputs
        assert source is not None
        if recipe.copies:
            return [source]
        out = recipe.outputs[0].spec
        if out.dtype is not DType.U8:
            return [source.to(torch_dtype(out.dtype))]
        rows = source.reshape(-1, source.shape[-1])
        result = torch.empty((len(rows), out.shape[-1]), dtype=torch.uint8, device=source.device)
        step = max(1, _CACHED // max(1, source.shape[-1]))
        try:
            for at in range(0, len(rows), step):
                result[at : at + step] = quantise_q8_0(rows[at : at + step])
        except OperationFailed as error:
            error.tensor = out.name
            raise
        return [result.reshape(*source.shape[:-1], out.shape[-1])]

    def header(self, table: TensorTable, source: GgufHeader | None) -> bytes:
        """Return the header of the file. Call `recipes` before this method.

        Args:
            table: the result's tensors, with offsets relative to the first tensor's bytes.
            source: header of the GGUF file whose metadata is copied to the result. None if the source has a different
                format.
        """
        dropped = (*_OWN_KEYS, *_OF_TYPES) if self._is_changed else _OWN_KEYS
        fields: list[bytes] = [] if source is not None else [text_field("general.architecture", self._architecture)]
        if source is not None:
            fields += [field.raw for key, field in source.fields.items() if not key.startswith(dropped)]
        if self._type != "keep":
            fields += [number_field(key, value) for key, value in self._of_types()]
        rows = sorted(range(len(table)), key=lambda row: int(table.offset[row]))
        # Also sort by the row in the table, because an empty tensor has the same offset as the next tensor.
        infos = [Info(table.names[row], *self._infos[table.names[row]], int(table.offset[row])) for row in rows]
        return encode_header(fields, infos)

    def _of_types(self) -> list[tuple[str, int]]:
        """Return the metadata entries that state the type of most tensors."""
        values = [("general.file_type", _FILE_TYPES[self._type])]
        return [*values, ("general.quantization_version", 2)] if self._type == "Q8_0" else values


def gguf_of(operation: Operation) -> StoreGguf | None:
    """Return the operation that writes a GGUF file, or None. Raise ConfigError if that operation is not last."""
    steps = _steps(operation)
    if any(isinstance(step, StoreGguf) for step in steps[:-1]):
        raise ConfigError("gguf must be the last operation of a conversion")
    last = steps[-1]
    return last if isinstance(last, StoreGguf) else None


def _steps(operation: Operation) -> list[Operation]:
    if not isinstance(operation, Chain):
        return [operation]
    return [step for part in operation.operations for step in _steps(part)]
