"""Where the packages of this repository are."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(ROOT.glob("packages/*/src"))
"""The source directories of all packages."""


def source_path() -> str:
    """Return a PYTHONPATH with which a process imports all packages of this tree."""
    return os.pathsep.join(map(str, SOURCES))
