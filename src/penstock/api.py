"""The public verbs and what they return, nothing else; each room is imported when its first name is used.

`inspect` and `verify` need no torch; the others do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.loader.into import load_into
    from penstock.loader.load import TensorStream, Weights, load, stream
    from penstock.loader.report import Report
    from penstock.loader.safe_open import load_file, safe_open
    from penstock.loader.verify import Inspection, Verification, inspect, verify

_ROOMS = {
    "Inspection": "verify",
    "Report": "report",
    "TensorStream": "load",
    "Verification": "verify",
    "Weights": "load",
    "inspect": "verify",
    "load": "load",
    "load_file": "safe_open",
    "load_into": "into",
    "safe_open": "safe_open",
    "stream": "load",
    "verify": "verify",
}

__all__ = [
    "Inspection",
    "Report",
    "TensorStream",
    "Verification",
    "Weights",
    "inspect",
    "load",
    "load_file",
    "load_into",
    "safe_open",
    "stream",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"penstock.loader.{_ROOMS[name]}"), name)
