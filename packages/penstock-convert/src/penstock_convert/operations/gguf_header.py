"""Write the header of a GGUF file, version 3 and little-endian."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.storage.gguf import ALIGNMENT
from penstock.storage.headers import GGUF_MAGIC

_VERSION = 3
# Numbers that stand for the value types in the metadata.
_UINT32, _STRING = 4, 8


@dataclass(frozen=True, slots=True)
class Info:
    """A tensor in a header. `offset` is relative to the first tensor's bytes, and `shape` is in elements."""

    name: str
    number: int
    shape: tuple[int, ...]
    offset: int


def text_field(key: str, value: str) -> bytes:
    """Encode a metadata entry of type string."""
    return _string(key) + struct.pack("<I", _STRING) + _string(value)


def number_field(key: str, value: int) -> bytes:
    """Encode a metadata entry of type uint32."""
    return _string(key) + struct.pack("<II", _UINT32, value)


def encode_header(fields: Sequence[bytes], infos: Sequence[Info]) -> bytes:
    """Return the header of a file with padding, up to the first tensor's bytes.

    Args:
        fields: encoded metadata entries.
        infos: the tensors in file order.
    """
    parts = [GGUF_MAGIC, struct.pack("<IQQ", _VERSION, len(infos), len(fields)), *fields]
    for info in infos:
        dims = info.shape[::-1]
        numbers = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, info.number, info.offset)
        parts.append(_string(info.name) + numbers)
    raw = b"".join(parts)
    return raw + bytes(-len(raw) % ALIGNMENT)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
