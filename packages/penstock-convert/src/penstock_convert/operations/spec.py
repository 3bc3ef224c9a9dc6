"""Operation specs, from which every process creates the same operations: `{"op": "slerp", "t": 0.4}`.

`operation_spec` parses a spec from a string, `completed` adds missing options from files next to the sources, and every
process calls `operation_of` to create the operation. An operation is built in, or a user's object at `module:name`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from penstock.arguments import require_type
from penstock.config import Settings
from penstock.digest.leaf import LEAF_BYTES
from penstock.errors import ConfigError, OperationFailed, PenstockError, PlanError
from penstock.plan.tensor_parallel import heads_of
from penstock.storage.foreign_json import read_object
from penstock.storage.gguf import blocks_of
from penstock.storage.small_files import read_sibling
from penstock.storage.weight_set import WeightSet, build
from penstock.transform.formats import is_format
from penstock.types import Manifest, TensorTable
from penstock_convert.operations.operation import (
    FLOATS,
    Chain,
    CopyOperation,
    Operation,
    Rename,
    Unchanged,
    all_of,
    copy_recipe,
    only_source,
    specs_of,
    whole,
)
from penstock_convert.operations.stored import (
    CODES,
    CONFIG_FILES,
    QUANTIZATION_METADATA,
    declared,
    declared_by_writer,
    find,
)
from penstock_convert.plan.tasks import Recipe, TaskOutput

if TYPE_CHECKING:
    import torch

Options = Mapping[str, str] | None
"""Storage options, in the form that `load` accepts."""
OperationSpec = Mapping[str, object]
Operations = str | OperationSpec | Sequence[str | OperationSpec]
"""Operations from a caller: a string in the form of `--op`, a mapping, or a list of strings and mappings."""

_MAKERS: Mapping[str, str] = {
    "copy": "penstock_convert.operations.operation:CopyOperation",
    "rename": "penstock_convert.operations.spec:_rename",
    "store": "penstock_convert.operations.formats:StoreOperation",
    "dequantise": "penstock_convert.operations.spec:_dequantise",
    "gguf": "penstock_convert.operations.gguf:StoreGguf",
    "average": "penstock_convert.operations.merge:Linear",
    "linear": "penstock_convert.operations.merge:Linear",
    "slerp": "penstock_convert.operations.merge:Slerp",
    "ties": "penstock_convert.operations.merge:Ties",
    "lora-merge": "penstock_convert.operations.lora:LoraMerge",
    "reshard": "penstock_convert.operations.reshard:Reshard",
    "delta": "penstock_convert.operations.delta:MakeDelta",
    "delta-apply": "penstock_convert.operations.delta:ApplyDelta",
    "function": "penstock_convert.operations.spec:function_of",
}
"""Maps an operation to the `module:name` of the class or function that creates it from the rest of its spec. The values
are names instead of objects, so that a conversion imports only the modules of its own operations."""
_BESIDE = frozenset({"adapter_config", "blocks", "delta", "heads", "quantization", "tied"})
"""Options that `completed` reads from files next to the sources."""
COMPUTES_WITH_ALL = frozenset({"average", "linear", "lora-merge", "slerp", "ties"})
"""Operations that compute with several sources. Quantised sources are dequantised first."""
_NUMBERS = frozenset({"t", "density", "scale", "weights"})
"""Options of merges that are numbers or lists of numbers."""


COPIES = frozenset({"copy", "rename"})
"""Operations that leave every tensor unchanged."""


def is_copy(operations: Operations) -> bool:
    """Return whether these operations leave every tensor unchanged. Raise the same errors as `operation_specs`."""
    return all(str(spec.get("op")) in COPIES for spec in operation_specs(operations))


def operation_specs(operations: Operations) -> list[OperationSpec]:
    """Return one or several operations as mappings. Raise ConfigError for an invalid operation.

    Each operation is a mapping or a string as for `--op`.
    """
    expected = 'operations as "dequantise", "slerp:t=0.4" or {"op": "slerp", "t": 0.4}, or a list of them'
    several = [operations] if isinstance(operations, str | Mapping) else operations
    require_type("operations", several, (list, tuple), expected)
    for operation in several:
        require_type("an operation", operation, (str, Mapping), expected)
    return [operation_spec(each) if isinstance(each, str) else each for each in several]


def operation_spec(text: str) -> dict[str, Any]:
    """Parse an operation from a string as for `--op`.

    Examples are `average`, `linear:weights=0.3,0.7`, `dequantise:to=BF16` and `{"op": "rename", "rules": [["a",
    "b"]]}`. `package.module:function` is a user's operation.

    Raises:
        ConfigError: the string is invalid. The error's hint lists the operations.
    """
    if text.startswith("{"):
        try:
            spec = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{text!r} is not JSON: {error}") from error
        if not isinstance(spec, dict):
            raise ConfigError(f"{text!r} is not an operation", hint='write {"op": NAME, ...}')
        return spec
    name, colon, rest = text.partition(":")
    # Users often confuse formats with operations, and a list of the operations would not explain the error.
    if is_format(text):
        raise ConfigError(f"{text!r} is a format, not an operation", hint=f"use to={text!r} or --to {text}")
    # A user's `module:function` contains no `=`, and its module does not have the name of a built-in operation.
    if colon and "=" not in rest and not is_operation(name):
        return {"op": "function", "function": text}
    # Raise the error for an unknown name before parsing its options.
    maker_of(name)
    spec = {"op": name}
    for part in rest.split(";") if rest else ():
        key, equals, value = part.partition("=")
        if not equals:
            hint = f"use {usage(name)}; see docs/convert/convert.md"
            raise ConfigError(f"{part!r} in {text!r} does not have the form key=value", hint=hint)
        spec[key] = [_value(item) for item in value.split(",")] if "," in value else _value(value)
    return spec


def _value(text: str) -> object:
    """Parse a string as a number or a bool, or return the string itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def operation_of(specs: Sequence[OperationSpec]) -> Operation:
    """Return one operation that applies all specs in order. An empty list creates a copy operation.

    Raises:
        ConfigError: an operation or an option is unknown or invalid.
    """
    operation: Operation | None = None
    for spec in specs:
        following = _make(dict(spec))
        operation = following if operation is None else Chain(operation, following)
    return CopyOperation() if operation is None else operation


