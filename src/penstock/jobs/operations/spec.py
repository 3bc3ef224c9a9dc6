"""Operation specs, from which every process makes the same operations: `{"op": "slerp", "t": 0.4}`.

In: specs, from a command line, a call or a message. Out: an `Operation`.
Not here: the operations themselves.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.arguments import require_type
from penstock.errors import ConfigError
from penstock.jobs.operations.operation import Chain, Copy, Operation, Rename
from penstock.transform.formats import is_format

OperationSpec = Mapping[str, object]
Operations = str | OperationSpec | Sequence[str | OperationSpec]
"""Operations as a caller passes them: texts as of `--op`, mappings, or a list of both."""

_MADE_BY: Mapping[str, str] = {
    "copy": "penstock.jobs.operations.operation:Copy",
    "rename": "penstock.jobs.operations.spec:_rename",
    "store": "penstock.jobs.operations.formats:Store",
    "dequantise": "penstock.jobs.operations.formats:Dequantise",
    "average": "penstock.jobs.operations.merge:Linear",
    "linear": "penstock.jobs.operations.merge:Linear",
    "slerp": "penstock.jobs.operations.merge:Slerp",
    "ties": "penstock.jobs.operations.merge:Ties",
    "lora-merge": "penstock.jobs.operations.lora:LoraMerge",
    "reshard": "penstock.jobs.operations.reshard:Reshard",
    "delta": "penstock.jobs.operations.delta:MakeDelta",
    "delta-apply": "penstock.jobs.operations.delta:ApplyDelta",
    "function": "penstock.jobs.operations.user_function:function_of",
}
"""Operation -> `module:name` of the class or function that makes it, called with the rest of its spec."""
_BESIDE = frozenset({"adapter_config", "delta", "heads", "quantization", "tied"})
"""Options that `jobs.request_defaults` reads from files next to the sources."""
COMPUTES_WITH_ALL = frozenset({"average", "linear", "lora-merge", "slerp", "ties"})
"""Operations that compute with several sources; a quantised source is dequantised first."""
_NUMBERS = frozenset({"t", "density", "scale", "weights"})
"""Options of merges that are numbers, or lists of numbers."""


def operation_specs(operations: Operations) -> list[OperationSpec]:
    """Return operations as mappings: one, or several in a list; each a mapping, or a text as of `--op`.

    Raises:
        ConfigError: it is none of these.
    """
    expected = 'operations as "dequantise", "slerp:t=0.4" or {"op": "slerp", "t": 0.4}, or a list of them'
    several = [operations] if isinstance(operations, str | Mapping) else operations
    require_type("operations", several, (list, tuple), expected)
    for operation in several:
        require_type("an operation", operation, (str, Mapping), expected)
    return [operation_spec(each) if isinstance(each, str) else each for each in several]


def operation_spec(text: str) -> dict[str, Any]:
    """Parse an operation that is written as on a command line.

    `average`; `linear:weights=0.3,0.7`; `dequantise:to=BF16`; `{"op": "rename", "rules": [["a", "b"]]}`;
    `package.module:function` is a user's own.

    Raises:
        ConfigError: it is none of these; the hint lists the operations.
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
    # A common mistake, and without this the user would read a list of operations that does not have the name.
    if is_format(text):
        raise ConfigError(f"{text!r} is a format, not an operation", hint=f"give to={text!r}, or --to {text}")
    if colon and "=" not in rest and not is_operation(name):
        return {"op": "function", "function": text}
    maker_of(name)
    spec = {"op": name}
    for part in rest.split(";") if rest else ():
        key, equals, value = part.partition("=")
        if not equals:
            hint = f"it takes {usage(name)}; see docs/convert.md"
            raise ConfigError(f"{part!r} of {text!r} is not key=value", hint=hint)
        spec[key] = [_value(item) for item in value.split(",")] if "," in value else _value(value)
    return spec


def _value(text: str) -> object:
    """Return a number, True or False where the text is one; else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def operation_of(specs: Sequence[OperationSpec]) -> Operation:
    """Return the operations, one after the other; none: a copy.

    Raises:
        ConfigError: an unknown operation, or options that it does not have.
    """
    operation: Operation | None = None
    for spec in specs:
        following = _make(dict(spec))
        operation = following if operation is None else Chain(operation, following)
    return Copy() if operation is None else operation


def usage(*names: str) -> str:
    """Return these operations, or all, each with its options: `slerp(t)`, `ties(density, weights=(), scale=1.0)`."""
    return ", ".join(f"{name}({', '.join(_parameters(name))})" for name in names or sorted(_MADE_BY))


def _parameters(name: str) -> list[str]:
    taken = inspect.signature(maker_of(name)).parameters.values()
    return [str(parameter.replace(annotation=parameter.empty)) for parameter in taken if parameter.name not in _BESIDE]


def is_operation(name: str) -> bool:
    """Return whether there is an operation of this name."""
    return name in _MADE_BY


def maker_of(name: str) -> Callable[..., Operation]:
    """Return the class or function that makes this operation. ConfigError: there is no operation of this name."""
    if name not in _MADE_BY:
        raise ConfigError(f"no operation is called {name!r}", hint=f"one of {usage()}; see docs/convert.md")
    module, _, attribute = _MADE_BY[name].partition(":")
    maker: Callable[..., Operation] = getattr(importlib.import_module(module), attribute)
    return maker


def _make(spec: dict[str, Any]) -> Operation:
    name = str(spec.pop("op", None))
    prepared = spec.pop("dequantise", None) if name in COMPUTES_WITH_ALL else None
    spec = {key: _frozen(value) for key, value in spec.items()}
    if isinstance(spec.get("weights"), int | float):
        spec["weights"] = (float(spec["weights"]),)
    maker = maker_of(name)
    for key in () if name == "function" else _NUMBERS & spec.keys():
        values = spec[key] if isinstance(spec[key], tuple) else (spec[key],)
        if not all(isinstance(value, int | float) for value in values):
            raise ConfigError(f"{name}: {key}={spec[key]!r} is not a number", hint=f"it takes {usage(name)}")
    # Bound before the call, so that a TypeError from inside a user's class is not reported as a wrong option.
    try:
        inspect.signature(maker).bind(**spec)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}", hint=f"it takes {usage(name)}") from error
    operation = maker(**spec)
    if prepared is None:
        return operation
    return Chain(
        [Copy() if before is None else _make({"op": "dequantise", **before}) for before in prepared], operation
    )


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _rename(rules: Sequence[Sequence[str]]) -> Operation:
    if isinstance(rules, str) or any(isinstance(rule, str) or len(rule) != 2 for rule in rules):
        raise ConfigError("rename: rules are pairs of a pattern and a replacement", hint="see docs/convert.md")
    return Rename(tuple((pattern, replacement) for pattern, replacement in rules))
