"""The public verbs and what they return, nothing else; each room is imported when its first name is used.

`inspect` and `verify` need no torch; the others do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.fleet.attach import Attached, AttachReport, attach
    from penstock.fleet.join import Fleet, join
    from penstock.fleet.keeper import Keeper
    from penstock.fleet.report import FetchReport
    from penstock.loader.into import load_into
    from penstock.loader.load import TensorStream, Weights, load, stream
    from penstock.loader.report import Report
    from penstock.loader.safe_open import load_file, safe_open
    from penstock.loader.verify import Inspection, Verification, inspect, verify

_ROOMS = {
    "AttachReport": "fleet.attach",
    "Attached": "fleet.attach",
    "FetchReport": "fleet.report",
    "Fleet": "fleet.join",
    "Inspection": "loader.verify",
    "Keeper": "fleet.keeper",
    "Report": "loader.report",
    "TensorStream": "loader.load",
    "Verification": "loader.verify",
    "Weights": "loader.load",
    "attach": "fleet.attach",
    "inspect": "loader.verify",
    "join": "fleet.join",
    "load": "loader.load",
    "load_file": "loader.safe_open",
    "load_into": "loader.into",
    "safe_open": "loader.safe_open",
    "stream": "loader.load",
    "verify": "loader.verify",
}

__all__ = [
    "AttachReport",
    "Attached",
    "FetchReport",
    "Fleet",
    "Inspection",
    "Keeper",
    "Report",
    "TensorStream",
    "Verification",
    "Weights",
    "attach",
    "inspect",
    "join",
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
    return getattr(importlib.import_module(f"penstock.{_ROOMS[name]}"), name)