def usage(name: str) -> str:
    """Return an operation with its options: `slerp(t)`, `ties(density, weights=(), scale=1.0)`."""
    taken = inspect.signature(maker_of(name)).parameters.values()
    options = (parameter.replace(annotation=parameter.empty) for parameter in taken if parameter.name not in _BESIDE)
    return f"{name}({', '.join(map(str, options))})"


def usages() -> list[str]:
    """Return all operations with their options, sorted by name."""
    return [usage(name) for name in sorted(_MAKERS)]


def is_operation(name: str) -> bool:
    """Return whether a built-in operation has this name."""
    return name in _MAKERS


def maker_of(name: str) -> Callable[..., Operation]:
    """Return the class or function that creates an operation. Raise ConfigError if no operation has this name."""
    if name not in _MAKERS:
        hint = f"use one of {', '.join(usages())}; see docs/convert/convert.md"
        # Show the most similar name first, because the usual cause is a typo and the list is long.
        if near := difflib.get_close_matches(name.lower().replace("_", "-"), _MAKERS, n=1, cutoff=0.75):
            hint = f"did you mean {near[0]!r}? Otherwise {hint}"
        raise ConfigError(f"unknown operation {name!r}", hint=hint)
    module, _, attribute = _MAKERS[name].partition(":")
    maker: Callable[..., Operation] = getattr(importlib.import_module(module), attribute)
    return maker


