"""Values for new fixtures: from a message's type alone, every field set, none at its default.

In: a class. Out: a value of it, the same in every run.
Not here: the fixtures, which are data (`fixtures`): a sample is made once, when a message is recorded.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, get_origin

import msgspec
import numpy as np
from msgspec import inspect

TEXTS = ("2.4", "a1b2c3d4e5f60718293a4b5c6d7e8f90", "http://10.0.0.7:41234", "10.0.0.7", "w1-" + "ab" * 32)
"""Texts for the patterns of fields. The first that fits is taken."""


def sample(kind: type) -> Any:
    """Return a value of `kind` with every field set."""
    return _value(inspect.type_info(kind), kind.__name__)


def _number(word: str) -> int:
    # Above every `start`: some values check that a range is one.
    return 1 + zlib.crc32(word.encode()) % 89 + 100 * word.startswith("stop")


def _value(kind: inspect.Type, word: str, default: Any = inspect.NODEFAULT) -> Any:
    match kind:
        case inspect.Metadata():
            return _value(kind.type, word, default)
        case inspect.UnionType():
            parts = (part for part in kind.types if not isinstance(part, inspect.NoneType))
            return _value(next(parts), word, default)
        case inspect.LiteralType():
            return next(value for value in reversed(kind.values) if value != default)
        case inspect.EnumType():
            return next(value for value in reversed(list(kind.cls)) if value != default)
        case inspect.BoolType():
            return default is not True
        case inspect.IntType():
            low, high = kind.ge if kind.ge is not None else 1, kind.le if kind.le is not None else 1 << 62
            return min(max(low, _number(word)), high)
        case inspect.FloatType():
            return _number(word) + 0.5
        case inspect.StrType():
            texts = (word.replace("_", "-") + "-1", *TEXTS)
            fits = (t for t in texts if kind.pattern is None or re.search(kind.pattern, t))
            return next(text for text in fits if text != default)
        case inspect.BytesType():
            length = kind.min_length or min(kind.max_length or 8, 8)
            return bytes((_number(word) + at) % 256 for at in range(length))
        case inspect.VarTupleType():
            return (_value(kind.item_type, word), _value(kind.item_type, word + "2"))[: kind.max_length]
        case inspect.ListType():
            return [_value(kind.item_type, word), _value(kind.item_type, word + "2")]
        case inspect.TupleType():
            values = [_value(part, f"{word}{at}") for at, part in enumerate(kind.item_types)]
            return tuple(sorted(values) if all(type(value) is int for value in values) else values)
        case inspect.DictType():
            return {_value(kind.key_type, word): _value(kind.value_type, word)}
        case inspect.StructType() | inspect.DataclassType():
            return kind.cls(**{f.name: _value(f.type, f.name, f.default) for f in kind.fields})
        case inspect.CustomType() if kind.cls is object:
            return word + "-1"
        case inspect.AnyType():
            return {"word": word, "numbers": [1, 2.5, -3]}
        case inspect.CustomType() if kind.cls is np.ndarray:
            return np.array([3, -1, _number(word)], np.int64)
        case _:
            raise TypeError(f"no sample of {kind}: write the value into the fixture by hand")


def plain(value: Any) -> Any:
    """Return a value as JSON has it: structs by the names of their fields on the wire, bytes in base64."""
    builtins = msgspec.to_builtins(value, str_keys=True, enc_hook=lambda column: column.tolist())
    # Through JSON: tuples become lists, as they are in the file of a fixture.
    return msgspec.json.decode(msgspec.json.encode(builtins))


def build(value: Any, kind: type) -> Any:
    """Return the value of `kind` that `plain` gave `value` for."""
    return msgspec.convert(value, kind, str_keys=True, dec_hook=_from_builtin)


def _from_builtin(kind: type, value: Any) -> Any:
    return np.array(value, np.int64) if (get_origin(kind) or kind) is np.ndarray else value
