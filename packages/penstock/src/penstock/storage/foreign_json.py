"""JSON objects in other programs' files, which may contain `Infinity` (Mamba 2's config) or a byte order mark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.errors import FormatError

BOM = b"\xef\xbb\xbf"
_STRING_OR_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*"|-?Infinity|NaN', re.DOTALL)


def read_object(raw: bytes, uri: str, *, hint: str | None = None) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        FormatError: the file is not JSON, or not an object.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the file is not a JSON object: {error}", uri=uri, hint=hint) from error
    if not isinstance(value, dict):
        raise FormatError(f"the file is not a JSON object, but a {type(value).__name__}", uri=uri, hint=hint)
    return value


def write_object(value: Mapping[str, Any], *, indent: int | None = 2, sort_keys: bool = False) -> bytes:
    """Return a JSON object as UTF-8 text. Raises TypeError if JSON cannot hold a value."""
    text = json.dumps(value, indent=indent, sort_keys=sort_keys, ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        # Only an escape can represent a lone surrogate.
        return json.dumps(value, indent=indent, sort_keys=sort_keys).encode()


def strict(raw: bytes) -> bytes:
    """Return JSON for strict decoders, without a byte order mark and with null for NaN and infinity."""
    raw = raw.removeprefix(BOM)
    if b"NaN" not in raw and b"Infinity" not in raw:
        return raw
    return _STRING_OR_NUMBER.sub(lambda match: match[0] if match[0].startswith(b'"') else b"null", raw)