def _make(spec: dict[str, Any]) -> Operation:
    """Create an operation from a spec. The operation dequantises its sources if the spec has the key `dequantise`."""
    name = str(spec.pop("op", None))
    prepared = spec.pop("dequantise", None) if name in COMPUTES_WITH_ALL else None
    # JSON and messages contain lists, but operations are immutable, so convert lists to tuples.
    spec = {key: _frozen(value) for key, value in spec.items()}
    # On a command line `weights=0.5` is a number, because only a comma creates a list.
    if isinstance(spec.get("weights"), int | float):
        spec["weights"] = (float(spec["weights"]),)
    maker = maker_of(name)
    for key in () if name == "function" else _NUMBERS & spec.keys():
        values = spec[key] if isinstance(spec[key], tuple) else (spec[key],)
        if not all(isinstance(value, int | float) for value in values):
            raise ConfigError(f"{name}: {key}={spec[key]!r} is not a number", hint=f"use {usage(name)}")
    # Bind the arguments first, so that a TypeError inside a user's class is not reported as a wrong option.
    try:
        inspect.signature(maker).bind(**spec)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}", hint=f"use {usage(name)}") from error
    operation = maker(**spec)
    if prepared is None:
        return operation
    return Chain(
        [CopyOperation() if before is None else _make({"op": "dequantise", **before}) for before in prepared], operation
    )


def _frozen(value: Any) -> Any:
    """Replace every list in a value with a tuple."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _dequantise(
    to: str = "BF16", quantization: Mapping[str, Any] | None = None, blocks: Mapping[str, str] | None = None
) -> Operation:
    """Create a `Dequantise`, or a `DequantiseBlocks` for GGUF blocks."""
    if blocks:
        from penstock_convert.operations.gguf import DequantiseBlocks

        return DequantiseBlocks(to, blocks)
    from penstock_convert.operations.formats import Dequantise

    return Dequantise(to, quantization)


def stored_as(to: str) -> OperationSpec:
    """Return the operation spec for the argument `to`, which is a format, `gguf` or `gguf:TYPE`."""
    name, colon, kind = to.partition(":")
    if name != "gguf":
        return {"op": "store", "format": to}
    return {"op": "gguf", "type": kind} if colon else {"op": "gguf"}


def _rename(rules: Sequence[Sequence[str]]) -> Operation:
    """Create a `Rename`. Raise ConfigError unless each rule is a pair."""
    if isinstance(rules, str) or any(isinstance(rule, str) or len(rule) != 2 for rule in rules):
        raise ConfigError(
            "rename: rules must be pairs of a pattern and a replacement", hint="see docs/convert/convert.md"
        )
    return Rename(tuple((pattern, replacement) for pattern, replacement in rules))


def completed(
    specs: Sequence[OperationSpec],
    sources: Sequence[WeightSet],
    places: Sequence[str],
    settings: Settings,
    options: Options,
) -> list[OperationSpec]:
    """Complete missing options in the specs from the sources, and return the specs.

    Only the first operation and `dequantise` can have options that depend on the sources.

    Args:
        places: the URI for reading the small files of each source, including any user name and query of a URL.

    Raises:
        PlanError: a required file is not next to the source, or a delta has a different base.
        FormatError: a file next to the sources cannot be decoded.
        SourceError: a file next to the sources cannot be read.
    """
    if not specs:
        _check_blocks({}, sources)
        return []
    first = dict(specs[0])
    # Later operations do not read the sources, so only a later `dequantise` depends on them.
    op = first.get("op")
    if op == "lora-merge" and "adapter_config" not in first and len(sources) == 2:
        raw = read_sibling(places[1], "adapter_config.json", settings, options)
        if raw is None:
            hint = "pass adapter_config=..."
            raise PlanError(f"there is no adapter_config.json next to {sources[1].uri}", hint=hint)
        first["adapter_config"] = _json(raw, sources[1].uri, "adapter_config.json")
    if op == "lora-merge" and "tied" not in first and sources:
        raw = read_sibling(places[0], "config.json", settings, options)
        first["tied"] = _tied(_json(raw, sources[0].uri)) if raw is not None else None
    if op == "reshard" and len(sources) > 1:
        _check_ranks(sources)
    if op == "reshard" and "heads" not in first and sources:
        raw = read_sibling(places[0], "config.json", settings, options)
        first["heads"] = list(heads_of(_json(raw, sources[0].uri))) if raw is not None else []
    elif op in {"delta", "delta-apply"}:
        if len(sources) != 2:
            raise PlanError(f"{op} takes two sources, not {len(sources)}")
        make = (
            _make_delta if op == "delta" else partial(_read_delta, place=places[1], settings=settings, options=options)
        )
        first["delta"] = make(_digested(sources[0]), sources[1])
    # Sums of codes are meaningless, so each quantised source is dequantised first.
    if op in COMPUTES_WITH_ALL and "dequantise" not in first:
        quantised = [_quantised(*each, settings, options) for each in zip(sources, places, strict=True)]
        if any(dequantise is not None for dequantise in quantised):
            first["dequantise"] = quantised
    _check_blocks(first, sources)
    blocks = _blocks(sources[0]) if sources else {}

    def complete(spec: OperationSpec) -> OperationSpec:
        """Add the options that depend on the first source."""
        if spec.get("op") in {"dequantise", "gguf"} and blocks:
            return {"blocks": blocks, **spec}
        if spec.get("op") == "dequantise" and "quantization" not in spec and sources:
            return {**spec, "quantization": _quantization(sources[0], places[0], settings, options)}
        # Add this option only to the first operation, because an earlier operation may have dequantised the tensors.
        if spec is first and op == "store" and "quantization" not in spec and sources and _has_codes(sources[0]):
            quantization = _quantization(sources[0], places[0], settings, options)
            return spec if quantization is None else {**spec, "quantization": quantization}
        return spec

    return [complete(spec) for spec in (first, *specs[1:])]


def _blocks(source: WeightSet) -> dict[str, str]:
    """Return the types of a source's quantised GGUF tensors by name."""
    return {name: blocks.type for name, blocks in blocks_of(source.manifest).items()}


