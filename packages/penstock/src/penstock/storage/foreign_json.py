"""JSON objects in files of other programs, read and written as Python's json module does.

Those programs are mostly Python: `config.json` of Mamba 2 has `Infinity`, editors of Windows write a byte order mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.errors import FormatError

BOM = b"\xef\xbb\xbf"
_STRING_OR_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*"|-?Infinity|NaN', re.DOTALL)


def read_object(raw: bytes, uri: str, *, hint: str | None = None) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        FormatError: it is not JSON, or not an object.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"it is not a JSON object: {error}", uri=uri, hint=hint) from error
    if not isinstance(value, dict):
        raise FormatError(f"it is not a JSON object: it is a {type(value).__name__}", uri=uri, hint=hint)
    return value


def write_object(value: Mapping[str, Any], *, indent: int | None = 2, sort_keys: bool = False) -> bytes:
    """Return the text of a JSON object. TypeError: it holds something that JSON has not."""
    text = json.dumps(value, indent=indent, sort_keys=sort_keys, ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        # A lone surrogate, which only an escape can write.
        return json.dumps(value, indent=indent, sort_keys=sort_keys).encode()


def strict(raw: bytes) -> bytes:
    """Return the text without a byte order mark, with null for each NaN and infinity, which strict decoders refuse."""
    raw = raw.removeprefix(BOM)
    if b"NaN" not in raw and b"Infinity" not in raw:
        return raw
    return _STRING_OR_NUMBER.sub(lambda match: match[0] if match[0].startswith(b'"') else b"null", raw)
