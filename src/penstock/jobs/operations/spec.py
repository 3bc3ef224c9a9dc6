"""Operations in words, so that every process makes the same ones: `{"op": "slerp", "t": 0.4}`.

In: words, from a command line, a call or a message. Out: an `Operation`.
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

Word = Mapping[str, object]
Operations = str | Word | Sequence[str | Word]
"""Operations as a caller gives them: texts as of `--op`, mappings, or a list of both."""

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
"""Operation -> `module:name` of the class or function that makes it, called with the rest of its words."""
_BESIDE = frozenset({"adapter_config", "delta", "heads", "quantization", "tied"})
"""Words that `jobs.request_defaults` finds beside the sources."""
COMPUTES_WITH_ALL = frozenset({"average", "linear", "lora-merge", "slerp", "ties"})
"""Operations that compute with several sources, each of which is dequantised before where it is quantised."""
_NUMBERS = frozenset({"t", "density", "scale", "weights"})
"""Words of merges that are numbers, or lists of them."""


def words_of(operations: Operations) -> list[Word]:
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
    """Return the words of an operation that is written as on a command line.

    `average`; `linear:weights=0.3,0.7`; `dequantise:to=BF16`; `{"op": "rename", "rules": [["a", "b"]]}`;
    `package.module:function` is a user's own.

    Raises:
        ConfigError: it is none of these, and the hint says what there is.
    """
    if text.startswith("{"):
        try:
            words = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{text!r} is not JSON: {error}") from error
        if not isinstance(words, dict):
            raise ConfigError(f"{text!r} is not an operation", hint='write {"op": NAME, ...}')
        return words
    name, colon, rest = text.partition(":")
    if is_format(text):
        raise ConfigError(f"{text!r} is a format, not an operation", hint=f"give to={text!r}, or --to {text}")
    if colon and "=" not in rest and not is_operation(name):
        return {"op": "function", "function": text}
    maker_of(name)
    words = {"op": name}
    for part in rest.split(";") if rest else ():
        key, equals, value = part.partition("=")
        if not equals:
            hint = f"it takes {usage(name)}; see docs/convert.md"
            raise ConfigError(f"{part!r} of {text!r} is not key=value", hint=hint)
        words[key] = [_value(item) for item in value.split(",")] if "," in value else _value(value)
    return words


def _value(text: str) -> object:
    """Return a number, True or False where the text is one; else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def operation_of(words: Sequence[Word]) -> Operation:
    """Return the operations, one after the other; none: a copy.

    Raises:
        ConfigError: an unknown operation, or words that are not its own.
    """
    found: Operation | None = None
    for word in words:
        made = _make(dict(word))
        found = made if found is None else Chain(found, made)
    return Copy() if found is None else found


def usage(*names: str) -> str:
    """Operations, or all of them, each with the words it takes: `slerp(t)`, `ties(density, weights=(), scale=1.0)`."""
    return ", ".join(f"{name}({', '.join(_parameters(name))})" for name in names or sorted(_MADE_BY))


def _parameters(name: str) -> list[str]:
    taken = inspect.signature(maker_of(name)).parameters.values()
    return [str(one.replace(annotation=one.empty)) for one in taken if one.name not in _BESIDE]


def is_operation(name: str) -> bool:
    """Return whether one is called so."""
    return name in _MADE_BY


def maker_of(name: str) -> Callable[..., Operation]:
    """Return what makes an operation of its words. ConfigError: nothing is called so."""
    if name not in _MADE_BY:
        raise ConfigError(f"no operation is called {name!r}", hint=f"one of {usage()}; see docs/convert.md")
    module, _, attribute = _MADE_BY[name].partition(":")
    made: Callable[..., Operation] = getattr(importlib.import_module(module), attribute)
    return made


def _make(word: dict[str, Any]) -> Operation:
    name = str(word.pop("op", None))
    prepared = word.pop("dequantise", None) if name in COMPUTES_WITH_ALL else None
    word = {key: _frozen(value) for key, value in word.items()}
    if isinstance(word.get("weights"), int | float):
        word["weights"] = (float(word["weights"]),)
    maker = maker_of(name)
    for key in () if name == "function" else _NUMBERS & word.keys():
        values = word[key] if isinstance(word[key], tuple) else (word[key],)
        if not all(isinstance(value, int | float) for value in values):
            raise ConfigError(f"{name}: {key}={word[key]!r} is not a number", hint=f"it takes {usage(name)}")
    try:
        inspect.signature(maker).bind(**word)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}", hint=f"it takes {usage(name)}") from error
    made = maker(**word)
    if prepared is None:
        return made
    return Chain([Copy() if one is None else _make({"op": "dequantise", **one}) for one in prepared], made)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(one) for one in value) if isinstance(value, list | tuple) else value


def _rename(rules: Sequence[Sequence[str]]) -> Operation:
    if isinstance(rules, str) or any(isinstance(one, str) or len(one) != 2 for one in rules):
        raise ConfigError("rename: rules are pairs of a pattern and a replacement", hint="see docs/convert.md")
    return Rename(tuple((pattern, replacement) for pattern, replacement in rules))