def _check_blocks(first: OperationSpec, sources: Sequence[WeightSet]) -> None:
    """Raise PlanError if an operation would treat GGUF blocks as values."""
    if first.get("op") in {"dequantise", "gguf"} | COMPUTES_WITH_ALL:
        return
    for source in sources:
        for name, kind in _blocks(source).items():
            message = f"the source is a GGUF file that stores the tensor as {kind}, which other formats cannot express"
            hint = "put `dequantise` first, or write a GGUF file with to='gguf'"
            raise PlanError(message, uri=source.uri, tensor=name, hint=hint)


def _has_codes(source: WeightSet) -> bool:
    """Return whether any tensor has a dtype of codes. Without these tensors the configuration need not be read."""
    return not CODES.isdisjoint(source.manifest.tensors.dtypes)


def _quantised(source: WeightSet, place: str, settings: Settings, options: Options) -> dict[str, Any] | None:
    """Return the options of `dequantise` for a source, or None if no tensor in the source is quantised."""
    if blocks := _blocks(source):
        return {"blocks": blocks}
    table = source.manifest.tensors
    config = _quantization(source, place, settings, options)
    # Check the tensors too, because some checkpoints contain codes and scales without any declaration.
    stored = find(zip(table.names, table.dtypes, table.shapes, strict=True), config)
    return {"quantization": config} if config is not None or stored.any else None


def _quantization(source: WeightSet, place: str, settings: Settings, options: Options) -> dict[str, Any] | None:
    """Return the `quantization_config` of a source, or None."""
    raw = read_sibling(place, "config.json", settings, options)
    config = None if raw is None else declared(_json(raw, source.uri))
    if config is not None:
        return dict(config)
    # ComfyUI declares the format of each layer in a file's header. Penstock recognises FP8 by its scales instead.
    for file in source.manifest.files:
        if layers := _comfy_formats(file.metadata.get(QUANTIZATION_METADATA, "")):
            return {"quant_method": f"of {QUANTIZATION_METADATA}: {', '.join(sorted(layers))}"}
    # Read separate files in which some writers declare the quantisation. Otherwise codes would be treated as weights.
    for name in (*CONFIG_FILES, "params.json"):
        raw = read_sibling(place, name, settings, options)
        if raw is not None and (found := declared_by_writer(name, _json(raw, source.uri, name))) is not None:
            return dict(found)
    return None


