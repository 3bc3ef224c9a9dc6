"""The source directories of this repository's packages."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(ROOT.glob("packages/*/src"))
"""The source directories of all packages."""


def source_path() -> str:
    """Return a PYTHONPATH that makes all packages of this tree importable."""
    return os.pathsep.join(map(str, SOURCES))
