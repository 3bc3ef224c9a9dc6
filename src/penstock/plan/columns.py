"""Values of columns as bytes: msgpack, each int64 column as its little-endian bytes.

In: a frozen dataclass of plain values and `I64` columns, or bytes that claim to be one. Out: the other.
Not here: what the numbers must satisfy (each value's own `check`).
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from penstock.errors import FormatError
from penstock.types import I64

T = TypeVar("T")

_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def decodable(kind: type[T]) -> type[T]:
    """Register a class for `decode`. msgspec sees it now, since it crashes if two threads decode a
    dataclass that is new to it (0.21)."""
    _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_to_column)
    return kind


def encode(value: object) -> bytes:
    """Return the value as bytes; equal values give equal bytes."""
    return msgspec.msgpack.encode(value, enc_hook=_to_bytes)


def decode(raw: bytes, kind: type[T]) -> T:
    """Return a value of `kind`, a `decodable`. FormatError where the bytes are none; its numbers are not checked."""
    try:
        return cast(T, _decoders[kind].decode(raw))
    except msgspec.DecodeError as error:
        raise FormatError(f"these bytes are no {kind.__name__}: {error}") from error


def _to_bytes(column: object) -> bytes:
    assert isinstance(column, np.ndarray) and column.dtype == np.int64
    # Little-endian whatever the machine: equal values must give equal bytes, for plans are compared by digest.
    return column.astype("<i8", copy=False).tobytes()


def _to_column(kind: type, raw: object) -> I64:
    if not isinstance(raw, bytes) or len(raw) % 8:
        raise ValueError("a column is bytes, eight a number")
    # On little-endian machines this copies nothing and is read-only, which suits a frozen value.
    return np.frombuffer(raw, "<i8").astype(np.int64, copy=False)