def _comfy_formats(text: str) -> set[str]:
    """Return the formats in a file's ComfyUI metadata, except formats that can be recognised from the scales alone."""
    try:
        layers = json.loads(text)["layers"].values() if text else []
        return {str(layer.get("format")) for layer in layers} - {"float8_e4m3fn", "float8_e5m2"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {"unknown"}


def _json(raw: bytes, uri: str, name: str = "config.json") -> dict[str, Any]:
    """Decode a configuration file. Raise FormatError unless the file contains a JSON object."""
    return read_object(raw, uri, hint=f"repair {name} of this source")


_RANK = re.compile(r"rank[-_](\d+)(?:[-_]of[-_](\d+))?")


def _check_ranks(sources: Sequence[WeightSet]) -> None:
    """Raise PlanError if rank numbers in the sources' names contradict their order, or for a duplicate source."""
    ranks = [_RANK.findall(source.uri.rstrip("/").rpartition("/")[2]) for source in sources]
    for rank, (source, numbers) in enumerate(zip(sources, ranks, strict=True)):
        number, count = numbers[-1] if numbers else ("", "")
        if all(ranks) and int(number) != rank:
            hint = "pass every rank once, in order, with rank 0 first"
            raise PlanError(
                f"reshard: source {rank} is rank {int(number)} according to its name: {source.uri}", hint=hint
            )
        if count and int(count) != len(sources) and len(sources) > 1:
            raise PlanError(f"reshard: {source.uri} is one of {int(count)} ranks, but there are {len(sources)} sources")
    seen: dict[str, str] = {}
    # Compare revisions only if sources have digests. Without digests all ranks of a model have the same revision.
    for source in sources:
        revision = source.manifest.revision if source.manifest.leaves is not None else source.uri
        if revision in seen:
            raise PlanError(f"reshard: {source.uri} has the same bytes as {seen[revision]}", hint="pass each rank once")
        seen[revision] = source.uri


def _tied(config: dict[str, Any]) -> bool | None:
    """Return whether a transformers configuration ties embedding and head, or None if the option is missing."""
    text = config.get("text_config")
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None)
    return None if tied is None else bool(tied)


def _digested(source: WeightSet) -> Manifest:
    """Return a source's manifest with digests. If digests are missing, read the whole source to compute them."""
    # Compute the digests again if the leaf size differs, because only leaves of the same size can be compared.
    stated = source.manifest
    return stated if stated.leaves is not None and stated.leaf_bytes == LEAF_BYTES else build(source)


def _make_delta(base: Manifest, new: WeightSet) -> bytes:
    """Return the description of the changes from `base` to `new`."""
    from penstock_convert.operations.delta import delta_of, encoded

    return encoded(delta_of(base, _digested(new)))


def _read_delta(base: Manifest, delta: WeightSet, *, place: str, settings: Settings, options: Options) -> bytes:
    """Read the description next to a delta's weights. Raise PlanError if the delta is for a different base."""
    from penstock_convert.operations.delta import FILE, decoded

    raw = read_sibling(place, FILE, settings, options)
    if raw is None:
        raise PlanError(
            f"there is no {FILE} next to {delta.uri}", hint="pass the result of `delta` as the second source"
        )
    changes = decoded(raw)
    if changes.base != base.revision:
        raise PlanError(f"the delta is for revision {changes.base}, but the base has revision {base.revision}")
    if changes.leaf_bytes != LEAF_BYTES:
        raise PlanError(f"the delta has leaves of {changes.leaf_bytes} bytes, but only {LEAF_BYTES} is supported")
    return raw


def function_of(function: str, **options: Any) -> Operation:
    """Return the operation at `module:name`.

    Args:
        function: import path of an `Operation`, of a class that creates an `Operation` from `options`, or of a function
            that takes a tensor and its name.
        options: arguments for the class.

    Raises:
        ConfigError: the path does not exist or names a different kind of object.
    """
    module, _, name = function.partition(":")
    try:
        target: Any = importlib.import_module(module)
    except PenstockError:
        # Do not wrap MissingExtra, which says that the module exists but needs a package.
        raise
    except ImportError as error:
        raise ConfigError(f"{function}: {error}", hint="add the module's directory to PYTHONPATH") from error
    # Resolve dots after the colon, because the name may refer to a static method or a nested function.
    for part in name.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"module {module} has no attribute {name!r}")
        target = getattr(target, part)
    if isinstance(target, type):
        target = target(**options)
    # Check attributes instead of the class, because a user's class need not inherit from a class in Penstock.
    if all(hasattr(target, verb) for verb in ("recipes", "run", "config", "name")):
        return target  # type: ignore[no-any-return]
    if not callable(target) or options:
        raise ConfigError(
            f"{function} is neither an operation nor a function of a tensor", hint="see docs/convert/convert.md"
        )
    return Function(function, target)


def code_of(operation: Operation) -> str:
    """Return a digest of the module files of user operations, or "" for built-in operations.

    The digest covers the named module and the module that defines the function, but no modules that they import.
    """
    if isinstance(operation, Chain):
        return "".join(map(code_of, operation.operations))
    # `Function` wraps a plain function, so use the module of the function instead of the module of the class.
    modules = [type(operation).__module__]
    if isinstance(operation, Function):
        modules = [operation.path.partition(":")[0], getattr(operation.call, "__module__", None) or ""]
    theirs = (name for name in dict.fromkeys(modules) if not name.startswith(("penstock.", "penstock_convert.")))
    paths = (getattr(sys.modules.get(name), "__file__", None) for name in theirs)
    return "".join(blake3(Path(path).read_bytes()).hexdigest() for path in paths if path)


@dataclass(frozen=True, slots=True)
class Function(Unchanged):
    """Calls a user's function with floating-point tensors and their names.

    The function returns a tensor with the same shape and dtype. The function may have these attributes:

    - `rows = True`: the function may be called with some rows of a tensor.
    - `names`: the function is called only for tensors whose names contain this pattern.
    - `raw = True`: the function accepts the tensors of a quantised checkpoint as they are stored.
    """

    path: str
    """Import path, `module:name`."""
    call: Callable[[torch.Tensor, str], torch.Tensor]

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return self.path

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`.

        Raises:
            PlanError: the function selects a quantised tensor, but does not set `raw`.
        """
        wanted, rows = str(getattr(self.call, "names", "")), bool(getattr(self.call, "rows", False))
        specs = specs_of(only_source(sources, self.path))
        if not getattr(self.call, "raw", False):
            stored = find((spec.name, spec.dtype, spec.shape) for spec in specs)
            # Refuse codes too. Otherwise the function would change only the scales instead of the weight.
            if quantised := next((name for name in stored.names if re.search(wanted, name)), ""):
                why = "is stored quantised, and has no meaning without its scales"
                if quantised in stored.plain:
                    why = "has FP8 values, but functions are only called with wider floats"
                message = f"{self.path}: the tensor {why}"
                function = self.path.rpartition(":")[2]
                hint = "put `dequantise` before"
                hint += (
                    f", select others with {function}.names, or set {function}.raw = True to receive floats as stored"
                )
                raise PlanError(message, tensor=quantised, hint=hint)
        recipes = []
        for spec in specs:
            if spec.dtype not in FLOATS or not re.search(wanted, spec.name):
                recipes.append(copy_recipe(0, spec))
            elif rows and spec.shape:
                inputs = (whole(0, spec),)
                recipes.append(Recipe(outputs=(TaskOutput(spec=spec),), inputs=inputs, num_rows=spec.shape[0], align=1))
            else:
                inputs = (all_of(0, spec),)
                recipes.append(Recipe(outputs=(TaskOutput(spec=spec, per=0),), inputs=inputs, num_rows=1, align=0))
        return recipes

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        import torch

        spec = recipe.outputs[0].spec
        (tensor,) = inputs
        assert tensor is not None
        if spec.dtype not in FLOATS or not re.search(str(getattr(self.call, "names", "")), spec.name):
            return [tensor]
        result = self.call(tensor, spec.name)
        # Check the result here instead of in the worker, which does not know the function's path.
        if not isinstance(result, torch.Tensor) or (result.dtype, result.shape) != (tensor.dtype, tensor.shape):
            returned = (
                f"{result.dtype} {list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            )
            message = f"{self.path} returned {returned}, not {tensor.dtype} {list(tensor.shape)}"
            raise OperationFailed(message, tensor=spec.name, hint="write a class to change dtypes or shapes")
        return [result]
